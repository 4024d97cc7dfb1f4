"""Finds the chunks of an extensible array, for which HDF5 misreports the coordinates.

If just one dimension is unlimited, HDF5 lists chunks in an extensible array: that dimension comes
first, then the others in order, each at its maximum extent. When HDF5 visits the array, it uses the
order of the dataset's dimensions instead (H5D__earray_idx_iterate_cb of H5Dearray.c). So
coordinates are wrong unless the unlimited dimension is the first, but they give the position in the
array, which gives the true ones.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import grid_of
from h5async.index.hdf5 import EXTENSIBLE_ARRAY
from h5async.index.obstacles import NotDirectError
from h5async.index.opendataset import Opened
from h5async.index.visits import Visited, visit_chunks
from h5async.system.interruptions import suppressing

MISREPORTED = "only dimension {} is unlimited: HDF5 misreports chunks"
_MOST_POSITIONS = 1 << 40  # an array has at most 2 ** 32 (H5D_EARRAY_MAX_NELMTS_BITS)

Int64s = NDArray[np.int64]


class Positions(NamedTuple):
    """Converts positions in the array for a dataset's dimensions.

    Attributes
    ----------
    axis
        The unlimited dimension.
    chunk
        Dimensions of a chunk.
    most
        The maximum number of chunks along each dimension; 1 for the unlimited one.
    """

    axis: int
    chunk: tuple[int, ...]
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

    Raises
    ------
    NotDirectError
        If they cannot be found.
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
    return Positions(axis, dataset.chunks, most)


def visit_by_positions(
    dataset: Opened, positions: Positions, grid: tuple[int, ...], most: int, where: str
) -> Visited:
    """Visit chunks like `visit_chunks`, and give each its true number."""
    visited = visit_chunks(dataset, positions.reported_grid, most, where)
    number, is_outside = positions.numbers(visited.number, grid)
    return visited._replace(
        number=number,
        is_ascending=bool((number[1:] > number[:-1]).all()),
        is_outside=visited.is_outside or is_outside,
    )


@functools.cache
def _counts_positions() -> bool:
    """Return whether the loaded HDF5 reports chunks as described above.

    Another HDF5 may report them otherwise, or correctly. So this tests datasets in memory whose
    chunks contain their own coordinates.
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
    name, reported = f"h5async-{threading.get_ident()}", []
    with h5py.File(name, "w", driver="core", backing_store=False, libver="latest") as file:
        data = file.create_dataset("data", shape, "i4", chunks=chunk, maxshape=maxshape)
        for number, cell in enumerate(itertools.product(*map(range, grid))):
            corner = tuple(at * size for at, size in zip(cell, chunk, strict=True))
            data.id.write_direct_chunk(corner, np.full(chunk, number, "i4").tobytes())
        file.flush()
        data.id.chunk_iter(lambda info: reported.append((info.chunk_offset, info.byte_offset)))
        image = file.id.get_file_image()
    most = tuple(1 if m is None else -(-m // c) for m, c in zip(maxshape, chunk, strict=True))
    positions = Positions(maxshape.index(None), chunk, most)
    cells = [np.array(corner) // chunk for corner, _ in reported]
    position = np.ravel_multi_index(tuple(np.array(cells).T), positions.reported_grid)
    numbers, is_outside = positions.numbers(position, grid)
    stored = [int(np.frombuffer(image, "i4", 1, offset)[0]) for _, offset in reported]
    return not is_outside and numbers.tolist() == stored
