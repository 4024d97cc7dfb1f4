"""Compares the bytes read and decoded with the bytes used, and gives advice.

Also computes the cost of a dataset: stored bytes read per sample, and the share read without h5py.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.fill.resident import wanted_kept_nbytes
from h5async.index.datasettable import kinds_of, pieces_read, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import swaps, wanted_of_cells
from h5async.index.tables import Piece, Segments, extents_of
from h5async.observe.stats import Advice, ChunkAdvice, Remedy
from h5async.opening.dataset import Samplings
from h5async.order.rows import SpanRows, StepRows
from h5async.samples.fieldkind import Rows, field_of
from h5async.spelling import named, printable
from h5async.system.resources import free_memory

_Kind = Literal["encoded", "by_h5py"]  # of chunks, see `Used`

_CACHED_SHARE = 0.5  # of the free memory, that a kept dataset or window may take
_LEAST_CHUNK_NBYTES = 10_000  # reading smaller chunks costs more than it saves
_LOOKED_AT = 100_000  # samples, to estimate how many of a chunk are selected
_FAR_FEWER = 1.5  # reduction of samples per chunk that justifies rewriting a file


class Used(NamedTuple):
    """Bytes that samples need, by storage, with each chunk read or decoded once."""

    # In chunks that h5async decodes. Records of a table count as a whole, and so do edge chunks
    # that extend beyond the dataset: no order of samples avoids these bytes.
    encoded: float = 0.0
    raw: float = 0.0  # not encoded
    by_h5py: float = 0.0  # in encoded chunks that only h5py reads

    def plus(self, other: Used, times: float = 1.0) -> Used:
        """Return the sum; `other` counts `times` times."""
        return Used(*(mine + times * others for mine, others in zip(self, other, strict=True)))


class _Column(NamedTuple):
    """A column, and the bytes needed for each byte of it."""

    name: str
    layout: DatasetLayout
    rows: Rows
    needs: Used

    @property
    def rows_of_sample(self) -> int:
        """Number of rows that a sample consists of, if it is fixed."""
        return self.rows.size if isinstance(self.rows, StepRows) else 1


class ChunkFacts:
    """Facts about a reader's chunks that do not change.

    `stored_share` is the number of encoded bytes per decoded byte, in chunks that h5async decodes.
    """

    def __init__(self, samplings: Samplings) -> None:
        self._config, self._selection = samplings.config, samplings.selection
        layouts = self._layouts = samplings.layouts
        self._columns = {
            name: _Column(name, layout, one, needs_of(layout))
            for (name, layout), one in zip(layouts.items(), samplings.rows, strict=True)
        }
        stored = decoded = 0.0
        for layout in layouts.values():
            for leaf, count in kinds_of(layout):
                if needs := needs_of(leaf).encoded:
                    stored += count * leaf.stored_nbytes
                    decoded += count * leaf.nbytes * needs
        self.stored_share = stored / decoded if decoded else 0.0

    def used(self, column: str, nbytes: float) -> Used:
        """Return the bytes needed for `nbytes` delivered bytes of a column."""
        return Used().plus(self._columns[column].needs, nbytes)

    @cached_property
    def advice(self) -> ChunkAdvice:
        """Ways to decode or read less, with these options and this memory."""
        return ChunkAdvice(self._about("encoded"), self._about("by_h5py"), self._remedies_of_raw())

    def _about(self, kind: _Kind) -> Advice:
        """Return advice on the column whose chunks cause the most decoded bytes."""
        columns = self._columns.values()
        found = [
            column._replace(layout=_largest_chunks(column.layout, kind))
            for column in columns
            if getattr(column.needs, kind)
        ]
        if not found:
            return Advice()
        culprit = max(found, key=lambda column: column.layout.chunk_nbytes)
        is_alone = len({field_of(column.name) for column in columns}) == 1
        name, unit = "" if is_alone else printable(field_of(culprit.name)), self._unit_of(culprit)
        config, remedies = self._config, []
        is_mixed = config.shuffle == "full" or (config.weights is not None and not config.shuffle)
        is_mixed &= config.sampler is None
        if is_mixed and kind == "encoded" and self._window_fits():
            # (h5py would still decode a chunk for each batch that needs it.)
            remedies.append(Remedy(named("shuffle", "window"), self._left_by_window(culprit)))
        if config.cache is None and config.num_helpers <= 1 and config.decode != "device":
            if self._fits():
                repeats = config.weights is not None
                when = ", as draws repeat" if repeats else " from the second epoch on"
                remedies.append(Remedy(f"{named('cache', 'host')}{when}", 0.0))
        rows = _rows_of_chunk(culprit)
        if rows:
            of = f' "{name}"' if name else ""
            count = f"one {unit}" if rows == 1 else f"{rows:,} {unit}s"
            remedies.append(Remedy(f"repack{of} with {count} a chunk (h5async advise measures it)"))
        return Advice(name, unit, tuple(remedies))

    def _unit_of(self, culprit: _Column) -> str:
        if isinstance(culprit.rows, StepRows):
            return "row"
        if isinstance(culprit.rows, SpanRows):
            return "value"
        is_image = self._config.h_dim is not None and culprit.name == next(iter(self._layouts))
        return "image" if is_image else "sample"

    def _left_by_window(self, culprit: _Column) -> float:
        """Return the samples decoded per used sample if each chunk is decoded once.

        Unselected samples of a chunk are decoded for nothing in any order, and each helper process
        decodes the chunks of its batches.
        """
        per_chunk = float(culprit.layout.chunk_shape[culprit.layout.sample_axis])
        if isinstance(culprit.rows, SpanRows):
            per_chunk = max(1.0, per_chunk / max(1, culprit.rows.likely(1)))
        looked_at = np.arange(min(self._selection.size, _LOOKED_AT))
        samples = self._selection.ascending.samples(looked_at)
        used: float = samples.size
        if self._config.weights is not None:  # draws, which may repeat samples
            used *= (self._config.epoch_samples or self._selection.size) / self._selection.size
        chunks = min(used, np.unique(samples // per_chunk).size)
        once = chunks * per_chunk / max(1, used * culprit.rows_of_sample)
        return max(1.0, once) * max(1, self._config.num_helpers)

    def _remedies_of_raw(self) -> tuple[Remedy, ...]:
        """Return remedies for raw chunks that are read whole because they lie across samples."""
        for column in self._columns.values():
            layout = column.layout
            if column.needs.raw and layout.chunk_shape and layout.sample_axis:
                name = printable(field_of(column.name))
                return (Remedy(f'store "{name}" with the dimension of its samples first'),)
        return ()

    def _window_fits(self) -> bool:
        wanted = sum(wanted_kept_nbytes(self._config, self._layouts, in_window=True))
        wanted *= max(1, self._config.num_helpers)
        return wanted <= _CACHED_SHARE * free_memory()[0].nbytes

    def _fits(self) -> bool:
        nbytes = sum(
            column.layout.nbytes * column.rows_of_sample / max(1, column.layout.sample_count)
            for column in self._columns.values()
        )
        return nbytes * self._selection.size <= _CACHED_SHARE * free_memory()[0].nbytes


def _rows_of_chunk(culprit: _Column) -> int:
    """Return the number of rows that a chunk should have; 0 if it need not change."""
    layout, rows = culprit.layout, culprit.rows
    now = layout.chunk_shape[layout.sample_axis]
    least = -(-_LEAST_CHUNK_NBYTES // max(1, layout.row_nbytes))
    of_sample = rows.likely(1) if isinstance(rows, SpanRows) else culprit.rows_of_sample
    wanted = max(least, of_sample)
    return wanted if wanted * _FAR_FEWER <= now else 0


def needs_of(layout: DatasetLayout) -> Used:
    """Return the bytes needed for each byte of a dataset; none if it is in memory at opening."""
    if layout.segments is not None:
        segments, datasets = table_of(layout)
        of_kind = datasets.columns.kind[segments.dataset]
        held = np.bincount(of_kind, segments.length, len(datasets.kinds))
        found, nbytes = Used(), max(1, layout.num_samples * layout.row_nbytes)
        for (kind, pieces), samples in zip(pieces_read(layout), held.tolist(), strict=True):
            # (The dataset of a compound's member holds whole records.)
            share = pieces / max(1, kind.num_pieces)
            found = found.plus(needs_of(kind), samples * share * kind.row_nbytes / nbytes)
        return found
    encoded = 0.0
    if layout.filters and layout.chunk_shape:
        whole = math.prod(layout.grid) * math.prod(layout.chunk_shape)
        encoded = whole / max(1, math.prod(layout.shape))
        encoded *= max(1.0, layout.stored_itemsize / max(1, layout.dtype.itemsize))
    if layout.fallback_reason is not None:
        return Used(by_h5py=encoded)
    if layout.values is not None:
        return Used()
    return Used(encoded=encoded, raw=float(not encoded))


def _largest_chunks(layout: DatasetLayout, kind: _Kind) -> DatasetLayout:
    found = [leaf for leaf, _ in kinds_of(layout) if getattr(needs_of(leaf), kind)]
    return max(found or [layout], key=lambda leaf: leaf.chunk_nbytes)


# --- the cost of a dataset ------------------------------------------------------------------------


class ReadCost(NamedTuple):
    """Average stored bytes read per sample used."""

    in_order: float  # if samples are read in order: each chunk once
    shuffled: float  # if a chunk's samples are in different batches: each chunk once per sample


def read_cost(layout: DatasetLayout) -> ReadCost:
    """Return the cost of reading a sample; only those parts of sources count that are mapped."""
    count = layout.num_samples
    if count == 0:
        return ReadCost(0.0, 0.0)
    segments, datasets = table_of(layout)
    key = segments.dataset.astype(np.int64) * len(segments.pieces) + segments.piece
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    seen: dict[int, NDArray[np.bool_]] = {}
    in_order = shuffled = 0.0
    for here in np.split(order, edges):
        number, piece = int(segments.dataset[here[0]]), segments.pieces[segments.piece[here[0]]]
        cost = _cost_of_dataset(datasets[number], segments.at(here), piece, layout, seen)
        in_order, shuffled = in_order + cost.in_order, shuffled + cost.shuffled
    return ReadCost(in_order / count, shuffled / count)


def direct_share(layout: DatasetLayout) -> float:
    """Return the share of a dataset's samples that are read directly, without h5py."""
    segments, datasets = table_of(layout)
    is_direct = datasets.by_kind(lambda kind: kind.fallback_reason is None, np.bool_)
    held = segments.length[is_direct[segments.dataset]]
    if layout.segments is None:
        return float(layout.fallback_reason is None)
    return float(held.sum() / max(1, segments.length.sum()))


def _cost_of_dataset(
    layout: DatasetLayout,
    segments: Segments,
    piece: Piece,
    whole: DatasetLayout,
    seen: dict[int, NDArray[np.bool_]],
) -> ReadCost:
    """Return the total cost of all samples that have a piece in one dataset.

    In order, a chunk that holds several pieces counts once: `seen` marks the counted chunks of each
    layout.
    """
    samples = int(segments.length.sum())
    is_left = piece.member is None and swaps(layout, whole) is None
    if is_left or layout.fallback_reason is not None:
        cost = _whole_cost(layout)
        return ReadCost(cost.in_order * samples, cost.shuffled * samples)
    if layout.values is not None:  # they were read with the metadata
        return ReadCost(0.0, 0.0)
    rest = [axis for axis in range(len(layout.shape)) if axis != layout.sample_axis]
    wanted = (piece.source_region or (slice(None),) * len(rest))[: len(rest)]
    size = layout.chunk_shape or layout.shape
    if layout.chunks is None:
        elements = math.prod(extents_of(piece.source_region, layout.row_shape))
        nbytes = float(samples * elements * layout.dtype.itemsize * (layout.offset >= 0))
        return ReadCost(nbytes, nbytes)
    index = np.unravel_index(layout.chunks.numbers, layout.grid)
    of_chunk = np.ones(layout.chunks.offset.size)  # wanted elements of a sample
    for a, w in zip(rest, wanted, strict=True):
        of_chunk *= wanted_of_cells(index[a], layout.shape[a], size[a], w)[1]
    begin = index[layout.sample_axis] * layout.chunk_shape[layout.sample_axis]
    used = _used_before(segments, begin + layout.chunk_shape[layout.sample_axis])
    used -= _used_before(segments, begin)
    used *= of_chunk > 0
    if not layout.filters and layout.sample_axis == 0:  # each sample is read by itself
        nbytes = float(np.dot(used, of_chunk)) * layout.dtype.itemsize
        return ReadCost(nbytes, nbytes)
    stored = layout.chunks.nbytes.astype(np.float64)
    is_seen = seen.setdefault(id(layout), np.zeros(used.size, np.bool_))
    is_new = (used > 0) & ~is_seen
    is_seen |= is_new
    return ReadCost(float(stored[is_new].sum()), float(np.dot(stored, used)))


def _used_before(runs: Segments, row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return, for each given row, the number of samples that have a row before it."""
    is_single = runs.step == 1
    used = np.zeros(row.size)
    for sign, edge in ((1, runs.row), (-1, runs.row + runs.length)):
        edges = np.sort(edge[is_single]).astype(np.float64)
        count = np.searchsorted(edges, row)
        used += sign * (count * row - np.concatenate(([0.0], np.cumsum(edges)))[count])
    # A row shared by several samples is read once.
    length, step = np.where(runs.step == 0, 1, runs.length), np.maximum(runs.step, 1)
    strided = zip(runs.row[~is_single], length[~is_single], step[~is_single], strict=True)
    for first, length, step in strided:
        used += (-((first - row) // step)).clip(0, length)
    return used


def _whole_cost(layout: DatasetLayout) -> ReadCost:
    """Return the cost of a sample of a dataset that h5py reads."""
    if not layout.chunk_shape:
        nbytes = float(layout.row_nbytes) if layout.stored_nbytes else 0.0
        return ReadCost(nbytes, nbytes)
    count = layout.num_samples
    in_order = layout.stored_nbytes / max(1, count)
    return ReadCost(in_order, in_order * min(count, layout.chunk_shape[layout.sample_axis]))
