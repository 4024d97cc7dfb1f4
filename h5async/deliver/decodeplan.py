"""Plans which encoded chunks a GPU decodes. Pure.

The tables of fields and the core's plans enter. A field whose chunks a GPU can decode gets an
`EncodedFormat`. For each batch an `EncodedPlan` leaves: the chunks that are read as stored in the
file, and where the samples in them go. So chunks are still compressed when they cross the bus.

A GPU decodes many compressed blocks in parallel, each independently. A chunk's filter pipeline may
have at most one compressor, after filters that only reorder bytes or bits, and maybe a checksum at
the end. The compiled core then splits the chunks into blocks (core/src/frames.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import CoreFilter, CoreKind, Filter, default_block
from h5async.core.binding import Core
from h5async.index.extents import TableBuilder
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import FieldTable, Kind, Layer, Shape
from h5async.plan.records import Ranges
from h5async.read.collection import Planned

Int64s = NDArray[np.int64]
BlockCodec = Literal["deflate", "zstd", "lz4"]  # raw deflate, a zstd frame, an LZ4 block

_SHUFFLES = CoreKind.SHUFFLE, CoreKind.BITSHUFFLE
_OF_BITS = CoreKind.BITSHUFFLE, CoreKind.BITSHUFFLE_LZ4, CoreKind.BITSHUFFLE_ZSTD
_COMPRESSORS: dict[CoreKind, BlockCodec] = {
    CoreKind.DEFLATE: "deflate",
    CoreKind.ZSTD: "zstd",
    CoreKind.LZ4: "lz4",
    CoreKind.BITSHUFFLE_LZ4: "lz4",
    CoreKind.BITSHUFFLE_ZSTD: "zstd",
}

_ALIGNMENT = 16  # of encoded and decoded chunks
_DEFLATE_BEGIN = 14  # past a multiple of it, so that the stream, 2 bytes later, is aligned
_MOST_DECODED_NBYTES = 4 << 30  # per batch, before samples are extracted
_MOST_ENCODED_NBYTES = 1 << 30


class NotDecoded(Exception):
    """The host has to decode a batch; the message says why."""


class Unshuffle(NamedTuple):
    """A shuffle of bytes or bits, to be undone on the GPU after decompression.

    `block` is the number of elements in a block of shuffled bits; 0 if bytes are shuffled.
    """

    itemsize: int
    block: int


@dataclass(frozen=True)
class FrameFormat:
    """How an encoded chunk is framed."""

    kind: CoreKind
    has_checksum: bool = False  # a Fletcher-32 at the end
    # Of bitshuffle with a compressor: bytes per element and per block; otherwise 0.
    element: int = 0
    block_nbytes: int = 0
    codec: BlockCodec | None = None  # decodes one block
    # If chunks state their block size: that in the filter's client data; 0 is the whole chunk.
    usual_block_nbytes: int = 0

    def usual_tasks(self, chunk_nbytes: int) -> int:
        """Return the number of compressed blocks in a chunk.

        It is the maximum, unless chunks state their block size. If they do not, at most one range
        of a chunk is stored uncompressed.
        """
        nbytes = self.block_nbytes or self.usual_block_nbytes
        if nbytes:
            return -(-chunk_nbytes // nbytes)
        return 0 if self.codec is None else 1


def frame_format(filters: tuple[Filter, ...]) -> FrameFormat | None:
    """Return the framing of chunks with these filters; None if the core cannot split them."""
    known = _known(filters)
    if known is None:
        return None
    rest = [one for one in known if one[1].kind != CoreKind.NOTHING]
    has_checksum = bool(rest) and rest[-1][1].kind == CoreKind.FLETCHER32
    if has_checksum:
        rest.pop()
    compressor = rest.pop() if rest and rest[-1][1].kind not in _SHUFFLES else None
    if any(core.kind not in _SHUFFLES for _, core in rest):
        return None
    if compressor is None:
        return FrameFormat(CoreKind.NOTHING, has_checksum)
    entry, core = compressor
    codec = _COMPRESSORS.get(core.kind)
    if codec is None:
        return None
    is_plain = core.kind not in _OF_BITS
    element, block = (0, 0) if is_plain else (core.element_nbytes, _block(core))
    if block % 8:
        return None
    usual = entry.parameters[0] if core.kind == CoreKind.LZ4 and entry.parameters else 0
    return FrameFormat(core.kind, has_checksum, element, block * element, codec, usual)


def unshuffles(filters: tuple[Filter, ...]) -> tuple[Unshuffle, ...]:
    """Return the shuffles to undo after decompression, in this order."""
    return tuple(
        Unshuffle(core.element_nbytes, 0 if core.kind == CoreKind.SHUFFLE else _block(core))
        for _, core in reversed(_known(filters) or [])
        if core.kind == CoreKind.SHUFFLE or core.kind in _OF_BITS
    )


def _known(filters: tuple[Filter, ...]) -> list[tuple[Filter, CoreFilter]] | None:
    """Return filters with the core's form of each; None if the core does not know one."""
    known = [(entry, core) for entry in filters if (core := entry.core) is not None]
    return known if len(known) == len(filters) else None


def _block(core: CoreFilter) -> int:
    return core.block or default_block(core.element_nbytes)


@dataclass(frozen=True)
class EncodedFormat:
    """How chunks of a dataset are decoded on a GPU, and the limits of a batch."""

    frame: FrameFormat
    unshuffles: tuple[Unshuffle, ...]  # undone after the codec, in this order
    shape: Shape  # the layout of pieces in chunks and rows
    row_nbytes: int
    pitch: int  # bytes from one decoded chunk to the next
    max_chunks: int
    max_tasks: int  # compressed blocks
    max_runs: int  # of samples
    encoded_nbytes: int  # maximum for the chunks of a batch

    @property
    def list_words(self) -> int:
        """The 64-bit words of the lists that are uploaded with a batch.

        They are of blocks, copies, checksums (two per word), and runs.
        """
        tasks, chunks = self.max_tasks, self.max_chunks
        return 4 * tasks + 3 * (chunks + tasks) + (chunks + 1) // 2 + 5 * self.max_runs

    @property
    def staging_nbytes(self) -> int:
        """The bytes of host memory that a slot needs for a batch's encoded chunks and lists."""
        unpacked = 4 * self.max_tasks + 3 * (self.max_chunks + self.max_tasks)
        return self.encoded_nbytes + 8 * (self.list_words + unpacked) + 4 * self.max_chunks

    @property
    def is_deflate(self) -> bool:
        """Whether decoded chunks have an Adler-32 checksum to verify."""
        return self.frame.codec == "deflate"


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """The chunks that are read encoded, and where the samples in them go.

    `chunks` has each chunk once. `runs`, int64 (5, r), are runs of samples to copy from a chunk to
    the batch: the chunk, its index in the cross-section, the first sample in the chunk, the first
    row of the batch, and the length.
    """

    chunks: Ranges
    runs: Int64s

    @property
    def num_chunks(self) -> int:
        """The number of chunks to read."""
        return self.chunks.num_items

    @property
    def used_nbytes(self) -> int:
        """The bytes used of the memory for encoded chunks."""
        return int(self.chunks.position[-1] + self.chunks.nbytes[-1])


def encoded_format(
    layout: DatasetLayout, core: Core | None, rows: int, *, in_order: bool
) -> EncodedFormat | str:
    """Return how a GPU decodes the chunks of a dataset, or why it cannot.

    `rows` is the number of samples in a batch; `in_order` says whether these are consecutive.
    """
    filters = next(iter(layout.leaves())).filters
    frame = frame_format(filters)
    if frame is None:
        return f"its filters are {'+'.join(entry.label for entry in filters)}"
    if core is None:
        return "the compiled core is missing"
    table = TableBuilder(lambda one: core.filters(one) is not None).build(layout)
    reason = _reason_against(table, layout.row_nbytes)
    if layout.crop is not None:
        reason = "parts of its rows are delivered"
    if reason is not None:
        return reason
    (layer,), shape, nbytes = table.layers, table.shapes[0], table.chunks.nbytes
    pieces = len(shape.extents)
    touched = rows
    if in_order and (layer.step == 1).all():
        touched = min(rows, -(-rows // shape.chunk_samples) + 2 * layer.row.size)
    max_chunks = min(touched * pieces, nbytes.size)
    pitch = -(-shape.chunk_nbytes // _ALIGNMENT) * _ALIGNMENT
    largest = np.partition(nbytes, nbytes.size - max_chunks)[nbytes.size - max_chunks :]
    encoded_nbytes = int(largest.sum()) + 2 * _ALIGNMENT * max_chunks
    if pitch * max_chunks > _MOST_DECODED_NBYTES or encoded_nbytes > _MOST_ENCODED_NBYTES:
        return f"a batch may touch {max_chunks} chunks of {shape.chunk_nbytes} bytes"
    return EncodedFormat(
        frame=frame,
        unshuffles=unshuffles(filters),
        shape=shape,
        row_nbytes=layout.row_nbytes,
        pitch=pitch,
        max_chunks=max_chunks,
        max_tasks=max_chunks * max(1, frame.usual_tasks(shape.chunk_nbytes)),
        max_runs=rows * pieces,
        encoded_nbytes=encoded_nbytes,
    )


def _reason_against(table: FieldTable, row_nbytes: int) -> str | None:
    if any(shape.kind == Kind.LEFT for shape in table.shapes):
        return "it is read through h5py"
    if any(not shape.filters for shape in table.shapes):
        return "it is not compressed"
    if not table.chunks.offset.size:
        return "it has no chunks"
    is_whole = all(
        shape.source_row_nbytes == row_nbytes and not shape.piece_begin.any()
        for shape in table.shapes
    )
    if len(table.layers) > 1 or table.is_filled_first or not is_whole:
        return "it consists of pieces of other datasets"
    if not all(_are_alike(table.shapes[0], shape) for shape in table.shapes[1:]):
        return "its files differ in chunks or filters"
    return None


def _are_alike(one: Shape, other: Shape) -> bool:
    numbers = "itemsize", "chunk_nbytes", "chunk_samples", "sample_stride"
    arrays = "extents", "row_begin", "chunk_strides", "row_strides"
    return one.filters == other.filters and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in (*numbers, *arrays)
    )


def plan_encoded(
    form: EncodedFormat, table: FieldTable, planned: Planned, column: int, memory: NDArray[np.uint8]
) -> EncodedPlan | None:
    """Plan a batch's chunks for decoding on a GPU; None if the host has to decode them.

    That is so if some chunk was never written, or skipped a filter. `planned` is the core's plan of
    the batch, in which the field has number `column`; `memory`, uint8, takes the encoded chunks.
    """
    items, layer = planned.items[planned.items["field"] == column], table.layers[0]
    if not items.size or (items["kind"] != Kind.CHUNKS).any():
        return None
    segment = items["segment"]
    cross_number = np.stack([shape.cross_number for shape in table.shapes])[layer.shape[segment]]
    extent = _extents(table, layer, segment, items["number"][:, np.newaxis] + cross_number)
    if (extent < 0).any() or table.chunks.filter_mask[extent].any():
        return None
    chunk, first, chunk_of = np.unique(extent, return_index=True, return_inverse=True)
    chunk_of = chunk_of.reshape(extent.shape)
    pieces = extent.shape[1]
    nbytes = table.chunks.nbytes[chunk]
    room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
    # All runs of each item's samples, once per piece.
    count = items["num_runs"]
    item = np.repeat(np.arange(items.size), count)
    run = np.arange(item.size) + np.repeat(items["first_run"] - np.cumsum(count) + count, count)
    run, cross = np.repeat(run, pieces), np.tile(np.arange(pieces), run.size)
    plan = EncodedPlan(
        chunks=Ranges(
            source=layer.source[segment[first // pieces]].astype(np.int64),
            offset=table.chunks.offset[chunk],
            nbytes=nbytes,
            position=np.cumsum(room) - room + (_DEFLATE_BEGIN if form.is_deflate else 0),
            memory=memory,
        ),
        runs=np.stack(
            [
                chunk_of[item].reshape(-1),
                cross,
                planned.run_local[run],
                planned.run_position[run],
                planned.run_length[run],
            ]
        ),
    )
    fits = plan.num_chunks <= form.max_chunks and plan.used_nbytes <= form.encoded_nbytes
    return plan if fits and run.size <= form.max_runs else None


def _extents(table: FieldTable, layer: Layer, segment: NDArray[np.int32], number: Int64s) -> Int64s:
    """Return the extents of chunks, (items, pieces); -1 for chunks that were never written."""
    begin, count = (column[segment][:, np.newaxis] for column in (layer.begin, layer.count))
    found = np.where(number < count, begin + number, -1)
    for sparse in np.unique(segment[layer.is_sparse[segment]]).tolist():
        here, first = segment == sparse, int(layer.begin[sparse])
        written = table.chunks.numbers[first : first + int(layer.count[sparse])]
        at = np.searchsorted(written, number[here])
        is_written = np.append(written, -1)[at] == number[here]
        found[here] = np.where(is_written, first + at, -1)
    return found
