"""Makes the structures of the compiled core of its own description, and has its numbers.

The comments in `src/` explain the members.
"""

from __future__ import annotations

import ctypes
import itertools
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from typing import Any

import numpy as np

ABI = 22  # counts changes of the core's structures and functions
MAX_FILTERS, MAX_RANK = 32, 32  # HDF5's limits
IO_MODES = {"auto": 0, "pread": 1, "map": 2}
REFUSED = 2  # the status of an item that Python has read again, or reports as an error
# Parts of the places of elements whose collection was not walked yet; NOWHERE: without an address.
INDEX_BITS, MOST_ADDRESS = 16, (1 << 47) - 1
NOWHERE = -1

IS_REPLACED, CANNOT_MAP = -1, -2  # why a source cannot be opened again


class Event(IntEnum):
    """Why a call did not do its work, or why its work is invalid."""

    NONE = 0
    CHANGED = 1  # the file is not what was indexed
    FAULTED = 2  # a page of the map cannot be read
    STOPPED = 3  # the reader is being closed


class _Member(Structure):
    _fields_ = (("name", c_char_p), ("type", c_char_p), ("offset", c_int64), ("nbytes", c_int64))


class _Described(Structure):
    _fields_ = (("name", c_char_p), ("nbytes", c_int64), ("members", POINTER(_Member)))


def structures_of(library: Any) -> dict[str, type[Structure]]:
    """Return the structures of a core by their names in C, as it describes them itself.

    They hold addresses of arrays; their owner keeps the arrays. Members that a structure lacks, or
    that only the core uses, are an `AttributeError`.
    """
    library.h5async_structures.restype = POINTER(_Described)
    found: dict[str, type[Structure]] = {}
    types: dict[bytes, Any] = {b"int32": c_int32, b"uint32": c_uint32, b"int64": c_int64}
    for described in itertools.takewhile(_is_named, library.h5async_structures()):
        fields: list[tuple[str, Any]] = []
        at = 0
        for member in itertools.takewhile(_is_named, described.members):
            fields += _gap(at, member.offset)
            kind = types.get(member.type, c_void_p)
            count = member.nbytes // ctypes.sizeof(kind)
            fields.append((member.name.decode(), kind if count == 1 else kind * count))
            at = member.offset + member.nbytes
        fields += _gap(at, described.nbytes)
        name = described.name.decode()
        made = type(name, (Structure,), {"__slots__": (), "_fields_": fields})
        assert ctypes.sizeof(made) == described.nbytes
        types[described.name], types[b"*" + described.name] = made, POINTER(made)
        found[name] = made
    return found


def _is_named(entry: Any) -> bool:
    return entry.name is not None


def _gap(at: int, end: int) -> list[tuple[str, Any]]:
    return [(f"_{at}", ctypes.c_char * (end - at))] if at < end else []


# The maximum that a plan takes per sample (a number and a position, and room to sort them), and per
# row of a field (an item and a run, too).
PLANNED_SAMPLE_NBYTES = 3 * 16
PLANNED_ROW_NBYTES = 64 + 3 * 8 + PLANNED_SAMPLE_NBYTES
# The memory of a thread that reads elements of variable length: HeapScratch in src/heap.c.
HEAP_SCRATCH_NBYTES = (1 << 16) * 24 + 5 * 8 + 16 * 1024 + 512 * 16
KEPT_OVERHEAD_NBYTES = 128  # per kept decoded chunk, beside its bytes: KEPT_OVERHEAD

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
