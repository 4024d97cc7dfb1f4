"""A sampling, an epoch and a batch's number in it enter; the batch's samples leave."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h5async.order.sampling import Sampling


def batch_of(sampling: Sampling, epoch: int, number: int) -> NDArray[np.int64]:
    return sampling.batch_at(epoch, sampling.step_at(epoch, 0, number)[1])
