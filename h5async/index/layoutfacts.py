"""Defines facts that a `DatasetLayout` may have beside the position of its bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.io.stamps import FileStamp


class Indexed(NamedTuple):
    """Identifies a dataset at the time of indexing; see `identity.indexed`.

    `digest` is 16 bytes that depend on its type and creation properties; `shape` is its extent in
    the file.
    """

    digest: bytes
    shape: tuple[int, ...]


class SequenceLengths(NamedTuple):
    """The lengths of the sequences of a dataset.

    Attributes
    ----------
    room, held
        int64 (n,): the samples reserved per sequence for all fields, and those of this field.
    """

    room: NDArray[np.int64]
    held: NDArray[np.int64]


class HeapFile(NamedTuple):
    """Variable-length elements of one file.

    Attributes
    ----------
    file, stamp
        The file, as it was indexed.
    first_sample
        The sample number of its first element.
    elements
        Where their values lie: `variablelength.Sequences`.
    """

    file: str
    stamp: FileStamp
    first_sample: int
    elements: Any

    @property
    def path(self) -> str:
        """The path of the dataset in the file."""
        where: str = self.elements.where
        return where.removeprefix(f'{self.file}: dataset "').removesuffix('"')


class Text(NamedTuple):
    """Bytes of an element that are a string that HDF5 converts while reading.

    Attributes
    ----------
    offset, nbytes
        Where they lie in the element.
    is_padded
        True if spaces pad it, which HDF5 replaces by NULs. Otherwise a NUL ends it, and HDF5
        replaces everything after that by NULs.
    """

    offset: int
    nbytes: int
    is_padded: bool


class CfAttribute(NamedTuple):
    """An attribute that says how values are packed, by the CF conventions.

    `dtype` is that of its values in NumPy's notation, or "" for text; `data` are the bytes as
    stored.
    """

    name: str
    dtype: str
    data: bytes
