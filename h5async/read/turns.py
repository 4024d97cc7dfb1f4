"""Takes batches in one call of the core: the state of the ring of slots, while it is lent to that.

A `Course` of batches that are alike enters, with what the consumer wants; batches leave, which are
made when something of them is asked for. See core/src/turns.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address
from h5async.read.queue import BatchQueue
from h5async.read.scratch import Scratch

MAX_WAITS = 4096  # MAX_WAITS in core/src/turns.c


class Numbers(NamedTuple):
    """The samples of batches `first` to `stop`, by serials, of `size` samples each.

    They are those at positions of the selection from `begin` on, `stride` further on for each
    batch; `mapping` and `draw` as for `BatchQueue.submit`. Or they lie in `samples` at such a
    distance. Of batches of several epochs, `epoch_batches` are in each but the first epoch, which
    ends before `epoch_end`.
    """

    first: int
    stop: int
    begin: int
    stride: int
    size: int
    mapping: NDArray[np.uint64] | None = None
    samples: NDArray[np.int64] | None = None
    draw: NDArray[np.uint64] | None = None
    epoch_end: int = 0
    epoch_batches: int = 0


class NewWaits(NamedTuple):
    """Waits since some time: number and sum, begin and end of the last one, and each of the last.

    In seconds, of `time.perf_counter`.
    """

    number: int
    seconds: float
    begin: float
    end: float
    each: list[float]


class Run(Protocol):
    """Batches that are alike, of an epoch, from a number on."""

    epoch: int
    number: int

    @property
    def numbers(self) -> Numbers:
        """Which samples they have."""

    @property
    def views(self) -> tuple[tuple[str, ...] | None, tuple[tuple[Any, ...], ...], slice]:
        """Names of fields, arrays of each slot, and the part of these; no names: none are made."""


class Turns:
    """The consumer's turns in the core.

    `batch` is the type of batches: one is made without a call of its `__init__`, and has its
    members `_arrays` set to views, and `_later` to its run, slot and serial. `scratch` is the
    consumer's; `is_alone`: no other thread fills batches.

    `take` takes a list, to which it appends the next batch, and returns whether it did: if not, or
    if anything is not lent, the ring goes on. Given a second argument, it hardly waits. `put_back`
    undoes it, and returns whether it did. `ask` requests a batch; it returns 0 if it did not, and 2
    if that is the last of its epoch. `on_epoch` is called when an epoch begins with the next batch,
    but the first one of a run.
    """

    def __init__(
        self, core: Core, queue: BatchQueue, scratch: Scratch, batch: type, *, is_alone: bool
    ) -> None:
        self._core = core
        self._memory = bytearray(ctypes.sizeof(core.Turns))
        self._struct = core.Turns.from_buffer(self._memory)
        self.take: Callable[..., bool]
        self.ask: Callable[[], int]
        self.put_back: Callable[[], bool]
        self.take, self.ask, self.put_back = core.turns_of(self._memory)
        self._slots = np.zeros(queue.num_slots, np.int64)
        self._waits_ns = np.zeros(MAX_WAITS, np.int64)
        self._seen = 0  # of the waits
        self._on_left: Callable[[], object] | None = None
        self._keep = queue, scratch, batch, "_arrays", "_later"
        self._queue = queue
        self._mappings: list[Any] = []  # that the core may use
        self.run: Any = None  # that is lent to the core
        struct = self._struct
        struct.queue, struct.worker = queue.struct, ctypes.pointer(scratch.worker(core).struct)
        struct.num_slots, struct.slot_of = queue.num_slots, address(self._slots)
        struct.waits_ns, struct.is_alone = address(self._waits_ns), is_alone
        struct.type, struct.made, struct.later = map(id, self._keep[2:])
        struct.held = -1

    def on_epoch(self, function: Callable[[], object] | None) -> None:
        """Set what is called when an epoch begins, while the state is lent."""
        self._on_epoch, self._struct.on_epoch = function, id(function)

    @property
    def is_lent(self) -> bool:
        """Whether the state is the core's."""
        return bool(self._struct.is_lent)

    @property
    def are_worthwhile(self) -> bool:
        """Whether batches come so quickly that the consumer's time for each matters."""
        return bool(self._struct.is_alone) or not self._queue.is_slow()

    @property
    def taken(self) -> int:
        """The batches that were taken by `take` so far."""
        return int(self._struct.taken)

    def lend(
        self, run: Run, wanted: tuple[int, int, int | None, bool], slots: Mapping[int, int]
    ) -> None:
        """Let the core have what the consumer wants: next, asked, held, and whether it reads ahead.

        `slots` are by serial: those of all batches that have one, which follow each other.
        """
        struct, count = self._struct, self._slots.size
        given = {serial % count: slot for serial, slot in slots.items()}
        free = iter({*range(count)}.difference(given.values()))
        self._slots[:] = [given[at] if at in given else next(free) for at in range(count)]
        following, asked, held, struct.reads_ahead = wanted
        struct.next, struct.asked, struct.held = following, asked, -1 if held is None else held
        struct.assigned = max(slots, default=following - 1) + 1
        numbers = run.numbers
        struct.first, struct.stop, struct.begin, struct.stride, struct.count = numbers[:5]
        for name, array in zip(("mapping", "samples", "draw"), numbers[5:8], strict=True):
            setattr(struct, name, None if array is None else address(array))
        struct.epoch_end, struct.epoch_batches = numbers.epoch_end, numbers.epoch_batches
        struct.epoch, struct.number = run.epoch, run.number
        struct.names, struct.arrays, struct.part = map(id, run.views)
        if run.views[0] is None:
            struct.names = None
        self.run, struct.run = run, id(run)
        # Batches of other epochs were delivered, or dropped.
        self._mappings = [*(self._mappings if self._queue.is_dropping() else ()), numbers.mapping]
        struct.is_lent = True

    def state(self) -> tuple[int, int, int | None]:
        """Return what the consumer wants, as far as that has changed: next, asked, held."""
        struct = self._struct
        return struct.next, struct.asked, None if struct.held < 0 else struct.held

    def slots(self) -> dict[int, int]:
        """Return the slots of all batches that have one, by serial."""
        struct, slots = self._struct, self._slots.tolist()
        low = struct.next if struct.held < 0 else struct.held
        return {serial: slots[serial % len(slots)] for serial in range(low, struct.assigned)}

    def end(self) -> None:
        """Take the state back."""
        self._struct.is_lent = False
        self.run = None
        self.on_epoch(None)

    def is_inside(self) -> bool:
        """Tell whether a thread is in `take` without the GIL."""
        return bool(self._struct.is_inside)

    def stop_waiting(self) -> None:
        """Have `take` never wait from now on."""
        self._struct.waits_not = True

    def when_left(self, function: Callable[[], object]) -> bool:
        """Have a function called when the consumer is back; False: it is not in the core.

        The state has been taken back.
        """
        if self._struct.is_inside:
            self._on_left, self._struct.on_left = function, id(function)
        return bool(self._struct.is_inside)

    def waits(self) -> NewWaits:
        """Return the waits since the last call."""
        struct, seen = self._struct, self._seen
        number, begin_ns, end_ns = struct.num_waits - seen, struct.begin_ns, struct.end_ns
        each = range(max(seen, struct.num_waits - MAX_WAITS), struct.num_waits)
        spent = [int(self._waits_ns[wait % MAX_WAITS]) / 1e9 for wait in each]
        total_ns, self._seen, struct.total_ns = struct.total_ns, struct.num_waits, 0
        offset_ns = self._core.clock_offset_ns()
        begin, end = (begin_ns + offset_ns) / 1e9, (end_ns + offset_ns) / 1e9
        return NewWaits(number, total_ns / 1e9, begin, end, spent)
