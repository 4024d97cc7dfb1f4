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
    rows, kinds, encoded = datasets.columns.rows, datasets.kinds, 0
    along = -(-rows // np.maximum(1, datasets.by_kind(_rows_of_chunk, np.int64)))
    chunks = np.bincount(datasets.columns.kind, along, len(kinds))
    for kind, count in zip(kinds, chunks.tolist(), strict=True):
        if kind.filters and kind.chunk_shape:
            axis = kind.sample_axis
            others = math.prod(n for at, n in enumerate(kind.grid) if at != axis)
            encoded += int(count) * others * (kind.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
    is_small = addresses_of_small(datasets) >= 0
    number = int(np.count_nonzero(is_small))
    if number < MANY:
        return KeptNbytes(encoded, 0)
    small = int(np.dot(rows[is_small], row_nbytes_of(datasets)[is_small]))
    return KeptNbytes(encoded, small + number * KEPT_OVERHEAD_NBYTES)


def addresses_of_small(datasets: Datasets) -> NDArray[np.int64]:
    """Return the addresses of small datasets with contiguous rows; -1 for other datasets."""
    columns = datasets.columns
    has_chunks = datasets.by_kind(lambda kind: kind.chunks is not None, np.bool_)
    is_small = (columns.rows > 0) & (columns.rows <= datasets.by_kind(_most_rows, np.int64))
    found = np.where(is_small & ~has_chunks, columns.offset, -1)
    at = np.flatnonzero(is_small & has_chunks & (np.diff(columns.begin) == 1))
    found[at] = columns.chunks.offset[columns.begin[at]]
    return found


def row_nbytes_of(datasets: Datasets) -> NDArray[np.int64]:
    """Return the bytes of a row of each dataset; files may declare more than 64 bits hold."""
    return datasets.by_kind(lambda kind: min(kind.row_nbytes, (1 << 63) - 1), np.int64)


def _rows_of_chunk(kind: DatasetLayout) -> int:
    return kind.chunk_shape[kind.sample_axis] if kind.chunk_shape else 0


def _most_rows(kind: DatasetLayout) -> int:
    """Return the rows of a small dataset of a kind; 0 if it is not read as one."""
    if kind.fallback_reason is not None or kind.values is not None:
        return 0
    if not kind.rows_are_whole or kind.filters or not kind.row_nbytes:
        return 0
    most = SMALL_NBYTES // kind.row_nbytes
    return min(most, kind.chunk_shape[0]) if kind.chunk_shape else most
