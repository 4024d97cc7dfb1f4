"""An encoded chunk enters; its decoded bytes leave, in the caller's memory, of exactly that length.

`FilterPipeline` undoes HDF5's filters in reverse order. Every step writes into memory that is
given to it and cannot write past its end; a result that is too short or too long is an error,
because HDF5 would answer a short chunk with whatever its heap held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from h5async.codec.decoding import Bytes, Decode
from h5async.codec.filters import Filter
from h5async.core.binding import Core, CoreWorker
from h5async.errors import ReaderClosedError
from h5async.stats import ThreadCounts


@dataclass
class Scratch:
    """The working memory of one thread, made once.

    Attributes
    ----------
    encoded
        For the stored bytes of a chunk.
    raw_chunk
        For a chunk, or its needed parts, that does not go to a batch as a whole.
    between
        Three buffers: two for what lies between the filters of a pipeline, one for a decoder.
    stop
        Not 0 once the reader is being closed; see `require_open`.
    counts
        What the thread that uses it has done in Python; see `total`.
    """

    encoded: Bytes
    raw_chunk: Bytes
    between: tuple[Bytes, Bytes, Bytes]
    stop: c_int32 = field(default_factory=c_int32)
    counts: ThreadCounts = field(default_factory=ThreadCounts)
    _worker: CoreWorker | None = None

    def total(self) -> ThreadCounts:
        """Return what was done in Python and by the compiled core."""
        if self._worker is None:
            return self.counts
        return self.counts.plus(self._worker.counts())

    def require_open(self) -> None:
        """Raise `ReaderClosedError` once the reader is being closed: nobody wants the rest."""
        if self.stop.value:
            raise ReaderClosedError("the reader was closed while a batch was being read")

    def worker(self, core: Core) -> CoreWorker:
        """Return what this thread needs to call the compiled core; made when first asked for."""
        if self._worker is None:
            self._worker = core.new_worker(self.encoded, self.raw_chunk, self.between, self.stop)
        return self._worker

    @classmethod
    def allocate(
        cls,
        encoded_nbytes: int,
        chunk_nbytes: int,
        between_nbytes: int,
        stop: c_int32 | None = None,
    ) -> Scratch:
        """Reserve memory; pages that are never touched cost nothing."""
        return cls(
            np.empty(encoded_nbytes, np.uint8),
            np.empty(chunk_nbytes, np.uint8),
            (
                np.empty(between_nbytes, np.uint8),
                np.empty(between_nbytes, np.uint8),
                np.empty(between_nbytes, np.uint8),
            ),
            c_int32() if stop is None else stop,
        )


def encoded_room(chunk_nbytes: int) -> int:
    """Return what an encoded chunk may take: two compressors in a row grow a little."""
    return chunk_nbytes + chunk_nbytes // 8 + 65536


class _Step(NamedTuple):
    """Undo one filter.

    ``decode(encoded, room, spare)`` returns the result: where it `moves`, a view of `room`, else
    of `encoded`. `nbytes` is the result's exact length where it is known beforehand.
    """

    decode: Decode
    moves: bool
    nbytes: int | None
    name: str


class FilterPipeline:
    """Decoder of the chunks of one dataset. Safe to use from many threads, each with its scratch.

    Parameters
    ----------
    filters
        In the order in which they were applied when writing.
    chunk_nbytes
        Decoded bytes of a whole chunk.
    """

    def __init__(self, filters: tuple[Filter, ...], chunk_nbytes: int) -> None:
        self._filters = filters
        self._chunk_nbytes = chunk_nbytes
        self._steps_by_mask: dict[int, list[_Step]] = {}

    @property
    def between_nbytes(self) -> int:
        """Bytes that any intermediate result may take."""
        return encoded_room(self._chunk_nbytes) if self._filters else 0

    def is_raw(self, filter_mask: int) -> bool:
        """Tell whether a chunk with this mask is stored as it is."""
        return all(filter_mask >> bit & 1 for bit in range(len(self._filters)))

    def decode(
        self,
        encoded: Bytes,
        filter_mask: int,
        out: Bytes,
        scratch: Scratch,
        *,
        least_nbytes: int | None = None,
    ) -> None:
        """Decode a chunk into `out`.

        Parameters
        ----------
        encoded
            The stored bytes; not changed.
        filter_mask
            Bit i set: filter i was not applied to this chunk.
        out
            Memory for exactly the decoded chunk; what it holds after an error is undefined.
        scratch
            Working memory that no other thread uses meanwhile; its `encoded` may be `encoded`.
        least_nbytes
            A chunk that decodes short is taken if it has so many bytes; the rest of `out` is then
            undefined.

        Raises
        ------
        ValueError, RuntimeError
            If the bytes are damaged, or decode to another length; the message does not name
            the chunk.
        """
        steps = self._steps(filter_mask)
        current, (room_now, room_next, spare) = encoded, scratch.between
        exact = least_nbytes is None
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            room = out if last else room_now[: step.nbytes if exact else None]
            current = step.decode(current, room, spare)
            if step.moves:  # else the result still lies where the next step must not write
                room_now, room_next = room_next, room_now
            expected = out.size if last else step.nbytes
            if exact and expected is not None and current.size != expected:
                raise ValueError(f"{step.name} gives {current.size} bytes, {expected} are due")
        least = out.size if least_nbytes is None else least_nbytes
        if not least <= current.size <= out.size:
            raise ValueError(f"{current.size} bytes are stored, {out.size} are due")
        if current is not out:
            np.copyto(out[: current.size], current)

    def decode_many(
        self, encoded: Iterable[Bytes], filter_mask: int, out: Iterable[Bytes], scratch: Scratch
    ) -> None:
        """Decode several chunks of one mask, each into its memory, as `decode` does.

        A thread takes the GIL again after every chunk, and others may hold it: so where one
        filter is to be undone, hardly a line of Python lies between one chunk and the next. For
        the same reason, the arguments had better be iterators: to make all views at once would
        keep the other threads waiting.

        Raises
        ------
        ValueError, RuntimeError
            If any of them is damaged; nothing is said of which.
        """
        steps = self._steps(filter_mask)
        if len(steps) != 1 or not steps[0].moves:
            for chunk, room in zip(encoded, out, strict=True):
                self.decode(chunk, filter_mask, room, scratch)
            return
        due, spare = self._chunk_nbytes, itertools.repeat(scratch.between[2])
        for decoded in map(steps[0].decode, encoded, out, spare):
            if decoded.size != due:
                raise ValueError(f"{decoded.size} bytes are stored, {due} are due")

    def _steps(self, filter_mask: int) -> list[_Step]:
        steps = self._steps_by_mask.get(filter_mask)
        if steps is None:
            steps = self._steps_by_mask[filter_mask] = self._new_steps(filter_mask)
        return steps

    def _new_steps(self, filter_mask: int) -> list[_Step]:
        steps = []
        nbytes: int | None = self._chunk_nbytes
        for bit, entry in enumerate(self._filters):
            if filter_mask >> bit & 1:
                continue
            codec = entry.codec
            assert codec is not None, "such datasets are read through h5py"
            steps.append(_Step(codec.decode, not codec.gives_view, nbytes, entry.label))
            added = codec.added_nbytes
            nbytes = None if nbytes is None or added is None else nbytes + added
        return steps[::-1]
