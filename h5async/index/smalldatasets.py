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
from h5async.index.layout import DatasetLayout
from h5async.index.similardatasets import AlikeParts

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
    if isinstance(layout.parts, AlikeParts):
        return _kept_of_alike(layout.parts)
    leaves = {id(leaf): leaf for leaf in layout.leaves()}.values()
    encoded = sum(
        math.prod(leaf.grid) * (leaf.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
        for leaf in leaves
        if leaf.filters
    )
    small = [leaf.nbytes for leaf in leaves if address_of_small(leaf) is not None]
    if len(small) < MANY:
        return KeptNbytes(encoded, 0)
    return KeptNbytes(encoded, sum(small) + len(small) * KEPT_OVERHEAD_NBYTES)


def _kept_of_alike(parts: AlikeParts) -> KeptNbytes:
    like, rows = parts.like, parts.columns.rows
    encoded = 0
    if like.filters:
        encoded = int(parts.chunk_begin[-1]) * (like.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
    is_small = addresses_of_small(parts) >= 0
    count = int(np.count_nonzero(is_small))
    if count < MANY:
        return KeptNbytes(encoded, 0)
    nbytes = int(rows[is_small].sum()) * like.row_nbytes
    return KeptNbytes(encoded, nbytes + count * KEPT_OVERHEAD_NBYTES)


def addresses_of_small(parts: AlikeParts) -> NDArray[np.int64]:
    """Return `address_of_small` per dataset of similar ones; -1 for None."""
    like, columns = parts.like, parts.columns
    none = np.full(len(parts), -1, np.int64)
    if like.fallback_reason is not None or not like.rows_are_whole or like.filters:
        return none
    if not like.row_nbytes:
        return none
    is_small = (columns.rows > 0) & (columns.rows <= SMALL_NBYTES // like.row_nbytes)
    if columns.chunks is None:
        return np.where(is_small, columns.offset, -1)
    is_small &= parts.chunk_counts == 1
    first = np.minimum(parts.chunk_begin[:-1], columns.chunks.offset.size - 1)
    return np.where(is_small, columns.chunks.offset[first], -1)


def address_of_small(layout: DatasetLayout) -> int | None:
    """Return the address of a small dataset with contiguous rows; None for other datasets."""
    if layout.fallback_reason is not None or layout.values is not None or layout.parts:
        return None
    if not layout.rows_are_whole or layout.filters or not 0 < layout.nbytes <= SMALL_NBYTES:
        return None
    if layout.chunks is None:
        return layout.offset if layout.offset >= 0 else None
    is_one = math.prod(layout.grid) == 1 and layout.chunks.offset.size == 1
    return int(layout.chunks.offset[0]) if is_one else None
