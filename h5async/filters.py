"""The encoded bytes of one HDF5 filter enter; what the filter was given leaves, in given memory.

Each decoder writes into memory that is handed to it, cannot write past its end, drops the GIL for
the work, and raises where the bytes are damaged as far as their format can tell: lengths always,
checksums where there are some. `codecs.py` chains them and checks the final length.

The formats: deflate is a zlib frame (RFC 1950); shuffle, and the layout of the Fletcher-32
checksum, are those of the HDF5 reference (H5Zshuffle.c, H5Zfletcher32.c); lzf is a raw LibLZF
stream (h5py's lzf_filter.c); zstd one or more frames (RFC 8878); bzip2 one stream; lz4 and the
compressing forms of bitshuffle a header and blocks, in big-endian numbers (H5Zlz4.c of the
registered plugins; bshuf_h5filter.c); blosc a chunk with its header (README_HEADER.rst of
c-blosc); blosc2 a contiguous frame (README_CFRAME_FORMAT.rst of c-blosc2), of several dimensions
in the order of its blocks (the "b2nd" metalayer); szip a little-endian length and a stream of
extended-Rice code (CCSDS 121.0-B), whose scan lines are padded, and whose 4- and 8-byte samples
are split in bytes, as libaec's sz_compat.c does; for nbit and scaleoffset see `packed.py`.
"""

from __future__ import annotations

import bz2
import math
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.packed import (
    can_decode_nbit,
    can_decode_scaleoffset,
    decode_nbit,
    decode_scaleoffset,
    does_nothing_nbit,
    does_nothing_scaleoffset,
)

Bytes = NDArray[np.uint8]

# decode(encoded, out, spare) -> a view of `out` (`verify_fletcher32` and `pass_on`: of `encoded`);
# `spare` is working
# memory of about the size of a chunk.
Decode = Callable[[Bytes, Bytes, Bytes], Bytes]

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

_FRAME_OFFSET_NBYTES = 8
_MAX_EXPANSION = 16  # how much larger than a chunk anything between its filters may be


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
        return _bitshuffle_codec(entry.parameters) == 0
    return entry.number == SHUFFLE or decoder(entry) is pass_on


def decoder(entry: Filter) -> Decode | None:
    """Return what undoes a filter, or None where that is left to HDF5."""
    given = entry.parameters
    match entry.number:
        case 1:
            return _inflate
        case 2:
            return partial(_unshuffle, given[0]) if given and given[0] > 0 else None
        case 3:
            return verify_fletcher32
        case 4:
            return _szip_decoder(given)
        case 5:
            if does_nothing_nbit(given):
                return pass_on
            return partial(_decode_packed, decode_nbit, given) if can_decode_nbit(given) else None
        case 6:
            if does_nothing_scaleoffset(given):
                return pass_on
            if can_decode_scaleoffset(given):
                return partial(_decode_packed, decode_scaleoffset, given)
            return None
        case 307:
            return _decode_bzip2
        case 32000:
            return _decode_lzf
        case 32001:
            return _decode_blosc
        case 32004:
            return _decode_lz4
        case 32008:
            return _bitshuffle_decoder(given)
        case 32015:
            return _decode_zstd
        case 32026:
            return _decode_blosc2
    return None


def _filled(out: Bytes, count: int) -> Bytes:
    return out if count == out.size else out[:count]


def _room(spare: Bytes, nbytes: int) -> Bytes:
    """Return working memory: of `spare`, or, where a format asks for more than usual, new."""
    if nbytes <= spare.size:
        return spare[:nbytes]
    if nbytes > _MAX_EXPANSION * spare.size:
        raise ValueError(f"{nbytes} bytes are claimed, far more than a chunk has")
    return np.empty(nbytes, np.uint8)


def _due(name: str, found: int, due: int) -> None:
    if found != due:
        raise ValueError(f"{name} gives {found} bytes, {due} are due")


def pass_on(encoded: Bytes, _out: Bytes, _spare: Bytes) -> Bytes:
    """Return `encoded`: some filters do nothing to some types."""
    return encoded


# --- filters of HDF5 itself, and lzf -------------------------------------------------------------


def _inflate(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return _filled(out, len(imagecodecs.deflate_decode(encoded, out=out)))


def _decode_lzf(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return _filled(out, len(imagecodecs.lzf_decode(encoded, header=False, out=out)))


def _unshuffle(element_nbytes: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Gather the bytes of each element; bytes that make no whole element stay where they are."""
    if encoded.size > out.size:
        raise ValueError(f"shuffle gives {encoded.size} bytes, {out.size} are due")
    if encoded.size < out.size:
        out = out[: encoded.size]
    count = encoded.size // element_nbytes
    body = count * element_nbytes
    if element_nbytes in (2, 4, 8) and count:
        dtype = f"u{element_nbytes}"
        imagecodecs.byteshuffle_decode(encoded[:body].view(dtype), out=out[:body].view(dtype))
    else:
        planes = encoded[:body].reshape(element_nbytes, count)
        np.copyto(out[:body].reshape(count, element_nbytes), planes.T)
    np.copyto(out[body:], encoded[body:])
    return out


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


class _Szip(NamedTuple):
    """The parameters of szip, as libaec takes them."""

    bits: int  # of a sample of the code; 4- and 8-byte pixels are coded byte plane by byte plane
    flags: int
    block: int
    blocks_a_line: int
    line_nbytes: int
    padded_line_nbytes: int
    planes: int


_SZIP_MSB, _SZIP_NEAREST_NEIGHBOUR = 16, 32  # options of szlib.h
_AEC_MSB, _AEC_PREPROCESS, _AEC_NOT_ENFORCE = 4, 8, 64  # flags of libaec.h


def _szip_decoder(parameters: tuple[int, ...]) -> Decode | None:
    if len(parameters) < 4:
        return None
    options, block, bits, pixels_a_line = parameters[:4]
    if block < 8:  # this libaec does not decode such as HDF5's does
        return None
    if not (1 <= bits <= 32 or bits == 64) or block % 2 or not pixels_a_line:
        return None
    flags = _AEC_NOT_ENFORCE  # any even block
    flags |= _AEC_MSB if options & _SZIP_MSB else 0
    flags |= _AEC_PREPROCESS if options & _SZIP_NEAREST_NEIGHBOUR else 0
    planes = bits // 8 if bits in (32, 64) else 1
    pixel_nbytes = 1 if planes > 1 or bits <= 8 else 2 if bits <= 16 else 4
    blocks = -(-pixels_a_line // block)
    return partial(
        _decode_szip,
        _Szip(
            bits=8 if planes > 1 else bits,
            flags=flags,
            block=block,
            blocks_a_line=blocks,
            line_nbytes=pixels_a_line * pixel_nbytes,
            padded_line_nbytes=blocks * block * pixel_nbytes,
            planes=planes,
        ),
    )


def _decode_szip(szip: _Szip, encoded: Bytes, out: Bytes, spare: Bytes) -> Bytes:
    """Decode szip by libaec itself: its compatible interface hides that a chunk decodes short."""
    if encoded.size < 4:
        raise ValueError(f"szip: {encoded.size} bytes cannot hold a length")
    nbytes = int.from_bytes(encoded[:4].tobytes(), "little")
    if nbytes > out.size:
        raise ValueError(f"szip gives {nbytes} bytes, {out.size} are due")
    out = _filled(out, nbytes)
    lines, rest = divmod(nbytes, szip.line_nbytes)
    padding = szip.padded_line_nbytes - szip.line_nbytes
    coded_nbytes = (lines + (rest > 0)) * szip.padded_line_nbytes
    needed_nbytes = lines * szip.padded_line_nbytes + (rest or -padding if lines else rest)
    in_place = coded_nbytes == nbytes and szip.planes == 1
    room = out if in_place else _room(spare, coded_nbytes + nbytes)
    coded, packed = room[:coded_nbytes], room[coded_nbytes:]
    count = len(
        imagecodecs.aec_decode(
            encoded[4:].data,
            bitspersample=szip.bits,
            flags=szip.flags,
            blocksize=szip.block,
            rsi=szip.blocks_a_line,
            out=coded.data,
        )
    )
    if count < needed_nbytes:
        raise ValueError(f"szip gives {count} bytes, {needed_nbytes} are due")
    if padding:
        body = lines * szip.line_nbytes
        full = coded[: lines * szip.padded_line_nbytes].reshape(lines, szip.padded_line_nbytes)
        np.copyto(packed[:body].reshape(lines, szip.line_nbytes), full[:, : szip.line_nbytes])
        np.copyto(packed[body:], coded[full.size : full.size + rest])
        coded = packed
    if szip.planes > 1:
        _unshuffle(szip.planes, coded[:nbytes], out, spare)
    elif not in_place:
        np.copyto(out, coded[:nbytes])
    return out


# --- registered filters --------------------------------------------------------------------------


def _decode_zstd(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return _filled(out, len(imagecodecs.zstd_decode(encoded, out=out)))


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
    return _filled(out, len(decoded))


def _decode_lz4(encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    return _filled(out, len(imagecodecs.lz4h5_decode(encoded, out=out)))


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
    return _filled(out, nbytes)


# Bitshuffle: elements are transposed bit by bit, in blocks; a block may then be compressed.


def _bitshuffle_codec(parameters: tuple[int, ...]) -> int:
    return parameters[4] if len(parameters) > 4 else 0


def _bitshuffle_decoder(parameters: tuple[int, ...]) -> Decode | None:
    if len(parameters) < 3 or parameters[2] == 0:
        return None
    element = parameters[2]
    match _bitshuffle_codec(parameters):
        case 0:
            block = parameters[3] if len(parameters) > 3 else 0
            return None if block % 8 else partial(_bitunshuffle, element, block)
        case 2:
            return partial(_decode_bitshuffle, element, True)
        case 3:
            return partial(_decode_bitshuffle, element, False)
    return None


def _bitunshuffle(element: int, block: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Transpose bits; up to 7 elements at the end stay as they are. `block` 0: the default."""
    if encoded.size > out.size:
        raise ValueError(f"bitshuffle gives {encoded.size} bytes, {out.size} are due")
    if encoded.size % element:
        raise ValueError(f"bitshuffle: {encoded.size} bytes make no whole {element}-byte elements")
    out = _filled(out, encoded.size)
    if out.size:  # a memoryview: of an array, imagecodecs takes the dtype for the element
        imagecodecs.bitshuffle_decode(encoded.data, itemsize=element, blocksize=block, out=out)
    return out


_BLOCK_LENGTH = struct.Struct(">I")


def _decode_bitshuffle(
    element: int,
    is_lz4: bool,
    encoded: Bytes,
    out: Bytes,
    spare: Bytes,
) -> Bytes:
    """Decode blocks that were compressed after their bits had been transposed."""
    if encoded.size < 12:
        raise ValueError(f"bitshuffle: {encoded.size} bytes cannot hold a header")
    nbytes, block_nbytes = struct.unpack_from(">QI", encoded.data)
    if nbytes > out.size:
        raise ValueError(f"bitshuffle gives {nbytes} bytes, {out.size} are due")
    if nbytes % element or block_nbytes == 0 or block_nbytes % (8 * element):
        raise ValueError(
            f"bitshuffle: {nbytes} bytes in blocks of {block_nbytes} do not fit elements of"
            f" {element} bytes"
        )
    shuffled = _room(spare, nbytes)
    leftover = nbytes % (8 * element)
    edges = [*range(0, nbytes - leftover, block_nbytes), nbytes - leftover]
    position = 12
    begins, lengths = [], []
    view = encoded.data
    try:
        for _ in edges[1:]:
            (length,) = _BLOCK_LENGTH.unpack_from(view, position)
            begins.append(position + 4)
            lengths.append(length)
            position += 4 + length
    except struct.error:
        raise ValueError("bitshuffle: the blocks were cut short") from None
    if position + leftover > encoded.size:
        raise ValueError("bitshuffle: the blocks were cut short")
    body = shuffled[: nbytes - leftover]
    if is_lz4 and not leftover and block_nbytes not in lengths:
        # The framing of the lz4 filter, but for blocks that it would take for stored ones.
        _due("bitshuffle", len(imagecodecs.lz4h5_decode(encoded, out=body)), body.size)
    elif is_lz4:
        for begin, block, length in zip(begins, edges, lengths, strict=False):
            room = body[block : block + block_nbytes]
            data = encoded[begin : begin + length]
            count = len(imagecodecs.lz4_decode(data, header=False, out=room))
            _due("a block of bitshuffle", count, room.size)
    elif lengths:
        # Zstd decodes frames that follow each other in one call, and sets itself up just once.
        frames = b"".join(
            view[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)
        )
        _due("bitshuffle", len(imagecodecs.zstd_decode(frames, out=body)), body.size)
    np.copyto(shuffled[body.size :], encoded[position : position + leftover])
    return _bitunshuffle(element, block_nbytes // element, shuffled, out, spare)


# Blosc2: a frame with one chunk, which may be an array of several dimensions, cut into blocks.

_FRAME_HEADER = struct.Struct(">2x8sxixQx4sxqxqxixixi")


class _Frame(NamedTuple):
    """What the header of a Blosc2 frame says."""

    header_nbytes: int
    frame_nbytes: int
    nbytes: int
    stored_nbytes: int
    type_nbytes: int
    chunk_nbytes: int


def _decode_blosc2(encoded: Bytes, out: Bytes, spare: Bytes) -> Bytes:
    """Decode a contiguous frame of one chunk."""
    frame = _frame(encoded)
    nbytes = frame.nbytes
    if frame.frame_nbytes > encoded.size or nbytes < 0 or frame.header_nbytes < 87:
        raise ValueError(
            f"blosc2: a frame of {frame.frame_nbytes} bytes is claimed, {encoded.size} are there"
        )
    body = encoded[frame.header_nbytes : frame.frame_nbytes]
    if frame.stored_nbytes < 0 or frame.stored_nbytes > body.size:
        raise ValueError(f"blosc2: a chunk of {frame.stored_nbytes} bytes is claimed")
    dimensions = _b2nd(encoded[: frame.header_nbytes])
    if dimensions is None:
        if nbytes > out.size:
            raise ValueError(f"blosc2 gives {nbytes} bytes, {out.size} are due")
        _decode_blosc2_chunk(frame, body, _filled(out, nbytes))
        return _filled(out, nbytes)
    return _decode_b2nd(frame, dimensions, body, out, spare)


def _frame(encoded: Bytes) -> _Frame:
    if encoded.size < _FRAME_HEADER.size:
        raise ValueError(f"blosc2: {encoded.size} bytes cannot hold a frame")
    magic, header, length, _flags, nbytes, stored, typesize, _block, chunk = (
        _FRAME_HEADER.unpack_from(encoded.data)
    )
    if magic != b"b2frame\0":
        raise ValueError("blosc2: the bytes are no frame")
    return _Frame(header, length, nbytes, stored, typesize, chunk)


def _decode_blosc2_chunk(frame: _Frame, body: Bytes, out: Bytes) -> None:
    """Decode the frame's one chunk; chunks of one repeated value lie in the table of offsets."""
    if frame.stored_nbytes == 0 and out.size:
        offset = np.empty(_FRAME_OFFSET_NBYTES, np.uint8)
        _due("blosc2", len(imagecodecs.blosc2_decode(body, numthreads=1, out=offset)), offset.size)
        if offset[7] != 0x81:  # all zeros, as BLOSC2_SPECIAL_ZERO
            raise ValueError("blosc2: the chunk repeats a value in a way that is not known here")
        out[...] = 0
        return
    decoded = imagecodecs.blosc2_decode(body[: frame.stored_nbytes], numthreads=1, out=out)
    _due("blosc2", len(decoded), out.size)


def _decode_b2nd(
    frame: _Frame,
    dimensions: tuple[tuple[int, ...], tuple[int, ...]],
    body: Bytes,
    out: Bytes,
    spare: Bytes,
) -> Bytes:
    """Decode blocks, which lie one after the other, each padded, and put them where they belong."""
    shape, block = dimensions
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    nbytes = math.prod(shape) * frame.type_nbytes
    padded = math.prod(grid) * math.prod(block) * frame.type_nbytes
    if nbytes > out.size:
        raise ValueError(f"blosc2 gives {nbytes} bytes, {out.size} are due")
    out = _filled(out, nbytes)
    if padded == nbytes and all(g == 1 for g in grid[1:]) and block[1:] == shape[1:]:
        _decode_blosc2_chunk(frame, body, out)
        return out
    blocks = _room(spare, padded)
    _decode_blosc2_chunk(frame, body, blocks)
    size = frame.type_nbytes
    item = np.dtype(f"u{size}" if size in (2, 4, 8) else (np.void, size))
    rank = len(shape)
    source = blocks.view(item).reshape(*grid, *block)
    target = out.view(item).reshape(shape)
    # Whole blocks first, then, dimension by dimension, those that are cut off at the end.
    for corner in _block_groups(shape, block):
        cells = tuple(cell for cell, _ in corner)
        extents = tuple(extent for _, extent in corner)
        part = source[(*cells, *(slice(0, extent) for extent in extents))]
        where = tuple(
            slice(cell.start * size, cell.start * size + (cell.stop - cell.start) * extent)
            for cell, size, extent in zip(cells, block, extents, strict=True)
        )
        split = tuple(
            n
            for cell, extent in zip(cells, extents, strict=True)
            for n in (cell.stop - cell.start, extent)
        )
        order = tuple(axis for pair in ((d, rank + d) for d in range(rank)) for axis in pair)
        view = target[where]
        np.copyto(_split(view, split), part.transpose(order))
    return out


def _split(array: NDArray[np.void], shape: tuple[int, ...]) -> NDArray[np.void]:
    """Return a view of `array` with each dimension split into (blocks, elements of a block)."""
    strides = []
    for axis, stride in enumerate(array.strides):
        strides += [stride * shape[2 * axis + 1], stride]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _block_groups(
    shape: tuple[int, ...], block: tuple[int, ...]
) -> list[tuple[tuple[slice, int], ...]]:
    """Return, for each combination of whole and cut-off blocks: cells, and extent within a block.

    A dimension has whole blocks, a last one that is cut off, or both.
    """
    groups: list[tuple[tuple[slice, int], ...]] = [()]
    for extent, size in zip(shape, block, strict=True):
        whole, rest = divmod(extent, size)
        choices = [(slice(0, whole), size)] if whole else []
        choices += [(slice(whole, whole + 1), rest)] if rest else []
        groups = [(*group, choice) for group in groups for choice in choices]
    return groups


def _b2nd(header: Bytes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape of the chunk and of its blocks, where a frame holds an array; else None."""
    raw = header.tobytes()
    at = raw.find(b"\xa4b2nd\xd2", 87)
    if at < 0:
        return None
    begin = int.from_bytes(raw[at + 6 : at + 10], "big")
    content = raw[begin + 5 :]  # after the marker and the length of a msgpack bin32
    if begin + 5 > len(raw) or raw[begin : begin + 1] != b"\xc6" or len(content) < 4:
        raise ValueError("blosc2: the array's dimensions are damaged")
    rank = content[2] & 0x7F
    wanted = 4 + 9 * rank + 1 + 5 * rank + 1 + 5 * rank
    if len(content) < wanted - 1 or not 1 <= rank <= 16:
        raise ValueError("blosc2: the array's dimensions are damaged")
    chunks = 4 + 9 * rank + 1
    shape = struct.unpack_from(">" + "xi" * rank, content, chunks)
    block = struct.unpack_from(">" + "xi" * rank, content, chunks + 5 * rank + 1)
    if min(shape) < 1 or min(block) < 1:
        raise ValueError("blosc2: the array's dimensions are damaged")
    return shape, block
