"""Calls functions that block side by side, so that who waits for them can be interrupted.

A call that waits for the network, outside of Python, cannot be ended. So it runs in a thread of its
own, and is left alone when nobody waits for it any more.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from h5async.errors import ReadError
from h5async.system.interruptions import Gate, suppressing

_MOST = 64  # at a time, of one call
_EXIT_SECONDS = 1.0

T = TypeVar("T")
_Todo = list[tuple[int, Callable[[], Any]]]
_Answers = queue.SimpleQueue[tuple[int, Any, Exception | None]]  # number, result, error


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep the garbage collector from running, as whoever holds HDF5's lock must while it waits.

    It runs in any thread. In one of those that are waited for, it may come to an object of h5py,
    which is freed under that lock: both would wait for ever.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


class SideBySide:
    """Calls functions for one owner, until it is stopped. Safe to use from many threads."""

    def __init__(self) -> None:
        self._waiting: set[_Answers] = set()
        self._is_stopped = False

    def call(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of functions, in order, or raise the first error.

        `ReadError` is raised if it was stopped.
        """
        answers: _Answers = queue.SimpleQueue()
        todo, found = [*enumerate(functions)][::-1], dict[int, T]()
        try:
            self._waiting.add(answers)
            if self._is_stopped:
                self.stop()
            for _ in range(min(len(functions), _MOST)):
                _thread.start_new_thread(_work, (todo, answers))
            while len(found) < len(functions):
                number, result, error = answers.get()
                if error is not None:
                    raise error
                found[number] = result
        finally:
            todo.clear()
            self._waiting.discard(answers)
        return [found[number] for number in range(len(functions))]

    def stop(self) -> None:
        """End all waits. Idempotent."""
        self._is_stopped = True
        for answers in tuple(self._waiting):
            answers.put((-1, None, ReadError("the source was closed while it was being read")))


def start(function: Callable[[], None]) -> None:
    """Have a thread call a function, for which the end of the interpreter waits a moment."""
    _thread.start_new_thread(_work, ([(0, function)], queue.SimpleQueue()))


_running: set[object] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
_has_ended = Gate()


def _taken(todo: _Todo) -> tuple[int, Callable[[], Any]] | None:
    with suppressing(IndexError):  # another thread was faster
        return todo.pop()
    return None


def _work(todo: _Todo, answers: _Answers) -> None:
    me = object()
    _running.add(me)
    try:
        for number, function in iter(partial(_taken, todo), None):
            answers.put((number, function(), None))
    except Exception as error:
        answers.put((-1, None, error))
    finally:
        _running.discard(me)
        _has_ended.notify()


@atexit.register
def _wait_at_exit() -> None:
    """Wait a moment: a thread that comes back into Python while that ends would crash it."""
    _has_ended.wait(lambda: not _running, _EXIT_SECONDS)
