"""Pins host memory by PyTorch, for batches that stay on the host.

A copy out of it to a GPU (``tensor.to("cuda", non_blocking=True)``) goes on while the program does,
and reads it meanwhile. So before it is refilled, all work that PyTorch's current streams had when
the batch was handed back is waited for. This is the only importer of PyTorch beside
`h5async.torch`, and imports it only if pinned memory is requested.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.io.shared import call_before_unmap
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


class Pinning:
    """Pins memory for all GPUs that PyTorch sees.

    `DeviceError` is raised if PyTorch, or a GPU that it can use, is missing.
    """

    def __init__(self) -> None:
        hint = "pin_memory=True is for copies to a GPU; set it to torch.cuda.is_available()"
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise DeviceError(f"PyTorch pins memory, and is not installed ({error})") from error
        if not self._torch.cuda.is_available():
            raise DeviceError(f"PyTorch {self._torch.__version__} finds no GPU; {hint}")

    def pin(self, memory: NDArray[Any]) -> Callable[[], object]:
        """Pin memory until the last array over it is gone, or the result is called.

        `memory` is of whole pages, as `page_memory` returns it. `DeviceError` is raised if it
        cannot be pinned.
        """
        cudart = self._torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        if int(error):
            self._clear_last_error()
            raise DeviceError(
                f"{memory.nbytes} bytes could not be pinned ({cudart.cudaGetErrorString(error)});"
                f" make {named('batch_size')} or {named('prefetch')} smaller, or do without"
                f" {named('pin_memory')}"
            )
        return call_before_unmap(memory, partial(self._unpin, memory.ctypes.data))

    def record(self) -> Sequence[Any]:
        """Return events after all work of the caller's streams so far; `DeviceError` on failure."""
        cuda = self._torch.cuda
        events = []
        with _failing("a batch could not be handed back"):
            for device in self._used_devices():
                # Blocking: a waiting thread leaves the core to others.
                event = cuda.Event(blocking=True)
                event.record(cuda.current_stream(device))
                events.append(event)
        return events

    def wait(self, events: Iterable[Any]) -> None:
        """Wait for the events of `record`; `DeviceError` if a GPU fails."""
        with _failing("copies of a batch could not be waited for"):
            for event in events:
                event.synchronize()

    def _used_devices(self) -> list[int]:
        """Return the GPUs that this process has a context on; the others cannot copy anything."""
        has_context = self._torch._C._cuda_hasPrimaryContext
        return [n for n in range(self._torch.cuda.device_count()) if has_context(n)]

    def _unpin(self, address: int) -> None:
        """Wait for all copies, and unpin memory; in any thread, before the memory is unmapped.

        A copy may be on any stream of any thread: the last batch was not handed back, and this
        thread's streams need not be those of the thread that copied it.
        """
        with suppressing(Exception):  # after a fault of the GPU nothing can be undone
            for device in self._used_devices():
                self._torch.cuda.synchronize(device)
        with suppressing(Exception):
            if int(self._torch.cuda.cudart().cudaHostUnregister(address)):
                self._clear_last_error()

    def _clear_last_error(self) -> None:
        """Have PyTorch forget an error that its `cudart` returned: its next kernel would raise it.

        PyTorch clears it only when a call fails, and PyTorch raises the error.
        """
        with suppressing(Exception):
            self._torch.cuda.set_device(self._torch.cuda.device_count())  # there is none


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn PyTorch's errors of CUDA into a `DeviceError` that says what failed."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(
            f"{what} ({error}); after a fault of the GPU this process has to be started again"
        ) from error
