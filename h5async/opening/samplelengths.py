"""Finds the number of values that each sample counts, for `batch_values` and `bucket`.

Options and layouts enter; `Lengths` leaves. A sample counts the values of its longest field, so no
field of a batch has more than `batch_values`. Delivered values count: `pad_to` of a field with that
option.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ImageField, RaggedField, ReaderConfig, SparseField
from h5async.errors import ConfigError, taking_memory
from h5async.index.layout import DatasetLayout
from h5async.order.rows import SpanRows
from h5async.samples.columns import spans_of
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.order.lengths import Lengths


def lengths_of(config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> Lengths | None:
    """Return the number of values per sample; None if batches do not depend on it.

    ConfigError if no field has samples of differing lengths.
    """
    option = "bucket" if config.batch_values is None else "batch_values"
    if getattr(config, option) is None:
        return None
    from h5async.order.lengths import (
        NO_LIMIT,
        Lengths,  # only needed here
    )

    spans, fields = spans_of(layouts, {}), config.batch_fields
    counting = [name for name in fields if name in spans and _counts(fields[name])]
    first = next(iter(layouts.values()))
    if not counting:
        raise ConfigError(
            f"{first.file}: {named(option)} is for fields that are delivered as samples of"
            f" differing lengths, and none of {', '.join(fields)} is; leave it out, and use"
            f" {named('batch_size')}"
        )
    with taking_memory(f"{first.file}: lengths of samples", f"leave out {named(option)}"):
        several = {spans[name]: _pad_to(fields[name]) for name in counting}
        counts = np.zeros(first.sample_count, np.int64)
        for rows, pad_to in several.items():
            np.maximum(counts, _values(rows, pad_to), out=counts)
        if not counts.max(initial=0) >> 32:
            counts = counts.astype(np.uint32)
    values = None if config.batch_values is None else min(NO_LIMIT, config.batch_values)
    return Lengths(counts, values, config.bucket)


def digest(lengths: Lengths) -> str:
    """Return a short digest of the lengths of all samples."""
    array = lengths.of_sample
    found = hashlib.blake2b(digest_size=16)
    for start in range(0, array.size, 1 << 20):
        found.update(array[start : start + (1 << 20)].astype("<i8").tobytes())
    return found.hexdigest()


def _counts(field: Field) -> bool:
    """Return whether a field is delivered as samples of differing lengths, or padded ones."""
    if isinstance(field, SparseField):
        return not field.dense
    return not isinstance(field, ImageField)


def _pad_to(field: Field) -> int | None:
    return field.pad_to if isinstance(field, RaggedField) else None


def _values(rows: SpanRows, pad_to: int | None) -> NDArray[Any] | int:
    return rows.all_lengths() if pad_to is None else pad_to
