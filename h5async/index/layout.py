"""Defines `DatasetLayout`: where the bytes of a dataset lie and how they are encoded.

Plain data, without h5py. A layout says where the bytes lie in one file, or it has one flat table,
whose `segments` map samples to rows of its `datasets`. In this way several files form one dataset,
a virtual dataset consists of its sources, and one member of a compound type is a piece of its rows.
The core reads this table, and a saved index holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.errors import ConfigError, DatasetError
from h5async.index.tables import ChunkTable, Int64s, Segments, extents_of, grid_of
from h5async.io.source import FileStamp
from h5async.spelling import printable

_SLICES = 32  # of a contiguous dataset, so that several threads can read it

Storage = Literal["contiguous", "chunked", "compact", "virtual", "external", "files", "heap"]


class Indexed(NamedTuple):
    """Identifies a dataset at the time of indexing; see `identity.indexed`.

    `digest` is 16 bytes that depend on its type and creation properties; `shape` is its extent in
    the file.
    """

    digest: bytes
    shape: tuple[int, ...]


class SequenceLengths(NamedTuple):
    """The lengths of the sequences of a dataset: int64 (n,)."""

    room: Int64s  # samples per sequence that are reserved in all fields,
    held: Int64s  # and those that this field has


class HeapFile(NamedTuple):
    """Variable-length elements of one file, as indexed."""

    file: str
    stamp: FileStamp
    first_sample: int  # the sample number of its first element
    elements: Any  # where their values lie: `storedtypes.Sequences`

    @property
    def path(self) -> str:
        """The path of the dataset in the file."""
        where: str = self.elements.where
        return where.removeprefix(f'{self.file}: dataset "').removesuffix('"')


class Text(NamedTuple):
    """A string in an element, which HDF5 converts while reading.

    If it `is_padded` with spaces, HDF5 replaces these with NULs. Otherwise a NUL ends it, and HDF5
    replaces everything after that with NULs.
    """

    offset: int
    nbytes: int
    is_padded: bool


class Crop(NamedTuple):
    """The part of each row that is delivered, at a place that may differ between samples.

    `axes` are the dimensions of a row that are cut or reversed, and `sizes` the elements along
    each. If it `is_drawn`, the place is random, else in the middle; `flips` says which of the
    dimensions are reversed at random. Fields of one `group` have the same places.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    is_drawn: bool
    flips: tuple[bool, ...]
    group: str


class CfAttribute(NamedTuple):
    """An attribute that says how values are packed, by the CF conventions.

    `dtype` is that of its values in NumPy's notation, or "" for text; `data` are the bytes as
    stored.
    """

    name: str
    dtype: str
    data: bytes


@dataclass(frozen=True)
class DatasetLayout:
    """Where and how the values of one dataset are stored. Picklable; holds no open file.

    Attributes
    ----------
    file, path
        The HDF5 file and the dataset's path in it.
    stamp
        The stamp of the file when it was indexed.
    shape
        The dataset's dimensions, then those of an array dtype.
    dtype
        As in h5py, without metadata, in the file's byte order.
    sample_axis
        The dimension of `shape` that counts the samples.
    storage
        HDF5's layout class, or ``"external"``, or ``"files"`` for several datasets, concatenated.
    fallback_reason
        Why only h5py may read this dataset, or a part of it; None if it is read directly.
    fill
        0-d array: the value of elements that were never written.
    offset
        Contiguous: address of the first byte; -1 if no bytes were allocated.
    chunk_shape, filters, chunks
        Chunked: dimensions of a chunk (of the rank of `shape`), pipeline in the order of writing,
        and the chunk table.
    values
        Compact: the values themselves, of `shape`.
    segments, datasets
        The rows of other datasets that hold the samples; then no other attribute says where bytes
        lie. None, and no datasets, if the dataset holds its own samples.
    sources
        Virtual: the datasets that are mapped.
    member
        The member of a compound type that h5py delivers.
    stored_itemsize, extra_dims, has_raw_edges
        For checking chunks that h5py reads: bytes of an element as stored (0 if unknown), the
        number of last dimensions that belong to an array type, and whether chunks that reach over
        the dataset's edge are stored unfiltered.
    attached
        External, read by h5py: the real paths of the files that hold the values, and their stamps.
    indexed
        Identifies the dataset after its file has changed; None for a file of values that is not
        HDF5.
    file_samples
        Several files: the name and the number of samples of each, in order.
    text
        Strings in each element of `dtype` that HDF5 converts, and we convert after reading.
    heaps
        Variable-length elements: where their values lie, by file. `lengths` has their lengths, and
        the rows of the layout are values.
    spans
        Values of a ragged field: int64 (samples + 1,), the bounds of each sample's rows.
    unused_rows
        Several files or groups: the number of rows that belong to no sample of a ragged field.
    lengths
        Variable-length elements: uint32 (samples,), the number of values per sample.
    limit
        Indices of sparse rows (native, of 4 or 8 bytes): an upper bound that the core checks while
        reading. None means that they are checked before delivery.
    is_shared
        Whether several samples consist of the same rows.
    sequences
        Datasets of several groups, or samples counted by two dimensions: the sequences.
    crop
        The part of each row that is delivered; None for the whole row. The other attributes are
        those of whole rows.
    dim_names
        The names of each dimension: none, one, or several; empty if not requested.
    cf
        How values are packed, by ranges of samples: the first sample, and the attributes that
        apply from there on. Empty if not requested.
    """

    file: str
    stamp: FileStamp
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
    values: NDArray[Any] | None = None
    segments: Segments | None = None
    datasets: Sequence[DatasetLayout] = ()
    sources: tuple[DatasetLayout, ...] = ()
    member: tuple[str, ...] = ()
    stored_itemsize: int = 0
    has_raw_edges: bool = False
    extra_dims: int = 0
    attached: tuple[tuple[str, FileStamp], ...] = ()
    indexed: Indexed | None = None
    file_samples: tuple[tuple[str, int], ...] = ()
    text: tuple[Text, ...] = ()
    heaps: tuple[HeapFile, ...] = ()
    sequences: SequenceLengths | None = None
    spans: Int64s | None = None
    lengths: NDArray[np.uint32] | None = None
    limit: int | None = None
    unused_rows: int = 0
    is_shared: bool = False
    crop: Crop | None = None
    dim_names: tuple[tuple[str, ...], ...] = ()
    cf: tuple[tuple[int, tuple[CfAttribute, ...]], ...] = ()

    def __repr__(self) -> str:
        parts = [str(self.dtype), self.storage, *(entry.label for entry in self.filters)]
        if self.chunk_shape:
            parts[1] += f" {self.chunk_shape}"
        why = self.fallback_reason
        parts.append("read directly" if why is None else f"read through h5py: {why}")
        what = printable(f'{self.file}: "{self.path}"')
        return f"<DatasetLayout {what} {self.shape} {', '.join(parts)}>"

    def changed(self, **changes: Any) -> DatasetLayout:
        """Return a layout with other values of some fields; faster than `dataclasses.replace`."""
        new = object.__new__(DatasetLayout)
        new.__dict__.update({name: self.__dict__[name] for name in _FIELDS}, **changes)
        return new

    @property
    def num_samples(self) -> int:
        """The extent of the sample dimension."""
        return self.shape[self.sample_axis]

    @property
    def sample_count(self) -> int:
        """The number of samples of its field: `num_samples`, unless samples are runs of rows."""
        if self.lengths is not None:
            return self.lengths.size
        return self.num_samples if self.spans is None else self.spans.size - 1

    @property
    def is_ragged(self) -> bool:
        """Whether samples of its field are runs of rows."""
        return self.spans is not None or self.lengths is not None

    def starts(self) -> Int64s:
        """Return the first row of each sample, and the end of the last: int64 (samples + 1,).

        For variable-length elements they are computed on each call, in new memory.
        """
        if self.spans is not None:
            return self.spans
        assert self.lengths is not None
        found = np.zeros(self.lengths.size + 1, np.int64)
        np.cumsum(self.lengths, out=found[1:])
        return found

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Dimensions of one sample."""
        return self.shape[: self.sample_axis] + self.shape[self.sample_axis + 1 :]

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Dimensions of the part of a row that is delivered."""
        found = list(self.row_shape)
        if self.crop is not None:
            for axis, size in zip(self.crop.axes, self.crop.sizes, strict=True):
                found[axis] = size
        return tuple(found)

    @cached_property
    def part_nbytes(self) -> int:
        """Bytes of the part of a row that is delivered."""
        return self.dtype.itemsize * math.prod(self.part_shape)

    @cached_property
    def raw_dtype(self) -> np.dtype[Any]:
        """The dtype of rows as read: a bool is a byte, and any byte but 0 is True."""
        return np.dtype(np.uint8) if self.dtype.kind == "b" else self.dtype

    @property
    def raw_fill(self) -> NDArray[Any]:
        """The fill value as `raw_dtype`."""
        return self.fill.view(self.raw_dtype) if self.dtype.kind == "b" else self.fill

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
    def num_pieces(self) -> int:
        """The number of pieces of one sample."""
        grid = grid_of(self.shape, self.piece_shape)
        return math.prod(n for a, n in enumerate(grid) if a != self.sample_axis)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Dimensions of a unit of reading: a chunk.

        For a contiguous dataset: all samples, and a slice of the rows' first dimension if the bytes
        of a row lie together, else of their longest one. In the latter case, the bytes of each
        sample are spread over the whole slice, so it is best read once for all samples.
        """
        if self.chunk_shape:
            return self.chunk_shape
        pieces = [max(1, n) for n in self.shape]
        rest = [a for a, size in enumerate(self.shape) if a != self.sample_axis and size > 1]
        if rest:
            cut = max(rest, key=lambda a: self.shape[a]) if self.sample_axis else rest[0]
            pieces[cut] = max(1, -(-self.shape[cut] // _SLICES))
        return tuple(pieces)

    @cached_property
    def is_repeated(self) -> bool:
        """Whether neighbouring samples have the same row; see `opening/oncefields.py`."""
        return self.segments is not None and not self.segments.step.all()

    @property
    def is_columns(self) -> bool:
        """Whether a sample is spread over a whole contiguous dataset."""
        is_whole = self.storage in ("contiguous", "external") and not self.chunk_shape
        return is_whole and self.sample_axis != 0

    @property
    def rows_are_whole(self) -> bool:
        """Whether each sample's bytes lie in one piece: sample dimension first, nothing split."""
        if self.sample_axis != 0:
            return False
        return not self.chunk_shape or self.chunk_shape[1:] == self.shape[1:]

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some samples, or pieces of them, lie in no dataset, and have the fill value."""
        if self.segments is None:
            return False
        sizes = [math.prod(extents_of(one.region, self.row_shape)) for one in self.segments.pieces]
        held = np.bincount(self.segments.piece, self.segments.length, len(sizes))
        elements = sum(int(n) * size for n, size in zip(held, sizes, strict=True))
        return elements < math.prod(self.shape)

    def needed_nbytes(self, number: int) -> int:
        """Return the bytes of chunk `number` up to the last one within the dataset."""
        cell = np.unravel_index(number, self.grid)
        corner = [int(c) * size for c, size in zip(cell, self.chunk_shape, strict=True)]
        return needed_nbytes(self.shape, self.chunk_shape, corner, self.dtype.itemsize)

    @property
    def hdf5_filters(self) -> tuple[Filter, ...]:
        """The filters that the file declares: without a conversion of stored elements."""
        return tuple(entry for entry in self.filters if entry.number >= 0)

    def through_h5py(self, reason: str) -> DatasetLayout:
        """Return the layout of the same dataset, read by h5py."""
        is_cut = self.storage == "contiguous"  # into units, for conversion
        return self.changed(
            fallback_reason=reason,
            offset=-1,
            chunk_shape=() if is_cut else self.chunk_shape,
            filters=self.hdf5_filters,
            chunks=None,
            segments=None,
            datasets=(),
            text=(),
        )

    def without_place(self, storage: Storage, **changes: Any) -> DatasetLayout:
        """Return a copy with some `changes`, without the attributes that say where values lie.

        Other layouts, or `changes`, say that instead.
        """
        return self.changed(**{**_NO_PLACE, "storage": storage, **changes})

    def leaves(self) -> Iterator[DatasetLayout]:
        """Yield the layouts that say where bytes lie: this one, or its datasets."""
        return iter((self,) if self.segments is None else self.datasets)

    def origins(self) -> Iterator[DatasetLayout]:
        """Yield the layouts of the datasets that hold the values, even if h5py reads them."""
        if not self.sources:
            yield self
        for source in self.sources:
            yield from source.origins()

    def with_one_sample(self) -> DatasetLayout:
        """Return the same bytes as one sample: with a first dimension of 1."""
        assert self.segments is None
        return self.changed(
            shape=(1, *self.shape),
            chunk_shape=(1, *self.chunk_shape) if self.chunk_shape else (),
            sample_axis=0,
            values=None if self.values is None else self.values[np.newaxis],
        )


_FIELDS = tuple(field.name for field in fields(DatasetLayout))
_NO_PLACE: dict[str, Any] = {
    **dict.fromkeys(("chunk_shape", "filters", "datasets", "sources", "attached", "member"), ()),
    **dict.fromkeys(("chunks", "values", "segments")),
    "offset": -1,
}


def normal_axis(axis: int, rank: int, where: str) -> int:
    """Return `axis` counted from the front; raise `ConfigError` if there is none."""
    if not -rank <= axis < rank:
        raise ConfigError(f"{where}: there is no dimension {axis}; the dataset has {rank}")
    return axis % rank


def needed_nbytes(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], corner: Sequence[int], itemsize: int
) -> int:
    """Return the bytes of a chunk up to the last one within the dataset."""
    last = 0
    for extent, size, begin in zip(shape, chunk_shape, corner, strict=True):
        last = last * size + min(size, extent - begin) - 1
    return (last + 1) * itemsize


def values_of(fact: DatasetLayout) -> NDArray[Any]:
    """Return the values of a fact; DatasetError if a saved index lacks them."""
    if fact.values is None:
        raise DatasetError(
            f'{fact.file}: the saved index has no values of "{fact.path}"; make it again'
        )
    return fact.values.view(fact.dtype)
