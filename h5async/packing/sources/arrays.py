"""Sources of arrays, in .npy and .npz files or by name, and of samples from an iterable."""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5async.errors import DatasetError, ReadError
from h5async.packing.schema import Block, Values, fits
from h5async.packing.sources import (
    BLOCK_NBYTES,
    Files,
    Int64s,
    ListedSource,
    Source,
    Work,
    as_slice,
    digest_of,
    reading_file,
    runs_of,
)

_MOST_ROWS = 1 << 16
_READ_HEADER: Mapping[Any, Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArraySource(ListedSource):
    """Arrays by name, with one sample per row; any objects with the indexing of NumPy arrays."""

    def __init__(self, arrays: Mapping[str, Any], name: str, files: Sequence[Path] = ()) -> None:
        self.name, self.files = name, Files(files)
        self._arrays = dict(_members(arrays))
        lengths = {name: array.shape[0] for name, array in self._arrays.items()}
        if not lengths or len(set(lengths.values())) > 1:
            found = ", ".join(f"{one} has {count:,}" for one, count in lengths.items())
            raise DatasetError(
                f"{self.name}: arrays packed together need the same number of rows, one per sample:"
                f' {found or "there are no arrays"}; choose some: h5async.pack({{"data": array,'
                ' "labels": another}, out)'
            )
        self.count = next(iter(lengths.values()))
        self.nbytes = sum(array.nbytes for array in self._arrays.values())
        row_nbytes = max(1, self.nbytes // max(1, self.count))
        self.rows = min(_MOST_ROWS, max(1, BLOCK_NBYTES // row_nbytes))
        self.is_in_order = any(isinstance(one, _ZippedRows) for one in self._arrays.values())

    def digest(self) -> str:
        """Return a digest of the files, or of shapes, dtypes, and the first and last rows."""
        if self.files.paths:
            return super().digest()
        parts: list[Any] = []
        for name, array in self._arrays.items():
            ends = [np.asarray(array[at]).tobytes() for at in (0, -1)] if len(array) else []
            parts += [name, array.shape, array.dtype, *ends]
        return digest_of(parts)

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that return blocks; sequential sources are read here, by the caller."""
        works = super().work(start)
        return (partial(copy, work()) for work in works) if self.is_in_order else works

    def read(self, numbers: Int64s) -> Block:
        """Return the rows of all arrays."""
        chosen = as_slice(numbers)
        columns = {name: _values(np.array(array[chosen])) for name, array in self._arrays.items()}
        return Block(columns, len(numbers))


class _FileRows:
    """The rows of a .npy file, mapped again for each block so that memory stays bounded."""

    def __init__(self, path: Path, found: Any, member: str | None = None) -> None:
        self._path, self._member = path, member
        own = found if member is None else found[member]
        self.shape, self.dtype, self.nbytes = own.shape, own.dtype, own.nbytes

    def __getitem__(self, chosen: Any) -> Any:
        found = np.load(self._path, mmap_mode="r", allow_pickle=False)
        if isinstance(chosen, str):
            return _FileRows(self._path, found, chosen)
        return np.array((found if self._member is None else found[self._member])[chosen])


class _ZippedRows:
    """The rows of an array in a .npz file, read in order."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._open()
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self._is_fortran or self.dtype.names:
            raise ValueError(
                f"{name} is larger than memory allows, and its rows cannot be read in order;"
                " extract the file, and pack the .npy files"
            )

    def _open(self) -> None:
        self._file, self._row = zipfile.ZipFile(self._path).open(self._name), 0
        version = np.lib.format.read_magic(self._file)
        self.shape, self._is_fortran, self.dtype = _READ_HEADER[version](self._file)

    def __getitem__(self, rows: slice) -> Any:
        row_nbytes = self.nbytes // max(1, self.shape[0])
        with _reading(self._path):
            if rows.start < self._row:
                self._open()
            for _ in range(self._row, rows.start):
                self._file.read(row_nbytes)
            data = self._file.read((rows.stop - rows.start) * row_nbytes)
            self._row = rows.stop
            return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    with reading_file(path):
        try:
            yield
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ReadError(f"cannot read {path}: {error}") from error


def array_files(paths: Sequence[Path], memory: int) -> ArraySource:
    """Return the arrays of .npy and .npz files; the array of a single .npy file is ``data``.

    Those of a .npz file are loaded if they fit in half of `memory`, and read in order otherwise.
    """
    arrays: dict[str, Any] = {}
    for path in paths:
        with _reading(path):
            if path.suffix.lower() == ".npz" and not zipfile.is_zipfile(path):
                raise ValueError("it is not a complete .npz file")
            found: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(found, np.ndarray):
                found = {"data" if len(paths) == 1 else path.stem: _FileRows(path, found)}
            elif sum(one.file_size for one in found.zip.infolist()) > memory // 2:
                found = {name: _ZippedRows(path, f"{name}.npy") for name in found}
            found = dict(found)
        twice = sorted(arrays.keys() & found.keys())
        if twice:
            raise DatasetError(f'{path}: another file has "{twice[0]}", too; rename one of them')
        arrays |= found
    return ArraySource(arrays, str(paths[0]), paths)


def _members(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays, with structured dtypes split into one array per member."""
    found: dict[str, Any] = {}
    for name, given in arrays.items():
        try:
            is_array = hasattr(given, "shape") and hasattr(given, "dtype")
            array = given if is_array else np.asarray(given)
        except ValueError as error:
            raise DatasetError(
                f"{name} is not an array ({error}); to pack lists of any length, give an iterable"
                " of samples, as mappings of names to values"
            ) from error
        if not isinstance(array.dtype, np.dtype):  # PyTorch's
            array = np.asarray(array)
        if not array.shape:
            raise DatasetError(f"{name} is a single value, but samples are rows of an array")
        for member in array.dtype.names or ():
            found[member if len(arrays) == 1 else f"{name}/{member}"] = array[member]
        if array.dtype.names is None:
            found[name] = array
    return found


def _values(rows: Any) -> Values:
    if rows.dtype.kind == "S":
        return [one.decode("utf-8", "surrogateescape") for one in rows.tolist()]
    return rows.tolist() if rows.dtype.kind in "UOT" else rows  # type: ignore[no-any-return]


class RowSource(Source):
    """Samples of an iterable, which must yield the same ones again for a pack to be resumed.

    Nested mappings are flattened: ``{"obs": {"image": ...}}`` is ``obs/image``. The columns
    `varying` have samples of any length, as have those whose first samples differ in length.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], varying: Collection[str] = ()) -> None:
        self.name = type(rows).__name__
        self._samples, self._varying = rows, varying
        self.count = len(rows) if isinstance(rows, Sized) else None

    def digest(self) -> str:
        """Return a digest of its type and length: the samples are not known in advance."""
        return digest_of([self.name, self.count])

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that make columns of samples, after the first `start`."""
        rows = itertools.islice(iter(self._samples), start, None)
        for run in runs_of(rows, self.rows, _nbytes):
            yield partial(columns_of, run, start, self._varying)
            start += len(run)


def _nbytes(value: Any) -> int:
    """Return the total size of the arrays, bytes and strings in a sample."""
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", 0)


def columns_of(rows: list[Any], first: int, varying: Collection[str]) -> Block:
    """Return the columns of samples, numbered from `first`."""
    flat = [dict(_flat(row, first + number)) for number, row in enumerate(rows)]
    for number, row in enumerate(flat):
        if row.keys() != flat[0].keys():
            odd = sorted(row.keys() ^ flat[0].keys())
            raise DatasetError(
                f'sample {first + number:,}: either it or the samples before lack "{odd[0]}"; all'
                " samples must have the same keys"
            )
    columns = {
        name: _joined([row[name] for row in flat], name, first, is_varying=name in varying)
        for name in flat[0]
    }
    return Block(columns, len(rows))


def _flat(row: Any, number: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(row, Mapping):
        raise DatasetError(
            f"sample {number:,} is a {type(row).__name__}; a sample is a mapping of names to values"
        )
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, number, f"{prefix}{name}/")
        elif value is None:
            raise DatasetError(f'sample {number:,}: "{prefix}{name}" is None, which has no dtype')
        else:
            yield f"{prefix}{name}", value


def _joined(several: list[Any], name: str, first: int, *, is_varying: bool) -> Values:
    if all(isinstance(one, str | bytes) for one in several):
        return several
    arrays = [np.asarray(one) for one in several]
    if is_varying or len({one.shape for one in arrays}) > 1:
        return arrays
    found = np.stack(arrays)
    for number, one in enumerate(arrays):
        if not fits(one.dtype, found.dtype, one):
            raise DatasetError(
                f'sample {first + number:,}: "{name}" is {one.dtype}; combined with other samples'
                f" it would be {found.dtype}, which cannot hold its value; convert them"
            )
    return found
