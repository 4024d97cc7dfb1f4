"""Opens files by functions that return the number of a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO


def owned(call: Callable[..., int], *arguments: object) -> FileIO:
    """Return the file that owns the descriptor which a function of C returns.

    No Python code runs between the two, where what a signal handler raises would lose the number.

    Raises
    ------
    ValueError
        If the function returns a negative number.
    """
    return next(map(FileIO, map(call, *zip(arguments, strict=True)), ("rb",)))
