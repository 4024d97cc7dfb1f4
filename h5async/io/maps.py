"""Maps files into memory if that is safe, and faster than reading."""

from __future__ import annotations

import mmap
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from h5async.system.interruptions import suppressing
from h5async.system.mounts import can_map

IoMode = Literal["auto", "pread", "map"]


def may_map(file: str | int, io: IoMode) -> bool:
    """Tell whether a file, given by its path or an open descriptor, may be mapped."""
    return io == "map" or (io == "auto" and can_map(file))


class FileMap:
    """A read-only memory map of an open file: `nbytes` at `address`.

    Raises `OSError`, `ValueError` or `MemoryError` if the system refuses, or the file is empty.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        data = self.array()
        self.address, self.nbytes = data.ctypes.data, data.size

    def array(self) -> NDArray[np.uint8]:
        """Return it as an array of bytes; the map cannot be closed while the array lives."""
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        with suppressing(BufferError):  # the traceback of an error may hold an array
            self._map.close()
