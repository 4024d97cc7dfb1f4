"""Takes each batch from its request to handover: gets it a slot, fills, uploads, waits for it.

The consumer requests and takes batches; the threads of the filler fill and upload them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h5async.deliver.device import Empty, host_slot
from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import (
    ConfigError,
    FileChangedWarning,
    H5AsyncError,
    is_lack_of_memory,
    out_of_memory,
    taking_memory,
)
from h5async.fill.filling import Filler
from h5async.fill.outcomes import Done, FillerStats, FillOutcome
from h5async.fill.submissions import Submissions
from h5async.io.shared import plain_memory
from h5async.observe.readercounts import ReaderCounts, SkippedSamples, Work
from h5async.order.rows import SpanRows
from h5async.order.sampling import FillRequest
from h5async.order.selection import NO_SAMPLES
from h5async.read.queue import MAX_GIVEN
from h5async.reader.batch import Batch, Batches, Epoch, expire, next_run
from h5async.reader.position import ReaderPosition
from h5async.reader.readersetup import ReaderSetup
from h5async.spelling import named
from h5async.system.interruptions import interruption, passing, suppressing
from h5async.system.timeline import Recorder

if TYPE_CHECKING:
    from h5async.process.helper import HelperFiller, PostedBatches


class Delivery:
    """Takes batches from request to handover.

    The filler's threads call `next_requests`, `wait_writable` and `on_done`, and the consumer's
    thread all other methods. `begin` decides who fills: either the consumer submits batches to the
    core itself, or the filler's threads ask for requests.
    """

    def __init__(
        self,
        setup: ReaderSetup,
        ring: SlotRing[FillOutcome],
        position: ReaderPosition,
        counts: ReaderCounts,
        recorder: Recorder,
    ) -> None:
        self._setup, self._ring = setup, ring
        self._position = position
        self._counts = counts
        self._recorder = recorder
        self._device = setup.device
        self._fills_at_once = setup.device.is_writable_at_once  # or the core waits
        self._transforms = list(zip(setup.transforms.values(), setup.samplings.rows, strict=True))
        self._on_host = [not transform.is_identity for transform, _ in self._transforms]
        # On the host, masks are made when a batch is handed over.
        self._masks_to_upload = list(setup.masks.values()) if setup.is_on_gpu else []
        self._filler: Filler | HelperFiller
        self._submissions: Submissions | PostedBatches | None = None
        self._may_have_lost = False  # an assignment may not have been submitted
        self._is_left = False  # filling here was interrupted, and its batch not dropped yet
        config, files = setup.config, setup.opened.skipped
        self.skipped = SkippedSamples(config.hdf5_path, files, config.max_skipped)
        self._held: Batch | None = None  # the caller's batch, with debug_lifetimes
        self._batches = Batches(setup, ring)
        # Fast versions, each a single call of the core, if possible; see `Turns`.
        self.take_turn: Callable[..., bool] = _no_turn
        self.ask_turn: Callable[[], int] = _no_turn
        self.put_back_turn: Callable[[], bool] = _no_turn
        self.give_turn: Callable[[Any], bool] = _no_turn
        self.read_turn: Callable[[Any], Any] = _no_turn
        self._waiting: int | None = None  # the thread that waits for a batch

    def fill_by(self, filler: Filler | HelperFiller) -> None:
        """Set the filler, before the first batch."""
        self._filler = filler
        setup = self._setup
        submissions: Submissions | PostedBatches | None = None
        if isinstance(filler, Filler):
            submissions = filler.submissions
            self._fills_at_once |= submissions is not None and submissions.are_uploaded
        elif self._may_have_turns() and setup.config.postprocess is None:
            if all(kind.is_plain for kind in setup.kinds.values()):
                submissions = filler.post(setup.samplings, setup.rows, len(setup.slots))
        if submissions is not None:
            self._ring.completions = self._submissions = submissions
            submissions.request_of = self._request_of
            if self._may_have_turns():
                self._open_turns(submissions)

    def _may_have_turns(self) -> bool:
        config = self._setup.config
        does_more = config.copy or config.debug_lifetimes or config.on_error == "skip"
        return self._fills_at_once and not does_more and config.sampler is None

    def _open_turns(self, submissions: Submissions | PostedBatches) -> None:
        setup = self._setup
        num_threads = setup.num_threads if setup.has_threads else 0
        turns = submissions.open_turns(Batch, setup.sample_count, num_threads)
        if turns is not None:
            self._ring.turns = self._counts.waits.turns = turns
            self.take_turn, self.ask_turn = self._device.taking(turns), turns.ask
            self.put_back_turn = turns.put_back
            if setup.takes_any_samples:
                self.give_turn, self.read_turn = turns.give, turns.read
                lasts = not (self._batches.has_masks or setup.is_on_gpu)
                if lasts and isinstance(submissions, Submissions):
                    submissions.read_given(self._batches.names, self._batches)

    def _request_of(self, slot: int, serial: int) -> FillRequest:
        return self._position.requests([Assignment(slot, serial)])[0]

    def check_alone(self) -> None:
        """Raise `H5AsyncError` if another thread waits for a batch."""
        turns = self._ring.turns
        is_inside = turns is not None and turns.is_inside()
        if is_inside or self._waiting not in (None, get_ident()):
            raise H5AsyncError(
                "another thread is waiting in get_next_batch() of this reader, which serves one"
                " thread at a time; let one thread take the batches, or make a reader for each"
            )

    def lend(self) -> bool:
        """Lend the ring to the core for the next batches, if they are similar.

        Returns whether it is lent now. It is taken back by the first call that needs Python.
        """
        counts, ring, submissions = self._counts, self._ring, self._submissions
        turns = None if submissions is None else submissions.turns
        timeline = self._recorder.timeline  # the core reports nothing to other tools
        is_here = isinstance(self._filler, Filler)  # nor requests to helpers
        is_told = timeline is None or (is_here and not timeline.open_ranges)
        if turns is None or submissions is None or not is_told:
            return False
        following, _, _, _, course, _ = ring.consumer
        if turns.is_lent or self._waiting or not counts.waits.have_begun:
            return False
        epoch, number, _ = course.schedule.position(following)  # of the run, after given samples
        if counts.open_epoch != epoch and (counts.open_epoch >= 0 or number):
            return False  # Python has to open the epoch at its first batch
        if sum(serial >= following for serial in course.given) >= MAX_GIVEN:
            return False
        slots = [slot.delivered for slot in self._setup.slots]
        with suppressing(MemoryError):  # the reader goes on without a run
            run = next_run(self._batches, course, ring, submissions, turns, slots)
            if run is not None:
                end_epoch = counts.end_epoch_of_turns
                turns.on_epoch(lambda: end_epoch(self._done()), counts.open_epoch >= 0)
                ring.lend(run)
        return turns.is_lent

    # --- requests ---------------------------------------------------------------------------------

    def fetch(self, index: ArrayLike | None = None) -> bool:
        """Request the next batch, or one of given samples; return whether its epoch ends there."""
        if index is not None:
            samples, turns = self._setup.samples_of_batch(index), self._ring.turns
            self.lend()
            if turns is None or not turns.give(samples):
                self._position.give(samples)
                self.begin(is_helped=self._setup.has_threads)
            return False
        serial = self._ring.ask()
        self.begin()
        self.lend()
        return self._position.schedule.is_last(serial)

    def given(self, index: ArrayLike, turn: Callable[[NDArray[Any]], Any]) -> Any:
        """Try `give_turn` or `read_turn` on given samples; if False, use `fetch` or `read`."""
        try:
            samples = np.array(index)
        except (TypeError, ValueError, OverflowError) as error:
            if interruption(error) is not None:
                raise
            return False
        return turn(samples)

    def next_epoch(self, get_next_batch: Callable[[], Batch]) -> Iterator[Batch]:
        """Go to the next epoch from which no batch was taken; return its batches."""
        if self._counts.open_epoch >= 0:
            self._counts.end_epoch(self.work())
        course, following = self._position.course, self._ring.consumer.next
        first = course.schedule.epoch_begin(following)
        while first > following and first - 1 in course.given:
            first -= 1  # the caller requested these, too
        has_threads = self._setup.has_threads
        self._ring.skip_to(first, read_ahead=has_threads, loops=has_threads)
        self.begin()
        epoch = self._position.schedule.position(first).epoch
        return Epoch(self._position, self._ring, epoch, get_next_batch)

    def next_epoch_of_run(self, get_next_batch: Callable[[], Batch]) -> Epoch | None:
        """Do the same while the ring is lent, if a loop has just finished an epoch; else None."""
        turns, wanted, has_threads = self._ring.turns, self._ring.wanted, self._setup.has_threads
        run = None if turns is None else turns.run
        if turns is None or run is None or wanted[3:6:2] != (has_threads, has_threads):
            return None
        number = run.epochs.epoch_beginning(turns.struct.next_in_run)
        if number is None:
            return None
        return Epoch(self._position, self._ring, run.epoch + number, get_next_batch, run)

    def begin(self, *, is_helped: bool = False) -> None:
        """Fill free slots with requested batches; after an exception, the next call does it.

        `is_helped`: `wait` will fill cheap batches of given samples itself.
        """
        if self._submissions is None:
            if self._ring.can_assign():
                self._filler.kick()
            return
        may_have_lost, self._may_have_lost = self._may_have_lost or self._ring.was_lent, True
        self._ring.was_lent = False
        # Under the lock, as in `on_done`: some pending batches may have been dropped.
        with self._ring.lock if may_have_lost else nullcontext():
            assignments = self._ring.assign()
            if may_have_lost:
                assignments = self._ring.pending()
            if assignments:
                self._submit(self._submissions, assignments, is_helped=is_helped)
        self._may_have_lost = False

    def _submit(
        self,
        submissions: Submissions | PostedBatches,
        assignments: Sequence[Assignment],
        *,
        is_helped: bool = False,
    ) -> None:
        for request in self._requests(assignments):
            if self._fills_at_once or self._setup.slots[request.slot].is_writable():
                submissions.submit(request, is_helped=is_helped)
            else:
                assert isinstance(self._filler, Filler)
                later = partial(self._submit_later, submissions, request)
                self._filler.do_later(request.serial, later)

    def _submit_later(self, submissions: Submissions | PostedBatches, request: FillRequest) -> None:
        """Submit a batch once its slot may be written to, if it is still wanted."""
        try:
            self.wait_writable(request.slot)
        except Exception as error:
            if interruption(error) is not None:
                raise
            # After an interruption, this is called twice, and the batch is being read already.
            if not submissions.has(request.slot, request.serial):
                self.on_done(request, FillOutcome(NO_SAMPLES, (), error))
            return
        with self._ring.lock:
            if self._ring.awaits(request.slot, request.serial):
                submissions.submit(request)

    def next_requests(self) -> list[FillRequest]:
        """Return the requests for free slots."""
        return self._requests(self._ring.assign())

    def _requests(self, assignments: Sequence[Assignment]) -> list[FillRequest]:
        timeline = self._recorder.timeline
        begin_ns = 0 if timeline is None else time.perf_counter_ns()
        requests = self._position.requests(assignments)
        if timeline is not None and requests:
            timeline.requested(begin_ns, requests)
        return requests

    # --- filled slots -----------------------------------------------------------------------------

    def wait_writable(self, slot: int) -> None:
        """Block until the memory of a slot may be overwritten."""
        self._setup.slots[slot].wait_writable()

    def on_done(self, request: FillRequest, outcome: FillOutcome) -> None:
        """Upload a filled slot, and report it to the consumer."""
        arrays: tuple[Any, ...] = ()
        error, policy = outcome.error, self._setup.device_policy
        try:
            if error is None:
                arrays, error = self._uploaded(request, outcome)
            if policy.leaves_to_host(request, error):
                assert isinstance(self._filler, Filler)
                self._filler.fill(request)
                return
            policy.end(request)
        except BaseException as raised:  # on any error, the consumer must not wait for ever
            if interruption(raised) is not None:
                raise  # raise it in the caller's own thread
            error = raised
        if is_lack_of_memory(error):  # in a helper process, or on the device
            error = out_of_memory(f"{self._setup.path}: {request}", error)
        self._ring.filled(request.serial, outcome._replace(arrays=arrays, error=error))
        del error  # its traceback may hold this frame
        if self._submissions is None or not self._setup.has_threads:
            self.begin()
        else:
            # Under the ring's lock: a batch that is dropped meanwhile must not be submitted. No
            # signal handler interrupts this thread.
            with self._ring.lock:
                self._submit(self._submissions, self._ring.assign())

    def _uploaded(
        self, request: FillRequest, outcome: FillOutcome
    ) -> tuple[tuple[Any, ...], BaseException | None]:
        setup, begin = self._setup, time.perf_counter_ns()
        try:
            masks = [mask(outcome.index, request.epoch) for mask in self._masks_to_upload]
            with self._recorder.ranges("upload") if setup.is_on_gpu else nullcontext():
                arrays = setup.slots[request.slot].upload(outcome, masks)
            seconds = (time.perf_counter_ns() - begin) / 1e9
            if setup.device_cache is not None:
                self._filler.note_uploaded(request.slot, outcome.index)
            # A thread that uploads chunks for the GPU to decode waits, and fills nothing meanwhile.
            of_all = (outcome.busy_seconds + seconds) / setup.num_threads
            setup.device_policy.note(request, outcome, of_all, seconds)
            return arrays, None
        except Exception as error:
            if interruption(error) is not None:
                raise
            return (), error
        finally:
            if setup.is_on_gpu:
                self._counts.upload_times.add("upload", begin)
                self._recorder.note("upload", begin, request.serial)

    # --- the next batch ---------------------------------------------------------------------------

    def wait(self, timeout_seconds: float | None) -> tuple[int, FillOutcome]:
        """End the life of the batch in use, and wait for the next one."""
        self._end_life()
        self._waiting = get_ident()
        begin, end, is_there = time.perf_counter(), 0.0, False
        ring, slots, timeline = self._ring, self._setup.slots, self._recorder.timeline
        if timeline is not None and timeline.open_ranges:
            timeline.begin_wait()
        try:
            # If a slot may be filled as soon as it is free, the order of uses does not matter.
            has_order = not self._device.is_writable_at_once
            if has_order and slots and ring.in_use is not None:
                slots[ring.in_use].release()
            ring.hand_back()
            self.begin(is_helped=self._setup.has_threads)
            if not self._setup.has_threads and isinstance(self._filler, Filler):
                self._fill_here(self._filler)
            elif ring.turns is not None and ring.consumer.next in self._position.course.given:
                ring.turns.fill_own(ring.consumer.next)
            begin_more = None if self._submissions is None else self.begin
            serial, slot, filled = ring.wait(timeout_seconds, begin_more)
            if filled.skipped:
                filled = self._within_limit(serial, filled)
            is_there = filled.error is None
            if has_order and is_there:
                slots[slot].acquire()
            end = time.perf_counter()
            self._counts.note_wait(begin, end)
            try:
                return serial, filled
            finally:
                del filled, slots  # the traceback of an error from `_fill_here` holds this frame
        finally:
            self._waiting = None  # first of all, so that nothing can prevent it
            if timeline is not None:
                end = end or time.perf_counter()
                timeline.waited(begin, end, ring.consumer.next, is_there)

    def _within_limit(self, serial: int, filled: FillOutcome) -> FillOutcome:
        """Note the skipped samples of a batch; return it with an error if there are too many."""
        position = self._position
        epoch, number, _ = position.course.position(serial)
        of_rank = position.epoch_samples // position.course.rank.world_size if epoch >= 0 else 0
        error = self.skipped.note(filled.skipped, epoch, number, of_rank)
        return filled if error is None else filled._replace(error=error)

    @passing()
    def _fill_here(self, filler: Filler) -> None:
        if self._is_left:
            self._leave(filler)
            self.begin()
        try:
            while not self._ring.is_ready() and filler.run_next():
                pass
        except BaseException:  # Ctrl-C: the next call begins the batch again
            self._is_left = True
            self._leave(filler)
            raise

    def _leave(self, filler: Filler) -> None:
        if filler.abandon():
            self._ring.unassign()
        self._is_left = False

    def made(self, serial: int, filled: FillOutcome) -> Batch:
        """Return the batch that was waited for; the caller then marks it as in use in the ring."""
        for message in self._counts.new_warnings(filled.warnings) if filled.warnings else ():
            warnings.warn(message, FileChangedWarning, stacklevel=3)
        batch = self._handed_over(serial, filled)
        self._note(batch, len(filled.skipped))
        return batch

    def forget(self, serial: int) -> None:
        """Forget the error of the batch that was waited for: its traceback would hold the reader.

        The caller undoes this after an exception, even one raised as this returns.
        """
        self._ring.forget(serial)
        if self._submissions is not None:
            self._submissions.drop_error(serial)

    def _note(self, batch: Batch, skipped: int) -> None:
        counts = self._counts
        if batch.epoch not in (-1, counts.open_epoch):
            counts.begin_epoch(batch.epoch, self.work())
        counts.note(batch.index, skipped)
        if batch.epoch >= 0:
            counts.last = batch.epoch, batch.number
        if batch.last:
            counts.end_epoch(self.work())

    def work(self, done: FillerStats | None = None) -> Work:
        """Return the work of all threads so far; `done` is that of the filler, if known."""
        return partial(self._done(done), self._filler.done_in_core())

    def _done(self, done: FillerStats | None = None) -> Done:
        filler = self._filler.done_in_python() if done is None else lambda _: done
        policy, counts = self._setup.device_policy, self._counts
        uploads = counts.upload_times.copied() if self._setup.is_on_gpu else {}
        return partial(counts.work, filler, uploads, policy.num_chunks, policy.decoded_nbytes)

    # --- the caller's batch -----------------------------------------------------------------------

    def _handed_over(self, serial: int, filled: FillOutcome) -> Batch:
        """Return a batch of a slot: views of its memory, or copies if requested."""
        course, config = self._position.course, self._setup.config
        epoch, number, _ = course.position(serial)
        is_last = course.schedule.is_last(serial)
        if epoch >= 0:
            self._position.looped_epoch = epoch
        batch = self._batches.batch(filled, epoch, number, is_last, serial)
        if config.copy:
            return batch.copy()
        if config.debug_lifetimes:
            batch = self._held = batch.copy()
            self._device.share()
        return batch

    def _end_life(self) -> None:
        """With `debug_lifetimes`, poison the batch's arrays, and make its fields raise."""
        if self._held is not None:
            held, self._held = self._held, None
            self._device.poison(held)
            expire(held)

    # --- given samples ----------------------------------------------------------------------------

    @passing()
    def read(self, index: ArrayLike, empty: Empty = plain_memory) -> Batch:
        """Read samples in the calling thread, to a batch outside of epochs that never expires.

        `empty` allocates its memory.
        """
        samples, filler = self._setup.samples(index), self._filler
        if not isinstance(filler, Filler):
            raise ConfigError(
                f"read() reads in this process, and needs {named('workers', 'thread')}"
            )
        what = f"{self._setup.path}: {samples.size:,} samples"
        with taking_memory(what, "read fewer at once"):
            transforms = [
                replace(transform, capacity=rows.total(samples))
                if isinstance(rows, SpanRows)
                else transform
                for transform, rows in self._transforms
            ]
            laid_out = host_slot(samples.size, transforms, self._on_host, empty=empty)
        found = filler.read(samples, laid_out.memory)
        if found.skipped:
            self.skipped.note(found.skipped, -1, -1, 0)
            self._counts.note_skipped(len(found.skipped))
        found = found._replace(arrays=self._device.owned(found.arrays))
        return self._batches.batch(found, -1, -1, False)


def _no_turn(*_: object) -> bool:
    return False
