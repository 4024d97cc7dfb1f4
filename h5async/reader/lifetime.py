"""Closes what is still open when the interpreter ends, and counts the forks of this process.

What has threads registers itself while it is open. After a fork its threads are not in the child,
where the count has changed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import Protocol

# Imported first: what is registered last runs first at exit, and h5py's function changes what HDF5
# uses, which threads of ours may be in.
import h5py  # noqa: F401

from h5async.system.waiting import Flag

EXIT_SECONDS = 10.0  # for work that was begun when the interpreter ends


class Closable(Protocol):
    """What is closed when the interpreter ends.

    Attributes
    ----------
    has_opened
        Set where it is open, and where it is not being opened.
    """

    has_opened: Flag

    def stop(self, *, at_exit: bool = False) -> None:
        """Ask for the end, and wait for nothing."""

    def join(self, patience_seconds: float | None) -> None:
        """Wait until all has ended."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_is_exiting = False  # the interpreter
num_forks = 0  # between the first process and this one, since this module was imported


def register(closable: Closable) -> None:
    """Have an object closed when the interpreter ends, as long as it exists.

    Raises
    ------
    SystemExit
        In a daemon thread of an interpreter that is ending.
    """
    _open.add(closable)
    if _is_exiting and threading.current_thread().daemon:
        raise SystemExit


def _note_fork() -> None:
    global num_forks
    num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def close_all() -> None:
    """Close all that is open; all are told to end before any is waited for."""
    global _is_exiting
    _is_exiting = True
    found = list(_open)
    for closable in found:
        closable.stop(at_exit=True)
    end = time.monotonic() + EXIT_SECONDS
    for closable in found:
        closable.join(max(0.0, end - time.monotonic()))
        # A daemon thread that opens files may hold h5py's lock, and would never release it.
        closable.has_opened.wait_set(max(0.0, end - time.monotonic()))
