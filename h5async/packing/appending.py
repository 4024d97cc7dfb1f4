"""Appends values to the columns of an open file: values enter, chunks leave to the writer.

A column of fixed size is cut into whole chunks; the rows of the last chunk, which is not full yet,
are kept, and written at `flush`. So a file can be continued at any sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import set_filters
from h5async.codec.filters import Filter, is_known_to_hdf5
from h5async.core.binding import address
from h5async.index.chunks import filters_of
from h5async.index.groupfields import KIND
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.rawvalues import HVL_NBYTES, write_raw
from h5async.packing.schema import Coded, Column, Values, nbytes_of
from h5async.spelling import name_bytes, name_text

_REFERENCES = 1024  # elements of variable length in a chunk


def appender(file: h5py.File, column: Column, writer: ChunkWriter, count: int) -> Appender:
    """Return what appends to the dataset of a column, which has `count` samples."""
    if column.form == "codes":
        return _CodesAppender(file[column.name], column, writer, count)
    kinds = {"array": _ChunkAppender, "varying": _VaryingAppender}
    if column.form in kinds:
        return kinds[column.form](file[column.name], column, writer, count)
    return Appender(file[column.name], column, writer, count)


def create(file: h5py.File, column: Column, chunk_samples: int, filters: Sequence[Filter]) -> None:
    """Create the empty dataset, or group, of a column."""
    name, is_array = column.name, column.form == "array"
    if column.form == "codes":  # as AnnData stores categories
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0"})
        group.attrs["ordered"] = False
        create(file, Column(f"{name}/codes", "array", column.dtype), chunk_samples, filters)
        create(file, Column(f"{name}/categories", "text", column.dtype), 1, ())
        return
    dtype = column.dtype
    if not is_array:
        dtype = h5py.string_dtype() if column.form == "text" else h5py.vlen_dtype(dtype)
    elif column.is_text:
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_obj_track_times(False)  # the same bytes at any time
    created.set_chunk((chunk_samples if is_array else _REFERENCES, *column.shape))
    set_filters(created, filters if is_array else ())
    space = h5py.h5s.create_simple((0, *column.shape), (h5py.h5s.UNLIMITED, *column.shape))
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    made = h5py.h5d.create(
        file.id, name_bytes(name), h5py.h5t.py_create(dtype, logical=True), space, created, links
    )
    dataset = h5py.Dataset(made)
    if column.units:
        dataset.attrs["units"] = column.units
    if column.kind:
        dataset.attrs[KIND] = column.kind


class Appender:
    """Appends samples of any length to a dataset of a variable-length datatype."""

    def __init__(self, node: Any, column: Column, writer: ChunkWriter, count: int) -> None:
        self._out, self.count = writer.open(node), count

    def append(self, values: Values) -> None:
        """Append values that fit the column."""
        nbytes, several = nbytes_of(values), np.empty(len(values), object)
        for number, one in enumerate(values):  # (NumPy would make a matrix of equal lengths)
            several[number] = one
        self._out.write((self.count,), several, nbytes)
        self.count += len(several)

    def flush(self) -> None:
        """Write what is kept."""


class _VaryingAppender(Appender):
    """Appends arrays of any length, which HDF5 copies from where they are."""

    def __init__(self, node: h5py.Dataset, column: Column, writer: ChunkWriter, count: int) -> None:
        super().__init__(node, column, writer, count)
        self._dataset, self._writer = node, writer

    def append(self, values: Values) -> None:
        self._writer.call(partial(self._write, self.count, values), nbytes_of(values))
        self.count += len(values)

    def _write(self, first: int, values: Any) -> None:
        self._dataset.resize(first + len(values), 0)
        elements = np.array([(one.size, address(one)) for one in values], np.uint64)
        write_raw(self._dataset.id, (first,), elements.view(f"V{HVL_NBYTES}")[:, 0])


class _ChunkAppender(Appender):
    """Appends samples of one size, in whole chunks."""

    def __init__(self, node: h5py.Dataset, column: Column, writer: ChunkWriter, count: int) -> None:
        super().__init__(node, column, writer, count)
        self._kept = np.empty(node.chunks, column.dtype)
        self._filled = count % len(self._kept)
        if self._filled:
            for entry in filters_of(node.id.get_create_plist()):
                is_known_to_hdf5(entry)  # also by a plugin, which this imports
            self._kept[: self._filled] = node[count - self._filled : count]

    def append(self, values: Values) -> None:
        assert isinstance(values, np.ndarray)
        rows, at = len(self._kept), 0
        if self._filled:
            at = min(rows - self._filled, len(values))
            self._keep(values[:at])
            if self._filled == rows:
                self.flush()
                self._kept, self._filled = np.empty_like(self._kept), 0
        end = at + (len(values) - at) // rows * rows
        if end > at:
            self._put(self.count, values[at:end])
            self.count += end - at
        self._keep(values[end:])

    def flush(self) -> None:
        if self._filled:
            self._put(self.count - self._filled, self._kept[: self._filled].copy())

    def _keep(self, values: NDArray[Any]) -> None:
        self._kept[self._filled : self._filled + len(values)] = values
        self._filled += len(values)
        self.count += len(values)

    def _put(self, first: int, values: NDArray[Any]) -> None:
        self._out.write((first, *[0] * (values.ndim - 1)), values)


class _CodesAppender(Appender):
    """Appends categories: their codes, and names that are new."""

    def __init__(self, node: h5py.Group, column: Column, writer: ChunkWriter, count: int) -> None:
        self.count = count
        names = [name_text(name) for name in node["categories"][:]]
        self._numbers = {name: number for number, name in enumerate(names)}
        codes = Column(f"{column.name}/codes", "array", column.dtype)
        self._codes = _ChunkAppender(node["codes"], codes, writer, count)
        self._names = Appender(node["categories"], column, writer, len(names))

    def append(self, values: Values) -> None:
        assert isinstance(values, Coded)
        names = [str(name) for name in values.categories]
        new = [name for name in dict.fromkeys(names) if name not in self._numbers]
        self._numbers |= {name: len(self._numbers) + n for n, name in enumerate(new)}
        if new:
            self._names.append([name_bytes(name) for name in new])
        united = np.array([*(self._numbers[name] for name in names), -1], np.int32)
        self._codes.append(united[values.codes])
        self.count += len(values.codes)

    def flush(self) -> None:
        self._codes.flush()
