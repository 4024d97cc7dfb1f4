"""Opens ragged and sparse fields: where the rows of each sample begin, and the shapes of matrices.

Fields whose kind was not told find it here: what their path leads to says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, RaggedField, ReaderConfig, SparseField
from h5async.config.indices import Values
from h5async.core.binding import load_core
from h5async.errors import ConfigError, DatasetError
from h5async.fill.columns import INDICES, SparseShape
from h5async.fill.tables import column_fields
from h5async.index.columns import column
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.links import Reach, open_index
from h5async.index.metadata import value_layout
from h5async.index.references import may_be_variable_length, references
from h5async.index.sparsegroup import SparseGroup, row_offsets, sparse_group
from h5async.names import name_text
from h5async.read.heaps import Sequences
from h5async.read.whole import read_whole

Int64s = NDArray[np.int64]

_MOST_OFFSETS = 1 << 33  # of a dataset that is read whole, where a reader is made


class Kinds(NamedTuple):
    """What the paths of fields lead to.

    Attributes
    ----------
    config
        The options, with fields of those kinds; the same object where nothing is changed.
    columns
        Of categorical fields, by name: the path of the column.
    """

    config: ReaderConfig
    columns: dict[str, str]


def with_kinds(config: ReaderConfig, reach: Reach) -> Kinds:
    """Return the options with fields of the kinds that their paths say in the first file.

    Raises
    ------
    ConfigError
        If the name of a mask is taken.
    H5AsyncError
        If a field is of a kind that cannot be read.
    """
    fields = config.batch_fields
    found: dict[str, Field] = {}
    columns: dict[str, str] = {}
    with open_index(config.files[0]) as file:
        for name, field in fields.items():
            if type(field) is not Field:
                continue
            options = {key: getattr(field, key) for key in field.model_fields_set}
            if sparse_group(file, field.path, reach) is not None:
                found[name] = SparseField(**options)
            elif (of_table := column(file, field.path, reach)) is not None:
                found |= column_fields(name, field, of_table, config)
                if of_table.categories is not None:
                    columns[name] = field.path
            elif may_be_variable_length(file, field.path, reach):
                found[name] = RaggedField(**options)
    if not found:
        return Kinds(config, columns)
    return Kinds(with_fields(config, fields | found), columns)


def with_fields(config: ReaderConfig, fields: Mapping[str, Field]) -> ReaderConfig:
    """Return the options with other fields."""
    return config.model_copy(update={"fields": dict(fields)})


def is_ragged(field: Field) -> bool:
    """Tell whether samples of a field may have other numbers of values."""
    return isinstance(field, RaggedField | SparseField)


def heap_layout(field: RaggedField, path: Path, reach: Reach) -> DatasetLayout:
    """Return the layout of the values of a dataset of variable length.

    Raises
    ------
    DatasetError
        If it is none, or cannot be read.
    ReadError
        If an element cannot be as long as it says.
    """
    layout, form = references(path, field.path, reach)
    stored = read_whole(layout, reach.io).view(np.uint8).reshape(-1, form.reference_nbytes)
    where = f'{path}: dataset "{field.path}"'
    elements = Sequences.decoded(stored, form, layout.stamp.nbytes, where, load_core())
    spans = np.zeros(elements.length.size + 1, np.int64)
    np.cumsum(elements.length, out=spans[1:])
    base, inner = form.dtype.subdtype or (form.dtype, ())
    return layout.changed(
        shape=(int(spans[-1]), *inner),
        dtype=base,
        storage="heap",
        fill=np.zeros((), base),
        offset=-1,
        chunk_shape=(),
        filters=(),
        chunks=None,
        spans=spans,
        heaps=(HeapFile(layout.file, layout.stamp, 0, elements),),
    )


def with_spans(
    layout: DatasetLayout, field: RaggedField, path: Path, reach: Reach
) -> DatasetLayout:
    """Return the layout of flat values with which of them each sample is.

    Raises
    ------
    DatasetError
        If the dataset of offsets is missing, or does not fit.
    H5AsyncError
        If it cannot be read.
    """
    assert field.offsets is not None
    where = f'{path}: dataset "{field.offsets}" (offsets of "{field.path}")'
    found = value_layout(path, field.offsets, _MOST_OFFSETS, reach)
    numbers = found if isinstance(found, np.ndarray) else read_whole(found, reach.io)
    if numbers.dtype.kind not in "iu":
        raise DatasetError(f"{where} must hold integers, found {numbers.dtype}")
    if numbers.dtype.kind == "u" and numbers.max(initial=0) > np.iinfo(np.int64).max:
        raise DatasetError(f"{where} has numbers above 2**63; the file is damaged")
    spans = _spans(numbers.astype(np.int64, copy=False), field.offsets_kind, where)
    if spans[0] < 0 or spans[-1] > layout.num_samples:
        raise DatasetError(
            f"{where}: samples begin at value {spans[0]} and end at value {spans[-1]}, and there"
            f" are {layout.num_samples:,} values"
        )
    falls = np.flatnonzero(spans[1:] < spans[:-1])
    if falls.size:
        at = int(falls[0])
        raise DatasetError(
            f"{where}: sample {at} would begin at value {spans[at]} and end at value"
            f" {spans[at + 1]}"
        )
    return layout.changed(spans=np.ascontiguousarray(spans))


def _spans(numbers: Int64s, kind: str, where: str) -> Int64s:
    if kind == "ends":
        return np.concatenate((np.zeros(1, np.int64), numbers))
    if kind == "lengths":
        if numbers.size and numbers.min() < 0:
            raise DatasetError(f"{where} has a length below 0: {numbers.min()}")
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(numbers, dtype=np.int64)))
    if not numbers.size:
        raise DatasetError(f"{where} is empty; it must hold one number more than there are samples")
    return numbers


def sparse_layouts(
    name: str, field: SparseField, path: Path, reach: Reach
) -> tuple[dict[str, DatasetLayout], SparseGroup]:
    """Return the layouts of the columns of a sparse field in one file.

    Raises
    ------
    DatasetError
        If the path leads to no sparse matrix, or to one that is damaged.
    H5AsyncError
        If it cannot be read.
    """
    with open_index(path) as file:
        group = sparse_group(file, field.path, reach)
    if group is None:
        raise DatasetError(f'{path}: "{field.path}" is no group of a sparse matrix')
    spans = row_offsets(read_whole(group.indptr, reach.io), group)
    layouts = {
        name: group.data.changed(spans=spans),
        name + INDICES: group.indices.changed(spans=spans, limit=_limit(group)),
    }
    return layouts, group


def _limit(group: SparseGroup) -> int | None:
    """Return the `DatasetLayout.limit` of the indices of a matrix."""
    layout, columns = group.indices, group.shape[1]
    dtype = layout.dtype
    if not dtype.isnative or dtype.kind not in "iu" or dtype.itemsize not in (4, 8):
        return None
    # (What was never written is filled, and not looked at.)
    is_good = 0 <= int(layout.raw_fill) < columns <= 1 << (8 * dtype.itemsize - 1)
    return columns if is_good else None


class SparseShapes:
    """Finds which columns of sparse fields are delivered, file by file.

    Parameters
    ----------
    name, field
        Of the field.
    """

    def __init__(self, name: str, field: SparseField) -> None:
        self._name, self._field = name, field
        self._places: list[Int64s] = []
        self._where: list[str] = []
        self._first: SparseGroup | None = None

    def add(self, group: SparseGroup, path: Path, reach: Reach) -> None:
        """Take the matrix of one more file.

        Raises
        ------
        DatasetError
            If it has other columns than the first one.
        ConfigError
            If there are no such columns.
        """
        field, columns = self._field, group.shape[1]
        self._where.append(group.where)
        if self._first is None:
            self._first = group
        if not isinstance(field.columns, tuple) and columns != self._first.shape[1]:
            raise DatasetError(
                f"{group.where} has {columns:,} columns, and {self._first.where} has"
                f" {self._first.shape[1]:,}; choose columns by their names"
            )
        if field.columns is None:
            return
        wanted = self._numbers(field, columns, path, reach)
        places = np.full(columns, -1, np.int64)
        places[wanted[wanted >= 0]] = np.flatnonzero(wanted >= 0)
        self._places.append(places)

    def _numbers(self, field: SparseField, columns: int, path: Path, reach: Reach) -> Int64s:
        """Return the number of each column that is delivered; -1: the file has none."""
        if isinstance(field.columns, tuple):
            names = _names(path, field.path, reach)
            if len(names) != columns:
                raise DatasetError(
                    f"{path}: there are {len(names):,} names of columns, and the matrix"
                    f' "{field.path}" has {columns:,}'
                )
            numbers = {name: number for number, name in enumerate(names)}
            return np.array([numbers.get(name, -1) for name in field.columns], np.int64)
        assert isinstance(field.columns, Values)
        array: NDArray[Any] = field.columns.array
        if array.dtype.kind == "b":
            if array.size != columns:
                raise ConfigError(
                    f"{self._name}: columns: a mask must have a value for each of the {columns:,}"
                    f" columns, and has {array.size:,}"
                )
            return np.flatnonzero(array)
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < columns:
            raise ConfigError(
                f"{self._name}: columns: must be numbers from 0 to {columns - 1}, found"
                f" {array.min()} to {array.max()}"
            )
        found = array.astype(np.int64)
        if np.unique(found).size < found.size:
            raise ConfigError(f"{self._name}: columns: a column comes twice")
        return found

    def shape(self) -> SparseShape:
        """Return what was found."""
        assert self._first is not None
        wanted = self._field.columns
        if wanted is None:
            return SparseShape(self._first.shape[1], where=tuple(self._where))
        if isinstance(wanted, tuple):
            count = len(wanted)
        else:
            is_mask = wanted.array.dtype.kind == "b"
            count = int(np.count_nonzero(wanted.array)) if is_mask else wanted.array.size
        return SparseShape(count, tuple(self._places), tuple(self._where))


def _names(path: Path, matrix: str, reach: Reach) -> Sequence[str]:
    """Return the names of the columns of a matrix of AnnData: those of its ``var``."""
    prefix = "raw/" if matrix.strip("/").startswith("raw/") else ""
    found = value_layout(path, f"{prefix}var/_index", _MOST_OFFSETS, reach)
    array = found if isinstance(found, np.ndarray) else read_whole(found, reach.io)
    return [str(name_text(n)) if isinstance(n, bytes | str) else str(n) for n in array.tolist()]
