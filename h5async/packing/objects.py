"""Copies and compares the objects of a file: groups, datasets, datatypes, links, attributes.

A file and the changes to its datasets enter; a file with all objects leaves, complete except for
the values of datasets that are copied later.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5 as library
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from h5async.errors import DatasetError
from h5async.packing.rawvalues import (
    RawValues,
    References,
    Twin,
    call_hdf5,
    copy_attribute,
    has_pointers,
    has_references,
)
from h5async.spelling import name_text

SMALL_NBYTES = 1 << 20  # datasets that take up to this much storage are copied whole by HDF5
_USER_DEFINED = h5d.FILL_VALUE_USER_DEFINED
_COPY_WITHOUT_ATTRIBUTES = h5o.COPY_WITHOUT_ATTR_FLAG
LeavesOut = Callable[[bytes, Any], bool]


class Entry(NamedTuple):
    """A link: the path of its group, its name, its kind, and its target object.

    `node` is None unless the link is hard; `is_first`: no earlier link has the same target.
    """

    parent: bytes
    name: bytes
    info: h5l.LinkInfo
    node: Any
    address: int
    is_first: bool

    @property
    def path(self) -> bytes:
        """The path of the link."""
        return self.parent + b"/" + self.name


def walk(file: h5f.FileID, leaves_out: LeavesOut = lambda path, node: False) -> Iterator[Entry]:
    """Yield all links of a file: each group's links in order, and groups before their members.

    Objects for which `leaves_out(path, node)` is true are skipped.
    """
    root = h5g.open(file, b"/")
    seen = {h5o.get_info(root).addr}
    groups = deque([(b"", root)])
    while groups:
        parent, group = groups.popleft()
        for name in _names(group):
            info = group.links.get_info(name)
            if info.type != h5l.TYPE_HARD:
                yield Entry(parent, name, info, None, -1, False)
                continue
            node = h5o.open(group, name)
            if leaves_out(parent + b"/" + name, node):
                continue
            entry = Entry(parent, name, info, node, h5o.get_info(node).addr, False)
            entry = entry._replace(is_first=entry.address not in seen)
            seen.add(entry.address)
            yield entry
            if entry.is_first and isinstance(node, h5g.GroupID):
                groups.append((entry.path, node))


def is_outside(dataset: h5d.DatasetID) -> bool:
    """Return whether a dataset's values are stored in other datasets or files."""
    plist = dataset.get_create_plist()
    return bool(plist.get_layout() == h5d.VIRTUAL or plist.get_external_count())


def _names(group: h5g.GroupID) -> list[bytes]:
    is_tracked = group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED
    names: list[bytes] = []
    order = library.INDEX_CRT_ORDER if is_tracked else library.INDEX_NAME
    group.links.iterate(names.append, idx_type=order)
    return names


class Making(NamedTuple):
    """How to create a dataset in the other file.

    `space`, `kind` and `plist` are its dataspace, datatype (None: unchanged) and creation
    properties. `has_values`: its values are written later; `same_filters`: stored chunks may be
    copied without decoding.
    """

    space: h5s.SpaceID
    kind: h5t.TypeID | None
    plist: h5p.PropDCID
    has_values: bool = True
    same_filters: bool = True


def making_of(dataset: h5d.DatasetID, values: NDArray[Any]) -> Making:
    """Return how to create a dataset with other values, keeping its datatype if they fit."""
    plist, kind = dataset.get_create_plist().copy(), None
    if plist.get_layout() == h5d.CHUNKED:
        chunks = zip(plist.get_chunk(), values.shape, strict=True)
        plist.set_chunk(tuple(min(one, max(1, n)) for one, n in chunks))
    else:
        plist = h5p.create(h5p.DATASET_CREATE)
    if values.dtype.kind in "iu":
        found = np.iinfo(dataset.dtype)
        if values.size and not found.min <= values.min() <= values.max() <= found.max:
            kind = h5t.py_create(values.dtype)
    elif values.dtype.kind == "O" and dataset.dtype.kind == "S":  # new strings may be longer
        kind = h5t.py_create(h5py.string_dtype(), logical=True)
    return Making(h5s.create_simple(values.shape), kind, plist, False, False)


class ObjectCopy:
    """Copies the objects of `source` into the empty file `target`.

    `change(path, dataset)` returns how to create a dataset that changes, None for one that stays
    the same. `leaves_out` is as for `walk`, `moved` as for `References`.
    """

    def __init__(
        self,
        source: h5f.FileID,
        target: h5f.FileID,
        names: tuple[Path, Path],
        change: Callable[[bytes, h5d.DatasetID], Making | None],
        leaves_out: LeavesOut,
        moved: frozenset[str],
    ) -> None:
        self.source, self._target, self._change, self._moved = source, target, change, moved
        self._names, self._leaves_out = names, leaves_out
        self._types: dict[int, h5t.TypeID] = {}  # committed in the target, by source address
        # HDF5 cannot copy objects between files with different address sizes.
        sizes = [file.get_create_plist().get_sizes() for file in (source, target)]
        self._can_copy = sizes[0] == sizes[1]

    def entries(self) -> Iterator[Entry]:
        """Yield the links to copy."""
        return walk(self.source, self._leaves_out)

    @cached_property
    def twins(self) -> dict[int, Twin]:
        """The target's copies of the source's objects, which must exist, by source address."""
        root = h5g.open(self.source, b"/")
        found = {h5o.get_info(root).addr: Twin(b"/", _address(self._target, b"/"))}
        for entry in self.entries():
            if entry.is_first:
                found[entry.address] = Twin(entry.path, _address(self._target, entry.path))
        return found

    @cached_property
    def references(self) -> References:
        """Converts references to refer to the target's objects."""
        return References(self.source, self._target, self.twins, self._moved)

    def make(self) -> list[bytes]:
        """Create all objects; return the paths of datasets (no scalars) that still lack values."""
        parent, group = b"", h5g.open(self._target, b"/")
        missing, scalars = list[Entry](), list[Entry]()
        paths: dict[int, bytes] = {h5o.get_info(h5g.open(self.source, b"/")).addr: b"/"}
        for entry in self.entries():
            if entry.parent != parent:
                parent, group = entry.parent, h5g.open(self._target, entry.parent)
            properties = h5p.create(h5p.LINK_CREATE)
            properties.set_char_encoding(entry.info.cset)
            if entry.node is None:
                self._link(entry, group, properties)
            elif not entry.is_first:
                known = h5o.open(self._target, paths[entry.address])
                h5o.link(known, group, entry.name, lcpl=properties)
            else:
                paths[entry.address] = entry.path
                if self._object(entry, group, properties):
                    (missing if entry.node.rank else scalars).append(entry)
        self._attributes()
        for entry in scalars:
            space, where = entry.node.get_space(), self._where(entry.path)
            with RawValues(entry.node.get_type(), 1, where) as values:
                values.read(entry.node, space, space)
                self.references.change(values)
                values.write(h5o.open(self._target, entry.path), space, space)
        return [entry.path for entry in missing]

    def _link(self, entry: Entry, group: h5g.GroupID, properties: h5p.PropLCID) -> None:
        source = h5g.open(self.source, entry.parent or b"/")
        if entry.info.type == h5l.TYPE_SOFT:
            group.links.create_soft(entry.name, source.links.get_val(entry.name), properties)
        elif entry.info.type == h5l.TYPE_EXTERNAL:
            file, path = source.links.get_val(entry.name)
            group.links.create_external(entry.name, self.moved(file), path, properties)
        else:
            raise DatasetError(
                f"{self._where(entry.path)}: a link of a user's own class ({entry.info.type}),"
                " which cannot be copied; remove it"
            )

    def _where(self, path: bytes) -> str:
        return f'{self._names[0]}: "{name_text(path)}"'

    def moved(self, name: bytes) -> bytes:
        """Return the name by which the target refers to the same other file."""
        before, after = (path.absolute().parent for path in self._names)
        file = os.fsencode(before) + b"/" + name
        if before == after or os.path.isabs(name) or not (b"%" in name or os.path.exists(file)):
            return name
        return os.path.relpath(file, os.fsencode(after))

    def _object(self, entry: Entry, group: h5g.GroupID, properties: h5p.PropLCID) -> bool:
        """Create an object; return whether its values are missing."""
        where, node = self._where(entry.path), entry.node
        if isinstance(node, h5g.GroupID):
            h5g.create(group, entry.name, lcpl=properties, gcpl=_properties_like(node))
        elif isinstance(node, h5t.TypeID):
            h5o.link(self._type(node, where), group, entry.name, lcpl=properties)
        else:
            return self._dataset(entry, group, properties, where)
        return False

    def _type(self, kind: h5t.TypeID, where: str) -> h5t.TypeID:
        """Return a datatype for the target; commit a committed one there, once."""
        if not kind.committed():
            return kind
        address = h5o.get_info(kind).addr
        if address not in self._types:
            new = kind.copy()
            plist = kind.get_create_plist()
            call_hdf5("H5Tcommit_anon", where, self._target, new, plist, 0)
            self._types[address] = new
        return self._types[address]

    def _dataset(
        self, entry: Entry, group: h5g.GroupID, properties: h5p.PropLCID, where: str
    ) -> bool:
        dataset: h5d.DatasetID = entry.node
        making, kind = self._change(entry.path, dataset), dataset.get_type()
        plist = dataset.get_create_plist()
        has_own = not is_outside(dataset)
        # HDF5 would copy such a fill value's address in the source file, not the value.
        has_far_fill = has_pointers(kind) and plist.fill_value_defined() == _USER_DEFINED
        is_apart = kind.committed() or has_references(kind) or not has_own or has_far_fill
        is_small = dataset.get_storage_size() <= SMALL_NBYTES
        if making is None and is_small and self._can_copy and not is_apart:
            self._copy_whole(entry, group, properties)
            return False
        if making is None:
            if plist.get_layout() == h5d.VIRTUAL:
                plist = self._virtual(plist)
            has_values = has_own and dataset.get_storage_size() > 0
            making = Making(dataset.get_space(), None, plist, has_values)
        new_kind = self._type(kind, where) if making.kind is None else making.kind
        try:
            new = h5d.create(group, entry.name, new_kind, making.space, making.plist, properties)
            if making.same_filters and stored_filters(new.get_create_plist()) != stored_filters(
                making.plist
            ):
                raise ValueError("HDF5 gives its filters other parameters now")
        except ValueError as error:
            if making.plist is not plist or is_apart or not self._can_copy:
                raise DatasetError(f"{where}: it cannot be made ({error})") from error
            if group.links.exists(entry.name):
                group.unlink(entry.name)
            self._copy_whole(entry, group, properties)
            return False
        return making.has_values

    def _copy_whole(self, entry: Entry, group: h5g.GroupID, properties: h5p.PropLCID) -> None:
        how = h5p.create(h5p.OBJECT_COPY)
        how.set_copy_object(_COPY_WITHOUT_ATTRIBUTES)
        h5o.copy(entry.node, b".", group, entry.name, copypl=how, lcpl=properties)

    def _virtual(self, plist: h5p.PropDCID) -> h5p.PropDCID:
        """Return the properties of a virtual dataset, with source names valid for the target."""
        if self._names[0].absolute().parent == self._names[1].absolute().parent:
            return plist
        new = plist.copy()
        new.set_layout(h5d.CONTIGUOUS)  # forgets the mappings
        for i in range(plist.get_virtual_count()):
            space, part = plist.get_virtual_vspace(i), plist.get_virtual_srcspace(i)
            file = self.moved(os.fsencode(plist.get_virtual_filename(i)))
            new.set_virtual(space, os.fsdecode(file), plist.get_virtual_dsetname(i), part)
        return new

    def _attributes(self) -> None:
        references, root = self.references, h5g.open(self.source, b"/")
        self._attributes_of(b"/", root, references)
        for entry in self.entries():
            if entry.is_first:
                self._attributes_of(entry.path, entry.node, references)

    def _attributes_of(self, path: bytes, node: Any, references: References) -> None:
        names = attribute_names(node)
        if not names:
            return
        target = h5o.open(self._target, path)
        for name in names:
            where = f'{self._where(path)}: attribute "{name_text(name)}"'
            attribute = h5a.open(node, name)
            kind = self._type(attribute.get_type(), where)
            copy_attribute(attribute, target, kind, references, where)

    def differences(self, changed: Container[str]) -> Iterator[str]:
        """Yield the differences in a finished target: links, objects, attributes.

        `changed` has the paths of objects whose attributes differ on purpose.
        """
        twins = list(walk(self._target))
        for entry, twin in itertools.zip_longest(self.entries(), twins):
            if entry is None or twin is None:
                yield "the number of links"
                return
            where = f'link "{name_text(entry.path)}"'
            if entry.path != twin.path or self._told(entry) != self._told(twin, is_twin=True):
                yield where
            if entry.is_first and name_text(entry.path).strip("/") not in changed:
                yield from self._differing_attributes(entry.node, twin.node, where)
            if entry.is_first and isinstance(entry.node, h5d.DatasetID):
                if self._change(entry.path, entry.node) is None:
                    yield from self._differing_scalars(entry, twin.node)
        one, other = (h5o.open(file, b"/") for file in (self.source, self._target))
        yield from self._differing_attributes(one, other, "the root group")

    def _told(self, entry: Entry, *, is_twin: bool = False) -> tuple[Any, ...]:
        """Return the properties that a link has, or should have, in the target, for comparison."""
        address, value = entry.address, None
        if entry.node is None:
            group = h5g.open(self._target if is_twin else self.source, entry.parent or b"/")
            value = group.links.get_val(entry.name)
            if entry.info.type == h5l.TYPE_EXTERNAL and not is_twin:
                value = self.moved(value[0]), value[1]
        elif not is_twin:
            address = self.twins[address].address
        return entry.info.type, entry.info.cset, type(entry.node), address, value

    def _differing_scalars(self, entry: Entry, twin: h5d.DatasetID) -> Iterator[str]:
        """Yield the differences in a kept dataset: in its shape, or in the value of a scalar."""
        one, where = entry.node, f'dataset "{name_text(entry.path).strip("/")}"'
        if one.shape != twin.shape:
            yield f"{where}: its shape"
        kind, space = one.get_type(), one.get_space()
        if not one.rank and space.get_select_npoints():
            with RawValues(kind, 1, where) as a, RawValues(kind, 1, where) as b:
                a.read(one, space, space)
                b.read(twin, space, space)
                if not self.references.are_same(a, b):
                    yield where

    def _differing_attributes(self, one: Any, other: Any, where: str) -> Iterator[str]:
        names = attribute_names(one)
        if names != attribute_names(other):
            yield f"{where}: its attributes"
        for name in names:
            text = f'{where}: attribute "{name_text(name)}"'
            pair = [h5a.open(node, name) for node in (one, other)]
            kind, spaces = pair[0].get_type(), [attribute.get_space() for attribute in pair]
            shapes = [space.get_simple_extent_dims() for space in spaces]
            if not kind.equal(pair[1].get_type()) or shapes[0] != shapes[1]:
                yield text
            count = int(spaces[0].get_select_npoints())
            if count:
                with RawValues(kind, count, text) as a, RawValues(kind, count, text) as b:
                    for attribute, values in zip(pair, (a, b), strict=True):
                        call_hdf5("H5Aread", text, attribute, kind, values.bytes)
                    if not self.references.are_same(a, b):
                        yield text


def attribute_names(node: Any) -> list[bytes]:
    """Return the names of an object's attributes, in order."""
    names: list[bytes] = []
    if h5a.get_num_attrs(node):
        tracked = node.get_create_plist().get_attr_creation_order() & h5p.CRT_ORDER_TRACKED
        order = library.INDEX_CRT_ORDER if tracked else library.INDEX_NAME
        h5a.iterate(node, names.append, index_type=order)
    return names


def _properties_like(group: h5g.GroupID) -> h5p.PropGCID:
    """Return properties for a group like another one.

    The group's own list cannot be used: it includes the addresses of a large group's links.
    """
    like, new = group.get_create_plist(), h5p.create(h5p.GROUP_CREATE)
    new.set_link_creation_order(like.get_link_creation_order())
    new.set_attr_creation_order(like.get_attr_creation_order())
    new.set_attr_phase_change(*like.get_attr_phase_change())
    new.set_obj_track_times(like.get_obj_track_times())
    return new


def _address(file: h5f.FileID, path: bytes) -> int:
    return int(h5o.get_info(file, path).addr)


def stored_filters(plist: h5p.PropDCID) -> list[tuple[Any, ...]]:
    """Return the filters of a dataset: their numbers, flags and parameters."""
    return [plist.get_filter(i)[:3] for i in range(plist.get_nfilters())]
