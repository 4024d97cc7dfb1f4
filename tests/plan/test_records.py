"""Shares of the plans of all fields, with plain arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.plan.records import BatchItems, PlanSlice, ReadPlan, SamplesPlan, cut


def rows(count: int, nbytes: int) -> BatchItems:
    return BatchItems(None, None, count, nbytes)


def cost(plans: Sequence[ReadPlan], share: Sequence[PlanSlice]) -> int:
    return sum((part.stop - part.start) * plans[part.field].item_nbytes for part in share)


def check_cut(plans: Sequence[ReadPlan], parts: int, min_part_nbytes: int) -> list[list[PlanSlice]]:
    shares = list(cut(plans, parts, min_part_nbytes))
    items = [(s.field, item) for share in shares for s in share for item in range(s.start, s.stop)]
    assert sorted(items) == [(f, i) for f, plan in enumerate(plans) for i in range(plan.num_items)]
    assert len(shares) <= parts
    for share in shares:
        assert share, "an empty share is not worth a thread"
        assert all(part.start < part.stop for part in share)
        fields = [part.field for part in share]
        assert fields == sorted(set(fields)), "a share has one slice of a field at most"
    return shares


@pytest.mark.parametrize(
    ("plans", "parts", "min_part_nbytes", "expected"),
    [
        ([rows(8, 100)], 1, 1, [[(0, 0, 8)]]),
        ([rows(8, 100)], 2, 1, [[(0, 0, 4)], [(0, 4, 8)]]),
        ([rows(8, 100)], 4, 400, [[(0, 0, 4)], [(0, 4, 8)]]),
        ([rows(8, 100)], 4, 401, [[(0, 0, 8)]]),
        ([rows(8, 100)], 4, 10**9, [[(0, 0, 8)]]),
        ([rows(3, 100)], 3, 1, [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]),
        # labels ride along with the last of the data
        ([rows(8, 100), rows(8, 1)], 2, 1, [[(0, 0, 4)], [(0, 4, 8), (1, 0, 8)]]),
        ([rows(8, 1), rows(8, 100)], 2, 1, [[(0, 0, 8), (1, 0, 4)], [(1, 4, 8)]]),
        # fields of one size: each is a share
        ([rows(8, 100), rows(8, 100)], 2, 1, [[(0, 0, 8)], [(1, 0, 8)]]),
        # h5py's share cannot be cut
        (
            [SamplesPlan(np.arange(8), np.arange(8), 800), rows(8, 100)],
            4,
            1,
            [[(0, 0, 1)], [(1, 0, 4)], [(1, 4, 8)]],
        ),
        ([], 4, 1, []),
        ([rows(0, 100)], 4, 1, []),
        ([rows(5, 0)], 4, 1, [[(0, 0, 5)]]),
    ],
)
def test_cut_as_a_table(
    plans: list[ReadPlan], parts: int, min_part_nbytes: int, expected: list[Any]
) -> None:
    shares = check_cut(plans, parts, min_part_nbytes)
    assert [[tuple(part) for part in share] for share in shares] == expected


plan_lists = st.lists(
    st.one_of(
        st.builds(rows, st.integers(0, 40), st.sampled_from([0, 1, 4, 1000, 4096])),
        st.builds(SamplesPlan, st.integers(1, 9).map(np.arange), st.just(0), st.integers(0, 5000)),
    ),
    max_size=4,
)


@given(plan_lists, st.integers(1, 20), st.sampled_from([1, 100, 10_000]))
def test_shares_hold_each_item_once_and_cost_about_the_same(
    plans: list[ReadPlan], parts: int, min_part_nbytes: int
) -> None:
    shares = check_cut(plans, parts, min_part_nbytes)
    total = sum(plan.num_items * plan.item_nbytes for plan in plans)
    parts = max(1, min(parts, total // min_part_nbytes))
    assert len(shares) <= parts
    # A cut falls between items, so a share is off by half an item at either end.
    slack = max((plan.item_nbytes for plan in plans), default=0) + 2
    for share in shares:
        assert cost(plans, share) <= total / parts + slack
    if total >= parts * slack * 2:
        assert len(shares) == parts
        assert min(cost(plans, share) for share in shares) >= total / parts - slack


@given(st.integers(2, 64), st.integers(2, 16))
def test_small_fields_make_no_share_of_their_own(per_part: int, parts: int) -> None:
    """Labels, however many fields of them, ride along with the data."""
    count = per_part * parts
    plans = [rows(count, 4), rows(count, 8), rows(count, 100_000), rows(count, 1)]
    for share in check_cut(plans, parts, 1):
        assert any(part.field == 2 for part in share)


def test_enormous_batches_are_cut_exactly() -> None:
    plans = [rows(2**20, 2**40), rows(2**20, 8)]
    shares = check_cut_counts(plans, 7)
    assert max(shares) - min(shares) <= 2**41


def check_cut_counts(plans: Sequence[ReadPlan], parts: int) -> list[int]:
    shares = list(cut(plans, parts, 1))
    for field, plan in enumerate(plans):
        edges = [(s.start, s.stop) for share in shares for s in share if s.field == field]
        assert edges[0][0] == 0
        assert edges[-1][1] == plan.num_items
        assert all(one[1] == two[0] for one, two in itertools.pairwise(edges))
    return [cost(plans, share) for share in shares]
