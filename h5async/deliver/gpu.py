"""Makes a GPU current, allocates on it, and turns its errors into a `DeviceError`.

Whatever uses the GPU does so through a `Gpu`, which `findgpu.py` makes.

Each GPU that a process uses costs it half a gigabyte of that GPU's memory, for a context, and CUDA
makes one where it is in doubt: on GPU 0, which is every thread's GPU until it chooses another. With
many processes on a node that memory is soon gone. So nothing of ours calls CUDA unless the one GPU
of the reader is current: threads of ours choose it once and keep it; in a thread of the caller's,
what was current before is current afterwards.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.fill.pool import THREAD_NAME, start_all
from h5async.io.shared import call_before_unmap
from h5async.spelling import named
from h5async.system.interruptions import suppressing
from h5async.system.patience import Patience
from h5async.system.waiting import Flag, join_threads

_MEMORY_ALLOCATION = 2  # of cudaError_t

_Result = TypeVar("_Result")


class Gpu:
    """One GPU, by its CUDA context. Safe to use from many threads.

    Parameters
    ----------
    cupy
        The module.
    number
        Of the GPU.

    Raises
    ------
    DeviceError
        If the GPU cannot be used.

    Attributes
    ----------
    cupy
        The module.
    number, name
        The GPU's number, and ``"cuda:N"``.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self.cupy = cupy
        self.number = number
        self.name = f"cuda:{number}"
        with self.failing("it cannot be used"):
            self._context = in_own_thread(partial(_primary_context, cupy, number))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU current for the thread; a thread of ours keeps it.

        (CuPy's `Device` would go back to GPU 0, and so make a context there. To go back to the
        context that was current before, or to none, makes no context.)
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
        """Make this GPU current where something is freed; errors of CUDA are suppressed.

        After a fault of the GPU nothing can be freed, and whoever met the fault was told.
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
    def errors(self) -> tuple[type[Exception], ...]:
        """What CUDA's errors are raised as."""
        cuda = self.cupy.cuda
        return (
            cuda.runtime.CUDARuntimeError,
            cuda.driver.CUDADriverError,
            cuda.memory.OutOfMemoryError,
        )

    @property
    def free_nbytes(self) -> int:
        """Bytes of the GPU's memory that are free now."""
        with self.working("its free memory cannot be read"):
            return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def streams(self) -> list[int]:
        """Return the streams on which the caller may use a batch now, this GPU being current."""
        streams = [int(self.cupy.cuda.get_current_stream().ptr)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            of_torch = int(torch.cuda.current_stream(self.number).cuda_stream)
            if of_torch != streams[0]:
                streams.append(of_torch)
        return streams

    def upload(self, target: Any, source: NDArray[Any], stream: Any) -> None:
        """Put the copy of a host array to one on the GPU, of as many bytes, on a stream.

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
        """Return a copy of a small array on the GPU, which is done; this GPU is current.

        (CuPy's `asarray` would take pinned memory from a pool that keeps it.)
        """
        pinned = self.pinned_memory(array.nbytes).view(array.dtype).reshape(array.shape)
        pinned[...] = array
        copied = self.cupy.empty(array.shape, array.dtype)
        stream = self.cupy.cuda.get_current_stream()
        self.upload(copied, pinned, stream)
        stream.synchronize()
        return copied

    # --- what is freed with its last user, in whatever thread ------------------------------------

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one, this GPU being current."""
        runtime = self.cupy.cuda.runtime
        # CuPy would destroy one of its own whatever is current then, or whether it was made.
        owner = _OwnStream(int(runtime.streamCreateWithFlags(runtime.streamNonBlocking)))
        self._freed_with(owner, runtime.streamDestroy, owner.address)
        return self.cupy.cuda.Stream.from_external(owner)

    def event(self, *, blocks: bool = False, is_timed: bool = False) -> Event:
        """Return a new event, this GPU being current; `blocks`: who waits leaves the core alone."""
        runtime = self.cupy.cuda.runtime
        flags = blocks * runtime.eventBlockingSync | (not is_timed) * runtime.eventDisableTiming
        event = Event(runtime, int(runtime.eventCreateWithFlags(flags)))
        self._freed_with(event, runtime.eventDestroy, event.address)
        return event

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which CuPy takes memory from the GPU, and not from the caller's pool.

        Memory of an array goes back to the GPU with the last array over it. (A pool would keep it;
        and one that is dropped takes memory away from arrays that are still used.)
        """
        context: AbstractContextManager[None] = self.cupy.cuda.using_allocator(self._allocate)
        return context

    def _allocate(self, nbytes: int) -> Any:
        """Return memory, as CuPy wants it from an allocator."""
        cuda = self.cupy.cuda
        try:
            address = int(cuda.runtime.malloc(nbytes))
        except cuda.runtime.CUDARuntimeError as error:
            if not self.is_lack_of_memory(error):
                raise
            # CuPy's pool may keep what nobody uses.
            self.cupy.get_default_memory_pool().free_all_blocks()
            address = int(cuda.runtime.malloc(nbytes))
        owner = _Owner()
        self._freed_with(owner, cuda.runtime.free, address)
        return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, self.number), 0)

    def pinned_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, this GPU being current."""
        # Not from CuPy's pool, which takes the next power of two.
        runtime = self.cupy.cuda.runtime
        address = int(runtime.hostAlloc(max(1, nbytes), 0))
        owner = _HostMemory(address, nbytes)
        self._freed_with(owner, runtime.freeHost, address)
        return np.asarray(owner)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], object]:
        """Pin memory of whole pages until it is unmapped, this GPU being current.

        Returns
        -------
        callable
            Unpins it before.
        """
        address = memory.ctypes.data
        self.cupy.cuda.runtime.hostRegister(address, memory.nbytes, 0)
        return call_before_unmap(memory, partial(self._free, self._unregister, address))

    def _unregister(self, address: int) -> None:
        # What still copies out of it is waited for.
        with suppressing(*self.errors):
            self.cupy.cuda.runtime.deviceSynchronize()
        self.cupy.cuda.runtime.hostUnregister(address)

    def _freed_with(self, owner: object, free: Callable[[int], object], address: int) -> None:
        weakref.finalize(owner, self._free, free, address).atexit = False

    def _free(self, free: Callable[[int], object], address: int) -> None:
        with self.freeing():
            free(address)


class Event:
    """A point in the work of a stream, which others can wait for."""

    def __init__(self, runtime: Any, address: int) -> None:
        self._runtime = runtime
        self.address = address

    def record(self, stream: int) -> None:
        """Put the event behind all work of a stream; before, it counts as done.

        Where that fails, the work is waited for, since nobody will wait for the event.
        """
        try:
            self._runtime.eventRecord(self.address, stream)
        except self._runtime.CUDARuntimeError:
            with suppressing(self._runtime.CUDARuntimeError):
                self._runtime.streamSynchronize(stream)
            raise

    def hold(self, stream: int) -> None:
        """Have a stream wait for the event before it does what it is given from now on."""
        self._runtime.streamWaitEvent(stream, self.address)

    def synchronize(self) -> None:
        """Wait for the event."""
        self._runtime.eventSynchronize(self.address)

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two events that are done, both of which are timed."""
        return float(self._runtime.eventElapsedTime(earlier.address, self.address)) / 1e3


class _Owner:
    """Lives as long as the memory of an array on the GPU is used."""


class _OwnStream:
    """A stream that CUDA has made, for CuPy, which keeps this as long as its own."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address  # the version of the protocol


class _HostMemory:
    """Host memory that CUDA has allocated, for NumPy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Do some work in a thread of ours; return or raise what it does.

    For what changes the thread's current device: CuPy does when it compiles a kernel.
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
    """Return the context that CUDA's runtime has for a GPU."""
    cupy.cuda.runtime.setDevice(number)
    return int(cupy.cuda.driver.ctxGetCurrent())
