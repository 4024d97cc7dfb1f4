"""Sources of files: folders of images or audio, or tars, enter; the bytes of files leave.

Classes are the sorted names of subfolders, and files are sorted within a class, as in torchvision's
``ImageFolder``. A folder without subfolders has no labels.

In tars, as in WebDataset, a sample is a run of files with the same name up to the first dot.
``.cls`` becomes ``labels``, and the names ``filenames``; other columns are named by extension.
Images become the column ``data``, whatever their extensions, unless samples have several.
Compressed tars are read in order.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import lzma
import os
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, ReadError, needs_package
from h5async.io.source import owned
from h5async.packing.schema import Block, Values
from h5async.packing.sources import (
    BLOCK_NBYTES,
    Files,
    Int64s,
    ListedSource,
    Source,
    Work,
    digest_of,
    reading_file,
    runs_of,
)

SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    "audio": (".wav", ".flac", ".ogg", ".aiff", ".aif"),
}


class FolderSource(ListedSource):
    """Files of one `kind` in folders; subfolders, if any, are classes."""

    def __init__(self, folders: Sequence[Path], kind: str) -> None:
        suffixes = SUFFIXES[kind]
        several = [os.path.abspath(one) for one in folders]
        self.name = str(folders[0]) if len(folders) == 1 else os.path.commonpath(several)
        self.kinds, self._files = {"data": kind}, _Listing()
        classes = sorted({name for one in folders for name in _folders_of(one)})
        ends = [0]
        for folder, name in itertools.product(folders, classes or [""]):
            _list_files(os.path.join(folder, name), self.name, suffixes, self._files)
            ends.append(len(self._files))
        counts = np.diff(ends).reshape(len(folders), -1)
        for names, totals in ((folders, counts.sum(1)), (classes, counts.sum(0))):
            empty = [name for name, total in zip(names, totals, strict=False) if not total]
            if empty:
                what = "would be a class, but has" if classes else "has"
                raise DatasetError(
                    f'{self.name}: the folder "{empty[0]}" {what} no file that ends in'
                    f" {', '.join(suffixes)}; remove it, or give another folder"
                )
        self.count, self.nbytes = len(self._files), self._files.nbytes
        self._labels: Int64s | None = None
        if classes:
            numbers = np.tile(np.arange(len(classes), dtype=np.int64), len(folders))
            self._labels = np.repeat(numbers, counts.reshape(-1))
            self.classes = {"labels": classes}

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of all files, and the classes."""
        return digest_of([self.name, self.classes, *self._files])

    def read(self, numbers: Int64s) -> Block:
        """Return the contents of files."""
        listed = [self._files[number] for number in numbers.tolist()]
        entries = [(os.path.join(self.name, name), size, time) for name, size, time in listed]
        columns: dict[str, Values] = {"data": _contents(entries)}
        if self._labels is not None:
            columns["labels"] = self._labels[numbers]
        columns["filenames"] = [name for name, _, _ in listed]
        return Block(columns, len(entries), [path for path, _, _ in entries])


class _Listing(Sequence[tuple[str, int, int]]):
    """Names, sizes and times of files, stored compactly: there may be millions."""

    def __init__(self) -> None:
        self._names, self._ends = bytearray(), array("q", [0])
        self._sizes, self._times = array("q"), array("q")

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes)

    def append(self, name: str, size: int, time: int) -> None:
        self._names += os.fsencode(name)
        for values, value in (
            (self._ends, len(self._names)),
            (self._sizes, size),
            (self._times, time),
        ):
            values.append(value)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, number: Any) -> Any:
        name = self._names[self._ends[number] : self._ends[number + 1]]
        return os.fsdecode(bytes(name)), self._sizes[number], self._times[number]


def _folders_of(folder: Path) -> list[str]:
    with reading_file(folder), os.scandir(folder) as found:
        return [one.name for one in found if one.is_dir()]


def _list_files(folder: str, base: str, suffixes: tuple[str, ...], into: _Listing) -> None:
    """List the files in a folder, if it exists, and below, by their paths relative to `base`."""
    with reading_file(folder):  # (Only folders here: files are listed one folder at a time.)
        walked = os.walk(folder, onerror=_raise, followlinks=True) if os.path.isdir(folder) else ()
        roots = sorted(root for root, _, _ in walked)
    for root in roots:
        prefix = os.path.relpath(root, base)
        with reading_file(root), os.scandir(root) as found:
            wanted = (one for one in found if one.name.lower().endswith(suffixes))
            names = sorted(one.name for one in wanted if not one.is_dir())
        for name in names:
            with reading_file(path := os.path.join(root, name)):
                stat = os.stat(path)
            into.append(
                os.path.normpath(os.path.join(prefix, name)), stat.st_size, stat.st_mtime_ns
            )


def _raise(error: OSError) -> None:
    raise error


def _contents(entries: Sequence[tuple[str, int, int]]) -> list[Any]:
    """Return the contents of files, as views of one contiguous array; raises like `_read`."""
    ends = list(itertools.accumulate((size for _, size, _ in entries), initial=0))
    memory = np.empty(ends[-1], np.uint8)
    views = [memory[begin:end] for begin, end in itertools.pairwise(ends)]
    for entry, view in zip(entries, views, strict=True):
        _read(*entry, view)
    return views


def _read(path: str, nbytes: int, changed: int, view: NDArray[np.uint8]) -> None:
    """Read a file; ReadError if it has changed since it was listed."""
    with reading_file(path), open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        is_same = (stat.st_size, stat.st_mtime_ns) == (nbytes, changed)
        if is_same and file.readinto(view.data) == nbytes:
            return
    raise ReadError(f"{path} was changed while it was being packed; pack it again")


# --- samples in tars ------------------------------------------------------------------------------

ENDINGS = re.compile(r"[.](tar([.](gz|bz2|xz|zst))?|tgz)$", re.IGNORECASE)
_PARTS = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NUMBERS = ("cls2", "class", "count", "index", "inx", "id")  # as webdataset decodes them, and cls
_TEXTS = ("txt", "text", "transcript", "json")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "zstd"}
_ENCODED = {one.removeprefix("."): kind for kind, several in SUFFIXES.items() for one in several}
_ENCODED["data"] = "image"


def tar_source(paths: Sequence[Path]) -> Source:
    """Return the source for tars: a stream if any of them is compressed."""
    return TarStream(paths) if any(map(_compression_of, paths)) else TarSource(paths)


class _Sample(NamedTuple):
    """A sample: the number of its tar, its key, and its files by column (contents or places)."""

    tar: int
    key: str
    files: Mapping[str, Any]


class TarSource(ListedSource):
    """Samples of uncompressed tars."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.name, self.files, self.kinds = str(paths[0]), Files(paths), _ENCODED
        self.nbytes = self.files.nbytes
        self._keys: list[str] = []
        self._tars = array("q")  # the number of each sample's tar
        self._places = array("q")  # offset and size, for each sample and column
        self._odd: dict[int, Mapping[str, Any]] = {}  # the files of samples with other columns
        self._columns: list[str] = []
        for number, sample in enumerate(_samples(self.files.paths, reads=False)):
            self._columns = self._columns or list(sample.files)
            places = [sample.files.get(name, (0, 0)) for name in self._columns]
            if sample.files.keys() != {*self._columns}:
                self._odd[number] = sample.files
            self._keys.append(sample.key)
            self._tars.append(sample.tar)
            self._places.extend(itertools.chain.from_iterable(places))
        self.count = len(self._keys)

    def read(self, numbers: Int64s) -> Block:
        """Return the files of samples, decoded by their extensions."""
        with ExitStack() as stack:
            opened: dict[int, io.FileIO] = {}
            found = [self._read(number, opened, stack) for number in numbers.tolist()]
        return _block(found, self._columns, self.files.paths)

    def _read(self, number: int, opened: dict[int, io.FileIO], stack: ExitStack) -> _Sample:
        tar, files, at = self._tars[number], {}, 2 * len(self._columns) * number
        path = self.files.paths[tar]
        with reading_file(path):
            if tar not in opened:
                file = owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
                opened[tar] = stack.enter_context(file)
            for name in self._columns:
                offset, size = self._places[at : at + 2]
                files[name] = os.pread(opened[tar].fileno(), size, offset)
                at += 2
                if len(files[name]) < size:
                    raise ReadError(f"{path} was changed while it was being packed; pack it again")
        return _Sample(tar, self._keys[number], self._odd.get(number, files))


class TarStream(Source):
    """Samples of tars, some of them compressed."""

    files_are_sources = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self.name, self.files, self.kinds = str(paths[0]), Files(paths), _ENCODED

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that decode the files of samples."""
        samples = _samples(self.files.paths, reads=True)
        first = next(samples)
        columns = list(first.files)
        wanted = itertools.islice(itertools.chain([first], samples), start, None)
        for run in runs_of(wanted, self.rows, lambda one: sum(map(len, one.files.values()))):
            yield partial(_block, run, columns, self.files.paths)


def _samples(paths: Sequence[str], *, reads: bool) -> Iterator[_Sample]:
    """Yield the samples of tars with the contents of files or, unless it `reads`, their places.

    If the first sample has at most one image, a sample's only image becomes the column ``data``.
    """
    is_single = None
    for tar, path in enumerate(paths):
        for key, several in itertools.groupby(
            _members(Path(path), reads=reads), lambda one: one[0]
        ):
            files: dict[str, Any] = {}
            for _, extension, found in several:
                if extension in files:
                    raise DatasetError(f'{path}: sample "{key}" has two files of {extension}')
                files[extension] = found
            images = [name for name in files if _ENCODED.get(name) == "image"]
            is_single = len(images) < 2 if is_single is None else is_single
            names = {"cls": "labels"}
            if is_single and len(images) == 1:
                names[images[0]] = "data"
            yield _Sample(tar, key, {names.get(name, name): one for name, one in files.items()})
    if is_single is None:
        raise DatasetError(f"{paths[0]} has no samples")


class _Header(tarfile.TarInfo):
    """A header of a tar. A damaged one raises an error; tarfile would take it for the end."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not any(buf):
                raise
            raise tarfile.ReadError(f"the header is damaged ({error})") from None


def _members(path: Path, *, reads: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield the keys and extensions of files in a tar, and their contents or places."""
    tar = None
    with reading_file(path), _opened(path) as file:
        try:
            mode: Any = "r|" if reads else "r:"
            with tarfile.open(fileobj=file, mode=mode, tarinfo=_Header) as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                    parts = _PARTS.fullmatch(member.name)
                    if not member.isreg() or parts is None or _is_hidden(member.name):
                        continue
                    if member.issparse():
                        raise tarfile.ReadError(f"{member.name} is sparse")
                    found: Any = member.offset_data, member.size
                    if reads:
                        found = tar.extractfile(member).read()  # type: ignore[union-attr]
                    yield parts[1], parts[2].lower(), found
                if reads and tar.fileobj.tell() == tar.offset:
                    raise tarfile.ReadError("it is cut off")
                while reads and file.read(BLOCK_NBYTES):
                    pass  # read to the end, where the checksums of the compressed data are
        except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            where = f"at byte {tar.offset:,}, " if tar is not None else ""
            raise ReadError(f"cannot read {path}: {where}{error}; create it again") from error


def _compression_of(path: Path) -> str | None:
    """Return the module that decompresses a file, by its first bytes; None if uncompressed."""
    with reading_file(path), open(path, "rb") as file:
        head = file.read(6)
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


def _opened(path: Path) -> Any:
    compression = _compression_of(path)
    if compression == "zstd":
        with needs_package("pyarrow", "tars that are compressed by zstd"):
            import pyarrow
        return pyarrow.input_stream(str(path), compression=compression)
    return importlib.import_module(compression or "io").open(path, "rb")


def _block(samples: Sequence[_Sample], names: Sequence[str], paths: Sequence[str]) -> Block:
    """Return a block of samples with the columns `names`; samples with other columns are bad."""
    columns: dict[str, list[Any]] = {name: [] for name in names}
    bad: dict[int, str] = {}
    for place, sample in enumerate(samples):
        odd = sorted(sample.files.keys() ^ columns.keys())
        try:
            if odd:
                has = "has no" if odd[0] in columns else "has a"
                raise ValueError(f"it {has} {odd[0]}, unlike the first sample")
            values = [_decoded(name, sample.files[name]) for name in names]
        except (ValueError, OverflowError, EOFError) as error:
            bad[place] = str(error)
            continue
        for several, value in zip(columns.values(), values, strict=True):
            several.append(value)
    found: dict[str, Values] = {name: _joined(several) for name, several in columns.items()}
    found["filenames"] = [one.key for place, one in enumerate(samples) if place not in bad]
    return Block(found, len(samples), [f"{paths[one.tar]}: {one.key}" for one in samples], bad)


def _is_hidden(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.startswith(".") or (base.startswith("__") and base.endswith("__"))


def _decoded(name: str, content: bytes) -> Any:
    last = name.rpartition(".")[2]
    if last == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if last in ("labels", *_NUMBERS):
        return np.int64(int(content))
    if last in _TEXTS:
        text = content.decode("utf-8")
        if last == "json":
            json.loads(text)  # raises if it is damaged
        return text
    return content


def _joined(several: list[Any]) -> Values:
    if not several or isinstance(several[0], str | bytes):
        return several
    arrays = [np.asarray(one) for one in several]
    return np.stack(arrays) if len({one.shape for one in arrays}) == 1 else arrays
