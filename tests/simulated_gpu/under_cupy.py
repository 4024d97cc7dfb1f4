"""CuPy is imported; it then calls the simulated runtime and driver of ``cuda.c``.

CuPy finds the driver by its name, ``libcuda.so.1``, which is loaded already. The runtime is linked
into CuPy's module ``runtime``: there the first bytes of each function are overwritten by a jump, in
this process's memory. Functions that are not simulated complain when they are called. NVRTC
compiles for sm_90, so that what it refuses shows; its result is then replaced by the source, which
is built for the CPU when it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from simulated_gpu import folder, simulation
from simulated_gpu.host_kernels import image_of

_RUNTIME = re.compile(r"^([0-9a-f]+) [tT] (cuda[A-Z]\w+|PyInit_runtime)$", re.MULTILINE)
_HARMLESS = {"cudaGetErrorName", "cudaGetErrorString"}  # tables, which need no driver


class _Finder(importlib.abc.MetaPathFinder):
    """Acts when CuPy and its compiler are imported, and finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "cupy":
            _replace_runtime()
            _replace_nvcomp()
        if name != "cupy.cuda.compiler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            _replace_results(module._NVRTCProgram)

        spec.loader.exec_module = run_and_replace
        return spec


def wait_for_cupy() -> None:
    """Put the simulation under CuPy as soon as it is imported."""
    os.environ["CUPY_CACHE_DIR"] = str(folder() / "cupy")
    sys.meta_path.insert(0, _Finder())


def _replace_runtime() -> None:
    library = simulation().library
    package = Path(importlib.util.find_spec("cupy_backends").origin).parent
    (path,) = package.glob("cuda/api/runtime.*.so")
    runtime = ctypes.CDLL(str(path))
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    offsets = {name: int(offset, 16) for offset, name in _RUNTIME.findall(listed)}
    base = _address(runtime.PyInit_runtime) - offsets.pop("PyInit_runtime")
    for name, offset in offsets.items():
        if name not in _HARMLESS:
            replace(base + offset, getattr(library, name, None), name)


def _replace_nvcomp() -> None:
    from simulated_gpu import nvcomp

    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations if found else ():
        for path in Path(place).glob("libnvcomp/lib*/libnvcomp.so*"):
            library = ctypes.CDLL(str(path))
            for name, function in nvcomp.FUNCTIONS.items():
                if hasattr(library, name):
                    replace(_address(getattr(library, name)), function, name)


def replace(address: int, function: Any, name: str) -> None:
    """Have calls of the code at an address go to a function of C's; to a complaint if None."""
    to = ctypes.c_void_p(None if function is None else _address(function))
    if simulation().library.simulated_replace(ctypes.c_void_p(address), to, name.encode()):
        raise OSError(f"{name} cannot be replaced in memory")


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _replace_results(program: Any) -> None:
    """Have NVRTC's results replaced by their source, after it compiled them."""
    compile_it = program.compile

    def compile_and_replace(self: Any, options: Any = (), log_stream: Any = None) -> Any:
        result, names = compile_it(self, options, log_stream)
        return (image_of(self.src, options) if self.method == "cubin" else result), names

    program.compile = compile_and_replace
