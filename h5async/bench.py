"""Measures how fast a reader delivers batches to a loop that does nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

from h5async.config import ReaderConfig
from h5async.reader import AsyncReader
from h5async.stats import ReaderStats

_LEAST_BATCHES = 3  # the first one is start-up


class Measurement(NamedTuple):
    """Options that were changed, and what a reader with them did."""

    changed: dict[str, Any]
    stats: ReaderStats

    @property
    def speed(self) -> float:
        """Decoded bytes a second, in GB/s."""
        stats = self.stats
        share = (stats.batches - 1) / max(1, stats.batches)
        return stats.nbytes * share / stats.elapsed_seconds / 1e9 if stats.elapsed_seconds else 0.0


def require_batches(reader: AsyncReader) -> None:
    """Refuse a reader that has nothing to read.

    Raises
    ------
    DatasetError
        If an epoch has no batch; the message says why.
    """
    if not len(reader):
        reader.fetch_data()


def run_flat_out(config: ReaderConfig, seconds: float, **changed: Any) -> Measurement:
    """Read batches for some seconds, epoch after epoch.

    Raises
    ------
    H5AsyncError
        What the reader raises.
    """
    with AsyncReader(config, **changed) as reader:
        end = perf_counter() + seconds
        batches = 0
        require_batches(reader)
        while perf_counter() < end or batches < _LEAST_BATCHES:
            for _ in reader:
                batches += 1
                if perf_counter() >= end and batches >= _LEAST_BATCHES:
                    break
        return Measurement(changed, reader.stats())


def alternatives(config: ReaderConfig) -> Iterator[dict[str, Any]]:
    """Yield options that may be faster: other orders, and other numbers of threads."""
    for shuffle in (False, "window", "full"):
        if shuffle != config.shuffle:
            yield {"shuffle": shuffle}
    threads = config.thread_count
    cores = os.cpu_count() or 1
    for count in sorted({max(1, threads // 2), 2 * max(1, threads), cores} - {threads}):
        yield {"num_threads": count}
