"""Packs samples into an HDF5 file: sources and options enter, a file leaves.

Threads make blocks of samples (`sources/`), which are appended in order (`appending.py`) to a file
that is whole or absent (`safefile.py`), whose state says how many samples of the source are in it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Unpack

import h5py
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import parse_filters, spell_filters
from h5async.codec.filters import Filter
from h5async.errors import ConfigError, DatasetError, ReadError
from h5async.order.permutation import permute
from h5async.pack.appending import Appender, appender, create
from h5async.pack.chunkwriter import ChunkWriter
from h5async.pack.options import PackKeywords, PackOptions
from h5async.pack.safefile import SafeFile
from h5async.pack.schema import Block, Column, Values, column_of, fitted
from h5async.pack.sources.finding import open_source
from h5async.pack.sources.source import Source, Work, digest_of
from h5async.spelling import named
from h5async.system.interruptions import suppressing

Progress = Callable[[int, int | None, int], None]  # samples done, all of them, bytes done
ABOUT = "h5async-pack"  # an attribute of the file: JSON
_CHUNK_NBYTES, _LARGE_ROW_NBYTES = 1 << 16, 1 << 15
_PROBED_NBYTES = 1 << 18
_VERSION = 1


class Packed(NamedTuple):
    """What `pack` has written.

    `samples` is the number of samples that the file has, and `nbytes` the size of all files. `bad`
    are the names of samples that were left out, and why; `converted` is the number of images that
    Pillow converted to PNG. `columns` say how each column is stored.
    """

    path: Path
    samples: int
    nbytes: int
    seconds: float
    columns: Mapping[str, str]
    bad: Sequence[tuple[str, str]]
    converted: int
    files: Sequence[Path]


def pack(
    sources: Any,
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **options: Unpack[PackKeywords],
) -> Packed:
    """Pack samples into an HDF5 file.

    Parameters
    ----------
    sources
        A path, or several, of folders and files, or an iterable of dictionaries; see
        docs/packing.md.
    out
        The file to write.
    progress
        A function that is called with the number of samples that are packed, the number of all (or
        None), and the number of bytes.
    **options
        See `PackOptions`.

    Raises
    ------
    H5AsyncError
        If a source cannot be read, a sample cannot be packed, or the file cannot be written. What
        was written can be gone on with, by ``resume=True``.
    """
    chosen, began = PackOptions(**options), perf_counter()
    source = open_source(sources, chosen)
    path = Path(out)
    order = partial(_permuted, source, chosen.seed) if chosen.shuffle else None
    digest = digest_of([_VERSION, source.digest(), sorted(chosen.digested().items())])
    with _Output(path, source, chosen, digest) as output:
        if not output.is_finished:
            with Blocks(source.work(output.taken, order), chosen) as blocks:
                for block in blocks:
                    output.add(block)
                    if progress is not None:
                        progress(output.taken, source.count, output.nbytes)
            source.files.check()
            output.finish()
    return output.packed(perf_counter() - began)


def _permuted(source: Source, seed: int, positions: Any) -> Any:
    if source.count is None:
        raise ConfigError(f"{source.name} can only be read in order; leave out {named('shuffle')}")
    return permute(positions, source.count, seed, 0)


class Blocks:
    """Makes blocks in threads, ahead of their use, in order; iterates over them.

    So many are made ahead that they take half of the memory.
    """

    def __init__(self, works: Iterator[Work], options: PackOptions) -> None:
        self._works, self._most_nbytes = works, options.memory // 2
        self._most = 2 * options.threads + 2
        self._pool = ThreadPoolExecutor(options.threads, "h5async-pack")
        self._waiting: deque[Future[Block]] = deque()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Block]:
        ahead = 1
        while True:
            while len(self._waiting) < ahead and (work := next(self._works, None)) is not None:
                self._waiting.append(self._pool.submit(work))
            if not self._waiting:
                return
            block = self._waiting.popleft().result()
            ahead = max(1, min(self._most, self._most_nbytes // max(1, block.nbytes)))
            yield block


class _Output:
    """A file that samples are packed into."""

    def __init__(self, path: Path, source: Source, options: PackOptions, digest: str) -> None:
        self._source, self._options = source, options
        self._path, self._digest = path, digest
        self._appenders: dict[str, Appender] = {}
        self._columns: dict[str, Column] = {}
        self._texts: dict[str, str] = {}
        self._classes: list[str] = []
        self.nbytes = 0
        self.taken = self.count = self.converted = 0
        self.bad: list[tuple[str, str]] = []
        self.is_finished = options.append and options.resume and self._was_finished()
        self._opened = ExitStack()

    def __enter__(self) -> _Output:
        with self._opened as opened:
            if not self.is_finished:
                self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def _open(self, opened: ExitStack) -> None:
        path, options, digest = self._path, self._options, self._digest
        flags = {name: getattr(options, name) for name in ("resume", "append", "overwrite")}
        self._safe = opened.enter_context(SafeFile(path, digest=digest, **flags))
        self.is_finished = self._safe.is_finished
        if self.is_finished:
            if not self._was_finished():
                raise ConfigError(
                    f"{path} was packed from other sources, or with other options; write another"
                    f" file, or replace it by {named('overwrite', True)}"
                )
            return
        writer = ChunkWriter(self._safe, threads=options.threads, memory=options.memory // 2)
        self._writer = opened.enter_context(writer)
        state = self._safe.state or {}
        self.taken, self.converted = state.get("taken", 0), state.get("converted", 0)
        self.bad = [(name, reason) for name, reason in state.get("bad", [])]
        if ABOUT in self._safe.file.attrs:
            self._read_about(self._safe.file)
            self._appenders = {
                name: appender(self._safe.file, column, self._writer, self.count)
                for name, column in self._columns.items()
            }
        elif options.append:
            raise ConfigError(f"{path} was not made by pack, which only appends to its own files")

    def _was_finished(self) -> bool:
        """Return whether the file has all of these samples; read what it says of itself."""
        with suppressing(OSError, KeyError), h5py.File(self._path) as file:
            about = self._read_about(file)
            return bool(about["digest"] == self._digest and about["is_whole"])
        return False

    def _read_about(self, file: h5py.File) -> Any:
        about = json.loads(file.attrs[ABOUT])
        if "classes" in file:
            self._classes = file["classes"].asstr()[:].tolist()
        self.count, self._texts = about["samples"], about["stored"]
        self._columns = {one["name"]: Column.of_json(one) for one in about["columns"]}
        return about

    def add(self, block: Block) -> None:
        """Append a block of samples, and commit now and then."""
        if block.bad and self._options.on_error == "raise":
            name, reason = block.bad[0]
            raise ReadError(
                f"{name} cannot be packed: {reason}; mend or remove it, or leave out such samples"
                f" by {named('on_error', 'skip')}"
            )
        if block.kept:
            if not self._columns:
                self._create(block)
            self._append(block)
        self.taken += block.taken
        self.bad += block.bad
        self.converted += block.converted
        self.nbytes += block.nbytes
        if self._safe.is_due:
            self._commit()

    def _create(self, block: Block) -> None:
        for name, chunks in chunks_of(block, self._source, self._options).items():
            create(self._safe.file, chunks.column, chunks.rows, chunks.filters)
            self._texts[name], self._columns[name] = chunks.text, chunks.column
            self._appenders[name] = appender(self._safe.file, chunks.column, self._writer, 0)

    def _append(self, block: Block) -> None:
        if block.columns.keys() != self._columns.keys():
            odd = sorted(block.columns.keys() ^ self._columns.keys())
            raise DatasetError(
                f"samples from {self.count:,} on do not have the columns of those before: only some"
                f' have "{odd[0]}"'
            )
        for name, column in self._columns.items():
            values = fitted(column, block.columns[name], self.count)
            if name == "labels" and self._classes and isinstance(values, np.ndarray):
                values = self._united()[1][values]
            self._appenders[name].append(values)
        self.count += block.kept

    def _united(self) -> tuple[list[str], NDArray[Any]]:
        """Return the classes of the file and the source, and the numbers of the latter's."""
        own = list(self._source.once.get("classes", ()))
        every = list(dict.fromkeys([*self._classes, *own]))
        return every, np.array([every.index(name) for name in own], np.int64)

    def _commit(self, *, is_whole: bool = False) -> None:
        for one in self._appenders.values():
            one.flush()
        about = json.dumps(
            {
                "version": _VERSION,
                "digest": self._digest,
                "is_whole": is_whole,
                "samples": self.count,
                "stored": self._texts,
                "columns": [column.as_json() for column in self._columns.values()],
            }
        )
        self._writer.call(partial(self._safe.file.attrs.__setitem__, ABOUT, about))
        state = {"taken": self.taken, "bad": [*self.bad], "converted": self.converted}
        self._writer.commit(state, now=True)

    def finish(self) -> None:
        """Write what there is once, and give the file its name."""
        if not self.count:
            raise DatasetError(f"{self._source.name} has no samples that can be packed")
        once = {**self._source.once, **self._source.finish()}
        if "classes" in once:
            once["classes"] = self._united()[0]
        for name, values in once.items():
            self._writer.call(partial(_put_once, self._safe.file, name, values))
        self._commit(is_whole=True)
        self._writer.flush()
        self._safe.finish()

    def packed(self, seconds: float) -> Packed:
        """Return what was written."""
        nbytes = self._path.stat().st_size
        about = self._texts, self.bad, self.converted, [self._path]
        return Packed(self._path, self.count, nbytes, seconds, *about)


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
        if column.form == "varying":
            what = f"encoded {column.kind}" if column.kind else str(column.dtype)
            return f"{what}, of variable length"
        shape = f" {'x'.join(map(str, column.shape))}" if column.shape else ""
        what = "categories" if column.form == "codes" else f"{column.dtype}{shape}"
        return f"{what}, chunks of {self.rows:,}, filter {spell_filters(self.filters)}"


def chunks_of(block: Block, source: Source, options: PackOptions) -> dict[str, Chunks]:
    """Return how columns are stored, by their names; `block` is the first one of the source."""
    found = {}
    for name, values in block.columns.items():
        column = column_of(name, values)._replace(kind=source.kinds.get(name, ""))
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


def _put_once(file: h5py.File, name: str, values: Iterable[Any]) -> None:
    is_text = all(isinstance(one, str) for one in values)
    dtype = h5py.string_dtype() if is_text else None
    if name in file:
        del file[name]
    file.create_dataset(name, data=np.array(values, object if is_text else None), dtype=dtype)
    if name == "classes" and "labels" in file:
        file["labels"].attrs[name] = np.array(values, h5py.string_dtype())
