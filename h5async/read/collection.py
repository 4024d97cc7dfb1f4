"""Reads the rows of a batch, of all fields and from all files at once, by the compiled core.

A table of sources and of extents enters (`index/extents.py`), and for each batch sample numbers and
the memory of a slot; rows leave. A batch is planned in one call, and read in one call per share. It
names rows that only h5py reads. Refused items are read again from a file that was checked, or raise
an error.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import (
    IO_MODES,
    MAX_RANK,
    REFUSED,
    BatchPlanStruct,
    DatasetStruct,
    Event,
    FieldStruct,
    FileStruct,
    HeapStruct,
    ItemStruct,
    LayerStruct,
    ShapeStruct,
    SourceStruct,
    SpanRowsStruct,
    StepRowsStruct,
    TargetStruct,
    WantedStruct,
)
from h5async.errors import ReaderClosedError, ReadError
from h5async.index.extents import FieldTable, Layer, SourceFile, TableBuilder
from h5async.index.keeping import Keeps, what_to_keep
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.shapes import Kind, Shape
from h5async.io.descriptors import owned
from h5async.io.keptfiles import affordable_maps
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError, LocalFiles
from h5async.io.maps import IoMode, may_map
from h5async.io.stamps import FileStamp
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows, StepSpans
from h5async.order.steps import StepRows
from h5async.read.failures import Chunk, Extent, Reason, error_of, error_of_element, find_chunk
from h5async.read.queue import BatchQueue, SlotBatch
from h5async.read.scratch import CLOSED, Scratch
from h5async.read.transform import NativeTransform
from h5async.system.interruptions import suppressing

Int64s = NDArray[np.int64]
_ALL_BITS = (1 << 64) - 1
_SOURCE, _ITEM, _WANTED = map(np.dtype, (SourceStruct, ItemStruct, WantedStruct))
# For this time after a file was last checked for changes, rows of its kept decoded chunks are
# delivered without another check, which would cost more than they do. Batches are read ahead by
# more than that.
_TRUSTED_NS = 100_000_000


class Ranges(NamedTuple):
    """Byte ranges of sources, to be read as they are stored.

    Attributes
    ----------
    source, offset, nbytes
        int64 (n,): the source of each, its address there, and its length.
    position
        int64 (n,): where it goes in `memory`.
    memory
        uint8.
    """

    source: Int64s
    offset: Int64s
    nbytes: Int64s
    position: Int64s
    memory: NDArray[np.uint8]

    @property
    def num_items(self) -> int:
        """Ranges to read."""
        return self.offset.size

    @property
    def item_nbytes(self) -> int:
        """The mean length of a range: its cost."""
        return int(self.nbytes.sum()) // max(1, self.nbytes.size)


class Planned(NamedTuple):
    """The plan of a batch, as arrays of the core, valid until the slot is planned again.

    Attributes
    ----------
    items
        Of `ItemStruct`.
    run_local, run_position, run_length
        int64, by run: begin within a chunk's rows, begin within the batch, and length.
    """

    items: NDArray[Any]
    run_local: Int64s
    run_position: Int64s
    run_length: Int64s


class Collection:
    """Tables of fields, as the core takes them. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    layouts
        Of the fields.
    io
        How files are read.
    most_files
        The maximum number of open descriptors; of more files, maps are kept without them.
    kept_nbytes
        By field: for decoded chunks that later batches may need.
    transforms
        By field: the transform done while reading, if any.
    steps
        By field: the rows of each sample; None: its own. Empty: None for all.
    samples
        Of an epoch; None: all.

    Attributes
    ----------
    tables
        Of the fields; None for one that is too large.
    """

    def __init__(
        self,
        core: Core,
        layouts: Sequence[DatasetLayout],
        *,
        io: IoMode,
        most_files: int,
        kept_nbytes: Sequence[int],
        transforms: Sequence[NativeTransform | None],
        steps: Sequence[StepRows | SpanRows | None] = (),
        samples: int | None = None,
    ) -> None:
        self._core = core
        self._keep: list[Any] = []  # what structures point to
        self._firsts: dict[bytes, Int64s] = {}  # of layers; equal ones are shared
        builder = TableBuilder(lambda filters: core.filters(filters) is not None, MAX_RANK)
        tables = self.tables = [
            builder.build(layout, nbytes)
            for layout, nbytes in zip(layouts, kept_nbytes, strict=True)
        ]
        self.num_samples = layouts[0].sample_count
        self._share = 1.0 if samples is None else samples / max(1, self.num_samples)
        self._num_fields = len(layouts)
        # Fields that it reads, at least in part; and those for which it is told the rows of a
        # batch, because samples share runs of rows, each read once.
        self.can_read = [table is not None and table.can_read for table in tables]
        self.shares = [isinstance(rows, StepSpans) for rows in steps] or [False] * len(tables)
        self.reads = [
            can and not is_shared for can, is_shared in zip(self.can_read, self.shares, strict=True)
        ]
        self._tables = tables
        self._layouts = list(layouts)
        self._files = list(builder.sources)
        # By path, and whether variable-length elements are read from it.
        self._numbers: dict[tuple[str, bool], list[int]] = {}
        for i, source in enumerate(builder.sources):
            if source.values is None:
                self._numbers.setdefault((source.path, source.is_heap), []).append(i)
        self._io = io
        self._batches: list[SlotBatch] = []
        self._num_sources = len(builder.sources)
        self._sources = self._open(builder.sources, io, most_files)
        self._fields = (FieldStruct * len(tables))()
        described = zip(self._fields, tables, layouts, kept_nbytes, transforms, strict=True)
        self._describe_rows(layouts, steps)
        several = steps or [None] * len(layouts)
        try:
            for (struct, table, layout, kept, transform), reads, rows in zip(
                described, self.can_read, several, strict=True
            ):
                if table is not None and reads:
                    uses = self._share * layout.num_samples
                    uses *= rows.size if isinstance(rows, StepRows) else 1
                    keeps = what_to_keep(table, layout, kept, uses)
                    self._describe_field(struct, table, layout, kept, keeps, transform)
        except BaseException:
            self.close()
            raise
        self._firsts.clear()
        # Fields whose rows are transformed as they are read.
        self.transforms = [bool(struct.transform) for struct in self._fields]

    # --- tables --------------------------------------------------------------------------------

    def _open(self, sources: Sequence[SourceFile], io: IoMode, most_files: int) -> Any:
        table = np.zeros(len(sources), _SOURCE)
        mapped: dict[int, bool] = {}
        for row, source in zip(table, sources, strict=True):
            if source.values is not None:
                row["map"], row["map_nbytes"] = self._hold(source.values), source.values.nbytes
                continue
            device = source.stamp.device
            if device not in mapped:
                mapped[device] = may_map(source.path, io)
            path = ctypes.create_string_buffer(os.fsencode(source.path))
            self._keep.append(path)
            row["path"], row["fd"], row["may_map"] = ctypes.addressof(path), -1, mapped[device]
        stamps = np.array([[n & _ALL_BITS for n in source.stamp] for source in sources], np.uint64)
        for name, column in zip(FileStamp._fields, stamps.reshape(-1, 5).T, strict=True):
            table[name] = column.view(np.int64)  # it wraps, as in C
        self._table = table  # the core writes to it from now on
        gives_back = len(sources) > most_files
        self._most_files = most_files
        memory = ctypes.create_string_buffer(self._core.nbytes["Sources"])
        self._core.open_sources(
            memory,
            address(table),
            len(table),
            affordable_maps() if gives_back else most_files,
            most_files,
            IO_MODES[io],
            gives_back,
            _TRUSTED_NS,
        )
        return memory

    def _describe_field(
        self,
        struct: FieldStruct,
        table: FieldTable,
        layout: DatasetLayout,
        kept_nbytes: int,
        keeps: Sequence[Keeps],
        transform: NativeTransform | None,
    ) -> None:
        struct.layers = (LayerStruct * len(table.layers))(*map(self._layer, table.layers))
        struct.shapes = (ShapeStruct * len(table.shapes))(
            *(
                self._shape(shape, layout.row_nbytes, what)
                for shape, what in zip(table.shapes, keeps, strict=True)
            )
        )
        struct.number = self._hold(table.number) if table.number.size else None
        struct.offset = self._hold(table.offset)
        struct.nbytes, struct.nbytes_step = self._hold_column(table.nbytes)
        struct.mask, struct.mask_step = self._hold_column(table.mask)
        fill = np.ascontiguousarray(layout.raw_fill).reshape(1).view(np.uint8)
        struct.fill = self._hold(fill)
        struct.num_layers, struct.num_extents = len(table.layers), table.offset.size
        struct.row_nbytes, struct.itemsize = layout.row_nbytes, layout.dtype.itemsize
        struct.is_filled_first, struct.num_rows = table.is_filled_first, layout.num_samples
        if layout.heaps:
            self._describe_heaps(struct, layout)
        struct.limit = layout.limit or 0
        is_whole = len(table.layers) == 1 and not table.is_filled_first
        is_whole &= all(s.kind != Kind.CHUNKS or s.extents.shape[0] == 1 for s in table.shapes)
        if transform is not None and is_whole and not layout.heaps:
            struct.transform = ctypes.pointer(transform.struct)
            self._keep.append(transform)
        least = min((s.chunk_nbytes for s in table.shapes if s.keeps), default=0)
        if least:
            struct.store = self._core.new_store(kept_nbytes, least)
            if not struct.store:
                raise MemoryError("no memory is left for decoded chunks")

    def _describe_heaps(self, struct: FieldStruct, layout: DatasetLayout) -> None:
        assert layout.lengths is not None
        self._keep.append(layout.heaps)  # whose structures point to their arrays
        structs = [heap.elements.struct() for heap in layout.heaps]
        struct.heaps = (HeapStruct * len(structs))(*structs)
        struct.lengths = self._hold(layout.lengths)
        struct.num_rows = layout.lengths.size

    def _describe_rows(
        self, layouts: Sequence[DatasetLayout], several: Sequence[StepRows | SpanRows | None]
    ) -> None:
        """Describe the rows of samples, by field; fields with equal rows share a structure."""
        made: dict[Any, Any] = {}
        described = zip(self._fields, layouts, several, self.reads, strict=False)
        for field, layout, rows, is_read in described:
            if not is_read or layout.heaps:  # whose lengths are known to the core
                continue
            if isinstance(rows, StepRows):
                field.steps = made.setdefault(rows, self._step_struct(rows))
            elif rows is not None:
                struct = SpanRowsStruct(self._hold(rows.starts), rows.starts.size - 1)
                field.spans = made.setdefault(rows, ctypes.pointer(struct))
        self._keep.append(made)

    def _step_struct(self, steps: StepRows) -> Any:
        return ctypes.pointer(
            StepRowsStruct(
                self._hold(np.array(steps.offsets, np.int64)),
                self._hold(steps.starts),
                self._hold(steps.ends),
                steps.size,
                steps.starts.size,
                steps.pad == "zero",
            )
        )

    def _layer(self, layer: Layer) -> LayerStruct:
        names = ("first", "row", "step", "shape", "source", "begin", "count", "is_sparse")
        held = [self._hold(np.ascontiguousarray(getattr(layer, name))) for name in names[1:]]
        first = self._firsts.setdefault(layer.first.tobytes(), layer.first)
        return LayerStruct(self._hold(first), *held, layer.row.size)

    def _shape(self, shape: Shape, row_nbytes: int, keeps: Keeps) -> ShapeStruct:
        filters = self._core.filters(shape.filters)
        self._keep.append(filters)
        dataset = DatasetStruct(
            filters=filters,
            num_filters=len(shape.filters),
            chunk_strides=self._hold(shape.chunk_strides),
            row_strides=self._hold(shape.row_strides),
            extents=self._hold(shape.extents),
            row_begin=self._hold(shape.row_begin),
            piece_begin=self._hold(shape.piece_begin),
            fill=self._hold(shape.fill),
            num_cross=shape.extents.shape[0],
            rank=shape.extents.shape[1],
            chunk_nbytes=shape.chunk_nbytes,
            chunk_samples=shape.chunk_samples,
            sample_stride=shape.sample_stride,
            itemsize=shape.itemsize,
            row_nbytes=row_nbytes,
            rows_are_whole=shape.rows_are_whole,
            begin=-1 if shape.has_chunks else 0,
        )
        return ShapeStruct(
            dataset,
            self._hold(shape.cross_number),
            shape.number_stride,
            shape.kind,
            shape.source_row_nbytes,
            keeps,
            shape.swaps,
        )

    def _hold(self, array: NDArray[Any]) -> int:
        array = np.ascontiguousarray(array)
        self._keep.append(array)
        return address(array)

    def _hold_column(self, array: NDArray[Any]) -> tuple[int, int]:
        """Return the address of a column, and the step to its next number: 0 if all are equal."""
        is_one = array.strides == (0,)
        return self._hold(array[:1] if is_one else array), 0 if is_one else 1

    # --- batches -------------------------------------------------------------------------------

    def new_batch(
        self, raw: Sequence[NDArray[Any]], out: Sequence[NDArray[Any]], rows: int | None = None
    ) -> SlotBatch:
        """Return the memory for plans of the batches of one slot; `raw` and `out` are its memory.

        `rows` are samples that fit into it; None means the rows of the first array.
        """
        rows = raw[0].shape[0] if rows is None else rows
        targets = (TargetStruct * self._num_fields)()
        for target, one, other in zip(targets, raw, out, strict=True):
            target.raw, target.out, target.capacity = address(one), address(other), len(one)
        batch = SlotBatch(BatchPlanStruct(), targets, rows, (raw, out))
        self._batches.append(batch)
        return batch

    @contextmanager
    def lent_batch(
        self, raw: Sequence[NDArray[Any]], out: Sequence[NDArray[Any]], rows: int
    ) -> Iterator[SlotBatch]:
        """Return the same for memory that is used once."""
        batch = self.new_batch(raw, out, rows)
        try:
            yield batch
        finally:
            self._batches.remove(batch)
            self._core.free_plan(ctypes.byref(batch.plan))

    def plan(
        self,
        batch: SlotBatch,
        samples: Int64s,
        wanted: Sequence[bool],
        threads: int,
        num_samples: int | None = None,
    ) -> tuple[int, int]:
        """Plan a batch; return the number of items, and their cost.

        Parameters
        ----------
        samples
            int64 (n,): sample numbers, at most the rows of the slot.
        wanted
            By field: whether it is to be read.
        threads
            The number of threads that may share the work.
        num_samples
            Bound of the sample numbers; None: samples of the dataset.

        Raises
        ------
        MemoryError
            If there is not enough memory for the plan.
        IndexError
            If there are too many samples, or one is out of range.
        """
        samples = np.ascontiguousarray(samples, np.int64)
        for target, is_wanted in zip(batch.targets, wanted, strict=True):
            target.is_wanted = is_wanted
        plan, count = batch.plan, samples.size
        planned = self._core.plan_batch(
            ctypes.byref(plan),
            self._fields,
            batch.targets,
            self._num_fields,
            address(samples),
            count,
            batch.rows,
            self.num_samples if num_samples is None else num_samples,
            threads,
        )
        if planned < 0:
            raise IndexError(f"a batch of {count} samples has one that there is not, or too many")
        if not planned:
            raise MemoryError("no memory is left for the plan of a batch")
        return plan.num_items, plan.nbytes

    def read(self, batch: SlotBatch, start: int, stop: int, scratch: Scratch) -> int:
        """Read items of a plan; return the number of refused ones.

        `ReaderClosedError` is raised if they are no longer wanted.
        """
        if start >= stop:
            return 0
        worker = scratch.worker(self._core)
        refused = self._core.read_batch(
            ctypes.byref(batch.plan),
            self._fields,
            batch.targets,
            self._sources,
            ctypes.byref(worker.struct),
            start,
            stop,
        )
        worker.note_return()
        if refused < 0:
            raise ReaderClosedError(CLOSED)
        return int(refused)

    def planned(self, batch: SlotBatch) -> Planned:
        """Return the result of `plan`."""
        plan = batch.plan
        runs = plan.run_local, plan.run_position, plan.run_length
        return Planned(self._items(batch), *(_array(run, plan.num_runs, np.int64) for run in runs))

    def read_ranges(self, ranges: Ranges, start: int, stop: int, scratch: Scratch) -> None:
        """Read ranges `start` to `stop` as they are stored.

        `ReadError` is raised if one cannot be read, or its file was changed; `ReaderClosedError` if
        they are no longer wanted.
        """
        worker = scratch.worker(self._core)
        source = ranges.source[start:stop]
        begins = start + np.flatnonzero(np.diff(source, prepend=-1))
        for begin, end in itertools.pairwise([*begins.tolist(), stop]):
            number = int(ranges.source[begin])
            done = begin + self._core.read_ranges(
                self._sources,
                ctypes.byref(worker.struct),
                *(address(column[begin:end]) for column in ranges[1:4]),
                address(ranges.memory),
                ranges.memory.nbytes,
                end - begin,
                number,
            )
            worker.note_return()
            if scratch.stop.value:
                raise ReaderClosedError(CLOSED)
            if done < end:
                raise ReadError(
                    f"{self.source_path(number)}: {ranges.nbytes[done]} bytes at byte"
                    f" {ranges.offset[done]} cannot be read"
                )

    def has_refused(self, batch: SlotBatch) -> bool:
        """Tell whether some items have to be read again."""
        return bool(self._refused(batch).size)

    def _refused(self, batch: SlotBatch) -> Int64s:
        items = self._items(batch)
        return np.flatnonzero((items["status"] == REFUSED) & (items["kind"] != Kind.LEFT))

    def read_again(
        self, batch: SlotBatch, files: Callable[[SourceFile], LocalFiles], scratch: Scratch
    ) -> None:
        """Read refused items from files that are checked, and opened in Python.

        `files` returns what opens a source, and reads it again if it was changed. `ReadError` is
        raised if something cannot be read or decoded; it names file, dataset and chunk or sample.
        `ReaderClosedError` is raised if the items are no longer wanted.
        """
        refused = self._refused(batch)
        sources = self._items(batch)["source"][refused]
        for number in np.unique(sources).tolist():
            source, numbers = self._files[number], refused[sources == number].tolist()
            work = partial(self._read_again, batch, numbers, scratch)
            files(source).read(source.path, source.stamp, work)

    def _read_again(
        self,
        batch: SlotBatch,
        numbers: Sequence[int],
        scratch: Scratch,
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        opened = file_struct(file, stamp)
        for number in numbers:
            if self._reads_again(batch, number, scratch, opened):
                continue
            failure = scratch.worker(self._core).struct.failure
            if failure.reason == Reason.ABOVE_LIMIT:
                continue  # reported when they are delivered
            if self._items(batch)[number]["kind"] == Kind.HEAP:
                heap = self._heap_of(batch, number)
                raise error_of_element(failure, file, opened, heap.elements.where)
            field, extent = self._extent_of(batch, number, failure.extent)
            found = find_chunk(self._layouts[field], file.path, extent)
            may_be_short = failure.reason in (Reason.WRONG_SIZE, Reason.DAMAGED)
            if may_be_short and isinstance(found, Chunk):
                # Some writers leave out the part of a chunk beyond the dataset's edge.
                needed = found.needed_nbytes
                if needed < found.layout.chunk_nbytes and self._reads_again(
                    batch, number, scratch, opened, needed
                ):
                    continue
            raise error_of(failure, file, opened, extent, found)
        return False

    def _reads_again(
        self, batch: SlotBatch, number: int, scratch: Scratch, opened: Any, least_nbytes: int = 0
    ) -> bool:
        worker = scratch.worker(self._core)
        worker.struct.least_nbytes = least_nbytes
        done = self._core.read_again(
            ctypes.byref(batch.plan),
            self._fields,
            batch.targets,
            ctypes.byref(opened),
            ctypes.byref(worker.struct),
            number,
        )
        worker.struct.least_nbytes = 0
        worker.note_return()
        if opened.event == Event.STOPPED:
            raise ReaderClosedError(CLOSED)
        if opened.event != Event.NONE:
            raise FileEventError(map_failed=opened.event == Event.FAULTED)
        return bool(done)

    def _heap_of(self, batch: SlotBatch, number: int) -> HeapFile:
        item = self._items(batch)[number]
        table = self._tables[item["field"]]
        assert table is not None
        of_field = int(table.layers[item["layer"]].begin[item["segment"]])
        return self._layouts[int(item["field"])].heaps[of_field]

    def _extent_of(self, batch: SlotBatch, number: int, extent: int) -> tuple[int, Extent]:
        """Return the field of an item, and where it lies: chunk `extent`, or rows (below 0)."""
        item = self._items(batch)[number]
        field, table = int(item["field"]), self._tables[item["field"]]
        assert table is not None
        if extent >= 0:
            return field, Extent(int(table.offset[extent]), int(table.nbytes[extent]), None)
        layer, segment = table.layers[item["layer"]], item["segment"]
        begin = int(layer.begin[segment])
        samples = None
        if item["kind"] == Kind.ROWS:
            first, step = int(layer.first[segment]), int(layer.step[segment])
            rows = int(layer.row[segment]) + (self._samples_of(batch, item) - first) * step
            samples = int(rows.min()), int(rows.max())
            if layer.count[segment]:
                begin = int(table.offset[begin])
        return field, Extent(begin, 0, samples)

    def _samples_of(self, batch: SlotBatch, item: Any) -> Int64s:
        """Return the samples of an item of rows."""
        wanted = _array(batch.plan.sorted, batch.plan.num_wanted + 1, _WANTED)
        ranks = np.arange(item["first_run"], item["first_run"] + item["num_runs"])
        run = np.searchsorted(wanted["rank"], ranks, side="right") - 1
        samples: Int64s = wanted["sample"][run] + ranks - wanted["rank"][run]
        return samples

    def left(self, batch: SlotBatch) -> Iterator[tuple[int, Int64s]]:
        """Yield each field of which h5py reads rows, once, with these rows of its memory."""
        items = self._items(batch)
        items = items[items["kind"] == Kind.LEFT]
        if not items.size:
            return  # for sparse rows, there may be a million numbers below
        plan = batch.plan
        run_position = _array(plan.run_position, plan.num_runs, np.int64)
        run_length = _array(plan.run_length, plan.num_runs, np.int64)
        for number in np.unique(items["field"]).tolist():
            rows = []
            for item in items[items["field"] == number]:
                here = slice(item["first_run"], item["first_run"] + item["num_runs"])
                for first, length in zip(run_position[here], run_length[here], strict=True):
                    rows.append(np.arange(first, first + length))
            yield number, np.unique(np.concatenate(rows))

    def _items(self, batch: SlotBatch) -> NDArray[Any]:
        return _array(batch.plan.items, batch.plan.num_items, _ITEM)

    def open_queue(
        self, batches: Sequence[SlotBatch], num_threads: int, selection: Selection
    ) -> BatchQueue:
        """Return a queue of the batches of these slots, for `num_threads` and a selection."""
        return BatchQueue(
            self._core,
            self._fields,
            self._sources,
            self.num_samples,
            batches,
            num_threads,
            selection,
        )

    def source_path(self, number: int) -> int | str:
        """Return the path of a source, or its number if it has none; also after `close`."""
        path = int(self._table["path"][number])
        return os.fsdecode(ctypes.string_at(path)) if path else number

    # --- files ---------------------------------------------------------------------------------

    def open_ahead(self, is_closed: Callable[[], bool]) -> bool:
        """Open the first files, so that they are those that were indexed; False if one is not."""
        count = min(self._num_sources, self._most_files)
        return all(
            not is_closed() and self._core.open_ahead(self._sources, number)
            for number in range(count)
        )

    def first_files(self) -> Iterator[SourceFile]:
        """Yield the files of which `open_ahead` opens some."""
        few = itertools.islice(self._files, self._most_files)
        return (source for source in few if source.values is None)

    def open_again(self, path: str) -> FileIO | None:
        """Return a new file for one that is open, whatever lies at its path now."""
        for number in self._numbers.get((path, False), []) + self._numbers.get((path, True), []):
            with suppressing(ValueError):  # it is not open
                return owned(self._core.descriptor, self._sources, number)
        return None

    def restamp(self, path: str, stamp: FileStamp, *, is_heap: bool = False) -> None:
        """Say that a changed file still holds what was indexed.

        `is_heap`: that variable-length elements lie where they did; else that all others do.
        """
        for number in self._numbers.get((path, is_heap), ()):
            self._core.restamp(
                self._sources,
                number,
                stamp.nbytes,
                stamp.modified_ns,
                stamp.changed_ns,
                may_map(path, self._io),
            )

    def forget_chunks(self) -> None:
        """Forget all chunks that are kept decoded, because a file has changed."""
        for struct in self._fields:
            if struct.store:
                self._core.clear_store(struct.store)

    def most_kept_nbytes(self) -> list[int]:
        """Return, by field, the maximum bytes of decoded chunks that were kept so far."""
        stores = (struct.store for struct in self._fields)
        return [int(self._core.most_kept(store)) if store else 0 for store in stores]

    def close(self) -> None:
        """Close the files and free kept memory, which must not be in use. Idempotent."""
        for batch in self._batches:
            self._core.free_plan(ctypes.byref(batch.plan))
        self._batches.clear()
        self._core.close_sources(self._sources)
        for struct in self._fields:
            self._core.free_store(ctypes.addressof(struct) + FieldStruct.store.offset)


def _array(memory: int | None, count: int, dtype: Any) -> NDArray[Any]:
    """Return memory of the core as an array, valid as long as the memory."""
    dtype = np.dtype(dtype)
    if not memory or not count:
        return np.zeros(0, dtype)
    block = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory)
    return np.frombuffer(block, dtype, count)


def file_struct(file: LocalFile, stamp: FileStamp) -> FileStruct:
    """Return an open file as the core takes it, to be compared with a stamp."""
    opened = FileStruct(
        file.descriptor, IO_MODES[file.io], file.map_address or None, file.map_nbytes, *stamp
    )
    if file.has_swmr_writer:
        opened.nbytes = -1  # it changes all the time
    return opened
