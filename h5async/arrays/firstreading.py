"""Reads small selections of a dataset that HDF5 has open: they cost less than tables for the core.

A key and an open dataset enter; values leave, or None if there is any doubt, so that the core reads
them. HDF5 reads what has no filters, and only if all of it is stored. Chunks with filters are
fetched by HDF5, and decoded by the core, which notices where they are damaged.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.arrays.selections import Selection
from h5async.codec.filters import Filter
from h5async.core.binding import MAX_RANK, address, load_core
from h5async.index.chunks import filters_of
from h5async.index.hdf5 import edges_are_raw, stored_nbytes
from h5async.read.scratch import Scratch, encoded_room

# What HDF5 copies in about the time in which it opens a file, and what one thread decodes in it.
_COPIED_NBYTES, _DECODED_NBYTES, _MOST_CHUNKS = 8 << 20, 1 << 20, 32
_scratches: list[Scratch] = []


class Stored(NamedTuple):
    """How a dataset is stored: a storage of HDF5, and of one in chunks, their shape and filters."""

    storage: int
    chunk_shape: tuple[int, ...] | None
    filters: tuple[Filter, ...]
    edges_are_raw: bool

    @classmethod
    def of(cls, node: h5py.h5d.DatasetID) -> Stored:
        """Return it of an open dataset; external files are virtual storage here."""
        plist = node.get_create_plist()
        storage = plist.get_layout()
        if storage != h5py.h5d.CHUNKED:
            is_external = storage == h5py.h5d.CONTIGUOUS and plist.get_external_count() > 0
            return cls(h5py.h5d.VIRTUAL if is_external else storage, None, (), False)
        filters = filters_of(plist)
        return cls(storage, plist.get_chunk(), filters, bool(filters) and edges_are_raw(plist))

    @property
    def is_elsewhere(self) -> bool:
        """Whether other datasets or files hold the values."""
        return bool(self.storage == h5py.h5d.VIRTUAL)


def read_at_once(
    node: h5py.h5d.DatasetID,
    stored: Stored,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    key: tuple[Any, ...],
    selection: Selection,
) -> Any:
    """Return what a key selects; None if the core has to read it, or if that fails."""
    nbytes = math.prod(selection.shape) * dtype.itemsize
    if stored.is_elsewhere or nbytes > _COPIED_NBYTES:
        return None
    if stored.filters:
        return _decoded(node, stored, shape, dtype, selection)
    extents, count = shape, 1
    if stored.chunk_shape is not None:
        extents = stored.chunk_shape
        count = math.prod(-(-n // c) for n, c in zip(shape, extents, strict=True))
    whole = count * math.prod(extents) * node.get_type().get_size()
    if node.get_storage_size() < whole:  # not all is stored
        return None
    if selection.shape != shape or dtype.kind not in "iufcb":
        return h5py.Dataset(node)[key]
    out = np.empty(shape, dtype)
    node.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    return out


@lru_cache(64)
def _pipeline(filters: tuple[Filter, ...]) -> Any:
    core = load_core()
    return None if core is None else core.filters(filters)


def _decoded(
    node: h5py.h5d.DatasetID,
    stored: Stored,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    selection: Selection,
) -> NDArray[Any] | None:
    """Return what is selected of chunks with filters."""
    box, chunk = selection.bounds, stored.chunk_shape
    if selection.mask is not None or chunk is None or len(shape) > MAX_RANK:
        return None
    cells = [
        range(begin // n, (begin + (size - 1) * step) // n + 1)
        for begin, size, step, n in zip(*box[:3], chunk, strict=True)
    ]
    extents = [len(some) * n for some, n in zip(cells, chunk, strict=True)]
    pipeline = _pipeline(stored.filters)
    if pipeline is None or math.prod(extents) * dtype.itemsize > _DECODED_NBYTES:
        return None
    count = math.prod(map(len, cells))
    is_numpys = dtype.kind in "iuf" and h5py.h5t.py_create(dtype) == node.get_type()
    if count > _MOST_CHUNKS or not is_numpys:
        return None
    whole = np.empty(extents, dtype)
    for cell in itertools.product(*cells):
        corner = tuple([at * n for at, n in zip(cell, chunk, strict=True)])
        is_partial = any(at + n > end for at, n, end in zip(corner, chunk, shape, strict=True))
        to = whole if count == 1 else np.empty(chunk, dtype)
        if (is_partial and stored.edges_are_raw) or not _decode(node, stored, corner, pipeline, to):
            return None
        if count > 1:
            at = [(c - some.start) * n for c, some, n in zip(cell, cells, chunk, strict=True)]
            whole[tuple(slice(a, a + n) for a, n in zip(at, chunk, strict=True))] = to
    begin = [b - some.start * n for b, some, n in zip(box.begin, cells, chunk, strict=True)]
    several = zip(begin, box.size, box.step, strict=True)
    part = whole[tuple(slice(b, b + (size - 1) * by + 1, by) for b, size, by in several)]
    found = selection.taken(part.reshape(box.shape))
    return found if found.base is None else found.copy()


def _decode(
    node: h5py.h5d.DatasetID,
    stored: Stored,
    corner: tuple[int, ...],
    pipeline: Any,
    out: NDArray[Any],
) -> bool:
    """Decode a chunk to an array of its size; False if it is not stored, or damaged."""
    core = load_core()
    if core is None or not 0 < stored_nbytes(node, corner) <= encoded_room(_DECODED_NBYTES):
        return False
    mask, encoded = node.read_direct_chunk(corner)
    try:
        scratch = _scratches.pop()
    except IndexError:
        scratch = Scratch.allocate(0, 0, encoded_room(_DECODED_NBYTES))
    held = np.frombuffer(encoded, np.uint8)
    worker = ctypes.byref(scratch.worker(core).struct)
    numbers = len(stored.filters), held.size, mask, out.nbytes
    is_done = core.decode(pipeline, worker, address(held), address(out), *numbers)
    _scratches.append(scratch)
    return bool(is_done)
