"""Defines the kind of fields whose values are delivered as codes of their categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig
from h5async.errors import DatasetError
from h5async.index.groupfields import union_of
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.savedindex import Wanted
from h5async.samples.codeskind import CATEGORIES_OF
from h5async.samples.fieldkind import (
    LABEL_NAMES,
    LABELS,
    Categories,
    FieldKind,
    Known,
    texts_of,
    values_of,
)


class LabelsKind(FieldKind):
    """Strings or numbers as codes: of the names given, of those in a dataset, or of all values."""

    categories: Categories

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.categories = Categories(())

    def facts(self) -> dict[str, Wanted]:
        """Return the codes of each file's own categories, and these."""
        names = self.field.categories
        at = f" {Wanted.at(names).path}" if isinstance(names, str) else ""
        return {
            self.name: Wanted.at(self.field.path, kind=LABELS + at),
            self.name + CATEGORIES_OF: Wanted.at(self.field.path, kind=LABEL_NAMES + at),
        }

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layout of the codes in the categories of all files.

        DatasetError if a value is not among the names given.
        """
        several = list(map(texts_of, known[self.name + CATEGORIES_OF]))
        given = self.field.categories
        if given is True:
            names: tuple[Any, ...] = _in_order({one for each in several for one in each})
            tables = [_numbers(names, each) for each in several]
        elif isinstance(given, str):
            names, tables = union_of(several)
        else:
            names, tables = tuple(given or ()), [_numbers(given or (), each) for each in several]
        self.categories = Categories(names)
        codes = []
        for layout, table, own in zip(known[self.name], tables, several, strict=True):
            codes.append(self._mapped(layout, table, own))
        return super().join({self.name: codes}, config, reach)

    def _mapped(
        self, layout: DatasetLayout, table: NDArray[np.int64], own: Sequence[Any]
    ) -> DatasetLayout:
        """Return the codes of one file in the categories of all; -2 in a table means none."""
        codes, where = values_of(layout), f'{layout.file}: dataset "{layout.path}" ({self.name})'
        if codes.size and not -1 <= codes.min() <= codes.max() < len(own):
            raise DatasetError(
                f"{where}: the saved index has codes from {codes.min()} to {codes.max()} of"
                f" {len(own):,} categories; make it again"
            )
        found = table[codes]
        if (found == -2).any():
            at = int((found == -2).argmax())
            raise DatasetError(
                f"{where}: sample {at} is {own[int(codes[at])]!r}, which is not among the"
                " categories; add it, or set categories=True"
            )
        dtype = np.min_scalar_type(-max(1, len(self.categories.names)))
        return layout.changed(values=found.astype(dtype), dtype=dtype, fill=np.zeros((), dtype))


def _numbers(names: Sequence[Any], own: Sequence[Any]) -> NDArray[np.int64]:
    """Return, per own category, its position among names, or -2; and -1, for the code -1."""
    position = {name: at for at, name in enumerate(names)}
    return np.array([*(position.get(name, -2) for name in own), -1], np.int64)


def _in_order(names: set[Any]) -> tuple[Any, ...]:
    return tuple(sorted(names, key=lambda name: (isinstance(name, str), name)))
