"""Makes the tables of fields that the core reads: layers of segments, extents and shapes. Pure.

Takes a layout, which is already one flat table (`layout.py`); returns, for each dataset, where its
first extent is and which `Shape` its rows have. A field has layers, nearly always one: each holds a
piece of every row (the whole row, or a region of it), and covers all samples.

Also decides what is kept for later batches: chunks, whole rows, or small datasets. If rows lie in a
thousand files, such as the labels beside each recording, nearly every row costs a check of another
file. Then it is cheaper to keep these small datasets whole, like decoded chunks.
"""

from __future__ import annotations

import itertools
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import KEPT_OVERHEAD_NBYTES, MAX_RANK
from h5async.index.datasettable import Datasets, pieces_read, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.shapes import (
    FieldTable,
    Kind,
    Layer,
    Shape,
    can_take_member,
    shape_of,
    shape_of_small,
    swaps,
)
from h5async.index.tables import ChunkTable, Int64s, Piece
from h5async.io.source import FileStamp

MOST_PIECES = (1 << 31) - 1  # of a sample: the core counts them in 32 bits
SEGMENT_NBYTES, EXTENT_NBYTES = 53, 28  # of a row in the tables


class SourceFile(NamedTuple):
    """A file that holds rows, as it was indexed, or memory with a compact dataset's values.

    `values` are (rows, *row), C-contiguous; None for a file. If it `is_heap`, it holds
    variable-length elements, whose positions are not read again after a change.
    """

    path: str
    stamp: FileStamp
    values: NDArray[Any] | None = None
    is_heap: bool = False


def table_nbytes(layout: DatasetLayout) -> int:
    """Return the maximum size of a field's table, besides the layout itself."""
    if layout.segments is None:
        return 0
    segments, datasets = table_of(layout)
    extents = min(len(datasets), int(datasets.columns.begin[-1]) + len(datasets))
    return extents * EXTENT_NBYTES + (1 + 3 * segments.size) * SEGMENT_NBYTES


class TableBuilder:
    """Builds the tables of fields, which share their sources.

    `can_decode` says whether the core can decode a pipeline.
    """

    def __init__(self, can_decode: Any) -> None:
        self._can_decode = can_decode
        self.sources: list[SourceFile] = []
        self._source_numbers: dict[Any, int] = {}

    def build(self, layout: DatasetLayout, kept_nbytes: int = 0) -> FieldTable:
        """Return the table of a field.

        Each small dataset is one chunk if all that can be kept of the field fits in `kept_nbytes`.
        """
        if layout.heaps:
            return self._heap_table(layout)
        nbytes = kept_whole_nbytes(layout)
        keeps_small = 0 < nbytes.small <= kept_nbytes - nbytes.encoded
        return _FieldBuilder(self, layout, keeps_small).build()

    def _heap_table(self, layout: DatasetLayout) -> FieldTable:
        heaps, count = layout.heaps, len(layout.heaps)
        sources = (SourceFile(heap.file, heap.stamp, is_heap=True) for heap in heaps)
        columns: dict[str, NDArray[Any]] = {
            "row": np.zeros(count, np.int64),
            "step": np.ones(count, np.int64),
            "shape": np.zeros(count, np.int32),
            "source": np.array([self.source(source) for source in sources], np.int32),
            "begin": np.arange(count),
            "count": np.zeros(count, np.int64),
            "is_sparse": np.zeros(count, np.bool_),
        }
        first = np.array([heap.first_sample for heap in heaps], np.int64)
        length = np.array([heap.elements.length.size for heap in heaps], np.int64)
        layer = _without_gaps(first, length, columns, layout.sample_count)
        return FieldTable((layer,), (Shape(Kind.HEAP),), ChunkTable.joined([]), False)

    def source(self, source: SourceFile, key: Any = None) -> int:
        """Return the number of a source, which is added if new; a `key` identifies values."""
        number = self._source_numbers.setdefault(key or source, len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
        return number

    def kind_of(self, layout: DatasetLayout, piece: Piece, whole: DatasetLayout) -> Kind:
        """Return how the rows of a dataset lie if a piece of each is wanted."""
        is_member, crop = piece.member is not None, whole.crop
        if (
            layout.fallback_reason is not None
            or len(layout.shape) > MAX_RANK
            or layout.num_pieces > MOST_PIECES
            or (not is_member and swaps(layout, whole) is None)
            or (is_member and not can_take_member(layout, piece, whole))
            or (crop is not None and any(one.step not in (None, 1) for one in piece.region or ()))
        ):
            return Kind.LEFT
        is_whole = piece.is_whole and crop is None
        if layout.values is not None:
            return Kind.ROWS if is_whole else Kind.CHUNKS
        if layout.filters and not self._can_decode(layout.filters):
            return Kind.LEFT
        if not is_whole or not layout.rows_are_whole or layout.filters:
            return Kind.CHUNKS
        return Kind.ROWS if layout.chunks is None else Kind.ROWS_IN_CHUNKS


class _FieldBuilder:
    """Builds one field's table."""

    def __init__(self, tables: TableBuilder, layout: DatasetLayout, keeps_small: bool) -> None:
        self._tables = tables
        self._layout = layout
        self._segments, self._datasets = table_of(layout)
        # Per dataset, its address if it is kept whole; -1 for others.
        self._small = np.full(len(self._datasets), -1, np.int64)
        if keeps_small:
            self._small = addresses_of_small(self._datasets)
        self._shapes: list[Shape] = []
        self._shape_numbers: dict[Any, int] = {}

    def build(self) -> FieldTable:
        segments, layout = self._segments, self._layout
        shape = self._shapes_of_segments()
        columns = self._columns(shape)
        layers = tuple(
            _without_gaps(
                of_layer.first,
                of_layer.length,
                {name: column[here] for name, column in columns.items()},
                layout.num_samples,
            )
            for here, of_layer in segments.layers
        )
        is_one_whole = len(layers) == 1 and all(p.region is None for p in segments.pieces)
        is_filled = not is_one_whole and layout.segments is not None and layout.has_gaps
        return FieldTable(layers, tuple(self._shapes), self._chunks(), is_filled)

    @property
    def _is_small(self) -> NDArray[np.bool_]:
        """Bool (segments,): whether the dataset of a segment is one chunk, which is kept."""
        is_whole = np.array([piece.is_whole for piece in self._segments.pieces])
        is_small: NDArray[np.bool_] = self._small[self._segments.dataset] >= 0
        is_small &= is_whole[self._segments.piece]
        return is_small

    def _shapes_of_segments(self) -> NDArray[np.int32]:
        segments, columns = self._segments, self._datasets.columns
        kind, rows = columns.kind[segments.dataset], columns.rows[segments.dataset]
        is_small = self._is_small
        last = segments.row + (segments.length - 1) * segments.step
        is_inside = (segments.row >= 0) & (last < rows) & (segments.step >= 0)
        # A shape depends on the number of rows if these are not the first dimension, or if the
        # dataset is its own chunk. Small datasets share a few shapes.
        datasets, is_whole = self._datasets, np.array([p.is_whole for p in segments.pieces])
        depends = datasets.by_kind(lambda one: one.sample_axis != 0, np.bool_)[segments.dataset]
        has_chunks = datasets.by_kind(lambda one: bool(one.chunk_shape), np.bool_)
        is_row = is_whole[segments.piece] & (self._layout.crop is None)
        depends |= ~(has_chunks[segments.dataset] | is_row)
        size = np.where(is_small, -1 - np.frexp(rows - 1)[1], np.where(depends, rows, 0))
        sizes, at = np.unique(size, return_inverse=True)
        key = (kind.astype(np.int64) * len(segments.pieces) + segments.piece) * sizes.size + at
        key[~is_inside] = -1
        _, example, of_segment = np.unique(key, return_index=True, return_inverse=True)
        numbers = [
            self._shape_of(
                int(segments.dataset[at]),
                segments.pieces[segments.piece[at]],
                is_small=bool(is_small[at]),
                is_inside=bool(is_inside[at]),
            )
            for at in example.tolist()
        ]
        shape: NDArray[np.int32] = np.array(numbers, np.int32)[of_segment.reshape(-1)]
        return shape

    def _columns(self, shape: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """Return where segments lie: the columns of a `Layer` after the first."""
        segments, columns, datasets = self._segments, self._datasets.columns, self._datasets
        number, is_small = segments.dataset, self._is_small
        left = np.array([one.kind == Kind.LEFT for one in self._shapes], np.bool_)[shape]
        has_values = datasets.by_kind(lambda kind: kind.values is not None, np.bool_)[number]
        has_values &= ~left
        count = np.diff(columns.begin)
        has_chunks = datasets.by_kind(lambda kind: kind.chunks is not None, np.bool_)
        begin = np.where(has_chunks, columns.begin[:-1], columns.offset)
        files, sources = columns.file[number], np.full(len(columns.files), -1, np.int32)
        for file in np.unique(files[~left & ~has_values]).tolist():
            sources[file] = self._tables.source(SourceFile(*columns.files[file]))
        source = sources[files]
        for at in np.flatnonzero(has_values).tolist():
            layout = datasets[int(number[at])]
            assert layout.values is not None
            values = np.ascontiguousarray(np.moveaxis(layout.values, layout.sample_axis, 0))
            own_source = SourceFile(layout.file, layout.stamp, values)
            source[at] = self._tables.source(own_source, key=id(layout))
        small_begin = np.cumsum(self._small >= 0) - 1 + columns.chunks.offset.size
        begin = np.where(is_small, small_begin[number], begin[number])
        is_nowhere = left | has_values
        return {
            "row": segments.row,
            "step": segments.step,
            "shape": shape,
            "source": np.where(left, np.int32(-1), source),
            "begin": np.where(is_nowhere, 0, begin),
            "count": np.where(is_nowhere, 0, np.where(is_small, 1, count[number])),
            "is_sparse": columns.is_sparse[number] & ~left & ~is_small,
        }

    def _chunks(self) -> ChunkTable:
        """Return the extents: the chunks, then the small datasets."""
        chunks, is_small = self._datasets.columns.chunks, self._small >= 0
        if not is_small.any():
            return chunks
        nbytes = self._datasets.columns.rows[is_small] * row_nbytes_of(self._datasets)[is_small]
        masks = np.zeros(nbytes.size, np.uint32)
        return ChunkTable.joined([chunks, ChunkTable(None, self._small[is_small], nbytes, masks)])

    def _shape_of(self, number: int, piece: Piece, *, is_small: bool, is_inside: bool) -> int:
        """Return the number of the shape of a dataset, which is added if new."""
        layout, whole = self._datasets[number], self._layout
        kind = self._tables.kind_of(layout, piece, whole) if is_inside else Kind.LEFT
        key: Any = kind
        if kind != Kind.LEFT:
            kind = Kind.CHUNKS if is_small else kind
            own, how = layout.shape[1:], layout.chunk_shape
            if is_small:
                how = (1 << (layout.num_samples - 1).bit_length(),)
            elif layout.sample_axis or (kind == Kind.CHUNKS and not layout.chunk_shape):
                own = layout.shape
            # (Members of compounds of other dtypes may lie elsewhere.)
            stored = layout.dtype, layout.filters, layout.values is not None, layout.fill.tobytes()
            key = kind, own, layout.sample_axis, is_small, how, piece.key, stored
        found = self._shape_numbers.setdefault(key, len(self._shapes))
        if found == len(self._shapes):
            if kind == Kind.LEFT:
                shape = Shape(kind)
            elif is_small:
                shape = shape_of_small(layout, how[0], whole)
            else:
                shape = shape_of(layout, piece, kind, whole)
            self._shapes.append(shape)
        return found


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


# --- what is kept ---------------------------------------------------------------------------------

SMALL_NBYTES = 1 << 16  # a dataset of this size takes little longer to read than a row
MANY = 16  # datasets


class KeptNbytes(NamedTuple):
    """The memory needed to keep everything of a field that can be kept."""

    encoded: int  # its chunks that must be decoded
    small: int  # its small datasets without filters; 0 if they are few, and not kept


def kept_whole_nbytes(layout: DatasetLayout) -> KeptNbytes:
    """Return the memory needed to keep all chunks and all small datasets of a field."""
    _, datasets = table_of(layout)
    rows, kinds, encoded = datasets.columns.rows, datasets.kinds, 0
    rows_of_chunk = datasets.by_kind(
        lambda kind: kind.chunk_shape[kind.sample_axis] if kind.chunk_shape else 1, np.int64
    )
    along = -(-rows // rows_of_chunk)
    chunks = np.bincount(datasets.columns.kind, along, len(kinds))
    for (kind, pieces), count in zip(pieces_read(layout), chunks.tolist(), strict=True):
        if kind.filters and kind.chunk_shape:
            encoded += int(count) * pieces * (kind.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
    is_small = addresses_of_small(datasets) >= 0
    number = int(np.count_nonzero(is_small))
    if number < MANY:
        return KeptNbytes(encoded, 0)
    small = int(np.dot(rows[is_small], row_nbytes_of(datasets)[is_small]))
    return KeptNbytes(encoded, small + number * KEPT_OVERHEAD_NBYTES)


def addresses_of_small(datasets: Datasets) -> Int64s:
    """Return the addresses of small datasets with contiguous rows; -1 for other datasets."""
    columns = datasets.columns
    has_chunks = datasets.by_kind(lambda kind: kind.chunks is not None, np.bool_)
    is_small = (columns.rows > 0) & (columns.rows <= datasets.by_kind(_most_rows, np.int64))
    found = np.where(is_small & ~has_chunks, columns.offset, -1)
    at = np.flatnonzero(is_small & has_chunks & (np.diff(columns.begin) == 1))
    found[at] = columns.chunks.offset[columns.begin[at]]
    return found


def row_nbytes_of(datasets: Datasets) -> Int64s:
    """Return the bytes of a row of each dataset, limited to 63 bits: files may declare more."""
    return datasets.by_kind(lambda kind: min(kind.row_nbytes, (1 << 63) - 1), np.int64)


def _most_rows(kind: DatasetLayout) -> int:
    """Return the maximum number of rows of a small dataset of a kind; 0 if none counts as one."""
    if kind.fallback_reason is not None or kind.values is not None:
        return 0
    if not kind.rows_are_whole or kind.filters or not kind.row_nbytes:
        return 0
    most = SMALL_NBYTES // kind.row_nbytes
    return min(most, kind.chunk_shape[0]) if kind.chunk_shape else most


# Rows are assembled if there is memory for at least this number of groups (a group: all rows with
# pieces in one chunk), and if an epoch uses at least this share of all rows.
_LEAST_GROUPS, _LEAST_USES = 4, 0.5


class Keeps(IntEnum):
    """What is kept of chunks; numbers as in the compiled core."""

    NONE = 0
    CHUNKS = 1  # decoded
    ROWS = 2  # whole, assembled once from the chunks that hold their pieces


def what_to_keep(
    table: FieldTable, layout: DatasetLayout, kept_nbytes: int, uses: float
) -> list[Keeps]:
    """Return what is kept of a field's chunks in memory of `kept_nbytes`, by shape.

    Assembling all rows of some chunks pays if an epoch uses most of them, and they stay in memory
    until needed: in a window, or if everything can be kept. Otherwise, or if a chunk has pieces of
    rows that are assembled differently, a batch takes its pieces from chunks. `uses` is the number
    of rows that an epoch delivers, with repetitions.
    """
    keeps = [Keeps.CHUNKS if shape.keeps else Keeps.NONE for shape in table.shapes]
    groups = [group_nbytes(shape, layout.row_nbytes) for shape in table.shapes]
    whole_nbytes = kept_whole_nbytes(layout).encoded
    if layout.crop is not None:
        # Chunks of one sample are not needed before the next epoch: are they still there by then?
        is_again = layout.is_shared or kept_nbytes >= whole_nbytes
        several = zip(table.shapes, keeps, strict=True)
        return [what if is_again or s.chunk_samples > 1 else Keeps.NONE for s, what in several]
    if not any(groups) or _share_chunks(table):
        return keeps
    read = max(pieces / max(1, kind.num_pieces) for kind, pieces in pieces_read(layout))
    chunks = table.chunks.offset.size * read
    for number, (shape, nbytes) in enumerate(zip(table.shapes, groups, strict=True)):
        if not nbytes or kept_nbytes < min(_LEAST_GROUPS * nbytes, whole_nbytes):
            continue
        rows = chunks / len(shape.extents) * shape.chunk_samples
        if uses >= _LEAST_USES * rows:
            keeps[number] = Keeps.ROWS
    return keeps


def group_nbytes(shape: Shape, row_nbytes: int) -> int:
    """Return the size of the assembled rows that have pieces in one chunk.

    It is at most that of their decoded chunks. 0 means that rows are not assembled, because chunks
    hold whole rows as they are, or because rows also have pieces in other datasets.
    """
    whole = shape.itemsize * int(shape.extents.prod(axis=1).sum())
    if not (shape.keeps and shape.filters) or shape.rows_are_whole:
        return 0
    if not whole or whole != row_nbytes:
        return 0
    return shape.chunk_samples * row_nbytes + KEPT_OVERHEAD_NBYTES + len(shape.extents)


def _share_chunks(table: FieldTable) -> bool:
    """Return whether rows of several shapes share a chunk: each shape would decode it again."""
    shapes: dict[int, set[int]] = {}  # by the first extent of their dataset
    count = len(table.shapes)
    for layer in table.layers:
        has_chunks = layer.count > 0
        # Pairs are one number each: NumPy's comparison of rows swallows a signal's exception.
        pairs = layer.begin[has_chunks] * count + layer.shape[has_chunks]
        for begin, shape in map(divmod, np.unique(pairs).tolist(), itertools.repeat(count)):
            shapes.setdefault(begin, set()).add(shape)
    for several in shapes.values():
        numbers = [table.shapes[shape].cross_number for shape in several]
        if len(several) > 1 and np.unique(np.concatenate(numbers)).size < sum(map(len, numbers)):
            return True
    return False
