"""A store of sources in memory: the second implementation of `h5async.io.stores`, for tests.

It is what a store must be, and no more: names lead to bytes and a tag, which tells one state of a
source from the next, as an ETag does.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from h5async.errors import ReadError
from h5async.io.diskcache import keeping
from h5async.io.source import FileStamp, Source
from h5async.io.stores import Store, register

SCHEME = "memory"


class Held(NamedTuple):
    """What a name leads to: bytes, and a tag."""

    data: bytes | mmap.mmap
    tag: str


class MemorySource(Source):
    """An open source: the one that lies at its name, as long as that is the one that was opened."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._tag = store.at(name).tag

    def stamp(self) -> FileStamp:
        held = self._store.at(self._name)
        return FileStamp.of_tag(held.tag, len(held.data))

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[bytes]:
        held, found = self._store.at(self._name), []
        self._store.rounds += 1
        for offset, nbytes in zip(offsets, lengths, strict=True):
            if held.tag != self._tag:
                raise ReadError(f"{self._name} was changed while it was open")
            if nbytes and offset + nbytes > len(held.data):
                raise ReadError(f"{self._name} ends before byte {offset + nbytes}")
            found.append(held.data[offset : offset + nbytes])
            self._store.reads += 1
            self._store.nbytes += nbytes
        return found

    def close(self) -> None:
        self._store.open_sources.discard(self)


class MemoryStore(Store):
    """Sources in memory.

    Attributes
    ----------
    held
        By name.
    open_sources
        Those that are open.
    rounds, reads, nbytes
        The numbers of calls that read ranges, of ranges, and of their bytes.
    """

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.open_sources: set[MemorySource] = set()
        self.rounds = self.reads = self.nbytes = 0

    def open(self, name: str, *, is_patient: bool = False) -> Source:
        source = MemorySource(self, name)
        self.open_sources.add(source)
        return keeping(name, source)

    def at(self, name: str) -> Held:
        if name not in self.held:
            raise FileNotFoundError(2, "there is no such source", name)
        return self.held[name]

    def put(self, path: Path, name: str = "") -> str:
        """Take a file, or what it holds now; return the name of the source."""
        name = name or f"{SCHEME}://bucket/{path.name}"
        with path.open("rb") as file:
            # (Some files of the corpus are huge, and nearly all of them is holes.)
            is_huge = path.stat().st_size > 1 << 24
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if is_huge else file.read()
        self.held[name] = Held(data, hashlib.sha256(data[: 1 << 24]).hexdigest())
        return name


def new_store() -> MemoryStore:
    """Return a store of its own for a test, which all names of the scheme lead to from now on."""
    store = MemoryStore()
    register(SCHEME, store)
    return store
