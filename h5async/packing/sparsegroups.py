"""Selects and joins rows of sparse matrices: numbers of rows enter, those of elements leave.

A matrix of compressed sparse rows (CSR) is a group, as AnnData writes it, with ``data``,
``indices`` and ``indptr``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from h5py import h5d, h5t

from h5async.errors import DatasetError
from h5async.io.stores import HDF5File
from h5async.order.selection import Int64s, Selection
from h5async.spelling import name_bytes, named

PARTS = ("data", "indices", "indptr")
_OF_SAMPLES = ("X/", "obs/", "obsm/", "layers/", "raw/X/")  # in files of AnnData


class SparseRows:
    """The matrices at the same path of all files, one below the other.

    `maps` are the new numbers of the columns of each file, below `columns`; columns that have -1
    are left out. Raises `DatasetError` if columns differ without them, or the rows are not
    compressed.
    """

    def __init__(
        self,
        files: Sequence[HDF5File],
        path: str,
        maps: Sequence[Int64s] | None = None,
        columns: int = 0,
    ) -> None:
        self.path = path
        groups = [file[name_bytes(path)] for file in files]
        shapes = [tuple(map(int, group.attrs["shape"])) for group in groups]
        where = f'{files[0].filename}: "{path}"'
        if any(text_of(group.attrs["encoding-type"]) != "csr_matrix" for group in groups):
            raise DatasetError(
                f"{where} is not of compressed rows (CSR), so no rows can be selected or joined;"
                " convert it (in Python: X.tocsr())"
            )
        if maps is None and len({columns for _, columns in shapes}) > 1:
            raise DatasetError(f"{where} has differing numbers of columns in the files: {shapes}")
        self.counts = [rows for rows, _ in shapes]
        self.columns = shapes[0][1] if maps is None else columns
        self._maps, self._indices = maps, [group["indices"] for group in groups]
        self._bounds = [group["indptr"][...].astype(np.int64) for group in groups]
        sizes = [group["data"].shape[0] for group in groups]
        for rows, bounds, size in zip(self.counts, self._bounds, sizes, strict=True):
            is_whole = len(bounds) == rows + 1 and bounds[0] == 0 and bounds[-1] == size
            if not is_whole or (np.diff(bounds) < 0).any():
                raise DatasetError(f"{where}: indptr does not fit the rows and the data")

    @cached_property
    def _rows(self) -> tuple[Int64s, Int64s | None]:
        """The lengths of the rows of all files; the numbers of elements, if not all stay in order.

        (Of mapped columns, they are sorted by the new ones, as they may have been by the old ones.)
        """
        lengths = [np.diff(bounds) for bounds in self._bounds]
        maps = self._maps or ()
        if all((new[:1] >= 0).all() and (np.diff(new) > 0).all() for new in maps):
            return np.concatenate(lengths), None
        kept, begin = [], 0
        for number, new in enumerate(maps):
            columns = new[self._indices[number][...]]
            rows = np.repeat(np.arange(len(lengths[number])), lengths[number])
            order = np.lexsort((columns, rows))
            order = order[columns[order] >= 0]
            lengths[number] = np.bincount(rows[order], minlength=len(lengths[number]))
            kept.append(order + begin)
            begin += len(rows)
        return np.concatenate(lengths), np.concatenate(kept)

    def bounds(self, selection: Selection) -> Int64s:
        """Return `indptr` of the selected rows."""
        lengths = self._rows[0][selection.samples(np.arange(selection.size))]
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def elements(self, selection: Selection) -> Selection:
        """Return the elements of the selected rows, of all files together."""
        bounds, (lengths, kept) = self.bounds(selection), self._rows
        if selection.is_prefix and selection.size == sum(self.counts):
            whole = Selection(0, 1, int(bounds[-1]))
            return whole if kept is None else Selection.of_numbers(kept)
        starts = (np.cumsum(lengths) - lengths)[selection.samples(np.arange(selection.size))]
        shifts = np.repeat(starts - bounds[:-1], np.diff(bounds))
        numbers = shifts + np.arange(bounds[-1])
        return Selection.of_numbers(numbers if kept is None else kept[numbers])


def sparse_paths(file: HDF5File, datasets: Mapping[str, h5d.DatasetID]) -> list[str]:
    """Return the paths of groups that are sparse matrices."""
    parents = [path.removesuffix("/indptr") for path in datasets if path.endswith("/indptr")]
    return [path for path in parents if "encoding-type" in file[name_bytes(path)].attrs]


def may_have_samples(file: HDF5File, path: str) -> bool:
    """Tell whether a dataset may have a row for each sample.

    In a file of AnnData, variables may be as many as samples; in any, categories may.
    """
    group, _, name = path.rpartition("/")
    has_codes = name == "categories" and f"{group}/codes" in file
    is_list = has_codes or "/__categories/" in f"/{path}"
    return not is_list and (not is_anndata(file) or f"{path}/".startswith(_OF_SAMPLES))


def is_anndata(file: HDF5File) -> bool:
    """Tell whether a file was written by AnnData."""
    return text_of(file.attrs.get("encoding-type", "")) == "anndata"


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


def text_of(value: Any) -> str:
    """Return an attribute as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
