"""Describes fields to the compiled core: the files of their rows, their places and encoding.

Layouts of fields enter; the core's tables leave, with arrays that they point to. They own the files
that the core opens, and the decoded chunks that it keeps. A `Scratch` is the working memory of a
thread, allocated once and used for every batch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int32
from time import monotonic_ns, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import Kept
from h5async.core.binding import (
    IO_MODES,
    Core,
    CoreTrace,
    CoreWorker,
    address,
)
from h5async.errors import ReaderClosedError
from h5async.index.datasettable import kinds_of
from h5async.index.extents import Keeps, TableBuilder, what_to_keep
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import Kind, Layer, Shape
from h5async.io.hdf5files import affordable_maps
from h5async.io.source import FileStamp, IoMode, may_map
from h5async.order.rows import SpanRows, StepRows, StepSpans
from h5async.plan.crops import draws_of
from h5async.plan.transform import NativeTransform
from h5async.read.farsources import CLOSED, Bytes, FarSources, is_far
from h5async.system.timeline import ThreadCounts, Timeline

Int64s = NDArray[np.int64]
MOST_WOVEN = 4  # chunks that the core decodes before it writes their rows (weave.c)
_ALL_BITS = (1 << 64) - 1
# For this long after a file was last checked for changes, rows of its kept decoded chunks are
# delivered without another check, which would cost more than the rows. Batches are read ahead by
# more than that. With more than `_FILES_CHECKED` files it is longer, up to `_MOST_TRUSTED` times.
_TRUSTED_NS = 100_000_000
_FILES_CHECKED = 1000  # within that time
_MOST_TRUSTED = 10


class CoreTables:
    """Tables of fields for the core. Safe to use from many threads.

    At most `most_files` descriptors are open at once; further files stay mapped without one. Given
    by field: `layouts`; `kept_nbytes`, memory for decoded chunks that later batches may need;
    `transforms`, done while reading, if any; `steps`, the rows of each sample (None: its own row;
    empty: None for all). `samples` is the number of samples in an epoch; None: all. `kept` says
    where bytes of files are kept on disk, if anywhere. With `keeps_all`, chunks that a batch takes
    whole are also kept the first time.

    `of_fields` has the table of each field; `fields` and `sources` are the core's structures of the
    same, and `files` the sources' files. By field: `can_read` says whether the core reads it, at
    least in part; `shares`, whether a batch's rows must be passed in, because samples share runs of
    rows that are read once; `reads`, whether the core reads it and finds its rows; `transforms`,
    whether rows are transformed as they are read. `far` fetches the bytes of far sources, which
    `is_far` marks by file; None if there are none.
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
        kept: Kept | None = None,
        keeps_all: bool = False,
    ) -> None:
        self._core, self._io, self._most_files = core, io, most_files
        self._keeps_all = keeps_all
        self._keep: list[Any] = []  # what structures point to
        self._num_places = 0  # the numbers that locate parts of rows, of all fields so far
        self._firsts: dict[bytes, Int64s] = {}  # of layers; equal ones are shared
        builder = TableBuilder(lambda filters: core.filters(filters) is not None)
        self.of_fields = [
            builder.build(layout, nbytes)
            for layout, nbytes in zip(layouts, kept_nbytes, strict=True)
        ]
        several = steps or [None] * len(layouts)
        self.num_samples = layouts[0].sample_count
        self.can_read = [table.can_read for table in self.of_fields]
        self.shares = [isinstance(rows, StepSpans) for rows in several]
        spans = enumerate(several)  # for the first columns of ragged fields:
        self.ragged = [n for n, y in spans if isinstance(y, SpanRows) and several.index(y) == n]
        self.reads = [
            can and not is_shared for can, is_shared in zip(self.can_read, self.shares, strict=True)
        ]
        self.layouts = list(layouts)
        self.files = list(builder.sources)
        # By path, and whether variable-length elements are read from it.
        self._numbers: dict[tuple[str, bool], list[int]] = {}
        for number, source in enumerate(self.files):
            if source.values is None:
                self._numbers.setdefault((source.path, source.is_heap), []).append(number)
        self.is_far = [is_far(source, kept) for source in self.files]
        self.sources = self._open_sources()
        self.far: FarSources | None = None
        if any(self.is_far):
            self.far = FarSources(core, self.files, self._table, kept)
        self.fields = (core.Field * len(layouts))()
        share = 1.0 if samples is None else samples / max(1, self.num_samples)
        made: dict[Any, Any] = {}  # structures of equal rows are shared
        self._keep.append(made)
        try:
            for field, rows in enumerate(several):
                layout = layouts[field]
                if self.reads[field] and rows is not None and not layout.heaps:
                    self._describe_rows(self.fields[field], rows, made)
                if self.can_read[field]:
                    several_rows = rows.size if isinstance(rows, StepRows) else 1
                    uses = share * layout.num_samples * several_rows
                    crop = self._crop(layout, several_rows)
                    self._describe_field(field, kept_nbytes[field], uses, transforms[field], crop)
        except BaseException:
            self.close()
            raise
        self._firsts.clear()
        self.transforms = [bool(struct.transform) for struct in self.fields]

    def _open_sources(self) -> Any:
        table = np.zeros(len(self.files), self._core.Source)
        mapped: dict[int, bool] = {}
        for row, source, far in zip(table, self.files, self.is_far, strict=True):
            if far:
                row["is_far"], row["fd"] = True, -1
                continue
            if source.values is not None:
                row["map"], row["map_nbytes"] = self._hold(source.values), source.values.nbytes
                continue
            device = source.stamp.device
            if device not in mapped:
                mapped[device] = may_map(source.path, self._io)
            path = ctypes.create_string_buffer(os.fsencode(source.path))
            self._keep.append(path)
            row["path"], row["fd"], row["may_map"] = ctypes.addressof(path), -1, mapped[device]
        stamps = np.array([[n & _ALL_BITS for n in one.stamp] for one in self.files], np.uint64)
        for name, column in zip(FileStamp._fields, stamps.reshape(-1, 5).T, strict=True):
            table[name] = column.view(np.int64)  # wraps around, as in C
        self._table = table  # the core writes to it from now on
        gives_back = len(table) > self._most_files
        opened = self._core.Sources(
            sources=address(table),
            count=len(table),
            most_open=max(1, affordable_maps() if gives_back else self._most_files),
            most_files=max(1, self._most_files),
            io=IO_MODES[self._io],
            gives_back=gives_back,
            trusted_ns=int(_TRUSTED_NS * min(max(1, len(table) / _FILES_CHECKED), _MOST_TRUSTED)),
        )
        self._core.open_sources(ctypes.byref(opened))
        return ctypes.pointer(opened)

    def _describe_field(
        self,
        field: int,
        kept_nbytes: int,
        uses: float,
        transform: NativeTransform | None,
        crop: Any,
    ) -> None:
        struct, table, layout = self.fields[field], self.of_fields[field], self.layouts[field]
        struct.crop = crop  # reading it back from `struct` would refer to `struct`, in a cycle
        shapes = zip(table.shapes, what_to_keep(table, layout, kept_nbytes, uses), strict=True)
        struct.layers = (self._core.Layer * len(table.layers))(*map(self._layer, table.layers))
        struct.shapes = (self._core.Shape * len(table.shapes))(
            *(self._shape(shape, layout.part_nbytes, what, crop) for shape, what in shapes)
        )
        chunks = table.chunks
        struct.number = None if chunks.index is None else self._hold(chunks.index)
        struct.offset = self._hold(chunks.offset)
        struct.nbytes, struct.nbytes_step = self._hold_column(chunks.nbytes)
        struct.mask, struct.mask_step = self._hold_column(chunks.filter_mask)
        struct.fill = self._hold(np.ascontiguousarray(layout.raw_fill).reshape(1).view(np.uint8))
        struct.num_layers, struct.num_extents = len(table.layers), chunks.offset.size
        struct.row_nbytes, struct.itemsize = layout.part_nbytes, layout.dtype.itemsize
        struct.is_filled_first, struct.num_rows = table.is_filled_first, layout.num_samples
        if layout.heaps:
            assert layout.lengths is not None
            self._keep.append(layout.heaps)  # their structures point to their arrays
            heaps = [heap.elements.struct(self._core) for heap in layout.heaps]
            struct.heaps = (self._core.Heap * len(heaps))(*heaps)
            struct.lengths, struct.num_rows = self._hold(layout.lengths), layout.lengths.size
        struct.limit = layout.limit or 0
        is_whole = len(table.layers) == 1 and not table.is_filled_first
        is_whole &= all(s.kind != Kind.CHUNKS or s.extents.shape[0] == 1 for s in table.shapes)
        if transform is not None and is_whole and not layout.heaps:
            struct.transform = ctypes.pointer(transform.struct)
            self._keep.append(transform)
        least = min((s.chunk_nbytes for s in table.shapes if s.keeps), default=0)
        if least:
            struct.store = self._core.new_store(kept_nbytes, least, self._keeps_all)
            if not struct.store:
                raise MemoryError("no memory is left for decoded chunks")

    def _describe_rows(self, struct: Any, rows: StepRows | SpanRows, made: dict[Any, Any]) -> None:
        if isinstance(rows, SpanRows):
            spans = self._core.SpanRows(self._hold(rows.starts), rows.starts.size - 1)
            struct.spans = made.setdefault(rows, ctypes.pointer(spans))
            return
        offsets = np.array(rows.offsets, np.int64)
        run_ends = np.append(np.flatnonzero(np.diff(offsets) != 1) + 1, offsets.size)
        run_end = np.repeat(run_ends, np.diff(run_ends, prepend=0))
        arrays = map(self._hold, (offsets, rows.starts, rows.ends, run_end))
        steps = self._core.StepRows(*arrays, rows.size, rows.starts.size, rows.pad == "zero")
        struct.steps = made.setdefault(rows, ctypes.pointer(steps))

    def _layer(self, layer: Layer) -> Any:
        names = ("first", "row", "step", "shape", "source", "begin", "count", "is_sparse")
        held = [self._hold(np.ascontiguousarray(getattr(layer, name))) for name in names[1:]]
        first = self._firsts.setdefault(layer.first.tobytes(), layer.first)
        return self._core.Layer(self._hold(first), *held, layer.row.size)

    def _crop(self, layout: DatasetLayout, rows_of_sample: int) -> Any:
        """Return the core's description of the delivered part of each row; None: whole rows."""
        if layout.crop is None:
            return None
        draws = draws_of(layout.crop, layout.row_shape)
        self._keep.append(draws)
        crop = self._core.Crop(
            **{name: address(getattr(draws, name)) for name in draws._fields},
            rank=draws.extents.size,
            first=self._num_places,
            rows_of_sample=rows_of_sample,
        )
        self._num_places += draws.extents.size
        return ctypes.pointer(crop)

    def _shape(self, shape: Shape, row_nbytes: int, keeps: Keeps, crop: Any) -> Any:
        filters = self._core.filters(shape.filters)
        self._keep.append(filters)
        arrays = "chunk_strides row_strides extents row_begin piece_begin fill".split()
        arrays += ["axis", "num_cells", "cell_begin"] if shape.axis is not None else []
        numbers = "chunk_nbytes chunk_samples sample_stride itemsize rows_are_whole".split()
        dataset = self._core.Dataset(
            filters=filters,
            num_filters=len(shape.filters),
            num_cross=shape.extents.shape[0],
            rank=shape.extents.shape[1],
            row_nbytes=row_nbytes,
            begin=-1 if shape.has_chunks else 0,
            crop=crop,
            **{name: self._hold(getattr(shape, name)) for name in arrays},
            **{name: getattr(shape, name) for name in numbers},
        )
        return self._core.Shape(
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
        """Return the address of a column and the step to the next number: 0 if all are equal."""
        is_one = array.strides == (0,)
        return self._hold(array[:1] if is_one else array), 0 if is_one else 1

    def source_path(self, number: int) -> int | str:
        """Return the path of a source, or its number if it has none; also after `close`."""
        source = self.files[number]
        return source.path if source.values is None else number

    def open_ahead(self, is_closed: Callable[[], bool]) -> Iterator[int]:
        """Open the first files; yield the numbers of those that cannot be opened as indexed."""
        for number, source in enumerate(self.files[: self._most_files]):
            if is_closed():
                return
            if not self._core.open_ahead(self.sources, number) and source.values is None:
                yield number

    def restamp(self, path: str, stamp: FileStamp, *, is_heap: bool = False) -> None:
        """Accept a new stamp for a changed file that still holds what was indexed.

        `is_heap`: applies to its variable-length elements; otherwise, to everything else.
        """
        for number in self._numbers.get((path, is_heap), ()):
            self.files[number] = self.files[number]._replace(stamp=stamp)
            self._restamp(number, may_map(path, self._io))

    def stop_mapping(self, number: int) -> None:
        """Read a source without mapping it from now on."""
        self._restamp(number, False)

    def _restamp(self, number: int, may_be_mapped: bool) -> None:
        times = self.files[number].stamp[2:]
        self._core.restamp(self.sources, number, *times, may_be_mapped)

    def forget_chunks(self) -> None:
        """Forget all kept decoded chunks, because a file has changed."""
        for struct in self.fields:
            if struct.store:
                self._core.clear_store(struct.store)

    def close(self) -> None:
        """Close the files and free kept memory, which must not be in use. Idempotent."""
        if self.far is not None:
            self.far.close()
        self._core.close_sources(self.sources)
        self.forget_chunks()
        for struct in self.fields:
            self._core.free_store(ctypes.addressof(struct) + self._core.Field.store.offset)


# --- of a thread ----------------------------------------------------------------------------------


class ScratchSize(NamedTuple):
    """Sizes of a `Scratch`'s buffers in bytes; `between` is the size of each of three."""

    encoded: int
    raw_chunk: int
    between: int

    @classmethod
    def of(cls, layouts: Iterable[DatasetLayout]) -> ScratchSize:
        """Return the maximum for all fields."""
        sizes = (
            scratch_size(leaf)
            for layout in layouts
            for leaf, _ in kinds_of(layout)
            if leaf.chunks is not None
        )
        return cls(*map(max, *sizes, (0, 0, 0), (0, 0, 0)))


def scratch_size(leaf: DatasetLayout) -> ScratchSize:
    """Return the sizes for a chunked dataset.

    Chunks without filters that hold whole rows need no buffer: they, or parts of them, are read
    directly to their destination.
    """
    if not leaf.filters:
        return ScratchSize(0, 0 if leaf.rows_are_whole else leaf.chunk_nbytes, 0)
    assert leaf.chunks is not None
    encoded = int(leaf.chunks.nbytes.max(initial=0))
    along = leaf.grid[-1] if leaf.sample_axis < len(leaf.grid) - 1 else 1
    at_once = along if along <= MOST_WOVEN else 1
    return ScratchSize(encoded, at_once * leaf.chunk_nbytes, encoded_room(leaf.chunk_nbytes))


@dataclasses.dataclass
class Scratch:
    """The working memory of one thread, allocated once.

    `encoded` is for an encoded chunk; `raw_chunk` for a decoded chunk (or its needed parts) that
    does not go to a batch as a whole, or for several chunks that split the last dimension of the
    same rows; `between` are three buffers: two for results between the filters of a pipeline, one
    for a decoder. `stop` is nonzero once the reader is being closed; `counts` counts the thread's
    work in Python. The compiled core records its work in `trace`; Python's is in `timeline`.
    """

    encoded: Bytes
    raw_chunk: Bytes
    between: tuple[Bytes, ...]
    stop: c_int32 = dataclasses.field(default_factory=c_int32)
    counts: ThreadCounts = dataclasses.field(default_factory=ThreadCounts)
    trace: CoreTrace | None = None
    timeline: Timeline | None = None
    _worker: CoreWorker | None = None

    def record(self, trace: CoreTrace | None) -> None:
        """Have the compiled core record its work in `trace` from now on; None stops it."""
        self.trace = trace
        if self._worker is not None:
            self._worker.record(trace)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time spent in the ``with`` block as reading, and record it."""
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self.counts.read_ns += perf_counter_ns() - begin
            if self.timeline is not None:
                self.timeline.add("read", begin)

    def note_return(self) -> None:
        """Count, right after a call of the core, the time it took to get the GIL back."""
        if self._worker is not None:
            returned_ns = int(self._worker.struct.returned_ns)
            self.counts.gil_wait_ns += monotonic_ns() - returned_ns

    def require_open(self) -> None:
        """Raise `ReaderClosedError` if the reader is being closed: the rest is not needed."""
        if self.stop.value:
            raise ReaderClosedError(CLOSED)

    def worker(self, core: Core) -> CoreWorker:
        """Return this thread's worker for calls of the compiled core; made on first use."""
        if self._worker is None:
            self._worker = core.new_worker(self.encoded, self.raw_chunk, self.between, self.stop)
            if self.trace is not None:
                self._worker.record(self.trace)
        return self._worker

    @classmethod
    def allocate(cls, encoded: int, raw_chunk: int, between: int) -> Scratch:
        """Reserve memory of a `ScratchSize`; pages that are never touched cost nothing."""
        sizes = encoded, raw_chunk, *[between] * 3
        first, second, *others = (np.empty(nbytes, np.uint8) for nbytes in sizes)
        return cls(first, second, tuple(others))


def encoded_room(chunk_nbytes: int) -> int:
    """Return the maximum size of an encoded chunk: two compressors in a row grow a little."""
    return chunk_nbytes + chunk_nbytes // 8 + 65536
