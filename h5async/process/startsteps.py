"""Passes the steps of the first helper's start on to the thread that waits for them.

There are two: the helper has opened the files, and it has started its threads.
"""

from __future__ import annotations

import queue
import threading
from functools import partial

from h5async.errors import BatchTimeoutError
from h5async.system.patience import Patience

_STEP_SECONDS = 60.0  # that each step may take at least, where there is a timeout


class Steps:
    """Steps, or the exception that ended them. One thread puts them, and another one waits."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def put(self, error: BaseException | None = None) -> None:
        """Note that the next step is done, or what made it fail."""
        self._steps.put(error)

    def wait(self, what: str, timeout_seconds: float | None) -> None:
        """Wait for the next step.

        Parameters
        ----------
        what
            For the message, what the helper failed to do, as "a.h5: ... did not open the files".
        timeout_seconds
            The option ``timeout``; a step may take a minute at least.

        Raises
        ------
        BaseException
            What made the step fail.
        BatchTimeoutError
            If it takes too long.
        """
        if timeout_seconds is not None:
            timeout_seconds = min(max(timeout_seconds, _STEP_SECONDS), threading.TIMEOUT_MAX)
        found: list[BaseException | None] = []
        patience = Patience(timeout_seconds)
        while not patience.wait(partial(self._has_come, found)):
            if patience.is_over:
                raise BatchTimeoutError(
                    f"{what} within {timeout_seconds} s; set timeout to more than that (or HDF5"
                    " hangs, as it may on a damaged file)"
                )
        error = found.pop()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def _has_come(self, found: list[BaseException | None], seconds: float | None) -> bool:
        """Wait so many seconds for a step, and add it to `found`; return whether there was one."""
        try:
            found.append(self._steps.get(timeout=seconds))
        except queue.Empty:
            return False
        return True
