"""Writes and reads the file of a saved index: a header as JSON, and arrays that are mapped.

The file begins with a fixed head: a signature, the format number, the lengths of the header and of
the file, and a checksum of everything before the arrays. The header has a checksum of the arrays.
Numbers are little-endian. The content of the header is declared here; `savedlayouts.py` defines the
meaning of the arrays. The JSON is not trusted: anything that is not as declared raises a
`ValueError`, `TypeError`, `KeyError` or `IndexError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

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
from h5async.config.files import FileName
from h5async.index.layout import CfAttribute, DatasetLayout, Indexed, Storage, Text
from h5async.index.tables import ChunkTable, Piece
from h5async.io.shared import forget_pages, map_file
from h5async.io.source import FileStamp, open_regular, owned
from h5async.io.stores import store_of
from h5async.system.interruptions import suppressing

# Change it with the content, and if the same file would be indexed differently: files with another
# number are not read.
FORMAT = 7
_SIGNATURE = b"\x89h5async\r\n\x1a\n"
_DIGEST_NBYTES = 16
_HEAD = struct.Struct(f"<12sIQQ{_DIGEST_NBYTES}s")
_ALIGNMENT = 64
_PIECE_NBYTES = 1 << 22
_LEFT_SECONDS = 3600  # after which an unfinished file is removed

LARGEST = (1 << 62) - 1  # number of bytes, chunks or samples, or position
_MOST_DIMENSIONS = 64  # 32 of a dataspace, and those of array types
_MOST_NESTED = 32  # compound types in compound types

Arrays = Mapping[str, NDArray[Any]]


class NotPortableError(Exception):
    """Something cannot be saved in a form that another process could read."""


class SavedIndexError(Exception):
    """A saved index cannot be used; the message says why."""


class SavedFile(NamedTuple):
    """The content of a saved index: its JSON header, and read-only arrays, mapped if permitted.

    Call `forget` with an array, or a part of one, that is unlikely to be used again.
    """

    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    forget: Callable[[NDArray[Any]], None] = lambda array: None


def write_saved(
    path: Path,
    header: Mapping[str, Any],
    arrays: Mapping[str, Sequence[NDArray[Any]]],
    *,
    mode: int,
    is_lasting: bool = True,
) -> None:
    """Write a saved index atomically: an existing file is replaced at once, or stays.

    Arrays of one name have one dtype, and are concatenated. `mode` are the permissions of the file,
    before the umask of the process. If it `is_lasting`, this waits until the disk has it; otherwise
    a power failure may damage it.

    OSError if it cannot be written: no partial file remains. NotPortableError if `to_json` cannot
    convert a value.
    """
    blocks, places, begin = [], {}, 0
    for name, several in arrays.items():
        dtype = several[0].dtype
        nbytes = sum(array.nbytes for array in several)
        places[name] = [dtype.newbyteorder("<").str, begin, nbytes // dtype.itemsize]
        blocks += [_little(array) for array in several]
        blocks.append(np.zeros(-nbytes % _ALIGNMENT, np.uint8))
        begin += nbytes + (-nbytes % _ALIGNMENT)
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block.data, checksum)
    whole_header = {**header, "arrays": places, "checksum": checksum}
    text = json.dumps(whole_header, separators=(",", ":"), default=to_json).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNMENT)
    whole = _HEAD.size + len(text) + begin
    head = _HEAD.pack(_SIGNATURE, FORMAT, len(text), whole, b"")
    head = _HEAD.pack(_SIGNATURE, FORMAT, len(text), whole, _digest(head, text))
    _replace(path, [head, text, *blocks], mode, is_lasting)


def _little(array: NDArray[Any]) -> NDArray[np.uint8]:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


def _digest(head: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(head[:-_DIGEST_NBYTES] + text, digest_size=_DIGEST_NBYTES).digest()


def _replace(path: Path, blocks: Iterable[Any], mode: int, is_lasting: bool) -> None:
    remove_unfinished(path.parent, re.escape(path.name))
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with owned(os.open, str(beside), flags, mode) as file:
            for block in blocks:
                data = memoryview(block).cast("B")
                while len(data):
                    data = data[os.write(file.fileno(), data) :]
            if is_lasting:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppressing(OSError):
            os.unlink(beside)
        raise


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove files that a killed writer began long ago.

    Only saved indices whose names match the regular expression `names` are removed.
    """
    begun = re.compile(rf"\.{names}\.[0-9a-f]{{16}}\.tmp")
    with suppressing(OSError):
        for entry in os.scandir(folder):
            if not begun.fullmatch(entry.name):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_SECONDS:
                os.unlink(entry.path)


def is_saved_index(path: Path) -> bool:
    """Return whether a file begins like a saved index, whatever else is in it."""
    with suppressing(OSError), open_regular(path) as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE
    return False


def read_saved(path: FileName, *, owners: Sequence[int], may_map: bool) -> SavedFile:
    """Read a saved index, and check that it is unchanged since it was written.

    Local files of `owners` are trusted. Arrays are read into memory, unless they may be mapped.

    SavedIndexError if it is damaged, of another format, or may have been written by others; OSError
    if it cannot be opened or read.
    """
    if not store_of(path).is_local:
        return SavedFile(*_content(np.frombuffer(_fetched(str(path)), np.uint8)))
    with open_regular(Path(path)) as file:
        status = os.fstat(file.fileno())
        _require_ours(status, owners)
        if status.st_size < _HEAD.size:
            raise SavedIndexError(f"it has {status.st_size} bytes, too few for a saved index")
        if not may_map:
            read = file.read()
            if len(read) != status.st_size:
                raise SavedIndexError("it was cut short while it was read")
            return SavedFile(*_content(np.frombuffer(read, np.uint8)))
        data = map_file(file.fileno(), status.st_size)
    content = _content(data)
    forget_pages(data)  # all of it was read for the checksum
    return SavedFile(*content, forget_pages)


def _fetched(name: str) -> bytes:
    """Return all bytes of a source, fetched side by side, if it begins like a saved index."""
    with closing(store_of(name).open(name)) as source:
        if source.read(0, len(_SIGNATURE)) != _SIGNATURE:
            raise SavedIndexError("it is not a saved index")
        nbytes = source.stamp().nbytes
        offsets = range(0, nbytes, _PIECE_NBYTES)
        lengths = [min(_PIECE_NBYTES, nbytes - offset) for offset in offsets]
        return b"".join(source.get_ranges(offsets, lengths))


def _require_ours(status: os.stat_result, owners: Sequence[int]) -> None:
    if status.st_uid not in owners:
        raise SavedIndexError(
            f"it belongs to another user ({status.st_uid}), who could make it refer to any file;"
            " make your own (h5async index)"
        )
    if status.st_mode & stat.S_IWOTH:
        raise SavedIndexError("every user may write to it; remove that permission (chmod o-w)")


def _content(data: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    head = data[: _HEAD.size].tobytes()
    signature, number, text_nbytes, nbytes, digest = _HEAD.unpack(head)
    if signature != _SIGNATURE:
        raise SavedIndexError("it is not a saved index")
    if number != FORMAT:
        raise SavedIndexError(f"it has format {number}, and this version reads format {FORMAT}")
    if nbytes != data.size or text_nbytes > data.size - _HEAD.size:
        raise SavedIndexError(f"expected {nbytes} bytes, got {data.size}: it is damaged")
    begin = _HEAD.size + text_nbytes
    text = data[_HEAD.size : begin].tobytes()
    if _digest(head, text) != digest:
        raise SavedIndexError("its header is damaged: the checksum differs")
    try:
        header = json.loads(text)
        places, checksum = header["arrays"], header["checksum"]
        if zlib.crc32(data[begin:].data) != checksum:
            raise SavedIndexError("its arrays are damaged: the checksum differs")
        arrays = {name: _array(data[begin:], *place) for name, place in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SavedIndexError(f"its header is damaged ({error!r})") from error
    return header, arrays


def _array(data: NDArray[np.uint8], dtype: str, begin: int, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in "iu" or begin < 0 or count < 0 or begin % kind.itemsize:
        raise ValueError("an array has no valid place")
    found = data[begin : begin + count * kind.itemsize]
    if found.size != count * kind.itemsize:
        raise ValueError("an array lies outside the file")
    return found.view(kind)


# --- the header ----------------------------------------------------------------------------------


def to_json(value: object) -> object:
    """Convert a value of a type that JSON lacks, as the `default` of `json.dumps`.

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
        raise TypeError(f"{kind!r} is not a dtype")
    dtype: np.dtype[Any] = np.dtype(kind) if metadata is None else np.dtype(kind, metadata=metadata)
    if dtype.hasobject:
        raise ValueError("a dtype of objects")
    return dtype


def _of(arguments: object) -> GetPydanticSchema:
    """Declare the types of a class's arguments, which are a list in JSON."""
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
Place = tuple[Natural, Natural]  # begin and length, within the concatenated arrays of a name
DType = Annotated[np.dtype[Any], PlainValidator(_dtype)]
Bytes = Annotated[bytes, PlainValidator(bytes.fromhex)]
# (-1 is `filters.CONVERSION`.)
SavedFilter = Annotated[Filter, _of(tuple[Literal[-1] | Natural, Naturals, str])]
SavedText = Annotated[Text, _of(tuple[Natural, Natural, StrictBool])]
SavedAttribute = Annotated[CfAttribute, _of(tuple[str, str, Bytes]), AfterValidator(_require_whole)]
SavedRegion = tuple[Annotated[slice, _of(tuple[Natural, Natural, Positive | None])], ...] | None
SavedPiece = Annotated[Piece, _of(tuple[SavedRegion, SavedRegion, str | None])]


class _Saved(BaseModel):
    # (`defer_build`, because most readers need none of these.)
    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, defer_build=True)


class SavedSegments(_Saved):
    """Segments: the places of their columns, and the first and the number of their datasets."""

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
    where: str  # without the file name that precedes it
    dtype: DType
    is_text: StrictBool
    is_ascii: StrictBool
    base: Natural
    address_nbytes: Literal[4, 8]
    size_nbytes: Literal[4, 8]


class OwnFacts(_Saved):
    """Facts that a dataset shares with no other, as in `DatasetLayout`."""

    indexed_shape: Naturals | None = None  # if it cannot be derived from the shape
    values: Place | None = None
    attached: Naturals = ()
    sources: Naturals = ()
    spans: Place | None = None
    sequences: Place | None = None
    lengths: Place | None = None
    heaps: tuple[SavedHeap, ...] = ()
    segments: SavedSegments | None = None


class SavedKind(_Saved):
    """The facts that datasets of a kind have in common, as in `DatasetLayout`.

    `indexed` is only the digest, and whether the dataset was made one sample.
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
        """Return the layout of such a dataset, without its own facts; ValueError if invalid."""
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


# Attributes that are the same in a `DatasetLayout`.
SHARED = SavedKind.model_fields.keys() - {"shape", "fill", "has_chunks", "indexed"}
_ANY = DatasetLayout("", FileStamp(0, 0), "", (), np.dtype("u1"), 0, "chunked", None, np.zeros(()))


_Axes = StrictInt | str | tuple[StrictInt | str, ...]


class SavedHeader(_Saved):
    """The header of a saved index; it refers to files by their numbers in `files`.

    Attributes
    ----------
    files
        Names, and the fields of their stamps.
    paths, kinds, own
        Of datasets; `OwnFacts` by the number of the dataset.
    key
        Identifies the content, for a cache.
    primary
        The indexed files, in order. By the index into this, `needs` are the other files that a file
        depends on, and `absent` the paths where nothing was found.
    wanted
        As in `Wanted`.
    at_opening
        The files whose changes would not be noticed when rows are read.
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
