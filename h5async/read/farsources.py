"""Fetches byte ranges of *far* sources: those that the core cannot read as local files.

Byte ranges enter; they leave in memory, where the core finds them by a table. Over HTTP, the core
fetches them with libcurl, which takes about 0.6 times the CPU time of the store's own client
(scripts/bench_fetch.py). The store's client handles every case: it fetches whatever libcurl did not
get at the first try, or raises the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import Kept
from h5async.core.binding import Core, address, find_curl, members_of
from h5async.errors import H5AsyncError, ReaderClosedError, ReadError, failed_read
from h5async.index.extents import SourceFile
from h5async.io.diskcache import disk_cache
from h5async.io.source import FileStamp, MappedMirror, Source, SourceOver, WebAddress, replaced
from h5async.io.stores import LocalState, store_of
from h5async.plan.records import ByteRanges, Places, extents_of, requests_of
from h5async.system.interruptions import call_when_gone, suppressing

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

CLOSED = "the reader was closed while a batch was being read"
Bytes = NDArray[np.uint8]
Part = tuple[int, Bytes]  # a part of a source: its place, as in `Places`, and its bytes


class Held(NamedTuple):
    """Byte ranges in memory, the parts of sources that contain them, and the core's table."""

    ranges: ByteRanges
    table: NDArray[Any]
    parts: Sequence[Part]


class FetchCounts(NamedTuple):
    """Counts of fetched bytes, requests and times so far, summed over all requests and batches."""

    requests: int = 0
    requested_nbytes: int = 0
    used_nbytes: int = 0  # read by batches; each byte counts once per batch
    flight_ns: int = 0  # total duration of the requests
    waited_ns: int = 0  # from the request for a batch to the last of its bytes
    retries: int = 0  # repeated requests, as far as the client tells
    quickest_ns: int = 0  # the shortest call; 0: there was none

    def plus(self, other: FetchCounts, times: int = 1) -> FetchCounts:
        """Return the sum of these counts and `times` those of `other`, and the quickest call."""
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
    """Tell whether a source is far: not in memory, and either not a local file or `kept`."""
    return file.values is None and (kept is not None or not store_of(file.path).is_local)


class FarSources:
    """Sources by their numbers in the core's `table`, opened when first needed. Thread-safe.

    `kept` says where their bytes are kept on disk, if anywhere.
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
        # (Sources that are not far are never fetched: their sizes do not matter.)
        self.places = Places(np.array([one.stamp.nbytes for one in files], np.int64))
        self.kept = kept
        self._files = files
        self._client = http_client(core)
        self._open: dict[str, Source] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}  # one thread opens a source, the others wait
        self._is_closed = False
        self._counts = FetchCounts()

    def get(self, number: int, offsets: Sequence[int], lengths: Sequence[int]) -> list[Bytes]:
        """Return ranges of a source; `ReadError` if they cannot be read, or it was replaced."""
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
            raise ReadError(f"{file.path} cannot be read: its store returned too few bytes")
        return arrays

    def count(self, done: FetchCounts) -> None:
        """Add to the counts."""
        with self._lock:
            self._counts = self._counts.plus(done)

    @property
    def counts(self) -> FetchCounts:
        """The counts so far."""
        with self._lock:
            retries = sum(source.retries for source in self._open.values())
            found = self._counts.plus(FetchCounts(retries=retries))
        return found

    def path(self, number: int) -> str:
        """Return the name of a source."""
        return str(self._files[number].path)

    def at_once(self, number: int) -> int:
        """Return the best number of ranges of a source for one call of `get`."""
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
            if source.stamp() != file.stamp == store.stamp(path):  # opened in another state
                source.close()
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
        """Have the core read a source's kept bytes from a mirror; None: from none."""
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
        # (Kept until the end: threads may still be using earlier mirrors.)
        return self._kept.setdefault(id(mirror), (mirror, text, found))

    def get_here(self, ranges: ByteRanges, held: Held | None = None) -> Held:
        """Get ranges in the calling thread, except those that are already `held`."""
        begin_ns, before = time.perf_counter_ns(), [] if held is None else held.parts
        begins = np.array([begin for begin, _ in before], np.int64)
        sizes = np.array([array.size for _, array in before], np.int64)
        new = ranges.chosen(ranges.find(begins, begins + sizes) < 0)
        wanted = extents_of(new, requests_of(new))
        arrays: list[Bytes] = []
        source, offsets = self.places.sources(wanted.begins)
        lengths = wanted.ends - wanted.begins
        for some in np.split(np.arange(source.size), np.flatnonzero(np.diff(source)) + 1):
            if some.size:
                of_one = offsets[some].tolist(), lengths[some].tolist()
                arrays += self.get(int(source[some[0]]), *of_one)
        waited_ns = time.perf_counter_ns() - begin_ns
        self.count(FetchCounts(used_nbytes=new.nbytes, waited_ns=waited_ns))
        return self.held(ranges, [*before, *zip(wanted.begins.tolist(), arrays, strict=True)])

    def held(self, ranges: ByteRanges, parts: Sequence[Part]) -> Held:
        """Return the `Held` of ranges that lie in `parts`."""
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


# --- over HTTP, by libcurl ------------------------------------------------------------------------

_ALL_OF_CURL = 3  # CURL_GLOBAL_ALL
_GOT, _CHANGED = 1, 2  # enum Got of src/http.c
_BLOCK_NBYTES = 1 << 16, 1 << 20, 8 << 20  # of memory; pages that are not touched cost nothing
_USUAL_NBYTES = _BLOCK_NBYTES[1]
_MOST_IDLE_NBYTES = 64 << 20  # of each size
_MOST_AT_ONCE = 64
# After this many calls in a row that got nothing, the store gets all ranges for some time.
_MOST_FAILURES, _LEFT_SECONDS = 4, 60.0


class HttpClient:
    """Connections and memory shared by calls. Safe to use from many threads."""

    def __init__(self, core: Core, curl: Any) -> None:
        self._core = core
        self._range = np.dtype(core.HttpRange)  # kept: NumPy takes 30 us to make it
        self._curl = curl
        self._ca_file = _ca_file()
        self._loops: deque[tuple[int, int]] = deque()  # a process and its loop
        self._blocks: dict[int, deque[Bytes]] = {
            nbytes: deque(maxlen=_MOST_IDLE_NBYTES // nbytes) for nbytes in _BLOCK_NBYTES
        }
        self._is_closed = False

    def quicker(self, source: Source, name: str) -> Source:
        """Return a source that reads with this client, or the same one if that is impossible."""
        return source if source.web_address() is None else HttpSource(self, source, name)

    def get(
        self, at: WebAddress, stamp: FileStamp, ranges: NDArray[Any], stop: ctypes.c_int32
    ) -> int:
        """Fetch ranges to their `into` addresses; return the number of those that failed."""
        headers = b"".join(line.encode("latin-1") + b"\0" for line in (*at.headers, ""))
        protocols = b"https" if at.url.startswith("https:") else b"http,https"
        texts = [at.url.encode(), headers, at.etag.encode("latin-1")]
        kept = [ctypes.create_string_buffer(text) for text in (*texts, protocols, self._ca_file)]
        url, lines, etag, allowed, ca_file = map(ctypes.addressof, kept)
        call = self._core.HttpCall(
            url=url,
            headers=lines,
            etag=etag,
            ca_file=ca_file if self._ca_file else None,
            protocols=allowed,
            ranges=address(ranges),
            stop=ctypes.addressof(stop),
            num_ranges=ranges.size,
            object_nbytes=stamp.nbytes,
            most_at_once=_MOST_AT_ONCE,
            most_redirects=at.most_redirects,
        )
        with self._loop() as loop:
            return int(self._core.get_http(loop, ctypes.byref(call)))

    def new_ranges(
        self, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[NDArray[Any], list[Buffer]]:
        """Return ranges for `get`, and the memory of each.

        Consecutive ranges share a block. A block is reused once nothing refers to it: the system
        takes longer to provide new memory than to receive as many bytes.
        """
        ranges = np.zeros(len(lengths), self._range)
        ranges["offset"], ranges["nbytes"] = offsets, lengths
        block, start, at, left = memoryview(b""), 0, 0, sum(lengths)
        parts: list[Buffer] = []
        starts: list[int] = []
        for nbytes in lengths:
            if at + nbytes > block.nbytes:
                lent, at = self._lend(max(nbytes, min(left, _USUAL_NBYTES))), 0
                # (A view of the array would refer to the array's base, not to the array itself.)
                block, start = lent.data, address(lent)
            parts.append(block[at : at + nbytes])
            starts.append(start + at)
            at, left = at + nbytes, left - nbytes
        ranges["into"] = starts
        return ranges, parts

    def close(self) -> None:
        """Close idle connections; those in use are closed when their calls end. Idempotent."""
        self._is_closed = True
        for blocks in self._blocks.values():
            blocks.clear()
        with suppressing(IndexError):
            while True:
                pid, loop = self._loops.pop()
                if pid == os.getpid():  # in a forked child, this would end the parent's connections
                    self._core.free_http(loop)

    @contextlib.contextmanager
    def _loop(self) -> Iterator[int]:
        pid, loop = 0, 0
        with suppressing(IndexError):
            pid, loop = self._loops.pop()
        if pid != os.getpid():
            pid, loop = os.getpid(), int(self._core.new_http(ctypes.byref(self._curl)))
        if not loop:
            raise MemoryError
        try:
            yield loop
        finally:
            self._loops.append((pid, loop))
            if self._is_closed:
                self.close()

    def _lend(self, nbytes: int) -> Bytes:
        """Return memory that is returned to the pool when nothing refers to it any more."""
        size = next((size for size in _BLOCK_NBYTES if nbytes <= size), None)
        if size is None:
            return np.empty(nbytes, np.uint8)
        block, blocks = None, self._blocks[size]
        with suppressing(IndexError):
            block = blocks.pop()
        block = np.empty(size, np.uint8) if block is None else block
        lent = block[:]
        call_when_gone(lent, blocks.append, block)
        return lent


class HttpSource(SourceOver):
    """A source that fetches ranges with libcurl, and uses the store for everything else."""

    def __init__(self, client: HttpClient, source: Source, name: str) -> None:
        super().__init__(source)
        self.at_once = 16
        self._client = client
        self._name = name
        self._stop = ctypes.c_int32(0)
        self._failures = 0
        self._left_until = 0.0  # until then, the store gets all ranges

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges; see `Source.get_ranges`. The store gets those that libcurl cannot get."""
        at = None
        # In the main thread, the call would keep signal handlers from running.
        if threading.current_thread() is not threading.main_thread() and min(lengths, default=0):
            at = self.source.web_address()
        if at is None or time.monotonic() < self._left_until:
            return self.source.get_ranges(offsets, lengths)
        ranges, parts = self._client.new_ranges(offsets, lengths)
        if not self._client.get(at, self.source.stamp(), ranges, self._stop):
            self._failures = 0
            return parts
        if (ranges["got"] == _CHANGED).any():
            raise replaced(self._name)
        missing = np.flatnonzero(ranges["got"] != _GOT).tolist()
        self._failures = self._failures + 1 if len(missing) == len(parts) else 0
        if self._failures >= _MOST_FAILURES:
            self._failures, self._left_until = 0, time.monotonic() + _LEFT_SECONDS
        self.source.retries += len(missing)
        where = [offsets[i] for i in missing], [lengths[i] for i in missing]
        others = dict(zip(missing, self.source.get_ranges(*where), strict=True))
        return [others.get(i, part) for i, part in enumerate(parts)]

    def close(self) -> None:
        """Close the source, and end calls that wait for bytes. Idempotent."""
        self._stop.value = 1
        super().close()


def http_client(core: Core) -> HttpClient | None:
    """Return a new client for the sources of one reader; None without libcurl."""
    curl = _curl(core)
    return None if curl is None else HttpClient(core, curl)


@functools.cache
def _curl(core: Core) -> Any | None:
    found = find_curl(members_of(core.Curl))
    if found is None:
        return None
    start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)(found["curl_global_init"])
    return None if start(_ALL_OF_CURL) else core.Curl(**found)


def _ca_file() -> bytes:
    """Return the path of the trusted certificates; empty: those of libcurl."""
    import ssl  # takes milliseconds

    chosen = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if chosen is None:
        with suppressing(ImportError):
            import certifi

            chosen = certifi.where()
    return os.fsencode(chosen or "")
