"""Lists folders of images and of audio: a folder enters; encoded samples and their classes leave.

Classes are the sorted names of the folders below, and files are sorted within a class, as by
torchvision's ``ImageFolder``. A folder without folders has no labels.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from h5async.errors import DatasetError, ReadError
from h5async.pack.encodedsamples import Samples
from h5async.pack.schema import Block, Values
from h5async.pack.sources.source import Int64s, ListedSource, digest_of, reading_file

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
AUDIO = (".wav", ".flac", ".ogg", ".aiff", ".aif")


class FolderSource(ListedSource):
    """Files of a folder, with classes where they are in folders of it.

    `suffixes` are those of the files, and `samples` makes what is stored of their bytes.
    """

    def __init__(self, folder: Path, suffixes: tuple[str, ...], samples: Samples) -> None:
        self.name = str(folder)
        self._samples = samples
        self.kinds = {"data": samples.kind}
        self.rows = samples.rows
        with reading_file(self.name):
            classes = sorted(one.name for one in os.scandir(folder) if one.is_dir())
            listed = [_listed(str(folder / one), suffixes) for one in classes or [""]]
        empty = [one for one, files in zip(classes, listed, strict=False) if not files]
        if empty:
            raise DatasetError(
                f'{folder}: there is no {samples.what} in the folder "{empty[0]}", which would be a'
                f" class; remove it, or name another folder. {samples.what.capitalize()}s end in"
                f" {', '.join(suffixes)}"
            )
        self._entries = [entry for files in listed for entry in files]
        self._labels: Int64s | None = None
        self.count = len(self._entries)
        self.nbytes = sum(size for _, size, _ in self._entries)
        if not self.count:
            raise DatasetError(f"{folder}: there is no file that ends in {', '.join(suffixes)}")
        if classes:
            counts = [len(files) for files in listed]
            self._labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
            self.once = {"classes": classes}

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of all files, and of what is stored."""
        return digest_of([self._samples.digest, self.once, *self._entries])

    def read(self, numbers: Int64s) -> Block:
        """Return encoded files, or what is made of them."""
        entries = [self._entries[number] for number in numbers.tolist()]
        values, refused, converted = self._samples.made([_content(*entry) for entry in entries])
        kept = [place for place in range(len(entries)) if place not in refused]
        columns: dict[str, Values] = {"data": values}
        if self._labels is not None:
            columns["labels"] = self._labels[numbers[kept]]
        columns["filenames"] = [os.path.relpath(entries[at][0], self.name) for at in kept]
        bad = [(entries[place][0], reason) for place, reason in refused.items()]
        return Block(columns, len(entries), bad, converted)


def _listed(folder: str, suffixes: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Return the files of a folder and those below: path, size and time."""
    found = []
    for root, _, names in sorted(os.walk(folder, followlinks=True)):
        for name in sorted(names):
            if name.lower().endswith(suffixes):
                path = os.path.join(root, name)
                stat = os.stat(path)
                found.append((path, stat.st_size, stat.st_mtime_ns))
    return found


def _content(path: str, nbytes: int, changed: int) -> bytes:
    """Return the bytes of a file; ReadError if it is not as it was when it was listed."""
    with reading_file(path), open(path, "rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        if (stat.st_size, stat.st_mtime_ns) == (nbytes, changed):
            content = file.read(nbytes + 1)
            if len(content) == nbytes:
                return content
    raise ReadError(f"{path} was changed while it was packed; pack it again")
