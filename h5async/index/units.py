"""Finds units: groups of samples that are stored together, such as in one chunk. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from h5async.index.datasettable import kinds_of, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.slabs import PairedRuns

Int64s = NDArray[np.int64]

_UNCHUNKED_UNIT_NBYTES = 1 << 20  # a read of this size costs little more per byte


def unit_nbytes(layout: DatasetLayout) -> int:
    """Return the decoded bytes kept of a unit for several batches."""
    if layout.segments is not None:
        several = (unit_nbytes(leaf) for leaf, _ in kinds_of(layout))
        return max(layout.segments.kept_nbytes, *several)
    if not layout.filters or layout.is_row_a_chunk:
        return 0
    nbytes: int = layout.chunk_nbytes
    if layout.member and layout.stored_itemsize:  # HDF5 decodes the whole compound, too
        cells = layout.chunk_shape[: len(layout.chunk_shape) - layout.extra_dims]
        nbytes = math.prod(cells) * layout.stored_itemsize
    return nbytes * layout.num_pieces


def unit_bounds(layout: DatasetLayout, row_nbytes: int = 0) -> Int64s:
    """Return the bounds of units.

    Parameters
    ----------
    layout
        Of the samples.
    row_nbytes
        Delivered bytes of a sample; 0 for those of a row here.

    Returns
    -------
    numpy.ndarray
        int64 (n + 1,), strictly ascending from 0 to `num_samples`.
    """
    size, count = _unit_rows(layout, row_nbytes), layout.num_samples
    bounds = [np.array([0, count], np.int64)]
    if layout.segments is None or layout.chunk_shape:
        bounds.append(np.arange(0, count, size, dtype=np.int64))
    else:
        bounds.append(even_bounds(layout.segments.even, size))
        found = _Cuts(layout, row_nbytes)
        bounds += [found.inside(), *found.outside()]
    return np.unique(np.concatenate(bounds))


def sample_bounds(layout: DatasetLayout) -> Int64s:
    """Return `unit_bounds` in samples of the field, which may be several rows."""
    bounds = unit_bounds(layout)
    if not layout.is_ragged:
        return bounds
    starts = layout.starts()
    return np.unique(np.append(np.searchsorted(starts[:-1], bounds), [0, starts.size - 1]))


def most_units(layout: DatasetLayout, row_nbytes: int = 0) -> int:
    """Return the maximum number of units that `unit_bounds` finds, without listing them."""
    size, count = _unit_rows(layout, row_nbytes), layout.num_samples
    if layout.segments is None or layout.chunk_shape:
        return 1 + count // size
    of_even = sum(1 + (end - begin) // (own or size) for begin, end, own in layout.segments.even)
    found = _Cuts(layout, row_nbytes)
    return 1 + of_even + 2 * found.segments.size + int(found.count.sum())


def even_bounds(even: Sequence[tuple[int, int, int]], size: int) -> Int64s:
    """Return the bounds within ranges (`Segments.even`); `size` is for those without their own."""
    found = [np.arange(begin, end, own or size) for begin, end, own in even]
    return np.concatenate([*found, np.array([end for _, end, _ in even])]).astype(np.int64)


def even_ranges(bounds: Int64s) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of which these are the bounds: neighbours of one size are one."""
    size = np.diff(bounds)
    at = np.flatnonzero(np.diff(size, prepend=-1))
    ends = bounds[np.append(at[1:], size.size)]
    return tuple(zip(bounds[at].tolist(), ends.tolist(), size[at].tolist(), strict=True))


def bounds_behind(runs: PairedRuns, edges: Int64s) -> Int64s:
    """Return the bounds of units of runs of samples, whose rows have units with these `edges`.

    Samples between two samples of a unit belong to it, unless another dataset holds them.
    """
    first, length, row, step = runs
    unit = np.searchsorted(edges, row, side="right")  # the edge after it
    last = np.searchsorted(edges, row + (length - 1) * step, side="right")
    count = last - unit
    which = np.repeat(np.arange(count.size), count)
    edge = edges[np.arange(which.size) - (np.cumsum(count) - count - unit)[which]]
    inside = first[which] - (row[which] - edge) // step[which]
    begins = np.concatenate(([True], last[:-1] != unit[1:]))
    ends = (first + length)[np.append(begins[1:], True)]
    return np.concatenate([first[begins], ends, inside]).astype(np.int64)


def _unit_rows(layout: DatasetLayout, row_nbytes: int) -> int:
    if layout.chunk_shape:
        return layout.chunk_shape[layout.sample_axis]
    return max(1, _UNCHUNKED_UNIT_NBYTES // max(1, row_nbytes or layout.row_nbytes))


class _Cuts:
    """Where units of datasets cut the segments of samples that they hold.

    Samples between two samples of a unit belong to it, unless another dataset holds them.
    """

    def __init__(self, layout: DatasetLayout, row_nbytes: int) -> None:
        segments, datasets = table_of(layout)
        if segments.even:  # those have all bounds
            segments = segments.at(np.zeros(0, np.int64))
        order = np.lexsort((segments.first, segments.piece, segments.dataset))
        self.segments = segments = segments.at(order)
        row_nbytes = row_nbytes or layout.row_nbytes
        sizes = np.array([_unit_rows(kind, row_nbytes) for kind in datasets.kinds], np.int64)
        self._size = sizes[datasets.columns.kind[segments.dataset]]
        self._unit = segments.row // self._size
        self._last = (segments.row + (segments.length - 1) * segments.step) // self._size
        self.count = self._last - self._unit

    def inside(self) -> Int64s:
        """Return the samples within segments with which another unit begins."""
        which = np.repeat(np.arange(self.count.size), self.count)
        before = (np.cumsum(self.count) - self.count - self._unit - 1)[which]
        edge = (np.arange(which.size) - before) * self._size[which]
        segments = self.segments
        found: Int64s = segments.first[which] - (segments.row[which] - edge) // segments.step[which]
        return found

    def outside(self) -> tuple[Int64s, Int64s]:
        """Return the first samples of segments, and the ends of them, that bound units."""
        segments = self.segments
        is_new = np.ones(segments.size + 1, np.bool_)
        is_new[1:-1] = self._last[:-1] != self._unit[1:]
        is_new[1:-1] |= segments.dataset[1:] != segments.dataset[:-1]
        is_new[1:-1] |= segments.piece[1:] != segments.piece[:-1]
        return segments.first[is_new[:-1]], segments.end[is_new[1:]]
