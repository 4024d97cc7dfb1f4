"""Reads elements of variable length: their references enter, values leave in given memory.

References are decoded first, so that all lengths are known before anything else is read. Then the
compiled core finds and copies values (core/src/heap.h). The Python implementation here does the
same, and words the errors. The elements and files are not trusted.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from ctypes import c_int32
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.core.heap import INDEX_BITS, MOST_ADDRESS, HeapStruct
from h5async.core.structures import IO_MODES, Event, FileStruct
from h5async.errors import ReaderClosedError, ReadError
from h5async.index.variablelength import VariableLength
from h5async.io.localfile import LocalFile
from h5async.io.localfiles import FileEventError
from h5async.io.stamps import FileStamp
from h5async.read.scratch import CLOSED

_NUM_INDICES = 1 << INDEX_BITS
_COLLECTION_HEAD = _OBJECT_HEAD = 16
_LEAST_COLLECTION, _WINDOW_NBYTES = 4096, 16 * 1024
_NULLS = -_NUM_INDICES  # places from here to -1 have no address
_DAMAGED = "; the file is damaged"

ReadInto = Callable[[int, list[memoryview]], None]


@dataclass(frozen=True)
class Sequences:
    """Elements of a dataset, or of a part of it: how long they are, and where they lie.

    12 bytes each. Many threads may read them at once: places are refined as they are found, and
    whoever does so writes the same number.

    Attributes
    ----------
    form
        How they are stored.
    where
        What messages call the dataset: ``'a.h5: dataset "tokens"'``.
    length
        uint32 (n,): how many values each has; 0 where there is no address.
    place
        int64 (n,): the first byte of its values in the file; below 0: ``-1 - (address << 16 |
        index)``, where its collection was not walked yet.
    total
        How many values there are in all.
    """

    form: VariableLength
    where: str
    length: NDArray[np.uint32]
    place: NDArray[np.int64]
    total: int

    @classmethod
    def decoded(
        cls,
        references: NDArray[np.uint8],
        form: VariableLength,
        file_nbytes: int,
        where: str,
        core: Core | None,
    ) -> Sequences:
        """Decode references.

        Parameters
        ----------
        references
            (n, reference_nbytes), C-contiguous: as stored.
        form, where
            As the attributes.
        file_nbytes
            Of the file: no element has more.
        core
            The compiled core; None: it is done in Python.

        Raises
        ------
        ReadError
            If an element is longer than the file.
        """
        count = len(references)
        found = cls(form, where, np.empty(count, np.uint32), np.empty(count, np.int64), 0)
        if core is None:
            total = _decode(references, found, file_nbytes)
        else:
            heap = found.struct()
            total = core.decode_references(
                ctypes.byref(heap), address(np.ascontiguousarray(references)), file_nbytes
            )
        if total < 0:
            number = -1 - total
            length = int.from_bytes(references[number, :4].tobytes(), "little")
            raise ReadError(
                f"{where}, element {number}: its {length} values of {form.dtype.itemsize} bytes do"
                f" not fit into the file of {file_nbytes} bytes{_DAMAGED}"
            )
        return cls(form, where, found.length, found.place, total)

    def struct(self) -> HeapStruct:
        """Return them as the core takes them, which writes to the places."""
        assert self.place.flags.writeable
        form = self.form
        return HeapStruct(
            length=address(self.length),
            place=address(self.place),
            count=self.length.size,
            base=form.base,
            value_nbytes=form.dtype.itemsize,
            address_nbytes=form.address_nbytes,
            size_nbytes=form.size_nbytes,
            is_text=form.is_text,
        )


class HeapReader:
    """Reads sequences, of any datasets. Each thread has its own.

    Parameters
    ----------
    core
        The compiled core; None: all is done in Python.
    stop
        Once it is not 0, nobody wants the rest.
    """

    def __init__(self, core: Core | None, stop: c_int32 | None = None) -> None:
        self._core = core
        if core is not None:
            empty = np.empty(0, np.uint8)
            self._worker = core.new_worker(empty, empty, (empty,) * 3, stop)
            self._scratch = np.zeros(core.heap_scratch_nbytes(), np.uint8)

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
            address(self._scratch),
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


def _decode(references: NDArray[np.uint8], found: Sequences, most_nbytes: int) -> int:
    """Do what the core's `decode_references` does."""
    width = found.form.address_nbytes
    fields = [("length", "<u4"), ("address", f"<u{width}"), ("index", "<u4")]
    stored = np.ascontiguousarray(references).view(np.dtype(fields)).reshape(-1)
    start, index = stored["address"].astype(np.uint64), stored["index"].astype(np.uint64)
    length = np.where(start == 0, 0, stored["length"]).astype(np.uint32)
    too_long = np.flatnonzero(length > most_nbytes // found.form.dtype.itemsize)
    if too_long.size:
        return -1 - int(too_long[0])
    is_odd = (start > MOST_ADDRESS) | ((index >= _NUM_INDICES) & (start != 0))
    start[is_odd], index[is_odd | (start == 0)] = MOST_ADDRESS, 0
    found.length[...] = length
    found.place[...] = -1 - (start << np.uint64(INDEX_BITS) | index).astype(np.int64)
    return int(length.sum(dtype=np.int64))


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
                f" {begin}, where its values should lie, {error}{_DAMAGED}"
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
                f" end it{_DAMAGED}"
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
