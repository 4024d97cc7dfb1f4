"""Sample numbers and a dataset's layout enter; a read plan leaves: a few arrays. Pure.

Two forms of plan cover all layouts. Where every sample lies in one piece and undecoded, a
`RowPlan` is one file offset a sample. Else a `ChunkPlan` lists each chunk that the batch touches
once, and, shared by all chunks that hold pieces of the same samples, the runs of neighbouring
samples that go from a chunk to the batch. Both can be executed in slices, by anyone: `execute.py`
does it in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.layout import DatasetLayout

Int64s = NDArray[np.int64]

_COLUMN_GROUPS = 32  # shares into which samples that are columns of one array can be cut


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where each row of a batch lies in the file, in the order of the batch.

    Attributes
    ----------
    sample
        int64 (n,): sample numbers.
    offset
        int64 (n,): address of the sample's bytes; -1: never written.
    row_nbytes
        Bytes of each.
    """

    sample: Int64s
    offset: Int64s
    row_nbytes: int

    @property
    def num_items(self) -> int:
        """Rows to read."""
        return self.offset.size

    @property
    def item_nbytes(self) -> int:
        """Decoded bytes of an item: what it costs."""
        return self.row_nbytes


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Which chunks a batch needs, and which runs of samples go where.

    Attributes
    ----------
    place
        int64 (n,): the chunk's place in the layout's `ChunkTable`; -1: never allocated.
    cross
        int32 (n,): the chunk's place in the layout's `cross_section`.
    group
        int32 (n,): chunks of one group hold pieces of the same samples.
    group_number
        int64 (g,): the group's place in the grid, along the sample dimension (contiguous: any).
    run_start
        int64 (g + 1,): runs ``run_start[i]`` to ``run_start[i + 1]`` belong to group i.
    run_local, run_position, run_length
        int64 (r,): a run's first sample within the chunk, its first row of the batch, and its
        number of samples, adjacent in both.
    chunk_nbytes
        Decoded bytes of a chunk.
    """

    place: Int64s
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
        return self.place.size

    @property
    def item_nbytes(self) -> int:
        """Decoded bytes of an item: what it costs."""
        return self.chunk_nbytes


@dataclass(frozen=True, slots=True)
class FallbackPlan:
    """Sample numbers that h5py reads, in one go."""

    sample: Int64s
    row_nbytes: int

    @property
    def num_items(self) -> int:
        """One: h5py is entered by one thread at a time."""
        return 1

    @property
    def item_nbytes(self) -> int:
        """Decoded bytes of the item: what it costs."""
        return self.sample.size * self.row_nbytes


ReadPlan = RowPlan | ChunkPlan | FallbackPlan


class PlanSlice(NamedTuple):
    """Items `start` to `stop` of the plan of field number `field`."""

    field: int
    start: int
    stop: int


def plan_read(layout: DatasetLayout, sample: Int64s) -> ReadPlan:
    """Plan how the rows of a batch are read.

    Parameters
    ----------
    layout
        Of the dataset.
    sample
        int64 (n,): sample numbers in the order of the batch, all in range.
    """
    if layout.fallback_reason is not None:
        return FallbackPlan(sample, layout.row_nbytes)
    if layout.storage == "contiguous":
        if layout.rows_are_whole:
            return _plan_contiguous_rows(layout, sample)
        return _plan_contiguous_columns(layout, sample)
    if layout.rows_are_whole and not layout.filters:
        return _plan_rows_of_chunks(layout, sample)
    return _plan_chunks(layout, sample)


def _plan_contiguous_rows(layout: DatasetLayout, sample: Int64s) -> RowPlan:
    if layout.offset < 0:
        offset = np.full(sample.shape, -1, np.int64)
    else:
        offset = layout.offset + sample * layout.row_nbytes
    return RowPlan(sample, offset, layout.row_nbytes)


def _plan_rows_of_chunks(layout: DatasetLayout, sample: Int64s) -> RowPlan:
    chunks = layout.chunks
    assert chunks is not None
    number, local = np.divmod(sample, layout.chunk_shape[0])
    place = chunks.find(number)
    if not chunks.offset.size:
        return RowPlan(sample, place, layout.row_nbytes)
    offset = chunks.offset[place] + local * layout.row_nbytes
    return RowPlan(sample, np.where(place < 0, -1, offset), layout.row_nbytes)


def _plan_contiguous_columns(layout: DatasetLayout, sample: Int64s) -> ChunkPlan:
    """Take the whole dataset as one chunk, whose samples lie in pieces; share out the samples."""
    order = np.argsort(sample, kind="stable")
    groups = min(sample.size, _COLUMN_GROUPS)
    runs = _Runs.of(np.arange(sample.size) * groups // sample.size, sample[order], order)
    return ChunkPlan(
        place=np.full(groups, -1 if layout.offset < 0 else 0, np.int64),
        cross=np.zeros(groups, np.int32),
        group=np.arange(groups, dtype=np.int32),
        chunk_nbytes=sample.size * layout.row_nbytes // groups,
        **runs._asdict(),
    )


def _plan_chunks(layout: DatasetLayout, sample: Int64s) -> ChunkPlan:
    chunks = layout.chunks
    assert chunks is not None
    axis = layout.sample_axis
    order = np.argsort(sample, kind="stable")
    runs = _Runs.of(*np.divmod(sample[order], layout.chunk_shape[axis]), order)
    groups, pieces = runs.group_number.size, len(layout.cross_section)
    strides = np.cumprod((1, *layout.grid[:0:-1]), dtype=np.int64)[::-1]
    cells = layout.cross_section // np.asarray(layout.chunk_shape)
    numbers = runs.group_number[:, None] * strides[axis] + cells @ strides
    return ChunkPlan(
        place=chunks.find(numbers.ravel()),
        cross=np.tile(np.arange(pieces, dtype=np.int32), groups),
        group=np.repeat(np.arange(groups, dtype=np.int32), pieces),
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
    def of(cls, number: Int64s, local: Int64s, position: Int64s) -> _Runs:
        """Group samples, sorted by group `number` and then `local`, and join neighbours to runs."""
        changes = number[1:] != number[:-1]
        breaks = changes | (np.diff(local) != 1) | (np.diff(position) != 1)
        first = np.flatnonzero(np.concatenate(([True], breaks)))
        group_first = np.flatnonzero(np.concatenate(([True], changes)))
        return cls(
            group_number=number[group_first],
            run_start=np.append(np.searchsorted(first, group_first), first.size),
            run_local=local[first],
            run_position=position[first],
            run_length=np.diff(np.append(first, number.size)),
        )


def cut(plans: Sequence[ReadPlan], parts: int, min_part_nbytes: int) -> Iterator[list[PlanSlice]]:
    """Cut the work of a batch into shares of about equal cost.

    The items of all plans are laid end to end, each as long as its bytes, and cut at equal
    distances, so that small fields ride along with large ones.

    Parameters
    ----------
    plans
        One for each field.
    parts
        Shares to make at most.
    min_part_nbytes
        A share should be worth handing to a thread.

    Yields
    ------
    list of PlanSlice
        One share; together they hold each item once.
    """
    costs = [plan.num_items * plan.item_nbytes for plan in plans]
    total = sum(costs)
    parts = max(1, min(parts, total // max(1, min_part_nbytes)))
    cuts: list[list[PlanSlice]] = [[] for _ in range(parts)]
    begin = 0
    for field, (plan, cost) in enumerate(zip(plans, costs, strict=True)):
        edges = [0]
        for part in range(1, parts):
            inside = total * part // parts - begin
            edges.append(min(plan.num_items, max(0, round(inside / max(1, plan.item_nbytes)))))
        edges.append(plan.num_items)
        for part in range(parts):
            if edges[part] < edges[part + 1]:
                cuts[part].append(PlanSlice(field, edges[part], edges[part + 1]))
        begin += cost
    return (share for share in cuts if share)
