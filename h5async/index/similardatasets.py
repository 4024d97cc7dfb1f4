"""Defines `AlikeParts`: parts of a dataset that lie in many similar datasets.

Thousands of groups of a file hold datasets of one kind that differ in length and address. Here, the
common facts are one layout, and the differences are arrays; so another dataset costs a few numbers.
A part becomes an object on request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable, grid_of
from h5async.index.layout import DatasetLayout, Indexed, Part, PartTable
from h5async.index.slabs import Slab

Int64s = NDArray[np.int64]

_FEW = 16  # datasets: arrays do not pay for fewer
# The differences, and facts that a similar dataset must not have.
_DIFFERENT = ("path", "shape", "offset", "stored_nbytes", "chunks", "indexed")
_NOT_ALIKE = ("values", "parts", "sources", "attached", "heaps", "sequences", "spans")


class AlikeColumns(NamedTuple):
    """The differences between similar datasets.

    Attributes
    ----------
    paths
        Of the datasets.
    first, rows
        int64 (n,): the first sample of the whole that each holds, and the number of samples.
    offset, stored_nbytes
        int64 (n,): as in their layouts.
    chunks
        The chunk tables, concatenated, all of whole grids; None if they have no chunks.
    """

    paths: Sequence[str]
    first: Int64s
    rows: Int64s
    offset: Int64s
    stored_nbytes: Int64s
    chunks: ChunkTable | None


class AlikeParts(PartTable):
    """Parts that are whole datasets of one kind, concatenated. Immutable, picklable.

    Parameters
    ----------
    like
        The layout of one of the datasets.
    columns
        The differences.
    """

    def __init__(self, like: DatasetLayout, columns: AlikeColumns) -> None:
        self.like = like
        self.columns = columns
        self._made: dict[int, Part] = {}  # so that a dataset is one object, however often requested
        self.chunk_begin = np.zeros(columns.rows.size + 1, np.int64)
        np.cumsum(self.chunk_counts, out=self.chunk_begin[1:])

    @property
    def chunk_counts(self) -> Int64s:
        """int64 (n,): the number of chunks per dataset."""
        like, rows = self.like, self.columns.rows
        if not like.chunk_shape:
            return np.zeros(rows.size, np.int64)
        counts: Int64s = -(-rows // like.chunk_shape[0])
        for extent in grid_of(like.shape, like.chunk_shape)[1:]:
            counts = counts * extent
        return counts

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the parts that were made."""
        return AlikeParts, (self.like, self.columns)

    def __len__(self) -> int:
        return len(self.columns.paths)

    @overload
    def __getitem__(self, key: int) -> Part: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Part, ...]: ...
    def __getitem__(self, key: int | slice) -> Part | tuple[Part, ...]:
        """Return a part, the same object each time; or several."""
        if isinstance(key, slice):
            return tuple(self[i] for i in range(*key.indices(len(self))))
        number = range(len(self))[key]
        found = self._made.get(number)
        return self._made.setdefault(number, self._part(number)) if found is None else found

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def _part(self, number: int) -> Part:
        columns, like = self.columns, self.like
        first, rows = int(columns.first[number]), int(columns.rows[number])
        shape, chunks = (rows, *like.shape[1:]), columns.chunks
        if chunks is not None:
            here = slice(*self.chunk_begin[number : number + 2].tolist())
            columns_of = (chunks.offset[here], chunks.nbytes[here], chunks.filter_mask[here])
            chunks = ChunkTable(None, *columns_of)
        indexed = like.indexed
        if indexed is not None:
            indexed = Indexed(indexed.digest, shape[: len(shape) - like.extra_dims])
        source = like.changed(
            path=columns.paths[number],
            shape=shape,
            offset=int(columns.offset[number]),
            stored_nbytes=int(columns.stored_nbytes[number]),
            chunks=chunks,
            indexed=indexed,
        )
        return Part(source, Slab.run(first, first + rows), Slab.run(0, rows))

    @property
    def num_rows(self) -> int:
        """The rows of all parts together."""
        return int(self.columns.rows.sum())

    @property
    def largest(self) -> list[Part]:
        """The parts with the most rows, and with the largest stored chunk.

        No other one needs more memory.
        """
        numbers = [int(self.columns.rows.argmax())]
        if self.columns.chunks is not None:
            at = int(self.columns.chunks.nbytes.argmax())
            numbers.append(int(np.searchsorted(self.chunk_begin, at, side="right")) - 1)
        return [self[number] for number in dict.fromkeys(numbers)]

    def shared(self) -> AlikeParts:
        """Return the same parts of layouts that are `shared`."""
        return AlikeParts(self.like.shared(), self.columns)

    def moved(self, first: Int64s) -> AlikeParts:
        """Return the parts with other first samples, int64 (n,)."""
        return AlikeParts(self.like, self.columns._replace(first=first))


def alike_parts(parts: tuple[Part, ...] | PartTable) -> tuple[Part, ...] | PartTable:
    """Return parts as `AlikeParts` if they are whole datasets of one kind; otherwise unchanged."""
    if isinstance(parts, PartTable) or len(parts) < _FEW:
        return parts
    like = parts[0].source
    if like.fallback_reason is not None or like.sample_axis != 0:
        return parts
    if like.storage not in ("contiguous", "chunked") or not all(map(_is_whole, parts)):
        return parts
    sources = [part.source for part in parts]
    if not all(_are_alike(like, source) for source in sources):
        return parts
    numbers = [
        (part.samples.start, source.shape[0], source.offset, source.stored_nbytes)
        for part, source in zip(parts, sources, strict=True)
    ]
    first, rows, offset, stored = np.array(numbers, np.int64).T.copy()
    chunks = _joined([source.chunks for source in sources if source.chunks is not None])
    paths = [source.path for source in sources]
    return AlikeParts(like, AlikeColumns(paths, first, rows, offset, stored, chunks))


def _is_whole(part: Part) -> bool:
    rows = part.source.num_samples
    return (
        part.region is None
        and part.source_region is None
        and part.member is None
        and part.samples.is_run
        and part.source_samples == Slab.run(0, rows)
    )


def _is_plain(layout: DatasetLayout) -> bool:
    members = layout.__dict__
    return not any(members[name] is not None and len(members[name]) for name in _NOT_ALIKE)


def _are_alike(like: DatasetLayout, other: DatasetLayout) -> bool:
    """Return whether datasets differ only in the facts of `AlikeColumns`."""
    if not all(map(_is_plain, (like, other))):
        return False
    ours, theirs = like.__dict__, other.__dict__
    if other.chunks is not None and other.chunks.index is not None:
        return False
    if (like.chunks is None) != (other.chunks is None) or like.shape[1:] != other.shape[1:]:
        return False
    digest, rank = None if like.indexed is None else like.indexed.digest, len(other.shape)
    own = other.shape[: rank - other.extra_dims]
    if other.indexed != (None if digest is None else Indexed(digest, own)):
        return False
    return all(ours[name] is theirs[name] or ours[name] == theirs[name] for name in _SAME) and bool(
        like.fill is other.fill or like.fill.tobytes() == other.fill.tobytes()
    )


_SAME = [
    name
    for name in DatasetLayout.__dataclass_fields__
    if name not in (*_DIFFERENT, *_NOT_ALIKE, "fill")
]


def _joined(tables: Sequence[ChunkTable]) -> ChunkTable | None:
    if not tables:
        return None
    return ChunkTable(
        None,
        np.concatenate([table.offset for table in tables]),
        np.concatenate([table.nbytes for table in tables]),
        np.concatenate([table.filter_mask for table in tables]),
    )


def kinds_of(layout: DatasetLayout) -> Iterator[tuple[DatasetLayout, int]]:
    """Yield leaves, each with the number of leaves like it that need no more memory."""
    if not layout.parts:
        yield layout, 1
    elif isinstance(layout.parts, AlikeParts):
        for number, part in enumerate(layout.parts.largest):
            others = len(layout.parts) - len(layout.parts.largest)
            yield part.source, 1 + (0 if number else others)
    else:
        yield from itertools.chain.from_iterable(kinds_of(part.source) for part in layout.parts)
