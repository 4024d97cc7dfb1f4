"""Defines the kind of sparse fields: rows of a matrix in compressed form (CSR)."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig, SparseField
from h5async.core.binding import VALUE_KINDS, address, load_core
from h5async.errors import ConfigError, DatasetError
from h5async.index.chunks import left_to_hdf5
from h5async.index.composition import join_layouts, widest_dtype
from h5async.index.layout import DatasetLayout, values_of
from h5async.index.links import Reach, files_of
from h5async.index.savedindex import Wanted
from h5async.index.tables import Int64s
from h5async.order.rows import SpanRows
from h5async.samples.fieldkind import (
    INDICES,
    ROWS,
    SHAPE,
    TEXTS,
    CanTransform,
    FieldKind,
    Filled,
    Known,
    Outline,
    SparseShape,
    Transforms,
    texts_of,
)
from h5async.samples.sparse import Csr
from h5async.spelling import named

SHAPE_OF, NAMES_OF = "\0shape", "\0names"  # suffixes of a field's name for its facts
ID = "\0"  # separates name and id in the names of columns


class SparseKind(FieldKind):
    """Rows of a sparse matrix, which have two columns in a slot: values and indices.

    `shape` is set by `join`; it has no columns before.
    """

    of: ClassVar[type[Field]] = SparseField
    found_as = SHAPE
    is_ragged = True
    field: SparseField
    shape: SparseShape

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.shape = SparseShape(0)
        self.further = () if self.field.totals is None else (self.field.totals,)
        self._has_limit = False

    @property
    def columns(self) -> dict[str, Field]:
        """The values of rows, and their indices."""
        field = self.field
        # (The `offset` of dense rows is added later, to values that are not stored, too.)
        offset = None if field.dense else field.offset
        dtype = None if field.counts else field.delivered_dtype  # totals are of stored values
        values = Field(f"{field.path}/data", dtype=dtype, scale=field.scale, offset=offset)
        return {self.name: values, self.name + INDICES: Field(f"{field.path}/indices")}

    def facts(self) -> dict[str, Wanted]:
        """Return values, indices, and the shape; names of columns if they are chosen by name."""
        name, path = self.name, self.field.path
        found = {
            name: Wanted.at(f"{path}/data", kind=ROWS),
            name + INDICES: Wanted.at(f"{path}/indices", kind=ROWS),
            name + SHAPE_OF: Wanted.at(path, kind=SHAPE),
        }
        if isinstance(self.field.columns, tuple):
            found[name + NAMES_OF] = Wanted.at(path, kind=TEXTS)
        return found

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layouts of values and indices; find the columns that are delivered."""
        values = join_layouts(known[self.name])
        several = _indices_of_one_dtype(known[self.name + INDICES])
        indices = join_layouts(several).changed(spans=values.spans)  # stored once
        shapes, names = known[self.name + SHAPE_OF], known.get(self.name + NAMES_OF, ())
        self.shape = _delivered_columns(self.name, self.field, shapes, names, reach)
        if self.shape.places is None:
            indices = indices.changed(limit=_limit_of(indices, self.shape.columns))
        self._has_limit = indices.limit is not None
        self.needs_work = self.field.dense or self.shape.places is not None or self.field.counts
        return {self.name: values, self.name + INDICES: indices}

    def outline(self, transforms: Transforms, can_transform: CanTransform) -> Outline:
        """Return how the field is assembled; ConfigError for complex dense rows on a GPU."""
        outline, field = super().outline(transforms, can_transform), self.field
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
        if self.field.is_scaled:
            return np.dtype(np.float32)
        return self.field.delivered_dtype or values.newbyteorder("=")

    @property
    def is_view(self) -> bool:
        """Whether `Csr` of views is delivered, whose indices the core has checked."""
        return super().is_view and self._has_limit

    def views(
        self, columns: Sequence[NDArray[Any]], offsets: Int64s | None
    ) -> tuple[Any, ...] | None:
        """Return the parts of `Csr` for the core, which checks indices if the field `is_view`."""
        if offsets is None:
            return None
        (values, indices), fixed = columns, ("_columns", self.shape.columns)
        rows = "data", values, "indices", indices
        return address(offsets), Csr, fixed, rows, ("indptr", offsets)

    def deliver(self, filled: Filled) -> Any:
        """Return `Csr`, or dense rows, and the totals; DatasetError if an index is not a column."""
        assert isinstance(filled.rows, SpanRows)
        offsets, field = filled.rows.offsets(filled.samples), self.field
        values, indices = (column[: offsets[-1]] for column in filled.columns)
        totals = None
        if field.totals is not None or field.target_sum is not None:
            totals = row_sums(values, offsets)
        rows = self._rows(values, indices, offsets, filled)
        if field.is_scaled:
            scaled = scaled_rows(rows.data, rows.indptr, totals, field.target_sum, field.log1p)
            rows = Csr(scaled, rows.indices, rows.indptr, rows.shape)
        elif field.counts and field.dtype is not None and not field.dense:
            data = rows.data.astype(field.dtype, copy=False)
            rows = Csr(data, rows.indices, rows.indptr, rows.shape)
        found = rows if not field.dense or filled.is_left else self._dense(rows, filled)
        if field.totals is None or totals is None:
            return found
        return found, totals.astype(np.float32)

    def _rows(
        self, values: NDArray[Any], indices: NDArray[Any], offsets: Int64s, filled: Filled
    ) -> Csr:
        shape = self.shape
        if shape.places is not None:
            values, indices, offsets = self._chosen(values, indices, offsets, filled)
        elif not (filled.is_checked and self._has_limit):
            outside = _are_outside(indices, shape.columns)
            if outside.any():
                raise self._no_column(indices, offsets, filled, int(outside.argmax()))
        return Csr(values, indices, offsets, (filled.samples.size, shape.columns))

    def _dense(self, rows: Csr, filled: Filled) -> NDArray[Any]:
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
        dtype = indices.dtype  # the file may have fewer columns than are chosen
        if self.shape.columns - 1 > np.iinfo(dtype).max:
            dtype = np.dtype(np.int32 if self.shape.columns <= 1 << 31 else np.int64)
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


def _are_outside(indices: NDArray[Any], columns: int) -> NDArray[np.bool_]:
    # (As unsigned numbers, negative ones are too large as well.)
    found: NDArray[np.bool_] = indices.view(f"u{indices.itemsize}") >= columns
    return found


def _indices_of_one_dtype(layouts: Sequence[DatasetLayout]) -> list[DatasetLayout]:
    """Return the indices of several files in the narrowest dtype that holds all of them.

    Files with another dtype are read through h5py, which converts; there may be too many indices to
    keep them.
    """
    widest = widest_dtype(layouts)
    if widest is None:
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


def _delivered_columns(
    name: str,
    field: SparseField,
    shapes: Sequence[DatasetLayout],
    names: Sequence[DatasetLayout],
    reach: Reach,
) -> SparseShape:
    """Find the delivered columns from the facts of each file.

    DatasetError if the columns of a matrix differ from those of the first one, or a required one is
    missing; ConfigError if the columns to deliver are invalid.
    """
    wanted, where = field.columns, tuple(f'{one.file}: group "{one.path}"' for one in shapes)
    counts = [int(values_of(one)[1]) for one in shapes]
    for place, count in zip(where, counts, strict=True):
        if count != counts[0] and not isinstance(wanted, tuple):
            raise DatasetError(
                f"{place} has {count:,} columns, and {where[0]} has {counts[0]:,}; choose columns"
                " by their names"
            )
    if wanted is None:
        _require_same_names(shapes, where)
        return SparseShape(counts[0], where=where)
    for place, count, shape in zip(where, counts, shapes, strict=True):
        what = f"{place}: tables to choose from its {count:,} columns"
        reach.room.take(8 * count, what, files_of(shape))
    if isinstance(wanted, tuple):
        several = _by_name(name, field, wanted, where, counts, names)
    else:
        several = [_by_number(f"{name}: columns", wanted.array, counts[0])] * len(shapes)
    places = []
    for numbers, count in zip(several, counts, strict=True):
        places.append(np.full(count, -1, np.int64))
        places[-1][numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)
    return SparseShape(several[0].size, tuple(places), where)


def _require_same_names(shapes: Sequence[DatasetLayout], where: Sequence[str]) -> None:
    first, digest = where[0], 0
    for place, shape in zip(where, shapes, strict=True):
        of_names = int(values_of(shape)[2])
        if of_names and digest not in (0, of_names):
            raise DatasetError(
                f"{place} has different column names from {first}, or another order of them;"
                " choose columns by their names, or by their numbers if these mean the same"
            )
        if of_names and not digest:
            first, digest = place, of_names


def _by_number(option: str, array: NDArray[Any], columns: int) -> Int64s:
    if array.dtype.kind == "b":
        if array.size != columns:
            raise ConfigError(
                f"{option}: a mask must have a value for each of the {columns:,} columns, and has"
                f" {array.size:,}"
            )
        return np.flatnonzero(array)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < columns:
        raise ConfigError(
            f"{option}: must be numbers from 0 to {columns - 1}, found {array.min()} to"
            f" {array.max()}"
        )
    found = array.astype(np.int64)
    if np.unique(found).size < found.size:
        raise ConfigError(f"{option}: a column is given twice")
    return found


def _by_name(
    name: str,
    field: SparseField,
    wanted: tuple[str, ...],
    where: Sequence[str],
    counts: Sequence[int],
    several: Sequence[DatasetLayout],
) -> list[Int64s]:
    """Return, per file, the number of each column that is chosen by name; -1 if it lacks it."""
    if len(set(wanted)) < len(wanted):
        twice = next(one for one in wanted if wanted.count(one) > 1)
        raise ConfigError(f'{name}: columns: "{twice}" is given twice')
    # Names that no file had so far, and those that files have instead.
    lacking, others, found = set(wanted), set[str](), []
    for place, count, fact in zip(where, counts, several, strict=True):
        texts = texts_of(fact)
        if len(texts) != count:
            raise DatasetError(
                f"{place}: there are {len(texts):,} names of columns, and the matrix has {count:,}"
            )
        numbers = _numbered(wanted, place, texts)
        missing = [one for one in wanted if one not in numbers]
        lacking.intersection_update(missing)
        is_refused = bool(missing) and field.missing == "error"
        if lacking or is_refused:
            others.update(numbers)
        if is_refused:
            raise _no_column(place, missing, others, f", or set {named('missing', 'zero')}")
        chosen = np.array([numbers.get(one, -1) for one in wanted], np.int64)
        there = chosen[chosen >= 0]
        if np.unique(there).size < there.size:  # by its name, and by its id
            same = np.flatnonzero(chosen == there[np.argmax(np.bincount(there)[there] > 1)])
            one, other = (wanted[number] for number in same[:2])
            raise ConfigError(
                f'{name}: columns: "{one}" and "{other}" are the same column of {place}'
            )
        found.append(chosen)
    if lacking:
        place = where[0] + (", like all other files," if where[1:] else "")
        raise _no_column(place, [one for one in wanted if one in lacking], others)
    return found


def _numbered(wanted: Sequence[str], where: str, texts: Sequence[str]) -> dict[str, int]:
    """Return the number of each column by its name, or by its id if columns have one."""
    pairs = [text.partition(ID) for text in texts]
    names = [name for name, _, _ in pairs]
    numbers = {one: number for number, (_, _, one) in enumerate(pairs) if one}
    has_ids = bool(numbers)
    numbers |= {name: number for number, name in enumerate(names)}
    counts, of_ids = Counter(names), Counter(one for _, _, one in pairs)
    several = [name for name in wanted if (counts[name] or of_ids[name]) > 1]
    if several:
        ids = [one for name, _, one in pairs if several[0] in (name, one)]
        remedy = (
            f"give one of their ids ({', '.join(ids)})"
            if has_ids and counts[several[0]] > 1
            else "give the numbers of columns, or store names that are unique"
            " (var_names_make_unique() of AnnData)"
        )
        raise DatasetError(f'{where} has {len(ids)} columns named "{several[0]}"; {remedy}')
    return numbers


def _no_column(
    where: str, missing: Sequence[str], others: Set[str], remedy: str = ""
) -> DatasetError:
    """Return the error for missing columns; it names the most similar of the others."""
    more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    similar = difflib.get_close_matches(missing[0], sorted(others))
    similar_names = "; the most similar: " + ", ".join(similar) if similar else ""
    return DatasetError(
        f'{where} has no column "{missing[0]}"{more}{similar_names}; correct its name, or leave'
        f" it out of columns{remedy}"
    )


# --- sums and scaled values, such as counts of genes in cells -------------------------------------

Float64s = NDArray[np.float64]


def row_sums(values: NDArray[Any], offsets: Int64s) -> Float64s:
    """Return the sum of each row: float64 (rows,).

    Row i has the values ``offsets[i]`` to ``offsets[i + 1]``.
    """
    core, rows = load_core(), offsets.size - 1
    values, kind = _countable(values)
    if core is None:
        row = np.repeat(np.arange(rows), np.diff(offsets))
        found: Float64s = np.bincount(row, values.astype(np.float64), rows).astype(np.float64)
        return found
    sums = np.empty(rows)
    core.sum_rows(address(values), address(offsets), address(sums), rows, kind)
    return sums


def scaled_rows(
    values: NDArray[Any],
    offsets: Int64s,
    totals: Float64s | None,
    target_sum: float | None,
    log1p: bool,
) -> NDArray[np.float32]:
    """Return values divided by their row's total, times `target_sum`; with `log1p`, log(1 + that).

    A total of 0 counts as 1; without `target_sum`, values are not divided. They are computed in
    double precision, and rounded to float32.
    """
    core, rows = load_core(), offsets.size - 1
    divisors = np.ones(rows)
    if totals is not None and target_sum is not None:
        divisors = np.where(totals == 0, 1.0, totals) / target_sum
    values, kind = _countable(values)
    if core is None:
        scaled = values.astype(np.float64) / np.repeat(divisors, np.diff(offsets))
        with np.errstate(divide="ignore", invalid="ignore"):
            return (np.log1p(scaled) if log1p else scaled).astype(np.float32)
    out = np.empty(values.size, np.float32)
    where = map(address, (values, offsets, divisors, out))
    core.scale_rows(*where, rows, kind, log1p)
    return out


def _countable(values: NDArray[Any]) -> tuple[NDArray[Any], int]:
    kind = VALUE_KINDS.get(values.dtype)
    if kind is None or not values.flags.c_contiguous or not values.flags.aligned:
        values = np.ascontiguousarray(values, np.float64)
        kind = VALUE_KINDS[values.dtype]
    return values, kind
