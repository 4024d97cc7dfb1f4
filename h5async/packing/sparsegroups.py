"""Selects and joins ragged and sparse rows: row numbers enter, the numbers of their elements leave.

A matrix of compressed sparse rows (CSR) is a group, as AnnData writes it, with ``data``,
``indices`` and ``indptr``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import h5py
import numpy as np
from h5py import h5d, h5t

from h5async.config import Field, RaggedField
from h5async.errors import DatasetError
from h5async.io.hdf5files import HDF5File
from h5async.order.selection import Int64s, Selection
from h5async.spelling import name_bytes, name_text, named

OffsetsKind = Literal["offsets", "ends", "lengths"]
_BLOCK = 1 << 20  # numbers read at a time
_OF_SAMPLES = ("X/", "obs/", "obsm/", "layers/", "raw/X/")  # in files of AnnData


@dataclass(frozen=True, eq=False, kw_only=True)
class Elements(Selection):
    """The elements of selected rows; their numbers are computed when needed.

    The elements of row i have positions from ``places[i]`` on, and numbers from ``starts[i]`` on.
    If `kept` is given, these are indices into it.
    """

    starts: Int64s
    places: Int64s
    kept: Int64s | None

    @property
    def is_prefix(self) -> bool:
        """Whether positions are sample numbers."""
        return False

    @property
    def is_range(self) -> bool:
        """Whether the samples are equidistant."""
        return False

    def samples(self, positions: Int64s) -> Int64s:
        """Return the numbers of the elements at positions."""
        row = np.searchsorted(self.places, positions, side="right") - 1
        numbers = self.starts[row] + (positions - self.places[row])
        return numbers if self.kept is None else self.kept[numbers]


class ElementRows:
    """Rows of any length in all files: elements of the datasets `parts`, delimited by `offsets`.

    By its `kind`, as in `RaggedField`, `offsets` has the starts of rows and the end of the last one
    ("offsets"), their ends, or their lengths. Raises `DatasetError` if it does not fit `parts`.
    """

    def __init__(
        self,
        files: Sequence[HDF5File],
        parts: Sequence[str],
        offsets: str,
        kind: OffsetsKind = "offsets",
    ) -> None:
        self.parts, self.offsets, self.kind = parts, offsets, kind
        self._bounds = []
        for file in files:
            numbers = file[name_bytes(offsets)][...].astype(np.int64)
            if kind == "lengths":
                numbers = np.cumsum(numbers)
            bounds = numbers if kind == "offsets" else np.concatenate(([0], numbers))
            sizes = {file[name_bytes(part)].shape[0] for part in parts}
            is_whole = bounds.size and bounds[0] == 0 and sizes == {int(bounds[-1])}
            if not is_whole or (np.diff(bounds) < 0).any():
                raise DatasetError(
                    f'{file.filename}: "{offsets}" does not fit {", ".join(parts)}, of'
                    f" {sorted(sizes)} values, as {kind} of samples"
                )
            self._bounds.append(bounds)
        self.counts = [len(bounds) - 1 for bounds in self._bounds]

    @cached_property
    def _rows(self) -> tuple[Int64s, Int64s | None]:
        """The lengths of all rows; the numbers of their elements, or None for all in order."""
        return np.concatenate([np.diff(bounds) for bounds in self._bounds]), None

    @property
    def field(self) -> Field:
        """The field by which a reader reads the rows."""
        return RaggedField(self.parts[0], offsets=self.offsets, offsets_kind=self.kind)

    def bounds(self, selection: Selection) -> Int64s:
        """Return the starts of the selected rows, and the end of the last one."""
        lengths = self._rows[0][selection.samples(np.arange(selection.size))]
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def told(self, selection: Selection) -> Int64s:
        """Return the values of the dataset `offsets` for the selected rows."""
        bounds = self.bounds(selection)
        return {"offsets": bounds, "ends": bounds[1:], "lengths": np.diff(bounds)}[self.kind]

    def elements(self, selection: Selection) -> Selection:
        """Return the elements of the selected rows, counted over all files."""
        bounds, (lengths, kept) = self.bounds(selection), self._rows
        if selection.is_prefix and selection.size == sum(self.counts):
            whole = Selection(0, 1, int(bounds[-1]))
            return whole if kept is None else Selection.of_numbers(kept)
        starts = (np.cumsum(lengths) - lengths)[selection.samples(np.arange(selection.size))]
        return Elements(0, 1, int(bounds[-1]), starts=starts, places=bounds, kept=kept)


class SparseRows(ElementRows):
    """The matrices at the same path in all files, stacked vertically.

    `maps[i]` gives the new numbers, below `columns`, of the columns in file i; columns mapped to -1
    are left out. Raises `DatasetError` if a matrix is not CSR, or if the numbers of columns differ
    and `maps` is None.
    """

    def __init__(
        self,
        files: Sequence[HDF5File],
        path: str,
        maps: Sequence[Int64s] | None = None,
        columns: int = 0,
    ) -> None:
        groups = [file.get(name_bytes(path)) for file in files]
        for file, group in zip(files, groups, strict=True):
            if not isinstance(group, h5py.Group):
                raise DatasetError(
                    f'{file.filename}: "{path}" is not a sparse matrix, unlike that of'
                    f" {files[0].filename}; store both the same way"
                )
        shapes = [tuple(map(int, group.attrs["shape"])) for group in groups]
        where = f'{files[0].filename}: "{path}"'
        if any(name_text(group.attrs["encoding-type"]) != "csr_matrix" for group in groups):
            raise DatasetError(
                f"{where} is not in compressed rows (CSR), so no rows can be selected or joined;"
                " convert it (in Python: X.tocsr())"
            )
        if maps is None and len({columns for _, columns in shapes}) > 1:
            raise DatasetError(f"{where} has different numbers of columns in the files: {shapes}")
        super().__init__(files, (f"{path}/data", f"{path}/indices"), f"{path}/indptr")
        if self.counts != [rows for rows, _ in shapes]:
            raise DatasetError(f"{where}: indptr does not fit the shape {shapes}")
        self.path, self.columns = path, shapes[0][1] if maps is None else columns
        self._maps, self._indices = maps, [group["indices"] for group in groups]

    @property
    def field(self) -> Field:
        """The field by which a reader reads the rows."""
        return Field(self.path)

    @cached_property
    def _rows(self) -> tuple[Int64s, Int64s | None]:
        """The lengths of all rows; the numbers of their elements, or None for all in order.

        (If columns are mapped, elements are sorted by new columns, as they may have been by old.)
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


def ragged_rows(files: Sequence[HDF5File], offsets: Mapping[str, str]) -> list[ElementRows]:
    """Return the rows of datasets of values; `offsets` maps their paths to ``PATH:KIND``."""
    return [
        ElementRows(files, [path for path in offsets if offsets[path] == one], *_spelled(one))
        for one in dict.fromkeys(offsets.values())
    ]


def _spelled(offsets: str) -> tuple[str, OffsetsKind]:
    for kind in get_args(OffsetsKind):
        if offsets.endswith(f":{kind}"):
            return offsets.removesuffix(f":{kind}"), kind
    return offsets, "offsets"


def sparse_paths(file: HDF5File, datasets: Mapping[str, h5d.DatasetID]) -> list[str]:
    """Return the paths of sparse matrices; DatasetError if AnnData before 0.7 wrote one."""
    parents = [path.removesuffix("/indptr") for path in datasets if path.endswith("/indptr")]
    for path in parents:
        if "h5sparse_format" in file[name_bytes(path)].attrs:
            raise DatasetError(
                f'{file.filename}: "{path}" was written by AnnData before 0.7, so its rows cannot'
                " be selected or joined; read the file with AnnData, and write it again"
            )
    return [path for path in parents if "encoding-type" in file[name_bytes(path)].attrs]


def may_have_samples(file: HDF5File, path: str) -> bool:
    """Return whether a dataset may have a row for each sample.

    The number of rows is not enough to tell: a file may happen to have as many categories, and in
    AnnData as many variables, as samples.
    """
    group, _, name = path.rpartition("/")
    has_codes = name == "categories" and f"{group}/codes" in file
    is_list = has_codes or "/__categories/" in f"/{path}"
    return not is_list and (not is_anndata(file) or f"{path}/".startswith(_OF_SAMPLES))


def is_anndata(file: HDF5File) -> bool:
    """Return whether a file was written by AnnData."""
    return name_text(file.attrs.get("encoding-type", "")) == "anndata"


def refuse_old_anndata(file: HDF5File) -> None:
    """Raise `DatasetError` for files of AnnData before 0.8, which has categories elsewhere."""
    tables = [file.get(name) for name in ("obs", "var")]
    if not is_anndata(file) and all(one is not None and "_index" in one.attrs for one in tables):
        raise DatasetError(
            f"{file.filename} was written by AnnData before 0.8, so its samples cannot be selected"
            " or joined; read the file with AnnData, and write it again"
        )


def refuse_offsets(
    file: HDF5File, datasets: Mapping[str, h5d.DatasetID], counts: Collection[int]
) -> None:
    """Raise `DatasetError` if a dataset looks like unnamed offsets of samples of any length.

    `counts` are the numbers of samples. `datasets` excludes offsets that the user has named.
    """
    of_rows = {one.shape[0]: path for path, one in datasets.items()}
    for path, one in datasets.items():
        if one.rank != 1 or not one.shape[0] or not isinstance(one.get_type(), h5t.TypeIntegerID):
            continue
        count, numbers = one.shape[0], file[name_bytes(path)]
        first, last, kind = int(numbers[0]), int(numbers[-1]), ""
        is_of = count in counts or count - 1 in counts or last in counts
        if is_of and last > count and last in of_rows and _are_sorted(numbers):
            kind = "offsets" if first == 0 and count not in counts else "ends"
        elif count - 1 in counts and first == 0 and _are_sorted(numbers):
            kind = "offsets"
        elif count < max(of_rows) and count < (total := _total(numbers)) in of_rows:
            last, kind = total, "lengths" if {count, total} & set(counts) else ""
        if kind:
            values, suffix = of_rows.get(last, "PATH"), "" if kind == "offsets" else f":{kind}"
            raise DatasetError(
                f'{file.filename}: "{path}" seems to delimit samples of any length; if their values'
                f' are in "{values}", give {named("offsets", {values: path + suffix})}; else leave'
                f" it out with {named('fields')} and {named('only_fields', True)}"
            )


def _blocks(numbers: h5py.Dataset) -> Iterator[Int64s]:
    for at in range(0, len(numbers), _BLOCK):
        yield numbers[at : at + _BLOCK + 1].astype(np.int64)


def _are_sorted(numbers: h5py.Dataset) -> bool:
    return all((np.diff(block) >= 0).all() for block in _blocks(numbers))


def _total(numbers: h5py.Dataset) -> int:
    """Return the sum of numbers; -1 if some are negative."""
    total = 0
    for block in _blocks(numbers):
        if (block < 0).any():
            return -1
        total += int(block[:_BLOCK].sum())
    return total
