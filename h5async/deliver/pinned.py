"""Memory enters, and is pinned by PyTorch: for batches that stay on the host.

A copy out of it to a GPU (``tensor.to("cuda", non_blocking=True)``) goes on while the
program does, and reads it meanwhile. So whoever fills it again waits for it: for all that
PyTorch's current streams were given before the batch was handed back. This is the only importer
of PyTorch beside `h5async.torch`, and imports it only where pinned memory is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


class Pinning:
    """Pins memory for all GPUs that PyTorch sees.

    Raises
    ------
    DeviceError
        If PyTorch, or a GPU that it can use, is missing.
    """

    def __init__(self) -> None:
        hint = "pin_memory=True is for copies to a GPU; set it to torch.cuda.is_available()"
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise DeviceError(f"PyTorch pins memory, and is not installed ({error})") from error
        if not self._torch.cuda.is_available():
            raise DeviceError(f"PyTorch {self._torch.__version__} finds no GPU; {hint}")

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin memory, until the last array over it is gone.

        Parameters
        ----------
        memory
            Of whole pages, as `page_memory` returns it.

        Raises
        ------
        DeviceError
            If it cannot be pinned.
        """
        cudart = self._torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        if int(error):
            raise DeviceError(
                f"{memory.nbytes} bytes could not be pinned ({cudart.cudaGetErrorString(error)});"
                " make batch_size or prefetch smaller, or do without pin_memory"
            )
        # What is still on its way when the last array goes is waited for.
        weakref.finalize(memory.base, _unpin, self, memory.ctypes.data).atexit = False

    def record(self) -> Sequence[Any]:
        """Return events that are done when all is that the caller's streams were given."""
        cuda = self._torch.cuda
        events = []
        for device in range(cuda.device_count()):
            if self._torch._C._cuda_hasPrimaryContext(device):  # others were never used
                # Blocking: whoever waits leaves the core to others.
                event = cuda.Event(blocking=True)
                event.record(cuda.current_stream(device))
                events.append(event)
        return events


def _unpin(pinning: Pinning, address: int) -> None:
    with contextlib.suppress(Exception):  # after a fault of the GPU nothing can be undone
        for event in pinning.record():
            event.synchronize()
        pinning._torch.cuda.cudart().cudaHostUnregister(address)
