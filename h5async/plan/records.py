"""Defines the plans of a batch, and cuts their work into shares. Pure.

The core holds its own plans, for which `BatchItems` stands. A `SamplesPlan` says which rows of a
field h5py reads; `Ranges` are not decoded. The `ByteRanges` that a batch needs of far sources are
joined into requests.

Every plan has a number of items that do not depend on each other, so any thread can execute slices
of it. `num_items` and `item_nbytes` are their number, and the mean cost of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class BatchItems(NamedTuple):
    """A plan that the core holds, of one field or several.

    `batch` is a `read.queue.SlotBatch`, which `collection`, a `read.collection.Collection`, reads.
    """

    collection: Any
    batch: Any
    num_items: int
    item_nbytes: int


class IncludedPlan(NamedTuple):
    """A field that is read with others: there is a `BatchItems` for all of them.

    `is_transformed`: as it is read.
    """

    is_transformed: bool = False
    num_items: int = 0
    item_nbytes: int = 0


class SamplesPlan(NamedTuple):
    """Rows of a field that h5py reads at once: only one thread at a time can.

    `sample`, int64 (n,), are rows of the dataset, or elements of variable length. `rows`, int64
    (n,), are their rows in the memory of the field; for variable length, the first value of each.
    If only parts of rows are delivered, `places`, int64 (n, rank), says where (`plan/crops.py`). If
    they `are_kept`, these are rows in memory.
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
    """Byte ranges of sources, to be read as they are stored.

    int64 (n,): the `source` of each, its address there, its length, and its `position` in `memory`,
    uint8, to which it goes.
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

    The items of all plans, one per field, are concatenated, each as long as its bytes, and cut at
    equal distances, so that small fields are combined with large ones. Together the shares hold
    each item once. From `min_part_nbytes` on, a share is worth handing to a thread.
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

# A request costs the client and the store about as much as so many bytes: with many of them, the
# bytes between two ranges are fetched, too, rather than sent for in another request.
_GAP_NBYTES = 32 * 1024
_MOST_NBYTES = 2 << 20  # of a request of several ranges: of large batches, several are on their way
_MOST_PLACES = 1 << 62


class ByteRanges(NamedTuple):
    """Byte ranges by their places, int64 (n,): sorted, and none overlap."""

    begins: Int64s
    ends: Int64s

    @classmethod
    def of(cls, begins: Int64s, ends: Int64s) -> ByteRanges:
        """Return ranges in any order sorted, and as one where they overlap."""
        if begins.size < 2:
            return cls(begins, ends)
        order = np.argsort(begins)
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.append(True, begins[1:] >= ends[:-1]))
        return cls(begins[first], ends[np.append(first[1:], begins.size) - 1])

    def chosen(self, which: NDArray[np.bool_]) -> ByteRanges:
        """Return some of the ranges."""
        return ByteRanges(self.begins[which], self.ends[which])

    def same(self, other: ByteRanges) -> bool:
        """Tell whether two of these are equal."""
        return all(map(np.array_equal, self, other))

    def find(self, begins: Int64s, ends: Int64s) -> Int64s:
        """Return for each range which of some others, sorted by their begins, has it; -1: none."""
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
    """The places of bytes in sources of some sizes: no request reaches from one into the next."""

    def __init__(self, sizes: Int64s) -> None:
        most = _MOST_PLACES // max(1, sizes.size) - _MOST_NBYTES  # (no file is as large)
        self._sizes = np.minimum(sizes, most)
        self._starts = np.cumsum(self._sizes + _MOST_NBYTES) - self._sizes

    def ranges(self, source: Int64s, offset: Int64s, nbytes: Int64s) -> ByteRanges:
        """Return what lies of ranges, in any order, within their sources."""
        nbytes = np.minimum(nbytes, self._sizes[source] - offset)
        is_there = nbytes > 0
        begins = (self._starts[source] + offset)[is_there]
        return ByteRanges.of(begins, begins + nbytes[is_there])

    def sources(self, begins: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each place, and the offset there."""
        source = np.searchsorted(self._starts, begins, "right") - 1
        return source, begins - self._starts[source]


def union(*several: ByteRanges) -> ByteRanges:
    """Return the bytes of all of several, each once."""
    filled = [one for one in several if one.size] or [NO_RANGES]
    return (
        filled[0]
        if len(filled) == 1
        else ByteRanges.of(*map(np.concatenate, zip(*filled, strict=True)))
    )


def requests_of(ranges: ByteRanges, group: Int64s | int = 0) -> Int64s:
    """Return the first range of each request, and the number of all: int64 (requests + 1,).

    The ranges of a request follow each other near enough, or so that at least half of its bytes are
    wanted. They are all of one `group`, which ascends.
    """
    begins, ends = (column + group * _MOST_NBYTES for column in ranges)  # farther than any request
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
        while at < behind:  # of many that are near each other, the last request may be joined
            firsts.append(at)
            start = int(begins[at])
            most = np.searchsorted(ends[at:behind], start + _MOST_NBYTES, "right")
            at, has = at + max(1, int(most)), int(wanted[behind] - wanted[at])
    return np.array([*firsts, ranges.size], np.int64)


def extents_of(ranges: ByteRanges, bounds: Int64s) -> ByteRanges:
    """Return where the requests of some ranges begin and end."""
    return ByteRanges(ranges.begins[bounds[:-1]], ranges.ends[bounds[1:] - 1])
