"""Finds the layouts of files whose metadata match those of another file, without HDF5.

HDF5's answers about a file depend only on the bytes that it reads. These are recorded once, for one
file of a collection, as a pattern: a file with the same bytes in the same places has the same
layouts. All other files are left to HDF5, which also produces the errors.

If all of these structures are known (superblocks, object headers, groups that are not large), a
file has them where its addresses lead to, and the following may differ, too, and is checked like
HDF5's answers:

- The end of the file, the addresses, and checksums.
- A dataset's first extent, times, and the address of its contiguous values.
- The chunks in a version 1 B-tree of one or two levels, or a fixed array, if none is missing.
- The values of attributes, if none is asked for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.index.hdf5 import FIXED_ARRAY, NotDirectError, Opened, checksum_function
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.storedtypes import DATASPACE, LAYOUT, message_of
from h5async.index.tables import ChunkTable
from h5async.index.visits import ChunkArray, ChunkTree, has_checksum
from h5async.io.hdf5files import HDF5File
from h5async.io.indexreferences import NONSENSE, Place
from h5async.io.metadatafile import MetadataFile
from h5async.io.references import (
    SIGNATURE,
    Structure,
    changeable,
    structures,
)
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

FEW_FILES = 8  # read before a pattern is recorded, which takes as long as reading three files
MANY_FILES = 64  # from here on recording pays, even if a few patterns match nothing
_PRICE = 256  # credit that recording a pattern costs; a file that HDF5 reads earns 1,
_FOUND = 32  # and a file that matches a pattern earns this
_MOST_MISSES = 6  # consecutive files without a match, after which the patterns are dropped
_MOST_PATTERNS = 4  # kept per key
_MOST_NBYTES = 1 << 16  # of a pattern
_GAP_NBYTES = 1 << 10  # between ranges that are read as one
_MOST_OPEN = 256  # objects open in HDF5; if there are more, one of them may be written
_ALL = h5py.h5f.OBJ_ALL

_END_AT = {0: 40, 2: 28, 3: 28}  # in a superblock, by its version: the end of the file
_ASKED = (b"categories",)  # values of attributes that are always asked for
_FLAGS_AT = 11  # from version 2 on: whether the file is open for writing
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

    def layouts(self, name: str, key: _Key, read: _Read, *, asks_attributes: bool) -> _Layouts:
        """Return the layouts of a local file; none if HDF5 is needed to read them.

        `key` identifies the wanted layouts; `read` reads them from an open file, or returns none if
        they depend on more than its bytes. `asks_attributes`: they depend on values of attributes.
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
                found, pattern = _noted(name, stamp, source, read, asks_attributes)
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


class _Run(NamedTuple):
    """Bytes that are read at once: at `begin` in the recorded file.

    In other files they begin `ahead` bytes before the address that lies `at` in the bytes of the
    runs before; -1: they have the same place in all files.
    """

    begin: int
    nbytes: int
    at: int = -1
    ahead: int = 0


class _Pattern(NamedTuple):
    """The common metadata of files that are alike.

    They have the bytes `data`, those of all `runs`, wherever `fixed` is 255. `leads` are addresses:
    where they are in `data`, the number of the run that they lead to, and the byte of it; `sums`,
    ranges of `data` that end with a checksum. A file has at least `end` bytes; `end_at` is where in
    `data` it declares its size, -1 if that is among the fixed bytes.
    """

    datasets: Mapping[str, _Dataset]
    runs: Sequence[_Run]
    data: NDArray[np.uint8]
    fixed: NDArray[np.uint8]
    leads: NDArray[np.int64]
    sums: Sequence[_Range]
    end: int
    end_at: int
    device: int

    def layouts_of(self, name: str, stamp: FileStamp, source: Source) -> _Layouts:
        """Return the layouts of a file; none if it does not match."""
        data, begins = b"", list[int]()
        if stamp.nbytes < self.end or stamp.device != self.device:
            return {}
        for run in self.runs:
            begin = run.begin if run.at < 0 else _number(data, run.at) - run.ahead
            if not 0 <= begin <= stamp.nbytes - run.nbytes:
                return {}
            data += source.get_ranges([begin], [run.nbytes])[0]
            begins.append(begin)
        values, end = np.frombuffer(data, np.uint8), stamp.nbytes
        if ((values ^ self.data) & self.fixed).any():
            return {}
        if self.end_at >= 0:
            end = _number(data, self.end_at)
            last = max(begin + run.nbytes for begin, run in zip(begins, self.runs, strict=True))
            at, led, inside = self.leads.T
            targets = values[at[:, None] + np.arange(8)].view("<i8")[:, 0]
            is_same = (targets - inside == np.array(begins)[led]).all()
            if not last <= end <= stamp.nbytes or not is_same:
                return {}
        if not all(has_checksum(data[slice(*one)]) for one in self.sums):
            return {}
        path, found = absolute_name(name), _Layouts()
        for field, dataset in self.datasets.items():
            layout = dataset.layout_in(data, path, stamp, source, end)
            if layout is None:
                return {}
            found[field] = layout
        return found


class _Dataset(NamedTuple):
    """A dataset: its layout, and where in a pattern the facts lie that may differ; -1: nowhere.

    These are its first extent; the maximum of that extent, if both are equal; the address and size
    of contiguous values; and the address of the index that lists its chunks.
    """

    layout: DatasetLayout
    rows_at: int = -1
    most_at: int = -1
    offset_at: int = -1
    nbytes_at: int = -1
    chunks_at: int = -1
    listing: ChunkTree | ChunkArray | None = None

    def layout_in(
        self, data: bytes, path: str, stamp: FileStamp, source: Source, end: int
    ) -> DatasetLayout | None:
        """Return its layout in another file, which ends at `end`; None if HDF5 or we reject it."""
        layout, known = self.layout, self.layout.indexed
        assert known is not None
        shape, rest, nbytes = known.shape, layout.shape[len(known.shape) :], layout.stored_nbytes
        offset = layout.offset if self.offset_at < 0 else _number(data, self.offset_at)
        chunks = layout.chunks
        if self.rows_at >= 0:
            shape = _number(data, self.rows_at), *shape[1:]
            if self.most_at >= 0 and _number(data, self.most_at) != shape[0]:
                return None
        if self.nbytes_at >= 0:
            nbytes = math.prod(shape) * layout.stored_itemsize
            if _number(data, self.nbytes_at) != nbytes or not nbytes:
                return None
        if self.listing is not None:
            if self.most_at >= 0 and shape[0] < self.listing.extents[0]:
                return None
            chunks = self.listing.chunks(shape, _number(data, self.chunks_at), end, source)
            if chunks is None:
                return None
            nbytes, chunks = int(chunks.nbytes.sum()), chunks.shortened()
        elif not offset or offset + nbytes > end:
            return None
        return layout.changed(
            file=path,
            stamp=stamp,
            shape=(*shape, *rest),
            stored_nbytes=nbytes,
            indexed=Indexed(known.digest, shape),
            offset=offset,
            chunks=chunks,
        )


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
    name: str, stamp: FileStamp, source: Source, read: _Read, asks_attributes: bool
) -> tuple[_Layouts, _Pattern | None]:
    """Return the layouts of a file, and its pattern; None if no other file could match that."""
    beginning = source.read(0, _FLAGS_AT + 1)
    if not beginning.startswith(SIGNATURE) or (beginning[8] > 1 and beginning[_FLAGS_AT]):
        return {}, None  # (of files that may be open for writing, only HDF5's own driver says so)
    noting = _Noting(source)
    with open_over(noting, name) as file:
        layouts = read(file)
        ranges = tuple(noting.ranges)  # without those that `_Maker` reads
        if not layouts or not all(_is_plain(one, name) for one in layouts.values()):
            return layouts, None
        with suppressing(*NONSENSE, NotDirectError):
            return layouts, _Maker(file, ranges, asks_attributes).pattern(layouts, stamp)
        return layouts, None


def _runs(ranges: Iterable[_Range], gap_nbytes: int) -> list[_Range]:
    """Merge ranges that overlap, or have small gaps between them."""
    runs: list[_Range] = []
    for begin, end in sorted(ranges):
        if runs and begin <= runs[-1][1] + gap_nbytes:
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
    """Makes the pattern of an open file, of which HDF5 has read `ranges`."""

    def __init__(self, file: HDF5File, ranges: Sequence[_Range], asks_attributes: bool) -> None:
        self._file, self._asks_attributes = file, asks_attributes
        found = self._find_structures(ranges)
        self._structures = [one for one in found if one.kind != "chunks"]
        self._indices = {one.offset for one in found if one.kind == "chunks"}
        if self._structures:
            ranges = [(one.offset, one.offset + one.nbytes) for one in self._structures]
        gap_nbytes = 0 if self._structures else _GAP_NBYTES  # in which others may lie
        self._runs = [_Run(begin, end - begin) for begin, end in _runs(ranges, gap_nbytes)]
        if sum(run.nbytes for run in self._runs) > _MOST_NBYTES:
            raise ValueError("HDF5 has read much")
        self._starts = {one.offset for one in self._structures}
        self._leads = [lead for one in self._structures for lead in one.addresses]
        if self._structures:
            self._runs = self._in_order_found()
        places = [run.begin for run in self._runs], [run.nbytes for run in self._runs]
        self._data = b"".join(file.source.get_ranges(*places))
        self._fixed = np.zeros(len(self._data), np.uint8)
        for begin, end in ranges:
            at = self._at(begin, end - begin)
            self._fixed[at : at + end - begin] = 255

    def pattern(self, layouts: _Layouts, stamp: FileStamp) -> _Pattern:
        """Return the pattern; ValueError for a kind of file that is not supported."""
        data, fixed, end, end_at = self._data, self._fixed, stamp.nbytes, -1
        pointers, sums = list[tuple[int, int, int]](), list[_Range]()
        read, asked = self._file.source.read, None if self._asks_attributes else _ASKED
        if self._structures:
            datasets = {name: self._dataset(layout) for name, layout in layouts.items()}
            end, end_at = 0, self._vary(_END_AT[data[len(SIGNATURE)]], 8)
            for place, target, is_link in self._leads:
                if target in self._starts:
                    led = self._run_at(target)
                    pointers.append((self._vary(place, 8), led, target - self._runs[led].begin))
                elif is_link:
                    self._vary(place, 8)
                elif target in self._indices and fixed[self._at(place, 8)]:
                    raise ValueError("an index of other chunks")
            for one in self._structures:
                if one.has_checksum:
                    at = self._at(one.offset, one.nbytes)
                    sums.append((at, at + one.nbytes))
                    self._vary(one.offset + one.nbytes - 4, 4)
                if one.kind == "header":
                    for place, nbytes in changeable(read, one.offset, asked):
                        self._vary(place, nbytes)
        else:
            datasets = {name: _Dataset(layout) for name, layout in layouts.items()}
        values, runs = np.frombuffer(data, np.uint8), self._runs
        leads = np.array(pointers, np.int64).reshape(-1, 3)
        return _Pattern(datasets, runs, values, fixed, leads, sums, end, end_at, stamp.device)

    def _find_structures(self, ranges: Sequence[_Range]) -> list[Structure]:
        """Return the structures that HDF5 has read; none if it has read others, too."""
        begins = {begin for begin, _ in ranges}

        def is_read(place: Place, is_header: bool) -> bool:
            """Return whether HDF5 needs a structure: it reads more than the header it wants."""
            if is_header:
                return place.offset in begins
            first, last = place.offset, place.offset + place.nbytes
            return any(begin < last and first < end for begin, end in ranges)

        with suppressing(*NONSENSE):
            found = list(structures(self._file.source.read, is_read))
            superblock = range(found[0].nbytes)  # which HDF5 reads in parts
            known = {*superblock, *(one.offset for one in found)}
            has_checksum = any(one.has_checksum for one in found)
            if begins <= known and not (has_checksum and checksum_function() is None):
                return found
        return []

    def _in_order_found(self) -> list[_Run]:
        """Return the runs, each after one with an address that leads to it, by which it is found.

        ValueError if there is no such order.
        """
        numbers, order, found = [0], [self._runs[0]], True
        while found and len(order) < len(self._runs):
            found = False
            for place, target, _ in self._leads:
                if target not in self._starts:
                    continue
                by, led = self._run_at(place), self._run_at(target)
                if by in numbers and led not in numbers:
                    run, of = self._runs[led], numbers.index(by)
                    before = sum(one.nbytes for one in order[:of])
                    at, found = before + place - order[of].begin, True
                    order.append(run._replace(at=at, ahead=target - run.begin))
                    numbers.append(led)
        if not found:
            raise ValueError("no address leads to metadata that HDF5 has read")
        return order

    def _run_at(self, place: int) -> int:
        """Return the number of the run in which a place in the file lies."""
        for number, run in enumerate(self._runs):
            if run.begin <= place < run.begin + run.nbytes:
                return number
        raise ValueError("HDF5 has not read it")

    def _at(self, begin: int, nbytes: int) -> int:
        """Return the offset of a range of the file in the pattern; ValueError if not in it."""
        before = 0
        for run in self._runs:
            if run.begin <= begin and begin + nbytes <= run.begin + run.nbytes:
                return before + begin - run.begin
            before += run.nbytes
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
        is_known, listing = stored[0] in (3, 4, 5) and stored[1] == 1, None
        if layout.chunks is None:
            expected = layout.offset, math.prod(dataset.extents) * layout.stored_itemsize
            if not is_known or (_number(stored, 2), _number(stored, 10)) != expected:
                return _Dataset(layout)
        elif not layout.chunks.offset.size:
            return _Dataset(layout)
        else:
            chunks_at, listing = self._listing(layout, dataset, place, stored)
        rows_at, most_at = self._rows(dataset)
        if listing is not None:
            return _Dataset(layout, rows_at, most_at, chunks_at=chunks_at, listing=listing)
        nbytes_at = self._vary(place + 10, 8) if rows_at >= 0 else -1
        return _Dataset(layout, rows_at, most_at, self._vary(place + 2, 8), nbytes_at)

    def _rows(self, dataset: Opened) -> tuple[int, int]:
        """Allow a dataset's first extent and its maximum to differ; return where; -1: fixed."""
        place, space = message_of(dataset, DATASPACE)
        version, rank, has_most = space[:3]
        at = 8 if version == 1 else 4
        is_usual = version < 3 and has_most < 2 and rank == len(dataset.extents)
        if not is_usual or len(space) < at + 8 * rank * (1 + has_most):
            return -1, -1
        rows, most = _number(space, at), _number(space, at + 8 * rank)
        if has_most and most not in (rows, _UNLIMITED):
            return -1, -1
        is_same = has_most and most == rows
        most_at = self._vary(place + at + 8 * rank, 8) if is_same else -1
        return self._vary(place + at, 8), most_at

    def _listing(
        self, layout: DatasetLayout, dataset: Opened, place: int, stored: bytes
    ) -> tuple[int, ChunkTree | ChunkArray]:
        """Allow the chunks of a dataset to differ; return where the address of their index is."""
        extents, known, source = dataset.chunks, layout.chunks, self._file.source
        listing: ChunkTree | ChunkArray
        nbytes = 0 if layout.filters else math.prod(extents) * layout.stored_itemsize
        at = 3 if stored[0] == 3 else len(stored) - 8
        address = _number(stored, at)
        if stored[0] == 3:
            listing = ChunkTree(extents, layout.stored_itemsize, nbytes)
        elif dataset.index_kind == FIXED_ARRAY:
            listing = ChunkArray(extents, source.read(address, 8), nbytes)
        else:
            raise ValueError("another kind of chunk index")
        found = listing.chunks(dataset.extents, address, dataset.end, source)
        if (
            found is None
            or known is None
            or known.index is not None
            or not _are_equal(found, known)
        ):
            raise ValueError("its chunks are listed in another way")
        return self._vary(place + at, 8), listing


def _are_equal(one: ChunkTable, other: ChunkTable) -> bool:
    names = "offset", "nbytes", "filter_mask"
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
