"""Reads the datatype of a dataset, or of a member of it, as a NumPy dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import h5py
import numpy as np

from h5async.errors import DatasetError
from h5async.index.layoutfacts import Text
from h5async.index.opendataset import Opened
from h5async.index.storedtypes import describe
from h5async.spelling import name_bytes, name_text


class Element(NamedTuple):
    """An element of a dataset, or of a member of it.

    Attributes
    ----------
    dtype
        As in h5py.
    is_numpys, text
        Whether the stored bytes are NumPy's, once these strings are converted.
    conversion
        For whole elements: the filter that converts stored bytes, including these strings.
    offset
        Of a member: its first byte within an element.
    """

    dtype: np.dtype[Any]
    is_numpys: bool
    text: tuple[Text, ...]
    conversion: tuple[int, ...]
    offset: int

    @property
    def unpacked(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype of a number, and the dimensions of its array type, outermost first."""
        return _unpacked(self.dtype)


def _unpacked(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the base and the dimensions of a dtype; NumPy's own attributes go one level deep."""
    base, shape = dtype, dtype.shape[:0]
    while base.subdtype is not None:
        shape += base.shape
        base = base.base
    return base, shape


def has_objects(dataset: Opened) -> bool:
    """Return whether elements, or members of them, are of variable length, or references."""
    try:
        return bool(dataset.dtype.hasobject)
    except UnicodeDecodeError:  # h5py has no dtype for names of members that are not UTF-8
        return _is_object(dataset.type)


def _is_object(stored: h5py.h5t.TypeID) -> bool:
    if isinstance(stored, h5py.h5t.TypeCompoundID):
        return any(_is_object(stored.get_member_type(i)) for i in range(stored.get_nmembers()))
    if isinstance(stored, h5py.h5t.TypeArrayID):
        return _is_object(stored.get_super())
    if isinstance(stored, h5py.h5t.TypeStringID):
        return bool(stored.is_variable_str())
    return isinstance(stored, h5py.h5t.TypeVlenID | h5py.h5t.TypeReferenceID)


def element_of(dataset: Opened, member: tuple[str, ...], where: str) -> Element:
    """Return the element of a dataset or, for a compound, its member at the path `member`.

    Raises
    ------
    DatasetError
        If there is no such member, or NumPy has no type for it; it begins with `where`.
    """
    stored, offset = dataset.type, 0
    for depth, name in enumerate(member):
        label = "/".join(member[: depth + 1])
        if not isinstance(stored, h5py.h5t.TypeCompoundID):
            raise DatasetError(f'{where} has no member "{label}": it is no compound type')
        names = [stored.get_member_name(i) for i in range(stored.get_nmembers())]
        encoded = name_bytes(name)
        if encoded not in names:
            listed = ", ".join(f'"{name_text(n)}"' for n in names)
            raise DatasetError(f'{where} has no member "{label}"; it has {listed}')
        offset += stored.get_member_offset(names.index(encoded))
        stored = stored.get_member_type(names.index(encoded))
    try:
        return Element(*describe(stored.encode() if member else dataset.encoded_type), offset)
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{where}: it has members with names that are not UTF-8, and h5py has no type for"
            " these; read each member by itself, as a path behind that of the dataset"
        ) from error
    except Exception as error:  # h5py has no one type for what it cannot express
        raise DatasetError(f"{where}: its type has no NumPy equivalent ({error})") from error
