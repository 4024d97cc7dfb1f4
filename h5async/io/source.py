"""`Source`: an open file or object, wherever it is stored, that rows and metadata are read from.

A local file is identified by device and inode, and its state also by size and times. This module
opens local files, and decides which of them may be mapped into memory.

`SideBySide` calls blocking functions so that the caller can be interrupted. A call that waits for
the network outside of Python cannot be ended. So it runs in its own thread, and is abandoned when
nobody waits for it any more.
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
# name; if unknown, twice that of most kernels.
_COARSE_CLOCK, _TICK_NS = 5, 20_000_000
if sys.platform == "linux" and (_seconds := time.clock_getres(_COARSE_CLOCK)) >= 0.001:
    _TICK_NS = int(_seconds * 1e9)


class FileStamp(NamedTuple):
    """A file, by device and inode, and its state: size, and times of content and status.

    For sources in other stores these are numbers that differ between sources and between their
    states, except for `nbytes`, their size.
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
        """Tell whether at most the status (mode, names) differs."""
        return self[:4] == other[:4]

    @classmethod
    def of_tag(cls, tag: str, nbytes: int) -> FileStamp:
        """Return the stamp of a source with a tag; another tag means another source."""
        digest = hashlib.blake2b(tag.encode(), digest_size=16).digest()
        device, inode = (n >> 1 for n in struct.unpack("<QQ", digest))
        return cls(device, inode, nbytes)

    @classmethod
    def of(cls, file: int | str | Path) -> FileStamp:
        """Return the stamp of an open file, given its descriptor, or of the file now at a path."""
        status = os.stat(file)
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times)


def settled(read: Callable[[], FileStamp]) -> FileStamp:
    """Return the stamp from `read`, if possible one that any later change of the file will change.

    File systems take the time of a write when it begins, from a clock that ticks every few
    milliseconds (some count whole seconds). So a second change within a tick, and the rest of a
    write, leave no trace. If the file was changed that recently, this waits for a tick, but for no
    more than two, because the file may be written to all the time.
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


def changed(path: str, what: str, remedy: str = "make a new reader") -> ReadError:
    """Return the error for a file that was changed under a reader."""
    return ReadError(
        f"{path} was changed while it was being read: {what}; {remedy} to read it as it is now"
        " (after making a new saved index, if one was named)"
    )


def replaced(path: str) -> ReadError:
    """Return the error for a file that is not the one that was indexed."""
    if scheme_of(path):
        return ReadError(
            f"{path} was replaced by another one after it had been indexed; make a new reader, or a"
            " new index, to read the new one"
        )
    return ReadError(
        f"{path} was replaced by another file after it had been indexed, and was not kept open"
        " (because of the limit on open files, ulimit -n, or because a saved index was named);"
        " make a new reader, or a new index, to read the new file"
    )


class WebAddress(NamedTuple):
    """A URL that serves a source for some time, to requests with these header lines.

    Responses must have the ETag.
    """

    url: str
    headers: Sequence[str]
    etag: str
    most_redirects: int


class MappedMirror(NamedTuple):
    """A file with blocks of a source at their offsets, followed by a checksum of each.

    `path` and `file_id` serve to check that it is still in place. `weights` are the words' factors
    in checksums; `marks` has 1 for each block that this process has compared.
    """

    path: Path
    file_id: tuple[int, int]
    memory: NDArray[np.uint8]
    marks: NDArray[np.uint8]
    weights: NDArray[np.uint64]


class Source(ABC):
    """An open source. Safe to use from many threads.

    `identity` names the property that distinguishes its states.
    """

    identity = "its stamp"
    at_once = 1  # the best number of ranges for a call of `get_ranges`, if many threads call it
    retries = 0  # repeated requests, as far as it knows

    @abstractmethod
    def stamp(self) -> FileStamp:
        """Return the state of the open source."""

    @abstractmethod
    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges, each a buffer of exactly the requested length, valid while referenced.

        `ReadError` is raised if the source ends earlier, or is no longer in the state that was
        opened. Called from many threads, without any lock.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the source, and end calls that wait for bytes. Idempotent."""

    @property
    def mirror(self) -> MappedMirror | None:
        """The mirror of the source on a local disk, if any."""
        return None

    def over(self, change: Callable[[Source], Source]) -> Source:
        """Return `change(self)`; a cache applies it to its inner source, and returns itself."""
        return change(self)

    def web_address(self) -> WebAddress | None:
        """Return an address for other HTTP clients, if there is one."""
        return None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; fewer at the end of the source."""
        there = max(0, min(nbytes, self.stamp().nbytes - offset))
        return bytes(self.get_ranges([offset], [there])[0])


class SourceOver(Source):
    """A source that reads from another one, which is closed with it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.identity, self.at_once = source.identity, source.at_once

    def stamp(self) -> FileStamp:
        """Return the state of the other source."""
        return self.source.stamp()

    @property
    def retries(self) -> int:  # type: ignore[override]
        """The repeated requests of the other source."""
        return self.source.retries

    def close(self) -> None:
        """Close the source, and end calls that wait for bytes. Idempotent."""
        self.source.close()


# --- local files ----------------------------------------------------------------------------------

IoMode = Literal["auto", "pread", "map"]

# An I/O error in a memory map is a fatal signal. So files are mapped only if their bytes come from
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
    # The system is asked about the file itself. The table of mounts would not do: its names would
    # have to be decoded, and later mounts change it.
    status = (ctypes.c_uint32 * (_STATFS_NBYTES // 4))()
    if isinstance(file, int):
        failed = ask_descriptor(file, status)
    else:
        failed = ask_path(os.fsencode(file), status)
    # The structure begins with the type: 32 bits, or on some machines 64, lower half first. (If 64
    # bits are big-endian, this reads 0, and files are not mapped.)
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

_MOST = 64  # functions at a time, in one call
_EXIT_SECONDS = 1.0

T = TypeVar("T")
_Todo = list[tuple[int, Callable[[], Any]]]
_Answers = queue.SimpleQueue[tuple[int, Any, Exception | None]]  # number, result, error


class _Collecting:
    """Whether to enable the garbage collector again when no thread holds it off any more."""

    lock, num_keeping, was_on = threading.Lock(), 0, False


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep the garbage collector from running, for a thread that waits while it holds HDF5's lock.

    The collector may run in any thread, including one that is waited for. There it may free an
    object of h5py, which needs that lock: a deadlock. It is enabled again when all threads have
    left this context.
    """
    is_on = gc.isenabled()
    gc.disable()  # first: it must not run while the lock is held, either
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

        `ReadError` is raised after `stop`.
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
    """Call a function in a new thread, which the interpreter's exit waits for a moment."""
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
    """Wait a moment: a thread that returns to Python during its finalization would crash it."""
    _has_ended.wait(lambda: not _running, _EXIT_SECONDS)
