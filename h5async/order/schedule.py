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
    """A mapping between serial numbers and batches, of which an epoch has some. Thread-safe.

    The first batch has the number `serial`, and begins at position `start` of `epoch`. `others` are
    ascending serial numbers, from `serial` on, of batches outside of epochs.
    """

    sampling: Sampling
    serial: int = 0
    epoch: int = 0
    start: int = 0
    others: tuple[int, ...] = ()

    # Cumulative numbers of batches at the ends of the first and later epochs, if they vary.
    _ends: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def _first(self) -> int:
        """Number of batches in the first epoch, or in the rest of it."""
        return self.sampling.batches_from(self.epoch, self.start)

    @classmethod
    def beginning(cls, sampling: Sampling, serial: int, epoch: int, start: int) -> Schedule:
        """Make a schedule from a position on; at the end of an epoch, from the next one."""
        if start and not sampling.batches_from(epoch, start):
            epoch, start = epoch + 1, 0
        return cls(sampling, serial, epoch, start)

    def _passed(self, serial: int) -> int:
        """Return the number of batches of epochs before a serial number."""
        passed = serial - self.serial
        return passed - bisect.bisect_left(self.others, serial) if self.others else passed

    def _epoch_of(self, passed: int) -> tuple[int, int, int]:
        """Return a batch's epoch, counted from the first one, and that epoch's begin and end."""
        first = self._first
        if passed < first:
            return 0, 0, first
        if self.sampling.is_uniform:
            size = self.sampling.num_batches
            later = (passed - first) // size
            return later + 1, first + later * size, first + (later + 1) * size
        with self._lock:
            ends = self._ends or [first]
            while ends[-1] <= passed:
                ends.append(ends[-1] + self.sampling.batches_in(self.epoch + len(ends)))
            self._ends[:] = ends
            later = bisect.bisect_right(ends, passed)
            return later, ends[later - 1], ends[later]

    def position(self, serial: int) -> Position:
        """Return the batch of a serial number; outside of epochs, the batch that follows."""
        passed = self._passed(serial) if self.others else serial - self.serial
        sampling, epoch, first = self.sampling, self.epoch, self._first
        if passed < first:
            return _position((epoch, *sampling.step_at(epoch, self.start, passed)))
        if sampling.is_uniform:  # in half the time: this is called several times per batch
            later, number = divmod(passed - first, sampling.num_batches)
            return _position((epoch + 1 + later, number, number * sampling.step_samples))
        later, begin, _ = self._epoch_of(passed)
        return _position((epoch + later, *sampling.step_at(epoch + later, 0, passed - begin)))

    def is_last(self, serial: int) -> bool:
        """Tell whether a batch is the last of its epoch."""
        if serial in self.others:
            return False
        passed = self._passed(serial) if self.others else serial - self.serial
        after = passed + 1 - self._first
        if after <= 0:
            return after == 0
        if self.sampling.is_uniform:
            return after % self.sampling.num_batches == 0
        return self._epoch_of(passed)[2] == passed + 1

    def epoch_begin(self, serial: int) -> int:
        """Return the first serial number, from `serial` on, at which an epoch or a rest begins.

        Batches outside of epochs that come right before it are skipped.
        """
        passed = self._passed(serial)
        found = self.serial
        if passed > 0:
            found += self._epoch_of(passed - 1)[2]
        for other in self.others:
            found += other <= found
        return max(found, serial)

    def with_other(self, serial: int, following: int) -> Schedule:
        """Return a schedule in which `serial` is a batch outside of epochs.

        Batches before `following` were delivered; once there are many, they are forgotten.
        """
        gone = bisect.bisect_left(self.others, following)
        if len(self.others) < _MANY_OTHERS or not gone:
            return replace(self, others=(*self.others, serial))
        epoch, _, start = self.position(following)
        return Schedule(self.sampling, following, epoch, start, (*self.others[gone:], serial))


class Course(NamedTuple):
    """Where a reader goes on, and in which order: one value, so that it changes as a whole.

    `place` is where to go on once the rank is known: epoch, position, and the batch and world size
    with which the epoch was begun, if known. `origin` is an epoch, and the batch and world size
    with which it was begun; `order`, the key of the resulting order; `given`, the samples of
    batches outside of epochs, by serial number.
    """

    rank: Rank
    place: tuple[int, int, tuple[int, int] | None]
    origin: tuple[int, tuple[int, int]]
    order: OrderKey
    schedule: Schedule
    given: Mapping[int, NDArray[np.int64]] = MappingProxyType({})

    def position(self, serial: int) -> Position:
        """Return the place of a batch; -1, -1 and 0 for given samples."""
        if serial in self.given:
            return _OF_GIVEN
        return self.schedule.position(max(serial, self.schedule.serial))


_OF_GIVEN = Position(-1, -1, 0)
