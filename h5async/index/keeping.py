"""Decides what of a field is kept for later batches: chunks, whole rows, or small datasets. Pure.

If a field's rows lie in a few files, checking a file costs little per row of a batch. If they lie
in a thousand, such as the labels beside each recording, nearly each row costs a check of another
file: then it is cheaper to keep these small datasets whole, like decoded chunks.
"""

from __future__ import annotations

import itertools
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.structures import KEPT_OVERHEAD_NBYTES
from h5async.index.datasettable import Datasets, pieces_read, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import FieldTable, Shape

SMALL_NBYTES = 1 << 16  # of a dataset: reading all takes little longer than reading a row
MANY = 16  # datasets


class KeptNbytes(NamedTuple):
    """The memory to keep everything of a field that can be kept."""

    encoded: int  # its chunks that must be decoded
    small: int  # its small datasets without filters; 0 if they are few, and not kept


def kept_whole_nbytes(layout: DatasetLayout) -> KeptNbytes:
    """Return the memory to keep all chunks of a field, and all of its small datasets."""
    _, datasets = table_of(layout)
    rows, kinds, encoded = datasets.columns.rows, datasets.kinds, 0
    rows_of_chunk = datasets.by_kind(
        lambda kind: kind.chunk_shape[kind.sample_axis] if kind.chunk_shape else 1, np.int64
    )
    along = -(-rows // rows_of_chunk)
    chunks = np.bincount(datasets.columns.kind, along, len(kinds))
    for (kind, pieces), count in zip(pieces_read(layout), chunks.tolist(), strict=True):
        if kind.filters and kind.chunk_shape:
            encoded += int(count) * pieces * (kind.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
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


def _most_rows(kind: DatasetLayout) -> int:
    """Return the rows of a small dataset of a kind; 0 if it is not read as one."""
    if kind.fallback_reason is not None or kind.values is not None:
        return 0
    if not kind.rows_are_whole or kind.filters or not kind.row_nbytes:
        return 0
    most = SMALL_NBYTES // kind.row_nbytes
    return min(most, kind.chunk_shape[0]) if kind.chunk_shape else most


# Rows are assembled if there is room for this number of groups (a group: all rows with pieces in
# one chunk), and if an epoch uses this share of all rows.
_LEAST_GROUPS, _LEAST_USES = 4, 0.5


class Keeps(IntEnum):
    """What is kept of chunks; numbers as in the compiled core."""

    NONE = 0
    CHUNKS = 1  # decoded
    ROWS = 2  # whole, assembled once from the chunks that hold their pieces


def what_to_keep(
    table: FieldTable, layout: DatasetLayout, kept_nbytes: int, uses: float
) -> list[Keeps]:
    """Return what is kept of a field's chunks in memory of `kept_nbytes`, by shape.

    Assembling all rows of some chunks pays if an epoch uses most of them, and they stay until
    needed: in a window, or if everything can be kept. Otherwise, or if a chunk has pieces of rows
    that are assembled differently, a batch takes its pieces out of chunks. `uses` is the number of
    rows that an epoch delivers, with repetitions.
    """
    keeps = [Keeps.CHUNKS if shape.keeps else Keeps.NONE for shape in table.shapes]
    groups = [group_nbytes(shape, layout.row_nbytes) for shape in table.shapes]
    whole_nbytes = kept_whole_nbytes(layout).encoded
    if layout.crop is not None:
        # Chunks of one sample are needed again in the next epoch, if then they are still there.
        is_again = layout.is_shared or kept_nbytes >= whole_nbytes
        several = zip(table.shapes, keeps, strict=True)
        return [what if is_again or s.chunk_samples > 1 else Keeps.NONE for s, what in several]
    if not any(groups) or _share_chunks(table):
        return keeps
    read = max(pieces / max(1, kind.num_pieces) for kind, pieces in pieces_read(layout))
    chunks = table.chunks.offset.size * read
    for number, (shape, nbytes) in enumerate(zip(table.shapes, groups, strict=True)):
        if not nbytes or kept_nbytes < min(_LEAST_GROUPS * nbytes, whole_nbytes):
            continue
        rows = chunks / len(shape.extents) * shape.chunk_samples
        if uses >= _LEAST_USES * rows:
            keeps[number] = Keeps.ROWS
    return keeps


def group_nbytes(shape: Shape, row_nbytes: int) -> int:
    """Return the size of the assembled rows that have pieces in one chunk.

    It is not more than their decoded chunks. 0 means that rows are not assembled, because chunks
    hold whole rows as they are, or because rows have pieces in other datasets, too.
    """
    whole = shape.itemsize * int(shape.extents.prod(axis=1).sum())
    if not (shape.keeps and shape.filters) or shape.rows_are_whole:
        return 0
    if not whole or whole != row_nbytes:
        return 0
    return shape.chunk_samples * row_nbytes + KEPT_OVERHEAD_NBYTES + len(shape.extents)


def _share_chunks(table: FieldTable) -> bool:
    """Return whether a chunk has pieces of rows of several shapes: each would decode it again."""
    shapes: dict[int, set[int]] = {}  # by the first extent of their dataset
    count = len(table.shapes)
    for layer in table.layers:
        has_chunks = layer.count > 0
        # As one number: NumPy's comparison of rows swallows a signal's exception.
        pairs = layer.begin[has_chunks] * count + layer.shape[has_chunks]
        for begin, shape in map(divmod, np.unique(pairs).tolist(), itertools.repeat(count)):
            shapes.setdefault(begin, set()).add(shape)
    for several in shapes.values():
        numbers = [table.shapes[shape].cross_number for shape in several]
        if len(several) > 1 and np.unique(np.concatenate(numbers)).size < sum(map(len, numbers)):
            return True
    return False
