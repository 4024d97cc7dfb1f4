"""Explains to users why HDF5 does not open a file.

HDF5's own messages ("file signature not found") are the same for a failed download and for a file
of another format. The first bytes, the size and the superblock tell more.
"""

from __future__ import annotations

import errno
import os
from io import RawIOBase
from pathlib import Path

from h5async.config.files import scheme_of
from h5async.io.indexreferences import NONSENSE
from h5async.io.references import SIGNATURE, SUPERBLOCK_NBYTES, read_superblock, superblock_offsets
from h5async.system.interruptions import interruption

_BEGINNING_NBYTES = 512
_SHOWN_NBYTES = 16
_FORMATS = (  # offset of the signature, the signature, the format
    (0, b"version https://git-lfs.github.com/", "a Git LFS pointer; run `git lfs pull`"),
    (0, b"\x1f\x8b", "compressed by gzip; gunzip it"),
    (0, b"BZh", "compressed by bzip2; bunzip2 it"),
    (0, b"\xfd7zXZ\0", "compressed by xz; unxz it"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by Zstandard; unzstd it"),
    (0, b"PK\x03\x04", "a zip archive, like .npz and zipped Zarr; unpack it"),
    (257, b"ustar", "a tar archive; unpack it"),
    (0, b"CDF\x01", "netCDF-3; `nccopy -k nc4 OLD NEW` makes netCDF-4 of it, which is HDF5"),
    (0, b"CDF\x02", "netCDF-3; `nccopy -k nc4 OLD NEW` makes netCDF-4 of it, which is HDF5"),
    (0, b"CDF\x05", "netCDF-3; `nccopy -k nc4 OLD NEW` makes netCDF-4 of it, which is HDF5"),
    (0, b"\x0e\x03\x13\x01", "HDF4; `h4toh5 OLD NEW` makes HDF5 of it"),
    (0, b"MATLAB 5.0 MAT-file", "an older .mat file of MATLAB; save it there with '-v7.3'"),
    (0, b"\x89h5async\r\n\x1a\n", "a saved index of h5async; its name has to end in .h5idx"),
    (0, b"\x93NUMPY", "a .npy file of NumPy"),
    (0, b"PAR1", "a Parquet file"),
    (0, b"<!DOCTYPE", "a web page, which servers send instead of a file; download it again"),
    (0, b"<html", "a web page, which servers send instead of a file; download it again"),
    (0, b"<?xml", "XML, which servers send instead of a file; download it again"),
)
_ZARR_NAMES = (".zgroup", ".zarray", ".zattrs", "zarr.json")
_LOCKED = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


def directory_reason(path: Path) -> str:
    """Say that a path is a directory, and of which format if that is recognized."""
    if any((path / name).exists() for name in _ZARR_NAMES):
        return "it is a Zarr directory, not an HDF5 file"
    return "it is a directory; name a file"


def reason_unopened(file: str | RawIOBase, error: Exception) -> str:
    """Say why a file, by its path or open, was not opened: the text after ``cannot open FILE:``.

    If the cause is unknown, that is the message of `error`, which h5py raised.
    """
    try:
        if not isinstance(file, str):
            return _content_reason(file) or str(error)
        os.stat(file)
        if "unable to lock file" in str(error):
            return _lock_reason(error)
        with open(file, "rb", buffering=0) as opened:
            return _content_reason(opened) or _other_reason(error)
    except (OSError, ValueError) as reason:
        if interruption(reason) is not None:
            raise
        if isinstance(file, str) and scheme_of(file):
            return (
                f"h5async does not read from {scheme_of(file)}://; copy the file, or mount where it"
                " lies, and name a local path"
            )
        if isinstance(reason, FileNotFoundError | ValueError):  # the latter: a NUL in it
            return "there is no such file"
        # It, or its folder, may not be read, say, or its name is too long.
        return reason.strerror or str(reason)


def _lock_reason(error: Exception) -> str:
    if getattr(error, "errno", None) in _LOCKED:
        return (
            "it is locked by a writer: another process has it open for writing; wait until that"
            " has closed it. (The environment variable HDF5_USE_FILE_LOCKING=FALSE opens it all"
            " the same, while it may be incomplete.)"
        )
    return (
        f"its file system does not lock files ({error}); set the environment variable"
        " HDF5_USE_FILE_LOCKING=FALSE"
    )


def _other_reason(error: Exception) -> str:
    if "already open for write" in str(error):
        return (
            "it is open for writing, or its writer ended without closing it; close it, or where"
            " nobody writes to it any more, `h5clear -s FILE` clears its mark"
        )
    return str(error)


def _content_reason(file: RawIOBase) -> str | None:
    """Say what is wrong with the first bytes of a file or with its length, or return None."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return "it is empty"
    for at in superblock_offsets(size):
        found = _bytes_at(file, at, _BEGINNING_NBYTES)
        if found.startswith(SIGNATURE):
            break
    else:
        return _format_reason(_bytes_at(file, 0, _BEGINNING_NBYTES))
    try:
        end = read_superblock(found, at)[0].end
    except NONSENSE:
        is_short = len(found) < SUPERBLOCK_NBYTES
        return f"it is cut short: only {size:,} bytes are there" if is_short else None
    if end > size:
        return f"it is cut short: {size:,} of {end:,} bytes are there; copy or download it again"
    return None


def _format_reason(beginning: bytes) -> str:
    for at, mark, what in _FORMATS:
        if beginning[at : at + len(mark)].lower() == mark.lower():
            return f"it is not an HDF5 file, but {what}"
    if not any(beginning):
        return f"it is not an HDF5 file: its first {len(beginning)} bytes are all zero"
    shown = beginning[:_SHOWN_NBYTES]
    if SIGNATURE.startswith(beginning):
        return f"it is cut short: only {len(beginning)} bytes are there"
    return f"it is not an HDF5 file: it begins with {shown!r}"


def _bytes_at(file: RawIOBase, at: int, nbytes: int) -> bytes:
    file.seek(at)
    return file.read(nbytes) or b""
