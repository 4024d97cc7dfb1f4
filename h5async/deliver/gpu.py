"""Makes a GPU current, allocates on it, runs kernels, and turns its errors into a `DeviceError`.

All use of the GPU goes through a `Gpu`, which `devicepolicy.py` makes. `Kernels` move, unshuffle,
permute, cast and scale arrays on it; CuPy compiles them on first use.

A process's context on a GPU takes half a gigabyte of that GPU's memory. By default CUDA makes one
on GPU 0, which is every thread's GPU until it chooses another. With many processes on a node, the
memory of GPU 0 is soon exhausted. So our code calls CUDA only while the reader's GPU is current:
our threads choose it once and keep it; in the caller's threads, the previous context is restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h5async.errors import DeviceError
from h5async.fill.pool import THREAD_NAME, start_all
from h5async.io.shared import call_before_unmap
from h5async.plan.transform import RowTransform
from h5async.samples.samplearrays import exact_kernel
from h5async.spelling import named
from h5async.system.interruptions import Flag, Patience, join_threads, suppressing

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

_Result = TypeVar("_Result")


class Gpu:
    """One GPU, with its primary CUDA context. Safe to use from many threads.

    `cupy` is the module; `name` is ``"cuda:N"``. `DeviceError` is raised if the GPU cannot be used.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self.cupy = cupy
        self.number = number
        self.name = f"cuda:{number}"
        runtime, driver = cupy.cuda.runtime, cupy.cuda.driver
        lack = cupy.cuda.memory.OutOfMemoryError
        try:
            self.driver = load_driver()
        except OSError as error:
            raise DeviceError(f"{self.name}: CUDA's driver cannot be loaded ({error})") from error
        self.errors: tuple[type[Exception], ...]  # CuPy's exceptions for CUDA's errors
        self.errors = runtime.CUDARuntimeError, driver.CUDADriverError, lack
        with self.failing("it cannot be used"):
            self.context = in_own_thread(partial(_primary_context, cupy, number))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU current for the thread; a thread of ours keeps it.

        CuPy's `Device` would switch back to GPU 0 afterwards, and so make a context there.
        Restoring the previous context, or none, makes no context.
        """
        driver, found = self.cupy.cuda.driver, ctypes.c_void_p()
        if status := self.driver.cuCtxGetCurrent(ctypes.byref(found)):
            raise driver.CUDADriverError(status)
        before = found.value or 0
        if before != self.context:
            driver.ctxSetCurrent(self.context)
        try:
            yield
        finally:
            is_ours = threading.current_thread().name.startswith(THREAD_NAME)
            if before != self.context and not is_ours:
                driver.ctxSetCurrent(before)

    @contextlib.contextmanager
    def freeing(self) -> Iterator[None]:
        """Make this GPU current to free something; suppress CUDA's errors.

        After a GPU fault nothing can be freed, and the fault has been reported already.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(suppressing(*self.errors))
            with suppressing(*self.errors):
                stack.enter_context(self.current())
            yield

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn CUDA's errors into a `DeviceError`; `what` says what failed."""
        try:
            yield
        except self.errors as error:
            hint = (
                f"its memory is used up: make {named('batch_size')}, {named('prefetch')} or"
                f" {named('cache_bytes')} smaller, or stop"
                " other programs that use it"
                if self.is_lack_of_memory(error)
                else "after a GPU fault, this process has to be restarted, perhaps with"
                f" {named('decode', 'host')}"
            )
            raise DeviceError(f"{self.name}: {what} ({error}); {hint}") from error

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Make this GPU current, and turn CUDA's errors into a `DeviceError`; see `failing`."""
        with self.failing(what), self.current():
            yield

    def is_lack_of_memory(self, error: Exception) -> bool:
        """Tell whether an error means that the GPU is out of memory."""
        is_cupys = isinstance(error, self.cupy.cuda.memory.OutOfMemoryError)
        return is_cupys or getattr(error, "status", None) == _MEMORY_ALLOCATION

    @property
    def free_nbytes(self) -> int:
        """The bytes of GPU memory that are free now."""
        with self.working("its free memory cannot be read"):
            return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def streams(self) -> list[int]:
        """Return the streams on which the caller may use a batch; this GPU must be current."""
        streams = [int(self.cupy.cuda.get_current_stream().ptr)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            of_torch = int(torch.cuda.current_stream(self.number).cuda_stream)
            if of_torch != streams[0]:
                streams.append(of_torch)
        return streams

    def upload(self, target: Any, source: NDArray[Any], stream: Any) -> None:
        """Queue the copy of a host array to a GPU array of the same size on a stream.

        Both are C-contiguous. (CuPy's `set` would change the thread's current device.)
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
        """Copy a small array to the GPU, and wait for it; this GPU must be current.

        (CuPy's `asarray` would use pinned memory from a pool that never returns it.)
        """
        pinned = self.pinned_memory(array.nbytes).view(array.dtype).reshape(array.shape)
        pinned[...] = array
        copied = self.cupy.empty(array.shape, array.dtype)
        stream = self.cupy.cuda.get_current_stream()
        self.upload(copied, pinned, stream)
        stream.synchronize()
        return copied

    # --- resources, freed with their last user, in any thread -------------------------------------

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one; this GPU must be current."""
        runtime = self.cupy.cuda.runtime
        # CuPy destroys its own streams under any context, even if creating one has failed.
        owner = Owned(int(runtime.streamCreateWithFlags(runtime.streamNonBlocking)))
        self.freed_with(owner, runtime.streamDestroy, owner.address)
        return self.cupy.cuda.Stream.from_external(owner)

    def event(self, *, blocks: bool = False, is_timed: bool = False) -> Event:
        """Return a new event; this GPU must be current. `blocks`: waiting threads sleep."""
        runtime = self.cupy.cuda.runtime
        flags = blocks * runtime.eventBlockingSync | (not is_timed) * runtime.eventDisableTiming
        event = Event(self.cupy, self.driver, int(runtime.eventCreateWithFlags(flags)))
        self.freed_with(event, runtime.eventDestroy, event.address)
        return event

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context manager in which CuPy allocates from the GPU, not the caller's pool.

        Memory returns to the GPU with the last array over it. (A pool would keep it, and dropping a
        pool frees memory of arrays that are still in use.)
        """
        context: AbstractContextManager[None] = self.cupy.cuda.using_allocator(self._allocate)
        return context

    def _allocate(self, nbytes: int) -> Any:
        """Allocate memory; an allocator for CuPy."""
        cuda = self.cupy.cuda
        try:
            address = int(cuda.runtime.malloc(nbytes))
        except cuda.runtime.CUDARuntimeError as error:
            if not self.is_lack_of_memory(error):
                raise
            # CuPy's pool may hold unused memory.
            self.cupy.get_default_memory_pool().free_all_blocks()
            address = int(cuda.runtime.malloc(nbytes))
        owner = Owned(address)
        self.freed_with(owner, cuda.runtime.free, address)
        return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, self.number), 0)

    def memory(self, nbytes: int) -> Any:
        """Return GPU memory as a uint8 array; this GPU must be current."""
        with self.allocating():
            return self.cupy.empty(nbytes, np.uint8)

    def pinned_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory; this GPU must be current."""
        # Not from CuPy's pool, which rounds up to a power of two.
        runtime = self.cupy.cuda.runtime
        address = int(runtime.hostAlloc(max(1, nbytes), 0))
        owner = Owned(address, nbytes)
        self.freed_with(owner, runtime.freeHost, address)
        return np.asarray(owner)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], object]:
        """Pin whole pages until unmapped, or the result is called; this GPU must be current."""
        address = memory.ctypes.data
        self.cupy.cuda.runtime.hostRegister(address, memory.nbytes, 0)
        return call_before_unmap(memory, partial(self._free, self._unregister, address))

    def _unregister(self, address: int) -> None:
        # Wait for copies from the memory.
        with suppressing(*self.errors):
            self.cupy.cuda.runtime.deviceSynchronize()
        self.cupy.cuda.runtime.hostUnregister(address)

    def freed_with(self, owner: object, free: Callable[[int], object], address: int) -> None:
        """Have a resource freed, on this GPU, when its owner is gone."""
        weakref.finalize(owner, self._free, free, address).atexit = False

    def _free(self, free: Callable[[int], object], address: int) -> None:
        with self.freeing():
            free(address)


@functools.cache
def load_driver() -> Any:
    """Load CUDA's driver, for calls that do not block, and so keep the GIL.

    CuPy releases the GIL in each call. Getting it back while other threads run Python takes many
    times as long as the call.
    """
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuEventQuery.argtypes = (ctypes.c_void_p,)
    driver.cuStreamWaitEvent.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    driver.cuCtxGetCurrent.argtypes = (ctypes.c_void_p,)
    return driver


class Event:
    """A CUDA event: a point in the work of a stream that others can wait for."""

    def __init__(self, cupy: Any, driver: Any, address: int) -> None:
        self._cuda, self._driver = cupy.cuda, driver
        self.address = address

    def record(self, stream: int) -> None:
        """Record the event after all current work of a stream; a new event counts as done.

        If recording fails, wait for the work here, because nobody can wait for the event.
        """
        status = self._driver.cuEventRecord(self.address, stream)
        if status:
            with suppressing(self._cuda.runtime.CUDARuntimeError):
                self._cuda.runtime.streamSynchronize(stream)
            raise self._cuda.driver.CUDADriverError(status)

    def hold(self, stream: int) -> None:
        """Make a stream wait for the event before its later work."""
        status = self._driver.cuStreamWaitEvent(stream, self.address, 0)
        if status:
            raise self._cuda.driver.CUDADriverError(status)

    def is_done(self) -> bool:
        """Tell whether the stream has reached the event. Never blocks."""
        return int(self._driver.cuEventQuery(self.address)) == 0  # nonzero: not yet, or an error

    def synchronize(self) -> None:
        """Wait for the event."""
        self._cuda.runtime.eventSynchronize(self.address)

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds since another event; both are timed, and done."""
        return float(self._cuda.runtime.eventElapsedTime(earlier.address, self.address)) / 1e3


class Owned:
    """Owns a CUDA resource for as long as it is used: a stream, or memory, also for NumPy."""

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

    It is for work that changes the thread's current device, as CuPy's compiling of kernels does.
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
        raised.clear()  # breaks a cycle: the traceback refers to this frame
    return returned[0]


def _primary_context(cupy: Any, number: int) -> int:
    cupy.cuda.runtime.setDevice(number)
    return int(cupy.cuda.driver.ctxGetCurrent())


# --- kernels --------------------------------------------------------------------------------------

# Planes per sample; with more, neighbouring threads read too far apart.
_MAX_PLANES = 16

# A thread handles one point of one sample, with all its channels: it reads neighbouring bytes, and
# neighbouring threads write neighbouring values of each plane.
_PLANES_PARAMETERS = "raw S stored, raw int64 index, int64 points, int32 channels"
_PLANES = """
const long long sample = i / points, at = i - sample * points;
const long long begin = (index[sample] * points + at) * channels;
for (int c = 0; c < channels; ++c)
    delivered[(sample * channels + c) * points + at] = {value};
"""
_STORED = "h5async_to<T>(stored[begin + c])"

# The kernels of kernels.cu.
_FUNCTIONS = ("copy_rows", "copy", "unshuffle", "bitunshuffle", "place", "adler32", "verify")
_THREADS = 256  # per block
_MAX_BLOCKS = 64  # per piece
_MAX_GRID_Y = 65535


class RowChange(NamedTuple):
    """Does a transform on the device, with exactly the result of `RowTransform.apply`.

    ``change(raw, index, out)`` fills `out`, (n, *row), from `raw`, (n, *raw_row), both
    C-contiguous; `index`, int64 (n,), is 0 to n - 1. If it `gathers`, `raw` may have any number of
    rows, and `index` selects from them.
    """

    change: Callable[[Any, Any, Any], None]
    gathers: bool


class Kernels:
    """The kernels of one GPU, launched on the current stream. Thread-safe."""

    def __init__(self, gpu: Gpu) -> None:
        cupy = self._cupy = gpu.cupy
        self._on_device = gpu.on_device
        source = Path(__file__).with_name("kernels.cu").read_text()
        module = cupy.RawModule(code=source, options=("-std=c++17",))
        self._function = functools.cache(module.get_function)
        kernel = partial(exact_kernel, cupy)
        parameters = f"{_PLANES_PARAMETERS}, raw T scale, raw T offset"
        scaled = _scaled(_STORED, "scale[c]", "offset[c]")
        delivered = "raw T delivered"
        self._move = kernel(_PLANES_PARAMETERS, delivered, _PLANES.format(value=_STORED), "planes")
        self._move_scaled = kernel(
            parameters, delivered, _PLANES.format(value=scaled), "planes_scaled"
        )
        scaled = _scaled("h5async_to<T>(stored)", "scale", "offset")
        parameters = "S stored, T scale, T offset"
        self._scale = kernel(parameters, "T delivered", f"delivered = {scaled}", "scale")
        cast = "delivered = h5async_to<T>(stored)"
        self._cast = kernel("S stored", "T delivered", cast, "cast")

    def row_change(self, transform: RowTransform) -> RowChange:
        """Return a function that transforms rows on the device in one kernel."""
        channels = transform.channels
        is_scaled = transform.scale is not None or transform.offset is not None
        factors = _factors(transform) if is_scaled else ()
        # C casts these types as CuPy and NumPy do.
        is_plain = all(
            dtype.kind in "iuf" and dtype != np.float16
            for dtype in (transform.raw_dtype, transform.dtype)
        )
        if not channels or channels > _MAX_PLANES or not is_plain:
            # At least one dimension: CuPy turns a 0-dimensional -0.0 into 0.0.
            whole = tuple(self._on_device(np.atleast_1d(factor)) for factor in factors)
            return RowChange(partial(self._change, transform.permutation, whole), False)
        each = tuple(
            self._on_device(np.broadcast_to(factor.reshape(-1), channels)) for factor in factors
        )
        return RowChange(partial(self._change_planes, channels, each), True)

    def copy_rows(self, rows: Any, index: Any, out: Any, *, scatters: bool) -> None:
        """Copy ``rows[index]`` to `out`; or, if it `scatters`, `rows` to ``out[index]``."""
        count, row_nbytes = index.size, (rows.nbytes // len(rows) if len(rows) else 0)
        if row_nbytes:
            arrays = rows.view(np.uint8), out.view(np.uint8), index
            sizes = np.int64(count), np.int64(row_nbytes), np.int32(scatters)
            self.launch("copy_rows", row_nbytes, count, *arrays, *sizes)

    def launch(self, name: str, nbytes: int, count: int, *arguments: Any) -> None:
        """Launch a kernel of kernels.cu; for the arguments, arrays and NumPy scalars, see there.

        It has `count` pieces of work, of about `nbytes` each; if `count` is 0, it is not launched.
        """
        if count:
            blocks = max(1, min(_MAX_BLOCKS, -(-nbytes // (16 * _THREADS))))
            function = self._function(f"h5async_{name}")
            function((blocks, min(count, _MAX_GRID_Y)), (_THREADS,), arguments)

    def load(self) -> None:
        """Compile the kernels that move bytes now, rather than on first use."""
        for name in _FUNCTIONS:
            self._function(f"h5async_{name}")

    def _change(
        self, permutation: tuple[int, ...], factors: tuple[Any, ...], raw: Any, _: Any, out: Any
    ) -> None:
        permuted = raw.transpose(permutation)
        if factors:
            self._scale(permuted, *factors, out)
        elif raw.dtype == out.dtype:
            self._cupy.copyto(out, permuted)
        else:
            self._cast(permuted, out)

    def _change_planes(
        self, channels: int, factors: tuple[Any, ...], raw: Any, index: Any, out: Any
    ) -> None:
        points = out.size // max(1, channels * len(out))
        if points:
            kernel = self._move_scaled if factors else self._move
            arguments = raw.reshape(-1), index, points, channels, *factors, out.reshape(-1)
            kernel(*arguments, size=len(out) * points)


def _scaled(stored: str, scale: str, offset: str) -> str:
    return f"h5async_add<T>(h5async_mul<T>({stored}, {scale}), {offset})"


def _factors(transform: RowTransform) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return scale and offset, by default 1 and -0.0 (adding 0.0 would change -0.0)."""
    scale = transform.scale if transform.scale is not None else np.ones((), transform.dtype)
    offset = transform.offset if transform.offset is not None else -np.zeros((), transform.dtype)
    return scale, offset


def can_transform(transform: RowTransform) -> bool:
    """Tell whether a GPU transforms rows with exactly the host's result.

    A GPU lacks foreign byte orders, casts floats outside an integer type's range differently, and
    rounds twice when it casts to float16 a type that float32 does not represent exactly. Complex
    numbers have not been examined.
    """
    raw, dtype = transform.raw_dtype, transform.dtype
    if transform.is_identity:
        return True
    if transform.text or transform.cf is not None:
        return False
    if raw == dtype or (raw == np.uint8 and dtype == np.bool_):
        return raw.isnative
    if dtype == np.float16:
        return raw.isnative and raw.kind != "c" and (raw.itemsize <= 2 or raw == np.float32)
    kinds = "biuf" if dtype.kind == "f" else "biu"
    return raw.isnative and dtype.kind != "c" and raw.kind in kinds
