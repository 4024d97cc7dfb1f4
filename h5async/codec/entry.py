"""Declares what there is to say about one HDF5 filter; `filters.py` lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from h5async.codec.decoding import Bytes, Decode

# A filter's client data, as HDF5 calls them: the numbers that its pipeline message has for it.
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
        Which one.
    element_nbytes
        Bytes of an element, for those that shuffle; the traits of a plugin; else 0.
    block
        Elements of a block, for bitshuffle; 0: the default.
    library
        The codec library that the core calls for it, as `core/libraries.py` names them.
    values
        The filter's client data, for those of which the core reads them.
    function
        Of a plugin, the address of the function that undoes the filter.
    """

    kind: CoreKind
    element_nbytes: int = 0
    block: int = 0
    library: str | None = None
    values: Parameters = ()
    function: int = 0


@dataclass(frozen=True)
class Codec:
    """What undoes a filter with certain client data.

    Attributes
    ----------
    decode
        Undoes it in Python.
    added_nbytes
        How many bytes longer the encoded bytes are than what the filter was given; None: that
        depends on the values.
    gives_view
        Whether `decode` returns a view of the encoded bytes, and writes nothing.
    core
        How the compiled core takes it; None: the core cannot undo it.
    """

    decode: Decode
    added_nbytes: int | None = None
    gives_view: bool = False
    core: CoreFilter | None = None

    @property
    def keeps_length(self) -> bool:
        """Whether the encoded bytes are as many as the filter was given."""
        return self.added_nbytes == 0

    @property
    def does_nothing(self) -> bool:
        """Whether the encoded bytes are those that the filter was given."""
        return self.core is not None and self.core.kind == CoreKind.NOTHING


def pass_on(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return `encoded`."""
    return encoded


# Of a filter that leaves elements of some types as they are.
NOTHING = Codec(pass_on, added_nbytes=0, gives_view=True, core=CoreFilter(CoreKind.NOTHING))


@dataclass(frozen=True)
class StatedLengths:
    """Lengths by which the chunks of a filter are checked that HDF5 undoes.

    Attributes
    ----------
    least_encoded
        Client data -> how many bytes HDF5 takes, at least, whether they are there or not. Raises
        `ValueError` where the client data are damaged.
    decoded
        Encoded bytes -> how many bytes they say that they decode to; None: they do not say.
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
        As The HDF Group registered it.
    name
        As messages have it.
    codec
        Client data -> what undoes the filter; None: HDF5 has to, or a plugin of it.
    stated_chunk_nbytes
        Client data -> how many bytes a decoded chunk has by them; None: they do not say.
    stated_lengths
        What is checked of chunks that HDF5 undoes; None: nothing is known of them.
    """

    number: int
    name: str
    codec: Callable[[Parameters], Codec | None] = _hdf5_only
    stated_chunk_nbytes: Callable[[Parameters], int | None] = _not_stated
    stated_lengths: StatedLengths | None = None
