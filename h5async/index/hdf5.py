"""Queries HDF5: `Opened` is an open dataset, whose common facts are requested only once.

Also calls functions that h5py does not wrap, in the library that h5py has loaded; and reads the
fill value of elements that were never written; the digest that distinguishes a dataset from one
that takes its place; and attributes: names of dimensions, and how values are packed by the CF
conventions (`plan/cf.py` interprets these). netCDF-4 and h5py (`make_scale`, `attach_scale`) attach
scales, which are datasets, to dimensions; h5py also sets labels (`dims[0].label`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import (
    DamagedError,
    DatasetError,
    H5AsyncError,
    failed_read,
    is_lack_of_memory,
    out_of_memory,
)
from h5async.index.layout import CfAttribute, Indexed, normal_axis
from h5async.io.source import Source
from h5async.spelling import name_text, printable
from h5async.system.interruptions import suppressing

Extents = tuple[int, ...]
DimensionNames = tuple[tuple[str, ...], ...]


class NotDirectError(Exception):
    """Only h5py may read the dataset; the message is the reason."""


COLUMNS_REASON = (
    "columns of a contiguous dataset are read by mapping, which needs a local file system, or"
    ' io="map"'
)


class OtherKindError(DatasetError):
    """The object at a path is not an array, but may be a field of another kind."""


class reading:
    """Turns h5py's errors for `what` into a `ReadError`: damaged metadata may raise anything."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise an error that names the object, from h5py's."""
        if not isinstance(error, Exception) or isinstance(error, H5AsyncError):
            return
        if is_lack_of_memory(error):
            raise out_of_memory(self._what, error) from error
        raise failed_read(f"{self._what} cannot be read ({error})", error, None) from error


# Kinds of chunk indices (H5Dpublic.h).
B_TREE_V1, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY = 0, 2, 3, 4
_DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h


def stored_nbytes(dataset: h5py.h5d.DatasetID, corner: tuple[int, ...]) -> int:
    """Return the stored size of a chunk, looked up by its key; 0 if never written, or unknown.

    h5py's own `read_direct_chunk` takes the size of a chunk that was never written from an
    uninitialized variable, and allocates that.
    """
    offset = (ctypes.c_uint64 * len(corner))(*corner)
    return _ask_hdf5("H5Dget_chunk_storage_size", ctypes.c_uint64, dataset, offset, default=0)


@functools.cache
def function_address(name: str) -> int:
    """Return the address of a function of h5py's HDF5; 0 if it cannot be found."""
    function = hdf5_function(name)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache  # a ctypes function refers to itself: only the garbage collector would free it
def hdf5_function(name: str, *types: Any, result: Any = ctypes.c_int) -> Any:
    """Return a function of h5py's HDF5 that takes an identifier and these types, or None."""
    library = _library()
    if not hasattr(library, name):
        return None
    function = library[name]  # (an attribute would be one object, shared by all types)
    function.argtypes, function.restype = (ctypes.c_int64, *types), result
    return function


@functools.cache
def checksum_function() -> Callable[[bytes, int, int], int] | None:
    """Return HDF5's own checksum of metadata: of bytes, their number, and 0; None if it is hidden.

    It is `H5_checksum_metadata` of H5checksum.c, which is exported, but not documented.
    """
    address = function_address("H5_checksum_metadata")
    kind = ctypes.PYFUNCTYPE(ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint32)
    return kind(address) if address else None


@functools.cache
def _library() -> Any:
    """Return the HDF5 library that h5py's modules are linked with, or None if it cannot be found.

    A library of another version, or one that does not know an identifier of h5py's, is rejected.
    """
    with suppressing(AttributeError, OSError):
        library = ctypes.CDLL(h5py.h5p.__file__)
        version = [ctypes.c_uint() for _ in range(3)]
        is_valid = library.H5Iis_valid
        is_valid.argtypes, is_valid.restype = (ctypes.c_int64,), ctypes.c_int
        with h5py._objects.phil:
            library.H5get_libversion(*map(ctypes.byref, version))
            known = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if is_valid(known.id) <= 0:
                return None
        if tuple(number.value for number in version) == h5py.version.hdf5_version_tuple:
            return library
    return None


def _ask_hdf5(
    function: str,
    kind: type[ctypes.c_int | ctypes.c_uint | ctypes.c_uint64],
    identifier: h5py._objects.ObjectID,
    *arguments: ctypes.Array[ctypes.c_uint64],
    default: int | None = None,
) -> int:
    """Call a function of HDF5 that takes an identifier and arguments, and returns a number.

    If it fails or does not exist, return `default`, or raise NotDirectError.
    """
    found, status = kind(0), -1
    call = hdf5_function(function, *map(type, arguments), ctypes.POINTER(kind))
    if call is not None:
        with h5py._objects.phil:
            status = call(identifier.id, *arguments, ctypes.byref(found))
    if status >= 0:
        return int(found.value)
    if default is None:
        raise NotDirectError(f"HDF5 gives no result for {function}")
    return default


class Opened:
    """An open dataset of the file `source`.

    `plist` are its creation properties; `type` and `encoded_type` are its type as stored, and as
    encoded by HDF5; `chunks` are the dimensions of a chunk, empty if it has none.
    """

    def __init__(self, identifier: h5py.h5d.DatasetID, source: Source) -> None:
        self.id = identifier
        self.source = source
        self.plist = identifier.get_create_plist()
        self.layout_class = int(self.plist.get_layout())
        self.type = identifier.get_type()
        self.encoded_type = bytes(self.type.encode())
        is_chunked = self.layout_class == h5py.h5d.CHUNKED
        self.chunks: Extents = tuple(self.plist.get_chunk()) if is_chunked else ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element as stored; of a reference, for variable length."""
        is_text = isinstance(self.type, h5py.h5t.TypeStringID)
        if isinstance(self.type, h5py.h5t.TypeVlenID) or (is_text and self.type.is_variable_str()):
            # (HDF5 would return the size in memory.)
            return 4 + int(file_properties(self.id).get_sizes()[0]) + 4
        return int(self.type.get_size())

    @cached_property
    def properties(self) -> bytes:
        """Its creation properties as encoded by HDF5 (H5Pencode2); b"" if it cannot."""
        size = ctypes.c_size_t(0)
        encode = hdf5_function(
            "H5Pencode2", ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_int64
        )
        with h5py._objects.phil:
            if encode is None or encode(self.plist.id, None, ctypes.byref(size), 0) < 0:
                return b""
            encoded = ctypes.create_string_buffer(size.value)
            if encode(self.plist.id, encoded, ctypes.byref(size), 0) < 0:
                return b""
        return encoded.raw

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
        """Its maximum dimensions; None for unlimited."""
        most = self._space.get_simple_extent_dims(True)
        return tuple(None if extent == h5py.h5s.UNLIMITED else extent for extent in most)

    @cached_property
    def index_kind(self) -> int:
        """The kind of its chunk index; -1 if unknown."""
        return _ask_hdf5("H5Dget_chunk_index_type", ctypes.c_int, self.id, default=-1)

    @property
    def edges_are_raw(self) -> bool:
        """Whether chunks that reach over the dataset's edge are not filtered.

        NotDirectError if HDF5 cannot tell, and it matters.
        """
        if all(n % c == 0 for n, c in zip(self.extents, self.chunks, strict=True)):
            return False
        return edges_are_raw(self.plist)

    @property
    def offset(self) -> int:
        """The first byte of contiguous values in the file; -1 if they were never written.

        HDF5 adds the size of the userblock even to an undefined address. RuntimeError if the
        address is not valid.
        """
        found = self.id.get_offset()
        if found is None:
            return -1
        is_empty = self.id.get_storage_size() == 0
        is_undefined = is_empty and found == file_properties(self.id).get_userblock() - 1
        return -1 if is_undefined else int(found)

    @property
    def end(self) -> int:
        """The current size of the file."""
        return self.source.stamp().nbytes


def edges_are_raw(plist: h5py.h5p.PropDCID) -> bool:
    """Return whether a chunked dataset does not filter chunks that reach over its edge."""
    flags = _ask_hdf5("H5Pget_chunk_opts", ctypes.c_uint, plist)
    return bool(flags & _DONT_FILTER_PARTIAL_CHUNKS)


def file_properties(dataset: h5py.h5d.DatasetID) -> h5py.h5p.PropFCID:
    """Return the creation properties of a dataset's file."""
    return h5py.h5i.get_file_id(dataset).get_create_plist()


def indexed(dataset: Opened) -> Indexed:
    """Return the facts that distinguish a dataset from another one that takes its place later.

    The digest covers its type and creation properties as encoded by HDF5 (H5Tencode, H5Pencode2),
    and compact values, which are read with the index.
    """
    digest = hashlib.blake2b(dataset.encoded_type, digest_size=16)
    digest.update(dataset.properties)
    if dataset.layout_class == h5py.h5d.COMPACT and not dataset.id.dtype.hasobject:
        digest.update(np.asarray(h5py.Dataset(dataset.id)[...]).tobytes())
    return Indexed(digest.digest(), dataset.extents)


def require_fill(dataset: Opened, itemsize: int, where: str) -> None:
    """Reject a fill value of another size than an element: HDF5 would read memory beyond it.

    HDF5 reveals the size only in its encoding of all properties: two bytes follow the name of this
    property, then the size in eight (H5P__dcrt_fill_value_enc of H5Pdcpl.c).
    """
    if not itemsize or not _has_fill_value(dataset.plist):
        return
    _, name, value = dataset.properties.rpartition(b"fill_value\0")
    nbytes = int.from_bytes(value[2:10], "little", signed=True)
    if name and nbytes != itemsize:
        raise DamagedError(
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
    """Return HDF5's value for elements never written: the fill value if it is used, else zero.

    `whenever` ignores the fill time, which does not matter to virtual datasets.
    """
    fill = np.zeros((), base)
    if uses_fill_value(plist, whenever):
        if extra:
            raise NotDirectError("an array type with a fill value of its own")
        plist.get_fill_value(fill)
    return fill


def _has_fill_value(plist: h5py.h5p.PropDCID) -> bool:
    return bool(plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED)


def uses_fill_value(plist: h5py.h5p.PropDCID, whenever: bool = False) -> bool:
    """Return whether HDF5 returns a fill value; `whenever` as in `fill_value`."""
    if not _has_fill_value(plist) or whenever:
        return _has_fill_value(plist)
    time = plist.get_fill_time()
    if time not in (h5py.h5d.FILL_TIME_ALLOC, h5py.h5d.FILL_TIME_IFSET, h5py.h5d.FILL_TIME_NEVER):
        raise NotDirectError(f"a fill time of {time}, which HDF5 does not know")
    return bool(time != h5py.h5d.FILL_TIME_NEVER)


# --- attributes -----------------------------------------------------------------------------------

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

    A scale has two if h5py's `make_scale` got a name that is not its dataset's. Attributes are
    checked before they are read: HDF5's own functions for scales (H5DS) trust the types in a file.
    `known` caches the names of scales by address: HDF5 searches the whole file for a scale's path.
    """
    rank = int(dataset.rank)
    if not h5py.h5a.get_num_attrs(dataset):
        return ((),) * rank
    if _text(_attribute(dataset, "CLASS", ())) == "DIMENSION_SCALE":
        # A coordinate variable: it is the scale of its own first dimension.
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
    """Return the value of an attribute; None if it is missing, or not as expected."""
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
            " a number instead"
        )
    if not any(names):
        hint = (
            " (netCDF readers make up names such as phony_dim_0)" if axis.startswith(_PHONY) else ""
        )
        raise DatasetError(
            f'{where}: there is no dimension "{axis}", because its {rank} dimensions have no'
            f" names: no dimension scales are attached to it, and there are no labels{hint}; give"
            " the number of the dimension"
        )
    shown = ", ".join(
        " or ".join(f'"{printable(name)}"' for name in several) or f"number {dim} without a name"
        for dim, several in enumerate(names)
    )
    raise DatasetError(f'{where}: there is no dimension "{axis}"; its dimensions are {shown}')


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
            f"{where}: its attribute {name} has {count:,} values in {nbytes:,} bytes; decode_cf"
            f" accepts at most {_MOST_VALUES} in {_MOST_NBYTES:,} bytes"
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
