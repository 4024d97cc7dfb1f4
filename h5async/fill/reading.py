"""Plans, reads and transforms the rows of a batch, for all its fields.

Sample numbers enter; plans leave. A share of a plan's work enters, in any thread; rows leave, in
the memory of a slot. This is all that the phases of a fill know about reading a dataset.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as Names
from contextlib import contextmanager
from ctypes import byref, c_int32, c_void_p
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import CoreTrace, counts_of
from h5async.errors import DamagedError, is_lack_of_memory, out_of_memory, taking_memory
from h5async.fill.outcomes import PlanColumns, Slots
from h5async.fill.resident import Damage, HostCache, Residency
from h5async.opening.dataset import Samplings
from h5async.order.rows import NO_ROW, SpanRows, StepRows, StepSpans
from h5async.order.sampling import NO_EPOCH, FillRequest
from h5async.plan.crops import Uint64s, draws_of, epoch_keys
from h5async.plan.records import (
    NO_RANGES,
    BatchItems,
    ByteRanges,
    IncludedPlan,
    Int64s,
    PlanSlice,
    Ranges,
    ReadPlan,
    SamplesPlan,
    union,
)
from h5async.plan.transform import NativeTransform, RowTransform, native_transform, transformer
from h5async.read.collection import Collection
from h5async.read.coretables import CoreTables, Scratch, ScratchSize
from h5async.read.executors import Executors
from h5async.read.farsources import FarSources, Held
from h5async.read.h5pyrows import H5pyRows
from h5async.read.queue import BatchQueue, KeptSamples, Reading, SlotBatch, Turns
from h5async.read.rereading import Place
from h5async.samples.assembly import SlotMemory
from h5async.spelling import named
from h5async.system.timeline import NO_BATCH, NO_FIELD, Recorder, StageTimes, ThreadCounts

T = TypeVar("T")
BatchPlan = Sequence[ReadPlan]  # one per field of a batch, then any that cover several fields

_MIN_SHARE_NBYTES = 256 * 1024  # takes about 25 µs to copy, as long as waking a thread


class LeftRows(NamedTuple):
    """Rows in a field's memory that the core leaves to h5py: int64 (n,), ascending."""

    field: int
    rows: Int64s


class _Batches(NamedTuple):
    """Plans for a slot: `batch` for all fields whose rows the core finds, `of_rows` for others."""

    collection: Collection
    batch: SlotBatch
    of_rows: dict[int, SlotBatch]


class BatchReader:
    """Reads batches, in many threads. Close it after the last read.

    `transforms` are in field order. Scratch memory is allocated for `num_threads`. `plan_columns`:
    see `OnDevice`. `cache` holds rows in memory. The owner of `executors` closes them. `times`
    are the times of stages; `file`, the first one, is for messages; `damage` has the samples to
    skip. Raises `OutOfMemoryError` if the system refuses memory for the threads.
    """

    def __init__(
        self,
        executors: Executors,
        transforms: Sequence[RowTransform],
        samplings: Samplings,
        slots: Slots,
        num_threads: int,
        recorder: Recorder,
        plan_columns: PlanColumns | None,
        cache: HostCache | None,
    ) -> None:
        self.core, self._layouts = executors.core, executors.layouts
        self.file = str(self._layouts[0].file)
        self.times = StageTimes()
        self.row_transforms = transforms
        self.take_warnings = executors.changes.take_warnings
        self.recorder, self.samplings, self.slots = recorder, samplings, slots
        self._trace: CoreTrace | None = None
        self._steps = samplings.rows
        self._transforms = [transformer(self.core, one.of_one_row) for one in transforms]
        self._cache, self._plan_columns = cache, plan_columns
        first = self._layouts[0]
        counts = [count for _, count in first.file_samples] or [first.sample_count]
        self.first_samples = np.cumsum([0, *counts], dtype=np.int64)  # of each file, and the end
        self._factory, self.damage = executors, Damage(samplings.rows, self.first_samples)
        crops = ((field, layout) for field, layout in enumerate(self._layouts) if layout.crop)
        self._draws = {field: draws_of(y.crop, y.row_shape) for field, y in crops if y.crop}
        self._drawn: tuple[int | None, Uint64s | None] = None, None  # by epoch
        self._num_threads = num_threads
        self._collection = executors.open_collection(self._at_once(slots.memory[0]), self._steps)
        # Has the core read the rows of the cache.
        self._kept = None if cache is None else self._open_kept(cache, slots.memory[0])
        if self.far is not None:  # encoded chunks for a device are read from local files only
            self._plan_columns = None
        self._h5py_rows: list[H5pyRows] = executors.h5py_rows()
        self._batches: list[_Batches] = []
        if self._collection is not None:
            tables = self._collection.tables
            pairs = enumerate(zip(tables.can_read, tables.shares, strict=True))
            self._told = [field for field, is_told in pairs if all(is_told)]
            new = self._collection.new_batch
            self._batches = [self._batches_of(new, slot, slots.rows) for slot in slots.memory]
        # Whether `read_rows` can do all its work in one call of the core.
        self._reads_at_once = (
            self._reads_alone
            and self.far is None
            and self._transforms_all(
                self._collection, [transform.is_identity for transform in self.row_transforms]
            )
        )
        self._spare: list[Reading] = []
        self._ahead: _Batches | None = None  # plans for batches that are fetched ahead
        self._has_heaps = any(layout.heaps for layout in self._layouts)
        self._size = ScratchSize.of(self._layouts)
        self._stop = c_int32()  # not 0: work under way ends as soon as it can
        self._scratches: list[Scratch] = []
        self._workers = c_void_p()  # the core's list of the workers of all scratches
        what = f"{self.file}: scratch of {num_threads} threads, for chunks to be decoded"
        with taking_memory(what, f"make {named('num_threads')} smaller, or store smaller chunks"):
            self._free = deque(self._new_scratch() for _ in range(num_threads))

    def _batches_of(self, new: Callable[..., SlotBatch], memory: SlotMemory, rows: int) -> _Batches:
        assert self._collection is not None
        raw, out, _ = memory
        told = {field: new(raw, out, len(raw[field])) for field in self._told}
        return _Batches(self._collection, new(raw, out, rows), told)

    def open_queue(
        self, uploads: Any = None, resident: Residency | None = None
    ) -> BatchQueue | None:
        """Return a queue for batches that the core reads and uploads alone; None if it cannot.

        With a cache on a GPU (`resident`), the core uploads only batches of samples kept there.
        """
        core, collection, kept = self.core, self._collection, None
        if core is None or collection is None or self._plan_columns:
            return None
        if self._kept is not None and self._cache is not None:
            cache, of = self._cache, self._kept.tables
            own = cache.ascending, cache.stamps, cache.state
            kept = KeptSamples(of, *own, self.fills_alone)
        elif uploads is not None and resident is not None:
            own = resident.ascending, resident.stamps, resident.state
            kept = KeptSamples(None, *own, False)
        elif not self.fills_alone:
            return None
        batches, draws = [one.batch for one in self._batches], self.samplings.draws
        orders = self.samplings.selection, None if draws is None else draws.table
        threads = self._num_threads, self._workers
        return BatchQueue(core, collection.tables, batches, *threads, *orders, kept, uploads)

    def _open_kept(self, cache: HostCache, memory: SlotMemory) -> Collection | None:
        if self.core is None:
            return None
        several = [native_transform(self.core, transform) for transform in self.row_transforms]
        pairs = zip(cache.columns, self._layouts, strict=True)
        tables = CoreTables(
            self.core,
            [column.layout(layout) for column, layout in pairs],
            io="auto",
            most_files=1,
            kept_nbytes=[0] * len(self._layouts),
            transforms=[
                None if raw is out else transform
                for transform, raw, out in zip(several, memory.raw, memory.out, strict=True)
            ],
            steps=[column.rows for column in cache.columns],
        )
        return Collection(self.core, tables)

    @property
    def far(self) -> FarSources | None:
        """Gets the bytes of sources that are not local files; None if there are none."""
        return None if self._collection is None else self._collection.tables.far

    @property
    def _reads_alone(self) -> bool:
        return self._collection is not None and all(self._collection.tables.reads)

    @property
    def fills_alone(self) -> bool:
        """Whether the core reads all rows from files without Python, barring errors."""
        return self._reads_alone and (self.far is None or self.far.kept is not None)

    @property
    def transforms_all(self) -> bool:
        """Whether the core does all transforms while reading, so that rows can be delivered.

        With a cache in host memory: as it adds rows to it, or reads them from it. Transforms that
        a device does are left out.
        """
        memory = self.slots.memory[0]
        are_left = [raw is out for raw, out in zip(memory.raw, memory.out, strict=True)]
        collection = self._collection if self._kept is None else self._kept
        return self._transforms_all(collection, are_left)

    def _transforms_all(self, collection: Collection | None, are_left: Sequence[bool]) -> bool:
        done = collection.tables.transforms if collection else []
        return all(is_done or is_left for is_done, is_left in zip(done, are_left, strict=True))

    def take(self, work: Callable[[Scratch], int]) -> int:
        """Call a method of `BatchQueue` with scratch memory for this thread; return its result."""
        with self._scratch() as scratch:
            return work(scratch)

    def scratch_of_consumer(self, is_alone: bool) -> Scratch:
        """Return scratch memory for the consumer's calls; the only one there is if `is_alone`."""
        return self._free[-1] if is_alone else self._new_scratch()

    def planned(self, slot: int, *, are_kept: bool) -> BatchPlan:
        """Return the plan that the core has made for all fields of a batch."""
        collection = self._kept if are_kept else self._collection
        assert collection is not None
        included = map(IncludedPlan, collection.tables.transforms)
        return [*included, _batch_items(collection, self._batches[slot].batch)]

    def plan_kept(self, index: Int64s, slot: int) -> BatchPlan:
        """Plan the reading of samples that are all in the cache."""
        cache, kept = self._cache, self._kept
        assert cache is not None
        positions = cache.ascending.positions(index)
        if kept is None:
            return [column.plan(positions) for column in cache.columns]
        every = [True] * len(self._layouts)
        kept.plan(self._batches[slot].batch, positions, every, self._num_threads)
        return self.planned(slot, are_kept=True)

    def plan(self, index: Int64s, request: FillRequest) -> BatchPlan:
        """Plan the reading of the samples `index` of a batch to the slot of the request."""
        batches = self._batches[request.slot] if self._batches else None
        others: Mapping[int, Ranges] = {}
        if batches is not None and self._plan_columns is not None:
            others = self._plan_columns(batches.collection, batches.batch, request, index)
        draw = self.draw(request.epoch)
        return self._plan(index, self.slots.memory[request.slot], batches, others, draw)

    def draw(self, epoch: int) -> Uint64s | None:
        """Return the keys for drawing an epoch's parts of rows; None if none are drawn."""
        drawn = self._drawn
        if self._draws and drawn[0] != epoch:
            drawn = self._drawn = epoch, epoch_keys(self.samplings.config.seed, epoch)
        return drawn[1]

    def _plan(
        self,
        index: Int64s,
        memory: SlotMemory,
        batches: _Batches | None,
        others: Mapping[int, Ranges],
        draw: Uint64s | None,
    ) -> BatchPlan:
        """Plan each field for the core or for h5py, except those planned in `others`."""
        plans: list[ReadPlan] = []
        for field in range(len(self._layouts)):
            if field in others:
                plans.append(others[field])
            elif batches is None or not batches.collection.tables.can_read[field]:
                plans.append(self._plan_rows(field, index, memory.raw[field], draw))
            else:
                plans.append(IncludedPlan(batches.collection.tables.transforms[field]))
        return (
            plans if batches is None else [*plans, *self._plan_core(index, batches, others, draw)]
        )

    def _plan_core(
        self, index: Int64s, batches: _Batches, others: Names[int], draw: Uint64s | None
    ) -> list[BatchItems]:
        collection, more = batches.collection, list[BatchItems]()
        wanted = [False] * len(self._layouts)
        for field, can_read in enumerate(collection.tables.can_read):
            if can_read and field not in others:
                wanted[field] = collection.tables.reads[field]
                if not wanted[field]:
                    more.append(self._plan_told(field, index, batches))
        if any(wanted):
            collection.plan(batches.batch, index, wanted, self._num_threads, draw=draw)
            more.append(_batch_items(collection, batches.batch))
        return more

    def _plan_told(self, field: int, index: Int64s, batches: _Batches) -> BatchItems:
        """Have the core plan a field whose row (or element) numbers are passed to it."""
        steps, layout, batch = self._steps[field], self._layouts[field], batches.of_rows[field]
        assert isinstance(steps, SpanRows)
        wanted = [number == field for number in range(len(self._layouts))]
        rows = steps.runs(index) if layout.heaps else steps.rows(index)
        count = layout.sample_count if layout.heaps else layout.num_samples
        batches.collection.plan(batch, rows, wanted, self._num_threads, count)
        return _batch_items(batches.collection, batch)

    def _plan_rows(
        self, field: int, index: Int64s, raw: NDArray[Any], draw: Uint64s | None
    ) -> SamplesPlan:
        """Plan a field for h5py; zero the rows that do not exist."""
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
        return self._samples_plan(field, rows, places, index, draw)

    def _samples_plan(
        self, field: int, sample: Int64s, rows: Int64s, index: Int64s, draw: Uint64s | None
    ) -> SamplesPlan:
        draws, nbytes = self._draws.get(field), self._layouts[field].part_nbytes
        if draws is None:
            return SamplesPlan(sample, rows, rows.size * nbytes)
        assert draw is not None
        of_sample = rows // self.row_transforms[field].rows_of_sample
        return SamplesPlan(sample, rows, rows.size * nbytes, draws.places(draw, index)[of_sample])

    def _rows(self, field: int, batch: NDArray[Any]) -> NDArray[Any]:
        return self.row_transforms[field].rows(batch)

    def left(self, plans: BatchPlan) -> list[LeftRows | SlotBatch]:
        """Return the work that the core has left after the last share, split among threads.

        A `SlotBatch` has items that the core refused: they are read again, or raise an error.
        """
        found: list[LeftRows | SlotBatch] = []
        for collection, batch in self._by_core(plans):
            if collection.refused(batch).size:
                found.append(batch)
            for field, rows in collection.left(batch):
                nbytes = rows.size * self._layouts[field].part_nbytes
                parts = max(1, min(self._num_threads, rows.size, nbytes // _MIN_SHARE_NBYTES))
                found += [LeftRows(field, some) for some in np.array_split(rows, parts)]
        return found

    def read_left(
        self,
        left: LeftRows | SlotBatch,
        index: Int64s,
        draw: Uint64s | None,
        memory: SlotMemory,
        damage: list[DamagedError] | None = None,
    ) -> None:
        """Read what the core has left; `H5AsyncError` if bytes cannot be read or decoded.

        `draw` is the result of the method `draw` for the batch's epoch. If `damage` is given,
        errors for items that the core found damaged are added to it instead of raised.
        """
        if isinstance(left, SlotBatch):
            with self._scratch() as scratch:
                self._work_on(NO_FIELD, scratch)
                self._factory.read_again(left, scratch, damage)
            return
        field, rows = left
        steps = self._steps[field]
        wanted = index if steps is None else steps.rows(index)
        plan = self._samples_plan(field, wanted[rows], rows, index, draw)
        with self._scratch() as scratch:
            self._read_items(plan, PlanSlice(field, 0, 1), memory, scratch)
        if self._collection is not None and self._collection.tables.transforms[field]:
            raw, out = self._rows(field, memory.raw[field]), self._rows(field, memory.out[field])
            for some in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                run = slice(some[0], some[-1] + 1)
                self._transform_rows(field, raw[run], out[run], wanted[run])

    def read_rows(
        self,
        index: Int64s,
        memory: SlotMemory,
        damage: list[DamagedError] | None = None,
        epoch: int = NO_EPOCH,
    ) -> None:
        """Read and transform samples in the calling thread, to memory with room for them.

        If `damage` is given, errors for damaged samples are added to it instead of raised, provided
        that the other samples can still be read.
        """
        draw = self.draw(epoch)
        if self._reads_at_once and self._read_at_once(index, memory, draw):
            return
        batches = None
        if self._collection is not None:
            batches = self._batches_of(self._collection.new_batch, memory, index.size)
        plans = self._plan(index, memory, batches, {}, draw)
        self.fetch(plans)
        share = [PlanSlice(i, 0, plan.num_items) for i, plan in enumerate(plans)]
        self.read(plans, [part for part in share if part.stop], memory)
        for left in self.left(plans):
            self.read_left(left, index, draw, memory, damage)
        for field, (raw, out) in enumerate(zip(memory.raw, memory.out, strict=True)):
            if raw is not out and not self.transforms_at_once(field, plans):
                steps = self._steps[field]
                count = steps.total(index) if isinstance(steps, SpanRows) else index.size
                self.transform(field, raw[:count], out[:count], index)

    def _read_at_once(self, index: Int64s, memory: SlotMemory, draw: Uint64s | None) -> bool:
        """Read at most a batch in one call of the core; return whether it read everything."""
        collection, spare = self._collection, self._spare
        if collection is None or index.size > self.slots.rows:
            return False
        raw, out, _ = memory
        try:
            reading = spare.pop()
        except IndexError:  # (testing first would race with another thread's `pop`)
            batch = collection.new_batch(raw, out, self.slots.rows)
            reading = collection.new_reading(batch, self._new_scratch())
        try:
            reading.scratch.timeline = self.recorder.timeline
            self._work_on(NO_FIELD, reading.scratch)
            return collection.read_samples(reading, raw, out, index, draw)
        finally:
            spare.append(reading)

    def read_by(self, turns: Turns, names: Sequence[str], lasting: Any) -> None:
        """Have `turns` read given samples as `_read_at_once` does, in one call, if possible."""
        if not self._reads_at_once:
            return
        fields: list[tuple[Any, ...]] = []
        for name, one in zip(names, self.row_transforms, strict=True):
            as_read = () if one.is_identity else (one.raw_row, one.raw_dtype)
            fields.append((name, one.row, one.dtype, *as_read))
        turns.may_read(tuple(fields), self._spare, lasting)

    def fetch(self, plans: BatchPlan) -> None:
        """Fetch what the core will read from far sources, in the calling thread."""
        if self.far is not None:
            with self._scratch() as scratch:
                for collection, batch in self._by_core(plans):
                    collection.fetch(batch, scratch)

    def to_fetch(self, plans: BatchPlan) -> ByteRanges | None:
        """Return the ranges of far sources to fetch for a batch; None if it has all it needs."""
        held = [batch.held for _, batch in self._by_core(plans) if batch.held is not None]
        if held and not self._has_heaps:
            return None
        before = held[0].ranges if held else NO_RANGES
        wanted = union(before, *self._ranges_of(plans))
        return None if wanted.same(before) else wanted

    def _ranges_of(self, plans: BatchPlan) -> list[ByteRanges]:
        with self._scratch() as scratch:
            return [
                collection.ranges(batch, 0, batch.plan.num_items, scratch)
                for collection, batch in self._by_core(plans)
            ]

    def _by_core(self, plans: BatchPlan) -> Iterator[tuple[Collection, SlotBatch]]:
        """Yield the core's plans of a batch that read from files, with their collections."""
        for plan in plans:
            if isinstance(plan, BatchItems) and plan.collection is not self._kept:
                yield plan.collection, plan.batch

    def hold(self, plans: BatchPlan, found: Held | BaseException | None) -> None:
        """Have a batch use fetched ranges; None: forget them. Raises `found` if an exception."""
        if isinstance(found, BaseException):
            raise found
        for collection, batch in self._by_core(plans):
            collection.hold(batch, found)

    def ahead(self, request: FillRequest) -> ByteRanges | None:
        """Return the ranges of far sources that a request will read; None if not known."""
        collection, memory = self._collection, self.slots.memory
        if collection is None or not memory:
            return None
        index, _ = self.damage.left_out(self.samplings.samples(request))
        if self._cache is not None and self._cache.has(index):
            return NO_RANGES
        if self._ahead is None:
            self._ahead = self._batches_of(collection.new_batch, memory[0], self.slots.rows)
        plans = self._plan_core(index, self._ahead, {}, self.draw(request.epoch))
        return union(*self._ranges_of(plans))

    def read(self, plans: BatchPlan, share: Sequence[PlanSlice], memory: SlotMemory) -> None:
        """Do a share of a batch's reading; also transform rows if that saves a copy.

        `H5AsyncError` is raised if bytes cannot be read or decoded, as in the methods above.
        """
        with self._scratch() as scratch:
            for part in share:
                self._read_items(plans[part.field], part, memory, scratch)

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        try:
            scratch = self._free.pop()
        except IndexError:  # `run_next` has more callers than `num_threads`
            scratch = self._new_scratch()
        scratch.timeline = self.recorder.timeline
        try:
            yield scratch
        finally:
            self._free.append(scratch)

    def _read_items(
        self, plan: ReadPlan, part: PlanSlice, memory: SlotMemory, scratch: Scratch
    ) -> None:
        field, start, stop = part
        if isinstance(plan, BatchItems):
            self._work_on(NO_FIELD, scratch)
            plan.collection.read(plan.batch, start, stop, scratch)
        elif isinstance(plan, SamplesPlan) and plan.are_kept:
            assert self._cache is not None
            self._work_on(field, scratch, "memory")
            with scratch.reading():
                self._cache.columns[field].copy(plan, memory.raw[field])
        elif isinstance(plan, Ranges):
            assert self._collection is not None
            self._work_on(field, scratch)
            self._collection.read_ranges(plan, start, stop, scratch)
        elif isinstance(plan, SamplesPlan):
            self._work_on(field, scratch)
            try:
                self._h5py_rows[field].execute(plan, self._rows(field, memory.raw[field]), scratch)
            except DamagedError as error:
                error.place = None if error.place is None else Place(field, error.place)
                raise

    def _work_on(self, field: int, scratch: Scratch, source: str | None = None) -> None:
        timeline = scratch.timeline
        if timeline is None:
            return
        if source is None and field != NO_FIELD:
            layout = self._layouts[field]
            source = None if layout.datasets or layout.heaps else str(layout.file)
        batch = timeline.batch_here()
        timeline.work_on(batch, field, -1 if source is None else source)
        if self.core is not None:
            scratch.worker(self.core).struct.batch = batch

    def transforms_at_once(self, field: int, plans: BatchPlan) -> bool:
        """Tell whether the core transformed the rows of a field as it read them."""
        plan = plans[field]
        return isinstance(plan, IncludedPlan) and plan.is_transformed

    def _at_once(self, memory: SlotMemory) -> list[NativeTransform | None]:
        """Return, by field, the transform that the core does while reading rows."""
        return [
            transform
            if isinstance(transform, NativeTransform)
            and self._cache is None  # the cache keeps rows as read
            and raw is not out
            else None
            for transform, raw, out in zip(self._transforms, memory.raw, memory.out, strict=True)
        ]

    def transform(self, field: int, raw: NDArray[Any], out: NDArray[Any], index: Int64s) -> None:
        """Transform a field's rows of the samples `index` from `raw` to `out`."""
        steps = self._steps[field]
        # The row determines which CF attributes apply.
        if isinstance(steps, StepRows) and self.row_transforms[field].cf is not None:
            rows = steps.rows(index)  # zeros are unpacked with the attributes of the sample's row
            index = np.where(rows == NO_ROW, np.repeat(index, steps.size), rows)
        self._transform_rows(field, self._rows(field, raw), self._rows(field, out), index)

    def _transform_rows(
        self, field: int, raw: NDArray[Any], out: NDArray[Any], index: Int64s
    ) -> None:
        timeline = self.recorder.timeline
        batch = NO_BATCH if timeline is None else timeline.batch_here()
        work = partial(self._transforms[field], raw, out, index)
        self.timed("transform", batch, work, field)

    def timed(
        self, stage: str, batch: int, work: Callable[[], T], field: int | str = NO_FIELD
    ) -> T:
        """Do a stage of a batch; add this thread's time for it to `times`, and record it."""
        begin = time.perf_counter_ns()
        try:
            with self.recorder.ranges(stage):
                return work()
        finally:
            self.times.add(stage, begin)
            self.recorder.note(stage, begin, batch, field)

    def record(self, trace: CoreTrace | None) -> None:
        """Have the core record its work in all threads from now on; None: stop."""
        self._trace = trace
        for scratch in list(self._scratches):
            scratch.record(trace)

    @property
    def source_path(self) -> Callable[[int], int | str]:
        """A function from the core's source numbers to paths; valid after this is closed."""
        collection = self._collection
        return (lambda source: source) if collection is None else collection.tables.source_path

    def failure(self, request: FillRequest, error: BaseException) -> BaseException:
        """Return the error that the consumer of a request gets."""
        if not is_lack_of_memory(error):
            return error
        return out_of_memory(f"{self.file}: {request} cannot be filled", error)

    def done_in_core(self) -> ThreadCounts:
        """Return the work of all threads in the core so far."""
        if self.core is None:
            return ThreadCounts()
        done = self.core.Done()
        self.core.sum_done(byref(self._workers), byref(done))
        return counts_of(done)

    def done_in_python(self) -> list[tuple[int, ...]]:
        """Return the work of each thread in Python so far: the numbers of `ThreadCounts`."""
        return [tuple(vars(scratch.counts).values()) for scratch in list(self._scratches)]

    def interrupt(self) -> None:
        """Have work under way end as soon as it can, with a `ReaderClosedError`."""
        self._stop.value = 1

    def close(self) -> None:
        """Release all memory. Call it when no thread is reading. Idempotent."""
        self._workers.value = None  # first: it points into the scratches
        self._scratches.clear()
        self._free.clear()
        self._spare.clear()
        self._h5py_rows, self._plan_columns, self._cache = [], None, None
        for _, batch, told in self._batches:
            for one in (batch, *told.values()):  # frames in an error's traceback may keep them
                one.arrays = one.held = None
        if self._kept is not None:
            self._kept.close()
        self._collection, self._kept, self._batches, self._ahead = None, None, [], None

    def _new_scratch(self) -> Scratch:
        scratch = Scratch.allocate(*self._size)
        scratch.stop = self._stop
        scratch.record(self._trace)
        self._scratches.append(scratch)
        if self.core is not None:
            self.core.link_worker(byref(self._workers), byref(scratch.worker(self.core).struct))
        return scratch


def _batch_items(collection: Collection, batch: SlotBatch) -> BatchItems:
    count = batch.plan.num_items
    return BatchItems(collection, batch, count, batch.plan.nbytes // max(1, count))
