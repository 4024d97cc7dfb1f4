"""Keeps decoded chunks that later batches may need, where chunks are decoded in Python.

The key of a chunk enters, and how to decode it; the decoded chunk leaves. A chunk that holds more
samples than a batch takes of it is needed again by later batches. The last decoded chunks are kept
for that, as many as a budget allows. (What the compiled core decodes, it keeps itself: store.h.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from h5async.core.tablestructures import KEPT_OVERHEAD_NBYTES
from h5async.system.waiting import Gate

Bytes = NDArray[np.uint8]

LEAST_KEPT = 2  # chunks: where two batches share one, the later batch finds it


class _Entry:
    __slots__ = ("data", "is_ready", "users")

    def __init__(self) -> None:
        self.data: Bytes = np.empty(0, np.uint8)
        self.users: set[int] = set()  # ids of entries, of which each context makes one
        self.is_ready = False  # the thread that made it is about to decode the chunk


class ChunkCache:
    """The last decoded chunks. Safe to use from many threads.

    Parameters
    ----------
    budget_nbytes
        Memory for chunks that are kept. Two are in any case; buffers that are in use are never
        taken away, and where none is free, or no memory to be had, a chunk is not kept.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._changed = Gate()
        self._budget_nbytes = budget_nbytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # the latest use comes last
        self._nbytes = 0

    @contextmanager
    def decoded(
        self, key: Hashable, scratch: Bytes, decode: Callable[[Bytes], None]
    ) -> Iterator[Bytes]:
        """Yield one decoded chunk, for use within the context; it must not be changed.

        ``decode(out)`` is called where no buffer holds it, with a buffer or with `scratch`. Where
        another thread is about to decode the chunk, this waits for it; nobody waits while decoding
        one, so nobody waits for long.
        """
        own = _Entry()
        try:
            entry = self._claimed(key, own, scratch.size)
            if entry is None:
                decode(scratch)
                yield scratch
                return
            if entry is own:
                decode(entry.data)
                self._publish(entry)
            yield entry.data
        finally:
            self._release(key, own)

    def clear(self) -> None:
        """Forget all chunks, because their file has changed; who uses some goes on with them."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0
        self._changed.notify()

    def _is_busy(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.is_ready

    def _claimed(self, key: Hashable, own: _Entry, nbytes: int) -> _Entry | None:
        """Return what holds a chunk, or is to hold it: `own`; None: nothing."""
        while True:
            self._changed.wait(lambda: not self._is_busy(key))
            with self._lock:
                if not self._is_busy(key):
                    entry = self._entry(key, own, nbytes)
                    return entry

    def _entry(self, key: Hashable, own: _Entry, nbytes: int) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            data = self._buffer(nbytes)
            if data is None:
                return None
            entry, own.data = own, data
            self._nbytes += _cost(nbytes)
            self._entries[key] = own
        entry.users.add(id(own))
        self._entries.move_to_end(key)
        return entry

    def _publish(self, entry: _Entry) -> None:
        """Let others use a chunk that is decoded, before its context ends."""
        entry.is_ready = True
        self._changed.notify()

    def _buffer(self, nbytes: int) -> Bytes | None:
        """Return memory: new as far as the budget goes, else of what was unused for longest.

        None: there is none to be had. The caller adds it to what is kept.
        """
        cost = _cost(nbytes)
        surplus = self._nbytes + cost - max(self._budget_nbytes, LEAST_KEPT * cost)
        unused = []
        for key, entry in self._entries.items():
            if surplus <= 0:
                break
            if not entry.users:
                unused.append(key)
                surplus -= _cost(entry.data.size)
        if surplus > 0:
            return None
        data = None
        for key in unused:
            data = self._entries.pop(key).data
            self._nbytes -= _cost(data.size)
        if data is not None and data.size == nbytes:
            return data
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:  # to keep a chunk only saves work
            return None

    def _release(self, key: Hashable, own: _Entry) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is own and not own.is_ready:
                self._nbytes -= _cost(self._entries.pop(key).data.size)
            elif entry is not None:
                entry.users.discard(id(own))
        self._changed.notify()


def _cost(nbytes: int) -> int:
    return nbytes + KEPT_OVERHEAD_NBYTES
