"""Lists the objects of an open file, and describes them in errors about a missing dataset.

To list objects, only groups are opened: HDF5 may open other files when it opens a virtual dataset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import h5py

from h5async.errors import DatasetError, H5AsyncError
from h5async.index.datasets import Indexer
from h5async.index.links import Reach, metadata_cache
from h5async.io.stores import HDF5File
from h5async.spelling import name_bytes, name_text, shell_word
from h5async.system.interruptions import interruption, suppressing

_LISTED_DATASETS = 20
# Groups that are read as one field: by their declared type, the dataset that counts samples.
_MEMBERS = {"categorical": "codes", "nullable-integer": "values", "nullable-boolean": "values"}
_SPARSE = ("csr_matrix", "csr")
_OF_10X = {"barcodes", "data", "indices", "indptr", "shape"}
_MOST_OBJECTS = 200  # visited per file for a message: 0.05 s
LISTING_NBYTES = 32 << 20  # of metadata: the names of a large group are visited for each object
_KINDS: dict[int, Literal["dataset", "group"]] = {
    h5py.h5o.TYPE_DATASET: "dataset",
    h5py.h5o.TYPE_GROUP: "group",
}


def what_is_there(file: HDF5File, reach: Reach) -> str:
    """List datasets of a file, and a command that would read the largest of them.

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
        paths = [path for path, kind in listed[:_MOST_OBJECTS] if kind == "dataset"]
        datasets = _opened(file, paths)
    shapes = {name: _shown_shape(file, dataset, reach) for name, dataset in datasets.items()}
    shapes, readable = _with_groups(shapes, datasets)
    looked = f"the first {_MOST_OBJECTS:,} objects of the file"
    if not shapes:
        return f"{looked} are no datasets" if is_cut else "the file holds no datasets"
    shown = [f'"{name}" {shape}' for name, shape in shapes.items()][:_LISTED_DATASETS]
    more = len(shapes) - len(shown)
    text = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    text = f"{looked} hold {text}; there are others" if is_cut else f"the file holds {text}"
    command = _read_command(file, {name: shapes[name] for name in readable})
    return f"{text}; try: {command}" if command else text


def _opened(file: HDF5File, paths: Sequence[str]) -> dict[str, h5py.Dataset]:
    found = {}
    for path in paths:
        with suppressing(Exception):  # it is damaged; the error comes where it is read
            found[path] = file[name_bytes(path)]
    return found


def _with_groups(
    shapes: Mapping[str, tuple[int, ...]], datasets: Mapping[str, h5py.Dataset]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Replace datasets by the groups that are read as one field.

    Returns
    -------
    shapes
        Of the remaining datasets and the groups, by path.
    readable
        The paths that a reader takes without further options.
    """
    groups: dict[str, tuple[int, ...] | None] = {}
    found: dict[str, tuple[int, ...]] = {}
    readable = []
    for name, shape in shapes.items():
        parent = name.rpartition("/")[0]
        if parent not in groups:
            groups[parent] = shape_of_field(datasets[name].parent) if parent else None
        of_field = groups[parent]
        if of_field is not None and parent in found:
            continue
        found[name if of_field is None else parent] = shape if of_field is None else of_field
        if of_field is not None:
            readable.append(parent)
        elif shape and _has_fixed_size(datasets[name]):
            readable.append(name)
    return found, readable


def shape_of_field(group: h5py.Group) -> tuple[int, ...] | None:
    """Return the shape of a group as a field (a sparse matrix or a column), or None."""
    with suppressing(Exception):  # damaged metadata may raise anything, and do not matter here
        kind = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format"))
        member = _MEMBERS.get(name_text(kind)) if isinstance(kind, str | bytes) else None
        if member is not None:
            return tuple(map(int, group[member].shape))
        if kind in _SPARSE:
            return tuple(map(int, group.attrs.get("shape", group.attrs.get("h5sparse_shape"))))
        if kind is None and _OF_10X <= set(group):
            return tuple(map(int, group["shape"][()][::-1]))
    return None


def _read_command(file: HDF5File, readable: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a command that reads the largest readable object, if there is any."""
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
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        is_permitted = False
        with suppressing(H5AsyncError):
            Indexer(file, reach).sources("").find(plist)
            is_permitted = True
        if not is_permitted:
            return ()  # HDF5 would open them anyway
    return dataset.shape or ()


def _has_fixed_size(dataset: h5py.Dataset) -> bool:
    with suppressing(Exception):  # h5py has no one type for what it cannot express
        return not dataset.dtype.hasobject
    return False


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


def walk(file: HDF5File, most_names: int | None = None) -> Iterator[Listed]:
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
