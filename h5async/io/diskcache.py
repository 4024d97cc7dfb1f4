"""Caches the bytes of sources on a local disk: a source enters; one with a cache leaves.

Each source has a *mirror*: a sparse file with the bytes that were read, at their offsets, followed
by a checksum for each block. All processes of a node map it for reading, so the system keeps one
copy in its page cache. The core reads rows and chunks from the map, and asks this module only for
missing bytes; metadata are read here. Mirrors are written by system calls, because storing into a
map ends the process if the disk is full. A block is written before its checksum, and a process
trusts a block after comparing the two, so a crash of a writer, or of the machine, does no harm.

The name of a mirror consists of digests of the source's name and state: a changed source has
another mirror. `cache_bytes` limits the disk space of all mirrors in a folder.
"""

from __future__ import annotations

import bisect
import errno
import functools
import hashlib
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import Kept, SourceName
from h5async.errors import ConfigError
from h5async.io.shared import map_file
from h5async.io.source import FileStamp, MappedMirror, Source, SourceOver, owned
from h5async.spelling import named
from h5async.system.interruptions import suppressing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

BLOCK = 4096  # bytes
SUFFIX = ".mirror"
_HEAD = struct.Struct("<16sIIQ32s")  # signature, format, bytes of a block and of the source, key
_SIGNATURE, _FORMAT = b"\x89h5async-mirror\n", 2
# Odd, so that a single different word shows; the same in all processes.
_WEIGHTS = np.frombuffer(hashlib.shake_128(b"h5async").digest(BLOCK), "<u8") | np.uint64(1)
_SHARE = 2  # the default limit is half of the room
_LEAST_NBYTES, _MEASURED_PARTS, _MEASURED_SECONDS = 1 << 20, 8, 1.0

_log = logging.getLogger("h5async.reader")


def keeping(name: str, source: Source) -> Source:
    """Return a source that keeps the bytes read from `source`, if its name says where.

    If that fails, `source` is closed.
    """
    kept = name.kept if isinstance(name, SourceName) else None
    try:
        return source if kept is None else disk_cache(kept).keeping(name, source)
    except BaseException:
        source.close()
        raise


@functools.cache
def disk_cache(kept: Kept) -> DiskCache:
    """Return this process's cache in a folder; raises like `DiskCache`."""
    return DiskCache(*kept)


class DiskCache:
    """The mirrors in a folder, for one process. Safe to use from many threads.

    `limit` bounds the disk space of all mirrors in the folder, including those of other readers;
    None: half of the free space and the mirrors together. `ConfigError` is raised if the folder
    cannot be made or written to.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._trouble = ""
        self._left = self._allowed = 0  # bytes: left in all, and until room is measured again
        self._measured = -_MEASURED_SECONDS
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder):
                disk = os.statvfs(folder)
        except OSError as error:
            raise ConfigError(
                f"{named('cache_dir')}: {folder} cannot be used: {error.strerror or error}; name a"
                " folder of yours on a local disk"
            ) from error
        if limit is None:
            limit = (disk.f_bavail * disk.f_frsize + self.nbytes) // _SHARE
        self.limit = limit

    @property
    def nbytes(self) -> int:
        """The disk space of all mirrors in the folder."""
        taken = 0
        with suppressing(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppressing(FileNotFoundError):  # removed meanwhile
                    if entry.name.endswith(SUFFIX):
                        taken += entry.stat(follow_symlinks=False).st_blocks * 512
        return taken

    def __str__(self) -> str:
        """Describe where and how much is kept, and why no more is."""
        text = f"disk: {self.nbytes:,} of at most {self.limit:,} bytes in {self.folder}"
        return f"{text}; {self._trouble}" if self._trouble else text

    def keeping(self, name: str, source: Source) -> Source:
        """Return a source that keeps the bytes read from `source`, which is closed with it."""
        return KeptSource(self, name, source) if source.stamp().nbytes > 0 else source

    def take(self, nbytes: int) -> bool:
        """Reserve room for more bytes; return whether there was enough.

        Other processes take room, too, so it is measured again when an eighth of it is used, and
        every second.
        """
        with self._lock:
            is_fresh = time.monotonic() < self._measured + _MEASURED_SECONDS
            if not is_fresh or self._allowed < nbytes <= self._left:
                self._left = self.limit - self.nbytes
                self._allowed = max(_LEAST_NBYTES, self._left // _MEASURED_PARTS)
                self._measured = time.monotonic()
            is_there = nbytes <= self._left
            if is_there:
                self._left -= nbytes
                self._allowed -= nbytes
        if not is_there:
            self.give_up("cache_bytes allows no more: the rest is read each time")
        return is_there

    def give_up(self, reason: str) -> None:
        """Record the reason why something is not kept; the first one is logged."""
        with self._lock:
            is_first, self._trouble = not self._trouble, reason
        if is_first:
            _log.warning("%s: %s", self.folder, reason)

    def open_mirror(
        self, name: str, stamp: FileStamp, *, removes_others: bool = False
    ) -> Mirror | None:
        """Open or make the mirror of a source; None if that fails.

        `removes_others` removes mirrors of other states; processes that have them open keep them.
        """
        # (Without the device, which changes when a network file system is mounted again, and the
        # status time: a new name or mode of a file is not new content.)
        of_name, of_state = _digest(name, 16), _digest(repr(stamp[1:4]), 16)
        path = self.folder / f"{of_name}-{of_state}{SUFFIX}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.folder):
                found = Mirror(path, stamp.nbytes, f"{of_name}{of_state}".encode())
                is_to_search = removes_others and found.is_new  # searching a large folder is slow
                for other in self.folder.glob(f"{of_name}-*{SUFFIX}") if is_to_search else ():
                    if other != path:
                        other.unlink()
        except (OSError, OverflowError) as error:
            self.give_up(f"nothing of {name} is kept: {error}")
            return None
        return found


class KeptSource(SourceOver):
    """A source whose bytes are kept in a mirror, and read from there.

    Bytes are fetched in whole blocks. Blocks that do not fit, or cannot be kept, are read from the
    source each time.
    """

    def __init__(self, cache: DiskCache, name: str, source: Source) -> None:
        super().__init__(source)
        self._cache, self._name, self._stamp = cache, name, source.stamp()
        self._mirror = cache.open_mirror(name, self._stamp, removes_others=True)

    @property
    def mirror(self) -> MappedMirror | None:
        """The mirror, for the core."""
        return None if self._mirror is None else self._mirror.mapped

    def over(self, change: Callable[[Source], Source]) -> Source:
        """Fetch missing bytes from the source that `change` makes."""
        self.source = change(self.source)
        self.at_once = self.source.at_once
        return self

    def close(self) -> None:
        """Close the source; returned buffers remain valid."""
        super().close()
        self._mirror = None

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges from the mirror, or fetch them and keep them there."""
        mirror = self._mirror
        if mirror is not None and not mirror.is_in_place():  # removed, or cut short
            mirror = self._mirror = self._cache.open_mirror(self._name, self._stamp)
        ends = [begin + nbytes for begin, nbytes in zip(offsets, lengths, strict=True)]
        if mirror is None or min(offsets, default=0) < 0 or max(ends, default=0) > mirror.nbytes:
            return self.source.get_ranges(offsets, lengths)
        found = mirror.read(offsets, ends)
        absent = [i for i, one in enumerate(found) if one is None]
        if absent:
            wanted = [offsets[i] for i in absent], [ends[i] for i in absent]
            for i, one in zip(absent, self._fetched(mirror, *wanted), strict=True):
                found[i] = one
        return found  # type: ignore[return-value]  # (nothing is absent any more)

    def _fetched(
        self, mirror: Mirror, begins: Sequence[int], ends: Sequence[int]
    ) -> Iterator[Buffer]:
        """Fetch the missing blocks of ranges, keep them, and yield the ranges."""
        firsts, lasts = mirror.missing(begins, ends)
        lengths = [last - first for first, last in zip(firsts, lasts, strict=True)]
        data = (
            [memoryview(one) for one in self.source.get_ranges(firsts, lengths)] if firsts else []
        )
        # (The checksums of a run may also take a block.)
        if self._cache.take(sum(lengths) + 2 * BLOCK * len(lengths)):
            try:
                mirror.write(firsts, data)
            except OSError as error:
                self._cache.give_up(f"it cannot be written to: {error}")
        for begin, end in zip(begins, ends, strict=True):
            run = bisect.bisect(firsts, begin) - 1
            if run >= 0 and end <= lasts[run]:
                yield data[run][begin - firsts[run] : end - firsts[run]]
            else:  # some of its blocks were here, and usually the others are by now
                (one,) = mirror.read([begin], [end])
                yield self.source.get_ranges([begin], [end - begin])[0] if one is None else one


class Mirror:
    """The file at a path that holds parts of a source. Made anew unless it is a valid mirror.

    `mapped` describes it for the core.
    """

    def __init__(self, path: Path, nbytes: int, key: bytes) -> None:
        self.nbytes, self.is_new = nbytes, False
        self._path = path
        num_blocks = -(-nbytes // BLOCK)
        self._sums_at, head_at = num_blocks * BLOCK, num_blocks * (BLOCK + 8)
        self._file_nbytes = head_at + _HEAD.size
        head = _HEAD.pack(_SIGNATURE, _FORMAT, BLOCK, nbytes, key)
        try:
            file = self._opened_as(head, head_at)
        except OSError:  # another file, a link, or one that a killed process has left incomplete
            file, self.is_new = self._made_as(head, head_at), True
        with file:
            status = os.fstat(file.fileno())
            self._file_id = status.st_dev, status.st_ino
            memory = map_file(file.fileno(), self._file_nbytes)
        marks = np.zeros(num_blocks, np.uint8)
        self.mapped = MappedMirror(path, self._file_id, memory, marks, _WEIGHTS)

    def is_in_place(self) -> bool:
        """Tell whether this file is still at its path, and has its full length."""
        with suppressing(OSError):
            return self._is(os.stat(self._path, follow_symlinks=False))
        return False

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> list[Buffer | None]:
        """Return ranges; None for those that are missing, or fail their checksums."""
        found: list[Buffer | None] = [None] * len(begins)
        with suppressing(OSError), self._opened(os.O_RDONLY) as descriptor:
            for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                found[number] = self._read(descriptor, begin, end)
        return found

    def _read(self, descriptor: int, begin: int, end: int) -> Buffer | None:
        first, last = begin // BLOCK, max(-(-end // BLOCK), begin // BLOCK)
        found = os.pread(descriptor, 8 * (last - first), self._sums_at + 8 * first)
        sums = np.frombuffer(found, "<u8")
        if sums.all():
            data = os.pread(descriptor, (last - first) * BLOCK, first * BLOCK)
            if np.array_equal(_sums(_whole_blocks(data)), sums):
                self.mapped.marks[first:last] = 1
                return memoryview(data)[begin - first * BLOCK : end - first * BLOCK]
        self.mapped.marks[first:last] = 0  # also blocks damaged since: to be fetched again
        return None

    def missing(self, begins: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the beginnings and ends of runs of missing blocks in ranges, each block once."""
        firsts, lasts, behind = list[int](), list[int](), 0
        for begin, end in sorted(zip(begins, ends, strict=True)):
            first, behind = max(begin // BLOCK, behind), max(-(-end // BLOCK), behind)
            absent = np.pad(self.mapped.marks[first:behind] == 0, 1).astype(np.int8)
            edges = (first + np.flatnonzero(np.diff(absent))) * BLOCK
            firsts += edges[::2].tolist()
            lasts += np.minimum(edges[1::2], self.nbytes).tolist()
        return firsts, lasts

    def write(self, begins: Iterable[int], found: Iterable[Buffer]) -> None:
        """Write buffers, each from the beginning of a block; `OSError` if that fails."""
        with self._opened(os.O_WRONLY) as descriptor:
            for begin, one in zip(begins, found, strict=True):
                data, first = _whole_blocks(one), begin // BLOCK
                sums = _sums(data)
                _write(descriptor, data, begin)
                _write(descriptor, sums, self._sums_at + 8 * first)
                self.mapped.marks[first : first + sums.size] = 1

    def _is(self, status: os.stat_result) -> bool:
        is_same = (status.st_dev, status.st_ino) == self._file_id
        return is_same and status.st_size == self._file_nbytes

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        """Open the file for a moment: a reader of 1,000 sources cannot keep all of them open."""
        with owned(os.open, self._path, flags | os.O_NOFOLLOW | os.O_CLOEXEC) as file:
            if not self._is(os.fstat(file.fileno())):
                raise OSError(errno.ESTALE, "it is another file now", str(self._path))
            yield file.fileno()

    def _opened_as(self, head: bytes, at: int) -> FileIO:
        """Open the file; `OSError` unless it is this user's, with the expected head and length."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = owned(os.open, self._path, flags)
        status = os.fstat(file.fileno())
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        )
        if (
            is_ours
            and stat.S_ISREG(status.st_mode)
            and status.st_size == self._file_nbytes
            and os.pread(file.fileno(), len(head), at) == head
        ):
            return file
        file.close()
        raise OSError(errno.EINVAL, "it is no mirror of this source", str(self._path))

    def _made_as(self, head: bytes, at: int) -> FileIO:
        with suppressing(FileNotFoundError):
            self._path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = owned(os.open, self._path, flags, 0o600)
        try:
            os.ftruncate(file.fileno(), self._file_nbytes)
            _write(file.fileno(), head, at)
        except BaseException:
            file.close()
            raise
        return file


def _digest(text: str, characters: int) -> str:
    return hashlib.blake2b(
        text.encode(errors="surrogateescape"), digest_size=characters // 2
    ).hexdigest()


def _whole_blocks(data: Any) -> NDArray[np.uint8]:
    array = np.frombuffer(data, np.uint8)
    rest = -array.size % BLOCK  # at the end of a source
    return np.pad(array, (0, rest)) if rest else array


def _sums(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a checksum for each block, never 0."""
    words = data.view("<u8").reshape(-1, BLOCK // 8)
    # Upper halves are mixed into the lower ones, which are 0 in many arrays of floats.
    sums: NDArray[np.uint64] = (words ^ (words >> np.uint64(32))) @ _WEIGHTS | np.uint64(1)
    return sums


def _write(descriptor: int, data: Any, at: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make and remove mirrors; the system unlocks if it is killed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with owned(os.open, folder / "lock", flags, 0o600) as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield
