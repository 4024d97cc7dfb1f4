"""Defines filters as the compiled core takes them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

# A filter's client data, as HDF5 calls them: its numbers in the pipeline message.
Parameters = tuple[int, ...]


class CoreKind(IntEnum):
    """Numbers of the filters that the compiled core undoes: ``enum Kind`` of core/src/common.h."""

    DEFLATE = 1
    SHUFFLE = 2
    FLETCHER32 = 3
    LZF = 4
    ZSTD = 5
    LZ4 = 6
    BLOSC = 7
    BITSHUFFLE = 8
    BITSHUFFLE_LZ4 = 9
    BITSHUFFLE_ZSTD = 10
    NOTHING = 11
    PLUGIN = 12
    SZIP = 13
    NBIT = 14
    SCALEOFFSET = 15
    BZIP2 = 16
    STORED = 17


class CoreFilter(NamedTuple):
    """A filter as the compiled core takes it.

    Attributes
    ----------
    kind
        Which filter it is.
    element_nbytes
        Bytes of an element, for filters that shuffle; the traits of a plugin; else 0.
    block
        Elements of a block, for bitshuffle; 0 means the default.
    library
        The codec library that the core calls for it; see `core/libraries.py`.
    values
        The client data, if the core reads them.
    function
        For a plugin, the address of the function that undoes the filter.
    """

    kind: CoreKind
    element_nbytes: int = 0
    block: int = 0
    library: str | None = None
    values: Parameters = ()
    function: int = 0


# For a filter that does not change elements of some types.
NOTHING = CoreFilter(CoreKind.NOTHING)
