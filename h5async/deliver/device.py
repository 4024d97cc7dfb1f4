"""Delivers batches on the host, as NumPy arrays in the memory of the slots themselves.

That memory may be pinned, so that the caller can copy to a GPU; this needs only PyTorch
(`Pinning`). `cuda.py` delivers on a GPU: its device and slots are subclasses of those here.
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

# Returns new memory of the given number of bytes.
Empty: TypeAlias = Callable[[int], NDArray[np.uint8]]

_BLOCK_ALIGNMENT = 512  # as CuPy aligns arrays
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


class SlotContents(NamedTuple):
    """The contents of each slot of a reader."""

    rows: int  # maximum number of samples
    transforms: Mapping[str, RowTransform]  # by column
    outlines: Sequence[Outline]  # how each field is assembled from its columns
    encoded_formats: Sequence[EncodedFormat | None]  # by column; for decoding on a device
    has_postprocess: bool  # if so, delivered arrays must be on the host
    shared: SharedMemory | None  # with the helper processes that fill the slots, if any


class LaidOut(NamedTuple):
    """The host memory of a slot, and its arrays."""

    memory: SlotMemory
    # The delivered or raw rows of all columns with one row per sample, contiguous.
    block: NDArray[np.uint8]
    begins: list[int]  # offset of each column in the block
    # By column number: the memory of columns whose number of rows per sample varies.
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
    """Lay out in memory a slot's delivered rows, or raw ones that need no work on the host.

    `on_host` says which transforms the host does. Encoded columns, and arrays that the host makes
    from others, are outside the block; `outlines` are of all fields. `empty` allocates memory,
    `block` that of the block (by default `empty`), and `encoded` that of encoded columns.
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
    """Host memory of one slot, pinned only at the beginning, as far as batches use it.

    A slot has room for a batch of the longest samples. The system allocates such memory only when
    it is touched, and pinning touches all of it. So the pinned part initially fits a mean batch
    plus a quarter, and grows by a quarter when a batch needs more.

    `memory` is uint8 (nbytes,), of whole pages; `nbytes` are pinned initially. `pin` pins whole
    pages, and returns a function that unpins them, once; its exceptions propagate, also from
    `reach`.
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
        """Pin the memory up to the end of a C-contiguous array; return False if it is elsewhere.

        To be called while the slot is being filled, when nothing copies from the memory.
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
    """A slot's memory; orders its fills, uploads and uses.

    On the host nothing is copied. Pinned memory is refilled only after the caller's copies from it.
    Each of `parts` is pinned only as far as batches use it.
    """

    def __init__(
        self, memory: SlotMemory, pinning: Pinning | None = None, parts: Sequence[PinnedPart] = ()
    ) -> None:
        self.memory = memory
        self._pinning = pinning
        self._parts = parts
        self._copies: Sequence[Any] = ()  # events after the caller's work on the last batch

    @property
    def delivered(self) -> SlotMemory:
        """The arrays whose first rows are delivered if they are only copied."""
        return self.memory

    def is_writable(self) -> bool:
        """Tell whether the host arrays may be overwritten now. Never blocks."""
        return self._pinning is None or self._pinning.are_done(self._copies)

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; to be called in a worker."""
        if self._pinning is not None:
            self._pinning.wait(self._copies)

    def upload(self, outcome: FillOutcome, masks: Sequence[NDArray[Any]] = ()) -> tuple[Any, ...]:
        """Start the upload of a filled batch and its masks; return the delivered arrays.

        To be called in a worker. `NotDecoded` is raised if the host has to decode the batch's
        chunks; work on them has ended by then. `DeviceError` is raised if the GPU fails.
        """
        if self._parts:
            for array in itertools.chain.from_iterable(map(memory_of, outcome.arrays)):
                for part in self._parts:
                    part.reach(array)
        return (*outcome.arrays, *masks)

    def acquire(self) -> None:
        """Make the caller's current streams wait for the upload."""

    def release(self) -> None:
        """Record events on the caller's current streams, after their work on the batch."""
        if self._pinning is not None:
            self._copies = self._pinning.record()


class Device:
    """The device on which batches are delivered; `pinning` pins the slots' memory, if given."""

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
            # Shared, because helper processes write encoded images there, too.
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
        """Return the parameters for uploads by the core; None if it cannot upload."""

    def taking(self, turns: Turns) -> Callable[..., bool]:
        """Return `Turns.take`; on a GPU, a form that orders work with the caller's streams."""
        return turns.take

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return host memory for arrays outside of slots; callable in any thread.

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
        """Reserve memory for the rows of all samples; call `open_slots` first.

        Returns the `Budget` if `cache_bytes` or the device's free memory does not suffice.
        """
        raise DeviceError(
            f"{named('cache', 'device')} keeps rows on a GPU, but none was found; use"
            f" {named('cache', 'host')}"
        )

    def current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device current."""
        return nullcontext()

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return host arrays as arrays of their own on this device; may block."""
        return arrays

    def share(self) -> None:
        """Make the caller's other streams wait for the work on its current one."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 (NaN, -1, 255), after all of the caller's work."""
        for array in itertools.chain.from_iterable(map(memory_of, arrays)):
            if array.dtype.hasobject:
                array.fill(None)
            else:
                array.reshape(-1).view(np.uint8).fill(255)

    def close(self) -> None:
        """Wait until the device no longer uses the slots' memory. Never raises."""


# --- pinned memory of the host --------------------------------------------------------------------


class Pinning:
    """Pins memory for all GPUs that PyTorch sees, for batches that stay on the host.

    A copy to a GPU (``tensor.to("cuda", non_blocking=True)``) is asynchronous, and may still read
    the memory when the batch is handed back. So before the memory is refilled, all work that
    PyTorch's current streams had at that time is waited for.

    `DeviceError` is raised if PyTorch, or a GPU that it can use, is missing.
    """

    def __init__(self) -> None:
        hint = "pin_memory=True is for copies to a GPU; set it to torch.cuda.is_available()"
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise DeviceError(f"PyTorch, which pins memory, is not installed ({error})") from error
        if not self._torch.cuda.is_available():
            raise DeviceError(f"PyTorch {self._torch.__version__} finds no GPU; {hint}")

    def pin(self, memory: NDArray[Any]) -> Callable[[], object]:
        """Pin memory until the last array over it is gone, or the returned function is called.

        `memory` is whole pages from `page_memory`. `DeviceError` is raised if it cannot be pinned.
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
                # Blocking: a waiting thread sleeps, and leaves its CPU core to others.
                event = cuda.Event(blocking=True)
                event.record(cuda.current_stream(device))
                events.append(event)
        return events

    def are_done(self, events: Iterable[Any]) -> bool:
        """Tell whether `wait` would return at once; also False if a GPU fails."""
        with suppressing(Exception):
            return all(event.query() for event in events)
        return False

    def wait(self, events: Iterable[Any]) -> None:
        """Wait for the events of `record`; `DeviceError` if a GPU fails."""
        with _failing("copies of a batch could not be waited for"):
            for event in events:
                event.synchronize()

    def _used_devices(self) -> list[int]:
        """Return the GPUs on which this process has a context; others cannot be copying."""
        has_context = self._torch._C._cuda_hasPrimaryContext
        return [n for n in range(self._torch.cuda.device_count()) if has_context(n)]

    def _unpin(self, address: int) -> None:
        """Wait for all copies, and unpin memory; in any thread, before the memory is unmapped.

        A copy may be on any stream of any thread: the last batch was never handed back, and the
        thread that copied it may use other streams than this one.
        """
        with suppressing(Exception):  # after a GPU fault nothing can be undone
            for device in self._used_devices():
                self._torch.cuda.synchronize(device)
        with suppressing(Exception):
            if int(self._torch.cuda.cudart().cudaHostUnregister(address)):
                self._clear_last_error()

    def _clear_last_error(self) -> None:
        """Make PyTorch forget an error that its `cudart` returned, or its next kernel raises it.

        PyTorch clears the error only when it raises it itself, as it does here.
        """
        with suppressing(Exception):
            self._torch.cuda.set_device(self._torch.cuda.device_count())  # no such device


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(
            f"{what} ({error}); after a GPU fault, this process has to be restarted"
        ) from error
