"""Takes batches through the phases of a fill, from the plan to `postprocess`.

A request enters; its outcome leaves. The work of a phase is cut into *shares*, which all threads
take from one heap, oldest batch first, so that a batch is ready as early as possible. The thread
that finishes the last share of a phase begins the next phase, so no thread waits.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DamagedError, Skipped, forget_frames
from h5async.fill.fetching import Fetcher
from h5async.fill.finishing import BatchDecoder, DecodedBatch, Postprocess
from h5async.fill.outcomes import NO_CALLS, Calls, FillOutcome
from h5async.fill.pool import Work, WorkPool
from h5async.fill.reading import BatchPlan, BatchReader, LeftRows
from h5async.fill.resident import HostCache, Residency
from h5async.order.sampling import FillRequest
from h5async.order.selection import NO_SAMPLES
from h5async.plan.records import PlanSlice, cut
from h5async.read.collection import MOST_ROUNDS
from h5async.read.farsources import Held
from h5async.read.queue import SlotBatch
from h5async.samples.assembly import Assembly, SlotMemory
from h5async.system.interruptions import interruption
from h5async.system.timeline import NO_BATCH, NO_FIELD

_MIN_SHARE_NBYTES = 256 * 1024  # takes about 25 µs to copy, as long as waking a thread


@dataclass(slots=True, eq=False)
class _Fill:
    """A batch being filled; `damage` was found in this attempt, `skipped` left out before it."""

    request: FillRequest
    samples: NDArray[np.int64] | None = None
    damage: list[DamagedError] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    plans: BatchPlan = ()
    busy_ns: int = 0
    is_kept: bool = False  # its rows come from the cache in host memory,
    is_resident: bool = False  # or are on the device already
    generation: int = 0  # see `Residency`
    images: DecodedBatch | None = None
    shares_left: int = 0
    error: BaseException | None = None
    rounds: int = 0  # of fetching

    @property
    def index(self) -> NDArray[np.int64]:
        """The sample numbers; none before they are known."""
        return NO_SAMPLES if self.samples is None else self.samples


class Phases:
    """The phases of a batch, from its request to its outcome. Safe to use from many threads.

    `assembly` makes the delivered arrays from a slot's memory, except those of the fields `left` to
    a device. The samples that are `resident` in memory need not be read. If damage is skipped, a
    batch with damaged samples is filled again without them.
    """

    def __init__(
        self,
        pool: WorkPool,
        reader: BatchReader,
        assembly: Assembly,
        left: Collection[str],
        images: BatchDecoder | None,
        postprocess: Postprocess | None,
        resident: Residency | None,
        calls: Calls,
        fetcher: Fetcher | None,
    ) -> None:
        self._pool, self._reader = pool, reader
        self._slots, self._recorder = reader.slots, reader.recorder
        self._assembly, self._left, self._images = assembly, left, images
        self._postprocess = postprocess
        several = [] if self._images is None else list(self._images.fields)
        self._images_field = several[0] if len(several) == 1 else NO_FIELD
        self._resident = resident
        self._cache = resident if isinstance(resident, HostCache) else None
        self._calls, self._fetcher = calls, fetcher
        # One for all batches, since a lock takes memory.
        self._shares_lock = threading.Lock()

    def begin(self, request: FillRequest) -> None:
        """Begin a fill by planning it; the later phases follow on their own."""
        self._fill(_Fill(request))

    def _fill(self, batch: _Fill) -> None:
        self._begin(batch, [partial(self._plan, batch)], self._begin_fetch)

    def resume(
        self,
        request: FillRequest,
        index: NDArray[np.int64],
        skipped: Sequence[Skipped],
        is_planned: bool,
        is_kept: bool,
        generation: int,
    ) -> None:
        """Continue a fill that the core has begun; rows that it has read are not read again.

        `skipped` samples are already left out of `index`; the plan is of this cache `generation`.
        """
        if not is_planned or (is_kept and self._cache is None):  # kept on a GPU: there is no plan
            self.begin(request)
            return
        batch = _Fill(request, skipped=[*skipped], is_kept=is_kept, generation=generation)
        batch.samples = index
        batch.plans = self._reader.planned(request.slot, are_kept=is_kept)
        self._go_on(batch, self._begin_left if self._reader.far is None else self._begin_fetch)

    def read(self, index: NDArray[np.int64], memory: SlotMemory) -> FillOutcome:
        """Read samples in the calling thread."""
        self._recorder.work_on(NO_BATCH)
        batch = _Fill(FillRequest(-1, -1, -1, -1, 0, samples=index))
        batch.samples, batch.skipped = self._reader.damage.left_out(index)
        arrays = self._read_here(batch, memory)
        while batch.damage:
            self._leave_out(batch, memory)
            if batch.error is not None:
                raise batch.error
            arrays = self._read_here(batch, memory)
        names: tuple[str, ...] = ()
        if self._postprocess is not None:
            where = f"{self._reader.file}: postprocess of given samples"
            given = batch.request._replace(samples=batch.index)
            made = self._postprocess(arrays, given, batch.index, where)
            arrays, names = tuple(made.values()), tuple(made)
        return FillOutcome(batch.index, arrays, names=names, skipped=tuple(batch.skipped))

    def _read_here(self, batch: _Fill, memory: SlotMemory) -> tuple[Any, ...]:
        """Read a batch in the calling thread; if it has damage, the arrays must not be used."""
        index, damage = batch.index, self._damage_of(batch)
        try:
            self._reader.read_rows(index, memory, damage)
            arrays = () if batch.damage else self._assembly.arrays(memory, index)
            if self._images is not None and not batch.damage:
                images = self._images.batch(arrays, index, -1, None, damage)
                images.work(lambda: self._pool.is_stopped, len(images.works))
                arrays = images.arrays
            return arrays
        except DamagedError as error:
            self._reader.damage.locate(error, index)
            if not self._reader.damage.is_skipped:
                raise
            batch.damage.append(error)
            return ()

    def close(self) -> None:
        """Release memory, and the functions whose owners refer to this object."""
        self._resident = self._cache = self._fetcher = None
        if self._images is not None:
            self._images.close()
        self._calls = NO_CALLS
        self._postprocess = None  # the user's function may refer to the reader

    # --- plan -------------------------------------------------------------------------------------

    def _plan(self, batch: _Fill) -> None:
        self._calls.before_fill(batch.request.slot)
        work = partial(self._plans, batch)
        batch.plans = self._reader.timed("plan", batch.request.serial, work)

    def _plans(self, batch: _Fill) -> BatchPlan:
        if batch.samples is None:
            samples = self._reader.samplings.samples(batch.request)
            batch.samples, batch.skipped = self._reader.damage.left_out(samples)
        if self._resident is not None:
            batch.generation = self._resident.generation
        if self._resident is None or not self._resident.has(batch.index):
            return self._reader.plan(batch.index, batch.request)
        if self._cache is not None:
            batch.is_kept = True
            return self._reader.plan_kept(batch.index, batch.request.slot)
        batch.is_resident = True
        return []

    # --- fetch ------------------------------------------------------------------------------------

    def _begin_fetch(self, batch: _Fill) -> None:
        """Have the fetcher get the batch's ranges of far sources, in several rounds if needed."""
        if self._fetcher is None:
            self._reader.fetch(batch.plans)
            self._begin_read(batch)
            return
        then = partial(self._fetched, batch)
        batch.rounds += 1
        if batch.rounds == 1 and self._fetcher.want_planned(batch.request, then):
            return
        ranges = self._reader.to_fetch(batch.plans) if batch.rounds <= MOST_ROUNDS else None
        if ranges is None:
            self._begin_read(batch)
        else:
            self._fetcher.want(batch.request, ranges, then)

    def _fetched(self, batch: _Fill, found: Held | BaseException) -> None:
        serial = batch.request.serial
        self._pool.add(serial, [partial(self._take, batch, found)])

    def _take(self, batch: _Fill, found: Held | BaseException) -> None:
        self._begin(batch, [partial(self._reader.hold, batch.plans, found)], self._begin_fetch)

    def _begin_read(self, batch: _Fill) -> None:
        # One share per thread: waiting for the GIL costs more than additional shares gain.
        shares = cut(batch.plans, max(1, self._pool.num_threads), _MIN_SHARE_NBYTES)
        works = [partial(self._read, batch, share) for share in shares]
        self._begin(batch, works, self._begin_left)

    # --- read and keep ----------------------------------------------------------------------------

    def _read(self, batch: _Fill, share: list[PlanSlice]) -> None:
        self._reader.read(batch.plans, share, self._slots.memory[batch.request.slot])

    def _begin_left(self, batch: _Fill) -> None:
        works = [partial(self._read_left, batch, some) for some in self._reader.left(batch.plans)]
        self._begin(batch, works, self._begin_keep)

    def _read_left(self, batch: _Fill, left: LeftRows | SlotBatch) -> None:
        # An error's traceback keeps callers' frames alive, so they must not refer to the memory.
        memory, damage = self._slots.memory[batch.request.slot], self._damage_of(batch)
        draw = self._reader.draw(batch.request.epoch)
        self._reader.read_left(left, batch.index, draw, memory, damage)

    def _begin_keep(self, batch: _Fill) -> None:
        self._let_go(batch)
        cache, index = self._cache, batch.index
        if cache is None or batch.is_kept:
            self._begin_transform(batch)
            return
        raws = self._slots.memory[batch.request.slot].raw
        works = [
            partial(cache.columns[column].keep, places, a, b, raws[column])
            for column, places in enumerate(cache.places(index))
            for a, b in self._row_shares(index.size, places.nbytes)
        ]
        self._begin(batch, works, self._note_kept)

    def _note_kept(self, batch: _Fill) -> None:
        if self._cache is not None:
            self._cache.add(batch.index, batch.generation)
        self._begin_transform(batch)

    # --- transform --------------------------------------------------------------------------------

    def _begin_transform(self, batch: _Fill) -> None:
        if batch.is_resident:
            self._finish(batch)
            return
        memory, reader = self._slots.memory[batch.request.slot], self._reader
        several = [
            (field, raw, out)
            for field, (raw, out) in enumerate(zip(memory.raw, memory.out, strict=True))
            if raw is not out and not reader.transforms_at_once(field, batch.plans)
        ]
        sizes = self._assembly.sizes(batch.index) if several else []
        works = [
            partial(reader.transform, field, raw[a:b], out[a:b], batch.index[a:b])
            for field, raw, out in several
            for a, b in self._row_shares(sizes[field], reader.row_transforms[field].nbytes)
        ]
        self._begin(batch, works, self._begin_images)

    def _arrays(self, batch: _Fill) -> tuple[Any, ...]:
        """Return the arrays of a batch; those left to a device, in the form that it expects."""
        return self._assembly.arrays(
            self._slots.memory[batch.request.slot], batch.index, self._left
        )

    # --- images -----------------------------------------------------------------------------------

    def _begin_images(self, batch: _Fill) -> None:
        if self._images is None:
            self._finish(batch)
            return
        place = batch.request.epoch, batch.request.slot, self._damage_of(batch)
        images = self._images.batch(self._arrays(batch), batch.index, *place)
        batch.images = images
        count = len(images.works)
        parts = max(1, min(self._pool.num_threads, count))
        works = [partial(self._decode_images, batch, images, count)] * parts
        meanwhile = []
        if parts > 1:
            # The thread that sees the first half begun has the next batch read first, so that
            # threads do not run out of images between two batches.
            works.insert(0, partial(self._decode_images, batch, images, count // 2))
            meanwhile = [self._pool.begin_next]
        self._begin(batch, works, self._finish, meanwhile)

    def _decode_images(self, batch: _Fill, images: DecodedBatch, end: int) -> None:
        must_end = partial(self._is_over, batch)
        work = partial(images.work, must_end, end)
        self._reader.timed("decode", batch.request.serial, work, self._images_field)

    def _is_over(self, batch: _Fill) -> bool:
        return batch.error is not None or self._pool.is_stopped

    # --- postprocess ------------------------------------------------------------------------------

    def _finish(self, batch: _Fill) -> None:
        arrays: tuple[Any, ...] = ()
        names = self._assembly.names
        try:
            if batch.error is None:
                arrays = self._arrays(batch) if batch.images is None else batch.images.arrays
            if batch.error is None and self._postprocess is not None:
                made = self._postprocessed(batch, arrays)
                names, arrays = tuple(made), tuple(made.values())
        except BaseException as error:
            self._note_error(batch, error)
        try:
            self._deliver(batch, arrays, names)
        finally:
            batch.error = None  # the frames of its traceback refer to the batch

    def _postprocessed(self, batch: _Fill, arrays: tuple[Any, ...]) -> dict[str, Any]:
        assert self._postprocess is not None
        request, where = batch.request, f"{self._reader.file}: postprocess of {batch.request}"
        work = partial(self._postprocess, arrays, request, batch.index, where)
        return self._reader.timed("postprocess", request.serial, work)

    def _let_go(self, batch: _Fill) -> None:
        if self._fetcher is not None:
            batch.rounds = 0
            self._reader.hold(batch.plans, None)
            self._fetcher.end(batch.request.serial)

    def _deliver(self, batch: _Fill, arrays: tuple[Any, ...], names: tuple[str, ...]) -> None:
        if self._pool.is_stopped:
            return
        self._let_go(batch)
        outcome = FillOutcome(
            batch.index,
            arrays,
            batch.error,
            batch.is_resident,
            batch.busy_ns / 1e9,
            self._reader.take_warnings(),
            names,
            tuple(batch.skipped),
        )
        self._calls.on_done(batch.request, outcome)

    # --- damaged samples --------------------------------------------------------------------------

    def _damage_of(self, batch: _Fill) -> list[DamagedError] | None:
        return batch.damage if self._reader.damage.is_skipped else None

    def _end(self, batch: _Fill) -> None:
        """Finish a batch; or fill it again without its damaged samples, if it has any."""
        if batch.damage and batch.error is None:
            place = batch.request.slot
            self._attempt(batch, lambda: self._leave_out(batch, self._slots.memory[place]))
            if batch.error is None:
                batch.images, batch.is_kept, batch.is_resident = None, False, False
                self._pool.add(batch.request.serial, [partial(self._fill, batch)])
                return
        self._finish(batch)

    def _leave_out(self, batch: _Fill, memory: SlotMemory) -> None:
        index, found = batch.index, dict[int, Skipped]()
        for error in batch.damage:
            self._reader.damage.locate(error, index)
            for one in [error] if error.samples else self._damaged_alone(batch, memory):
                where = one.filename or self._reader.file, one.dataset
                for sample in one.samples:
                    found.setdefault(sample, Skipped(*where, sample, str(one)))
        is_damaged = np.isin(index, list(found))
        if not is_damaged.any():  # all could be read one by one
            batch.error = batch.damage[0]
        self._reader.damage.add(found)
        batch.samples = index[~is_damaged]
        batch.skipped += map(found.__getitem__, index[is_damaged].tolist())
        batch.damage.clear()

    def _damaged_alone(self, batch: _Fill, memory: SlotMemory) -> Iterator[DamagedError]:
        """Read samples one by one to find those that HDF5 cannot read."""
        for sample in np.unique(batch.index)[:, np.newaxis]:
            try:
                self._reader.read_rows(sample, memory, epoch=batch.request.epoch)
            except DamagedError as error:
                self._reader.damage.locate(error, sample)
                yield error

    # --- shares and errors ------------------------------------------------------------------------

    def _row_shares(self, size: int, row_nbytes: int) -> Iterator[tuple[int, int]]:
        most = size * row_nbytes // _MIN_SHARE_NBYTES
        parts = max(1, min(self._pool.num_threads, size, most))
        return itertools.pairwise(size * part // parts for part in range(parts + 1))

    def _begin(
        self,
        batch: _Fill,
        works: Sequence[Work],
        then: Callable[[_Fill], None],
        meanwhile: Sequence[Work] = (),
    ) -> None:
        """Begin a phase: do all `works` in any threads, and `then` after all of them.

        Any works `meanwhile` are queued just before the last of `works`, and not waited for.
        """
        if not works or batch.error is not None or batch.damage:
            self._go_on(batch, then)
            return
        batch.shares_left = len(works)

        def run(work: Work) -> None:
            begin = time.perf_counter_ns()
            if batch.error is None and not self._pool.is_stopped:
                self._recorder.work_on(batch.request.serial)
                self._attempt(batch, work)
            with self._shares_lock:
                batch.busy_ns += time.perf_counter_ns() - begin
                batch.shares_left -= 1
                was_last = batch.shares_left == 0
            if was_last:
                self._go_on(batch, then)

        if len(works) == 1:
            run(works[0])
        else:
            *shares, last = [partial(run, work) for work in works]
            self._pool.add(batch.request.serial, [*shares, *meanwhile, last])

    def _go_on(self, batch: _Fill, then: Callable[[_Fill], None]) -> None:
        """Begin the next phase, or end a failed batch. No share of the batch is under way."""
        is_last = batch.error is not None or bool(batch.damage) or then == self._finish
        if is_last or not self._attempt(batch, partial(then, batch)):
            self._end(batch)

    def _attempt(self, batch: _Fill, work: Work) -> bool:
        """Do some of a batch's work; return whether it succeeded. If not, the batch fails.

        The error keeps its traceback, but its frames are cleared: they would keep memory alive.
        """
        error = _raised_by(work)
        if error is None:
            return True
        try:
            self._note_error(batch, error)  # raises interruptions, with their frames intact
            forget_frames(error)
        finally:
            del error  # its traceback has this frame if it was raised again
        return False

    def _note_error(self, batch: _Fill, error: BaseException) -> None:
        if interruption(error) is not None:
            raise error  # it belongs to the caller's thread
        if isinstance(error, DamagedError):
            self._reader.damage.locate(error, batch.index)
            if self._reader.damage.is_skipped:
                batch.damage.append(error)
                return
        batch.error = self._reader.failure(batch.request, error)


def _raised_by(work: Work) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None
