"""Reads a field's rows of a batch through h5py, from any number of datasets.

Row numbers of the field enter; the rows leave in the memory of a slot. If they lie in several
datasets, these are read one after the other. h5py returns variable-length elements as objects.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DamagedError
from h5async.index.datasettable import table_of
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.shapes import cut_piece, part_shape
from h5async.index.storedtypes import DAMAGED
from h5async.plan.records import Int64s, SamplesPlan
from h5async.read.coretables import Scratch
from h5async.read.fallback import ChunkCheck, FallbackReader, WantedRows

_SCRATCH_NBYTES = 1 << 20  # of rows read at once, if only pieces of them are wanted
_OBJECTS = 4096  # variable-length elements in memory at a time
_SPAN_NBYTES = 4 << 20  # may be read for samples of one chunk, even if few bytes are wanted
_NEIGHBOURS = 4  # chunks that concurrent batches may share, in any order


class H5pyRows:
    """Reads rows of one field through h5py. Safe to use from many threads.

    `reader` has the open files; its owner closes it.
    """

    def __init__(self, layout: DatasetLayout, reader: FallbackReader) -> None:
        self._layout = layout
        self._reader = reader
        self._datasets: dict[int, DatasetRows] = {}  # by the identity of their layouts

    def execute(self, plan: SamplesPlan, raw: NDArray[Any], scratch: Scratch) -> None:
        """Read the rows of a plan to `raw`, (batch, *raw_row); raises like `FallbackReader.read`.

        The `place` of a `DamagedError` has the damaged rows of `raw`, if known.
        """
        layout, sample, rows = self._layout, plan.sample, plan.rows
        if plan.places is not None:
            self._read_parts(plan, plan.places, raw, scratch)
        elif layout.heaps:
            self._read_elements(sample, rows, raw, scratch)
        elif layout.segments is None or layout.member:  # h5py itself reads a compound's member
            self._read(layout, WantedRows(sample, rows, raw), rows, scratch)
        else:
            self._read_segments(sample, rows, raw, scratch)

    def _read(
        self, layout: DatasetLayout, wanted: WantedRows, places: Int64s, scratch: Scratch
    ) -> None:
        """Read rows to `wanted.raw`; `places` are their rows in the batch, for errors."""
        if layout.values is not None:
            values = np.moveaxis(layout.values, layout.sample_axis, 0).view(layout.raw_dtype)
            of_region = values[(slice(None), *(wanted.region or ()))]
            wanted.raw[wanted.rows] = of_region[wanted.sample]
            return
        if id(layout) not in self._datasets:  # if two threads make one at once, one is discarded
            self._datasets.setdefault(id(layout), DatasetRows(layout, self._reader))
        try:
            self._datasets[id(layout)].read(wanted, scratch)
        except DamagedError as error:
            if error.place is None and wanted.sample.size == 1:
                error.place = 0
            error.place = None if error.place is None else np.atleast_1d(places[error.place])
            raise

    def _read_segments(
        self, sample: Int64s, rows: Int64s, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        layout = self._layout
        segments, datasets = table_of(layout)
        if layout.has_gaps:
            raw[rows] = layout.raw_fill
        for number, piece, chosen, row in segments.find(sample):
            scratch.require_open()
            source, part = datasets[number], part_shape(datasets[number], piece)
            is_as_whole = piece.region is None and source.raw_dtype == layout.raw_dtype
            if is_as_whole or piece.member is not None:
                # The shapes may differ in extents of 1.
                own = WantedRows(
                    row, rows[chosen], raw.reshape(len(raw), *part), piece.source_region
                )
                self._read(source, own, rows[chosen], scratch)
                continue
            count = scratch_rows(source)
            for begin in range(0, row.size, count):
                block = row[begin : begin + count]
                found = np.empty((block.size, *part), source.raw_dtype)
                goes_to = rows[chosen[begin : begin + count]]
                own = WantedRows(block, np.arange(block.size), found, piece.source_region)
                self._read(source, own, goes_to, scratch)
                region: Any = piece.region or ()
                shape = raw[(slice(0, block.size), *region)].shape
                raw[(goes_to, *region)] = found.reshape(shape)

    def _read_parts(
        self, plan: SamplesPlan, places: Int64s, raw: NDArray[Any], scratch: Scratch
    ) -> None:
        """Read a part of each row, at a separate place for each."""
        layout = self._layout
        segments, datasets = table_of(layout)
        for sample, row, place in zip(plan.sample, plan.rows.tolist(), places, strict=True):
            begin = np.where(place < 0, ~place, place).tolist()
            wanted = [range(a, a + n) for a, n in zip(begin, layout.part_shape, strict=True)]
            part = np.full(layout.part_shape, layout.raw_fill)
            for number, piece, _, at in segments.find(sample[np.newaxis]):
                scratch.require_open()
                source = datasets[number]
                own = cut_piece(piece, source, layout.row_shape, wanted)
                if own is None:
                    continue
                dtype = layout.raw_dtype if piece.member is not None else source.raw_dtype
                found = np.empty((1, *part_shape(source, own)), dtype)
                wanted_row = WantedRows(at, np.zeros(1, np.int64), found, own.source_region)
                self._read(source, wanted_row, np.array([row]), scratch)
                here = part[own.region or ...]
                here[...] = found.reshape(here.shape)
            raw[row] = part[tuple(slice(None, None, -1 if n < 0 else 1) for n in place)]

    # --- variable-length elements -----------------------------------------------------------------

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
                wanted = WantedRows(sample[some], places[some], raw)
                self._reader.read(layout, wanted, partial(_copy_elements, heap), [], scratch)


def needs_scratch(layout: DatasetLayout, source: DatasetLayout) -> bool:
    """Return whether a source's rows may need conversion to become rows of the whole dataset."""
    is_other = source.raw_dtype != layout.raw_dtype and not has_members(layout)
    return is_other or any(piece.region is not None for piece in table_of(layout)[0].pieces)


def has_members(layout: DatasetLayout) -> bool:
    """Return whether members of compound types are taken from its sources."""
    has_sources = layout.segments is not None
    return has_sources and any(piece.member is not None for piece in table_of(layout)[0].pieces)


def scratch_rows(source: DatasetLayout) -> int:
    """Return the number of a dataset's rows that are read to a scratch buffer at once."""
    return max(1, _SCRATCH_NBYTES // max(1, source.row_nbytes))


def _copy_elements(heap: HeapFile, wanted: WantedRows, dataset: h5py.Dataset) -> None:
    element, raw, elements = wanted.sample - heap.first_sample, wanted.raw, heap.elements
    different, which = np.unique(element, return_inverse=True)
    objects = dataset[different]
    columns = (column.tolist() for column in (element, wanted.rows, which))
    for number, place, at in zip(*columns, strict=True):
        value, count = objects[at], int(elements.length[number])
        if isinstance(value, str | bytes):
            value = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
        found = np.ascontiguousarray(value)
        if len(found) != count:
            why = f"expected {count} values, got {len(found)}"
            if elements.form.is_text:
                why = "the string has a NUL byte, where HDF5 would end it"
            raise DamagedError(f"{elements.where}, element {number}: {why}{DAMAGED}")
        # For the other byte order, h5py returns the bytes as stored, but labelled as native.
        values = np.frombuffer(found.tobytes(), raw.dtype)
        raw[place : place + count] = values.reshape(count, *raw.shape[1:])


# --- one dataset ----------------------------------------------------------------------------------


class DatasetRows:
    """Reads rows of one dataset through a `FallbackReader`. Safe to use from many threads."""

    def __init__(self, layout: DatasetLayout, reader: FallbackReader) -> None:
        self._layout = _as_stored(layout)
        self._is_one_sample = self._layout is not layout
        self._reader = reader
        self._changes_found = -1
        self._checks: list[ChunkCheck] = []
        # Numbers, along the samples, of chunks that HDF5 may have cached, the latest last.
        self._recent: dict[int, None] = {}
        self._counting = threading.Lock()

    def read(self, wanted: WantedRows, scratch: Scratch) -> None:
        """Read a region of samples to rows of a batch; raises like `FallbackReader.read`.

        `raw` is (batch, *region), of the dataset's dtype (bool as uint8).
        """
        if self._is_one_sample:
            stored = np.arange(self._layout.num_samples)
            _, rows, raw, region = wanted
            one = np.empty(self._layout.shape, raw.dtype)
            try:
                self._read(WantedRows(stored, stored, one), scratch)
            except DamagedError as error:
                error.place = np.arange(rows.size)
                raise
            raw[rows] = one[region or ...].reshape(raw.shape[1:])
        else:
            self._read(wanted, scratch)

    def _read(self, wanted: WantedRows, scratch: Scratch) -> None:
        if not wanted.sample.size:
            return
        if self._changes_found != self._reader.changes_found:  # or this is the first call
            self._changes_found = self._reader.changes_found
            self._checks = self._reader.checks(self._layout)
        work = partial(_copy, self._layout, scratch.require_open)
        self._reader.read(self._layout, wanted, work, self._checks, scratch)
        scratch.counts.h5py_decoded_nbytes += self._decoded_nbytes(wanted.sample)

    def _decoded_nbytes(self, sample: Int64s) -> int:
        """Estimate the bytes that HDF5 decoded for samples: whole chunks, except cached ones."""
        layout, axis = self._layout, self._layout.sample_axis
        if not (layout.filters and layout.chunk_shape and sample.size):
            return 0
        nbytes = math.prod(layout.grid) // layout.grid[axis] * layout.chunk_nbytes
        nbytes *= max(1, layout.stored_itemsize // max(1, layout.dtype.itemsize))
        decoded = 0
        with self._counting:
            for chunk in np.unique(sample // layout.chunk_shape[axis]).tolist():
                decoded += nbytes * (chunk not in self._recent)
                self._recent.pop(chunk, None)
                self._recent[chunk] = None
            while len(self._recent) > max(_NEIGHBOURS, self._reader.cache_nbytes // max(1, nbytes)):
                del self._recent[next(iter(self._recent))]
        return decoded


def _as_stored(layout: DatasetLayout) -> DatasetLayout:
    """Undo `with_one_sample`, for a dataset that is read as one sample; else return `layout`."""
    known = layout.indexed
    if known is None or not known.shape:
        return layout
    if len(known.shape) + layout.extra_dims + 1 != len(layout.shape):
        return layout
    return layout.changed(shape=layout.shape[1:], chunk_shape=layout.chunk_shape[1:])


def _are_same_bytes(some: np.dtype[Any], found: np.dtype[Any]) -> bool:
    if some.fields is None or found.fields is None or some.itemsize != found.itemsize:
        return False
    return all(found.fields.get(name, ())[:2] == field[:2] for name, field in some.fields.items())


def _copy(
    layout: DatasetLayout,
    require_open: Callable[[], None],
    wanted: WantedRows,
    dataset: h5py.Dataset,
) -> None:
    sample, rows, raw, region = wanted
    values = dataset.fields(layout.member[0]) if layout.member else dataset
    is_merged = layout.sequences is not None and dataset.shape[:1] != layout.shape[:1]
    # h5py selects along the dataset's dimensions, NumPy along those of an array type.
    axis, part = layout.sample_axis, region or ()
    before, rank = part[:axis] or (slice(None),) * axis, len(dataset.shape) - 1 - is_merged
    behind, inside = part[axis:rank], part[rank:]
    for first, last, chosen in _spans(layout, sample):
        require_open()
        if is_merged:
            length = dataset.shape[1]
            numbers = range(first // length, (last - 1) // length + 1)
            ends = [(max(0, first - n * length), last - n * length) for n in numbers]
            parts = [values[n, a:b, *behind] for n, (a, b) in zip(numbers, ends, strict=True)]
            block = np.concatenate(parts)
        elif dataset.shape:
            block = values[(*before, slice(first, last), *behind)]
        else:
            block = np.array([values[()]])
        for name in layout.member[1:]:
            block = block[name]
        if inside:
            block = block[(slice(None),) * (rank + 1) + inside]
        block = np.moveaxis(block, axis, 0)
        out = raw
        if _are_same_bytes(raw.dtype, block.dtype):  # padding, too
            out, block = (array.view(f"V{array.itemsize}") for array in (raw, block))
        out[rows[chosen]] = block[sample[chosen] - first]


def span_nbytes(layout: DatasetLayout, rows: int) -> int:
    """Return the maximum number of bytes read at once for `rows` samples."""
    decoded_nbytes = layout.chunk_nbytes if layout.filters else 0
    return max(_SPAN_NBYTES, 2 * rows * layout.row_nbytes, decoded_nbytes)


def _spans(layout: DatasetLayout, sample: Int64s) -> Iterator[tuple[int, int, Int64s]]:
    """Yield, for each h5py call, the first sample, the end, and the indices of its samples.

    Neighbouring samples are read together. So are samples of one chunk, unless far more would be
    read than is wanted, because HDF5 does not cache a decoded chunk larger than its cache.
    """
    order = np.argsort(sample, kind="stable")
    ordered = sample[order]
    apart = np.diff(ordered) > 1
    if layout.chunk_shape:
        chunk, inside = np.divmod(ordered, layout.chunk_shape[layout.sample_axis])
        block = inside // max(1, span_nbytes(layout, sample.size) // max(1, layout.row_nbytes))
        apart &= (np.diff(chunk) != 0) | (np.diff(block) != 0)
    for part in np.split(order, np.flatnonzero(apart) + 1):
        yield int(sample[part[0]]), int(sample[part[-1]]) + 1, part
