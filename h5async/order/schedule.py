"""Serial numbers of batches enter; epochs, and positions in their order, leave. Pure.

Serial numbers go on through all epochs. They begin with a position: where the reader was when its
state was saved, say. The first epoch may be the rest of one.
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


@dataclass(frozen=True)
class Schedule:
    """Which batch has which serial number.

    Attributes
    ----------
    sampling
        Says how many batches an epoch has; not none.
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
        """Make a schedule; where no batch is left of the epoch, it begins with the next one."""
        if start and not sampling.batches_from(start):
            epoch, start = epoch + 1, 0
        return cls(sampling, serial, epoch, start)

    def position(self, serial: int) -> Position:
        """Return which batch has a serial number."""
        step, first = self.sampling.step_samples, self._first
        passed = serial - self.serial
        if passed < first:
            start = self.start + passed * step
            return Position(self.epoch, start // step, start)
        epochs, number = divmod(passed - first, self.sampling.num_batches)
        return Position(self.epoch + 1 + epochs, number, number * step)

    def is_last(self, serial: int) -> bool:
        """Tell whether a batch is the last of its epoch."""
        return self.epoch_begin(serial + 1) == serial + 1

    def epoch_begin(self, serial: int) -> int:
        """Return with which serial number, from `serial` on, an epoch or its rest begins."""
        passed = serial - self.serial
        if passed <= 0:
            return self.serial
        epochs = -(-max(0, passed - self._first) // self.sampling.num_batches)
        return self.serial + self._first + epochs * self.sampling.num_batches


class Course(NamedTuple):
    """Where a reader goes, as one value: it is changed as a whole, or not at all.

    Attributes
    ----------
    rank
        Whose batches these are, of how many.
    place
        Epoch, position, and what the epoch was begun with, where it was said: where to go on when
        the rank becomes known.
    origin
        With what batch and world size which epoch was begun.
    order
        Which order of samples that is.
    schedule
        Which batch has which serial number.
    """

    rank: Rank
    place: tuple[int, int, tuple[int, int] | None]
    origin: tuple[int, tuple[int, int]]
    order: OrderKey
    schedule: Schedule
