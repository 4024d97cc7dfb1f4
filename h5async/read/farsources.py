"""Gets bytes of the sources of the core that are no local files.

Byte ranges enter; they leave in memory, where the core finds them by a table.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import Kept
from h5async.core.binding import Core, address
from h5async.core.http import http_client
from h5async.errors import H5AsyncError, ReaderClosedError, ReadError, failed_read
from h5async.index.extents import SourceFile
from h5async.io.diskcache import disk_cache
from h5async.io.source import MappedMirror, Source, SourceOver, replaced
from h5async.io.stores import LocalState, store_of
from h5async.plan.fetches import ByteRanges, Places, extents_of, requests_of
from h5async.read.scratch import CLOSED

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

Part = tuple[int, NDArray[np.uint8]]  # of a source: its place, and its bytes


class Held(NamedTuple):
    """Ranges in memory: the core's table of the parts of sources that have them, and these."""

    ranges: ByteRanges
    table: NDArray[Any]
    parts: Sequence[Part]


class FetchCounts(NamedTuple):
    """What was done so far, summed over all requests, and over all batches."""

    requests: int = 0
    requested_nbytes: int = 0
    used_nbytes: int = 0  # that batches read, each byte once a batch
    flight_ns: int = 0  # that requests were on their way
    waited_ns: int = 0  # between the request for a batch, and the last of its bytes
    retries: int = 0  # requests that were repeated, as far as the client tells
    quickest_ns: int = 0  # of any call; 0: there was none

    def plus(self, other: FetchCounts, times: int = 1) -> FetchCounts:
        """Return the sum of all counts, of `other` so often, and the quickest call."""
        quickest_ns = min(filter(None, (self.quickest_ns, other.quickest_ns)), default=0)
        sums = (mine + times * others for mine, others in zip(self, other, strict=True))
        return FetchCounts(*sums)._replace(quickest_ns=quickest_ns)


class _Counted(SourceOver):
    """A source whose requests are counted."""

    def __init__(self, source: Source, count: Callable[[FetchCounts], None]) -> None:
        super().__init__(source)
        self._count = count

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges; see `Source.get_ranges`."""
        begin_ns = time.perf_counter_ns()
        try:
            return self.source.get_ranges(offsets, lengths)
        finally:
            taken_ns, count = time.perf_counter_ns() - begin_ns, len(offsets)
            done = FetchCounts(count, sum(lengths), flight_ns=count * taken_ns)
            self._count(done._replace(quickest_ns=taken_ns))


def is_far(file: SourceFile, kept: Kept | None) -> bool:
    """Tell whether a source is no memory, and no local file whose bytes are not `kept`."""
    return file.values is None and (kept is not None or not store_of(file.path).is_local)


class FarSources:
    """Sources by their numbers in the core's `table`, opened when first needed. Thread-safe.

    `kept` says where their bytes are kept, if they are.
    """

    def __init__(
        self,
        core: Core,
        files: Sequence[SourceFile],
        table: NDArray[Any],
        kept: Kept | None = None,
    ) -> None:
        self._core, self._table = core, table
        self._mirrors: dict[int, MappedMirror | None] = {}
        self._kept: dict[int, tuple[Any, ...]] = {}  # what rows of the table point to, by mirror
        # (What is not far is not fetched.)
        self.places = Places(np.array([one.stamp.nbytes for one in files], np.int64))
        self.kept = kept
        self._files = files
        self._client = http_client(core)
        self._open: dict[str, Source] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}  # one thread opens a source, others wait
        self._is_closed = False
        self._counts = FetchCounts()

    def get(
        self, number: int, offsets: Sequence[int], lengths: Sequence[int]
    ) -> list[NDArray[np.uint8]]:
        """Return ranges of a source; `ReadError` if they cannot be had, or it was replaced."""
        file = self._files[number]
        try:
            source = self._source(file)
            found = source.get_ranges(offsets, lengths)
        except H5AsyncError:
            raise
        except OSError as error:
            text = f"{file.path} cannot be read: {error.strerror or error}"
            raise failed_read(text, error, file.path) from error
        if source.mirror is not self._mirrors.get(number, None):
            self.use_mirror(number, source.mirror)
        arrays = [np.frombuffer(memoryview(one), np.uint8) for one in found]
        if [array.size for array in arrays] != list(lengths):
            raise ReadError(f"{file.path} cannot be read: its store gave too few bytes")
        return arrays

    def count(self, done: FetchCounts) -> None:
        """Add to the counts."""
        with self._lock:
            self._counts = self._counts.plus(done)

    @property
    def counts(self) -> FetchCounts:
        """What was done so far."""
        with self._lock:
            retries = sum(source.retries for source in self._open.values())
            return self._counts.plus(FetchCounts(retries=retries))

    def path(self, number: int) -> str:
        """Return the name of a source."""
        return str(self._files[number].path)

    def at_once(self, number: int) -> int:
        """Return how many ranges `get` is best given, of a source."""
        source = self._open.get(self._files[number].path)
        return 1 if source is None else source.at_once

    def _source(self, file: SourceFile) -> Source:
        source = self._open.get(file.path)
        if source is not None:
            return source
        with self._lock:
            opening = self._opening.setdefault(file.path, threading.Lock())
        with opening:
            return self._open.get(file.path) or self._opened(file)

    def _opened(self, file: SourceFile) -> Source:
        if self._is_closed:
            raise ReaderClosedError(CLOSED)
        store, path = store_of(file.path), file.path
        if store.is_local and self.kept is not None:
            name = os.path.realpath(path)
            source = disk_cache(self.kept).keeping(name, LocalState(path, file.stamp))
        else:
            source = store.open(path, is_patient=True)
        is_it = source.stamp() == file.stamp
        source = source.over(partial(self._quicker, file.path))
        with self._lock:
            is_kept = is_it and not self._is_closed
            if is_kept:
                self._open[file.path] = source
        if is_kept:
            return source
        source.close()
        raise ReaderClosedError(CLOSED) if is_it else replaced(file.path)

    def _quicker(self, path: str, source: Source) -> Source:
        client = self._client
        return _Counted(source if client is None else client.quicker(source, path), self.count)

    def use_mirror(self, number: int, mirror: MappedMirror | None) -> None:
        """Have the core read what is kept of a source."""
        kept = None
        if mirror is not None:
            kept = self._kept.get(id(mirror)) or self._described(number, mirror)
        with self._lock:
            self._mirrors[number] = mirror
            self._table[number]["mirror"] = 0 if kept is None else ctypes.addressof(kept[-1])

    def _described(self, number: int, mirror: MappedMirror) -> tuple[Any, ...]:
        path, (device, inode), memory, marks, weights = mirror
        text = ctypes.create_string_buffer(os.fsencode(path))
        found = self._core.Mirror(
            map=address(memory),
            map_nbytes=memory.nbytes,
            marks=address(marks),
            weights=address(weights),
            path=ctypes.addressof(text),
            device=device,
            inode=inode,
            nbytes=self._files[number].stamp.nbytes,
        )
        # (Threads may be using those before, too.)
        return self._kept.setdefault(id(mirror), (mirror, text, found))

    def get_here(self, ranges: ByteRanges, held: Held | None = None) -> Held:
        """Get ranges in the calling thread; some of them may be `held` before."""
        begin_ns, before = time.perf_counter_ns(), [] if held is None else held.parts
        begins = np.array([begin for begin, _ in before], np.int64)
        sizes = np.array([array.size for _, array in before], np.int64)
        new = ranges.chosen(ranges.find(begins, begins + sizes) < 0)
        wanted = extents_of(new, requests_of(new))
        parts = zip(wanted.begins.tolist(), self.get_all(wanted), strict=True)
        waited_ns = time.perf_counter_ns() - begin_ns
        self.count(FetchCounts(used_nbytes=new.nbytes, waited_ns=waited_ns))
        return self.held(ranges, [*before, *parts])

    def get_all(self, ranges: ByteRanges) -> list[NDArray[np.uint8]]:
        """Return ranges of several sources; see `get`."""
        arrays: list[NDArray[np.uint8]] = []
        source, offsets = self.places.sources(ranges.begins)
        lengths = ranges.ends - ranges.begins
        for some in np.split(np.arange(source.size), np.flatnonzero(np.diff(source)) + 1):
            if some.size:
                of_one = offsets[some].tolist(), lengths[some].tolist()
                arrays += self.get(int(source[some[0]]), *of_one)
        return arrays

    def held(self, ranges: ByteRanges, parts: Sequence[Part]) -> Held:
        """Return ranges that lie in parts of sources, each with the place where it begins."""
        parts = sorted(parts, key=itemgetter(0))
        table = np.zeros(len(parts), self._core.Fetched)
        begins = np.array([begin for begin, _ in parts], np.int64)
        table["source"], table["offset"] = self.places.sources(begins)
        table["nbytes"] = [array.size for _, array in parts]
        table["data"] = [address(array) for _, array in parts]
        return Held(ranges, table, parts)

    def close(self) -> None:
        """Close all sources, and end calls that wait for them. Idempotent."""
        with self._lock:
            self._is_closed = True
            sources = list(self._open.values())
            self._open.clear()
        for source in sources:
            source.close()
        if self._client is not None:
            self._client.close()
