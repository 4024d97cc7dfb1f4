"""Checks chunks before h5py reads them.

If a chunk decodes short, HDF5 returns whatever its heap held. So if some of a chunk's filters can
be undone here, they are, the first time that one of its samples is needed. An open dataset and
sample numbers enter; an error leaves if one of their chunks is damaged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import h5py
import numpy as np

from h5async.codec.decoding import Bytes
from h5async.codec.filters import can_decode
from h5async.index.chunktable import needed_nbytes
from h5async.index.filterpipeline import filters_of
from h5async.index.hdf5 import stored_nbytes
from h5async.index.layout import DatasetLayout
from h5async.plan.records import Int64s
from h5async.read.pipeline import DAMAGED, FilterPipeline, wrong_size
from h5async.read.scratch import Scratch, encoded_room


class ChunkCheck:
    """Finds chunks that do not decode to their full length; checks each once.

    `layout` is of a chunked dataset, or a source of it, with filters of which the last one to be
    undone can be checked.
    """

    def __init__(self, layout: DatasetLayout) -> None:
        self.layout = layout
        rank = len(layout.chunk_shape) - layout.extra_dims
        self._shape, self._chunk = layout.shape[:rank], layout.chunk_shape[:rank]
        self._grid = layout.grid[:rank]
        self._nbytes = math.prod(self._chunk) * layout.stored_itemsize
        filters = layout.hdf5_filters
        # The number of filters that only HDF5 undoes, last of all; the others are undone here.
        self._left = next(
            (k for k in range(len(filters), 0, -1) if not can_decode(filters[k - 1])), 0
        )
        self._filters, self._hdf5s = filters, filters[: self._left]
        self._pipeline = FilterPipeline(filters[self._left :], self._nbytes)
        self._checked: set[int] = set()  # numbers along the samples' dimension

    @classmethod
    def of(cls, layout: DatasetLayout) -> ChunkCheck | None:
        """Return the check for a dataset, or None if nothing can be checked."""
        if not (layout.chunk_shape and layout.hdf5_filters and layout.stored_itemsize):
            return None
        check = cls(layout)
        return check if not check._left or check._hdf5s[-1].stated_lengths is not None else None

    def run(self, dataset: h5py.Dataset, sample: Int64s, require_open: Callable[[], None]) -> None:
        """Check the chunks that hold some samples, through the open dataset.

        `require_open` is called before each chunk, and raises if the rest is no longer wanted.
        `ValueError` is raised if a chunk is damaged; the message names it.
        """
        axis = self.layout.sample_axis
        numbers = set(np.unique(sample // self._chunk[axis]).tolist()) - self._checked
        if not numbers:
            return
        # Allocated only while chunks are checked: there may be thousands of files with a check.
        out = np.empty(self._nbytes if not self._left else encoded_room(self._nbytes), np.uint8)
        scratch = Scratch.allocate(0, 0, self._pipeline.between_nbytes)
        # Filters that are not available, and that no chunk needed, were left out of the layout.
        stored = filters_of(dataset.id.get_create_plist())
        bits = [bit for bit, entry in enumerate(stored) if entry in self._filters]
        for number in sorted(numbers):
            cells = [[number] if a == axis else range(n) for a, n in enumerate(self._grid)]
            for cell in itertools.product(*cells):
                require_open()
                corner = tuple(c * size for c, size in zip(cell, self._chunk, strict=True))
                try:
                    self._check(dataset, corner, bits, out, scratch)
                except (ValueError, RuntimeError, OSError) as error:
                    at = f'{self.layout.file}: dataset "{self.layout.path}", chunk {corner}'
                    raise ValueError(f"{at}: {error}{DAMAGED}") from error
            self._checked.add(number)

    def _check(
        self,
        dataset: h5py.Dataset,
        corner: tuple[int, ...],
        bits: list[int],
        out: Bytes,
        scratch: Scratch,
    ) -> None:
        ends = (c + size for c, size in zip(corner, self._chunk, strict=True))
        is_partial = any(end > n for end, n in zip(ends, self._shape, strict=True))
        if is_partial and self.layout.has_raw_edges:
            return
        if not stored_nbytes(dataset.id, corner):
            return
        stored_mask, encoded = dataset.id.read_direct_chunk(corner)
        mask = sum((stored_mask >> bit & 1) << k for k, bit in enumerate(bits))
        itemsize = self.layout.stored_itemsize
        least = expected = needed_nbytes(self._shape, self._chunk, corner, itemsize)
        hdf5s = self._hdf5s
        if hdf5s and mask >> (self._left - 1) & 1:  # the last one of them was not applied
            if self._left > 1:
                return
            hdf5s = ()
        lengths = hdf5s[-1].stated_lengths if hdf5s else None
        if lengths is not None:
            least = lengths.least_encoded(hdf5s[-1].parameters)
        self._pipeline.decode(
            np.frombuffer(encoded, np.uint8), mask >> self._left, out, scratch, least_nbytes=least
        )
        stated = None if lengths is None else lengths.decoded(out)
        if stated is not None and stated < expected:
            raise ValueError(wrong_size(expected, stated, hdf5s[-1].label))
