"""Defines what is planned for a batch: who reads which rows. Pure.

The core plans what it reads itself, and holds that: `BatchItems` stands for it. A `SamplesPlan` is
what h5py reads of a field. A `GatherPlan`, or a `GatherRunsPlan`, needs no file at all.

Every plan is a number of items, which do not depend on each other: so it can be executed in slices,
by any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchItems:
    """A plan of the core's, of one field or several; the core holds it.

    Attributes
    ----------
    batch
        The core's plan: a `read.queue.SlotBatch`.
    num_items, item_nbytes
        Items of the plan, and the mean cost of one.
    """

    batch: Any
    num_items: int
    item_nbytes: int


@dataclass(frozen=True, slots=True)
class IncludedPlan:
    """A field that is read with others: there is a `BatchItems` for all of them."""

    num_items: int = 0
    item_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SamplesPlan:
    """Rows of a field that h5py reads, in one go: it is entered by one thread at a time.

    Attributes
    ----------
    sample
        int64 (n,): which rows of the dataset, or which elements of variable length.
    rows
        int64 (n,): where they go in the memory of the field; of variable length, the first value
        of each.
    item_nbytes
        Bytes of all of them: the cost of the one item.
    """

    sample: Int64s
    rows: Int64s
    item_nbytes: int

    @property
    def num_items(self) -> int:
        """One, or none where nothing is to be read."""
        return int(self.sample.size > 0)


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


ReadPlan = BatchItems | IncludedPlan | SamplesPlan | GatherPlan | GatherRunsPlan


class Plan(Protocol):
    """What a plan of any kind tells of its work: how many items, and what each costs."""

    @property
    def num_items(self) -> int:
        """Pieces of work that do not depend on each other."""

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item: what it costs."""
