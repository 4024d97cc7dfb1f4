"""CUDA kernels, compiled for the CPU and run there thread by thread, for machines without a GPU.

`load_kernels` takes the source that NVRTC would be given. g++ compiles it behind a shim that makes
plain variables of threadIdx, blockIdx, blockDim and gridDim, and plain functions of the few
built-ins that our kernels may use. Each kernel gets a launcher that calls it once for every thread
of every block, one after the other, in an order that changes from launch to launch, as nothing may
depend on it. There is no shared memory and no __syncthreads: a kernel that has them does not
compile here.

What is returned stands in for CuPy's RawModule, and is stricter, where a GPU would read garbage or
stop: numbers have to be exactly as wide as the parameter (CuPy passes Python's int as 64 bits),
arrays have to hold elements of the parameter's width and lie at a multiple of it, and a launch has
to stay within CUDA's limits. Arguments are

- None: a null pointer;
- numpy arrays (CuPy's own arrays look the same to the fake of tests/fake_cupy.py), or whatever has
  `data.ptr`, or an address as a Python int, for a pointer. An array of bytes fits any pointer;
- NumPy scalars, or a Python int for 64 bits, for a number.

H5ASYNC_CUDA_ON_CPU_FLAGS holds more flags for g++, such as sanitizers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

MAX_BLOCK_THREADS, MAX_GRID = 1024, (2**31 - 1, 65535)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wall", "-Wextra")
FLAGS += ("-Werror", "-Wno-unknown-pragmas", "-x", "c++")

_SHIM = """
#define __global__
#define __device__
#define __launch_bounds__(most)
struct dim3 { unsigned int x, y, z; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value)
{
    unsigned long long before = *at;
    *at = before + value;
    return before;
}
static inline int atomicExch(int *at, int value)
{
    int before = *at;
    *at = value;
    return before;
}
static inline int atomicOr(int *at, int value)
{
    int before = *at;
    *at = before | value;
    return before;
}
#line 1 "kernels.cu"
"""

# From `thread` on, `step` makes an order of all threads if it has no divisor in common with their
# number.
_LAUNCHER = """
extern "C" void launch_{name}(unsigned long long grid_x, unsigned long long grid_y,
                              unsigned long long block_x, unsigned long long thread,
                              unsigned long long step, {parameters})
{{
    unsigned long long threads = grid_x * grid_y * block_x;
    gridDim = {{(unsigned int)grid_x, (unsigned int)grid_y, 1}};
    blockDim = {{(unsigned int)block_x, 1, 1}};
    for (unsigned long long i = 0; i < threads; i++, thread = (thread + step) % threads) {{
        unsigned long long block = thread / block_x;
        threadIdx = {{(unsigned int)(thread % block_x), 0, 0}};
        blockIdx = {{(unsigned int)(block % grid_x), (unsigned int)(block / grid_x), 0}};
        {name}({arguments});
    }}
}}
"""

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\(\d+\)\s*)?(\w+)\s*\(([^)]*)\)'
)
_PARAMETER = re.compile(r"([\w\s]+?)\s*(\*?)\s*(?:__restrict__\s*)?(\w+)")

# The types that kernels may have as parameters, as they are spelled, without const.
_TYPES = {
    "unsigned char": ctypes.c_ubyte,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "int64": ctypes.c_longlong,
    "uint64": ctypes.c_ulonglong,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
}


class Parameter(NamedTuple):
    """One parameter of a kernel: of a C type, or a pointer to it."""

    name: str
    ctype: Any
    is_pointer: bool
    spelled: str

    @property
    def nbytes(self):
        """Bytes of the number, or of what is pointed to."""
        return ctypes.sizeof(self.ctype)

    def pack(self, value):
        """Return what ctypes is to pass, or raise TypeError or ValueError."""
        return self._address(value) if self.is_pointer else self._number(value)

    def _number(self, value):
        if isinstance(value, np.integer):
            nbytes, value = value.itemsize, int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            nbytes = 8
        else:
            raise TypeError(f"{self.name}: a number is due, not {type(value).__name__}")
        if nbytes != self.nbytes:
            raise TypeError(f"{self.name}: {self.nbytes} bytes are due, not {nbytes}")
        return self.ctype(value)

    def _address(self, value):
        if value is None:
            return ctypes.c_void_p(None)
        if isinstance(value, np.ndarray):
            if value.itemsize not in (1, self.nbytes):
                raise TypeError(
                    f"{self.name}: elements of {self.nbytes} bytes are due, not {value.dtype}"
                )
            address = value.ctypes.data
        elif hasattr(value, "data") and hasattr(value.data, "ptr"):
            address = value.data.ptr
        elif isinstance(value, int) and not isinstance(value, bool):
            address = value
        else:
            raise TypeError(f"{self.name}: an array is due, not {type(value).__name__}")
        if address % self.nbytes:
            raise ValueError(f"{self.name}: lies at no multiple of {self.nbytes} bytes")
        return ctypes.c_void_p(address)


class Kernel:
    """Called like CuPy's RawKernel: ``kernel((grid_x, grid_y), (block_x,), arguments)``."""

    def __init__(self, name, launch, parameters, order):
        self.name = name
        self.parameters = parameters
        self._launch = launch
        self._order = order

    def __call__(self, grid, block, args, *, shared_mem=0):
        if shared_mem:
            raise ValueError(f"{self.name}: there is no shared memory here")
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name}: {len(self.parameters)} arguments are due")
        grid_x, grid_y = _dimensions(grid, MAX_GRID)
        block_x, _ = _dimensions(block, (MAX_BLOCK_THREADS, 1))
        count = grid_x * grid_y * block_x
        packed = [p.pack(value) for p, value in zip(self.parameters, args, strict=True)]
        numbers = (grid_x, grid_y, block_x, *self._order.draw(count))
        self._launch(*map(ctypes.c_ulonglong, numbers), *packed)


def _dimensions(given, most):
    x, y, z = (*map(int, given), 1, 1)[:3]
    if len(given) > 3 or not (1 <= x <= most[0] and 1 <= y <= most[1] and z == 1):
        raise ValueError(f"a grid or a block of {given} cannot be launched")
    return x, y


class _Order:
    """Draws orders of threads: from the first to the last, the reverse, or any."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def draw(self, count):
        """Return the first thread, and how far the next one is ahead, round and round."""
        kind = self._random.randrange(4)
        if kind == 0:
            return 0, 1
        if kind == 1:
            return count - 1, count - 1 if count > 1 else 1
        step = self._random.randrange(1, count + 1)
        while _divisor(step, count) > 1:
            step -= 1
        return self._random.randrange(count), step


def _divisor(a, b):
    while b:
        a, b = b, a % b
    return a


class Module:
    """The part of CuPy's RawModule that finds a kernel by its name."""

    def __init__(self, library, kernels, seed):
        order = _Order(seed)
        self._functions = {
            name: Kernel(name, getattr(library, f"launch_{name}"), parameters, order)
            for name, parameters in kernels.items()
        }
        for function in self._functions.values():
            function._launch.restype = None

    @property
    def names(self):
        """The names of all kernels."""
        return sorted(self._functions)

    def get_function(self, name):
        """Return the kernel with this name; KeyError if there is none."""
        return self._functions[name]


def parse_kernels(source):
    """Return the parameters of each extern "C" kernel: name -> list of `Parameter`."""
    kernels = {}
    for name, text in _KERNEL.findall(source):
        kernels[name] = [_parameter(name, one) for one in text.split(",")]
    assert len(kernels) == source.count("__global__"), "not all kernels were understood"
    return kernels


def _parameter(kernel, text):
    match = _PARAMETER.fullmatch(text.strip())
    assert match is not None, f"{kernel}: what is {text!r}?"
    spelled = " ".join(word for word in match[1].split() if word != "const")
    return Parameter(match[3], _TYPES[spelled], bool(match[2]), f"{match[1]} {match[2]}")


def load_kernels(source, seed=0):
    """Compile CUDA C++ for the CPU, once per process; skip the test where there is no g++.

    Parameters
    ----------
    source
        The text of the .cu file.
    seed
        Of the order in which threads run.
    """
    return Module(*_build(source), seed)


@functools.cache
def _build(source):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    kernels = parse_kernels(source)
    launchers = [
        _LAUNCHER.format(
            name=name,
            parameters=", ".join(f"{p.spelled} arg_{p.name}" for p in kernels[name]),
            arguments=", ".join(f"arg_{p.name}" for p in kernels[name]),
        )
        for name in kernels
    ]
    flags = (*FLAGS, *shlex.split(os.environ.get("H5ASYNC_CUDA_ON_CPU_FLAGS", "")))
    with tempfile.TemporaryDirectory(prefix="cuda_on_cpu") as directory:
        library = Path(directory, "kernels.so")
        done = subprocess.run(
            [compiler, *flags, "-o", library, "-"],
            input="\n".join([_SHIM, source, *launchers]),
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library)), kernels  # what is loaded needs its file no more
