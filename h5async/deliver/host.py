"""Delivers batches on the host: NumPy arrays, in the memory of the slots themselves.

That memory may be pinned, for copies to a GPU by the caller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.decodeplan import EncodedFormat
from h5async.deliver.device import DeviceSlot
from h5async.deliver.pinnedpart import PinnedPart
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import SharedMemory, page_memory, plain_memory
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform
from h5async.samples.columns import SlotMemory
from h5async.samples.devicefields import Outline
from h5async.samples.samplearrays import memory_of
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.pinned import Pinning


class LaidOut(NamedTuple):
    """The host memory of a slot.

    Attributes
    ----------
    memory
        Its arrays.
    block
        The delivered, or raw, rows of all columns with a row per sample, contiguous.
    begins
        By column: where it begins in the block.
    varying
        By number: the memory of columns whose number of rows per sample differs.
    """

    memory: SlotMemory
    block: NDArray[np.uint8]
    begins: list[int]
    varying: dict[int, NDArray[np.uint8]]


def host_slot(
    rows: int,
    transforms: Sequence[RowTransform],
    on_host: Sequence[bool],
    empty: Callable[[int], NDArray[np.uint8]],
    outlines: Sequence[Outline] = (),
    empty_varying: Callable[[int], NDArray[np.uint8]] | None = None,
    empty_encoded: Callable[[int], NDArray[np.uint8]] = plain_memory,
) -> LaidOut:
    """Lay out a slot's delivered rows, or raw ones that need no work on the host, in memory.

    Parameters
    ----------
    rows
        Samples.
    transforms, on_host
        By column: the transform, and whether it is done on the host.
    empty
        Returns new memory.
    outlines
        Of all fields. Encoded columns, and arrays that the host makes of others, lie outside the
        block.
    empty_varying
        Returns new memory for columns whose number of rows per sample differs; None: as `empty`.
    empty_encoded
        Returns new memory for encoded columns.
    """
    empty_varying = empty if empty_varying is None else empty_varying
    encoded = {column for one in outlines if one.is_encoded for column in one.columns}
    sizes = [
        transform.slot_rows(rows) * (transform.nbytes if done else transform.raw_nbytes)
        for transform, done in zip(transforms, on_host, strict=True)
    ]
    in_block = [
        size if transform.capacity is None else 0
        for size, transform in zip(sizes, transforms, strict=True)
    ]
    *begins, total = itertools.accumulate((_aligned(size) for size in in_block), initial=0)
    block = empty(total)
    raw, out = [], []
    varying: dict[int, NDArray[np.uint8]] = {}
    several = enumerate(zip(transforms, on_host, begins, strict=True))
    for number, (transform, done, begin) in several:
        home = block
        if number in encoded:
            home = empty_encoded(sizes[number])
        elif transform.capacity is not None:
            home = varying[number] = empty_varying(sizes[number])
        count = transform.slot_rows(rows)
        shape, dtype = (count, *transform.raw_row), transform.raw_dtype
        at = begin if home is block else 0
        if done:
            raw.append(np.empty(shape, dtype))
            out.append(np.ndarray((count, *transform.row), transform.dtype, home, at))
        else:
            raw.append(np.ndarray(shape, dtype, home, at))
            out.append(raw[-1])
    memory = SlotMemory(tuple(raw), tuple(out))
    return LaidOut(memory, block, begins, varying)


def made_on_host(
    rows: int, outlines: Sequence[Outline], empty: Callable[[int], NDArray[np.uint8]]
) -> tuple[NDArray[Any] | None, ...]:
    """Return memory for the arrays that the host makes of samples of differing lengths."""
    found: list[NDArray[Any] | None] = []
    for outline in outlines:
        if outline.made is None or outline.is_left:
            found.append(None)
            continue
        row, dtype = outline.made
        nbytes = rows * math.prod(row) * dtype.itemsize
        found.append(np.ndarray((rows, *row), dtype, empty(nbytes)))
    return tuple(found)


class HostSlot:
    """A slot in host memory: nothing is copied. Refilling pinned memory waits for copies.

    `pinning` pins memory, if given. Of `parts`, only as much is pinned as batches use.
    """

    def __init__(
        self, memory: SlotMemory, pinning: Pinning | None, parts: Sequence[PinnedPart] = ()
    ) -> None:
        self.memory = memory
        self._pinning = pinning
        self._parts = parts
        self._copies: Sequence[Any] = ()  # events of the caller's work with the last batch

    def wait_writable(self) -> None:
        """Block until no copy on the caller's streams reads the memory any more."""
        if self._pinning is not None:
            self._pinning.wait(self._copies)

    def upload(
        self, outcome: FillOutcome, masks: Sequence[NDArray[np.bool_]] = ()
    ) -> tuple[Any, ...]:
        """Return the arrays themselves, pinned if requested; `DeviceError` if they cannot be."""
        if self._parts:
            for array in itertools.chain.from_iterable(map(memory_of, outcome.arrays)):
                for part in self._parts:
                    if part.has(array):
                        part.reach(array)
        return (*outcome.arrays, *masks)

    def transfer_seconds(self) -> float:
        """Return 0: nothing is transferred."""
        return 0.0

    def acquire(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Record the caller's streams, if the memory is pinned."""
        if self._pinning is not None:
            self._copies = self._pinning.record()


class HostDevice:
    """Delivers NumPy arrays in the slots themselves; `pinning` pins their memory, if given."""

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
        outlines: Sequence[Outline] = (),
    ) -> list[DeviceSlot]:
        """Allocate slots of `rows` rows; the filler does all transforming."""
        todo = list(transforms.values())
        on_host = [not transform.is_identity for transform in todo]
        return [self._slot(rows, todo, on_host, shared, outlines) for _ in range(count)]

    def _slot(
        self,
        rows: int,
        todo: Sequence[RowTransform],
        on_host: Sequence[bool],
        shared: SharedMemory | None,
        outlines: Sequence[Outline],
    ) -> DeviceSlot:
        empty = self._empty(shared)
        # Helper processes write encoded images there, too.
        empty_encoded = plain_memory if shared is None else empty
        laid_out = host_slot(rows, todo, on_host, empty, outlines, None, empty_encoded)
        made = made_on_host(rows, outlines, empty if shared is not None else self.host_memory)
        memory = laid_out.memory._replace(made=made)
        if self._pinning is None:
            return HostSlot(memory, None)
        pin = self._pinning.pin
        if laid_out.block.nbytes:
            pin(laid_out.block)
        parts = [
            PinnedPart(varying, pin, todo[number].likely * todo[number].nbytes)
            for number, varying in laid_out.varying.items()
        ]
        return HostSlot(memory, self._pinning, parts)

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory for delivered arrays; `DeviceError` if it cannot be pinned."""
        if self._pinning is None or not nbytes:
            return plain_memory(nbytes)
        memory = page_memory(nbytes)
        self._pinning.pin(memory)
        return memory

    def can_transform(self, transform: RowTransform) -> bool:
        """Return False: there is no device."""
        return False

    def _empty(self, shared: SharedMemory | None) -> Callable[[int], NDArray[np.uint8]]:
        if shared is not None:
            return shared.empty
        return plain_memory if self._pinning is None else page_memory

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Raise `DeviceError`: there is no device."""
        raise DeviceError(
            f"{named('cache', 'device')} keeps rows on a GPU, and none was found; use"
            f" {named('cache', 'host')}"
        )

    @property
    def is_writable_at_once(self) -> bool:
        """Whether a free slot may be filled without `HostSlot.wait_writable`."""
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


def _aligned(nbytes: int) -> int:
    """Return the next multiple of CuPy's alignment of arrays."""
    return -(-nbytes // 512) * 512
