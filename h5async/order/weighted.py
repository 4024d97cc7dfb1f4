"""Draws samples with replacement, in proportion to their weights.

A draw takes constant time with an alias table (A. J. Walker, "An Efficient Method for Generating
Discrete Random Variables with General Distributions", ACM Trans. Math. Softw. 3, 1977), made in
linear time (M. D. Vose, IEEE Trans. Softw. Eng. 17, 1991), here by whole arrays. Random numbers
come from a counter, the position of the draw (Philox 4x64: J. K. Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011). So a draw depends on seed, epoch and position alone.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.order.permutation import round_keys

Int64s = NDArray[np.int64]

_BLOCK = 4096  # draws that are computed at a time
_BITS = np.uint64(11)  # dropped: a float64 has 53


class WeightedOrder:
    """Positions drawn with replacement. Thread-safe.

    `weights` is (n,), finite, not negative, and not all 0: one per position. `digest` is a short
    hash of them, and `table` their `alias_table`.
    """

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        self.table = alias_table(weights)
        self.digest = hashlib.blake2b(weights.astype("<f8").tobytes(), digest_size=16).hexdigest()

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the draws at positions `start` to `stop` of an epoch, as a new array."""
        core, keys = load_core(), self.mapping(epoch)[3:]
        if core is not None:
            drawn = np.empty(stop - start, np.int64)
            where = address(self.table), address(keys), address(drawn)
            core.draw(*where, self.table.size, start, drawn.size)
            return drawn
        first, behind = start // _BLOCK, -(-stop // _BLOCK)
        found = [np.zeros(0, np.int64), *(self._drawn(keys, n) for n in range(first, behind))]
        return np.concatenate(found)[start - first * _BLOCK : stop - first * _BLOCK]

    def mapping(self, epoch: int) -> NDArray[np.uint64]:
        """Return the parameters of an epoch's draws, beside the table, for the core.

        uint64 (9,): the number of columns, two zeros, the keys. Shared: do not modify.
        """
        return _mapping(self.table.size, self._seed, epoch)

    def _drawn(self, keys: NDArray[np.uint64], number: int) -> Int64s:
        """Draw a block without the core."""
        # Each count gives four numbers. (Multiplying by powers of two does not round.)
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
    """Return the alias table of some weights, with members ``share`` and ``alias``.

    All columns are equally probable. Column i stands for i with probability ``share[i]``, and
    otherwise for ``alias[i]``.
    """
    scaled = weights / weights.max()  # the sum must not overflow
    # Sequentially: the order in which `sum` adds up depends on the processor.
    scaled *= weights.size / np.add.accumulate(scaled)[-1]
    is_small = scaled < 1
    small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    table = np.empty(weights.size, [("share", np.float64), ("alias", np.int64)])
    share, alias = table["share"], table["alias"]
    share[:], alias[:] = 1, np.arange(weights.size)
    if not small.size or not large.size:  # rounding may leave no large ones
        return table
    # The deficits of small columns are filled from the surpluses of large ones, in order. A large
    # column that gave too much is filled from the next one.
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
