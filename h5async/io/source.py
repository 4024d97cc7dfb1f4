"""Source, an open source: bytes that rows and metadata are read of, wherever they lie.

A local file is identified by device and inode, and a state of it by size and times as well. Local
files are opened here; which of them may be mapped into memory is told, too.

`SideBySide` calls functions that block, so that who waits for them can be interrupted. A call that
waits for the network, outside of Python, cannot be ended. So it runs in a thread of its own, and is
left alone when nobody waits for it any more.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import errno
import functools
import gc
import hashlib
import os
import queue
import stat
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import FileName, scheme_of
from h5async.errors import ReadError
from h5async.system.interruptions import Gate, suppressing

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

# The tick of file systems' clock: that of Linux's CLOCK_REALTIME_COARSE, for which Python has no
# name; if the system does not tell it, twice that of most kernels.
_COARSE_CLOCK, _TICK_NS = 5, 20_000_000
if sys.platform == "linux" and (_seconds := time.clock_getres(_COARSE_CLOCK)) >= 0.001:
    _TICK_NS = int(_seconds * 1e9)


class FileStamp(NamedTuple):
    """A file, by device and inode, and its state: size, times of content and status.

    For sources of other stores these are any numbers that differ where sources, or states of them,
    do; `nbytes` is their size.
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

    def has_content_of(self, other: FileStamp) -> bool:
        """Tell whether no more than its status has changed: its mode, its names."""
        return self[:4] == other[:4]

    @classmethod
    def of_tag(cls, tag: str, nbytes: int) -> FileStamp:
        """Return the stamp of a source that is another one as soon as its tag changes."""
        digest = hashlib.blake2b(tag.encode(), digest_size=16).digest()
        device, inode = (n >> 1 for n in struct.unpack("<QQ", digest))
        return cls(device, inode, nbytes)

    @classmethod
    def of(cls, file: int | str | Path) -> FileStamp:
        """Return the stamp of an open file, by its descriptor, or of what lies at a path now."""
        status = os.stat(file)
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times)


def settled(read: Callable[[], FileStamp]) -> FileStamp:
    """Return a stamp that `read` returns; if possible, once any later change would show in it.

    File systems take the time of a write when it begins, from a clock that ticks every few
    milliseconds (some count whole seconds). So a second change within a tick, and the rest of that
    write, leave no trace. If the file was changed that recently, this waits for a tick, and for two
    at most, since the file may be written to all the time.
    """
    stamp = read()
    for _ in range(2):
        is_whole = stamp.changed_ns % 1_000_000_000 == 0
        tick_ns = 1_000_000_000 if is_whole else _TICK_NS
        left_ns = stamp.changed_ns + tick_ns - time.time_ns()
        if not 0 < left_ns <= tick_ns:
            break
        time.sleep((left_ns + _TICK_NS / 2) / 1e9)
        stamp = read()
    return stamp


def lies_at(path: str, stamp: FileStamp) -> bool:
    """Tell whether the file of a stamp lies at a path."""
    try:
        return FileStamp.of(path).file_id == stamp.file_id
    except OSError:
        return False


def changed(path: str, what: str) -> ReadError:
    """Return the error for a file that was changed under a reader."""
    return ReadError(
        f"{path} was changed while it was being read: {what}; make a new reader, which reads it as"
        " it is now (and a new saved index before that, if one was named)"
    )


def replaced(path: str) -> ReadError:
    """Return the error for a file that is not the one that was indexed."""
    if scheme_of(path):
        return ReadError(
            f"{path} was replaced by another one after it had been indexed; make a new reader, or a"
            " new index, which reads the new one"
        )
    return ReadError(
        f"{path} was replaced by another file after it had been indexed, and was not kept open:"
        " only as many files are as the limit of open files allows (ulimit -n), and none of a saved"
        " index that was named; make a new reader, or a new index, which reads the new file"
    )


class WebAddress(NamedTuple):
    """Where a source can be had by HTTP, for some time: by requests with these header lines.

    Answers must have the ETag.
    """

    url: str
    headers: Sequence[str]
    etag: str
    most_redirects: int


class MappedMirror(NamedTuple):
    """A file with blocks of a source in their places, and behind them a checksum of each.

    `path` and `file_id` tell whether it lies there still. `weights` of words are what checksums
    are made with; `marks` note which blocks this process has compared.
    """

    path: Path
    file_id: tuple[int, int]
    memory: NDArray[np.uint8]
    marks: NDArray[np.uint8]
    weights: NDArray[np.uint64]


class Source(ABC):
    """An open source. Safe to use from many threads.

    `identity` says what tells its states apart.
    """

    identity = "its stamp"
    at_once = 1  # ranges that one call of `get_ranges` is best given, if many threads call it
    retries = 0  # requests that were repeated, as far as it can tell

    @abstractmethod
    def stamp(self) -> FileStamp:
        """Return the state of what is open."""

    @abstractmethod
    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges, each a buffer of exactly the length asked for, valid while referenced.

        `ReadError` is raised if the source ends before, or is not what was opened any more. Called
        from many threads, without any lock.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it, and end calls that wait for bytes. Idempotent."""

    @property
    def mirror(self) -> MappedMirror | None:
        """What is kept of it on a local disk; None: nothing is."""
        return None

    def over(self, change: Callable[[Source], Source]) -> Source:
        """Return the source that `change` makes of this one, or of the one that this one keeps."""
        return change(self)

    def web_address(self) -> WebAddress | None:
        """Return where any other client can have it; None: nowhere."""
        return None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; fewer where the source ends."""
        there = max(0, min(nbytes, self.stamp().nbytes - offset))
        return bytes(self.get_ranges([offset], [there])[0])


class SourceOver(Source):
    """A source that has its bytes of another one, which is closed with it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.identity, self.at_once = source.identity, source.at_once

    def stamp(self) -> FileStamp:
        """Return the state of what is open."""
        return self.source.stamp()

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Those of the other source."""
        return self.source.retries

    def close(self) -> None:
        """Close it, and end calls that wait for bytes. Idempotent."""
        self.source.close()


# --- local files ----------------------------------------------------------------------------------

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


# --- side by side ---------------------------------------------------------------------------------

_MOST = 64  # at a time, of one call
_EXIT_SECONDS = 1.0

T = TypeVar("T")
_Todo = list[tuple[int, Callable[[], Any]]]
_Answers = queue.SimpleQueue[tuple[int, Any, Exception | None]]  # number, result, error


class _Collecting:
    """Whether the garbage collector is to run again once no thread keeps it from that."""

    lock, num_keeping, was_on = threading.Lock(), 0, False


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep the garbage collector from running, as whoever holds HDF5's lock must while it waits.

    It runs in any thread. In one of those that are waited for, it may come to an object of h5py,
    which is freed under that lock: both would wait for ever. It runs again once all threads that
    are in here have left.
    """
    is_on = gc.isenabled()
    gc.disable()  # also while the lock is held
    with _Collecting.lock:
        _Collecting.num_keeping += 1
        _Collecting.was_on |= is_on or gc.isenabled()
        gc.disable()  # another thread may just have left
    try:
        yield
    finally:
        with _Collecting.lock:
            _Collecting.num_keeping -= 1
            if not _Collecting.num_keeping and _Collecting.was_on:
                _Collecting.was_on = False
                gc.enable()


class SideBySide:
    """Calls functions for one owner, until it is stopped. Safe to use from many threads."""

    def __init__(self) -> None:
        self._waiting: set[_Answers] = set()
        self._is_stopped = False

    def call(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of functions, in order, or raise the first error.

        `ReadError` is raised if it was stopped.
        """
        answers: _Answers = queue.SimpleQueue()
        todo, found = [*enumerate(functions)][::-1], dict[int, T]()
        try:
            self._waiting.add(answers)
            if self._is_stopped:
                self.stop()
            for _ in range(min(len(functions), _MOST)):
                _thread.start_new_thread(_work, (todo, answers))
            while len(found) < len(functions):
                number, result, error = answers.get()
                if error is not None:
                    raise error
                found[number] = result
        finally:
            todo.clear()
            self._waiting.discard(answers)
        return [found[number] for number in range(len(functions))]

    def stop(self) -> None:
        """End all waits. Idempotent."""
        self._is_stopped = True
        for answers in tuple(self._waiting):
            answers.put((-1, None, ReadError("the source was closed while it was being read")))


def start(function: Callable[[], None]) -> None:
    """Have a thread call a function, for which the end of the interpreter waits a moment."""
    _thread.start_new_thread(_work, ([(0, function)], queue.SimpleQueue()))


_running: set[object] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
_has_ended = Gate()


def _taken(todo: _Todo) -> tuple[int, Callable[[], Any]] | None:
    with suppressing(IndexError):  # another thread was faster
        return todo.pop()
    return None


def _work(todo: _Todo, answers: _Answers) -> None:
    me = object()
    _running.add(me)
    try:
        for number, function in iter(partial(_taken, todo), None):
            answers.put((number, function(), None))
    except Exception as error:
        answers.put((-1, None, error))
    finally:
        _running.discard(me)
        _has_ended.notify()


@atexit.register
def _wait_at_exit() -> None:
    """Wait a moment: a thread that comes back into Python while that ends would crash it."""
    _has_ended.wait(lambda: not _running, _EXIT_SECONDS)
