"""Keeps one helper process alive: posts requests and notes to it, and takes its answers.

When a helper dies, a new one is started as soon as there is a request, and is given the unanswered
requests: an outside kill costs only time. `Outstanding` decides about requests that kill helpers.

One thread starts the helper and takes its answers (`run`). The system ends the helper with this
thread, and so with the process, however that ends. Messages are posted in order under a lock, and
sent without it by another thread (`flush`), so that nobody else ever waits for the helper.

If gevent or eventlet replace threads, both are the same system thread, and waiting for the helper
blocks all others. In that case `run` waits only while the helper has something to answer, and it
sends the posted messages itself.

The first helper's start has two steps: it has opened the files, and it has started its threads.
They are reported to the thread that waits for them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from h5async.errors import BatchTimeoutError
from h5async.fill.outcomes import FillerStats, FillOutcome, Recorded
from h5async.fill.pool import do_nothing
from h5async.io.shared import SharedMemory
from h5async.order.sampling import FillRequest
from h5async.order.selection import NO_SAMPLES
from h5async.process.child import HelperDied, HelperProcess
from h5async.process.messages import (
    Answer,
    Failed,
    Opened,
    ReaderSlots,
    Record,
    Started,
    Starting,
    received,
)
from h5async.system.interruptions import Gate, Patience, suppressing

_log = logging.getLogger("h5async.process")
_STEP_SECONDS = 60.0  # the shortest timeout of a step
MAX_DEATHS = 3  # of helpers that had the same request, or were started for it


@dataclass(eq=False, slots=True)
class _Entry:
    request: FillRequest
    is_sent: bool = False  # to the current helper
    deaths: int = 0  # of helpers that had it; if not 0, it is a suspect


class Outstanding:
    """Unanswered requests, at most one per slot; decides which to give to a helper. Pure.

    Until a helper dies, helpers are given every request immediately. When one dies, any of its
    requests may be the reason: these become *suspects*. From then on, helpers are given the
    suspects one at a time, oldest first, until each is answered or given up. So a request that
    kills helpers is found, and no other request fails with it. The caller holds a lock, and reports
    events.

    `has_started`: the current helper, or else the last one, got as far as taking requests.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by slot
        self._takes_requests = False
        self.has_started = False

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._entries)

    def add(self, request: FillRequest) -> None:
        """Add a request; it replaces an earlier one for the same slot."""
        self._entries[request.slot] = _Entry(request)

    def remove(self, request: FillRequest) -> bool:
        """Remove a request that was answered or failed; return whether it was there."""
        entry = self._entries.get(request.slot)
        if entry is None or entry.request[:-1] != request[:-1]:  # samples go with the serial
            return False
        del self._entries[request.slot]
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._entries.clear()

    def next_to_send(self) -> list[FillRequest]:
        """Return the requests to send to the helper now, in order; they count as sent."""
        if not self._takes_requests:
            return []
        entries = self._in_order()
        unsent = [entry for entry in entries if not entry.is_sent]
        suspects = [entry for entry in entries if entry.deaths]
        if suspects:  # one at a time; none while the helper has one that may kill it
            unsent = suspects[:1] if len(unsent) == len(entries) else []
        for entry in unsent:
            entry.is_sent = True
        return [entry.request for entry in unsent]

    # --- the lives of helpers ---------------------------------------------------------------------

    def helper_starts(self) -> None:
        """Note that a new helper is being started; it does not take requests yet."""
        self.has_started = False

    def helper_started(self) -> None:
        """Note that the helper takes requests from now on."""
        self._takes_requests = self.has_started = True

    def helper_ends(self) -> None:
        """Note that the helper takes no more requests; call `blame` once the reason is known."""
        self._takes_requests = False

    def blame(self) -> list[tuple[FillRequest, int]]:
        """Count the helper's end against each request that it had.

        If it took no requests yet, it was started for the oldest one, which is blamed instead.
        Returns the requests with a count of `MAX_DEATHS` or more, and their counts, oldest first.
        They stay until `remove`.
        """
        assert not self._takes_requests, "the helper has not ended"
        entries = self._in_order()
        had = [entry for entry in entries if entry.is_sent] if self.has_started else entries[:1]
        for entry in had:
            entry.is_sent = False
            entry.deaths += 1
        return [(entry.request, entry.deaths) for entry in had if entry.deaths >= MAX_DEATHS]

    def oldest(self) -> FillRequest | None:
        """Return the most urgent request; None if there is none."""
        return next((entry.request for entry in self._in_order()), None)

    def _in_order(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.request.serial)


class Supervisor:
    """Starts helper processes, one after the other. Made in the thread that opens the reader.

    Methods are thread-safe, except `run` and `flush`, each called by one thread.

    `what` names the files that helpers read, for messages; `opening` is the first message to a
    helper, pickled; `shared` is memory that helpers also map; `lock` is reentrant; `wake_sender`
    makes the other thread call `flush`. Once the first helper has opened the dataset, `opened` is
    its answer; once it has started to fill slots, `methods` says how each field is read, in field
    order. `process` is the current helper.
    """

    def __init__(
        self,
        what: str,
        opening: bytes,
        shared: SharedMemory,
        lock: threading.RLock,
        wake_sender: Callable[[], None],
    ) -> None:
        self._what = what
        self._opening = opening
        self._shared = shared
        self._wake_sender = wake_sender
        # The base of relative paths, also for later helpers; None: it was removed.
        self._folder: str | None = None
        with suppressing(OSError):
            self._folder = os.getcwd()
        self.opened: Opened | None = None
        self.methods: list[str] = []
        self._lock = lock
        self._changed = Gate()
        self._closed = False
        self.process: HelperProcess | None = None
        self._takes_notes = False  # `Starting` was posted, so messages may follow it
        self._starting: Starting | None = None
        self._slots: ReaderSlots | None = None
        self._on_done: Callable[[FillRequest, FillOutcome], None] = do_nothing
        self._outstanding = Outstanding()
        self._stats = self._former_stats = FillerStats()
        self._max_events = 0  # the limit of recorded events
        self._recorded: dict[int, Recorded] = {}  # by process
        self._start_error: BaseException | None = None
        self._opener_id = threading.get_native_id()  # the system thread
        self.is_alone = False  # there is no other system thread; see `run`

    @property
    def num_outstanding(self) -> int:
        """The number of unanswered requests."""
        return len(self._outstanding)

    def start_filling(
        self,
        slots: ReaderSlots,
        starting: Starting,
        on_done: Callable[[FillRequest, FillOutcome], None],
    ) -> None:
        """Have this helper and later ones fill slots, as the message `starting` says.

        `on_done` is called in the thread of `run`, with each request and its outcome.
        """
        with self._lock:
            self._slots, self._starting, self._on_done = slots, starting, on_done
        self._changed.notify()

    def request(self, request: FillRequest) -> bool:
        """Post a request as soon as the helper may have it; return False if closed."""
        with self._lock:
            if self._closed:
                return False
            self._outstanding.add(request)
            self._changed.notify()
            self._post_requests()
            return True

    def note(self, message: Any) -> None:
        """Post a message without an answer; dropped unless `Starting` was posted before."""
        self._post(message)
        self._wake_sender()

    def record(self, max_events: int) -> None:
        """Have this helper and later ones record up to `max_events` thread events; 0 stops it."""
        with self._lock:
            self._max_events = max_events
            self.note(Record(max_events))

    def take_recorded(self) -> list[Recorded]:
        """Return the events that helpers have recorded and sent since the last call."""
        with self._lock:
            found, self._recorded = self._recorded, {}
        return list(found.values())

    def flush(self) -> None:
        """Send posted messages; blocks until the helper has received them or has ended."""
        with self._lock:
            process = self.process
        if process is not None:
            process.flush()

    def stats(self) -> FillerStats:
        """Return the statistics of this helper and those before it."""
        with self._lock:
            found = self._stats.plus(self._former_stats)
        return found

    def close(self) -> None:
        """Drop all requests, and end the helper and `run`. Never waits. Idempotent."""
        with self._lock:
            self._closed = True
            self._outstanding.clear()
            self._changed.notify()
            if self.process is not None:
                self.process.hang_up()

    def release(self) -> None:
        """Release slots and functions, after `run` has ended."""
        self._slots, self._on_done, self._wake_sender = None, do_nothing, do_nothing

    def await_opened(self, timeout_seconds: float | None) -> Opened:
        """Wait until the first helper has opened the files; return its answer.

        Here and below, the helper's error is raised; `ReadError` if it died, `BatchTimeoutError` if
        it takes longer than both the timeout and a minute.
        """
        self._await("open the files", lambda: self.opened, timeout_seconds)
        assert self.opened is not None
        return self.opened

    def await_started(self, timeout_seconds: float | None) -> None:
        """Wait until the first helper has started its threads."""
        self._await("start its threads", lambda: self.methods, timeout_seconds)

    def _await(
        self, step: str, is_done: Callable[[], object], timeout_seconds: float | None
    ) -> None:
        if timeout_seconds is not None:
            timeout_seconds = min(max(timeout_seconds, _STEP_SECONDS), threading.TIMEOUT_MAX)
        patience = Patience(timeout_seconds)
        wait = partial(self._changed.wait, lambda: self._start_error is not None or bool(is_done()))
        while not patience.wait(wait):
            if patience.is_over:
                raise BatchTimeoutError(
                    f"{self._what}: the helper process did not {step} within {timeout_seconds} s;"
                    " set timeout to more than that (or HDF5 hangs, as it may on a damaged file)"
                )
        error, self._start_error = self._start_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    # --- posting ----------------------------------------------------------------------------------

    def _post(self, message: Any) -> None:
        with self._lock:
            if self._takes_notes and self.process is not None:
                self.process.post(message)

    def _post_requests(self) -> bool:
        """Post the requests that the helper may have now; return whether there are any."""
        requests = self._outstanding.next_to_send()
        for request in requests:
            assert self._slots is not None
            # Plain tuples are pickled ten times as fast.
            self._post((tuple(request), self._slots.rooms[request.slot]))
        return bool(requests)

    # --- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Keep a helper alive and take its answers until closed; in one thread."""
        self.is_alone = threading.get_native_id() == self._opener_id
        while self._go_on(self._serve_once()) and self._await_request():
            pass

    def _serve_once(self) -> BaseException | None:
        """Have one helper work until it ends; return the reason, or None if this was closed."""
        try:
            self._serve()
            return None
        except BaseException as error:
            return None if self._closed else error
        finally:
            with self._lock:
                self._former_stats = self.stats()
                self._stats = FillerStats(cache=self._stats.cache)

    def _serve(self) -> None:
        """Start a helper and take its answers until this is closed, which raises HelperDied too."""
        self._outstanding.helper_starts()
        with HelperProcess(self._shared.fd, self._what, self._folder) as process:
            with self._lock:
                self.process = process
            try:
                if not self._closed and self._start(process):
                    self._take_answers(process)
            finally:
                with self._lock:  # nothing is posted to it once it is being closed
                    self.process, self._takes_notes = None, False
                    self._outstanding.helper_ends()

    def _start(self, process: HelperProcess) -> bool:
        """Have a helper open the dataset and start its threads; return False if closed."""
        process.send_bytes(self._opening)
        opened: Opened = _step(process)
        if self.opened is not None:
            self.opened.check_same(opened)
        else:
            self.opened = opened
            self._changed.notify()
        self._changed.wait(lambda: self._closed or self._starting is not None)
        with self._lock:
            if self._starting is None or self._slots is None:
                return False
            process.post(self._starting)
            self._takes_notes = True  # later notes are posted after it
            if self._max_events:
                process.post(Record(self._max_events))
        if self.is_alone:
            process.flush()
        else:
            self._wake_sender()  # this thread only receives
        started: Started = _step(process)
        with self._lock:
            self._stats = FillerStats(cache=started.cache)
            self._outstanding.helper_started()
            if self._post_requests():
                self._wake_sender()
        if not self.methods:
            self.methods = started.methods
            self._changed.notify()
        return True

    def _take_answers(self, process: HelperProcess) -> None:
        while not self.is_alone or self._await_request():
            if self.is_alone:
                process.flush()
            self._take(process.receive())

    def _await_request(self) -> bool:
        """Wait until there is a request; return False when closed."""
        self._changed.wait(lambda: self._closed or len(self._outstanding) > 0)
        return not self._closed

    def _take(self, answer: Answer) -> None:
        request = FillRequest(*answer.request)
        with self._lock:
            self._stats = answer.stats
            self._keep(answer.recorded)
            if not self._outstanding.remove(request):
                return
            if self._post_requests():  # the answer may have cleared the last suspect
                self._wake_sender()
            slots = self._slots
        assert slots is not None
        index = slots.index(request.slot, answer.size)
        arrays: tuple[NDArray[Any], ...] = ()
        error = received(answer.error) if answer.error else None
        try:
            if error is None:
                arrays = slots.arrays(answer)
        except BaseException as raised:
            error = raised
        self._on_done(request, FillOutcome(index, arrays, error, *answer.others))
        del error  # its traceback may have this frame

    def _keep(self, several: Sequence[Recorded]) -> None:
        """Keep a helper's recorded events, up to the limit. The caller holds the lock."""
        if not self._max_events:
            return
        for recorded in several:
            room = self._max_events - sum(len(one.events) for one in self._recorded.values())
            former = self._recorded.get(recorded.process, recorded._replace(events=[], dropped=0))
            events = former.events + recorded.events[:room]
            dropped = former.dropped + recorded.dropped + max(0, len(recorded.events) - room)
            self._recorded[recorded.process] = recorded._replace(events=events, dropped=dropped)

    # --- the end of a helper ----------------------------------------------------------------------

    def _go_on(self, error: BaseException | None) -> bool:
        """Fail the requests that are to blame for a helper's end; return whether to start another.

        Nothing in this thread keeps the error, because its traceback will refer to the reader.
        """
        if error is None:
            return False
        if not self.methods:  # the reader's constructor raises it
            if isinstance(error, HelperDied):
                step = "started its threads" if self.opened else "opened the files"
                error = HelperDied(f"{error} before it had {step}; standard error may say why")
            self._start_error = error
            self._changed.notify()
            return False
        if isinstance(error, HelperDied):  # (logged as text: handlers may keep their arguments)
            _log.warning(
                "%s: %s; another helper takes its place, and continues its work",
                self._what,
                str(error),
            )
        with self._lock:
            blamed = self._outstanding.blame()
            oldest = self._outstanding.oldest()
            has_started = self._outstanding.has_started
        if isinstance(error, HelperDied):
            for request, deaths in blamed:
                when = "was being filled" if has_started else "was to be filled"
                death = HelperDied(
                    f"{error} while {request} {when}; {deaths} helpers ended on this batch"
                    " (standard error may say why), and the next call goes on with a new helper"
                )
                self._fail(request, death)
        elif oldest is not None:
            self._fail(oldest, error)
        return True

    def _fail(self, request: FillRequest, error: BaseException) -> None:
        with self._lock:
            is_there = self._outstanding.remove(request)
        if is_there:
            self._on_done(request, FillOutcome(NO_SAMPLES, (), error))


def _step(process: HelperProcess) -> Any:
    """Return the helper's answer to a step of its start, or raise its error."""
    message = process.receive()
    if isinstance(message, Failed):
        raise received(message.error)
    return message
