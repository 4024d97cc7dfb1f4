"""Says why HDF5 cannot open a file, and keeps the most recently used files open in h5py.

HDF5's own messages ("file signature not found") are the same for a failed download and for a file
of another format. The first bytes, the size and the superblock tell more. Also computes how many
files a reader may keep open.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

import h5py

from h5async.config.files import scheme_of
from h5async.errors import ReadError
from h5async.io.indexreferences import NONSENSE
from h5async.io.references import SIGNATURE, SUPERBLOCK_NBYTES, read_superblock, superblock_offsets
from h5async.system.interruptions import interruption, suppressing

if TYPE_CHECKING:
    from h5async.io.source import Source

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


_ANY_OBJECT = h5py.h5f.OBJ_ALL | h5py.h5f.OBJ_LOCAL
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
    (0, b"CDF\x01", "netCDF-3; `nccopy -k nc4 OLD NEW` converts it to netCDF-4, which is HDF5"),
    (0, b"CDF\x02", "netCDF-3; `nccopy -k nc4 OLD NEW` converts it to netCDF-4, which is HDF5"),
    (0, b"CDF\x05", "netCDF-3; `nccopy -k nc4 OLD NEW` converts it to netCDF-4, which is HDF5"),
    (0, b"\x0e\x03\x13\x01", "HDF4; `h4toh5 OLD NEW` converts it to HDF5"),
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


# Files; each map counts against vm.max_map_count, 65,530.
_LEAST_KEPT, _FEW_KEPT, _MOST_KEPT = 4, 128, 8192


class HDF5File(h5py.File):  # type: ignore[misc]  # (h5py has no types)
    """A file that h5py reads, and its source, which is closed with it."""

    source: Source
    name_of_source = ""  # the name that it was opened by
    give_back: Callable[[], None] | None = None  # closes the source, or keeps it for later

    @classmethod
    def of(cls, opened: h5py.h5f.FileID) -> HDF5File:
        """Return a file for an open identifier, without opening another one as `h5py.File` does."""
        file = cls.__new__(cls)
        h5py.Group.__init__(file, opened)
        return file

    @property
    def filename(self) -> str:
        """The name that the file was opened by."""
        return self.name_of_source or str(super().filename)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.id.valid and h5py.h5f.get_obj_count(self.id, _ANY_OBJECT) == 1:
            self.id.close()  # h5py would first search for open objects to close
        else:
            super().close()
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()


# --- why HDF5 does not open a file ----------------------------------------------------------------


def directory_reason(path: Path) -> str:
    """Say that a path is a directory, and its format if that is recognized."""
    if any((path / name).exists() for name in _ZARR_NAMES):
        return "it is a Zarr directory, not an HDF5 file"
    return "it is a directory; name a file"


def reason_unopened(file: str | RawIOBase, error: Exception) -> str:
    """Say why a file, a path or open, cannot be opened: the text after ``cannot open FILE:``.

    If the cause is unknown, this is the message of `error`, which h5py raised.
    """
    try:
        if not isinstance(file, str):
            return _content_reason(file) or str(error)
        os.stat(file)
        if "unable to lock file" in str(error):
            return _lock_reason(error)
        with open(file, "rb", buffering=0) as opened:
            found = _content_reason(opened)
        if found is None and "already open for write" in str(error):
            return (
                "it is open for writing, or its writer ended without closing it; close it, or, if"
                " nothing writes to it any more, run `h5clear -s FILE`"
            )
        return found or str(error)
    except (OSError, ValueError) as reason:
        if interruption(reason) is not None:
            raise
        if isinstance(file, str) and scheme_of(file):
            return (
                f"h5async does not read from {scheme_of(file)}://; copy the file, or mount its"
                " storage, and name a local path"
            )
        if isinstance(reason, FileNotFoundError | ValueError):  # the latter: a NUL in it
            return "there is no such file"
        # For example, the file or its folder may not be read, or the name is too long.
        return reason.strerror or str(reason)


def _lock_reason(error: Exception) -> str:
    if getattr(error, "errno", None) in _LOCKED:
        return (
            "it is locked by a writer: another process has it open for writing; wait until it is"
            " closed there. (With the environment variable HDF5_USE_FILE_LOCKING=FALSE it opens"
            " anyway, but may be incomplete.)"
        )
    return (
        f"its file system does not lock files ({error}); set the environment variable"
        " HDF5_USE_FILE_LOCKING=FALSE"
    )


def _content_reason(file: RawIOBase) -> str | None:
    """Say what is wrong with a file's first bytes or length; None if nothing is."""
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


# --- files that stay open -------------------------------------------------------------------------


class KeptFiles:
    """The `kept` most recently used open files of h5py, by path. Used under a lock."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._files: OrderedDict[str, HDF5File] = OrderedDict()  # the most recent use comes last

    def get(self, path: str, open_file: Callable[[], HDF5File]) -> HDF5File:
        """Return a file, which stays open until enough others are used.

        `open_file` opens it if necessary. If the process has no descriptor left, it is called again
        after closing other files. It raises `ReadError`.
        """
        if path not in self._files:
            try:
                self._files[path] = open_file()
            except ReadError as error:
                if getattr(error.__cause__, "errno", None) != errno.EMFILE:
                    raise
                # The rest of the program has taken descriptors meanwhile.
                self._kept = max(1, len(self._files) // 2)
                self._close_surplus()
                self._files[path] = open_file()
        self._files.move_to_end(path)
        self._close_surplus()
        return self._files[path]

    def find(self, path: str) -> HDF5File | None:
        """Return a file if it is open."""
        return self._files.get(path)

    def discard(self, path: str) -> None:
        """Close a file, if it is open."""
        file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for path, file in list(self._files.items()):
            file.close()
            self._files.pop(path, None)  # after an exception, the next call closes the others

    def _close_surplus(self) -> None:
        while len(self._files) > self._kept:
            self._files.popitem(last=False)[1].close()


def affordable_files() -> int:
    """Return the number of files that a reader may keep open.

    They take half of the descriptors that are left; a mapped file takes two.
    """
    if resource is None:
        return _FEW_KEPT
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_KEPT
    used = 0
    with suppressing(OSError):
        used = len(os.listdir("/dev/fd"))
    return min(_MOST_KEPT, max(_LEAST_KEPT, (limit - used) // 4))


def affordable_maps() -> int:
    """Return the number of files a reader may keep mapped: a quarter of the process's limit."""
    with suppressing(OSError, ValueError):
        return max(_LEAST_KEPT, int(Path("/proc/sys/vm/max_map_count").read_text()) // 4)
    return _MOST_KEPT
