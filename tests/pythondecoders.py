"""Undoes filters in Python: what the core's decoders are compared with, byte for byte.

A decoder is ``decode(encoded, out, spare)``: it writes to `out`, never beyond its end, and returns
a view of `out` or of `encoded`; `spare` is working memory. It raises `ValueError`, or imagecodecs'
`RuntimeError`, where the bytes are damaged.
"""

from __future__ import annotations

import bz2
import ctypes
import math
import operator
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_size_t, c_uint, c_void_p
from functools import lru_cache, partial
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
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
    find_plugin,
)
from h5async.read.coretables import Scratch, encoded_room
from h5async.read.farsources import Bytes

Decode = Callable[[Bytes, Bytes, Bytes], Bytes]


class Codec(NamedTuple):
    """How a filter is undone, the bytes that it adds, and whether `decode` writes nothing."""

    decode: Decode
    added_nbytes: int | None = None
    gives_view: bool = False


NOTHING = Codec(lambda encoded, _out, _spare: encoded, 0, gives_view=True)

_MAX_EXPANSION = 16  # bound of an intermediate result's size, in chunks


def filled(out: Bytes, count: int) -> Bytes:
    """Return the first `count` bytes of `out`."""
    return out if count == out.size else out[:count]


def working_memory(spare: Bytes, nbytes: int) -> Bytes:
    """Return working memory: part of `spare`, or new if a format needs more than usual.

    `ValueError` is raised if the size is so large that the bytes must be damaged.
    """
    if nbytes <= spare.size:
        return spare[:nbytes]
    if nbytes > _MAX_EXPANSION * spare.size:
        raise ValueError(f"a header says {nbytes} bytes, far more than a chunk has")
    return np.empty(nbytes, np.uint8)


def require_length(name: str, found: int, expected: int) -> None:
    """Raise `ValueError` unless the number of bytes is as expected."""
    if found != expected:
        raise ValueError(f"{name}: expected {expected} bytes, got {found}")


def require_room(name: str, nbytes: int, out: Bytes) -> None:
    """Raise `ValueError` if a result does not fit into `out`."""
    if nbytes > out.size:
        raise ValueError(f"{name}: expected at most {out.size} bytes, got {nbytes}")


# --- formats that one call undoes ------------------------------------------------------------

CHECKSUM_NBYTES = 4  # of Fletcher-32


def inflate(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode a zlib frame."""
    return filled(out, len(imagecodecs.deflate_decode(encoded, out=out)))


def decode_lzf(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode a LibLZF stream."""
    return filled(out, len(imagecodecs.lzf_decode(encoded, header=False, out=out)))


def decode_zstd(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode frames of zstd."""
    return filled(out, len(imagecodecs.zstd_decode(encoded, out=out)))


def decode_lz4(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode the header and the blocks of the lz4 filter; imagecodecs takes one block alone."""
    try:
        nbytes, block = struct.unpack_from(">QI", encoded.data)
        require_room("lz4", nbytes, out)
        at, ends = 12, [*range(block, nbytes, block), nbytes] if nbytes else []
        for begin, end in zip([0, *ends], ends, strict=False):
            (stored,) = struct.unpack_from(">I", encoded.data, at)
            part, target = encoded[at + 4 : at + 4 + stored], out[begin:end]
            at += 4 + stored
            if stored == target.size == part.size:
                target[:] = part
            elif (
                part.size < stored
                or len(imagecodecs.lz4_decode(part, header=False, out=target)) != target.size
            ):
                raise ValueError("lz4: a block was cut short")
    except struct.error as error:
        raise ValueError(f"lz4: {error}") from error
    return filled(out, nbytes)


def decode_bzip2(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode by the standard library: imagecodecs accepts a truncated stream."""
    stream = bz2.BZ2Decompressor()
    try:
        decoded = stream.decompress(encoded.data, max_length=out.size + 1)
        if not stream.eof and len(decoded) <= out.size:
            decoded += stream.decompress(b"", max_length=1)  # the checksum, or one byte too many
    except OSError as error:
        raise ValueError(f"bzip2: {error}") from error
    if len(decoded) > out.size:
        raise ValueError(f"bzip2: expected at most {out.size} bytes, got more")
    if not stream.eof:
        raise ValueError("bzip2: the stream was cut short")
    out[: len(decoded)] = np.frombuffer(decoded, np.uint8)
    return filled(out, len(decoded))


def decode_blosc(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode one Blosc chunk, after comparing its header with the bytes present."""
    if encoded.size < 16:
        raise ValueError(f"blosc: {encoded.size} bytes cannot hold a header")
    nbytes, _block, stored = struct.unpack_from("<III", encoded.data, 4)
    if stored > encoded.size:
        raise ValueError(f"blosc: the header says {stored} bytes, and there are {encoded.size}")
    require_room("blosc", nbytes, out)
    if nbytes:
        imagecodecs.blosc_decode(encoded, numthreads=1, out=out)
    return filled(out, nbytes)


def verify_fletcher32(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return a view of `encoded` without its checksum, which is verified.

    HDF5 before 1.6.3 swapped the bytes of each half on little-endian machines, and HDF5 still
    accepts both.
    """
    if encoded.size < CHECKSUM_NBYTES:
        raise ValueError(f"fletcher32: {encoded.size} bytes cannot hold a checksum")
    values, stored = encoded[:-CHECKSUM_NBYTES], encoded[-CHECKSUM_NBYTES:].tobytes()
    computed = int(imagecodecs.h5checksum_fletcher32(values)).to_bytes(CHECKSUM_NBYTES, "little")
    swapped = bytes((computed[1], computed[0], computed[3], computed[2]))
    if stored not in (computed, swapped):
        raise ValueError(
            f"fletcher32: the stored checksum is {stored.hex()}, the computed one {computed.hex()}"
        )
    return values


def unshuffle(element_nbytes: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Gather the bytes of each element; bytes beyond the last whole element are unchanged."""
    require_room("shuffle", encoded.size, out)
    out = filled(out, encoded.size)
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


# --- szip


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


def szip_codec(parameters: tuple[int, ...]) -> Codec | None:
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
    return Codec(partial(_decode_szip, szip))


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


# --- bitshuffle


def bitshuffle_codec(parameters: tuple[int, ...]) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    _, _, element, block, compressor = (*parameters, 0, 0, 0, 0, 0)[:5]
    if element == 0:
        return None
    if compressor == 0:
        if block % 8:
            return None
        return Codec(partial(_bitunshuffle, element, block), added_nbytes=0)
    if compressor not in (2, 3):
        return None
    return Codec(partial(_decode_bitshuffle, element, compressor == 2))


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


# --- scale-offset and n-bit

_NBYTES_DECODED = (1, 2, 4, 8)
_IS_LITTLE_ENDIAN_HOST = sys.byteorder == "little"
_ORDERS = ("<", ">")

_SCALEOFFSET_PARAMETERS = 20
_FLOAT_D_SCALING, _INTEGER = 0, 2
_INTEGER_CLASS, _FLOAT_CLASS = 0, 1
_HEADER_NBYTES = 21

_NBIT_ATOMIC = 1  # of H5Znbit.c
_NBIT_ATOMIC_PARAMETERS = 8

_BLOCK_NBYTES = 1 << 18  # so that a block stays in the processor's cache between the calls on it
_READ_BEYOND_NBYTES = 16  # imagecodecs, too, reads whole words, and the last may be cut off


class _ScaleOffset(NamedTuple):
    """The client data of the scale-offset filter.

    `power` is a power of ten as a scalar of the float type, None for integers. `fill` has the bits
    of the fill value, None if it is undefined.
    """

    size: int
    dtype: np.dtype[Any]
    is_unchanged: bool
    power: np.floating[Any] | None
    fill: int | None


class _NBit(NamedTuple):
    """The client data of the n-bit filter; `precision` 0 means that the bytes are unchanged."""

    nbytes: int
    dtype: np.dtype[Any]
    precision: int
    offset: int


def scaleoffset_codec(parameters):
    entry = _parse_scaleoffset(parameters)
    if entry is None:
        return None
    return (
        NOTHING if entry.is_unchanged else Codec(partial(_packed, decode_scaleoffset, parameters))
    )


def nbit_codec(parameters):
    if len(parameters) > 1 and parameters[0] == len(parameters) and parameters[1] != 0:
        return NOTHING  # HDF5 says "need not compress"
    if _parse_nbit(parameters) is None:
        return None
    return Codec(partial(_packed, decode_nbit, parameters))


def _packed(decode, parameters, encoded, out, _spare):
    return decode(parameters, encoded, out)


def decode_scaleoffset(parameters: tuple[int, ...], encoded: Bytes, out: Bytes) -> Bytes:
    """Undo the scale-offset filter; return the part of `out` that was filled.

    `encoded` is not changed. `out` may lie at any address, apart from `encoded`; its content after
    an error is undefined. `ValueError` is raised if the bytes are damaged, the result does not fit,
    or the client data are not decoded here.
    """
    entry = _parse_scaleoffset(parameters)
    if entry is None:
        raise ValueError("scaleoffset: these client data are not decoded here")
    nbytes = entry.size * entry.dtype.itemsize
    room = _room("scaleoffset", nbytes, out)
    if entry.is_unchanged:
        return _copy_unchanged("scaleoffset", encoded, room)
    _require("scaleoffset", encoded, _HEADER_NBYTES)
    header = encoded[:_HEADER_NBYTES].tobytes()
    width = int.from_bytes(header[:4], "little")
    minimum = int.from_bytes(header[5 : 5 + min(header[4], 8)], "little")
    full_width = 8 * entry.dtype.itemsize
    if width > full_width:
        raise ValueError(
            f"scaleoffset: the header says numbers of {width} bits, in a type of {full_width}"
        )
    _require("scaleoffset", encoded, _HEADER_NBYTES + _packed_nbytes(entry.size, width))
    packed = encoded[_HEADER_NBYTES:]
    result = room.view(entry.dtype)
    if width == full_width:
        np.copyto(result, packed[:nbytes].view(entry.dtype.newbyteorder("<")))
    elif entry.power is None:
        _add_to_integers(entry, packed, width, minimum, result)
    else:
        _scale_floats(entry.power, entry, packed, width, minimum, result)
    return room


def decode_nbit(parameters: tuple[int, ...], encoded: Bytes, out: Bytes) -> Bytes:
    """Undo the n-bit filter: shift each number's bits back, with zeros around them.

    tuple[int, ...], result and errors are those of `decode_scaleoffset`.
    """
    entry = _parse_nbit(parameters)
    if entry is None:
        raise ValueError("nbit: these client data are not decoded here")
    room = _room("nbit", entry.nbytes, out)
    if not entry.precision:
        return _copy_unchanged("nbit", encoded, room)
    result = room.view(entry.dtype)
    _require("nbit", encoded, _packed_nbytes(result.size, entry.precision))
    native = entry.dtype.newbyteorder("=")
    offset = native.type(entry.offset)
    for part, numbers in _unpack(encoded, entry.precision, result.size):
        if entry.offset:
            np.left_shift(numbers, offset, out=result[part], dtype=native, casting="safe")
        else:
            np.copyto(result[part], numbers)
    return room


@lru_cache(maxsize=256)
def _power_of_ten(exponent: int, nbytes: int) -> np.floating[Any]:
    """Return what the C library's `pow`, or `powf` for 4 bytes, returns to HDF5 too.

    NumPy calls it for scalars; for arrays it has a vectorized one that may round differently.
    """
    if nbytes == 4:
        with np.errstate(all="ignore"):
            power: np.floating[Any] = np.float32(10) ** np.float32(exponent)
        return power
    try:
        return np.float64(math.pow(10, exponent))
    except OverflowError:
        return np.float64(np.inf)


def _parse_scaleoffset(parameters: tuple[int, ...]) -> _ScaleOffset | None:
    if len(parameters) != _SCALEOFFSET_PARAMETERS or not _IS_LITTLE_ENDIAN_HOST:
        return None
    scale_type, factor, count, class_, nbytes, sign, order, has_fill = parameters[:8]
    factor = (factor + (1 << 31)) % (1 << 32) - (1 << 31)  # the file has it without its sign
    if nbytes not in _NBYTES_DECODED or order not in (0, 1) or has_fill not in (0, 1) or count < 1:
        return None
    power: np.floating[Any] | None = None
    if class_ == _INTEGER_CLASS:
        if scale_type != _INTEGER or sign not in (0, 1) or factor > 8 * nbytes:
            return None
    elif class_ == _FLOAT_CLASS:
        if scale_type != _FLOAT_D_SCALING or nbytes < 4:
            return None
        power = _power_of_ten(factor, nbytes)
        if not 0 < power < np.inf:
            return None
    else:
        return None
    fill = (parameters[8] | parameters[9] << 32) & ((1 << 8 * nbytes) - 1)
    return _ScaleOffset(
        size=count,
        dtype=np.dtype(f"{_ORDERS[order]}u{nbytes}"),
        is_unchanged=power is None and factor == 8 * nbytes,
        power=power,
        fill=fill if has_fill else None,
    )


@lru_cache(maxsize=256)
def _parse_nbit(parameters: tuple[int, ...]) -> _NBit | None:
    # HDF5 requires five; fewer do not say how long the chunk is.
    if len(parameters) < 5 or parameters[0] != len(parameters) or not _IS_LITTLE_ENDIAN_HOST:
        return None
    _, need_not_compress, count, class_, nbytes, *rest = parameters
    if count < 1 or nbytes < 1:
        return None
    if need_not_compress:
        return _NBit(count * nbytes, np.dtype(np.uint8), 0, 0)
    if (
        class_ != _NBIT_ATOMIC
        or len(parameters) != _NBIT_ATOMIC_PARAMETERS
        or nbytes not in _NBYTES_DECODED
    ):
        return None
    order, precision, offset = rest
    if order not in (0, 1) or precision < 1 or precision + offset > 8 * nbytes:
        return None
    return _NBit(count * nbytes, np.dtype(f"{_ORDERS[order]}u{nbytes}"), precision, offset)


def _room(name: str, nbytes: int, out: Bytes) -> Bytes:
    require_room(name, nbytes, out)
    return out if nbytes == out.size else out[:nbytes]


def _copy_unchanged(name: str, encoded: Bytes, room: Bytes) -> Bytes:
    require_length(name, encoded.size, room.size)
    np.copyto(room, encoded)
    return room


def _require(name: str, encoded: Bytes, nbytes: int) -> None:
    if encoded.size < nbytes:
        raise ValueError(f"{name}: expected at least {nbytes} bytes, got {encoded.size}")


def _packed_nbytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def _add_to_integers(
    entry: _ScaleOffset, packed: Bytes, width: int, minimum: int, result: NDArray[Any]
) -> None:
    """Add the minimum, modulo the type's range, so that the sign does not matter."""
    native = entry.dtype.newbyteorder("=")
    addend = native.type(minimum & ((1 << 8 * entry.dtype.itemsize) - 1))
    for part, numbers in _unpack(packed, width, entry.size):
        np.add(numbers, addend, out=result[part], dtype=native, casting="safe")
        _put_fill(entry, numbers, width, result[part])


def _scale_floats(
    power: np.floating[Any],
    entry: _ScaleOffset,
    packed: Bytes,
    width: int,
    minimum: int,
    result: NDArray[Any],
) -> None:
    """Divide by the power, then add the minimum, each rounded to the type itself, as HDF5 does."""
    nbytes = entry.dtype.itemsize
    addend = np.frombuffer(minimum.to_bytes(8, "little"), f"<f{nbytes}")[0]
    floats = result.view(entry.dtype.str.replace("u", "f"))
    with np.errstate(all="ignore"):
        for part, numbers in _unpack(packed, width, entry.size):
            # Bits of a type's own width are cast from the signed type, which HDF5 casts from.
            integers = numbers.view(f"i{nbytes}") if numbers.itemsize == nbytes else numbers
            quotients = np.divide(integers, power, dtype=power.dtype, casting="same_kind")
            np.add(quotients, addend, out=floats[part])
            _put_fill(entry, numbers, width, result[part])


def _put_fill(entry: _ScaleOffset, numbers: NDArray[Any], width: int, result: NDArray[Any]) -> None:
    """Put the fill value where all bits of a packed number are set."""
    if entry.fill is not None:
        np.copyto(result, result.dtype.type(entry.fill), where=numbers == (1 << width) - 1)


def _unpack(packed: Bytes, width: int, count: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield blocks of numbers, as unsigned integers of the least itemsize, and their slices.

    `packed` holds at least the bits of `count` numbers. Blocks share their memory.
    """
    itemsize = next(n for n in _NBYTES_DECODED if width <= 8 * n)
    block = _BLOCK_NBYTES // itemsize
    if width == 8 * itemsize:
        whole = packed[: count * itemsize].view(f">u{itemsize}")
        for first in range(0, count, block):
            yield slice(first, first + block), whole[first : first + block]
        return
    most = min(count, block)
    numbers = np.zeros(most + 7, f"u{itemsize}")  # 7 of one bit may lie in the last byte
    window = np.empty(_packed_nbytes(most, width) + _READ_BEYOND_NBYTES, np.uint8)
    for first in range(0, count, block):
        size = min(count - first, block)
        start, nbytes = first * width // 8, _packed_nbytes(size, width)
        np.copyto(window[:nbytes], packed[start : start + nbytes])
        if width > 32:
            _unpack_wide(window, width, numbers[:size])
        elif width:
            imagecodecs.packints_decode(window[:nbytes], numbers.dtype, width, out=numbers)
        yield slice(first, first + size), numbers[:size]


def _unpack_wide(window: Bytes, width: int, numbers: NDArray[Any]) -> None:
    """Unpack numbers of 33 to 63 bits, which imagecodecs does not.

    A number begins at any bit of a byte; `phases` numbers later, one begins at the same bit.
    `window` ends `_READ_BEYOND_NBYTES` bytes after the numbers.
    """
    phases = 8 // math.gcd(8, width)
    stride = (width * phases // 8,)
    for phase in range(min(phases, numbers.size)):
        column = numbers[phase::phases]
        byte, bit = divmod(phase * width, 8)
        eight: NDArray[Any] = np.ndarray(column.shape, ">u8", window, byte, stride)
        np.copyto(column, eight)
        beyond = bit + width - 64
        if beyond <= 0:
            np.right_shift(column, np.uint64(-beyond), out=column)
        else:
            ninth: NDArray[Any] = np.ndarray(column.shape, "u1", window, byte + 8, stride)
            np.left_shift(column, np.uint64(beyond), out=column)
            np.bitwise_or(column, ninth >> np.uint8(8 - beyond), out=column)
    np.bitwise_and(numbers, np.uint64((1 << width) - 1), out=numbers)


# --- plugins

_REVERSE = 0x0100
_Function = ctypes.CFUNCTYPE(
    c_size_t, c_uint, c_size_t, POINTER(c_uint), c_size_t, POINTER(c_size_t), POINTER(c_void_p)
)


class _CallPlugin:
    """Undoes a filter by its plugin, from Python."""

    def __init__(self, number: int, function: int, parameters: tuple[int, ...]) -> None:
        self._name = f"filter {number}"
        self._function = _Function(function)
        self._values = (c_uint * max(1, len(parameters)))(*parameters)
        self._count = len(parameters)
        self._is_blosc2 = number == BLOSC2

    def __call__(self, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
        if self._is_blosc2:
            chunk = int.from_bytes(encoded[11:15].tobytes(), "big")
            if int.from_bytes(encoded[30:38].tobytes(), "big") > out.size or (
                chunk + 32 <= encoded.size
                and encoded[chunk + 2] & 5 == 5
                and encoded[chunk + 31] >> 4 & 7 >= 4
            ):
                raise ValueError("blosc2: the chunk is too long, or has no values")
        libc = ctypes.CDLL(None)
        libc.malloc.restype = c_void_p
        memory = libc.malloc(c_size_t(encoded.size + out.size + 1))
        ctypes.memset(memory, 0, encoded.size + out.size + 1)
        ctypes.memmove(memory, encoded.ctypes.data, encoded.size)
        buffer, nbytes = c_void_p(memory), c_size_t(encoded.size)
        with _turn:
            count = self._function(
                _REVERSE, self._count, self._values, encoded.size, byref(nbytes), byref(buffer)
            )
        try:
            if not count or not buffer.value:
                raise ValueError(f"{self._name}: its plugin finds the bytes damaged")
            require_room(self._name, count, out)
            ctypes.memmove(out.ctypes.data, buffer.value, count)
        finally:
            libc.free(buffer)
        return filled(out, count)


_turn = threading.Lock()


# --- pipelines


@lru_cache(maxsize=256)
def codec_of(entry: Filter) -> Codec | None:
    """Return how a filter is undone in Python; None if it is not."""
    if entry.number == SHUFFLE:
        return Codec(partial(unshuffle, entry.parameters[0]), 0)
    if entry.number in _PLAIN:
        return _PLAIN[entry.number]
    if entry.number in _BY_PARAMETERS:
        return _BY_PARAMETERS[entry.number](entry.parameters)
    function = find_plugin(entry.number)
    return function and Codec(_CallPlugin(entry.number, function, entry.parameters))


_PLAIN = {
    DEFLATE: Codec(inflate),
    FLETCHER32: Codec(verify_fletcher32, CHECKSUM_NBYTES, gives_view=True),
    LZF: Codec(decode_lzf),
    BLOSC: Codec(decode_blosc),
    BZIP2: Codec(decode_bzip2),
    LZ4: Codec(decode_lz4),
    ZSTD: Codec(decode_zstd),
}
_BY_PARAMETERS = {
    SZIP: szip_codec,
    NBIT: nbit_codec,
    SCALEOFFSET: scaleoffset_codec,
    BITSHUFFLE: bitshuffle_codec,
}


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
            codec = codec_of(entry)
            assert codec is not None, f"no decoder of {entry.label}"
            steps.append(_Step(codec.decode, not codec.gives_view, nbytes, entry.label))
            added = codec.added_nbytes
            nbytes = None if nbytes is None or added is None else nbytes + added
        return steps[::-1]


def wrong_size(expected: int, found: int, source: str | None = None) -> str:
    """Say that a chunk, or the output of a filter, has a wrong size."""
    return f"{f'{source}: ' if source else ''}expected {expected} bytes, got {found}"
