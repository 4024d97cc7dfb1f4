"""Reads small datasets of the files: a value per sample, or a list of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import FileName, SourceName
from h5async.core.binding import mapping_mode
from h5async.errors import DatasetError
from h5async.index.groupfields import Column, category_names, column, union_of
from h5async.index.hdf5 import OtherKindError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, Room, open_index
from h5async.index.metadata import value_layout
from h5async.read.executors import read_whole
from h5async.spelling import name_text, named

_MOST_VALUES = 1 << 20  # of a dataset that is read whole, or a few per sample
_MOST_PER_SAMPLE = 16


class FileValues:
    """Reads small datasets that the files of a reader have beside its fields.

    `first` is the layout of the first field, which has the number of samples per file. The room
    of `reach` limits the memory for the sizes that files declare.
    """

    def __init__(self, config: ReaderConfig, first: DatasetLayout) -> None:
        self._config = config
        self.first = first
        self.reach = reach_of(config)

    def of_samples(self, option: str, path: str) -> NDArray[Any]:
        """Return a dataset's value per sample, across all files; errors name the option.

        Raises like `read`, or if a file has another number of values than samples.
        """
        several = [self.of_file(option, file, path, count) for file, count in self.files()]
        return np.concatenate(several)

    def classes(self, option: str, path: str) -> NDArray[Any]:
        """Return a value per sample, equal for samples of one class; raises like `of_samples`.

        For a categorical column these are codes in the united categories: codes of one file mean
        nothing in another one.
        """
        columns = [column_at(file, path, self.reach) for file, _ in self.files()]
        if all(one is None or one.mask is not None for one in columns):
            return self.of_samples(option, path)
        found, names = [], []
        for (file, count), one in zip(self.files(), columns, strict=True):
            if one is None or one.categories is None:
                raise DatasetError(
                    f'{option}: {file}: "{path}" must be a categorical column, as in other files,'
                    " or a dataset with a value for each sample"
                )
            codes = read_whole(one.values, self.reach).astype(np.int64)
            check_length(codes, file, path, count)
            categories = categories_of(one, self.reach)
            if codes.size and not -1 <= codes.min() <= codes.max() < len(categories):
                raise DatasetError(
                    f"{one.where} has codes from {codes.min()} to {codes.max()}, and there are"
                    f" {len(categories):,} categories; the file is damaged"
                )
            found.append(codes)
            names.append(category_names(categories))
        _, tables = union_of(names)
        return np.concatenate([table[codes] for table, codes in zip(tables, found, strict=True)])

    def is_categorical(self, path: str) -> bool:
        """Return whether a path leads to a categorical column in the first file."""
        one = column_at(self.files()[0][0], path, self.reach)
        return one is not None and one.categories is not None

    def of_file(self, option: str, file: FileName, path: str, count: int) -> NDArray[Any]:
        """Return a dataset's value per sample of one file; raises like `of_samples`."""
        array = self.read(option, file, path, count)
        check_length(array, file, path, count)
        return array

    def read(self, option: str, file: FileName, path: str, count: int) -> NDArray[Any]:
        """Return all values of a dataset of one file, which has `count` samples.

        H5AsyncError if it is missing, has too many values or dimensions, or cannot be read.
        """
        most = max(_MOST_VALUES, _MOST_PER_SAMPLE * count)
        try:
            return small_values(file, path, most, self.reach)
        except OtherKindError as error:
            of_table = column_at(file, path, self.reach)
            if of_table is None:
                raise DatasetError(f"{option}: {error.marked}") from error
            if of_table.values.num_samples > most:
                raise DatasetError(
                    f"{option}: {of_table.where} has more rows than there are samples"
                ) from error
            return self._of_column(option, of_table, path)
        except DatasetError as error:
            raise DatasetError(f"{option}: {error.marked}") from error

    def _of_column(self, option: str, of_table: Column, path: str) -> NDArray[Any]:
        """Return the values of a column of integers or bools without missing values."""
        if of_table.mask is None:
            raise DatasetError(
                f'{option}: {of_table.where} is categorical; give "{path}/codes" to have its codes'
            )
        missing = read_whole(of_table.mask, self.reach)
        if missing.any():
            raise DatasetError(
                f"{option}: {of_table.where} has no value in row {missing.argmax()}"
                f' ({np.count_nonzero(missing):,} in all); give "{path}/values" to take what is'
                " stored there in its place"
            )
        return read_whole(of_table.values, self.reach)

    def files(self) -> Sequence[tuple[FileName, int]]:
        """Return the files, and the number of samples in each."""
        first = self.first
        several = first.file_samples or ((first.file, first.sample_count),)
        if self._config.names_index:
            return several
        counts = [count for _, count in several]
        return list(zip(self._config.files, counts, strict=True))


def reach_of(config: ReaderConfig) -> Reach:
    """Return which files the options permit, and how they are read."""
    mode = mapping_mode(config.io)
    room = Room(config.max_batch_bytes)
    named = partial(SourceName, options=config.storage_options, kept=config.kept)
    return Reach(config.allow_external, config.allow_missing, mode, room, named=named)


def read_names(reach: Reach, file: FileName, path: str) -> list[str]:
    """Return the names in a dataset of strings; H5AsyncError if it cannot be read as such."""
    try:
        array = small_values(file, path, _MOST_VALUES, reach)
    except DatasetError as error:
        raise DatasetError(f"{named('sequences')}: only: {error.marked}") from error
    names = [str(name_text(name)) for name in array.tolist() if isinstance(name, bytes | str)]
    if len(names) < array.size:
        raise DatasetError(
            f'{file}: {named("sequences")}: only: dataset "{path}" must hold names of groups, found'
            f" {array.dtype}"
        )
    return names


def check_length(array: NDArray[Any], file: FileName, path: str, count: int) -> None:
    """Check that a dataset has a value per sample of a file; DatasetError if not."""
    if array.size != count:
        raise DatasetError(
            f'{file}: dataset "{path}" must have a value for each of the {count:,} samples of the'
            f" file, and has {array.size:,}"
        )


def small_values(file: FileName, path: str, most: int, reach: Reach) -> NDArray[Any]:
    """Return all values of a dataset, `most` at most; raises like `value_layout`."""
    found = value_layout(file, path, most, reach)
    return found if isinstance(found, np.ndarray) else read_whole(found, reach)


def column_at(file: FileName, path: str, reach: Reach) -> Column | None:
    """Return the categorical or nullable column of a table at a path of a file, or None."""
    with open_index(file) as opened:
        return column(opened, path, reach)


def categories_of(of_table: Column, reach: Reach) -> NDArray[Any]:
    """Return what the codes of a categorical column stand for."""
    values = of_table.categories
    assert values is not None
    return read_whole(values, reach) if isinstance(values, DatasetLayout) else values
