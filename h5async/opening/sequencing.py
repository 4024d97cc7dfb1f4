"""Determines the bounds of sequences: reads the data that the option `sequences` names.

Options and layouts enter; a `SequenceTable` leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig, Sequences
from h5async.config.files import FileName
from h5async.errors import DatasetError
from h5async.index.layout import DatasetLayout
from h5async.opening.filevalues import FileValues, check_length
from h5async.order.sequences import SequenceTable
from h5async.spelling import named

Int64s = NDArray[np.int64]


def sequences_of(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], values: FileValues
) -> SequenceTable:
    """Return the sequences of a dataset: each file is one unless the options say otherwise.

    Parameters
    ----------
    config, layouts
        The options, and the layout of each field.
    values
        Reads the datasets that the options name.

    Raises
    ------
    DatasetError
        If such a dataset does not fit the number of samples.
    H5AsyncError
        If it is missing, or cannot be read.
    """
    first = next(iter(layouts.values()))
    if first.sequences is not None:
        return _of_layouts(layouts)
    sequences = config.sequences
    kind = None if sequences is None else sequences.kind
    if sequences is None or kind is None:
        counts = [count for _, count in first.file_samples] or [first.sample_count]
        return SequenceTable.joined([np.cumsum([0, *counts], dtype=np.int64)])
    bounds, begin = [], 0
    for file, count in values.files():
        bounds.append(_bounds(sequences, kind, values, file, count) + begin)
        begin += count
    return SequenceTable.joined(bounds)


def _of_layouts(layouts: Mapping[str, DatasetLayout]) -> SequenceTable:
    """Return the sequences that the layouts consist of: groups, or rows of two dimensions."""
    lengths, room = {}, None
    for name, layout in layouts.items():
        assert layout.sequences is not None
        room = layout.sequences.room
        if not np.array_equal(layout.sequences.held, room):
            lengths[name] = layout.sequences.held
    assert room is not None
    ends = np.cumsum(room, dtype=np.int64)
    return SequenceTable(ends - room, ends, lengths)


def _bounds(
    sequences: Sequences, kind: str, values: FileValues, file: FileName, count: int
) -> Int64s:
    """Return where the sequences of one file begin, and where the last one ends: int64 (n + 1,)."""
    if kind == "last":
        paths = sequences.last or ()
        several = [_of_rows(values, file, path, count) for path in paths]
        for path, array in zip(paths, several, strict=True):
            if array.dtype.kind not in "biu":
                raise DatasetError(
                    f'{file}: {named("sequences")}: dataset "{path}" must hold bools, or integers,'
                    f" found {array.dtype}"
                )
        is_last = np.any([array.astype(np.bool_) for array in several], axis=0)
        ends = np.flatnonzero(is_last) + 1
        behind = [count] if count and (not ends.size or ends[-1] < count) else []
        return np.concatenate(([0], ends, behind)).astype(np.int64)
    path = getattr(sequences, kind)
    if kind == "ids":
        ids = _of_rows(values, file, path, count)
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        return np.concatenate(([0], changes, [count] if count else [])).astype(np.int64)
    array = values.read(named("sequences"), file, path, count)
    where = f'{file}: {named("sequences")}: dataset "{path}"'
    if array.dtype.kind not in "iu":
        raise DatasetError(f"{where} must hold integers, found {array.dtype}")
    numbers = array.astype(np.int64)
    if kind == "lengths":
        if numbers.size and numbers.min() < 0:
            raise DatasetError(f"{where} has a length below 0: {numbers.min()}")
        numbers = np.cumsum(np.concatenate(([0], numbers)), dtype=np.int64)
    else:
        before, behind = ([0], []) if kind == "ends" else ([], [count])
        numbers = np.concatenate((before, numbers, behind)).astype(np.int64)
    _check_bounds(numbers, count, where)
    return numbers


def _of_rows(values: FileValues, file: FileName, path: str, count: int) -> NDArray[Any]:
    array = values.read(named("sequences"), file, path, count)
    check_length(array, file, path, count)
    return array


def _check_bounds(bounds: Int64s, count: int, where: str) -> None:
    odd = np.flatnonzero((bounds < 0) | (bounds > count))
    if odd.size:
        raise DatasetError(
            f"{where} says that a sequence begins or ends at row {bounds[odd[0]]}, and the file has"
            f" {count:,} rows"
        )
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if falls.size:
        at = int(falls[0])
        raise DatasetError(
            f"{where} must ascend, and row {bounds[at]} comes before row {bounds[at + 1]}"
        )
