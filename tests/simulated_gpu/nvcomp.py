"""nvCOMP's batched decoders, done on the CPU when a stream has come so far.

They read addresses and sizes out of device memory when they run, say in `states` what they cannot
decode, need their memory to work with, and insist on deflate's alignment, as nvCOMP's do. Damage is
noticed here by zlib, zstd and LZ4; nvCOMP notices less.
"""

from __future__ import annotations

import ctypes
import functools
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from simulated_gpu import simulation

_CANNOT_DECODE = 12  # nvcompStatus_t
_BAD_ARGUMENT = 10
_Size, _Pointer = ctypes.c_size_t, ctypes.c_void_p


class Decoders:
    """What tests look at and set.

    Attributes
    ----------
    calls, blocks
        How often a decoder was called, and for how many blocks.
    damage
        If given, what was decoded goes through this.
    """

    calls = blocks = 0
    damage: Callable[[bytes], bytes] | None = None


DECODERS = Decoders()


class _Options(ctypes.Structure):
    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


_TempSize = ctypes.CFUNCTYPE(
    ctypes.c_int, _Size, _Size, _Options, ctypes.POINTER(_Size), _Size, _Pointer
)
_Decompress = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(_Pointer, _Pointer, _Pointer, _Pointer, _Size),
    *(_Pointer, _Size, _Pointer, _Options, _Pointer, _Pointer),
)


def _temp_nbytes(count: int, largest: int, options: Any, found: Any, *_: Any) -> int:
    found[0] = 1000 + 64 * count
    return 0


def _decompress(
    form: str,
    sources: int,
    source_nbytes: int,
    target_nbytes: int,
    actual_nbytes: int,
    count: int,
    temp: int,
    temp_nbytes: int,
    targets: int,
    options: Any,
    states: int,
    stream: int | None,
) -> int:
    lists = [(sources, 8), (source_nbytes, 8), (target_nbytes, 8), (actual_nbytes, 8)]
    lists += [(targets, 8), (states, 4)]
    areas = [(address, size * count) for address, size in lists] + [(temp, temp_nbytes)]
    if temp % 8 or temp_nbytes < 1000 + 64 * count or not all(_is_there(*area) for area in areas):
        return _BAD_ARGUMENT
    DECODERS.calls += 1
    DECODERS.blocks += count

    def run() -> None:
        if not all(_is_there(*area) for area in areas):
            return
        _words(temp, temp_nbytes // 8)[...] = 0xDEAD
        actual, state = _words(actual_nbytes, count), _words(states, count, np.int32)
        sizes, rooms = _words(source_nbytes, count), _words(target_nbytes, count)
        blocks = zip(_words(sources, count), sizes, _words(targets, count), rooms, strict=True)
        for i, (source, size, target, room) in enumerate(blocks):
            try:
                actual[i] = _decode_block(form, int(source), int(size), int(target), int(room))
                state[i] = 0
            except Exception:
                actual[i], state[i] = 0, _CANNOT_DECODE

    return simulation().put(stream or 0, run)


def _decode_block(form: str, source: int, size: int, target: int, room: int) -> int:
    if not _is_there(source, size) or not _is_there(target, room):
        raise ValueError("no such memory")
    if form == "Deflate" and source % 4:
        raise ValueError("deflate: a source lies at a multiple of 4")
    data = ctypes.string_at(source, size)
    if form == "Deflate":
        decoder = zlib.decompressobj(-15)
        found = decoder.decompress(data, room + 1)
        if not decoder.eof:
            raise ValueError("no end")
    else:
        decode = imagecodecs.zstd_decode if form == "Zstd" else imagecodecs.lz4_decode
        found = bytes(decode(data, out=room))
    if len(found) > room:
        raise ValueError("too long")
    if DECODERS.damage is not None:
        found = DECODERS.damage(found)
    ctypes.memmove(target, found, len(found))
    return len(found)


def _is_there(address: int, nbytes: int) -> bool:
    return simulation().is_device_memory("nvCOMP", address, nbytes)


def _words(address: int, count: int, dtype: Any = np.uint64) -> NDArray[Any]:
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


def _guarded(function: Any) -> Any:
    """Print what is raised, which ctypes would drop, and return an error."""

    def call(*arguments: Any) -> int:
        try:
            return int(function(*arguments))
        except Exception:
            traceback.print_exc()
            return _BAD_ARGUMENT

    return call


FUNCTIONS: dict[str, Any] = {}
for _form in ("Deflate", "Zstd", "LZ4"):
    _begin = f"nvcompBatched{_form}Decompress"
    _call = functools.partial(_decompress, _form)
    FUNCTIONS[f"{_begin}Async"] = _Decompress(_guarded(_call))
    for _end in ("GetTempSize", "GetTempSizeAsync"):
        FUNCTIONS[f"{_begin}{_end}"] = _TempSize(_guarded(_temp_nbytes))
