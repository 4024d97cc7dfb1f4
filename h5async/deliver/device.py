"""Where batches are delivered: on the host, as NumPy arrays in the memory of the slots themselves.

That memory may be pinned, for copies to a GPU by the caller, which needs PyTorch alone (`Pinning`).
What a GPU does otherwise is in `cuda.py`: its device and slots are subclasses of those here.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core
from h5async.deliver.decodeplan import EncodedFormat
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import MORE, SharedMemory, call_before_unmap, page_memory, plain_memory
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform
from h5async.read.queue import Turns
from h5async.samples.assembly import SlotMemory
from h5async.samples.fieldkind import Outline
from h5async.samples.samplearrays import memory_of
from h5async.spelling import named
from h5async.system.interruptions import suppressing

# Returns new memory of so many bytes.
Empty: TypeAlias = Callable[[int], NDArray[np.uint8]]

_BLOCK_ALIGNMENT = 512  # CuPy's, of arrays
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


class SlotContents(NamedTuple):
    """What each slot of a reader holds."""

    rows: int  # samples at most
    transforms: Mapping[str, RowTransform]  # by column
    outlines: Sequence[Outline]  # how each field is assembled from its columns
    encoded_formats: Sequence[EncodedFormat | None]  # by column: how a device decodes its chunks
    has_postprocess: bool  # which needs delivered arrays on the host
    shared: SharedMemory | None  # with the helper processes that fill the slots, if any


class LaidOut(NamedTuple):
    """The host memory of a slot, and its arrays."""

    memory: SlotMemory
    # The delivered, or raw, rows of all columns with a row per sample, contiguous.
    block: NDArray[np.uint8]
    begins: list[int]  # where each column begins in it
    # By number of column: the memory of those whose number of rows per sample differs.
    varying: dict[int, NDArray[np.uint8]]


def host_slot(
    rows: int,
    transforms: Sequence[RowTransform],
    on_host: Sequence[bool],
    outlines: Sequence[Outline] = (),
    *,
    empty: Empty = plain_memory,
    block: Empty | None = None,
    encoded: Empty = plain_memory,
) -> LaidOut:
    """Lay out a slot's delivered rows, or raw ones that need no work on the host, in memory.

    `on_host` says of each transform whether the host does it. Encoded columns, and arrays that the
    host makes of others, lie outside the block; `outlines` are of all fields. `empty` returns
    memory; `block` that of the block, and `encoded` that of encoded columns.
    """
    of_images = {column for one in outlines if one.is_encoded for column in one.columns}
    sizes = [
        transform.slot_rows(rows) * (transform.nbytes if done else transform.raw_nbytes)
        for transform, done in zip(transforms, on_host, strict=True)
    ]
    in_block = [
        -(-size // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT if transform.capacity is None else 0
        for size, transform in zip(sizes, transforms, strict=True)
    ]
    *begins, total = itertools.accumulate(in_block, initial=0)
    whole = (block or empty)(total)
    raw, out = [], []
    varying: dict[int, NDArray[np.uint8]] = {}
    several = enumerate(zip(transforms, on_host, begins, strict=True))
    for number, (transform, done, begin) in several:
        home, at = whole, begin
        if number in of_images:
            home, at = encoded(sizes[number]), 0
        elif transform.capacity is not None:
            home, at = varying.setdefault(number, empty(sizes[number])), 0
        count = transform.slot_rows(rows)
        shape, dtype = (count, *transform.raw_row), transform.raw_dtype
        if done:
            raw.append(np.empty(shape, dtype))
            out.append(np.ndarray((count, *transform.row), transform.dtype, home, at))
        else:
            raw.append(np.ndarray(shape, dtype, home, at))
            out.append(raw[-1])
    made: list[NDArray[Any] | None] = []
    for one in outlines:
        if one.made is None or one.is_left:
            made.append(None)
        else:
            row, dtype = one.made
            made.append(np.ndarray((rows, *row), dtype, empty(rows * one.made_on_host_nbytes)))
    return LaidOut(SlotMemory(tuple(raw), tuple(out), tuple(made)), whole, begins, varying)


class PinnedPart:
    """Host memory of one slot, whose beginning is pinned: the part that batches use.

    A slot has room for the longest samples that may meet in a batch. The system allocates such
    memory only when it is touched, and pinning touches all of it. So the pinned part begins at the
    mean of batches, and a quarter more, and grows by a quarter when a batch needs more.

    `memory` is uint8 (nbytes,), of whole pages; `nbytes` are pinned at once. `pin` pins whole
    pages, and returns a function that unpins them, once; its exceptions pass, here and in `reach`.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        pin: Callable[[NDArray[Any]], Callable[[], object]],
        nbytes: int,
    ) -> None:
        self._memory, self._pin = memory, pin
        self._unpin: Callable[[], object] | None = None
        self._pinned_nbytes = 0
        self._pin_all_of(min(nbytes, memory.nbytes))

    def reach(self, array: NDArray[Any]) -> bool:
        """Pin the memory up to the end of a C-contiguous array; return False if it lies elsewhere.

        Called while the slot is filled, when nothing copies out of the memory.
        """
        begin = array.ctypes.data - self._memory.ctypes.data
        end = begin + array.nbytes
        if begin < 0 or end > self._memory.nbytes:
            return False
        if end > self._pinned_nbytes:
            self._pin_all_of(min(end + end // MORE, self._memory.nbytes))
        return True

    def _pin_all_of(self, nbytes: int) -> None:
        if self._unpin is not None:
            unpin, self._unpin, self._pinned_nbytes = self._unpin, None, 0
            unpin()
        if nbytes:
            self._unpin = self._pin(self._memory[:nbytes])
            self._pinned_nbytes = nbytes


class DeviceSlot:
    """A slot's memory, and the order of its fills, uploads and uses.

    On the host nothing is copied. Refilling pinned memory waits for the caller's copies. Of
    `parts`, only as much is pinned as batches use.
    """

    def __init__(
        self, memory: SlotMemory, pinning: Pinning | None = None, parts: Sequence[PinnedPart] = ()
    ) -> None:
        self.memory = memory
        self._pinning = pinning
        self._parts = parts
        self._copies: Sequence[Any] = ()  # events of the caller's work with the last batch

    @property
    def delivered(self) -> SlotMemory:
        """The arrays whose first rows are delivered, if nothing is done but copying them."""
        return self.memory

    def is_writable(self) -> bool:
        """Tell whether the host arrays may be overwritten now. Never blocks."""
        return self._pinning is None or self._pinning.are_done(self._copies)

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; in a worker."""
        if self._pinning is not None:
            self._pinning.wait(self._copies)

    def upload(self, outcome: FillOutcome, masks: Sequence[NDArray[Any]] = ()) -> tuple[Any, ...]:
        """Begin to bring a filled batch, and then masks, to the device; in a worker.

        Returns the arrays that are delivered. `NotDecoded` is raised if the host has to decode its
        chunks; they were waited for. `DeviceError` is raised if the GPU fails.
        """
        if self._parts:
            for array in itertools.chain.from_iterable(map(memory_of, outcome.arrays)):
                for part in self._parts:
                    part.reach(array)
        return (*outcome.arrays, *masks)

    def acquire(self) -> None:
        """Make the caller's current streams wait for the upload."""

    def release(self) -> None:
        """Record the caller's current streams, which are done with the batch."""
        if self._pinning is not None:
            self._copies = self._pinning.record()


class Device:
    """Where batches are delivered; `pinning` pins the slots' memory, if given."""

    name = "cpu"  # or "cuda:N"

    def __init__(self, pinning: Pinning | None = None) -> None:
        # Whether a free slot may be filled without `DeviceSlot.wait_writable`.
        self.is_writable_at_once = pinning is None
        self._pinning = pinning

    def open_slots(self, count: int, contents: SlotContents) -> list[DeviceSlot]:
        """Allocate slots."""
        return [self._slot(contents) for _ in range(count)]

    def _slot(self, contents: SlotContents) -> DeviceSlot:
        todo, shared = list(contents.transforms.values()), contents.shared
        empty = plain_memory if self._pinning is None else page_memory
        laid_out = host_slot(
            contents.rows,
            todo,
            [not transform.is_identity for transform in todo],
            contents.outlines,
            empty=empty if shared is None else shared.empty,
            # Helper processes write encoded images there, too.
            encoded=plain_memory if shared is None else shared.empty,
        )
        if self._pinning is None:
            return DeviceSlot(laid_out.memory)
        pin = self._pinning.pin
        for memory in (laid_out.block, *laid_out.memory.made):
            if memory is not None and memory.nbytes:
                pin(memory)
        parts = [
            PinnedPart(varying, pin, todo[number].likely * todo[number].nbytes)
            for number, varying in laid_out.varying.items()
        ]
        return DeviceSlot(laid_out.memory, self._pinning, parts)

    def uploads(self, core: Core) -> Any:
        """Return what the core needs to upload batches itself; None if it cannot."""

    def taking(self, turns: Turns) -> Callable[..., bool]:
        """Return what takes batches in turn, in the order of the caller's streams."""
        return turns.take

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return host memory for arrays that a worker makes beside a slot's; in any thread.

        `DeviceError` is raised if it cannot be pinned.
        """
        if self._pinning is None or not nbytes:
            return plain_memory(nbytes)
        memory = page_memory(nbytes)
        self._pinning.pin(memory)
        return memory

    def can_transform(self, transform: RowTransform) -> bool:
        """Tell whether the device transforms rows with exactly the host's result."""
        return False

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Reserve room for the rows of all samples, after `open_slots`.

        If `cache_bytes` or the device's free memory does not suffice, the `Budget` is returned.
        """
        raise DeviceError(
            f"{named('cache', 'device')} keeps rows on a GPU, and none was found; use"
            f" {named('cache', 'host')}"
        )

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""
        return nullcontext()

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return host arrays as lasting arrays where batches are delivered; may block."""
        return arrays

    def share(self) -> None:
        """Have the caller's other streams wait for the work of its current one."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 (NaN, -1, 255), after all work of the caller."""
        for array in itertools.chain.from_iterable(map(memory_of, arrays)):
            if array.dtype.hasobject:
                array.fill(None)
            else:
                array.reshape(-1).view(np.uint8).fill(255)

    def close(self) -> None:
        """Wait until the device no longer uses the slots' memory. Raises nothing."""


# --- pinned memory of the host --------------------------------------------------------------------


class Pinning:
    """Pins memory for all GPUs that PyTorch sees, for batches that stay on the host.

    A copy out of it to a GPU (``tensor.to("cuda", non_blocking=True)``) goes on while the program
    does, and reads it meanwhile. So before it is refilled, all work that PyTorch's current streams
    had when the batch was handed back is waited for.

    `DeviceError` is raised if PyTorch, or a GPU that it can use, is missing.
    """

    def __init__(self) -> None:
        hint = "pin_memory=True is for copies to a GPU; set it to torch.cuda.is_available()"
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise DeviceError(f"PyTorch pins memory, and is not installed ({error})") from error
        if not self._torch.cuda.is_available():
            raise DeviceError(f"PyTorch {self._torch.__version__} finds no GPU; {hint}")

    def pin(self, memory: NDArray[Any]) -> Callable[[], object]:
        """Pin memory until the last array over it is gone, or the result is called.

        `memory` is of whole pages, as `page_memory` returns it. `DeviceError` is raised if it
        cannot be pinned.
        """
        cudart = self._torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        if int(error):
            self._clear_last_error()
            raise DeviceError(
                f"{memory.nbytes} bytes could not be pinned ({cudart.cudaGetErrorString(error)});"
                f" make {named('batch_size')} or {named('prefetch')} smaller, or do without"
                f" {named('pin_memory')}"
            )
        return call_before_unmap(memory, partial(self._unpin, memory.ctypes.data))

    def record(self) -> Sequence[Any]:
        """Return events after all work of the caller's streams so far; `DeviceError` on failure."""
        cuda = self._torch.cuda
        events = []
        with _failing("a batch could not be handed back"):
            for device in self._used_devices():
                # Blocking: a waiting thread leaves the core to others.
                event = cuda.Event(blocking=True)
                event.record(cuda.current_stream(device))
                events.append(event)
        return events

    def are_done(self, events: Iterable[Any]) -> bool:
        """Tell whether `wait` would return at once; False also if a GPU fails."""
        with suppressing(Exception):
            return all(event.query() for event in events)
        return False

    def wait(self, events: Iterable[Any]) -> None:
        """Wait for the events of `record`; `DeviceError` if a GPU fails."""
        with _failing("copies of a batch could not be waited for"):
            for event in events:
                event.synchronize()

    def _used_devices(self) -> list[int]:
        """Return the GPUs that this process has a context on; the others cannot copy anything."""
        has_context = self._torch._C._cuda_hasPrimaryContext
        return [n for n in range(self._torch.cuda.device_count()) if has_context(n)]

    def _unpin(self, address: int) -> None:
        """Wait for all copies, and unpin memory; in any thread, before the memory is unmapped.

        A copy may be on any stream of any thread: the last batch was not handed back, and this
        thread's streams need not be those of the thread that copied it.
        """
        with suppressing(Exception):  # after a fault of the GPU nothing can be undone
            for device in self._used_devices():
                self._torch.cuda.synchronize(device)
        with suppressing(Exception):
            if int(self._torch.cuda.cudart().cudaHostUnregister(address)):
                self._clear_last_error()

    def _clear_last_error(self) -> None:
        """Have PyTorch forget an error that its `cudart` returned: its next kernel would raise it.

        PyTorch clears it only when a call fails, and PyTorch raises the error.
        """
        with suppressing(Exception):
            self._torch.cuda.set_device(self._torch.cuda.device_count())  # there is none


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(
            f"{what} ({error}); after a fault of the GPU this process has to be started again"
        ) from error
