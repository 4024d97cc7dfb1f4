"""Defines `FillRequest`, a small picklable record that names a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.order.sampling import OrderKey

NO_SAMPLES = np.zeros(0, np.int64)


class FillRequest(NamedTuple):
    """A request to fill a slot with a batch.

    Attributes
    ----------
    serial
        Urgency: the lowest comes first.
    start
        Position in the epoch's order at which the batch's step begins.
    order
        Key of that order.
    samples
        int64 (n,): the samples of a batch outside of epochs.
    """

    slot: int
    serial: int
    epoch: int
    number: int
    start: int
    order: OrderKey = (0, 1)
    samples: NDArray[np.int64] | None = None

    def is_same(self, other: FillRequest) -> bool:
        """Tell whether this is a copy of the same request."""
        return self[:-1] == other[:-1]  # the samples go with the serial number

    def __str__(self) -> str:
        if self.samples is not None:
            return "a batch of given samples"
        return f"batch {self.number} of epoch {self.epoch}"
