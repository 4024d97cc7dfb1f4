"""Computes the sizes of slots from fields, layouts and orders of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from h5async.config import Field, ImageField, ReaderConfig
from h5async.index.layout import DatasetLayout
from h5async.opening.dataset import Samplings
from h5async.order.rows import SpanRows
from h5async.plan.transform import RowTransform, row_transform, sized_nbytes
from h5async.samples.columns import columns_of


def samples_of_slot(config: ReaderConfig, samplings: Samplings) -> int:
    """Return the number of samples that a slot has room for."""
    return samplings.most_samples(may_repeat=_may_repeat(config, samplings))


def slot_transforms(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], samplings: Samplings, rows: int
) -> dict[str, RowTransform]:
    """Return the transform of each column, with its number of rows in slots of `rows` samples.

    ConfigError if the options of a field do not fit its dataset.
    """
    columns = columns_of(config.batch_fields)
    transforms = {name: row_transform(columns[name], layouts[name]) for name in columns}
    may_repeat = _may_repeat(config, samplings)
    room: dict[SpanRows, tuple[int, int]] = {}  # columns of a field share it
    for name, one in zip(transforms, samplings.rows, strict=True):
        if not isinstance(one, SpanRows):
            continue
        if one not in room:
            most = samplings.most_rows(one, rows, may_repeat=may_repeat)
            room[one] = max(1, most), min(most, one.likely(rows))
        capacity, likely = room[one]
        transforms[name] = replace(transforms[name], capacity=capacity, likely=likely)
    return transforms


def _may_repeat(config: ReaderConfig, samplings: Samplings) -> bool:
    """Return whether a sample may occur several times in a batch."""
    is_drawn = config.weights is not None or config.sampler is not None
    return is_drawn or samplings.selection.has_repeats


def pixels_nbytes(fields: Mapping[str, Field], rows: int, most: int) -> list[int]:
    """Return, per field, the maximum size of the pixels of a batch of images; 0 for other fields.

    `rows` is the number of samples, and `most` the limit for images of any size.
    """
    return [
        (sized_nbytes(field, rows) if field.size else most) if isinstance(field, ImageField) else 0
        for field in fields.values()
    ]
