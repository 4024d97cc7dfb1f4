"""`pin_memory`: batches on the host that PyTorch copies to a GPU while the program goes on.

No GPU is needed: a stand-in for `torch.cuda` does copies when the test says so.
"""

from __future__ import annotations

import gc
import io
import itertools
import sys
import threading
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each

from h5async import (
    AsyncReader,
    ConfigError,
    DeviceError,
    Field,
    ImageField,
    RaggedField,
    SparseField,
)
from h5async.deliver.device import Pinning

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
        assert not any(a < address + nbytes and address < a + n for a, n in self.registered.items())
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
        is_in = [a <= at and at + source.nbytes <= a + n for a, n in self.registered.items()]
        assert any(is_in), "not pinned"
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

    def query(self):
        return self.todo == 0

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


@pytest.mark.slow
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
    with pytest.raises(DeviceError, match="PyTorch, which pins memory, is not installed"):
        AsyncReader(**options(path))


def test_memory_that_cannot_be_pinned(path, cuda):
    cuda.refuses = 2
    with pytest.raises(DeviceError, match=r"could not be pinned \(out of memory\); make batch_si"):
        AsyncReader(**options(path))
    assert cuda.last_error == 0, "PyTorch's next kernel raises it"


@pytest.mark.slow
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
        monkeypatch.setattr(FakeEvent, "query", fail)
        monkeypatch.setattr(cuda, "synchronize", fail)
        with pytest.raises(DeviceError, match="an illegal memory access"):
            reader.get_next_batch()


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"device": "cuda:1"}, {"cache": "device"}])
def test_it_is_for_batches_on_the_host(path, other):
    with pytest.raises(ConfigError, match="pin_memory leaves batches on the host, found"):
        AsyncReader(**options(path, **other))


# --- samples of any length ---------------------------------------------------------------------


@pytest.fixture
def ragged_path(tmp_path):
    """Samples of 0 to 5,000 values, and later ever longer ones."""
    rng = np.random.default_rng(3)
    path = tmp_path / "ragged.h5"
    lengths = np.append(rng.integers(0, 5000, N - 4), [20_000, 60_000, 70_000, 300_000])
    ends, total = np.cumsum(lengths), int(lengths.sum())
    with h5py.File(path, "w") as file:
        file["values"], file["ends"] = rng.integers(-999, 999, total).astype("i2"), ends
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (N, 400_000)
        group["data"] = rng.normal(size=total)
        group["indices"] = np.concatenate([np.arange(n) for n in lengths]).astype("i4")
        group["indptr"] = np.append(0, ends)
        narrow = file.create_group("narrow")
        narrow.attrs["encoding-type"], narrow.attrs["shape"] = "csr_matrix", (N, 3)
        narrow["data"], narrow["indices"] = np.arange(2.0 * N), np.tile([0, 2], N)
        narrow["indptr"] = 2 * np.arange(N + 1)
    return path


RAGGED = {
    "values": RaggedField("values", offsets="ends", offsets_kind="ends"),
    "scaled": RaggedField("values", offsets="ends", offsets_kind="ends", dtype="f4", scale=0.5),
    "x": SparseField("X"),
    "dense": SparseField("narrow", dense=True),
    "padded": RaggedField("values", offsets="ends", offsets_kind="ends", pad_to=9),
}


def large_pieces(batch):
    """Return what is pinned of a batch: not the offsets, which CUDA copies at once."""
    x = batch.x
    return batch.values.values, batch.scaled.values, x.data, x.indices, batch.dense, batch.padded


@pytest.mark.slow
@each("num_threads", [0, 3])
@each("prefetch", [1, 2])
def test_late_copies_of_samples_of_any_length(ragged_path, cuda, num_threads, prefetch):
    options = {"hdf5_path": ragged_path, "fields": RAGGED, "batch_size": 3, "shuffle": "full"}
    options |= {"num_threads": num_threads, "prefetch": prefetch}
    kept, wanted = [], []
    with (
        AsyncReader(pin_memory=True, **options) as reader,
        AsyncReader(device="cpu", copy=True, **options) as truth,
    ):
        for batch, other in zip(
            itertools.chain(reader, reader), itertools.chain(truth, truth), strict=True
        ):
            assert batch.index.tolist() == other.index.tolist()
            for source, value in zip(large_pieces(batch), large_pieces(other), strict=True):
                kept.append(np.zeros_like(source))
                wanted.append(value)
                if source.nbytes:
                    cuda.copy_later(source, kept[-1])
        cuda.run(None)
    assert all(map(np.array_equal, kept, wanted))


@pytest.mark.slow
def test_what_is_pinned_grows_with_the_batches(ragged_path, cuda):
    fields = {"values": RAGGED["values"]}
    options = {"hdf5_path": ragged_path, "fields": fields, "prefetch": 1, "num_threads": 0}
    with h5py.File(ragged_path) as file:
        lengths = np.diff(file["ends"][()], prepend=0)
    bound, mean = 2 * int(np.sort(lengths)[-4:].sum()), 2 * 4 * lengths.mean()
    with AsyncReader(batch_size=4, pin_memory=True, **options) as reader:
        seen = [max(cuda.registered.values())]
        assert mean <= seen[0] <= mean * 1.25 + 2
        for batch in reader:
            seen.append(max(cuda.registered.values()))
            if seen[-1] > seen[-2]:
                assert seen[-1] == min(bound, batch.values.values.nbytes * 5 // 4)
        assert len(set(seen)) > 1
        assert len(cuda.registered) == 1
        array = batch.values.values
    del batch, reader
    gc.collect()
    assert cuda.registered
    del array
    gc.collect()
    assert not cuda.registered


def test_more_memory_that_cannot_be_pinned(ragged_path, cuda):
    """The batch fails, and the next one is pinned anew."""
    fields = {"values": RAGGED["values"]}
    options = {"hdf5_path": ragged_path, "fields": fields, "prefetch": 1, "num_threads": 1}
    with AsyncReader(batch_size=1, pin_memory=True, **options) as reader:
        for _ in range(N - 4):
            reader.get_next_batch()
        cuda.refuses = 2
        with pytest.raises(DeviceError, match=r"could not be pinned \(out of memory\)"):
            list(reader)
        cuda.refuses = 0
        for batch in reader:
            if batch.values.values.nbytes:
                cuda.copy_later(batch.values.values, np.zeros_like(batch.values.values))


def test_pixels_are_pinned(tmp_path, cuda):
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("cv2", reason="needs OpenCV")
    path = tmp_path / "images.h5"
    with h5py.File(path, "w") as file:
        node = file.create_dataset("jpeg", (N,), h5py.vlen_dtype("u1"))
        for number in range(N):
            stream = io.BytesIO()
            Image.new("RGB", (20 + number % 2, 30), (number, 2, 3)).save(stream, "JPEG")
            node[number] = np.frombuffer(stream.getvalue(), np.uint8)
    fields = {"any": ImageField("jpeg"), "sized": ImageField("jpeg", size=9, dtype="f4")}
    options = {"hdf5_path": path, "fields": fields, "batch_size": 4}
    with (
        AsyncReader(pin_memory=True, **options) as reader,
        AsyncReader(device="cpu", **options) as o,
    ):
        for batch, other in zip(reader, o, strict=True):
            for source, wanted in (
                (batch["any"].values, other["any"].values),
                (batch.sized, other.sized),
            ):
                cuda.copy_later(source, target := np.zeros_like(source))
                cuda.run(None)
                assert np.array_equal(target, wanted)
