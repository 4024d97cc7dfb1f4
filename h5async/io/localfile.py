"""Reads byte ranges of one local file into the caller's memory: by ``preadv``, or out of a map."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ReadError
from h5async.io.descriptors import open_regular
from h5async.io.maps import FileMap, IoMode, may_map
from h5async.io.stamps import FileStamp, changed, has_swmr_writer, replaced
from h5async.spelling import named
from h5async.system.interruptions import interruption, suppressing

_IOV_MAX = 1024  # POSIX guarantees 16; Linux and macOS take this many buffers a call
_QUICK_SECONDS = 0.01  # between two checks whether the reader was closed


class LocalFile:
    """A file on this machine, open for reading. Safe to use from many threads.

    No HDF5 lock is held: a writer may open the file meanwhile.

    Parameters
    ----------
    path
        The file.
    expected
        The stamp of the file when it was indexed.
    io
        ``"auto"``: it is mapped on local file systems; ``"map"``: on any; ``"pread"``: never.
    python_maps
        Whether Python, too, may copy out of the map. The core guards its own copies; in Python, a
        page that cannot be read ends the process.
    file
        The file, if it is open; closed with this. None: it is opened by its path.

    Attributes
    ----------
    descriptor
        For reading at any offset.
    stamp
        The state of the file that is known to hold what was indexed.
    has_swmr_writer
        Whether a writer has the file open for SWMR, so that it changes all the time.
    map_address, map_nbytes
        Where the file is mapped, for the compiled core; 0: it is not mapped.

    Raises
    ------
    ReadError
        If the file cannot be opened, is not the one that was indexed, or cannot be mapped.
    """

    def __init__(
        self,
        path: str,
        expected: FileStamp,
        io: IoMode = "auto",
        *,
        python_maps: bool = False,
        file: FileIO | None = None,
    ) -> None:
        self.path = path
        self._python_maps = python_maps
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

    def has_changed(self, since: FileStamp) -> bool:
        """Tell whether the file changed since a stamp, or another thread has found that it did."""
        if self.has_swmr_writer and since is self.stamp and has_swmr_writer(self.descriptor):
            return False
        return since is not self.stamp or FileStamp.of(self.descriptor) != since

    def stop_mapping(self) -> None:
        """Use reads from now on, whose errors say why; threads that use the map keep it."""
        self.io = "pread"
        self.map_address = self.map_nbytes = 0

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on.

        The GIL is released meanwhile; a read that the system cuts short is continued.

        Raises
        ------
        ReadError
            If the file ends too early, or the system reports an error; the message names the
            file and the byte.
        """
        if self._python_maps and self.io == "map":
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
        self,
        position: NDArray[np.int64],
        offset: NDArray[np.int64],
        rows: NDArray[np.uint8],
        require_open: Callable[[], None],
    ) -> None:
        """Fill some rows, those adjacent in the file in one read.

        Parameters
        ----------
        position, offset
            int64 (n,): indices of `rows`, and the first byte of each in the file, ascending.
        rows
            (m, nbytes), C-contiguous.
        require_open
            Called between reads; raises where nobody wants the rest.

        Raises
        ------
        ReadError
            As `read_into` does.
        """
        nbytes = rows.shape[1]
        flat = rows.reshape(-1).data
        first = np.flatnonzero(np.diff(offset, prepend=-1 - nbytes) != nbytes).tolist()
        positions, offsets = position.tolist(), offset.tolist()
        buffers = [flat[at * nbytes : (at + 1) * nbytes] for at in positions]
        spans = zip(first, [*first[1:], len(positions)], strict=True)
        runs = [buffers[begin:end] for begin, end in spans]
        # Between its reads a thread holds the GIL, for which others wait: so all is prepared, and
        # `map` goes from one read to the next without Python code, as long as reads are quick.
        starts = [offsets[begin] for begin in first]
        block, begin = 1, 0
        while begin < len(starts):
            require_open()
            end, started = begin + block, time.monotonic()
            self._read_runs(runs[begin:end], starts[begin:end], nbytes)
            is_quick = time.monotonic() - started < _QUICK_SECONDS
            begin, block = end, 2 * block if is_quick else max(1, block // 2)

    def _read_runs(self, runs: list[list[memoryview]], starts: list[int], row_nbytes: int) -> None:
        first = [run[:_IOV_MAX] for run in runs]
        counts: list[int] = []
        with suppressing(OSError):
            counts = list(map(os.preadv, itertools.repeat(self.descriptor), first, starts))
        for i, (run, start) in enumerate(zip(runs, starts, strict=True)):
            if i >= len(counts) or counts[i] != row_nbytes * len(run):
                self.read_into(start, run)  # a short or failing read

    def mapped(self, end: int) -> NDArray[np.uint8] | None:
        """Return the map as an array of bytes, for Python; None where the file must be read.

        Touching a page after the end of a file ends the process, so the size is checked here: call
        this before each use, and do not keep the array.

        Raises
        ------
        ReadError
            If the file now ends before byte `end`.
        """
        if self._map is None or not self._python_maps:
            return None
        if self._map.nbytes < end or os.fstat(self.descriptor).st_size < end:
            raise self._too_short(end)
        return self._map.array()

    def close(self) -> None:
        """Close the descriptor and the map. Idempotent."""
        self.descriptor = -1
        self._file.close()
        if self._map is not None:
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
    with suppressing(OSError), open(path, "rb", buffering=0) as file:  # it is a hint
        os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_WILLNEED)
