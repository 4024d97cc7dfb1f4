"""Reads small selections of a dataset open in HDF5: cheaper than making tables for the core.

A key and an open dataset enter; values leave, or None if there is any doubt: then the core reads
them. A dataset without filters is read only if all of it is stored: HDF5 says where, or reads it
itself if values have to be converted or cut. HDF5 fetches chunks with filters, and the core decodes
them, which detects damage.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.arrays.selections import Selection, parts_of_box
from h5async.codec.filters import Filter
from h5async.core.binding import MAX_RANK, load_core
from h5async.index.chunks import filters_of
from h5async.index.hdf5 import edges_are_raw, function_address
from h5async.index.visits import LOOK_UP
from h5async.io.source import Source
from h5async.io.stores import LocalSource
from h5async.read.coretables import Scratch, encoded_room

# Bytes that HDF5 copies, and that a thread decodes, in about the time that opening a file takes.
COPIED_NBYTES, _DECODED_NBYTES, _MOST_CHUNKS = 8 << 20, 1 << 20, 32
_ENCODED_NBYTES = encoded_room(_DECODED_NBYTES)  # at most
_KNOWN, _KEY_NBYTES = 64, 4096  # storage forms remembered per file; size of their keys
# `AskHDF5` of the core
_ASKED = (
    "H5Dget_type H5Dget_create_plist H5Dget_space H5Dget_offset H5Idec_ref H5Tencode H5Pget_layout"
    " H5Pget_chunk H5Pget_external_count H5Pget_nfilters H5Pget_filter2 H5Sget_simple_extent_dims"
    " H5Sget_simple_extent_type"
).split()
_memory = (ctypes.c_char * 1).from_buffer  # of an array; faster than its address
_scratches: list[Scratch] = []


class Stored(NamedTuple):
    """How a dataset is stored: its dtype and HDF5 storage; if chunked, its chunk shape and filters.

    `is_numpys`: elements are numbers, stored as NumPy has them in memory.
    """

    dtype: np.dtype[Any]
    is_numpys: bool
    storage: int
    chunk_shape: tuple[int, ...] | None = None
    filters: tuple[Filter, ...] = ()

    @classmethod
    def of(cls, node: h5py.h5d.DatasetID) -> Stored:
        """Return the storage of an open dataset; external files count as virtual storage."""
        dtype = node.dtype
        is_numpys = dtype.kind in "iuf" and bool(h5py.h5t.py_create(dtype) == node.get_type())
        if node.get_offset() is not None:  # which only contiguous values in this file have
            return cls(dtype, is_numpys, h5py.h5d.CONTIGUOUS)
        plist = node.get_create_plist()
        storage = plist.get_layout()
        if storage == h5py.h5d.CHUNKED:
            return cls(dtype, is_numpys, storage, plist.get_chunk(), filters_of(plist))
        if storage == h5py.h5d.CONTIGUOUS and plist.get_external_count() > 0:
            storage = h5py.h5d.VIRTUAL
        return cls(dtype, is_numpys, storage)

    @property
    def is_elsewhere(self) -> bool:
        """Whether other datasets or files hold the values."""
        return bool(self.storage == h5py.h5d.VIRTUAL)


@cache
def _asked() -> Any:
    found = list(map(function_address, _ASKED))
    return (ctypes.c_void_p * len(found))(*found) if all(found) else None


def described(
    node: h5py.h5d.DatasetID, known: dict[bytes, Stored]
) -> tuple[Stored, tuple[int, ...] | None] | None:
    """Return how a dataset is stored, and its shape, by one call; None if h5py has to be asked.

    `known` caches storage by the core's description: most datasets of a file are alike.
    """
    core, functions = load_core(), _asked()
    if core is None or functions is None:
        return None
    shape, key = (ctypes.c_int64 * 33)(), ctypes.create_string_buffer(_KEY_NBYTES)
    with h5py._objects.phil:
        nbytes = core.describe(functions, node.id, shape, key, _KEY_NBYTES)
    if not nbytes:
        return None
    facts = ctypes.string_at(key, nbytes)
    stored = known.get(facts)
    if stored is None:
        stored = Stored.of(node)
        if len(known) >= _KNOWN:
            known.clear()
        known[facts] = stored
    rank = shape[0]
    return stored, None if rank < 0 else tuple(shape[1 : 1 + rank])


def read_at_once(
    source: Source,
    node: h5py.h5d.DatasetID,
    stored: Stored,
    shape: tuple[int, ...],
    key: tuple[Any, ...],
    selection: Selection,
) -> Any:
    """Return the values that a key selects; None if the core has to read them, or on failure."""
    dtype = stored.dtype
    if stored.is_elsewhere:
        return None
    if stored.filters:
        return _decoded(node, stored, shape, selection)
    extents, count = shape, 1
    if stored.chunk_shape is not None:
        extents = stored.chunk_shape
        count = math.prod(-(-n // c) for n, c in zip(shape, extents, strict=True))
    if node.get_storage_size() < count * math.prod(extents) * dtype.itemsize:
        return None  # not all is stored
    if not stored.is_numpys:
        return OpenDataset(node).read(key)
    if stored.storage == h5py.h5d.CONTIGUOUS and isinstance(source, LocalSource):
        first = _begins_at(selection, shape)
        if first is not None:
            out = np.empty(selection.shape, dtype)
            at = node.get_offset() + first * dtype.itemsize
            return out if source.fills(out, at) else None
    if selection.shape != shape:
        return OpenDataset(node).read(key)
    out = np.empty(shape, dtype)
    node.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    return out


def _begins_at(selection: Selection, shape: tuple[int, ...]) -> int | None:
    """Return the number of the first selected element if they are contiguous; None if not."""
    if selection.indices is not None or selection.mask is not None:
        return None
    first, stride, are_whole = 0, 1, True
    for axis in reversed(range(len(shape))):
        begin, size, step = (part[axis] for part in selection.box[:3])
        if size > 1 and not (are_whole and step == 1):
            return None
        are_whole = are_whole and size == shape[axis]
        first += begin * stride
        stride *= shape[axis]
    return first


class OpenDataset:
    """A dataset open in HDF5. Reads as h5py does, but keeps objects that h5py makes for each read.

    Nothing else refers to the h5py objects in here, which the garbage collector must not close.
    """

    def __init__(self, node: h5py.h5d.DatasetID) -> None:
        self._node, self._dtype, self._shape = node, node.dtype, node.shape
        self._type = h5py.h5t.py_create(node.dtype)
        self._spaces: list[tuple[h5py.h5s.SpaceID, h5py.h5s.SpaceID]] = []  # unused by any thread

    @cached_property
    def dataset(self) -> h5py.Dataset:
        """Its h5py object, which caches facts."""
        return h5py.Dataset(self._node, readonly=True)

    def read(self, key: tuple[Any, ...]) -> Any:
        """Return the values that a key selects."""
        box = parts_of_box(key, self._shape) if self._shape else None
        if box is None or not all(box[1]):
            return self.dataset[key]
        begin, size, step, shape = box
        out = np.zeros(shape, self._dtype)
        try:
            stored, memory = self._spaces.pop()
        except IndexError:
            stored, memory = self._node.get_space(), h5py.h5s.create_simple((1,))
        stored.select_hyperslab(tuple(begin), tuple(size), tuple(step))
        memory.set_extent_simple((math.prod(size),))
        self._node.read(memory, stored, out, self._type)
        self._spaces.append((stored, memory))
        return out if out.shape else out[()]


@lru_cache(64)
def _pipeline(filters: tuple[Filter, ...]) -> Any:
    core = load_core()
    return None if core is None else core.filters(filters)


def _decoded(
    node: h5py.h5d.DatasetID,
    stored: Stored,
    shape: tuple[int, ...],
    selection: Selection,
) -> NDArray[Any] | None:
    """Return the selected values of chunks with filters; None if the core has to read them."""
    chunk, dtype = stored.chunk_shape, stored.dtype
    is_possible = stored.is_numpys and selection.mask is None and len(shape) <= MAX_RANK
    pipeline = _pipeline(stored.filters)
    if not is_possible or pipeline is None or chunk is None:
        return None
    box = selection.bounds
    cells = [
        range(begin // n, (begin + (size - 1) * step) // n + 1)
        for begin, size, step, n in zip(*box[:3], chunk, strict=True)
    ]
    numbers = list(map(len, cells))
    count = math.prod(numbers)
    if count > _MOST_CHUNKS or count * math.prod(chunk) * dtype.itemsize > _DECODED_NBYTES:
        return None
    ends = [some.stop * n for some, n in zip(cells, chunk, strict=True)]
    if any(map(operator.gt, ends, shape)) and edges_are_raw(node.get_create_plist()):
        return None
    whole = np.empty((count, *chunk), dtype)
    corners = [
        c * n for cell in itertools.product(*cells) for c, n in zip(cell, chunk, strict=True)
    ]
    if not _decode(node, corners, pipeline, len(stored.filters), whole):
        return None
    if count > numbers[0]:  # neighbours along other dimensions are not adjacent in memory
        axes = [at + part * len(chunk) for at in range(len(chunk)) for part in range(2)]
        whole = whole.reshape(*numbers, *chunk).transpose(axes)
    whole = whole.reshape(list(map(operator.mul, numbers, chunk)))
    if whole.shape == selection.shape:
        return whole
    begin = [b - some.start * n for b, some, n in zip(box.begin, cells, chunk, strict=True)]
    several = zip(begin, box.size, box.step, strict=True)
    part = whole[tuple(slice(b, b + (size - 1) * by + 1, by) for b, size, by in several)]
    return selection.taken(part.reshape(box.shape)).copy()


def _decode(
    node: h5py.h5d.DatasetID,
    corners: list[int],
    pipeline: Any,
    num_filters: int,
    out: NDArray[Any],
) -> bool:
    """Decode chunks into an array; False if one is not stored, or damaged."""
    core, functions = load_core(), _functions()
    if core is None or not all(functions):
        return False
    try:
        scratch = _scratches.pop()
    except IndexError:
        scratch = Scratch.allocate(_ENCODED_NBYTES, 0, _ENCODED_NBYTES)
    worker = ctypes.byref(scratch.worker(core).struct)
    count, *chunk = out.shape
    found = (ctypes.c_int64 * (2 * count))()
    where = (ctypes.c_uint64 * len(corners))(*corners)
    with h5py._objects.phil:
        done = core.fetch_chunks(worker, *functions, node.id, where, len(chunk), count, found)
    if done:
        to = _memory(out), num_filters, found, count, out.nbytes // count  # type: ignore[arg-type]
        done = core.decode_fetched(pipeline, worker, *to)
    _scratches.append(scratch)
    return bool(done)


@cache
def _functions() -> tuple[int, int]:
    """Return the addresses of HDF5's functions to look up and read chunks; 0 if unknown."""
    read = function_address("H5Dread_chunk1") or function_address("H5Dread_chunk")
    return function_address(LOOK_UP), read
