"""Reads the fill value of a dataset: what HDF5 gives for values that were never written."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import ReadError
from h5async.index.hdf5 import fill_nbytes
from h5async.index.layout import DatasetLayout
from h5async.index.objectheader import stored_fill
from h5async.index.obstacles import NotDirectError
from h5async.index.opendataset import Opened


def require_fill(dataset: Opened, itemsize: int, where: str) -> None:
    """Refuse a fill value of another size; HDF5 would fill with what lies after it in memory."""
    nbytes = (
        fill_nbytes(dataset.properties) if itemsize and _has_fill_value(dataset.plist) else None
    )
    if nbytes not in (None, itemsize):
        raise ReadError(
            f"{where}: its fill value has {nbytes} bytes, but its elements have {itemsize}; its"
            " metadata are damaged"
        )


def fill_value(
    plist: h5py.h5p.PropDCID,
    base: np.dtype[Any],
    extra: tuple[int, ...],
    *,
    whenever: bool = False,
) -> NDArray[Any]:
    """Return what HDF5 gives for values never written: zeros unless it may use a fill value.

    `whenever`: whatever the fill time, which does not matter to virtual datasets.
    """
    fill = np.zeros((), base)
    if _has_fill_value(plist) and (whenever or _is_filled(plist)):
        if extra:
            raise NotDirectError("an array type with a fill value of its own")
        plist.get_fill_value(fill)
    return fill


def fill_reference(
    dataset: Opened, dtype: np.dtype[Any], descriptor: int, *, whenever: bool = False
) -> NDArray[Any]:
    """Return what stands for elements of variable length that were never written.

    Parameters
    ----------
    dataset
        The dataset.
    dtype
        Of a reference: void.
    descriptor
        Of its file, where the fill value lies, as any other element does.
    whenever
        As in `fill_value`.
    """
    stored = b""
    if _has_fill_value(dataset.plist) and (whenever or _is_filled(dataset.plist)):
        stored = stored_fill(dataset.id, descriptor)
        if len(stored) not in (0, dtype.itemsize):
            raise NotDirectError("elements of variable length with a fill value of another type")
    return np.frombuffer(stored or bytes(dtype.itemsize), dtype)[0:1].reshape(())


def member_fill(dataset: Opened, member: tuple[str, ...]) -> bytes:
    """Return the bytes of a member's fill value; b"": zeros."""
    if not (_has_fill_value(dataset.plist) and _is_filled(dataset.plist)):
        return b""
    values: Any = np.zeros((), dataset.dtype)
    dataset.plist.get_fill_value(values)
    for name in member:
        values = values[name]
    return bytes(np.asarray(values).tobytes())


def _has_fill_value(plist: h5py.h5p.PropDCID) -> bool:
    return bool(plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED)


def _is_filled(plist: h5py.h5p.PropDCID) -> bool:
    known = h5py.h5d.FILL_TIME_ALLOC, h5py.h5d.FILL_TIME_IFSET, h5py.h5d.FILL_TIME_NEVER
    if plist.get_fill_time() not in known:
        raise NotDirectError(f"a fill time of {plist.get_fill_time()}, which HDF5 does not know")
    return bool(plist.get_fill_time() != h5py.h5d.FILL_TIME_NEVER)


def has_no_values(plist: h5py.h5p.PropDCID, layout: DatasetLayout) -> bool:
    """Tell whether HDF5 will refuse to read at all."""
    undefined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    chunks = layout.chunks
    allocated = layout.offset >= 0 if chunks is None else chunks.offset.size > 0
    return undefined and not allocated
