"""Finds the layouts of files whose metadata match those of another file, without HDF5.

HDF5's answers about a file depend only on the bytes that it reads. These are recorded once, for one
file of a collection, as a pattern: a file with the same bytes in the same places has the same
layouts. All other files are left to HDF5, which also produces the errors.

What HDF5 reads next depends only on what it has read. So if all of these structures are known
(superblocks, object headers, groups that are not large), another file may have them in other
places: each address by which HDF5 can have come to one either has the same bytes and leads to bytes
that are the same, too, or is followed here. (Messages that lead to other objects, such as committed
datatypes, are neither; files with them have fixed places.) The following may differ, too, because
HDF5 does not interpret it, or because it is checked like HDF5's answers:

- The end of the file, the addresses, and checksums.
- A dataset's first extent, times, and the address of its contiguous values.
- The chunks in a version 1 B-tree of one or two levels, or a fixed array, if none is missing.
- The values of attributes, if none is asked for; there must be none with the name `categories`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import H5AsyncError
from h5async.index.alikedatasets import AlikeDataset, Recorded, is_plain, number
from h5async.index.hdf5 import NotDirectError, checksum_function
from h5async.index.layout import DatasetLayout
from h5async.index.visits import has_checksum
from h5async.io.hdf5files import HDF5File
from h5async.io.indexreferences import NONSENSE, Place
from h5async.io.metadatafile import MetadataFile
from h5async.io.references import SIGNATURE, Structure, structures
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
_FLAGS_AT = 11  # from version 2 on: whether the file is open for writing


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
        self._retried: set[_Key] = set()
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
                if key not in self._retried:  # the first file may have been an odd one
                    self._retried.add(key)
                    self._credit[key] += _PRICE
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
        for rank, pattern in enumerate(patterns):
            found = _Layouts()
            with suppressing(ValueError, H5AsyncError):  # a structure is not where it should be
                found = pattern.layouts_of(name, stamp, source)
            if found:
                patterns.insert(0, patterns.pop(rank))  # the next file is probably like it
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

    They have the bytes that are `recorded`, those of all `runs`. `leads` are addresses: where they
    are in these bytes, the number of the run that they lead to, and the byte of it; `sums`, ranges
    that end with a checksum. A file has at least `end` bytes; `end_at` is where it declares its
    size, -1 if that is among the fixed bytes.
    """

    datasets: Mapping[str, AlikeDataset]
    runs: Sequence[_Run]
    recorded: Recorded
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
            begin = run.begin if run.at < 0 else number(data, run.at) - run.ahead
            if not 0 <= begin <= stamp.nbytes - run.nbytes:
                return {}
            data += source.get_ranges([begin], [run.nbytes])[0]
            begins.append(begin)
        if not self.recorded.is_like(data):
            return {}
        end = stamp.nbytes
        if self.end_at >= 0:
            end = number(data, self.end_at)
            last = max(begin + run.nbytes for begin, run in zip(begins, self.runs, strict=True))
            at, led, inside = self.leads.T
            targets = np.frombuffer(data, np.uint8)[at[:, None] + np.arange(8)].view("<i8")[:, 0]
            is_same = (targets - inside == np.array(begins)[led]).all()
            if not last <= end <= stamp.nbytes or not is_same:
                return {}
        if not all(has_checksum(data[slice(*one)]) for one in self.sums):
            return {}
        path, found = absolute_name(name), _Layouts()
        for field, dataset in self.datasets.items():
            layout = dataset.layout_in(data, path, dataset.layout.path, stamp, source, end)
            if layout is None:
                return {}
            found[field] = layout
        return found


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
        layouts, path = read(file), absolute_name(name)
        ranges = tuple(noting.ranges)  # without those that `_Maker` reads
        if not layouts or not all(is_plain(one) and one.file == path for one in layouts.values()):
            return layouts, None
        for found in _structures_read(source, ranges), ():
            with suppressing(*NONSENSE, NotDirectError):
                maker = _Maker(file, ranges, found)
                return layouts, maker.pattern(layouts, stamp, asks_attributes=asks_attributes)
        return layouts, None


def _structures_read(source: Source, ranges: Sequence[_Range]) -> Sequence[Structure]:
    """Return the structures that HDF5 has read; none if it has read others, too."""
    begins = {begin for begin, _ in ranges}

    def is_read(place: Place, is_header: bool) -> bool:
        """Return whether HDF5 needs a structure: it reads more than the header it wants."""
        if is_header:
            return place.offset in begins
        first, last = place.offset, place.offset + place.nbytes
        return any(begin < last and first < end for begin, end in ranges)

    with suppressing(*NONSENSE):
        found = list(structures(source.read, is_read))
        superblock = range(found[0].nbytes)  # which HDF5 reads in parts
        known = {*superblock, *(one.offset for one in found)}
        has_checksum = any(one.has_checksum for one in found)
        if begins <= known and not (has_checksum and checksum_function() is None):
            return found
    return ()


def _runs(ranges: Iterable[_Range], gap_nbytes: int) -> list[_Range]:
    """Merge ranges that overlap, or have small gaps between them."""
    runs: list[_Range] = []
    for begin, end in sorted(ranges):
        if runs and begin <= runs[-1][1] + gap_nbytes:
            begin, end = runs[-1][0], max(end, runs.pop()[1])
        runs.append((begin, end))
    return runs


class _Maker:
    """Makes the pattern of an open file, of which HDF5 has read `ranges`: the `structures`.

    Without structures, all bytes are fixed, and in the same places.
    """

    def __init__(
        self, file: HDF5File, ranges: Sequence[_Range], structures: Sequence[Structure]
    ) -> None:
        self._file, gap_nbytes = file, _GAP_NBYTES
        self._structures = [one for one in structures if one.kind != "chunks"]
        if self._structures:
            gap_nbytes = 0  # in which other structures may lie
            ranges = sorted((one.offset, one.offset + one.nbytes) for one in self._structures)
            if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges)):
                raise ValueError("structures overlap")
        runs = _runs(ranges, gap_nbytes)
        if sum(end - begin for begin, end in runs) > _MOST_NBYTES:
            raise ValueError("HDF5 has read much")
        self._runs = [_Run(begin, end - begin) for begin, end in runs]
        self._number: dict[int, int] = {}  # of the run of each structure, by its offset
        if self._structures:
            self._order_as_found()
        self._recorded = Recorded(file.source, [run[:2] for run in self._runs])
        for begin, end in ranges:
            self._recorded.fix(begin, end - begin)

    def pattern(self, layouts: _Layouts, stamp: FileStamp, *, asks_attributes: bool) -> _Pattern:
        """Return the pattern; ValueError for a kind of file that is not supported."""
        known, end, end_at = self._recorded, stamp.nbytes, -1
        leads, sums = list[tuple[int, int, int]](), list[_Range]()
        if self._structures:
            datasets = {
                name: known.vary_dataset(self._file, layout) for name, layout in layouts.items()
            }
            end, end_at = 0, known.vary(_END_AT[known.data[len(SIGNATURE)]], 8)
        else:
            datasets = {name: AlikeDataset(layout) for name, layout in layouts.items()}
        for one in self._structures:
            for place, target, may_ignore in one.addresses:
                if target in self._number:
                    led = self._number[target]
                    leads.append((known.vary(place, 8), led, target - known.runs[led][0]))
                elif may_ignore:
                    known.vary(place, 8)
            if one.has_checksum:
                at = known.at(one.offset, one.nbytes)
                sums.append((at, at + one.nbytes))
                known.vary(one.offset + one.nbytes - 4, 4)
            if one.kind == "header":
                known.vary_header(one.offset, asks_attributes=asks_attributes)
        table = np.array(leads, np.int64).reshape(-1, 3)
        return _Pattern(datasets, self._runs, known, table, sums, end, end_at, stamp.device)

    def _order_as_found(self) -> None:
        """Put each run after one with an address that leads to it, by which it is found."""
        begins, order = [run.begin for run in self._runs], [self._runs[0]]
        starts = {one.offset: bisect_right(begins, one.offset) - 1 for one in self._structures}
        # By the old number of a run: the new one, and where its bytes are in the new order.
        number, at, nbytes = {0: 0}, {0: 0}, order[0].nbytes
        for one in self._structures:
            by = starts[one.offset]
            for place, target, _ in one.addresses:
                led = starts.get(target, 0)
                if led not in number:
                    run = self._runs[led]
                    where = at[by] + place - self._runs[by].begin
                    order.append(run._replace(at=where, ahead=target - run.begin))
                    number[led], at[led] = len(number), nbytes
                    nbytes += run.nbytes
        self._runs, self._number = order, {place: number[old] for place, old in starts.items()}
