"""Tells what h5py makes of a stored type: its dtype, and whether stored bytes are NumPy's.

Most datasets of a file, and of a thousand files, have one of a few types. So what was found out is
kept by the encoded type.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5async.system.interruptions import suppressing


class StoredType(NamedTuple):
    """What h5py makes of a type.

    Attributes
    ----------
    dtype
        As h5py gives it.
    is_numpys
        Whether the stored bytes are NumPy's.
    """

    dtype: np.dtype[Any]
    is_numpys: bool


@functools.lru_cache(maxsize=256)
def describe(encoded: bytes) -> StoredType:
    """Describe a type, as H5Tencode encodes it.

    Raises
    ------
    Exception
        Any, where h5py has no dtype for it.
    """
    stored = h5py.h5t.decode(encoded)
    dtype = stored.dtype
    return StoredType(dtype, _is_stored_as(stored, dtype))


def _is_stored_as(stored: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """Tell whether the bytes of a stored type are those of a dtype."""
    is_equal = None
    with suppressing(Exception):  # a type that h5py can read but not write
        is_equal = bool(stored.equal(h5py.h5t.py_create(dtype, logical=True)))
    if is_equal is not False:
        return bool(is_equal)
    if isinstance(stored, h5py.h5t.TypeIntegerID) and stored.get_size() == 1:
        # A byte order means nothing to a byte, but makes types unequal.
        is_whole = stored.get_precision() == 8 and stored.get_offset() == 0
        is_signed = stored.get_sign() != h5py.h5t.SGN_NONE
        return is_whole and dtype == np.dtype("i1" if is_signed else "u1")
    if isinstance(stored, h5py.h5t.TypeBitfieldID) and dtype.kind == "u":
        # h5py gives bitfields as unsigned integers, but would write those as integers.
        same = getattr(h5py.h5t, f"STD_B{8 * dtype.itemsize}LE", None)
        return same is not None and dtype.str[0] != ">" and bool(stored.equal(same))
    if isinstance(stored, h5py.h5t.TypeCompoundID) and dtype.fields is not None:
        names = dtype.names or ()
        return (
            stored.get_size() == dtype.itemsize
            and stored.get_nmembers() == len(names)
            and all(
                stored.get_member_offset(i) == dtype.fields[name][1]
                and _is_stored_as(stored.get_member_type(i), dtype.fields[name][0])
                for i, name in enumerate(names)
            )
        )
    return False
