"""Reads the attributes by which the CF conventions say how a dataset's values are packed.

An open dataset enters; the attributes leave as stored. `plan/cf.py` interprets them.
"""

from __future__ import annotations

import math

import h5py
import numpy as np

from h5async.errors import DatasetError
from h5async.index.layout import CfAttribute

_NUMBERS = (
    "scale_factor",
    "add_offset",
    "_FillValue",
    "missing_value",
    "valid_range",
    "valid_min",
    "valid_max",
)
_NAMES = (*_NUMBERS, "_Unsigned")
_MOST_VALUES = 64  # of an attribute: each is compared with all values read
_MOST_NBYTES = 1 << 16


def cf_attributes(dataset: h5py.h5d.DatasetID, where: str) -> tuple[CfAttribute, ...]:
    """Return the attributes of a dataset that say how it is packed.

    Raises
    ------
    DatasetError
        If an attribute has more values than any file needs.
    """
    if not h5py.h5a.get_num_attrs(dataset):
        return ()
    names = [name for name in _NAMES if h5py.h5a.exists(dataset, name.encode())]
    return tuple(_attribute(dataset, name, where) for name in names)


def _attribute(dataset: h5py.h5d.DatasetID, name: str, where: str) -> CfAttribute:
    found = h5py.h5a.open(dataset, name.encode())
    count = 0 if found.shape is None else math.prod(found.shape)
    nbytes = found.get_storage_size() if count else 0  # (h5py fails for 0)
    if count > _MOST_VALUES or nbytes > _MOST_NBYTES:
        raise DatasetError(
            f"{where}: its attribute {name} has {count:,} values of {nbytes:,} bytes, and"
            f" {_MOST_VALUES} of {_MOST_NBYTES:,} bytes are the most that decode_cf takes"
        )
    value = h5py.Dataset(dataset).attrs[name]
    if isinstance(value, h5py.Empty):
        return CfAttribute(name, "f8", b"")
    array = np.asarray(value)
    if array.dtype.kind in "iuf":
        return CfAttribute(name, array.dtype.str, array.tobytes())
    text = value if isinstance(value, str | bytes) else "".join(map(str, array.reshape(-1)))
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return CfAttribute(name, "", data)
