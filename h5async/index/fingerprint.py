"""Hashes layouts to a short text that changes when a file does.

A saved state is only valid for the data that it was saved with. The hash covers the metadata that
were read when a file was indexed, and the file's size, but not the values themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from h5async.index.layout import DatasetLayout
from h5async.index.slabs import Selection, Slab


def fingerprint(layouts: Iterable[DatasetLayout]) -> str:
    """Hash shapes, dtypes, filters, and where all chunks lie, to 32 hexadecimal digits.

    Names of files are left out, so that files may be moved. Sizes are those that the files had when
    they were indexed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for layout in layouts:
        _add_dataset(digest, layout, {})
    return digest.hexdigest()


def _add_dataset(digest: Any, layout: DatasetLayout, seen: dict[int, int]) -> None:
    """Hash a dataset, and those that hold its parts; one that was `seen` before, by its number."""
    if id(layout) in seen:
        _add(digest, seen[id(layout)])
        return
    seen[id(layout)] = len(seen)
    _add(
        digest,
        layout.stamp.nbytes,
        layout.path,
        layout.shape,
        _described(layout.dtype),
        layout.sample_axis,
    )
    _add(digest, layout.storage, layout.offset, layout.chunk_shape, layout.member)
    _add(digest, [(entry.number, entry.parameters) for entry in layout.filters])
    chunks = layout.chunks
    if chunks is not None:
        for array in (chunks.index, chunks.offset, chunks.nbytes, chunks.filter_mask):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
    if layout.values is not None:
        digest.update(np.ascontiguousarray(layout.values).tobytes())
    for part in layout.parts:
        selections = _selected(part.samples), _selected(part.source_samples)
        _add(digest, *selections, part.region, part.source_region)
        _add(digest, part.member)
        _add_dataset(digest, part.source, seen)


def _selected(selection: Selection) -> object:
    if isinstance(selection, Slab):
        return selection
    return [np.ascontiguousarray(array).tobytes() for array in selection.blocks()]


def _described(dtype: np.dtype[Any]) -> object:
    """Return what tells a dtype from others, in any version of NumPy."""
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
