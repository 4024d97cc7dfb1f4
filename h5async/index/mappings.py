"""Reads which selections of which sources a virtual dataset maps.

Sources may be numbered ("%b"), and selections regular, irregular or unlimited hyperslabs
(H5Pset_virtual of the HDF5 reference). `virtual.py` turns them into parts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.index.obstacles import NotDirectError
from h5async.index.slabs import Blocks, Slab

_UNLIMITED = h5py.h5s.UNLIMITED
_MAX_NUMBERED = 100_000
MAX_BLOCKS = 1 << 20  # HDF5 takes 38 s to open a mapping of 20,000, and that grows as the square


class Hyperslab(NamedTuple):
    """One dimension of a hyperslab as in HDF5; the last two numbers may be unlimited."""

    start: int
    stride: int
    num_blocks: int
    block: int

    @property
    def is_unlimited(self) -> bool:
        """Whether it has no end."""
        return _UNLIMITED in (self.num_blocks, self.block)

    def within(self, extent: int) -> Slab:
        """Return its part within a dimension of some extent."""
        start, stride, count, block = self
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


Selected = Sequence[Hyperslab | Slab | Blocks] | None


class Mapping(NamedTuple):
    """A mapping as stored in the file.

    Attributes
    ----------
    file, dataset
        The names of the source; they may represent many, by number ("%b").
    samples, source
        The selections of the virtual dataset, and of the source.
    obstacle
        Why only h5py can read it, so that the selections are unknown; empty if it can be read.
    """

    file: str
    dataset: str
    samples: Selected
    source: Selected
    obstacle: str = ""


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
    """Yield file name and dataset name of each source."""
    names: set[tuple[str, str]] = set()
    for mapping in mappings:
        name = mapping.file, mapping.dataset
        if name in names:
            continue
        if not _is_numbered(*name):
            names.add(name)
            yield _name(mapping.file, None), _name(mapping.dataset, None)
            continue
        try:
            yield from ((one.file, one.dataset) for one in by_number(mapping, shape))
        except NotDirectError:
            yield name


def source_series(
    mappings: Iterable[Mapping],
) -> Iterator[tuple[bool, Iterator[tuple[str, str]]]]:
    """Yield, per mapping, whether its sources are numbered, and their files and datasets.

    Numbered ones ("%b") follow each other without an end: HDF5 tries them until one is missing,
    whenever the shape is requested. So this does not request it. Each source comes once.
    """
    names: set[tuple[bool, str, str]] = set()
    for mapping in mappings:
        file, dataset = mapping.file, mapping.dataset
        is_numbered = _unlimited_axis(mapping.samples) is not None and _is_numbered(file, dataset)
        if (is_numbered, file, dataset) in names:
            continue
        names.add((is_numbered, file, dataset))
        if is_numbered:
            yield True, _numbered_names(file, dataset)
        else:
            yield False, iter([(_name(file, None), _name(dataset, None))])


def by_number(mapping: Mapping, shape: tuple[int, ...]) -> Iterator[Mapping]:
    """Yield a mapping's numbered sources ("%b") one by one, or the mapping itself."""
    file, dataset, virtual = mapping[:3]
    if virtual is not None and len(virtual) != len(shape):
        raise NotDirectError("a mapping of another rank")
    axis = _unlimited_axis(virtual)
    if virtual is None or axis is None or not _is_numbered(file, dataset):
        yield mapping._replace(file=_name(file, None), dataset=_name(dataset, None))
        return
    start, stride, _, block = virtual[axis]  # type: ignore[misc]
    if shape[axis] > start + _MAX_NUMBERED * stride:
        raise NotDirectError(f"a virtual dataset of more than {_MAX_NUMBERED} numbered sources")
    for number, begin in enumerate(range(start, shape[axis], stride)):
        samples = list(virtual)
        samples[axis] = Slab.run(begin, min(begin + block, shape[axis]))
        yield Mapping(_name(file, number), _name(dataset, number), samples, mapping.source)


def _unlimited_axis(selected: Selected) -> int | None:
    """Return the dimension along which blocks follow each other without an end."""
    for axis, slab in enumerate(selected or ()):
        if isinstance(slab, Hyperslab) and slab.num_blocks == _UNLIMITED:
            return axis
    return None


def _numbered_names(file: str, dataset: str) -> Iterator[tuple[str, str]]:
    return ((_name(file, number), _name(dataset, number)) for number in itertools.count())


def _is_numbered(*names: str) -> bool:
    return any(re.search(r"(?<!%)(%%)*%b", name) for name in names)


def _name(pattern: str, number: int | None) -> str:
    """Fill the number of a block into a name: "%b" stands for it, "%%" for a percent sign."""
    if number is None:
        return pattern.replace("%%", "%")
    return re.sub(r"%(.)", lambda found: str(number) if found[1] == "b" else found[1], pattern)


def _selected(space: h5py.h5s.SpaceID) -> Selected:
    """Return a selection per dimension; None if everything is selected."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        return None
    if kind != h5py.h5s.SEL_HYPERSLABS:
        raise NotDirectError("a virtual dataset with a mapping that is no hyperslab")
    if space.is_regular_hyperslab():
        return [*map(Hyperslab, *space.get_regular_hyperslab())]
    return _irregular(space)


def _irregular(space: h5py.h5s.SpaceID) -> list[Slab | Blocks]:
    """Return an irregular hyperslab per dimension.

    It must consist of all combinations of its selections per dimension, so that their order is that
    of its elements, too: such as rows, or one region of several rows.
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


def _union(first: NDArray[np.int64], last: NDArray[np.int64]) -> Slab | Blocks:
    """Return the indices of all blocks, each once."""
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(last[order] + 1)
    begins = np.concatenate(([True], first[1:] > end[:-1]))
    first, end = first[begins], end[np.append(begins[1:], True)]
    length = end - first
    if first.size > 1 and np.ptp(np.diff(first)) == 0 and np.ptp(length) == 0:
        return Slab(int(first[0]), int(first[1] - first[0]), first.size, int(length[0]))
    return Blocks.of(first, length)
