"""Computes the sizes of slots from fields, layouts and orders of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from h5async.config import ReaderConfig
from h5async.index.layout import DatasetLayout
from h5async.opening.dataset import Samplings
from h5async.order.spans import SpanRows
from h5async.plan.transform import RowTransform, row_transform
from h5async.samples.fieldkind import FieldKind, Outline
from h5async.samples.kinds import columns_of, kinds_of


def samples_of_slot(config: ReaderConfig, samplings: Samplings) -> int:
    """Return the number of samples that a slot has room for."""
    return samplings.most_samples(may_repeat=_may_repeat(config, samplings))


def slot_transforms(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], samplings: Samplings, rows: int
) -> dict[str, RowTransform]:
    """Return the transform of each column, with its number of rows in slots of `rows` samples.

    ConfigError if the options of a field do not fit its dataset.
    """
    columns = columns_of(kinds_of(config.batch_fields))
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


def made_nbytes(
    kinds: Mapping[str, FieldKind], outlines: Sequence[Outline], rows: int
) -> dict[str, int]:
    """Return, by field, the bytes of a slot that the host makes of the rows of its columns."""
    return {
        one.name: rows * one.made_on_host_nbytes + kinds[one.name].decoded_nbytes(rows)
        for one in outlines
    }


def shared_nbytes(
    kinds: Mapping[str, FieldKind], outlines: Sequence[Outline], rows: int, most: int
) -> list[int]:
    """Return, per field, the memory that helper processes share for decoded samples of a batch.

    `rows` is the number of samples, and `most` the limit for samples of any size.
    """
    return [
        kinds[one.name].decoded_nbytes(rows) or most if one.is_encoded else 0 for one in outlines
    ]
