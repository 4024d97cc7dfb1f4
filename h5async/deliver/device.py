"""Filled host arrays enter; arrays on the device leave, ordered on the caller's stream.

The only importer of CuPy, and it imports it only where a GPU is asked for. The host twin hands
the arrays on as they are.

How CUDA is kept in order, slot by slot. Uploads run on one stream of our own, the copy stream,
and kernels on another, the work stream, so that one batch is permuted while the next one is
uploaded. (1) The copy stream waits for the events that the caller's streams recorded when the batch
was handed back, and for the slot's last kernel, so nothing on the device is overwritten while a
kernel may read it. (2) The work stream waits for the upload. (3) The caller's streams wait for what
comes last of a slot, upload or kernel; the host does not. (4) Before a host array is refilled, a
worker waits for its upload. No other rule is needed, because one slot's fills, uploads and uses
follow each other in program order.

The caller's streams are CuPy's current one and, where PyTorch uses the GPU, PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import load_core
from h5async.deliver.devicedecode import NotDecoded, Staging, StoredDecoder
from h5async.deliver.kernels import Kernels
from h5async.deliver.nvcomp import load_nvcomp
from h5async.deliver.pinned import Pinning
from h5async.errors import DeviceError
from h5async.fill.records import FillOutcome, SlotMemory
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import SharedMemory, page_memory
from h5async.plan.stored import StoredFormat
from h5async.plan.transform import RowTransform

_CUPY_TYPES = "?bhilqBHILQefdFD"  # NumPy's one-letter codes
_BYTE = np.dtype(np.uint8)
_CACHE_SHARE = 0.8  # of the device's free memory, where no budget is given


class DeviceSlot(Protocol):
    """A slot's memory, and the order of its fills, uploads and uses."""

    memory: SlotMemory

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; in a worker."""

    def upload(self, outcome: FillOutcome) -> tuple[Any, ...]:
        """Begin to bring a filled batch to the device; in a worker.

        Raises
        ------
        NotDecoded
            If the host has to decode its chunks; they were waited for.
        """

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return what the slower of link and kernels took for it."""

    def drop_staging(self) -> None:
        """Give the memory back that is only for chunks to be decoded on the device."""

    def acquire(self) -> None:
        """Order the caller's current streams behind the upload."""

    def release(self) -> None:
        """Note how far the caller's current streams have come: they are done with the batch."""


class Device(Protocol):
    """Where batches are delivered."""

    @property
    def name(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""

    @property
    def free_nbytes(self) -> int:
        """Bytes of device memory that are free now."""

    def open_slots(
        self,
        count: int,
        rows: int,
        transforms: Mapping[str, RowTransform],
        postprocess: bool,
        stored_formats: Sequence[StoredFormat | None],
        shared: SharedMemory | None = None,
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows.

        Parameters
        ----------
        count, rows
            Slots, and samples in each.
        transforms
            By field.
        postprocess
            Whether it wants delivered arrays on the host.
        stored_formats
            How chunks of each field are decoded on the device, where they are.
        shared
            Where a helper process fills the slots: the memory that it has too.
        """

    def open_cache(self, num_samples: int, cache_bytes: int | None) -> Residency | Budget:
        """Make room for the rows of all samples, after `open_slots`, if the budget allows it."""

    def drop_decoders(self, slots: Iterable[DeviceSlot]) -> None:
        """Give the memory back that is only for decoding here, which is not done any more."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""

    def share(self) -> None:
        """Order the caller's other streams behind what its current one was given."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 (NaN, -1, 255), behind all that the caller does now."""

    def close(self) -> None:
        """Wait until the device uses none of the slots' memory any more."""


def find_device(name: str, pin_memory: bool = False) -> Device:
    """Return the device of an option ``device``.

    Parameters
    ----------
    name
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA where CuPy and a GPU are there.
    pin_memory
        Batches stay on the host, in pinned memory.

    Raises
    ------
    DeviceError
        If CuPy, PyTorch or the GPU is missing; the message says which, and what to do.
    """
    if name == "cpu" or pin_memory:
        return HostDevice(Pinning() if pin_memory else None)
    try:
        return CudaDevice(int(name.partition(":")[2] or -1) if name != "auto" else -1)
    except DeviceError:
        if name == "auto":
            return HostDevice()
        raise


def _host_slot(
    rows: int,
    transforms: Sequence[RowTransform],
    on_host: Sequence[bool],
    empty: Callable[[int], NDArray[np.uint8]],
) -> tuple[SlotMemory, NDArray[np.uint8], list[int]]:
    """Lay a slot's delivered rows, or raw ones that need no work on the host, out in one block.

    Returns
    -------
    memory, block, begins
        The slot's arrays; the block, made by `empty`; and where each field begins in it.
    """
    sizes = [
        rows * (transform.nbytes if done else transform.raw_nbytes)
        for transform, done in zip(transforms, on_host, strict=True)
    ]
    *begins, total = itertools.accumulate((_aligned(size) for size in sizes), initial=0)
    block = empty(total)
    raw, out = [], []
    for transform, done, begin in zip(transforms, on_host, begins, strict=True):
        shape, dtype = (rows, *transform.raw_row), transform.raw_dtype
        if done:
            raw.append(np.empty(shape, dtype))
            out.append(np.ndarray((rows, *transform.row), transform.dtype, block, begin))
        else:
            raw.append(np.ndarray(shape, dtype, block, begin))
            out.append(raw[-1])
    return SlotMemory(tuple(raw), tuple(out), (None,) * len(raw)), block, begins


def _plain_memory(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


class HostSlot:
    """A slot in host memory: nothing is copied, and who refills pinned memory waits for copies."""

    def __init__(self, memory: SlotMemory, pinning: Pinning | None) -> None:
        self.memory = memory
        self._pinning = pinning
        self._copies: Sequence[Any] = ()  # events: what the caller did with the last batch

    def wait_writable(self) -> None:
        """Block until no copy on the caller's streams reads the memory any more."""
        for event in self._copies:
            event.synchronize()

    def upload(self, outcome: FillOutcome) -> tuple[Any, ...]:
        """Return the arrays themselves."""
        return outcome.arrays

    def transfer_seconds(self) -> float:
        """Return 0: nothing is transferred."""
        return 0.0

    def drop_staging(self) -> None:
        """Do nothing."""

    def acquire(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Note how far the caller's streams have come, where the memory is pinned."""
        if self._pinning is not None:
            self._copies = self._pinning.record()


class HostDevice:
    """Batches are NumPy arrays in the slots themselves.

    Parameters
    ----------
    pinning
        Pins their memory, if given.
    """

    name = "cpu"
    free_nbytes = 0  # of device memory

    def __init__(self, pinning: Pinning | None = None) -> None:
        self._pinning = pinning

    def open_slots(
        self,
        count: int,
        rows: int,
        transforms: Mapping[str, RowTransform],
        postprocess: bool,
        stored_formats: Sequence[StoredFormat | None],
        shared: SharedMemory | None = None,
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows; all transforming is the filler's."""
        todo = list(transforms.values())
        on_host = [not transform.is_identity for transform in todo]
        slots: list[DeviceSlot] = []
        for _ in range(count):
            memory, block, _ = _host_slot(rows, todo, on_host, self._empty(shared))
            if self._pinning is not None and block.nbytes:
                self._pinning.pin(block)
            slots.append(HostSlot(memory, self._pinning))
        return slots

    def _empty(self, shared: SharedMemory | None) -> Callable[[int], NDArray[np.uint8]]:
        if shared is not None:
            return shared.empty
        return _plain_memory if self._pinning is None else page_memory

    def open_cache(self, num_samples: int, cache_bytes: int | None) -> Residency | Budget:
        """Refuse: there is no device.

        Raises
        ------
        DeviceError
            In any case.
        """
        raise DeviceError(
            'cache="device" keeps rows on a GPU, and none was found; use cache="host"'
        )

    def drop_decoders(self, slots: Iterable[DeviceSlot]) -> None:
        """Do nothing."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def share(self) -> None:
        """Do nothing."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255."""
        for array in arrays:
            if array.dtype.hasobject:
                array.fill(None)
            else:
                array.reshape(-1).view(np.uint8).fill(255)

    def close(self) -> None:
        """Do nothing."""


class CudaDevice:
    """Batches are CuPy arrays, uploaded from pinned memory.

    Parameters
    ----------
    number
        The GPU; -1: CuPy's current one.

    Raises
    ------
    DeviceError
        If CuPy or the GPU is missing.
    """

    def __init__(self, number: int = -1) -> None:
        self.cupy = cupy = _import_cupy()
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"CuPy {cupy.__version__} is installed but finds no usable GPU ({error}); check"
                ' with: nvidia-smi. To read without one: device="cpu"'
            ) from error
        if count == 0 or number >= count:
            raise DeviceError(
                f"there is no GPU {max(number, 0)}: CuPy finds {count}; check with: nvidia-smi."
                ' To read without one: device="cpu"'
            )
        self._device = cupy.cuda.Device(number if number >= 0 else None)
        self.name = f"cuda:{self._device.id}"
        with self._device, self.failing("no stream can be made"):
            self.copy_stream = cupy.cuda.Stream(non_blocking=True)
            self.work_stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = Kernels(cupy)
        self.cache: list[Any] = []  # the rows of all samples, one array a field, as uploaded
        self.decoders: dict[int, StoredDecoder] = {}  # by field
        # Decoders work in memory of their own, in the order of the work stream: what puts one
        # batch's work there must not be mixed with what puts another's.
        self.decoding = threading.Lock()
        self._row_nbytes: list[int] = []

    def open_slots(
        self,
        count: int,
        rows: int,
        transforms: Mapping[str, RowTransform],
        postprocess: bool,
        stored_formats: Sequence[StoredFormat | None],
        shared: SharedMemory | None = None,
    ) -> list[DeviceSlot]:
        """Allocate pinned host slots and device slots of `rows` rows.

        Raises
        ------
        DeviceError
            If CuPy lacks a dtype, or memory is short.
        """
        for name, transform in transforms.items():
            if transform.dtype.char not in _CUPY_TYPES:
                raise DeviceError(
                    f'field "{name}": dtype {transform.dtype} cannot lie on a GPU: CuPy has only'
                    ' booleans and numbers; leave the field out, or read with device="cpu"'
                )
        todo = list(transforms.values())
        on_host = [
            needs_host(transform) or (postprocess and not transform.is_identity)
            for transform in todo
        ]
        cuda = self.cupy.cuda
        core = load_core()
        try:
            with self.current():
                for field, form in enumerate(stored_formats):
                    if form is not None and core is not None:
                        decoder = StoredDecoder(self.cupy, self.kernels, load_nvcomp(), core, form)
                        self.decoders[field] = decoder
                slots = [CudaSlot(self, rows, todo, on_host, shared) for _ in range(count)]
        except (
            cuda.memory.OutOfMemoryError,
            cuda.runtime.CUDARuntimeError,
            MemoryError,
        ) as error:
            raise DeviceError(
                f"{count} slots of {rows} rows do not fit the memory of {self.name} ({error});"
                " make batch_size or prefetch smaller"
            ) from error
        self._compile(slots[0])
        self._row_nbytes = [array.nbytes // rows for array in slots[0].memory.out]
        return list(slots)

    def _compile(self, slot: CudaSlot) -> None:
        """Compile the kernels now: what goes wrong with that is no matter of a batch."""
        try:
            with self.current():
                slot.warm_up()
                self.kernels.load()
        except Exception as error:
            raise DeviceError(
                f"CuPy {self.cupy.__version__} cannot compile for {self.name} ({error}); it needs"
                " NVRTC and the headers of CUDA: pip install 'cupy-cuda13x[ctk]', or"
                " 'cupy-cuda12x[ctk]' for a driver of CUDA 12"
            ) from error

    def drop_decoders(self, slots: Iterable[DeviceSlot]) -> None:
        """Give the memory back that is only for decoding here, which is not done any more."""
        self.decoders = {}
        for slot in slots:
            slot.drop_staging()
        with self.current():
            self.cupy.get_default_memory_pool().free_all_blocks()

    @property
    def free_nbytes(self) -> int:
        """Bytes of the GPU's memory that are free now."""
        with self.current():
            return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def open_cache(self, num_samples: int, cache_bytes: int | None) -> Residency | Budget:
        """Reserve device memory for the rows of all samples, as they are uploaded.

        Returns
        -------
        Residency or Budget
            The budget, where it does not suffice, by `cache_bytes` or by what the GPU has free.
        """
        nbytes = num_samples * sum(self._row_nbytes)
        with self.current():
            if cache_bytes is None:
                cache_bytes = int(self.free_nbytes * _CACHE_SHARE)
            budget = Budget("device", nbytes, cache_bytes)
            if not budget.suffices:
                return budget
            try:
                self.cache = [
                    self.cupy.empty((num_samples, row), np.uint8) for row in self._row_nbytes
                ]
            except self.cupy.cuda.memory.OutOfMemoryError:
                self.cache = []
                return Budget("device", nbytes, self.free_nbytes)
            self.cupy.cuda.get_current_stream().synchronize()  # as in `CudaSlot`
        return Residency(num_samples, nbytes, "device")

    def callers_streams(self) -> list[int]:
        """Return the streams on which the caller may use a batch now, this GPU being current."""
        streams = [int(self.cupy.cuda.get_current_stream().ptr)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            of_torch = int(torch.cuda.current_stream(self._device.id).cuda_stream)
            if of_torch != streams[0]:
                streams.append(of_torch)
        return streams

    def share(self) -> None:
        """Order the caller's other streams behind what its current one was given."""
        with self.current():
            current, *others = self.callers_streams()
            for stream in others:
                self._order(current, stream)

    def _order(self, first: int, then: int) -> None:
        event = self.cupy.cuda.Event(disable_timing=True)
        self.cupy.cuda.runtime.eventRecord(event.ptr, first)
        self.cupy.cuda.runtime.streamWaitEvent(then, event.ptr)

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255, on the current stream and behind the caller's others."""
        with self.current():
            current, *others = self.callers_streams()
            for stream in others:
                self._order(stream, current)
            for array in arrays:
                array.reshape(-1).view(np.uint8).fill(255)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this GPU is the current one."""
        device: AbstractContextManager[Any] = self.cupy.cuda.Device(self._device.id)
        return device

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn CUDA's errors into a `DeviceError` that says what failed."""
        cuda = self.cupy.cuda
        try:
            yield
        except (
            cuda.runtime.CUDARuntimeError,
            cuda.driver.CUDADriverError,
            cuda.memory.OutOfMemoryError,
        ) as error:
            raise DeviceError(
                f"{self.name}: {what} ({error}); after a fault of the GPU this process has to be"
                ' started again, perhaps with decode="host"'
            ) from error

    def close(self) -> None:
        """Wait until the GPU uses none of the slots' memory any more."""
        # After a fault there is nothing left to wait for, and whoever met it was told.
        with self.current(), contextlib.suppress(self.cupy.cuda.runtime.CUDARuntimeError):
            self.cupy.cuda.runtime.deviceSynchronize()
        self.cache = []
        self.decoders = {}


class CudaSlot:
    """Pinned host arrays, and device arrays of the same batch."""

    def __init__(
        self,
        device: CudaDevice,
        rows: int,
        transforms: Sequence[RowTransform],
        on_host: Sequence[bool],
        shared: SharedMemory | None,
    ) -> None:
        cupy = device.cupy
        self._device = device
        self._shared = shared
        self._staging = {
            field: Staging(cupy, decoder.form, self._empty_filled)
            for field, decoder in device.decoders.items()
        }
        # What is uploaded of all fields lies in one piece, on both sides, to be sent in one go.
        memory, self._host_block, begins = _host_slot(
            rows, transforms, on_host, lambda nbytes: self._empty_filled((nbytes,), _BYTE)
        )
        self._device_block = cupy.empty(self._host_block.nbytes, np.uint8)
        self.memory = memory._replace(
            stored=tuple(
                self._staging[field].stored if field in self._staging else None
                for field in range(len(transforms))
            )
        )
        self._raw = [
            self._device_block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            for begin, array in zip(begins, self.memory.out, strict=True)
        ]
        self._delivered = [
            raw if done or todo.is_identity else cupy.empty((rows, *todo.row), todo.dtype)
            for raw, todo, done in zip(self._raw, transforms, on_host, strict=True)
        ]
        self._change = [device.kernels.row_change(transform) for transform in transforms]
        # Sample numbers, for the cache.
        self._index = self._empty_pinned((rows,), np.dtype(np.int64))
        self._index_on_device = cupy.empty(rows, np.int64)
        self._every = cupy.asarray(np.arange(rows, dtype=np.int64))
        # What `postprocess` returns may be of any shape; memory for it is made when it comes.
        self._other: list[tuple[Any, Any] | None] = [None] * len(transforms)
        self._uploaded = cupy.cuda.Event(block=True, disable_timing=True)
        self._ready = cupy.cuda.Event(disable_timing=True)
        self._decoded = cupy.cuda.Event(block=True, disable_timing=True)
        self._done = cupy.cuda.Event(block=True)
        self._begun = [cupy.cuda.Event(), cupy.cuda.Event()]  # the upload, and the kernels
        self._sent = cupy.cuda.Event()
        self._released = [cupy.cuda.Event(disable_timing=True)]
        # The memory pool hands memory out in the order of the current stream; see that what it
        # held before is done with.
        cupy.cuda.get_current_stream().synchronize()

    def _empty_filled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return pinned memory that whoever fills the slot has too."""
        if self._shared is None:
            return self._empty_pinned(shape, dtype)
        memory = self._shared.empty(math.prod(shape) * dtype.itemsize)
        if memory.nbytes:
            runtime = self._device.cupy.cuda.runtime
            runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
            weakref.finalize(memory.base, _unregister, runtime, memory.ctypes.data).atexit = False
        return memory.view(dtype).reshape(shape)

    def _empty_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        # Not from CuPy's pool, which takes the next power of two.
        cuda = self._device.cupy.cuda
        memory = cuda.PinnedMemory(max(1, math.prod(shape) * dtype.itemsize))
        return np.ndarray(shape, dtype, cuda.PinnedMemoryPointer(memory, 0))

    def warm_up(self) -> None:
        """Run each kernel of a transform once, on the current stream, and wait for it."""
        for raw, delivered, change in zip(self._raw, self._delivered, self._change, strict=True):
            if delivered is not raw:
                change.change(raw[:1], self._every[:1], delivered[:1])
        self._device.cupy.cuda.get_current_stream().synchronize()

    def wait_writable(self) -> None:
        """Block until the last upload out of the host arrays is done."""
        with self._device.current(), self._device.failing("an upload failed"):
            self._uploaded.synchronize()

    def upload(self, outcome: FillOutcome) -> tuple[Any, ...]:
        """Upload on the copy stream; permute, cast and scale in one kernel on the work stream.

        Returns
        -------
        tuple of cupy.ndarray
            Views of the device slot, to be used after `acquire`.

        Raises
        ------
        NotDecoded
            If the host has to decode chunks of this batch.
        DeviceError
            If the GPU fails.
        """
        device = self._device
        with device.current(), device.failing("a batch could not be uploaded"):
            with device.copy_stream as stream:
                for event in (self._ready, *self._released):
                    stream.wait_event(event)
                self._begun[0].record(stream)
                for i, plan in enumerate(outcome.stored):
                    if plan is not None:
                        device.decoders[i].upload(plan, self._staging[i], stream)
                others = self._upload_rows(outcome, stream)
                self._sent.record(stream)
                self._uploaded.record(stream)
            with device.work_stream as stream:
                stream.wait_event(self._uploaded)
                self._begun[1].record(stream)
                try:
                    self._decode(outcome, stream)
                    delivered = tuple(
                        self._transformed(i, outcome) if other is None else other
                        for i, other in enumerate(others)
                    )
                finally:  # whatever was put on the stream, the next upload waits for it
                    self._ready.record(stream)
                    self._done.record(stream)
        return delivered

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return what the slower of link and kernels took for it."""
        elapsed = self._device.cupy.cuda.get_elapsed_time
        with self._device.current():
            self._done.synchronize()
            sent = float(elapsed(self._begun[0], self._sent))
            done = float(elapsed(self._begun[1], self._done))
        return max(sent, done) / 1e3

    def _upload_rows(self, outcome: FillOutcome, stream: Any) -> list[Any]:
        """Upload rows, and return arrays of what is none of the slot's, for which there is more."""
        size = outcome.index.size
        if self._device.cache:
            self._index[:size] = outcome.index
            self._index_on_device[:size].set(self._index[:size], stream=stream)
        others: list[Any] = [None] * len(self._raw)
        if outcome.is_resident:
            return others
        mine = []
        for i, array in enumerate(outcome.arrays):
            if outcome.stored and outcome.stored[i] is not None:
                continue
            if _is_same(array, self.memory.out[i][:size]):
                mine.append(i)
            else:
                others[i] = self._upload_other(i, array)
        if len(mine) == len(self._raw) and size == len(self._raw[0]):
            self._device_block.set(self._host_block, stream=stream)
            return others
        for i in mine:
            self._raw[i][:size].set(outcome.arrays[i], stream=stream)
        return others

    def _decode(self, outcome: FillOutcome, stream: Any) -> None:
        """Decode chunks on the work stream; wait, and see that they are what they should be.

        No cache is given anything before.
        """
        fields = [i for i, plan in enumerate(outcome.stored) if plan is not None]
        for i in fields:
            rows = self._raw[i].view(np.uint8)
            with self._device.decoding:
                self._device.decoders[i].decode(self._staging[i], rows, stream)
        if fields:
            self._decoded.record(stream)
            self._decoded.synchronize()
        if any(self._staging[i].is_bad[0] for i in fields):
            raise NotDecoded("a block, or its checksum, is not what it should be")

    def acquire(self) -> None:
        """Make the caller's current streams wait for the batch."""
        with self._device.current():
            for stream in self._device.callers_streams():
                self._device.cupy.cuda.runtime.streamWaitEvent(stream, self._ready.ptr)

    def release(self) -> None:
        """Record the caller's current streams: the next upload will wait for them."""
        cuda = self._device.cupy.cuda
        with self._device.current():
            streams = self._device.callers_streams()
            while len(self._released) < len(streams):
                self._released.append(cuda.Event(disable_timing=True))
            for event, stream in zip(self._released, streams, strict=False):
                cuda.runtime.eventRecord(event.ptr, stream)

    def drop_staging(self) -> None:
        """Give the memory back that is only for chunks to be decoded on the device."""
        self._staging = {}
        self.memory = self.memory._replace(stored=(None,) * len(self._raw))

    def _transformed(self, i: int, outcome: FillOutcome) -> Any:
        device, size = self._device, outcome.index.size
        raw, out = self._raw[i][:size], self._delivered[i][:size]
        index, rows = self._every[:size], raw
        if device.cache and not outcome.is_resident:
            device.kernels.scatter(raw, self._index_on_device[:size], device.cache[i])
        elif device.cache and self._change[i].gathers and self._delivered[i] is not self._raw[i]:
            index, rows = self._index_on_device[:size], device.cache[i].view(raw.dtype)
        elif device.cache:
            device.kernels.gather(device.cache[i], self._index_on_device[:size], raw)
        if self._delivered[i] is not self._raw[i]:
            self._change[i].change(rows, index, out)
        return out

    def _upload_other(self, i: int, array: NDArray[Any]) -> Any:
        """Upload an array that `postprocess` made, through pinned memory of its size."""
        cupy = self._device.cupy
        if array.dtype.char not in _CUPY_TYPES:
            raise DeviceError(f"postprocess returned dtype {array.dtype}, which CuPy lacks")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        other = self._other[i]
        if other is None or not _fits(array, other[0]):
            pinned = self._empty_pinned(array.shape, array.dtype)
            other = self._other[i] = pinned, cupy.empty(array.shape, array.dtype)
        rows = slice(len(array)) if array.ndim else ...
        pinned, on_device = other[0][rows], other[1][rows]
        np.copyto(pinned, array)
        on_device.set(pinned, stream=self._device.copy_stream)
        return on_device


def _unregister(runtime: Any, address: int) -> None:
    with contextlib.suppress(runtime.CUDARuntimeError):  # after a fault nothing can be undone
        runtime.hostUnregister(address)


def _aligned(nbytes: int) -> int:
    """Return the next multiple of what CuPy aligns arrays to."""
    return -(-nbytes // 512) * 512


def _import_cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"CuPy is not installed ({error}); install it with: pip install 'h5async[cuda13]', or"
            " 'h5async[cuda12]' for a driver of CUDA 12. To read without a GPU: device=\"cpu\""
        ) from error


def needs_host(transform: RowTransform) -> bool:
    """Tell whether rows have to be transformed on the host, to be delivered on a GPU."""
    return not (transform.is_identity or _gpu_can(transform))


def _gpu_can(transform: RowTransform) -> bool:
    """Tell whether the GPU gives the very bits of the host.

    It has no foreign byte order, casts what an integer does not hold to other integers, rounds
    twice on the way to float16 from what float32 does not hold exactly, and what it makes of
    complex numbers was not looked into.
    """
    raw, dtype = transform.raw_dtype, transform.dtype
    if raw == dtype or (raw == np.uint8 and dtype == np.bool_):
        return raw.isnative
    if dtype == np.float16:
        return raw.isnative and raw.kind != "c" and (raw.itemsize <= 2 or raw == np.float32)
    kinds = "biuf" if dtype.kind == "f" else "biu"
    return raw.isnative and dtype.kind != "c" and raw.kind in kinds


def _is_same(array: NDArray[Any], own: NDArray[Any]) -> bool:
    return (
        array.ctypes.data == own.ctypes.data
        and array.dtype == own.dtype
        and array.shape == own.shape
        and array.strides == own.strides
    )


def _fits(array: NDArray[Any], room: NDArray[Any]) -> bool:
    return (
        array.dtype == room.dtype
        and array.shape[1:] == room.shape[1:]
        and len(array.shape) == len(room.shape)
        and array.shape[:1] <= room.shape[:1]
    )
