"""Undoes the szip filter.

The format is a little-endian length, and a stream of extended-Rice code (CCSDS 121.0-B). Its scan
lines are padded to whole blocks, and its 4- and 8-byte samples are split in bytes, as in libaec's
sz_compat.c.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import imagecodecs
import numpy as np

from h5async.codec.decoding import Bytes, filled, require_room, working_memory
from h5async.codec.entry import Codec, CoreFilter, CoreKind, Parameters, StatedLengths
from h5async.codec.shuffle import unshuffle


class _Szip(NamedTuple):
    """The parameters of szip, as libaec takes them."""

    bits: int  # per sample of the code; 4- and 8-byte pixels are coded byte plane by byte plane
    flags: int
    block: int
    blocks_a_line: int
    line_nbytes: int
    padded_line_nbytes: int
    planes: int


_SZIP_MSB, _SZIP_NEAREST_NEIGHBOUR = 16, 32  # options of szlib.h
_AEC_MSB, _AEC_PREPROCESS, _AEC_NOT_ENFORCE = 4, 8, 64  # flags of libaec.h


_LENGTH_NBYTES = 4

# If a chunk is too short for its length, HDF5 reads beyond it.
SZIP_LENGTHS = StatedLengths(
    lambda _parameters: _LENGTH_NBYTES,
    lambda encoded: int.from_bytes(encoded[:_LENGTH_NBYTES].tobytes(), "little"),
)


def szip_codec(parameters: Parameters) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    if len(parameters) < 4:
        return None
    options, block, bits, pixels_a_line = parameters[:4]
    if not (1 <= bits <= 32 or bits == 64) or block % 2 or not block or not pixels_a_line:
        return None
    flags = _AEC_NOT_ENFORCE  # any even block
    flags |= _AEC_MSB if options & _SZIP_MSB else 0
    flags |= _AEC_PREPROCESS if options & _SZIP_NEAREST_NEIGHBOUR else 0
    planes = bits // 8 if bits in (32, 64) else 1
    pixel_nbytes = 1 if planes > 1 or bits <= 8 else 2 if bits <= 16 else 4
    blocks = -(-pixels_a_line // block)
    szip = _Szip(
        bits=8 if planes > 1 else bits,
        flags=flags,
        block=block,
        blocks_a_line=blocks,
        line_nbytes=pixels_a_line * pixel_nbytes,
        padded_line_nbytes=blocks * block * pixel_nbytes,
        planes=planes,
    )
    core = CoreFilter(CoreKind.SZIP, library="aec", values=parameters)
    return Codec(partial(_decode_szip, szip), core=core)


def _decode_szip(szip: _Szip, encoded: Bytes, out: Bytes, spare: Bytes) -> Bytes:
    """Decode by libaec itself: its szip-compatible interface hides that a chunk decodes short."""
    if encoded.size < _LENGTH_NBYTES:
        raise ValueError(f"szip: {encoded.size} bytes cannot hold a length")
    nbytes = int.from_bytes(encoded[:_LENGTH_NBYTES].tobytes(), "little")
    require_room("szip", nbytes, out)
    out = filled(out, nbytes)
    lines, rest = divmod(nbytes, szip.line_nbytes)
    padding = szip.padded_line_nbytes - szip.line_nbytes
    coded_nbytes = (lines + (rest > 0)) * szip.padded_line_nbytes
    needed_nbytes = lines * szip.padded_line_nbytes + (rest or -padding if lines else rest)
    in_place = coded_nbytes == nbytes and szip.planes == 1
    room = out if in_place else working_memory(spare, coded_nbytes + nbytes)
    coded, packed = room[:coded_nbytes], room[coded_nbytes:]
    count = len(
        imagecodecs.aec_decode(
            encoded[_LENGTH_NBYTES:].data,
            bitspersample=szip.bits,
            flags=szip.flags,
            blocksize=szip.block,
            rsi=szip.blocks_a_line,
            out=coded.data,
        )
    )
    if count < needed_nbytes:
        raise ValueError(f"szip: expected {needed_nbytes} bytes, got {count}")
    if padding:
        body = lines * szip.line_nbytes
        full = coded[: lines * szip.padded_line_nbytes].reshape(lines, szip.padded_line_nbytes)
        np.copyto(packed[:body].reshape(lines, szip.line_nbytes), full[:, : szip.line_nbytes])
        np.copyto(packed[body:], coded[full.size : full.size + rest])
        coded = packed
    if szip.planes > 1:
        unshuffle(szip.planes, coded[:nbytes], out, spare)
    elif not in_place:
        np.copyto(out, coded[:nbytes])
    return out
