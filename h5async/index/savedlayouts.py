"""Converts layouts to the header and the arrays of a saved index, and back. Pure.

All layouts form one table, `Datasets`, which is saved as it is: its columns are arrays, its kinds
are in the header (`savedfile.py`). A layout that consists of others follows them in the table; its
segments are facts of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import is_known_to_hdf5
from h5async.core.binding import NOWHERE, can_decode, load_core
from h5async.index.datasettable import Columns, Datasets, has_own_extent
from h5async.index.hdf5 import COLUMNS_REASON
from h5async.index.layout import DatasetLayout, HeapFile, Indexed, SequenceLengths
from h5async.index.savedfile import (
    LARGEST,
    SHARED,
    Arrays,
    NotPortableError,
    OwnFacts,
    Place,
    SavedHeader,
    SavedHeap,
    SavedSegments,
    to_json,
)
from h5async.index.storedtypes import Sequences, VariableLength
from h5async.index.tables import ChunkTable, Int64s, Piece, Segments, extents_of, repeated
from h5async.io.source import FileStamp, IoMode, may_map

_NOT_SAVED = {"limit": None, "is_shared": False, "file_samples": ()}  # must be so

# The arrays of a saved index, and their dtypes: the columns of the table of datasets, those of its
# chunks, and facts that single datasets have.
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
        self._own: dict[int, dict[str, Any]] = {}  # facts, by the number of the layout
        self._arrays = {name: [np.zeros(0, dtype)] for name, dtype in _FACTS.items()}
        self._places: dict[int, list[int]] = {}  # by the array's id
        self._sizes = dict.fromkeys(_FACTS, 0)
        self._held: list[Any] = []

    def file(self, path: str, stamp: FileStamp) -> int:
        """Return the number of a file."""
        return self.files.setdefault((path, stamp), len(self.files))

    def add(self, layout: DatasetLayout) -> int:
        """Add a layout and its datasets; return its number.

        NotPortableError if another process could not read it.
        """
        found = self._number_of.get(id(layout))
        if found is not None:
            return found
        for name, value in _NOT_SAVED.items():
            if getattr(layout, name) != value:
                raise NotPortableError(f"{layout.path}: its {name}")
        if max(layout.shape, default=0) > LARGEST:
            raise NotPortableError(f"{layout.path}: its shape {layout.shape}")
        facts = self._own_facts(layout)
        number = self._number_of[id(layout)] = self._count
        if facts:
            self._own[number] = facts
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
        kinds = dict[str, int]()
        texts = (json.dumps(_shared_facts(kind), default=to_json) for kind in table.kinds)
        of_kinds = np.array([kinds.setdefault(text, len(kinds)) for text in texts], np.int32)
        found = columns._asdict() | {
            "kind": of_kinds[columns.kind],
            "file": files[columns.file],
            "path": [paths.setdefault(path, len(paths)) for path in columns.paths],
            "address": columns.offset,
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
            "kinds": list(map(json.loads, kinds)),
            "own": self._own,
        }
        return header, arrays | self._arrays

    def _end_single(self) -> None:
        if self._single:
            self._tables.append(Datasets.of(self._single))
            self._single = []

    def _own_facts(self, layout: DatasetLayout) -> dict[str, Any]:
        """Return the facts that a layout shares with no other, and add their arrays."""
        facts: dict[str, Any] = {}
        if layout.indexed is not None and has_own_extent(layout):
            facts["indexed_shape"] = layout.indexed.shape
        if layout.values is not None:
            values = np.ascontiguousarray(layout.values).reshape(-1).view(np.uint8)
            facts["values"] = self._add("values", values)
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
            assert isinstance(layout.datasets, Datasets)
            of_kinds = [self._own_facts(kind) for kind in layout.datasets.kinds]
            self._end_single()
            for kind, own in enumerate(of_kinds):
                if own:
                    at = int(np.argmax(layout.datasets.columns.kind == kind))
                    self._own[self._count + at] = own
            self._tables.append(layout.datasets)
            facts["segments"] = self._segments(layout.segments, len(layout.datasets))
            self._count += len(layout.datasets)
        if layout.sources:
            first = self._count - len(layout.datasets)
            known = {_place(one): first + at for at, one in enumerate(layout.datasets)}
            found = ((source, known.get(_place(source))) for source in layout.sources)
            facts["sources"] = [self.add(one) if n is None else n for one, n in found]
        return facts

    def _segments(self, segments: Segments, num_datasets: int) -> dict[str, Any]:
        return {
            "columns": [self._add("numbers", column) for column in segments.columns],
            "pieces": segments.pieces,
            "even": segments.even,
            "kept_nbytes": segments.kept_nbytes,
            "datasets": (self._count, num_datasets),
        }

    def _heap(self, heap: HeapFile) -> dict[str, Any]:
        elements: Sequences = heap.elements
        return {
            "file": self.file(heap.file, heap.stamp),
            "first_sample": heap.first_sample,
            "place": self._add("places", elements.place),
            "where": elements.where.removeprefix(heap.file),
            **vars(elements.form),
        }

    def _add(self, name: str, array: NDArray[Any]) -> list[int]:
        """Add an array; return where it begins among those of its name, and its length."""
        found = self._places.get(id(array))
        if found is None:
            found = self._places[id(array)] = [self._sizes[name], array.size]
            self._arrays[name].append(np.ascontiguousarray(array, _FACTS[name]))
            self._sizes[name] += array.size
            self._held.append(array)  # so that no other array gets the same id
        return found


def _place(layout: DatasetLayout) -> Any:
    where = layout.file, layout.stamp, layout.path, layout.sample_axis, layout.segments is None
    return *where, layout.shape, layout.dtype, layout.storage, layout.offset, layout.member


def _one_if_equal(column: NDArray[Any]) -> NDArray[Any]:
    return column[:1] if column.size and (column == column[0]).all() else column


def _shared_facts(layout: DatasetLayout) -> dict[str, Any]:
    """Return the values of a `SavedKind`, which leaves out the number of samples."""
    indexed, rank = layout.indexed, len(layout.shape) - layout.extra_dims
    return {
        **{name: getattr(layout, name) for name in SHARED},
        "shape": [0 if n == layout.sample_axis else size for n, size in enumerate(layout.shape)],
        "fill": layout.fill.tobytes(),
        "has_chunks": layout.chunks is not None,
        "indexed": None if indexed is None else (indexed.digest, len(indexed.shape) < rank),
    }


# --- header and arrays -> layouts ----------------------------------------------------------------


class LayoutReader:
    """Makes the layouts of a saved index, each on its first request. Used by one thread.

    `files` are those of the index, with the paths to open. `columns` and `kinds` are its table, not
    checked yet; `io` says how files are read. ValueError if it is invalid.
    """

    def __init__(
        self,
        header: SavedHeader,
        arrays: Arrays,
        files: Sequence[tuple[str, FileStamp]],
        forget: Callable[[NDArray[Any]], None],
        io: IoMode,
    ) -> None:
        self._forget, self._io = forget, io
        self._files = files
        for name, dtype in (_COLUMNS | _CHUNKS | _FACTS).items():
            if arrays[name].dtype != dtype:
                raise ValueError(f"the array {name} is of {arrays[name].dtype}")
        self._arrays = arrays
        self.kinds = [kind.layout() for kind in header.kinds]
        self._is_usable = [_is_usable(kind) for kind in self.kinds]
        path, is_sparse = arrays["path"], arrays["is_sparse"].astype(np.bool_)
        if ((path < 0) | (path >= len(header.paths))).any():
            raise ValueError("a dataset refers to a path that does not exist")
        if len({arrays[name].size - (name == "begin") for name in _COLUMNS}) != 1:
            raise ValueError("columns differ in length")
        count = arrays["offset"].size
        if is_sparse.any() and arrays["number"].size != count:
            raise ValueError("chunks have no numbers")
        self.columns = Columns(
            **{name: arrays[name] for name in ("kind", "file", "rows", "stored_nbytes", "begin")},
            paths=[header.paths[at] for at in path.tolist()],
            offset=arrays["address"],
            is_sparse=is_sparse,
            chunks=ChunkTable(
                arrays["number"] if is_sparse.any() else None,
                arrays["offset"],
                _repeated(arrays["nbytes"], count),
                _repeated(arrays["mask"], count),
            ),
            files=tuple(files),
        )
        self._own, self._is_own = header.own, np.zeros(path.size, np.bool_)
        self._is_own[list(header.own)] = True
        self._made: dict[int, DatasetLayout] = {}
        self._maps: dict[str, bool] = {}

    def __len__(self) -> int:
        return self.columns.kind.size

    def layout(self, number: int) -> DatasetLayout:
        """Return layout `number`. Equal sources are the same objects.

        NotUsableError if the dataset must be indexed again for this installation, or this `io`.
        """
        found = self._made.get(number)
        if found is None:
            kind = int(self.columns.kind[number])
            self._require_usable(kind, int(self.columns.file[number]))
            found = self.columns.layout(number, self.kinds[kind])
            if number in self._own:
                self._add_own_facts(found, OwnFacts.model_validate(self._own[number]), number)
            has_own_chunks = found.chunk_shape and found.segments is None
            if has_own_chunks and found.chunks is None and found.fallback_reason is None:
                raise ValueError("chunks have no table")
            self._made[number] = found
        return found

    def _require_usable(self, kind: int, file: int) -> None:
        """Raise NotUsableError if this installation would read a kind of datasets differently.

        That includes columns, which are read directly only if files may be mapped.
        """
        if not self._is_usable[kind]:
            raise NotUsableError
        like, path = self.kinds[kind], self._files[file][0]
        if not like.is_columns or like.fallback_reason not in (None, COLUMNS_REASON):
            return
        if path not in self._maps:
            self._maps[path] = may_map(path, self._io)
        if self._maps[path] != (like.fallback_reason is None):
            raise NotUsableError

    def _add_own_facts(self, layout: DatasetLayout, own: OwnFacts, number: int) -> None:
        members = layout.__dict__
        if own.indexed_shape is not None and layout.indexed is not None:
            members["indexed"] = Indexed(layout.indexed.digest, own.indexed_shape)
        if own.values is not None:
            if layout.chunk_shape:
                raise ValueError("values of the index lie in chunks")
            values = self._array("values", own.values)
            members["values"] = np.ndarray(layout.shape, layout.raw_dtype, values.data)
        members["attached"] = tuple(self._files[i] for i in own.attached)
        if max(own.sources, default=-1) >= number:
            raise ValueError("a layout is its own source")
        members["sources"] = tuple(map(self.layout, own.sources))
        if own.spans is not None:
            spans = members["spans"] = self._array("numbers", own.spans)
            if not spans.size or (spans[1:] < spans[:-1]).any():
                raise ValueError("the bounds of samples are not ascending")
            if spans[0] < 0 or spans[-1] > layout.num_samples:
                raise ValueError("samples lie outside their dataset")
        if own.lengths is not None:
            self._add_heaps(layout, own.lengths, own.heaps)
        if own.sequences is not None:
            held = self._array("numbers", own.sequences)
            most = layout.sample_count
            if (held < 0).any() or (held > most).any() or sum(held.tolist()) != most:
                raise ValueError("the lengths of sequences do not match their dataset")
            members["sequences"] = SequenceLengths(held, held)
        if own.segments is not None:
            self._add_segments(layout, own.segments, number)

    def _add_segments(self, layout: DatasetLayout, saved: SavedSegments, number: int) -> None:
        first, count = saved.datasets
        if not count or first + count > number:
            raise ValueError("a layout is its own dataset")
        columns = self.columns.part(first, count)
        pairs = np.unique(columns.kind.astype(np.int64) * len(self._files) + columns.file)
        for kind, file in map(divmod, pairs.tolist(), [len(self._files)] * pairs.size):
            self._require_usable(kind, file)
        kind_of, at = columns.kind.copy(), np.flatnonzero(self._is_own[first : first + count])
        kind_of[at] = len(self.kinds) + np.arange(at.size)
        _, example, which = np.unique(kind_of, return_index=True, return_inverse=True)
        order = np.argsort(example)  # fingerprints depend on the order
        kinds = [self.layout(first + at) for at in example[order].tolist()]
        if any(kind.segments is not None for kind in kinds):
            raise ValueError("a layout consists of layouts that consist of others")
        files, of_file = np.unique(columns.file, return_inverse=True)
        columns = columns._replace(
            kind=np.argsort(order)[which.reshape(-1)].astype(np.int32),
            file=of_file.reshape(-1).astype(np.int32),
            files=tuple(self._files[file] for file in files.tolist()),
        )
        arrays = [self._array("numbers", place) for place in saved.columns]
        if len({array.size for array in arrays}) != 1:
            raise ValueError("the columns of segments differ in length")
        if max(column.max(initial=0) for column in arrays[4:]) >= 1 << 31:
            raise ValueError("a segment refers to a dataset or piece that does not exist")
        segments = Segments.of(arrays, saved.pieces, saved.even, saved.kept_nbytes)
        _require_sound(segments, columns.rows, layout.num_samples)
        for piece in saved.pieces:
            _extents(piece.region, layout.row_shape)
        keys = columns.kind[segments.dataset].astype(np.int64) * len(saved.pieces) + segments.piece
        for key in np.unique(keys).tolist():
            kind, at = divmod(key, len(saved.pieces))
            _require_fitting(kinds[kind], saved.pieces[at], layout)
        layout.__dict__.update(segments=segments, datasets=Datasets(kinds, columns))

    def _array(self, name: str, place: Place) -> NDArray[Any]:
        """Return an array from its place among the others of its name."""
        begin, count = place
        found = self._arrays[name][begin : begin + count]
        if found.size != count:
            raise ValueError("numbers lie outside their array")
        return found

    def _add_heaps(self, layout: DatasetLayout, place: Place, saved: Sequence[SavedHeap]) -> None:
        lengths = self._array("lengths", place)
        if int(lengths.sum(dtype=np.int64)) != layout.num_samples:
            raise ValueError("the lengths of elements do not match their dataset")
        if layout.storage != "heap" or layout.sample_axis:
            raise ValueError("a dataset is not of variable length")
        heaps, end = [], 0
        is_for_core = load_core() is not None
        for heap in saved:
            stored = self._array("places", heap.place)
            places = stored.copy()
            self._forget(stored)
            of_file = lengths[heap.first_sample : heap.first_sample + places.size]
            file, stamp = self._files[heap.file]
            if heap.first_sample < end or of_file.size != places.size or (places >= 0).any():
                raise ValueError("elements have no valid places")
            if is_for_core and (of_file[places == NOWHERE] != 0).any():
                raise NotUsableError  # saved without the core, which finds the places
            if places.size and int(of_file.max()) * heap.dtype.itemsize > stamp.nbytes:
                raise ValueError("an element is longer than its file")
            if heap.dtype.base != layout.dtype or not heap.dtype.itemsize:
                raise ValueError("elements are of another dtype than their dataset")
            form = VariableLength(*(getattr(heap, one.name) for one in fields(VariableLength)))
            total = int(of_file.sum(dtype=np.int64))
            elements = Sequences(form, file + heap.where, of_file, places, total)
            heaps.append(HeapFile(file, stamp, heap.first_sample, elements))
            end = heap.first_sample + places.size
        layout.__dict__.update(lengths=lengths, heaps=tuple(heaps))


def _repeated(column: NDArray[Any], count: int) -> NDArray[Any]:
    if column.size == count and count != 1:
        return column
    if column.size != 1 or count < 1:
        raise ValueError("a column of chunks has another length")
    return repeated(int(column[0]), count, column.dtype.str)


def _require_sound(segments: Segments, rows: Int64s, num_samples: int) -> None:
    """Raise ValueError unless segments lie in datasets of `rows[i]` rows, without overlap."""
    first, length, row, step = segments.first, segments.length, segments.row, segments.step
    require_below(segments.dataset, rows.size, "dataset")
    require_below(segments.piece, len(segments.pieces), "piece")
    if (first < 0).any() or (length < 1).any() or (row < 0).any() or (step < 1).any():
        raise ValueError("a segment has a number that is too small")
    if (length > num_samples).any() or (first > num_samples - length).any():
        raise ValueError("a segment lies outside its dataset")
    limit = rows[segments.dataset]
    if (row >= limit).any() or (step > np.maximum(1, limit))[length > 1].any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (length - 1 > (limit - 1 - row) // step).any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (first[1:] < first[:-1]).any():
        raise ValueError("segments are not in order")
    if any((layer.end[:-1] > layer.first[1:]).any() for _, layer in segments.layers):
        raise ValueError("segments overlap")
    if any(not 0 <= begin <= end <= num_samples or size < 0 for begin, end, size in segments.even):
        raise ValueError("units lie outside their dataset")


def require_below(column: NDArray[np.int32], limit: int, what: str) -> None:
    """Raise ValueError unless all numbers of a column are below a limit."""
    if ((column < 0) | (column >= limit)).any():
        raise ValueError(f"reference to a {what} that does not exist")


def _require_fitting(source: DatasetLayout, piece: Piece, whole: DatasetLayout) -> None:
    """Raise ValueError unless a piece of a source's rows fits the rows of the whole."""
    source_shape, shape = source.row_shape, whole.row_shape
    if piece.member is not None:
        if piece.member not in (source.dtype.names or ()):
            raise ValueError("a piece refers to a member that does not exist")
        member = source.dtype[piece.member]
        source_shape += member.shape
        if member.base.itemsize != whole.dtype.itemsize:
            raise ValueError("a member has another size than its field")
    extents = [_extents(piece.region, shape), _extents(piece.source_region, source_shape)]
    ours, theirs = ([n for n in found if n != 1] for found in extents)
    if ours != theirs:
        raise ValueError("a piece has another shape than its source")


def _extents(region: tuple[slice, ...] | None, shape: tuple[int, ...]) -> list[int]:
    """Return the extents of a region; ValueError unless it lies in a row."""
    for piece, extent in zip(region or (), shape, strict=region is not None):
        if not piece.start < piece.stop <= extent:
            raise ValueError("a region lies outside its rows")
    return extents_of(region, shape)


def _is_usable(kind: DatasetLayout) -> bool:
    """Return whether this installation would read a dataset in the same way."""
    reason = kind.fallback_reason
    if kind.indexed is None and kind.storage in ("contiguous", "external") and reason is None:
        return load_core() is not None  # h5py cannot read files of values alone
    can_undo = can_decode if reason is None else is_known_to_hdf5
    return all(map(can_undo, kind.filters))
