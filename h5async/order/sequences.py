"""Defines `SequenceTable`: where the sequences begin that steps around a sample never leave.

A sequence is a run of rows: an episode, a trajectory, a recording. Pure.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h5async.order.selection import Selection
from h5async.order.steps import Pad, StepRows

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Sequences of rows, one after the other; between them may be rows that are in none.

    Attributes
    ----------
    starts, ends
        int64 (n,), not descending: the first row of each sequence, and the row behind its last one.
    lengths
        By field name: int64 (n,), how many rows of each sequence the field has, where that is not
        all of them.
    """

    starts: Int64s
    ends: Int64s
    lengths: Mapping[str, Int64s] = field(default_factory=dict)

    @classmethod
    def joined(cls, bounds: Sequence[Int64s]) -> SequenceTable:
        """Return the sequences of several runs of such: of each, their starts and the last end."""
        starts, ends = [one[:-1] for one in bounds], [one[1:] for one in bounds]
        return cls(np.concatenate(starts), np.concatenate(ends))

    @property
    def size(self) -> int:
        """How many sequences there are."""
        return self.starts.size

    def numbers(self, samples: Int64s) -> Int64s:
        """Return in which sequence each of some samples lies."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def steps(self, samples: Int64s) -> Int64s:
        """Return which row of its sequence each of some samples is."""
        return samples - self.starts[self.numbers(samples)]

    def step_rows(
        self, steps: Mapping[str, tuple[tuple[int, ...], Pad] | None]
    ) -> list[StepRows | None]:
        """Return, by field, which rows each sample consists of; the same object for equal ones.

        `steps`: by field name, offsets and what stands for rows that are not there.
        """
        made: dict[tuple[object, ...], StepRows] = {}
        found: list[StepRows | None] = []
        for name, given in steps.items():
            if given is None:
                found.append(None)
                continue
            lengths = self.lengths.get(name)
            key = *given, None if lengths is None else lengths.tobytes()
            if key not in made:
                ends = self.ends if lengths is None else self.starts + lengths
                made[key] = StepRows(*given, self.starts, ends)
            found.append(made[key])
        return found

    def samples(self, rows: Sequence[StepRows], every: int = 1) -> Selection:
        """Return the samples: rows that all fields have, and whose steps do not leave the sequence.

        Parameters
        ----------
        rows
            Of the fields that have steps; only those count whose steps are not padded.
        every
            Only every so many rows of a sequence, from its first one on.
        """
        first = 0
        behind = functools.reduce(np.minimum, [self.ends - self.starts, *self.lengths.values()])
        for one in rows:
            if one.pad == "drop":
                first = max(first, -min(one.offsets))
                behind = np.minimum(behind, one.ends - self.starts - max(one.offsets))
        first = -(-first // every) * every
        count = np.maximum(0, -(-(behind - first) // every))
        begin = (self.starts + first)[count > 0]
        count = count[count > 0]
        if not begin.size:
            return Selection.of_range(range(0))
        # One after the other, all of them are one run, perhaps.
        if (begin[1:] == begin[:-1] + every * count[:-1]).all():
            total = int(count.sum())
            return Selection(int(begin[0]), every, total)
        found = np.arange(int(count.sum()), dtype=np.int64)
        found -= np.repeat(np.cumsum(count) - count, count)
        found *= every
        found += np.repeat(begin, count)
        return Selection.of_numbers(found)

    def is_same(self, other: SequenceTable) -> bool:
        """Compare all sequences."""
        return self.digest() == other.digest()

    def digest(self) -> str:
        """Return a short text that two tables have in common only where they are the same."""
        found = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        found.update(self.ends.astype("<i8").tobytes())
        for name, lengths in sorted(self.lengths.items()):
            found.update(name.encode(errors="surrogateescape") + b"\0")
            found.update(lengths.astype("<i8").tobytes())
        return found.hexdigest()
