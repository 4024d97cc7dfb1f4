"""Defines `ChunkTable`, and the numbering of the chunks of a dataset.

Chunks make a grid; a chunk's number is that of its cell in C order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the allocated chunks of a dataset lie: parallel arrays, sorted by `index`.

    `index` is the chunk's number in the C-ordered grid; None if all are allocated, so that the
    number is the index into the arrays. `nbytes` and `filter_mask` may each be one number in memory
    (a stride of 0) if all are equal.
    """

    index: NDArray[np.int64] | None
    offset: NDArray[np.int64]  # address in the file
    nbytes: NDArray[np.int64]  # stored size
    filter_mask: NDArray[np.uint32]  # bit i is set if filter i of the pipeline was not applied

    def shortened(self) -> ChunkTable:
        """Return the same table; each column of equal numbers takes the memory of one."""
        nbytes, filter_mask = shortened(self.nbytes), shortened(self.filter_mask)
        return ChunkTable(self.index, self.offset, nbytes, filter_mask)

    @classmethod
    def joined(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """Return several tables, concatenated; `index` is None if no table has one."""
        if len(tables) == 1:
            return tables[0]
        index = None
        if any(table.index is not None for table in tables):
            index = np.concatenate([table.numbers for table in tables])
        return cls(
            index,
            _concatenated([table.offset for table in tables], "i8"),
            _concatenated([table.nbytes for table in tables], "i8"),
            _concatenated([table.filter_mask for table in tables], "u4"),
        )

    @property
    def numbers(self) -> NDArray[np.int64]:
        """int64: the number of each chunk."""
        return np.arange(self.offset.size) if self.index is None else self.index

    def part(self, here: slice, *, is_sparse: bool) -> ChunkTable:
        """Return the table of one of several datasets whose chunks it has."""
        return ChunkTable(
            self.numbers[here] if is_sparse else None,
            self.offset[here],
            self.nbytes[here],
            self.filter_mask[here],
        )

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of chunks `numbers` in the arrays; -1 for unallocated ones."""
        if self.index is None:
            return numbers
        if not self.index.size:
            return np.full(numbers.shape, -1, np.int64)
        at = np.minimum(np.searchsorted(self.index, numbers), self.index.size - 1)
        return np.where(self.index[at] == numbers, at, -1)


def _concatenated(columns: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Return columns, concatenated; equal numbers take the memory of one."""
    firsts = {int(column[0]) for column in columns if column.size}
    if len(firsts) == 1 and all(not any(c.strides) for c in columns if c.size > 1):
        return repeated(firsts.pop(), sum(column.size for column in columns), dtype)
    return np.concatenate([np.zeros(0, dtype), *columns])


@lru_cache(maxsize=256)
def repeated(value: int, count: int, dtype: str) -> NDArray[Any]:
    """Return an array of one repeated number that takes the memory of one."""
    one = np.array([value], dtype)
    one.flags.writeable = False
    return np.ndarray((count,), dtype, one.data, 0, (0,)) if count else one[:0]


def shortened(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column that takes the memory of one number if all are equal."""
    if column.size < 2 or (column != column[0]).any():
        return column
    return repeated(int(column[0]), column.size, column.dtype.str)


def grid_of(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunk_shape, strict=True))


def needed_nbytes(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], corner: Sequence[int], itemsize: int
) -> int:
    """Return the bytes of a chunk up to the last one within the dataset."""
    last = 0
    for extent, size, begin in zip(shape, chunk_shape, corner, strict=True):
        last = last * size + min(size, extent - begin) - 1
    return (last + 1) * itemsize
