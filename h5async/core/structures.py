"""Declares the structures of the compiled core: name for name and type for type, as in `src/`.

They hold addresses of arrays; their owner keeps the arrays. The comments in `src/` explain the
members. A core that was built with others is refused when it is loaded: see `members`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

import numpy as np

from h5async.core.libraries import LIBRARIES

ABI = 16  # the core's own number, for changes that its structures do not show
MAX_FILTERS, MAX_RANK = 32, 32  # HDF5's limits
IO_MODES = {"auto": 0, "pread": 1, "map": 2}
REFUSED = 2  # the status of an item that Python has read again, or reports as an error
# Parts of the places of elements whose collection was not walked yet; NOWHERE: without an address.
INDEX_BITS, MOST_ADDRESS = 16, (1 << 47) - 1
NOWHERE = -1


class Event(IntEnum):
    """Why a call did not do its work, or why its work is invalid."""

    NONE = 0
    CHANGED = 1  # the file is not what was indexed
    FAULTED = 2  # a page of the map cannot be read
    STOPPED = 3  # the reader is being closed


STRUCTURES: dict[str, type[Structure]] = {}  # by their names in C


class _Shared(Structure):
    def __init_subclass__(cls) -> None:
        STRUCTURES[cls.__name__.removesuffix("Struct")] = cls


def _declared(*declarations: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return members for ctypes: each declaration is a type, and the names of that type."""
    return [(name, kind) for kind, names in declarations for name in names.split()]


class LibrariesStruct(_Shared):
    """The functions of codec libraries, by pointers."""

    _fields_ = _declared(*((c_void_p, " ".join(functions)) for functions in LIBRARIES.values()))


class TraceEventStruct(_Shared):
    """Begin and end of a stage, with its batch, field and source."""

    _fields_ = _declared(
        (c_int64, "begin_ns end_ns thread batch"), (c_int32, "stage field source padding")
    )


class TraceStruct(_Shared):
    """The events of all threads while a reader is traced."""

    _fields_ = _declared((c_void_p, "events"), (c_int64, "capacity count"))


class FailureStruct(_Shared):
    """Which part of an item failed, and why."""

    _fields_ = _declared((c_int64, "reason filter extent cross at expected found"))


class WorkerStruct(_Shared):
    """What one thread needs to call the core; see `CoreWorker`."""

    _fields_ = _declared(
        (POINTER(LibrariesStruct), "libraries"),
        (c_void_p, "encoded chunk"),
        (c_void_p * 3, "between"),
        (c_int64, "encoded_nbytes chunk_nbytes between_nbytes"),
        (c_void_p, "deflate zstd heap"),
        (c_int64, "read_ns decode_ns place_ns read_nbytes decoded_chunks decoded_nbytes"),
        (c_int64, "returned_ns"),
        (POINTER(c_int32), "stop"),
        (c_int64, "transform_ns"),
        (c_void_p, "trace tracing"),
        (c_int64, "batch"),
        (TraceEventStruct, "latest"),
        (c_int32, "traced_field traced_source"),
        (FailureStruct, "failure"),
        (c_int64, "least_nbytes"),
        (c_void_p, "held"),
    )


class FileStruct(_Shared):
    """An open file, its map, and its `FileStamp`; a call of the core sets `event`."""

    _fields_ = _declared(
        (c_int32, "fd io"),
        (c_void_p, "map"),
        (c_int64, "map_nbytes device inode nbytes modified_ns changed_ns event"),
        (c_void_p, "path"),
        (c_int64, "failed_at error"),
    )


class FilterStruct(_Shared):
    """A `CoreFilter`, without its library."""

    _fields_ = _declared(
        (c_int32, "kind element"),
        (c_int64, "block"),
        (POINTER(c_uint32), "values"),
        (c_int64, "num_values"),
        (c_void_p, "function"),
    )


class DatasetStruct(_Shared):
    """How the chunks of a dataset are encoded, and where pieces of them go in rows."""

    _fields_ = _declared(
        (POINTER(FilterStruct), "filters"),
        (c_void_p, "chunk_strides row_strides extents row_begin piece_begin fill"),
        (c_int64, "num_filters num_cross rank chunk_nbytes chunk_samples sample_stride itemsize"),
        (c_int64, "row_nbytes rows_are_whole begin"),
    )


class TransformStruct(_Shared):
    """How samples of (points, channels) become (channels, points)."""

    _fields_ = _declared(
        (c_int64, "samples points channels"),
        (c_int32, "source is_float"),
        (c_void_p, "scale offset"),
    )


class UnpackStruct(_Shared):
    """How stored values are unpacked, each row by the numbers at its place in the arrays."""

    _fields_ = _declared(
        (c_int64, "rows count"),
        (c_int32, "source is_double is_wide has_scale has_offset"),
        (c_void_p, "which scale offset fill low high"),
    )


class FramesStruct(_Shared):
    """Encoded chunks, and the blocks into which they are cut.

    The caller sets all but the last two, and owns the arrays.
    """

    _fields_ = _declared(
        (c_void_p, "base position nbytes"),
        (c_int64, "base_nbytes count"),
        (c_int32, "kind has_checksum"),
        (c_int64, "element block_nbytes expected_nbytes pitch"),
        (c_void_p, "source source_nbytes target target_nbytes copy_source copy_target copy_nbytes"),
        (c_void_p, "adler"),
        (c_int64, "max_tasks max_copies num_tasks num_copies"),
    )


class VisitStruct(_Shared):
    """Visits the chunks of a dataset, and fills columns with them."""

    _fields_ = _declared(
        (c_void_p, "iterate save_thread restore_thread check_signals"),
        (c_int64, "dataset rank"),
        (c_void_p, "chunk grid number offset nbytes mask"),
        (c_int64, "capacity count end least most is_ascending is_apart is_outside"),
        (c_void_p, "thread"),
    )


class SparseStruct(_Shared):
    """A sparse matrix (CSR), and where its dense rows go."""

    _fields_ = _declared(
        (c_void_p, "data indices indptr out"),
        (c_int64, "rows columns total row_nbytes"),
        (c_int32, "data_kind out_kind index_nbytes padding"),
    )


class HeapStruct(_Shared):
    """Elements of a variable-length datatype; see `index.variablelength`."""

    _fields_ = _declared(
        (c_void_p, "length place"),
        (c_int64, "count base value_nbytes"),
        (c_int32, "address_nbytes size_nbytes is_text padding"),
    )


class SourceStruct(_Shared):
    """A row of the table of sources; the core writes to the members from `fd` on."""

    _fields_ = _declared(
        (c_void_p, "path map"),
        (c_int64, "map_nbytes device inode nbytes modified_ns changed_ns"),
        (c_int32, "may_map fd is_open users has_swmr_writer is_stale was_cached uses"),
        (c_int64, "checked_ns"),
        (c_void_p, "newer older"),
    )


class ShapeStruct(_Shared):
    """A `Shape`."""

    _fields_ = _declared(
        (DatasetStruct, "dataset"),
        (c_void_p, "cross_number"),
        (c_int64, "number_stride kind source_row_nbytes keeps swaps"),
    )


class LayerStruct(_Shared):
    """A `Layer`."""

    _fields_ = _declared(
        (c_void_p, "first row step shape source begin count is_sparse"), (c_int64, "num_segments")
    )


class StepRowsStruct(_Shared):
    """Which rows of a field each sample is: a `StepRows`."""

    _fields_ = _declared(
        (c_void_p, "offsets starts ends"), (c_int64, "num_offsets num_sequences pad")
    )


class SpanRowsStruct(_Shared):
    """The same if the number of rows differs: a `SpanRows`."""

    _fields_ = _declared((c_void_p, "starts"), (c_int64, "num_samples"))


class FieldStruct(_Shared):
    """A `FieldTable`, and how its rows are transformed."""

    _fields_ = _declared(
        (POINTER(LayerStruct), "layers"),
        (POINTER(ShapeStruct), "shapes"),
        (c_void_p, "number offset nbytes mask fill"),
        (POINTER(TransformStruct), "transform"),
        (c_void_p, "store"),
        (c_int64, "nbytes_step mask_step num_layers num_extents row_nbytes itemsize"),
        (c_int64, "is_filled_first"),
        (POINTER(StepRowsStruct), "steps"),
        (POINTER(SpanRowsStruct), "spans"),
        (POINTER(HeapStruct), "heaps"),
        (c_void_p, "lengths"),
        (c_int64, "num_rows limit"),
    )


class ItemStruct(_Shared):
    """An item of a plan."""

    _fields_ = _declared(
        (c_int32, "source field layer segment kind status"),
        (c_int64, "number first_run num_runs"),
        (c_int32, "cross cross_end"),
        (c_int64, "nbytes"),
    )


class WantedStruct(_Shared):
    """A run of the samples of a batch."""

    _fields_ = _declared((c_int64, "sample"), (c_int32, "position rank"))


class BatchPlanStruct(_Shared):
    """A plan of a batch; its arrays are the core's, and grow."""

    _fields_ = _declared(
        (c_void_p, "items run_local run_position run_length wanted spare joined sorted"),
        (c_void_p, "order order_spare places"),
        (c_int64, "num_items num_runs num_wanted"),
        (c_int64, "most_items most_runs most_wanted most_order most_joined most_places"),
        (c_int64, "first_wanted nbytes was_cached"),
    )


class TargetStruct(_Shared):
    """Where the rows of a field go in a slot."""

    _fields_ = _declared((c_void_p, "raw out"), (c_int64, "is_wanted capacity"))


class WindowStruct(_Shared):
    """An epoch's order of `shuffle="window"`."""

    _fields_ = _declared(
        (c_void_p, "unit skip count bounds delay"),
        (c_int64, "num_units size group_rounds"),
        (c_uint64 * 6, "keys"),
    )


class MemberStruct(Structure):
    """A core's description of one member of a structure."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", c_int64), ("nbytes", c_int64)]


# The maximum that a plan takes per sample (a number and a position, and room to sort them), and per
# row of a field (an item and a run, too).
PLANNED_SAMPLE_NBYTES = 3 * ctypes.sizeof(WantedStruct)
PLANNED_ROW_NBYTES = ctypes.sizeof(ItemStruct) + 3 * 8 + PLANNED_SAMPLE_NBYTES
# The memory of a thread that reads elements of variable length: HeapScratch in src/heap.c.
HEAP_SCRATCH_NBYTES = (1 << 16) * 24 + 5 * 8 + 16 * 1024 + 512 * 16
KEPT_OVERHEAD_NBYTES = 128  # per kept decoded chunk, beside its bytes: KEPT_OVERHEAD


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
