"""(Units of samples, window, seed, epoch) enter; the order of an epoch's samples leaves. Pure.

A unit is a group of samples that is read and decoded as a whole: a chunk, or the chunks that hold
pieces of the same samples. Units come up in random order, and each one's samples, in random order
too, are spread evenly over the `window` rounds that follow: in round `r` there is one sample in
each slot `s`, of the unit that came up ``s * window // size`` rounds before. This is the
convolutional interleaver of G. D. Forney ("Burst-Correcting Codes for the Classic Bursty Channel",
IEEE Trans. Commun. Technol. 19, 1971): every sample has a place of its own, one unit comes up and
one is done with in each round, so that no more than `window` are needed at a time and the work is
the same throughout, but at the ends of an epoch. Last, the samples of a few rounds are shuffled
among themselves.

The order is part of what users rely on to repeat a run: changing it is a breaking change.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.layout import DatasetLayout
from h5async.sampling import keyed_hash, permute, permute_each, round_keys

Int64s = NDArray[np.int64]

_BLOCK_SAMPLES = 1024  # computed at a time: costs little more than fewer
_GROUP_SAMPLES = 128  # shuffled among themselves, or else one round, or what a small window allows
_IN_FLIGHT_SHARE = 1 / 4  # of the memory: for what batches on their way bring in


@dataclass(frozen=True)
class _Table:
    """What an epoch's order is computed from.

    Attributes
    ----------
    unit
        (n,): units in the order in which they come up.
    begin
        int64 (blocks + 1,): first position of each block.
    """

    unit: Int64s
    begin: Int64s


class WindowOrder:
    """The order of samples of `shuffle="window"`. Safe to use from many threads.

    Parameters
    ----------
    bounds
        int64 (n + 1,), ascending from 0: unit i is samples ``bounds[i]`` to ``bounds[i + 1]``.
    window
        Units that are mixed with each other; 1: one after the other.
    seed
        Any integer.
    """

    def __init__(self, bounds: Int64s, window: int, seed: int) -> None:
        self._bounds = bounds
        self._counts = np.diff(bounds)
        self._num_units = self._counts.size
        self._size = size = int(self._counts.max(initial=1))
        self._are_equal = bool((self._counts == size).all())
        self.window = window
        self._seed = seed
        self._delay = np.arange(size) * window // size
        self._group_rounds = max(1, min(_GROUP_SAMPLES // size, window // 4))
        groups = -(-_BLOCK_SAMPLES // (size * self._group_rounds))
        self._block_rounds = groups * self._group_rounds
        self._table = functools.lru_cache(maxsize=2)(self._new_table)
        self._block = functools.lru_cache(maxsize=4)(self._new_block)

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array."""
        begin = self._table(epoch).begin
        first = int(np.searchsorted(begin, start, side="right")) - 1
        last = int(np.searchsorted(begin, stop, side="left"))
        blocks = [self._block(epoch, number) for number in range(first, last)]
        offset = int(begin[first])
        return np.concatenate(blocks)[start - offset : stop - offset]

    def _new_table(self, epoch: int) -> _Table:
        count = self._num_units
        unit = permute(np.arange(count), count, self._seed, epoch)
        rounds = np.arange(count + int(self._delay[-1]))
        size = np.searchsorted(self._delay, rounds, side="right")
        size -= np.searchsorted(self._delay, rounds - count, side="right")
        for position in np.flatnonzero(self._counts[unit] < self._size).tolist():
            missing = self._delay[self._counts[unit[position]] :]
            size -= np.bincount(position + missing, minlength=size.size)
        begin = np.append(0, np.cumsum(size))[:: self._block_rounds]
        total = int(self._bounds[-1])
        return _Table(unit, begin if begin[-1] == total else np.append(begin, total))

    def _new_block(self, epoch: int, number: int) -> Int64s:
        """Return the samples of a block of rounds, in order; not to be changed."""
        table, size = self._table(epoch), self._size
        keys = round_keys(self._seed, epoch, "window")
        rounds = np.arange(number * self._block_rounds, (number + 1) * self._block_rounds)
        place = rounds[:, None] - self._delay
        is_there = (place >= 0) & (place < self._num_units)
        unit = table.unit[np.where(is_there, place, 0)]
        slot = np.broadcast_to(np.arange(size), unit.shape)
        if not self._are_equal:
            is_there &= slot < self._counts[unit]
        # Sorted by hash within each group, with those that are not there at its end.
        group = self._group_rounds * size
        serial = np.arange(rounds[0] * size, rounds[0] * size + unit.size, dtype=np.uint64)
        mixed = (keyed_hash(serial, keys[0], keys[1]) >> np.uint64(1)).astype(np.int64)
        mixed[~is_there.ravel()] = np.iinfo(np.int64).max
        order = np.argsort(mixed.reshape(-1, group), axis=1)
        order += np.arange(0, unit.size, group)[:, None]
        order = order[is_there.ravel()[order]]
        unit, slot = unit.ravel()[order], slot.ravel()[order]
        return self._bounds[unit] + permute_each(slot, self._counts[unit], unit, keys)


def window_order(layouts: Sequence[DatasetLayout], window_nbytes: int, seed: int) -> WindowOrder:
    """Return the order of `shuffle="window"` for the fields of a reader.

    The field whose units are the largest decides what a unit is. The window holds as many units
    as fit, decoded, with room for others, but at most half of all.
    """
    leader = max(layouts, key=lambda layout: (layout.unit_nbytes, layout.row_nbytes))
    bounds = leader.unit_bounds()
    counts = np.diff(bounds)
    unit_nbytes = sum(layout.unit_nbytes for layout in layouts)
    size = int(counts.max(initial=1))
    if not unit_nbytes:  # nothing is kept: what is read from is near each other
        unit_nbytes = size * sum(layout.row_nbytes for layout in layouts)
    fitting = (1 - _IN_FLIGHT_SHARE) * window_nbytes / max(1, unit_nbytes) - 2
    # A unit's samples come `window / size` rounds apart, and others come up meanwhile; so they do
    # in a group of rounds, a quarter of the window at most.
    window = max(2, min(int(fitting / (1 + 1 / size + 1 / 4)), -(-counts.size // 2)))
    return WindowOrder(bounds, window, seed)


def kept_nbytes(layout: DatasetLayout, layouts: Sequence[DatasetLayout], window_nbytes: int) -> int:
    """Return a field's share of the memory for the window."""
    total = sum(other.unit_nbytes for other in layouts)
    return window_nbytes * layout.unit_nbytes // max(1, total)
