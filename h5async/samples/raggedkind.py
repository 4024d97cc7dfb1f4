"""Defines the kinds of fields whose samples differ in length, also encoded ones."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, RaggedField
from h5async.index.savedindex import Wanted
from h5async.order.rows import SpanRows
from h5async.samples.fieldkind import (
    HEAP,
    CanTransform,
    Fact,
    FieldKind,
    Filled,
    Mask,
    Outline,
    Rows,
    Transforms,
)
from h5async.samples.ragged import Ragged, put_padded


class RaggedKind(FieldKind):
    """Samples of any length: elements of variable length, or flat values with offsets."""

    of: ClassVar[type[Field]] = RaggedField
    found_as = HEAP
    is_ragged = True
    field: RaggedField

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.needs_work = self.field.pad_to is not None

    def facts(self) -> dict[str, Fact]:
        """Return the elements of variable length, or the values and their offsets."""
        offsets, kind = self.field.offsets, HEAP
        if offsets is not None:
            kind = f"{self.field.offsets_kind} {Wanted.at(offsets).path}"
        return {self.name: Fact(self.field.path, kind)}

    def outline(
        self, columns: tuple[int, ...], transforms: Transforms, can_transform: CanTransform
    ) -> Outline:
        """Return how the field is assembled."""
        outline = super().outline(columns, transforms, can_transform)
        if self.field.pad_to is None:
            return outline
        made = (self.field.pad_to, *transforms[0].row), transforms[0].dtype
        return outline._replace(made=made, is_left=can_transform is not None)

    def deliver(self, filled: Filled) -> Any:
        """Return `Ragged`, or an array of padded samples."""
        assert isinstance(filled.rows, SpanRows)
        offsets = filled.rows.offsets(filled.samples)
        values = filled.columns[0][: offsets[-1]]
        if self.field.pad_to is None or filled.is_left:
            return Ragged(values, offsets)
        size = filled.samples.size
        shape = size, self.field.pad_to, *values.shape[1:]
        found = np.empty(shape, values.dtype) if filled.made is None else filled.made[:size]
        found[...] = np.zeros((), values.dtype)
        put_padded(values, offsets, found)
        return found

    def masks(self, rows: Rows) -> dict[str, Mask]:
        """Return what makes the mask of padded samples."""
        if self.field.pad_to is None or not isinstance(rows, SpanRows):
            return super().masks(rows)
        return {f"{self.name}_mask": partial(rows.are_there, self.field.pad_to)}

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return the lengths of samples, or their padded length."""
        return rows.all_lengths() if self.field.pad_to is None else self.field.pad_to


class EncodedKind(RaggedKind):
    """Samples that are bytes of an encoding, such as JPEG; the base of such kinds."""

    found_as = ""

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.needs_work = True

    @property
    def columns(self) -> dict[str, Field]:
        """The bytes; the other options concern what is decoded."""
        field = self.field
        encoded = RaggedField(
            path=field.path, offsets=field.offsets, offsets_kind=field.offsets_kind
        )
        return {self.name: encoded}

    def outline(
        self, columns: tuple[int, ...], transforms: Transforms, can_transform: CanTransform
    ) -> Outline:
        """Return how the field is assembled: on the host."""
        return Outline(self.name, columns, transforms[0].capacity is not None, is_encoded=True)

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return None: the number of bytes says little of what is delivered."""
        return None
