"""Declares the structures of the compiled core that describe tables, and the plans of batches.

They hold addresses of arrays; their owner keeps the arrays. `src/sources.c`, `src/store.c`,
`src/tables.c`, `src/plan.c` and `src/window.c` explain the members.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint64, c_void_p

from h5async.core.heap import HeapStruct
from h5async.core.structures import DatasetStruct, TransformStruct


class SourceStruct(Structure):
    """A row of the table of sources; the core writes to the members from `fd` on."""

    _fields_ = [
        ("path", c_void_p),
        ("map", c_void_p),
        ("map_nbytes", c_int64),
        ("device", c_int64),
        ("inode", c_int64),
        ("nbytes", c_int64),
        ("modified_ns", c_int64),
        ("changed_ns", c_int64),
        ("may_map", c_int32),
        ("fd", c_int32),
        ("is_open", c_int32),
        ("users", c_int32),
        ("has_swmr_writer", c_int32),
        ("is_stale", c_int32),
        ("was_cached", c_int32),
        ("uses", c_int32),
        ("checked_ns", c_int64),
        ("newer", c_void_p),
        ("older", c_void_p),
    ]


class ItemStruct(Structure):
    """An item of a plan."""

    _fields_ = [
        ("source", c_int32),
        ("field", c_int32),
        ("layer", c_int32),
        ("segment", c_int32),
        ("kind", c_int32),
        ("status", c_int32),
        ("number", c_int64),
        ("first_run", c_int64),
        ("num_runs", c_int64),
        ("cross", c_int32),
        ("cross_end", c_int32),
        ("nbytes", c_int64),
    ]


class WantedStruct(Structure):
    """A run of the samples of a batch."""

    _fields_ = [("sample", c_int64), ("position", c_int32), ("rank", c_int32)]


# The maximum that a plan takes per sample (a number and a position, and room to sort them), and per
# row of a field (an item and a run, too).
PLANNED_SAMPLE_NBYTES = 3 * ctypes.sizeof(WantedStruct)
PLANNED_ROW_NBYTES = ctypes.sizeof(ItemStruct) + 3 * 8 + PLANNED_SAMPLE_NBYTES
# The memory of a thread that reads elements of variable length: HeapScratch in src/heap.c.
HEAP_SCRATCH_NBYTES = (1 << 16) * 24 + 5 * 8 + 16 * 1024 + 512 * 16
KEPT_OVERHEAD_NBYTES = 128  # per kept decoded chunk, beside its bytes: KEPT_OVERHEAD
REFUSED = 2  # the status of an item that Python has read again, or reports as an error


class ShapeStruct(Structure):
    """A `Shape`."""

    _fields_ = [
        ("dataset", DatasetStruct),
        ("cross_number", c_void_p),
        ("number_stride", c_int64),
        ("kind", c_int64),
        ("source_row_nbytes", c_int64),
        ("keeps", c_int64),
        ("swaps", c_int64),
    ]


class LayerStruct(Structure):
    """A `Layer`."""

    _fields_ = [
        ("first", c_void_p),
        ("row", c_void_p),
        ("step", c_void_p),
        ("shape", c_void_p),
        ("source", c_void_p),
        ("begin", c_void_p),
        ("count", c_void_p),
        ("is_sparse", c_void_p),
        ("num_segments", c_int64),
    ]


class StepRowsStruct(Structure):
    """Which rows of a field each sample is: a `StepRows`."""

    _fields_ = [
        ("offsets", c_void_p),
        ("starts", c_void_p),
        ("ends", c_void_p),
        ("num_offsets", c_int64),
        ("num_sequences", c_int64),
        ("pad", c_int64),
    ]


class SpanRowsStruct(Structure):
    """The same if the number of rows differs: a `SpanRows`."""

    _fields_ = [("starts", c_void_p), ("num_samples", c_int64)]


class FieldStruct(Structure):
    """A `FieldTable`, and how its rows are transformed."""

    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("shapes", POINTER(ShapeStruct)),
        ("number", c_void_p),
        ("offset", c_void_p),
        ("nbytes", c_void_p),
        ("mask", c_void_p),
        ("fill", c_void_p),
        ("transform", POINTER(TransformStruct)),
        ("store", c_void_p),
        ("nbytes_step", c_int64),
        ("mask_step", c_int64),
        ("num_layers", c_int64),
        ("num_extents", c_int64),
        ("row_nbytes", c_int64),
        ("itemsize", c_int64),
        ("is_filled_first", c_int64),
        ("steps", POINTER(StepRowsStruct)),
        ("spans", POINTER(SpanRowsStruct)),
        ("heaps", POINTER(HeapStruct)),
        ("lengths", c_void_p),
        ("num_rows", c_int64),
        ("limit", c_int64),
    ]


class BatchPlanStruct(Structure):
    """A plan of a batch; its arrays are the core's, and grow."""

    _fields_ = [
        ("items", c_void_p),
        ("run_local", c_void_p),
        ("run_position", c_void_p),
        ("run_length", c_void_p),
        ("wanted", c_void_p),
        ("spare", c_void_p),
        ("joined", c_void_p),
        ("sorted", c_void_p),
        ("order", c_void_p),
        ("order_spare", c_void_p),
        ("places", c_void_p),
        ("num_items", c_int64),
        ("num_runs", c_int64),
        ("num_wanted", c_int64),
        ("most_items", c_int64),
        ("most_runs", c_int64),
        ("most_wanted", c_int64),
        ("most_order", c_int64),
        ("most_joined", c_int64),
        ("most_places", c_int64),
        ("first_wanted", c_int64),
        ("nbytes", c_int64),
        ("was_cached", c_int64),
    ]


class TargetStruct(Structure):
    """Where the rows of a field go in a slot."""

    _fields_ = [
        ("raw", c_void_p),
        ("out", c_void_p),
        ("is_wanted", c_int64),
        ("capacity", c_int64),
    ]


class WindowStruct(Structure):
    """An epoch's order of `shuffle="window"`."""

    _fields_ = [
        ("unit", c_void_p),
        ("skip", c_void_p),
        ("count", c_void_p),
        ("bounds", c_void_p),
        ("delay", c_void_p),
        ("num_units", c_int64),
        ("size", c_int64),
        ("group_rounds", c_int64),
        ("keys", c_uint64 * 6),
    ]


STRUCTURES = {
    "Source": SourceStruct,
    "Shape": ShapeStruct,
    "Layer": LayerStruct,
    "StepRows": StepRowsStruct,
    "SpanRows": SpanRowsStruct,
    "Field": FieldStruct,
    "Item": ItemStruct,
    "BatchPlan": BatchPlanStruct,
    "Wanted": WantedStruct,
    "Target": TargetStruct,
    "Window": WindowStruct,
}
