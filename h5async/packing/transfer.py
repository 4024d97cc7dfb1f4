"""Moves the values of datasets into the new file: a plan enters; chunks leave, for the writer.

Chunks about which nothing changes are copied as they are stored. Other rows are read in blocks, and
written as chunks that threads encode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import h5py
import numpy as np
from h5py import h5s

from h5async.index.chunktable import grid_of
from h5async.packing.chunkwriter import ChunkWriter, DatasetWriter
from h5async.packing.encodedsamples import encoded_images
from h5async.packing.rawvalues import RawValues, References
from h5async.packing.rewriting import Rewrite, Run
from h5async.packing.rowsource import Block

_COPIED_NBYTES = 8 << 20  # stored chunks that are read and written at a time
Piece = Run | Block


def pieces_of(rewrite: Rewrite, most_nbytes: int) -> list[Piece]:
    """Return what is moved at a time: rows of stored chunks, or a block. The same every time."""
    pieces: list[Piece] = []
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
    """Moves the values of one dataset to `target`, by a writer. `options` are those of readers."""

    def __init__(
        self,
        rewrite: Rewrite,
        target: h5py.Dataset,
        writer: ChunkWriter,
        references: Callable[[], References],
        options: Mapping[str, Any],
    ) -> None:
        self._rewrite, self._source = rewrite, rewrite.source
        self._target, self._writer = target, writer
        self._references, self._options = references, dict(options)

    def move(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Move pieces, in order; yield each as soon as the writer has it."""
        at = 0
        while at < len(pieces):
            end = at + 1
            while end < len(pieces) and type(pieces[end]) is type(pieces[at]):
                end += 1
            several: Any = pieces[at:end]
            if isinstance(several[0], Run):
                yield from self._copy(several)
            elif self._rewrite.encoding:
                yield from self._encode(several)
            elif self._rewrite.is_by_hdf5:
                yield from self._by_hdf5(several)
            else:
                yield from self._cut(several)
            at = end

    def _copy(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Copy stored chunks."""
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
        """Copy chunks of a file, by their cells (rank, n), to corners in the target (n, rank)."""
        assert self._source.tables is not None
        table, dataset = self._source.tables[file], self._source.datasets[file]
        grid = grid_of(dataset.extents, dataset.chunks)
        found = table.find(np.ravel_multi_index(tuple(cells), grid).astype(np.int64))
        corners, found = corners[found >= 0], found[found >= 0]
        ranges = table.offset[found].tolist(), table.nbytes[found].tolist()
        stored = self._source.files[file].source.get_ranges(*ranges)
        masks = [self._mask(file, mask) for mask in table.filter_mask[found].tolist()]
        writer.write_stored(list(zip(map(tuple, corners.tolist()), stored, masks, strict=True)))

    def _mask(self, file: int, mask: int) -> int:
        """Return the mask as stored: that of chunks at edges that are not filtered says nothing."""
        is_raw_edge = mask == np.iinfo(np.uint32).max
        return 0 if is_raw_edge and self._source.datasets[file].edges_are_raw else mask

    def _dataset_writer(self) -> DatasetWriter:
        return self._writer.open(self._target, np.dtype(f"V{self._rewrite.itemsize}"))

    def _by_hdf5(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Have HDF5 read and write elements of variable length, or that refer to objects."""
        references, axis = self._references(), self._rewrite.axis
        for block in blocks:
            values = self._source.read(self._rewrite.selection, block)
            references.change(values.kind, values.bytes, self._source.where)
            self._write(values, block.offset(axis), block.shape(axis))
            yield block

    def _cut(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Read blocks, and have them encoded."""
        rewrite, writer = self._rewrite, self._dataset_writer()
        stored = np.dtype(f"V{rewrite.itemsize}")
        arrays = self._source.blocks(rewrite.selection, blocks, rewrite.dtype, self._options)
        for block, array in zip(blocks, arrays, strict=True):
            offset, shape = block.offset(rewrite.axis), block.shape(rewrite.axis)
            copied = np.array(array, order="C").reshape(-1).view(stored).reshape(shape)
            writer.write(offset, copied)
            yield block

    def _encode(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Read images, and have them encoded."""
        writer, encoding = self._writer.open(self._target), self._rewrite.encoding
        arrays = self._source.blocks(self._rewrite.selection, blocks, None, self._options)
        for block, array in zip(blocks, arrays, strict=True):
            images = np.array(array, order="C").view(np.uint8)
            makes = [
                partial(encoded_images, images[at : at + 8], encoding)
                for at in range(0, len(images), 8)
            ]
            writer.write_made(block.begin, makes, images.nbytes)
            yield block

    def _write(self, values: RawValues, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        memory, selected = h5s.create_simple(shape), self._target.id.get_space()
        selected.select_hyperslab(offset, shape)

        def write() -> None:
            with values:
                values.write(self._target.id, memory, selected)

        self._writer.call(write, values.bytes.nbytes)
        self._writer.flush()


def move_scalar(
    source: h5py.h5d.DatasetID, target: h5py.h5d.DatasetID, references: References, where: str
) -> None:
    """Copy the value of a dataset without dimensions."""
    kind, space = source.get_type(), source.get_space()
    with RawValues(kind, 1, where) as values:
        values.read(source, space, space)
        references.change(kind, values.bytes, where)
        values.write(target, space, space)
