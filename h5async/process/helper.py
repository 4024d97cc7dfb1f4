"""Fills slots in the threads of helper processes, for `workers="process"` and `workers=N`.

`HelperFiller` is used like `Filler`. Each helper process runs a `Filler` over slots in shared
memory (`helper_main.py`).

Each helper has a thread here that keeps it alive and takes its answers (`supervisor.py`). One more
thread takes tickets, fetches requests, waits until a slot may be written to, and sends each request
to the helper with the fewest outstanding ones. It stays there even if that helper dies and another
replaces it, so no two processes ever write to the same slot.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from functools import partial, reduce

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.core.binding import Core, load_core
from h5async.errors import ConfigError, ReadError
from h5async.fill.outcomes import (
    NO_CALLS,
    Answers,
    Calls,
    Done,
    FillerStats,
    FillOutcome,
    Recorded,
)
from h5async.fill.pool import Workers
from h5async.fill.resident import Residency
from h5async.fill.submissions import QueuedBatches
from h5async.io.shared import SharedMemory
from h5async.opening.dataset import Samplings
from h5async.opening.limits import MemoryPlan
from h5async.order.sampling import FillRequest
from h5async.order.selection import NO_SAMPLES, Int64s
from h5async.process.child import check_interpreter, refusal
from h5async.process.messages import NoteUploaded, Opened, ReaderSlots, Starting
from h5async.process.supervisor import Supervisor
from h5async.read.coretables import Scratch
from h5async.read.queue import END, TICKET, BatchQueue, SlotBatch, Turns
from h5async.samples.assembly import SlotMemory
from h5async.spelling import named
from h5async.system.timeline import ThreadCounts, Timeline

_FOUND = "was changed while the reader was made: helper processes found two versions"


class HelperFiller(Workers):
    """Fills slots in the threads of helper processes. Thread-safe.

    Made in the thread that opens the reader. `begin` starts the helpers, and `open` waits until
    they have opened the dataset; `start` has them fill slots in `shared`, memory that they also
    map. Each of `supervisors` keeps a helper alive.

    `ConfigError` is raised if `postprocess` cannot be sent, or there is no Python interpreter to
    start; `ReadError` if the system refuses shared memory.
    """

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self._config = config
        self._what = paths_text(config.hdf5_path)
        check_interpreter()
        try:
            opening = bytes(cloudpickle.dumps(config))
        except Exception as error:
            raise ConfigError(
                f"postprocess cannot be sent to a helper process ({type(error).__name__}:"
                f' {error}); give it as "module:function", or read with'
                f" {named('workers', 'thread')}"
            ) from error
        try:
            self.shared = SharedMemory()
        except OSError as error:
            raise ReadError(
                f"{self._what}: no memory could be shared with a helper process: {refusal(error)},"
                f" or read with {named('workers', 'thread')}"
            ) from error
        # True: fetch requests; False: send queued messages; None: the end.
        self._tickets: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self.posted: PostedBatches | None = None  # replaces the tickets
        self.supervisors = [
            Supervisor(self._what, opening, self.shared, self._lock, self._wake_sender)
            for _ in range(config.num_helpers)
        ]
        self._device_cache: Residency | None = None
        self._calls = NO_CALLS
        self._timeline: Timeline | None = None

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order, after `start`."""
        return self.supervisors[0].methods

    def begin(self) -> None:
        """Start the helpers, each of which opens the dataset.

        `ReadError` is raised if no more threads can be started.
        """
        several = enumerate(self.supervisors)
        self._start({f"helper_{number}": one.run for number, one in several}, self._what)

    def open(self) -> Opened:
        """Wait until the helpers have opened the dataset; return the first one's answer.

        Raises like `AsyncReader`; `ReadError` if opening the files kills a helper process, or the
        helpers found different files; `BatchTimeoutError` if it takes longer than both the option
        ``timeout`` and a minute.
        """
        first = None
        for supervisor in self.supervisors:
            opened = supervisor.await_opened(self._config.timeout)
            first = first or opened
            first.check_same(opened, _FOUND)
            supervisor.opened = first  # tables of chunks are kept once
        assert first is not None
        return first

    def post(self, samplings: Samplings, rows: int, num_slots: int) -> PostedBatches | None:
        """Have the consumer submit batches itself, before `start`; None if that is impossible.

        Parameters are those of `PostedBatches`.
        """
        core = load_core()
        if core is not None and not any(each.is_alone for each in self.supervisors):
            self.posted = PostedBatches(core, samplings, rows, num_slots)
        return self.posted

    def start(
        self,
        slots: Sequence[SlotMemory],
        *,
        rows: int,
        pixels_nbytes: Sequence[int],
        memory_plan: MemoryPlan,
        device_cache: Residency | None,
        calls: Calls,
    ) -> None:
        """Have slots filled from now on; errors, and parameters not named here, are `Filler`'s.

        `slots`, `rows` and `pixels_nbytes` are those of `ReaderSlots`. `calls` are called in this
        object's threads.
        """
        own = ReaderSlots(self.shared, slots, rows, pixels_nbytes)
        self._calls = calls
        self._device_cache = device_cache
        starting = Starting(own.specs, rows, memory_plan, device_cache is not None)
        for supervisor in self.supervisors:
            supervisor.start_filling(own, starting, self._done)
        self._start({"send": self._send_all}, self._what)
        for supervisor in self.supervisors:
            supervisor.await_started(self._config.timeout)

    def kick(self) -> None:
        """Have new requests fetched. Never blocks; extra calls are harmless."""
        self._tickets.put(True)

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Note that the device cache has the samples of a slot's batch."""
        assert self._device_cache is not None
        self._device_cache.add(index)
        (only,) = self.supervisors  # the options allow no others with a cache
        only.note(NoteUploaded(slot))

    def stats(self) -> FillerStats:
        """Return the statistics of all helpers so far."""
        return reduce(FillerStats.plus, [each.stats() for each in self.supervisors])

    def done_in_core(self) -> ThreadCounts:
        """Return the work of the core in this process: none."""
        return ThreadCounts()

    def done_in_python(self) -> Done:
        """Return a function for the statistics of now, like `Filler`."""
        done = self.stats()
        return lambda _: done

    def record(self, timeline: Timeline | None) -> None:
        """Record the events of all threads, including those of helpers. None stops it."""
        self._timeline = timeline or self._timeline
        for supervisor in self.supervisors:
            supervisor.record(0 if timeline is None else timeline.max_events)

    def recorded(self) -> list[Recorded]:
        """Return the events recorded here or received from helpers since the last call."""
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return []
        events = timeline.take_events(time.perf_counter_ns())
        found = [Recorded(os.getpid(), timeline.threads, events, timeline.dropped)]
        for supervisor in self.supervisors:
            found += supervisor.take_recorded()
        return found

    # --- threads ----------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send notes, and each request once its slot may be written to; runs in one thread."""
        take = self._take if self.posted is None else self.posted.take
        while (requests := take()) is not None:
            for request in requests:
                try:
                    self._calls.before_fill(request.slot)
                except BaseException as error:
                    self._done(request, FillOutcome(NO_SAMPLES, (), error))
                    continue
                if not self._request(request):
                    return
                self._flush()
            self._flush()

    def _take(self) -> Sequence[FillRequest] | None:
        ticket = self._tickets.get()
        return self._calls.next_requests() if ticket else None if ticket is None else ()

    def _wake_sender(self) -> None:
        if self.posted is None:
            self._tickets.put(False)
        else:
            self.posted.put_ticket()

    def _done(self, request: FillRequest, outcome: FillOutcome) -> None:
        if self.posted is None or not self.posted.finish(request, outcome):
            self._calls.on_done(request, outcome)

    def _request(self, request: FillRequest) -> bool:
        """Post a request to one helper; return False if this is closed."""
        with self._lock:
            freest = min(self.supervisors, key=lambda supervisor: supervisor.num_outstanding)
            is_posted = freest.request(request)
        return is_posted

    def _flush(self) -> None:
        for supervisor in self.supervisors:
            supervisor.flush()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            super()._run(target)
        except BaseException as error:
            self._calls.on_crash(error)

    def stop(self, let_go: Callable[[], None]) -> None:
        """Stop; see `Workers`. A consumer that waits in the core leaves it first."""
        turns = None if self.posted is None else self.posted.turns
        if turns is not None:
            self.wait_for(turns.when_left)
        super().stop(let_go)

    def _wake(self) -> None:
        for supervisor in self.supervisors:
            supervisor.close()
        self._tickets.put(None)
        if self.posted is not None:
            self.posted.end()

    def _end(self) -> None:
        self.shared.close()
        # These functions refer to the owner of this object.
        self._calls = NO_CALLS
        if self.posted is not None:
            self.posted.close()
        for supervisor in self.supervisors:
            supervisor.release()
        super()._end()


class PostedBatches(QueuedBatches):
    """Batches that helpers fill, and the consumer takes in one call of the core.

    The consumer, or the core on its behalf (`read/queue.py`), puts batches into a queue of the
    core, from which the sending thread takes them. An answer makes its batch ready there, but
    answers with an error, warnings or skipped samples go through the slot ring. Each slot has room
    for `rows` samples.
    """

    def __init__(self, core: Core, samplings: Samplings, rows: int, num_slots: int) -> None:
        batches = [SlotBatch(core.BatchPlan(), (core.Target * 0)(), rows, None)] * num_slots
        super().__init__(
            BatchQueue(core, None, batches, 1, c_void_p(), samplings.selection), samplings
        )
        self.put_ticket, self.end = self._queue.put_ticket, self._queue.end
        self.answers: Answers = [None] * num_slots  # the last one of each slot
        self.index = partial(_index, self.answers)  # like that of `Submissions`
        # The core requires it, but does not use it.
        self._core, self._scratch = core, Scratch.allocate(1, 1, 1)

    # --- the consumer's calls ---------------------------------------------------------------------

    def open_turns(self, batch: type, num_samples: int, _: int) -> Turns:
        """Return the turns of the consumer in the core."""
        queue, scratch = self._queue, self._scratch
        self.turns = Turns(self._core, queue, scratch, batch, num_samples, is_alone=False)
        return self.turns

    def result(self, slot: int, serial: int) -> FillOutcome | None:
        """Return a batch that a helper has filled; None if it is not ready."""
        if self._queue.ready(slot, serial, 0) is None:
            return None
        answer = self.answers[slot]  # None if this was closed meanwhile
        return None if answer is None else answer[1]

    # --- the helpers' threads ---------------------------------------------------------------------

    def take(self) -> Sequence[FillRequest] | None:
        """Wait for requests, or for `put_ticket`; return None at the end."""
        found = self._queue.next(self._scratch)
        if found in (END, TICKET):
            return None if found == END else ()
        return (self._taken(found).request,)

    def finish(self, request: FillRequest, outcome: FillOutcome) -> bool:
        """Make a batch ready; return False if the slot ring must be told about it."""
        is_plain = outcome.error is None and not outcome.warnings and not outcome.skipped
        self.answers[request.slot] = (request.serial, outcome) if is_plain else None
        self._queue.finish(request.slot, request.serial, is_ready=is_plain)
        return is_plain

    def close(self) -> None:
        """Release memory and functions. Threads must not call this object any more."""
        super().close()
        self.answers[:] = [None] * len(self.answers)  # emptied: batches may still refer to the list


def _index(answers: Answers, slot: int, serial: int, _: int) -> Int64s | None:
    answer = answers[slot]
    return answer[1].index if answer is not None and answer[0] == serial else None
