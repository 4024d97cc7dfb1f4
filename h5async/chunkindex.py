"""An open dataset enters; its `ChunkTable` leaves: h5py's chunk index, checked and sorted.

What h5py does not wrap of HDF5's index is asked of HDF5 itself, through the library that h5py
has loaded.
"""

from __future__ import annotations

import ctypes
import math
import os
from array import array

import h5py
import numpy as np

from h5async.errors import ReadError
from h5async.filters import Filter
from h5async.layout import ChunkTable, grid_of

_DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h
_EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY of H5Dpublic.h
_ALL_FILTERS = 0xFFFFFFFF


class NotDirectError(Exception):
    """Something was found that only h5py may read; the message is the reason."""


def require_true_coordinates(dataset: h5py.Dataset) -> None:
    """Refuse an index whose chunks HDF5 misplaces.

    Where just one dimension is unlimited, and it is not the first, the extensible array is kept
    in another order of dimensions, and HDF5 forgets to turn the coordinates back.

    Raises
    ------
    NotDirectError
        If the dataset has such an index, or may have one.
    """
    unlimited = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    if len(unlimited) != 1 or unlimited == [0]:
        return
    try:
        kind = _ask_hdf5("H5Dget_chunk_index_type", dataset.id.id, ctypes.c_int)
    except NotDirectError:
        kind = _EXTENSIBLE_ARRAY
    if kind == _EXTENSIBLE_ARRAY:
        raise NotDirectError(f"only dimension {unlimited[0]} is unlimited: HDF5 misreports chunks")


def edges_are_raw(dataset: h5py.Dataset) -> bool:
    """Tell whether chunks that reach over the dataset's edge are not filtered.

    Raises
    ------
    NotDirectError
        If HDF5 does not say so, and it matters.
    """
    if all(n % c == 0 for n, c in zip(dataset.shape, dataset.chunks, strict=True)):
        return False
    plist = dataset.id.get_create_plist()
    options = _ask_hdf5("H5Pget_chunk_opts", plist.id, ctypes.c_uint)
    return bool(options & _DONT_FILTER_PARTIAL_CHUNKS)


def _ask_hdf5(function: str, identifier: int, kind: type[ctypes.c_int | ctypes.c_uint]) -> int:
    """Call a function of HDF5 that takes an identifier and gives a number."""
    found = kind()
    try:
        call = getattr(ctypes.CDLL(h5py.h5p.__file__), function)
    except (AttributeError, OSError) as error:
        raise NotDirectError(f"HDF5 does not answer {function}") from error
    call.argtypes = (ctypes.c_int64, ctypes.POINTER(kind))
    call.restype = ctypes.c_int
    with h5py._objects.phil:
        status = call(identifier, ctypes.byref(found))
    if status < 0:
        raise NotDirectError(f"HDF5 does not answer {function}")
    return int(found.value)


def read_chunk_table(
    dataset: h5py.Dataset, filters: tuple[Filter, ...], has_raw_edges: bool, where: str
) -> ChunkTable:
    """Read where the chunks of a dataset lie.

    Raises
    ------
    ReadError
        If the index is damaged, or points outside the file.
    NotDirectError
        If HDF5 reports what cannot be.
    """
    rank = len(dataset.shape)
    records = array("q")
    append = records.extend

    def visit(info: h5py.h5d.StoreInfo) -> None:
        append(info.chunk_offset)
        append((info.byte_offset, info.size, info.filter_mask))

    try:
        if math.prod(dataset.shape):
            dataset.id.chunk_iter(visit)
    except (TypeError, RuntimeError, OSError) as error:
        raise ReadError(f"{where}: its chunk index cannot be read ({error})") from error
    table = np.frombuffer(records, np.int64).reshape(-1, rank + 3)
    corners, offset, nbytes = table[:, :rank], table[:, rank], table[:, rank + 1]
    mask = table[:, rank + 2].astype(np.uint32)
    end = os.fstat(dataset.file.id.get_vfd_handle()).st_size
    bad = np.flatnonzero((offset < 0) | (nbytes < 0) | (nbytes > end) | (offset > end - nbytes))
    if bad.size:
        at = tuple(int(x) for x in corners[bad[0]])
        raise ReadError(
            f"{where}, chunk {at}: {nbytes[bad[0]]} bytes at byte {offset[bad[0]]} do not lie in"
            f" the file, which has {end} bytes; it was cut short or is damaged"
        )
    due = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    bad = np.flatnonzero(nbytes != due)
    if bad.size and not filters:
        at = tuple(int(x) for x in corners[bad[0]])
        raise ReadError(
            f"{where}, chunk {at}: {nbytes[bad[0]]} bytes are stored, {due} are due; the file is"
            " damaged"
        )
    chunk = np.asarray(dataset.chunks, np.int64)
    shape = np.asarray(dataset.shape, np.int64)
    if ((corners % chunk != 0) | (corners < 0) | (corners >= shape)).any():
        raise NotDirectError("HDF5 reports chunks outside the dataset")
    if has_raw_edges:
        # Such chunks are stored raw while their mask says that they were filtered.
        is_partial = (corners + chunk > shape).any(axis=1)
        mask = np.where(is_partial, np.uint32(_ALL_FILTERS), mask)
    extents = grid_of(dataset.shape, dataset.chunks)
    cells = (corners // chunk).T
    index = np.ravel_multi_index(tuple(cells), extents) if rank else np.zeros(0, np.int64)
    order = np.argsort(index, kind="stable")
    index = index[order].astype(np.int64)
    if (index[1:] == index[:-1]).any():
        raise NotDirectError("HDF5 reports a chunk twice")
    complete = index.size == math.prod(extents)
    return ChunkTable(
        index=None if complete else index,
        offset=offset[order],
        nbytes=nbytes[order],
        filter_mask=mask[order],
    )
