"""The core's queue: batches that are read without Python, and threads that wait for them.

Sample numbers, or what they are computed from, enter in the consumer's thread; rows leave in the
memory of slots, with the numbers. Python's threads wait and work in one call of the core, without
the GIL, and return only for work that needs Python.

Of batches that are alike, the consumer submits and takes each in one call of the core, to which the
state of the ring of slots is lent meanwhile (`Turns`, core/src/turns.c).
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

# Results of `BatchQueue.next` and `BatchQueue.do_oldest` that are not a slot.
END, TICKET, NOTHING, READY = -1, -2, -3, -4
_ALONE = 1  # result of `submit`: no batch that was dropped is under way
MAX_WAITS, MAX_GIVEN, MAX_ENDS, MAX_STREAMS = 4096, 16, 257, 2  # as in core/src/turns.c


@dataclass(eq=False, slots=True, weakref_slot=True)
class SlotBatch:
    """The core's plan of a slot's batch, used again for each batch, and where its rows go.

    By field, `targets` are the slot's memory: `rows` rows of the `arrays` that they point to. What
    was fetched of far sources is `held` until the rows are read. `fields` are the core's; None:
    those of the tables. `offsets` are where the samples of a batch begin, (rows + 1,), by the first
    column that has them.
    """

    plan: Any
    targets: Any
    rows: int
    arrays: Any
    held: Any = None
    fields: Any = None
    offsets: dict[int, Int64s] = field(default_factory=dict)


class Reading(NamedTuple):
    """What one thread reads samples with at once: a plan, its targets, a worker, and their owners.

    The first ones are addresses. See core/src/given.c.
    """

    plan: int
    targets: int
    worker: int
    batch: SlotBatch
    scratch: Scratch


class KeptSamples(NamedTuple):
    """The samples whose rows are kept in memory, of which `tables` are; None: a GPU has them.

    Sample i there is that at position i of `ascending`. `stamps` and `state` say which of them are
    there, as in `Residency`. Unless the core `reads_files`, Python reads batches of others.
    """

    tables: CoreTables | None
    ascending: Selection
    stamps: NDArray[np.uint8]
    state: Int64s
    reads_files: bool

    def struct(self, core: Core) -> Any:
        """Return it as the core takes it, which this has to outlive."""
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

    Its memory lasts as long as this object, and so as long as any call. `tables` are closed by
    their owner after the last call of `next`, which `num_threads` threads will call. `batches` are
    by slot; `workers` is the core's list of those that work for the reader; `selection` maps
    positions to sample numbers, and `drawn` is the alias table from which positions are drawn, if
    they are. `kept` are samples whose rows are kept in memory, if they are: batches that have no
    others are read there, and those of others added. With `uploads`, by `Device.uploads`, batches
    are uploaded when they are filled, if Python has to do nothing of them. Without tables, `next`
    returns with each batch at once, and `finish` says that another process has filled it.
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
        # Never block: wake the waiting thread; have one thread return from `next`, or all of them
        # for good; and forget all batches, if no thread is at work on any.
        names = "wake", "put_ticket", "end_queue", "forget_jobs"
        self.wake, self.put_ticket, self.end, self.forget = (
            partial(getattr(core, name), self._queue) for name in names
        )
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
            # The batch's, those of the next one, and where the batch's are kept.
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

        The slot's last batch is ready, or was dropped. `numbers` are `begin`, `count`, `mapping`,
        `samples` and `draw`: the samples are those at `count` positions of the selection from
        `begin` on, at most the rows of the slot; `mapping`, from `Sampling.run_at`, maps the
        positions first, if given. Or they are `samples`, int64 (count,), C-contiguous. For `draw`
        see `Collection.plan`. If it `needs_python`, a thread
        returns from `next` with it when its rows are read. `is_own`: the consumer will call
        `Turns.fill_own`, so that no thread is woken for it if it is cheap.
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

    # --- the threads' calls -----------------------------------------------------------------------

    def next(self, scratch: Scratch) -> int:
        """Read batches until there is work for Python.

        Returns `END`, `TICKET`, or the slot of a batch with work left.
        """
        worker = scratch.worker(self._core)
        found = int(self._core.next(self._queue, ctypes.byref(worker.struct), True))
        if found != END:
            scratch.note_return()
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

    def is_kept(self, slot: int) -> bool:
        """Tell whether it was planned to be read of memory."""
        return bool(self._jobs[slot].is_kept)

    def generation(self, slot: int) -> int:
        """Return the generation of what is kept when it was planned."""
        return int(self._jobs[slot].generation)

    # --- the pool's calls -------------------------------------------------------------------------

    def close(self) -> None:
        """Release the memory of slots, and tables; no thread will ask for work any more."""
        self._keep, self._samples, self.offsets = (), [], []

    def note_workers(self, count: int) -> None:
        """Note that a thread came or left, and how many there are; one at a time calls this."""
        self._struct.num_inside = count
        self._struct.num_changes += 1


# --- the consumer's turns -------------------------------------------------------------------------


class Numbers(NamedTuple):
    """The samples of batches of an epoch, up to the one with the serial `stop`.

    Those of the first batch are at positions of the selection from `begin` on; the last one has
    `last_size`, from `last_skip` behind those of the first on. `mapping` and `draw` are as for
    `BatchQueue.submit`. Or they lie in `samples` at such a distance.
    """

    stop: int
    begin: int
    last_skip: int
    last_size: int
    mapping: NDArray[np.uint64] | None = None
    samples: NDArray[np.int64] | None = None
    draw: NDArray[np.uint64] | None = None


class RunEpochs:
    """The batches of a run, of some epochs: from `first` to `stop`, of `size` samples.

    They are counted by the serials they would have if no samples were given after the run began.

    The samples of a batch are `stride` positions behind those of the one before. The first epoch
    ends before `epoch_end`, and others have `epoch_batches`; after the last one of `epochs`, `more`
    are as that one. The last epoch may be incomplete.
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
        # Of RunEpoch in core/src/turns.c.
        self.table = np.array([(*one[1:4], *_addresses(one)) for one in epochs], np.int64)
        self.stop = epochs[-1].stop + more * self.epoch_batches

    def end_of(self, epoch: int) -> int:
        """Return the serial behind those of an epoch, counted from the first one of the run."""
        return self.epoch_end + epoch * self.epoch_batches

    def epoch_beginning(self, serial: int) -> int | None:
        """Return which epoch of the run, but the first, begins with a batch; None if none does."""
        number, rest = divmod(serial - self.epoch_end, self.epoch_batches)
        return None if number < 0 or rest else number + 1


def _addresses(one: Numbers) -> Iterator[int]:
    for array in (one.samples, one.mapping, one.draw):
        yield 0 if array is None else address(array)


def _given_of(struct: Any, arrays: Sequence[Any]) -> tuple[int, dict[int, Int64s]]:
    """Return how many batches of given samples are done with, and the others, by serial."""
    begin, of = struct.given_begin, struct.given
    if struct.held >= 0 and of[3 * ((begin - 1) % MAX_GIVEN)] == struct.held:
        begin -= 1
    numbers = [number % MAX_GIVEN for number in range(begin, struct.given_end)]
    return begin, {of[3 * at] or 0: arrays[at] for at in numbers}


class Taken(NamedTuple):
    """Batches that were taken in the core, their samples, the waits for them, and when that was.

    The time is the end of the last wait, or the begin of the next one, by the core's clock.
    """

    batches: int = 0
    samples: int = 0
    waits: int = 0
    wait_ns: int = 0
    at_ns: int = 0
    num_rows: Sequence[int] = ()  # by column, of ragged ones


class TakenEpoch(NamedTuple):
    """What was taken before and at the end of an epoch, and what workers had done then.

    It is `epoch`, of so many `batches`.
    """

    begin: Taken
    end: Taken
    done: ThreadCounts
    epoch: int
    batches: int


class Run(Protocol):
    """Batches that are alike, of some epochs, from a number of the first one on."""

    epoch: int
    number: int

    @property
    def epochs(self) -> RunEpochs:
        """Which samples they have."""

    def course_after(self, gone: int, given: dict[int, Int64s]) -> Any:
        """Return the course once `gone` batches of given samples are done with, with others."""

    @property
    def views(self) -> tuple[tuple[str, ...] | None, tuple[tuple[Any, ...], ...], slice]:
        """Names of fields, of what each is made by slot (`FieldKind.views`), and the whole part.

        Without names, Python makes it.
        """


class Turns:
    """The consumer's turns in the core.

    `batch` is the type of batches: one is made without a call of its `__init__`, and has its
    members `_made` set to views, or None if fields are ragged or Python makes it; `_later` to its
    run, slot, serial and number in the run, or -1; and `size`; of given samples, `index`, too.
    `scratch` is the consumer's; samples below `num_samples` may be given, for which `draw` is as in
    `BatchQueue.submit`; `is_alone`: no other thread fills batches; `is_ragged`: some fields are.

    `take` takes a list, to which it appends the next batch, and returns whether it did: if not, or
    if anything is not lent, the ring goes on. Given a second argument, it hardly waits; where
    batches are uploaded, that says whether it waits, and the caller's streams follow. `put_back`
    undoes it, and returns whether it did. `ask` requests a batch; it returns 0 if it did not, and 2
    if that is the last of its epoch. `give` requests one of samples in a new array, and returns
    whether it did: not if that has anything but int64 below `num_samples`. `fill_own` fills a
    batch, by its serial, that was submitted as the consumer's own, if it is cheap and the state is
    not lent. `on_epoch` is called when the last batch of one was taken, if it had many waits, or
    Python may have counted something meanwhile: it has to count the end in `num_ends`. Other ends
    are counted without it. `read` returns a batch that lasts of such samples, read in the calling
    thread, any one; False if it could not. `deliver` returns the views of the batch with a serial
    and size; None if that is not in use, or Python makes them.

    While the state is lent, `next_in_run` of `struct` is which batch of the run is next, or below
    all: one that is given.
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
        # By column: rows of all batches taken by `take`, if it is ragged, and before an epoch; then
        # the same of each of `_ends`.
        fields, most = queue.struct.contents.num_fields, 1 + MAX_ENDS if is_ragged else 1
        self._num_rows = np.zeros((most, 2, fields), np.int64)
        self._seen = 0  # of the waits
        self._on_left: Callable[[], object] | None = None
        self._given: list[Any] = [None] * MAX_GIVEN  # arrays of sample numbers
        self._keep = batch, "_made", "_later", "size", "index", self._given
        self._queue, self._scratch = queue, [scratch]
        # Those that the core may use, with the serial behind those of batches that do.
        self._mappings: list[tuple[int, Sequence[Any]]] = []
        self.run: Any = None  # that is lent to the core
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
        """Have `read` read from now on; `lasting` makes what else its batches have, as a run does.

        `fields` are, by field: the name, the shape and dtype of its rows, and those of rows as
        read, if they are others. Each call uses one of `spare`, if there is any.
        """
        struct, self._keep_to_read = self.struct, (fields, spare, (lasting,))
        struct.fields, struct.spare, struct.lasting = map(id, self._keep_to_read)
        struct.array = id(np.ndarray)

    def on_epoch(self, function: Callable[[], object] | None, is_in_epoch: bool) -> None:
        """Set what is called when an epoch ends, while the state is lent; tell if it has begun."""
        self._on_epoch, self.struct.on_epoch = function, id(function)
        self.struct.is_in_epoch = is_in_epoch

    @property
    def is_lent(self) -> bool:
        """Whether the state is the core's."""
        return bool(self.struct.is_lent)

    @property
    def taken(self) -> int:
        """The batches that `take` has given so far."""
        return int(self.struct.taken.batches)

    @property
    def num_waits(self) -> int:
        """The waits for batches that `take` has given so far."""
        return int(self.struct.taken.waits)

    def lend(
        self,
        run: Run,
        wanted: tuple[int, int, int | None, bool, bool],
        slots: Mapping[int, int],
        given: Mapping[int, Int64s],
    ) -> None:
        """Let the core have what the consumer wants: next, asked, held, reads ahead, loops.

        `slots` are by serial: those of all batches that have one, which follow each other; `given`
        has the samples of those that are given, from the one that is held on.
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
        struct.given[3 * MAX_GIVEN - 3] = -1  # the one before the first: none is held
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
        """Return what the consumer wants: next, asked, held, and the course; None: not lent."""
        run = self.run
        if run is None:
            return None
        struct = self._core.Turns.from_buffer_copy(self._memory)  # of one moment
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
        """Release memory: the state has been taken back for good, and no thread is in the core."""
        self._scratch.clear()

    def is_inside(self) -> bool:
        """Tell whether a thread is in `take` without the GIL."""
        return bool(self.struct.is_inside)

    def stop_waiting(self) -> None:
        """Have `take` never wait from now on."""
        self.struct.waits_not = True

    def when_left(self, function: Callable[[], object]) -> bool:
        """Have a function called when no thread is in the core any more; False: none is.

        The state has been taken back for good.
        """
        is_any = bool(self.struct.is_inside or self.struct.num_reading)
        if is_any:
            self._on_left, self.struct.on_left = function, id(function)
        return is_any

    def new_waits(self) -> list[float]:
        """Return the last waits since the last call, in seconds."""
        struct, seen = self.struct, self._seen
        self._seen = struct.taken.waits
        each = range(max(seen, self._seen - MAX_WAITS), self._seen)
        return [int(self._waits_ns[wait % MAX_WAITS]) / 1e9 for wait in each]

    def counts(self, *, before_epoch: bool = False) -> Taken:
        """Return what was taken so far, or before the last epoch that began here."""
        struct = self.struct.before if before_epoch else self.struct.taken
        copied = self._core.Taken.from_buffer_copy(struct)  # of one moment
        return _taken(copied, self._num_rows[0, int(before_epoch)])

    def ended(self, number: int) -> TakenEpoch:
        """Return one of the last epochs that have ended here, by its number among all that have."""
        at = number % MAX_ENDS
        end = self._core.EpochEnd.from_buffer_copy(self._ends[at])  # of one moment
        taken, before = self._num_rows[(1 + at) % len(self._num_rows)]
        moments = _taken(end.begin, before), _taken(end.end, taken)
        return TakenEpoch(*moments, counts_of(end.done), end.epoch, end.count)

    def seconds(self, ns: int) -> float:
        """Return a time of the core's clock as one of `time.perf_counter`."""
        return (ns + self._core.clock_offset_ns()) / 1e9


def _taken(struct: Any, num_rows: Int64s) -> Taken:
    numbers = map(struct.__getattribute__, Taken._fields[:-1])
    return Taken._make((*numbers, num_rows.tolist()))
