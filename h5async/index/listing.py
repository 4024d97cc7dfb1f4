"""Lists the objects of an open file as they are found.

Only groups are opened: HDF5 may open other files when it opens a virtual dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import h5py

from h5async.errors import DatasetError
from h5async.names import name_text
from h5async.system.interruptions import suppressing

_KINDS: dict[int, Literal["dataset", "group"]] = {
    h5py.h5o.TYPE_DATASET: "dataset",
    h5py.h5o.TYPE_GROUP: "group",
}


class Listed(NamedTuple):
    """The object of a name in a file.

    Attributes
    ----------
    path
        From the root group, without a leading slash.
    kind
        ``"link"``: a soft or external one, wherever it leads; ``"other"``: a named type, or an
        object that HDF5 cannot identify because it is damaged.
    """

    path: str
    kind: Literal["dataset", "group", "link", "other"]


class _Level(NamedTuple):
    group: h5py.Group
    prefix: str
    names: Iterator[tuple[bytes, int]]


def walk(file: h5py.File, most_names: int | None = None) -> Iterator[Listed]:
    """Yield the objects of a file, group by group, in the order of names; each object once.

    Parameters
    ----------
    file
        Open file.
    most_names
        The maximum number of names listed per group; None for all.

    Raises
    ------
    DatasetError
        If the root group cannot be opened.
    """
    try:
        root = file["/"]
        seen = {_address(h5py.h5o.get_info(root.id))}
    except Exception as error:  # a damaged object may raise anything
        raise DatasetError(
            f"{file.filename}: the file is damaged: its root group cannot be opened ({error})"
        ) from error
    levels = [_Level(root, "", names_in(root, most_names))]
    while levels:
        group, prefix, names = levels[-1]
        name, link = next(names, (b"", None))
        if link is None:
            levels.pop()
            continue
        path = prefix + name_text(name)
        if link != h5py.h5l.TYPE_HARD:
            yield Listed(path, "link")
            continue
        info = None
        with suppressing(Exception):  # a damaged object may raise anything
            found = h5py.h5o.get_info(group.id, name)
            node = group[name] if found.type == h5py.h5o.TYPE_GROUP else None
            info = found
        if info is None:
            yield Listed(path, "other")
            continue
        if _address(info) in seen:
            continue
        seen.add(_address(info))
        yield Listed(path, _KINDS.get(info.type, "other"))
        if isinstance(node, h5py.Group):
            levels.append(_Level(node, f"{path}/", names_in(node, most_names)))


def _address(info: h5py.h5o.ObjInfo) -> tuple[int, int]:
    return info.fileno, info.addr


def names_in(group: h5py.Group, most: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Return the readable names in a group, and the kinds of their links."""
    found: dict[bytes, int] = {}

    def note(name: bytes, info: h5py.h5l.LinkInfo) -> bool | None:
        if name in found or len(found) == most:  # a name that comes again: the index has a loop
            return True
        found[name] = info.type
        return None

    with suppressing(Exception):  # damage ends the list
        group.id.links.iterate(note, info=True)
    return iter(found.items())
