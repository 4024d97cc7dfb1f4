"""Requests for batches enter, in order; slots leave, each at one time with one owner.

A slot goes free -> filling -> ready -> in use -> free. `SlotRing` decides which batch a free slot
is filled with next, and knows nothing of files, threads or GPUs: whoever calls it does the work
that it names, outside its lock. Batches have serial numbers that go on through all epochs.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from h5async.errors import BatchTimeoutError, ReaderClosedError

Result = TypeVar("Result")


class Assignment(NamedTuple):
    """Fill this slot with this batch."""

    slot: int
    serial: int


@dataclass(eq=False)
class _Entry(Generic[Result]):
    """A slot that is being filled, or is ready, for a batch that nobody has taken yet."""

    slot: int
    serial: int
    result: Result | None = None
    is_ready: bool = False
    is_dropped: bool = False


class SlotRing(Generic[Result]):
    """The states of all slots. Safe to use from many threads.

    Methods that free a slot, or ask for a batch, return assignments: the caller must see to it
    that each is carried out and answered by `filled`.

    Parameters
    ----------
    num_slots
        Slots in the ring.
    """

    def __init__(self, num_slots: int) -> None:
        # A condition's default lock is reentrant: a reader may be collected, and closed, by the
        # garbage collector while one of its own threads is in here.
        self._changed = threading.Condition()
        self._free = deque(range(num_slots))
        self._entries: deque[_Entry[Result]] = deque()  # by serial: what was not dropped or taken
        self._filling: dict[int, _Entry[Result]] = {}  # by slot
        self._in_use: int | None = None
        self._delivered = 0  # serial of the batch that is delivered next
        self._asked = 0  # batches below this serial were asked for
        self._assigned = 0  # batches below this serial were given a slot, or were skipped
        self._reads_ahead = False
        self._closed = False

    @property
    def next_serial(self) -> int:
        """Serial of the batch that will be delivered next."""
        return self._delivered

    @property
    def in_use(self) -> int | None:
        """The slot whose batch the consumer holds."""
        return self._in_use

    def ask(self) -> tuple[int, list[Assignment]]:
        """Ask for one batch more. Never blocks.

        Returns
        -------
        serial, assignments
            The batch that was asked for, and the work that this makes possible.
        """
        with self._changed:
            self.check_open()
            serial = self._asked
            self._asked += 1
            return serial, self._assign()

    def skip_to(self, serial: int, *, read_ahead: bool) -> list[Assignment]:
        """Drop all batches before `serial`; `read_ahead`: keep free slots filling from now on."""
        with self._changed:
            self.check_open()
            self._reads_ahead = read_ahead
            self._delivered = max(self._delivered, serial)
            self._asked = max(self._asked, self._delivered)
            self._assigned = max(self._assigned, self._delivered)
            for entry in list(self._entries):
                if entry.serial >= self._delivered:
                    break
                self._entries.popleft()
                entry.is_dropped = True  # one that is still being filled is freed when it is done
                if entry.is_ready:
                    self._free.append(entry.slot)
            return self._assign()

    def restart(self) -> int:
        """Drop all batches that were asked for, and stop reading ahead.

        Returns
        -------
        int
            Serial of the batch that will be delivered next; nothing was assigned to it yet.
        """
        with self._changed:  # it is reentrant
            self.skip_to(max(self._asked, self._assigned), read_ahead=False)
            return self._delivered

    @property
    def has_begun(self) -> bool:
        """Whether any batch was asked for."""
        return self._asked > 0 or self._assigned > 0

    def begin_next(self) -> list[Assignment]:
        """Take the slot in use back, and see that at least one batch is asked for."""
        with self._changed:
            self.check_open()
            if self._in_use is not None:
                self._free.append(self._in_use)
                self._in_use = None
            self._asked = max(self._asked, self._delivered + 1)
            return self._assign()

    def is_ready(self) -> bool:
        """Tell whether the next batch can be taken without waiting."""
        with self._changed:
            return bool(self._entries) and self._entries[0].is_ready

    def take(self, timeout_seconds: float | None) -> tuple[int, int, Result]:
        """Wait for the next batch; its slot is in use then.

        Returns
        -------
        serial, slot, result
            As given to `filled`.

        Raises
        ------
        BatchTimeoutError
            If it was not ready in time. It is still the next one.
        ReaderClosedError
            If the ring is closed, before or meanwhile.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or self.is_ready(), timeout=timeout_seconds
            )
            self.check_open()
            if not done:
                raise BatchTimeoutError(
                    f"batch {self._delivered} was not ready within {timeout_seconds} s; call"
                    " get_next_batch() again to go on waiting for it"
                )
            entry = self._entries.popleft()
            self._in_use = entry.slot
            self._delivered = entry.serial + 1
            assert entry.result is not None
            return entry.serial, entry.slot, entry.result

    def filled(self, slot: int, serial: int, result: Result) -> list[Assignment]:
        """Say that an assignment was carried out, well or ill. Never blocks."""
        with self._changed:
            entry = self._filling.pop(slot)
            assert entry.serial == serial
            entry.result = result
            entry.is_ready = True
            if entry.is_dropped:
                self._free.append(slot)
            self._changed.notify_all()
            return [] if self._closed else self._assign()

    def close(self) -> bool:
        """Wake everyone who waits, and refuse all further calls; False where it was closed."""
        with self._changed:
            was_open = not self._closed
            self._closed = True
            self._changed.notify_all()
            return was_open

    def _assign(self) -> list[Assignment]:
        """Give free slots to the next batches in line. An entry is never given twice."""
        assignments = []
        while self._free and (self._reads_ahead or self._assigned < self._asked):
            entry: _Entry[Result] = _Entry(self._free.popleft(), self._assigned)
            self._assigned += 1
            self._entries.append(entry)
            self._filling[entry.slot] = entry
            assignments.append(Assignment(entry.slot, entry.serial))
        return assignments

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the ring is closed."""
        if self._closed:
            raise ReaderClosedError("the reader is closed; make a new one")
