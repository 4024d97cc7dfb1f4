"""Defines the read plans: a few arrays each, which say what is read and where it goes. Pure.

Two kinds of plan cover what lies in one file. Where every row lies in one piece and not encoded, a
`RowPlan` is one file offset a sample. Else a `ChunkPlan` lists each chunk that the batch touches
once, and, shared by all chunks that hold pieces of the same samples, the runs of neighbouring
samples that go from a chunk to the batch. A `SamplesPlan` leaves the rest to h5py, or to memory. A
`PartsPlan` is made of plans for the sources of a dataset. A `GatherPlan`, or a `GatherRunsPlan`,
needs no file at all.

Every plan is a number of items, which do not depend on each other: so it can be executed in slices,
by any thread.

The words: a *row* is one sample of one field as it lies in the file. A *piece* is what one chunk
holds of a row where a row is spread over several: bytes that lie together, or are copied at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout

Int64s = NDArray[np.int64]

_HEAP_SAMPLES = 64  # an item, of elements of variable length
_FOUND_NBYTES = 8192  # to find one takes as long as to copy so many bytes
Rows = int | Int64s  # rows of a batch: the first of neighbours, or all of them, int64


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
class BatchItems:
    """The core's plan of a batch, of several fields at once; the core holds it, by slot.

    Attributes
    ----------
    slot
        Whose memory the rows go to.
    num_items, item_nbytes
        Items of the plan, and what one costs, on average.
    """

    slot: int
    num_items: int
    item_nbytes: int


@dataclass(frozen=True, slots=True)
class IncludedPlan:
    """A field that is read with others: there is a `BatchItems` for all of them."""

    num_items: int = 0
    item_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Which chunks a batch needs, and which runs of samples go where.

    Attributes
    ----------
    entry
        int64 (n,): the chunk's index in the layout's `ChunkTable`; -1: never allocated.
    cross
        int32 (n,): the chunk's index in the layout's `cross_section`.
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

    def is_whole(self, layout: DatasetLayout, start: int, stop: int) -> NDArray[np.bool_]:
        """Tell which of items `start` to `stop` go to the batch as a whole.

        The decoded bytes of such a chunk are neighbouring rows of the batch, as they are: it holds
        whole rows, of which the batch wants all, one after the other.

        Parameters
        ----------
        layout
            Of the dataset that the plan is for.
        """
        if not (layout.chunk_shape and layout.rows_are_whole):
            return np.zeros(stop - start, np.bool_)
        group = self.group[start:stop]
        run = self.run_start[group]
        is_whole: NDArray[np.bool_] = self.run_start[group + 1] - run == 1
        is_whole &= self.run_length[run] == layout.chunk_shape[0]
        return is_whole


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


@dataclass(frozen=True, slots=True)
class GatherRunsPlan:
    """Samples of differing lengths whose rows a cache holds.

    Attributes
    ----------
    begin
        int64 (n,): the first byte of each sample in the cache.
    offsets
        int64 (n + 1,): the byte of the batch to which each goes.
    """

    begin: Int64s
    offsets: Int64s

    @property
    def num_items(self) -> int:
        """Samples to copy."""
        return self.begin.size

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item, on average: what it costs."""
        return int(self.offsets[-1]) // max(1, self.begin.size) + 1


class PartRead(NamedTuple):
    """What one source of a dataset gives to a batch.

    Attributes
    ----------
    part
        Which of the layout's `parts`.
    plan
        How the rows of the source are read: straight to the batch, or first to a scratch buffer.
    scratch_rows
        0: straight to the batch. Else so many rows are read to the first rows of a scratch buffer,
        and only the piece that is wanted of each goes on.
    rows
        Where these rows go in the batch.
    """

    part: int
    plan: ReadPlan
    scratch_rows: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class HeapPlan:
    """Elements of variable length that are read.

    Attributes
    ----------
    samples
        int64 (n,): sample numbers.
    offsets
        int64 (n + 1,): where the values of each go.
    value_nbytes
        Bytes of a value.
    """

    samples: Int64s
    offsets: Int64s
    value_nbytes: int

    @property
    def num_items(self) -> int:
        """Blocks of samples."""
        return -(-self.samples.size // _HEAP_SAMPLES)

    def begin(self, item: int) -> int:
        """Return the first sample of an item, or where the last one ends."""
        return min(item * _HEAP_SAMPLES, self.samples.size)

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item, and what it costs to find them: on average."""
        nbytes = int(self.offsets[-1]) * self.value_nbytes + self.samples.size * _FOUND_NBYTES
        return nbytes // max(1, self.num_items)


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """What the sources of a dataset give to a batch.

    Attributes
    ----------
    reads
        One for each part that the batch touches, or more.
    first_item
        The number of each read's first item, and at the end the number of all; a read through a
        scratch buffer is one item.
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


ReadPlan = (
    BatchItems
    | IncludedPlan
    | RowPlan
    | ChunkPlan
    | SamplesPlan
    | PartsPlan
    | GatherPlan
    | GatherRunsPlan
    | HeapPlan
)


class Plan(Protocol):
    """What a plan of any kind tells of its work: how many items, and what each costs."""

    @property
    def num_items(self) -> int:
        """Pieces of work that do not depend on each other."""

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item: what it costs."""
