"""Reads and decodes chunks in Python: `ChunkPlan`s.

An open file and a slice of a plan enter; the samples that the plan wants of each chunk leave, in
their rows of the batch. A chunk that makes up whole rows is decoded straight into them. Any other
one is decoded into a buffer that later batches may use again, or into the thread's scratch, and its
samples are copied from there.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import Bytes
from h5async.errors import H5AsyncError, ReadError, out_of_memory
from h5async.index.chunktable import ChunkTable
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.plan.records import ChunkPlan, Int64s
from h5async.read.chunkcache import ChunkCache
from h5async.read.pipeline import DAMAGED, FilterPipeline, wrong_size
from h5async.read.scratch import Scratch
from h5async.system.interruptions import interruption, suppressing

Run = tuple[int, int, int]  # first sample in the chunk, first row of the batch, number of samples


class _Reading(NamedTuple):
    """What all chunks of a call have in common.

    Attributes
    ----------
    file
        The open file.
    mapped
        The file's bytes, where encoded chunks are decoded where they lie.
    plan, raw, scratch
        As of `ChunkReader.read`.
    """

    file: LocalFile
    mapped: Bytes | None
    plan: ChunkPlan
    raw: NDArray[Any]
    scratch: Scratch


class ChunkReader:
    """Reads chunks of one dataset. Safe to use from many threads, each with its scratch.

    Parameters
    ----------
    layout
        Of a chunked dataset, or of a contiguous one that is read in columns.
    cache
        For decoded chunks.

    Attributes
    ----------
    pipeline
        Of the dataset.
    """

    def __init__(self, layout: DatasetLayout, cache: ChunkCache) -> None:
        self._layout = layout
        self._chunks = layout.chunks
        self.pipeline = FilterPipeline(layout.filters, layout.chunk_nbytes)
        self._cache = cache
        axis = layout.sample_axis
        self._fill = layout.raw_fill
        self._chunk_shape = layout.chunk_shape or layout.shape
        # What is copied in one go within a chunk: all that follows the sample dimension.
        self._piece_nbytes = layout.dtype.itemsize * math.prod(self._chunk_shape[axis + 1 :])
        self._regions = _regions(layout)

    def key(self, entry: int) -> tuple[int, int]:
        """Return the key of a chunk in the cache."""
        return id(self), entry

    def read(
        self,
        file: LocalFile,
        plan: ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        """Read items `start` to `stop` of a plan from the open file."""
        try:
            mapped = self._mapped_chunks(file, plan.entry[start:stop])
        except ReadError as error:
            self._raise_chunk_error(plan, start, error)
        is_whole = plan.is_whole(self._layout, start, stop)
        if mapped is not None and is_whole.all():
            if self._decode_rows(mapped, plan, start, stop, raw, scratch):
                return
        reading = _Reading(file, mapped, plan, raw, scratch)
        runs = _runs(plan, start, stop)
        for item, its_runs, whole in zip(range(start, stop), runs, is_whole.tolist(), strict=True):
            scratch.require_open()
            try:
                self._read_chunk(reading, item, its_runs, whole)
            except Exception as error:
                if interruption(error) is not None:
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the map
                del mapped, reading
                self._raise_chunk_error(plan, item, error)

    def _mapped_chunks(self, file: LocalFile, entry: Int64s) -> Bytes | None:
        """Return the file's bytes, if encoded chunks are to be decoded where they lie.

        That saves a copy, and waiting once for the GIL, for each chunk.
        """
        chunks = self._chunks
        if chunks is None or not self._layout.filters:
            return None
        entry = entry[entry >= 0]
        if not entry.size:
            return None
        return file.mapped(int((chunks.offset[entry] + chunks.nbytes[entry]).max()))

    def _decode_rows(
        self,
        mapped: Bytes,
        plan: ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> bool:
        """Decode chunks that are whole rows of the batch straight into it, with one call.

        False: nothing was done, or something is damaged; go on chunk by chunk.
        """
        layout, chunks, entry = self._layout, self._table, plan.entry[start:stop]
        if (entry < 0).any():
            return False
        masks = chunks.filter_mask[entry]
        mask = int(masks[0])
        if (masks != mask).any() or self.pipeline.is_raw(mask):
            return False
        encoded = _slices(mapped, chunks.offset[entry], chunks.nbytes[entry])
        first_row = plan.run_position[plan.run_start[plan.group[start:stop]]]
        sizes = np.full(first_row.shape, layout.chunk_nbytes)
        flat = raw.reshape(-1).view(np.uint8)
        out = _slices(flat, first_row * layout.row_nbytes, sizes)
        with suppressing(ValueError, RuntimeError), scratch.timed("decode_ns"):
            self.pipeline.decode_many(encoded, mask, out, scratch)
            scratch.counts.read_nbytes += int(chunks.nbytes[entry].sum())
            scratch.counts.decoded_chunks += stop - start
            scratch.counts.decoded_nbytes += int(sizes.sum())
            return True
        return False

    def _read_chunk(self, reading: _Reading, item: int, runs: list[Run], is_whole: bool) -> None:
        """Bring the samples of `runs` from one chunk to their rows of the batch."""
        plan, raw, scratch = reading.plan, reading.raw, reading.scratch
        entry, region = int(plan.entry[item]), self._regions[plan.cross[item]]
        if entry < 0:
            for _, position, length in runs:
                raw[(slice(position, position + length), *region)] = self._fill
            return
        if self._chunks is None:
            samples = sum(length for _, _, length in runs)
            scratch.counts.read_nbytes += samples * self._layout.row_nbytes
            axis = self._layout.sample_axis
            inside = (*region[:axis], slice(None), *region[axis:])
            mapped = self._mapped_dataset(reading.file)
            if mapped is None:
                self._read_columns(reading.file, runs, region, raw, scratch)
            else:
                self._scatter(mapped[inside], runs, region, raw)
            return
        whole = _as_bytes(raw, runs[0]) if is_whole else None
        if self.pipeline.is_raw(int(self._chunks.filter_mask[entry])):
            whole_nbytes = int(self._chunks.nbytes[entry])
            needed = [(0, whole_nbytes)] if is_whole else self._needed(runs, whole_nbytes)
            scratch.counts.read_nbytes += sum(end - begin for begin, end in needed)
            with scratch.timed("read_ns"):
                chunk = self._raw_chunk(reading.file, entry, runs, whole, scratch)
                if whole is None:
                    self._scatter(chunk, runs, region, raw)
        elif whole is not None:
            self._decode(reading, entry, whole)
        else:
            decode = partial(self._decode, reading, entry)
            room = scratch.raw_chunk[: self._layout.chunk_nbytes]
            with self._cache.decoded(self.key(entry), room, decode) as decoded:
                with scratch.timed("place_ns"):
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

    def _mapped_dataset(self, file: LocalFile) -> NDArray[Any] | None:
        layout = self._layout
        mapped = file.mapped(layout.offset + layout.nbytes)
        if mapped is None:
            return None
        return np.ndarray(layout.shape, layout.raw_dtype, mapped.data, offset=layout.offset)

    def _read_columns(
        self,
        file: LocalFile,
        runs: list[Run],
        region: tuple[slice, ...],
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        """Read samples of a contiguous dataset that is not mapped: a read for each column."""
        layout, axis = self._layout, self._layout.sample_axis
        outer, inner = layout.shape[:axis], layout.shape[axis + 1 :]
        nbytes = layout.dtype.itemsize * math.prod(inner)
        columns = (range(*piece.indices(n)) for piece, n in zip(region, outer, strict=False))
        for at in itertools.product(*columns):
            number = sum(i * math.prod(outer[k + 1 :]) for k, i in enumerate(at))
            begin = layout.offset + number * layout.num_samples * nbytes
            for local, position, length in runs:
                scratch.require_open()
                rows = np.empty((length, *inner), layout.raw_dtype)
                file.read_into(begin + local * nbytes, [_as_memory(rows)])
                goes_to: Any = (slice(position, position + length), *at, *region[axis:])
                raw[goes_to] = rows[(slice(None), *region[axis:])]

    def _decode(self, reading: _Reading, entry: int, out: Bytes) -> None:
        """Decode a chunk into `out`."""
        offset, nbytes = self._extent(entry)
        scratch = reading.scratch
        if reading.mapped is None:
            encoded = scratch.encoded[:nbytes]
            with scratch.timed("read_ns"):
                reading.file.read_into(offset, [encoded.data])
        else:
            encoded = reading.mapped[offset : offset + nbytes]
        scratch.counts.decoded_chunks += 1
        scratch.counts.decoded_nbytes += out.size
        scratch.counts.read_nbytes += nbytes
        with scratch.timed("decode_ns"):
            self._decode_exactly(encoded, entry, scratch, out)

    def _decode_exactly(self, encoded: Bytes, entry: int, scratch: Scratch, out: Bytes) -> None:
        chunks = self._table
        mask = int(chunks.filter_mask[entry])
        try:
            self.pipeline.decode(encoded, mask, out, scratch)
        except ValueError as error:
            if interruption(error) is not None:
                raise
            # Some writers leave out what of a chunk lies beyond the dataset's edge.
            number = entry if chunks.index is None else int(chunks.index[entry])
            needed = self._layout.needed_nbytes(number)
            if needed == out.size:
                raise
            self.pipeline.decode(encoded, mask, out, scratch, least_nbytes=needed)

    def _raw_chunk(
        self, file: LocalFile, entry: int, runs: list[Run], out: Bytes | None, scratch: Scratch
    ) -> NDArray[Any]:
        """Return a chunk without filters: `out` filled with it, or a view of scratch or map.

        In the scratch, only the samples of `runs` are read.
        """
        offset, nbytes = self._extent(entry)
        if nbytes != self._layout.chunk_nbytes:
            raise ValueError(wrong_size(self._layout.chunk_nbytes, nbytes))
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
        """Return the byte ranges of a chunk without filters that hold the samples of some runs."""
        if self._layout.sample_axis != 0:
            return [(0, nbytes)]
        size = self._piece_nbytes
        return [(local * size, (local + length) * size) for local, _, length in runs]

    @property
    def _table(self) -> ChunkTable:
        assert self._chunks is not None, "the dataset is contiguous"
        return self._chunks

    def _extent(self, entry: int) -> tuple[int, int]:
        """Return where a chunk lies in the file, and how many bytes of it."""
        return int(self._table.offset[entry]), int(self._table.nbytes[entry])

    def _as_chunk(self, chunk: Bytes) -> NDArray[Any]:
        return np.ndarray(self._chunk_shape, self._layout.raw_dtype, chunk.data)

    def _raise_chunk_error(self, plan: ChunkPlan, item: int, error: Exception) -> NoReturn:
        """Say which chunk an error is about; damage is what a decoder, or a length, says."""
        layout, chunks = self._layout, self._chunks
        where = f'{layout.file}: dataset "{layout.path}"'
        if isinstance(error, MemoryError) and not isinstance(error, H5AsyncError):
            raise out_of_memory(f"{where}, a chunk of {layout.chunk_nbytes:,} bytes", error)
        is_damage = isinstance(error, ValueError | RuntimeError)
        is_damage = is_damage and not isinstance(error, H5AsyncError | RecursionError)
        if not is_damage and not isinstance(error, ReadError):
            raise error
        if chunks is None:
            raise ReadError(f"{where}: {error}") from error
        entry = plan.entry[item]
        axis = layout.sample_axis
        corner = layout.cross_section[plan.cross[item]].copy()
        corner[axis] = plan.group_number[plan.group[item]] * layout.chunk_shape[axis]
        last = min(corner[axis] + layout.chunk_shape[axis], layout.num_samples) - 1
        raise ReadError(
            f"{where}, chunk {tuple(corner.tolist())} (samples {corner[axis]} to {last}),"
            f" {chunks.nbytes[entry]} bytes at byte {chunks.offset[entry]}: {error}"
            f"{DAMAGED if is_damage else ''}"
        ) from error


def _regions(layout: DatasetLayout) -> list[tuple[slice, ...]]:
    """Return where in a row each piece of the cross-section goes, cut off at the row's end."""
    rest = [a for a in range(len(layout.shape)) if a != layout.sample_axis]
    return [
        tuple(
            slice(int(corner[a]), min(int(corner[a]) + layout.piece_shape[a], layout.shape[a]))
            for a in rest
        )
        for corner in layout.cross_section
    ]


def _runs(plan: ChunkPlan, start: int, stop: int) -> Iterator[list[Run]]:
    """Yield the runs of each item from `start` to `stop`."""
    groups = plan.group[start:stop].tolist()
    bounds = plan.run_start[groups[0] : groups[-1] + 2].tolist()
    first, last = bounds[0], bounds[-1]
    columns = plan.run_local, plan.run_position, plan.run_length
    runs = list(zip(*(column[first:last].tolist() for column in columns), strict=True))
    for group in groups:
        at = group - groups[0]
        yield runs[bounds[at] - first : bounds[at + 1] - first]


def _slices(data: Bytes, begin: Int64s, nbytes: Int64s) -> Iterator[Bytes]:
    """Give slices of some bytes, each made when it is asked for."""
    return map(data.__getitem__, map(slice, begin.tolist(), (begin + nbytes).tolist()))


def _as_bytes(raw: NDArray[Any], run: Run) -> Bytes:
    """Return the rows of a batch that a run makes up."""
    _, position, length = run
    return raw[position : position + length].reshape(-1).view(np.uint8)


def _as_memory(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
