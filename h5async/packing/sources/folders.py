"""Lists folders of images and of audio: folders enter; bytes of files and their classes leave.

Classes are the sorted names of the folders below, and files are sorted within a class, as by
torchvision's ``ImageFolder``. A folder without folders has no labels.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, ReadError
from h5async.packing.schema import Block, Values
from h5async.packing.sources.base import Int64s, ListedSource, digest_of, reading_file

SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    "audio": (".wav", ".flac", ".ogg", ".aiff", ".aif"),
}


class FolderSource(ListedSource):
    """Files of folders, with classes where they are in folders of these; `kind` is theirs."""

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
                what = "would be a class, and has" if classes else "has"
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
        """Return a digest of the names, sizes and times of all files, and of the classes."""
        return digest_of([self.name, self.classes, *self._files])

    def read(self, numbers: Int64s) -> Block:
        """Return the bytes of files."""
        listed = [self._files[number] for number in numbers.tolist()]
        entries = [(os.path.join(self.name, name), size, time) for name, size, time in listed]
        columns: dict[str, Values] = {"data": _contents(entries)}
        if self._labels is not None:
            columns["labels"] = self._labels[numbers]
        columns["filenames"] = [name for name, _, _ in listed]
        return Block(columns, len(entries), [path for path, _, _ in entries])


class _Listing(Sequence[tuple[str, int, int]]):
    """Names, sizes and times of files, in a few bytes each: there may be millions."""

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
    """List the files of a folder, if there is one, and those below; by their paths below `base`."""
    with reading_file(folder):  # (Names are listed below, one folder's at a time.)
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
    """Return the bytes of files, which lie one behind the other; raises like `_read`."""
    ends = list(itertools.accumulate((size for _, size, _ in entries), initial=0))
    memory = np.empty(ends[-1], np.uint8)
    views = [memory[begin:end] for begin, end in itertools.pairwise(ends)]
    for entry, view in zip(entries, views, strict=True):
        _read(*entry, view)
    return views


def _read(path: str, nbytes: int, changed: int, view: NDArray[np.uint8]) -> None:
    """Read a file; ReadError if it is not as it was when it was listed."""
    with reading_file(path), open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        is_same = (stat.st_size, stat.st_mtime_ns) == (nbytes, changed)
        if is_same and file.readinto(view.data) == nbytes:
            return
    raise ReadError(f"{path} was changed while it was packed; pack it again")
