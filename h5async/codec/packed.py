"""Decides which chunks of the n-bit and scale-offset filters the core decodes as HDF5 does.

Client data enter, as HDF5 stores them (H5Zscaleoffset.c, H5Znbit.c of its sources). Both filters
know the number of bytes in a chunk, so they must be the first of their pipeline.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from h5async.codec.entry import NOTHING, CoreFilter, CoreKind, Parameters

_NBYTES_DECODED = (1, 2, 4, 8)
_SCALEOFFSET_PARAMETERS, _NBIT_PARAMETERS = 20, 8
_FLOAT_D_SCALING, _INTEGER = 0, 2
_INTEGER_CLASS, _FLOAT_CLASS = 0, 1
_NBIT_ATOMIC, _NBIT_ARRAY, _NBIT_COMPOUND, _NBIT_UNCHANGED = range(1, 5)


def scaleoffset_filter(parameters: Parameters) -> CoreFilter | None:
    """Return the filter as the core takes it; None if HDF5 has to decode."""
    if len(parameters) != _SCALEOFFSET_PARAMETERS or sys.byteorder != "little":
        return None
    scale_type, factor, count, class_, nbytes, sign, order, has_fill = parameters[:8]
    factor = (factor + (1 << 31)) % (1 << 32) - (1 << 31)  # the file has it without its sign
    if nbytes not in _NBYTES_DECODED or order not in (0, 1) or has_fill not in (0, 1) or count < 1:
        return None
    if class_ == _INTEGER_CLASS:
        if scale_type != _INTEGER or sign not in (0, 1) or factor > 8 * nbytes:
            return None
        if factor == 8 * nbytes:
            return NOTHING
    elif class_ != _FLOAT_CLASS or scale_type != _FLOAT_D_SCALING or nbytes < 4:
        return None
    elif not 0 < _power_of_ten(factor, nbytes) < np.inf:
        return None
    return CoreFilter(CoreKind.SCALEOFFSET, values=parameters)


def _power_of_ten(exponent: int, nbytes: int) -> np.floating[Any]:
    """Return what the C library's `pow`, or `powf` for 4 bytes, returns to HDF5 too.

    NumPy calls it for scalars; for arrays it has a vectorized one that may round differently.
    """
    if nbytes == 4:
        with np.errstate(all="ignore"):
            power: np.floating[Any] = np.float32(10) ** np.float32(exponent)
        return power
    try:
        return np.float64(math.pow(10, exponent))
    except OverflowError:
        return np.float64(np.inf)


def nbit_filter(parameters: Parameters) -> CoreFilter | None:
    """Return the filter as the core takes it; None if HDF5 has to decode."""
    if len(parameters) < 2 or parameters[0] != len(parameters):
        return None
    if parameters[1]:  # HDF5 says "need not compress"
        return NOTHING
    if len(parameters) != _NBIT_PARAMETERS or sys.byteorder != "little":
        return None
    count, class_, nbytes, order, precision, offset = parameters[2:]
    if count < 1 or class_ != _NBIT_ATOMIC or nbytes not in _NBYTES_DECODED or order not in (0, 1):
        return None
    if precision < 1 or precision + offset > 8 * nbytes:
        return None
    return CoreFilter(CoreKind.NBIT, values=parameters)


def stated_chunk_nbytes(parameters: Parameters) -> int | None:
    """Return the bytes of a chunk by the client data of either filter; None if they do not say."""
    return parameters[2] * parameters[4] if len(parameters) > 4 else None


def packed_nbit_nbytes(parameters: Parameters) -> int:
    """Return the bytes of an n-bit encoded chunk, for client data of any class.

    `ValueError` is raised if they are damaged.
    """
    try:
        return (parameters[2] * _packed_bits(parameters, 3)[0] + 7) // 8
    except (IndexError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"nbit: its client data are damaged ({error})") from error


def _packed_bits(parameters: Parameters, at: int) -> tuple[int, int]:
    """Return the packed bits of an element, and where its parameters end."""
    kind, nbytes = parameters[at], parameters[at + 1]
    if kind == _NBIT_ATOMIC:  # size, order, precision, offset
        return parameters[at + 3], at + 5
    if kind == _NBIT_ARRAY:  # size, then the element
        bits, end = _packed_bits(parameters, at + 2)
        return nbytes // parameters[at + 3] * bits, end
    if kind == _NBIT_COMPOUND:  # size, members, then offset and element of each
        total, end = 0, at + 3
        for _ in range(parameters[at + 2]):
            bits, end = _packed_bits(parameters, end + 1)
            total += bits
        return total, end
    if kind == _NBIT_UNCHANGED:
        return 8 * nbytes, at + 2
    raise ValueError(f"there is no class {kind}")
