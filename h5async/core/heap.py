"""Declares the structure by which the compiled core reads variable-length elements.

It holds addresses of arrays; its owner keeps the arrays. `src/heap.c` explains the members.
"""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

# Parts of the places of elements whose collection was not walked yet; NOWHERE: without an address.
INDEX_BITS, MOST_ADDRESS = 16, (1 << 47) - 1
NOWHERE = -1


class HeapStruct(Structure):
    """Elements of a variable-length datatype; see `index.heapelements`."""

    _fields_ = [
        ("length", c_void_p),
        ("place", c_void_p),
        ("count", c_int64),
        ("base", c_int64),
        ("value_nbytes", c_int64),
        ("address_nbytes", c_int32),
        ("size_nbytes", c_int32),
        ("is_text", c_int32),
        ("padding", c_int32),
    ]


STRUCTURES = {"Heap": HeapStruct}
