"""Tells what slots must have room for: fields, layouts and orders of samples enter, sizes leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from h5async.config import Field, ImageField, ReaderConfig, SparseField
from h5async.fill.columns import SparseShape, columns_of
from h5async.fill.dataset import Samplings
from h5async.fill.images import sized_nbytes
from h5async.fill.records import SlotMemory
from h5async.index.layout import DatasetLayout
from h5async.order.spans import SpanRows
from h5async.plan.transform import RowTransform, row_transform


def samples_of_slot(config: ReaderConfig, samplings: Samplings) -> int:
    """Return how many samples a slot has room for."""
    return min(config.batch_size, max(1, samplings.epoch_samples))


def slot_transforms(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], samplings: Samplings, rows: int
) -> dict[str, RowTransform]:
    """Return the transform of each column, with how many rows slots of `rows` samples have.

    Raises
    ------
    ConfigError
        If the options of a field do not fit its dataset.
    """
    columns = columns_of(config.batch_fields)
    transforms = {name: row_transform(columns[name], layouts[name]) for name in columns}
    is_drawn = config.weights is not None or config.sampler is not None
    may_repeat = is_drawn or samplings.selection.has_repeats
    for name, one in zip(transforms, samplings.rows, strict=True):
        if isinstance(one, SpanRows):
            most = one.most(rows, may_repeat=may_repeat)
            transforms[name] = replace(transforms[name], capacity=max(1, most))
    return transforms


def dense_nbytes(field: Field | None, shape: SparseShape | None, rows: int) -> int:
    """Return what the dense rows of a batch take; 0 where none are made."""
    if shape is None or not isinstance(field, SparseField) or not field.dense:
        return 0
    dtype = np.dtype(np.float32) if field.delivered_dtype is None else field.delivered_dtype
    return math.prod((rows, shape.columns, dtype.itemsize))


def with_dense(
    slots: Sequence[SlotMemory],
    fields: Mapping[str, Field],
    shapes: Mapping[str, SparseShape],
    rows: int,
) -> list[SlotMemory]:
    """Return slots with memory for their dense rows.

    Raises
    ------
    MemoryError
        If the system refuses it.
    """
    sizes = [dense_nbytes(field, shapes.get(name), rows) for name, field in fields.items()]
    return [
        slot._replace(made=tuple(np.empty(size, np.uint8) if size else None for size in sizes))
        for slot in slots
    ]


def made_nbytes(
    fields: Mapping[str, Field], shapes: Mapping[str, SparseShape], rows: int, most_pixels: int
) -> list[int]:
    """Return, by field, what is made of the columns of a batch, at most; 0: it is not known.

    Parameters
    ----------
    fields, shapes
        By name; shapes of sparse fields.
    rows
        Samples.
    most_pixels
        What images of any size may take.
    """
    found = []
    for name, field in fields.items():
        if isinstance(field, ImageField):
            found.append(sized_nbytes(field, rows) if field.size else most_pixels)
        else:
            found.append(dense_nbytes(field, shapes.get(name), rows))
    return found
