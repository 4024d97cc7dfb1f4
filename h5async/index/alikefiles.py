"""Finds the layouts of files whose metadata match those of another file, without HDF5.

HDF5's answers about a file depend only on the bytes that it reads. These are recorded once, for one
file of a collection, as a pattern: a file with the same bytes in the same places has the same
layouts. Only the following may differ, and is checked like HDF5's answers. All other files are left
to HDF5, which also produces the errors.

- The end of the file, in a superblock of version 0.
- A dataset's first extent and modification time, in a version 1 object header (without checksum).
- The chunks in a version 1 B-tree that consists of one node, if none is missing.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.index.hdf5 import NotDirectError, Opened
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.storedtypes import DATASPACE, LAYOUT, MODIFIED, message_of
from h5async.index.tables import ChunkTable, grid_of
from h5async.io.hdf5files import HDF5File
from h5async.io.metadatafile import MetadataFile
from h5async.io.references import SIGNATURE
from h5async.io.source import FileStamp, Source, open_regular, settled
from h5async.io.stores import LocalSource, absolute_name, open_over
from h5async.system.interruptions import suppressing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_Key = tuple[Any, ...]
_Layouts = dict[str, DatasetLayout]
_Read = Callable[[HDF5File], _Layouts]
_Range = tuple[int, int]  # begin, end

FEW_FILES = 16  # read before a pattern is recorded, which takes as long as reading three files
MANY_FILES = 192  # from here on recording pays, even if a few patterns match nothing
_PRICE = 256  # credit that recording a pattern costs; a file that HDF5 reads earns 1,
_FOUND = 32  # and a file that matches a pattern earns this
_MOST_MISSES = 6  # consecutive files without a match, after which the patterns are dropped
_MOST_PATTERNS = 4  # kept per key
_MOST_NBYTES = 1 << 16  # of a pattern
_GAP_NBYTES = 1 << 10  # between ranges that are read as one
_MOST_OPEN = 256  # objects open in HDF5; if there are more, one of them may be written
_ALL = h5py.h5f.OBJ_ALL

_SUPERBLOCK_NBYTES = 48  # at least
_SIZES_AT, _BASE_AT, _END_AT = 13, 24, 40  # in a superblock of version 0
_FLAGS_AT = 11  # from version 2 on: whether the file is open for writing
_LEAF = b"TREE\x01\x00"  # start of a leaf node of chunks; the number of chunks follows
_NODE_HEAD_NBYTES = 24
_MOST_ENTRIES = 64  # of a node, in files with a superblock of version 0
_UNLIMITED = (1 << 64) - 1


class Alike:
    """Remembers datasets and files, to recognize others like them. Used by one thread.

    `datasets` are layouts that `Indexer` has read, by the facts that similar datasets share. For
    fewer than `MANY_FILES` files, no pattern is recorded.
    """

    def __init__(self, num_files: int = MANY_FILES) -> None:
        self.datasets: dict[Any, Any] = {}
        self._patterns: defaultdict[_Key, list[_Pattern]] = defaultdict(list)
        self._misses: Counter[_Key] = Counter()  # consecutive
        begin = _PRICE - FEW_FILES if num_files >= MANY_FILES else -num_files
        self._credit: defaultdict[_Key, int] = defaultdict(lambda: begin)
        self._types = -1  # datatypes open at the last check, if no file was written; else -1

    def layouts(self, name: str, key: _Key, read: _Read) -> _Layouts:
        """Return the layouts of a local file; none if HDF5 is needed to read them.

        `key` identifies the wanted layouts; `read` reads them from an open file, or returns none if
        they depend on more than its bytes.
        """
        patterns = self._patterns[key]
        self._credit[key] += 1
        may_note = self._credit[key] > _PRICE
        if not (patterns or may_note):
            return {}
        with suppressing(Exception), open_regular(name) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)  # as HDF5 does
            if self._is_any_written():
                return {}
            source = LocalSource(file.fileno())
            stamp = settled(source.stamp)
            found = self._find(name, stamp, source, patterns)
            self._misses[key] = 0 if found else self._misses[key] + 1
            if found:
                self._credit[key] += _FOUND - 1
            elif may_note:
                self._credit[key] -= _PRICE
                self._misses[key] = 0
                found, pattern = _noted(name, stamp, source, read)
                if pattern is not None:
                    patterns[:] = [pattern, *patterns[: _MOST_PATTERNS - 1]]
            elif self._misses[key] >= _MOST_MISSES:
                patterns.clear()
            if source.stamp() == stamp:
                return found
        return {}

    def _is_any_written(self) -> bool:
        """Return whether HDF5 in this process may hold values that are not in their file yet."""
        types = h5py.h5f.get_obj_count(_ALL, h5py.h5f.OBJ_DATATYPE)
        kinds = _ALL if types != self._types else _ALL & ~h5py.h5f.OBJ_DATATYPE
        count = h5py.h5f.get_obj_count(_ALL, kinds)
        several = h5py.h5f.get_obj_ids(_ALL, kinds) if 0 < count <= _MOST_OPEN else ()
        is_written = count > _MOST_OPEN or any(
            h5py.h5i.get_file_id(one).get_intent() & h5py.h5f.ACC_RDWR
            for one in several
            if not isinstance(one, h5py.h5t.TypeID) or one.committed()
        )
        self._types = -1 if is_written else types
        return is_written

    def _find(
        self, name: str, stamp: FileStamp, source: Source, patterns: list[_Pattern]
    ) -> _Layouts:
        for number, pattern in enumerate(patterns):
            found = pattern.layouts_of(name, stamp, source)
            if found:
                patterns.insert(0, patterns.pop(number))  # the next file is probably like it
                return found
        return {}


class _Pattern(NamedTuple):
    """The common metadata of files that are alike.

    They have the bytes `data` at `places`, wherever `fixed` is 255. A file has at least `end`
    bytes; `end_at` is where in `data` it declares its size, -1 if that is among the fixed bytes.
    """

    datasets: Mapping[str, _Dataset]
    places: tuple[Sequence[int], Sequence[int]]  # offsets and lengths
    data: NDArray[np.uint8]
    fixed: NDArray[np.uint8]
    end: int
    end_at: int
    device: int

    def layouts_of(self, name: str, stamp: FileStamp, source: Source) -> _Layouts:
        """Return the layouts of a file; none if it does not match."""
        if stamp.nbytes < self.end or stamp.device != self.device:
            return {}
        data = b"".join(source.get_ranges(*self.places))
        if ((np.frombuffer(data, np.uint8) ^ self.data) & self.fixed).any():
            return {}
        if self.end_at >= 0 and not self.end <= _number(data, self.end_at) <= stamp.nbytes:
            return {}
        path, found = absolute_name(name), _Layouts()
        for field, dataset in self.datasets.items():
            layout = dataset.layout_in(data, path, stamp)
            if layout is None:
                return {}
            found[field] = layout
        return found


class _Dataset(NamedTuple):
    """A dataset: its layout, and where in a pattern the facts lie that may differ; -1: nowhere.

    These are its first extent; the maximum of that extent, if both are equal; the size of
    contiguous values; and the node that lists its chunks.
    """

    layout: DatasetLayout
    rows_at: int = -1
    most_at: int = -1
    nbytes_at: int = -1
    node: _Node | None = None

    def layout_in(self, data: bytes, path: str, stamp: FileStamp) -> DatasetLayout | None:
        """Return its layout in another file; None if HDF5 or our own checks would reject it."""
        layout, known = self.layout, self.layout.indexed
        assert known is not None
        shape, rest, nbytes = known.shape, layout.shape[len(known.shape) :], layout.stored_nbytes
        chunks = layout.chunks
        if self.rows_at >= 0:
            shape = _number(data, self.rows_at), *shape[1:]
            if self.most_at >= 0 and _number(data, self.most_at) != shape[0]:
                return None
        if self.nbytes_at >= 0:
            nbytes = math.prod(shape) * layout.stored_itemsize
            if _number(data, self.nbytes_at) != nbytes or not nbytes:
                return None
        if self.node is not None:
            if self.most_at >= 0 and shape[0] < self.node.extents[0]:
                return None
            chunks = self.node.chunks(shape, data, stamp.nbytes)
            if chunks is None:
                return None
            nbytes, chunks = int(chunks.nbytes.sum()), chunks.shortened()
        elif layout.offset + nbytes > stamp.nbytes:
            return None
        return layout.changed(
            file=path,
            stamp=stamp,
            shape=(*shape, *rest),
            stored_nbytes=nbytes,
            indexed=Indexed(known.digest, shape),
            chunks=chunks,
        )


class _Node(NamedTuple):
    """Where a pattern lists the chunks of a dataset: `at` is the first entry.

    `extents` are those of a chunk; `nbytes` is its stored size, 0 for any.
    """

    at: int
    extents: tuple[int, ...]
    itemsize: int
    nbytes: int
    entry: np.dtype[Any]

    def chunks(self, shape: tuple[int, ...], data: bytes, end: int) -> ChunkTable | None:
        """Return the chunks of a dataset of this shape; None if our checks would reject them."""
        grid = grid_of(shape, self.extents)
        count, begin = math.prod(grid), self.at - _NODE_HEAD_NBYTES
        if not 0 < count <= _MOST_ENTRIES:
            return None
        if not data.startswith(_LEAF + count.to_bytes(2, "little"), begin):
            return None
        entries = np.frombuffer(data, self.entry, count, self.at)
        if entries["corner"].tobytes() != _corners(grid, self.extents):
            return None
        # After the entries comes a corner beyond that of the last chunk.
        behind = np.frombuffer(data, "<u8", len(shape) + 1, self.at + entries.nbytes + 8)
        ahead, steps = (behind - entries["corner"][-1]).tolist(), (*self.extents, self.itemsize)
        if not ahead[-1] or any(n not in (0, step) for n, step in zip(ahead, steps, strict=True)):
            return None
        offset, nbytes = entries["offset"].astype(np.int64), entries["nbytes"].astype(np.int64)
        if offset.max() > end or not (nbytes == self.nbytes if self.nbytes else nbytes).all():
            return None
        order = offset.argsort()
        ends = offset + nbytes
        is_apart = (offset[order[1:]] >= ends[order[:-1]]).all()
        if not is_apart or offset[order[0]] < _SUPERBLOCK_NBYTES or ends[order[-1]] > end:
            return None
        return ChunkTable(None, offset, nbytes, entries["mask"].astype(np.uint32))


@functools.lru_cache(maxsize=64)
def _corners(grid: tuple[int, ...], extents: tuple[int, ...]) -> bytes:
    """Return the corners of a grid of chunks as a node lists them, each with an element offset."""
    corners = np.indices((*grid, 1), "<u8").reshape(len(grid) + 1, -1).T
    return bytes((corners * np.array([*extents, 1], "<u8")).astype("<u8"))


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


# --- recording a pattern -------------------------------------------------------------------------


class _Noting(MetadataFile):
    """A Python file object over an open source that records the ranges read from it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.ranges: list[_Range] = []

    def _read(self, at: int, nbytes: int) -> memoryview:
        self.ranges.append((at, at + nbytes))
        return memoryview(self.source.get_ranges([at], [nbytes])[0])


def _noted(
    name: str, stamp: FileStamp, source: Source, read: _Read
) -> tuple[_Layouts, _Pattern | None]:
    """Return the layouts of a file, and its pattern; None if no other file could match that."""
    noting = _Noting(source)
    with open_over(noting, name) as file:
        layouts = read(file)
        ranges = tuple(noting.ranges)  # without those that `_Maker` reads
        if not layouts or not all(_is_plain(one, name) for one in layouts.values()):
            return layouts, None
        runs = _runs(ranges)
        if sum(end - begin for begin, end in runs) > _MOST_NBYTES:
            return layouts, None
        with suppressing(ValueError, NotDirectError):
            return layouts, _Maker(file, runs, ranges).pattern(layouts, stamp)
        return layouts, None


def _runs(ranges: Iterable[_Range]) -> list[_Range]:
    """Merge ranges that overlap, or have small gaps between them."""
    runs: list[_Range] = []
    for begin, end in sorted(ranges):
        if runs and begin <= runs[-1][1] + _GAP_NBYTES:
            begin, end = runs[-1][0], max(end, runs.pop()[1])
        runs.append((begin, end))
    return runs


def _is_plain(layout: DatasetLayout, name: str) -> bool:
    """Return whether a layout depends on nothing but where values lie in the file itself."""
    is_alone = layout.segments is None and not (layout.sources or layout.attached)
    is_direct = layout.fallback_reason is None and not layout.has_raw_edges
    is_stored = layout.filters == layout.hdf5_filters and layout.sequences is None
    is_usual = layout.storage in ("contiguous", "chunked") and layout.file == absolute_name(name)
    return is_alone and is_direct and is_stored and is_usual


class _Maker:
    """Makes the pattern of an open file; HDF5 has read `ranges` of it, which `runs` cover."""

    def __init__(self, file: HDF5File, runs: Sequence[_Range], ranges: Sequence[_Range]) -> None:
        self._file, self._runs = file, runs
        self._places = [begin for begin, _ in runs], [end - begin for begin, end in runs]
        self._data = b"".join(file.source.get_ranges(*self._places))
        self._read = np.zeros(len(self._data), np.uint8)
        for begin, end in ranges:
            at = self._at(begin, end - begin)
            self._read[at : at + end - begin] = 255
        self._fixed = self._read.copy()

    def pattern(self, layouts: _Layouts, stamp: FileStamp) -> _Pattern | None:
        """Return the pattern; None for a kind of file that is not supported."""
        data, end, end_at = self._data, stamp.nbytes, -1
        if self._runs[0][0] or not data.startswith(SIGNATURE):
            return None
        version = data[len(SIGNATURE)]
        if version > 1 and data[_FLAGS_AT]:
            return None
        if version == 0 and data[_SIZES_AT : _SIZES_AT + 2] == b"\x08\x08":
            if not _number(data, _BASE_AT):
                end_at, end = _END_AT, self._runs[-1][1]
        if end_at < 0:
            datasets = {name: _Dataset(layout) for name, layout in layouts.items()}
        else:
            datasets = {name: self._dataset(layout) for name, layout in layouts.items()}
            self._vary(end_at, 8)
        values = np.frombuffer(data, np.uint8)
        return _Pattern(datasets, self._places, values, self._fixed, end, end_at, stamp.device)

    def _at(self, begin: int, nbytes: int) -> int:
        """Return the offset of a range of the file in the pattern; ValueError if not in it."""
        before = 0
        for first, last in self._runs:
            if first <= begin and begin + nbytes <= last:
                return before + begin - first
            before += last - first
        raise ValueError("HDF5 has not read it")

    def _vary(self, begin: int, nbytes: int) -> int:
        """Allow a range of the file to differ; return its offset in the pattern."""
        at = self._at(begin, nbytes)
        self._fixed[at : at + nbytes] = 0
        return at

    def _dataset(self, layout: DatasetLayout) -> _Dataset:
        """Allow parts of a dataset's metadata to differ; ValueError if stored unusually."""
        dataset = Opened(h5py.h5o.open(self._file.id, layout.path.encode()), self._file.source)
        place, stored = message_of(dataset, LAYOUT)
        node = None
        if layout.chunks is None:
            expected = layout.offset, math.prod(dataset.extents) * layout.stored_itemsize
            if stored[:2] != b"\3\1" or (_number(stored, 2), _number(stored, 10)) != expected:
                return _Dataset(layout)
        elif not layout.chunks.offset.size:
            return _Dataset(layout)
        else:
            node = self._node(layout, dataset, stored)
        rows_at, most_at = self._rows(dataset)
        nbytes_at = self._vary(place + 10, 8) if rows_at >= 0 and node is None else -1
        return _Dataset(layout, rows_at, most_at, nbytes_at, node)

    def _rows(self, dataset: Opened) -> tuple[int, int]:
        """Allow a dataset's first extent and its maximum to differ; return where; -1: fixed."""
        header = self._at(int(h5py.h5o.get_info(dataset.id).addr), 1)
        place, space = message_of(dataset, DATASPACE)
        rank, has_most = len(dataset.extents), space[2]
        if self._data[header] != 1:
            return -1, -1
        with suppressing(NotDirectError):  # there is no modification time
            self._vary(message_of(dataset, MODIFIED)[0] + 4, 4)
        is_usual = space[:2] == bytes([1, rank]) and has_most < 2
        if not is_usual or len(space) < 8 + 8 * rank * (1 + has_most):
            return -1, -1
        rows, most = _number(space, 8), _number(space, 8 + 8 * rank)
        if has_most and most not in (rows, _UNLIMITED):
            return -1, -1
        is_same = has_most and most == rows
        most_at = self._vary(place + 8 + 8 * rank, 8) if is_same else -1
        return self._vary(place + 8, 8), most_at

    def _node(self, layout: DatasetLayout, dataset: Opened, stored: bytes) -> _Node:
        """Allow the chunks of a dataset to differ; return where they are listed."""
        rank, known = len(dataset.chunks), layout.chunks
        if stored[:3] != bytes([3, 2, rank + 1]) or known is None or known.index is not None:
            raise ValueError("its chunks are listed in another way")
        entry = np.dtype(
            {
                "names": ["nbytes", "mask", "corner", "offset"],
                "formats": ["<u4", "<u4", ("<u8", (rank + 1,)), "<i8"],
                "offsets": [0, 4, 8, 16 + 8 * rank],
                "itemsize": 24 + 8 * rank,
            }
        )
        whole = _NODE_HEAD_NBYTES + (_MOST_ENTRIES + 1) * entry.itemsize - 8
        place = _number(stored, 3)
        at, itemsize = self._at(place, whole), layout.stored_itemsize
        nbytes = 0 if layout.filters else math.prod(dataset.chunks) * itemsize
        node = _Node(at + _NODE_HEAD_NBYTES, dataset.chunks, itemsize, nbytes, entry)
        found = node.chunks(dataset.extents, self._data, dataset.end)
        if found is None or not self._read[at : at + whole].all() or not _are_equal(found, known):
            raise ValueError("its chunks are not listed by one node")
        self._vary(place + len(_LEAF), 2)
        self._vary(place + _NODE_HEAD_NBYTES, whole - _NODE_HEAD_NBYTES)
        return node


def _are_equal(one: ChunkTable, other: ChunkTable) -> bool:
    names = "offset", "nbytes", "filter_mask"
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
