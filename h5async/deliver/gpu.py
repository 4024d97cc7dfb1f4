"""Chooses a GPU, and makes it current, allocates on it and turns its errors into a `DeviceError`.

This is the only importer of CuPy, and imports it only where a GPU is asked for.

Each GPU that a process uses costs it half a gigabyte of that GPU's memory, for a context, and CUDA
makes one where it is in doubt: on GPU 0, which is every thread's GPU until it chooses another. With
many processes on a node that memory is soon gone. So nothing of ours calls CUDA unless the one GPU
of the reader is current: threads of ours choose it once and keep it; in a thread of the caller's,
what was current before is current afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.fill.pool import THREAD_NAME, start_thread
from h5async.io.shared import call_before_unmap

# Which of the processes of its node this is: PyTorch's launchers, Open MPI, Slurm. The inner
# launcher comes first, where one starts the other.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

_Result = TypeVar("_Result")

_log = logging.getLogger("h5async")


def import_cupy() -> Any:
    """Return the module.

    Raises
    ------
    DeviceError
        If it is not installed.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"CuPy is not installed ({error}); install it with: pip install 'h5async[cuda13]', or"
            " 'h5async[cuda12]' for a driver of CUDA 12. To read without a GPU: device=\"cpu\""
        ) from error


def find_gpu(number: int | None = None) -> Gpu:
    """Return a GPU.

    Parameters
    ----------
    number
        Its number; None: the one that fits this process best, see `choose`.

    Raises
    ------
    DeviceError
        If CuPy or the GPU is missing.
    """
    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"CuPy {cupy.__version__} is installed but finds no usable GPU ({error}); check"
            ' with: nvidia-smi. To read without one: device="cpu"'
        ) from error
    reason = "the option device"
    if number is None and count:
        number, reason = choose(cupy, count)
    if not count or number is None or number >= count:
        raise DeviceError(
            f"there is no GPU {number or 0}: CuPy finds {count}; check with: nvidia-smi."
            ' To read without one: device="cpu"'
        )
    gpu = Gpu(cupy, number)
    _log.info("batches go to %s: %s", gpu.name, reason)
    return gpu


def choose(cupy: Any, count: int, environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the number of the GPU that fits this process best, and why.

    That is the current one, of CuPy or PyTorch, if anybody has chosen it or PyTorch uses it; under
    a launcher of several processes on a node, each process's own; else the first.

    Parameters
    ----------
    cupy
        The module.
    count
        GPUs that this process sees. If it is 1, there is nothing to choose: some launchers show
        each process its own GPU only.
    environment
        What launchers say.
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
        rank = environment.get(variable, "")
        if rank.isdecimal():
            return int(rank) % count, f"{variable}={rank}, and this process sees {count} GPUs"
    return current, "it is the default"


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
            stack.enter_context(contextlib.suppress(*self.errors))
            with contextlib.suppress(*self.errors):
                stack.enter_context(self.current())
            yield

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn CUDA's errors into a `DeviceError` that says what failed."""
        try:
            yield
        except self.errors as error:
            raise DeviceError(
                f"{self.name}: {what} ({error}); after a fault of the GPU this process has to be"
                ' started again, perhaps with decode="host"'
            ) from error

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

    # --- what is freed with its last user, in whatever thread ------------------------------------

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one, this GPU being current."""
        gpu, base = self, self.cupy.cuda.Stream

        class Stream(base):  # type: ignore[misc, valid-type]
            def __del__(self) -> None:
                if not sys.is_finalizing():
                    with gpu.freeing():
                        base.__del__(self)

        return Stream(non_blocking=True)

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

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin memory of whole pages until it is unmapped, this GPU being current."""
        address = memory.ctypes.data
        self.cupy.cuda.runtime.hostRegister(address, memory.nbytes, 0)
        call_before_unmap(memory, partial(self._free, self._unregister, address))

    def _unregister(self, address: int) -> None:
        # What still copies out of it is waited for.
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
        """Put the event behind all work of a stream; before, it counts as done."""
        self._runtime.eventRecord(self.address, stream)

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

    thread = threading.Thread(target=run, name=f"{THREAD_NAME}-gpu", daemon=True)
    start_thread(thread, "a GPU")
    thread.join()
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
