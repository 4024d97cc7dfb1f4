"""Chooses where batches are delivered: options enter; the host, or a GPU, leaves.

This is the only importer of CuPy. Modules that only a GPU needs are imported only if one is
requested.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from h5async.deliver.device import Device
from h5async.errors import DeviceError
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.deliver.gpu import Gpu

# The number of this process on its node: PyTorch's launchers, Open MPI, Slurm. If one launcher
# starts another, the inner one comes first.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

# cudaError_t
_STUB_LIBRARY, _INSUFFICIENT_DRIVER, _NO_DEVICE = 34, 35, 100

_log = logging.getLogger("h5async")


class MissingGpuError(DeviceError):
    """CuPy or a GPU is missing; a GPU that fails raises a plain `DeviceError`."""


def find_device(name: str, pin_memory: bool = False) -> Device:
    """Return the device of an option ``device``.

    `name` is ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA if CuPy and a GPU are
    available. With `pin_memory`, batches stay on the host, in pinned memory.

    `DeviceError` is raised if CuPy, PyTorch or the GPU is missing, or the GPU cannot be used, and
    says which, and what to do. ``"auto"`` tolerates what is missing, but not a GPU that fails.
    """
    if pin_memory:
        from h5async.deliver.pinned import Pinning

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
    """Return the module; `MissingGpuError` if it is not installed."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingGpuError(
            f"CuPy is not installed ({error}); install it with: pip install 'h5async[cuda13]', or"
            " 'h5async[cuda12]' for a driver of CUDA 12. To read without a GPU:"
            f" {named('device', 'cpu')}"
        ) from error


def find_gpu(number: int | None = None) -> tuple[Gpu, str]:
    """Return GPU `number`, or None for the one that `choose` chooses, and why it is this one.

    `MissingGpuError` is raised if CuPy or the GPU is missing, `DeviceError` if it cannot be used.
    """
    from h5async.deliver.gpu import Gpu

    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        kind = MissingGpuError if _is_missing(cupy, error) else DeviceError
        raise kind(
            f"CuPy {cupy.__version__} is installed but finds no usable GPU ({error}); check"
            f" with: nvidia-smi. To read without one: {named('device', 'cpu')}"
        ) from error
    reason = "the option device"
    if number is None and count:
        number, reason = choose(cupy, count)
    if not count or number is None or number >= count:
        raise MissingGpuError(
            f"there is no GPU {number or 0}: CuPy finds {count}; check with: nvidia-smi."
            f" To read without one: {named('device', 'cpu')}"
        )
    return Gpu(cupy, number), reason


def _is_missing(cupy: Any, error: Exception) -> bool:
    """Tell whether CUDA's error says that there is no GPU, rather than that one fails."""
    status = getattr(error, "status", None)
    if status == _INSUFFICIENT_DRIVER:  # also without a driver, whose version is 0 then
        return not cupy.cuda.runtime.driverGetVersion()
    return status in (_STUB_LIBRARY, _NO_DEVICE)


def choose(cupy: Any, count: int) -> tuple[int, str]:
    """Return the number of the GPU, of `count`, that fits this process best, and why.

    That is the current one of CuPy or PyTorch, if it was chosen or PyTorch uses it. Under a
    launcher of several processes on a node, it is each process's own; else the first. If this
    process sees only one, there is no choice: some launchers show each process only its own GPU.
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
