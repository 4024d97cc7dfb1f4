"""Decides which batches come next: settles the rank, moves from epoch to epoch, saves positions.

A saved position is a small dict of JSON types, the same in all ranks, with what the order depends
on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import paths_text
from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import ConfigError, ReadError
from h5async.index.changes import fingerprint
from h5async.index.units import unit_nbytes
from h5async.opening.dataset import Samplings, digest
from h5async.order.ranks import Rank, Source, find_source, may_change
from h5async.order.sampling import Course, FillRequest, Sampling, Schedule

_log = logging.getLogger("h5async")

_VERSION = 1
# A state's epoch, the position in its order at which the next batch begins, and the sizes with
# which the epoch was begun, on which the order of its samples depends.
_POSITION = ("epoch", "position", "batch_size", "world_size")
# Optional parts of a state; those in the first line are digests.
_DIGESTS = ("indices", "weights", "sampler")
_OPTIONAL = (*_DIGESTS, "epoch_samples", "offset", "batch_values", "bucket")
_OF_FILES = {
    "fingerprint": "a file has changed since the state was saved, or what a field reads of it, as"
    " by region: its sizes, shapes, dtypes, chunks, sequences or the lengths of samples differ",
    "lengths": "samples have other lengths than when the state was saved",
}
_MOST_RANKS = 1 << 20  # bounds what a bad state can cost


class ReaderPosition:
    """Maps serial numbers to batches, and decides which one comes next.

    The consumer's thread changes it. All threads may read it, because it is one value in the ring
    that is replaced as a whole. Raises `ConfigError` if the environment has contradictory ranks.
    `looped_epoch` is the epoch of the caller's last batch, until the epoch ends for it.
    """

    def __init__(self, samplings: Samplings, ring: SlotRing[Any]) -> None:
        self._config = samplings.config
        self._samplings = samplings
        self._ring = ring
        self.has_settled = False
        self.looped_epoch: int | None = None
        try:
            rank = self._find_source().rank
        except ConfigError:
            if not may_change():
                raise
            rank = Rank(0, 1)  # a process group that is yet to be made will tell
        self._go_to(rank, 0, 0, None)

    def settle(self) -> None:
        """Settle rank and world size of this process.

        This waits for the first batch, because process groups are often made after the reader.
        """
        if self.has_settled:
            return
        source = self._find_source()
        _log.info("rank %d of %d: %s", *source.rank, source)
        if source.rank != self.course.rank:
            self._go_to(source.rank, *self.course.place)
        self.has_settled = True

    def _find_source(self) -> Source:
        rank, world_size = self._config.rank, self._config.world_size
        if self._config.sampler is not None:
            return Source(Rank(0, 1), "the sampler, one per process", "", None)
        if rank is None or world_size is None:
            return find_source()
        return Source(Rank(rank, world_size), "the options rank and world_size", "", None)

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
        if self.schedule.sampling.is_uniform:
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
            return self.schedule.sampling
        rank = self._find_source().rank
        return self.schedule.sampling if rank == self.course.rank else self._samplings.at((*rank,))

    def give(self, samples: NDArray[np.int64]) -> int:
        """Request a batch of these samples, after all assigned ones; return its serial number."""

        def course_from(serial: int, following: int) -> Course:
            course = self.course
            given = {other: of for other, of in course.given.items() if other >= following}
            given[serial] = samples
            schedule = course.schedule.with_other(serial, following)
            return course._replace(schedule=schedule, given=given)

        return self._ring.ask_for(course_from)

    def requests(self, assignments: Sequence[Assignment]) -> list[FillRequest]:
        """Return the requests for slots and the serial numbers assigned to them."""
        course = self.course  # or a later one: then earlier assignments are dropped
        position, order, given = course.position, course.order, course.given
        return [
            FillRequest(slot, serial, *position(serial), order, given.get(serial))
            for slot, serial in assignments
        ]

    def jump(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches are dropped."""
        self._go_to(self.course.rank, epoch, 0, None)

    def state(self) -> dict[str, Any]:
        """Return the state at the caller's next batch, ignoring requested ones."""
        epoch, _, start = self.schedule.position(self._ring.consumer.next)
        course, sampler = self.course, self._samplings.sampler
        begun_with = self._config.batch_size, course.rank.world_size
        if course.origin[0] == epoch and start:
            begun_with = course.origin[1]
        return {
            "version": _VERSION,
            **dict(zip(_POSITION, (epoch, start, *begun_with), strict=True)),
            **self._order_depends_on,
            **({} if sampler is None else {"sampler": sampler.state(epoch)}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, which must fit; requested batches are dropped.

        Raises `ConfigError` if it was saved with other options or is not a state, and `ReadError`
        if a file has changed since.
        """
        if not _is(state.get("version"), _VERSION):
            raise ConfigError(
                f"the state has version {state.get('version')}, and this h5async reads version"
                f" {_VERSION}; start anew, without the state"
            )
        self._check_order(state)
        numbers = [state.get(name) for name in _POSITION]
        if (
            not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)  # (not a bool)
            or not all(numbers[2:])
            or cast("int", numbers[3]) > _MOST_RANKS
        ):
            raise ConfigError(
                f"the state holds no valid position: {dict(state)!r}; give what state_dict()"
                " returned"
            )
        epoch, start, batch_size, world_size = cast("list[int]", numbers)
        sampler = self._samplings.sampler
        if sampler is not None:
            sampler.restore(epoch, state["sampler"])
            if sampler.draws_batches:  # each stands for `batch_size` positions
                start = start // batch_size * self._config.batch_size
                batch_size = self._config.batch_size
        start = min(start, self._samplings.epoch_samples)
        self._go_to(self.course.rank, epoch, start, (batch_size, world_size))

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

    def _check_order(self, state: Mapping[str, Any]) -> None:
        for name in _OPTIONAL:
            mine = name in self._order_depends_on
            mine = self._config.sampler is not None if name == "sampler" else mine
            if (name in state) != mine:
                who, other = ("reader", "state") if mine else ("state", "reader")
                raise ConfigError(
                    f"the {who} has {name}, and the {other} has none; give the reader what it had"
                    " when the state was saved, or start anew, without the state"
                )
        for name, value in self._order_depends_on.items():
            if not _is(state.get(name), value):
                raise self._other(name, state.get(name), value)

    def _other(self, name: str, saved: object, own: object) -> ConfigError | ReadError:
        anew = "start anew, without the state"
        if name in _OF_FILES:
            return ReadError(f"{paths_text(self._config.hdf5_path)}: {_OF_FILES[name]}; {anew}")
        if name == "num_samples":
            return ConfigError(
                f"the state was saved from files with {saved!r} samples, and the files of this"
                f" reader have {own}; give it the same files, or {anew}"
            )
        if name in _DIGESTS:
            return ConfigError(
                f"the state was saved with other {name}; give the reader what it had then, or"
                f" {anew}"
            )
        return ConfigError(
            f"the state was saved with {name}={saved!r}, and this reader has {own!r}; give the"
            f" reader the same, or {anew}"
        )

    @functools.cached_property
    def _order_depends_on(self) -> dict[str, Any]:
        config, samplings = self._config, self._samplings
        layouts = list(samplings.layouts.values())
        structure = [samplings.sequences.starts, samplings.sequences.ends]
        if config.shuffle == "window":
            structure.append(np.array([*map(unit_nbytes, layouts)]))
        found: dict[str, Any] = {
            "seed": config.seed,
            "shuffle": config.shuffle,
            "num_samples": layouts[0].sample_count,
            "fingerprint": fingerprint(layouts, *structure),
        }
        if config.shuffle == "window":
            found["window_bytes"] = config.window_bytes
        selection = samplings.selection
        if not selection.is_prefix or selection.size != found["num_samples"]:
            found["indices"] = selection.digest()
        if config.weights is not None:
            found["weights"] = samplings.weights_digest()
        if config.weights is not None or samplings.has_passes:
            found["epoch_samples"] = samplings.epoch_samples
        if samplings.offsets is not None:
            found["offset"] = "random"
        lengths = samplings.lengths
        if lengths is not None:
            given = {"batch_values": lengths.values, "bucket": lengths.bucket}
            found |= {name: value for name, value in given.items() if value is not None}
            found["lengths"] = digest(lengths)
        return found


def _is(found: object, expected: object) -> bool:
    return type(found) is type(expected) and found == expected
