"""Plans, reads and transforms the rows of a batch, all fields of it.

Sample numbers enter; plans leave. A share of the plans' work enters, in any thread; rows leave, in
the memory of a slot. The phases of a fill know nothing else of how a dataset is read.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_int32
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, CoreTrace
from h5async.errors import taking_memory
from h5async.fill.resident import HostCache
from h5async.index.layout import DatasetLayout
from h5async.order.requests import FillRequest
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows, StepSpans
from h5async.order.steps import NO_ROW, StepRows
from h5async.plan.records import (
    BatchItems,
    GatherPlan,
    GatherRunsPlan,
    IncludedPlan,
    ReadPlan,
    SamplesPlan,
)
from h5async.plan.shares import PlanSlice
from h5async.plan.transform import RowTransform
from h5async.read.collection import Collection, Ranges
from h5async.read.executors import Executors
from h5async.read.h5pyrows import H5pyRows
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
        """Return the ranges to read of a batch, by column; of other columns, rows are read.

        `collection` and `batch` plan the rows if necessary; `index` are the samples of the request.
        """


class LeftRows(NamedTuple):
    """Rows of a batch that the core has left to h5py.

    `rows` are int64 (n,), ascending: rows of the memory of field number `field`.
    """

    field: int
    rows: NDArray[np.int64]


class Refused(NamedTuple):
    """Items of a plan that the core has refused: they are read again, or raise an error."""

    batch: SlotBatch


class _Batches(NamedTuple):
    """The core's plans of a slot.

    `batch` is for all fields whose rows the core finds. `of_rows` has, by number, those of fields
    whose rows it is told.
    """

    batch: SlotBatch
    of_rows: dict[int, SlotBatch]


class BatchReader:
    """Reads batches, in many threads. To be closed after the last read.

    `OutOfMemoryError` is raised if the system refuses memory for the threads.

    Parameters
    ----------
    core
        The compiled core, if there is one.
    layouts, transforms
        In field order.
    column_reader
        Says what is read in place of the rows of some fields; None: nothing is.
    cache
        Gathers rows that are in memory, if there is one.
    executors
        Makes the executors of the fields; closed by its owner.
    num_threads
        Threads for which scratch memory is allocated.
    slots
        Memory of each slot.
    steps
        By field: the rows of its dataset that make up each sample; None: one row. Empty: None for
        all.
    rows
        Samples that fit into a slot; None means the rows of its first array.
    recorder
        Records what is done, if given.

    Attributes
    ----------
    times
        Of the stage "transform", and stages that the caller adds.
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
        self._h5py_rows: list[H5pyRows] = executors.h5py_rows()
        self._batches: list[_Batches] = []
        if self._collection is not None:
            new = self._collection.new_batch
            self._batches = [
                _Batches(
                    new(slot.raw, slot.out, rows),
                    {
                        field: new(slot.raw, slot.out, len(slot.raw[field]))
                        for field in self._told_fields(self._collection)
                    },
                )
                for slot in slots
            ]
        self._column_reader = column_reader
        self._size = ScratchSize.of(layouts)
        self._stop = c_int32()  # not 0: what is under way ends as soon as it can
        self._scratches: list[Scratch] = []
        what = f"{layouts[0].file}: scratch of {num_threads} threads, for chunks to be decoded"
        with taking_memory(what, f"make {named('num_threads')} smaller, or store smaller chunks"):
            self._free = deque(self._new_scratch() for _ in range(num_threads))

    def open_queue(self, selection: Selection) -> BatchQueue | None:
        """Return a queue of batches that the core reads alone; None if it does not read all.

        Positions that are submitted are those of `selection`.
        """
        if (
            self._collection is None
            or not all(self._collection.tables.reads)
            or self._column_reader
        ):
            return None
        batches = [batches.batch for batches in self._batches]
        return self._collection.open_queue(batches, self._num_threads, selection)

    @property
    def transforms_all(self) -> bool:
        """Whether the core transforms all rows as it reads them, so that they can be delivered."""
        return all(
            done or transform.is_identity
            for done, transform in zip(
                self._collection.tables.transforms if self._collection else [],
                self._row_transforms,
                strict=True,
            )
        )

    def take(self, work: Callable[[Scratch], int]) -> int:
        """Lend a thread its scratch memory for a call of `BatchQueue`; return the call's result."""
        with self._scratch() as scratch:
            return work(scratch)

    def planned(self, slot: int) -> BatchPlan:
        """Return the plan that the core has made of a batch in a queue, all fields of it."""
        assert self._collection is not None
        batch, included = self._batches[slot].batch, [IncludedPlan()] * len(self._layouts)
        return [*included, _batch_items(batch, batch.plan.num_items, batch.plan.nbytes)]

    def plan(self, index: NDArray[np.int64], request: FillRequest) -> BatchPlan:
        """Plan how the samples `index` of a batch are read, to the slot of the request.

        Returns one plan per field and, if the core reads several fields at once, one more.
        """
        batches = self._batches[request.slot] if self._batches else None
        others: Mapping[int, Ranges] = {}
        if self._collection is not None and batches is not None and self._column_reader is not None:
            others = self._column_reader.plan(self._collection, batches.batch, request, index)
        return self._plan(index, self._slots[request.slot], batches, others)

    def _plan(
        self,
        index: NDArray[np.int64],
        memory: SlotMemory,
        batches: _Batches | None,
        others: Mapping[int, Ranges],
    ) -> BatchPlan:
        """Plan each field for the core or for h5py, except those that `others` has planned."""
        plans: list[ReadPlan | Ranges] = []
        collection, wanted = self._collection, [False] * len(self._layouts)
        more: list[BatchItems] = []
        for field in range(len(self._layouts)):
            if field in others:
                plans.append(others[field])
            elif collection is None or not collection.tables.can_read[field]:
                plans.append(self._plan_rows(field, index, memory.raw[field]))
            else:
                plans.append(IncludedPlan())
                wanted[field] = collection.tables.reads[field]
                if not wanted[field]:
                    assert batches is not None
                    more.append(self._plan_told(field, index, batches.of_rows[field]))
        if any(wanted):
            assert collection is not None
            assert batches is not None
            batch = batches.batch
            more.append(
                _batch_items(batch, *collection.plan(batch, index, wanted, self._num_threads))
            )
        return [*plans, *more]

    @staticmethod
    def _told_fields(collection: Collection) -> list[int]:
        return [
            field
            for field, can in enumerate(collection.tables.can_read)
            if can and collection.tables.shares[field]
        ]

    def _plan_told(self, field: int, index: NDArray[np.int64], batch: SlotBatch) -> BatchItems:
        """Have the core plan a field whose rows, or elements, it is told."""
        steps, layout, collection = self._steps[field], self._layouts[field], self._collection
        assert collection is not None
        assert isinstance(steps, SpanRows)
        wanted = [number == field for number in range(len(self._layouts))]
        rows = steps.runs(index) if layout.heaps else steps.rows(index)
        count = layout.sample_count if layout.heaps else layout.num_samples
        found = collection.plan(batch, rows, wanted, self._num_threads, count)
        return _batch_items(batch, *found)

    def _plan_rows(self, field: int, index: NDArray[np.int64], raw: NDArray[Any]) -> SamplesPlan:
        """Plan a field for h5py; rows that do not exist are set to zeros here."""
        steps, layout = self._steps[field], self._layouts[field]
        if layout.heaps and isinstance(steps, SpanRows):
            runs = steps.runs(index)
            offsets = (steps.spans if isinstance(steps, StepSpans) else steps).offsets(runs)
            return SamplesPlan(runs, offsets[:-1], int(offsets[-1]) * layout.row_nbytes)
        rows = index if steps is None else steps.rows(index)
        places = np.arange(rows.size)
        is_there = rows != NO_ROW
        if not is_there.all():
            self._rows(field, raw)[: rows.size][~is_there] = np.zeros((), raw.dtype)
            rows, places = rows[is_there], places[is_there]
        return SamplesPlan(rows, places, rows.size * layout.row_nbytes)

    def _rows(self, field: int, batch: NDArray[Any]) -> NDArray[Any]:
        """Return an array of samples as one of rows of the dataset."""
        return self._row_transforms[field].rows(batch)

    def left(self, plans: BatchPlan) -> list[LeftRows | Refused]:
        """Return what the core has left of a batch after the last share, for several threads."""
        found: list[LeftRows | Refused] = []
        for plan in plans:
            if self._collection is None or not isinstance(plan, BatchItems):
                continue
            if self._collection.has_refused(plan.batch):
                found.append(Refused(plan.batch))
            for field, rows in self._collection.left(plan.batch):
                nbytes = rows.size * self._layouts[field].row_nbytes
                parts = max(1, min(self._num_threads, rows.size, nbytes // _MIN_SHARE_NBYTES))
                found += [LeftRows(field, some) for some in np.array_split(rows, parts)]
        return found

    def read_left(
        self, left: LeftRows | Refused, index: NDArray[np.int64], memory: SlotMemory
    ) -> None:
        """Read what the core has left; `H5AsyncError` if bytes cannot be read or decoded."""
        if isinstance(left, Refused):
            with self._scratch() as scratch:
                self._work_on(NO_FIELD, scratch)
                self._factory.read_again(left.batch, scratch)
            return
        field, rows = left
        steps, layout = self._steps[field], self._layouts[field]
        wanted = index if steps is None else steps.rows(index)
        plan = SamplesPlan(wanted[rows], rows, rows.size * layout.row_nbytes)
        self._read_through_h5py(field, plan, memory)
        if self._collection is not None and self._collection.tables.transforms[field]:
            raw, out = self._rows(field, memory.raw[field]), self._rows(field, memory.out[field])
            for some in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                run = slice(some[0], some[-1] + 1)
                self._transform_rows(field, raw[run], out[run], wanted[run])

    def _read_through_h5py(self, field: int, plan: SamplesPlan, memory: SlotMemory) -> None:
        with self._scratch() as scratch:
            self._work_on(field, scratch)
            self._h5py_rows[field].execute(plan, self._rows(field, memory.raw[field]), scratch)

    def read_rows(self, index: NDArray[np.int64], memory: SlotMemory) -> None:
        """Read and transform samples in the calling thread, to memory of the same number of rows.

        `H5AsyncError` is raised if bytes cannot be read or decoded.
        """
        with ExitStack() as lent:
            batches = None
            if self._collection is not None:
                take = partial(self._collection.lent_batch, memory.raw, memory.out)
                batches = _Batches(
                    lent.enter_context(take(index.size)),
                    {
                        field: lent.enter_context(take(len(memory.raw[field])))
                        for field in self._told_fields(self._collection)
                    },
                )
            plans = self._plan(index, memory, batches, {})
            share = [PlanSlice(i, 0, plan.num_items) for i, plan in enumerate(plans)]
            self.read(plans, [part for part in share if part.stop], memory)
            for left in self.left(plans):
                self.read_left(left, index, memory)
        for field, (raw, out) in enumerate(zip(memory.raw, memory.out, strict=True)):
            if raw is not out and not self.transforms_at_once(field, plans):
                self.transform(field, raw, out, index)

    def read(self, plans: BatchPlan, share: Sequence[PlanSlice], memory: SlotMemory) -> None:
        """Do a share of a batch's reading; rows are also transformed if that costs no copy.

        `H5AsyncError` is raised if bytes cannot be read or decoded.
        """
        with self._scratch() as scratch:
            for field, start, stop in share:
                self._read_items(plans[field], field, start, stop, memory, scratch)

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        try:
            scratch = self._free.pop()
        except IndexError:  # more callers of `run_next` than `num_threads`
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
            self._collection.read(plan.batch, start, stop, scratch)
        elif isinstance(plan, GatherPlan | GatherRunsPlan):
            assert self._cache is not None
            self._work_on(field, scratch, "memory")
            with scratch.timed("read_ns"):
                self._cache.gather(field, plan, start, stop, memory.raw[field])
        elif isinstance(plan, Ranges):
            assert self._collection is not None
            self._work_on(field, scratch)
            self._collection.read_ranges(plan, start, stop, scratch)
        elif isinstance(plan, SamplesPlan):
            raw = self._rows(field, memory.raw[field])
            self._work_on(field, scratch)
            self._h5py_rows[field].execute(plan, raw, scratch)

    def _work_on(self, field: int, scratch: Scratch, source: str | None = None) -> None:
        """Record which field this thread reads, and from which source."""
        timeline = scratch.timeline
        if timeline is None:
            return
        if source is None and field != NO_FIELD:
            layout = self._layouts[field]
            source = None if layout.datasets or layout.heaps else str(layout.file)
        timeline.work_on_field(field, -1 if source is None else source)
        if self._core is not None:
            scratch.worker(self._core).struct.batch = timeline.batch_here()

    def transforms_at_once(self, field: int, plans: BatchPlan) -> bool:
        """Tell whether the core transformed the rows of a field as it read them."""
        return (
            self._collection is not None
            and self._collection.tables.transforms[field]
            and isinstance(plans[field], IncludedPlan)
        )

    def _at_once(self, memory: SlotMemory) -> list[NativeTransform | None]:
        """Return, by field, the transform that the core does as it reads rows."""
        return [
            transform
            if isinstance(transform, NativeTransform)
            and self._cache is None  # which keeps them as read
            and raw is not out
            else None
            for transform, raw, out in zip(self._transforms, memory.raw, memory.out, strict=True)
        ]

    def transform(
        self, field: int, raw: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64]
    ) -> None:
        """Transform rows of a field, of the samples `index`, from `raw` to `out`."""
        steps = self._steps[field]
        # Which attributes apply depends on the rows.
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
        """Have the core note what it does from now on, in all threads; None: stop."""
        self._trace = trace
        for scratch in list(self._scratches):
            scratch.record(trace)

    @property
    def source_path(self) -> Callable[[int], int | str]:
        """A function that returns the path of a source of the core, also after this is closed."""
        return _no_path if self._collection is None else self._collection.tables.source_path

    def transform_seconds(self) -> float:
        """Return the time that the core transformed rows as it read them, in all threads."""
        return sum(scratch.transform_ns() for scratch in list(self._scratches)) / 1e9

    def counts(self) -> ThreadCounts:
        """Return what all threads have done so far."""
        totals = (scratch.total() for scratch in list(self._scratches))
        return functools.reduce(ThreadCounts.plus, totals, ThreadCounts())

    def interrupt(self) -> None:
        """Have work under way end as soon as it can, with a `ReaderClosedError`."""
        self._stop.value = 1

    def close(self) -> None:
        """Release all memory. No thread is reading. Idempotent."""
        self._scratches.clear()
        self._free.clear()
        self._h5py_rows, self._column_reader, self._cache = [], None, None
        self._collection, self._batches, self._slots = None, [], ()

    def _new_scratch(self) -> Scratch:
        scratch = Scratch.allocate(*self._size, self._stop)
        scratch.record(self._trace)
        self._scratches.append(scratch)
        return scratch


def _batch_items(batch: SlotBatch, count: int, nbytes: int) -> BatchItems:
    return BatchItems(batch, count, nbytes // max(1, count))


def _no_path(source: int) -> int | str:
    return source


def transformer(
    core: Core | None, transform: RowTransform
) -> Callable[[NDArray[Any], NDArray[Any], NDArray[np.int64]], None]:
    """Return what transforms rows: the compiled core, or NumPy if the core cannot."""
    if core is None:
        return transform.apply
    return native_transform(core, transform) or native_unpack(core, transform) or transform.apply
