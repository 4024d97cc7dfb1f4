"""Cuts a part out of all rows of a field: a layout and slices enter; the layout of parts leaves.

What is left out is neither read nor decoded: segments keep their datasets, and have smaller pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from h5async.index.datasettable import Datasets, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.segments import WHOLE, Piece, Segments

_NOTHING = -1


def cut_rows(layout: DatasetLayout, wanted: Sequence[range]) -> DatasetLayout:
    """Return the layout of a part of each row.

    Parameters
    ----------
    layout
        Of plain rows, possibly of several datasets.
    wanted
        The indices to keep, ascending and at least one, per dimension of a row.
    """
    if all(len(part) == size for part, size in zip(wanted, layout.row_shape, strict=True)):
        return layout
    segments, datasets = table_of(layout)
    axis, kept = layout.sample_axis, [len(part) for part in wanted]
    return layout.changed(
        shape=(*kept[:axis], layout.num_samples, *kept[axis:]),
        storage="files" if layout.segments is None else layout.storage,
        offset=-1,
        chunk_shape=(),
        filters=(),
        chunks=None,
        values=None,
        sources=(),
        attached=(),
        member=(),
        segments=_cut_segments(layout, segments, datasets, wanted),
        datasets=datasets,
    )


def _cut_segments(
    layout: DatasetLayout, segments: Segments, datasets: Datasets, wanted: Sequence[range]
) -> Segments:
    """Return the segments of parts of rows; those that hold no part are left out."""
    kinds = datasets.kinds
    kind = datasets.columns.kind[segments.dataset].astype(np.int64)
    both, of_segment = np.unique(segments.piece * len(kinds) + kind, return_inverse=True)
    pieces: list[Piece] = []
    numbers = []
    for old, number in (divmod(one, len(kinds)) for one in both.tolist()):
        found = cut_piece(segments.pieces[old], kinds[number], layout.row_shape, wanted)
        numbers.append(_NOTHING if found is None else len(pieces))
        pieces += [] if found is None else [found]
    piece = np.array(numbers, np.int32)[of_segment.reshape(-1)]
    columns = (*segments.columns[:-1], piece)
    is_there = piece != _NOTHING
    return Segments.of(
        [column[is_there] for column in columns],
        tuple(pieces) or (WHOLE,),
        segments.even,
        segments.kept_nbytes,
    )


def part_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    """Return the dimensions of the part of a row of a dataset that a piece takes."""
    shape = _row_shape(source, piece)
    if piece.source_region is None:
        return shape
    sizes = zip(piece.source_region, shape, strict=True)
    return tuple(len(range(size)[part]) for part, size in sizes)


def cut_piece(
    piece: Piece, source: DatasetLayout, row_shape: tuple[int, ...], wanted: Sequence[range]
) -> Piece | None:
    """Return the part of a piece that lies in a part of its row; None if there is none.

    `row_shape` is that of the rows of which the piece is, and its new region is one of the part.
    """
    theirs = _ranges(piece.source_region, _row_shape(source, piece))
    ours = _ranges(piece.region, row_shape)
    # Dimensions of extent 1 may be missing in either.
    partners = iter([number for number, one in enumerate(theirs) if len(one) != 1])
    region = []
    for here, part in zip(ours, wanted, strict=True):
        partner = None if len(here) == 1 else next(partners)
        is_plain = here.start == 0 and here.step == 1
        common = part if is_plain and part.stop <= here.stop else _common(here, part)
        if not common:
            return None
        region.append(_positions(common, part))
        if partner is not None:
            theirs[partner] = theirs[partner][_positions(common, here)]
    is_all = all(len(range(len(w))[r]) == len(w) for r, w in zip(region, wanted, strict=True))
    taken = tuple(slice(one.start, one.stop, one.step) for one in theirs)
    return Piece(None if is_all else tuple(region), taken, piece.member)


def _row_shape(source: DatasetLayout, piece: Piece) -> tuple[int, ...]:
    """Return the dimensions of a row of a source, and of the member that is taken of it."""
    if piece.member is None:
        return source.row_shape
    assert source.dtype.fields is not None
    return (*source.row_shape, *source.dtype.fields[piece.member][0].shape)


def _ranges(region: Sequence[slice] | None, shape: tuple[int, ...]) -> list[range]:
    if region is None:
        return [range(size) for size in shape]
    return [range(size)[part] for part, size in zip(region, shape, strict=True)]


def _common(one: range, other: range) -> range:
    """Return the numbers that two ascending ranges have in common."""
    found = np.intersect1d(np.asarray(one), np.asarray(other))
    return range(0) if not found.size else _as_range(*found[:2].tolist(), count=found.size)


def _positions(some: range, several: range) -> slice:
    """Return where the numbers of a range are in another one, which has all of them."""
    found = _as_range(*(several.index(n) for n in some[:2]), count=len(some))
    return slice(found.start, found.stop, found.step)


def _as_range(first: int, second: int | None = None, *, count: int) -> range:
    step = 1 if second is None else second - first
    return range(first, first + (count - 1) * step + 1, step)
