"""Recognizes simple variable-length datatypes, and decodes their references.

An open dataset enters; a `VariableLength` leaves. Elements of such a dataset are references to
sequences of values, or strings, in the global heap of the file, which the core reads. A sequence is
simple if its values have a fixed size and are stored like NumPy's. References are decoded to
`Sequences` when a dataset is opened, so that all lengths are known before anything else is read.
Neither references nor files are trusted.

Fill values and compact values of such a dataset are references, too. HDF5 only converts them, so
they are read out of the object header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.errors import DamagedError
from h5async.index.hdf5 import NotDirectError, Opened, file_properties, uses_fill_value
from h5async.index.storedtypes import describe, without_metadata
from h5async.io.indexreferences import NONSENSE, Format
from h5async.io.references import IS_SHARED, header_messages

_SIZES = (4, 8)  # of addresses and of sizes in a file, in bytes
DAMAGED = "; the file is damaged"
DATASPACE, FILL_VALUE, LAYOUT, MODIFIED = 0x0001, 0x0005, 0x0008, 0x0012  # types of messages
_UNKNOWN = "an object header of an unknown form"


@dataclass(frozen=True)
class VariableLength:
    """How the elements of a variable-length dataset are stored.

    `dtype` is that of one value of a sequence, in the byte order of the file (h5py gives the native
    one); uint8 for strings. It may have dimensions (`dtype.subdtype`).
    """

    dtype: np.dtype[Any]
    is_text: bool  # whether the elements are strings,
    is_ascii: bool  # and declared as ASCII, not UTF-8
    base: int  # the origin of addresses in the file: the size of its userblock
    address_nbytes: int  # of an address in the file
    size_nbytes: int  # of a size

    @property
    def reference_nbytes(self) -> int:
        """Bytes of an element as stored; HDF5 only returns its size in memory."""
        return 4 + self.address_nbytes + 4

    def is_like(self, other: VariableLength) -> bool:
        """Tell whether elements are the same in two files, but for what differs between files."""
        return self == replace(other, base=self.base, size_nbytes=self.size_nbytes)


Forms = dict[str, VariableLength]  # by file


def variable_length(dataset: h5py.h5d.DatasetID) -> VariableLength | None:
    """Return how the elements of an open dataset are stored; None if they are of fixed size.

    The references may lie anywhere; those of a virtual dataset lie in its sources. NotDirectError
    if only h5py may read them; any exception of h5py's if metadata are damaged.
    """
    stored = dataset.get_type()
    is_text = isinstance(stored, h5py.h5t.TypeStringID) and bool(stored.is_variable_str())
    if not is_text and not isinstance(stored, h5py.h5t.TypeVlenID):
        return None
    dtype = np.dtype(np.uint8) if is_text else _dtype_of(stored.get_super())
    created = file_properties(dataset)
    address_nbytes, size_nbytes = created.get_sizes()
    if address_nbytes not in _SIZES or size_nbytes not in _SIZES:
        raise NotDirectError(
            f"elements of variable length in a file with addresses of {address_nbytes} bytes and"
            f" sizes of {size_nbytes} bytes"
        )
    return VariableLength(
        dtype=dtype,
        is_text=is_text,
        is_ascii=is_text and stored.get_cset() == h5py.h5t.CSET_ASCII,
        base=int(created.get_userblock()),
        address_nbytes=int(address_nbytes),
        size_nbytes=int(size_nbytes),
    )


def _dtype_of(stored: h5py.h5t.TypeID) -> np.dtype[Any]:
    try:
        found = describe(bytes(stored.encode()))
    except Exception as error:  # h5py has no one type for what it cannot express
        raise NotDirectError(f"sequences of a type that NumPy lacks ({error})") from error
    dtype = found.dtype
    if dtype.hasobject:
        raise NotDirectError("sequences of sequences, of strings of variable length or references")
    if not found.is_numpys or found.text or dtype.itemsize != stored.get_size():
        raise NotDirectError(f"sequences whose stored values differ from NumPy's {dtype}")
    return without_metadata(dtype)


@dataclass(frozen=True)
class Sequences:
    """Elements of a dataset, or of a part of it: their lengths and positions.

    12 bytes each. Many threads may read them at once: positions are refined when they are found,
    and all threads write the same number. `place` is int64 (n,): the first byte of its values in
    the file; negative: ``-1 - (address << 16 | index)``, if its collection was not walked yet.
    """

    form: VariableLength  # how they are stored
    where: str  # the name of the dataset in messages: 'a.h5: dataset "tokens"'
    length: NDArray[np.uint32]  # (n,): the number of values of each; 0 if there is no address
    place: NDArray[np.int64]
    total: int  # of all values

    @classmethod
    def decoded(
        cls,
        count: int,
        blocks: Iterable[tuple[int, NDArray[np.uint8]]],
        form: VariableLength,
        file_nbytes: int,
        where: str,
        core: Core,
    ) -> Sequences:
        """Decode `count` references block by block: as stored, they take more memory.

        Blocks are the number of the first reference, and (n, reference_nbytes), C-contiguous. No
        element is longer than the file, of `file_nbytes`; otherwise that is a ReadError.
        """
        length, place, total = np.empty(count, np.uint32), np.empty(count, np.int64), 0
        for first, references in blocks:
            here = slice(first, first + len(references))
            found = cls(form, where, length[here], place[here], 0)
            heap, stored = found.struct(core), np.ascontiguousarray(references)
            more = core.decode_references(ctypes.byref(heap), address(stored), file_nbytes)
            if more < 0:
                number = -1 - more
                values = int.from_bytes(references[number, :4].tobytes(), "little")
                raise DamagedError(
                    f"{where}, element {first + number}: its {values} values of"
                    f" {form.dtype.itemsize} bytes do not fit into the file of {file_nbytes}"
                    f" bytes{DAMAGED}"
                )
            total += more
        return cls(form, where, length, place, total)

    def struct(self, core: Core) -> Any:
        """Return the structure for the core, which writes to the positions."""
        assert self.place.flags.writeable
        form = self.form
        return core.Heap(
            length=address(self.length),
            place=address(self.place),
            count=self.length.size,
            base=form.base,
            value_nbytes=form.dtype.itemsize,
            address_nbytes=form.address_nbytes,
            size_nbytes=form.size_nbytes,
            is_text=form.is_text,
        )


def fill_reference(
    dataset: Opened, dtype: np.dtype[Any], *, whenever: bool = False
) -> NDArray[Any]:
    """Return what stands for elements of variable length that were never written.

    It is a reference, of a void dtype, that lies in the file as any other element does;
    `whenever` as in `fill_value`.
    """
    stored = b""
    if uses_fill_value(dataset.plist, whenever):
        stored = _stored_fill(dataset)
        if len(stored) not in (0, dtype.itemsize):
            raise NotDirectError("elements of variable length with a fill value of another type")
    return np.frombuffer(stored or bytes(dtype.itemsize), dtype)[0:1].reshape(())


def _stored_fill(dataset: Opened) -> bytes:
    """Return the fill value of a dataset that has one, as stored; b"" for zeros."""
    _, body = message_of(dataset, FILL_VALUE)
    if body[0] == 3:
        return _counted(body, 2, 4) if body[1] & 32 else b""
    if body[0] not in (1, 2):
        raise NotDirectError(f"a fill value of version {body[0]}")
    return _counted(body, 4, 4) if body[3] else b""


def stored_compact(dataset: Opened) -> bytes:
    """Return the values of a compact dataset as stored; NotDirectError if they cannot be found."""
    _, body = message_of(dataset, LAYOUT)
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


def message_of(dataset: Opened, kind: int) -> tuple[int, bytes]:
    """Return the only message of a type in the object header of a dataset: its offset, and body.

    NotDirectError if it cannot be found.
    """
    created = file_properties(dataset.id)
    form = Format(int(created.get_userblock()), *created.get_sizes())
    address, read = form.base + int(h5py.h5o.get_info(dataset.id).addr), dataset.source.read
    try:
        listed = header_messages(read, address, form)
        found = [(at, body, flags) for at, one, flags, body in listed if one == kind]
    except NONSENSE as error:
        raise NotDirectError(_UNKNOWN) from error
    if len(found) != 1 or found[0][2] & IS_SHARED or len(found[0][1]) < 4:
        raise NotDirectError(_UNKNOWN)
    return found[0][:2]
