"""Defines the table of a field as the core reads it: its segments, and how its rows lie. Pure.

A `Shape` says how rows lie in the chunks of a dataset, and where their pieces go in a row of the
batch. `cut_rows` cuts a part out of all rows of a field by making the pieces of its segments
smaller; the rest is neither read nor decoded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.core.binding import MAX_RANK
from h5async.index.datasettable import Datasets, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.tables import (
    WHOLE,
    ChunkTable,
    Int64s,
    Piece,
    Region,
    Segments,
    extents_of,
    ranges_of,
)


class Kind(IntEnum):
    """How rows lie in a source; numbers as in the compiled core."""

    NO_SOURCE = 0
    ROWS = 1  # one after the other
    ROWS_IN_CHUNKS = 2  # whole, in chunks without filters
    CHUNKS = 3  # in chunks that have to be decoded, or in pieces
    LEFT = 4  # only the Python implementation, or h5py, can read them
    HEAP = 6  # elements of variable length, in the heap of the file (5 is the core's own)


@dataclass(frozen=True)
class Shape:
    """Describes how rows lie, for all datasets where they lie alike; sizes are in bytes.

    Attributes
    ----------
    kind
        How rows lie.
    filters
        The pipeline of the chunks.
    chunk_nbytes, chunk_samples, sample_stride
        Of a whole chunk: its size, the number of samples in it, and the distance between them. A
        dataset without chunks counts as one chunk.
    itemsize
        Bytes of an element.
    chunk_strides, row_strides
        int64 (rank,): strides of the dimensions of a piece, in a chunk and in a row of the batch.
    extents
        int64 (pieces, rank): the dimensions of each piece, in elements.
    row_begin, piece_begin
        int64 (pieces,): first byte of each piece, in a row of the batch and in a chunk.
    cross_number, number_stride
        int64 (pieces,): numbers of the chunks that hold sample 0; and the difference between the
        numbers of chunks that are adjacent along the sample dimension.
    rows_are_whole
        Whether a chunk consists of whole rows of the batch.
    source_row_nbytes
        Distance between rows in the file, if they are contiguous.
    keeps
        Whether a batch may need a chunk that the previous batch decoded. If this is so without
        filters, the chunk is a small dataset, and may have fewer rows.
    has_chunks
        False if the dataset counts as one chunk.
    fill
        uint8 (itemsize,): an element that was never written.
    axis, num_cells, cell_begin
        If parts of rows are delivered: int64 (rank,), the dimension of a row for each dimension of
        a piece (-1: none, because it has one element), and the number of pieces along it; int64
        (sum of these numbers,), where each begins in a row. `row_begin` is then 0, and
        `row_strides` are those of parts.
    swaps
        The size of numbers whose byte order differs from the batch's; 0 if it is the same.
    """

    kind: Kind
    filters: tuple[Filter, ...] = ()
    chunk_nbytes: int = 0
    chunk_samples: int = 1
    sample_stride: int = 0
    itemsize: int = 1
    chunk_strides: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    row_strides: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    extents: Int64s = field(default_factory=lambda: np.zeros((1, 0), np.int64))
    row_begin: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    piece_begin: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    cross_number: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    number_stride: int = 1
    rows_are_whole: bool = False
    source_row_nbytes: int = 0
    keeps: bool = False
    has_chunks: bool = False
    fill: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, np.uint8))
    axis: Int64s | None = None
    num_cells: Int64s | None = None
    cell_begin: Int64s | None = None
    swaps: int = 0


@dataclass(frozen=True)
class Layer:
    """Segments of samples: parallel arrays (n,), sorted by `first`, that cover all samples.

    Without chunks, `begin` is the address of row 0 (-1: never allocated); for variable length, the
    index of the layout's heap.
    """

    first: Int64s  # (n + 1,): first sample of each, followed by the number of samples
    row: Int64s  # of the first sample in the source,
    step: Int64s  # and the distance to the next
    shape: NDArray[np.int32]  # index of the `Shape`; -1 if nothing holds these samples
    source: NDArray[np.int32]  # index of the source
    begin: Int64s  # the first extent of the dataset,
    count: Int64s  # and the number of extents
    is_sparse: NDArray[np.bool_]  # they are looked up by chunk number: not all are allocated


@dataclass(frozen=True)
class FieldTable:
    """Where the rows of a field lie; `chunks` are the extents.

    If it `is_filled_first`, rows get the fill value before anything is read: a sample, or a piece
    of one, may have no source.
    """

    layers: tuple[Layer, ...]
    shapes: tuple[Shape, ...]
    chunks: ChunkTable
    is_filled_first: bool

    @property
    def can_read(self) -> bool:
        """Whether the core can read any of it."""
        return any(shape.kind != Kind.LEFT for shape in self.shapes) or not self.shapes


class Cells(NamedTuple):
    """The wanted elements of one dimension of a source's rows, cut at the borders of its cells."""

    cell: Int64s  # (cells,): number of the grid cell
    begin: Int64s  # its first wanted element, counted from the dataset's edge,
    extent: Int64s  # the number of elements,
    done: Int64s  # and the number of elements in earlier cells
    step: int  # between wanted elements
    total: int  # wanted elements of the whole dimension


def cells_of(size: int, cell_size: int, wanted: slice | None) -> Cells:
    """Cut the wanted elements of a dimension (None: all) at the borders of its cells."""
    elements = range(size)[wanted or slice(None)]
    cells = np.arange(-(-size // max(1, cell_size)), dtype=np.int64)
    low, extent = wanted_of_cells(cells, size, cell_size, wanted)
    keep = extent > 0
    cells, low, extent = cells[keep], low[keep], extent[keep]
    begin = elements.start + low * elements.step
    return Cells(cells, begin, extent, low, elements.step, len(elements))


def wanted_of_cells(
    cells: Int64s, size: int, cell_size: int, wanted: slice | None
) -> tuple[Int64s, Int64s]:
    """Return the number of wanted elements before each of some cells, and in it."""
    elements = range(size)[wanted or slice(None)]
    first = np.stack((cells, cells + 1)) * cell_size  # of each cell, and of the next
    low, high = np.clip(-(-(first - elements.start) // elements.step), 0, len(elements))
    return low, high - low


def shape_of(layout: DatasetLayout, piece: Piece, kind: Kind, whole: DatasetLayout) -> Shape:
    """Return how the rows of a dataset lie, and where their pieces go in rows of the batch."""
    axis, shape, cell_shape = layout.sample_axis, layout.shape, layout.piece_shape
    if layout.values is not None:  # their sample dimension was moved to the front
        shape = cell_shape = (shape[axis], *layout.row_shape)
        axis = 0
    chunk_shape = layout.chunk_shape or shape
    if whole.crop is not None:  # without chunks, parts are not read by slices
        cell_shape = chunk_shape
    rest = [a for a in range(len(shape)) if a != axis]
    source_itemsize = itemsize = layout.dtype.itemsize
    offset, extra = 0, tuple[int, ...]()
    if piece.member is not None:
        fields = layout.dtype.fields
        assert fields is not None
        member, offset = fields[piece.member][:2]
        itemsize, extra = member.base.itemsize, member.shape
    # Dimensions of a row in its dataset, and then those of the member: sizes, cells, strides.
    sizes = [*(shape[a] for a in rest), *extra]
    cell_sizes = [*(cell_shape[a] for a in rest), *extra]
    strides = _strides(chunk_shape, source_itemsize)
    own_strides = [*(strides[a] for a in rest), *_strides(extra, itemsize)]
    number_strides = _strides(layout.grid, 1) if layout.chunk_shape else [0] * len(shape)
    wanted = piece.source_region or (None,) * len(sizes)
    axes = list(map(cells_of, sizes, cell_sizes, wanted))
    inside = [one.begin for one in axes]
    if layout.chunk_shape:
        inside = [one.begin - one.cell * n for one, n in zip(axes, cell_sizes, strict=True)]
    chunk_strides = [n * one.step for n, one in zip(own_strides, axes, strict=True)]
    numbers = [*(number_strides[a] for a in rest), *(0 for _ in extra)]
    row_strides, row_begin = _row_strides(whole, piece.region, [a.total for a in axes])
    is_whole, samples, fill = piece.is_whole, chunk_shape[axis], layout.raw_fill
    if piece.member is not None:
        fill = _member_fill(layout, piece.member)[:1]
    found = Shape(
        kind=kind,
        filters=layout.filters,
        chunk_nbytes=math.prod(chunk_shape) * source_itemsize,
        chunk_samples=samples,
        sample_stride=strides[axis],
        itemsize=itemsize,
        chunk_strides=np.array(chunk_strides, np.int64),
        row_strides=np.array(row_strides, np.int64),
        extents=_combinations([one.extent for one in axes]),
        row_begin=row_begin + _sums([one.done for one in axes], row_strides),
        piece_begin=offset + _sums(inside, own_strides),
        cross_number=_sums([one.cell for one in axes], numbers),
        number_stride=number_strides[axis] if layout.chunk_shape else 1,
        rows_are_whole=is_whole and bool(layout.chunk_shape) and layout.rows_are_whole,
        source_row_nbytes=source_itemsize * math.prod(shape[a] for a in rest),
        keeps=bool(layout.filters) and (layout.is_shared or not (is_whole and samples == 1)),
        has_chunks=bool(layout.chunk_shape),
        fill=np.frombuffer(fill.tobytes(), np.uint8),
        swaps=0 if piece.member is not None else swaps(layout, whole) or 0,
    )
    return found if whole.crop is None else _of_parts(found, whole, piece.region, axes)


def _of_parts(shape: Shape, whole: DatasetLayout, region: Region, axes: Sequence[Cells]) -> Shape:
    """Return the shape for rows whose parts are delivered; `axes` are its rows' dimensions."""
    ours = ranges_of(region, whole.row_shape)
    strides = _strides(whole.part_shape, whole.dtype.itemsize)
    partners = iter([a for a, one in enumerate(ours) if len(one) != 1])
    axis = [-1 if one.total == 1 else next(partners) for one in axes]
    starts = [ours[a].start if a >= 0 else 0 for a in axis]
    begins = [one.done + start for one, start in zip(axes, starts, strict=True)]
    # Where a piece has one index along a dimension of rows, parts may lie beside it.
    single = [a for a, one in enumerate(ours) if len(one) == 1 != whole.row_shape[a]]
    begins += [np.array([ours[a].start], np.int64) for a in single]
    axis += single
    ones = np.ones((len(shape.extents), len(single)), np.int64)
    return replace(
        shape,
        extents=np.hstack((shape.extents, ones)),
        chunk_strides=np.append(shape.chunk_strides, np.zeros(len(single), np.int64)),
        row_strides=np.array([0 if a < 0 else strides[a] for a in axis], np.int64),
        row_begin=np.zeros_like(shape.row_begin),
        rows_are_whole=False,
        keeps=bool(shape.filters),
        axis=np.array(axis, np.int64),
        num_cells=np.array([begin.size for begin in begins], np.int64),
        cell_begin=np.concatenate([*begins, np.zeros(0, np.int64)]),
    )


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    products = np.cumprod((itemsize, *shape[:0:-1]), dtype=np.int64)
    return [int(stride) for stride in products[::-1][: len(shape)]]


def _combinations(columns: Sequence[Int64s]) -> Int64s:
    """Return all combinations of a number of each column, int64 (n, columns), in C order."""
    if not columns:
        return np.zeros((1, 0), np.int64)
    grid = np.meshgrid(*columns, indexing="ij")
    return np.stack(grid, axis=-1).reshape(-1, len(columns)).astype(np.int64)


def _sums(columns: Sequence[Int64s], factors: Sequence[int]) -> Int64s:
    """Return the sum of each combination, with each column multiplied by its factor."""
    products = [column * factor for column, factor in zip(columns, factors, strict=False)]
    found: Int64s = _combinations(products).sum(axis=1)
    return found


def shape_of_small(layout: DatasetLayout, samples: int, whole: DatasetLayout) -> Shape:
    """Return how rows lie in a small dataset, treated as one chunk of at most `samples` rows."""
    shape = (samples, *layout.row_shape)
    chunk = layout.changed(shape=shape, chunk_shape=shape)
    return replace(shape_of(chunk, WHOLE, Kind.CHUNKS, whole), keeps=True)


def swaps(source: DatasetLayout, whole: DatasetLayout) -> int | None:
    """Return the size of the numbers of a source whose byte order must be reversed; 0 for none.

    None means that its values need another conversion.
    """
    stored, wanted = source.raw_dtype, whole.raw_dtype
    if stored == wanted:
        return 0
    nbytes = stored.itemsize // 2 if stored.kind == "c" else stored.itemsize
    is_number = stored.kind in "iufc" and nbytes in (2, 4, 8)
    return nbytes if is_number and stored.newbyteorder("S") == wanted else None


def can_take_member(layout: DatasetLayout, piece: Piece, whole: DatasetLayout) -> bool:
    """Return whether the core can take a member of a dataset's compound type."""
    fields: Any = layout.dtype.fields or {}
    if piece.region is not None or piece.member is None or piece.member not in fields:
        return False
    member = fields[piece.member][0]
    return (
        len({element.tobytes() for element in _member_fill(layout, piece.member)}) == 1
        and member.base == whole.raw_dtype
        and part_shape(layout, piece) == whole.row_shape
        and len(layout.shape) + len(member.shape) <= MAX_RANK
    )


def _member_fill(layout: DatasetLayout, member: str) -> NDArray[Any]:
    """Return the fill value of a member, (elements,): more than one for an array."""
    return np.ascontiguousarray(layout.fill[member]).reshape(-1)


def _row_strides(
    whole: DatasetLayout, region: Region, counts: Sequence[int]
) -> tuple[list[int], int]:
    """Return the strides in a row of the batch per dimension of the source's rows, and the offset.

    The offset is that of the first byte. The dimensions are in the same order in both, except for
    those of extent 1.
    """
    pieces = ranges_of(region, whole.row_shape)
    strides = _strides(whole.row_shape, whole.dtype.itemsize)
    begin = sum(piece.start * stride for piece, stride in zip(pieces, strides, strict=True))
    ours = [(len(p), n * p.step) for p, n in zip(pieces, strides, strict=True) if len(p) != 1]
    assert [count for count, _ in ours] == [count for count in counts if count != 1]
    own = iter(ours)
    return [0 if count == 1 else next(own)[1] for count in counts], begin


# --- parts of rows --------------------------------------------------------------------------------

_NOTHING = -1


def cut_rows(layout: DatasetLayout, wanted: Sequence[range]) -> DatasetLayout:
    """Return the layout of a part of each row.

    Parameters
    ----------
    layout
        Of plain rows, possibly of several datasets.
    wanted
        The indices to keep, ascending and at least one, per dimension of a row.
    """
    if all(len(part) == size for part, size in zip(wanted, layout.row_shape, strict=True)):
        return layout
    segments, datasets = table_of(layout)
    axis, kept = layout.sample_axis, [len(part) for part in wanted]
    return layout.without_place(
        "files" if layout.segments is None else layout.storage,
        shape=(*kept[:axis], layout.num_samples, *kept[axis:]),
        segments=_cut_segments(layout, segments, datasets, wanted),
        datasets=datasets,
    )


def _cut_segments(
    layout: DatasetLayout, segments: Segments, datasets: Datasets, wanted: Sequence[range]
) -> Segments:
    """Return the segments of parts of rows, without those that hold no part."""
    kinds = datasets.kinds
    kind = datasets.columns.kind[segments.dataset].astype(np.int64)
    both, of_segment = np.unique(segments.piece * len(kinds) + kind, return_inverse=True)
    pieces: list[Piece] = []
    numbers = []
    for old, number in (divmod(one, len(kinds)) for one in both.tolist()):
        found = cut_piece(segments.pieces[old], kinds[number], layout.row_shape, wanted)
        numbers.append(_NOTHING if found is None else len(pieces))
        pieces += [] if found is None else [found]
    piece = np.array(numbers, np.int32)[of_segment.reshape(-1)]
    columns = (*segments.columns[:-1], piece)
    is_there = piece != _NOTHING
    return Segments.of(
        [column[is_there] for column in columns],
        tuple(pieces) or (WHOLE,),
        segments.even,
        segments.kept_nbytes,
    )


def part_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    """Return the dimensions of the part that a piece takes of a row of its source."""
    return tuple(extents_of(piece.source_region, _row_shape(source, piece)))


def cut_piece(
    piece: Piece, source: DatasetLayout, row_shape: tuple[int, ...], wanted: Sequence[range]
) -> Piece | None:
    """Return the part of a piece that lies in a part of its row; None if there is none.

    `row_shape` is that of the rows that contain the piece; the new region is relative to the part.
    """
    theirs = ranges_of(piece.source_region, _row_shape(source, piece))
    ours = ranges_of(piece.region, row_shape)
    # Dimensions of extent 1 may be missing in either.
    partners = iter([number for number, one in enumerate(theirs) if len(one) != 1])
    region = []
    for here, part in zip(ours, wanted, strict=True):
        partner = None if len(here) == 1 else next(partners)
        is_plain = here.start == 0 and here.step == 1
        common = part if is_plain and part.stop <= here.stop else _common(here, part)
        if not common:
            return None
        region.append(_positions(common, part))
        if partner is not None:
            theirs[partner] = theirs[partner][_positions(common, here)]
    is_all = all(len(range(len(w))[r]) == len(w) for r, w in zip(region, wanted, strict=True))
    taken = tuple(slice(one.start, one.stop, one.step) for one in theirs)
    return Piece(None if is_all else tuple(region), taken, piece.member)


def _row_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    if piece.member is None:
        return source.row_shape
    assert source.dtype.fields is not None
    return (*source.row_shape, *source.dtype.fields[piece.member][0].shape)


def _common(one: range, other: range) -> range:
    found = np.intersect1d(np.asarray(one), np.asarray(other))
    return range(0) if not found.size else _as_range(*found[:2].tolist(), count=found.size)


def _positions(some: range, several: range) -> slice:
    """Return where the numbers of a range are in another range, which contains them."""
    found = _as_range(*(several.index(n) for n in some[:2]), count=len(some))
    return slice(found.start, found.stop, found.step)


def _as_range(first: int, second: int | None = None, *, count: int) -> range:
    step = 1 if second is None else second - first
    return range(first, first + (count - 1) * step + 1, step)
