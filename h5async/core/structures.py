"""Declares the structures of the compiled core, as in core/src/common.h and its neighbours.

A core that was built with other members is refused when it is loaded: see `members`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from typing import Any

import numpy as np

from h5async.core.libraries import FUNCTIONS

ABI = 15  # the core's own number, for changes that its structures do not show
MAX_FILTERS, MAX_RANK = 32, 32  # HDF5's limits

IO_MODES = {"auto": 0, "pread": 1, "map": 2}


class LibrariesStruct(Structure):
    """The functions of codec libraries, by pointers."""

    _fields_ = [(name, c_void_p) for name in FUNCTIONS]


class TraceEventStruct(Structure):
    """Begin and end of a stage, with its batch, field and source; see src/trace.c."""

    _fields_ = [
        ("begin_ns", c_int64),
        ("end_ns", c_int64),
        ("thread", c_int64),
        ("batch", c_int64),
        ("stage", c_int32),
        ("field", c_int32),
        ("source", c_int32),
        ("padding", c_int32),
    ]


class TraceStruct(Structure):
    """The events of all threads while a reader is traced; see src/trace.c."""

    _fields_ = [("events", c_void_p), ("capacity", c_int64), ("count", c_int64)]


class FailureStruct(Structure):
    """Which part of an item failed, and why; see src/common.h."""

    _fields_ = [
        ("reason", c_int64),
        ("filter", c_int64),
        ("extent", c_int64),
        ("cross", c_int64),
        ("at", c_int64),
        ("expected", c_int64),
        ("found", c_int64),
    ]


class WorkerStruct(Structure):
    """What one thread needs to call the core; see `CoreWorker`."""

    _fields_ = [
        ("libraries", POINTER(LibrariesStruct)),
        ("encoded", c_void_p),
        ("chunk", c_void_p),
        ("between", c_void_p * 3),
        ("encoded_nbytes", c_int64),
        ("chunk_nbytes", c_int64),
        ("between_nbytes", c_int64),
        ("deflate", c_void_p),
        ("zstd", c_void_p),
        ("heap", c_void_p),
        ("read_ns", c_int64),
        ("decode_ns", c_int64),
        ("place_ns", c_int64),
        ("read_nbytes", c_int64),
        ("decoded_chunks", c_int64),
        ("decoded_nbytes", c_int64),
        ("returned_ns", c_int64),
        ("stop", POINTER(c_int32)),
        ("transform_ns", c_int64),
        ("trace", c_void_p),
        ("tracing", c_void_p),
        ("batch", c_int64),
        ("latest", TraceEventStruct),
        ("traced_field", c_int32),
        ("traced_source", c_int32),
        ("failure", FailureStruct),
        ("least_nbytes", c_int64),
        ("held", c_void_p),
    ]


class FileStruct(Structure):
    """An open file, its map, and its `FileStamp`; a call of the core sets `event`."""

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
        ("failed_at", c_int64),
        ("error", c_int64),
    ]


class Event(IntEnum):
    """Why a call did not do its work, or why its work is invalid."""

    NONE = 0
    CHANGED = 1  # the file is not what was indexed
    FAULTED = 2  # a page of the map cannot be read
    STOPPED = 3  # the reader is being closed


class FilterStruct(Structure):
    """A `CoreFilter`, without its library."""

    _fields_ = [
        ("kind", c_int32),
        ("element", c_int32),
        ("block", c_int64),
        ("values", POINTER(c_uint32)),
        ("num_values", c_int64),
        ("function", c_void_p),
    ]


class DatasetStruct(Structure):
    """Where the chunks of a dataset lie, how they are encoded, and where pieces go in rows."""

    _fields_ = [
        ("filters", POINTER(FilterStruct)),
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


class UnpackStruct(Structure):
    """How stored values are unpacked, each row by the numbers at its place in the arrays."""

    _fields_ = [
        ("rows", c_int64),
        ("count", c_int64),
        ("source", c_int32),
        ("is_double", c_int32),
        ("is_wide", c_int32),
        ("has_scale", c_int32),
        ("has_offset", c_int32),
        ("which", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("fill", c_void_p),
        ("low", c_void_p),
        ("high", c_void_p),
    ]


class FramesStruct(Structure):
    """Encoded chunks, and the blocks into which they are cut; see `Core.cut_frames`.

    The caller sets all but the last two, and owns the arrays. They are int64, except
    `source_nbytes` and `target_nbytes` (uint64) and `adler` (uint32).

    Attributes
    ----------
    base, base_nbytes
        Memory with the encoded chunks.
    position, nbytes
        (`count`,): their positions in it, and their lengths.
    kind, element, block_nbytes, has_checksum
        How a chunk is framed: a `FrameFormat`.
    expected_nbytes
        Bytes of a chunk without the frame.
    pitch
        Chunk k goes to byte k * `pitch` of the output; at least `expected_nbytes`.
    source, source_nbytes, target, target_nbytes
        (`max_tasks`,): per block, its place from `base` on, and its place in the output.
    copy_source, copy_target, copy_nbytes
        (`max_copies`,): the same for bytes that are not compressed.
    adler
        (`count`,): for DEFLATE, the Adler-32 of each decoded chunk; else None.
    num_tasks, num_copies
        Their numbers, for the chunks that were cut.
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
        ("expected_nbytes", c_int64),
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


class VisitStruct(Structure):
    """Visits the chunks of a dataset, and fills columns with them; see src/visit.c."""

    _fields_ = [
        ("iterate", c_void_p),
        ("save_thread", c_void_p),
        ("restore_thread", c_void_p),
        ("check_signals", c_void_p),
        ("dataset", c_int64),
        ("rank", c_int64),
        ("chunk", c_void_p),
        ("grid", c_void_p),
        ("number", c_void_p),
        ("offset", c_void_p),
        ("nbytes", c_void_p),
        ("mask", c_void_p),
        ("capacity", c_int64),
        ("count", c_int64),
        ("begin", c_int64),
        ("end", c_int64),
        ("least", c_int64),
        ("most", c_int64),
        ("is_ascending", c_int64),
        ("is_apart", c_int64),
        ("is_outside", c_int64),
        ("thread", c_void_p),
    ]


class SparseStruct(Structure):
    """A sparse matrix (CSR), and where its dense rows go; see src/dense.c."""

    _fields_ = [
        ("data", c_void_p),
        ("indices", c_void_p),
        ("indptr", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("total", c_int64),
        ("row_nbytes", c_int64),
        ("data_kind", c_int32),
        ("out_kind", c_int32),
        ("index_nbytes", c_int32),
        ("padding", c_int32),
    ]


class MemberStruct(Structure):
    """A core's description of one member of a structure."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", c_int64), ("nbytes", c_int64)]


STRUCTURES = {
    "Libraries": LibrariesStruct,
    "Failure": FailureStruct,
    "Worker": WorkerStruct,
    "TraceEvent": TraceEventStruct,
    "Trace": TraceStruct,
    "File": FileStruct,
    "Filter": FilterStruct,
    "Dataset": DatasetStruct,
    "Transform": TransformStruct,
    "Unpack": UnpackStruct,
    "Frames": FramesStruct,
    "Visit": VisitStruct,
    "Sparse": SparseStruct,
}


def members(structures: Mapping[str, type[Structure]]) -> dict[str, tuple[int, int]]:
    """Return the expected offset and size of each member of each structure."""
    found = {"ABI": (ABI, 0)}
    for name, struct in structures.items():
        for member, *_ in struct._fields_:
            described = getattr(struct, member)
            found[f"{name}.{member}"] = described.offset, described.size
    return found


# Numbers of the kinds of values in sparse matrices; see src/dense.c.
VALUE_KINDS = {
    np.dtype(name): kind
    for kind, name in enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"), 1)
}

# Numbers of conversions; see src/transform.c.
_SOURCES = {"uint8": 11, "uint16": 12, "int16": 13, "float32": 14}


def transform_source(raw: np.dtype[Any], delivered: np.dtype[Any], is_scaled: bool) -> int | None:
    """Return the core's number for a conversion, or None if NumPy has to do it."""
    if not raw.isnative:
        return None
    if raw == delivered and not is_scaled:
        return raw.itemsize if raw.itemsize in (1, 2, 4, 8) and raw.kind in "biufc" else None
    return _SOURCES.get(raw.name) if delivered == np.float32 else None
