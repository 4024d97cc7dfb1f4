"""Gives the slots of a ring to batches, in order; each slot has one owner at a time.

A slot goes free -> filling -> ready -> in use -> free. `SlotRing` decides which batch a free slot
is filled with next, and knows nothing of files, threads or GPUs: its callers do the work that it
names, outside its lock. Batches have serial numbers that continue through all epochs.

What the consumer wants is one value, which each of its calls changes in one assignment. So an
exception at any point (Ctrl-C) finds the call done or not done, but never half done; and a call may
be repeated. Workers assign slots by `assign`.

All this may be lent, to `Turns`, which then does the same for a run of batches that are alike. The
first other call of the consumer takes it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from h5async.errors import BatchTimeoutError, H5AsyncError, ReaderClosedError
from h5async.system.interruptions import Patience

if TYPE_CHECKING:
    from h5async.read.queue import Turns

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Assignment(NamedTuple):
    """Fill this slot with this batch."""

    slot: int
    serial: int


class Consumer(NamedTuple):
    """What the consumer wants; batches are named by their serials."""

    next: int = 0  # is delivered next
    asked: int = 0  # those below were requested
    held: int | None = None  # is in the consumer's hands
    reads_ahead: bool = False  # batches are filled before they are requested
    course: Any = None  # the caller's meaning of the serials
    loops: bool = False  # a loop takes the batches, and they are read ahead for it

    @property
    def has_begun(self) -> bool:
        """Whether any batch was requested."""
        return self.asked > 0 or self.reads_ahead


_new_consumer = partial(tuple.__new__, Consumer)  # in half the time


class Completions(Protocol[Result_co]):
    """Reports that batches are ready without calling `SlotRing.filled`, and wakes the consumer."""

    def result(self, slot: int, serial: int) -> Result_co | None:
        """Return the batch in a slot; None if it is not ready. Never blocks."""

    def drop(self, slot: int, serial: int) -> bool:
        """Say that a batch is no longer wanted; tell whether its slot may have another one."""

    def events(self) -> Any:
        """Return what `wait` needs to notice later batches, and calls of `wake`."""

    def wait(self, seen: Any, seconds: float | None) -> bool:
        """Wait until something happened since `events` returned `seen`; return whether it did."""

    def wake(self) -> None:
        """Have `wait` return. Never blocks."""


class _FilledOnly:
    """The completions of a ring whose batches are all reported by `SlotRing.filled`."""

    # An exception in the middle of Condition.wait would leave a condition broken.
    _waiter: threading.Lock | None = None

    def result(self, slot: int, serial: int) -> None:
        """Return None."""

    def drop(self, slot: int, serial: int) -> bool:
        return False

    def events(self) -> threading.Lock:
        """Return a lock that is released by `wake`; the ring's lock is held in both."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiter = waiter
        return waiter

    def wait(self, seen: threading.Lock, seconds: float | None) -> bool:
        return seen.acquire(timeout=-1 if seconds is None else seconds)

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.release()


@dataclass(eq=False, slots=True)
class _Entry(Generic[Result]):
    """A slot that has an owner."""

    slot: int
    result: Result | None = None
    is_ready: bool = False


class SlotRing(Generic[Result]):
    """The states of all slots. Safe to use from many threads; one of them is the consumer."""

    def __init__(self, num_slots: int) -> None:
        # Set before the first batch, if not only `filled` reports batches.
        self.completions: Completions[Result] = _FilledOnly()
        self.turns: Turns | None = None  # to which the state may be lent
        # What the consumer wants; only its own calls change it. `consumer`, while it is lent.
        self.wanted = Consumer()
        self.is_closed = self._at_exit = False
        # Held, only this thread changes the ring. Reentrant: a reader may be collected, and closed,
        # by the garbage collector while one of its own threads is in here.
        self.lock = threading.RLock()
        self._num_slots = num_slots
        self.was_lent = False  # since whoever carries out assignments looked at all of them
        self._never_given = list(reversed(range(num_slots)))
        # By serial, ascending. An entry is removed when it is ready and no longer needed.
        self._entries: dict[int, _Entry[Result]] = {}
        self._failure: str | None = None

    # --- the state, while it is lent --------------------------------------------------------------

    @property
    def consumer(self) -> Consumer:
        """What the consumer wants."""
        state = None if self.turns is None else self.turns.state()
        wanted = self.wanted  # after that: it is set before the state is taken back
        if state is None:
            return wanted
        *others, course = state
        return _new_consumer((*others, wanted.reads_ahead, course, wanted.loops))

    def lend(self, run: Any) -> None:
        """Lend the state for a run, in the consumer's thread.

        Not if batches before the next one have slots still, but the one in use.
        """
        with self.lock:
            following, asked, held, reads_ahead, course, loops = self.wanted
            slots = {serial: entry.slot for serial, entry in self._entries.items()}
            low = held if held in slots and held == following - 1 else following
            is_whole = list(slots) == list(range(low, low + len(slots)))
            if self.turns is not None and not self.is_closed and is_whole:
                wanted = following, asked, held if low == held else None, reads_ahead, loops
                given = {serial: of for serial, of in course.given.items() if serial >= low}
                self.turns.lend(run, wanted, slots, given)

    def take_back(self) -> None:
        """Have the state here again, until it is lent again."""
        with self.lock:
            self._take_back()

    def _take_back(self) -> None:
        """Have the state here again; under the lock, first of all."""
        turns = self.turns
        if turns is None or not turns.is_lent:
            return
        consumer, reported = self.consumer, self._entries
        entries: dict[int, _Entry[Result]] = {}
        for serial, slot in turns.slots().items():
            entry = reported.get(serial)
            if entry is None or not entry.is_ready or entry.slot != slot:
                entry = _Entry(slot, is_ready=serial == consumer.held)
            entries[serial] = entry
        self._never_given = []  # some may have been given; those that no entry has are free
        self._entries, self.wanted = entries, consumer
        self.was_lent = True
        turns.end()

    # --- the consumer's calls ---------------------------------------------------------------------

    @property
    def serials(self) -> list[int]:
        """Serials of all batches that have slots."""
        with self.lock:
            turns = self.turns
            of_turns = turns.slots() if turns is not None and turns.is_lent else None
            found = list(self._entries if of_turns is None else of_turns)
        return found

    @property
    def in_use(self) -> int | None:
        """The slot whose batch the consumer holds."""
        held, turns = self.consumer.held, self.turns
        if held is not None and turns is not None and turns.is_lent:
            return turns.slots().get(held)
        entry = None if held is None else self._entries.get(held)
        return None if entry is None else entry.slot

    def ask(self) -> int:
        """Request one batch more; return its serial. Never blocks."""
        with self.lock:
            self._take_back()
            self.check_open()
            following, asked, *others = self.wanted
            self.wanted = _new_consumer((following, asked + 1, *others))
            return asked

    def ask_for(self, course_from: Callable[[int, int], Any]) -> int:
        """Request a batch that has no slot yet, and take another course; return its serial.

        Batches before it that have slots count as requested; in a loop, all that fit into the
        slots, whether or not they have one yet, so that it does not depend on the speed of threads.
        All at once, as in `restart`. `course_from` is called with its serial, and that of the batch
        in use, or else of the next one. It returns the meaning of serial numbers from now on, which
        is unchanged for those below its serial.
        """
        with self.lock:
            self._take_back()
            self.check_open()
            following, asked, held, reads_ahead, _, loops = self.wanted
            serial = max(asked, self._next_to_assign())
            if loops:
                serial = max(serial, following + self._num_slots - (held is not None))
            course = course_from(serial, following if held is None else held)
            self.wanted = Consumer(following, serial + 1, held, reads_ahead, course, loops)
            return serial

    def skip_to(self, serial: int, *, read_ahead: bool, loops: bool = False) -> None:
        """Drop all batches before `serial`; `read_ahead`: keep free slots filling from now on.

        `loops`: a loop takes them; see `ask_for`.
        """
        with self.lock:
            self._take_back()
            self.check_open()
            following = max(self.wanted.next, serial)
            asked = max(self.wanted.asked, following)
            self.wanted = self.wanted._replace(
                next=following, asked=asked, reads_ahead=read_ahead, loops=loops
            )

    def restart(self, course_from: Callable[[int], Any]) -> None:
        """Drop all requested batches, stop reading ahead, and take another course.

        All at once: an exception leaves everything as it was. `course_from` is called with the
        serial of the next batch to be delivered, which has no slot yet. It returns the meaning of
        serial numbers from there on.
        """
        with self.lock:
            self._take_back()
            self.check_open()
            serial = max(self.wanted.asked, self._next_to_assign())
            self.wanted = Consumer(serial, serial, self.wanted.held, False, course_from(serial))

    def hand_back(self) -> None:
        """Give the slot in use back, and request at least one batch."""
        with self.lock:
            self._take_back()
            self.check_open()
            following, asked, _, *others = self.wanted
            self.wanted = _new_consumer((following, max(asked, following + 1), None, *others))

    def is_ready(self) -> bool:
        """Tell whether the next batch can be taken without waiting."""
        serial = self.wanted.next
        entry = self._entries.get(serial)
        return entry is not None and self._is_done(serial, entry)

    def wait(
        self, timeout_seconds: float | None, begin: Callable[[], None] | None = None
    ) -> tuple[int, int, Result]:
        """Wait for the next batch, without taking it; return its serial, slot and result.

        `begin` is called while the batch has no slot: one may have become free meanwhile.
        `BatchTimeoutError` is raised if it was not ready in time, `ReaderClosedError` if the ring
        is closed, before or meanwhile, and `H5AsyncError` if `fail` was called: the batch may never
        come.
        """
        found = self._next()
        if found is not None:
            return found
        patience = Patience(timeout_seconds)
        while True:
            with self.lock:
                seen = self.completions.events()
            if begin is not None and self.wanted.next not in self._entries:
                begin()  # after reading the events: it is called again after the next one
            found = self._next()
            if found is not None:
                return found
            if self._failure is not None:
                raise H5AsyncError(self._failure)
            wait = partial(self.completions.wait, seen)
            if not patience.wait(wait) and patience.is_over:
                raise BatchTimeoutError(
                    f"batch {self.wanted.next} was not ready within {timeout_seconds} s; call"
                    " get_next_batch() again to go on waiting for it"
                )

    def _next(self) -> tuple[int, int, Result] | None:
        with self.lock:
            self.check_open()
            serial = self.wanted.next
            entry = self._entries.get(serial)
            is_done = entry is not None and self._is_done(serial, entry)
            self.check_open()  # a signal handler may have closed it meanwhile
            if entry is None or not is_done or entry.result is None:
                return None
            return serial, entry.slot, entry.result

    def after(self, serial: int) -> Consumer:
        """Return what is `wanted` once the batch that was waited for is in use.

        Whoever sets it so, and returns the batch right then, cannot be interrupted in between.
        """
        _, asked, _, *others = self.wanted
        return _new_consumer((serial + 1, asked, serial, *others))

    def forget(self, serial: int) -> None:
        """Forget the error of the batch that was waited for; the next one is the next."""
        with self.lock:
            entry = self._entries.get(serial)
            if entry is not None:
                entry.result = None
            self.wanted = self.after(serial)

    def put_back(self, serial: int, result: Result | None = None) -> None:
        """Undo `forget`, or what turns did, if it was done: the batch is the next one again.

        None: the result is that of `Completions`.
        """
        with self.lock:
            self._take_back()
            entry = self._entries.get(serial)
            if entry is not None:
                entry.result = result
                entry.is_ready = result is not None
            self.wanted = self.wanted._replace(next=serial, held=None)

    # --- the workers' calls -----------------------------------------------------------------------

    def can_assign(self) -> bool:
        """Tell whether there is a free slot, and a batch to fill it with."""
        with self.lock:
            return (
                not self.is_closed
                and (self.wanted.reads_ahead or self._next_to_assign() < self.wanted.asked)
                and len(self._entries) - len(self._done_with()) < self._num_slots
            )

    def assign(self) -> list[Assignment]:
        """Give free slots to the next batches in line.

        The caller must ensure that each is carried out, and answered by `filled`.
        """
        assignments: list[Assignment] = []
        with self.lock:
            if self.is_closed or (self.turns is not None and self.turns.is_lent):
                return assignments
            serial = self._next_to_assign()
            if not (self.wanted.reads_ahead or serial < self.wanted.asked):
                return assignments
            free: list[int] = []
            for done in self._done_with():
                entry = self._entries.pop(done, None)
                if entry is not None:  # else the garbage collector has closed the ring
                    free.append(entry.slot)
            while len(self._entries) < self._num_slots:
                if not (self.wanted.reads_ahead or serial < self.wanted.asked):
                    break
                if not (free or self._never_given):  # slots were taken back, or lost
                    used = {entry.slot for entry in self._entries.values()}
                    free = [slot for slot in range(self._num_slots) if slot not in used]
                slot = (free or self._never_given).pop()
                self._entries[serial] = _Entry(slot)
                assignments.append(Assignment(slot, serial))
                serial += 1
            return assignments

    def pending(self) -> list[Assignment]:
        """Return all assignments that are not carried out yet."""
        with self.lock:
            found = [Assignment(e.slot, s) for s, e in self._entries.items() if not e.is_ready]
        return found

    def awaits(self, slot: int, serial: int) -> bool:
        """Tell whether a slot was given to a batch, and it is not filled yet."""
        with self.lock:
            entry = self._entries.get(serial)
            is_awaited = entry is not None and entry.slot == slot and not entry.is_ready
        return is_awaited

    def filled(self, serial: int, result: Result) -> None:
        """Say that an assignment was carried out, with or without an error. Never blocks."""
        with self.lock:
            entry = self._entries.get(serial)
            if entry is None and self.turns is not None and self.turns.is_lent:
                slot = self.turns.slots().get(serial)
                entry = None if slot is None else self._entries.setdefault(serial, _Entry(slot))
            if entry is not None:  # else it is closed
                entry.result = result
                entry.is_ready = True
                self.completions.wake()  # a consumer that assigns slots waits for any of them

    def fail(self, error: BaseException) -> None:
        """Say that assignments may never be carried out: something broke outside of any batch."""
        with self.lock:
            self._failure = self._failure or (
                f"a worker of the reader broke down ({type(error).__name__}: {error}), and batches"
                " that it had to fill may never come; close the reader and make a new one"
            )
            if self.turns is not None:
                self.turns.stop_waiting()
            self.completions.wake()

    def unassign(self) -> None:
        """Take back assignments that will not be carried out."""
        with self.lock:
            for _, serial in self.pending():
                self._entries.pop(serial, None)

    def close(self, *, at_exit: bool = False) -> bool:
        """Wake all who wait, and refuse all further calls; return False if it was closed before.

        `at_exit`: the interpreter ends; a daemon thread then gets `SystemExit`, and ends without a
        useless traceback.
        """
        with self.lock:
            was_open = not self.is_closed
            self._at_exit = self._at_exit or at_exit
            self.is_closed = True
            self._entries = {}  # a new one: this may come in the middle of a loop over the old
            self.wanted = self.consumer
            if self.turns is not None:
                self.turns.shut()
            self.completions.wake()
            return was_open

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the ring is closed."""
        if self.is_closed:
            if self._at_exit and threading.current_thread().daemon:
                raise SystemExit
            raise ReaderClosedError("the reader is closed; make a new one")

    # --- under the lock ---------------------------------------------------------------------------

    def _next_to_assign(self) -> int:
        return max(next(reversed(self._entries), -1) + 1, self.wanted.next)

    def _done_with(self) -> list[int]:
        """Return batches that were delivered, or dropped: their slots are free."""
        following, _, held, *_ = self.wanted
        done: list[int] = []
        for serial, entry in self._entries.items():
            if serial >= following:
                break
            if serial == held:
                continue
            if self._is_done(serial, entry) or self.completions.drop(entry.slot, serial):
                done.append(serial)
        return done

    def _is_done(self, serial: int, entry: _Entry[Result]) -> bool:
        if not entry.is_ready:
            result = self.completions.result(entry.slot, serial)
            if result is not None:
                entry.result = result
                entry.is_ready = True
        return entry.is_ready
