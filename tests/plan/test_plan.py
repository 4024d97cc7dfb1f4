"""Plans of chunks, and shares, with plain arrays; a model that knows every element judges them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import DEFLATE, layout

from h5async.index.layout import DatasetLayout
from h5async.plan.chunks import ChunkPlan, plan_chunks
from h5async.plan.records import GatherPlan, Plan, SamplesPlan
from h5async.plan.shares import PlanSlice, cut


def samples(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def plan_of(of: DatasetLayout, sample: np.ndarray) -> ChunkPlan:
    return plan_chunks(of, sample, np.arange(sample.size))


# --- the model -------------------------------------------------------------------------------


def element_numbers(of: DatasetLayout) -> np.ndarray:
    """Each element of the dataset, by its number in C order; the sample dimension first."""
    return np.moveaxis(np.arange(math.prod(of.shape)).reshape(of.shape), of.sample_axis, 0)


def place_of(of: DatasetLayout, number: int) -> int:
    assert of.chunks is not None
    if of.chunks.index is None:
        return number
    places = np.flatnonzero(of.chunks.index == number)
    return int(places[0]) if places.size else -1


def carried_out(of: DatasetLayout, plan: ChunkPlan, count: int) -> np.ndarray:
    """Do what the plan says, with element numbers for values; each is written exactly once."""
    elements = element_numbers(of)
    batch = np.full((count, *elements.shape[1:]), -1)
    rest = [axis for axis in range(len(of.shape)) if axis != of.sample_axis]
    for item in range(plan.num_items):
        group = int(plan.group[item])
        corner, extent = of.cross_section[plan.cross[item]].copy(), of.chunk_shape
        corner[of.sample_axis] = plan.group_number[group] * extent[of.sample_axis]
        number = int(np.ravel_multi_index(tuple(corner // np.array(extent)), of.grid))
        assert plan.entry[item] == place_of(of, number)
        region = tuple(slice(corner[a], corner[a] + extent[a]) for a in rest)
        first = corner[of.sample_axis]
        inside = elements[(slice(first, first + extent[of.sample_axis]), *region)]
        for run in range(plan.run_start[group], plan.run_start[group + 1]):
            local, position = int(plan.run_local[run]), int(plan.run_position[run])
            length = int(plan.run_length[run])
            assert length > 0
            assert local + length <= extent[of.sample_axis]
            target = batch[(slice(position, position + length), *region)]
            assert (target == -1).all(), "written twice"
            target[...] = inside[local : local + length]
    return batch


def check_form(of: DatasetLayout, plan: ChunkPlan) -> None:
    """Each chunk comes once, in order of groups; runs are sorted, and as long as they can be."""
    groups = plan.group_number.size
    assert plan.run_start[0] == 0
    assert plan.run_start[-1] == plan.run_length.size
    assert plan.run_start.size == groups + 1
    assert (np.diff(plan.run_start) > 0).all()
    assert (np.diff(plan.group) >= 0).all()
    assert plan.entry.size == plan.cross.size == plan.group.size == plan.num_items
    pairs = set(zip(plan.group_number[plan.group].tolist(), plan.cross.tolist(), strict=True))
    assert len(pairs) == plan.num_items == groups * len(of.cross_section)
    allocated = plan.entry[plan.entry >= 0]
    assert np.unique(allocated).size == allocated.size
    assert plan.item_nbytes == of.chunk_nbytes
    for group in range(groups):
        runs = slice(plan.run_start[group], plan.run_start[group + 1])
        local, position = plan.run_local[runs], plan.run_position[runs]
        length = plan.run_length[runs]
        assert (local[1:] >= (local + length)[:-1]).all()
        joined = (local[1:] == (local + length)[:-1]) & (position[1:] == (position + length)[:-1])
        assert not joined.any(), "two runs should be one"


def check_plan(of: DatasetLayout, sample: np.ndarray) -> ChunkPlan:
    """Plan a batch, and judge the plan by the model."""
    before = sample.copy()
    plan = plan_of(of, sample)
    assert np.array_equal(sample, before)
    check_form(of, plan)
    expected = element_numbers(of)[sample]
    assert np.array_equal(carried_out(of, plan, sample.size), expected)
    return plan


# --- as a table -----------------------------------------------------------------------


def test_chunks_in_file_order_make_one_run_each() -> None:
    plan = plan_of(layout((10, 2), (4, 2), filters=DEFLATE), np.arange(2, 10))
    assert plan.entry.tolist() == [0, 1, 2]
    assert plan.group.tolist() == [0, 1, 2]
    assert plan.run_start.tolist() == [0, 1, 2, 3]
    assert plan.run_local.tolist() == [2, 0, 0]
    assert plan.run_position.tolist() == [0, 2, 6]
    assert plan.run_length.tolist() == [2, 4, 2]
    assert plan.chunk_nbytes == 32


def test_neighbours_in_the_file_are_joined_only_where_they_are_neighbours_in_the_batch() -> None:
    plan = plan_of(layout((8,), (8,), filters=DEFLATE), samples(5, 0, 1, 2, 4, 3, 6))
    assert plan.entry.tolist() == [0]
    runs = (plan.run_local, plan.run_position, plan.run_length)
    assert list(zip(*(run.tolist() for run in runs), strict=True)) == [
        (0, 1, 3),
        (3, 5, 1),
        (4, 4, 1),
        (5, 0, 1),
        (6, 6, 1),
    ]


def test_a_shuffled_batch_names_each_chunk_once() -> None:
    sample = np.random.default_rng(0).permutation(100)[:60]
    plan = plan_of(layout((100, 3), (10, 3), filters=DEFLATE), sample)
    assert plan.entry.tolist() == sorted(set((sample // 10).tolist()))


def test_pieces_of_a_sample_in_several_chunks() -> None:
    """A grid of 3 by 2 by 2 chunks, samples counted by the second dimension."""
    plan = plan_of(layout((5, 4, 3), (2, 3, 2), axis=1), samples(3, 0))
    assert plan.group_number.tolist() == [0, 1]
    assert plan.entry.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert plan.cross.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert plan.group.tolist() == [0] * 6 + [1] * 6
    assert plan.run_position.tolist() == [1, 0]


# --- against the model ----------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[DatasetLayout, np.ndarray]:
    rank = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 7), min_size=rank, max_size=rank))
    axis = draw(st.integers(0, rank - 1))
    if draw(st.booleans()):
        shape[axis] = draw(st.integers(1, 80))
    options: dict[str, Any] = {"axis": axis}
    # a chunk may be larger than a dataset that can grow
    chunk_shape = [draw(st.one_of(st.just(n), st.integers(1, n + 2))) for n in shape]
    total = math.prod(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    if draw(st.booleans()):
        options["allocated"] = draw(st.sets(st.integers(0, total - 1)))
    options["filters"] = draw(st.sampled_from([(), DEFLATE]))
    order = draw(st.permutations(range(shape[axis])))
    if draw(st.booleans()):
        order = list(range(shape[axis]))
    start = draw(st.integers(0, shape[axis] - 1))
    count = draw(st.integers(1, shape[axis] - start))
    return layout(shape, chunk_shape, **options), samples(*order[start : start + count])


@given(batches())
def test_chunked_plans_equal_the_model(batch: tuple[DatasetLayout, np.ndarray]) -> None:
    of, sample = batch
    check_plan(of, sample)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("chunk_shape", [(3, 4, 5), (20, 3, 2), (1, 7, 6), (7, 21, 22)])
def test_all_samples_in_all_orders(axis: int, chunk_shape: tuple[int, ...]) -> None:
    of = layout((20, 21, 22), chunk_shape, axis=axis, filters=DEFLATE)
    count = of.num_samples
    for sample in (np.arange(count), np.arange(count)[::-1].copy()):
        check_plan(of, sample)
    check_plan(of, np.random.default_rng(1).permutation(count))


# --- cut ------------------------------------------------------------------------------------------


def rows(count: int, nbytes: int) -> GatherPlan:
    return GatherPlan(np.arange(count), nbytes)


def chunks(count: int, nbytes: int) -> ChunkPlan:
    of = layout((max(1, count), 1), (1, 1), filters=DEFLATE)
    plan = plan_of(of, np.arange(max(1, count)))
    keep = slice(0, count)
    return ChunkPlan(
        plan.entry[keep],
        plan.cross[keep],
        plan.group[keep],
        plan.group_number[keep],
        plan.run_start[: count + 1],
        plan.run_local[keep],
        plan.run_position[keep],
        plan.run_length[keep],
        nbytes,
    )


def cost(plans: Sequence[Plan], share: Sequence[PlanSlice]) -> int:
    return sum((part.stop - part.start) * plans[part.field].item_nbytes for part in share)


def check_cut(plans: Sequence[Plan], parts: int, min_part_nbytes: int) -> list[list[PlanSlice]]:
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
        ([chunks(3, 100)], 3, 1, [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]),
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
    plans: list[Plan], parts: int, min_part_nbytes: int, expected: list[Any]
) -> None:
    shares = check_cut(plans, parts, min_part_nbytes)
    assert [[tuple(part) for part in share] for share in shares] == expected


plan_lists = st.lists(
    st.one_of(
        st.builds(rows, st.integers(0, 40), st.sampled_from([0, 1, 4, 1000, 4096])),
        st.builds(chunks, st.integers(0, 40), st.sampled_from([1, 4096, 10**6])),
        st.builds(SamplesPlan, st.integers(1, 9).map(np.arange), st.just(0), st.integers(0, 5000)),
    ),
    max_size=4,
)


@given(plan_lists, st.integers(1, 20), st.sampled_from([1, 100, 10_000]))
def test_shares_hold_each_item_once_and_cost_about_the_same(
    plans: list[Plan], parts: int, min_part_nbytes: int
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


def check_cut_counts(plans: Sequence[Plan], parts: int) -> list[int]:
    shares = list(cut(plans, parts, 1))
    for field, plan in enumerate(plans):
        edges = [(s.start, s.stop) for share in shares for s in share if s.field == field]
        assert edges[0][0] == 0
        assert edges[-1][1] == plan.num_items
        assert all(one[1] == two[0] for one, two in itertools.pairwise(edges))
    return [cost(plans, share) for share in shares]
