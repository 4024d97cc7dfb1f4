"""Checks where a saved index says that chunks lie, on whole arrays, as is done for HDF5's index.

Chunks must lie in the file as it was indexed, behind its superblock, apart from each other, and
each within the grid; those without filters have the length of a chunk. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable

Int64s = NDArray[np.int64]

_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # of a dataset whose arrays are not worth copying to check several at once


class Table(NamedTuple):
    """The chunk table of a dataset, and what it must fit.

    Attributes
    ----------
    chunks
        The table.
    end, grid, expected
        Bytes of the file, chunks in the grid, and bytes of a chunk without filters; -1 where chunks
        have filters.
    """

    chunks: ChunkTable
    end: int
    grid: int
    expected: int


def check_chunks(tables: Sequence[Table]) -> str | None:
    """Return what is wrong with chunk tables, or None."""
    small = [table for table in tables if 0 < table.chunks.offset.size < _MANY_CHUNKS]
    for chunks, end, grid, expected in tables:
        if chunks.offset.size >= _MANY_CHUNKS:
            first = np.zeros(1, np.int64)
            found = _wrong(first, chunks.index, chunks.offset, chunks.nbytes, end, grid, expected)
            if found:
                return found
    return _wrong_in_any(small) if small else None


def _wrong_in_any(tables: Sequence[Table]) -> str | None:
    """Return what is wrong with small tables, which are checked as one."""
    count = np.array([table.chunks.offset.size for table in tables], np.int64)
    first = np.cumsum(count) - count
    index = np.arange(count.sum()) - np.repeat(first, count)
    for table, begin in zip(tables, first.tolist(), strict=True):
        found = table.chunks.index
        if found is not None:
            index[begin : begin + found.size] = found
    offset = np.concatenate([table.chunks.offset for table in tables])
    nbytes = np.concatenate([table.chunks.nbytes for table in tables])
    limits = np.array([table[1:] for table in tables], np.int64)
    return _wrong(first, index, offset, nbytes, *np.repeat(limits, count, axis=0).T)


def _wrong(
    begins: Int64s,
    index: Int64s | None,
    offset: Int64s,
    nbytes: Int64s,
    end: Int64s | int,
    grid: Int64s | int,
    expected: Int64s | int,
) -> str | None:
    """Return what is wrong with tables that begin at some places of these arrays, or None."""
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
    """Say whether chunks overlap that do not lie in the order of the grid."""
    if begins.size == 1 and not any(nbytes.strides):
        is_apart = (np.diff(np.sort(offset)) >= nbytes[0]).all()
        return None if is_apart else "a chunk overlaps another one"
    table = np.repeat(np.arange(begins.size), np.diff(np.append(begins, offset.size)))
    order = np.lexsort((offset, table))
    table, offset, nbytes = table[order], offset[order], nbytes[order]
    overlaps = (offset[1:] < offset[:-1] + nbytes[:-1]) & (table[1:] == table[:-1])
    return "a chunk overlaps another one" if overlaps.any() else None
