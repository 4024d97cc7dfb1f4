"""Finds columns of tables that are stored as two datasets: categorical and nullable ones.

A path in a file enters; a `Column` leaves with the position of its numbers. AnnData's ``obs`` and
``var`` have such columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.datasets import Indexer
from h5async.index.layout import DatasetLayout
from h5async.index.links import BESIDE, Located, Reach
from h5async.index.metadata import layout_at, value_layout
from h5async.index.oldercategories import older_categories
from h5async.index.sparsegroup import find, reading, text_attribute
from h5async.io.stores import HDF5File
from h5async.spelling import name_text

_MOST_CATEGORIES = 1 << 24
_NULLABLE = ("nullable-integer", "nullable-boolean")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    where
        Its name in messages: ``'a.h5ad: column "obs/cell_type"'``.
    values
        A flat dataset: for a categorical its codes, with -1 for no value; otherwise the values.
    categories
        For a categorical: their dataset; variable-length strings as (n,) bytes objects. See
        `category_names`.
    is_ordered
        Whether the categories have an order.
    mask
        For a nullable column: a flat dataset, True if there is no value.
    """

    where: str
    values: DatasetLayout
    categories: DatasetLayout | NDArray[Any] | None = None
    is_ordered: bool = False
    mask: DatasetLayout | None = None


def column(file: HDF5File, path: str, reach: Reach = BESIDE) -> Column | None:
    """Return the categorical or nullable column at a path, or None.

    Parameters
    ----------
    file
        Open, under h5py's rules for threads.
    path
        Of its group; in files of AnnData before 0.8, of the dataset of its codes.
    reach
        Which other files links may lead to.

    Raises
    ------
    DatasetError
        If the parts do not fit together.
    ReadError
        If it cannot be read.
    UnsafeFileError
        If a link leads to a file that `reach` does not permit.
    """
    with contextlib.ExitStack() as files:
        located, node = find(file, path, reach, files)
        if located is None or isinstance(node, h5py.h5t.TypeID):
            return None
        where = f'{located.file.filename}: column "{located.path}"'
        with reading(where):
            if isinstance(node, h5py.h5d.DatasetID):
                return _older_categorical(located, h5py.Dataset(node), reach, where)
            group = h5py.Group(node)
            encoding = text_attribute(group, "encoding-type")
            is_ordered = bool(group.attrs.get("ordered", False))
        if encoding == "categorical":
            categories = _categories(located, f"{located.path}/categories", reach)
            codes = _flat(located, "codes", "iu", reach, where)
            return Column(where, codes, categories, is_ordered)
        if encoding not in _NULLABLE:
            return None
        values = _flat(located, "values", "iub", reach, where)
        mask = _flat(located, "mask", "b", reach, where)
        if mask.num_samples != values.num_samples:
            raise DatasetError(
                f"{where} has {values.num_samples} values, and a mask of {mask.num_samples}"
            )
        return Column(where, values, mask=mask)


def index_of_table(file: HDF5File, path: str, reach: Reach = BESIDE) -> str:
    """Return which column of a table has the names of its rows: AnnData lets users name it.

    Parameters and the errors `ReadError` and `UnsafeFileError` are those of `column`.
    """
    usual = "_index"
    with contextlib.ExitStack() as files:
        located, node = find(file, path, reach, files)
        if located is None:
            return usual
        with reading(f'{located.file.filename}: table "{located.path}"'):
            if isinstance(node, h5py.h5g.GroupID):
                return text_attribute(h5py.Group(node), usual) or usual
            if isinstance(
                node, h5py.h5d.DatasetID
            ):  # of AnnData before 0.7: rows of a compound type
                members = h5py.Dataset(node).dtype.names or ()
                return "index" if usual not in members and "index" in members else usual
    return usual


def category_names(values: NDArray[Any]) -> tuple[Any, ...]:
    """Return categories as `str` or numbers, from all `values` of ``column.categories``."""
    return tuple(name_text(v) if isinstance(v, bytes) else v for v in values.tolist())


def union_of(
    categories: Sequence[Sequence[Any]],
) -> tuple[tuple[Any, ...], list[NDArray[np.int64]]]:
    """Unite the categories of several files.

    Returns
    -------
    names
        Those of the first file, then new ones of the others, in order.
    codes
        Per file, int64 (n + 1,): ``codes[c]`` is its code c in the union. The last one is -1, so
        that -1 stays -1.
    """
    numbers: dict[Any, int] = {}
    codes = []
    for names in categories:
        found = [numbers.setdefault(name, len(numbers)) for name in names]
        codes.append(np.array([*found, -1], np.int64))
    return tuple(numbers), codes


def _older_categorical(
    located: Located, dataset: h5py.Dataset, reach: Reach, where: str
) -> Column | None:
    """Return a column whose dataset of codes is separate from its categories."""
    path = older_categories(located, dataset.id)
    if path is None:
        return None
    codes = _require_flat(
        layout_at(Indexer(located.file, reach), located.path, 0, reach), "iu", where
    )
    is_ordered = bool(located.file[path].attrs.get("ordered", False))
    return Column(where, codes, _categories(located, path, reach), is_ordered)


def _categories(located: Located, path: str, reach: Reach) -> DatasetLayout | NDArray[Any]:
    """Return the categories; for pandas' nullable strings without missing values, the values."""
    with contextlib.ExitStack() as files:
        _, node = find(located.file, path, reach, files)
        if isinstance(node, h5py.h5g.GroupID):
            path = f"{path}/values"
    return value_layout(located.file.filename, path, _MOST_CATEGORIES, reach)


def _flat(located: Located, name: str, kinds: str, reach: Reach, where: str) -> DatasetLayout:
    """Return the layout of a flat member of a group with these kinds of dtype."""
    layout = layout_at(Indexer(located.file, reach), f"{located.path}/{name}", 0, reach)
    return _require_flat(layout, kinds, f'{where}, dataset "{name}"')


def _require_flat(layout: DatasetLayout, kinds: str, where: str) -> DatasetLayout:
    if len(layout.shape) != 1 or layout.dtype.kind not in kinds:
        raise DatasetError(
            f"{where} has shape {layout.shape} and dtype {layout.dtype}; a column of that kind must"
            " be flat, and of integers or booleans"
        )
    return layout
