"""Defines the tables of a layout: `ChunkTable`, chunks of a dataset, and `Segments`. Pure arrays.

Chunks make a grid; a chunk's number is that of its cell in C order.

Segments map the samples of a field to rows of datasets. Segments of segments are composed at once,
so the table is always flat. They are made from pairs of selections of indices along one dimension:
a `Slab` is a regular selection, `Blocks` any other. `runs_between` pairs the indices of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Region = tuple[slice, ...] | None

MOST_RUNS = 1 << 22  # of 32 bytes each; longer lists are not made


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the allocated chunks of a dataset lie: parallel arrays, sorted by `index`.

    `index` is the chunk's number in the C-ordered grid; None if all are allocated, so that the
    number is the index into the arrays. `nbytes` and `filter_mask` may each be one number in memory
    (a stride of 0) if all are equal.
    """

    index: NDArray[np.int64] | None
    offset: NDArray[np.int64]  # address in the file
    nbytes: NDArray[np.int64]  # stored size
    filter_mask: NDArray[np.uint32]  # bit i is set if filter i of the pipeline was not applied

    def shortened(self) -> ChunkTable:
        """Return the same table; columns of equal numbers take the memory of one number."""
        nbytes, filter_mask = shortened(self.nbytes), shortened(self.filter_mask)
        return ChunkTable(self.index, self.offset, nbytes, filter_mask)

    @classmethod
    def joined(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """Return several tables, concatenated; `index` is None if no table has one."""
        if len(tables) == 1:
            return tables[0]
        index = None
        if any(table.index is not None for table in tables):
            index = np.concatenate([table.numbers for table in tables])
        return cls(
            index,
            _concatenated([table.offset for table in tables], "i8"),
            _concatenated([table.nbytes for table in tables], "i8"),
            _concatenated([table.filter_mask for table in tables], "u4"),
        )

    @property
    def numbers(self) -> NDArray[np.int64]:
        """int64: the number of each chunk."""
        return np.arange(self.offset.size) if self.index is None else self.index

    def part(self, here: slice, *, is_sparse: bool) -> ChunkTable:
        """Return a part of a joined table, such as that of one dataset."""
        return ChunkTable(
            self.numbers[here] if is_sparse else None,
            self.offset[here],
            self.nbytes[here],
            self.filter_mask[here],
        )

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of chunks `numbers` in the arrays; -1 for unallocated ones."""
        if self.index is None:
            return numbers
        if not self.index.size:
            return np.full(numbers.shape, -1, np.int64)
        at = np.minimum(np.searchsorted(self.index, numbers), self.index.size - 1)
        return np.where(self.index[at] == numbers, at, -1)


def _concatenated(columns: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Concatenate columns; equal numbers take the memory of one."""
    firsts = {int(column[0]) for column in columns if column.size}
    if len(firsts) == 1 and all(not any(c.strides) for c in columns if c.size > 1):
        return repeated(firsts.pop(), sum(column.size for column in columns), dtype)
    return np.concatenate([np.zeros(0, dtype), *columns])


@lru_cache(maxsize=256)
def repeated(value: int, count: int, dtype: str) -> NDArray[Any]:
    """Return an array of one repeated number that takes the memory of one."""
    one = np.array([value], dtype)
    one.flags.writeable = False
    return np.ndarray((count,), dtype, one.data, 0, (0,)) if count else one[:0]


def shortened(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column that takes the memory of one number if all are equal."""
    if column.size < 2 or (column != column[0]).any():
        return column
    return repeated(int(column[0]), column.size, column.dtype.str)


def grid_of(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunk_shape, strict=True))


# --- selections -----------------------------------------------------------------------------------


class TooManyRunsError(Exception):
    """There are more than `MOST_RUNS` runs; none was listed."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A regular selection along one dimension: `count` blocks of `block` indices, `stride` apart.

    HDF5 calls it a hyperslab. The k-th index that it selects has the ordinal k.
    """

    start: int
    stride: int
    count: int
    block: int

    @classmethod
    def run(cls, start: int, stop: int) -> Slab:
        """Return the selection of all indices from `start` to before `stop`."""
        return cls(start, max(1, stop - start), 1, stop - start)

    @property
    def size(self) -> int:
        """The number of selected indices."""
        return self.count * self.block

    @property
    def end(self) -> int:
        """One past the last index; 0 if none is selected."""
        return self.start + (self.count - 1) * self.stride + self.block if self.size else 0

    @property
    def is_run(self) -> bool:
        """Whether the indices are adjacent."""
        return self.count == 1 or self.stride == self.block

    @property
    def num_blocks(self) -> int:
        """The number of runs of adjacent indices."""
        return 1 if self.is_run else self.count

    def blocks(self) -> tuple[Int64s, Int64s]:
        """Return the first index and the length of each run of adjacent indices."""
        if self.is_run:
            return np.array([self.start], np.int64), np.array([self.size], np.int64)
        first = self.start + np.arange(self.count, dtype=np.int64) * self.stride
        return first, np.full(self.count, self.block, np.int64)

    def as_slice(self) -> slice | None:
        """Return an equivalent slice, or None."""
        if self.is_run:
            return slice(self.start, self.start + self.size)
        if self.block == 1:
            return slice(self.start, self.start + (self.count - 1) * self.stride + 1, self.stride)
        return None

    def at(self, ordinal: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of some ordinals."""
        block, inside = np.divmod(ordinal, self.block)
        return self.start + block * self.stride + inside


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Any indices along one dimension: blocks of adjacent ones, concatenated in any order.

    `first`, int64 (n,), is the first index of each block; `begin`, int64 (n + 1,), its ordinal,
    followed by the size.
    """

    first: Int64s
    begin: Int64s
    is_run: ClassVar[bool] = False  # a run is a `Slab`

    @classmethod
    def of(cls, first: Int64s, length: Int64s) -> Slab | Blocks:
        """Return a selection of one block or more; adjacent blocks are joined."""
        is_new = np.concatenate(([True], first[1:] != first[:-1] + length[:-1]))
        begin = np.cumsum(length) - length
        if np.count_nonzero(is_new) == 1:
            return Slab.run(int(first[0]), int(first[0] + length.sum()))
        return cls(first[is_new], np.append(begin[is_new], length.sum()))

    @property
    def size(self) -> int:
        """The number of selected indices."""
        return int(self.begin[-1])

    @property
    def start(self) -> int:
        """The smallest index."""
        return int(self.first.min())

    @property
    def end(self) -> int:
        """One past the largest index."""
        return int((self.first + np.diff(self.begin)).max())

    @property
    def num_blocks(self) -> int:
        """The number of runs of adjacent indices."""
        return self.first.size

    def blocks(self) -> tuple[Int64s, Int64s]:
        """Return the first index and the length of each run of adjacent indices."""
        return self.first, np.diff(self.begin)

    def at(self, ordinal: Int64s) -> Int64s:
        """Return the indices of some ordinals."""
        block = np.searchsorted(self.begin, ordinal, side="right") - 1
        return self.first[block] + ordinal - self.begin[block]


Selection = Slab | Blocks


class PairedRuns(NamedTuple):
    """Runs of indices, each paired with indices of another selection: int64 (n,)."""

    first: Int64s  # first index of each run
    length: Int64s
    row: Int64s  # the partner of the first index,
    step: Int64s  # and the distance between partners

    @property
    def size(self) -> int:
        """The number of runs."""
        return self.first.size

    def single_steps(self) -> PairedRuns:
        """Return the same pairs; runs whose rows are not adjacent become runs of one index.

        TooManyRunsError if there would be more than `MOST_RUNS`.
        """
        if (self.step == 1).all():
            return self
        times = np.where(self.step == 1, 1, self.length)
        if (times > MOST_RUNS).any() or times.sum() > MOST_RUNS:
            raise TooManyRunsError
        which, inside = repetitions(times)
        return PairedRuns(
            self.first[which] + inside,
            np.where(self.step[which] == 1, self.length[which], 1),
            self.row[which] + inside * self.step[which],
            np.ones(which.size, np.int64),
        )


def repetitions(count: Int64s) -> tuple[Int64s, Int64s]:
    """Repeat item i `count[i]` times; return the item of each repetition, and its ordinal in it."""
    which = np.repeat(np.arange(count.size), count)
    return which, np.arange(which.size) - (np.cumsum(count) - count)[which]


def most_runs(ours: Selection, theirs: Selection) -> int:
    """Return the maximum number of runs from `runs_between`, without listing them."""
    if ours.is_run and isinstance(theirs, Slab) and theirs.block == 1:
        return 1
    return ours.num_blocks + theirs.num_blocks


def runs_between(ours: Selection, theirs: Selection) -> PairedRuns:
    """Pair the indices of two selections by their ordinals.

    TooManyRunsError if there would be more than `MOST_RUNS` runs.
    """
    if most_runs(ours, theirs) > MOST_RUNS:
        raise TooManyRunsError
    size = min(ours.size, theirs.size)
    if not size:
        return PairedRuns(*np.zeros((4, 0), np.int64))
    if most_runs(ours, theirs) == 1 or (ours.is_run and theirs.is_run):
        step = theirs.stride if isinstance(theirs, Slab) and not theirs.is_run else 1
        return PairedRuns(*np.array([[ours.start], [size], [theirs.start], [step]], np.int64))
    begins = (np.cumsum(length) - length for _, length in (ours.blocks(), theirs.blocks()))
    edges = np.unique(np.concatenate([*begins, [size]]))
    edges = edges[edges <= size]
    begin = edges[:-1]
    return PairedRuns(
        ours.at(begin), np.diff(edges), theirs.at(begin), np.ones(begin.size, np.int64)
    )


def region_key(region: Region) -> Any:
    """Return a hashable key; slices are not hashable before Python 3.12."""
    return None if region is None else tuple((s.start, s.stop, s.step) for s in region)


def ranges_of(region: Region, shape: tuple[int, ...]) -> list[range]:
    """Return the indices along each dimension of a region of rows of some shape."""
    pieces = region or (slice(None),) * len(shape)
    return [range(n)[one] for n, one in zip(shape, pieces, strict=True)]


def extents_of(region: Region, shape: tuple[int, ...]) -> list[int]:
    """Return the extents of a region of rows of some shape."""
    return list(map(len, ranges_of(region, shape)))


class Piece(NamedTuple):
    """A piece of a row of the whole dataset, and of a row of the dataset that holds it.

    Both regions are a slice per dimension, without that of the samples; None means the whole row.
    The extents of both are equal, apart from extents of 1.
    """

    region: Region = None
    source_region: Region = None
    member: str | None = None  # the delivered member of the source's compound type

    @property
    def is_whole(self) -> bool:
        """Whether whole rows are delivered."""
        return self == (None, None, None)

    @property
    def key(self) -> Any:
        """A hashable key."""
        return region_key(self.region), region_key(self.source_region), self.member


WHOLE = Piece()


@dataclass(frozen=True, eq=False)
class Segments:
    """Parallel arrays, sorted by `first`. Segments of one region do not overlap.

    Attributes
    ----------
    first, length
        int64 (n,): the first sample of each segment, and the number of samples, above 0.
    row, step
        int64 (n,): the row of the first sample in its dataset, and the distance to the next row: 0
        if all samples of the segment have the same row.
    dataset
        int32 (n,): the number of the dataset.
    piece
        int32 (n,): the number of the piece.
    pieces
        The pieces.
    even
        Ranges of samples that are evenly divided into units, and the samples per unit (0: by their
        bytes), for datasets that are not read as they are stored. Then units have no other bounds.
    kept_nbytes
        The decoded bytes of a unit of datasets that are not read as they are stored.
    """

    first: Int64s
    length: Int64s
    row: Int64s
    step: Int64s
    dataset: Int32s
    piece: Int32s
    pieces: tuple[Piece, ...] = (WHOLE,)
    even: tuple[tuple[int, int, int], ...] = ()
    kept_nbytes: int = 0

    @classmethod
    def of(
        cls,
        columns: Iterable[NDArray[Any]],
        pieces: tuple[Piece, ...],
        even: tuple[tuple[int, int, int], ...] = (),
        kept_nbytes: int = 0,
    ) -> Segments:
        """Return the segments of six columns, sorted by their first sample."""
        first, length, row, step, dataset, piece = columns
        of_dataset, of_piece = dataset.astype(np.int32), piece.astype(np.int32)
        found = cls(first, length, row, step, of_dataset, of_piece, pieces, even, kept_nbytes)
        is_sorted = bool((first[1:] >= first[:-1]).all())
        return found if is_sorted else found.at(np.argsort(first, kind="stable"))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All six, in this order."""
        return self.first, self.length, self.row, self.step, self.dataset, self.piece

    @property
    def size(self) -> int:
        """The number of segments."""
        return self.first.size

    @property
    def end(self) -> Int64s:
        """int64 (n,): one past the last sample of each segment."""
        return self.first + self.length

    def at(self, which: NDArray[Any]) -> Segments:
        """Return some of the segments."""
        first, length, row, step, dataset, piece = (column[which] for column in self.columns)
        kept = self.pieces, self.even, self.kept_nbytes
        return Segments(first, length, row, step, dataset, piece, *kept)

    def moved(self, shift: int | Int64s) -> Segments:
        """Return the segments with their samples moved."""
        return replace(self, first=self.first + shift)

    def cut(self, at: Int64s) -> Segments:
        """Return the segments, split at the samples `at` (ascending) that lie inside one."""
        low = np.searchsorted(at, self.first, side="right")
        count = np.searchsorted(at, self.end, side="left") - low
        if not count.any():
            return self
        which, inside = repetitions(count + 1)
        edges = np.append(at, 0)  # the last one is not used
        begin = np.where(inside == 0, self.first[which], edges[low[which] + inside - 1])
        next_edge = edges[np.minimum(low[which] + inside, at.size)]
        end = np.where(inside == count[which], self.end[which], next_edge)
        found = self.at(which)
        row = found.row + (begin - found.first) * found.step
        columns = begin, end - begin, row, found.step, found.dataset, found.piece
        return Segments.of(columns, self.pieces, self.even, self.kept_nbytes)

    @cached_property
    def layers(self) -> list[tuple[Int64s, Segments]]:
        """The segments by region, with their indices: no two of a layer overlap."""
        keys: dict[Any, int] = {}
        layer = [keys.setdefault(region_key(p.region), len(keys)) for p in self.pieces]
        if len(keys) == 1:
            return [(np.arange(self.size), replace(self))]  # `self` would refer to itself
        number = np.array(layer, np.int32)[self.piece]
        found = (np.flatnonzero(number == one) for one in range(len(keys)))
        return [(here, self.at(here)) for here in found if here.size]

    def find(self, sample: Int64s) -> Iterator[tuple[int, Piece, Int64s, Int64s]]:
        """Yield where samples lie: dataset, piece, positions in `sample`, and rows of the dataset.

        Samples that no segment holds are left out.
        """
        for _, layer in self.layers if self.size else ():
            at = np.searchsorted(layer.first, sample, side="right") - 1
            chosen = np.flatnonzero((at >= 0) & (sample < layer.end[at]))
            at = at[chosen]
            row = layer.row[at] + (sample[chosen] - layer.first[at]) * layer.step[at]
            key = layer.dataset[at].astype(np.int64) * len(self.pieces) + layer.piece[at]
            order = np.argsort(key, kind="stable")
            edges = np.flatnonzero(np.diff(key[order])) + 1
            for some in np.split(order, edges) if order.size else ():
                number, piece = divmod(int(key[some[0]]), len(self.pieces))
                yield number, self.pieces[piece], chosen[some], row[some]

    def behind(self, outer: PairedRuns) -> Segments:
        """Return the segments of outer runs, whose rows are samples of these segments.

        TooManyRunsError if there would be more than `MOST_RUNS`.
        """
        if not self.size:
            return self
        if outer.size == 1 and outer.step[0] == 1 and not outer.row[0]:
            if outer.length[0] >= self.end.max():
                return self.moved(int(outer.first[0]))
        outer = outer.single_steps()
        columns = []
        for indices, layer in self.layers:
            # Per outer run, the segments that overlap it: `low` up to `high`, exclusive.
            low = np.searchsorted(layer.end, outer.row, side="right")
            high = np.searchsorted(layer.first, outer.row + outer.length, side="left")
            count = np.maximum(high - low, 0)
            if count.sum() > MOST_RUNS:
                raise TooManyRunsError
            which, inside = repetitions(count)
            inside += low[which]
            begin = np.maximum(outer.row[which], layer.first[inside])
            end = np.minimum(outer.row[which] + outer.length[which], layer.end[inside])
            row = layer.row[inside] + (begin - layer.first[inside]) * layer.step[inside]
            first, at = outer.first[which] + begin - outer.row[which], indices[inside]
            own = self.step[at], self.dataset[at], self.piece[at]
            columns.append((first, end - begin, row, *own))
        made = [np.concatenate(column) for column in zip(*columns, strict=True)]
        return Segments.of(made, self.pieces)
