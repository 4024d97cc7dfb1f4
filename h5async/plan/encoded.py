"""Plans which encoded chunks a GPU is given to decode. Pure.

Layouts and read plans enter. A dataset whose chunks a GPU can decode gets an `EncodedFormat`. For a
batch, an `EncodedPlan` leaves: which chunks are read encoded, as they are stored in the file, and
where the samples in them go; so chunks cross the link to the GPU compressed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from h5async.codec.entry import Unshuffle
from h5async.codec.filters import Filter
from h5async.core.binding import Core
from h5async.core.frames import FrameFormat, frame_format
from h5async.core.structures import MAX_RANK
from h5async.index.geometry import PieceGeometry
from h5async.index.layout import DatasetLayout
from h5async.index.slabs import most_runs
from h5async.plan.chunks import ChunkPlan, plan_chunks
from h5async.plan.parts import needs_scratch, touched_parts
from h5async.plan.records import Int64s

_ALIGNMENT = 16  # of encoded and decoded chunks
_DEFLATE_BEGIN = 14  # behind a multiple of it: so the stream, 2 bytes on, is aligned
_MOST_DECODED_NBYTES = 4 << 30  # of a batch, before samples are taken out
_MOST_ENCODED_NBYTES = 1 << 30


@dataclass(frozen=True)
class EncodedFormat:
    """How chunks of a dataset are decoded on a GPU, and what a batch takes at most.

    Attributes
    ----------
    frame
        How encoded bytes are framed.
    unshuffles
        What is undone after the codec, in this order.
    geometry
        How pieces lie in chunks and rows.
    itemsize, row_nbytes
        Of an element, and of a row.
    pitch
        Bytes between decoded chunks.
    max_chunks, max_tasks, max_runs
        In a batch, at most: chunks, compressed blocks, runs of samples.
    encoded_nbytes
        Bytes that the encoded chunks of a batch take at most.
    """

    frame: FrameFormat
    unshuffles: tuple[Unshuffle, ...]
    geometry: PieceGeometry
    itemsize: int
    row_nbytes: int
    pitch: int
    max_chunks: int
    max_tasks: int
    max_runs: int
    encoded_nbytes: int

    @property
    def list_words(self) -> int:
        """Words of 64 bits of the lists that are uploaded with a batch.

        Of blocks, copies, checksums (two to a word), and runs.
        """
        tasks, chunks = self.max_tasks, self.max_chunks
        return 4 * tasks + 3 * (chunks + tasks) + (chunks + 1) // 2 + 5 * self.max_runs

    @property
    def staging_nbytes(self) -> int:
        """Bytes of host memory that a slot takes for a batch's encoded chunks and their lists."""
        lists = 4 * self.max_tasks + 3 * (
            self.max_chunks + self.max_tasks
        )  # before they are packed
        return self.encoded_nbytes + 8 * (self.list_words + lists) + 4 * self.max_chunks

    @property
    def is_deflate(self) -> bool:
        """Whether decoded chunks have an Adler-32 to be checked."""
        return self.frame.codec == "deflate"


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """Which chunks are read encoded, and where the samples in them go.

    Attributes
    ----------
    leaf_start
        Of a dataset of several sources: items ``leaf_start[i]`` to ``leaf_start[i + 1]`` are
        chunks of leaf ``leaf[i]``.
    leaf
        Numbers of leaves.
    offset, nbytes
        int64 (n,): where each chunk lies in its file.
    position
        int64 (n,): where it goes in the memory for encoded chunks.
    run_item, run_cross, run_local, run_position, run_length
        int64 (r,): samples that go from a chunk to the batch: the chunk's item, its index in the
        cross-section, the first sample in the chunk, the first row of the batch, and how many.
    """

    leaf_start: list[int]
    leaf: list[int]
    offset: Int64s
    nbytes: Int64s
    position: Int64s
    run_item: Int64s
    run_cross: Int64s
    run_local: Int64s
    run_position: Int64s
    run_length: Int64s

    @property
    def num_items(self) -> int:
        """Chunks to read."""
        return self.offset.size

    @property
    def item_nbytes(self) -> int:
        """Encoded bytes of an item: what it costs."""
        return int(self.nbytes.sum()) // max(1, self.nbytes.size)

    @property
    def used_nbytes(self) -> int:
        """Bytes of the memory for encoded chunks that are used."""
        return int(self.position[-1] + self.nbytes[-1])


def encoded_format(
    layout: DatasetLayout, core: Core | None, rows: int, *, in_order: bool
) -> EncodedFormat | str:
    """Return how a GPU decodes chunks of a dataset, or why it cannot.

    Parameters
    ----------
    layout
        Of the dataset.
    core
        The compiled core, which reads encoded chunks.
    rows
        Samples in a batch.
    in_order
        Whether batches hold neighbouring samples.
    """
    leaves = list(layout.leaves())
    first = leaves[0]
    reason = _reason_against(layout, leaves)
    frame = frame_format(first.filters)
    if reason is None and frame is None:
        reason = f"its filters are {'+'.join(entry.label for entry in first.filters)}"
    if reason is None and core is None:
        reason = "the compiled core is missing"
    if reason is not None:
        return reason
    assert frame is not None
    pieces = len(first.cross_section)
    samples = first.chunk_shape[first.sample_axis]
    runs = max(1, sum(most_runs(p.samples, p.source_samples) for p in layout.parts))
    touched = min(rows, -(-rows // samples) + 2 * runs) if in_order else rows
    nbytes = np.concatenate([leaf.chunks.nbytes for leaf in leaves if leaf.chunks is not None])
    max_chunks = min(touched * pieces, nbytes.size)
    pitch = -(-first.chunk_nbytes // _ALIGNMENT) * _ALIGNMENT
    largest = np.partition(nbytes, nbytes.size - max_chunks)[nbytes.size - max_chunks :]
    encoded_nbytes = int(largest.sum()) + 2 * _ALIGNMENT * max_chunks
    if pitch * max_chunks > _MOST_DECODED_NBYTES or encoded_nbytes > _MOST_ENCODED_NBYTES:
        return f"a batch may touch {max_chunks} chunks of {first.chunk_nbytes} bytes"
    return EncodedFormat(
        frame=frame,
        unshuffles=_unshuffles(first.filters),
        geometry=first.geometry,
        itemsize=first.dtype.itemsize,
        row_nbytes=first.row_nbytes,
        pitch=pitch,
        max_chunks=max_chunks,
        max_tasks=max_chunks * max(1, frame.usual_tasks(first.chunk_nbytes)),
        max_runs=rows * pieces,
        encoded_nbytes=encoded_nbytes,
    )


def _reason_against(layout: DatasetLayout, leaves: list[DatasetLayout]) -> str | None:
    first = leaves[0]
    if any(leaf.fallback_reason is not None for leaf in leaves):
        return "it is read through h5py"
    if any(leaf.chunks is None or not leaf.filters for leaf in leaves):
        return "it is not compressed"
    if any(not leaf.chunks.offset.size for leaf in leaves if leaf.chunks is not None):
        return "it has no chunks"
    if len(first.shape) > MAX_RANK:
        return f"it has {len(first.shape)} dimensions"
    for part in layout.parts:
        if part.source.parts or needs_scratch(layout, part) or layout.has_gaps:
            return "it is put together out of pieces of other datasets"
        source = part.source
        same = (
            source.filters == first.filters
            and source.chunk_shape == first.chunk_shape
            and source.sample_axis == first.sample_axis
            and source.row_shape == first.row_shape
        )
        if not same:
            return "its files differ in chunks or filters"
    return None


def _unshuffles(filters: tuple[Filter, ...]) -> tuple[Unshuffle, ...]:
    codecs = (entry.codec for entry in reversed(filters))
    return tuple(codec.unshuffle for codec in codecs if codec and codec.unshuffle)


def plan_encoded(layout: DatasetLayout, form: EncodedFormat, sample: Int64s) -> EncodedPlan | None:
    """Plan how the chunks of a batch are given to a GPU.

    Parameters
    ----------
    layout, form
        Of a dataset that has an `EncodedFormat`.
    sample
        int64 (n,): sample numbers.

    Returns
    -------
    EncodedPlan or None
        None where the host has to decode this batch: some chunks were never written, or some
        filter was left out for some.
    """
    several = [(0, np.arange(sample.size), sample)]
    if layout.parts:
        several = [
            (number, chosen, layout.parts[number].source_samples.at(ordinal))
            for number, chosen, ordinal in touched_parts(layout, sample)
        ]
    leaf_start, leaves, offsets, sizes, runs = [0], [], [], [], []
    for leaf, rows, of_source in several:
        source = layout.parts[leaf].source if layout.parts else layout
        of_leaf, chunks = plan_chunks(source, of_source, rows), source.chunks
        assert chunks is not None
        entry = of_leaf.entry
        if (entry < 0).any() or chunks.filter_mask[entry].any():
            return None
        runs.append(_runs(of_leaf, leaf_start[-1]))
        leaves.append(leaf)
        leaf_start.append(leaf_start[-1] + entry.size)
        offsets.append(chunks.offset[entry])
        sizes.append(chunks.nbytes[entry])
    if not sizes:
        return None
    nbytes = np.concatenate(sizes)
    room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
    position = np.cumsum(room) - room + (_DEFLATE_BEGIN if form.is_deflate else 0)
    item, cross, local, goes_to, length = map(np.concatenate, zip(*runs, strict=True))
    planned = EncodedPlan(
        leaf_start=leaf_start,
        leaf=leaves,
        offset=np.concatenate(offsets),
        nbytes=nbytes,
        position=position,
        run_item=item,
        run_cross=cross,
        run_local=local,
        run_position=goes_to,
        run_length=length,
    )
    fits = planned.num_items <= form.max_chunks and planned.used_nbytes <= form.encoded_nbytes
    return planned if fits and item.size <= form.max_runs else None


def _runs(plan: ChunkPlan, first_item: int) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """List the runs of all chunks: chunks of one group share theirs."""
    begin = plan.run_start[plan.group]
    count = plan.run_start[plan.group + 1] - begin
    item = np.repeat(np.arange(plan.num_items), count)
    run = np.arange(item.size) + np.repeat(begin - (np.cumsum(count) - count), count)
    return (
        item + first_item,
        plan.cross.astype(np.int64)[item],
        plan.run_local[run],
        plan.run_position[run],
        plan.run_length[run],
    )
