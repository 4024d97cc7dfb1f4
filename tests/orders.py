"""What tests of orders share: a file of numbered samples, and which samples batches have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async import AsyncReader
from h5async.order.sampling import Sampling

N = 103


def batch_of(sampling: Sampling, epoch: int, number: int) -> NDArray[np.int64]:
    return sampling.batch_at(epoch, sampling.step_at(epoch, 0, number)[1])


def write_numbered(path: Path) -> Path:
    """Write N samples, whose labels are their numbers."""
    with h5py.File(path, "w") as file:
        data = np.arange(N * 3, dtype="i4").reshape(N, 3)
        file.create_dataset("data", data=data, chunks=(7, 3), compression="gzip")
        file["labels"] = np.arange(N)
    return path


def taken(reader: AsyncReader, count: int) -> list[Any]:
    """Return epoch, number and samples of the next batches, and whether it is the last."""
    found = []
    for _ in range(count):
        batch = reader.get_next_batch()
        assert np.array_equal(batch.labels, batch.index)
        found.append((batch.epoch, batch.number, batch.last, batch.index.tolist()))
    return found
