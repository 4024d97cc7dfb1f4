"""Defines `SpanRows`: the rows of each sample of a field whose number of rows varies. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.order.steps import NO_ROW, StepRows

Int64s = NDArray[np.int64]

_BLOCK = 1 << 20  # samples at a time, to bound memory


class SpanRows:
    """The rows of each sample of a ragged field: a run of any length.

    `starts` is int64 (n + 1,), non-decreasing: sample i is rows ``starts[i]`` to ``starts[i + 1]``.
    """

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts

    @property
    def starts(self) -> Int64s:
        """First row of each sample, and one past the last row."""
        return self._starts

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._starts.size - 1

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample."""
        return self._starts[samples + 1] - self._starts[samples]

    def total(self, samples: Int64s) -> int:
        """Return the number of rows in a batch of samples."""
        return int(self.lengths(samples).sum())

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs of a batch: its samples."""
        return samples

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where each sample's rows begin in their concatenation, and the total number."""
        found = np.zeros(samples.size + 1, np.int64)
        np.cumsum(self.lengths(samples), out=found[1:])
        return found

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows of samples, concatenated."""
        offsets = self.offsets(samples)
        lengths = np.diff(offsets)
        found = np.arange(int(offsets[-1]), dtype=np.int64)
        found += np.repeat(self.starts[samples] - offsets[:-1], lengths)
        return found

    def are_there(self, length: int, samples: Int64s) -> NDArray[np.bool_]:
        """Return which of `length` values each sample has: bool (samples, length)."""
        found: NDArray[np.bool_] = np.arange(length) < self.lengths(samples)[:, np.newaxis]
        return found

    def most(self, count: int, *, may_repeat: bool) -> int:
        """Return the maximum number of rows of `count` samples."""
        if not self.size or not count:
            return 0
        if may_repeat or count == 1:
            return max(int(lengths.max()) for lengths in self._all_lengths()) * count
        longest: NDArray[Any] = np.zeros(0, np.int64)
        for lengths in self._all_lengths():
            if longest.size == count:  # few are longer
                lengths = lengths[lengths > longest.min()]
            longest = np.concatenate((longest, lengths))
            if count < longest.size:
                longest = np.partition(longest, longest.size - count)[-count:]
        return int(longest.sum(dtype=np.int64))

    def likely(self, count: int) -> int:
        """Return the mean number of rows of `count` samples, plus a quarter."""
        rows = sum(int(lengths.sum(dtype=np.int64)) for lengths in self._all_lengths())
        return -(-5 * count * rows // (4 * self.size)) if self.size else 0

    def all_lengths(self) -> NDArray[Any]:
        """Return the number of rows of every sample: int64 or uint32 (n,)."""
        return np.diff(self._starts)

    def _all_lengths(self) -> Iterator[NDArray[Any]]:
        """Yield the same in blocks."""
        for begin in range(0, self.size, _BLOCK):
            yield np.diff(self._starts[begin : begin + _BLOCK + 1])


class LengthRows(SpanRows):
    """A `SpanRows` that keeps only lengths, for fields that store samples by number.

    `stored` is uint32 or int64 (n,): number of rows per sample.
    """

    def __init__(self, stored: NDArray[Any]) -> None:
        self._stored = stored

    @cached_property
    def starts(self) -> Int64s:
        """First row of each sample if samples were concatenated; needs 8 bytes a sample."""
        return starts_of(self._stored)

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._stored.size

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample."""
        return self._stored[samples].astype(np.int64)

    def all_lengths(self) -> NDArray[Any]:
        """Return the number of rows of every sample."""
        return self._stored

    def _all_lengths(self) -> Iterator[NDArray[Any]]:
        for begin in range(0, self.size, _BLOCK):
            yield self._stored[begin : begin + _BLOCK]


class StepSpans(SpanRows):
    """The runs of rows (`spans`) around each sample (`steps`) of a ragged field with steps.

    A batch has each run once, in the order of the dataset, even if several samples share it.
    """

    def __init__(self, spans: SpanRows, steps: StepRows) -> None:
        self.spans = spans
        self.steps = steps

    @property
    def starts(self) -> Int64s:
        """First row of each run, and one past the last row."""
        return self.spans.starts

    @property
    def size(self) -> int:
        """Number of runs."""
        return self.spans.size

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample, all steps together."""
        runs = self.steps.rows(samples)
        found = self.spans.lengths(np.maximum(runs, 0))
        found[runs == NO_ROW] = 0
        total: Int64s = found.reshape(samples.size, self.steps.size).sum(axis=1)
        return total

    def total(self, samples: Int64s) -> int:
        """Return the number of rows in a batch of samples."""
        return self.spans.total(self.runs(samples))

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs in a batch of samples."""
        return self.places(samples)[0]

    def places(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the runs in a batch, int64 (n,), ascending, and the place of each step among them.

        Places are int64 (samples, steps): an index of the runs; `NO_ROW` for zeros.
        """
        runs, places = np.unique(self.steps.rows(samples), return_inverse=True)
        places = places.reshape(samples.size, self.steps.size)
        if runs.size and runs[0] == NO_ROW:
            return runs[1:], places - 1
        return runs, places

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where the rows of each run in a batch of samples begin."""
        return self.spans.offsets(self.runs(samples))

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows in a batch of samples."""
        return self.spans.rows(self.runs(samples))

    def most(self, count: int, *, may_repeat: bool) -> int:
        """Return the maximum number of rows in a batch of `count` samples; runs do not repeat."""
        return self.spans.most(min(count * self.steps.size, self.size), may_repeat=False)

    def likely(self, count: int) -> int:
        """Return a likely upper bound of the rows in a batch of `count` samples."""
        return self.spans.likely(min(count * self.steps.size, self.size))


def starts_of(lengths: NDArray[Any]) -> Int64s:
    """Return where samples of these lengths begin, and the last one ends: int64 (n + 1,)."""
    found = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found
