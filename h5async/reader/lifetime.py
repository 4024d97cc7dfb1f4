"""Closes open readers when the interpreter ends, and counts the forks of this process.

After a fork, the child has none of the readers' threads, and a higher count.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import Any

# Imported first, so that our exit handler runs before h5py's, which changes HDF5 while our threads
# may still be in it.
import h5py  # noqa: F401

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


@atexit.register
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
