"""Finds sparse matrices whose rows are samples: a path in a file enters, a `SparseGroup` leaves.

A matrix is a group of three flat datasets: AnnData's, with the attribute ``encoding-type`` or,
before 0.7, ``h5sparse_format``; or that of 10x Genomics, whose columns are cells, and which is read
as its transpose.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, H5AsyncError, ReadError, is_lack_of_memory, out_of_memory
from h5async.index.datasets import Indexer
from h5async.index.layout import DatasetLayout
from h5async.index.links import BESIDE, Located, Reach, locate
from h5async.index.metadata import layout_at
from h5async.io.stores import HDF5File
from h5async.spelling import name_text, shell_word

_FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


@dataclass(frozen=True)
class SparseGroup:
    """A sparse matrix in a file, each row of which is a sample.

    Attributes
    ----------
    where
        Its name in messages: ``'a.h5ad: group "X"'``.
    shape
        Samples, and columns.
    data, indices, indptr
        Flat datasets: the values of all samples, their columns, and the (samples + 1,) bounds of
        samples. Their content is not checked yet: see `row_offsets`.
    is_transposed
        Whether the file calls samples columns.
    """

    where: str
    shape: tuple[int, int]
    data: DatasetLayout
    indices: DatasetLayout
    indptr: DatasetLayout
    is_transposed: bool

    @property
    def num_values(self) -> int:
        """The number of stored values."""
        return self.data.num_samples


def sparse_group(file: HDF5File, path: str, reach: Reach = BESIDE) -> SparseGroup | None:
    """Return the sparse matrix at a path, or None.

    Parameters
    ----------
    file
        Open, under h5py's rules for threads.
    path
        Of the group.
    reach
        Which other files links may lead to.

    Raises
    ------
    DatasetError
        If the parts of the matrix do not fit together, or the samples are not compressed: the
        message then has a command that converts the file.
    ReadError
        If its metadata cannot be read.
    UnsafeFileError
        If a link leads to a file that `reach` does not permit.
    """
    with contextlib.ExitStack() as files:
        found = _group_at(file, path, reach, files)
        if found is None:
            return None
        located, group, where = found
        with reading(where):
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
            name: layout_at(indexer, f"{located.path}/{name}", 0, reach)
            for name in ("data", "indices", "indptr")
        }
        is_transposed = form == "10x"
        shape = shape[::-1] if is_transposed else shape
        _require_fit(parts, shape, where)
        return SparseGroup(where, shape, **parts, is_transposed=is_transposed)


def names_beside(file: HDF5File, path: str, reach: Reach = BESIDE) -> tuple[str, str] | None:
    """Return the paths of the names and the ids of a matrix's columns, if they lie beside it.

    10x Genomics writes ``features/name`` and ``features/id``, before version 3 ``gene_names`` and
    ``genes``. Raises `ReadError` and `UnsafeFileError` like `sparse_group`.
    """
    with contextlib.ExitStack() as files:
        found = _group_at(file, path, reach, files)
        if found is None:
            return None
        _, group, where = found
        with reading(where):
            for pair in (("features/name", "features/id"), ("gene_names", "genes")):
                if "barcodes" in group and all(name in group for name in pair):
                    return f"{path}/{pair[0]}", f"{path}/{pair[1]}"
    return None


def _group_at(
    file: HDF5File, path: str, reach: Reach, files: contextlib.ExitStack
) -> tuple[Located, h5py.Group, str] | None:
    """Return the group at a path, and its name in messages; None if there is none."""
    located, node = find(file, path, reach, files)
    if located is None or not isinstance(node, h5py.h5g.GroupID):
        return None
    return located, h5py.Group(node), f'{located.file.filename}: group "{located.path}"'


def row_offsets(indptr: NDArray[Any], group: SparseGroup) -> NDArray[np.int64]:
    """Check the bounds of rows: `indptr` holds all values of ``group.indptr``.

    Returns
    -------
    numpy.ndarray
        int64 (samples + 1,): row i has the values ``offsets[i]`` up to ``offsets[i + 1]``.

    Raises
    ------
    DatasetError
        If the offsets do not begin with 0, rise, and end with the number of values.
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
    if offsets[0] != 0 or offsets[-1] != group.num_values:
        raise DatasetError(
            f"{where}: the rows begin at value {offsets[0]} and end at value {offsets[-1]}, and"
            f" there are {group.num_values} values; the file is damaged"
        )
    return offsets


def find(
    file: HDF5File, path: str, reach: Reach, files: contextlib.ExitStack
) -> tuple[Located | None, h5py._objects.ObjectID | None]:
    """Follow a path and open the object there; (None, None) if nothing, or a member, is there.

    Raises like `locate`, and `ReadError` if the object is damaged.
    """
    with reading(f'{file.filename}: "{path}"'):
        try:
            located = locate(file, path, reach, files)
        except KeyError as error:
            if isinstance(error, H5AsyncError):
                raise
            return None, None
        return (None, None) if located.rest else (located, located.open())


@contextlib.contextmanager
def reading(where: str) -> Any:
    """Turn h5py's errors for damaged metadata into a `ReadError` that begins with `where`."""
    try:
        yield
    except H5AsyncError:
        raise
    except Exception as error:  # damaged metadata may raise anything
        if is_lack_of_memory(error):
            raise out_of_memory(f"{where}, its metadata", error) from error
        raise ReadError(f"{where}: its metadata cannot be read ({error})") from error


def text_attribute(node: h5py.Group | h5py.Dataset, name: str) -> str | None:
    """Return an attribute that is a string, or None."""
    value = node.attrs.get(name)
    return name_text(value) if isinstance(value, str | bytes) else None


def _form_of(group: h5py.Group, where: str) -> tuple[str | None, tuple[int, int]]:
    """Return how a matrix is stored ("csr", "csc", "10x"), and its shape as stored."""
    for name, of_shape in (("encoding-type", "shape"), ("h5sparse_format", "h5sparse_shape")):
        form = _FORMATS.get(text_attribute(group, name) or "")
        if form is not None:
            return form, _shape_of(group.attrs.get(of_shape), f'{where}, attribute "{of_shape}"')
    names = {"barcodes", "data", "indices", "indptr", "shape"}
    is_10x = "encoding-type" not in group.attrs and names <= set(group)
    if not is_10x:
        return None, (0, 0)
    return "10x", _shape_of(_two_numbers(group, "shape"), f'{where}, dataset "shape"')


def _two_numbers(group: h5py.Group, name: str) -> Any:
    """Return the values of a dataset of two numbers in this file, or None."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return None
    found = group[name]
    is_here = isinstance(found, h5py.Dataset) and not found.is_virtual and not found.external
    return found[()] if is_here and found.shape == (2,) else None


def _shape_of(value: object, what: str) -> tuple[int, int]:
    found = np.asarray(value)
    if found.shape != (2,) or found.dtype.kind not in "iu" or (found < 0).any():
        raise DatasetError(f"{what} must be the numbers of rows and columns, and is {value!r}")
    if (found > np.iinfo(np.int64).max).any():
        raise DatasetError(f"{what} is {found.tolist()}, beyond 2**63; the file is damaged")
    return int(found[0]), int(found[1])


def _require_fit(parts: dict[str, DatasetLayout], shape: tuple[int, int], where: str) -> None:
    """Raise DatasetError unless the datasets are flat, of these dtypes, and of matching lengths."""
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
        raise DatasetError(f"{where} has {num_values} values, and {num_indices} indices of them")
    num_offsets = parts["indptr"].num_samples
    if num_offsets != shape[0] + 1:
        raise DatasetError(
            f"{where} has {shape[0]} rows, and {num_offsets} offsets of rows instead of"
            f" {shape[0] + 1}"
        )


def _conversion(located: Located) -> str:
    """Return a command that copies a file and compresses the rows of a matrix."""
    name = located.file.filename
    stem, dot, suffix = name.rpartition(".")
    copy = f"{stem}.csr.{suffix}" if dot else f"{name}.csr"
    script = (
        "import shutil, h5py; from anndata.io import read_elem, write_elem;"
        f" file = h5py.File(shutil.copy({name!r}, {copy!r}), 'r+');"
        f" write_elem(file, {located.path!r}, read_elem(file[{located.path!r}]).tocsr())"
    )
    return f"python -c {shell_word(script)}"
