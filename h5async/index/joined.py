"""Joins the layouts of a field in several files into one, in the order of the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.attributes import common_names
from h5async.index.chunks import left_to_hdf5
from h5async.index.composition import Part, with_parts
from h5async.index.layout import DatasetLayout
from h5async.index.layoutfacts import CfAttribute, HeapFile, SequenceLengths
from h5async.index.segments import MOST_RUNS, Slab, TooManyRunsError

_UNLIKE_TEXT = "its strings end otherwise than those of other files"


def join_layouts(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout for datasets of several files, concatenated.

    DatasetError names two files whose rows differ in shape or dtype.
    """
    first = layouts[0]
    if len(layouts) == 1:
        return first
    if any(layout.text != first.text for layout in layouts):
        layouts = [
            left_to_hdf5(layout, _UNLIKE_TEXT) if layout.text else layout for layout in layouts
        ]
        first = layouts[0]
    if first.heaps:
        return _joined_heaps(layouts)
    parts, begin, unused = [], 0, 0
    for layout in layouts:
        same_rows = layout.row_shape == first.row_shape and layout.sample_axis == first.sample_axis
        if not same_rows or layout.dtype.newbyteorder("=") != first.dtype.newbyteorder("="):
            raise DatasetError(
                f'dataset "{first.path}" has samples of {_described(first, layout)} in'
                f" {first.file}, but of {_described(layout, first)} in {layout.file}; several"
                " files can be read as one where these are equal"
            )
        # (Ragged values that are in no sample are left out.)
        first_row, behind = (
            (0, layout.num_samples) if layout.spans is None else layout.spans[[0, -1]]
        )
        count = int(behind - first_row)
        if count:
            samples = Slab.run(begin, begin + count)
            source = layout if layout.spans is None else layout.changed(spans=None)
            parts.append(Part(source, samples, Slab.run(int(first_row), int(behind))))
        begin += count
        unused += layout.unused_rows + layout.num_samples - count
    shape = list(first.shape)
    shape[first.sample_axis] = begin
    same_order = all(layout.dtype == first.dtype for layout in layouts)
    reasons = (layout.fallback_reason for layout in layouts)
    joined = DatasetLayout(
        file=first.file,
        stamp=first.stamp,
        path=first.path,
        shape=tuple(shape),
        dtype=first.dtype if same_order else first.dtype.newbyteorder("="),
        sample_axis=first.sample_axis,
        storage="files",
        fallback_reason=next((reason for reason in reasons if reason is not None), None),
        fill=first.fill,
        stored_nbytes=sum(layout.stored_nbytes for layout in layouts),
        file_samples=tuple((layout.file, layout.sample_count) for layout in layouts),
        text=first.text,
        sequences=_joined_sequences(layouts),
        dim_names=common_names([layout.dim_names for layout in layouts]),
        cf=_joined_cf(layouts),
        spans=None if first.spans is None else _joined_spans(layouts),
        unused_rows=unused,
    )
    try:
        return with_parts(joined, parts)
    except TooManyRunsError:
        raise DatasetError(
            f'dataset "{first.path}" of {len(layouts)} files: its samples lie in more than'
            f" {MOST_RUNS:,} runs of rows; read fewer files at once"
        ) from None


def _described(layout: DatasetLayout, other: DatasetLayout) -> str:
    where = f" along dimension {layout.sample_axis}"
    is_moved = layout.sample_axis != other.sample_axis
    return f"{layout.row_shape} {layout.dtype}{where if is_moved else ''}"


def _joined_cf(
    layouts: Sequence[DatasetLayout],
) -> tuple[tuple[int, tuple[CfAttribute, ...]], ...]:
    """Return how the samples of all layouts are packed; equal neighbours are merged."""
    joined: list[tuple[int, tuple[CfAttribute, ...]]] = []
    begin = 0
    for layout in layouts:
        for first, attributes in layout.cf if layout.num_samples else ():
            if not joined or joined[-1][1] != attributes:
                joined.append((begin + first, attributes))
        begin += layout.num_samples
    return tuple(joined) or layouts[0].cf


def _joined_heaps(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout for variable-length elements of several files."""
    first, heaps, count = layouts[0], [], 0
    for layout in layouts:
        if layout.dtype != first.dtype or layout.shape[1:] != first.shape[1:] or not layout.heaps:
            raise DatasetError(
                f'dataset "{first.path}" has values of {first.dtype} in {first.file}, but of'
                f" {layout.dtype} in {layout.file}; several files can be read as one where these"
                " are equal"
            )
        heaps += [heap._replace(first_sample=heap.first_sample + count) for heap in layout.heaps]
        count += layout.sample_count
    lengths = np.concatenate([y.lengths for y in layouts if y.lengths is not None])
    joined = first.changed(
        shape=(sum(layout.num_samples for layout in layouts), *first.shape[1:]),
        stored_nbytes=sum(layout.stored_nbytes for layout in layouts),
        file_samples=tuple((layout.file, layout.sample_count) for layout in layouts),
        sequences=_joined_sequences(layouts),
    )
    return with_lengths(joined, lengths, heaps)


def with_lengths(
    layout: DatasetLayout, lengths: NDArray[np.uint32], heaps: Sequence[HeapFile]
) -> DatasetLayout:
    """Return a layout whose samples are variable-length elements of some files.

    Parameters
    ----------
    layout
        All other attributes.
    lengths
        uint32 (samples,): the number of values per sample. The elements of the files will share it.
    heaps
        The elements.
    """
    shared = []
    for heap in heaps:
        end = heap.first_sample + heap.elements.length.size
        own = replace(heap.elements, length=lengths[heap.first_sample : end])
        shared.append(heap._replace(elements=own))
    return layout.changed(lengths=lengths, heaps=tuple(shared))


def _joined_sequences(layouts: Sequence[DatasetLayout]) -> SequenceLengths | None:
    several = [layout.sequences for layout in layouts if layout.sequences is not None]
    if not several:
        return None
    return SequenceLengths(*map(np.concatenate, zip(*several, strict=True)))


def _joined_spans(layouts: Sequence[DatasetLayout]) -> NDArray[np.int64]:
    found, begin = [np.zeros(1, np.int64)], 0
    for layout in layouts:
        assert layout.spans is not None
        found.append(layout.spans[1:] - layout.spans[0] + begin)
        begin = int(found[-1][-1]) if layout.spans.size > 1 else begin
    return np.concatenate(found)
