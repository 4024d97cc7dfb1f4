"""Moves values of any datatype between files in HDF5's in-memory form, without conversion.

Only references are converted, to refer to the same objects in the other file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5i, h5o, h5s, h5t
from numpy.typing import NDArray

from h5async.errors import DatasetError, ReadError
from h5async.index.hdf5 import hdf5_function
from h5async.spelling import name_text

_ID, _POINTER, _TEXT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
_REGION = 1  # H5R_DATASET_REGION
HVL_NBYTES = 16  # hvl_t: a length and a pointer
Bytes = NDArray[np.uint8]


def call_hdf5(name: str, where: str, *arguments: Any, result: Any = ctypes.c_int) -> int:
    """Call an HDF5 function with integers, h5py objects, bytes, or arrays to point to.

    Raises ReadError, with a message that begins with `where`, if it fails.
    """
    types, values = [], []
    for one in arguments:
        is_text, is_pointer = isinstance(one, bytes), isinstance(one, np.ndarray)
        types.append(_TEXT if is_text else _POINTER if is_pointer else _ID)
        values.append(
            one if is_text else one.ctypes.data if is_pointer else getattr(one, "id", one)
        )
    function = hdf5_function(name, *types[1:], result=result)
    if function is None:
        raise ReadError(f"{where}: {name} is not found in the HDF5 library of h5py")
    try:
        with h5py._objects.phil:
            found = function(*values)
    except SystemError as error:  # HDF5 called a Python file object, which raised
        raise error.__cause__ or error from None
    if found < 0:
        raise ReadError(f"{where}: HDF5 failed ({name})")
    return int(found)


class RawValues(AbstractContextManager["RawValues"]):
    """Memory for `count` elements of a datatype; `bytes` is uint8 (count, bytes per element).

    Memory that HDF5 allocates for variable-length elements is freed on exit.
    """

    def __init__(self, kind: h5t.TypeID, count: int, where: str) -> None:
        self.kind, self.count, self.where = kind, count, where
        self.bytes: Bytes = np.zeros((count, kind.get_size()), np.uint8)

    def __exit__(self, *_: object) -> None:
        if self.count and has_pointers(self.kind):
            space = h5s.create_simple((self.count,))
            call_hdf5("H5Treclaim", self.where, self.kind, space, 0, self.bytes)

    def read(self, dataset: h5d.DatasetID, memory: h5s.SpaceID, selected: h5s.SpaceID) -> None:
        """Read the elements selected in a dataset into those selected in `memory`."""
        call_hdf5("H5Dread", self.where, dataset, self.kind, memory, selected, 0, self.bytes)

    def write(self, dataset: h5d.DatasetID, memory: h5s.SpaceID, selected: h5s.SpaceID) -> None:
        """Write the elements selected in `memory` to those selected in a dataset."""
        call_hdf5("H5Dwrite", self.where, dataset, self.kind, memory, selected, 0, self.bytes)


def write_raw(dataset: h5d.DatasetID, offset: tuple[int, ...], values: NDArray[Any]) -> None:
    """Write a block of fixed-size elements in stored form; `values` has a void dtype."""
    memory, selected = h5s.create_simple(values.shape), dataset.get_space()
    selected.select_hyperslab(offset, values.shape)
    data = np.ascontiguousarray(values)
    where = f"dataset {h5i.get_name(dataset)!r}"
    call_hdf5("H5Dwrite", where, dataset, dataset.get_type(), memory, selected, 0, data)


def raw_fill(dataset: h5d.DatasetID, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the fill value of fixed-size elements in stored form, with a void dtype."""
    fill, plist = np.zeros(1, dtype), dataset.get_create_plist()
    if plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
        call_hdf5("H5Pget_fill_value", "a fill value", plist, dataset.get_type(), fill)
    return fill


def copy_attribute(
    attribute: h5a.AttrID,
    target: h5py._objects.ObjectID,
    kind: h5t.TypeID,
    references: References,
    where: str,
) -> None:
    """Copy an attribute to an object in another file, where its datatype is `kind`."""
    stored, space = attribute.get_type(), attribute.get_space()
    plist = call_hdf5("H5Aget_create_plist", where, attribute, result=_ID)
    made = call_hdf5("H5Acreate2", where, target, attribute.name, kind, space, plist, 0, result=_ID)
    call_hdf5("H5Pclose", where, plist)
    try:
        with RawValues(stored, int(space.get_select_npoints()), where) as values:
            if values.count:
                call_hdf5("H5Aread", where, attribute, stored, values.bytes)
                references.change(values)
                call_hdf5("H5Awrite", where, made, stored, values.bytes)
    finally:
        call_hdf5("H5Aclose", where, made)


class Twin(NamedTuple):
    """The copy of an object in the other file: its path and its address."""

    path: bytes
    address: int


class References:
    """Converts references to a file's objects to refer to their copies in another file.

    `twins` maps addresses of objects to their copies. References to anything else become null, like
    those to a removed object. Copies at the paths `moved` have other rows at the same places, so
    region references to them raise `DatasetError`.
    """

    def __init__(
        self,
        source: h5py.h5f.FileID,
        target: h5py.h5f.FileID,
        twins: Mapping[int, Twin],
        moved: frozenset[str],
    ) -> None:
        self._source, self._target, self._twins, self._moved = source, target, twins, moved

    def change(self, values: RawValues) -> None:
        """Change the references in elements, in place."""
        if values.bytes.size and has_references(values.kind):
            for part, found in parts_of(values.kind, values.bytes):
                if isinstance(part, h5t.TypeReferenceID):
                    self._of_references(part, found, values.where)

    def are_same(self, one: RawValues, other: RawValues) -> bool:
        """Return whether values of the two files are equal; changes the references in both."""
        taken = [self._take_regions(one, self._source), self._take_regions(other, self._target)]
        regions = []
        for address, region in taken[0]:
            twin = self._twins.get(address)
            regions.append((0, b"") if twin is None else (twin.address, region))
        self.change(one)
        return regions == taken[1] and content(one.kind, one.bytes) == content(
            other.kind, other.bytes
        )

    def _take_regions(self, values: RawValues, file: h5py.h5f.FileID) -> list[tuple[int, bytes]]:
        """Return the object's address and the selection of each region reference; clears these.

        They cannot be compared otherwise: their bytes differ, and making one writes to the file.
        """
        taken = []
        if values.bytes.size and has_references(values.kind):
            for part, found in parts_of(values.kind, values.bytes):
                if isinstance(part, h5t.TypeReferenceID) and part.equal(h5t.STD_REF_DSETREG):
                    for reference in found:
                        region = _region_of(reference.copy(), file, values.where)
                        taken.append(
                            (0, b"") if region is None else (region[0], _selected(region[1]))
                        )
                    found[:] = 0
        return taken

    def _of_references(self, kind: h5t.TypeReferenceID, values: Bytes, where: str) -> None:
        if kind.equal(h5t.STD_REF_OBJ):
            old, which = np.unique(values.copy().view(np.uint64), return_inverse=True)
            null = Twin(b"", 0)
            new = np.array([self._twins.get(int(a), null).address for a in old], np.uint64)
            values[:] = new[which.reshape(-1)].view(np.uint8).reshape(values.shape)
        elif kind.equal(h5t.STD_REF_DSETREG):
            for i in range(len(values)):
                values[i] = self._of_region(values[i].copy(), where)
        else:
            raise DatasetError(f"{where}: references of a kind (H5T_STD_REF) that h5py lacks")

    def _of_region(self, reference: Bytes, where: str) -> Bytes:
        """Return a reference to the same region of the dataset in the other file."""
        new = np.zeros_like(reference)
        found = _region_of(reference, self._source, where)
        twin = None if found is None else self._twins.get(found[0])
        if found is not None and twin is not None:
            path = name_text(twin.path).strip("/")
            if path in self._moved:
                raise DatasetError(
                    f'{where}: a region reference leads to dataset "{path}", whose samples are'
                    " chosen or reordered; keep all samples of it, or leave the references out"
                )
            call_hdf5("H5Rcreate", where, new, self._target, twin.path, _REGION, found[1])
        return new


def _region_of(
    reference: Bytes, file: h5py.h5f.FileID, where: str
) -> tuple[int, h5s.SpaceID] | None:
    """Return the address of the dataset that a reference leads to, and what it selects there."""
    if not reference.any():
        return None
    try:
        found = call_hdf5("H5Rdereference2", where, file, 0, _REGION, reference, result=_ID)
    except ReadError:  # the dataset was removed
        return None
    dataset = h5i.wrap_identifier(found)
    region = call_hdf5("H5Rget_region", where, file, _REGION, reference, result=_ID)
    return h5o.get_info(dataset).addr, h5s.SpaceID(region)


def _selected(space: h5s.SpaceID) -> bytes:
    """Return the selection of a dataspace, without the extents, which a repack may change."""
    kind = space.get_select_type()
    if kind == h5s.SEL_POINTS:
        return bytes(space.get_select_elem_pointlist())
    if kind == h5s.SEL_HYPERSLABS:
        return bytes(space.get_select_hyper_blocklist())
    return str(kind).encode()


def parts_of(kind: h5t.TypeID, values: Bytes) -> Iterator[tuple[h5t.TypeID, Bytes]]:
    """Yield each datatype in elements (count, bytes per element) with a view of its values.

    Variable-length elements are followed by the values that their pointers lead to.
    """
    if isinstance(kind, h5t.TypeCompoundID):
        for i in range(kind.get_nmembers()):
            member, begin = kind.get_member_type(i), kind.get_member_offset(i)
            yield from parts_of(member, values[:, begin : begin + member.get_size()])
    elif isinstance(kind, h5t.TypeArrayID):
        base = kind.get_super()
        size = base.get_size()
        for begin in range(0, kind.get_size(), size):
            yield from parts_of(base, values[:, begin : begin + size])
    else:
        yield kind, values
        if isinstance(kind, h5t.TypeVlenID):
            base = kind.get_super()
            for count, pointer in values[:, :HVL_NBYTES].copy().view(np.uint64).tolist():
                if nbytes := count * base.get_size():
                    memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
                    elements = np.frombuffer(memory, np.uint8)
                    yield from parts_of(base, elements.reshape(-1, base.get_size()))


def content(kind: h5t.TypeID, values: Bytes) -> bytes:
    """Return the bytes of elements (count, bytes per element), with their pointers followed."""
    if not has_pointers(kind):
        return values.tobytes()
    found = []
    for part, own in parts_of(kind, values):
        if isinstance(part, h5t.TypeVlenID):
            own = own[:, : HVL_NBYTES // 2]  # lengths
        elif isinstance(part, h5t.TypeStringID) and part.is_variable_str():
            pointers = own[:, :8].copy().view(np.uint64).reshape(-1).tolist()
            found += [ctypes.string_at(one) + b"\0" if one else b"\1" for one in pointers]
            continue
        found.append(own.tobytes())
    return b"".join(found)


def has_references(kind: h5t.TypeID) -> bool:
    """Return whether elements of a datatype are or contain references."""
    return bool(kind.detect_class(h5t.REFERENCE))


def is_by_hdf5(kind: h5t.TypeID) -> bool:
    """Return whether the stored bytes of elements mean nothing outside their file."""
    return has_pointers(kind) or has_references(kind)


def has_pointers(kind: h5t.TypeID) -> bool:
    """Return whether elements of a datatype are or contain variable-length data."""
    if isinstance(kind, h5t.TypeStringID):
        return bool(kind.is_variable_str())
    if isinstance(kind, h5t.TypeCompoundID):
        return any(has_pointers(kind.get_member_type(i)) for i in range(kind.get_nmembers()))
    if isinstance(kind, h5t.TypeArrayID):
        return has_pointers(kind.get_super())
    return isinstance(kind, h5t.TypeVlenID)
