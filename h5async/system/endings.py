"""Has functions of C called when objects are gone."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial

_references: dict[int, weakref.ref[object]] = {}
# Not at the end of the interpreter: a thread may still use what would be freed.
atexit.register(_references.clear)


def call_when_gone(owner: object, function: Callable[..., object], *arguments: object) -> None:
    """Have a function of C called when an object is gone; what is registered last comes first.

    (`weakref.finalize` is Python code: what a signal handler raises in there is lost, and the
    function not called. Here `next` calls the function, and removes the reference.)
    """
    removed: list[int] = []
    calls = zip(
        map(function, *zip(arguments, strict=True)), map(_references.pop, removed), strict=False
    )
    removed.append(id(removed))
    _references[removed[0]] = weakref.ref(owner, partial(next, calls))
