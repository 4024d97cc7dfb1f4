"""Collects times and counts while a reader works, and says in a sentence what holds it up.

A stage is one step of delivering a batch, in the threads of the pool: plan, read, decode, place
(copying samples from decoded chunks into the batch), transform, postprocess, upload. The consumer's
own time is what it spends in `get_next_batch()`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

STAGES = ("plan", "read", "decode", "place", "transform", "postprocess", "upload")

_KEPT_WAITS = 4096
_DATA_BOUND = 0.02  # share of its time that a loop may wait without being held up by the data
_STARVED = 0.25  # share of the threads' time that they may spend waiting for the GIL
_WORK = {  # what a stage is called in the sentence
    "plan": "planning",
    "read": "reading",
    "decode": "decoding",
    "place": "copying samples out of chunks",
    "transform": "permuting, casting and scaling",
    "postprocess": "postprocess",
    "upload": "uploading",
}


@dataclass
class ThreadCounts:
    """What one thread did; written by that thread only."""

    read_ns: int = 0
    decode_ns: int = 0
    place_ns: int = 0
    gil_wait_ns: int = 0
    read_nbytes: int = 0
    decoded_chunks: int = 0

    def plus(self, other: ThreadCounts) -> ThreadCounts:
        """Return the sums of all counts."""
        return ThreadCounts(
            self.read_ns + other.read_ns,
            self.decode_ns + other.decode_ns,
            self.place_ns + other.place_ns,
            self.gil_wait_ns + other.gil_wait_ns,
            self.read_nbytes + other.read_nbytes,
            self.decoded_chunks + other.decoded_chunks,
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


class Waits:
    """How long the consumer waited for each batch; used by the consumer's thread only."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_KEPT_WAITS)
        self.count = 0
        self.seconds = 0.0
        self._begin: float | None = None
        self._end = 0.0

    def note(self, begin: float, end: float) -> None:
        """Note one wait, in seconds of `time.perf_counter`; the first is left out, as start-up."""
        self.count += 1
        self._end = end
        if self._begin is None:
            self._begin = end
            return
        self._last.append(end - begin)
        self.seconds += end - begin

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from the first batch to the last."""
        return 0.0 if self._begin is None else self._end - self._begin

    def percentile(self, percent: float) -> float:
        """Return a percentile of the last waits, in seconds."""
        return float(np.percentile(list(self._last), percent)) if self._last else 0.0


@dataclass(frozen=True)
class ReaderStats:
    """What a reader has done so far; ``str()`` gives a sentence that says what to change.

    Attributes
    ----------
    batches, samples, nbytes
        How much was delivered; `nbytes` counts in the dtypes of the file.
    elapsed_seconds
        Time between the first batch and the last one that was delivered.
    wait_seconds, wait_p50_seconds, wait_p99_seconds
        Time that the consumer waited for batches since the first one: the sum, and the median and
        99th percentile of the last 4,096 waits.
    stage_seconds
        Time that threads spent in each stage (plan, read, decode, place, transform, postprocess,
        upload), for all batches that were filled. Where h5py reads a dataset, all of it counts as
        ``"read"``.
    gil_wait_seconds
        Time that threads waited for the GIL after calls of the compiled core; no stage contains it.
    read_nbytes, decoded_chunks
        Encoded bytes that were read, and chunks that were decoded.
    fallback_reads
        Reads that went through h5py, one for each batch of each field that needs it.
    direct_share
        Share of the bytes of a sample that are read without h5py.
    ways
        How each field is read: ``"core"``, ``"python"``, ``"h5py"``, ``"memory"``, or several of
        them for several files.
    cache
        Where rows are kept for later epochs, and how many; or why they are not.
    decode
        Where chunks are decoded, ``"host"`` or ``"device"``, and why.
    num_threads
        Threads of the pool; 0: the consumer's thread does the work.
    filters
        Names of the filters of all fields.
    broken_images
        Images that were replaced because they cannot be decoded; see `ImageField`.
    workers
        As the option says it: which processes the threads, and their GIL, belong to.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
    ...     for data, labels in reader:
    ...         pass
    ...     stats = reader.stats()
    >>> stats.samples, stats.fallback_reads, stats.direct_share
    (1797, 0, 1.0)
    >>> sorted(stats.stage_seconds)
    ['decode', 'place', 'plan', 'postprocess', 'read', 'transform', 'upload']
    """

    batches: int
    samples: int
    nbytes: int
    elapsed_seconds: float
    wait_seconds: float
    wait_p50_seconds: float
    wait_p99_seconds: float
    stage_seconds: Mapping[str, float]
    gil_wait_seconds: float
    read_nbytes: int
    decoded_chunks: int
    fallback_reads: int
    direct_share: float
    ways: Mapping[str, str]
    num_threads: int
    filters: Sequence[str] = field(default=())
    workers: str | int = "thread"
    cache: str = "none"
    decode: str = "host"
    broken_images: int = 0

    @property
    def waited_share(self) -> float:
        """Share of its time that the consumer waited."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def busy_seconds(self) -> float:
        """Time that all threads worked."""
        return sum(self.stage_seconds.values())

    @property
    def headroom(self) -> float:
        """How many times faster the reader could deliver than the consumer takes batches."""
        if self.batches < 2 or not self.busy_seconds:
            return 1.0
        interval = self.elapsed_seconds / (self.batches - 1)
        return interval * max(1, self.num_threads) / (self.busy_seconds / self.batches)

    @property
    def limit(self) -> str:
        """The stage that takes most time of the threads."""
        return max(self.stage_seconds, key=lambda stage: self.stage_seconds[stage])

    def __str__(self) -> str:
        """Say whether the loop waits for data, and what to do."""
        if self.batches < 2 or not self.busy_seconds:
            return "nothing to tell yet: fewer than two batches were delivered"
        percent = 100 * self.waited_share
        waited = f"waited {percent:.{0 if percent >= 10 else 1}f} % of the time"
        if self.waited_share < _DATA_BOUND:
            return f"not data-bound: {waited}; the reader could give {self._headroom()}"
        starved = self.gil_wait_seconds / (self.gil_wait_seconds + self.busy_seconds)
        if starved > _STARVED and self.headroom > 1 and self.workers == "thread":
            return (
                f"data-bound: {waited}; the reader's threads spent {100 * starved:.0f} % of their"
                " time waiting for the GIL: the loop holds it; call less Python in it, or make"
                " batches larger"
            )
        return f"data-bound: {waited}; the limit is {self._limit()}"

    def _headroom(self) -> str:
        return f"{self.headroom:.1f}x what the loop takes"

    def _limit(self) -> str:
        stage, threads = self.limit, max(1, self.num_threads)
        work = _WORK[stage]
        if stage == "decode" and self.filters:
            work = f"{'+'.join(self.filters)} decoding"
        elif stage == "read" and self.direct_share < 1:
            work = "reading through h5py"
        seconds = self.stage_seconds[stage] / threads
        speed = self.nbytes / seconds / 1e9 if seconds else 0.0
        on = f"{threads} thread{'s' * (threads > 1)}"
        return f"{work}, {speed:.2g} GB/s on {on}"
