"""Remembers which samples are damaged, so that later batches are filled without them at once.

The sample numbers of a batch enter; those that can be read leave, and why the others cannot.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from h5async.errors import Skipped
from h5async.order.sampling import NO_SAMPLES
from h5async.plan.records import Int64s

_MOST_KNOWN = 10_000  # others are found anew by each batch that has them


class KnownDamage:
    """Samples that were found damaged. Safe to use from many threads.

    Unless it `lasts`, none are remembered: other parts of them are read in another epoch.
    """

    def __init__(self) -> None:
        self.lasts = True
        self._known: tuple[Int64s, dict[int, Skipped]] = NO_SAMPLES, {}

    def add(self, found: Mapping[int, Skipped]) -> None:
        """Remember damaged samples, by number."""
        known = {**self._known[1], **found}
        if self.lasts and len(known) <= _MOST_KNOWN:
            # Replaced as a whole; of two threads at once, one may lose what it has found.
            self._known = np.array(sorted(known), np.int64), known

    def left_out(self, samples: Int64s) -> tuple[Int64s, list[Skipped]]:
        """Return the samples of a batch without those that are known to be damaged, and these."""
        numbers, known = self._known
        if not numbers.size:
            return samples, []
        at = np.minimum(np.searchsorted(numbers, samples), numbers.size - 1)
        is_known = numbers[at] == samples
        return samples[~is_known], [known[one] for one in samples[is_known].tolist()]

    def forget(self) -> None:
        """Forget all of them: a file has changed."""
        self._known = NO_SAMPLES, {}

    def __bool__(self) -> bool:
        return bool(self._known[1])
