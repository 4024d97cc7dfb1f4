"""Builds one table of a field's segments and extents, over all that holds its rows.

A field has layers, nearly always one: each holds a piece of every row (the whole row, or a region
of it). A layer is a table of segments, sorted by their first sample: the rows of a segment lie at
equal distances in one dataset. The chunks of all these datasets stand in one table of extents. So a
file more, or a mapping more of a virtual dataset, is a few numbers more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.index.layout import DatasetLayout, Part, region_key
from h5async.index.slabs import MOST_RUNS, PairedRuns, TooManyRunsError, runs_between
from h5async.io.stamps import FileStamp

Int64s = NDArray[np.int64]
Region = tuple[slice, ...] | None

MOST_SEGMENTS = 1 << 22  # of SEGMENT_NBYTES each; a dataset with more is left to its parts
HDF5_MAX_RANK = 32
MOST_PIECES = (1 << 31) - 1  # of a sample: the core counts them in 32 bits
SEGMENT_NBYTES, EXTENT_NBYTES = 53, 28  # of a row in the tables


class Kind(IntEnum):
    """How rows lie in a source; the numbers are those of the compiled core."""

    NO_SOURCE = 0
    ROWS = 1  # one after the other
    ROWS_IN_CHUNKS = 2  # whole, in chunks without filters
    CHUNKS = 3  # in chunks that have to be decoded, or in pieces
    LEFT = 4  # only the Python implementation, or h5py, can read them


class SourceFile(NamedTuple):
    """A file that holds rows, or memory that does (a compact dataset's values).

    Attributes
    ----------
    path, stamp
        The file, as it was indexed.
    values
        (rows, *row), C-contiguous; None: a file.
    """

    path: str
    stamp: FileStamp
    values: NDArray[Any] | None = None


@dataclass(frozen=True)
class Shape:
    """What datasets have in common whose rows lie alike; all in bytes but `extents`.

    Attributes
    ----------
    kind
        How rows lie.
    filters
        The pipeline of the chunks.
    chunk_nbytes, chunk_samples, sample_stride
        Of a whole chunk; samples in it, and how far apart they are. A dataset without chunks is
        its own only chunk.
    itemsize
        Bytes of an element.
    chunk_strides, row_strides
        int64 (rank,): of the dimensions of a piece, in a chunk and in a row of the batch.
    extents
        int64 (pieces, rank): elements of each piece.
    row_begin, piece_begin
        int64 (pieces,): first byte of each piece, in a row of the batch and in a chunk.
    cross_number, number_stride
        int64 (pieces,): numbers of the chunks that hold sample 0, and how far apart the numbers
        are of chunks that follow along the samples.
    rows_are_whole
        Whether a chunk is nothing but whole rows of the batch.
    source_row_nbytes
        Between rows in the file, where they lie one after the other.
    keeps
        Whether a batch may need a chunk that the batch before has decoded.
    has_chunks
        False: it is its own only chunk.
    fill
        uint8 (itemsize,): an element that was never written.
    swaps
        Bytes of each number whose order is another one than that of the batch; 0: it is the same.
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
    swaps: int = 0


@dataclass(frozen=True)
class Layer:
    """Segments of samples; parallel arrays, sorted by `first`, that leave no sample out.

    Attributes
    ----------
    first
        int64 (n + 1,): first sample of each, and at the end the number of samples.
    row, step
        int64 (n,): row of the first sample in the source, and the distance to the next.
    shape
        int32 (n,): which `Shape`; -1: nothing holds these samples.
    source
        int32 (n,): which source.
    begin, count
        int64 (n,): the first extent of the dataset, and how many it has; without chunks, the
        address of row 0 (-1: never allocated).
    is_sparse
        bool (n,): extents are found by their chunk's number, because not all are allocated.
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
        See there.
    number, offset, nbytes, mask
        Of all extents: the number of the chunk in its dataset (int64), its address and stored
        size (int64), its filter mask (uint32).
    is_filled_first
        Whether a sample, or a piece of one, may have no source: rows hold the fill value first.
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
        """Whether there is anything but what is left to others."""
        return any(shape.kind != Kind.LEFT for shape in self.shapes) or not self.shapes


class Leaf(NamedTuple):
    """Runs of samples that one dataset holds, and which piece of its rows goes where."""

    layout: DatasetLayout
    runs: PairedRuns
    region: Region
    source_region: Region
    member: str | None
    is_left: bool


def table_nbytes(layout: DatasetLayout) -> int:
    """Return what the table of a field takes at most, beside those that its datasets have."""
    if not layout.parts:
        return 0
    datasets = {id(leaf): leaf for leaf in layout.leaves()}.values()
    extents = sum(leaf.chunks.offset.size for leaf in datasets if leaf.chunks is not None)
    return extents * EXTENT_NBYTES + min(MOST_SEGMENTS, _most_runs(layout)) * 2 * SEGMENT_NBYTES


def _most_runs(layout: DatasetLayout) -> int:
    """Return how many runs of samples there are at most, without listing them."""
    return 1 + sum(
        part.samples.num_blocks + part.source_samples.num_blocks + _most_runs(part.source)
        for part in layout.parts
    )


class TableBuilder:
    """Builds the tables of fields, which share their sources.

    Parameters
    ----------
    can_decode
        Whether the core can undo a pipeline.
    max_rank
        Dimensions that it can take.
    """

    def __init__(self, can_decode: Any, max_rank: int) -> None:
        self._can_decode = can_decode
        self._max_rank = max_rank
        self.sources: list[SourceFile] = []
        self._source_numbers: dict[Any, int] = {}

    def build(self, layout: DatasetLayout) -> FieldTable | None:
        """Return the table of a field; None where it would be too large."""
        leaves, count = [], 0
        try:
            for leaf in leaves_of(layout, self._max_rank):
                count += leaf.runs.size
                if count > MOST_SEGMENTS:
                    return None
                leaves.append(leaf)
        except TooManyRunsError:
            return None
        return _FieldBuilder(self, layout).build(leaves)

    def source_of(self, layout: DatasetLayout) -> int:
        """Return the number of the source of a dataset; one that is new is added."""
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
        """Tell how the rows of a dataset lie, as far as whole rows are wanted."""
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

    def __init__(self, tables: TableBuilder, layout: DatasetLayout) -> None:
        self._tables = tables
        self._layout = layout
        self._shapes: list[Shape] = []
        self._shape_numbers: dict[Any, int] = {}
        # By dataset: where its extents begin, how many, whether they are sparse.
        self._extents: dict[int, tuple[int, int, bool]] = {}
        self._chunks: list[DatasetLayout] = []
        self._num_extents = 0

    def build(self, leaves: Sequence[Leaf]) -> FieldTable:
        by_region: dict[Any, list[Leaf]] = {}
        for leaf in leaves:
            by_region.setdefault(region_key(leaf.region), []).append(leaf)
        layers = tuple(self._layer(several) for several in by_region.values())
        tables = [layout.chunks for layout in self._chunks if layout.chunks is not None]
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
                bool(self._layout.parts)
                and self._layout.has_gaps
                and (len(layers) != 1 or next(iter(by_region)) is not None)
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
        """Return shape, source, first extent or address, extents, and whether they are sparse."""
        layout = leaf.layout
        kind = Kind.LEFT
        if not leaf.is_left and _lie_within(leaf.runs, layout.num_samples):
            kind = self._tables.kind_of(layout)
        if kind == Kind.LEFT:
            return self._shape_number((Kind.LEFT,), lambda: Shape(Kind.LEFT)), -1, 0, 0, False
        source = self._tables.source_of(layout)
        shape = self._shape_of(leaf, kind)
        if layout.values is not None:
            return shape, source, 0, 0, False
        if layout.chunks is None:
            return shape, source, layout.offset, 0, False
        found = self._extents.get(id(layout))
        if found is None:
            table = layout.chunks
            found = self._num_extents, table.offset.size, table.index is not None
            self._extents[id(layout)] = found
            self._chunks.append(layout)
            self._num_extents += table.offset.size
        return shape, source, *found

    def _shape_of(self, leaf: Leaf, kind: Kind) -> int:
        layout = leaf.layout
        is_whole = leaf.source_region is None and leaf.region is None and leaf.member is None
        if not is_whole:
            kind = Kind.CHUNKS
        own = (
            layout.shape
            if layout.sample_axis or (kind == Kind.CHUNKS and not layout.chunk_shape)
            else layout.shape[1:]
        )
        key = (
            kind,
            own,
            layout.sample_axis,
            layout.chunk_shape,
            layout.dtype,  # a compound's members, too, may lie elsewhere
            layout.filters,
            region_key(leaf.region),
            region_key(leaf.source_region),
            leaf.member,
            layout.values is not None,
            layout.fill.tobytes(),
        )
        return self._shape_number(key, lambda: _shape(leaf, kind, self._layout, is_whole))

    def _shape_number(self, key: Any, make: Any) -> int:
        number = self._shape_numbers.get(key)
        if number is None:
            number = self._shape_numbers[key] = len(self._shapes)
            self._shapes.append(make())
        return number


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype)
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _without_gaps(
    first: Int64s, length: Int64s, columns: dict[str, NDArray[Any]], num_samples: int
) -> Layer:
    """Join segments that go on, and put segments without a source where samples are left out."""
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


# --- which dataset holds which samples ------------------------------------------------------------


def leaves_of(layout: DatasetLayout, max_rank: int = HDF5_MAX_RANK) -> Iterator[Leaf]:
    """Yield what each dataset holds of a field's samples.

    Raises
    ------
    TooManyRunsError
        If these are too many runs to be listed.
    """
    whole = PairedRuns.one(0, layout.num_samples, 0)
    if not layout.parts:
        if layout.num_samples:
            yield Leaf(layout, whole, None, None, None, False)
        return
    for part in layout.parts:
        runs = runs_between(part.samples, part.source_samples)
        if not runs.size:
            continue
        is_left = part.member is None and _swaps(part.source, layout) is None
        is_piece = not (part.region is None and part.source_region is None and part.member is None)
        if part.member is not None and not _can_take_member(part, layout, max_rank):
            is_left = True
        if is_left or not part.source.parts or is_piece:
            is_left = is_left or bool(part.source.parts)
            yield Leaf(part.source, runs, part.region, part.source_region, part.member, is_left)
            continue
        if part.source.has_gaps:  # whose fill value may be another one
            yield Leaf(part.source, runs, None, None, None, True)
            continue
        by_region: dict[Any, list[Leaf]] = {}
        for leaf in leaves_of(part.source, max_rank):
            by_region.setdefault(region_key(leaf.region), []).append(leaf)
        for leaves in by_region.values():
            yield from _composed(runs, leaves)


def _swaps(source: DatasetLayout, whole: DatasetLayout) -> int | None:
    """Return of how many bytes the numbers of a source are that have to be reversed; 0: none are.

    None: its values have to be converted otherwise.
    """
    stored, wanted = source.raw_dtype, whole.raw_dtype
    if stored == wanted:
        return 0
    nbytes = stored.itemsize // 2 if stored.kind == "c" else stored.itemsize
    is_number = stored.kind in "iufc" and nbytes in (2, 4, 8)
    return nbytes if is_number and stored.newbyteorder("S") == wanted else None


def _can_take_member(part: Part, layout: DatasetLayout, max_rank: int) -> bool:
    fields = part.source.dtype.fields
    if part.region is not None or part.source_region is not None:
        return False
    if fields is None or part.member is None:
        return False
    member = fields[part.member][0] if part.member in fields else None
    return (
        member is not None
        and len({element.tobytes() for element in _member_fill(part.source, part.member)}) == 1
        and member.base == layout.raw_dtype
        and (*part.source.row_shape, *member.shape) == layout.row_shape
        and len(part.source.shape) + len(member.shape) <= max_rank
    )


def _member_fill(layout: DatasetLayout, member: str) -> NDArray[Any]:
    """Return the fill value of a member of a compound: (elements,), of which an array has many."""
    return np.ascontiguousarray(layout.fill[member]).reshape(-1)


def _composed(outer: PairedRuns, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """Yield what datasets hold of the samples of outer runs, whose rows are the datasets' samples.

    No sample is in two of the datasets.
    """
    outer = outer.single_steps()
    inner = PairedRuns.joined([leaf.runs for leaf in leaves])
    leaf = np.repeat(np.arange(len(leaves)), [leaf.runs.size for leaf in leaves])
    order = np.argsort(inner.first, kind="stable")
    first, length, row, step = (column[order] for column in inner)
    last = first + length
    # Of each outer run, the inner runs that hold some of it: from `low` to before `high`.
    low = np.searchsorted(last, outer.row, side="right")
    high = np.searchsorted(first, outer.row + outer.length, side="left")
    count = np.maximum(high - low, 0)
    if count.sum() > MOST_RUNS:
        raise TooManyRunsError
    which = np.repeat(np.arange(outer.row.size), count)
    inside = np.arange(which.size) - np.repeat(np.cumsum(count) - count, count) + low[which]
    begin = np.maximum(outer.row[which], first[inside])
    end = np.minimum(outer.row[which] + outer.length[which], last[inside])
    found = PairedRuns(
        outer.first[which] + begin - outer.row[which],
        end - begin,
        row[inside] + (begin - first[inside]) * step[inside],
        step[inside],
    )
    owner = leaf[order][inside]
    by_owner = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[by_owner], np.arange(len(leaves) + 1))
    for number in np.flatnonzero(np.diff(edges)).tolist():
        here = by_owner[edges[number] : edges[number + 1]]
        runs = PairedRuns(*(column[here] for column in found))
        yield leaves[number]._replace(runs=runs)


def _lie_within(runs: PairedRuns, num_samples: int) -> bool:
    """Tell whether all rows are such that a dataset has."""
    last = runs.row + (runs.length - 1) * runs.step
    return bool((runs.row >= 0).all() and (last < num_samples).all() and (runs.step >= 1).all())


# --- how the pieces of rows lie -------------------------------------------------------------------


class Cells(NamedTuple):
    """What is wanted of one dimension of a source's rows, cut at the borders of its cells.

    Attributes
    ----------
    cell, begin, extent, done
        (cells,): which cell of the grid; first element that is wanted, from the dataset's edge
        on; how many; and how many of the dimension lie in the cells before.
    step
        Between elements that are wanted.
    total
        How many are wanted of the whole dimension.
    """

    cell: Int64s
    begin: Int64s
    extent: Int64s
    done: Int64s
    step: int
    total: int


def cells_of(size: int, cell_size: int, wanted: slice | None) -> Cells:
    """Cut what is wanted of a dimension (None: all of it) at the borders of its cells."""
    start, stop, step = (wanted or slice(None)).indices(size)
    count = len(range(start, stop, step))
    cells = np.arange(-(-size // max(1, cell_size)), dtype=np.int64)
    low = np.clip(-(-(cells * cell_size - start) // step), 0, count)
    high = np.clip(-(-((cells + 1) * cell_size - start) // step), 0, count)
    keep = high > low
    cells, low, high = cells[keep], low[keep], high[keep]
    return Cells(cells, start + low * step, high - low, low, step, count)


def _shape(leaf: Leaf, kind: Kind, whole: DatasetLayout, is_whole: bool) -> Shape:
    """Return how the rows of a dataset lie, and where their pieces go in rows of the batch."""
    layout, axis = leaf.layout, leaf.layout.sample_axis
    values_axis_first = layout.values is not None
    shape = layout.shape
    if values_axis_first:  # they were moved
        shape, axis = (shape[axis], *shape[:axis], *shape[axis + 1 :]), 0
    cell_shape = layout.piece_shape if not values_axis_first else shape
    chunk_shape = layout.chunk_shape or shape
    rest = [a for a in range(len(shape)) if a != axis]
    source_itemsize = layout.dtype.itemsize
    itemsize, offset, extra = source_itemsize, 0, ()
    if leaf.member is not None:
        fields = layout.dtype.fields
        assert fields is not None
        member, offset = fields[leaf.member][:2]
        itemsize, extra = member.base.itemsize, member.shape
    strides = np.cumprod((source_itemsize, *chunk_shape[:0:-1]), dtype=np.int64)[::-1]
    wanted = leaf.source_region or (None,) * len(rest)
    axes = [cells_of(shape[a], cell_shape[a], part) for a, part in zip(rest, wanted, strict=True)]
    row_strides, row_begin = _row_strides(whole, leaf.region, [a.total for a in axes], extra)
    if not rest:
        grid_index: list[Int64s] = []
        num_pieces = 1
    else:
        grids = np.meshgrid(*[np.arange(a.cell.size) for a in axes], indexing="ij")
        grid_index = [g.ravel() for g in grids]
        num_pieces = grid_index[0].size
    piece_begin = np.full(num_pieces, offset, np.int64)
    begins = np.full(num_pieces, row_begin, np.int64)
    numbers = np.zeros(num_pieces, np.int64)
    extents = np.zeros((num_pieces, len(rest) + len(extra)), np.int64)
    grid_strides = (
        np.cumprod((1, *layout.grid[:0:-1]), dtype=np.int64)[::-1] if layout.chunk_shape else None
    )
    for k, (a, one, index) in enumerate(zip(rest, axes, grid_index, strict=True)):
        inside = one.begin - (one.cell * cell_shape[a] if layout.chunk_shape else 0)
        piece_begin += inside[index] * int(strides[a])
        begins += one.done[index] * int(row_strides[k])
        extents[:, k] = one.extent[index]
        if grid_strides is not None:
            numbers += one.cell[index] * int(grid_strides[a])
    extra_strides = np.cumprod((itemsize, *extra[:0:-1]), dtype=np.int64)[::-1][: len(extra)]
    extents[:, len(rest) :] = extra
    chunk_strides = [int(strides[a]) * one.step for a, one in zip(rest, axes, strict=True)]
    row_nbytes = source_itemsize * math.prod(shape[a] for a in rest)
    rows_are_whole = is_whole and bool(layout.chunk_shape) and layout.rows_are_whole
    samples = chunk_shape[axis]
    return Shape(
        kind=kind,
        filters=layout.filters,
        chunk_nbytes=math.prod(chunk_shape) * source_itemsize,
        chunk_samples=samples,
        sample_stride=int(strides[axis]),
        itemsize=itemsize,
        chunk_strides=np.array([*chunk_strides, *extra_strides], np.int64),
        row_strides=np.array(row_strides, np.int64),
        extents=extents,
        row_begin=begins,
        piece_begin=piece_begin,
        cross_number=numbers,
        number_stride=int(grid_strides[axis]) if grid_strides is not None else 1,
        rows_are_whole=rows_are_whole,
        source_row_nbytes=row_nbytes,
        keeps=bool(layout.filters) and not (is_whole and samples == 1),
        has_chunks=bool(layout.chunk_shape),
        fill=_fill_of(leaf),
        swaps=0 if leaf.member is not None else _swaps(layout, whole) or 0,
    )


def _fill_of(leaf: Leaf) -> NDArray[np.uint8]:
    fill = leaf.layout.raw_fill.reshape(1)
    if leaf.member is not None:
        fill = _member_fill(leaf.layout, leaf.member)[:1]
    return np.frombuffer(fill.tobytes(), np.uint8)


def _row_strides(
    whole: DatasetLayout, region: Region, counts: Sequence[int], extra: Sequence[int]
) -> tuple[list[int], int]:
    """Return how far apart elements are in a row of the batch, by dimension of the source's rows.

    And the first byte. Dimensions of the two agree in their order, but for those of extent 1.
    """
    row_shape = whole.row_shape
    strides = np.cumprod((whole.dtype.itemsize, *row_shape[:0:-1]), dtype=np.int64)[::-1]
    strides = strides[: len(row_shape)]
    region = region or (slice(None),) * len(row_shape)
    begin, ours = 0, []
    for size, stride, piece in zip(row_shape, strides.tolist(), region, strict=True):
        start, stop, step = piece.indices(size)
        begin += start * stride
        count = len(range(start, stop, step))
        if count != 1:
            ours.append((count, stride * step))
    theirs = [*counts, *extra]
    found, at = [], 0
    for count in theirs:
        if count == 1:
            found.append(0)
            continue
        assert ours[at][0] == count
        found.append(ours[at][1])
        at += 1
    return found, begin
