"""Assigns the slots of a ring to batches, in order; each slot has one owner at a time.

A slot goes free -> filling -> ready -> in use -> free. `SlotRing` decides which batch a free slot
is filled with next, and knows nothing about files, threads or GPUs: its callers do the work that it
assigns, outside its lock. Batches have serial numbers that continue through all epochs.

The consumer's requests are one value (`Consumer`), which each of its calls changes in one
assignment. So an exception at any point (Ctrl-C) leaves a call done or not done, but never half
done; and a call may be repeated. Workers assign slots by `assign`.

The whole state may be lent to `Turns`, which then does the same in the core for a run of uniform
batches. The first other call of the consumer takes it back.
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
    """The batches that the consumer wants, by serial number."""

    next: int = 0  # to be delivered next
    asked: int = 0  # all below this were requested
    held: int | None = None  # in use by the consumer
    reads_ahead: bool = False  # batches are filled before they are requested
    course: Any = None  # what serials mean to the caller: a mapping to batches of epochs, say
    loops: bool = False  # batches are read ahead for a loop that takes them

    @property
    def has_begun(self) -> bool:
        """Whether any batch was requested."""
        return self.asked > 0 or self.reads_ahead


_new_consumer = partial(tuple.__new__, Consumer)  # takes half as long as `Consumer()`


class Completions(Protocol[Result_co]):
    """Reports that batches are ready without calling `SlotRing.filled`, and wakes the consumer."""

    def result(self, slot: int, serial: int) -> Result_co | None:
        """Return the batch in a slot; None if it is not ready. Never blocks."""

    def drop(self, slot: int, serial: int) -> bool:
        """Drop a batch that is no longer wanted; return whether its slot may be used again."""

    def events(self) -> Any:
        """Return a token for `wait`, to notice later batches and calls of `wake`."""

    def wait(self, seen: Any, seconds: float | None) -> bool:
        """Wait for an event after `events` returned `seen`; return whether there was one."""

    def wake(self) -> None:
        """Have `wait` return. Never blocks."""


class _FilledOnly:
    """The completions of a ring whose batches are all reported by `SlotRing.filled`."""

    # Not a Condition, which an exception in the middle of its `wait` would break.
    _waiter: threading.Lock | None = None

    def result(self, slot: int, serial: int) -> None:
        """Return None."""

    def drop(self, slot: int, serial: int) -> bool:
        return False

    def events(self) -> threading.Lock:
        """Return a lock that `wake` releases; call both under the ring's lock."""
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
    """A slot that is assigned to a batch."""

    slot: int
    result: Result | None = None
    is_ready: bool = False


class SlotRing(Generic[Result]):
    """The states of all slots. Safe to use from many threads; one of them is the consumer."""

    def __init__(self, num_slots: int) -> None:
        # To be set before the first batch if it is not only `filled` that reports batches.
        self.completions: Completions[Result] = _FilledOnly()
        self.turns: Turns | None = None  # to which the state may be lent
        # Changed only by the consumer's calls; while the state is lent, see `consumer` instead.
        self.wanted = Consumer()
        self.is_closed = self._at_exit = False
        # Only the thread that holds it changes the ring. Reentrant: the garbage collector may
        # close a reader in one of its own threads, in here.
        self.lock = threading.RLock()
        self._num_slots = num_slots
        self.was_lent = False  # since those who carry out assignments last looked at all of them
        self._never_given = list(reversed(range(num_slots)))
        # By serial, ascending. An entry is removed when it is ready and no longer needed.
        self._entries: dict[int, _Entry[Result]] = {}
        self._failure: str | None = None

    # --- the state, while it is lent --------------------------------------------------------------

    @property
    def consumer(self) -> Consumer:
        """The batches that the consumer wants, also while the state is lent."""
        state = None if self.turns is None else self.turns.state()
        wanted = self.wanted  # read second, because it is set before the state is taken back
        if state is None:
            return wanted
        *others, course = state
        return _new_consumer((*others, wanted.reads_ahead, course, wanted.loops))

    def lend(self, run: Any) -> None:
        """Lend the state for a run; to be called in the consumer's thread.

        Does nothing if batches before the next one, other than that in use, still have slots.
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
        """Take the state back, until it is lent again."""
        with self.lock:
            self._take_back()

    def _take_back(self) -> None:
        """Take the state back; to be called first of all, under the lock."""
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
        self._never_given = []  # some may have been assigned; all slots without entries are free
        self._entries, self.wanted = entries, consumer
        self.was_lent = True
        turns.end()

    # --- the consumer's calls ---------------------------------------------------------------------

    @property
    def serials(self) -> list[int]:
        """The serials of all batches that have slots."""
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
        """Request one more batch; return its serial. Never blocks."""
        with self.lock:
            self._take_back()
            self.check_open()
            following, asked, *others = self.wanted
            self.wanted = _new_consumer((following, asked + 1, *others))
            return asked

    def ask_for(self, course_from: Callable[[int, int], Any]) -> int:
        """Request a batch that has no slot yet, and change the course; return its serial.

        Earlier batches that have slots count as requested; in a loop, it is as many as there are
        slots, whether or not they are assigned, so that the serial does not depend on the speed of
        threads. Atomic, like `restart`. `course_from` is called with the new serial, and with that
        of the batch in use, or else of the next one. It returns the new course, which is unchanged
        for serials below the new one.
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
        """Drop all batches before `serial`; `read_ahead`: keep filling free slots from now on.

        `loops`: a loop takes the batches; see `ask_for`.
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
        """Drop all requested batches, stop reading ahead, and change the course.

        Atomic: an exception leaves everything unchanged. `course_from` is called with the serial of
        the next batch to be delivered, which has no slot yet, and returns the course from there on.
        """
        with self.lock:
            self._take_back()
            self.check_open()
            serial = max(self.wanted.asked, self._next_to_assign())
            self.wanted = Consumer(serial, serial, self.wanted.held, False, course_from(serial))

    def hand_back(self) -> None:
        """Give back the slot in use, and request at least one batch."""
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
        `BatchTimeoutError` is raised if the batch was not ready in time, `ReaderClosedError` if the
        ring is or becomes closed, and `H5AsyncError` after `fail`, as the batch may never come.
        """
        found = self._next()
        if found is not None:
            return found
        patience = Patience(timeout_seconds)
        while True:
            with self.lock:
                seen = self.completions.events()
            if begin is not None and self.wanted.next not in self._entries:
                begin()  # after `events`, so that it is called again after any later event
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
        """Return the value of `wanted` once the batch that was waited for is in use.

        A caller that assigns it and returns the batch at once cannot be interrupted in between.
        """
        _, asked, _, *others = self.wanted
        return _new_consumer((serial + 1, asked, serial, *others))

    def forget(self, serial: int) -> None:
        """Forget the batch that was waited for, and its error; go on to the next batch."""
        with self.lock:
            entry = self._entries.get(serial)
            if entry is not None:
                entry.result = None
            self.wanted = self.after(serial)

    def put_back(self, serial: int, result: Result | None = None) -> None:
        """Undo `forget`, or the taking of a batch by turns: it becomes the next one again.

        None: take the result from `completions`.
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
        """Tell whether there is a free slot and a batch to fill it with."""
        with self.lock:
            return (
                not self.is_closed
                and (self.wanted.reads_ahead or self._next_to_assign() < self.wanted.asked)
                and len(self._entries) - len(self._done_with()) < self._num_slots
            )

    def assign(self) -> list[Assignment]:
        """Assign free slots to the next batches in line.

        The caller must carry out each assignment, and then call `filled`.
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
                if entry is not None:  # None if the garbage collector has closed the ring
                    free.append(entry.slot)
            while len(self._entries) < self._num_slots:
                if not (self.wanted.reads_ahead or serial < self.wanted.asked):
                    break
                if not (free or self._never_given):  # the state was lent, or slots were lost
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
        """Tell whether a slot is assigned to a batch and not filled yet."""
        with self.lock:
            entry = self._entries.get(serial)
            is_awaited = entry is not None and entry.slot == slot and not entry.is_ready
        return is_awaited

    def filled(self, serial: int, result: Result) -> None:
        """Report that an assignment was carried out, maybe with an error. Never blocks."""
        with self.lock:
            entry = self._entries.get(serial)
            if entry is None and self.turns is not None and self.turns.is_lent:
                slot = self.turns.slots().get(serial)
                entry = None if slot is None else self._entries.setdefault(serial, _Entry(slot))
            if entry is not None:  # None if the ring is closed
                entry.result = result
                entry.is_ready = True
                self.completions.wake()  # for any batch: a waiting consumer may assign slots

    def fail(self, error: BaseException) -> None:
        """Report an error outside of any batch: assignments may never be carried out."""
        with self.lock:
            self._failure = self._failure or (
                f"a worker of the reader failed ({type(error).__name__}: {error}), and its batches"
                " may never be ready; close the reader and make a new one"
            )
            if self.turns is not None:
                self.turns.stop_waiting()
            self.completions.wake()

    def unassign(self) -> None:
        """Cancel assignments that will not be carried out."""
        with self.lock:
            for _, serial in self.pending():
                self._entries.pop(serial, None)

    def close(self, *, at_exit: bool = False) -> bool:
        """Wake all waiters, and refuse further calls; return False if it was closed before.

        `at_exit`: the interpreter is shutting down; calls in daemon threads then raise
        `SystemExit`, which ends them without a useless traceback.
        """
        with self.lock:
            was_open = not self.is_closed
            self._at_exit = self._at_exit or at_exit
            self.is_closed = True
            self._entries = {}  # a new one: a loop over the old one may be interrupted by this
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
        """Return the batches that were delivered or dropped, so that their slots are free."""
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
