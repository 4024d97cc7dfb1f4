"""Byte ranges of a local file enter; their bytes leave, in the caller's memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ReadError

_IOV_MAX = 1024  # POSIX guarantees 16; Linux and macOS take this many buffers a call

# A map turns an I/O error into a fatal signal, so files are mapped only where their bytes come
# from this machine's own disks or memory.
_LOCAL_FILE_SYSTEMS = frozenset(
    "apfs bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs hfs iso9660 jfs overlay ramfs rootfs"
    " squashfs tmpfs ufs vfat xfs zfs".split()
)


_CAN_MAP: dict[int, bool] = {}  # by device number

IoMode = Literal["auto", "pread", "map"]


class LocalFile:
    """A file on this machine, open for reading. Safe to use from many threads.

    No HDF5 lock is held: a writer may open the file meanwhile.

    Parameters
    ----------
    path
        The file.
    expected
        Device and inode of the file that was indexed.
    io
        ``"auto"``: it is mapped on local file systems; ``"map"``: on any; ``"pread"``: never.

    Attributes
    ----------
    descriptor
        For reading at any offset.
    map_address, map_nbytes
        Where it is mapped, for the compiled core; 0: not mapped.

    Raises
    ------
    ReadError
        If the file cannot be opened, is not the one that was indexed, or cannot be mapped.
    """

    def __init__(self, path: str, expected: tuple[int, int], io: IoMode = "auto") -> None:
        self.path = path
        self.io: IoMode = io
        self.map_address = self.map_nbytes = 0
        self._map: mmap.mmap | None = None
        try:
            # A file object: where Ctrl-C strikes before anyone has it, it is closed all the same.
            self._file = open(path, "rb", buffering=0)
            self.descriptor = self._file.fileno()
        except OSError as error:
            raise ReadError(f"cannot open {path}: {error.strerror}") from error
        if file_id(self.descriptor) != expected:
            self.close()
            raise replaced(path)
        if may_map(path, io):
            self._make_map()

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on.

        The GIL is dropped meanwhile; a read that the system cuts short is taken up again.

        Raises
        ------
        ReadError
            If the file ends too early, or the system reports an error; the message names the
            file and the byte.
        """
        if self.io == "map":
            self._copy(offset, buffers)
            return
        while buffers:
            try:
                count = os.preadv(self.descriptor, buffers[:_IOV_MAX], offset)
            except OSError as error:
                raise ReadError(
                    f"{self.path}: reading at byte {offset} failed: {error.strerror}"
                ) from error
            if len(buffers) == 1 and count == buffers[0].nbytes:
                return
            if count == 0 and any(buffer.nbytes for buffer in buffers):
                raise self._too_short(offset)
            offset += count
            buffers = _skip(buffers, count)

    def read_rows(
        self, position: NDArray[np.int64], offset: NDArray[np.int64], rows: NDArray[np.uint8]
    ) -> None:
        """Fill some rows, those adjacent in the file in one read.

        Parameters
        ----------
        position, offset
            int64 (n,): which rows, and the first byte of each in the file, in ascending order.
        rows
            (m, nbytes), C-contiguous.

        Raises
        ------
        ReadError
            As `read_into` does.
        """
        nbytes = rows.shape[1]
        flat = rows.reshape(-1).data
        first = np.flatnonzero(np.diff(offset, prepend=-1 - nbytes) != nbytes).tolist()
        places, offsets = position.tolist(), offset.tolist()
        buffers = [flat[place * nbytes : (place + 1) * nbytes] for place in places]
        spans = zip(first, [*first[1:], len(places)], strict=True)
        runs = [buffers[begin : min(end, begin + _IOV_MAX)] for begin, end in spans]
        # A thread holds the GIL between its reads, and others wait for it: so with all prepared,
        # `map` goes from one read to the next without a line of Python.
        starts = [offsets[begin] for begin in first]
        try:
            counts = list(map(os.preadv, itertools.repeat(self.descriptor), runs, starts))
        except OSError:
            counts = []
        for i, (begin, end) in enumerate(itertools.pairwise([*first, len(places)])):
            if i >= len(counts) or counts[i] != nbytes * (end - begin):
                self.read_into(offsets[begin], buffers[begin:end])  # a short or failing read

    def is_cached(self, offset: int) -> bool:
        """Tell whether a byte can be had without waiting for a disk; False where nobody knows."""
        if self.io == "map":
            return True
        if self._map is None or not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return os.preadv(self.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not in the page cache; EOPNOTSUPP: this file system cannot tell
            return False

    def mapped(self, end: int) -> NDArray[np.uint8] | None:
        """Return the file as an array of bytes, or None where it should be read instead.

        Touching a page past the end of a file kills the process, so the size is checked here:
        ask before each use, and keep the array no longer than that.

        Raises
        ------
        ReadError
            If the file now ends before byte `end`.
        """
        if self._map is None:
            return None
        if len(self._map) < end or os.fstat(self.descriptor).st_size < end:
            raise self._too_short(end)
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Close the descriptor and the map. Idempotent."""
        self.descriptor = -1
        self._file.close()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # the traceback of an error may hold an array
                self._map.close()
            self._map = None

    def _copy(self, offset: int, buffers: list[memoryview]) -> None:
        mapped = self.mapped(offset + sum(buffer.nbytes for buffer in buffers))
        assert mapped is not None
        for buffer in buffers:
            np.copyto(np.frombuffer(buffer, np.uint8), mapped[offset : offset + buffer.nbytes])
            offset += buffer.nbytes

    def _too_short(self, offset: int) -> ReadError:
        size = os.fstat(self.descriptor).st_size
        return ReadError(
            f"{self.path} ends at byte {size}, before byte {offset}: it was cut short after it"
            " had been opened"
        )

    def _make_map(self) -> None:
        try:
            self._map = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
            data = np.frombuffer(self._map, np.uint8)
        except (OSError, ValueError, MemoryError) as error:
            if self.io == "map":
                self.close()
                raise ReadError(
                    f'{self.path} cannot be mapped into memory: {error}; read it with io="pread"'
                ) from error
            self._map = None
            return
        self.map_address, self.map_nbytes = data.ctypes.data, data.size


class LocalFiles:
    """Files on this machine, opened as they are needed. Safe to use from many threads.

    Parameters
    ----------
    kept
        Files that stay open while nobody reads from them; a mapped file takes two descriptors.
    io
        As for `LocalFile`.
    """

    def __init__(self, kept: int, io: IoMode = "auto") -> None:
        self._io: IoMode = io
        self._lock = threading.Lock()
        self._kept = kept
        self._files: OrderedDict[str, LocalFile] = OrderedDict()  # the latest use comes last
        self._users: dict[str, int] = {}

    @contextlib.contextmanager
    def using(self, path: str, expected: tuple[int, int]) -> Iterator[LocalFile]:
        """Give a file, open until the context ends.

        Raises
        ------
        ReadError
            If it cannot be opened, or has not the device and inode that are `expected`.
        """
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._users[path] += 1
                self._files.move_to_end(path)
        if file is None:
            file = self._opened(path, expected)
        try:
            yield file
        finally:
            with self._lock:
                self._users[path] -= 1
                unused = self._unused()
            for other in unused:
                other.close()

    def close(self) -> None:
        """Close all files. Idempotent."""
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
        for file in files:
            file.close()

    def _opened(self, path: str, expected: tuple[int, int]) -> LocalFile:
        file = LocalFile(path, expected, self._io)
        with self._lock:
            first = self._files.setdefault(path, file)  # another thread may have been faster
            self._users[path] = self._users.get(path, 0) + 1
        if first is not file:
            file.close()
        return first

    def _unused(self) -> list[LocalFile]:
        """Take out the files that have been out of use for longest, and are too many."""
        surplus = len(self._files) - self._kept
        if surplus <= 0:
            return []
        paths = [path for path in self._files if not self._users[path]][:surplus]
        for path in paths:
            del self._users[path]
        return [self._files.pop(path) for path in paths]


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Drop the first `count` bytes of a list of buffers."""
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []


def read_ahead(path: Path, nbytes: int) -> None:
    """Ask the system to read the first `nbytes` of a file, without waiting for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):  # it is a hint
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def file_id(descriptor: int) -> tuple[int, int]:
    """Return device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def replaced(path: str) -> ReadError:
    """Return the error for a file that is not the one that was indexed."""
    return ReadError(f"{path} was replaced while it was being opened; open it again")


def may_map(path: str, io: IoMode) -> bool:
    """Tell whether a file is mapped where that pays."""
    return io == "map" or (io == "auto" and can_map(path))


def can_map(path: str) -> bool:
    """Tell whether a file lies where mapping it is safe."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    if device not in _CAN_MAP:  # a device has one file system, however many files are opened
        _CAN_MAP[device] = file_system(Path(path)) in _LOCAL_FILE_SYSTEMS
    return _CAN_MAP[device]


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, as Linux names it; else ``""``."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    resolved = str(path.resolve())
    found: tuple[int, Any] = (-1, "")
    for line in lines:
        fields = line.split(" ")
        mount = fields[4].encode().decode("unicode_escape")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= found[0]:
            found = (len(mount), fields[fields.index("-") + 1])
    return str(found[1])
