"""Defines what fillers share with their owner: slots, functions, outcomes, statistics, recordings.

There are two fillers: `Filler` in this process, and `HelperFiller` in helper processes. What they
answer is picklable.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import CoreTrace
from h5async.errors import Skipped
from h5async.fill.pool import do_nothing
from h5async.fill.reading import BatchReader
from h5async.order.sampling import FillRequest
from h5async.read.farsources import FetchCounts
from h5async.samples.fieldkind import field_of
from h5async.system.timeline import (
    CORE_STAGES,
    STAGES,
    Event,
    ThreadCounts,
    ThreadName,
    Timeline,
)


class Calls(NamedTuple):
    """Functions of the owner of slots, which a filler calls in its threads.

    `next_requests` returns, after `kick`, what is to be filled now; `before_fill` returns when a
    slot may be written to; `on_done` takes the outcome of each request, once, unless the filler is
    closed before; `on_crash` takes an error that belongs to no batch.
    """

    next_requests: Callable[[], Sequence[FillRequest]]
    before_fill: Callable[[int], None]
    on_done: Callable[[FillRequest, FillOutcome], None]
    on_crash: Callable[[BaseException], None]


NO_CALLS = Calls(list, do_nothing, do_nothing, do_nothing)  # after the end


class FillOutcome(NamedTuple):
    """The result of a request: the sample numbers of a batch, int64 (n,), and its arrays.

    These are, in field order, views of n rows of the slot's `out`, or the result of `postprocess`,
    or, once uploaded, arrays on a device. They are undefined after an `error`.
    """

    index: NDArray[np.int64]  # type: ignore[assignment]  # (a tuple's method of that name)
    arrays: tuple[Any, ...]
    error: BaseException | None = None
    is_resident: bool = False  # nothing was read, because the device has the rows
    busy_seconds: float = 0.0  # that threads spent on it, summed up
    warnings: tuple[str, ...] = ()  # for the consumer, each reported once
    names: tuple[str, ...] = ()  # of the arrays, after a `postprocess`; otherwise the fields
    skipped: tuple[Skipped, ...] = ()  # samples of the batch that were left out


class FillerStats(NamedTuple):
    """What a filler has done so far.

    `stage_seconds` has the stages that `counts` has not; `fallback_reads` went through h5py;
    `cache` says what is kept in memory, or why not; `broken_images` were replaced; `fetched` is
    what was done for far sources.
    """

    stage_seconds: Mapping[str, float] = dict.fromkeys(STAGES, 0.0)
    counts: ThreadCounts = ThreadCounts()
    fallback_reads: int = 0
    cache: str = "none"
    broken_images: int = 0
    fetched: FetchCounts = FetchCounts()

    def plus(self, other: FillerStats, times: int = 1) -> FillerStats:
        """Return the sum with another filler, which keeps the same, counted `times` times."""
        mine, others = self.stage_seconds, other.stage_seconds
        return FillerStats(
            {stage: max(0.0, mine[stage] + times * others[stage]) for stage in STAGES},
            self.counts.plus(other.counts, times),
            self.fallback_reads + times * other.fallback_reads,
            self.cache,
            self.broken_images + times * other.broken_images,
            self.fetched.plus(other.fetched, times),
        )


class Recorded(NamedTuple):
    """What was recorded in a process, by its ID in the system.

    `threads` are by `threading.get_ident` there; `events` have fields and sources by their names;
    `dropped` is the number of events that were not kept.
    """

    process: int
    threads: dict[int, ThreadName]
    events: list[Event]
    dropped: int


class Recording:
    """Events of the threads of a filler, from now on.

    `timeline` records Python's events; `columns` are names.
    """

    def __init__(
        self,
        timeline: Timeline,
        reader: BatchReader,
        columns: Sequence[str],
    ) -> None:
        self.timeline = timeline
        self._fields = list(map(field_of, columns))
        self._source_path = reader.source_path
        self._paths: dict[int, int | str] = {-1: -1}
        self._trace = None
        if reader.core is not None and timeline.max_events:
            self._trace = CoreTrace(reader.core, timeline.max_events)
        self._taken = self._dropped = 0  # events of the core
        self._lock = threading.RLock()
        timeline.note_threads()
        reader.record(self._trace)
        reader.recorder.timeline = timeline

    def take(self) -> Recorded:
        """Return what was recorded since the last call. Safe to call from many threads."""
        timeline = self.timeline
        with self._lock:
            events = [self._named(event) for event in timeline.take_events(time.perf_counter_ns())]
            dropped, timeline.dropped = timeline.dropped, 0
            if self._trace is not None:
                events += self._core_events(self._trace)
                before, self._dropped = self._dropped, self._trace.count - timeline.max_events
                dropped += max(0, self._dropped) - max(0, before)
            return Recorded(os.getpid(), dict(timeline.threads), events, dropped)

    def _core_events(self, trace: CoreTrace) -> list[Event]:
        found = trace.events(self._taken)
        unfinished = np.flatnonzero(found["end_ns"] == 0)
        if unfinished.size:  # it, and those after it, are left for the next call
            found = found[: unfinished[0]]
        self._taken += found.size
        names = ("begin_ns", "end_ns", "thread", "batch", "stage", "field", "source")
        columns = (found[name].tolist() for name in names)
        return [
            self._named(Event(CORE_STAGES[stage], begin, end, thread, batch, field, source))
            for begin, end, thread, batch, stage, field, source in zip(*columns, strict=True)
        ]

    def _named(self, event: Event) -> Event:
        field, source = event.field, event.source
        if isinstance(field, int) and field >= 0:
            field = self._fields[field]
        if isinstance(source, int):
            if source not in self._paths:
                self._paths[source] = self._source_path(source)
            source = self._paths[source]
        return event._replace(field=field, source=source)
