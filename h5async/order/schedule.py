"""Tells which epoch and position a batch has, from its serial number.

Serial numbers go on through all epochs. The first one stands for any position, such as that at
which the state of a reader was saved; so the first epoch may be the rest of one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from h5async.order.ranks import Rank
from h5async.order.sampling import OrderKey, Sampling


class Position(NamedTuple):
    """A batch.

    Attributes
    ----------
    epoch, number
        Which batch of which epoch.
    start
        Position in the epoch's order at which the step of this batch begins.
    """

    epoch: int
    number: int
    start: int


_position = functools.partial(tuple.__new__, Position)  # in half the time


@dataclass(frozen=True)
class Schedule:
    """Which batch has which serial number.

    Attributes
    ----------
    sampling
        Says how many batches an epoch has: at least one.
    serial, epoch, start
        The first batch: its serial number, its epoch, and the position in the epoch's order.
    """

    sampling: Sampling
    serial: int = 0
    epoch: int = 0
    start: int = 0

    @functools.cached_property
    def _first(self) -> int:
        """Batches in the first epoch, or the rest of it."""
        return self.sampling.batches_from(self.start)

    @classmethod
    def beginning(cls, sampling: Sampling, serial: int, epoch: int, start: int) -> Schedule:
        """Make a schedule; where no batch of the epoch is left, it begins with the next epoch."""
        if start and not sampling.batches_from(start):
            epoch, start = epoch + 1, 0
        return cls(sampling, serial, epoch, start)

    def position(self, serial: int) -> Position:
        """Return which batch has a serial number."""
        step, first = self.sampling.step_samples, self._first
        passed = serial - self.serial
        if passed < first:
            start = self.start + passed * step
            return _position((self.epoch, start // step, start))
        epochs, number = divmod(passed - first, self.sampling.num_batches)
        return _position((self.epoch + 1 + epochs, number, number * step))

    def is_last(self, serial: int) -> bool:
        """Tell whether a batch is the last of its epoch."""
        after = serial + 1 - self.serial - self._first
        return after >= 0 and after % self.sampling.num_batches == 0

    def epoch_begin(self, serial: int) -> int:
        """Return the first serial number, from `serial` on, at which an epoch or a rest begins."""
        passed = serial - self.serial
        if passed <= 0:
            return self.serial
        epochs = -(-max(0, passed - self._first) // self.sampling.num_batches)
        return self.serial + self._first + epochs * self.sampling.num_batches


class Course(NamedTuple):
    """From where a reader goes on, and in which order: one value, so it changes as a whole.

    Attributes
    ----------
    rank
        Whose batches these are, of how many.
    place
        Epoch, position, and batch and world size with which the epoch was begun, if known: from
        where to go on once the rank is known.
    origin
        An epoch, and with what batch and world size it was begun.
    order
        Which order of samples that gives.
    schedule
        Which batch has which serial number.
    """

    rank: Rank
    place: tuple[int, int, tuple[int, int] | None]
    origin: tuple[int, tuple[int, int]]
    order: OrderKey
    schedule: Schedule
