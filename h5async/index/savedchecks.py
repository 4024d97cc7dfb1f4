"""Checks the chunk positions in a saved index, on whole arrays, as is done for HDF5's index.

Chunks must lie in the file as it was indexed, after its superblock, without overlap, and within the
grid; those without filters have the length of a chunk. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import repeated
from h5async.index.layout import DatasetLayout
from h5async.index.savedfile import SavedIndexError
from h5async.index.similardatasets import AlikeColumns

Int64s = NDArray[np.int64]

_LARGEST = (1 << 62) - 1  # of bytes, or of chunks
_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # per dataset from which copying arrays to check several at once does not pay


@dataclass(frozen=True)
class Tables:
    """Chunk tables and their limits: each attribute has a number per table.

    Attributes
    ----------
    count
        The number of chunks. Tables are concatenated in the array of offsets.
    numbers, nbytes
        Where these columns begin in their arrays; -1 if the chunks are the whole grid, or all have
        `all_nbytes`.
    all_nbytes
        The size of all chunks, if `nbytes` is -1.
    end, grid, expected
        Bytes of the file, chunks in the grid, and bytes of a chunk without filters (-1 if it has
        filters).
    """

    count: Int64s
    numbers: Int64s
    nbytes: Int64s
    all_nbytes: Int64s
    end: Int64s
    grid: Int64s
    expected: Int64s


def check_alike(like: DatasetLayout, columns: AlikeColumns, whole: DatasetLayout) -> None:
    """Check the columns of datasets that are like one, and make up a whole.

    Raises
    ------
    ValueError
        If they make no sense.
    SavedIndexError
        If chunks cannot lie at their positions.
    """
    _check_rows(like, columns, whole)
    rows, offset, chunks, end = columns.rows, columns.offset, columns.chunks, like.stamp.nbytes
    if chunks is None:
        if (offset < -1).any() or (offset > end - rows * like.row_nbytes)[offset >= 0].any():
            raise ValueError("values lie beyond the end of their file")
        return
    each = math.prod(like.grid[1:])
    if int(rows.max()) * each > _LARGEST:
        raise ValueError("datasets that are alike have too many chunks")
    grid = -(-rows // like.chunk_shape[0]) * each
    sizes = {sum(grid.tolist()), chunks.nbytes.size, chunks.filter_mask.size}
    if sizes != {chunks.offset.size}:
        raise ValueError("chunk tables do not fit their datasets")
    zeros = np.zeros(rows.size, np.int64)
    tables = Tables(
        count=grid,
        numbers=zeros - 1,
        nbytes=np.cumsum(grid) - grid,
        all_nbytes=zeros,
        end=zeros + end,
        grid=grid,
        expected=zeros + (-1 if like.filters else like.chunk_nbytes),
    )
    wrong = check_chunks(tables, chunks.offset, np.zeros(0, np.int64), chunks.nbytes)
    if wrong:
        raise SavedIndexError(wrong)


def _check_rows(like: DatasetLayout, columns: AlikeColumns, whole: DatasetLayout) -> None:
    first, rows = columns.first, columns.rows
    sizes = {array.size for array in (first, rows, columns.offset, columns.stored_nbytes)}
    if sizes != {len(columns.paths)} or not rows.size:
        raise ValueError("datasets that are alike lack some numbers")
    is_direct = like.fallback_reason is None and like.sample_axis == 0 == whole.sample_axis
    is_plain = not (like.parts or like.sources) and like.values is None
    if not (is_direct and is_plain and like.storage in ("contiguous", "chunked")):
        raise ValueError("datasets that are alike are not read directly")
    if bool(like.chunk_shape) != (columns.chunks is not None) or like.dtype != whole.dtype:
        raise ValueError("datasets that are alike are none")
    if (rows < 1).any() or (rows > whole.num_samples).any() or (first < 0).any():
        raise ValueError("datasets that are alike have no samples")
    if (first > whole.num_samples - rows).any() or (first[1:] < first[:-1] + rows[:-1]).any():
        raise ValueError("datasets that are alike do not follow each other")
    if int(rows.max()) * like.row_nbytes > _LARGEST or (columns.stored_nbytes < 0).any():
        raise ValueError("datasets that are alike are too large")


def check_chunks(tables: Tables, offset: Int64s, number: Int64s, nbytes: Int64s) -> str | None:
    """Return the defect of chunk tables, or None.

    The other parameters are the arrays in which the columns of `tables` lie.
    """
    count = tables.count
    if ((tables.numbers < 0) & (count != tables.grid)).any():
        return "a chunk table does not fit its dataset"
    for column, array in (tables.numbers, number), (tables.nbytes, nbytes):
        if ((column >= 0) & (column > array.size - count)).any():
            return "a chunk table lies outside its array"
    begins = np.cumsum(count) - count
    is_large = count >= _MANY_CHUNKS
    for i in np.flatnonzero(is_large).tolist():
        here = slice(int(begins[i]), int(begins[i] + count[i]))
        at, size = int(tables.numbers[i]), int(tables.nbytes[i])
        found = _wrong(
            np.zeros(1, np.int64),
            None if at < 0 else number[at : at + int(count[i])],
            offset[here],
            repeated(int(tables.all_nbytes[i]), int(count[i]), "i8")
            if size < 0
            else nbytes[size : size + int(count[i])],
            int(tables.end[i]),
            int(tables.grid[i]),
            int(tables.expected[i]),
        )
        if found:
            return found
    small = np.flatnonzero(~is_large & (count > 0))
    return _wrong_in_any(tables, small, begins, (offset, number, nbytes)) if small.size else None


def _wrong_in_any(
    tables: Tables, small: Int64s, begins: Int64s, arrays: tuple[Int64s, Int64s, Int64s]
) -> str | None:
    """Return the defect of small tables, which are checked as one, or None."""
    offset, number, nbytes = arrays
    count = tables.count[small]
    first = np.cumsum(count) - count
    table = np.repeat(small, count)
    inside = np.arange(table.size) - np.repeat(first, count)
    at = tables.numbers[table]
    numbers = inside.copy()
    numbers[at >= 0] = number[(at + inside)[at >= 0]]
    at = tables.nbytes[table]
    sizes = tables.all_nbytes[table]
    sizes[at >= 0] = nbytes[(at + inside)[at >= 0]]
    limits = (column[table] for column in (tables.end, tables.grid, tables.expected))
    return _wrong(first, numbers, offset[begins[table] + inside], sizes, *limits)


def _wrong(
    begins: Int64s,
    index: Int64s | None,
    offset: Int64s,
    nbytes: Int64s,
    end: Int64s | int,
    grid: Int64s | int,
    expected: Int64s | int,
) -> str | None:
    """Return the defect of tables that begin at some positions of these arrays, or None."""
    if ((offset < _SUPERBLOCK_NBYTES) | (nbytes < 0) | (nbytes > end)).any():
        return "a chunk lies nowhere"
    if (offset > end - nbytes).any():
        return "a chunk lies beyond the end of its file"
    if np.where(np.asarray(expected) < 0, nbytes == 0, nbytes != expected).any():
        return "a chunk has a wrong length"
    is_next = np.ones(offset.size, np.bool_)  # to the chunk before, of the same table
    is_next[begins] = False
    if index is not None:
        steps = np.diff(index, prepend=-1)
        if (index < 0).any() or (index >= grid).any() or (steps <= 0)[is_next].any():
            return "a chunk lies outside its grid"
    if (offset[1:] < offset[:-1] + nbytes[:-1])[is_next[1:]].any():
        return _overlap(begins, offset, nbytes)
    return None


def _overlap(begins: Int64s, offset: Int64s, nbytes: Int64s) -> str | None:
    """Return the defect of overlapping chunks that do not lie in the order of the grid, or None."""
    if begins.size == 1 and not any(nbytes.strides):
        is_apart = (np.diff(np.sort(offset)) >= nbytes[0]).all()
        return None if is_apart else "a chunk overlaps another one"
    table = np.repeat(np.arange(begins.size), np.diff(np.append(begins, offset.size)))
    order = np.lexsort((offset, table))
    table, offset, nbytes = table[order], offset[order], nbytes[order]
    overlaps = (offset[1:] < offset[:-1] + nbytes[:-1]) & (table[1:] == table[:-1])
    return "a chunk overlaps another one" if overlaps.any() else None
