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
from h5async.index.datasettable import table_of
from h5async.index.heapelements import DAMAGED
from h5async.index.layout import DatasetLayout
from h5async.index.layoutfacts import HeapFile
from h5async.plan.records import Int64s, SamplesPlan
from h5async.read.fallback import DatasetRows, FallbackReader
from h5async.read.scratch import Scratch

_SCRATCH_NBYTES = 1 << 20  # rows that are read at once if only pieces of them are wanted
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
        layout, sample, rows = self._layout, plan.sample, plan.rows
        if layout.heaps:
            self._read_elements(sample, rows, raw, scratch)
        elif layout.segments is None or layout.member:  # h5py itself takes a member of a compound
            self._read(layout, sample, rows, raw, scratch)
        else:
            self._read_segments(sample, rows, raw, scratch)

    def _read(
        self,
        layout: DatasetLayout,
        sample: Int64s,
        rows: Int64s,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        if layout.values is not None:
            values = np.moveaxis(layout.values, layout.sample_axis, 0).view(layout.raw_dtype)
            raw[rows] = values[sample]
            return
        found = self._datasets.get(id(layout))
        if found is None:  # if two threads make one at once, one is lost, no more
            made = DatasetRows(layout, self._reader)
            found = self._datasets.setdefault(id(layout), made)
        found.read(sample, rows, raw, scratch)

    def _read_segments(
        self, sample: Int64s, rows: Int64s, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        layout = self._layout
        segments, datasets = table_of(layout)
        if layout.has_gaps:
            raw[rows] = layout.raw_fill
        for number, piece, chosen, row in segments.find(sample):
            scratch.require_open()
            source = datasets[number]
            if piece.is_whole and source.raw_dtype == layout.raw_dtype:
                target = raw.reshape(raw.shape[0], *source.row_shape)  # except extents of 1
                self._read(source, row, rows[chosen], target, scratch)
                continue
            if piece.member is not None:
                self._read(source, row, rows[chosen], raw, scratch)
                continue
            count = _scratch_rows(source)
            for begin in range(0, row.size, count):
                block = row[begin : begin + count]
                whole = np.empty((block.size, *source.row_shape), source.raw_dtype)
                self._read(source, block, np.arange(block.size), whole, scratch)
                if piece.source_region is not None:
                    whole = whole[(slice(None), *piece.source_region)]
                region: Any = piece.region or ()
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


def needs_scratch(layout: DatasetLayout, source: DatasetLayout) -> bool:
    """Return whether rows of a dataset may have to be changed to become rows of the whole."""
    segments, _ = table_of(layout)
    return source.raw_dtype != layout.raw_dtype or not all(p.is_whole for p in segments.pieces)


def scratch_nbytes(source: DatasetLayout) -> int:
    """Return the size of the scratch buffer for rows of a dataset."""
    return _scratch_rows(source) * source.row_nbytes


def _scratch_rows(source: DatasetLayout) -> int:
    """Return the number of rows of a dataset that are read to a scratch buffer at once."""
    return max(1, _SCRATCH_NBYTES // max(1, source.row_nbytes))


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
