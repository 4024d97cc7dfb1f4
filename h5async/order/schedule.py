"""Maps a batch's serial number to its epoch and position.

Serial numbers go on through all epochs. The first one may stand for any position, such as that of a
saved state, so the first epoch may be the rest of one.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.order.ranks import Rank
from h5async.order.sampling import OrderKey, Sampling


class Position(NamedTuple):
    """A batch's epoch, its number in it, and the position at which its step begins."""

    epoch: int
    number: int
    start: int


_MANY_OTHERS = 64  # searching fewer is faster than dropping some
_position = functools.partial(tuple.__new__, Position)  # takes half the time


@dataclass(frozen=True)
class Schedule:
    """A mapping between serial numbers and batches.

    Attributes
    ----------
    sampling
        Tells the number of batches in an epoch: at least one.
    serial, epoch, start
        The first batch: its serial number, its epoch, and the position in the epoch's order.
    others
        Ascending serial numbers, from `serial` on, of batches outside of epochs.
    """

    sampling: Sampling
    serial: int = 0
    epoch: int = 0
    start: int = 0
    others: tuple[int, ...] = ()

    @functools.cached_property
    def _first(self) -> int:
        """Number of batches in the first epoch, or in the rest of it."""
        return self.sampling.batches_from(self.epoch, self.start)

    @classmethod
    def beginning(cls, sampling: Sampling, serial: int, epoch: int, start: int) -> Schedule:
        """Make a schedule from a position on; at the end of an epoch, from the next one."""
        if start and not sampling.batches_from(epoch, start):
            epoch, start = epoch + 1, 0
        kind = Schedule if sampling.is_uniform else VaryingSchedule
        return kind(sampling, serial, epoch, start)

    def position(self, serial: int) -> Position:
        """Return the batch of a serial number; outside of epochs, the batch that follows."""
        step, first = self.sampling.step_samples, self._first
        passed = serial - self.serial
        if self.others:
            passed -= bisect.bisect_left(self.others, serial)
        if passed < first:
            start = self.start + passed * step
            return _position((self.epoch, start // step, start))
        epochs, number = divmod(passed - first, self.sampling.num_batches)
        return _position((self.epoch + 1 + epochs, number, number * step))

    def is_last(self, serial: int) -> bool:
        """Tell whether a batch is the last of its epoch."""
        after = serial + 1 - self.serial - self._first
        if self.others:
            at = bisect.bisect_left(self.others, serial)
            if at < len(self.others) and self.others[at] == serial:
                return False  # it is outside of epochs
            after -= at
        return after >= 0 and after % self.sampling.num_batches == 0

    def epoch_begin(self, serial: int) -> int:
        """Return the first serial number, from `serial` on, at which an epoch or a rest begins.

        Batches outside of epochs that come right before it are skipped.
        """
        passed = serial - self.serial - bisect.bisect_left(self.others, serial)
        found = 0
        if passed > 0:
            epochs = -(-max(0, passed - self._first) // self.sampling.num_batches)
            found = self._first + epochs * self.sampling.num_batches
        found += self.serial
        for other in self.others:
            found += other <= found
        return max(found, serial)

    def with_other(self, serial: int, following: int) -> Schedule:
        """Return a schedule in which `serial` is a batch outside of epochs.

        Batches before `following` were delivered; once there are many, they are forgotten.
        """
        if len(self.others) < _MANY_OTHERS:
            others = (*self.others, serial)
            return type(self)(self.sampling, self.serial, self.epoch, self.start, others)
        gone = bisect.bisect_left(self.others, following)
        if not gone:
            return replace(self, others=(*self.others, serial))
        epoch, _, start = self.position(following)
        others = (*self.others[gone:], serial)
        return type(self)(self.sampling, following, epoch, start, others)


@dataclass(frozen=True)
class VaryingSchedule(Schedule):
    """A `Schedule` whose epochs have different numbers of batches."""

    # Cumulative numbers of batches at the ends of the first and later epochs.
    _ends: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def _epoch_of(self, passed: int) -> tuple[int, int, int]:
        """Return a batch's epoch, counted from the first one, and that epoch's begin and end."""
        with self._lock:
            ends = self._ends
            if not ends:
                ends.append(self._first)
            while ends[-1] <= passed:
                ends.append(ends[-1] + self.sampling.batches_in(self.epoch + len(ends)))
            later = bisect.bisect_right(ends, passed)
            return later, ends[later - 1] if later else 0, ends[later]

    def _passed(self, serial: int) -> int:
        """Return the number of batches of epochs before a serial number."""
        return serial - self.serial - bisect.bisect_left(self.others, serial)

    def position(self, serial: int) -> Position:
        """Return the batch of a serial number; outside of epochs, the batch that follows."""
        passed = self._passed(serial)
        later, begin, _ = self._epoch_of(passed)
        epoch, start = self.epoch + later, 0 if later else self.start
        return _position((epoch, *self.sampling.step_at(epoch, start, passed - begin)))

    def is_last(self, serial: int) -> bool:
        """Tell whether a batch is the last of its epoch."""
        if serial in self.others:
            return False
        passed = self._passed(serial)
        return self._epoch_of(passed)[2] == passed + 1

    def epoch_begin(self, serial: int) -> int:
        """Return the first serial number, from `serial` on, at which an epoch or a rest begins."""
        passed = self._passed(serial)
        found = self.serial
        if passed > 0:
            found += self._epoch_of(passed - 1)[2]
        for other in self.others:
            found += other <= found
        return max(found, serial)


class Course(NamedTuple):
    """Where a reader goes on, and in which order: one value, so that it changes as a whole.

    Attributes
    ----------
    place
        Where to go on once the rank is known: epoch, position, and the batch and world size with
        which the epoch was begun, if known.
    origin
        An epoch, and the batch and world size with which it was begun.
    order
        Key of the resulting order.
    given
        Samples of batches outside of epochs, by serial number.
    """

    rank: Rank
    place: tuple[int, int, tuple[int, int] | None]
    origin: tuple[int, tuple[int, int]]
    order: OrderKey
    schedule: Schedule
    given: Mapping[int, NDArray[np.int64]] = MappingProxyType({})
