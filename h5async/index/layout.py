"""Defines `DatasetLayout`: where the bytes of a dataset lie and how they are encoded.

Plain data that `metadata.py` reads, without h5py. A layout says where the bytes lie in one file, or
which `parts` of the dataset other layouts, its sources, hold. So several files are one dataset, a
virtual dataset consists of its sources, and one member of a compound type is a part of its rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.errors import ConfigError
from h5async.index.chunktable import ChunkTable, grid_of, needed_nbytes
from h5async.index.slabs import MOST_RUNS, Blocks, Selection, most_runs, runs_between
from h5async.io.stamps import FileStamp
from h5async.spelling import printable

_SLICES = 32  # of a contiguous dataset, so that several threads can read it
_UNCHUNKED_UNIT_NBYTES = 1 << 20  # a read of this size costs little more per byte

Storage = Literal["contiguous", "chunked", "compact", "virtual", "external", "files", "heap"]


class Indexed(NamedTuple):
    """Identifies a dataset at the time of indexing; see `identity.indexed`.

    `digest` is 16 bytes that depend on its type and creation properties; `shape` is its extent in
    the file.
    """

    digest: bytes
    shape: tuple[int, ...]


class SequenceLengths(NamedTuple):
    """The lengths of the sequences of a dataset.

    Attributes
    ----------
    room, held
        int64 (n,): the samples reserved per sequence for all fields, and those of this field.
    """

    room: NDArray[np.int64]
    held: NDArray[np.int64]


class HeapFile(NamedTuple):
    """Variable-length elements of one file.

    Attributes
    ----------
    file, stamp
        The file, as it was indexed.
    first_sample
        The sample number of its first element.
    elements
        Where their values lie: `heapelements.Sequences`.
    """

    file: str
    stamp: FileStamp
    first_sample: int
    elements: Any

    @property
    def path(self) -> str:
        """The path of the dataset in the file."""
        where: str = self.elements.where
        return where.removeprefix(f'{self.file}: dataset "').removesuffix('"')


class Text(NamedTuple):
    """Bytes of an element that are a string that HDF5 converts while reading.

    Attributes
    ----------
    offset, nbytes
        Where they lie in the element.
    is_padded
        True if spaces pad it, which HDF5 replaces by NULs. Otherwise a NUL ends it, and HDF5
        replaces everything after that by NULs.
    """

    offset: int
    nbytes: int
    is_padded: bool


class CfAttribute(NamedTuple):
    """An attribute that says how values are packed, by the CF conventions.

    `dtype` is that of its values in NumPy's notation, or "" for text; `data` are the bytes as
    stored.
    """

    name: str
    dtype: str
    data: bytes


@dataclass(frozen=True)
class Part:
    """Some samples of a dataset, or pieces of them, that another dataset holds.

    Attributes
    ----------
    source
        Layout of the dataset that holds them.
    samples, source_samples
        Sample numbers in the whole dataset, ascending, and in the source; equally many.
    region, source_region
        The part of a row of the whole dataset, and of a row of the source: a slice per dimension
        except that of the samples; extents are equal, except for those of 1. None means the whole
        row.
    member
        The delivered member of the source's compound type.
    """

    source: DatasetLayout
    samples: Selection
    source_samples: Selection
    region: tuple[slice, ...] | None = None
    source_region: tuple[slice, ...] | None = None
    member: str | None = None


class PartTable(Sequence[Part], ABC):
    """The parts of a dataset that are whole datasets, as arrays: see `similardatasets.py`."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The rows of all parts together."""

    @property
    @abstractmethod
    def largest(self) -> list[Part]:
        """The parts that need the most memory."""

    @abstractmethod
    def shared(self) -> PartTable:
        """Return the same parts of layouts that are `shared`."""


@dataclass(frozen=True)
class DatasetLayout:
    """Where and how the values of one dataset are stored. Picklable; holds no open file.

    Attributes
    ----------
    file, path
        The HDF5 file and the dataset's path in it.
    stamp
        Of the file when it was indexed.
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
    parts
        The parts that other datasets hold; then nothing else here says where bytes lie.
    sources
        Virtual: the datasets that are mapped.
    member
        The member of a compound type that h5py delivers.
    stored_itemsize, extra_dims, has_raw_edges
        For checking chunks that h5py reads: bytes of an element as stored (0 if unknown), the
        number of last dimensions that belong to an array type, and whether chunks that reach over
        the dataset's edge are not filtered.
    attached
        External, read by h5py: the real paths of the files that hold the values, and their stamps.
    indexed
        Identifies the dataset after its file changed; None if the file is not HDF5, and holds
        values only.
    file_samples
        Several files: the name and the number of samples of each, in order.
    text
        Strings in each element of `dtype` that HDF5 converts, and we convert after reading.
    heaps
        Variable-length elements: where their values lie, by file. `lengths` has their lengths, and
        the rows of the layout are values.
    spans
        Of values of a ragged field: int64 (samples + 1,): the rows of each sample.
    lengths
        The same for variable-length elements: uint32 (samples,), the number of values per sample.
    limit
        Of indices of sparse rows, native ones of 4 or 8 bytes: an upper bound that the core checks
        while reading. None means that they are checked before delivery.
    is_shared
        Whether several samples consist of the same rows.
    sequences
        Datasets of several groups, or samples that two dimensions count: their sequences.
    dim_names
        The names of each dimension: none, one, or several; empty if not requested.
    cf
        How values are packed, by ranges of samples: the first sample, and the attributes that hold
        from there on. Empty if not requested.
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
    parts: tuple[Part, ...] | PartTable = ()
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
    spans: NDArray[np.int64] | None = None
    lengths: NDArray[np.uint32] | None = None
    limit: int | None = None
    is_shared: bool = False
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
        """The samples of its field: `num_samples`, unless each sample is several rows."""
        if self.lengths is not None:
            return self.lengths.size
        return self.num_samples if self.spans is None else self.spans.size - 1

    @property
    def is_ragged(self) -> bool:
        """Whether samples of its field are runs of rows."""
        return self.spans is not None or self.lengths is not None

    def starts(self) -> NDArray[np.int64]:
        """Return the first row of each sample, and the end of the last: int64 (samples + 1,).

        Those of variable-length elements are computed, and take memory while they are held.
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
    def raw_dtype(self) -> np.dtype[Any]:
        """The dtype of rows as read: a bool is a byte, which may be any but 0 for True."""
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
        """The number of pieces of one sample: the length of `cross_section`."""
        grid = grid_of(self.shape, self.piece_shape)
        return math.prod(n for a, n in enumerate(grid) if a != self.sample_axis)

    @cached_property
    def cross_section(self) -> NDArray[np.int64]:
        """(m, rank) corners of the m pieces of one sample, at sample 0."""
        grid = grid_of(self.shape, self.piece_shape)
        extents = [1 if a == self.sample_axis else n for a, n in enumerate(grid)]
        cells = np.indices(extents).reshape(len(extents), -1).T
        return np.ascontiguousarray(cells * np.asarray(self.piece_shape), dtype=np.int64)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Dimensions of a unit of reading: a chunk.

        For a contiguous dataset: all samples, and a slice of the rows' longest dimension. The bytes
        of one sample are spread over that whole slice, so it is best read once for all.
        """
        if self.chunk_shape:
            return self.chunk_shape
        rest = [a for a in range(len(self.shape)) if a != self.sample_axis]
        longest = max(rest, key=lambda a: self.shape[a], default=None)
        pieces = [max(1, n) for n in self.shape]
        if longest is not None:
            pieces[longest] = max(1, -(-self.shape[longest] // _SLICES))
        return tuple(pieces)

    @cached_property
    def cross_numbers(self) -> tuple[int, NDArray[np.int64]]:
        """The difference between numbers of chunks that follow each other along the samples.

        And int64 (m,): the numbers of the chunks of `cross_section`.
        """
        strides = np.cumprod((1, *self.grid[:0:-1]), dtype=np.int64)[::-1]
        cells = self.cross_section // np.asarray(self.chunk_shape)
        return int(strides[self.sample_axis]), cells @ strides

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
    def part_starts(self) -> NDArray[np.int64] | None:
        """Where each part begins, if parts hold whole samples and follow each other; else None."""
        starts = np.array([part.samples.start for part in self.parts], np.int64)
        stops = np.array([part.samples.end for part in self.parts], np.int64)
        is_stack = all(part.region is None for part in self.parts)
        return starts if is_stack and (stops[:-1] <= starts[1:]).all() else None

    @property
    def _has_units_of_parts(self) -> bool:
        """Whether parts are runs of whole samples, which are therefore stored together."""
        # (Units of other storage depend on how a dataset is read; the order of samples must not.)
        return (
            bool(self.parts)
            and self.storage in ("virtual", "files")
            and all(
                part.region is None
                and (part.samples.is_run or isinstance(part.samples, Blocks))
                and most_runs(part.samples, part.source_samples) <= MOST_RUNS
                for part in self.parts
            )
        )

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some samples, or pieces of them, lie in no part: those have the fill value."""
        if not isinstance(self.parts, tuple):
            return self.parts.num_rows < self.num_samples
        held = sum(
            part.samples.size
            * math.prod(
                len(range(*piece.indices(extent)))
                for piece, extent in zip(part.region, self.row_shape, strict=True)
            )
            if part.region is not None
            else part.samples.size * math.prod(self.row_shape)
            for part in self.parts
        )
        return held < math.prod(self.shape)

    def unit_bounds(self, row_nbytes: int = 0) -> NDArray[np.int64]:
        """Return the bounds of groups of samples that are stored together, such as in one chunk.

        Parameters
        ----------
        row_nbytes
            Delivered bytes of a sample; 0 for those of a row here.

        Returns
        -------
        numpy.ndarray
            int64 (n + 1,), strictly ascending from 0 to `num_samples`.
        """
        row_nbytes = row_nbytes or self.row_nbytes
        size = max(1, _UNCHUNKED_UNIT_NBYTES // max(1, row_nbytes))
        bounds: list[NDArray[np.int64]] = [np.array([0, self.num_samples], np.int64)]
        if self.chunk_shape:
            size = self.chunk_shape[self.sample_axis]
        elif self._has_units_of_parts:
            bounds += [_unit_bounds_of_part(part, row_nbytes) for part in self.parts]
        if len(bounds) == 1:
            bounds.append(np.arange(0, self.num_samples, size, dtype=np.int64))
        return np.unique(np.concatenate(bounds))

    def sample_bounds(self) -> NDArray[np.int64]:
        """Return `unit_bounds` in samples of its field."""
        bounds = self.unit_bounds()
        if not self.is_ragged:
            return bounds
        starts = self.starts()
        return np.unique(np.append(np.searchsorted(starts[:-1], bounds), [0, starts.size - 1]))

    def most_units(self, row_nbytes: int = 0) -> int:
        """Return the maximum number of groups that `unit_bounds` finds, without listing them."""
        row_nbytes = row_nbytes or self.row_nbytes
        if self.chunk_shape:
            return self.grid[self.sample_axis]
        if self._has_units_of_parts:
            return sum(_most_units_of_part(part, row_nbytes) for part in self.parts)
        return 1 + self.num_samples // max(1, _UNCHUNKED_UNIT_NBYTES // max(1, row_nbytes))

    @cached_property
    def unit_nbytes(self) -> int:
        """Decoded bytes kept of a group of samples for several batches."""
        if self.parts:
            return max(part.source.unit_nbytes for part in self.some_parts)
        if not self.filters or self.is_row_a_chunk:
            return 0
        nbytes = self.chunk_nbytes
        if self.member and self.stored_itemsize:  # HDF5 decodes the whole compound, too
            cells = self.chunk_shape[: len(self.chunk_shape) - self.extra_dims]
            nbytes = math.prod(cells) * self.stored_itemsize
        return nbytes * self.num_pieces

    @property
    def is_row_a_chunk(self) -> bool:
        """Whether each row is one chunk."""
        return not self.is_shared and self.rows_are_whole and self.chunk_shape[0] == 1

    def shared(self) -> DatasetLayout:
        """Return the layout of rows that several samples share.

        Parts with a common source keep it, so that its chunks are kept once.
        """
        if not isinstance(self.parts, tuple):
            return self.changed(parts=self.parts.shared(), is_shared=True)
        if self.parts:
            several = {id(part.source): part.source for part in self.parts}
            found = {key: source.shared() for key, source in several.items()}
            parts = tuple(replace(part, source=found[id(part.source)]) for part in self.parts)
            return self.changed(parts=parts, is_shared=True)
        return self.changed(is_shared=True)

    def needed_nbytes(self, number: int) -> int:
        """Return the bytes of chunk `number` up to the last one within the dataset."""
        cell = np.unravel_index(number, self.grid)
        corner = [int(c) * size for c, size in zip(cell, self.chunk_shape, strict=True)]
        return needed_nbytes(self.shape, self.chunk_shape, corner, self.dtype.itemsize)

    @property
    def hdf5_filters(self) -> tuple[Filter, ...]:
        """The filters that the file names: without a conversion of stored elements."""
        return tuple(entry for entry in self.filters if entry.number >= 0)

    def through_h5py(self, reason: str) -> DatasetLayout:
        """Return the layout of the same dataset, read by h5py."""
        is_cut = self.storage == "contiguous"  # into units to convert
        return self.changed(
            fallback_reason=reason,
            offset=-1,
            chunk_shape=() if is_cut else self.chunk_shape,
            filters=self.hdf5_filters,
            chunks=None,
            parts=(),
            text=(),
        )

    @property
    def some_parts(self) -> Sequence[Part]:
        """One part of each kind: those that need the most memory."""
        return self.parts if isinstance(self.parts, tuple) else self.parts.largest

    def leaves(self) -> Iterator[DatasetLayout]:
        """Yield the layouts that say where bytes lie: itself, or its sources."""
        return iter(self._leaves_of_parts if self.parts else (self,))

    @cached_property
    def _leaves_of_parts(self) -> tuple[DatasetLayout, ...]:
        return tuple(leaf for part in self.parts for leaf in part.source.leaves())

    def origins(self) -> Iterator[DatasetLayout]:
        """Yield the layouts of the datasets that hold the values, even if h5py reads them."""
        if not self.sources:
            yield self
        for source in self.sources:
            yield from source.origins()

    def with_one_sample(self) -> DatasetLayout:
        """Return the same bytes (not `parts`) with a first dimension of 1: as one sample."""
        assert not self.parts
        return self.changed(
            shape=(1, *self.shape),
            chunk_shape=(1, *self.chunk_shape) if self.chunk_shape else (),
            sample_axis=0,
            values=None if self.values is None else self.values[np.newaxis],
        )


_FIELDS = tuple(field.name for field in fields(DatasetLayout))


def _unit_bounds_of_part(part: Part, row_nbytes: int) -> NDArray[np.int64]:
    """Return the bounds of groups of a part's samples that its source stores together.

    Samples between two samples of a group belong to it, unless another part holds them.
    """
    first, length, row, step = runs_between(part.samples, part.source_samples)
    edges = part.source.unit_bounds(row_nbytes)
    unit = np.searchsorted(edges, row, side="right")  # the edge after it
    last_unit = np.searchsorted(edges, row + (length - 1) * step, side="right")
    count = last_unit - unit
    which = np.repeat(np.arange(count.size), count)
    edge = edges[np.arange(which.size) - (np.cumsum(count) - count - unit)[which]]
    inside = first[which] - (row[which] - edge) // step[which]
    begins = np.concatenate(([True], last_unit[:-1] != unit[1:]))
    return np.concatenate(
        [first[begins], (first + length)[np.append(begins[1:], True)], inside]
    ).astype(np.int64)


def _most_units_of_part(part: Part, row_nbytes: int) -> int:
    rows, lengths = part.source_samples.blocks()
    if (rows[:-1] + lengths[:-1] <= rows[1:]).all():  # each unit of the source comes once
        return 2 * part.samples.num_blocks + part.source.most_units(row_nbytes)
    return 2 * part.samples.num_blocks + part.samples.size


def region_key(region: tuple[slice, ...] | None) -> Any:
    """Return a hashable key; slices are not hashable before Python 3.12."""
    return None if region is None else tuple((s.start, s.stop, s.step) for s in region)


def normal_axis(axis: int, rank: int, where: str) -> int:
    """Return `axis` counted from the front; raise `ConfigError` if there is none."""
    if not -rank <= axis < rank:
        raise ConfigError(f"{where}: there is no dimension {axis}; the dataset has {rank}")
    return axis % rank
