"""Plans which chunks of a dataset some samples need, and which samples go where. Pure.

The kernels that place decoded chunks on a GPU are tested with these; the package plans in its core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout
from h5async.plan.records import Int64s


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Which chunks a batch needs, and which runs of samples go where.

    Attributes
    ----------
    entry
        int64 (n,): the chunk's index in the layout's `ChunkTable`; -1: never allocated.
    cross
        int32 (n,): the number of the chunk among those that hold one sample.
    group
        int32 (n,), ascending: chunks of one group hold pieces of the same samples.
    group_number
        int64 (g,): the group's index in the grid of chunks, along the sample dimension
        (contiguous: any).
    run_start
        int64 (g + 1,): runs ``run_start[i]`` to ``run_start[i + 1]`` belong to group i.
    run_local, run_position, run_length
        int64 (r,): a run's first sample within the chunk, its first row of the batch, and its
        number of samples, adjacent in both.
    chunk_nbytes
        Decoded bytes of a chunk.
    """

    entry: Int64s
    cross: NDArray[np.int32]
    group: NDArray[np.int32]
    group_number: Int64s
    run_start: Int64s
    run_local: Int64s
    run_position: Int64s
    run_length: Int64s
    chunk_nbytes: int

    @property
    def num_items(self) -> int:
        """Chunks to read."""
        return self.entry.size

    @property
    def item_nbytes(self) -> int:
        """Decoded bytes of an item: what it costs."""
        return self.chunk_nbytes


def plan_chunks(layout: DatasetLayout, sample: Int64s, rows: Int64s) -> ChunkPlan:
    """Plan how samples of a chunked dataset are read.

    Parameters
    ----------
    layout
        Of the dataset, without parts.
    sample
        int64 (n,): sample numbers, all in range.
    rows
        int64 (n,): where they go in the batch.
    """
    axis = layout.sample_axis
    order = np.argsort(sample, kind="stable")
    goes_to = rows[order]
    if layout.chunk_shape[axis] == 1:
        runs = _Runs.of_one_each(sample[order], goes_to)
    else:
        runs = _Runs.of(*np.divmod(sample[order], layout.chunk_shape[axis]), goes_to)
    return _plan_of_chunks(layout, runs)


def cross_numbers(layout: DatasetLayout) -> tuple[int, Int64s]:
    """Return the step of chunk numbers along the samples, and the numbers for sample 0."""
    axis = layout.sample_axis
    strides = np.cumprod((1, *layout.grid[:0:-1]), dtype=np.int64)[::-1]
    extents = [1 if a == axis else n for a, n in enumerate(layout.grid)]
    cells = np.indices(extents).reshape(len(extents), -1).T
    return int(strides[axis]), cells @ strides


def _plan_of_chunks(layout: DatasetLayout, runs: _Runs) -> ChunkPlan:
    chunks = layout.chunks
    assert chunks is not None
    stride, first = cross_numbers(layout)
    numbers = (runs.group_number[:, None] * stride + first).ravel()
    group = np.arange(runs.group_number.size, dtype=np.int32)
    if first.size == 1:
        cross = np.zeros(group.size, np.int32)
    else:
        cross = np.tile(np.arange(first.size, dtype=np.int32), group.size)
        group = np.repeat(group, first.size)
    return ChunkPlan(
        entry=chunks.find(numbers),
        cross=cross,
        group=group,
        chunk_nbytes=layout.chunk_nbytes,
        **runs._asdict(),
    )


class _Runs(NamedTuple):
    """The part of a `ChunkPlan` that tells which samples go where."""

    group_number: Int64s
    run_start: Int64s
    run_local: Int64s
    run_position: Int64s
    run_length: Int64s

    @classmethod
    def of_one_each(cls, number: Int64s, position: Int64s) -> _Runs:
        """Make a group of each sample, where chunks hold one (or pieces of one)."""
        count = number.size
        zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
        return cls(number, np.arange(count + 1), zeros, position, ones)

    @classmethod
    def of(cls, number: Int64s, local: Int64s, position: Int64s) -> _Runs:
        """Group samples, sorted by group `number` and then `local`, and join neighbours to runs."""
        changes, breaks = np.ones((2, number.size), np.bool_)  # (there may be no samples)
        changes[1:] = number[1:] != number[:-1]
        breaks[1:] = changes[1:] | (np.diff(local) != 1) | (np.diff(position) != 1)
        first, group_first = np.flatnonzero(breaks), np.flatnonzero(changes)
        return cls(
            group_number=number[group_first],
            run_start=np.append(np.searchsorted(first, group_first), first.size),
            run_local=local[first],
            run_position=position[first],
            run_length=np.diff(np.append(first, number.size)),
        )
