"""Reads the mappings of a virtual dataset: the parts of its sources that hold its samples.

A mapping pairs a selection of the virtual dataset with one of equal size of its source, both in C
order (H5Pset_virtual of the HDF5 reference). It becomes a `Part` if both are combinations of
selections per dimension, of equal sizes except for dimensions of extent 1. The samples may be any
set, the other selections must be regular; h5py reads datasets with other mappings. Mappings that
differ only in their samples become one part, so there may be one for each row.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.index.composition import Part
from h5async.index.hdf5 import NotDirectError
from h5async.index.layout import DatasetLayout
from h5async.index.tables import Blocks, Piece, Region, Selection, Slab, region_key

_UNLIMITED = h5py.h5s.UNLIMITED
_MAX_NUMBERED = 100_000
MAX_BLOCKS = 1 << 20  # HDF5 takes 38 s to open a mapping of 20,000, growing with the square
# source(file name, dataset name, its dimension that counts samples) -> layout; None if missing
FindSource = Callable[[str, str, int], DatasetLayout | None]
_MAX_REGIONS = 256


def _within(selected: Selection, extent: int) -> Selection:
    """Return the part of a selection, which may be unlimited, within a dimension's extent."""
    if isinstance(selected, Blocks):
        return selected
    start, stride, count, block = selected.start, selected.stride, selected.count, selected.block
    if block == _UNLIMITED:
        return Slab.run(start, max(start, extent))
    if count == _UNLIMITED:
        count, rest = divmod(max(0, extent - start), stride)
        if rest >= block:
            count += 1
        elif rest and count:
            raise NotDirectError("an unlimited mapping ends within a block")
        elif rest:
            return Slab.run(start, start + rest)
    found = Slab(start, stride, count, block)
    return Slab.run(start, start + found.size) if found.is_run else found


def _is_unlimited(selected: Selection) -> bool:
    return isinstance(selected, Slab) and _UNLIMITED in (selected.count, selected.block)


Selected = Sequence[Selection] | None


class Mapping(NamedTuple):
    """A mapping as stored in the file.

    The names of the source's file and dataset may contain "%b", a number, and stand for many.
    `samples` and `source` are the selections of the virtual dataset and of the source; None for
    everything. If only h5py can read it, `obstacle` says why, and the selections are unknown.
    """

    file: str
    dataset: str
    samples: Selected
    source: Selected
    obstacle: str = ""

    @property
    def numbered_axis(self) -> int | None:
        """The dimension along which numbered sources follow one another without end, if any."""
        for axis, slab in enumerate(self.samples or ()):
            if isinstance(slab, Slab) and slab.count == _UNLIMITED:
                is_numbered = any(re.search(r"(?<!%)(%%)*%b", name) for name in self[:2])
                return axis if is_numbered else None
        return None

    @property
    def is_unlimited(self) -> bool:
        """Whether its extent depends on its source, which HDF5 opens to determine the shape."""
        return any(map(_is_unlimited, self.samples or ()))

    def names(self, number: int | None = None) -> tuple[str, str]:
        """Return the names of file and dataset: "%b" replaced by a number, and "%%" by "%"."""
        if number is None:
            return self.file.replace("%%", "%"), self.dataset.replace("%%", "%")
        file, dataset = (
            re.sub(r"%(.)", lambda found: str(number) if found[1] == "b" else found[1], pattern)
            for pattern in self[:2]
        )
        return file, dataset


def read_mappings(plist: h5py.h5p.PropDCID) -> list[Mapping]:
    """Read the mappings of a virtual dataset from its creation properties."""
    mappings = []
    for number in range(plist.get_virtual_count()):
        file, dataset = plist.get_virtual_filename(number), plist.get_virtual_dsetname(number)
        try:
            samples = _selected(plist.get_virtual_vspace(number))
            source = _selected(plist.get_virtual_srcspace(number))
        except NotDirectError as error:
            mappings.append(Mapping(file, dataset, None, None, str(error)))
        else:
            mappings.append(Mapping(file, dataset, samples, source))
    return mappings


def mapped_files(mappings: Iterable[Mapping], shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield the file name and dataset name of each source, some of them more than once."""
    for mapping in mappings:
        try:
            yield from (one[:2] for one in by_number(mapping, shape))
        except NotDirectError:
            yield mapping.names()


def source_series(
    mappings: Iterable[Mapping],
) -> Iterator[tuple[bool, Iterator[tuple[str, str]]]]:
    """Yield, per mapping, whether its sources are numbered, and their files and datasets.

    Numbered ones ("%b") have no end: whenever the shape is requested, HDF5 tries them until one is
    missing. So the shape is not requested here. Each source comes once.
    """
    series = {(*one[:2], one.numbered_axis is not None): one for one in mappings}
    for (*_, is_numbered), mapping in series.items():
        yield is_numbered, map(mapping.names, itertools.count() if is_numbered else (None,))


def by_number(mapping: Mapping, shape: tuple[int, ...]) -> Iterator[Mapping]:
    """Yield a mapping's numbered sources ("%b") one by one, or the mapping itself."""
    virtual, axis = mapping.samples, mapping.numbered_axis
    if virtual is not None and len(virtual) != len(shape):
        raise NotDirectError("a mapping of another rank")
    if virtual is None or axis is None:
        file, dataset = mapping.names()
        yield mapping._replace(file=file, dataset=dataset)
        return
    slab = virtual[axis]
    assert isinstance(slab, Slab)
    if shape[axis] > slab.start + _MAX_NUMBERED * slab.stride:
        raise NotDirectError(f"a virtual dataset of more than {_MAX_NUMBERED} numbered sources")
    for number, begin in enumerate(range(slab.start, shape[axis], slab.stride)):
        samples = list(virtual)
        samples[axis] = Slab.run(begin, min(begin + slab.block, shape[axis]))
        yield Mapping(*mapping.names(number), samples, mapping.source)


def _selected(space: h5py.h5s.SpaceID) -> Selected:
    """Return a selection per dimension; None if everything is selected."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        return None
    if kind != h5py.h5s.SEL_HYPERSLABS:
        raise NotDirectError("a virtual dataset with a mapping that is no hyperslab")
    if space.is_regular_hyperslab():
        return [*map(Slab, *space.get_regular_hyperslab())]
    return _irregular(space)


def _irregular(space: h5py.h5s.SpaceID) -> list[Selection]:
    """Return the selections per dimension of an irregular hyperslab.

    It must consist of all their combinations, so that their order gives that of its elements: for
    example rows, or one region of several rows.
    """
    if space.get_select_hyper_nblocks() > MAX_BLOCKS:
        raise NotDirectError(f"a virtual dataset with a mapping of more than {MAX_BLOCKS} blocks")
    corners = space.get_select_hyper_blocklist()  # (blocks, 2, rank)
    if corners.max(initial=0) >= 1 << 62:
        raise NotDirectError("a virtual dataset whose source is smaller than mapped")
    corners = corners.astype(np.int64)
    dimensions = [_union(*corners[:, :, d].T) for d in range(corners.shape[2])]
    if math.prod(selection.size for selection in dimensions) != space.get_select_npoints():
        raise NotDirectError("a virtual dataset with a mapping of unlike pieces of samples")
    return dimensions


def _union(first: NDArray[np.int64], last: NDArray[np.int64]) -> Selection:
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(last[order] + 1)
    begins = np.concatenate(([True], first[1:] > end[:-1]))
    first, end = first[begins], end[np.append(begins[1:], True)]
    length = end - first
    if first.size > 1 and np.ptp(np.diff(first)) == 0 and np.ptp(length) == 0:
        return Slab(int(first[0]), int(first[1] - first[0]), first.size, int(length[0]))
    return Blocks.of(first, length)


def virtual_parts(
    mappings: Iterable[Mapping], whole: DatasetLayout, source: FindSource
) -> tuple[Part, ...]:
    """Return the parts of a virtual dataset with these mappings.

    `whole` is its layout, still without parts; `source` finds the layouts of its sources.
    NotDirectError if only h5py can read a mapping.
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
    """Return a key shared by mappings of runs of samples that differ only in where they begin."""
    ours, theirs = mapping.samples, mapping.source
    if ours is None or theirs is None or len(ours) != len(whole.shape):
        return None
    if not all(isinstance(one, Slab) and not _is_unlimited(one) for one in (*ours, *theirs)):
        return None
    source_axis = _source_axis(whole.sample_axis, _sizes(ours), _sizes(theirs))
    key: list[Any] = [mapping.file, mapping.dataset]
    for selected, axis in ((ours, whole.sample_axis), (theirs, source_axis)):
        if axis is not None and not selected[axis].is_run:
            return None
        begins = (None if at == axis else one.start for at, one in enumerate(selected))
        key += [*begins, *((s.stride, s.count, s.block) for s in selected if isinstance(s, Slab))]
    return tuple(key)


def _sizes(selected: Iterable[Selection]) -> tuple[int, ...]:
    return tuple(one.size for one in selected)


def _part_of_many(alike: list[Mapping], whole: DatasetLayout, find: FindSource) -> Part | None:
    axis, first = whole.sample_axis, alike[0]
    assert first.samples is not None
    assert first.source is not None
    source_axis = _source_axis(axis, _sizes(first.samples), _sizes(first.source))
    begin = np.array([m.samples[axis].start for m in alike if m.samples], np.int64)
    source_begin = np.zeros_like(begin)
    if source_axis is not None:
        source_begin = np.array([m.source[source_axis].start for m in alike if m.source], np.int64)
    # The mappings that reach farthest are checked on behalf of all.
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


def _part(mapping: Mapping, whole: DatasetLayout, find: FindSource) -> Part | None:
    """Return the part of a mapping with "%b" replaced; None if nothing is mapped."""
    axis = whole.sample_axis
    virtual = _selections(mapping.samples, whole.shape, "that is smaller than what is mapped to it")
    if any(one.size == 0 for one in virtual):
        return None
    layout = find(mapping.file, mapping.dataset, 0)
    if layout is None:
        return None
    source = _selections(mapping.source, layout.shape, "whose source is smaller than mapped")
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


def _selections(selected: Selected, shape: tuple[int, ...], too_small: str) -> list[Selection]:
    """Return the selections within a shape; NotDirectError if they exceed it."""
    if selected is None:
        return [Slab.run(0, extent) for extent in shape]
    if len(selected) != len(shape):
        raise NotDirectError("a virtual dataset whose source has another rank than mapped")
    found = [_within(one, extent) for one, extent in zip(selected, shape, strict=True)]
    if any(one.end > extent for one, extent in zip(found, shape, strict=True)):
        raise NotDirectError(f"a virtual dataset {too_small}")
    return found


def _cut_alike(
    mapping: Mapping, virtual: list[Selection], source: list[Selection]
) -> tuple[list[Selection], list[Selection]]:
    pairs = []
    for taken, a, b in zip(mapping.source or virtual, virtual, source, strict=True):
        size = min(a.size, b.size)
        pairs.append((_first(a, size), _first(b, size)) if _is_unlimited(taken) else (a, b))
    return [a for a, _ in pairs], [b for _, b in pairs]


def _first(slab: Selection, size: int) -> Selection:
    if slab.size == size:
        return slab
    if isinstance(slab, Blocks):
        raise NotDirectError("an unlimited mapping of blocks")
    if slab.is_run:
        return Slab.run(slab.start, slab.start + size)
    if size % slab.block:
        raise NotDirectError("an unlimited mapping ends within a block")
    return replace(slab, count=size // slab.block)


@lru_cache(maxsize=64)
def _source_axis(axis: int, virtual: tuple[int, ...], source: tuple[int, ...]) -> int | None:
    """Return the source's dimension that counts the samples, by the sizes of both selections.

    None if the source is one sample.
    """
    pairs = _matching(virtual, source)
    if axis in pairs:
        return pairs[axis]
    return next((a for a in range(len(source)) if a not in pairs.values()), None)


def _matching(virtual: tuple[int, ...], source: tuple[int, ...]) -> dict[int, int]:
    """Return the source's dimension for each dimension of the virtual selection."""
    if virtual == source:
        return dict(enumerate(range(len(source))))
    ours = [axis for axis, size in enumerate(virtual) if size != 1]
    theirs = [axis for axis, size in enumerate(source) if size != 1]
    if [virtual[a] for a in ours] != [source[a] for a in theirs]:
        raise NotDirectError("a virtual dataset with a mapping between unlike selections")
    return dict(zip(ours, theirs, strict=True))


def _region(slabs: list[Selection], shape: tuple[int, ...], axis: int) -> Region:
    """Return the selection within a row; None for the whole row."""
    rest = [a for a in range(len(shape)) if a != axis]
    if all(slabs[a].is_run and slabs[a].size == shape[a] for a in rest):
        return None
    pieces = (s.as_slice() if isinstance(s, Slab) else None for s in (slabs[a] for a in rest))
    found = tuple(piece for piece in pieces if piece is not None)
    if len(found) < len(rest):
        raise NotDirectError("a virtual dataset with a mapping of blocks within samples")
    return found


def _require_convertible(stored: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Accept only conversions that NumPy and HDF5 do alike: byte order, and integers without loss.

    Between floats, they differ in the bits of NaNs.
    """
    if stored.newbyteorder("=") == wanted.newbyteorder("="):
        return
    if stored.kind in "iu" and wanted.kind in "iuf" and np.can_cast(stored, wanted, "safe"):
        if wanted.itemsize <= 8:
            return
    raise NotDirectError(f"a virtual dataset of {wanted} whose source has {stored}")


def _require_disjoint(whole: DatasetLayout, parts: list[Part]) -> None:
    """Refuse mappings that overlap: only HDF5 knows which one wins."""
    by_region: dict[Any, tuple[Region, list[Selection]]] = {}
    for part in parts:
        region = part.piece.region
        by_region.setdefault(region_key(region), (region, []))[1].append(part.samples)
    if len(by_region) > _MAX_REGIONS:
        raise NotDirectError(f"a virtual dataset with more than {_MAX_REGIONS} regions of samples")
    several = list(by_region.values())
    for i, (region, samples) in enumerate(several):
        shared = _have_common(samples)
        for other_region, other in several[:i]:
            if not shared and _overlap(region, other_region, whole.row_shape):
                shared = _have_common([*samples, *other])
        if shared:
            raise NotDirectError("a virtual dataset whose mappings overlap")


def _have_common(selections: Sequence[Selection]) -> bool:
    """Return whether two selections share an index; memory grows with blocks, not indices."""
    selections = [one for one in selections if one.size]
    if sum(one.num_blocks for one in selections) > MAX_BLOCKS:
        raise NotDirectError(f"a virtual dataset with mappings of more than {MAX_BLOCKS} blocks")
    if not selections:
        return False
    first, length = map(np.concatenate, zip(*(one.blocks() for one in selections), strict=True))
    order = np.argsort(first)
    return bool(((first + length)[order][:-1] > first[order][1:]).any())


def _overlap(one: Region, other: Region, shape: tuple[int, ...]) -> bool:
    if one is None or other is None:
        return True
    for a, b, extent in zip(one, other, shape, strict=True):
        both = range(extent)[a], range(extent)[b]
        if not _have_common([Slab(found.start, found.step, len(found), 1) for found in both]):
            return False
    return True
