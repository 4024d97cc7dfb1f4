"""Defines the kinds of fields whose samples differ in length, also encoded ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, RaggedField
from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.index.savedindex import Wanted
from h5async.order.spans import SpanRows
from h5async.plan.transform import RowTransform
from h5async.samples.fieldkind import HEAP, Fact, FieldKind, Filled, Mask, Outline, Rows
from h5async.samples.ragged import Ragged, put_padded

Empty = Callable[[int], NDArray[np.uint8]]  # returns new memory
DecodingWork = Callable[[], bool]  # decodes a sample; returns False if it was broken and replaced


class RaggedKind(FieldKind):
    """Samples of any length: elements of variable length, or flat values with offsets."""

    of: ClassVar[type[Field]] = RaggedField
    found_as = HEAP
    is_ragged = True
    field: RaggedField

    def facts(self) -> dict[str, Fact]:
        """Return the elements of variable length, or the values and their offsets."""
        offsets, kind = self.field.offsets, HEAP
        if offsets is not None:
            kind = f"{self.field.offsets_kind} {Wanted.at(offsets).path}"
        return {self.name: Fact(self.field.path, kind)}

    def outline(
        self,
        columns: tuple[int, ...],
        transforms: Sequence[RowTransform],
        can_transform: Callable[[RowTransform], bool] | None,
    ) -> Outline:
        """Return how the field is assembled."""
        outline = super().outline(columns, transforms, can_transform)
        if self.field.pad_to is None:
            return outline
        made = (self.field.pad_to, *transforms[0].row), transforms[0].dtype
        return outline._replace(made=made, is_left=can_transform is not None)

    @property
    def is_plain(self) -> bool:
        """False: samples differ in length."""
        return False

    @property
    def needs_work(self) -> bool:
        """Whether samples are padded."""
        return self.field.pad_to is not None

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

    @property
    def columns(self) -> dict[str, Field]:
        """The bytes; the other options concern what is decoded."""
        field = self.field
        encoded = RaggedField(
            path=field.path, offsets=field.offsets, offsets_kind=field.offsets_kind
        )
        return {self.name: encoded}

    def outline(
        self,
        columns: tuple[int, ...],
        transforms: Sequence[RowTransform],
        can_transform: Callable[[RowTransform], bool] | None,
    ) -> Outline:
        """Return how the field is assembled: on the host."""
        return Outline(self.name, columns, transforms[0].capacity is not None, is_encoded=True)

    @property
    def needs_work(self) -> bool:
        """True: samples are decoded."""
        return True

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return None: the number of bytes says little of what is delivered."""
        return None


class FieldDecoder(ABC):
    """Decodes the samples of one field. Safe to use from many threads.

    DatasetError if the dataset does not hold bytes.

    Parameters
    ----------
    what
        A sample, in messages.
    layout, rows
        Of the column of bytes.

    Attributes
    ----------
    is_random
        Whether random numbers are needed.
    """

    is_random = False

    def __init__(self, what: str, layout: DatasetLayout, rows: Rows) -> None:
        if layout.dtype.kind not in "iu" or layout.row_nbytes != 1:
            raise DatasetError(
                f'{layout.file}: dataset "{layout.path}": {what}s are bytes (uint8), found'
                f" {layout.dtype}{list(layout.row_shape) or ''}; give the dataset of encoded"
                f" {what}s"
            )
        self._what = what
        self._layout = layout
        self._spans = rows
        counts = [count for _, count in layout.file_samples]
        self._ends = np.cumsum(counts or [layout.sample_count])

    def sized_nbytes(self, rows: int) -> int:
        """Return the bytes of `rows` decoded samples; 0 if they are of any size."""
        return 0

    @abstractmethod
    def begin(
        self,
        encoded: Ragged,
        index: NDArray[np.int64],
        numbers: NDArray[np.float64] | None,
        empty: Empty,
        most_nbytes: int,
    ) -> tuple[Any, list[DecodingWork]]:
        """Return what is delivered of a batch, and the work that fills it.

        Parameters
        ----------
        encoded
            The bytes of samples; if these consist of steps, those of the batch's runs.
        index
            int64 (n,): sample numbers.
        numbers
            Their random numbers (`plan/crops.py`), if needed.
        empty
            Returns memory.
        most_nbytes
            The limit for what is decoded.

        Raises
        ------
        ReadError
            If a sample is broken, or they take too much memory.
        """

    def _where(self, sample: int) -> str:
        layout, number = self._layout, int(np.searchsorted(self._ends, sample, side="right"))
        if layout.sequences is not None and layout.heaps:  # each of a dataset of its own
            heap = [one for one in layout.heaps if one.first_sample <= sample][-1]
            element = sample - heap.first_sample
            return f"{heap.elements.where}: the {self._what} of element {element} (sample {sample})"
        file = layout.file_samples[number][0] if layout.file_samples else layout.file
        first = int(self._ends[number - 1]) if number else 0
        among = f" (sample {sample - first} of this file)" if first else ""
        return f'{file}: dataset "{layout.path}": the {self._what} of sample {sample}{among}'
