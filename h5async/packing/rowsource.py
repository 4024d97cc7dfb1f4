"""Reads rows of a dataset in one or several files, in any order, a block at a time.

Rows of ordinary datatypes are read by an `AsyncReader`, whose threads decode them; others by HDF5,
in its own in-memory form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5s, h5t
from numpy.typing import NDArray

from h5async.config import Field
from h5async.errors import DatasetError
from h5async.index.chunks import filters_of, read_chunk_table
from h5async.index.hdf5 import NotDirectError, Opened, edges_are_raw
from h5async.index.storedtypes import describe
from h5async.index.tables import ChunkTable
from h5async.io.hdf5files import HDF5File
from h5async.order.selection import Int64s, Selection
from h5async.packing.objects import stored_filters
from h5async.packing.rawvalues import RawValues, is_by_hdf5, raw_fill
from h5async.reader.asyncreader import AsyncReader
from h5async.spelling import name_bytes, name_text

_BY_READER_NBYTES = 4 << 20  # HDF5 reads less than this before a reader is open
_MOST_NUMBERS = 1 << 22  # sample numbers passed to one reader
_OF_NUMBERS = ("units", "calendar", "scale_factor", "add_offset")  # attributes that give meaning
Extents = tuple[int, ...]


class Block(NamedTuple):
    """Rows `begin` to `stop` of a dataset; `corner` and `sizes` bound the other dimensions."""

    begin: int
    stop: int
    corner: Extents
    sizes: Extents

    def shape(self, axis: int) -> Extents:
        """Return the shape of the block in a dataset whose dimension `axis` counts the rows."""
        return (*self.sizes[:axis], self.stop - self.begin, *self.sizes[axis + 1 :])

    def offset(self, axis: int) -> Extents:
        """Return the offset of the block in the dataset."""
        return (*self.corner[:axis], self.begin, *self.corner[axis + 1 :])


class RowSource:
    """The rows of the dataset at `path`, along dimension `axis`, in all `files` together.

    `maps[i]` gives the new number for each number stored in file i; -1 stays -1.
    """

    def __init__(
        self,
        files: Sequence[HDF5File],
        path: str,
        axis: int,
        maps: Sequence[Int64s] | None = None,
    ) -> None:
        self.files, self.path, self.axis = files, path, axis
        self.datasets = [Opened(_dataset(file, path), file.source) for file in files]
        self.first = self.datasets[0]
        self.counts = [one.extents[axis] for one in self.datasets]
        self.starts = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))
        self._maps = None if maps is None else [np.append(one, -1) for one in maps]
        self.kind = self.first.type
        if maps is not None:  # choose a datatype that fits the numbers of all files
            self.kind = max((one.type for one in self.datasets), key=h5t.TypeID.get_size)
        self.itemsize = self.kind.get_size()
        self._is_of_one_type = len({one.encoded_type for one in self.datasets}) == 1
        for file, one in zip(files, self.datasets, strict=True):
            same = one.encoded_type == self.first.encoded_type or maps is not None
            if not same or self._row(one) != self._row(self.first):
                raise DatasetError(
                    f'{file.filename}: dataset "{path}" has rows of another shape or type than'
                    f" that of {files[0].filename}, and cannot be joined with it"
                )
            meant = [_meaning(dataset.id) for dataset in (one, self.first)]
            if meant[0] != meant[1]:
                raise DatasetError(
                    f'{file.filename}: dataset "{path}" has the attributes {meant[0]}, and that of'
                    f" {files[0].filename} has {meant[1]}: convert its values"
                )

    def _row(self, dataset: Opened) -> Extents:
        shape = dataset.extents
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    @property
    def where(self) -> str:
        """The prefix for error messages."""
        return f'{self.files[0].filename}: dataset "{self.path}"'

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of elements; if there is none, h5py raises an exception of any type."""
        return describe(self.first.encoded_type).dtype

    @property
    def is_plain(self) -> bool:
        """Whether a reader delivers the stored bytes of elements, up to byte order."""
        if not self._is_of_one_type:
            return False
        try:
            found = describe(self.first.encoded_type)
        except Exception:  # h5py has no dtype for it
            return False
        base = found.unpacked[0]
        # Readers change the bytes of bools, the padding of compounds, and the ends of strings.
        changes = base.kind == "b" or base.fields or found.text
        return found.is_numpys and not changes and not base.hasobject

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self._row(self.first)) * int(self.itemsize)

    @property
    def is_stored_alike(self) -> bool:
        """Whether the datasets of all files have the same chunks, filters and fill values."""
        kinds = {
            (
                one.chunks,
                one.chunks and edges_are_raw(one.plist),
                raw_fill(one.id, np.dtype(f"V{self.itemsize}")).tobytes(),
                *stored_filters(one.plist),
            )
            for one in self.datasets
        }
        return len(kinds) == 1

    @cached_property
    def tables(self) -> list[ChunkTable] | None:
        """The chunk table of each dataset; None if stored chunks cannot be copied."""
        if is_by_hdf5(self.kind) or self._maps is not None or not self.is_stored_alike:
            return None
        try:
            return [
                read_chunk_table(one, filters_of(one.plist), one.edges_are_raw, self.where)
                for one in self.datasets
            ]
        except NotDirectError:
            return None

    def blocks(
        self,
        selection: Selection,
        blocks: Sequence[Block],
        dtype: np.dtype[Any] | None,
        options: dict[str, Any],
    ) -> Iterator[NDArray[Any]]:
        """Yield the values of blocks, as stored or converted to `dtype`.

        Row numbers are positions in the selection. An array is valid until the next one.
        """
        stored = dtype if self._maps is None else self.kind.dtype
        nbytes = sum(math.prod(one.shape(self.axis)) for one in blocks) * self.itemsize
        found = self._by_hdf5(selection, blocks, stored)
        if self.is_plain and nbytes > _BY_READER_NBYTES:
            found = self._by_reader(selection, blocks, stored, options)
        if self._maps is None:
            yield from found
            return
        for one, old in zip(blocks, found, strict=True):
            yield self._mapped(selection, one, old, dtype or self.dtype)

    def _mapped(
        self, selection: Selection, block: Block, old: NDArray[Any], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Return the new numbers for old ones; DatasetError if one is out of range."""
        _, which = self._samples(selection, block)
        new = np.zeros(len(which), dtype)
        for number, table in enumerate(self._maps or ()):
            here = which == number
            if (old[here] < -1).any() or (old[here] >= len(table) - 1).any():
                raise DatasetError(
                    f'{self.files[number].filename}: dataset "{self.path}" has numbers that are'
                    f" not below {len(table) - 1:,}: the file is damaged"
                )
            new[here] = table[old[here]]
        return new

    def _samples(self, selection: Selection, block: Block) -> tuple[Int64s, Int64s]:
        """Return the samples of a block, counted over all files, and their files' numbers."""
        samples = selection.samples(np.arange(block.begin, block.stop))
        return samples, np.searchsorted(self.starts, samples, side="right") - 1

    def _by_hdf5(
        self, selection: Selection, blocks: Sequence[Block], dtype: np.dtype[Any] | None
    ) -> Iterator[NDArray[Any]]:
        for one in blocks:
            with self.read(selection, one) as values:
                array = values.bytes.reshape(*one.shape(self.axis), self.itemsize)
                if dtype is None:
                    yield array.view(f"V{self.itemsize}")[..., 0]
                else:
                    yield array.view(self.kind.dtype)[..., 0].astype(dtype, copy=False)

    def _by_reader(
        self,
        selection: Selection,
        blocks: Sequence[Block],
        dtype: np.dtype[Any] | None,
        options: dict[str, Any],
    ) -> Iterator[NDArray[Any]]:
        """Yield blocks from readers, one for each run of blocks that cover the same columns."""
        axis, shape = self.axis, self.first.extents
        most = blocks[-1].stop if selection.is_range and blocks else _MOST_NUMBERS
        for _, run in itertools.groupby(blocks, lambda one: (one.corner, one.begin // most)):
            several = list(run)
            first = several[0]
            region: dict[Any, slice | str] = {
                d: slice(corner, corner + size)
                for d, (corner, size) in enumerate(zip(first.corner, first.sizes, strict=True))
                if d != axis and size != shape[d]
            }
            samples = _numbered(selection, first.begin, several[-1].stop)
            field = Field(self.path, num_dim=axis, region=region or None, dtype=dtype)
            stored = describe(self.first.encoded_type).unpacked[0] if dtype is None else dtype
            rows = first.stop - first.begin
            reading = {**options, "fields": {"values": field}, "batch_size": rows}
            with AsyncReader(indices=samples, **reading) as reader:
                for batch, one in zip(reader, several, strict=True):
                    assert batch.size == one.stop - one.begin
                    # (Converted to the byte order of the file: batches have the native one.)
                    yield np.moveaxis(batch[0].astype(stored, copy=False), 0, axis)

    def read(self, selection: Selection, block: Block) -> RawValues:
        """Return the values of a block in HDF5's own form, read in runs of adjacent rows."""
        shape, axis = block.shape(self.axis), self.axis
        values = RawValues(self.kind, math.prod(shape), self.where)
        samples, which = self._samples(selection, block)
        breaks = np.flatnonzero((np.diff(samples) != 1) | (np.diff(which) != 0)) + 1
        bounds = [0, *breaks.tolist(), len(samples)] if len(samples) else [0]
        memory = h5s.create_simple(shape)
        for begin, stop in itertools.pairwise(bounds):
            dataset, row = self.datasets[which[begin]], samples[begin] - self.starts[which[begin]]
            count = (*shape[:axis], stop - begin, *shape[axis + 1 :])
            memory.select_hyperslab(tuple(begin * (d == axis) for d in range(len(shape))), count)
            selected = dataset.id.get_space()
            corner = (*block.corner[:axis], int(row), *block.corner[axis + 1 :])
            selected.select_hyperslab(corner, count)
            values.read(dataset.id, memory, selected)
        return values


def _numbered(selection: Selection, begin: int, stop: int) -> Any:
    """Return the samples at positions, as the `indices` of a reader."""
    if selection.is_range and selection.step == 1:
        return slice(selection.start + begin, selection.start + stop)
    return selection.samples(np.arange(begin, stop))


def _meaning(dataset: h5d.DatasetID) -> dict[str, str]:
    """Return the attributes that give numbers a meaning, in NetCDF and packed files."""
    attributes = h5py.Dataset(dataset).attrs
    found = {name: attributes[name] for name in _OF_NUMBERS if name in attributes}
    return {name: name_text(v) if isinstance(v, bytes) else str(v) for name, v in found.items()}


def _dataset(file: HDF5File, path: str) -> h5py.h5d.DatasetID:
    try:
        found = h5py.h5o.open(file.id, name_bytes(path))
    except KeyError:
        found = None
    if not isinstance(found, h5py.h5d.DatasetID):
        raise DatasetError(f'{file.filename}: there is no dataset "{path}"')
    return found
