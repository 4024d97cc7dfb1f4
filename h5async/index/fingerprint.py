"""Hashes layouts to a short text that changes when a file does.

A saved state is only valid for its data. The hash covers the sizes of files, and the paths, shapes,
dtypes and chunk shapes of datasets, but neither the values nor how they are read. So it is the same
whether a dataset is read directly or through h5py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable
from h5async.index.datasettable import Datasets, table_of
from h5async.index.layout import DatasetLayout

Int64s = NDArray[np.int64]


def fingerprint(layouts: Iterable[DatasetLayout], *also: Int64s, has_places: bool = False) -> str:
    """Hash layouts of all fields, and other arrays that the order depends on, to 32 hex digits.

    File names are left out, so that files may be moved. Sizes are those at the time of indexing.
    If it `has_places`, addresses and filters count, too, which are unknown for what h5py reads.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    for layout in layouts:
        _add_dataset(digest, layout, has_places)
        for array in (layout.spans, layout.lengths):
            if array is not None and id(array) not in seen:
                seen.add(id(array))
                _add_array(digest, array)
    for array in also:
        _add_array(digest, array)
    return digest.hexdigest()


def _add_dataset(digest: Any, layout: DatasetLayout, has_places: bool) -> None:
    """Hash a dataset, and the datasets that hold its samples."""
    stamps = [stamp for _, stamp in layout.attached] or [layout.stamp]
    stamps = [] if layout.storage == "files" else stamps  # its datasets have them
    _add(digest, [stamp.nbytes for stamp in (*stamps, *(heap.stamp for heap in layout.heaps))])
    _add_kind(digest, layout, has_places, layout.path, layout.shape)
    # (Others have segments only if they are read directly.)
    if layout.segments is not None and (has_places or layout.storage in ("virtual", "files")):
        segments, datasets = table_of(layout)
        for array in segments.columns:
            _add_array(digest, array)
        _add(digest, segments.pieces)
        _add_datasets(digest, datasets, has_places)
    elif layout.segments is None:
        if has_places:
            _add(digest, layout.offset)
            _add_chunks(digest, layout.chunks)
        for source in layout.sources:
            _add_dataset(digest, source, has_places)


def _add_datasets(digest: Any, datasets: Datasets, has_places: bool) -> None:
    columns, numbers = datasets.columns, dict[bytes, int]()
    kinds = []
    for kind in datasets.kinds:  # some differ only in the way in which they are read
        own = hashlib.blake2b(digest_size=16)
        _add_kind(own, kind, has_places, kind.row_shape)
        for source in kind.sources:
            _add_dataset(own, source, has_places)
        kinds.append(numbers.setdefault(own.digest(), len(numbers)))
    _add(digest, [one.hex() for one in numbers], columns.paths)
    nbytes = np.array([stamp.nbytes for _, stamp in columns.files], np.int64)[columns.file]
    attached = [sum(stamp.nbytes for _, stamp in kind.attached) for kind in datasets.kinds]
    of_attached = np.array(attached, np.int64)[columns.kind]
    nbytes = np.where(of_attached > 0, of_attached, nbytes)
    for array in (np.array(kinds, np.int64)[columns.kind], columns.rows, nbytes):
        _add_array(digest, array)
    if has_places:
        _add_array(digest, columns.offset)
        _add_chunks(digest, columns.chunks)


def _add_kind(digest: Any, layout: DatasetLayout, has_places: bool, *names: object) -> None:
    # (Contiguous values may be cut into units to convert them.)
    chunk_shape = () if layout.storage == "contiguous" and not has_places else layout.chunk_shape
    _add(digest, *names, _described(layout.dtype), layout.sample_axis)
    _add(digest, layout.storage, chunk_shape, layout.member)
    if layout.values is not None:
        _add_array(digest, layout.values)
    if has_places:
        _add(digest, [(entry.number, entry.parameters) for entry in layout.filters])


def _add_chunks(digest: Any, chunks: ChunkTable | None) -> None:
    if chunks is not None:
        for array in (chunks.index, chunks.offset, chunks.nbytes, chunks.filter_mask):
            if array is not None:
                _add_array(digest, array)


def _described(dtype: np.dtype[Any]) -> object:
    """Return a unique description of a dtype that is the same in any version of NumPy."""
    try:
        return dtype.descr
    except ValueError:  # members are out of order, or overlap
        pass
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _described(base), shape
    fields = dtype.fields
    assert fields is not None, "every other dtype has a description"
    members = [(name, *fields[name][:2]) for name in dtype.names or ()]
    return dtype.itemsize, [(name, at, _described(member)) for name, member, at in members]


def _add(digest: Any, *values: object) -> None:
    digest.update(repr(values).encode())


def _add_array(digest: Any, array: NDArray[Any]) -> None:
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
