"""Tests of one kind for two kinds of GPU: a stand-in for CuPy, and CuPy over simulated GPUs.

`use_gpu` returns `fake_cupy` and `fake_nvcomp`, which need nothing installed; under
``scripts/test_gpu`` it returns CuPy itself, over the simulated driver of `simulated_gpu`, which
shows more. The module of a test that is to run there too has ``pytestmark = pytest.mark.any_gpu``.
"""

from __future__ import annotations

import importlib
import os

import fake_cupy
import fake_nvcomp

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
