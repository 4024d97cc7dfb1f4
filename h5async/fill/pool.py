"""Runs functions in threads, the most urgent first, whatever they do.

Functions enter, each with a serial number: the lowest is the most urgent. All threads take from one
heap. If it is empty, a thread asks for more work. When the pool is stopped, it drops pending work,
and the thread that ends the last piece of work releases the resources shared by all.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from h5async.errors import ReaderClosedError, ReadError
from h5async.spelling import named
from h5async.system.interruptions import Once, Patience, join_threads, start_threads

T = TypeVar("T")
Work = Callable[[], None]

THREAD_NAME = "h5async"
_OTHER = -1  # stands for the thread of `Workers.wait_for`


class Tickets(Protocol):
    """Wakes threads for work on the heap, or gives them work of its own. Thread-safe."""

    def put(self, ticket: bool) -> None:
        """Have one thread continue with work of the heap, or end (False). Never blocks."""

    def get(self) -> bool | Work:
        """Wait for a ticket, or for work that is not on the heap."""

    def get_here(self) -> Work | None:
        """Return work that is not on the heap, without waiting; None if there is none."""

    def note_workers(self, count: int) -> None:
        """Note that a thread came or left, and how many there are. Calls do not overlap."""

    def forget(self) -> None:
        """Forget all work, after an exception in a pool without threads."""


def do_nothing(*_: object) -> None:
    """Stand in for a callback that is not set, or not any more."""


class Workers:
    """Threads, the last of which releases their shared resources once they are stopped.

    Safe to use from many threads. Once it `is_stopped`, no thread enters.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        # Reentrant: the garbage collector may run in here, and close a reader.
        self._lock = threading.RLock()
        # Threads that may use resources that `stop` releases: while there are any, none is freed.
        self._workers: set[int] = set()
        self._let_go: Callable[[], None] = do_nothing
        self._ending = Once()
        self._threads: list[threading.Thread] = []

    def stop(self, let_go: Callable[[], None]) -> None:
        """Drop pending work; call `let_go` once work under way has ended.

        Never waits: the garbage collector may call it in any thread, even one that holds a lock
        that a worker waits for. Extra calls are harmless, and complete an interrupted call.
        """
        with self._lock:
            if self._ending.has_begun:
                return
            self.is_stopped, self._let_go = True, let_go
            self._wake()
            is_idle = not self._workers
        if is_idle:
            self._ending.do(self._end)

    def wait_for(self, when_left: Callable[[Callable[[], None]], bool]) -> None:
        """Have a later `stop` count a thread that is not a worker as one.

        `when_left` has a function called when that thread leaves, or returns False if it has left.
        """
        with self._lock:
            if not self.is_stopped and when_left(partial(self._leave, _OTHER)):
                self._workers.add(_OTHER)

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until `stop` has taken effect; a worker does not wait for itself."""
        if threading.get_ident() in self._workers:
            return
        patience = Patience(patience_seconds)
        while not self._ending.is_set and not patience.is_over:
            patience.wait(self._ending.wait_set)
        join_threads(self._threads, patience)

    def _note_workers(self) -> None:
        """Note that a thread came or left; called under the lock."""

    def _wake(self) -> None:
        """Have all threads end as soon as they can. Never blocks; called under the lock."""

    def _start(self, targets: Mapping[str, Callable[[], None]], what: str) -> None:
        """Start threads by name; errors say that they are for `what`.

        `ReadError` is raised if the system allows no more threads; `stop` ends those already
        started.
        """
        # Daemons: otherwise the interpreter would wait for them at exit, before the reader closes.
        new = [
            threading.Thread(
                target=self._run, args=(target,), name=f"{THREAD_NAME}-{name}", daemon=True
            )
            for name, target in targets.items()
        ]
        self._threads += new
        start_all(new, what)

    def _run(self, target: Callable[[], None]) -> None:
        if not self._enter():
            return
        try:
            target()
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Count the calling thread as a worker; return False if this is stopped."""
        with self._lock:
            if not self.is_stopped:
                self._workers.add(threading.get_ident())
                self._note_workers()
            return not self.is_stopped

    def _leave(self, worker: int | None = None) -> None:
        with self._lock:
            self._workers.discard(threading.get_ident() if worker is None else worker)
            self._note_workers()
            is_last = self.is_stopped and not self._workers
        if is_last:
            self._ending.do(self._end)

    def _end(self) -> None:
        """Release all that only workers use; called after the last of them."""
        self._let_go()
        self._let_go = do_nothing  # breaks a reference cycle with the owner of the callback


class WorkPool(Workers):
    """Threads that do work, or, without threads, the caller of `run_next`.

    A worker that finds no work on the heap calls `find_work`, which returns work with its serial
    numbers. It passes exceptions of work to `on_crash`, and goes on. Threads wait for `tickets`.
    """

    def __init__(
        self,
        num_threads: int,
        find_work: Callable[[], Sequence[tuple[int, Work]]],
        on_crash: Callable[[BaseException], None],
        tickets: Tickets | None = None,
    ) -> None:
        super().__init__()
        self.num_threads = num_threads
        self._find_work = find_work
        self._on_crash = on_crash
        self._heap: list[tuple[int, int, Work]] = []
        self._order = itertools.count()
        # True stands for work on the heap, False ends a thread. A ThreadPoolExecutor would cost the
        # caller's thread 15 us more per batch.
        self._tickets = queue.SimpleQueue[bool]() if tickets is None else tickets
        self._own_tickets = tickets

    def start(self, what: str) -> None:
        """Start the threads; see `Workers`."""
        self._start({f"fill_{number}": self._work for number in range(self.num_threads)}, what)

    def kick(self) -> None:
        """Have a thread look for work. Never blocks; extra calls are harmless."""
        if self.num_threads:
            self._tickets.put(True)

    def add(self, serial: int, works: Sequence[Work]) -> None:
        """Add work. Never blocks. Safe to call from any thread."""
        with self._lock:
            if self.is_stopped:
                return
            # Tickets first: after an exception, work without one would use up another's ticket.
            for _ in works if self.num_threads else ():
                self._tickets.put(True)
            for work in works:
                heapq.heappush(self._heap, (serial, next(self._order), work))

    def add_aside(self, work: Work) -> None:
        """Add work that uses nothing that `stop` releases; `join` does not wait for it."""
        self.add(0, [partial(self._do_aside, work)])

    def run_next(self) -> bool:
        """Do the most urgent piece of work in the calling thread; return False if there is none."""
        return not self.is_stopped and self.run(self._run_next)

    def begin_next(self) -> None:
        """Do work that is not on the heap, if any, without waiting. For threads of the pool."""
        work = None if self._own_tickets is None else self._own_tickets.get_here()
        if work is not None:
            work()

    def run(self, work: Callable[[], T]) -> T:
        """Do a piece of work in the calling thread; `ReaderClosedError` if the pool is stopped."""
        if threading.get_ident() in self._workers:  # called by work that uses the reader
            return work()
        discard = partial(self._workers.discard, threading.get_ident())
        try:
            if not self._enter():
                raise ReaderClosedError("the reader is closed; make a new one")
            return work()
        finally:
            try:
                self._leave()
            finally:  # again: signal handlers may raise in `_leave`, but not before a call of C
                discard()
                self._leave()

    def forget_work(self) -> bool:
        """Drop all work after an exception in `run_next`; False if threads may be at work."""
        if self.num_threads:
            return False
        self._heap.clear()
        if self._own_tickets is not None:
            self._own_tickets.forget()
        return True

    def _note_workers(self) -> None:
        if self._own_tickets is not None:
            self._own_tickets.note_workers(len(self._workers))

    def _wake(self) -> None:
        self._heap.clear()
        for _ in self._threads:
            self._tickets.put(False)

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not False:
            try:
                if ticket is True:
                    self._run_next()
                else:
                    ticket()
            except BaseException as error:
                self._on_crash(error)
            if threading.get_ident() not in self._workers:
                return  # stopped while this thread did work aside

    def _do_aside(self, work: Work) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self.is_stopped:
                return
            self._workers.discard(threading.get_ident())
            self._threads.remove(thread)
        try:
            work()
        finally:
            with self._lock:
                if self._enter():
                    self._threads.append(thread)

    def _run_next(self) -> bool:
        with self._lock:
            work = heapq.heappop(self._heap)[2] if self._heap else None
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

    def _end(self) -> None:
        super()._end()
        self._find_work, self._on_crash = tuple, do_nothing  # to break reference cycles, too


def start_all(threads: Sequence[threading.Thread], what: str) -> None:
    """Start threads for `what`; `ReadError` if the system allows no more."""
    try:
        start_threads(threads)
    except RuntimeError as error:
        if "shutdown" in str(error):
            raise ReadError(
                f"{what}: the interpreter is shutting down and starts no more threads; make the"
                f" reader earlier, or read with {named('num_threads', 0)}"
            ) from error
        raise ReadError(
            f"{what}: the system allows this process no more threads ({error}); make"
            f" {named('num_threads')} smaller, or raise the limit (ulimit -u, pids.max of the"
            " control group, memory)"
        ) from error
