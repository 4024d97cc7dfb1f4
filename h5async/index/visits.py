"""Visits the chunks of a dataset, as HDF5 lists them: by the compiled core, or in Python.

A dataset and the grid of its chunks enter; the columns of a table leave, as HDF5 reported them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.core.structures import VisitStruct
from h5async.errors import ReadError
from h5async.index.hdf5 import function_address, stored_nbytes
from h5async.index.opened import Opened
from h5async.system.interruptions import suppressing

_BLOCK_CHUNKS = 1 << 13
_FIRST_CAPACITY = 1 << 24  # chunks: pages of memory that are not touched cost nothing
_LEAST_VERSION = (1, 14)  # of HDF5, of which it is known how it calls a visitor
_SIGNALS = "PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals"

Int64s = NDArray[np.int64]


class Visited(NamedTuple):
    """The chunks of a dataset, in the order in which HDF5 reports them.

    Attributes
    ----------
    number
        int64: the chunk's number in the C-ordered grid.
    offset, nbytes
        int64: address in the file, and stored size.
    mask
        uint32: the filter mask.
    is_outside
        Whether a chunk does not lie in the grid; then its number is one near it.
    """

    number: Int64s
    offset: Int64s
    nbytes: Int64s
    mask: NDArray[np.uint32]
    is_outside: bool


def visit_chunks(dataset: Opened, grid: Sequence[int], most: int, where: str) -> Visited:
    """Visit all chunks.

    Parameters
    ----------
    dataset, grid
        The dataset, and how many chunks there are along each dimension.
    most
        How many there may be.

    Raises
    ------
    ReadError
        If there are more.
    Exception
        What h5py raises where the index is damaged.
    """
    if not math.prod(grid):
        return Visited(*(np.zeros(0, np.int64) for _ in range(3)), np.zeros(0, np.uint32), False)
    visited = None
    with suppressing(MemoryError):  # what is only reserved may be refused
        visited = _by_core(dataset, grid, most)
    if visited is None:
        visited = _in_python(dataset, grid, most)
    if visited.number.size > most:
        raise ReadError(
            f"{where}: its chunk index lists more than {most} chunks, which is more than the file"
            " can hold; it is damaged"
        )
    return visited


def first_unlike(dataset: Opened, corners: NDArray[np.uint64], nbytes: Int64s) -> int:
    """Look chunks up by their keys; return the index of the first of another size, or of none.

    Parameters
    ----------
    corners
        (n, rank), C-contiguous.
    nbytes
        (n,): the sizes expected. n is returned where HDF5 finds all.
    """
    core, look_up = load_core(), function_address("H5Dget_chunk_storage_size")
    count, rank = corners.shape
    nbytes = np.ascontiguousarray(nbytes)
    if core is not None and look_up:
        with h5py._objects.phil:
            return int(
                core.look_up(address(corners), address(nbytes), look_up, dataset.id.id, rank, count)
            )
    for item, (corner, expected) in enumerate(zip(corners, nbytes.tolist(), strict=True)):
        if stored_nbytes(dataset.id, tuple(corner.tolist())) != expected:
            return item
    return count


def _by_core(dataset: Opened, grid: Sequence[int], most: int) -> Visited | None:
    """Visit chunks by a compiled function; None where there is none, or HDF5 reports an error."""
    core, iterate = load_core(), function_address("H5Dchunk_iter")
    if core is None or not iterate or h5py.version.hdf5_version_tuple < _LEAST_VERSION:
        return None
    extents = np.array([dataset.chunks, grid], np.int64)
    pointers = (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in _SIGNALS)
    struct = VisitStruct(iterate, *(pointer.value for pointer in pointers))
    struct.dataset, struct.rank = dataset.id.id, len(grid)
    struct.chunk, struct.grid = address(extents), address(extents) + extents[0].nbytes
    capacity = _FIRST_CAPACITY
    while True:
        # One more than there may be, to notice that there are more.
        columns = _columns(min(most + 1, capacity))
        for name, column in zip(("number", "offset", "nbytes", "mask"), columns, strict=True):
            setattr(struct, name, address(column))
        struct.capacity = columns[0].size
        with h5py._objects.phil:
            status = core.visit(ctypes.byref(struct))
        is_full = struct.count == struct.capacity
        if status and not is_full:
            return None
        if is_full and struct.count <= most:
            capacity *= 8
            continue
        for column in columns:  # in place: a copy would double the memory for a moment
            column.resize(struct.count, refcheck=False)
        return Visited(*columns, bool(struct.is_outside))


def _columns(count: int) -> tuple[Int64s, Int64s, Int64s, NDArray[np.uint32]]:
    number, offset, nbytes = (np.empty(count, np.int64) for _ in range(3))
    return number, offset, nbytes, np.empty(count, np.uint32)


def _in_python(dataset: Opened, grid: Sequence[int], most: int) -> Visited:
    """Visit chunks by h5py; ends after one more than there may be."""
    blocks: list[Visited] = []
    records: list[int] = []
    append = records.extend
    chunk = np.array(dataset.chunks, np.int64)

    def collect() -> Generator[bool | None, h5py.h5d.StoreInfo, None]:
        is_full = None
        while True:  # entering a generator takes half as long as calling a function
            for _ in range(_BLOCK_CHUNKS):
                corner, mask, offset, nbytes = yield is_full
                append(corner)
                append((offset, nbytes, mask))
            blocks.append(_numbered(records, chunk, grid))
            records.clear()
            is_full = True if len(blocks) * _BLOCK_CHUNKS > most else None

    collector = collect()
    next(collector)
    dataset.id.chunk_iter(collector.send)
    blocks.append(_numbered(records, chunk, grid))
    *columns, is_outside = zip(*blocks, strict=True)
    number, offset, nbytes, mask = map(np.concatenate, columns)
    return Visited(number, offset, nbytes, mask, any(is_outside))


def _numbered(records: list[int], chunk: Int64s, grid: Sequence[int]) -> Visited:
    """Return the chunks of some records, each of which is corner, offset, bytes, filter mask."""
    rank = chunk.size
    table = np.array(records, np.int64).reshape(-1, rank + 3)
    corners = table[:, :rank]
    cells = corners // chunk
    clipped = np.clip(cells, 0, np.array(grid, np.int64) - 1)
    is_outside = bool(((clipped != cells) | (cells * chunk != corners)).any())
    number = np.ravel_multi_index(tuple(clipped.T), tuple(grid))
    offset, nbytes = table[:, rank].copy(), table[:, rank + 1].copy()
    return Visited(number, offset, nbytes, table[:, rank + 2].astype(np.uint32), is_outside)
