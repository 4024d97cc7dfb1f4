"""Chooses how each dataset is read, and makes its executors.

Layouts enter; for each, an executor leaves (`execute.py` says what that is). What executors share,
and what has to be closed in the end, is here: the open files, h5py's among them, the decoded chunks
that are kept, and what was noticed of files that have changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from typing import Literal

from h5async.core.binding import Core
from h5async.core.structures import MAX_RANK
from h5async.index.changes import FileChanges
from h5async.index.layout import DatasetLayout
from h5async.index.similardatasets import kinds_of
from h5async.io.keptfiles import affordable_files
from h5async.io.localfiles import LocalFiles
from h5async.io.maps import IoMode
from h5async.io.stamps import FileStamp
from h5async.order.spans import SpanRows
from h5async.order.steps import StepRows
from h5async.read.chunkcache import ChunkCache
from h5async.read.collection import Collection
from h5async.read.execute import Executor, PlanExecutor
from h5async.read.fallback import FallbackExecutor, FallbackReader
from h5async.read.heapexecutor import HeapExecutor
from h5async.read.parts import MemoryExecutor, PartsExecutor
from h5async.read.transform import NativeTransform


def method_of(
    core: Core | None, layout: DatasetLayout
) -> Literal["core", "python", "h5py", "memory"]:
    """Return by which method a dataset without parts is read."""
    if layout.fallback_reason is not None:
        return "h5py"
    if layout.values is not None:
        return "memory"
    if layout.heaps:
        return "python" if core is None else "core"
    if core is None or len(layout.shape) > MAX_RANK or core.filters(layout.filters) is None:
        return "python"
    return "core"


class Executors:
    """Makes executors for the fields of a dataset, and owns what they share.

    Parameters
    ----------
    core
        The compiled core; None: do without.
    layouts
        In field order.
    io
        How files are read.
    kept_nbytes
        By field: for decoded chunks that later batches may need.
    on_change
        Called where a file has changed but still holds what was indexed: what was read of it
        before is worthless.
    samples
        Of an epoch; None: all.

    Attributes
    ----------
    changes
        What was noticed of changed files.
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
        self._core = core
        self._samples = samples
        self._layouts = layouts
        self._kept_nbytes = kept_nbytes
        self._caches: list[ChunkCache] = []  # by field; always this list
        # (Not a method: that would hold this object, and all that it holds.)
        self._collections: list[Collection] = []  # one, or none
        forget = partial(_forget, self._caches, self._collections, on_change)
        self.changes = FileChanges(layouts, forget)
        self._kept_files = max(1, affordable_files() // (1 if core is None else 2))
        self._io = io
        self._fallback = FallbackReader(self._kept_files, self.changes)
        self._files = LocalFiles(
            self._kept_files,
            io,
            python_maps=core is None,
            look_anew=self.changes.look_anew,
            on_new_stamp=partial(_restamp, self._collections),
            open_elsewhere=partial(_open_in, self._collections),
        )

        # Where values of variable length lie is not looked for anew in a file that was changed.
        self._heap_files = LocalFiles(
            self._kept_files,
            io,
            python_maps=True,
            on_new_stamp=partial(_restamp, self._collections, is_heap=True),
            open_elsewhere=partial(_open_in, self._collections),
        )

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""
        return [
            " and ".join(sorted({method_of(self._core, leaf) for leaf, _ in kinds_of(layout)}))
            for layout in self._layouts
        ]

    @property
    def fallback_reads(self) -> int:
        """Reads that went through h5py."""
        return self._fallback.reads

    def open_collection(
        self,
        transforms: Sequence[NativeTransform | None],
        steps: Sequence[StepRows | SpanRows | None] = (),
    ) -> Collection | None:
        """Return what reads the rows of all fields by the core; None: it is not there.

        Parameters
        ----------
        transforms
            By field: what rows are made into as they are read; None: nothing, or not there.
        steps
            By field: which rows each sample consists of; None: its own.
        """
        if self._core is None:
            return None
        collection = Collection(
            self._core,
            self._layouts,
            io=self._io,
            most_files=2 * self._kept_files,
            kept_nbytes=self._kept_nbytes,
            transforms=transforms,
            steps=steps,
            samples=self._samples,
        )
        self._collections.append(collection)
        return collection

    def make(self) -> list[Executor]:
        """Make an executor for each field, with caches of decoded chunks that are empty."""
        # Where the core keeps decoded chunks, what is left to Python need not.
        reads = [any(c.reads[i] for c in self._collections) for i in range(len(self._layouts))]
        kept = zip(self._kept_nbytes, reads, strict=True)
        self._caches[:] = [ChunkCache(0 if is_read else nbytes) for nbytes, is_read in kept]
        pairs = zip(self._layouts, self._caches, strict=True)
        return [self._executor(layout, cache) for layout, cache in pairs]

    def open_ahead(self, is_closed: Callable[[], bool]) -> None:
        """Open the first files, so that they are those that were indexed.

        Raises
        ------
        ReadError
            If a file cannot be opened, or is not the one that was indexed.
        """
        reads = [False] * len(self._layouts)
        for collection in self._collections:
            if collection.open_ahead(is_closed):
                reads = collection.reads
        for layout, is_read in zip(self._layouts, reads, strict=True):
            for source, _ in itertools.islice(kinds_of(layout), self._kept_files):
                if is_closed():
                    return
                if source.fallback_reason is not None:
                    self._fallback.open(source)
                elif source.values is None and not is_read:
                    self._files.open(source.file, source.stamp)

    def close(self) -> None:
        """Close all files, after any use. Idempotent."""
        self._files.close()
        self._heap_files.close()
        self._fallback.close()
        self._caches.clear()
        for collection in self._collections:
            collection.close()
        self._collections.clear()

    def _executor(self, layout: DatasetLayout, cache: ChunkCache) -> Executor:
        if layout.heaps:
            return HeapExecutor(self._core, layout, self._heap_files)
        if layout.parts:
            return PartsExecutor(layout, lambda source: self._executor(source, cache))
        match method_of(self._core, layout):
            case "h5py":
                return FallbackExecutor(layout, self._fallback)
            case "memory":
                return MemoryExecutor(layout)
        return PlanExecutor(layout, self._files, cache)


def _restamp(
    collections: Sequence[Collection], path: str, stamp: FileStamp, *, is_heap: bool = False
) -> None:
    for collection in collections:
        collection.restamp(path, stamp, is_heap=is_heap)


def _open_in(collections: Sequence[Collection], path: str) -> FileIO | None:
    found = (collection.open_again(path) for collection in collections)
    return next((number for number in found if number is not None), None)


def _forget(
    caches: Sequence[ChunkCache], collections: Sequence[Collection], on_change: Callable[[], None]
) -> None:
    """Forget what was read of a file that has changed since."""
    for cache in caches:
        cache.clear()
    for collection in collections:
        collection.forget_chunks()
    on_change()
