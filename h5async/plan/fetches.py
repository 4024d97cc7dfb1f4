"""Joins the byte ranges that a batch needs of far sources into requests. Pure.

Ranges enter as the core lists them, with repetitions, and overlapping. Sorted ones that do not
overlap leave, and the requests by which they are fetched.
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


class ByteRanges(NamedTuple):
    """Byte ranges, int64 (n,): the number of the source of each, where it begins, its length."""

    source: Int64s
    offset: Int64s
    nbytes: Int64s

    @classmethod
    def joined(cls, parts: list[ByteRanges]) -> ByteRanges:
        """Return the ranges of several."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def within(self, sizes: Int64s) -> ByteRanges:
        """Return what lies within the sources, whose sizes are given by their numbers."""
        nbytes = np.minimum(self.nbytes, sizes[self.source] - self.offset)
        chosen = nbytes > 0
        return ByteRanges(self.source[chosen], self.offset[chosen], nbytes[chosen])

    def apart(self) -> ByteRanges | None:
        """Return the ranges sorted, each once; None if some overlap."""
        if not self.size:
            return self
        order = np.lexsort(self[::-1])
        source, offset, nbytes = (column[order] for column in self)
        is_new = np.append(True, (np.diff(source) != 0) | (np.diff(offset) != 0))
        is_new[1:] |= np.diff(nbytes) != 0
        source, offset, nbytes = source[is_new], offset[is_new], nbytes[is_new]
        goes_on = source[1:] == source[:-1]
        if (goes_on & (offset[1:] < offset[:-1] + nbytes[:-1])).any():
            return None
        return ByteRanges(source, offset, nbytes)

    def same(self, other: ByteRanges) -> bool:
        """Tell whether two of these are equal."""
        return self.size == other.size and all(map(np.array_equal, self, other))

    @property
    def size(self) -> int:
        """The number of ranges."""
        return self.source.size


NO_RANGES = ByteRanges(*[np.zeros(0, np.int64)] * 3)


def union(ranges: ByteRanges) -> ByteRanges:
    """Return the same bytes as ranges that are sorted, and do not overlap."""
    if ranges.size < 2:
        return ranges
    source, offset, nbytes = (column[np.lexsort(ranges[1::-1])] for column in ranges)
    # Ends never fall within a source, if each source is moved behind those before it.
    span = int((offset + nbytes).max()) + 1 if offset.size else 1
    number = np.cumsum(np.diff(source, prepend=source[0]) != 0)
    if span > (1 << 62) // (int(number[-1]) + 1):
        return _union_slowly(source, offset, nbytes)
    ends = np.maximum.accumulate(offset + nbytes + number * span)
    begins = offset + number * span
    is_first = np.append(True, begins[1:] >= ends[:-1])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], source.size) - 1
    return ByteRanges(source[first], offset[first], ends[last] - begins[first])


def _union_slowly(source: Int64s, offset: Int64s, nbytes: Int64s) -> ByteRanges:
    """Do the same, of sources of any size, one at a time."""
    parts = []
    for one in np.unique(source):
        here = source == one
        ends = np.maximum.accumulate(offset[here] + nbytes[here])
        begins = offset[here]
        first = np.flatnonzero(np.append(True, begins[1:] >= ends[:-1]))
        last = np.append(first[1:], begins.size) - 1
        found = begins[first]
        parts.append(ByteRanges(np.full(first.size, one), found, ends[last] - found))
    return ByteRanges.joined(parts)


def requests_of(ranges: ByteRanges) -> Int64s:
    """Return the first range of each request, and the number of all: int64 (requests + 1,).

    `ranges` are sorted, and do not overlap. Those of a request follow each other in a source, near
    enough, or so that at least half of its bytes are wanted.
    """
    source, offset, nbytes = (column.tolist() for column in ranges)
    firsts, begin, wanted, end = [], 0, 0, 0
    for i, (number, at, count) in enumerate(zip(source, offset, nbytes, strict=True)):
        joins = i > 0 and number == source[i - 1] and at + count - begin <= _MOST_NBYTES
        if joins and (at - end <= _GAP_NBYTES or 2 * (wanted + count) >= at + count - begin):
            wanted += count
        else:
            firsts.append(i)
            begin, wanted = at, count
        end = at + count
    return np.array([*firsts, len(source)], np.int64)
