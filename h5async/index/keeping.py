"""Decides what of the chunks of a field is kept for later batches. Pure."""

from __future__ import annotations

import itertools
from enum import IntEnum

import numpy as np

from h5async.core.tablestructures import KEPT_OVERHEAD_NBYTES
from h5async.index.extents import FieldTable
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import Shape
from h5async.index.smalldatasets import kept_whole_nbytes

# Rows are put together where there is room for so many groups of them (a group: all that have
# pieces in one chunk), and where an epoch uses so many rows for each that there is.
_LEAST_GROUPS, _LEAST_USES = 4, 0.5


class Keeps(IntEnum):
    """What is kept of chunks; the numbers are those of the compiled core."""

    NONE = 0
    CHUNKS = 1  # decoded
    ROWS = 2  # whole, put together once out of the chunks that hold pieces of them


def what_to_keep(
    table: FieldTable, layout: DatasetLayout, kept_nbytes: int, uses: float
) -> list[Keeps]:
    """Return what is kept of chunks, by shape.

    To put all rows of some chunks together pays where an epoch uses most of them, and where they
    stay until they are needed: in a window, or where all can be kept. Else, and where a chunk has
    pieces of rows that are put together otherwise, too, a batch takes what it needs out of chunks.

    Parameters
    ----------
    table, layout
        Of the field.
    kept_nbytes
        Memory for all that is kept of it.
    uses
        Rows that an epoch delivers, each as often as it does so.
    """
    keeps = [Keeps.CHUNKS if shape.keeps else Keeps.NONE for shape in table.shapes]
    groups = [group_nbytes(shape, layout.row_nbytes) for shape in table.shapes]
    if not any(groups) or _share_chunks(table):
        return keeps
    whole_nbytes = kept_whole_nbytes(layout).encoded
    for number, (shape, nbytes) in enumerate(zip(table.shapes, groups, strict=True)):
        if not nbytes or kept_nbytes < min(_LEAST_GROUPS * nbytes, whole_nbytes):
            continue
        rows = table.offset.size / len(shape.extents) * shape.chunk_samples
        if uses >= _LEAST_USES * rows:
            keeps[number] = Keeps.ROWS
    return keeps


def group_nbytes(shape: Shape, row_nbytes: int) -> int:
    """Return what it takes to keep the rows that have pieces in one chunk, put together.

    That is not more than their decoded chunks would take. 0: they are not put together, because
    chunks hold whole rows as they are, or because rows have pieces in other datasets, too.
    """
    whole = shape.itemsize * int(shape.extents.prod(axis=1).sum())
    if not (shape.keeps and shape.filters) or shape.rows_are_whole:
        return 0
    if not whole or whole != row_nbytes:
        return 0
    return shape.chunk_samples * row_nbytes + KEPT_OVERHEAD_NBYTES + len(shape.extents)


def _share_chunks(table: FieldTable) -> bool:
    """Tell whether a chunk has pieces of rows of several shapes: each would decode it anew."""
    shapes: dict[int, set[int]] = {}  # by the first extent of their dataset
    count = len(table.shapes)
    for layer in table.layers:
        has_chunks = layer.count > 0
        # As one number: rows are compared by NumPy in a way that swallows a signal's exception.
        pairs = layer.begin[has_chunks] * count + layer.shape[has_chunks]
        for begin, shape in map(divmod, np.unique(pairs).tolist(), itertools.repeat(count)):
            shapes.setdefault(begin, set()).add(shape)
    for several in shapes.values():
        numbers = [table.shapes[shape].cross_number for shape in several]
        if len(several) > 1 and np.unique(np.concatenate(numbers)).size < sum(map(len, numbers)):
            return True
    return False
