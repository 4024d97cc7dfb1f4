"""Tells whoever wants to know how far a dataset has been opened."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

# Called after each file, with how many files are indexed, and how many there are.
on_indexed: ContextVar[Callable[[int, int], None] | None] = ContextVar("on_indexed", default=None)
