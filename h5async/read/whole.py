"""Reads a small dataset whole, in the calling thread: a mask, say, or a number per sample.

A layout enters; its values leave, one per sample: all of them, or block by block. Or its rows do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import load_core
from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, files_of
from h5async.index.units import unit_nbytes
from h5async.io.localfiles import IoMode
from h5async.plan.records import SamplesPlan
from h5async.read.executors import Executors
from h5async.read.scratch import Scratch, ScratchSize

_BLOCK_SAMPLES = 1 << 18


def read_whole(layout: DatasetLayout, reach: Reach) -> NDArray[Any]:
    """Return all values of a dataset that has one per sample, in native byte order.

    It raises as `read_blocks`.
    """
    blocks = read_blocks(layout, reach)  # which asks for room first
    found = np.empty(layout.num_samples, layout.dtype.newbyteorder("="))
    for first, block in blocks:
        found[first : first + block.size] = block
    return found


def read_rows(layout: DatasetLayout, reach: Reach) -> NDArray[Any]:
    """Return all rows of a dataset, as `RowTransform` takes them; raises as `read_blocks`."""
    what = f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}: its values'
    reach.room.take(max(layout.nbytes, layout.chunk_nbytes), what, files_of(layout))
    return np.concatenate([rows.copy() for _, rows in _blocks(layout, reach.io, True)])


def read_blocks(
    layout: DatasetLayout, reach: Reach, kept_itemsize: int = 0, *, may_use_h5py: bool = True
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield its values block by block, each with the number of its first sample.

    Blocks share their memory. Values are in the dataset's byte order. There must be room for all of
    them, of `kept_itemsize` bytes if they are kept in another form; else `BudgetError` is raised.
    If not `may_use_h5py`, the core must read all: h5py would return references to its own memory.

    `DatasetError` is raised if it has several values for a sample, or none, or only h5py could read
    it, `ReadError` if it cannot be read.
    """
    count = layout.num_samples
    if math.prod(layout.shape) != count:
        raise DatasetError(
            f'{layout.file}: dataset "{layout.path}" must have one value for each sample, and has'
            f" shape {layout.shape}"
        )
    nbytes = max(count * max(layout.dtype.itemsize, kept_itemsize), layout.chunk_nbytes)
    what = f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}: its values'
    reach.room.take(nbytes if count else 0, what, files_of(layout))
    blocks = _blocks(layout, reach.io, may_use_h5py)
    return ((first, rows.reshape(-1)) for first, rows in blocks)


def _blocks(
    layout: DatasetLayout, io: IoMode, may_use_h5py: bool
) -> Iterator[tuple[int, NDArray[Any]]]:
    count = layout.num_samples
    # Whole chunks: one that is split between two blocks would be decoded twice.
    size = layout.chunk_shape[layout.sample_axis] if layout.chunk_shape else 1
    size *= max(1, _BLOCK_SAMPLES // size)
    memory = np.empty((min(size, count), *layout.row_shape), layout.raw_dtype)
    executors = Executors(load_core(), [layout], io, [unit_nbytes(layout)], lambda: None)
    try:
        collection, through_h5py = executors.open_collection([None]), executors.h5py_rows()[0]
        room = ScratchSize.of([layout])
        if layout.chunks is not None:  # read chunk by chunk, also where batches read rows
            room = room._replace(raw_chunk=max(room.raw_chunk, layout.chunk_nbytes))
        scratch = Scratch.allocate(*room)
        for first in range(0, count, size):
            samples = np.arange(first, min(first + size, count))
            rows, left = memory[: samples.size], [np.arange(samples.size)]
            if collection is not None and collection.tables.reads[0]:
                with collection.lent_batch([rows], [rows], samples.size) as batch:
                    items, _ = collection.plan(batch, samples, [True], 1)
                    collection.fetch(batch, scratch)
                    collection.read(batch, 0, items, scratch)
                    executors.read_again(batch, scratch)
                    left = [some for _, some in collection.left(batch)]
            if left and not may_use_h5py:
                raise DatasetError(
                    f'{layout.file}: dataset "{layout.path}" cannot be read: the core cannot take'
                    " its references; store flat values, and their offsets"
                )
            for some in left:
                plan = SamplesPlan(samples[some], some, some.size * layout.row_nbytes)
                through_h5py.execute(plan, rows, scratch)
            # Any byte but 0 is True to HDF5.
            yield first, rows != 0 if layout.dtype.kind == "b" else rows
    finally:
        executors.close()
