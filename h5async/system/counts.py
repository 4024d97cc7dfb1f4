"""Counts what threads do, and the time of each stage of delivering a batch.

`h5async.observe.stats` explains the stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STAGES = ("plan", "read", "decode", "place", "transform", "postprocess", "upload")


@dataclass
class ThreadCounts:
    """Counts of one thread; only that thread writes them."""

    read_ns: int = 0
    decode_ns: int = 0
    place_ns: int = 0
    gil_wait_ns: int = 0
    read_nbytes: int = 0
    decoded_chunks: int = 0
    decoded_nbytes: int = 0
    h5py_decoded_nbytes: int = 0  # by HDF5, from chunks that only h5py reads

    def plus(self, other: ThreadCounts) -> ThreadCounts:
        """Return the sum of all counts."""
        return ThreadCounts(
            self.read_ns + other.read_ns,
            self.decode_ns + other.decode_ns,
            self.place_ns + other.place_ns,
            self.gil_wait_ns + other.gil_wait_ns,
            self.read_nbytes + other.read_nbytes,
            self.decoded_chunks + other.decoded_chunks,
            self.decoded_nbytes + other.decoded_nbytes,
            self.h5py_decoded_nbytes + other.h5py_decoded_nbytes,
        )

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Add the time that a block takes to a counter."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            setattr(self, counter, getattr(self, counter) + time.perf_counter_ns() - begin)


class StageTimes:
    """Times of stages, summed over threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, begin_ns: int) -> None:
        """Add the time since `begin_ns`, of `time.perf_counter_ns`, to a stage."""
        taken = time.perf_counter_ns() - begin_ns
        with self._lock:
            self._ns[stage] += taken

    def seconds(self) -> dict[str, float]:
        """Return the time of each stage, in thread seconds."""
        with self._lock:
            found = dict(self._ns)
        return {stage: ns / 1e9 for stage, ns in found.items()}
