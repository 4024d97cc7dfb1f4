"""Defines the kind of sparse fields: rows of a matrix in compressed form (CSR)."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig, SparseField
from h5async.config.parts import Values
from h5async.errors import ConfigError, DatasetError
from h5async.index.chunks import left_to_hdf5
from h5async.index.joined import join_layouts
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.room import files_of
from h5async.order.rows import SpanRows
from h5async.samples.fieldkind import (
    INDICES,
    ROWS,
    SHAPE,
    TEXTS,
    CanTransform,
    Fact,
    FieldKind,
    Filled,
    Known,
    Outline,
    Transforms,
    texts_of,
    values_of,
)
from h5async.samples.sparse import Csr
from h5async.spelling import named

Int64s = NDArray[np.int64]

SHAPE_OF, NAMES_OF = "\0shape", "\0names"  # suffixes of a field's name for its facts
ID = "\0"  # separates name and id in the names of columns


@dataclass(frozen=True)
class SparseShape:
    """The columns of a sparse field.

    `columns` is the number of those delivered. `places` are, per file, the delivered position of
    each of its columns, int64, or -1 if it is not delivered; None means all in their own order.
    `where` names the matrix of each file in messages.
    """

    columns: int
    places: tuple[NDArray[np.int64], ...] | None = None
    where: tuple[str, ...] = ()


class SparseKind(FieldKind):
    """Rows of a sparse matrix, which have two columns in a slot: values and indices.

    `shape` is what `join` found; it has no columns before.
    """

    of: ClassVar[type[Field]] = SparseField
    found_as = SHAPE
    is_ragged = True
    field: SparseField

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.shape = SparseShape(0)
        self._has_limit = False

    @property
    def columns(self) -> dict[str, Field]:
        """The values of rows, and their indices."""
        field = self.field
        # (`offset` applies to dense rows, also to values that are not stored.)
        offset = None if field.dense else field.offset
        values = Field(
            f"{field.path}/data", dtype=field.delivered_dtype, scale=field.scale, offset=offset
        )
        return {self.name: values, self.name + INDICES: Field(f"{field.path}/indices")}

    def facts(self) -> dict[str, Fact]:
        """Return values, indices, and the shape; names of columns, if some are chosen by them."""
        name, path = self.name, self.field.path
        found = {
            name: Fact(f"{path}/data", ROWS),
            name + INDICES: Fact(f"{path}/indices", ROWS),
            name + SHAPE_OF: Fact(path, SHAPE),
        }
        if isinstance(self.field.columns, tuple):
            found[name + NAMES_OF] = Fact(path, TEXTS)
        return found

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layouts of values and indices; find the columns that are delivered."""
        values = join_layouts(known[self.name])
        several = _indices_of_one_dtype(known[self.name + INDICES])
        indices = join_layouts(several).changed(spans=values.spans)  # stored once
        shapes = _SparseShapes(self.name, self.field)
        names_of = known.get(self.name + NAMES_OF, [None] * len(several))
        for shape, names in zip(known[self.name + SHAPE_OF], names_of, strict=True):
            where = f'{shape.file}: group "{shape.path}"'
            columns = int(values_of(shape)[1])
            if self.field.columns is not None:
                what = f"{where}: {columns:,} columns, of which some are chosen,"
                reach.room.take(8 * columns, what, files_of(shape))
            shapes.add(columns, where, () if names is None else texts_of(names))
        self.shape = shapes.shape()
        if self.shape.places is None:
            indices = indices.changed(limit=_limit_of(indices, self.shape.columns))
        self._has_limit = indices.limit is not None
        self.needs_work = self.field.dense or self.shape.places is not None
        return {self.name: values, self.name + INDICES: indices}

    def is_same(self, other: FieldKind) -> bool:
        """Return whether both deliver the same columns."""
        assert isinstance(other, SparseKind)
        one, two = self.shape, other.shape
        return one.columns == two.columns and are_all_equal(one.places, two.places)

    def outline(
        self, columns: tuple[int, ...], transforms: Transforms, can_transform: CanTransform
    ) -> Outline:
        """Return how the field is assembled; ConfigError for complex dense rows on a GPU."""
        outline, field = super().outline(columns, transforms, can_transform), self.field
        if not field.dense:
            return outline
        dtype = self._dense_dtype(transforms[0].dtype)
        if can_transform is not None and dtype.kind == "c":
            raise ConfigError(
                f'"{field.path}" ({self.name}): dense rows of complex values are not made on a GPU;'
                f" leave out {named('dense')}, or set {named('device', 'cpu')}"
            )
        return outline._replace(
            made=((self.shape.columns,), dtype),
            is_left=can_transform is not None,
            added=None if field.offset is None else np.asarray(field.offset, dtype),
        )

    def _dense_dtype(self, values: np.dtype[Any]) -> np.dtype[Any]:
        return self.field.delivered_dtype or values.newbyteorder("=")

    def deliver(self, filled: Filled) -> Any:
        """Return `Csr`, or dense rows; DatasetError if an index is not a column."""
        assert isinstance(filled.rows, SpanRows)
        shape, offsets = self.shape, filled.rows.offsets(filled.samples)
        values, indices = (column[: offsets[-1]] for column in filled.columns)
        if shape.places is not None:
            values, indices, offsets = self._chosen(values, indices, offsets, filled)
        elif not (filled.is_checked and self._has_limit):
            outside = _are_outside(indices, shape.columns)
            if outside.any():
                raise self._no_column(indices, offsets, filled, int(outside.argmax()))
        rows = Csr(values, indices, offsets, (filled.samples.size, shape.columns))
        if not self.field.dense or filled.is_left:
            return rows
        dtype, made = self._dense_dtype(rows.dtype), filled.made
        found = np.empty(rows.shape, dtype) if made is None else made[: len(rows)]
        rows.to_dense(found)
        if self.field.offset is not None:
            np.add(found, np.asarray(self.field.offset, dtype), out=found)
        return found

    def _chosen(
        self, values: NDArray[Any], indices: NDArray[Any], offsets: Int64s, filled: Filled
    ) -> tuple[NDArray[Any], NDArray[Any], Int64s]:
        """Return the chosen columns of sparse rows."""
        assert self.shape.places is not None
        file = filled.files(filled.samples)
        place = np.empty(indices.size, np.int64)
        of_value = np.repeat(file, np.diff(offsets))
        for number in np.unique(file).tolist():
            here, places = of_value == number, self.shape.places[number]
            outside = here & _are_outside(indices, places.size)
            if outside.any():
                raise self._no_column(indices, offsets, filled, int(outside.argmax()))
            place[here] = places[indices[here]]
        kept = place >= 0
        ends = np.concatenate(([0], np.cumsum(kept)))[offsets]
        dtype = _index_dtype(indices.dtype, self.shape.columns)
        return values[kept], place[kept].astype(dtype, copy=False), ends

    def _no_column(
        self, indices: NDArray[Any], offsets: Int64s, filled: Filled, at: int
    ) -> DatasetError:
        """Return the error for the index at position `at` of a batch, which is not a column."""
        shape = self.shape
        sample = int(filled.samples[np.searchsorted(offsets, at, side="right") - 1])
        file = int(filled.files(np.array([sample]))[0])
        columns = shape.columns if shape.places is None else shape.places[file].size
        return DatasetError(
            f"{shape.where[file]}: row {sample - int(filled.first_samples[file])} (sample {sample})"
            f" has the index {indices[at]}, which is not one of the {columns:,} columns; the file"
            " is damaged"
        )

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return the number of values in each row; None for dense rows."""
        return None if self.field.dense else rows.all_lengths()


def are_all_equal(
    several: tuple[NDArray[Any], ...] | None, others: tuple[NDArray[Any], ...] | None
) -> bool:
    """Return whether arrays are the same as others, or both None."""
    if several is None or others is None:
        return several is others
    return len(several) == len(others) and all(map(np.array_equal, several, others))


def _index_dtype(stored: np.dtype[Any], columns: int) -> np.dtype[Any]:
    """Return the dtype for indices of chosen columns; the file may have fewer columns."""
    fits = columns - 1 <= np.iinfo(stored).max
    return stored if fits else np.dtype(np.int32 if columns <= 1 << 31 else np.int64)


def _are_outside(indices: NDArray[Any], columns: int) -> NDArray[np.bool_]:
    # (As unsigned numbers, negative ones are too large as well.)
    found: NDArray[np.bool_] = indices.view(f"u{indices.itemsize}") >= columns
    return found


def _indices_of_one_dtype(layouts: Sequence[DatasetLayout]) -> list[DatasetLayout]:
    """Return the indices of several files in the narrowest dtype that holds all of them.

    Files with another dtype are read through h5py, which converts; there may be too many indices to
    keep them.
    """
    dtypes = {layout.dtype.newbyteorder("=") for layout in layouts}
    widest = np.result_type(*dtypes) if dtypes else None
    if len(dtypes) < 2 or widest is None or widest.kind not in "iu":  # 64 bits, also unsigned
        return list(layouts)
    return [
        layout
        if layout.dtype.newbyteorder("=") == widest
        else left_to_hdf5(
            layout,
            f"its indices are {layout.dtype}, and those of all files together {widest}; write them"
            f" as {widest} to have them read directly",
        ).changed(dtype=widest, fill=layout.fill.astype(widest))
        for layout in layouts
    ]


def _limit_of(indices: DatasetLayout, columns: int) -> int | None:
    """Return the `DatasetLayout.limit` of the indices of a matrix with `columns` columns."""
    dtype = indices.dtype
    if not dtype.isnative or dtype.kind not in "iu" or dtype.itemsize not in (4, 8):
        return None
    if columns > 1 << (8 * dtype.itemsize - 1):
        return None
    # (Values that were never written are filled, not checked.)
    leaves = indices.leaves()
    are_good = (leaf.dtype == dtype and 0 <= int(leaf.raw_fill) < columns for leaf in leaves)
    return columns if all(are_good) else None


class _SparseShapes:
    """Finds the delivered columns of the sparse field `name`, file by file."""

    def __init__(self, name: str, field: SparseField) -> None:
        self._name, self._field = name, field
        self._places: list[Int64s] = []
        self._where: list[str] = []
        self._columns = 0
        # Of columns chosen by name: those that no file had so far, and the names that files have
        # instead.
        self._lacking = set(field.columns) if isinstance(field.columns, tuple) else set[str]()
        self._others: set[str] = set()

    def add(self, columns: int, where: str, names: Sequence[str]) -> None:
        """Add the matrix of the next file: its columns, its name in messages, and their names.

        These are only needed if columns are chosen by name. DatasetError if the matrix has other
        columns than the first one, or lacks a required one; ConfigError if there are no such ones.
        """
        field = self._field
        if not self._where:
            self._columns = columns
        self._where.append(where)
        if not isinstance(field.columns, tuple) and columns != self._columns:
            raise DatasetError(
                f"{where} has {columns:,} columns, and {self._where[0]} has"
                f" {self._columns:,}; choose columns by their names"
            )
        if field.columns is None:
            return
        wanted = self._numbers(field, columns, where, names)
        places = np.full(columns, -1, np.int64)
        places[wanted[wanted >= 0]] = np.flatnonzero(wanted >= 0)
        self._places.append(places)

    def _numbers(
        self, field: SparseField, columns: int, where: str, names: Sequence[str]
    ) -> Int64s:
        """Return the number of each delivered column; -1 if the file lacks it."""
        if isinstance(field.columns, tuple):
            if len(names) != columns:
                raise DatasetError(
                    f"{where}: there are {len(names):,} names of columns, and the matrix has"
                    f" {columns:,}"
                )
            if len(set(field.columns)) < len(field.columns):
                twice = next(name for name in field.columns if field.columns.count(name) > 1)
                raise ConfigError(f'{self._name}: columns: "{twice}" comes twice')
            numbers = self._numbered(field.columns, where, names)
            missing = [name for name in field.columns if name not in numbers]
            self._lacking.intersection_update(missing)
            is_refused = bool(missing) and field.missing == "error"
            if self._lacking or is_refused:
                self._others.update(numbers)
            if is_refused:
                raise self._no_column(where, missing, f", or set {named('missing', 'zero')}")
            found = np.array([numbers.get(name, -1) for name in field.columns], np.int64)
            there = found[found >= 0]
            if np.unique(there).size < there.size:  # by its name, and by its id
                twice = np.flatnonzero(found == there[np.argmax(np.bincount(there)[there] > 1)])
                one, other = (field.columns[number] for number in twice[:2])
                raise ConfigError(
                    f'{self._name}: columns: "{one}" and "{other}" are the same column of {where}'
                )
            return found
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

    @staticmethod
    def _numbered(wanted: Sequence[str], where: str, texts: Sequence[str]) -> dict[str, int]:
        """Return the number of each column by its name, or by its id if columns have one."""
        pairs = [text.partition(ID) for text in texts]
        names = [name for name, _, _ in pairs]
        numbers = {one: number for number, (_, _, one) in enumerate(pairs) if one}
        has_ids = bool(numbers)
        numbers |= {name: number for number, name in enumerate(names)}
        counts = Counter(names)
        of_ids = Counter(one for _, _, one in pairs)
        several = [name for name in wanted if (counts[name] or of_ids[name]) > 1]
        if several:
            ids = [one for name, _, one in pairs if several[0] in (name, one)]
            has_ids = has_ids and counts[several[0]] > 1
            remedy = (
                f"give one of their ids ({', '.join(ids)})"
                if has_ids
                else "give the numbers of columns, or store names that are unique"
                " (var_names_make_unique() of AnnData)"
            )
            raise DatasetError(
                f'{where} has {len(ids)} columns of the name "{several[0]}"; {remedy}'
            )
        return numbers

    def _no_column(self, where: str, missing: Sequence[str], remedy: str = "") -> DatasetError:
        """Return the error for missing columns; it names the most similar ones."""
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        similar = difflib.get_close_matches(missing[0], sorted(self._others))
        similar_names = "; the most similar: " + ", ".join(similar) if similar else ""
        return DatasetError(
            f'{where} has no column "{missing[0]}"{more}{similar_names}; correct its name, or leave'
            f" it out of columns{remedy}"
        )

    def shape(self) -> SparseShape:
        """Return the result; DatasetError if no file has a column that was chosen by name."""
        wanted = self._field.columns
        if self._lacking and self._where:
            where = self._where[0] + (", like all other files," if self._where[1:] else "")
            lacking = [name for name in self._field.columns if name in self._lacking]
            raise self._no_column(where, lacking)
        if wanted is None:
            return SparseShape(self._columns, where=tuple(self._where))
        if isinstance(wanted, tuple):
            count = len(wanted)
        else:
            is_mask = wanted.array.dtype.kind == "b"
            count = int(np.count_nonzero(wanted.array)) if is_mask else wanted.array.size
        return SparseShape(count, tuple(self._places), tuple(self._where))
