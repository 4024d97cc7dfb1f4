"""Opens one local file, and maps it; the core reads from it."""

from __future__ import annotations

import os
import sys
import threading
from io import FileIO

from h5async.config.files import FileName
from h5async.errors import ReadError
from h5async.io.descriptors import open_regular
from h5async.io.maps import FileMap, IoMode, may_map
from h5async.io.stamps import FileStamp, changed, has_swmr_writer, replaced
from h5async.spelling import named
from h5async.system.interruptions import interruption, suppressing


class LocalFile:
    """A file on this machine, open for reading. Safe to use from many threads.

    No HDF5 lock is held: a writer may open the file meanwhile. `ReadError` is raised if the file
    cannot be opened or mapped, or is not the one that was indexed, whose stamp is `expected`.

    Parameters
    ----------
    io
        ``"auto"`` maps it on local file systems, ``"map"`` on any, ``"pread"`` never.
    file
        The file if it is already open; closed with this object. None: it is opened by its path.

    Attributes
    ----------
    stamp
        The state of the file that is known to hold what was indexed.
    has_swmr_writer
        Whether a writer has the file open for SWMR, so that it changes all the time.
    map_address, map_nbytes
        The memory map, for the compiled core; 0 if it is not mapped.
    """

    def __init__(
        self,
        path: str,
        expected: FileStamp,
        io: IoMode = "auto",
        *,
        file: FileIO | None = None,
    ) -> None:
        self.path = path
        self.stamp = expected
        self.looking = threading.Lock()
        self.io: IoMode = io
        self.map_address = self.map_nbytes = 0
        self._map: FileMap | None = None
        try:
            file = open_regular(path) if file is None else file
        except OSError as error:
            raise ReadError(f"cannot open {path}: {error.strerror}") from error
        self._file, self.descriptor = file, file.fileno()
        if FileStamp.of(self.descriptor).file_id != expected.file_id:
            self.close()
            raise replaced(path)
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
            self._map.close()
            self._map = None

    def _make_map(self) -> None:
        try:
            self._map = FileMap(self.descriptor)
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
        self.map_address, self.map_nbytes = self._map.address, self._map.nbytes


def read_ahead(path: FileName, nbytes: int) -> None:
    """Ask the system to read the first `nbytes` of a file, without waiting for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppressing(OSError), open(path, "rb", buffering=0) as file:  # it is a hint
        os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_WILLNEED)
