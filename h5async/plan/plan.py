"""Plans how the rows of samples are read. Pure.

Sample numbers and a dataset's layout enter; a read plan leaves (`records.py`): what is to be read,
chunk by chunk or row by row, and where in the batch it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from h5async.index.layout import DatasetLayout, Part
from h5async.plan.records import (
    ChunkPlan,
    Int64s,
    PartRead,
    PartsPlan,
    ReadPlan,
    RowPlan,
    Rows,
    SamplesPlan,
)

_SCRATCH_NBYTES = 1 << 20  # rows that are read at once where only pieces of them are wanted


def plan_read(layout: DatasetLayout, sample: Int64s, rows: Rows = 0) -> ReadPlan:
    """Plan how samples are read.

    Parameters
    ----------
    layout
        Of the dataset.
    sample
        int64 (n,): sample numbers, all in range.
    rows
        Where they go in the batch.
    """
    if layout.parts:
        return _plan_parts(layout, sample, rows)
    if layout.fallback_reason is not None or layout.values is not None:
        return SamplesPlan(sample, rows, layout.row_nbytes)
    if layout.chunks is None:
        if layout.rows_are_whole:
            return _plan_contiguous_rows(layout, sample, rows)
        return _plan_contiguous_columns(layout, sample, rows)
    if layout.rows_are_whole and not layout.filters:
        return _plan_rows_of_chunks(layout, sample, rows)
    return _plan_chunks(layout, sample, rows)


def plan_run(layout: DatasetLayout, begin: int, end: int) -> ReadPlan:
    """Plan how neighbouring samples are read, in their order: at a cost by chunk, not by sample.

    Parameters
    ----------
    layout
        Of the dataset.
    begin, end
        The first sample, and the one behind the last.
    """
    is_read = layout.fallback_reason is None and layout.values is None
    if layout.parts or not is_read or layout.chunks is None or begin == end:
        return plan_read(layout, np.arange(begin, end))
    return _plan_of_chunks(layout, _Runs.of_run(begin, end, layout.chunk_shape[layout.sample_axis]))


def rows_at(rows: Rows, chosen: Int64s) -> Int64s:
    """Return those of some rows whose indices are `chosen`."""
    return chosen + rows if isinstance(rows, int) else rows[chosen]


def _chosen_rows(rows: Rows, chosen: Int64s) -> Rows:
    """Return those of some rows whose indices are `chosen`, as the first one if neighbours."""
    rows = rows_at(rows, chosen)
    if rows.size and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all():
        return int(rows[0])
    return rows


def _plan_contiguous_rows(layout: DatasetLayout, sample: Int64s, rows: Rows) -> RowPlan:
    if layout.offset < 0:
        offset = np.full(sample.shape, -1, np.int64)
    else:
        offset = layout.offset + sample * layout.row_nbytes
    return RowPlan(sample, offset, rows, layout.row_nbytes)


def _plan_rows_of_chunks(layout: DatasetLayout, sample: Int64s, rows: Rows) -> RowPlan:
    chunks = layout.chunks
    assert chunks is not None
    number, local = np.divmod(sample, layout.chunk_shape[0])
    entry = chunks.find(number)
    if not chunks.offset.size:
        return RowPlan(sample, entry, rows, layout.row_nbytes)
    offset = chunks.offset[entry] + local * layout.row_nbytes
    return RowPlan(sample, np.where(entry < 0, -1, offset), rows, layout.row_nbytes)


def _plan_contiguous_columns(layout: DatasetLayout, sample: Int64s, rows: Rows) -> ChunkPlan:
    """Take the whole dataset as one chunk, whose samples lie in pieces; share out the rows."""
    order = np.argsort(sample, kind="stable")
    runs = _Runs.of(np.zeros(sample.size, np.int64), sample[order], rows_at(rows, order))
    slices = len(layout.cross_section)
    return ChunkPlan(
        entry=np.full(slices, -1 if layout.offset < 0 else 0, np.int64),
        cross=np.arange(slices, dtype=np.int32),
        group=np.zeros(slices, np.int32),
        chunk_nbytes=sample.size * layout.row_nbytes // max(1, slices),
        **runs._asdict(),
    )


def _plan_chunks(layout: DatasetLayout, sample: Int64s, rows: Rows) -> ChunkPlan:
    axis = layout.sample_axis
    order = np.argsort(sample, kind="stable")
    goes_to = rows_at(rows, order)
    if layout.chunk_shape[axis] == 1:
        runs = _Runs.of_one_each(sample[order], goes_to)
    else:
        runs = _Runs.of(*np.divmod(sample[order], layout.chunk_shape[axis]), goes_to)
    return _plan_of_chunks(layout, runs)


def _plan_of_chunks(layout: DatasetLayout, runs: _Runs) -> ChunkPlan:
    chunks = layout.chunks
    assert chunks is not None
    stride, first = layout.cross_numbers
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


def _plan_parts(layout: DatasetLayout, sample: Int64s, rows: Rows) -> PartsPlan:
    reads = [
        read
        for number, chosen, ordinal in _touched_parts(layout, sample)
        for read in _read_part(layout, number, chosen, ordinal, rows)
    ]
    first_item = [0]
    for read in reads:
        first_item.append(first_item[-1] + (1 if read.scratch_rows else read.plan.num_items))
    nbytes = sample.size * layout.row_nbytes
    filled = layout.has_gaps
    return PartsPlan(
        reads=reads,
        first_item=first_item,
        num_samples=sample.size,
        rows=rows,
        is_filled_first=filled,
        item_nbytes=nbytes if filled else nbytes // max(1, first_item[-1]),
    )


def _touched_parts(layout: DatasetLayout, sample: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
    """Yield each part that holds some of the samples: its number, which of them, and ordinals."""
    starts = layout.part_starts
    if starts is None:
        for number, part in enumerate(layout.parts):
            ordinal = part.samples.ordinal(sample)
            chosen = np.flatnonzero(ordinal >= 0)
            if chosen.size:
                yield number, chosen, ordinal[chosen]
        return
    if not sample.size:  # zeros stand for all rows of a batch
        return
    order = np.argsort(sample, kind="stable")
    owner = np.searchsorted(starts, sample[order], side="right") - 1
    edges = np.flatnonzero(np.diff(owner)) + 1
    for chosen, first in zip(np.split(order, edges), [0, *edges.tolist()], strict=True):
        number = int(owner[first])
        if number >= 0:
            ordinal = layout.parts[number].samples.ordinal(sample[chosen])
            if (ordinal < 0).any():
                chosen, ordinal = chosen[ordinal >= 0], ordinal[ordinal >= 0]
            if chosen.size:
                yield number, chosen, ordinal


def _read_part(
    layout: DatasetLayout, number: int, chosen: Int64s, ordinal: Int64s, rows: Rows
) -> Iterator[PartRead]:
    part = layout.parts[number]
    source_sample = part.source_samples.at(ordinal)
    if not needs_scratch(layout, part):
        goes_to = _chosen_rows(rows, chosen)
        yield PartRead(number, plan_read(part.source, source_sample, goes_to), 0, goes_to)
        return
    order = np.argsort(source_sample, kind="stable")
    count = scratch_rows(part.source)
    for begin in range(0, order.size, count):
        block = order[begin : begin + count]
        plan = plan_read(part.source, source_sample[block])
        yield PartRead(number, plan, block.size, _chosen_rows(rows, chosen[block]))


def needs_scratch(layout: DatasetLayout, part: Part) -> bool:
    """Tell whether rows of a part's source need a change before they are rows of the whole."""
    return (
        part.region is not None
        or part.source_region is not None
        or part.member is not None
        or part.source.raw_dtype != layout.raw_dtype
    )


def scratch_rows(source: DatasetLayout) -> int:
    """Return how many rows of a source are read to a scratch buffer at once."""
    return max(1, _SCRATCH_NBYTES // max(1, source.row_nbytes))


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
    def of_run(cls, begin: int, end: int, size: int) -> _Runs:
        """Group neighbouring samples of chunks of some size, which go to the first rows."""
        number = np.arange(begin // size, -(-end // size))
        first = np.maximum(number * size, begin)
        length = np.minimum((number + 1) * size, end) - first
        return cls(number, np.arange(number.size + 1), first - number * size, first - begin, length)

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


def scratch_nbytes(layout: DatasetLayout, part: Part) -> int:
    """Return the size of the scratch buffer through which rows of a part's source go; 0: none."""
    if not needs_scratch(layout, part):
        return 0
    return scratch_rows(part.source) * part.source.row_nbytes
