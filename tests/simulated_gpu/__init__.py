"""Simulated GPUs: CuPy's own code and our kernels run, on a machine that has no GPU.

``scripts/test_gpu`` sets it up: it compiles ``cuda.c``, and starts pytest with a ``PYTHONPATH``
that has every Python process, also those that tests start, put it under CuPy when that is
imported.

- ``cuda.c``: CUDA's runtime and driver; it says what is simulated, and what is not.
- ``under_cupy``: has CuPy and nvCOMP call it, and has NVRTC's results built for the CPU.
- ``host_kernels``: builds kernels, which NVRTC has compiled, for the CPU, with g++.
- ``nvcomp``: decodes in nvCOMP's place.
- ``plugin``: pytest's side: a seed for each test, and a test fails on a complaint.

What runs as it would with a GPU: CuPy (all but the CUDA runtime in it, which is replaced in
memory), and NVRTC for the architecture sm_90. PyTorch and JAX do not see these GPUs.

The environment:

SIMULATED_GPU
    The folder with ``libcuda.so.1``, where compiled kernels are kept too. Nothing is simulated
    where it is not set.
SIMULATED_GPU_COUNT, SIMULATED_GPU_SEED
    How many GPUs there are (2), and what the order of work is drawn from (1).
SIMULATED_GPU_ALLOWED
    GPUs on which a context may be made, as ``1`` or ``0,1``; else a complaint.
SIMULATED_GPU_COMPLAINTS, SIMULATED_GPU_CONTEXTS
    Files to which complaints, and the contexts that are made, are appended; a line each.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700  # cudaError_t
TOTAL_NBYTES = 16 << 30  # of each GPU's memory
MAX_GPUS = 8


class Function(ctypes.Structure):
    """A kernel that was built for the CPU; as in ``cuda.c``."""

    _fields_ = (
        ("name", ctypes.c_char * 200),
        ("count", ctypes.c_int),
        ("sizes", ctypes.c_void_p),
        ("is_running", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
    )


Builder = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Function))
Call = ctypes.CFUNCTYPE(None, ctypes.c_long)


def is_simulated() -> bool:
    """Tell whether GPUs are simulated in this process."""
    return "SIMULATED_GPU" in os.environ


def folder() -> Path:
    """Return the folder of the library, and of what is compiled."""
    return Path(os.environ["SIMULATED_GPU"])


class Simulation:
    """What a test may ask and set. Safe to use from many threads; one for each process.

    Tests get it from the fixture ``simulation``, which undoes afterwards what was set.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.simulated_used.restype = ctypes.c_size_t
        self._calls: dict[int, Callable[[], None]] = {}
        self._run = Call(self._call)

    def _call(self, number: int) -> None:
        is_enabled = gc.isenabled()
        gc.disable()  # the driver is locked, and what is collected may free memory of it
        try:
            self._calls.pop(number)()
        finally:
            if is_enabled:
                gc.enable()

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return int(os.environ.get("SIMULATED_GPU_COUNT", "2"))

    @property
    def seed(self) -> int:
        """What the order of work is drawn from."""
        return int(os.environ.get("SIMULATED_GPU_SEED", "1"))

    def reset(self, seed: int | None = None) -> None:
        """Forget faults and sticky errors, and set what can be set to what it was at first.

        Work that is waiting is done before, while a sticky error has it skipped.
        """
        for gpu in range(self.count):
            self.set_memory(gpu, TOTAL_NBYTES)
        self.library.simulated_finish()
        self.library.simulated_heal()
        self.forbid_pageable(True)
        allowed = os.environ.get("SIMULATED_GPU_ALLOWED")
        self.allow(range(MAX_GPUS) if allowed is None else map(int, allowed.split(",")))
        if seed is not None:
            self.library.simulated_seed(ctypes.c_uint(seed))

    def allow(self, gpus: Iterable[int]) -> None:
        """Complain from now on of a context that is made on another GPU than these."""
        self.library.simulated_allow(ctypes.c_uint(sum(1 << gpu for gpu in gpus)))

    def contexts(self) -> list[int]:
        """Return the GPUs on which this process has a context."""
        return [gpu for gpu in range(self.count) if self.library.simulated_has_context(gpu)]

    def set_memory(self, gpu: int, nbytes: int) -> None:
        """Set how much memory a GPU has; not less than is in use."""
        self.library.simulated_set_memory(gpu, ctypes.c_size_t(nbytes))

    def used_nbytes(self, gpu: int) -> int:
        """Return how much of a GPU's memory is allocated, with what CuPy's pools keep."""
        return int(self.library.simulated_used(gpu))

    def pinned_nbytes(self) -> int:
        """Return how much host memory is pinned or registered."""
        return int(self.library.simulated_used(-1))

    def forbid_pageable(self, is_forbidden: bool) -> None:
        """Set whether an upload out of pageable memory on a non-blocking stream is wrong."""
        self.library.simulated_forbid_pageable(int(is_forbidden))

    def fail(self, where: str, after: int = 0, error: int = OUT_OF_MEMORY) -> None:
        """Have something fail once.

        Parameters
        ----------
        where
            The function of CUDA, such as ``"cudaMalloc"``, ``"cudaHostAlloc"``,
            ``"cudaHostRegister"``, ``"cudaMemcpyAsync"``, ``"cudaEventRecord"`` or
            ``"cuLaunchKernel"``; or ``"kernel"`` or ``"copy"``: where the work is done, which a
            later call reports: then `error` has to be a sticky one.
        after
            How many succeed before.
        error
            A ``cudaError_t``. A sticky one (`ILLEGAL_ADDRESS`) fails all later calls on that GPU.
        """
        self.library.simulated_fail(where.encode(), ctypes.c_long(after), error)

    def complaints(self) -> list[str]:
        """Return what was complained of, in this process and those it started, and forget it."""
        path = os.environ.get("SIMULATED_GPU_COMPLAINTS")
        if path is None or not os.path.exists(path):
            return []
        lines = Path(path).read_text().splitlines()
        os.truncate(path, 0)
        return lines

    def put(self, stream: int, call: Callable[[], None]) -> int:
        """Have a stream make a call in its turn; return a ``cudaError_t``."""
        number = id(call)
        self._calls[number] = call
        return int(
            self.library.simulated_call(ctypes.c_void_p(stream), self._run, ctypes.c_long(number))
        )

    def is_device_memory(self, where: str, address: int, nbytes: int) -> bool:
        """Tell whether so many bytes of device memory are there; complain if not."""
        found = self.library.simulated_is_device(
            where.encode(), ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        )
        return bool(found)


@functools.cache
def simulation() -> Simulation:
    """Return the simulation of this process, which begins with the first call."""
    from simulated_gpu.host_kernels import build

    library = ctypes.CDLL(str(folder() / "libcuda.so.1"))
    found = Simulation(library)
    builder = Builder(functools.partial(_build, build))
    library.simulated_begin(found.count, ctypes.c_size_t(TOTAL_NBYTES), builder)
    found.builder = builder  # it must not go
    found.reset(found.seed)
    return found


def _build(build: Any, image: bytes, name: bytes, function: Any) -> int:
    """Fill in a kernel for ``cuda.c``; return 0, or 1 if that fails."""
    try:
        with _building:  # many threads ask for the same kernel
            library, count = build(image.decode(), name.decode())
        address = functools.partial(_address, library, name.decode())
        function.contents.count = count
        function.contents.sizes = address("{}_sizes")
        function.contents.is_running = address("is_running")
        function.contents.launch = address("{}_launch")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


_building = threading.Lock()


def _address(library: ctypes.CDLL, name: str, form: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, form.format(name)))
