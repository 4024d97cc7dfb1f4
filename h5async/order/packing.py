"""Packs consecutive samples of any length, *documents*, into windows of one length. Pure.

Where documents begin enters; windows of rows leave, and which document each row of a window is of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.order.rows import numbers_in, starts_of

Int64s = NDArray[np.int64]

_NONE = -1  # in place of a document and a position, where there is no row


class Packing:
    """Windows of `length` rows, which have all rows of all documents once. Thread-safe.

    `documents` is int64 (n + 1,), non-decreasing: document i is rows ``documents[i]`` to
    ``documents[i + 1]``. `counts` are the documents of each file; the last window of a file is
    short, unless its rows happen to fit. `windows`, int64 (m + 1,), are likewise.
    """

    def __init__(self, documents: Int64s, length: int, counts: Iterable[int]) -> None:
        self._documents, self.length = documents, length
        edges = documents[starts_of(np.array([*counts], np.int64))]
        self.counts = -(-np.diff(edges) // length)
        self.windows = np.append(
            numbers_in(0, self.counts) * length + np.repeat(edges[:-1], self.counts), edges[-1]
        )
        longest = int(np.diff(documents).max(initial=0))
        self._dtype: type[np.signedinteger[Any]] = np.int64 if longest >> 31 else np.int32

    def documents(self, samples: Int64s) -> NDArray[Any]:
        """Return the document of each row of some windows: int64 (samples, length)."""
        number, _, lengths = self._runs(samples)
        return self._windowed(samples, np.repeat(number, lengths))

    def positions(self, samples: Int64s) -> NDArray[Any]:
        """Return the place of each row in its document: int32 (samples, length), if that fits."""
        _, begins, lengths = self._runs(samples)
        return self._windowed(samples, numbers_in(begins, lengths).astype(self._dtype))

    def _runs(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return documents in windows, by number, place of the first row, and number of rows."""
        begin, end = self.windows[samples], self.windows[samples + 1]
        first = np.searchsorted(self._documents, begin, side="right") - 1
        counts = np.searchsorted(self._documents, end, side="left") - first
        number = numbers_in(first, counts)
        start = self._documents[number]
        place = np.maximum(np.repeat(begin, counts) - start, 0)
        stop = np.minimum(self._documents[number + 1], np.repeat(end, counts))
        return number, place, stop - start - place

    def _windowed(self, samples: Int64s, rows: NDArray[Any]) -> NDArray[Any]:
        shape = samples.size, self.length
        if rows.size == samples.size * self.length:
            return rows.reshape(shape)
        sizes = self.windows[samples + 1] - self.windows[samples]
        found = np.full(shape, _NONE, rows.dtype)
        found[np.arange(self.length) < sizes[:, np.newaxis]] = rows
        return found
