"""Tests of sequences and steps against plain loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.order.rows import NO_ROW, SequenceTable

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=8)
offsets = st.lists(st.integers(-6, 6), min_size=1, max_size=5).map(tuple)
pads = st.sampled_from(["drop", "edge", "zero"])


def table_of(sizes: list[int], gaps: list[int], held: list[int] | None = None) -> SequenceTable:
    """Return sequences of some sizes, with gaps before them."""
    starts = np.cumsum(gaps) + np.cumsum([0, *sizes[:-1]])
    own = {} if held is None else {"short": np.array(held, np.int64)}
    return SequenceTable(starts.astype(np.int64), (starts + sizes).astype(np.int64), own)


@st.composite
def tables(draw: st.DrawFn) -> SequenceTable:
    sizes = draw(lengths)
    gaps = [draw(st.integers(0, 2)) for _ in sizes]
    held = [max(0, size - draw(st.integers(0, 1))) for size in sizes]
    return table_of(sizes, gaps, held if draw(st.booleans()) else None)


@given(tables(), st.lists(st.tuples(offsets, pads), max_size=3), st.integers(1, 4))
def test_samples_are_the_rows_whose_steps_are_there(table, several, every):
    names = [draw for draw in ("short", "other", "third")][: len(several)]
    found = table.step_rows(dict(zip(names, several, strict=True)))
    selection = table.samples([rows for rows in found.values() if rows is not None], every)
    expected = []
    for number, (start, end) in enumerate(zip(table.starts, table.ends, strict=True)):
        held = {name: table.lengths.get(name) for name in names}
        size = {n: end - start if h is None else h[number] for n, h in held.items()}
        least = min([end - start, *(h[number] for h in table.lengths.values())])
        for step in range(0, least, every):
            if all(
                pad != "drop" or all(0 <= step + offset < size[name] for offset in given_offsets)
                for name, (given_offsets, pad) in zip(names, several, strict=True)
            ):
                expected.append(start + step)
    got = selection.samples(np.arange(selection.size))
    assert got.tolist() == expected
    assert selection.are_in(np.array(expected, np.int64)).all()
    everything = np.arange(-1, int(table.ends.max(initial=0)) + 2)
    assert (selection.are_in(everything) == np.isin(everything, expected)).all()


@given(tables(), offsets, pads, st.data())
def test_rows_of_samples(table, given_offsets, pad, data):
    possible = table.samples([])
    rows = possible.samples(np.arange(possible.size)).tolist()
    if not rows:
        return
    samples = np.array(data.draw(st.lists(st.sampled_from(rows), max_size=6)), np.int64)
    (steps,) = table.step_rows({"short": (given_offsets, pad)}).values()
    got, is_there = steps.rows(samples), steps.are_there(samples)
    numbers = table.numbers(samples)
    assert (table.steps(samples) == samples - table.starts[numbers]).all()
    for i, sample in enumerate(samples.tolist()):
        number = int(numbers[i])
        assert table.starts[number] <= sample < table.ends[number]
        first, behind = int(table.starts[number]), int(steps.ends[number])
        for k, offset in enumerate(given_offsets):
            row = sample + offset
            inside = first <= row < behind
            assert is_there[i, k] == inside
            if inside:
                assert got[i * steps.size + k] == row
            elif pad == "zero":
                assert got[i * steps.size + k] == NO_ROW
            else:
                assert got[i * steps.size + k] == (first if row < first else behind - 1)


def test_fields_with_equal_steps_share_their_rows():
    table = table_of([5, 5], [0, 0])
    a, b, c, d = table.step_rows(
        {"a": ((0, 1), "edge"), "b": ((0, 1), "edge"), "c": ((0, 1), "zero"), "d": None}
    ).values()
    assert a is b
    assert a is not c
    assert d is None


def test_samples_that_lie_evenly_take_no_memory():
    """All rows of all sequences; and every fourth, of sequences whose lengths are multiples."""
    for table, every in (table_of([5, 3, 0, 7], [2, 0, 0, 0]), 1), (table_of([8, 4], [0, 0]), 4):
        assert table.samples([], every).numbers is None
    assert table_of([5, 5], [0, 1]).samples([]).numbers is not None


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_no_rows(sizes):
    table = SequenceTable.joined([np.cumsum([0, *sizes])])
    assert table.starts.size == len(sizes)
    assert table.samples([]).size == 0
    assert table.numbers(np.zeros(0, np.int64)).size == 0
