"""Plans, reads and transforms the rows of a batch, all fields of it.

Sample numbers enter; plans leave. A share of the plans' work enters, in any thread; rows leave, in
the memory of a slot. This is all that the phases of a fill know of how a dataset is read.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int32
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core
from h5async.errors import taking_memory
from h5async.fill.records import SlotMemory
from h5async.fill.resident import HostCache
from h5async.index.layout import DatasetLayout
from h5async.plan.plan import plan_read
from h5async.plan.records import GatherPlan, ReadPlan, RowPlan
from h5async.plan.shares import PlanSlice
from h5async.plan.stored import StoredFormat, StoredPlan, plan_stored
from h5async.plan.transform import RowTransform
from h5async.read.execute import Executor
from h5async.read.executors import Executors
from h5async.read.native import NativeExecutor
from h5async.read.scratch import Scratch, ScratchSize
from h5async.read.transform import NativeTransform, native_transform
from h5async.stats import StageTimes, ThreadCounts

BatchPlan = Sequence[ReadPlan | StoredPlan]  # of one batch, by field


class BatchReader:
    """Reads batches, in many threads. To be closed after the last read.

    Parameters
    ----------
    core
        The compiled core; None: do without.
    layouts, transforms
        In field order.
    stored_formats
        By field: how the device decodes chunks, for batches that are left to it.
    cache
        Gathers rows that are in memory; None: there are none.
    executors
        Makes the executors of the fields; closed by whoever made it.
    num_threads
        Threads for whose scratch memory is taken.

    Attributes
    ----------
    times
        Of the stage "transform", and whatever stages the caller adds.

    Raises
    ------
    OutOfMemoryError
        If the system refuses memory for the threads.
    """

    def __init__(
        self,
        core: Core | None,
        layouts: Sequence[DatasetLayout],
        transforms: Sequence[RowTransform],
        stored_formats: Sequence[StoredFormat | None],
        cache: HostCache | None,
        executors: Executors,
        num_threads: int,
    ) -> None:
        self.times = StageTimes()
        self._layouts = layouts
        self._transforms = [_transformer(core, transform) for transform in transforms]
        self._cache = cache
        self._factory = executors
        self._executors: list[Executor] = executors.make()
        self._stored_formats = stored_formats
        readers = (
            (field, executors.stored_reader(layout))
            for field, (layout, form) in enumerate(zip(layouts, stored_formats, strict=False))
            if form is not None
        )
        self._stored_readers = {field: reader for field, reader in readers if reader is not None}
        self._size = ScratchSize.of(layouts)
        self._stop = c_int32()  # not 0: what is under way ends as soon as it can
        self._scratches: list[Scratch] = []
        what = f"{layouts[0].file}: scratch of {num_threads} threads, for chunks to be decoded"
        with taking_memory(what, "make num_threads smaller, or store smaller chunks"):
            self._free = deque(self._new_scratch() for _ in range(num_threads))

    def plan(self, index: NDArray[np.int64], on_device: bool) -> BatchPlan:
        """Plan how the samples of a batch are read.

        Parameters
        ----------
        index
            int64 (n,): sample numbers.
        on_device
            Leave decoding to the device where it can decode.
        """
        plans: list[ReadPlan | StoredPlan] = []
        for field, layout in enumerate(self._layouts):
            plan = plan_read(layout, index)
            form = self._stored_formats[field] if field in self._stored_readers else None
            stored = plan_stored(layout, form, plan) if on_device and form is not None else None
            plans.append(plan if stored is None else stored)
        return plans

    def read(self, plans: BatchPlan, share: Sequence[PlanSlice], memory: SlotMemory) -> None:
        """Do a share of a batch's reading; rows are transformed, too, where that costs no copy.

        Raises
        ------
        H5AsyncError
            If bytes cannot be read or decoded.
        """
        try:
            scratch = self._free.pop()
        except IndexError:  # more callers of `run_next` than threads were announced
            scratch = self._new_scratch()
        try:
            for field, start, stop in share:
                self._read_field(plans[field], field, start, stop, memory, scratch)
        finally:
            self._free.append(scratch)

    def _read_field(
        self,
        plan: ReadPlan | StoredPlan,
        field: int,
        start: int,
        stop: int,
        memory: SlotMemory,
        scratch: Scratch,
    ) -> None:
        raw, out = memory.raw[field], memory.out[field]
        if isinstance(plan, GatherPlan):
            assert self._cache is not None
            with scratch.counts.timed("read_ns"):
                self._cache.gather(field, plan, start, stop, raw)
            return
        if isinstance(plan, StoredPlan):
            stored = memory.stored[field]
            assert stored is not None
            self._stored_readers[field].execute(plan, start, stop, stored, scratch)
            return
        executor, transform, begin = self._executors[field], self._transforms[field], start
        if self.transforms_at_once(plan, field, memory):
            assert isinstance(executor, NativeExecutor)
            assert isinstance(transform, NativeTransform)
            begin = executor.transform_rows(plan, start, stop, transform, out, scratch)
        if begin < stop:
            executor.execute(plan, begin, stop, raw, scratch)
            if self.transforms_at_once(plan, field, memory):
                self.transform(field, raw[begin:stop], out[begin:stop])

    def transforms_at_once(
        self, plan: ReadPlan | StoredPlan, field: int, memory: SlotMemory
    ) -> TypeGuard[RowPlan]:
        """Tell whether rows are transformed as they are read: where the core copies them only."""
        return (
            isinstance(plan, RowPlan)
            and self._cache is None  # which wants them as they are
            and isinstance(self._executors[field], NativeExecutor)
            and isinstance(self._transforms[field], NativeTransform)
            and memory.raw[field] is not memory.out[field]
        )

    def transform(self, field: int, raw: NDArray[Any], out: NDArray[Any]) -> None:
        """Transform rows of a field, as read, to `out`."""
        begin = time.perf_counter_ns()
        self._transforms[field](raw, out)
        self.times.add("transform", begin)

    def counts(self) -> ThreadCounts:
        """Return what all threads have done so far."""
        totals = (scratch.total() for scratch in list(self._scratches))
        return functools.reduce(ThreadCounts.plus, totals, ThreadCounts())

    def restart(self) -> None:
        """Begin anew after an exception, when no thread is reading.

        What was interrupted may have left a chunk that is claimed, and never comes.
        """
        self._executors = self._factory.make()

    def drop_stored(self) -> None:
        """Read no encoded chunks from now on."""
        self._stored_readers = {}

    def interrupt(self) -> None:
        """Have what is under way end as soon as it can, with a `ReaderClosedError`."""
        self._stop.value = 1

    def close(self) -> None:
        """Let go of all memory. No thread is reading. Idempotent."""
        self._scratches.clear()
        self._free.clear()
        self._executors, self._stored_readers, self._cache = [], {}, None

    def _new_scratch(self) -> Scratch:
        scratch = Scratch.allocate(*self._size, self._stop)
        self._scratches.append(scratch)
        return scratch


def _transformer(
    core: Core | None, transform: RowTransform
) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    native = None if core is None else native_transform(core, transform)
    return transform.apply if native is None else native
