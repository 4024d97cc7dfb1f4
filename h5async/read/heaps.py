"""Reads elements of variable length: `Sequences` enter, their values leave in given memory.

The compiled core finds and copies values (core/src/heap.h). The Python implementation here does the
same, and words the errors. The elements and files are not trusted.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, CoreWorker, address
from h5async.core.heap import INDEX_BITS, MOST_ADDRESS
from h5async.core.structures import IO_MODES, Event, FileStruct
from h5async.errors import ReaderClosedError, ReadError
from h5async.index.heapelements import DAMAGED, Sequences
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError
from h5async.io.stamps import FileStamp
from h5async.read.scratch import CLOSED

_NUM_INDICES = 1 << INDEX_BITS
_COLLECTION_HEAD = _OBJECT_HEAD = 16
_LEAST_COLLECTION, _WINDOW_NBYTES = 4096, 16 * 1024
_NULLS = -_NUM_INDICES  # places from here to -1 have no address

ReadInto = Callable[[int, list[memoryview]], None]


class HeapReader:
    """Reads sequences, of any datasets. Each thread has its own.

    Parameters
    ----------
    core
        The compiled core; None: all is done in Python.
    worker
        What this thread needs to call it; None: a new one.
    """

    def __init__(self, core: Core | None, worker: CoreWorker | None = None) -> None:
        self._core = core
        if core is not None:
            empty = np.empty(0, np.uint8)
            self._worker = worker or core.new_worker(empty, empty, (empty,) * 3)

    def read(
        self,
        sequences: Sequences,
        file: LocalFile,
        stamp: FileStamp,
        element: NDArray[np.int64],
        position: NDArray[np.int64],
        out: NDArray[np.uint8] | None,
    ) -> None:
        """Copy the values of some elements, those that lie together in the file one after another.

        Parameters
        ----------
        sequences, element
            Which ones: int64 (n,), in any order, also more than once.
        file, stamp
            The file that holds them, and its state.
        position, out
            Those of ``element[i]`` go to byte ``position[i]`` of `out`, as they are stored; int64
            (n,). `out` None: only their places are found.

        Raises
        ------
        ReadError
            If the heap is damaged, or the file cannot be read; the message names the element.
        FileEventError
            If what was read is worth nothing: the file has changed, or a page is missing.
        ReaderClosedError
            If nobody wants it any more.
        """
        core = self._core
        if core is None or not self._read_by_core(
            core, sequences, file, stamp, element, position, out
        ):
            file_nbytes = os.fstat(file.descriptor).st_size
            read_in_python(sequences, file.read_into, file_nbytes, element, position, out)

    def _read_by_core(
        self,
        core: Core,
        sequences: Sequences,
        file: LocalFile,
        stamp: FileStamp,
        element: NDArray[np.int64],
        position: NDArray[np.int64],
        out: NDArray[np.uint8] | None,
    ) -> bool:
        """Have the core do all; return whether it could."""
        heap = sequences.struct()
        opened = FileStruct(
            file.descriptor, IO_MODES[file.io], file.map_address or None, file.map_nbytes, *stamp
        )
        if file.has_swmr_writer:
            opened.nbytes = -1  # it changes all the time
        done = core.read_heap(
            *map(ctypes.byref, (heap, opened, self._worker.struct)),
            address(element),
            address(position),
            None if out is None else address(out),
            element.size,
            0 if out is None else out.size,
        )
        self._worker.note_return()
        if opened.event == Event.STOPPED:
            raise ReaderClosedError(CLOSED)
        if opened.event != Event.NONE:
            raise FileEventError(map_failed=opened.event == Event.FAULTED)
        return bool(done == element.size)


def read_in_python(
    sequences: Sequences,
    read_into: ReadInto,
    file_nbytes: int,
    element: NDArray[np.int64],
    position: NDArray[np.int64],
    out: NDArray[np.uint8] | None,
) -> None:
    """Do what the core's `read_heap` does; see `HeapReader.read` and `LocalFile.read_into`."""
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
                raise _DamageError(f"would end behind the file, of {self._file_nbytes} bytes")
            window = bytearray(nbytes)
            self._read_into(offset, [memoryview(window)])
            self._begin, self._window, begin = offset, bytes(window), 0
        return self._window[begin : begin + _OBJECT_HEAD]
