"""Waits no longer than a timeout, even in a process that is stopped for a while.

SIGSTOP, or a laptop that sleeps, may stop the process while it waits. The timeout counts time spent
waiting, not time of day. So waiting is cut into short waits, and a stop costs no more than one of
them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_SHORT_WAITS, _MIN_SHORT_WAIT_SECONDS = 8, 0.05


class Patience:
    """The rest of a timeout in seconds, None for no limit; for one thread."""

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
