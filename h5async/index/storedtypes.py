"""Describes how elements are stored: like NumPy's, to be converted to these, or variable-length.

The first part finds h5py's dtype for a stored type, and whether the stored bytes are NumPy's. Even
in a thousand files, most datasets have one of a few types. So results are cached by encoded type.

The second part takes an open dataset of a simple variable-length datatype, and returns a
`VariableLength`. Elements of such a dataset are references to sequences of values, or strings, in
the global heap of the file, which the core reads. A sequence is simple if its values have a fixed
size and are stored like NumPy's. References are decoded to `Sequences` when a dataset is opened, so
that all lengths are known before anything else is read. Neither references nor files are trusted.
Fill values and compact values of such a dataset are references, too; HDF5 returns them converted,
so they are read from the object header.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import MOST_STEPS, Step, StepKind, parameters_of
from h5async.core.binding import Core, address
from h5async.errors import DamagedError, DatasetError
from h5async.index.hdf5 import NotDirectError, Opened, file_properties, uses_fill_value
from h5async.index.layout import Text
from h5async.io.indexreferences import NONSENSE, Format
from h5async.io.references import IS_SHARED, header_messages
from h5async.spelling import name_bytes, name_text
from h5async.system.interruptions import suppressing

_Number = (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID)
_STRINGS = {
    h5py.h5t.STR_NULLTERM: StepKind.ENDED,
    h5py.h5t.STR_NULLPAD: StepKind.COPY,
    h5py.h5t.STR_SPACEPAD: StepKind.PADDED,
}
_MOST_TEXTS = 64  # strings in an element
# Bits of exponent and mantissa, and the bias, of those small floats of the Open Compute Project
# whose largest exponent also encodes numbers.
_WITHOUT_INFINITY = {(4, 3, 7): "E4M3", (2, 3, 1): "E2M3", (3, 2, 3): "E3M2", (2, 1, 1): "E2M1"}


class StoredType(NamedTuple):
    """The NumPy equivalent of the type of a dataset's elements, or of one of their members.

    `conversion` holds the parameters of the filter that converts stored elements, including strings
    (`codec/filters.py`); empty if there is none.
    """

    dtype: np.dtype[Any]  # as in h5py
    is_numpys: bool  # whether the stored bytes are NumPy's, once strings are converted
    text: tuple[Text, ...]  # strings to convert in each element, or in each of an array type
    conversion: tuple[int, ...]
    offset: int = 0  # the first byte of a member within an element

    @property
    def unpacked(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype of a number, and the dimensions of its array type, outermost first."""
        base, shape = self.dtype, self.dtype.shape[:0]
        while base.subdtype is not None:  # NumPy's own attributes go one level deep
            shape += base.shape
            base = base.base
        return base, shape


def without_metadata(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype without h5py's metadata, unless it is a compound."""
    return dtype if dtype.metadata is None or dtype.fields else np.dtype(dtype.str)


@functools.lru_cache(maxsize=256)
def describe(encoded: bytes) -> StoredType:
    """Describe a type as encoded by H5Tencode; raises any exception if h5py has no dtype."""
    stored = h5py.h5t.decode(encoded)
    _refuse_small_floats(stored)
    dtype = stored.dtype
    if _is_stored_as(stored, dtype):
        return StoredType(dtype, True, (), ())
    base = dtype
    while isinstance(stored, h5py.h5t.TypeArrayID) and base.subdtype is not None:
        stored, base = stored.get_super(), base.base
    steps = _steps_of(stored, base)
    are_in_place = all(s.kind == StepKind.COPY and s.start == s.to for s in steps or [])
    if steps and are_in_place and stored.get_size() == base.itemsize:
        return StoredType(dtype, True, (), ())
    found = steps and parameters_of(base.itemsize, stored.get_size(), steps)
    text = _texts_of(steps or [], stored.get_size(), base.itemsize)
    return StoredType(dtype, text is not None, text or (), found or ())


def _refuse_small_floats(stored: h5py.h5t.TypeID) -> None:
    """Raise TypeError for types, or members, that HDF5 converts as if they had an infinity."""
    if isinstance(stored, h5py.h5t.TypeCompoundID):
        for i in range(stored.get_nmembers()):
            _refuse_small_floats(stored.get_member_type(i))
    elif isinstance(stored, h5py.h5t.TypeArrayID | h5py.h5t.TypeVlenID):
        _refuse_small_floats(stored.get_super())
    elif isinstance(stored, h5py.h5t.TypeFloatID) and stored.get_size() == 1:
        _, _, exponent, _, mantissa = stored.get_fields()
        name = _WITHOUT_INFINITY.get((exponent, mantissa, int(stored.get_ebias())))
        if name is not None:
            raise TypeError(
                f"{name} floats have no infinity, and HDF5 reads their largest values as infinity"
                " or NaN; convert them, for example with ml_dtypes, and store them as float16"
            )


def _steps_of(stored: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> list[Step] | None:
    """Return the conversion of a stored element to NumPy's; None if only HDF5 has one."""
    nbytes, size = dtype.itemsize, int(stored.get_size())
    if isinstance(stored, h5py.h5t.TypeArrayID) and dtype.subdtype is not None:
        return _steps_of_array(stored, dtype)
    if isinstance(stored, h5py.h5t.TypeCompoundID) and dtype.fields is not None:
        steps, end, names = [], 0, dtype.names or ()
        for i, name in enumerate(names):
            member, to = dtype.fields[name][:2]
            more = _steps_of(stored.get_member_type(i), member)
            # (In h5py a longer member overlaps the next one.)
            if more is None or stored.get_nmembers() != len(names) or to < end:
                return None
            end = to + member.itemsize
            steps += [step.moved(stored.get_member_offset(i), to) for step in more]
        return steps
    if isinstance(stored, h5py.h5t.TypeStringID):
        kind = _STRINGS.get(stored.get_strpad())
        is_same = not stored.is_variable_str() and dtype.kind == "S" and nbytes == size
        return [Step(kind, 0, 0, size, nbytes)] if is_same and kind is not None else None
    if _is_stored_as(stored, dtype):
        return [Step(StepKind.COPY, 0, 0, size, nbytes)]
    order = stored.get_order() if isinstance(stored, _Number) else None
    if order not in (h5py.h5t.ORDER_LE, h5py.h5t.ORDER_BE):
        return None
    is_big = order == h5py.h5t.ORDER_BE
    if nbytes > 1 and is_big == (dtype.newbyteorder("<") == dtype):
        return None
    at, precision = stored.get_offset(), stored.get_precision()
    if isinstance(stored, h5py.h5t.TypeFloatID):
        if dtype.kind != "f" or stored.get_norm() != h5py.h5t.NORM_IMPLIED:
            return None
        given = (*stored.get_fields(), int(stored.get_ebias()))
        return [Step(StepKind.FLOAT, 0, 0, size, nbytes, 1, is_big, given)]
    # (For single big-endian bytes, HDF5 only swaps the order, and so keeps their unused bits.)
    if dtype.kind not in "iu" or (is_big and size == 1):
        return None
    is_signed = dtype.kind == "i"
    return [Step(StepKind.BITS, 0, 0, size, nbytes, 1, is_big, (at, precision, is_signed))]


def _steps_of_array(stored: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> list[Step] | None:
    element = stored.get_super()
    steps, count = _steps_of(element, dtype.base), math.prod(dtype.shape)
    nbytes, size = dtype.base.itemsize, int(element.get_size())
    if not steps or not count:
        return None
    if len(steps) == 1 and steps[0].repeats * steps[0].nbytes == nbytes:  # no gaps between them
        if steps[0].repeats * steps[0].stored_nbytes == size:
            return [steps[0]._replace(repeats=count * steps[0].repeats)]
    if count * len(steps) > MOST_STEPS:
        return None
    return [step.moved(i * size, i * nbytes) for i in range(count) for step in steps]


def _texts_of(steps: list[Step], stored_nbytes: int, nbytes: int) -> tuple[Text, ...] | None:
    """Return the strings that differ from NumPy's; None if too many, or if other members differ."""
    are_alike = all(step.kind <= StepKind.PADDED and step.start == step.to for step in steps)
    # When HDF5 converts any member, it leaves gaps between members unchanged in memory.
    if not are_alike or not sum(s.repeats * s.nbytes for s in steps) == nbytes == stored_nbytes:
        return None
    strings = [step for step in steps if step.kind != StepKind.COPY]
    if sum(step.repeats for step in strings) > _MOST_TEXTS:
        return None
    return tuple(
        Text(step.to + number * step.nbytes, step.nbytes, step.kind == StepKind.PADDED)
        for step in strings
        for number in range(step.repeats)
    )


def _is_stored_as(stored: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """Return whether the bytes of a stored type are those of a dtype."""
    is_equal = None
    with suppressing(Exception):  # a type that h5py can read but not write
        is_equal = bool(stored.equal(h5py.h5t.py_create(dtype, logical=True)))
    if is_equal is not False:
        return bool(is_equal)
    if isinstance(stored, h5py.h5t.TypeIntegerID) and stored.get_size() == 1:
        # The byte order of a single byte is meaningless, but makes types unequal.
        is_whole = stored.get_precision() == 8 and stored.get_offset() == 0
        is_signed = stored.get_sign() != h5py.h5t.SGN_NONE
        return is_whole and dtype == np.dtype("i1" if is_signed else "u1")
    if isinstance(stored, h5py.h5t.TypeBitfieldID) and dtype.kind == "u":
        # h5py gives bitfields as unsigned integers, but would write those as integers.
        order = "BE" if dtype.str[0] == ">" else "LE"
        same = getattr(h5py.h5t, f"STD_B{8 * dtype.itemsize}{order}", None)
        return same is not None and bool(stored.equal(same))
    if dtype.kind == "c" and not isinstance(stored, h5py.h5t.TypeCompoundID):
        kind = f"COMPLEX_IEEE_F{4 * dtype.itemsize}{'BE' if dtype.str[0] == '>' else 'LE'}"
        same = getattr(h5py.h5t, kind, None)  # HDF5's own class, since 2.0
        return same is not None and bool(stored.equal(same))
    return False


def is_object(stored: h5py.h5t.TypeID) -> bool:
    """Return whether elements, or members of them, are of variable length, or references."""
    if isinstance(stored, h5py.h5t.TypeCompoundID):
        return any(is_object(stored.get_member_type(i)) for i in range(stored.get_nmembers()))
    if isinstance(stored, h5py.h5t.TypeArrayID):
        return is_object(stored.get_super())
    if isinstance(stored, h5py.h5t.TypeStringID):
        return bool(stored.is_variable_str())
    return isinstance(stored, h5py.h5t.TypeVlenID | h5py.h5t.TypeReferenceID)


def element_of(stored: h5py.h5t.TypeID, member: tuple[str, ...], where: str) -> StoredType:
    """Describe the type of a dataset or, for a compound, of its member at the path `member`.

    DatasetError, beginning with `where`, if there is no such member, or NumPy has no type for it.
    """
    offset = 0
    for depth, name in enumerate(member):
        label = "/".join(member[: depth + 1])
        if not isinstance(stored, h5py.h5t.TypeCompoundID):
            raise DatasetError(f'{where} has no member "{label}": it is not a compound type')
        names = [stored.get_member_name(i) for i in range(stored.get_nmembers())]
        encoded = name_bytes(name)
        if encoded not in names:
            listed = ", ".join(f'"{name_text(n)}"' for n in names)
            raise DatasetError(f'{where} has no member "{label}"; it has {listed}')
        offset += stored.get_member_offset(names.index(encoded))
        stored = stored.get_member_type(names.index(encoded))
    try:
        return describe(bytes(stored.encode()))._replace(offset=offset)
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{where}: it has members with names that are not UTF-8, and h5py has no type for"
            " these; read each member separately, with its name after the path of the dataset"
        ) from error
    except Exception as error:  # h5py raises any of several exceptions for unknown types
        raise DatasetError(f"{where}: its type has no NumPy equivalent ({error})") from error


# --- variable length ------------------------------------------------------------------------------

_SIZES = (4, 8)  # of addresses and of sizes in a file, in bytes
DAMAGED = "; the file is damaged"
DATASPACE, FILL_VALUE, LAYOUT = 0x0001, 0x0005, 0x0008  # message types
_UNKNOWN = "an object header of an unknown form"


@dataclass(frozen=True)
class VariableLength:
    """How the elements of a variable-length dataset are stored.

    `dtype` is that of one value of a sequence, in the byte order of the file (h5py returns the
    native one); uint8 for strings. It may have dimensions (`dtype.subdtype`).
    """

    dtype: np.dtype[Any]
    is_text: bool  # whether the elements are strings,
    is_ascii: bool  # and declared as ASCII, not UTF-8
    base: int  # the origin of addresses in the file: the size of its userblock
    address_nbytes: int  # bytes of an address in the file,
    size_nbytes: int  # and of a size

    @property
    def reference_nbytes(self) -> int:
        """Bytes of an element as stored (HDF5 only returns its size in memory)."""
        return 4 + self.address_nbytes + 4

    def is_like(self, other: VariableLength) -> bool:
        """Return whether elements of two files are alike, except for facts about the files."""
        return self == replace(other, base=self.base, size_nbytes=self.size_nbytes)


Forms = dict[str, VariableLength]  # by file


def variable_length(dataset: h5py.h5d.DatasetID) -> VariableLength | None:
    """Return how the elements of an open dataset are stored; None if they have a fixed size.

    The references may lie anywhere; those of a virtual dataset lie in its sources. NotDirectError
    if only h5py may read them; any exception of h5py if metadata are damaged.
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
    except Exception as error:  # h5py raises any of several exceptions for unknown types
        raise NotDirectError(f"sequences of a type that NumPy lacks ({error})") from error
    dtype = found.dtype
    if dtype.hasobject:
        raise NotDirectError("sequences of sequences, of strings of variable length or references")
    if not found.is_numpys or found.text or dtype.itemsize != stored.get_size():
        raise NotDirectError(f"sequences whose stored values differ from NumPy's {dtype}")
    return without_metadata(dtype)


@dataclass(frozen=True)
class Sequences:
    """The lengths and positions of the elements of a dataset, or of a part: 12 bytes each.

    Many threads may read them at once: a position is replaced when it is found, and all threads
    write the same number. `place`, int64 (n,), is the first byte of an element's values in the
    file, or ``-1 - (address << 16 | index)``, negative, until its heap collection was walked.
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

        A block is the number of its first reference, and the references: (n, reference_nbytes),
        C-contiguous. ReadError if an element is longer than the file, of `file_nbytes`.
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
        """Return a structure for the core, which will write to the positions."""
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
    """Return the reference that stands for variable-length elements that were never written.

    It has a void dtype, and is stored in the file like any other element; `whenever` as in
    `fill_value`.
    """
    stored = b""
    if uses_fill_value(dataset.plist, whenever):
        stored = _stored_fill(dataset)
        if len(stored) not in (0, dtype.itemsize):
            raise NotDirectError("elements of variable length with a fill value of another type")
    return np.frombuffer(stored or bytes(dtype.itemsize), dtype)[0:1].reshape(())


def _stored_fill(dataset: Opened) -> bytes:
    """Return the fill value, as stored, of a dataset that has one; b"" for zeros."""
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
    """Return the bytes after their count, which is a number of `width` bytes at `at`."""
    begin = at + width
    end = begin + int.from_bytes(body[at:begin], "little")
    if end > len(body):
        raise NotDirectError(_UNKNOWN)
    return body[begin:end]


def message_of(dataset: Opened, kind: int) -> tuple[int, bytes]:
    """Return the only message of a type in a dataset's object header: its file offset, and body.

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
