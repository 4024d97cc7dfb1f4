"""Opens files again, each for one thread, to read what the core refused.

The number of a source of the core enters; its open file leaves, of a state that is known to hold
what was indexed. Other programs may change a file meanwhile: reading goes on if it still does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from h5async.core.binding import Core
from h5async.core.structures import CANNOT_MAP, IS_REPLACED
from h5async.errors import H5AsyncError, ReadError
from h5async.index.changes import FileChanges
from h5async.io.stamps import FileStamp, changed, lies_at, replaced, settled
from h5async.read.coretables import CoreTables
from h5async.spelling import named
from h5async.system.interruptions import interruption, suppressing

_TRIES = 5  # to read a slice of a batch while nobody changes the file


class FileEventError(Exception):
    """What was read is invalid: the file has changed, or a page of its map cannot be read."""

    def __init__(self, map_failed: bool = False) -> None:
        super().__init__()
        self.map_failed = map_failed


class OpenSource(NamedTuple):
    """A source, open for one thread."""

    number: int
    path: str
    file: Any  # the core's `File`
    stamp: FileStamp  # the state that is known to hold what was indexed
    has_swmr_writer: bool  # so that the file changes all the time

    @property
    def has_changed(self) -> bool:
        """Whether the file has changed since the stamp, except by SWMR."""
        return self.file.nbytes >= 0 and FileStamp.of(self.file.fd) != self.stamp

    @property
    def has_name(self) -> bool:
        """Whether the file still lies where it was opened, or where it was moved to."""
        path = self.path
        with suppressing(OSError):  # not Linux
            path = os.readlink(f"/proc/self/fd/{self.file.fd}")
        return lies_at(path, self.stamp)


class Rereader:
    """Reads sources of the core again. Safe to use from many threads.

    `changes` checks files that have changed; None: none that has is read on. That places of
    variable-length values have stayed cannot be checked.
    """

    def __init__(self, core: Core, tables: CoreTables, changes: FileChanges | None) -> None:
        self._core, self._tables, self._changes = core, tables, changes
        self._looking = threading.Lock()

    def read(self, number: int, work: Callable[[Any, bool], None]) -> None:
        """Call `work`, which reads from a source, until the file was the same before and after it.

        `work` gets the core's `File`, and whether a writer changes it all the time; it is called
        again if the file changed meanwhile but still holds what was indexed. It raises
        `FileEventError` if that shows. `ReadError` is raised if the file cannot be opened, was
        replaced, or no longer holds what was indexed.
        """
        for _ in range(_TRIES):
            with self.opened(number) as source:
                try:
                    work(source.file, False)
                    if not source.has_changed:
                        return
                except FileEventError as event:
                    if event.map_failed:
                        self._tables.stop_mapping(number)
                except H5AsyncError as error:
                    if interruption(error) is not None or not source.has_changed:
                        raise
                self._look(source)
        self._read_beside_a_writer(number, work)

    def _read_beside_a_writer(self, number: int, work: Callable[[Any, bool], None]) -> None:
        """Read from a file that changes all the time, and check it only afterwards."""
        with self.opened(number) as source:
            source.file.nbytes = -1  # so that it is not compared
            try:
                work(source.file, True)
            except FileEventError as event:
                why = "a page of its memory map cannot be read"
                raise changed(source.path, why) from event
            except H5AsyncError as error:
                self._look(source)
                raise changed(source.path, f"it is written to all the time ({error})") from error
            self._look(source)

    def _look(self, source: OpenSource) -> None:
        """Check in one thread that a changed file still holds what was indexed; others wait."""
        number, path, file, stamp, has_swmr_writer = source
        with self._looking:
            now, known = FileStamp.of(file.fd), self._tables.files[number]
            if known.stamp != stamp or now == stamp:
                return
            if not now.has_content_of(stamp):
                now = settled(partial(FileStamp.of, file.fd))
            # The removal of a file alone changes its status.
            if not now.has_content_of(stamp) or source.has_name:
                if self._changes is None or known.is_heap:
                    raise changed(path, "whether it still holds what was indexed is unknown")
                name = f"{'/proc/self' if sys.platform == 'linux' else '/dev'}/fd/{file.fd}"
                self._changes.look_at(path, stamp, now, open_name=name, may_grow=has_swmr_writer)
            self._tables.restamp(path, now, is_heap=known.is_heap)

    @contextmanager
    def opened(self, number: int) -> Iterator[OpenSource]:
        """Open a source; `ReadError` if it cannot be opened or mapped, or was replaced."""
        file = self._core.File(fd=-1)
        with self._looking:
            stamp, path = self._tables.files[number].stamp, self._tables.files[number].path
        try:
            # (What it opens is in `file` before a signal handler can raise anything.)
            why = self._core.open_again(self._tables.sources, number, ctypes.byref(file))
            if why:
                raise _refusal(path, why, file, stamp)
            yield OpenSource(number, path, file, stamp, file.nbytes < 0)
        finally:
            self._core.close_again(ctypes.byref(file))


def _refusal(path: str, why: int, file: Any, stamp: FileStamp) -> ReadError:
    if why == IS_REPLACED:
        return replaced(path)
    if why != CANNOT_MAP:
        return ReadError(f"cannot open {path}: {os.strerror(why)}")
    if stamp.nbytes and not FileStamp.of(file.fd).nbytes:
        return changed(path, "it was cut short, and is empty now")
    return ReadError(
        f"{path} cannot be mapped into memory: {os.strerror(file.error)}; read it with"
        f" {named('io', 'pread')}"
    )
