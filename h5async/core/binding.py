"""Filters and a dataset's layout enter; the structures of the compiled core leave, if it can.

`src/core.c` executes slices of a read plan without the GIL. It is a plain shared library, called by
ctypes: built with the package where a C compiler is there, and left out where not; `execute.py`
does the same in Python then. The environment variable ``H5ASYNC_CORE`` names another build of it,
and ``H5ASYNC_CORE=0`` does without.

The core calls libdeflate, zstd, lz4 and c-blosc by their public C interfaces. These are the very
libraries that imagecodecs brings along, or else those of the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import importlib
import os
import sys
import time
import weakref
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.bitshuffle import bitshuffle_codec, bitshuffle_decoder
from h5async.codec.filters import (
    BITSHUFFLE,
    BLOSC,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    Filter,
    decoder,
    pass_on,
)
from h5async.errors import ConfigError
from h5async.io.storage import IoMode
from h5async.stats import ThreadCounts
from h5async.system.interruptions import suppressing

_ABI = 6
MAX_FILTERS, MAX_RANK = 32, 32  # what HDF5 has at most

IO_MODES = {"auto": 0, "pread": 1, "map": 2}

KINDS = {DEFLATE: 1, SHUFFLE: 2, FLETCHER32: 3, LZF: 4, ZSTD: 5, LZ4: 6, BLOSC: 7}
BITSHUFFLE_KINDS = {0: 8, 2: 9, 3: 10}  # by the codec of its blocks
NOTHING = 11

# Functions by library, in the order of the structure in src/core.c.
_FUNCTIONS = {
    "libdeflate_alloc_decompressor": "deflate",
    "libdeflate_free_decompressor": "deflate",
    "libdeflate_zlib_decompress": "deflate",
    "ZSTD_createDCtx": "zstd",
    "ZSTD_freeDCtx": "zstd",
    "ZSTD_decompressDCtx": "zstd",
    "ZSTD_isError": "zstd",
    "LZ4_decompress_safe": "lz4",
    "blosc_decompress_ctx": "blosc",
}
_LIBRARY_OF_KIND = {1: "deflate", 5: "zstd", 6: "lz4", 7: "blosc", 9: "lz4", 10: "zstd"}


class _Libraries(Structure):
    _fields_ = [(name, c_void_p) for name in _FUNCTIONS]


class _Worker(Structure):
    _fields_ = [
        ("libraries", POINTER(_Libraries)),
        ("encoded", c_void_p),
        ("chunk", c_void_p),
        ("between", c_void_p * 3),
        ("encoded_nbytes", c_int64),
        ("chunk_nbytes", c_int64),
        ("between_nbytes", c_int64),
        ("deflate", c_void_p),
        ("zstd", c_void_p),
        ("read_ns", c_int64),
        ("decode_ns", c_int64),
        ("place_ns", c_int64),
        ("read_nbytes", c_int64),
        ("decoded_chunks", c_int64),
        ("returned_ns", c_int64),
        ("stop", POINTER(c_int32)),
    ]


class FileStruct(Structure):
    """An open file, its map, and its `FileStamp`; `event` is what a call of the core says of it."""

    _fields_ = [
        ("fd", c_int32),
        ("io", c_int32),
        ("map", c_void_p),
        ("map_nbytes", c_int64),
        ("device", c_int64),
        ("inode", c_int64),
        ("nbytes", c_int64),
        ("modified_ns", c_int64),
        ("changed_ns", c_int64),
        ("event", c_int64),
        ("path", c_void_p),
    ]


class Event(IntEnum):
    """What kept a call from its work, or makes it worthless."""

    NONE = 0
    CHANGED = 1  # the file is not what was indexed
    FAULTED = 2  # a page of the map cannot be had
    STOPPED = 3  # the reader is being closed


class _Filter(Structure):
    _fields_ = [("kind", c_int32), ("element", c_int32), ("block", c_int64)]


class DatasetStruct(Structure):
    """Where the chunks of a dataset lie, how they are encoded, and where their pieces go."""

    _fields_ = [
        ("filters", POINTER(_Filter)),
        ("chunk_offset", c_void_p),
        ("chunk_stored", c_void_p),
        ("chunk_mask", c_void_p),
        ("chunk_strides", c_void_p),
        ("row_strides", c_void_p),
        ("extents", c_void_p),
        ("row_begin", c_void_p),
        ("piece_begin", c_void_p),
        ("fill", c_void_p),
        ("num_filters", c_int64),
        ("num_chunks", c_int64),
        ("num_cross", c_int64),
        ("rank", c_int64),
        ("chunk_nbytes", c_int64),
        ("chunk_samples", c_int64),
        ("sample_stride", c_int64),
        ("itemsize", c_int64),
        ("row_nbytes", c_int64),
        ("rows_are_whole", c_int64),
        ("begin", c_int64),
    ]


class ChunkPlanStruct(Structure):
    """A `ChunkPlan`."""

    _fields_ = [
        ("place", c_void_p),
        ("cross", c_void_p),
        ("group", c_void_p),
        ("run_start", c_void_p),
        ("run_local", c_void_p),
        ("run_position", c_void_p),
        ("run_length", c_void_p),
        ("num_items", c_int64),
        ("num_groups", c_int64),
        ("num_runs", c_int64),
    ]


class RowsStruct(Structure):
    """Rows of a `RowPlan`, and the batch."""

    _fields_ = [
        ("offset", c_void_p),
        ("position", c_void_p),
        ("num_items", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("row_nbytes", c_int64),
        ("fill", c_void_p),
        ("itemsize", c_int64),
    ]


class TransformStruct(Structure):
    """How samples of (points, channels) become (channels, points)."""

    _fields_ = [
        ("samples", c_int64),
        ("points", c_int64),
        ("channels", c_int64),
        ("source", c_int32),
        ("is_float", c_int32),
        ("scale", c_void_p),
        ("offset", c_void_p),
    ]


class FramesStruct(Structure):
    """Stored chunks, and the blocks into which they are cut; see `Core.cut_frames`.

    The caller sets all but the last two, and owns the arrays: int64 but for `source_nbytes` and
    `target_nbytes` (uint64) and `adler` (uint32).

    Attributes
    ----------
    base, base_nbytes
        Memory in which the stored chunks lie.
    position, nbytes
        (`count`,): where in it, and how long.
    kind, element, block_nbytes, has_checksum
        How a chunk is framed: a `FrameFormat`.
    due_nbytes
        Of a chunk, with the frame undone.
    pitch
        Chunk k goes to byte k * `pitch` of the output; at least `due_nbytes`.
    source, source_nbytes, target, target_nbytes
        (`max_tasks`,): of each block, where it lies, from `base` on, and where it goes.
    copy_source, copy_target, copy_nbytes
        (`max_copies`,): the same of bytes that are not compressed.
    adler
        (`count`,): DEFLATE: the Adler-32 that a decoded chunk has to have; else None.
    num_tasks, num_copies
        How many there are, all of chunks that were cut.
    """

    _fields_ = [
        ("base", c_void_p),
        ("position", c_void_p),
        ("nbytes", c_void_p),
        ("base_nbytes", c_int64),
        ("count", c_int64),
        ("kind", c_int32),
        ("has_checksum", c_int32),
        ("element", c_int64),
        ("block_nbytes", c_int64),
        ("due_nbytes", c_int64),
        ("pitch", c_int64),
        ("source", c_void_p),
        ("source_nbytes", c_void_p),
        ("target", c_void_p),
        ("target_nbytes", c_void_p),
        ("copy_source", c_void_p),
        ("copy_target", c_void_p),
        ("copy_nbytes", c_void_p),
        ("adler", c_void_p),
        ("max_tasks", c_int64),
        ("max_copies", c_int64),
        ("num_tasks", c_int64),
        ("num_copies", c_int64),
    ]


class _Member(Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", c_int64), ("nbytes", c_int64)]


_STRUCTURES = {
    "Libraries": _Libraries,
    "Worker": _Worker,
    "File": FileStruct,
    "Filter": _Filter,
    "Dataset": DatasetStruct,
    "ChunkPlan": ChunkPlanStruct,
    "Rows": RowsStruct,
    "Transform": TransformStruct,
    "Frames": FramesStruct,
}


def _members() -> dict[str, tuple[int, int]]:
    """Return offset and size of each member of each structure, as the core should have them."""
    found = {"ABI": (_ABI, 0)}
    from h5async.core.batch import STRUCTURES

    for name, struct in (_STRUCTURES | STRUCTURES).items():
        for member, *_ in struct._fields_:
            place = getattr(struct, member)
            found[f"{name}.{member}"] = place.offset, place.size
    return found


class Core:
    """The compiled core, loaded.

    Attributes
    ----------
    path
        The shared library.
    missing
        Codec libraries that were not found; what needs them is decoded in Python.
    read_rows, read_chunks, transform, transform_rows, permute, permute_each
        Its functions. They drop the GIL, and may be called from many threads, each with a worker
        of its own.
    read_stored
        ``read_stored(file, worker, offset, nbytes, target, count, base, base_nbytes)`` reads
        ``nbytes[i]`` bytes at ``offset[i]`` of the file to ``base + target[i]`` (int64 arrays),
        and returns how many of them it read before the first that could not be.
    cut_frames
        ``cut_frames(frames)``, of a `FramesStruct`, cuts stored chunks into blocks that can be
        decoded each by itself, and returns how many chunks it cut. It stops before the first in
        which anything is odd, or for which there is no room. It decodes nothing, so damage within
        a block is the decoder's to find.

    Raises
    ------
    OSError
        If the library cannot be loaded, or is of another version than this file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        try:
            if _members_of(library) != _members():
                raise OSError(f"{path} is of another version; install h5async again")
            self._find_functions(library)
        except AttributeError as error:
            raise OSError(f"{path} is not h5async's core") from error
        self._libraries = _Libraries()
        self.missing = self._find_codecs()

    def _find_functions(self, library: Any) -> None:
        self.read_rows = _function(library, "h5async_read_rows", 3)
        self.read_chunks = _function(
            library,
            "h5async_read_chunks",
            4,
            *(c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        )
        self.transform = _function(library, "h5async_transform", 1, c_void_p, c_void_p)
        self.transform_rows = _function(library, "h5async_transform_rows", 5)
        self.permute = _function(library, "h5async_permute", 1, c_int64, *[c_uint64] * 3, c_void_p)
        self.permute_each = _function(library, "h5async_permute_each", 1, c_int64, *[c_void_p] * 5)
        self.read_stored = _function(library, "h5async_read_stored", 5, c_int64, c_void_p, c_int64)
        self.cut_frames = _function(library, "h5async_cut_frames", 1)
        self.sources_nbytes = _function(library, "h5async_sources_nbytes", 0)
        self.open_sources = _function(
            library, "h5async_open_sources", 2, c_int64, c_int64, c_int32, c_int32
        )
        self.open_ahead = _function(library, "h5async_open_ahead", 1, c_int64)
        self.restamp = _function(library, "h5async_restamp", 1, *[c_int64] * 4, c_int32)
        self.close_sources = _function(library, "h5async_close_sources", 1)
        self.new_store = _function(library, "h5async_new_store", 0, c_int64, c_int64)
        self.new_store.restype = c_void_p
        self.clear_store = _function(library, "h5async_clear_store", 1)
        self.free_store = _function(library, "h5async_free_store", 1)
        self.plan_batch = _function(
            library, "h5async_plan_batch", 3, c_int64, c_void_p, *[c_int64] * 3
        )
        self.read_batch = _function(library, "h5async_read_batch", 5, *[c_int64] * 3)
        self.free_plan = _function(library, "h5async_free_plan", 1)
        self._free = _function(library, "h5async_free", 1)

    def filters(self, filters: tuple[Filter, ...]) -> Any | None:
        """Return a pipeline as the core takes it, or None where it cannot."""
        if len(filters) > MAX_FILTERS:
            return None
        structs = [struct for entry in filters if (struct := filter_struct(entry)) is not None]
        if len(structs) < len(filters):
            return None
        if any(_LIBRARY_OF_KIND.get(struct.kind) in self.missing for struct in structs):
            return None
        return (_Filter * max(1, len(structs)))(*structs)

    def new_worker(
        self,
        encoded: NDArray[Any],
        chunk: NDArray[Any],
        between: tuple[NDArray[Any], ...],
        stop: c_int32 | None = None,
    ) -> CoreWorker:
        """Return what a thread needs to call the core, with its working memory.

        Once `stop` is not 0, calls end as soon as they can, with `Event.STOPPED`.
        """
        struct = _Worker(
            libraries=ctypes.pointer(self._libraries),
            encoded=address(encoded),
            chunk=address(chunk),
            between=tuple(map(address, between)),
            encoded_nbytes=encoded.nbytes,
            chunk_nbytes=chunk.nbytes,
            between_nbytes=min(array.nbytes for array in between),
            stop=None if stop is None else ctypes.pointer(stop),
        )
        return CoreWorker(struct, self._free)

    def _find_codecs(self) -> frozenset[str]:
        missing = set()
        for name in dict.fromkeys(_FUNCTIONS.values()):
            functions = [f for f, library in _FUNCTIONS.items() if library == name]
            for library in _codec_libraries(name):
                if all(hasattr(library, function) for function in functions):
                    for function in functions:
                        pointer = ctypes.cast(getattr(library, function), c_void_p)
                        setattr(self._libraries, function, pointer.value)
                    break
            else:
                missing.add(name)
        return frozenset(missing)


class CoreWorker:
    """What one thread needs to call the core: decoders' contexts, scratch, counters.

    Attributes
    ----------
    struct
        As the core takes it; its counters only grow.
    gil_wait_ns
        Time between the end of calls and the GIL being had again.
    """

    def __init__(self, struct: _Worker, free: Any) -> None:
        self.struct = struct
        self.gil_wait_ns = 0
        # Not at exit: a thread may still decode then, and whatever it uses must stay.
        weakref.finalize(self, free, ctypes.byref(struct)).atexit = False

    def counts(self) -> ThreadCounts:
        """Return what was done so far."""
        struct = self.struct
        return ThreadCounts(
            struct.read_ns,
            struct.decode_ns,
            struct.place_ns,
            self.gil_wait_ns,
            struct.read_nbytes,
            struct.decoded_chunks,
        )

    def note_return(self) -> None:
        """Note, right after a call, how long it took to get the GIL back."""
        self.gil_wait_ns += time.monotonic_ns() - int(self.struct.returned_ns)


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte; the caller keeps the array."""
    return array.ctypes.data


def mapping_mode(io: IoMode) -> IoMode:
    """Return how files are read: not mapped by default without the core, which guards maps."""
    return "pread" if io == "auto" and load_core() is None else io


@functools.cache
def load_core() -> Core | None:
    """Return the compiled core, or None where it is switched off or was not built.

    Raises
    ------
    ConfigError
        If the environment names a file that is none.
    """
    chosen = os.environ.get("H5ASYNC_CORE", "")
    if chosen == "0":
        return None
    if chosen:
        try:
            return Core(Path(chosen))
        except OSError as error:
            raise ConfigError(
                f"the environment variable H5ASYNC_CORE={chosen} names no core that can be loaded"
                f" ({error}); unset it to use the core that was installed, or set it to 0 to do"
                " without"
            ) from error
    for path in sorted(Path(__file__).parent.glob("_core*.so")):
        with suppressing(OSError):
            return Core(path)
    return None


def _members_of(library: Any) -> dict[str, tuple[int, int]]:
    """Return offset and size of each member of each structure, as a core was built with them."""
    count = _function(library, "h5async_num_members", 0)()
    members = library.h5async_members
    members.restype = POINTER(_Member)
    members.argtypes = []
    found = members()
    return {found[i].name.decode(): (found[i].offset, found[i].nbytes) for i in range(count)}


def _function(library: Any, name: str, pointers: int, *others: Any) -> Any:
    function = getattr(library, name)
    function.restype = c_int64
    function.argtypes = [c_void_p] * pointers + list(others)
    return function


def filter_struct(entry: Filter) -> _Filter | None:
    """Return a filter as the core takes it; None: the core, or this library, cannot decode it."""
    decode = decoder(entry)
    if decode is None:
        return None
    if decode is pass_on:
        return _Filter(NOTHING, 0, 0)
    if entry.number == SHUFFLE:
        return _Filter(KINDS[SHUFFLE], entry.parameters[0], 0) if _fits(entry, 0) else None
    if entry.number == BITSHUFFLE:
        kind = BITSHUFFLE_KINDS.get(bitshuffle_codec(entry.parameters))
        if kind is None or bitshuffle_decoder(entry.parameters) is None or not _fits(entry, 2):
            return None
        return _Filter(kind, entry.parameters[2], (*entry.parameters, 0)[3])
    kind = KINDS.get(entry.number)
    return None if kind is None else _Filter(kind, 0, 0)


def _fits(entry: Filter, parameter: int) -> bool:
    return 0 < entry.parameters[parameter] < 2**31


def _codec_libraries(name: str) -> Iterator[Any]:
    """Yield the shared libraries of a codec that are there: imagecodecs', the environment's, ..."""
    for path in _codec_paths(name):
        with suppressing(OSError):
            yield ctypes.CDLL(path)


def _codec_paths(name: str) -> Iterator[str]:
    # The extension module loads what the codec's library itself needs.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"imagecodecs._{name}")
    package = Path(imagecodecs.__file__).parent
    for folder in (package.with_name("imagecodecs.libs"), package / ".dylibs"):
        yield from map(str, sorted(folder.glob(f"lib{name}[-.]*")))
    for suffix in (".so", ".dylib"):
        path = Path(sys.prefix, "lib", f"lib{name}{suffix}")
        if path.exists():
            yield str(path)
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found


# How the memory of a transform's source and result are read; see src/core.c.
_SOURCES = {"uint8": 11, "uint16": 12, "int16": 13, "float32": 14}


def transform_source(raw: np.dtype[Any], delivered: np.dtype[Any], is_scaled: bool) -> int | None:
    """Return the core's number for a conversion, or None where NumPy has to do it."""
    if not raw.isnative:
        return None
    if raw == delivered and not is_scaled:
        return raw.itemsize if raw.itemsize in (1, 2, 4, 8) and raw.kind in "biufc" else None
    return _SOURCES.get(raw.name) if delivered == np.float32 else None
