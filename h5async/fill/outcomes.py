"""Defines a filler's answers, and the interface of all fillers.

Plain records, most of them picklable: helper processes use them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.order.requests import FillRequest
from h5async.system.counts import STAGES, ThreadCounts


class FillOutcome(NamedTuple):
    """The result of a request.

    Attributes
    ----------
    index
        int64 (n,): sample numbers of the batch.
    arrays
        The batch, in field order: views of n rows of the slot's `out`, or the result of
        `postprocess`, or, once uploaded, arrays on a device.
    error
        What went wrong, if anything; `arrays` are undefined then.
    is_resident
        Nothing was read, because the device has the rows.
    busy_seconds
        The time that threads spent on it, summed up.
    warnings
        Warnings for the consumer, each reported once.
    """

    index: NDArray[np.int64]  # type: ignore[assignment]  # (a tuple's method of that name)
    arrays: tuple[Any, ...]
    error: BaseException | None = None
    is_resident: bool = False
    busy_seconds: float = 0.0
    warnings: tuple[str, ...] = ()


class FillerStats(NamedTuple):
    """What a filler has done so far.

    `stage_seconds` has the stages that `counts` has not; `fallback_reads` are reads through h5py;
    `cache` says what is kept in memory, or why not; `broken_images` were replaced because they
    cannot be decoded.
    """

    stage_seconds: Mapping[str, float]
    counts: ThreadCounts
    fallback_reads: int
    cache: str
    broken_images: int = 0

    def plus(self, other: FillerStats) -> FillerStats:
        """Return the sum with another filler, which keeps the same in memory."""
        mine, others = self.stage_seconds, other.stage_seconds
        return FillerStats(
            {stage: mine[stage] + others[stage] for stage in STAGES},
            self.counts.plus(other.counts),
            self.fallback_reads + other.fallback_reads,
            self.cache,
            self.broken_images + other.broken_images,
        )


class SlotFiller(Protocol):
    """Fills slots, in threads of this process (`Filler`) or in helper processes.

    It is made with four functions that it calls in its threads: ``next_requests()`` returns, after
    `kick`, what is to be filled now; ``before_fill(slot)`` returns when the slot may be written to;
    ``on_done(request, outcome)`` takes the outcome of each request; ``on_crash(error)`` takes an
    error that belongs to no batch.
    """

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""

    def kick(self) -> None:
        """Have a worker ask for requests. Never blocks; extra calls are harmless."""

    def fill(self, request: FillRequest) -> None:
        """Fill a slot. Never blocks. Safe to call from any thread."""

    def run_next(self) -> bool:
        """Do the most urgent work in the calling thread; return False if there is none."""

    def abandon(self) -> bool:
        """Forget all work after an exception in `run_next`; return False if threads are at work."""

    def stats(self) -> FillerStats:
        """Return what was done so far."""

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Note that the device cache has the samples of the batch in a slot."""

    def stop(self, then: Callable[[], None]) -> None:
        """Drop all requests; after work under way has ended, release everything and call `then`.

        Never waits: the garbage collector may call it in any thread, which may hold a lock that a
        worker waits for. Extra calls are harmless, and complete what an exception interrupted.
        """

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until what `stop` requested is done; a worker does not wait for itself."""
