"""Reads elements of variable length in Python: what the core must read, and refuse."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from collecting import made_up
from numpy.typing import NDArray

from h5async.core.binding import INDEX_BITS, MOST_ADDRESS, Core, address
from h5async.errors import ReadError
from h5async.index.layout import HeapFile
from h5async.index.storedtypes import DAMAGED, Sequences, VariableLength
from h5async.io.source import FileStamp, IoMode
from h5async.opening.filevalues import _with_heaps
from h5async.read.collection import Collection
from h5async.read.coretables import CoreTables, Scratch, ScratchSize

_NUM_INDICES = 1 << INDEX_BITS
_COLLECTION_HEAD = _OBJECT_HEAD = 16
_LEAST_COLLECTION, _WINDOW_NBYTES = 4096, 16 * 1024
_NULLS = -_NUM_INDICES  # places from here to -1 have no address

ReadInto = Callable[[int, list[memoryview]], None]


class _Python:
    """Decodes references like the core."""

    class Heap(ctypes.Structure):
        """The members that are used here, of the core's structure."""

        _fields_ = [(name, ctypes.c_void_p) for name in ("length", "place")] + [
            (name, ctypes.c_int64)
            for name in "count base value_nbytes address_nbytes size_nbytes is_text".split()
        ]

    @staticmethod
    def decode_references(heap: Any, stored: int, most_nbytes: int) -> int:
        """Decode like the core's `decode_references`."""
        found, width = heap._obj, heap._obj.address_nbytes
        fields = [("length", "<u4"), ("address", f"<u{width}"), ("index", "<u4")]
        table = _array(stored, found.count, fields)
        start, index = table["address"].astype(np.uint64), table["index"].astype(np.uint64)
        length = np.where(start == 0, 0, table["length"]).astype(np.uint32)
        too_long = np.flatnonzero(length > most_nbytes // found.value_nbytes)
        if too_long.size:
            return -1 - int(too_long[0])
        is_odd = (start > MOST_ADDRESS) | ((index >= _NUM_INDICES) & (start != 0))
        start[is_odd], index[is_odd | (start == 0)] = MOST_ADDRESS, 0
        _array(found.length, found.count, "u4")[...] = length
        place = -1 - (start << np.uint64(INDEX_BITS) | index).astype(np.int64)
        _array(found.place, found.count, "i8")[...] = place
        return int(length.sum(dtype=np.int64))


def _array(at: int, count: int, dtype: Any) -> NDArray[Any]:
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), dtype)


def decoded_by(
    references: NDArray[np.uint8],
    form: VariableLength,
    file_nbytes: int,
    where: str,
    core: Core | None,
) -> Sequences:
    """Decode references as one block, by the core or, with None, by what is here."""
    blocks = [(0, references)] if len(references) else []
    decoder: Any = core or _Python
    return Sequences.decoded(len(references), blocks, form, file_nbytes, where, decoder)


class HeapReader:
    """Reads elements of a file by the core, as a reader does, or, with None, by what is here.

    `memory`: the bytes of the file, if the core is to take them from there.
    """

    def __init__(
        self,
        core: Core | None,
        sequences: Sequences,
        path: str,
        io: IoMode = "auto",
        memory: NDArray[np.uint8] | None = None,
    ) -> None:
        self._path, self._sequences, self._collection = path, sequences, None
        if core is None:
            return
        stamp = FileStamp.of(path)
        references = made_up(path, (sequences.length.size,), (), [0], [], stamp=stamp)
        self._layout = _with_heaps(references, [HeapFile(path, stamp, 0, sequences)])
        self._scratch = Scratch.allocate(*ScratchSize.of([self._layout]))
        tables = CoreTables(
            core, [self._layout], io=io, most_files=9, kept_nbytes=[0], transforms=[None]
        )
        self._collection = Collection(core, tables)
        if memory is not None:
            row = tables._table[0]
            row["path"], row["map"], row["map_nbytes"] = 0, address(memory), memory.size

    def __enter__(self) -> HeapReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._collection is not None:
            self._collection.close()

    def read(self, element: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy the values of some elements to `out`, one behind the other."""
        if self._collection is None:
            with open(self._path, "rb") as file:
                read_into = partial(_read_into, file.fileno())
                nbytes = os.fstat(file.fileno()).st_size
                read_in_python(self._sequences, read_into, nbytes, element, out)
            return
        itemsize = self._layout.dtype.itemsize
        values = np.ndarray((out.size // itemsize,), f"V{itemsize}", out.data)
        batch = self._collection.new_batch([values], [values], element.size)
        count, _ = self._collection.plan(batch, element, [True], 1)
        if self._collection.read(batch, 0, count, self._scratch):
            raise ReadError("the core refuses elements")


def _read_into(descriptor: int, offset: int, buffers: list[memoryview]) -> None:
    assert os.preadv(descriptor, buffers, offset) == sum(b.nbytes for b in buffers)


def read_in_python(
    sequences: Sequences,
    read_into: ReadInto,
    file_nbytes: int,
    element: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Copy the values of some elements to `out`, one behind the other."""
    nbytes = sequences.length[element].astype(np.int64) * sequences.form.dtype.itemsize
    position = np.cumsum(nbytes) - nbytes
    heap = _Heap(sequences, read_into, file_nbytes)
    order = np.argsort(-1 - sequences.place[element], kind="stable")
    for i in order.tolist():
        heap.find(int(element[i]))
    for i in np.argsort(sequences.place[element], kind="stable").tolist():
        heap.copy(int(element[i]), int(position[i]), out)


class _Heap:
    """Finds and copies values of one dataset, and knows the objects of the latest collection."""

    def __init__(self, sequences: Sequences, read_into: ReadInto, file_nbytes: int) -> None:
        self._sequences = sequences
        self._read_into = read_into
        self._file_nbytes = file_nbytes
        self._bytes = _Window(read_into, file_nbytes)
        self._walked = 0
        self._objects: dict[int, tuple[int, int]] = {}

    def find(self, number: int) -> None:
        """Refine the place of an element."""
        place = int(self._sequences.place[number])
        if place >= _NULLS:
            return
        start, index = divmod(-1 - place, _NUM_INDICES)
        try:
            self._sequences.place[number] = self._find(start, index, self._nbytes_of(number))
        except _DamageError as error:
            begin = self._sequences.form.base + start
            raise ReadError(
                f"{self._sequences.where}, element {number}: the heap collection at byte"
                f" {begin}, where its values should lie, {error}{DAMAGED}"
            ) from None

    def copy(self, number: int, position: int, out: NDArray[np.uint8]) -> None:
        """Copy the values of an element whose place was found."""
        nbytes, sequences = self._nbytes_of(number), self._sequences
        assert 0 <= position <= out.size - nbytes
        if not nbytes:
            return
        target = out[position : position + nbytes]
        self._read_into(int(sequences.place[number]), [target.data])
        if sequences.form.is_text and not target.all():
            raise ReadError(
                f"{sequences.where}, element {number}: the string has a NUL byte, where HDF5 would"
                f" end it{DAMAGED}"
            )

    def _nbytes_of(self, number: int) -> int:
        return int(self._sequences.length[number]) * self._sequences.form.dtype.itemsize

    def _find(self, start: int, index: int, nbytes: int) -> int:
        if start == MOST_ADDRESS:
            raise _DamageError("cannot be: its address or the index of the object is too large")
        if start != self._walked:
            self._walked = 0
            self._objects = dict(self._walk(self._sequences.form.base + start))
            self._walked = start
        if index not in self._objects:
            raise _DamageError(f"has no object {index}")
        offset, found = self._objects[index]
        if found != nbytes:
            raise _DamageError(f"has {found} bytes in object {index}, instead of {nbytes}")
        return offset

    def _walk(self, begin: int) -> dict[int, tuple[int, int]]:
        """Return where the objects of a collection lie, and their bytes."""
        head = self._bytes(begin)
        if head[:4] != b"GCOL":
            raise _DamageError("has no signature")
        if head[4] != 1:
            raise _DamageError(f"is of version {head[4]}, not 1")
        nbytes = self._size(head)
        if not _LEAST_COLLECTION <= nbytes <= self._file_nbytes - begin:
            raise _DamageError(f"cannot have {nbytes} bytes in a file of {self._file_nbytes} bytes")
        objects: dict[int, tuple[int, int]] = {}
        at, end = begin + _COLLECTION_HEAD, begin + nbytes
        while end - at >= _OBJECT_HEAD:
            head = self._bytes(at)
            index, nbytes = struct.unpack_from("<H", head)[0], self._size(head)
            if index == 0:
                if nbytes != end - at:
                    raise _DamageError(f"has {nbytes} free bytes, instead of {end - at}")
                break
            if nbytes > end - at - _OBJECT_HEAD:
                raise _DamageError(f"ends before object {index}")
            if index in objects:
                raise _DamageError(f"has two objects {index}")
            objects[index] = at + _OBJECT_HEAD, nbytes
            at += _OBJECT_HEAD + (nbytes + 7) // 8 * 8
        return objects

    def _size(self, head: bytes) -> int:
        return int.from_bytes(head[8 : 8 + self._sequences.form.size_nbytes], "little")


class _DamageError(Exception):
    """A collection is damaged; the message continues one that names it."""


class _Window:
    """Gives the 16 bytes at an offset of a file, of which it reads more at once."""

    def __init__(self, read_into: ReadInto, file_nbytes: int) -> None:
        self._read_into, self._file_nbytes = read_into, file_nbytes
        self._begin, self._window = 0, b""

    def __call__(self, offset: int) -> bytes:
        begin = offset - self._begin
        if not 0 <= begin <= len(self._window) - _OBJECT_HEAD:
            nbytes = min(_WINDOW_NBYTES, self._file_nbytes - offset)
            if nbytes < _OBJECT_HEAD:
                raise _DamageError(f"would end beyond the {self._file_nbytes} bytes of the file")
            window = bytearray(nbytes)
            self._read_into(offset, [memoryview(window)])
            self._begin, self._window, begin = offset, bytes(window), 0
        return self._window[begin : begin + _OBJECT_HEAD]
