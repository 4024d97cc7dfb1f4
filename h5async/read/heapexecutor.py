"""Executes plans of elements of variable length: their values lie in the heap of their file.

Samples enter, and where the values of each go; values leave, in the slot's memory. It is the one
executor whose rows are found by what was read when the dataset was indexed (`HeapFile`).
"""

from __future__ import annotations

import threading
from ctypes import c_int32
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
        self._own = threading.local()

    def execute(
        self, plan: HeapPlan, start: int, stop: int, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read items `start` to `stop` of a plan; see `Executor`."""
        begin, end = plan.begin(start), plan.begin(stop)
        samples, places = plan.samples[begin:end], plan.offsets[begin:end] * self._value_nbytes
        out = raw.reshape(-1).view(np.uint8)
        which = np.searchsorted(self._first, samples, side="right") - 1
        with scratch.counts.timed("read_ns"):
            for number in np.unique(which).tolist():
                here, heap = which == number, self._heaps[number]
                element = np.ascontiguousarray(samples[here] - heap.first_sample)
                place = np.ascontiguousarray(places[here])
                work = partial(self._read, heap, element, place, out, scratch.stop)
                self._files.read(heap.file, heap.stamp, work)

    def _read(
        self,
        heap: HeapFile,
        element: NDArray[np.int64],
        place: NDArray[np.int64],
        out: NDArray[np.uint8],
        stop: c_int32 | None,
        file: LocalFile,
        stamp: FileStamp,
    ) -> bool:
        reader = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = HeapReader(self._core, stop)
        reader.read(heap.elements, file, stamp, element, place, out)
        return False
