"""Reports how far a dataset has been opened."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

# Called after each file with the number of indexed files and the total.
on_indexed: ContextVar[Callable[[int, int], None] | None] = ContextVar("on_indexed", default=None)
