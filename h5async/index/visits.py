"""Visits the chunks of a dataset, as HDF5 lists them: by the compiled core, or in Python.

A dataset and the grid of its chunks enter; columns of a table leave, as HDF5 reported them.

HDF5 misreports coordinates of chunks in an extensible array, which it uses if just one dimension is
unlimited: that one comes first, then the others in order, each at its maximum extent. When HDF5
visits the array, it uses the order of the dataset's dimensions instead (H5D__earray_idx_iterate_cb
of H5Dearray.c). So coordinates are wrong unless the unlimited dimension is the first, but they give
the position in the array, which gives the true ones.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, load_core
from h5async.errors import DamagedError
from h5async.index.chunktable import grid_of
from h5async.index.hdf5 import (
    EXTENSIBLE_ARRAY,
    NotDirectError,
    Opened,
    function_address,
    stored_nbytes,
)
from h5async.index.segments import Int64s
from h5async.system.interruptions import suppressing

_FIRST_CAPACITY = 1 << 24  # chunks: pages of memory that are not touched cost nothing
_LEAST_VERSION = (1, 14)  # of HDF5, with a known way of calling a visitor
_PYTHON_FUNCTIONS = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
MISREPORTED = "only dimension {} is unlimited: HDF5 misreports chunks"
_MOST_POSITIONS = 1 << 40  # an array has at most 2 ** 32 (H5D_EARRAY_MAX_NELMTS_BITS)


class Visited(NamedTuple):
    """The chunks of a dataset, in the order in which HDF5 reports them."""

    number: Int64s  # the chunk's number in the C-ordered grid; one near it if `is_outside`
    offset: Int64s  # address in the file
    nbytes: Int64s  # stored size
    mask: NDArray[np.uint32]  # of filters
    is_outside: bool = False  # a chunk does not lie in the grid
    is_ascending: bool = True  # each number is higher than the previous one
    is_apart: bool = False  # each chunk is known to begin at or after the end of the previous one
    end: int = np.iinfo(np.int64).max  # one past the last byte of all chunks; by default unknown
    least: int = 0  # bytes of the smallest,
    most: int = -1  # and the largest; by default unknown


def visit_chunks(
    dataset: Opened,
    grid: tuple[int, ...],
    most: int,
    where: str,
    positions: Positions | None = None,
) -> Visited:
    """Visit all chunks of a dataset with this grid; ReadError if there are more than `most`.

    With `positions`, each gets its true number. Raises any exception of h5py's if the index is
    damaged.
    """
    if not math.prod(grid):
        return Visited(*_columns(0))
    reported, visited = grid if positions is None else positions.reported_grid, None
    with suppressing(MemoryError):  # a reservation may be refused
        visited = _by_core(dataset, reported, most)
    if visited is None:
        visited = _in_python(dataset.id, dataset.chunks, reported, most)
    if visited.number.size > most:
        raise DamagedError(
            f"{where}: its chunk index lists more than {most} chunks, which is more than the file"
            " can hold; it is damaged"
        )
    if positions is None:
        return visited
    number, is_outside = positions.numbers(visited.number, grid)
    return visited._replace(
        number=number,
        is_ascending=bool((number[1:] > number[:-1]).all()),
        is_outside=visited.is_outside or is_outside,
    )


def first_unlike(dataset: Opened, grid: Sequence[int], number: Int64s, nbytes: Int64s) -> int:
    """Look up chunks by their keys; return the index of the first of another size.

    Returns `number.size` if HDF5 finds all with their `nbytes`.
    """
    core, look_up = load_core(), function_address("H5Dget_chunk_storage_size")
    count = len(number)
    if core is not None and look_up:
        number, nbytes = np.ascontiguousarray(number), np.ascontiguousarray(nbytes)
        struct, _extents = _visit_struct(core, dataset, grid)
        pointers = ctypes.byref(struct), address(number), address(nbytes), look_up
        with h5py._objects.phil:
            found = int(core.look_up(*pointers, count))
        return found
    cells = np.unravel_index(number, tuple(grid))
    for item, expected in enumerate(nbytes.tolist()):
        corner = (int(cell[item]) * n for cell, n in zip(cells, dataset.chunks, strict=True))
        if stored_nbytes(dataset.id, tuple(corner)) != expected:
            return item
    return count


def _by_core(dataset: Opened, grid: Sequence[int], most: int) -> Visited | None:
    """Visit chunks by a compiled function; None if there is none, or HDF5 reports an error."""
    core, iterate = load_core(), function_address("H5Dchunk_iter")
    if core is None or not iterate or h5py.version.hdf5_version_tuple < _LEAST_VERSION:
        return None
    struct, _extents = _visit_struct(core, dataset, grid)
    struct.iterate = iterate
    struct.save_thread, struct.restore_thread, struct.check_signals = _python_functions()
    capacity = _FIRST_CAPACITY
    while True:
        # One more than the maximum, to detect more.
        columns = _columns(min(most + 1, capacity))
        pointers = (address(column) for column in columns)
        struct.number, struct.offset, struct.nbytes, struct.mask = pointers
        struct.capacity = columns[0].size
        with h5py._objects.phil:
            status = core.visit(ctypes.byref(struct))
        count = struct.count
        if count == struct.capacity and count <= most:
            capacity *= 8
            continue
        if status and count <= most:
            return None
        if count < struct.capacity // 2:
            for column in columns:  # in place: a copy would double the memory for a moment
                column.resize(count, refcheck=False)
        number, offset, nbytes, mask = columns
        facts = (getattr(struct, name) for name in Visited._fields[4:])
        return Visited(number[:count], offset[:count], nbytes[:count], mask[:count], *facts)


@functools.cache
def _python_functions() -> list[int | None]:
    functions = (getattr(ctypes.pythonapi, name) for name in _PYTHON_FUNCTIONS)
    return [ctypes.cast(function, ctypes.c_void_p).value for function in functions]


def _visit_struct(core: Core, dataset: Opened, grid: Sequence[int]) -> tuple[Any, Int64s]:
    """Return the core's description of a dataset, and an array that it points to."""
    extents = _extents(dataset.chunks, tuple(grid))
    at = address(extents)
    struct = core.Visit(
        dataset=dataset.id.id, rank=len(grid), chunk=at, grid=at + extents.nbytes // 2
    )
    return struct, extents


@functools.lru_cache(maxsize=16)
def _extents(chunks: tuple[int, ...], grid: tuple[int, ...]) -> Int64s:
    return np.array([chunks, grid], np.int64)


def _columns(count: int) -> tuple[Int64s, Int64s, Int64s, NDArray[np.uint32]]:
    number, offset, nbytes = (np.empty(count, np.int64) for _ in range(3))
    return number, offset, nbytes, np.empty(count, np.uint32)


def _in_python(
    dataset: h5py.h5d.DatasetID, chunks: tuple[int, ...], grid: Sequence[int], most: int
) -> Visited:
    """Visit chunks by h5py; ends after one more than `most`."""
    rank, records = len(grid), array.array("q")
    width = rank + 3

    def note(info: h5py.h5d.StoreInfo) -> bool | None:
        corner, mask, offset, nbytes = info
        records.extend((*corner, offset, nbytes, mask))
        return True if len(records) > most * width else None

    dataset.chunk_iter(note)
    table = np.frombuffer(records, np.int64).reshape(-1, width)
    corners, (offset, nbytes, mask) = table[:, :rank], table[:, rank:].T.copy()
    chunk = np.array(chunks, np.int64)
    cells = corners // chunk
    clipped = np.clip(cells, 0, np.array(grid, np.int64) - 1)
    number = np.ravel_multi_index(tuple(clipped.T), tuple(grid))
    is_outside = bool(((clipped != cells) | (cells * chunk != corners)).any())
    is_ascending = bool((number[1:] > number[:-1]).all())
    return Visited(number, offset, nbytes, mask.astype(np.uint32), is_outside, is_ascending)


class Positions(NamedTuple):
    """Converts positions in the array for a dataset's dimensions.

    Dimension `axis` is unlimited. `most` is the maximum number of chunks along each dimension; 1
    for the unlimited one.
    """

    axis: int
    most: tuple[int, ...]

    @property
    def reported_grid(self) -> tuple[int, ...]:
        """The grid in which the coordinates reported by HDF5 are numbered by their position."""
        behind = self.most[self.axis + 1 :]
        return (*(1,) * self.axis, _MOST_POSITIONS // math.prod(behind), *behind)

    def numbers(self, position: Int64s, grid: tuple[int, ...]) -> tuple[Int64s, bool]:
        """Return the numbers of chunks in the dataset's grid, and whether one lies outside it."""
        along, rest = np.divmod(position, math.prod(self.most))
        cells = list(np.unravel_index(rest, self.most))
        cells[self.axis] = along
        clipped = [np.minimum(cell, n - 1) for cell, n in zip(cells, grid, strict=True)]
        is_outside = any((a != b).any() for a, b in zip(cells, clipped, strict=True))
        return np.ravel_multi_index(tuple(clipped), grid).astype(np.int64), is_outside


def positions_of(dataset: Opened) -> Positions | None:
    """Return how to find chunks that HDF5 misreports; None if it reports them correctly.

    NotDirectError if they cannot be found.
    """
    unlimited = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    if len(unlimited) != 1 or unlimited == [0]:
        return None
    axis, kind = unlimited[0], dataset.index_kind
    if kind not in (EXTENSIBLE_ARRAY, -1):
        return None
    extents = tuple(
        size if extent is None else extent
        for extent, size in zip(dataset.maxshape, dataset.chunks, strict=True)
    )
    most = grid_of(extents, dataset.chunks)
    if kind == -1 or math.prod(most) > _MOST_POSITIONS or not _counts_positions():
        raise NotDirectError(MISREPORTED.format(axis))
    return Positions(axis, most)


@functools.cache
def _counts_positions() -> bool:
    """Return whether the loaded HDF5 reports chunks as described above; another one may not.

    Tests it by datasets in memory whose chunks contain their own coordinates.
    """
    with suppressing(Exception):  # in any case h5py can read such datasets
        return all(
            _reports_positions(shape, maxshape)
            for shape, maxshape in (((4, 6), (8, None)), ((4, 6, 3), (6, None, 9)))
        )
    return False


def _reports_positions(shape: tuple[int, ...], maxshape: tuple[int | None, ...]) -> bool:
    chunk = (2, 2, 1)[: len(shape)]
    grid = grid_of(shape, chunk)
    with h5py.File(
        f"h5async-{threading.get_ident()}", "w", driver="core", backing_store=False, libver="latest"
    ) as file:
        data = file.create_dataset("data", shape, "i4", chunks=chunk, maxshape=maxshape)
        for number, cell in enumerate(itertools.product(*map(range, grid))):
            corner = tuple(at * size for at, size in zip(cell, chunk, strict=True))
            data.id.write_direct_chunk(corner, np.full(chunk, number, "i4").tobytes())
        file.flush()
        most = tuple(1 if m is None else -(-m // c) for m, c in zip(maxshape, chunk, strict=True))
        positions = Positions(maxshape.index(None), most)
        reported = _in_python(data.id, chunk, positions.reported_grid, math.prod(grid))
        image = file.id.get_file_image()
    numbers, is_outside = positions.numbers(reported.number, grid)
    stored = [int(np.frombuffer(image, "i4", 1, offset)[0]) for offset in reported.offset]
    return not is_outside and not reported.is_outside and numbers.tolist() == stored
