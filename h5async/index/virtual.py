"""Reads the mappings of a virtual dataset: which part of which source holds which samples.

A mapping pairs a selection of the virtual dataset with one, as large, of its source, both in
C order (H5Pset_virtual of the HDF5 reference). It becomes a `Part` where both are regular
hyperslabs of equal extents, except for dimensions of extent 1; other datasets are left to h5py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5async.index.layout import DatasetLayout, Part
from h5async.index.obstacles import NotDirectError
from h5async.index.slabs import Slab

# source(file name, dataset name, its dimension that counts samples) -> layout; None: it is missing
FindSource = Callable[[str, str, int], DatasetLayout | None]

_UNLIMITED = h5py.h5s.UNLIMITED
_MAX_REGIONS = 256
_MAX_NUMBERED = 100_000
_MAX_BLOCKS = 1 << 20  # HDF5 takes half a minute or more to open 40,000


class _Mapping(NamedTuple):
    """A mapping with its numbers filled in: one slab for each dimension, None for all of it."""

    file: str
    dataset: str
    samples: list[Slab] | None
    source: list[_Hyperslab] | None


@dataclass(frozen=True, slots=True)
class _Hyperslab:
    """One dimension of a hyperslab as HDF5 has it; count or block may be unlimited."""

    start: int
    stride: int
    count: int
    block: int

    @property
    def is_unlimited(self) -> bool:
        return _UNLIMITED in (self.count, self.block)

    def within(self, extent: int) -> Slab:
        """Return the part of it that lies within a dimension of some extent."""
        start, stride, count, block = self.start, self.stride, self.count, self.block
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
        if count == 1 or stride == block:
            return Slab.run(start, start + count * block)
        return Slab(start, stride, count, block)


def mapped_files(plist: h5py.h5p.PropDCID, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield file name and dataset name of each source."""
    for mapping in _mappings(plist, shape, strict=False):
        yield mapping.file, mapping.dataset


def source_series(
    plist: h5py.h5p.PropDCID,
) -> Iterator[tuple[bool, Iterator[tuple[str, str]]]]:
    """Yield, for each mapping, whether its sources are numbered, and their files and datasets.

    Numbered ones ("%b") follow each other without an end: HDF5 tries them until one is missing,
    whenever it is asked for the shape. So this does not ask for the shape.
    """
    for mapping in range(plist.get_virtual_count()):
        file, dataset = plist.get_virtual_filename(mapping), plist.get_virtual_dsetname(mapping)
        try:
            virtual = _hyperslab(plist.get_virtual_vspace(mapping)) or []
        except NotDirectError:
            yield False, iter([(file, dataset)])
            continue
        if any(slab.count == _UNLIMITED for slab in virtual) and _is_numbered(file, dataset):
            yield True, ((_name(file, n), _name(dataset, n)) for n in itertools.count())
        else:
            yield False, iter([(_name(file, None), _name(dataset, None))])


def virtual_parts(
    plist: h5py.h5p.PropDCID, whole: DatasetLayout, source: FindSource
) -> tuple[Part, ...]:
    """Return the parts of a virtual dataset.

    Parameters
    ----------
    plist
        The dataset's creation properties.
    whole
        Its layout, still without parts.
    source
        Finds the layouts of its sources.

    Raises
    ------
    NotDirectError
        If the mappings are of a kind that only h5py can read.
    """
    parts = []
    for mapping in _mappings(plist, whole.shape, strict=True):
        part = _part(mapping, whole, source)
        if part is not None:
            parts.append(part)
    _require_disjoint(whole, parts)
    return tuple(sorted(parts, key=lambda part: part.samples.start))


def _mappings(
    plist: h5py.h5p.PropDCID, shape: tuple[int, ...], *, strict: bool
) -> Iterator[_Mapping]:
    """Yield the mappings; those to numbered sources ("%b") one by one.

    Not `strict`: mappings that only h5py can read are yielded without their selections.
    """
    for number in range(plist.get_virtual_count()):
        file, dataset = plist.get_virtual_filename(number), plist.get_virtual_dsetname(number)
        try:
            virtual = _hyperslab(plist.get_virtual_vspace(number))
            source = _hyperslab(plist.get_virtual_srcspace(number))
            yield from _numbered(file, dataset, shape, virtual, source)
        except NotDirectError:
            if strict:
                raise
            yield _Mapping(file, dataset, None, None)


def _numbered(
    file: str,
    dataset: str,
    shape: tuple[int, ...],
    virtual: list[_Hyperslab] | None,
    source: list[_Hyperslab] | None,
) -> Iterator[_Mapping]:
    if virtual is None:
        yield _Mapping(_name(file, None), _name(dataset, None), None, source)
        return
    if len(virtual) != len(shape):
        raise NotDirectError("a mapping of another rank")
    axis = next((a for a, slab in enumerate(virtual) if slab.count == _UNLIMITED), None)
    if axis is None or not _is_numbered(file, dataset):
        slabs = [slab.within(extent) for slab, extent in zip(virtual, shape, strict=True)]
        yield _Mapping(_name(file, None), _name(dataset, None), slabs, source)
        return
    start, stride, block = virtual[axis].start, virtual[axis].stride, virtual[axis].block
    if shape[axis] > start + _MAX_NUMBERED * stride:
        raise NotDirectError(f"a virtual dataset of more than {_MAX_NUMBERED} numbered sources")
    for number, begin in enumerate(range(start, shape[axis], stride)):
        slabs = [slab.within(n) for slab, n in zip(virtual[:axis], shape[:axis], strict=True)]
        slabs.append(Slab.run(begin, min(begin + block, shape[axis])))
        rest = zip(virtual[axis + 1 :], shape[axis + 1 :], strict=True)
        slabs += [slab.within(n) for slab, n in rest]
        yield _Mapping(_name(file, number), _name(dataset, number), slabs, source)


def _is_numbered(*names: str) -> bool:
    return any(re.search(r"(?<!%)(%%)*%b", name) for name in names)


def _name(pattern: str, number: int | None) -> str:
    """Fill the number of a block into a name: "%b" stands for it, "%%" for a percent sign."""
    if number is None:
        return pattern.replace("%%", "%")
    return re.sub(r"%(.)", lambda found: str(number) if found[1] == "b" else found[1], pattern)


def _hyperslab(space: h5py.h5s.SpaceID) -> list[_Hyperslab] | None:
    """Return a selection; None: everything is selected."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        return None
    if kind == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        return [_Hyperslab(*map(int, d)) for d in zip(*space.get_regular_hyperslab(), strict=True)]
    raise NotDirectError("a virtual dataset with an irregular mapping")


def _part(mapping: _Mapping, whole: DatasetLayout, find: FindSource) -> Part | None:
    axis = whole.sample_axis
    virtual = mapping.samples or [Slab.run(0, extent) for extent in whole.shape]
    if any(slab.size == 0 for slab in virtual):
        return None
    if any(slab.end > extent for slab, extent in zip(virtual, whole.shape, strict=True)):
        raise NotDirectError("a virtual dataset that is smaller than what is mapped to it")
    layout = find(mapping.file, mapping.dataset, 0)
    if layout is None:
        return None
    source = _source_slabs(mapping, layout)
    if len(source) == len(virtual):
        virtual, source = _cut_alike(mapping, virtual, source)
        if any(slab.size == 0 for slab in virtual):
            return None
    pairs = _matching([slab.size for slab in virtual], [slab.size for slab in source])
    source_axis = pairs.get(axis)
    if source_axis is None:
        source_axis = next((a for a in range(len(source)) if a not in pairs.values()), None)
    if source_axis:
        layout = find(mapping.file, mapping.dataset, source_axis)
        assert layout is not None
    elif source_axis is None:
        if layout.parts:
            raise NotDirectError("a virtual dataset whose source, itself virtual, is one sample")
        layout, source, source_axis = layout.with_one_sample(), [Slab.run(0, 1), *source], 0
    _require_convertible(layout.dtype, whole.dtype)
    return Part(
        source=layout,
        samples=virtual[axis],
        source_samples=source[source_axis],
        region=_region(virtual, whole.shape, axis),
        source_region=_region(source, layout.shape, source_axis),
    )


def _source_slabs(mapping: _Mapping, layout: DatasetLayout) -> list[Slab]:
    if mapping.source is None:
        return [Slab.run(0, extent) for extent in layout.shape]
    if len(mapping.source) != len(layout.shape):
        raise NotDirectError("a virtual dataset whose source has another rank than mapped")
    slabs = []
    for hyperslab, extent in zip(mapping.source, layout.shape, strict=True):
        slab = hyperslab.within(extent)
        if slab.end > extent:
            raise NotDirectError("a virtual dataset whose source is smaller than mapped")
        slabs.append(slab)
    return slabs


def _cut_alike(
    mapping: _Mapping, virtual: list[Slab], source: list[Slab]
) -> tuple[list[Slab], list[Slab]]:
    """Cut unlimited selections to what both sides have."""
    unlimited = [slab.is_unlimited for slab in mapping.source or ()]
    pairs = []
    for i, (a, b) in enumerate(zip(virtual, source, strict=True)):
        size = min(a.size, b.size)
        is_free = unlimited[i] if unlimited else False
        pairs.append((_first(a, size), _first(b, size)) if is_free else (a, b))
    return [a for a, _ in pairs], [b for _, b in pairs]


def _first(slab: Slab, size: int) -> Slab:
    if slab.size == size:
        return slab
    if slab.is_run:
        return Slab.run(slab.start, slab.start + size)
    if size % slab.block:
        raise NotDirectError("an unlimited mapping ends within a block")
    return Slab(slab.start, slab.stride, size // slab.block, slab.block)


def _matching(virtual: list[int], source: list[int]) -> dict[int, int]:
    """Return which dimension of the source each one of the virtual selection is."""
    if virtual == source:
        return dict(enumerate(range(len(source))))
    ours = [axis for axis, size in enumerate(virtual) if size != 1]
    theirs = [axis for axis, size in enumerate(source) if size != 1]
    if [virtual[a] for a in ours] != [source[a] for a in theirs]:
        raise NotDirectError("a virtual dataset with a mapping between unlike selections")
    return dict(zip(ours, theirs, strict=True))


def _region(slabs: list[Slab], shape: tuple[int, ...], axis: int) -> tuple[slice, ...] | None:
    """Return what is selected of a row, None for the whole row."""
    rest = [a for a in range(len(shape)) if a != axis]
    if all(slabs[a].is_run and slabs[a].size == shape[a] for a in rest):
        return None
    region = tuple(slabs[a].as_slice() for a in rest)
    if None in region:
        raise NotDirectError("a virtual dataset with a mapping of blocks within samples")
    return region  # type: ignore[return-value]


def _require_convertible(stored: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Accept conversions that NumPy makes as HDF5 does: of byte order, and of integers.

    Those of integers must not lose bits. Between floats, the two differ in the bits of NaNs.
    """
    if stored.newbyteorder("=") == wanted.newbyteorder("="):
        return
    if stored.kind in "iu" and wanted.kind in "iuf" and np.can_cast(stored, wanted, "safe"):
        if wanted.itemsize <= 8:
            return
    raise NotDirectError(f"a virtual dataset of {wanted} whose source has {stored}")


def _require_disjoint(whole: DatasetLayout, parts: list[Part]) -> None:
    """Refuse mappings that overlap: only HDF5 knows which one wins."""
    by_region: dict[tuple[Any, ...] | None, list[Part]] = {}
    for part in parts:
        region = part.region
        key = None if region is None else tuple((s.start, s.stop, s.step) for s in region)
        by_region.setdefault(key, []).append(part)
    if len(by_region) > _MAX_REGIONS:
        raise NotDirectError(f"a virtual dataset with more than {_MAX_REGIONS} regions of samples")
    groups = [[part.samples for part in group] for group in by_region.values()]
    regions = [group[0].region for group in by_region.values()]
    for i, (samples, region) in enumerate(zip(groups, regions, strict=True)):
        shared = _have_common(samples)
        for other, other_region in zip(groups[:i], regions, strict=False):
            if _overlap(region, other_region, whole.row_shape):
                shared = shared or _have_common([*samples, *other])
        if shared:
            raise NotDirectError("a virtual dataset whose mappings overlap")


def _have_common(slabs: list[Slab]) -> bool:
    """Tell whether two of some selections share an index; memory grows with blocks, not indices."""
    slabs = [Slab.run(s.start, s.end) if s.is_run else s for s in slabs if s.size]
    if sum(slab.count for slab in slabs) > _MAX_BLOCKS:
        raise NotDirectError(f"a virtual dataset with mappings of more than {_MAX_BLOCKS} blocks")
    starts = [slab.start + np.arange(slab.count) * slab.stride for slab in slabs]
    start = np.concatenate([np.zeros(0, np.int64), *starts])
    order = np.argsort(start)
    end = start + np.repeat([s.block for s in slabs], [s.count for s in slabs])
    return bool((end[order][:-1] > start[order][1:]).any())


def _overlap(
    one: tuple[slice, ...] | None, other: tuple[slice, ...] | None, shape: tuple[int, ...]
) -> bool:
    """Tell whether two regions of a row share an element; None is all of it."""
    if one is None or other is None:
        return True
    return all(
        _have_common([_slab(a, extent), _slab(b, extent)])
        for a, b, extent in zip(one, other, shape, strict=True)
    )


def _slab(piece: slice, extent: int) -> Slab:
    selected = range(extent)[piece]
    return Slab(selected.start, selected.step, len(selected), 1)
