"""Lists the objects of an open file, and finds those that a user means.

Errors about a missing dataset list the objects. Groups that match a pattern are sequences. Groups
and attributes show which objects are read as one field.

Listing objects opens only groups: HDF5 may open other files when it opens a virtual dataset.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import h5py

from h5async.config.files import FileName
from h5async.errors import DatasetError, H5AsyncError
from h5async.index.datasets import Indexer
from h5async.index.links import Located, Reach, components, found_at, metadata_cache
from h5async.io.hdf5files import HDF5File
from h5async.spelling import name_bytes, name_text, shell_word
from h5async.system.interruptions import interruption, suppressing

_LISTED_DATASETS = 20
# Groups that are read as one field: their declared type, and the dataset that counts samples.
_MEMBERS = {"categorical": "codes", "nullable-integer": "values", "nullable-boolean": "values"}
_SPARSE = ("csr_matrix", "csr")
MEMBERS_OF_10X = {"barcodes", "data", "indices", "indptr", "shape"}
_GROUP = "__categories"
_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(\d+)")
_MOST_OBJECTS = 200  # visited per file for a message: 0.05 s
LISTING_NBYTES = 32 << 20  # metadata cache: each object's lookup visits the names in its group
_KINDS = {h5py.h5o.TYPE_DATASET: "dataset", h5py.h5o.TYPE_GROUP: "group"}


def what_is_there(file: HDF5File, reach: Reach, missing: str) -> str:
    """List datasets of a file that has none at the path `missing`, and say how to read some.

    Only the first objects of a large file are listed: it may hold millions.
    """
    with metadata_cache(file, LISTING_NBYTES):
        try:
            listed = list(itertools.islice(walk(file, _MOST_OBJECTS + 1), _MOST_OBJECTS + 1))
        except DatasetError as error:
            if interruption(error) is not None:
                raise
            return "the file is damaged, and nothing in it can be listed"
        is_cut = len(listed) > _MOST_OBJECTS
        datasets = {}
        for name in [name for name, kind in listed[:_MOST_OBJECTS] if kind == "dataset"]:
            with suppressing(Exception):  # a damaged one raises its error when it is read
                datasets[name] = file[name_bytes(name)]
    shapes, readable = _with_groups(file, datasets, reach)
    looked = f"the first {_MOST_OBJECTS:,} objects of the file"
    if not shapes:
        return f"{looked} include no datasets" if is_cut else "the file holds no datasets"
    shown = [f'"{name}" {shape}' for name, shape in shapes.items()][:_LISTED_DATASETS]
    more = len(shapes) - len(shown)
    text = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    text = f"{looked} include {text}; there are more" if is_cut else f"the file holds {text}"
    command = _sequences_in(shapes, missing) or _read_command(file, readable)
    return f"{text}; try: {command}" if command else text


def _sequences_in(paths: Iterable[str], missing: str) -> str | None:
    """Say how to read groups whose paths differ in one number, unless `missing` is in one."""
    found: Counter[tuple[str, str]] = Counter()
    for path in paths:
        for at in (at for at, sign in enumerate(path) if sign == "/"):
            pattern, numbers = _NUMBER.subn("*", path[:at])
            if numbers == 1 and missing.startswith(path[: at + 1]):
                return None
            if numbers == 1 and pattern.endswith("*"):
                found[pattern, path[at + 1 :]] += 1
    several = [one for one, count in found.items() if count > 1]
    name = missing.rpartition("/")[2]
    several.sort(key=lambda one: one[1].rpartition("/")[2] != name)
    return (
        'path "{1}", and sequences=Sequences(groups="{0}")'.format(*several[0]) if several else None
    )


def _with_groups(
    file: HDF5File, datasets: Mapping[str, h5py.Dataset], reach: Reach
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return shapes by path: of all fields, and of those that are read without further options.

    The fields are the datasets, with groups that are read as one field in place of their members.
    """
    groups: dict[str, tuple[int, ...] | None] = {}
    found: dict[str, tuple[int, ...]] = {}
    readable: dict[str, tuple[int, ...]] = {}
    for name, dataset in datasets.items():
        parent = name.rpartition("/")[0]
        if parent not in groups:
            groups[parent] = shape_of_field(dataset.parent) if parent else None
        of_field = groups[parent]
        if of_field is not None:
            found[parent] = readable[parent] = of_field
            continue
        shape = found[name] = _shown_shape(file, dataset, reach)
        with suppressing(Exception):  # h5py raises any of several exceptions for unknown types
            if shape and not dataset.dtype.hasobject:
                readable[name] = shape
    return found, readable


def shape_of_field(group: h5py.Group) -> tuple[int, ...] | None:
    """Return the shape of a group as a field (a sparse matrix or a column), or None."""
    with suppressing(Exception):  # damaged metadata may raise anything; that is no matter here
        kind = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format"))
        member = _MEMBERS.get(name_text(kind)) if isinstance(kind, str | bytes) else None
        if member is not None:
            return tuple(map(int, group[member].shape))
        if kind in _SPARSE:
            return tuple(map(int, group.attrs.get("shape", group.attrs.get("h5sparse_shape"))))
        if kind is None and MEMBERS_OF_10X <= set(group):
            return tuple(map(int, group["shape"][()][::-1]))
    return None


def _read_command(file: HDF5File, readable: Mapping[str, tuple[int, ...]]) -> str | None:
    if not readable:
        return None
    data = max(readable, key=lambda name: math.prod(readable[name]))
    as_long = [n for n in readable if n != data and readable[n][0] == readable[data][0]]
    labels = min(as_long, key=lambda name: math.prod(readable[name]), default=None)
    command = ["h5async", "read", file.filename, "--data-field", data]
    command += ["--labels-field", labels] if labels else ["--no-labels"]
    return " ".join(map(shell_word, command))


def _shown_shape(file: HDF5File, dataset: h5py.Dataset, reach: Reach) -> tuple[int, ...]:
    plist = dataset.id.get_create_plist()
    with suppressing(H5AsyncError):
        if plist.get_layout() == h5py.h5d.VIRTUAL:  # HDF5 would open sources that are not permitted
            Indexer(file, reach).sources("", plist)
        return dataset.shape or ()
    return ()


def walk(file: HDF5File, most_names: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield path and kind of the objects of a file, in the order of names; each object once.

    The kind is "dataset", "group", "link" for a soft or external link, wherever it leads, or
    "other" for a named datatype, or an object so damaged that HDF5 cannot identify it. At most
    `most_names` names are listed per group. DatasetError if the root group cannot be opened.
    """
    try:
        root = file["/"]
        seen = {_address(h5py.h5o.get_info(root.id))}
    except Exception as error:  # a damaged object may raise anything
        raise DatasetError(
            f"{file.filename}: the file is damaged: its root group cannot be opened ({error})"
        ) from error
    levels = [(root, "", names_in(root, most_names))]
    while levels:
        group, prefix, names = levels[-1]
        name, link = next(names, (b"", None))
        if link is None:
            levels.pop()
            continue
        path = prefix + name_text(name)
        if link != h5py.h5l.TYPE_HARD:
            yield path, "link"
            continue
        info = None
        with suppressing(Exception):  # a damaged object may raise anything
            found = h5py.h5o.get_info(group.id, name)
            node = group[name] if found.type == h5py.h5o.TYPE_GROUP else None
            info = found
        if info is None:
            yield path, "other"
            continue
        if _address(info) in seen:
            continue
        seen.add(_address(info))
        yield path, _KINDS.get(info.type, "other")
        if isinstance(node, h5py.Group):
            levels.append((node, f"{path}/", names_in(node, most_names)))


def _address(info: h5py.h5o.ObjInfo) -> tuple[int, int]:
    return info.fileno, info.addr


def names_in(
    group: h5py.Group, most: int | None = None, index: int = h5py.h5.INDEX_NAME
) -> Iterator[tuple[bytes, int]]:
    """Return the readable names in a group, in the order of an index, and their link types."""
    found: dict[bytes, int] = {}

    def note(name: bytes, info: h5py.h5l.LinkInfo) -> bool | None:
        if name in found or len(found) == most:  # a repeated name: the index has a loop
            return True
        found[name] = info.type
        return None

    with suppressing(Exception):  # damage ends the list
        group.id.links.iterate(note, info=True, idx_type=index)
    return iter(found.items())


def older_categories(located: Located, node: h5py.h5d.DatasetID | None) -> str | None:
    """Return the path of the categories of a dataset of codes, as AnnData wrote them before 0.8.

    An attribute refers to them, or they lie in a group ``__categories`` beside the dataset. None if
    there are none; DatasetError if the attribute refers to something else; any exception of h5py if
    metadata are damaged. Without a `node`, it is of integers, and has no such attribute; see
    `ASKED` of `alikedatasets.py`.
    """
    if located.rest or (node is not None and node.get_type().get_class() != h5py.h5t.INTEGER):
        return None
    if node is not None and h5py.h5a.exists(node, b"categories"):
        reference = h5py.Dataset(node).attrs["categories"]
        if isinstance(reference, h5py.Reference) and reference:
            names = located.file[reference]
            if isinstance(names, h5py.Dataset) and names.name is not None:
                return str(name_text(names.name)).strip("/")
            raise DatasetError(
                f'{located.file.filename}: column "{located.path}": its categories are not a'
                " dataset of the file"
            )
    parent, _, name = located.path.strip("/").rpartition("/")
    group = f"{parent}/{_GROUP}" if parent else _GROUP
    links = located.file.id.links
    if not links.exists(name_bytes(group)) or not links.exists(name_bytes(f"{group}/{name}")):
        return None
    return f"{group}/{name}"


class Grouping(NamedTuple):
    """Selects the groups of a file that are sequences; the paths of fields are relative to them.

    They match `pattern` (see `matching_groups`). If `only` is not empty, it is the path of a
    dataset, read by `read_names`, that lists the ones to use.
    """

    pattern: str
    only: str = ""
    read_names: Callable[[FileName, str], Sequence[str]] | None = None

    def __str__(self) -> str:
        return f"{self.pattern}\n{self.only}" if self.only else self.pattern

    def find(self, path: FileName, file: HDF5File, reach: Reach) -> list[str]:
        """Return the paths of the groups of an open file, in natural order.

        DatasetError if there is none, or a listed one is missing; also raises the errors of
        `matching_groups` and `read_names`.
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

    The pattern is a path; ``*``, ``?`` and ``[...]`` match as in file names. DatasetError if no
    group matches; UnsafeFileError if a link leads to a file that `reach` does not permit.
    """
    found = [""]
    names = components(pattern)
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
    with contextlib.ExitStack() as files:
        group = _group_at(file, parent, reach, files)
        if group is None:
            return []
        matches = [name_bytes(name)]
        if _WILDCARDS.search(name):
            pattern = re.compile(fnmatch.translate(name))
            matches = [found for found, _ in names_in(group) if pattern.match(name_text(found))]
        prefix, paths = f"{parent}/" if parent else "", []
        for found in matches:
            path, kind = prefix + name_text(found), _kind(group, found)
            if kind == "link":
                kind = "group" if _group_at(file, path, reach, files) is not None else "other"
            if kind == "group":
                paths.append(path)
        return paths


def _group_at(
    file: HDF5File, path: str, reach: Reach, files: contextlib.ExitStack
) -> h5py.Group | None:
    """Open a group, in this file or another, which `files` closes; None if there is none."""
    if not path:
        return file["/"]
    found = found_at(file, path, reach, files)
    is_group = found is not None and isinstance(found[1], h5py.h5g.GroupID)
    return h5py.Group(found[1]) if found is not None and is_group else None


def _kind(group: h5py.Group, name: bytes) -> Literal["group", "link", "other"]:
    try:
        if group.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            return "link"
        is_group = h5py.h5o.get_info(group.id, name).type == h5py.h5o.TYPE_GROUP
    except Exception:  # it is not there, or damaged
        return "other"
    return "group" if is_group else "other"
