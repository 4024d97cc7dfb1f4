"""Decides for each batch whether a GPU decodes its chunks, and gives the GPU's memory back.

Options and layouts enter once: they say which fields a GPU can decode. Requests and outcomes of
batches enter then. Where the host turns out to be faster, the memory that only decoding on the GPU
needs is given back, when no batch is left on its way that may be decoded there.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Collection, Mapping, Sequence

from h5async.config import ReaderConfig
from h5async.deliver.decodechoice import DecodeChoice
from h5async.deliver.device import Device, DeviceSlot, NotDecoded
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome, SlotFiller
from h5async.index.layout import DatasetLayout
from h5async.order.requests import FillRequest
from h5async.plan.encoded import EncodedFormat
from h5async.plan.transform import RowTransform
from h5async.spelling import named


class DevicePolicy:
    """What is decoded on a device, and for how long. Safe to use from many threads.

    Parameters
    ----------
    config
        Says whether the device should decode.
    device
        Where batches are delivered.
    layouts, transforms
        By column.
    rows
        Samples in a batch.
    staging_nbytes
        What encoded chunks may take of the host's memory, in all slots.
    mapped
        Columns of codes that are mapped to others.

    Raises
    ------
    DeviceError
        If ``decode="device"`` was asked for, and is not possible.
    """

    def __init__(
        self,
        config: ReaderConfig,
        device: Device,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        rows: int,
        staging_nbytes: int,
        mapped: Collection[str] = (),
    ) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._serials: set[int] = set()  # batches on their way that may be decoded there
        self.formats, obstacle = _formats(
            config, device, layouts, transforms, rows, staging_nbytes, mapped
        )
        self._choice = DecodeChoice(config.decode, obstacle)
        self._holds_memory = any(self.formats)  # else nothing is decoded there, any more
        self.num_chunks = self.decoded_nbytes = 0  # that were decoded there
        self._chunk_nbytes = [layout.chunk_nbytes for layout in layouts.values()]

    @property
    def sentence(self) -> str:
        """Where chunks are decoded, and why."""
        return self._choice.sentence

    def begin(self, serial: int) -> bool:
        """Tell whether the device decodes a batch that is to be filled now."""
        if not self._holds_memory:
            return False
        with self._lock:  # as in `end`, which gives the memory back where no batch may need it
            on_device = self._choice.next_on_device()
            if on_device:
                self._serials.add(serial)
            return on_device

    def leaves_to_host(self, outcome: FillOutcome, error: BaseException | None) -> bool:
        """Tell whether a batch has to be filled again for the host to decode, and note it.

        The host decodes what the device cannot, and raises the error that says what is wrong.

        Parameters
        ----------
        outcome
            Of the batch.
        error
            What went wrong with it, in filling or uploading.
        """
        if error is None or not (isinstance(error, NotDecoded) or any(outcome.encoded)):
            return False
        self._choice.note_fallback()
        return True

    def note(
        self, request: FillRequest, outcome: FillOutcome, slot: DeviceSlot, seconds: float
    ) -> None:
        """Note a batch that was uploaded. May wait until the device has it.

        Parameters
        ----------
        request, outcome, slot
            Of the batch.
        seconds
            What filling and uploading took, by all threads together.
        """
        if not self._holds_memory:
            return
        with self._lock:
            counts = [0 if plan is None else plan.num_items for plan in outcome.encoded]
            self.num_chunks += sum(counts)
            # (A batch whose rows were read has no plans.)
            self.decoded_nbytes += sum(map(operator.mul, counts, self._chunk_nbytes))
        if request.on_device and not (outcome.is_resident or any(outcome.encoded)):
            self._choice.note_fallback()
        elif self._choice.is_running and not outcome.is_resident:
            self._choice.note(request.on_device, max(seconds, slot.transfer_seconds()))

    def end(self, request: FillRequest, slots: Sequence[DeviceSlot], filler: SlotFiller) -> None:
        """Note that a batch is not decoded on the device any more.

        Gives the memory back that this takes, once the host was chosen for all batches.

        Parameters
        ----------
        request
            Of the batch.
        slots, filler
            What holds such memory, and what uses it.
        """
        if not self._holds_memory:
            return
        with self._lock:
            self._serials.discard(request.serial)
            if self._serials or not (self._holds_memory and self._choice.is_host):
                return
            self._holds_memory = False
        self._device.drop_decoders(slots)
        filler.drop_encoded([slot.memory for slot in slots])


def _formats(
    config: ReaderConfig,
    device: Device,
    layouts: Mapping[str, DatasetLayout],
    transforms: Mapping[str, RowTransform],
    rows: int,
    staging_nbytes: int,
    mapped: Collection[str],
) -> tuple[list[EncodedFormat | None], str | None]:
    """Return how each column is decoded on the device, or None, and why none is, if so."""
    if device.name == "cpu":
        if config.decode == "device":
            raise DeviceError(f"{named('decode', 'device')} needs a GPU, and none was found")
        return [None] * len(transforms), "there is no GPU"
    from h5async.deliver.devicedecode import find_formats
    from h5async.deliver.kernels import needs_host

    on_host = dict.fromkeys(mapped, "its codes are mapped on the host")
    for name, transform in transforms.items():
        if transform.capacity is not None:
            on_host[name] = "its samples have differing lengths"
        elif needs_host(transform) or transform.steps is not None:
            on_host[name] = "its rows are transformed on the host"
    return find_formats(config, layouts, rows, on_host, device.free_nbytes, staging_nbytes)
