"""Selects and joins rows of sparse matrices: numbers of rows enter, those of elements leave.

A matrix of compressed sparse rows (CSR) is a group, as AnnData writes it, with ``data``,
``indices`` and ``indptr``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from h5py import h5d, h5p, h5s, h5t

from h5async.errors import DatasetError
from h5async.index.hdf5 import Opened
from h5async.io.stores import HDF5File
from h5async.order.selection import Int64s, Selection
from h5async.packing.objects import Making
from h5async.spelling import name_bytes, named

PARTS = ("data", "indices", "indptr")
_OF_SAMPLES = ("X/", "obs/", "obsm/", "layers/", "raw/X/")  # in files of AnnData


class SparseRows:
    """The matrices at the same path of all files, one below the other.

    Raises `DatasetError` if their columns differ, or the rows are not compressed.
    """

    def __init__(self, files: Sequence[HDF5File], path: str) -> None:
        self.path = path
        groups = [file[name_bytes(path)] for file in files]
        shapes = [tuple(map(int, group.attrs["shape"])) for group in groups]
        where = f'{files[0].filename}: "{path}"'
        if any(text_of(group.attrs["encoding-type"]) != "csr_matrix" for group in groups):
            raise DatasetError(f"{where} is not of compressed rows (CSR): no rows can be selected")
        if len({columns for _, columns in shapes}) > 1:
            raise DatasetError(f"{where} has differing numbers of columns in the files: {shapes}")
        self.counts, self.columns = [rows for rows, _ in shapes], shapes[0][1]
        self._bounds = [group["indptr"][...].astype(np.int64) for group in groups]
        self._first = Opened(groups[0]["indptr"].id, files[0].source)
        sizes = [group["data"].shape[0] for group in groups]
        self._begins = np.concatenate(([0], np.cumsum(sizes)))[:-1]
        for rows, bounds, size in zip(self.counts, self._bounds, sizes, strict=True):
            is_whole = len(bounds) == rows + 1 and bounds[0] == 0 and bounds[-1] == size
            if not is_whole or (np.diff(bounds) < 0).any():
                raise DatasetError(f"{where}: indptr does not fit the rows and the data")

    @cached_property
    def _rows(self) -> tuple[Int64s, Int64s]:
        """The first element of each row of all files, and their numbers."""
        pairs = zip(self._begins, self._bounds, strict=True)
        starts = [begin + bounds[:-1] for begin, bounds in pairs]
        return np.concatenate(starts), np.concatenate([np.diff(one) for one in self._bounds])

    def bounds(self, selection: Selection) -> Int64s:
        """Return `indptr` of the selected rows."""
        lengths = self._rows[1][selection.samples(np.arange(selection.size))]
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def elements(self, selection: Selection) -> Selection:
        """Return the elements of the selected rows, of all files together."""
        bounds = self.bounds(selection)
        if selection.is_prefix and selection.size == sum(self.counts):
            return Selection(0, 1, int(bounds[-1]))
        starts = self._rows[0][selection.samples(np.arange(selection.size))]
        shifts = np.repeat(starts - bounds[:-1], np.diff(bounds))
        return Selection.of_numbers(shifts + np.arange(bounds[-1]))

    def making(self, bounds: Int64s) -> Making:
        """Return how the dataset of these bounds is made."""
        plist = self._first.plist.copy()
        if self._first.chunks:
            plist.set_chunk((min(self._first.chunks[0], len(bounds)),))
        else:
            plist = h5p.create(h5p.DATASET_CREATE)
        fits = bounds[-1] <= np.iinfo(self._first.dtype).max
        space = h5s.create_simple((len(bounds),))
        return Making(space, None if fits else h5t.STD_I64LE, plist, False, False)


def sparse_paths(file: HDF5File, datasets: Mapping[str, h5d.DatasetID]) -> list[str]:
    """Return the paths of groups that are sparse matrices."""
    parents = [path.removesuffix("/indptr") for path in datasets if path.endswith("/indptr")]
    return [path for path in parents if "encoding-type" in file[name_bytes(path)].attrs]


def may_have_samples(file: HDF5File, path: str) -> bool:
    """Tell whether a dataset may have a row for each sample; DatasetError if it has pairs of them.

    In a file of AnnData, variables may be as many as samples.
    """
    if text_of(file.attrs.get("encoding-type", "")) != "anndata":
        return True
    if path.startswith("obsp/"):
        raise DatasetError(
            f'{file.filename}: "{path}" is about pairs of samples, which cannot be selected; remove'
            " obsp, and compute it again"
        )
    return f"{path}/".startswith(_OF_SAMPLES)


def refuse_offsets(
    file: HDF5File, datasets: Mapping[str, h5d.DatasetID], counts: Collection[int]
) -> None:
    """Raise `DatasetError` if a dataset says where samples of any length begin."""
    for path, one in datasets.items():
        is_one_more = one.rank == 1 and one.shape[0] - 1 in counts
        if is_one_more and isinstance(one.get_type(), h5t.TypeIntegerID):
            bounds = file[name_bytes(path)][...]
            if not bounds[0] and (bounds[1:] >= bounds[:-1]).all():
                raise DatasetError(
                    f'{file.filename}: "{path}" says where samples of any length begin, which'
                    f" cannot be selected or joined; leave it out by {named('fields')} and"
                    f" {named('only_fields', True)}"
                )


def require_same(files: Sequence[HDF5File], path: str) -> None:
    """Raise `DatasetError` unless a dataset has the same values in all files of AnnData."""
    if not path.startswith(("obs/", "var/")):
        return
    values: list[Any] = [
        file[name_bytes(path)][...] if name_bytes(path) in file else None for file in files
    ]
    for file, one in zip(files, values, strict=True):
        if not np.array_equal(one, values[0]):
            raise DatasetError(
                f'{file.filename}: "{path}" differs from that of {files[0].filename}: give the'
                " files the same variables and categories, in the same order"
            )


def text_of(value: Any) -> str:
    """Return an attribute as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
