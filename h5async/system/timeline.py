"""Counts the work of threads, sums the times of stages, and on request records when each was done.

`h5async.observe.stats` explains the stages.

A `Recorder` lives as long as a reader, and has a `Timeline` while recording. All parts report to
the recorder, which ignores reports otherwise. The compiled core records its own work
(core/src/trace.c).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby
from threading import get_ident
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

STAGES = ("plan", "fetch", "read", "decode", "place", "transform", "postprocess", "upload")
IN_MEMORY = -3  # in place of a source, in events of the core
# Names of the core's stages, by its numbers.
CORE_STAGES = ("plan", "read", "decode", "place", "transform", "request", "wait", "upload")

NO_BATCH, NO_FIELD = -1, -1

# Begins a named range in another tool, for this thread; returns a function that ends it.
OpenRange = Callable[[str], Callable[[], object]]

_OFF = nullcontext()
_RANGE = "h5async: "  # prefix of stages in other tools


@dataclass
class ThreadCounts:
    """Counts of one thread; only that thread writes them."""

    read_ns: int = 0
    decode_ns: int = 0
    place_ns: int = 0
    gil_wait_ns: int = 0
    read_nbytes: int = 0
    decoded_chunks: int = 0
    decoded_nbytes: int = 0
    h5py_decoded_nbytes: int = 0  # by HDF5, from chunks that only h5py reads
    transform_ns: int = 0  # by the core
    plan_ns: int = 0  # by the core, for batches in its queue
    upload_ns: int = 0  # likewise

    def plus(self, other: ThreadCounts, times: int = 1) -> ThreadCounts:
        """Return the sum of all counts; `other` counts `times` times."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ThreadCounts(*(mine + times * others for mine, others in pairs))


class StageTimes:
    """Times of stages, summed over threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, begin_ns: int) -> None:
        """Add the time since `begin_ns` (from `perf_counter_ns`) to a stage."""
        taken = perf_counter_ns() - begin_ns
        with self._lock:
            self._ns[stage] += taken

    def copied(self) -> dict[str, int]:
        """Return the time of each stage so far, in thread nanoseconds."""
        with self._lock:
            found = self._ns.copy()
        return found  # (outside `with`: a signal handler that raises might leave it locked)


class Event(NamedTuple):
    """A period in which a thread worked on a stage."""

    stage: str
    begin_ns: int
    end_ns: int
    thread: int  # of `threading.get_ident`
    batch: int  # a serial number, or `NO_BATCH` for given samples
    field: int | str = NO_FIELD  # a column's number or a field's name; NO_FIELD: none or several
    source: int | str = -1  # the source read: its number in the core, or a name


class ThreadName(NamedTuple):
    """A thread's name, and its number in the operating system."""

    name: str
    native_id: int


class Timeline:
    """A record of the work of threads. Thread-safe.

    The first `max_events` are kept, and the others counted as `dropped`. `open_ranges`, functions
    of other tools, are called when Python code begins a stage. `threads` has the names of the
    events' threads; `batches`, the epochs and numbers of batches up to the last `take_events`.
    """

    def __init__(self, max_events: int, open_ranges: Sequence[OpenRange] = ()) -> None:
        self.max_events = max_events
        self.open_ranges = open_ranges
        self.dropped = 0
        self.threads: dict[int, ThreadName] = {}
        self.batches: dict[int, tuple[int, int]] = {}
        self._events: list[tuple[Any, ...]] = []  # the members of an `Event`
        # Begin and end (ns), thread, and the batch's serial number, epoch and number.
        self._requests: list[tuple[int, int, int, int, int, int]] = []
        # Begin and end (s), thread, the batch, and whether it was delivered.
        self._waits: list[tuple[float, float, int, int, bool]] = []
        self._waiting = ExitStack()
        # Per thread: the batch, field and source that it works on.
        self._here: dict[int, tuple[int, int, int | str]] = {}
        self._lock = threading.RLock()

    # --- recording --------------------------------------------------------------------------------

    def work_on(self, batch: int, field: int = NO_FIELD, source: int | str = -1) -> None:
        """Note what this thread works on from now on, for `add`."""
        self._here[get_ident()] = batch, field, source

    def batch_here(self) -> int:
        """Return the batch that this thread works on."""
        return self._here.get(get_ident(), _NOTHING)[0]

    def add(self, stage: str, begin_ns: int) -> None:
        """Note that this thread has done a stage of its current work since `begin_ns`."""
        batch, field, source = self._here.get(get_ident(), _NOTHING)
        self.put(stage, begin_ns, batch, field, source)

    def put(
        self,
        stage: str,
        begin_ns: int,
        batch: int,
        field: int | str = NO_FIELD,
        source: int | str = -1,
    ) -> None:
        """Note that this thread has done a stage of a batch since `begin_ns`."""
        events, end_ns, thread = self._events, perf_counter_ns(), get_ident()
        if thread not in self.threads:  # it may have ended before names are collected
            self._note_thread(threading.current_thread())
        if len(events) < self.max_events:
            events.append((stage, begin_ns, end_ns, thread, batch, field, source))
        else:
            self._drop()

    def requested(self, begin_ns: int, requests: Sequence[tuple[Any, ...]]) -> None:
        """Note that this thread has requested batches (`FillRequest`) since `begin_ns`."""
        known, end_ns, thread = self._requests, perf_counter_ns(), get_ident()
        for request in requests:
            if len(known) < self.max_events:
                known.append((begin_ns, end_ns, thread, request[1], request[2], request[3]))
            else:
                self._drop()

    def hold(self, batch: int) -> None:
        """Note that a batch is in use from now on; like those below, called by the consumer."""
        now = perf_counter()
        self.waited(now, now, batch, True)

    def begin_wait(self) -> None:
        """Tell other tools that this thread waits for a batch."""
        self._waiting = self.ranges("wait")

    def ranges(self, stage: str) -> ExitStack:
        """Open a range for a stage of this thread in other tools; return the context to close."""
        stack = ExitStack()
        for open_range in self.open_ranges:
            stack.callback(open_range(_RANGE + stage))
        return stack

    def waited(self, begin: float, end: float, batch: int, is_there: bool) -> None:
        """Note that this thread has waited for a batch, in seconds of `time.perf_counter`.

        No batch is in use during the wait. Afterwards, this one is, if `is_there`.
        """
        waits = self._waits
        if len(waits) < self.max_events:
            waits.append((begin, end, get_ident(), batch, is_there))
        else:
            self._drop()
        if self.open_ranges:
            self._waiting.close()

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1

    # --- collecting -------------------------------------------------------------------------------

    def take_events(self, end_ns: int, more: Sequence[Event] = ()) -> list[Event]:
        """Return the events since the last call; a batch in use ends at `end_ns`.

        `more` are waits of the consumer in the core.
        """
        self.note_threads()
        count = len(self._events)
        events = list(map(Event._make, self._events[:count]))
        del self._events[:count]
        # (Copied: a recording thread may be about to add one.)
        requests, self._requests = list(self._requests), []
        for when, several in groupby(requests, key=lambda one: one[:3]):
            begin_ns, last_ns, thread = when
            asked = list(several)  # batches requested at once
            share = (last_ns - begin_ns) // len(asked)
            for number, (*_, serial, epoch, batch) in enumerate(asked):
                self.batches[serial] = epoch, batch
                at = begin_ns + number * share
                events.append(Event("request", at, at + share, thread, serial))
        noted, self._waits = self._waits, []
        waits = [(_ns(begin), _ns(end), *others) for begin, end, *others in noted]
        waits += [(one.begin_ns, one.end_ns, one.thread, one.batch, True) for one in more]
        waits.sort()
        ends = [wait[0] for wait in waits[1:]]
        for wait, next_ns in zip(waits, [*ends, end_ns], strict=False):
            begin_ns, taken_ns, thread, serial, is_there = wait
            if begin_ns < taken_ns:  # otherwise it was in use already
                events.append(Event("wait", begin_ns, taken_ns, thread, serial))
            if is_there:
                events.append(Event("in use", taken_ns, next_ns, thread, serial))
        return events

    def _note_thread(self, thread: threading.Thread) -> None:
        if thread.ident is not None:
            self.threads[thread.ident] = ThreadName(thread.name, thread.native_id or thread.ident)

    def note_threads(self) -> None:
        """Note the names of all threads."""
        for thread in threading.enumerate():
            self._note_thread(thread)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_NOTHING: tuple[int, int, int | str] = (NO_BATCH, NO_FIELD, -1)


class Recorder:
    """Holds the current `timeline` for all parts that report; None if nothing is recorded."""

    __slots__ = ("timeline",)

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def ranges(self, stage: str) -> AbstractContextManager[Any]:
        """Return a context that marks a stage of this thread in other tools."""
        timeline = self.timeline
        if timeline is None or not timeline.open_ranges:
            return _OFF
        return timeline.ranges(stage)

    def note(self, stage: str, begin_ns: int, batch: int, field: int | str = NO_FIELD) -> None:
        """Note that this thread has done a stage of a batch since `begin_ns`."""
        if self.timeline is not None:
            self.timeline.put(stage, begin_ns, batch, field)

    def work_on(self, batch: int) -> None:
        """Note the batch that this thread works on from now on."""
        if self.timeline is not None:
            self.timeline.work_on(batch)
