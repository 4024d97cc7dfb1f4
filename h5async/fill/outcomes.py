"""Defines what fillers share with their owner: slots, callbacks, outcomes, statistics, recordings.

There are two fillers: `Filler` in this process, and `HelperFiller` in helper processes. All that
they return is picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Collection as Names
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from h5async.errors import Skipped
from h5async.fill.pool import do_nothing
from h5async.fill.resident import Residency
from h5async.io.shared import plain_memory
from h5async.order.sampling import FillRequest
from h5async.plan.records import Int64s, Ranges
from h5async.read.collection import Collection
from h5async.read.farsources import FetchCounts
from h5async.read.queue import SlotBatch
from h5async.samples.assembly import SlotMemory
from h5async.system.timeline import (
    STAGES,
    Event,
    ThreadCounts,
    ThreadName,
)

# Plans, by column, the ranges to read for a device instead of a batch's rows. The collection and
# the batch are for planning rows if necessary.
PlanColumns = Callable[[Collection, SlotBatch, FillRequest, Int64s], Mapping[int, Ranges]]


@dataclass(eq=False)
class Slots:
    """The slots that a filler fills: the `memory` of each, with room for `rows` samples.

    `memory` is empty once the filler has stopped, as the caller may still hold a batch.
    `new_memory` returns host memory for pixels, from which a device uploads. If slots
    `are_writable` at any time, `before_fill` need not be called, nor `on_done` for batches that the
    core fills alone; nor for those it also uploads by `uploads`, to the arrays `delivered`.
    `has_queue`: the owner submits batches to the core's queue.
    """

    memory: Sequence[SlotMemory]
    rows: int
    new_memory: Callable[[int], NDArray[np.uint8]] = plain_memory
    are_writable: bool = False
    has_queue: bool = False
    uploads: Any = None
    delivered: Sequence[SlotMemory] = ()


class OnDevice(NamedTuple):
    """The work that a device does instead of the filler.

    It assembles the fields `left`; `plan_columns` plans the ranges that are read for it instead of
    rows; the samples in its `cache` need not be read again.
    """

    left: Names[str] = ()
    plan_columns: PlanColumns | None = None
    cache: Residency | None = None


class Calls(NamedTuple):
    """Callbacks of the owner of slots, which a filler calls in its threads.

    `next_requests`, called after `kick`, returns the requests to fill now; `before_fill` returns
    once a slot may be written to; `on_done` takes the outcome of each request, once, unless the
    filler is closed first; `on_crash` takes an error that belongs to no batch.
    """

    next_requests: Callable[[], Sequence[FillRequest]]
    before_fill: Callable[[int], None]
    on_done: Callable[[FillRequest, FillOutcome], None]
    on_crash: Callable[[BaseException], None]


NO_CALLS = Calls(list, do_nothing, do_nothing, do_nothing)  # once the filler has stopped


class FillOutcome(NamedTuple):
    """The result of a request: the sample numbers of a batch, int64 (n,), and its arrays.

    The arrays are, in field order, views of n rows of the slot's `out`, or the result of
    `postprocess`, or, once uploaded, arrays on a device. After an `error` they are undefined.
    """

    index: NDArray[np.int64]  # type: ignore[assignment]  # (a tuple's method of that name)
    arrays: tuple[Any, ...]
    error: BaseException | None = None
    is_resident: bool = False  # nothing was read, because the device has the rows
    busy_seconds: float = 0.0  # the time spent on it, summed over threads
    warnings: tuple[str, ...] = ()  # for the consumer, each reported once
    names: tuple[str, ...] = ()  # of the arrays, if they are not those of the fields
    skipped: tuple[Skipped, ...] = ()  # damaged samples that were left out


# Adds the work in the core to the work outside it, as of when this function was made.
Done: TypeAlias = Callable[[ThreadCounts], "FillerStats"]
Answers: TypeAlias = list[tuple[int, FillOutcome] | None]  # by slot, with serials


class FillerStats(NamedTuple):
    """The work of a filler so far.

    `stage_seconds` has the stages that are not in `counts`; `fallback_reads` went through h5py;
    `cache` says what is kept in memory, or why nothing is; `broken_images` were replaced; `fetched`
    counts bytes, requests and times of far sources.
    """

    stage_seconds: Mapping[str, float] = dict.fromkeys(STAGES, 0.0)
    counts: ThreadCounts = ThreadCounts()
    fallback_reads: int = 0
    cache: str = "none"
    broken_images: int = 0
    fetched: FetchCounts = FetchCounts()

    def plus(self, other: FillerStats, times: int = 1) -> FillerStats:
        """Return the sum with `times` times the work of another filler; `cache` is this one's."""
        mine, others = self.stage_seconds, other.stage_seconds
        return FillerStats(
            {stage: max(0.0, mine[stage] + times * others[stage]) for stage in STAGES},
            self.counts.plus(other.counts, times),
            self.fallback_reads + times * other.fallback_reads,
            self.cache,
            self.broken_images + times * other.broken_images,
            self.fetched.plus(other.fetched, times),
        )


def stats_of(
    stage_ns: Mapping[str, int],
    of_threads: Sequence[tuple[int, ...]],
    fallback_reads: int,
    broken_images: int,
    fetched: FetchCounts,
    in_core: ThreadCounts,
) -> FillerStats:
    """Return the sum of the stages, of the work of each thread in Python, and that in the core."""
    seconds = {stage: ns / 1e9 for stage, ns in stage_ns.items()}
    counts = ThreadCounts(*map(sum, zip(vars(in_core).values(), *of_threads, strict=True)))
    return FillerStats(seconds, counts, fallback_reads, "", broken_images, fetched)


class Recorded(NamedTuple):
    """The recording of one process, with its process ID.

    `threads` are by `threading.get_ident` there; `events` have the names of fields and sources;
    `dropped` is the number of events that were not kept.
    """

    process: int
    threads: dict[int, ThreadName]
    events: list[Event]
    dropped: int
