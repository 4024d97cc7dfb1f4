"""Joins the byte ranges that a batch needs of far sources into requests. Pure.

Ranges enter as the core lists them, with repetitions, and overlapping. Sorted ones that do not
overlap leave, and the requests by which they are fetched. All sources are laid end to end, so that
one number is a place in any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

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
