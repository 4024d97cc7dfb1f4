"""Records which other files and system facts a layout depends on.

An index holds as long as none of them changes. Datasets may be virtual, in external files, or
behind external links, and HDF5 looks for such files in several places.
"""

from __future__ import annotations

import os
from pathlib import Path

from h5async.config.files import FileName
from h5async.io.stamps import FileStamp
from h5async.io.stores import absolute_name


class Consulted:
    """The dependencies of layouts. Used by one thread.

    Attributes
    ----------
    files
        Paths as used, and the stamps of the files there.
    absent
        Paths at which nothing was found.
    variables
        Environment variables that were read, with their values.
    folder
        The current directory, if a name was relative to it; else None.
    is_stable
        Whether later changes can be detected.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileStamp] = {}
        self.absent: set[str] = set()
        self.variables: dict[str, str] = {}
        self.folder: str | None = None
        self.is_stable = True

    def found(self, path: FileName, stamp: FileStamp, *, is_written: bool = False) -> None:
        """Record a file.

        Parameters
        ----------
        path, stamp
            The file.
        is_written
            Whether this process has it open for writing, so that facts from HDF5 may not be in the
            file yet.
        """
        name = self._name(path)
        if is_written or self.files.setdefault(name, stamp) != stamp:
            self.is_stable = False

    def missed(self, path: Path) -> None:
        """Record that there was nothing at a path."""
        self.absent.add(self._name(path))

    def asked(self, variable: str) -> None:
        """Record that an environment variable was read."""
        self.variables[variable] = os.environ.get(variable, "")

    def _name(self, path: FileName) -> str:
        name = absolute_name(path)
        if name != str(path):
            self.folder = os.getcwd()
        return name


class NotRecorded(Consulted):
    """Accepts records and drops them."""

    def found(self, path: FileName, stamp: FileStamp, *, is_written: bool = False) -> None:
        """Do nothing."""

    def missed(self, path: Path) -> None:
        """Do nothing."""

    def asked(self, variable: str) -> None:
        """Do nothing."""
