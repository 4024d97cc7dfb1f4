"""Executes plans by the compiled core, without the GIL.

A slice of a read plan enters; rows of a batch leave. The core stops before an item that it cannot
do; that one is done in Python (`rows.py`, `chunks.py`), which has the words for what is wrong, and
the core goes on behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import (
    IO_MODES,
    ChunkPlanStruct,
    DatasetStruct,
    Event,
    FileStruct,
    RowsStruct,
)
from h5async.errors import ReaderClosedError
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError, LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.records import ChunkPlan, Int64s, RowPlan
from h5async.read.chunkcache import ChunkCache, Claims, State
from h5async.read.chunks import ChunkReader
from h5async.read.execute import FileExecutor
from h5async.read.rows import RowReader
from h5async.read.scratch import CLOSED, Scratch
from h5async.read.transform import NativeTransform


class NativeExecutor(FileExecutor):
    """Executes plans by the compiled core. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    layout
        Of a dataset that it can take: `method_of` says so.
    files
        Opens the file; closed by whoever made it.
    cache
        For decoded chunks.
    """

    def __init__(
        self, core: Core, layout: DatasetLayout, files: LocalFiles, cache: ChunkCache
    ) -> None:
        super().__init__(layout, files)
        self._core = core
        self._cache = cache
        # In Python, for what the core refuses.
        self._rows = RowReader(layout)
        self._chunks = ChunkReader(layout, cache)
        fill = np.ascontiguousarray(layout.raw_fill).reshape(1).view(np.uint8)
        self._fill = fill
        self._dataset = DatasetStruct()
        self._kept: list[Any] = []  # what the structure points to
        if layout.chunk_shape or not layout.rows_are_whole:
            self._describe()
        self._has_masks = layout.chunks is not None and bool(layout.chunks.filter_mask.any())
        self._keeps = layout.unit_nbytes > 0  # chunks; not those that always go to a batch whole

    def _execute(
        self,
        plan: RowPlan | ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        """Read items from an open file; return whether the core has compared its stamp."""
        is_left = False  # to Python
        if isinstance(plan, RowPlan):
            done = self._read_rows(file, stamp, plan, start, stop, raw, scratch)
            while done < stop:
                is_left = True
                self._rows.read(file, plan, done, done + 1, raw, scratch)
                done = self._read_rows(file, stamp, plan, done + 1, stop, raw, scratch)
        else:
            call = _ChunkCall(self._core, self._dataset, file, stamp, plan, raw, scratch)
            is_left = self._read_chunks(call, start, stop)
        return not is_left and not file.has_swmr_writer

    def transform_rows(
        self,
        plan: RowPlan,
        start: int,
        stop: int,
        transform: NativeTransform,
        out: NDArray[Any],
        scratch: Scratch,
    ) -> int:
        """Bring rows that the page cache holds, transformed, to `out`, without a copy between.

        Returns
        -------
        int
            The number of the first row that was not done.
        """
        offset = plan.offset[start:stop]
        rows = RowsStruct(offset=address(offset), num_items=offset.size, row_nbytes=plan.row_nbytes)
        done = 0

        def work(file: LocalFile, stamp: FileStamp) -> bool:
            nonlocal done
            call = CoreCall(self._core, file, stamp, scratch)
            done = self._core.transform_rows(
                *call.arguments,
                ctypes.byref(rows),
                ctypes.byref(transform.struct),
                address(out[start:stop]),
            )
            call.finish()
            return not file.has_swmr_writer

        self._files.read(self._layout.file, self._layout.stamp, work)
        return start + int(done)

    def _read_rows(
        self,
        file: LocalFile,
        stamp: FileStamp,
        plan: RowPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> int:
        """Read rows as far as it goes; return the number of the first that was not read."""
        if start >= stop or plan.row_nbytes == 0:
            return stop
        offset = plan.offset[start:stop]
        rows, position, first = raw.shape[0], None, 0
        if isinstance(plan.rows, int):
            first = plan.rows + start
        else:
            position = plan.rows[start:stop]
        struct = RowsStruct(
            address(offset),
            None if position is None else address(position),
            offset.size,
            address(raw) + first * plan.row_nbytes,
            rows - first,
            plan.row_nbytes,
            address(self._fill),
            self._fill.size,
        )
        call = CoreCall(self._core, file, stamp, scratch)
        done = self._core.read_rows(*call.arguments, ctypes.byref(struct))
        call.finish()
        return start + int(done)

    def _read_chunks(self, call: _ChunkCall, start: int, stop: int) -> bool:
        """Read chunks of a plan; return whether Python read some."""
        state = np.zeros(stop - start, np.uint8)
        target = np.zeros(stop - start, np.int64)
        kept = self._partial(call.plan, start, stop) if self._keeps else np.zeros(0, np.int64)
        if not kept.size:
            return self._run(call, start, stop, state, target, None)
        # Chunks of which some are kept, or were.
        keys = [self._chunks.key(entry) for entry in call.plan.entry[start + kept].tolist()]
        with self._cache.claimed(keys, self._layout.chunk_nbytes) as claims:
            state[kept] = claims.states
            target[kept] = [0 if data is None else address(data) for data in claims.buffers]
            is_left = self._run(call, start, stop, state, target, claims)
        # Others were about to decode these; nobody waits while holding a claim.
        for i in np.flatnonzero(state == State.BUSY).tolist():
            is_left |= self._read_busy(call, start + i)
        return is_left

    def _run(
        self,
        call: _ChunkCall,
        start: int,
        stop: int,
        state: NDArray[np.uint8],
        target: Int64s,
        claims: Claims | None,
    ) -> bool:
        """Have the core read chunks, and Python those that it refuses; tell if there were any."""
        is_left = False
        for refused in call.run(start, stop, state, target):
            is_left = True
            if claims is not None:
                claims.give_up(self._chunks.key(int(call.plan.entry[refused])))
            self._chunks.read_item(call.file, call.plan, refused, call.raw, call.scratch)
        if claims is not None:
            claims.are_filled = True
        return is_left

    def _read_busy(self, call: _ChunkCall, item: int) -> bool:
        """Wait until another thread has decoded a chunk, and take from it."""
        key = self._chunks.key(int(call.plan.entry[item]))
        with self._cache.claimed([key], self._layout.chunk_nbytes, wait=True) as claims:
            data = claims.buffers[0]
            state = np.array(claims.states, np.uint8)
            target = np.array([0 if data is None else address(data)], np.int64)
            return self._run(call, item, item + 1, state, target, claims)

    def _partial(self, plan: ChunkPlan, start: int, stop: int) -> Int64s:
        """Return which of some items take a part of an encoded chunk only."""
        entry = plan.entry[start:stop]
        is_partial = (entry >= 0) & ~plan.is_whole(self._layout, start, stop)
        if self._has_masks:
            assert self._layout.chunks is not None
            is_partial &= ~self._chunks.pipeline.is_raw(self._layout.chunks.filter_mask[entry])
        return np.flatnonzero(is_partial)

    def _describe(self) -> None:
        """Set up what the core has to know of a dataset."""
        layout, dataset, chunks = self._layout, self._dataset, self._layout.chunks
        geometry = layout.geometry
        dataset.filters = self._core.filters(layout.filters)
        dataset.num_filters = len(layout.filters)
        if chunks is not None:
            dataset.chunk_offset = self._keep(chunks.offset)
            dataset.chunk_stored = self._keep(chunks.nbytes)
            dataset.chunk_mask = self._keep(chunks.filter_mask, np.uint32)
        dataset.num_chunks = 1 if chunks is None else chunks.offset.size
        dataset.begin = layout.offset if chunks is None else -1
        dataset.num_cross, dataset.rank = geometry.extents.shape
        dataset.chunk_strides = self._keep(geometry.chunk_strides)
        dataset.row_strides = self._keep(geometry.row_strides)
        dataset.extents = self._keep(geometry.extents)
        dataset.row_begin = self._keep(geometry.row_begin)
        dataset.piece_begin = self._keep(geometry.piece_begin)
        dataset.chunk_nbytes = geometry.chunk_nbytes
        dataset.chunk_samples = geometry.chunk_samples
        dataset.sample_stride = geometry.sample_stride
        dataset.itemsize, dataset.row_nbytes = layout.dtype.itemsize, layout.row_nbytes
        dataset.rows_are_whole = bool(layout.chunk_shape) and layout.rows_are_whole
        dataset.fill = address(self._fill)

    def _keep(self, array: NDArray[Any], dtype: Any = np.int64) -> int:
        array = np.ascontiguousarray(array, dtype)
        self._kept.append(array)
        return address(array)


class CoreCall:
    """Calls of the core for one file, in one thread."""

    def __init__(self, core: Core, file: LocalFile, stamp: FileStamp, scratch: Scratch) -> None:
        self._struct = FileStruct(
            file.descriptor,
            IO_MODES[file.io],
            file.map_address or None,
            file.map_nbytes,
            *stamp,
        )
        if file.has_swmr_writer:
            self._struct.nbytes = -1  # it changes all the time
        self._worker = scratch.worker(core)
        self.arguments = ctypes.byref(self._struct), ctypes.byref(self._worker.struct)

    def finish(self) -> None:
        """Note, right after a call, how it ended.

        Raises
        ------
        FileEventError
            If what was read is worth nothing: the file has changed, or a page is missing.
        ReaderClosedError
            If nobody wants it any more.
        """
        self._worker.note_return()
        event = self._struct.event
        if event == Event.STOPPED:
            raise ReaderClosedError(CLOSED)
        if event != Event.NONE:
            raise FileEventError(map_failed=event == Event.FAULTED)


class _ChunkCall:
    """Calls of the core for one plan, in one thread."""

    def __init__(
        self,
        core: Core,
        dataset: DatasetStruct,
        file: LocalFile,
        stamp: FileStamp,
        plan: ChunkPlan,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        self.file = file
        self.plan = plan
        self.raw = raw
        self.scratch = scratch
        self._core = core
        self._call = CoreCall(core, file, stamp, scratch)
        self._struct = ChunkPlanStruct(
            address(plan.entry),
            address(plan.cross),
            address(plan.group),
            address(plan.run_start),
            address(plan.run_local),
            address(plan.run_position),
            address(plan.run_length),
            plan.entry.size,
            plan.run_start.size - 1,
            plan.run_local.size,
        )
        self._dataset = ctypes.byref(dataset)

    def run(self, start: int, stop: int, state: NDArray[np.uint8], target: Int64s) -> Iterator[int]:
        """Bring chunks to the batch, and yield each item that has to be done in another way.

        Parameters
        ----------
        state, target
            For each item from `start` on: what to do, and the address of memory for the chunk.
        """
        begin = start
        while begin < stop:
            at = begin - start
            done = self._core.read_chunks(
                self._dataset,
                *self._call.arguments,
                ctypes.byref(self._struct),
                begin,
                stop,
                address(state) + at,
                address(target) + 8 * at,
                address(self.raw),
                self.raw.shape[0],
            )
            self._call.finish()
            begin += int(done)
            if begin < stop:
                yield begin
                begin += 1
