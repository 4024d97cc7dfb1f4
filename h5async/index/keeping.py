"""Decides which chunks of a field are kept for later batches. Pure."""

from __future__ import annotations

import itertools
from enum import IntEnum

import numpy as np

from h5async.core.structures import KEPT_OVERHEAD_NBYTES
from h5async.index.extents import FieldTable
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import Shape
from h5async.index.smalldatasets import kept_whole_nbytes

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
    """Return what is kept of chunks, by shape.

    Assembling all rows of some chunks pays if an epoch uses most of them, and they stay until
    needed: in a window, or if everything can be kept. Otherwise, or if a chunk has pieces of rows
    that are assembled differently, a batch takes its pieces out of chunks.

    Parameters
    ----------
    table, layout
        Of the field.
    kept_nbytes
        Memory for everything kept of it.
    uses
        The number of rows that an epoch delivers, with repetitions.
    """
    keeps = [Keeps.CHUNKS if shape.keeps else Keeps.NONE for shape in table.shapes]
    groups = [group_nbytes(shape, layout.row_nbytes) for shape in table.shapes]
    if not any(groups) or _share_chunks(table):
        return keeps
    whole_nbytes = kept_whole_nbytes(layout).encoded
    for number, (shape, nbytes) in enumerate(zip(table.shapes, groups, strict=True)):
        if not nbytes or kept_nbytes < min(_LEAST_GROUPS * nbytes, whole_nbytes):
            continue
        rows = table.chunks.offset.size / len(shape.extents) * shape.chunk_samples
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
