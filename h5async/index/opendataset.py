"""Defines `Opened`: an open dataset, and what HDF5 says of it, which is asked once."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import h5py
import numpy as np

from h5async.index.hdf5 import encoded_properties, index_kind
from h5async.index.storedtypes import describe

Extents = tuple[int, ...]


class Opened:
    """An open dataset. What is asked for is kept, so each question reaches HDF5 once, if at all.

    Parameters
    ----------
    identifier
        The dataset.
    descriptor
        Of the file that it lies in.

    Attributes
    ----------
    plist, layout_class
        Its creation properties, and HDF5's layout class.
    type, encoded_type
        Its type as stored, and as HDF5 encodes it.
    chunks
        Dimensions of a chunk; empty: it has none.
    """

    def __init__(self, identifier: h5py.h5d.DatasetID, descriptor: int) -> None:
        self.id = identifier
        self._descriptor = descriptor
        self.plist = identifier.get_create_plist()
        self.layout_class = int(self.plist.get_layout())
        self.type = identifier.get_type()
        self.encoded_type = bytes(self.type.encode())
        is_chunked = self.layout_class == h5py.h5d.CHUNKED
        self.chunks: Extents = tuple(self.plist.get_chunk()) if is_chunked else ()

    @property
    def dataset(self) -> h5py.Dataset:
        """The dataset as users of h5py have it."""
        return h5py.Dataset(self.id)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype, for which h5py raises any exception where there is none."""
        return describe(self.encoded_type).dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element as stored; of variable length, it is a reference."""
        is_text = isinstance(self.type, h5py.h5t.TypeStringID)
        if isinstance(self.type, h5py.h5t.TypeVlenID) or (is_text and self.type.is_variable_str()):
            # HDF5 says how large such an element is in memory.
            created = h5py.h5i.get_file_id(self.id).get_create_plist()
            return 4 + int(created.get_sizes()[0]) + 4
        return int(self.type.get_size())

    @cached_property
    def properties(self) -> bytes:
        """Its creation properties as HDF5 encodes them; b"" where it does not."""
        return encoded_properties(self.plist)

    @cached_property
    def _space(self) -> h5py.h5s.SpaceID:
        return self.id.get_space()

    @cached_property
    def shape(self) -> Extents | None:
        """Its dimensions; None: it has a null dataspace. HDF5 may open the sources to tell them."""
        if self._space.get_simple_extent_type() == h5py.h5s.NULL:
            return None
        return tuple(self._space.get_simple_extent_dims())

    @property
    def extents(self) -> Extents:
        """Its dimensions; those of a null dataspace are an error."""
        assert self.shape is not None
        return self.shape

    @property
    def maxshape(self) -> tuple[int | None, ...]:
        """How far it may grow; None: without a limit."""
        most = self._space.get_simple_extent_dims(True)
        return tuple(None if extent == h5py.h5s.UNLIMITED else extent for extent in most)

    @cached_property
    def index_kind(self) -> int:
        """The kind of its chunk index; -1 where HDF5 does not say."""
        return index_kind(self.id)

    @property
    def offset(self) -> int:
        """The first byte of contiguous values in the file; -1: they were never written.

        To an address that is undefined HDF5 adds the bytes of the userblock, as to any other.

        Raises
        ------
        RuntimeError
            If the address is not valid.
        """
        found = self.id.get_offset()
        if found is None:
            return -1
        if self.id.get_storage_size() == 0:
            created = h5py.h5i.get_file_id(self.id).get_create_plist()
            found = -1 if found == created.get_userblock() - 1 else found
        return int(found)

    @property
    def end(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._descriptor).st_size
