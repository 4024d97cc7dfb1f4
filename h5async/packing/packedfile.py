"""Writes the samples of a source to one file: blocks enter, columns of a file that is whole leave.

The state of the file (`safefile.py`) says how many samples of the source were taken; what the file
says of itself, as an attribute, is there for those who append.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import parse_filters, spell_filters
from h5async.codec.filters import Filter
from h5async.errors import ConfigError, DatasetError, ReadError
from h5async.packing.appending import Appender, appender, create
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.packoptions import PackOptions
from h5async.packing.safefile import SafeFile
from h5async.packing.schema import (
    Block,
    Column,
    Values,
    column_of,
    fitted,
    require_columns,
    require_names,
)
from h5async.packing.sources.base import Source
from h5async.spelling import name_bytes, named
from h5async.system.interruptions import suppressing

ABOUT = "h5async-pack"  # an attribute of the file: JSON
VERSION = 1
_CHUNK_NBYTES, _LARGE_ROW_NBYTES = 1 << 16, 1 << 15
_PROBED_NBYTES = 1 << 18


class Written(NamedTuple):
    """A file that is whole: its samples and bytes, as `PackedFile` counts them, and its columns.

    `stored` says how they are stored, in words; `datasets` are the paths of their datasets.
    """

    path: Path
    samples: int
    nbytes: int
    bad: Sequence[tuple[str, str]]
    converted: int
    stored: Mapping[str, str]
    datasets: Sequence[str]


class PackedFile:
    """A file that samples of a source are packed into.

    Attributes
    ----------
    taken
        The samples of the source that were taken, with the bad ones.
    count, nbytes
        The samples in the file, and the bytes that were added, before they are compressed.
    bad
        Names of samples that were left out, and why.
    encoded
        Columns of encoded samples, and their kinds; None if that is not known yet.
    is_finished
        Whether all was there before.
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
        like: Mapping[str, Chunks] | None = None,
    ) -> None:
        self.path, self._source, self._options, self._digest = path, source, options, digest
        self._columns: dict[str, Chunks] = {}
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
        """Open the file, or go on with it."""
        with self._opened as opened:
            if not self.is_finished:
                self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close it; what is not finished can be gone on with."""
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
                    f" file, or replace it by {named('overwrite', True)}"
                )
            return
        writer = ChunkWriter(self._safe, threads=options.threads, memory=options.memory // 2)
        self._writer, file = opened.enter_context(writer), self._safe.file
        if ABOUT in file.attrs:
            self._read_about(file)
            if options.append and self._safe.state is None:  # these are of what was packed before
                self.taken, self.bad, self.converted = 0, [], 0
            self._appenders = {
                name: appender(file, chunks.column, writer, self.count)
                for name, chunks in self._columns.items()
            }
        elif options.append:
            raise ConfigError(f"{path} was not made by pack, which only appends to its own files")

    def _was_finished(self) -> bool:
        """Return whether the file has all of these samples; read what it says of itself."""
        with suppressing(OSError, KeyError), h5py.File(self.path) as file:
            about = self._read_about(file)
            return bool(about["digest"] == self._digest and about["is_whole"])
        return False

    def _read_about(self, file: h5py.File) -> Any:
        about = json.loads(file.attrs[ABOUT])
        self._columns = {one["column"]["name"]: Chunks.of_json(one) for one in about["columns"]}
        self._classes = about["classes"]
        self.taken, self.count = about["taken"], about["count"]
        self.nbytes, self.converted = about["nbytes"], about["converted"]
        self.bad = [(name, reason) for name, reason in about["bad"]]
        self.encoded = about["encoded"]
        return about

    @property
    def written(self) -> Written:
        """What is known of the file once it is whole."""
        stored = {name: chunks.text for name, chunks in self._columns.items()}
        paths = {"/".join(filter(None, n.split("/"))): c.column for n, c in self._columns.items()}
        datasets = [f"{path}/codes" if c.form == "codes" else path for path, c in paths.items()]
        found = self.path, self.count, self.nbytes, self.bad, self.converted, stored, datasets
        return Written(*found)

    def add(self, block: Block) -> None:
        """Append a block of samples, and commit now and then."""
        for place, reason in sorted(block.bad.items()):
            where = block.names[place] if block.names else f"sample {self.taken + place:,}"
            if self._options.on_error == "raise":
                raise ReadError(
                    f"{where} cannot be packed: {reason}; mend or remove it, or leave out such"
                    f" samples by {named('on_error', 'skip')}"
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
            self._commit()

    def _create(self, block: Block) -> None:
        encoded = self.encoded or {}
        found = self._like or chunks_of(block, encoded, self._options)
        for name, chunks in found.items():
            create(self._safe.file, chunks.column, chunks.rows, chunks.filters)
            if chunks.column.form == "codes" and self._last is not None:
                with h5py.File(self._last.path) as last:
                    names = last[f"{name}/categories"][:]
                self._safe.file[f"{name}/categories"].resize(len(names), 0)
                self._safe.file[f"{name}/categories"][:] = names
            self._columns[name] = chunks
            self._appenders[name] = appender(self._safe.file, chunks.column, self._writer, 0)

    def _append(self, block: Block) -> None:
        if block.columns.keys() != self._columns.keys():
            odd = sorted(block.columns.keys() ^ self._columns.keys())
            raise DatasetError(
                f"samples from {self.taken:,} on do not have the columns of those before: only some"
                f' have "{odd[0]}"'
            )
        for name, chunks in self._columns.items():
            units, before = block.units.get(name, ""), chunks.column.units
            if units != before:
                raise DatasetError(
                    f'samples from {self.taken:,} on: column "{name}" has the units'
                    f' "{units}", and "{before}" before; convert its values'
                )
            values = fitted(chunks.column, block.columns[name], self.taken)
            if self._classes.get(name) and isinstance(values, np.ndarray):
                values = self._united(name)[1][values]
            self._appenders[name].append(values)
        self.count += block.kept

    def _united(self, name: str) -> tuple[list[str], NDArray[Any]]:
        """Return the classes of the file and the source, and the numbers of the latter's."""
        own = self._source.classes.get(name, ())
        every = list(dict.fromkeys([*self._classes.get(name, ()), *own]))
        return every, np.array([every.index(one) for one in own], np.int64)

    def _commit(self) -> None:
        self._flush()
        self._writer.commit({}, now=True)

    def _flush(self, classes: Mapping[str, Sequence[str]] | None = None) -> None:
        """Write what is kept, and what the file says of itself; with all classes if it is whole."""
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
            "columns": [chunks.as_json() for chunks in self._columns.values()],
        }
        put = self._safe.file.attrs.__setitem__
        self._writer.call(partial(put, ABOUT, json.dumps(about)))

    def finish(self) -> None:
        """Write what there is once, and give the file its name."""
        if not self.count:
            raise DatasetError(f"{self._source.name} has no samples that can be packed")
        several = (*self._classes, *self._source.classes)
        classes = {name: self._united(name)[0] for name in several}
        self._writer.call(partial(put_once, self._safe.file, self._source.once, classes))
        self._flush(classes)
        self._writer.flush()
        self._safe.finish()


class Chunks(NamedTuple):
    """How the chunks of a column are stored."""

    column: Column
    rows: int
    filters: tuple[Filter, ...]

    @property
    def text(self) -> str:
        """All of it in words."""
        column = self.column
        if column.form == "text":
            return "strings of variable length"
        if column.is_text:
            return f"strings of {column.dtype.itemsize} bytes, chunks of {self.rows:,}"
        if column.form == "varying":
            what = f"encoded {column.kind}" if column.kind else str(column.dtype)
            return f"{what}, of variable length"
        shape = f" {'x'.join(map(str, column.shape))}" if column.shape else ""
        what = "categories" if column.form == "codes" else f"{column.dtype}{shape}"
        return f"{what}, chunks of {self.rows:,}, filter {spell_filters(self.filters)}"

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold of it."""
        filters = spell_filters(self.filters)
        return {"column": self.column.as_json(), "rows": self.rows, "filters": filters}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Chunks:
        """Return the chunks that `as_json` described."""
        return cls(Column.of_json(found["column"]), found["rows"], parse_filters(found["filters"]))


def chunks_of(block: Block, encoded: Mapping[str, str], options: PackOptions) -> dict[str, Chunks]:
    """Return how columns are stored, by their names; `block` is the first one of the source."""
    require_names(block.columns)
    for option in ("fill", "varying", "strings"):
        require_columns(option, getattr(options, option), block.columns)
    found = {}
    for name, values in block.columns.items():
        column = column_of(name, values, options.strings.get(name))
        column = column._replace(units=block.units.get(name, ""))
        if column.form == "varying":
            column = column._replace(kind=encoded.get(name, ""))
        nbytes = max(1, column.row_nbytes)
        rows = 1
        if options.chunk_samples is not None and column.shape:
            rows = options.chunk_samples
        elif nbytes < _LARGE_ROW_NBYTES:
            rows = 1 << (_CHUNK_NBYTES // nbytes).bit_length() - 1
        found[name] = Chunks(column, rows, _filters(column, options.filter, values))
    return found


def _filters(column: Column, chosen: str, values: Values) -> tuple[Filter, ...]:
    """Return the filters that were chosen, or that shrink these values by a third or more."""
    if chosen != "auto":
        return parse_filters(chosen)
    if not isinstance(values, np.ndarray) or not column.shape:
        return ()
    filters = parse_filters("shuffle+lzf" if column.dtype.itemsize > 1 else "lzf")
    some = np.ascontiguousarray(values[: max(1, _PROBED_NBYTES // max(1, column.row_nbytes))])
    shuffled = some.reshape(-1).view(np.uint8).reshape(-1, column.dtype.itemsize).T
    encoded = imagecodecs.lzf_encode(np.ascontiguousarray(shuffled))
    return filters if len(encoded) < some.nbytes * 2 // 3 else ()


def put_once(
    file: h5py.File, once: Mapping[str, Iterable[Any]], classes: Mapping[str, Sequence[str]]
) -> None:
    """Write datasets that a file has once, and names of classes, which are attributes, too."""
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
