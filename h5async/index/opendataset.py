"""Defines `Opened`: an open dataset, and facts from HDF5 that are requested once.

Also the dtype of its elements, or of a member's; its fill value, which HDF5 returns for values that
were never written; and the digest that distinguishes it from a dataset that takes its place later.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, ReadError
from h5async.index.hdf5 import (
    NotDirectError,
    encoded_properties,
    fill_nbytes,
    index_kind,
    stored_fill,
)
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.storedtypes import StoredType, describe
from h5async.io.stores import Source
from h5async.spelling import name_bytes, name_text

Extents = tuple[int, ...]


class Opened:
    """An open dataset of the file `source`. Each question reaches HDF5 once, if at all.

    Attributes
    ----------
    plist, layout_class
        Its creation properties, and HDF5's layout class.
    type, encoded_type
        Its type as stored, and as encoded by HDF5.
    chunks
        Dimensions of a chunk; empty if it has none.
    """

    def __init__(self, identifier: h5py.h5d.DatasetID, source: Source) -> None:
        self.id = identifier
        self._source = source
        self.plist = identifier.get_create_plist()
        self.layout_class = int(self.plist.get_layout())
        self.type = identifier.get_type()
        self.encoded_type = bytes(self.type.encode())
        is_chunked = self.layout_class == h5py.h5d.CHUNKED
        self.chunks: Extents = tuple(self.plist.get_chunk()) if is_chunked else ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype; h5py raises any exception if there is none."""
        return describe(self.encoded_type).dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element as stored; for variable length, that is a reference."""
        is_text = isinstance(self.type, h5py.h5t.TypeStringID)
        if isinstance(self.type, h5py.h5t.TypeVlenID) or (is_text and self.type.is_variable_str()):
            # HDF5 returns the size in memory.
            created = h5py.h5i.get_file_id(self.id).get_create_plist()
            return 4 + int(created.get_sizes()[0]) + 4
        return int(self.type.get_size())

    @cached_property
    def properties(self) -> bytes:
        """Its creation properties as encoded by HDF5; b"" if it cannot."""
        return encoded_properties(self.plist)

    @cached_property
    def _space(self) -> h5py.h5s.SpaceID:
        return self.id.get_space()

    @cached_property
    def shape(self) -> Extents | None:
        """Its dimensions; None for a null dataspace. HDF5 may open sources to find them."""
        if self._space.get_simple_extent_type() == h5py.h5s.NULL:
            return None
        return tuple(self._space.get_simple_extent_dims())

    @property
    def extents(self) -> Extents:
        """Its dimensions; a null dataspace is an error."""
        assert self.shape is not None
        return self.shape

    @property
    def maxshape(self) -> tuple[int | None, ...]:
        """The limits of its growth; None for no limit."""
        most = self._space.get_simple_extent_dims(True)
        return tuple(None if extent == h5py.h5s.UNLIMITED else extent for extent in most)

    @cached_property
    def index_kind(self) -> int:
        """The kind of its chunk index; -1 if HDF5 does not say."""
        return index_kind(self.id)

    @property
    def offset(self) -> int:
        """The first byte of contiguous values in the file; -1 if they were never written.

        HDF5 adds the bytes of the userblock even to an undefined address. RuntimeError if it is not
        valid.
        """
        found = self.id.get_offset()
        if found is None:
            return -1
        if self.id.get_storage_size() == 0:
            created = h5py.h5i.get_file_id(self.id).get_create_plist()
            found = -1 if found == created.get_userblock() - 1 else found
        return int(found)

    @property
    def end(self) -> int:
        """The current size of the file."""
        return self._source.stamp().nbytes


def indexed(dataset: Opened) -> Indexed:
    """Return the facts that distinguish a dataset from another one that takes its place later.

    The digest covers its type and creation properties as encoded by HDF5 (H5Tencode, H5Pencode2),
    and compact values, which are read with the index.
    """
    digest = hashlib.blake2b(dataset.encoded_type, digest_size=16)
    digest.update(dataset.properties)
    if dataset.layout_class == h5py.h5d.COMPACT and not dataset.dtype.hasobject:
        digest.update(np.asarray(h5py.Dataset(dataset.id)[...]).tobytes())
    return Indexed(digest.digest(), dataset.extents)


def require_fill(dataset: Opened, itemsize: int, where: str) -> None:
    """Reject a fill value of another size: HDF5 would fill with the memory after it."""
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
    """Return HDF5's value for elements never written: zero unless it may use a fill value.

    `whenever` ignores the fill time, which does not matter to virtual datasets.
    """
    fill = np.zeros((), base)
    if _uses_fill_value(plist, whenever):
        if extra:
            raise NotDirectError("an array type with a fill value of its own")
        plist.get_fill_value(fill)
    return fill


def fill_reference(
    dataset: Opened, dtype: np.dtype[Any], source: Source, *, whenever: bool = False
) -> NDArray[Any]:
    """Return what stands for elements of variable length that were never written.

    It is a reference, of a void dtype, that lies in the file `source` as any other element does;
    `whenever` as in `fill_value`.
    """
    stored = b""
    if _uses_fill_value(dataset.plist, whenever):
        stored = stored_fill(dataset.id, source)
        if len(stored) not in (0, dtype.itemsize):
            raise NotDirectError("elements of variable length with a fill value of another type")
    return np.frombuffer(stored or bytes(dtype.itemsize), dtype)[0:1].reshape(())


def member_fill(dataset: Opened, member: tuple[str, ...]) -> bytes:
    """Return the bytes of a member's fill value; b"" for zeros."""
    if not _uses_fill_value(dataset.plist):
        return b""
    values: Any = np.zeros((), dataset.dtype)
    dataset.plist.get_fill_value(values)
    for name in member:
        values = values[name]
    return bytes(np.asarray(values).tobytes())


def _has_fill_value(plist: h5py.h5p.PropDCID) -> bool:
    return bool(plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED)


def _uses_fill_value(plist: h5py.h5p.PropDCID, whenever: bool = False) -> bool:
    if not _has_fill_value(plist) or whenever:
        return _has_fill_value(plist)
    time = plist.get_fill_time()
    if time not in (h5py.h5d.FILL_TIME_ALLOC, h5py.h5d.FILL_TIME_IFSET, h5py.h5d.FILL_TIME_NEVER):
        raise NotDirectError(f"a fill time of {time}, which HDF5 does not know")
    return bool(time != h5py.h5d.FILL_TIME_NEVER)


def has_no_values(plist: h5py.h5p.PropDCID, layout: DatasetLayout) -> bool:
    """Return whether HDF5 will refuse to read at all."""
    undefined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    chunks = layout.chunks
    allocated = layout.offset >= 0 if chunks is None else chunks.offset.size > 0
    return undefined and not allocated


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


def element_of(dataset: Opened, member: tuple[str, ...], where: str) -> StoredType:
    """Return the element of a dataset or, for a compound, its member at the path `member`.

    DatasetError, beginning with `where`, if there is no such member, or NumPy has no type for it.
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
        found = describe(stored.encode() if member else dataset.encoded_type)
        return found._replace(offset=offset)
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{where}: it has members with names that are not UTF-8, and h5py has no type for"
            " these; read each member by itself, as a path behind that of the dataset"
        ) from error
    except Exception as error:  # h5py has no one type for what it cannot express
        raise DatasetError(f"{where}: its type has no NumPy equivalent ({error})") from error
