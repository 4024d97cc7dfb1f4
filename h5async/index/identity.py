"""Tells a dataset from another one that lies in its place later."""

from __future__ import annotations

import hashlib

import h5py
import numpy as np

from h5async.index.layout import Indexed
from h5async.index.opendataset import Opened


def indexed(dataset: Opened) -> Indexed:
    """Return what tells a dataset from another one that lies in its place later.

    The digest covers what HDF5 encodes of its type and of its creation properties (H5Tencode,
    H5Pencode2), and compact values, which are read with the index.
    """
    digest = hashlib.blake2b(dataset.encoded_type, digest_size=16)
    digest.update(dataset.properties)
    if dataset.layout_class == h5py.h5d.COMPACT and not dataset.dtype.hasobject:
        digest.update(np.asarray(dataset.dataset[...]).tobytes())
    return Indexed(digest.digest(), dataset.extents)
