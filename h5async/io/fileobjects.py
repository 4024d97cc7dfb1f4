"""Reads Python's file objects: what `open` and `fsspec.open` return, and `BytesIO`.

A name that carries its file object enters; bytes leave, one read at a time. The object stays open.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from h5async.config.files import OBJECT_SCHEME, ObjectName
from h5async.errors import ReadError
from h5async.io.source import Source
from h5async.io.stamps import FileStamp, changed
from h5async.io.stores import Store, register

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

    def read_ranges(self, ranges: Sequence[tuple[int, int]], into: memoryview) -> None:
        """Read ranges one after the other."""
        for offset, nbytes in ranges:
            with self._lock:
                self._file.seek(offset)
                end = offset + nbytes
                while offset < end:
                    found = self._file.read(end - offset)
                    if not found:
                        raise changed(self._name, f"it ends before byte {end:,}")
                    into[: len(found)], into = found, into[len(found) :]
                    offset += len(found)

    def close(self) -> None:
        """Leave the file object to its owner."""

    def _now(self) -> FileStamp:
        with self._lock:
            nbytes = self._file.seek(0, os.SEEK_END)
        return FileStamp.of_tag(f"{_PROCESS} {id(self._file)}", nbytes)


class FileObjectStore(Store):
    """The file objects that names carry."""

    is_lasting = False

    def open(self, name: str) -> Source:
        """Return a source over the file object of a name."""
        if not isinstance(name, ObjectName):
            raise FileNotFoundError(errno.ENOENT, "a file object cannot be given by its name", name)
        try:
            return FileObjectSource(name)
        except (OSError, ValueError) as error:
            raise ReadError(f"cannot open {name}: {error}", filename=name) from error


_locks: dict[int, threading.Lock] = {}  # by the identities of file objects
register(OBJECT_SCHEME, FileObjectStore())
