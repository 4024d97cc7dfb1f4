"""Describes the content of a file, for errors about a missing dataset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import h5py

from h5async.errors import DatasetError, H5AsyncError
from h5async.index.datasets import Indexer
from h5async.index.links import Reach, metadata_cache
from h5async.index.listing import walk
from h5async.names import name_bytes, name_text, shell_word
from h5async.system.interruptions import interruption, suppressing

_LISTED_DATASETS = 20
# Groups that are read as one field: by their declared type, the dataset that counts samples.
_MEMBERS = {"categorical": "codes", "nullable-integer": "values", "nullable-boolean": "values"}
_SPARSE = ("csr_matrix", "csr")
_OF_10X = {"barcodes", "data", "indices", "indptr", "shape"}
_MOST_OBJECTS = 200  # visited per file for a message: 0.05 s
LISTING_NBYTES = 32 << 20  # of metadata: the names of a large group are visited for each object


def what_is_there(file: h5py.File, reach: Reach) -> str:
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


def _opened(file: h5py.File, paths: Sequence[str]) -> dict[str, h5py.Dataset]:
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


def _read_command(file: h5py.File, readable: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a command that reads the largest readable object, if there is any."""
    if not readable:
        return None
    data = max(readable, key=lambda name: math.prod(readable[name]))
    as_long = [n for n in readable if n != data and readable[n][0] == readable[data][0]]
    labels = min(as_long, key=lambda name: math.prod(readable[name]), default=None)
    command = ["h5async", "read", file.filename, "--data-field", data]
    command += ["--labels-field", labels] if labels else ["--no-labels"]
    return " ".join(map(shell_word, command))


def _shown_shape(file: h5py.File, dataset: h5py.Dataset, reach: Reach) -> tuple[int, ...]:
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
