"""Starts threads and lets them wait for each other, safe from exceptions of signal handlers.

Python runs signal handlers in the main thread, between any two instructions. `threading.Condition`
and `Event`, and `Thread.start` and `join`, are written in Python: an exception raised inside of
them leaves a lock held, releases one that nobody holds, or ends the new thread. Here each step that
must be done or not done is one call of C code.
"""

from __future__ import annotations

import _thread
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from h5async.system.interruptions import interruption, raise_again

_SHORT_WAITS, _MIN_SHORT_WAIT_SECONDS = 8, 0.05


class Patience:
    """The rest of a timeout in seconds, None for no limit; for one thread.

    SIGSTOP, or a laptop that sleeps, may stop the process while it waits. The timeout counts time
    spent waiting, not time of day. So waiting is cut into short waits, and a stop costs no more
    than one of them.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is None or seconds > threading.TIMEOUT_MAX:
            seconds = math.inf
        self._left = max(0.0, seconds)
        self._short_wait = max(self._left / _SHORT_WAITS, _MIN_SHORT_WAIT_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether the timeout has run out."""
        return self._left <= 1e-9

    def wait(self, wait: Callable[[float | None], bool]) -> bool:
        """Wait once, for a part of the timeout; return whether it was successful.

        `wait` is given a maximum in seconds, and returns whether it was successful.
        """
        if self._left == math.inf:
            return wait(None)
        seconds, begin = min(self._short_wait, self._left), time.monotonic()
        has_come = wait(seconds)
        self._left -= min(seconds, time.monotonic() - begin) if has_come else seconds
        return has_come


class Gate:
    """Lets threads wait for a condition. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: set[queue.SimpleQueue[None]] = set()

    def notify(self) -> None:
        """Make all waiting threads look again. Never blocks; extra calls are harmless."""
        for waiting in tuple(self._waiting):
            waiting.put(None)

    def wait(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `is_so` holds; return whether it does.

        Call `notify` after it has become true. `seconds` limits the wait for each `notify`; None
        means no limit.
        """
        if is_so():
            return True
        waiting: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._waiting.add(waiting)
            while not is_so():
                waiting.get(timeout=seconds)
        except queue.Empty:
            return is_so()
        finally:
            self._waiting.discard(waiting)
        return True


class Flag(Gate):
    """A flag to wait for, like `threading.Event`."""

    def __init__(self, is_set: bool = False) -> None:
        super().__init__()
        self.is_set = is_set

    def set(self) -> None:
        """Set the flag and wake up waiting threads."""
        self.is_set = True
        self.notify()

    def wait_set(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until the flag is set; return whether it is."""
        return self.wait(lambda: self.is_set, seconds)


class Once(Flag):
    """Does some work once, and is set then. After an interruption, the next call tries again.

    `has_begun` tells whether the work is done or in progress.
    """

    def __init__(self) -> None:
        super().__init__()
        # Reentrant: the garbage collector may close a reader in here.
        self._lock = threading.RLock()
        self.has_begun = False

    def do(self, work: Callable[[], None]) -> None:
        """Do the work, unless somebody did."""
        is_ours = False
        try:
            with self._lock:
                if not self.has_begun:
                    self.has_begun = is_ours = True
            if is_ours:
                work()
        except BaseException as error:
            if is_ours and interruption(error) is not None:
                self.has_begun = False
            raise
        finally:
            if is_ours:
                self.set()


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Start threads, from a thread in which no signal handler runs.

    Raises `RuntimeError` if the system gives no more threads.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    _thread.start_new_thread(_start, (threads, outcome))
    error = outcome.get()
    if error is not None:
        raise error


def _start(
    threads: Sequence[threading.Thread], outcome: queue.SimpleQueue[BaseException | None]
) -> None:
    try:
        for thread in threads:
            thread.start()
        outcome.put(None)
    except BaseException as error:
        outcome.put(error)


def join_threads(threads: Sequence[threading.Thread], patience: Patience) -> None:
    """Wait for threads that are about to end, as long as the patience lasts.

    Before Python 3.13, a thread may count as ended after an interruption although it has not.
    """
    for thread in threads:
        while not _has_ended(thread, 0.0) and not patience.is_over:
            patience.wait(partial(_has_ended, thread))


def _has_ended(thread: threading.Thread, seconds: float | None) -> bool:
    try:
        if thread.is_alive():  # not if it was never started
            thread.join(seconds)
        return not thread.is_alive()
    except RuntimeError as error:  # it ended while an interruption went through `join`
        raise_again(error.__context__ or error)
