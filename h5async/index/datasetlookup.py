"""Finds which dataset holds which samples of a field, and where pieces of its rows go. Pure.

A layout of parts enters, of files or of mappings, which may have parts themselves; leaves leave:
runs of samples that one dataset holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.index.layout import DatasetLayout, Part, region_key
from h5async.index.slabs import MOST_RUNS, PairedRuns, TooManyRunsError, runs_between

Region = tuple[slice, ...] | None

HDF5_MAX_RANK = 32


class Leaf(NamedTuple):
    """Runs of samples that one dataset holds, and where which piece of its rows goes."""

    layout: DatasetLayout
    runs: PairedRuns
    region: Region
    source_region: Region
    member: str | None
    is_left: bool


def leaves_of(layout: DatasetLayout, max_rank: int = HDF5_MAX_RANK) -> Iterator[Leaf]:
    """Yield what each dataset holds of a field's samples; TooManyRunsError if it is too much."""
    whole = PairedRuns.one(0, layout.num_samples, 0)
    if not layout.parts:
        if layout.num_samples:
            yield Leaf(layout, whole, None, None, None, False)
        return
    for part in layout.parts:
        runs = runs_between(part.samples, part.source_samples)
        if not runs.size:
            continue
        is_left = part.member is None and swaps(part.source, layout) is None
        is_piece = not (part.region is None and part.source_region is None and part.member is None)
        if part.member is not None and not _can_take_member(part, layout, max_rank):
            is_left = True
        if is_left or not part.source.parts or is_piece:
            is_left = is_left or bool(part.source.parts)
            yield Leaf(part.source, runs, part.region, part.source_region, part.member, is_left)
            continue
        if part.source.has_gaps and not _fills_alike(part.source, layout):
            yield Leaf(part.source, runs, None, None, None, True)
            continue
        by_region: dict[Any, list[Leaf]] = {}
        for leaf in leaves_of(part.source, max_rank):
            by_region.setdefault(region_key(leaf.region), []).append(leaf)
        for leaves in by_region.values():
            yield from _composed(runs, leaves)


def _fills_alike(one: DatasetLayout, other: DatasetLayout) -> bool:
    fills = one.raw_fill, other.raw_fill
    return fills[0].dtype == fills[1].dtype and fills[0].tobytes() == fills[1].tobytes()


def swaps(source: DatasetLayout, whole: DatasetLayout) -> int | None:
    """Return the size of the numbers of a source whose byte order must be reversed; 0 for none.

    None means that its values need another conversion.
    """
    stored, wanted = source.raw_dtype, whole.raw_dtype
    if stored == wanted:
        return 0
    nbytes = stored.itemsize // 2 if stored.kind == "c" else stored.itemsize
    is_number = stored.kind in "iufc" and nbytes in (2, 4, 8)
    return nbytes if is_number and stored.newbyteorder("S") == wanted else None


def _can_take_member(part: Part, layout: DatasetLayout, max_rank: int) -> bool:
    fields = part.source.dtype.fields
    if part.region is not None or part.source_region is not None:
        return False
    if fields is None or part.member is None:
        return False
    member = fields[part.member][0] if part.member in fields else None
    return (
        member is not None
        and len({element.tobytes() for element in member_fill(part.source, part.member)}) == 1
        and member.base == layout.raw_dtype
        and (*part.source.row_shape, *member.shape) == layout.row_shape
        and len(part.source.shape) + len(member.shape) <= max_rank
    )


def member_fill(layout: DatasetLayout, member: str) -> NDArray[Any]:
    """Return the fill value of a member of a compound: (elements,), more than one for an array."""
    return np.ascontiguousarray(layout.fill[member]).reshape(-1)


def _composed(outer: PairedRuns, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """Yield the datasets' parts of the samples of outer runs, whose rows are the datasets' samples.

    No sample is in two of the datasets.
    """
    outer = outer.single_steps()
    inner = PairedRuns.joined([leaf.runs for leaf in leaves])
    leaf = np.repeat(np.arange(len(leaves)), [leaf.runs.size for leaf in leaves])
    order = np.argsort(inner.first, kind="stable")
    first, length, row, step = (column[order] for column in inner)
    last = first + length
    # Per outer run, the inner runs that overlap it: `low` up to `high`, exclusive.
    low = np.searchsorted(last, outer.row, side="right")
    high = np.searchsorted(first, outer.row + outer.length, side="left")
    count = np.maximum(high - low, 0)
    if count.sum() > MOST_RUNS:
        raise TooManyRunsError
    which = np.repeat(np.arange(outer.row.size), count)
    inside = np.arange(which.size) - np.repeat(np.cumsum(count) - count, count) + low[which]
    begin = np.maximum(outer.row[which], first[inside])
    end = np.minimum(outer.row[which] + outer.length[which], last[inside])
    found = PairedRuns(
        outer.first[which] + begin - outer.row[which],
        end - begin,
        row[inside] + (begin - first[inside]) * step[inside],
        step[inside],
    )
    owner = leaf[order][inside]
    by_owner = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[by_owner], np.arange(len(leaves) + 1))
    for number in np.flatnonzero(np.diff(edges)).tolist():
        here = by_owner[edges[number] : edges[number + 1]]
        runs = PairedRuns(*(column[here] for column in found))
        yield leaves[number]._replace(runs=runs)


def lie_within(runs: PairedRuns, num_samples: int) -> bool:
    """Return whether all rows are rows of a dataset with `num_samples`."""
    if runs.size == 1:  # the usual case: one run per file
        row, step = int(runs.row[0]), int(runs.step[0])
        return row >= 0 and step >= 1 and row + (int(runs.length[0]) - 1) * step < num_samples
    last = runs.row + (runs.length - 1) * runs.step
    return bool((runs.row >= 0).all() and (last < num_samples).all() and (runs.step >= 1).all())
