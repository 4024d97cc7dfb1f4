"""A chunk's key enters; a buffer leaves that holds it decoded, or in which to decode it.

A chunk that holds more samples than a batch takes is needed again by the next batch. The last few
decoded chunks are kept for that, in buffers made once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class _Buffer:
    """A buffer, the key of the chunk that it holds, and how many threads use it."""

    __slots__ = ("data", "key", "users")

    def __init__(self, nbytes: int) -> None:
        self.data: Bytes = np.empty(nbytes, np.uint8)
        self.key: Hashable | None = None
        self.users = 0


class ChunkCache:
    """The last decoded chunks, all of one size. Safe to use from as many threads as announced.

    Parameters
    ----------
    num_threads
        Threads that use a chunk at the same time, one each.
    kept
        Further chunks to keep.
    nbytes
        Decoded bytes of a chunk; memory is taken as it is touched.
    """

    def __init__(self, num_threads: int, kept: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._buffers = [_Buffer(nbytes) for _ in range(num_threads + kept)]  # oldest use first

    @contextmanager
    def decoded(self, key: Hashable, decode: Callable[[Bytes], None]) -> Iterator[Bytes]:
        """Give a chunk decoded, for use within the context and not to be changed.

        ``decode(out)`` is called where no buffer holds it. Where two threads need one chunk at
        once, both decode it: to wait for the other would take as long.
        """
        with self._lock:
            buffer = next((b for b in self._buffers if b.key == key), None)
            is_there = buffer is not None
            if buffer is None:
                buffer = next(b for b in self._buffers if not b.users)
                buffer.key = None
            buffer.users += 1
            self._buffers.remove(buffer)
            self._buffers.append(buffer)
        try:
            if not is_there:
                decode(buffer.data)
                with self._lock:
                    buffer.key = key
            yield buffer.data
        finally:
            with self._lock:
                buffer.users -= 1
