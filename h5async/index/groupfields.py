"""Finds fields that consist of several datasets: sparse matrices, and columns of tables.

Takes a path in a file; returns a `SparseGroup` or a `Column` with the layouts of its datasets. A
sparse matrix is a group of three flat datasets: AnnData's, with the attribute ``encoding-type`` or,
before 0.7, ``h5sparse_format``; or that of 10x Genomics, whose columns are cells, read as its
transpose. Categorical and nullable columns, as in AnnData's ``obs`` and ``var``, are two datasets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, H5AsyncError
from h5async.index.contents import MEMBERS_OF_10X, older_categories
from h5async.index.datasets import Indexer
from h5async.index.hdf5 import reading
from h5async.index.layout import DatasetLayout
from h5async.index.links import BESIDE, Located, Reach, locate
from h5async.index.metadata import layout_at, value_layout
from h5async.io.hdf5files import HDF5File
from h5async.spelling import name_text, shell_word

_FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}
_MOST_CATEGORIES = 1 << 24
KIND, ENCODED = "h5async-kind", ("image", "audio")  # an attribute of datasets, and its values
_NULLABLE = ("nullable-integer", "nullable-boolean")


class SparseGroup(NamedTuple):
    """A sparse matrix in a file: flat datasets; `row_offsets` checks the content of `indptr`."""

    shape: tuple[int, int]  # samples, and columns
    data: DatasetLayout  # the values of all samples,
    indices: DatasetLayout  # their columns,
    indptr: DatasetLayout  # and the (samples + 1,) bounds of samples


def sparse_group(file: HDF5File, path: str, reach: Reach = BESIDE) -> SparseGroup | None:
    """Return the sparse matrix at a path of an open file, or None.

    DatasetError if the parts of the matrix do not fit together, or if columns are compressed, not
    rows: then the message has a command that converts the file. ReadError if its metadata cannot be
    read; UnsafeFileError if a link leads to a file that `reach` does not permit.
    """
    with _opened(file, path, reach, "group") as found:
        if found is None or not isinstance(found.node, h5py.Group):
            return None
        located, group, where = found
        form, shape = _form_of(group, where)
        if form is None:
            return None
        if form == "csc":
            raise DatasetError(
                f"{where} is a matrix of compressed columns (CSC), in which rows are scattered;"
                f" store compressed rows: {_conversion(located)}"
            )
        indexer = Indexer(located.file, reach)
        parts = {
            name: layout_at(indexer, f"{located.path}/{name}", 0)
            for name in ("data", "indices", "indptr")
        }
        shape = shape[::-1] if form == "10x" else shape
        _require_fit(parts, shape, where)
        return SparseGroup(shape, **parts)


def names_beside(file: HDF5File, path: str, reach: Reach = BESIDE) -> tuple[str, str] | None:
    """Return the paths of the names and the ids of a matrix's columns, if they lie beside it.

    10x Genomics writes ``features/name`` and ``features/id``; before version 3, ``gene_names`` and
    ``genes``. Raises `ReadError` and `UnsafeFileError` like `sparse_group`.
    """
    with _opened(file, path, reach, "group") as found:
        if found is not None and isinstance(found.node, h5py.Group) and "barcodes" in found.node:
            for pair in (("features/name", "features/id"), ("gene_names", "genes")):
                if all(name in found.node for name in pair):
                    return f"{path}/{pair[0]}", f"{path}/{pair[1]}"
    return None


def row_offsets(indptr: NDArray[Any], group: SparseGroup) -> NDArray[np.int64]:
    """Return the bounds of rows, int64 (samples + 1,), from all values of ``group.indptr``.

    Row i has the values ``offsets[i]`` up to ``offsets[i + 1]``. DatasetError unless the offsets
    begin with 0, never fall, and end with the number of values.
    """
    where = f'{group.indptr.file}: dataset "{group.indptr.path}"'
    if indptr.dtype.kind == "u" and indptr.max(initial=0) > np.iinfo(np.int64).max:
        raise DatasetError(f"{where} has offsets above 2**63; the file is damaged")
    offsets = indptr.astype(np.int64, copy=False)
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        row = int(falls[0])
        raise DatasetError(
            f"{where}: row {row} would begin at value {offsets[row]} and end at value"
            f" {offsets[row + 1]}; the file is damaged"
        )
    num_values = group.data.num_samples
    if offsets[0] != 0 or offsets[-1] != num_values:
        raise DatasetError(
            f"{where}: the rows begin at value {offsets[0]} and end at value {offsets[-1]}, and"
            f" there are {num_values} values; the file is damaged"
        )
    return offsets


class _Opened(NamedTuple):
    """A group or dataset, where it was found, and its name in messages."""

    located: Located
    node: h5py.Group | h5py.Dataset
    where: str


@contextlib.contextmanager
def _opened(file: HDF5File, path: str, reach: Reach, what: str) -> Iterator[_Opened | None]:
    """Open the object at a path, a `what` in messages; None if it is not a group or dataset.

    Raises like `locate`, and `ReadError` if the object is damaged, also while it is open.
    """
    with contextlib.ExitStack() as files:
        with reading(f'{file.filename}: "{path}": its metadata'):
            try:
                located = locate(file, path, reach, files)
                node = None if located.rest else located.open()
            except KeyError as error:
                if isinstance(error, H5AsyncError):
                    raise
                node = None
        of_type = {h5py.h5g.GroupID: h5py.Group, h5py.h5d.DatasetID: h5py.Dataset}.get(type(node))
        if of_type is None:
            yield None
            return
        where = f'{located.file.filename}: {what} "{located.path}"'
        with reading(f"{where}: its metadata"):
            yield _Opened(located, of_type(node), where)


def text_attribute(node: h5py.Group | h5py.Dataset, name: str) -> str | None:
    """Return an attribute that is a string, or None."""
    value = node.attrs.get(name)
    return name_text(value) if isinstance(value, str | bytes) else None


def kind_attribute(file: HDF5File, path: str, reach: Reach = BESIDE) -> str | None:
    """Return the kind of media that a dataset's elements encode, by its attribute, or None.

    Raises like `sparse_group`.
    """
    with _opened(file, path, reach, "dataset") as found:
        kind = None if found is None else text_attribute(found.node, KIND)
        return kind if kind in ENCODED else None


def _form_of(group: h5py.Group, where: str) -> tuple[str | None, tuple[int, int]]:
    """Return how a matrix is stored ("csr", "csc", "10x"), and its shape as stored."""
    for name, of_shape in (("encoding-type", "shape"), ("h5sparse_format", "h5sparse_shape")):
        form = _FORMATS.get(text_attribute(group, name) or "")
        if form is not None:
            return form, _shape_of(group.attrs.get(of_shape), f'{where}, attribute "{of_shape}"')
    if "encoding-type" in group.attrs or not MEMBERS_OF_10X <= set(group):
        return None, (0, 0)
    return "10x", _shape_of(_two_numbers(group), f'{where}, dataset "shape"')


def _two_numbers(group: h5py.Group) -> Any:
    if not isinstance(group.get("shape", getlink=True), h5py.HardLink):
        return None
    found = group["shape"]
    is_here = isinstance(found, h5py.Dataset) and not found.is_virtual and not found.external
    return found[()] if is_here and found.shape == (2,) else None


def _shape_of(value: object, what: str) -> tuple[int, int]:
    found = np.asarray(value)
    if found.shape != (2,) or found.dtype.kind not in "iu" or (found < 0).any():
        raise DatasetError(f"{what} must be the numbers of rows and columns, but is {value!r}")
    if (found > np.iinfo(np.int64).max).any():
        raise DatasetError(f"{what} is {found.tolist()}, beyond 2**63; the file is damaged")
    return int(found[0]), int(found[1])


def _require_fit(parts: dict[str, DatasetLayout], shape: tuple[int, int], where: str) -> None:
    for name, kinds in (("data", "biufc"), ("indices", "iu"), ("indptr", "iu")):
        layout = parts[name]
        if len(layout.shape) != 1 or layout.dtype.kind not in kinds:
            raise DatasetError(
                f'{where}: dataset "{name}" of a sparse matrix must be flat and numeric'
                f"{'' if name == 'data' else ', of integers'}; it has shape {layout.shape} and"
                f" dtype {layout.dtype}"
            )
    num_values, num_indices = parts["data"].num_samples, parts["indices"].num_samples
    if num_values != num_indices:
        raise DatasetError(f"{where} has {num_values} values, but {num_indices} column indices")
    num_offsets = parts["indptr"].num_samples
    if num_offsets != shape[0] + 1:
        raise DatasetError(
            f"{where} has {shape[0]} rows, but {num_offsets} offsets of rows instead of"
            f" {shape[0] + 1}"
        )


def _conversion(located: Located) -> str:
    name = located.file.filename
    stem, dot, suffix = name.rpartition(".")
    copy = f"{stem}.csr.{suffix}" if dot else f"{name}.csr"
    script = (
        "import shutil, h5py; from anndata.io import read_elem, write_elem;"
        f" file = h5py.File(shutil.copy({name!r}, {copy!r}), 'r+');"
        f" write_elem(file, {located.path!r}, read_elem(file[{located.path!r}]).tocsr())"
    )
    return f"python -c {shell_word(script)}"


class Column(NamedTuple):
    """A column of a table: flat datasets, or variable-length strings as (n,) bytes objects.

    `where` is its name in messages: ``'a.h5ad: column "obs/cell_type"'``.
    """

    where: str
    values: DatasetLayout  # of a categorical column: its codes, -1 for no value
    categories: DatasetLayout | NDArray[Any] | None = None  # see `category_names`
    mask: DatasetLayout | None = None  # of a nullable column: True if there is no value


def column(file: HDF5File, path: str, reach: Reach = BESIDE) -> Column | None:
    """Return the categorical or nullable column at a path of an open file, or None.

    The path is that of its group or, in files of AnnData before 0.8, of the dataset of its codes.
    Raises like `sparse_group`.
    """
    with _opened(file, path, reach, "column") as found:
        if found is None:
            return None
        located, node, where = found
        if isinstance(node, h5py.Dataset):
            categories_at = older_categories(located, node.id)
            if categories_at is None:
                return None
            codes = _flat(located, "", "iu", reach, where)
            return Column(where, codes, _categories(located, categories_at, reach))
        encoding = text_attribute(node, "encoding-type")
        if encoding == "categorical":
            categories = _categories(located, f"{located.path}/categories", reach)
            codes = _flat(located, "codes", "iu", reach, where)
            return Column(where, codes, categories)
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
    """Return the name of the column of row names in a table: AnnData lets users choose it.

    Raises `ReadError` and `UnsafeFileError` like `column`.
    """
    usual = "_index"
    with _opened(file, path, reach, "table") as found:
        if found is not None and isinstance(found.node, h5py.Group):
            return text_attribute(found.node, usual) or usual
        # Of AnnData before 0.7: rows of a compound type.
        members = () if found is None else found.node.dtype.names or ()
        return "index" if usual not in members and "index" in members else usual


def category_names(values: NDArray[Any]) -> tuple[Any, ...]:
    """Return categories as `str` or numbers, from all `values` of ``column.categories``."""
    return tuple(name_text(v) if isinstance(v, bytes) else v for v in values.tolist())


def union_of(
    categories: Sequence[Sequence[Any]],
) -> tuple[tuple[Any, ...], list[NDArray[np.int64]]]:
    """Unite the categories of several files.

    Returns the names: those of the first file, then new ones of the others, in order. And per file
    an array `codes`, int64 (n + 1,), that translates code c of the file to ``codes[c]`` of the
    union; the last one is -1, so that -1 stays -1.
    """
    numbers: dict[Any, int] = {}
    codes = []
    for names in categories:
        found = [numbers.setdefault(name, len(numbers)) for name in names]
        codes.append(np.array([*found, -1], np.int64))
    return tuple(numbers), codes


def _categories(located: Located, path: str, reach: Reach) -> DatasetLayout | NDArray[Any]:
    """Return the categories: of a group (pandas' nullable strings, none missing), its values."""
    with _opened(located.file, path, reach, "column") as found:
        if found is not None and isinstance(found.node, h5py.Group):
            path = f"{path}/values"
    return value_layout(located.file.filename, path, _MOST_CATEGORIES, reach)


def _flat(located: Located, name: str, kinds: str, reach: Reach, where: str) -> DatasetLayout:
    """Return the layout of a column's dataset: the column itself, or `name` in its group."""
    path, label = (f"/{name}", f', dataset "{name}"') if name else ("", "")
    layout = layout_at(Indexer(located.file, reach), located.path + path, 0)
    if len(layout.shape) != 1 or layout.dtype.kind not in kinds:
        raise DatasetError(
            f"{where}{label} has shape {layout.shape} and dtype {layout.dtype}; a column of that"
            " kind must be flat, and of integers or booleans"
        )
    return layout
