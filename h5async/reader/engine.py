"""Connects layouts, order, filler, slots and device: options enter, filled batches leave.

The engine does not refer to the caller's reader. So a reader that is dropped unclosed can be
collected, and its engine closed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.deliver.device import Device, DeviceSlot
from h5async.deliver.devicepolicy import DevicePolicy
from h5async.deliver.finddevice import find_device
from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import (
    ReaderClosedError,
    ReadError,
    is_lack_of_memory,
    out_of_memory,
    taking_memory,
)
from h5async.fill.filling import Filler
from h5async.fill.outcomes import Calls, FillerStats, FillOutcome
from h5async.fill.pool import THREAD_NAME
from h5async.fill.postprocess import masks_of
from h5async.fill.reading import OnDevice, Slots
from h5async.fill.resident import Budget, Residency
from h5async.observe.readerlog import (
    log_long_samples,
    log_memory,
    log_opened,
    log_unused_values,
    log_ways,
)
from h5async.observe.readerstats import ReaderCounts, Way, Work
from h5async.observe.stats import ReaderStats
from h5async.observe.trace import Trace
from h5async.opening.dataset import OpenedDataset, Samplings, open_dataset
from h5async.opening.limits import MemoryBudget, free_memory_nbytes
from h5async.opening.slotsizes import (
    made_nbytes,
    samples_of_slot,
    shared_nbytes,
    slot_transforms,
    wanted_kept_nbytes,
)
from h5async.order.sampling import FillRequest
from h5async.order.schedule import Schedule
from h5async.reader import lifetime
from h5async.reader.checkpoint import Checkpoints
from h5async.reader.givensamples import GivenSamples
from h5async.reader.position import ReaderPosition
from h5async.reader.submitting import Submitter
from h5async.samples.assembly import outlines_of
from h5async.samples.fieldkind import FieldKind
from h5async.spelling import named
from h5async.system.interruptions import interruption, passing
from h5async.system.timeline import Recorder
from h5async.system.waiting import Flag

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from h5async.observe.tracing import Tracing
    from h5async.opening.selecting import Chosen
    from h5async.process.helper import HelperFiller

_MOMENT_SECONDS = 0.5  # idle workers nearly always end within this time
_REMEDY = "free some memory, or raise the memory limit of this process"


class Engine:
    """The implementation of a reader behind `AsyncReader`, whose methods list the errors."""

    def __init__(self, config: ReaderConfig) -> None:
        # The number of threads is fixed here: affinity and quotas may change later.
        self.config = config.model_copy(update={"num_threads": config.thread_count})
        self.fewer_threads_do = config.num_threads is None
        self.num_forks = lifetime.num_forks
        self.ring: SlotRing[FillOutcome] = SlotRing(config.prefetch)
        self.filler: Filler | HelperFiller | None = None
        self.has_opened = Flag(True)  # set unless it is being opened
        self.slots: list[DeviceSlot] = []
        self.kinds: Mapping[str, FieldKind] = {}
        self.device: Device = Device()
        self._submitter: Submitter | None = None  # None if workers ask for requests
        self._recorder = Recorder()
        self._tracing: Tracing | None = None  # None until a trace is requested
        self._trace_error: ReadError | None = None  # why a trace was not written at the end

    @passing()
    def open(self) -> None:
        """Open the dataset, and start the threads; after an exception, call `close`."""
        self.has_opened.is_set = False
        begin = time.perf_counter()
        try:
            lifetime.register(self)
            self._open_dataset()
            log_opened(self.config, self.layouts, self.num_samples, time.perf_counter() - begin)
            self.ring.check_open()  # exit handlers may have closed it meanwhile
        finally:
            self.has_opened.set()

    def _open_dataset(self) -> None:
        with taking_memory(f"{paths_text(self.config.hdf5_path)} cannot be opened", _REMEDY):
            if self.config.workers == "thread":
                opened = open_dataset(self.config)
                self._open(opened)
            else:
                from h5async.process.helper import HelperFiller

                helper = self.filler = HelperFiller(self.config)
                found = helper.open()
                config = self.config
                if found.are_found:
                    fields = {name: kind.field for name, kind in found.kinds.items()}
                    config = config.model_copy(update={"fields": fields})
                whole = OpenedDataset(config, found.layouts, found.kinds)
                self._open(whole, helper, found.chosen)

    def _open(
        self,
        opened: OpenedDataset,
        helper: HelperFiller | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        config, layouts, kinds = opened
        self.config, self.kinds = config, kinds
        self.layouts = layouts
        samplings = self.samplings = Samplings(config, layouts, chosen)
        self.num_samples = samplings.selection.size
        self.device = find_device(config.device, config.pin_memory)
        is_on_gpu = self.device.name != "cpu"
        # A GPU makes them with the batch; on the host they are made when it is handed over.
        self.masks = masks_of(kinds, layouts, samplings.rows)
        self._masks_of_device = list(self.masks.values()) if is_on_gpu else []
        rows = samples_of_slot(config, samplings)
        transforms = slot_transforms(config, layouts, samplings, rows)
        leaves = is_on_gpu and helper is None and config.postprocess is None
        outlines = outlines_of(kinds, transforms, self.device.can_transform if leaves else None)
        budget = MemoryBudget(
            config,
            layouts,
            transforms,
            rows,
            made_nbytes=made_nbytes(kinds, outlines, rows),
            selection=samplings.selection,
            fewer_threads_do=self.fewer_threads_do,
        )
        budget.check()
        self.device_policy = DevicePolicy(
            config,
            self.device,
            layouts,
            transforms,
            rows,
            budget.beside_rows_nbytes,
            [name for name, kind in kinds.items() if kind.is_mapped],
        )
        selected = self.num_samples / max(1, next(iter(layouts.values())).sample_count)
        wanted = wanted_kept_nbytes(config, layouts, samplings.rows, selected)
        memory_plan = budget.plan(self.device_policy.host_nbytes, wanted)
        self.position = ReaderPosition(config, samplings, self.ring)
        self.checkpoints = Checkpoints(config, layouts, samplings)
        self.names = tuple(kinds)
        file = next(iter(layouts.values())).file
        what = f"{file}: {config.prefetch} batches of {rows} samples"
        with taking_memory(what, f"make {named('batch_size')} or {named('prefetch')} smaller"):
            self.slots = self.device.open_slots(
                config.prefetch,
                rows,
                transforms,
                config.postprocess is not None,
                self.device_policy.formats,
                None if helper is None else helper.shared,
                outlines,
            )
            memory = [slot.memory for slot in self.slots]
        self.cache: Residency | Budget | None = None  # on the device
        if config.cache == "device":
            self.cache = self.device.open_cache(samplings.selection, config.cache_bytes)
        device_cache = self.cache if isinstance(self.cache, Residency) else None
        calls = Calls(self._next_requests, self._wait_writable, self._on_done, self.ring.fail)
        if helper is None:
            device = self.device
            left = frozenset(outline.name for outline in outlines if outline.is_left)
            filler = self.filler = Filler(
                opened,
                samplings,
                transforms,
                Slots(memory, rows, device.host_memory, device.is_writable_at_once),
                memory_plan,
                calls,
                OnDevice(left, self.device_policy.plan_columns, device_cache),
                self._recorder,
            )
            if filler.submissions is not None:
                self._submitter = Submitter(self.ring, filler.submissions, self._recorder)
            filler.start()
        else:
            most_pixels = min(memory_plan.limit_nbytes, free_memory_nbytes()) // config.prefetch
            helper.start(
                memory,
                rows=rows,
                pixels_nbytes=shared_nbytes(kinds, outlines, rows, most_pixels),
                memory_plan=memory_plan,
                device_cache=device_cache,
                calls=calls,
            )
        # A helper process always has one; without any, the caller does the work.
        of_each = min(config.filler_threads, memory_plan.most_threads)
        self.has_threads = of_each > 0
        self.num_threads = max(1, config.num_helpers) * max(1, of_each)
        log_ways(layouts, self._filler.methods)
        log_unused_values(layouts)
        cache = self._filler.stats().cache if self.cache is None else str(self.cache)
        log_memory(config, cache, memory_plan.most_threads, memory_plan.kept_nbytes, wanted)
        if samplings.lengths is not None:
            log_long_samples(config, samplings.lengths.of_sample)
        kept_nbytes = max(1, config.num_helpers) * sum(memory_plan.kept_nbytes)
        self.counts = ReaderCounts(
            config, layouts, samplings.rows, samplings.selection, kept_nbytes
        )
        self.given = GivenSamples(config, layouts, transforms, samplings, rows)

    @property
    def schedule(self) -> Schedule:
        """Maps serial numbers to batches."""
        return self.position.schedule

    @property
    def _filler(self) -> Filler | HelperFiller:
        assert self.filler is not None, "the engine is not open"
        return self.filler

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the reader is closed, or its threads do not exist here."""
        if self.num_forks != lifetime.num_forks:
            raise ReaderClosedError(
                "the reader was made before this process was forked, and its threads do not exist"
                " here; make a reader in each process, after the fork, or start processes by spawn"
            )
        self.ring.check_open()

    def fetch(self, samples: NDArray[np.int64] | None = None) -> bool:
        """Request another batch, or one of these samples; tell whether its epoch ends with it."""
        if samples is not None:
            self.position.give(samples)
            self._begin()
            return False
        serial = self.ring.ask()
        self._begin()
        return self.schedule.is_last(serial)

    @passing()
    def read(self, samples: NDArray[np.int64]) -> tuple[Any, ...]:
        """Read samples in the calling thread, to arrays of their own."""
        return self.device.owned(self.given.read(samples, self._filler))

    def begin_epoch(self) -> int:
        """Go to the next epoch of which no batch was taken; return its number."""
        self.counts.end_epoch(self._work())
        course, following = self.position.course, self.ring.consumer.next
        first = course.schedule.epoch_begin(following)
        while first > following and first - 1 in course.given:
            first -= 1  # the caller requested these, too
        self.ring.skip_to(first, read_ahead=self.has_threads, loops=self.has_threads)
        self._begin()
        return course.schedule.position(first).epoch

    def _begin(self) -> None:
        """Fill free slots with requested batches."""
        if self._submitter is not None:
            self._submitter.begin(self._requests)
        elif self.ring.can_assign():
            self._filler.kick()

    def _next_requests(self) -> list[FillRequest]:
        """Return the requests for free slots; called in a worker."""
        begin_ns, timeline = time.perf_counter_ns(), self._recorder.timeline
        requests = self._requests(self.ring.assign())
        if timeline is not None and requests:
            timeline.fetched(begin_ns, requests)
        return requests

    def _requests(self, assignments: Sequence[Assignment]) -> list[FillRequest]:
        return self.position.requests(assignments)

    @passing()
    def trace(
        self, path: str | os.PathLike[str] | None, *, nvtx: bool, torch: bool, max_events: int
    ) -> Trace:
        """Begin a trace of all work from now on."""
        self.check_open()
        if self._tracing is None:
            from h5async.observe.tracing import Tracing  # rarely needed

            self._tracing = Tracing(self._recorder, paths_text(self.config.hdf5_path))
        place_of = self.position.place_of
        return self._tracing.begin(
            path,
            self._filler,
            lambda: {serial: place_of(serial) for serial in self.ring.serials},
            self.ring.consumer.held,
            nvtx=nvtx,
            torch=torch,
            max_events=max_events,
        )

    @passing()
    def state(self) -> dict[str, Any]:
        """Return the position after the caller's last batch, ignoring requested ones."""
        return self.checkpoints.state(self.position.save())

    @passing()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved."""
        self.position.restore(self.checkpoints.position(state))
        self.counts.end_epoch(self._work())

    def jump(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches are dropped."""
        self.position.jump(epoch)
        self.counts.end_epoch(self._work())

    def next(self, timeout_seconds: float | None) -> tuple[int, FillOutcome]:
        """End the life of the batch in use, and wait for the next one; `take` puts it in use."""
        begin = time.perf_counter()
        ring, slots, timeline, is_there = self.ring, self.slots, self._recorder.timeline, False
        if timeline is not None and timeline.open_ranges:
            timeline.begin_wait()
        end = 0.0
        try:
            # If a slot may be filled as soon as it is free, the order of uses does not matter.
            has_order = not self.device.is_writable_at_once
            if has_order and slots and ring.in_use is not None:
                slots[ring.in_use].release()
            ring.hand_back()
            self._begin()
            if not self.has_threads:
                self._fill_here()
            begin_more = None if self._submitter is None else self._begin
            serial, slot, filled = ring.wait(timeout_seconds, begin_more)
            is_there = filled.error is None
            if has_order and is_there:
                slots[slot].acquire()
            end = time.perf_counter()
            self.counts.waits.note(begin, end)
            try:
                return serial, filled
            finally:
                del filled, slots  # an error from filling here holds this frame
        finally:
            if timeline is not None:
                end = end or time.perf_counter()
                timeline.waited(begin, end, ring.consumer.next, is_there)

    def take(self, serial: int, filled: FillOutcome) -> None:
        """Put the batch that was waited for in use, or forget its error."""
        # The error's traceback will hold the reader, so nothing may hold the error.
        self.ring.take(serial, forget=filled.error is not None)
        if filled.error is not None and self._submitter is not None:
            self._submitter.drop_error(serial)

    def note(self, index: NDArray[np.int64], epoch: int, number: int, last: bool) -> None:
        """Count a delivered batch."""
        counts = self.counts
        if epoch not in (-1, counts.open_epoch):
            counts.begin_epoch(epoch, self._work())
        counts.note(index)
        if epoch >= 0:
            counts.last = epoch, number
        if last:
            counts.end_epoch(self._work())

    @passing()
    def _fill_here(self) -> None:
        """Fill the next batch in the caller's thread."""
        try:
            while not self.ring.is_ready() and self._filler.run_next():
                pass
        except BaseException:  # Ctrl-C: the next call begins the batch again
            if self._filler.abandon():
                self.ring.unassign()
            raise

    @passing()
    def close(self, patience_seconds: float | None = None) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Waits at most `patience_seconds`, and not at all in a thread of the pool.
        """
        self.stop()
        self.join(patience_seconds)
        error, self._trace_error = self._trace_error, None
        if error is not None:
            raise error

    def stop(self, *, at_exit: bool = False) -> None:
        """Begin to close, without waiting. For `at_exit`, see `SlotRing.close`."""
        if (
            self.num_forks != lifetime.num_forks
        ):  # locks held by the parent's threads stay locked here
            return
        self.ring.close(at_exit=at_exit)
        if self.filler is not None:
            self.filler.stop(self._release)

    def join(self, patience_seconds: float | None) -> None:
        """Wait until everything is closed, after `stop`; not in a thread of the pool."""
        is_ours = threading.current_thread().name.startswith(THREAD_NAME)
        is_forked = self.num_forks != lifetime.num_forks
        if not is_forked and self.filler is not None and not is_ours:
            self.filler.join(patience_seconds)
        if not is_forked and self._tracing is not None:
            self._trace_error = self._tracing.close() or self._trace_error

    def drop(self) -> None:
        """Close because the reader was collected, in any thread, which may hold any lock.

        A worker may need that lock (h5py's, say) to end, so this waits only for a moment.
        """
        self.stop()
        self.join(_MOMENT_SECONDS)

    def _release(self) -> None:
        self.device.close()
        self.slots = []

    @property
    def fallback_reads(self) -> int:
        """Number of reads through h5py so far."""
        return self._filler.stats().fallback_reads

    def stats(self, since: ReaderStats | None = None, epoch: int | None = None) -> ReaderStats:
        """Return statistics, as `AsyncReader.stats`."""
        done = self._filler.stats()
        way = Way(
            self._filler.methods,
            num_threads=self.num_threads if self.has_threads else 0,
            workers=self.config.workers,
            cache=done.cache if self.cache is None else str(self.cache),
            decode=self.device_policy.sentence,
        )
        return self.counts.stats(self._work(done), way, since, epoch)

    def _work(self, done: FillerStats | None = None) -> Work:
        """Return the work of all threads so far."""
        policy = self.device_policy
        return self.counts.work(
            self._filler.stats() if done is None else done, policy.num_chunks, policy.decoded_nbytes
        )

    def _wait_writable(self, slot: int) -> None:
        self.slots[slot].wait_writable()

    def _on_done(self, request: FillRequest, outcome: FillOutcome) -> None:
        arrays: tuple[Any, ...] = ()
        error = outcome.error
        try:
            if error is None:
                arrays, error = self._uploaded(request, outcome)
            if self.device_policy.leaves_to_host(request, error):
                self._filler.fill(request)
                return
            self.device_policy.end(request)
        except BaseException as raised:  # on any error, the consumer must not wait for ever
            if interruption(raised) is not None:
                raise  # raise it in the caller's own thread
            error = raised
        if is_lack_of_memory(error):  # in a helper process, or on the device
            batch = f"batch {request.number} of epoch {request.epoch}"
            error = out_of_memory(f"{paths_text(self.config.hdf5_path)}: {batch}", error)
        self.ring.filled(request.serial, outcome._replace(arrays=arrays, error=error))
        del error  # its traceback may hold this frame
        if self._submitter is not None and self.has_threads:
            self._submitter.begin_in_worker(self._requests)
        else:
            self._begin()

    def _uploaded(
        self, request: FillRequest, outcome: FillOutcome
    ) -> tuple[tuple[Any, ...], BaseException | None]:
        """Return a batch's arrays on the consumer's device, or the error."""
        begin = time.perf_counter_ns()
        try:
            slot = self.slots[request.slot]
            masks = [are_there(outcome.index) for are_there in self._masks_of_device]
            if self.device.name == "cpu":  # nothing to upload
                arrays = slot.upload(outcome, masks)
            else:
                with self._recorder.ranges("upload"):
                    arrays = slot.upload(outcome, masks)
            # A thread that uploads chunks for the GPU to decode waits, and fills nothing meanwhile.
            seconds = outcome.busy_seconds + (time.perf_counter_ns() - begin) / 1e9
            if isinstance(self.cache, Residency):
                self._filler.note_uploaded(request.slot, outcome.index)
            self.device_policy.note(request, outcome, seconds / self.num_threads)
            return arrays, None
        except Exception as error:
            if interruption(error) is not None:
                raise
            return (), error
        finally:
            if self.device.name != "cpu":
                self.counts.upload_times.add("upload", begin)
                self._recorder.note("upload", begin, request.serial)
