"""Makes one dataset of many sequences: of similar groups, or along two dimensions.

Layouts enter; one leaves in which all rows follow each other, with the number of rows per sequence
(`DatasetLayout.sequences`). Fields may differ by one row: some files store an observation more than
actions. Then each sequence takes the room of the longest field; rows missing in others have their
fill value, and are no samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.index.composition import Part, with_parts
from h5async.index.datasettable import table_of
from h5async.index.joined import join_layouts, with_lengths
from h5async.index.layout import DatasetLayout
from h5async.index.layoutfacts import SequenceLengths
from h5async.index.segments import Piece, Slab
from h5async.index.units import even_bounds, even_ranges

_UNCHUNKED = "contiguous", "compact"
_MOST_APART = 1  # the maximum difference of rows between fields, per sequence


def join_groups(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout for datasets of several groups of a file, concatenated.

    DatasetError if the shapes of their rows or their dtypes differ.
    """
    held = np.array([layout.sample_count for layout in layouts], np.int64)
    joined = join_layouts(layouts)
    return joined.changed(
        sequences=SequenceLengths(held, held),
        file_samples=(),
        path=layouts[0].path,
    )


def is_one_run(layout: DatasetLayout) -> bool:
    """Return whether the bytes of the first two dimensions permit merging them."""
    is_plain = layout.fallback_reason is None and not (
        layout.text or layout.segments is not None or layout.filters
    )
    return is_plain and layout.storage in _UNCHUNKED


def merged_dimensions(layout: DatasetLayout) -> DatasetLayout:
    """Return a layout for which `is_one_run` with its first two dimensions merged."""
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
    """Return the layout of all sequences, concatenated.

    Parameters
    ----------
    layout
        Its sample dimension counts steps.
    axis
        The dimension that counts sequences.
    """
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
        # It equals the result of `merged_dimensions`, except for the way of reading.
        segments = found.segments
        if segments is not None:  # whose units are those of one run of rows, too
            segments = replace(segments, even=((0, found.num_samples, 0),))
        found = found.changed(storage=layout.storage, member=layout.member, segments=segments)
    return found.changed(sequences=SequenceLengths(held, held))


def sliced(
    layout: DatasetLayout, count: int, row_shape: tuple[int, ...], parts: Sequence[Part]
) -> DatasetLayout:
    """Return a layout of `count` samples that are parts of those of another one."""
    whole = layout.changed(
        shape=(count, *row_shape),
        sample_axis=0,
        storage="files",
        offset=-1,
        chunk_shape=(),
        filters=(),
        chunks=None,
        values=None,
        sources=(),
        attached=(),
        member=(),
    )
    return with_parts(whole, parts)


def aligned(layouts: Mapping[str, DatasetLayout]) -> dict[str, DatasetLayout]:
    """Return the fields of a file with sequences that begin at equal rows.

    DatasetError if fields have different sequences.
    """
    held = {name: y.sequences.held for name, y in layouts.items() if y.sequences is not None}
    if len(held) < len(layouts):
        return dict(layouts)
    first_name, first = next(iter(held.items()))
    for name, lengths in held.items():
        if lengths.size != first.size or (abs(lengths - first) > _MOST_APART).any():
            raise DatasetError(_unlike(layouts, first_name, name, first, lengths))
    room = np.maximum.reduce(list(held.values()))
    if all(np.array_equal(room, lengths) for lengths in held.values()):
        return dict(layouts)
    return {name: _with_room(layout, room) for name, layout in layouts.items()}


def _unlike(
    layouts: Mapping[str, DatasetLayout],
    one: str,
    other: str,
    lengths: NDArray[np.int64],
    others: NDArray[np.int64],
) -> str:
    both = f"{layouts[one].file}: {one} and {other}"
    if lengths.size != others.size:
        return f"{both} have {lengths.size} and {others.size} sequences; all fields must have equal"
    at = int(np.argmax(abs(lengths - others)))
    return (
        f"{both} have {lengths[at]} and {others[at]} rows in sequence {at}; fields may differ by"
        f" {_MOST_APART} row at most"
    )


def _with_room(layout: DatasetLayout, room: NDArray[np.int64]) -> DatasetLayout:
    """Return a layout in which each sequence begins where that of the longest field does."""
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


def _ragged_with_room(
    layout: DatasetLayout, room: NDArray[np.int64], shift: NDArray[np.int64]
) -> DatasetLayout:
    """Do the same if samples are runs of rows: samples outside sequences have no rows."""
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


def _shifted(first: int, ends: NDArray[np.int64], shift: NDArray[np.int64]) -> int:
    """Return the row's position after its sequence was moved."""
    at = min(int(np.searchsorted(ends, first, side="right")), shift.size - 1)
    return first + int(shift[at]) if shift.size else first
