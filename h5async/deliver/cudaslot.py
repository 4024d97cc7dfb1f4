"""One slot on a GPU: pinned host arrays, and device arrays of the same batch.

A filled batch in host memory enters; arrays on the GPU leave. `cuda.py` tells what keeps the
order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.device import NotDecoded
from h5async.deliver.devicedecode import Staging
from h5async.deliver.host import host_slot
from h5async.errors import DeviceError
from h5async.fill.records import FillOutcome
from h5async.io.shared import SharedMemory
from h5async.plan.transform import RowTransform

if TYPE_CHECKING:
    from h5async.deliver.cuda import CudaDevice

_CUPY_TYPES = "?bhilqBHILQefdFD"  # NumPy's one-letter codes
_BYTE = np.dtype(np.uint8)


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
        gpu, cupy = device.gpu, device.gpu.cupy
        self._device, self._gpu = device, gpu
        self._copy_stream, self._work_stream = device.copy_stream, device.work_stream
        self._shared = shared
        self._staging = {
            field: Staging(gpu, decoder.form, self._empty_filled)
            for field, decoder in device.decoders.items()
        }
        # What is uploaded of all fields lies in one piece, on both sides, to be sent in one go.
        memory, self._host_block, begins = host_slot(
            rows, transforms, on_host, lambda nbytes: self._empty_filled((nbytes,), _BYTE)
        )
        self._device_block = cupy.empty(self._host_block.nbytes, np.uint8)
        self.memory = memory._replace(
            encoded=tuple(
                self._staging[field].encoded if field in self._staging else None
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
        self._change = [
            device.kernels.row_change(transform, gpu.on_device) for transform in transforms
        ]
        # Sample numbers, for the cache.
        self._index = self._empty_pinned((rows,), np.dtype(np.int64))
        self._index_on_device = cupy.empty(rows, np.int64)
        self._every = gpu.on_device(np.arange(rows, dtype=np.int64))
        # What `postprocess` returns may be of any shape; memory for it is made when it comes.
        self._other: list[tuple[Any, Any] | None] = [None] * len(transforms)
        self._uploaded = gpu.event(blocks=True)
        self._ready = gpu.event()
        self._decoded = gpu.event(blocks=True)
        self._done = gpu.event(blocks=True, is_timed=True)
        self._begun = [gpu.event(is_timed=True) for _ in range(2)]  # the upload, and the kernels
        self._sent = gpu.event(is_timed=True)
        self._released = [gpu.event()]

    def _empty_filled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return pinned memory that whoever fills the slot has too."""
        if self._shared is None:
            return self._empty_pinned(shape, dtype)
        memory = self._shared.empty(math.prod(shape) * dtype.itemsize)
        if memory.nbytes:
            self._gpu.pin(memory)
        return memory.view(dtype).reshape(shape)

    def _empty_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        memory = self._gpu.pinned_memory(math.prod(shape) * dtype.itemsize)
        return memory.view(dtype).reshape(shape)

    def warm_up(self) -> None:
        """Run each kernel of a transform, on the current stream, and wait for it.

        CuPy compiles one for a single row, one for more, and, from 2 GiB on, one for larger arrays.
        """
        cache = self._device.cache
        for i, (raw, change) in enumerate(zip(self._raw, self._change, strict=True)):
            if self._delivered[i] is raw:
                continue
            for rows in sorted({1, min(2, len(raw)), len(raw)}):
                index, out = self._every[:rows], self._delivered[i][:rows]
                change.change(raw[:rows], index, out)
                if cache and change.gathers:
                    change.change(cache[i].view(raw.dtype), index, out)
        self._gpu.cupy.cuda.get_current_stream().synchronize()

    def wait_writable(self) -> None:
        """Block until the last upload out of the host arrays is done."""
        with self._gpu.working("an upload failed"):
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
        with self._gpu.working("a batch could not be uploaded"):
            with self._copy_stream as stream:
                for event in (self._ready, *self._released):
                    event.hold(stream.ptr)
                self._begun[0].record(stream.ptr)
                try:
                    for i, plan in enumerate(outcome.encoded):
                        if plan is not None:
                            device.decoders[i].upload(plan, self._staging[i], stream)
                    others = self._upload_rows(outcome, stream)
                    self._sent.record(stream.ptr)
                finally:  # whatever was put on the stream, the next fill waits for it
                    self._uploaded.record(stream.ptr)
            with self._work_stream as stream:
                self._uploaded.hold(stream.ptr)
                self._begun[1].record(stream.ptr)
                try:
                    self._decode(outcome, stream)
                    delivered = tuple(
                        self._transformed(i, outcome) if other is None else other
                        for i, other in enumerate(others)
                    )
                finally:  # whatever was put on the stream, the next upload waits for it
                    self._ready.record(stream.ptr)
                    self._done.record(stream.ptr)
        return delivered

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return what the slower of link and kernels took for it."""
        with self._gpu.working("an upload failed"):
            self._done.synchronize()
            sent = self._sent.seconds_since(self._begun[0])
            return max(sent, self._done.seconds_since(self._begun[1]))

    def _upload_rows(self, outcome: FillOutcome, stream: Any) -> list[Any]:
        """Upload rows, and return arrays of what is none of the slot's, for which there is more."""
        size = outcome.index.size
        if self._device.cache:
            self._index[:size] = self._device.cached.positions(outcome.index)
            self._gpu.upload(self._index_on_device[:size], self._index[:size], stream)
        others: list[Any] = [None] * len(self._raw)
        if outcome.is_resident:
            return others
        mine = []
        for i, array in enumerate(outcome.arrays):
            if outcome.encoded and outcome.encoded[i] is not None:
                continue
            if _is_same(array, self.memory.out[i][:size]):
                mine.append(i)
            else:
                others[i] = self._upload_other(i, array)
        if len(mine) == len(self._raw) and size == len(self._raw[0]):
            self._gpu.upload(self._device_block, self._host_block, stream)
            return others
        for i in mine:
            self._gpu.upload(self._raw[i][:size], outcome.arrays[i], stream)
        return others

    def _decode(self, outcome: FillOutcome, stream: Any) -> None:
        """Decode chunks on the work stream; wait, and see that they are what they should be.

        No cache is given anything before.
        """
        fields = [i for i, plan in enumerate(outcome.encoded) if plan is not None]
        for i in fields:
            rows = self._raw[i].view(np.uint8)
            with self._device.decoding:
                self._device.decoders[i].decode(self._staging[i], rows, stream)
        if fields:
            self._decoded.record(stream.ptr)
            self._decoded.synchronize()
        if any(self._staging[i].is_bad[0] for i in fields):
            raise NotDecoded("a block, or its checksum, is not what it should be")

    def acquire(self) -> None:
        """Make the caller's current streams wait for the batch."""
        with self._gpu.working("a batch could not be handed over"):
            for stream in self._gpu.streams():
                self._ready.hold(stream)

    def release(self) -> None:
        """Record the caller's current streams: the next upload will wait for them."""
        with self._gpu.working("a batch could not be handed back"):
            streams = self._gpu.streams()
            while len(self._released) < len(streams):
                self._released.append(self._gpu.event())
            with contextlib.ExitStack() as stack:  # all are tried, also where one fails
                for event, stream in zip(self._released, streams, strict=False):
                    stack.callback(event.record, stream)

    def drop_staging(self) -> None:
        """Give the memory back that is only for chunks to be decoded on the device."""
        self._staging = {}
        self.memory = self.memory._replace(encoded=(None,) * len(self._raw))

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
        if not cupy_has(array.dtype):
            raise DeviceError(f"postprocess returned dtype {array.dtype}, which CuPy lacks")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        other = self._other[i]
        if other is None or not _fits(array, other[0]):
            pinned = self._empty_pinned(array.shape, array.dtype)
            with self._gpu.allocating():
                other = pinned, self._gpu.cupy.empty(array.shape, array.dtype)
            self._other[i] = other
        rows = slice(len(array)) if array.ndim else ...
        pinned, on_device = other[0][rows], other[1][rows]
        np.copyto(pinned, array)
        self._gpu.upload(on_device, pinned, self._copy_stream)
        return on_device


def cupy_has(dtype: np.dtype[Any]) -> bool:
    """Tell whether CuPy has a type for the elements."""
    return dtype.char in _CUPY_TYPES


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
