"""Declares what is known of an HDF5 filter; `filters.py` lists the filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from h5async.codec.decoding import Bytes, Decode

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


@dataclass(frozen=True)
class Codec:
    """How a filter with certain client data is undone.

    Attributes
    ----------
    decode
        Undoes it in Python.
    added_nbytes
        The number of bytes that the filter adds to its input; None if that depends on the values.
    gives_view
        Whether `decode` returns a view of the encoded bytes, and writes nothing.
    core
        How the compiled core takes it; None if the core cannot undo it.
    """

    decode: Decode
    added_nbytes: int | None = None
    gives_view: bool = False
    core: CoreFilter | None = None


def pass_on(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return `encoded`."""
    return encoded


# For a filter that does not change elements of some types.
NOTHING = Codec(pass_on, added_nbytes=0, gives_view=True, core=CoreFilter(CoreKind.NOTHING))


@dataclass(frozen=True)
class StatedLengths:
    """Lengths for checking the chunks of a filter that HDF5 undoes.

    Attributes
    ----------
    least_encoded
        Client data -> the minimum number of bytes that HDF5 reads, whether they exist or not.
        Raises `ValueError` if the client data are damaged.
    decoded
        Encoded bytes -> the decoded length that they state; None if they do not.
    """

    least_encoded: Callable[[Parameters], int]
    decoded: Callable[[Bytes], int | None] = lambda encoded: None


def _hdf5_only(_parameters: Parameters) -> Codec | None:
    return None


def _not_stated(_parameters: Parameters) -> int | None:
    return None


@dataclass(frozen=True)
class FilterEntry:
    """A filter of the registry.

    Attributes
    ----------
    number
        As registered by The HDF Group.
    name
        For messages.
    codec
        Client data -> the codec; None if HDF5 has to decode, or a plugin.
    stated_chunk_nbytes
        Client data -> the decoded bytes of a chunk that they state; None if they do not.
    stated_lengths
        What is checked of chunks that HDF5 decodes; None if nothing is known.
    """

    number: int
    name: str
    codec: Callable[[Parameters], Codec | None] = _hdf5_only
    stated_chunk_nbytes: Callable[[Parameters], int | None] = _not_stated
    stated_lengths: StatedLengths | None = None
