"""Spells filter pipelines, and encodes chunks by them: a chunk enters; what HDF5 reads leaves.

A pipeline is spelled ``shuffle+gzip:4``: filters joined by ``+``, each with its level, if it has
any. `find_encoder` returns a function that encodes without the GIL.
"""

from __future__ import annotations

import ctypes
import threading
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
    SHUFFLE,
    ZSTD,
    Filter,
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

_WITHOUT_SAVING = frozenset({SHUFFLE, FLETCHER32})  # filters that do not compress


class _Spelling(NamedTuple):
    """A filter as users name it."""

    number: int
    parameters: tuple[int, ...] = ()  # the last of its client data, of which HDF5 may add others
    levels: range = range(0)
    level_at: int = 0
    told_by: tuple[int, ...] = ()  # the places in these that tell it from others of its number

    def at_level(self, level: int) -> tuple[int, ...]:
        """Return the client data for a level."""
        at = self.level_at
        return (*self.parameters[:at], level, *self.parameters[at + 1 :])

    def spell(self, name: str, stored: tuple[int, ...]) -> str | None:
        """Return how client data are spelled; None if they are not of this filter."""
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
            f"{named('filter', text)}: there is no filter {name!r} that h5async writes; there are "
            f"{', '.join(_SPELLINGS)}, and none"
        )
    if has_level and (not level.isdigit() or int(level) not in spelling.levels):
        levels = spelling.levels
        has = f"has levels from {levels[0]} to {levels[-1]}" if levels else "has none"
        raise ConfigError(f"{named('filter', text)}: {level!r} is no level of {name}, which {has}")
    parameters = spelling.at_level(int(level)) if has_level else spelling.parameters
    return Filter(spelling.number, parameters, name)


def spell_filters(filters: Sequence[Filter]) -> str:
    """Return how a pipeline is spelled; filters without a spelling have their names."""
    return "+".join(map(_spell_filter, filters)) or "none"


def _spell_filter(entry: Filter) -> str:
    same = ((name, one) for name, one in _SPELLINGS.items() if one.number == entry.number)
    found = (one.spell(name, entry.parameters) for name, one in same)
    return next(filter(None, found), entry.label)


def set_filters(plist: h5py.h5p.PropDCID, filters: Sequence[Filter]) -> None:
    """Give a dataset that is to be created a pipeline."""
    for entry in filters:
        if not is_known_to_hdf5(entry):
            raise MissingPackageError(
                f"the filter {entry.label} needs hdf5plugin: pip install 'h5async[filters]'"
            )
        plist.set_filter(entry.number, h5py.h5z.FLAG_OPTIONAL, entry.parameters)


def find_encoder(filters: Sequence[Filter]) -> Encode | None:
    """Return a function that encodes chunks as the filters of a dataset do; None if HDF5 has to.

    `filters` are those of the dataset after its creation. The function may be called in several
    threads. What a filter does not make smaller is left out of it.
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
        return lambda chunk: imagecodecs.deflate_encode(chunk, level)
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
    """Put first bytes of all elements first, then the second ones; what is left over comes last."""
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
    """Encode as HDF5 does, on memory of malloc, which the plugin may replace by its own."""
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
