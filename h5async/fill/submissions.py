"""Has batches filled by the core alone, without Python between the request and the filled slot.

A `FillRequest` enters in the thread of the consumer, which submits it to the core's queue, with its
sample numbers if the core does not compute them. If no work is left to Python, the batch is taken
from its slot when the core reports it ready; no other thread has run any Python for it. If work is
left (data that the core cannot decode, a transform, `postprocess`), a thread of the pool continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, Skipped
from h5async.fill.outcomes import FillOutcome
from h5async.fill.pool import Work, do_nothing
from h5async.fill.reading import BatchReader
from h5async.fill.resident import HostCache
from h5async.opening.dataset import Samplings
from h5async.order.sampling import NO_EPOCH, FillRequest, Sampling
from h5async.order.selection import NO_SAMPLES
from h5async.read.queue import (
    END,
    NOTHING,
    READY,
    TICKET,
    BatchNumbers,
    BatchQueue,
    Numbers,
    RunEpochs,
    Turns,
)
from h5async.samples.assembly import Assembly, SlotMemory
from h5async.system.interruptions import interruption

# `Phases.resume`
Resume = Callable[[FillRequest, NDArray[np.int64], Sequence[Skipped], bool, bool, int], None]


# Limits of a run of batches, which is passed to the core at once; some are approximate.
_AHEAD_SAMPLES = 8192  # listed sample numbers of an epoch
_LEAST_AHEAD, _AHEAD_BATCHES, _AHEAD_EPOCHS = 8, 256, 32
_AHEAD_MAPPED = 1 << 16  # samples, if each epoch has a mapping of its own, which may be large
_MORE_ALIKE = 1 << 20  # epochs like the last one, which cost nothing
_NO_NUMBERS: BatchNumbers = 0, 0, None, None, None


class _Submission(NamedTuple):
    """The last submission for a slot; `error` says why it could not be submitted.

    The samples `skipped`, known to be damaged, were left out.
    """

    request: FillRequest
    numbers: BatchNumbers
    needs_python: bool = False
    skipped: Sequence[Skipped] = ()
    error: BaseException | None = None


class QueuedBatches:
    """Batches in a queue of the core. Safe to use from many threads.

    `request_of` returns the request for a slot and serial that `turns` has submitted.
    """

    def __init__(self, queue: BatchQueue, samplings: Samplings) -> None:
        self._queue, self._samplings = queue, samplings
        # See `BatchQueue`; the consumer calls these for each batch.
        self.drop, self.events = queue.drop, queue.events
        self.wait, self.wake = queue.wait, queue.wake
        self._latest: list[_Submission | None] = [None] * queue.num_slots
        self._lock = threading.RLock()
        self.request_of: Callable[[int, int], FillRequest] = _no_request
        self.turns: Turns | None = None
        self._taken_before = 0  # batches taken by `turns` before its last run
        self.is_plain = True  # each field is one array, just as it is in a slot

    def sampling(self, request: FillRequest) -> Sampling:
        """Return the order of samples that a request refers to."""
        return self._samplings.of(request)

    def numbers(self, sampling: Sampling, first: int, epoch: int, start: int) -> Numbers | None:
        """Return the batches from serial `first`, at position `start`, to the end of an epoch."""
        left = sampling.batches_from(epoch, start)
        last, end = sampling.dealt_at(epoch, start + (left - 1) * sampling.step_samples)
        return Numbers(first + left, 0, 0, end - last)

    def run_from(self, request: FillRequest) -> RunEpochs | None:
        """Return a run of batches of some epochs, from a request on; None if they are not known.

        The last batch of each epoch may be short; all others are alike. The more batches of the
        previous run were taken, the longer is this one: making it takes longer than a few batches.
        """
        taken = 0 if self.turns is None else self.turns.taken
        most = max(_LEAST_AHEAD + self._queue.num_slots, 4 * (taken - self._taken_before))
        self._taken_before, most = taken, min(most, _AHEAD_BATCHES)
        sampling = self._samplings.at(request.order)
        first, epoch = request.serial, request.epoch
        if type(sampling) is not Sampling:
            return None
        one = self.numbers(sampling, first, epoch, request.start)
        end = epoch_end = first + sampling.batches_from(epoch, request.start)
        found: list[Numbers] = []
        while one is not None:
            found.append(one)
            are_alike = one.mapping is None and one.samples is None and one.draw is None
            is_large = (end - first) * sampling.batch_size > _AHEAD_MAPPED
            is_large = one.mapping is not None and (is_large or self._samplings.makes_ahead)
            are_all = end - first >= most or len(found) == _AHEAD_EPOCHS
            if one.stop != end or are_all or is_large:
                break
            if len(found) > 1 and are_alike and sampling.pass_samples is None:
                return RunEpochs(first, epoch_end, sampling, found, _MORE_ALIKE)
            epoch, end = epoch + 1, end + sampling.num_batches
            one = self.numbers(sampling, one.stop, epoch, 0)
        self._samplings.make_ahead(request.order, epoch + 1)
        return RunEpochs(first, epoch_end, sampling, found) if found else None

    def arrays(self, memory: SlotMemory, index: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return the arrays of a batch of `turns`: views of a slot's memory."""
        return tuple([out[: index.size] for out in memory.out])

    def views(self, slot: int, memory: SlotMemory) -> tuple[tuple[Any, ...], ...] | None:
        """Return the whole arrays, by field, of which `turns` makes views; None if it cannot."""
        return tuple([(out,) for out in memory.out])

    def submit(self, request: FillRequest, *, is_helped: bool = False) -> None:
        """Have a batch filled. Never blocks; submitting it again has no effect.

        All errors become errors of that batch. `is_helped`: if the batch is of given samples, the
        consumer will call `Turns.fill_own` for it.
        """
        is_own = is_helped and request.samples is not None and self.turns is not None
        slot, serial = request.slot, request.serial
        with self._lock:
            latest = self._latest[slot]
            if latest is None or latest.request.serial != serial:
                latest = self._latest[slot] = self._new(request)
            if latest.error is None:
                numbers, needs_python = latest[1:3]
                self._queue.submit(slot, serial, numbers, needs_python, is_own)

    def has(self, slot: int, serial: int) -> bool:
        """Tell whether a batch is the latest one submitted for a slot."""
        latest = self._latest[slot]
        return latest is not None and latest.request.serial == serial

    def drop_error(self, serial: int) -> None:
        """Forget the error of a batch once it is raised: its traceback may refer to this object."""
        for slot, latest in enumerate(self._latest):
            if latest is not None and latest.request.serial == serial and latest.error is not None:
                self._latest[slot] = None

    def _new(self, request: FillRequest) -> _Submission:
        return _Submission(request, _NO_NUMBERS)

    def _taken(self, slot: int) -> _Submission:
        """Return the submission for a slot whose batch a thread has taken from the queue."""
        latest, serial = self._latest[slot], self._queue.serial(slot)
        if latest is None or latest.request.serial != serial:
            with self._lock:
                latest = self._latest[slot] = self._new(self.request_of(slot, serial))
        return latest

    def close(self) -> None:
        """Release memory and callbacks; no thread may be at work. Idempotent."""
        self._queue.close()
        if self.turns is not None:
            self.turns.close()
        self.request_of, self.turns = _no_request, None
        self._latest = [None] * len(self._latest)


class Submissions(QueuedBatches):
    """Batches that the core fills.

    `reader` lends scratch memory to threads; `assembly` makes the delivered arrays from a slot's
    memory; `needs_python` says whether every batch has work for Python besides transforms. Batches
    whose samples are all in a `cache` are read from it; others are added to it.
    """

    def __init__(
        self,
        queue: BatchQueue,
        reader: BatchReader,
        assembly: Assembly,
        needs_python: bool,
        cache: HostCache | None,
    ) -> None:
        super().__init__(queue, reader.samplings)
        self.index = queue.ready  # returns samples of a batch of `turns`, the latest of its slot
        self._reader = reader
        self._slots = reader.slots
        self._assembly, self.is_plain = assembly, assembly.is_plain
        self._needs_python = needs_python or not reader.transforms_all
        self._cache = cache
        self.resume: Resume = do_nothing  # continues a batch that has work left
        self.is_fetched: Callable[[int], bool] = _never  # whether ahead, so that Python takes it

    # --- the consumer's calls ---------------------------------------------------------------------

    def open_turns(self, batch: type, num_samples: int, num_threads: int) -> Turns | None:
        """Return the consumer's turns in the core; None if batches need Python."""
        core = self._reader.core
        is_view = self._assembly.is_view
        if self._needs_python or not is_view or self.is_fetched is not _never:
            return None
        assert core is not None
        is_alone = not num_threads
        scratch = self._reader.scratch_of_consumer(is_alone)
        self.turns = Turns(
            core,
            self._queue,
            scratch,
            batch,
            num_samples,
            self._reader.draw(NO_EPOCH),
            is_alone=is_alone,
            is_ragged=not self.is_plain,
        )
        return self.turns

    @property
    def are_uploaded(self) -> bool:
        """Whether the core uploads batches, and so waits itself until slots are writable."""
        return not self._needs_python and self._slots.uploads is not None

    def read_given(self, names: Sequence[str], lasting: Any) -> None:
        """Enable `Turns.read` if possible; for parameters see `BatchReader.read_by`."""
        if self.turns is not None and self.is_plain:
            self._reader.read_by(self.turns, names, lasting)

    def arrays(self, memory: SlotMemory, index: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return the arrays of a batch of `turns`: views of a slot's memory."""
        return self._assembly.arrays(memory, index, are_checked=True)

    def views(self, slot: int, memory: SlotMemory) -> tuple[tuple[Any, ...], ...] | None:
        """Return the whole arrays, by field, of which `turns` makes views; None if it cannot."""
        offsets = self._queue.offsets  # empty if another thread has closed the reader
        return self._assembly.views(memory, offsets[slot]) if offsets else None

    def numbers(self, sampling: Sampling, first: int, epoch: int, start: int) -> Numbers | None:
        """Return the samples of batches from serial `first`, at `start`, to the end of an epoch.

        Fewer batches if samples must be listed one by one; None if they cannot be known now.
        """
        cache = self._cache  # Python may have to read samples that are not in it
        leaves_any = not self._reader.fills_alone and cache is not None and not cache.has_all
        if self._reader.damage or leaves_any:
            return None
        left, stride = sampling.batches_from(epoch, start), sampling.step_samples
        begin, _ = sampling.dealt_at(epoch, start)
        draw, last = self._reader.draw(epoch), start + (left - 1) * stride
        last_begin, end = sampling.dealt_at(epoch, last)
        run = sampling.run_at(epoch, begin, end)
        place = last_begin - begin, end - last_begin
        if run is not None:
            return Numbers(first + left, run[0], *place, run[1], None, draw)
        if end - begin > _AHEAD_SAMPLES:
            left = _AHEAD_SAMPLES // stride
            place = (left - 1) * stride, sampling.batch_size
            end = begin + sum(place)
        if left < 1:
            return None
        samples = sampling.samples(epoch, begin, end)
        return Numbers(first + left, 0, *place, None, samples, draw)

    def _new(self, request: FillRequest) -> _Submission:
        try:
            reader, skipped = self._reader, list[Skipped]()
            numbers: BatchNumbers
            if not reader.damage:
                numbers = self._numbers(request)
            else:
                found, skipped = reader.damage.left_out(reader.samplings.samples(request))
                numbers = 0, found.size, None, found, reader.draw(request.epoch)
            is_fetched = self._cache is None and self.is_fetched(request.serial)
            return _Submission(request, numbers, self._needs_python or is_fetched, skipped)
        except Exception as error:
            if interruption(error) is not None:
                raise
            failure = self._reader.failure(request, error)
            return _Submission(request, _NO_NUMBERS, error=failure)

    def _numbers(self, request: FillRequest) -> BatchNumbers:
        sampling, epoch, draw = (
            self.sampling(request),
            request.epoch,
            self._reader.draw(request.epoch),
        )
        if request.samples is not None:
            return 0, request.samples.size, None, request.samples, draw
        begin, end = sampling.dealt_at(epoch, request.start)
        run = sampling.run_at(epoch, begin, end)
        if run is not None:
            return run[0], end - begin, run[1], None, draw
        samples = sampling.samples(epoch, begin, end)
        return begin, samples.size, None, samples, draw

    def result(self, slot: int, serial: int) -> FillOutcome | None:
        """Return a batch that the core has filled; None if it is not ready, or left to Python."""
        latest = self._latest[slot]
        if latest is None or latest.request.serial != serial:
            return None
        if latest.error is not None:
            return FillOutcome(NO_SAMPLES, (), latest.error)
        if latest.needs_python:
            return None
        count, slots = latest.numbers[1], self._slots.delivered or self._slots.memory
        try:
            index = self._queue.ready(slot, serial, count)
            if index is None or not slots:  # not ready, or the reader was closed meanwhile
                return None
            arrays = self._assembly.arrays(slots[slot], index, are_checked=True)
            return FillOutcome(index, arrays, skipped=tuple(latest.skipped))
        except (DatasetError, MemoryError) as error:
            return FillOutcome(NO_SAMPLES, (), self._reader.failure(latest.request, error))

    # --- the pool's calls -------------------------------------------------------------------------

    def put(self, ticket: bool) -> None:
        """Have one thread continue with the pool's heap; False: have all threads end."""
        if ticket:
            self._queue.put_ticket()
        else:
            self._queue.end()

    def get(self) -> bool | Work:
        """Fill batches until there is work for Python; return it."""
        found = self._reader.take(self._queue.next)
        return found == TICKET if found in (END, TICKET) else self._rest_of(found)

    def get_here(self) -> Work | None:
        """Fill the oldest batch in the calling thread; return work left; None: nothing to do."""
        found = self._reader.take(self._queue.do_oldest)
        if found == READY:
            return do_nothing
        return None if found in (END, NOTHING) else self._rest_of(found)

    def _rest_of(self, found: int) -> Work:
        latest = self._taken(found)
        try:
            samples = self._queue.samples(found, latest.numbers[1])
        except MemoryError as error:
            failed = self._reader.failure(latest.request, error)
            self._latest[found] = latest._replace(error=failed)
            self._queue.wake()
            return do_nothing
        queue = self._queue
        how = queue.is_planned(found), queue.is_kept(found), queue.generation(found)
        return partial(self.resume, latest.request, samples, latest.skipped, *how)

    def note_workers(self, count: int) -> None:
        """Note that a thread came or left, and how many may be at work now."""
        self._queue.note_workers(count)

    def forget(self) -> None:
        """Forget all batches; no thread may be at work on any."""
        self._queue.forget()
        self._latest = [None] * len(self._latest)

    def close(self) -> None:
        """Release memory and callbacks; no thread may be at work. Idempotent."""
        super().close()
        self.resume, self.is_fetched = do_nothing, _never


def _never(serial: int) -> bool:
    return False


def _no_request(slot: int, serial: int) -> FillRequest:
    raise AssertionError(f"batch {serial} was not submitted")
