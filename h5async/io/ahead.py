"""Opens far sources in threads, in the order in which HDF5 will open them.

Names enter; what was fetched of each leaves when it is asked for. HDF5 works on one file at a time,
and each would have it wait for the network. Threads begin with the first file that is asked for.
What is given back is kept for a moment, since a file is often opened several times.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from h5async.io.metadatafile import MetadataFile
from h5async.io.sidebyside import start
from h5async.system.interruptions import suppressing

_MOST_AHEAD = 64  # files
_MOST_KEPT = 4

_Answer = queue.SimpleQueue[MetadataFile | None]  # None if it was not opened
Open = Callable[[str], MetadataFile]
_current: ContextVar[Ahead | None] = ContextVar("_current", default=None)


@contextmanager
def opening_ahead(names: Sequence[str]) -> Iterator[None]:
    """Open sources ahead while the body opens them one by one; see `take`."""
    ahead = Ahead(names)
    token = _current.set(ahead)
    try:
        yield
    finally:
        _current.reset(token)
        ahead.close()


def take(name: str, open_source: Open) -> tuple[MetadataFile, Ahead | None]:
    """Return an open source, and who it may be given back to.

    Raises as `open_source`, by which sources are opened in any thread.
    """
    ahead = _current.get()
    found = None if ahead is None else ahead.take(name, open_source)
    return (open_source(name) if found is None else found), ahead


class Ahead:
    """Open sources, by their names. Used by one thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._next = 0  # all below were begun, or passed over
        self._begun: dict[str, _Answer] = {}
        self._kept: dict[str, MetadataFile] = {}
        self._is_closed = False

    def take(self, name: str, open_source: Open) -> MetadataFile | None:
        """Return a source that was opened ahead; None if it was not, or was taken before."""
        if name in self._kept:
            return self._kept.pop(name)
        number = self._number.pop(name, None)
        if number is None or len(self._names) < 2:
            return None
        self._next = max(self._next, number)
        with suppressing(RuntimeError):  # there are no more threads
            for one in self._names[self._next : number + _MOST_AHEAD]:
                answer = _Answer()
                start(partial(self._open, one, open_source, answer))
                self._begun[one] = answer
                self._next += 1
        if name not in self._begun:
            return None
        found = self._begun[name].get()
        del self._begun[name]
        return found

    def give_back(self, name: str, content: MetadataFile) -> None:
        """Take a source that is not used any more."""
        if self._is_closed or name in self._kept:
            content.source.close()
            return
        self._kept[name] = content
        if len(self._kept) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept))).source.close()

    def close(self) -> None:
        """Close all sources that were not taken."""
        self._is_closed = True
        for content in self._kept.values():
            content.source.close()
        for answer in self._begun.values():
            _close(answer)

    def _open(self, name: str, open_source: Open, answer: _Answer) -> None:
        content = None
        if not self._is_closed:
            with suppressing(Exception):  # who asks for it tries again, and finds out why
                content = open_source(name)
                content.begin_ahead()
        answer.put(content)
        if self._is_closed:
            _close(answer)


def _close(answer: _Answer) -> None:
    with suppressing(queue.Empty):  # it comes later, or someone else closes it
        content = answer.get_nowait()
        if content is not None:
            content.source.close()
