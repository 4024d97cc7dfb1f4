"""Tests of one kind for two kinds of GPU: a stand-in for CuPy, and CuPy over simulated GPUs.

`use_gpu` returns `fake_cupy` and `fake_nvcomp`, which need nothing installed; under
``scripts/test_gpu`` it returns CuPy itself, over the simulated driver of `simulated_gpu`, which
shows more. The module of a test that is to run there too has ``pytestmark = pytest.mark.any_gpu``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os

import fake_cupy
import fake_nvcomp

import h5async.deliver.cuda
import h5async.deliver.devicedecode
import h5async.deliver.devicepolicy
import h5async.deliver.gpu


class _OnCupy:
    """What tests do with `fake_cupy.Simulation`, on CuPy."""

    def __init__(self, cupy):
        self._cupy = cupy

    def run_all(self):
        self._cupy.cuda.runtime.deviceSynchronize()


def use_gpu(monkeypatch, seed, damage=None):
    """Have readers use a GPU; return CuPy, what has `run_all`, and what counts nvCOMP's calls.

    Parameters
    ----------
    monkeypatch, seed
        Of the test, and of the order of work.
    damage
        What nvCOMP has decoded, bytes, goes through this.
    """
    if "SIMULATED_GPU" not in os.environ:
        return use_fake_gpu(monkeypatch, seed, damage)
    simulated_gpu = importlib.import_module("simulated_gpu")
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(0).use()
    simulated_gpu.simulation().reset(seed)
    decoders = importlib.import_module("simulated_gpu.nvcomp").DECODERS
    monkeypatch.setattr(decoders, "damage", damage)
    monkeypatch.setattr(decoders, "calls", 0)
    monkeypatch.setattr(decoders, "blocks", 0)
    return cupy, _OnCupy(cupy), decoders


def use_fake_gpu(monkeypatch, seed, damage=None):
    """Have readers use the stand-in for CuPy in any case; else as `use_gpu`."""
    cupy, simulation = fake_cupy.make(seed)
    nvcomp = fake_nvcomp.FakeNvcomp(cupy, simulation, damage)
    monkeypatch.setattr(h5async.deliver.devicepolicy, "import_cupy", lambda: cupy)
    monkeypatch.setattr(h5async.deliver.gpu, "load_driver", lambda: fake_cupy.driver_of(cupy))
    monkeypatch.setattr(h5async.deliver.devicedecode, "load_nvcomp", lambda: nvcomp)
    return cupy, simulation, nvcomp


_PARAMETERS = {"cuEventQuery": 1, "cuEventSynchronize": 1, "cuEventRecord": 2}  # else 3


def replace_in_core(monkeypatch, replaced):
    """Replace functions of the driver that the core's uploads call.

    ``replaced[name](of_driver, streams, *arguments)``: `streams` are those of the uploads.
    """
    of_core = h5async.deliver.cuda.core_uploads

    def with_others(core, gpu, streams, *more):
        found = of_core(core, gpu, streams, *more)
        for name, instead in replaced.items():
            types = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
            kind = ctypes.CFUNCTYPE(*types[: 1 + _PARAMETERS.get(name, 3)])
            function = kind(functools.partial(instead, kind(getattr(found.struct, name)), streams))
            setattr(found.struct, name, ctypes.cast(function, ctypes.c_void_p).value)
            found = found._replace(keep=(*found.keep, function))
        return found

    monkeypatch.setattr(h5async.deliver.cuda, "core_uploads", with_others)


def leave_out_in_core(guard, monkeypatch):
    """Have the core's uploads lack a guard: some calls of the driver do nothing."""
    names = {"release": "cuEventRecord", "acquire": "cuStreamWaitEvent"}
    place = 1 if guard == "release" else 0  # of the stream

    def call(of_driver, streams, *arguments):
        is_left_out = guard == "wait_writable" or arguments[place] not in streams
        return 0 if is_left_out else of_driver(*arguments)

    replace_in_core(monkeypatch, {names.get(guard, "cuEventQuery"): call})
