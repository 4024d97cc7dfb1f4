"""Fills slots with batches, in threads of this process.

A `FillRequest` enters; a filled slot leaves, with a `FillOutcome`: planned, read, decoded,
transformed, postprocessed. The filler knows nothing of the reader: it is made from the
configuration, the layouts and the memory of the slots, and takes small picklable requests.

It combines the pool of threads (`pool.py`), the phases of a batch (`phases.py`), and the planning
and reading of rows (`reading.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.config import ImageField, ReaderConfig
from h5async.core.binding import Core, load_core, mapping_mode
from h5async.errors import ReaderClosedError
from h5async.fill.imagedecoding import ImageDecoder
from h5async.fill.outcomes import FillerStats, FillOutcome, SlotFiller
from h5async.fill.phases import Phases
from h5async.fill.pool import Work, WorkPool
from h5async.fill.postprocess import Postprocess, load_function, masks_of
from h5async.fill.reading import BatchReader, ColumnReader
from h5async.fill.recording import Recorded, Recording
from h5async.fill.resident import Budget, HostCache, Residency, open_host_cache
from h5async.fill.submissions import Submissions
from h5async.index.layout import DatasetLayout
from h5async.io.shared import plain_memory
from h5async.opening.dataset import Samplings
from h5async.opening.limits import MemoryPlan
from h5async.order.requests import FillRequest
from h5async.order.spans import SpanRows
from h5async.plan.transform import RowTransform
from h5async.read.executors import Executors
from h5async.samples.columns import Assembly, Categories, Rows, SlotMemory, SparseShape
from h5async.system.timeline import Recorder, Timeline


class Filler(SlotFiller):
    """Fills slots in a pool of threads or, without threads, in the caller of `run_next`.

    Raises `ConfigError` if a ``"module:function"`` cannot be imported, and `OutOfMemoryError` if
    the system refuses memory for the threads.

    Parameters
    ----------
    config
        Threads, postprocess.
    samplings
        The orders of samples to which requests refer.
    layouts, transforms
        By field name, in field order.
    slots
        Memory of each slot.
    memory_plan
        The remaining memory that may be used.
    shapes, categories
        Of sparse and of categorical fields, by name.
    rows
        Samples that fit into a slot; None means the rows of its first array.
    left
        Names of fields that the device assembles.
    new_memory
        Returns host memory for pixels, from which the device uploads.
    device_cache
        The samples that the device keeps, if it does, and that need not be read again.
    column_reader
        Says what the device reads in place of rows; None: all rows are read.
    next_requests, before_fill, on_done, on_crash
        As in `SlotFiller`, called in workers. `before_fill` may block until the slot's memory may
        be overwritten. `on_done` is called once per request, unless the filler is closed before.
        After `on_crash` the thread goes on.
    may_submit
        Whether the consumer may submit batches itself: nothing has to be done before a slot is
        filled, and `before_fill` is not called then.
    recorder
        Records what is done, if given.

    Attributes
    ----------
    submissions
        Where the consumer submits batches itself; None: threads ask for requests.
    """

    def __init__(
        self,
        config: ReaderConfig,
        samplings: Samplings,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        slots: Sequence[SlotMemory],
        *,
        memory_plan: MemoryPlan,
        shapes: Mapping[str, SparseShape] = MappingProxyType({}),
        categories: Mapping[str, Categories] = MappingProxyType({}),
        rows: int | None = None,
        left: Collection[str] = (),
        new_memory: Callable[[int], NDArray[np.uint8]] = plain_memory,
        device_cache: Residency | None = None,
        column_reader: ColumnReader | None = None,
        next_requests: Callable[[], Sequence[FillRequest]],
        before_fill: Callable[[int], None],
        on_done: Callable[[FillRequest, FillOutcome], None],
        on_crash: Callable[[BaseException], None],
        may_submit: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._layouts, several = list(layouts.values()), list(transforms.values())
        self._file = str(self._layouts[0].file)
        self._opens_ahead = not config.names_index
        function = load_function(config.postprocess)
        assembly = new_assembly(config, samplings, layouts, shapes, categories)
        postprocess = None
        if function is not None:
            masks = masks_of(config.batch_fields, layouts, samplings.rows)
            postprocess = Postprocess(function, list(config.batch_fields), config.seed, masks)
        self._cache = _open_cache(config, samplings, several, memory_plan)
        self._resident = self._cache if isinstance(self._cache, HostCache) else device_cache
        # Invalid after a change of a file; emptied at the end.
        self._residencies = [] if self._resident is None else [self._resident]
        core = load_core()
        recorder = self._recorder = Recorder() if recorder is None else recorder
        self._executors = Executors(
            core,
            self._layouts,
            mapping_mode(config.io),
            memory_plan.kept_nbytes,
            partial(_forget, self._residencies),
            samplings.selection.size,
        )
        try:
            self._next_requests = next_requests
            num_threads = min(config.thread_count, memory_plan.most_threads)
            self._reader = BatchReader(
                core,
                self._layouts,
                several,
                column_reader,
                self._cache if isinstance(self._cache, HostCache) else None,
                self._executors,
                max(1, num_threads),
                slots,
                samplings.rows,
                rows,
                recorder,
            )
            self._images = _image_decoder(
                config,
                layouts,
                dict(zip(layouts, samplings.rows, strict=True)),
                core,
                slots,
                rows,
                max(1, num_threads),
                memory_plan,
                left,
                new_memory,
            )
            self.submissions: Submissions | None = None
            selection = samplings.selection
            queue = self._reader.open_queue(selection) if may_submit else None
            if queue is not None and self._resident is None:
                needs_python = postprocess is not None or not self._reader.transforms_all
                needs_python |= assembly.needs_work
                if samplings.draws is not None:
                    queue.draw_from(samplings.draws.table)
                self.submissions = Submissions(
                    queue,
                    self._reader,
                    samplings,
                    slots,
                    assembly,
                    file=self._file,
                    needs_python=needs_python,
                )
            self._pool = WorkPool(num_threads, self._find_work, on_crash, self.submissions)
            self._phases = Phases(
                self._pool,
                self._reader,
                file=self._file,
                samplings=samplings,
                transforms=several,
                slots=slots,
                assembly=assembly,
                left=left,
                images=self._images,
                resident=self._resident,
                postprocess=postprocess,
                before_fill=before_fill,
                on_done=on_done,
                take_warnings=self._executors.changes.take_warnings,
                recorder=recorder,
            )
            if self.submissions is not None:
                self.submissions.resume = self._phases.resume
        except BaseException:
            self._executors.close()  # it has no other owner yet
            raise
        self._final_stats: FillerStats | None = None
        self._core, self._columns = core, list(layouts)
        self._recording: Recording | None = None

    def start(self) -> None:
        """Open files, and start the threads; call `stop` after an exception.

        `ReadError` is raised if a file cannot be opened, or the system gives no more threads.
        """
        if self._opens_ahead:
            self._executors.open_ahead(lambda: self._pool.is_stopped)
        self._pool.start(self._file)

    @property
    def methods(self) -> list[str]:
        """How each field is read, in field order; see `ReaderStats.ways`."""
        return self._executors.methods

    def kick(self) -> None:
        """Have a worker ask for requests. Never blocks; extra calls are harmless."""
        self._pool.kick()

    def fill(self, request: FillRequest) -> None:
        """Fill a slot. Never blocks. Safe to call from any thread."""
        self._pool.add(request.serial, [partial(self._phases.begin, request)])

    def run_next(self) -> bool:
        """Do the most urgent share of work in the calling thread; return False if there is none."""
        return self._pool.run_next()

    def read(self, index: NDArray[np.int64], memory: SlotMemory) -> tuple[NDArray[Any], ...]:
        """Read samples in the calling thread, while other work is under way, to memory of n rows.

        Returns the rows of each field, or the result of `postprocess`. `H5AsyncError` is raised if
        they cannot be read, or the filler was stopped.
        """
        found: list[tuple[NDArray[Any], ...]] = []
        if not self._pool.run(lambda: found.append(self._phases.read(index, memory))):
            raise ReaderClosedError("the reader is closed; make a new one")
        return found[0]

    def abandon(self) -> bool:
        """Forget all work after an exception in `run_next`; return False if threads are at work."""
        return self._pool.forget_work()

    def stats(self) -> FillerStats:
        """Return what all threads have done so far."""
        if self._final_stats is not None:
            return self._final_stats
        seconds = self._reader.times.seconds()
        if self.submissions is not None:
            seconds["plan"] += self.submissions.plan_seconds()
        seconds["transform"] += self._reader.transform_seconds()
        return FillerStats(
            seconds,
            self._reader.counts(),
            self._executors.fallback_reads,
            str(self._cache or "none"),
            0 if self._images is None else self._images.broken_images,
        )

    def record(self, timeline: Timeline | None) -> None:
        """Record what all threads do from now on; None: stop recording."""
        if timeline is not None:
            self._recording = Recording(
                timeline, self._recorder, self._core, self._reader, self._columns
            )
        elif self._recording is not None:
            self._recording.stop()

    def recorded(self) -> list[Recorded]:
        """Return what was recorded since the last call; after the end of a recording, the rest."""
        recording = self._recording
        if recording is None:
            return []
        if self._recorder.timeline is None:
            self._recording = None
        return [recording.take(os.getpid())]

    def note_uploaded(self, slot: int, index: NDArray[np.int64]) -> None:
        """Note that the device cache has the samples of the batch in a slot."""
        assert self._resident is not None
        self._resident.add(index)

    def stop(self, then: Callable[[], None]) -> None:
        """Drop pending work; after work under way has ended, close the files and call `then`.

        Never waits: the garbage collector may call it in any thread, which may hold a lock that a
        worker waits for. Extra calls are harmless, and complete what an exception interrupted.
        """
        self._reader.interrupt()
        self._pool.stop(partial(self._let_go, then))

    def join(self, patience_seconds: float | None = None) -> None:
        """Wait until what `stop` requested is done; a worker does not wait for itself."""
        self._pool.join(patience_seconds)

    def _find_work(self) -> list[tuple[int, Work]]:
        begin = self._phases.begin
        return [(request.serial, partial(begin, request)) for request in self._next_requests()]

    def _let_go(self, then: Callable[[], None]) -> None:
        """Release all that only workers use; called after the last of them."""
        self._executors.close()
        self._final_stats = self.stats()
        self._reader.close()
        self._phases.close()
        if self.submissions is not None:
            self.submissions.close()
        self._residencies.clear()
        self._resident = self._cache = None
        then()
        self._next_requests = list  # whose owner holds this object


def _image_decoder(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    spans: Mapping[str, Rows],
    core: Core | None,
    slots: Sequence[SlotMemory],
    rows: int | None,
    threads: int,
    memory_plan: MemoryPlan,
    left: Collection[str],
    new_memory: Callable[[int], NDArray[np.uint8]],
) -> ImageDecoder | None:
    """Return the decoder of images, if a field has any."""
    fields = config.batch_fields
    if not any(isinstance(field, ImageField) for field in fields.values()):
        return None
    return ImageDecoder(
        fields,
        layouts,
        spans,
        config.seed,
        core,
        slots=slots,
        rows=config.batch_size if rows is None else rows,
        threads=threads * max(1, config.num_helpers),
        limit_nbytes=memory_plan.limit_nbytes,
        left=left,
        new_memory=new_memory,
    )


def new_assembly(
    config: ReaderConfig,
    samplings: Samplings,
    layouts: Mapping[str, DatasetLayout],
    shapes: Mapping[str, SparseShape],
    categories: Mapping[str, Categories],
) -> Assembly:
    """Return the `Assembly` that makes arrays of fields from those of columns."""
    first = next(iter(layouts.values()))
    counts = [count for _, count in first.file_samples] or [first.sample_count]
    first_samples = np.cumsum([0, *counts], dtype=np.int64)
    limited = [name for name, layout in layouts.items() if layout.limit is not None]
    return Assembly(config.batch_fields, samplings.rows, shapes, first_samples, categories, limited)


def _open_cache(
    config: ReaderConfig,
    samplings: Samplings,
    transforms: Sequence[RowTransform],
    memory_plan: MemoryPlan,
) -> HostCache | Budget | None:
    """Return where rows are kept for later epochs, or why not; None if not requested."""
    if config.cache != "host":
        return None
    row_nbytes = [transform.raw_nbytes for transform in transforms]
    spans = [one if isinstance(one, SpanRows) else None for one in samplings.rows]
    left_nbytes = memory_plan.left_nbytes
    return open_host_cache(samplings.selection, row_nbytes, config.cache_bytes, left_nbytes, spans)


def _forget(residencies: Sequence[Residency]) -> None:
    for resident in residencies:
        resident.forget()
