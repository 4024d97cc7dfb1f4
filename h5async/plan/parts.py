"""Finds which parts of a dataset hold given samples, and the rows of their sources. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from h5async.index.layout import DatasetLayout, Part
from h5async.plan.records import Int64s

_SCRATCH_NBYTES = 1 << 20  # rows that are read at once if only pieces of them are wanted


def touched_parts(layout: DatasetLayout, sample: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
    """Yield each part that holds some of the samples: its number, their positions, and ordinals."""
    starts = layout.part_starts
    if starts is None:
        for number, part in enumerate(layout.parts):
            ordinal = part.samples.ordinal(sample)
            chosen = np.flatnonzero(ordinal >= 0)
            if chosen.size:
                yield number, chosen, ordinal[chosen]
        return
    if not sample.size:  # zeros stand for all rows of a batch
        return
    order = np.argsort(sample, kind="stable")
    owner = np.searchsorted(starts, sample[order], side="right") - 1
    edges = np.flatnonzero(np.diff(owner)) + 1
    for chosen, first in zip(np.split(order, edges), [0, *edges.tolist()], strict=True):
        number = int(owner[first])
        if number >= 0:
            ordinal = layout.parts[number].samples.ordinal(sample[chosen])
            if (ordinal < 0).any():
                chosen, ordinal = chosen[ordinal >= 0], ordinal[ordinal >= 0]
            if chosen.size:
                yield number, chosen, ordinal


def needs_scratch(layout: DatasetLayout, part: Part) -> bool:
    """Tell whether rows of a part's source must be changed to become rows of the whole."""
    return (
        part.region is not None
        or part.source_region is not None
        or part.member is not None
        or part.source.raw_dtype != layout.raw_dtype
    )


def scratch_rows(source: DatasetLayout) -> int:
    """Return the number of rows of a source that are read to a scratch buffer at once."""
    return max(1, _SCRATCH_NBYTES // max(1, source.row_nbytes))


def scratch_nbytes(layout: DatasetLayout, part: Part) -> int:
    """Return the size of the scratch buffer for rows of a part's source; 0 if none is needed."""
    if not needs_scratch(layout, part):
        return 0
    return scratch_rows(part.source) * part.source.row_nbytes
