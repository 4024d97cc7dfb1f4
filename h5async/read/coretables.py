"""Describes fields to the compiled core: in which files their rows lie, where, and how encoded.

Layouts of fields enter; the core's tables leave, with arrays that they point to. They own the files
that the core opens, and the decoded chunks that it keeps.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import IO_MODES, MAX_RANK
from h5async.index.extents import FieldTable, Layer, SourceFile, TableBuilder
from h5async.index.keeping import Keeps, what_to_keep
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import Kind, Shape
from h5async.io.keptfiles import affordable_maps
from h5async.io.localfiles import IoMode, may_map, owned
from h5async.io.stamps import FileStamp
from h5async.order.rows import SpanRows, StepRows, StepSpans
from h5async.read.nativetransform import NativeTransform
from h5async.system.interruptions import suppressing

Int64s = NDArray[np.int64]
_ALL_BITS = (1 << 64) - 1
# For this time after a file was last checked for changes, rows of its kept decoded chunks are
# delivered without another check, which would cost more than they do. Batches are read ahead by
# more than that.
_TRUSTED_NS = 100_000_000


class CoreTables:
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
    of_fields
        The table of each field.
    fields, sources
        The same for the core.
    files
        The files of `sources`.
    num_samples
        Of the dataset.
    can_read
        By field: whether the core reads it, at least in part.
    shares
        By field: whether the rows of a batch have to be given, because samples share runs of rows,
        each read once.
    reads
        By field: whether the core reads it, and finds its rows.
    transforms
        By field: whether its rows are transformed as they are read.
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
        tables = self.of_fields = [
            builder.build(layout, nbytes)
            for layout, nbytes in zip(layouts, kept_nbytes, strict=True)
        ]
        self.num_samples = layouts[0].sample_count
        self._share = 1.0 if samples is None else samples / max(1, self.num_samples)
        self.can_read = [table.can_read for table in tables]
        self.shares = [isinstance(rows, StepSpans) for rows in steps] or [False] * len(tables)
        self.reads = [
            can and not is_shared for can, is_shared in zip(self.can_read, self.shares, strict=True)
        ]
        self.layouts = list(layouts)
        self.files = list(builder.sources)
        # By path, and whether variable-length elements are read from it.
        self._numbers: dict[tuple[str, bool], list[int]] = {}
        for i, source in enumerate(builder.sources):
            if source.values is None:
                self._numbers.setdefault((source.path, source.is_heap), []).append(i)
        self._io = io
        self.sources = self._open(builder.sources, io, most_files)
        self.fields = (core.Field * len(tables))()
        described = zip(self.fields, tables, layouts, kept_nbytes, transforms, strict=True)
        self._describe_rows(layouts, steps)
        several = steps or [None] * len(layouts)
        try:
            for (struct, table, layout, kept, transform), reads, rows in zip(
                described, self.can_read, several, strict=True
            ):
                if reads:
                    uses = self._share * layout.num_samples
                    uses *= rows.size if isinstance(rows, StepRows) else 1
                    keeps = what_to_keep(table, layout, kept, uses)
                    self._describe_field(struct, table, layout, kept, keeps, transform)
        except BaseException:
            self.close()
            raise
        self._firsts.clear()
        self.transforms = [bool(struct.transform) for struct in self.fields]

    def _open(self, sources: Sequence[SourceFile], io: IoMode, most_files: int) -> Any:
        table = np.zeros(len(sources), self._core.Source)
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
        opened = self._core.Sources(
            sources=address(table),
            count=len(table),
            most_open=max(1, affordable_maps() if gives_back else most_files),
            most_files=max(1, most_files),
            io=IO_MODES[io],
            gives_back=gives_back,
            trusted_ns=_TRUSTED_NS,
        )
        self._core.open_sources(ctypes.byref(opened))
        return ctypes.pointer(opened)

    def _describe_field(
        self,
        struct: Any,
        table: FieldTable,
        layout: DatasetLayout,
        kept_nbytes: int,
        keeps: Sequence[Keeps],
        transform: NativeTransform | None,
    ) -> None:
        struct.layers = (self._core.Layer * len(table.layers))(*map(self._layer, table.layers))
        struct.shapes = (self._core.Shape * len(table.shapes))(
            *(
                self._shape(shape, layout.row_nbytes, what)
                for shape, what in zip(table.shapes, keeps, strict=True)
            )
        )
        chunks = table.chunks
        struct.number = None if chunks.index is None else self._hold(chunks.index)
        struct.offset = self._hold(chunks.offset)
        struct.nbytes, struct.nbytes_step = self._hold_column(chunks.nbytes)
        struct.mask, struct.mask_step = self._hold_column(chunks.filter_mask)
        fill = np.ascontiguousarray(layout.raw_fill).reshape(1).view(np.uint8)
        struct.fill = self._hold(fill)
        struct.num_layers, struct.num_extents = len(table.layers), chunks.offset.size
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

    def _describe_heaps(self, struct: Any, layout: DatasetLayout) -> None:
        assert layout.lengths is not None
        self._keep.append(layout.heaps)  # whose structures point to their arrays
        structs = [heap.elements.struct(self._core) for heap in layout.heaps]
        struct.heaps = (self._core.Heap * len(structs))(*structs)
        struct.lengths = self._hold(layout.lengths)
        struct.num_rows = layout.lengths.size

    def _describe_rows(
        self, layouts: Sequence[DatasetLayout], several: Sequence[StepRows | SpanRows | None]
    ) -> None:
        """Describe the rows of samples, by field; fields with equal rows share a structure."""
        made: dict[Any, Any] = {}
        described = zip(self.fields, layouts, several, self.reads, strict=False)
        for field, layout, rows, is_read in described:
            if not is_read or layout.heaps:  # whose lengths are known to the core
                continue
            if isinstance(rows, StepRows):
                field.steps = made.setdefault(rows, self._step_struct(rows))
            elif rows is not None:
                struct = self._core.SpanRows(self._hold(rows.starts), rows.starts.size - 1)
                field.spans = made.setdefault(rows, ctypes.pointer(struct))
        self._keep.append(made)

    def _step_struct(self, steps: StepRows) -> Any:
        return ctypes.pointer(
            self._core.StepRows(
                self._hold(np.array(steps.offsets, np.int64)),
                self._hold(steps.starts),
                self._hold(steps.ends),
                steps.size,
                steps.starts.size,
                steps.pad == "zero",
            )
        )

    def _layer(self, layer: Layer) -> Any:
        names = ("first", "row", "step", "shape", "source", "begin", "count", "is_sparse")
        held = [self._hold(np.ascontiguousarray(getattr(layer, name))) for name in names[1:]]
        first = self._firsts.setdefault(layer.first.tobytes(), layer.first)
        return self._core.Layer(self._hold(first), *held, layer.row.size)

    def _shape(self, shape: Shape, row_nbytes: int, keeps: Keeps) -> Any:
        filters = self._core.filters(shape.filters)
        self._keep.append(filters)
        dataset = self._core.Dataset(
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
        """Return the address of a column, and the step to its next number: 0 if all are equal."""
        is_one = array.strides == (0,)
        return self._hold(array[:1] if is_one else array), 0 if is_one else 1

    def source_path(self, number: int) -> int | str:
        """Return the path of a source, or its number if it has none; also after `close`."""
        path = int(self._table["path"][number])
        return os.fsdecode(ctypes.string_at(path)) if path else number

    def open_ahead(self, is_closed: Callable[[], bool]) -> bool:
        """Open the first files, so that they are those that were indexed; False if one is not."""
        count = min(len(self.files), self._most_files)
        return all(
            not is_closed() and self._core.open_ahead(self.sources, number)
            for number in range(count)
        )

    def first_files(self) -> Iterator[SourceFile]:
        """Yield the files of which `open_ahead` opens some."""
        few = itertools.islice(self.files, self._most_files)
        return (source for source in few if source.values is None)

    def open_again(self, path: str) -> FileIO | None:
        """Return a new file for one that is open, whatever lies at its path now."""
        for number in self._numbers.get((path, False), []) + self._numbers.get((path, True), []):
            with suppressing(ValueError):  # it is not open
                return owned(self._core.descriptor, self.sources, number)
        return None

    def restamp(self, path: str, stamp: FileStamp, *, is_heap: bool = False) -> None:
        """Say that a changed file still holds what was indexed.

        `is_heap`: that variable-length elements lie where they did; else that all others do.
        """
        for number in self._numbers.get((path, is_heap), ()):
            self._core.restamp(
                self.sources,
                number,
                stamp.nbytes,
                stamp.modified_ns,
                stamp.changed_ns,
                may_map(path, self._io),
            )

    def forget_chunks(self) -> None:
        """Forget all chunks that are kept decoded, because a file has changed."""
        for struct in self.fields:
            if struct.store:
                self._core.clear_store(struct.store)

    def most_kept_nbytes(self) -> list[int]:
        """Return, by field, the maximum bytes of decoded chunks that were kept so far."""
        at, stores = self._core.Store.from_address, (struct.store for struct in self.fields)
        return [at(store).most_chunk_nbytes if store else 0 for store in stores]

    def close(self) -> None:
        """Close the files and free kept memory, which must not be in use. Idempotent."""
        self._core.close_sources(self.sources)
        for struct in self.fields:
            self._core.free_store(ctypes.addressof(struct) + self._core.Field.store.offset)
