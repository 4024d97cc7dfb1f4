"""Opens local files, and tells which of them may be mapped into memory."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import sys
from collections.abc import Callable
from io import FileIO
from typing import Any, Literal

from h5async.config.files import FileName
from h5async.system.interruptions import suppressing

IoMode = Literal["auto", "pread", "map"]

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
