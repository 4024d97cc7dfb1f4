"""Says what an executor is, and executes plans in Python.

A slice of a read plan enters; rows of a batch leave, in the slot's memory. An executor takes no
memory of the size of a batch or a chunk: bytes are read into the batch itself, or into the scratch
of the thread. There are executors for what lies in one file (here), for datasets of parts and for
values in memory (`parts.py`), and for what only h5py may read (`fallback.py`). `executors.py`
chooses one. The compiled core reads without an executor: see `collection.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.records import ChunkPlan, RowPlan
from h5async.read.chunkcache import ChunkCache
from h5async.read.chunks import ChunkReader
from h5async.read.rows import RowReader
from h5async.read.scratch import Scratch


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


class PlanExecutor:
    """Executes plans in Python for a dataset that lies in one file. Safe to use from many threads.

    Parameters
    ----------
    layout
        Of a dataset that is read directly.
    files
        Opens the file; closed by whoever made it.
    cache
        For decoded chunks.
    """

    def __init__(self, layout: DatasetLayout, files: LocalFiles, cache: ChunkCache) -> None:
        self._layout = layout
        self._files = files
        self._rows = RowReader(layout)
        self._chunks = ChunkReader(layout, cache)

    def execute(
        self, plan: RowPlan | ChunkPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan; see `Executor`."""
        work = partial(self._execute, plan, start, stop, raw, scratch)
        self._files.read(self._layout.file, self._layout.stamp, work)

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
            self._rows.read(file, plan, start, stop, raw, scratch)
        else:
            self._chunks.read(file, plan, start, stop, raw, scratch)
        return False
