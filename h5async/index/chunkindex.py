"""Reads and validates the chunk index of a dataset, and sorts it to a `ChunkTable`."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Sequence
from dataclasses import replace

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.errors import H5AsyncError, ReadError
from h5async.index.chunktable import ChunkTable, grid_of
from h5async.index.hdf5 import (
    B_TREE_V1,
    EXTENSIBLE_ARRAY,
    FIXED_ARRAY,
    IMPLICIT,
    index_kind,
    stored_nbytes,
)
from h5async.index.obstacles import NotDirectError

_MANY_CHUNKS = 1 << 24
_SUPERBLOCK_NBYTES = 48  # at least
_LOOKUPS = 256
_ALL_FILTERS = 0xFFFFFFFF
_BLOCK_CHUNKS = 1 << 13


class TooManyChunksError(NotDirectError):
    """HDF5 would visit more chunks than the file has room to list."""


def require_true_coordinates(dataset: h5py.Dataset) -> None:
    """Refuse an index of which HDF5 reports wrong coordinates.

    Where just one dimension is unlimited, and it is not the first, the extensible array has another
    order of dimensions, and HDF5 does not permute the coordinates back.

    Raises
    ------
    NotDirectError
        If the dataset has such an index, or may have one.
    """
    unlimited = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    if len(unlimited) != 1 or unlimited == [0]:
        return
    if index_kind(dataset) in (EXTENSIBLE_ARRAY, -1):
        raise NotDirectError(f"only dimension {unlimited[0]} is unlimited: HDF5 misreports chunks")


def applies_any(dataset: h5py.Dataset, positions: Sequence[int], has_raw_edges: bool) -> bool:
    """Tell whether a chunk was written with any of the filters at some positions of the pipeline.

    Most often the first chunk was, and then no other is visited.

    Raises
    ------
    TooManyChunksError
        If there are more chunks than the file has room to list.
    """
    _require_room(dataset)
    wanted = sum(1 << position for position in positions)
    shape, chunk = dataset.shape, dataset.chunks

    def applies(info: h5py.h5d.StoreInfo) -> bool | None:
        corner, mask, _offset, _nbytes = info
        ends = zip(corner, chunk, shape, strict=True)
        is_raw = has_raw_edges and any(at + size > extent for at, size, extent in ends)
        return True if wanted & ~mask and not is_raw else None

    return bool(math.prod(shape) and dataset.id.chunk_iter(applies))


def without_filters(
    table: ChunkTable, filters: tuple[Filter, ...], positions: Sequence[int]
) -> tuple[ChunkTable, tuple[Filter, ...]]:
    """Return a chunk table, and its filters, without those filters that no chunk was written with.

    Parameters
    ----------
    table, filters
        All there are.
    positions
        Of these filters in the pipeline.
    """
    if not positions:
        return table, filters
    kept = [bit for bit in range(len(filters)) if bit not in positions]
    mask = np.zeros_like(table.filter_mask)
    for bit, before in enumerate(kept):
        mask |= (table.filter_mask >> np.uint32(before) & np.uint32(1)) << np.uint32(bit)
    return replace(table, filter_mask=mask), tuple(filters[bit] for bit in kept)


def read_chunk_table(
    dataset: h5py.Dataset, filters: tuple[Filter, ...], has_raw_edges: bool, where: str
) -> ChunkTable:
    """Read where the chunks of a dataset lie.

    Raises
    ------
    ReadError
        If the index is damaged, or points outside the file.
    NotDirectError
        If HDF5 reports chunks that cannot exist; everything else was checked then.
    """
    _require_room(dataset)
    table = _Table(dataset, filters, has_raw_edges, where)
    records: list[int] = []
    append = records.extend

    def collect() -> Generator[None, h5py.h5d.StoreInfo, None]:
        while True:  # entering a generator takes half as long as calling a function
            for _ in range(_BLOCK_CHUNKS):
                corner, mask, offset, nbytes = yield
                append(corner)
                append((offset, nbytes, mask))
            table.add(records)
            records.clear()

    collector = collect()
    next(collector)
    try:
        if math.prod(dataset.shape):
            dataset.id.chunk_iter(collector.send)
    except (TypeError, RuntimeError, OSError) as error:
        if isinstance(error, H5AsyncError):
            raise
        raise ReadError(f"{where}: its chunk index cannot be read ({error})") from error
    table.add(records)
    found = table.sorted()
    _require_agreement(dataset, found, table.is_ascending, where)
    if table.obstacle is not None:
        raise NotDirectError(table.obstacle)
    return found


def _require_room(dataset: h5py.Dataset) -> None:
    """Leave a dataset to h5py that has more chunks than the file can list: HDF5 would visit all.

    (None of them may have been written.)

    Raises
    ------
    TooManyChunksError
        If there are.
    """
    count = math.prod(grid_of(dataset.shape, dataset.chunks))
    kind = index_kind(dataset) if count > _MANY_CHUNKS else B_TREE_V1
    each = {IMPLICIT: math.prod(dataset.chunks), FIXED_ARRAY: 4, EXTENSIBLE_ARRAY: 4}
    end = os.fstat(dataset.file.id.get_vfd_handle()).st_size
    if count * each.get(kind, 0) > end:
        raise TooManyChunksError(f"{count} chunks, more than a file of {end} bytes can list")


def _require_agreement(
    dataset: h5py.Dataset, table: ChunkTable, is_ascending: bool, where: str
) -> None:
    """Refuse a version 1 B-tree that contradicts itself, since it has no checksum.

    Its chunks must come in the order of their keys, and HDF5 must find each chunk by its key: all
    of few chunks are looked up, and some of many.

    Raises
    ------
    ReadError
        If one of these does not hold.
    """
    if index_kind(dataset) != B_TREE_V1:
        return
    if not is_ascending:
        raise ReadError(f"{where}: the keys of its chunk index are not in order; it is damaged")
    grid = grid_of(dataset.shape, dataset.chunks)
    step = -(-table.offset.size // _LOOKUPS) or 1
    for item in range(0, table.offset.size, step):
        at = item if table.index is None else int(table.index[item])
        corner = tuple(
            int(place) * extent
            for place, extent in zip(np.unravel_index(at, grid), dataset.chunks, strict=True)
        )
        # (`get_chunk_info_by_coord` visits all chunks, and would find it.)
        if stored_nbytes(dataset, corner) != table.nbytes[item]:
            raise ReadError(
                f"{where}, chunk {corner}: the chunk index lists it, but HDF5 does not find it;"
                " the file is damaged"
            )


class _Table:
    """Chunks as HDF5 reports them, checked; added in blocks, so that memory stays small."""

    def __init__(
        self, dataset: h5py.Dataset, filters: tuple[Filter, ...], has_raw_edges: bool, where: str
    ) -> None:
        self._where = where
        self._chunk = np.asarray(dataset.chunks, np.int64)
        self._shape = np.asarray(dataset.shape, np.int64)
        self._grid = grid_of(dataset.shape, dataset.chunks)
        self._end = os.fstat(dataset.file.id.get_vfd_handle()).st_size
        self._has_raw_edges = has_raw_edges
        self._nbytes_of_all = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
        self._has_filters = bool(filters)
        self.is_ascending = True  # as HDF5 reported the chunks
        self.obstacle: str | None = None  # why chunks cannot be read by this table
        self._count = 0
        self._index, self._offset, self._nbytes = (np.empty(0, np.int64) for _ in range(3))
        self._mask = np.empty(0, np.uint32)

    def add(self, records: list[int]) -> None:
        """Add chunks, each as corner, offset, bytes and filter mask."""
        rank = self._shape.size
        table = np.array(records, np.int64).reshape(-1, rank + 3)
        corners, offset, nbytes = table[:, :rank], table[:, rank], table[:, rank + 1]
        mask = table[:, rank + 2].astype(np.uint32)
        is_raw = np.full(len(table), not self._has_filters)
        if self._has_raw_edges:
            # Such chunks are stored raw while their mask says that they were filtered.
            is_raw |= (corners + self._chunk > self._shape).any(axis=1)
            mask[is_raw] = _ALL_FILTERS
        self._check(corners, offset, nbytes, is_raw)
        if ((corners % self._chunk != 0) | (corners < 0) | (corners >= self._shape)).any():
            self.obstacle = "HDF5 reports chunks outside the dataset"
            corners = np.clip(corners, 0, self._shape - 1)
        index = np.ravel_multi_index(tuple((corners // self._chunk).T), self._grid)
        where = slice(self._count, self._count + len(table))
        self._count = where.stop
        if where.stop > self._index.size:
            self._resize(where.stop + self._index.size // 8)
        self._index[where], self._mask[where] = index, mask
        self._offset[where], self._nbytes[where] = offset, nbytes

    def sorted(self) -> ChunkTable:
        """Return the table in the order of the grid."""
        self._resize(self._count)
        index, offset, nbytes, mask = self._index, self._offset, self._nbytes, self._mask
        self._check_apart(offset, nbytes)
        if not (index[1:] > index[:-1]).all():
            self.is_ascending = False
            order = np.argsort(index, kind="stable")
            index, offset, nbytes, mask = index[order], offset[order], nbytes[order], mask[order]
        if (index[1:] == index[:-1]).any():
            self.obstacle = self.obstacle or "HDF5 reports a chunk twice"
        complete = index.size == math.prod(self._grid)
        return ChunkTable(None if complete else index, offset, nbytes, mask)

    def _check_apart(self, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        """Refuse chunks that overlap each other or the file's superblock."""
        if not (offset[1:] >= offset[:-1] + nbytes[:-1]).all():
            order = np.argsort(offset, kind="stable")
            offset, nbytes = offset[order], nbytes[order]
        bad = np.flatnonzero(offset[1:] < offset[:-1] + nbytes[:-1])
        if bad.size or (offset.size and offset[0] < _SUPERBLOCK_NBYTES):
            at = offset[bad[0] + 1] if bad.size else offset[0]
            what = "another one" if bad.size else "the file's superblock"
            raise ReadError(
                f"{self._where}: a chunk at byte {at} overlaps {what}; the file is damaged"
            )

    def _resize(self, count: int) -> None:
        """Make room in place: a copy of all would double the memory for a moment."""
        for column in (self._index, self._offset, self._nbytes, self._mask):
            column.resize(count, refcheck=False)

    def _check(
        self,
        corners: NDArray[np.int64],
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        is_raw: NDArray[np.bool_],
    ) -> None:
        end = self._end
        bad = np.flatnonzero((offset < 0) | (nbytes < 0) | (nbytes > end) | (offset > end - nbytes))
        if bad.size:
            at = tuple(corners[bad[0]].tolist())
            raise ReadError(
                f"{self._where}, chunk {at}: {nbytes[bad[0]]} bytes at byte {offset[bad[0]]} do not"
                f" lie in the file, which has {end} bytes; it was cut short or is damaged"
            )
        expected = self._nbytes_of_all
        bad = np.flatnonzero(np.where(is_raw, nbytes != expected, nbytes == 0))
        if bad.size:
            at = tuple(corners[bad[0]].tolist())
            raise ReadError(
                f"{self._where}, chunk {at}: expected"
                f" {expected if is_raw[bad[0]] else 'some'} bytes, got {nbytes[bad[0]]}; the file"
                " is damaged"
            )
