"""Opens local files and maps them, keeps as many of them open as it may, and reads from them.

The core reads: what is here gives it descriptors and maps. Other programs may change a file
meanwhile: reading goes on if it still holds what was indexed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from io import FileIO
from typing import Any, Literal

import numpy as np

from h5async.config.files import FileName
from h5async.errors import H5AsyncError, ReadError
from h5async.io.keptfiles import KeptFiles
from h5async.io.openfailure import SIGNATURE
from h5async.io.stamps import FileStamp, changed, lies_at, replaced, settled
from h5async.spelling import named
from h5async.system.interruptions import interruption, suppressing

IoMode = Literal["auto", "pread", "map"]

_SUPERBLOCK_HEAD_NBYTES = 12
_TRIES = 5  # to read a slice of a batch while nobody changes the file

# In a memory map, an I/O error is a fatal signal. So files are mapped only if their bytes come from
# this machine's own disks or memory. The numbers are Linux's (linux/magic.h, statfs(2)).
_LOCAL_FILE_SYSTEMS = {
    0xCA451A4E: "bcachefs",
    0x9123683E: "btrfs",
    0xE0F5E1E2: "erofs",
    0x2011BAB0: "exfat",
    0xEF53: "ext2, ext3 or ext4",
    0xF2F52010: "f2fs",
    0x4244: "hfs",
    0x482B: "hfsplus",
    0x9660: "iso9660",
    0x3153464A: "jfs",
    0x794C7630: "overlay",
    0x858458F6: "ramfs",
    0x73717368: "squashfs",
    0x01021994: "tmpfs",
    0x00011954: "ufs",
    0x4D44: "vfat",
    0x58465342: "xfs",
    0x2FC12FC1: "zfs",
}
_STATFS_NBYTES = 512  # larger than the structure on any machine


def owned(call: Callable[..., int], *arguments: object) -> FileIO:
    """Return a file that owns the descriptor returned by a C function.

    No Python code runs in between, where an exception raised by a signal handler would lose the
    number. A negative number raises `ValueError`.
    """
    return next(map(FileIO, map(call, *zip(arguments, strict=True)), ("rb",)))


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading, without waiting for the writer of a pipe.

    `OSError` is raised if it cannot be opened, or is not a regular file.
    """
    # `FileIO` would leave the descriptor of a directory open.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def may_map(file: str | int, io: IoMode) -> bool:
    """Tell whether a file, given by its path or an open descriptor, may be mapped."""
    return io == "map" or (io == "auto" and can_map(file))


def can_map(file: str | int) -> bool:
    """Tell whether a file, given by path or open descriptor, is safe to map. Thread-safe."""
    ask_path, ask_descriptor = _statfs()
    if ask_path is None:
        return False
    # The system is asked about the file itself, not the table of mounts, whose names would have to
    # be decoded, and which later mounts change.
    status = (ctypes.c_uint32 * (_STATFS_NBYTES // 4))()
    if isinstance(file, int):
        failed = ask_descriptor(file, status)
    else:
        failed = ask_path(os.fsencode(file), status)
    # The structure begins with the type: 32 bits, or on some machines 64, lower half first. (On
    # big-endian ones this is 0, and files are not mapped.)
    return not failed and int(status[0]) in _LOCAL_FILE_SYSTEMS


@functools.cache
def _statfs() -> tuple[Any, Any]:
    """Return the C functions that take a path and a descriptor; None except on Linux."""
    if sys.platform != "linux":
        return None, None
    libc = ctypes.CDLL(None)
    libc.statfs.argtypes = ctypes.c_char_p, ctypes.c_void_p
    libc.fstatfs.argtypes = ctypes.c_int, ctypes.c_void_p
    return libc.statfs, libc.fstatfs


def read_ahead(path: FileName, nbytes: int) -> None:
    """Ask the system to read the first `nbytes` of a file, without waiting for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppressing(OSError), open(path, "rb", buffering=0) as file:  # it is a hint
        os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_WILLNEED)


class LocalFile:
    """A file on this machine, open for reading. Safe to use from many threads.

    No HDF5 lock is held: a writer may open the file meanwhile. `ReadError` is raised if the file
    cannot be opened or mapped, or is not the one that was indexed, whose stamp is `expected`.

    With `io` ``"auto"`` it is mapped on local file systems, with ``"map"`` on any, with ``"pread"``
    never. A `file` that is already open is closed with this object; else it is opened by its path.
    """

    def __init__(
        self, path: str, expected: FileStamp, io: IoMode = "auto", *, file: FileIO | None = None
    ) -> None:
        self.path = path
        self.stamp = expected  # the state of the file that is known to hold what was indexed
        self.looking = threading.Lock()
        self.io: IoMode = io
        self.map_address = self.map_nbytes = 0  # for the compiled core; 0 if it is not mapped
        self._map: mmap.mmap | None = None
        try:
            file = open_regular(path) if file is None else file
        except OSError as error:
            raise ReadError(f"cannot open {path}: {error.strerror}") from error
        self._file, self.descriptor = file, file.fileno()
        if FileStamp.of(self.descriptor).file_id != expected.file_id:
            self.close()
            raise replaced(path)
        # A writer has the file open for SWMR, so that it changes all the time.
        self.has_swmr_writer = has_swmr_writer(self.descriptor)
        if may_map(self.descriptor, io):
            self._make_map()

    @property
    def open_name(self) -> str:
        """A path that opens the open file again, whatever lies at its own path now."""
        return f"{'/proc/self' if sys.platform == 'linux' else '/dev'}/fd/{self.descriptor}"

    def has_changed(self, since: FileStamp) -> bool:
        """Tell whether the file changed since a stamp, or another thread has found that it did."""
        if self.has_swmr_writer and since is self.stamp and has_swmr_writer(self.descriptor):
            return False
        return since is not self.stamp or FileStamp.of(self.descriptor) != since

    def stop_mapping(self) -> None:
        """Use reads from now on, whose errors say why; threads that use the map keep it."""
        self.io = "pread"
        self.map_address = self.map_nbytes = 0

    def close(self) -> None:
        """Close the descriptor and the map. Idempotent."""
        self.descriptor = -1
        self._file.close()
        if self._map is not None:
            with suppressing(BufferError):  # the traceback of an error may hold an array
                self._map.close()
            self._map = None

    def _make_map(self) -> None:
        try:
            self._map = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, MemoryError) as error:
            if self.io == "map":
                is_empty = self.stamp.nbytes and not os.fstat(self.descriptor).st_size
                self.close()
                if is_empty:
                    raise changed(self.path, "it was cut short, and is empty now") from error
                raise ReadError(
                    f"{self.path} cannot be mapped into memory: {error}; read it with"
                    f" {named('io', 'pread')}"
                ) from error
            if interruption(error) is not None:
                raise
            self._map = None
            return
        data = np.frombuffer(self._map, np.uint8)
        self.map_address, self.map_nbytes = data.ctypes.data, data.size


class FileEventError(Exception):
    """What was read is invalid: the file has changed, or a page of its map cannot be read."""

    def __init__(self, map_failed: bool = False) -> None:
        super().__init__()
        self.map_failed = map_failed


class LocalFiles:
    """Files on this machine, opened as they are needed. Safe to use from many threads.

    `kept` files stay open while unused; a mapped file takes two descriptors. `io` is as for
    `LocalFile`. A changed file is refused, or, if `look_anew` is given, passed to it with its new
    stamp, in the thread that found the change: it returns if the file still holds what was indexed,
    and raises `ReadError` if not. Then `on_new_stamp` gets path and stamp. `open_elsewhere` gets
    the path of a file that cannot be opened, or was replaced, and returns the former file if it is
    open elsewhere, to be closed here.
    """

    def __init__(
        self,
        kept: int,
        io: IoMode = "auto",
        *,
        look_anew: Callable[[LocalFile, FileStamp], None] | None = None,
        on_new_stamp: Callable[[str, FileStamp], None] | None = None,
        open_elsewhere: Callable[[str], FileIO | None] | None = None,
    ) -> None:
        self._open_elsewhere = open_elsewhere
        self._on_new_stamp = on_new_stamp
        self._io: IoMode = io
        self._look_anew = look_anew or _refuse
        self._files: KeptFiles[LocalFile] = KeptFiles(kept)

    def read(
        self, path: str, expected: FileStamp, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Call `work`, which reads from a file, until the file was the same before and after it.

        `work` gets the open file and its stamp, and is called again if the file changed meanwhile
        but still holds what was indexed. It returns whether it has compared the stamp itself after
        all it read, and raises `FileEventError` if the stamp differed. `ReadError` is raised if the
        file cannot be opened, was replaced, or no longer holds what was indexed.
        """
        file = self._files.take(path, partial(self._opened, path, expected))
        try:
            for _ in range(_TRIES):
                stamp = file.stamp
                try:
                    if work(file, stamp) or not file.has_changed(stamp):
                        return
                except FileEventError as event:
                    if event.map_failed:
                        file.stop_mapping()
                except H5AsyncError as error:
                    if interruption(error) is not None or not file.has_changed(stamp):
                        raise
                self._look(file, stamp)
            self._read_beside_a_writer(file, work)
        finally:
            self._files.give_back(path)

    def _read_beside_a_writer(
        self, file: LocalFile, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Read from a file that changes all the time, and check it only afterwards."""
        stamp = file.stamp
        try:
            work(file, stamp._replace(nbytes=-1))  # so that it is not compared
        except FileEventError as event:
            raise changed(file.path, "a page of its memory map cannot be read") from event
        except H5AsyncError as error:
            self._look(file, stamp)
            raise changed(file.path, f"it is written to all the time ({error})") from error
        self._look(file, stamp)

    def _look(self, file: LocalFile, stamp: FileStamp) -> None:
        """Check in one thread that a changed file still holds what was indexed; others wait."""
        with file.looking:
            now = FileStamp.of(file.descriptor)
            if file.stamp is not stamp or now == stamp:
                return
            if not now.has_content_of(stamp):
                now = settled(partial(FileStamp.of, file.descriptor))
            # The removal of a file alone changes its status.
            if not now.has_content_of(stamp) or _has_name(file):
                self._look_anew(file, now)
            file.has_swmr_writer = has_swmr_writer(file.descriptor)
            file.stamp = now
            if self._on_new_stamp is not None:
                self._on_new_stamp(file.path, now)

    def open(self, path: str, expected: FileStamp) -> None:
        """Open a file before it is read; `ReadError` if it cannot be opened, or was replaced."""
        self._files.take(path, partial(self._opened, path, expected))
        self._files.give_back(path)

    def _opened(self, path: str, expected: FileStamp) -> LocalFile:
        try:
            return LocalFile(path, expected, self._io)
        except ReadError:
            found = None if self._open_elsewhere is None else self._open_elsewhere(path)
            if found is None:
                raise
        return LocalFile(path, expected, self._io, file=found)

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._files.close()


def _refuse(file: LocalFile, _stamp: FileStamp) -> None:
    raise changed(file.path, "whether it still holds what was indexed is unknown")


def _has_name(file: LocalFile) -> bool:
    """Tell whether a file still lies where it was opened, or where it was moved to."""
    try:
        path = os.readlink(f"/proc/self/fd/{file.descriptor}")
    except OSError:  # not Linux
        path = file.path
    return lies_at(path, file.stamp)


def has_swmr_writer(descriptor: int) -> bool:
    """Tell whether an HDF5 file is marked as open for writing by SWMR.

    The mark is in the file consistency flags of a superblock of version 3 ("Disk Format: Level 0A"
    of the HDF5 file format specification), at byte 0, 512, 1024, 2048, ...
    """
    begin = 0
    with suppressing(OSError):
        nbytes = os.fstat(descriptor).st_size
        while begin < nbytes:
            head = os.pread(descriptor, _SUPERBLOCK_HEAD_NBYTES, begin)
            if head.startswith(SIGNATURE):
                return len(head) == _SUPERBLOCK_HEAD_NBYTES and head[8] >= 3 and bool(head[11] & 4)
            begin = max(512, 2 * begin)
    return False
