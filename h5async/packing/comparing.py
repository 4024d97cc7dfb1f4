"""Compares a new file with its sources: all objects, attributes and values."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5l, h5o, h5p

from h5async.codec.encoders import spell_filters
from h5async.errors import WriteError
from h5async.index.chunks import filters_of
from h5async.io.hdf5files import HDF5File
from h5async.order.selection import Selection
from h5async.packing.encodedsamples import encoded_images
from h5async.packing.objects import Entry, ObjectCopy, attribute_names, walk
from h5async.packing.rawvalues import Bytes, RawValues, call_hdf5, content
from h5async.packing.rewriting import Rewrite, Run
from h5async.packing.rowsource import RowSource
from h5async.spelling import name_text


class Comparison:
    """Compares links, objects and attributes when it is made, and values then.

    Raises `WriteError` for the first difference. `changed` are the paths of objects whose
    attributes are not the same.
    """

    def __init__(self, objects: ObjectCopy, target: HDF5File, changed: Container[str]) -> None:
        self._objects, self._target = objects, target
        self._references = objects.references
        links = list(walk(target.id))
        for entry, twin in zip(objects.entries(), links, strict=False):
            where = f'link "{name_text(entry.path)}"'
            self.require(entry.path == twin.path, where)
            self.require(self._described(entry) == self._link(twin), where)
            if entry.is_first and name_text(entry.path).strip("/") not in changed:
                self._compare_attributes(entry.node, twin.node, where)
        self.require(sum(1 for _ in objects.entries()) == len(links), "the number of links")
        one, other = (h5o.open(file, b"/") for file in (objects.source, target.id))
        self._compare_attributes(one, other, "the root group")

    def require(self, is_same: bool, where: str) -> None:
        """Raise the error that something differs, unless it is the same."""
        if not is_same:
            raise WriteError(
                f"{self._target.filename}: {where} differs from the source; keep the source, and"
                " check disk and memory",
                filename=self._target.filename,
            )

    def _link(self, entry: Entry) -> tuple[Any, ...]:
        """Return what a link of the target says, without where its object lies."""
        value = None
        if entry.node is None:
            group = h5o.open(self._target.id, entry.parent or b"/")
            value = group.links.get_val(entry.name)
        return entry.info.type, entry.info.cset, type(entry.node), entry.address, value

    def _described(self, entry: Entry) -> tuple[Any, ...]:
        """Return what the twin of a link of the source has to say."""
        objects, address, value = self._objects, -1, None
        if entry.node is not None:
            address = objects.twins[entry.address].address
        else:
            group = h5o.open(objects.source, entry.parent or b"/")
            value = group.links.get_val(entry.name)
            if entry.info.type == h5l.TYPE_EXTERNAL:
                value = objects.moved(value[0]), value[1]
        return entry.info.type, entry.info.cset, type(entry.node), address, value

    def _compare_attributes(self, one: Any, other: Any, where: str) -> None:
        names = attribute_names(one)
        self.require(names == attribute_names(other), f"{where}: its attributes")
        for name in names:
            text = f'{where}: attribute "{name_text(name)}"'
            pair = [h5a.open(node, name) for node in (one, other)]
            kind = pair[0].get_type()
            self.require(bool(kind.equal(pair[1].get_type())), text)
            spaces = [attribute.get_space() for attribute in pair]
            shapes = [space.get_simple_extent_dims() for space in spaces]
            self.require(shapes[0] == shapes[1], text)
            count = int(spaces[0].get_select_npoints())
            if count:
                with RawValues(kind, count, text) as a, RawValues(kind, count, text) as b:
                    for attribute, values in zip(pair, (a, b), strict=True):
                        call_hdf5("H5Aread", text, attribute, kind, values.bytes)
                    self._compare_raw(a, b, text)

    def _compare_raw(self, one: RawValues, other: RawValues, where: str) -> None:
        self._references.change(one.kind, one.bytes, where)
        self.require(content(one.kind, one.bytes) == content(other.kind, other.bytes), where)

    def compare_values(
        self,
        path: str,
        dataset: h5d.DatasetID,
        rewrite: Rewrite | None,
        nbytes: int,
        options: Mapping[str, Any],
    ) -> None:
        """Compare the values of a dataset, as they are to be, in blocks of about `nbytes`."""
        where, target = f'dataset "{path}"', self._target[path].id
        if rewrite is None:
            self.require(dataset.shape == target.shape, f"{where}: its shape")
            kind, space = dataset.get_type(), dataset.get_space()
            if dataset.rank == 0 and space.get_select_npoints():
                with RawValues(kind, 1, where) as a, RawValues(kind, 1, where) as b:
                    a.read(dataset, space, space)
                    b.read(target, space, space)
                    self._compare_raw(a, b, where)
            return
        shape = rewrite.shape[:1] if rewrite.encoding else rewrite.shape
        self.require(shape == target.shape, f"{where}: its shape")
        layouts = [_layout(plist) for plist in (rewrite.making().plist, target.get_create_plist())]
        self.require(layouts[0] == layouts[1], f"{where}: its chunks and filters")
        blocks = rewrite.blocks(Run(0, rewrite.shape[rewrite.axis], False), nbytes)
        written = RowSource([self._target], path, rewrite.axis)
        every = Selection(0, 1, written.counts[0])
        if rewrite.is_by_hdf5:
            for block in blocks:
                with rewrite.source.read(rewrite.selection, block) as a:
                    with written.read(every, block) as b:
                        self._compare_raw(a, b, where)
            return
        of_target = {**options, "hdf5_path": self._target.filename}
        sources = rewrite.source.blocks(rewrite.selection, blocks, rewrite.dtype, dict(options))
        targets = written.blocks(every, blocks, None, of_target)
        if rewrite.encoding:
            targets = (self._target[path][block.begin : block.stop] for block in blocks)
        for block, old, new in zip(blocks, sources, targets, strict=True):
            if rewrite.encoding:  # the same pixels have the same bytes
                images = np.array(old, order="C").view(np.uint8)
                is_same = all(map(np.array_equal, encoded_images(images, rewrite.encoding), new))
            else:
                is_same = np.array_equal(_bytes(old), _bytes(new))
            self.require(is_same, f"{where}, rows {block.begin} to {block.stop}")


def _layout(plist: h5p.PropDCID) -> tuple[Any, ...]:
    chunks = plist.get_chunk() if plist.get_layout() == h5d.CHUNKED else ()
    # (Levels are spelled; HDF5 adds to other parameters what it knows of the dataset.)
    filters = filters_of(plist)
    return chunks, [one.number for one in filters], spell_filters(filters)


def _bytes(values: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
