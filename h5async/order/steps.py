"""Defines `StepRows`: which rows of a field each sample consists of, and which of them are there.

A sample is a row of the dataset. A field that has steps delivers rows around it, at fixed offsets,
which never leave the sequence that the sample lies in. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Pad = Literal["drop", "edge", "zero"]

NO_ROW = -1  # in place of a row's number: zeros


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of each sample of a field with steps.

    Attributes
    ----------
    offsets
        Of the rows, from that of the sample.
    pad
        What stands for rows that are not in the sequence. ``"edge"``: its first or its last row;
        ``"zero"``: zeros; ``"drop"``: there are no such samples.
    starts, ends
        int64 (n,): the first row of each sequence, not descending, and the row behind the last one.
    """

    offsets: tuple[int, ...]
    pad: Pad
    starts: Int64s
    ends: Int64s

    @property
    def size(self) -> int:
        """Rows of a sample."""
        return len(self.offsets)

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows of some samples.

        Returns
        -------
        numpy.ndarray
            int64 (samples * size,), sample by sample; `NO_ROW` for zeros.
        """
        first, last, wanted = self._wanted(samples)
        rows = np.clip(wanted, first, last)
        if self.pad == "zero":
            rows[rows != wanted] = NO_ROW
        return rows.reshape(-1)

    def are_there(self, samples: Int64s) -> NDArray[np.bool_]:
        """Return which rows of some samples are in their sequences: bool (samples, size)."""
        first, last, wanted = self._wanted(samples)
        return (first <= wanted) & (wanted <= last)

    def _wanted(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first and the last row of each sample's sequence, and the rows asked for."""
        number = np.searchsorted(self.starts, samples, side="right") - 1
        wanted = samples[:, np.newaxis] + np.array(self.offsets, np.int64)
        return self.starts[number, np.newaxis], self.ends[number, np.newaxis] - 1, wanted
