"""Defines selections of indices along one dimension: `Slab`, a regular one, and `Blocks`, any.

`runs_between` pairs the indices of two selections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

MOST_RUNS = 1 << 22  # of 32 bytes each; what would be more is not listed


class TooManyRunsError(Exception):
    """There are more than `MOST_RUNS`; none of them was listed."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A regular selection along one dimension: `count` blocks of `block` indices, `stride` apart.

    HDF5 calls it a hyperslab. The k-th index that it selects has the ordinal k.
    """

    start: int
    stride: int
    count: int
    block: int

    @classmethod
    def run(cls, start: int, stop: int) -> Slab:
        """Return the selection of all indices from `start` to before `stop`."""
        return cls(start, max(1, stop - start), 1, stop - start)

    def normal(self) -> Slab:
        """Return the same selection, as one block if the indices are adjacent."""
        return Slab.run(self.start, self.start + self.size) if self.is_run else self

    @property
    def size(self) -> int:
        """The number of selected indices."""
        return self.count * self.block

    @property
    def end(self) -> int:
        """One past the last index; 0 if none is selected."""
        return self.start + (self.count - 1) * self.stride + self.block if self.size else 0

    @property
    def is_run(self) -> bool:
        """Whether the indices are adjacent."""
        return self.count == 1 or self.stride == self.block

    @property
    def num_blocks(self) -> int:
        """The number of runs of adjacent indices."""
        return 1 if self.is_run else self.count

    def blocks(self) -> tuple[Int64s, Int64s]:
        """Return the first index and the length of each run of adjacent indices."""
        if self.is_run:
            return np.array([self.start], np.int64), np.array([self.size], np.int64)
        first = self.start + np.arange(self.count, dtype=np.int64) * self.stride
        return first, np.full(self.count, self.block, np.int64)

    def as_slice(self) -> slice | None:
        """Return an equivalent slice, or None."""
        if self.is_run:
            return slice(self.start, self.start + self.size)
        if self.block == 1:
            return slice(self.start, self.start + (self.count - 1) * self.stride + 1, self.stride)
        return None

    def at(self, ordinal: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of some ordinals."""
        block, inside = np.divmod(ordinal, self.block)
        return self.start + block * self.stride + inside


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Any indices along one dimension: blocks of adjacent ones, concatenated in any order.

    Attributes
    ----------
    first, begin
        int64 (n,): the first index of each block; int64 (n + 1,): its ordinal, and the size.
    """

    first: Int64s
    begin: Int64s
    is_run: ClassVar[bool] = False  # that would be a `Slab`

    @classmethod
    def of(cls, first: Int64s, length: Int64s) -> Slab | Blocks:
        """Return a selection of one block or more; adjacent blocks are joined."""
        is_new = np.concatenate(([True], first[1:] != first[:-1] + length[:-1]))
        begin = np.cumsum(length) - length
        if np.count_nonzero(is_new) == 1:
            return Slab.run(int(first[0]), int(first[0] + length.sum()))
        return cls(first[is_new], np.append(begin[is_new], length.sum()))

    @property
    def size(self) -> int:
        """The number of selected indices."""
        return int(self.begin[-1])

    @property
    def start(self) -> int:
        """The smallest index."""
        return int(self.first.min())

    @property
    def end(self) -> int:
        """One past the largest index."""
        return int((self.first + np.diff(self.begin)).max())

    @property
    def num_blocks(self) -> int:
        """The number of runs of adjacent indices."""
        return self.first.size

    def blocks(self) -> tuple[Int64s, Int64s]:
        """Return the first index and the length of each run of adjacent indices."""
        return self.first, np.diff(self.begin)

    def at(self, ordinal: Int64s) -> Int64s:
        """Return the indices of some ordinals."""
        block = np.searchsorted(self.begin, ordinal, side="right") - 1
        return self.first[block] + ordinal - self.begin[block]


Selection = Slab | Blocks


class PairedRuns(NamedTuple):
    """Runs of indices, each paired with indices of another selection.

    Attributes
    ----------
    first, length
        int64 (n,): of each run.
    row, step
        int64 (n,): the partner of the first index, and the distance between partners.
    """

    first: Int64s
    length: Int64s
    row: Int64s
    step: Int64s

    @property
    def size(self) -> int:
        """The number of runs."""
        return self.first.size

    @classmethod
    def one(cls, first: int, length: int, row: int, step: int = 1) -> PairedRuns:
        """Return one run."""
        return cls(*np.array([[first], [length], [row], [step]], np.int64))

    @classmethod
    def none(cls) -> PairedRuns:
        """Return no runs."""
        return cls(*(np.zeros(0, np.int64) for _ in range(4)))

    def single_steps(self) -> PairedRuns:
        """Return the same pairs; runs whose rows are not adjacent become runs of one index.

        TooManyRunsError if there would be more than `MOST_RUNS`.
        """
        if (self.step == 1).all():
            return self
        times = np.where(self.step == 1, 1, self.length)
        if (times > MOST_RUNS).any() or times.sum() > MOST_RUNS:
            raise TooManyRunsError
        which = np.repeat(np.arange(times.size), times)
        inside = np.arange(which.size) - np.repeat(np.cumsum(times) - times, times)
        return PairedRuns(
            self.first[which] + inside,
            np.where(self.step[which] == 1, self.length[which], 1),
            self.row[which] + inside * self.step[which],
            np.ones(which.size, np.int64),
        )


def most_runs(ours: Selection, theirs: Selection) -> int:
    """Return the maximum number of runs from `runs_between`, without listing them."""
    if ours.is_run and isinstance(theirs, Slab) and theirs.block == 1:
        return 1
    return ours.num_blocks + theirs.num_blocks


def runs_between(ours: Selection, theirs: Selection) -> PairedRuns:
    """Pair the indices of two selections by their ordinals.

    TooManyRunsError if there would be more than `MOST_RUNS` runs.
    """
    if most_runs(ours, theirs) > MOST_RUNS:
        raise TooManyRunsError
    size = min(ours.size, theirs.size)
    if not size:
        return PairedRuns.none()
    if ours.is_run and theirs.is_run:
        return PairedRuns.one(ours.start, size, theirs.start)
    if ours.is_run and isinstance(theirs, Slab) and theirs.block == 1:
        return PairedRuns.one(ours.start, size, theirs.start, theirs.stride)
    begins = (np.cumsum(length) - length for _, length in (ours.blocks(), theirs.blocks()))
    edges = np.unique(np.concatenate([*begins, [size]]))
    edges = edges[edges <= size]
    begin = edges[:-1]
    return PairedRuns(
        ours.at(begin), np.diff(edges), theirs.at(begin), np.ones(begin.size, np.int64)
    )
