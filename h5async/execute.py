"""A slice of a read plan enters; rows of a batch leave, in the slot's memory: read and decoded.

This is the Python way to execute a plan. It takes no memory of the size of a batch or a chunk:
bytes are read into the batch itself, or into the scratch of the thread.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.chunkcache import ChunkCache
from h5async.codecs import FilterPipeline, Scratch
from h5async.errors import ReadError
from h5async.filters import Bytes
from h5async.layout import DatasetLayout
from h5async.plan import ChunkPlan, Int64s, RowPlan
from h5async.storage import LocalFile

# Below this, copying from a memory map beats a system call a row by far (measured: 5 times at
# 3 kB). Above, it still does where the page cache holds the rows and one call copies them all, but
# a read brings a row in from a disk in one go, and a map page by page.
_MAP_BELOW_NBYTES = 64 * 1024
_GATHER_BLOCK_NBYTES = 64 * 1024  # what NumPy may take for a moment while it gathers small rows


_KEPT_CHUNKS = 2  # beside those in use: where two batches share a chunk, the later one finds it

Run = tuple[int, int, int]  # first sample in the chunk, first row of the batch, number of samples


class PlanExecutor:
    """Executes plans for one dataset. Safe to use from many threads, each with its own scratch.

    Parameters
    ----------
    layout
        Of a dataset that is read the direct way.
    file
        The open file; closed by whoever opened it.
    num_threads
        Threads that call `execute` at the same time.
    """

    def __init__(self, layout: DatasetLayout, file: LocalFile, num_threads: int) -> None:
        self._layout = layout
        self._file = file
        self._pipeline = FilterPipeline(layout.filters, layout.chunk_nbytes)
        self._decoded_chunks = ChunkCache(
            num_threads, _KEPT_CHUNKS, layout.chunk_nbytes if layout.filters else 0
        )
        axis = layout.sample_axis
        rest = [a for a in range(len(layout.shape)) if a != axis]
        # A bool is read as a byte: HDF5 takes any byte but 0 as True, and NumPy only 1.
        self._dtype = np.dtype(np.uint8) if layout.dtype.kind == "b" else layout.dtype
        self._fill = layout.fill.view(self._dtype) if layout.dtype.kind == "b" else layout.fill
        self._piece_shape = layout.chunk_shape or layout.shape
        # What is copied in one go within a chunk: all that follows the sample dimension.
        self._piece_nbytes = layout.dtype.itemsize * math.prod(self._piece_shape[axis + 1 :])
        self._is_table = layout.storage == "contiguous" and layout.rows_are_whole
        self._regions = _regions(layout, rest) if layout.chunk_shape else [()]

    def scratch_nbytes(self) -> tuple[int, int, int]:
        """Return what `Scratch.allocate` must be given for this dataset."""
        layout = self._layout
        if layout.chunks is None or (layout.rows_are_whole and not layout.filters):
            return 0, 0, 0
        stored = int(layout.chunks.nbytes.max(initial=0)) if layout.filters else 0
        return stored, layout.chunk_nbytes, self._pipeline.between_nbytes

    def execute(
        self, plan: RowPlan | ChunkPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan.

        Parameters
        ----------
        raw
            (batch, *raw_row), C-contiguous: the batch to fill, samples first.
        scratch
            Used by no other thread meanwhile.

        Raises
        ------
        ReadError
            If bytes cannot be read or decoded; it names file, dataset and chunk or sample.
        """
        if isinstance(plan, RowPlan):
            self._read_rows(plan, start, stop, raw)
        else:
            self._read_chunks(plan, start, stop, raw, scratch)

    def _read_rows(self, plan: RowPlan, start: int, stop: int, raw: NDArray[Any]) -> None:
        nbytes = plan.row_nbytes
        if nbytes == 0:
            return
        offset, sample = plan.offset[start:stop], plan.sample[start:stop]
        never_written = np.flatnonzero(offset < 0)
        for row in never_written:
            raw[start + row] = self._fill
        if never_written.size == offset.size:
            return
        rows = raw.view(np.uint8).reshape(raw.shape[0], nbytes)
        try:
            last = int(offset.max())
            mapped = None
            if nbytes < _MAP_BELOW_NBYTES or (self._is_table and self._file.is_cached(last)):
                mapped = self._file.mapped(last + nbytes)
            if mapped is None:
                self._file.read_rows(*_in_file_order(offset), rows[start:stop])
            else:
                self._gather(mapped, offset, sample, rows[start:stop])
        except ReadError as error:
            raise ReadError(
                f'{error} (dataset "{self._layout.path}", samples {sample.min()} to {sample.max()})'
            ) from error

    def _gather(self, mapped: Bytes, offset: Int64s, sample: Int64s, rows: Bytes) -> None:
        """Copy rows out of the map; a few NumPy calls for all of them where they are small."""
        nbytes = rows.shape[1]
        if self._is_table:
            begin = self._layout.offset
            count = min(self._layout.num_samples, (mapped.size - begin) // nbytes)
            table = mapped[begin : begin + count * nbytes].reshape(count, nbytes)
            np.take(table, sample, axis=0, out=rows, mode="clip")
            return
        position, offset = _in_file_order(offset)
        item = np.dtype((np.void, nbytes))
        window = np.ndarray(mapped.size - nbytes + 1, item, mapped.data, strides=(1,))
        out = rows.view(item).reshape(-1)
        block = max(1, _GATHER_BLOCK_NBYTES // nbytes)
        for begin in range(0, offset.size, block):
            part = slice(begin, begin + block)
            out[position[part]] = window[offset[part]]

    def _read_chunks(
        self, plan: ChunkPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        groups = plan.group[start:stop].tolist()
        bounds = plan.run_start[groups[0] : groups[-1] + 2].tolist()
        first, last = bounds[0], bounds[-1]
        runs = list(
            zip(
                plan.run_local[first:last].tolist(),
                plan.run_position[first:last].tolist(),
                plan.run_length[first:last].tolist(),
                strict=True,
            )
        )
        places, crosses = plan.place[start:stop].tolist(), plan.cross[start:stop].tolist()
        for i, (place, cross, group) in enumerate(zip(places, crosses, groups, strict=True)):
            at = group - groups[0]
            its_runs = runs[bounds[at] - first : bounds[at + 1] - first]
            try:
                self._read_chunk(place, self._regions[cross], its_runs, raw, scratch)
            except Exception as error:
                raise self._chunk_error(plan, start + i, error) from error

    def _read_chunk(
        self,
        place: int,
        region: tuple[slice, ...],
        runs: list[Run],
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        """Bring the samples of `runs` from one chunk to their rows of the batch."""
        if place < 0:
            for _, position, length in runs:
                raw[(slice(position, position + length), *region)] = self._fill
            return
        chunks = self._layout.chunks
        if chunks is None:
            self._scatter(self._mapped_dataset(), runs, region, raw)
            return
        whole = self._filled_whole(raw, runs)
        if self._pipeline.is_raw(int(chunks.filter_mask[place])):
            chunk = self._raw_chunk(place, runs, whole, scratch)
            if whole is None:
                self._scatter(chunk, runs, region, raw)
        elif whole is not None:
            self._decode(place, scratch, whole)
        else:
            decode = partial(self._decode, place, scratch)
            with self._decoded_chunks.decoded(place, decode) as decoded:
                self._scatter(self._as_chunk(decoded), runs, region, raw)

    def _scatter(
        self, chunk: NDArray[Any], runs: list[Run], region: tuple[slice, ...], raw: NDArray[Any]
    ) -> None:
        """Copy the samples of `runs` from a decoded chunk to where they go in the batch."""
        by_sample = np.moveaxis(chunk, self._layout.sample_axis, 0)
        for local, position, length in runs:
            target = raw[(slice(position, position + length), *region)]
            inside = [slice(0, extent) for extent in target.shape[1:]]  # edge chunks are padded
            np.copyto(target, by_sample[(slice(local, local + length), *inside)])

    def _filled_whole(self, raw: NDArray[Any], runs: list[Run]) -> Bytes | None:
        """Return, as bytes, the rows of the batch that one whole chunk makes up, or None."""
        _, position, length = runs[0]
        layout = self._layout
        if len(runs) > 1 or not layout.chunk_shape or not layout.rows_are_whole:
            return None
        if length != layout.chunk_shape[0]:
            return None
        return raw[position : position + length].reshape(-1).view(np.uint8)

    def _mapped_dataset(self) -> NDArray[Any]:
        layout = self._layout
        mapped = self._file.mapped(layout.offset + layout.nbytes)
        assert mapped is not None, "layout.py sends such datasets to h5py"
        return np.ndarray(layout.shape, self._dtype, mapped.data, offset=layout.offset)

    def _decode(self, place: int, scratch: Scratch, out: Bytes) -> None:
        chunks = self._layout.chunks
        assert chunks is not None
        encoded = scratch.encoded[: int(chunks.nbytes[place])]
        self._file.read_into(int(chunks.offset[place]), [encoded.data])
        self._pipeline.decode(encoded, int(chunks.filter_mask[place]), out, scratch)

    def _raw_chunk(
        self, place: int, runs: list[Run], out: Bytes | None, scratch: Scratch
    ) -> NDArray[Any]:
        """Return an undecoded chunk: `out` filled with it, or a view of the scratch or the map.

        In the scratch, only the samples of `runs` are read.
        """
        chunks = self._layout.chunks
        assert chunks is not None
        offset, nbytes = int(chunks.offset[place]), int(chunks.nbytes[place])
        if nbytes != self._layout.chunk_nbytes:
            raise ValueError(f"{nbytes} bytes are stored, {self._layout.chunk_nbytes} are due")
        if out is not None:
            self._file.read_into(offset, [out.data])
            return self._as_chunk(out)
        if self._piece_nbytes < _MAP_BELOW_NBYTES:
            mapped = self._file.mapped(offset + nbytes)
            if mapped is not None:
                return self._as_chunk(mapped[offset : offset + nbytes])
        chunk = scratch.raw_chunk[:nbytes]
        for begin, end in self._needed(runs, nbytes):
            self._file.read_into(offset + begin, [chunk[begin:end].data])
        return self._as_chunk(chunk)

    def _needed(self, runs: list[Run], nbytes: int) -> list[tuple[int, int]]:
        """Return the byte ranges of a raw chunk that hold the samples of some runs."""
        if self._layout.sample_axis != 0:
            return [(0, nbytes)]
        size = self._piece_nbytes
        return [(local * size, (local + length) * size) for local, _, length in runs]

    def _as_chunk(self, chunk: Bytes) -> NDArray[Any]:
        return np.ndarray(self._piece_shape, self._dtype, chunk.data)

    def _chunk_error(self, plan: ChunkPlan, item: int, error: Exception) -> ReadError:
        layout = self._layout
        where = f'{layout.file}: dataset "{layout.path}"'
        if layout.chunks is None:
            return ReadError(f"{where}: {error}")
        place = plan.place[item]
        axis = layout.sample_axis
        corner = layout.cross_section[plan.cross[item]].copy()
        corner[axis] = plan.group_number[plan.group[item]] * layout.chunk_shape[axis]
        last = min(corner[axis] + layout.chunk_shape[axis], layout.num_samples) - 1
        return ReadError(
            f"{where}, chunk {tuple(corner.tolist())} (samples {corner[axis]} to {last}),"
            f" {layout.chunks.nbytes[place]} bytes at byte {layout.chunks.offset[place]}: {error};"
            " the file is damaged there: restore it, or leave these samples out"
        )


def _regions(layout: DatasetLayout, rest: list[int]) -> list[tuple[slice, ...]]:
    """Return where in a row each chunk of the cross-section goes, cut off at the row's end."""
    return [
        tuple(
            slice(int(corner[a]), min(int(corner[a]) + layout.chunk_shape[a], layout.shape[a]))
            for a in rest
        )
        for corner in layout.cross_section
    ]


def _in_file_order(offset: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows that were ever written, by their place in the file, and these places."""
    position = np.argsort(offset)
    position = position[np.searchsorted(offset, 0, sorter=position) :]  # -1: never written
    return position, offset[position]
