"""Options enter; minibatches leave: `AsyncReader` wires layouts, filler, slots and device.

The reader that the caller holds owns an engine that does not know it, so that a reader which is
dropped unclosed can be collected, and its engine closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.cost import direct_share
from h5async.device import Device, find_device, gpu_can
from h5async.devicedecode import NotDecoded, find_formats
from h5async.errors import (
    BatchExpiredError,
    ConfigError,
    DatasetError,
    DeviceError,
    ReaderClosedError,
    ReadError,
)
from h5async.filling import THREAD_NAME, Filler, FillOutcome, FillRequest
from h5async.fingerprint import fingerprint
from h5async.layout import DatasetLayout, join_layouts
from h5async.links import Reach
from h5async.metadata import read_layouts
from h5async.ranks import Rank, find_rank
from h5async.resident import Budget, Residency, open_host_cache
from h5async.sampling import Order, Sampling
from h5async.schedule import Schedule
from h5async.slots import Assignment, SlotRing
from h5async.stats import ReaderStats, Waits
from h5async.storage import read_ahead
from h5async.stored import StoredFormat
from h5async.transform import RowTransform, row_transform
from h5async.trial import DecodeTrial
from h5async.window import window_order

_STATE_VERSION = 1

_forks = 0  # between the first process and this one, since this module was imported


def _note_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


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


class _Filled(NamedTuple):
    """A batch as the consumer takes it from its slot."""

    outcome: FillOutcome
    arrays: tuple[Any, ...]
    error: BaseException | None


class _Engine:
    """Everything of a reader but its facade."""

    def __init__(self, config: ReaderConfig) -> None:
        fields = config.batch_fields
        self.config = config
        self.forks = _forks
        self.layouts = _read_all_layouts(config)
        transforms = {
            name: row_transform(field, self.layouts[name]) for name, field in fields.items()
        }
        self.rank = find_rank()
        if config.rank is not None and config.world_size is not None:
            self.rank = Rank(config.rank, config.world_size)
        own = config.batch_size, self.rank.world_size
        self.sampling = Sampling(
            num_samples=next(iter(self.layouts.values())).num_samples,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=config.drop_last,
            window=self._window_order(*own) if config.shuffle == "window" else None,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
        )
        self.schedule = Schedule(self.sampling)
        self.origin = 0, own  # with what batch and world size which epoch was begun
        self.fingerprint: str | None = None
        self.num_samples = self.sampling.num_samples
        self.num_batches = self.sampling.num_batches
        self.names = tuple(fields)
        self.device = find_device(config.device)
        rows = min(config.batch_size, max(1, self.num_samples))
        formats, obstacle = self._find_formats(config, transforms, rows)
        self.formats, self.dropping = formats, threading.Lock()
        self.trial = DecodeTrial(config.decode, obstacle)
        self.device_chunks = 0  # that were decoded there
        self.device_turns: set[int] = set()  # batches on their way that may be decoded there
        try:
            self.slots = self.device.open_slots(
                config.prefetch, rows, transforms, config.postprocess is not None, formats
            )
        except MemoryError as error:
            raise ConfigError(
                f"{config.prefetch} batches of {rows} samples do not fit in memory ({error});"
                " make batch_size or prefetch smaller"
            ) from error
        self.cache: Residency | Budget | None = None
        if config.cache == "device":
            self.cache = self.device.open_cache(self.num_samples, config.cache_bytes)
        elif config.cache == "host":
            row_nbytes = [transform.raw_nbytes for transform in transforms.values()]
            self.cache = open_host_cache(self.num_samples, row_nbytes, config.cache_bytes)
        self.ring: SlotRing[_Filled] = SlotRing(config.prefetch)
        self.filler = Filler(
            config,
            self.sampling,
            self.layouts,
            transforms,
            [slot.memory for slot in self.slots],
            cache=self.cache if isinstance(self.cache, Residency) else None,
            stored_formats=formats,
            before_fill=lambda slot: self.slots[slot].wait_writable(),
            on_done=self._on_done,
        )
        self.has_threads = config.thread_count > 0
        self.num_threads = max(1, config.thread_count)
        self.waits = Waits()
        self.delivered_samples = 0

    def check_open(self) -> None:
        """Raise `ReaderClosedError` if the reader is closed, or its threads are not here."""
        if self.forks != _forks:
            raise ReaderClosedError(
                "the reader was made before this process was forked, and its threads are not here;"
                " make a reader in each process, after the fork, or start processes by spawn"
            )
        self.ring.check_open()

    def begin(self, assignments: list[Assignment]) -> None:
        for slot, serial in assignments:
            on_device = self.trial.next_turn()
            if on_device:
                self.device_turns.add(serial)
            position = self.schedule.position(serial)
            self.filler.fill(FillRequest(slot, serial, *position, on_device))

    def jump(self, epoch: int, start: int, origin: tuple[int, int] | None = None) -> None:
        """Go on with another batch; what was asked for is dropped.

        `origin`: batch and world size that the epoch was begun with, if others than now.
        """
        serial = self.ring.restart()
        own = self.config.batch_size, self.rank.world_size
        if origin is None or not start:
            origin = own
        resumed = None
        if self.config.shuffle == "window" and origin != own:
            resumed = epoch, self._window_order(*origin)
        self.origin = epoch, origin
        self.sampling = replace(self.sampling, resumed=resumed)
        self.filler.sampling = self.sampling
        self.schedule = Schedule.beginning(self.sampling, serial, epoch, start)

    def state(self) -> dict[str, Any]:
        """Return where the reader is: what the caller had, not what is on its way."""
        epoch, _, start = self.schedule.position(self.ring.next_serial)
        batch_size, world_size = self.config.batch_size, self.rank.world_size
        if self.origin[0] == epoch and start:
            batch_size, world_size = self.origin[1]
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "position": start,
            "batch_size": batch_size,
            "world_size": world_size,
            **self._data(),
        }

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
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or not all(numbers[2:]):
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

    def _window_order(self, batch_size: int, world_size: int) -> Order:
        config, layouts = self.config, list(self.layouts.values())
        return window_order(layouts, config.window_bytes, config.seed, batch_size, world_size)

    def next(self, timeout_seconds: float | None) -> tuple[int, _Filled]:
        """End the life of the batch in use, wait for the next one, and put it in use."""
        begin = time.perf_counter()
        slots, in_use = self.slots, self.ring.in_use
        if slots and in_use is not None:
            slots[in_use].release()
        self.begin(self.ring.begin_next())
        if not self.has_threads:
            while not self.ring.is_ready() and self.filler.run_next():
                pass
        serial, slot, filled = self.ring.take(timeout_seconds)
        if filled.error is None:
            self.slots[slot].acquire()
            self.delivered_samples += filled.outcome.index.size
        self.waits.note(begin, time.perf_counter())
        return serial, filled

    def close(self) -> None:
        if self.ring.close():
            self.filler.close()
            self.device.close()
            self.slots = []

    def stats(self, num_threads: int) -> ReaderStats:
        layouts, filler, waits = self.layouts, self.filler, self.waits
        counts, stages = filler.counts, filler.times.seconds()
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
            fallback_reads=filler.fallback.reads,
            direct_share=direct / row_nbytes if row_nbytes else 1.0,
            ways=dict(zip(self.names, filler.ways, strict=True)),
            num_threads=num_threads,
            filters=tuple(dict.fromkeys(names)),
            cache=str(self.cache or "none"),
            decode=self.trial.sentence,
        )

    def _find_formats(
        self, config: ReaderConfig, transforms: Mapping[str, RowTransform], rows: int
    ) -> tuple[list[StoredFormat | None], str | None]:
        if self.device.name == "cpu":
            if config.decode == "device":
                raise DeviceError('decode="device" needs a GPU, and none was found')
            return [None] * len(transforms), "there is no GPU"
        on_host = [n for n, t in transforms.items() if not (t.is_identity or gpu_can(t))]
        return find_formats(config, self.layouts, rows, on_host, self.device.free_nbytes)

    def _on_done(self, request: FillRequest, outcome: FillOutcome) -> None:
        arrays: tuple[Any, ...] = ()
        error = outcome.error
        if error is None:
            begin = time.perf_counter_ns()
            try:
                arrays = self.slots[request.slot].upload(outcome)
                self._note_turn(request, outcome)
            except BaseException as raised:
                error = raised
            self.filler.times.add("upload", begin)
        if isinstance(error, NotDecoded) or (error is not None and any(outcome.stored)):
            # The host decodes what the device cannot, and has the words for what is wrong.
            self.trial.note_fallback()
            self.filler.fill(request._replace(on_device=False))
            return
        self._end_turn(request)
        self.begin(self.ring.filled(request.slot, request.serial, _Filled(outcome, arrays, error)))

    def _end_turn(self, request: FillRequest) -> None:
        """Give the memory back that decoding on the device takes, once it has lost the trial."""
        self.device_turns.discard(request.serial)
        if self.trial.has_lost and not self.device_turns and any(self.formats):
            with self.dropping:
                if any(self.formats):
                    self.formats = []
                    self.device.drop_decoders(self.slots)
                    self.filler.drop_stored([slot.memory for slot in self.slots])

    def _note_turn(self, request: FillRequest, outcome: FillOutcome) -> None:
        self.device_chunks += sum(plan.num_items for plan in outcome.stored if plan is not None)
        if request.on_device and not (outcome.is_resident or any(outcome.stored)):
            self.trial.note_fallback()
        elif self.trial.is_running and not outcome.is_resident:
            filling = outcome.busy_seconds / self.num_threads
            transfer = self.slots[request.slot].transfer_seconds()
            self.trial.note(request.on_device, max(filling, transfer))


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
        self._engine = _Engine(self._config)
        self._close = weakref.finalize(self, _close, self._engine)
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
        return row * self._engine.sampling.epoch_samples

    @property
    def fallback_reads(self) -> int:
        """Reads that went through h5py so far, one for each batch of each field that needs it."""
        return self._engine.filler.fallback.reads

    def stats(self) -> ReaderStats:
        """Return what was done so far, and how long it took; ``str()`` of it says what to do."""
        return self._engine.stats(self._config.thread_count)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._engine.num_batches

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
        self._check_not_empty()
        serial, assignments = self._engine.ring.ask()
        self._engine.begin(assignments)
        return self._engine.schedule.is_last(serial)

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
        BatchTimeoutError
            If the batch is not ready in time; the next call goes on waiting for it.
        ReadError, DeviceError, PostprocessError
            What went wrong while this batch was filled. The next call gives the next batch.
        ReaderClosedError
            If the reader is closed, before or meanwhile.
        DatasetError
            If an epoch has no batch at all.
        """
        self._check_not_empty()
        if self._held is not None:
            self._expire(self._held)
        seconds = self._config.timeout if timeout is None else timeout
        serial, filled = self._engine.next(seconds)
        if filled.error is not None:
            try:
                raise filled.error
            finally:
                del filled  # the traceback holds this frame, and would keep the reader alive
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
        if not len(self):
            return _Epoch(self, 0)
        first = engine.schedule.epoch_begin(engine.ring.next_serial)
        stop = engine.schedule.epoch_begin(first + 1)
        engine.begin(engine.ring.skip_to(first, read_ahead=engine.has_threads))
        return _Epoch(self, stop)

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
            If it is negative.
        ReaderClosedError
            If the reader is closed.
        """
        if epoch < 0:
            raise ConfigError(f"there is no epoch {epoch}; the first is 0")
        self._check_not_empty()
        engine = self._engine
        if engine.schedule.position(engine.ring.next_serial)[::2] != (epoch, 0):
            engine.jump(epoch, 0)

    def reset(self) -> None:
        """Go back to the first batch of epoch 0, as a new reader."""
        self.set_epoch(0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the reader is, to go on from there later: see `load_state_dict`.

        What counts is what `get_next_batch` returned, not what is on its way. Small, whatever
        the dataset, and made of what JSON has. All ranks have the same.

        Raises
        ------
        ReadError
            If a file is gone.
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
        self._engine.load(state)

    def close(self) -> None:
        """Stop the threads, close the files and free the slots' memory. Idempotent.

        Arrays of a batch that is still held stay valid.
        """
        self._close()

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
        state = "" if self._close.alive else ", closed"
        return (
            f"<AsyncReader {self._config.hdf5_path}: {', '.join(self._engine.names)},"
            f" {self.num_samples} samples, {len(self)} batches an epoch, {self.device}{state}>"
        )

    def _expire(self, batch: Batch) -> None:
        """Show uses of a batch after its life: its fields raise, its arrays hold poison."""
        self._held = None
        self._engine.device.poison(batch)
        batch._arrays = _ExpiredArrays(batch)

    def _check_not_empty(self) -> None:
        self._engine.check_open()
        if not self._engine.num_batches:
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


def _close(engine: _Engine) -> None:
    """Close an engine: because its reader was closed or dropped, or the interpreter ends."""
    if engine.forks != _forks:  # threads that held its locks are not here, and never let go
        return
    if not threading.current_thread().name.startswith(THREAD_NAME):
        engine.close()
        return
    # The garbage collector found the reader in one of our workers, which may hold any lock, and
    # cannot wait for itself.
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and everything with it
        # Not a daemon, as the worker is: it would be cut off at the interpreter's end.
        threading.Thread(target=engine.close, name=f"{THREAD_NAME}-close", daemon=False).start()


def _read_all_layouts(config: ReaderConfig) -> dict[str, DatasetLayout]:
    """Index the files one by one; the system reads the beginning of the first one meanwhile."""
    reach = Reach(config.allow_external, config.allow_missing, config.io)
    fields, files = config.batch_fields, config.files
    found: dict[str, list[DatasetLayout]] = {name: [] for name in fields}
    for path in files:
        layouts = read_layouts(path, fields, reach)
        _check_lengths(layouts)
        for name, layout in layouts.items():
            found[name].append(layout)
        if path is files[0] and len(files) > 1:
            samples = config.batch_size * config.prefetch
            read_ahead(path, samples * sum(layout.row_nbytes for layout in layouts.values()))
    return {name: join_layouts(several) for name, several in found.items()}


def _check_lengths(layouts: Mapping[str, DatasetLayout]) -> None:
    items = list(layouts.items())
    name, first = items[0]
    for other_name, other in items[1:]:
        if other.num_samples != first.num_samples:
            raise DatasetError(
                f'{first.file}: dataset "{first.path}" ({name}) has {first.num_samples} samples'
                f' along dimension {first.sample_axis}, but "{other.path}" ({other_name}) has'
                f" {other.num_samples} along dimension {other.sample_axis}; all fields of a batch"
                " need as many"
            )
