"""`pin_memory`: batches on the host that PyTorch copies to a GPU while the program goes on.

No GPU is needed: a stand-in for `torch.cuda` does copies when the test says so.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each

from h5async import AsyncReader, ConfigError, DeviceError, Field
from h5async.deliver.pinned import Pinning

N = 40


class FakeCuda:
    """`torch.cuda`: streams do nothing until an event on them is waited for, or `run` is called."""

    def __init__(self, used=(0,)):
        self.used, self.registered, self.waiting = set(used), {}, threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()
        self.queue, self.lock = [], threading.Lock()
        self.refuses = 0
        self.last_error = 0

    def is_available(self):
        return True

    def device_count(self):
        return 3

    def current_stream(self, device):
        assert device in self.used, "a context would be made where there was none"
        return self

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):
        assert address % 4096 == 0
        self.last_error = self.refuses
        if not self.refuses:
            self.registered[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address):
        assert is_mapped(address), "unregistered too late"
        del self.registered[address]
        return 0

    def set_device(self, number):
        assert number == self.device_count(), "the current device is the program's"
        self.last_error = 0  # as PyTorch does when it raises
        raise RuntimeError("CUDA error: invalid device ordinal")

    def synchronize(self, device):
        assert device in self.used, "a context would be made where there was none"
        self.waiting.set()
        assert self.may_run.wait(60)
        self.run(len(self.queue))

    def cudaGetErrorString(self, error):
        return "out of memory"

    def copy_later(self, source, target):
        """Copy at the GPU's leisure, as ``.to("cuda", non_blocking=True)`` does."""
        at = source.ctypes.data
        assert any(a <= at < a + n for a, n in self.registered.items()), "not pinned"
        with self.lock:
            self.queue.append((source, target))

    def run(self, count):
        with self.lock:
            for source, target in self.queue[:count]:
                np.copyto(target, source)
            del self.queue[:count]

    def Event(self, blocking):
        assert blocking
        return FakeEvent(self)


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return True
    return False


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.todo = len(stream.queue)

    def synchronize(self):
        self.cuda.waiting.set()
        assert self.cuda.may_run.wait(200)
        self.cuda.run(self.todo)


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    torch = types.ModuleType("torch")
    torch.__version__ = "0"
    torch.cuda = cuda
    torch._C = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda d: d in cuda.used)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return cuda


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.random.default_rng(1).normal(size=(N, 300))
        file["labels"] = np.arange(N)
    return path


def options(path, **more):
    fields = {"data": Field("data", dtype="f4"), "labels": "labels"}
    return {"hdf5_path": path, "fields": fields, "batch_size": 8, "pin_memory": True, **more}


@each("num_threads", [0, 1, 3])
@each("prefetch", [1, 2, 3])
def test_late_copies_see_their_batch(path, cuda, num_threads, prefetch):
    with h5py.File(path) as file:
        data = file["data"][...].astype("f4")
    kept = []
    more = {"num_threads": num_threads, "prefetch": prefetch, "shuffle": "full"}
    with AsyncReader(**options(path, **more)) as reader:
        for _ in range(4):
            for batch in reader:
                kept.append((batch.index, np.zeros_like(batch.data), np.zeros_like(batch.labels)))
                for source, target in zip(batch, kept[-1][1:], strict=True):
                    cuda.copy_later(source, target)
        cuda.run(None)
    assert len(kept) == 20
    for index, images, labels in kept:
        assert np.array_equal(images, data[index])
        assert np.array_equal(labels, index)


def test_a_slot_is_not_refilled_before_the_copy_is_done(path, cuda):
    with AsyncReader(**options(path, prefetch=1, num_threads=1, timeout=200)) as reader:
        batch = reader.get_next_batch()
        held, values = batch.data, batch.data.copy()
        cuda.copy_later(held, np.zeros_like(held))
        cuda.may_run.clear()
        cuda.waiting.clear()
        getter = threading.Thread(target=reader.get_next_batch)
        getter.start()
        assert cuda.waiting.wait(200)
        assert np.array_equal(held, values)
        cuda.may_run.set()
        getter.join(200)
        assert not np.array_equal(held, values)


def test_memory_is_unpinned_when_its_last_array_goes(path, cuda):
    reader = AsyncReader(**options(path))
    assert len(cuda.registered) == 2  # slots
    batch = reader.get_next_batch()
    cuda.copy_later(batch.data, target := np.zeros_like(batch.data))
    expected = batch.data.copy()
    labels = batch.labels
    cuda.queue[:] = [(expected, target)]  # the stand-in must not keep the memory itself
    reader.close()
    del reader, batch
    gc.collect()
    assert len(cuda.registered) == 1
    assert not cuda.queue, "what was on its way was not waited for"
    assert labels.tolist() == list(range(8))
    del labels
    gc.collect()
    assert not cuda.registered


def test_only_gpus_in_use_are_asked(cuda):
    cuda.used = {0, 2}
    assert len(Pinning().record()) == 2


def test_without_a_gpu_it_says_what_to_do(path, cuda, monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"no GPU; .*set it to torch.cuda.is_available"):
        AsyncReader(**options(path))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="PyTorch pins memory, and is not installed"):
        AsyncReader(**options(path))


def test_memory_that_cannot_be_pinned(path, cuda):
    cuda.refuses = 2
    with pytest.raises(DeviceError, match=r"could not be pinned \(out of memory\); make batch_si"):
        AsyncReader(**options(path))
    assert cuda.last_error == 0, "PyTorch's next kernel raises it"


def test_copies_of_another_thread_are_waited_for_before_memory_is_unpinned(path, cuda, monkeypatch):
    """The last batch is not handed back, and whoever lets go of it has streams of its own."""
    reader = AsyncReader(**options(path))
    batch = reader.get_next_batch()
    target, expected = np.zeros_like(batch.data), batch.data.copy()
    cuda.queue[:] = [(expected, target)]
    idle = types.SimpleNamespace(queue=[])
    monkeypatch.setattr(cuda, "current_stream", lambda device: idle)  # this thread's
    held = [batch]
    del batch
    reader.close()
    del reader
    other = threading.Thread(target=held.clear)
    other.start()
    other.join(60)
    gc.collect()
    assert not cuda.registered
    assert np.array_equal(target, expected), "what was on its way was not waited for"


@pytest.mark.parametrize("when", ["record", "synchronize"])
def test_a_fault_of_the_gpu_is_a_device_error(path, cuda, monkeypatch, when):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with AsyncReader(**options(path, prefetch=1, timeout=60)) as reader:
        reader.get_next_batch()
        monkeypatch.setattr(FakeEvent, when, fail)
        monkeypatch.setattr(cuda, "synchronize", fail)
        with pytest.raises(DeviceError, match="an illegal memory access"):
            reader.get_next_batch()


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"device": "cuda:1"}, {"cache": "device"}])
def test_it_is_for_batches_on_the_host(path, other):
    with pytest.raises(ConfigError, match="pin_memory leaves batches on the host, found"):
        AsyncReader(**options(path, **other))
