"""Makes the statistics of a reader.

What was delivered and the counts of the filler enter; `ReaderStats` leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h5async.fill.records import FillerStats
from h5async.index.cost import direct_share
from h5async.index.layout import DatasetLayout
from h5async.stats import ReaderStats, StageTimes, Waits


class ReaderCounts:
    """What was delivered, and how long the consumer waited for it.

    Parameters
    ----------
    layouts
        Layouts of all fields, by name.

    Attributes
    ----------
    waits
        The consumer's waits, which its thread notes.
    upload_times
        Time of uploads, of all threads.
    samples
        Samples that were delivered.
    """

    def __init__(self, layouts: Mapping[str, DatasetLayout]) -> None:
        self._layouts = layouts
        self.waits = Waits()
        self.upload_times = StageTimes()
        self.samples = 0
        self._warned: set[str] = set()

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
        workers: str,
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
        stages = dict(filler.stage_seconds)
        stages["upload"] += self.upload_times.seconds()["upload"]
        stages["read"] += counts.read_ns / 1e9
        stages["decode"] += counts.decode_ns / 1e9
        stages["place"] += counts.place_ns / 1e9
        row_nbytes = sum(layout.row_nbytes for layout in layouts)
        direct = sum(layout.row_nbytes * direct_share(layout) for layout in layouts)
        names = [f.label for layout in layouts for leaf in layout.leaves() for f in leaf.filters]
        return ReaderStats(
            batches=waits.count,
            samples=self.samples,
            nbytes=self.samples * row_nbytes,
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
            ways=dict(zip(self._layouts, methods, strict=True)),
            num_threads=num_threads,
            filters=tuple(dict.fromkeys(names)),
            workers=workers,
            cache=cache,
            decode=decode,
            broken_images=filler.broken_images,
        )
