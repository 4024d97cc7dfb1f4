"""Computes what reading a dataset costs: stored bytes for each sample, and the share of h5py."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from h5async.index.layout import DatasetLayout


class ReadCost(NamedTuple):
    """Stored bytes that are read for each sample used, on average.

    Attributes
    ----------
    in_order
        Where samples are read one after the other: each chunk once.
    shuffled
        Where the other samples of a chunk are not in the same batch: each chunk for each sample.
    """

    in_order: float
    shuffled: float


def read_cost(layout: DatasetLayout) -> ReadCost:
    """Return what a sample of a dataset costs to read."""
    count = layout.num_samples
    if count == 0 or layout.values is not None:  # compact values came with the metadata
        return ReadCost(0.0, 0.0)
    if layout.parts:
        costs = [(read_cost(part.source), part.samples.size / count) for part in layout.parts]
        return ReadCost(
            sum(cost.in_order * share for cost, share in costs),
            sum(cost.shuffled * share for cost, share in costs),
        )
    if not layout.chunk_shape:
        nbytes = float(layout.row_nbytes) if layout.stored_nbytes else 0.0
        return ReadCost(nbytes, nbytes)
    in_order = layout.stored_nbytes / count
    if layout.chunks is None:
        return ReadCost(in_order, in_order * min(count, layout.chunk_shape[layout.sample_axis]))
    if not layout.filters and layout.sample_axis == 0:
        return ReadCost(in_order, in_order)  # samples are read alone
    return ReadCost(in_order, _touched_nbytes(layout) / count)


def direct_share(layout: DatasetLayout) -> float:
    """Return the share of a dataset's samples that are read directly, without h5py."""
    if not layout.parts:
        return float(layout.fallback_reason is None)
    held = sum(part.samples.size for part in layout.parts)
    return sum(direct_share(p.source) * p.samples.size for p in layout.parts) / max(1, held)


def _touched_nbytes(layout: DatasetLayout) -> float:
    """Return the sum, over all samples, of the stored sizes of the chunks with pieces of them."""
    chunks, axis = layout.chunks, layout.sample_axis
    assert chunks is not None
    number = np.arange(chunks.offset.size) if chunks.index is None else chunks.index
    cell = number // math.prod(layout.grid[axis + 1 :]) % layout.grid[axis]
    size = layout.chunk_shape[axis]
    samples = np.minimum(size, layout.num_samples - cell * size)
    return float(np.dot(chunks.nbytes.astype(np.float64), samples))
