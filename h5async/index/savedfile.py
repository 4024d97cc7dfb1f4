"""Writes and reads the file of a saved index: a header as JSON, and arrays that are mapped.

`savedlayouts.py` defines the meaning of the header and the arrays. The file begins with a fixed
head: a signature, the format number, the lengths of the header and of the file, and a checksum of
everything before the arrays. The header has a checksum of the arrays. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import FileName
from h5async.index.savedkinds import SavedIndexError, to_json
from h5async.io.shared import forget_pages, map_file
from h5async.io.source import open_regular, owned
from h5async.io.stores import store_of
from h5async.system.interruptions import suppressing

# Changes with the content, and when the same file would be indexed differently: files with another
# number are not read.
FORMAT = 7
_SIGNATURE = b"\x89h5async\r\n\x1a\n"
_DIGEST_NBYTES = 16
_HEAD = struct.Struct(f"<12sIQQ{_DIGEST_NBYTES}s")
_ALIGNMENT = 64
_PIECE_NBYTES = 1 << 22
_LEFT_SECONDS = 3600  # after which an unfinished file is removed

Arrays = Mapping[str, NDArray[Any]]


class SavedFile(NamedTuple):
    """The content of a saved index: its JSON header, and read-only arrays, mapped if permitted.

    `forget` is called with an array, or a part of one, that will hardly be used again.
    """

    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    forget: Callable[[NDArray[Any]], None] = lambda array: None


def write_saved(
    path: Path,
    header: Mapping[str, Any],
    arrays: Mapping[str, Sequence[NDArray[Any]]],
    *,
    mode: int,
    is_lasting: bool = True,
) -> None:
    """Write a saved index atomically: a file at the path is replaced at once, or stays.

    Arrays of one name have one dtype, and are concatenated. `mode` are the permissions of the file,
    before the umask of the process. If it `is_lasting`, this waits until the disk has it; otherwise
    a power failure may damage it.

    OSError if it cannot be written: no partial file remains. NotPortableError if `to_json` makes no
    JSON value of something.
    """
    blocks, places, begin = [], {}, 0
    for name, several in arrays.items():
        dtype = several[0].dtype
        nbytes = sum(array.nbytes for array in several)
        places[name] = [dtype.newbyteorder("<").str, begin, nbytes // dtype.itemsize]
        blocks += [_little(array) for array in several]
        blocks.append(np.zeros(-nbytes % _ALIGNMENT, np.uint8))
        begin += nbytes + (-nbytes % _ALIGNMENT)
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block.data, checksum)
    whole_header = {**header, "arrays": places, "checksum": checksum}
    text = json.dumps(whole_header, separators=(",", ":"), default=to_json).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNMENT)
    whole = _HEAD.size + len(text) + begin
    head = _HEAD.pack(_SIGNATURE, FORMAT, len(text), whole, b"")
    head = _HEAD.pack(_SIGNATURE, FORMAT, len(text), whole, _digest(head, text))
    _replace(path, [head, text, *blocks], mode, is_lasting)


def _little(array: NDArray[Any]) -> NDArray[np.uint8]:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


def _digest(head: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(head[:-_DIGEST_NBYTES] + text, digest_size=_DIGEST_NBYTES).digest()


def _replace(path: Path, blocks: Iterable[Any], mode: int, is_lasting: bool) -> None:
    """Write a file beside a path, and move it there."""
    remove_unfinished(path.parent, re.escape(path.name))
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with owned(os.open, str(beside), flags, mode) as file:
            for block in blocks:
                data = memoryview(block).cast("B")
                while len(data):
                    data = data[os.write(file.fileno(), data) :]
            if is_lasting:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppressing(OSError):
            os.unlink(beside)
        raise


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove files that a killed writer began long ago.

    Only saved indices whose names match the regular expression `names` are removed.
    """
    begun = re.compile(rf"\.{names}\.[0-9a-f]{{16}}\.tmp")
    with suppressing(OSError):
        for entry in os.scandir(folder):
            if not begun.fullmatch(entry.name):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_SECONDS:
                os.unlink(entry.path)


def is_saved_index(path: Path) -> bool:
    """Return whether a file begins like a saved index, whatever else is in it."""
    with suppressing(OSError), open_regular(path) as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE
    return False


def read_saved(path: FileName, *, owners: Sequence[int], may_map: bool) -> SavedFile:
    """Read a saved index, and check that it is unchanged since it was written.

    Local files of `owners` are trusted. Arrays are read into memory, unless they may be mapped.

    SavedIndexError if it is damaged, of another format, or may have been written by others; OSError
    if it cannot be opened or read.
    """
    if not store_of(path).is_local:
        return SavedFile(*_content(np.frombuffer(_fetched(str(path)), np.uint8)))
    with open_regular(Path(path)) as file:
        status = os.fstat(file.fileno())
        _require_ours(status, owners)
        if status.st_size < _HEAD.size:
            raise SavedIndexError(f"it has {status.st_size} bytes, which is no saved index")
        if not may_map:
            read = file.read()
            if len(read) != status.st_size:
                raise SavedIndexError("it was cut short while it was read")
            return SavedFile(*_content(np.frombuffer(read, np.uint8)))
        data = map_file(file.fileno(), status.st_size)
    content = _content(data)
    forget_pages(data)  # all of it was read for the checksum
    return SavedFile(*content, forget_pages)


def _fetched(name: str) -> bytes:
    """Return all bytes of a source, fetched side by side, if it begins like a saved index."""
    with closing(store_of(name).open(name)) as source:
        if source.read(0, len(_SIGNATURE)) != _SIGNATURE:
            raise SavedIndexError("it is not a saved index")
        nbytes = source.stamp().nbytes
        offsets = range(0, nbytes, _PIECE_NBYTES)
        lengths = [min(_PIECE_NBYTES, nbytes - offset) for offset in offsets]
        return b"".join(source.get_ranges(offsets, lengths))


def _require_ours(status: os.stat_result, owners: Sequence[int]) -> None:
    if status.st_uid not in owners:
        raise SavedIndexError(
            f"it belongs to another user ({status.st_uid}), who could let it name any file; make"
            " one of your own (h5async index)"
        )
    if status.st_mode & stat.S_IWOTH:
        raise SavedIndexError("every user may write to it; remove that permission (chmod o-w)")


def _content(data: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    head = data[: _HEAD.size].tobytes()
    signature, number, text_nbytes, nbytes, digest = _HEAD.unpack(head)
    if signature != _SIGNATURE:
        raise SavedIndexError("it is not a saved index")
    if number != FORMAT:
        raise SavedIndexError(f"it has format {number}, and this version reads format {FORMAT}")
    if nbytes != data.size or text_nbytes > data.size - _HEAD.size:
        raise SavedIndexError(f"expected {nbytes} bytes, got {data.size}: it is damaged")
    begin = _HEAD.size + text_nbytes
    text = data[_HEAD.size : begin].tobytes()
    if _digest(head, text) != digest:
        raise SavedIndexError("its header is damaged: the checksum differs")
    try:
        header = json.loads(text)
        places, checksum = header["arrays"], header["checksum"]
        if zlib.crc32(data[begin:].data) != checksum:
            raise SavedIndexError("its arrays are damaged: the checksum differs")
        arrays = {name: _array(data[begin:], *place) for name, place in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SavedIndexError(f"its header is damaged ({error!r})") from error
    return header, arrays


def _array(data: NDArray[np.uint8], dtype: str, begin: int, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in "iu" or begin < 0 or count < 0 or begin % kind.itemsize:
        raise ValueError("an array has no valid place")
    found = data[begin : begin + count * kind.itemsize]
    if found.size != count * kind.itemsize:
        raise ValueError("an array lies outside the file")
    return found.view(kind)
