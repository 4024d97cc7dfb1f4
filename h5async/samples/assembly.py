"""Lists the kinds of fields, and turns the arrays of a slot into delivered values.

A field reads one dataset, its *column*, or several: a sparse matrix has values and indices. The
columns of a slot enter; fields leave, as `Ragged`, `Csr`, or plain arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field
from h5async.index.layout import DatasetLayout
from h5async.order.rows import LengthRows, SpanRows, StepRows, StepSpans
from h5async.plan.transform import RowTransform
from h5async.samples.audiokind import AudioKind
from h5async.samples.codeskind import LabelsKind
from h5async.samples.fieldkind import (
    CanTransform,
    FieldKind,
    Filled,
    Outline,
    RaggedKind,
    Rows,
    field_of,
)
from h5async.samples.imagekind import ImageKind
from h5async.samples.sparsekind import SparseKind

T = TypeVar("T")

KINDS: tuple[type[FieldKind], ...] = (FieldKind, RaggedKind, SparseKind, ImageKind, AudioKind)
_BY_OPTIONS = {kind.of: kind for kind in KINDS}
# The kind of object found at a plain field's path -> the class of options for it.
FOUND_AS = {kind.found_as: kind.of for kind in KINDS if kind.found_as}


def field_kinds(fields: Mapping[str, Field]) -> dict[str, FieldKind]:
    """Return the kinds of fields, by name."""
    found: dict[str, FieldKind] = {}
    for name, field in fields.items():
        is_labels = field.categories is not None
        found[name] = (LabelsKind if is_labels else _BY_OPTIONS[type(field)])(name, field)
    return found


class SlotMemory(NamedTuple):
    """The host arrays of a slot, one of each kind per column.

    `raw`, (batch, *raw_row), holds rows as read; `out`, (batch, *row), rows as delivered: the same
    array as in `raw` if the filler does not transform it. `made`, if not empty, holds per field a
    plain array (batch, ...) made from samples of differing lengths, or, in helper processes, uint8
    memory for decoded samples; None if the field has neither, or allocates it elsewhere.
    """

    raw: tuple[NDArray[Any], ...]
    out: tuple[NDArray[Any], ...]
    made: tuple[NDArray[Any] | None, ...] = ()


def columns_of(kinds: Mapping[str, FieldKind]) -> dict[str, Field]:
    """Return the columns of fields by name; a field's first column has the field's name."""
    return {name: one for kind in kinds.values() for name, one in kind.columns.items()}


def by_field(columns: Mapping[str, T], join: Callable[[T, T], T]) -> dict[str, T]:
    """Group a mapping by column into one by field; `join` combines two columns of a field."""
    found: dict[str, T] = {}
    for name, one in columns.items():
        field = field_of(name)
        found[field] = join(found[field], one) if field in found else one
    return found


def spans_of(
    layouts: Mapping[str, DatasetLayout], steps: Mapping[str, StepRows | None]
) -> dict[str, SpanRows]:
    """Return the rows of each sample, per column of ragged fields; one object per field.

    `steps` are, per field, the samples whose rows make up each sample; None means its own.
    """
    found: dict[str, SpanRows] = {}
    for name, layout in layouts.items():
        if not layout.is_ragged:
            continue
        first, one = found.get(field_of(name)), steps.get(name)
        if first is None:
            spans = (
                SpanRows(layout.starts()) if layout.lengths is None else LengthRows(layout.lengths)
            )
            first = spans if one is None else StepSpans(spans, one)
        found[name] = first
    return found


def outlines_of(
    kinds: Mapping[str, FieldKind],
    transforms: Mapping[str, RowTransform],
    can_transform: CanTransform,
) -> tuple[Outline, ...]:
    """Return the outline of each field; parameters as for `FieldKind.outline`, by column."""
    numbers = {name: number for number, name in enumerate(transforms)}
    found = []
    for kind in kinds.values():
        outline = kind.outline([transforms[name] for name in kind.columns], can_transform)
        found.append(outline._replace(columns=tuple(numbers[name] for name in kind.columns)))
    return tuple(found)


def names_of(kinds: Mapping[str, FieldKind]) -> tuple[str, ...]:
    """Return the names of all arrays of a batch: those of fields, then further ones."""
    return (*kinds, *(name for kind in kinds.values() for name in kind.further))


class Assembly:
    """Turns the arrays of columns into delivered values. Thread-safe.

    `rows` are, per column, the rows of each sample; `first_samples`, int64 (files + 1,), the first
    sample of each file. `is_plain`: each field is one array of the slot, with a row per sample.
    `needs_work`: more than views must be made. `is_view`: only views are made, which cannot fail.
    `names` has the names of all arrays if there are others than the fields, and is empty otherwise.
    """

    def __init__(
        self,
        kinds: Mapping[str, FieldKind],
        rows: Sequence[Rows],
        first_samples: NDArray[np.int64],
    ) -> None:
        self._kinds = list(kinds.values())
        ends = list(itertools.accumulate((len(kind.columns) for kind in self._kinds), initial=0))
        self._columns = list(map(slice, ends, ends[1:]))
        self._rows = rows
        self._first_samples = first_samples
        self.is_plain = all(kind.is_plain for kind in self._kinds)
        self.needs_work = any(kind.needs_work for kind in self._kinds)
        shares_runs = any(isinstance(one, StepSpans) for one in rows)
        self.is_view = not shares_runs and all(kind.is_view for kind in self._kinds)
        names = names_of(kinds)
        self.names = names if len(names) > len(kinds) else ()

    def sizes(self, index: NDArray[np.int64]) -> list[int]:
        """Return, per column, the number of rows of a batch in the slot's arrays."""
        totals: dict[SpanRows, int] = {}
        for one in self._rows:
            if isinstance(one, SpanRows) and one not in totals:
                totals[one] = one.total(index)
        return [totals[one] if isinstance(one, SpanRows) else index.size for one in self._rows]

    def views(
        self, memory: SlotMemory, offsets: Mapping[int, NDArray[np.int64]]
    ) -> tuple[tuple[Any, ...], ...] | None:
        """Return `FieldKind.views` of all fields; None if one has none, or has `further` arrays.

        `offsets` are those of ragged fields, by the number of their first column.
        """
        pairs = zip(self._kinds, self._columns, strict=True)
        found = [kind.views(memory.out[own], offsets.get(own.start)) for kind, own in pairs]
        are_all = all(views is not None for views in found) and not self.names
        return tuple(filter(None, found)) if are_all else None

    def arrays(
        self,
        memory: SlotMemory,
        index: NDArray[np.int64],
        left: Collection[str] = (),
        *,
        are_checked: bool = False,
    ) -> tuple[Any, ...]:
        """Return the arrays of a batch, of fields and then further ones; views if possible.

        Fields in `left` are padded, or made dense, by a device. `are_checked`: the core has read
        the whole batch, and has checked indices that have a limit. DatasetError if an index of a
        sparse row is not a column, or a code is not a category.
        """
        if self.is_plain:
            return tuple([out[: index.size] for out in memory.out])
        found, further = [], []
        for number, (kind, own) in enumerate(zip(self._kinds, self._columns, strict=True)):
            is_left = kind.name in left
            made = memory.made[number] if memory.made and not is_left else None
            columns, rows = memory.out[own], self._rows[own.start]
            filled = Filled(columns, rows, index, made, is_left, are_checked, self._first_samples)
            delivered = kind.deliver(filled)
            if kind.further:
                delivered, *others = delivered
                further += others
            found.append(delivered)
        return (*found, *further)
