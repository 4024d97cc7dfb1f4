"""Determines sequences, the samples of an epoch, and their weights; reads the data for these.

Options and layouts enter; `Chosen` leaves: a table of sequences, a selection, and its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h5async.config import Field, ReaderConfig, Sequences, Split
from h5async.config.files import FileName
from h5async.config.parts import Values
from h5async.config.values import slice_of
from h5async.errors import ConfigError, DatasetError, taking_memory
from h5async.index.layout import DatasetLayout
from h5async.index.links import files_of
from h5async.index.tables import Int64s
from h5async.io.stores import real_name
from h5async.opening.filevalues import FileValues, check_length
from h5async.order.rows import SequenceTable, StepRows
from h5async.order.sampling import DrawnOffsets
from h5async.order.selection import Selection, part_of
from h5async.read.executors import read_whole
from h5async.samples.fieldkind import are_same
from h5async.spelling import named

_LISTED_NBYTES = 8  # a number for each sample


class Chosen(NamedTuple):
    """The samples of an epoch.

    `weights` are those of the samples of `selection`, float64 (size,), or None. Steps never leave
    `sequences` of rows. `possible` are all rows that can be samples. `offsets` shift the selected
    ones in each epoch, unless None.
    """

    selection: Selection
    weights: NDArray[np.float64] | None
    sequences: SequenceTable
    possible: Selection
    offsets: DrawnOffsets | None

    def is_same(self, other: Chosen) -> bool:
        """Compare all samples and weights."""
        return (
            are_same(self.weights, other.weights)
            and self.selection.digest() == other.selection.digest()
            and self.sequences.digest() == other.sequences.digest()
        )


def choose(config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> Chosen:
    """Determine the samples of an epoch, and read the data that options name for it.

    H5AsyncError if these are missing, cannot be read, or do not fit the dataset.
    """
    first = next(iter(layouts.values()))
    values = FileValues(config, first)
    sequences, _ = sequences_of(config, layouts, values)
    has_steps = any(field.steps is not None for field in config.batch_fields.values())
    is_cut = sequences.starts.size > 1 and (has_steps or config.sequences is not None)
    if is_cut or config.weights is not None or isinstance(config.indices, Split):
        what = f"{first.file}: the lists of its {first.sample_count:,} samples"
        nbytes = _LISTED_NBYTES * first.sample_count
        values.reach.room.take(nbytes, what, files_of(*layouts.values()))
    steps = [
        rows for rows in step_rows(config.batch_fields, sequences).values() if rows is not None
    ]
    chosen, offsets = _chosen(config, sequences, steps)
    possible = chosen if offsets is None else sequences.samples(steps)
    selecting = _Selecting(config, layouts, values, sequences, chosen)
    selection = selecting.selection()
    if config.shuffle == "window":
        selection = selection.ascending
    return Chosen(selection, selecting.weights(selection), sequences, possible, offsets)


def _chosen(
    config: ReaderConfig, sequences: SequenceTable, steps: list[StepRows]
) -> tuple[Selection, DrawnOffsets | None]:
    """Return the samples of all sequences, and their shifts in each epoch, if any."""
    options = config.sequences
    if options is None:
        return sequences.samples(steps), None
    if options.offset != "random":
        return sequences.samples(steps, options.every, options.offset), None
    first, behind = sequences.possible(steps)
    offsets = DrawnOffsets(sequences.starts, first, behind - first, options.every, config.seed)
    return sequences.samples(steps, options.every, first % options.every), offsets


def step_rows(fields: Mapping[str, Field], sequences: SequenceTable) -> dict[str, StepRows | None]:
    """Return, per field, the rows of each sample; None means its own row."""
    return sequences.step_rows(
        {
            name: None if field.steps is None else (field.steps, field.pad)
            for name, field in fields.items()
        }
    )


def sequences_of(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], values: FileValues
) -> tuple[SequenceTable, list[int]]:
    """Return the sequences of a dataset, and their number in each file, unless layouts have them.

    Each file is one unless the options say otherwise.
    """
    if values.first.sequences is not None:
        return _of_layouts(layouts), []
    sequences = config.sequences
    kind = None if sequences is None else sequences.kind
    counts = [count for _, count in values.files()]
    if sequences is None or kind is None:
        ends = [sum(counts)] if sequences is not None and sequences.across else np.cumsum(counts)
        bounds = np.array([0, *ends], np.int64)
        return SequenceTable.joined([bounds]), [1] * len(counts)
    found, begin = [], 0
    for file, count in values.files():
        found.append(_bounds(sequences, kind, values, file, count) + begin)
        begin += count
    return SequenceTable.joined(found), [max(0, bounds.size - 1) for bounds in found]


def _of_layouts(layouts: Mapping[str, DatasetLayout]) -> SequenceTable:
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
    option, end = named("sequences"), [count] if count else []
    if kind == "last":
        is_last = np.zeros(1, np.bool_)  # until an array is read, whose size is checked first
        for path in sequences.last or ():
            array = values.of_file(option, file, path, count)
            if array.dtype.kind not in "biu":
                raise DatasetError(
                    f'{file}: {option}: dataset "{path}" must hold bools, or integers,'
                    f" found {array.dtype}"
                )
            is_last = np.logical_or(is_last, array)
        ends = np.flatnonzero(is_last[:-1]) + 1
        return np.concatenate(([0], ends, end)).astype(np.int64)
    path = getattr(sequences, kind)
    if kind == "ids":
        ids = values.of_file(option, file, path, count)
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        return np.concatenate(([0], changes, end)).astype(np.int64)
    array, where = values.read(option, file, path, count), f'{file}: {option}: dataset "{path}"'
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


class _Selecting:
    """Reads the data that the options `indices` and `weights` name; raises like `choose`.

    `sequences` and `possible` are as in `Chosen`.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        values: FileValues,
        sequences: SequenceTable,
        possible: Selection,
    ) -> None:
        self._config = config
        self._in_files = values
        self._sequences = sequences
        self._possible = possible
        self._layouts = layouts
        self._file, self._num_samples = values.first.file, values.first.sample_count

    def selection(self) -> Selection:
        indices = self._config.indices
        if indices is None:
            return self._possible
        with taking_memory(f"{self._file}: {named('indices')}", "select fewer, or use a slice"):
            if isinstance(indices, Split):
                return Selection.of_numbers(self._part(indices))
            return self._selected(indices).within(self._possible, self._num_samples)

    def _selected(self, indices: Any) -> Selection:
        if isinstance(indices, range):
            if indices:
                self._check(named("indices"), indices[0], indices[-1])
            return Selection.of_range(indices)
        if isinstance(indices, Values):
            return self._of_array(named("indices"), indices.array)
        selected = slice_of(indices)
        if selected is not None:
            try:
                return Selection.of_range(range(self._num_samples)[selected])
            except ValueError as error:
                raise ConfigError(f"{named('indices')}: {error}, found {indices!r}") from error
        if indices.endswith(".npy"):
            return self._of_array(indices, _load(Path(indices)))
        return self._of_dataset(indices)

    def _of_array(self, name: str, array: NDArray[Any]) -> Selection:
        if array.dtype.kind == "b":
            if array.size != self._num_samples:
                raise ConfigError(
                    f"{name}: a mask must have a value for each of the {self._num_samples:,}"
                    f" samples of the dataset, and has {array.size:,}"
                )
            return Selection.of_numbers(np.flatnonzero(array))
        if array.dtype.kind not in "iu":
            raise ConfigError(f"{name}: must be integers or bools, found {array.dtype}")
        if array.size:
            self._check(name, int(array.min()), int(array.max()))
        return Selection.of_numbers(array.astype(np.int64, copy=False))

    def _check(self, name: str, *samples: int) -> None:
        for sample in samples:
            if not 0 <= sample < self._num_samples:
                raise ConfigError(
                    f"{name}: there is no sample {sample}: {self._file} has samples 0 to"
                    f" {self._num_samples - 1}"
                )

    def _of_dataset(self, path: str) -> Selection:
        """Return the selection in a dataset of the files: bools, or numbers within each file."""
        found, first = [], 0
        for file, count in self._in_files.files():
            array = self._in_files.read(named("indices"), file, path, count)
            if array.dtype.kind == "b":
                check_length(array, file, path, count)
            if array.dtype.kind not in "biu":
                raise DatasetError(
                    f'{file}: dataset "{path}" must hold integers or bools, found {array.dtype}'
                )
            if array.dtype.kind == "b":
                array = np.flatnonzero(array)
            elif array.size == count > 2 and array.min() >= 0 and array.max() <= 1:
                raise DatasetError(
                    f'{file}: dataset "{path}" holds {array.dtype} zeros and ones, one for each'
                    " sample, which would be read as sample numbers; store a mask as bools"
                )
            elif array.size and not 0 <= array.min() <= array.max() < count:
                raise DatasetError(
                    f'{file}: dataset "{path}" selects samples {array.min()} to {array.max()}, and'
                    f" the file has {count:,}"
                )
            found.append(array.astype(np.int64) + first)
            first += count
        return Selection.of_numbers(np.concatenate(found))

    def _part(self, split: Split) -> Int64s:
        names = sorted(split.parts)  # whatever order is given
        shares, number = [split.parts[name] for name in names], names.index(split.name)
        possible = self._possible
        samples = possible.samples(np.arange(possible.size))
        groups = self._values_at(split.by, samples)
        classes = self._values_at(split.stratify, samples)
        try:
            found = part_of(number, shares, possible.size, split.seed, groups, classes)
        except TypeError as error:  # NumPy cannot sort them
            raise DatasetError(
                f"{self._file}: {named('indices')}: the values of"
                f" {split.by or split.stratify} have no"
                f" order ({error}); choose a dataset of numbers or strings"
            ) from error
        return samples[found]

    def _values_at(self, path: str | None, samples: Int64s) -> NDArray[Any] | None:
        """Return a dataset's values for some samples, or the numbers of their sequences."""
        if path is None:
            return None
        if path == "sequence":
            return self._sequences.numbers(samples)
        return self._classes(named("indices"), path)[samples]

    def weights(self, selection: Selection) -> NDArray[np.float64] | None:
        """Return the weight of each position of a selection; None if there are no weights."""
        weights = self._config.weights
        if weights is None or not selection.size:
            return None
        with taking_memory(f"{self._file}: {named('weights')}", "select fewer samples"):
            samples = selection.samples(np.arange(selection.size))
            if isinstance(weights, Mapping):
                found = self._of_files(weights, samples)
            elif isinstance(weights, str) and weights.partition(":")[0] == "balanced":
                labels = self._classes(named("weights"), weights.partition(":")[2])[samples]
                _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
                found = 1 / counts[numbers.reshape(-1)]
            else:
                found = self._of_samples(weights)[samples]
        is_good = np.isfinite(found) & (found >= 0)
        if not is_good.all():
            first = int(np.argmin(is_good))
            raise ConfigError(
                f"{named('weights')}: must be finite, and not below 0; found {found[first]} for"
                f" sample {samples[first]}"
            )
        if not found.any():
            raise ConfigError(
                f"{named('weights')}: must not all be 0, and all {found.size:,} samples that are"
                " selected have weight 0"
            )
        return found.astype(np.float64)

    def _of_samples(self, weights: str | Values) -> NDArray[Any]:
        if isinstance(weights, str):
            found = self._in_files.of_samples(named("weights"), weights)
        else:
            found = weights.array
        if found.size != self._num_samples or found.dtype.kind not in "biuf":
            where = f' in "{weights}"' if isinstance(weights, str) else ""
            kind = "strings" if found.dtype.kind in "OSU" else f"values of {found.dtype}"
            raise ConfigError(
                f"{named('weights')}: must be a number for each of the {self._num_samples:,}"
                f" samples of the dataset, found {found.size:,} {kind}{where}"
            )
        return found

    def _of_files(self, weights: Mapping[str, float], samples: Int64s) -> NDArray[np.float64]:
        """Return weights such that each file is drawn from in proportion to its own weight."""
        given = {real_name(file): weight for file, weight in weights.items()}
        numbers = {file: number for number, file in enumerate(given)}
        several = self._in_files.files()
        files = [real_name(file) for file, _ in several]
        for file in files:
            if file not in numbers:
                raise ConfigError(f"{named('weights')}: no weight is given for {file}")
        read = set(files)
        left_out = [file for file in given if file not in read]
        if left_out:
            raise ConfigError(f"{named('weights')}: {left_out[0]} is not one of the files")
        which = np.array([numbers[file] for file in files])  # one file may come twice
        ends = np.cumsum([count for _, count in several])
        chosen = which[np.searchsorted(ends, samples, side="right")]
        counts = np.bincount(chosen, minlength=len(given))
        each = np.array(list(given.values()), np.float64) / np.maximum(counts, 1)
        return np.asarray(each[chosen])

    def _classes(self, option: str, name: str) -> NDArray[Any]:
        """Return a value per sample of the dataset, equal for samples of one class.

        `name` is that of a field, or the path of a dataset; by default, of the field of labels.
        """
        found = name or "labels"
        if found not in self._layouts:
            if name:
                return self._in_files.classes(option, name)
            raise ConfigError(
                f'{named("weights", "balanced")} needs labels: name one of the fields "labels", or'
                f" write {named('weights', 'balanced:NAME')} with the name of another one, or the"
                " path of a dataset; or give weights as an array"
            )
        values, field = self._in_files, self._config.batch_fields[found]
        column = field.path.removesuffix("/codes")
        if field.categories is None and len(values.files()) > 1 and values.is_categorical(column):
            return values.classes(option, column)  # codes differ from file to file
        layout = self._layouts[found]
        if layout.heaps and any(heap.elements.form.is_text for heap in layout.heaps):
            return values.of_samples(option, column)
        if layout.is_ragged or math.prod(layout.row_shape) != 1:
            of_one = "differing numbers" if layout.is_ragged else f"{math.prod(layout.row_shape):,}"
            raise ConfigError(
                f"{option} needs one value for each sample, and {found!r} has {of_one} of them;"
                ' name another field or dataset, or a column of one, as in "table[:, 0]", or give'
                " an array"
            )
        return read_whole(layout, values.reach).reshape(-1)


def sample_numbers(index: ArrayLike, count: int, where: str) -> Int64s:
    """Return sample numbers given by a caller, below `count`, as a new array.

    ConfigError if they are anything else; the message begins with `where`.
    """
    try:
        found = np.array(index)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: sample numbers must be a sequence of integers") from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"{where}: sample numbers must be a sequence of integers, found an array of"
            f" {found.dtype} of shape {found.shape}"
        )
    is_usual = found.dtype == np.int64
    unsigned = found.view(np.uint64) if is_usual else found.astype(np.uint64, copy=False)
    if found.size and unsigned.max() >= count:  # or below 0
        odd = found.min() if found.min() < 0 else found.max()
        raise ConfigError(f"{where} has samples 0 to {count - 1}, and there is no sample {odd}")
    return found.astype(np.int64, copy=False)


def _load(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"{named('indices')}: {path} cannot be read as a .npy file ({error})"
        ) from error
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        raise ConfigError(f"{named('indices')}: {path} must hold an array of one dimension")
    return found
