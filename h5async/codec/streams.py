"""Undoes the filters that one library call undoes: deflate, lzf, zstd, bzip2, lz4 and blosc.

And Fletcher-32, which only adds a checksum. The formats: deflate is a zlib frame (RFC 1950); lzf a
raw LibLZF stream (h5py's lzf_filter.c); zstd one or more frames (RFC 8878); bzip2 one stream; lz4 a
header and blocks, in big-endian numbers (H5Zlz4.c of the registered plugins); blosc a chunk with
its header (README_HEADER.rst of c-blosc); the Fletcher-32 checksum is as in the HDF5 reference
(H5Zfletcher32.c).
"""

from __future__ import annotations

import bz2
import struct

import imagecodecs
import numpy as np

from h5async.codec.decoding import Bytes, filled, require_room

CHECKSUM_NBYTES = 4  # of Fletcher-32


def inflate(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode a zlib frame."""
    return filled(out, len(imagecodecs.deflate_decode(encoded, out=out)))


def decode_lzf(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode a LibLZF stream."""
    return filled(out, len(imagecodecs.lzf_decode(encoded, header=False, out=out)))


def decode_zstd(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode frames of zstd."""
    return filled(out, len(imagecodecs.zstd_decode(encoded, out=out)))


def decode_lz4(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode the header and the blocks of the lz4 filter; imagecodecs takes one block alone."""
    try:
        nbytes, block = struct.unpack_from(">QI", encoded.data)
        require_room("lz4", nbytes, out)
        at, ends = 12, [*range(block, nbytes, block), nbytes] if nbytes else []
        for begin, end in zip([0, *ends], ends, strict=False):
            (stored,) = struct.unpack_from(">I", encoded.data, at)
            part, target = encoded[at + 4 : at + 4 + stored], out[begin:end]
            at += 4 + stored
            if stored == target.size == part.size:
                target[:] = part
            elif (
                part.size < stored
                or len(imagecodecs.lz4_decode(part, header=False, out=target)) != target.size
            ):
                raise ValueError("lz4: a block was cut short")
    except struct.error as error:
        raise ValueError(f"lz4: {error}") from error
    return filled(out, nbytes)


def decode_bzip2(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode by the standard library: imagecodecs accepts a truncated stream."""
    stream = bz2.BZ2Decompressor()
    try:
        decoded = stream.decompress(encoded.data, max_length=out.size + 1)
        if not stream.eof and len(decoded) <= out.size:
            decoded += stream.decompress(b"", max_length=1)  # the checksum, or one byte too many
    except OSError as error:
        raise ValueError(f"bzip2: {error}") from error
    if len(decoded) > out.size:
        raise ValueError(f"bzip2: expected at most {out.size} bytes, got more")
    if not stream.eof:
        raise ValueError("bzip2: the stream was cut short")
    out[: len(decoded)] = np.frombuffer(decoded, np.uint8)
    return filled(out, len(decoded))


def decode_blosc(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Decode one Blosc chunk, after comparing its header with the bytes present."""
    if encoded.size < 16:
        raise ValueError(f"blosc: {encoded.size} bytes cannot hold a header")
    nbytes, _block, stored = struct.unpack_from("<III", encoded.data, 4)
    if stored > encoded.size:
        raise ValueError(f"blosc: the header says {stored} bytes, and there are {encoded.size}")
    require_room("blosc", nbytes, out)
    if nbytes:
        imagecodecs.blosc_decode(encoded, numthreads=1, out=out)
    return filled(out, nbytes)


def verify_fletcher32(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return a view of `encoded` without its checksum, which is verified.

    HDF5 before 1.6.3 swapped the bytes of each half on little-endian machines, and HDF5 still
    accepts both.
    """
    if encoded.size < CHECKSUM_NBYTES:
        raise ValueError(f"fletcher32: {encoded.size} bytes cannot hold a checksum")
    values, stored = encoded[:-CHECKSUM_NBYTES], encoded[-CHECKSUM_NBYTES:].tobytes()
    computed = int(imagecodecs.h5checksum_fletcher32(values)).to_bytes(CHECKSUM_NBYTES, "little")
    swapped = bytes((computed[1], computed[0], computed[3], computed[2]))
    if stored not in (computed, swapped):
        raise ValueError(
            f"fletcher32: the stored checksum is {stored.hex()}, the computed one {computed.hex()}"
        )
    return values
