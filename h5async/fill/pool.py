"""Runs pieces of work in threads, the most urgent first; it does not know what the work is.

What enters are functions, each with a serial number that says how urgent it is. All threads take
from one heap. Where it is empty, a thread asks for more work. When the pool is stopped, it drops
what was not begun, and whoever ends the last piece of work lets go of what all work has used.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from h5async.errors import ReadError
from h5async.spelling import named
from h5async.system.patience import Patience
from h5async.system.waiting import Once, join_threads, start_threads

Work = Callable[[], None]

THREAD_NAME = "h5async"


class Tickets(Protocol):
    """What threads wait for. Safe to use from many threads."""

    def put(self, ticket: bool) -> None:
        """Have one thread go on: with work of the heap, or, False, to its end. Never blocks."""

    def get(self) -> bool | Work:
        """Wait for a ticket, or for work that no heap has."""


class OwnTickets(Tickets, Protocol):
    """Tickets that bring work of their own."""

    def get_here(self) -> Work | None:
        """Return work that no heap has, without waiting for any; None where there is none."""

    def forget(self) -> None:
        """Forget all work, after an exception in a pool without threads."""


class WorkPool:
    """Threads that do work, or, without threads, whoever calls `run_next`.

    Parameters
    ----------
    num_threads
        Threads to start; 0: none.
    find_work
        Called by a worker that finds no work: returns pieces of work with their serial numbers.
    on_crash
        Called by a thread with an exception of its work. The thread goes on.
    tickets
        What threads wait for; None: a queue that has nothing else.

    Attributes
    ----------
    num_threads
        As given.
    is_stopped
        Whether `stop` was called; work that is added from then on is dropped.
    """

    def __init__(
        self,
        num_threads: int,
        find_work: Callable[[], Sequence[tuple[int, Work]]],
        on_crash: Callable[[BaseException], None],
        tickets: OwnTickets | None = None,
    ) -> None:
        self.num_threads = num_threads
        self.is_stopped = False
        self._find_work = find_work
        self._on_crash = on_crash
        self._let_go: Callable[[], None] = _do_nothing
        self._heap: list[tuple[int, int, Work]] = []
        self._order = itertools.count()
        # Reentrant: a reader collected in here by the garbage collector is closed in here.
        self._lock = threading.RLock()
        # Threads that may use what `stop` lets go of: while there is one, nothing is freed.
        self._workers: set[int] = set()
        self._ending = Once()
        # A ticket is a piece of work on the heap or, False, the end. A ThreadPoolExecutor
        # would do, and cost the thread of the caller 15 us more for each batch.
        self._tickets: Tickets = queue.SimpleQueue() if tickets is None else tickets
        self._own_tickets = tickets
        self._threads: list[threading.Thread] = []

    def start(self, what: str) -> None:
        """Start the threads; `what` they are for is named where that fails.

        Raises
        ------
        ReadError
            If the system gives no more threads; `stop` ends those that were started.
        """
        # Daemons: else the interpreter would wait for them before the reader could close them.
        for number in range(self.num_threads):
            name = f"{THREAD_NAME}-fill_{number}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
        start_all(self._threads, what)

    def kick(self) -> None:
        """Have a thread look for work. Never blocks; extra calls are harmless."""
        if self.num_threads:
            self._tickets.put(True)

    def add(self, serial: int, works: Sequence[Work]) -> None:
        """Have some work done. Never blocks. Safe to call from any thread."""
        with self._lock:
            if self.is_stopped:
                return
            for work in works:
                heapq.heappush(self._heap, (serial, next(self._order), work))
        for _ in works if self.num_threads else ():
            self._tickets.put(True)

    def run_next(self) -> bool:
        """Do the most urgent piece of work in the calling thread; False where there is none."""
        if not self._enter():
            return False
        try:
            return self._run_next()
        finally:
            self._leave()

    def begin_next(self) -> None:
        """Do, in a thread of the pool, work that no heap has. Never waits for any."""
        work = None if self._own_tickets is None else self._own_tickets.get_here()
        if work is not None:
            work()

    def run(self, work: Work) -> bool:
        """Do a piece of work in the calling thread; False where the pool is stopped."""
        if threading.get_ident() in self._workers:  # work that calls the reader
            work()
            return True
        if not self._enter():
            return False
        try:
            work()
            return True
        finally:
            self._leave()

    def forget_work(self) -> bool:
        """Drop all work after an exception in `run_next`; False where threads may be at work."""
        if self.num_threads:
            return False
        self._leave()  # where the exception kept `run_next` from it
        self._heap.clear()
        if self._own_tickets is not None:
            self._own_tickets.forget()
        return True

    def stop(self, let_go: Callable[[], None]) -> None:
        """Drop what was not begun; when what was is done, call `let_go`.

        Never waits: it is called by the garbage collector, in any thread, which may hold a lock
        that a worker waits for. Extra calls are harmless, and do what an exception left undone.
        """
        with self._lock:
            if self._ending.has_begun:
                return
            self.is_stopped, self._let_go = True, let_go
            self._heap.clear()
            is_idle = not self._workers
        for _ in self._threads:
            self._tickets.put(False)
        if is_idle:
            self._ending.do(self._end)

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until all is done that `stop` asked for; a worker does not wait for itself."""
        if threading.get_ident() in self._workers:
            return
        patience = Patience(patience_seconds)
        while not self._ending.is_set and not patience.is_over:
            patience.wait(self._ending.wait_set)
        join_threads(self._threads, patience)

    def _run(self) -> None:
        """Do work until the end; what each thread runs."""
        if not self._enter():
            return
        try:
            while (ticket := self._tickets.get()) is not False:
                try:
                    if ticket is True:
                        self._run_next()
                    else:
                        ticket()
                except BaseException as error:
                    self._on_crash(error)
        finally:
            self._leave()

    def _run_next(self) -> bool:
        work = self._pop()
        if work is None and self._own_tickets is not None:
            work = None if self.num_threads else self._own_tickets.get_here()
            if work is None:
                return False
        if work is None:
            found = self._find_work()
            if not found:
                return False
            work = found[0][1]
            for serial, other in found[1:]:
                self.add(serial, [other])
        work()
        return True

    def _pop(self) -> Work | None:
        with self._lock:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def _enter(self) -> bool:
        """Count the calling thread as a worker; False where it comes too late to be one."""
        with self._lock:
            if not self.is_stopped:
                self._workers.add(threading.get_ident())
            return not self.is_stopped

    def _leave(self) -> None:
        with self._lock:
            self._workers.discard(threading.get_ident())
            is_last = self.is_stopped and not self._workers
        if is_last:
            self._ending.do(self._end)

    def _end(self) -> None:
        """Let go of all that only workers use; after the last of them."""
        self._let_go()
        # Nobody would collect their owners, which hold this object.
        self._find_work, self._on_crash, self._let_go = tuple, _do_nothing, _do_nothing


def _do_nothing(*_: object) -> None:
    pass


def start_all(threads: Sequence[threading.Thread], what: str) -> None:
    """Start threads; `what` they are for is named where that fails.

    Raises
    ------
    ReadError
        If the system gives no more threads.
    """
    try:
        start_threads(threads)
    except RuntimeError as error:
        if "shutdown" in str(error):
            raise ReadError(
                f"{what}: the interpreter is ending, and starts no more threads; make the reader"
                f" earlier, or read with {named('num_threads', 0)}"
            ) from error
        raise ReadError(
            f"{what}: the system gives this process no more threads ({error}); make"
            f" {named('num_threads')} smaller, or raise the limit (ulimit -u, pids.max of the"
            " control group, memory)"
        ) from error
