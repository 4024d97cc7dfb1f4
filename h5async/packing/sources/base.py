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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, H5AsyncError, ReadError
from h5async.packing.schema import Block
from h5async.spelling import named

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
    If `files_are_sources`, some of them could be packed alone.
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
    notes: Sequence[str] = ()

    @abstractmethod
    def digest(self) -> str:
        """Return what differs if the source would give other samples."""

    @abstractmethod
    def work(self, start: int, order: Callable[[Int64s], Int64s] | None) -> Iterator[Work]:
        """Yield functions that return the blocks of all samples from position `start` on.

        `order` maps positions to samples, if they are not packed in order.
        """


class ListedSource(Source):
    """A source that can read any of its samples: `read` does, in any thread."""

    count: int

    @abstractmethod
    def read(self, numbers: Int64s) -> Block:
        """Return the samples of these numbers, in this order."""

    def work(self, start: int, order: Callable[[Int64s], Int64s] | None) -> Iterator[Work]:
        """Yield functions that return blocks, in order or by `order`."""
        for first in range(start, self.count, self.rows):
            numbers = np.arange(first, min(first + self.rows, self.count), dtype=np.int64)
            yield partial(self.read, numbers if order is None else order(numbers))


class StreamedSource(Source):
    """A source that is read from its beginning: `blocks` yields functions that return blocks."""

    @abstractmethod
    def blocks(self, start: int) -> Iterator[Work]:
        """Yield functions that return the blocks from position `start` on."""

    def work(self, start: int, order: Callable[[Int64s], Int64s] | None) -> Iterator[Work]:
        """Yield functions that return blocks; ConfigError if these must have another order."""
        require_in_order(self.name, order)
        return self.blocks(start)


def require_in_order(name: str, order: object) -> None:
    """Raise ConfigError if samples that can only be read in order must have another one."""
    if order is not None:
        raise ConfigError(
            f"{name} can only be read in order; pack it without {named('shuffle')}, and shuffle"
            " the file by h5async repack --shuffle full, or let the reader shuffle"
        )


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
