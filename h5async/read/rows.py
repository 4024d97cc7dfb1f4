"""Reads rows that lie in one piece and not encoded, in Python: `RowPlan`s.

An open file and a slice of a plan enter; rows of the batch leave, one copy each: out of the memory
map with a few NumPy calls for all of them, or by reads straight into the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.codec.decoding import Bytes
from h5async.errors import ReadError
from h5async.index.layout import DatasetLayout
from h5async.io.localfile import LocalFile
from h5async.plan.plan import rows_at
from h5async.plan.records import Int64s, RowPlan
from h5async.read.scratch import Scratch

_GATHER_BLOCK_NBYTES = 64 * 1024  # what NumPy may take for a moment while it gathers small rows


class RowReader:
    """Reads rows of one dataset. Safe to use from many threads, each with its scratch.

    Parameters
    ----------
    layout
        Of a dataset whose rows lie in one piece.
    """

    def __init__(self, layout: DatasetLayout) -> None:
        self._layout = layout
        self._fill = layout.raw_fill
        self._is_table = layout.storage == "contiguous" and layout.rows_are_whole

    def read(
        self,
        file: LocalFile,
        plan: RowPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
        scratch: Scratch,
    ) -> None:
        """Read rows `start` to `stop` of a plan from the open file."""
        nbytes = plan.row_nbytes
        if nbytes == 0:
            return
        offset, sample = plan.offset[start:stop], plan.sample[start:stop]
        first = plan.rows if isinstance(plan.rows, int) else 0
        goes_to = None if isinstance(plan.rows, int) else plan.rows[start:stop]
        never_written = np.flatnonzero(offset < 0)
        if never_written.size:
            raw[rows_at(first + start if goes_to is None else goes_to, never_written)] = self._fill
        if never_written.size == offset.size:
            return
        rows = raw.view(np.uint8).reshape(raw.shape[0], nbytes)
        if goes_to is None:
            rows = rows[first + start : first + stop]
        try:
            with scratch.timed("read_ns"):
                mapped = file.mapped(int(offset.max()) + nbytes)
                if mapped is None:
                    position, offset = _in_file_order(offset)
                    goes_to = position if goes_to is None else goes_to[position]
                    file.read_rows(goes_to, offset, rows, scratch.require_open)
                else:
                    self._gather(mapped, offset, sample, goes_to, rows)
        except ReadError as error:
            raise ReadError(
                f'{error} (dataset "{self._layout.path}", samples {sample.min()} to {sample.max()})'
            ) from error
        scratch.counts.read_nbytes += (stop - start) * nbytes

    def _gather(
        self, mapped: Bytes, offset: Int64s, sample: Int64s, goes_to: Int64s | None, rows: Bytes
    ) -> None:
        """Copy rows out of the map; a few NumPy calls for all of them where they are small."""
        nbytes = rows.shape[1]
        if self._is_table and goes_to is None:
            begin = self._layout.offset
            count = min(self._layout.num_samples, (mapped.size - begin) // nbytes)
            table = mapped[begin : begin + count * nbytes].reshape(count, nbytes)
            np.take(table, sample, axis=0, out=rows, mode="clip")
            return
        position, offset = _in_file_order(offset)
        if goes_to is not None:
            position = goes_to[position]
        item = np.dtype((np.void, nbytes))
        window = np.ndarray(mapped.size - nbytes + 1, item, mapped.data, strides=(1,))
        out = rows.view(item).reshape(-1)
        block = max(1, _GATHER_BLOCK_NBYTES // nbytes)
        for begin in range(0, offset.size, block):
            part = slice(begin, begin + block)
            out[position[part]] = window[offset[part]]


def _in_file_order(offset: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows that were ever written, in the order of their offsets, and these offsets."""
    position = np.argsort(offset)
    position = position[np.searchsorted(offset, 0, sorter=position) :]  # -1: never written
    return position, offset[position]
