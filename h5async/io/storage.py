"""Byte ranges of a local file enter; their bytes leave, in the caller's memory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import H5AsyncError, ReadError
from h5async.system.interruptions import interruption, suppressing
from h5async.system.mounts import can_map

_IOV_MAX = 1024  # POSIX guarantees 16; Linux and macOS take this many buffers a call

IoMode = Literal["auto", "pread", "map"]

# Of the clock of file systems; twice that of most kernels where nobody says.
_TICK_NS = 20_000_000
if hasattr(time, "CLOCK_REALTIME_COARSE"):
    _TICK_NS = int(time.clock_getres(time.CLOCK_REALTIME_COARSE) * 1e9)
_SIGNATURE, _SUPERBLOCK_HEAD_NBYTES = b"\x89HDF\r\n\x1a\n", 12
_QUICK_SECONDS = 0.01  # between two looks at whether the reader was closed
_LEAST_KEPT, _MOST_KEPT = 4, 8192  # files; each map counts against vm.max_map_count, 65,530
_TRIES = 5  # to read a slice of a batch while nobody changes the file


class FileStamp(NamedTuple):
    """What tells a file, and one state of it, from another.

    Attributes
    ----------
    device, inode
        Which file it is.
    nbytes, modified_ns, changed_ns
        Its size, and when its content and its status were last changed.
    """

    device: int
    inode: int
    nbytes: int = -1
    modified_ns: int = 0
    changed_ns: int = 0

    @property
    def file_id(self) -> tuple[int, int]:
        """Device and inode."""
        return self.device, self.inode

    @classmethod
    def of(cls, file: int | str | Path) -> FileStamp:
        """Return that of an open file, by its descriptor, or of what lies at a path now."""
        status = os.stat(file)
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    @classmethod
    def settled(cls, file: int | str | Path) -> FileStamp:
        """Return that of a file, where possible once a change from now on would show in it.

        File systems take the time from a clock that ticks every few milliseconds (some count whole
        seconds), and when a write begins: a second change within a tick, and what is left of that
        write, leave no trace. Where the file was changed that recently, this waits for a tick, and
        no longer than two: it may be written to all the time.
        """
        stamp = cls.of(file)
        for _ in range(2):
            is_whole = stamp.changed_ns % 1_000_000_000 == 0
            tick_ns = 1_000_000_000 if is_whole else _TICK_NS
            left_ns = stamp.changed_ns + tick_ns - time.time_ns()
            if not 0 < left_ns <= tick_ns:
                break
            time.sleep((left_ns + _TICK_NS / 2) / 1e9)
            stamp = cls.of(file)
        return stamp


class FileEventError(Exception):
    """What was read is worth nothing: the file has changed, or a page of its map is missing."""

    def __init__(self, map_failed: bool = False) -> None:
        super().__init__()
        self.map_failed = map_failed


# look_anew(file, stamp) returns where a file that is now as `stamp` says still holds what was
# indexed, and raises `ReadError` where it does not.
LookAnew = Callable[["LocalFile", FileStamp], None]


class LocalFile:
    """A file on this machine, open for reading. Safe to use from many threads.

    No HDF5 lock is held: a writer may open the file meanwhile.

    Parameters
    ----------
    path
        The file.
    expected
        Of the file that was indexed.
    io
        ``"auto"``: it is mapped on local file systems; ``"map"``: on any; ``"pread"``: never.
    python_maps
        Whether Python, too, may copy out of the map, which nobody guards there: where a page is
        missing, that ends the process.

    Attributes
    ----------
    descriptor
        For reading at any offset.
    stamp
        Which state of the file is known to hold what was indexed.
    has_swmr_writer
        Whether a writer lets others read meanwhile, so that the file changes all the time.
    map_address, map_nbytes
        Where it is mapped, for the compiled core; 0: not mapped.

    Raises
    ------
    ReadError
        If the file cannot be opened, is not the one that was indexed, or cannot be mapped.
    """

    def __init__(
        self, path: str, expected: FileStamp, io: IoMode = "auto", *, python_maps: bool = False
    ) -> None:
        self.path = path
        self._python_maps = python_maps
        self.stamp = expected
        self.looking = threading.Lock()
        self.io: IoMode = io
        self.map_address = self.map_nbytes = 0
        self._map: mmap.mmap | None = None
        try:
            # A file object: where Ctrl-C strikes before anyone has it, it is closed all the same.
            self._file = open(path, "rb", buffering=0)
            self.descriptor = self._file.fileno()
        except OSError as error:
            raise ReadError(f"cannot open {path}: {error.strerror}") from error
        if FileStamp.of(self.descriptor).file_id != expected.file_id:
            self.close()
            raise replaced(path)
        self.has_swmr_writer = has_swmr_writer(self.descriptor)
        if may_map(self.descriptor, io):
            self._make_map()

    def has_changed(self, since: FileStamp) -> bool:
        """Tell whether the file is not as it was, or whether someone has found that out."""
        if self.has_swmr_writer and since is self.stamp and has_swmr_writer(self.descriptor):
            return False
        return since is not self.stamp or FileStamp.of(self.descriptor) != since

    def stop_mapping(self) -> None:
        """Read from now on, which tells why a page cannot be had; who uses the map keeps it."""
        self.io = "pread"
        self.map_address = self.map_nbytes = 0

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on.

        The GIL is dropped meanwhile; a read that the system cuts short is taken up again.

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
            int64 (n,): which rows, and the first byte of each in the file, in ascending order.
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
        places, offsets = position.tolist(), offset.tolist()
        buffers = [flat[place * nbytes : (place + 1) * nbytes] for place in places]
        spans = zip(first, [*first[1:], len(places)], strict=True)
        runs = [buffers[begin:end] for begin, end in spans]
        # A thread holds the GIL between its reads, and others wait for it: so with all prepared,
        # `map` goes from one read to the next without a line of Python, as long as they are quick.
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
        """Return the file as an array of bytes, for Python; None where it is to be read instead.

        Touching a page past the end of a file kills the process, so the size is checked here:
        ask before each use, and keep the array no longer than that.

        Raises
        ------
        ReadError
            If the file now ends before byte `end`.
        """
        if self._map is None or not self._python_maps:
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
            if interruption(error) is not None:
                raise
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
    python_maps
        As for `LocalFile`.
    look_anew
        Called in the thread that finds a file changed; None: such a file is refused.
    on_new_stamp
        Called with the path and stamp of a file that was changed, but holds what was indexed.
    """

    def __init__(
        self,
        kept: int,
        io: IoMode = "auto",
        *,
        python_maps: bool = False,
        look_anew: LookAnew | None = None,
        on_new_stamp: Callable[[str, FileStamp], None] | None = None,
    ) -> None:
        self._on_new_stamp = on_new_stamp
        self._io: IoMode = io
        self._python_maps = python_maps
        self._look_anew = look_anew or _refuse
        self._lock = threading.Lock()
        self._kept = kept
        self._files: OrderedDict[str, LocalFile] = OrderedDict()  # the latest use comes last
        self._users: dict[str, int] = {}

    def read(
        self, path: str, expected: FileStamp, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Have `work` read from a file that stays as it is until it is done.

        Parameters
        ----------
        path, expected
            The file, as it was indexed.
        work
            Called with the open file and its stamp, and once more where the file was changed
            meanwhile but still holds what was indexed. Returns whether it has compared the stamp
            itself, after all it read; raises `FileEventError` where that did not agree.

        Raises
        ------
        ReadError
            If it cannot be opened, is another file, or another index was found in it.
        """
        file = self._take(path, expected)
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
            self._give_back(path)

    def _read_beside_a_writer(
        self, file: LocalFile, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Read from a file that is changed all the time, and look at it after that."""
        stamp = file.stamp
        try:
            work(file, stamp._replace(nbytes=-1))  # which nobody compares
        except FileEventError as event:
            raise changed(file.path, "a page of its memory map cannot be read") from event
        except H5AsyncError as error:
            self._look(file, stamp)
            raise changed(file.path, f"it is written to all the time ({error})") from error
        self._look(file, stamp)

    def _look(self, file: LocalFile, stamp: FileStamp) -> None:
        """See that a file which was changed still holds what was indexed; one thread looks."""
        with file.looking:
            now = FileStamp.of(file.descriptor)
            if file.stamp is not stamp or now == stamp:
                return
            if now[:4] != stamp[:4]:
                now = FileStamp.settled(file.descriptor)
            # Of a file that has lost its name, the status was changed by that, and nothing else.
            if now[:4] != stamp[:4] or _has_name(file):
                self._look_anew(file, now)
            file.has_swmr_writer = has_swmr_writer(file.descriptor)
            file.stamp = now
            if self._on_new_stamp is not None:
                self._on_new_stamp(file.path, now)

    @contextlib.contextmanager
    def using(self, path: str, expected: FileStamp) -> Iterator[LocalFile]:
        """Give a file, open until the context ends.

        Raises
        ------
        ReadError
            If it cannot be opened, or has not the device and inode that are `expected`.
        """
        file = self._take(path, expected)
        try:
            yield file
        finally:
            self._give_back(path)

    def _take(self, path: str, expected: FileStamp) -> LocalFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._users[path] += 1
                self._files.move_to_end(path)
                return file
        return self._opened(path, expected)

    def _give_back(self, path: str) -> None:
        with self._lock:
            self._users[path] -= 1
            unused = self._unused() if len(self._files) > self._kept else ()
        for other in unused:
            other.close()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for path, file in list(self._files.items()):
            file.close()
            self._files.pop(path, None)  # an exception leaves the others for the next call

    def _opened(self, path: str, expected: FileStamp) -> LocalFile:
        try:
            file = LocalFile(path, expected, self._io, python_maps=self._python_maps)
        except ReadError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EMFILE:
                raise
            with self._lock:
                self._kept = max(1, len(self._files) // 2)  # others took descriptors meanwhile
                unused = self._unused()
            for other in unused:
                other.close()
            file = LocalFile(path, expected, self._io, python_maps=self._python_maps)
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
        paths = list(
            itertools.islice((path for path in self._files if not self._users[path]), surplus)
        )
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
    with suppressing(OSError):  # it is a hint
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _refuse(file: LocalFile, _stamp: FileStamp) -> None:
    raise changed(file.path, "nobody can tell whether it still holds what was indexed")


def changed(path: str, what: str) -> ReadError:
    """Return the error for a file that was changed under a reader."""
    return ReadError(
        f"{path} was changed while it was being read: {what}; make a new reader, which reads it as"
        " it is now"
    )


def lies_at(path: str, stamp: FileStamp) -> bool:
    """Tell whether it is a certain file that lies at a path."""
    try:
        return FileStamp.of(path).file_id == stamp.file_id
    except OSError:
        return False


def _has_name(file: LocalFile) -> bool:
    """Tell whether a file still lies where it was opened, or where it was moved to."""
    try:
        path = os.readlink(f"/proc/self/fd/{file.descriptor}")
    except OSError:  # not Linux
        path = file.path
    return lies_at(path, file.stamp)


def has_swmr_writer(descriptor: int) -> bool:
    """Tell whether an HDF5 file says that a writer has it open for SWMR.

    So say the file consistency flags of its superblock, version 3 ("Disk Format: Level 0A" of the
    HDF5 file format specification), which lies at byte 0, 512, 1024, 2048, ...
    """
    begin = 0
    with suppressing(OSError):
        nbytes = os.fstat(descriptor).st_size
        while begin < nbytes:
            head = os.pread(descriptor, _SUPERBLOCK_HEAD_NBYTES, begin)
            if head.startswith(_SIGNATURE):
                return len(head) == _SUPERBLOCK_HEAD_NBYTES and head[8] >= 3 and bool(head[11] & 4)
            begin = max(512, 2 * begin)
    return False


def replaced(path: str) -> ReadError:
    """Return the error for a file that is not the one that was indexed."""
    return ReadError(
        f"{path} was replaced by another file after it had been indexed, and was not kept open: of"
        " many files, only as many are as the limit of open files allows (ulimit -n); make a new"
        " reader, which reads the new file"
    )


def affordable_files() -> int:
    """Return how many files a reader may keep open: half of the descriptors that are left.

    A mapped file takes two.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_KEPT
    used = 0
    with suppressing(OSError):
        used = len(os.listdir("/dev/fd"))
    return min(_MOST_KEPT, max(_LEAST_KEPT, (limit - used) // 4))


def may_map(file: str | int, io: IoMode) -> bool:
    """Tell whether a file, by its path or an open descriptor, is mapped where that pays."""
    return io == "map" or (io == "auto" and can_map(file))
