"""Has the core plan and read a batch's rows, for all fields and from all files at once.

For each batch, sample numbers and the memory of a slot enter; rows leave. A batch is planned in one
call, and each share of it is read in one call. Rows that only h5py can read are listed. Items that
the core refuses are read again from a file that was checked, or raise an error.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import REFUSED, Core, Event, address
from h5async.errors import DamagedError, ReaderClosedError, ReadError
from h5async.index.changes import FileChanges
from h5async.index.shapes import Kind
from h5async.order.rows import numbers_in
from h5async.plan.records import NO_RANGES, ByteRanges, Ranges, union
from h5async.read.coretables import CoreTables, Scratch
from h5async.read.farsources import CLOSED, Held
from h5async.read.queue import Reading, SlotBatch
from h5async.read.rereading import (
    Chunk,
    Extent,
    FileEventError,
    Place,
    Reason,
    Rereader,
    error_of,
    error_of_element,
    find_chunk,
)
from h5async.system.interruptions import call_when_gone

Int64s = NDArray[np.int64]
MOST_ROUNDS = 64  # of fetching; each depends on what the one before has found


class Planned(NamedTuple):
    """The plan of a batch, in arrays of the core, valid until the slot is planned again.

    `items` are the core's `Item`s. Each run of rows has, as int64, its beginning within a chunk's
    rows, its beginning within the batch, and its length.
    """

    items: NDArray[Any]
    run_local: Int64s
    run_position: Int64s
    run_length: Int64s


class Collection:
    """Fields that the core reads; `tables` are closed with this. Safe to use from many threads."""

    def __init__(self, core: Core, tables: CoreTables, changes: FileChanges | None = None) -> None:
        self._core = core
        self.tables = tables
        self.rereader = Rereader(core, tables, changes)
        self._item, self._wanted = np.dtype(core.Item), np.dtype(core.Wanted)

    def new_batch(
        self, raw: Sequence[NDArray[Any]], out: Sequence[NDArray[Any]], rows: int
    ) -> SlotBatch:
        """Return memory for the plans of a slot, given its arrays, of at most `rows` samples."""
        targets = (self._core.Target * len(self.tables.fields))()
        batch = SlotBatch(self._core.BatchPlan(), targets, rows, (raw, out))
        self._aim(batch, raw, out)
        call_when_gone(batch, self._core.free_plan, ctypes.byref(batch.plan))
        return batch

    @staticmethod
    def _aim(batch: SlotBatch, raw: Sequence[NDArray[Any]], out: Sequence[NDArray[Any]]) -> None:
        batch.arrays = raw, out
        for target, one, other in zip(batch.targets, raw, out, strict=True):
            at = target.raw = address(one)
            target.out, target.capacity = at if other is one else address(other), len(one)
            target.is_wanted = True

    def plan(
        self,
        batch: SlotBatch,
        samples: Int64s,
        wanted: Sequence[bool],
        threads: int,
        num_samples: int | None = None,
        draw: NDArray[np.uint64] | None = None,
    ) -> tuple[int, int]:
        """Plan a batch for `threads` threads; return the number of items and their cost in bytes.

        `samples`, int64 (n,), must be below `num_samples` (None: that of the dataset) and at most
        as many as the slot has rows; else `IndexError` is raised. `wanted` says which fields to
        read; `draw`, from `epoch_keys` of `plan/crops.py`, is for randomly drawn parts of rows.
        `MemoryError` is raised if there is not enough memory for the plan.
        """
        samples = np.ascontiguousarray(samples, np.int64)
        if batch.held is not None:
            self.hold(batch, None)
        for target, is_wanted in zip(batch.targets, wanted, strict=True):
            target.is_wanted = is_wanted
        plan, count = batch.plan, samples.size
        planned = self._core.plan_batch(
            ctypes.byref(plan),
            self.tables.fields,
            batch.targets,
            len(self.tables.fields),
            address(samples),
            count,
            batch.rows,
            self.tables.num_samples if num_samples is None else num_samples,
            threads,
            None if draw is None else address(draw),
        )
        if planned < 0:
            raise IndexError(f"a batch of {count} samples is too large, or has one out of range")
        if not planned:
            raise MemoryError("no memory is left for the plan of a batch")
        return plan.num_items, plan.nbytes

    def read(self, batch: SlotBatch, start: int, stop: int, scratch: Scratch) -> int:
        """Read items of a plan; return the number of refused ones.

        `ReaderClosedError` is raised if they are no longer wanted.
        """
        if start >= stop:
            return 0
        refused = self._call("read_batch", batch, self.tables.sources, scratch, start, stop)
        if refused < 0:
            raise ReaderClosedError(CLOSED)
        return refused

    def new_reading(self, batch: SlotBatch, scratch: Scratch) -> Reading:
        """Return a `Reading` for `read_samples`, with a batch's plan."""
        worker, at = scratch.worker(self._core).struct, ctypes.addressof
        return Reading(at(batch.plan), at(batch.targets), at(worker), batch, scratch)

    def read_samples(
        self,
        reading: Reading,
        raw: Sequence[NDArray[Any]],
        out: Sequence[NDArray[Any]],
        samples: Int64s,
        draw: NDArray[np.uint64] | None,
    ) -> bool:
        """Read all fields of samples, in one call, to other memory than the batch was made for.

        Returns whether it succeeded; if not, for any reason, use `plan` and `read`.
        """
        batch, scratch = reading.batch, reading.scratch
        self._aim(batch, raw, out)
        at, keys = address(samples), None if draw is None else address(draw)
        numbers = len(self.tables.fields), samples.size, self.tables.num_samples
        sources = self.tables.sources
        done = bool(self._call("read_samples", batch, sources, scratch, at, keys, *numbers))
        batch.arrays = None  # the caller keeps them
        return done

    def _call(
        self, name: str, batch: SlotBatch, sources: Any, scratch: Scratch, *arguments: int | None
    ) -> int:
        """Call a function of the core for a plan and its sources; return its result."""
        worker = scratch.worker(self._core)
        done: int = getattr(self._core, name)(
            ctypes.byref(batch.plan),
            self.tables.fields if batch.fields is None else batch.fields,
            batch.targets,
            sources,
            ctypes.byref(worker.struct),
            *arguments,
        )
        scratch.note_return()
        return done

    def planned(self, batch: SlotBatch) -> Planned:
        """Return the plan of a batch."""
        plan = batch.plan
        runs = plan.run_local, plan.run_position, plan.run_length
        return Planned(self._items(batch), *(_array(run, plan.num_runs, np.int64) for run in runs))

    def read_ranges(self, ranges: Ranges, start: int, stop: int, scratch: Scratch) -> None:
        """Read ranges `start` to `stop` as stored, without decoding.

        `ReadError` is raised if one cannot be read, or its file was changed; `ReaderClosedError` if
        they are no longer wanted.
        """
        worker = scratch.worker(self._core)
        begins = start + np.flatnonzero(np.diff(ranges.source[start:stop], prepend=-1))
        for begin, end in itertools.pairwise([*begins.tolist(), stop]):
            number = int(ranges.source[begin])
            done = begin + self._core.read_ranges(
                self.tables.sources,
                ctypes.byref(worker.struct),
                *(address(column[begin:end]) for column in ranges[1:4]),
                address(ranges.memory),
                ranges.memory.nbytes,
                end - begin,
                number,
            )
            scratch.note_return()
            if scratch.stop.value:
                raise ReaderClosedError(CLOSED)
            if done < end:
                raise ReadError(
                    f"{self.tables.source_path(number)}: {ranges.nbytes[done]} bytes at byte"
                    f" {ranges.offset[done]} cannot be read"
                )

    # --- far sources (see `farsources.py`) --------------------------------------------------------

    def ranges(self, batch: SlotBatch, start: int, stop: int, scratch: Scratch) -> ByteRanges:
        """Return the byte ranges of far sources that items of a plan read.

        The places of variable-length values are found in the fetched bytes, so call it again then.
        """
        far = self.tables.far
        assert far is not None
        room, sources = 2 * (stop - start) + 64, self.tables.sources
        while True:
            found = np.zeros(room, self._core.Fetched)
            given = start, stop, address(found), room
            count = self._call("list_ranges", batch, sources, scratch, *given)
            if count <= room:
                columns = (found[name][:count] for name in ("source", "offset", "nbytes"))
                return far.places.ranges(*columns)
            room = count

    def hold(self, batch: SlotBatch, held: Held | None) -> None:
        """Have a plan read fetched bytes; None: forget them. The plan must not be in use."""
        count = 0 if held is None else held.table.size
        batch.plan.fetched = None if held is None else address(held.table)
        batch.plan.num_fetched, batch.held = count, held

    def fetch(
        self, batch: SlotBatch, scratch: Scratch, items: tuple[int, int] | None = None
    ) -> None:
        """Fetch the bytes of far sources for a plan, or some of its items, in the calling thread.

        `ReadError` is raised if that fails. The plan must not be in use.
        """
        far, wanted = self.tables.far, NO_RANGES
        if far is None:
            return
        self.hold(batch, None)
        start, stop = (0, batch.plan.num_items) if items is None else items
        for _ in range(MOST_ROUNDS):
            listed = self.ranges(batch, start, stop, scratch)
            more = union(wanted, listed)
            if more.same(wanted):
                return
            wanted = more
            self.hold(batch, far.get_here(wanted, batch.held))

    def refused(self, batch: SlotBatch) -> Int64s:
        """Return the numbers of the items that the core refused, which must be read again."""
        items = self._items(batch)
        return np.flatnonzero((items["status"] == REFUSED) & (items["kind"] != Kind.LEFT))

    def read_again(
        self, batch: SlotBatch, scratch: Scratch, damage: list[DamagedError] | None = None
    ) -> None:
        """Open the files of refused items again, check them, and read the items.

        `ReadError` names file, dataset and chunk or sample; errors about damaged data are added to
        `damage` instead, if given. `ReaderClosedError` is raised if items are no longer wanted.
        """
        refused, found = self.refused(batch), dict[int, DamagedError]()
        sources = self._items(batch)["source"][refused]
        for number in np.unique(sources).tolist():
            numbers = refused[sources == number].tolist()
            items = batch, numbers, scratch, None if damage is None else found
            if self.tables.is_far[number]:
                self._read_far_again(*items)
            else:
                self.rereader.read(number, partial(self._read_again, *items))
        if damage is not None:
            damage += found.values()

    def _read_again(
        self,
        batch: SlotBatch,
        numbers: Sequence[int],
        scratch: Scratch,
        damage: dict[int, DamagedError] | None,
        file: Any,
        is_written: bool,
    ) -> None:
        for number in numbers:
            if damage is not None:
                damage.pop(number, None)  # from an earlier try: the file has changed since
            if self._reads_again(batch, number, scratch, file):
                continue
            failure = scratch.worker(self._core).struct.failure
            if failure.reason == Reason.ABOVE_LIMIT:
                continue  # reported when they are delivered
            error = self._error_of(batch, number, scratch, file)
            if isinstance(error, DamagedError) and damage is not None and not is_written:
                damage[number] = error
            elif error is not None:
                raise error

    def _read_far_again(
        self,
        batch: SlotBatch,
        numbers: Sequence[int],
        scratch: Scratch,
        damage: dict[int, DamagedError] | None,
    ) -> None:
        """Fetch the bytes of items of a far source, and read them.

        They are read from memory only. Kept bytes are fetched, too, and compared with their
        checksums again: other processes may remove or overwrite a mirror at any time.
        """
        worker = scratch.worker(self._core).struct
        for number in numbers:
            worker.lists_all = 1
            try:
                self.fetch(batch, scratch, (number, number + 1))
            finally:
                worker.lists_all = 0
            file, source = self._core.File(), int(self._items(batch)["source"][number])
            self._core.open_again(self.tables.sources, source, ctypes.byref(file))
            file.fetched, file.num_fetched = batch.plan.fetched, batch.plan.num_fetched
            self._read_again(batch, [number], scratch, damage, file, False)
        self.hold(batch, None)

    def _error_of(
        self, batch: SlotBatch, number: int, scratch: Scratch, file: Any
    ) -> ReadError | None:
        """Return the error of an item; None if it could be read now, because its chunk is short."""
        failure, item = scratch.worker(self._core).struct.failure, self._items(batch)[number]
        layout, path = self.tables.layouts[item["field"]], self.tables.files[item["source"]].path
        if item["kind"] == Kind.HEAP:
            begin = self.tables.of_fields[item["field"]].layers[item["layer"]].begin
            error = error_of_element(failure, path, file, layout.heaps[begin[item["segment"]]])
        else:
            extent = self._extent_of(batch, item, failure.extent)
            found = find_chunk(layout, path, extent)
            may_be_short = failure.reason in (Reason.WRONG_SIZE, Reason.DAMAGED)
            if may_be_short and isinstance(found, Chunk):
                # Some writers leave out the part of a chunk beyond the dataset's edge.
                needed = found.layout.needed_nbytes(found.number)
                if needed < found.layout.chunk_nbytes and self._reads_again(
                    batch, number, scratch, file, needed
                ):
                    return None
            error = error_of(failure, path, file, extent, found)
        if isinstance(error, DamagedError):
            error.place = self._place_of(batch, item, failure.extent)
        return error

    def _place_of(self, batch: SlotBatch, item: Any, element: int) -> Place:
        plan, field = self.planned(batch), int(item["field"])
        runs = slice(item["first_run"], item["first_run"] + item["num_runs"])
        if item["kind"] == Kind.HEAP:
            is_it = plan.run_local[runs] == element
            return Place(field, plan.run_length[runs][is_it], are_runs=True)
        return Place(field, numbers_in(plan.run_position[runs], plan.run_length[runs]))

    def _reads_again(
        self, batch: SlotBatch, number: int, scratch: Scratch, file: Any, least_nbytes: int = 0
    ) -> bool:
        worker = scratch.worker(self._core)
        worker.struct.least_nbytes = least_nbytes
        done = self._call("read_again", batch, ctypes.byref(file), scratch, number)
        worker.struct.least_nbytes = 0
        if file.event == Event.STOPPED:
            raise ReaderClosedError(CLOSED)
        if file.event != Event.NONE:
            raise FileEventError(map_failed=file.event == Event.FAULTED)
        return bool(done)

    def _extent_of(self, batch: SlotBatch, item: Any, extent: int) -> Extent:
        """Return an item's place: chunk `extent`; negative: contiguous rows."""
        table = self.tables.of_fields[item["field"]]
        chunks = table.chunks
        if extent >= 0:
            return Extent(int(chunks.offset[extent]), int(chunks.nbytes[extent]), None)
        layer, segment = table.layers[item["layer"]], item["segment"]
        begin = int(layer.begin[segment])
        if item["kind"] != Kind.ROWS:
            return Extent(begin, 0, None)
        wanted = _array(batch.plan.sorted, batch.plan.num_wanted + 1, self._wanted)
        ranks = np.arange(item["first_run"], item["first_run"] + item["num_runs"])
        run = np.searchsorted(wanted["rank"], ranks, side="right") - 1
        samples = wanted["sample"][run] + ranks - wanted["rank"][run]
        rows = int(layer.row[segment]) + (samples - layer.first[segment]) * int(layer.step[segment])
        if layer.count[segment]:
            begin = int(chunks.offset[begin])
        return Extent(begin, 0, (int(rows.min()), int(rows.max())))

    def left(self, batch: SlotBatch) -> Iterator[tuple[int, Int64s]]:
        """Yield each field that h5py must read in part, with those rows of its memory."""
        items = self._items(batch)
        left = items[items["kind"] == Kind.LEFT]  # usually none
        for field in sorted(set(left["field"].tolist())):
            plan, items = self.planned(batch), left[left["field"] == field]
            run = numbers_in(items["first_run"], items["num_runs"])
            yield field, np.unique(numbers_in(plan.run_position[run], plan.run_length[run]))

    def _items(self, batch: SlotBatch) -> NDArray[Any]:
        return _array(batch.plan.items, batch.plan.num_items, self._item)

    def close(self) -> None:
        """Close the files and free their memory, which must not be in use. Idempotent."""
        self.tables.close()


def _array(memory: int | None, count: int, dtype: Any) -> NDArray[Any]:
    dtype = np.dtype(dtype)
    if not memory or not count:
        return np.zeros(0, dtype)
    block = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory)
    return np.frombuffer(block, dtype, count)
