"""Defines the datasets that a field is read from, and turns their arrays into delivered values.

A field is one dataset, its *column*, or several: a sparse matrix has values and indices. Arrays of
columns enter as they lie in a slot; arrays of fields leave: `Ragged`, `Csr`, or plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ImageField, RaggedField, SparseField
from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.order.rows import LengthRows, SpanRows, StepRows, StepSpans
from h5async.samples.ragged import Ragged, put_padded
from h5async.samples.sparse import Csr

T = TypeVar("T")

INDICES = "\0indices"  # suffix of a field's name: its column of indices

Rows = StepRows | SpanRows | None  # the rows of a column per sample; None: its own


class SlotMemory(NamedTuple):
    """The host arrays of a slot, one of each kind per column.

    Attributes
    ----------
    raw
        (batch, *raw_row): rows as read.
    out
        (batch, *row): rows as delivered; the array of `raw` itself if the filler transforms
        nothing.
    made
        Per field, if there are any: (batch, ...), plain arrays made of samples of differing
        lengths; in helper processes also uint8 memory for the pixels of images. None if nothing is
        made, or if it gets memory of its own.
    """

    raw: tuple[NDArray[Any], ...]
    out: tuple[NDArray[Any], ...]
    made: tuple[NDArray[Any] | None, ...] = ()


def columns_of(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the columns of fields by name; a field's first column has the field's name."""
    found: dict[str, Field] = {}
    for name, field in fields.items():
        if isinstance(field, SparseField):
            # (`offset` applies to dense rows, also to values that are not stored.)
            offset = None if field.dense else field.offset
            found[name] = Field(
                f"{field.path}/data",
                dtype=field.delivered_dtype,
                scale=field.scale,
                offset=offset,
            )
            found[name + INDICES] = Field(f"{field.path}/indices")
        elif isinstance(field, ImageField):  # its other options concern pixels
            found[name] = RaggedField(
                path=field.path, offsets=field.offsets, offsets_kind=field.offsets_kind
            )
        else:
            found[name] = field
    return found


def first_columns_of(columns: Iterable[str]) -> list[int]:
    """Return, per field, the number of its first column."""
    return [number for number, name in enumerate(columns) if not name.endswith(INDICES)]


def steps_of(rows: Rows) -> StepRows | None:
    """Return the steps of the samples of a column; None if it has none."""
    if isinstance(rows, StepSpans):
        return rows.steps
    return rows if isinstance(rows, StepRows) else None


def by_field(columns: Mapping[str, T], join: Callable[[T, T], T]) -> dict[str, T]:
    """Group a mapping by column into one by field; `join` combines two columns of a field."""
    found: dict[str, T] = {}
    for name, one in columns.items():
        field = name.removesuffix(INDICES)
        found[field] = join(found[field], one) if field in found else one
    return found


def spans_of(
    layouts: Mapping[str, DatasetLayout], steps: Mapping[str, StepRows | None]
) -> dict[str, SpanRows]:
    """Return which rows each sample is, per column of ragged fields; one object per field.

    `steps` says, per field, which samples' rows each sample consists of; None means its own.
    """
    found: dict[str, SpanRows] = {}
    for name, layout in layouts.items():
        if not layout.is_ragged:
            continue
        first, one = found.get(name.removesuffix(INDICES)), steps.get(name)
        if first is None:
            spans = (
                SpanRows(layout.starts()) if layout.lengths is None else LengthRows(layout.lengths)
            )
            first = spans if one is None else StepSpans(spans, one)
        found[name] = first
    return found


@dataclass(frozen=True)
class SparseShape:
    """The columns of a sparse field.

    Attributes
    ----------
    columns
        The number of delivered columns.
    places
        Per file: int64 (columns of the file,): the delivered position of each, or -1 if it is not
        delivered. None means all columns in their own order.
    where
        Per file: the name of the matrix in messages.
    """

    columns: int
    places: tuple[NDArray[np.int64], ...] | None = None
    where: tuple[str, ...] = ()


class Categories(NamedTuple):
    """The categories of a field.

    Attributes
    ----------
    names
        Of all files together: code c stands for ``names[c]``.
    tables
        Per file: int64 (categories of the file + 1,): the united code of each of its codes; the
        last one is -1. None if the codes need no mapping.
    where
        Per file: the name of the column in messages.
    """

    names: tuple[Any, ...]
    tables: tuple[NDArray[np.int64], ...] | None = None
    where: tuple[str, ...] = ()


def dense_dtype(field: SparseField, values: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of dense rows: by default that of their values."""
    return field.delivered_dtype or values.newbyteorder("=")


class Assembly:
    """Turns the arrays of columns into delivered values. Thread-safe.

    Parameters
    ----------
    fields
        By name, in the order of delivery.
    rows
        Per column: which rows each sample consists of.
    shapes, categories
        Of sparse and of categorical fields, by name.
    first_samples
        int64 (files + 1,): the first sample of each file.
    limited
        Names of columns whose values the core checks while reading: `DatasetLayout.limit`.

    Attributes
    ----------
    is_plain
        Whether each field is one array with a row per sample, as it lies in the slot.
    needs_work
        Whether more than views must be made.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        rows: Sequence[Rows],
        shapes: Mapping[str, SparseShape],
        first_samples: NDArray[np.int64],
        categories: Mapping[str, Categories] = MappingProxyType({}),
        limited: Collection[str] = (),
    ) -> None:
        self._united = {n: one for n, one in categories.items() if one.tables is not None}
        self._fields = dict(fields)
        self._limited = frozenset(limited)
        self._rows = rows
        self._shapes = shapes
        self._first_samples = first_samples
        self.is_plain = not self._united and not any(isinstance(one, SpanRows) for one in rows)
        self.needs_work = bool(self._united) or any(
            isinstance(field, ImageField)
            or (isinstance(field, RaggedField) and field.pad_to is not None)
            or (isinstance(field, SparseField) and (field.dense or shapes[name].places is not None))
            for name, field in fields.items()
        )

    def sizes(self, index: NDArray[np.int64]) -> list[int]:
        """Return, per column, the number of rows of a batch in the slot's arrays."""
        totals: dict[SpanRows, int] = {}
        for one in self._rows:
            if isinstance(one, SpanRows) and one not in totals:
                totals[one] = one.total(index)
        return [totals[one] if isinstance(one, SpanRows) else index.size for one in self._rows]

    def arrays(
        self,
        memory: SlotMemory,
        index: NDArray[np.int64],
        left: Collection[str] = (),
        *,
        are_checked: bool = False,
    ) -> tuple[Any, ...]:
        """Return the arrays of a batch, per field; views of a slot's memory if possible.

        Parameters
        ----------
        memory, index
            Memory and sample numbers of the batch.
        left
            Names of fields that a device pads or makes dense.
        are_checked
            Whether the core has read the whole batch, and has checked indices that have a limit.

        Raises
        ------
        DatasetError
            If an index of a sparse row is not a column, or a code is not a category.
        """
        if self.is_plain:
            return tuple([out[: index.size] for out in memory.out])
        found: list[Any] = []
        column = 0
        for number, (name, field) in enumerate(self._fields.items()):
            made = memory.made[number] if memory.made and name not in left else None
            rows, out = self._rows[column], memory.out[column]
            column += 1
            if name in self._united:
                found.append(self._codes(self._united[name], field, out[: index.size], index))
                continue
            if not isinstance(rows, SpanRows):
                found.append(out[: index.size])
                continue
            offsets = rows.offsets(index)
            values = out[: offsets[-1]]
            if isinstance(field, SparseField):
                indices = memory.out[column][: offsets[-1]]
                column += 1
                is_checked = are_checked and name + INDICES in self._limited
                several = self._sparse(name, values, indices, offsets, index, is_checked)
                is_whole = not field.dense or name in left
                found.append(several if is_whole else _dense(several, field, made))
            else:
                is_padded = name not in left
                pad_to = field.pad_to if is_padded and isinstance(field, RaggedField) else None
                found.append(_ragged(values, offsets, pad_to, made))
        return tuple(found)

    def _codes(
        self, of: Categories, field: Field, values: NDArray[Any], index: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the codes of samples in the united categories of all files."""
        assert of.tables is not None
        least = np.promote_types(values.dtype, np.min_scalar_type(-max(1, len(of.names))))
        found = np.empty(values.shape, least if field.dtype is None else field.dtype)
        file = self._files(index)
        for number in np.unique(file).tolist():
            here, table = np.flatnonzero(file == number), of.tables[number]
            codes = values[here].astype(np.int64)
            outside = (codes < -1) | (codes >= table.size - 1)
            if outside.any():
                at = int(outside.argmax())
                sample = int(index[here[at]])
                row = sample - int(self._first_samples[number])
                raise no_category(of.where[number], row, sample, int(codes[at]), table.size - 1)
            found[here] = table[codes]
        return found

    def _files(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_samples, samples, side="right") - 1

    def _sparse(
        self,
        name: str,
        values: NDArray[Any],
        indices: NDArray[Any],
        offsets: NDArray[np.int64],
        index: NDArray[np.int64],
        is_checked: bool,
    ) -> Csr:
        shape = self._shapes[name]
        if shape.places is not None:
            values, indices, offsets = self._chosen(shape, values, indices, offsets, index)
        rows = Csr(values, indices, offsets, (index.size, shape.columns))
        if shape.places is None and not is_checked:
            outside = _are_outside(indices, shape.columns)
            if outside.any():
                raise self._no_column(shape, indices, offsets, index, int(outside.argmax()))
        return rows

    def _chosen(
        self,
        shape: SparseShape,
        values: NDArray[Any],
        indices: NDArray[Any],
        offsets: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Return the chosen columns of sparse rows."""
        assert shape.places is not None
        file = self._files(index)
        place = np.empty(indices.size, np.int64)
        of_value = np.repeat(file, np.diff(offsets))
        for number in np.unique(file).tolist():
            here, places = of_value == number, shape.places[number]
            outside = here & _are_outside(indices, places.size)
            if outside.any():
                raise self._no_column(shape, indices, offsets, index, int(outside.argmax()))
            place[here] = places[indices[here]]
        kept = place >= 0
        ends = np.concatenate(([0], np.cumsum(kept)))[offsets]
        dtype = _index_dtype(indices.dtype, shape.columns)
        return values[kept], place[kept].astype(dtype, copy=False), ends

    def _no_column(
        self,
        shape: SparseShape,
        indices: NDArray[Any],
        offsets: NDArray[np.int64],
        index: NDArray[np.int64],
        at: int,
    ) -> DatasetError:
        """Return the error for the index at position `at` of a batch, which is not a column."""
        sample = int(index[np.searchsorted(offsets, at, side="right") - 1])
        file = int(self._files(np.array([sample]))[0])
        columns = shape.columns if shape.places is None else shape.places[file].size
        return DatasetError(
            f"{shape.where[file]}: row {sample - int(self._first_samples[file])} (sample {sample})"
            f" has the index {indices[at]}, which is not one of the {columns:,} columns; the file"
            " is damaged"
        )


def no_category(where: str, row: int, sample: int, code: int, count: int) -> DatasetError:
    """Return the error for a code outside `count` categories."""
    return DatasetError(
        f"{where}: row {row} (sample {sample}) has the code {code}, and there are {count:,}"
        " categories; the file is damaged"
    )


def _index_dtype(stored: np.dtype[Any], columns: int) -> np.dtype[Any]:
    """Return the dtype for indices of chosen columns; the file may have fewer columns."""
    fits = columns - 1 <= np.iinfo(stored).max
    return stored if fits else np.dtype(np.int32 if columns <= 1 << 31 else np.int64)


def _are_outside(indices: NDArray[Any], columns: int) -> NDArray[np.bool_]:
    # (As unsigned numbers, negative ones are too large as well.)
    found: NDArray[np.bool_] = indices.view(f"u{indices.itemsize}") >= columns
    return found


def _dense(rows: Csr, field: SparseField, out: NDArray[Any] | None) -> NDArray[Any]:
    """Return dense rows, in `out` if given."""
    dtype = dense_dtype(field, rows.dtype)
    found = np.empty(rows.shape, dtype) if out is None else out[: len(rows)]
    rows.to_dense(found)
    if field.offset is not None:
        np.add(found, np.asarray(field.offset, dtype), out=found)
    return found


def _ragged(
    values: NDArray[Any], offsets: NDArray[np.int64], pad_to: int | None, out: NDArray[Any] | None
) -> Any:
    """Return samples or, if padded, an array, in `out` if given."""
    if pad_to is None:
        return Ragged(values, offsets)
    size = offsets.size - 1
    shape = size, pad_to, *values.shape[1:]
    found = np.empty(shape, values.dtype) if out is None else out[:size]
    found[...] = np.zeros((), values.dtype)
    put_padded(values, offsets, found)
    return found
