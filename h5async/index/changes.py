"""Checks whether files still hold the indexed data: under an open reader, or since a saved state.

The facts about a dataset are read again from the open file: type and creation properties, extent,
and chunk positions. Overwriting values in place changes none of these.

A saved state has a hash (`fingerprint`) of file sizes, and of the paths, shapes, dtypes and chunk
shapes of datasets, but not of values or of how they are read: it is the same whether a dataset is
read directly or through h5py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import ge
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.filters import CONVERSION
from h5async.errors import H5AsyncError, ReadError
from h5async.index.chunks import filters_of, read_chunk_table, without_filters
from h5async.index.datasettable import Datasets, table_of
from h5async.index.hdf5 import Opened, cf_attributes, indexed
from h5async.index.layout import DatasetLayout
from h5async.index.tables import ChunkTable
from h5async.io.hdf5files import HDF5File
from h5async.io.source import FileStamp, changed
from h5async.io.stores import open_hdf5
from h5async.spelling import name_bytes


class FileChanges:
    """Checks files that change while a reader has them open. Thread-safe.

    `layouts` are those of all fields. `forget` is called before a changed file is read again, to
    drop kept chunks.
    """

    def __init__(self, layouts: Sequence[DatasetLayout], forget: Callable[[], None]) -> None:
        self._layouts = layouts
        self._forget = forget
        self._lock = threading.Lock()

        self._warned: set[str] = set()
        self._warnings: list[str] = []

    def look_at(
        self,
        path: str,
        before: FileStamp,
        now: FileStamp,
        *,
        open_name: str = "",
        may_grow: bool = False,
    ) -> None:
        """Raise ReadError if a file lacks the indexed data; the message names the difference.

        `before` and `now` are its stamps. `open_name` names the open file itself, because another
        file may lie at its path by now. It `may_grow` if a writer appends with SWMR: datasets may
        be longer, and rewritten chunks lie elsewhere, but the old ones are still there.
        """
        try:
            self._require_same(path, now.nbytes, open_name or path, may_grow)
        except ReadError as error:
            if now.has_content_of(before) and isinstance(_cause(error), PermissionError):
                return  # only its mode changed; the open file can be read
            if now.nbytes >= before.nbytes:
                raise
            raise changed(path, f"it was cut short, and ends at byte {now.nbytes} now") from error
        self._forget()
        # Renaming or linking a file changes its ctime, but not its mtime.
        if may_grow or now.has_content_of(before):
            return
        with self._lock:
            if path not in self._warned:
                self._warned.add(path)
                self._warnings.append(
                    f"{path} was changed while a reader had it open; its chunks are still in the"
                    " same places, so the reader continues, with the new values from now on"
                )

    def _require_same(self, path: str, nbytes: int, open_name: str, may_grow: bool) -> None:
        layouts = self._in_file.get(path, [])
        for layout in layouts:
            end = layout.offset + layout.nbytes
            if layout.indexed is None and nbytes < end:  # of an external file, without an index
                raise changed(path, f"it has {nbytes} bytes, but its values end at byte {end}")
        layouts = [layout for layout in layouts if layout.indexed is not None]
        if not layouts:
            return
        try:
            file = open_hdf5(open_name, in_use=True)
        except H5AsyncError as error:
            text = str(error).replace(open_name, path)
            raise changed(path, f"it cannot be opened to be checked ({text})") from error
        with file:
            for layout in layouts:
                try:
                    what = _difference(file, layout, path, may_grow or file.swmr_mode)
                except H5AsyncError as error:
                    raise changed(path, str(error)) from error
                except Exception as error:  # damaged metadata may raise anything
                    what = f'dataset "{layout.path}" cannot be checked ({error})'
                    raise changed(path, what) from error
                if what is not None:
                    raise changed(path, what)

    def take_warnings(self) -> tuple[str, ...]:
        """Return the warnings since the last call."""
        if not self._warnings:
            return ()
        with self._lock:
            warnings, self._warnings = tuple(self._warnings), []
        return warnings

    @cached_property
    def _in_file(self) -> dict[str, list[DatasetLayout]]:
        found: dict[str, list[DatasetLayout]] = {}
        for layout in _all_of(self._layouts):
            found.setdefault(layout.file, []).append(layout)
        return found


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _all_of(layouts: Iterable[DatasetLayout]) -> Iterator[DatasetLayout]:
    for layout in layouts:
        if layout.storage not in ("files", "heap") and layout.segments is None:
            yield layout  # else others hold the values
        yield from _all_of(layout.sources)
        yield from _all_of(layout.datasets)


def _difference(file: HDF5File, layout: DatasetLayout, path: str, may_grow: bool) -> str | None:
    name, known = f'dataset "{layout.path}"', layout.indexed
    where, found = f"{path}: {name}", file.get(name_bytes(layout.path))
    if known is None or not isinstance(found, h5py.Dataset):
        return f"{name} is gone"
    dataset = Opened(found.id, file.source)
    if dataset.shape is None:
        return f"{name} has no dimensions any more"
    now = indexed(dataset)
    if now.digest != known.digest:
        return f"{name} has another type, chunk shape, filters, fill value, or compact values"
    has_grown = len(now.shape) == len(known.shape) and all(map(ge, now.shape, known.shape))
    if now.shape != known.shape and not (may_grow and has_grown):
        return f"{name} has shape {now.shape}, and had {known.shape} before"
    if any(cf_attributes(dataset.id, where) != attributes for _, attributes in layout.cf):
        return f"the attributes of {name} that say how its values are packed have changed"
    if may_grow or layout.fallback_reason is not None:
        return None
    if layout.storage == "contiguous":
        begin = layout.offset
        if layout.chunks is not None:  # units to convert
            begin = int(layout.chunks.offset[0]) if layout.chunks.offset.size else -1
        is_same = dataset.offset == begin
    else:
        is_same = layout.chunks is None or _has_same_chunks(dataset, layout, where)
    return None if is_same else f"the values of {name} lie elsewhere in the file"


def _has_same_chunks(dataset: Opened, layout: DatasetLayout, where: str) -> bool:
    filters, known = filters_of(dataset.plist), layout.chunks
    assert known is not None
    found = read_chunk_table(dataset, filters, layout.has_raw_edges, where)
    # Filters that are not available, and that no chunk needed, were left out of the layout.
    left_out = [bit for bit, entry in enumerate(filters) if entry not in layout.filters]
    needed = np.uint32(sum(1 << bit for bit in left_out))
    if (found.filter_mask & needed != needed).any():
        return False
    found, _ = without_filters(found, filters, left_out)
    if layout.filters[:1] and layout.filters[0].number == CONVERSION:
        found = replace(found, filter_mask=found.filter_mask << np.uint32(1))
    return all(
        np.array_equal(getattr(found, column), getattr(known, column))
        for column in ("index", "offset", "nbytes", "filter_mask")
    )


# --- since a saved state --------------------------------------------------------------------------


def fingerprint(
    layouts: Iterable[DatasetLayout], *also: NDArray[np.int64], has_places: bool = False
) -> str:
    """Hash layouts of all fields, and other arrays that the order depends on, to 32 hex digits.

    File names are left out, so that files may be moved. Sizes are those at the time of indexing.
    If it `has_places`, addresses and filters count, too; they are unknown if h5py reads a dataset.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen: list[NDArray[Any]] = []
    for layout in layouts:
        _add_dataset(digest, layout, has_places)
        for array in (layout.spans, layout.lengths):
            # Fields with the same offsets share the array only if it came from a cache.
            if array is None or any(array is one or np.array_equal(array, one) for one in seen):
                continue
            seen.append(array)
            _add_array(digest, array)
    for array in also:
        _add_array(digest, array)
    return digest.hexdigest()


def _add_dataset(digest: Any, layout: DatasetLayout, has_places: bool) -> None:
    stamps = [stamp for _, stamp in layout.attached] or [layout.stamp]
    stamps = [] if layout.storage == "files" else stamps  # its datasets have them
    _add(digest, [stamp.nbytes for stamp in (*stamps, *(heap.stamp for heap in layout.heaps))])
    _add_kind(digest, layout, has_places, layout.path, layout.shape)
    # (Other storage has segments only if it is read directly.)
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
    for kind in datasets.kinds:  # some differ only in how they are read
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
    # (Contiguous values may be split into units for conversion.)
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
