"""Defines `SpanRows`: which rows of a field each sample is, where their number differs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpanRows:
    """The rows of each sample of a ragged field: a run of any length.

    Attributes
    ----------
    starts
        int64 (n + 1,), not descending: sample i is rows ``starts[i]`` to ``starts[i + 1]``.
    """

    starts: Int64s

    def lengths(self, samples: Int64s) -> Int64s:
        """Return how many rows each of some samples has."""
        return self.starts[samples + 1] - self.starts[samples]

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where the rows of each of some samples begin, one sample behind the other.

        Returns
        -------
        numpy.ndarray
            int64 (samples + 1,): the last one is how many rows there are in all.
        """
        found = np.zeros(samples.size + 1, np.int64)
        np.cumsum(self.lengths(samples), out=found[1:])
        return found

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows of some samples, one sample behind the other."""
        offsets = self.offsets(samples)
        lengths = np.diff(offsets)
        found = np.arange(int(offsets[-1]), dtype=np.int64)
        found += np.repeat(self.starts[samples] - offsets[:-1], lengths)
        return found

    def are_there(self, length: int, samples: Int64s) -> NDArray[np.bool_]:
        """Return which of `length` values some samples have: bool (samples, length)."""
        found: NDArray[np.bool_] = np.arange(length) < self.lengths(samples)[:, np.newaxis]
        return found

    def most(self, count: int, *, may_repeat: bool) -> int:
        """Return how many rows `count` samples have at most."""
        lengths = np.diff(self.starts)
        if not lengths.size or not count:
            return 0
        if may_repeat or count == 1:
            return int(lengths.max()) * count
        if count < lengths.size:
            lengths = np.partition(lengths, lengths.size - count)[-count:]
        return int(lengths.sum())

    def likely(self, count: int) -> int:
        """Return how many rows `count` samples have in the mean, and a quarter more."""
        rows, samples = int(self.starts[-1] - self.starts[0]), self.starts.size - 1
        return -(-5 * count * rows // (4 * samples)) if samples else 0
