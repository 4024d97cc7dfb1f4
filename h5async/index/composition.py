"""Combines datasets into one: those of files, groups or mappings, or rows along two dimensions.

Takes layouts, whose datasets may consist of others themselves; returns a layout with one flat table
of segments, however deep they were nested. Sequences (`DatasetLayout.sequences`) are concatenated.
Fields may differ by one row per sequence: some files store one more observation than actions. Then
each sequence gets the number of rows of its longest field; rows that another field lacks have its
fill value, and are not samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.chunks import left_to_hdf5
from h5async.index.datasettable import (
    Datasets,
    bounds_behind,
    even_bounds,
    even_ranges,
    table_of,
    unit_bounds,
    unit_nbytes,
)
from h5async.index.hdf5 import common_names
from h5async.index.layout import CfAttribute, DatasetLayout, HeapFile, SequenceLengths
from h5async.index.tables import (
    MOST_RUNS,
    WHOLE,
    Blocks,
    Int64s,
    Piece,
    Segments,
    Selection,
    Slab,
    TooManyRunsError,
    most_runs,
    runs_between,
)

_UNLIKE_TEXT = "its strings are padded differently from those of other files"
_UNCHUNKED = "contiguous", "compact"
_MOST_APART = 1  # the maximum difference of rows between fields, per sequence


class Part(NamedTuple):
    """Samples of a dataset, or pieces of them, that are stored in another dataset, the source.

    `samples` (ascending) and `source_samples` are their numbers in the two, of equal size.
    """

    source: DatasetLayout
    samples: Selection
    source_samples: Selection
    piece: Piece = WHOLE


def with_parts(layout: DatasetLayout, parts: Sequence[Part]) -> DatasetLayout:
    """Return a copy of a layout whose samples are stored in the sources of `parts`.

    Parts of the same region have no common samples. Without parts, no dataset holds the samples.

    TooManyRunsError if there would be too many segments; DatasetError if HDF5 has to read a source,
    and does not have its filters.
    """
    if not parts:
        return layout.changed(segments=None, datasets=())
    keys = [(id(part.source), part.piece.is_whole) for part in parts]
    examples = dict(zip(keys, parts, strict=True))
    combined = {key: _combined(part, layout) for key, part in examples.items()}
    first, datasets = _datasets(list(combined.values()))
    begin = dict(zip(combined, first, strict=True))
    pieces: dict[Any, tuple[int, Piece]] = {}
    single: list[tuple[int, ...]] = []
    columns: list[tuple[NDArray[Any], ...]] = []
    for key, part in zip(keys, parts, strict=True):
        source, ours, theirs = combined[key], part.samples, part.source_samples
        if source.segments is not None:
            found = source.segments.behind(runs_between(ours, theirs))
            own = [pieces.setdefault(p.key, (len(pieces), p))[0] for p in found.pieces]
            piece = np.array(own, np.int32)[found.piece]
            dataset = found.dataset + begin[key]
            columns.append((found.first, found.length, found.row, found.step, dataset, piece))
            continue
        number = pieces.setdefault(part.piece.key, (len(pieces), part.piece))[0]
        if ours.is_run and theirs.is_run:
            if ours.size:
                single.append((ours.start, ours.size, theirs.start, 1, begin[key], number))
            continue
        runs = runs_between(ours, theirs)
        columns.append((*runs, *(np.full(runs.size, n) for n in (begin[key], number))))
    columns.append(tuple(np.array(single, np.int64).reshape(-1, 6).T.copy()))
    if sum(column[0].size for column in columns) > MOST_RUNS:
        raise TooManyRunsError
    whole = [np.concatenate(column) for column in zip(*columns, strict=True)]
    found_pieces = tuple(one for _, one in pieces.values())
    read = [combined[key] for key in keys]
    even, kept = _even(layout, parts, read), _kept_nbytes(parts, read)
    segments = Segments.of(whole, found_pieces, even, kept)
    return layout.changed(segments=segments, datasets=datasets)


def _combined(part: Part, whole: DatasetLayout) -> DatasetLayout:
    """Return the source of a part; it is left to HDF5 if only HDF5 can combine its datasets."""
    source = part.source
    if source.segments is None:
        return source
    if not part.piece.is_whole:
        return left_to_hdf5(source, "pieces of a dataset that consists of others")
    fills = source.raw_fill, whole.raw_fill
    are_alike = fills[0].dtype == fills[1].dtype and fills[0].tobytes() == fills[1].tobytes()
    if source.storage == "virtual" and source.has_gaps and not are_alike:
        return left_to_hdf5(source, "it has gaps, and its fill value is not that of the whole")
    return source


def _datasets(sources: Sequence[DatasetLayout]) -> tuple[list[int], Datasets]:
    """Return the number of each source's first dataset, and the table of all their datasets."""
    tables, counts = [], []
    for has_table, several in itertools.groupby(sources, lambda one: one.segments is not None):
        some = list(several)
        if has_table:
            tables += [table_of(one)[1] for one in some]
            counts += [len(one.datasets) for one in some]
        else:
            tables.append(Datasets.of(some))
            counts += [1] * len(some)
    return list(itertools.accumulate(counts, initial=0))[:-1], Datasets.joined(tables)


def _even(
    whole: DatasetLayout, parts: Sequence[Part], sources: Sequence[DatasetLayout]
) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of samples that units divide evenly: see `Segments.even`.

    `sources` are those of the parts, as they are read.
    """
    if whole.chunk_shape:  # a member of a compound, whose chunks these are
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
    """Return the decoded bytes of a unit of the sources that are not read as they are stored."""
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


# --- files ---------------------------------------------------------------------------------------


def join_layouts(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout for datasets of several files, concatenated.

    DatasetError names two files whose rows differ in shape or dtype.
    """
    first = layouts[0]
    if len(layouts) == 1:
        return first
    if any(layout.text != first.text for layout in layouts):
        layouts = [
            left_to_hdf5(layout, _UNLIKE_TEXT) if layout.text else layout for layout in layouts
        ]
        first = layouts[0]
    if first.heaps:
        return _joined_heaps(layouts)
    parts, begin, unused = [], 0, 0
    for layout in layouts:
        same_rows = layout.row_shape == first.row_shape and layout.sample_axis == first.sample_axis
        if not same_rows or layout.dtype.newbyteorder("=") != first.dtype.newbyteorder("="):
            of = _described(first, layout), _described(layout, first)
            raise _unlike(first, layout, "samples", *of)
        # (Ragged values that belong to no sample are left out.)
        first_row, behind = (
            (0, layout.num_samples) if layout.spans is None else layout.spans[[0, -1]]
        )
        count = int(behind - first_row)
        if count:
            samples = Slab.run(begin, begin + count)
            source = layout if layout.spans is None else layout.changed(spans=None)
            parts.append(Part(source, samples, Slab.run(int(first_row), int(behind))))
        begin += count
        unused += layout.unused_rows + layout.num_samples - count
    shape = list(first.shape)
    shape[first.sample_axis] = begin
    same_order = all(layout.dtype == first.dtype for layout in layouts)
    reasons = (layout.fallback_reason for layout in layouts)
    joined = DatasetLayout(
        file=first.file,
        stamp=first.stamp,
        path=first.path,
        shape=tuple(shape),
        dtype=first.dtype if same_order else first.dtype.newbyteorder("="),
        sample_axis=first.sample_axis,
        storage="files",
        fallback_reason=next((reason for reason in reasons if reason is not None), None),
        fill=first.fill,
        stored_nbytes=sum(layout.stored_nbytes for layout in layouts),
        file_samples=tuple((layout.file, layout.sample_count) for layout in layouts),
        text=first.text,
        sequences=_joined_sequences(layouts),
        dim_names=common_names([layout.dim_names for layout in layouts]),
        cf=joined_cf(layouts),
        spans=None if first.spans is None else _joined_spans(layouts),
        unused_rows=unused,
    )
    try:
        return with_parts(joined, parts)
    except TooManyRunsError:
        raise DatasetError(
            f'dataset "{first.path}" of {len(layouts)} files: its samples lie in more than'
            f" {MOST_RUNS:,} runs of rows; read fewer files at once"
        ) from None


def _described(layout: DatasetLayout, other: DatasetLayout) -> str:
    where = f" along dimension {layout.sample_axis}"
    is_moved = layout.sample_axis != other.sample_axis
    return f"{layout.row_shape} {layout.dtype}{where if is_moved else ''}"


def joined_cf(
    layouts: Sequence[DatasetLayout],
) -> tuple[tuple[int, tuple[CfAttribute, ...]], ...]:
    """Return how the samples of all layouts are packed; equal neighbours are merged."""
    joined: list[tuple[int, tuple[CfAttribute, ...]]] = []
    begin = 0
    for layout in layouts:
        for first, attributes in layout.cf if layout.num_samples else ():
            if not joined or joined[-1][1] != attributes:
                joined.append((begin + first, attributes))
        begin += layout.num_samples
    return tuple(joined) or layouts[0].cf


def _unlike(
    first: DatasetLayout, layout: DatasetLayout, what: str, of_first: str, of_layout: str
) -> DatasetError:
    """Return the error that two datasets cannot be read as one: of two files, or groups of one."""
    if layout.file != first.file:
        return DatasetError(
            f'dataset "{first.path}" has {what} of {of_first} in {first.file}, but of {of_layout}'
            f" in {layout.file}; files can only be read as one if these are equal"
        )
    return DatasetError(
        f'{first.file}: dataset "{first.path}" has {what} of {of_first}, but "{layout.path}" of'
        f" {of_layout}; groups can only be read as one if these are equal: store them alike, or"
        " leave groups out with the option only of Sequences"
    )


def _joined_heaps(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    first, heaps, count = layouts[0], [], 0
    for layout in layouts:
        if layout.dtype != first.dtype or layout.shape[1:] != first.shape[1:] or not layout.heaps:
            raise _unlike(first, layout, "values", str(first.dtype), str(layout.dtype))
        heaps += [heap._replace(first_sample=heap.first_sample + count) for heap in layout.heaps]
        count += layout.sample_count
    lengths = np.concatenate([y.lengths for y in layouts if y.lengths is not None])
    joined = first.changed(
        shape=(sum(layout.num_samples for layout in layouts), *first.shape[1:]),
        stored_nbytes=sum(layout.stored_nbytes for layout in layouts),
        file_samples=tuple((layout.file, layout.sample_count) for layout in layouts),
        sequences=_joined_sequences(layouts),
    )
    return with_lengths(joined, lengths, heaps)


def with_lengths(
    layout: DatasetLayout, lengths: NDArray[np.uint32], heaps: Sequence[HeapFile]
) -> DatasetLayout:
    """Return a copy of a layout whose samples are the variable-length elements of `heaps`.

    `lengths`, uint32 (samples,), has the number of values per sample; the elements will share it.
    """
    shared = []
    for heap in heaps:
        end = heap.first_sample + heap.elements.length.size
        own = replace(heap.elements, length=lengths[heap.first_sample : end])
        shared.append(heap._replace(elements=own))
    return layout.changed(lengths=lengths, heaps=tuple(shared))


def _joined_sequences(layouts: Sequence[DatasetLayout]) -> SequenceLengths | None:
    several = [layout.sequences for layout in layouts if layout.sequences is not None]
    return SequenceLengths(*map(np.concatenate, zip(*several, strict=True))) if several else None


def _joined_spans(layouts: Sequence[DatasetLayout]) -> Int64s:
    found, begin = [np.zeros(1, np.int64)], 0
    for layout in layouts:
        assert layout.spans is not None
        found.append(layout.spans[1:] - layout.spans[0] + begin)
        begin = int(found[-1][-1]) if layout.spans.size > 1 else begin
    return np.concatenate(found)


# --- sequences -----------------------------------------------------------------------------------


def join_groups(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout for datasets of several groups of a file, concatenated.

    DatasetError if the shapes of their rows or their dtypes differ.
    """
    held = np.array([layout.sample_count for layout in layouts], np.int64)
    return join_layouts(layouts).changed(sequences=SequenceLengths(held, held), file_samples=())


def is_one_run(layout: DatasetLayout) -> bool:
    """Return whether the first two dimensions can be merged without moving any bytes."""
    is_plain = layout.fallback_reason is None and not (
        layout.text or layout.segments is not None or layout.filters
    )
    return is_plain and layout.storage in _UNCHUNKED


def merged_dimensions(layout: DatasetLayout) -> DatasetLayout:
    """Merge the first two dimensions of a layout for which `is_one_run`."""
    count, length, *row = layout.shape
    held = np.full(count, length, np.int64)
    shape = (count * length, *row)
    return layout.changed(
        shape=shape,
        sample_axis=0,
        values=None if layout.values is None else layout.values.reshape(shape),
        sequences=SequenceLengths(held, held),
    )


def along_sequences(layout: DatasetLayout, axis: int) -> DatasetLayout:
    """Concatenate all sequences, which dimension `axis` counts; samples are steps."""
    rest = [a for a in range(len(layout.shape)) if a != layout.sample_axis]
    count, length = layout.shape[axis], layout.num_samples
    row = [slice(0, layout.shape[a]) for a in rest]
    all_steps, parts = Slab.run(0, length), []
    for number in range(count if length else 0):
        row[rest.index(axis)] = slice(number, number + 1)
        samples = Slab.run(number * length, (number + 1) * length)
        parts.append(Part(layout, samples, all_steps, Piece(source_region=tuple(row))))
    held = np.full(count, length, np.int64)
    row_shape = tuple(layout.shape[a] for a in rest if a != axis)
    found = sliced(layout, count * length, row_shape, parts)
    if (axis, layout.sample_axis) == (0, 1) and layout.storage in _UNCHUNKED:
        # The result equals that of `merged_dimensions`, except for how it is read.
        segments = found.segments
        if segments is not None:  # its units, too, are those of one run of rows
            segments = replace(segments, even=((0, found.num_samples, 0),))
        found = found.changed(storage=layout.storage, member=layout.member, segments=segments)
    return found.changed(sequences=SequenceLengths(held, held))


def sliced(
    layout: DatasetLayout, count: int, row_shape: tuple[int, ...], parts: Sequence[Part]
) -> DatasetLayout:
    """Return a layout of `count` samples, which are parts of the samples of `layout`."""
    whole = layout.without_place("files", shape=(count, *row_shape), sample_axis=0)
    return with_parts(whole, parts)


def aligned(layouts: Mapping[str, DatasetLayout]) -> dict[str, DatasetLayout]:
    """Return the fields of a file with sequences that begin at the same rows in all of them.

    DatasetError if fields have different sequences.
    """
    held = {name: y.sequences.held for name, y in layouts.items() if y.sequences is not None}
    if len(held) < len(layouts):
        return dict(layouts)
    first_name, first = next(iter(held.items()))
    for name, lengths in held.items():
        both = f"{layouts[name].file}: {first_name} and {name} have"
        if lengths.size != first.size:
            raise DatasetError(
                f"{both} {first.size} and {lengths.size} sequences; all need the same number"
            )
        at = int(np.argmax(abs(lengths - first))) if first.size else 0
        if first.size and abs(lengths - first)[at] > _MOST_APART:
            raise DatasetError(
                f"{both} {first[at]} and {lengths[at]} rows in sequence {at}; fields may differ by"
                f" {_MOST_APART} row at most"
            )
    room = np.maximum.reduce(list(held.values()))
    if all(np.array_equal(room, lengths) for lengths in held.values()):
        return dict(layouts)
    return {name: _with_room(layout, room) for name, layout in layouts.items()}


def _with_room(layout: DatasetLayout, room: Int64s) -> DatasetLayout:
    """Return a layout in which sequence i takes `room[i]` rows."""
    assert layout.sequences is not None
    held = layout.sequences.held
    shift = np.cumsum(room) - room - (np.cumsum(held) - held)
    ends = np.cumsum(held)
    if layout.is_ragged:
        return _ragged_with_room(layout, room, shift)
    segments, datasets = table_of(layout)
    cut = segments.cut(ends)
    even = segments.even if layout.storage in ("virtual", "files") else ()
    moved = cut.moved(shift[np.searchsorted(ends, cut.first, side="right")])
    if even and even != ((0, layout.num_samples, 0),):
        bounds = np.unique(np.concatenate([even_bounds(even, 1), [0, *ends.tolist()]]))
        before = np.searchsorted(ends, bounds[:-1], side="right")
        after = np.searchsorted(ends, bounds[1:], side="left")
        moved_bounds = [bounds[:-1] + shift[before], bounds[1:] + shift[after]]
        even = even_ranges(np.unique(np.concatenate([*moved_bounds, [0, int(room.sum())]])))
    elif even:
        even = ((0, int(room.sum()), 0),)
    return layout.changed(
        shape=(int(room.sum()), *layout.shape[1:]),
        storage="files",
        offset=-1,
        values=None,
        segments=replace(moved, even=even),
        datasets=datasets,
        sequences=SequenceLengths(room, held),
        cf=tuple((_shifted(first, ends, shift), attributes) for first, attributes in layout.cf),
    )


def _ragged_with_room(layout: DatasetLayout, room: Int64s, shift: Int64s) -> DatasetLayout:
    """Do the same for samples that are runs of rows; those outside sequences have no rows."""
    assert layout.sequences is not None
    held = layout.sequences.held
    at = np.arange(int(held.sum())) + np.repeat(shift, held)
    sequences = SequenceLengths(room, held)
    if layout.lengths is not None:
        lengths = np.zeros(int(room.sum()), np.uint32)
        lengths[at] = layout.lengths
        first = np.cumsum(held) - held
        heaps = []
        for heap in layout.heaps:
            number = int(np.searchsorted(first, heap.first_sample, side="right")) - 1
            moved = heap.first_sample + int(shift[number]) if shift.size else heap.first_sample
            heaps.append(heap._replace(first_sample=moved))
        return with_lengths(layout.changed(sequences=sequences), lengths, heaps)
    starts = layout.starts()
    counts = np.zeros(int(room.sum()) + 1, np.int64)
    counts[0], counts[at + 1] = starts[0], np.diff(starts)
    return layout.changed(sequences=sequences, spans=np.cumsum(counts))


def _shifted(first: int, ends: Int64s, shift: Int64s) -> int:
    """Return the position of row `first` after its sequence was moved."""
    at = min(int(np.searchsorted(ends, first, side="right")), shift.size - 1)
    return first + int(shift[at]) if shift.size else first


def widest_dtype(layouts: Sequence[DatasetLayout]) -> np.dtype[Any] | None:
    """Return the narrowest integer dtype that holds those of all layouts, if they differ.

    None if there is none (for uint64 and a signed dtype), or if not all are integers.
    """
    dtypes = {layout.dtype.newbyteorder("=") for layout in layouts}
    if len(dtypes) < 2 or any(dtype.kind not in "iu" for dtype in dtypes):
        return None
    widest = np.result_type(*dtypes)
    return widest if widest.kind in "iu" else None
