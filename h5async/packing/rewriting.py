"""Plans how a dataset is rewritten, moves its values to the new file, and compares them.

Stored chunks that stay the same are copied without decoding. All other rows are read in blocks and
written as chunks, which threads encode.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from h5async.codec.encoders import set_filters, spell_filters
from h5async.codec.filters import BLOSC, BLOSC2, Filter, is_lossy
from h5async.errors import DatasetError
from h5async.index.chunks import filters_of
from h5async.index.hdf5 import Opened
from h5async.index.tables import grid_of
from h5async.io.hdf5files import HDF5File
from h5async.order.selection import Selection
from h5async.packing.chunkwriter import ChunkWriter, DatasetWriter
from h5async.packing.encodedsamples import encoded_images
from h5async.packing.objects import Making, ObjectCopy, is_outside
from h5async.packing.rawvalues import (
    Bytes,
    RawValues,
    References,
    call_hdf5,
    has_pointers,
    is_by_hdf5,
)
from h5async.packing.rowsource import Block, Extents, RowSource
from h5async.spelling import named

_BLOCK_NBYTES = 16 << 20  # of rows in order: larger blocks are no faster
_NARROW_NBYTES, _LEAST_CHUNK_NBYTES = 1 << 10, 16 << 10  # smaller rows get chunks this large
_REFERENCES = 1024  # variable-length elements per chunk
_MOST_ROWS = 1 << 20  # per block: readers plan each row
_ALL_FILTERS = 0  # H5Z_FILTER_ALL
_COPIED_NBYTES = 8 << 20  # of stored chunks read and written at a time


class Run(NamedTuple):
    """Rows of the target whose stored chunks are copied (`is_copied`) or cut into new chunks."""

    begin: int
    stop: int
    is_copied: bool


class Planned(NamedTuple):
    """The planned form of a dataset: how its values are moved, its chunks, its decoded bytes."""

    path: str
    how: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    nbytes: int


class Plan(NamedTuple):
    """What `repack` will do: the datasets that change, and the bytes of rows in memory.

    `left_out` maps the paths of objects that are not in the new file to the reasons.
    """

    datasets: tuple[Planned, ...]
    memory_nbytes: int
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Rewrite:
    """The rewrite of a dataset: selected rows, with new chunks, filters or values.

    `chunks` is empty for a contiguous dataset. `filters` and `dtype` are None if they stay the
    same. Rows with an `encoding` are images, which become variable-length elements.
    """

    source: RowSource
    selection: Selection
    shape: Extents
    chunks: Extents
    filters: tuple[Filter, ...] | None
    dtype: np.dtype[Any] | None
    encoding: str = ""

    @property
    def axis(self) -> int:
        """The dimension that counts the rows."""
        return self.source.axis

    @property
    def itemsize(self) -> int:
        """Bytes of an element as stored in the target."""
        return self.source.itemsize if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Decoded bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_by_hdf5(self) -> bool:
        """Whether HDF5 must read and write the elements: they have pointers or references."""
        return is_by_hdf5(self.source.kind)

    @property
    def how(self) -> str:
        """How values are moved, in words."""
        if self.encoding:
            return f"encoded as {self.encoding}"
        copied = sum(run.stop - run.begin for run in self.runs() if run.is_copied)
        count = self.shape[self.axis]
        if copied == count:
            return "stored chunks are copied"
        kept = f", but {copied:,} of {count:,} rows are copied as stored" if copied else ""
        return ("cut into other chunks" if self.chunks else "values are copied") + kept

    def nbytes_of(self, piece: Run | Block) -> int:
        """Return the decoded bytes of a piece."""
        share = (piece.stop - piece.begin) / max(1, self.shape[self.axis])
        if isinstance(piece, Block):
            others = [d for d in range(len(self.shape)) if d != self.axis]
            share *= math.prod(piece.sizes[d] / max(1, self.shape[d]) for d in others)
        return round(share * self.nbytes)

    @property
    def keeps_chunks(self) -> bool:
        """Whether chunks of the same rows are stored as the same bytes."""
        is_same = bool(self.chunks) and self.chunks == self.source.first.chunks
        return is_same and self.filters is None and self.dtype is None

    def require_lossless(self) -> None:
        """Raise `DatasetError` if a lossy filter that is kept would change values again."""
        if not self.chunks or self.filters is not None:
            return
        lossy = [entry for entry in filters_of(self.source.first.plist) if is_lossy(entry)]
        if lossy and not all(run.is_copied for run in self.runs()):
            raise DatasetError(
                f"{self.source.where}: its filter {lossy[0].label} is lossy, and would change"
                " values again when they are cut into other chunks; choose another filter:"
                f" {named('filter', 'lzf')}"
            )

    def making(self) -> Making:
        """Return how to create the target."""
        if self.encoding:
            plist, count = h5p.create(h5p.DATASET_CREATE), self.shape[0]
            plist.set_chunk((max(1, min(count, _REFERENCES)),))
            return Making(h5s.create_simple((count,)), self._kind, plist, True, False)
        first, axis = self.source.first, self.axis
        most = [h5s.UNLIMITED if n is None else n for n in first.maxshape]
        if most[axis] != h5s.UNLIMITED:
            is_full = most[axis] == first.extents[axis]
            most[axis] = self.shape[axis] if is_full else max(most[axis], self.shape[axis])
        if not self.chunks:
            most = list(self.shape)
        space = h5s.create_simple(self.shape, tuple(most))
        # (The storage size of a virtual dataset is 0 until its sources are open.)
        is_stored = is_outside(first.id) or first.id.get_storage_size() > 0
        has_values = is_stored or len(self.source.datasets) > 1
        return Making(space, self._kind, self._properties(first), has_values, self.keeps_chunks)

    @property
    def _kind(self) -> h5t.TypeID | None:
        """The datatype of the target; None if it stays the same."""
        dtype = h5py.vlen_dtype(np.uint8) if self.encoding else self.dtype
        return None if dtype is None else h5t.py_create(dtype, logical=True)

    def making_joined(self, parts: Sequence[tuple[str, int]]) -> Making:
        """Return how to create a virtual dataset from files, given as (name, number of rows)."""
        plist, axis, begin = h5p.create(h5p.DATASET_CREATE), self.axis, 0
        count = sum(rows for _, rows in parts)
        rest = () if self.encoding else self.shape[axis + 1 :]
        shape = (*self.shape[:axis], count, *rest)
        for file, rows in parts:
            here = (*shape[:axis], rows, *shape[axis + 1 :])
            space = h5s.create_simple(shape)
            space.select_hyperslab(
                tuple(begin if d == axis else 0 for d in range(len(shape))), here
            )
            name = self.source.path.encode()
            plist.set_virtual(space, os.fsencode(file), name, h5s.create_simple(here))
            begin += rows
        return Making(h5s.create_simple(shape), self._kind, plist, has_values=False)

    def _properties(self, first: Opened) -> h5p.PropDCID:
        plist, source = first.plist.copy(), self.source
        if plist.get_external_count():  # external files cannot be removed from a property list
            plist = h5p.create(h5p.DATASET_CREATE)
            if first.plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
                fill = np.zeros(source.itemsize, np.uint8)
                call_hdf5("H5Pget_fill_value", source.where, first.plist, source.kind, fill)
                call_hdf5("H5Pset_fill_value", source.where, plist, source.kind, fill)
        if not self.chunks:
            plist.set_layout(h5d.CONTIGUOUS)
            plist.set_alloc_time(h5d.ALLOC_TIME_EARLY if self.nbytes else h5d.ALLOC_TIME_LATE)
        elif self.chunks != first.chunks or self.dtype is not None:  # (it has the element size)
            plist.set_chunk(self.chunks)
        if not self.chunks or self.filters is not None:
            if plist.get_nfilters():
                plist.remove_filter(_ALL_FILTERS)
            filters = self.filters or ()
            if has_pointers(
                self.source.kind
            ):  # blosc crashes: HDF5 does not pass it the element size
                filters = tuple(one for one in filters if one.number not in (BLOSC, BLOSC2))
            set_filters(plist, filters)
        return plist

    def runs(self) -> list[Run]:
        """Return the runs of rows, in order."""
        count = self.shape[self.axis]
        if not self.keeps_chunks or self.source.tables is None:
            return [Run(0, count, False)] if count else []
        whole = self.source_chunks() >= 0
        bounds = [0, *(np.flatnonzero(np.diff(whole)) + 1).tolist(), len(whole)]
        rows = self.chunks[self.axis]
        return [
            Run(begin * rows, min(stop * rows, count), bool(whole[begin]))
            for begin, stop in itertools.pairwise(bounds)
            if begin < stop
        ]

    def source_chunks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the first sample of each row of target chunks that is stored as is; else -1."""
        rows, count, source = self.chunks[self.axis], self.shape[self.axis], self.source
        begins = np.arange(0, count, rows)
        stops = np.minimum(begins + rows, count)
        first, last = (self.selection.samples(at) for at in (begins, stops - 1))
        file = np.searchsorted(source.starts, first, side="right") - 1
        local, ends = first - source.starts[file], np.array(source.counts)[file]
        is_run = last - first == stops - begins - 1
        found = is_run & (stops - begins == np.minimum(rows, ends - local)) & (local % rows == 0)
        if not self.selection.is_range:
            for chunk in np.flatnonzero(found):
                samples = self.selection.samples(np.arange(begins[chunk], stops[chunk]))
                found[chunk] = (np.diff(samples) == 1).all()
        return np.where(found, first, -1)

    def blocks(self, run: Run, most_nbytes: int) -> list[Block]:
        """Cut a run into blocks of whole target chunks, of at most `most_nbytes` if possible."""
        shape, axis, first = self.shape, self.axis, self.source.first
        unit = self.chunks or ((1, *shape[1:]) if self.encoding else (1,) * len(shape))
        largest = max(self.itemsize, self.source.itemsize)
        others = [d for d in range(len(shape)) if d != axis]
        row_nbytes = math.prod(shape[d] for d in others) * largest
        rows, sizes = unit[axis], list(shape)
        if rows * row_nbytes > most_nbytes:
            room = most_nbytes // (rows * largest)
            sizes = list(unit)
            for d in reversed(others):
                rest = math.prod(sizes[e] for e in others if e != d)
                sizes[d] = min(shape[d], unit[d] * max(1, room // max(1, rest * unit[d])))
        else:
            aligned = math.lcm(rows, first.chunks[axis] if first.chunks else 1)
            wanted = max(_BLOCK_NBYTES, aligned * row_nbytes)
            if not self.selection.is_range:
                wanted = most_nbytes
            fitting = min(_MOST_ROWS, min(most_nbytes, wanted) // max(1, row_nbytes))
            rows = fitting // aligned * aligned or fitting // rows * rows or rows
        begins = range(run.begin, run.stop, max(1, rows))
        return [
            Block(begin, min(begin + max(1, rows), run.stop), corner, part)
            for corner, part in _tiles(shape, sizes, axis)
            for begin in begins
        ]


def _tiles(shape: Extents, sizes: list[int], axis: int) -> Iterator[tuple[Extents, Extents]]:
    """Yield the corners and sizes of tiles of all dimensions except `axis`, which is not cut."""
    cut = tuple(max(1, shape[d] if d == axis else n) for d, n in enumerate(sizes))
    for cell in np.ndindex(grid_of(shape, cut)):
        corner = tuple(i * n for i, n in zip(cell, cut, strict=True))
        ends = zip(corner, cut, shape, strict=True)
        yield corner, tuple(min(n, extent - at) for at, n, extent in ends)


def chunks_of_rows(shape: Extents, axis: int, rows: int, itemsize: int) -> Extents:
    """Return the shape of chunks of `rows` rows; for narrow rows, a multiple of `rows`."""
    nbytes = max(1, math.prod(n for d, n in enumerate(shape) if d != axis) * itemsize)
    if nbytes < _NARROW_NBYTES and rows * nbytes < _LEAST_CHUNK_NBYTES:
        rows *= -(-_LEAST_CHUNK_NBYTES // (rows * nbytes))
    return tuple(min(max(1, n), rows) if d == axis else max(1, n) for d, n in enumerate(shape))


def pieces_of(rewrite: Rewrite, most_nbytes: int) -> list[Run | Block]:
    """Return the units to move: runs of stored chunks, or blocks. Deterministic, for resuming."""
    pieces: list[Run | Block] = []
    for run in rewrite.runs():
        if not run.is_copied:
            pieces += rewrite.blocks(run, most_nbytes)
            continue
        rows = rewrite.chunks[rewrite.axis]
        nbytes = max(1, rows * rewrite.source.row_nbytes)
        step = rows * max(1, _COPIED_NBYTES // nbytes)
        starts = range(run.begin, run.stop, step)
        pieces += [Run(at, min(at + step, run.stop), True) for at in starts]
    return pieces


class Transfer:
    """Moves the values of one dataset to `target` through a writer. `options` are for readers."""

    def __init__(
        self,
        rewrite: Rewrite,
        target: h5py.Dataset,
        writer: ChunkWriter,
        objects: ObjectCopy,
        options: Mapping[str, Any],
    ) -> None:
        self._rewrite, self._source = rewrite, rewrite.source
        self._target, self._writer = target, writer
        self._objects, self._options = objects, dict(options)

    def move(self, pieces: Sequence[Run | Block]) -> Iterator[Run | Block]:
        """Move pieces in order; yield each once it has been given to the writer."""
        rewrite = self._rewrite
        for kind, several in itertools.groupby(pieces, type):
            move: Any = self._by_hdf5 if rewrite.is_by_hdf5 else self._cut
            move = self._copy if kind is Run else self._encode if rewrite.encoding else move
            yield from move([*several])

    def _copy(self, runs: Sequence[Run]) -> Iterator[Run]:
        source, axis, chunks = self._source, self._rewrite.axis, self._rewrite.chunks
        writer, samples = self._dataset_writer(), self._rewrite.source_chunks()
        grid = grid_of(self._rewrite.shape, chunks)
        for run in runs:
            first, stop = run.begin // chunks[axis], -(-run.stop // chunks[axis])
            files = np.searchsorted(source.starts, samples[first:stop], side="right") - 1
            for file in np.unique(files):
                rows = first + np.flatnonzero(files == file)
                shape = [len(rows) if d == axis else n for d, n in enumerate(grid)]
                cells = np.indices(shape).reshape(len(grid), -1)
                rows = rows[cells[axis]]
                corners = np.array(chunks)[:, None] * cells
                corners[axis] = rows * chunks[axis]
                cells[axis] = (samples[rows] - source.starts[file]) // chunks[axis]
                self._copy_chunks(writer, int(file), cells, corners.T)
            yield run

    def _copy_chunks(self, writer: DatasetWriter, file: int, cells: Any, corners: Any) -> None:
        """Copy chunks of a source, given by grid cells (rank, n), to target offsets (n, rank)."""
        assert self._source.tables is not None
        table, dataset = self._source.tables[file], self._source.datasets[file]
        grid = grid_of(dataset.extents, dataset.chunks)
        found = table.find(np.ravel_multi_index(tuple(cells), grid).astype(np.int64))
        corners, found = corners[found >= 0], found[found >= 0]
        ranges = table.offset[found].tolist(), table.nbytes[found].tolist()
        stored = self._source.files[file].source.get_ranges(*ranges)
        # (The mask in the table marks unfiltered edge chunks; it is not the one in the file.)
        is_raw_edge = table.filter_mask[found] == np.iinfo(np.uint32).max
        masks = np.where(is_raw_edge & dataset.edges_are_raw, 0, table.filter_mask[found]).tolist()
        writer.write_stored(list(zip(map(tuple, corners.tolist()), stored, masks, strict=True)))

    def _dataset_writer(self) -> DatasetWriter:
        return self._writer.open(self._target, np.dtype(f"V{self._rewrite.itemsize}"))

    def _by_hdf5(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Have HDF5 read and write elements with pointers or references; convert the references."""
        axis = self._rewrite.axis
        for block in blocks:
            values = self._source.read(self._rewrite.selection, block)
            self._objects.references.change(values)
            memory = h5s.create_simple(block.shape(axis))
            selected = self._target.id.get_space()
            selected.select_hyperslab(block.offset(axis), block.shape(axis))
            self._writer.call(partial(self._write, values, memory, selected), values.bytes.nbytes)
            self._writer.flush()
            yield block

    def _write(self, values: RawValues, memory: h5s.SpaceID, selected: h5s.SpaceID) -> None:
        with values:
            values.write(self._target.id, memory, selected)

    def _cut(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Read blocks and pass them to the writer, which cuts and encodes chunks."""
        rewrite, writer = self._rewrite, self._dataset_writer()
        stored = np.dtype(f"V{rewrite.itemsize}")
        arrays = self._source.blocks(rewrite.selection, blocks, rewrite.dtype, self._options)
        for block, array in zip(blocks, arrays, strict=True):
            offset, shape = block.offset(rewrite.axis), block.shape(rewrite.axis)
            copied = np.array(array, order="C").reshape(-1).view(stored).reshape(shape)
            writer.write(offset, copied)
            yield block

    def _encode(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Read images and have threads encode them."""
        writer, encoding = self._writer.open(self._target), self._rewrite.encoding
        arrays = self._source.blocks(self._rewrite.selection, blocks, None, self._options)
        for block, array in zip(blocks, arrays, strict=True):
            images = np.array(array, order="C").view(np.uint8)
            made = [
                self._writer.encoded(partial(encoded_images, images[at : at + 8], encoding))
                for at in range(0, len(images), 8)
            ]
            writer.write_elements(block.begin, made, images.nbytes)
            yield block


def differences(
    rewrite: Rewrite,
    target: HDF5File,
    references: References,
    nbytes: int,
    options: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the differences in a dataset of a finished file, read in blocks of about `nbytes`."""
    path = rewrite.source.path
    where, dataset = f'dataset "{path}"', target[path].id
    if (rewrite.shape[:1] if rewrite.encoding else rewrite.shape) != dataset.shape:
        yield f"{where}: its shape"
    if _layout(rewrite.making().plist) != _layout(dataset.get_create_plist()):
        yield f"{where}: its chunks and filters"
    blocks = rewrite.blocks(Run(0, rewrite.shape[rewrite.axis], False), nbytes)
    written = RowSource([target], path, rewrite.axis)
    every = Selection(0, 1, written.counts[0])
    if rewrite.is_by_hdf5:
        for block in blocks:
            with rewrite.source.read(rewrite.selection, block) as a:
                with written.read(every, block) as b:
                    if not references.are_same(a, b):
                        yield where
        return
    sources = rewrite.source.blocks(rewrite.selection, blocks, rewrite.dtype, dict(options))
    targets = written.blocks(every, blocks, None, {**options, "hdf5_path": target.filename})
    if rewrite.encoding:
        targets = (target[path][block.begin : block.stop] for block in blocks)
    for block, old, new in zip(blocks, sources, targets, strict=True):
        if rewrite.encoding:  # encoding is deterministic: compare the encoded bytes
            images = np.array(old, order="C").view(np.uint8)
            is_same = all(map(np.array_equal, encoded_images(images, rewrite.encoding), new))
        else:
            is_same = np.array_equal(_bytes(old), _bytes(new))
        if not is_same:
            yield f"{where}, rows {block.begin} to {block.stop}"


def _layout(plist: h5p.PropDCID) -> tuple[Any, ...]:
    chunks = plist.get_chunk() if plist.get_layout() == h5d.CHUNKED else ()
    # (Compare filters as spelled, with levels: HDF5 adds parameters that depend on the dataset.)
    filters = filters_of(plist)
    return chunks, [one.number for one in filters], spell_filters(filters)


def _bytes(values: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
