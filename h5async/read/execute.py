"""A slice of a read plan enters; rows of a batch leave, in the slot's memory: read and decoded.

This is the Python way to execute a plan. It takes no memory of the size of a batch or a chunk:
bytes are read into the batch itself, or into the scratch of the thread.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import Bytes
from h5async.errors import H5AsyncError, OutOfMemoryError, ReadError, out_of_memory
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.plan import ChunkPlan, Int64s, RowPlan
from h5async.read.chunkcache import ChunkCache
from h5async.read.codecs import FilterPipeline, Scratch
from h5async.system.interruptions import interruption, suppressing

_GATHER_BLOCK_NBYTES = 64 * 1024  # what NumPy may take for a moment while it gathers small rows


Run = tuple[int, int, int]  # first sample in the chunk, first row of the batch, number of samples


class Executor(Protocol):
    """Executes plans for one dataset, in many threads, each with its own scratch."""

    def execute(
        self, plan: Any, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Bring items `start` to `stop` of a plan that is of its kind to the batch.

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


def scratch_nbytes(layout: DatasetLayout) -> tuple[int, int, int]:
    """Return what `Scratch.allocate` must be given for a dataset."""
    if layout.parts:
        sizes = [scratch_nbytes(part.source) for part in layout.parts]
        encoded, chunk, between = zip(*sizes, strict=True)
        return max(encoded), max(chunk), max(between)
    if layout.chunks is None or (layout.rows_are_whole and not layout.filters):
        return 0, 0, 0
    stored = int(layout.chunks.nbytes.max(initial=0)) if layout.filters else 0
    pipeline = FilterPipeline(layout.filters, layout.chunk_nbytes)
    return stored, layout.chunk_nbytes, pipeline.between_nbytes


class PlanExecutor:
    """Executes plans for what lies in one file. Safe to use from many threads.

    Parameters
    ----------
    layout
        Of a dataset that is read the direct way.
    files
        Opens the file; closed by whoever made it.
    cache
        For decoded chunks.
    """

    def __init__(self, layout: DatasetLayout, files: LocalFiles, cache: ChunkCache) -> None:
        self._layout = layout
        self._files = files
        self._pipeline = FilterPipeline(layout.filters, layout.chunk_nbytes)
        self._cache = cache
        axis = layout.sample_axis
        rest = [a for a in range(len(layout.shape)) if a != axis]
        self._dtype = layout.raw_dtype
        self._fill = layout.raw_fill
        self._piece_shape = layout.chunk_shape or layout.shape
        # What is copied in one go within a chunk: all that follows the sample dimension.
        self._piece_nbytes = layout.dtype.itemsize * math.prod(self._piece_shape[axis + 1 :])
        self._is_table = layout.storage == "contiguous" and layout.rows_are_whole
        self._regions = _regions(layout, rest)

    def execute(
        self, plan: RowPlan | ChunkPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan; see `Executor`."""
        layout = self._layout
        work = partial(self._execute, plan, start, stop, raw, scratch)
        self._files.read(layout.file, layout.stamp, work)

    def _execute(
        self,
        plan: RowPlan | ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
        file: LocalFile,
        _stamp: FileStamp,
    ) -> bool:
        if isinstance(plan, RowPlan):
            self.read_rows(file, plan, start, stop, raw, scratch)
        else:
            self._read_chunks(file, plan, start, stop, raw, scratch)
        return False

    def chunk_key(self, place: int) -> tuple[int, int]:
        """Return the key of a chunk in the cache."""
        return id(self), place

    def read_rows(
        self,
        file: LocalFile,
        plan: RowPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        """Read rows `start` to `stop` of a plan from the open file."""
        nbytes = plan.row_nbytes
        if nbytes == 0:
            return
        offset, sample = plan.offset[start:stop], plan.sample[start:stop]
        first = plan.rows if isinstance(plan.rows, int) else 0
        goes_to = None if isinstance(plan.rows, int) else plan.rows[start:stop]
        never_written = np.flatnonzero(offset < 0)
        for row in never_written:
            raw[first + start + row if goes_to is None else goes_to[row]] = self._fill
        if never_written.size == offset.size:
            return
        rows = raw.view(np.uint8).reshape(raw.shape[0], nbytes)
        if goes_to is None:
            rows = rows[first + start : first + stop]
        try:
            with scratch.counts.timed("read_ns"):
                mapped = file.mapped(int(offset.max()) + nbytes)
                if mapped is None:
                    position, offset = _in_file_order(offset)
                    goes_to = position if goes_to is None else goes_to[position]
                    file.read_rows(goes_to, offset, rows, scratch.require_open)
                else:
                    self._gather(mapped, offset, sample, goes_to, rows)
        except ReadError as error:
            raise ReadError(
                f'{error} (dataset "{self._layout.path}", samples {sample.min()} to {sample.max()})'
            ) from error
        scratch.counts.read_nbytes += (stop - start) * nbytes

    def _gather(
        self, mapped: Bytes, offset: Int64s, sample: Int64s, goes_to: Int64s | None, rows: Bytes
    ) -> None:
        """Copy rows out of the map; a few NumPy calls for all of them where they are small."""
        nbytes = rows.shape[1]
        if self._is_table and goes_to is None:
            begin = self._layout.offset
            count = min(self._layout.num_samples, (mapped.size - begin) // nbytes)
            table = mapped[begin : begin + count * nbytes].reshape(count, nbytes)
            np.take(table, sample, axis=0, out=rows, mode="clip")
            return
        position, offset = _in_file_order(offset)
        if goes_to is not None:
            position = goes_to[position]
        item = np.dtype((np.void, nbytes))
        window = np.ndarray(mapped.size - nbytes + 1, item, mapped.data, strides=(1,))
        out = rows.view(item).reshape(-1)
        block = max(1, _GATHER_BLOCK_NBYTES // nbytes)
        for begin in range(0, offset.size, block):
            part = slice(begin, begin + block)
            out[position[part]] = window[offset[part]]

    def _read_chunks(
        self,
        file: LocalFile,
        plan: ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        try:
            mapped = self._mapped_chunks(file, plan.place[start:stop])
        except ReadError as error:
            self._raise_chunk_error(plan, start, error)
        if mapped is not None and self._decode_rows(plan, start, stop, raw, mapped, scratch):
            return
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
        for item, group in enumerate(groups, start):
            scratch.require_open()
            at = group - groups[0]
            its_runs = runs[bounds[at] - first : bounds[at + 1] - first]
            try:
                self._read_chunk(file, mapped, plan, item, its_runs, raw, scratch, self._cache)
            except Exception as error:
                if interruption(error) is not None:
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the map
                del mapped
                self._raise_chunk_error(plan, item, error)

    def read_item(
        self, file: LocalFile, plan: ChunkPlan, item: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read one item of a plan from the open file, past the cache of decoded chunks.

        Whoever calls it may hold a claim there, which it would wait for.
        """
        group = plan.group[item]
        of_item = slice(plan.run_start[group], plan.run_start[group + 1])
        columns = (plan.run_local, plan.run_position, plan.run_length)
        runs = list(zip(*(column[of_item].tolist() for column in columns), strict=True))
        scratch.require_open()
        try:
            self._read_chunk(file, None, plan, item, runs, raw, scratch, None)
        except Exception as error:
            self._raise_chunk_error(plan, item, error)

    def _mapped_chunks(self, file: LocalFile, place: Int64s) -> Bytes | None:
        """Return the file's bytes, if encoded chunks are to be decoded where they lie.

        That saves a copy, and a turn of the GIL, for each chunk.
        """
        chunks = self._layout.chunks
        if chunks is None or not self._layout.filters:
            return None
        place = place[place >= 0]
        if not place.size:
            return None
        return file.mapped(int((chunks.offset[place] + chunks.nbytes[place]).max()))

    def _decode_rows(
        self,
        plan: ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        mapped: Bytes,
        scratch: Scratch,
    ) -> bool:
        """Decode chunks straight to the batch, if each of them makes up whole rows of it.

        False: nothing was done, or something is damaged; go on chunk by chunk.
        """
        layout, chunks = self._layout, self._layout.chunks
        assert chunks is not None
        place, group = plan.place[start:stop], plan.group[start:stop]
        run = plan.run_start[group]
        is_whole = (plan.run_start[group + 1] - run == 1) & (place >= 0)
        is_whole &= plan.run_length[run] == layout.chunk_shape[0]
        masks = chunks.filter_mask[place]
        mask = int(masks[0])
        if not (layout.rows_are_whole and is_whole.all() and (masks == mask).all()):
            return False
        if self._pipeline.is_raw(mask):
            return False
        encoded = _pieces(mapped, chunks.offset[place], chunks.nbytes[place])
        begin = plan.run_position[run] * layout.row_nbytes
        flat = raw.reshape(-1).view(np.uint8)
        out = _pieces(flat, begin, np.full(begin.shape, layout.chunk_nbytes))
        with suppressing(ValueError, RuntimeError), scratch.counts.timed("decode_ns"):
            self._pipeline.decode_many(encoded, mask, out, scratch)
            scratch.counts.read_nbytes += int(chunks.nbytes[place].sum())
            scratch.counts.decoded_chunks += stop - start
            return True
        return False

    def _read_chunk(
        self,
        file: LocalFile,
        mapped: Bytes | None,
        plan: ChunkPlan,
        item: int,
        runs: list[Run],
        raw: NDArray[Any],
        scratch: Scratch,
        cache: ChunkCache | None,
    ) -> None:
        """Bring the samples of `runs` from one chunk to their rows of the batch."""
        place, region = int(plan.place[item]), self._regions[plan.cross[item]]
        if place < 0:
            for _, position, length in runs:
                raw[(slice(position, position + length), *region)] = self._fill
            return
        chunks = self._layout.chunks
        if chunks is None:
            axis = self._layout.sample_axis
            inside = (*region[:axis], slice(None), *region[axis:])
            self._scatter(self._mapped_dataset(file)[inside], runs, region, raw)
            return
        whole = self._filled_whole(raw, runs)
        if self._pipeline.is_raw(int(chunks.filter_mask[place])):
            scratch.counts.read_nbytes += int(chunks.nbytes[place])
            with scratch.counts.timed("read_ns"):
                chunk = self._raw_chunk(file, place, runs, whole, scratch)
                if whole is None:
                    self._scatter(chunk, runs, region, raw)
        elif whole is not None:
            self._decode(file, mapped, place, scratch, whole)
        else:
            decode = partial(self._decode, file, mapped, place, scratch)
            room = scratch.raw_chunk[: self._layout.chunk_nbytes]
            with contextlib.ExitStack() as claims:
                if cache is None:
                    decode(room)
                else:
                    room = claims.enter_context(cache.decoded(self.chunk_key(place), room, decode))
                with scratch.counts.timed("place_ns"):
                    self._scatter(self._as_chunk(room), runs, region, raw)

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

    def _mapped_dataset(self, file: LocalFile) -> NDArray[Any]:
        layout = self._layout
        mapped = file.mapped(layout.offset + layout.nbytes)
        if mapped is None:  # it may be: metadata.py sends what may not be mapped to h5py
            raise OutOfMemoryError(
                f'{layout.file}: dataset "{layout.path}": the file cannot be mapped into memory,'
                ' which reading columns needs; read it with io="pread"'
            )
        return np.ndarray(layout.shape, self._dtype, mapped.data, offset=layout.offset)

    def _decode(
        self, file: LocalFile, mapped: Bytes | None, place: int, scratch: Scratch, out: Bytes
    ) -> None:
        chunks = self._layout.chunks
        assert chunks is not None
        offset, nbytes = int(chunks.offset[place]), int(chunks.nbytes[place])
        if mapped is None:
            encoded = scratch.encoded[:nbytes]
            with scratch.counts.timed("read_ns"):
                file.read_into(offset, [encoded.data])
        else:
            encoded = mapped[offset : offset + nbytes]
        scratch.counts.decoded_chunks += 1
        scratch.counts.read_nbytes += nbytes
        with scratch.counts.timed("decode_ns"):
            self._decode_exactly(encoded, place, scratch, out)

    def _decode_exactly(self, encoded: Bytes, place: int, scratch: Scratch, out: Bytes) -> None:
        chunks = self._layout.chunks
        assert chunks is not None
        mask = int(chunks.filter_mask[place])
        try:
            self._pipeline.decode(encoded, mask, out, scratch)
        except ValueError as error:
            if interruption(error) is not None:
                raise
            # Some writers leave out what of a chunk lies beyond the dataset's edge.
            number = place if chunks.index is None else int(chunks.index[place])
            needed = self._layout.needed_nbytes(number)
            if needed == out.size:
                raise
            self._pipeline.decode(encoded, mask, out, scratch, least_nbytes=needed)

    def _raw_chunk(
        self, file: LocalFile, place: int, runs: list[Run], out: Bytes | None, scratch: Scratch
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
            file.read_into(offset, [out.data])
            return self._as_chunk(out)
        mapped = file.mapped(offset + nbytes)
        if mapped is not None:
            return self._as_chunk(mapped[offset : offset + nbytes])
        chunk = scratch.raw_chunk[:nbytes]
        for begin, end in self._needed(runs, nbytes):
            scratch.require_open()
            file.read_into(offset + begin, [chunk[begin:end].data])
        return self._as_chunk(chunk)

    def _needed(self, runs: list[Run], nbytes: int) -> list[tuple[int, int]]:
        """Return the byte ranges of a raw chunk that hold the samples of some runs."""
        if self._layout.sample_axis != 0:
            return [(0, nbytes)]
        size = self._piece_nbytes
        return [(local * size, (local + length) * size) for local, _, length in runs]

    def _as_chunk(self, chunk: Bytes) -> NDArray[Any]:
        return np.ndarray(self._piece_shape, self._dtype, chunk.data)

    def _raise_chunk_error(self, plan: ChunkPlan, item: int, error: Exception) -> NoReturn:
        """Say which chunk an error is about; damage is what a decoder, or a length, says."""
        layout = self._layout
        where = f'{layout.file}: dataset "{layout.path}"'
        if isinstance(error, MemoryError) and not isinstance(error, H5AsyncError):
            raise out_of_memory(f"{where}, a chunk of {layout.chunk_nbytes:,} bytes", error)
        is_damage = isinstance(error, ValueError | RuntimeError)
        is_damage = is_damage and not isinstance(error, H5AsyncError | RecursionError)
        if not is_damage and not isinstance(error, ReadError):
            raise error
        if layout.chunks is None:
            raise ReadError(f"{where}: {error}") from error
        place = plan.place[item]
        axis = layout.sample_axis
        corner = layout.cross_section[plan.cross[item]].copy()
        corner[axis] = plan.group_number[plan.group[item]] * layout.chunk_shape[axis]
        last = min(corner[axis] + layout.chunk_shape[axis], layout.num_samples) - 1
        remedy = "; the file is damaged there: restore it, or leave these samples out"
        raise ReadError(
            f"{where}, chunk {tuple(corner.tolist())} (samples {corner[axis]} to {last}),"
            f" {layout.chunks.nbytes[place]} bytes at byte {layout.chunks.offset[place]}: {error}"
            f"{remedy if is_damage else ''}"
        ) from error


def _regions(layout: DatasetLayout, rest: list[int]) -> list[tuple[slice, ...]]:
    """Return where in a row each piece of the cross-section goes, cut off at the row's end."""
    return [
        tuple(
            slice(int(corner[a]), min(int(corner[a]) + layout.piece_shape[a], layout.shape[a]))
            for a in rest
        )
        for corner in layout.cross_section
    ]


def _pieces(data: Bytes, begin: Int64s, nbytes: Int64s) -> Iterator[Bytes]:
    """Give pieces of some bytes, each made when it is due."""
    return map(data.__getitem__, map(slice, begin.tolist(), (begin + nbytes).tolist()))


def _in_file_order(offset: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows that were ever written, by their place in the file, and these places."""
    position = np.argsort(offset)
    position = position[np.searchsorted(offset, 0, sorter=position) :]  # -1: never written
    return position, offset[position]
