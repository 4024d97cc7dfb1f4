"""Reads the layout of one open dataset: where its bytes lie, or why only h5py may read it.

A dataset is read directly only if its bytes are known to equal h5py's result. In case of doubt, its
layout gets a `fallback_reason`, and `read/fallback.py` reads the dataset through h5py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import h5py
import numpy as np

from h5async.core.binding import load_core
from h5async.errors import DamagedError, DatasetError
from h5async.index.alikedatasets import Headers
from h5async.index.chunks import (
    TooManyChunksError,
    converted,
    filters_of,
    read_chunk_table,
    refuse_filters_of_hdf5,
    require_filters_of_hdf5,
    undecodable,
    with_checked_filters,
    with_chunks,
)
from h5async.index.composition import Part, with_parts
from h5async.index.hdf5 import (
    COLUMNS_REASON,
    NotDirectError,
    Opened,
    OtherKindError,
    dimension_names,
    fill_value,
    indexed,
    numbered_axis,
    reading,
    require_fill,
    uses_fill_value,
)
from h5async.index.layout import DatasetLayout, Indexed, Storage, normal_axis
from h5async.index.links import LastGroup, Located, Reach, locate
from h5async.index.sources import LOCAL_ONLY, VirtualSources, attached, external_layout
from h5async.index.storedtypes import (
    Forms,
    StoredType,
    describe,
    element_of,
    fill_reference,
    is_object,
    stored_compact,
    variable_length,
    without_metadata,
)
from h5async.index.tables import Piece, Slab
from h5async.io.hdf5files import HDF5File
from h5async.io.source import may_map, settled
from h5async.io.stores import absolute_name, store_of
from h5async.spelling import name_bytes
from h5async.system.interruptions import suppressing

_Kind = tuple[bytes, bytes, int, int, int]  # type, properties, as HDF5 encodes them; see `_kind`

_MOST_KINDS = 256  # that are kept


class Indexer:
    """Reads the layouts of datasets of one open file.

    `reach` says which other files its datasets may refer to. `depth` is the number of virtual
    datasets above them, whose sources they are. Public attributes: the file, `reach`, the
    `LastGroup`, and the names of dimension scales.
    """

    def __init__(self, file: HDF5File, reach: Reach, depth: int = 0) -> None:
        self.file = file
        self.last_group: LastGroup = {}
        self.scale_names: dict[int, tuple[str, ...]] = {}
        self._name = file.filename
        # It is opened again later, when the current directory may differ.
        self._path = absolute_name(self._name)  # (".." after a link leads elsewhere)
        self._source = file.source
        # Values written in this process may not be in the file yet.
        self._is_writer = bool(file.id.get_intent() & h5py.h5f.ACC_RDWR)
        self._stamp = settled(file.source.stamp)
        reach.consulted.found(self._path, self._stamp, is_written=self._is_writer)
        self.reach = reach
        self._depth = depth
        self._headers = Headers(file)
        # A layout of each kind found so far.
        self._alike: dict[_Kind, DatasetLayout] = (
            {} if reach.alike is None else reach.alike.datasets
        )

    def sources(
        self, where: str, plist: h5py.h5p.PropDCID, forms: Forms | None = None
    ) -> VirtualSources:
        """Find the sources of a virtual dataset of this file; see `raw_layout`."""

        def index(found: Located, node: h5py.h5d.DatasetID, axis: int, depth: int) -> DatasetLayout:
            indexer = Indexer(found.file, self.reach, depth)
            if forms is None:
                return indexer.layout(found.path, node, (), axis)
            return indexer.raw_layout(found.path, node, forms, axis)

        return VirtualSources(self.file, plist, self.reach, self._depth, index, where)

    def layout(
        self, name: str, node: h5py.h5d.DatasetID, member: Sequence[str], num_dim: int | str
    ) -> DatasetLayout:
        """Return the layout of a dataset, or of a member; raises like `metadata.read_layouts`.

        `member` is the path of a member within its compound type, empty for all of it. `num_dim` is
        the dimension that counts the samples, by its number or its name.
        """
        where = f'{self._name}: dataset "{name}"'
        with reading(f"{where}: its metadata"):
            dataset = Opened(node, self._source)
            kind = self._kind(dataset, member, num_dim)
            known = None if kind is None else self._alike.get(kind)
            if known is not None:
                with suppressing(NotDirectError):
                    return self._again(known, name, dataset, where)
            layout = self._layout(name, dataset, tuple(member), num_dim, where)
            if kind is not None and self._is_plain(layout, dataset):
                if len(self._alike) >= _MOST_KINDS:
                    self._alike.clear()
                self._alike[kind] = layout
            return layout

    def recognized(self, path: str, num_dim: int) -> tuple[Located, DatasetLayout] | None:
        """Find a dataset whose object header is like that of another one with the same name.

        None if there is none, or any doubt: then HDF5 has to be asked.
        """
        if not self._headers.may_have((name_bytes(path.rpartition("/")[2]), num_dim)):
            return None
        with suppressing(Exception), contextlib.ExitStack() as files:
            found = locate(self.file, path, self.reach, files, self.last_group)
            if found.file is self.file and not found.rest:
                key = found.name, num_dim
                layout = self._headers.find(key, found.address, found.path, self._stamp, self._path)
                return None if layout is None else (found, layout)
        return None

    def note(self, found: Located, layout: DatasetLayout, num_dim: int) -> None:
        """Note the object header of a dataset of the file, to recognize others; see `Headers`."""
        if found.file is self.file and not (found.rest or self._is_writer) and found.address > 0:
            self._headers.note((found.name, num_dim), found.address, layout)

    def raw_layout(
        self, name: str, node: h5py.h5d.DatasetID, forms: Forms, num_dim: int = 0
    ) -> DatasetLayout:
        """Return the layout of the references of a variable-length dataset.

        `forms` says by file how elements are stored; those found here are added. Raises
        `NotDirectError` if only h5py may read it, and the errors of `metadata.read_layouts`.
        """
        where = f'{self._name}: dataset "{name}"'
        form = variable_length(node)
        if form is None or not all(form.is_like(other) for other in forms.values()):
            raise NotDirectError("a virtual dataset whose source is of another datatype")
        forms[self._path] = form
        dataset, dtype = Opened(node, self._source), np.dtype((np.void, form.reference_nbytes))
        storage = _storage(dataset)
        if storage == "external":
            raise NotDirectError("elements of variable length of an external dataset")
        if self._is_writer:
            raise NotDirectError("the file is open for writing in this process")
        sources = None
        if storage == "virtual":  # before it is asked for its shape
            sources = self.sources(where, dataset.plist, forms)
        shape = self._shape_of(dataset)
        if not shape or (len(shape) != 1 and not self._depth):
            raise DatasetError(
                f"{where}: samples of variable length must have one dimension, found shape {shape}"
            )
        layout = self._declared(name, dataset, storage, dtype, shape).changed(
            sample_axis=normal_axis(num_dim, len(shape), where),
            stored_itemsize=dtype.itemsize,
        )
        read_fill = partial(fill_reference, dataset, dtype)
        if sources is not None:
            layout = sources.layout(layout, partial(read_fill, whenever=True))
            if layout.fallback_reason is not None:
                raise NotDirectError(layout.fallback_reason)
            return layout
        if storage == "compact":
            stored = stored_compact(dataset)
            if len(stored) != layout.nbytes:
                raise DamagedError(
                    f"{where}: {len(stored)} bytes are stored for {layout.nbytes} bytes of"
                    " references; its metadata are damaged"
                )
            values = np.frombuffer(stored, dtype).reshape(shape)
            return layout.changed(values=values, stored_nbytes=layout.nbytes)
        fill = read_fill()
        layout = with_checked_filters(layout, dataset, where)
        refuse_filters_of_hdf5(layout, dataset)
        return self._direct(layout, dataset, where, fill=fill)

    def _shape_of(self, dataset: Opened) -> tuple[int, ...] | None:
        """Return the shape of a dataset; a scalar source of a virtual dataset is one sample."""
        return (1,) if dataset.shape == () and self._depth else dataset.shape

    def _declared(
        self,
        name: str,
        dataset: Opened,
        storage: Storage,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        extra: tuple[int, ...] = (),
    ) -> DatasetLayout:
        """Return a layout without places; `extra` are the dimensions of the array type."""
        is_chunked = storage == "chunked"
        return DatasetLayout(
            file=self._path,
            stamp=self._stamp,
            path=name,
            shape=(*shape, *extra),
            dtype=dtype,
            sample_axis=0,
            storage=storage,
            fallback_reason=None,
            fill=np.zeros((), dtype),
            chunk_shape=(*dataset.chunks, *extra) if is_chunked else (),
            filters=filters_of(dataset.plist),
            stored_nbytes=0 if is_chunked else dataset.id.get_storage_size(),
            # For variable-length elements HDF5 returns the size in memory.
            stored_itemsize=0 if is_object(dataset.type) else dataset.itemsize,
            extra_dims=len(extra),
            indexed=indexed(dataset),
        )

    def _kind(self, dataset: Opened, member: Sequence[str], num_dim: int | str) -> _Kind | None:
        """Return the facts that decide how a dataset is read; None if these are not all.

        (The device is one because it decides whether files may be mapped.)
        """
        if isinstance(num_dim, str):
            return None  # each dataset has its own named dimension
        if member or self._depth or self._is_writer:
            return None
        if _storage(dataset) not in ("contiguous", "chunked"):
            return None
        undefined = dataset.plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
        if undefined or not dataset.properties or not dataset.shape:
            return None
        device = self._stamp.device
        return dataset.encoded_type, dataset.properties, len(dataset.shape), num_dim, device

    def _is_plain(self, layout: DatasetLayout, dataset: Opened) -> bool:
        """Return whether others of its kind are read in the same way, with all of the filters."""
        is_direct = layout.fallback_reason is None and layout.segments is None
        is_there = layout.offset >= 0 or layout.storage == "chunked"
        return is_direct and is_there and layout.filters == filters_of(dataset.plist)

    def _again(self, known: DatasetLayout, name: str, dataset: Opened, where: str) -> DatasetLayout:
        """Return the layout of a dataset of a known kind: files have many datasets of few kinds.

        NotDirectError if it cannot be read directly.
        """
        shape, place = dataset.extents, dict[str, Any]()
        if known.storage == "chunked":
            is_raw = bool(known.filters) and dataset.edges_are_raw
            chunks = read_chunk_table(dataset, known.filters, is_raw, where)
            nbytes = int(chunks.nbytes.sum())
            place.update(chunks=chunks.shortened(), has_raw_edges=is_raw)
        else:
            nbytes = dataset.id.get_storage_size()
            place["offset"] = _contiguous_offset(dataset, where)
        return known.changed(
            file=self._path,
            stamp=self._stamp,
            path=name,
            shape=(*shape, *known.shape[len(shape) :]),
            stored_nbytes=nbytes,
            indexed=None if known.indexed is None else Indexed(known.indexed.digest, shape),
            **place,
        )

    def _layout(
        self, name: str, dataset: Opened, member: tuple[str, ...], num_dim: int | str, where: str
    ) -> DatasetLayout:
        storage = _storage(dataset)
        sources = self.sources(where, dataset.plist) if storage == "virtual" else None
        element = element_of(dataset.type, member, where)
        shape = self._shape_of(dataset)
        if shape is None:
            raise DatasetError(f"{where} is empty (a null dataspace): it holds no samples")
        if shape == ():
            raise DatasetError(f"{where} is a scalar: it has no dimension that counts samples")
        if element.dtype.hasobject:
            raise OtherKindError(
                f"{where}: its elements are of variable length or references, so a batch of them"
                " has no fixed size; store them with a fixed-size type"
            )
        names = dimension_names(dataset.id, self.scale_names) if isinstance(num_dim, str) else ()
        base, extra = element.unpacked
        dtype = without_metadata(base)
        layout = self._declared(name, dataset, storage, dtype, shape, extra).changed(
            sample_axis=numbered_axis(num_dim, names, len(shape), where), member=member
        )
        try:
            if sources is not None:
                read_fill = partial(fill_value, dataset.plist, base, (), whenever=True)
                return sources.layout(layout, read_fill)
            if storage == "external":
                layout, found = attached(layout, dataset.plist, self.reach, where)
                self._require_direct(layout, dataset, element)
                if element.text:
                    raise NotDirectError("strings in external files, which HDF5 converts")
                return external_layout(layout, dataset.plist, found)
            if storage == "compact":
                stored = h5py.Dataset(dataset.id)
                values = (stored.fields(member[0]) if member else stored)[...]
                values = np.asarray(_member_of(values, member[1:])).reshape(layout.shape)
                return layout.changed(values=values.view(layout.raw_dtype))
            require_fill(dataset, layout.stored_itemsize, where)
            layout = with_checked_filters(layout, dataset, where)
            converts = self._converts(element, member)
            if converts and undecodable(layout.filters):
                raise NotDirectError("a stored type to convert, and filters that are not decoded")
            self._require_direct(layout, dataset, element, converts)
            if element.text and not converts:
                layout = layout.changed(text=element.text)
            if member:
                return self._member(layout, dataset, element, where)
            fill = fill_value(dataset.plist, base, extra)
            layout = self._direct(layout, dataset, where, fill=fill)
            return converted(layout, element.conversion) if converts else layout
        except NotDirectError as error:
            if layout.attached and not store_of(self._path).is_local:
                raise DatasetError(f"{where}, {error}, {LOCAL_ONLY}") from error
            require_filters_of_hdf5(layout, dataset, where)
            nbytes = self._stored_nbytes(layout, dataset, where)
            return layout.changed(fallback_reason=str(error), stored_nbytes=nbytes, text=())

    def _converts(self, element: StoredType, member: tuple[str, ...]) -> bool:
        """Return whether stored bytes are converted as a chunk is decoded."""
        is_needed = not element.is_numpys or (element.text and self._depth)
        can = element.conversion and not member and load_core() is not None
        return bool(is_needed and can)

    def _require_direct(
        self, layout: DatasetLayout, dataset: Opened, element: StoredType, converts: bool = False
    ) -> None:
        if self._is_writer:
            raise NotDirectError(
                "the file is open for writing in this process, which may hold unwritten values"
            )
        if not converts and (not element.is_numpys or (element.text and self._depth)):
            raise NotDirectError(f"its stored type differs from NumPy's {element.dtype}")
        refuse_filters_of_hdf5(layout, dataset)
        if layout.is_columns and not may_map(layout.file, self.reach.io):
            raise NotDirectError(COLUMNS_REASON)

    def _stored_nbytes(self, layout: DatasetLayout, dataset: Opened, where: str) -> int:
        """Return the stored size of a dataset that h5py reads; 0 if unknown.

        Also checks all addresses, of which HDF5 itself checks few.
        """
        # Unwritten values may have no address in the file, and some sizes are unknown.
        is_checked = layout.stored_itemsize and not self._is_writer
        try:
            if is_checked and layout.storage == "contiguous":
                _contiguous_offset(dataset, where)
            elif is_checked and layout.storage == "chunked":
                table = read_chunk_table(dataset, layout.filters, layout.has_raw_edges, where)
                return int(table.nbytes.sum())
        except TooManyChunksError:
            return 0
        except NotDirectError:
            pass
        return int(dataset.id.get_storage_size())

    def _direct(
        self, layout: DatasetLayout, dataset: Opened, where: str, **changes: Any
    ) -> DatasetLayout:
        if layout.storage == "chunked":
            layout = with_chunks(layout, dataset, where).changed(**changes)
        else:
            layout = layout.changed(offset=_contiguous_offset(dataset, where), **changes)
        chunks = layout.chunks
        is_empty = layout.offset < 0 if chunks is None else not chunks.offset.size
        if is_empty and dataset.plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED:
            raise NotDirectError("it was never written, and its fill value is undefined")
        return layout

    def _member(
        self, layout: DatasetLayout, dataset: Opened, element: StoredType, where: str
    ) -> DatasetLayout:
        """Return the layout of a member: a part of the rows of the compound."""
        if not layout.stored_itemsize:
            raise NotDirectError("a member of a compound with elements of variable length")
        rank = len(dataset.extents)
        extra = layout.shape[rank:]
        label = "/".join(layout.member)
        compound: np.dtype[Any] = np.dtype(
            {
                "names": [label],
                "formats": [(layout.raw_dtype, extra)],
                "offsets": [element.offset],
                "itemsize": layout.stored_itemsize,
            }
        )
        fill = np.zeros(layout.stored_itemsize, np.uint8)
        if uses_fill_value(dataset.plist):
            value = fill_value(dataset.plist, describe(dataset.encoded_type).dtype, ())
            value = np.asarray(_member_of(value, layout.member))
            fill[element.offset :][: value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
        source = layout.changed(
            shape=layout.shape[:rank],
            chunk_shape=layout.chunk_shape[:rank],
            dtype=compound,
            fill=fill.view(compound).reshape(()),
            extra_dims=0,
            text=(),
        )
        source = self._direct(source, dataset, where)
        samples = Slab.run(0, layout.num_samples)
        part = Part(source, samples, samples, Piece(member=label))
        return with_parts(layout, (part,) if layout.num_samples else ())


def _member_of(values: Any, member: tuple[str, ...]) -> Any:
    return functools.reduce(operator.getitem, member, values)


def _storage(dataset: Opened) -> Storage:
    """Return the layout class.

    HDF5 reports external storage as contiguous, and external and virtual datasets have no offset,
    like those that were never written. So these two are recognized first.
    """
    kind = dataset.layout_class
    if kind == h5py.h5d.VIRTUAL:
        return "virtual"
    if dataset.plist.get_external_count():
        return "external"
    if kind == h5py.h5d.COMPACT:
        return "compact"
    return "chunked" if kind == h5py.h5d.CHUNKED else "contiguous"


def _contiguous_offset(dataset: Opened, where: str) -> int:
    try:
        offset = dataset.offset
    except RuntimeError as error:
        raise DamagedError(f"{where}: its address is not valid ({error})") from error
    if offset < 0:
        return -1
    nbytes, end = dataset.id.get_storage_size(), dataset.end
    wanted = math.prod(dataset.extents) * dataset.itemsize
    if nbytes < wanted:
        raise DamagedError(f"{where}: {nbytes} bytes are allocated for {wanted} bytes of values")
    if offset + wanted > end:
        raise DamagedError(
            f"{where}: its values end at byte {offset + wanted}, but the file has {end} bytes;"
            " it was cut short"
        )
    return offset
