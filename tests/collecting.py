"""Reads batches through a `Collection`, into memory with canaries on both sides, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async import Field
from h5async.codec.filters import Filter
from h5async.core.binding import REFUSED, Core, address
from h5async.index.composition import join_layouts
from h5async.index.layout import DatasetLayout
from h5async.index.metadata import read_layouts
from h5async.index.shapes import Kind
from h5async.index.tables import ChunkTable
from h5async.io.source import FileStamp
from h5async.read.collection import Collection, _array
from h5async.read.coretables import CoreTables, Scratch, ScratchSize

GUARD_NBYTES, CANARY, FRESH = 64, 0xC3, 0x5A


class Guarded:
    """Memory of `nbytes` with canaries on both sides; `shift` 1: at an odd address."""

    def __init__(self, nbytes: int, shift: int = 1) -> None:
        self.all = np.full(nbytes + 2 * GUARD_NBYTES + 64, CANARY, np.uint8)
        begin = -self.all.ctypes.data % 64 + GUARD_NBYTES - 64 * (GUARD_NBYTES > 64) + shift
        self.inside = self.all[begin : begin + nbytes]
        self.renew()

    def renew(self) -> None:
        self.inside[...] = FRESH

    def is_fresh(self) -> bool:
        return bool((self.inside == FRESH).all())

    def is_intact(self) -> bool:
        kept = self.inside.copy()
        self.inside[...] = CANARY
        intact = bool((self.all == CANARY).all())
        self.inside[...] = kept
        return intact


def made_up(
    file: Any,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    offset: Iterable[int],
    nbytes: Iterable[int],
    *,
    numbers: Sequence[int] | None = None,
    masks: Sequence[int] | None = None,
    filters: tuple[Filter, ...] = (),
    axis: int = 0,
    dtype: Any = np.uint8,
    fill: bytes = b"",
    stamp: FileStamp | None = None,
) -> DatasetLayout:
    """Return the layout of a dataset that no file holds, of chunks that lie anywhere in one.

    `numbers`: those that are allocated; None: all. No `chunk_shape`: it is contiguous, and `offset`
    has one number.
    """
    dtype = np.dtype(dtype)
    chunks = None
    if chunk_shape:
        at = np.array(list(offset), np.int64)
        chunks = ChunkTable(
            None if numbers is None else np.array(numbers, np.int64),
            at,
            np.array(list(nbytes), np.int64),
            np.array([0] * at.size if masks is None else masks, np.uint32),
        )
    return DatasetLayout(
        file=str(file),
        stamp=FileStamp(0, 0) if stamp is None else stamp,
        path="data",
        shape=tuple(shape),
        dtype=dtype,
        sample_axis=axis,
        storage="chunked" if chunk_shape else "contiguous",
        fallback_reason=None,
        fill=np.frombuffer(fill or bytes(dtype.itemsize), dtype, 1).reshape(()),
        offset=-1 if chunk_shape else next(iter(offset)),
        chunk_shape=tuple(chunk_shape),
        filters=filters,
        chunks=chunks,
    )


def layouts_of(paths: Sequence[Path], fields: Mapping[str, Field]) -> list[DatasetLayout]:
    """Return the layouts of fields over some files."""
    several = [read_layouts(path, fields) for path in paths]
    return [join_layouts([layouts[name] for layouts in several]) for name in fields]


def most_kept_nbytes(collection: Collection) -> list[int]:
    """Return, by field, the maximum bytes of decoded chunks that were kept so far."""
    at, tables = collection._core.Store.from_address, collection.tables
    stores = (struct.store for struct in tables.fields)
    return [at(store).most_chunk_nbytes if store else 0 for store in stores]


class Collected:
    """A collection of fields, one slot of `rows` samples, and the scratch of a thread.

    Attributes
    ----------
    raw
        By field: the guarded memory of the slot.
    arrays
        By field: (rows, *row).
    """

    def __init__(
        self,
        core: Core,
        layouts: Sequence[DatasetLayout],
        rows: int,
        *,
        io: Any = "auto",
        most_files: int = 100,
        kept_nbytes: int = 0,
        transforms: Sequence[Any] | None = None,
        scratch: Scratch | None = None,
        shift: int = 1,
    ) -> None:
        self.layouts, self.rows = layouts, rows
        tables = CoreTables(
            core,
            layouts,
            io=io,
            most_files=most_files,
            kept_nbytes=[kept_nbytes] * len(layouts),
            transforms=transforms or [None] * len(layouts),
        )
        self.collection = Collection(core, tables)
        self.scratch = scratch or Scratch.allocate(*ScratchSize.of(layouts))
        self.shift = shift
        self.new_slot()

    def new_slot(self) -> None:
        layouts = self.layouts
        self.raw = [Guarded(self.rows * layout.row_nbytes, self.shift) for layout in layouts]
        self.arrays = [
            np.ndarray((self.rows, *layout.row_shape), layout.raw_dtype, raw.inside.data)
            for layout, raw in zip(layouts, self.raw, strict=True)
        ]
        self.batch = self.collection.new_batch(self.arrays, self.arrays, self.rows)

    def __enter__(self) -> Collected:
        return self

    def __exit__(self, *_: object) -> None:
        self.collection.close()

    def lies_in(self, memory: NDArray[np.uint8]) -> None:
        """Have the core take the bytes of the only file from memory; the caller keeps it."""
        row = self.collection.tables._table[0]
        row["path"], row["map"], row["map_nbytes"] = 0, address(memory), memory.size

    def plan(self, samples: Any, *, wanted: Any = None, threads: int = 1) -> int:
        wanted = self.collection.tables.reads if wanted is None else wanted
        for raw in self.raw:
            raw.renew()
        return self.collection.plan(
            self.batch, np.array(samples, np.int64).reshape(-1), wanted, threads
        )[0]

    def read(
        self, samples: Any, *, cuts: Sequence[int] = (), wanted: Any = None, threads: int = 1
    ) -> int:
        """Read a batch in shares that `cuts` separate; return how many items were refused."""
        count = self.plan(samples, wanted=wanted, threads=threads)
        edges = [0, *sorted(min(cut, count) for cut in cuts), count]
        refused = sum(
            self.collection.read(self.batch, start, stop, self.scratch)
            for start, stop in itertools.pairwise(edges)
        )
        for raw in self.raw:
            assert raw.is_intact(), "written beside the batch"
        return refused

    def left(self) -> dict[int, list[int]]:
        """Return, by field, the rows that the core has refused, or left to h5py."""
        items, plan = self.collection._items(self.batch), self.batch.plan
        items = items[items["status"] == REFUSED]
        wanted = _array(plan.sorted, plan.num_wanted + 1, self.collection._wanted)
        ranks = np.arange(wanted["rank"][-1])
        run = np.searchsorted(wanted["rank"], ranks, side="right") - 1
        position = wanted["position"][run].astype(np.int64) + ranks - wanted["rank"][run]
        run_position = _array(plan.run_position, plan.num_runs, np.int64)
        run_length = _array(plan.run_length, plan.num_runs, np.int64)
        found: dict[int, set[int]] = {}
        for item in items:
            here = slice(item["first_run"], item["first_run"] + item["num_runs"])
            rows = found.setdefault(int(item["field"]), set())
            if item["kind"] == Kind.ROWS:
                rows.update(position[here].tolist())
            elif item["kind"] == Kind.HEAP:
                rows.update(run_length[here].tolist())
            else:
                for first, length in zip(run_position[here], run_length[here], strict=True):
                    rows.update(range(int(first), int(first + length)))
        return {field: sorted(rows) for field, rows in sorted(found.items())}
