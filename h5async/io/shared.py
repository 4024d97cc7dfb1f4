"""Makes memory: shared between processes, with descriptions of arrays in it; and growing buffers.

Shared memory is one anonymous file. All processes have its descriptor; it has no name in the file
system, and disappears when the last process closes it. A process maps each part that it adds. To
access arrays described by another process, it maps the whole file once, and again when the file has
grown.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import OutOfMemoryError
from h5async.io.source import owned
from h5async.spelling import named
from h5async.system.interruptions import call_when_gone, suppressing

try:
    import fcntl
    import resource
except ImportError:  # Windows, where there are no helper processes
    fcntl = resource = None  # type: ignore[assignment]

_MAPS = hasattr(mmap, "MAP_ANONYMOUS")  # else NumPy allocates
MORE = 4  # a quarter more memory is allocated than requested


class ArraySpec(NamedTuple):
    """A C-contiguous array, `offset` bytes from the start of shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Its end, in bytes from the start of shared memory."""
        return self.offset + self.nbytes


def plain_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory, which is not pinned."""
    return np.empty(nbytes, np.uint8)


class Growing:
    """A buffer for filling one slot, with the largest size requested so far, and a quarter more.

    It grows only while its slot is filled, when its former content is no longer used. `make`
    returns new memory, uint8 (nbytes,), as a NumPy or a CuPy array. `nbytes` are allocated
    immediately, unless a `block` is given.
    """

    def __init__(self, make: Callable[[int], Any], nbytes: int = 0, block: Any = None) -> None:
        self._make = make
        self._block = make(nbytes) if nbytes and block is None else block

    def of(self, nbytes: int) -> Any:
        """Return `nbytes` of memory: the same memory each time, as long as it suffices."""
        if self._block is None or nbytes > self._block.nbytes:
            self._block = None  # freed first, because both together may be too much
            self._block = self._make(nbytes + nbytes // MORE)
        return self._block[:nbytes]


def page_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return whole pages, private to this process; `MemoryError` if the system refuses."""
    if not _MAPS:
        return np.zeros(_whole_pages(nbytes), np.uint8)[:nbytes]
    try:
        return _mapped(None, -1, 0, nbytes)
    except (OSError, OverflowError, ctypes.ArgumentError) as error:
        raise MemoryError(f"{nbytes} bytes of whole pages: {error}") from error


def call_before_unmap(
    memory: NDArray[Any], function: Callable[[], None]
) -> weakref.finalize[Any, Any]:
    """Call a function when the last array over some memory is gone, and before it is unmapped.

    `memory` is from `page_memory` or `SharedMemory.empty`; `function` must not refer to it. The
    function registered last is called first; none is called at interpreter exit. Calling the result
    calls the function now, and not again later.
    """
    block = _block_of(memory)
    assert isinstance(block, _Map), "this memory is not mapped here"
    found = weakref.finalize(block, function)
    found.atexit = False
    return found


def _block_of(array: NDArray[Any]) -> object:
    block: Any = array
    while isinstance(block, np.ndarray):
        block = block.base
    return block


class SharedMemory:
    """Memory shared with other processes. Safe to use from many threads and processes.

    `fd` is the descriptor of memory that another process made; None: make new memory. `OSError` is
    raised if the system has no descriptor left.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._file = _new_file() if fd is None else FileIO(fd)
        self.fd = self._file.fileno()
        self._lock = threading.Lock()
        self._key = object()  # distinguishes the maps of this memory from others
        self._spare: NDArray[np.uint8] = np.empty(0, np.uint8)  # mapped, but not in use yet
        self._whole: NDArray[np.uint8] | None = None

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory of whole pages, filled with zeros; writing to it allocates it.

        `OutOfMemoryError` is raised if the system refuses.
        """
        room = _whole_pages(nbytes)
        with self._lock:
            # Small arrays share a map, because a process may have only some 65,000 maps. A large
            # array has its own map, which is unmapped with it.
            if room >= _MAP_NBYTES:
                return self._grown(room)[:nbytes]
            if room > self._spare.nbytes:
                self._spare = self._grown(_MAP_NBYTES)
            memory, self._spare = self._spare[:nbytes], self._spare[room:]
            return memory

    def array(self, spec: ArraySpec) -> NDArray[Any]:
        """Return an array described elsewhere; `OutOfMemoryError` if it cannot be mapped."""
        with self._lock:
            if self._whole is None or self._whole.nbytes < spec.end:
                nbytes = os.fstat(self.fd).st_size
                try:
                    self._whole = _mapped(self._key, self.fd, 0, nbytes)
                except OSError as error:
                    raise _refusal(nbytes, error) from error
            array = np.ndarray(spec.shape, spec.dtype, self._whole, spec.offset)
        return array

    def discard(self, spec: ArraySpec) -> None:
        """Give memory from one call of `empty` back to the system; it then holds zeros.

        On systems that cannot do this, it is left as it is.
        """
        if spec.nbytes and hasattr(mmap, "MADV_REMOVE"):
            _libc().madvise(
                self.array(spec).ctypes.data, _whole_pages(spec.nbytes), mmap.MADV_REMOVE
            )

    def spec(self, array: NDArray[Any]) -> ArraySpec | None:
        """Describe an array to other processes; None if it is not in this memory."""
        block = _block_of(array)
        if not isinstance(block, _Map) or block.key is not self._key:
            return None
        offset = block.offset + array.ctypes.data - block.address
        return ArraySpec(offset, array.shape, array.dtype)

    def close(self) -> None:
        """Close the descriptor, and drop the maps; arrays remain valid. Idempotent."""
        with self._lock:
            self._file.close()
            self.fd = -1
            self._whole, self._spare = None, np.empty(0, np.uint8)

    def _grown(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory at the end of the file, which is extended."""
        # Other processes extend the file, too. (If one dies, the system releases its lock.)
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            offset = _whole_pages(os.fstat(self.fd).st_size)
            try:
                os.ftruncate(self.fd, offset + nbytes)
                return _mapped(self._key, self.fd, offset, nbytes)
            except (OSError, OverflowError) as error:
                with suppressing(OSError):  # otherwise others could not map the whole file
                    os.ftruncate(self.fd, offset)
                raise _refusal(nbytes, error) from error
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)


class _Map:
    """Pages of a file, or anonymous ones (`fd` < 0), mapped until the last array over them is gone.

    `mmap.mmap` would keep one descriptor each, and calls weak references only after unmapping.
    `key` identifies the `SharedMemory` it belongs to, if any; `offset` is its position in the file.
    """

    def __init__(
        self, key: object, fd: int, offset: int, nbytes: int, *, is_writable: bool = True
    ) -> None:
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        address = libc.mmap(None, nbytes, rights, flags, fd, offset)
        if address in (None, _MAP_FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.key, self.offset, self.address = key, offset, address
        # Not in `__del__`, which would run before the functions of `call_before_unmap`. The first
        # finalizer runs last.
        call_when_gone(self, libc.munmap, address, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # a hint: not in all kernels
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not is_writable),
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


def map_file(fd: int, nbytes: int) -> NDArray[np.uint8]:
    """Map the beginning of a file for reading; processes that map it share the memory.

    The descriptor may be closed afterwards. If the file is truncated later, touching pages beyond
    its end kills the process. `OSError` is raised if it cannot be mapped.
    """
    if not _MAPS:
        with open(fd, "rb", closefd=False) as file:
            return np.fromfile(file, np.uint8, nbytes)
    return np.asarray(_Map(None, fd, 0, _whole_pages(nbytes), is_writable=False))[:nbytes]


def forget_pages(array: NDArray[Any]) -> None:
    """Release the pages of an array from `map_file`; if used again, they are read again.

    Pages that only partly belong to the array are kept. Must not be called for other memory.
    """
    page = mmap.PAGESIZE
    begin = -(-array.ctypes.data // page) * page
    nbytes = (array.ctypes.data + array.nbytes) // page * page - begin
    if nbytes > 0 and sys.platform == "linux":  # elsewhere it may mean something else
        _libc().madvise(begin, nbytes, mmap.MADV_DONTNEED)


def _whole_pages(nbytes: int) -> int:
    page = mmap.ALLOCATIONGRANULARITY
    return max(1, -(-nbytes // page)) * page


def _refusal(nbytes: int, error: Exception) -> OutOfMemoryError:
    """Return the error for the system's refusal of shared memory, with a remedy."""
    hint = f"make {named('batch_size')} or {named('prefetch')} smaller"
    number = getattr(error, "errno", None)
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if number == errno.EFBIG and largest != resource.RLIM_INFINITY:
        hint = "raise the limit on the size of files (ulimit -f): it also limits shared memory"
    elif number == errno.ENOMEM:
        hint += ", or raise the limits on address space (ulimit -v) and on maps (vm.max_map_count)"
    return OutOfMemoryError(
        f"the system refuses {nbytes:,} bytes of shared memory ({error}); {hint}, or read with"
        f" {named('workers', 'thread')}"
    )


def duplicate(fd: int) -> int:
    """Return another descriptor of the same file, which a child can inherit under its number.

    It is never 0, 1 or 2, the child's standard streams, even if this process has closed its own.
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _new_file() -> FileIO:
    has_memfd = hasattr(os, "memfd_create")
    with owned(os.memfd_create, "h5async") if has_memfd else tempfile.TemporaryFile() as file:
        found = owned(fcntl.fcntl, file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    return found
