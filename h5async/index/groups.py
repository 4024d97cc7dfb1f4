"""Finds the groups of a file that match a pattern: each of them is a sequence."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import h5py

from h5async.config.files import FileName
from h5async.errors import DatasetError, H5AsyncError
from h5async.index.contents import names_in
from h5async.index.links import Reach, locate
from h5async.io.stores import HDF5File
from h5async.spelling import name_bytes, name_text

_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(\d+)")


class Grouping(NamedTuple):
    """Which groups of a file, at the beginning of fields' paths, are sequences.

    Attributes
    ----------
    pattern
        As in `matching_groups`.
    only
        Path of a dataset of group names; empty for all that match.
    read_names
        Reads that dataset of a file.
    """

    pattern: str
    only: str = ""
    read_names: Callable[[FileName, str], Sequence[str]] | None = None

    def __str__(self) -> str:
        return f"{self.pattern}\n{self.only}" if self.only else self.pattern

    def find(self, path: FileName, file: HDF5File, reach: Reach) -> list[str]:
        """Return the paths of the groups of an open file, in natural order.

        Raises
        ------
        DatasetError
            If there is none, or a named one is missing.
        H5AsyncError
            If the names cannot be read, or `reach` does not permit the target of a link.
        """
        found = matching_groups(file, self.pattern, reach)
        if not self.only or self.read_names is None:
            return found
        by_name: dict[str, list[str]] = {}
        for name in found:
            for known in {name, name.rpartition("/")[2]}:
                by_name.setdefault(known, []).append(name)
        wanted = [name.strip("/") for name in self.read_names(path, self.only)]
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise DatasetError(
                f'{path}: dataset "{self.only}" names "{missing[0]}", and no group that matches'
                f' "{self.pattern}" has that name'
            )
        if not wanted:
            raise DatasetError(f'{path}: dataset "{self.only}" names no group')
        return sorted({one for name in wanted for one in by_name[name]}, key=natural_key)


def matching_groups(file: HDF5File, pattern: str, reach: Reach) -> list[str]:
    """Return the paths of the groups that match a pattern, in natural order.

    Parameters
    ----------
    file
        Open file.
    pattern
        A path; ``*``, ``?`` and ``[...]`` in its names match like in file names.
    reach
        Which other files links may lead to.

    Raises
    ------
    DatasetError
        If there is none.
    UnsafeFileError
        If a link leads to a file that `reach` does not permit.
    """
    found = [""]
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    for name in names:
        found = [path for parent in found for path in _children(file, parent, name, reach)]
    if not found or not names:
        raise DatasetError(f'{file.filename}: no group matches "{pattern}"')
    return sorted(found, key=natural_key)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in names as numbers: demo_2 before demo_10."""
    parts = (part for part in _NUMBER.split(name) if part)
    return [(0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]


def _children(file: HDF5File, parent: str, name: str, reach: Reach) -> list[str]:
    """Return the paths of the groups in a group whose names equal or match `name`."""
    with contextlib.ExitStack() as files:
        group = _group_at(file, parent, reach, files)
        if group is None:
            return []
        pattern, known = re.compile(fnmatch.translate(name)), name_bytes(name)
        matches = [known]
        if _WILDCARDS.search(name):
            matches = [found for found, _ in names_in(group) if pattern.match(name_text(found))]
        prefix = f"{parent}/" if parent else ""
        kinds = [_kind(group, found) for found in matches]
        paths = [prefix + name_text(found) for found in matches]
        return [
            path
            for path, kind in zip(paths, kinds, strict=True)
            if kind == "group"
            or (kind == "link" and _group_at(file, path, reach, files) is not None)
        ]


def _group_at(
    file: HDF5File, path: str, reach: Reach, files: contextlib.ExitStack
) -> h5py.Group | None:
    """Open a group, in this file or another, which `files` closes; None if there is none."""
    if not path:
        return file["/"]
    try:
        node = locate(file, path, reach, files).open()
    except H5AsyncError:
        raise
    except Exception:  # it is not there, or damaged
        return None
    return h5py.Group(node) if isinstance(node, h5py.h5g.GroupID) else None


def _kind(group: h5py.Group, name: bytes) -> Literal["group", "link", "other"]:
    try:
        if group.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            return "link"
        is_group = h5py.h5o.get_info(group.id, name).type == h5py.h5o.TYPE_GROUP
    except Exception:  # it is not there, or damaged
        return "other"
    return "group" if is_group else "other"
