"""Draws samples with replacement, each as often as its weight says.

A draw takes constant time by an alias table (A. J. Walker, "An Efficient Method for Generating
Discrete Random Variables with General Distributions", ACM Trans. Math. Softw. 3, 1977), which is
made in linear time (M. D. Vose, IEEE Trans. Softw. Eng. 17, 1991), here by whole arrays. Its random
numbers are those of a counter, the position of the draw (Philox 4x64: J. K. Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011); so a draw depends on seed, epoch and
position alone.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.order.permutation import round_keys

Int64s = NDArray[np.int64]

_BLOCK = 4096  # draws that are computed at a time
_BITS = np.uint64(11)  # that are dropped: a float64 has 53


class WeightedOrder:
    """Positions that are drawn with replacement. Safe to use from many threads.

    Parameters
    ----------
    weights
        (n,), finite, not negative, and not all 0: of each position.
    seed
        Any integer.

    Attributes
    ----------
    digest
        A short text that depends on all weights.
    table
        That is drawn from; see `alias_table`.
    """

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        self.table = alias_table(weights)
        self.digest = hashlib.blake2b(weights.astype("<f8").tobytes(), digest_size=16).hexdigest()
        own = weakref.proxy(self)  # or tables would last until a garbage collection
        self._block = functools.lru_cache(maxsize=4)(
            functools.partial(WeightedOrder._new_block, own)
        )

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return what is drawn at positions `start` to `stop` of an epoch, as a new array."""
        core = load_core()
        if core is not None:
            drawn = np.empty(stop - start, np.int64)
            keys = self.mapping(epoch)[3:]
            where = address(self.table), address(keys), address(drawn)
            core.draw(*where, self.table.size, start, drawn.size)
            return drawn
        first, last = start // _BLOCK, max(start, stop - 1) // _BLOCK
        begin, end = start - first * _BLOCK, stop - first * _BLOCK
        if first == last:
            return self._block(epoch, first)[begin:end].copy()
        found = [self._block(epoch, number) for number in range(first, last + 1)]
        return np.concatenate(found)[begin:end]

    def mapping(self, epoch: int) -> NDArray[np.uint64]:
        """Return what the draws of an epoch depend on, beside the table, as the core takes it.

        Returns
        -------
        numpy.ndarray
            uint64 (9,): how many columns the table has, two zeros, the keys. Callers share the
            array, and do not change it.
        """
        return _mapping(self.table.size, self._seed, epoch)

    def _new_block(self, epoch: int, number: int) -> Int64s:
        keys = self.mapping(epoch)[3:]
        # Each count gives four numbers. (Powers of two are multiplied without rounding.)
        random = np.random.Philox(counter=number * (_BLOCK // 2), key=keys[:2])
        raw = random.random_raw(2 * _BLOCK)
        raw >>= _BITS
        uniform = raw.astype(np.float64)
        uniform *= 2.0**-53
        column, coin = uniform[:_BLOCK], uniform[_BLOCK:]
        count = self.table.size
        column *= count
        drawn = np.minimum(column.astype(np.int64), count - 1)
        found = self.table[drawn]
        return np.asarray(np.where(coin < found["share"], drawn, found["alias"]))


@functools.lru_cache(maxsize=8)
def _mapping(count: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    head = np.array([count, 0, 0], np.uint64)
    return np.concatenate((head, round_keys(seed, epoch, "weights")))


def alias_table(weights: NDArray[np.float64]) -> NDArray[Any]:
    """Return the alias table of some weights.

    Column i stands for i with probability ``share[i]``, and else for ``alias[i]``; all columns are
    equally probable.

    Returns
    -------
    numpy.ndarray
        (n,), of a dtype with the members ``share``, float64, and ``alias``, int64.
    """
    scaled = weights / weights.max()  # or the sum might overflow
    # One after the other: the order in which NumPy adds up depends on the processor.
    scaled *= weights.size / np.add.accumulate(scaled)[-1]
    is_small = scaled < 1
    small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    table = np.empty(weights.size, [("share", np.float64), ("alias", np.int64)])
    share, alias = table["share"], table["alias"]
    share[:], alias[:] = 1, np.arange(weights.size)
    if not small.size or not large.size:  # of the latter, rounding may leave none
        return table
    # What columns lack is taken from what the large ones have too much of, one after the other. A
    # large one of which too much was taken has the rest of its column from the next one.
    lacking, surplus = np.cumsum(1 - scaled[small]), np.cumsum(scaled[large] - 1)
    share[small] = scaled[small]
    before = np.append(0.0, lacking[:-1])
    giver = np.searchsorted(surplus, before, side="right")
    alias[small] = large[np.minimum(giver, large.size - 1)]
    taker = np.searchsorted(lacking, surplus[:-1], side="left")
    too_much = lacking[np.minimum(taker, small.size - 1)] - surplus[:-1]
    is_taken = (taker < small.size) & (surplus[:-1] > 0)
    share[large[:-1]] = np.where(is_taken, np.clip(1 - too_much, 0, 1), 1)
    alias[large[:-1]] = large[1:]
    return table
