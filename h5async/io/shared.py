"""Sizes enter; memory that two processes share leaves, and places in it that can be sent.

Shared memory is one anonymous file. Both processes have its descriptor; it has no name in the file
system, and is gone with the last process that has it. Who makes a piece maps that piece, and who is
told of places maps the whole file once, and again when it has grown beyond that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import OutOfMemoryError
from h5async.system.interruptions import suppressing


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
    """Return memory of whole pages, of this process alone.

    Raises
    ------
    MemoryError
        If the system refuses.
    """
    try:
        return _mapped(None, -1, 0, nbytes)
    except (OSError, OverflowError, ctypes.ArgumentError) as error:
        raise MemoryError(f"{nbytes} bytes of whole pages: {error}") from error


def call_before_unmap(memory: NDArray[Any], function: Callable[[], None]) -> None:
    """Have a function called when the last array over some memory is gone, and before its pages go.

    What was registered last is called first; nothing is called at the end of the interpreter.

    Parameters
    ----------
    memory
        As `page_memory` and `SharedMemory.empty` return it.
    function
        Must not refer to the memory.
    """
    block = _block_of(memory)
    assert isinstance(block, _Map), "this memory is not mapped here"
    weakref.finalize(block, function).atexit = False


def _block_of(array: NDArray[Any]) -> object:
    """Return what an array and all its bases lie over."""
    block: Any = array
    while isinstance(block, np.ndarray):
        block = block.base
    return block


class SharedMemory:
    """Memory that a helper process has too. Safe to use from many threads.

    One process at a time may call `empty`.

    Parameters
    ----------
    fd
        Of memory that another process made; None: make new memory.

    Raises
    ------
    OSError
        If the system has no descriptor left.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = _new_file()
        self.fd = fd
        self._lock = threading.Lock()
        self._key = object()  # of its maps
        self._spare: NDArray[np.uint8] = np.empty(0, np.uint8)  # mapped, and not given out yet
        self._whole: NDArray[np.uint8] | None = None

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory of whole pages, which holds zeros; it is taken when it is written to.

        Raises
        ------
        OutOfMemoryError
            If the system refuses.
        """
        room = _whole_pages(nbytes)
        with self._lock:
            # What is small shares a map: a process has some 65,000 of them. What is large has its
            # own, and so lasts no longer than the arrays over it.
            if room >= _MAP_NBYTES:
                return self._grown(room)[:nbytes]
            if room > self._spare.nbytes:
                self._spare = self._grown(_MAP_NBYTES)
            memory, self._spare = self._spare[:nbytes], self._spare[room:]
            return memory

    def array(self, place: Place) -> NDArray[Any]:
        """Return the array at a place that the other process sent.

        Raises
        ------
        OutOfMemoryError
            If it cannot be mapped.
        """
        with self._lock:
            if self._whole is None or self._whole.nbytes < place.offset + place.nbytes:
                nbytes = os.fstat(self.fd).st_size
                try:
                    self._whole = _mapped(self._key, self.fd, 0, nbytes)
                except OSError as error:
                    raise _refusal(nbytes, error) from error
            return np.ndarray(place.shape, place.dtype, self._whole, place.offset)

    def discard(self, place: Place) -> None:
        """Give the pages of all that one call of `empty` gave back to the system.

        Whoever reads there finds zeros then. Where the system cannot, nothing happens.
        """
        if place.nbytes and hasattr(mmap, "MADV_REMOVE"):
            _libc().madvise(
                self.array(place).ctypes.data, _whole_pages(place.nbytes), mmap.MADV_REMOVE
            )

    def place(self, array: NDArray[Any]) -> Place | None:
        """Return where an array lies; None where it does not lie in this memory."""
        block = _block_of(array)
        if not isinstance(block, _Map) or block.key is not self._key:
            return None
        offset = block.offset + array.ctypes.data - block.address
        return Place(offset, array.shape, array.dtype)

    def close(self) -> None:
        """Let go of the descriptor and of all maps; arrays stay as they are. Idempotent."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            self._whole, self._spare = None, np.empty(0, np.uint8)

    def _grown(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory at the end of the file, which grows by that."""
        # The other process may have taken some.
        offset = _whole_pages(os.fstat(self.fd).st_size)
        try:
            os.ftruncate(self.fd, offset + nbytes)
            return _mapped(self._key, self.fd, offset, nbytes)
        except (OSError, OverflowError) as error:
            with suppressing(OSError):  # or the other process could not map the whole
                os.ftruncate(self.fd, offset)
            raise _refusal(nbytes, error) from error


class _Map:
    """Pages of a file, or of no file, in memory, until the last array over them is gone.

    (`mmap.mmap` would keep a descriptor each, and tells weak references of its end after it has
    unmapped the pages.)

    Attributes
    ----------
    key
        Of the `SharedMemory` that this is of; None: of none.
    offset, address
        Where it begins in the file, and in this process.
    """

    def __init__(self, key: object, fd: int, offset: int, nbytes: int) -> None:
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
        address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if address in (None, _MAP_FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.key, self.offset, self.address = key, offset, address
        # Not by `__del__`, which would come before what `call_before_unmap` registers. The first
        # finalizer comes last.
        weakref.finalize(self, libc.munmap, address, nbytes).atexit = False
        if hasattr(mmap, "MADV_HUGEPAGE"):
            libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # a kernel may be without them
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NBYTES = 1 << 18


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]  # off_t
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _mapped(key: object, fd: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
    return np.asarray(_Map(key, fd, offset, _whole_pages(nbytes)))[:nbytes]


def _whole_pages(nbytes: int) -> int:
    page = mmap.ALLOCATIONGRANULARITY
    return max(1, -(-nbytes // page)) * page


def _refusal(nbytes: int, error: Exception) -> OutOfMemoryError:
    """Say what can be done where the system gives no shared memory."""
    hint = "make batch_size or prefetch smaller"
    number = getattr(error, "errno", None)
    if number == errno.EFBIG:
        hint = "raise the limit on the size of files (ulimit -f), which counts here"
    elif number == errno.ENOMEM:
        hint += ", or raise the limits on address space (ulimit -v) and on maps (vm.max_map_count)"
    return OutOfMemoryError(
        f"{nbytes:,} bytes of shared memory are refused ({error}); {hint}, or read with"
        ' workers="thread"'
    )


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
