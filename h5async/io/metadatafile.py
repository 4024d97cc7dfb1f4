"""A file object through which HDF5 reads the metadata of a far source, in few rounds of requests.

Byte ranges that HDF5 asks for enter; their bytes leave, fetched together with the bytes that HDF5
will probably read next. When HDF5 reads an object, the structures that its header refers to are
fetched level by level: all nodes of a level of a B-tree in parallel. When HDF5 reads a second and a
third object of a group, the others are fetched. Each round is one call of `Source.get_ranges`, in
the thread that HDF5 called from.
"""

from __future__ import annotations

import io
import queue
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from h5async.io.indexreferences import NONSENSE, Format, Place, find_places
from h5async.io.references import SUPERBLOCK_NBYTES, read_superblock, superblock_offsets
from h5async.io.source import collecting_later, start
from h5async.system.interruptions import suppressing

if TYPE_CHECKING:
    from h5async.io.source import Source

PAGE_NBYTES = 1 << 10
_MOST_PAGES = 1 << 18  # kept: 256 MiB
_BLOCK_NBYTES = 1 << 16  # fetched at first, and where no guess says what is needed
_MOST_BLOCK_NBYTES = 1 << 20  # when reading goes on after the last block
_GAP_NBYTES = 1 << 14  # between ranges that are fetched as one
_RANGE_NBYTES = 1 << 20
_FEW_RANGES, _FEW_NBYTES = 4, 1 << 15  # a few ranges get this minimum size; doubled each time
_ROUND_NBYTES = 1 << 25  # of guesses in a round
_ROUND_PLACES = 1 << 14
_WALK_NBYTES = 1 << 26  # of guesses before HDF5 gets the bytes it asked for
_AHEAD_NBYTES = 1 << 20  # of guesses before HDF5 opens a file
_MOST_PLACES = 1 << 18  # remembered
_MOST_AHEAD = 64  # files opened by threads
_MOST_KEPT = 4  # files that were given back: a file is often opened several times
_NEXT_OBJECTS = 32  # of a group, from the second one on


class MetadataFile(io.RawIOBase):
    """An open source as a Python file object; closing it leaves the source open.

    Used by one thread at a time, under h5py's lock. `ReadError` if the source cannot be read.
    """

    def __init__(self, source: Source) -> None:
        self.stamp = source.stamp()
        self.source = source
        self._nbytes = self.stamp.nbytes
        self._at = 0
        self._has_begun = False
        self._pages: dict[int, bytes] = {}  # the most recently used one comes last
        self._block_nbytes, self._block_end = _BLOCK_NBYTES, 0
        self._few_nbytes = _FEW_NBYTES
        self._form = Format()
        self._todo: list[tuple[Place, bool]] = []  # next comes last; True: follow all below it
        self._seen: set[tuple[int, int]] = set()
        self._objects: dict[int, Place] = {}  # of groups, by offset
        self._offsets: list[int] | None = None  # sorted keys of `_objects`; None: out of date
        self._groups: dict[int, list[Place]] = {}
        self._visits: dict[int, int] = {}  # by group: the number of objects that HDF5 has read
        self._left = 2 * self._nbytes  # bytes that may be fetched before guessing ends

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the beginning, from the current position, or from the end."""
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        """Read bytes into a buffer; return their number."""
        memory = memoryview(into).cast("B")
        nbytes = max(0, min(memory.nbytes, self._nbytes - self._at))
        with collecting_later():  # HDF5's lock is held
            memory[:nbytes] = self._read(self._at, nbytes)
        self._at += nbytes
        return nbytes

    # --- kept pages ------------------------------------------------------------------------------

    def _read(self, at: int, nbytes: int) -> memoryview:
        """Return bytes, after fetching missing ones and those that may be read next."""
        self.begin()
        missing = self._missing(at, nbytes)
        if missing and nbytes > _BLOCK_NBYTES:  # usually values, not metadata
            return memoryview(self.source.get_ranges([at], [nbytes])[0])
        is_new = self._visit(at, nbytes)
        if missing and not is_new:
            missing = self._missing(*self._block_at(at, nbytes))
        if missing or is_new:
            self._walk(missing)
            self._fetch(self._missing(at, nbytes))  # a safeguard: nothing should be missing now
        found = self._kept(at, nbytes)
        self._forget()
        return memoryview(found)

    def _kept(self, at: int, nbytes: int) -> bytes:
        first, end = at // PAGE_NBYTES, -(-(at + nbytes) // PAGE_NBYTES)
        pages = self._pages
        for page in range(first, end):
            pages[page] = pages.pop(page)
        begin = at - first * PAGE_NBYTES
        return b"".join([pages[page] for page in range(first, end)])[begin : begin + nbytes]

    def _missing(self, at: int, nbytes: int) -> list[int]:
        end = -(-min(at + nbytes, self._nbytes) // PAGE_NBYTES)
        return [page for page in range(at // PAGE_NBYTES, end) if page not in self._pages]

    def _block_at(self, at: int, nbytes: int) -> tuple[int, int]:
        """Return the range to fetch for bytes that no guess found."""
        is_next = 0 <= at - self._block_end < self._block_nbytes
        doubled = min(2 * self._block_nbytes, _MOST_BLOCK_NBYTES)
        self._block_nbytes = doubled if is_next else _BLOCK_NBYTES
        self._block_end = at + max(nbytes, self._block_nbytes)
        return at, self._block_end - at

    def _fetch(self, pages: Iterable[int], *, is_guess: bool = False) -> None:
        runs: list[list[int]] = []
        gap, most = _GAP_NBYTES // PAGE_NBYTES, _RANGE_NBYTES // PAGE_NBYTES
        for page in sorted(pages):
            if runs and page - runs[-1][1] <= gap and page - runs[-1][0] < most:
                runs[-1][1] = page + 1
            else:
                runs.append([page, page + 1])
        if not runs:
            return
        if is_guess and len(runs) <= _FEW_RANGES:  # structures they refer to often follow them
            for run in runs:
                run[1] = max(run[1], run[0] + self._few_nbytes // PAGE_NBYTES)
            self._few_nbytes = min(2 * self._few_nbytes, _MOST_BLOCK_NBYTES)
        offsets = [first * PAGE_NBYTES for first, _ in runs]
        ends = [min(end * PAGE_NBYTES, self._nbytes) for _, end in runs]
        lengths = [end - begin for begin, end in zip(offsets, ends, strict=True)]
        self._left -= sum(lengths)
        found = self.source.get_ranges(offsets, lengths)
        for (first, _), data in zip(runs, found, strict=True):
            view = memoryview(data)
            # Copied, because `data` may be a slice of a larger buffer.
            for number, at in enumerate(range(0, len(view), PAGE_NBYTES), first):
                self._pages[number] = bytes(view[at : at + PAGE_NBYTES])

    def _forget(self) -> None:
        surplus = len(self._pages) - _MOST_PAGES
        if surplus > 0:
            for page in [page for page, _ in zip(self._pages, range(surplus), strict=False)]:
                del self._pages[page]

    # --- guesses ---------------------------------------------------------------------------------

    def begin_ahead(self) -> None:
        """Fetch what HDF5 may read of a small file: all objects, up to `_AHEAD_NBYTES`."""
        self.begin()
        self._todo += [(one, True) for one in self._objects.values()]
        self._walk([], _AHEAD_NBYTES)
        self._todo = [(one, False) for one, _ in self._todo if one.group < 0]

    def begin(self) -> None:
        """Fetch the beginning of the source, and the metadata of the root group. Idempotent."""
        if self._has_begun:
            return
        self._fetch(self._missing(0, min(_BLOCK_NBYTES, self._nbytes)))
        self._has_begun = True
        for at in superblock_offsets(min(_BLOCK_NBYTES, self._nbytes) - SUPERBLOCK_NBYTES):
            with suppressing(*NONSENSE):
                self._form, root = read_superblock(self._kept(at, SUPERBLOCK_NBYTES), at)
                self._todo.append((root, False))
                break
        self._walk([])

    def _visit(self, at: int, nbytes: int) -> bool:
        """Note that HDF5 reads objects of groups; return whether that adds guesses."""
        if self._offsets is None:
            self._offsets = sorted(self._objects)
        first = bisect_left(self._offsets, at)
        met = self._offsets[first : bisect_left(self._offsets, at + nbytes, first)]
        found = [one for one in map(self._objects.__getitem__, met) if one[:2] not in self._seen]
        self._todo += [(one, False) for one in reversed(found)]
        if not met or met[0] != at:  # HDF5 reads something else that contains them
            return bool(found)
        place = self._objects[at]
        several = self._groups[place.group]
        visits = self._visits[place.group] = self._visits.get(place.group, 0) + 1
        if visits == 2 or (visits > 2 and place in found):
            begin = several.index(place)
            following = several[begin : begin + _NEXT_OBJECTS]
            if visits > 2:
                following = several[begin:] + several[:begin]
            self._todo += [(one, True) for one in reversed(following)]
        return bool(found) or visits == 2

    def _walk(self, pages: Sequence[int], left: int = _WALK_NBYTES) -> None:
        """Fetch pages, and follow guesses level by level, until `left` bytes are used up."""
        while pages or (self._todo and left > 0):
            batch, nbytes = self._next_places(min(left, _ROUND_NBYTES))
            left -= nbytes
            wanted = {*pages}
            for place, _ in batch:
                wanted.update(self._missing(place.offset, place.nbytes))
            pages = ()
            self._fetch(wanted, is_guess=bool(batch))
            below: list[tuple[Place, bool]] = []
            for place, is_deep in batch:
                data = self._kept(place.offset, place.nbytes) if place.find else b""
                for one in find_places(place, data, self._form):
                    if one.group < 0 or is_deep:
                        below.append((one, is_deep))
                    if one.group >= 0:
                        self._note(one)
            room = max(0, _MOST_PLACES - len(self._todo))
            self._todo += reversed(below[:room])

    def _next_places(self, most_nbytes: int) -> tuple[list[tuple[Place, bool]], int]:
        """Take the places of the next round that are not known yet; return them and their bytes."""
        found: list[tuple[Place, bool]] = []
        nbytes = 0
        while self._todo and len(found) < _ROUND_PLACES and nbytes < most_nbytes:
            place, is_deep = self._todo.pop()
            key = place[:2]
            room = self._nbytes - place.offset
            if key in self._seen or room <= 0 or len(self._seen) >= _MOST_PLACES or self._left <= 0:
                continue
            self._seen.add(key)
            place = place._replace(nbytes=min(place.nbytes, room))
            found.append((place, is_deep))
            nbytes += place.nbytes
        return found, nbytes

    def _note(self, place: Place) -> None:
        if place.offset not in self._objects and len(self._objects) < _MOST_PLACES:
            self._objects[place.offset] = place
            self._groups.setdefault(place.group, []).append(place)
            self._offsets = None


_Answer = queue.SimpleQueue[MetadataFile | None]  # None if it was not opened
Open = Callable[[str], MetadataFile]
_current: ContextVar[Ahead | None] = ContextVar("_current", default=None)


@contextmanager
def opening_ahead(names: Sequence[str]) -> Iterator[None]:
    """Open sources ahead while the body opens them one by one; see `take`."""
    ahead = Ahead(names)
    try:
        with ahead.used():
            yield
    finally:
        ahead.close()


def take(name: str, open_source: Open) -> tuple[MetadataFile, Ahead | None]:
    """Return an open source, and the `Ahead` to give it back to, if any.

    Raises like `open_source`, which opens sources, in any thread.
    """
    ahead = _current.get()
    found = None if ahead is None else ahead.take(name, open_source)
    return (open_source(name) if found is None else found), ahead


class Ahead:
    """Open sources, by name. Used by one thread at a time.

    Without names, it only keeps sources that were given back.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = list(dict.fromkeys(names))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._next = 0  # names before this one were begun or skipped
        self._begun: dict[str, _Answer] = {}
        self._kept: dict[str, MetadataFile] = {}
        self._is_closed = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have `take` use this object in the ``with`` block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def take(self, name: str, open_source: Open) -> MetadataFile | None:
        """Return a source that was opened ahead; None if it was not, or is already taken."""
        if name in self._kept:
            return self._kept.pop(name)
        number = self._number.pop(name, None)
        if number is None or len(self._names) < 2:
            return None
        self._next = max(self._next, number)
        with suppressing(RuntimeError):  # no thread can be started
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
        """Keep a source that is no longer in use, to be taken again."""
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
            with suppressing(Exception):  # whoever asks for it tries again, and gets the error
                content = open_source(name)
                content.begin_ahead()
        answer.put(content)
        if self._is_closed:
            _close(answer)


def _close(answer: _Answer) -> None:
    with suppressing(queue.Empty):  # it comes later, or another thread closes it
        content = answer.get_nowait()
        if content is not None:
            content.source.close()
