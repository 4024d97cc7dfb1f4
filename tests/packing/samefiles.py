"""Compares two HDF5 files by h5py: links, objects, attributes, datatypes, filters, values."""

from __future__ import annotations

import h5py
import numpy as np
from h5py import h5, h5a, h5d, h5g, h5l, h5o, h5p, h5s, h5t

TRACKED = h5p.CRT_ORDER_TRACKED


def assert_same_files(one, other, *, changed=(), without=()):
    """Raise AssertionError unless files are the same but for where bytes lie.

    Of datasets at paths `changed`, neither shape, chunks, filters nor values are compared. Nothing
    at paths `without` may be in the second file.
    """
    with h5py.File(one) as a, h5py.File(other) as b:
        found = {path: node for path, node in nodes(a) if path not in without}
        theirs = dict(nodes(b))
        assert list(found) == list(theirs)
        names = of_addresses(a, found), of_addresses(b, theirs)
        for path, node in found.items():
            assert_same_nodes(path, node, theirs[path], names, path in changed)


def nodes(file):
    """Yield the paths of all links, with objects of h5py, or what soft and external links say."""
    waiting, seen = [(b"/", file["/"].id)], set()
    yield b"/", file["/"].id
    while waiting:
        parent, group = waiting.pop(0)
        plist = group.get_create_plist()
        tracked = plist.get_link_creation_order() & TRACKED
        names = []
        group.links.iterate(names.append, idx_type=h5.INDEX_CRT_ORDER if tracked else h5.INDEX_NAME)
        for name in names:
            path = parent.rstrip(b"/") + b"/" + name
            info = group.links.get_info(name)
            if info.type != h5l.TYPE_HARD:
                yield path, (info.type, info.cset, group.links.get_val(name))
                continue
            node = h5o.open(group, name)
            yield path, node
            address = h5o.get_info(node).addr
            if isinstance(node, h5g.GroupID) and address not in seen:
                seen.add(address)
                waiting.append((path, node))


def of_addresses(file, found):
    """Return the first path of each object, by its address."""
    names = {}
    for path, node in found.items():
        if not isinstance(node, tuple):
            names.setdefault(h5o.get_info(node).addr, path)
    return names


def assert_same_nodes(path, a, b, names, is_changed):
    assert type(a) is type(b), path
    if isinstance(a, tuple):
        assert a == b, path
        return
    assert names[0][h5o.get_info(a).addr] == names[1][h5o.get_info(b).addr], path
    if isinstance(a, h5t.TypeID):
        assert a.equal(b), path
    else:
        of = a.get_create_plist(), b.get_create_plist()
        assert len({plist.get_attr_creation_order() for plist in of}) == 1, path
        if isinstance(a, h5g.GroupID):
            assert len({plist.get_link_creation_order() for plist in of}) == 1, path
    if isinstance(a, h5d.DatasetID):
        assert_same_types(path, a.get_type(), b.get_type(), names, skips=is_changed)
        if not is_changed:
            assert_same_datasets(path, a, b, names)
    assert_same_attributes(path, a, b, names)


def assert_same_types(path, a, b, names, *, skips=False):
    assert skips or a.equal(b), path
    assert a.committed() == b.committed(), path
    if a.committed():
        places = names[0].get(h5o.get_info(a).addr), names[1].get(h5o.get_info(b).addr)
        assert len(set(places)) == 1, path


def assert_same_attributes(path, a, b, names):
    listed = [[], []]
    for found, node in zip(listed, (a, b), strict=True):
        h5a.iterate(node, found.append)
    assert listed[0] == listed[1], path
    for name in listed[0]:
        where = (path, name)
        of = h5a.open(a, name), h5a.open(b, name)
        infos = [h5a.get_info(node, name) for node in (a, b)]
        assert infos[0].cset == infos[1].cset, where
        types = [one.get_type() for one in of]
        assert_same_types(where, *types, names)
        assert_same_spaces(where, *(one.get_space() for one in of))
        read = [lambda array, kind, one=one: one.read(array, kind) for one in of]
        assert_same_values(where, *read, *of, names)


def assert_same_spaces(where, a, b):
    assert a.get_simple_extent_type() == b.get_simple_extent_type(), where
    if a.get_simple_extent_type() == h5s.SIMPLE:
        assert a.get_simple_extent_dims() == b.get_simple_extent_dims(), where
        assert a.get_simple_extent_dims(True) == b.get_simple_extent_dims(True), where


def filters_of(dataset):
    plist = dataset.get_create_plist()
    return [plist.get_filter(i)[:3] for i in range(plist.get_nfilters())]


def assert_same_datasets(path, a, b, names):
    assert_same_spaces(path, a.get_space(), b.get_space())
    of = a.get_create_plist(), b.get_create_plist()
    layouts = {plist.get_layout() for plist in of}
    assert len(layouts) == 1, (path, layouts)
    if layouts == {h5d.CHUNKED}:
        assert len({plist.get_chunk() for plist in of}) == 1, path
    assert filters_of(a) == filters_of(b), path
    assert len({plist.fill_value_defined() for plist in of}) == 1, path
    assert len({plist.get_fill_time() for plist in of}) == 1, path
    fills = [fill_of(one) for one in (a, b)]
    assert fills[0] == fills[1], path
    if layouts == {h5d.VIRTUAL}:
        assert a.get_create_plist().get_virtual_count() == b.get_create_plist().get_virtual_count()
    read = [lambda array, kind, one=one: one.read(h5s.ALL, h5s.ALL, array, kind) for one in (a, b)]
    assert_same_values(path, *read, a, b, names)


def fill_of(dataset):
    try:
        fill = np.zeros((), dataset.dtype)
    except TypeError:
        return None
    if dataset.dtype.subdtype is not None or dataset.dtype.hasobject:
        return None
    if dataset.get_create_plist().fill_value_defined() == h5d.FILL_VALUE_UNDEFINED:
        return None
    dataset.get_create_plist().get_fill_value(fill)
    return fill.tobytes()


def assert_same_values(where, read_one, read_other, a, b, names):
    """Compare values; those that h5py reads as objects one by one, others bit for bit."""
    space, kind = a.get_space(), a.get_type()
    if space.get_simple_extent_type() == h5s.NULL or not space.get_simple_extent_npoints():
        return
    try:
        dtype = kind.dtype
        is_object = dtype.hasobject
    except TypeError:
        is_object = False
    shape = space.get_simple_extent_dims()
    if is_object:
        of = []
        for read, node in ((read_one, a), (read_other, b)):
            array = np.empty(shape, node.get_type().dtype)
            try:
                read(array, None)
            except KeyError:  # h5py has no conversion
                return
            file = h5py.File(h5py.h5i.get_file_id(node))
            of.append(plain(array, file, names[len(of)]))
        assert repr(of[0]) == repr(of[1]), where
        return
    arrays = []
    for read in (read_one, read_other):
        array = np.zeros((*shape, kind.get_size()), np.uint8)
        read(array, kind)
        arrays.append(array)
    assert np.array_equal(*arrays), where


def plain(value, file, names):
    """Return values with what references lead to, instead of these."""
    if isinstance(value, np.ndarray):
        if value.dtype.names:
            return [(name, plain(value[name], file, names)) for name in value.dtype.names]
        if value.dtype.hasobject:
            return [plain(one, file, names) for one in value.reshape(-1)]
        return value.dtype.str, value.tobytes()
    if isinstance(value, h5py.RegionReference):
        if not value:
            return None
        space = h5py.h5r.get_region(value, file.id)
        place = names.get(h5o.get_info(h5py.h5r.dereference(value, file.id)).addr)
        return place, space.get_select_type(), space.get_select_npoints(), space.get_select_bounds()
    if isinstance(value, h5py.Reference):
        if not value:
            return None
        return names.get(h5o.get_info(h5py.h5r.dereference(value, file.id)).addr)
    return value
