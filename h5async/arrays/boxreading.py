"""Reads selections of one dataset: by the core, in several threads if large, or through h5py.

A layout enters, and one of three kinds of readers leaves. `BoxReader` reads a dataset that holds
its own values: to the core, it is a single sample, of which any part can be read. `RowsReader`
reads rows of a dataset whose values lie in others; `H5pyReader`, what only h5py can read.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from struct import Struct
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.arrays.selections import Box, Int64s, Numbers, Selection, cut_box, parts_of_box
from h5async.config.files import Kept
from h5async.core.binding import Core, address, load_core
from h5async.errors import ReadError
from h5async.index.changes import FileChanges
from h5async.index.datasettable import shared
from h5async.index.layout import Crop, DatasetLayout
from h5async.index.links import Reach
from h5async.plan.records import SamplesPlan
from h5async.read.collection import Collection
from h5async.read.coretables import Scratch, ScratchSize
from h5async.read.executors import Executors
from h5async.read.fallback import FallbackReader, WantedRows
from h5async.read.farsources import FarSources
from h5async.read.queue import SlotBatch
from h5async.system.interruptions import call_when_gone, suppressing

# Up to these sizes, one thread reads as fast as several: chunks to decode, and anything else.
_ALONE_NBYTES, _ALONE_COPIED_NBYTES = 1 << 18, 1 << 24
_LIKELY_NBYTES = 4 << 20
_PARTS = 4  # of a large selection, per thread
_BLOCK_ROWS = 1 << 18
_TRIES = 3  # attempts to read a selection while its file changes
_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
_DENSE = 4  # a list is read as a whole range if that has at most 4 times as many elements


class Threads:
    """Runs functions in up to `count` threads, including the caller's. Started when needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # of this process

    def run(self, work: Sequence[Callable[[], object]]) -> None:
        """Run all functions; once all threads are done, raise the first exception."""
        todo = deque(work)

        def work_off() -> None:
            while todo:
                try:
                    function = todo.popleft()
                except IndexError:
                    return
                function()

        futures: list[Future[None]] = []
        with suppressing(RuntimeError):  # closed meanwhile: the caller does all the work
            for _ in range(min(self.count, len(todo)) - 1):
                futures.append(self._started().submit(work_off))
        try:
            work_off()
        finally:
            todo.clear()
            begun = [future for future in futures if not future.cancel()]
            for future in begun:
                future.exception()  # waits: they write to the caller's memory
        for future in begun:
            future.result()

    def _started(self) -> ThreadPoolExecutor:
        owner, pool = self._pool or (0, None)
        if pool is None or owner != os.getpid():
            pool = ThreadPoolExecutor(self.count - 1, thread_name_prefix="h5async-array")
            self._pool = os.getpid(), pool
        return pool

    def close(self) -> None:
        """End the threads; they are started again when needed."""
        (owner, pool), self._pool = self._pool or (0, None), None
        if pool is not None and owner == os.getpid():
            pool.shutdown()


class _Lane:
    """A thread's resources to read by the core: the structure of a call, and scratch memory."""

    def __init__(self, core: Core, collection: Collection, room: ScratchSize) -> None:
        self.struct = core.Selected()
        self.scratch = Scratch.allocate(*room)
        worker = self.scratch.worker(core)
        self.done, self.decoded_chunks = worker.struct.done, 0
        self.struct.of = ctypes.pointer(collection.tables.fields[0])
        self.struct.sources = collection.tables.sources
        self.struct.worker = ctypes.pointer(worker.struct)
        self.struct.num_samples = collection.tables.num_samples
        self.pointer = ctypes.byref(self.struct)
        call_when_gone(self, core.free_plan, ctypes.byref(self.struct.plan))

    def batch(self, rows: int, arrays: Any) -> SlotBatch:
        """Return the plan of the last call, in the form that other modules take."""
        struct = self.struct
        fields, targets = ctypes.byref(struct.field), ctypes.byref(struct.target)
        return SlotBatch(struct.plan, targets, rows, arrays, fields=fields)


@cache
def _packer(count: int) -> Callable[..., None]:
    """Return a function that writes `Selected`'s members that vary by call: 7, and `count` more."""
    return Struct(f"={7 + count}q").pack_into


class CoreReader:
    """Base of the readers that use the core. Safe to use from many threads.

    `layout` is the one that the core reads parts of; `own` is that of the dataset.
    """

    def __init__(
        self,
        core: Core,
        layout: DatasetLayout,
        own: DatasetLayout,
        reach: Reach,
        kept: Kept | None,
        cache_nbytes: int,
        threads: Threads,
    ) -> None:
        self.own, self._core, self._threads = own, core, threads
        self._cache_nbytes = cache_nbytes
        self._changes, self._decodes = 0, True
        me = weakref.ref(self)

        def note_change() -> None:
            reader = me()
            if reader is not None:
                reader._changes += 1

        args = [cache_nbytes], note_change, None, kept
        self._executors = Executors(core, [layout], reach.io, *args)
        collection = self._executors.open_collection([None])
        assert collection is not None
        self._collection, tables = collection, collection.tables
        store = ctypes.addressof(tables.fields[0]) + core.Field.store.offset
        call_when_gone(self, core.free_store, store)
        call_when_gone(self, core.close_sources, tables.sources)
        self._is_far = tables.far is not None
        if tables.far is not None:
            call_when_gone(self, FarSources.close, tables.far)
        self.can_read = tables.can_read[0]  # whether the core can read any of it
        self._room = ScratchSize.of([layout])
        self._lanes: list[_Lane] = []
        self._alone_nbytes = _ALONE_NBYTES
        self._pack = _packer(0)
        self.deliver(own.dtype)
        self._call, self._offset = core.read_selected, core.Selected.samples.offset

    def deliver(self, dtype: np.dtype[Any]) -> None:
        """Set the dtype of small selections' arrays, which equals that of the dataset."""
        self._dtype, self._has_buffer = dtype, True
        try:  # ctypes gets the address of arrays that are buffers faster
            _from_buffer(np.empty(1, dtype))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            self._has_buffer = False

    def _lane(self) -> _Lane:
        try:
            return self._lanes.pop()
        except IndexError:
            return _Lane(self._core, self._collection, self._room)

    def _read(
        self,
        count: int,
        out: int,
        row_nbytes: int,
        may_keep: bool,
        numbers: Sequence[int],
        arrays: Any,
        samples: Int64s | None = None,
        places: Int64s | None = None,
    ) -> None:
        """Read parts; see `Selected` of the core. `arrays` hold the memory at `out`."""
        lane = self._lane()
        if not self.can_read:
            self._read_left(np.arange(count), lane.scratch, arrays)
            return
        struct = lane.struct
        at = [0 if one is None else address(one) for one in (samples, places)]
        more = *at, count, out, row_nbytes, may_keep, False
        _packer(len(numbers))(struct, self._offset, *more, *numbers)
        if not self._is_far:
            refused = self._call(lane.pointer)
        else:
            refused = self._core.plan_selected(lane.pointer) - 1
            if refused == 0:
                batch = lane.batch(count, arrays)
                self._collection.fetch(batch, lane.scratch)
                refused = self._collection.read(batch, 0, struct.plan.num_items, lane.scratch)
                self._collection.hold(batch, None)
        if refused:
            self._read_again(lane, refused, count, arrays)
        self._give_back(lane)

    def _read_small(self, out: NDArray[Any], call: tuple[int, ...]) -> Any:
        """Read a part into an array; `call` has the members of `Selected`. None if it fails."""
        try:
            lane = self._lanes.pop()
        except IndexError:
            lane = self._lane()
        self._pack(lane.struct, self._offset, *call)
        if self._call(lane.pointer):
            return None  # it is read again, to find out why
        self._give_back(lane)
        return out if out.shape else out[()]

    def _give_back(self, lane: _Lane) -> None:
        if lane.done.decoded_chunks != lane.decoded_chunks:
            lane.decoded_chunks, self._decodes = lane.done.decoded_chunks, True
        self._lanes.append(lane)

    def _is_copied(self, nbytes: int) -> bool:
        """Tell whether one thread reads a selection as fast as several.

        If the previous one needed no chunk decoded, this one most likely needs none, either.
        """
        is_copied = not self._decodes and nbytes <= _LIKELY_NBYTES
        self._decodes = False
        return is_copied or nbytes <= self._alone_nbytes

    def _read_again(self, lane: _Lane, refused: int, count: int, arrays: Any) -> None:
        if refused < 0:
            raise MemoryError("no memory is left for the plan of a selection")
        batch = lane.batch(count, arrays)
        self._collection.read_again(batch, lane.scratch)
        for _, rows in self._collection.left(batch):
            self._read_left(rows, lane.scratch, arrays)

    def _read_left(self, rows: Int64s, scratch: Scratch, arrays: Any) -> None:
        raise AssertionError("all of the dataset is read by the core")

    def read(self, selection: Selection, out: NDArray[Any]) -> None:
        """Read a selection into a C-contiguous array of its shape."""
        self._steadily(self._read_selection, selection, out)

    def _steadily(self, read: Callable[..., None], *arguments: Any) -> None:
        """Read again if the file changed meanwhile: some parts may be older than others."""
        for _ in range(_TRIES):
            changes = self._changes
            read(*arguments)
            if changes == self._changes:
                return
        raise ReadError(
            f'{self.own.file}: dataset "{self.own.path}": the file is written to all the time; read'
            " it when it is complete",
            filename=self.own.file,
            dataset=self.own.path,
        )

    def _read_selection(self, selection: Selection, out: NDArray[Any]) -> None:
        raise NotImplementedError


def strides_of(size: Numbers, itemsize: int) -> list[int]:
    """Return the distances in bytes between neighbours along each dimension, in C order."""
    strides, stride = [], itemsize
    for extent in reversed(size):
        strides.append(stride)
        stride *= extent
    strides.reverse()
    return strides


class BoxReader(CoreReader):
    """Reads any part of a dataset that holds its values itself."""

    def __init__(self, core: Core, own: DatasetLayout, *more: Any) -> None:
        rank = len(own.shape)
        whole = Crop(tuple(range(rank)), own.shape, False, (False,) * rank, "")
        layout = shared(own.with_one_sample()).changed(crop=whole)
        super().__init__(core, layout, own, *more)
        self._itemsize, self._shape = own.dtype.itemsize, own.shape
        self._pack = _packer(3 * rank)
        self._alone_nbytes = _ALONE_NBYTES if own.filters else _ALONE_COPIED_NBYTES
        self.cells: Sequence[int] = own.chunk_shape
        if not own.chunk_shape:  # cut along the first dimension: each part is contiguous
            first = next((axis for axis, size in enumerate(own.shape) if size > 1), 0)
            self.cells = [1 if axis == first else max(1, n) for axis, n in enumerate(own.shape)]

    def read_small(self, key: tuple[Any, ...]) -> Any:
        """Return the values that a key selects if they are a small box; None if not.

        Does the same as `read_box`, with as few Python calls as possible.
        """
        box = parts_of_box(key, self._shape)
        if box is None:
            return None
        begin, size, step, shape = box
        out = np.empty(shape, self._dtype)
        nbytes = out.nbytes
        if not nbytes or self._is_far or not self._is_copied(nbytes):
            return None
        to = _addressof(_from_buffer(out)) if self._has_buffer else address(out)  # type: ignore[arg-type]
        more = 0, 0, 1, to, nbytes, nbytes <= self._cache_nbytes, True, *begin, *size, *step
        return self._read_small(out, more)

    def read_box(self, box: Box, out: NDArray[Any]) -> None:
        """Read a box into an array of its shape, any strides, and the dataset's dtype."""
        strides = list(out.strides)
        if len(strides) < len(box.size):  # `out` lacks dimensions indexed by integers
            rest = iter([by for by, n in zip(strides, out.shape, strict=True) if n != 1])
            strides = [0 if n == 1 else next(rest) for n in box.size]
        self._steadily(self._read_box, box, out, strides)

    def _read_box(self, box: Box, out: NDArray[Any], strides: list[int]) -> None:
        to, nbytes = address(out), out.nbytes
        may_keep = nbytes <= self._cache_nbytes
        if self._is_copied(nbytes) or self._threads.count < 2:
            self._read(1, to, nbytes, may_keep, [*box.begin, *box.size, *box.step, *strides], out)
            return
        work = []
        for begin, size, at in cut_box(box, self.cells, _PARTS * self._threads.count):
            own = to + sum(n * stride for n, stride in zip(at, strides, strict=True))
            numbers = [*begin, *size, *box.step, *strides]
            work.append(partial(self._read, 1, own, nbytes, may_keep, numbers, out))
        self._threads.run(work)

    def _read_selection(self, selection: Selection, out: NDArray[Any]) -> None:
        box, bounds, index = selection.box, selection.bounds, selection.indices
        count, mask = 0 if index is None else index.size, selection.mask
        span = bounds.size[selection.axis] if count else 0
        if mask is not None:
            out = out.reshape(-1)  # an array type adds dimensions to both
            count, span = out.size, mask.size
        if not count:
            self._read_whole(box, out)
        elif span <= _DENSE * count:
            found = np.empty(bounds.shape, out.dtype)
            self._read_whole(bounds, found)
            out[...] = selection.taken(found)
        elif mask is not None:
            places = np.stack(np.nonzero(mask), axis=1)
            self._read_places(places, [1] * mask.ndim, box.step, out)
        else:
            assert index is not None
            places = np.tile(np.array(box.begin, np.int64), (count, 1))
            places[:, selection.axis] = index
            size = list(box.size)
            size[selection.axis] = 1
            rest = (*box.shape[: selection.place], *box.shape[selection.place + 1 :])
            found = (
                out.reshape(count, *rest)
                if not selection.place
                else np.empty((count, *rest), out.dtype)
            )
            self._read_places(places, size, box.step, found)
            if selection.place:
                out[...] = np.moveaxis(found, 0, selection.place)

    def _read_whole(self, box: Box, out: NDArray[Any]) -> None:
        strides = strides_of(box.size, self._itemsize)
        if out.size:
            self._read_box(box, out, strides)

    def _read_places(self, places: Int64s, size: list[int], step: list[int], out: Any) -> None:
        """Read scattered parts of equal size into an array, one after the other."""
        strides = strides_of(size, self._itemsize)
        nbytes, count = math.prod(size) * self._itemsize, len(places)
        parts = 1 if out.nbytes <= _ALONE_NBYTES else min(count, self._threads.count * _PARTS)
        numbers = [*places[0].tolist(), *size, *step, *strides]
        work = []
        for part in range(parts):
            first, last = count * part // parts, count * (part + 1) // parts
            own = np.ascontiguousarray(places[first:last], np.int64)
            samples = np.zeros(last - first, np.int64)
            to = address(out) + first * nbytes
            work.append(
                partial(self._read, last - first, to, nbytes, True, numbers, out, samples, own)
            )
        self._threads.run(work)


class RowsReader(CoreReader):
    """Reads rows, or parts of rows, of a dataset whose values lie in other datasets."""

    def __init__(self, core: Core, own: DatasetLayout, *more: Any, is_cut: bool) -> None:
        layout = shared(own)
        if is_cut:
            rank = len(own.row_shape)
            crop = Crop(tuple(range(rank)), own.row_shape, False, (False,) * rank, "")
            layout = layout.changed(crop=crop)
        super().__init__(core, layout, own, *more)
        self._layout = layout

    def read_small(self, key: tuple[Any, ...]) -> Any:
        """Return the rows that a key selects if they are few and whole; None if not."""
        box = parts_of_box(key, self.own.shape)
        if box is None or self._layout.crop is not None or self._is_far or not self.can_read:
            return None
        begin, size, step, shape = box
        if tuple(size[1:]) != self.own.row_shape or step[1:] != [1] * (len(step) - 1):
            return None
        out = np.empty(shape, self._dtype)
        if not out.nbytes or not self._is_copied(out.nbytes):
            return None
        samples = np.arange(begin[0], begin[0] + size[0] * step[0], step[0])
        to = _addressof(_from_buffer(out)) if self._has_buffer else address(out)  # type: ignore[arg-type]
        row_nbytes = out.nbytes // size[0]
        return self._read_small(out, (address(samples), 0, size[0], to, row_nbytes, True, False))

    def _read_selection(self, selection: Selection, out: NDArray[Any]) -> None:
        box, index = selection.bounds, selection.indices
        samples = np.arange(box.size[0]) * box.step[0] + box.begin[0]
        if index is not None and selection.axis == 0:
            samples = index
        # Along the other dimensions, everything from the first to the last index is read.
        size = [(n - 1) * by + 1 for n, by in zip(box.size[1:], box.step[1:], strict=True)]
        is_plain = index is None and selection.mask is None and size == box.size[1:]
        found = out.reshape(len(samples), *size) if is_plain else None
        if found is None:
            found = np.empty((len(samples), *size), out.dtype)
        self._read_rows(samples, box.begin[1:], found)
        if is_plain:
            return
        found = found[(slice(None), *(slice(None, None, by) for by in box.step[1:]))]
        if index is not None and selection.axis:
            found = found.take(index - index[0], selection.axis)
        out[...] = found[selection.mask] if selection.mask is not None else found.reshape(out.shape)

    def _read_rows(self, samples: Int64s, begin: list[int], out: NDArray[Any]) -> None:
        numbers: list[int] = []
        if self._layout.crop is not None:
            size = out.shape[1:]
            ones, strides = [1] * len(size), strides_of(size, self.own.dtype.itemsize)
            numbers = [*begin, *size, *ones, *strides]
        block = _BLOCK_ROWS
        if not self._is_copied(out.nbytes):
            block = min(block, -(-len(out) // (_PARTS * self._threads.count)))
        work = []
        for first in range(0, len(out), block):
            some = np.ascontiguousarray(samples[first : first + block])
            rows = out[first : first + block]
            nbytes = rows.nbytes // len(rows)
            arrays = some, begin, rows
            work.append(
                partial(self._read, len(rows), address(rows), nbytes, True, numbers, arrays, some)
            )
        self._threads.run(work)

    def _read_left(self, rows: Int64s, scratch: Scratch, arrays: Any) -> None:
        samples, begin, out = arrays
        places, layout = None, self._layout
        if layout.crop is not None:
            layout = layout.changed(crop=layout.crop._replace(sizes=out.shape[1:]))
            places = np.tile(np.array(begin, np.int64), (rows.size, 1))
        plan = SamplesPlan(samples[rows], rows, out.nbytes, places)
        self._executors.h5py_rows([layout])[0].execute(plan, out, scratch)


class H5pyReader:
    """Reads selections of a dataset through h5py, one thread at a time, and checks its chunks."""

    def __init__(self, own: DatasetLayout) -> None:
        self.own = own
        reader = FallbackReader(1, FileChanges([own], lambda: None), load_core())
        self._reader, self._checks = reader, reader.checks(own)
        self._scratch = Scratch.allocate(0, 0, 0)

    def read_key(self, key: tuple[Any, ...], selection: Selection) -> NDArray[Any]:
        """Return the values that a key selects; `selection` describes it."""
        found: list[Any] = []
        box = selection.bounds
        rows = np.arange(box.size[0]) * box.step[0] + box.begin[0]
        wanted = WantedRows(rows, rows, np.empty(0, np.uint8))

        def work(_: WantedRows, dataset: h5py.Dataset) -> None:
            found[:] = [dataset[key]]

        try:
            self._reader.read(self.own, wanted, work, self._checks, self._scratch)
        finally:
            self._reader.close()  # because HDF5 locks files that it has open
        return np.asarray(found[0])
