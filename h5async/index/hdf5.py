"""Reads what h5py does not wrap of HDF5: by functions of its library, and out of object headers.

A dataset or a property list of h5py enters; a number or bytes leave. The functions are those of the
library that h5py has loaded. Object headers ("Data Object Headers" of the HDF5 file format
specification) hold fill values and compact values as stored, which HDF5 only converts: elements of
variable length are references there. HDF5 has read the header before, so it is a valid one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import h5py

from h5async.errors import (
    DatasetError,
    H5AsyncError,
    ReadError,
    is_lack_of_memory,
    out_of_memory,
)
from h5async.io.stores import Source
from h5async.system.interruptions import suppressing


class NotDirectError(Exception):
    """Only h5py may read the dataset; the message is the reason."""


COLUMNS_REASON = (
    "columns of a contiguous dataset are read by mapping, which needs a local file system, or"
    ' io="map"'
)


class OtherKindError(DatasetError):
    """A path leads to an object that is not an array, but may be a field of another kind."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn h5py's errors for `what` into a `ReadError`: damaged metadata may raise anything."""
    try:
        yield
    except H5AsyncError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise out_of_memory(what, error) from error
        raise ReadError(f"{what} cannot be read ({error})") from error


# Kinds of chunk indices (H5Dpublic.h).
B_TREE_V1, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY = 0, 2, 3, 4
DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h
_FILL_VALUE, _LAYOUT, _CONTINUATION = 0x0005, 0x0008, 0x0010  # types of messages
_IS_SHARED = 2  # a flag: the message lies elsewhere
_MOST_BLOCKS, _MOST_NBYTES = 64, 1 << 26
_HAS_TIMES, _HAS_PHASES, _HAS_ORDER = 32, 16, 4  # flags of a header of version 2
_UNKNOWN = "an object header of an unknown form"


def index_kind(dataset: h5py.h5d.DatasetID) -> int:
    """Return the kind of chunk index; -1 if HDF5 does not say."""
    return _ask_hdf5("H5Dget_chunk_index_type", ctypes.c_int, dataset, default=-1)


def chunk_options(plist: h5py.h5p.PropDCID) -> int:
    """Return the flags of chunks at the dataset's edge; NotDirectError if HDF5 does not say."""
    return _ask_hdf5("H5Pget_chunk_opts", ctypes.c_uint, plist)


def stored_nbytes(dataset: h5py.h5d.DatasetID, corner: tuple[int, ...]) -> int:
    """Return the stored size of a chunk, looked up by its key; 0 if never written, or unknown.

    For a chunk that was never written, h5py's own `read_direct_chunk` allocates the length in an
    uninitialized variable.
    """
    offset = (ctypes.c_uint64 * len(corner))(*corner)
    return _ask_hdf5("H5Dget_chunk_storage_size", ctypes.c_uint64, dataset, offset, default=0)


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

    If it does not answer, return `default`, or raise NotDirectError.
    """
    found, status = kind(0), -1
    call = _hdf5_function(function, *map(type, arguments), ctypes.POINTER(kind))
    if call is not None:
        with h5py._objects.phil:
            status = call(identifier.id, *arguments, ctypes.byref(found))
    if status >= 0:
        return int(found.value)
    if default is None:
        raise NotDirectError(f"HDF5 does not answer {function}")
    return default


def stored_fill(dataset: h5py.h5d.DatasetID, source: Source) -> bytes:
    """Return the fill value of a dataset that has one, as stored in its file; b"" for zeros.

    NotDirectError if it cannot be found.
    """
    body = _message(dataset, source, _FILL_VALUE)
    if body[0] == 3:
        return _counted(body, 2, 4) if body[1] & 32 else b""
    if body[0] not in (1, 2):
        raise NotDirectError(f"a fill value of version {body[0]}")
    return _counted(body, 4, 4) if body[3] else b""


def stored_compact(dataset: h5py.h5d.DatasetID, source: Source) -> bytes:
    """Return the values of a compact dataset as stored; see `stored_fill`."""
    body = _message(dataset, source, _LAYOUT)
    if body[0] not in (3, 4, 5) or body[1] != 0:
        raise NotDirectError(f"compact values in a layout of version {body[0]}")
    return _counted(body, 2, 2)


def _counted(body: bytes, at: int, width: int) -> bytes:
    """Return bytes that follow their number."""
    begin = at + width
    end = begin + int.from_bytes(body[at:begin], "little")
    if end > len(body):
        raise NotDirectError(_UNKNOWN)
    return body[begin:end]


def _message(dataset: h5py.h5d.DatasetID, source: Source, kind: int) -> bytes:
    created = h5py.h5i.get_file_id(dataset).get_create_plist()
    base, widths = int(created.get_userblock()), created.get_sizes()
    address = base + int(h5py.h5o.get_info(dataset).addr)
    found = [
        (body, flags) for one, flags, body in messages(source, address, base, widths)
        if one == kind
    ]  # fmt: skip
    if len(found) != 1 or found[0][1] & _IS_SHARED or len(found[0][0]) < 4:
        raise NotDirectError(_UNKNOWN)
    return found[0][0]


def messages(
    source: Source, address: int, base: int, widths: tuple[int, int]
) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and body of each message of a header."""
    head = _read(source, address, 64)
    is_second = head[:4] == b"OHDR"
    extra = 0  # bytes between the head of a message and its body
    if is_second:
        flags = head[5]
        at = 6 + 16 * bool(flags & _HAS_TIMES) + 4 * bool(flags & _HAS_PHASES)
        width = 1 << (flags & 3)
        nbytes = int.from_bytes(head[at : at + width], "little")
        extra = 2 * bool(flags & _HAS_ORDER)
        blocks = [(address + at + width, nbytes)]
    elif head[0] == 1:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
    else:
        raise NotDirectError(_UNKNOWN)
    head_nbytes = 4 + extra if is_second else 8
    for number, (begin, nbytes) in enumerate(blocks):  # (which grows)
        if number == _MOST_BLOCKS:
            raise NotDirectError(_UNKNOWN)
        block, at = _read(source, begin, nbytes), 0
        while at + head_nbytes <= len(block):
            wide = 1 if is_second else 2  # bytes of a type
            kind = int.from_bytes(block[at : at + wide], "little")
            size = int.from_bytes(block[at + wide : at + wide + 2], "little")
            flags = block[at + wide + 2]
            body = block[at + head_nbytes : at + head_nbytes + size]
            if len(body) < size:
                raise NotDirectError(_UNKNOWN)
            if kind == _CONTINUATION:
                follows = base + int.from_bytes(body[: widths[0]], "little")
                length = int.from_bytes(body[widths[0] : sum(widths)], "little")
                # A signature and a checksum enclose those of version 2.
                blocks.append((follows + 4, length - 8) if is_second else (follows, length))
            else:
                yield kind, flags, body
            at += head_nbytes + size


def _read(source: Source, offset: int, nbytes: int) -> bytes:
    if not (0 <= offset < 1 << 63 and 0 <= nbytes <= _MOST_NBYTES):
        raise NotDirectError(_UNKNOWN)
    found = source.read(offset, nbytes)
    if len(found) < min(nbytes, 16):
        raise NotDirectError(_UNKNOWN)
    return found
