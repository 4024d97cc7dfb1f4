"""Distinguishes exceptions raised by signal handlers from others; synchronizes despite them.

Python runs signal handlers in the main thread, between any two instructions. Their exceptions come
out of the code that was running there: a `TimeoutError` that ends a slow step, for example. Such an
*interruption*, whatever its type, does not mean that a file is bad, and must reach the caller as it
was raised. So

- a clause that continues after an exception uses `suppressing`, or calls `interruption` first;
- a clause that raises another error instead names the exception as its cause (``from error``), and
  `passing`, around the whole call, finds it there.

`threading.Condition` and `Event`, and `Thread.start` and `join`, are written in Python: an
interruption inside them leaves a lock held, releases one that nobody holds, or ends the new thread.
So here, each step of waiting for another thread is one call into C code, and happens or does not.

Also closes open readers when the interpreter ends, and counts the forks of this process: after one,
the child has none of the readers' threads.
"""

from __future__ import annotations

import _thread
import atexit
import inspect
import math
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from h5async.errors import PostprocessError

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def interruption(error: BaseException | None) -> BaseException | None:
    """Return the interruption that an exception is, or that caused it; None if there is none.

    In the main thread, anything but an `Exception`, such as `KeyboardInterrupt`, counts, too. Other
    threads have none, because no handler runs there.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return None
    for link in _causes(error):
        if not isinstance(link, Exception) or _is_of_handler(link.__traceback__):
            return link
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, except those from inside the user's `postprocess`."""
    while error is not None:
        yield error
        is_callers = isinstance(error, PostprocessError)
        error = error.__cause__
        if is_callers and error is not None:
            yield error
            return


def _is_of_handler(traceback: TracebackType | None) -> bool:
    """Return whether an exception passed through a signal handler."""
    installed: set[CodeType] | None = None
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        # Our own handlers raise no Exception. (Reading a frame's variables keeps them alive.)
        if frame.f_code.co_filename.startswith(_PACKAGE):
            continue
        if _has_interrupted_frame(frame):
            return True
        if installed is None:
            installed = set(_installed_codes())
        if frame.f_code in installed:
            return True
    return False


def _has_interrupted_frame(frame: FrameType) -> bool:
    """Return whether a function was passed its caller's frame, as Python does to signal handlers.

    This finds a handler that installed another one before it raised.
    """
    code = frame.f_code
    if frame.f_back is None:
        return False
    names = code.co_varnames[: code.co_argcount]
    values = [frame.f_locals.get(name) for name in names]
    if code.co_flags & inspect.CO_VARARGS:
        values += frame.f_locals.get(
            code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ()
        )
    return any(value is frame.f_back for value in values)


def _installed_codes() -> Iterator[CodeType]:
    """Yield the code of all installed handlers, to find one that deleted its arguments."""
    for number in signal.valid_signals():
        found: object = signal.getsignal(number)
        while hasattr(found, "func"):  # functools.partial
            found = found.func
        # A function, a method, or an object of a class that has one.
        code = getattr(found, "__code__", None)
        code = code or getattr(type(found).__dict__.get("__call__"), "__code__", None)
        if isinstance(code, CodeType):
            yield code


class passing(ContextDecorator):
    """Raises interruptions as they were, instead of the errors of ours that they caused."""

    _kinds: tuple[type[Exception], ...] = ()  # errors to suppress

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Raise the interruption that caused an error, if any."""
        if error is None:
            return False
        found = interruption(error)
        if found is not None and found is not error:
            raise_again(found)
        return found is None and isinstance(error, self._kinds)


class suppressing(passing):
    """Like `contextlib.suppress`, but interruptions are raised."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds


def raise_again(error: BaseException) -> NoReturn:
    """Raise an exception again, with its original context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error  # the traceback holds this frame


_references: dict[int, weakref.ref[object]] = {}
# Not at interpreter exit: a thread may still use memory that would be freed.
atexit.register(_references.clear)


def call_when_gone(owner: object, function: Callable[..., object], *arguments: object) -> None:
    """Have a C function called when an object is garbage collected, the last registered first.

    (`weakref.finalize` is Python code: if a signal handler raises in there, the exception is lost,
    and the function is not called. Here, `next` calls the function and removes the reference.)
    """
    removed: list[int] = []
    calls = zip(
        map(function, *zip(arguments, strict=True)), map(_references.pop, removed), strict=False
    )
    removed.append(id(removed))
    _references[removed[0]] = weakref.ref(owner, partial(next, calls))


# --- threads --------------------------------------------------------------------------------------

_SHORT_WAITS, _MIN_SHORT_WAIT_SECONDS = 8, 0.05


class Patience:
    """The rest of a timeout in seconds, None for no limit; for one thread.

    SIGSTOP, or a sleeping laptop, may stop the process while it waits. The timeout counts time
    spent waiting, not wall-clock time: it is divided into short waits, and a stop costs no more
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
        """Make all waiting threads check again. Never blocks; extra calls are harmless."""
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
    """Does some work once, and is then set. After an interruption, the next call tries again.

    `has_begun`: the work is done or in progress.
    """

    def __init__(self) -> None:
        super().__init__()
        # Reentrant: garbage collection may close a reader while the lock is held.
        self._lock = threading.RLock()
        self.has_begun = False

    def do(self, work: Callable[[], None]) -> None:
        """Do the work, unless it has begun already."""
        is_ours = False
        try:
            with self._lock:
                if not self.has_begun:
                    self.has_begun = is_ours = True
            if is_ours:
                work()
                self.set()  # also here: an interruption in `finally` would leave it unset
        except BaseException as error:
            if is_ours and interruption(error) is not None:
                self.has_begun = False
            raise
        finally:
            if is_ours:
                self.set()


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Start threads, from a thread in which no signal handlers run.

    Raises `RuntimeError` if the system cannot create more threads.
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
    """Wait for threads that are about to end, until the timeout runs out.

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


# --- the end of the interpreter, and forks -------------------------------------------------------

EXIT_SECONDS = 10.0  # for unfinished work when the interpreter ends

_open: weakref.WeakSet[Any] = weakref.WeakSet()  # engines
_is_exiting = False  # whether the interpreter is
num_forks = 0  # between the process that imported this module, and this one


def register(engine: Any) -> None:
    """Have an engine closed when the interpreter ends, if it still exists.

    Raises `SystemExit` in a daemon thread of an interpreter that is ending.
    """
    _open.add(engine)
    if _is_exiting and threading.current_thread().daemon:
        raise SystemExit


def _note_fork() -> None:
    global num_forks
    num_forks += 1
    for engine in list(_open):
        if engine.ring.turns is not None:
            engine.ring.turns.shut()  # so that the next call notices the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def close_all() -> None:
    """Close all open engines; tell all of them to stop before waiting for any."""
    global _is_exiting
    _is_exiting = True
    found = list(_open)
    for engine in found:
        engine.stop(at_exit=True)
    end = time.monotonic() + EXIT_SECONDS
    for engine in found:
        engine.join(max(0.0, end - time.monotonic()))
        # A daemon thread that opens files may hold h5py's lock, and would never release it.
        engine.has_opened.wait_set(max(0.0, end - time.monotonic()))
