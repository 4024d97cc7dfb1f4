"""Delivers batches on a GPU: CuPy arrays, uploaded from pinned memory.

Work on the GPU is ordered per slot. Uploads run on one stream of our own, the copy stream, and
kernels on another, the work stream, so that one batch is permuted while the next is uploaded.
(1) The copy stream waits for the events recorded on the caller's streams when the batch was handed
back, and for the slot's last kernel, so nothing on the device is overwritten while a kernel may
read it. (2) The work stream waits for the upload. (3) The caller's streams, but not the host, wait
for the slot's last upload or kernel. (4) Before a host array is refilled, a worker waits for its
upload. No other rule is needed, because a slot's fills, uploads and uses follow each other in
program order.

The caller's streams are CuPy's current one and, if PyTorch uses the GPU, PyTorch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core
from h5async.deliver.cudafield import (
    CoreSlot,
    CoreUploads,
    CudaField,
    captured,
    core_uploads,
    cupy_has,
    new_field,
    taking_in_order,
)
from h5async.deliver.decodeplan import EncodedPlan, NotDecoded
from h5async.deliver.device import Device, DeviceSlot, PinnedPart, SlotContents, host_slot
from h5async.deliver.devicedecode import DeviceDecoder, Staging
from h5async.deliver.gpu import Gpu, Kernels, RowChange, can_transform, in_own_thread
from h5async.errors import DeviceError, H5AsyncError, forget_frames
from h5async.fill.outcomes import FillOutcome
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import page_memory, plain_memory
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform
from h5async.read.queue import MAX_STREAMS, Turns
from h5async.samples.assembly import SlotMemory
from h5async.samples.fieldkind import field_of
from h5async.samples.samplearrays import memory_of, native, with_memory
from h5async.spelling import named

_CACHE_SHARE = 0.8  # of the device's free memory, if no budget is given


class _Rows(NamedTuple):
    """A column on the GPU with one row per sample: as uploaded, and as delivered.

    `change` makes the latter from the former; None if both are the same memory.
    """

    raw: Any
    delivered: Any
    change: RowChange | None


class CudaSlot(DeviceSlot):
    """Pinned host arrays, and device arrays for the same batch."""

    def __init__(self, device: CudaDevice, contents: SlotContents) -> None:
        gpu, cupy = device.gpu, device.gpu.cupy
        rows, transforms = contents.rows, list(contents.transforms.values())
        self._device, self._gpu = device, gpu
        # By column: memory for encoded chunks, and the plan of those to read for the current batch
        # instead of rows.
        self.staging = {
            column: Staging(gpu, decoder.form) for column, decoder in device.decoders.items()
        }
        self.staged: Mapping[int, EncodedPlan] = {}
        # The data of all columns with one row per sample are contiguous on host and device, to be
        # uploaded in one copy. For other columns, only the batch's values are uploaded.
        self.num_rows = rows
        on_host = [
            not can_transform(one) or (contents.has_postprocess and not one.is_identity)
            for one in transforms
        ]
        shared = contents.shared  # if None, varying fields get pages that are pinned in part
        laid_out = host_slot(
            rows,
            transforms,
            on_host,
            contents.outlines,
            empty=page_memory if shared is None else shared.empty,
            block=gpu.pinned_memory if shared is None else None,
            encoded=plain_memory if shared is None else shared.empty,
        )
        if shared is not None and laid_out.block.nbytes:
            gpu.pin(laid_out.block)
        super().__init__(laid_out.memory)
        self._host_block = laid_out.block
        self._device_block = cupy.empty(self._host_block.nbytes, np.uint8)
        # By column; None for those that are not in the block. (Not made by a comprehension: if it
        # failed, its closure would keep this object alive.)
        self._rows: list[_Rows | None] = []
        # Arrays that are not in the block, by the name of a field or of a result of `postprocess`,
        # or the number of a mask. Memory for results and masks is allocated on first use.
        self._others: dict[int | str, CudaField] = {}
        self._columns: dict[str, int] = {}
        several = zip(laid_out.begins, self.memory.out, transforms, on_host, strict=True)
        for begin, own, todo, done in several:
            is_in = todo.capacity is None
            self._rows.append(self._new_rows(begin, own, todo, done) if is_in else None)
        made = [
            PinnedPart(array.reshape(-1).view(np.uint8), gpu.pin, array.nbytes)
            for array in self.memory.made
            if array is not None
        ]
        for outline in contents.outlines:
            column = outline.columns[0]
            name = list(contents.transforms)[column]
            self._columns[name] = column
            if outline.is_varying:
                self._others[name] = new_field(
                    gpu, device.kernels, outline, contents, laid_out, made, is_done=on_host[column]
                )
        # Places in the cache. Kernels that the core launches use all, even if a batch has fewer.
        self._index = gpu.pinned_memory(8 * rows).view(np.int64)
        self._index_on_device = gpu.on_device(np.zeros(rows, np.int64))
        self._every = gpu.on_device(np.arange(rows, dtype=np.int64))
        self._ready = gpu.event()
        self._uploaded, self._decoded = gpu.event(blocks=True), gpu.event(blocks=True)
        self._done = gpu.event(blocks=True, is_timed=True)
        self._begun = [gpu.event(is_timed=True) for _ in range(2)]  # of the upload, the kernels
        self._sent = gpu.event(is_timed=True)
        self._released = [gpu.event() for _ in range(MAX_STREAMS)]

    def _new_rows(
        self, begin: int, own: NDArray[Any], transform: RowTransform, done: bool
    ) -> _Rows:
        raw = self._device_block[begin : begin + own.nbytes].view(own.dtype).reshape(own.shape)
        if done or transform.is_identity:
            return _Rows(raw, raw, None)
        delivered = self._gpu.cupy.empty((len(own), *transform.row), transform.dtype)
        return _Rows(raw, delivered, self._device.kernels.row_change(transform))

    def warm_up(self) -> None:
        """Run each transform's kernel on the current stream, and wait for it.

        CuPy compiles one for a single row, one for several, and one for arrays from 2 GiB on.
        """
        cache = self._device.cache
        for i, found in enumerate(self._rows):
            if found is None or (change := found.change) is None:
                continue
            raw, delivered = found.raw, found.delivered
            for rows in sorted({1, min(2, len(raw)), len(raw)}):
                index, out = self._every[:rows], delivered[:rows]
                change.change(raw[:rows], index, out)
                if cache and change.gathers:
                    change.change(cache[i].view(raw.dtype), index, out)
        for field in self._others.values():
            field.warm_up()
        self._gpu.cupy.cuda.get_current_stream().synchronize()

    @property
    def delivered(self) -> SlotMemory:
        """The arrays whose first rows are delivered; empty unless all are in the block."""
        found = [rows.delivered for rows in self._rows if rows is not None]
        arrays = tuple(found) if len(found) == len(self._rows) and not self._others else ()
        return SlotMemory(arrays, arrays)

    def for_core(self) -> CoreSlot:
        """Return the slot in the form that the core uploads."""
        is_kept = bool(self._device.cache)
        several = [i for i, rows in enumerate(self._rows) if is_kept or (rows and rows.change)]
        whole = FillOutcome(np.arange(self.num_rows), (), is_resident=is_kept)
        with self._device.work_stream as stream:
            work = [partial(self._transformed, i, whole) for i in several]
            graph = captured(self._gpu, stream, work) if work else None
        events, places = (self._uploaded, self._ready, *self._released), self._index_on_device
        return CoreSlot(self._host_block, self._device_block, events, graph, self._index, places)

    def is_writable(self) -> bool:
        """Tell whether the last upload from the host arrays is done. Never blocks."""
        with self._gpu.working("an upload failed"):
            return self._uploaded.is_done()

    def wait_writable(self) -> None:
        """Block until the last upload from the host arrays is done."""
        with self._gpu.working("an upload failed"):
            self._uploaded.synchronize()

    def upload(self, outcome: FillOutcome, masks: Sequence[NDArray[Any]] = ()) -> tuple[Any, ...]:
        """Upload on the copy stream; permute, cast and scale in one kernel on the work stream."""
        device = self._device
        staged = {} if outcome.is_resident else self.staged
        with self._gpu.working("a batch could not be uploaded"):
            with device.copy_stream as stream:
                for event in (self._ready, *self._released):
                    event.hold(stream.ptr)
                self._time(self._begun[0], stream)
                try:
                    for i, plan in staged.items():
                        device.decoders[i].upload(plan, self.staging[i], stream)
                    fields = self._upload_fields(outcome, masks, staged, stream)
                    self._time(self._sent, stream)
                finally:  # the next fill must wait for all that was queued on the stream
                    self._uploaded.record(stream.ptr)
            with device.work_stream as stream:
                self._uploaded.hold(stream.ptr)
                self._time(self._begun[1], stream)
                try:
                    self._decode(staged, stream)
                    delivered = tuple(
                        self._transformed(field, outcome)
                        if isinstance(field, int)
                        else field.deliver()
                        for field in fields
                    )
                finally:  # the next upload must wait for all that was queued on the stream
                    self._ready.record(stream.ptr)
                    self._time(self._done, stream)
        return delivered

    def _time(self, event: Any, stream: Any) -> None:
        """Record a timed event, while timings are needed to choose where to decode."""
        if self._device.decoders:
            event.record(stream.ptr)

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return the longer of the times of copies and of kernels."""
        with self._gpu.working("an upload failed"):
            self._done.synchronize()
            sent = self._sent.seconds_since(self._begun[0])
            return max(sent, self._done.seconds_since(self._begun[1]))

    def _upload_fields(
        self,
        outcome: FillOutcome,
        masks: Sequence[NDArray[Any]],
        staged: Mapping[int, EncodedPlan],
        stream: Any,
    ) -> list[CudaField | int]:
        """Upload rows; return, per array and mask, its `CudaField` or its column in the block."""
        size, out = outcome.index.size, self.memory.out
        if self._device.cache:
            self._index[:size] = self._device.cached.positions(outcome.index)
            self._gpu.upload(self._index_on_device[:size], self._index[:size], stream)
        found: list[CudaField | int] = []
        mine: list[tuple[Any, NDArray[Any]]] = []
        arrays = outcome.arrays
        if outcome.is_resident:
            found, arrays = list(self._columns.values()), ()
        for name, array in zip(outcome.names or self._columns, arrays, strict=False):
            column = self._columns.get(name)
            rows = None if column is None else self._rows[column]
            if column is not None and column in staged:
                found.append(column)
            elif column is not None and rows and _is_same(array, out[column][:size]):
                mine.append((rows.raw[:size], array))
                found.append(column)
            else:
                found.append(self._uploaded_other(name, array, stream))
        for number, mask in enumerate(masks):
            found.append(self._uploaded_other(number, mask, stream))
        if size == self.num_rows and len(mine) == len(self._rows) - self._rows.count(None):
            mine = [(self._device_block, self._host_block)] if self._host_block.nbytes else []
        for target, source in mine:
            self._gpu.upload(target, source, stream)
        return found

    def _uploaded_other(self, key: int | str, array: Any, stream: Any) -> CudaField:
        """Upload an array that is not in the block; `key` is its name, or the mask's number."""
        field = self._others.get(key)
        if field is None:
            field = self._others[key] = CudaField(self._gpu, self._device.kernels, self.num_rows)
        field.upload(array, stream)
        return field

    def _decode(self, staged: Mapping[int, EncodedPlan], stream: Any) -> None:
        """Decode chunks on the work stream, wait, and check them before any rows are cached."""
        for i, plan in staged.items():
            rows, decoder = self._rows[i], self._device.decoders[i]
            assert rows is not None
            with self._device.decoding:
                decoder.decode(plan, self.staging[i], rows.raw.view(np.uint8), stream)
        if staged:
            self._decoded.record(stream.ptr)
            self._decoded.synchronize()
        if any(self.staging[i].is_bad[0] for i in staged):
            raise NotDecoded("a block was not decoded, or its size or checksum is wrong")

    def acquire(self) -> None:
        """Make the caller's current streams wait for the batch."""
        with self._gpu.working("a batch could not be handed over"):
            for stream in self._gpu.streams():
                self._ready.hold(stream)

    def release(self) -> None:
        """Record events on the caller's current streams, for the next upload to wait for."""
        with self._gpu.working("a batch could not be handed back"):
            with contextlib.ExitStack() as stack:  # tries all, even if one fails
                for event, stream in zip(self._released, self._gpu.streams(), strict=False):
                    stack.callback(event.record, stream)

    def _transformed(self, i: int, outcome: FillOutcome) -> Any:
        found, device, size = self._rows[i], self._device, outcome.index.size
        assert found is not None
        raw, out, change = found.raw[:size], found.delivered[:size], found.change
        index, rows = self._every[:size], raw
        if device.cache:
            kept, numbers = device.cache[i], self._index_on_device[:size]
            if not outcome.is_resident:
                device.kernels.copy_rows(raw, numbers, kept, scatters=True)
            elif change is not None and change.gathers:
                index, rows = numbers, kept.view(raw.dtype)
            else:
                device.kernels.copy_rows(kept, numbers, raw, scatters=False)
        if change is not None:
            change.change(rows, index, out)
        return out


def _is_same(array: Any, own: NDArray[Any]) -> bool:
    return (
        isinstance(array, np.ndarray)
        and array.ctypes.data == own.ctypes.data
        and (array.dtype, array.shape, array.strides) == (own.dtype, own.shape, own.strides)
    )


class CudaDevice(Device):
    """Delivers CuPy arrays, uploaded from pinned memory; `DeviceError` if the GPU is unusable."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.name = gpu, gpu.name
        self.is_writable_at_once = False  # a slot's last upload must have ended
        with gpu.working("no stream can be made"):
            # For uploads and for kernels, respectively.
            self.copy_stream, self.work_stream = gpu.stream(), gpu.stream()
        self.kernels = Kernels(gpu)
        # The rows of the samples `cached`, as uploaded, one array per field; empty: no cache.
        self.cache: list[Any] = []
        self.cached = Selection(0, 1, 0)
        self.decoders: dict[int, DeviceDecoder] = {}  # by column
        # Held while a batch's decoding is queued on the work stream. Batches share the decoders'
        # memory, so their work must not be interleaved there.
        self.decoding = threading.Lock()
        self.slots: list[CudaSlot] = []

    def open_slots(self, count: int, contents: SlotContents) -> list[DeviceSlot]:
        """Allocate slots; `DeviceError` if CuPy lacks a dtype, or the GPU lacks memory or fails."""
        dtypes = {field_of(name): one.dtype for name, one in contents.transforms.items()}
        dtypes |= {one.name: one.made[1] for one in contents.outlines if one.made is not None}
        for name, dtype in dtypes.items():
            if not cupy_has(dtype):
                raise DeviceError(
                    f'field "{name}": dtype {dtype} is not possible on a GPU: CuPy has only'
                    " booleans and numbers; leave the field out, or read with"
                    f" {named('device', 'cpu')}"
                )
        gpu = self.gpu
        lacks: tuple[type[Exception], ...] = (*gpu.errors, MemoryError)
        try:
            with gpu.current(), gpu.allocating():
                for column, form in enumerate(contents.encoded_formats):
                    if form is not None:
                        self.decoders[column] = DeviceDecoder(gpu, self.kernels, form)
                slots = [CudaSlot(self, contents) for _ in range(count)]
        except lacks as error:
            forget_frames(error)  # they refer to the slots allocated so far
            if not (isinstance(error, MemoryError) or gpu.is_lack_of_memory(error)):
                with gpu.failing("no slots can be made"):
                    raise
            raise DeviceError(
                f"{count} slots of {contents.rows} rows do not fit in the memory of {self.name}"
                f" ({error}); make {named('batch_size')} or {named('prefetch')} smaller"
            ) from error
        self.slots = slots
        self._compile()
        return list(slots)

    def uploads(self, core: Core) -> CoreUploads | None:
        """Return the parameters for uploads by the core; None if it cannot upload."""
        gpu, own = self.gpu, self.slots[0].memory.out
        is_all = self.slots[0].delivered.out and not self.decoders
        if not is_all or not isinstance(gpu.driver, ctypes.CDLL):  # a fake driver, in tests
            return None
        with gpu.working("kernels cannot be captured"):
            slots = [slot.for_core() for slot in self.slots]
        return core_uploads(core, gpu, (self.copy_stream.ptr, self.work_stream.ptr), slots, own)

    def taking(self, turns: Turns) -> Callable[..., bool]:
        """Return a form of `Turns.take` that orders a batch's work with the caller's streams."""
        return taking_in_order(self.gpu, turns)

    def _compile(self) -> None:
        gpu = self.gpu
        try:
            with gpu.failing("the kernels could not be run"):
                in_own_thread(self._warm_up)
        except H5AsyncError:
            raise
        except Exception as error:
            raise DeviceError(
                f"CuPy {gpu.cupy.__version__} cannot compile for {self.name} ({error}); it needs"
                " NVRTC and the headers of CUDA: pip install 'cupy-cuda13x[ctk]', or"
                " 'cupy-cuda12x[ctk]' for a driver of CUDA 12"
            ) from error

    def _warm_up(self) -> None:
        with self.gpu.current(), self.gpu.allocating():
            self.slots[0].warm_up()
            self.kernels.load()

    def drop_decoders(self) -> None:
        """Free the memory that is used only for decoding on the device."""
        self.decoders = {}
        for slot in self.slots:
            slot.staging, slot.staged = {}, {}

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Reserve memory for the rows of all samples of a selection, in their uploaded form."""
        gpu, slot = self.gpu, self.slots[0]
        row_nbytes = [array.nbytes // slot.num_rows for array in slot.memory.out]
        nbytes = selection.size * sum(row_nbytes)
        if cache_bytes is None:
            cache_bytes = int(gpu.free_nbytes * _CACHE_SHARE)
        budget = Budget("device", nbytes, cache_bytes)
        if not budget.suffices:
            return budget
        with gpu.working("the cache could not be made"), gpu.allocating():
            try:
                self.cache = [gpu.cupy.empty((selection.size, row), np.uint8) for row in row_nbytes]
            except gpu.errors as error:
                if not gpu.is_lack_of_memory(error):
                    raise
                self.cache = []
                return Budget("device", nbytes, gpu.free_nbytes)
        self._compile()  # the kernels that read rows of the cache
        self.cached = selection.ascending
        return Residency(selection, nbytes, "device")

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy host arrays to the GPU on the current stream, and wait for it."""
        gpu = self.gpu
        with gpu.working("samples could not be uploaded"), gpu.allocating(), gpu.current():
            return tuple(
                with_memory(
                    one, [gpu.cupy.asarray(native(a), blocking=True) for a in memory_of(one)]
                )
                for one in arrays
            )

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned memory; `DeviceError` if the GPU refuses."""
        with self.gpu.working(f"{nbytes:,} bytes of host memory could not be pinned"):
            return self.gpu.pinned_memory(nbytes)

    def can_transform(self, transform: RowTransform) -> bool:
        """Tell whether the GPU transforms rows with exactly the host's result."""
        return can_transform(transform)

    def share(self) -> None:
        """Make the caller's other streams wait for the work on its current one."""
        with self.gpu.working("a batch could not be shared between streams"):
            current, *others = self.gpu.streams()
            for stream in others:
                self._order(current, stream)

    def _order(self, first: int, then: int) -> None:
        event = self.gpu.event()
        event.record(first)
        event.hold(then)

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 on the current stream, after work on the other ones."""
        with self.gpu.working("a batch could not be poisoned"):
            current, *others = self.gpu.streams()
            for stream in others:
                self._order(stream, current)
            for array in itertools.chain.from_iterable(map(memory_of, arrays)):
                # All are C-contiguous.
                if array.nbytes:
                    runtime = self.gpu.cupy.cuda.runtime
                    runtime.memsetAsync(array.data.ptr, 255, array.nbytes, current)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context manager: this GPU is current, and its errors become `DeviceError`."""
        return self.gpu.working("arrays could not be copied")

    def close(self) -> None:
        """Wait until the GPU no longer uses the slots' memory."""
        with self.gpu.freeing():
            self.gpu.cupy.cuda.runtime.deviceSynchronize()
        self.cache, self.decoders, self.slots = [], {}, []
