"""The encoded bytes of one HDF5 filter enter; what the filter was given leaves, in given memory.

Each decoder writes into memory that is handed to it, cannot write past its end, drops the GIL for
the work, and raises where the bytes are damaged as far as their format can tell: lengths always,
checksums where there are some. `codecs.py` chains them and checks the final length.

The formats: deflate is a zlib frame (RFC 1950); shuffle, and the layout of the Fletcher-32
checksum, are those of the HDF5 reference (H5Zshuffle.c, H5Zfletcher32.c); lzf is a raw LibLZF
stream (h5py's lzf_filter.c); zstd one or more frames (RFC 8878); bzip2 one stream; lz4 a header
and blocks, in big-endian numbers (H5Zlz4.c of the registered plugins); blosc a chunk with its
header (README_HEADER.rst of c-blosc). `szip.py`, `bitshuffle.py`, `blosc2.py` and `packed.py`
(nbit, scaleoffset) tell of theirs.
"""

from __future__ import annotations

import bz2
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import imagecodecs
import numpy as np

from h5async.codec.bitshuffle import bitshuffle_codec, bitshuffle_decoder
from h5async.codec.blosc2 import decode_blosc2
from h5async.codec.decoding import Bytes, Decode, filled, unshuffle
from h5async.codec.packed import (
    can_decode_nbit,
    can_decode_scaleoffset,
    decode_nbit,
    decode_scaleoffset,
    does_nothing_nbit,
    does_nothing_scaleoffset,
    packed_nbit_nbytes,
    stated_nbytes,
)
from h5async.codec.szip import szip_decoder

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALEOFFSET = 1, 2, 3, 4, 5, 6
BZIP2, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 307, 32000, 32001, 32004, 32008, 32015, 32026

FILTER_NAMES = {
    DEFLATE: "deflate",
    SHUFFLE: "shuffle",
    FLETCHER32: "fletcher32",
    SZIP: "szip",
    NBIT: "nbit",
    SCALEOFFSET: "scaleoffset",
    305: "lzo",
    BZIP2: "bzip2",
    LZF: "lzf",
    BLOSC: "blosc",
    LZ4: "lz4",
    BITSHUFFLE: "bitshuffle",
    32013: "zfp",
    ZSTD: "zstd",
    32017: "sz",
    32018: "fcidecomp",
    32024: "sz3",
    BLOSC2: "blosc2",
    32028: "sperr",
}

CHECKSUM_NBYTES = 4
_SZIP_LENGTH_NBYTES = 4


class Filter(NamedTuple):
    """One filter of a pipeline: its registered number, client data, and name in the file."""

    number: int
    parameters: tuple[int, ...]
    name: str

    @property
    def label(self) -> str:
        """The name by which people know it."""
        return FILTER_NAMES.get(self.number) or self.name or f"filter {self.number}"


def can_decode(entry: Filter) -> bool:
    """Tell whether a filter is decoded here, not by HDF5."""
    return decoder(entry) is not None


def keeps_length(entry: Filter) -> bool:
    """Tell whether what a filter gives is as long as what it was given."""
    if entry.number == BITSHUFFLE:
        return bitshuffle_codec(entry.parameters) == 0
    return entry.number == SHUFFLE or decoder(entry) is pass_on


def stated_chunk_nbytes(entry: Filter) -> int | None:
    """Return how many bytes a decoded chunk has by a filter's client data; None: not said."""
    return stated_nbytes(entry.parameters) if entry.number in (NBIT, SCALEOFFSET) else None


def has_known_length(entry: Filter) -> bool:
    """Tell whether lengths can be checked of a filter, though only HDF5 undoes it."""
    return entry.number in (SZIP, NBIT)


def encoded_nbytes(entry: Filter) -> int:
    """Return how many bytes HDF5 takes, at least, to undo a filter, whether they are there or not.

    Raises
    ------
    ValueError
        If its parameters are damaged.
    """
    return _SZIP_LENGTH_NBYTES if entry.number == SZIP else packed_nbit_nbytes(entry.parameters)


def stated_length(entry: Filter, encoded: Bytes) -> int | None:
    """Return how many bytes an encoded chunk says that it decodes to; None: it does not say."""
    if entry.number != SZIP:
        return None
    return int.from_bytes(encoded[:_SZIP_LENGTH_NBYTES].tobytes(), "little")


def decoder(entry: Filter) -> Decode | None:
    """Return what undoes a filter, or None where that is left to HDF5."""
    number, given = entry.number, entry.parameters
    if number == DEFLATE:
        return _inflate
    if number == SHUFFLE:
        return partial(unshuffle, given[0]) if given and given[0] > 0 else None
    if number == FLETCHER32:
        return verify_fletcher32
    if number == SZIP:
        return szip_decoder(given)
    if number == NBIT:
        if does_nothing_nbit(given):
            return pass_on
        return partial(_decode_packed, decode_nbit, given) if can_decode_nbit(given) else None
    if number == SCALEOFFSET:
        if does_nothing_scaleoffset(given):
            return pass_on
        if can_decode_scaleoffset(given):
            return partial(_decode_packed, decode_scaleoffset, given)
        return None
    if number == BITSHUFFLE:
        return bitshuffle_decoder(given)
    if number == BZIP2:
        return _decode_bzip2
    if number == LZF:
        return _decode_lzf
    if number == BLOSC:
        return _decode_blosc
    if number == LZ4:
        return _decode_lz4
    if number == ZSTD:
        return _decode_zstd
    return decode_blosc2 if number == BLOSC2 else None


def pass_on(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return `encoded`: some filters do nothing to some types."""
    return encoded


def _inflate(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return filled(out, len(imagecodecs.deflate_decode(encoded, out=out)))


def _decode_lzf(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return filled(out, len(imagecodecs.lzf_decode(encoded, header=False, out=out)))


def verify_fletcher32(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return a view of `encoded` without its checksum, which must be right.

    HDF5 before 1.6.3 wrote the bytes of each half in the other order on little-endian machines,
    and HDF5 accepts both to this day.
    """
    if encoded.size < CHECKSUM_NBYTES:
        raise ValueError(f"fletcher32: {encoded.size} bytes cannot hold a checksum")
    values, stored = encoded[:-CHECKSUM_NBYTES], encoded[-CHECKSUM_NBYTES:].tobytes()
    computed = int(imagecodecs.h5checksum_fletcher32(values)).to_bytes(CHECKSUM_NBYTES, "little")
    swapped = bytes((computed[1], computed[0], computed[3], computed[2]))
    if stored not in (computed, swapped):
        raise ValueError(
            f"fletcher32: checksum {stored.hex()} is stored, {computed.hex()} was computed"
        )
    return values


def _decode_packed(
    decode: Callable[[tuple[int, ...], Bytes, Bytes], Bytes],
    parameters: tuple[int, ...],
    encoded: Bytes,
    out: Bytes,
    _spare: Bytes,
) -> Bytes:
    return decode(parameters, encoded, out)


def _decode_zstd(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return filled(out, len(imagecodecs.zstd_decode(encoded, out=out)))


def _decode_bzip2(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode by the standard library: imagecodecs takes a stream that was cut short for whole."""
    stream = bz2.BZ2Decompressor()
    try:
        decoded = stream.decompress(encoded.data, max_length=out.size + 1)
        if not stream.eof and len(decoded) <= out.size:
            decoded += stream.decompress(b"", max_length=1)  # the checksum, or one byte too many
    except OSError as error:
        raise ValueError(f"bzip2: {error}") from error
    if len(decoded) > out.size:
        raise ValueError(f"bzip2 gives more than the {out.size} bytes that are due")
    if not stream.eof:
        raise ValueError("bzip2: the stream was cut short")
    out[: len(decoded)] = np.frombuffer(decoded, np.uint8)
    return filled(out, len(decoded))


def _decode_lz4(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return filled(out, len(imagecodecs.lz4h5_decode(encoded, out=out)))


def _decode_blosc(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode one chunk of Blosc, after its header was held against the bytes that are there."""
    if encoded.size < 16:
        raise ValueError(f"blosc: {encoded.size} bytes cannot hold a header")
    nbytes, _block, stored = struct.unpack_from("<III", encoded.data, 4)
    if stored > encoded.size:
        raise ValueError(f"blosc: {stored} bytes are claimed, {encoded.size} are there")
    if nbytes > out.size:
        raise ValueError(f"blosc gives {nbytes} bytes, {out.size} are due")
    if nbytes:
        imagecodecs.blosc_decode(encoded, numthreads=1, out=out)
    return filled(out, nbytes)
