"""Filled host arrays enter; arrays on the device leave, ordered on the caller's stream.

The only importer of CuPy, and it imports it only where a GPU is asked for. The host twin hands
the arrays on as they are.

How CUDA is kept in order, slot by slot. All uploads run on one stream of our own, the copy
stream. (1) The copy stream waits for the event that the caller's stream recorded when it handed
the batch back, so a device array is never overwritten while a kernel of the caller's may read it.
(2) The caller's stream waits for the event that follows the upload; the host does not. (3) Before
a host array is refilled, a worker waits for that same event. No other rule is needed, because one
slot's fills, uploads and uses follow each other in program order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.filling import SlotMemory
from h5async.transform import RowTransform

_CUPY_TYPES = "?bhilqBHILQefdFD"  # NumPy's one-letter codes


class DeviceSlot(Protocol):
    """A slot's memory, and the order of its fills, uploads and uses."""

    memory: SlotMemory

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; in a worker."""

    def upload(self, arrays: tuple[NDArray[Any], ...], size: int) -> tuple[Any, ...]:
        """Begin to bring a batch of `size` rows to the device; in a worker."""

    def acquire(self) -> None:
        """Order the caller's current stream behind the upload."""

    def release(self) -> None:
        """Note how far the caller's current stream has come: it is done with the batch."""


class Device(Protocol):
    """Where batches are delivered."""

    name: str

    def open_slots(
        self, count: int, rows: int, transforms: Mapping[str, RowTransform], postprocess: bool
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows; `postprocess`: it wants delivered arrays on the host."""

    def close(self) -> None:
        """Wait until the device uses none of the slots' memory any more."""


def find_device(name: str) -> Device:
    """Return the device of an option ``device``.

    Parameters
    ----------
    name
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA where CuPy and a GPU are there.

    Raises
    ------
    DeviceError
        If CuPy or the GPU is missing; the message says which, and what to do.
    """
    if name == "cpu":
        return HostDevice()
    try:
        return CudaDevice(int(name.partition(":")[2] or -1) if name != "auto" else -1)
    except DeviceError:
        if name == "auto":
            return HostDevice()
        raise


def _allocate_host(
    rows: int, transforms: Sequence[RowTransform], on_host: Sequence[bool], empty: Any
) -> SlotMemory:
    raw, out = [], []
    for transform, transformed in zip(transforms, on_host, strict=True):
        delivered = None
        if transformed:
            delivered = empty((rows, *transform.row), transform.dtype)
            raw.append(np.empty((rows, *transform.raw_row), transform.raw_dtype))
        else:
            raw.append(empty((rows, *transform.raw_row), transform.raw_dtype))
        out.append(raw[-1] if delivered is None else delivered)
    return SlotMemory(tuple(raw), tuple(out))


class HostSlot:
    """A slot in plain memory: nothing is copied and nothing has to wait."""

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory

    def wait_writable(self) -> None:
        """Return at once."""

    def upload(self, arrays: tuple[NDArray[Any], ...], size: int) -> tuple[Any, ...]:
        """Return the arrays themselves."""
        return arrays

    def acquire(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class HostDevice:
    """Batches are NumPy arrays in the slots themselves."""

    name = "cpu"

    def open_slots(
        self, count: int, rows: int, transforms: Mapping[str, RowTransform], postprocess: bool
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows; all transforming is the filler's."""
        todo = list(transforms.values())
        on_host = [not transform.is_identity for transform in todo]
        return [HostSlot(_allocate_host(rows, todo, on_host, np.empty)) for _ in range(count)]

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
        with self._device:
            self.copy_stream = cupy.cuda.Stream(non_blocking=True)
        # Without fused multiply-add the results are those of the host, bit for bit.
        self.scale_kernel = cupy.ElementwiseKernel(
            "S stored, T scale, T offset",
            "T delivered",
            "delivered = T(T(stored) * scale) + offset",
            "h5async_scale",
            options=("--fmad=false",),
        )

    def open_slots(
        self, count: int, rows: int, transforms: Mapping[str, RowTransform], postprocess: bool
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
            not transform.is_identity and (postprocess or not _gpu_can(transform))
            for transform in todo
        ]
        try:
            with self.current():
                return [CudaSlot(self, rows, todo, on_host) for _ in range(count)]
        except (self.cupy.cuda.memory.OutOfMemoryError, MemoryError) as error:
            raise DeviceError(
                f"{count} slots of {rows} rows do not fit the memory of {self.name} ({error});"
                " make batch_size or prefetch smaller"
            ) from error

    def current(self) -> Any:
        """Return a context in which this GPU is the current one."""
        return self.cupy.cuda.Device(self._device.id)

    def close(self) -> None:
        """Wait until the GPU uses none of the slots' memory any more."""
        with self.current():
            self.cupy.cuda.runtime.deviceSynchronize()


class CudaSlot:
    """Pinned host arrays, and device arrays of the same batch."""

    def __init__(
        self,
        device: CudaDevice,
        rows: int,
        transforms: Sequence[RowTransform],
        on_host: Sequence[bool],
    ) -> None:
        cupy = device.cupy
        self._device = device
        self._transforms = transforms
        self.memory = _allocate_host(rows, transforms, on_host, self._empty_pinned)
        self._raw = [cupy.empty(array.shape, array.dtype) for array in self.memory.out]
        self._delivered = [
            raw if done or todo.is_identity else cupy.empty((rows, *todo.row), todo.dtype)
            for raw, todo, done in zip(self._raw, transforms, on_host, strict=True)
        ]
        self._factors = [_factors(cupy, transform) for transform in transforms]
        # What `postprocess` returns may be of any shape; memory for it is made when it comes.
        self._other: list[tuple[Any, Any] | None] = [None] * len(transforms)
        self._uploaded = cupy.cuda.Event(block=True, disable_timing=True)
        self._released = cupy.cuda.Event(disable_timing=True)
        # The memory pool hands memory out in the order of the current stream; see that what it
        # held before is done with.
        cupy.cuda.get_current_stream().synchronize()

    def _empty_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        cupy = self._device.cupy
        memory = cupy.cuda.alloc_pinned_memory(max(1, math.prod(shape) * dtype.itemsize))
        return np.ndarray(shape, dtype, memory)

    def wait_writable(self) -> None:
        """Block until the last upload out of the host arrays is done."""
        with self._device.current():
            self._uploaded.synchronize()

    def upload(self, arrays: tuple[NDArray[Any], ...], size: int) -> tuple[Any, ...]:
        """Upload, and permute, cast and scale in one kernel, on the copy stream.

        Returns
        -------
        tuple of cupy.ndarray
            Views of the device slot, to be used after `acquire`.
        """
        device = self._device
        stream = device.copy_stream
        with device.current(), stream:
            stream.wait_event(self._released)
            delivered = []
            for i, array in enumerate(arrays):
                if _is_same(array, self.memory.out[i][:size]):
                    raw = self._raw[i][:size]
                    raw.set(array, stream=stream)
                    delivered.append(self._transformed(i, raw, size))
                else:
                    delivered.append(self._upload_other(i, array))
            self._uploaded.record(stream)
        return tuple(delivered)

    def acquire(self) -> None:
        """Make the caller's current stream wait for the upload."""
        with self._device.current():
            self._device.cupy.cuda.get_current_stream().wait_event(self._uploaded)

    def release(self) -> None:
        """Record the caller's current stream: the next upload will wait for it."""
        with self._device.current():
            self._released.record(self._device.cupy.cuda.get_current_stream())

    def _transformed(self, i: int, raw: Any, size: int) -> Any:
        out = self._delivered[i]
        if out is self._raw[i]:
            return raw
        permuted = raw.transpose(self._transforms[i].permutation)
        factors = self._factors[i]
        if factors is None:
            self._device.cupy.copyto(out[:size], permuted, casting="unsafe")
        else:
            self._device.scale_kernel(permuted, *factors, out[:size])
        return out[:size]

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


def _import_cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"CuPy is not installed ({error}); install it with: pip install 'h5async[cuda13]', or"
            " 'h5async[cuda12]' for a driver of CUDA 12. To read without a GPU: device=\"cpu\""
        ) from error


def _factors(cupy: Any, transform: RowTransform) -> tuple[Any, Any] | None:
    """Return scale and offset on the device, None where there is neither; -0.0 adds nothing."""
    if transform.scale is None and transform.offset is None:
        return None
    scale = transform.scale if transform.scale is not None else np.ones((), transform.dtype)
    offset = transform.offset if transform.offset is not None else -np.zeros((), transform.dtype)
    return cupy.asarray(scale), cupy.asarray(offset)


def _gpu_can(transform: RowTransform) -> bool:
    """Tell whether the GPU gives the very bits of the host.

    It has no foreign byte order, and rounds twice on the way to float16 from what float32 does
    not hold exactly.
    """
    raw = transform.raw_dtype
    to_half = transform.dtype == np.float16
    return raw.isnative and (not to_half or raw.itemsize <= 2 or raw == np.float32)


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
