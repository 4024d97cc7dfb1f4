"""Defines `SpanRows`: which rows of a field each sample is, where their number differs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.order.steps import NO_ROW, StepRows

Int64s = NDArray[np.int64]

_BLOCK = 1 << 20  # samples that are looked at at a time: where there are very many, memory counts


class SpanRows:
    """The rows of each sample of a ragged field: a run of any length.

    Parameters
    ----------
    starts
        int64 (n + 1,), not descending: sample i is rows ``starts[i]`` to ``starts[i + 1]``.
    """

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts

    @property
    def starts(self) -> Int64s:
        """Where the rows of each sample begin, and where those of the last one end."""
        return self._starts

    @property
    def size(self) -> int:
        """How many samples there are."""
        return self._starts.size - 1

    def lengths(self, samples: Int64s) -> Int64s:
        """Return how many rows each of some samples has."""
        return self._starts[samples + 1] - self._starts[samples]

    def total(self, samples: Int64s) -> int:
        """Return how many rows a batch of some samples has."""
        return int(self.lengths(samples).sum())

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs that a batch of some samples has, one behind the other: the samples."""
        return samples

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
        """Return how many rows `count` samples have in the mean, and a quarter more."""
        rows = sum(int(lengths.sum(dtype=np.int64)) for lengths in self._all_lengths())
        return -(-5 * count * rows // (4 * self.size)) if self.size else 0

    def all_lengths(self) -> NDArray[Any]:
        """Return how many rows each sample has: int64 or uint32 (n,)."""
        return np.diff(self._starts)

    def _all_lengths(self) -> Iterator[NDArray[Any]]:
        """Yield how many rows each sample has, of some samples at a time."""
        for begin in range(0, self.size, _BLOCK):
            yield np.diff(self._starts[begin : begin + _BLOCK + 1])


class LengthRows(SpanRows):
    """The same where the rows of a sample are found by its number: lengths are all that is kept.

    Parameters
    ----------
    stored
        uint32 or int64 (n,): how many rows each sample has.
    """

    def __init__(self, stored: NDArray[Any]) -> None:
        self._stored = stored

    @cached_property
    def starts(self) -> Int64s:
        """Where the rows of each sample would begin; this takes 8 bytes for each."""
        return starts_of(self._stored)

    @property
    def size(self) -> int:
        """How many samples there are."""
        return self._stored.size

    def lengths(self, samples: Int64s) -> Int64s:
        """Return how many rows each of some samples has."""
        return self._stored[samples].astype(np.int64)

    def all_lengths(self) -> NDArray[Any]:
        """Return how many rows each sample has."""
        return self._stored

    def _all_lengths(self) -> Iterator[NDArray[Any]]:
        for begin in range(0, self.size, _BLOCK):
            yield self._stored[begin : begin + _BLOCK]


class StepSpans(SpanRows):
    """The runs of rows around each sample of a ragged field with steps.

    A batch has each run once, however many of its samples share it: in the order of the dataset.

    Parameters
    ----------
    spans
        The rows of each run.
    steps
        The runs of each sample.
    """

    def __init__(self, spans: SpanRows, steps: StepRows) -> None:
        self.spans = spans
        self.steps = steps

    @property
    def starts(self) -> Int64s:
        """Where the rows of each run begin, and where those of the last one end."""
        return self.spans.starts

    @property
    def size(self) -> int:
        """How many runs there are."""
        return self.spans.size

    def lengths(self, samples: Int64s) -> Int64s:
        """Return how many rows each of some samples has, all of its steps together."""
        runs = self.steps.rows(samples)
        found = self.spans.lengths(np.maximum(runs, 0))
        found[runs == NO_ROW] = 0
        total: Int64s = found.reshape(samples.size, self.steps.size).sum(axis=1)
        return total

    def total(self, samples: Int64s) -> int:
        """Return how many rows a batch of some samples has."""
        return self.spans.total(self.runs(samples))

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs that a batch of some samples has, one behind the other."""
        return self.places(samples)[0]

    def places(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the runs that a batch of some samples has, and which of them each step is.

        Returns
        -------
        runs
            int64 (n,), ascending.
        places
            int64 (samples, steps): a place among them; `NO_ROW` for zeros.
        """
        runs, places = np.unique(self.steps.rows(samples), return_inverse=True)
        places = places.reshape(samples.size, self.steps.size)
        if runs.size and runs[0] == NO_ROW:
            return runs[1:], places - 1
        return runs, places

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where the rows of each run begin that a batch of some samples has."""
        return self.spans.offsets(self.runs(samples))

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows that a batch of some samples has."""
        return self.spans.rows(self.runs(samples))

    def most(self, count: int, *, may_repeat: bool) -> int:
        """Return how many rows a batch of `count` samples has at most: no run comes twice."""
        return self.spans.most(min(count * self.steps.size, self.size), may_repeat=False)

    def likely(self, count: int) -> int:
        """Return how many rows a batch of `count` samples has in the mean, at most, and more."""
        return self.spans.likely(min(count * self.steps.size, self.size))


def starts_of(lengths: NDArray[Any]) -> Int64s:
    """Return where samples of some lengths begin, and where the last one ends: int64 (n + 1,)."""
    found = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found
