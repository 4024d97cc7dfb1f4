"""Defines which rows each sample consists of. Pure.

A sample is a row of the dataset, or a run of rows of any length (`SpanRows`). A field with steps
(`StepRows`) delivers rows around it, at fixed offsets, which never leave the sample's sequence: an
episode, a trajectory, a recording (`SequenceTable`). Consecutive samples of any length, documents,
are packed into windows of one length (`Packing`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.order.selection import Int64s, Selection

Pad = Literal["drop", "edge", "zero"]

NO_ROW = -1  # instead of the number of a row, or of its document
_BLOCK = 1 << 20  # samples at a time, to bound memory


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of each sample of a field with steps, at `offsets` from the sample's row.

    `pad` says what replaces rows outside the sequence: ``"edge"``, its first or last row;
    ``"zero"``, zeros; with ``"drop"``, there are no samples that need them. `starts` and `ends`,
    int64 (n,), non-decreasing, are the first row of each sequence, and one past its last row.
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
        """Return the rows of samples, int64 (samples * size,); `NO_ROW` stands for zeros."""
        first, last, wanted = self._wanted(samples)
        rows = np.clip(wanted, first, last)
        if self.pad == "zero":
            rows[rows != wanted] = NO_ROW
        return rows.reshape(-1)

    def are_there(self, samples: Int64s) -> NDArray[np.bool_]:
        """Return a mask of each sample's rows that are in its sequence: bool (samples, size)."""
        first, last, wanted = self._wanted(samples)
        return (first <= wanted) & (wanted <= last)

    def _wanted(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        number = np.searchsorted(self.starts, samples, side="right") - 1
        wanted = samples[:, np.newaxis] + np.array(self.offsets, np.int64)
        return self.starts[number, np.newaxis], self.ends[number, np.newaxis] - 1, wanted


class SpanRows:
    """The rows of each sample of a ragged field: a run of any length.

    `starts` is int64 (n + 1,), non-decreasing: sample i is rows ``starts[i]`` to ``starts[i + 1]``.
    """

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts

    @property
    def starts(self) -> Int64s:
        """First row of each run, and one past the last row."""
        return self._starts

    @property
    def size(self) -> int:
        """Number of runs."""
        return self._starts.size - 1

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs of a batch: its samples."""
        return samples

    def having(self, runs: Int64s, samples: Int64s) -> Int64s:
        """Return the positions in a batch of the samples that have any of its runs, by number."""
        return runs

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample."""
        return self._starts[samples + 1] - self._starts[samples]

    def all_lengths(self, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """Return the number of rows of runs `begin` to `end`: int64 or uint32 (n,)."""
        return np.diff(self._starts[begin : None if end is None else end + 1])

    def total(self, samples: Int64s) -> int:
        """Return the number of rows in a batch of samples."""
        return int(self.offsets(samples)[-1])

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where each run's rows begin in their concatenation, and the total number."""
        return starts_of(self.lengths(samples))

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows in a batch of samples, concatenated."""
        return numbers_in(self.starts[samples], self.lengths(samples))

    def are_there(self, length: int, samples: Int64s) -> NDArray[np.bool_]:
        """Return a mask: the first `length` values each sample has, bool (samples, length)."""
        found: NDArray[np.bool_] = np.arange(length) < self.lengths(samples)[:, np.newaxis]
        return found

    def most(self, count: int, *, times: int = 1) -> int:
        """Return an upper bound of the rows of `count` samples, each at most `times` times."""
        if not self.size or not count:
            return 0
        if times >= count:
            return max(int(lengths.max()) for lengths in self._blocks()) * count
        if times > 1:
            return self.most(-(-count // times)) * times
        longest: NDArray[Any] = np.zeros(0, np.int64)
        for lengths in self._blocks():
            if longest.size == count:  # usually few are longer
                lengths = lengths[lengths > longest.min()]
            longest = np.concatenate((longest, lengths))
            if count < longest.size:
                longest = np.partition(longest, longest.size - count)[-count:]
        return int(longest.sum(dtype=np.int64))

    def likely(self, count: int) -> int:
        """Return the mean number of rows of `count` samples, plus a quarter."""
        rows = sum(int(lengths.sum(dtype=np.int64)) for lengths in self._blocks())
        return -(-5 * count * rows // (4 * self.size)) if self.size else 0

    def _blocks(self) -> Iterator[NDArray[Any]]:
        for begin in range(0, self.size, _BLOCK):
            yield self.all_lengths(begin, min(begin + _BLOCK, self.size))


class LengthRows(SpanRows):
    """A `SpanRows` that keeps only lengths, for fields that store samples by number.

    `stored` is uint32 or int64 (n,): the number of rows of each sample.
    """

    def __init__(self, stored: NDArray[Any]) -> None:
        self._stored = stored

    @cached_property
    def starts(self) -> Int64s:
        """First row of each sample, as if concatenated, and the end; takes 8 bytes per sample."""
        return starts_of(self._stored)

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._stored.size

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample."""
        return self._stored[samples].astype(np.int64)

    def all_lengths(self, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """Return the number of rows of samples `begin` to `end`."""
        return self._stored[begin:end]


class StepSpans(SpanRows):
    """The runs of rows (`spans`) around each sample (`steps`) of a ragged field with steps.

    A batch has each run once, in the order of the dataset, even if several samples share it.
    """

    def __init__(self, spans: SpanRows, steps: StepRows) -> None:
        self.spans, self.steps = spans, steps

    @property
    def starts(self) -> Int64s:
        """First row of each run, and one past the last row."""
        return self.spans.starts

    @property
    def size(self) -> int:
        """Number of runs."""
        return self.spans.size

    def runs(self, samples: Int64s) -> Int64s:
        """Return the runs in a batch of samples."""
        return self.places(samples)[0]

    def places(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the runs in a batch, int64 (n,), ascending, and the place of each step among them.

        Places are indices of the runs, int64 (samples, steps); `NO_ROW` stands for zeros.
        """
        runs, places = np.unique(self.steps.rows(samples), return_inverse=True)
        places = places.reshape(samples.size, self.steps.size)
        if runs.size and runs[0] == NO_ROW:
            return runs[1:], places - 1
        return runs, places

    def having(self, runs: Int64s, samples: Int64s) -> Int64s:
        """Return the positions in a batch of the samples that have any of its runs."""
        return np.flatnonzero(np.isin(self.places(samples)[1], runs).any(axis=1))

    def lengths(self, samples: Int64s) -> Int64s:
        """Return the number of rows of each sample, all steps together."""
        runs = self.steps.rows(samples)
        found = self.spans.lengths(np.maximum(runs, 0))
        found[runs == NO_ROW] = 0
        total: Int64s = found.reshape(samples.size, self.steps.size).sum(axis=1)
        return total

    def offsets(self, samples: Int64s) -> Int64s:
        """Return where each run's rows begin in their concatenation, and the total number."""
        return self.spans.offsets(self.runs(samples))

    def rows(self, samples: Int64s) -> Int64s:
        """Return the rows in a batch of samples."""
        return self.spans.rows(self.runs(samples))

    def most(self, count: int, *, times: int = 1) -> int:
        """Return the maximum number of rows for `count` samples; no run is in a batch twice."""
        return self.spans.most(min(count * self.steps.size, self.size))

    def likely(self, count: int) -> int:
        """Return a likely upper bound of the rows in a batch of `count` samples."""
        return self.spans.likely(min(count * self.steps.size, self.size))


def starts_of(lengths: NDArray[Any]) -> Int64s:
    """Return where samples of these lengths begin, and where the last one ends: int64 (n + 1,)."""
    found = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=found[1:])
    return found


def numbers_in(begins: Int64s | int, sizes: Int64s) -> Int64s:
    """Return the numbers in runs with these beginnings and sizes, concatenated in a new array."""
    offsets = starts_of(sizes)
    found = np.arange(offsets[-1])
    found += np.repeat(begins - offsets[:-1], sizes)
    return found


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Sequences of rows in ascending order; some rows may be in none.

    `starts` and `ends` are as in `StepRows`. If a field lacks the last rows of some sequences,
    `lengths` has, under its name, the number of rows that it has of each: int64 (n,).
    """

    starts: Int64s
    ends: Int64s
    lengths: Mapping[str, Int64s] = field(default_factory=dict)

    @classmethod
    def joined(cls, bounds: Sequence[Int64s]) -> SequenceTable:
        """Join tables, each given as one array: the starts of its sequences, and the last end."""
        starts, ends = [one[:-1] for one in bounds], [one[1:] for one in bounds]
        return cls(np.concatenate(starts), np.concatenate(ends))

    def numbers(self, samples: Int64s) -> Int64s:
        """Return the sequence number of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def steps(self, samples: Int64s) -> Int64s:
        """Return each sample's row within its sequence."""
        return samples - self.starts[self.numbers(samples)]

    def step_rows(
        self, steps: Mapping[str, tuple[tuple[int, ...], Pad] | None]
    ) -> dict[str, StepRows | None]:
        """Return the `StepRows` of each field; equal ones share an object.

        `steps` maps a field name to its offsets and padding.
        """
        made: dict[tuple[object, ...], StepRows] = {}
        found: dict[str, StepRows | None] = dict.fromkeys(steps)
        for name, given in steps.items():
            if given is not None:
                ends = self.starts + self.lengths[name] if name in self.lengths else self.ends
                rows = StepRows(*given, self.starts, ends)
                found[name] = made.setdefault((*given, ends.tobytes()), rows)
        return found

    def possible(self, rows: Sequence[StepRows]) -> tuple[int, Int64s]:
        """Return the first row in a sequence that may be a sample, and one past the last of each.

        Rows count from the start of the sequence. All fields must have them, and their steps must
        stay in the sequence, for those of `rows` with ``pad="drop"``.
        """
        first = 0
        behind = functools.reduce(np.minimum, [self.ends - self.starts, *self.lengths.values()])
        for one in rows:
            if one.pad == "drop":
                first = max(first, -min(one.offsets))
                behind = np.minimum(behind, one.ends - self.starts - max(one.offsets))
        return first, behind

    def samples(self, rows: Sequence[StepRows], every: int = 1, offset: int = 0) -> Selection:
        """Return the samples: possible rows among `offset`, `offset + every`, ... of sequences."""
        first, behind = self.possible(rows)
        first += (offset - first) % every
        count = np.maximum(0, -(-(behind - first) // every))
        begin = (self.starts + first)[count > 0]
        count = count[count > 0]
        if not begin.size:
            return Selection.of_range(range(0))
        # Adjacent runs with the same step are a single run.
        if (begin[1:] == begin[:-1] + every * count[:-1]).all():
            return Selection(int(begin[0]), every, int(count.sum()))
        found = numbers_in(0, count)
        found *= every
        found += np.repeat(begin, count)
        return Selection.of_numbers(found)

    def digest(self) -> str:
        """Return a short hash that only equal tables share."""
        found = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        found.update(self.ends.astype("<i8").tobytes())
        for name, lengths in sorted(self.lengths.items()):
            found.update(name.encode(errors="surrogateescape") + b"\0")
            found.update(lengths.astype("<i8").tobytes())
        return found.hexdigest()


class Packing:
    """Windows of `length` rows, which together have each row of each document once. Thread-safe.

    `documents` is int64 (n + 1,), non-decreasing: document i is rows ``documents[i]`` to
    ``documents[i + 1]``. `counts` has the number of documents in each file; the last window of a
    file is short, unless its rows happen to fit. `windows`, int64 (m + 1,), is like `documents`.
    """

    def __init__(self, documents: Int64s, length: int, counts: Iterable[int]) -> None:
        self._documents, self.length = documents, length
        edges = documents[starts_of(np.array([*counts], np.int64))]
        self.counts = -(-np.diff(edges) // length)
        self.windows = np.append(
            numbers_in(0, self.counts) * length + np.repeat(edges[:-1], self.counts), edges[-1]
        )
        longest = int(np.diff(documents).max(initial=0))
        self._dtype: type[np.signedinteger[Any]] = np.int64 if longest >> 31 else np.int32

    def documents(self, samples: Int64s) -> NDArray[Any]:
        """Return the document of each row of some windows: int64 (samples, length)."""
        number, _, lengths = self._runs(samples)
        return self._windowed(samples, np.repeat(number, lengths))

    def positions(self, samples: Int64s) -> NDArray[Any]:
        """Return the place of each row in its document: int32 (samples, length), if that fits."""
        _, begins, lengths = self._runs(samples)
        return self._windowed(samples, numbers_in(begins, lengths).astype(self._dtype))

    def _runs(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return runs of one document in a window: its number, first row in it, number of rows."""
        begin, end = self.windows[samples], self.windows[samples + 1]
        first = np.searchsorted(self._documents, begin, side="right") - 1
        counts = np.searchsorted(self._documents, end, side="left") - first
        number = numbers_in(first, counts)
        start = self._documents[number]
        place = np.maximum(np.repeat(begin, counts) - start, 0)
        stop = np.minimum(self._documents[number + 1], np.repeat(end, counts))
        return number, place, stop - start - place

    def _windowed(self, samples: Int64s, rows: NDArray[Any]) -> NDArray[Any]:
        shape = samples.size, self.length
        if rows.size == samples.size * self.length:
            return rows.reshape(shape)
        sizes = self.windows[samples + 1] - self.windows[samples]
        found = np.full(shape, NO_ROW, rows.dtype)
        found[np.arange(self.length) < sizes[:, np.newaxis]] = rows
        return found
