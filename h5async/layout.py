"""Where the bytes of a dataset lie and how they are encoded, or why only h5py may read them.

Plain data, made by `metadata.py`; nothing here knows of h5py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError
from h5async.filters import Filter

Storage = Literal["contiguous", "chunked", "compact", "virtual", "external"]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the allocated chunks of a dataset lie: parallel arrays, sorted by `index`.

    Attributes
    ----------
    index
        int64: the chunk's number in the C-ordered grid of chunks; None where all are allocated,
        so that the number is the place in the arrays.
    offset, nbytes
        int64: address in the file, and bytes stored there.
    filter_mask
        uint32: bit i set where filter i of the pipeline was not applied.
    """

    index: NDArray[np.int64] | None
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    filter_mask: NDArray[np.uint32]

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of chunks `numbers` in the arrays; -1 where one is not allocated."""
        if self.index is None:
            return numbers
        if not self.index.size:
            return np.full(numbers.shape, -1, np.int64)
        place = np.minimum(np.searchsorted(self.index, numbers), self.index.size - 1)
        return np.where(self.index[place] == numbers, place, -1)


@dataclass(frozen=True)
class DatasetLayout:
    """Where and how the values of one dataset are stored. Picklable; holds no open file.

    Attributes
    ----------
    file, path
        The HDF5 file and the dataset's path in it.
    file_id
        Device and inode of the file that was indexed.
    shape
        The dataset's dimensions, then those of an array dtype.
    dtype
        As h5py gives it, without metadata; in the file's byte order.
    sample_axis
        The dimension of `shape` that counts the samples.
    storage
        HDF5's layout class, or ``"external"``.
    fallback_reason
        Why only h5py may read this dataset; None: it is read the direct way.
    fill
        0-d array: the value of what was never written.
    offset
        Contiguous: address of the first byte; -1: never allocated.
    chunk_shape, filters, chunks
        Chunked: dimensions of a chunk (of the rank of `shape`), pipeline in the order of
        writing, and the chunk table.
    """

    file: str
    file_id: tuple[int, int]
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sample_axis: int
    storage: Storage
    fallback_reason: str | None
    fill: NDArray[Any]
    offset: int = -1
    chunk_shape: tuple[int, ...] = ()
    filters: tuple[Filter, ...] = ()
    chunks: ChunkTable | None = None
    stored_nbytes: int = 0

    @property
    def num_samples(self) -> int:
        """Extent of the sample dimension."""
        return self.shape[self.sample_axis]

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(
            extent for axis, extent in enumerate(self.shape) if axis != self.sample_axis
        )

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the whole dataset."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of a whole chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return grid_of(self.shape, self.chunk_shape)

    @cached_property
    def cross_section(self) -> NDArray[np.int64]:
        """(m, rank) corners of the m chunks that hold the pieces of one sample, at sample 0."""
        extents = [1 if a == self.sample_axis else n for a, n in enumerate(self.grid)]
        cells = np.indices(extents).reshape(len(extents), -1).T
        return np.ascontiguousarray(cells * np.asarray(self.chunk_shape), dtype=np.int64)

    @property
    def rows_are_whole(self) -> bool:
        """Whether each sample's bytes lie in one piece: sample dimension first, nothing split."""
        if self.sample_axis != 0:
            return False
        return self.storage == "contiguous" or self.chunk_shape[1:] == self.shape[1:]


def normal_axis(axis: int, rank: int, where: str) -> int:
    """Return `axis` counted from the front, or raise `ConfigError` where there is none such."""
    if not -rank <= axis < rank:
        raise ConfigError(f"{where}: there is no dimension {axis}; it has {rank}")
    return axis % rank


def grid_of(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunk_shape, strict=True))
