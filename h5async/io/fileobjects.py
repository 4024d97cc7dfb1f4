"""Reads Python's file objects: what `open` and `fsspec.open` return, and `BytesIO`.

A name that carries its file object enters; bytes leave, one read at a time. The object stays open.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from h5async.config.files import OBJECT_SCHEME, ObjectName
from h5async.errors import ReadError
from h5async.io.source import FileStamp, Source, changed
from h5async.io.stores import Store, register

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12

_PROCESS = secrets.token_hex(8)  # stamps of file objects mean nothing elsewhere


class FileObjectSource(Source):
    """An open file object, in which only one thread reads at a time."""

    identity = "the file object and its size"

    def __init__(self, name: ObjectName) -> None:
        self._name = name
        self._file: Any = name.file
        self._lock = _locks.setdefault(id(self._file), threading.Lock())
        self._stamp = self._now()

    def stamp(self) -> FileStamp:
        """Return the size, and which object it is."""
        return self._now()

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Read ranges one after the other."""
        return list(map(self._get, offsets, lengths))

    def close(self) -> None:
        """Leave the file object to its owner."""

    def _get(self, offset: int, nbytes: int) -> bytes:
        found = b""
        with self._lock:
            self._file.seek(offset)
            while len(found) < nbytes:
                part = self._file.read(nbytes - len(found))
                if not part:
                    raise changed(self._name, f"it ends before byte {offset + nbytes:,}")
                found += part
        return found

    def _now(self) -> FileStamp:
        with self._lock:
            nbytes = self._file.seek(0, os.SEEK_END)
        return FileStamp.of_tag(f"{_PROCESS} {id(self._file)}", nbytes)


class FileObjectStore(Store):
    """The file objects that names carry."""

    is_lasting = False

    def open(self, name: str, *, is_patient: bool = False) -> Source:
        """Return a source over the file object of a name."""
        if not isinstance(name, ObjectName):
            raise FileNotFoundError(errno.ENOENT, "a file object cannot be given by its name", name)
        try:
            return FileObjectSource(name)
        except (OSError, ValueError) as error:
            raise ReadError(f"cannot open {name}: {error}", filename=name) from error


_locks: dict[int, threading.Lock] = {}  # by the identities of file objects
register(OBJECT_SCHEME, FileObjectStore())
