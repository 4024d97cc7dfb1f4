"""A `Selection` against plain arrays of sample numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from h5async.order.selection import Selection

COUNT = 60


@st.composite
def ranges(draw):
    start, stop = draw(st.integers(0, COUNT - 1)), draw(st.integers(0, COUNT - 1))
    step = draw(st.integers(1, 7))
    return range(start, stop, step if stop >= start else -step)


numbers = st.lists(st.integers(0, COUNT - 1), max_size=40)
selections = ranges() | numbers


def selection_of(chosen):
    if isinstance(chosen, range):
        return Selection.of_range(chosen)
    return Selection.of_numbers(np.array(chosen, np.int64))


@given(selections, st.data())
def test_positions_are_mapped_to_samples(chosen, data):
    selection, model = selection_of(chosen), np.array(list(chosen), np.int64)
    assert selection.size == model.size
    if model.size:
        at = np.array(data.draw(st.lists(st.integers(0, model.size - 1))), np.int64)
        assert selection.samples(at).tolist() == model[at].tolist()


@given(selections)
def test_ascending(chosen):
    ascending = selection_of(chosen).ascending
    assert ascending.samples(np.arange(ascending.size)).tolist() == sorted(chosen)
    assert ascending.ascending is ascending


@given(selections)
def test_positions_are_where_samples_stand(chosen):
    ascending, model = selection_of(chosen).ascending, np.array(sorted(chosen), np.int64)
    assert (model[ascending.positions(model)] == model).all()


@given(selections, numbers)
def test_has(chosen, asked):
    are_in = selection_of(chosen).are_in(np.array(asked, np.int64))
    assert are_in.all() == set(asked).issubset(chosen)


@given(selections, st.sets(st.integers(1, COUNT - 1)))
def test_bounds_are_those_of_units_that_have_a_sample(chosen, cuts):
    edges = np.array([0, *sorted(cuts), COUNT])
    bounds = selection_of(chosen).ascending.bounds(edges)
    units = np.searchsorted(edges, sorted(chosen), side="right")
    _, counts = np.unique(units, return_counts=True)
    assert bounds.tolist() == [0, *np.cumsum(counts)]


@given(selections, selections)
@example(range(1, 0, -1), range(1, 0, -2))
def test_digests_are_equal_for_equal_samples_only(one, other):
    digests = selection_of(one).digest(), selection_of(other).digest()
    assert (digests[0] == digests[1]) == (list(one) == list(other)) or not len(one)


@given(ranges())
def test_numbers_of_a_range_take_no_memory(chosen):
    assert Selection.of_numbers(np.array(chosen, np.int64)).numbers is None


def test_a_sample_that_is_repeated_is_no_range():
    assert Selection.of_numbers(np.array([3, 3, 3])).samples(np.arange(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("odd", [1, 1500, 2999])
def test_a_long_array_that_is_nearly_a_range(odd):
    chosen = np.arange(3000)
    chosen[odd] = 0
    assert Selection.of_numbers(chosen).samples(np.arange(3000)).tolist() == chosen.tolist()
