"""Computes the cost of reading a dataset: stored bytes per sample, and the share of h5py."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.datasettable import table_of
from h5async.index.layout import DatasetLayout
from h5async.index.segments import Piece, Segments, extents_of
from h5async.index.shapes import swaps, wanted_of_cells


class ReadCost(NamedTuple):
    """Average stored bytes read per sample used."""

    in_order: float  # if samples are read in order: each chunk once
    shuffled: float  # if those of a chunk are in different batches: each chunk once per sample


def read_cost(layout: DatasetLayout) -> ReadCost:
    """Return the cost of reading a sample of a dataset; of its sources, only mapped data count."""
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
    """Return the total cost of all samples of which one dataset holds a piece.

    In order, chunks that hold several pieces count once: `seen` marks those that were counted, by
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
    if not layout.filters and layout.sample_axis == 0:  # samples are read alone
        nbytes = float(np.dot(used, of_chunk)) * layout.dtype.itemsize
        return ReadCost(nbytes, nbytes)
    stored = layout.chunks.nbytes.astype(np.float64)
    is_seen = seen.setdefault(id(layout), np.zeros(used.size, np.bool_))
    is_new = (used > 0) & ~is_seen
    is_seen |= is_new
    return ReadCost(float(stored[is_new].sum()), float(np.dot(stored, used)))


def _used_before(runs: Segments, row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the number of samples with a row before each of some rows."""
    is_single = runs.step == 1
    used = np.zeros(row.size)
    for sign, edge in ((1, runs.row), (-1, runs.row + runs.length)):
        edges = np.sort(edge[is_single]).astype(np.float64)
        count = np.searchsorted(edges, row)
        used += sign * (count * row - np.concatenate(([0.0], np.cumsum(edges)))[count])
    # A row that samples have in common is read once.
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
