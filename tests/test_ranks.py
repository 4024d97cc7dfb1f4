"""Many ranks: every one gets as many batches; together they have every sample once an epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.sampling import Sampling, dealt
from h5async.window import DealtOrder, WindowOrder


def window_of(counts, window, batch_size, world_size, seed=3):
    bounds = np.append(0, np.cumsum(counts))
    pieces = [WindowOrder(bounds, window, seed, rank, world_size) for rank in range(world_size)]
    return DealtOrder(pieces, int(bounds[-1]), batch_size)


def ranks_of(num_samples, batch_size, world_size, shuffle, drop_last, window=None):
    return [
        Sampling(num_samples, batch_size, shuffle, 5, drop_last, window, rank, world_size)
        for rank in range(world_size)
    ]


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 7),
    shuffle=st.sampled_from([False, "full", "window"]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    size=st.integers(1, 9),
)
def test_batches_of_all_ranks(counts, batch_size, world_size, shuffle, drop_last, epoch, size):
    num_samples = sum(counts)
    window = window_of(counts, size, batch_size, world_size)
    ranks = ranks_of(num_samples, batch_size, world_size, shuffle, drop_last, window)
    num_batches = ranks[0].num_batches
    assert {rank.num_batches for rank in ranks} == {num_batches}
    steps, left = divmod(num_samples, batch_size * world_size)
    assert num_batches == steps + (left > 0 and not drop_last)
    seen = []
    for number in range(num_batches):
        batches = [rank.batch(epoch, number) for rank in ranks]
        if number < steps:
            assert {batch.size for batch in batches} == {batch_size}
        else:
            sizes = {batch.size for batch in batches}
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            if left < world_size:  # some have nothing left, and repeat one of the last samples
                assert sizes == {1}
                together = np.concatenate(batches)
                last, repeated = np.unique(together, return_counts=True)
                assert last.size == left
                assert repeated.sum() == world_size
                seen.append(last)
                continue
        seen += batches
    found = np.sort(np.concatenate(seen)) if seen else np.zeros(0, np.int64)
    if drop_last:
        assert found.size == steps * batch_size * world_size
        assert np.unique(found).size == found.size
    else:
        assert np.array_equal(found, np.arange(num_samples))


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 5),
    shuffle=st.sampled_from([False, "full", "window"]),
    data=st.data(),
)
def test_what_all_ranks_had_is_a_beginning_of_the_order(
    counts, batch_size, world_size, shuffle, data
):
    num_samples = sum(counts)
    window = window_of(counts, 3, batch_size, world_size)
    ranks = ranks_of(num_samples, batch_size, world_size, shuffle, False, window)
    order = ranks[0].samples(1, 0, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    batches = [rank.batch(1, number) for number in range(ranks[0].num_batches) for rank in ranks]
    steps = num_samples // (batch_size * world_size)
    whole = np.concatenate([np.zeros(0, np.int64), *batches[: steps * world_size]])
    assert np.array_equal(whole, order[: whole.size])
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    assert np.array_equal(ranks[0].samples(1, start, stop), order[start:stop])


@given(
    num_units=st.integers(1, 40),
    size=st.integers(1, 8),
    world_size=st.integers(1, 6),
    epoch=st.integers(0, 2),
)
def test_a_unit_belongs_to_one_rank_but_for_those_at_the_edges(num_units, size, world_size, epoch):
    num_samples = num_units * size
    order = window_of([size] * num_units, 4, 3, world_size)
    owners = [
        set(np.unique(piece.samples(epoch, 0, end - begin) // size))
        for rank, piece in enumerate(order._pieces)
        for begin, end in [dealt(num_samples, rank, world_size)]
    ]
    shared = [a & b for a, b in itertools.combinations(owners, 2)]
    assert set().union(*owners) == set(range(num_units))
    assert len(set().union(set(), *shared)) <= world_size - 1


def test_one_rank_has_the_order_that_it_always_had():
    bounds = np.append(0, np.cumsum([5, 5, 3, 5, 1]))
    alone = WindowOrder(bounds, 3, 7)
    dealt_to_one = DealtOrder([WindowOrder(bounds, 3, 7, 0, 1)], 19, 4)
    assert np.array_equal(alone.samples(2, 0, 19), dealt_to_one.samples(2, 0, 19))


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_ranks_share_the_order_of_one(shuffle):
    """In order, and shuffled: the batches of two ranks are the halves of those of one."""
    one = Sampling(100, 20, shuffle, 5)
    two = ranks_of(100, 10, 2, shuffle, False)
    for number in range(5):
        halves = [rank.batch(1, number) for rank in two]
        assert np.array_equal(np.concatenate(halves), one.batch(1, number))
