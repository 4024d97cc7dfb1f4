"""Defines the kinds of fields that are delivered as codes of categories.

They are categorical columns, whose categories may differ between files, and any other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig
from h5async.errors import ConfigError, DatasetError
from h5async.index.composition import widest_dtype
from h5async.index.groupfields import union_of
from h5async.index.layout import DatasetLayout, values_of
from h5async.index.links import Reach
from h5async.index.savedindex import Wanted
from h5async.read.executors import read_blocks, read_whole
from h5async.samples.fieldkind import (
    CATEGORIES,
    LABEL_NAMES,
    LABELS,
    Categories,
    FieldKind,
    Filled,
    Known,
    file_and_row,
    layout_of_values,
    texts_of,
)

CATEGORIES_OF = "\0categories"  # suffix of a field's name for this fact


class CodesKind(FieldKind):
    """The codes of a categorical column; `table_column` is its path."""

    categories: Categories = Categories(())

    def __init__(self, name: str, field: Field, table_column: str) -> None:
        super().__init__(name, field)
        self.table_column = table_column

    def facts(self) -> dict[str, Wanted]:
        """Return the categories."""
        return {self.name + CATEGORIES_OF: Wanted.at(self.table_column, kind=CATEGORIES)}

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layout of the codes; unite the categories of all files."""
        codes = {self.name: _of_one_dtype(known[self.name], reach)}
        joined = super().join(codes, config, reach)
        facts = known[self.name + CATEGORIES_OF]
        several = list(map(texts_of, facts))
        names, tables = union_of(several)
        if all(one == names for one in several):  # false for duplicate names, too
            self.categories = Categories(names)
            _require_codes(joined[self.name], len(names), reach)  # unmapped: checked only here
        else:
            where = tuple(f'{one.file}: column "{one.path}"' for one in facts)
            _check_mapping(self.name, self.field, config, where)
            self.categories = Categories(names, tuple(tables), where)
            self.is_mapped = self.needs_work = True
        return joined

    def deliver(self, filled: Filled) -> Any:
        """Return the codes in the united categories of all files."""
        tables, values = self.categories.tables, super().deliver(filled)
        if tables is None:
            return values
        least = np.min_scalar_type(-max(1, len(self.categories.names)))
        dtype = self.field.dtype
        found = np.empty(
            values.shape, np.promote_types(values.dtype, least) if dtype is None else dtype
        )
        file = filled.files(filled.samples)
        for number in np.unique(file).tolist():
            here, table = np.flatnonzero(file == number), tables[number]
            codes = values[here].astype(np.int64)
            outside = (codes < -1) | (codes >= table.size - 1)
            if outside.any():
                at = int(outside.argmax())
                sample = int(filled.samples[here[at]])
                row = sample - int(filled.first_samples[number])
                where = self.categories.where[number]
                raise _no_category(where, row, sample, int(codes[at]), table.size - 1)
            found[here] = table[codes]
        return found


def _no_category(where: str, row: int, sample: int, code: int, count: int) -> DatasetError:
    return DatasetError(
        f"{where}: row {row} (sample {sample}) has the code {code}, and there are {count:,}"
        " categories; the file is damaged"
    )


def _require_codes(codes: DatasetLayout, count: int, reach: Reach) -> None:
    """Raise DatasetError unless all codes of a column, across files, are from -1 to ``count - 1``.

    AnnData rejects such files, too. ReadError if codes cannot be read.
    """
    for first, block in read_blocks(codes, reach):
        outside = (block < -1) | (block >= count)
        if outside.any():
            at = int(outside.argmax())
            file, row = file_and_row(codes, first + at)
            where = f'{file}: column "{codes.path.removesuffix("/codes")}"'
            raise _no_category(where, row, first + at, int(block[at]), count)


def _of_one_dtype(layouts: Sequence[DatasetLayout], reach: Reach) -> list[DatasetLayout]:
    """Return the codes of several files in the widest of their dtypes.

    Codes of other dtypes are read here and kept: a few bytes per sample.
    """
    widest = widest_dtype(layouts)
    found = list(layouts)
    for number, one in enumerate(found):
        if widest is not None and one.dtype != widest:
            values = read_whole(one, reach).astype(widest)
            cast = layout_of_values(one.file, one.stamp, one.path, values)
            found[number] = cast.changed(stored_nbytes=one.stored_nbytes)
    return found


def _check_mapping(name: str, field: Field, config: ReaderConfig, where: Sequence[str]) -> None:
    for is_given, option in (
        (field.scale is not None, "scale"),
        (field.offset is not None, "offset"),
        (field.steps is not None, "steps"),
        (field.dtype is not None and field.dtype.kind != "i", f"dtype={field.dtype}"),
        (config.cache == "device", 'cache="device"'),
    ):
        if is_given:
            raise ConfigError(
                f"{where[0]} ({name}): categories differ between files, so that codes are mapped to"
                f" the categories of all files, for which {option} is not supported; leave it out"
            )


# --- values as codes ------------------------------------------------------------------------------


class LabelsKind(FieldKind):
    """Strings or numbers as codes of given names, of names in a dataset, or of all values."""

    categories: Categories = Categories(())

    def facts(self) -> dict[str, Wanted]:
        """Return each file's own categories, and the codes of these."""
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
            every = {one for each in several for one in each}
            names = tuple(sorted(every, key=lambda name: (isinstance(name, str), name)))
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
        """Map the codes of a file to the categories of all files; -2 in a table means none."""
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
    """Return each own category's position among names, or -2; and -1 at the end, for code -1."""
    position = {name: at for at, name in enumerate(names)}
    return np.array([*(position.get(name, -2) for name in own), -1], np.int64)
