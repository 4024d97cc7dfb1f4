"""Undoes the Blosc2 filter.

The format: a contiguous frame (README_CFRAME_FORMAT.rst of c-blosc2) of one chunk, which may be an
array of several dimensions, cut into blocks (the "b2nd" metalayer).
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import (
    Bytes,
    filled,
    require_length,
    require_room,
    working_memory,
)

_FRAME_OFFSET_NBYTES = 8
_FRAME_HEADER = struct.Struct(">2x8sxixQx4sxqxqxixixi")
# Of README_CHUNK_FORMAT.rst: the header's longer form, its flags, and the first kind of special
# chunk that has no values: "uninitialized", after "none", "zeros", "NaNs" and "one value".
_EXTENDED_NBYTES, _IS_EXTENDED, _UNINITIALIZED = 32, 0b101, 4


class _Frame(NamedTuple):
    """What the header of a Blosc2 frame says."""

    header_nbytes: int
    frame_nbytes: int
    nbytes: int
    encoded_nbytes: int
    type_nbytes: int
    chunk_nbytes: int


def decode_blosc2(encoded: Bytes, out: Bytes, spare: Bytes) -> Bytes:
    """Decode a contiguous frame of one chunk."""
    frame = _frame(encoded)
    nbytes = frame.nbytes
    if frame.frame_nbytes > encoded.size or nbytes < 0 or frame.header_nbytes < 87:
        raise ValueError(
            f"blosc2: the header says {frame.frame_nbytes} bytes, and there are {encoded.size}"
        )
    body = encoded[frame.header_nbytes : frame.frame_nbytes]
    if frame.encoded_nbytes < 0 or frame.encoded_nbytes > body.size:
        raise ValueError(
            f"blosc2: the header says a chunk of {frame.encoded_nbytes} bytes, and there are"
            f" {body.size}"
        )
    dimensions = _b2nd(encoded[: frame.header_nbytes])
    if dimensions is None:
        require_room("blosc2", nbytes, out)
        _decode_blosc2_chunk(frame, body, filled(out, nbytes))
        return filled(out, nbytes)
    return _decode_b2nd(frame, dimensions, body, out, spare)


def _frame(encoded: Bytes) -> _Frame:
    if encoded.size < _FRAME_HEADER.size:
        raise ValueError(f"blosc2: {encoded.size} bytes cannot hold a frame")
    magic, header, length, _flags, nbytes, size, typesize, _block, chunk = (
        _FRAME_HEADER.unpack_from(encoded.data)
    )
    if magic != b"b2frame\0":
        raise ValueError("blosc2: the bytes do not begin with a frame's signature")
    return _Frame(header, length, nbytes, size, typesize, chunk)


def _decode_blosc2_chunk(frame: _Frame, body: Bytes, out: Bytes) -> None:
    """Decode the frame's one chunk; chunks of one repeated value lie in the table of offsets."""
    if frame.encoded_nbytes == 0 and out.size:
        offset = np.empty(_FRAME_OFFSET_NBYTES, np.uint8)
        _decode_all(body, offset)
        if offset[7] != 0x81:  # all zeros, as BLOSC2_SPECIAL_ZERO
            raise ValueError("blosc2: the chunk repeats a value, and its encoding is unknown")
        out[...] = 0
        return
    _decode_all(body[: frame.encoded_nbytes], out)


def _decode_all(chunk: Bytes, out: Bytes) -> None:
    if chunk.size >= _EXTENDED_NBYTES and chunk[2] & _IS_EXTENDED == _IS_EXTENDED:
        if chunk[31] >> 4 & 7 >= _UNINITIALIZED:  # `out` would be left as it is
            raise ValueError("blosc2: the chunk is marked as uninitialized, so it has no values")
    decoded = imagecodecs.blosc2_decode(chunk, numthreads=1, out=out)
    require_length("blosc2", len(decoded), out.size)


def _decode_b2nd(
    frame: _Frame,
    dimensions: tuple[tuple[int, ...], tuple[int, ...]],
    body: Bytes,
    out: Bytes,
    spare: Bytes,
) -> Bytes:
    """Decode blocks, which lie one after the other, each padded, and copy them into `out`."""
    shape, block = dimensions
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    nbytes = math.prod(shape) * frame.type_nbytes
    padded = math.prod(grid) * math.prod(block) * frame.type_nbytes
    require_room("blosc2", nbytes, out)
    out = filled(out, nbytes)
    if padded == nbytes and all(g == 1 for g in grid[1:]) and block[1:] == shape[1:]:
        _decode_blosc2_chunk(frame, body, out)
        return out
    blocks = working_memory(spare, padded)
    _decode_blosc2_chunk(frame, body, blocks)
    size = frame.type_nbytes
    item = np.dtype(f"u{size}" if size in (2, 4, 8) else (np.void, size))
    rank = len(shape)
    source = blocks.view(item).reshape(*grid, *block)
    target = out.view(item).reshape(shape)
    # Whole blocks first, then, dimension by dimension, those that are cut off at the end.
    for corner in _block_groups(shape, block):
        cells = tuple(cell for cell, _ in corner)
        extents = tuple(extent for _, extent in corner)
        part = source[(*cells, *(slice(0, extent) for extent in extents))]
        where = tuple(
            slice(cell.start * size, cell.start * size + (cell.stop - cell.start) * extent)
            for cell, size, extent in zip(cells, block, extents, strict=True)
        )
        split = tuple(
            n
            for cell, extent in zip(cells, extents, strict=True)
            for n in (cell.stop - cell.start, extent)
        )
        order = tuple(axis for pair in ((d, rank + d) for d in range(rank)) for axis in pair)
        view = target[where]
        np.copyto(_split(view, split), part.transpose(order))
    return out


def _split(array: NDArray[np.void], shape: tuple[int, ...]) -> NDArray[np.void]:
    """Return a view of `array` with each dimension split into (blocks, elements of a block)."""
    strides = []
    for axis, stride in enumerate(array.strides):
        strides += [stride * shape[2 * axis + 1], stride]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _block_groups(
    shape: tuple[int, ...], block: tuple[int, ...]
) -> list[tuple[tuple[slice, int], ...]]:
    """Return, for each combination of whole and cut-off blocks: cells, and extent within a block.

    A dimension has whole blocks, a last one that is cut off, or both.
    """
    groups: list[tuple[tuple[slice, int], ...]] = [()]
    for extent, size in zip(shape, block, strict=True):
        whole, rest = divmod(extent, size)
        choices = [(slice(0, whole), size)] if whole else []
        choices += [(slice(whole, whole + 1), rest)] if rest else []
        groups = [(*group, choice) for group in groups for choice in choices]
    return groups


def _b2nd(header: Bytes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape of the chunk and of its blocks, where a frame holds an array; else None."""
    raw = header.tobytes()
    at = raw.find(b"\xa4b2nd\xd2", 87)
    if at < 0:
        return None
    begin = int.from_bytes(raw[at + 6 : at + 10], "big")
    content = raw[begin + 5 :]  # after the marker and the length of a msgpack bin32
    if begin + 5 > len(raw) or raw[begin : begin + 1] != b"\xc6" or len(content) < 4:
        raise ValueError("blosc2: the array's dimensions are damaged")
    rank = content[2] & 0x7F
    wanted = 4 + 9 * rank + 1 + 5 * rank + 1 + 5 * rank
    if len(content) < wanted - 1 or not 1 <= rank <= 16:
        raise ValueError("blosc2: the array's dimensions are damaged")
    chunks = 4 + 9 * rank + 1
    shape = struct.unpack_from(">" + "xi" * rank, content, chunks)
    block = struct.unpack_from(">" + "xi" * rank, content, chunks + 5 * rank + 1)
    if min(shape) < 1 or min(block) < 1:
        raise ValueError("blosc2: the array's dimensions are damaged")
    return shape, block
