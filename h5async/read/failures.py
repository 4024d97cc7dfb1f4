"""Makes errors of the core's failures.

The reason that the core gives, the item that it concerns and its field enter; an error leaves that
names file, dataset, and chunk, samples or element.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import Filter
from h5async.errors import DamagedError, ReadError
from h5async.index.layout import DatasetLayout, HeapFile
from h5async.index.variablelength import DAMAGED as DAMAGED_HEAP
from h5async.io.stamps import FileStamp

DAMAGED = "; the file is damaged there: restore it, or leave these samples out"


class Reason(IntEnum):
    """Why an item cannot be read; src/common.h has the same numbers, and others for heaps."""

    WRONG_SIZE = 2
    DAMAGED = 3
    NO_ROOM = 4
    NOT_MAPPED = 5
    ABOVE_LIMIT = 6
    HEAP_NUL = 17


# What is wrong with a collection of a heap, by reason.
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
    """Rows of a field in the memory of a batch; if they `are_runs`, runs of rows, by number."""

    field: int
    rows: NDArray[np.int64]
    are_runs: bool = False


class Extent(NamedTuple):
    """Where an item's bytes lie in its file: a chunk; of contiguous rows, row 0 and 0 bytes.

    `samples` are the first and the last row of the dataset that are wanted; None if not known.
    """

    offset: int
    nbytes: int
    samples: tuple[int, int] | None


class Chunk(NamedTuple):
    """A chunk of a dataset: its number in the grid."""

    layout: DatasetLayout
    number: int


def find_chunk(layout: DatasetLayout, path: str, extent: Extent) -> Chunk | DatasetLayout | None:
    """Return the chunk of a field, or its dataset without chunks, at a place of a file."""
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
    """Return the error of an item in a chunk, or in contiguous rows."""
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
    """Return the error of an element of variable length."""
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
