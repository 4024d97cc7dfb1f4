"""Computes what a dataset in an object store costs in requests, by the order of its samples.

The chunk table enters; requests and bytes a sample leave, as the fetcher would join them for the
batches of an epoch, or of its middle where it is long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.filesize import decimal

from h5async.config import ReaderConfig
from h5async.index.layout import DatasetLayout
from h5async.index.tables import Int64s, repetitions
from h5async.observe.stats import MOST_RATE
from h5async.order.selection import permute
from h5async.order.window import window_order
from h5async.plan.records import ByteRanges, extents_of, requests_of

_MOST_SAMPLES = 1 << 16  # for which requests are computed
_FEWER = 2.0  # times: what makes the window worth a word
_SMALL_NBYTES = 256 * 1024  # of a request, below which the rate of requests is the limit


@dataclass(frozen=True)
class Requests:
    """Requests a sample, and their bytes."""

    count: float
    nbytes: float

    def __str__(self) -> str:
        return f"{self.count:.3g} requests of {decimal(round(self.nbytes / (self.count or 1)))}"


@dataclass(frozen=True)
class FarCost:
    """What a sample costs by the order of samples: that of the file, shuffled fully or in a window.

    `batch_size` is that of the batches; "rows" are read alone, or whole "chunks".
    """

    in_order: Requests
    full: Requests
    window: Requests
    batch_size: int
    reads: str

    def __str__(self) -> str:
        most = MOST_RATE / (self.full.count or 1)
        parts = [
            f"in order {self.in_order}; shuffled {self.full}; in a window {self.window}",
            f"S3 (some {MOST_RATE:,} GETs a second for a prefix) permits {most:,.0f} samples a"
            " second shuffled",
        ]
        if self.full.count > _FEWER * self.window.count:
            parts.append(f"shuffle=window needs {self.full.count / self.window.count:.0f}x fewer")
        if self.window.nbytes < _SMALL_NBYTES * self.window.count:
            larger = "larger" if self.reads == "chunks" else "compressed"
            of = "" if self.reads == "chunks" else " of several rows, with shuffle=window,"
            parts.append(f"{larger} chunks{of} would need fewer")
        return "; ".join(parts)


def far_cost(layout: DatasetLayout) -> FarCost | None:
    """Return the cost of a dataset; None if it is not of rows that the core reads as they lie."""
    is_plain = layout.segments is None and layout.values is None and layout.fallback_reason is None
    if not is_plain or layout.is_ragged or layout.sample_axis or not layout.num_samples:
        return None
    if layout.chunks is None and layout.offset < 0:
        return None
    fields, count = ReaderConfig.model_fields, layout.num_samples
    batch = fields["batch_size"].default
    window = window_order([layout], fields["window_bytes"].default, 0, batch)

    def full(start: int, stop: int) -> Int64s:
        return permute(np.arange(start, stop), count, 0, 0)

    def in_window(start: int, stop: int) -> Int64s:
        return window.samples(0, start, stop)

    ranges_of = _ranges(layout)
    # (Shuffled fully, a chunk has made way for others before it is needed again.)
    return FarCost(
        _requests(ranges_of, np.arange, count, batch, keeps=True),
        _requests(ranges_of, full, count, batch, keeps=False),
        _requests(ranges_of, in_window, count, batch, keeps=True),
        batch,
        "chunks" if layout.filters and layout.chunks is not None else "rows",
    )


def _requests(
    ranges_of: Callable[[Int64s], ByteRanges],
    order: Callable[[int, int], Int64s],
    count: int,
    batch: int,
    *,
    keeps: bool,
) -> Requests:
    first = (count - min(count, _MOST_SAMPLES)) // 2
    stop = min(count, first + _MOST_SAMPLES)
    before = ranges_of(order(max(0, first - _MOST_SAMPLES), first)).begins if keeps else ()
    seen, requests, nbytes = set(np.asarray(before).tolist()), 0, 0
    for start in range(first, stop, batch):
        ranges = ranges_of(order(start, min(stop, start + batch)))
        if keeps:
            ranges = ranges.chosen(np.array([y not in seen for y in ranges.begins.tolist()], bool))
            seen.update(ranges.begins.tolist())
        found = extents_of(ranges, requests_of(ranges))
        requests, nbytes = requests + found.size, nbytes + found.nbytes
    return Requests(requests / (stop - first), nbytes / (stop - first))


def _ranges(layout: DatasetLayout) -> Callable[[Int64s], ByteRanges]:
    """Return a function from samples to what is read of them: rows, or encoded chunks."""
    if layout.chunks is None:
        size = layout.row_nbytes
        return lambda samples: _made(layout.offset + samples * size, np.full(samples.size, size))
    chunks, rows = layout.chunks, layout.chunk_shape[0]
    unit = np.unravel_index(chunks.numbers, layout.grid)[0]  # ascending
    size = layout.chunk_nbytes // rows

    def of(samples: Int64s) -> ByteRanges:
        wanted = np.unique(samples // rows) if layout.filters else samples // rows
        begin, end = (np.searchsorted(unit, wanted, side) for side in ("left", "right"))
        of_wanted, which = repetitions(end - begin)
        which += begin[of_wanted]
        if layout.filters:
            return _made(chunks.offset[which], chunks.nbytes[which])
        offset = chunks.offset[which] + samples[of_wanted] % rows * size
        return _made(offset, np.full(which.size, size))

    return of


def _made(offset: Int64s, nbytes: Int64s) -> ByteRanges:
    begins = offset.astype(np.int64)
    return ByteRanges.of(begins, begins + nbytes)
