"""Uploads a field whose arrays vary in size from batch to batch; sets up uploads by the core.

Sparse or ragged samples, images, or results of `postprocess` enter, in host memory; the same with
CuPy arrays leave, or a plain array that is made from them here. Only the batch's actual values are
uploaded. `cuda.py` explains the order of work on the GPU. Slots without such fields are uploaded by
the core (core/src/upload.c).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, members_of
from h5async.deliver.device import LaidOut, PinnedPart, SlotContents
from h5async.deliver.gpu import Event, Gpu, Kernels, Owned, RowChange
from h5async.errors import DeviceError
from h5async.io.shared import MORE, Growing
from h5async.plan.transform import RowTransform
from h5async.read.queue import Turns
from h5async.samples.fieldkind import Outline
from h5async.samples.samplearrays import (
    dense_on_gpu,
    memory_of,
    native,
    pad_on_gpu,
    with_memory,
)

_CUPY_TYPES = "?bhilqBHILQefdFD"  # NumPy's one-letter codes


class CudaField:
    """A slot's memory for a field that is not in its block; used by the thread that fills the slot.

    `rows` samples fit into the slot. Without an `outline`, the field is uploaded unchanged.
    `transforms` are those of samples' values, and of indices if samples are sparse; none for
    images. `parts` is memory of the slot that is pinned as needed; arrays outside of it are first
    copied to pinned memory, except the values of a field that `is_pinned` already. If the field
    `is_done`, the host has transformed it.
    """

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        rows: int,
        outline: Outline | None = None,
        transforms: Sequence[RowTransform] = (),
        parts: Sequence[PinnedPart] = (),
        *,
        is_done: bool = False,
        is_pinned: bool = False,
    ) -> None:
        self._gpu, self._kernels = gpu, kernels
        self._outline = outline
        self._parts = parts
        self._is_pinned = is_pinned
        first = transforms[0] if transforms else None
        self._transform = first if outline is None or outline.pixels is None else outline.pixels
        self._index_dtype = transforms[1].dtype if len(transforms) > 1 else None
        self._change: RowChange | None = None
        if self._transform is not None and not (is_done or self._transform.is_identity):
            self._change = kernels.row_change(self._transform)
        # By array: device memory, for a likely size at first, and pinned memory for copies.
        self._on_device: dict[int, Growing] = defaultdict(partial(Growing, gpu.memory))
        self._pinned: dict[int, Growing] = defaultdict(partial(Growing, gpu.pinned_memory))
        for number, one in enumerate(transforms):
            nbytes = one.nbytes if is_done or number else one.raw_nbytes
            self._on_device[number] = Growing(gpu.memory, one.likely * nbytes)
        likely = 0 if first is None or self._change is None else first.likely * first.nbytes
        self._changed = Growing(gpu.memory, likely)
        self._every: Any = None  # 0, 1, 2, ...
        # Memory for a plain array that is made here.
        self._made: Any = None
        if outline is not None and outline.is_left and outline.pixels is not None:
            self._made = gpu.cupy.empty((rows, *outline.pixels.row), outline.pixels.dtype)
        elif outline is not None and outline.is_left and outline.made is not None:
            row, dtype = outline.made
            self._made = gpu.cupy.empty((rows, *row), dtype)
            self._bad = gpu.cupy.empty(1, np.int32)
            if self._index_dtype is None:
                self._zero = gpu.on_device(np.zeros(1, dtype))
        self._batch: Any = None  # the uploaded batch in host memory,
        self._arrays: list[Any] = []  # and its arrays on the device

    def upload(self, batch: Any, stream: Any) -> None:
        """Queue the upload of a batch's arrays on a stream; `DeviceError` if CuPy lacks a dtype."""
        self._batch = batch
        self._arrays = [
            self._upload_array(number, native(array), stream)
            for number, array in enumerate(memory_of(batch))
        ]

    def _upload_array(self, number: int, array: NDArray[Any], stream: Any) -> Any:
        if not cupy_has(array.dtype):
            raise DeviceError(f"postprocess returned dtype {array.dtype}, which CuPy lacks")
        room = self._on_device[number].of(array.nbytes)
        found = room.view(array.dtype).reshape(array.shape)
        if array.nbytes:
            self._gpu.upload(found, self._in_pinned_memory(number, array), stream)
        return found

    def _in_pinned_memory(self, number: int, array: NDArray[Any]) -> NDArray[Any]:
        if array.flags.c_contiguous:
            if self._is_pinned and not number:
                return array
            for part in self._parts:
                if part.reach(array):
                    return array
        pinned: NDArray[Any] = self._pinned[number].of(array.nbytes)
        pinned = pinned.view(array.dtype).reshape(array.shape)
        np.copyto(pinned, array)
        return pinned

    def deliver(self) -> Any:
        """Queue the remaining work on the current stream; return the delivered arrays."""
        batch, self._batch = self._batch, None
        arrays, self._arrays = self._arrays, []
        if self._outline is not None and self._outline.pixels is not None:
            return self._changed_rows(arrays[0], self._made[: len(arrays[0])])
        if self._change is not None:
            arrays[0] = self._changed_values(arrays[0])
        if self._made is None:
            return with_memory(batch, arrays)
        return self._plain(arrays, self._made[: len(batch)])

    def _plain(self, arrays: Sequence[Any], out: Any) -> Any:
        cupy = self._gpu.cupy
        if self._index_dtype is not None:
            data, indices, indptr = arrays
            dense_on_gpu(cupy, data, indices, indptr, out, self._bad)
            if self._outline is not None and self._outline.added is not None:
                cupy.add(out, self._outline.added[()], out=out)
        else:
            values, offsets = arrays
            pad_on_gpu(cupy, values, offsets, self._zero, out)
        return out

    def _changed_values(self, raw: Any) -> Any:
        transform = self._transform
        assert transform is not None
        shape = len(raw), *transform.row
        found = self._changed.of(len(raw) * transform.nbytes).view(transform.dtype).reshape(shape)
        return self._changed_rows(raw, found)

    def _changed_rows(self, raw: Any, out: Any) -> Any:
        change, transform = self._change, self._transform
        assert change is not None
        assert transform is not None
        if not out.size:
            return out
        if change.gathers and transform.channels == 1:  # treat all values as one row
            change.change(raw.reshape(1, -1), self._numbers(1), out.reshape(1, -1))
        else:
            numbers = self._numbers(len(raw)) if change.gathers else None
            change.change(raw, numbers, out)
        return out

    def _numbers(self, count: int) -> Any:
        if self._every is None or count > self._every.size:
            with self._gpu.allocating():
                every = np.arange(max(64, count + count // MORE), dtype=np.int64)
                self._every = self._gpu.on_device(every)
        return self._every[:count]

    def warm_up(self) -> None:
        """Run each kernel on the current stream; the caller waits for it."""
        transform, outline = self._transform, self._outline
        for rows in (1, 2):
            if transform is not None and self._change is not None:
                raw = self._zeros(rows, transform.raw_row, transform.raw_dtype)
                if outline is not None and outline.pixels is not None:
                    self._changed_rows(raw[: len(self._made)], self._made[:rows])
                else:
                    self._changed_values(raw)
        if outline is None or outline.made is None or self._made is None:
            return
        assert transform is not None
        values = self._zeros(2, transform.row, transform.dtype)
        for out in (self._made[:1], self._made):
            offsets = self._zeros(len(out) + 1, (), np.dtype(np.int64))
            if self._index_dtype is None:
                self._plain([values, offsets], out)
            else:
                self._plain([values, self._zeros(2, (), self._index_dtype), offsets], out)

    def _zeros(self, rows: int, row: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._gpu.on_device(np.zeros((rows, *row), dtype))


def cupy_has(dtype: np.dtype[Any]) -> bool:
    """Tell whether CuPy supports a dtype."""
    return dtype.char in _CUPY_TYPES


def new_field(
    gpu: Gpu,
    kernels: Kernels,
    outline: Outline,
    contents: SlotContents,
    laid_out: LaidOut,
    made: Sequence[PinnedPart],
    *,
    is_done: bool,
) -> CudaField:
    """Return a field outside the slot's block; `made` is memory for arrays that the host makes."""
    if outline.is_encoded:  # decoded images have pinned memory of their own
        is_pinned = contents.shared is None and not contents.has_postprocess
        return CudaField(gpu, kernels, contents.rows, outline, is_pinned=is_pinned)
    transforms = list(contents.transforms.values())
    own = [transforms[column] for column in outline.columns]
    parts = [
        PinnedPart(
            laid_out.varying[column], gpu.pin, one.likely * laid_out.memory.out[column][:1].nbytes
        )
        for column, one in zip(outline.columns, own, strict=True)
    ]
    return CudaField(gpu, kernels, contents.rows, outline, own, [*parts, *made], is_done=is_done)


# --- uploads by the core --------------------------------------------------------------------------


class CoreUploads(NamedTuple):
    """Parameters of uploads by the core; `struct` has addresses of objects in `keep`."""

    struct: Any
    keep: tuple[Any, ...]


class CoreSlot(NamedTuple):
    """A slot that the core uploads: its blocks on the host and the GPU, its events, its kernels.

    The events are for uploaded, ready, and released by each stream. `graph` has the kernels that
    make the delivered rows; None if there are none. If rows are cached on the GPU, the kernels copy
    those at `places`, int64 (rows,), of which `places_on_device` is the copy on the GPU.
    """

    host: NDArray[np.uint8]
    device: Any
    events: Sequence[Event]
    graph: Owned | None
    places: NDArray[np.int64]
    places_on_device: Any


def captured(gpu: Gpu, stream: Any, work: Iterable[Callable[[], object]]) -> Owned:
    """Capture the kernels that some work launches on a stream as a CUDA graph."""
    runtime, graph = gpu.cupy.cuda.runtime, 0
    runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)
    try:
        try:
            for launch in work:
                launch()
        finally:
            graph = runtime.streamEndCapture(stream.ptr)
        found = Owned(int(runtime.graphInstantiate(graph)))
        gpu.freed_with(found, runtime.graphExecDestroy, found.address)
    finally:
        if graph:
            runtime.graphDestroy(graph)
    return found


def core_uploads(
    core: Core,
    gpu: Gpu,
    streams: tuple[int, int],
    slots: Sequence[CoreSlot],
    columns: Sequence[NDArray[Any]],
) -> CoreUploads:
    """Return the parameters with which the core uploads the rows of slots.

    `streams` are for copies and kernels; `columns` are views of the first slot's block on the host.
    """
    names = [name for name in members_of(core.Uploads) if name.startswith("cu")]
    pointers = [ctypes.cast(getattr(gpu.driver, name), ctypes.c_void_p) for name in names]
    of_slots = (core.UploadedSlot * len(slots))()
    for one, slot in zip(of_slots, slots, strict=True):
        one.host, one.device = slot.host.ctypes.data, slot.device.data.ptr
        one.uploaded, one.ready, *released = (event.address for event in slot.events)
        one.released[:] = released
        one.places, one.places_on_device = address(slot.places), slot.places_on_device.data.ptr
        one.graph = None if slot.graph is None else slot.graph.address
    block = slots[0].host
    begins = np.array([array.ctypes.data - block.ctypes.data for array in columns], np.int64)
    row_nbytes = np.array([array[:1].nbytes for array in columns], np.int64)
    struct = core.Uploads(
        *(pointer.value for pointer in pointers),
        context=gpu.context,
        copy_stream=streams[0],
        work_stream=streams[1],
        slots=ctypes.addressof(of_slots),
        begins=address(begins),
        row_nbytes=address(row_nbytes),
        num_columns=len(columns),
        rows=len(columns[0]),
        nbytes=block.nbytes,
    )
    return CoreUploads(struct, (of_slots, begins, row_nbytes, slots))


def taking_in_order(gpu: Gpu, turns: Turns) -> Callable[..., bool]:
    """Return a form of `Turns.take` that orders a batch's work with the caller's streams."""
    take, get_current = turns.take, gpu.driver.cuCtxGetCurrent

    def take_in_order(taken: list[Any], seconds: float | None = None) -> bool:
        found = ctypes.c_void_p()
        if not get_current(ctypes.byref(found)) and found.value == gpu.context:
            streams = gpu.streams()
        else:
            with gpu.working("the current stream cannot be found"):
                streams = gpu.streams()
        return take(taken, seconds is None, *streams)

    return take_in_order
