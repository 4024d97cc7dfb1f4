"""Delivers batches on the host: NumPy arrays, in the memory of the slots themselves.

That memory may be pinned, for copies to a GPU that the caller makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.fill.records import FillOutcome, SlotMemory
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import SharedMemory, page_memory
from h5async.order.selection import Selection
from h5async.plan.encoded import EncodedFormat
from h5async.plan.transform import RowTransform
from h5async.ragged import Ragged
from h5async.sparse import Csr
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.device import DeviceSlot
    from h5async.deliver.pinned import Pinning


def host_slot(
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
        transform.slot_rows(rows) * (transform.nbytes if done else transform.raw_nbytes)
        for transform, done in zip(transforms, on_host, strict=True)
    ]
    *begins, total = itertools.accumulate((_aligned(size) for size in sizes), initial=0)
    block = empty(total)
    raw, out = [], []
    for transform, done, begin in zip(transforms, on_host, begins, strict=True):
        count = transform.slot_rows(rows)
        shape, dtype = (count, *transform.raw_row), transform.raw_dtype
        if done:
            raw.append(np.empty(shape, dtype))
            out.append(np.ndarray((count, *transform.row), transform.dtype, block, begin))
        else:
            raw.append(np.ndarray(shape, dtype, block, begin))
            out.append(raw[-1])
    return SlotMemory(tuple(raw), tuple(out), (None,) * len(raw)), block, begins


class HostSlot:
    """A slot in host memory: nothing is copied, and who refills pinned memory waits for copies."""

    def __init__(self, memory: SlotMemory, pinning: Pinning | None) -> None:
        self.memory = memory
        self._pinning = pinning
        self._copies: Sequence[Any] = ()  # events: what the caller did with the last batch

    def wait_writable(self) -> None:
        """Block until no copy on the caller's streams reads the memory any more."""
        if self._pinning is not None:
            self._pinning.wait(self._copies)

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
        encoded_formats: Sequence[EncodedFormat | None],
        shared: SharedMemory | None = None,
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows; all transforming is the filler's."""
        todo = list(transforms.values())
        on_host = [not transform.is_identity for transform in todo]
        slots: list[DeviceSlot] = []
        for _ in range(count):
            memory, block, _ = host_slot(rows, todo, on_host, self._empty(shared))
            if self._pinning is not None and block.nbytes:
                self._pinning.pin(block)
            slots.append(HostSlot(memory, self._pinning))
        return slots

    def _empty(self, shared: SharedMemory | None) -> Callable[[int], NDArray[np.uint8]]:
        if shared is not None:
            return shared.empty
        return plain_memory if self._pinning is None else page_memory

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Refuse: there is no device.

        Raises
        ------
        DeviceError
            In any case.
        """
        raise DeviceError(
            f"{named('cache', 'device')} keeps rows on a GPU, and none was found; use"
            f" {named('cache', 'host')}"
        )

    def drop_decoders(self, slots: Iterable[DeviceSlot]) -> None:
        """Do nothing."""

    @property
    def is_writable_at_once(self) -> bool:
        """Whether a slot that is free may be filled without `HostSlot.wait_writable`."""
        return self._pinning is None

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def share(self) -> None:
        """Do nothing."""

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arrays of the host's own memory as they are."""
        return arrays

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255."""
        for array in itertools.chain.from_iterable(map(memory_of, arrays)):
            if array.dtype.hasobject:
                array.fill(None)
            else:
                array.reshape(-1).view(np.uint8).fill(255)

    def close(self) -> None:
        """Do nothing."""


def memory_of(array: Any) -> tuple[NDArray[Any], ...]:
    """Return the arrays that a field consists of: itself, or those of ragged or sparse samples."""
    if isinstance(array, Ragged):
        return array.values, array.offsets
    return (array.data, array.indices, array.indptr) if isinstance(array, Csr) else (array,)


def plain_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory that is not pinned."""
    return np.empty(nbytes, np.uint8)


def _aligned(nbytes: int) -> int:
    """Return the next multiple of what CuPy aligns arrays to."""
    return -(-nbytes // 512) * 512
