"""Converts dtypes, regions and filters to JSON values, and back. Pure.

Input may be anything: all functions that read raise `ValueError`, `TypeError`, `KeyError` or
`IndexError` for invalid values.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from h5async.codec.corefilters import CONVERSION
from h5async.codec.filters import Filter

_MOST_NESTED = 32  # compound types in compound types
_LARGEST = (1 << 62) - 1  # of a position or a size


class NotPortableError(Exception):
    """Something has no form that another process could read."""


def natural(value: object) -> int:
    """Return a number read from JSON, 0 or more."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is no number of something")
    return value


def naturals(values: object) -> tuple[int, ...]:
    """Return a list of numbers read from JSON, 0 or more."""
    if type(values) is not list:
        raise TypeError(f"{values!r} is no list")
    return tuple(map(natural, values))


def text(value: object) -> str:
    """Return text read from JSON."""
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value


# --- dtypes --------------------------------------------------------------------------------------


def dtype_to_json(dtype: np.dtype[Any]) -> object:
    """Return the input of `dtype_from_json` for a dtype, including h5py's metadata.

    NotPortableError if it has no such form.
    """
    found: dict[str, object] = {}
    if dtype.hasobject:
        raise NotPortableError(f"dtype {dtype}")
    if dtype.metadata is not None:
        found["metadata"] = _metadata_to_json(dict(dtype.metadata))
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        found.update(base=dtype_to_json(base), shape=list(shape))
    elif dtype.fields is not None:
        fields = dtype.fields
        names = list(dtype.names or ())
        if any(len(field) != 2 for field in fields.values()) or len(fields) != len(names):
            raise NotPortableError("a dtype with titles")
        found.update(
            names=names,
            formats=[dtype_to_json(fields[name][0]) for name in names],
            offsets=[int(fields[name][1]) for name in names],
            itemsize=dtype.itemsize,
        )
    elif not found:
        return dtype.str
    else:
        found["str"] = dtype.str
    return found


def dtype_from_json(found: object, depth: int = 0) -> np.dtype[Any]:
    """Return the dtype that `dtype_to_json` described."""
    if depth > _MOST_NESTED:
        raise ValueError("types are nested too deep")
    dtype: np.dtype[Any]
    if isinstance(found, str):
        dtype = np.dtype(found)
    elif isinstance(found, dict):
        kind: Any
        if "base" in found:
            kind = dtype_from_json(found["base"], depth + 1), naturals(found["shape"])
        elif "names" in found:
            kind = {
                "names": [text(name) for name in found["names"]],
                "formats": [dtype_from_json(one, depth + 1) for one in found["formats"]],
                "offsets": list(naturals(found["offsets"])),
                "itemsize": natural(found["itemsize"]),
            }
        else:
            kind = text(found["str"])
        metadata = found.get("metadata")
        dtype = np.dtype(kind, metadata=metadata) if metadata is not None else np.dtype(kind)
    else:
        raise TypeError(f"{found!r} is no dtype")
    if dtype.hasobject:
        raise ValueError("a dtype of objects")
    return dtype


def _metadata_to_json(metadata: dict[str, Any]) -> object:
    """Return h5py's metadata of a dtype: the names of an enumeration, or an encoding."""
    for name, value in metadata.items():
        is_enum = isinstance(value, dict) and all(
            isinstance(k, str) and type(v) is int for k, v in value.items()
        )
        if not isinstance(name, str) or not (is_enum or isinstance(value, str)):
            raise NotPortableError(f"a dtype with metadata {metadata!r}")
    return metadata


# --- filters and regions ----------------------------------------------------------------------


def filter_from_json(found: object) -> Filter:
    """Return a filter that was written as a list of its members."""
    number, parameters, name = cast("list[object]", found)
    number = CONVERSION if number == CONVERSION else natural(number)
    return Filter(number, naturals(parameters), text(name))


def region_to_json(region: tuple[slice, ...] | None) -> object:
    """Return a region of a row as lists of start, stop and step."""
    return None if region is None else [[s.start, s.stop, s.step] for s in region]


def region_from_json(found: object, row_shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Return a region that lies within a row."""
    if found is None:
        return None
    slices = []
    pairs = zip(cast("list[object]", found), row_shape, strict=True)
    for one, extent in pairs:
        start, stop, step = cast("list[object]", one)
        end, by = natural(stop), None if step is None else natural(step)
        if natural(start) >= end or end > extent or by == 0:
            raise ValueError("a region lies outside its rows")
        slices.append(slice(start, end, by))
    return tuple(slices)
