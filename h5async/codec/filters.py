"""The registry of HDF5 filters, one entry per filter, with how the compiled core undoes it.

docs/architecture.md explains how to add one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from h5async.codec.corefilters import (
    CONVERSION,
    NOTHING,
    CoreFilter,
    CoreKind,
    Parameters,
    stored_filter,
)
from h5async.codec.plugins import has_hdf5, plugin_filter

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALEOFFSET = 1, 2, 3, 4, 5, 6
BZIP2, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 307, 32000, 32001, 32004, 32008, 32015, 32026
_LARGEST = 1 << 31  # element sizes of the core are 32-bit numbers
# Of client data, as in H5Zscaleoffset.c and H5Znbit.c.
_NBYTES_DECODED = (1, 2, 4, 8)
_SCALEOFFSET_PARAMETERS, _NBIT_PARAMETERS = 20, 8
_FLOAT_D_SCALING, _INTEGER = 0, 2
_POWERS_OF_TEN = {4: range(-45, 39), 8: range(-323, 309)}  # that floats of so many bytes hold
_INTEGER_CLASS, _FLOAT_CLASS = 0, 1
_NBIT_ATOMIC = 1


class FilterEntry(NamedTuple):
    """A filter of the registry."""

    number: int  # as registered by The HDF Group
    name: str  # for messages
    # Client data -> the filter as the core takes it; None if HDF5 has to decode, or a plugin.
    core: Callable[[Parameters], CoreFilter | None] = lambda parameters: None


def _same(kind: CoreKind, library: str | None = None) -> Callable[[Parameters], CoreFilter]:
    """Return a function for a filter that the core undoes whatever its client data are."""
    return lambda _parameters: CoreFilter(kind, library=library)


def _shuffle(parameters: Parameters) -> CoreFilter | None:
    if not parameters or not 0 < parameters[0] < _LARGEST:
        return None
    return CoreFilter(CoreKind.SHUFFLE, parameters[0])


def _szip(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) < 4:
        return None
    _, block, bits, pixels_a_line = parameters[:4]
    if not (1 <= bits <= 32 or bits == 64) or block % 2 or not block or not pixels_a_line:
        return None
    return CoreFilter(CoreKind.SZIP, library="aec", values=parameters)


def _bitshuffle(parameters: Parameters) -> CoreFilter | None:
    _, _, element, block, compressor = (*parameters, 0, 0, 0, 0, 0)[:5]
    if not 0 < element < _LARGEST:
        return None
    if compressor == 0:
        return None if block % 8 else CoreFilter(CoreKind.BITSHUFFLE, element, block)
    if compressor == 2:
        return CoreFilter(CoreKind.BITSHUFFLE_LZ4, element, block, "lz4")
    if compressor == 3:
        return CoreFilter(CoreKind.BITSHUFFLE_ZSTD, element, block, "zstd")
    return None


def _scaleoffset(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) != _SCALEOFFSET_PARAMETERS or sys.byteorder != "little":
        return None
    scale_type, factor, count, class_, nbytes, sign, order, has_fill = parameters[:8]
    factor = (factor + (1 << 31)) % (1 << 32) - (1 << 31)  # the file has it without its sign
    if nbytes not in _NBYTES_DECODED or order not in (0, 1) or has_fill not in (0, 1) or count < 1:
        return None
    if class_ == _INTEGER_CLASS:
        if scale_type != _INTEGER or sign not in (0, 1) or factor > 8 * nbytes:
            return None
        if factor == 8 * nbytes:
            return NOTHING
    elif class_ != _FLOAT_CLASS or scale_type != _FLOAT_D_SCALING or nbytes < 4:
        return None
    elif factor not in _POWERS_OF_TEN[nbytes]:
        return None
    return CoreFilter(CoreKind.SCALEOFFSET, values=parameters)


def _nbit(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) < 2 or parameters[0] != len(parameters):
        return None
    if parameters[1]:  # HDF5 says "need not compress"
        return NOTHING
    if len(parameters) != _NBIT_PARAMETERS or sys.byteorder != "little":
        return None
    count, class_, nbytes, order, precision, offset = parameters[2:]
    if count < 1 or class_ != _NBIT_ATOMIC or nbytes not in _NBYTES_DECODED or order not in (0, 1):
        return None
    if precision < 1 or precision + offset > 8 * nbytes:
        return None
    return CoreFilter(CoreKind.NBIT, values=parameters)


def default_block(element: int) -> int:
    """Return the elements in a block of bitshuffle if the filter's client data do not say."""
    return max(128, 8192 // element // 8 * 8)


_ENTRIES = (
    FilterEntry(DEFLATE, "deflate", _same(CoreKind.DEFLATE, "deflate")),
    FilterEntry(SHUFFLE, "shuffle", _shuffle),
    FilterEntry(FLETCHER32, "fletcher32", _same(CoreKind.FLETCHER32)),
    FilterEntry(SZIP, "szip", _szip),
    FilterEntry(NBIT, "nbit", _nbit),
    FilterEntry(SCALEOFFSET, "scaleoffset", _scaleoffset),
    FilterEntry(305, "lzo"),
    FilterEntry(BZIP2, "bzip2", _same(CoreKind.BZIP2, "bz2")),
    FilterEntry(LZF, "lzf", _same(CoreKind.LZF)),
    FilterEntry(BLOSC, "blosc", _same(CoreKind.BLOSC, "blosc")),
    FilterEntry(LZ4, "lz4", _same(CoreKind.LZ4, "lz4")),
    FilterEntry(BITSHUFFLE, "bitshuffle", _bitshuffle),
    FilterEntry(32013, "zfp"),
    FilterEntry(ZSTD, "zstd", _same(CoreKind.ZSTD, "zstd")),
    FilterEntry(32017, "sz"),
    FilterEntry(32018, "fcidecomp"),
    FilterEntry(32024, "sz3"),
    FilterEntry(BLOSC2, "blosc2"),
    FilterEntry(32028, "sperr"),
    FilterEntry(CONVERSION, "conversion", stored_filter),
)
REGISTRY = {entry.number: entry for entry in _ENTRIES}


class Filter(NamedTuple):
    """One filter of a pipeline: its registered number, client data, and name in the file."""

    number: int
    parameters: Parameters
    name: str

    @property
    def entry(self) -> FilterEntry:
        """Its entry in the registry; an empty one if it is not registered."""
        return REGISTRY.get(self.number) or FilterEntry(self.number, self.name)

    @property
    def label(self) -> str:
        """The name by which people know it."""
        return self.entry.name or f"filter {self.number}"

    @property
    def core(self) -> CoreFilter | None:
        """How the core takes it; None if HDF5 has to undo it."""
        return _registered(self.number, self.parameters) or plugin_filter(
            self.number, self.parameters
        )

    @property
    def stated_chunk_nbytes(self) -> int | None:
        """The decoded bytes of a chunk by the client data; None if they do not say."""
        if self.number not in (NBIT, SCALEOFFSET) or len(self.parameters) < 5:
            return None
        return self.parameters[2] * self.parameters[4]


@lru_cache(maxsize=256)
def _registered(number: int, parameters: Parameters) -> CoreFilter | None:
    entry = REGISTRY.get(number)
    return None if entry is None else entry.core(parameters)


def is_known_to_hdf5(entry: Filter) -> bool:
    """Tell whether HDF5 can undo a filter in this process, maybe by a plugin of hdf5plugin."""
    return entry.number == CONVERSION or has_hdf5(entry.number)
