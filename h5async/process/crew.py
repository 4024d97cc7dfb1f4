"""Distributes requests over helper processes, each kept alive by a supervisor.

A request goes to the helper with the fewest outstanding requests. It stays there even if that
helper dies and another replaces it, so no two processes ever write to the same slot.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from h5async.fill.outcomes import FillerStats, FillOutcome, Recorded
from h5async.io.shared import SharedMemory
from h5async.order.sampling import FillRequest
from h5async.process.messages import NoteUploaded, Opened, Starting
from h5async.process.samefiles import check_same
from h5async.process.sharedslots import ReaderSlots
from h5async.process.supervisor import Supervisor

_FOUND = "was changed while the reader was made, of which helper processes have found two versions"


class Crew:
    """All supervisors of a reader. Made in the thread that opens the reader.

    Methods are thread-safe, except `flush`, which one thread calls.

    Parameters
    ----------
    num_helpers
        The number of helper processes.
    what, opening, shared, wake_sender
        As in `Supervisor`.

    Attributes
    ----------
    lock
        Shared by all supervisors. Reentrant: the garbage collector may close a reader anywhere,
        even while it is held.
    supervisors
        One per helper; each needs a thread that calls `run`.
    """

    def __init__(
        self,
        num_helpers: int,
        what: str,
        opening: bytes,
        shared: SharedMemory,
        wake_sender: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        self.supervisors = [
            Supervisor(what, opening, shared, self.lock, wake_sender) for _ in range(num_helpers)
        ]
        self._first = self.supervisors[0]

    @property
    def opened(self) -> Opened | None:
        """What helpers found, once they have opened the dataset."""
        return self._first.opened

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order, once helpers have started to fill slots."""
        return self._first.methods

    def await_opened(self, timeout_seconds: float | None) -> None:
        """Wait until all helpers have opened the files; raises like `Supervisor.await_step`.

        ReadError if they found different files.
        """
        for supervisor in self.supervisors:
            supervisor.await_step(timeout_seconds)
            assert self._first.opened is not None
            assert supervisor.opened is not None
            check_same(self._first.opened, supervisor.opened, _FOUND)
            supervisor.opened = self._first.opened  # tables of chunks are kept once

    def start_filling(
        self,
        slots: ReaderSlots,
        starting: Starting,
        on_done: Callable[[FillRequest, FillOutcome], None],
    ) -> None:
        """Have helpers fill slots; see `Supervisor.start_filling`."""
        for supervisor in self.supervisors:
            supervisor.start_filling(slots, starting, on_done)

    def await_started(self, timeout_seconds: float | None) -> None:
        """Wait until all helpers have started; raises like `Supervisor.await_step`."""
        for supervisor in self.supervisors:
            supervisor.await_step(timeout_seconds)

    def request(self, request: FillRequest) -> bool:
        """Post a request to one helper; return False if this is closed."""
        with self.lock:
            freest = min(self.supervisors, key=lambda supervisor: supervisor.num_outstanding)
            is_posted = freest.request(request)
        return is_posted

    def note_uploaded(self, slot: int) -> None:
        """Note that the device cache has the samples of a slot's batch."""
        (only,) = self.supervisors  # the options allow no others with a cache
        only.note(NoteUploaded(slot))

    def record(self, max_events: int) -> None:
        """Record thread events in all helpers; see `Supervisor.record`."""
        for supervisor in self.supervisors:
            supervisor.record(max_events)

    def take_recorded(self) -> list[Recorded]:
        """Return what helpers have recorded and sent since the last call."""
        several = [supervisor.take_recorded() for supervisor in self.supervisors]
        return [recorded for one in several for recorded in one]

    def flush(self) -> None:
        """Send queued messages; see `Supervisor.flush`."""
        for supervisor in self.supervisors:
            supervisor.flush()

    def stats(self) -> FillerStats:
        """Return the statistics of all helpers so far."""
        return functools.reduce(FillerStats.plus, [each.stats() for each in self.supervisors])

    def close(self) -> None:
        """Drop all requests and end all helpers. Never waits. Idempotent."""
        for supervisor in self.supervisors:
            supervisor.close()

    def release(self) -> None:
        """Release slots and functions, after all threads have ended."""
        for supervisor in self.supervisors:
            supervisor.release()
