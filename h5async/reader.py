"""Options enter; minibatches leave: `AsyncReader`, what the caller holds, and `Batch`."""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig, check_timeout
from h5async.deliver.device import Device
from h5async.engine import Engine, Filled
from h5async.errors import (
    BatchExpiredError,
    ConfigError,
    DatasetError,
    FileChangedWarning,
    taking_memory,
)
from h5async.index.layout import DatasetLayout
from h5async.stats import ReaderStats


class Batch(Sequence[Any]):
    """One minibatch: a sequence of arrays in field order, which are also reached by name.

    ``data, labels = batch``, ``batch["data"]`` and ``batch.data`` all give arrays of
    ``(size, *row)``: NumPy arrays on the CPU, CuPy arrays on a GPU. **The arrays live until the
    next** ``get_next_batch()``, or the next turn of a ``for`` loop: their memory is filled again
    then. `copy` gives a batch that lasts.

    Attributes
    ----------
    index
        int64 (size,): the sample numbers, a NumPy array that lasts.
    epoch, number
        Which batch of which epoch this is, both from 0.
    last
        Whether it is the epoch's last.
    size
        Samples in it; the last of an epoch may be short.
    """

    __slots__ = ("_arrays", "_device", "epoch", "index", "last", "number", "size")

    index: NDArray[np.int64]  # type: ignore[assignment]  # (a sequence's method of that name)

    def __init__(
        self,
        arrays: Mapping[str, Any],
        index: NDArray[np.int64],
        epoch: int,
        number: int,
        last: bool,
        device: Device | None = None,
    ) -> None:
        self._device = device
        self._arrays: dict[str, Any] = dict(arrays)
        self.index = index
        self.epoch = epoch
        self.number = number
        self.last = last
        self.size = int(index.size)

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self._arrays)

    def __getitem__(self, key: Any) -> Any:
        """Return the array of a field, by its name or its place; a slice gives a tuple."""
        if isinstance(key, str):
            return self._arrays[key]
        return tuple(self._arrays.values())[key]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the arrays, in field order."""
        return iter(self._arrays.values())

    def __getattr__(self, name: str) -> Any:
        """Return the array of the field `name`."""
        try:
            return object.__getattribute__(self, "_arrays")[name]
        except KeyError:
            raise AttributeError(f"a batch of {', '.join(self._arrays)} has no {name!r}") from None

    def __repr__(self) -> str:
        """Describe the batch in a line."""
        where = f"Batch {self.number} of epoch {self.epoch}"
        if isinstance(self._arrays, _ExpiredArrays):
            return f"<{where}, expired>"
        fields = ", ".join(f"{name}={a.shape} {a.dtype}" for name, a in self._arrays.items())
        return f"<{where}: {fields}>"

    def keys(self) -> list[str]:
        """Return the names of the fields, in order."""
        return list(self._arrays)

    def copy(self) -> Batch:
        """Return a batch with memory of its own (on a GPU: copied on the current stream)."""
        with nullcontext() if self._device is None else self._device.current():
            what = f"a copy of batch {self.number} of epoch {self.epoch}"
            with taking_memory(what, "keep fewer batches, or make batch_size smaller"):
                arrays = {name: array.copy() for name, array in self._arrays.items()}
        return Batch(arrays, self.index, self.epoch, self.number, self.last, self._device)


class _ExpiredArrays(dict[str, Any]):
    """The arrays of a batch whose life is over: only their names are left."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(dict.fromkeys(batch.keys()))
        self._what = f"batch {batch.number} of epoch {batch.epoch}"

    def _refuse(self, *_: object) -> NoReturn:
        raise BatchExpiredError(
            f"{self._what} was used after the next one had been asked for: its arrays hold other"
            " samples by then; use it before, or keep batch.copy()"
        )

    __getitem__ = values = items = _refuse


class AsyncReader:
    """Reads minibatches from HDF5 files in threads, ahead of the loop that uses them.

    Meant for one consumer: call its methods from one thread at a time.

    Parameters
    ----------
    config
        Options as a mapping, a `ReaderConfig`, or the path of a TOML file.
    **options
        Single options, which win over `config`; the README has a table of them.

    Raises
    ------
    ConfigError
        If an option is unknown, or does not fit the dataset.
    ReadError
        If a file cannot be opened.
    DatasetError
        If a dataset is missing, cannot make batches, has another length than the others, or
        other rows in one file than in another.
    UnsafeFileError
        If a file refers to others that are not beside it nor permitted by ``allow_external``.
    DeviceError
        If the device asked for is not there, or cannot hold the data.

    Examples
    --------
    >>> reader = AsyncReader(hdf5_path="train.h5", batch_size=256, shuffle="full")
    >>> for epoch in range(90):
    ...     for data, labels in reader:
    ...         step(data, labels)
    """

    def __init__(
        self,
        config: ReaderConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        /,
        **options: Any,
    ) -> None:
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
        self._held: Batch | None = None  # with debug_lifetimes: the batch that the caller holds

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
        """Where the values of each field lie, and why h5py reads them where it does."""
        return dict(self._engine.layouts)

    @property
    def num_samples(self) -> int:
        """Samples in the dataset."""
        return self._engine.num_samples

    @property
    def nbytes(self) -> int:
        """Decoded bytes of one epoch, all fields together, in the file's dtypes."""
        row = sum(layout.row_nbytes for layout in self._engine.layouts.values())
        return row * self._engine.position.epoch_samples

    @property
    def fallback_reads(self) -> int:
        """Reads that went through h5py so far, one for each batch of each field that needs it."""
        return self._engine.fallback_reads

    def stats(self) -> ReaderStats:
        """Return what was done so far, and how long it took; ``str()`` of it says what to do."""
        return self._engine.stats(self._config.thread_count)

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Where the rank is not an option, it is settled with the first batch; until then this is
        what it would be now.

        Raises
        ------
        ConfigError
            If the environment tells the rank differently in different places.
        """
        return self._engine.position.num_batches

    def fetch_data(self) -> bool:
        """Ask for the next batch in order. Never blocks, and may be called any number of times.

        With all slots busy the request waits in line: a batch that is in use is never
        overwritten.

        Returns
        -------
        bool
            Whether the batch asked for is the last of its epoch.

        Raises
        ------
        ReaderClosedError
            If the reader is closed.
        DatasetError
            If an epoch has no batch at all.
        """
        self._settle()
        return self._engine.fetch()

    def get_next_batch(self, timeout: float | None = None) -> Batch:
        """Return the oldest batch asked for, and end the life of the one returned before.

        Asks for a batch itself where none was. Blocks until it is filled; its upload to a GPU is
        ordered before what the current stream does next.

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
            What went wrong while this batch was filled. The next call gives the next batch.
        ReaderClosedError
            If the reader is closed, before or meanwhile.
        DatasetError
            If an epoch has no batch at all.
        """
        seconds = self._config.timeout if timeout is None else check_timeout(timeout)
        self._settle()
        if self._held is not None:
            self._expire(self._held)
        engine = self._engine
        serial, filled = engine.next(seconds)
        try:
            for message in engine.take_warnings(filled):
                warnings.warn(message, FileChangedWarning, stacklevel=2)
            batch = self._batch(serial, filled) if filled.error is None else None
            engine.take(serial, filled)
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

    def _batch(self, serial: int, filled: Filled) -> Batch:
        arrays = dict(zip(self._engine.names, filled.arrays, strict=True))
        index, device, schedule = filled.outcome.index, self._engine.device, self._engine.schedule
        epoch, number, _ = schedule.position(serial)
        batch = Batch(arrays, index, epoch, number, schedule.is_last(serial), device)
        if self._config.debug_lifetimes:
            batch = self._held = batch.copy()
            device.share()
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch: the next one that nothing was taken from yet.

        What was asked for of an epoch that is left before its end is dropped. The first batches
        of the following epoch are read before this one ends.
        """
        engine = self._engine
        engine.check_open()
        engine.position.settle()
        if not engine.position.num_batches:
            return _Epoch(self, 0)
        return _Epoch(self, engine.begin_epoch())

    def set_epoch(self, epoch: int) -> None:
        """Go on with the beginning of an epoch; what was asked for of others is dropped.

        Nothing is dropped where it is the epoch that comes next anyway.

        Parameters
        ----------
        epoch
            From 0.

        Raises
        ------
        ConfigError
            If it is no integer, or negative.
        ReaderClosedError
            If the reader is closed.
        """
        try:
            epoch = operator.index(epoch)
        except TypeError as error:
            raise ConfigError(f"an epoch is an integer from 0, found {epoch!r}") from error
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
        """Return where the reader is, to go on from there later: see `load_state_dict`.

        What counts is what `get_next_batch` returned, not what is on its way. Small, whatever
        the dataset, and made of what JSON has. All ranks have the same. What it says of the files
        is what they were when the reader was made.
        """
        self._check_not_empty()
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where a state was saved; what was asked for is dropped.

        The next batch is the one that would have come then, with any number of threads, slots or
        device. With another `batch_size` or `world_size` the rest of the epoch is dealt anew: what
        the ranks had had together until then does not come again, and nothing is left out. (What
        counts is whole steps of all ranks: save the state of all at the same step.) Of an epoch
        that is gone on with, a ``for`` loop gives the rest.

        Parameters
        ----------
        state
            What `state_dict` returned.

        Raises
        ------
        ConfigError
            If it was saved with another seed, shuffle or window, or is none.
        ReadError
            If a file has changed since.
        ReaderClosedError
            If the reader is closed.
        """
        self._check_not_empty()
        if not isinstance(state, Mapping):
            raise ConfigError(f"a state is what state_dict() returned, found {state!r}")
        self._engine.load(state)

    def close(self) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Waits for work that was begun (a `postprocess`, say), the option `timeout` at most: what
        goes on then ends when that is done. Arrays of a batch that is still held stay valid.
        """
        self._engine.close(self._config.timeout)

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
        """Let a reader that was not begun be sent to another process, where it is opened anew.

        Raises
        ------
        ConfigError
            If a batch was asked for already.
        """
        self._check_not_empty()
        if self._engine.ring.has_begun:
            raise ConfigError(
                "a reader that has begun cannot be pickled; pickle it before, or send its config"
                " and its state_dict()"
            )
        return _reopen, (self._config, self.state_dict())

    def __repr__(self) -> str:
        """Describe the reader in a line."""
        state = ", closed" if self._engine.ring.is_closed else ""
        try:
            batches = f"{len(self)} batches an epoch"
        except ConfigError:  # what launchers say does not fit together, and no batch was asked for
            batches = "rank not known"
        return (
            f"<AsyncReader {self._config.hdf5_path}: {', '.join(self._engine.names)},"
            f" {self.num_samples} samples, {batches}, {self.device}{state}>"
        )

    def _expire(self, batch: Batch) -> None:
        """Show uses of a batch after its life: its fields raise, its arrays hold poison."""
        self._held = None
        self._engine.device.poison(batch)
        batch._arrays = _ExpiredArrays(batch)

    def _settle(self) -> None:
        """See that there are batches for this rank, which is settled by that."""
        if not self._engine.position.has_settled:
            self._engine.check_open()
            self._engine.position.settle()
        self._check_not_empty()

    def _check_not_empty(self) -> None:
        self._engine.check_open()
        if not self._engine.position.num_batches:
            raise DatasetError(
                f"{self._config.hdf5_path}: an epoch has no batch: {self.num_samples} samples,"
                f" batch_size={self._config.batch_size}, drop_last={self._config.drop_last}"
            )


def _reopen(config: ReaderConfig, state: Mapping[str, Any]) -> AsyncReader:
    """Make a reader that was pickled."""
    reader = AsyncReader(config)
    reader.load_state_dict(state)
    return reader


class _Epoch(Iterator[Batch]):
    """The rest of one epoch; ends where another loop has taken the reader on."""

    def __init__(self, reader: AsyncReader, stop: int) -> None:
        self._reader = reader
        self._schedule = reader._engine.schedule
        self._stop = stop

    def __next__(self) -> Batch:
        engine = self._reader._engine
        if engine.schedule is not self._schedule or engine.ring.next_serial >= self._stop:
            raise StopIteration
        return self._reader.get_next_batch()
