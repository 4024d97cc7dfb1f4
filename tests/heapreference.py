"""Reads elements of variable length in Python: what the core must read, and refuse."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.heap import INDEX_BITS, MOST_ADDRESS
from h5async.core.structures import Event
from h5async.errors import ReadError
from h5async.index.heapelements import DAMAGED, Sequences
from h5async.io.localfiles import FileEventError, LocalFile
from h5async.io.stamps import FileStamp
from h5async.read.collection import file_struct

_NUM_INDICES = 1 << INDEX_BITS
_COLLECTION_HEAD = _OBJECT_HEAD = 16
_LEAST_COLLECTION, _WINDOW_NBYTES = 4096, 16 * 1024
_NULLS = -_NUM_INDICES  # places from here to -1 have no address

ReadInto = Callable[[int, list[memoryview]], None]


class HeapReader:
    """Reads elements out of an open file by the core, or, with None, by what is here."""

    def __init__(self, core: Core | None) -> None:
        self._core, empty = core, np.empty(0, np.uint8)
        self._worker = None if core is None else core.new_worker(empty, empty, (empty,) * 3)

    def read(
        self,
        sequences: Sequences,
        file: LocalFile,
        stamp: FileStamp,
        element: NDArray[np.int64],
        position: NDArray[np.int64],
        out: NDArray[np.uint8] | None,
    ) -> None:
        """Copy the values of some elements to bytes `position` of `out`; None: find places."""
        if self._core is None:
            read_into = partial(_read_into, file.descriptor)
            nbytes = os.fstat(file.descriptor).st_size
            read_in_python(sequences, read_into, nbytes, element, position, out)
            return
        assert self._worker is not None
        opened = file_struct(file, stamp)
        done = self._core.read_heap(
            *map(ctypes.byref, (sequences.struct(), opened, self._worker.struct)),
            address(element),
            address(position),
            None if out is None else address(out),
            element.size,
            0 if out is None else out.size,
        )
        if opened.event != Event.NONE:
            raise FileEventError(map_failed=opened.event == Event.FAULTED)
        if done < element.size:
            raise ReadError(f"the core refuses element {element[done]}")


def _read_into(descriptor: int, offset: int, buffers: list[memoryview]) -> None:
    assert os.preadv(descriptor, buffers, offset) == sum(b.nbytes for b in buffers)


def read_in_python(
    sequences: Sequences,
    read_into: ReadInto,
    file_nbytes: int,
    element: NDArray[np.int64],
    position: NDArray[np.int64],
    out: NDArray[np.uint8] | None,
) -> None:
    """Copy the values of some elements to bytes `position` of `out`; None: find their places."""
    heap = _Heap(sequences, read_into, file_nbytes)
    order = np.argsort(-1 - sequences.place[element], kind="stable")
    for i in order.tolist():
        heap.find(int(element[i]))
    if out is None:
        return
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
