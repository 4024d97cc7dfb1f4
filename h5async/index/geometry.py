"""Defines `PieceGeometry`: how what is copied of a sample lies in chunks and in rows.

A piece is what one chunk holds of one sample, and the row of a sample is put together from pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PieceGeometry(NamedTuple):
    """How the pieces of a sample lie in chunks and in rows; all in bytes but `extents`.

    Attributes
    ----------
    chunk_strides, row_strides
        int64 (rank - 1,): of all dimensions but that of the samples.
    extents
        int64 (pieces, rank - 1): elements of each piece of the cross-section, cut off at
        the row's end.
    row_begin, piece_begin
        int64 (pieces,): first byte of each piece in a row, and in a chunk (a contiguous dataset
        is its own only chunk).
    chunk_samples, sample_stride
        Samples in a chunk, and how far apart they are.
    chunk_nbytes
        Of a whole chunk.
    """

    chunk_strides: NDArray[np.int64]
    row_strides: NDArray[np.int64]
    extents: NDArray[np.int64]
    row_begin: NDArray[np.int64]
    piece_begin: NDArray[np.int64]
    chunk_samples: int
    sample_stride: int
    chunk_nbytes: int
