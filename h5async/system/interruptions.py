"""An exception enters; whether a signal handler of the program raised it, in our midst, leaves.

Python runs the handlers of signals in the main thread, between any two instructions, so that what
they raise comes out of whatever was being done: a `TimeoutError` that ends a slow step, say. Such
an exception is no error of a file, whatever its type, and the caller has to get it as it is. So

- a clause that goes on after an exception uses `suppressing`, or asks `interruption` first;
- a clause that makes another error of an exception names it as the cause (``from error``), and
  `passing`, around the whole, finds it there.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NoReturn

from h5async.errors import PostprocessError

_PACKAGE = str(Path(__file__).parents[1])


def interruption(error: BaseException | None) -> BaseException | None:
    """Return the exception of a signal handler that an exception is, or was made of; else None.

    In the main thread also any that is no `Exception`, as `KeyboardInterrupt`. No handler runs in
    another thread.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return None
    for link in _causes(error):
        if not isinstance(link, Exception) or _is_of_handler(link.__traceback__):
            return link
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was made of by us: not what the caller's `postprocess` did."""
    while error is not None:
        yield error
        is_callers = isinstance(error, PostprocessError)
        error = error.__cause__
        if is_callers and error is not None:
            yield error
            return


def _is_of_handler(traceback: TracebackType | None) -> bool:
    """Tell whether an exception came through a signal handler."""
    installed: set[CodeType] | None = None
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if _has_interrupted_frame(frame):
            return True
        if installed is None:
            installed = set(_installed_codes())
        if frame.f_code in installed:
            return True
    return False


def _has_interrupted_frame(frame: FrameType) -> bool:
    """Tell whether a function was given its caller's frame, as Python calls a signal handler.

    That tells a handler which has put another one in its place before it raised.
    """
    code = frame.f_code
    # (To look at the variables of a frame keeps what they are; no function of ours is a handler.)
    if frame.f_back is None or code.co_filename.startswith(_PACKAGE):
        return False
    names = code.co_varnames[: code.co_argcount]
    values = [frame.f_locals.get(name) for name in names]
    if code.co_flags & inspect.CO_VARARGS:
        values += frame.f_locals.get(
            code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ()
        )
    return any(value is frame.f_back for value in values)


def _installed_codes() -> Iterator[CodeType]:
    """Yield the code of all handlers there are: one may have deleted what it was given."""
    for number in signal.valid_signals():
        found: object = signal.getsignal(number)
        while hasattr(found, "func"):  # functools.partial
            found = found.func
        # A function, a method, or an object of a class that has one.
        code = getattr(found, "__code__", None) or _code_of_calls(type(found))
        if isinstance(code, CodeType):
            yield code


def _code_of_calls(kind: type) -> object:
    return getattr(kind.__dict__.get("__call__"), "__code__", None)


class passing(ContextDecorator):
    """Lets interruptions pass as they were raised, where errors of ours were made of them."""

    _kinds: tuple[type[Exception], ...] = ()  # that are suppressed

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Raise the interruption that an error was made of.

        Raises
        ------
        BaseException
            Whatever the signal handler raised.
        """
        found = interruption(error)
        if found is not None and found is not error:
            raise_again(found)
        return found is None and isinstance(error, self._kinds)


class suppressing(passing):
    """`contextlib.suppress` for errors of what is done here: interruptions pass."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds


def raise_again(error: BaseException) -> NoReturn:
    """Raise an exception that was raised before, with the context that it had then."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error  # the traceback holds this frame
