"""Unites the metadata that files have once for all samples: variables, categories, classes.

Files enter; the values that replace those of the first file leave, with maps from old to new
numbers, and the objects to leave out. Names keep their order: those of the first file, then those
that others add.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.groupfields import union_of
from h5async.io.hdf5files import HDF5File
from h5async.order.selection import Int64s
from h5async.packing.sparsegroups import is_anndata, refuse_old_anndata
from h5async.spelling import name_bytes, name_text, named

Join = Literal["inner", "outer"]
_TABLES = ("obs/", "obsm/", "var/", "raw/var/")
_BY_NAME = ("obs", "obsm", "layers")  # groups whose members all files must have


@dataclass
class United:
    """How several files become one; all keys are paths of datasets or groups.

    `values` has the contents of datasets that are written whole, `attributes` those that change.
    `maps` has, for each file, the new numbers by the old ones in a dataset; `columns` has the
    numbers of columns of sparse matrices, and `left_out` the reasons to leave an object out.
    """

    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    maps: dict[str, list[Int64s]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def leaves_out(self, path: str) -> bool:
        """Return whether an object, or a group that contains it, is left out."""
        return any(f"{path}/".startswith(f"{one}/") for one in self.left_out)


def unite(files: Sequence[HDF5File], paths: Collection[str], join: Join | None) -> United:
    """Return how to unite files; `paths` are those of the datasets in the first one.

    Raises DatasetError if this is impossible, or if variables differ and `join` is None.
    """
    for file in files:
        refuse_old_anndata(file)
    found, is_annotated = United(), is_anndata(files[0])
    for path in paths:
        group = path.removesuffix("/codes")
        if group != path and f"{group}/categories" in paths:
            if not is_annotated or group.startswith(_TABLES):
                _unite_categories(found, files, group)
        elif any("classes" in one[path].attrs for one in files if path in one):
            _unite_classes(found, files, path)
    if not is_annotated:
        return found
    without = [file.filename for file in files if "X" not in file]
    if 0 < len(without) < len(files):
        raise DatasetError(f'{without[0]}: there is no "X", which other files have')
    found.left_out["obsp"] = "is of pairs of samples: compute it again"
    for name in (*_BY_NAME, "raw"):
        members = [_members(file, name) for file in files]
        common = members[0].intersection(*members[1:])
        for one in sorted(members[0].union(*members[1:]) - common):
            found.left_out[one] = "is not in all files"
    if "obs" in files[0]:
        _index_of(files, "obs")
    for prefix in ("", "raw/"):
        table = f"{prefix}var"
        if len(files) > 1 and not found.leaves_out(table) and table in files[0]:
            _Table(found, files, table, paths).unite(join)
    for table in ("obs", "var", "raw/var"):
        _correct_order(found, files[0], table)
    found.values = {p: one for p, one in found.values.items() if not found.leaves_out(p)}
    found.left_out = {
        path: why for path, why in found.left_out.items() if any(path in file for file in files)
    }
    return found


def _index_of(files: Sequence[HDF5File], table: str) -> str:
    """Return the path of a table's row names."""
    found = {f"{table}/{name_text(file[table].attrs['_index'])}" for file in files}
    if len(found) > 1:
        raise DatasetError(f'"{table}" has its names in different columns: {sorted(found)}')
    return found.pop()


def _members(file: HDF5File, name: str) -> set[str]:
    if name not in file:
        return set()
    return {name} if name == "raw" else {f"{name}/{name_text(one)}" for one in file[name]}


def _unite_categories(found: United, files: Sequence[HDF5File], group: str) -> None:
    """Unite the categories of a column that is in all files."""
    every = [file.get(f"{group}/categories") for file in files]
    if len(files) == 1 or not all(isinstance(one, h5py.Dataset) for one in every):
        return
    values = [one[...] for one in every]
    if all(np.array_equal(one, values[0]) for one in values):
        return
    where = f'{files[0].filename}: the categories of "{group}"'
    if any(file[group].attrs.get("ordered", False) for file in files):
        raise DatasetError(f"{where} are ordered, but differ in other files; make them the same")
    if len({one.dtype for one in values}) > 1:
        raise DatasetError(f"{where} have another datatype in other files; make them the same")
    names, maps = _appended([one.tolist() for one in values])
    found.values[f"{group}/categories"] = np.array(names, values[0].dtype)
    found.maps[f"{group}/codes"] = maps


def _unite_classes(found: United, files: Sequence[HDF5File], path: str) -> None:
    """Unite the class names in the attribute ``classes`` of labels."""
    names = [
        [name_text(one) for one in np.atleast_1d(file[path].attrs.get("classes", ())).tolist()]
        if path in file
        else []
        for file in files
    ]
    if all(one == names[0] for one in names):
        return
    if files[0][path].dtype.kind not in "iu" or not all(names):
        raise DatasetError(
            f'{files[0].filename}: the classes of "{path}" differ from those in other files; make'
            ' the attributes "classes" the same'
        )
    every, maps = _appended(names)
    found.attributes[path], found.maps[path] = {"classes": np.array(every, object)}, maps
    for one in ("classes", f"{path}_classes"):
        known = [name_bytes(name) for name in names[0]]
        if one in files[0] and np.array_equal(files[0][one], known):
            found.values[one] = np.array([name_bytes(name) for name in every], object)


def _appended(several: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Int64s]]:
    """Return the union of the names, and for each list the positions of its names in it."""
    names, codes = union_of(several)
    return list(names), [one[:-1] for one in codes]


class _Table:
    """The variables of several files: the rows of the tables at a path."""

    def __init__(
        self, found: United, files: Sequence[HDF5File], path: str, paths: Collection[str]
    ) -> None:
        self._found, self._files, self._path, self._paths = found, files, path, paths
        self._index = _index_of(files, path)
        self._names = [file[self._index][...].tolist() for file in files]

    def unite(self, join: Join | None) -> None:
        """Determine the variables to keep, their new numbers, and their columns."""
        names = self._names
        odd = next((n for n, one in enumerate(names) if one != names[0]), None)
        if odd is not None and join is None:
            raise DatasetError(
                f'{self._files[odd].filename}: "{self._index}" differs from that of'
                f" {self._files[0].filename}; choose the variables to keep, those in all files or"
                f" in any: {named('join', 'inner')} or {named('join', 'outer')}"
            )
        for file, one in zip(self._files, names, strict=True):
            if odd is not None and len(set(one)) < len(one):
                raise DatasetError(
                    f'{file.filename}: "{self._index}" has duplicate names; make them unique'
                )
        kept, maps = _appended(names) if odd is not None else (names[0], [np.arange(len(names[0]))])
        if odd is not None and join == "inner":
            common = set.intersection(*map(set, names))
            is_kept = np.array([name in common for name in kept], np.bool_)
            new = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
            kept, maps = [one for one in kept if one in common], [new[one] for one in maps]
        if odd is not None:
            self._unite_columns_of_matrices(maps, len(kept))
        self._unite_columns(maps * (len(names) // len(maps)), len(kept))

    def _unite_columns_of_matrices(self, maps: list[Int64s], count: int) -> None:
        """Map the columns of matrices to their new numbers."""
        found, prefix = self._found, self._path.removesuffix("var")
        for one in (f"{prefix}varm", f"{prefix}varp"):
            found.left_out[one] = "is of variables, which differ"
        layers = [one for one in _members(self._files[0], "layers") if not prefix]
        for path in (f"{prefix}X", *layers):
            if found.leaves_out(path) or path not in self._files[0]:
                continue
            if path in self._paths:
                raise DatasetError(
                    f'{self._files[0].filename}: "{path}" is dense, but only variables of sparse'
                    " rows (CSR) can be united; convert it (in Python: csr_matrix(X))"
                )
            found.maps[f"{path}/indices"], found.columns[path] = maps, count

    def _unite_columns(self, maps: list[Int64s], count: int) -> None:
        """Unite the columns that describe variables; leave out those on which files disagree.

        (Like AnnData's ``merge="same"``, except that a variable in only one file keeps its value.)
        """
        columns: dict[str, list[str]] = {}
        for path in self._paths:
            column = path.removeprefix(f"{self._path}/").split("/")[0]
            if path.startswith(f"{self._path}/") and not path.endswith("/categories"):
                columns.setdefault(f"{self._path}/{column}", []).append(path)
        for column, leaves in columns.items():
            values = [self._united(leaf, maps, count) for leaf in leaves]
            if all(one is not None for one in values):
                changed = {p: v for p, v in zip(leaves, values, strict=True) if v is not None}
                self._found.values |= {
                    p: one for p, one in changed.items() if one.size or not count
                }
            elif column == self._index:
                raise DatasetError(
                    f'"{column}" has different datatypes in the files; rewrite them with AnnData'
                )
            else:
                self._found.left_out[column] = "is not the same in all files"

    def _united(self, path: str, maps: list[Int64s], count: int) -> NDArray[Any] | None:
        """Return the values for all variables; None if files disagree, empty if nothing changes."""
        out, is_set = np.zeros(0), np.zeros(count, np.bool_)
        first = np.zeros(0)
        for number, (file, new) in enumerate(zip(self._files, maps, strict=True)):
            node = file.get(path)
            if not isinstance(node, h5py.Dataset) or node.shape != new.shape:
                return None
            old = node[...]
            if path in self._found.maps:
                codes = self._found.maps[path]
                old = np.append(codes[number], -1)[old].astype(fitting_dtype(old.dtype, codes))
            if not number:
                first, out = old, np.zeros(count, old.dtype)
            elif old.dtype != out.dtype and path not in self._found.maps:
                return None
            at, old = new[new >= 0], old[new >= 0]
            if not are_same(out[at[is_set[at]]], old[is_set[at]]):
                return None
            out[at], is_set[at] = old, True
        return out if out.shape != first.shape or not are_same(out, first) else out[:0]


def are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether arrays are equal, with NaNs equal to NaNs."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def fitting_dtype(dtype: np.dtype[Any], maps: Sequence[Int64s]) -> np.dtype[Any]:
    """Return `dtype` if it can hold the new numbers and -1; otherwise one that can."""
    most = max(int(one.max(initial=0)) for one in maps)
    return dtype if most <= np.iinfo(dtype).max else np.min_scalar_type(-1 - most)


def _correct_order(found: United, file: HDF5File, table: str) -> None:
    """Remove columns that are left out from a table's ``column-order``."""
    if table not in file or "column-order" not in file[table].attrs:
        return
    before: Mapping[str, Any] = file[table].attrs
    columns = [name_text(one) for one in before["column-order"]]
    kept = [one for one in columns if not found.leaves_out(f"{table}/{one}")]
    if kept != columns:
        found.attributes[table] = {"column-order": np.array(kept, object)}
