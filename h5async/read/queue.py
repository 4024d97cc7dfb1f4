"""The core's queue of batches to read without Python, and the threads that serve it.

The consumer's thread submits sample numbers, or the parameters that they are computed from; rows
leave in the memory of slots, along with the sample numbers. Python's threads wait and work inside
one call of the core, without the GIL, and return only for work that needs Python.

In a run of batches that are alike, the consumer submits and takes each batch in a single call of
the core, which borrows the state of the slot ring for the run (`Turns`, core/src/turns.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, counts_of
from h5async.order.sampling import Sampling
from h5async.order.selection import Selection
from h5async.read.coretables import CoreTables, Scratch
from h5async.system.resources import usable_cores
from h5async.system.timeline import ThreadCounts

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]
BatchNumbers = tuple[int, int, Uint64s | None, Int64s | None, Uint64s | None]  # see `submit`

# Results of `BatchQueue.next` and `BatchQueue.do_oldest` other than a slot.
END, TICKET, NOTHING, READY = -1, -2, -3, -4
_ALONE = 1  # result of `submit`: no dropped batch of the slot is still being read
MAX_WAITS, MAX_GIVEN, MAX_ENDS, MAX_STREAMS = 4096, 16, 257, 2  # as in core/src/turns.c


@dataclass(eq=False, slots=True, weakref_slot=True)
class SlotBatch:
    """A slot's plan in the core, reused for each of its batches, and the memory for their rows.

    `targets` describes the slot's memory by field, with room for `rows` rows; it points into
    `arrays`. `held` keeps the bytes fetched from far sources until the rows are read. `fields` are
    the core's; None: those of the tables. `offsets` has, for the first column of each ragged field,
    where the samples of a batch begin, (rows + 1,).
    """

    plan: Any
    targets: Any
    rows: int
    arrays: Any
    held: Any = None
    fields: Any = None
    offsets: dict[int, Int64s] = field(default_factory=dict)


class Reading(NamedTuple):
    """The addresses of a plan, its targets and a worker, and their owners.

    One thread at a time uses them to read samples immediately; see core/src/given.c.
    """

    plan: int
    targets: int
    worker: int
    batch: SlotBatch
    scratch: Scratch


class KeptSamples(NamedTuple):
    """Samples whose rows are kept in memory, which `tables` describes; None: on a GPU.

    Sample i in memory is the one at position i of `ascending`. `stamps` and `state` say which are
    present, as in `Residency`. Unless `reads_files`, batches with other samples are left to Python.
    """

    tables: CoreTables | None
    ascending: Selection
    stamps: NDArray[np.uint8]
    state: Int64s
    reads_files: bool

    def struct(self, core: Core) -> Any:
        """Return the core's structure, which refers to the arrays of this object."""
        ascending = self.ascending
        return core.KeptSamples(
            fields=None if self.tables is None else self.tables.fields,
            sources=None if self.tables is None else self.tables.sources,
            numbers=None if ascending.numbers is None else address(ascending.numbers),
            start=ascending.start,
            step=ascending.step,
            count=ascending.size,
            stamps=address(self.stamps),
            state=address(self.state),
        )


class BatchQueue:
    """Batches to be read, at most one per slot. Safe to use from many threads.

    The core's memory lives as long as this object, and so as long as any call. `tables` are closed
    by their owner after the last call of `next`; `num_threads` threads call it. `batches` has one
    entry per slot; `workers` is the core's list of the reader's workers; `selection` maps positions
    to sample numbers, and `drawn` is the alias table for drawing positions, if they are drawn.
    `kept` describes rows kept in memory, if any: batches that consist only of kept samples are read
    from there, and the rows of other batches are added. With `uploads`, from `Device.uploads`,
    batches are uploaded when filled, unless Python has work to do on them. Without tables, `next`
    returns with each batch immediately, and `finish` reports that another process has filled it.
    """

    def __init__(
        self,
        core: Core,
        tables: CoreTables | None,
        batches: Sequence[SlotBatch],
        num_threads: int,
        workers: ctypes.c_void_p,
        selection: Selection,
        drawn: NDArray[Any] | None = None,
        kept: KeptSamples | None = None,
        uploads: Any = None,
    ) -> None:
        self._core, self._workers = core, workers
        of_kept = None if kept is None else kept.struct(core)
        self._keep: tuple[Any, ...] = (
            tables,
            batches,
            selection.numbers,
            drawn,
            kept,
            of_kept,
            uploads,
        )
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
            workers=ctypes.addressof(workers),
            table=None if drawn is None else address(drawn),
            num_columns=0 if drawn is None else drawn.size,
            kept=None if of_kept is None else ctypes.pointer(of_kept),
            uploads=None if uploads is None else ctypes.pointer(uploads.struct),
            reads_files=kept is None or kept.reads_files,
        )
        self.struct = self._queue = ctypes.pointer(self._struct)
        self.num_slots = len(batches)
        core.open_queue(self._queue)
        # None of them blocks. They wake the waiting consumer; make one thread return from `next`;
        # make all threads return for good; forget all batches, when no thread works on any.
        names = "wake", "put_ticket", "end_queue", "forget_jobs"
        self.wake, self.put_ticket, self.end, self.forget = (
            partial(getattr(core, name), self._queue) for name in names
        )
        self._samples: list[Int64s] = []  # by slot
        # By slot: the mappings that the core may be using; they keep what they refer to alive.
        self._mappings: list[list[Uint64s | None]] = [[] for _ in batches]
        self._mapping: Uint64s | None = None
        self._draw: Uint64s | None = None
        self._draw_at: int | None = None
        self._mapping_at: int | None = None  # cached: NumPy is slow to return an address
        for job, batch in zip(self._jobs, batches, strict=True):
            for target in batch.targets:
                target.is_wanted = True
            # Sample numbers of the batch and of the next one, and the batch's places in `kept`.
            samples = np.empty(3 * batch.rows, np.int64)
            job.plan, job.targets = ctypes.pointer(batch.plan), batch.targets
            job.samples, job.rows = address(samples), batch.rows
            self._samples.append(samples)
            for column in () if tables is None else tables.ragged:
                batch.offsets[column] = np.zeros(batch.rows + 1, np.int64)
                batch.targets[column].offsets = address(batch.offsets[column])
        self.offsets = [batch.offsets for batch in batches]  # by slot

    # --- the consumer's calls ---------------------------------------------------------------------

    def submit(
        self,
        slot: int,
        serial: int,
        numbers: BatchNumbers,
        needs_python: bool,
        is_own: bool = False,
    ) -> None:
        """Have a batch read. Never blocks; submitting it again has no effect.

        The slot's previous batch must be ready or dropped. `numbers` are `begin`, `count`,
        `mapping`, `samples` and `draw`: the batch has the samples at `count` positions of the
        selection from `begin` on, at most the rows of the slot, after `mapping`, from
        `Sampling.run_at`, if given, has mapped the positions; or it has `samples`, int64 (count,),
        C-contiguous. For `draw` see `Collection.plan`. If it `needs_python`, a thread returns from
        `next` with it once its rows are read. `is_own`: the consumer will call `Turns.fill_own`, so
        no thread is woken for a cheap batch.
        """
        begin, count, mapping, samples, draw = numbers
        samples_of_slots = self._samples  # another thread may close the queue meanwhile
        if not samples_of_slots:
            return
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
            is_own,
        )
        assert taken, f"slot {slot} is in use"
        mappings = self._mappings[slot]
        if mapping is not None or mappings:
            if taken == _ALONE:
                mappings.clear()
            mappings.append(mapping)

    def drop(self, slot: int, serial: int) -> bool:
        """Drop a batch that is no longer wanted. Never blocks; extra calls are harmless.

        Returns whether another batch may be submitted for the slot; it is read when work under way
        on the dropped one has ended. False if a thread has returned from `next` with the batch.
        """
        return bool(self._core.drop(self._queue, slot, serial))

    def ready(self, slot: int, serial: int, count: int) -> Int64s | None:
        """Return the sample numbers of a batch that is ready: int64 (count,), a new array.

        None until then, also if work is left for Python, and once the slot has another batch.
        """
        samples = self._samples  # empty if the reader was closed meanwhile
        at = self._core.samples_at(self._queue, slot, serial)
        found = None if at < 0 or not samples else samples[slot][at : at + count].copy()
        # Another thread may have submitted the slot's next batch during the copy.
        return None if self._core.samples_at(self._queue, slot, serial) < 0 else found

    def events(self) -> int:
        """Return the number of events so far: batches that became ready, and calls of `wake`."""
        return int(self._core.events(self._queue))

    def wait(self, seen: int, seconds: float | None) -> bool:
        """Wait until `events` differs from `seen`, a signal arrives, or the time is up.

        Returns whether `events` differs.
        """
        if self._core.spin(self._queue, seen):
            return True
        timeout_ns = -1 if seconds is None else int(min(seconds, 1e9) * 1e9)
        return bool(self._core.wait(self._queue, seen, timeout_ns))

    # --- the threads' calls -----------------------------------------------------------------------

    def next(self, scratch: Scratch) -> int:
        """Read batches until there is work for Python.

        Returns `END`, `TICKET`, or the slot of a batch with work left for Python.
        """
        worker = scratch.worker(self._core)
        found = int(self._core.next(self._queue, ctypes.byref(worker.struct), True))
        if found != END:
            scratch.note_return()
        return found

    def do_oldest(self, scratch: Scratch) -> int:
        """Work on the oldest batch that has work no thread has begun.

        Returns `NOTHING` if there is none, `READY`, `END`, or a slot with work left for Python.
        """
        worker = scratch.worker(self._core)
        return int(self._core.next(self._queue, ctypes.byref(worker.struct), False))

    def samples(self, slot: int, count: int) -> Int64s:
        """Return the sample numbers of a batch that `next` returned, as a new array (count,)."""
        at = self._core.samples_at(self._queue, slot, -1)
        return self._samples[slot][at : at + count].copy()

    def serial(self, slot: int) -> int:
        """Return the serial of the batch in a slot that `next` returned."""
        return int(self._core.serial_at(self._queue, slot))

    def is_dropping(self) -> bool:
        """Tell whether a dropped batch may still be using its mapping."""
        return bool(self._core.is_dropping(self._queue))

    def finish(self, slot: int, serial: int, *, is_ready: bool) -> None:
        """Mark a batch that `next` returned as ready, or as left for Python to finish."""
        self._core.finish(self._queue, slot, serial, is_ready)

    def is_planned(self, slot: int) -> bool:
        """Tell whether the batch that `next` returned was planned."""
        return bool(self._jobs[slot].is_planned)

    def is_kept(self, slot: int) -> bool:
        """Tell whether the batch was planned to be read from rows kept in memory."""
        return bool(self._jobs[slot].is_kept)

    def generation(self, slot: int) -> int:
        """Return the generation of the kept rows (see `Residency`) when the batch was planned."""
        return int(self._jobs[slot].generation)

    # --- the pool's calls -------------------------------------------------------------------------

    def close(self) -> None:
        """Release the memory of slots, and tables. Threads must not ask for work any more."""
        self._keep, self._samples, self.offsets = (), [], []

    def note_workers(self, count: int) -> None:
        """Note that a thread came or left, leaving `count`. Not to be called concurrently."""
        self._struct.num_inside = count
        self._struct.num_changes += 1


# --- the consumer's turns -------------------------------------------------------------------------


class Numbers(NamedTuple):
    """The samples of an epoch's batches, up to serial `stop` (exclusive).

    The first batch begins at position `begin` of the selection, the last one `last_skip` positions
    after it, with `last_size` samples. `mapping` and `draw` are as for `BatchQueue.submit`. If
    `samples` is given, batches lie in it at the same distances.
    """

    stop: int
    begin: int
    last_skip: int
    last_size: int
    mapping: NDArray[np.uint64] | None = None
    samples: NDArray[np.int64] | None = None
    draw: NDArray[np.uint64] | None = None


class RunEpochs:
    """The batches of a run: `first` to `stop`, of `size` samples, over one or more epochs.

    They are numbered by the serials they would have if no samples were given after the run began.

    Each batch begins `stride` positions after the one before. The first epoch ends before
    `epoch_end`, and the others have `epoch_batches` batches; `more` epochs like the last of
    `epochs` follow it. The last epoch may be incomplete.
    """

    def __init__(
        self,
        first: int,
        epoch_end: int,
        sampling: Sampling,
        epochs: Sequence[Numbers],
        more: int = 0,
    ) -> None:
        self.first, self.epoch_end, self.epoch_batches = first, epoch_end, sampling.num_batches
        self.size, self.stride = sampling.batch_size, sampling.step_samples
        self.mappings = [one.mapping for one in epochs]
        self._keep = epochs
        # Rows are `RunEpoch` structures of core/src/turns.c.
        self.table = np.array([(*one[1:4], *_addresses(one)) for one in epochs], np.int64)
        self.stop = epochs[-1].stop + more * self.epoch_batches

    def end_of(self, epoch: int) -> int:
        """Return the serial after the last of an epoch, which counts from the first of the run."""
        return self.epoch_end + epoch * self.epoch_batches

    def epoch_beginning(self, serial: int) -> int | None:
        """Return the epoch of the run, after the first, that begins at `serial`; else None."""
        number, rest = divmod(serial - self.epoch_end, self.epoch_batches)
        return None if number < 0 or rest else number + 1


def _addresses(one: Numbers) -> Iterator[int]:
    for array in (one.samples, one.mapping, one.draw):
        yield 0 if array is None else address(array)


def _given_of(struct: Any, arrays: Sequence[Any]) -> tuple[int, dict[int, Int64s]]:
    """Return the number of finished batches of given samples, and the others' samples by serial."""
    begin, of = struct.given_begin, struct.given
    if struct.held >= 0 and of[3 * ((begin - 1) % MAX_GIVEN)] == struct.held:
        begin -= 1
    numbers = [number % MAX_GIVEN for number in range(begin, struct.given_end)]
    return begin, {of[3 * at] or 0: arrays[at] for at in numbers}


class Taken(NamedTuple):
    """Counts of batches taken in the core, of their samples and the waits for them, and a time.

    `at_ns` is the end of the last wait, or the beginning of the next one, by the core's clock.
    """

    batches: int = 0
    samples: int = 0
    waits: int = 0
    wait_ns: int = 0
    at_ns: int = 0
    num_rows: Sequence[int] = ()  # of ragged fields, by column


class TakenEpoch(NamedTuple):
    """The counts before and at the end of an epoch, and the workers' counts at its end.

    `epoch` is its number, and `batches` its number of batches.
    """

    begin: Taken
    end: Taken
    done: ThreadCounts
    epoch: int
    batches: int


class Run(Protocol):
    """Batches that are alike, over one or more epochs, from batch `number` of `epoch` on."""

    epoch: int
    number: int

    @property
    def epochs(self) -> RunEpochs:
        """The samples of the batches."""

    def course_after(self, gone: int, given: dict[int, Int64s]) -> Any:
        """Return the course after `gone` batches of given samples, with `given` still to come."""

    @property
    def views(self) -> tuple[tuple[str, ...] | None, tuple[tuple[Any, ...], ...], slice]:
        """Names of fields, their `FieldKind.views` by slot, and the slice for whole batches.

        Names are None if Python has to make the arrays.
        """


class Turns:
    """The consumer's turns in the core: each hands one batch back and takes the next.

    The core makes batches of type `batch` without calling `__init__`. It sets `_made` to views, or
    to None if fields are ragged or Python makes them; `_later` to the run, slot, serial, and number
    in the run (-1 for given samples); `size`; and `index` for given samples. `scratch` is the
    consumer's. Given samples are below `num_samples`, and `draw` is for them, as in
    `BatchQueue.submit`. `is_alone`: no other thread fills batches; `is_ragged`: some fields are.

    These functions return whether they succeeded. If not, also because the state is not lent, the
    slot ring takes over.

    - `take` appends the next batch to a list. With a second argument, it hardly waits. Where
      batches are uploaded, that argument says whether it waits, and the caller's streams follow.
    - `put_back` undoes `take`.
    - `ask` requests a batch; it returns 2 if that is the last of its epoch.
    - `give` requests a batch of samples, a new array; fails unless these are int64 below
      `num_samples`.
    - `fill_own` fills a batch, by serial, that was submitted as the consumer's own, if it is cheap
      and the state is not lent.
    - `read` returns a lasting batch of samples as for `give`, read in the calling thread, which may
      be any; False if it fails.
    - `deliver` returns the views of the batch with a serial and size; None if that is not in use,
      or Python makes them.

    `on_epoch` is called after the last batch of an epoch was taken, if the epoch had many waits, or
    Python may have counted something meanwhile. It must count the end in `num_ends`; the core
    counts other ends itself. While the state is lent, `next_in_run` of `struct` is the number in
    the run of the next batch, or negative if its samples are given.
    """

    def __init__(
        self,
        core: Core,
        queue: BatchQueue,
        scratch: Scratch,
        batch: type,
        num_samples: int,
        draw: Uint64s | None = None,
        *,
        is_alone: bool,
        is_ragged: bool = False,
    ) -> None:
        self._core = core
        self._memory = bytearray(ctypes.sizeof(core.Turns))
        self.struct = core.Turns.from_buffer(self._memory)
        self.take: Callable[..., bool]
        self.ask: Callable[[], int]
        self.give: Callable[[Any], bool]
        self.put_back: Callable[[], bool]
        self.fill_own: Callable[[int], bool]
        self.read: Callable[[Any], Any]
        self.deliver: Callable[[int, int], dict[str, Any] | None]
        self.take, self.ask, self.give, self.put_back, *rest = core.turns_of(self._memory)
        self.fill_own, self.read, self.deliver = rest
        self._slots = np.zeros(queue.num_slots, np.int64)
        self._waits_ns = np.zeros(MAX_WAITS, np.int64)
        self._ends = (core.EpochEnd * MAX_ENDS)()
        # By column: the rows of all taken batches, if it is ragged, now and before the epoch; then
        # the same for each of `_ends`.
        fields, most = queue.struct.contents.num_fields, 1 + MAX_ENDS if is_ragged else 1
        self._num_rows = np.zeros((most, 2, fields), np.int64)
        self._seen = 0  # waits that `new_waits` has returned
        self._on_left: Callable[[], object] | None = None
        self._given: list[Any] = [None] * MAX_GIVEN  # arrays of sample numbers
        self._keep = batch, "_made", "_later", "size", "index", self._given
        self._queue, self._scratch = queue, [scratch]
        # Mappings that the core may be using, each with the serial after its last batch.
        self._mappings: list[tuple[int, Sequence[Any]]] = []
        self.run: Any = None  # the one lent to the core
        struct = self.struct
        struct.queue, struct.worker = queue.struct, ctypes.pointer(scratch.worker(core).struct)
        struct.num_slots, struct.slot_of = queue.num_slots, address(self._slots)
        struct.waits_ns, struct.is_alone = address(self._waits_ns), is_alone
        struct.num_rows = address(self._num_rows) if is_ragged else None
        struct.ends = ctypes.addressof(self._ends)
        struct.type, struct.made, struct.later, struct.size = map(id, self._keep[:4])
        struct.index, struct.samples = map(id, self._keep[4:])
        struct.held, struct.num_samples = -1, num_samples
        struct.draw, self._draw = None if draw is None else address(draw), draw
        struct.is_open = True

    def may_read(
        self, fields: tuple[tuple[Any, ...], ...], spare: list[Reading], lasting: Any
    ) -> None:
        """Enable `read`; `lasting` completes its batches, as a run does.

        `fields` has for each field its name, the shape and dtype of its rows, and those of the rows
        as read, if different. Each call uses one of `spare`, and fails if none is left.
        """
        struct, self._keep_to_read = self.struct, (fields, spare, (lasting,))
        struct.fields, struct.spare, struct.lasting = map(id, self._keep_to_read)
        struct.array = id(np.ndarray)

    def on_epoch(self, function: Callable[[], object] | None, is_in_epoch: bool) -> None:
        """Set the function to call when an epoch ends, and whether one has begun; while lent."""
        self._on_epoch, self.struct.on_epoch = function, id(function)
        self.struct.is_in_epoch = is_in_epoch

    @property
    def is_lent(self) -> bool:
        """Whether the ring's state is lent to the core."""
        return bool(self.struct.is_lent)

    @property
    def taken(self) -> int:
        """The number of batches that `take` has returned so far."""
        return int(self.struct.taken.batches)

    @property
    def num_waits(self) -> int:
        """The number of waits for the batches that `take` has returned so far."""
        return int(self.struct.taken.waits)

    def lend(
        self,
        run: Run,
        wanted: tuple[int, int, int | None, bool, bool],
        slots: Mapping[int, int],
        given: Mapping[int, Int64s],
    ) -> None:
        """Lend the core the ring's state: `wanted` is next, asked, held, reads ahead, and loops.

        `slots` has the slots of all batches that have one, by consecutive serials; `given` has the
        samples of batches of given samples, by serial, from the held batch on.
        """
        struct, count = self.struct, self._slots.size
        at_slot = {serial % count: slot for serial, slot in slots.items()}
        free = iter({*range(count)}.difference(at_slot.values()))
        self._slots[:] = [at_slot[at] if at in at_slot else next(free) for at in range(count)]
        following, asked, held, struct.reads_ahead, struct.loops = wanted
        struct.next, struct.asked, struct.held = following, asked, -1 if held is None else held
        struct.assigned = max(slots, default=following - 1) + 1
        struct.next_in_run = -1 if following in given else following
        struct.given_begin, struct.given_end = 0, len(given) - (held in given)
        struct.given[3 * MAX_GIVEN - 3] = -1  # the one before the first: no held one
        for number, (serial, samples) in enumerate(given.items(), -(held in given)):
            at = number % MAX_GIVEN
            self._given[at] = samples
            struct.given[3 * at : 3 * at + 3] = serial, samples.size, address(samples)
        epochs = run.epochs
        struct.first, struct.stop, struct.epochs = epochs.first, epochs.stop, address(epochs.table)
        struct.stride, struct.count = epochs.stride, epochs.size
        struct.epoch_end, struct.epoch_batches = epochs.epoch_end, epochs.epoch_batches
        struct.num_epochs = len(epochs.table)
        if not self._queue.is_dropping():
            self._mappings = [kept for kept in self._mappings if kept[0] > following]
        self._mappings.append((epochs.stop, epochs.mappings))
        struct.epoch, struct.number, struct.changes = run.epoch, run.number, -1
        struct.names, struct.arrays, struct.part = map(id, run.views)
        if run.views[0] is None:
            struct.names = None
        struct.run = id(run)
        self.run, struct.is_lent = run, True  # no signal handler runs in between

    def state(self) -> tuple[int, int, int | None, Any] | None:
        """Return the consumer's next, asked and held, and the course; None if not lent."""
        run = self.run
        if run is None:
            return None
        struct = self._core.Turns.from_buffer_copy(self._memory)  # a consistent copy
        course = run.course_after(*_given_of(struct, self._given))
        return struct.next, struct.asked, None if struct.held < 0 else struct.held, course

    def slots(self) -> dict[int, int]:
        """Return the slots of all batches that have one, by serial."""
        struct, slots = self.struct, self._slots.tolist()
        low = struct.next if struct.held < 0 else struct.held
        return {serial: slots[serial % len(slots)] for serial in range(low, struct.assigned)}

    def end(self) -> None:
        """Take the state back."""
        if self._mappings:
            self._mappings[-1] = self.struct.assigned, self._mappings[-1][1]
        self.struct.is_lent = False
        self.run = None
        self.on_epoch(None, False)

    def shut(self) -> None:
        """Take the state back for good."""
        self.struct.is_open = False
        self.end()

    def close(self) -> None:
        """Release memory, after `shut`, when no thread is in the core."""
        self._scratch.clear()

    def is_inside(self) -> bool:
        """Tell whether a thread is in `take` without the GIL."""
        return bool(self.struct.is_inside)

    def stop_waiting(self) -> None:
        """Make `take` return without waiting from now on."""
        self.struct.waits_not = True

    def when_left(self, function: Callable[[], object]) -> bool:
        """Have a function called when the last thread has left the core, after `shut`.

        Returns False, and does not call it, if no thread is in the core.
        """
        is_any = bool(self.struct.is_inside or self.struct.num_reading)
        if is_any:
            self._on_left, self.struct.on_left = function, id(function)
        return is_any

    def new_waits(self) -> list[float]:
        """Return the waits since the last call, in seconds: at most the last `MAX_WAITS`."""
        struct, seen = self.struct, self._seen
        self._seen = struct.taken.waits
        each = range(max(seen, self._seen - MAX_WAITS), self._seen)
        return [int(self._waits_ns[wait % MAX_WAITS]) / 1e9 for wait in each]

    def counts(self, *, before_epoch: bool = False) -> Taken:
        """Return the counts so far, or those before the last epoch that began here."""
        struct = self.struct.before if before_epoch else self.struct.taken
        copied = self._core.Taken.from_buffer_copy(struct)  # a consistent copy
        return _taken(copied, self._num_rows[0, int(before_epoch)])

    def ended(self, number: int) -> TakenEpoch:
        """Return one of the last `MAX_ENDS` epochs that ended here, by its number among all."""
        at = number % MAX_ENDS
        end = self._core.EpochEnd.from_buffer_copy(self._ends[at])  # a consistent copy
        taken, before = self._num_rows[(1 + at) % len(self._num_rows)]
        moments = _taken(end.begin, before), _taken(end.end, taken)
        return TakenEpoch(*moments, counts_of(end.done), end.epoch, end.count)

    def seconds(self, ns: int) -> float:
        """Convert a time of the core's clock to `time.perf_counter`."""
        return (ns + self._core.clock_offset_ns()) / 1e9


def _taken(struct: Any, num_rows: Int64s) -> Taken:
    numbers = map(struct.__getattribute__, Taken._fields[:-1])
    return Taken._make((*numbers, num_rows.tolist()))
