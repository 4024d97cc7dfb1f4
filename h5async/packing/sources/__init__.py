"""Defines what a source of samples is: it lists what it has, and makes blocks of samples.

A source says how many samples it has, if it knows, and what it consists of, by a digest. It yields
functions that return blocks, which threads call; the blocks are packed in that order.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.errors import H5AsyncError, ReadError
from h5async.packing.schema import Block

T = TypeVar("T")
Int64s = NDArray[np.int64]
Work = Callable[[], Block]
BLOCK_NBYTES = 4 << 20  # of a block, about, if its size is known before


class Files:
    """Files of a source, which must not change meanwhile."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [os.path.abspath(path) for path in paths]
        self._stamps = [_stamp(path) for path in self.paths]

    @property
    def nbytes(self) -> int:
        """The size of all of them."""
        return sum(size for size, _ in self._stamps)

    def digest(self) -> str:
        """Return what differs if a file is another one."""
        return digest_of(zip(self.paths, self._stamps, strict=True))

    def check(self) -> None:
        """Raise ReadError if a file has changed."""
        for path, stamp in zip(self.paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise ReadError(f"{path} was changed while it was packed; pack it again")


class Source(ABC):
    """Samples to pack.

    `name` is for messages; `count` is the number of samples, or None; `rows` is how many make a
    block; `nbytes` is the size of the samples as they are, about, or None.
    `kinds` are those of columns of encoded samples: ``image`` or ``audio``. `classes` are the names
    of integers, by column. `once` are datasets that the file has once, by name: arrays, or lists of
    strings. `files` must not change meanwhile. `notes` say what is left out.
    If `files_are_sources`, some of them could be packed alone. If it `is_in_order`, it can only be
    read from the beginning; else `order` may map positions to samples.
    """

    name = ""
    count: int | None = None
    nbytes: int | None = None
    rows = 64
    kinds: Mapping[str, str] = {}
    classes: Mapping[str, Sequence[str]] = {}
    once: Mapping[str, Sequence[Any] | NDArray[Any]] = {}
    files = Files([])
    files_are_sources = False
    is_in_order = True
    order: Callable[[Int64s], Int64s] | None = None
    notes: Sequence[str] = ()

    def digest(self) -> str:
        """Return what differs if the source would give other samples: of files, by default."""
        return self.files.digest()

    @abstractmethod
    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that return the blocks of all samples from position `start` on."""


class ListedSource(Source):
    """A source that can read any of its samples: `read` does, in any thread."""

    count: int
    is_in_order = False

    @abstractmethod
    def read(self, numbers: Int64s) -> Block:
        """Return the samples of these numbers, in this order."""

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that return blocks, in order or by `order`."""
        for first in range(start, self.count, self.rows):
            numbers = np.arange(first, min(first + self.rows, self.count), dtype=np.int64)
            yield partial(self.read, numbers if self.order is None else self.order(numbers))


def runs_of(items: Iterable[T], rows: int, nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of items: `rows` of them, or fewer if these have many bytes."""
    found, nbytes = list[T](), 0
    for one in items:
        found.append(one)
        nbytes += nbytes_of(one)
        if len(found) == rows or nbytes > BLOCK_NBYTES:
            yield found
            found, nbytes = [], 0
    if found:
        yield found


def as_slice(numbers: Int64s) -> slice | Int64s:
    """Return numbers of samples as a slice, if they follow each other."""
    is_run = bool((np.diff(numbers) == 1).all())
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if is_run else numbers


def digest_of(parts: Iterable[object]) -> str:
    """Return a digest of the texts of objects."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(repr(part).encode("utf-8", "surrogateescape") + b"\n")
    return found.hexdigest()


@contextmanager
def reading_file(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a ReadError that names the file."""
    try:
        yield
    except H5AsyncError:
        raise
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error.strerror or error}") from error


def _stamp(path: str) -> tuple[int, int]:
    with reading_file(path):
        found = os.stat(path)
    return found.st_size, found.st_mtime_ns
