"""Chooses who reads each field: the core, or h5py.

Layouts enter; a `Collection` leaves, which reads what the core can, and readers of the rest through
h5py. They share the open files, which are closed here, and what was noticed of changed files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from h5async.core.binding import Core, load_core
from h5async.core.structures import MAX_RANK
from h5async.errors import DamagedError
from h5async.index.changes import FileChanges
from h5async.index.datasettable import kinds_of
from h5async.index.layout import DatasetLayout
from h5async.io.keptfiles import affordable_files
from h5async.io.localfiles import IoMode
from h5async.order.rows import SpanRows, StepRows
from h5async.plan.transform import NativeTransform
from h5async.read.collection import Collection
from h5async.read.coretables import CoreTables
from h5async.read.fallback import FallbackReader
from h5async.read.h5pyrows import H5pyRows
from h5async.read.queue import SlotBatch
from h5async.read.scratch import Scratch

Method = Literal["core", "h5py", "memory"]


def method_of(layout: DatasetLayout) -> Method:
    """Return the method by which a dataset without parts is read."""
    return _method(load_core(), layout)


def _method(core: Core | None, layout: DatasetLayout) -> Method:
    if layout.values is not None:
        return "memory"
    if layout.fallback_reason is not None or core is None:
        return "h5py"
    can_decode = len(layout.shape) <= MAX_RANK and core.filters(layout.filters) is not None
    return "core" if layout.heaps or can_decode else "h5py"


class Executors:
    """Reads the fields of a dataset, and owns what they share.

    By field, `kept_nbytes` is memory for decoded chunks that later batches may need. `on_change` is
    called if a file has changed but still holds what was indexed: rows read from it before are
    invalid. `samples` are those of an epoch; None: all. `changes` has what was noticed of changed
    files.
    """

    def __init__(
        self,
        core: Core | None,
        layouts: Sequence[DatasetLayout],
        io: IoMode,
        kept_nbytes: Sequence[int],
        on_change: Callable[[], None],
        samples: int | None = None,
    ) -> None:
        self.core = core
        self._samples = samples
        self.layouts = layouts
        self._kept_nbytes = kept_nbytes
        self._io = io
        self._kept_files = max(1, affordable_files() // (1 if core is None else 2))
        # One, or none. The functions hold it, and not this object with all that it holds.
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
            " and ".join(sorted({_method(self.core, leaf) for leaf, _ in kinds_of(layout)}))
            for layout in self.layouts
        ]

    @property
    def fallback_reads(self) -> int:
        """Number of reads that went through h5py."""
        return self._fallback.reads

    def open_collection(
        self,
        transforms: Sequence[NativeTransform | None],
        steps: Sequence[StepRows | SpanRows | None] = (),
    ) -> Collection | None:
        """Return what reads the rows of all fields by the core; None if there is no core.

        `transforms` has, by field, the transform done while reading, if any; `steps` the rows of
        each sample, or None for its own.
        """
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
        )
        self._collections.append(Collection(self.core, tables, self.changes))
        return self._collections[-1]

    def h5py_rows(self) -> list[H5pyRows]:
        """Return what reads each field through h5py."""
        return [H5pyRows(layout, self._fallback) for layout in self.layouts]

    def read_again(
        self, batch: SlotBatch, scratch: Scratch, damage: list[DamagedError] | None = None
    ) -> None:
        """Read items that the core has refused; see `Collection.read_again`."""
        for collection in self._collections:
            collection.read_again(batch, scratch, damage)

    def open_ahead(self, is_closed: Callable[[], bool]) -> None:
        """Open the first files, so that they are those that were indexed.

        `ReadError` is raised if a file cannot be opened, or is not the one that was indexed.
        """
        for collection in self._collections:
            for number in collection.tables.open_ahead(is_closed):
                with collection.rereader.opened(number):
                    pass  # it says what is wrong
        for layout in self.layouts:
            if all(_method(self.core, leaf) != "h5py" for leaf, _ in kinds_of(layout)):
                continue
            for leaf in itertools.islice(layout.leaves(), self._kept_files):
                if is_closed():
                    return
                if _method(self.core, leaf) == "h5py":
                    self._fallback.open(leaf)

    def close(self) -> None:
        """Close all files, after any use. Idempotent."""
        self._fallback.close()
        for collection in self._collections:
            collection.close()
        self._collections.clear()
