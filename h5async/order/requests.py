"""Says which batch is asked for: a small picklable record."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.order.sampling import OrderKey

NO_SAMPLES = np.zeros(0, np.int64)


class FillRequest(NamedTuple):
    """Fill a slot with a batch.

    Attributes
    ----------
    slot
        The slot's number.
    serial
        Orders requests by urgency: the lowest comes first.
    epoch, number
        The batch's epoch, and its number in it.
    start
        The position in the epoch's order at which the batch's step begins.
    order
        The key of that order.
    samples
        int64 (n,): the samples of a batch of no epoch.
    """

    slot: int
    serial: int
    epoch: int
    number: int
    start: int
    order: OrderKey = (0, 1)
    samples: NDArray[np.int64] | None = None

    def is_same(self, other: FillRequest) -> bool:
        """Tell whether this is another copy of a request."""
        return self[:-1] == other[:-1]  # the samples go with the serial number

    def __str__(self) -> str:
        """Name the batch, for messages."""
        if self.samples is not None:
            return "a batch of given samples"
        return f"batch {self.number} of epoch {self.epoch}"
