"""Asks a GPU what no simulation tells: how it rounds, and what CUDA does in rare moments.

Each question that may fault the GPU, or end the process, is asked in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from findings import Findings, delivered, difference, parse_options

from h5async import Field
from h5async.deliver.devicedecode import load_nvcomp

LATE_UNREGISTERING = """
import mmap
import cupy, numpy as np
runtime, nbytes = cupy.cuda.runtime, 64 << 20

def said(call, *arguments):
    try:
        call(*arguments)
    except runtime.CUDARuntimeError as error:
        return str(error)
    return "done"

spin = cupy.RawKernel('extern "C" __global__ void spin(long long cycles) {'
    ' long long begin = clock64(); while (clock64() - begin < cycles); }', "spin")
stream, target = cupy.cuda.Stream(non_blocking=True), cupy.zeros(nbytes, np.uint8)
old = mmap.mmap(-1, nbytes)
sevens = np.ndarray((nbytes,), np.uint8, old)
sevens[:] = 7
address = sevens.ctypes.data
print("register:", said(runtime.hostRegister, address, nbytes, 0))
runtime.deviceSynchronize()
with stream:
    spin((1,), (1,), (np.int64(400_000_000),))
target.set(sevens, stream=stream)  # it runs after the spinning, when the memory is unmapped
del sevens
old.close()
new = mmap.mmap(-1, nbytes)
nines = np.ndarray((nbytes,), np.uint8, new)
nines[:] = 9
print("new memory has the same address:", nines.ctypes.data == address)
print("register it:", said(runtime.hostRegister, nines.ctypes.data, nbytes, 0))
print("unregister the old, unmapped one:", said(runtime.hostUnregister, address))
print("unregister the new one:", said(runtime.hostUnregister, nines.ctypes.data))
print("the stream:", said(stream.synchronize))
print("the late copy read (7 is right):", sorted(set(np.unique(target.get()).tolist())))
"""

AFTER_A_FAULT = """
import cupy, numpy as np
cuda, runtime = cupy.cuda, cupy.cuda.runtime
event, memory, stream = cuda.Event(), cupy.zeros(1), cuda.Stream(non_blocking=True)
pinned = cuda.alloc_pinned_memory(8)
fault = cupy.RawKernel('extern "C" __global__ void fault(int *at) { *at = 1; }', "fault")
fault((1,), (1,), (np.uint64(8),))
for name, call in {
    "deviceSynchronize": runtime.deviceSynchronize,
    "getDevice": runtime.getDevice,
    "setDevice": lambda: runtime.setDevice(0),
    "getDeviceCount": runtime.getDeviceCount,
    "eventCreate": cuda.Event,
    "eventRecord": event.record,
    "eventSynchronize": event.synchronize,
    "streamWaitEvent": lambda: stream.wait_event(event),
    "streamSynchronize": stream.synchronize,
    "memGetInfo": runtime.memGetInfo,
    "malloc": lambda: runtime.malloc(512),
    "free": lambda: runtime.free(memory.data.ptr),
    "memcpyAsync": lambda: memory.set(np.zeros(1), stream=stream),
    "freeHost": lambda: runtime.freeHost(pinned.ptr),
}.items():
    try:
        call()
        print(name, "works", flush=True)
    except Exception as error:
        print(name, f"raises {type(error).__name__}: {error}", flush=True)
"""

LAST_ERROR = """
import cupy, numpy as np, torch
runtime, memory = cupy.cuda.runtime, np.zeros(1 << 20, np.uint8)
torch.zeros(1, device="cuda")
runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
try:
    runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
    print("registering twice works")
except runtime.CUDARuntimeError as error:
    print("registering twice:", error)
try:
    print("PyTorch after that:", (torch.zeros(8, device="cuda") + 1).sum().item())
except Exception as error:
    print("PyTorch after that raises", error)
print("CUDA's last error is", runtime.getLastError() if hasattr(runtime, "getLastError") else "?")
"""

FIRST_BATCH = """
import sys, time
begin = time.perf_counter()
import cupy
from h5async import AsyncReader, Field
imported = time.perf_counter()
cupy.zeros(1)
cupy.cuda.runtime.deviceSynchronize()
context = time.perf_counter()
field = Field("x", axes=(0, 3, 1, 2), scale=1 / 255)
options = {"hdf5_path": sys.argv[1], "batch_size": 64, "device": "cuda"}
with AsyncReader(fields={"x": field}, **options) as reader:
    for number in range(3):
        reader.get_next_batch()
        cupy.cuda.runtime.deviceSynchronize()
        print(f"batch {number}: {time.perf_counter() - context:.3f} s after the context")
print(f"imports {imported - begin:.3f} s, context {context - imported:.3f} s")
"""

HOLD_A_CONTEXT = """
import sys, cupy
cupy.cuda.runtime.free(0)
cupy.cuda.runtime.deviceSynchronize()
print("made", flush=True)
sys.stdin.read()
"""


def asked(code: str, *arguments: str) -> list[str]:
    """Run a question in a process of its own; return the lines of its answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        return [*said.splitlines(), "it did not end within 60 seconds"]
    lines = done.stdout.splitlines()
    if done.returncode:
        lines += [f"exit status {done.returncode}", *done.stderr.splitlines()[-3:]]
    return lines


def software() -> dict[str, Any]:
    """Return versions and places of what others bring: CUDA's parts, PyTorch, JAX."""
    runtime = cupy.cuda.runtime
    found: dict[str, Any] = {
        "runtime, driver": [runtime.runtimeGetVersion(), runtime.driverGetVersion()],
        "nvrtc": cupy.cuda.nvrtc.getVersion(),
    }
    try:
        found["nvcomp"] = load_nvcomp().version
    except Exception as error:
        found["nvcomp"] = str(error)
    try:
        nvidia = importlib.import_module("nvidia")
        found["nvidia"] = [str(nvidia.__file__), *map(str, nvidia.__path__)]
    except ImportError as error:
        found["nvidia"] = str(error)
    for name in ("torch", "jax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def properties() -> dict[str, Any]:
    """Return the properties of the GPU that are plain numbers, and its name."""
    found = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {"name": found["name"].decode()} | {
        key: value for key, value in sorted(found.items()) if isinstance(value, int | float)
    }


def rounding(path: Path) -> dict[str, str]:
    """Compare casts and scales whose rounding is delicate with the CPU's, bit for bit."""
    every = np.arange(65536)
    half = every.astype("u2").view("f2")
    half = half[np.isfinite(half)]
    edges = np.array([2**63 - 1, -(2**63), 2**53 + 1, 2**24 + 1, 2**25 + 3, -1], "i8")
    more: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"scale": 3.0, "offset": 1.0}]
    cases = [(every.astype(kind), {"dtype": "f2"} | one) for kind in ("u2", "i2") for one in more]
    for to in ("f4", "f8"):
        cases += [(edges, {"dtype": to}), (edges.view("u8"), {"dtype": to})]
        cases += [(half, {"dtype": to}), (half, {"dtype": to, "scale": 0.1})]
    cases.append((half, {"dtype": "f2", "scale": 0.1, "offset": 0.3}))
    cases.append((np.zeros((5, 0, 3), "f4"), {"dtype": "f8"}))
    found = {}
    for values, options in cases:
        name = f"{values.dtype} {values.shape} as {options}"
        with np.errstate(all="ignore"):
            try:
                found[name] = difference(delivered(path, values, Field("x", **options))) or "same"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def context_nbytes() -> dict[str, Any]:
    """Return what a context of another process takes of the GPU's memory."""
    cupy.zeros(1)
    before = cupy.cuda.runtime.memGetInfo()[0]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_CONTEXT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        said = other.stdout.readline().strip()
        taken = before - cupy.cuda.runtime.memGetInfo()[0]
        other.communicate("")
    return {"said": said, "MB": round(taken / 1e6, 1)}


def main() -> None:
    options = parse_options(__doc__)
    findings = Findings(options.out / "probe.json")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.h5")
        delivered(path, np.zeros((256, 96, 96, 3), np.uint8), Field("x"))
        questions = {
            "software": software,
            "properties": properties,
            "a new process": lambda: asked(FIRST_BATCH, str(path)),
            "a second new process": lambda: asked(FIRST_BATCH, str(path)),
            "rounding": lambda: rounding(Path(folder, "rounding.h5")),
            "a context": context_nbytes,
            "pinned memory that is unregistered late": lambda: asked(LATE_UNREGISTERING),
            "a failed call, and PyTorch": lambda: asked(LAST_ERROR),
            "after a fault": lambda: asked(AFTER_A_FAULT),
        }
        for name, question in questions.items():
            begin = time.perf_counter()
            try:
                found = question()
            except Exception as error:  # the other questions are asked all the same
                found = f"{type(error).__name__}: {error}"
            findings.note(name, found)
            findings.note(f"{name}, seconds", round(time.perf_counter() - begin, 2))


if __name__ == "__main__":
    main()
