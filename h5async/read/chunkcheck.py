"""Checks chunks before h5py reads them.

If a chunk decodes short, HDF5 returns whatever its heap held. So the core decodes it first, the
first time that one of its samples is needed; without the core, as much is decoded as its length
takes. An open dataset and sample numbers enter; an error leaves if one of their chunks is damaged.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
from collections.abc import Callable

import h5py
import numpy as np

from h5async.codec.chunklengths import decoded_nbytes, unchecked
from h5async.core.binding import Core, address
from h5async.index.chunktable import needed_nbytes
from h5async.index.filterpipeline import filters_of
from h5async.index.hdf5 import stored_nbytes
from h5async.index.layout import DatasetLayout
from h5async.plan.records import Int64s
from h5async.read.failures import DAMAGED, decoding_error
from h5async.read.scratch import Bytes, Scratch, encoded_room

_log = logging.getLogger("h5async.read")
_told: set[str] = set()  # filters whose chunks nothing checks, in this process


class ChunkCheck:
    """Finds chunks that do not decode to their full length; checks each once.

    `layout` is of a chunked dataset, or a source of it, with filters.
    """

    def __init__(self, layout: DatasetLayout, core: Core | None) -> None:
        self.layout = layout
        rank = len(layout.chunk_shape) - layout.extra_dims
        self._shape, self._chunk = layout.shape[:rank], layout.chunk_shape[:rank]
        self._grid = layout.grid[:rank]
        self._nbytes = math.prod(self._chunk) * layout.stored_itemsize
        self._filters = layout.hdf5_filters
        self._core = core
        self._pipeline = None if core is None else core.filters(self._filters)
        self._checked: set[int] = set()  # numbers along the samples' dimension
        if self._pipeline is None and (left := unchecked(self._filters)) is not None:
            if left.label not in _told:
                _log.info(
                    "%s: chunks of %s are decoded by HDF5 alone, which may not notice damage",
                    layout.file,
                    left.label,
                )
            _told.add(left.label)

    @classmethod
    def of(cls, layout: DatasetLayout, core: Core | None) -> ChunkCheck | None:
        """Return the check for a dataset, or None if it has no chunks with filters."""
        if not (layout.chunk_shape and layout.hdf5_filters and layout.stored_itemsize):
            return None
        return cls(layout, core)

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
        scratch = Scratch.allocate(0, self._nbytes, encoded_room(self._nbytes))
        # Filters that are not available, and that no chunk needed, were left out of the layout.
        stored = filters_of(dataset.id.get_create_plist())
        bits = [bit for bit, entry in enumerate(stored) if entry in self._filters]
        for number in sorted(numbers):
            cells = [[number] if a == axis else range(n) for a, n in enumerate(self._grid)]
            for cell in itertools.product(*cells):
                require_open()
                corner = tuple(c * size for c, size in zip(cell, self._chunk, strict=True))
                try:
                    self._check(dataset, corner, bits, scratch)
                except (ValueError, OSError) as error:
                    at = f'{self.layout.file}: dataset "{self.layout.path}", chunk {corner}'
                    raise ValueError(f"{at}: {error}{DAMAGED}") from error
            self._checked.add(number)

    def _check(
        self, dataset: h5py.Dataset, corner: tuple[int, ...], bits: list[int], scratch: Scratch
    ) -> None:
        ends = (c + size for c, size in zip(corner, self._chunk, strict=True))
        is_partial = any(end > n for end, n in zip(ends, self._shape, strict=True))
        if is_partial and self.layout.has_raw_edges:
            return
        if not stored_nbytes(dataset.id, corner):
            return
        stored_mask, encoded = dataset.id.read_direct_chunk(corner)
        mask = sum((stored_mask >> bit & 1) << k for k, bit in enumerate(bits))
        # Some writers leave out the part of a chunk beyond the dataset's edge.
        least = needed_nbytes(self._shape, self._chunk, corner, self.layout.stored_itemsize)
        if self._core is not None and self._pipeline is not None:
            self._decode(self._core, np.frombuffer(encoded, np.uint8), mask, least, scratch)
            return
        room = encoded_room(self._nbytes)
        found = decoded_nbytes(self._filters, mask, encoded, self._nbytes, room)
        if found is not None and not least <= found <= self._nbytes:
            raise ValueError(f"expected {self._nbytes} bytes, got {found}")

    def _decode(self, core: Core, encoded: Bytes, mask: int, least: int, scratch: Scratch) -> None:
        struct = scratch.worker(core).struct
        struct.least_nbytes = least
        is_done = core.decode(
            self._pipeline,
            ctypes.byref(struct),
            address(encoded),
            address(scratch.raw_chunk),
            len(self._filters),
            encoded.size,
            mask,
            self._nbytes,
        )
        if not is_done:
            raise ValueError(decoding_error(struct.failure, self._filters))
