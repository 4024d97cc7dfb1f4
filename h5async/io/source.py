"""Source, an open source: bytes that rows and metadata are read of, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.io.stamps import FileStamp

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in `collections.abc` from Python 3.12


class WebAddress(NamedTuple):
    """Where a source can be had by HTTP, for some time: by requests with these header lines.

    Answers must have the ETag.
    """

    url: str
    headers: Sequence[str]
    etag: str
    most_redirects: int


class MappedMirror(NamedTuple):
    """A file with blocks of a source in their places, and behind them a checksum of each.

    `path` and `file_id` tell whether it lies there still. `weights` of words are what checksums
    are made with; `marks` note which blocks this process has compared.
    """

    path: Path
    file_id: tuple[int, int]
    memory: NDArray[np.uint8]
    marks: NDArray[np.uint8]
    weights: NDArray[np.uint64]


class Source(ABC):
    """An open source. Safe to use from many threads.

    `identity` says what tells its states apart.
    """

    identity = "its stamp"
    at_once = 1  # ranges that one call of `get_ranges` is best given, if many threads call it
    retries = 0  # requests that were repeated, as far as it can tell

    @abstractmethod
    def stamp(self) -> FileStamp:
        """Return the state of what is open."""

    @abstractmethod
    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges, each a buffer of exactly the length asked for, valid while referenced.

        `ReadError` is raised if the source ends before, or is not what was opened any more. Called
        from many threads, without any lock.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it, and end calls that wait for bytes. Idempotent."""

    @property
    def mirror(self) -> MappedMirror | None:
        """What is kept of it on a local disk; None: nothing is."""
        return None

    def over(self, change: Callable[[Source], Source]) -> Source:
        """Return the source that `change` makes of this one, or of the one that this one keeps."""
        return change(self)

    def web_address(self) -> WebAddress | None:
        """Return where any other client can have it; None: nowhere."""
        return None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; fewer where the source ends."""
        there = max(0, min(nbytes, self.stamp().nbytes - offset))
        return bytes(self.get_ranges([offset], [there])[0])


class SourceOver(Source):
    """A source that has its bytes of another one, which is closed with it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.identity, self.at_once = source.identity, source.at_once

    def stamp(self) -> FileStamp:
        """Return the state of what is open."""
        return self.source.stamp()

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Those of the other source."""
        return self.source.retries

    def close(self) -> None:
        """Close it, and end calls that wait for bytes. Idempotent."""
        self.source.close()
