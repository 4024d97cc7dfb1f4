"""Defines `AsyncReader`, which takes options and delivers batches."""

from __future__ import annotations

import atexit
import operator
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import h5py  # noqa: F401  # registers its exit handler

from h5async.errors import ConfigError, ReadError
from h5async.system.describing import takes_options
from h5async.system.interruptions import close_all, passing

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from h5async.config import ReaderConfig
    from h5async.config.keywords import ReaderOptions
    from h5async.errors import Skipped
    from h5async.index.layout import DatasetLayout
    from h5async.observe.stats import ReaderStats
    from h5async.observe.tracing import Trace
    from h5async.reader.batch import Batch

# After h5py's, and so called before it: that changes HDF5, where our threads may still be.
atexit.register(close_all)


def load_config() -> type[ReaderConfig]:
    """Import and return `ReaderConfig`."""
    from h5async.config import ReaderConfig

    return ReaderConfig


@takes_options(load_config)
class AsyncReader:
    """Reads minibatches from HDF5 files in threads, ahead of the loop that uses them.

    A reader has one consumer: call its methods from one thread at a time. They raise
    `ReaderClosedError` once it is closed, also during the call, and `DatasetError` if an epoch has
    no batch.

    Parameters
    ----------
    config
        Options as a mapping, a `ReaderConfig`, or the path of a TOML, JSON or YAML file.
    **options
        Individual options, listed below; they override `config`.

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

        self._config = load_config().load(config, **options)
        self._timeout = self._config.timeout
        self._engine = Engine(self._config)
        self._dropped = weakref.finalize(self, self._engine.drop)
        self._dropped.atexit = False
        try:
            self._engine.open()
        except BaseException:
            self._engine.close()
            self._dropped.detach()
            raise

    @property
    def config(self) -> ReaderConfig:
        """The validated options."""
        return self._config

    @property
    def device(self) -> str:
        """Where batches are delivered: ``"cpu"`` or ``"cuda:N"``."""
        return self._engine.setup.device.name

    @property
    def layouts(self) -> dict[str, DatasetLayout]:
        """Storage layout of each field's (stored) values, and why h5py reads them, if it does."""
        return self._engine.setup.field_layouts

    @property
    def categories(self) -> dict[str, tuple[Any, ...]]:
        """The category names of each categorical field: ``names[c]`` is the name of code c.

        Code -1 means no value. If files have different categories, these are all of them.
        """
        kinds = self._engine.setup.kinds.items()
        return {n: kind.categories.names for n, kind in kinds if kind.categories is not None}

    @property
    def static(self) -> Mapping[str, Any]:
        """The values of fields that exist once per dataset (``per="dataset"``), by field name.

        Arrays in host memory, read-only; a single string is a `str`.
        """
        return self._engine.setup.static

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Files, and samples of delivered batches, that ``on_error="skip"`` has left out so far.

        All skipped files are listed from the start. A sample is listed once, even if later epochs
        skip it again, and at most 10,000 samples are; ``stats().skipped`` counts all.
        """
        return self._engine.delivery.skipped.listed

    @property
    def num_samples(self) -> int:
        """Number of selected samples: all of the dataset, or those of the option `indices`."""
        return self._engine.setup.num_samples

    @property
    def nbytes(self) -> int:
        """Decoded bytes of one epoch, over all fields, in the dtypes of the file.

        If samples vary in length, and an epoch omits or draws some, the mean length is used.
        """
        engine = self._engine
        return engine.counts.epoch_nbytes(engine.position.epoch_samples)

    @property
    def fallback_reads(self) -> int:
        """Reads through h5py so far: one per batch and field that needs it."""
        return self.stats().fallback_reads

    def stats(self, since: ReaderStats | None = None, *, epoch: int | None = None) -> ReaderStats:
        """Return counts and times of the work done so far; ``str()`` says what to change.

        May be called from any thread, and after `close`.

        Parameters
        ----------
        since
            Earlier statistics of this reader: count only the work done since then.
        epoch
            An epoch's number, if it is one of the last 256; -1 is the epoch of the last delivered
            batch, -2 the one before. Work done before the previous epoch ended counts for that one.
            `ConfigError` is raised if the epoch has no statistics.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     before = reader.stats()
        ...     for data, labels in reader:
        ...         pass
        ...     print(reader.stats(epoch=-1).batches, reader.stats(since=before).batches)
        29 29
        >>> print(reader.stats())  # doctest: +SKIP
        data-bound: waited 31 % of the time; the limit is deflate decoding, 0.9 GB/s on 2 threads
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
        """Record what each thread does, and for which batch, until the trace is stopped.

        The file is written at the end: by ``stop()`` of the returned `Trace`, at the end of ``with
        reader.trace(...)``, or by closing the reader. https://ui.perfetto.dev and chrome://tracing
        show each thread's stages, and when the loop waited for a batch or used one (``in use``).

        Parameters
        ----------
        path
            The file, in Chrome's trace event format (JSON); ``.gz`` compresses it. None
            writes no file, for `nvtx` or `torch` alone.
        nvtx
            Also open NVTX ranges, which Nsight Systems shows; this needs CuPy. Ranges cover work in
            Python: wait, plan, transform, decode (of images), postprocess, upload.
        torch
            Also open ranges of ``torch.profiler.record_function``. By default, PyTorch's profiler
            shows only those of the thread that started it.
        max_events
            Number of events to keep, at most 20,000,000; later ones are only counted. Each takes
            50 bytes of memory (200 if recorded in Python), and 150 in the file.

        Raises
        ------
        ConfigError
            If a trace of this reader is running already, or the file cannot be written.
        MissingPackageError
            If CuPy or PyTorch is needed and not installed.
        OutOfMemoryError
            If the system refuses memory for that many events.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
        ...     with reader.trace("t.json"):
        ...         for data, labels in reader:
        ...             pass
        """
        return self._engine.trace(path, nvtx=nvtx, torch=torch, max_events=max_events)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, of this rank.

        If epochs differ (`batch_values`, `bucket`), this is for the current epoch or, between two
        epochs, for the next one. The first batch fixes the rank; until then, it is detected at each
        call. Raises `ConfigError` if the environment has contradictory ranks.
        """
        return self._engine.position.num_batches

    def fetch_data(self, index: ArrayLike | None = None) -> bool:
        """Request the next batch in order; return whether it is the last of its epoch.

        Never blocks. While all slots are busy, the request waits in line: a batch in use is never
        overwritten. Extra calls are harmless.

        Parameters
        ----------
        index
            Sample numbers of the dataset, for a batch outside of epochs (its `epoch` and `number`
            are -1), in this order; at most `batch_size`, repeats are allowed. It comes after
            earlier requests, and, in a ``for`` loop, after batches that threads read ahead. The
            order of epochs does not change. `ConfigError` is raised for invalid numbers, or too
            many; then nothing is requested.

        Examples
        --------
        >>> reader = AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=1000)
        >>> reader.fetch_data(), reader.fetch_data(), reader.fetch_data([3, 17, 42])
        (False, True, False)
        >>> [reader.get_next_batch().size for _ in range(3)]
        [1000, 797, 3]
        >>> reader.close()
        """
        delivery = self._engine.delivery
        if index is not None:
            if delivery.given(index, delivery.give_turn):
                return False
        elif asked := delivery.ask_turn():
            return asked > 1
        self._engine.settle()
        return delivery.fetch(index)

    def get_next_batch(self, timeout: float | None = None) -> Batch:
        """Return the oldest requested batch, and end the life of the one before.

        Requests a batch if none was requested. Blocks until the batch is filled; its upload to a
        GPU is ordered before the current stream's next operations.

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
            If filling this batch failed; the next call returns the next batch. `DamagedError`, a
            `ReadError`, if a sample is damaged and not skipped, or ``max_skipped`` is exceeded.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     batch = reader.get_next_batch(timeout=60)
        ...     print(batch)
        <Batch 0 of epoch 0: data=(64, 8, 8) uint8, labels=(64,) int64>
        """
        taken: list[Batch] = []  # the core appends the batch
        seconds = self._timeout
        if timeout is not None:
            from h5async.config import check_timeout

            seconds = check_timeout(timeout)
        engine, delivery = self._engine, self._engine.delivery
        take = delivery.take_turn
        try:
            while not (take(taken) if seconds is None else take(taken, seconds)):
                engine.settle()
                delivery.check_alone()
                if not delivery.lend():
                    break
            else:
                return taken[0]
        except BaseException:  # Ctrl-C: in any case, the next call returns this batch
            if taken and not delivery.put_back_turn():  # a signal handler has called the reader
                engine.ring.put_back(engine.ring.consumer.next - 1)
            raise
        serial, filled = delivery.wait(seconds)
        if filled.error is not None:
            try:
                delivery.forget(serial)
            except BaseException:  # Ctrl-C: the next call raises this error
                engine.ring.put_back(serial, filled)
                raise
            try:
                raise filled.error
            finally:
                del filled  # the traceback holds this frame, and would keep the reader alive
        batch = delivery.made(serial, filled)
        wanted = engine.ring.after(serial)
        engine.ring.wanted = wanted  # no signal handler runs between this and `return`
        return batch

    def read(self, index: ArrayLike) -> Batch:
        """Read given samples at once, in the calling thread; the batch owns its memory.

        Requested batches continue to be filled, and do not change. The batch's `epoch` and `number`
        are -1.

        Parameters
        ----------
        index
            Sample numbers of the dataset: any number of them, in this order; repeats are allowed.
            `ConfigError` is raised for invalid ones.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
        ...     batch = reader.read([3, 17, 42])
        >>> batch.labels
        array([3, 7, 1])
        """
        delivery = self._engine.delivery
        found = delivery.given(index, delivery.read_turn)
        if found is False:
            self._engine.check_open()
            found = delivery.read(index)
        batch: Batch = found
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch: the first one from which no batch was taken yet.

        If an epoch is left before its end, its requested batches are dropped. The next epoch's
        first batches are read before this one ends.
        """
        engine = self._engine
        engine.check_open()
        begun = engine.delivery.next_epoch_of_run(self.get_next_batch)
        if begun is not None:
            return begun
        engine.position.settle()
        if not engine.position.num_batches:
            return iter(())
        return engine.delivery.next_epoch(self.get_next_batch)

    def set_epoch(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches of others are dropped.

        Nothing is dropped if this epoch comes next anyway. Epochs count from 0; `ConfigError` is
        raised for anything else.
        """
        try:
            epoch = operator.index(epoch)
        except TypeError as error:
            raise ConfigError(f"an epoch must be an integer from 0, found {epoch!r}") from error
        if epoch < 0:
            raise ConfigError(f"there is no epoch {epoch}; the first is 0")
        self._engine.check_not_empty()
        self._engine.jump(epoch)

    def reset(self) -> None:
        """Go back to the first batch of epoch 0."""
        self.set_epoch(0)

    @passing()
    def state_dict(self) -> dict[str, Any]:
        """Return the reader's position, for `load_state_dict` to continue from later.

        Only batches that `get_next_batch` returned count. The state is small for any dataset, can
        be written as JSON, and is the same in all ranks.
        """
        self._engine.check_not_empty()
        return self._engine.position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where a state was saved; requested batches are dropped.

        The next batch is the one that would have come next then, with any number of threads or
        slots and on any device; the next ``for`` loop gives the rest of the epoch. With another
        `batch_size` or `world_size`, the rest is dealt again: samples that all ranks together had
        received do not repeat, and none is left out. (Save the state of all ranks at the same
        step.)

        `ConfigError` is raised if it was saved with another seed, shuffle, window, selection,
        weights, sampler, `batch_values` or `bucket`, or is not a state; `ReadError` if a file has
        changed since.

        Examples
        --------
        >>> options = {"hdf5_path": "sample_data/digits.h5", "batch_size": 64, "shuffle": "full"}
        >>> with AsyncReader(options) as reader:
        ...     batches = [reader.get_next_batch().copy() for _ in range(10)]
        ...     state = reader.state_dict()
        >>> with AsyncReader(options) as reader:
        ...     reader.load_state_dict(state)
        ...     print(reader.get_next_batch())
        <Batch 10 of epoch 0: data=(64, 8, 8) uint8, labels=(64,) int64>
        """
        self._engine.check_not_empty()
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"load_state_dict() takes what state_dict() returned, found {state!r}"
            )
        self._engine.load(state)

    def close(self) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Waits for work in progress (a `postprocess`, say), but no longer than the option `timeout`;
        anything still running then ends with that work. The arrays of the batch that the caller
        holds stay valid. A running trace ends, too; `ReadError` is raised if it cannot be written,
        and the reader is still closed.
        """
        try:
            self._engine.close(self._timeout)
        except ReadError:
            self._dropped.detach()
            raise
        self._dropped.detach()  # nothing is left to do when the reader is collected

    def __enter__(self) -> AsyncReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reader that has not begun; unpickling opens it again."""
        self._engine.check_not_empty()
        if self._engine.ring.consumer.has_begun:
            raise ConfigError(
                "a reader that has begun cannot be pickled; pickle it before the first batch is"
                " requested, or send its config and its state_dict()"
            )
        return AsyncReader, (self._config,), self.state_dict()

    __setstate__ = load_state_dict  # called on the reader that `__reduce__` creates

    def __repr__(self) -> str:
        from h5async.config.files import paths_text

        state = ", closed" if self._engine.ring.is_closed else ""
        try:
            batches = f"{len(self)} batches an epoch"
        except ConfigError:  # launchers contradict each other, and no batch was requested yet
            batches = "rank not known"
        files, fields = paths_text(self._config.hdf5_path), ", ".join(self._config.batch_fields)
        return (
            f"<AsyncReader {files}: {fields}, {self.num_samples} samples, {batches},"
            f" {self.device}{state}>"
        )

    def _repr_html_(self) -> str:
        return self._engine.html()
