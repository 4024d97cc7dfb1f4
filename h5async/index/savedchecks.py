"""Checks where a saved index says that chunks lie, on whole arrays, as is done for HDF5's index.

Chunks must lie in the file as it was indexed, behind its superblock, apart from each other, and
each within the grid; those without filters have the length of a chunk. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import repeated

Int64s = NDArray[np.int64]

_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # of a dataset whose arrays are not worth copying to check several at once


@dataclass(frozen=True)
class Tables:
    """Chunk tables, and what they must fit: of each attribute, a number for each table.

    Attributes
    ----------
    count
        Chunks. In the array of offsets, tables lie one after the other.
    numbers, nbytes
        Where these columns begin in their arrays; -1: the chunks are the whole grid, or all have
        `all_nbytes`.
    all_nbytes
        See there.
    end, grid, expected
        Bytes of the file, chunks in the grid, and bytes of a chunk without filters; -1 where chunks
        have filters.
    """

    count: Int64s
    numbers: Int64s
    nbytes: Int64s
    all_nbytes: Int64s
    end: Int64s
    grid: Int64s
    expected: Int64s


def check_chunks(tables: Tables, offset: Int64s, number: Int64s, nbytes: Int64s) -> str | None:
    """Return what is wrong with chunk tables, or None.

    Parameters
    ----------
    tables
        See there.
    offset, number, nbytes
        The arrays in which their columns lie.
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
    """Return what is wrong with small tables, which are checked as one."""
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
