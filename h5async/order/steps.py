"""Defines `StepRows`: the rows of a field that each sample consists of. Pure.

A sample is a row of the dataset. A field with steps delivers rows around it, at fixed offsets,
which never leave the sample's sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Pad = Literal["drop", "edge", "zero"]

NO_ROW = -1  # instead of a row number: zeros


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of each sample of a field with steps.

    Attributes
    ----------
    offsets
        Offsets of the rows, from the sample's row.
    pad
        Replacement for rows outside of the sequence. ``"edge"``: its first or last row; ``"zero"``:
        zeros; ``"drop"``: such samples do not exist.
    starts, ends
        int64 (n,), non-decreasing: first row of each sequence, and one past its last row.
    """

    offsets: tuple[int, ...]
    pad: Pad
    starts: Int64s
    ends: Int64s

    @property
    def size(self) -> int:
        """Number of rows of a sample."""
        return len(self.offsets)

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows of samples, int64 (samples * size,); `NO_ROW` for zeros."""
        first, last, wanted = self._wanted(samples)
        rows = np.clip(wanted, first, last)
        if self.pad == "zero":
            rows[rows != wanted] = NO_ROW
        return rows.reshape(-1)

    def are_there(self, samples: Int64s) -> NDArray[np.bool_]:
        """Return which rows of each sample are in its sequence: bool (samples, size)."""
        first, last, wanted = self._wanted(samples)
        return (first <= wanted) & (wanted <= last)

    def _wanted(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first and last row of each sample's sequence, and the requested rows."""
        number = np.searchsorted(self.starts, samples, side="right") - 1
        wanted = samples[:, np.newaxis] + np.array(self.offsets, np.int64)
        return self.starts[number, np.newaxis], self.ends[number, np.newaxis] - 1, wanted
