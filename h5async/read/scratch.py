"""Holds the working memory of a thread, allocated once and used for every batch.

The layouts of all fields enter, and determine its size; a `Scratch` for each thread leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_int32
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, CoreTrace, CoreWorker
from h5async.errors import ReaderClosedError
from h5async.index.datasettable import kinds_of
from h5async.index.layout import DatasetLayout
from h5async.system.timeline import ThreadCounts, Timeline

Bytes = NDArray[np.uint8]
MOST_WOVEN = 4  # chunks that the core decodes before it writes their rows (weave.c)
CLOSED = "the reader was closed while a batch was being read"


class ScratchSize(NamedTuple):
    """Bytes of the buffers of a `Scratch`; `between` is the size of each of its buffers."""

    encoded: int
    raw_chunk: int
    between: int

    @classmethod
    def of(cls, layouts: Iterable[DatasetLayout]) -> ScratchSize:
        """Return the maximum over all fields."""
        sizes = (
            scratch_size(leaf)
            for layout in layouts
            for leaf, _ in kinds_of(layout)
            if leaf.chunks is not None
        )
        return cls(*map(max, *sizes, (0, 0, 0), (0, 0, 0)))


def scratch_size(leaf: DatasetLayout) -> ScratchSize:
    """Return what a dataset in chunks needs.

    Chunks without filters that hold whole rows need nothing: these, or parts of them, are read to
    where they go.
    """
    if not leaf.filters:
        return ScratchSize(0, 0 if leaf.rows_are_whole else leaf.chunk_nbytes, 0)
    assert leaf.chunks is not None
    encoded = int(leaf.chunks.nbytes.max(initial=0))
    along = leaf.grid[-1] if leaf.sample_axis < len(leaf.grid) - 1 else 1
    at_once = along if along <= MOST_WOVEN else 1
    return ScratchSize(encoded, at_once * leaf.chunk_nbytes, encoded_room(leaf.chunk_nbytes))


@dataclass
class Scratch:
    """The working memory of one thread, allocated once.

    `encoded` is for an encoded chunk; `raw_chunk` for a decoded one, or its needed parts, that
    does not go to a batch as a whole, or for those that split the last dimension of the same
    rows; `between` are three buffers: two for results between the filters of a pipeline, one for
    a decoder. `stop` is not 0 once the reader is being closed; `counts` is what its thread has
    done in Python. The compiled core notes what it does in `trace`, and work in Python is noted
    in `timeline`.
    """

    encoded: Bytes
    raw_chunk: Bytes
    between: tuple[Bytes, ...]
    stop: c_int32 = field(default_factory=c_int32)
    counts: ThreadCounts = field(default_factory=ThreadCounts)
    trace: CoreTrace | None = None
    timeline: Timeline | None = None
    _worker: CoreWorker | None = None

    def record(self, trace: CoreTrace | None) -> None:
        """Have the compiled core note what it does from now on; None: stop."""
        self.trace = trace
        if self._worker is not None:
            self._worker.record(trace)

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Add the time that a block takes to a counter of `counts`, and note it."""
        begin = perf_counter_ns()
        try:
            yield
        finally:
            spent = getattr(self.counts, counter) + perf_counter_ns() - begin
            setattr(self.counts, counter, spent)
            if self.timeline is not None:
                self.timeline.add(counter.removesuffix("_ns"), begin)

    def total(self) -> ThreadCounts:
        """Return what was done in Python and by the compiled core."""
        return self.counts if self._worker is None else self.counts.plus(self._worker.counts())

    def transform_ns(self) -> int:
        """Return the time that the compiled core transformed rows as it read them."""
        return 0 if self._worker is None else int(self._worker.struct.transform_ns)

    def require_open(self) -> None:
        """Raise `ReaderClosedError` once the reader is being closed: nobody wants the rest."""
        if self.stop.value:
            raise ReaderClosedError(CLOSED)

    def worker(self, core: Core) -> CoreWorker:
        """Return what this thread needs to call the compiled core; made on first use."""
        if self._worker is None:
            self._worker = core.new_worker(self.encoded, self.raw_chunk, self.between, self.stop)
            if self.trace is not None:
                self._worker.record(self.trace)
        return self._worker

    @classmethod
    def allocate(cls, encoded: int, raw_chunk: int, between: int) -> Scratch:
        """Reserve memory for a `ScratchSize`; pages that are never touched cost nothing."""
        sizes = encoded, raw_chunk, *[between] * 3
        first, second, *others = (np.empty(nbytes, np.uint8) for nbytes in sizes)
        return cls(first, second, tuple(others))


def encoded_room(chunk_nbytes: int) -> int:
    """Return the maximum size of an encoded chunk: two compressors in a row grow a little."""
    return chunk_nbytes + chunk_nbytes // 8 + 65536
