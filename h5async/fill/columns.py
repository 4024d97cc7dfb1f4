"""Tells which datasets a field is read of, and makes what is delivered of their arrays.

A field is one dataset, its *column*, or several: a sparse matrix has values and indices. Arrays of
columns enter, as they lie in a slot; the arrays of fields leave: `Ragged`, `Csr`, or plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ImageField, RaggedField, SparseField
from h5async.errors import DatasetError
from h5async.fill.records import SlotMemory
from h5async.index.layout import DatasetLayout
from h5async.order.spans import SpanRows
from h5async.order.steps import StepRows
from h5async.ragged import Ragged
from h5async.sparse import Csr

INDICES = "\0indices"  # behind the name of a field: its column of indices

Rows = StepRows | SpanRows | None  # which rows of a column a sample consists of; None: its own


def columns_of(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the columns of fields, by name: that of the field, for its first one."""
    found: dict[str, Field] = {}
    for name, field in fields.items():
        if isinstance(field, SparseField):
            delivered = {"dtype": field.dtype, "scale": field.scale, "offset": field.offset}
            found[name] = Field(f"{field.path}/data", **delivered)
            found[name + INDICES] = Field(f"{field.path}/indices")
        elif isinstance(field, ImageField):  # its other options are of pixels
            found[name] = RaggedField(
                path=field.path, offsets=field.offsets, offsets_kind=field.offsets_kind
            )
        else:
            found[name] = field
    return found


def spans_of(layouts: Mapping[str, DatasetLayout]) -> dict[str, SpanRows]:
    """Return which rows each sample is, of columns of ragged fields; one object for each field."""
    found: dict[str, SpanRows] = {}
    for name, layout in layouts.items():
        if layout.spans is not None:
            first = found.get(name.removesuffix(INDICES))
            found[name] = SpanRows(layout.spans) if first is None else first
    return found


@dataclass(frozen=True)
class SparseShape:
    """What is known of the columns of a sparse field.

    Attributes
    ----------
    columns
        How many are delivered.
    places
        By file: int64 (columns of the file,): where each is delivered; -1: it is not. None: all
        are, as they are.
    """

    columns: int
    places: tuple[NDArray[np.int64], ...] | None = None


class Assembly:
    """Makes what is delivered of the arrays of columns. Safe to use from many threads.

    Parameters
    ----------
    fields
        By name, in the order of delivery.
    rows
        By column: which rows each sample consists of.
    shapes
        Of sparse fields, by name.
    first_samples
        int64 (files + 1,): the first sample of each file.

    Attributes
    ----------
    is_plain
        Whether each field is one array with a row for each sample.
    needs_work
        Whether there is more to be done than to make views.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        rows: Sequence[Rows],
        shapes: Mapping[str, SparseShape],
        first_samples: NDArray[np.int64],
    ) -> None:
        self._fields = dict(fields)
        self._rows = rows
        self._shapes = shapes
        self._first_samples = first_samples
        self.is_plain = not any(isinstance(one, SpanRows) for one in rows)
        self.needs_work = any(
            isinstance(field, ImageField)
            or (isinstance(field, RaggedField) and field.pad_to is not None)
            or (isinstance(field, SparseField) and (field.dense or shapes[name].places is not None))
            for name, field in fields.items()
        )

    def sizes(self, index: NDArray[np.int64]) -> list[int]:
        """Return, by column, how many rows a batch of some samples has in the slot's arrays."""
        totals: dict[SpanRows, int] = {}
        for one in self._rows:
            if isinstance(one, SpanRows) and one not in totals:
                totals[one] = int(one.lengths(index).sum())
        return [totals[one] if isinstance(one, SpanRows) else index.size for one in self._rows]

    def arrays(self, memory: SlotMemory, index: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return the arrays of a batch, by field; views of a slot's memory, where that is possible.

        Raises
        ------
        DatasetError
            If an index of a sparse row is none of its columns.
        """
        if self.is_plain:
            return tuple([out[: index.size] for out in memory.out])
        found, column = [], 0
        for name, field in self._fields.items():
            rows, out = self._rows[column], memory.out[column]
            column += 1
            if not isinstance(rows, SpanRows):
                found.append(out[: index.size])
                continue
            offsets = rows.offsets(index)
            values = out[: offsets[-1]]
            if isinstance(field, SparseField):
                indices = memory.out[column][: offsets[-1]]
                column += 1
                found.append(self._sparse(name, field, values, indices, offsets, index))
            else:
                found.append(_ragged(field, values, offsets))
        return tuple(found)

    def _sparse(
        self,
        name: str,
        field: SparseField,
        values: NDArray[Any],
        indices: NDArray[Any],
        offsets: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> Any:
        shape = self._shapes[name]
        if shape.places is not None:
            values, indices, offsets = self._chosen(shape, values, indices, offsets, index)
        rows = Csr(values, indices, offsets, (index.size, shape.columns))
        if not field.dense:
            if shape.places is None:
                _check_indices(indices, shape.columns)
            return rows
        dtype = np.float32 if field.delivered_dtype is None else field.delivered_dtype
        if np.can_cast(values.dtype, dtype, "same_kind"):
            return rows.to_dense(np.empty(rows.shape, dtype))
        return rows.to_dense().astype(dtype)

    def _chosen(
        self,
        shape: SparseShape,
        values: NDArray[Any],
        indices: NDArray[Any],
        offsets: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Return what is left of sparse rows where only some columns are delivered."""
        assert shape.places is not None
        file = np.searchsorted(self._first_samples, index, side="right") - 1
        place = np.empty(indices.size, np.int64)
        of_value = np.repeat(file, np.diff(offsets))
        for number in np.unique(file).tolist():
            here, places = of_value == number, shape.places[number]
            some = indices[here]
            _check_indices(some, places.size)
            place[here] = places[some]
        kept = place >= 0
        ends = np.concatenate(([0], np.cumsum(kept)))[offsets]
        return values[kept], place[kept].astype(indices.dtype, copy=False), ends


def _check_indices(indices: NDArray[Any], columns: int) -> None:
    # (Seen as unsigned, those below 0 are too large, too.)
    if indices.size and int(indices.view(f"u{indices.itemsize}").max()) >= columns:
        raise DatasetError(
            f"a sparse row has an index that is none of its {columns:,} columns; the file holds a"
            " damaged matrix"
        )


def _ragged(field: Field, values: NDArray[Any], offsets: NDArray[np.int64]) -> Any:
    found = Ragged(values, offsets)
    if isinstance(field, RaggedField) and field.pad_to is not None:
        return found.to_padded(length=field.pad_to)[0]
    return found
