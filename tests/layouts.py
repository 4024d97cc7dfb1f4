"""Numbers enter; the layout of a dataset that no file has leaves, for tests of plans and orders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from h5async.codec.filters import Filter
from h5async.index.layout import DatasetLayout
from h5async.index.tables import ChunkTable
from h5async.io.source import FileStamp

DEFLATE = (Filter(1, (4,), "deflate"),)
BASE = 1000  # address of a contiguous dataset
ITEMSIZE = 4


def layout(
    shape: Sequence[int],
    chunk_shape: Sequence[int] = (),
    *,
    axis: int = 0,
    allocated: Sequence[int] | None = None,
    filters: tuple[Filter, ...] = (),
    offset: int = BASE,
    reason: str | None = None,
) -> DatasetLayout:
    """A dataset of int32; `allocated`: numbers of the chunks that exist (None: all)."""
    chunks = None
    if chunk_shape:
        total = math.prod(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
        index = np.arange(total) if allocated is None else np.array(sorted(allocated), np.int64)
        chunks = ChunkTable(
            index=None if index.size == total else index,
            # chunk number k lies at a place in the file that says so, and not in order
            offset=(7919 * (index + 1)) % 104729 * 1000,
            nbytes=np.full(index.size, 99),
            filter_mask=np.zeros(index.size, np.uint32),
        )
    return DatasetLayout(
        file="f.h5",
        stamp=FileStamp(0, 0),
        path="data",
        shape=tuple(shape),
        dtype=np.dtype(np.int32),
        sample_axis=axis,
        storage="chunked" if chunk_shape else "contiguous",
        fallback_reason=reason,
        fill=np.zeros((), np.int32),
        offset=-1 if chunk_shape else offset,
        chunk_shape=tuple(chunk_shape),
        filters=filters,
        chunks=chunks,
    )
