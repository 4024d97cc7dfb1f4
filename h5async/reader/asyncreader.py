"""Defines `AsyncReader`, which takes options and delivers batches."""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from numpy.typing import ArrayLike

from h5async.config import ReaderConfig, check_timeout
from h5async.config.describe import takes_options
from h5async.config.files import paths_text
from h5async.errors import ConfigError, DatasetError, FileChangedWarning, ReadError
from h5async.html import Bar, Cell, box, grid, size_text
from h5async.names import printable
from h5async.observe.stats import ReaderStats
from h5async.observe.trace import Trace
from h5async.reader import lifetime  # noqa: F401  # registers exit and fork handlers
from h5async.reader.batch import Batch
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions
    from h5async.index.layout import DatasetLayout


@takes_options
class AsyncReader:
    """Reads minibatches from HDF5 files in threads, ahead of the loop that uses them.

    A reader has one consumer: call its methods from one thread at a time.

    Parameters
    ----------
    config
        Options as a mapping, a `ReaderConfig`, or the path of a TOML, JSON or YAML file.
    **options
        Single options, which win over `config`: those below.

    Raises
    ------
    ConfigError
        If an option is unknown, or does not fit the dataset.
    ReadError
        If a file cannot be opened.
    DatasetError
        If a dataset is missing or cannot be delivered in batches, or if lengths of datasets or rows
        of files differ.
    UnsafeFileError
        If a file refers to others that neither lie beside it nor are permitted by
        ``allow_external``.
    DeviceError
        If the requested device does not exist, or cannot hold the data.

    Examples
    --------
    >>> file = "sample_data/digits.h5"
    >>> with AsyncReader(hdf5_path=file, batch_size=256, shuffle="full") as reader:
    ...     for epoch in range(2):
    ...         for data, labels in reader:
    ...             loss = data.mean()  # your step(data, labels)
    ...     print(data.shape, labels.shape, reader.num_samples)
    (5, 8, 8) (5,) 1797
    """

    def __init__(
        self,
        config: ReaderConfig
        | ReaderOptions
        | Mapping[str, Any]
        | str
        | os.PathLike[str]
        | None = None,
        /,
        **options: Unpack[ReaderOptions],
    ) -> None:
        # Imported here, because it loads nearly all of the package.
        from h5async.reader.engine import Engine
        from h5async.reader.handover import Handover

        self._config = ReaderConfig.load(config, **options)
        self._engine = Engine(self._config)
        self._dropped = weakref.finalize(self, self._engine.drop)
        self._dropped.atexit = False
        try:
            self._engine.open()
        except BaseException:
            self._engine.close()
            self._dropped.detach()
            raise
        self._has_settled = False  # the rank is known, and has batches
        self._handover = Handover(self._engine)

    @property
    def config(self) -> ReaderConfig:
        """The validated options."""
        return self._config

    @property
    def device(self) -> str:
        """Where batches are delivered: ``"cpu"`` or ``"cuda:N"``."""
        return self._engine.device.name

    @property
    def layouts(self) -> dict[str, DatasetLayout]:
        """Where the values of each field lie, and why h5py reads them, if it does.

        For a sparse field, this is the layout of the stored values.
        """
        from h5async.samples.assembly import by_field  # a slow import

        return by_field(self._engine.layouts, lambda values, indices: values)

    @property
    def categories(self) -> dict[str, tuple[Any, ...]]:
        """The names of categorical fields' codes, per field: name number c belongs to code c.

        Code -1 means no value. If files have different categories, these are all of them.

        Examples
        --------
        >>> with h5py.File("cells.h5", "w") as file:  # as AnnData writes it
        ...     file["obs/kind/codes"] = np.array([1, 0, -1], "i1")
        ...     file["obs/kind/categories"] = ["B", "T"]
        ...     file["obs/kind"].attrs["encoding-type"] = "categorical"
        >>> with AsyncReader(hdf5_path="cells.h5", fields={"kind": "obs/kind"}) as reader:
        ...     print(reader.get_next_batch().kind, reader.categories)
        [ 1  0 -1] {'kind': ('B', 'T')}
        """
        kinds = self._engine.kinds.items()
        return {n: kind.categories.names for n, kind in kinds if kind.categories is not None}

    @property
    def num_samples(self) -> int:
        """Number of selected samples: all of the dataset, or those of the option `indices`."""
        return self._engine.num_samples

    @property
    def nbytes(self) -> int:
        """Decoded bytes of one epoch, of all fields, in the dtypes of the file.

        If samples vary in length, and some are left out or drawn, their mean length counts.
        """
        engine = self._engine
        return engine.counts.epoch_nbytes(engine.samplings.selection, engine.position.epoch_samples)

    @property
    def fallback_reads(self) -> int:
        """Reads through h5py so far: one per batch and field that needs it."""
        return self._engine.fallback_reads

    def stats(self, since: ReaderStats | None = None, *, epoch: int | None = None) -> ReaderStats:
        """Return what was done so far and how long it took; ``str()`` says what to change.

        May be called from any thread, and after `close`.

        Parameters
        ----------
        since
            Earlier statistics of this reader: count only what was done after them.
        epoch
            The number of an epoch, of the last 256; -1 is that of the last delivered batch, -2 the
            one before. None means everything. Work for an epoch that is done before the end of the
            previous one counts for the previous one.

        Raises
        ------
        ConfigError
            If `since` is not of this reader, or newer, or if there are no statistics of the epoch.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     for data, labels in reader:
        ...         pass
        ...     stats = reader.stats()
        >>> stats.batches, stats.samples, stats.filters
        (29, 1797, ('deflate', 'shuffle'))
        >>> print(stats)  # doctest: +SKIP
        data-bound: waited 31 % of the time; the limit is deflate decoding, 0.9 GB/s on 2 threads

        Of each epoch, and since an earlier moment:

        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     for epoch in range(3):
        ...         before = reader.stats()
        ...         for data, labels in reader:
        ...             pass
        ...         print(reader.stats(epoch=-1).batches, reader.stats(since=before).batches)
        29 29
        29 29
        29 29
        """
        return self._engine.stats(since, epoch)

    def trace(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        nvtx: bool = False,
        torch: bool = False,
        max_events: int = 500_000,
    ) -> Trace:
        """Record what each thread does for which batch, until the trace is stopped.

        The file is written at the end: by ``stop()`` of the returned `Trace`, at the end of ``with
        reader.trace(...)``, or with the reader. https://ui.perfetto.dev and chrome://tracing show
        when each thread planned, read, decoded, placed, transformed, postprocessed and uploaded
        batches, and when the loop waited for one (``wait``) and had one (``in use``).

        Parameters
        ----------
        path
            The file, in Chrome's trace event format (JSON); ``.gz`` compresses it. None means no
            file, only what `nvtx` and `torch` request.
        nvtx
            Also open ranges of NVTX, which Nsight Systems shows; this needs CuPy. Ranges cover what
            Python does: wait, plan, transform, decode (of images), postprocess, upload.
        torch
            Also open ranges of ``torch.profiler.record_function``. By default, PyTorch's profiler
            shows only those of the thread that started it.
        max_events
            Number of events to keep, from the first one on, at most 20,000,000; the others are
            counted. An event takes about 50 bytes of memory in the compiled core, 200 in Python,
            and 150 in the file.

        Raises
        ------
        ConfigError
            If a trace of this reader is already running, the file cannot be written, or
            `max_events` is invalid.
        MissingPackageError
            If CuPy or PyTorch is needed and not installed.
        OutOfMemoryError
            If the system refuses memory for that many events.
        ReaderClosedError
            If the reader is closed.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
        ...     with reader.trace("t.json"):
        ...         for data, labels in reader:
        ...             pass
        >>> import json
        >>> with open("t.json") as file:
        ...     events = json.load(file)["traceEvents"]
        >>> sorted({event["name"] for event in events})[:5]
        ['batch', 'decode', 'fetch', 'in use', 'place']
        """
        return self._engine.trace(path, nvtx=nvtx, torch=torch, max_events=max_events)

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        With `batch_values` or `bucket`, epochs may differ: it is that of the current epoch or,
        between two epochs, of the next one. Unless the rank is given as an option, it is settled
        with the first batch; until then, the number is for the rank found now.

        Raises
        ------
        ConfigError
            If the environment has contradictory ranks.
        """
        return self._engine.position.num_batches

    def fetch_data(self, index: ArrayLike | None = None) -> bool:
        """Request the next batch in order, or one of given samples. Never blocks.

        While all slots are busy, the request waits in line: a batch in use is never overwritten.
        Extra calls are harmless.

        Parameters
        ----------
        index
            Sample numbers of the dataset, for a batch outside of epochs (its `epoch` and `number`
            are -1), in this order; at most `batch_size`, repeats are allowed. It comes after
            earlier requests, and, in a ``for`` loop, after batches that threads read ahead. The
            order of epochs does not change.

        Returns
        -------
        bool
            Whether the requested batch is the last of its epoch.

        Raises
        ------
        ConfigError
            If `index` has invalid sample numbers, or too many; then nothing is requested.
        ReaderClosedError
            If the reader is closed.
        DatasetError
            If an epoch has no batch.

        Examples
        --------
        >>> reader = AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=1000)
        >>> reader.fetch_data(), reader.fetch_data(), reader.fetch_data([3, 17, 42])
        (False, True, False)
        >>> [reader.get_next_batch().size for _ in range(3)]
        [1000, 797, 3]
        >>> reader.close()
        """
        self._settle()
        return self._engine.fetch(None if index is None else self._engine.given.batch(index))

    def get_next_batch(self, timeout: float | None = None) -> Batch:
        """Return the oldest requested batch, and end the life of the one before.

        Requests a batch if none is. Blocks until the batch is filled; its upload to a GPU is
        ordered before the current stream's next operations.

        Parameters
        ----------
        timeout
            Maximum seconds to wait; None means the option ``timeout``.

        Raises
        ------
        ConfigError
            If `timeout` is invalid; then nothing else happens.
        BatchTimeoutError
            If the batch is not ready in time; the next call continues to wait for it.
        ReadError, DeviceError, PostprocessError
            If filling this batch failed; the next call returns the next batch.
        ReaderClosedError
            If the reader is closed, before the call or during it.
        DatasetError
            If an epoch has no batch.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     batch = reader.get_next_batch(timeout=60)
        ...     print(batch)
        <Batch 0 of epoch 0: data=(64, 8, 8) uint8, labels=(64,) int64>
        """
        seconds = self._config.timeout if timeout is None else check_timeout(timeout)
        self._settle()
        self._handover.expire()
        engine = self._engine
        serial, filled = engine.next(seconds)
        try:
            for message in engine.counts.new_warnings(filled.warnings) if filled.warnings else ():
                warnings.warn(message, FileChangedWarning, stacklevel=2)
            batch = self._handover.batch(serial, filled) if filled.error is None else None
            engine.take(serial, filled)
            if batch is not None:
                engine.note(batch.index, batch.epoch, batch.number, batch.last)
        except BaseException:  # Ctrl-C: the next call returns this batch
            engine.ring.put_back(serial, filled)
            raise
        if batch is None:
            try:
                assert filled.error is not None
                raise filled.error
            finally:
                del filled  # the traceback holds this frame, and would keep the reader alive
        return batch

    def read(self, index: ArrayLike) -> Batch:
        """Read given samples at once, in the calling thread; the batch owns its memory.

        Requested batches continue to be filled, and do not change.

        Parameters
        ----------
        index
            Sample numbers of the dataset: any number of them, in this order; repeats are allowed.

        Returns
        -------
        Batch
            Its `epoch` and `number` are -1.

        Raises
        ------
        ConfigError
            If `index` has invalid sample numbers.
        ReadError, PostprocessError
            If the samples cannot be read.
        ReaderClosedError
            If the reader is closed.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
        ...     batch = reader.read([3, 17, 42])
        >>> batch.labels
        array([3, 7, 1])
        """
        engine = self._engine
        engine.check_open()
        samples = engine.given.checked(index)
        return self._handover.given(samples, engine.read(samples))

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch: the first one of which no batch was taken yet.

        If an epoch is left before its end, its requested batches are dropped. The next epoch's
        first batches are read before this one ends.
        """
        from h5async.reader.handover import Epoch

        engine = self._engine
        engine.check_open()
        engine.position.settle()
        if not engine.position.num_batches:
            return iter(())
        return Epoch(engine, engine.begin_epoch(), self.get_next_batch)

    def set_epoch(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches of others are dropped.

        Nothing is dropped if this epoch comes next anyway.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.

        Raises
        ------
        ConfigError
            If it is not an integer, or negative.
        ReaderClosedError
            If the reader is closed.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", shuffle="full") as reader:
        ...     reader.set_epoch(5)
        ...     print(reader.get_next_batch().epoch)
        5
        """
        try:
            epoch = operator.index(epoch)
        except TypeError as error:
            raise ConfigError(f"an epoch must be an integer from 0, found {epoch!r}") from error
        if epoch < 0:
            raise ConfigError(f"there is no epoch {epoch}; the first is 0")
        self._check_not_empty()
        engine = self._engine
        if engine.schedule.position(engine.ring.consumer.next)[::2] != (epoch, 0):
            engine.jump(epoch)

    def reset(self) -> None:
        """Go back to the first batch of epoch 0."""
        self.set_epoch(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the reader's position, for `load_state_dict` to continue from later.

        Only batches that `get_next_batch` returned count. The state is small for any dataset, can
        be written as JSON, and is the same in all ranks. It describes the files as they were when
        the reader was made.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     for number in range(10):
        ...         batch = reader.get_next_batch()
        ...     state = reader.state_dict()
        >>> state["epoch"], state["position"]
        (0, 640)
        """
        self._check_not_empty()
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a state was saved; requested batches are dropped.

        The next batch is the one that would have come next then, with any number of threads or
        slots and on any device. With another `batch_size` or `world_size`, the rest of the epoch is
        dealt again: samples that all ranks together had received do not repeat, and none is left
        out. (Whole steps of all ranks count: save the state of all ranks at the same step.) The
        next ``for`` loop gives the rest of the epoch.

        Parameters
        ----------
        state
            What `state_dict` returned.

        Raises
        ------
        ConfigError
            If it was saved with another seed, shuffle, window, selection, weights, sampler,
            `batch_values` or `bucket`, or is not a state.
        ReadError
            If a file has changed since.
        ReaderClosedError
            If the reader is closed.

        Examples
        --------
        >>> options = {"hdf5_path": "sample_data/digits.h5", "batch_size": 64, "shuffle": "full"}
        >>> with AsyncReader(options) as reader:
        ...     for number in range(10):
        ...         batch = reader.get_next_batch()
        ...     state = reader.state_dict()
        >>> with AsyncReader(options) as reader:
        ...     reader.load_state_dict(state)
        ...     print(reader.get_next_batch())
        <Batch 10 of epoch 0: data=(64, 8, 8) uint8, labels=(64,) int64>
        """
        self._check_not_empty()
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"load_state_dict() takes what state_dict() returned, found {state!r}"
            )
        self._engine.load(state)

    def close(self) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Waits for work in progress (a `postprocess`, say), but no longer than the option `timeout`;
        anything still running then ends with that work. The arrays of the batch that the caller
        holds stay valid. A running trace ends, too.

        Raises
        ------
        ReadError
            If the file of a trace cannot be written; the reader is still closed.
        """
        try:
            self._engine.close(self._config.timeout)
        except ReadError:
            self._dropped.detach()
            raise
        self._dropped.detach()  # nothing is left to do when the reader is collected

    def __enter__(self) -> AsyncReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reader that has not begun; unpickling opens it again.

        Raises `ConfigError` if a batch was requested already.
        """
        self._check_not_empty()
        if self._engine.ring.consumer.has_begun:
            raise ConfigError(
                "a reader that has begun cannot be pickled; pickle it before the first batch is"
                " asked for, or send its config and its state_dict()"
            )
        return _reopen, (self._config, self.state_dict())

    def __repr__(self) -> str:
        state = ", closed" if self._engine.ring.is_closed else ""
        try:
            batches = f"{len(self)} batches an epoch"
        except ConfigError:  # launchers contradict each other, and no batch was requested yet
            batches = "rank not known"
        return (
            f"<AsyncReader {paths_text(self._config.hdf5_path)}: {', '.join(self._engine.names)},"
            f" {self.num_samples} samples, {batches}, {self.device}{state}>"
        )

    def _repr_html_(self) -> str:
        """Show a small table in a notebook: the fields, how they are read, and the progress."""
        layouts, ways = self.layouts, self.stats().ways
        fields = [
            [name, one.path, _row_text(one), str(one.dtype), ways[name]]
            for name, one in layouts.items()
        ]
        threads = self._engine.num_threads if self._engine.has_threads else 0
        facts: list[list[Cell]] = [
            ["samples", f"{self.num_samples:,}"],
            ["order", _order_text(self._config)],
            ["device", f"{self.device}, {threads} thread{'s' * (threads != 1)}"],
        ]
        try:
            facts.append(["decoded", f"{size_text(self.nbytes)} an epoch"])
            facts.append(["progress", self._progress()])
        except ConfigError:  # as in `__repr__`
            facts.append(["progress", "rank not known"])
        head = ("field", "dataset", "sample shape", "dtype", "read by")
        state = "closed" if self._engine.ring.is_closed else ""
        files = paths_text(self._config.hdf5_path)
        rows = [[printable(cell) for cell in row] for row in fields]
        return box(f"AsyncReader {files}", [grid(facts), grid(rows, head)], subtitle=state)

    def _progress(self) -> Cell:
        batches, last = len(self), self._engine.counts.last
        if last is None or not batches:
            return f"{batches:,} batches an epoch, none delivered yet"
        epoch, number = last
        return Bar((number + 1) / batches, f"epoch {epoch}, {number + 1:,} of {batches:,} batches")

    def _settle(self) -> None:
        """Settle the rank, and check that it has batches."""
        self._engine.check_open()
        if not self._has_settled:
            self._engine.position.settle()
            self._check_not_empty()
            self._has_settled = True

    def _check_not_empty(self) -> None:
        self._engine.check_open()
        if not self._engine.position.num_batches:
            raise DatasetError(
                f"{paths_text(self._config.hdf5_path)}: an epoch has no batch: {_why_empty(self)}"
            )


def _why_empty(reader: AsyncReader) -> str:
    config, count = reader.config, reader.num_samples
    if config.sampler is not None:
        return "the sampler draws no sample"
    if not count and config.indices is not None:
        return f"`{named('indices')}` selects no sample"
    remedy = (
        f"; make {named('batch_size')} smaller, or use {named('drop_last', False)}" if count else ""
    )
    given = (named(name, getattr(config, name)) for name in ("batch_size", "drop_last"))
    return f"{count} samples, {', '.join(given)}{remedy}"


def _row_text(layout: DatasetLayout) -> str:
    """Return the shape of a stored sample; "any" marks a dimension that varies."""
    if not layout.is_ragged:
        return str(layout.row_shape)
    inner = "".join(f" {length}," for length in layout.row_shape)
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


def _reopen(config: ReaderConfig, state: Mapping[str, Any]) -> AsyncReader:
    reader = AsyncReader(config)
    reader.load_state_dict(state)
    return reader
