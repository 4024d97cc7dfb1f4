"""Builds one table of a field's segments and extents, over all datasets that hold its rows.

A field has layers, nearly always one: each holds a piece of every row (the whole row, or a region
of it). A layer is a table of segments, sorted by their first sample: the rows of a segment lie at
equal distances in one dataset. The chunks of all these datasets are in one table of extents. So
another file, or another mapping of a virtual dataset, costs only a few numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable
from h5async.index.datasetlookup import Leaf, leaves_of, lie_within
from h5async.index.layout import DatasetLayout, HeapFile, region_key
from h5async.index.shapes import Kind, Shape, shape_of, shape_of_small
from h5async.index.similardatasets import AlikeParts
from h5async.index.slabs import TooManyRunsError, runs_between
from h5async.index.smalldatasets import address_of_small, addresses_of_small, kept_whole_nbytes
from h5async.io.stamps import FileStamp

Int64s = NDArray[np.int64]

MOST_SEGMENTS = 1 << 22  # of SEGMENT_NBYTES each; a dataset with more is read part by part
MOST_PIECES = (1 << 31) - 1  # of a sample: the core counts them in 32 bits
SEGMENT_NBYTES, EXTENT_NBYTES = 53, 28  # of a row in the tables


class SourceFile(NamedTuple):
    """A file that holds rows, or memory with a compact dataset's values.

    Attributes
    ----------
    path, stamp
        The file, as it was indexed.
    values
        (rows, *row), C-contiguous; None for a file.
    is_heap
        Whether variable-length elements are read from it: their positions are not read again after
        a change.
    """

    path: str
    stamp: FileStamp
    values: NDArray[Any] | None = None
    is_heap: bool = False


@dataclass(frozen=True)
class Layer:
    """Segments of samples: parallel arrays, sorted by `first`, that cover all samples.

    Attributes
    ----------
    first
        int64 (n + 1,): first sample of each, followed by the number of samples.
    row, step
        int64 (n,): row of the first sample in the source, and the distance to the next.
    shape
        int32 (n,): index of the `Shape`; -1 if nothing holds these samples.
    source
        int32 (n,): index of the source.
    begin, count
        int64 (n,): the first extent of the dataset, and the number of extents; without chunks, the
        address of row 0 (-1: never allocated). For variable length: index of the layout's heap.
    is_sparse
        bool (n,): extents are looked up by chunk number, because not all are allocated.
    """

    first: Int64s
    row: Int64s
    step: Int64s
    shape: NDArray[np.int32]
    source: NDArray[np.int32]
    begin: Int64s
    count: Int64s
    is_sparse: NDArray[np.bool_]


@dataclass(frozen=True)
class FieldTable:
    """Where the rows of a field lie.

    Attributes
    ----------
    layers, shapes
        See `Layer` and `Shape`.
    number, offset, nbytes, mask
        Per extent: the chunk's number in its dataset (int64), its address and stored size (int64),
        its filter mask (uint32).
    is_filled_first
        Whether a sample, or a piece of one, may have no source: rows get the fill value first.
    """

    layers: tuple[Layer, ...]
    shapes: tuple[Shape, ...]
    number: Int64s
    offset: Int64s
    nbytes: Int64s
    mask: NDArray[np.uint32]
    is_filled_first: bool

    @property
    def can_read(self) -> bool:
        """Whether the core can read any of it."""
        return any(shape.kind != Kind.LEFT for shape in self.shapes) or not self.shapes


def table_nbytes(layout: DatasetLayout) -> int:
    """Return the maximum size of a field's table, beside the tables of its datasets."""
    if not layout.parts:
        return 0
    if isinstance(layout.parts, AlikeParts):
        extents = max(len(layout.parts), int(layout.parts.chunk_begin[-1]))
    else:
        datasets = {id(leaf): leaf for leaf in layout.leaves()}.values()
        extents = sum(leaf.chunks.offset.size for leaf in datasets if leaf.chunks is not None)
    return extents * EXTENT_NBYTES + min(MOST_SEGMENTS, _most_runs(layout)) * 2 * SEGMENT_NBYTES


def _most_runs(layout: DatasetLayout) -> int:
    """Return the maximum number of runs of samples, without listing them."""
    if isinstance(layout.parts, AlikeParts):
        return 1 + 3 * len(layout.parts)
    return 1 + sum(
        part.samples.num_blocks + part.source_samples.num_blocks + _most_runs(part.source)
        for part in layout.parts
    )


class TableBuilder:
    """Builds the tables of fields, which share their sources.

    Parameters
    ----------
    can_decode
        Whether the core can decode a pipeline.
    max_rank
        The maximum number of dimensions that it supports.
    """

    def __init__(self, can_decode: Any, max_rank: int) -> None:
        self._can_decode = can_decode
        self._max_rank = max_rank
        self.sources: list[SourceFile] = []
        self._source_numbers: dict[Any, int] = {}
        self._kinds: dict[Any, Kind] = {}

    def build(self, layout: DatasetLayout, kept_nbytes: int = 0) -> FieldTable | None:
        """Return the table of a field; None if it would be too large.

        A small dataset is one chunk if all that can be kept of the field fits into `kept_nbytes`.
        """
        if layout.heaps:
            return None if layout.fallback_reason is not None else self._heap_table(layout)
        nbytes = kept_whole_nbytes(layout)
        keeps_small = 0 < nbytes.small <= kept_nbytes - nbytes.encoded
        if isinstance(layout.parts, AlikeParts) and len(layout.parts) <= MOST_SEGMENTS:
            return _FieldBuilder(self, layout, keeps_small).build_alike(layout.parts)
        leaves, count = [], 0
        try:
            for leaf in leaves_of(layout, self._max_rank):
                count += leaf.runs.size
                if count > MOST_SEGMENTS:
                    return None
                leaves.append(leaf)
        except TooManyRunsError:
            return None
        return _FieldBuilder(self, layout, keeps_small).build(leaves)

    def _heap_table(self, layout: DatasetLayout) -> FieldTable:
        """Return the table of variable-length elements: each file is a segment."""
        heaps, count = layout.heaps, len(layout.heaps)
        columns: dict[str, NDArray[Any]] = {
            "row": np.zeros(count, np.int64),
            "step": np.ones(count, np.int64),
            "shape": np.zeros(count, np.int32),
            "source": np.array([self._heap_source_of(heap) for heap in heaps], np.int32),
            "begin": np.arange(count),
            "count": np.zeros(count, np.int64),
            "is_sparse": np.zeros(count, np.bool_),
        }
        first = np.array([heap.first_sample for heap in heaps], np.int64)
        length = np.array([heap.elements.length.size for heap in heaps], np.int64)
        layer = _without_gaps(first, length, columns, layout.sample_count)
        none, masks = np.zeros(0, np.int64), np.zeros(0, np.uint32)
        shape = Shape(Kind.HEAP)
        return FieldTable((layer,), (shape,), none, none, none, masks, is_filled_first=False)

    def _heap_source_of(self, heap: HeapFile) -> int:
        key = "heap", heap.file, heap.stamp
        number = self._source_numbers.setdefault(key, len(self.sources))
        if number == len(self.sources):
            self.sources.append(SourceFile(heap.file, heap.stamp, is_heap=True))
        return number

    def source_of(self, layout: DatasetLayout) -> int:
        """Return the number of a dataset's source, which is added if new."""
        key: Any = id(layout) if layout.values is not None else (layout.file, layout.stamp)
        number = self._source_numbers.get(key)
        if number is None:
            number = self._source_numbers[key] = len(self.sources)
            values = layout.values
            if values is not None:
                values = np.ascontiguousarray(np.moveaxis(values, layout.sample_axis, 0))
            self.sources.append(SourceFile(layout.file, layout.stamp, values))
        return number

    def kind_of(self, layout: DatasetLayout) -> Kind:
        """Return how the rows of a dataset lie, if whole rows are wanted."""
        key = (
            layout.shape,
            layout.chunk_shape,
            layout.sample_axis,
            layout.filters,
            layout.dtype,
            layout.fallback_reason is None,
            layout.values is None,
            layout.chunks is None,
        )
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._new_kind(layout)
        return kind

    def _new_kind(self, layout: DatasetLayout) -> Kind:
        if layout.fallback_reason is not None or len(layout.shape) > self._max_rank:
            return Kind.LEFT
        if layout.num_pieces > MOST_PIECES:
            return Kind.LEFT
        if layout.values is not None:
            return Kind.ROWS
        if layout.filters and not self._can_decode(layout.filters):
            return Kind.LEFT
        if not layout.rows_are_whole or layout.filters:
            return Kind.CHUNKS
        return Kind.ROWS if layout.chunks is None else Kind.ROWS_IN_CHUNKS


class _FieldBuilder:
    """Builds one field's table."""

    def __init__(self, tables: TableBuilder, layout: DatasetLayout, keeps_small: bool) -> None:
        self._tables = tables
        self._layout = layout
        self._keeps_small = keeps_small
        self._shapes: list[Shape] = []
        self._shape_numbers: dict[Any, int] = {}
        # By dataset: first extent, number of extents, whether they are sparse.
        self._extents: dict[Any, tuple[int, int, bool]] = {}
        self._chunks: list[ChunkTable] = []
        self._num_extents = 0

    def build(self, leaves: Sequence[Leaf]) -> FieldTable:
        by_region: dict[Any, list[Leaf]] = {}
        for leaf in leaves:
            by_region.setdefault(region_key(leaf.region), []).append(leaf)
        layers = tuple(self._layer(several) for several in by_region.values())
        is_one = len(layers) == 1 and next(iter(by_region)) is None
        return self._table(layers, is_one)

    def build_alike(self, parts: AlikeParts) -> FieldTable:
        """Build the table of similar datasets; the result equals `build` of their parts."""
        columns, count = parts.columns, len(parts)
        small = addresses_of_small(parts) if self._keeps_small else np.full(count, -1, np.int64)
        first_part = parts[0]
        runs = runs_between(first_part.samples, first_part.source_samples)
        kind, source = self._tables.kind_of(parts.like), -1
        shape, begin = np.empty(count, np.int32), columns.offset.copy()
        extents = np.zeros(count, np.int64)
        if kind != Kind.LEFT:
            source = self._tables.source_of(parts.like)
        is_small = (small >= 0) & (kind != Kind.LEFT)
        sizes = np.frexp(columns.rows - 1)[1]  # bits of the number
        for size in np.unique(sizes[is_small]).tolist():
            here = is_small & (sizes == size)
            one = parts[int(here.argmax())].source
            leaf = Leaf(one, runs, None, None, None, False)
            shape[here] = self._shape_of(leaf, Kind.CHUNKS, is_small=True)
        if is_small.any():
            begin[is_small] = np.arange(np.count_nonzero(is_small)) + self._num_extents
            extents[is_small] = 1
            nbytes = columns.rows[is_small] * parts.like.row_nbytes
            zeros = np.zeros(nbytes.size, np.uint32)
            self._add_extents(ChunkTable(None, small[is_small], nbytes, zeros))
        if kind == Kind.LEFT:
            shape[:] = self._shape_number((Kind.LEFT,), lambda: Shape(Kind.LEFT))
            begin[:] = 0
        elif not is_small.all():
            leaf = Leaf(first_part.source, runs, None, None, None, False)
            shape[~is_small] = self._shape_of(leaf, kind)
        if columns.chunks is not None and kind != Kind.LEFT and not is_small.all():
            begin[~is_small] = (parts.chunk_begin[:-1] + self._num_extents)[~is_small]
            extents[~is_small] = parts.chunk_counts[~is_small]
            self._add_extents(columns.chunks)
        layer = _without_gaps(
            columns.first,
            columns.rows,
            {
                "row": np.zeros(count, np.int64),
                "step": np.ones(count, np.int64),
                "shape": shape,
                "source": np.full(count, source, np.int32),
                "begin": begin,
                "count": extents,
                "is_sparse": np.zeros(count, np.bool_),
            },
            self._layout.num_samples,
        )
        return self._table((layer,), is_one_whole=True)

    def _add_extents(self, table: ChunkTable) -> None:
        self._chunks.append(table)
        self._num_extents += table.offset.size

    def _table(self, layers: tuple[Layer, ...], is_one_whole: bool) -> FieldTable:
        """Return the table; `is_one_whole`: there is one layer, of whole rows."""
        tables = self._chunks
        return FieldTable(
            layers=layers,
            shapes=tuple(self._shapes),
            number=_joined(
                [np.arange(t.offset.size) if t.index is None else t.index for t in tables], np.int64
            )
            if any(sparse for *_, sparse in self._extents.values())
            else np.zeros(0, np.int64),
            offset=_joined([t.offset for t in tables], np.int64),
            nbytes=_joined([t.nbytes for t in tables], np.int64),
            mask=_joined([t.filter_mask for t in tables], np.uint32),
            is_filled_first=(
                not is_one_whole and bool(self._layout.parts) and self._layout.has_gaps
            ),
        )

    def _layer(self, leaves: Sequence[Leaf]) -> Layer:
        counts = [leaf.runs.size for leaf in leaves]
        shape, source, begin, count, sparse = zip(*map(self._describe, leaves), strict=True)
        first = _joined([leaf.runs.first for leaf in leaves], np.int64)
        length = _joined([leaf.runs.length for leaf in leaves], np.int64)
        order = np.argsort(first, kind="stable")
        columns = {
            "row": _joined([leaf.runs.row for leaf in leaves], np.int64),
            "step": _joined([leaf.runs.step for leaf in leaves], np.int64),
            "shape": np.repeat(np.array(shape, np.int32), counts),
            "source": np.repeat(np.array(source, np.int32), counts),
            "begin": np.repeat(np.array(begin, np.int64), counts),
            "count": np.repeat(np.array(count, np.int64), counts),
            "is_sparse": np.repeat(np.array(sparse, np.bool_), counts),
        }
        columns = {name: column[order] for name, column in columns.items()}
        return _without_gaps(first[order], length[order], columns, self._layout.num_samples)

    def _describe(self, leaf: Leaf) -> tuple[int, int, int, int, bool]:
        """Return shape, source, first extent or address, number of extents, whether sparse."""
        layout = leaf.layout
        kind = Kind.LEFT
        if not leaf.is_left and lie_within(leaf.runs, layout.num_samples):
            kind = self._tables.kind_of(layout)
        if kind == Kind.LEFT:
            return self._shape_number((Kind.LEFT,), lambda: Shape(Kind.LEFT)), -1, 0, 0, False
        source = self._tables.source_of(layout)
        small = address_of_small(layout) if self._keeps_small and _is_whole(leaf) else None
        if small is not None:
            shape = self._shape_of(leaf, Kind.CHUNKS, is_small=True)
            return shape, source, *self._extents_of((id(layout), small), _one_chunk(layout, small))
        shape = self._shape_of(leaf, kind)
        if layout.values is not None:
            return shape, source, 0, 0, False
        if layout.chunks is None:
            return shape, source, layout.offset, 0, False
        return shape, source, *self._extents_of(id(layout), layout.chunks)

    def _extents_of(self, key: Any, table: ChunkTable) -> tuple[int, int, bool]:
        found = self._extents.get(key)
        if found is None:
            found = self._num_extents, table.offset.size, table.index is not None
            self._extents[key] = found
            self._add_extents(table)
        return found

    def _shape_of(self, leaf: Leaf, kind: Kind, *, is_small: bool = False) -> int:
        layout = leaf.layout
        if not _is_whole(leaf):
            kind = Kind.CHUNKS
        own = (
            layout.shape
            if layout.sample_axis or (kind == Kind.CHUNKS and not layout.chunk_shape)
            else layout.shape[1:]
        )
        how: Any = layout.chunk_shape
        if is_small:  # so datasets of any number of rows share few shapes
            own, how = layout.shape[1:], 1 << (layout.num_samples - 1).bit_length()
        key = (
            kind,
            own,
            layout.sample_axis,
            is_small,
            how,
            layout.dtype,  # a compound's members, too, may lie elsewhere
            layout.filters,
            region_key(leaf.region),
            region_key(leaf.source_region),
            leaf.member,
            layout.values is not None,
            layout.fill.tobytes(),
        )
        if is_small:
            return self._shape_number(key, lambda: shape_of_small(leaf, how, self._layout))
        return self._shape_number(key, lambda: shape_of(leaf, kind, self._layout, _is_whole(leaf)))

    def _shape_number(self, key: Any, make: Any) -> int:
        number = self._shape_numbers.get(key)
        if number is None:
            number = self._shape_numbers[key] = len(self._shapes)
            self._shapes.append(make())
        return number


def _is_whole(leaf: Leaf) -> bool:
    """Return whether rows of the batch are whole rows of a dataset."""
    return leaf.source_region is None and leaf.region is None and leaf.member is None


def _one_chunk(layout: DatasetLayout, address: int) -> ChunkTable:
    return ChunkTable(None, np.array([address]), np.array([layout.nbytes]), np.zeros(1, np.uint32))


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if len(arrays) == 1:
        # (A column stored as one number stays so.)
        return arrays[0] if arrays[0].dtype == dtype else np.asarray(arrays[0], dtype)
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _without_gaps(
    first: Int64s, length: Int64s, columns: dict[str, NDArray[Any]], num_samples: int
) -> Layer:
    """Merge adjacent segments, and add segments without a source for missing samples."""
    last = first + length
    if first.size > 1:
        goes_on = (last[:-1] == first[1:]) & (columns["step"][:-1] == columns["step"][1:])
        goes_on &= columns["row"][1:] - columns["row"][:-1] == length[:-1] * columns["step"][:-1]
        for name in ("shape", "source", "begin", "count"):
            goes_on &= columns[name][:-1] == columns[name][1:]
        keep = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        ends = np.append(keep[1:], first.size) - 1
        first, last = first[keep], last[ends]
        columns = {name: column[keep] for name, column in columns.items()}
    gap_first = np.concatenate(([0], last))
    gap_last = np.append(first, num_samples)
    gaps = np.flatnonzero(gap_first < gap_last)
    if gaps.size:
        order = np.argsort(np.concatenate((first, gap_first[gaps])), kind="stable")
        first = np.concatenate((first, gap_first[gaps]))[order]
        empty = {"shape": -1, "step": 1}
        columns = {
            name: np.concatenate((column, np.full(gaps.size, empty.get(name, 0), column.dtype)))[
                order
            ]
            for name, column in columns.items()
        }
    return Layer(first=np.append(first, num_samples), **columns)
