"""The encoded bytes of the bitshuffle filter enter; what it was given leaves, in given memory.

Elements are transposed bit by bit, in blocks; a block may then be compressed by lz4 or zstd. The
format of these: a header and blocks, each after its length, in big-endian numbers; up to 7
elements at the end are stored as they are (bshuf_h5filter.c of the bitshuffle project).
"""

from __future__ import annotations

import operator
import struct
from functools import partial

import imagecodecs
import numpy as np

from h5async.codec.decoding import Bytes, Decode, filled, require_length, working_memory


def bitshuffle_codec(parameters: tuple[int, ...]) -> int:
    """Return what compresses the blocks: 0 nothing, 2 lz4, 3 zstd."""
    return parameters[4] if len(parameters) > 4 else 0


def default_block(element: int) -> int:
    """Return of how many elements a block is where the filter's client data does not say."""
    return max(128, 8192 // element // 8 * 8)


def bitshuffle_decoder(parameters: tuple[int, ...]) -> Decode | None:
    """Return what undoes the filter with this client data, or None where HDF5 has to."""
    if len(parameters) < 3 or parameters[2] == 0:
        return None
    element = parameters[2]
    match bitshuffle_codec(parameters):
        case 0:
            block = parameters[3] if len(parameters) > 3 else 0
            return None if block % 8 else partial(_bitunshuffle, element, block)
        case 2:
            return partial(_decode_bitshuffle, element, True)
        case 3:
            return partial(_decode_bitshuffle, element, False)
    return None


def _bitunshuffle(element: int, block: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Transpose bits; up to 7 elements at the end stay as they are. `block` 0: the default."""
    if encoded.size > out.size:
        raise ValueError(f"bitshuffle gives {encoded.size} bytes, {out.size} are due")
    if encoded.size % element:
        raise ValueError(f"bitshuffle: {encoded.size} bytes make no whole {element}-byte elements")
    out = filled(out, encoded.size)
    if out.size:  # a memoryview: of an array, imagecodecs takes the dtype for the element
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
    if nbytes > out.size:
        raise ValueError(f"bitshuffle gives {nbytes} bytes, {out.size} are due")
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
        # The framing of the lz4 filter, but for blocks that it would take for stored ones.
        require_length("bitshuffle", len(imagecodecs.lz4h5_decode(encoded, out=body)), body.size)
    elif is_lz4:
        for begin, block, length in zip(begins, edges, lengths, strict=False):
            room = body[block : block + block_nbytes]
            data = encoded[begin : begin + length]
            count = len(imagecodecs.lz4_decode(data, header=False, out=room))
            require_length("a block of bitshuffle", count, room.size)
    elif lengths:
        # Zstd decodes frames that follow each other in one call, and sets itself up just once.
        frames = b"".join(
            view[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)
        )
        require_length("bitshuffle", len(imagecodecs.zstd_decode(frames, out=body)), body.size)
    np.copyto(shuffled[body.size :], encoded[position : position + leftover])
    return _bitunshuffle(element, block_nbytes // element, shuffled, out, spare)
