"""The file object through which HDF5 writes a partly committed file; and its journal.

Writes past the committed size go to the file; writes that overwrite committed bytes are held in
memory, and read back from there, until `apply`. The file object never raises into HDF5, since that
would leave HDF5 in an unknown state: after a failure, it holds all writes in memory, and writes
nothing more to the file.

A journal is a line of text with a digest of all that follows, a line of JSON, and the bytes of the
pieces that a commit overwrites.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from h5async.errors import DamagedError

Piece = tuple[int, bytes | bytearray]  # its offset in the file, and its bytes
_FORMAT = b"h5async journal 1 "
_ENDS_NBYTES = 1 << 16

# Linux: starts writing to the disk early, so that a commit does not have to wait for everything.
_start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2
_STARTED_NBYTES = 8 << 20
if _start_writing is not None:
    _start_writing.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint


class PartialFile(io.RawIOBase):
    """A file whose descriptor is open for reading and writing.

    The first `size` bytes are committed; HDF5 sees a file that ends at `end`. `held_nbytes` are in
    memory; `written_nbytes` have been written to the file since `apply`. Writes within the ranges
    `direct` go to the file even if these are committed. `failure` is the first error, or None.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._descriptor = file, file.fileno()
        self.size = self.end = os.fstat(self._descriptor).st_size
        self.held_nbytes = self.written_nbytes = self._started = 0
        self.direct: list[tuple[int, int]] = []
        self.failure: BaseException | None = None
        self._is_stopped = False
        self._position = 0
        self._starts: list[int] = []  # offsets of pieces in memory, ascending, not overlapping
        self._held: list[bytearray] = []

    def begin(self, size: int, pieces: Sequence[Piece] = ()) -> None:
        """Start with a committed size, and pieces that are not in the file yet."""
        self.size = self.end = size
        if not size:
            os.ftruncate(self._descriptor, 0)
        for offset, data in pieces:
            self._hold(offset, memoryview(data))

    def pieces(self, size: int) -> list[Piece]:
        """Return the pieces held in memory, cut at `size`."""
        held = zip(self._starts, self._held, strict=True)
        return [(at, data[: size - at]) for at, data in held if at < size]

    def apply(self) -> None:
        """Write all held pieces to the file, truncate it at `end`, and forget the pieces."""
        for offset, data in self.pieces(self.end):
            self._write_file(offset, memoryview(data))
        os.ftruncate(self._descriptor, self.end)
        self._starts, self._held = [], []
        self.size, self.held_nbytes, self.written_nbytes, self._started = self.end, 0, 0, 0

    def cut(self) -> None:
        """Truncate the file to the committed bytes."""
        os.ftruncate(self._descriptor, self.size)

    def synchronize(self) -> None:
        """Wait until everything written to the file is on the disk."""
        os.fsync(self._descriptor)

    def stop(self) -> None:
        """Stop writing to the file: hold all further writes in memory."""
        self._is_stopped = True

    # Called by HDF5.

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        self._position = offset + (0, self._position, self.end)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, into: Any) -> int:
        """Read bytes; bytes that were never written are zero."""
        view, offset = memoryview(into).cast("B"), self._position
        self._position = end = offset + len(view)
        try:
            done = 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
                if not count:
                    view[done:] = bytes(len(view) - done)
                    break
                done += count
        except OSError as error:
            self._fail(error)
        for k in range(*self._overlapping(offset, end)):
            start, data = self._starts[k], memoryview(self._held[k])
            begin, stop = max(start, offset), min(start + len(data), end)
            view[begin - offset : stop - offset] = data[begin - start : stop - start]
        return len(view)

    def write(self, data: Any) -> int:
        """Write bytes to the file, or hold them."""
        view, offset = memoryview(data).cast("B"), self._position
        self._position = end = offset + len(view)
        self.end = max(self.end, end)
        held = len(view) if self._is_stopped else max(0, min(len(view), self.size - offset))
        if held and any(begin <= offset and end <= stop for begin, stop in self.direct):
            held = 0
        if held:
            self._hold(offset, view[:held])
        if held < len(view):
            try:
                self._write_file(offset + held, view[held:])
            except OSError as error:
                self._fail(error)
                self._hold(offset + held, view[held:])
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the end to `size`; the file itself is truncated by `apply`."""
        self.end = self._position if size is None else size
        return self.end

    def flush(self) -> None:
        """Do nothing: there is no buffer besides the held pieces."""

    def close(self) -> None:
        """Close the descriptor, which also releases its lock. Idempotent."""
        self._file.close()
        super().close()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stop()

    def _write_file(self, offset: int, view: memoryview) -> None:
        self.written_nbytes += len(view)
        while len(view):
            count = os.pwrite(self._descriptor, view, offset)
            offset, view = offset + count, view[count:]
        if _start_writing is not None and self.written_nbytes - self._started > _STARTED_NBYTES:
            self._started = self.written_nbytes
            _start_writing(self._descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def _overlapping(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of indices of the pieces in memory that overlap a range of bytes."""
        first = bisect_right(self._starts, begin)
        if first and self._starts[first - 1] + len(self._held[first - 1]) > begin:
            first -= 1
        return first, bisect_left(self._starts, end, first)

    def _hold(self, offset: int, view: memoryview) -> None:
        first, last = self._overlapping(offset, offset + len(view))
        begin, end, old = offset, offset + len(view), self._held[first:last]
        if old:
            begin = min(begin, self._starts[first])
            end = max(end, self._starts[last - 1] + len(old[-1]))
        if len(old) == 1 and len(old[0]) == end - begin:
            piece = old[0]
        else:
            piece = bytearray(end - begin)
            for start, data in zip(self._starts[first:last], old, strict=True):
                piece[start - begin : start - begin + len(data)] = data
            self._starts[first:last], self._held[first:last] = [begin], [piece]
            self.held_nbytes += len(piece) - sum(map(len, old))
        piece[offset - begin : offset - begin + len(view)] = view


class Journal(NamedTuple):
    """A commit."""

    digest: str  # identifies what the file is made of
    size: int  # of the file
    state: Mapping[str, Any] | None
    is_finished: bool
    fingerprint: str  # of the file after the commit
    pieces: Sequence[Piece]  # to write to the file
    direct: Sequence[tuple[int, int]] = ()  # ranges written directly, even if committed


def fingerprint(file: PartialFile) -> str:
    """Return a digest of the first and last bytes of a file, except in `direct` ranges."""
    found = hashlib.blake2b(digest_size=16)
    for begin in (0, max(0, file.end - _ENDS_NBYTES)):
        file.seek(begin)
        data = bytearray(min(_ENDS_NBYTES, file.end))
        file.readinto(data)
        for start, stop in file.direct:
            first, last = max(0, start - begin), min(len(data), stop - begin)
            if first < last:
                data[first:last] = bytes(last - first)
        found.update(data)
    return found.hexdigest()


def write_journal(path: Path, journal: Journal) -> None:
    """Atomically replace the journal at a path."""
    fields = journal._asdict()
    fields["pieces"] = [(offset, len(data)) for offset, data in journal.pieces]
    blocks = [json.dumps(fields).encode() + b"\n", *(data for _, data in journal.pieces)]
    whole = hashlib.blake2b(digest_size=16)
    for block in blocks:
        whole.update(block)
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "wb") as file:
        file.writelines([_FORMAT, whole.hexdigest().encode(), b"\n", *blocks])
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    synchronize_folder(path.parent)


def read_journal(path: Path) -> Journal | None:
    """Return the journal at a path, or None if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, rest = content.partition(b"\n")
    if head != _FORMAT + hashlib.blake2b(rest, digest_size=16).hexdigest().encode():
        raise DamagedError(
            f"{path} is damaged, or not an h5async journal, so writing cannot continue: delete "
            "it and the unfinished file next to it, and start over",
            filename=str(path),
        )
    line, _, data = rest.partition(b"\n")
    fields, pieces, at = json.loads(line), [], 0
    for offset, nbytes in fields.pop("pieces"):
        pieces.append((offset, data[at : at + nbytes]))
        at += nbytes
    direct = [(begin, end) for begin, end in fields.pop("direct", ())]
    return Journal(pieces=pieces, direct=direct, **fields)


def synchronize_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
