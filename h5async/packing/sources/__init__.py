"""Defines sources of samples, which list their samples and make blocks of them.

A source has a number of samples, if known, and a digest that identifies its content. It yields
functions that return blocks; threads call them, and the blocks are packed in the order yielded.
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
BLOCK_NBYTES = 4 << 20  # approximate size of a block, if sizes are known in advance


class Files:
    """Files of a source, which must not change while they are packed."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [os.path.abspath(path) for path in paths]
        self._stamps = [_stamp(path) for path in self.paths]

    @property
    def nbytes(self) -> int:
        """The total size."""
        return sum(size for size, _ in self._stamps)

    def digest(self) -> str:
        """Return a digest of paths, sizes and modification times."""
        return digest_of(zip(self.paths, self._stamps, strict=True))

    def check(self) -> None:
        """Raise ReadError if a file has changed."""
        for path, stamp in zip(self.paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise ReadError(f"{path} was changed while it was being packed; pack it again")


class Source(ABC):
    """Samples to pack.

    `name` is for messages; `count` is the number of samples, or None; `rows` is the number of
    samples per block; `nbytes` is the approximate size of the samples in the source, or None.
    `kinds` maps columns of encoded samples to ``image`` or ``audio``; `classes` maps columns of
    integers to class names. `once` has datasets that exist once per file, by name: arrays, or lists
    of strings. `files` must not change meanwhile. `notes` lists what is left out.
    If `files_are_sources`, any subset of them can be packed alone. If `is_in_order`, the source can
    only be read sequentially; otherwise `order` may map positions to samples.
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
        """Return a digest that changes if the samples may: by default, that of the files."""
        return self.files.digest()

    @abstractmethod
    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that return blocks of samples, from position `start` on."""


class ListedSource(Source):
    """A source with random access: `read` returns any of its samples, in any thread."""

    count: int
    is_in_order = False

    @abstractmethod
    def read(self, numbers: Int64s) -> Block:
        """Return the samples with these numbers, in this order."""

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that return blocks, in the order given by `order`, if any."""
        for first in range(start, self.count, self.rows):
            numbers = np.arange(first, min(first + self.rows, self.count), dtype=np.int64)
            yield partial(self.read, numbers if self.order is None else self.order(numbers))


def runs_of(items: Iterable[T], rows: int, nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of `rows` items, or fewer if these exceed `BLOCK_NBYTES`."""
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
    """Return sample numbers as a slice if they are consecutive."""
    is_run = bool((np.diff(numbers) == 1).all())
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if is_run else numbers


def digest_of(parts: Iterable[object]) -> str:
    """Return a digest of the representations of objects."""
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
