"""Chooses where batches are delivered: on the host, or on a GPU.

Modules that only a GPU needs are imported only if one is requested.
"""

from __future__ import annotations

import logging

from h5async.deliver.device import Device
from h5async.deliver.host import HostDevice

_log = logging.getLogger("h5async")


def find_device(name: str, pin_memory: bool = False) -> Device:
    """Return the device of an option ``device``.

    Parameters
    ----------
    name
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA if CuPy and a GPU are available.
    pin_memory
        Batches stay on the host, in pinned memory.

    Raises
    ------
    DeviceError
        If CuPy, PyTorch or the GPU is missing, or the GPU cannot be used; the message says which,
        and what to do. ``"auto"`` tolerates what is missing, but not a GPU that fails.
    """
    if pin_memory:
        from h5async.deliver.pinned import Pinning

        return HostDevice(Pinning())
    if name == "cpu":
        return HostDevice()
    from h5async.deliver.findgpu import MissingGpuError, find_gpu

    number = name.partition(":")[2]
    try:
        gpu, reason = find_gpu(int(number) if number else None)
    except MissingGpuError:
        if name == "auto":
            return HostDevice()
        raise
    from h5async.deliver.cuda import CudaDevice

    device = CudaDevice(gpu)
    _log.info("batches go to %s: %s", gpu.name, reason)
    return device
