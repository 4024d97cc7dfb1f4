"""Reads the layouts of a file's datasets: where their bytes lie, or why only h5py may read them.

The metadata are read once, and the file is open only while they are.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.config import Field
from h5async.config.files import FileName
from h5async.errors import ConfigError, DatasetError, H5AsyncError, out_of_memory
from h5async.index.composition import (
    Part,
    along_sequences,
    is_one_run,
    join_groups,
    merged_dimensions,
    sliced,
)
from h5async.index.contents import (
    LISTING_NBYTES,
    Grouping,
    older_categories,
    shape_of_field,
    walk,
    what_is_there,
)
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import (
    NotDirectError,
    OtherKindError,
    cf_attributes,
    dimension_names,
    reading,
)
from h5async.index.layout import DatasetLayout
from h5async.index.links import (
    BESIDE,
    Consulted,
    LastGroup,
    Located,
    Reach,
    below,
    files_of,
    locate,
    metadata_cache,
    open_index,
)
from h5async.index.storedtypes import Forms, variable_length
from h5async.index.tables import Piece, Slab
from h5async.io.hdf5files import HDF5File
from h5async.io.stores import store_of
from h5async.spelling import name_bytes, printable
from h5async.system.interruptions import passing, suppressing

# Memory per sequence along a dimension: of its bounds, or of an object.
_RUN_NBYTES, _PART_NBYTES = 32, 1024
_STRING_NBYTES = 64  # per variable-length string, as an object, and from HDF5
NumDim = int | str | tuple[int | str, int | str]
_COLUMN = re.compile(r"\[:, ?(-?\d{1,9})\]$")  # after a path


def read_layouts(
    path: FileName,
    fields: Mapping[str, Field],
    reach: Reach = BESIDE,
    grouping: Grouping | None = None,
    *,
    may_be_codes: bool = False,
) -> dict[str, DatasetLayout]:
    """Read the layout of each field's dataset, opening the file once.

    With a `grouping`, a field's datasets in its groups are concatenated. Datasets of category
    codes, as AnnData wrote them before 0.8, raise `OtherKindError` unless they `may_be_codes`.

    ReadError if the file cannot be opened, or a chunk table points outside it; DatasetError if a
    dataset is missing, is a group, or has no samples dimension or fixed-size dtype, or if
    ``num_dim`` is not the name of exactly one dimension; ConfigError if it is a number out of
    range; UnsafeFileError if a dataset lies in files that `reach` does not permit.
    """
    wanted = {
        name: Further(field.names_axes, field.decode_cf, may_be_codes=may_be_codes)
        for name, field in fields.items()
    }

    def read(file: HDF5File, reach: Reach) -> dict[str, DatasetLayout]:
        indexer = Indexer(file, reach)
        return {
            name: layout_at(indexer, field.path, field.num_dim, wanted[name])
            for name, field in fields.items()
        }

    def read_alone(file: HDF5File) -> dict[str, DatasetLayout]:
        consulted = Consulted()
        found = read(file, replace(reach, consulted=consulted))
        return {} if consulted.variables else found  # other files were searched for

    if reach.alike is not None and grouping is None and store_of(path).is_local:
        key = tuple((n, field.path, field.num_dim, wanted[n]) for n, field in fields.items())
        asks = any(one.dim_names or one.cf for one in wanted.values())
        asks = asks or not all(isinstance(field.num_dim, int) for field in fields.values())
        known = reach.alike.layouts(str(path), key, read_alone, asks_attributes=asks)
        for layout in known.values():
            reach.consulted.found(layout.file, layout.stamp)
        if known:
            return known
    with open_index(path) as file:
        if grouping is None:
            return read(file, reach)
        indexer = Indexer(file, reach)
        found: dict[str, list[DatasetLayout]] = {name: [] for name in fields}
        for group in grouping.find(path, file, reach):
            for name, field in fields.items():
                at = below(group, field.path)
                found[name].append(layout_at(indexer, at, field.num_dim, wanted[name]))
        return {name: join_groups(several) for name, several in found.items()}


class Further(NamedTuple):
    """What else to read of a dataset: names of dimensions, and how values are packed (CF).

    If it `is_lenient`, unreadable facts count as absent. Unless it `may_be_codes`, codes of
    categories raise `OtherKindError`; see `read_layouts`.
    """

    dim_names: bool = False
    cf: bool = False
    is_lenient: bool = False
    may_be_codes: bool = True


NOTHING_FURTHER = Further()


def list_layouts(
    path: FileName,
    reach: Reach = BESIDE,
    num_dim: NumDim = 0,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    with_attributes: bool = False,
    grouping: Grouping | None = None,
) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    """Yield each dataset of a file, as it is found, with its layout or an error.

    They come group by group, in the order of names; dimension `num_dim` counts their samples. Those
    whose paths are not `wanted` are not opened. With attributes, layouts have the names of
    dimensions and how values are packed. A `grouping` yields the datasets of its groups, joined.
    """
    attributes = Further(with_attributes, with_attributes, is_lenient=True)
    with passing(), open_index(path) as file, metadata_cache(file, LISTING_NBYTES):
        indexer = Indexer(file, reach)
        if grouping is not None:
            yield from _list_joined(indexer, grouping.find(path, file, reach), num_dim)
            return
        for name in _datasets(file, reach, wanted):
            yield name, _layout_or_error(indexer, name, num_dim, attributes)


def _layout_or_error(
    indexer: Indexer, path: str, num_dim: NumDim, wanted: Further = NOTHING_FURTHER
) -> DatasetLayout | H5AsyncError:
    layout: DatasetLayout | H5AsyncError
    try:
        with passing():
            layout = layout_at(indexer, path, num_dim, wanted)
    except H5AsyncError as error:
        layout = error
    return layout


def _list_joined(
    indexer: Indexer, groups: list[str], num_dim: NumDim
) -> Iterator[tuple[str, DatasetLayout | H5AsyncError]]:
    parents, depth = set(groups), groups[0].count("/") + 1
    parts = (name.split("/") for name in _datasets(indexer.file, indexer.reach))
    names = ("/".join(p[depth:]) for p in parts if "/".join(p[:depth]) in parents)
    found: dict[str, list[DatasetLayout]] = {name: [] for name in names if name}
    failed: dict[str, H5AsyncError] = {}
    for group in groups:
        for name in found:
            if name not in failed:
                layout = _layout_or_error(indexer, f"{group}/{name}", num_dim)
                if isinstance(layout, DatasetLayout):
                    found[name].append(layout)
                else:
                    failed[name] = layout
    for name, several in found.items():
        try:
            yield name, failed[name] if name in failed else join_groups(several)
        except H5AsyncError as error:
            yield name, error


def _datasets(
    file: HDF5File, reach: Reach, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[str]:
    """Yield the paths of datasets, and of objects that cannot be opened."""
    for name, kind in walk(file):
        if wanted(name) and kind != "group":
            if kind == "dataset" or _may_be_dataset(file, name, reach):
                yield name


def _may_be_dataset(file: HDF5File, path: str, reach: Reach) -> bool:
    """Return whether a name leads to a dataset, or to an object that cannot be opened."""
    with contextlib.ExitStack() as files:
        with suppressing(Exception):  # a damaged object may raise anything; the listing shows it
            found = locate(file, path, reach, files)
            return isinstance(found.open(), h5py.h5d.DatasetID)
        return True


def value_layout(
    path: FileName, name: str, most: int, reach: Reach = BESIDE
) -> DatasetLayout | NDArray[Any]:
    """Return the layout of a small dataset that is read whole: a mask, or a number per sample.

    `name` may end with a column, as in ``"lengths[:, 0]"``; negative numbers count from the end.
    `most` is the maximum number of values: a file must not exhaust the memory. Variable-length
    strings, which have no layout, are returned as (n,) bytes objects.

    DatasetError if it is missing, does not have one value per sample, or has too many; ReadError
    and UnsafeFileError as in `read_layouts`.
    """
    where, number = f'{path}: dataset "{name}"', None
    behind = _COLUMN.search(name)
    if behind is not None:
        name, number = name[: behind.start()], int(behind[1])
    with open_index(path) as file, indexer_at(file, name, reach) as (indexer, found, opened):
        node = h5py.Dataset(opened)
        if not node.shape:
            raise DatasetError(f"{where} must have one dimension, and has shape {node.shape}")
        if number is not None:
            if len(node.shape) != 2 or not -node.shape[1] <= number < node.shape[1]:
                raise DatasetError(
                    f"{where}: there is no such column, because it has shape {node.shape}"
                )
            number %= node.shape[1]  # negative numbers count from the end
        elif math.prod(node.shape[1:]) != 1:
            hint = f'; name one of its columns, as in "{name}[:, 0]"' if node.ndim == 2 else ""
            raise DatasetError(f"{where} must have one dimension, and has shape {node.shape}{hint}")
        if (node.size if number is None else node.shape[0]) > most:
            raise DatasetError(f"{where} holds {node.size:,} values; at most {most:,} are possible")
        stored = opened.get_type()
        if not (isinstance(stored, h5py.h5t.TypeStringID) and stored.is_variable_str()):
            layout = indexer.layout(found.path, opened, found.rest, 0)
            return layout if number is None else _column_of(layout, number)
        if number is not None:
            raise DatasetError(f"{where}: columns of strings of variable length cannot be read")
        plist = opened.get_create_plist()
        if plist.get_layout() == h5py.h5d.VIRTUAL or plist.get_external_count():
            raise DatasetError(
                f"{where} holds strings of variable length, which lie in other files"
            )
        stamp = found.file.source.stamp()
        what = f"{where} of shape {node.shape}: its strings"
        reach.room.take(_STRING_NBYTES * int(node.size), what, [(found.file.filename, stamp)])
        with reading(where):
            return np.asarray(node[()]).reshape(-1)


def _column_of(layout: DatasetLayout, number: int) -> DatasetLayout:
    every = Slab.run(0, layout.num_samples)
    part = Part(layout, every, every, Piece(source_region=(slice(number, number + 1),)))
    return sliced(layout, layout.num_samples, (), (part,) if layout.num_samples else ())


def layout_at(
    indexer: Indexer, path: str, num_dim: NumDim, wanted: Further = NOTHING_FURTHER
) -> DatasetLayout:
    """Read the layout of the dataset at a path, in the indexer's file or another."""
    if isinstance(num_dim, tuple):
        return _layout_of_two(indexer, path, num_dim, wanted)
    axis = num_dim if isinstance(num_dim, int) and not (wanted.dim_names or wanted.cf) else None
    if axis is not None and (known := indexer.recognized(path, axis)) is not None:
        found, layout = known
        _require_no_codes(found, None, layout, wanted)
        return layout
    with contextlib.ExitStack() as files:
        found, node = _dataset_at(indexer.file, path, indexer.reach, files, indexer.last_group)
        if found.file is not indexer.file:
            indexer = Indexer(found.file, indexer.reach)
        layout = indexer.layout(found.path, node, found.rest, num_dim)
        _require_no_codes(found, node, layout, wanted)
        if axis is not None:
            indexer.note(found, layout, axis)
        where = f'{found.file.filename}: dataset "{found.path}"'
        if wanted.dim_names:
            names = partial(dimension_names, node, indexer.scale_names)
            layout = layout.changed(dim_names=_read_attributes(names, wanted, where))
        if wanted.cf:
            cf = _read_attributes(partial(cf_attributes, node, where), wanted, where)
            layout = layout.changed(cf=((0, cf),))
        return layout


def _require_no_codes(
    found: Located, node: h5py.h5d.DatasetID | None, layout: DatasetLayout, wanted: Further
) -> None:
    """Reject codes of categories; without a `node`, no attribute says that they are."""
    has_categories = False
    if layout.dtype.kind in "iu" and not wanted.may_be_codes:
        with suppressing(Exception):  # damaged metadata may raise anything; that is no matter here
            has_categories = older_categories(found, node) is not None
    if has_categories:
        where = f'{found.file.filename}: dataset "{found.path}"'
        raise OtherKindError(f"{where} holds the codes of categories")


def _read_attributes(
    read: Callable[[], tuple[Any, ...]], wanted: Further, where: str
) -> tuple[Any, ...]:
    if wanted.is_lenient:
        with suppressing(Exception):
            return read()
        return ()
    with reading(f"{where}: its attributes"):
        return read()


@contextlib.contextmanager
def indexer_at(
    file: HDF5File, path: str, reach: Reach
) -> Iterator[tuple[Indexer, Located, h5py.h5d.DatasetID]]:
    """Follow a path to a dataset, in this file or another; raises like `read_layouts`."""
    with contextlib.ExitStack() as files:
        found, node = _dataset_at(file, path, reach, files)
        yield Indexer(found.file, reach), found, node


def _layout_of_two(
    indexer: Indexer, path: str, num_dim: tuple[int | str, int | str], wanted: Further
) -> DatasetLayout:
    by_sequence, by_step = (layout_at(indexer, path, dim, wanted) for dim in num_dim)
    axes = by_sequence.sample_axis, by_step.sample_axis
    if axes[0] == axes[1]:
        raise ConfigError(
            f'{indexer.file.filename}: dataset "{path}": num_dim names the same dimension'
            f" twice: {num_dim}"
        )
    are_one_run = axes == (0, 1) and is_one_run(by_sequence)
    nbytes = (_RUN_NBYTES if are_one_run else _PART_NBYTES) * by_sequence.num_samples
    what = f'{indexer.file.filename}: dataset "{path}" of shape {by_step.shape}: its sequences'
    indexer.reach.room.take(nbytes, what, files_of(by_step))
    if are_one_run:
        return merged_dimensions(by_sequence)
    return along_sequences(by_step, axes[0])


def _dataset_at(
    file: HDF5File,
    path: str,
    reach: Reach,
    files: contextlib.ExitStack,
    last_group: LastGroup | None = None,
) -> tuple[Located, h5py.h5d.DatasetID]:
    """Open the dataset at a path, in this file or another, which `files` will close."""
    try:
        found = locate(file, path, reach, files, last_group)
        node = found.open()
    except H5AsyncError:
        raise
    except MemoryError as error:
        raise out_of_memory(f'{file.filename}: dataset "{path}"', error) from error
    except Exception as error:  # KeyError for most, but a damaged object may raise anything
        missing = isinstance(error, KeyError) and "Unable" not in str(error)
        missing = missing or "doesn't exist" in str(error)
        detail = "" if missing else f" that can be opened ({error})"
        if missing and (target := _soft_target(file, path)):
            detail = f', as its soft link leads to "{target}", where there is nothing'
        elif missing and "@" in path:
            detail = '; if it is an attribute, give the field per="file", for example'
        raise DatasetError(
            f'{file.filename}: there is no dataset "{path}"{detail};'
            f" {what_is_there(file, reach, path)}"
        ) from error
    if not isinstance(node, h5py.h5d.DatasetID):
        is_group = isinstance(node, h5py.h5g.GroupID)
        kind = "group" if is_group else "named type"
        if is_group and shape_of_field(h5py.Group(node)) is not None:
            raise OtherKindError(
                f'{file.filename}: "{path}" is a group that is read as one field, a sparse matrix'
                " or a column of a table (its categories are read with it); give its path alone,"
                " without options of other kinds"
            )
        raise OtherKindError(
            f'{file.filename}: "{path}" is a {kind}, not a dataset;'
            f" {what_is_there(file, reach, path)}"
        )
    return found, node


def _soft_target(file: HDF5File, path: str) -> str:
    """Return where the soft link at a path leads; "" if there is none."""
    with suppressing(Exception):
        link = file.get(name_bytes(path), getlink=True)
        return printable(link.path) if isinstance(link, h5py.SoftLink) else ""
    return ""


def references(path: FileName, name: str, reach: Reach) -> tuple[DatasetLayout, Forms]:
    """Return the layout of the references of a variable-length dataset, and their forms by file.

    The layout has shape (n,), and a void dtype of the size of a reference. The forms are those of
    its own file, and of the source files of a virtual dataset. Raises `DatasetError` unless it is a
    variable-length dataset with one dimension, and the errors of `read_layouts`.
    """
    where = f'{path}: dataset "{name}"'
    with open_index(path) as file, indexer_at(file, name, reach) as (indexer, found, node):
        try:
            if found.rest or variable_length(node) is None:
                name = "a datatype that NumPy does not have"
                with suppressing(Exception):  # h5py raises any of several for unknown types
                    name = str(node.dtype)
                is_bytes = name.startswith(("|S", "|V"))
                more = ", or store each sample as h5py.vlen_dtype(np.uint8)" if is_bytes else ""
                raise DatasetError(
                    f"{where} is of {name}, not of a variable-length datatype; give the path of its"
                    f" offsets{more}"
                )
            forms: Forms = {}
            return indexer.raw_layout(found.path, node, forms), forms
        except NotDirectError as error:
            raise DatasetError(
                f"{where} cannot be read: {error}; store flat values, and their offsets"
            ) from error


def may_be_variable_length(file: HDF5File, name: str, reach: Reach) -> bool:
    """Return whether a path in an open file leads to a dataset of a variable-length datatype."""
    try:
        with indexer_at(file, name, reach) as (_, found, node):
            return not found.rest and variable_length(node) is not None
    except NotDirectError:
        return True
    except DatasetError:
        return False
