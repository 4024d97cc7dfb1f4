"""Defines `Selection`: the samples of a dataset that make up an epoch.

Selected samples are counted from 0 by *positions*; a selection maps these to the sample numbers of
the dataset.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Selection:
    """Some samples of a dataset, in an order. Positions and sample numbers are int64.

    Position p below `size` is sample ``start + step * p`` or, if they are not equidistant,
    ``numbers[p]``: C-contiguous.
    """

    start: int
    step: int
    size: int
    numbers: Int64s | None = None

    @classmethod
    def of_range(cls, samples: range) -> Selection:
        """Return a selection of a range."""
        return cls(samples.start, samples.step, len(samples))

    @classmethod
    def of_numbers(cls, numbers: Int64s) -> Selection:
        """Return a selection of these samples, in their order; the array must not change later."""
        if numbers.size < 2:
            return cls(int(numbers[0]) if numbers.size else 0, 1, numbers.size)
        step = int(numbers[1] - numbers[0])
        # The last number nearly always shows if these are not equidistant.
        is_end = numbers[-1] - numbers[0] == step * (numbers.size - 1)
        if step and is_end and (np.diff(numbers) == step).all():
            return cls(int(numbers[0]), step, numbers.size)
        return cls(0, 1, numbers.size, np.ascontiguousarray(numbers))

    @property
    def is_prefix(self) -> bool:
        """Whether positions are sample numbers."""
        return self.numbers is None and (self.start, self.step) == (0, 1)

    def samples(self, positions: Int64s) -> Int64s:
        """Return the sample numbers at positions, as a new array or `positions` itself."""
        if self.numbers is not None:
            return self.numbers[positions]
        return positions if self.is_prefix else self.start + self.step * positions

    @property
    def ascending(self) -> Selection:
        """The same samples in ascending order."""
        return self if self._sorted is None else self._sorted

    @functools.cached_property
    def _sorted(self) -> Selection | None:
        """The same in ascending order; None, to avoid a cycle, if this one is."""
        if self.numbers is not None:
            if (self.numbers[1:] >= self.numbers[:-1]).all():
                return None
            return Selection.of_numbers(np.sort(self.numbers))
        if self.step > 0:
            return None
        return Selection(self.start + self.step * (self.size - 1), -self.step, self.size)

    @property
    def has_repeats(self) -> bool:
        """Whether a sample is selected more than once."""
        numbers = self.ascending.numbers
        return numbers is not None and bool((numbers[1:] == numbers[:-1]).any())

    def positions(self, samples: Int64s) -> Int64s:
        """Return the positions of sample numbers, all of which this ascending selection has."""
        if self.numbers is not None:
            return np.searchsorted(self.numbers, samples)
        return samples if self.is_prefix else (samples - self.start) // self.step

    def within(self, possible: Selection, num_samples: int) -> Selection:
        """Return the samples that `possible` has, too, in this order.

        `num_samples` is the size of the dataset; if `possible` has all of it, return self.
        """
        if possible.is_prefix and possible.size == num_samples:
            return self
        numbers = self.samples(np.arange(self.size, dtype=np.int64))
        return Selection.of_numbers(numbers[possible.are_in(numbers)])

    def are_in(self, samples: Int64s) -> NDArray[np.bool_]:
        """Tell for each sample number whether it is selected."""
        if not self.size:
            return np.zeros(samples.shape, np.bool_)
        ascending = self.ascending
        at = ascending.positions(samples)
        inside = np.clip(at, 0, self.size - 1)
        is_in: NDArray[np.bool_] = ascending.samples(inside) == samples
        is_in &= at == inside
        return is_in

    def bounds(self, bounds: Int64s) -> Int64s:
        """Return where units begin, in positions of this ascending selection.

        `bounds` is int64 (n + 1,), ascending: unit i is samples ``bounds[i]`` to ``bounds[i + 1]``.
        The result has the bounds, from 0 to `size`, of units that have a selected sample.
        """
        if self.is_prefix and self.size == bounds[-1]:
            return bounds
        if self.numbers is not None:
            found = np.searchsorted(self.numbers, bounds)
        else:
            found = np.clip(-((self.start - bounds) // self.step), 0, self.size)
        return np.unique(found) if self.size else np.zeros(1, np.int64)

    def digest(self) -> str:
        """Return a short text that only equal selections share."""
        if self.numbers is None:
            return f"{self.start}:{self.step}:{self.size}"
        return hashlib.blake2b(self.numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()
