"""The core's queue: batches that are read without Python, and threads that wait for them.

Sample numbers, or what they are computed from, enter in the consumer's thread; rows leave in the
memory of slots, with the numbers. Python's threads wait and work in one call of the core, without
the GIL, and return only for work that needs Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.order.selection import Selection
from h5async.read.coretables import CoreTables
from h5async.read.scratch import Scratch
from h5async.system.resources import usable_cores

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]

# Results of `BatchQueue.next` and `BatchQueue.do_oldest` that are not a slot.
END, TICKET, NOTHING, READY = -1, -2, -3, -4
_SLOW_NS = 300_000  # HELPED_NS in core/src/queue.c
_ALONE = 1  # result of `submit`: no batch that was dropped is under way


@dataclass(eq=False, slots=True)
class SlotBatch:
    """The core's plan of a slot's batch, used again for each batch, and where its rows go.

    By field, `targets` are the slot's memory: `rows` rows of the `arrays` that they point to. What
    was fetched of far sources is `held` until the rows are read. `fields` are the core's; None:
    those of the tables.
    """

    plan: Any
    targets: Any
    rows: int
    arrays: Any
    held: Any = None
    fields: Any = None


class BatchQueue:
    """Batches to be read, at most one per slot. Safe to use from many threads.

    Its memory lasts as long as this object, and so as long as any call. `tables` are closed by
    their owner after the last call of `next`, which `num_threads` threads will call. `batches` are
    by slot; `selection` maps positions to sample numbers, and `drawn` is the alias table from which
    positions are drawn, if they are. Without tables, `next` returns with each batch at once, and
    `finish` says that another process has filled it.
    """

    def __init__(
        self,
        core: Core,
        tables: CoreTables | None,
        batches: Sequence[SlotBatch],
        num_threads: int,
        selection: Selection,
        drawn: NDArray[Any] | None = None,
    ) -> None:
        self._core = core
        self._keep: tuple[Any, ...] = tables, batches, selection.numbers, drawn
        self._jobs = (core.Job * len(batches))()
        self._struct = core.Queue(
            fields=None if tables is None else tables.fields,
            sources=None if tables is None else tables.sources,
            jobs=self._jobs,
            num_fields=0 if tables is None else len(tables.fields),
            num_samples=0 if tables is None else tables.num_samples,
            num_jobs=len(batches),
            num_threads=num_threads,
            selected=None if selection.numbers is None else address(selection.numbers),
            start=selection.start,
            step=selection.step,
            num_cores=usable_cores(),
            is_remote=tables is None,
            table=None if drawn is None else address(drawn),
            num_columns=0 if drawn is None else drawn.size,
        )
        self.struct = self._queue = ctypes.pointer(self._struct)
        self.num_slots = len(batches)
        core.open_queue(self._queue)
        self._samples: list[Int64s] = []  # by slot
        # By slot: the mappings that the core may use, and so what they refer to.
        self._mappings: list[list[Uint64s | None]] = [[] for _ in batches]
        self._mapping: Uint64s | None = None
        self._draw: Uint64s | None = None
        self._draw_at: int | None = None
        self._mapping_at: int | None = None  # its address, which is slow to get from NumPy
        for job, batch in zip(self._jobs, batches, strict=True):
            for target in batch.targets:
                target.is_wanted = True
            samples = np.empty(2 * batch.rows, np.int64)  # the batch's, and those of the next one
            job.plan, job.targets = ctypes.pointer(batch.plan), batch.targets
            job.samples, job.rows = address(samples), batch.rows
            self._samples.append(samples)

    # --- the consumer's calls ---------------------------------------------------------------------

    def submit(
        self,
        slot: int,
        serial: int,
        begin: int,
        count: int,
        mapping: Uint64s | None,
        samples: Int64s | None,
        draw: Uint64s | None,
        needs_python: bool,
    ) -> None:
        """Have a batch read. Never blocks; submitting it again has no effect.

        The slot's last batch is ready, or was dropped. The samples are those at `count` positions
        of the selection from `begin` on, at most the rows of the slot; `mapping`, from
        `Sampling.run_at`, maps the positions first, if given. Or they are `samples`, int64
        (count,), C-contiguous. For `draw` see `Collection.plan`. If it `needs_python`, a thread
        returns from `next` with it when its rows are read.
        """
        if mapping is not self._mapping:
            self._mapping_at = None if mapping is None else address(mapping)
            self._mapping = mapping
        if draw is not self._draw:
            self._draw_at = None if draw is None else address(draw)
            self._draw = draw
        given = None if samples is None else address(samples)
        taken = self._core.submit(
            self._queue,
            given,
            self._mapping_at,
            self._draw_at,
            begin,
            count,
            slot,
            serial,
            needs_python,
        )
        assert taken, f"slot {slot} is in use"
        mappings = self._mappings[slot]
        if mapping is not None or mappings:
            if taken == _ALONE:
                mappings.clear()
            mappings.append(mapping)

    def drop(self, slot: int, serial: int) -> bool:
        """Say that a batch is no longer wanted. Never blocks; extra calls are harmless.

        Returns whether another one may be submitted for the slot; it is read once work under way on
        this one has ended. False if a thread has returned from `next` with this one.
        """
        return bool(self._core.drop(self._queue, slot, serial))

    def ready(self, slot: int, serial: int, count: int) -> Int64s | None:
        """Return the sample numbers of a batch whose rows are all there.

        They are int64 (count,), a new array; None while it is read, or something is left to Python,
        and once the slot was given another batch.
        """
        samples = self._samples  # empty if the reader was closed meanwhile
        at = self._core.samples_at(self._queue, slot, serial)
        found = None if at < 0 or not samples else samples[slot][at : at + count].copy()
        # Another thread may have given it one meanwhile.
        return None if self._core.samples_at(self._queue, slot, serial) < 0 else found

    def events(self) -> int:
        """Return the number of events so far: batches that became ready, and calls of `wake`."""
        return int(self._core.events(self._queue))

    def wait(self, seen: int, seconds: float | None) -> bool:
        """Wait until `events` differs from `seen`, a signal comes, or time is over.

        Returns whether `events` differs.
        """
        if self._core.spin(self._queue, seen):
            return True
        timeout_ns = -1 if seconds is None else int(min(seconds, 1e9) * 1e9)
        return bool(self._core.wait(self._queue, seen, timeout_ns))

    def wake(self) -> None:
        """Wake the waiting thread. Never blocks."""
        self._core.wake(self._queue)

    # --- the threads' calls -----------------------------------------------------------------------

    def next(self, scratch: Scratch) -> int:
        """Read batches until there is work for Python.

        Returns `END`, `TICKET`, or the slot of a batch with work left.
        """
        worker = scratch.worker(self._core)
        found = int(self._core.next(self._queue, ctypes.byref(worker.struct), True))
        if found != END:
            worker.note_return()
        return found

    def do_oldest(self, scratch: Scratch) -> int:
        """Read the oldest batch of which some work is not begun by any thread.

        Returns `NOTHING` if there is none, `READY`, `END`, or the slot of a batch with work left.
        """
        worker = scratch.worker(self._core)
        return int(self._core.next(self._queue, ctypes.byref(worker.struct), False))

    def samples(self, slot: int, count: int) -> Int64s:
        """Return the sample numbers of a batch that `next` returned, as a new array (count,)."""
        at = self._core.samples_at(self._queue, slot, -1)
        return self._samples[slot][at : at + count].copy()

    def serial(self, slot: int) -> int:
        """Return the serial of the batch of a slot that `next` returned."""
        return int(self._core.serial_at(self._queue, slot))

    def is_dropping(self) -> bool:
        """Tell whether a batch that was dropped may still use its mapping."""
        return bool(self._core.is_dropping(self._queue))

    def finish(self, slot: int, serial: int, *, is_ready: bool) -> None:
        """Say that a batch that `next` returned is ready, or that Python has to do the rest."""
        self._core.finish(self._queue, slot, serial, is_ready)

    def is_planned(self, slot: int) -> bool:
        """Tell whether the batch that `next` returned was planned."""
        return bool(self._jobs[slot].is_planned)

    # --- the pool's calls -------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all batches; no thread is at work on any."""
        self._core.forget_jobs(self._queue)

    def close(self) -> None:
        """Release the memory of slots, and tables; no thread will ask for work any more."""
        self._keep, self._samples = (), []

    def put_ticket(self) -> None:
        """Have one thread return from `next`. Never blocks."""
        self._core.put_ticket(self._queue)

    def end(self) -> None:
        """Have all threads return from `next` as soon as they can, and wake the waiting thread."""
        self._core.end_queue(self._queue)

    def is_slow(self) -> bool:
        """Tell whether batches take threads so long that what the consumer does does not matter.

        So it is before the first ones are read.
        """
        return bool(self._struct.fill_ns > _SLOW_NS and not self._struct.is_remote)

    def plan_seconds(self) -> float:
        """Return the time spent on plans, summed up over all threads."""
        return int(self._struct.plan_ns) / 1e9
