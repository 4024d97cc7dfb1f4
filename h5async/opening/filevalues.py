"""Reads small datasets of files: a value per sample, a list of numbers, offsets of samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import FileName, SourceName
from h5async.core.binding import NOWHERE, load_core, mapping_mode
from h5async.errors import DatasetError, failed_read
from h5async.index.alikefiles import Alike
from h5async.index.composition import with_lengths
from h5async.index.contents import Grouping
from h5async.index.datasettable import table_of
from h5async.index.groupfields import (
    Column,
    SparseGroup,
    category_names,
    column,
    row_offsets,
    sparse_group,
    union_of,
)
from h5async.index.hdf5 import OtherKindError
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.links import Reach, Room, files_of, open_index
from h5async.index.metadata import indexer_at, references, value_layout
from h5async.index.storedtypes import Sequences, VariableLength
from h5async.index.tables import Int64s
from h5async.io.source import FileStamp
from h5async.read.executors import read_blocks, read_whole
from h5async.spelling import name_text, named

_MOST_VALUES = 1 << 20  # of a dataset that is read whole, or a few per sample
_MOST_PER_SAMPLE = 16


class FileValues:
    """Reads small datasets that the files of a reader have beside its fields.

    `first` is the layout of the first field, which has the number of samples per file. The room
    of `reach` limits the memory for sizes that files declare.
    """

    def __init__(self, config: ReaderConfig, first: DatasetLayout) -> None:
        self._config = config
        self.first = first
        self.reach = reach_of(config)

    def of_samples(self, option: str, path: str) -> NDArray[Any]:
        """Return a dataset's values, one per sample, across all files; errors name the option.

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
        """Return a dataset's values, one per sample of a file; raises like `of_samples`."""
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
    """Return the files that the options permit, and how to read them."""
    mode = mapping_mode(config.io)
    room = Room(config.max_batch_bytes)
    named = partial(SourceName, options=config.storage_options, kept=config.kept)
    allowed = config.allow_external, config.allow_missing
    return Reach(*allowed, mode, room, named=named, alike=Alike(len(config.files)))


def grouping_of(config: ReaderConfig, reach: Reach) -> Grouping | None:
    """Return the groups of the files that are sequences, or None."""
    sequences = config.sequences
    if sequences is None or sequences.groups is None:
        return None
    return Grouping(sequences.groups, sequences.only or "", partial(read_names, reach))


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
    """Return the categories of a categorical column."""
    values = of_table.categories
    assert values is not None
    return read_whole(values, reach) if isinstance(values, DatasetLayout) else values


_MOST_OFFSETS = 1 << 33  # or elements of variable length; read while a reader is created
_OBJECTS = 4096  # elements of variable length that h5py reads at a time
_RUN_NBYTES = 1024  # memory per run of samples whose values lie in one file
_MOST_OFFSET = (1 << 63) - 1


# --- the offsets of ragged and sparse samples -----------------------------------------------------


def heap_layout(at: str, path: FileName, reach: Reach) -> DatasetLayout:
    """Return the layout of the values of a variable-length dataset at a path of a file.

    DatasetError if there is none, it cannot be read, or it has too many elements; ReadError if an
    element cannot be as long as declared.
    """
    layout, forms = references(path, at, reach)
    where = f'{layout.file}: dataset "{layout.path}"'
    _require_few(layout.num_samples, where)
    core, heaps = load_core(), []
    if core is None:
        return _with_heaps(layout, [_elements_by_h5py(at, path, layout, forms[layout.file], reach)])
    read = read_blocks(layout, reach, may_use_h5py=False)
    begin, files = _files_of_samples(layout)
    reach.room.take(begin.size * _RUN_NBYTES, f"{where}: its runs of samples", files_of(layout))
    blocks = _cut(
        ((first, block.view(np.uint8).reshape(len(block), -1)) for first, block in read), begin
    )
    for run, pieces in itertools.groupby(blocks, key=itemgetter(0)):
        file, stamp = files[run]
        first, end = begin[run : run + 2].tolist()
        own = where if file == layout.file else f"{file}: values of {where}"
        own += f", from sample {first} on" if first else ""
        numbered = ((number - first, rows) for _, number, rows in pieces)
        elements = Sequences.decoded(end - first, numbered, forms[file], stamp.nbytes, own, core)
        heaps.append(HeapFile(file, stamp, first, elements))
    if not heaps:
        none = Sequences.decoded(0, (), forms[layout.file], layout.stamp.nbytes, where, core)
        heaps.append(HeapFile(layout.file, layout.stamp, 0, none))
    return _with_heaps(layout, heaps)


def _elements_by_h5py(
    at: str, path: FileName, layout: DatasetLayout, form: VariableLength, reach: Reach
) -> HeapFile:
    """Return the elements of a dataset that h5py reads; only their lengths are known."""
    where = f'{layout.file}: dataset "{layout.path}"'
    reach.room.take(layout.nbytes, f"{where}: its elements", files_of(layout))
    length = np.zeros(layout.num_samples, np.uint32)
    with open_index(path) as file, indexer_at(file, at, reach) as (_, _, node):
        dataset = h5py.Dataset(node)
        for first in range(0, length.size, _OBJECTS):
            try:
                objects = dataset[first : first + _OBJECTS]
            except OSError as error:
                raise failed_read(f"{where}: {error}", error, layout.file, layout.path) from error
            length[first : first + _OBJECTS] = [len(one) for one in objects]
    total = int(length.sum(dtype=np.int64))
    elements = Sequences(form, where, length, np.full(length.size, NOWHERE, np.int64), total)
    return HeapFile(layout.file, layout.stamp, 0, elements)


def _with_heaps(layout: DatasetLayout, heaps: Sequence[HeapFile]) -> DatasetLayout:
    """Return the layout of the values of elements, from that of their references."""
    dtype = heaps[0].elements.form.dtype
    base, inner = dtype.subdtype or (dtype, ())
    found = layout.without_place(
        "heap",
        shape=(sum(heap.elements.total for heap in heaps), *inner),
        dtype=base,
        fill=np.zeros((), base),
        indexed=None,
    )
    return with_lengths(found, np.concatenate([heap.elements.length for heap in heaps]), heaps)


def _cut(
    blocks: Iterable[tuple[int, NDArray[np.uint8]]], begin: Int64s
) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Cut blocks of samples where runs begin; yield run number, first sample, and piece."""
    for first, block in blocks:
        run, end = int(np.searchsorted(begin, first, side="right")) - 1, first + len(block)
        at = first
        while at < end:
            stop = min(end, int(begin[run + 1]))
            yield run, at, block[at - first : stop - first]
            at, run = stop, run + 1


def _files_of_samples(layout: DatasetLayout) -> tuple[Int64s, list[tuple[str, FileStamp]]]:
    """Return the runs of samples whose values lie in one file, that of their references.

    The array has the first sample of each run, and the number of samples; the list, a file per run.
    """
    segments, datasets = table_of(layout)
    files = [(layout.file, layout.stamp), *datasets.columns.files]
    # Rows of no dataset are the layout's own; its file may also be one of the datasets' files.
    numbers = {file: number for number, file in enumerate(files)}
    unique = np.array([numbers[file] for file in files], np.int32)
    number = np.full(layout.num_samples, unique[0])
    for dataset, _, here, _ in segments.find(np.arange(layout.num_samples)):
        number[here] = unique[1 + datasets.columns.file[dataset]]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(first, number.size), [files[one] for one in number[first].tolist()]


def with_spans(
    layout: DatasetLayout, kind: str, offsets: str, path: FileName, reach: Reach
) -> DatasetLayout:
    """Return the layout of flat values with the extent of each sample.

    `kind` is the `offsets_kind` of the field, and `offsets` the path of the dataset of offsets.
    H5AsyncError if that is missing, does not fit, or cannot be read.
    """
    where = f'{path}: dataset "{offsets}" (offsets of "{layout.path}")'
    found = value_layout(path, offsets, _MOST_OFFSETS, reach)
    if isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise DatasetError(f"{where} must hold integers, found {found.dtype}")
    spans = _spans(found, kind, where, reach)
    if spans[0] < 0 or spans[-1] > layout.num_samples:
        raise DatasetError(
            f"{where}: samples begin at value {spans[0]} and end at value {spans[-1]}, and there"
            f" are {layout.num_samples:,} values"
        )
    falls = np.flatnonzero(spans[1:] < spans[:-1])
    if falls.size:
        at = int(falls[0])
        raise DatasetError(
            f"{where}: sample {at} would begin at value {spans[at]} and end at value"
            f" {spans[at + 1]}; if it holds how many values each sample has, set"
            f" {named('offsets_kind', 'lengths')}"
        )
    if spans[0] and spans[-1] == layout.num_samples:
        # (Offsets of a slice, as in Arrow, may begin above 0, and then end before the last value.)
        raise DatasetError(
            f"{where} begins with {spans[0]} and ends with the last value, so that the values"
            f" before would be in no sample: it seems to hold where each sample ends; set"
            f" {named('offsets_kind', 'ends')} or, where these values are to be left out, store 0"
            f" in front of it, and leave out sample 0 by {named('indices', '1:')}"
        )
    return layout.changed(spans=spans)


def _require_few(count: int, where: str) -> None:
    """Refuse more elements than memory can hold: unallocated chunks may declare any number."""
    if count > _MOST_OFFSETS:
        raise DatasetError(f"{where} has {count:,} elements; at most {_MOST_OFFSETS:,} are allowed")


def _spans(offsets: DatasetLayout, kind: str, where: str, reach: Reach) -> Int64s:
    """Read where samples begin, block by block, because there may be very many."""
    count = offsets.num_samples
    _require_few(count, where)
    if kind == "offsets" and not count:
        raise DatasetError(f"{where} is empty; it must hold one number more than there are samples")
    blocks = read_blocks(offsets, reach, kept_itemsize=8)
    found = np.zeros(count + (kind != "offsets"), np.int64)
    own = found[found.size - count :]
    for first, block in blocks:
        if block.dtype.kind == "u" and block.dtype.itemsize == 8 and block.max() > _MOST_OFFSET:
            raise DatasetError(f"{where} has numbers above 2**63; the file is damaged")
        here = own[first : first + block.size]
        if kind != "lengths":
            here[...] = block
            continue
        if block.min() < 0:
            raise DatasetError(f"{where} has a length below 0: {block.min()}")
        np.cumsum(block, dtype=np.int64, out=here)
        if here[0] < 0 or (np.diff(here) < 0).any():
            raise DatasetError(f"{where} has lengths of more than 2**63 in all")
        here += found[first]
    return found


def sparse_rows(path: FileName, at: str, reach: Reach) -> tuple[SparseGroup, Int64s]:
    """Return the sparse matrix at a path of a file, and where its rows begin.

    H5AsyncError if there is none, it is damaged, or cannot be read.
    """
    with open_index(path) as file:
        group = sparse_group(file, at, reach)
    if group is None:
        raise DatasetError(f'{path}: "{at}" is not the group of a sparse matrix')
    where = f'{group.indptr.file}: dataset "{group.indptr.path}"'
    return group, row_offsets(_spans(group.indptr, "offsets", where, reach), group)
