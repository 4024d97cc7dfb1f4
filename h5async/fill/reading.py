"""Plans, reads and transforms the rows of a batch, all fields of it.

Sample numbers enter; plans leave. A share of the plans' work enters, in any thread; rows leave, in
the memory of a slot. This is all that the phases of a fill know of how a dataset is read.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int32
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, CoreTrace
from h5async.errors import taking_memory
from h5async.fill.resident import HostCache
from h5async.index.layout import DatasetLayout
from h5async.order.requests import FillRequest
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows
from h5async.order.steps import NO_ROW, StepRows
from h5async.plan.plan import plan_read
from h5async.plan.records import (
    BatchItems,
    GatherPlan,
    GatherRunsPlan,
    HeapPlan,
    IncludedPlan,
    ReadPlan,
)
from h5async.plan.shares import PlanSlice
from h5async.plan.transform import RowTransform
from h5async.read.collection import Collection, Ranges
from h5async.read.execute import Executor
from h5async.read.executors import Executors
from h5async.read.queue import BatchQueue, SlotBatch
from h5async.read.scratch import Scratch, ScratchSize
from h5async.read.transform import NativeTransform, native_transform
from h5async.read.unpack import native_unpack
from h5async.samples.columns import Rows, SlotMemory
from h5async.spelling import named
from h5async.system.counts import StageTimes, ThreadCounts
from h5async.system.timeline import NO_FIELD, Recorder

BatchPlan = Sequence[ReadPlan | Ranges]  # of one batch, by field; at the end, of several

_MIN_SHARE_NBYTES = 256 * 1024  # about 25 µs of copying: what it costs to wake a thread


class ColumnReader(Protocol):
    """Reads some columns of a batch for a device, in place of their rows."""

    def plan(
        self,
        collection: Collection,
        batch: SlotBatch,
        request: FillRequest,
        index: NDArray[np.int64],
    ) -> Mapping[int, Ranges]:
        """Return what is read of a batch, by column; of others, rows are read.

        Parameters
        ----------
        collection, batch
            Plan it, if need be.
        request, index
            Of the batch: its samples.
        """


class LeftRows(NamedTuple):
    """Rows of a batch that the core has left to the Python implementation.

    Attributes
    ----------
    field
        Number of the field.
    rows
        int64 (n,), ascending: rows of the field's memory.
    """

    field: int
    rows: NDArray[np.int64]


class BatchReader:
    """Reads batches, in many threads. To be closed after the last read.

    Parameters
    ----------
    core
        The compiled core; None: do without.
    layouts, transforms
        In field order.
    column_reader
        Says what is read in place of the rows of some fields; None: nothing is.
    cache
        Gathers rows that are in memory; None: there are none.
    executors
        Makes the executors of the fields; closed by whoever made it.
    num_threads
        Threads for whose scratch memory is taken.
    slots
        Memory of each slot.
    steps
        By field: which rows of its dataset each sample consists of; None: its own. Empty: that of
        all fields.
    rows
        Samples that a slot has room for; None: as many as its first array has rows.
    recorder
        Is told what is done; None: nobody is.

    Attributes
    ----------
    times
        Of the stage "transform", and whatever stages the caller adds.

    Raises
    ------
    OutOfMemoryError
        If the system refuses memory for the threads.
    """

    def __init__(
        self,
        core: Core | None,
        layouts: Sequence[DatasetLayout],
        transforms: Sequence[RowTransform],
        column_reader: ColumnReader | None,
        cache: HostCache | None,
        executors: Executors,
        num_threads: int,
        slots: Sequence[SlotMemory],
        steps: Sequence[Rows] = (),
        rows: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._core = core
        self.times = StageTimes()
        self._recorder = Recorder() if recorder is None else recorder
        self._trace: CoreTrace | None = None
        self._steps = steps or [None] * len(layouts)
        self._slots = slots
        self._layouts = layouts
        self._row_transforms = transforms
        self._transforms = [transformer(core, transform.of_one_row) for transform in transforms]
        self._cache = cache
        self._factory = executors
        self._num_threads = num_threads
        self._collection = executors.open_collection(self._at_once(slots[0]), steps)
        self._executors: list[Executor] = executors.make()
        self._batches: list[SlotBatch] = []
        if self._collection is not None:
            self._batches = [self._collection.new_batch(slot.raw, slot.out, rows) for slot in slots]
        self._column_reader = column_reader
        self._size = ScratchSize.of(layouts)
        self._stop = c_int32()  # not 0: what is under way ends as soon as it can
        self._scratches: list[Scratch] = []
        what = f"{layouts[0].file}: scratch of {num_threads} threads, for chunks to be decoded"
        with taking_memory(what, f"make {named('num_threads')} smaller, or store smaller chunks"):
            self._free = deque(self._new_scratch() for _ in range(num_threads))

    def open_queue(self, selection: Selection) -> BatchQueue | None:
        """Return a queue of batches that the core reads alone; None where it does not read all.

        Positions that are submitted are those of `selection`.
        """
        if self._collection is None or not all(self._collection.reads) or self._column_reader:
            return None
        return self._collection.open_queue(self._batches, self._num_threads, selection)

    @property
    def transforms_all(self) -> bool:
        """Whether the core makes all rows what is delivered, as it reads them."""
        return all(
            done or transform.is_identity
            for done, transform in zip(
                self._collection.transforms if self._collection else [],
                self._row_transforms,
                strict=True,
            )
        )

    def take(self, work: Callable[[Scratch], int]) -> int:
        """Lend a thread its scratch memory for a call of `BatchQueue`; return what that returns."""
        with self._scratch() as scratch:
            return work(scratch)

    def planned(self, slot: int) -> BatchPlan:
        """Return the plan that the core has made of a batch in a queue, all fields of it."""
        assert self._collection is not None
        count, nbytes = self._batches[slot].plan.num_items, self._batches[slot].plan.nbytes
        included = [IncludedPlan()] * len(self._layouts)
        return [*included, BatchItems(slot, count, nbytes // max(1, count))]

    def plan(self, index: NDArray[np.int64], request: FillRequest) -> BatchPlan:
        """Plan how the samples of a batch are read.

        Parameters
        ----------
        index
            int64 (n,): sample numbers.
        request
            Says where they go.

        Returns
        -------
        sequence
            One plan for each field and, where the core reads several fields at once, one more.
        """
        plans: list[ReadPlan | Ranges] = []
        others: Mapping[int, Ranges] = {}
        slot = request.slot
        if self._collection is not None and self._column_reader is not None:
            batch = self._batches[slot]
            others = self._column_reader.plan(self._collection, batch, request, index)
        for field in range(len(self._layouts)):
            if field in others:
                plans.append(others[field])
            elif self._collection is not None and self._collection.reads[field]:
                plans.append(IncludedPlan())
            else:
                plans.append(self._plan_rows(field, index, self._slots[slot].raw[field]))
        wanted = [isinstance(plan, IncludedPlan) for plan in plans]
        if self._collection is not None and any(wanted):
            count, nbytes = self._collection.plan(
                self._batches[slot], index, wanted, self._num_threads
            )
            plans.append(BatchItems(slot, count, nbytes // max(1, count)))
        return plans

    def _plan_rows(self, field: int, index: NDArray[np.int64], raw: NDArray[Any]) -> ReadPlan:
        """Plan a field alone; rows in whose place there are zeros are set here."""
        steps, layout = self._steps[field], self._layouts[field]
        if steps is None:
            return plan_read(layout, index)
        if layout.heaps and isinstance(steps, SpanRows):
            return HeapPlan(steps.runs(index), steps.offsets(index), layout.row_nbytes)
        rows = steps.rows(index)
        is_there = rows != NO_ROW
        if is_there.all():
            return plan_read(layout, rows)
        self._rows(field, raw)[: rows.size][~is_there] = np.zeros((), raw.dtype)
        places = np.flatnonzero(is_there)
        return plan_read(layout, rows[places], places)

    def _rows(self, field: int, batch: NDArray[Any]) -> NDArray[Any]:
        """Return an array of samples as one of rows of the dataset."""
        return self._row_transforms[field].rows(batch)

    def left(self, plans: BatchPlan, index: NDArray[np.int64]) -> list[LeftRows]:
        """Return what the core has left of a batch after the last share, for other threads too."""
        if self._collection is None or not plans or not isinstance(plans[-1], BatchItems):
            return []
        found = []
        for field, rows in self._collection.left(self._batches[plans[-1].slot]):
            nbytes = rows.size * self._layouts[field].row_nbytes
            parts = max(1, min(self._num_threads, rows.size, nbytes // _MIN_SHARE_NBYTES))
            found += [LeftRows(field, some) for some in np.array_split(rows, parts)]
        return found

    def read_left(self, left: LeftRows, index: NDArray[np.int64], memory: SlotMemory) -> None:
        """Read rows that the core has left.

        Raises
        ------
        H5AsyncError
            If bytes cannot be read or decoded.
        """
        field, rows = left
        steps, layout = self._steps[field], self._layouts[field]
        if layout.heaps and isinstance(steps, SpanRows):
            offsets = steps.offsets(index)[np.append(rows, rows[-1] + 1)]
            plan: ReadPlan = HeapPlan(index[rows], offsets, layout.row_nbytes)
            wanted = index
        else:
            wanted = index if steps is None else steps.rows(index)
            plan = plan_read(layout, wanted[rows], rows)
        raw = self._rows(field, memory.raw[field])
        with self._scratch() as scratch:
            self._work_on(field, scratch)
            self._executors[field].execute(plan, 0, plan.num_items, raw, scratch)
        if self._collection is not None and self._collection.transforms[field]:
            out = self._rows(field, memory.out[field])
            for some in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                run = slice(some[0], some[-1] + 1)
                self._transform_rows(field, raw[run], out[run], wanted[run])

    def read_rows(self, index: NDArray[np.int64], memory: SlotMemory) -> None:
        """Read and transform samples in the calling thread, to memory of as many rows.

        Raises
        ------
        H5AsyncError
            If bytes cannot be read or decoded.
        """
        for field in range(len(self._layouts)):
            raw, out = memory.raw[field], memory.out[field]
            plan = self._plan_rows(field, index, raw)
            if plan.num_items:  # else nothing is read: all steps are zeros
                with self._scratch() as scratch:
                    self._work_on(field, scratch)
                    rows = self._rows(field, raw)
                    self._executors[field].execute(plan, 0, plan.num_items, rows, scratch)
            if raw is not out:
                self.transform(field, raw, out, index)

    def read(self, plans: BatchPlan, share: Sequence[PlanSlice], memory: SlotMemory) -> None:
        """Do a share of a batch's reading; rows are transformed, too, where that costs no copy.

        Raises
        ------
        H5AsyncError
            If bytes cannot be read or decoded.
        """
        with self._scratch() as scratch:
            for field, start, stop in share:
                self._read_items(plans[field], field, start, stop, memory, scratch)

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        try:
            scratch = self._free.pop()
        except IndexError:  # more callers of `run_next` than threads were announced
            scratch = self._new_scratch()
        scratch.timeline = self._recorder.timeline
        try:
            yield scratch
        finally:
            self._free.append(scratch)

    def _read_items(
        self,
        plan: ReadPlan | Ranges,
        field: int,
        start: int,
        stop: int,
        memory: SlotMemory,
        scratch: Scratch,
    ) -> None:
        if isinstance(plan, BatchItems):
            assert self._collection is not None
            self._work_on(NO_FIELD, scratch)
            self._collection.read(self._batches[plan.slot], start, stop, scratch)
        elif isinstance(plan, GatherPlan | GatherRunsPlan):
            assert self._cache is not None
            self._work_on(field, scratch, "memory")
            with scratch.timed("read_ns"):
                self._cache.gather(field, plan, start, stop, memory.raw[field])
        elif isinstance(plan, Ranges):
            assert self._collection is not None
            self._work_on(field, scratch)
            self._collection.read_ranges(plan, start, stop, scratch)
        else:
            raw = self._rows(field, memory.raw[field])
            self._work_on(field, scratch)
            self._executors[field].execute(plan, start, stop, raw, scratch)

    def _work_on(self, field: int, scratch: Scratch, source: str | None = None) -> None:
        """Say, where it is recorded, of which field this thread reads, and out of what."""
        timeline = scratch.timeline
        if timeline is None:
            return
        if source is None and field != NO_FIELD:
            layout = self._layouts[field]
            source = None if layout.parts or layout.heaps else str(layout.file)
        timeline.work_on_field(field, -1 if source is None else source)
        if self._core is not None:
            scratch.worker(self._core).struct.batch = timeline.batch_here()

    def transforms_at_once(self, field: int, plans: BatchPlan) -> bool:
        """Tell whether rows of a field were transformed as they were read, by the core."""
        return (
            self._collection is not None
            and self._collection.transforms[field]
            and isinstance(plans[field], IncludedPlan)
        )

    def _at_once(self, memory: SlotMemory) -> list[NativeTransform | None]:
        """Return, by field, what the core is to make of rows as it reads them."""
        return [
            transform
            if isinstance(transform, NativeTransform)
            and self._cache is None  # which wants them as they are
            and raw is not out
            else None
            for transform, raw, out in zip(self._transforms, memory.raw, memory.out, strict=True)
        ]

    def transform(
        self, field: int, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64]
    ) -> None:
        """Transform rows of a field, those of samples `index`, as read, to `out`."""
        steps = self._steps[field]
        # (Which rows they are says which attributes hold of them.)
        if isinstance(steps, StepRows) and self._row_transforms[field].cf is not None:
            rows = steps.rows(index)  # zeros count as packed like the sample's own row
            index = np.where(rows == NO_ROW, np.repeat(index, steps.size), rows)
        self._transform_rows(field, self._rows(field, raw), self._rows(field, out), index)

    def _transform_rows(
        self, field: int, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64]
    ) -> None:
        begin = time.perf_counter_ns()
        with self._recorder.ranges("transform"):
            self._transforms[field](raw, out, index)
        self.times.add("transform", begin)
        timeline = self._recorder.timeline
        if timeline is not None:
            timeline.put("transform", begin, timeline.batch_here(), field)

    def record(self, trace: CoreTrace | None) -> None:
        """Have the core note what it does from now on, in all threads; None: no more."""
        self._trace = trace
        for scratch in list(self._scratches):
            scratch.record(trace)

    @property
    def source_path(self) -> Callable[[int], int | str]:
        """What returns the path of a source of the core, also after this is closed."""
        return _no_path if self._collection is None else self._collection.source_path

    def transform_seconds(self) -> float:
        """Return how long the core transformed rows as it read them, in all threads."""
        return sum(scratch.transform_ns() for scratch in list(self._scratches)) / 1e9

    def counts(self) -> ThreadCounts:
        """Return what all threads have done so far."""
        totals = (scratch.total() for scratch in list(self._scratches))
        return functools.reduce(ThreadCounts.plus, totals, ThreadCounts())

    def restart(self) -> None:
        """Begin anew after an exception, when no thread is reading.

        What was interrupted may have left a chunk that is claimed, and never comes.
        """
        self._executors = self._factory.make()

    def interrupt(self) -> None:
        """Have what is under way end as soon as it can, with a `ReaderClosedError`."""
        self._stop.value = 1

    def close(self) -> None:
        """Let go of all memory. No thread is reading. Idempotent."""
        self._scratches.clear()
        self._free.clear()
        self._executors, self._column_reader, self._cache = [], None, None
        self._collection, self._batches, self._slots = None, [], ()

    def _new_scratch(self) -> Scratch:
        scratch = Scratch.allocate(*self._size, self._stop)
        scratch.record(self._trace)
        self._scratches.append(scratch)
        return scratch


def _no_path(source: int) -> int | str:
    return source


def transformer(
    core: Core | None, transform: RowTransform
) -> Callable[[NDArray[Any], NDArray[Any], NDArray[np.int64]], None]:
    """Return what transforms rows: the compiled core, or NumPy where that cannot."""
    if core is None:
        return transform.apply
    return native_transform(core, transform) or native_unpack(core, transform) or transform.apply
