"""Converts layouts to the header and the arrays of a saved index, and back. Pure.

Each layout is a row of numbers. Facts that many layouts share, such as dtype, chunk shape and
filters, are stored once, in a template; so is each path and each shape. Rare facts, such as the
sources of a virtual dataset, are stored beside the rows. Chunk tables are concatenated in arrays; a
column of equal numbers is one number in the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import is_known_to_hdf5
from h5async.core.binding import can_decode, load_core
from h5async.index.chunktable import ChunkTable, grid_of, repeated
from h5async.index.heapelements import Sequences
from h5async.index.layout import (
    CfAttribute,
    DatasetLayout,
    HeapFile,
    Indexed,
    Part,
    SequenceLengths,
    Storage,
    Text,
)
from h5async.index.obstacles import COLUMNS_REASON
from h5async.index.portable import (
    NotPortableError,
    Numbers,
    dtype_from_json,
    dtype_to_json,
    filter_from_json,
    natural,
    naturals,
    numbers_at,
    region_from_json,
    region_to_json,
    selection_from_json,
    selection_to_json,
    text,
)
from h5async.index.savedchecks import Tables, check_alike, check_chunks
from h5async.index.savedfile import Arrays, SavedIndexError
from h5async.index.similardatasets import AlikeColumns, AlikeParts
from h5async.index.variablelength import VariableLength
from h5async.io.localfiles import IoMode, may_map
from h5async.io.stamps import FileStamp

_MOST_DIMENSIONS = 64  # of HDF5, 32, and those of array types
_LARGEST = (1 << 62) - 1


# Names of arrays for `AlikeColumns` and their chunks.
_ALIKE = ("first", "rows", "offset", "stored_nbytes")
_ALIKE_CHUNKS = {"chunk_offset": "offset", "chunk_nbytes": "nbytes", "chunk_mask": "filter_mask"}

_DEFAULTS = {
    field.name: field.default for field in fields(DatasetLayout) if field.default is not MISSING
}


class Row(NamedTuple):
    """A layout as a row of int64.

    Attributes
    ----------
    template, file, path, shape
        Positions in the lists of the header.
    offset, stored_nbytes
        As in the layout.
    chunks, offsets
        The number of chunks in its table, and the first of them in the array of offsets; -1 without
        a table.
    numbers, nbytes, masks
        The first number of these columns in its array; -1: all chunks have `all_nbytes`, or
        `all_mask`, or are allocated.
    all_nbytes, all_mask
        Common to all chunks.
    """

    template: int
    file: int
    path: int
    shape: int
    offset: int
    stored_nbytes: int
    chunks: int = -1
    offsets: int = -1
    numbers: int = -1
    nbytes: int = -1
    masks: int = -1
    all_nbytes: int = 0
    all_mask: int = 0


class NotUsableError(Exception):
    """A layout is only valid for other settings of the reader, or another installation."""


# In a row, in the template of many, and beside the rows.
_SAVED = {
    *("file", "stamp", "path", "shape", "offset", "stored_nbytes", "chunks"),
    *("dtype", "sample_axis", "storage", "fallback_reason", "fill", "chunk_shape", "filters"),
    *("member", "stored_itemsize", "has_raw_edges", "extra_dims", "indexed", "text"),
    *("values", "parts", "sources", "attached", "dim_names", "cf", "sequences"),
    *("spans", "lengths", "heaps"),
}
_NOT_SAVED = _DEFAULTS.keys() - _SAVED  # other values of these cannot be saved


# --- layouts -> header and arrays ----------------------------------------------------------------


class LayoutWriter:
    """Collects layouts, which may share sources."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, FileStamp], int] = {}
        self._paths: dict[str, int] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._template_numbers: dict[Any, int] = {}
        self._templates: list[dict[str, Any]] = []
        self._extras: dict[int, dict[str, Any]] = {}
        self._rows: list[Row] = []
        self._numbers_of: dict[int, int] = {}
        self._held: list[DatasetLayout] = []  # so that no other gets the same id
        self._numbers = Numbers()
        self._columns: dict[str, list[NDArray[Any]]] = {
            "index": [np.zeros(0, np.int64)],
            "offset": [np.zeros(0, np.int64)],
            "nbytes": [np.zeros(0, np.int64)],
            "mask": [np.zeros(0, np.uint32)],
            "values": [np.zeros(0, np.uint8)],
            "spans": [np.zeros(0, np.int64)],
            "lengths": [np.zeros(0, np.uint32)],
            "places": [np.zeros(0, np.int64)],
        }
        self._spans: dict[int, list[int]] = {}  # by the array's id, while it is held
        self._sizes = dict.fromkeys(self._columns, 0)

    def file(self, path: str, stamp: FileStamp) -> int:
        """Return the number of a file."""
        return self.files.setdefault((path, stamp), len(self.files))

    def add(self, layout: DatasetLayout) -> int:
        """Add a layout and its sources; return its number.

        NotPortableError if it has no form in which another process could read it.
        """
        found = self._numbers_of.get(id(layout))
        if found is not None:
            return found
        for name in _NOT_SAVED:
            if getattr(layout, name) != _DEFAULTS[name]:
                raise NotPortableError(f"{layout.path}: its {name}")
        if max(layout.shape, default=0) > _LARGEST:
            raise NotPortableError(f"{layout.path}: its shape {layout.shape}")
        extra = self._extra(layout)
        row = Row(
            self._template(layout),
            self.file(layout.file, layout.stamp),
            self._paths.setdefault(layout.path, len(self._paths)),
            self._shapes.setdefault(layout.shape, len(self._shapes)),
            layout.offset,
            layout.stored_nbytes,
        )
        if layout.chunks is not None:
            row = self._with_chunks(row, layout.chunks)
        number = self._numbers_of[id(layout)] = len(self._rows)
        self._held.append(layout)
        self._rows.append(row)
        if extra:
            self._extras[number] = extra
        return number

    def header(self) -> dict[str, Any]:
        """Return the part of the header that describes the layouts."""
        return {
            "files": [[path, *stamp] for path, stamp in self.files],
            "paths": list(self._paths),
            "shapes": list(self._shapes),
            "templates": self._templates,
            "extras": self._extras,
        }

    def arrays(self) -> dict[str, list[NDArray[Any]]]:
        """Return the arrays, in pieces."""
        rows = np.array(self._rows, np.int64).reshape(-1, len(Row._fields))
        return {
            "rows": [rows],
            "numbers": [np.zeros(0, np.int64), *self._numbers.arrays],
            **self._columns,
        }

    def _template(self, layout: DatasetLayout) -> int:
        dtype = layout.dtype
        described = dtype.str if dtype.isbuiltin == 1 else repr(dtype_to_json(dtype))
        key = (
            described,
            layout.sample_axis,
            layout.storage,
            layout.fallback_reason,
            layout.fill.tobytes(),
            layout.chunk_shape,
            layout.filters,
            layout.member,
            layout.stored_itemsize,
            layout.has_raw_edges,
            layout.extra_dims,
            layout.text,
            layout.dim_names,
            layout.cf,
            None if layout.indexed is None else layout.indexed.digest,
        )
        number = self._template_numbers.get(key)
        if number is None:
            number = self._template_numbers[key] = len(self._templates)
            digest = key[-1]
            self._templates.append(
                {
                    "dtype": dtype_to_json(dtype),
                    "sample_axis": layout.sample_axis,
                    "storage": layout.storage,
                    "fallback_reason": layout.fallback_reason,
                    "fill": layout.fill.tobytes().hex(),
                    "chunk_shape": layout.chunk_shape,
                    "filters": layout.filters,
                    "member": layout.member,
                    "stored_itemsize": layout.stored_itemsize,
                    "has_raw_edges": layout.has_raw_edges,
                    "extra_dims": layout.extra_dims,
                    "text": layout.text,
                    "dim_names": layout.dim_names,
                    "cf": [[first, *map(_cf_to_json, found)] for first, found in layout.cf],
                    "digest": None if digest is None else digest.hex(),
                }
            )
        return number

    def _extra(self, layout: DatasetLayout) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if layout.indexed is not None and layout.indexed.shape != _own_shape(
            layout.shape, layout.extra_dims
        ):
            extra["indexed_shape"] = layout.indexed.shape
        if layout.values is not None:
            extra["values"] = self._append("values", layout.values.reshape(-1).view(np.uint8))
        if layout.attached:
            extra["attached"] = [self.file(path, stamp) for path, stamp in layout.attached]
        if layout.sources:
            extra["sources"] = [self.add(source) for source in layout.sources]
        if layout.sequences is not None:
            extra["sequences"] = self._numbers.add(layout.sequences.held)
        if isinstance(layout.parts, AlikeParts):
            extra["alike"] = self._alike(layout.parts)
        elif layout.parts:
            extra["parts"] = [self._part(part) for part in layout.parts]
        if layout.spans is not None:
            if id(layout.spans) not in self._spans:
                place = [self._append("spans", layout.spans), layout.spans.size]
                self._spans[id(layout.spans)] = place
            extra["spans"] = self._spans[id(layout.spans)]
        if layout.lengths is not None:
            extra["lengths"] = [self._append("lengths", layout.lengths), layout.lengths.size]
            extra["heaps"] = [self._heap(heap) for heap in layout.heaps]
        return extra

    def _heap(self, heap: HeapFile) -> list[Any]:
        """Describe variable-length elements; their lengths are those of the layout."""
        elements: Sequences = heap.elements
        form = elements.form
        return [
            self.file(heap.file, heap.stamp),
            heap.first_sample,
            self._append("places", elements.place),
            elements.place.size,
            elements.where.removeprefix(heap.file),
            dtype_to_json(form.dtype),
            form.is_text,
            form.is_ascii,
            form.base,
            form.address_nbytes,
            form.size_nbytes,
        ]

    def _alike(self, parts: AlikeParts) -> dict[str, Any]:
        columns, chunks = parts.columns, parts.columns.chunks
        arrays = {name: getattr(columns, name) for name in _ALIKE}
        if chunks is not None:
            arrays |= {name: getattr(chunks, member) for name, member in _ALIKE_CHUNKS.items()}
        places = {name: self._numbers.add(array) for name, array in arrays.items()}
        return {"like": self.add(parts[0].source), "paths": list(columns.paths), "arrays": places}

    def _part(self, part: Part) -> list[Any]:
        return [
            self.add(part.source),
            selection_to_json(part.samples, self._numbers),
            selection_to_json(part.source_samples, self._numbers),
            region_to_json(part.region),
            region_to_json(part.source_region),
            part.member,
        ]

    def _with_chunks(self, row: Row, chunks: ChunkTable) -> Row:
        nbytes, mask, count = chunks.nbytes, chunks.filter_mask, chunks.offset.size
        row = row._replace(chunks=count, offsets=self._append("offset", chunks.offset))
        if chunks.index is not None:
            row = row._replace(numbers=self._append("index", chunks.index))
        if count and (nbytes == nbytes[0]).all():
            row = row._replace(all_nbytes=int(nbytes[0]))
        elif count:
            row = row._replace(nbytes=self._append("nbytes", nbytes))
        if count and (mask == mask[0]).all():
            row = row._replace(all_mask=int(mask[0]))
        elif count:
            row = row._replace(masks=self._append("mask", mask))
        return row

    def _append(self, name: str, array: NDArray[Any]) -> int:
        begin = self._sizes[name]
        self._columns[name].append(np.ascontiguousarray(array))
        self._sizes[name] += array.size
        return begin


def _own_shape(shape: tuple[int, ...], extra_dims: int) -> tuple[int, ...]:
    """Return a dataset's shape without the dimensions of an array type."""
    return shape[: len(shape) - extra_dims]


# --- header and arrays -> layouts ----------------------------------------------------------------


class _Template(NamedTuple):
    """The common facts of layouts.

    Attributes
    ----------
    members
        Of `DatasetLayout`, by name.
    digest
        Of `Indexed`.
    is_usable
        Whether this installation would read the datasets in the same way.
    """

    members: dict[str, Any]
    digest: bytes | None
    is_usable: bool


class LayoutReader:
    """Makes the layouts of a saved index, each on its first request. Used by one thread.

    Parameters
    ----------
    header, arrays, forget
        Of the saved index.
    files
        Its files, with the paths to open.

    Raises
    ------
    SavedIndexError
        If it makes no sense.
    """

    def __init__(
        self,
        header: dict[str, Any],
        arrays: Arrays,
        files: Sequence[tuple[str, FileStamp]],
        forget: Callable[[NDArray[Any]], None],
    ) -> None:
        self._forget = forget
        self._files = files
        self._paths = [text(path) for path in header["paths"]]
        self._shapes = [_shape(shape) for shape in header["shapes"]]
        self._templates = [_read_template(found) for found in header["templates"]]
        self._extras: dict[str, Any] = header["extras"]
        self._arrays = dict(arrays)
        rows = arrays["rows"].reshape(-1, len(Row._fields))
        kinds = {"numbers": "i8", "index": "i8", "offset": "i8", "nbytes": "i8", "mask": "u4"}
        kinds |= {"values": "u1", "spans": "i8", "lengths": "u4", "places": "i8"}
        for name, kind in kinds.items():
            if arrays[name].dtype != kind:
                raise ValueError(f"the array {name} is of {arrays[name].dtype}")
        self._rows = rows
        self._made: dict[int, DatasetLayout] = {}
        self._checked: dict[tuple[int, int], NDArray[np.int64]] = {}  # spans, by their place
        self._maps: dict[tuple[int, IoMode], bool] = {}
        self._check(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def layout(self, number: int, io: IoMode) -> DatasetLayout:
        """Return layout `number`; `io` says how files are read. Equal sources are the same objects.

        NotUsableError if the dataset must be indexed again for this installation, or this `io`.
        """
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = self._new(number, io)
        return found

    def _new(self, number: int, io: IoMode) -> DatasetLayout:
        row = Row._make(self._rows[number].tolist())
        template = self._templates[row.template]
        if not template.is_usable:
            raise NotUsableError
        file, stamp = self._files[row.file]
        layout = DatasetLayout.__new__(DatasetLayout)
        members = layout.__dict__
        members.update(template.members)
        shape = self._shapes[row.shape]
        members["file"], members["stamp"], members["path"] = file, stamp, self._paths[row.path]
        members["shape"], members["offset"] = shape, row.offset
        members["stored_nbytes"] = row.stored_nbytes
        if row.chunks >= 0:
            members["chunks"] = self._chunks(row)
        if template.digest is not None:
            own = _own_shape(shape, template.members["extra_dims"])
            members["indexed"] = Indexed(template.digest, own)
        extra = self._extras.get(str(number))
        if extra is not None:
            self._add_extra(layout, extra, number, io)
        if layout.is_columns:
            self._require_same_method(layout, row.file, io)
        return layout

    def _require_same_method(self, layout: DatasetLayout, file: int, io: IoMode) -> None:
        """Raise NotUsableError if columns were to be read differently: directly only if mapped."""
        key = file, io
        if key not in self._maps:
            self._maps[key] = may_map(layout.file, io)
        if layout.fallback_reason in (None, COLUMNS_REASON):
            if self._maps[key] != (layout.fallback_reason is None):
                raise NotUsableError

    def _chunks(self, row: Row) -> ChunkTable:
        count = row.chunks
        return ChunkTable(
            self._column("index", row.numbers, count) if row.numbers >= 0 else None,
            self._column("offset", row.offsets, count),
            self._nbytes(row),
            self._column("mask", row.masks, count)
            if row.masks >= 0
            else repeated(row.all_mask, count, np.uint32),
        )

    def _nbytes(self, row: Row) -> NDArray[np.int64]:
        if row.nbytes >= 0:
            return self._column("nbytes", row.nbytes, row.chunks)
        return repeated(row.all_nbytes, row.chunks, "i8")

    def _column(self, name: str, begin: int, count: int) -> NDArray[Any]:
        return self._arrays[name][begin : begin + count]

    def _add_extra(self, layout: DatasetLayout, extra: Any, number: int, io: IoMode) -> None:
        members = layout.__dict__
        if "indexed_shape" in extra:
            digest = self._templates[int(self._rows[number, 0])].digest or b""
            members["indexed"] = Indexed(digest, naturals(extra["indexed_shape"]))
        if "values" in extra:
            begin, nbytes = natural(extra["values"]), layout.nbytes
            values = self._column("values", begin, nbytes)
            members["values"] = np.ndarray(layout.shape, layout.raw_dtype, values.data)
        if "attached" in extra:
            members["attached"] = tuple(self._files[i] for i in naturals(extra["attached"]))
        if "sources" in extra:
            sources = naturals(extra["sources"])
            members["sources"] = tuple(self._source(i, number, io) for i in sources)
        if "spans" in extra:
            members["spans"] = self._spans(layout, *naturals(extra["spans"]))
        if "heaps" in extra:
            self._add_heaps(layout, extra)
        if "sequences" in extra:
            held = numbers_at(extra["sequences"], self._arrays["numbers"])
            most = layout.sample_count
            if (held < 0).any() or (held > most).any() or sum(held.tolist()) != most:
                raise ValueError("sequences have other rows than the dataset")
            members["sequences"] = SequenceLengths(held, held)
        if "alike" in extra:
            members["parts"] = self._read_alike(extra["alike"], layout, number, io)
        if "parts" in extra:
            members["parts"] = tuple(
                self._part(part, layout, number, io) for part in extra["parts"]
            )

    def _spans(self, layout: DatasetLayout, begin: int, count: int) -> NDArray[np.int64]:
        """Return where the samples of a layout begin, which are runs of its rows."""
        key = begin, count
        if key not in self._checked:
            found = self._column("spans", begin, count)
            if found.size != count or not count or (found[1:] < found[:-1]).any():
                raise ValueError("samples do not follow each other")
            self._checked[key] = found
        spans = self._checked[key]
        if spans[0] < 0 or spans[-1] > layout.num_samples:
            raise ValueError("samples lie outside their dataset")
        return spans

    def _add_heaps(self, layout: DatasetLayout, extra: Any) -> None:
        """Add the positions of variable-length elements, as a copy that may be written to."""
        begin, count = naturals(extra["lengths"])
        lengths = self._column("lengths", begin, count)
        if lengths.size != count or int(lengths.sum(dtype=np.int64)) != layout.num_samples:
            raise ValueError("elements have other lengths than their dataset")
        if layout.storage != "heap" or layout.sample_axis:
            raise ValueError("a dataset is not of variable length")
        heaps, end = [], 0
        for number, first, at, size, where, dtype, *form in extra["heaps"]:
            stored = self._column("places", natural(at), natural(size))
            places = stored.copy()
            self._forget(stored)
            own = lengths[natural(first) : first + size]
            file, stamp = self._files[natural(number)]
            described = _form(dtype_from_json(dtype), *form)
            if first < end or places.size != size or own.size != size or (places >= 0).any():
                raise ValueError("elements have no places")
            if own.size and int(own.max()) * described.dtype.itemsize > stamp.nbytes:
                raise ValueError("an element is longer than its file")
            if described.dtype.base != layout.dtype:
                raise ValueError("elements are of another dtype than their dataset")
            total = int(own.sum(dtype=np.int64))
            elements = Sequences(described, file + text(where), own, places, total)
            heaps.append(HeapFile(file, stamp, first, elements))
            end = first + size
        layout.__dict__.update(lengths=lengths, heaps=tuple(heaps))

    def _read_alike(self, found: Any, whole: DatasetLayout, number: int, io: IoMode) -> AlikeParts:
        like = self._source(natural(found["like"]), number, io)
        paths = [text(path) for path in found["paths"]]
        arrays = {
            name: numbers_at(place, self._arrays["numbers"])
            for name, place in found["arrays"].items()
        }
        chunks = None
        if like.chunks is not None:
            chunk_offset, nbytes, mask = (arrays[name] for name in _ALIKE_CHUNKS)
            if (mask < 0).any() or (mask >= 1 << 32).any():
                raise ValueError("a filter mask has too many bits")
            chunks = ChunkTable(None, chunk_offset, nbytes, mask.astype(np.uint32)).shortened()
        first, rows, offset, stored = (arrays[name] for name in _ALIKE)
        columns = AlikeColumns(paths, first, rows, offset, stored, chunks)
        check_alike(like, columns, whole)
        parts = AlikeParts(like, columns)
        _check_part(parts[0], whole)
        return parts

    def _source(self, source: int, number: int, io: IoMode) -> DatasetLayout:
        if source >= number:
            raise ValueError("a layout is its own source")
        return self.layout(source, io)

    def _part(self, found: Any, whole: DatasetLayout, number: int, io: IoMode) -> Part:
        source_number, samples, source_samples, region, source_region, member = found
        source = self._source(natural(source_number), number, io)
        numbers = self._arrays["numbers"]
        part = Part(
            source,
            selection_from_json(samples, numbers, whole.num_samples),
            selection_from_json(source_samples, numbers, source.num_samples),
            region_from_json(region, whole.row_shape),
            region_from_json(source_region, source.row_shape),
            None if member is None else text(member),
        )
        _check_part(part, whole)
        return part

    # --- checks ----------------------------------------------------------------------------------

    def _check(self, rows: NDArray[np.int64]) -> None:
        lengths = map(len, (self._templates, self._files, self._paths, self._shapes))
        for column, limit in zip(rows.T[:4], lengths, strict=True):
            if ((column < 0) | (column >= limit)).any():
                raise ValueError("a layout names what is not there")
        if (rows[:, 4:] < -1).any() or (rows[:, 6:11] > _LARGEST).any():
            raise ValueError("a layout has a negative size")
        limits = self._limits(rows)
        stamps = np.array([stamp.nbytes for _, stamp in self._files], np.int64)
        end, offset, has_table = stamps[rows[:, 1]], rows[:, 4], rows[:, 6] >= 0
        is_there = ~has_table & (limits["is_contiguous"] != 0) & (offset >= 0)
        if (offset > end - limits["nbytes"])[is_there].any():
            raise ValueError("values lie beyond the end of their file")
        if (has_table & (limits["is_chunked"] == 0)).any():
            raise ValueError("a dataset without chunks has a chunk table")
        columns = dict(zip(Row._fields, rows[has_table].T, strict=True))
        self._check_places(columns)
        tables = Tables(
            count=columns["chunks"],
            numbers=columns["numbers"],
            nbytes=columns["nbytes"],
            all_nbytes=columns["all_nbytes"],
            end=end[has_table],
            grid=limits["grid"][has_table],
            expected=limits["chunk_nbytes"][has_table],
        )
        wrong = check_chunks(
            tables, self._arrays["offset"], self._arrays["index"], self._arrays["nbytes"]
        )
        if wrong:
            raise SavedIndexError(wrong)

    def _limits(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return `_Span` of each row, as columns."""
        # (NumPy compares whole rows in a way that swallows a signal's exception.)
        templates, template = np.unique(rows[:, 0], return_inverse=True)
        shapes, shape = np.unique(rows[:, 3], return_inverse=True)
        kinds, kind = np.unique(template * shapes.size + shape, return_inverse=True)
        spans = [
            _span(
                self._templates[templates[pair // shapes.size]].members,
                self._shapes[shapes[pair % shapes.size]],
            )
            for pair in kinds.tolist()
        ]
        table = np.array(spans, np.int64).reshape(-1, len(_Span._fields))[kind.reshape(-1)]
        return dict(zip(_Span._fields, table.T, strict=True))

    def _check_places(self, columns: dict[str, NDArray[np.int64]]) -> None:
        """Check that chunk tables are concatenated, and have filter masks."""
        count, masks = columns["chunks"], columns["masks"]
        total = sum(count.tolist())  # which may exceed 64 bits
        if (
            total != self._arrays["offset"].size
            or (columns["offsets"] != np.cumsum(count) - count).any()
        ):
            raise ValueError("chunk tables do not lie one after the other")
        if ((masks >= 0) & (masks > self._arrays["mask"].size - count)).any():
            raise ValueError("a chunk table lies outside its array")
        if ((columns["all_mask"] < 0) | (columns["all_mask"] >= 1 << 32)).any():
            raise ValueError("a filter mask has too many bits")


class _Span(NamedTuple):
    """How much of a file the layouts with a template and a shape take.

    Attributes
    ----------
    is_contiguous, nbytes
        Whether values lie at an offset, and their size.
    is_chunked, grid, chunk_nbytes
        Whether values lie in chunks, the number of chunks, and the size of one; -1 for any size.
    """

    is_contiguous: bool
    nbytes: int
    is_chunked: bool
    grid: int
    chunk_nbytes: int


def _span(members: dict[str, Any], shape: tuple[int, ...]) -> _Span:
    """Check that a shape fits a template, and return the resulting limits."""
    chunk_shape, itemsize = members["chunk_shape"], members["dtype"].itemsize
    if members["sample_axis"] >= len(shape) or members["extra_dims"] >= len(shape):
        raise ValueError("a dataset has too few dimensions")
    if chunk_shape and len(chunk_shape) != len(shape):
        raise ValueError("chunks have another rank than their dataset")
    nbytes = math.prod(shape) * itemsize
    grid = math.prod(grid_of(shape, chunk_shape)) if chunk_shape else 0
    chunk_nbytes = math.prod(chunk_shape) * itemsize
    if max(nbytes, grid, chunk_nbytes) > _LARGEST:
        nbytes = grid = chunk_nbytes = _LARGEST  # anything with chunks or an offset is too large
    return _Span(
        is_contiguous=members["fallback_reason"] is None and not chunk_shape,
        nbytes=nbytes,
        is_chunked=bool(chunk_shape),
        grid=grid,
        chunk_nbytes=-1 if members["filters"] else chunk_nbytes,
    )


def _shape(found: object) -> tuple[int, ...]:
    shape = naturals(found)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    return shape


def _read_template(found: Any) -> _Template:
    dtype = dtype_from_json(found["dtype"])
    fill = bytes.fromhex(found["fill"])
    if len(fill) != dtype.itemsize:
        raise ValueError("a fill value has another size than its dtype")
    storage = text(found["storage"])
    if storage not in get_args(Storage):
        raise ValueError(f"storage {storage!r}")
    chunk_shape = naturals(found["chunk_shape"])
    if chunk_shape and min(chunk_shape) < 1:
        raise ValueError("chunks without an extent")
    filters = tuple(filter_from_json(one) for one in found["filters"])
    reason, digest = found["fallback_reason"], found["digest"]
    members: dict[str, Any] = {
        **_DEFAULTS,
        "dtype": dtype,
        "sample_axis": natural(found["sample_axis"]),
        "storage": cast("Storage", storage),
        "fallback_reason": None if reason is None else text(reason),
        "fill": np.frombuffer(fill, dtype).reshape(()) if fill else np.zeros((), dtype),
        "chunk_shape": chunk_shape,
        "filters": filters,
        "member": tuple(text(name) for name in found["member"]),
        "stored_itemsize": natural(found["stored_itemsize"]),
        "has_raw_edges": bool(found["has_raw_edges"]),
        "extra_dims": natural(found["extra_dims"]),
        "text": tuple(_read_text(one, dtype) for one in found["text"]),
        "dim_names": tuple(tuple(map(text, names)) for names in found["dim_names"]),
        "cf": tuple(
            (natural(first), tuple(map(_read_cf, several))) for first, *several in found["cf"]
        ),
    }
    # The installation that made the index may have other filters.
    can_undo = can_decode if reason is None else is_known_to_hdf5
    is_usable = all(map(can_undo, filters))
    if digest is None and storage in ("contiguous", "external") and reason is None:
        is_usable = load_core() is not None  # h5py cannot read files of values alone
    return _Template(members, None if digest is None else bytes.fromhex(digest), is_usable)


def _read_text(found: Any, dtype: np.dtype[Any]) -> Text:
    offset, nbytes, is_padded = found
    if natural(offset) + natural(nbytes) > dtype.itemsize or type(is_padded) is not bool:
        raise ValueError("a string lies outside its element")
    return Text(offset, nbytes, is_padded)


def _form(
    dtype: np.dtype[Any],
    is_text: object,
    is_ascii: object,
    base: object,
    address_nbytes: object,
    size_nbytes: object,
) -> VariableLength:
    """Return how variable-length elements are stored."""
    found = VariableLength(
        dtype,
        is_text is True,
        is_ascii is True,
        natural(base),
        natural(address_nbytes),
        natural(size_nbytes),
    )
    if {found.address_nbytes, found.size_nbytes} - {4, 8} or not dtype.itemsize:
        raise ValueError("elements have references of no known size")
    return found


def _cf_to_json(attribute: CfAttribute) -> list[str]:
    return [attribute.name, attribute.dtype, attribute.data.hex()]


def _read_cf(found: Any) -> CfAttribute:
    name, dtype, data = map(text, found)
    attribute = CfAttribute(name, dtype, bytes.fromhex(data))
    if dtype and np.dtype(dtype).kind not in "iuf":
        raise ValueError(f"an attribute {name} of {dtype}")
    if dtype and len(attribute.data) % np.dtype(dtype).itemsize:
        raise ValueError(f"an attribute {name} has another size than its dtype")
    return attribute


def _check_part(part: Part, whole: DatasetLayout) -> None:
    if part.samples.size != part.source_samples.size:
        raise ValueError("a part has more samples than its source")
    source_shape, shape = part.source.row_shape, whole.row_shape
    if part.member is not None:
        if part.member not in (part.source.dtype.names or ()):
            raise ValueError("a part is of a member that there is not")
        member = part.source.dtype[part.member]
        source_shape += member.shape
        if member.base.itemsize != whole.dtype.itemsize:
            raise ValueError("a member has another size than its field")
    extents = [_extents(part.region, shape), _extents(part.source_region, source_shape)]
    ours, theirs = ([n for n in found if n != 1] for found in extents)
    if ours != theirs:
        raise ValueError("a part has rows of another shape than its source")


def _extents(region: tuple[slice, ...] | None, shape: tuple[int, ...]) -> list[int]:
    if region is None:
        return list(shape)
    pairs = zip(region, shape, strict=True)
    return [len(range(*piece.indices(extent))) for piece, extent in pairs]
