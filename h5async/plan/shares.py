"""Cuts the work of a batch into shares. Pure.

The plans of all fields enter; shares of about equal cost leave, each the work of one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from h5async.plan.records import Plan


class PlanSlice(NamedTuple):
    """Items `start` to `stop` of the plan of field number `field`."""

    field: int
    start: int
    stop: int


def cut(plans: Sequence[Plan], parts: int, min_part_nbytes: int) -> Iterator[list[PlanSlice]]:
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
        edges = [0]
        for part in range(1, parts):
            inside = total * part // parts - begin
            edges.append(min(plan.num_items, max(0, round(inside / max(1, plan.item_nbytes)))))
        edges.append(plan.num_items)
        for part in range(parts):
            if edges[part] < edges[part + 1]:
                cuts[part].append(PlanSlice(field, edges[part], edges[part + 1]))
        begin += cost
    return (share for share in cuts if share)
