"""Converts layouts to the header and the arrays of a saved index, and back. Pure.

All layouts are one table, `Datasets`, and are saved as they are: its columns are arrays, its kinds
are in the header. A layout that consists of others follows them in the table, and has a kind of its
own with its segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import is_known_to_hdf5
from h5async.core.binding import can_decode, load_core
from h5async.index.chunktable import ChunkTable, grid_of, repeated
from h5async.index.datasettable import Columns, Datasets
from h5async.index.hdf5 import COLUMNS_REASON
from h5async.index.layout import (
    CfAttribute,
    DatasetLayout,
    HeapFile,
    Indexed,
    SequenceLengths,
    Storage,
    Text,
)
from h5async.index.portable import (
    NotPortableError,
    dtype_from_json,
    dtype_to_json,
    filter_from_json,
    natural,
    naturals,
    region_from_json,
    region_to_json,
    text,
)
from h5async.index.savedchecks import LARGEST, Limits, require_sound, require_sound_segments
from h5async.index.savedfile import Arrays
from h5async.index.segments import Piece, Segments
from h5async.index.variablelength import Sequences, VariableLength
from h5async.io.localfiles import IoMode, may_map
from h5async.io.stamps import FileStamp

_MOST_DIMENSIONS = 64  # of HDF5, 32, and those of array types

_DEFAULTS = {
    field.name: field.default for field in fields(DatasetLayout) if field.default is not MISSING
}
_NOT_SAVED = "limit", "is_shared", "file_samples"  # other values of these cannot be saved

# The arrays of a saved index, and their dtypes: the columns of the table of datasets, those of its
# chunks, and what kinds refer to.
_COLUMNS = {
    "kind": "i4",
    "file": "i4",
    "path": "i4",
    "rows": "i8",
    "address": "i8",
    "stored_nbytes": "i8",
    "begin": "i8",
    "is_sparse": "u1",
}
_CHUNKS = {"number": "i8", "offset": "i8", "nbytes": "i8", "mask": "u4"}
_FACTS = {"values": "u1", "numbers": "i8", "lengths": "u4", "places": "i8"}


class NotUsableError(Exception):
    """A layout is only valid for other settings of the reader, or another installation."""


# --- layouts -> header and arrays ----------------------------------------------------------------


class LayoutWriter:
    """Collects layouts, which may share sources."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, FileStamp], int] = {}
        self._tables: list[Datasets] = []
        self._single: list[DatasetLayout] = []  # not in a table yet
        self._count = 0
        self._number_of: dict[int, int] = {}
        self._facts: dict[int, dict[str, Any]] = {}  # of layouts with a kind of their own
        self._arrays = {name: [np.zeros(0, dtype)] for name, dtype in _FACTS.items()}
        self._sizes = dict.fromkeys(_FACTS, 0)
        self._places: dict[int, list[int]] = {}  # by the array's id
        self._held: list[Any] = []

    def file(self, path: str, stamp: FileStamp) -> int:
        """Return the number of a file."""
        return self.files.setdefault((path, stamp), len(self.files))

    def add(self, layout: DatasetLayout) -> int:
        """Add a layout and its datasets; return its number.

        NotPortableError if it has no form in which another process could read it.
        """
        found = self._number_of.get(id(layout))
        if found is not None:
            return found
        for name in _NOT_SAVED:
            if getattr(layout, name) != _DEFAULTS[name]:
                raise NotPortableError(f"{layout.path}: its {name}")
        if max(layout.shape, default=0) > LARGEST:
            raise NotPortableError(f"{layout.path}: its shape {layout.shape}")
        facts = self._own_facts(layout)
        if facts:
            self._facts[id(layout)] = facts
        number = self._number_of[id(layout)] = self._count
        self._single.append(layout)
        self._held.append(layout)
        self._count += 1
        return number

    def header_and_arrays(self) -> tuple[dict[str, Any], dict[str, list[NDArray[Any]]]]:
        """Return the part of the header that describes the layouts, and the arrays."""
        self._end_single()
        table = Datasets.joined(self._tables) if self._tables else Datasets.of([])
        columns, paths = table.columns, dict[str, int]()
        files = np.array([self.file(*file) for file in columns.files], np.int32)
        found: dict[str, Any] = {
            "kind": columns.kind,
            "file": files[columns.file] if files.size else columns.file,
            "path": [paths.setdefault(path, len(paths)) for path in columns.paths],
            "rows": columns.rows,
            "address": columns.offset,
            "stored_nbytes": columns.stored_nbytes,
            "begin": columns.begin,
            "is_sparse": columns.is_sparse,
            "number": () if columns.chunks.index is None else columns.chunks.index,
            "offset": columns.chunks.offset,
            "nbytes": _one_if_equal(columns.chunks.nbytes),
            "mask": _one_if_equal(columns.chunks.filter_mask),
        }
        dtypes = _COLUMNS | _CHUNKS
        arrays = {name: [np.asarray(found[name], dtype)] for name, dtype in dtypes.items()}
        header = {
            "files": [[path, *stamp] for path, stamp in self.files],
            "paths": list(paths),
            "kinds": [_kind_to_json(kind, self._facts.get(id(kind), {})) for kind in table.kinds],
        }
        return header, arrays | self._arrays

    def _end_single(self) -> None:
        if self._single:
            self._tables.append(Datasets.of(self._single))
            self._single = []

    def _own_facts(self, layout: DatasetLayout) -> dict[str, Any]:
        """Return the facts that a layout shares with no other, and add their arrays."""
        facts: dict[str, Any] = {}
        own = layout.shape[: len(layout.shape) - layout.extra_dims]
        if layout.indexed is not None and layout.indexed.shape not in (own, own[1:]):
            facts["indexed_shape"] = layout.indexed.shape
        if layout.values is not None:
            facts["values"] = self._add("values", layout.values.reshape(-1).view(np.uint8))
        if layout.attached:
            facts["attached"] = [self.file(path, stamp) for path, stamp in layout.attached]
        if layout.sequences is not None:
            facts["sequences"] = self._add("numbers", layout.sequences.held)
        if layout.spans is not None:
            facts["spans"] = self._add("numbers", layout.spans)
        if layout.lengths is not None:
            facts["lengths"] = self._add("lengths", layout.lengths)
            facts["heaps"] = [self._heap(heap) for heap in layout.heaps]
        if layout.segments is not None:
            facts["segments"] = self._segments(layout.segments)
            assert isinstance(layout.datasets, Datasets)
            for kind in layout.datasets.kinds:
                own_facts = self._own_facts(kind)
                if own_facts:
                    self._facts[id(kind)] = own_facts
            self._end_single()
            self._tables.append(layout.datasets)
            facts["datasets"] = [self._count, len(layout.datasets)]
            self._count += len(layout.datasets)
        if layout.sources:
            first = self._count - len(layout.datasets)
            known = {_place(one): first + at for at, one in enumerate(layout.datasets)}
            found = ((source, known.get(_place(source))) for source in layout.sources)
            facts["sources"] = [self.add(one) if n is None else n for one, n in found]
        return facts

    def _segments(self, segments: Segments) -> dict[str, Any]:
        columns = segments.first, segments.length, segments.row, segments.step
        return {
            "columns": [
                self._add("numbers", column)
                for column in (*columns, segments.dataset, segments.piece)
            ],
            "pieces": [
                [region_to_json(piece.region), region_to_json(piece.source_region), piece.member]
                for piece in segments.pieces
            ],
            "even": segments.even,
            "kept_nbytes": segments.kept_nbytes,
        }

    def _heap(self, heap: HeapFile) -> list[Any]:
        """Describe variable-length elements; their lengths are those of the layout."""
        elements: Sequences = heap.elements
        form = elements.form
        return [
            self.file(heap.file, heap.stamp),
            heap.first_sample,
            self._add("places", elements.place),
            elements.where.removeprefix(heap.file),
            dtype_to_json(form.dtype),
            form.is_text,
            form.is_ascii,
            form.base,
            form.address_nbytes,
            form.size_nbytes,
        ]

    def _add(self, name: str, array: NDArray[Any]) -> list[int]:
        """Add an array; return where it begins among those of its name, and its length."""
        found = self._places.get(id(array))
        if found is None:
            found = self._places[id(array)] = [self._sizes[name], array.size]
            self._arrays[name].append(np.ascontiguousarray(array, _FACTS[name]))
            self._sizes[name] += array.size
            self._held.append(array)  # so that no other gets the same id
        return found


def _place(layout: DatasetLayout) -> Any:
    """Return what a dataset and a source have in common if they are the same."""
    where = layout.file, layout.stamp, layout.path, layout.sample_axis, layout.segments is None
    return *where, layout.shape, layout.dtype, layout.storage, layout.offset, layout.member


def _one_if_equal(column: NDArray[Any]) -> NDArray[Any]:
    return column[:1] if column.size and (column == column[0]).all() else column


def _kind_to_json(layout: DatasetLayout, own: dict[str, Any]) -> dict[str, Any]:
    digest = None if layout.indexed is None else layout.indexed.digest
    return {
        "dtype": dtype_to_json(layout.dtype),
        "shape": layout.shape,
        "sample_axis": layout.sample_axis,
        "storage": layout.storage,
        "fallback_reason": layout.fallback_reason,
        "fill": layout.fill.tobytes().hex(),
        "chunk_shape": layout.chunk_shape,
        "has_chunks": layout.chunks is not None,
        "filters": layout.filters,
        "member": layout.member,
        "stored_itemsize": layout.stored_itemsize,
        "has_raw_edges": layout.has_raw_edges,
        "extra_dims": layout.extra_dims,
        "text": layout.text,
        "unused_rows": layout.unused_rows,
        "dim_names": layout.dim_names,
        "cf": [[first, *map(_cf_to_json, found)] for first, found in layout.cf],
        "digest": None if digest is None else digest.hex(),
        "indexed_rank": 0 if layout.indexed is None else len(layout.indexed.shape),
        "own": own,
    }


# --- header and arrays -> layouts ----------------------------------------------------------------


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
        for name, kind in (_COLUMNS | _CHUNKS | _FACTS).items():
            if arrays[name].dtype != kind:
                raise ValueError(f"the array {name} is of {arrays[name].dtype}")
        self._arrays = dict(arrays)
        self._own = [found["own"] for found in header["kinds"]]
        self._kinds = [_read_kind(found) for found in header["kinds"]]
        self._is_usable = [_is_usable(kind) for kind in self._kinds]
        names = [text(path) for path in header["paths"]]
        path = arrays["path"]
        if ((path < 0) | (path >= len(names))).any():
            raise ValueError("a dataset names a path that is not there")
        chunks, count = arrays["offset"], arrays["offset"].size
        self._columns = Columns(
            arrays["kind"],
            arrays["file"],
            [names[at] for at in path.tolist()],
            arrays["rows"],
            arrays["address"],
            arrays["stored_nbytes"],
            arrays["begin"],
            arrays["is_sparse"].astype(np.bool_),
            ChunkTable(
                arrays["number"] if arrays["is_sparse"].any() else None,
                chunks,
                _repeated(arrays["nbytes"], count),
                _repeated(arrays["mask"], count),
            ),
            tuple(files),
        )
        sizes = {column.size for column in self._columns[:2]} | {path.size}
        sizes |= {column.size for column in (*self._columns[3:6], self._columns.is_sparse)}
        if sizes != {self._columns.begin.size - 1}:
            raise ValueError("columns have unlike lengths")
        if arrays["is_sparse"].any() and arrays["number"].size != count:
            raise ValueError("chunks have no numbers")
        limits = np.array([_limits(kind) for kind in self._kinds], np.int64).reshape(-1, 5).T
        require_sound(self._columns, Limits(*limits))
        self._made: dict[int, DatasetLayout] = {}
        self._maps: dict[tuple[str, IoMode], bool] = {}

    def __len__(self) -> int:
        return self._columns.kind.size

    def layout(self, number: int, io: IoMode) -> DatasetLayout:
        """Return layout `number`; `io` says how files are read. Equal sources are the same objects.

        NotUsableError if the dataset must be indexed again for this installation, or this `io`.
        """
        if not self._made:  # stamps may have been adapted to this machine
            self._columns = self._columns._replace(files=tuple(self._files))
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = self._new(number, io)
        return found

    def _new(self, number: int, io: IoMode) -> DatasetLayout:
        kind = int(self._columns.kind[number])
        self._require_usable(kind, int(self._columns.file[number]), io)
        layout = self._columns.layout(number, self._kinds[kind])
        return self._with_own_facts(layout, self._own[kind], number, io)

    def _require_usable(self, kind: int, file: int, io: IoMode) -> None:
        """Raise NotUsableError for a kind of another installation.

        Also if columns were to be read differently: directly only if mapped.
        """
        if not self._is_usable[kind]:
            raise NotUsableError
        like, path = self._kinds[kind], self._files[file][0]
        if not like.is_columns or like.fallback_reason not in (None, COLUMNS_REASON):
            return
        key = path, io
        if key not in self._maps:
            self._maps[key] = may_map(path, io)
        if self._maps[key] != (like.fallback_reason is None):
            raise NotUsableError

    def _with_own_facts(
        self, layout: DatasetLayout, own: dict[str, Any], number: int, io: IoMode
    ) -> DatasetLayout:
        members = layout.__dict__
        if "indexed_shape" in own and layout.indexed is not None:
            members["indexed"] = Indexed(layout.indexed.digest, naturals(own["indexed_shape"]))
        if "values" in own:
            if layout.chunk_shape:
                raise ValueError("values of the index lie in chunks")
            values = self._array("values", own["values"])
            members["values"] = np.ndarray(layout.shape, layout.raw_dtype, values.data)
        if "attached" in own:
            members["attached"] = tuple(self._files[i] for i in naturals(own["attached"]))
        if "sources" in own:
            sources = naturals(own["sources"])
            if any(source >= number for source in sources):
                raise ValueError("a layout is its own source")
            members["sources"] = tuple(self.layout(i, io) for i in sources)
        if "spans" in own:
            members["spans"] = self._spans(layout, own["spans"])
        if "heaps" in own:
            self._add_heaps(layout, own)
        if "sequences" in own:
            held = self._array("numbers", own["sequences"])
            most = layout.sample_count
            if (held < 0).any() or (held > most).any() or sum(held.tolist()) != most:
                raise ValueError("sequences have other rows than the dataset")
            members["sequences"] = SequenceLengths(held, held)
        if "segments" in own:
            self._add_segments(layout, own, number, io)
        return layout

    def _add_segments(
        self, layout: DatasetLayout, own: dict[str, Any], number: int, io: IoMode
    ) -> None:
        first, count = naturals(own["datasets"])
        if not count or first + count > number:
            raise ValueError("a layout is its own dataset")
        columns = self._columns.part(first, count)
        used, which = np.unique(columns.kind, return_inverse=True)
        pairs = np.unique(columns.kind.astype(np.int64) * len(self._files) + columns.file)
        for kind, file in map(divmod, pairs.tolist(), [len(self._files)] * pairs.size):
            self._require_usable(kind, file, io)
        kinds = []
        for kind in used.tolist():
            at = np.flatnonzero(columns.kind == kind)
            if self._own[kind] and at.size != 1:
                raise ValueError("datasets share facts of their own")
            kinds.append(self.layout(first + int(at[0]), io))
        if any(kind.segments is not None for kind in kinds):
            raise ValueError("a layout of layouts of others")
        files, of_file = np.unique(columns.file, return_inverse=True)
        columns = columns._replace(
            kind=which.reshape(-1).astype(np.int32),
            file=of_file.reshape(-1).astype(np.int32),
            files=tuple(self._files[file] for file in files.tolist()),
        )
        found = own["segments"]
        arrays = [self._array("numbers", place) for place in found["columns"]]
        if len({array.size for array in arrays}) != 1 or len(arrays) != 6:
            raise ValueError("segments lack some numbers")
        dataset, piece = arrays[4:]
        if max(dataset.max(initial=0), piece.max(initial=0)) >= 1 << 31:
            raise ValueError("a segment names what is not there")
        axis, rows = layout.sample_axis, layout.row_shape
        # The rank of rows of sources may differ, but all datasets of a piece have one.
        of_piece = np.zeros(len(found["pieces"]), np.int64)
        inside = (piece >= 0) & (piece < of_piece.size) & (dataset >= 0)
        inside &= dataset < columns.kind.size
        of_piece[piece[inside]] = columns.kind[dataset[inside]]
        pieces = tuple(
            Piece(
                region_from_json(region, rows),
                region_from_json(source_region, kinds[of_piece[number]].row_shape),
                None if member is None else text(member),
            )
            for number, (region, source_region, member) in enumerate(found["pieces"])
        )
        even = tuple((natural(a), natural(b), natural(size)) for a, b, size in found["even"])
        segments = Segments.of(arrays, pieces, even, natural(found["kept_nbytes"]))
        require_sound_segments(segments, columns.rows, layout.shape[axis])
        keys = columns.kind[segments.dataset].astype(np.int64) * len(pieces) + segments.piece
        for key in np.unique(keys).tolist():
            _require_fitting(kinds[key // len(pieces)], pieces[key % len(pieces)], layout)
        layout.__dict__.update(segments=segments, datasets=Datasets(kinds, columns))

    def _array(self, name: str, place: object) -> NDArray[Any]:
        """Return an array that was added to the others of its name."""
        begin, count = naturals(place)
        found = self._arrays[name][begin : begin + count]
        if found.size != count:
            raise ValueError("numbers lie outside their array")
        return found

    def _spans(self, layout: DatasetLayout, place: object) -> NDArray[np.int64]:
        """Return where the samples of a layout begin, which are runs of its rows."""
        spans = self._array("numbers", place)
        if not spans.size or (spans[1:] < spans[:-1]).any():
            raise ValueError("samples do not follow each other")
        if spans[0] < 0 or spans[-1] > layout.num_samples:
            raise ValueError("samples lie outside their dataset")
        return spans

    def _add_heaps(self, layout: DatasetLayout, own: dict[str, Any]) -> None:
        """Add the positions of variable-length elements, as a copy that may be written to."""
        lengths = self._array("lengths", own["lengths"])
        if int(lengths.sum(dtype=np.int64)) != layout.num_samples:
            raise ValueError("elements have other lengths than their dataset")
        if layout.storage != "heap" or layout.sample_axis:
            raise ValueError("a dataset is not of variable length")
        heaps, end = [], 0
        for number, first, place, where, dtype, *form in own["heaps"]:
            stored = self._array("places", place)
            size = stored.size
            places = stored.copy()
            self._forget(stored)
            of_file = lengths[natural(first) : first + size]
            file, stamp = self._files[natural(number)]
            described = _form(dtype_from_json(dtype), *form)
            if first < end or of_file.size != size or (places >= 0).any():
                raise ValueError("elements have no places")
            if size and int(of_file.max()) * described.dtype.itemsize > stamp.nbytes:
                raise ValueError("an element is longer than its file")
            if described.dtype.base != layout.dtype:
                raise ValueError("elements are of another dtype than their dataset")
            total = int(of_file.sum(dtype=np.int64))
            elements = Sequences(described, file + text(where), of_file, places, total)
            heaps.append(HeapFile(file, stamp, first, elements))
            end = first + size
        layout.__dict__.update(lengths=lengths, heaps=tuple(heaps))


def _repeated(column: NDArray[Any], count: int) -> NDArray[Any]:
    if column.size == count and count != 1:
        return column
    if column.size != 1 or count < 1:
        raise ValueError("a column of chunks has another length")
    return repeated(int(column[0]), count, column.dtype.str)


def _limits(kind: DatasetLayout) -> tuple[int, bool, int, int, int]:
    """Check a kind, and return its `Limits`."""
    shape, axis, chunk_shape = kind.shape, kind.sample_axis, kind.chunk_shape
    if axis >= len(shape) or kind.extra_dims >= len(shape):
        raise ValueError("a dataset has too few dimensions")
    if chunk_shape and len(chunk_shape) != len(shape):
        raise ValueError("chunks have another rank than their dataset")
    if kind.chunks is not None and not chunk_shape:
        raise ValueError("chunks have no shape")
    if chunk_shape and kind.chunks is None and kind.fallback_reason is None:
        raise ValueError("chunks have no table")
    grid = grid_of(shape, chunk_shape) if chunk_shape else ()
    cross = math.prod(n for at, n in enumerate(grid) if at != axis)
    row_nbytes, chunk_nbytes = kind.row_nbytes, kind.chunk_nbytes
    rows = chunk_shape[axis] if kind.chunks is not None else 0
    if max(row_nbytes, cross, chunk_nbytes, rows) > LARGEST:
        row_nbytes = cross = LARGEST  # anything with chunks or an offset is too large
    is_direct = kind.fallback_reason is None and not chunk_shape and kind.storage != "files"
    return row_nbytes, is_direct, min(rows, LARGEST), cross, -1 if kind.filters else chunk_nbytes


def _require_fitting(source: DatasetLayout, piece: Piece, whole: DatasetLayout) -> None:
    """Raise ValueError unless a piece of a dataset's rows is one of the rows of a whole."""
    source_shape, shape = source.row_shape, whole.row_shape
    if piece.member is not None:
        if piece.member not in (source.dtype.names or ()):
            raise ValueError("a piece is of a member that there is not")
        member = source.dtype[piece.member]
        source_shape += member.shape
        if member.base.itemsize != whole.dtype.itemsize:
            raise ValueError("a member has another size than its field")
    extents = [_extents(piece.region, shape), _extents(piece.source_region, source_shape)]
    ours, theirs = ([n for n in found if n != 1] for found in extents)
    if ours != theirs:
        raise ValueError("a piece has another shape than its source")


def _extents(region: tuple[slice, ...] | None, shape: tuple[int, ...]) -> list[int]:
    if region is None:
        return list(shape)
    pairs = zip(region, shape, strict=True)
    return [len(range(*piece.indices(extent))) for piece, extent in pairs]


def _shape(found: object) -> tuple[int, ...]:
    shape = naturals(found)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    return shape


def _read_kind(found: Any) -> DatasetLayout:
    dtype, shape = dtype_from_json(found["dtype"]), _shape(found["shape"])
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
        "file": "",
        "path": "",
        "stamp": FileStamp(0, 0),
        "shape": shape,
        "dtype": dtype,
        "sample_axis": natural(found["sample_axis"]),
        "storage": cast("Storage", storage),
        "fallback_reason": None if reason is None else text(reason),
        "fill": np.frombuffer(fill, dtype).reshape(()) if fill else np.zeros((), dtype),
        "chunk_shape": chunk_shape,
        "chunks": ChunkTable.joined([]) if found["has_chunks"] else None,
        "filters": filters,
        "member": tuple(text(name) for name in found["member"]),
        "stored_itemsize": natural(found["stored_itemsize"]),
        "has_raw_edges": bool(found["has_raw_edges"]),
        "extra_dims": natural(found["extra_dims"]),
        "text": tuple(_read_text(one, dtype) for one in found["text"]),
        "unused_rows": natural(found["unused_rows"]),
        "indexed": _indexed(digest, shape, found),
        "dim_names": tuple(tuple(map(text, names)) for names in found["dim_names"]),
        "cf": tuple(
            (natural(first), tuple(map(_read_cf, several))) for first, *several in found["cf"]
        ),
    }
    layout = DatasetLayout.__new__(DatasetLayout)
    layout.__dict__.update(members)
    return layout


def _is_usable(kind: DatasetLayout) -> bool:
    """Return whether this installation would read a dataset in the same way."""
    reason = kind.fallback_reason
    if kind.indexed is None and kind.storage in ("contiguous", "external") and reason is None:
        return load_core() is not None  # h5py cannot read files of values alone
    can_undo = can_decode if reason is None else is_known_to_hdf5
    return all(map(can_undo, kind.filters))


def _indexed(digest: Any, shape: tuple[int, ...], found: Any) -> Indexed | None:
    if digest is None:
        return None
    own = shape[: len(shape) - natural(found["extra_dims"])]
    is_one_sample = natural(found["indexed_rank"]) < len(own)  # see `with_one_sample`
    return Indexed(bytes.fromhex(digest), own[1:] if is_one_sample else own)


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
