"""A slice of a read plan enters; rows of a batch leave: by the compiled core, without the GIL.

The core stops before an item that it cannot do; that one is done in Python (`execute.py`), which
has the words for what is wrong, and the core goes on behind it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.structures import (
    IO_MODES,
    MAX_RANK,
    ChunkPlanStruct,
    DatasetStruct,
    Event,
    FileStruct,
    RowsStruct,
    TransformStruct,
    transform_source,
)
from h5async.errors import ReaderClosedError, ReadError
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError, LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.plan import ChunkPlan, Int64s, RowPlan
from h5async.plan.stored import StoredPlan
from h5async.plan.transform import RowTransform
from h5async.read.chunkcache import ChunkCache, Claims, State
from h5async.read.codecs import Scratch
from h5async.read.execute import PlanExecutor


def way_of(core: Core | None, layout: DatasetLayout) -> Literal["core", "python", "h5py", "memory"]:
    """Tell who executes plans for a dataset without parts."""
    if layout.fallback_reason is not None:
        return "h5py"
    if layout.values is not None:
        return "memory"
    if core is None or len(layout.shape) > MAX_RANK or core.filters(layout.filters) is None:
        return "python"
    return "core"


class NativeExecutor:
    """Executes plans for what lies in one file. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    layout
        Of a dataset that it can take: `way_of` says so.
    files
        Opens the file; closed by whoever made it.
    cache
        For decoded chunks.
    """

    def __init__(
        self, core: Core, layout: DatasetLayout, files: LocalFiles, cache: ChunkCache
    ) -> None:
        self._core = core
        self._layout = layout
        self._files = files
        self._cache = cache
        self._python = PlanExecutor(layout, files, cache)
        fill = np.ascontiguousarray(layout.raw_fill).reshape(1).view(np.uint8)
        self._fill = fill
        self._dataset = DatasetStruct()
        self._kept: list[Any] = []  # what the structure points to
        if layout.chunk_shape or not layout.rows_are_whole:
            self._describe()
        self._has_masks = layout.chunks is not None and bool(layout.chunks.filter_mask.any())
        # Chunks that always go to a batch as a whole are never kept.
        self._keeps = bool(layout.filters) and not (
            layout.rows_are_whole and layout.chunk_shape[0] == 1
        )

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
        stamp: FileStamp,
    ) -> bool:
        """Read items from an open file; return whether the core has compared its stamp."""
        is_left = False  # to Python
        if isinstance(plan, RowPlan):
            done = self._read_rows(file, stamp, plan, start, stop, raw, scratch)
            while done < stop:
                is_left = True
                self._python.read_rows(file, plan, done, done + 1, raw, scratch)
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
            call = _Call(self._core, file, stamp, scratch)
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
        call = _Call(self._core, file, stamp, scratch)
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
        keys = [self._python.chunk_key(place) for place in call.plan.place[start + kept].tolist()]
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
                claims.give_up(self._python.chunk_key(int(call.plan.place[refused])))
            self._python.read_item(call.file, call.plan, refused, call.raw, call.scratch)
        if claims is not None:
            claims.are_filled = True
        return is_left

    def _read_busy(self, call: _ChunkCall, item: int) -> bool:
        """Wait until another thread has decoded a chunk, and take from it."""
        key = self._python.chunk_key(int(call.plan.place[item]))
        with self._cache.claimed([key], self._layout.chunk_nbytes, wait=True) as claims:
            data = claims.buffers[0]
            state = np.array(claims.states, np.uint8)
            target = np.array([0 if data is None else address(data)], np.int64)
            return self._run(call, item, item + 1, state, target, claims)

    def _partial(self, plan: ChunkPlan, start: int, stop: int) -> Int64s:
        """Return which of some items take a part of an encoded chunk only."""
        place, group = plan.place[start:stop], plan.group[start:stop]
        is_partial = place >= 0
        if self._layout.rows_are_whole:
            run = plan.run_start[group]
            is_whole = plan.run_start[group + 1] - run == 1
            is_whole &= plan.run_length[run] == self._layout.chunk_shape[0]
            is_partial &= ~is_whole
        chunks = self._layout.chunks
        if chunks is not None and self._has_masks:
            every = (1 << len(self._layout.filters)) - 1
            is_partial &= (chunks.filter_mask[place] & every) != every  # else it is stored raw
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


class _Call:
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
            raise ReaderClosedError("the reader was closed while a batch was being read")
        if event != Event.NONE:
            raise FileEventError(map_failed=event == Event.FAULTED)


class StoredReader:
    """Reads chunks as they are stored. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    layout
        Of a dataset that has a `StoredFormat`.
    files
        Opens the files; closed by whoever made it.
    """

    def __init__(self, core: Core, layout: DatasetLayout, files: LocalFiles) -> None:
        self._core = core
        self._leaves = list(layout.leaves())
        self._files = files

    def execute(
        self, plan: StoredPlan, start: int, stop: int, stored: NDArray[np.uint8], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan to their places in `stored`.

        Raises
        ------
        ReadError
            If one cannot be read.
        """
        for leaf, begin, end in zip(
            plan.leaf, plan.leaf_start[:-1], plan.leaf_start[1:], strict=True
        ):
            here = slice(max(start, begin), min(stop, end))
            if here.stop > here.start:
                source = self._leaves[leaf]
                work = partial(self._read, plan, source, here, stored, scratch)
                self._files.read(source.file, source.stamp, work)

    def _read(
        self,
        plan: StoredPlan,
        source: DatasetLayout,
        here: slice,
        stored: NDArray[np.uint8],
        scratch: Scratch,
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        offset, nbytes, count = plan.offset[here], plan.nbytes[here], here.stop - here.start
        call = _Call(self._core, file, stamp, scratch)
        done = self._core.read_stored(
            *call.arguments,
            address(offset),
            address(nbytes),
            address(plan.position[here]),
            count,
            address(stored),
            stored.nbytes,
        )
        call.finish()
        if done < count:
            raise ReadError(
                f'{source.file}: dataset "{source.path}": {nbytes[done]} bytes at byte'
                f" {offset[done]} cannot be read"
            )
        return not file.has_swmr_writer


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
        self._call = _Call(core, file, stamp, scratch)
        self._struct = ChunkPlanStruct(
            address(plan.place),
            address(plan.cross),
            address(plan.group),
            address(plan.run_start),
            address(plan.run_local),
            address(plan.run_position),
            address(plan.run_length),
            plan.place.size,
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


class NativeTransform:
    """Does in the core what `RowTransform.apply` does. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core.
    struct
        As the core takes it, but for the number of samples.
    factors
        float32: scale and offset, to which the structure points.
    """

    def __init__(
        self, core: Core, struct: TransformStruct, factors: list[NDArray[np.float32] | None]
    ) -> None:
        self._core = core
        self._factors = factors
        self.struct = struct

    def __call__(self, raw: NDArray[Any], out: NDArray[Any]) -> None:
        """Fill `out` from `raw`."""
        call = TransformStruct.from_buffer_copy(self.struct)
        call.samples = len(raw)
        self._core.transform(ctypes.byref(call), address(raw), address(out))


def native_transform(core: Core, transform: RowTransform) -> NativeTransform | None:
    """Return what does a transform in the core, or None where it cannot.

    It can where the last dimension of a sample becomes its first one, as channels of images do,
    or where no dimension moves; to the same dtype, or to float32.
    """
    channels = transform.channels
    is_scaled = transform.scale is not None or transform.offset is not None
    source = transform_source(transform.raw_dtype, transform.dtype, is_scaled)
    if source is None or channels is None or not math.prod(transform.row):
        return None
    struct = TransformStruct(
        points=math.prod(transform.row) // channels,
        channels=channels,
        source=source,
        is_float=source > 8,
    )
    factors = [
        None if f is None else np.broadcast_to(f.reshape(-1), channels).astype(np.float32)
        for f in (transform.scale, transform.offset)
    ]
    struct.scale, struct.offset = (None if f is None else address(f) for f in factors)
    return NativeTransform(core, struct, factors)
