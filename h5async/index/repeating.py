"""Makes a dataset with a row for each sample of one with a row for each sequence, or each file.

All samples of a sequence then have the same row: its segment has a `step` of 0. So a field that
sequences or files have once is read, kept, and delivered like any other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h5async.index.datasettable import shared, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.segments import Segments

Int64s = NDArray[np.int64]


def repeated(
    layout: DatasetLayout, starts: Int64s, ends: Int64s, like: DatasetLayout
) -> DatasetLayout:
    """Return the layout in which samples ``starts[i]`` to ``ends[i]`` have row i of another.

    Parameters
    ----------
    layout
        Its rows, as many as there are starts.
    starts, ends
        int64 (n,), non-decreasing. Samples in none of the ranges have the fill value.
    like
        A field whose rows are samples.
    """
    segments, datasets = table_of(layout)
    counts, columns = ends - starts, []
    wanted = np.flatnonzero(counts > 0)
    for _, layer in segments.layers if segments.size else ():
        at = np.searchsorted(layer.first, wanted, side="right") - 1
        is_held = (at >= 0) & (wanted < layer.end[at])
        at, rows = at[is_held], wanted[is_held]
        row = layer.row[at] + (rows - layer.first[at]) * layer.step[at]
        step = np.zeros_like(row)
        columns.append((starts[rows], counts[rows], row, step, layer.dataset[at], layer.piece[at]))
    shape = list(layout.shape)
    shape[layout.sample_axis] = like.sample_count
    found = [np.concatenate(column) for column in zip(*columns, strict=True)]
    even = ((0, like.sample_count, 0),)
    first_of = [int(starts[min(first, starts.size - 1)]) if first else 0 for first, _ in layout.cf]
    return shared(
        layout.without_place(
            "files",
            shape=tuple(shape),
            segments=Segments.of(found, segments.pieces, even) if found else None,
            datasets=datasets,
            file_samples=like.file_samples,
            sequences=like.sequences and like.sequences._replace(held=like.sequences.room),
            cf=tuple(zip(first_of, (how for _, how in layout.cf), strict=True)),
        )
    )
