"""Finds how long chunks become when their filters are undone, where the core does not do that.

Encoded chunks and filters enter; lengths leave. HDF5 checks few of them: if a chunk decodes short,
it returns whatever its heap held. Only those filters are undone that state no length, or whose
damage HDF5 does not notice.
"""

from __future__ import annotations

import bz2
import struct
import zlib
from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np

from h5async.codec.filters import (
    BITSHUFFLE,
    BLOSC,
    BZIP2,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    NBIT,
    SCALEOFFSET,
    SHUFFLE,
    SZIP,
    ZSTD,
    Filter,
    Parameters,
)

_CHECKSUM_NBYTES = 4  # of Fletcher-32, which HDF5 verifies
_SZIP_MSB, _SZIP_NEAREST_NEIGHBOUR = 16, 32  # options of szlib.h
_AEC_MSB, _AEC_PREPROCESS = 4, 8  # flags of libaec.h
_BLOCKS = (8, 16, 32, 64)  # of pixels
_SCALEOFFSET_HEADER_NBYTES = 21
_NBIT_ATOMIC, _NBIT_ARRAY, _NBIT_COMPOUND, _NBIT_UNCHANGED = range(1, 5)  # of H5Znbit.c

Decoded = bytes | int  # decoded bytes, or their number if that is enough


def decoded_nbytes(
    filters: tuple[Filter, ...], mask: int, encoded: bytes, nbytes: int, most: int
) -> int | None:
    """Return how many bytes a chunk decodes to; None if that is not known.

    If bit i of `mask` is set, filter i was not applied. More than `nbytes`, or between two filters
    more than `most`, may be reported as an error.

    `ValueError` is raised if the bytes are damaged.
    """
    found: Decoded = encoded
    applied = [entry for bit, entry in enumerate(filters) if not mask >> bit & 1]
    for number, entry in reversed(list(enumerate(applied))):
        step, room = _LENGTHS.get(entry.number), most if number else nbytes
        if entry.number in _PASSED_ON and isinstance(found, int):
            found -= _PASSED_ON[entry.number]
        elif step is None or isinstance(found, int):
            return None
        else:
            try:
                found = step(entry.parameters, found, room)
            except (ValueError, RuntimeError, OSError, zlib.error, struct.error) as error:
                raise ValueError(f"{entry.label}: {error}") from error
        if (found if isinstance(found, int) else len(found)) > room:
            raise ValueError(f"{entry.label}: expected at most {room} bytes, got more")
    return found if isinstance(found, int) else len(found)


def unchecked(filters: tuple[Filter, ...]) -> Filter | None:
    """Return the first filter whose chunks cannot be checked; None if there is none."""
    return next((entry for entry in filters if entry.number not in _LENGTHS), None)


def _decompress(stream: Any, data: bytes, most: int) -> Decoded:
    found: bytes = stream.decompress(data, most + 1)
    if not stream.eof and len(found) <= most:
        found += stream.decompress(b"", 1)  # the checksum, or one byte too many
    if not stream.eof and len(found) <= most:
        raise ValueError("the stream was cut short")
    return found


def _fletcher32(_parameters: Parameters, data: bytes, _most: int) -> Decoded:
    if len(data) < _CHECKSUM_NBYTES:
        raise ValueError(f"{len(data)} bytes cannot hold a checksum")
    return data[:-_CHECKSUM_NBYTES]


def _lz4(_parameters: Parameters, data: bytes, most: int) -> Decoded:
    nbytes, block = struct.unpack_from(">QI", data)
    at = 12
    for _ in range(0, min(nbytes, most), block):
        at += 4 + struct.unpack_from(">I", data, at)[0]
    if at > len(data):
        raise ValueError("a block was cut short")
    return int(nbytes)


def _blosc(_parameters: Parameters, data: bytes, _most: int) -> Decoded:
    nbytes, _block, stored = struct.unpack_from("<III", data, 4)
    if stored > len(data):
        raise ValueError(f"the header says {stored} bytes, and there are {len(data)}")
    return int(nbytes)


def _bitshuffle(parameters: Parameters, data: bytes, _most: int) -> Decoded:
    is_compressed = len(parameters) > 4 and parameters[4]
    return int(struct.unpack_from(">Q", data)[0]) if is_compressed else len(data)


def _szip(parameters: Parameters, data: bytes, most: int) -> Decoded:
    """Decode by libaec: its interface for szip, which HDF5 uses, hides that a chunk is short.

    Scan lines are padded to whole blocks, and samples of 4 and 8 bytes split in bytes, as in
    libaec's sz_compat.c.
    """
    (nbytes,) = struct.unpack_from("<I", data)
    options, block, bits, pixels = (*parameters, 0, 0, 0, 0)[:4]
    # Versions of libaec decode blocks of other sizes differently.
    if nbytes > most or not (1 <= bits <= 32 or bits == 64) or not pixels or block not in _BLOCKS:
        return int(nbytes)
    is_split = bits in (32, 64)
    pixel_nbytes = 1 if is_split or bits <= 8 else 2 if bits <= 16 else 4
    blocks = -(-pixels // block)
    line, padded = pixels * pixel_nbytes, blocks * block * pixel_nbytes
    lines, rest = divmod(nbytes, line)
    needed = lines * padded + (rest or (line - padded if lines else 0))
    found = imagecodecs.aec_decode(
        data[4:],
        bitspersample=8 if is_split else bits,
        flags=(_AEC_MSB if options & _SZIP_MSB else 0)
        | (_AEC_PREPROCESS if options & _SZIP_NEAREST_NEIGHBOUR else 0),
        blocksize=block,
        rsi=blocks,
        out=bytearray((lines + (rest > 0)) * padded),
    )
    if len(found) < needed:
        raise ValueError(f"expected {needed} bytes, got {len(found)}")
    return int(nbytes)


def _nbit(parameters: Parameters, data: bytes, _most: int) -> Decoded:
    if len(parameters) > 1 and parameters[1]:  # HDF5 says "need not compress"
        return data
    try:
        needed = (parameters[2] * _packed_bits(parameters, 3)[0] + 7) // 8
    except (IndexError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"nbit: its client data are damaged ({error})") from error
    if len(data) < needed:
        raise ValueError(f"expected {needed} bytes, got {len(data)}")
    return parameters[2] * parameters[4]


def _packed_bits(parameters: Parameters, at: int) -> tuple[int, int]:
    """Return the packed bits of an element, and where its parameters end."""
    kind, nbytes = parameters[at], parameters[at + 1]
    if kind == _NBIT_ATOMIC:  # size, order, precision, offset
        return parameters[at + 3], at + 5
    if kind == _NBIT_ARRAY:  # size, then the element
        bits, end = _packed_bits(parameters, at + 2)
        return nbytes // parameters[at + 3] * bits, end
    if kind == _NBIT_COMPOUND:  # size, members, then offset and element of each
        total, end = 0, at + 3
        for _ in range(parameters[at + 2]):
            bits, end = _packed_bits(parameters, end + 1)
            total += bits
        return total, end
    if kind == _NBIT_UNCHANGED:
        return 8 * nbytes, at + 2
    raise ValueError(f"there is no class {kind}")


def _scaleoffset(parameters: Parameters, data: bytes, _most: int) -> Decoded:
    if len(parameters) < 5 or (parameters[0] == 2 and parameters[1] == 8 * parameters[4]):
        return data
    (width,) = struct.unpack_from("<I", data)
    needed = _SCALEOFFSET_HEADER_NBYTES + (parameters[2] * width + 7) // 8
    if width > 8 * parameters[4]:
        raise ValueError(f"its header says numbers of {width} bits")
    if len(data) < needed:
        raise ValueError(f"expected {needed} bytes, got {len(data)}")
    return parameters[2] * parameters[4]


_LENGTHS: dict[int, Callable[[Parameters, bytes, int], Decoded]] = {
    DEFLATE: lambda _, data, most: _decompress(zlib.decompressobj(), data, most),
    SHUFFLE: lambda _, data, most: len(data),
    FLETCHER32: _fletcher32,
    SZIP: _szip,
    NBIT: _nbit,
    SCALEOFFSET: _scaleoffset,
    BZIP2: lambda _, data, most: _decompress(bz2.BZ2Decompressor(), data, most),
    LZF: lambda _, data, most: bytes(
        imagecodecs.lzf_decode(data, header=False, out=np.empty(most, np.uint8))
    ),
    BLOSC: _blosc,
    LZ4: _lz4,
    BITSHUFFLE: _bitshuffle,
    ZSTD: lambda _, data, most: bytes(imagecodecs.zstd_decode(data, out=np.empty(most, np.uint8))),
}
# The bytes by which they shorten a chunk, whatever it holds.
_PASSED_ON = {SHUFFLE: 0, FLETCHER32: _CHECKSUM_NBYTES}
