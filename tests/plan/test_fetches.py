"""Ranges of far sources: what is joined, and found, as sets of bytes say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from h5async.plan.records import ByteRanges, Places, extents_of, requests_of, union

SIZES = [300_000, 0, 5_000_000, 1]
MOST, GAP = 2 << 20, 32 << 10

pieces = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5_000_000), st.integers(0, 200_000)), max_size=40
)


def arrays(several: list[tuple[int, int, int]]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*several, strict=True)] or [
        np.zeros(0, np.int64)
    ] * 3


def covered(several: list[tuple[int, int, int]]) -> np.ndarray:
    """Return which bytes of all sources, one after the other, are in pieces."""
    starts, is_in = np.cumsum([0, *SIZES]), np.zeros(sum(SIZES), bool)
    for source, offset, nbytes in several:
        end = min(offset + nbytes, SIZES[source])
        is_in[starts[source] + offset : starts[source] + max(offset, end)] = offset < SIZES[source]
    return is_in


def pieces_of(ranges: ByteRanges) -> list[tuple[int, int, int]]:
    source, offset = PLACES.sources(ranges.begins)
    columns = source, offset, ranges.ends - ranges.begins
    return list(zip(*(column.tolist() for column in columns), strict=True))


PLACES = Places(np.array(SIZES, np.int64))


@given(pieces, pieces)
def test_ranges_and_requests(one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]):
    ranges = union(PLACES.ranges(*arrays(one)), PLACES.ranges(*arrays(other)))
    assert np.array_equal(covered(pieces_of(ranges)), covered(one + other))
    assert (ranges.begins[1:] >= ranges.ends[:-1]).all()
    assert ranges.nbytes == covered(one + other).sum()
    bounds = requests_of(ranges)
    requests = extents_of(ranges, bounds)
    assert (np.diff(bounds) > 0).all()
    assert bounds[-1] == ranges.size
    found = ranges.find(*requests)
    assert np.array_equal(found, np.repeat(np.arange(requests.size), np.diff(bounds)))
    wanted = np.add.reduceat(ranges.ends - ranges.begins, bounds[:-1]) if ranges.size else ()
    for i, (source, offset, nbytes) in enumerate(pieces_of(requests)):
        assert offset + nbytes <= SIZES[source]
        several = ranges.chosen(found == i)
        assert several.size == 1 or nbytes <= MOST
        gaps = several.begins[1:] - several.ends[:-1]
        assert 2 * wanted[i] >= nbytes or (gaps <= GAP).all()
    near = requests.begins[1:] - requests.ends[:-1] <= GAP
    both = requests.ends[1:] - requests.begins[:-1]
    assert not (near & (both <= MOST // 2)).any()


@given(pieces, pieces)
def test_what_is_found_among_others(
    one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]
):
    ranges, others = PLACES.ranges(*arrays(one)), PLACES.ranges(*arrays(other))
    found = ranges.find(*others)
    for i, (begin, end) in enumerate(zip(*ranges, strict=True)):
        holding = np.flatnonzero((others.begins <= begin) & (others.ends >= end))
        assert found[i] == (holding[0] if holding.size else -1)


def test_requests_lie_between_those_of_another_group():
    begins = np.arange(4) * 1000
    ranges = ByteRanges(begins, begins + 10)
    assert requests_of(ranges).tolist() == [0, 4]
    assert requests_of(ranges, np.array([0, 0, 3, 3])).tolist() == [0, 2, 4]
