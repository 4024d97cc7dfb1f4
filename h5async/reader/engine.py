"""Runs a reader behind `AsyncReader`: opens it, starts its filler, logs, reports, and closes it.

The engine holds no reference to the caller's reader, so that a reader that is dropped unclosed can
be garbage-collected, and its engine closed.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.core.binding import why_no_core
from h5async.deliver.slots import SlotRing
from h5async.errors import (
    ConfigError,
    DatasetError,
    H5AsyncError,
    ReaderClosedError,
    ReadError,
    taking_memory,
)
from h5async.fill.filling import Filler
from h5async.fill.outcomes import Calls, FillOutcome, OnDevice, Slots
from h5async.fill.pool import THREAD_NAME
from h5async.index.datasettable import table_of
from h5async.index.layout import DatasetLayout
from h5async.observe.readercounts import ReaderCounts
from h5async.observe.stats import ReaderStats
from h5async.observe.tracing import Trace, Tracing
from h5async.opening.limits import free_memory_nbytes, shared_nbytes
from h5async.reader.delivery import Delivery
from h5async.reader.position import ReaderPosition
from h5async.reader.readersetup import ReaderSetup
from h5async.spelling import Bar, Cell, box, grid, named, printable, size_text
from h5async.system import interruptions
from h5async.system.interruptions import Flag, passing
from h5async.system.timeline import Recorder

if TYPE_CHECKING:
    from h5async.process.helper import HelperFiller

_log = logging.getLogger("h5async.reader")
_MOST_WARNED = 1000  # warnings remembered
_warned: set[str] = set()

_MOMENT_SECONDS = 0.5  # idle workers nearly always end within this time
_REMEDY = "free some memory, or raise the memory limit of this process"


class Engine:
    """The implementation behind `AsyncReader`, whose docstrings list the errors."""

    def __init__(self, config: ReaderConfig) -> None:
        self.setup = ReaderSetup(config)
        self._num_forks = interruptions.num_forks
        self.ring: SlotRing[FillOutcome] = SlotRing(config.prefetch)
        self.filler: Filler | HelperFiller | None = None
        self.has_opened = Flag(True)  # cleared while it is being opened
        self._has_settled = False  # the rank is known, and has batches
        self._recorder = Recorder()
        self._tracing = Tracing(self._recorder, paths_text(config.hdf5_path))
        self._trace_error: ReadError | None = None  # why a trace was not written at the end

    # --- opening ----------------------------------------------------------------------------------

    @passing()
    def open(self) -> None:
        """Open the dataset, and start the threads; after an exception, call `close`."""
        self.has_opened.is_set = False
        begin = time.perf_counter()
        what = f"{paths_text(self.setup.config.hdf5_path)} cannot be opened"
        try:
            interruptions.register(self)
            with taking_memory(what, _REMEDY):
                self._open()
            self._open_seconds = time.perf_counter() - begin
            self._log(self._open_seconds)
            self.ring.check_open()  # exit handlers may have closed it meanwhile
        except OSError as error:  # where a module is imported, for example
            if isinstance(error, H5AsyncError) or error.errno != errno.EMFILE:
                raise
            raise ReadError(
                f"{what}: this process has too many open files; close some, or raise the limit on"
                " open files (ulimit -n)"
            ) from error
        finally:
            self.has_opened.set()

    def _open(self) -> None:
        setup, helper = self.setup, None
        if setup.config.workers != "thread":
            from h5async.process.helper import HelperFiller

            helper = self.filler = HelperFiller(setup.config)
        setup.open(helper)
        self.position = ReaderPosition(setup.samplings, self.ring)
        kept_nbytes = max(1, setup.config.num_helpers) * sum(setup.memory_plan.kept_nbytes)
        self.counts = ReaderCounts(setup.samplings, kept_nbytes)
        delivery = Delivery(setup, self.ring, self.position, self.counts, self._recorder)
        self.delivery = delivery
        calls = Calls(
            delivery.next_requests, delivery.wait_writable, delivery.on_done, self.ring.fail
        )
        if helper is None:
            self._start_threads(calls)
        else:
            self._start_helper(helper, calls)

    def _start_threads(self, calls: Calls) -> None:
        setup = self.setup
        device, memory = setup.device, [slot.memory for slot in setup.slots]
        left = frozenset(outline.name for outline in setup.outlines if outline.is_left)
        filler = self.filler = Filler(
            setup.opened,
            setup.samplings,
            setup.transforms,
            Slots(
                memory,
                setup.rows,
                device.host_memory,
                device.is_writable_at_once,
                True,
                *setup.uploaded_by_core(),
            ),
            setup.memory_plan,
            calls,
            OnDevice(left, setup.device_policy.plan_columns, setup.device_cache),
            self._recorder,
        )
        self.delivery.fill_by(filler)
        filler.start()

    def _start_helper(self, helper: HelperFiller, calls: Calls) -> None:
        setup, plan = self.setup, self.setup.memory_plan
        most_pixels = min(plan.limit_nbytes, free_memory_nbytes()) // setup.config.prefetch
        self.delivery.fill_by(helper)
        helper.start(
            [slot.memory for slot in setup.slots],
            rows=setup.rows,
            pixels_nbytes=shared_nbytes(setup.kinds, setup.rows, most_pixels),
            memory_plan=plan,
            device_cache=setup.device_cache,
            calls=calls,
        )

    def _log(self, seconds: float) -> None:
        """Log the files and the opening time; warn of slow reading and other problems."""
        setup = self.setup
        layouts, cache = setup.layouts, setup.cache_text(self._filler.stats())
        for message in _warnings(setup, self._filler.methods, cache):
            # The same files may be opened again and again; repeated warnings have level DEBUG.
            is_new = message not in _warned
            if is_new and len(_warned) < _MOST_WARNED:
                _warned.add(message)
            _log.log(logging.WARNING if is_new else logging.DEBUG, "%s", message)
        if _log.isEnabledFor(logging.INFO):
            files = {file for y in layouts.values() for file, _ in table_of(y)[1].columns.files}
            of_files = f" (data in {len(files):,} files)" if len(files) > 1 else ""
            what = f"{paths_text(setup.config.hdf5_path)}{of_files}: fields {', '.join(layouts)}"
            count = f"{setup.num_samples:,}"
            _log.info("opened %s, %s samples, in %.3f s", what, count, seconds)

    @property
    def _is_forked(self) -> bool:
        return self._num_forks != interruptions.num_forks

    @property
    def _filler(self) -> Filler | HelperFiller:
        assert self.filler is not None, "the engine is not open"
        return self.filler

    # --- use --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the reader is closed, or its threads do not exist here."""
        if self._is_forked:
            raise ReaderClosedError(
                "the reader was made before this process was forked, and its threads do not exist"
                " here; make a reader in each process, after the fork, or start processes by spawn"
            )
        self.ring.check_open()

    def check_not_empty(self) -> None:
        """Raise `DatasetError`, with the reason, if an epoch has no batch."""
        self.check_open()
        if not self.position.num_batches:
            where = paths_text(self.setup.config.hdf5_path)
            raise DatasetError(f"{where}: an epoch has no batch: {self._why_empty()}")

    def _why_empty(self) -> str:
        config, count = self.setup.config, self.setup.num_samples
        if config.sampler is not None:
            return "the sampler draws no sample"
        if not count and config.indices is not None:
            return f"`{named('indices')}` selects no sample"
        fields = config.batch_fields.values()
        is_cut = any(field.steps is not None and field.pad == "drop" for field in fields)
        if not count and is_cut and any(one.sample_count for one in self.setup.layouts.values()):
            return (
                "no sample has all of its steps inside its sequence; give nearer steps, or"
                ' pad="edge" or pad="zero"'
            )
        given = [named(name, getattr(config, name)) for name in ("batch_size", "drop_last")]
        ranks = self.position.course.rank.world_size
        given += [named("world_size", ranks)] if ranks > 1 else []
        remedy = f"; make {named('batch_size')} smaller, or use {named('drop_last', False)}"
        return f"{count} samples, {', '.join(given)}{remedy if count else ''}"

    def settle(self) -> None:
        """Settle the rank, and check that it has batches."""
        self.check_open()
        if not self._has_settled:
            self.position.settle()
            self.check_not_empty()
            self._has_settled = True

    @passing()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved."""
        self.position.restore(state)
        self.counts.end_epoch(self.delivery.work())

    def jump(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches are dropped."""
        if self.position.schedule.position(self.ring.consumer.next)[::2] != (epoch, 0):
            self.position.jump(epoch)
            self.counts.end_epoch(self.delivery.work())

    # --- reports ----------------------------------------------------------------------------------

    def stats(self, since: ReaderStats | None = None, epoch: int | None = None) -> ReaderStats:
        """Return statistics, as `AsyncReader.stats`."""
        setup, done = self.setup, self._filler.stats()
        return self.counts.stats(
            since,
            epoch,
            self.delivery.work(done)(),
            self._filler.methods,
            num_threads=setup.num_threads if setup.has_threads else 0,
            workers=setup.config.workers,
            cache=setup.cache_text(done),
            decode=setup.device_policy.sentence,
            open_seconds=self._open_seconds,
        )

    @passing()
    def trace(self, path: str | os.PathLike[str] | None, **options: Any) -> Trace:
        """Begin a trace of all work from now on."""
        self.check_open()
        self.ring.take_back()
        position = self.position
        return self._tracing.begin(
            path,
            self._filler,
            lambda: {one: position.course.position(one)[:2] for one in self.ring.serials},
            self.ring.consumer.held,
            **options,
        )

    def html(self) -> str:
        """Return a small table for a notebook: the fields, how they are read, and the progress."""
        setup, ways = self.setup, self.stats().ways
        threads = setup.num_threads if setup.has_threads else 0
        facts: list[list[Cell]] = [
            ["samples", f"{setup.num_samples:,}"],
            ["order", _order_text(setup.config)],
            ["device", f"{setup.device.name}, {threads} thread{'s' * (threads != 1)}"],
        ]
        try:
            nbytes = self.counts.epoch_nbytes(self.position.epoch_samples)
            facts.append(["decoded", f"{size_text(nbytes)} an epoch"])
            facts.append(["progress", self._progress()])
        except ConfigError:  # launchers contradict each other, and no batch was requested yet
            facts.append(["progress", "rank not known"])
        head = ("field", "dataset", "sample shape", "dtype", "read by")
        fields = [
            [name, one.path, _row_text(one), str(one.dtype), ways[name]]
            for name, one in setup.field_layouts.items()
        ]
        rows = [[printable(cell) for cell in row] for row in fields]
        state = "closed" if self.ring.is_closed else ""
        files = paths_text(setup.config.hdf5_path)
        return box(f"AsyncReader {files}", [grid(facts), grid(rows, head)], subtitle=state)

    def _progress(self) -> Cell:
        batches, last, course = self.position.num_batches, self.counts.last, self.position.course
        held = self.ring.consumer.held
        if held is not None and held >= course.schedule.serial and held not in course.given:
            last = course.position(held)[:2]
        if last is None or not batches:
            return f"{batches:,} batches an epoch, none delivered yet"
        epoch, number = last
        return Bar((number + 1) / batches, f"epoch {epoch}, {number + 1:,} of {batches:,} batches")

    # --- closing ----------------------------------------------------------------------------------

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
        if self._is_forked:  # locks held by the parent's threads stay locked here
            return
        self.ring.close(at_exit=at_exit)
        if self.filler is not None:
            self.filler.stop(self.setup.close)

    def join(self, patience_seconds: float | None) -> None:
        """Wait until everything is closed, after `stop`; not in a thread of the pool."""
        if self._is_forked:
            return
        is_ours = threading.current_thread().name.startswith(THREAD_NAME)
        if self.filler is not None and not is_ours:
            self.filler.join(patience_seconds)
        self._trace_error = self._tracing.close() or self._trace_error

    def drop(self) -> None:
        """Close a reader that was garbage-collected, in any thread, which may hold any lock.

        A worker may need that lock (h5py's, say) to end, so this waits only for a moment.
        """
        self.stop()
        self.join(_MOMENT_SECONDS)


def _row_text(layout: DatasetLayout) -> str:
    if not layout.is_ragged:
        return str(layout.part_shape)
    inner = "".join(f" {length}," for length in layout.part_shape)
    return f"(any,{inner.removesuffix(',')})"


def _order_text(config: ReaderConfig) -> str:
    if config.sampler is not None:
        order = "by a sampler"
    elif config.weights is not None:
        order = "drawn by weights"
    else:
        order = f"shuffled, {config.shuffle}" if config.shuffle else "as in the file"
    limit = f", or {config.batch_values:,} values" if config.batch_values else ""
    return f"{order}; batches of {config.batch_size:,} samples{limit}"


def _warnings(setup: ReaderSetup, methods: Sequence[str], cache: str) -> Iterator[str]:
    """Yield warnings about slow reading, values outside of samples, and lack of memory.

    `cache` is that of `ReaderStats`. Whatever is in order is only logged.
    """
    config, plan, what = setup.config, setup.memory_plan, paths_text(setup.config.hdf5_path)
    no_core = why_no_core()
    if no_core is not None:
        yield no_core
    for (name, layout), method in zip(setup.layouts.items(), methods, strict=True):
        field = printable(f'{layout.file}: field {name}, dataset "{layout.path}"')
        reason, count = layout.fallback_reason, layout.unused_rows
        if no_core is None and (reason is not None or "h5py" in method):
            why = f": {reason}" if reason else ", because the core does not read its storage"
            yield f"{field}: is read through h5py, one read at a time{why}"
        else:
            how = "through h5py" if method == "h5py" else f"directly ({method})"
            _log.info("%s: is read %s", field, how)
        if layout.spans is not None and layout.segments is None:
            count = layout.num_samples - int(layout.spans[-1] - layout.spans[0])
        if count:  # the offsets may have another meaning
            yield (
                f"{field}: {count:,} of its values lie before the first sample or after the last"
                " one, and belong to none; if they should, check the options offsets and"
                " offsets_kind: there is one more offset than samples, and one end or length per"
                " sample"
            )
    if skipped := setup.opened.skipped:
        several = "; ".join(one.reason for one in skipped)
        text = f"{what}: {len(skipped):,} other files were left out"
        yield f'{text} (on_error="skip"): {several}'
    if config.cache is not None and cache.startswith("none: "):
        yield f"{what}: the option cache keeps no rows: {cache.removeprefix('none: ')}"
    elif config.cache is not None:
        _log.info("%s: rows are kept: %s", what, cache)
    if plan.most_threads < config.filler_threads:
        yield (
            f"{what}: memory suffices for {plan.most_threads} of {config.filler_threads} threads:"
            " max_batch_bytes, or free memory, allows no more"
        )
    kept, wanted = sum(plan.kept_nbytes), sum(setup.wanted_nbytes)
    if kept < wanted:
        yield (
            f"{what}: {wanted:,} bytes of decoded chunks should be kept for later batches, but only"
            f" {kept:,} are free for them: chunks are decoded more than once"
        )
    lengths = setup.samplings.lengths
    if lengths is not None and config.batch_values is not None:
        most = min(config.batch_values, np.iinfo(np.int64).max)
        if count := int(np.count_nonzero(lengths.of_sample > most)):
            yield (
                f"{what}: {count:,} samples have more than {config.batch_values:,} values"
                f" (batch_values), up to {int(lengths.of_sample.max()):,}: each is a batch of its"
                " own"
            )
