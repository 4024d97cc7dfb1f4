"""Makes a GPU current, allocates on it, and turns its errors into a `DeviceError`.

All use of the GPU goes through a `Gpu`, which `device.py` makes. Batches that stay on the
host, in memory that is pinned for copies, need PyTorch alone: `Pinning`.

Each GPU that a process uses costs it half a gigabyte of that GPU's memory, for a context. If in
doubt, CUDA makes one on GPU 0, which is every thread's GPU until it chooses another. With many
processes on a node that memory is soon exhausted. So our code calls CUDA only while the reader's
GPU is current: our threads choose it once and keep it; in the caller's threads, the previous
context is restored.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.fill.pool import THREAD_NAME, start_all
from h5async.io.shared import call_before_unmap
from h5async.spelling import named
from h5async.system.interruptions import Flag, Patience, join_threads, suppressing

_MEMORY_ALLOCATION = 2  # of cudaError_t
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs

_Result = TypeVar("_Result")


class Gpu:
    """One GPU, by its CUDA context. Safe to use from many threads.

    `cupy` is the module; `name` is ``"cuda:N"``. `DeviceError` is raised if the GPU cannot be used.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self.cupy = cupy
        self.number = number
        self.name = f"cuda:{number}"
        runtime, driver = cupy.cuda.runtime, cupy.cuda.driver
        lack = cupy.cuda.memory.OutOfMemoryError
        self.errors: tuple[type[Exception], ...]  # those that CUDA's errors raise
        self.errors = runtime.CUDARuntimeError, driver.CUDADriverError, lack
        with self.failing("it cannot be used"):
            self._context = in_own_thread(partial(_primary_context, cupy, number))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU current for the thread; a thread of ours keeps it.

        CuPy's `Device` would return to GPU 0, and so make a context there. Restoring the previous
        context, or none, makes no context.
        """
        driver = self.cupy.cuda.driver
        before = driver.ctxGetCurrent()
        if before != self._context:
            driver.ctxSetCurrent(self._context)
        try:
            yield
        finally:
            is_ours = threading.current_thread().name.startswith(THREAD_NAME)
            if before != self._context and not is_ours:
                driver.ctxSetCurrent(before)

    @contextlib.contextmanager
    def freeing(self) -> Iterator[None]:
        """Make this GPU current to free something; errors of CUDA are suppressed.

        After a fault of the GPU nothing can be freed, and the fault was reported before.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(suppressing(*self.errors))
            with suppressing(*self.errors):
                stack.enter_context(self.current())
            yield

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn CUDA's errors into a `DeviceError` that says what failed."""
        try:
            yield
        except self.errors as error:
            hint = (
                f"its memory is used up: make {named('batch_size')}, {named('prefetch')} or"
                f" {named('cache_bytes')} smaller, or end"
                " what else uses it"
                if self.is_lack_of_memory(error)
                else "after a fault of the GPU this process has to be started again, perhaps with"
                f" {named('decode', 'host')}"
            )
            raise DeviceError(f"{self.name}: {what} ({error}); {hint}") from error

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Make this GPU current, and turn CUDA's errors into a `DeviceError`: `what` failed."""
        with self.failing(what), self.current():
            yield

    def is_lack_of_memory(self, error: Exception) -> bool:
        """Tell whether the GPU refused memory."""
        is_cupys = isinstance(error, self.cupy.cuda.memory.OutOfMemoryError)
        return is_cupys or getattr(error, "status", None) == _MEMORY_ALLOCATION

    @property
    def free_nbytes(self) -> int:
        """Bytes of the GPU's memory that are free now."""
        with self.working("its free memory cannot be read"):
            return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def streams(self) -> list[int]:
        """Return the streams on which the caller may use a batch now; this GPU is current."""
        streams = [int(self.cupy.cuda.get_current_stream().ptr)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            of_torch = int(torch.cuda.current_stream(self.number).cuda_stream)
            if of_torch != streams[0]:
                streams.append(of_torch)
        return streams

    def upload(self, target: Any, source: NDArray[Any], stream: Any) -> None:
        """Put the copy of a host array to one on the GPU, of the same size, on a stream.

        Both are C-contiguous. (CuPy's `set` chooses a device for the thread.)
        """
        assert target.nbytes == source.nbytes
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(
            target.data.ptr,
            source.ctypes.data,
            source.nbytes,
            runtime.memcpyHostToDevice,
            stream.ptr,
        )

    def on_device(self, array: NDArray[Any]) -> Any:
        """Return a copy of a small array on the GPU, after waiting for it; this GPU is current.

        (CuPy's `asarray` would take pinned memory from a pool that keeps it.)
        """
        pinned = self.pinned_memory(array.nbytes).view(array.dtype).reshape(array.shape)
        pinned[...] = array
        copied = self.cupy.empty(array.shape, array.dtype)
        stream = self.cupy.cuda.get_current_stream()
        self.upload(copied, pinned, stream)
        stream.synchronize()
        return copied

    # --- freed with the last user, in any thread --------------------------------------------------

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one; this GPU is current."""
        runtime = self.cupy.cuda.runtime
        # CuPy would destroy one of its own under any context, and even if it was never made.
        owner = _Owned(int(runtime.streamCreateWithFlags(runtime.streamNonBlocking)))
        self._freed_with(owner, runtime.streamDestroy, owner.address)
        return self.cupy.cuda.Stream.from_external(owner)

    def event(self, *, blocks: bool = False, is_timed: bool = False) -> Event:
        """Return a new event; this GPU is current. `blocks`: waiting threads yield the core."""
        runtime = self.cupy.cuda.runtime
        flags = blocks * runtime.eventBlockingSync | (not is_timed) * runtime.eventDisableTiming
        event = Event(runtime, int(runtime.eventCreateWithFlags(flags)))
        self._freed_with(event, runtime.eventDestroy, event.address)
        return event

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which CuPy allocates from the GPU, and not from the caller's pool.

        Memory of an array goes back to the GPU with the last array over it. (A pool would keep it;
        and a dropped pool takes memory away from arrays that are still used.)
        """
        context: AbstractContextManager[None] = self.cupy.cuda.using_allocator(self._allocate)
        return context

    def _allocate(self, nbytes: int) -> Any:
        """Return memory, in the form that CuPy expects of an allocator."""
        cuda = self.cupy.cuda
        try:
            address = int(cuda.runtime.malloc(nbytes))
        except cuda.runtime.CUDARuntimeError as error:
            if not self.is_lack_of_memory(error):
                raise
            # CuPy's pool may keep unused memory.
            self.cupy.get_default_memory_pool().free_all_blocks()
            address = int(cuda.runtime.malloc(nbytes))
        owner = _Owned(address)
        self._freed_with(owner, cuda.runtime.free, address)
        return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, self.number), 0)

    def memory(self, nbytes: int) -> Any:
        """Return memory of the GPU as a uint8 array; this GPU is current."""
        with self.allocating():
            return self.cupy.empty(nbytes, np.uint8)

    def pinned_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory; this GPU is current."""
        # Not from CuPy's pool, which takes the next power of two.
        runtime = self.cupy.cuda.runtime
        address = int(runtime.hostAlloc(max(1, nbytes), 0))
        owner = _Owned(address, nbytes)
        self._freed_with(owner, runtime.freeHost, address)
        return np.asarray(owner)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], object]:
        """Pin whole pages until they are unmapped, or the result is called; this GPU is current."""
        address = memory.ctypes.data
        self.cupy.cuda.runtime.hostRegister(address, memory.nbytes, 0)
        return call_before_unmap(memory, partial(self._free, self._unregister, address))

    def _unregister(self, address: int) -> None:
        # Wait for copies out of it.
        with suppressing(*self.errors):
            self.cupy.cuda.runtime.deviceSynchronize()
        self.cupy.cuda.runtime.hostUnregister(address)

    def _freed_with(self, owner: object, free: Callable[[int], object], address: int) -> None:
        weakref.finalize(owner, self._free, free, address).atexit = False

    def _free(self, free: Callable[[int], object], address: int) -> None:
        with self.freeing():
            free(address)


class Event:
    """A point in the work of a stream, for which others can wait."""

    def __init__(self, runtime: Any, address: int) -> None:
        self._runtime = runtime
        self.address = address

    def record(self, stream: int) -> None:
        """Put the event after all current work of a stream; before, it counts as done.

        If that fails, the work is waited for, since nobody will wait for the event.
        """
        try:
            self._runtime.eventRecord(self.address, stream)
        except self._runtime.CUDARuntimeError:
            with suppressing(self._runtime.CUDARuntimeError):
                self._runtime.streamSynchronize(stream)
            raise

    def hold(self, stream: int) -> None:
        """Have a stream wait for the event before its later work."""
        self._runtime.streamWaitEvent(stream, self.address)

    def synchronize(self) -> None:
        """Wait for the event."""
        self._runtime.eventSynchronize(self.address)

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two timed events that are done."""
        return float(self._runtime.eventElapsedTime(earlier.address, self.address)) / 1e3


class _Owned:
    """Lives as long as what CUDA has made is used: a stream for CuPy, or memory, also for NumPy."""

    def __init__(self, address: int, nbytes: int = 0) -> None:
        self.address = address
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address  # the version of the protocol


def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Do some work in a thread of ours; return its result, or raise its exception.

    For work that changes the thread's current device, as CuPy does when it compiles a kernel.
    """
    returned: list[_Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            raised.append(error)
        finally:
            has_ended.set()

    has_ended = Flag()
    thread = threading.Thread(target=run, name=f"{THREAD_NAME}-gpu", daemon=True)
    start_all([thread], "a GPU")
    has_ended.wait_set()
    join_threads([thread], Patience(None))
    try:
        if raised:
            raise raised[0]
    finally:
        raised.clear()  # its traceback holds this frame
    return returned[0]


def _primary_context(cupy: Any, number: int) -> int:
    cupy.cuda.runtime.setDevice(number)
    return int(cupy.cuda.driver.ctxGetCurrent())


class Pinning:
    """Pins memory for all GPUs that PyTorch sees, for batches that stay on the host.

    A copy out of it to a GPU (``tensor.to("cuda", non_blocking=True)``) goes on while the program
    does, and reads it meanwhile. So before it is refilled, all work that PyTorch's current streams
    had when the batch was handed back is waited for.

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
