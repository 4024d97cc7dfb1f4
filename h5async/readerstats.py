"""Makes the statistics of a reader.

What was delivered and the counts of the filler enter; `ReaderStats` leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from h5async.fill.columns import Rows, by_field
from h5async.fill.records import FillerStats
from h5async.index.alike import kinds_of
from h5async.index.cost import direct_share
from h5async.index.layout import DatasetLayout
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows
from h5async.stats import ReaderStats, StageTimes, Waits


class ReaderCounts:
    """What was delivered, and how long the consumer waited for it.

    Parameters
    ----------
    layouts
        Layouts of all columns, by name.
    rows
        By column: which rows each sample consists of.

    Attributes
    ----------
    waits
        The consumer's waits, which its thread notes.
    upload_times
        Time of uploads, of all threads.
    samples, nbytes
        Samples that were delivered, and their bytes, in the dtypes of the file.
    """

    def __init__(self, layouts: Mapping[str, DatasetLayout], rows: Sequence[Rows]) -> None:
        self._layouts = layouts
        self._plain_nbytes = 0
        self._ragged: dict[SpanRows, int] = {}  # and the bytes of one of their rows
        for layout, one in zip(layouts.values(), rows, strict=True):
            if isinstance(one, SpanRows):
                self._ragged[one] = self._ragged.get(one, 0) + layout.row_nbytes
            else:
                self._plain_nbytes += layout.row_nbytes
        self.nbytes = 0
        self.waits = Waits()
        self.upload_times = StageTimes()
        self.samples = 0
        self._warned: set[str] = set()

    def note(self, index: NDArray[np.int64]) -> None:
        """Count the samples of a batch that is delivered."""
        self.samples += index.size
        self.nbytes += self._plain_nbytes * index.size
        for rows, nbytes in self._ragged.items():
            self.nbytes += int(rows.lengths(index).sum()) * nbytes

    def epoch_nbytes(self, selection: Selection, samples: int) -> int:
        """Return the bytes of so many samples, of the mean length of those that are selected."""
        found = self._plain_nbytes * samples
        if self._ragged and selection.size:
            selected = selection.samples(np.arange(selection.size))
            for rows, nbytes in self._ragged.items():
                total = int(rows.lengths(selected).sum())
                found += total * nbytes * samples // selection.size
        return found

    def new_warnings(self, found: Sequence[str]) -> list[str]:
        """Return those of some warnings that the caller has not seen yet."""
        new = [text for text in found if text not in self._warned]
        self._warned.update(new)
        return new

    def stats(
        self,
        filler: FillerStats,
        methods: Sequence[str],
        *,
        device_chunks: int,
        num_threads: int,
        workers: str | int,
        cache: str,
        decode: str,
    ) -> ReaderStats:
        """Return the statistics of the reader.

        Parameters
        ----------
        filler
            What the filler's threads have done.
        methods
            How each field is read.
        device_chunks
            Chunks that were decoded on a GPU.
        num_threads, workers, cache, decode
            As in `ReaderStats`.
        """
        layouts, waits, counts = self._layouts.values(), self.waits, filler.counts
        ways = dict(zip(self._layouts, methods, strict=True))
        stages = dict(filler.stage_seconds)
        stages["upload"] += self.upload_times.seconds()["upload"]
        stages["read"] += counts.read_ns / 1e9
        stages["decode"] += counts.decode_ns / 1e9
        stages["place"] += counts.place_ns / 1e9
        row_nbytes = sum(map(_sample_nbytes, layouts))
        direct = sum(_sample_nbytes(layout) * direct_share(layout) for layout in layouts)
        names = [
            f.label for layout in layouts for leaf, _ in kinds_of(layout) for f in leaf.filters
        ]
        return ReaderStats(
            batches=waits.count,
            samples=self.samples,
            nbytes=self.nbytes,
            elapsed_seconds=waits.elapsed_seconds,
            wait_seconds=waits.seconds,
            wait_p50_seconds=waits.percentile(50),
            wait_p99_seconds=waits.percentile(99),
            stage_seconds=stages,
            gil_wait_seconds=counts.gil_wait_ns / 1e9,
            read_nbytes=counts.read_nbytes,
            decoded_chunks=counts.decoded_chunks + device_chunks,
            fallback_reads=filler.fallback_reads,
            direct_share=direct / row_nbytes if row_nbytes else 1.0,
            ways=by_field(ways, _both_ways),
            num_threads=num_threads,
            filters=tuple(dict.fromkeys(names)),
            workers=workers,
            cache=cache,
            decode=decode,
            broken_images=filler.broken_images,
        )


def _sample_nbytes(layout: DatasetLayout) -> float:
    """Return the bytes of a sample, of ragged ones on average."""
    if not layout.is_ragged:
        return float(layout.row_nbytes)
    values = layout.num_samples if layout.spans is None else int(layout.spans[-1] - layout.spans[0])
    return layout.row_nbytes * values / max(1, layout.sample_count)


def _both_ways(one: str, other: str) -> str:
    return " and ".join(sorted({*one.split(" and "), *other.split(" and ")}))
