"""The registry of HDF5 filters, one entry per filter.

It says which filters are decoded without HDF5, by which function, and how the compiled core takes
them. docs/architecture.md explains how to add one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from h5async.codec import storedelements
from h5async.codec.bitshuffle import bitshuffle_codec
from h5async.codec.entry import (
    Codec,
    CoreFilter,
    CoreKind,
    FilterEntry,
    Parameters,
    StatedLengths,
)
from h5async.codec.packed import (
    NBIT_LENGTHS,
    nbit_codec,
    scaleoffset_codec,
    stated_chunk_nbytes,
)
from h5async.codec.plugins import has_hdf5, plugin_codec
from h5async.codec.shuffle import shuffle_codec
from h5async.codec.streams import (
    CHECKSUM_NBYTES,
    decode_blosc,
    decode_bzip2,
    decode_lz4,
    decode_lzf,
    decode_zstd,
    inflate,
    verify_fletcher32,
)
from h5async.codec.szip import SZIP_LENGTHS, szip_codec

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALEOFFSET = 1, 2, 3, 4, 5, 6
BZIP2, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 307, 32000, 32001, 32004, 32008, 32015, 32026


def _deflate(_parameters: Parameters) -> Codec:
    core = CoreFilter(CoreKind.DEFLATE, library="deflate")
    return Codec(inflate, core=core)


def _fletcher32(_parameters: Parameters) -> Codec:
    core = CoreFilter(CoreKind.FLETCHER32)
    return Codec(verify_fletcher32, added_nbytes=CHECKSUM_NBYTES, gives_view=True, core=core)


def _lzf(_parameters: Parameters) -> Codec:
    return Codec(decode_lzf, core=CoreFilter(CoreKind.LZF))


def _blosc(_parameters: Parameters) -> Codec:
    return Codec(decode_blosc, core=CoreFilter(CoreKind.BLOSC, library="blosc"))


def _bzip2(_parameters: Parameters) -> Codec:
    return Codec(decode_bzip2, core=CoreFilter(CoreKind.BZIP2, library="bz2"))


def _lz4(_parameters: Parameters) -> Codec:
    core = CoreFilter(CoreKind.LZ4, library="lz4")
    return Codec(decode_lz4, core=core)


def _zstd(_parameters: Parameters) -> Codec:
    core = CoreFilter(CoreKind.ZSTD, library="zstd")
    return Codec(decode_zstd, core=core)


_ENTRIES = (
    FilterEntry(DEFLATE, "deflate", _deflate),
    FilterEntry(SHUFFLE, "shuffle", shuffle_codec),
    FilterEntry(FLETCHER32, "fletcher32", _fletcher32),
    FilterEntry(SZIP, "szip", szip_codec, stated_lengths=SZIP_LENGTHS),
    FilterEntry(NBIT, "nbit", nbit_codec, stated_chunk_nbytes, NBIT_LENGTHS),
    FilterEntry(SCALEOFFSET, "scaleoffset", scaleoffset_codec, stated_chunk_nbytes),
    FilterEntry(305, "lzo"),
    FilterEntry(BZIP2, "bzip2", _bzip2),
    FilterEntry(LZF, "lzf", _lzf),
    FilterEntry(BLOSC, "blosc", _blosc),
    FilterEntry(LZ4, "lz4", _lz4),
    FilterEntry(BITSHUFFLE, "bitshuffle", bitshuffle_codec),
    FilterEntry(32013, "zfp"),
    FilterEntry(ZSTD, "zstd", _zstd),
    FilterEntry(32017, "sz"),
    FilterEntry(32018, "fcidecomp"),
    FilterEntry(32024, "sz3"),
    FilterEntry(BLOSC2, "blosc2"),
    FilterEntry(32028, "sperr"),
    FilterEntry(storedelements.NUMBER, "conversion", storedelements.stored_codec),
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
    def codec(self) -> Codec | None:
        """How it is undone, or None if HDF5 has to."""
        return _codec(self.number, self.parameters) or plugin_codec(self.number, self.parameters)

    @property
    def stated_chunk_nbytes(self) -> int | None:
        """The decoded bytes of a chunk by the client data; None if they do not say."""
        return self.entry.stated_chunk_nbytes(self.parameters)

    @property
    def stated_lengths(self) -> StatedLengths | None:
        """What is checked of chunks that only HDF5 decodes; None if nothing is known."""
        return self.entry.stated_lengths


@lru_cache(maxsize=256)
def _codec(number: int, parameters: Parameters) -> Codec | None:
    entry = REGISTRY.get(number)
    return None if entry is None else entry.codec(parameters)


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded here, not by HDF5."""
    return entry.codec is not None


def is_known_to_hdf5(entry: Filter) -> bool:
    """Tell whether HDF5 can undo a filter in this process, maybe by a plugin of hdf5plugin."""
    return entry.number == storedelements.NUMBER or has_hdf5(entry.number)
