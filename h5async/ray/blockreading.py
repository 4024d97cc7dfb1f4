"""Reads blocks in a Ray task: positions enter, Arrow tables leave.

A batch becomes an Arrow table that shares its memory. A worker process opens a dataset once, and
keeps it open for later tasks.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.errors import ConfigError, DatasetError, ReadError
from h5async.index.changes import fingerprint
from h5async.io.shared import plain_memory
from h5async.order.selection import Selection
from h5async.reader.asyncreader import AsyncReader
from h5async.reader.batch import Batch
from h5async.samples.ragged import Images, Ragged
from h5async.samples.sparse import Csr

SPARSE = ("_indices", "_data")  # suffixes of the two columns of sparse rows


def columns_of(name: str, values: Any) -> dict[str, pa.Array]:
    """Return the columns for a field of a batch, by name.

    Rows of numbers become tensors; samples of any length, lists, or tensors of variable shape if
    they have more dimensions; sparse rows, two lists, ``NAME_indices`` and ``NAME_data``.

    Raises DatasetError if Arrow has no type for the values.
    """
    if isinstance(values, Csr):
        lists = (_lists(part, values.indptr) for part in (values.indices, values.data))
        return {f"{name}{suffix}": one for suffix, one in zip(SPARSE, lists, strict=True)}
    try:
        return {name: _column(values)}
    except (pa.ArrowException, NotImplementedError, TypeError) as error:
        raise DatasetError(
            f"field {name!r}: Arrow has no type for {values.dtype} ({error}); choose other fields"
            " (a path may end in one member of a compound), or cast numbers with Field's dtype"
        ) from error


def block_of(batch: Batch, further: Sequence[str] = ()) -> pa.Table:
    """Return a table of a batch's columns, and its `further` attributes, such as ``index``."""
    columns: dict[str, pa.Array] = {}
    for name in batch.keys():
        made = columns_of(name, batch[name])
        for twice in made.keys() & columns.keys():
            raise ConfigError(f"two fields have a column {twice!r}; give one of them another name")
        columns |= made
    return pa.table(columns | {name: pa.array(getattr(batch, name)) for name in further})


def values_nbytes(column: pa.ChunkedArray) -> int | None:
    """Return the bytes of the values in a column of samples of any length; None for others."""
    found = 0
    for chunk in column.chunks:
        if isinstance(chunk, ArrowVariableShapedTensorArray):
            chunk = chunk.storage.field("data")
        if not pa.types.is_large_list(chunk.type):
            return None
        found += chunk.flatten().nbytes
    return found


def _column(values: Any) -> pa.Array:
    if isinstance(values, Ragged):
        if isinstance(values, Images) or values.values.ndim > 1:
            return _tensors(values)
        return _lists(values.values, values.offsets)
    if values.dtype.names is not None:
        parts = [_column(np.ascontiguousarray(values[name])) for name in values.dtype.names]
        return pa.StructArray.from_arrays(parts, values.dtype.names)
    if values.ndim == 1:
        return pa.array(values)
    if values.dtype.kind not in "biuf":  # strings, or types that Arrow rejects
        return pa.array(values.tolist())
    return ArrowTensorArray.from_numpy(values)


def _lists(values: NDArray[Any], offsets: NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def _tensors(samples: Ragged) -> pa.Array:
    """Return tensors of variable shape.

    Like `ArrowVariableShapedTensorArray.from_numpy`, which copies, and rejects an empty list.
    """
    if isinstance(samples, Images):
        shapes = samples.shapes
    else:
        inner = np.broadcast_to(samples.values.shape[1:], (len(samples), samples.values.ndim - 1))
        shapes = np.column_stack((samples.lengths, inner))
    count, ndim = shapes.shape
    each = int(np.prod(samples.values.shape[1:]))
    data = _lists(samples.values.reshape(-1), samples.offsets * each)
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * ndim)
    shape = pa.ListArray.from_arrays(ends, pa.array(shapes.reshape(-1)))
    storage = pa.StructArray.from_arrays([data, shape], ["data", "shape"])
    some = np.zeros((1,) * ndim, samples.values.dtype)
    return ArrowVariableShapedTensorArray.from_numpy([some]).type.wrap_array(storage)


_KEPT = 4  # datasets that a process keeps open
_ATTEMPTS, _MOST_SECONDS = 10, 32
_STUB = "__bsp_stub"  # Ray's placeholder column in blocks with rows but without columns

_LARGE_NBYTES = 32 << 20  # malloc itself reuses smaller allocations

_kept: dict[str, tuple[BlockPlan, AsyncReader]] = {}
_lock = threading.Lock()
_free: deque[NDArray[np.uint8]] = deque(maxlen=2)  # memory of blocks no longer in use


class _Loan:
    """Owns memory while arrays use it; afterwards, the memory goes back to `_free`."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, _free.append, memory).atexit = False


def _block_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return the memory of a former block, if any: reading into new pages took 50% longer."""
    if nbytes < _LARGE_NBYTES:
        return plain_memory(nbytes)
    with _lock:
        memory = _free.popleft() if _free else None
    if memory is None or memory.nbytes < nbytes:
        memory = plain_memory(nbytes + nbytes // 8)  # the next block may be a little larger
    return np.asarray(_Loan(memory))[:nbytes]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The information that all tasks of a dataset share, through Ray's object store.

    `columns` maps the names of the columns read to their names in blocks; `further` ones are
    attributes of batches. An OSError is retried if its text contains or matches one of `retried`.
    """

    config: ReaderConfig
    selection: Selection
    fingerprints: Mapping[str, str]
    columns: Mapping[str, str]
    further: tuple[str, ...]
    retried: Sequence[str]

    def open(self) -> AsyncReader:
        """Open the dataset; ReadError if its files are not the ones planned for."""
        reader: AsyncReader = self._tried(lambda: AsyncReader(self.config))
        for name, layout in reader._engine.setup.layouts.items():
            if fingerprint([layout]) != self.fingerprints[name]:
                reader.close()
                raise ReadError(
                    f'{paths_text(self.config.hdf5_path)}: dataset "{layout.path}" has changed'
                    " since the Ray dataset was created, or this node has other files; create the"
                    " Ray dataset again, from files that all nodes can read"
                )
        return reader

    def read(self, reader: AsyncReader, begin: int, end: int) -> pa.Table:
        """Return a block with the samples at positions `begin` to `end`."""
        samples = self.selection.samples(np.arange(begin, end))
        batch = self._tried(lambda: reader._engine.delivery.read(samples, _block_memory))
        if not self.columns:
            return pa.table({_STUB: pa.nulls(batch.size)})
        block = block_of(batch, self.further).select(list(self.columns))
        return block.rename_columns(list(self.columns.values()))

    def _tried(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function, retrying after errors that match `retried`."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return function()
            except OSError as error:
                text = str(error)
                if not any(one in text or re.search(one, text) for one in self.retried):
                    raise
            time.sleep(min(2**attempt, _MOST_SECONDS) * random.random())
        return function()


@dataclass(frozen=True)
class BlockReader:
    """The function of a read task, which reads with the given number of `threads`.

    `edges` are the start positions of its blocks, and the end; `plan` references a `BlockPlan`.
    """

    plan: Any
    edges: tuple[int, ...]
    threads: int
    __name__ = "read_hdf5"  # in messages of Ray

    def __call__(self) -> Iterator[pa.Table]:
        """Yield the blocks, in order."""
        plan, reader = _opened(self.plan)
        parts = itertools.pairwise(self.edges)
        with ThreadPoolExecutor(self.threads, thread_name_prefix="h5async-ray") as pool:
            futures = (pool.submit(plan.read, reader, *part) for part in parts)
            begun = deque(itertools.islice(futures, self.threads))
            while begun:
                yield begun.popleft().result()
                begun.extend(itertools.islice(futures, 1))


def _opened(reference: Any) -> tuple[BlockPlan, AsyncReader]:
    """Return the plan and its reader, which this process keeps open."""
    key = reference.hex()
    with _lock:
        found = _kept.pop(key, None)
        if found is None:
            plan = ray.get(reference)
            found = plan, plan.open()
        _kept[key] = found
        while len(_kept) > _KEPT:
            _kept.pop(next(iter(_kept)))  # closed once no task uses it
    return found
