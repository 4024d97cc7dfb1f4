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

from h5async.index.layout import DatasetLayout
from h5async.index.slabs import Selection, Slab

Int64s = NDArray[np.int64]


def fingerprint(layouts: Iterable[DatasetLayout], *also: Int64s, has_places: bool = False) -> str:
    """Hash layouts to 32 hexadecimal digits.

    File names are left out, so that files may be moved. Sizes are those at the time of indexing.

    Parameters
    ----------
    layouts
        Of all fields.
    also
        Other arrays that the order of samples depends on.
    has_places
        Whether to include addresses and filters. These depend on how a dataset is read: they are
        unknown for h5py.
    """
    digest, seen = hashlib.blake2b(digest_size=16), dict[int, int]()
    for layout in layouts:
        _add_dataset(digest, layout, seen, has_places)
        for array in (layout.spans, layout.lengths):
            if array is not None and id(array) not in seen:
                seen[id(array)] = len(seen)
                _add_array(digest, array)
    for array in also:
        _add_array(digest, array)
    return digest.hexdigest()


def _add_dataset(
    digest: Any, layout: DatasetLayout, seen: dict[int, int], has_places: bool
) -> None:
    """Hash a dataset and its parts' datasets; one that was `seen` before, by its number."""
    if id(layout) in seen:
        _add(digest, seen[id(layout)])
        return
    seen[id(layout)] = len(seen)
    stamps = [stamp for _, stamp in layout.attached] or [layout.stamp]
    stamps = [] if layout.storage == "files" else stamps  # its parts have them
    _add(digest, [stamp.nbytes for stamp in (*stamps, *(heap.stamp for heap in layout.heaps))])
    _add(digest, layout.path, layout.shape, _described(layout.dtype), layout.sample_axis)
    _add(digest, layout.storage, layout.chunk_shape, layout.member)
    if layout.values is not None:
        _add_array(digest, layout.values)
    if has_places:
        _add_places(digest, layout)
    if has_places or layout.storage in ("virtual", "files"):  # others have parts if read directly
        for part in layout.parts:
            selections = _selected(part.samples), _selected(part.source_samples)
            _add(digest, *selections, part.region, part.source_region, part.member)
            _add_dataset(digest, part.source, seen, has_places)
        for source in () if layout.parts else layout.sources:
            _add_dataset(digest, source, seen, has_places)


def _add_places(digest: Any, layout: DatasetLayout) -> None:
    _add(digest, layout.offset, [(entry.number, entry.parameters) for entry in layout.filters])
    chunks = layout.chunks
    if chunks is not None:
        for array in (chunks.index, chunks.offset, chunks.nbytes, chunks.filter_mask):
            if array is not None:
                _add_array(digest, array)


def _selected(selection: Selection) -> object:
    if isinstance(selection, Slab):
        return selection
    return [np.ascontiguousarray(array).tobytes() for array in selection.blocks()]


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
