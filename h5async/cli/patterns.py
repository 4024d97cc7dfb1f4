"""Tells which datasets a pattern of paths means, as a shell would: ``data/*/obs``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_meant(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a dataset, or a group that it lies in, is named by one of the patterns.

    Parameters
    ----------
    path
        Of the dataset.
    patterns
        ``*``, ``?`` and ``[...]`` stand for characters of one name, and ``**`` for any number of
        names. A name that has such characters itself is meant by them, too. None at all: all.
    """
    names = _names(path)
    return not patterns or any(_begins(names, _names(pattern)) for pattern in patterns)


def _begins(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether the first of the names, or all of them, are as the pattern says."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_begins(names[at:], pattern[1:]) for at in range(len(names) + 1))
    if not names:
        return False
    is_same = names[0] == pattern[0] or fnmatchcase(names[0], pattern[0])
    return is_same and _begins(names[1:], pattern[1:])


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]
