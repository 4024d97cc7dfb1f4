"""Lists folders of images and of audio: a folder enters; bytes of files and their classes leave.

Classes are the sorted names of the folders below, and files are sorted within a class, as by
torchvision's ``ImageFolder``. A folder without folders has no labels.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError, ReadError
from h5async.io.localfiles import owned
from h5async.packing.schema import Block, Values
from h5async.packing.sources.base import Int64s, ListedSource, digest_of, reading_file

SUFFIXES = {
    "image": (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    "audio": (".wav", ".flac", ".ogg", ".aiff", ".aif"),
}


class FolderSource(ListedSource):
    """Files of a folder, with classes where they are in folders of it; `kind` is theirs."""

    def __init__(self, folder: Path, kind: str) -> None:
        suffixes = SUFFIXES[kind]
        self.name, self.kinds = str(folder), {"data": kind}
        with reading_file(self.name):
            classes = sorted(one.name for one in os.scandir(folder) if one.is_dir())
            listed = [_listed(str(folder / one), suffixes) for one in classes or [""]]
        empty = [one for one, files in zip(classes, listed, strict=False) if not files]
        if empty:
            raise DatasetError(
                f'{folder}: the folder "{empty[0]}" would be a class, and has no file that ends in'
                f" {', '.join(suffixes)}; remove it, or give another folder"
            )
        self._entries = [entry for files in listed for entry in files]
        self._labels: Int64s | None = None
        self.count = len(self._entries)
        self.nbytes = sum(size for _, size, _ in self._entries)
        if classes:
            counts = [len(files) for files in listed]
            self._labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
            self.classes = {"labels": classes}

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of all files, and of the classes."""
        return digest_of([self.classes, *self._entries])

    def read(self, numbers: Int64s) -> Block:
        """Return the bytes of files."""
        entries = [self._entries[number] for number in numbers.tolist()]
        columns: dict[str, Values] = {"data": _contents(entries)}
        if self._labels is not None:
            columns["labels"] = self._labels[numbers]
        columns["filenames"] = [os.path.relpath(path, self.name) for path, _, _ in entries]
        return Block(columns, len(entries), [path for path, _, _ in entries])


def _listed(folder: str, suffixes: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Return the files of a folder and those below: path, size and time."""
    found = []
    for root, _, names in sorted(os.walk(folder, onerror=_raise, followlinks=True)):
        for name in sorted(names):
            if name.lower().endswith(suffixes):
                path = os.path.join(root, name)
                stat = os.stat(path)
                found.append((path, stat.st_size, stat.st_mtime_ns))
    return found


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
    with reading_file(path), owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC) as file:
        stat = os.fstat(file.fileno())
        if (stat.st_size, stat.st_mtime_ns) == (nbytes, changed):
            done = 0
            while done < nbytes and (count := os.preadv(file.fileno(), [view[done:].data], done)):
                done += count
            if done == nbytes:
                return
    raise ReadError(f"{path} was changed while it was packed; pack it again")
