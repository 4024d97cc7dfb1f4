"""A slice of a read plan enters; rows of a batch leave: by the compiled core, without the GIL.

The core stops before an item that it cannot do; that one is done in Python (`execute.py`), which
has the words for what is wrong, and the core goes on behind it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.chunkcache import ChunkCache, State
from h5async.codecs import Scratch
from h5async.core import (
    IO_MODES,
    MAX_RANK,
    ChunkPlanStruct,
    Core,
    CoreWorker,
    DatasetStruct,
    FileStruct,
    RowsStruct,
    TransformStruct,
    address,
    transform_source,
)
from h5async.errors import ReadError
from h5async.execute import PlanExecutor
from h5async.layout import DatasetLayout
from h5async.plan import ChunkPlan, Int64s, RowPlan
from h5async.storage import LocalFile, LocalFiles
from h5async.stored import StoredPlan
from h5async.transform import RowTransform


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
        worker = scratch.worker(self._core)
        with self._files.using(self._layout.file, self._layout.file_id) as file:
            struct = _file_struct(file)
            if isinstance(plan, RowPlan):
                done = self._read_rows(struct, worker, plan, start, stop, raw)
                while done < stop:
                    self._python.execute(plan, done, done + 1, raw, scratch)
                    done = self._read_rows(struct, worker, plan, done + 1, stop, raw)
            else:
                self._read_chunks(struct, worker, plan, start, stop, raw, scratch)

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
        worker, offset = scratch.worker(self._core), plan.offset[start:stop]
        rows = RowsStruct(offset=address(offset), num_items=offset.size, row_nbytes=plan.row_nbytes)
        with self._files.using(self._layout.file, self._layout.file_id) as file:
            done = self._core.transform_rows(
                ctypes.byref(_file_struct(file)),
                ctypes.byref(worker.struct),
                ctypes.byref(rows),
                ctypes.byref(transform.struct),
                address(out[start:stop]),
            )
        worker.note_return()
        return start + int(done)

    def _read_rows(
        self,
        file: FileStruct,
        worker: CoreWorker,
        plan: RowPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
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
        done = self._core.read_rows(
            ctypes.byref(file), ctypes.byref(worker.struct), ctypes.byref(struct)
        )
        worker.note_return()
        return start + int(done)

    def _read_chunks(
        self,
        file: FileStruct,
        worker: CoreWorker,
        plan: ChunkPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        call = _ChunkCall(self._core, self._dataset, file, worker, plan, raw)
        state = np.zeros(stop - start, np.uint8)
        target = np.zeros(stop - start, np.int64)
        kept = self._partial(plan, start, stop) if self._keeps else np.zeros(0, np.int64)
        if not kept.size:
            for failed in call.run(start, stop, state, target):
                self._python.execute(plan, failed, failed + 1, raw, scratch)
            return
        self._read_kept(call, kept, start, stop, state, target, scratch)

    def _read_kept(
        self,
        call: _ChunkCall,
        kept: Int64s,
        start: int,
        stop: int,
        state: NDArray[np.uint8],
        target: Int64s,
        scratch: Scratch,
    ) -> None:
        """Read chunks of which some are kept, or were."""
        plan, nbytes = call.plan, self._layout.chunk_nbytes
        keys = [self._python.chunk_key(place) for place in plan.place[start + kept].tolist()]
        with self._cache.claimed(keys, nbytes) as claims:
            state[kept] = claims.states
            target[kept] = [0 if data is None else address(data) for data in claims.buffers]
            failures = list(call.run(start, stop, state, target, one=True))
            # What a failure left undone is not claimed any longer.
            reached = failures[0] - start if failures else stop - start
            claims.num_filled = int(np.searchsorted(kept, reached))
        for failed in failures:
            self._python.execute(plan, failed, failed + 1, call.raw, scratch)
            if failed + 1 < stop:
                self.execute(plan, failed + 1, stop, call.raw, scratch)
                stop = failed
        # Others were about to decode these; nobody waits while holding a claim.
        for i in np.flatnonzero(state[: stop - start] == State.BUSY).tolist():
            self._read_busy(call, start + i, scratch)

    def _read_busy(self, call: _ChunkCall, item: int, scratch: Scratch) -> None:
        """Wait until another thread has decoded a chunk, and take from it."""
        key = self._python.chunk_key(int(call.plan.place[item]))
        with self._cache.claimed([key], self._layout.chunk_nbytes, wait=True) as claims:
            data = claims.buffers[0]
            state = np.array(claims.states, np.uint8)
            target = np.array([0 if data is None else address(data)], np.int64)
            failures = list(call.run(item, item + 1, state, target, one=True))
            claims.num_filled = 0 if failures else 1
        for failed in failures:
            self._python.execute(call.plan, failed, failed + 1, call.raw, scratch)

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


def _file_struct(file: LocalFile) -> FileStruct:
    return FileStruct(file.descriptor, IO_MODES[file.io], file.map_address or None, file.map_nbytes)


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
        worker = scratch.worker(self._core)
        for leaf, begin, end in zip(
            plan.leaf, plan.leaf_start[:-1], plan.leaf_start[1:], strict=True
        ):
            here = slice(max(start, begin), min(stop, end))
            count = here.stop - here.start
            if count <= 0:
                continue
            source = self._leaves[leaf]
            offset, nbytes = plan.offset[here], plan.nbytes[here]
            with self._files.using(source.file, source.file_id) as file:
                struct = _file_struct(file)
                done = self._core.read_stored(
                    ctypes.byref(struct),
                    ctypes.byref(worker.struct),
                    address(offset),
                    address(nbytes),
                    address(plan.position[here]),
                    count,
                    address(stored),
                    stored.nbytes,
                )
            worker.note_return()
            if done < count:
                raise ReadError(
                    f'{source.file}: dataset "{source.path}": {nbytes[done]} bytes at byte'
                    f" {offset[done]} cannot be read"
                )


class _ChunkCall:
    """Calls of the core for one plan, in one thread."""

    def __init__(
        self,
        core: Core,
        dataset: DatasetStruct,
        file: FileStruct,
        worker: CoreWorker,
        plan: ChunkPlan,
        raw: NDArray[Any],
    ) -> None:
        self.plan = plan
        self.raw = raw
        self._core = core
        self._worker = worker
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
        self._arguments = [ctypes.byref(s) for s in (dataset, file, worker.struct, self._struct)]

    def run(
        self,
        start: int,
        stop: int,
        state: NDArray[np.uint8],
        target: Int64s,
        *,
        one: bool = False,
    ) -> Iterator[int]:
        """Bring chunks to the batch, and yield each item that has to be done in another way.

        Parameters
        ----------
        state, target
            For each item from `start` on: what to do, and the address of memory for the chunk.
        one
            Stop after the first item that fails.
        """
        begin = start
        while begin < stop:
            at = begin - start
            done = self._core.read_chunks(
                *self._arguments,
                begin,
                stop,
                address(state) + at,
                address(target) + 8 * at,
                address(self.raw),
                self.raw.shape[0],
            )
            self._worker.note_return()
            begin += int(done)
            if begin < stop:
                yield begin
                begin += 1
                if one:
                    return


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
