"""Lists samples in tars, as WebDataset has them: tars enter; a column for each extension leaves.

A sample is a run of files with the same name up to the first dot. Images are the column ``data``,
``.cls`` is ``labels``, and the names are ``filenames``; other columns are named by extension.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from h5async.errors import DatasetError, ReadError
from h5async.packing.schema import Block, Values
from h5async.packing.sources.base import Files, Int64s, ListedSource, reading_file
from h5async.packing.sources.folders import SUFFIXES

_PARTS = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # as webdataset decodes them
_TEXTS = ("txt", "text", "transcript", "json")
_ABSENT = -1


class TarSource(ListedSource):
    """Samples of uncompressed tars."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.name, self.files = str(paths[0]), Files(paths)
        self.nbytes = self.files.nbytes
        self._keys: list[str] = []
        self._tars = array("q")  # of each sample
        self._places: dict[str, array[int]] = {}  # of each column: offsets and sizes of samples
        for number, path in enumerate(paths):
            self._list(number, path)
        self.count = len(self._keys)
        if not self.count:
            raise DatasetError(f"{self.name} has no samples")
        encoded = {"data": "image", **dict.fromkeys(map(_bare, SUFFIXES["audio"]), "audio")}
        self.kinds = {name: kind for name, kind in encoded.items() if name in self._places}

    def _list(self, number: int, path: Path) -> None:
        last = None
        with reading_file(path):
            try:
                with tarfile.open(path, "r:") as tar:
                    for member in tar:
                        parts = _PARTS.fullmatch(member.name)
                        if not member.isreg() or parts is None or _is_hidden(member.name):
                            continue
                        if member.issparse():
                            raise ReadError(
                                f"cannot read {path}: {member.name} is sparse; make the tar anew"
                            )
                        if parts[1] != last:
                            last = parts[1]
                            self._keys.append(last)
                            self._tars.append(number)
                        self._add(_column_of(parts[2].lower()), member)
                    end = tar.offset
                with open(path, "rb") as file:  # tarfile also ends at a header that is damaged
                    file.seek(end)
                    if any(file.read(tarfile.BLOCKSIZE)):
                        raise ReadError(
                            f"cannot read {path}: the header at byte {end:,} is damaged; copy or"
                            " make it anew"
                        )
            except tarfile.TarError as error:
                raise ReadError(
                    f"cannot read {path}: {error}; it must be a tar that is not compressed"
                ) from error

    def _add(self, column: str, member: tarfile.TarInfo) -> None:
        places = self._places.setdefault(column, array("q"))
        places.extend([_ABSENT] * (2 * len(self._keys) - len(places)))
        if places[-1] != _ABSENT:
            raise DatasetError(f'{self.name}: sample "{self._keys[-1]}" has two files of {column}')
        places[-2:] = array("q", [member.offset_data, member.size])

    def digest(self) -> str:
        """Return a digest of the tars' names, sizes and times."""
        return self.files.digest()

    def read(self, numbers: Int64s) -> Block:
        """Return the files of samples, decoded by their extensions."""
        columns: dict[str, list[Any]] = {name: [] for name in self._places}
        bad: dict[int, str] = {}
        opened: dict[int, io.FileIO] = {}
        try:
            for place, number in enumerate(numbers.tolist()):
                tar = self._tars[number]
                if tar not in opened:
                    with reading_file(self.files.paths[tar]):
                        opened[tar] = io.FileIO(self.files.paths[tar])
                try:
                    values = [self._value(opened[tar], name, number) for name in columns]
                except (ValueError, OverflowError, EOFError) as error:
                    bad[place] = str(error)
                    continue
                for several, value in zip(columns.values(), values, strict=True):
                    several.append(value)
        finally:
            for file in opened.values():
                file.close()
        keys = [self._keys[number] for number in numbers.tolist()]
        kept = [key for place, key in enumerate(keys) if place not in bad]
        names = [f"{self.files.paths[self._tars[n]]}: {self._keys[n]}" for n in numbers.tolist()]
        found: dict[str, Values] = {name: _joined(several) for name, several in columns.items()}
        return Block({**found, "filenames": kept}, len(keys), names, bad)

    def _value(self, file: io.FileIO, name: str, number: int) -> Any:
        places = self._places[name]
        offset, size = places[2 * number : 2 * number + 2] or (_ABSENT, 0)
        if offset == _ABSENT:
            raise ValueError(f"it has no {name}, as other samples have")
        content = os.pread(file.fileno(), size, offset)
        if len(content) < size:
            raise ValueError(f"its {name} is cut off")
        return _decoded(name, content)


def _is_hidden(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.startswith(".") or (base.startswith("__") and base.endswith("__"))


def _column_of(extension: str) -> str:
    last = extension.rpartition(".")[2]
    if f".{last}" in SUFFIXES["image"]:
        return "data" if last == extension else extension
    return "labels" if extension == "cls" else extension


def _decoded(name: str, content: bytes) -> Any:
    last = name.rpartition(".")[2]
    if last == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if last in ("labels", *_NUMBERS):
        return np.int64(int(content))
    if last in _TEXTS:
        text = content.decode("utf-8")
        if last == "json":
            json.loads(text)  # or it is damaged
        return text
    return content


def _joined(several: list[Any]) -> Values:
    if not several or isinstance(several[0], str | bytes):
        return several
    arrays = [np.asarray(one) for one in several]
    return np.stack(arrays) if len({one.shape for one in arrays}) == 1 else arrays


def _bare(suffix: str) -> str:
    return suffix.removeprefix(".")
