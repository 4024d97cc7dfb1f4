"""Chooses whether the core or h5py reads each field.

Layouts enter; a `Collection` leaves, which reads the fields that the core can read, and readers of
the rest through h5py. They share the open files, which are closed here, and the record of changed
files. Small datasets, such as a mask or a number per sample, are read whole in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import Kept
from h5async.core.binding import MAX_RANK, Core, load_core
from h5async.errors import DamagedError, DatasetError
from h5async.index.changes import FileChanges
from h5async.index.datasettable import kinds_of, unit_nbytes
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, files_of
from h5async.index.shapes import swaps
from h5async.io.hdf5files import affordable_files
from h5async.io.source import IoMode
from h5async.order.rows import SpanRows, StepRows
from h5async.plan.records import SamplesPlan
from h5async.plan.transform import NativeTransform
from h5async.read.collection import Collection
from h5async.read.coretables import CoreTables, Scratch, ScratchSize
from h5async.read.fallback import FallbackReader
from h5async.read.h5pyrows import H5pyRows, has_members
from h5async.read.queue import SlotBatch

_BLOCK_SAMPLES = 1 << 18
Method = Literal["core", "h5py", "memory"]


def method_of(layout: DatasetLayout, whole: DatasetLayout | None = None) -> Method:
    """Return the method for reading a dataset that does not consist of others.

    `whole` is the one that consists of it, if any.
    """
    return _method(load_core(), layout, layout if whole is None else whole)


def _method(core: Core | None, layout: DatasetLayout, whole: DatasetLayout) -> Method:
    if layout.values is not None:
        return "memory"
    if layout.fallback_reason is not None or core is None:
        return "h5py"
    if not has_members(whole) and swaps(layout, whole) is None:  # NumPy converts its values
        return "h5py"
    can_decode = len(layout.shape) <= MAX_RANK and core.filters(layout.filters) is not None
    return "core" if layout.heaps or can_decode else "h5py"


class Executors:
    """Reads the fields of a dataset, and owns the resources that they share.

    `kept_nbytes` is, by field, memory for decoded chunks that later batches may need. `on_change`
    is called if a file has changed but still holds what was indexed: rows read from it before are
    invalid. For `samples`, `kept` and `keeps_all` see `CoreTables`. `changes` keeps track of
    changed files.
    """

    def __init__(
        self,
        core: Core | None,
        layouts: Sequence[DatasetLayout],
        io: IoMode,
        kept_nbytes: Sequence[int],
        on_change: Callable[[], None],
        samples: int | None = None,
        kept: Kept | None = None,
        keeps_all: bool = False,
    ) -> None:
        self.core, self._kept, self._keeps_all = core, kept, keeps_all
        self._samples = samples
        self.layouts = layouts
        self._kept_nbytes = kept_nbytes
        self._io = io
        self._kept_files = max(1, affordable_files() // (1 if core is None else 2))
        # One or none. `forget` refers to this list, so that it does not keep this object alive.
        collections: list[Collection] = []
        self._collections = collections

        def forget() -> None:
            for collection in collections:
                collection.tables.forget_chunks()
            on_change()

        self.changes = FileChanges(layouts, forget)
        self._fallback = FallbackReader(self._kept_files, self.changes, core)

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""
        return [
            " and ".join(sorted({_method(self.core, leaf, layout) for leaf, _ in kinds_of(layout)}))
            for layout in self.layouts
        ]

    @property
    def fallback_reads(self) -> int:
        """The number of reads that went through h5py."""
        return self._fallback.reads

    def open_collection(
        self,
        transforms: Sequence[NativeTransform | None],
        steps: Sequence[StepRows | SpanRows | None] = (),
    ) -> Collection | None:
        """Return the `Collection` that reads all fields by the core, if any; see `CoreTables`."""
        if self.core is None:
            return None
        tables = CoreTables(
            self.core,
            self.layouts,
            io=self._io,
            most_files=2 * self._kept_files,
            kept_nbytes=self._kept_nbytes,
            transforms=transforms,
            steps=steps,
            samples=self._samples,
            kept=self._kept,
            keeps_all=self._keeps_all,
        )
        self._collections.append(Collection(self.core, tables, self.changes))
        return self._collections[-1]

    def h5py_rows(self, layouts: Sequence[DatasetLayout] | None = None) -> list[H5pyRows]:
        """Return a reader through h5py for each field, or for each of `layouts`, if given."""
        return [H5pyRows(one, self._fallback) for one in layouts or self.layouts]

    def read_again(
        self, batch: SlotBatch, scratch: Scratch, damage: list[DamagedError] | None = None
    ) -> None:
        """Read the items that the core refused; see `Collection.read_again`."""
        for collection in self._collections:
            collection.read_again(batch, scratch, damage)

    def open_ahead(self, is_closed: Callable[[], bool]) -> None:
        """Open the first files, before others can replace the indexed ones.

        `ReadError` is raised if a file cannot be opened, or is not the indexed one.
        """
        for collection in self._collections:
            for number in collection.tables.open_ahead(is_closed):
                with collection.rereader.opened(number):
                    pass  # it raises the error
        for layout in self.layouts:
            if all(_method(self.core, leaf, layout) != "h5py" for leaf, _ in kinds_of(layout)):
                continue
            for leaf in itertools.islice(layout.leaves(), self._kept_files):
                if is_closed():
                    return
                if _method(self.core, leaf, layout) == "h5py":
                    self._fallback.open(leaf)

    def close(self) -> None:
        """Close all files, which must not be in use any more. Idempotent."""
        self._fallback.close()
        for collection in self._collections:
            collection.close()
        self._collections.clear()


def read_whole(layout: DatasetLayout, reach: Reach) -> NDArray[Any]:
    """Return all values of a dataset with one value per sample, in native byte order.

    Raises like `read_blocks`.
    """
    blocks = read_blocks(layout, reach)  # checks the memory budget first
    found = np.empty(layout.num_samples, layout.dtype.newbyteorder("="))
    for first, block in blocks:
        found[first : first + block.size] = block
    return found


def read_rows(layout: DatasetLayout, reach: Reach) -> NDArray[Any]:
    """Return all rows of a dataset, as `RowTransform` takes them; raises like `read_blocks`."""
    what = f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}: its values'
    reach.room.take(max(layout.nbytes, layout.chunk_nbytes), what, files_of(layout))
    return np.concatenate([rows.copy() for _, rows in _blocks(layout, reach.io, True)])


def read_blocks(
    layout: DatasetLayout, reach: Reach, kept_itemsize: int = 0, *, may_use_h5py: bool = True
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the values of a dataset block by block, each with the number of its first sample.

    Blocks share their memory. Values are in the dataset's byte order. All of them (at
    `kept_itemsize` bytes, if kept in another form) must fit in `reach.room`; else `BudgetError` is
    raised. Unless `may_use_h5py`, the core must read them: h5py would return references to its own
    memory.

    `DatasetError` is raised unless there is one value per sample, or if only h5py could read it;
    `ReadError` if reading fails.
    """
    count = layout.num_samples
    if math.prod(layout.shape) != count:
        raise DatasetError(
            f'{layout.file}: dataset "{layout.path}" must have one value for each sample, but has'
            f" shape {layout.shape}"
        )
    nbytes = max(count * max(layout.dtype.itemsize, kept_itemsize), layout.chunk_nbytes)
    what = f'{layout.file}: dataset "{layout.path}" of shape {layout.shape}: its values'
    reach.room.take(nbytes if count else 0, what, files_of(layout))
    blocks = _blocks(layout, reach.io, may_use_h5py)
    return ((first, rows.reshape(-1)) for first, rows in blocks)


def _blocks(
    layout: DatasetLayout, io: IoMode, may_use_h5py: bool
) -> Iterator[tuple[int, NDArray[Any]]]:
    count = layout.num_samples
    # Whole chunks: a chunk split between two blocks would be decoded twice.
    size = layout.chunk_shape[layout.sample_axis] if layout.chunk_shape else 1
    size *= max(1, _BLOCK_SAMPLES // size)
    memory = np.empty((min(size, count), *layout.row_shape), layout.raw_dtype)
    executors = Executors(load_core(), [layout], io, [unit_nbytes(layout)], lambda: None)
    try:
        collection, through_h5py = executors.open_collection([None]), executors.h5py_rows()[0]
        room = ScratchSize.of([layout])
        if layout.chunks is not None:  # read by whole chunks, even if batches read single rows
            room = room._replace(raw_chunk=max(room.raw_chunk, layout.chunk_nbytes))
        scratch = Scratch.allocate(*room)
        for first in range(0, count, size):
            samples = np.arange(first, min(first + size, count))
            rows, left = memory[: samples.size], [np.arange(samples.size)]
            if collection is not None and collection.tables.reads[0]:
                batch = collection.new_batch([rows], [rows], samples.size)
                items, _ = collection.plan(batch, samples, [True], 1)
                collection.fetch(batch, scratch)
                collection.read(batch, 0, items, scratch)
                executors.read_again(batch, scratch)
                left = [some for _, some in collection.left(batch)]
            if left and not may_use_h5py:
                raise DatasetError(
                    f'{layout.file}: dataset "{layout.path}" cannot be read: the core cannot take'
                    " its references; store flat values, and their offsets"
                )
            for some in left:
                plan = SamplesPlan(samples[some], some, some.size * layout.row_nbytes)
                through_h5py.execute(plan, rows, scratch)
            # Any byte but 0 is True to HDF5.
            yield first, rows != 0 if layout.dtype.kind == "b" else rows
    finally:
        executors.close()
