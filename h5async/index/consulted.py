"""Records which files, and what else of the system, a layout was made of besides its own file.

What was indexed holds for as long as none of it changes. Datasets may be virtual, or in external
files, or be reached by external links, and HDF5 looks for such files in several places.
"""

from __future__ import annotations

import os
from pathlib import Path

from h5async.io.stamps import FileStamp


class Consulted:
    """What was looked at while layouts were read. Used by one thread.

    Attributes
    ----------
    files
        Paths, as they were looked at, and the stamps of what lay there.
    absent
        Paths at which nothing was found.
    variables
        Environment variables that were asked for, with their values.
    folder
        The current directory, if a name was relative to it; else None.
    is_stable
        Whether it can be told later that nothing has changed.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileStamp] = {}
        self.absent: set[str] = set()
        self.variables: dict[str, str] = {}
        self.folder: str | None = None
        self.is_stable = True

    def found(self, path: Path, stamp: FileStamp, *, is_written: bool = False) -> None:
        """Note a file.

        Parameters
        ----------
        path, stamp
            Where it was found, and what it was.
        is_written
            Whether this process has it open for writing, so that what HDF5 reports of it may not
            be in the file yet.
        """
        name = self._name(path)
        if is_written or self.files.setdefault(name, stamp) != stamp:
            self.is_stable = False

    def missed(self, path: Path) -> None:
        """Note that there was nothing at a path."""
        self.absent.add(self._name(path))

    def asked(self, variable: str) -> None:
        """Note that an environment variable was asked for."""
        self.variables[variable] = os.environ.get(variable, "")

    def _name(self, path: Path) -> str:
        if path.is_absolute():
            return str(path)
        self.folder = os.getcwd()
        return os.path.join(self.folder, path)


class NotRecorded(Consulted):
    """Takes what is noted, and keeps nothing of it."""

    def found(self, path: Path, stamp: FileStamp, *, is_written: bool = False) -> None:
        """Do nothing."""

    def missed(self, path: Path) -> None:
        """Do nothing."""

    def asked(self, variable: str) -> None:
        """Do nothing."""
