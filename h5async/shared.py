"""Sizes enter; memory that two processes share leaves, and places in it that can be sent.

Shared memory is one anonymous file. Both processes have its descriptor; it has no name in the file
system, and is gone with the last process that has it. Who makes a piece maps that piece, and who is
told of places maps the whole file once, and again when it has grown beyond that.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import tempfile
import threading
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Place(NamedTuple):
    """An array in shared memory.

    Attributes
    ----------
    offset
        Bytes from the beginning of the memory.
    shape, dtype
        Of the array, which is C-contiguous.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def page_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of whole pages, of this process alone; its base is the map.

    Raises
    ------
    MemoryError
        If the system refuses.
    """
    try:
        block = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{nbytes} bytes of whole pages: {error}") from error
    _ask_for_huge_pages(block)
    return np.ndarray((nbytes,), np.uint8, block)


def _ask_for_huge_pages(block: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)


class _Piece(NamedTuple):
    address: int
    offset: int
    nbytes: int


class SharedMemory:
    """Memory that a helper process has too. Safe to use from many threads.

    One process at a time may call `empty`.

    Parameters
    ----------
    fd
        Of memory that another process made; None: make new memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = _new_file()
        self.fd = fd
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._whole: NDArray[np.uint8] | None = None  # each map takes a descriptor

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory, which holds zeros; its pages are taken when they are written to.

        Raises
        ------
        MemoryError
            If the system refuses.
        """
        with self._lock:
            # The other process may have taken some.
            begin = -(-os.fstat(self.fd).st_size // mmap.ALLOCATIONGRANULARITY)
            offset = begin * mmap.ALLOCATIONGRANULARITY
            try:
                os.ftruncate(self.fd, offset + max(1, nbytes))
                memory = _map(self.fd, offset, nbytes)
            except (OSError, OverflowError, ValueError) as error:
                raise MemoryError(f"{nbytes} bytes of shared memory: {error}") from error
            self._pieces.append(_Piece(memory.ctypes.data, offset, nbytes))
            return memory

    def array(self, place: Place) -> NDArray[Any]:
        """Return the array at a place that the other process sent.

        Raises
        ------
        MemoryError
            If it cannot be mapped.
        """
        with self._lock:
            if self._whole is None or self._whole.nbytes < place.offset + place.nbytes:
                try:
                    self._whole = _map(self.fd, 0, os.fstat(self.fd).st_size)
                except (OSError, ValueError) as error:
                    raise MemoryError(f"shared memory cannot be mapped: {error}") from error
            return np.ndarray(place.shape, place.dtype, self._whole, place.offset)

    def adopt(self, place: Place) -> NDArray[Any]:
        """Return the array at a place, as if `empty` had made it here."""
        array = self.array(place)
        with self._lock:
            self._pieces.append(_Piece(array.ctypes.data, place.offset, place.nbytes))
        return array

    def discard(self, place: Place) -> None:
        """Give the pages of all that one call of `empty` gave back to the system.

        Whoever reads there finds zeros then. Where the system cannot, nothing happens.
        """
        if place.nbytes == 0 or not hasattr(mmap, "MADV_REMOVE"):
            return
        block: Any = self.array(place)
        while not isinstance(block, mmap.mmap):
            block = block.base
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_REMOVE, place.offset, place.nbytes)

    def place(self, array: NDArray[Any]) -> Place | None:
        """Return where an array lies; None where it is not of what `empty` gave."""
        address = array.ctypes.data
        # The latest first: a piece that nobody has any more is not mapped, and another one may lie
        # where it was.
        for piece in reversed(list(self._pieces)):
            if piece.address <= address and address + array.nbytes <= piece.address + piece.nbytes:
                offset = piece.offset + address - piece.address
                return Place(offset, array.shape, array.dtype)
        return None

    def close(self) -> None:
        """Let go of the descriptor; arrays stay as they are. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map(fd: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
    block = mmap.mmap(fd, max(1, nbytes), offset=offset)
    _ask_for_huge_pages(block)
    return np.ndarray((nbytes,), np.uint8, block)


def duplicate(fd: int) -> int:
    """Return another descriptor of the same file, which a child can be given under its number.

    (0, 1 and 2 are the standard streams there, also where they are not here.)
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _new_file() -> int:
    with _unnamed_file() as file:
        return duplicate(file.fileno())


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("h5async"), "r+b", buffering=0)
    return tempfile.TemporaryFile()
