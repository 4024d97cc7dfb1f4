"""Declares what the header of a saved index says, and checks its tables.

JSON and arrays may say anything: what is not as declared here is a `ValueError`, `TypeError`,
`KeyError` or `IndexError`. Tables are checked on whole arrays, as is done for HDF5's index: chunks
must lie in the file as it was indexed, after its superblock, without overlap, and within the grid;
those without filters have the length of a chunk. Segments must lie in their datasets. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetPydanticSchema,
    PlainValidator,
    StrictBool,
    StrictInt,
)
from pydantic import Field as Bound
from pydantic_core.core_schema import no_info_after_validator_function

from h5async.codec.filters import Filter
from h5async.index.chunktable import ChunkTable, grid_of
from h5async.index.datasettable import Columns
from h5async.index.layout import CfAttribute, DatasetLayout, Indexed, Storage, Text
from h5async.index.segments import Int64s, Piece, Segments
from h5async.io.source import FileStamp

LARGEST = (1 << 62) - 1  # of bytes, chunks, samples, or a position
_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # per dataset from which copying arrays to check several at once does not pay
_MOST_DIMENSIONS = 64  # of HDF5, 32, and those of array types
_MOST_NESTED = 32  # compound types in compound types


class NotPortableError(Exception):
    """Something has no form that another process could read."""


class SavedIndexError(Exception):
    """A saved index cannot be used; the message says why."""


# --- the header ----------------------------------------------------------------------------------


def to_json(value: object) -> object:
    """Return a JSON value for what JSON lacks, as `json.dumps` asks for it.

    NotPortableError for a dtype of objects.
    """
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if not isinstance(value, np.dtype) or value.hasobject:
        raise NotPortableError(f"{type(value).__name__} {value}")
    kind: object = value.str
    if value.subdtype is not None:
        kind = value.subdtype
    elif value.fields is not None:
        members = [value.fields[name] for name in value.names or ()]
        kind = {
            "names": value.names,
            "formats": [member[0] for member in members],
            "offsets": [member[1] for member in members],
            "itemsize": value.itemsize,
        }
    return kind, None if value.metadata is None else dict(value.metadata)


def _dtype(found: Any, *, depth: int = 0) -> np.dtype[Any]:
    """Return the dtype that `to_json` described."""
    if depth > _MOST_NESTED:
        raise ValueError("types are nested too deep")
    kind, metadata = found
    if isinstance(kind, list):
        base, shape = kind
        kind = _dtype(base, depth=depth + 1), tuple(shape)
    elif isinstance(kind, dict):
        kind = {**kind, "formats": [_dtype(one, depth=depth + 1) for one in kind["formats"]]}
    elif type(kind) is not str:
        raise TypeError(f"{kind!r} is no dtype")
    dtype: np.dtype[Any] = np.dtype(kind) if metadata is None else np.dtype(kind, metadata=metadata)
    if dtype.hasobject:
        raise ValueError("a dtype of objects")
    return dtype


def _of(arguments: object) -> GetPydanticSchema:
    """Say of what types the arguments of a class are, which are a list in JSON."""
    return GetPydanticSchema(
        lambda source, handler: no_info_after_validator_function(
            lambda found: source(*found), handler.generate_schema(arguments)
        )
    )


def _require_whole(found: CfAttribute) -> CfAttribute:
    dtype = np.dtype(found.dtype or "u1")
    if dtype.kind not in "iuf" or len(found.data) % dtype.itemsize:
        raise ValueError(f"an attribute {found.name} is not of {found.dtype}")
    return found


Natural = Annotated[int, Bound(strict=True, ge=0, le=LARGEST)]
Naturals = tuple[Natural, ...]
Positive = Annotated[Natural, Bound(ge=1)]
Place = tuple[Natural, Natural]  # among the arrays of its name: where it begins, and its length
DType = Annotated[np.dtype[Any], PlainValidator(_dtype)]
Bytes = Annotated[bytes, PlainValidator(bytes.fromhex)]
# (-1 is `filters.CONVERSION`.)
SavedFilter = Annotated[Filter, _of(tuple[Literal[-1] | Natural, Naturals, str])]
SavedText = Annotated[Text, _of(tuple[Natural, Natural, StrictBool])]
SavedAttribute = Annotated[CfAttribute, _of(tuple[str, str, Bytes]), AfterValidator(_require_whole)]
SavedRegion = tuple[Annotated[slice, _of(tuple[Natural, Natural, Positive | None])], ...] | None
SavedPiece = Annotated[Piece, _of(tuple[SavedRegion, SavedRegion, str | None])]


class _Saved(BaseModel):
    # Most readers need none of these.
    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, defer_build=True)


class SavedSegments(_Saved):
    """Segments: the places of their columns; and of their datasets, the first and the number."""

    columns: tuple[Place, Place, Place, Place, Place, Place]
    pieces: tuple[SavedPiece, ...]
    even: tuple[tuple[Natural, Natural, Natural], ...]
    kept_nbytes: Natural
    datasets: Place


class SavedHeap(_Saved):
    """Variable-length elements of a file: as in `HeapFile`, and how they are stored."""

    file: Natural
    first_sample: Natural
    place: Place
    where: str  # without the name of the file before it
    dtype: DType
    is_text: StrictBool
    is_ascii: StrictBool
    base: Natural
    address_nbytes: Literal[4, 8]
    size_nbytes: Literal[4, 8]


class OwnFacts(_Saved):
    """Facts that a dataset shares with no other, as in `DatasetLayout`."""

    indexed_shape: Naturals | None = None  # if it cannot be told from the shape
    values: Place | None = None
    attached: Naturals = ()
    sources: Naturals = ()
    spans: Place | None = None
    sequences: Place | None = None
    lengths: Place | None = None
    heaps: tuple[SavedHeap, ...] = ()
    segments: SavedSegments | None = None


class SavedKind(_Saved):
    """What datasets of a kind have in common, as in `DatasetLayout`.

    Of `indexed`, this is the digest, and whether one sample was made of the dataset.
    """

    dtype: DType
    shape: Annotated[Naturals, Bound(max_length=_MOST_DIMENSIONS)]
    sample_axis: Natural
    storage: Storage
    fallback_reason: str | None
    fill: Bytes
    chunk_shape: tuple[Positive, ...]
    has_chunks: StrictBool
    filters: tuple[SavedFilter, ...]
    member: tuple[str, ...]
    stored_itemsize: Natural
    has_raw_edges: StrictBool
    extra_dims: Natural
    text: tuple[SavedText, ...]
    unused_rows: Natural
    indexed: tuple[Bytes, StrictBool] | None
    dim_names: tuple[tuple[str, ...], ...]
    cf: tuple[tuple[Natural, tuple[SavedAttribute, ...]], ...]

    def layout(self) -> DatasetLayout:
        """Return the layout of such a dataset, without facts of its own, which makes sense."""
        dtype, shape, axis = self.dtype, self.shape, self.sample_axis
        if axis >= len(shape) or self.extra_dims >= len(shape):
            raise ValueError("a dataset has too few dimensions")
        if self.chunk_shape and len(self.chunk_shape) != len(shape):
            raise ValueError("chunks have another rank than their dataset")
        if self.has_chunks and not self.chunk_shape:
            raise ValueError("chunks have no shape")
        if len(self.fill) != dtype.itemsize:
            raise ValueError("a fill value has another size than its dtype")
        if any(one.offset + one.nbytes > dtype.itemsize for one in self.text):
            raise ValueError("a string lies outside its element")
        members, indexed = self.__dict__, None
        if self.indexed is not None:
            digest, is_one_sample = self.indexed
            indexed = Indexed(digest, shape[is_one_sample : len(shape) - self.extra_dims])
        return _ANY.changed(
            shape=shape,
            fill=np.frombuffer(self.fill, dtype).reshape(()) if self.fill else np.zeros((), dtype),
            chunks=ChunkTable.joined([]) if self.has_chunks else None,
            indexed=indexed,
            **{name: members[name] for name in SHARED},
        )


# Members that it has as a `DatasetLayout` has them.
SHARED = SavedKind.model_fields.keys() - {"shape", "fill", "has_chunks", "indexed"}
_ANY = DatasetLayout("", FileStamp(0, 0), "", (), np.dtype("u1"), 0, "chunked", None, np.zeros(()))


_Axes = StrictInt | str | tuple[StrictInt | str, ...]


class SavedHeader(_Saved):
    """What a saved index says beside its arrays; files are named by their numbers in `files`.

    Attributes
    ----------
    files
        Names, and what their stamps consist of.
    paths, kinds, own
        Of datasets; `OwnFacts` by the number of the dataset.
    key
        Identifies the content, for a cache.
    primary
        The indexed files, in order; by their number here, `needs` are the other files that one
        depends on, and `absent` the paths at which nothing was.
    wanted
        As in `Wanted`.
    at_opening
        The files whose change would not be noticed when rows are read.
    variables, folder
        As in `Consulted`.
    allow_missing
        Whether virtual datasets may lack sources.
    """

    files: tuple[tuple[str, StrictInt, StrictInt, StrictInt, StrictInt, StrictInt], ...]
    paths: tuple[str, ...]
    kinds: tuple[SavedKind, ...]
    own: dict[int, Any]
    key: str
    primary: Naturals
    wanted: tuple[tuple[str, _Axes, StrictBool, StrictBool, str, str], ...]
    needs: dict[int, Naturals]
    absent: dict[int, tuple[str, ...]]
    at_opening: Naturals
    variables: dict[str, str]
    folder: str | None
    allow_missing: StrictBool


# --- tables --------------------------------------------------------------------------------------


def require_sound(columns: Columns, kinds: Sequence[DatasetLayout]) -> None:
    """Check a table of datasets of some kinds.

    ValueError if it makes no sense; SavedIndexError if chunks cannot lie at their positions.
    """
    _require_below(columns.kind, len(kinds), "kind")
    _require_below(columns.file, len(columns.files), "file")
    rows, chunks, begin = columns.rows, columns.chunks, columns.begin
    limits = np.array([_limits(kind) for kind in kinds], np.int64).reshape(-1, 5).T
    row_nbytes, is_direct, chunk_rows, cross, expected = limits[:, columns.kind]
    if (rows < 0).any() or (columns.offset < -1).any() or (columns.stored_nbytes < 0).any():
        raise ValueError("a dataset has a negative size")
    if (rows > LARGEST).any():
        raise ValueError("a dataset has more rows than can be counted")
    end = np.array([stamp.nbytes for _, stamp in columns.files], np.int64)[columns.file]
    is_there = (is_direct != 0) & (chunk_rows == 0) & (columns.offset >= 0)
    if (rows > (end - columns.offset) // np.maximum(1, row_nbytes))[is_there].any():
        raise ValueError("values lie beyond the end of their file")
    count = np.diff(begin)
    if begin[0] or (count < 0).any() or begin[-1] != chunks.offset.size:
        raise ValueError("chunk tables do not lie one after the other")
    if ((count > 0) & (chunk_rows == 0)).any():
        raise ValueError("a dataset without chunks has a chunk table")
    along = -(-rows // np.maximum(1, chunk_rows))
    grid = np.where(along > LARGEST // np.maximum(1, cross), LARGEST, along * cross)
    has_table = chunk_rows > 0
    if ((count != grid) & has_table & ~columns.is_sparse).any():
        raise SavedIndexError("a chunk table does not fit its dataset")
    is_large = count >= _MANY_CHUNKS
    is_first = is_large | np.append(True, is_large[:-1])  # large ones alone, others together
    for some in np.split(np.arange(count.size), np.flatnonzero(is_first)[1:]):
        which = some[count[some] > 0]
        if which.size:
            part = columns.part(int(which[0]), int(which[-1] - which[0] + 1))
            at = slice(which[0], which[-1] + 1)
            _require_places(part, end[at], grid[at], expected[at])


def _limits(kind: DatasetLayout) -> tuple[int, bool, int, int, int]:
    """Return what a kind of datasets permits.

    These are the bytes of a row; whether values without chunks lie at an offset; the rows of a
    chunk, 0 without chunks; the number of chunks that hold pieces of a row; and the bytes of a
    chunk, -1 for any size.
    """
    shape, axis, chunk_shape = kind.shape, kind.sample_axis, kind.chunk_shape
    grid = grid_of(shape, chunk_shape) if chunk_shape else ()
    cross = math.prod(n for at, n in enumerate(grid) if at != axis)
    row_nbytes, chunk_nbytes = kind.row_nbytes, kind.chunk_nbytes
    rows = chunk_shape[axis] if kind.chunks is not None else 0
    if max(row_nbytes, cross, chunk_nbytes, rows) > LARGEST:
        row_nbytes = cross = LARGEST  # anything with chunks or an offset is too large
    is_direct = kind.fallback_reason is None and not chunk_shape and kind.storage != "files"
    return row_nbytes, is_direct, min(rows, LARGEST), cross, -1 if kind.filters else chunk_nbytes


def _require_places(columns: Columns, end: Int64s, grid: Int64s, expected: Int64s) -> None:
    """Check the chunks of some datasets that follow each other; of one without copying."""
    count, chunks = np.diff(columns.begin), columns.chunks
    offset, nbytes, index = chunks.offset, chunks.nbytes, chunks.index
    if count.size > 1:
        end, grid, expected = (np.repeat(limit, count) for limit in (end, grid, expected))
    if ((offset < _SUPERBLOCK_NBYTES) | (nbytes < 0) | (nbytes > end)).any():
        raise SavedIndexError("a chunk lies nowhere")
    if (offset > end - nbytes).any():
        raise SavedIndexError("a chunk lies beyond the end of its file")
    if np.where(expected < 0, nbytes == 0, nbytes != expected).any():
        raise SavedIndexError("a chunk has a wrong length")
    is_next = np.ones(offset.size, np.bool_)  # to the chunk before, of the same table
    is_next[columns.begin[:-1][count > 0]] = False
    if index is not None:
        is_outside = (index < 0) | (index >= grid) | (is_next & (np.diff(index, prepend=-1) <= 0))
        if (is_outside & np.repeat(columns.is_sparse, count)).any():
            raise SavedIndexError("a chunk lies outside its grid")
    if not (offset[1:] < offset[:-1] + nbytes[:-1])[is_next[1:]].any():
        return
    if count.size == 1 and not any(nbytes.strides):
        overlaps = np.diff(np.sort(offset)) < nbytes[0]
    else:  # those that do not lie in the order of the grid
        table = np.repeat(np.arange(count.size), count)
        order = np.lexsort((offset, table))
        table, offset, nbytes = table[order], offset[order], nbytes[order]
        overlaps = (offset[1:] < offset[:-1] + nbytes[:-1]) & (table[1:] == table[:-1])
    if overlaps.any():
        raise SavedIndexError("a chunk overlaps another one")


def require_sound_segments(segments: Segments, rows: Int64s, num_samples: int) -> None:
    """Raise ValueError unless segments lie in datasets of some `rows`, and do not overlap."""
    first, length, row, step = segments.first, segments.length, segments.row, segments.step
    _require_below(segments.dataset, rows.size, "dataset")
    _require_below(segments.piece, len(segments.pieces), "piece")
    if (first < 0).any() or (length < 1).any() or (row < 0).any() or (step < 1).any():
        raise ValueError("a segment has a negative size")
    if (length > num_samples).any() or (first > num_samples - length).any():
        raise ValueError("a segment lies outside its dataset")
    limit = rows[segments.dataset]
    if (row >= limit).any() or (step > np.maximum(1, limit))[length > 1].any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (length - 1 > (limit - 1 - row) // step).any():
        raise ValueError("a segment lies outside the dataset that holds it")
    if (first[1:] < first[:-1]).any():
        raise ValueError("segments are not in order")
    if any((layer.end[:-1] > layer.first[1:]).any() for _, layer in segments.layers):
        raise ValueError("segments overlap")
    if any(not 0 <= begin <= end <= num_samples or size < 0 for begin, end, size in segments.even):
        raise ValueError("units lie outside their dataset")


def _require_below(column: NDArray[np.int32], limit: int, what: str) -> None:
    if ((column < 0) | (column >= limit)).any():
        raise ValueError(f"a {what} is named that is not there")
