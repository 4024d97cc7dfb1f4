"""Gets ranges over HTTP by libcurl, in the core: a source enters, and leaves with quicker ranges.

It costs about 0.6 of the CPU time of the client that stores have (scripts/bench_fetch.py). That one
stays the client that is right in all cases: whatever is not got at the first try, it gets, or it
has the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, find_curl
from h5async.io.source import FileStamp, Source, SourceOver, WebAddress, replaced
from h5async.system.interruptions import call_when_gone, suppressing

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

Bytes = NDArray[np.uint8]

_ALL_OF_CURL = 3  # CURL_GLOBAL_ALL
_GOT, _CHANGED = 1, 2  # enum Got of src/http.c
_BLOCK_NBYTES = 1 << 16, 1 << 20, 8 << 20  # of memory; pages that are not touched cost nothing
_USUAL_NBYTES = _BLOCK_NBYTES[1]
_MOST_IDLE_NBYTES = 64 << 20  # of each size
_MOST_AT_ONCE = 64
# After so many calls in a row that got nothing, the store gets all ranges for some time.
_MOST_FAILURES, _LEFT_SECONDS = 4, 60.0


class HttpClient:
    """Connections and memory that calls share. Safe to use from many threads."""

    def __init__(self, core: Core, curl: Any) -> None:
        self._core = core
        self._range = np.dtype(core.HttpRange)  # which NumPy takes 30 us to make
        self._curl = curl
        self._ca_file = _ca_file()
        self._loops: deque[tuple[int, int]] = deque()  # a process and its loop
        self._blocks: dict[int, deque[Bytes]] = {
            nbytes: deque(maxlen=_MOST_IDLE_NBYTES // nbytes) for nbytes in _BLOCK_NBYTES
        }
        self._is_closed = False

    def quicker(self, source: Source, name: str) -> Source:
        """Return a source whose ranges come by this client, or the same if it cannot have them."""
        return source if source.web_address() is None else HttpSource(self, source, name)

    def get(
        self, at: WebAddress, stamp: FileStamp, ranges: NDArray[Any], stop: ctypes.c_int32
    ) -> int:
        """Get ranges, with `into` set; return how many were not got."""
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

        Ranges that follow each other share a block. A block is used again once nothing refers to
        it: the system takes longer to give new memory than to receive as many bytes.
        """
        ranges = np.zeros(len(lengths), self._range)
        ranges["offset"], ranges["nbytes"] = offsets, lengths
        block, start, at, left = memoryview(b""), 0, 0, sum(lengths)
        parts: list[Buffer] = []
        starts: list[int] = []
        for nbytes in lengths:
            if at + nbytes > block.nbytes:
                lent, at = self._lend(max(nbytes, min(left, _USUAL_NBYTES))), 0
                # (A view of the array would not refer to it, but to what it is a view of.)
                block, start = lent.data, address(lent)
            parts.append(block[at : at + nbytes])
            starts.append(start + at)
            at, left = at + nbytes, left - nbytes
        ranges["into"] = starts
        return ranges, parts

    def close(self) -> None:
        """Close connections that no call uses; others follow when it ends. Idempotent."""
        self._is_closed = True
        for blocks in self._blocks.values():
            blocks.clear()
        with suppressing(IndexError):
            while True:
                pid, loop = self._loops.pop()
                if pid == os.getpid():  # else it would end connections of the parent
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
        """Return memory that comes back when nothing refers to it any more."""
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
    """A source whose ranges come by libcurl; all else is the store's."""

    def __init__(self, client: HttpClient, source: Source, name: str) -> None:
        super().__init__(source)
        self.at_once = 16
        self._client = client
        self._name = name
        self._stop = ctypes.c_int32(0)
        self._failures = 0
        self._left_until = 0.0  # the store gets all ranges

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges; see `Source.get_ranges`. Those that libcurl cannot get, the store does."""
        at = None
        # In the main thread signal handlers could not run meanwhile.
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
        """Close it, and end calls that wait for bytes. Idempotent."""
        self._stop.value = 1
        super().close()


def http_client(core: Core) -> HttpClient | None:
    """Return a client of its own for sources of a reader; None without libcurl."""
    curl = _curl(core)
    return None if curl is None else HttpClient(core, curl)


@functools.cache
def _curl(core: Core) -> Any | None:
    found = find_curl()
    if found is None:
        return None
    start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)(found["curl_global_init"])
    return None if start(_ALL_OF_CURL) else core.Curl(**found)


def _ca_file() -> bytes:
    """Return the file of certificates that are trusted; "": libcurl's own."""
    chosen = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if chosen is None:
        with suppressing(ImportError):
            import certifi

            chosen = certifi.where()
    return os.fsencode(chosen or "")
