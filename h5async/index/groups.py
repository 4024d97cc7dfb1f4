"""Finds the groups of a file that match a pattern: each of them is a sequence."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py

from h5async.errors import DatasetError
from h5async.index.listing import names_in
from h5async.names import name_text

_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(\d+)")


class Grouping(NamedTuple):
    """Which groups of a file are sequences, where the paths of fields begin.

    Attributes
    ----------
    pattern
        As `matching_groups` takes it.
    only
        Path of a dataset of names of groups; empty: all that match.
    read_names
        Reads that, of a file.
    """

    pattern: str
    only: str = ""
    read_names: Callable[[Path, str], Sequence[str]] | None = None

    def __str__(self) -> str:
        """Return a text that is the same for the same groups."""
        return f"{self.pattern}\n{self.only}" if self.only else self.pattern

    def find(self, path: Path, file: h5py.File) -> list[str]:
        """Return the paths of the groups of an open file, in natural order.

        Raises
        ------
        DatasetError
            If there is none, or one that is named is not there.
        H5AsyncError
            If the names cannot be read.
        """
        found = matching_groups(file, self.pattern)
        if not self.only or self.read_names is None:
            return found
        by_name = {name.rpartition("/")[2]: name for name in found} | {name: name for name in found}
        wanted = [name.strip("/") for name in self.read_names(path, self.only)]
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise DatasetError(
                f'{path}: dataset "{self.only}" names "{missing[0]}", and no group that matches'
                f' "{self.pattern}" has that name'
            )
        return sorted({by_name[name] for name in wanted}, key=natural_key)


def matching_groups(file: h5py.File, pattern: str) -> list[str]:
    """Return the paths of the groups that match a pattern, in natural order.

    Parameters
    ----------
    file
        Open file.
    pattern
        A path; ``*``, ``?`` and ``[...]`` in one of its names stand for what they do in names of
        files. Links count as groups, wherever they lead.

    Raises
    ------
    DatasetError
        If there is none.
    """
    found = [""]
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    for name in names:
        found = [path for parent in found for path in _children(file, parent, name)]
    if not found or not names:
        raise DatasetError(f'{file.filename}: no group matches "{pattern}"')
    return sorted(found, key=natural_key)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which numbers in names are sorted as numbers: demo_2 before demo_10."""
    parts = (part for part in _NUMBER.split(name) if part)
    return [(0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]


def _children(file: h5py.File, parent: str, name: str) -> list[str]:
    prefix = f"{parent}/" if parent else ""
    if not _WILDCARDS.search(name):
        return [prefix + name]
    try:
        group = file[parent or "/"]
    except Exception:  # it is not there, or damaged
        return []
    if not isinstance(group, h5py.Group):
        return []
    pattern = re.compile(fnmatch.translate(name))
    matches = [found for found, _ in names_in(group) if pattern.match(name_text(found))]
    return [prefix + name_text(found) for found in matches if _may_be_group(group, found)]


def _may_be_group(group: h5py.Group, name: bytes) -> bool:
    try:
        if group.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            return True
        return bool(h5py.h5o.get_info(group.id, name).type == h5py.h5o.TYPE_GROUP)
    except Exception:  # a damaged object may raise anything; whoever opens it says what
        return True
