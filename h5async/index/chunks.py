"""Reads the filter pipeline and the chunk index of a dataset, and checks both.

Also adds a filter that converts stored elements to NumPy's as chunks are decoded; for this,
contiguous values are split into units of several rows, which are treated as chunks.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import CONVERSION, Filter, is_known_to_hdf5
from h5async.core.binding import can_decode
from h5async.errors import DamagedError, DatasetError
from h5async.index.hdf5 import (
    B_TREE_V1,
    EXTENSIBLE_ARRAY,
    FIXED_ARRAY,
    IMPLICIT,
    NotDirectError,
    Opened,
    reading,
)
from h5async.index.layout import DatasetLayout
from h5async.index.tables import ChunkTable, grid_of, repeated, shortened
from h5async.index.visits import (
    MISREPORTED,
    NOT_LOOKED_UP,
    Visited,
    first_unlike,
    positions_of,
    visit_chunks,
)
from h5async.system.interruptions import suppressing

_MANY_CHUNKS = 1 << 24
_SUPERBLOCK_NBYTES = 48  # at least
_ALL_FILTERS = 0xFFFFFFFF
_UNIT_NBYTES = 1 << 16  # of contiguous values that are converted at a time
_MOST_UNITS = 1 << 20
_MOST_FILTERS = 31  # besides the conversion: a filter mask has 32 bits


class TooManyChunksError(NotDirectError):
    """HDF5 would visit more chunks than the file has room to list."""


def filters_of(plist: h5py.h5p.PropDCID) -> tuple[Filter, ...]:
    """Return the pipeline, in the order of writing."""
    found = (plist.get_filter(i) for i in range(plist.get_nfilters()))
    return tuple(
        Filter(number, tuple(parameters), name.decode("utf-8", "replace").rstrip("\0"))
        for number, _flags, parameters, name in found
    )


def with_checked_filters(layout: DatasetLayout, dataset: Opened, where: str) -> DatasetLayout:
    """Check the filters of a dataset, and find out whether its edge chunks are raw.

    `ReadError` if a filter's client data state another chunk size: HDF5 would return uninitialized
    memory. `DatasetError` if a chunk was written with a filter that neither the core nor h5py has.
    """
    if not layout.chunk_shape or not layout.filters:
        return layout
    chunk_nbytes = math.prod(dataset.chunks) * layout.stored_itemsize
    for entry in layout.filters if chunk_nbytes else ():
        stated = entry.stated_chunk_nbytes
        if stated not in (None, chunk_nbytes):
            raise DamagedError(
                f"{where}: its chunks have {chunk_nbytes} bytes, but the client data of its filter"
                f" {entry.label} say {stated}; its metadata are damaged"
            )
    if dataset.edges_are_raw:
        layout = layout.changed(has_raw_edges=True)
    missing = unavailable(layout.filters)
    if missing and _applies_any(dataset, missing, layout.has_raw_edges):
        raise _is_not_available(layout.filters[missing[0]], where)
    return layout


def require_filters_of_hdf5(layout: DatasetLayout, dataset: Opened | None, where: str) -> None:
    """Raise `DatasetError` if a chunk was written with a filter that HDF5 does not have.

    For datasets that are read through h5py, even if the core could decode them. `dataset` may be
    None if the layout's chunk table says which filters were used.
    """
    missing = [bit for bit, entry in enumerate(layout.filters) if not is_known_to_hdf5(entry)]
    if not missing or not layout.chunk_shape:
        return
    if dataset is not None:
        with suppressing(TooManyChunksError):
            if not _applies_any(dataset, missing, layout.has_raw_edges):
                return
    elif layout.chunks is not None:
        bits = np.uint32(sum(1 << bit for bit in missing))
        if not (~layout.chunks.filter_mask & bits).any():
            return
    raise _is_not_available(layout.filters[missing[0]], where)


def left_to_hdf5(layout: DatasetLayout, reason: str) -> DatasetLayout:
    """Return the layout of the same dataset, read through h5py.

    DatasetError if it needs a filter that HDF5 does not have.
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

    Presence in the pipeline alone does not matter: filters that cannot process the data, such as
    shuffle with variable-length elements, are skipped when a chunk is written.
    """
    theirs = undecodable(layout.filters)
    theirs = [bit for bit in theirs if is_known_to_hdf5(layout.filters[bit])]
    if theirs and _applies_any(dataset, theirs, layout.has_raw_edges):
        entry = layout.filters[theirs[0]]
        raise NotDirectError(f"filter {entry.number} ({entry.label}) is decoded by HDF5")


def undecodable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that the core cannot decode."""
    return [bit for bit, entry in enumerate(filters) if not can_decode(entry)]


def unavailable(filters: tuple[Filter, ...]) -> list[int]:
    """Return the positions of filters that neither the core nor HDF5 can decode."""
    return [bit for bit in undecodable(filters) if not is_known_to_hdf5(filters[bit])]


def _applies_any(dataset: Opened, positions: Sequence[int], has_raw_edges: bool) -> bool:
    """Return whether any chunk was written with any of the filters at `positions`.

    Usually the first chunk was, and no other is visited. Raises like `_require_room`.
    """
    _require_room(dataset)
    wanted = sum(1 << position for position in positions)
    shape, chunk = dataset.extents, dataset.chunks

    # If coordinates are misreported, edge chunks are unknown.
    has_raw_edges = has_raw_edges and positions_of(dataset) is None

    def applies(info: h5py.h5d.StoreInfo) -> bool | None:
        corner, mask, _offset, _nbytes = info
        ends = zip(corner, chunk, shape, strict=True)
        is_raw = has_raw_edges and any(at + size > extent for at, size, extent in ends)
        return True if wanted & ~mask and not is_raw else None

    return bool(math.prod(shape) and dataset.id.chunk_iter(applies))


def with_chunks(layout: DatasetLayout, dataset: Opened, where: str) -> DatasetLayout:
    """Return a layout with its chunks, and without the filters that the core cannot decode.

    No chunk was written with those: see `refuse_filters_of_hdf5`. Raises like `read_chunk_table`.
    """
    unused = undecodable(layout.filters)
    # (`join_layouts` may leave it to h5py, with all filters.)
    if layout.text and unavailable(layout.filters):
        raise NotDirectError("strings that HDF5 converts, and filters it does not have")
    chunks = read_chunk_table(dataset, layout.filters, layout.has_raw_edges, where)
    chunks, filters = without_filters(chunks, layout.filters, unused)
    if unused and not filters:  # HDF5 would read past chunks that are too short
        expected = math.prod(layout.chunk_shape) * layout.dtype.itemsize
        bad = np.flatnonzero(chunks.nbytes != expected)
        if bad.size:
            raise DamagedError(
                f"{where}: no filter was applied to the chunk at byte {chunks.offset[bad[0]]};"
                f" expected {expected} bytes, got {chunks.nbytes[bad[0]]}; the file is damaged"
            )
    nbytes = int(chunks.nbytes.sum())
    return layout.changed(chunks=chunks.shortened(), filters=filters, stored_nbytes=nbytes)


def without_filters(
    table: ChunkTable, filters: tuple[Filter, ...], positions: Sequence[int]
) -> tuple[ChunkTable, tuple[Filter, ...]]:
    """Return a chunk table and its filters without those at `positions`, which no chunk uses."""
    if not positions:
        return table, filters
    kept = [bit for bit in range(len(filters)) if bit not in positions]
    mask = np.zeros_like(table.filter_mask)
    for bit, before in enumerate(kept):
        mask |= (table.filter_mask >> np.uint32(before) & np.uint32(1)) << np.uint32(bit)
    return replace(table, filter_mask=mask), tuple(filters[bit] for bit in kept)


def converted(layout: DatasetLayout, parameters: tuple[int, ...]) -> DatasetLayout:
    """Return a layout whose chunks are converted by the filter with these parameters.

    NotDirectError if contiguous values would be cut into too many units.
    """
    conversion = Filter(CONVERSION, parameters, "conversion")
    if layout.chunks is not None:
        if len(layout.filters) >= _MOST_FILTERS:
            raise NotDirectError("a conversion, besides as many filters as HDF5 allows")
        table = layout.chunks
        table = replace(table, filter_mask=shortened(table.filter_mask << np.uint32(1)))
        return layout.changed(filters=(conversion, *layout.filters), chunks=table)
    rows, *rest = [int(extent) or 1 for extent in layout.shape]
    row_nbytes = math.prod(rest) * conversion.parameters[1]
    most = min(rows, max(1, _UNIT_NBYTES // row_nbytes))
    size = max(n for n in range(1, most + 1) if rows % n == 0)
    count = rows // size if layout.offset >= 0 and 0 not in layout.shape else 0
    if count > _MOST_UNITS:
        raise NotDirectError("a stored type to convert, in rows that give no equal units")
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


def read_chunk_table(
    dataset: Opened, filters: tuple[Filter, ...], has_raw_edges: bool, where: str
) -> ChunkTable:
    """Read the chunk positions of a dataset.

    Raises `ReadError` if the index is damaged or points outside the file, and `NotDirectError` if
    HDF5 reports chunks that cannot exist, after everything else was checked.
    """
    _require_room(dataset)
    grid, end = grid_of(dataset.extents, dataset.chunks), dataset.end
    chunk_nbytes = math.prod(dataset.chunks) * dataset.itemsize
    # No two chunks share a byte, so the file has room for no more.
    most = min(math.prod(grid), end // (1 if filters else max(1, chunk_nbytes)))
    obstacle, positions = "", None
    try:
        positions = positions_of(dataset)
    except NotDirectError as error:  # everything except the coordinates can be checked
        obstacle = str(error)
    with reading(f"{where}: its chunk index"):
        visited = visit_chunks(dataset, grid, most, where, positions)
    checks = _Checks(dataset, grid, visited, where)
    checks.require_within(end)
    is_raw: NDArray[np.bool_] | bool = not filters
    if filters and has_raw_edges:
        # These chunks are stored raw, although their mask says that they were filtered.
        is_raw = checks.reach_over_edge()
        visited.mask[is_raw] = _ALL_FILTERS
    checks.require_nbytes(is_raw, chunk_nbytes)
    checks.require_apart()
    if dataset.index_kind == B_TREE_V1:
        checks.require_searchable()
    if positions is not None and checks.first_unlike() is not None:
        obstacle = MISREPORTED.format(positions.axis)
    return checks.table(obstacle)


def _require_room(dataset: Opened) -> None:
    """Raise TooManyChunksError for a dataset with more chunks than the file can list.

    h5py reads it instead: listing would visit all chunks, even if none was ever written.
    """
    count = math.prod(grid_of(dataset.extents, dataset.chunks))
    if count <= _MANY_CHUNKS:
        return
    each = {IMPLICIT: math.prod(dataset.chunks), FIXED_ARRAY: 4, EXTENSIBLE_ARRAY: 4}
    end = dataset.end
    if count * each.get(dataset.index_kind, 0) > end:
        raise TooManyChunksError(f"{count} chunks, more than a file of {end} bytes can list")


@dataclass(frozen=True)
class _Checks:
    """Checks all chunks of a dataset, as HDF5 reports them, in whole arrays."""

    dataset: Opened
    grid: tuple[int, ...]
    visited: Visited
    where: str

    def require_within(self, end: int) -> None:
        """Raise ReadError for chunks that do not lie in the file."""
        offset, nbytes = self.visited.offset, self.visited.nbytes
        if self.visited.end <= end:
            return
        bad = (nbytes > end) | (offset > end - nbytes)
        if bad.any():
            at = int(bad.argmax())
            raise DamagedError(
                f"{self._chunk(self.visited.number[at])}: {nbytes[at]} bytes at byte {offset[at]}"
                f" do not lie in the file, which has {end} bytes; it was cut short or is damaged"
            )

    def reach_over_edge(self) -> NDArray[np.bool_]:
        """Return which chunks reach over the dataset's edge."""
        shape, chunk = self.dataset.extents, self.dataset.chunks
        cells = np.unravel_index(self.visited.number, self.grid)
        is_partial = np.zeros(self.visited.number.size, np.bool_)
        for cell, size, extent in zip(cells, chunk, shape, strict=True):
            is_partial |= cell == extent // size  # never, if chunks divide the extent
        return is_partial

    def require_nbytes(self, is_raw: NDArray[np.bool_] | bool, expected: int) -> None:
        """Raise ReadError for raw chunks of a wrong size, and empty filtered ones."""
        nbytes, least, most = self.visited.nbytes, self.visited.least, self.visited.most
        if not nbytes.size or (
            least == most == expected if is_raw is True else is_raw is False and least
        ):
            return
        bad = np.where(is_raw, nbytes != expected, nbytes == 0)
        if bad.any():
            at = int(bad.argmax())
            is_raw = bool(np.broadcast_to(is_raw, nbytes.shape)[at])
            raise DamagedError(
                f"{self._chunk(self.visited.number[at])}: expected"
                f" {expected if is_raw else 'some'} bytes, got {nbytes[at]}; the file is damaged"
            )

    def require_apart(self) -> None:
        """Raise ReadError for chunks that overlap each other or the superblock."""
        offset, nbytes, what = self.visited.offset, self.visited.nbytes, ""
        if not self.visited.is_apart:  # perhaps just not sorted by address
            order = np.argsort(offset, kind="stable")
            offset, nbytes = offset[order], nbytes[order]
            overlaps = offset[1:] < offset[:-1] + nbytes[:-1]
            if overlaps.any():
                at, what = offset[int(overlaps.argmax()) + 1], "another one"
        if not what and offset.size and offset[0] < _SUPERBLOCK_NBYTES:
            at, what = offset[0], "the file's superblock"
        if what:
            raise DamagedError(
                f"{self.where}: a chunk at byte {at} overlaps {what}; the file is damaged"
            )

    def require_searchable(self) -> None:
        """Raise ReadError for a damaged version 1 B-tree, which has no checksum.

        That is one whose keys are out of order, or by whose keys HDF5 does not find chunks.
        """
        if not self.visited.is_ascending:
            raise DamagedError(
                f"{self.where}: the keys of its chunk index are not in order; it is damaged"
            )
        unlike = self.first_unlike()
        if unlike is not None:
            raise DamagedError(
                f"{self._chunk(unlike)}: the chunk index lists it, but HDF5 does not find it; the"
                " file is damaged"
            )

    def first_unlike(self) -> np.int64 | None:
        """Return the number of a chunk that HDF5 does not find by key with the same size, or None.

        If there are many chunks, only some of them are looked up.
        """
        visited, found = self.visited, self.visited.unlike
        if found == NOT_LOOKED_UP:
            # (`get_chunk_info_by_coord` visits all chunks, and would find it.)
            found = first_unlike(self.dataset, self.grid, visited.number, visited.nbytes)
        return None if found < 0 else visited.number[found]

    def table(self, obstacle: str) -> ChunkTable:
        """Return the chunks in the order of the grid.

        NotDirectError if there is an `obstacle`, or HDF5 reports chunks that cannot exist.
        """
        index, offset, nbytes, mask = self.visited[:4]
        if self.visited.is_outside:
            obstacle = obstacle or "HDF5 reports chunks outside the dataset"
        if not self.visited.is_ascending:
            order = np.argsort(index, kind="stable")
            index, offset, nbytes, mask = index[order], offset[order], nbytes[order], mask[order]
            if (index[1:] == index[:-1]).any():
                obstacle = obstacle or "HDF5 reports a chunk twice"
        if obstacle:
            raise NotDirectError(obstacle)
        is_complete = index.size == math.prod(self.grid)
        return ChunkTable(None if is_complete else index, offset, nbytes, mask)

    def _chunk(self, number: np.int64) -> str:
        cell = np.unravel_index(number, self.grid)
        corner = tuple(int(at) * n for at, n in zip(cell, self.dataset.chunks, strict=True))
        return f"{self.where}, chunk {corner}"
