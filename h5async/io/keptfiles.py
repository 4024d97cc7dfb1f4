"""Keeps the most recently used files of h5py open; tells how many files a reader may keep open."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from h5async.errors import ReadError
from h5async.io.stores import HDF5File
from h5async.system.interruptions import suppressing

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Files; each map counts against vm.max_map_count, 65,530.
_LEAST_KEPT, _FEW_KEPT, _MOST_KEPT = 4, 128, 8192


class KeptFiles:
    """Open files of h5py, by their paths. Safe to use from many threads.

    If too many are open, unused files are closed, the least recently used first. Files are opened
    and closed outside the lock. `kept` is the number of unused files that stay open.
    """

    def __init__(self, kept: int) -> None:
        self._lock = threading.Lock()
        self._kept = kept
        self._files: OrderedDict[str, HDF5File] = OrderedDict()  # the most recent use comes last
        self._users: dict[str, int] = {}

    def take(self, path: str, open_file: Callable[[], HDF5File]) -> HDF5File:
        """Return a file, which stays open until it is given back.

        `open_file` opens it if it is not open. If the process has no descriptor left, it is called
        again after others were closed. It raises `ReadError`.
        """
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._users[path] += 1
                self._files.move_to_end(path)
                return file
        return self._opened(path, open_file)

    def give_back(self, path: str) -> None:
        """Note that a file that was taken is no longer used."""
        with self._lock:
            self._users[path] -= 1
            unused = self._unused()
        for other in unused:
            other.close()

    def find(self, path: str) -> HDF5File | None:
        """Return a file if it is open; another thread may close it unless it is in use."""
        return self._files.get(path)

    def discard(self, path: str) -> None:
        """Close a file that is not in use, if it is open."""
        with self._lock:
            file = self._files.pop(path, None)
            self._users.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for path, file in list(self._files.items()):
            file.close()
            self._files.pop(path, None)  # an exception leaves the others for the next call

    def _opened(self, path: str, open_file: Callable[[], HDF5File]) -> HDF5File:
        try:
            file = open_file()
        except ReadError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EMFILE:
                raise
            with self._lock:
                # The rest of the program took descriptors meanwhile.
                self._kept = max(1, len(self._files) // 2)
                unused = self._unused()
            for other in unused:
                other.close()
            file = open_file()
        with self._lock:
            first = self._files.setdefault(path, file)  # another thread may have been faster
            self._users[path] = self._users.get(path, 0) + 1
        if first is not file:
            file.close()
        return first

    def _unused(self) -> list[HDF5File]:
        """Remove and return the least recently used of the surplus files."""
        surplus = max(0, len(self._files) - self._kept)
        unused = (path for path in self._files if not self._users[path])
        paths = list(itertools.islice(unused, surplus))
        for path in paths:
            del self._users[path]
        return [self._files.pop(path) for path in paths]


def affordable_files() -> int:
    """Return the number of files that a reader may keep open.

    That is half of the descriptors that are left; a mapped file takes two.
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
