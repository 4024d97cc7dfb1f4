"""Finds units: groups of samples that are stored together, such as in one chunk. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from h5async.index.datasettable import pieces_read, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.segments import Int64s, PairedRuns, repetitions

_UNCHUNKED_UNIT_NBYTES = 1 << 20  # a read of this size costs little more per byte


def unit_nbytes(layout: DatasetLayout) -> int:
    """Return the decoded bytes kept of a unit for several batches."""
    if layout.segments is not None:
        several = (
            unit_nbytes(kind) // max(1, kind.num_pieces) * pieces
            for kind, pieces in pieces_read(layout)
        )
        return max(layout.segments.kept_nbytes, *several)
    if not layout.filters or layout.is_row_a_chunk:
        return 0
    nbytes: int = layout.chunk_nbytes
    if layout.member and layout.stored_itemsize:  # HDF5 decodes the whole compound, too
        cells = layout.chunk_shape[: len(layout.chunk_shape) - layout.extra_dims]
        nbytes = math.prod(cells) * layout.stored_itemsize
    return nbytes * layout.num_pieces


def unit_bounds(layout: DatasetLayout, row_nbytes: int = 0) -> Int64s:
    """Return the bounds of units: int64 (n + 1,), strictly ascending from 0 to `num_samples`.

    `row_nbytes` are the delivered bytes of a sample; 0 for those of a row here.
    """
    size, count = _unit_rows(layout, row_nbytes), layout.num_samples
    bounds = [np.array([0, count], np.int64)]
    if layout.segments is None or layout.chunk_shape:
        bounds.append(np.arange(0, count, size, dtype=np.int64))
    else:
        bounds.append(even_bounds(layout.segments.even, size))
        cuts, rows = _cuts_of(layout, row_nbytes)
        bounds.append(cuts.bounds(lambda which, unit: unit * rows[which]))
    return np.unique(np.concatenate(bounds))


def sample_bounds(layout: DatasetLayout) -> Int64s:
    """Return `unit_bounds` in samples of the field, which may be several rows."""
    bounds = unit_bounds(layout)
    if not layout.is_ragged:
        return bounds
    starts = layout.starts()
    return np.unique(np.append(np.searchsorted(starts[:-1], bounds), [0, starts.size - 1]))


def most_units(layout: DatasetLayout) -> int:
    """Return the maximum number of units that `unit_bounds` finds, without listing them."""
    size, count = _unit_rows(layout, 0), layout.num_samples
    if layout.segments is None or layout.chunk_shape:
        return 1 + count // size
    of_even = sum(1 + (end - begin) // (own or size) for begin, end, own in layout.segments.even)
    return 1 + of_even + _cuts_of(layout, 0)[0].most


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
    """Return the bounds of units of runs of samples, whose rows have units with these `edges`."""
    _, length, row, step = runs
    unit = np.searchsorted(edges, row, side="right") - 1
    last = np.searchsorted(edges, row + (length - 1) * step, side="right") - 1
    return _Cuts(runs, unit, last, np.zeros(max(0, runs.size - 1), np.bool_)).bounds(
        lambda which, unit: edges[unit]
    )


def _unit_rows(layout: DatasetLayout, row_nbytes: int) -> int:
    if layout.chunk_shape:
        return layout.chunk_shape[layout.sample_axis]
    return max(1, _UNCHUNKED_UNIT_NBYTES // max(1, row_nbytes or layout.row_nbytes))


def _cuts_of(layout: DatasetLayout, row_nbytes: int) -> tuple[_Cuts, Int64s]:
    """Return where units cut the segments of a layout, and the rows of a unit of each segment."""
    segments, datasets = table_of(layout)
    if segments.even:  # those have all bounds
        segments = segments.at(np.zeros(0, np.int64))
    segments = segments.at(np.lexsort((segments.first, segments.piece, segments.dataset)))
    row_nbytes = row_nbytes or layout.row_nbytes
    sizes = datasets.by_kind(lambda kind: _unit_rows(kind, row_nbytes), np.int64)
    size = sizes[segments.dataset]
    runs = PairedRuns(segments.first, segments.length, segments.row, segments.step)
    is_other = (np.diff(segments.dataset) != 0) | (np.diff(segments.piece) != 0)
    last = (runs.row + (runs.length - 1) * runs.step) // size
    return _Cuts(runs, runs.row // size, last, is_other), size


class _Cuts:
    """Where units of datasets cut runs of samples.

    Samples between two samples of a unit belong to it, unless another dataset holds them. `unit`
    and `last` are the units of the first and of the last row of each run; `is_other`, bool
    (n - 1,), says whether a run lies elsewhere than the one before.
    """

    def __init__(
        self, runs: PairedRuns, unit: Int64s, last: Int64s, is_other: NDArray[np.bool_]
    ) -> None:
        self._runs, self._unit, self._count = runs, unit, last - unit
        self._is_new = np.ones(runs.size + 1, np.bool_)
        self._is_new[1:-1] = (last[:-1] != unit[1:]) | is_other

    @property
    def most(self) -> int:
        """The number of bounds at most."""
        return 2 * self._runs.size + int(self._count.sum())

    def bounds(self, edge: Callable[[Int64s, Int64s], Int64s]) -> Int64s:
        """Return the samples that bound units.

        `edge` returns the first rows of units, from the numbers of their runs and their own.
        """
        first, length, row, step = self._runs
        which, ordinal = repetitions(self._count)
        begin = edge(which, self._unit[which] + 1 + ordinal)
        inside = first[which] - (row[which] - begin) // step[which]
        ends = (first + length)[self._is_new[1:]]
        return np.concatenate([first[self._is_new[:-1]], ends, inside]).astype(np.int64)
