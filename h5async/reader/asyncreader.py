"""Defines `AsyncReader`, which the caller makes of options and which delivers batches."""

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
from h5async.config.files import paths_text
from h5async.config.signature import takes_options
from h5async.errors import ConfigError, DatasetError, FileChangedWarning, ReadError
from h5async.html import Bar, Cell, box, grid, size_text
from h5async.names import printable
from h5async.observe.stats import ReaderStats
from h5async.observe.trace import Trace
from h5async.reader import lifetime  # noqa: F401  # registers what is done at exit, and after a fork
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
        If a dataset is missing or cannot be delivered in batches, if the datasets have different
        lengths, or if the rows of a dataset differ between files.
    UnsafeFileError
        If a file refers to others that neither lie beside it nor are permitted by
        ``allow_external``.
    DeviceError
        If the device asked for is not there, or cannot hold the data.

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
        # Here, because they load nearly all of the package, and not every import makes a reader.
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
        """The options, as validated."""
        return self._config

    @property
    def device(self) -> str:
        """Where batches are delivered: ``"cpu"`` or ``"cuda:N"``."""
        return self._engine.device.name

    @property
    def layouts(self) -> dict[str, DatasetLayout]:
        """Where the values of each field lie, and why h5py reads them where it does.

        Of a sparse field, that is the layout of the values that are stored.
        """
        from h5async.samples.columns import by_field  # which takes long to import

        return by_field(self._engine.layouts, lambda values, indices: values)

    @property
    def categories(self) -> dict[str, tuple[Any, ...]]:
        """What the codes of categorical fields stand for, by field: code c for the name number c.

        -1 stands for no value. Where several files have other categories, these are all of them.

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
        return {name: one.names for name, one in self._engine.categories.items()}

    @property
    def num_samples(self) -> int:
        """Samples that are selected: all of the dataset, or those of the option `indices`."""
        return self._engine.num_samples

    @property
    def nbytes(self) -> int:
        """Decoded bytes of one epoch, of all fields, in the dtypes of the file.

        Where samples of differing lengths are left out, or drawn, their mean length counts.
        """
        engine = self._engine
        return engine.counts.epoch_nbytes(engine.samplings.selection, engine.position.epoch_samples)

    @property
    def fallback_reads(self) -> int:
        """Reads that went through h5py so far: one for each batch of each field that needs it."""
        return self._engine.fallback_reads

    def stats(self, since: ReaderStats | None = None, *, epoch: int | None = None) -> ReaderStats:
        """Return what was done so far and how long it took; ``str()`` says what to change.

        May be called from any thread, and after `close`.

        Parameters
        ----------
        since
            What this method returned before: only what was done after that counts.
        epoch
            The number of an epoch, of the last 256; -1 is the last one that a batch was delivered
            of, -2 the one before. None: all that was done. What is done for the first batches of
            an epoch before the one before it has ended counts there.

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

        Of each epoch, and of what comes after some moment:

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

        The file is written when that ends: by ``stop()`` of what this returns, at the end of
        ``with reader.trace(...)``, or with the reader. https://ui.perfetto.dev and chrome://tracing
        show it: when which thread planned, read, decoded, placed, transformed, postprocessed and
        uploaded batches, and when the loop waited for one (``wait``) and had one (``in use``).

        Parameters
        ----------
        path
            The file, in Chrome's trace event format (JSON); compressed where it ends in ``.gz``.
            None: no file, only what `nvtx` and `torch` ask for.
        nvtx
            Open ranges of NVTX, too, which Nsight Systems shows; this needs CuPy. There are ranges
            of what Python does: wait, plan, transform, decode (of images), postprocess, upload.
        torch
            The same by ``torch.profiler.record_function``. PyTorch's profiler shows those of the
            thread in which it was started, if nothing else is asked of it.
        max_events
            So many events are kept, the first ones, 20,000,000 at most; the others are counted. One
            takes about 50 bytes of memory in the compiled core, some 200 in Python, and 150 in the
            file.

        Returns
        -------
        Trace
            What ends the trace: by ``stop()``, or as a context.

        Raises
        ------
        ConfigError
            If a trace of this reader is running already, the file cannot be written, or
            `max_events` is no number of events.
        MissingPackageError
            If CuPy or PyTorch is not installed, where it is asked for.
        OutOfMemoryError
            If the system refuses memory for so many events.
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

        With `batch_values` or `bucket`, epochs may differ: it is that of the epoch under way and,
        between two, of the next one. Where the rank is not given as an option, it is settled with
        the first batch; until then this is the number for the rank as it is found now.

        Raises
        ------
        ConfigError
            If the environment tells the rank differently in different places.
        """
        return self._engine.position.num_batches

    def fetch_data(self, index: ArrayLike | None = None) -> bool:
        """Ask for the next batch in order, or for one of given samples. Never blocks.

        While all slots are busy the request waits in line: a batch that is in use is never
        overwritten. Extra calls are harmless.

        Parameters
        ----------
        index
            Sample numbers of the dataset: the samples of a batch of no epoch (its `epoch` and
            `number` are -1), in this order; `batch_size` at most, and repeats are allowed. It comes
            behind what was asked for before, and, in a ``for`` loop, behind what threads read
            ahead. Nothing of the order of epochs changes.

        Returns
        -------
        bool
            Whether the batch asked for is the last of its epoch.

        Raises
        ------
        ConfigError
            If `index` has no sample numbers of the dataset, or too many; nothing is asked for then.
        ReaderClosedError
            If the reader is closed.
        DatasetError
            If an epoch has no batch at all.

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
        """Return the oldest batch that was asked for, and end the life of the one before.

        Asks for a batch itself where nothing did so before. Blocks until the batch is filled; its
        upload to a GPU is ordered before what the current stream does next.

        Parameters
        ----------
        timeout
            Seconds to wait at most; None: the option ``timeout``.

        Raises
        ------
        ConfigError
            If `timeout` is no number of seconds; nothing else happens then.
        BatchTimeoutError
            If the batch is not ready in time; the next call goes on waiting for it.
        ReadError, DeviceError, PostprocessError
            If filling this batch failed; the next call gives the next batch.
        ReaderClosedError
            If the reader is closed, before the call or during it.
        DatasetError
            If an epoch has no batch at all.

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
        except BaseException:  # Ctrl-C: the next call gives this batch
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
        """Read given samples at once, in the calling thread; the batch lasts.

        Batches that were asked for are on their way meanwhile, and stay as they are.

        Parameters
        ----------
        index
            Sample numbers of the dataset: any number of them, in this order; repeats are allowed.

        Returns
        -------
        Batch
            With memory of its own; its `epoch` and `number` are -1.

        Raises
        ------
        ConfigError
            If `index` has no sample numbers of the dataset.
        ReadError, PostprocessError
            If they cannot be read.
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
        """Begin the next epoch, the first one of which no batch was taken yet.

        Of an epoch that is left before its end, batches that were asked for are dropped. The first
        batches of the following epoch are read before this one ends.
        """
        from h5async.reader.handover import Epoch

        engine = self._engine
        engine.check_open()
        engine.position.settle()
        if not engine.position.num_batches:
            return iter(())
        return Epoch(engine, engine.begin_epoch(), self.get_next_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go on with the beginning of an epoch; batches of others that were asked for are dropped.

        Nothing is dropped where this epoch comes next anyway.

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
        if engine.schedule.position(engine.ring.next_serial)[::2] != (epoch, 0):
            engine.jump(epoch)

    def reset(self) -> None:
        """Go back to the first batch of epoch 0, as a new reader."""
        self.set_epoch(0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the reader is, so that `load_state_dict` can go on from there later.

        Batches count that `get_next_batch` returned, not those that are on their way. The state is
        small for any dataset, can be written as JSON, and is the same in all ranks. It describes
        the files as they were when the reader was made.

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
        """Go on exactly where a state was saved; batches that were asked for are dropped.

        The next batch is the one that would have come next then, with any number of threads or
        slots and on any device. With another `batch_size` or `world_size` the rest of the epoch is
        dealt again: samples that the ranks had received together do not come again, and none is
        left out. (Whole steps of all ranks count: save the state of all ranks at the same step.)
        The next ``for`` loop gives the rest of the epoch.

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
        what is still running then ends with that work. The arrays of the batch that the caller
        holds stay valid. A trace that is running ends, too.

        Raises
        ------
        ReadError
            If the file of a trace cannot be written; the reader is closed then, as ever.
        """
        try:
            self._engine.close(self._config.timeout)
        except ReadError:
            self._dropped.detach()
            raise
        self._dropped.detach()  # nothing is left to be done when the reader is collected

    def __enter__(self) -> AsyncReader:
        """Return the reader itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the reader."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reader that has not begun; the process that unpickles it opens it again.

        Raises
        ------
        ConfigError
            If a batch was asked for already.
        """
        self._check_not_empty()
        if self._engine.ring.has_begun:
            raise ConfigError(
                "a reader that has begun cannot be pickled; pickle it before the first batch is"
                " asked for, or send its config and its state_dict()"
            )
        return _reopen, (self._config, self.state_dict())

    def __repr__(self) -> str:
        """Describe the reader in a line."""
        state = ", closed" if self._engine.ring.is_closed else ""
        try:
            batches = f"{len(self)} batches an epoch"
        except ConfigError:  # launchers contradict each other, and no batch was asked for yet
            batches = "rank not known"
        return (
            f"<AsyncReader {paths_text(self._config.hdf5_path)}: {', '.join(self._engine.names)},"
            f" {self.num_samples} samples, {batches}, {self.device}{state}>"
        )

    def _repr_html_(self) -> str:
        """Show a small table in a notebook: the fields, how they are read, and how far it is."""
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
    """Return the shape of a stored sample; "any": that dimension differs from sample to sample."""
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
    """Make a reader that was pickled."""
    reader = AsyncReader(config)
    reader.load_state_dict(state)
    return reader
