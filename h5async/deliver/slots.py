"""Gives the slots of a ring to batches, in order; each slot has one owner at a time.

A slot goes free -> filling -> ready -> in use -> free. `SlotRing` decides which batch a free slot
is filled with next, and knows nothing of files, threads or GPUs: its callers do the work that it
names, outside its lock. Batches have serial numbers that continue through all epochs.

What the consumer wants is one value, which each of its calls changes in one assignment. So an
exception at any point (Ctrl-C) finds the call done or not done, but never half done; and a call may
be repeated. Workers assign slots by `assign`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic

from h5async.deliver.slotrecords import (
    Assignment,
    Completions,
    Consumer,
    Entry,
    Result,
    new_consumer,
)
from h5async.errors import BatchTimeoutError, H5AsyncError, ReaderClosedError
from h5async.system.waiting import Patience


class SlotRing(Generic[Result]):
    """The states of all slots. Safe to use from many threads; one of them is the consumer.

    `completions` reports that batches are ready; None: only `filled` does. Set before the first
    batch.
    """

    def __init__(self, num_slots: int) -> None:
        # Reentrant: a reader may be collected, and closed, by the garbage collector while one of
        # its own threads is in here.
        self._lock = threading.RLock()
        self._num_slots = num_slots
        self._consumer = Consumer()
        # By serial, ascending. An entry is removed when it is ready and no longer needed.
        self._entries: dict[int, Entry[Result]] = {}
        self._never_given = 0  # this slot and all after it
        # Released to wake the consumer. (An exception in the middle of Condition.wait would leave
        # the condition broken.)
        self._waiter: threading.Lock | None = None
        self.completions: Completions[Result] | None = None
        self._closed = self._at_exit = False
        self._failure: str | None = None

    # --- the consumer's calls ---------------------------------------------------------------------

    @property
    def next_serial(self) -> int:
        """Serial of the batch that will be delivered next."""
        return self._consumer.next

    @property
    def held(self) -> int | None:
        """Serial of the batch that the consumer holds."""
        return self._consumer.held

    @property
    def serials(self) -> list[int]:
        """Serials of all batches that have slots."""
        with self._lock:
            serials = list(self._entries)
        return serials

    @property
    def in_use(self) -> int | None:
        """The slot whose batch the consumer holds."""
        held = self._consumer.held
        entry = None if held is None else self._entries.get(held)
        return None if entry is None else entry.slot

    @property
    def has_begun(self) -> bool:
        """Whether any batch was requested."""
        return self._consumer.asked > 0 or bool(self._entries)

    def ask(self) -> int:
        """Request one batch more; return its serial. Never blocks."""
        with self._lock:
            self.check_open()
            following, asked, *others = self._consumer
            self._consumer = new_consumer((following, asked + 1, *others))
            return asked

    def ask_for(self, course_from: Callable[[int, int], Any]) -> int:
        """Request a batch that has no slot yet, and take another course; return its serial.

        Batches before it that have slots count as requested; in a loop, all that fit into the
        slots, whether or not they have one yet, so that it does not depend on the speed of threads.
        All at once, as in `restart`. `course_from` is called with its serial, and that of the next
        batch to be delivered. It returns the meaning of serial numbers from now on, which is
        unchanged for those below its serial.
        """
        with self._lock:
            self.check_open()
            following, asked, held, reads_ahead, _, loops = self._consumer
            serial = max(asked, self._next_to_assign())
            if loops:
                serial = max(serial, following + self._num_slots - (held is not None))
            course = course_from(serial, following)
            self._consumer = new_consumer((following, serial + 1, held, reads_ahead, course, loops))
            return serial

    def skip_to(self, serial: int, *, read_ahead: bool, loops: bool = False) -> None:
        """Drop all batches before `serial`; `read_ahead`: keep free slots filling from now on.

        `loops`: a loop takes them; see `ask_for`.
        """
        with self._lock:
            self.check_open()
            held, following = self._consumer.held, max(self._consumer.next, serial)
            asked = max(self._consumer.asked, following)
            course = self._consumer.course
            self._consumer = Consumer(following, asked, held, read_ahead, course, loops)

    @property
    def course(self) -> Any:
        """The meaning of serial numbers, as given to `restart` last."""
        return self._consumer.course

    def restart(self, course_from: Callable[[int], Any]) -> None:
        """Drop all requested batches, stop reading ahead, and take another course.

        All at once: an exception leaves everything as it was. `course_from` is called with the
        serial of the next batch to be delivered, which has no slot yet. It returns the meaning of
        serial numbers from there on.
        """
        with self._lock:
            self.check_open()
            serial = max(self._consumer.asked, self._next_to_assign())
            course = course_from(serial)
            self._consumer = Consumer(serial, serial, self._consumer.held, False, course)

    def hand_back(self) -> None:
        """Give the slot in use back, and request at least one batch."""
        with self._lock:
            self.check_open()
            following, asked, _, *others = self._consumer
            self._consumer = new_consumer((following, max(asked, following + 1), None, *others))

    def is_ready(self) -> bool:
        """Tell whether the next batch can be taken without waiting."""
        serial = self._consumer.next
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
        patience, others = Patience(timeout_seconds), self.completions
        wait: Callable[[float | None], bool]
        while True:
            if others is not None:
                wait = partial(others.wait, others.events())
            if begin is not None and self._consumer.next not in self._entries:
                begin()  # after reading the events: it is called again after the next one
            with self._lock:
                found = self._next()
                if found is not None:
                    return found
                if self._failure is not None:
                    raise H5AsyncError(self._failure)
                if others is None:
                    waiter = threading.Lock()
                    waiter.acquire()
                    self._waiter, wait = waiter, partial(_acquired, waiter)
            if not patience.wait(wait) and patience.is_over:
                raise BatchTimeoutError(
                    f"batch {self._consumer.next} was not ready within {timeout_seconds} s; call"
                    " get_next_batch() again to go on waiting for it"
                )

    def _next(self) -> tuple[int, int, Result] | None:
        """Return the next batch's serial, slot and result; None if it is not ready."""
        with self._lock:
            self.check_open()
            serial = self._consumer.next
            entry = self._entries.get(serial)
            is_done = entry is not None and self._is_done(serial, entry)
            self.check_open()  # a signal handler may have closed it meanwhile
            if entry is None or not is_done or entry.result is None:
                return None
            return serial, entry.slot, entry.result

    def take(self, serial: int, *, forget: bool = False) -> None:
        """Mark the batch that was waited for as in use; `forget` drops its result here."""
        with self._lock:
            entry = self._entries.get(serial)
            if forget and entry is not None:
                entry.result = None
            _, asked, _, *others = self._consumer
            self._consumer = new_consumer((serial + 1, asked, serial, *others))

    def put_back(self, serial: int, result: Result) -> None:
        """Undo `take`, whether or not it was done: the batch is the next one again."""
        with self._lock:
            entry = self._entries.get(serial)
            if entry is not None:
                entry.result = result
            self._consumer = self._consumer._replace(next=serial, held=None)

    # --- the workers' calls -----------------------------------------------------------------------

    def can_assign(self) -> bool:
        """Tell whether there is a free slot, and a batch to fill it with."""
        with self._lock:
            return (
                not self._closed
                and (self._consumer.reads_ahead or self._next_to_assign() < self._consumer.asked)
                and len(self._entries) - len(self._done_with()) < self._num_slots
            )

    def assign(self) -> list[Assignment]:
        """Give free slots to the next batches in line.

        The caller must ensure that each is carried out, and answered by `filled`.
        """
        assignments: list[Assignment] = []
        with self._lock:
            if self._closed:
                return assignments
            serial = self._next_to_assign()
            if not (self._consumer.reads_ahead or serial < self._consumer.asked):
                return assignments
            free: list[int] = []
            for done in self._done_with():
                entry = self._entries.pop(done, None)
                if entry is not None:  # else the garbage collector has closed the ring
                    free.append(entry.slot)
            while len(self._entries) < self._num_slots:
                if not (self._consumer.reads_ahead or serial < self._consumer.asked):
                    break
                slot = (free or self._unused_slots(free)).pop()
                self._entries[serial] = Entry(slot)
                assignments.append(Assignment(slot, serial))
                serial += 1
            return assignments

    def unchanged(self) -> AbstractContextManager[Any]:
        """Return a context in which only this thread changes the ring."""
        return self._lock

    def pending(self) -> list[Assignment]:
        """Return all assignments that are not carried out yet."""
        with self._lock:
            pending = [Assignment(e.slot, s) for s, e in self._entries.items() if not e.is_ready]
        return pending

    def _unused_slots(self, free: list[int]) -> list[int]:
        """Add at least one slot without a batch to `free`; search all slots only rarely."""
        if self._never_given < self._num_slots:
            free.append(self._never_given)
            self._never_given += 1
        else:  # slots were taken back, or lost by an exception
            used = {entry.slot for entry in self._entries.values()}
            free.extend(slot for slot in range(self._num_slots) if slot not in used)
        return free

    def filled(self, serial: int, result: Result) -> None:
        """Say that an assignment was carried out, with or without an error. Never blocks."""
        with self._lock:
            entry = self._entries.get(serial)
            if entry is None:  # it is closed
                return
            entry.result = result
            entry.is_ready = True
            # If the consumer assigns slots, it waits for those of dropped batches, too.
            if serial == self._consumer.next or self.completions is not None:
                self._wake()

    def fail(self, error: BaseException) -> None:
        """Say that assignments may never be carried out: something broke outside of any batch."""
        with self._lock:
            self._failure = self._failure or (
                f"a worker of the reader broke down ({type(error).__name__}: {error}), and batches"
                " that it had to fill may never come; close the reader and make a new one"
            )
            self._wake()

    def unassign(self) -> None:
        """Take back assignments that will not be carried out."""
        with self._lock:
            for serial in [s for s, entry in self._entries.items() if not entry.is_ready]:
                self._entries.pop(serial, None)

    def close(self, *, at_exit: bool = False) -> bool:
        """Wake all who wait, and refuse all further calls; return False if it was closed before.

        `at_exit`: the interpreter ends; a daemon thread then gets `SystemExit`, and ends without a
        useless traceback.
        """
        with self._lock:
            was_open = not self._closed
            self._at_exit = self._at_exit or at_exit
            self._closed = True
            self._entries = {}  # a new one: this may come in the middle of a loop over the old
            self._wake()
            return was_open

    @property
    def is_closed(self) -> bool:
        """Whether the ring was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the ring is closed."""
        if self._closed:
            if self._at_exit and threading.current_thread().daemon:
                raise SystemExit
            raise ReaderClosedError("the reader is closed; make a new one")

    def _next_to_assign(self) -> int:
        return max(next(reversed(self._entries), -1) + 1, self._consumer.next)

    def _done_with(self) -> list[int]:
        """Return batches that were delivered, or dropped: their slots are free."""
        following, held = self._consumer.next, self._consumer.held
        done: list[int] = []
        for serial, entry in self._entries.items():
            if serial >= following:
                break
            if serial == held:
                continue
            if self._is_done(serial, entry) or self._is_dropped(serial, entry):
                done.append(serial)
        return done

    def _is_dropped(self, serial: int, entry: Entry[Result]) -> bool:
        """Drop a batch; tell whether its slot may be given out. Holds the lock."""
        return self.completions is not None and self.completions.drop(entry.slot, serial)

    def _is_done(self, serial: int, entry: Entry[Result]) -> bool:
        """Tell whether a batch is reported ready. Holds the lock."""
        if not entry.is_ready and self.completions is not None:
            result = self.completions.result(entry.slot, serial)
            if result is not None:
                entry.result = result
                entry.is_ready = True
        return entry.is_ready

    def _wake(self) -> None:
        if self.completions is not None:
            self.completions.wake()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.release()


def _acquired(lock: threading.Lock, seconds: float | None) -> bool:
    return lock.acquire(timeout=-1 if seconds is None else seconds)
