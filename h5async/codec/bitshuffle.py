"""Undoes the bitshuffle filter.

Elements are transposed bit by bit, in blocks. A block may then be compressed by lz4 or zstd: a
header precedes the blocks, and a length each block, in big-endian numbers. Up to 7 elements at the
end are stored unchanged (bshuf_h5filter.c of the bitshuffle project).
"""

from __future__ import annotations

import operator
import struct
from functools import partial
from typing import Literal

import imagecodecs
import numpy as np

from h5async.codec.decoding import (
    Bytes,
    filled,
    require_length,
    require_room,
    working_memory,
)
from h5async.codec.entry import Codec, CoreFilter, CoreKind, Parameters

_CORE_LIMIT = 1 << 31  # element sizes of the core are 32-bit numbers


def bitshuffle_codec(parameters: Parameters) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    _, _, element, block, compressor = (*parameters, 0, 0, 0, 0, 0)[:5]
    if element == 0:
        return None
    if compressor == 0:
        if block % 8:
            return None
        return Codec(
            partial(_bitunshuffle, element, block),
            added_nbytes=0,
            core=_core(CoreKind.BITSHUFFLE, element, block),
        )
    if compressor not in (2, 3):
        return None
    is_lz4 = compressor == 2
    kind = CoreKind.BITSHUFFLE_LZ4 if is_lz4 else CoreKind.BITSHUFFLE_ZSTD
    name: Literal["lz4", "zstd"] = "lz4" if is_lz4 else "zstd"
    return Codec(
        partial(_decode_bitshuffle, element, is_lz4),
        core=_core(kind, element, block, name),
    )


def _core(
    kind: CoreKind, element: int, block: int, library: str | None = None
) -> CoreFilter | None:
    return CoreFilter(kind, element, block, library) if element < _CORE_LIMIT else None


def default_block(element: int) -> int:
    """Return the number of elements in a block if the filter's client data do not say."""
    return max(128, 8192 // element // 8 * 8)


def _bitunshuffle(element: int, block: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Transpose bits; up to 7 elements at the end are unchanged. `block` 0 means the default."""
    require_room("bitshuffle", encoded.size, out)
    if encoded.size % element:
        raise ValueError(
            f"bitshuffle: {encoded.size} bytes are no whole number of {element}-byte elements"
        )
    out = filled(out, encoded.size)
    if out.size:  # a memoryview: imagecodecs would take an array's dtype for the element
        imagecodecs.bitshuffle_decode(encoded.data, itemsize=element, blocksize=block, out=out)
    return out


_BLOCK_LENGTH = struct.Struct(">I")


def _decode_bitshuffle(
    element: int,
    is_lz4: bool,
    encoded: Bytes,
    out: Bytes,
    spare: Bytes,
) -> Bytes:
    """Decode blocks that were compressed after their bits had been transposed."""
    if encoded.size < 12:
        raise ValueError(f"bitshuffle: {encoded.size} bytes cannot hold a header")
    nbytes, block_nbytes = struct.unpack_from(">QI", encoded.data)
    require_room("bitshuffle", nbytes, out)
    if nbytes % element or block_nbytes == 0 or block_nbytes % (8 * element):
        raise ValueError(
            f"bitshuffle: {nbytes} bytes in blocks of {block_nbytes} do not fit elements of"
            f" {element} bytes"
        )
    shuffled = working_memory(spare, nbytes)
    leftover = nbytes % (8 * element)
    edges = [*range(0, nbytes - leftover, block_nbytes), nbytes - leftover]
    position = 12
    begins, lengths = [], []
    view = encoded.data
    try:
        for _ in edges[1:]:
            (length,) = _BLOCK_LENGTH.unpack_from(view, position)
            begins.append(position + 4)
            lengths.append(length)
            position += 4 + length
    except struct.error:
        raise ValueError("bitshuffle: the blocks were cut short") from None
    if position + leftover > encoded.size:
        raise ValueError("bitshuffle: the blocks were cut short")
    body = shuffled[: nbytes - leftover]
    sizes = np.diff(edges).tolist()
    if is_lz4 and not leftover and all(map(operator.ne, lengths, sizes)):
        # The framing of the lz4 filter, except blocks that it would take for uncompressed ones.
        require_length("bitshuffle", len(imagecodecs.lz4h5_decode(encoded, out=body)), body.size)
    elif is_lz4:
        for begin, block, length in zip(begins, edges, lengths, strict=False):
            room = body[block : block + block_nbytes]
            data = encoded[begin : begin + length]
            count = len(imagecodecs.lz4_decode(data, header=False, out=room))
            require_length("a block of bitshuffle", count, room.size)
    elif lengths:
        # Zstd decodes concatenated frames in one call, and sets itself up just once.
        frames = b"".join(
            view[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)
        )
        require_length("bitshuffle", len(imagecodecs.zstd_decode(frames, out=body)), body.size)
    np.copyto(shuffled[body.size :], encoded[position : position + leftover])
    return _bitunshuffle(element, block_nbytes // element, shuffled, out, spare)
