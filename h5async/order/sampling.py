"""Maps a batch's serial number to its epoch and position, and computes the samples there.

Serial numbers continue through all epochs. The first one may stand for any position, such as that
of a saved state, so the first epoch may be the rest of one. All else depends on the seed alone.

Memory does not grow with the dataset: a keyed permutation of all sample numbers (`selection.py`) is
evaluated only at the positions of one batch.

Users rely on this order to repeat a run: changing it is a breaking change.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.order.selection import (
    NO_SAMPLES,
    SORTED_UP_TO,
    Int64s,
    Selection,
    WeightedOrder,
    permutation,
    permute,
    round_keys,
)

Shuffle = Literal[False, "full", "window"]

# Identifies an order of a reader's samples: rank and world size; and, if an epoch was begun with
# another batch or world size, that epoch and these sizes.
OrderKey = tuple[int, ...]

# The first of consecutive positions, and their mapping to positions of the selection, if any: from
# `permutation`, `WeightedOrder.mapping`, or `WindowOrder.run`.
Run = tuple[int, NDArray[np.uint64] | None]

T = TypeVar("T")

_PERMUTED_AT_ONCE = 1024  # positions: a block costs little more than a batch of 32
NO_EPOCH = -1  # the epoch of given samples
NO_LIMIT = 1 << 62  # of samples or values in a batch
_EPOCHS_KEPT = 2  # the current one and the next one


class Rank(NamedTuple):
    """Number `rank` of `world_size` processes."""

    rank: int
    world_size: int


class FillRequest(NamedTuple):
    """A request to fill a slot with a batch; the lowest `serial` is the most urgent.

    The batch's step begins at position `start` of the epoch's `order`. `samples`, int64 (n,), are
    given for a batch outside of epochs.
    """

    slot: int
    serial: int
    epoch: int
    number: int
    start: int
    order: OrderKey = (0, 1)
    samples: Int64s | None = None

    def __str__(self) -> str:
        if self.samples is not None:
            return "a batch of given samples"
        return f"batch {self.number} of epoch {self.epoch}"


class Order(Protocol):
    """An order of all samples, different in each epoch or pass of the data."""

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array."""

    def run(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return these positions as a run; None if the core cannot compute the samples."""
        return None


class KeptEpochs(Generic[T]):
    """A cache of values that an order computes once per epoch; keeps the last two. Thread-safe.

    One value is computed at a time; other threads that need it wait, and do not compute it again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, for signal handlers
        self._kept: dict[int, T] = {}

    def get(self, epoch: int, new: Callable[[int], T]) -> T:
        """Return the value of an epoch, which `new` computes."""
        found = self._kept.get(epoch)  # without the lock: another epoch may be being computed
        if found is not None:
            return found
        with self._lock:
            found = self._kept.get(epoch)
            if found is None:
                for other in list(self._kept)[: 1 - _EPOCHS_KEPT]:
                    self._kept.pop(other, None)  # first, because together they may take too much
                found = self._kept[epoch] = new(epoch)
        return found


@dataclass(frozen=True, eq=False)
class DrawnOffsets:
    """Moves the samples of each epoch within their sequences, by fewer rows than `every`.

    `starts`, int64 (n,), are the first rows of the sequences. In sequence i, ``counts[i]`` rows may
    be samples, from ``starts[i] + first`` on.
    """

    starts: Int64s
    first: int
    counts: Int64s
    every: int
    seed: int

    def moved(self, samples: Int64s, epoch: int) -> Int64s:
        """Return the moved samples of an epoch."""
        number = np.searchsorted(self.starts, samples, side="right") - 1
        begin, count = self.starts[number] + self.first, self.counts[number]
        drawn = int(round_keys(self.seed, epoch, "offset")[0] >> np.uint64(1))
        shift = drawn % np.minimum(count, self.every)
        moved: Int64s = begin + (samples - begin + shift) % count
        return moved


@dataclass(frozen=True)
class Sampling:
    """The order of an epoch's samples, and how they are dealt to batches and ranks.

    All ranks share the order. Each step deals its next ``batch_size * world_size`` samples, a run
    of `batch_size` to each rank. The rest at the end is dealt as evenly as possible; a rank that
    would get nothing repeats a sample. So all ranks have the same number of batches, and after each
    step, all ranks together have had the first samples of the order.

    An epoch has `num_samples` positions, which `selection` maps to samples, unless None. Epochs
    are consecutive parts of a sequence of passes, each of which has all `pass_samples` positions
    once; None: an epoch is one pass. Without `shuffle`, a pass is the selection; ``"full"`` is a
    uniform permutation of it, keyed by `seed` and the pass; otherwise `order` applies. `draws`
    draws positions with replacement instead. `resumed` is an epoch that was begun with another
    `batch_size` or `world_size`, and its order. `offsets` move the samples of a pass, unless None.
    """

    num_samples: int
    batch_size: int
    shuffle: Shuffle = False
    seed: int = 0
    drop_last: bool = False
    order: Order | None = None
    rank: int = 0
    world_size: int = 1
    resumed: tuple[int, Order] | None = None
    selection: Selection | None = None
    draws: WeightedOrder | None = None
    pass_samples: int | None = None
    offsets: DrawnOffsets | None = None

    is_uniform: ClassVar[bool] = True  # whether all epochs have equally many batches

    @functools.cached_property  # used for every batch
    def step_samples(self) -> int:
        """Samples dealt to all ranks in a step."""
        return self.batch_size * self.world_size

    @functools.cached_property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        return self.batches_from(0, 0)

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return self.num_batches

    def batches_from(self, epoch: int, start: int) -> int:
        """Return the number of batches from a position of an epoch on."""
        full, rest = divmod(max(0, self.num_samples - start), self.step_samples)
        return full + (rest > 0 and not self.drop_last)

    def samples_in(self, epoch: int) -> int:
        """Return the number of samples of all ranks in an epoch, without dropped last batches."""
        return min(self.num_samples, self.num_batches * self.step_samples)

    def step_at(self, epoch: int, start: int, passed: int) -> tuple[int, int]:
        """Return number and position of the step that is `passed` steps after that at `start`."""
        start += passed * self.step_samples
        return start // self.step_samples, start

    def batch_at(self, epoch: int, start: int) -> Int64s:
        """Return the samples of this rank's batch in the step at `start`, as a new array."""
        return self.samples(epoch, *self.dealt_at(epoch, start))

    def dealt_at(self, epoch: int, start: int) -> tuple[int, int]:
        """Return begin and end of this rank's positions in the step at `start`."""
        rank, size = self.rank, self.batch_size
        left = self.num_samples - start
        if left >= self.step_samples:
            return start + rank * size, start + (rank + 1) * size
        begin, end = dealt_or_repeated(left, rank, self.world_size)
        return start + begin, start + end

    @functools.cached_property
    def _is_computed(self) -> bool:
        if self.offsets is not None:
            return False
        if self.draws is not None or self.order is not None:
            return True
        return not self.shuffle or (self.pass_samples or self.num_samples) > SORTED_UP_TO

    def run_at(self, epoch: int, start: int, stop: int) -> Run | None:
        """Return positions of an epoch as a run; None if the core cannot compute the samples."""
        if not self._is_computed:
            return None
        if self.draws is not None:
            return start, self.draws.mapping(epoch)
        number, size = epoch, self.pass_samples or self.num_samples
        if self.pass_samples is not None:
            (number, start, stop), *others = self._in_passes(epoch, start, stop)
            if others:
                return None
        order = self._order_of(epoch)
        if order is not None:
            return order.run(number, start, stop)
        return start, permutation(size, self.seed, number) if self.shuffle else None

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the sample numbers at positions `start` to `stop`, as a new array."""
        found = self._selected(self._positions(epoch, start, stop))
        if self.offsets is not None:
            at = 0
            for number, begin, end in self._in_passes(epoch, start, stop):
                behind = at + end - begin
                found[at:behind] = self.offsets.moved(found[at:behind], number)
                at = behind
        return found

    def _selected(self, positions: Int64s) -> Int64s:
        return positions if self.selection is None else self.selection.samples(positions)

    def _positions(self, epoch: int, start: int, stop: int) -> Int64s:
        if self.draws is not None:
            return self.draws.samples(epoch, start, stop)
        order = self._order_of(epoch)
        if self.pass_samples is None:
            return self._of_pass(order, epoch, start, stop)
        found = [self._of_pass(order, *run) for run in self._in_passes(epoch, start, stop)]
        return np.concatenate((NO_SAMPLES, *found))

    def _order_of(self, epoch: int) -> Order | None:
        if self.resumed is not None and self.resumed[0] == epoch:
            return self.resumed[1]
        return self.order

    def _in_passes(self, epoch: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the passes that contain positions of an epoch, and begin and end in each."""
        size = self.pass_samples or self.num_samples
        at, end = (epoch * self.num_samples + position for position in (start, stop))
        while at < end:
            number, begin = divmod(at, size)
            count = min(end - at, size - begin)
            yield number, begin, begin + count
            at += count

    def _of_pass(self, order: Order | None, number: int, start: int, stop: int) -> Int64s:
        if order is not None:
            return order.samples(number, start, stop)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        key = self.pass_samples or self.num_samples, self.seed, number
        first, last = start // _PERMUTED_AT_ONCE, max(start, stop - 1) // _PERMUTED_AT_ONCE
        several = [_permuted_block(*key, block) for block in range(first, last + 1)]
        found = several[0] if first == last else np.concatenate(several)
        return found[start - first * _PERMUTED_AT_ONCE : stop - first * _PERMUTED_AT_ONCE].copy()


@functools.lru_cache(maxsize=8)
def _permuted_block(num_samples: int, seed: int, number: int, block: int) -> Int64s:
    begin = block * _PERMUTED_AT_ONCE
    positions = np.arange(begin, min(begin + _PERMUTED_AT_ONCE, num_samples))
    return permute(positions, num_samples, seed, number)


def dealt(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and end of a rank's share of `count` items, dealt as evenly as possible."""
    return count * rank // world_size, count * (rank + 1) // world_size


def dealt_or_repeated(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the same as `dealt`, but a rank without a share repeats an item of another one."""
    begin, end = dealt(count, rank, world_size)
    return (begin, end) if begin < end else (rank % count, rank % count + 1)


# --- serial numbers -------------------------------------------------------------------------------


class Position(NamedTuple):
    """A batch's epoch, its number in it, and the position at which its step begins."""

    epoch: int
    number: int
    start: int


_position = functools.partial(tuple.__new__, Position)  # takes half the time


@dataclass(frozen=True)
class Schedule:
    """Maps serial numbers to the batches of epochs. Thread-safe.

    The first batch has the number `serial`, and begins at position `start` of `epoch`. `others` are
    ascending serial numbers, from `serial` on, of batches outside of epochs.
    """

    sampling: Sampling
    serial: int = 0
    epoch: int = 0
    start: int = 0
    others: tuple[int, ...] = ()

    # Cumulative numbers of batches at the ends of the first and later epochs, if epochs differ.
    _ends: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def _first(self) -> int:
        return self.sampling.batches_from(self.epoch, self.start)

    @classmethod
    def beginning(cls, sampling: Sampling, serial: int, epoch: int, start: int) -> Schedule:
        """Make a schedule from a position on; if that ends an epoch, from the next epoch on."""
        if start and not sampling.batches_from(epoch, start):
            epoch, start = epoch + 1, 0
        return cls(sampling, serial, epoch, start)

    def _passed(self, serial: int) -> int:
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
        """Return the batch of a serial number; outside of epochs, the next batch of an epoch."""
        passed = self._passed(serial) if self.others else serial - self.serial
        sampling, epoch, first = self.sampling, self.epoch, self._first
        if passed < first:
            return _position((epoch, *sampling.step_at(epoch, self.start, passed)))
        if sampling.is_uniform:  # takes half the time: this is called several times per batch
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
        """Return the first serial number, from `serial` on, at which an epoch (or its rest) begins.

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
        """Return a schedule in which `serial` is also a batch outside of epochs.

        Batches outside of epochs before `following` were delivered, and are forgotten.
        """
        gone = bisect.bisect_left(self.others, following)
        return self.with_others(gone, (*self.others[gone:], serial))

    def with_others(self, gone: int, others: Iterable[int]) -> Schedule:
        """Return the schedule after `gone` delivered batches outside of epochs, with `others`."""
        return Schedule(self.sampling, self.serial + gone, self.epoch, self.start, tuple(others))


class Course(NamedTuple):
    """Where a reader goes on, and in which order: one value, so that it changes as a whole.

    `place` is where to go on once the rank is known: epoch, position, and the batch and world size
    with which the epoch was begun, if known. `origin` is an epoch, with the batch and world size
    with which it was begun; `order` is the key of the resulting order; `given` has the samples of
    batches outside of epochs, by serial number.
    """

    rank: Rank
    place: tuple[int, int, tuple[int, int] | None]
    origin: tuple[int, tuple[int, int]]
    order: OrderKey
    schedule: Schedule
    given: Mapping[int, Int64s] = MappingProxyType({})

    def position(self, serial: int) -> Position:
        """Return the place of a batch; `OF_GIVEN` for given samples."""
        if serial in self.given:
            return OF_GIVEN
        return self.schedule.position(max(serial, self.schedule.serial))


OF_GIVEN = Position(-1, -1, 0)
