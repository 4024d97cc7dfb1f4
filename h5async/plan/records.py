"""Defines the plans of a batch, and cuts their work into shares. No I/O.

The core holds its own plans, represented here by `BatchItems`. A `SamplesPlan` lists the rows of a
field that h5py reads; `Ranges` are read but not decoded. The `ByteRanges` that a batch needs of far
(remote) sources are joined into requests.

Every plan has independent items, so any thread can execute slices of it. `num_items` is their
number, and `item_nbytes` the mean cost of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class BatchItems(NamedTuple):
    """A plan that the core holds, for one field or several.

    `batch` is a `read.queue.SlotBatch`, which `collection`, a `read.collection.Collection`, reads.
    """

    collection: Any
    batch: Any
    num_items: int
    item_nbytes: int


class IncludedPlan(NamedTuple):
    """A field that is read with others, by the `BatchItems` of all of them.

    `is_transformed` says whether it is transformed while it is read.
    """

    is_transformed: bool = False
    num_items: int = 0
    item_nbytes: int = 0


class SamplesPlan(NamedTuple):
    """Rows of a field that h5py reads in one go, since only one thread at a time can use it.

    `sample`, int64 (n,), has rows of the dataset, or elements of variable length. `rows`, int64
    (n,), has their rows in the memory of the field; for variable length, the first value of each.
    For crops of rows, `places`, int64 (n, rank), says where they begin (`plan/crops.py`). If
    `are_kept`, `sample` has rows of the values kept in memory, not of the dataset.
    """

    sample: Int64s
    rows: Int64s
    item_nbytes: int
    places: Int64s | None = None
    are_kept: bool = False

    @property
    def num_items(self) -> int:  # noqa: D102
        return int(self.sample.size > 0)


class Ranges(NamedTuple):
    """Byte ranges of sources, to be read without decoding.

    The first four are int64 (n,): the source of each range, its `offset` and length there, and its
    `position` in `memory`, uint8, to which it is read.
    """

    source: Int64s
    offset: Int64s
    nbytes: Int64s
    position: Int64s
    memory: NDArray[np.uint8]

    @property
    def num_items(self) -> int:  # noqa: D102
        return self.offset.size

    @property
    def item_nbytes(self) -> int:  # noqa: D102
        return int(self.nbytes.sum()) // max(1, self.nbytes.size)


ReadPlan = BatchItems | IncludedPlan | SamplesPlan | Ranges


class PlanSlice(NamedTuple):
    """Items `start` to `stop` of the plan of field number `field`."""

    field: int
    start: int
    stop: int


def cut(plans: Sequence[ReadPlan], parts: int, min_part_nbytes: int) -> Iterator[list[PlanSlice]]:
    """Cut the work of a batch into at most `parts` shares of about equal cost.

    The items of all plans, one plan per field, are laid end to end, each as long as its bytes, and
    cut at equal distances, so that small fields are combined with large ones. Each item is in
    exactly one share. A share of `min_part_nbytes` or more is worth handing to a thread.
    """
    costs = [plan.num_items * plan.item_nbytes for plan in plans]
    total = sum(costs)
    parts = max(1, min(parts, total // max(1, min_part_nbytes)))
    cuts: list[list[PlanSlice]] = [[] for _ in range(parts)]
    begin = 0
    for field, (plan, cost) in enumerate(zip(plans, costs, strict=True)):
        start = 0
        for part, share in enumerate(cuts, 1):
            inside = total * part // parts - begin
            stop = min(plan.num_items, max(0, round(inside / max(1, plan.item_nbytes))))
            stop = plan.num_items if part == parts else stop
            if start < stop:
                share.append(PlanSlice(field, start, stop))
            start = stop
        begin += cost
    return (share for share in cuts if share)


# --- ranges of far sources ------------------------------------------------------------------------

# A request costs the client and the store about as much as transferring this many bytes, so smaller
# gaps between two ranges are fetched, too, rather than splitting the request.
_GAP_NBYTES = 32 * 1024
_MOST_NBYTES = 2 << 20  # of a joined request, so that several of a large batch are in flight
_MOST_PLACES = 1 << 62


class ByteRanges(NamedTuple):
    """Byte ranges by their places (see `Places`), int64 (n,): sorted and disjoint."""

    begins: Int64s
    ends: Int64s

    @classmethod
    def of(cls, begins: Int64s, ends: Int64s) -> ByteRanges:
        """Sort ranges, and merge those that overlap."""
        if begins.size < 2:
            return cls(begins, ends)
        order = np.argsort(begins)
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.append(True, begins[1:] >= ends[:-1]))
        return cls(begins[first], ends[np.append(first[1:], begins.size) - 1])

    def chosen(self, which: NDArray[np.bool_]) -> ByteRanges:
        """Return the ranges for which `which` is True."""
        return ByteRanges(self.begins[which], self.ends[which])

    def same(self, other: ByteRanges) -> bool:
        """Tell whether two of these are equal."""
        return all(map(np.array_equal, self, other))

    def find(self, begins: Int64s, ends: Int64s) -> Int64s:
        """Return, for each range, the one of some sorted others that contains it; -1 for none."""
        found = np.searchsorted(begins, self.begins, "right") - 1
        if begins.size:
            found[self.ends > ends[found]] = -1
        return found

    @property
    def size(self) -> int:
        """The number of ranges."""
        return self.begins.size

    @property
    def nbytes(self) -> int:
        """The sum of their lengths."""
        return int((self.ends - self.begins).sum())


NO_RANGES = ByteRanges(*[np.zeros(0, np.int64)] * 2)


class Places:
    """Numbers the bytes of all sources, with gaps so large that no request spans two sources."""

    def __init__(self, sizes: Int64s) -> None:
        most = _MOST_PLACES // max(1, sizes.size) - _MOST_NBYTES  # larger than any file
        self._sizes = np.minimum(sizes, most)
        self._starts = np.cumsum(self._sizes + _MOST_NBYTES) - self._sizes

    def ranges(self, source: Int64s, offset: Int64s, nbytes: Int64s) -> ByteRanges:
        """Return ranges, which may be in any order, clipped to the sizes of their sources."""
        nbytes = np.minimum(nbytes, self._sizes[source] - offset)
        is_there = nbytes > 0
        begins = (self._starts[source] + offset)[is_there]
        return ByteRanges.of(begins, begins + nbytes[is_there])

    def sources(self, begins: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each place, and the offset there."""
        source = np.searchsorted(self._starts, begins, "right") - 1
        return source, begins - self._starts[source]


def union(*several: ByteRanges) -> ByteRanges:
    """Return the union of several sets of ranges."""
    filled = [one for one in several if one.size] or [NO_RANGES]
    return (
        filled[0]
        if len(filled) == 1
        else ByteRanges.of(*map(np.concatenate, zip(*filled, strict=True)))
    )


def requests_of(ranges: ByteRanges, group: Int64s | int = 0) -> Int64s:
    """Return the first range of each request, and at the end the number of ranges.

    They are int64 (requests + 1,). The ranges of a request have only small gaps between them, or at
    least half of its bytes are wanted. A request never spans two groups; `group` is ascending.
    """
    begins, ends = (column + group * _MOST_NBYTES for column in ranges)  # keeps groups apart
    if not ranges.size:
        return np.zeros(1, np.int64)
    near = np.flatnonzero(np.append(True, begins[1:] - ends[:-1] > _GAP_NBYTES))
    wanted = np.append(0, np.cumsum(ends - begins))
    bounds = np.append(near, ranges.size)
    columns = bounds[:-1], bounds[1:], begins[near], ends[bounds[1:] - 1], np.diff(wanted[bounds])
    firsts, start, has = [], -_MOST_NBYTES, 0
    for first, behind, begin, end, nbytes in zip(*(one.tolist() for one in columns), strict=True):
        if end - start <= _MOST_NBYTES and 2 * (has + nbytes) >= end - start:
            has += nbytes
            continue
        at, start, has = first, begin, nbytes
        while at < behind:  # many near ranges take several requests; the last may grow
            firsts.append(at)
            start = int(begins[at])
            most = np.searchsorted(ends[at:behind], start + _MOST_NBYTES, "right")
            at, has = at + max(1, int(most)), int(wanted[behind] - wanted[at])
    return np.array([*firsts, ranges.size], np.int64)


def extents_of(ranges: ByteRanges, bounds: Int64s) -> ByteRanges:
    """Return where the requests of some ranges begin and end."""
    return ByteRanges(ranges.begins[bounds[:-1]], ranges.ends[bounds[1:] - 1])
