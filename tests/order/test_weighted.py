"""Weighted draws: the alias table says what the weights say, and draws have its statistics."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.core.binding import load_core
from h5async.order.selection import WeightedOrder, alias_table

positive = st.floats(0, 1e300) | st.integers(0, 5).map(float) | st.just(5e-324)
weights_lists = st.lists(positive, min_size=1, max_size=60).filter(any)


def probabilities(weights):
    share, alias = (alias_table(weights)[name] for name in ("share", "alias"))
    assert ((share >= 0) & (share <= 1)).all()
    found = share / weights.size
    np.add.at(found, alias, (1 - share) / weights.size)
    return found


@given(weights_lists)
def test_the_table_has_the_probabilities_of_the_weights(weights):
    weights = np.array(weights)
    found = probabilities(weights)
    expected = weights / weights.max()
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=0, atol=1e-13)
    assert not found[weights == 0].any()


@given(weights_lists, st.integers(0, 20_000), st.integers(0, 9_000), st.integers(0, 3))
def test_draws_depend_on_their_position_alone(weights, start, count, epoch):
    order, other = (WeightedOrder(np.array(weights), 5) for _ in range(2))
    whole = order.samples(epoch, 0, start + count)
    assert order.samples(epoch, start, start + count).tolist() == whole[start:].tolist()
    assert other.samples(epoch, start, start + count).tolist() == whole[start:].tolist()


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@given(
    weights_lists,
    st.integers(0, 1 << 40) | st.integers(0, 9_000),
    st.integers(0, 9_000),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(0, 9),
)
def test_the_core_and_its_twin_agree(weights, start, count, seed, epoch):
    order = WeightedOrder(np.array(weights), seed)
    found = order.samples(epoch, start, start + count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5async.order.selection.load_core", lambda: None)
        expected = order.samples(epoch, start, start + count)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_draws_are_new_arrays():
    order = WeightedOrder(np.ones(50), 0)
    first = order.samples(0, 0, 10)
    kept = first.copy()
    first[:] = -1
    assert order.samples(0, 0, 10).tolist() == kept.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "weights",
    [np.ones(100), np.arange(100.0), 0.9 ** np.arange(100), np.r_[np.ones(50), np.zeros(50)]],
    ids=["equal", "rising", "geometric", "zeros"],
)
def test_chi_squared(weights, seed):
    count = 200_000
    expected = weights / weights.sum() * count
    found = np.bincount(WeightedOrder(weights, seed).samples(3, 0, count), minlength=100)
    assert not found[weights == 0].any()
    often = expected >= 5
    statistic = ((found - expected)[often] ** 2 / expected[often]).sum()
    freedom = np.count_nonzero(often) - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_neighbours_and_epochs_are_independent():
    order = WeightedOrder(np.ones(10), 1)
    draws = np.stack([order.samples(epoch, 0, 100_000) for epoch in range(2)])
    pairs = [(draws[0, :-1], draws[0, 1:]), (draws[0], draws[1])]
    for one, other in pairs:
        found = np.bincount(one * 10 + other, minlength=100)
        expected = one.size / 100
        assert abs(((found - expected) ** 2 / expected).sum() - 99) < 4 * np.sqrt(2 * 99)


def test_the_digest_depends_on_all_weights():
    digests = {WeightedOrder(w, 0).digest for w in np.ones((4, 4)) + np.eye(4)}
    assert len(digests) == 4


GOLDEN = [
    (np.ones(7), "7c60cbc8798b99a1"),
    (np.arange(1000.0), "151a53777f3ffb80"),
    (0.5 ** np.arange(60), "8d422b2ebeb993ea"),
]


@pytest.mark.parametrize(("weights", "expected"), GOLDEN)
def test_draws_are_the_same_for_ever(weights, expected):
    draws = WeightedOrder(weights, 17).samples(2, 4000, 9000)
    found = hashlib.blake2b(draws.astype("<i8").tobytes(), digest_size=8).hexdigest()
    assert found == expected


def test_the_first_draws_are_the_same_for_ever():
    draws = WeightedOrder(np.array([1.0, 2, 3, 4]), 0).samples(0, 0, 12)
    assert draws.tolist() == [2, 3, 1, 1, 0, 2, 2, 3, 1, 3, 3, 0]
