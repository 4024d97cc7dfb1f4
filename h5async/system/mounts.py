"""Finds the type of a file's file system, and whether the file may be mapped.

The system is asked about the file itself (``statfs``), not the table of mounts. So names of mounts
need not be decoded, later mounts count at once, and the answer takes a microsecond and need not be
kept.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

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


def can_map(file: str | int) -> bool:
    """Tell whether a file, given by path or open descriptor, is safe to map. Thread-safe."""
    return file_system(file) in _LOCAL_FILE_SYSTEMS


def file_system(file: str | int) -> int:
    """Return Linux's number for the type of a file's file system; 0 if unknown."""
    ask_path, ask_descriptor = _statfs()
    if ask_path is None:
        return 0
    status = (ctypes.c_uint32 * (_STATFS_NBYTES // 4))()
    if isinstance(file, int):
        failed = ask_descriptor(file, status)
    else:
        failed = ask_path(os.fsencode(file), status)
    # The structure begins with the type: 32 bits, or on some machines 64, lower half first. (On
    # big-endian ones this is 0, and files are not mapped.)
    return 0 if failed else int(status[0])


@functools.cache
def _statfs() -> tuple[Any, Any]:
    """Return the C functions that take a path and a descriptor; None except on Linux."""
    if sys.platform != "linux":
        return None, None
    libc = ctypes.CDLL(None)
    libc.statfs.argtypes = ctypes.c_char_p, ctypes.c_void_p
    libc.fstatfs.argtypes = ctypes.c_int, ctypes.c_void_p
    return libc.statfs, libc.fstatfs
