"""Reads from local files, and keeps as many of them open as it may.

Other programs may change a file meanwhile: reading goes on if it still holds what was indexed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from io import FileIO

from h5async.errors import H5AsyncError, ReadError
from h5async.io.keptfiles import KeptFiles
from h5async.io.localfile import LocalFile
from h5async.io.maps import IoMode
from h5async.io.stamps import FileStamp, changed, has_swmr_writer, lies_at
from h5async.system.interruptions import interruption

_TRIES = 5  # to read a slice of a batch while nobody changes the file


class FileEventError(Exception):
    """What was read is invalid: the file has changed, or a page of its map cannot be read."""

    def __init__(self, map_failed: bool = False) -> None:
        super().__init__()
        self.map_failed = map_failed


# look_anew(file, stamp) returns if a file, whose stamp is now `stamp`, still holds what was
# indexed, and raises `ReadError` if it does not.
LookAnew = Callable[[LocalFile, FileStamp], None]


class LocalFiles:
    """Files on this machine, opened as they are needed. Safe to use from many threads.

    Parameters
    ----------
    kept
        Files that stay open while unused; a mapped file takes two descriptors.
    io
        As for `LocalFile`.
    look_anew
        Checks a changed file, in the thread that found the change. None: a changed file is refused.
    on_new_stamp
        Called with the path and stamp of a file that has changed, but holds what was indexed.
    open_elsewhere
        Called with the path of a file that cannot be opened, or was replaced. Returns the former
        file if it is open elsewhere, to be closed here.
    """

    def __init__(
        self,
        kept: int,
        io: IoMode = "auto",
        *,
        look_anew: LookAnew | None = None,
        on_new_stamp: Callable[[str, FileStamp], None] | None = None,
        open_elsewhere: Callable[[str], FileIO | None] | None = None,
    ) -> None:
        self._open_elsewhere = open_elsewhere
        self._on_new_stamp = on_new_stamp
        self._io: IoMode = io
        self._look_anew = look_anew or _refuse
        self._files: KeptFiles[LocalFile] = KeptFiles(kept)

    def read(
        self, path: str, expected: FileStamp, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Call `work`, which reads from a file, until the file was the same before and after it.

        `work` gets the open file and its stamp, and is called again if the file changed meanwhile
        but still holds what was indexed. It returns whether it has compared the stamp itself after
        all it read, and raises `FileEventError` if the stamp differed. `ReadError` is raised if the
        file cannot be opened, was replaced, or no longer holds what was indexed.
        """
        file = self._files.take(path, partial(self._opened, path, expected))
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
            self._files.give_back(path)

    def _read_beside_a_writer(
        self, file: LocalFile, work: Callable[[LocalFile, FileStamp], bool]
    ) -> None:
        """Read from a file that changes all the time, and check it only afterwards."""
        stamp = file.stamp
        try:
            work(file, stamp._replace(nbytes=-1))  # so that it is not compared
        except FileEventError as event:
            raise changed(file.path, "a page of its memory map cannot be read") from event
        except H5AsyncError as error:
            self._look(file, stamp)
            raise changed(file.path, f"it is written to all the time ({error})") from error
        self._look(file, stamp)

    def _look(self, file: LocalFile, stamp: FileStamp) -> None:
        """Check in one thread that a changed file still holds what was indexed; others wait."""
        with file.looking:
            now = FileStamp.of(file.descriptor)
            if file.stamp is not stamp or now == stamp:
                return
            if not now.has_content_of(stamp):
                now = FileStamp.settled(file.descriptor)
            # The removal of a file alone changes its status.
            if not now.has_content_of(stamp) or _has_name(file):
                self._look_anew(file, now)
            file.has_swmr_writer = has_swmr_writer(file.descriptor)
            file.stamp = now
            if self._on_new_stamp is not None:
                self._on_new_stamp(file.path, now)

    def open(self, path: str, expected: FileStamp) -> None:
        """Open a file before it is read; `ReadError` if it cannot be opened, or was replaced."""
        self._files.take(path, partial(self._opened, path, expected))
        self._files.give_back(path)

    def _opened(self, path: str, expected: FileStamp) -> LocalFile:
        try:
            return LocalFile(path, expected, self._io)
        except ReadError:
            found = None if self._open_elsewhere is None else self._open_elsewhere(path)
            if found is None:
                raise
        return LocalFile(path, expected, self._io, file=found)

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._files.close()


def _refuse(file: LocalFile, _stamp: FileStamp) -> None:
    raise changed(file.path, "whether it still holds what was indexed is unknown")


def _has_name(file: LocalFile) -> bool:
    """Tell whether a file still lies where it was opened, or where it was moved to."""
    try:
        path = os.readlink(f"/proc/self/fd/{file.descriptor}")
    except OSError:  # not Linux
        path = file.path
    return lies_at(path, file.stamp)
