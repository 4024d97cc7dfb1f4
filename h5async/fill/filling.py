"""Fills slots with batches, in threads of this process.

A `FillRequest` enters; a filled slot leaves, with a `FillOutcome`: planned, read, decoded,
transformed, postprocessed. The filler knows nothing about the reader: it is made from the
configuration, the layouts and the memory of the slots, and takes small picklable requests.

It combines the pool of threads (`pool.py`), the phases of a batch (`phases.py`), and the planning
and reading of rows (`reading.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import CoreTrace, load_core, mapping_mode
from h5async.fill.fetching import Fetcher
from h5async.fill.finishing import BatchDecoder, Postprocess
from h5async.fill.outcomes import (
    Calls,
    Done,
    FillerStats,
    FillOutcome,
    OnDevice,
    Recorded,
    Slots,
    stats_of,
)
from h5async.fill.phases import Phases
from h5async.fill.pool import Work, WorkPool, do_nothing
from h5async.fill.reading import BatchReader
from h5async.fill.resident import (
    Budget,
    Damage,
    HostCache,
    Residency,
    gigabytes,
    keeps_chunks,
    open_host_cache,
)
from h5async.fill.submissions import Submissions
from h5async.io.diskcache import DiskCache, disk_cache
from h5async.opening.dataset import OpenedDataset, Samplings
from h5async.opening.limits import MemoryPlan
from h5async.order.sampling import FillRequest
from h5async.plan.transform import RowTransform
from h5async.read.executors import Executors
from h5async.read.farsources import FetchCounts
from h5async.samples.assembly import Assembly, SlotMemory
from h5async.samples.fieldkind import field_of
from h5async.system.timeline import CORE_STAGES, IN_MEMORY, Event, Recorder, ThreadCounts, Timeline


class Filler:
    """Fills slots in a pool of threads or, without threads, in the caller of `run_next`.

    Requests refer to `samplings`; `transforms` are by column, in order; `memory_plan` says how much
    memory may be used; `recorder` records all work. The consumer may submit batches to
    `submissions` itself; if that is None, threads ask for requests.

    Raises `ConfigError` if a ``"module:function"`` cannot be imported, and `OutOfMemoryError` if
    the system refuses memory for the threads.
    """

    def __init__(
        self,
        opened: OpenedDataset,
        samplings: Samplings,
        transforms: Mapping[str, RowTransform],
        slots: Slots,
        memory_plan: MemoryPlan,
        calls: Calls,
        device: OnDevice,
        recorder: Recorder,
    ) -> None:
        config, several = opened.config, list(transforms.values())
        self._columns, self._slots, self._recorder = list(opened.layouts), slots, recorder
        self._opens_ahead = not config.names_index
        self._next_requests = calls.next_requests
        postprocess = None if config.postprocess is None else Postprocess(opened, samplings)
        self._cache: HostCache | Budget | DiskCache | str | None = None  # `str` of it is for users
        kept_nbytes = sum(memory_plan.kept_nbytes)
        keeps_all = keeps_chunks(config, opened.layouts, samplings.rows, kept_nbytes)
        if keeps_all:  # decoded chunks instead of rows
            self._cache = f"host, decoded chunks, {gigabytes(kept_nbytes)} for all"
        elif config.cache == "host":
            self._cache = open_host_cache(
                samplings.selection,
                [transform.raw_nbytes for transform in several],
                [
                    layout.segments if layout.is_repeated else rows
                    for layout, rows in zip(opened.layouts.values(), samplings.rows, strict=True)
                ],
                config.cache_bytes,
                memory_plan.left_nbytes,
            )
        elif config.kept is not None:
            self._cache = disk_cache(config.kept)
        cache = self._cache if isinstance(self._cache, HostCache) else None
        self._resident = device.cache if cache is None else cache
        # Told to forget their samples if a file changes; emptied when the filler stops.
        self._residencies: list[Residency | Damage] = []
        if self._resident is not None:
            self._residencies.append(self._resident)
        self._executors = Executors(
            load_core(),
            list(opened.layouts.values()),
            mapping_mode(config.io),
            memory_plan.kept_nbytes,
            partial(_forget, self._residencies),
            samplings.selection.size,
            config.kept,
            keeps_all=keeps_all,
        )
        try:
            num_threads = min(config.thread_count, memory_plan.most_threads)
            self._reader = BatchReader(
                self._executors,
                several,
                samplings,
                slots,
                max(1, num_threads),
                recorder,
                device.plan_columns,
                cache,
            )
            damage = self._reader.damage
            self._residencies.append(damage)
            decoding = max(1, num_threads) * max(1, config.num_helpers)
            limit_nbytes = memory_plan.limit_nbytes
            decoder = BatchDecoder(opened, self._reader, decoding, limit_nbytes, device.left)
            self._decoder = decoder if decoder.fields else None
            crops = (layout.crop for layout in opened.layouts.values())
            is_drawn = any(crop is not None and crop.is_drawn for crop in crops)
            is_drawn |= any(field.is_random for field in decoder.fields.values())
            damage.lasts, damage.is_skipped = not is_drawn, config.on_error == "skip"
            assembly = Assembly(opened.kinds, samplings.rows, self._reader.first_samples)
            self.submissions: Submissions | None = None
            if not (assembly.is_plain and assembly.is_view):  # Python does more than make views
                slots.uploads, slots.delivered = None, ()
            kept, queue = device.cache, None
            if slots.has_queue and (kept is None or slots.uploads is not None):
                queue = self._reader.open_queue(slots.uploads, kept)
            if queue is not None:
                needs_python = postprocess is not None or assembly.needs_work
                needs_python |= not slots.are_writable and slots.uploads is None
                self.submissions = Submissions(queue, self._reader, assembly, needs_python, cache)
            pool = self._pool = WorkPool(
                num_threads, self._find_work, calls.on_crash, self.submissions
            )
            if num_threads > 1:  # a single thread would keep the loop waiting for batches
                samplings.aside = pool.add_aside
            self._fetcher: Fetcher | None = None
            if self._reader.far is not None and num_threads:
                is_dealt = config.num_helpers > 1  # each helper gets only some of the batches
                self._fetcher = Fetcher(
                    self._reader.far,
                    config.requests_in_flight,
                    config.fetch_bytes,
                    self._reader.ahead,
                    (lambda request: None) if is_dealt else samplings.following,
                    pool.add,
                    recorder,
                )
            # See `WorkPool`.
            self.kick, self.run_next, self.join = pool.kick, pool.run_next, pool.join
            self.abandon = pool.forget_work
            self._phases = Phases(
                pool,
                self._reader,
                assembly,
                device.left,
                self._decoder,
                postprocess,
                self._resident,
                calls,
                self._fetcher,
            )
            if self.submissions is not None:
                self.submissions.resume = self._phases.resume
                if self._fetcher is not None:
                    self.submissions.is_fetched = self._fetcher.has
        except BaseException:
            self._executors.close()  # nobody else can close it yet
            raise
        self._final_stats: FillerStats | None = None
        self._recording: Recording | None = None

    def start(self) -> None:
        """Open files and start the threads; call `stop` after an exception.

        `ReadError` is raised if a file cannot be opened, or the system allows no more threads.
        """
        if self._opens_ahead:
            self._executors.open_ahead(lambda: self._pool.is_stopped)
        if self._fetcher is not None:
            self._fetcher.start(self._reader.file)
        self._pool.start(self._reader.file)

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""
        return self._executors.methods

    def fill(self, request: FillRequest) -> None:
        """Fill a slot. Never blocks. Safe to call from any thread."""
        self._pool.add(request.serial, [partial(self._phases.begin, request)])

    def do_later(self, serial: int, work: Work) -> None:
        """Have a thread do work that a batch waits for. Never blocks. Thread-safe."""
        self._pool.add(serial, [work])

    def read(self, index: NDArray[np.int64], memory: SlotMemory) -> FillOutcome:
        """Read samples to `memory` in the calling thread, concurrently with other work."""
        return self._pool.run(lambda: self._phases.read(index, memory))

    def stats(self) -> FillerStats:
        """Return the work of all threads so far."""
        if self._final_stats is not None:
            return self._final_stats
        done = self.done_in_python()(self.done_in_core())
        return done._replace(cache=str(self._cache or "none"))

    def done_in_core(self) -> ThreadCounts:
        """Return the work of all threads in the core so far."""
        return self._reader.done_in_core()

    def done_in_python(self) -> Done:
        """Return the work of all threads outside the core so far, as a function; see `Done`."""
        final = self._final_stats
        if final is not None:
            return lambda _: final
        return partial(
            stats_of,
            self._reader.times.copied(),
            self._reader.done_in_python(),
            self._executors.fallback_reads,
            0 if self._decoder is None else self._decoder.broken_images,
            FetchCounts() if self._reader.far is None else self._reader.far.counts,
        )

    def record(self, timeline: Timeline | None) -> None:
        """Record the work of all threads from now on; None: stop recording."""
        if timeline is not None:
            self._recording = Recording(timeline, self._reader, self._columns)
        elif self._recording is not None:  # work under way may still record a few events
            self._recorder.timeline = None
            self._reader.record(None)

    def recorded(self) -> list[Recorded]:
        """Return the events since the last call; once recording has stopped, the last ones."""
        recording = self._recording
        if recording is None:
            return []
        if self._recorder.timeline is None:
            self._recording = None
        return [recording.take()]

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Mark the samples of the batch in a slot as kept in the device cache."""
        assert self._resident is not None
        self._resident.add(index)

    def stop(self, then: Callable[[], None]) -> None:
        """Drop pending work; after work under way, close files and call `then`; see `Workers`."""
        self._reader.interrupt()
        if self._fetcher is not None:
            self._fetcher.stop(do_nothing)
        turns = None if self.submissions is None else self.submissions.turns
        if turns is not None:
            self._pool.wait_for(turns.when_left)
        self._pool.stop(partial(self._let_go, then))

    def _find_work(self) -> list[tuple[int, Work]]:
        begin = self._phases.begin
        return [(request.serial, partial(begin, request)) for request in self._next_requests()]

    def _let_go(self, then: Callable[[], None]) -> None:
        self._executors.close()
        self._final_stats = self.stats()
        self._reader.samplings.aside = None
        self._slots.memory = self._slots.delivered = ()  # the caller may still hold a batch
        self._slots.uploads = None
        self._reader.close()
        self._phases.close()
        if self.submissions is not None:
            self.submissions.close()
        self._residencies.clear()
        self._resident = self._cache = self._fetcher = None
        then()
        self._next_requests = list  # the owner of the callback refers to this object


class Recording:
    """Records events of a filler's threads from now on; `timeline` records those in Python."""

    def __init__(self, timeline: Timeline, reader: BatchReader, columns: Sequence[str]) -> None:
        self.timeline = timeline
        self._fields = list(map(field_of, columns))
        self._source_path = reader.source_path
        self._paths: dict[int, int | str] = {-1: -1, IN_MEMORY: "memory"}
        self._trace = None
        if reader.core is not None and timeline.max_events:
            self._trace = CoreTrace(reader.core, timeline.max_events)
        self._taken = self._dropped = 0  # counts of the core's events
        self._lock = threading.RLock()
        timeline.note_threads()
        reader.record(self._trace)
        reader.recorder.timeline = timeline

    def take(self) -> Recorded:
        """Return the events recorded since the last call. Safe to call from many threads."""
        timeline = self.timeline
        with self._lock:
            found = [] if self._trace is None else self._core_events(self._trace)
            waits = [event for event in found if event.stage == "wait"]
            events = [event for event in found if event.stage != "wait"]
            events += timeline.take_events(time.perf_counter_ns(), waits)
            events = [self._named(event) for event in events]
            dropped, timeline.dropped = timeline.dropped, 0
            if self._trace is not None:
                before, self._dropped = self._dropped, self._trace.count - timeline.max_events
                dropped += max(0, self._dropped) - max(0, before)
            recorded = Recorded(os.getpid(), dict(timeline.threads), events, dropped)
        return recorded

    def _core_events(self, trace: CoreTrace) -> list[Event]:
        found = trace.events(self._taken)
        unfinished = np.flatnonzero(found["end_ns"] == 0)
        if unfinished.size:  # the first such event, and all after it, wait for the next call
            found = found[: unfinished[0]]
        self._taken += found.size
        names = ("begin_ns", "end_ns", "thread", "batch", "stage", "field", "source")
        columns = (found[name].tolist() for name in names)
        events = []
        for begin, end, thread, batch, stage, field, source in zip(*columns, strict=True):
            if CORE_STAGES[stage] == "request":
                self.timeline.batches[batch] = source, field
                field = source = -1
            events.append(Event(CORE_STAGES[stage], begin, end, thread, batch, field, source))
        return events

    def _named(self, event: Event) -> Event:
        field, source = event.field, event.source
        if isinstance(field, int) and field >= 0:
            field = self._fields[field]
        if isinstance(source, int):
            if source not in self._paths:
                self._paths[source] = self._source_path(source)
            source = self._paths[source]
        return event._replace(field=field, source=source)


def _forget(residencies: Sequence[Residency | Damage]) -> None:
    for resident in residencies:
        resident.forget()
