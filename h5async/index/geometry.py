"""Defines `PieceGeometry`: where the pieces of a sample lie in chunks and in rows.

A piece is the part of one sample in one chunk; the row of a sample is assembled from pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PieceGeometry(NamedTuple):
    """Where the pieces of a sample lie in chunks and in rows; all in bytes except `extents`.

    Attributes
    ----------
    chunk_strides, row_strides
        int64 (rank - 1,): of all dimensions except that of the samples.
    extents
        int64 (pieces, rank - 1): elements of each piece of the cross-section, cut off at the row's
        end.
    row_begin, piece_begin
        int64 (pieces,): first byte of each piece in a row, and in a chunk (a contiguous dataset is
        its own only chunk).
    chunk_samples, sample_stride
        Samples in a chunk, and the distance between them.
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
