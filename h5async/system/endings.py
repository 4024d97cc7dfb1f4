"""Has C functions called when objects are gone."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial

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
