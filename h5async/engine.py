"""Options enter; filled batches leave: `Engine` wires layouts, order, filler, slots and device.

It does not know the reader that the caller holds, so that a reader which is dropped unclosed can be
collected, and its engine closed.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from h5async.config import ReaderConfig
from h5async.deliver.device import Device, DeviceSlot, HostDevice, find_device, needs_host
from h5async.deliver.devicedecode import NotDecoded, find_formats
from h5async.deliver.slots import SlotRing
from h5async.deliver.trial import DecodeTrial
from h5async.errors import (
    ConfigError,
    DeviceError,
    ReaderClosedError,
    ReadError,
    is_lack_of_memory,
    out_of_memory,
    taking_memory,
)
from h5async.fill.dataset import Samplings, open_dataset
from h5async.fill.filling import Filler
from h5async.fill.limits import MemoryBudget, wanted_kept_nbytes
from h5async.fill.pool import THREAD_NAME
from h5async.fill.records import FillOutcome, FillRequest
from h5async.fill.resident import Budget, Residency
from h5async.index.cost import direct_share
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.order.ranks import Rank, Source, find_source, may_change
from h5async.order.sampling import Sampling
from h5async.order.schedule import Course, Schedule
from h5async.plan.stored import StoredFormat
from h5async.plan.transform import RowTransform, row_transform
from h5async.process.helper import HelperFiller
from h5async.stats import ReaderStats, StageTimes, Waits
from h5async.system.interruptions import interruption, passing

_STATE_VERSION = 1
_MOMENT_SECONDS = 0.5
_EXIT_SECONDS = 10.0  # for work that was begun when the interpreter ends
_REMEDY = "free some memory, or raise the limit that is set to this process"
_MOST_RANKS = 1 << 20  # a saved state is not to be trusted with more

_log = logging.getLogger("h5async")

_forks = 0  # between the first process and this one, since this module was imported


def _note_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


_is_exiting = False  # the interpreter

# Those whose threads are at work when the interpreter ends.
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    global _is_exiting
    _is_exiting = True
    engines = list(_open_engines)
    for engine in engines:
        engine.stop(at_exit=True)
    end = time.monotonic() + _EXIT_SECONDS
    for engine in engines:  # all were told before any is waited for
        engine.join(max(0.0, end - time.monotonic()))
        # A daemon thread that opens files may have h5py's lock, and would take it along.
        engine.has_opened.wait(max(0.0, end - time.monotonic()))


class Filled(NamedTuple):
    """A batch as the consumer takes it from its slot."""

    outcome: FillOutcome
    arrays: tuple[Any, ...]
    error: BaseException | None


class Engine:
    """Everything of a reader but its facade.

    Parameters
    ----------
    config
        The options.

    Raises
    ------
    H5AsyncError
        As `AsyncReader` says.
    """

    def __init__(self, config: ReaderConfig) -> None:
        # How many threads there are is settled here: affinity and quotas may change later.
        self.config = config.model_copy(update={"num_threads": config.thread_count})
        self.fewer_threads_do = config.num_threads is None
        self.forks = _forks
        self.ring: SlotRing[Filled] = SlotRing(config.prefetch)
        self.filler: Filler | HelperFiller | None = None
        self.has_opened = threading.Event()  # or is not being opened
        self.has_opened.set()
        self.slots: list[DeviceSlot] = []
        self.device: Device = HostDevice()

    @passing()
    def open(self) -> None:
        """Open the dataset, and start the threads. `close` ends what an exception left half done.

        Raises
        ------
        H5AsyncError
            As `AsyncReader` says.
        """
        self.has_opened.clear()
        try:
            _open_engines.add(self)
            if _is_exiting and threading.current_thread().daemon:
                raise SystemExit
            self._open_dataset()
            self.ring.check_open()  # at exit, it may have been closed meanwhile
        finally:
            self.has_opened.set()

    def _open_dataset(self) -> None:
        with taking_memory(f"{self.config.hdf5_path} cannot be opened", _REMEDY):
            if self.config.workers == "thread":
                self._open(open_dataset(self.config), None)
            else:
                helper = self.filler = HelperFiller(self.config)
                helper.open()
                self._open(helper.layouts, helper)

    def _open(self, layouts: Mapping[str, DatasetLayout], helper: HelperFiller | None) -> None:
        config, fields = self.config, self.config.batch_fields
        self.layouts = layouts
        transforms = {
            name: row_transform(field, self.layouts[name]) for name, field in fields.items()
        }
        self.samplings = Samplings(config, layouts)
        self.has_settled = False  # then the rank is known for good
        self.num_samples = next(iter(layouts.values())).num_samples
        self.device = find_device(config.device, config.pin_memory)
        rows = min(config.batch_size, max(1, self.num_samples))
        budget = MemoryBudget(
            config, layouts, transforms, rows, fewer_threads_do=self.fewer_threads_do
        )
        budget.check()
        formats, obstacle = self._find_formats(config, transforms, rows)
        memory_plan = budget.plan(formats, wanted_kept_nbytes(config, layouts))
        self._go_to(self._expected_rank(), 0, 0, None)
        self.fingerprint: str | None = None
        self.names = tuple(fields)
        self.formats, self.dropping = formats, threading.Lock()
        self.trial = DecodeTrial(config.decode, obstacle)
        self.device_chunks = 0  # that were decoded there
        self.device_turns: set[int] = set()  # batches on their way that may be decoded there
        file = next(iter(layouts.values())).file
        what = f"{file}: {config.prefetch} batches of {rows} samples"
        with taking_memory(what, "make batch_size or prefetch smaller"):
            self.slots = self.device.open_slots(
                config.prefetch,
                rows,
                transforms,
                config.postprocess is not None,
                formats,
                None if helper is None else helper.shared,
            )
        self.cache: Residency | Budget | None = None  # on the device
        if config.cache == "device":
            self.cache = self.device.open_cache(self.num_samples, config.cache_bytes)
        memory = [slot.memory for slot in self.slots]
        device_cache = self.cache if isinstance(self.cache, Residency) else None
        if helper is None:
            filler = self.filler = Filler(
                config,
                self.samplings,
                self.layouts,
                transforms,
                memory,
                memory_plan=memory_plan,
                device_cache=device_cache,
                stored_formats=formats,
                next_requests=self._next_requests,
                before_fill=self._wait_writable,
                on_done=self._on_done,
                on_crash=self.ring.fail,
            )
            filler.start()
        else:
            helper.start(
                memory,
                memory_plan=memory_plan,
                device_cache=device_cache,
                stored_formats=formats,
                next_requests=self._next_requests,
                before_fill=self._wait_writable,
                on_done=self._on_done,
                on_crash=self.ring.fail,
            )
        self.has_threads = config.thread_count > 0
        self.num_threads = max(1, min(config.thread_count, memory_plan.most_threads))
        self.waits = Waits()
        self.upload_times = StageTimes()
        self.delivered_samples = 0
        self.warned: set[str] = set()

    def _find_source(self) -> Source:
        """Return which of how many processes this is, as the options or others say now."""
        rank, world_size = self.config.rank, self.config.world_size
        if rank is None or world_size is None:
            return find_source()
        return Source(Rank(rank, world_size), "the options rank and world_size", "", None)

    def _expected_rank(self) -> Rank:
        """Return the rank as it seems when the reader is made."""
        try:
            return self._find_source().rank
        except ConfigError:
            if may_change():
                return Rank(0, 1)  # a group of processes that is yet to be made will say
            raise

    def settle(self) -> None:
        """Find out for good which of how many processes this is.

        With the first batch, and not before: a group of processes is often made after the reader.

        Raises
        ------
        ConfigError
            As `find_source` says.
        """
        if self.has_settled:
            return
        source = self._find_source()
        _log.info("rank %d of %d: %s", *source.rank, source)
        if source.rank != self.course.rank:
            self._go_to(source.rank, *self.course.place)
        self.has_settled = True

    @property
    def course(self) -> Course:
        """Where the reader goes."""
        course: Course = self.ring.course
        return course

    @property
    def schedule(self) -> Schedule:
        """Which batch has which serial number."""
        return self.course.schedule

    @property
    def sampling(self) -> Sampling:
        """The order of samples, and how it is dealt."""
        return self.course.schedule.sampling

    @property
    def num_batches(self) -> int:
        """Batches in an epoch; before the first batch, as the rank seems to be by now."""
        return self._sampling_by_now().num_batches

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch of all ranks, likewise."""
        return self._sampling_by_now().epoch_samples

    def _sampling_by_now(self) -> Sampling:
        """Return what says how many batches there are, and settle nothing."""
        if self.has_settled:
            return self.sampling
        rank = self._find_source().rank
        return dataclasses.replace(self.sampling, rank=rank.rank, world_size=rank.world_size)

    @property
    def _filler(self) -> Filler | HelperFiller:
        assert self.filler is not None, "the engine is not open"
        return self.filler

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the reader is closed, or its threads are not here."""
        if self.forks != _forks:
            raise ReaderClosedError(
                "the reader was made before this process was forked, and its threads are not here;"
                " make a reader in each process, after the fork, or start processes by spawn"
            )
        self.ring.check_open()

    def fetch(self) -> bool:
        """Ask for a batch more; tell whether it is the last of its epoch."""
        serial = self.ring.ask()
        self._begin()
        return self.schedule.is_last(serial)

    def begin_epoch(self) -> int:
        """Go to the next epoch of which nothing was taken yet; return where it ends."""
        first = self.schedule.epoch_begin(self.ring.next_serial)
        stop = self.schedule.epoch_begin(first + 1)
        self.ring.skip_to(first, read_ahead=self.has_threads)
        self._begin()
        return stop

    def _begin(self) -> None:
        """Have free slots filled, as far as batches were asked for."""
        if self.ring.can_assign():
            self._filler.kick()

    def _next_requests(self) -> list[FillRequest]:
        """Return what slots are to be filled with now; in a worker."""
        requests, assignments = [], self.ring.assign()
        course = self.course  # or a later one: then what was assigned before is dropped
        schedule = course.schedule
        for slot, serial in assignments:
            on_device = self.trial.next_turn()
            if on_device:
                self.device_turns.add(serial)
            position = schedule.position(max(serial, schedule.serial))
            requests.append(FillRequest(slot, serial, *position, course.order, on_device))
        return requests

    def jump(self, epoch: int, start: int, origin: tuple[int, int] | None = None) -> None:
        """Go on with another batch; what was asked for is dropped.

        `origin`: batch and world size that the epoch was begun with, if others than now.
        """
        self._go_to(self.course.rank, epoch, start, origin)

    def _go_to(self, rank: Rank, epoch: int, start: int, origin: tuple[int, int] | None) -> None:
        """Take another course, at once: an exception in the middle leaves all as it was."""
        own = self.config.batch_size, rank.world_size
        begun_with = own if origin is None or not start else origin
        order = (*rank,) if begun_with == own else (*rank, epoch, *begun_with)
        sampling = self.samplings.at(order)

        def course_from(serial: int) -> Course:
            schedule = Schedule.beginning(sampling, serial, epoch, start)
            return Course(rank, (epoch, start, origin), (epoch, begun_with), order, schedule)

        self.ring.restart(course_from)

    @passing()
    def state(self) -> dict[str, Any]:
        """Return where the reader is: what the caller had, not what is on its way."""
        epoch, _, start = self.schedule.position(self.ring.next_serial)
        course = self.course
        batch_size, world_size = self.config.batch_size, course.rank.world_size
        if course.origin[0] == epoch and start:
            batch_size, world_size = course.origin[1]
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "position": start,
            "batch_size": batch_size,
            "world_size": world_size,
            **self._data(),
        }

    @passing()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved."""
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(
                f"the state is of version {state.get('version')}; this h5async knows"
                f" {_STATE_VERSION}"
            )
        for name, value in self._data().items():
            if state.get(name) == value:
                continue
            if name == "fingerprint":
                raise ReadError(
                    f"{self.config.hdf5_path}: a file has changed since the state was saved: its"
                    " size, shapes, dtypes or chunks are others; begin anew, without the state"
                )
            raise ConfigError(
                f"the state was saved with {name}={state.get(name)!r}, and this reader has"
                f" {value!r}; make it with the same, or begin anew, without the state"
            )
        numbers = [state.get(n) for n in ("epoch", "position", "batch_size", "world_size")]
        if (
            not all(isinstance(n, int) and n >= 0 for n in numbers)
            or not all(numbers[2:])
            or cast("int", numbers[3]) > _MOST_RANKS
        ):
            raise ConfigError(f"the state holds no valid position: {dict(state)!r}")
        epoch, start, batch_size, world_size = cast("list[int]", numbers)
        self.jump(epoch, min(start, self.num_samples), (batch_size, world_size))

    def _data(self) -> dict[str, Any]:
        """Return what an order of samples depends on."""
        config = self.config
        if self.fingerprint is None:
            self.fingerprint = fingerprint(self.layouts.values())
        found = {
            "seed": config.seed,
            "shuffle": config.shuffle,
            "num_samples": self.num_samples,
            "fingerprint": self.fingerprint,
        }
        if config.shuffle == "window":
            found["window_bytes"] = config.window_bytes
        return found

    def next(self, timeout_seconds: float | None) -> tuple[int, Filled]:
        """End the life of the batch in use, and wait for the next one; `take` puts it in use."""
        begin = time.perf_counter()
        ring, slots, in_use = self.ring, self.slots, self.ring.in_use
        if slots and in_use is not None:
            slots[in_use].release()
        ring.hand_back()
        self._begin()
        if not self.has_threads:
            self._fill_here()
        serial, slot, filled = ring.wait(timeout_seconds)
        if filled.error is None:
            slots[slot].acquire()
        self.waits.note(begin, time.perf_counter())
        try:
            return serial, filled
        finally:
            del filled, slots  # an error has this frame, where the batch was filled here

    def take_warnings(self, filled: Filled) -> list[str]:
        """Return what the caller was not warned of yet, of a batch that was waited for."""
        new = [text for text in filled.outcome.warnings if text not in self.warned]
        self.warned.update(new)
        return new

    def take(self, serial: int, filled: Filled) -> None:
        """Put the batch that was waited for in use, or be done with its error."""
        # The error will have a traceback, with the reader in it, which nothing must hold.
        self.ring.take(serial, forget=filled.error is not None)
        if filled.error is None:
            self.delivered_samples += filled.outcome.index.size

    @passing()
    def _fill_here(self) -> None:
        """Fill the next batch in the thread of the caller."""
        try:
            while not self.ring.is_ready() and self._filler.run_next():
                pass
        except BaseException:  # Ctrl-C: the next call begins the batch anew
            if self._filler.abandon():
                self.ring.unassign()
            raise

    def close(self, patience_seconds: float | None = None) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Waits for it, `patience_seconds` at most; not in a thread of our own.
        """
        self.stop()
        self.join(patience_seconds)

    def stop(self, *, at_exit: bool = False) -> None:
        """Have that done, and wait for nothing. `at_exit`: see `SlotRing.close`."""
        if self.forks != _forks:  # there are no threads here, and locks that they held are not free
            return
        self.ring.close(at_exit=at_exit)
        if self.filler is not None:
            self.filler.stop(self._release)

    def join(self, patience_seconds: float | None) -> None:
        """Wait until all is done that `stop` asked for; not in a thread of our own."""
        is_ours = threading.current_thread().name.startswith(THREAD_NAME)
        if self.forks == _forks and self.filler is not None and not is_ours:
            self.filler.join(patience_seconds)

    def drop(self) -> None:
        """Close, because the reader was collected: in any thread, which may hold any lock.

        A worker may wait for that lock (h5py's, say). So there is no waiting for workers here but
        for a moment, in which they have ended nearly always.
        """
        self.close(_MOMENT_SECONDS)

    def _release(self) -> None:
        self.device.close()
        self.slots = []

    @property
    def fallback_reads(self) -> int:
        """Reads that went through h5py so far."""
        return self._filler.stats().fallback_reads

    def stats(self, num_threads: int) -> ReaderStats:
        """Return what was done so far."""
        layouts, waits, done = self.layouts, self.waits, self._filler.stats()
        counts, stages = done.counts, dict(done.stage_seconds)
        stages["upload"] += self.upload_times.seconds()["upload"]
        stages["read"] += counts.read_ns / 1e9
        stages["decode"] += counts.decode_ns / 1e9
        stages["place"] += counts.place_ns / 1e9
        row_nbytes = sum(layout.row_nbytes for layout in layouts.values())
        direct = sum(layout.row_nbytes * direct_share(layout) for layout in layouts.values())
        names = [f.label for y in layouts.values() for leaf in y.leaves() for f in leaf.filters]
        return ReaderStats(
            batches=waits.count,
            samples=self.delivered_samples,
            nbytes=self.delivered_samples * row_nbytes,
            elapsed_seconds=waits.elapsed_seconds,
            wait_seconds=waits.seconds,
            wait_p50_seconds=waits.percentile(50),
            wait_p99_seconds=waits.percentile(99),
            stage_seconds=stages,
            gil_wait_seconds=counts.gil_wait_ns / 1e9,
            read_nbytes=counts.read_nbytes,
            decoded_chunks=counts.decoded_chunks + self.device_chunks,
            fallback_reads=done.fallback_reads,
            direct_share=direct / row_nbytes if row_nbytes else 1.0,
            ways=dict(zip(self.names, self._filler.ways, strict=True)),
            num_threads=min(num_threads, self.num_threads),
            filters=tuple(dict.fromkeys(names)),
            workers=self.config.workers,
            cache=done.cache if self.cache is None else str(self.cache),
            decode=self.trial.sentence,
        )

    def _find_formats(
        self, config: ReaderConfig, transforms: Mapping[str, RowTransform], rows: int
    ) -> tuple[list[StoredFormat | None], str | None]:
        if self.device.name == "cpu":
            if config.decode == "device":
                raise DeviceError('decode="device" needs a GPU, and none was found')
            return [None] * len(transforms), "there is no GPU"
        on_host = [name for name, transform in transforms.items() if needs_host(transform)]
        return find_formats(config, self.layouts, rows, on_host, self.device.free_nbytes)

    def _wait_writable(self, slot: int) -> None:
        self.slots[slot].wait_writable()

    def _on_done(self, request: FillRequest, outcome: FillOutcome) -> None:
        arrays: tuple[Any, ...] = ()
        error = outcome.error
        try:
            if error is None:
                arrays, error = self._uploaded(request, outcome)
            if isinstance(error, NotDecoded) or (error is not None and any(outcome.stored)):
                # The host decodes what the device cannot, and has the words for what is wrong.
                self.trial.note_fallback()
                self._filler.fill(request._replace(on_device=False))
                return
            self._end_turn(request)
        except BaseException as raised:  # whatever it is, the consumer must not wait for ever
            if interruption(raised) is not None:
                raise  # this is the thread of the caller, whom it concerns
            error = raised
        if is_lack_of_memory(error):  # of a helper process, or of the device
            batch = f"batch {request.number} of epoch {request.epoch}"
            error = out_of_memory(f"{self.config.hdf5_path}: {batch}", error)
        self.ring.filled(request.serial, Filled(outcome, arrays, error))
        del error  # its traceback may have this frame
        self._begin()

    def _uploaded(
        self, request: FillRequest, outcome: FillOutcome
    ) -> tuple[tuple[Any, ...], BaseException | None]:
        """Return the arrays of a batch where the consumer wants them, or what went wrong."""
        begin = time.perf_counter_ns()
        try:
            arrays = self.slots[request.slot].upload(outcome)
            if isinstance(self.cache, Residency):
                self._filler.note_uploaded(request.slot, outcome.index)
            self._note_turn(request, outcome)
            return arrays, None
        except Exception as error:
            if interruption(error) is not None:
                raise
            return (), error
        finally:
            self.upload_times.add("upload", begin)

    def _end_turn(self, request: FillRequest) -> None:
        """Give the memory back that decoding on the device takes, once it has lost the trial."""
        self.device_turns.discard(request.serial)
        if self.trial.has_lost and not self.device_turns and any(self.formats):
            with self.dropping:
                if any(self.formats):
                    self.formats = []
                    self.device.drop_decoders(self.slots)
                    self._filler.drop_stored([slot.memory for slot in self.slots])

    def _note_turn(self, request: FillRequest, outcome: FillOutcome) -> None:
        self.device_chunks += sum(plan.num_items for plan in outcome.stored if plan is not None)
        if request.on_device and not (outcome.is_resident or any(outcome.stored)):
            self.trial.note_fallback()
        elif self.trial.is_running and not outcome.is_resident:
            filling = outcome.busy_seconds / self.num_threads
            transfer = self.slots[request.slot].transfer_seconds()
            self.trial.note(request.on_device, max(filling, transfer))
