"""Distinguishes exceptions raised by a signal handler from others; calls C functions despite them.

Python runs signal handlers in the main thread, between any two instructions. Their exceptions come
out of the code that was running there: a `TimeoutError` that ends a slow step, for example. Such an
*interruption* is no error of a file, whatever its type, and must reach the caller as it was raised.
So

- a clause that continues after an exception uses `suppressing`, or asks `interruption` first;
- a clause that raises another error instead names the exception as its cause (``from error``), and
  `passing`, around the whole call, finds it there.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NoReturn

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
    """Yield an error and its causes, except causes inside the caller's `postprocess`."""
    while error is not None:
        yield error
        is_callers = isinstance(error, PostprocessError)
        error = error.__cause__
        if is_callers and error is not None:
            yield error
            return


def _is_of_handler(traceback: TracebackType | None) -> bool:
    """Tell whether an exception passed through a signal handler."""
    installed: set[CodeType] | None = None
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        # No handler of ours raises an Exception. (Reading a frame's variables keeps them alive.)
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
    """Tell whether a function was given its caller's frame, as Python calls a signal handler.

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
    """Raises interruptions as they were, instead of our errors that they caused."""

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
    """Have a C function called when an object is gone; the last one registered comes first.

    (`weakref.finalize` is Python code: an exception of a signal handler in there is lost, and the
    function not called. Here `next` calls the function and removes the reference.)
    """
    removed: list[int] = []
    calls = zip(
        map(function, *zip(arguments, strict=True)), map(_references.pop, removed), strict=False
    )
    removed.append(id(removed))
    _references[removed[0]] = weakref.ref(owner, partial(next, calls))
