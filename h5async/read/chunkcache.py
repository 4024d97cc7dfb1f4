"""Keeps decoded chunks that later batches may need.

Keys of chunks enter; buffers leave that hold them decoded, or in which to decode them. A chunk that
holds more samples than a batch takes of it is needed again by later batches. The last decoded
chunks are kept for that, as many as a budget allows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LEAST_KEPT = 2  # chunks: where two batches share one, the later batch finds it


class State(IntEnum):
    """What has to be done for a chunk; the numbers are those of the compiled core."""

    UNKEPT = 0  # there is no room: decode it to scratch, and forget it
    CLAIMED = 1  # decode it into the buffer
    READY = 2  # the buffer holds it
    BUSY = 3  # another thread is about to decode it


class _Entry:
    __slots__ = ("data", "state", "users")

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.users = 1
        self.state = State.CLAIMED


class Claims:
    """What a thread was given for some keys, in their order.

    Attributes
    ----------
    states, entries
        One of each for each key; an entry where the state is CLAIMED or READY.
    are_filled
        To be set when all buffers that were claimed, and not given up, hold their chunks.
    """

    def __init__(self, keys: Sequence[Hashable]) -> None:
        self.keys = keys
        self.states = [State.UNKEPT] * len(keys)
        self.entries: list[_Entry | None] = [None] * len(keys)
        self.are_filled = False
        self._given_up: set[Hashable] = set()

    @property
    def buffers(self) -> list[Bytes | None]:
        """One for each key: its memory, where the state is CLAIMED or READY."""
        return [None if entry is None else entry.data for entry in self.entries]

    def give_up(self, key: Hashable) -> None:
        """Note that a chunk, if it was claimed at all, was not decoded into its buffer."""
        self._given_up.add(key)

    def is_filled(self, i: int) -> bool:
        """Tell whether a buffer that was claimed holds its chunk."""
        return self.are_filled and self.keys[i] not in self._given_up

    def take(self, i: int, entry: _Entry, state: State) -> None:
        """Note what the thread uses from now on, until the claims are released."""
        self.entries[i], self.states[i] = entry, state


class ChunkCache:
    """The last decoded chunks. Safe to use from many threads.

    Parameters
    ----------
    budget_nbytes
        Memory for chunks that are kept. Two are in any case; buffers that are in use are never
        taken away, and where none is free, or no memory to be had, a chunk is not kept.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self._changed = threading.Condition()
        self._budget_nbytes = budget_nbytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # the latest use comes last
        self._nbytes = 0

    @contextmanager
    def claimed(
        self, keys: Sequence[Hashable], nbytes: int, *, wait: bool = False
    ) -> Iterator[Claims]:
        """Look up chunks, and claim those that are not there, for use within the context.

        Whoever claims a chunk decodes it: set `are_filled` before the context ends. Nobody waits
        while holding a claim, so nobody waits for long.

        Parameters
        ----------
        keys
            Of the chunks, each once.
        nbytes
            Decoded bytes of each.
        wait
            Wait for a chunk that another thread has claimed. Only for a single key.
        """
        assert not wait or len(keys) == 1
        claims = Claims(keys)
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self._is_busy(keys[0]))
            try:
                self._claim(claims, nbytes)
            except BaseException:  # others would wait for what was claimed until then
                self._release(claims)
                raise
        try:
            yield claims
        finally:
            with self._changed:
                self._release(claims)

    @contextmanager
    def decoded(
        self, key: Hashable, scratch: Bytes, decode: Callable[[Bytes], None]
    ) -> Iterator[Bytes]:
        """Yield one decoded chunk, for use within the context; it must not be changed.

        ``decode(out)`` is called where no buffer holds it, with a buffer or with `scratch`.
        """
        with self.claimed([key], scratch.size, wait=True) as claims:
            data = claims.buffers[0]
            if data is None:
                data = scratch
            if claims.states[0] != State.READY:
                decode(data)
                self._publish(claims)
            yield data

    def clear(self) -> None:
        """Forget all chunks, because their file has changed; who uses some goes on with them."""
        with self._changed:
            self._entries.clear()
            self._nbytes = 0
            self._changed.notify_all()

    def _publish(self, claims: Claims) -> None:
        """Let others use what was claimed and is decoded, before its context ends."""
        claims.are_filled = True
        with self._changed:
            for i, entry in enumerate(claims.entries):
                if entry is not None and claims.is_filled(i):
                    entry.state = State.READY
            self._changed.notify_all()

    def _is_busy(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.state == State.CLAIMED

    def _claim(self, claims: Claims, nbytes: int) -> None:
        absent = []
        for i, key in enumerate(claims.keys):
            entry = self._entries.get(key)
            if entry is None:
                absent.append(i)
            elif entry.state == State.CLAIMED:
                claims.states[i] = State.BUSY
            else:
                claims.take(i, entry, State.READY)
                entry.users += 1
                self._entries.move_to_end(key)
        most = max(LEAST_KEPT, self._budget_nbytes // max(1, nbytes))
        # The last ones: in order, they are what the next batch goes on with.
        for i in absent[-most:]:
            data = self._buffer(nbytes)
            if data is None:
                break
            entry = _Entry(data)
            claims.take(i, entry, State.CLAIMED)
            self._entries[claims.keys[i]] = entry
            self._nbytes += nbytes

    def _buffer(self, nbytes: int) -> Bytes | None:
        """Return memory: new as far as the budget goes, else of what was unused for longest.

        None: there is none to be had. The caller adds it to what is kept.
        """
        surplus = self._nbytes + nbytes - max(self._budget_nbytes, LEAST_KEPT * nbytes)
        unused = []
        for key, entry in self._entries.items():
            if surplus <= 0:
                break
            if not entry.users:
                unused.append(key)
                surplus -= entry.data.size
        if surplus > 0:
            return None
        data = None
        for key in unused:
            data = self._entries.pop(key).data
            self._nbytes -= data.size
        if data is not None and data.size == nbytes:
            return data
        try:
            return np.empty(nbytes, np.uint8)
        except MemoryError:  # to keep a chunk only saves work
            return None

    def _release(self, claims: Claims) -> None:
        for i, entry in enumerate(claims.entries):
            if entry is None:
                continue
            entry.users -= 1
            if entry.state != State.CLAIMED:
                continue
            if claims.is_filled(i):
                entry.state = State.READY
            elif self._entries.get(claims.keys[i]) is entry:
                self._nbytes -= self._entries.pop(claims.keys[i]).data.size
        self._changed.notify_all()
