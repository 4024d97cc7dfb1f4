"""Joins the layouts of a field in several files to one, one file after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from h5async.errors import DatasetError
from h5async.index.dimensions import common_names
from h5async.index.layout import CfAttribute, DatasetLayout, Part, SequenceLengths
from h5async.index.slabs import Slab

_UNLIKE_TEXT = "its strings end otherwise than those of other files"


def join_layouts(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return the layout of datasets of several files as one, one after the other.

    Raises
    ------
    DatasetError
        If the shapes of their rows or their dtypes differ; it names two files that do.
    """
    first = layouts[0]
    if len(layouts) == 1:
        return first
    if any(layout.text != first.text for layout in layouts):
        layouts = [
            layout.through_h5py(_UNLIKE_TEXT) if layout.text else layout for layout in layouts
        ]
        first = layouts[0]
    parts, begin = [], 0
    lengths = [layout.sequences for layout in layouts if layout.sequences is not None]
    for layout in layouts:
        same_rows = layout.row_shape == first.row_shape and layout.sample_axis == first.sample_axis
        if not same_rows or layout.dtype.newbyteorder("=") != first.dtype.newbyteorder("="):
            raise DatasetError(
                f'dataset "{first.path}" has samples of {_described(first, layout)} in'
                f" {first.file}, but of {_described(layout, first)} in {layout.file}; several"
                " files can be read as one where these are equal"
            )
        count = layout.num_samples
        if count:
            samples = Slab.run(begin, begin + count)
            parts.append(Part(layout, samples, Slab.run(0, count)))
        begin += count
    shape = list(first.shape)
    shape[first.sample_axis] = begin
    same_order = all(layout.dtype == first.dtype for layout in layouts)
    reasons = (layout.fallback_reason for layout in layouts)
    return DatasetLayout(
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
        parts=tuple(parts),
        file_samples=tuple((layout.file, layout.num_samples) for layout in layouts),
        text=first.text,
        sequences=SequenceLengths(*map(np.concatenate, zip(*lengths, strict=True)))
        if lengths
        else None,
        dim_names=common_names([layout.dim_names for layout in layouts]),
        cf=_joined_cf(layouts),
    )


def _described(layout: DatasetLayout, other: DatasetLayout) -> str:
    where = f" along dimension {layout.sample_axis}"
    is_moved = layout.sample_axis != other.sample_axis
    return f"{layout.row_shape} {layout.dtype}{where if is_moved else ''}"


def _joined_cf(
    layouts: Sequence[DatasetLayout],
) -> tuple[tuple[int, tuple[CfAttribute, ...]], ...]:
    """Return how the samples of all layouts are packed; what goes on is said once."""
    joined: list[tuple[int, tuple[CfAttribute, ...]]] = []
    begin = 0
    for layout in layouts:
        for first, attributes in layout.cf if layout.num_samples else ():
            if not joined or joined[-1][1] != attributes:
                joined.append((begin + first, attributes))
        begin += layout.num_samples
    return tuple(joined) or layouts[0].cf
