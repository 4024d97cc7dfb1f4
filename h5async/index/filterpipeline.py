"""Reads the filter pipeline of a dataset, and checks that it can be decoded.

Also adds a filter that converts stored elements to NumPy's as chunks are decoded. Contiguous values
become chunks of some rows for that.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import h5py
import numpy as np

from h5async.codec.corefilters import CONVERSION
from h5async.codec.filters import Filter, is_known_to_hdf5
from h5async.core.binding import can_decode
from h5async.errors import DatasetError, ReadError
from h5async.index.chunkindex import TooManyChunksError, applies_any
from h5async.index.chunktable import ChunkTable, repeated
from h5async.index.hdf5 import DONT_FILTER_PARTIAL_CHUNKS, NotDirectError, chunk_options
from h5async.index.layout import DatasetLayout
from h5async.index.opendataset import Opened
from h5async.system.interruptions import suppressing

_UNIT_NBYTES = 1 << 16  # of contiguous values that are converted at a time
_MOST_UNITS = 1 << 20
_MOST_FILTERS = 31  # beside it: limited by the bits of a filter mask


def filters_of(plist: h5py.h5p.PropDCID) -> tuple[Filter, ...]:
    """Return the pipeline, in the order of writing."""
    found = (plist.get_filter(i) for i in range(plist.get_nfilters()))
    return tuple(
        Filter(number, tuple(parameters), name.decode("utf-8", "replace").rstrip("\0"))
        for number, _flags, parameters, name in found
    )


def edges_are_raw(dataset: Opened) -> bool:
    """Return whether chunks that reach over the dataset's edge are not filtered.

    NotDirectError if HDF5 does not say so, and it matters.
    """
    if all(n % c == 0 for n, c in zip(dataset.extents, dataset.chunks, strict=True)):
        return False
    return bool(chunk_options(dataset.plist) & DONT_FILTER_PARTIAL_CHUNKS)


def require_filters(layout: DatasetLayout, dataset: Opened, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that is not available.

    A filter is available if the core decodes it, or h5py has it, perhaps from hdf5plugin. Filters
    that no chunk uses do not matter.
    """
    missing = unavailable(layout.filters)
    if missing and applies_any(dataset, missing, layout.has_raw_edges):
        raise _is_not_available(layout.filters[missing[0]], where)


def require_filters_of_hdf5(layout: DatasetLayout, dataset: Opened | None, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that HDF5 does not have.

    The layout is of a dataset to be read through h5py, even if the core could decode it: `dataset`,
    or None if its chunk table says which filters were used.
    """
    missing = [bit for bit, entry in enumerate(layout.filters) if not is_known_to_hdf5(entry)]
    if not missing or not layout.chunk_shape:
        return
    if dataset is not None:
        with suppressing(TooManyChunksError):
            if not applies_any(dataset, missing, layout.has_raw_edges):
                return
    elif layout.chunks is not None:
        bits = np.uint32(sum(1 << bit for bit in missing))
        if not (~layout.chunks.filter_mask & bits).any():
            return
    raise _is_not_available(layout.filters[missing[0]], where)


def left_to_hdf5(layout: DatasetLayout, reason: str) -> DatasetLayout:
    """Return the layout of the same dataset, read through h5py.

    DatasetError if HDF5 does not have a filter that it needs.
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


def refuse_filters_of_hdf5(layout: DatasetLayout, dataset: Opened) -> None:
    """Raise `NotDirectError` if a chunk was written with a filter that only HDF5 decodes.

    Its mere presence in the pipeline does not matter: filters that cannot process the data, such as
    shuffle with variable-length elements, are skipped when a chunk is written.
    """
    theirs = undecodable(layout.filters)
    theirs = [bit for bit in theirs if is_known_to_hdf5(layout.filters[bit])]
    if theirs and applies_any(dataset, theirs, layout.has_raw_edges):
        entry = layout.filters[theirs[0]]
        raise NotDirectError(f"filter {entry.number} ({entry.label}) is decoded by HDF5")


def undecodable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that the core cannot decode."""
    return [bit for bit, entry in enumerate(filters) if not can_decode(entry)]


def unavailable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that neither the core nor HDF5 can decode."""
    return [bit for bit in undecodable(filters) if not is_known_to_hdf5(filters[bit])]


def require_whole(chunks: ChunkTable, layout: DatasetLayout, where: str) -> None:
    """Reject unfiltered chunks of another length than a chunk; HDF5 would read past them."""
    expected = math.prod(layout.chunk_shape) * layout.dtype.itemsize
    bad = np.flatnonzero(chunks.nbytes != expected)
    if bad.size:
        raise ReadError(
            f"{where}: no filter was applied to the chunk at byte {chunks.offset[bad[0]]}; expected"
            f" {expected} bytes, got {chunks.nbytes[bad[0]]}; the file is damaged"
        )


def require_lengths(filters: tuple[Filter, ...], chunk_nbytes: int, where: str) -> None:
    """Reject client data with another length; HDF5 would return uninitialized memory."""
    for entry in filters if chunk_nbytes else ():
        stated = entry.stated_chunk_nbytes
        if stated not in (None, chunk_nbytes):
            raise ReadError(
                f"{where}: its chunks have {chunk_nbytes} bytes, but the client data of its filter"
                f" {entry.label} say {stated}; its metadata are damaged"
            )


def converted(layout: DatasetLayout, parameters: tuple[int, ...]) -> DatasetLayout:
    """Return a layout whose chunks are converted by the filter with these parameters.

    NotDirectError if contiguous values would be cut into too many units.
    """
    conversion = Filter(CONVERSION, parameters, "conversion")
    if layout.chunks is not None:
        if len(layout.filters) >= _MOST_FILTERS:
            raise NotDirectError("as many filters as HDF5 allows, and a conversion")
        table = layout.chunks
        mask = table.filter_mask << np.uint32(1)
        if table.filter_mask.strides == (0,):
            mask = repeated(int(mask[0]), mask.size, "u4")
        return layout.changed(
            filters=(conversion, *layout.filters), chunks=replace(table, filter_mask=mask)
        )
    return _in_units(layout, conversion)


def _in_units(layout: DatasetLayout, conversion: Filter) -> DatasetLayout:
    rows, *rest = [int(extent) or 1 for extent in layout.shape]
    row_nbytes = math.prod(rest) * conversion.parameters[1]
    most = min(rows, max(1, _UNIT_NBYTES // row_nbytes))
    size = max(n for n in range(1, most + 1) if rows % n == 0)
    count = rows // size if layout.offset >= 0 and 0 not in layout.shape else 0
    if count > _MOST_UNITS:
        raise NotDirectError("a stored type to convert, of rows that make no equal units")
    nbytes = size * row_nbytes
    offset = layout.offset + nbytes * np.arange(count, dtype=np.int64)
    return layout.changed(
        chunk_shape=(size, *rest),
        filters=(conversion,),
        chunks=ChunkTable(
            None if count == rows // size else np.zeros(0, np.int64),
            offset,
            repeated(nbytes, count, "i8"),
            repeated(0, count, "u4"),
        ),
    )
