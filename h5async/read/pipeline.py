"""Decodes chunks in Python: undoes HDF5's filters, the last one first.

An encoded chunk enters; its decoded bytes leave, in memory of the caller. Every step writes into
memory that is passed to it, never beyond its end. A result that is too short or too long is an
error, because HDF5 would return whatever its heap held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from h5async.codec.decoding import Bytes, Decode
from h5async.codec.filters import Filter
from h5async.read.scratch import Scratch, encoded_room

DAMAGED = "; the file is damaged there: restore it, or leave these samples out"


class _Step(NamedTuple):
    """Undoes one filter.

    ``decode(encoded, room, spare)`` returns the result: a view of `room` if it `moves`, else of
    `encoded`. `nbytes` is the result's exact length if it is known beforehand.
    """

    decode: Decode
    moves: bool
    nbytes: int | None
    name: str


class FilterPipeline:
    """Decoder of the chunks of one dataset. Safe to use from many threads, each with its scratch.

    `filters` are in the order of writing; `chunk_nbytes` is the decoded size of a whole chunk.
    """

    def __init__(self, filters: tuple[Filter, ...], chunk_nbytes: int) -> None:
        self._filters = filters
        self._chunk_nbytes = chunk_nbytes
        self._steps_by_mask: dict[int, list[_Step]] = {}

    @property
    def between_nbytes(self) -> int:
        """The maximum size of an intermediate result."""
        return encoded_room(self._chunk_nbytes) if self._filters else 0

    def decode(
        self,
        encoded: Bytes,
        filter_mask: int,
        out: Bytes,
        scratch: Scratch,
        *,
        least_nbytes: int | None = None,
    ) -> None:
        """Decode a chunk into `out`, which has exactly its size, and is undefined after an error.

        `encoded` is not changed. If bit i of the mask is set, filter i was not applied to this
        chunk. No other thread uses `scratch` meanwhile; its `encoded` may be `encoded`. If
        `least_nbytes` is given, a shorter result is accepted from this size on, and the rest of
        `out` is undefined.

        `ValueError` or `RuntimeError` is raised if the bytes are damaged, or decode to another
        length; the message does not name the chunk.
        """
        steps = self._steps(filter_mask)
        current, (room_now, room_next, spare) = encoded, scratch.between
        exact = least_nbytes is None
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            room = out if last else room_now[: step.nbytes if exact else None]
            current = step.decode(current, room, spare)
            if step.moves:  # else the next step must not write to the result's memory
                room_now, room_next = room_next, room_now
            expected = out.size if last else step.nbytes
            if exact and expected is not None and current.size != expected:
                raise ValueError(wrong_size(expected, current.size, step.name))
        least = out.size if least_nbytes is None else least_nbytes
        if not least <= current.size <= out.size:
            raise ValueError(wrong_size(out.size, current.size))
        if current is not out:
            np.copyto(out[: current.size], current)

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


def wrong_size(expected: int, found: int, source: str | None = None) -> str:
    """Say that a chunk, or the output of a filter, has a wrong size."""
    return f"{f'{source}: ' if source else ''}expected {expected} bytes, got {found}"
