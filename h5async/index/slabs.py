"""Defines `Slab`: a regular selection of indices along one dimension."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

    @property
    def size(self) -> int:
        """How many indices are selected."""
        return self.count * self.block

    @property
    def end(self) -> int:
        """The index after the last one, 0 where none is selected."""
        return self.start + (self.count - 1) * self.stride + self.block if self.size else 0

    @property
    def is_run(self) -> bool:
        """Whether the indices are neighbours."""
        return self.count == 1 or self.stride == self.block

    def as_slice(self) -> slice | None:
        """Return it as a slice, or None where no slice selects the same."""
        if self.is_run:
            return slice(self.start, self.start + self.size)
        if self.block == 1:
            return slice(self.start, self.start + (self.count - 1) * self.stride + 1, self.stride)
        return None

    def ordinal(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the selected indices each index is; -1 where it is not selected."""
        block, inside = np.divmod(index - self.start, self.stride)
        is_selected = (block >= 0) & (block < self.count) & (inside < self.block)
        return np.where(is_selected, block * self.block + inside, -1)

    def at(self, ordinal: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of some ordinals."""
        block, inside = np.divmod(ordinal, self.block)
        return self.start + block * self.stride + inside
