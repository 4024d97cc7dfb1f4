"""Reads attributes of a dataset: names of dimensions, and the packing of values by CF conventions.

An open dataset enters; names leave, or attributes as stored, which `plan/cf.py` interprets.
netCDF-4 and h5py (`make_scale`, `attach_scale`) attach scales, which are datasets, to dimensions;
h5py also sets labels (`dims[0].label`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from h5async.errors import DatasetError
from h5async.index.layout import CfAttribute, normal_axis
from h5async.spelling import name_text, printable
from h5async.system.interruptions import suppressing

DimensionNames = tuple[tuple[str, ...], ...]

_NOT_A_NAME = "This is a netCDF dimension but not a netCDF variable"  # of a scale without values
_PHONY = "phony_dim_"
_MOST_SCALES = 16  # of a dimension; files have one
_MOST_NBYTES = 1 << 16  # of an attribute
_CF_NAMES = (
    "scale_factor",
    "add_offset",
    "_FillValue",
    "missing_value",
    "valid_range",
    "valid_min",
    "valid_max",
    "_Unsigned",
)
_MOST_VALUES = 64  # of an attribute: each is compared with all values read


def dimension_names(
    dataset: h5py.h5d.DatasetID, known: dict[int, tuple[str, ...]]
) -> DimensionNames:
    """Return the names of each dimension of a dataset; most have one, or none.

    A scale has two if h5py's `make_scale` got another name than that of its dataset. Attributes are
    checked before they are read: HDF5's own functions for scales (H5DS) trust the types in a file.
    `known` caches names of the file's scales by address: HDF5 searches the file for a scale's path.
    """
    rank = int(dataset.rank)
    if not h5py.h5a.get_num_attrs(dataset):
        return ((),) * rank
    if _text(_attribute(dataset, "CLASS", ())) == "DIMENSION_SCALE":
        # A coordinate variable, which is its own first dimension.
        return (_scale_names(dataset, known), *((),) * (rank - 1))[:rank]
    scales = _attribute(dataset, "DIMENSION_LIST", (rank,), of_references=True)
    labels = _attribute(dataset, "DIMENSION_LABELS", (rank,))
    names: list[dict[str, None]] = [{} for _ in range(rank)]
    for found, references in zip(names, () if scales is None else scales, strict=False):
        for scale in _datasets(dataset, references):
            found.update(dict.fromkeys(_scale_names(scale, known)))
    for found, label in zip(names, () if labels is None else labels, strict=False):
        if _text(label):
            found[_text(label)] = None
    return tuple(map(tuple, names))


def _attribute(
    dataset: h5py.h5d.DatasetID,
    name: str,
    shape: tuple[int, ...],
    *,
    of_references: bool = False,
) -> Any:
    """Return the value of an attribute; None if it is not as expected."""
    if not h5py.h5a.exists(dataset, name.encode()):
        return None
    found = h5py.h5a.open(dataset, name.encode())
    if found.shape != shape or found.get_storage_size() > _MOST_NBYTES:
        return None
    if of_references:
        element = h5py.check_vlen_dtype(found.dtype)
        if element is None or h5py.check_ref_dtype(element) is not h5py.Reference:
            return None
    return h5py.Dataset(dataset).attrs[name]


def _datasets(
    dataset: h5py.h5d.DatasetID, references: Sequence[Any]
) -> Iterator[h5py.h5d.DatasetID]:
    """Yield the datasets that references lead to; others may lead to deleted objects."""
    for reference in references[:_MOST_SCALES]:
        with suppressing(ValueError, RuntimeError):
            found = h5py.h5r.dereference(reference, dataset)
            if isinstance(found, h5py.h5d.DatasetID):
                yield found


def _scale_names(scale: h5py.h5d.DatasetID, known: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    address = int(h5py.h5o.get_info(scale).addr)
    found = known.get(address)
    if found is None:
        own = _text(_attribute(scale, "NAME", ()))
        path = name_text(h5py.h5i.get_name(scale) or b"")
        names = path.rpartition("/")[2], "" if own.startswith(_NOT_A_NAME) else own
        found = known[address] = tuple(dict.fromkeys(name for name in names if name))
    return found


def _text(value: object) -> str:
    return name_text(value).rstrip("\0") if isinstance(value, str | bytes) else ""


def numbered_axis(axis: int | str, names: DimensionNames, rank: int, where: str) -> int:
    """Return the non-negative number of a dimension given by number or name.

    `names` are those of the dimensions; `rank` includes those of an array type, which have none.
    ConfigError if there is no dimension of that number; DatasetError if none has that name, or
    several do.
    """
    if not isinstance(axis, str):
        return normal_axis(axis, rank, where)
    found = [number for number, several in enumerate(names) if axis in several]
    if len(found) == 1:
        return found[0]
    if found:
        raise DatasetError(
            f'{where}: its dimensions {found[0]} and {found[1]} both have the name "{axis}"; give'
            " the number of the one that is meant"
        )
    if not any(names):
        hint = (
            " (readers of netCDF make names such as phony_dim_0 up)"
            if axis.startswith(_PHONY)
            else ""
        )
        raise DatasetError(
            f'{where}: there is no dimension "{axis}", because its {rank} dimensions have no'
            f" names: no dimension scales are attached to it, and there are no labels{hint}; give"
            " the number of the dimension"
        )
    raise DatasetError(
        f'{where}: there is no dimension "{axis}"; its dimensions are {shown_names(names)}'
    )


def shown_names(names: DimensionNames) -> str:
    """Return the names of dimensions for a message."""
    return ", ".join(
        " or ".join(f'"{printable(name)}"' for name in several) or f"number {dim} without a name"
        for dim, several in enumerate(names)
    )


def common_names(several: Sequence[DimensionNames]) -> DimensionNames:
    """Return, per dimension, the names that it has in all of several datasets of one rank."""
    return tuple(
        tuple(name for name in first if all(name in other for other in others))
        for first, *others in zip(*several, strict=False)
    )


def cf_attributes(dataset: h5py.h5d.DatasetID, where: str) -> tuple[CfAttribute, ...]:
    """Return the attributes of a dataset that say how it is packed.

    DatasetError if an attribute has more values than any file needs.
    """
    if not h5py.h5a.get_num_attrs(dataset):
        return ()
    names = [name for name in _CF_NAMES if h5py.h5a.exists(dataset, name.encode())]
    return tuple(_cf_attribute(dataset, name, where) for name in names)


def _cf_attribute(dataset: h5py.h5d.DatasetID, name: str, where: str) -> CfAttribute:
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
