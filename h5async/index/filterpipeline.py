"""Reads the filter pipeline of a dataset, and checks that someone can undo it."""

from __future__ import annotations

import contextlib
import importlib.util
import math

import h5py
import numpy as np

from h5async.codec.filters import Filter, is_known_to_hdf5
from h5async.core.binding import can_decode
from h5async.errors import DatasetError, ReadError
from h5async.index.chunkindex import TooManyChunksError, applies_any
from h5async.index.chunktable import ChunkTable
from h5async.index.hdf5 import DONT_FILTER_PARTIAL_CHUNKS, chunk_options
from h5async.index.layout import DatasetLayout
from h5async.index.obstacles import NotDirectError
from h5async.index.opendataset import Opened


def filters_of(plist: h5py.h5p.PropDCID) -> tuple[Filter, ...]:
    """Return the pipeline, in the order of writing."""
    found = (plist.get_filter(i) for i in range(plist.get_nfilters()))
    return tuple(
        Filter(number, tuple(parameters), name.decode("utf-8", "replace").rstrip("\0"))
        for number, _flags, parameters, name in found
    )


def edges_are_raw(dataset: Opened) -> bool:
    """Tell whether chunks that reach over the dataset's edge are not filtered.

    Raises
    ------
    NotDirectError
        If HDF5 does not say so, and it matters.
    """
    if all(n % c == 0 for n, c in zip(dataset.extents, dataset.chunks, strict=True)):
        return False
    return bool(chunk_options(dataset.plist) & DONT_FILTER_PARTIAL_CHUNKS)


def require_filters(layout: DatasetLayout, dataset: Opened, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that is not available.

    It is available if the core decodes it, or if h5py has it, which gets more from hdf5plugin.
    Other filters that are not available do not matter.
    """
    missing = unavailable(layout.filters)
    if missing and applies_any(dataset, missing, layout.has_raw_edges):
        raise _is_not_available(layout.filters[missing[0]], where)


def require_filters_of_hdf5(layout: DatasetLayout, dataset: Opened | None, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that HDF5 does not have.

    Parameters
    ----------
    layout
        Of a dataset that is to be read through h5py, whatever is decoded here.
    dataset
        The same, open; None: its chunk table says which filters were used.
    """
    missing = _unknown_to_hdf5(layout.filters) if layout.chunk_shape else []
    if not missing:
        return
    if dataset is not None:
        with contextlib.suppress(TooManyChunksError):
            if not applies_any(dataset, missing, layout.has_raw_edges):
                return
    elif layout.chunks is not None:
        bits = np.uint32(sum(1 << bit for bit in missing))
        if not (~layout.chunks.filter_mask & bits).any():
            return
    raise _is_not_available(layout.filters[missing[0]], where)


def left_to_hdf5(layout: DatasetLayout, reason: str) -> DatasetLayout:
    """Return the layout of the same dataset, read through h5py.

    Raises
    ------
    DatasetError
        If HDF5 does not have a filter that it needs.
    """
    for origin in layout.origins():
        require_filters_of_hdf5(origin, None, f'{origin.file}: dataset "{origin.path}"')
    return layout.through_h5py(reason)


def _is_not_available(entry: Filter, where: str) -> DatasetError:
    remedy = "hdf5plugin does not have it: let HDF5_PLUGIN_PATH name a folder with its plugin"
    if importlib.util.find_spec("hdf5plugin") is None:
        remedy = "try: pip install hdf5plugin"
    by = "to HDF5, through which it is read" if can_decode(entry) else ""
    return DatasetError(
        f"{where} is compressed with filter {entry.number} ({entry.label}), which is not"
        f" available{by and ' '}{by}; {remedy}"
    )


def is_hdf5s(entry: Filter) -> bool:
    """Tell whether HDF5 can undo a filter, and the core cannot."""
    return not can_decode(entry) and is_known_to_hdf5(entry)


def refuse_filters_of_hdf5(layout: DatasetLayout, dataset: Opened) -> None:
    """Raise `NotDirectError` if a chunk was written with a filter that HDF5 has to undo.

    In the pipeline alone, it does not matter: a filter that could do nothing with the data, as
    shuffle with elements of variable length, is passed over as a chunk is written.
    """
    theirs = [bit for bit, entry in enumerate(layout.filters) if is_hdf5s(entry)]
    if theirs and applies_any(dataset, theirs, layout.has_raw_edges):
        entry = layout.filters[theirs[0]]
        raise NotDirectError(f"filter {entry.number} ({entry.label}) is decoded by HDF5")


def undecodable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that the core cannot undo."""
    return [bit for bit, entry in enumerate(filters) if not can_decode(entry)]


def unavailable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that neither the core nor HDF5 can undo."""
    return [
        bit
        for bit, entry in enumerate(filters)
        if not can_decode(entry) and not is_known_to_hdf5(entry)
    ]


def _unknown_to_hdf5(filters: tuple[Filter, ...]) -> list[int]:
    return [bit for bit, entry in enumerate(filters) if not is_known_to_hdf5(entry)]


def require_whole(chunks: ChunkTable, layout: DatasetLayout, where: str) -> None:
    """Refuse unfiltered chunks of another length than a chunk has; HDF5 would read past them."""
    expected = math.prod(layout.chunk_shape) * layout.dtype.itemsize
    bad = np.flatnonzero(chunks.nbytes != expected)
    if bad.size:
        raise ReadError(
            f"{where}: no filter was applied to the chunk at byte {chunks.offset[bad[0]]}; expected"
            f" {expected} bytes, got {chunks.nbytes[bad[0]]}; the file is damaged"
        )


def require_lengths(filters: tuple[Filter, ...], chunk_nbytes: int, where: str) -> None:
    """Refuse client data that state another length; HDF5 would deliver uninitialized memory."""
    for entry in filters if chunk_nbytes else ():
        stated = entry.stated_chunk_nbytes
        if stated not in (None, chunk_nbytes):
            raise ReadError(
                f"{where}: its chunks have {chunk_nbytes} bytes, but the client data of its filter"
                f" {entry.label} say {stated}; its metadata are damaged"
            )
