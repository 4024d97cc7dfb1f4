"""Counts what threads do, and the time that each stage of delivering a batch takes.

A stage is one step of delivering a batch, in the threads of the pool: plan, read, decode, place
(copying samples from decoded chunks into the batch), transform, postprocess, upload.
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
    """What one thread did; written by that thread only."""

    read_ns: int = 0
    decode_ns: int = 0
    place_ns: int = 0
    gil_wait_ns: int = 0
    read_nbytes: int = 0
    decoded_chunks: int = 0
    decoded_nbytes: int = 0
    h5py_decoded_nbytes: int = 0  # what HDF5 decodes of chunks that only h5py reads

    def plus(self, other: ThreadCounts) -> ThreadCounts:
        """Return the sums of all counts."""
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
    """Times of the stages that are not counted for each thread. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, begin_ns: int) -> None:
        """Add the time since `begin_ns`, of `time.perf_counter_ns`, to a stage."""
        taken = time.perf_counter_ns() - begin_ns
        with self._lock:
            self._ns[stage] += taken

    def seconds(self) -> dict[str, float]:
        """Return the time of each stage, in seconds of threads."""
        with self._lock:
            found = dict(self._ns)
        return {stage: ns / 1e9 for stage, ns in found.items()}
