"""Reads a small dataset whole, in the calling thread: a mask, say, or a number for each sample.

A layout enters; its values leave, one for each sample.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.io.maps import IoMode
from h5async.plan.plan import plan_read
from h5async.read.executors import Executors
from h5async.read.scratch import Scratch, ScratchSize

_BLOCK_SAMPLES = 1 << 18  # of which the plan takes some times more memory than the values


def read_whole(layout: DatasetLayout, io: IoMode) -> NDArray[Any]:
    """Return all values of a dataset that has one for each sample.

    Parameters
    ----------
    layout
        Of the dataset.
    io
        How files are read.

    Returns
    -------
    numpy.ndarray
        (n,), of the dataset's dtype, in native byte order.

    Raises
    ------
    DatasetError
        If it has several values for a sample, or none.
    ReadError
        If it cannot be read.
    """
    count = layout.num_samples
    if math.prod(layout.shape) != count:
        raise DatasetError(
            f'{layout.file}: dataset "{layout.path}" must have one value for each sample, and has'
            f" shape {layout.shape}"
        )
    shape = [1] * len(layout.shape)
    found = np.empty(count, layout.raw_dtype)
    executors = Executors(None, [layout], io, [layout.unit_nbytes], _do_nothing)
    try:
        executor = executors.make()[0]
        scratch = Scratch.allocate(*ScratchSize.of([layout]))
        for first in range(0, count, _BLOCK_SAMPLES):
            samples = np.arange(first, min(first + _BLOCK_SAMPLES, count))
            plan = plan_read(layout, samples)
            rows = found[first : first + samples.size].reshape(samples.size, *shape[1:])
            executor.execute(plan, 0, plan.num_items, rows, scratch)
    finally:
        executors.close()
    if layout.dtype.kind == "b":  # any byte but 0 is True to HDF5
        return np.asarray(found != 0)
    return found.astype(layout.dtype.newbyteorder("="), copy=False)


def _do_nothing() -> None:
    pass
