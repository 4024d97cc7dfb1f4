"""Opens files again, each for one thread, to read items that the core refused, and makes errors.

The number of one of the core's sources enters; its open file leaves, in a state that is known to
hold what was indexed. Other programs may change a file meanwhile: reading goes on if it still holds
that. An item that cannot be read, and the core's reason, become an error that names file, dataset,
and chunk, samples or element.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.core.binding import CANNOT_MAP, IS_REPLACED, Core
from h5async.errors import DamagedError, H5AsyncError, ReadError
from h5async.index.changes import FileChanges
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.storedtypes import DAMAGED as DAMAGED_HEAP
from h5async.io.source import FileStamp, changed, lies_at, replaced, settled
from h5async.read.coretables import CoreTables
from h5async.spelling import named
from h5async.system.interruptions import interruption, suppressing

DAMAGED = "; the file is damaged there: restore it, or leave these samples out"
_TRIES = 5  # to read part of a batch without the file changing meanwhile


class FileEventError(Exception):
    """The data read are invalid: the file has changed, or a page of its map cannot be read."""

    def __init__(self, map_failed: bool = False) -> None:
        super().__init__()
        self.map_failed = map_failed


class OpenSource(NamedTuple):
    """A source, open for one thread."""

    number: int
    path: str
    file: Any  # the core's `File`
    stamp: FileStamp  # the state that is known to hold what was indexed
    has_swmr_writer: bool  # the file changes all the time

    @property
    def has_changed(self) -> bool:
        """Whether the file has changed since the stamp, except by SWMR."""
        return self.file.nbytes >= 0 and FileStamp.of(self.file.fd) != self.stamp

    @property
    def has_name(self) -> bool:
        """Whether the file still exists where it was opened, or where it was moved to."""
        path = self.path
        with suppressing(OSError):  # not Linux
            path = os.readlink(f"/proc/self/fd/{self.file.fd}")
        return lies_at(path, self.stamp)


class Rereader:
    """Reads sources of the core again. Safe to use from many threads.

    `changes` checks whether changed files still hold what was indexed; None: a changed file is an
    error. So it is for variable-length values, whose places cannot be checked.
    """

    def __init__(self, core: Core, tables: CoreTables, changes: FileChanges | None) -> None:
        self._core, self._tables, self._changes = core, tables, changes
        self._looking = threading.Lock()

    def read(self, number: int, work: Callable[[Any, bool], None]) -> None:
        """Call `work`, which reads from a source, until the file was the same before and after it.

        `work` gets the core's `File`, and whether a writer changes it all the time; it is called
        again if the file changed meanwhile but still holds what was indexed. It raises
        `FileEventError` if it notices a change. `ReadError` is raised if the file cannot be opened,
        was replaced, or no longer holds what was indexed.
        """
        for _ in range(_TRIES):
            with self.opened(number) as source:
                try:
                    work(source.file, False)
                    if not source.has_changed:
                        return
                except FileEventError as event:
                    if event.map_failed:
                        self._tables.stop_mapping(number)
                except H5AsyncError as error:
                    if interruption(error) is not None or not source.has_changed:
                        raise
                self._look(source)
        self._read_beside_a_writer(number, work)

    def _read_beside_a_writer(self, number: int, work: Callable[[Any, bool], None]) -> None:
        """Read from a file that changes all the time, and check it only afterwards."""
        with self.opened(number) as source:
            source.file.nbytes = -1 if source.has_swmr_writer else -2  # turns off the comparison
            try:
                work(source.file, True)
            except FileEventError as event:
                why = "a page of its memory map cannot be read"
                raise changed(source.path, why) from event
            except H5AsyncError as error:
                self._look(source)
                raise changed(source.path, f"it is written to all the time ({error})") from error
            self._look(source)

    def _look(self, source: OpenSource) -> None:
        """Check that a changed file still holds what was indexed; other threads wait meanwhile."""
        number, path, file, stamp, has_swmr_writer = source
        with self._looking:
            now, known = FileStamp.of(file.fd), self._tables.files[number]
            if known.stamp != stamp or now == stamp:
                return
            if not now.has_content_of(stamp):
                now = settled(partial(FileStamp.of, file.fd))
            # Removing a file changes no more than its status.
            if not now.has_content_of(stamp) or source.has_name:
                if self._changes is None or known.is_heap:
                    raise changed(path, "it may not hold what was indexed any more")
                name = f"{'/proc/self' if sys.platform == 'linux' else '/dev'}/fd/{file.fd}"
                self._changes.look_at(path, stamp, now, open_name=name, may_grow=has_swmr_writer)
            self._tables.restamp(path, now, is_heap=known.is_heap)

    @contextmanager
    def opened(self, number: int) -> Iterator[OpenSource]:
        """Open a source; `ReadError` if it cannot be opened or mapped, or was replaced."""
        file = self._core.File(fd=-1)
        with self._looking:
            stamp, path = self._tables.files[number].stamp, self._tables.files[number].path
        try:
            # (`file` owns what is opened before a signal handler can raise anything.)
            why = self._core.open_again(self._tables.sources, number, ctypes.byref(file))
            if why:
                raise _refusal(path, why, file, stamp)
            yield OpenSource(number, path, file, stamp, file.nbytes < 0)
        finally:
            self._core.close_again(ctypes.byref(file))


def _refusal(path: str, why: int, file: Any, stamp: FileStamp) -> ReadError:
    if why == IS_REPLACED:
        return replaced(path)
    if why != CANNOT_MAP:
        return ReadError(f"cannot open {path}: {os.strerror(why)}")
    if stamp.nbytes and not FileStamp.of(file.fd).nbytes:
        return changed(path, "it was cut short, and is empty now")
    return ReadError(
        f"{path} cannot be mapped into memory: {os.strerror(file.error)}; read it with"
        f" {named('io', 'pread')}"
    )


class Reason(IntEnum):
    """Why an item cannot be read; src/common.h has the same numbers, and others for heaps."""

    WRONG_SIZE = 2
    DAMAGED = 3
    NO_ROOM = 4
    NOT_MAPPED = 5
    ABOVE_LIMIT = 6
    HEAP_NUL = 17


# Messages about a collection of a global heap, by reason.
_HEAPS = {
    7: "cannot be: its address or the index of the object is too large",
    8: "would end beyond the {expected} bytes of the file",
    9: "has no signature",
    10: "is of version {found}, not {expected}",
    11: "cannot have {found} bytes in a file of {expected} bytes",
    12: "has {found} free bytes, instead of {expected}",
    13: "ends before object {found}",
    14: "has two objects {found}",
    15: "has no object {found}",
    16: "has {found} bytes in object {filter}, instead of {expected}",
}


class Place(NamedTuple):
    """Rows of a field in the memory of a batch, or, if `are_runs`, numbers of runs of rows."""

    field: int
    rows: NDArray[np.int64]
    are_runs: bool = False


class Extent(NamedTuple):
    """The place of an item in its file: a chunk, or row 0 of contiguous rows, with 0 bytes.

    `samples` are the first and the last wanted row of the dataset; None if unknown.
    """

    offset: int
    nbytes: int
    samples: tuple[int, int] | None


class Chunk(NamedTuple):
    """A chunk of a dataset: its number in the grid."""

    layout: DatasetLayout
    number: int


def find_chunk(layout: DatasetLayout, path: str, extent: Extent) -> Chunk | DatasetLayout | None:
    """Return the chunk of a field, or the dataset without chunks, at a place in a file."""
    for leaf in layout.leaves():
        if leaf.file != path:
            continue
        if leaf.offset == extent.offset and not leaf.chunk_shape:
            return leaf
        if leaf.chunks is not None:
            found = (leaf.chunks.offset == extent.offset).nonzero()[0]
            if found.size:
                index = leaf.chunks.index
                return Chunk(leaf, int(found[0] if index is None else index[found[0]]))
    return None


def error_of(
    failure: Any,
    path: str,
    file: Any,
    extent: Extent,
    found: Chunk | DatasetLayout | None,
) -> ReadError:
    """Return the error for an item in a chunk or in contiguous rows."""
    reason, what, kind = failure.reason, _unreadable(path, file, extent), ReadError
    filters = found.layout.filters if isinstance(found, Chunk) else ()
    if reason in (Reason.WRONG_SIZE, Reason.DAMAGED, Reason.NO_ROOM):
        what = decoding_error(failure, filters) + DAMAGED
        kind = ReadError if reason == Reason.NO_ROOM else DamagedError
    elif reason == Reason.NOT_MAPPED:
        what = f"{path}: a page of its memory map cannot be read"
    if not isinstance(found, Chunk):
        of_which, dataset = "", None
        if found is not None:
            of_which, dataset = f'dataset "{found.path}"', found.path
        if extent.samples is not None:
            of_which += f", samples {extent.samples[0]} to {extent.samples[1]}"
        text = f"{what} ({of_which.removeprefix(', ')})" if of_which else what
        return kind(text, filename=path, dataset=dataset)
    layout, axis = found.layout, found.layout.sample_axis
    cell = np.unravel_index(found.number, layout.grid)
    corner = tuple(int(at) * size for at, size in zip(cell, layout.chunk_shape, strict=True))
    last = min(corner[axis] + layout.chunk_shape[axis], layout.num_samples) - 1
    return kind(
        f'{layout.file}: dataset "{layout.path}", chunk {corner} (samples {corner[axis]} to'
        f" {last}), {extent.nbytes} bytes at byte {extent.offset}: {what}",
        filename=layout.file,
        dataset=layout.path,
    )


def decoding_error(failure: Any, filters: tuple[Filter, ...]) -> str:
    """Say why the core could not decode a chunk."""
    label = filters[failure.filter].label if 0 <= failure.filter < len(filters) else None
    if failure.reason == Reason.WRONG_SIZE:
        by = f"{label}: " if label else ""
        return f"{by}expected {failure.expected} bytes, got {failure.found}"
    if failure.reason == Reason.DAMAGED:
        least = f" to {failure.expected} bytes" if failure.expected >= 0 else ""
        return f"{label}: cannot be decoded{least}"
    return f"expected at most {failure.expected} bytes, got {failure.found}"


def error_of_element(failure: Any, path: str, file: Any, heap: HeapFile) -> ReadError:
    """Return the error for a variable-length element."""
    where = f"{heap.elements.where}, element {failure.extent}"
    kind: type[ReadError] = DamagedError
    words = _HEAPS.get(failure.reason)
    if failure.reason == Reason.HEAP_NUL:
        what = f"the string has a NUL byte, where HDF5 would end it{DAMAGED_HEAP}"
    elif words is None:
        what, kind = _unreadable(path, file, Extent(-1, 0, None)), ReadError
    else:
        values = {name: getattr(failure, name) for name in ("expected", "found", "filter")}
        what = (
            f"the heap collection at byte {failure.at}, where its values should lie,"
            f" {words.format(**values)}{DAMAGED_HEAP}"
        )
    return kind(f"{where}: {what}", filename=heap.file, dataset=heap.path)


def _unreadable(path: str, file: Any, extent: Extent) -> str:
    if file.error:
        why = os.strerror(file.error)
        return f"{path}: reading at byte {file.failed_at} failed: {why}"
    at = file.failed_at if file.failed_at >= 0 else extent.offset + extent.nbytes
    size = file.nbytes if file.is_far else FileStamp.of(file.fd).nbytes
    return (
        f"{path} ends at byte {size}, before byte {at}: it was cut short after it had been opened"
    )
