"""Defines `SequenceTable`: bounds of sequences, which the steps around a sample never leave.

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
    """Sequences of rows in ascending order; some rows may be in none.

    Attributes
    ----------
    starts, ends
        int64 (n,), non-decreasing: first row of each sequence, and one past its last row.
    lengths
        Per field name, int64 (n,): rows of each sequence that the field has, if not all.
    """

    starts: Int64s
    ends: Int64s
    lengths: Mapping[str, Int64s] = field(default_factory=dict)

    @classmethod
    def joined(cls, bounds: Sequence[Int64s]) -> SequenceTable:
        """Join tables given as starts and the last end, concatenated in one array per table."""
        starts, ends = [one[:-1] for one in bounds], [one[1:] for one in bounds]
        return cls(np.concatenate(starts), np.concatenate(ends))

    @property
    def size(self) -> int:
        """Number of sequences."""
        return self.starts.size

    def numbers(self, samples: Int64s) -> Int64s:
        """Return the sequence number of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def steps(self, samples: Int64s) -> Int64s:
        """Return each sample's row within its sequence."""
        return samples - self.starts[self.numbers(samples)]

    def step_rows(
        self, steps: Mapping[str, tuple[tuple[int, ...], Pad] | None]
    ) -> list[StepRows | None]:
        """Return the rows that samples consist of, per field; equal ones share an object.

        `steps` maps a field name to its offsets and padding.
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
        """Return the samples: rows that all fields have, and whose steps stay in the sequence.

        Of `rows`, only those with ``pad="drop"`` count. Takes every `every`-th row of a sequence,
        from its first one on.
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
        # Adjacent runs with the same step are a single run.
        if (begin[1:] == begin[:-1] + every * count[:-1]).all():
            total = int(count.sum())
            return Selection(int(begin[0]), every, total)
        found = np.arange(int(count.sum()), dtype=np.int64)
        found -= np.repeat(np.cumsum(count) - count, count)
        found *= every
        found += np.repeat(begin, count)
        return Selection.of_numbers(found)

    def is_same(self, other: SequenceTable) -> bool:
        """Tell whether two tables are equal."""
        return self.digest() == other.digest()

    def digest(self) -> str:
        """Return a short text that only equal tables share."""
        found = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        found.update(self.ends.astype("<i8").tobytes())
        for name, lengths in sorted(self.lengths.items()):
            found.update(name.encode(errors="surrogateescape") + b"\0")
            found.update(lengths.astype("<i8").tobytes())
        return found.hexdigest()
