"""Writes the samples of a source to one file: blocks enter; the columns of a complete file leave.

A column of fixed size is cut into whole chunks; the rows of the last, partial chunk are kept, and
written at `flush`. So writing can resume at any sample.

The file describes itself in the attribute `ABOUT`: how many samples of the source were taken, its
columns, and so on. Resuming and appending start from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import set_filters
from h5async.codec.filters import is_known_to_hdf5
from h5async.errors import ConfigError, DatasetError, ReadError
from h5async.index.chunks import filters_of
from h5async.index.groupfields import KIND
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.safefile import SafeFile
from h5async.packing.schema import (
    Block,
    Coded,
    Column,
    Values,
    columns_of,
    fitted,
    nbytes_of,
)
from h5async.packing.sources import Source
from h5async.packing.writeoptions import PackOptions
from h5async.spelling import name_bytes, name_text, named
from h5async.system.interruptions import suppressing

ABOUT = "h5async-pack"  # an attribute of the file: JSON
VERSION = 1
_REFERENCES = 1024  # variable-length elements per chunk


def appender(file: h5py.File, column: Column, writer: ChunkWriter, count: int) -> Appender:
    """Return an appender to the dataset of a column, which has `count` samples."""
    forms = {"array": _ChunkAppender, "varying": _VaryingAppender, "codes": _CodesAppender}
    return forms.get(column.form, Appender)(file[column.name], column, writer, count)


def create(file: h5py.File, column: Column) -> None:
    """Create the empty dataset, or group, of a column."""
    name, is_array = column.name, column.form == "array"
    if column.form == "codes":  # as AnnData stores categories
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0"})
        group.attrs["ordered"] = False
        create(file, column._replace(name=f"{name}/codes", form="array"))
        create(file, Column(f"{name}/categories", "text", column.dtype))
        return
    dtype = column.dtype
    if not is_array:
        dtype = h5py.string_dtype() if column.form == "text" else h5py.vlen_dtype(dtype)
    elif column.is_text:
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    set_filters(properties, column.filters if is_array else ())
    dataset = file.create_dataset(
        name_bytes(name),
        (0, *column.shape),
        dtype,
        maxshape=(None, *column.shape),
        chunks=(column.rows if is_array else _REFERENCES, *column.shape),
        track_times=False,  # the same bytes at any time
        dcpl=properties,
    )
    if column.units:
        dataset.attrs["units"] = column.units
    if column.kind:
        dataset.attrs[KIND] = column.kind


class Appender:
    """Appends samples to a dataset of a variable-length datatype."""

    def __init__(self, node: Any, column: Column, writer: ChunkWriter, count: int) -> None:
        self._out, self.count = writer.open(node), count

    def append(self, values: Values) -> None:
        """Append values, as `schema.fitted` returns them."""
        nbytes, several = nbytes_of(values), np.empty(len(values), object)
        for number, one in enumerate(values):  # (NumPy would turn equal lengths into a matrix)
            several[number] = one
        self._out.write((self.count,), several, nbytes)
        self.count += len(several)

    def flush(self) -> None:
        """Write the rows that are kept."""


class _VaryingAppender(Appender):
    """Appends arrays of any length; HDF5 copies them directly from their memory."""

    def append(self, values: Values) -> None:
        assert isinstance(values, list)
        self._out.write_elements(self.count, [lambda: values], nbytes_of(values))
        self.count += len(values)


class _ChunkAppender(Appender):
    """Appends samples of one size, in whole chunks."""

    def __init__(self, node: h5py.Dataset, column: Column, writer: ChunkWriter, count: int) -> None:
        super().__init__(node, column, writer, count)
        self._kept = np.empty(node.chunks, column.dtype)
        self._filled = count % len(self._kept)
        if self._filled:
            for entry in filters_of(node.id.get_create_plist()):
                is_known_to_hdf5(entry)  # imports the plugin that HDF5 needs to read the rows
            self._kept[: self._filled] = node[count - self._filled : count]

    def append(self, values: Values) -> None:
        assert isinstance(values, np.ndarray)
        rows, at = len(self._kept), 0
        if self._filled:
            at = min(rows - self._filled, len(values))
            self._keep(values[:at])
            if self._filled == rows:
                self.flush()
                self._kept, self._filled = np.empty_like(self._kept), 0
        end = at + (len(values) - at) // rows * rows
        if end > at:
            self._put(self.count, values[at:end])
            self.count += end - at
        self._keep(values[end:])

    def flush(self) -> None:
        if self._filled:
            self._put(self.count - self._filled, self._kept[: self._filled].copy())

    def _keep(self, values: NDArray[Any]) -> None:
        self._kept[self._filled : self._filled + len(values)] = values
        self._filled += len(values)
        self.count += len(values)

    def _put(self, first: int, values: NDArray[Any]) -> None:
        self._out.write((first, *[0] * (values.ndim - 1)), values)


class _CodesAppender(Appender):
    """Appends categories: their codes, and the names of new ones."""

    def __init__(self, node: h5py.Group, column: Column, writer: ChunkWriter, count: int) -> None:
        self.count = count
        names = [name_text(name) for name in node["categories"][:]]
        self._numbers = {name: number for number, name in enumerate(names)}
        codes = Column(f"{column.name}/codes", "array", column.dtype)
        self._codes = _ChunkAppender(node["codes"], codes, writer, count)
        self._names = Appender(node["categories"], column, writer, len(names))

    def append(self, values: Values) -> None:
        assert isinstance(values, Coded)
        names = [str(name) for name in values.categories]
        new = [name for name in dict.fromkeys(names) if name not in self._numbers]
        self._numbers |= {name: len(self._numbers) + n for n, name in enumerate(new)}
        if new:
            self._names.append([name_bytes(name) for name in new])
        united = np.array([*(self._numbers[name] for name in names), -1], np.int32)
        self._codes.append(united[values.codes])
        self.count += len(values.codes)

    def flush(self) -> None:
        self._codes.flush()


class Written(NamedTuple):
    """A complete file: its samples and bytes, as `PackedFile` counts them, and its columns.

    `stored` tells how columns are stored, in words; `datasets` are the paths of their datasets.
    """

    path: Path
    samples: int
    nbytes: int
    bad: Sequence[tuple[str, str]]
    converted: int
    stored: Mapping[str, str]
    datasets: Sequence[str]


class PackedFile:
    """A file into which the samples of a source are packed.

    `taken` is the number of source samples processed, including those in `bad`: the names of
    skipped samples, and why. The file has `count` samples of `nbytes` bytes before compression.
    `encoded` maps the columns of encoded samples to their kinds; None if not known yet. If
    `is_finished`, the file was already complete.
    """

    def __init__(
        self,
        path: Path,
        source: Source,
        options: PackOptions,
        digest: str,
        last: PackedFile | None = None,
        *,
        begin: int = 0,
        like: Mapping[str, Column] | None = None,
    ) -> None:
        self.path, self._source, self._options, self._digest = path, source, options, digest
        self._columns: dict[str, Column] = {}
        self._appenders: dict[str, Appender] = {}
        self._classes: dict[str, list[str]] = {}
        self._last, self._like = last, like
        self.taken: int = begin if last is None else last.taken
        self.count = self.nbytes = self.converted = 0
        self.bad: list[tuple[str, str]] = []
        self.encoded: dict[str, str] | None = None
        self.is_finished = options.append and options.resume and self._was_finished()
        self._opened = ExitStack()

    def __enter__(self) -> PackedFile:
        """Create the file, or open it to continue."""
        with self._opened as opened:
            if not self.is_finished:
                self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close the file; an unfinished one can be resumed."""
        self._opened.__exit__(*raised)

    def _open(self, opened: ExitStack) -> None:
        options, path = self._options, self.path
        flags = {name: getattr(options, name) for name in ("resume", "append", "overwrite")}
        self._safe = opened.enter_context(SafeFile(path, digest=self._digest, **flags))
        self.is_finished = self._safe.is_finished
        if self.is_finished:
            if not self._was_finished():
                raise ConfigError(
                    f"{path} was packed from other sources, or with other options; write another"
                    f" file, or replace it with {named('overwrite', True)}"
                )
            return
        writer = ChunkWriter(self._safe, threads=options.threads, memory=options.memory // 2)
        self._writer, file = opened.enter_context(writer), self._safe.file
        if ABOUT in file.attrs:
            self._read_about(file)
            if options.append and self._safe.state is None:  # these counted earlier sources
                self.taken, self.bad, self.converted = 0, [], 0
            self._appenders = {
                name: appender(file, column, writer, self.count)
                for name, column in self._columns.items()
            }
        elif options.append:
            raise ConfigError(f"{path} was not made by pack, which only appends to its own files")

    def _was_finished(self) -> bool:
        """Return whether the file already has all of these samples; read its description."""
        with suppressing(OSError, KeyError), h5py.File(self.path) as file:
            about = self._read_about(file)
            return bool(about["digest"] == self._digest and about["is_whole"])
        return False

    def _read_about(self, file: h5py.File) -> Any:
        about = json.loads(file.attrs[ABOUT])
        self._columns = {one["column"]["name"]: Column.of_json(one) for one in about["columns"]}
        self._classes = about["classes"]
        self.taken, self.count = about["taken"], about["count"]
        self.nbytes, self.converted = about["nbytes"], about["converted"]
        self.bad = [(name, reason) for name, reason in about["bad"]]
        self.encoded = about["encoded"]
        return about

    @property
    def written(self) -> Written:
        """The description of the complete file."""
        stored = {name: column.text for name, column in self._columns.items()}
        paths = {"/".join(filter(None, n.split("/"))): c for n, c in self._columns.items()}
        datasets = [f"{path}/codes" if c.form == "codes" else path for path, c in paths.items()]
        found = self.path, self.count, self.nbytes, self.bad, self.converted, stored, datasets
        return Written(*found)

    def add(self, block: Block) -> None:
        """Append a block of samples, and commit if it is due."""
        for place, reason in sorted(block.bad.items()):
            where = block.names[place] if block.names else f"sample {self.taken + place:,}"
            if self._options.on_error == "raise":
                raise ReadError(
                    f"{where} cannot be packed: {reason}; fix or remove it, or skip such samples"
                    f" with {named('on_error', 'skip')}"
                )
            self.bad.append((where, reason))
        if block.kept:
            if not self._columns:
                self._create(block)
            self._append(block)
        self.taken += block.taken
        self.converted += block.converted
        self.nbytes += block.nbytes
        if self._safe.is_due:
            self._flush()
            self._writer.commit({}, now=True)

    def _create(self, block: Block) -> None:
        encoded = self.encoded or {}
        found = self._like or columns_of(block, encoded, self._options)
        for name, column in found.items():
            create(self._safe.file, column)
            if column.form == "codes" and self._last is not None:
                with h5py.File(self._last.path) as last:
                    names = last[f"{name}/categories"][:]
                self._safe.file[f"{name}/categories"].resize(len(names), 0)
                self._safe.file[f"{name}/categories"][:] = names
            self._columns[name] = column
            self._appenders[name] = appender(self._safe.file, column, self._writer, 0)

    def _append(self, block: Block) -> None:
        if block.columns.keys() != self._columns.keys():
            odd = sorted(block.columns.keys() ^ self._columns.keys())
            raise DatasetError(
                f"samples from {self.taken:,} on have other columns than those before: only some"
                f' have "{odd[0]}"'
            )
        for name, column in self._columns.items():
            units, before = block.units.get(name, ""), column.units
            if units != before:
                raise DatasetError(
                    f'samples from {self.taken:,} on: column "{name}" has the units'
                    f' "{units}", but "{before}" before; convert its values'
                )
            values = fitted(column, block.columns[name], self.taken)
            if self._classes.get(name) and isinstance(values, np.ndarray):
                values = self._united(name)[1][values]
            self._appenders[name].append(values)
        self.count += block.kept

    def _united(self, name: str) -> tuple[list[str], NDArray[Any]]:
        """Return the union of the file's and the source's classes, and the source's codes in it."""
        own = self._source.classes.get(name, ())
        every = list(dict.fromkeys([*self._classes.get(name, ()), *own]))
        return every, np.array([every.index(one) for one in own], np.int64)

    def _flush(self, classes: Mapping[str, Sequence[str]] | None = None) -> None:
        """Write kept rows and the file's description, with all `classes` if it is complete."""
        for one in self._appenders.values():
            one.flush()
        about = {
            "version": VERSION,
            "digest": self._digest,
            "is_whole": classes is not None,
            "taken": self.taken,
            "count": self.count,
            "nbytes": self.nbytes,
            "converted": self.converted,
            "bad": self.bad,
            "encoded": self.encoded,
            "classes": self._classes if classes is None else classes,
            "columns": [column.as_json() for column in self._columns.values()],
        }
        put = self._safe.file.attrs.__setitem__
        self._writer.call(partial(put, ABOUT, json.dumps(about)))

    def finish(self) -> None:
        """Write the datasets that exist once, and give the file its final name."""
        if not self.count:
            raise DatasetError(f"{self._source.name} has no samples that can be packed")
        several = (*self._classes, *self._source.classes)
        classes = {name: self._united(name)[0] for name in several}
        self._writer.call(partial(put_once, self._safe.file, self._source.once, classes))
        self._flush(classes)
        self._writer.flush()
        self._safe.finish()


def put_once(
    file: h5py.File, once: Mapping[str, Iterable[Any]], classes: Mapping[str, Sequence[str]]
) -> None:
    """Write the datasets that exist once per file, and class names, also as attributes."""
    for name, values in once.items():
        _put(file, name, values)
    for number, (name, several) in enumerate(classes.items()):
        _put(file, f"{name}_classes" if number else "classes", several)
        texts = np.array([name_bytes(one) for one in several], object)
        file[name].attrs.create("classes", texts, dtype=h5py.string_dtype())


def _put(file: h5py.File, name: str, values: Iterable[Any]) -> None:
    is_text = all(isinstance(one, str) for one in values)
    if name in file:
        del file[name]
    dtype = h5py.string_dtype() if is_text else None
    data = [name_bytes(one) for one in values] if is_text else values
    file.create_dataset(name, data=np.array(data, object if is_text else None), dtype=dtype)
