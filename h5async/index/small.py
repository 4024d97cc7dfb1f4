"""Finds datasets that are small and many, so that a reader keeps them in memory whole.

Where a field's rows lie in a few files, looking at a file costs little for each of its rows in a
batch. Where they lie in a thousand, such as the labels beside each recording, nearly each row costs
a look at a file of its own: then it is cheaper to keep them, as decoded chunks are kept. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from h5async.core.batch import KEPT_OVERHEAD_NBYTES
from h5async.index.layout import DatasetLayout

SMALL_NBYTES = 1 << 16  # of a dataset: to read it whole takes little longer than to read a row
MANY = 16  # datasets


class KeptNbytes(NamedTuple):
    """What it takes to keep all that a field can keep.

    Attributes
    ----------
    encoded
        Its chunks that have to be decoded.
    small
        Its small datasets without filters; 0: they are few, and are not kept.
    """

    encoded: int
    small: int


def kept_whole_nbytes(layout: DatasetLayout) -> KeptNbytes:
    """Return what it takes to keep all chunks of a field, and all of its small datasets."""
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


def address_of_small(layout: DatasetLayout) -> int | None:
    """Return where a small dataset lies in its file; None: it is another one.

    Its rows follow each other there as they are, from the first to the last.
    """
    if layout.fallback_reason is not None or layout.values is not None or layout.parts:
        return None
    if not layout.rows_are_whole or layout.filters or not 0 < layout.nbytes <= SMALL_NBYTES:
        return None
    if layout.chunks is None:
        return layout.offset if layout.offset >= 0 else None
    is_one = math.prod(layout.grid) == 1 and layout.chunks.offset.size == 1
    return int(layout.chunks.offset[0]) if is_one else None
