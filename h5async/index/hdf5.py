"""Calls HDF5 functions that h5py does not wrap, in the library that h5py has loaded.

A dataset or a property list of h5py enters; a number, a bool or bytes leave.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import h5py

from h5async.index.obstacles import NotDirectError
from h5async.system.interruptions import suppressing

# Kinds of chunk indices (H5Dpublic.h).
B_TREE_V1, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY = 0, 2, 3, 4
DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h


def index_kind(dataset: h5py.h5d.DatasetID) -> int:
    """Return the kind of chunk index; -1 if HDF5 does not say."""
    try:
        return _ask_hdf5("H5Dget_chunk_index_type", ctypes.c_int, dataset)
    except NotDirectError:
        return -1


def chunk_options(plist: h5py.h5p.PropDCID) -> int:
    """Return the flags of chunks at the dataset's edge; NotDirectError if HDF5 does not say."""
    return _ask_hdf5("H5Pget_chunk_opts", ctypes.c_uint, plist)


def stored_nbytes(dataset: h5py.h5d.DatasetID, corner: tuple[int, ...]) -> int:
    """Return the stored size of a chunk, looked up by its key; 0 if it was never written.

    Also 0 if HDF5 does not say. For a chunk that was never written, h5py's own `read_direct_chunk`
    allocates the length in an uninitialized variable.
    """
    offset = (ctypes.c_uint64 * len(corner))(*corner)
    try:
        return _ask_hdf5("H5Dget_chunk_storage_size", ctypes.c_uint64, dataset, offset)
    except NotDirectError:
        return 0


def fill_nbytes(properties: bytes) -> int | None:
    """Return the size of a fill value in bytes; None if HDF5 does not say.

    HDF5 only says so in its encoding of all `properties`: after this property's name come two
    bytes, then the size in eight (H5P__dcrt_fill_value_enc of H5Pdcpl.c).
    """
    _, name, value = properties.rpartition(b"fill_value\0")
    return int.from_bytes(value[2:10], "little", signed=True) if name else None


def encoded_properties(plist: h5py.h5p.PropDCID) -> bytes:
    """Return creation properties as encoded by HDF5 (H5Pencode2); b"" if it cannot."""
    encode = _hdf5_function(
        "H5Pencode2", ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_int64
    )
    if encode is None:
        return b""
    size = ctypes.c_size_t(0)
    with h5py._objects.phil:
        if encode(plist.id, None, ctypes.byref(size), 0) < 0:
            return b""
        encoded = ctypes.create_string_buffer(size.value)
        if encode(plist.id, encoded, ctypes.byref(size), 0) < 0:
            return b""
    return encoded.raw


def function_address(name: str) -> int:
    """Return the address of a function of h5py's HDF5; 0 if it cannot be found."""
    function = _hdf5_function(name)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache  # a function of ctypes refers to itself, so only a garbage collection frees it
def _hdf5_function(name: str, *types: Any) -> Any:
    """Return a function of h5py's HDF5 that takes an identifier and these types, or None."""
    library = _library()
    with suppressing(AttributeError):
        function = None if library is None else library[name]
        if function is None:
            return None
        function.argtypes, function.restype = (ctypes.c_int64, *types), ctypes.c_int
        return function
    return None


@functools.cache
def _library() -> Any:
    """Return h5py's HDF5 library, or None if it cannot be found.

    It is looked for among the libraries that h5py's modules are linked with. A library of another
    version, or one that does not know an identifier of h5py's, is rejected.
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
) -> int:
    """Call a function of HDF5 that takes an identifier and arguments, and returns a number."""
    found = kind(0)
    call = _hdf5_function(function, *map(type, arguments), ctypes.POINTER(kind))
    if call is None:
        raise NotDirectError(f"HDF5 does not answer {function}")
    with h5py._objects.phil:
        status = call(identifier.id, *arguments, ctypes.byref(found))
    if status < 0:
        raise NotDirectError(f"HDF5 does not answer {function}")
    return int(found.value)
