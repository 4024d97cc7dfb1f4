"""Defines what a device is by two protocols, which `host.py` and `cuda.py` implement."""

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
from h5async.samples.assembly import SlotMemory
from h5async.samples.fieldkind import Outline


class NotDecoded(Exception):
    """The host has to decode a batch; the message says why."""


class DeviceSlot(Protocol):
    """A slot's memory, and the order of its fills, uploads and uses."""

    memory: SlotMemory

    def wait_writable(self) -> None:
        """Block until the host arrays may be overwritten; in a worker."""

    def upload(
        self, outcome: FillOutcome, masks: Sequence[NDArray[np.bool_]] = ()
    ) -> tuple[Any, ...]:
        """Begin to bring a filled batch, and then masks, to the device; in a worker.

        `NotDecoded` is raised if the host has to decode its chunks; they were waited for.
        """

    def transfer_seconds(self) -> float:
        """Wait for the last upload; return the time of the slower of link and kernels."""

    def acquire(self) -> None:
        """Make the caller's current streams wait for the upload."""

    def release(self) -> None:
        """Record the caller's current streams, which are done with the batch."""


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
        """Whether a free slot may be filled without `DeviceSlot.wait_writable`."""

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
            Whether it needs delivered arrays on the host.
        encoded_formats
            By column: how its chunks are decoded on the device, if they are.
        shared
            If a helper process fills the slots, the memory shared with it.
        outlines
            How each field is assembled from its columns; empty: a column is a field.
        """

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return host memory for arrays that a worker makes beside a slot's; in any thread."""

    def can_transform(self, transform: RowTransform) -> bool:
        """Tell whether the device transforms rows with exactly the host's result."""

    def open_cache(self, selection: Selection, cache_bytes: int | None) -> Residency | Budget:
        """Reserve room for the rows of all samples, after `open_slots`, if the budget allows it."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""

    def owned(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return host arrays as lasting arrays where batches are delivered; may block."""

    def share(self) -> None:
        """Have the caller's other streams wait for the work of its current one."""

    def poison(self, arrays: Iterable[Any]) -> None:
        """Fill arrays with bytes of 255 (NaN, -1, 255), after all work of the caller."""

    def close(self) -> None:
        """Wait until the device no longer uses the slots' memory. Raises nothing."""
