"""Writes blocks of datasets: arrays enter; chunks, encoded by all cores, leave for the file.

Threads cut arrays into chunks and encode them; one thread writes them, in the order given. `memory`
bounds the bytes waiting to be written: callers block until there is room. An error of a thread is
raised by the next call.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from h5async.codec.encoders import find_encoder
from h5async.core.binding import address
from h5async.index.chunks import filters_of
from h5async.index.hdf5 import edges_are_raw
from h5async.packing.rawvalues import HVL_NBYTES, raw_fill, write_raw
from h5async.packing.safefile import SafeFile
from h5async.system.interruptions import Gate, Patience, join_threads, start_threads
from h5async.system.resources import usable_cores

T = TypeVar("T")
Offset = tuple[int, ...]
Chunk = tuple[Offset, Any, int]  # its offset, its bytes, its filter mask
_TASK_NBYTES = 1 << 20  # small chunks are encoded in groups of about this size


class ChunkWriter(AbstractContextManager["ChunkWriter"]):
    """Writes to a file. For use by one thread, which may call h5py meanwhile.

    `threads` is the number of encoding threads; None: one per core. `memory` is the maximum number
    of bytes waiting to be written; a single block may exceed it.
    """

    def __init__(
        self, safe: SafeFile, *, threads: int | None = None, memory: int = 256 << 20
    ) -> None:
        self._safe, self._memory = safe, memory
        self._encoders = ThreadPoolExecutor(threads or usable_cores(), "h5async encoder")
        self._tasks: SimpleQueue[tuple[Callable[[], object], int] | None] = SimpleQueue()
        self._given = self._done = 0  # bytes plus tasks: set by the caller and the writer thread
        self._progress = Gate()
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._write_all, name="h5async writer", daemon=True)
        start_threads([self._thread])

    def open(self, dataset: h5py.Dataset, raw: np.dtype[Any] | None = None) -> DatasetWriter:
        """Return a writer to a dataset.

        `raw` is the void dtype of elements that are given as stored, whatever their datatype.
        """
        return DatasetWriter(self, dataset, raw)

    def call(self, function: Callable[[], object], nbytes: int = 0) -> None:
        """Have the writing thread call a function, after all work given before.

        `nbytes` is the memory that the function holds until then.
        """
        self._wait_until(min(self._given, self._given + nbytes - self._memory))
        self._given += nbytes + 1
        self._tasks.put((function, nbytes + 1))

    def encoded(self, encode: Callable[[], list[T]]) -> Callable[[], list[T]]:
        """Have a thread encode chunks or elements; return a function that waits for the result."""
        return self._encoders.submit(encode).result

    def commit(self, state: Mapping[str, Any], *, now: bool = False) -> None:
        """Commit all work given before, with a state: if `now`, or if a commit is due."""
        self.call(lambda: self._safe.commit(state) if now or self._safe.is_due else None)

    def flush(self) -> None:
        """Wait until all work given before is written."""
        self._wait_until(self._given)

    def close(self) -> None:
        """Stop all threads; discard anything not yet written. Idempotent."""
        self._is_stopped = True
        self._tasks.put(None)
        self._encoders.shutdown(wait=True, cancel_futures=True)
        join_threads([self._thread], Patience(None))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush, unless an error was raised, and close."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _wait_until(self, done: int) -> None:
        self._progress.wait(lambda: self._done >= done or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _write_all(self) -> None:
        for write, nbytes in iter(self._tasks.get, None):
            try:
                if self._failure is None and not self._is_stopped:
                    write()
                    self._safe.check()
            except BaseException as error:
                self._failure = error
            self._done += nbytes
            self._progress.notify()


class DatasetWriter:
    """Writes to a dataset, growing it up to its maximum shape. Takes ownership of given arrays."""

    def __init__(
        self, writer: ChunkWriter, dataset: h5py.Dataset, raw: np.dtype[Any] | None = None
    ) -> None:
        self._writer, self._dataset, self._is_raw = writer, dataset, raw is not None
        self._chunks: tuple[int, ...] | None = dataset.chunks
        self._dtype, self._rows = raw or dataset.dtype, dataset.shape[0]
        self._encode = None
        plist = dataset.id.get_create_plist()
        if self._chunks is not None and not self._dtype.hasobject and not edges_are_raw(plist):
            self._encode = find_encoder(filters_of(plist))
            self._fill = dataset.fillvalue if raw is None else raw_fill(dataset.id, raw)

    def write(self, offset: Offset, values: NDArray[Any], nbytes: int | None = None) -> None:
        """Write values to a block of the dataset that begins at `offset`.

        The block must consist of whole chunks, except at the end of the dataset, unless HDF5
        encodes them. `nbytes` is the size of variable-length elements.
        """
        if self._encode is None:
            size = values.nbytes if nbytes is None else nbytes
            self._writer.call(partial(self._write_by_hdf5, offset, values), size)
            return
        assert self._chunks is not None
        self._require_grid(offset, values.shape)
        step = self._chunks[0] * max(1, _TASK_NBYTES // max(1, self._chunks[0] * values[:1].nbytes))
        for at in range(0, len(values), step):
            part = values[at : at + step]
            begin = (offset[0] + at, *offset[1:])
            chunks = self._writer.encoded(partial(self._encoded, begin, part))
            self._writer.call(
                partial(self._write_chunks, chunks, begin[0] + len(part)), part.nbytes
            )

    def write_stored(self, chunks: Sequence[Chunk]) -> None:
        """Write chunks in their stored form, each with its offset and filter mask.

        The dataset does not grow.
        """
        nbytes = sum(len(data) for _, data, _ in chunks)
        self._writer.call(partial(self._write_chunks, lambda: chunks, 0), nbytes)

    def write_elements(
        self, row: int, several: Sequence[Callable[[], Sequence[NDArray[Any]]]], nbytes: int
    ) -> None:
        """Write variable-length elements, `nbytes` in all, from `row` on, once they are made."""

        def write() -> None:
            found = [element for made in several for element in made()]
            self._grow(row + len(found))
            pairs = [(one.size, address(one)) for one in found]
            elements = np.array(pairs, np.uint64).reshape(-1, 2)
            write_raw(self._dataset.id, (row,), elements.view(f"V{HVL_NBYTES}")[:, 0])

        self._writer.call(write, nbytes)

    def _require_grid(self, offset: Offset, shape: tuple[int, ...]) -> None:
        assert self._chunks is not None
        ends = self._dataset.maxshape
        for at, count, chunk, end in zip(offset, shape, self._chunks, ends, strict=True):
            if at % chunk or (count % chunk and end is not None and at + count < end):
                raise ValueError(
                    f"a block of shape {shape} at {offset} is not one of chunks of {self._chunks}"
                )

    def _encoded(self, offset: Offset, values: NDArray[Any]) -> list[Chunk]:
        assert self._encode is not None
        found = []
        for inside, block in self._blocks(values):
            data, mask = self._encode(block.reshape(-1).view(np.uint8))
            found.append((tuple(map(sum, zip(offset, inside, strict=True))), data, mask))
        return found

    def _blocks(self, values: NDArray[Any]) -> Iterator[tuple[Offset, NDArray[Any]]]:
        """Yield whole chunks with their offsets in `values`; pad them with the fill value."""
        assert self._chunks is not None
        grid = map(range, [0] * values.ndim, values.shape, self._chunks)
        for inside in itertools.product(*grid):
            block = values[
                tuple(map(slice, inside, map(sum, zip(inside, self._chunks, strict=True))))
            ]
            if block.shape == self._chunks:
                yield inside, np.ascontiguousarray(block, self._dtype)
            else:
                whole = np.full(self._chunks, self._fill, self._dtype)
                whole[tuple(map(slice, block.shape))] = block
                yield inside, whole

    def _write_chunks(self, chunks: Callable[[], Sequence[Chunk]], rows: int) -> None:
        self._grow(rows)
        for offset, data, mask in chunks():
            self._dataset.id.write_direct_chunk(offset, data, mask)

    def _write_by_hdf5(self, offset: Offset, values: NDArray[Any]) -> None:
        self._grow(offset[0] + len(values))
        if self._is_raw:
            write_raw(self._dataset.id, offset, values)
            return
        if self._dtype.hasobject:  # h5py might take these for arrays of more dimensions
            space, memory = self._dataset.id.get_space(), h5py.h5s.create_simple(values.shape)
            space.select_hyperslab(offset, values.shape)
            self._dataset.id.write(memory, space, values, h5py.h5t.py_create(self._dtype))
            return
        ends = map(sum, zip(offset, values.shape, strict=True))
        self._dataset[tuple(map(slice, offset, ends))] = values

    def _grow(self, rows: int) -> None:
        most = self._dataset.maxshape[0]
        rows = rows if most is None else min(rows, most)
        if rows > self._rows:
            self._dataset.resize(rows, 0)
            self._rows = rows
