"""Defines the errors of a dataset that cannot be read directly.

A dataset is read directly if its bytes are read from the file without HDF5; all others are read
through h5py.
"""

from __future__ import annotations

from h5async.errors import DatasetError


class NotDirectError(Exception):
    """Only h5py may read the dataset; the message is the reason."""


COLUMNS_REASON = (
    "columns of a contiguous dataset are read by mapping, which needs a local file system, or"
    ' io="map"'
)


class OtherKindError(DatasetError):
    """A path leads to an object that is not an array, but may be a field of another kind."""
