"""Opens files so that no interruption leaves a descriptor open."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from io import FileIO


def owned(call: Callable[..., int], *arguments: object) -> FileIO:
    """Return a file that owns the descriptor returned by a C function.

    No Python code runs in between, where an exception raised by a signal handler would lose the
    number. A negative number raises `ValueError`.
    """
    return next(map(FileIO, map(call, *zip(arguments, strict=True)), ("rb",)))


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading, without waiting for the writer of a pipe.

    `OSError` is raised if it cannot be opened, or is not a regular file.
    """
    # `FileIO` would leave the descriptor of a directory open.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
