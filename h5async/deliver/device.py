"""Says by two protocols what a device is: `host.py` and `cuda.py` are what there is of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.deliver.decodeplan import EncodedFormat
from h5async.fill.outcomes import FillOutcome
from h5async.fill.resident import Budget, Residency
from h5async.io.shared import SharedMemory
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform
from h5async.samples.columns import SlotMemory
from h5async.samples.devicefields import Outline


class NotDecoded(Exception):
    """The host has to decode a batch; the message says why, to whom it may concern."""


class DeviceSlot(Protocol):
    """A slot's memory, and the order of its fills, uploads and uses."""

    memory: SlotMemory

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; in a worker."""

    def upload(
        self, outcome: FillOutcome, masks: Sequence[NDArray[np.bool_]] = ()
    ) -> tuple[Any, ...]:
        """Begin to bring a filled batch to the device, and masks behind it; in a worker.

        Raises
        ------
        NotDecoded
            If the host has to decode its chunks; they were waited for.
        """

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return what the slower of link and kernels took for it."""

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

    @property
    def is_writable_at_once(self) -> bool:
        """Whether a slot that is free may be filled without `DeviceSlot.wait_writable`."""

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
        """Allocate slots of `rows` rows.

        Parameters
        ----------
        count, rows
            Slots, and samples in each.
        transforms
            By column.
        postprocess
            Whether it wants delivered arrays on the host.
        encoded_formats
            How chunks of each column are decoded on the device, where they are.
        shared
            Where a helper process fills the slots: the memory that it has too.
        outlines
            How each field is put together of its columns; empty: a column is a field.
        """

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return host memory for arrays that a worker makes beside a slot's; in any thread."""

    def can_transform(self, transform: RowTransform) -> bool:
        """Tell whether the device transforms rows to the very bits of the host."""

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Make room for the rows of all samples, after `open_slots`, if the budget allows it."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return host arrays as arrays that last where batches are delivered; may block."""

    def share(self) -> None:
        """Order the caller's other streams behind what its current one was given."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 (NaN, -1, 255), behind all that the caller does now."""

    def close(self) -> None:
        """Wait until the device uses none of the slots' memory any more. Raises nothing."""
