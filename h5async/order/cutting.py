"""Cuts samples into batches by their lengths, and groups samples of similar length. Pure.

Input: lengths in the order of an epoch. Output: where batches end. Unsorted samples fill a batch
until the sum of their lengths reaches the limit. Sorted samples are meant for models that pad, so
padding counts: number of samples times the longest length.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core

Int64s = NDArray[np.int64]

NO_LIMIT = 1 << 62
_MOVED = 1 << 16  # batches that are moved at a time


class Limits(NamedTuple):
    """Limits of a batch or a window.

    Attributes
    ----------
    samples
        Maximum number of samples.
    values
        Maximum number of values; a single sample may exceed it.
    """

    samples: int
    values: int = NO_LIMIT

    def times(self, count: int) -> Limits:
        """Return the limits of `count` batches."""
        return Limits(*(min(NO_LIMIT, limit * count) for limit in self))

    def are_reached(self, samples: int, values: int) -> bool:
        """Tell whether a batch is full, even if no sample follows."""
        return samples >= self.samples or values >= self.values


def cut(lengths: Int64s, limits: Limits, *, is_end: bool) -> Int64s:
    """Cut samples into runs, each as long as the limits allow; return where runs end (int64).

    Unless `is_end`, more samples follow: the last run may go on and is left out. `lengths` is int64
    (n,): values per sample.
    """
    core = load_core()
    if core is None:
        ends = _cut(lengths, limits)
    else:
        ends = np.empty(lengths.size, np.int64)
        count = core.cut(address(lengths), address(ends), lengths.size, *limits)
        ends = ends[:count].copy()
    if ends.size and not is_end:
        last = ends[-1] - (ends[-2] if ends.size > 1 else 0)
        return ends[: ends.size - (last < limits.samples)]
    return ends


def _cut(lengths: Int64s, limits: Limits) -> Int64s:
    """Compute the same without the core."""
    total = np.cumsum(lengths, dtype=np.int64).data
    found, at, before = [], 0, 0
    while at < lengths.size:
        most = min(at + limits.samples, lengths.size)
        at = max(at + 1, bisect_right(total, before + limits.values, at, most))
        before = total[at - 1]
        found.append(at)
    return np.array(found, np.int64)


def cut_sorted(lengths: Int64s, windows: Int64s, limits: Limits) -> tuple[Int64s, Int64s]:
    """Sort samples by length within windows, longest first, and cut them into batches.

    The values of a batch are its samples times the longest length.

    Parameters
    ----------
    lengths
        int64 (n,): values per sample.
    windows
        int64: where the windows end; the last one ends at n.

    Returns
    -------
    order, ends
        int64 (n,): the sorted samples; equal lengths keep their order. int64: where batches end.
    """
    core = load_core()
    if core is not None and lengths.size:
        order, ends = np.empty_like(lengths), np.empty_like(lengths)
        arrays = map(address, (lengths, windows, order, ends))
        count = core.cut_sorted(*arrays, windows.size, *limits)
        if count >= 0:
            return order, ends[:count].copy()
    return _cut_sorted(lengths, windows, limits)


def _cut_sorted(lengths: Int64s, windows: Int64s, limits: Limits) -> tuple[Int64s, Int64s]:
    """Compute the same without the core."""
    sizes = np.diff(windows, prepend=0)
    order = _longest_first(lengths, np.repeat(np.arange(windows.size), sizes))
    longest = lengths[order]
    most = np.full(lengths.size, limits.samples, np.int64)
    np.floor_divide(limits.values, longest, out=most, where=longest > 0)
    np.clip(most, 1, limits.samples, out=most)
    most += np.arange(lengths.size)
    np.minimum(most, np.repeat(windows, sizes), out=most)
    ends, at, found = most.data, 0, []
    while at < lengths.size:
        at = ends[at]
        found.append(at)
    return order, np.array(found, np.int64)


def _longest_first(lengths: Int64s, window: Int64s) -> Int64s:
    """Return samples sorted by window, then by length, descending, then by number."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    longest = int(lengths.max())
    number_bits = (lengths.size - 1).bit_length()
    length_bits = longest.bit_length()
    if number_bits + length_bits + int(window[-1]).bit_length() > 63:
        return np.lexsort((-lengths, window))
    # Sorting single integers takes a fraction of the time.
    keys = window << length_bits
    keys |= longest - lengths
    keys <<= number_bits
    keys |= np.arange(lengths.size)
    keys.sort()
    keys &= (1 << number_bits) - 1
    return keys


def shuffled(hashes: NDArray[np.uint64], window: int) -> Int64s:
    """Return a permutation of numbers in which each stays in its window of `window` numbers.

    `hashes` holds a random number for each of them.
    """
    size, window = hashes.size, max(1, min(window, hashes.size))
    keys = np.full(-(-size // window) * window, np.iinfo(np.uint64).max, np.uint64)
    keys[:size] = hashes >> np.uint64(1)  # below the padding
    found = np.argsort(keys.reshape(-1, window), axis=1, kind="stable")
    found += np.arange(0, keys.size, window)[:, np.newaxis]
    return np.ascontiguousarray(found.ravel()[:size])


def interleaved(counts: list[int]) -> Int64s:
    """Return the batches of several lanes in turn while all lanes have some, then the rest.

    Batches are numbered lane by lane; ``counts[i]`` is the number in lane i.
    """
    firsts, common = np.cumsum([0, *counts[:-1]]), min(counts)
    in_turn = firsts + np.arange(common)[:, np.newaxis]
    rest = [np.arange(first + common, first + n) for first, n in zip(firsts, counts, strict=True)]
    return np.concatenate((in_turn.ravel(), *rest))


def moved(
    order: NDArray[Any], begins: Int64s, sizes: Int64s, which: Int64s
) -> tuple[NDArray[Any], Int64s]:
    """Lay the requested batches end to end in another order, and return them and their bounds.

    Batch i is ``order[begins[i] : begins[i] + sizes[i]]``; `which` has the numbers of the requested
    batches in their new order. Bounds are int64 (requested + 1,).
    """
    begins, sizes = begins[which], sizes[which]
    bounds = np.zeros(which.size + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    found = np.empty(int(bounds[-1]), order.dtype)
    for first in range(0, which.size, _MOVED):
        some = slice(first, first + _MOVED)
        begin, end = bounds[first], bounds[min(first + _MOVED, which.size)]
        place = np.arange(begin, end)
        place += np.repeat(begins[some] - bounds[:-1][some], sizes[some])
        found[begin:end] = order[place]
    return found, bounds


def split(bounds: Int64s, most: int) -> Int64s:
    """Return where batches begin if those of over `most` samples are cut into equal parts."""
    sizes = np.diff(bounds)
    if not (sizes > most).any():
        return bounds
    parts = -(-sizes // most)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = np.repeat(bounds[:-1], parts) + number * np.repeat(sizes, parts) // np.repeat(
        parts, parts
    )
    return np.append(begins, bounds[-1])
