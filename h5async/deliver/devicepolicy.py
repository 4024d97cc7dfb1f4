"""Decides for each batch whether a GPU decodes its chunks, and frees the GPU's memory.

Options and layouts enter once: they say which fields a GPU can decode. Then requests and outcomes
of batches enter. If the host proves faster, the memory that only decoding on the GPU needs is
freed, once no batch under way may be decoded there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection as Names
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.deliver.decodechoice import DecodeChoice
from h5async.deliver.decodeplan import EncodedFormat, plan_encoded
from h5async.deliver.device import Device, NotDecoded
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome
from h5async.fill.reading import ColumnReader
from h5async.index.layout import DatasetLayout
from h5async.order.requests import FillRequest
from h5async.plan.transform import RowTransform
from h5async.read.collection import Collection, Ranges
from h5async.read.queue import SlotBatch
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.cuda import CudaDevice


class DevicePolicy(ColumnReader):
    """Says what a device decodes, and for how long. Safe to use from many threads.

    `DeviceError` is raised if ``decode="device"`` was requested, and is not possible.

    Parameters
    ----------
    layouts, transforms
        By column.
    rows
        Samples in a batch.
    host_nbytes
        The limit of host memory for encoded chunks, in all slots.
    mapped
        Columns of codes that are mapped to others.

    Attributes
    ----------
    formats
        By column: how the device decodes its chunks; None if it does not.
    host_nbytes
        Host memory used for encoded chunks.
    num_chunks, decoded_nbytes
        What was decoded there so far.
    """

    def __init__(
        self,
        config: ReaderConfig,
        device: Device,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        rows: int,
        host_nbytes: int,
        mapped: Names[str] = (),
    ) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._serials: set[int] = set()  # batches under way that may be decoded there
        self._refused: set[int] = set()  # of these, those that the host decodes in the end
        if device.name == "cpu":
            if config.decode == "device":
                raise DeviceError(f"{named('decode', 'device')} needs a GPU, and none was found")
            self.formats: list[EncodedFormat | None] = [None] * len(layouts)
            obstacle: str | None = "there is no GPU"
        else:
            from h5async.deliver.devicedecode import find_formats

            on_host = _left_to_host(transforms, mapped)
            free_nbytes = device.free_nbytes
            self.formats, obstacle = find_formats(
                config, layouts, rows, on_host, free_nbytes, host_nbytes
            )
        staged = sum(form.staging_nbytes for form in self.formats if form is not None)
        self.host_nbytes = config.prefetch * staged
        self._choice = DecodeChoice(config.decode, obstacle)
        self._holds_memory = any(self.formats)  # else nothing is decoded there (any more)
        self.num_chunks = self.decoded_nbytes = 0

    @property
    def sentence(self) -> str:
        """Where chunks are decoded, and why."""
        return self._choice.sentence

    @property
    def column_reader(self) -> ColumnReader | None:
        """What reads encoded chunks in place of rows; None if nothing is decoded there."""
        return self if self._holds_memory else None

    @property
    def _gpu(self) -> CudaDevice:
        return cast("CudaDevice", self._device)  # as nothing is decoded elsewhere

    def plan(
        self,
        collection: Collection,
        batch: SlotBatch,
        request: FillRequest,
        index: NDArray[np.int64],
    ) -> Mapping[int, Ranges]:
        """Return the encoded chunks that the device decodes of a batch, by column."""
        slot = self._gpu.slots[request.slot]
        slot.staged = {}
        if request.samples is not None or not self._begins(request.serial):
            return {}
        several = [
            form if is_read else None
            for form, is_read in zip(self.formats, collection.tables.reads, strict=True)
        ]
        collection.plan(batch, index, [form is not None for form in several], 1)
        planned = collection.planned(batch)
        for column, form in enumerate(several):
            table = collection.tables.of_fields[column]
            if form is not None:
                memory = slot.staging[column].encoded
                plan = plan_encoded(form, table, planned, column, memory)
                if plan is not None:
                    slot.staged[column] = plan
        return {column: plan.chunks for column, plan in slot.staged.items()}

    def _begins(self, serial: int) -> bool:
        """Tell whether the device decodes a batch that is filled now."""
        if not self._holds_memory:
            return False
        with self._lock:  # as in `end`, which frees the memory once no batch may need it
            is_theirs = serial not in self._refused and self._choice.next_on_device()
            if is_theirs:
                self._serials.add(serial)
            return is_theirs

    def leaves_to_host(self, request: FillRequest, error: BaseException | None) -> bool:
        """Tell whether a batch has to be filled again for the host to decode, and note it.

        The host decodes what the device cannot, and raises the error that says what is wrong.
        `error` is what went wrong with the batch, in filling or uploading.
        """
        with self._lock:
            if error is None or request.serial not in self._serials - self._refused:
                return False
            if not (isinstance(error, NotDecoded) or self._gpu.slots[request.slot].staged):
                return False
            self._refused.add(request.serial)
        self._choice.note_fallback()
        return True

    def note(self, request: FillRequest, outcome: FillOutcome, seconds: float) -> None:
        """Note an uploaded batch. May wait until the device has it.

        `seconds` is the time of filling and uploading, of all threads together.
        """
        if not self._holds_memory or outcome.is_resident:
            return
        slot = self._gpu.slots[request.slot]
        with self._lock:
            on_device = request.serial in self._serials - self._refused
            for column, plan in slot.staged.items():
                form = self.formats[column]
                assert form is not None
                self.num_chunks += plan.num_chunks
                self.decoded_nbytes += plan.num_chunks * form.shape.chunk_nbytes
        if on_device and not slot.staged:
            self._choice.note_fallback()
        elif self._choice.is_running:
            self._choice.note(on_device, max(seconds, slot.transfer_seconds()))

    def end(self, request: FillRequest) -> None:
        """Note that a batch is no longer decoded on the device.

        Frees the memory for that, once the host was chosen for all batches.
        """
        if not self._holds_memory:
            return
        with self._lock:
            self._serials.discard(request.serial)
            self._refused.discard(request.serial)
            if self._serials or not (self._holds_memory and self._choice.is_host):
                return
            self._holds_memory = False
        self._gpu.drop_decoders()


def _left_to_host(transforms: Mapping[str, RowTransform], mapped: Names[str]) -> dict[str, str]:
    """Return why the host always decodes some columns."""
    from h5async.deliver.kernels import needs_host

    on_host = dict.fromkeys(mapped, "its codes are mapped on the host")
    for name, transform in transforms.items():
        if transform.capacity is not None:
            on_host[name] = "its samples have differing lengths"
        elif needs_host(transform) or transform.steps is not None:
            on_host[name] = "its rows are transformed on the host"
    return on_host
