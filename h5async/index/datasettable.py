"""Defines `Datasets`: the table of the datasets that hold the samples of a field.

Thousands of datasets of one kind, in files or in groups of a file, differ in length and address.
Here, the common facts are one layout, and the differences are arrays.

Also finds units: groups of samples that are stored together, such as in one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.tables import (
    WHOLE,
    ChunkTable,
    Int64s,
    PairedRuns,
    Piece,
    Segments,
    repetitions,
)
from h5async.io.source import FileStamp

# Facts in which datasets of a kind differ, and those that make a dataset a kind of its own.
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
    """Return whether the extent in the file cannot be derived from the shape."""
    own = layout.shape[: len(layout.shape) - layout.extra_dims]
    return layout.indexed is not None and layout.indexed.shape not in (own, own[1:])


class _Kinds:
    """Numbers the kinds of datasets: those of a kind differ in `_DIFFERENT` facts alone."""

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
    files: tuple[tuple[str, FileStamp], ...]  # names and stamps

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
        """Return the columns of `count` consecutive datasets."""
        begin = self.begin[first : first + count + 1]
        found = {name: getattr(self, name)[first : first + count] for name in _PER_DATASET}
        here, is_sparse = slice(*begin[[0, -1]].tolist()), bool(found["is_sparse"].any())
        chunks = self.chunks.part(here, is_sparse=is_sparse)
        return self._replace(**found, begin=begin - begin[0], chunks=chunks)


_PER_DATASET = "kind", "file", "paths", "rows", "offset", "stored_nbytes", "is_sparse"


class Datasets(Sequence[DatasetLayout]):
    """Datasets that hold the samples of a field: a table of extents. Immutable, picklable.

    Facts that many have in common are stored once, in `kinds`; the differences are arrays. So each
    further dataset costs a few numbers. Objects for datasets are made on request.
    """

    def __init__(self, kinds: Sequence[DatasetLayout], columns: Columns) -> None:
        self.kinds = tuple(kinds)
        self.columns = columns
        self._made: dict[int, DatasetLayout] = {}  # so that a dataset is always one object
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
        """Return a fact of each dataset, (n,), which is the same for all of a kind."""
        return np.array([fact(kind) for kind in self.kinds], dtype)[self.columns.kind]

    def _new(self, number: int) -> DatasetLayout:
        kind = self.columns.kind[number]
        like = self.kinds[kind]
        return like if self._is_single[kind] else self.columns.layout(number, like)

    @cached_property
    def largest(self) -> list[tuple[DatasetLayout, int]]:
        """The dataset of each kind with the most rows, and the one with the largest stored chunk.

        No others need more memory. Each comes with the number of datasets that it stands for.
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
    """Return the segments of all samples, and the datasets that hold them, maybe itself."""
    if layout.segments is not None:
        assert isinstance(layout.datasets, Datasets)
        return layout.segments, layout.datasets
    one = np.array([[0], [layout.num_samples], [0], [1], [0], [0]], np.int64)
    several = one[:, :1] if layout.num_samples else one[:, :0]
    return Segments.of(several, (WHOLE,)), Datasets.of([layout])


def kinds_of(layout: DatasetLayout) -> list[tuple[DatasetLayout, int]]:
    """Return leaves, each with the number of similar leaves that need no more memory."""
    if layout.segments is None:
        return [(layout, 1)]
    return table_of(layout)[1].largest


def pieces_read(layout: DatasetLayout) -> list[tuple[DatasetLayout, int]]:
    """Return a dataset of each kind, and the number of pieces read per row."""
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
    for a, part in zip(rest, piece.source_region, strict=False):  # the rest are those of a member
        wanted, size = range(layout.shape[a])[part], layout.piece_shape[a]
        found *= min(len(wanted), wanted[-1] // size - wanted[0] // size + 1) if wanted else 0
    return found


def shared(layout: DatasetLayout) -> DatasetLayout:
    """Return the layout of rows that several samples share."""
    datasets = layout.datasets
    if isinstance(datasets, Datasets):
        datasets = Datasets([shared(kind) for kind in datasets.kinds], datasets.columns)
    return layout.changed(datasets=datasets, is_shared=True)


# --- units ----------------------------------------------------------------------------------------

_UNCHUNKED_UNIT_NBYTES = 1 << 20  # a read of this size costs little more per byte


def unit_nbytes(layout: DatasetLayout) -> int:
    """Return the decoded bytes of a unit that are kept for several batches."""
    if layout.segments is not None:
        several = (
            unit_nbytes(kind) // max(1, kind.num_pieces) * pieces
            for kind, pieces in pieces_read(layout)
        )
        return max(layout.segments.kept_nbytes, *several)
    if not layout.filters:
        return 0
    if not layout.is_shared and layout.rows_are_whole and layout.chunk_shape[0] == 1:
        return 0  # each row is one chunk
    nbytes: int = layout.chunk_nbytes
    if layout.member and layout.stored_itemsize:  # HDF5 decodes the whole compound
        cells = layout.chunk_shape[: len(layout.chunk_shape) - layout.extra_dims]
        nbytes = math.prod(cells) * layout.stored_itemsize
    return nbytes * layout.num_pieces


def unit_bounds(layout: DatasetLayout, row_nbytes: int = 0) -> Int64s:
    """Return the bounds of units: int64 (n + 1,), strictly ascending from 0 to `num_samples`.

    `row_nbytes` are the delivered bytes of a sample; 0 for those of a row here.
    """
    size, count = _unit_rows(layout, row_nbytes), layout.num_samples
    bounds = [np.array([0, count], np.int64)]
    if layout.segments is None or layout.chunk_shape:
        bounds.append(np.arange(0, count, size, dtype=np.int64))
    else:
        bounds.append(even_bounds(layout.segments.even, size))
        cuts, rows = _cuts_of(layout, row_nbytes)
        bounds.append(cuts.bounds(lambda which, unit: unit * rows[which]))
    return np.unique(np.concatenate(bounds))


def sample_bounds(layout: DatasetLayout) -> Int64s:
    """Return `unit_bounds` in samples of the field, which may be several rows."""
    bounds = unit_bounds(layout)
    if not layout.is_ragged:
        return bounds
    starts = layout.starts()
    return np.unique(np.append(np.searchsorted(starts[:-1], bounds), [0, starts.size - 1]))


def most_units(layout: DatasetLayout) -> int:
    """Return an upper limit of the number of units in `unit_bounds`, without listing them."""
    size, count = _unit_rows(layout, 0), layout.num_samples
    if layout.segments is None or layout.chunk_shape:
        return 1 + count // size
    of_even = sum(1 + (end - begin) // (own or size) for begin, end, own in layout.segments.even)
    return 1 + of_even + _cuts_of(layout, 0)[0].most


def even_bounds(even: Sequence[tuple[int, int, int]], size: int) -> Int64s:
    """Return the bounds within ranges (`Segments.even`); those without a size have `size`."""
    found = [np.arange(begin, end, own or size) for begin, end, own in even]
    return np.concatenate([*found, np.array([end for _, end, _ in even])]).astype(np.int64)


def even_ranges(bounds: Int64s) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges with these bounds; neighbouring units of equal size make one range."""
    size = np.diff(bounds)
    at = np.flatnonzero(np.diff(size, prepend=-1))
    ends = bounds[np.append(at[1:], size.size)]
    return tuple(zip(bounds[at].tolist(), ends.tolist(), size[at].tolist(), strict=True))


def bounds_behind(runs: PairedRuns, edges: Int64s) -> Int64s:
    """Return the bounds of units in samples; `edges` are the bounds in rows of the runs."""
    _, length, row, step = runs
    unit = np.searchsorted(edges, row, side="right") - 1
    last = np.searchsorted(edges, row + (length - 1) * step, side="right") - 1
    return _Cuts(runs, unit, last, np.zeros(max(0, runs.size - 1), np.bool_)).bounds(
        lambda which, unit: edges[unit]
    )


def _unit_rows(layout: DatasetLayout, row_nbytes: int) -> int:
    if layout.chunk_shape:
        return layout.chunk_shape[layout.sample_axis]
    return max(1, _UNCHUNKED_UNIT_NBYTES // max(1, row_nbytes or layout.row_nbytes))


def _cuts_of(layout: DatasetLayout, row_nbytes: int) -> tuple[_Cuts, Int64s]:
    """Return where units cut the segments of a layout, and the rows per unit of each segment."""
    segments, datasets = table_of(layout)
    if segments.even:  # which has all bounds
        segments = segments.at(np.zeros(0, np.int64))
    segments = segments.at(np.lexsort((segments.first, segments.piece, segments.dataset)))
    row_nbytes = row_nbytes or layout.row_nbytes
    sizes = datasets.by_kind(lambda kind: _unit_rows(kind, row_nbytes), np.int64)
    size = sizes[segments.dataset]
    runs = PairedRuns(segments.first, segments.length, segments.row, segments.step)
    is_other = (np.diff(segments.dataset) != 0) | (np.diff(segments.piece) != 0)
    last = (runs.row + (runs.length - 1) * runs.step) // size
    return _Cuts(runs, runs.row // size, last, is_other), size


class _Cuts:
    """Where units of datasets cut runs of samples.

    Samples between two samples of a unit belong to it, unless another dataset holds them. `unit`
    and `last` are the units of the first and the last row of each run; `is_other`, bool (n - 1,),
    says whether a run lies in another place than the one before.
    """

    def __init__(
        self, runs: PairedRuns, unit: Int64s, last: Int64s, is_other: NDArray[np.bool_]
    ) -> None:
        self._runs, self._unit, self._count = runs, unit, last - unit
        self._is_new = np.ones(runs.size + 1, np.bool_)
        self._is_new[1:-1] = (last[:-1] != unit[1:]) | is_other

    @property
    def most(self) -> int:
        """The maximum number of bounds."""
        return 2 * self._runs.size + int(self._count.sum())

    def bounds(self, edge: Callable[[Int64s, Int64s], Int64s]) -> Int64s:
        """Return the samples that bound units.

        `edge(runs, units)` returns the first row of each unit, by the numbers of run and unit.
        """
        first, length, row, step = self._runs
        which, ordinal = repetitions(self._count)
        begin = edge(which, self._unit[which] + 1 + ordinal)
        inside = first[which] - (row[which] - begin) // step[which]
        ends = (first + length)[self._is_new[1:]]
        return np.concatenate([first[self._is_new[:-1]], ends, inside]).astype(np.int64)
