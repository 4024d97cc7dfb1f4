"""Reads the mappings of a virtual dataset: which part of which source holds which samples.

A mapping pairs a selection of the virtual dataset with one of equal size of its source, both in C
order (H5Pset_virtual of the HDF5 reference). It becomes a `Part` if both are combinations of
selections per dimension of equal size, except for dimensions of extent 1; the samples may be any
set, the other selections must be regular. h5py reads other datasets. Mappings of the same dataset
become one part, so that there may be one per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from h5async.index.composition import Part
from h5async.index.layout import DatasetLayout
from h5async.index.mappings import MAX_BLOCKS, Hyperslab, Mapping, Selected, by_number
from h5async.index.obstacles import NotDirectError
from h5async.index.segments import Piece, region_key
from h5async.index.slabs import Blocks, Slab

# source(file name, dataset name, its dimension that counts samples) -> layout; None: it is missing
FindSource = Callable[[str, str, int], DatasetLayout | None]

_MAX_REGIONS = 256


# What is selected of each dimension; None: everything.


def virtual_parts(
    mappings: Iterable[Mapping], whole: DatasetLayout, source: FindSource
) -> tuple[Part, ...]:
    """Return the parts of a virtual dataset.

    Parameters
    ----------
    mappings
        From `read_mappings`.
    whole
        Its layout, still without parts.
    source
        Finds the layouts of its sources.

    Raises
    ------
    NotDirectError
        If only h5py can read this kind of mapping.
    """
    parts = []
    for alike in _alike(mappings, whole):
        if len(alike) > 1:
            parts.append(_part_of_many(alike, whole, source))
        else:
            several = by_number(alike[0], whole.shape)
            parts += [_part(mapping, whole, source) for mapping in several]
    found = [part for part in parts if part is not None]
    _require_disjoint(whole, found)
    return tuple(sorted(found, key=lambda part: part.samples.start))


def _alike(mappings: Iterable[Mapping], whole: DatasetLayout) -> Iterable[list[Mapping]]:
    """Group mappings that differ only in their samples: there may be one per sample."""
    groups: dict[Any, list[Mapping]] = {}
    for number, mapping in enumerate(mappings):
        if mapping.obstacle:
            raise NotDirectError(mapping.obstacle)
        groups.setdefault(_all_but_begin(mapping, whole) or number, []).append(mapping)
    return groups.values()


def _all_but_begin(mapping: Mapping, whole: DatasetLayout) -> tuple[Any, ...] | None:
    """Return a key for mappings of runs of samples that differ only in where these begin.

    None for other mappings.
    """
    extents, source_extents = _extents(mapping.samples), _extents(mapping.source)
    if extents is None or source_extents is None or len(extents) != len(whole.shape):
        return None
    assert mapping.samples is not None
    assert mapping.source is not None
    axis = whole.sample_axis
    source_axis = _source_axis(axis, _sizes(mapping.samples), _sizes(mapping.source))
    if not _is_run(extents[axis]):
        return None
    if source_axis is not None and not _is_run(source_extents[source_axis]):
        return None
    return (
        mapping.file,
        mapping.dataset,
        extents,
        source_extents,
        tuple(slab.start for a, slab in enumerate(mapping.samples) if a != axis),
        tuple(slab.start for a, slab in enumerate(mapping.source) if a != source_axis),
    )


def _extents(selected: Selected) -> tuple[tuple[int, ...], ...] | None:
    """Return all of a limited hyperslab except where it begins; None for others."""
    if selected is None:
        return None
    if not all(isinstance(slab, Hyperslab) and not slab.is_unlimited for slab in selected):
        return None
    return tuple((s.stride, s.num_blocks, s.block) for s in selected if isinstance(s, Hyperslab))


def _sizes(selected: Iterable[Hyperslab | Slab | Blocks]) -> tuple[int, ...]:
    return tuple(
        one.num_blocks * one.block if isinstance(one, Hyperslab) else one.size for one in selected
    )


def _is_run(extent: tuple[int, ...]) -> bool:
    stride, count, block = extent
    return count == 1 or stride == block


def _part_of_many(alike: list[Mapping], whole: DatasetLayout, find: FindSource) -> Part | None:
    """Return the part of mappings that differ only in their samples."""
    axis, first = whole.sample_axis, alike[0]
    assert first.samples is not None
    assert first.source is not None
    source_axis = _source_axis(axis, _sizes(first.samples), _sizes(first.source))
    begin = np.array([m.samples[axis].start for m in alike if m.samples], np.int64)
    source_begin = np.zeros_like(begin)
    if source_axis is not None:
        source_begin = np.array([m.source[source_axis].start for m in alike if m.source], np.int64)
    # Those that reach farthest are checked for all.
    farthest = [alike[int(begin.argmax())], alike[int(source_begin.argmax())]]
    named = (one for mapping in farthest for one in by_number(mapping, whole.shape))
    _, part = (_part(mapping, whole, find) for mapping in named)
    if part is None:
        return None
    order = np.argsort(begin, kind="stable")
    length = np.full(begin.size, part.samples.size, np.int64)
    return part._replace(
        samples=Blocks.of(begin[order], length),
        source_samples=Blocks.of(source_begin[order], length),
    )


def _within(selected: Hyperslab | Slab | Blocks, extent: int) -> Slab | Blocks:
    """Return the part of a selection within a dimension of some extent."""
    return selected.within(extent) if isinstance(selected, Hyperslab) else selected


def _part(mapping: Mapping, whole: DatasetLayout, find: FindSource) -> Part | None:
    """Return the part of a mapping whose numbers are filled in; None if nothing is mapped."""
    axis = whole.sample_axis
    selected = mapping.samples or [Slab.run(0, extent) for extent in whole.shape]
    virtual = [_within(one, extent) for one, extent in zip(selected, whole.shape, strict=True)]
    if any(one.size == 0 for one in virtual):
        return None
    if any(one.end > extent for one, extent in zip(virtual, whole.shape, strict=True)):
        raise NotDirectError("a virtual dataset that is smaller than what is mapped to it")
    layout = find(mapping.file, mapping.dataset, 0)
    if layout is None:
        return None
    source = _source_selections(mapping, layout)
    if len(source) == len(virtual):
        virtual, source = _cut_alike(mapping, virtual, source)
        if any(one.size == 0 for one in virtual):
            return None
    source_axis = _source_axis(axis, _sizes(virtual), _sizes(source))
    if source_axis:
        layout = find(mapping.file, mapping.dataset, source_axis)
        assert layout is not None
    elif source_axis is None:
        if layout.segments is not None:
            raise NotDirectError("a virtual dataset whose source, itself virtual, is one sample")
        layout, source, source_axis = layout.with_one_sample(), [Slab.run(0, 1), *source], 0
    _require_convertible(layout.dtype, whole.dtype)
    return Part(
        source=layout,
        samples=virtual[axis],
        source_samples=source[source_axis],
        piece=Piece(
            _region(virtual, whole.shape, axis), _region(source, layout.shape, source_axis)
        ),
    )


def _source_selections(mapping: Mapping, layout: DatasetLayout) -> list[Slab | Blocks]:
    if mapping.source is None:
        return [Slab.run(0, extent) for extent in layout.shape]
    if len(mapping.source) != len(layout.shape):
        raise NotDirectError("a virtual dataset whose source has another rank than mapped")
    selections = []
    for selected, extent in zip(mapping.source, layout.shape, strict=True):
        selection = _within(selected, extent)
        if selection.end > extent:
            raise NotDirectError("a virtual dataset whose source is smaller than mapped")
        selections.append(selection)
    return selections


def _cut_alike(
    mapping: Mapping, virtual: list[Slab | Blocks], source: list[Slab | Blocks]
) -> tuple[list[Slab | Blocks], list[Slab | Blocks]]:
    """Cut unlimited selections to the extent of both sides."""
    pairs = []
    for taken, a, b in zip(mapping.source or virtual, virtual, source, strict=True):
        size = min(a.size, b.size)
        is_free = isinstance(taken, Hyperslab) and taken.is_unlimited
        pairs.append((_first(a, size), _first(b, size)) if is_free else (a, b))
    return [a for a, _ in pairs], [b for _, b in pairs]


def _first(slab: Slab | Blocks, size: int) -> Slab | Blocks:
    if slab.size == size:
        return slab
    if isinstance(slab, Blocks):
        raise NotDirectError("an unlimited mapping of blocks")
    if slab.is_run:
        return Slab.run(slab.start, slab.start + size)
    if size % slab.block:
        raise NotDirectError("an unlimited mapping ends within a block")
    return Slab(slab.start, slab.stride, size // slab.block, slab.block)


@lru_cache(maxsize=64)
def _source_axis(axis: int, virtual: tuple[int, ...], source: tuple[int, ...]) -> int | None:
    """Return the source's dimension that counts the samples, by the sizes of both selections.

    None if there is none: the source is one sample.
    """
    pairs = _matching(virtual, source)
    if axis in pairs:
        return pairs[axis]
    return next((a for a in range(len(source)) if a not in pairs.values()), None)


def _matching(virtual: tuple[int, ...], source: tuple[int, ...]) -> dict[int, int]:
    """Return the source's dimension for each one of the virtual selection."""
    if virtual == source:
        return dict(enumerate(range(len(source))))
    ours = [axis for axis, size in enumerate(virtual) if size != 1]
    theirs = [axis for axis, size in enumerate(source) if size != 1]
    if [virtual[a] for a in ours] != [source[a] for a in theirs]:
        raise NotDirectError("a virtual dataset with a mapping between unlike selections")
    return dict(zip(ours, theirs, strict=True))


def _region(
    slabs: list[Slab | Blocks], shape: tuple[int, ...], axis: int
) -> tuple[slice, ...] | None:
    """Return the selection within a row; None for the whole row."""
    rest = [a for a in range(len(shape)) if a != axis]
    if all(slabs[a].is_run and slabs[a].size == shape[a] for a in rest):
        return None
    region = tuple(slabs[a].as_slice() for a in rest)
    if None in region:
        raise NotDirectError("a virtual dataset with a mapping of blocks within samples")
    return region  # type: ignore[return-value]


def _require_convertible(stored: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Accept conversions in which NumPy equals HDF5: of byte order, and of integers without loss.

    Between floats, the two differ in the bits of NaNs.
    """
    if stored.newbyteorder("=") == wanted.newbyteorder("="):
        return
    if stored.kind in "iu" and wanted.kind in "iuf" and np.can_cast(stored, wanted, "safe"):
        if wanted.itemsize <= 8:
            return
    raise NotDirectError(f"a virtual dataset of {wanted} whose source has {stored}")


def _require_disjoint(whole: DatasetLayout, parts: list[Part]) -> None:
    """Refuse mappings that overlap: only HDF5 knows which one wins."""
    by_region: dict[Any, list[Part]] = {}
    for part in parts:
        by_region.setdefault(region_key(part.piece.region), []).append(part)
    if len(by_region) > _MAX_REGIONS:
        raise NotDirectError(f"a virtual dataset with more than {_MAX_REGIONS} regions of samples")
    groups = [[part.samples for part in group] for group in by_region.values()]
    regions = [group[0].piece.region for group in by_region.values()]
    for i, (samples, region) in enumerate(zip(groups, regions, strict=True)):
        shared = _have_common(samples)
        for other, other_region in zip(groups[:i], regions, strict=False):
            if not shared and _overlap(region, other_region, whole.row_shape):
                shared = _have_common([*samples, *other])
        if shared:
            raise NotDirectError("a virtual dataset whose mappings overlap")


def _have_common(selections: Sequence[Slab | Blocks]) -> bool:
    """Return whether two selections share an index; memory grows with blocks, not indices."""
    selections = [one for one in selections if one.size]
    if sum(one.num_blocks for one in selections) > MAX_BLOCKS:
        raise NotDirectError(f"a virtual dataset with mappings of more than {MAX_BLOCKS} blocks")
    if not selections:
        return False
    first, length = map(np.concatenate, zip(*(one.blocks() for one in selections), strict=True))
    order = np.argsort(first)
    return bool(((first + length)[order][:-1] > first[order][1:]).any())


def _overlap(
    one: tuple[slice, ...] | None, other: tuple[slice, ...] | None, shape: tuple[int, ...]
) -> bool:
    """Return whether two regions of a row share an element; None is all of it."""
    if one is None or other is None:
        return True
    return all(
        _have_common([_slab(a, extent), _slab(b, extent)])
        for a, b, extent in zip(one, other, shape, strict=True)
    )


def _slab(piece: slice, extent: int) -> Slab:
    selected = range(extent)[piece]
    return Slab(selected.start, selected.step, len(selected), 1)
