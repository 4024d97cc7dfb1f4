"""Reads datasets whose values lie in other datasets, or in memory.

A slice of a `PartsPlan` enters; rows of a batch leave, read by the executors of the sources. Rows
that need a change before they are rows of the whole - another byte order, a piece of them, a
member - go through a scratch buffer, which is made once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import Bytes
from h5async.index.layout import DatasetLayout
from h5async.plan.plan import scratch_nbytes
from h5async.plan.records import Int64s, PartRead, PartsPlan, Rows, SamplesPlan
from h5async.read.execute import Executor
from h5async.read.scratch import Scratch


class MemoryExecutor:
    """Executes plans for a compact dataset, whose values came with its layout."""

    def __init__(self, layout: DatasetLayout) -> None:
        assert layout.values is not None
        values = np.moveaxis(layout.values, layout.sample_axis, 0)
        self._values = np.ascontiguousarray(values).view(layout.raw_dtype)

    def execute(
        self, plan: SamplesPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Copy the one item of a plan, all samples, to the batch."""
        count = plan.sample.size
        if isinstance(plan.rows, int):
            out = raw[plan.rows : plan.rows + count]
            np.take(self._values, plan.sample, axis=0, out=out, mode="clip")
        else:
            raw[plan.rows] = self._values[plan.sample]


class PartsExecutor:
    """Executes plans for a dataset whose values its sources hold. Safe to use from many threads.

    Parameters
    ----------
    layout
        With parts.
    executor_of
        Makes the executor of a source; called when it is first needed, in any thread.
    """

    def __init__(
        self, layout: DatasetLayout, executor_of: Callable[[DatasetLayout], Executor]
    ) -> None:
        self._layout = layout
        self._executor_of = executor_of
        self._executors: dict[int, Executor] = {}
        self._fill = layout.raw_fill
        self._scratch_nbytes = max(scratch_nbytes(layout, part) for part in layout.some_parts)
        self._buffers: deque[Bytes] = deque()

    def execute(
        self, plan: PartsPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan; see `Executor`."""
        if plan.is_filled_first:
            raw[_index(plan.rows, plan.num_samples)] = self._fill
            start, stop = 0, plan.first_item[-1]
        first = bisect_right(plan.first_item, start) - 1
        for number in range(max(0, first), len(plan.reads)):
            begin, end = plan.first_item[number : number + 2]
            if begin >= stop:
                break
            if max(start, begin) < min(stop, end):
                scratch.require_open()  # before a file is opened
                read = plan.reads[number]
                inside = max(start, begin) - begin, min(stop, end) - begin
                if read.scratch_rows:
                    self._read_through_scratch(read, raw, scratch)
                else:
                    self._read_straight(read, *inside, raw, scratch)

    def _read_straight(
        self, read: PartRead, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        row_shape = self._layout.parts[read.part].source.row_shape
        target = raw.reshape(raw.shape[0], *row_shape)  # they differ in dimensions of 1 at most
        self._executor(read.part).execute(read.plan, start, stop, target, scratch)

    def _read_through_scratch(self, read: PartRead, raw: NDArray[Any], scratch: Scratch) -> None:
        part = self._layout.parts[read.part]
        count, source = read.scratch_rows, part.source
        try:
            memory = self._buffers.pop()
        except IndexError:
            memory = np.empty(self._scratch_nbytes, np.uint8)
        try:
            rows = np.ndarray((count, *source.row_shape), source.raw_dtype, memory.data)
            self._executor(read.part).execute(read.plan, 0, read.plan.num_items, rows, scratch)
            values = rows if part.member is None else rows[part.member]
            if part.source_region is not None:
                values = values[(slice(None), *part.source_region)]
            region = part.region or ()
            target = raw[(slice(0, count), *region)]  # for its shape
            raw[(_index(read.rows, count), *region)] = values.reshape(target.shape)
        finally:
            self._buffers.append(memory)

    def _executor(self, number: int) -> Executor:
        executor = self._executors.get(number)
        if executor is None:  # one that two threads make at once is lost, no more
            made = self._executor_of(self._layout.parts[number].source)
            executor = self._executors.setdefault(number, made)
        return executor


def _index(rows: Rows, count: int) -> slice | Int64s:
    return slice(rows, rows + count) if isinstance(rows, int) else rows
