"""Defines `Datasets`: the table of the datasets that hold the samples of a field.

Thousands of datasets of one kind, in files or in groups of a file, differ in length and address.
Here, the common facts are one layout, and the differences are arrays. A part is cut out of all rows
of a field (`cut_rows`) by smaller pieces of its segments; the rest is neither read nor decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.segments import WHOLE, Int64s, Piece, Segments, extents_of, ranges_of
from h5async.io.source import FileStamp

# What datasets of a kind differ in, and facts that only a kind of its own may have.
_DIFFERENT = "file", "stamp", "path", "shape", "offset", "stored_nbytes", "chunks", "indexed"
_OWN = "values", "datasets", "sources", "attached", "heaps", "sequences", "spans", "lengths"
_NOT_SAME = *_DIFFERENT, *_OWN, "segments", "fill"
_SAME = attrgetter(*(one.name for one in fields(DatasetLayout) if one.name not in _NOT_SAME))


def is_own_kind(layout: DatasetLayout) -> bool:
    """Return whether a layout has facts that no other dataset shares."""
    members = layout.__dict__
    if any(members[name] is not None and len(members[name]) for name in _OWN):
        return True
    return has_own_extent(layout)


def has_own_extent(layout: DatasetLayout) -> bool:
    """Return whether the extent in the file cannot be told from the shape."""
    own = layout.shape[: len(layout.shape) - layout.extra_dims]
    return layout.indexed is not None and layout.indexed.shape not in (own, own[1:])


class _Kinds:
    """Numbers the kinds of datasets, which differ in `_DIFFERENT` facts alone."""

    def __init__(self) -> None:
        self.found: list[DatasetLayout] = []
        self._numbers: dict[Any, int] = {}

    def number(self, layout: DatasetLayout) -> int:
        """Return the number of a layout's kind, which is added if new."""
        key: Any = id(layout)
        if not is_own_kind(layout):
            axis, shape, indexed = layout.sample_axis, layout.shape, layout.indexed
            identity = indexed and (indexed.digest, len(indexed.shape))
            rows = shape[:axis], shape[axis + 1 :], layout.fill.tobytes()
            key = _SAME(layout), rows, identity
        number = self._numbers.setdefault(key, len(self.found))
        if number == len(self.found):
            self.found.append(layout)
        return number


class Columns(NamedTuple):
    """The facts in which datasets of a kind differ: an item for each dataset, (n,)."""

    kind: NDArray[np.int32]  # the number of its kind,
    file: NDArray[np.int32]  # and of its file in `files`
    paths: Sequence[str]  # in their files
    rows: Int64s  # extents of their sample dimension
    offset: Int64s  # as in `DatasetLayout`
    stored_nbytes: Int64s
    begin: Int64s  # (n + 1,): where the chunks of each begin in `chunks`
    is_sparse: NDArray[np.bool_]  # chunks are looked up by number: not all are allocated
    chunks: ChunkTable  # concatenated; `index` is None if no dataset is sparse
    files: tuple[tuple[str, FileStamp], ...]  # and stamps of these

    def layout(self, number: int, like: DatasetLayout) -> DatasetLayout:
        """Return the layout of a dataset that is like another one."""
        axis, chunks, indexed = like.sample_axis, like.chunks, like.indexed
        shape = (*like.shape[:axis], int(self.rows[number]), *like.shape[axis + 1 :])
        if chunks is not None:
            here = slice(*self.begin[number : number + 2].tolist())
            chunks = self.chunks.part(here, is_sparse=bool(self.is_sparse[number]))
        if indexed is not None:
            own = shape[: len(shape) - like.extra_dims]
            is_one_sample = len(own) > len(indexed.shape)
            indexed = Indexed(indexed.digest, own[1:] if is_one_sample else own)
        file, stamp = self.files[self.file[number]]
        return like.changed(
            file=file,
            stamp=stamp,
            path=self.paths[number],
            shape=shape,
            offset=int(self.offset[number]),
            stored_nbytes=int(self.stored_nbytes[number]),
            chunks=chunks,
            indexed=indexed,
        )

    def part(self, first: int, count: int) -> Columns:
        """Return the columns of some datasets that follow each other."""
        begin = self.begin[first : first + count + 1]
        found = {name: getattr(self, name)[first : first + count] for name in _PER_DATASET}
        here, is_sparse = slice(*begin[[0, -1]].tolist()), bool(found["is_sparse"].any())
        chunks = self.chunks.part(here, is_sparse=is_sparse)
        return self._replace(**found, begin=begin - begin[0], chunks=chunks)


_PER_DATASET = "kind", "file", "paths", "rows", "offset", "stored_nbytes", "is_sparse"


class Datasets(Sequence[DatasetLayout]):
    """Datasets that hold the samples of a field: a table of extents. Immutable, picklable.

    Facts that many have in common are stored once, in `kinds`; the differences are arrays. So
    another dataset costs a few numbers. A dataset becomes an object on request.
    """

    def __init__(self, kinds: Sequence[DatasetLayout], columns: Columns) -> None:
        self.kinds = tuple(kinds)
        self.columns = columns
        self._made: dict[int, DatasetLayout] = {}  # so that a dataset is one object
        self._is_single = np.bincount(columns.kind, minlength=len(kinds)) == 1
        self._is_single |= np.array([is_own_kind(kind) for kind in kinds], np.bool_)

    @classmethod
    def of(cls, layouts: Sequence[DatasetLayout]) -> Datasets:
        """Return the table of datasets that hold their samples themselves."""
        kinds, files = _Kinds(), dict[tuple[str, FileStamp], int]()
        tables = [layout.chunks for layout in layouts if layout.chunks is not None]
        counts = [0 if y.chunks is None else y.chunks.offset.size for y in layouts]
        sparse = [y.chunks is not None and y.chunks.index is not None for y in layouts]
        columns = Columns(
            np.array([kinds.number(layout) for layout in layouts], np.int32),
            np.array([files.setdefault((y.file, y.stamp), len(files)) for y in layouts], np.int32),
            [layout.path for layout in layouts],
            np.array([layout.num_samples for layout in layouts], np.int64),
            np.array([layout.offset for layout in layouts], np.int64),
            np.array([layout.stored_nbytes for layout in layouts], np.int64),
            np.cumsum([0, *counts], dtype=np.int64),
            np.array(sparse, np.bool_),
            ChunkTable.joined(tables),
            tuple(files),
        )
        return cls(kinds.found, columns)

    @classmethod
    def joined(cls, several: Sequence[Datasets]) -> Datasets:
        """Return the datasets of several tables, in order."""
        if len(several) == 1:
            return several[0]
        kinds, files = _Kinds(), dict[tuple[str, FileStamp], int]()
        moved: list[Columns] = []
        for table in several:
            one = table.columns
            kind = np.array([kinds.number(kind) for kind in table.kinds], np.int32)
            file = np.array([files.setdefault(f, len(files)) for f in one.files], np.int32)
            moved.append(one._replace(kind=kind[one.kind], file=file[one.file]))
        arrays = {
            name: np.concatenate([getattr(one, name) for one in moved])
            for name in _PER_DATASET
            if name != "paths"
        }
        counts = np.concatenate([one.begin[1:] - one.begin[:-1] for one in moved])
        columns = Columns(
            **arrays,
            paths=[path for one in moved for path in one.paths],
            begin=np.concatenate(([0], np.cumsum(counts))),
            chunks=ChunkTable.joined([one.chunks for one in moved]),
            files=tuple(files),
        )
        return cls(kinds.found, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the datasets that were made."""
        return Datasets, (self.kinds, self.columns)

    def __len__(self) -> int:
        return self.columns.kind.size

    @overload
    def __getitem__(self, key: int) -> DatasetLayout: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[DatasetLayout, ...]: ...
    def __getitem__(self, key: int | slice) -> DatasetLayout | tuple[DatasetLayout, ...]:
        """Return a dataset, the same object each time; or several."""
        if isinstance(key, slice):
            return tuple(self[i] for i in range(*key.indices(len(self))))
        number = range(len(self))[key]
        found = self._made.get(number)
        return self._made.setdefault(number, self._new(number)) if found is None else found

    def __iter__(self) -> Iterator[DatasetLayout]:
        return map(self.__getitem__, range(len(self)))

    def by_kind(self, fact: Callable[[DatasetLayout], Any], dtype: Any) -> NDArray[Any]:
        """Return a fact of each dataset, (n,), that those of a kind have in common."""
        return np.array([fact(kind) for kind in self.kinds], dtype)[self.columns.kind]

    def _new(self, number: int) -> DatasetLayout:
        kind = self.columns.kind[number]
        like = self.kinds[kind]
        return like if self._is_single[kind] else self.columns.layout(number, like)

    @cached_property
    def largest(self) -> list[tuple[DatasetLayout, int]]:
        """Those with the most rows of each kind, and those with the largest stored chunk.

        No other one needs more memory. With each comes the number of datasets that it stands for.
        """
        if self._is_single.all():
            return [(one, 1) for one in self]
        columns, found = self.columns, []
        counts, nbytes = np.diff(columns.begin), np.zeros(len(self), np.int64)
        if columns.begin[-1]:
            begin = columns.begin[:-1][counts > 0]
            nbytes[counts > 0] = np.maximum.reduceat(columns.chunks.nbytes, begin)
        order = np.argsort(columns.kind, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(columns.kind[order])) + 1):
            numbers = {int(here[column[here].argmax()]): 1 for column in (columns.rows, nbytes)}
            numbers[next(iter(numbers))] += here.size - len(numbers)
            found += [(self[number], count) for number, count in numbers.items()]
        return found


def table_of(layout: DatasetLayout) -> tuple[Segments, Datasets]:
    """Return the segments of all samples, and the datasets that hold them: itself, or others."""
    if layout.segments is not None:
        assert isinstance(layout.datasets, Datasets)
        return layout.segments, layout.datasets
    one = np.array([[0], [layout.num_samples], [0], [1], [0], [0]], np.int64)
    several = one[:, :1] if layout.num_samples else one[:, :0]
    return Segments.of(several, (WHOLE,)), Datasets.of([layout])


def kinds_of(layout: DatasetLayout) -> list[tuple[DatasetLayout, int]]:
    """Return leaves, each with the number of leaves like it that need no more memory."""
    if layout.segments is None:
        return [(layout, 1)]
    return table_of(layout)[1].largest


def pieces_read(layout: DatasetLayout) -> list[tuple[DatasetLayout, int]]:
    """Return a dataset of each kind, and the number of pieces that are read of each of its rows."""
    if layout.segments is None:
        return [(layout, layout.num_pieces)]
    segments, datasets = table_of(layout)
    kinds, count = datasets.kinds, [0] * len(datasets.kinds)
    of_kind = datasets.columns.kind[segments.dataset].astype(np.int64)
    for number in np.unique(of_kind * len(segments.pieces) + segments.piece).tolist():
        kind, piece = divmod(number, len(segments.pieces))
        count[kind] += _pieces_within(kinds[kind], segments.pieces[piece])
    return [(one, min(one.num_pieces, n)) for one, n in zip(kinds, count, strict=True)]


def _pieces_within(layout: DatasetLayout, piece: Piece) -> int:
    if piece.source_region is None:
        return layout.num_pieces
    rest, found = [a for a in range(len(layout.shape)) if a != layout.sample_axis], 1
    for a, part in zip(rest, piece.source_region, strict=False):  # behind them, those of a member
        wanted, size = range(layout.shape[a])[part], layout.piece_shape[a]
        found *= min(len(wanted), wanted[-1] // size - wanted[0] // size + 1) if wanted else 0
    return found


def shared(layout: DatasetLayout) -> DatasetLayout:
    """Return the layout of rows that several samples share."""
    datasets = layout.datasets
    if isinstance(datasets, Datasets):
        datasets = Datasets([shared(kind) for kind in datasets.kinds], datasets.columns)
    return layout.changed(datasets=datasets, is_shared=True)


# --- parts of rows --------------------------------------------------------------------------------

_NOTHING = -1


def cut_rows(layout: DatasetLayout, wanted: Sequence[range]) -> DatasetLayout:
    """Return the layout of a part of each row.

    Parameters
    ----------
    layout
        Of plain rows, possibly of several datasets.
    wanted
        The indices to keep, ascending and at least one, per dimension of a row.
    """
    if all(len(part) == size for part, size in zip(wanted, layout.row_shape, strict=True)):
        return layout
    segments, datasets = table_of(layout)
    axis, kept = layout.sample_axis, [len(part) for part in wanted]
    return layout.without_place(
        "files" if layout.segments is None else layout.storage,
        shape=(*kept[:axis], layout.num_samples, *kept[axis:]),
        segments=_cut_segments(layout, segments, datasets, wanted),
        datasets=datasets,
    )


def _cut_segments(
    layout: DatasetLayout, segments: Segments, datasets: Datasets, wanted: Sequence[range]
) -> Segments:
    """Return the segments of parts of rows; those that hold no part are left out."""
    kinds = datasets.kinds
    kind = datasets.columns.kind[segments.dataset].astype(np.int64)
    both, of_segment = np.unique(segments.piece * len(kinds) + kind, return_inverse=True)
    pieces: list[Piece] = []
    numbers = []
    for old, number in (divmod(one, len(kinds)) for one in both.tolist()):
        found = cut_piece(segments.pieces[old], kinds[number], layout.row_shape, wanted)
        numbers.append(_NOTHING if found is None else len(pieces))
        pieces += [] if found is None else [found]
    piece = np.array(numbers, np.int32)[of_segment.reshape(-1)]
    columns = (*segments.columns[:-1], piece)
    is_there = piece != _NOTHING
    return Segments.of(
        [column[is_there] for column in columns],
        tuple(pieces) or (WHOLE,),
        segments.even,
        segments.kept_nbytes,
    )


def part_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    """Return the dimensions of the part of a row of a dataset that a piece takes."""
    return tuple(extents_of(piece.source_region, _row_shape(source, piece)))


def cut_piece(
    piece: Piece, source: DatasetLayout, row_shape: tuple[int, ...], wanted: Sequence[range]
) -> Piece | None:
    """Return the part of a piece that lies in a part of its row; None if there is none.

    `row_shape` is that of the rows of which the piece is, and its new region is one of the part.
    """
    theirs = ranges_of(piece.source_region, _row_shape(source, piece))
    ours = ranges_of(piece.region, row_shape)
    # Dimensions of extent 1 may be missing in either.
    partners = iter([number for number, one in enumerate(theirs) if len(one) != 1])
    region = []
    for here, part in zip(ours, wanted, strict=True):
        partner = None if len(here) == 1 else next(partners)
        is_plain = here.start == 0 and here.step == 1
        common = part if is_plain and part.stop <= here.stop else _common(here, part)
        if not common:
            return None
        region.append(_positions(common, part))
        if partner is not None:
            theirs[partner] = theirs[partner][_positions(common, here)]
    is_all = all(len(range(len(w))[r]) == len(w) for r, w in zip(region, wanted, strict=True))
    taken = tuple(slice(one.start, one.stop, one.step) for one in theirs)
    return Piece(None if is_all else tuple(region), taken, piece.member)


def _row_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    """Return the dimensions of a row of a source, and of the member that is taken of it."""
    if piece.member is None:
        return source.row_shape
    assert source.dtype.fields is not None
    return (*source.row_shape, *source.dtype.fields[piece.member][0].shape)


def _common(one: range, other: range) -> range:
    """Return the numbers that two ascending ranges have in common."""
    found = np.intersect1d(np.asarray(one), np.asarray(other))
    return range(0) if not found.size else _as_range(*found[:2].tolist(), count=found.size)


def _positions(some: range, several: range) -> slice:
    """Return where the numbers of a range are in another one, which has all of them."""
    found = _as_range(*(several.index(n) for n in some[:2]), count=len(some))
    return slice(found.start, found.stop, found.step)


def _as_range(first: int, second: int | None = None, *, count: int) -> range:
    step = 1 if second is None else second - first
    return range(first, first + (count - 1) * step + 1, step)
