"""Undoes the n-bit and scale-offset filters, byte for byte as HDF5 does.

The formats are those of the HDF5 reference (H5Zscaleoffset.c, H5Znbit.c). Both store the bits of
one number after the other, the most significant first, without gaps. Anything that would not be
decoded exactly is left to HDF5: there is no codec for it. Both filters know the number of bytes in
a chunk, so they must be the first of their pipeline.

Bits are moved by imagecodecs, and by NumPy calls on many numbers at once, which drop the GIL.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import Bytes, require_length, require_room
from h5async.codec.entry import (
    NOTHING,
    Codec,
    CoreFilter,
    CoreKind,
    Parameters,
    StatedLengths,
)

_NBYTES_DECODED = (1, 2, 4, 8)
_IS_LITTLE_ENDIAN_HOST = sys.byteorder == "little"
_ORDERS = ("<", ">")

_SCALEOFFSET_PARAMETERS = 20
_FLOAT_D_SCALING, _INTEGER = 0, 2
_INTEGER_CLASS, _FLOAT_CLASS = 0, 1
_HEADER_NBYTES = 21

_NBIT_ATOMIC, _NBIT_ARRAY, _NBIT_COMPOUND, _NBIT_UNCHANGED = range(1, 5)  # of H5Znbit.c
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


def scaleoffset_codec(parameters: Parameters) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    entry = _parse_scaleoffset(parameters)
    if entry is None:
        return None
    if entry.is_unchanged:
        return NOTHING
    core = CoreFilter(CoreKind.SCALEOFFSET, values=parameters)
    return Codec(partial(_without_spare, decode_scaleoffset, parameters), core=core)


def nbit_codec(parameters: Parameters) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    if len(parameters) > 1 and parameters[0] == len(parameters) and parameters[1] != 0:
        return NOTHING  # HDF5 says "need not compress"
    if _parse_nbit(parameters) is None:
        return None
    core = CoreFilter(CoreKind.NBIT, values=parameters)
    return Codec(partial(_without_spare, decode_nbit, parameters), core=core)


def _without_spare(
    decode: Callable[[Parameters, Bytes, Bytes], Bytes],
    parameters: Parameters,
    encoded: Bytes,
    out: Bytes,
    _spare: Bytes,
) -> Bytes:
    return decode(parameters, encoded, out)


def stated_chunk_nbytes(parameters: Parameters) -> int | None:
    """Return the bytes of a chunk by the client data of either filter; None if they do not say."""
    return parameters[2] * parameters[4] if len(parameters) > 4 else None


def _packed_nbit_nbytes(parameters: Parameters) -> int:
    """Return the bytes of an n-bit encoded chunk, for client data of any class.

    `ValueError` is raised if they are damaged.
    """
    try:
        if parameters[1]:
            return parameters[2] * parameters[4]
        return _packed_nbytes(parameters[2], _packed_bits(parameters, 3)[0])
    except (IndexError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"nbit: its client data are damaged ({error})") from error


NBIT_LENGTHS = StatedLengths(_packed_nbit_nbytes)


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


def decode_scaleoffset(parameters: Parameters, encoded: Bytes, out: Bytes) -> Bytes:
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


def decode_nbit(parameters: Parameters, encoded: Bytes, out: Bytes) -> Bytes:
    """Undo the n-bit filter: shift each number's bits back, with zeros around them.

    Parameters, result and errors are those of `decode_scaleoffset`.
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
def _parse_scaleoffset(parameters: Parameters) -> _ScaleOffset | None:
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


@lru_cache(maxsize=256)
def _parse_nbit(parameters: Parameters) -> _NBit | None:
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
