"""Finds small datasets that are numerous, so that a reader keeps them in memory whole.

If a field's rows lie in a few files, checking a file costs little per row of a batch. If they lie
in a thousand, such as the labels beside each recording, nearly each row costs a check of another
file: then it is cheaper to keep them, like decoded chunks. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.structures import KEPT_OVERHEAD_NBYTES
from h5async.index.datasettable import Datasets, table_of
from h5async.index.layout import DatasetLayout

SMALL_NBYTES = 1 << 16  # of a dataset: reading all takes little longer than reading a row
MANY = 16  # datasets


class KeptNbytes(NamedTuple):
    """The memory to keep everything of a field that can be kept.

    Attributes
    ----------
    encoded
        Its chunks that must be decoded.
    small
        Its small datasets without filters; 0 if they are few, and not kept.
    """

    encoded: int
    small: int


def kept_whole_nbytes(layout: DatasetLayout) -> KeptNbytes:
    """Return the memory to keep all chunks of a field, and all of its small datasets."""
    _, datasets = table_of(layout)
    encoded = small = count = 0
    addresses, rows = addresses_of_small(datasets), datasets.columns.rows
    for number, kind in enumerate(datasets.kinds):
        here = datasets.columns.kind == number
        if kind.filters and kind.chunk_shape:
            along = kind.sample_axis
            chunks = -(-rows[here] // kind.chunk_shape[along])
            others = math.prod(n for axis, n in enumerate(kind.grid) if axis != along)
            each = others * (kind.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
            encoded += sum(chunks.tolist()) * each
        here &= addresses >= 0
        count += int(np.count_nonzero(here))
        small += int(rows[here].sum()) * kind.row_nbytes
    return KeptNbytes(encoded, small + count * KEPT_OVERHEAD_NBYTES if count >= MANY else 0)


def addresses_of_small(datasets: Datasets) -> NDArray[np.int64]:
    """Return the addresses of small datasets with contiguous rows; -1 for other datasets."""
    columns = datasets.columns
    found = np.full(len(datasets), -1, np.int64)
    for number, kind in enumerate(datasets.kinds):
        if kind.fallback_reason is not None or kind.values is not None:
            continue
        if not kind.rows_are_whole or kind.filters or not kind.row_nbytes:
            continue
        is_small = (columns.kind == number) & (columns.rows > 0)
        is_small &= columns.rows <= SMALL_NBYTES // kind.row_nbytes
        if kind.chunks is None:
            found[is_small] = columns.offset[is_small]
            continue
        if kind.chunk_shape:
            is_small &= columns.rows <= kind.chunk_shape[0]
        is_small &= np.diff(columns.begin) == 1
        found[is_small] = columns.chunks.offset[columns.begin[:-1][is_small]]
    return found
