"""Sample numbers and a dataset's layout enter; a read plan leaves: a few arrays. Pure.

Two forms of plan cover what lies in one file. Where every sample lies in one piece and undecoded,
a `RowPlan` is one file offset a sample. Else a `ChunkPlan` lists each chunk that the batch touches
once, and, shared by all chunks that hold pieces of the same samples, the runs of neighbouring
samples that go from a chunk to the batch. A `SamplesPlan` leaves the how to h5py, or to memory. A
`PartsPlan` is made of plans for the sources of a dataset. A `GatherPlan` needs no file at all. All
can be executed in slices, by anyone: `execute.py` does it in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout, Part

Int64s = NDArray[np.int64]
Rows = int | Int64s  # rows of a batch: the first of neighbours, or all of them, int64

_STAGE_NBYTES = 1 << 20  # rows that are read at once where only pieces of them are wanted


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where each row lies in the file.

    Attributes
    ----------
    sample
        int64 (n,): sample numbers.
    offset
        int64 (n,): address of the sample's bytes; -1: never written.
    rows
        Where they go in the batch.
    row_nbytes
        Bytes of each.
    """

    sample: Int64s
    offset: Int64s
    rows: Rows
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
class SamplesPlan:
    """Samples that are read in one go: by h5py, or out of memory.

    Attributes
    ----------
    sample
        int64 (n,): sample numbers.
    rows
        Where they go in the batch.
    row_nbytes
        Bytes of each.
    """

    sample: Int64s
    rows: Rows
    row_nbytes: int

    @property
    def num_items(self) -> int:
        """One: h5py is entered by one thread at a time."""
        return 1

    @property
    def item_nbytes(self) -> int:
        """Decoded bytes of the item: what it costs."""
        return self.sample.size * self.row_nbytes


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Samples whose rows a cache holds.

    Attributes
    ----------
    sample
        int64 (n,): sample numbers; they go to the first n rows of the batch.
    row_nbytes
        Bytes of each.
    """

    sample: Int64s
    row_nbytes: int

    @property
    def num_items(self) -> int:
        """Rows to copy."""
        return self.sample.size

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item: what it costs."""
        return self.row_nbytes


class PartRead(NamedTuple):
    """What one source of a dataset gives to a batch.

    Attributes
    ----------
    part
        Which of the layout's `parts`.
    plan
        How the rows of the source are read: straight to the batch, or first to a stage.
    stage_rows
        0: straight to the batch. Else rows are read to the first rows of a stage, as many, and
        only the piece that is wanted of each goes on.
    rows
        Where staged rows go in the batch.
    """

    part: int
    plan: ReadPlan
    stage_rows: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """What the sources of a dataset give to a batch.

    Attributes
    ----------
    reads
        One for each part that the batch touches, or more.
    first_item
        The number of each read's first item, and at the end the number of all; a staged read is
        one item.
    num_samples, rows
        Samples of the batch, and where they go.
    is_filled_first
        Whether there are gaps, so that the fill value has to be written before anything else,
        and all is one item.
    item_nbytes
        Decoded bytes of an item: what it costs.
    """

    reads: list[PartRead]
    first_item: list[int]
    num_samples: int
    rows: Rows
    is_filled_first: bool
    item_nbytes: int

    @property
    def num_items(self) -> int:
        """Pieces of work that do not depend on each other."""
        return 1 if self.is_filled_first else self.first_item[-1]


ReadPlan = RowPlan | ChunkPlan | SamplesPlan | PartsPlan | GatherPlan


class PlanSlice(NamedTuple):
    """Items `start` to `stop` of the plan of field number `field`."""

    field: int
    start: int
    stop: int


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


def rows_at(rows: Rows, chosen: Int64s) -> Int64s:
    """Return those of some rows whose places are `chosen`."""
    return chosen + rows if isinstance(rows, int) else rows[chosen]


def _chosen_rows(rows: Rows, chosen: Int64s) -> Rows:
    """Return those of some rows whose places are `chosen`, as the first one if neighbours."""
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
    place = chunks.find(number)
    if not chunks.offset.size:
        return RowPlan(sample, place, rows, layout.row_nbytes)
    offset = chunks.offset[place] + local * layout.row_nbytes
    return RowPlan(sample, np.where(place < 0, -1, offset), rows, layout.row_nbytes)


def _plan_contiguous_columns(layout: DatasetLayout, sample: Int64s, rows: Rows) -> ChunkPlan:
    """Take the whole dataset as one chunk, whose samples lie in pieces; share out the rows."""
    order = np.argsort(sample, kind="stable")
    runs = _Runs.of(np.zeros(sample.size, np.int64), sample[order], rows_at(rows, order))
    slices = len(layout.cross_section)
    return ChunkPlan(
        place=np.full(slices, -1 if layout.offset < 0 else 0, np.int64),
        cross=np.arange(slices, dtype=np.int32),
        group=np.zeros(slices, np.int32),
        chunk_nbytes=sample.size * layout.row_nbytes // max(1, slices),
        **runs._asdict(),
    )


def _plan_chunks(layout: DatasetLayout, sample: Int64s, rows: Rows) -> ChunkPlan:
    chunks = layout.chunks
    assert chunks is not None
    axis = layout.sample_axis
    order = np.argsort(sample, kind="stable")
    goes_to = rows_at(rows, order)
    if layout.chunk_shape[axis] == 1:
        runs = _Runs.of_one_each(sample[order], goes_to)
    else:
        runs = _Runs.of(*np.divmod(sample[order], layout.chunk_shape[axis]), goes_to)
    stride, first = layout.cross_numbers
    numbers = (runs.group_number[:, None] * stride + first).ravel()
    group = np.arange(runs.group_number.size, dtype=np.int32)
    if first.size == 1:
        cross = np.zeros(group.size, np.int32)
    else:
        cross = np.tile(np.arange(first.size, dtype=np.int32), group.size)
        group = np.repeat(group, first.size)
    return ChunkPlan(
        place=chunks.find(numbers),
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
        first_item.append(first_item[-1] + (1 if read.stage_rows else read.plan.num_items))
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
    if not is_staged(layout, part):
        goes_to = _chosen_rows(rows, chosen)
        yield PartRead(number, plan_read(part.source, source_sample, goes_to), 0, goes_to)
        return
    order = np.argsort(source_sample, kind="stable")
    count = stage_rows(part.source)
    for begin in range(0, order.size, count):
        block = order[begin : begin + count]
        plan = plan_read(part.source, source_sample[block])
        yield PartRead(number, plan, block.size, _chosen_rows(rows, chosen[block]))


def is_staged(layout: DatasetLayout, part: Part) -> bool:
    """Tell whether rows of a part's source need a change before they are rows of the whole."""
    return (
        part.region is not None
        or part.source_region is not None
        or part.member is not None
        or part.source.raw_dtype != layout.raw_dtype
    )


def stage_rows(source: DatasetLayout) -> int:
    """Return how many rows of a source are staged at once."""
    return max(1, _STAGE_NBYTES // max(1, source.row_nbytes))


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


class Plan(Protocol):
    """What a plan of any kind tells of its work: how many items, and what each costs."""

    @property
    def num_items(self) -> int:
        """Pieces of work that do not depend on each other."""

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item: what it costs."""


def cut(plans: Sequence[Plan], parts: int, min_part_nbytes: int) -> Iterator[list[PlanSlice]]:
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
