"""Finds the device to deliver batches on; decides what a GPU decodes, and frees memory for that.

An option selects the device. Only this module imports CuPy; modules that only a GPU needs are
imported if one is requested.

Options and layouts enter once: they say which fields a GPU can decode. Then requests and outcomes
of batches enter. With `decode="auto"`, host and GPU decode the first batches by turns, until both
were measured often enough. The time of the slowest stage counts: all threads together, copies, or
kernels. If the host proves faster, the memory for decoding on the GPU is freed, once no batch under
way can be decoded there any more.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import threading
from collections.abc import Collection as Names
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.deliver.decodeplan import EncodedFormat, NotDecoded, plan_encoded
from h5async.deliver.device import Device, Pinning
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome, PlanColumns
from h5async.index.layout import DatasetLayout
from h5async.order.sampling import FillRequest
from h5async.plan.records import Ranges
from h5async.plan.transform import RowTransform
from h5async.read.collection import Collection
from h5async.read.queue import SlotBatch
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.cuda import CudaDevice
    from h5async.deliver.gpu import Gpu

# Variables with the rank of a process on its node: of PyTorch's launchers, Open MPI, Slurm. If one
# launcher starts another, the inner one comes first.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

# cudaError_t
_STUB_LIBRARY, _INSUFFICIENT_DRIVER, _NO_DEVICE = 34, 35, 100

_log = logging.getLogger("h5async")

_MEASURED = 4  # batches decoded on each; the first is warm-up, and does not count
_MARGIN = 0.9  # the GPU's time must be below this share of the host's, since it has other work


class MissingGpuError(DeviceError):
    """CuPy or a GPU is missing; a GPU that fails raises a plain `DeviceError`."""


def find_device(name: str, pin_memory: bool = False) -> Device:
    """Return the device that the option ``device`` selects.

    `name` is ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA if CuPy and a GPU are
    available. With `pin_memory`, batches stay on the host, in pinned memory.

    `DeviceError` is raised if CuPy, PyTorch or the GPU is missing, or the GPU cannot be used; its
    message says what to do. ``"auto"`` tolerates missing parts, but not a GPU that fails.
    """
    if pin_memory:
        return Device(Pinning())
    if name == "cpu":
        return Device()
    number = name.partition(":")[2]
    try:
        gpu, reason = find_gpu(int(number) if number else None)
    except MissingGpuError:
        if name == "auto":
            return Device()
        raise
    from h5async.deliver.cuda import CudaDevice

    device = CudaDevice(gpu)
    _log.info("batches go to %s: %s", gpu.name, reason)
    return device


def import_cupy() -> Any:
    """Import CuPy; `MissingGpuError` if it is not installed."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingGpuError(
            f"CuPy is not installed ({error}); install it with: pip install 'h5async[cuda13]', or"
            " 'h5async[cuda12]' for a driver of CUDA 12. To read without a GPU:"
            f" {named('device', 'cpu')}"
        ) from error


def find_gpu(number: int | None = None) -> tuple[Gpu, str]:
    """Return GPU `number` (None: as `choose` says), and why it was chosen.

    `MissingGpuError` is raised if CuPy or the GPU is missing, `DeviceError` if it cannot be used.
    """
    cupy = import_cupy()
    from h5async.deliver.gpu import Gpu

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        kind = MissingGpuError if _is_missing(cupy, error) else DeviceError
        raise kind(
            f"CuPy {cupy.__version__} is installed but finds no usable GPU ({error}); check"
            f" with: nvidia-smi. To read without one: {named('device', 'cpu')}"
        ) from error
    reason = "chosen by the option device"
    if number is None and count:
        number, reason = choose(cupy, count)
    if not count or number is None or number >= count:
        raise MissingGpuError(
            f"there is no GPU {number or 0}: CuPy finds {count}; check with: nvidia-smi."
            f" To read without one: {named('device', 'cpu')}"
        )
    return Gpu(cupy, number), reason


def _is_missing(cupy: Any, error: Exception) -> bool:
    """Tell whether CUDA's error means that there is no GPU, rather than that one fails."""
    status = getattr(error, "status", None)
    if status == _INSUFFICIENT_DRIVER:  # also if there is no driver: its version is then 0
        return not cupy.cuda.runtime.driverGetVersion()
    return status in (_STUB_LIBRARY, _NO_DEVICE)


def choose(cupy: Any, count: int) -> tuple[int, str]:
    """Return the number of the GPU, of `count`, that suits this process best, and why.

    It is the current device of CuPy or PyTorch, if that was chosen explicitly or PyTorch uses it.
    Under a launcher of several processes per node, it is the process's own one, which may be the
    only one that the process sees. Otherwise it is the first.
    """
    current = int(cupy.cuda.runtime.getDevice())
    if current:
        return current, "it is the current device of this thread"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        of_torch = int(torch.cuda.current_device())
        if of_torch or torch._C._cuda_hasPrimaryContext(of_torch):
            return of_torch, "it is PyTorch's current device"
    for variable in _LOCAL_RANKS if count > 1 else ():
        rank = os.environ.get(variable, "")
        if rank.isdecimal():
            return int(rank) % count, f"{variable}={rank}, and this process sees {count} GPUs"
    return current, "it is the default"


class DecodeChoice:
    """Decides where chunks are decoded, by the option `decode`. Safe to use from many threads.

    `obstacle` says why the GPU cannot decode; None if it can. `on_device` is None while both are
    being measured.
    """

    def __init__(self, decode: Literal["auto", "host", "device"], obstacle: str | None) -> None:
        self.on_device: bool | None = None
        self._lock = threading.Lock()
        self._begun = {False: 0, True: 0}
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._reason = "not decided yet: both are being measured"
        self._fallbacks = 0
        if obstacle is not None:
            self.on_device, self._reason = False, f"host: {obstacle}"
        elif decode != "auto":
            self.on_device, self._reason = decode == "device", f'{decode}: decode="{decode}"'

    @property
    def sentence(self) -> str:
        """Where chunks are decoded, and why."""
        if not self._fallbacks:
            return self._reason
        return f"{self._reason}; {self._fallbacks} batches meant for it were left to the host"

    def next_on_device(self) -> bool:
        """Tell whether the next batch is decoded on the device."""
        with self._lock:
            if self.on_device is not None:
                return self.on_device
            is_next = self._begun[True] < self._begun[False]
            self._begun[is_next] += 1
            return is_next

    def note(self, on_device: bool, seconds: float) -> None:
        """Note the time of a batch's slowest stage."""
        with self._lock:
            if self.on_device is not None:
                return
            self._seconds[on_device].append(seconds)
            if min(map(len, self._seconds.values())) < _MEASURED:
                return
            import statistics

            host, device = (statistics.median(self._seconds[there][1:]) for there in (False, True))
            self.on_device = device < _MARGIN * host
            self._reason = (
                f"{'device' if self.on_device else 'host'}: a batch takes {1e3 * device:.2g} ms on"
                f" the device, {1e3 * host:.2g} ms on the host"
            )

    def note_fallback(self) -> None:
        """Note a batch that was meant for the device but must be decoded by the host."""
        with self._lock:
            self._fallbacks += 1
        self.note(True, math.inf)


class DevicePolicy:
    """Decides what a device decodes, and until when. Safe to use from many threads.

    `DeviceError` is raised if ``decode="device"`` was requested but is not possible.

    Layouts and transforms are by column; a batch has at most `rows` samples; `host_nbytes` limits
    the host memory for encoded chunks, in all slots; `mapped` are columns of codes that are mapped
    to other codes.
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
        # By serial of a batch under way that was meant for the device: False if the host has to
        # decode it after all.
        self._is_decoded: dict[int, bool] = {}
        # By column: how the device decodes its chunks; None if the host does.
        self.formats: list[EncodedFormat | None] = [None] * len(layouts)
        obstacle: str | None = "there is no GPU"
        if device.name != "cpu":
            from h5async.deliver.devicedecode import find_formats

            on_host = _left_to_host(device, transforms, mapped)
            self.formats, obstacle = find_formats(
                config, layouts, rows, on_host, self._gpu.gpu.free_nbytes, host_nbytes
            )
        elif config.decode == "device":
            raise DeviceError(f"{named('decode', 'device')} needs a GPU, but none was found")
        staged = sum(form.staging_nbytes for form in self.formats if form is not None)
        self.host_nbytes = config.prefetch * staged  # host memory for encoded chunks
        self._choice = DecodeChoice(config.decode, obstacle)
        self._holds_memory = any(self.formats)  # if not, nothing is decoded there (any more)
        self.num_chunks = self.decoded_nbytes = 0  # decoded there so far

    @property
    def sentence(self) -> str:
        """Where chunks are decoded, and why."""
        return self._choice.sentence

    @property
    def plan_columns(self) -> PlanColumns | None:
        """The method that plans encoded chunks instead of rows; None if the host decodes all."""
        return self.plan if self._holds_memory else None

    @property
    def _gpu(self) -> CudaDevice:
        return cast("CudaDevice", self._device)  # only such a device decodes

    def plan(
        self,
        collection: Collection,
        batch: SlotBatch,
        request: FillRequest,
        index: NDArray[np.int64],
    ) -> Mapping[int, Ranges]:
        """Return, by column, the encoded chunks of a batch for the device to decode."""
        slot = self._gpu.slots[request.slot]
        slot.staged = {}
        if request.samples is not None or not self._begins(request.serial):
            return {}
        reads = collection.tables.reads
        forms = [form if reads[column] else None for column, form in enumerate(self.formats)]
        collection.plan(batch, index, [form is not None for form in forms], 1)
        planned = collection.planned(batch)
        for column, form in enumerate(forms):
            if form is None:
                continue
            table, memory = collection.tables.of_fields[column], slot.staging[column].encoded
            plan = plan_encoded(form, table, planned, column, memory)
            if plan is not None:
                slot.staged[column] = plan
        return {column: plan.chunks for column, plan in slot.staged.items()}

    def _begins(self, serial: int) -> bool:
        if not self._holds_memory:
            return False
        with self._lock:  # `end` holds it, too, to free the memory only if no batch needs it
            is_theirs = self._is_decoded.get(serial, True) and self._choice.next_on_device()
            if is_theirs:
                self._is_decoded[serial] = True
            return is_theirs

    def leaves_to_host(self, request: FillRequest, error: BaseException | None) -> bool:
        """Tell whether a batch must be filled again so that the host decodes it; note that.

        The host decodes chunks that the device cannot, or raises an error that says what is wrong.
        `error` is the batch's error in filling or uploading; None: there was none.
        """
        with self._lock:
            if error is None or not self._is_decoded.get(request.serial):
                return False
            if not (isinstance(error, NotDecoded) or self._gpu.slots[request.slot].staged):
                return False
            self._is_decoded[request.serial] = False
        self._choice.note_fallback()
        return True

    def note(
        self, request: FillRequest, outcome: FillOutcome, seconds: float, upload_seconds: float
    ) -> None:
        """Note an uploaded batch; may wait for the upload.

        `seconds` is the time of filling and uploading, divided among all threads; `upload_seconds`
        is the time of the thread that uploaded it, and waited for the device to decode: however
        many threads there are, that is done for one batch at a time.
        """
        if not self._holds_memory or outcome.is_resident:
            return
        slot = self._gpu.slots[request.slot]
        with self._lock:
            on_device = self._is_decoded.get(request.serial, False)
            for column, plan in slot.staged.items():
                form = self.formats[column]
                assert form is not None
                self.num_chunks += plan.num_chunks
                self.decoded_nbytes += plan.num_chunks * form.shape.chunk_nbytes
        if on_device and not slot.staged:
            self._choice.note_fallback()
        elif self._choice.on_device is None:
            in_turn = upload_seconds if on_device else 0.0
            self._choice.note(on_device, max(seconds, in_turn, slot.transfer_seconds()))

    def end(self, request: FillRequest) -> None:
        """Note that the device is done with decoding a batch.

        Frees the memory for decoding, once the host has been chosen for all batches.
        """
        if not self._holds_memory:
            return
        with self._lock:
            self._is_decoded.pop(request.serial, None)
            if self._is_decoded or not (self._holds_memory and self._choice.on_device is False):
                return
            self._holds_memory = False
        self._gpu.drop_decoders()


def _left_to_host(
    device: Device, transforms: Mapping[str, RowTransform], mapped: Names[str]
) -> dict[str, str]:
    """Return why the host always decodes some columns, by name."""
    on_host = dict.fromkeys(mapped, "its codes are mapped on the host")
    for name, transform in transforms.items():
        if transform.capacity is not None:
            on_host[name] = "its samples have differing lengths"
        elif transform.steps is not None or not device.can_transform(transform):
            on_host[name] = "its rows are transformed on the host"
    return on_host
