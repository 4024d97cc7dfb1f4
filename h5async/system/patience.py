"""A number of seconds enters; waiting that lasts no longer leaves: in turns.

The process may be stopped (SIGSTOP, a laptop that sleeps) while it waits. What counts is how long
it has waited, not how late it is: a stop costs one turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_TURNS, _LEAST_TURN_SECONDS = 8, 0.05


class Patience:
    """What is left of the time that may be waited, in one thread.

    Parameters
    ----------
    seconds
        To wait at most, in all; None: as long as it takes.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is None or seconds > threading.TIMEOUT_MAX:
            seconds = math.inf
        self._left = max(0.0, seconds)
        self._turn = max(self._left / _TURNS, _LEAST_TURN_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._left <= 1e-9

    def wait(self, wait: Callable[[float | None], bool]) -> bool:
        """Wait for a turn: return what ``wait(seconds)`` does, False where it was in vain."""
        if self._left == math.inf:
            return wait(None)
        turn, begin = min(self._turn, self._left), time.monotonic()
        has_come = wait(turn)
        self._left -= min(turn, time.monotonic() - begin) if has_come else turn
        return has_come
