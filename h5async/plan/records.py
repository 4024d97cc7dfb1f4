"""Defines the plans of a batch: who reads which rows. Pure.

The core holds its own plans, for which `BatchItems` stands. A `SamplesPlan` says which rows of a
field h5py reads. A `GatherPlan` needs no file.

Every plan has a number of items that do not depend on each other, so any thread can execute slices
of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchItems:
    """A plan that the core holds, of one field or several.

    `batch` is a `read.queue.SlotBatch`; `item_nbytes` is the mean cost of an item.
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
    """Rows of a field that h5py reads at once: only one thread at a time can.

    `sample`, int64 (n,), are rows of the dataset, or elements of variable length. `rows`, int64
    (n,), are their rows in the memory of the field; for variable length, the first value of each.
    `item_nbytes` is the cost of all of them.
    """

    sample: Int64s
    rows: Int64s
    item_nbytes: int

    @property
    def num_items(self) -> int:
        """One, or none if nothing is to be read."""
        return int(self.sample.size > 0)


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Samples whose rows a cache holds.

    `begin`, int64 (n,), are their first bytes in the cache; `offsets`, int64 (n + 1,), the bytes of
    the batch to which they go.
    """

    begin: Int64s
    offsets: Int64s

    @property
    def num_items(self) -> int:
        """Samples to copy."""
        return self.begin.size

    @property
    def item_nbytes(self) -> int:
        """The mean cost of an item, in bytes."""
        return -(-int(self.offsets[-1]) // max(1, self.begin.size))


ReadPlan = BatchItems | IncludedPlan | SamplesPlan | GatherPlan


class Plan(Protocol):
    """The work of a plan of any kind."""

    @property
    def num_items(self) -> int:
        """Pieces of work that do not depend on each other."""

    @property
    def item_nbytes(self) -> int:
        """The cost of an item, in bytes."""
