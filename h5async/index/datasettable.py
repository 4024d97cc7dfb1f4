"""Defines `Datasets`: the table of the datasets that hold the samples of a field.

Thousands of datasets of one kind, in files or in groups of a file, differ in length and address.
Here, the common facts are one layout, and the differences are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunktable import ChunkTable
from h5async.index.layout import DatasetLayout
from h5async.index.layoutfacts import Indexed
from h5async.index.segments import PairedRuns, Segments
from h5async.io.stamps import FileStamp

Int64s = NDArray[np.int64]

# What datasets of a kind differ in, and facts that only a kind of its own may have.
_DIFFERENT = "file", "stamp", "path", "shape", "offset", "stored_nbytes", "chunks", "indexed"
_OWN = "values", "datasets", "sources", "attached", "heaps", "sequences", "spans", "lengths"
_NOT_SAME = *_DIFFERENT, *_OWN, "segments", "fill"
_SAME = tuple(field.name for field in fields(DatasetLayout) if field.name not in _NOT_SAME)


def _is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two datasets, by their attributes, differ in `_DIFFERENT` facts alone."""
    if any(one[name] is not other[name] and one[name] != other[name] for name in _SAME):
        return False
    axis, shape, others = one["sample_axis"], one["shape"], other["shape"]
    if shape[:axis] != others[:axis] or shape[axis + 1 :] != others[axis + 1 :]:
        return False
    if one["fill"] is not other["fill"] and one["fill"].tobytes() != other["fill"].tobytes():
        return False
    known, found = one["indexed"], other["indexed"]
    if known is None or found is None:
        return known is found
    return known.digest == found.digest and len(known.shape) == len(found.shape)


def is_own_kind(layout: DatasetLayout) -> bool:
    """Return whether a layout has facts that no other dataset shares."""
    members = layout.__dict__
    if any(members[name] is not None and len(members[name]) for name in _OWN):
        return True
    if layout.indexed is None:
        return False
    own = layout.shape[: len(layout.shape) - layout.extra_dims]
    return layout.indexed.shape not in (own, own[1:])


class _Kinds:
    """Numbers the kinds of datasets."""

    def __init__(self) -> None:
        self.found: list[DatasetLayout] = []
        self._own: dict[int, int] = {}
        self._by_key: dict[Any, list[int]] = {}
        self._last: tuple[dict[str, Any], int] | None = None

    def number(self, layout: DatasetLayout) -> int:
        """Return the number of a layout's kind, which is added if new."""
        members = layout.__dict__
        if is_own_kind(layout):
            number = self._own.setdefault(id(layout), len(self.found))
        elif self._last is not None and _is_alike(self._last[0], members):
            return self._last[1]
        else:
            digest = layout.indexed and layout.indexed.digest
            how = layout.storage, layout.chunk_shape, layout.filters, layout.fallback_reason
            key = *how, layout.dtype.str, layout.row_shape, digest
            several = self._by_key.setdefault(key, [])
            same = (n for n in several if _is_alike(self.found[n].__dict__, members))
            number = next(same, len(self.found))
            if number == len(self.found):
                several.append(number)
            self._last = members, number
        if number == len(self.found):
            self.found.append(layout)
        return number


class Columns(NamedTuple):
    """The facts in which datasets of a kind differ: an item for each dataset.

    Attributes
    ----------
    kind, file
        int32 (n,): the number of its kind, and of its file in `files`.
    paths
        In their files.
    rows
        int64 (n,): extents of their sample dimension.
    offset, stored_nbytes
        int64 (n,): as in `DatasetLayout`.
    begin
        int64 (n + 1,): where the chunks of each begin in `chunks`.
    is_sparse
        bool (n,): whether chunks are looked up by number, because not all are allocated.
    chunks
        The chunk tables, concatenated; `index` is None if no dataset is sparse.
    files
        Their files, and stamps of these.
    """

    kind: NDArray[np.int32]
    file: NDArray[np.int32]
    paths: Sequence[str]
    rows: Int64s
    offset: Int64s
    stored_nbytes: Int64s
    begin: Int64s
    is_sparse: NDArray[np.bool_]
    chunks: ChunkTable
    files: tuple[tuple[str, FileStamp], ...]

    def layout(self, number: int, like: DatasetLayout) -> DatasetLayout:
        """Return the layout of a dataset that is like another one."""
        axis, chunks, indexed = like.sample_axis, like.chunks, like.indexed
        shape = (*like.shape[:axis], int(self.rows[number]), *like.shape[axis + 1 :])
        if chunks is not None:
            here = slice(*self.begin[number : number + 2].tolist())
            chunks = self.chunks.part(here, is_sparse=bool(self.is_sparse[number]))
        if indexed is not None:
            own = shape[: len(shape) - like.extra_dims]
            is_one_sample = len(own) > len(indexed.shape)
            indexed = Indexed(indexed.digest, own[1:] if is_one_sample else own)
        file, stamp = self.files[self.file[number]]
        return like.changed(
            file=file,
            stamp=stamp,
            path=self.paths[number],
            shape=shape,
            offset=int(self.offset[number]),
            stored_nbytes=int(self.stored_nbytes[number]),
            chunks=chunks,
            indexed=indexed,
        )

    def part(self, first: int, count: int) -> Columns:
        """Return the columns of some datasets that follow each other."""
        here = slice(first, first + count)
        begin = self.begin[first : first + count + 1]
        chunks = slice(*begin[[0, -1]].tolist())
        is_sparse = self.is_sparse[here]
        return self._replace(
            kind=self.kind[here],
            file=self.file[here],
            paths=self.paths[here],
            rows=self.rows[here],
            offset=self.offset[here],
            stored_nbytes=self.stored_nbytes[here],
            begin=begin - begin[0],
            is_sparse=is_sparse,
            chunks=self.chunks.part(chunks, is_sparse=bool(is_sparse.any())),
        )

    def moved(self, kinds: NDArray[np.int32], files: NDArray[np.int32]) -> Columns:
        """Return the columns with other numbers of kinds and of files."""
        return self._replace(kind=kinds[self.kind], file=files[self.file])


class Datasets(Sequence[DatasetLayout]):
    """Datasets that hold the samples of a field: a table of extents. Immutable, picklable.

    Facts that many have in common are stored once, in `kinds`; the differences are arrays. So
    another dataset costs a few numbers. A dataset becomes an object on request.

    Parameters
    ----------
    kinds
        Layouts, one of each kind.
    columns
        The differences.
    """

    def __init__(self, kinds: Sequence[DatasetLayout], columns: Columns) -> None:
        self.kinds = tuple(kinds)
        self.columns = columns
        self._made: dict[int, DatasetLayout] = {}  # so that a dataset is one object
        self._is_single = np.bincount(columns.kind, minlength=len(kinds)) == 1
        self._is_single |= np.array([is_own_kind(kind) for kind in kinds], np.bool_)

    @classmethod
    def of(cls, layouts: Sequence[DatasetLayout]) -> Datasets:
        """Return the table of datasets that hold their samples themselves."""
        kinds, files = _Kinds(), dict[tuple[str, FileStamp], int]()
        rows, tables = [], []
        for layout in layouts:
            file = files.setdefault((layout.file, layout.stamp), len(files))
            table = layout.chunks
            count = 0 if table is None else table.offset.size
            if table is not None:
                tables.append(table)
            is_sparse = table is not None and table.index is not None
            facts = layout.num_samples, layout.offset, layout.stored_nbytes, count, is_sparse
            rows.append((kinds.number(layout), file, *facts))
        kind, of_file, extents, offset, stored_nbytes, counts, sparse = (
            np.array(rows, np.int64).reshape(-1, 7).T.copy()
        )
        columns = Columns(
            kind.astype(np.int32),
            of_file.astype(np.int32),
            [layout.path for layout in layouts],
            extents,
            offset,
            stored_nbytes,
            np.concatenate(([0], np.cumsum(counts))),
            sparse.astype(np.bool_),
            ChunkTable.joined(tables),
            tuple(files),
        )
        return cls(kinds.found, columns)

    @classmethod
    def joined(cls, several: Sequence[Datasets]) -> Datasets:
        """Return the datasets of several tables, in order."""
        if len(several) == 1:
            return several[0]
        kinds, files, moved = _Kinds(), dict[tuple[str, FileStamp], int](), []
        for one in several:
            numbers = np.array([kinds.number(kind) for kind in one.kinds], np.int32)
            of_files = [files.setdefault(file, len(files)) for file in one.columns.files]
            moved.append(one.columns.moved(numbers, np.array(of_files, np.int32)))
        begin = np.cumsum([0, *(int(one.begin[-1]) for one in moved)])
        columns = Columns(
            np.concatenate([one.kind for one in moved]),
            np.concatenate([one.file for one in moved]),
            [path for one in moved for path in one.paths],
            np.concatenate([one.rows for one in moved]),
            np.concatenate([one.offset for one in moved]),
            np.concatenate([one.stored_nbytes for one in moved]),
            np.concatenate(
                [[0], *(one.begin[1:] + n for one, n in zip(moved, begin.tolist(), strict=False))]
            ).astype(np.int64),
            np.concatenate([one.is_sparse for one in moved]),
            ChunkTable.joined([one.chunks for one in moved]),
            tuple(files),
        )
        return cls(kinds.found, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the datasets that were made."""
        return Datasets, (self.kinds, self.columns)

    def __len__(self) -> int:
        return self.columns.kind.size

    @overload
    def __getitem__(self, key: int) -> DatasetLayout: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[DatasetLayout, ...]: ...
    def __getitem__(self, key: int | slice) -> DatasetLayout | tuple[DatasetLayout, ...]:
        """Return a dataset, the same object each time; or several."""
        if isinstance(key, slice):
            return tuple(self[i] for i in range(*key.indices(len(self))))
        number = range(len(self))[key]
        found = self._made.get(number)
        return self._made.setdefault(number, self._new(number)) if found is None else found

    def __iter__(self) -> Iterator[DatasetLayout]:
        return map(self.__getitem__, range(len(self)))

    def by_kind(self, fact: Callable[[DatasetLayout], Any], dtype: Any) -> NDArray[Any]:
        """Return a fact of each dataset, (n,), that those of a kind have in common."""
        return np.array([fact(kind) for kind in self.kinds], dtype)[self.columns.kind]

    def _new(self, number: int) -> DatasetLayout:
        kind = self.columns.kind[number]
        like = self.kinds[kind]
        return like if self._is_single[kind] else self.columns.layout(number, like)

    @cached_property
    def largest(self) -> list[tuple[DatasetLayout, int]]:
        """Those with the most rows of each kind, and those with the largest stored chunk.

        No other one needs more memory. With each comes the number of datasets that it stands for.
        """
        if self._is_single.all():
            return [(one, 1) for one in self]
        columns, found = self.columns, []
        counts, nbytes = np.diff(columns.begin), np.zeros(len(self), np.int64)
        if columns.begin[-1]:
            begin = columns.begin[:-1][counts > 0]
            nbytes[counts > 0] = np.maximum.reduceat(columns.chunks.nbytes, begin)
        order = np.argsort(columns.kind, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(columns.kind[order])) + 1):
            numbers = {int(here[column[here].argmax()]): 1 for column in (columns.rows, nbytes)}
            numbers[next(iter(numbers))] += here.size - len(numbers)
            found += [(self[number], count) for number, count in numbers.items()]
        return found


def table_of(layout: DatasetLayout) -> tuple[Segments, Datasets]:
    """Return the segments of all samples, and the datasets that hold them: itself, or others."""
    if layout.segments is not None:
        assert isinstance(layout.datasets, Datasets)
        return layout.segments, layout.datasets
    several = PairedRuns.one(0, layout.num_samples, 0) if layout.num_samples else PairedRuns.none()
    return Segments.of_runs(several, 0), Datasets.of([layout])


def kinds_of(layout: DatasetLayout) -> list[tuple[DatasetLayout, int]]:
    """Return leaves, each with the number of leaves like it that need no more memory."""
    if layout.segments is None:
        return [(layout, 1)]
    return table_of(layout)[1].largest


def shared(layout: DatasetLayout) -> DatasetLayout:
    """Return the layout of rows that several samples share."""
    datasets = layout.datasets
    if isinstance(datasets, Datasets):
        datasets = Datasets([shared(kind) for kind in datasets.kinds], datasets.columns)
    return layout.changed(datasets=datasets, is_shared=True)
