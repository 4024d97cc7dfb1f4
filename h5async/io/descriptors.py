"""Opens files by functions that return a file descriptor."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO


def owned(call: Callable[..., int], *arguments: object) -> FileIO:
    """Return a file that owns the descriptor returned by a C function.

    No Python code runs in between, where an exception raised by a signal handler would lose the
    number. A negative number raises `ValueError`.
    """
    return next(map(FileIO, map(call, *zip(arguments, strict=True)), ("rb",)))
