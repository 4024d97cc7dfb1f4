"""Executes plans of elements of variable length: their values lie in the heap of their file.

Samples enter, and where the values of each go; values leave, in the slot's memory. It is the one
executor whose rows are found by what was read when the dataset was indexed (`HeapFile`). With the
core, it reads what the core's plan leaves: elements that are damaged, whose errors it words, given
samples of `read()`, and those of fields with steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import LocalFiles
from h5async.io.stamps import FileStamp
from h5async.plan.records import HeapPlan
from h5async.read.heaps import HeapReader
from h5async.read.scratch import Scratch

Int64s = NDArray[np.int64]


class HeapExecutor:
    """Executes plans for a dataset of variable length. Safe to use from many threads.

    Parameters
    ----------
    core
        The compiled core; None: do without.
    layout
        Of the dataset.
    files
        Opens the files; closed by whoever made it.
    """

    def __init__(self, core: Core | None, layout: DatasetLayout, files: LocalFiles) -> None:
        self._core = core
        self._heaps = layout.heaps
        self._first = np.array([heap.first_sample for heap in layout.heaps], np.int64)
        self._value_nbytes = layout.row_nbytes
        self._files = files

    def execute(
        self, plan: HeapPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan; see `Executor`."""
        begin, end = plan.begin(start), plan.begin(stop)
        samples, places = plan.samples[begin:end], plan.offsets[begin:end] * self._value_nbytes
        out = raw.reshape(-1).view(np.uint8)
        core = self._core
        reader = HeapReader(core, None if core is None else scratch.worker(core))
        # The core has a counter of its own.
        with scratch.timed("read_ns") if core is None else nullcontext():
            for heap, element, place in self._by_file(samples, places):
                work = partial(self._read, reader, heap, element, place, out)
                self._files.read(heap.file, heap.stamp, work)

    def _by_file(
        self, samples: Int64s, places: Int64s
    ) -> Iterator[tuple[HeapFile, Int64s, Int64s]]:
        """Yield the elements of each file that are wanted, and where their values go."""
        if len(self._heaps) == 1:
            yield self._heaps[0], samples - self._heaps[0].first_sample, places
            return
        which = np.searchsorted(self._first, samples, side="right") - 1
        for number in np.unique(which).tolist():
            here, heap = which == number, self._heaps[number]
            yield heap, samples[here] - heap.first_sample, places[here]

    def _read(
        self,
        reader: HeapReader,
        heap: HeapFile,
        element: Int64s,
        place: Int64s,
        out: NDArray[np.uint8],
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        reader.read(heap.elements, file, stamp, element, place, out)
        return False
