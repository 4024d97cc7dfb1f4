"""Tells a dataset from another one that lies in its place later."""

from __future__ import annotations

import hashlib

import h5py
import numpy as np

from h5async.index.hdf5 import encoded_properties
from h5async.index.layout import Indexed


def indexed(dataset: h5py.Dataset) -> Indexed:
    """Return what tells a dataset from another one that lies in its place later.

    The digest covers what HDF5 encodes of its type and of its creation properties (H5Tencode,
    H5Pencode2), and compact values, which are read with the index.
    """
    plist = dataset.id.get_create_plist()
    digest = hashlib.blake2b(dataset.id.get_type().encode(), digest_size=16)
    digest.update(encoded_properties(plist))
    if plist.get_layout() == h5py.h5d.COMPACT and not dataset.dtype.hasobject:
        digest.update(np.asarray(dataset[...]).tobytes())
    return Indexed(digest.digest(), dataset.shape)
