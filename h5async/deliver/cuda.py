"""Delivers batches on a GPU: CuPy arrays, uploaded from pinned memory.

CUDA's order is kept slot by slot. Uploads run on one stream of our own, the copy stream, and
kernels on another, the work stream, so that one batch is permuted while the next one is uploaded.
(1) The copy stream waits for the events that the caller's streams recorded when the batch was
handed back, and for the slot's last kernel, so nothing on the device is overwritten while a kernel
may read it. (2) The work stream waits for the upload. (3) The caller's streams, but not the host,
wait for the slot's last upload or kernel. (4) Before a host array is refilled, a worker waits for
its upload. No other rule is needed, because one slot's fills, uploads and uses follow each other in
program order.

The caller's streams are CuPy's current one and, if PyTorch uses the GPU, PyTorch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.cudafield import cupy_has
from h5async.deliver.cudaslot import CudaSlot, SharedBySlots
from h5async.deliver.device import Device, DeviceSlot, SlotContents
from h5async.deliver.devicedecode import DeviceDecoder
from h5async.deliver.gpu import Gpu, in_own_thread
from h5async.deliver.kernels import can_transform
from h5async.errors import DeviceError, H5AsyncError, forget_frames
from h5async.fill.resident import Budget, Residency
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform
from h5async.samples.fieldkind import field_of
from h5async.samples.samplearrays import memory_of, native, with_memory
from h5async.spelling import named

_CACHE_SHARE = 0.8  # of the device's free memory, if no budget is given


class CudaDevice(SharedBySlots, Device):
    """Delivers CuPy arrays, uploaded from pinned memory; `DeviceError` if the GPU is unusable."""

    def __init__(self, gpu: Gpu) -> None:
        Device.__init__(self)
        SharedBySlots.__init__(self, gpu)
        self.is_writable_at_once = False  # uploads from a slot have to be waited for
        self.name = gpu.name
        self.slots: list[CudaSlot] = []

    def open_slots(self, count: int, contents: SlotContents) -> list[DeviceSlot]:
        """Allocate slots; `DeviceError` if CuPy lacks a dtype, or the GPU memory, or it fails."""
        dtypes = {field_of(name): one.dtype for name, one in contents.transforms.items()}
        dtypes |= {one.name: one.made[1] for one in contents.outlines if one.made is not None}
        for name, dtype in dtypes.items():
            if not cupy_has(dtype):
                raise DeviceError(
                    f'field "{name}": dtype {dtype} cannot lie on a GPU: CuPy has only'
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
            forget_frames(error)  # they hold the slots allocated so far
            if not (isinstance(error, MemoryError) or gpu.is_lack_of_memory(error)):
                with gpu.failing("no slots can be made"):
                    raise
            raise DeviceError(
                f"{count} slots of {contents.rows} rows do not fit the memory of {self.name}"
                f" ({error}); make {named('batch_size')} or {named('prefetch')} smaller"
            ) from error
        self.slots = slots
        self._compile()
        return list(slots)

    def _compile(self) -> None:
        """Compile the kernels now, so that a failure is no error of a batch."""
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
        """Free the memory that is only for decoding on the device."""
        self.decoders = {}
        for slot in self.slots:
            slot.staging, slot.staged = {}, {}

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Reserve memory for the rows of all samples of a selection, as they are uploaded."""
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
        self._compile()  # kernels that take rows out of it
        self.cached = selection.ascending
        return Residency(selection, nbytes, "device")

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return copies of host arrays on the GPU, made on the current stream; blocks."""
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
        """Have the caller's other streams wait for the work of its current one."""
        with self.gpu.working("a batch could not be shared between streams"):
            current, *others = self.gpu.streams()
            for stream in others:
                self._order(current, stream)

    def _order(self, first: int, then: int) -> None:
        event = self.gpu.event()
        event.record(first)
        event.hold(then)

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255, on the current stream, after work of the other ones."""
        with self.gpu.working("a batch could not be poisoned"):
            current, *others = self.gpu.streams()
            for stream in others:
                self._order(stream, current)
            for array in itertools.chain.from_iterable(map(memory_of, arrays)):
                # C-contiguous, all of them.
                if array.nbytes:
                    runtime = self.gpu.cupy.cuda.runtime
                    runtime.memsetAsync(array.data.ptr, 255, array.nbytes, current)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that makes this GPU current, and turns its errors into `DeviceError`."""
        return self.gpu.working("arrays could not be copied")

    def close(self) -> None:
        """Wait until the GPU no longer uses the slots' memory."""
        with self.gpu.freeing():
            self.gpu.cupy.cuda.runtime.deviceSynchronize()
        self.cache, self.decoders, self.slots = [], {}, []
