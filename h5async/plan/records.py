"""Defines the plans of a batch, and cuts their work into shares. Pure.

The core holds its own plans, for which `BatchItems` stands. A `SamplesPlan` says which rows of a
field h5py reads. A `GatherPlan` needs no file; `Ranges` are not decoded.

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
    """A plan that the core holds, of one field or several; `batch` is a `read.queue.SlotBatch`."""

    batch: Any
    num_items: int
    item_nbytes: int


class IncludedPlan(NamedTuple):
    """A field that is read with others: there is a `BatchItems` for all of them."""

    num_items: int = 0
    item_nbytes: int = 0


class SamplesPlan(NamedTuple):
    """Rows of a field that h5py reads at once: only one thread at a time can.

    `sample`, int64 (n,), are rows of the dataset, or elements of variable length. `rows`, int64
    (n,), are their rows in the memory of the field; for variable length, the first value of each.
    If only parts of rows are delivered, `places`, int64 (n, rank), says where (`plan/crops.py`).
    """

    sample: Int64s
    rows: Int64s
    item_nbytes: int
    places: Int64s | None = None

    @property
    def num_items(self) -> int:  # noqa: D102
        return int(self.sample.size > 0)


class GatherPlan(NamedTuple):
    """Samples whose rows a cache holds.

    `begin`, int64 (n,), are their rows in the cache, and they go to the first n rows of the batch.
    If their lengths differ, they are first bytes in the cache, and `offsets`, int64 (n + 1,), are
    the bytes of the batch to which they go.
    """

    begin: Int64s
    item_nbytes: int
    offsets: Int64s | None = None

    @property
    def num_items(self) -> int:  # noqa: D102
        return self.begin.size


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


ReadPlan = BatchItems | IncludedPlan | SamplesPlan | GatherPlan | Ranges


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
