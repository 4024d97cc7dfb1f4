"""Decides which batches come next: settles the rank, and moves from epoch to epoch.

Options and launchers' ranks enter; the schedule of batches, by serial number, leaves.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import ConfigError
from h5async.opening.dataset import Samplings
from h5async.order.ranks import Rank, Source, find_source, may_change
from h5async.order.sampling import FillRequest, Sampling
from h5async.order.schedule import Course, Schedule

_log = logging.getLogger("h5async")


class SavedPosition(NamedTuple):
    """A position from which another reader can continue.

    Attributes
    ----------
    start
        Position in the epoch's order at which the next batch begins.
    batch_size, world_size
        The sizes with which the epoch was begun: the order of its samples depends on them.
    """

    epoch: int
    start: int
    batch_size: int
    world_size: int


class ReaderPosition:
    """Maps serial numbers to batches, and decides which one comes next.

    The consumer's thread changes it. All threads may read it, because it is one value in the ring
    that is replaced as a whole. Raises `ConfigError` if the environment has contradictory ranks.

    Attributes
    ----------
    has_settled
        Whether the rank is final.
    looped_epoch
        The epoch of the caller's last batch, until the epoch ends for it.
    """

    def __init__(self, config: ReaderConfig, samplings: Samplings, ring: SlotRing[Any]) -> None:
        self._config = config
        self._samplings = samplings
        self._ring = ring
        self.has_settled = False
        self.looped_epoch: int | None = None
        self._go_to(self._expected_rank(), 0, 0, None)

    def settle(self) -> None:
        """Settle rank and world size of this process.

        This waits for the first batch, because process groups are often made after the reader.
        Raises `ConfigError` as `find_source` does.
        """
        if self.has_settled:
            return
        source = self._find_source()
        _log.info("rank %d of %d: %s", *source.rank, source)
        if source.rank != self.course.rank:
            self._go_to(source.rank, *self.course.place)
        self.has_settled = True

    def _find_source(self) -> Source:
        """Return the rank and its source, from the options or as found now."""
        rank, world_size = self._config.rank, self._config.world_size
        if self._config.sampler is not None:
            return Source(Rank(0, 1), "the sampler, one per process", "", None)
        if rank is None or world_size is None:
            return find_source()
        return Source(Rank(rank, world_size), "the options rank and world_size", "", None)

    def _expected_rank(self) -> Rank:
        """Return the rank that is likely when the reader is made."""
        try:
            return self._find_source().rank
        except ConfigError:
            if may_change():
                return Rank(0, 1)  # a process group that is yet to be made will tell
            raise

    @property
    def course(self) -> Course:
        """The position as one value."""
        course: Course = self._ring.consumer.course
        return course

    @property
    def schedule(self) -> Schedule:
        """Maps serial numbers to batches."""
        return self.course.schedule

    @property
    def sampling(self) -> Sampling:
        """The order of samples, and how it is dealt."""
        return self.course.schedule.sampling

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch; before the first batch, with the rank found now.

        If epochs differ, it is that of the last batch's epoch; from its end on, of the next one.
        """
        return self._sampling_by_now().batches_in(self._epoch_by_now())

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch, of all ranks; likewise."""
        return self._sampling_by_now().samples_in(self._epoch_by_now())

    def _epoch_by_now(self) -> int:
        if self.sampling.is_uniform:
            return 0
        if self.looped_epoch is not None:
            return self.looped_epoch
        schedule = self.schedule
        if not schedule.start and not schedule.sampling.batches_in(schedule.epoch):
            return schedule.epoch  # there is no next batch
        return schedule.position(self._ring.consumer.next).epoch

    def _sampling_by_now(self) -> Sampling:
        """Return the sampling for the rank found now, without settling it."""
        if self.has_settled:
            return self.sampling
        rank = self._find_source().rank
        if rank == self.course.rank:
            return self.sampling
        if self.sampling.is_uniform:
            return dataclasses.replace(self.sampling, rank=rank.rank, world_size=rank.world_size)
        return self._samplings.at((*rank,))

    def give(self, samples: NDArray[np.int64]) -> int:
        """Request a batch of these samples, after all assigned ones; return its serial number."""

        def course_from(serial: int, following: int) -> Course:
            rank, place, origin, order, schedule, known = self.course
            given = {other: of for other, of in known.items() if other >= following}
            given[serial] = samples
            schedule = schedule.with_other(serial, following)
            return Course(rank, place, origin, order, schedule, given)

        return self._ring.ask_for(course_from)

    def place_of(self, serial: int) -> tuple[int, int]:
        """Return epoch and number of a batch; -1 and -1 for given samples."""
        course = self.course
        if serial in course.given:
            return -1, -1
        return course.schedule.position(max(serial, course.schedule.serial))[:2]

    def requests(self, assignments: Sequence[Assignment]) -> list[FillRequest]:
        """Return the requests for slots and the serial numbers assigned to them."""
        found = []
        course = self.course  # or a later one: then earlier assignments are dropped
        schedule = course.schedule
        for slot, serial in assignments:
            given = course.given.get(serial)
            if given is not None:
                found.append(FillRequest(slot, serial, -1, -1, 0, course.order, samples=given))
                continue
            position = schedule.position(max(serial, schedule.serial))
            found.append(FillRequest(slot, serial, *position, course.order))
        return found

    def jump(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches are dropped."""
        self._go_to(self.course.rank, epoch, 0, None)

    def save(self) -> SavedPosition:
        """Return the position of the caller's next batch, ignoring requested ones."""
        epoch, _, start = self.schedule.position(self._ring.consumer.next)
        course = self.course
        begun_with = self._config.batch_size, course.rank.world_size
        if course.origin[0] == epoch and start:
            begun_with = course.origin[1]
        return SavedPosition(epoch, start, *begun_with)

    def restore(self, saved: SavedPosition) -> None:
        """Continue at a saved position; requested batches are dropped."""
        start = min(saved.start, self._samplings.epoch_samples)
        self._go_to(self.course.rank, saved.epoch, start, (saved.batch_size, saved.world_size))

    def _go_to(
        self, rank: Rank, epoch: int, start: int, begun_with: tuple[int, int] | None
    ) -> None:
        """Replace the position at once: an exception in the middle changes nothing.

        `begun_with`: batch and world size with which the epoch was begun, if different from now.
        """
        own = self._config.batch_size, rank.world_size
        origin = own if begun_with is None or not start else begun_with
        is_whole = origin == own and not (start and self._samplings.lengths)
        order = (*rank,) if is_whole else (*rank, epoch, *origin, start)
        sampling = self._samplings.at(order)

        def course_from(serial: int) -> Course:
            schedule = Schedule.beginning(sampling, serial, epoch, start)
            return Course(rank, (epoch, start, begun_with), (epoch, origin), order, schedule)

        self._ring.restart(course_from)
        self.looped_epoch = None
