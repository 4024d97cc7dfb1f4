"""A fill request enters; a filled slot leaves: planned, read, decoded, transformed, postprocessed.

The filler knows nothing of the reader. It is made from the configuration, the layouts and the
memory of the slots, is driven by small picklable requests, and answers each with an outcome.

A batch goes through phases: plan, read, keep, transform, postprocess. The work of a phase is cut
into shares that all threads take from one heap, oldest batch first, so that a batch is ready as
early as possible; whoever finishes the last share of a phase begins the next one, and nobody waits.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.core.binding import load_core, mapping_mode
from h5async.errors import (
    ConfigError,
    OutOfMemoryError,
    PostprocessError,
    ReadError,
    forget_frames,
    is_lack_of_memory,
    out_of_memory,
    postprocess_error,
    taking_memory,
)
from h5async.fill.dataset import Samplings
from h5async.fill.limits import MemoryPlan
from h5async.fill.resident import Budget, HostCache, Residency, open_host_cache
from h5async.index.changes import FileChanges
from h5async.index.layout import DatasetLayout
from h5async.io.keptfiles import affordable_files
from h5async.io.localfiles import LocalFiles
from h5async.order.sampling import OrderKey
from h5async.order.window import kept_nbytes
from h5async.plan.plan import GatherPlan, PlanSlice, ReadPlan, RowPlan, cut, plan_read
from h5async.plan.stored import StoredFormat, StoredPlan, plan_stored
from h5async.plan.transform import RowTransform
from h5async.read.chunkcache import ChunkCache
from h5async.read.codecs import Scratch
from h5async.read.execute import Executor, PlanExecutor, scratch_nbytes
from h5async.read.fallback import FallbackExecutor, FallbackReader
from h5async.read.native import (
    NativeExecutor,
    NativeTransform,
    StoredReader,
    native_transform,
    way_of,
)
from h5async.read.parts import MemoryExecutor, PartsExecutor
from h5async.stats import StageTimes, ThreadCounts
from h5async.system.interruptions import interruption
from h5async.system.patience import Patience

_MIN_SHARE_NBYTES = 256 * 1024  # about 25 µs of copying: what it costs to wake a thread

# A dataset of encoded chunks that decodes to no more (labels, say) is decoded once.
_KEPT_WHOLE_NBYTES = 64 << 20

THREAD_NAME = "h5async"


class SlotMemory(NamedTuple):
    """The host arrays of a slot, one of each kind for each field.

    Attributes
    ----------
    raw
        (batch, *raw_row): rows as read.
    out
        (batch, *row): rows as delivered; the very array of `raw` where the filler has nothing
        to transform.
    stored
        uint8: chunks as they are stored, for the device to decode; None where it cannot.
    """

    raw: tuple[NDArray[Any], ...]
    out: tuple[NDArray[Any], ...]
    stored: tuple[NDArray[np.uint8] | None, ...]


class FillRequest(NamedTuple):
    """Fill a slot with a batch; `serial` orders requests by urgency.

    `start` is the position in the epoch's order at which the batch's step begins; `order` is that
    order's key; `on_device`: leave decoding to the device where it can.
    """

    slot: int
    serial: int
    epoch: int
    number: int
    start: int
    order: OrderKey = (0, 1)
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class FillOutcome:
    """What became of a request.

    Attributes
    ----------
    index
        int64 (n,): sample numbers of the batch.
    arrays
        The batch, in field order: views of the slot's `out` of n rows, or what `postprocess`
        returned.
    error
        What went wrong, if anything; the arrays then hold nothing of use.
    is_resident
        Nothing was read, because the device has the rows.
    stored
        By field: which chunks were read as they are stored; None where rows were.
    busy_seconds
        What threads spent on it, summed up.
    warnings
        What the consumer is to be warned of, each once.
    """

    index: NDArray[np.int64]
    arrays: tuple[NDArray[Any], ...]
    error: BaseException | None = None
    is_resident: bool = False
    stored: tuple[StoredPlan | None, ...] = ()
    busy_seconds: float = 0.0
    warnings: tuple[str, ...] = ()


_NO_SAMPLES = np.zeros(0, np.int64)


class _Fill:
    """One batch on its way."""

    __slots__ = (
        "busy_ns",
        "error",
        "index",
        "is_resident",
        "plans",
        "request",
        "shares_left",
        "turn",
    )

    def __init__(self, request: FillRequest) -> None:  # made in the thread of the caller: be brief
        self.request = request
        self.index: NDArray[np.int64] = _NO_SAMPLES
        self.plans: Sequence[ReadPlan | StoredPlan] = []
        self.busy_ns = 0
        self.is_resident = False
        self.turn = 0  # of what is resident
        self.shares_left = 0
        self.error: BaseException | None = None


class FillerStats(NamedTuple):
    """What a filler has done so far.

    Attributes
    ----------
    stage_seconds
        By stage, but for what `counts` has.
    counts
        Of all threads.
    fallback_reads
        Reads that went through h5py.
    cache
        What is kept in memory, or why not.
    """

    stage_seconds: Mapping[str, float]
    counts: ThreadCounts
    fallback_reads: int
    cache: str


class Filler:
    """Fills slots in a thread pool, or, without threads, in whoever calls `run_next`.

    Parameters
    ----------
    config
        Threads, postprocess.
    samplings
        The orders of samples that requests are of.
    layouts, transforms
        By field name, in field order.
    slots
        Memory of each slot.
    memory_plan
        What else may be taken.
    next_requests
        Called in a worker, after `kick`: what is to be filled now.
    before_fill
        Called in a worker with the slot's number before anything is written to it; may block
        until the slot's memory may be overwritten.
    device_cache
        Which samples the device has and need not be read again, if it keeps them.
    stored_formats
        By field: how the device decodes chunks, for requests that ask for it.
    on_done
        Called in a worker with a request and its outcome, once for each request, unless the
        filler is closed before.
    on_crash
        Called in a worker with an exception that no batch can have: what `next_requests` or
        `on_done` raised. The thread goes on.

    Raises
    ------
    ConfigError
        If a ``"module:function"`` cannot be imported.
    OutOfMemoryError
        If the system refuses memory for the threads.
    """

    def __init__(
        self,
        config: ReaderConfig,
        samplings: Samplings,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        slots: Sequence[SlotMemory],
        *,
        memory_plan: MemoryPlan,
        device_cache: Residency | None = None,
        stored_formats: Sequence[StoredFormat | None] = (),
        next_requests: Callable[[], Sequence[FillRequest]],
        before_fill: Callable[[int], None],
        on_done: Callable[[FillRequest, FillOutcome], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._samplings = samplings
        self._layouts = list(layouts.values())
        self._transforms = list(transforms.values())
        self._slots = slots
        self._resident = device_cache
        self._cache: HostCache | None = None
        self._cache_budget: Budget | None = None
        if config.cache == "host":
            self._open_cache(config.cache_bytes, memory_plan.left_nbytes)
        self._next_requests = next_requests
        self._before_fill = before_fill
        self._on_done = on_done
        self._on_crash = on_crash
        self._postprocess = load_function(config.postprocess)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        # Reentrant: a reader collected in here by the garbage collector is closed in here.
        self._lock = threading.RLock()
        # For all batches, and made once: a lock takes memory, too.
        self._shares_lock = threading.Lock()
        self._closed = False
        self._then: Callable[[], None] = _nothing
        self._threads = min(config.thread_count, memory_plan.most_threads)
        # Threads that may touch slots, files and scratch: while there is one, nothing is freed.
        self._workers: set[int] = set()
        self._is_ending = False
        self._has_ended = threading.Event()
        self._times = StageTimes()
        self._core = load_core()
        self._chunks: list[ChunkCache] = []  # by field; always this list
        # What a change of a file makes worthless; emptied at the end.
        self._residencies = [] if self._resident is None else [self._resident]
        forget = partial(_forget, self._chunks, self._residencies)
        self._changes = FileChanges(self._layouts, forget)
        self._kept_files = affordable_files()
        self._fallback = FallbackReader(self._kept_files, self._changes)
        self._files = LocalFiles(
            self._kept_files,
            mapping_mode(config.io),
            python_maps=self._core is None,
            look_anew=self._changes.look_anew,
        )
        self._apply = [self._transformer(transform) for transform in self._transforms]
        self._kept_nbytes = memory_plan.kept_nbytes
        self._executors = self._new_executors()
        self._stored_formats = stored_formats
        self._stored_readers = {
            field: StoredReader(self._core, layout, self._files)
            for field, (layout, form) in enumerate(zip(self._layouts, stored_formats, strict=False))
            if form is not None and self._core is not None
        }
        sizes = [scratch_nbytes(layout) for layout in self._layouts]
        self._scratch_nbytes = tuple(map(max, *sizes, (0, 0, 0)))
        self._stop = c_int32()  # not 0: what is under way ends as soon as it can
        self._scratches: list[Scratch] = []
        self._final_stats: FillerStats | None = None
        threads = max(1, self._threads)
        what = f"{self._layouts[0].file}: scratch of {threads} threads, for chunks to be decoded"
        with taking_memory(what, "make num_threads smaller, or store smaller chunks"):
            self._scratch = deque(self._new_scratch() for _ in range(threads))
        # A ticket is a piece of work on the heap or, False, the end. A ThreadPoolExecutor
        # would do, and cost the thread of the caller 15 us more for each batch.
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._pool: list[threading.Thread] = []

    def start(self) -> None:
        """Open files, and start the threads. `stop` ends what an exception left half done.

        Raises
        ------
        ReadError
            If a file cannot be opened, or the system gives no more threads.
        """
        for layout in self._layouts:
            self._open_ahead(layout)
        # Daemons: else the interpreter would wait for them before the reader could close them.
        for number in range(self._threads):
            name = f"{THREAD_NAME}-fill_{number}"
            self._pool.append(threading.Thread(target=self._work, name=name, daemon=True))
            start_thread(self._pool[-1], str(self._layouts[0].file))

    def kick(self) -> None:
        """Have a worker ask for requests. Never blocks, and may be called once too often."""
        if self._threads:
            self._tickets.put(True)

    def fill(self, request: FillRequest) -> None:
        """Fill a slot. Never blocks. Safe to call from any thread."""
        self._enqueue(request.serial, [self._first_work(request)])

    def run_next(self) -> bool:
        """Do the most urgent share of work in the calling thread; False where there is none."""
        if not self._enter():
            return False
        try:
            return self._run_next()
        finally:
            self._leave()

    def _run_next(self) -> bool:
        work = self._pop()
        if work is None:
            requests = self._next_requests()
            if not requests:
                return False
            works = [(request.serial, self._first_work(request)) for request in requests]
            work = works[0][1]
            for serial, other in works[1:]:
                self._enqueue(serial, [other])
        work()
        return True

    def abandon(self) -> bool:
        """Forget all that was begun, after an exception in `run_next`, if it runs nowhere else.

        Returns
        -------
        bool
            Whether it was forgotten.
        """
        if self._threads:
            return False
        self._leave()  # where the exception kept `run_next` from it
        self._heap.clear()
        # What was interrupted there may have left a chunk that is claimed, and never comes.
        self._executors = self._new_executors()
        return True

    def stats(self) -> FillerStats:
        """Return what all threads have done so far."""
        if self._final_stats is not None:
            return self._final_stats
        return FillerStats(
            self._times.seconds(),
            functools.reduce(ThreadCounts.plus, (s.total() for s in list(self._scratches))),
            self._fallback.reads,
            str(self._cache or self._cache_budget or "none"),
        )

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Note that the device cache has the samples of the batch in a slot."""
        assert self._resident is not None
        self._resident.add(index)

    @property
    def ways(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""
        return [
            " and ".join(sorted({way_of(self._core, leaf) for leaf in layout.leaves()}))
            for layout in self._layouts
        ]

    def drop_stored(self, slots: Sequence[SlotMemory]) -> None:
        """Take slots without memory for stored chunks; no request is left that may need it."""
        self._stored_readers = {}
        self._slots = slots

    def stop(self, then: Callable[[], None]) -> None:
        """Drop what was not begun; when what was is done, close the files and call `then`.

        Never waits: it is called by the garbage collector, in any thread, which may hold a lock
        that a worker waits for. May be called again, and does then what an exception left undone.
        """
        with self._lock:
            if self._is_ending:
                return
            self._closed, self._then = True, then
            self._stop.value = 1
            self._heap.clear()
            is_idle = not self._workers
        for _ in self._pool:
            self._tickets.put(False)
        if is_idle:
            self._end()

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until all is done that `stop` asked for; a worker does not wait for itself."""
        if threading.get_ident() in self._workers:
            return
        patience = Patience(patience_seconds)
        while not self._has_ended.is_set() and not patience.is_over:
            patience.wait(self._has_ended.wait)
        join_all(self._pool, patience)

    def _first_work(self, request: FillRequest) -> Callable[[], None]:
        return partial(self._plan, _Fill(request))

    def _pop(self) -> Callable[[], None] | None:
        with self._lock:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def _enqueue(self, serial: int, works: Sequence[Callable[[], None]]) -> None:
        with self._lock:
            if self._closed:
                return
            for work in works:
                heapq.heappush(self._heap, (serial, next(self._order), work))
        for _ in works if self._threads else ():
            self._tickets.put(True)

    def _enter(self) -> bool:
        """Count the calling thread as a worker; False where it comes too late to be one."""
        with self._lock:
            if not self._closed:
                self._workers.add(threading.get_ident())
            return not self._closed

    def _leave(self) -> None:
        with self._lock:
            self._workers.discard(threading.get_ident())
            is_last = self._closed and not self._workers
        if is_last:
            self._end()

    def _work(self) -> None:
        if not self._enter():
            return
        try:
            while self._tickets.get():
                try:
                    self._run_next()
                except BaseException as error:
                    self._on_crash(error)
        finally:
            self._leave()

    def _end(self) -> None:
        """Let go of all that only workers use; after the last of them."""
        is_ours = False
        try:
            with self._lock:
                if not self._is_ending:
                    self._is_ending = is_ours = True
            if is_ours:
                self._let_go()
        except BaseException as error:
            if is_ours and interruption(error) is not None:
                self._is_ending = False  # the next `stop` ends it
            raise
        finally:
            if is_ours:
                self._has_ended.set()

    def _let_go(self) -> None:
        self._close_files()
        self._final_stats = self.stats()
        self._scratches.clear()
        self._scratch.clear()
        self._executors, self._stored_readers = [], {}
        self._chunks.clear()
        self._residencies.clear()
        self._resident = self._cache = None
        self._slots = ()  # the caller may still hold a batch; nothing else keeps its memory
        self._then()
        self._cut_cycles()

    def _cut_cycles(self) -> None:
        """Let go of functions whose owners hold this object, which nobody would collect."""
        self._next_requests, self._before_fill = list, _nothing
        self._on_done, self._on_crash, self._then = _nothing, _nothing, _nothing
        self._postprocess = None  # the caller's, who may hold the reader there

    def _plan(self, batch: _Fill) -> None:
        shares: list[list[PlanSlice]] = []
        self._attempt(batch, partial(self._cut_plans, batch, shares))
        self._begin(
            batch,
            [partial(self._read, batch, share) for share in shares],
            self._begin_keep,
        )

    def _cut_plans(self, batch: _Fill, shares: list[list[PlanSlice]]) -> None:
        request = batch.request
        self._before_fill(request.slot)
        begin = time.perf_counter_ns()
        sampling = self._samplings.at(request.order)
        batch.index = sampling.batch_at(request.epoch, request.start)
        batch.plans = self._plans(batch)
        # One for each thread: a share more costs more, in turns of the GIL, than it evens out.
        shares.extend(cut(batch.plans, max(1, self._threads), _MIN_SHARE_NBYTES))
        self._times.add("plan", begin)
        batch.busy_ns = time.perf_counter_ns() - begin

    def _plans(self, batch: _Fill) -> Sequence[ReadPlan | StoredPlan]:
        if self._resident is not None:
            batch.turn = self._resident.turn
        if self._resident is None or not self._resident.has(batch.index):
            return [self._plan_field(field, batch) for field in range(len(self._layouts))]
        if self._cache is not None:
            return self._cache.plans(batch.index)
        batch.is_resident = True
        return []

    def _plan_field(self, field: int, batch: _Fill) -> ReadPlan | StoredPlan:
        layout = self._layouts[field]
        plan = plan_read(layout, batch.index)
        if batch.request.on_device and field in self._stored_readers:
            form = self._stored_formats[field]
            assert form is not None
            return plan_stored(layout, form, plan) or plan
        return plan

    def _begin(
        self,
        batch: _Fill,
        works: Sequence[Callable[[], None]],
        then: Callable[[_Fill], None],
    ) -> None:
        """Begin a phase: do all `works`, in any thread, and after the last of them `then`."""
        if not works or batch.error is not None:
            self._go_on(batch, then)
            return
        batch.shares_left = len(works)

        def run(work: Callable[[], None]) -> None:
            begin = time.perf_counter_ns()
            if batch.error is None and not self._closed:
                self._attempt(batch, work)
            with self._shares_lock:
                batch.busy_ns += time.perf_counter_ns() - begin
                batch.shares_left -= 1
                was_last = batch.shares_left == 0
            if was_last:
                self._go_on(batch, then)

        if len(works) == 1:
            run(works[0])
        else:
            self._enqueue(batch.request.serial, [partial(run, work) for work in works])

    def _go_on(self, batch: _Fill, then: Callable[[_Fill], None]) -> None:
        """Begin the next phase; where that fails, the batch does. No share of it is under way."""
        if then == self._finish or not self._attempt(batch, partial(then, batch)):
            self._finish(batch)

    def _attempt(self, batch: _Fill, work: Callable[[], None]) -> bool:
        """Do some of a batch's work; where that fails, the batch does. Return whether it went well.

        What the error keeps of this is where it came from, and no memory: the batch has the error.
        """
        error = _raised_by(work)
        if error is None:
            return True
        try:
            self._note_error(batch, error)  # an interruption passes, with all that it holds
            forget_frames(error)
        finally:
            del error  # it has this frame, where it was raised again
        return False

    def _read(self, batch: _Fill, share: list[PlanSlice]) -> None:
        memory = self._slots[batch.request.slot]
        try:
            scratch = self._scratch.pop()
        except IndexError:  # more callers of `run_next` than threads were announced
            scratch = self._new_scratch()
        try:
            for number, start, stop in share:
                plan, raw, out = batch.plans[number], memory.raw[number], memory.out[number]
                if isinstance(plan, GatherPlan):
                    assert self._cache is not None
                    with scratch.counts.timed("read_ns"):
                        self._cache.gather(number, plan, start, stop, raw)
                    continue
                if isinstance(plan, StoredPlan):
                    stored = memory.stored[number]
                    assert stored is not None
                    self._stored_readers[number].execute(plan, start, stop, stored, scratch)
                    continue
                executor, transform = self._executors[number], self._apply[number]
                begin = start
                if self._transforms_at_once(plan, number):
                    assert isinstance(executor, NativeExecutor)
                    assert isinstance(transform, NativeTransform)
                    begin = executor.transform_rows(plan, start, stop, transform, out, scratch)
                if begin < stop:
                    executor.execute(plan, begin, stop, raw, scratch)
                    if self._transforms_at_once(plan, number):
                        self._transform(number, raw[begin:stop], out[begin:stop])
        finally:
            self._scratch.append(scratch)

    def _begin_keep(self, batch: _Fill) -> None:
        cache, index = self._cache, batch.index
        if cache is None or batch.error is not None or isinstance(batch.plans[0], GatherPlan):
            self._begin_transform(batch)
            return
        raws = self._slots[batch.request.slot].raw
        works = [
            partial(cache.keep, i, index[a:b], raws[i][a:b])
            for i, transform in enumerate(self._transforms)
            for a, b in self._row_shares(index.size, transform.raw_nbytes)
        ]
        self._begin(batch, works, self._note_kept)

    def _note_kept(self, batch: _Fill) -> None:
        try:
            if batch.error is None and self._cache is not None:
                self._cache.add(batch.index, batch.turn)
        except BaseException as error:
            self._note_error(batch, error)
        self._begin_transform(batch)

    def _begin_transform(self, batch: _Fill) -> None:
        if batch.error is not None or batch.is_resident:
            self._finish(batch)
            return
        memory = self._slots[batch.request.slot]
        works = [
            partial(self._transform, i, raw[a:b], out[a:b])
            for i, (raw, out) in enumerate(zip(memory.raw, memory.out, strict=True))
            if raw is not out and not self._transforms_at_once(batch.plans[i], i)
            for a, b in self._row_shares(batch.index.size, self._transforms[i].nbytes)
        ]
        self._begin(batch, works, self._finish)

    def _row_shares(self, size: int, row_nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut the rows of a batch into shares that are worth handing to a thread."""
        parts = max(1, min(self._threads, size, size * row_nbytes // _MIN_SHARE_NBYTES))
        return itertools.pairwise(size * part // parts for part in range(parts + 1))

    def _transforms_at_once(self, plan: ReadPlan | StoredPlan, field: int) -> TypeGuard[RowPlan]:
        """Tell whether rows are transformed as they are read: where the core copies them only."""
        return (
            isinstance(plan, RowPlan)
            and self._cache is None  # which wants them as they are
            and isinstance(self._executors[field], NativeExecutor)
            and isinstance(self._apply[field], NativeTransform)
            and self._slots[0].raw[field] is not self._slots[0].out[field]
        )

    def _transform(self, field: int, raw: NDArray[Any], out: NDArray[Any]) -> None:
        begin = time.perf_counter_ns()
        self._apply[field](raw, out)
        self._times.add("transform", begin)

    def _finish(self, batch: _Fill) -> None:
        arrays = tuple(out[: batch.index.size] for out in self._slots[batch.request.slot].out)
        if self._postprocess is not None and batch.error is None:
            begin = time.perf_counter_ns()
            try:
                arrays = self._postprocessed(arrays, batch.request)
            except BaseException as error:
                self._note_error(batch, error)
            self._times.add("postprocess", begin)
        try:
            self._deliver(batch, arrays)
        finally:
            batch.error = None  # whose frames have the batch

    def _deliver(self, batch: _Fill, arrays: tuple[NDArray[Any], ...]) -> None:
        if not self._closed:
            stored = tuple(p if isinstance(p, StoredPlan) else None for p in batch.plans)
            self._on_done(
                batch.request,
                FillOutcome(
                    batch.index,
                    arrays,
                    batch.error,
                    batch.is_resident,
                    stored,
                    batch.busy_ns / 1e9,
                    self._changes.take_warnings(),
                ),
            )

    def _note_error(self, batch: _Fill, error: BaseException) -> None:
        if interruption(error) is not None:
            raise error  # this is the thread of the caller, whom it concerns
        if is_lack_of_memory(error):
            error = self._out_of_memory(batch.request, error)
        batch.error = error

    def _out_of_memory(self, request: FillRequest, error: Exception) -> OutOfMemoryError:
        which = f"batch {request.number} of epoch {request.epoch}"
        return out_of_memory(f"{self._layouts[0].file}: {which} cannot be filled", error)

    def _postprocessed(
        self, arrays: tuple[NDArray[Any], ...], request: FillRequest
    ) -> tuple[NDArray[Any], ...]:
        assert self._postprocess is not None
        where = f"{self._layouts[0].file}: postprocess of batch {request.number} of epoch"
        where = f"{where} {request.epoch}"
        try:
            result = self._postprocess(*arrays)
        except Exception as error:
            raise postprocess_error(
                f"{where} raised {type(error).__name__}: {error}", error
            ) from error
        if result is None:
            return arrays
        if len(arrays) == 1 and not isinstance(result, tuple | list):
            result = (result,)
        if not isinstance(result, tuple | list) or len(result) != len(arrays):
            found = len(result) if isinstance(result, tuple | list) else type(result).__name__
            raise PostprocessError(
                f"{where} returned {found}; it must return {len(arrays)} arrays, or None when it"
                " worked in place"
            )
        try:
            made = tuple(np.asarray(array) for array in result)
        except Exception as error:  # rows of unequal lengths, say
            raise postprocess_error(f"{where} returned no arrays: {error}", error) from error
        if len({len(array) for array in made if array.ndim}) > 1:
            shapes = ", ".join(str(array.shape) for array in made)
            raise PostprocessError(
                f"{where} returned arrays of unequal numbers of rows, of shapes {shapes}; a row is"
                " a sample, so all arrays must have as many"
            )
        return made

    def _new_executors(self) -> list[Executor]:
        self._chunks[:] = [ChunkCache(nbytes) for nbytes in self._kept_nbytes]
        return [
            self._executor(layout, chunks)
            for layout, chunks in zip(self._layouts, self._chunks, strict=True)
        ]

    def _transformer(self, transform: RowTransform) -> Callable[[NDArray[Any], NDArray[Any]], None]:
        native = None if self._core is None else native_transform(self._core, transform)
        return transform.apply if native is None else native

    def _executor(self, layout: DatasetLayout, cache: ChunkCache) -> Executor:
        if layout.parts:
            return PartsExecutor(layout, lambda source: self._executor(source, cache))
        match way_of(self._core, layout):
            case "h5py":
                return FallbackExecutor(layout, self._fallback)
            case "memory":
                return MemoryExecutor(layout)
            case "core":
                assert self._core is not None
                return NativeExecutor(self._core, layout, self._files, cache)
        return PlanExecutor(layout, self._files, cache)

    def _open_ahead(self, layout: DatasetLayout) -> None:
        """Open the first files of a dataset, so that they are those that were indexed."""
        for source in itertools.islice(layout.leaves(), self._kept_files):
            if self._closed:
                return
            if source.fallback_reason is not None:
                self._fallback.open(source)
            elif source.values is None:
                with self._files.using(source.file, source.stamp):
                    pass

    def _close_files(self) -> None:
        self._files.close()
        self._fallback.close()

    def _open_cache(self, cache_bytes: int | None, free_nbytes: int) -> None:
        row_nbytes = [transform.raw_nbytes for transform in self._transforms]
        found = open_host_cache(self._layouts[0].num_samples, row_nbytes, cache_bytes, free_nbytes)
        if isinstance(found, Budget):
            self._cache_budget = found
        else:
            self._resident = self._cache = found

    def _new_scratch(self) -> Scratch:
        encoded, chunk, between = self._scratch_nbytes
        scratch = Scratch.allocate(encoded, chunk, between, self._stop)
        self._scratches.append(scratch)
        return scratch


def wanted_kept_nbytes(config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> list[int]:
    """Return, by field, what decoded chunks that later batches may need would better take."""
    several, wanted = list(layouts.values()), []
    for layout in several:
        encoded = [source for source in layout.leaves() if source.filters]
        nbytes = sum(math.prod(source.grid) * source.chunk_nbytes for source in encoded)
        if nbytes > _KEPT_WHOLE_NBYTES:
            is_window = config.shuffle == "window"
            nbytes = kept_nbytes(layout, several, config.window_bytes) if is_window else 0
        wanted.append(nbytes)
    return wanted


def _raised_by(work: Callable[[], None]) -> BaseException | None:
    """Do some work; return what it raised."""
    try:
        work()
    except BaseException as error:
        return error
    return None


def _nothing(*_: object) -> None:
    pass


def _forget(caches: Sequence[ChunkCache], residencies: Sequence[Residency]) -> None:
    for chunks in caches:
        chunks.clear()
    for resident in residencies:
        resident.forget()


def start_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread; `what` it is for is named where that fails.

    Raises
    ------
    ReadError
        If the system gives no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if "shutdown" in str(error):
            raise ReadError(
                f"{what}: the interpreter is ending, and starts no more threads; make the reader"
                " before, or read with num_threads=0"
            ) from error
        raise ReadError(
            f"{what}: the system gives this process no more threads ({error}); make num_threads"
            " smaller, or raise what limits them (ulimit -u, pids.max of the control group, memory)"
        ) from error


def join_all(threads: Sequence[threading.Thread], patience: Patience) -> None:
    """Wait for threads to end, as long as the patience lasts."""
    for thread in threads:  # one that was never started is not alive
        while thread.is_alive() and not patience.is_over:
            patience.wait(partial(_has_ended, thread))


def _has_ended(thread: threading.Thread, seconds: float | None) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def load_function(function: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    """Import a ``"module:function"``; return anything else as it is.

    Raises
    ------
    ConfigError
        If there is no such module or function.
    """
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"postprocess: cannot import {function!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"postprocess: {function!r} is not callable")
    return cast("Callable[..., Any]", found)
