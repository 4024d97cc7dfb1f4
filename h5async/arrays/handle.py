"""Holds a file that HDF5 opens for a moment at a time, and what is open to read its datasets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from h5async.arrays.boxreading import Threads
from h5async.config import ReaderConfig
from h5async.config.files import FileName
from h5async.errors import ConfigError, DatasetError, H5AsyncError, ReaderClosedError
from h5async.index.contents import what_is_there
from h5async.index.links import Located, locate, open_index
from h5async.io.source import FileStamp, changed
from h5async.io.stores import HDF5File
from h5async.opening.filevalues import reach_of
from h5async.system.interruptions import interruption, passing
from h5async.system.resources import usable_cores

_RECENT = 32  # datasets that have files and memory to read with


class InUse(Protocol):
    """A dataset that has files and memory to read with, until it is closed."""

    def close(self) -> None:
        """Give them back."""


class Handle:
    """A file by its path: opened in HDF5 for a moment at a time, and as it was the first time.

    Safe to use from many threads. `arguments` make another one.
    """

    def __init__(
        self, path: Any, num_threads: int | None, cache_bytes: int, options: Mapping[str, Any]
    ) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        config = ReaderConfig(hdf5_path=path, **given)
        if len(config.files) != 1:
            raise ConfigError(f"open_file reads one file, found {len(config.files)}")
        name = config.files[0]
        if isinstance(name, Path):  # opened again later, when the current directory may differ
            name = path = name.absolute()
        self.path: FileName = name
        self.filename = str(name)
        self.max_nbytes = config.max_batch_bytes or 0
        self.reach, self.kept, self.cache_nbytes = reach_of(config), config.kept, cache_bytes
        self.threads = Threads(usable_cores() if num_threads is None else max(1, num_threads))
        self.arguments = path, num_threads, cache_bytes, dict(options)
        self._recent: dict[InUse, None] = {}
        self._lock = threading.RLock()
        self._stamp: FileStamp | None = None
        self._is_closed = False

    def close(self) -> None:
        """Close what reading has open. Idempotent; datasets cannot be read any more."""
        self._is_closed = True
        self.release()

    def release(self) -> None:
        """Close what reading has open, until something is read again."""
        with self._lock:
            recent, self._recent = list(self._recent), {}
        for dataset in recent:
            dataset.close()
        self.threads.close()

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[tuple[Located, Any]]:
        """Open the file in HDF5, and the object at a path; `DatasetError` if there is none."""
        self.require_open()
        with passing(), open_index(self.path) as file, contextlib.ExitStack() as files:
            stamp = file.source.stamp()
            if self._stamp is None:
                self._stamp = stamp
            if stamp != self._stamp:
                raise changed(self.filename, "it is not as it was when it was opened")
            yield self._located(file, path, files)

    def _located(
        self, file: HDF5File, path: str, files: contextlib.ExitStack
    ) -> tuple[Located, Any]:
        if not path:
            return Located(file, "", (), file.id, b"."), file.id
        try:
            found = locate(file, path, self.reach, files)
            if found.rest:
                raise KeyError(path)
            return found, found.open()
        except H5AsyncError:
            raise
        except Exception as error:
            if interruption(error) is not None:
                raise
            known = what_is_there(file, self.reach, path)
            raise DatasetError(f'{self.filename}: there is no object "{path}"; {known}') from error

    def require_open(self) -> None:
        """Raise `ReaderClosedError` once the file is closed."""
        if self._is_closed:
            raise ReaderClosedError(f"{self.filename} was closed; open it again")

    def note_use(self, dataset: InUse) -> list[InUse]:
        """Note that a dataset has files open; return those that have had theirs open for long."""
        self.require_open()
        with self._lock:
            self._recent.pop(dataset, None)
            self._recent[dataset] = None
            surplus = list(self._recent)[:-_RECENT]
            for old in surplus:
                del self._recent[old]
        return surplus
