"""Checks the tables of a saved index, on whole arrays, as is done for HDF5's index.

Chunks must lie in the file as it was indexed, after its superblock, without overlap, and within the
grid; those without filters have the length of a chunk. Segments must lie in their datasets. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.datasettable import Columns
from h5async.index.savedfile import SavedIndexError
from h5async.index.segments import Segments

Int64s = NDArray[np.int64]

LARGEST = (1 << 62) - 1  # of bytes, chunks or samples
_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # per dataset from which copying arrays to check several at once does not pay


class Limits(NamedTuple):
    """What the kinds of datasets permit: an item for each kind.

    Attributes
    ----------
    row_nbytes
        Bytes of a row.
    is_direct
        Whether values without chunks lie at an offset.
    chunk_rows, cross
        Rows of a chunk, 0 without chunks; and the number of chunks that hold pieces of a row.
    chunk_nbytes
        Bytes of a chunk; -1 for any size.
    """

    row_nbytes: Int64s
    is_direct: Int64s
    chunk_rows: Int64s
    cross: Int64s
    chunk_nbytes: Int64s


def require_sound(columns: Columns, limits: Limits) -> None:
    """Check a table of datasets.

    Raises
    ------
    ValueError
        If it makes no sense.
    SavedIndexError
        If chunks cannot lie at their positions.
    """
    _require_below(columns.kind, limits.row_nbytes.size, "kind")
    _require_below(columns.file, len(columns.files), "file")
    rows, chunks, begin = columns.rows, columns.chunks, columns.begin
    row_nbytes, is_direct, chunk_rows, cross, expected = (x[columns.kind] for x in limits)
    if (rows < 0).any() or (columns.offset < -1).any() or (columns.stored_nbytes < 0).any():
        raise ValueError("a dataset has a negative size")
    if (rows > LARGEST).any():
        raise ValueError("a dataset has more rows than can be counted")
    end = np.array([stamp.nbytes for _, stamp in columns.files], np.int64)[columns.file]
    is_there = (is_direct != 0) & (chunk_rows == 0) & (columns.offset >= 0)
    if (rows > (end - columns.offset) // np.maximum(1, row_nbytes))[is_there].any():
        raise ValueError("values lie beyond the end of their file")
    count = np.diff(begin)
    if begin[0] or (count < 0).any() or begin[-1] != chunks.offset.size:
        raise ValueError("chunk tables do not lie one after the other")
    if ((count > 0) & (chunk_rows == 0)).any():
        raise ValueError("a dataset without chunks has a chunk table")
    along = -(-rows // np.maximum(1, chunk_rows))
    grid = np.where(along > LARGEST // np.maximum(1, cross), LARGEST, along * cross)
    has_table = chunk_rows > 0
    if ((count != grid) & has_table & ~columns.is_sparse).any():
        raise SavedIndexError("a chunk table does not fit its dataset")
    is_large = count >= _MANY_CHUNKS
    wrong = None
    for at in np.flatnonzero(is_large).tolist():
        here = slice(*begin[at : at + 2].tolist())
        part = chunks.part(here, is_sparse=bool(columns.is_sparse[at]))
        limit = int(end[at]), int(grid[at]), int(expected[at])
        wrong = wrong or _wrong(_FIRST, part.index, part.offset, part.nbytes, *limit)
    small = np.flatnonzero(~is_large & (count > 0))
    if small.size and not wrong:
        table = np.repeat(small, count[small])
        first = np.cumsum(count[small]) - count[small]
        inside = np.arange(table.size) - np.repeat(first, count[small])
        at = begin[table] + inside
        number = inside
        if chunks.index is not None:
            number = np.where(columns.is_sparse[table], chunks.index[at], inside)
        limits_of = end[table], grid[table], expected[table]
        wrong = _wrong(first, number, chunks.offset[at], chunks.nbytes[at], *limits_of)
    if wrong:
        raise SavedIndexError(wrong)


_FIRST = np.zeros(1, np.int64)


def require_sound_segments(segments: Segments, rows: Int64s, num_samples: int) -> None:
    """Raise ValueError unless segments lie in datasets of some `rows`, and do not overlap."""
    first, length, row, step = segments.first, segments.length, segments.row, segments.step
    _require_below(segments.dataset, rows.size, "dataset")
    _require_below(segments.piece, len(segments.pieces), "piece")
    if (first < 0).any() or (length < 1).any() or (row < 0).any() or (step < 1).any():
        raise ValueError("a segment has a negative size")
    if (length > num_samples).any() or (first > num_samples - length).any():
        raise ValueError("a segment lies outside its dataset")
    limit = rows[segments.dataset]
    if (row >= limit).any() or (step > np.maximum(1, limit))[length > 1].any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (length - 1 > (limit - 1 - row) // step).any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (first[1:] < first[:-1]).any():
        raise ValueError("segments are not in order")
    if any((layer.end[:-1] > layer.first[1:]).any() for _, layer in segments.layers):
        raise ValueError("segments overlap")
    if any(not 0 <= begin <= end <= num_samples or size < 0 for begin, end, size in segments.even):
        raise ValueError("units lie outside their dataset")


def _require_below(column: NDArray[np.int32], limit: int, what: str) -> None:
    if ((column < 0) | (column >= limit)).any():
        raise ValueError(f"a {what} is named that is not there")


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
