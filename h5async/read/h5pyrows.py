"""Reads a field's rows of a batch through h5py, from any number of datasets.

Rows of the field enter; they leave in the memory of a slot. If they lie in several datasets, these
are read one after the other. Elements of variable length come as objects.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import ReadError
from h5async.index.heapelements import DAMAGED
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.plan.parts import needs_scratch, scratch_rows, touched_parts
from h5async.plan.records import Int64s, SamplesPlan
from h5async.read.fallback import DatasetRows, FallbackReader
from h5async.read.scratch import Scratch

_OBJECTS = 4096  # elements of variable length that are in memory at a time


class H5pyRows:
    """Reads rows of one field through h5py. Safe to use from many threads.

    `reader` has the open files, and is closed by its owner.
    """

    def __init__(self, layout: DatasetLayout, reader: FallbackReader) -> None:
        self._layout = layout
        self._reader = reader
        self._datasets: dict[int, DatasetRows] = {}  # by the identity of their layouts

    def execute(self, plan: SamplesPlan, raw: NDArray[Any], scratch: Scratch) -> None:
        """Read the rows of a plan to `raw`, (batch, *raw_row), C-contiguous.

        `ReadError` is raised if they cannot be read or decoded; it names file, dataset and samples.
        """
        if self._layout.heaps:
            self._read_elements(plan.sample, plan.rows, raw, scratch)
        else:
            self._read(self._layout, plan.sample, plan.rows, raw, scratch)

    def _read(
        self,
        layout: DatasetLayout,
        sample: Int64s,
        rows: Int64s,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        # (h5py itself takes a member of a compound.)
        if layout.parts and not (layout.member and layout.parts[0].member):
            self._read_parts(layout, sample, rows, raw, scratch)
        elif layout.values is not None:
            values = np.moveaxis(layout.values, layout.sample_axis, 0).view(layout.raw_dtype)
            raw[rows] = values[sample]
        else:
            found = self._datasets.get(id(layout))
            if found is None:  # if two threads make one at once, one is lost, no more
                made = DatasetRows(layout, self._reader)
                found = self._datasets.setdefault(id(layout), made)
            found.read(sample, rows, raw, scratch)

    def _read_parts(
        self,
        layout: DatasetLayout,
        sample: Int64s,
        rows: Int64s,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        if layout.has_gaps:
            raw[rows] = layout.raw_fill
        for number, chosen, ordinal in touched_parts(layout, sample):
            scratch.require_open()
            part = layout.parts[number]
            source, found = part.source, part.source_samples.at(ordinal)
            if not needs_scratch(layout, part):
                target = raw.reshape(raw.shape[0], *source.row_shape)  # except extents of 1
                self._read(source, found, rows[chosen], target, scratch)
                continue
            count = scratch_rows(source)
            for begin in range(0, found.size, count):
                block = found[begin : begin + count]
                whole = np.empty((block.size, *source.row_shape), source.raw_dtype)
                self._read(source, block, np.arange(block.size), whole, scratch)
                if part.source_region is not None:
                    whole = whole[(slice(None), *part.source_region)]
                region: Any = part.region or ()
                shape = raw[(slice(0, block.size), *region)].shape
                goes_to = rows[chosen[begin : begin + count]]
                raw[(goes_to, *region)] = whole.reshape(shape)

    # --- elements of variable length --------------------------------------------------------------

    def _read_elements(
        self, sample: Int64s, places: Int64s, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        heaps = self._layout.heaps
        first = np.array([heap.first_sample for heap in heaps], np.int64)
        which = np.searchsorted(first, sample, side="right") - 1
        for number in np.unique(which).tolist():
            heap, here = heaps[number], np.flatnonzero(which == number)
            layout = self._layout.changed(
                file=heap.file, stamp=heap.stamp, path=heap.path, heaps=(heap,)
            )
            for begin in range(0, here.size, _OBJECTS):
                some = here[begin : begin + _OBJECTS]
                element = sample[some] - heap.first_sample
                work = partial(_copy_elements, heap, element, places[some], raw)
                with scratch.timed("read_ns"):
                    self._reader.read(layout, sample[some], work, [], scratch.require_open)


def _copy_elements(
    heap: HeapFile, element: Int64s, places: Int64s, raw: NDArray[Any], dataset: h5py.Dataset
) -> None:
    wanted, which = np.unique(element, return_inverse=True)
    objects, elements = dataset[wanted], heap.elements
    for number, place, at in zip(element.tolist(), places.tolist(), which.tolist(), strict=True):
        value, count = objects[at], int(elements.length[number])
        if isinstance(value, str | bytes):
            value = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
        found = np.ascontiguousarray(value)
        if len(found) != count:
            why = f"expected {count} values, got {len(found)}"
            if elements.form.is_text:
                why = "the string has a NUL byte, where HDF5 would end it"
            raise ReadError(f"{elements.where}, element {number}: {why}{DAMAGED}")
        # For numbers in the other byte order, h5py returns the bytes labelled as native.
        values = np.frombuffer(found.tobytes(), raw.dtype)
        raw[place : place + count] = values.reshape(count, *raw.shape[1:])
