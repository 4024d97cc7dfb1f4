"""Opens far sources in a few threads, in the order in which HDF5 will open them.

Names enter; what was fetched of each leaves when it is asked for. HDF5 works on one file at a time,
and each would have it wait for the network. Threads begin with the first file that is asked for.
What is given back is kept for a moment, since a file is often opened several times.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from h5async.io.metadatafile import MetadataFile
from h5async.system.interruptions import Gate, Patience, join_threads, start_threads, suppressing

_THREADS = 32
_MOST_AHEAD = 64  # files
_MOST_KEPT = 4
_END_SECONDS = 1.0

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
        self._due: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers; -1 ends a thread
        self._next = 0  # all below were asked for, or passed over
        self._asked: set[int] = set()
        self._opened: dict[int, MetadataFile | None] = {}  # None if that failed
        self._kept: dict[str, MetadataFile] = {}
        self._gate = Gate()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def take(self, name: str, open_source: Open) -> MetadataFile | None:
        """Return a source that was opened ahead; None if it was not, or was taken before."""
        if name in self._kept:
            return self._kept.pop(name)
        number = self._number.pop(name, None)
        if number is None or (not self._threads and not self._start(number, open_source)):
            return None
        self._next = max(self._next, number)
        while self._next < min(len(self._names), number + _MOST_AHEAD):
            self._due.put(self._next)
            self._asked.add(self._next)
            self._next += 1
        if number not in self._asked:
            return None
        self._gate.wait(lambda: number in self._opened)
        return self._opened.pop(number)

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
        for _ in self._threads:
            self._due.put(-1)
        join_threads(self._threads, Patience(_END_SECONDS))
        for content in self._kept.values():
            content.source.close()
        for number in list(self._opened):
            self._close(number)

    def _start(self, first: int, open_source: Open) -> bool:
        """Start threads; return whether that was of use."""
        count = min(_THREADS, len(self._names) - first)
        if count < 2:
            return False
        threads = [
            threading.Thread(
                target=self._run, args=(open_source,), name=f"h5async-opening-{n}", daemon=True
            )
            for n in range(count)
        ]
        with suppressing(RuntimeError):  # there are no more threads
            start_threads(threads)
            self._threads = threads
        return bool(self._threads)

    def _run(self, open_source: Open) -> None:
        """Open sources, until there are no more, or this is closed."""
        while (number := self._due.get()) >= 0 and not self._is_closed:
            content = None
            with suppressing(Exception):  # who asks for it tries again, and finds out why
                content = open_source(self._names[number])
                content.begin_ahead()
            self._opened[number] = content
            self._gate.notify()
            if self._is_closed:
                self._close(number)

    def _close(self, number: int) -> None:
        content = self._opened.pop(number, None)
        if content is not None:
            content.source.close()
