"""Matches the paths of datasets with patterns, as a shell would: ``data/*/obs``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_meant(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches a dataset's path, or a group around it.

    ``*``, ``?`` and ``[...]`` match characters of one name, and ``**`` any number of names. They
    also match themselves. Without patterns, everything matches.
    """
    names = _names(path)
    return not patterns or any(_begins(names, _names(pattern)) for pattern in patterns)


def _begins(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether a pattern matches the first names, or all of them."""
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
