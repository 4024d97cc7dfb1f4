"""Parses and formats filter pipelines, encodes chunks, and finds their decoded lengths, in Python.

A pipeline is spelled like ``shuffle+gzip:4``: filters joined by ``+``, each with its level, if it
has levels. `find_encoder` returns a function that encodes without the GIL.

Lengths are checked for chunks that the core does not decode: HDF5 checks few of them, and returns
stale heap memory for a chunk that decodes to too few bytes. Filters are undone here only if they do
not store the decoded length, or if HDF5 does not detect their damage.
"""

from __future__ import annotations

import bz2
import ctypes
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint, c_void_p
from functools import partial
from typing import Any, NamedTuple

import h5py
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
    Parameters,
    find_plugin,
    is_known_to_hdf5,
    is_safe_in_threads,
)
from h5async.errors import ConfigError, MissingPackageError
from h5async.spelling import named

Bytes = NDArray[np.uint8]
Encoded = tuple[Any, int]  # a buffer of bytes, and the mask of filters that were left out
Encode = Callable[[Bytes], Encoded]
_EncodeOne = Callable[[Bytes], Any]

_WITHOUT_SAVING = frozenset({SHUFFLE, FLETCHER32})  # filters that never compress


class _Spelling(NamedTuple):
    """A filter as users name it."""

    number: int
    parameters: tuple[int, ...] = ()  # the end of its client data; HDF5 may prepend others
    levels: range = range(0)
    level_at: int = 0
    told_by: tuple[int, ...] = ()  # indices that distinguish it from others of its number

    def at_level(self, level: int) -> tuple[int, ...]:
        """Return the client data for a level."""
        at = self.level_at
        return (*self.parameters[:at], level, *self.parameters[at + 1 :])

    def spell(self, name: str, stored: tuple[int, ...]) -> str | None:
        """Return the spelling of client data; None if they do not match this filter."""
        last = stored[max(0, len(stored) - len(self.parameters)) :]
        if len(last) < len(self.parameters):
            return None
        if any(last[at] != self.parameters[at] for at in self.told_by):
            return None
        if not self.levels:
            return name
        return f"{name}:{last[self.level_at]}" if last[self.level_at] in self.levels else None


_BLOSC_CODES = {"lz": 0, "lz4": 1, "lz4hc": 2, "zlib": 4, "zstd": 5}
_ZSTD_LEVELS = range(1, 23)
_SPELLINGS = {
    "gzip": _Spelling(DEFLATE, (4,), range(10)),
    "lzf": _Spelling(LZF),
    "zstd": _Spelling(ZSTD, (3,), _ZSTD_LEVELS),
    "lz4": _Spelling(LZ4),
    "bzip2": _Spelling(BZIP2, (9,), range(1, 10)),
    "shuffle": _Spelling(SHUFFLE),
    "fletcher32": _Spelling(FLETCHER32),
    "bitshuffle": _Spelling(BITSHUFFLE, (0, 0), told_by=(0, 1)),
    "bitshuffle-lz4": _Spelling(BITSHUFFLE, (0, 2), told_by=(0, 1)),
    "bitshuffle-zstd": _Spelling(BITSHUFFLE, (0, 3, 3), _ZSTD_LEVELS, 2, told_by=(0, 1)),
    **{
        f"{name}-{codec}": _Spelling(number, (0, 0, 0, 0, 5, 1, code), range(10), 4, told_by=(5, 6))
        for name, number in (("blosc", BLOSC), ("blosc2", BLOSC2))
        for codec, code in _BLOSC_CODES.items()
    },
}


def parse_filters(text: str) -> tuple[Filter, ...]:
    """Return the pipeline that a text spells; ``none`` is an empty one."""
    words = [] if text in ("none", "") else text.split("+")
    return tuple(_parse_filter(word.strip(), text) for word in words)


def _parse_filter(word: str, text: str) -> Filter:
    name, has_level, level = word.partition(":")
    spelling = _SPELLINGS.get({"deflate": "gzip"}.get(name, name))
    if spelling is None:
        raise ConfigError(
            f"{named('filter', text)}: h5async cannot write the filter {name!r}; choose from "
            f"{', '.join(_SPELLINGS)}, and none"
        )
    if has_level and (not level.isdigit() or int(level) not in spelling.levels):
        levels = spelling.levels
        has = f"has levels from {levels[0]} to {levels[-1]}" if levels else "has no levels"
        raise ConfigError(f"{named('filter', text)}: invalid level {level!r}: {name} {has}")
    parameters = spelling.at_level(int(level)) if has_level else spelling.parameters
    return Filter(spelling.number, parameters, name)


def spell_filters(filters: Sequence[Filter]) -> str:
    """Return the spelling of a pipeline, with the bare names of filters that have none."""
    spelled = []
    for entry in filters:
        same = ((name, one) for name, one in _SPELLINGS.items() if one.number == entry.number)
        found = (one.spell(name, entry.parameters) for name, one in same)
        spelled.append(next(filter(None, found), entry.label))
    return "+".join(spelled) or "none"


def set_filters(plist: h5py.h5p.PropDCID, filters: Sequence[Filter]) -> None:
    """Add a pipeline to the creation properties of a dataset."""
    for entry in filters:
        if not is_known_to_hdf5(entry):
            raise MissingPackageError(
                f"the filter {entry.label} needs hdf5plugin: pip install 'h5async[filters]'"
            )
        plist.set_filter(entry.number, h5py.h5z.FLAG_OPTIONAL, entry.parameters)


def find_encoder(filters: Sequence[Filter]) -> Encode | None:
    """Return a function that encodes chunks as the filters of a dataset do; None if HDF5 has to.

    `filters` are read from the dataset after its creation. The function is thread-safe. For a
    chunk that a compressor does not shrink, it leaves that filter out, as the filter mask says.
    """
    found = [_find(entry) for entry in filters]
    encoders = [one for one in found if one is not None]
    if len(encoders) < len(found):
        return None
    saving = [entry.number not in _WITHOUT_SAVING for entry in filters]
    return partial(_encode, list(zip(encoders, saving, strict=True)))


def _encode(steps: Sequence[tuple[_EncodeOne, bool]], chunk: Bytes) -> Encoded:
    mask = 0
    for position, (encode, is_saving) in enumerate(steps):
        found = encode(chunk)
        if found is None or (is_saving and len(found) >= len(chunk)):
            mask |= 1 << position
        else:
            chunk = np.frombuffer(found, np.uint8)
    return chunk, mask


def _find(entry: Filter) -> _EncodeOne | None:
    number, parameters = entry.number, entry.parameters
    level = parameters[0] if parameters else None
    if number == DEFLATE:
        effort = 10 if level == 9 else level  # libdeflate's 9 can exceed zlib's by a fifth
        return lambda chunk: imagecodecs.deflate_encode(chunk, effort)
    if number == SHUFFLE and parameters:
        return partial(_shuffle, parameters[0])
    if number == FLETCHER32:
        return _fletcher32
    if number == LZF:
        return lambda chunk: imagecodecs.lzf_encode(chunk)
    if number == ZSTD:
        return lambda chunk: imagecodecs.zstd_encode(chunk, level)
    function = find_plugin(number)
    if function is None:
        return None
    turns = threading.Lock() if not is_safe_in_threads(number) else None
    return partial(
        _call_plugin, _Function(function), (c_uint * len(parameters))(*parameters), turns
    )


def _shuffle(element: int, chunk: Bytes) -> Any:
    """Group the first bytes of all elements, then the second, and so on; the rest comes last."""
    whole = len(chunk) // element * element
    out = np.empty_like(chunk)
    out[:whole].reshape(element, -1)[...] = chunk[:whole].reshape(-1, element).T
    out[whole:] = chunk[whole:]
    return out


def _fletcher32(chunk: Bytes) -> Any:
    checksum = np.array([imagecodecs.h5checksum_fletcher32(chunk)], "<u4")
    return np.concatenate([chunk, checksum.view(np.uint8)])


# H5Z_func_t: flags, client data, bytes, bytes of the buffer, the buffer; called without the GIL.
_Function = ctypes.CFUNCTYPE(
    c_size_t,
    c_uint,
    c_size_t,
    ctypes.POINTER(c_uint),
    c_size_t,
    ctypes.POINTER(c_size_t),
    ctypes.POINTER(c_void_p),
)
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = c_void_p, [c_size_t]
_libc.free.restype, _libc.free.argtypes = None, [c_void_p]


def _call_plugin(
    function: Any, values: Any, turns: threading.Lock | None, chunk: Bytes
) -> bytes | None:
    """Encode as HDF5 does, on memory from malloc, which the plugin may replace with its own."""
    buffer, room = c_void_p(_libc.malloc(len(chunk))), c_size_t(len(chunk))
    if not buffer.value:
        raise MemoryError
    ctypes.memmove(buffer, chunk.ctypes.data, len(chunk))
    arguments = (0, len(values), values, len(chunk), byref(room), byref(buffer))
    try:
        if turns is None:
            count = function(*arguments)
        else:
            with turns:
                count = function(*arguments)
        return ctypes.string_at(buffer, count) if count else None
    finally:
        _libc.free(buffer)


# --- lengths --------------------------------------------------------------------------------------

_CHECKSUM_NBYTES = 4  # of Fletcher-32, which HDF5 verifies
_SZIP_MSB, _SZIP_NEAREST_NEIGHBOUR = 16, 32  # options of szlib.h
_AEC_MSB, _AEC_PREPROCESS = 4, 8  # flags of libaec.h
_BLOCKS = (8, 16, 32, 64)  # of pixels
_SCALEOFFSET_HEADER_NBYTES = 21
_NBIT_ATOMIC, _NBIT_ARRAY, _NBIT_COMPOUND, _NBIT_UNCHANGED = range(1, 5)  # of H5Znbit.c

Decoded = bytes | int  # decoded bytes, or just their number if that is enough


def decoded_nbytes(
    filters: tuple[Filter, ...], mask: int, encoded: bytes, nbytes: int, most: int
) -> int | None:
    """Return the number of bytes that a chunk decodes to; None if it is unknown.

    If bit i of `mask` is set, filter i was not applied. `ValueError` is raised if the bytes are
    damaged. It may be raised, too, if the chunk decodes to more than `nbytes`, or to more than
    `most` between two filters.
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
        raise ValueError("the stream is truncated")
    return found


def _without_checksum(_parameters: Parameters, data: bytes, _most: int) -> Decoded:
    if len(data) < _CHECKSUM_NBYTES:
        raise ValueError(f"{len(data)} bytes cannot hold a checksum")
    return data[:-_CHECKSUM_NBYTES]


def _lz4(_parameters: Parameters, data: bytes, most: int) -> Decoded:
    nbytes, block = struct.unpack_from(">QI", data)
    if not block:
        raise ValueError("its blocks have 0 bytes according to the header")
    at = 12
    for _ in range(0, min(nbytes, most), block):
        at += 4 + struct.unpack_from(">I", data, at)[0]
    if at > len(data):
        raise ValueError("a block is truncated")
    return int(nbytes)


def _blosc(_parameters: Parameters, data: bytes, _most: int) -> Decoded:
    nbytes, _block, stored = struct.unpack_from("<III", data, 4)
    if stored > len(data):
        raise ValueError(f"expected {stored} bytes according to the header, got {len(data)}")
    return int(nbytes)


def _bitshuffle(parameters: Parameters, data: bytes, _most: int) -> Decoded:
    is_compressed = len(parameters) > 4 and parameters[4]
    return int(struct.unpack_from(">Q", data)[0]) if is_compressed else len(data)


def _szip(parameters: Parameters, data: bytes, most: int) -> Decoded:
    """Decode with libaec itself: its szip interface, which HDF5 uses, hides that a chunk is short.

    Scan lines are padded to whole blocks, and 4- and 8-byte samples are split into bytes, as in
    libaec's sz_compat.c.
    """
    (nbytes,) = struct.unpack_from("<I", data)
    options, block, bits, pixels = (*parameters, 0, 0, 0, 0)[:4]
    # Blocks of other sizes decode differently in different versions of libaec.
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
    raise ValueError(f"unknown class {kind}")


def _scaleoffset(parameters: Parameters, data: bytes, _most: int) -> Decoded:
    if len(parameters) < 5 or (parameters[0] == 2 and parameters[1] == 8 * parameters[4]):
        return data
    (width,) = struct.unpack_from("<I", data)
    needed = _SCALEOFFSET_HEADER_NBYTES + (parameters[2] * width + 7) // 8
    if width > 8 * parameters[4]:
        raise ValueError(f"its header has an invalid width of {width} bits")
    if len(data) < needed:
        raise ValueError(f"expected {needed} bytes, got {len(data)}")
    return parameters[2] * parameters[4]


_LENGTHS: dict[int, Callable[[Parameters, bytes, int], Decoded]] = {
    DEFLATE: lambda _, data, most: _decompress(zlib.decompressobj(), data, most),
    SHUFFLE: lambda _, data, most: len(data),
    FLETCHER32: _without_checksum,
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
# Filters whose decoding removes a fixed number of bytes from any chunk.
_PASSED_ON = {SHUFFLE: 0, FLETCHER32: _CHECKSUM_NBYTES}
