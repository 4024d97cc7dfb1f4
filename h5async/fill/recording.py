"""Records what the threads of a filler do: a timeline enters; events leave, including the core's.

The core notes its own in memory of a fixed size (core/src/trace.c).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from h5async.core.binding import Core, CoreTrace
from h5async.fill.reading import BatchReader
from h5async.samples.columns import INDICES
from h5async.system.timeline import CORE_STAGES, Event, Recorder, ThreadName, Timeline


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
    """Events of the threads of a filler, from now on until `stop`.

    `timeline` records Python's events, and threads call `recorder`; `columns` are names.
    """

    def __init__(
        self,
        timeline: Timeline,
        recorder: Recorder,
        core: Core | None,
        reader: BatchReader,
        columns: Sequence[str],
    ) -> None:
        self.timeline = timeline
        self._recorder = recorder
        self._fields = [name.removesuffix(INDICES) for name in columns]
        self._reader: BatchReader | None = reader
        self._source_path = reader.source_path
        self._paths: dict[int, int | str] = {-1: -1}
        self._trace = None
        if core is not None and timeline.max_events:
            self._trace = CoreTrace(core, timeline.max_events)
        self._taken = self._dropped = 0  # events of the core
        self._lock = threading.RLock()
        timeline.note_threads()
        reader.record(self._trace)
        recorder.timeline = timeline

    def stop(self) -> None:
        """Stop recording; work under way may note a little more. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._recorder.timeline = None
            reader.record(None)

    def take(self, process: int) -> Recorded:
        """Return what was recorded since the last call. Safe to call from many threads."""
        with self._lock:
            recorded = self._take(process)
        return recorded

    def _take(self, process: int) -> Recorded:
        timeline = self.timeline
        events = [self._named(event) for event in timeline.take_events(time.perf_counter_ns())]
        dropped, timeline.dropped = timeline.dropped, 0
        if self._trace is not None:
            events += self._core_events(self._trace)
            dropped += self._newly_dropped(self._trace)
        return Recorded(process, dict(timeline.threads), events, dropped)

    def _core_events(self, trace: CoreTrace) -> list[Event]:
        found = trace.events(self._taken)
        unfinished = np.flatnonzero(found["end_ns"] == 0)
        if unfinished.size:  # it, and those after it, are left for the next call
            found = found[: unfinished[0]]
        self._taken += found.size
        columns = (found[name].tolist() for name in _COLUMNS)
        return [
            self._named(Event(CORE_STAGES[stage], begin, end, thread, batch, field, source))
            for begin, end, thread, batch, stage, field, source in zip(*columns, strict=True)
        ]

    def _newly_dropped(self, trace: CoreTrace) -> int:
        before, self._dropped = self._dropped, max(0, trace.count - self.timeline.max_events)
        return self._dropped - before

    def _named(self, event: Event) -> Event:
        field, source = event.field, event.source
        if isinstance(field, int) and field >= 0:
            field = self._fields[field]
        if isinstance(source, int):
            if source not in self._paths:
                self._paths[source] = self._source_path(source)
            source = self._paths[source]
        return event._replace(field=field, source=source)


_COLUMNS = ("begin_ns", "end_ns", "thread", "batch", "stage", "field", "source")
