"""An encoded chunk enters; its decoded bytes leave, in the caller's memory, of exactly that length.

`FilterPipeline` undoes HDF5's filters in reverse order. Every step writes into memory that is
given to it and cannot write past its end; a result that is too short or too long is an error,
because HDF5 would answer a short chunk with whatever its heap held. All decoders come from
imagecodecs and drop the GIL.

The formats: deflate is a zlib frame (RFC 1950); shuffle, and the layout of the Fletcher-32
checksum, are those of the HDF5 reference (H5Zshuffle.c, H5Zfletcher32.c); lzf is a raw LibLZF
stream (h5py's lzf_filter.c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000

FILTER_NAMES = {
    DEFLATE: "deflate",
    SHUFFLE: "shuffle",
    FLETCHER32: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    307: "bzip2",
    LZF: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32026: "blosc2",
}
_DIRECT = frozenset({DEFLATE, SHUFFLE, FLETCHER32, LZF})
_CHECKSUM_NBYTES = 4


class Filter(NamedTuple):
    """One filter of a pipeline: its registered number, client data, and name in the file."""

    number: int
    parameters: tuple[int, ...]
    name: str


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded here, not by HDF5."""
    if entry.number == SHUFFLE:
        return bool(entry.parameters) and entry.parameters[0] > 0
    return entry.number in _DIRECT


@dataclass(frozen=True)
class Scratch:
    """The working memory of one thread, made once.

    Attributes
    ----------
    encoded
        For the stored bytes of a chunk.
    raw_chunk
        For the needed parts of a chunk without filters that does not go to a batch as a whole.
    between
        Two buffers for what lies between the filters of a pipeline.
    """

    encoded: Bytes
    raw_chunk: Bytes
    between: tuple[Bytes, Bytes]

    @classmethod
    def allocate(cls, encoded_nbytes: int, chunk_nbytes: int, between_nbytes: int) -> Scratch:
        """Reserve memory; pages that are never touched cost nothing."""
        return cls(
            np.empty(encoded_nbytes, np.uint8),
            np.empty(chunk_nbytes, np.uint8),
            (np.empty(between_nbytes, np.uint8), np.empty(between_nbytes, np.uint8)),
        )


class _Step(NamedTuple):
    """Undo one filter.

    ``decode(encoded, room)`` returns the result: where it `moves`, a view of `room`, else of
    `encoded`. `nbytes` is the result's exact length where it is known beforehand.
    """

    decode: Callable[[Bytes, Bytes], Bytes]
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
        """Bytes that any intermediate result may take (two compressors in a row grow a little)."""
        return self._chunk_nbytes + self._chunk_nbytes // 8 + 65536 if self._filters else 0

    def is_raw(self, filter_mask: int) -> bool:
        """Tell whether a chunk with this mask is stored as it is."""
        return all(filter_mask >> bit & 1 for bit in range(len(self._filters)))

    def decode(self, encoded: Bytes, filter_mask: int, out: Bytes, scratch: Scratch) -> None:
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

        Raises
        ------
        ValueError, RuntimeError
            If the bytes are damaged, or decode to another length; the message does not name
            the chunk.
        """
        steps = self._steps_by_mask.get(filter_mask)
        if steps is None:
            steps = self._steps_by_mask[filter_mask] = self._steps(filter_mask)
        current, (room_now, room_next) = encoded, scratch.between
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            room = out if last else room_now[: step.nbytes]
            current = step.decode(current, room)
            if step.moves:  # else the result still lies where the next step must not write
                room_now, room_next = room_next, room_now
            expected = out.size if last else step.nbytes
            if expected is not None and current.size != expected:
                raise ValueError(f"{step.name} gives {current.size} bytes, {expected} are due")
        if current is not out:
            if current.size != out.size:
                raise ValueError(f"{current.size} bytes are stored, {out.size} are due")
            np.copyto(out, current)

    def _steps(self, filter_mask: int) -> list[_Step]:
        steps = []
        nbytes: int | None = self._chunk_nbytes
        for bit, entry in enumerate(self._filters):
            if filter_mask >> bit & 1:
                continue
            name = FILTER_NAMES[entry.number]
            moves = entry.number != FLETCHER32
            steps.append(_Step(_decoder(entry), moves, nbytes, name))
            if entry.number == FLETCHER32 and nbytes is not None:
                nbytes += _CHECKSUM_NBYTES
            elif entry.number in (DEFLATE, LZF):
                nbytes = None
        return steps[::-1]


def _decoder(entry: Filter) -> Callable[[Bytes, Bytes], Bytes]:
    if entry.number == DEFLATE:
        return _inflate
    if entry.number == LZF:
        return _decode_lzf
    if entry.number == FLETCHER32:
        return _verify_fletcher32
    return partial(_unshuffle, entry.parameters[0])


def _inflate(encoded: Bytes, out: Bytes) -> Bytes:
    count = len(imagecodecs.deflate_decode(encoded, out=out))
    return out if count == out.size else out[:count]


def _decode_lzf(encoded: Bytes, out: Bytes) -> Bytes:
    count = len(imagecodecs.lzf_decode(encoded, header=False, out=out))
    return out if count == out.size else out[:count]


def _unshuffle(element_nbytes: int, encoded: Bytes, out: Bytes) -> Bytes:
    """Gather the bytes of each element; bytes that make no whole element stay where they are."""
    if encoded.size > out.size:
        raise ValueError(f"shuffle gives {encoded.size} bytes, {out.size} are due")
    if encoded.size < out.size:
        out = out[: encoded.size]
    count = encoded.size // element_nbytes
    body = count * element_nbytes
    if element_nbytes in (2, 4, 8) and count:
        dtype = f"u{element_nbytes}"
        imagecodecs.byteshuffle_decode(encoded[:body].view(dtype), out=out[:body].view(dtype))
    else:
        planes = encoded[:body].reshape(element_nbytes, count)
        np.copyto(out[:body].reshape(count, element_nbytes), planes.T)
    np.copyto(out[body:], encoded[body:])
    return out


def _verify_fletcher32(encoded: Bytes, _room: Bytes) -> Bytes:
    """Return a view of `encoded` without its checksum, which must be right.

    HDF5 before 1.6.3 wrote the bytes of each half in the other order on little-endian machines,
    and HDF5 accepts both to this day.
    """
    if encoded.size < _CHECKSUM_NBYTES:
        raise ValueError(f"fletcher32: {encoded.size} bytes cannot hold a checksum")
    values, stored = encoded[:-_CHECKSUM_NBYTES], encoded[-_CHECKSUM_NBYTES:].tobytes()
    computed = int(imagecodecs.h5checksum_fletcher32(values)).to_bytes(_CHECKSUM_NBYTES, "little")
    swapped = bytes((computed[1], computed[0], computed[3], computed[2]))
    if stored not in (computed, swapped):
        raise ValueError(
            f"fletcher32: checksum {stored.hex()} is stored, {computed.hex()} was computed"
        )
    return values
