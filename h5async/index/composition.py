"""Makes the flat table of a dataset whose samples other datasets hold.

Parts enter: of files, of groups, or of mappings. Their datasets may consist of others themselves;
a layout leaves with one table of segments, however deep they were nested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.chunks import left_to_hdf5
from h5async.index.datasettable import Datasets
from h5async.index.layout import DatasetLayout
from h5async.index.segments import (
    MOST_RUNS,
    WHOLE,
    Blocks,
    Piece,
    Segments,
    Selection,
    TooManyRunsError,
    most_runs,
    runs_between,
)
from h5async.index.units import bounds_behind, even_ranges, unit_bounds, unit_nbytes

Int64s = NDArray[np.int64]


class Part(NamedTuple):
    """Some samples of a dataset, or pieces of them, that another dataset holds.

    Attributes
    ----------
    source
        Layout of the dataset that holds them.
    samples, source_samples
        Sample numbers in the whole dataset, ascending, and in the source; equally many.
    piece
        The piece of a row.
    """

    source: DatasetLayout
    samples: Selection
    source_samples: Selection
    piece: Piece = WHOLE


def with_parts(layout: DatasetLayout, parts: Sequence[Part]) -> DatasetLayout:
    """Return a layout whose samples the sources of some parts hold.

    Parameters
    ----------
    layout
        All other attributes.
    parts
        Those of one region have no common samples. Without any, nothing holds the samples.

    Raises
    ------
    TooManyRunsError
        If there would be too many segments.
    DatasetError
        If HDF5 has to read a source, and does not have its filters.
    """
    if not parts:
        return layout.changed(segments=None, datasets=())
    numbers: dict[tuple[int, bool], int] = {}
    sources: list[DatasetLayout] = []
    for part in parts:
        key = id(part.source), part.piece.is_whole
        if key not in numbers:
            numbers[key] = len(sources)
            sources.append(_combined(part, layout))
    read = [sources[numbers[id(part.source), part.piece.is_whole]] for part in parts]
    begin, datasets = _datasets(sources)
    pieces: dict[Any, tuple[int, Piece]] = {}
    single: list[tuple[int, ...]] = []
    columns: list[tuple[NDArray[Any], ...]] = []
    for part in parts:
        at = numbers[id(part.source), part.piece.is_whole]
        source, ours, theirs = sources[at], part.samples, part.source_samples
        if source.segments is not None:
            found = source.segments.behind(runs_between(ours, theirs))
            own = [pieces.setdefault(p.key, (len(pieces), p))[0] for p in found.pieces]
            piece = np.array(own, np.int32)[found.piece]
            dataset = found.dataset + begin[at]
            columns.append((found.first, found.length, found.row, found.step, dataset, piece))
            continue
        number = pieces.setdefault(part.piece.key, (len(pieces), part.piece))[0]
        if ours.is_run and theirs.is_run:
            if ours.size:
                single.append((ours.start, ours.size, theirs.start, 1, begin[at], number))
            continue
        runs = runs_between(ours, theirs)
        columns.append((*runs, *(np.full(runs.size, n) for n in (begin[at], number))))
    columns.append(tuple(np.array(single, np.int64).reshape(-1, 6).T.copy()))
    if sum(column[0].size for column in columns) > MOST_RUNS:
        raise TooManyRunsError
    whole = [np.concatenate(column) for column in zip(*columns, strict=True)]
    found_pieces = tuple(one for _, one in pieces.values())
    even, kept = _even(layout, parts, read), _kept_nbytes(parts, read)
    segments = Segments.of(whole, found_pieces, even, kept)
    return layout.changed(segments=segments, datasets=datasets)


def _combined(part: Part, whole: DatasetLayout) -> DatasetLayout:
    """Return the source of a part, or the same source read by HDF5 if that has to combine it."""
    source = part.source
    if source.segments is None:
        return source
    if not part.piece.is_whole:
        return left_to_hdf5(source, "pieces of a dataset that consists of others")
    if source.storage == "virtual" and source.has_gaps and not _fills_alike(source, whole):
        return left_to_hdf5(source, "it has gaps, and another fill value than the whole")
    return source


def _fills_alike(one: DatasetLayout, other: DatasetLayout) -> bool:
    fills = one.raw_fill, other.raw_fill
    return fills[0].dtype == fills[1].dtype and fills[0].tobytes() == fills[1].tobytes()


def _datasets(sources: Sequence[DatasetLayout]) -> tuple[list[int], Datasets]:
    """Return the table of the datasets of all sources, and the first number of each source."""
    tables: list[Datasets] = []
    leaves: list[DatasetLayout] = []
    begin, count = [], 0
    for source in sources:
        begin.append(count)
        if isinstance(source.datasets, Datasets):
            if leaves:
                tables.append(Datasets.of(leaves))
            tables.append(source.datasets)
            leaves, count = [], count + len(source.datasets)
        else:
            leaves.append(source)
            count += 1
    if leaves:
        tables.append(Datasets.of(leaves))
    return begin, Datasets.joined(tables)


def _even(
    whole: DatasetLayout, parts: Sequence[Part], sources: Sequence[DatasetLayout]
) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of samples that units divide evenly: see `Segments.even`.

    `sources` are those of the parts, as they are read.
    """
    if whole.chunk_shape:  # of a compound, whose member this is
        return ()
    are_stored_together = whole.storage in ("virtual", "files") and all(
        part.piece.region is None
        and (part.samples.is_run or isinstance(part.samples, Blocks))
        and most_runs(part.samples, part.source_samples) <= MOST_RUNS
        for part in parts
    )
    if not are_stored_together:  # how a dataset is read must not change the order of samples
        return ((0, whole.num_samples, 0),)
    if all(
        part.source.segments is None or (part.source is source and not part.source.segments.even)
        for part, source in zip(parts, sources, strict=True)
    ):
        return ()
    edges: dict[int, Int64s] = {}
    bounds = [np.array([0, whole.num_samples], np.int64)]
    for part in parts:
        if id(part.source) not in edges:
            edges[id(part.source)] = unit_bounds(part.source, whole.row_nbytes)
        runs = runs_between(part.samples, part.source_samples)
        bounds.append(bounds_behind(runs, edges[id(part.source)]))
    return even_ranges(np.unique(np.concatenate(bounds)))


def _kept_nbytes(parts: Sequence[Part], sources: Sequence[DatasetLayout]) -> int:
    """Return the decoded bytes of a unit of what is not read as stored."""
    several = {id(part.source): part.source for part in parts if part.source.segments is not None}
    are_read = {id(source) for source in sources}
    return max(
        (
            source.segments.kept_nbytes if number in are_read else unit_nbytes(source)
            for number, source in several.items()
            if source.segments is not None
        ),
        default=0,
    )
