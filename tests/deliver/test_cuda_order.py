"""The order of uploads, uses and refills on a GPU, in any order of execution that CUDA allows.

These tests need no GPU: `fake_cupy` does a stream's work late and in random order, and so do the
simulated GPUs of ``scripts/test_gpu``. What a real GPU does with the same code is in test_gpu.py.
"""

from __future__ import annotations

import sys
import types

import h5py
import numpy as np
import pytest
from cases import each
from gpus import leave_out_in_core, use_fake_gpu, use_gpu

import h5async.deliver.cuda
import h5async.deliver.devicepolicy
import h5async.deliver.gpu
from h5async import AsyncReader, BatchExpiredError, DeviceError, Field

pytestmark = pytest.mark.any_gpu

N, BATCH = 24, 4


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "images.h5"
    values = np.random.default_rng(1).integers(0, 256, (N, 4, 5, 3), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file["data"] = values
        file["labels"] = np.arange(N)
    return path


def late_copies(cupy, reader, streams=1, epochs=2):
    """Copy each batch on a stream that does its work only when it must."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
    kept = []
    for turn in range(epochs * len(reader)):
        with streams[turn % len(streams)] as stream:
            reader.fetch_data()
            batch = reader.get_next_batch()
            kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
            event = cupy.cuda.Event()
            event.record(stream)  # the batch is handed back on the next stream, after this use
            streams[(turn + 1) % len(streams)].wait_event(event)
    return kept


def all_right(path, simulation, kept):
    simulation.run_all()
    with h5py.File(path) as file:
        data, labels = file["data"][...].transpose(0, 3, 1, 2), file["labels"][...]
    return all(
        np.array_equal(got.get(), data[index] / np.float32(2))
        and np.array_equal(marks.get(), labels[index])
        for index, got, marks in kept
    )


def run(path, monkeypatch, seed, prefetch, num_threads, streams=1):
    cupy, simulation, _ = use_gpu(monkeypatch, seed)
    fields = {"data": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"}
    options = {"batch_size": BATCH, "prefetch": prefetch, "num_threads": num_threads}
    with AsyncReader(
        hdf5_path=path, fields=fields, device="cuda", shuffle="full", **options
    ) as reader:
        return all_right(path, simulation, late_copies(cupy, reader, streams))


@each("prefetch", [1, 2, 3])
@each("num_threads", [0, 1, 3])
@each("streams", [1, 3])
def test_every_allowed_order_gives_the_right_batches(
    images, monkeypatch, prefetch, num_threads, streams
):
    for seed in range(20):
        assert run(images, monkeypatch, seed, prefetch, num_threads, streams)


@pytest.mark.wrong_on_purpose
@pytest.mark.parametrize("guard", ["acquire", "release", "wait_writable"])
def test_without_a_guard_some_order_gives_wrong_ones(images, monkeypatch, guard):
    monkeypatch.setattr(h5async.deliver.cuda.CudaSlot, guard, lambda self: None)
    if guard == "wait_writable":
        monkeypatch.setattr(h5async.deliver.cuda.CudaSlot, "is_writable", lambda self: True)
    leave_out_in_core(guard, monkeypatch)
    results = [run(images, monkeypatch, seed, prefetch=1, num_threads=0) for seed in range(20)]
    assert not all(results)


def test_postprocess_results_go_through_memory_of_their_own(images, monkeypatch):
    cupy, simulation, _ = use_gpu(monkeypatch, seed=3)

    def crop(data, labels):
        return data[:, : 1 + int(labels[0]) % 3].astype(np.float32), labels

    with AsyncReader(
        hdf5_path=images, batch_size=BATCH, device="cuda", postprocess=crop, prefetch=2
    ) as reader:
        kept = late_copies(cupy, reader)
        simulation.run_all()
    with h5py.File(images) as file:
        data, labels = file["data"][...], file["labels"][...]
    for index, got, marks in kept:
        assert got.dtype == np.float32
        assert np.array_equal(got.get(), data[index][:, : 1 + int(labels[index[0]]) % 3])
        assert np.array_equal(marks.get(), labels[index])


def test_cupy_without_a_gpu(images, monkeypatch):
    cupy, *_ = use_fake_gpu(monkeypatch, seed=0)

    def no_driver():
        error = cupy.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice")
        error.status = 100
        raise error

    cupy.cuda.runtime.getDeviceCount = no_driver
    with pytest.raises(DeviceError, match=r"finds no usable GPU \(cudaErrorNoDevice\).*nvidia-smi"):
        AsyncReader(hdf5_path=images, device="cuda")
    with AsyncReader(hdf5_path=images, device="auto") as reader:
        assert reader.device == "cpu"


def test_a_gpu_number_too_high(images, monkeypatch):
    use_fake_gpu(monkeypatch, seed=0)
    with pytest.raises(DeviceError, match="no GPU 3: CuPy finds 1"):
        AsyncReader(hdf5_path=images, device="cuda:3")


def test_no_cupy(images, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(h5async.deliver.devicepolicy.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"CuPy is not installed.*pip install 'h5async\[cuda13\]"):
        AsyncReader(hdf5_path=images, device="cuda")


def test_a_dtype_that_cupy_lacks(images, monkeypatch):
    use_gpu(monkeypatch, seed=0)
    with h5py.File(images, "r+") as file:
        file["text"] = np.array([b"one", b"two"])
    with pytest.raises(DeviceError, match=r'field "data": dtype \|S3'):
        AsyncReader(hdf5_path=images, data_field="text", labels_field=None, device="cuda")


CASTS = [
    ("u1", None, None, None),
    ("u1", "f4", 1 / 255, -0.5),
    ("u1", "f8", None, (1.0, 2.0, 3.0)),
    ("i2", "f4", (0.5, 2.0, 3.25), None),
    ("i8", "f4", None, None),
    ("f8", "f4", 0.1, 0.2),
    ("f4", "i4", None, None),
    ("f4", None, 3.0, None),
    ("f4", "f2", None, None),
    ("?", "f4", 2.0, 1.0),
    ("c8", None, None, None),
    (">u2", "f4", 0.5, None),
]


CHANNELS_FIRST = (0, 3, 1, 2)
MOVES = [
    (axes, *cast)
    for axes in (None, CHANNELS_FIRST, (0, 2, 1, 3))
    for cast in CASTS
    if axes == CHANNELS_FIRST or not isinstance(cast[2] or cast[3], tuple)
]


@pytest.mark.parametrize(("axes", "kind", "dtype", "scale", "offset"), MOVES)
def test_kernels_give_what_the_host_gives(tmp_path, monkeypatch, kind, dtype, scale, offset, axes):
    """The kernels' own source, compiled for the CPU; but not those of which only CuPy has types."""
    use_gpu(monkeypatch, seed=5)
    path = tmp_path / "cast.h5"
    values = np.random.default_rng(5).normal(0, 100, (N, 6, 5, 3)).astype(kind)
    with h5py.File(path, "w") as file:
        file["x"] = values
    options = {
        "hdf5_path": path,
        "batch_size": 7,
        "fields": {"x": Field("x", axes=axes, dtype=dtype, scale=scale, offset=offset)},
    }
    with (
        AsyncReader(device="cuda", **options) as reader,
        AsyncReader(device="cpu", **options) as host,
    ):
        for ours, theirs in zip(reader, host, strict=True):
            assert ours.x.dtype == theirs.x.dtype
            assert ours.x.get().tobytes() == theirs.x.tobytes()


@pytest.mark.slow
@each("prefetch", [1, 2])
@each("num_threads", [0, 3])
@each("drop_last", [False, True])
def test_a_device_cache_gives_the_same_batches(
    images, monkeypatch, prefetch, num_threads, drop_last
):
    fields = {"data": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"}
    options = {"batch_size": 5, "prefetch": prefetch, "num_threads": num_threads}
    for seed in range(10):
        cupy, simulation, _ = use_gpu(monkeypatch, seed)
        with AsyncReader(
            hdf5_path=images,
            fields=fields,
            device="cuda",
            cache="device",
            shuffle="full",
            drop_last=drop_last,
            **options,
        ) as reader:
            kept = late_copies(cupy, reader, epochs=3)
            simulation.run_all()
            if not drop_last:
                read = reader.stats().read_nbytes
                assert "100 % of the samples" in reader.stats().cache
                kept += late_copies(cupy, reader)
                assert reader.stats().read_nbytes == read
            assert all_right(images, simulation, kept)


def test_a_device_cache_that_does_not_fit(images, monkeypatch):
    cupy, *_ = use_fake_gpu(monkeypatch, seed=0)
    options = {"hdf5_path": images, "batch_size": BATCH, "device": "cuda", "cache": "device"}
    with AsyncReader(cache_bytes=N * (60 + 8) - 1, **options) as reader:
        late_copies(cupy, reader)
        assert reader.stats().cache.startswith("none: 1.6e-06 GB do not fit")
    with AsyncReader(cache_bytes=N * (60 + 8), **options) as reader:
        assert reader.stats().cache.startswith("device, 0 %")
    cupy.cuda.runtime.memGetInfo = lambda: (2000, 1 << 40)
    with AsyncReader(**options) as reader:
        assert reader.stats().cache.startswith("none: ")


def use_torch(monkeypatch, stream):
    """Pretend that PyTorch uses the GPU, on a stream of its own."""
    of_torch = types.SimpleNamespace(cuda_stream=stream.ptr)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, current_stream=lambda _: of_torch
    )
    internal = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda _: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, _C=internal))


@pytest.mark.parametrize("sees_torch", [True, False])
def test_a_batch_is_used_on_the_stream_of_torch(images, monkeypatch, sees_torch):
    results = []
    for seed in range(20):
        cupy, simulation, _ = use_gpu(monkeypatch, seed)
        stream = cupy.cuda.Stream(non_blocking=True)
        if sees_torch:
            use_torch(monkeypatch, stream)
        kept = []
        with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda", prefetch=1) as reader:
            for _ in range(8):
                batch = reader.get_next_batch()
                with stream:  # as PyTorch would: CuPy's current stream is another one
                    kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
            simulation.run_all()
        with h5py.File(images) as file:
            data = file["data"][...]
        results.append(all(np.array_equal(got.get(), data[index]) for index, got, _ in kept))
    assert all(results) == sees_torch


def test_batches_held_too_long_are_poisoned(images, monkeypatch):
    cupy, *_ = use_gpu(monkeypatch, seed=7)
    stream = cupy.cuda.Stream(non_blocking=True)
    use_torch(monkeypatch, stream)
    with (
        AsyncReader(
            hdf5_path=images, batch_size=BATCH, device="cuda", debug_lifetimes=True
        ) as reader,
        h5py.File(images) as file,
    ):
        values = file["data"][...]
        for _ in range(5):
            batch = reader.get_next_batch()
            data = batch.data
            stream.wait_event(cupy.cuda.get_current_stream().record())  # as DLPack does
            with stream:
                used_in_time = data.copy()
            reader.get_next_batch()
            with pytest.raises(BatchExpiredError):
                batch.data  # noqa: B018
            assert (data.get() == 255).all()
            assert np.array_equal(used_in_time.get(), values[batch.index])


def test_a_fault_of_the_gpu_is_a_device_error_and_the_reader_can_be_closed(images, monkeypatch):
    cupy, *_ = use_fake_gpu(monkeypatch, seed=0)

    def fault(*_):
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorIllegalAddress")

    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda", prefetch=1) as reader:
        reader.get_next_batch()
        monkeypatch.setattr(cupy.cuda.runtime, "streamWaitEvent", fault)
        with pytest.raises(DeviceError, match=r"could not be uploaded \(cudaErrorIllegalAddress"):
            reader.get_next_batch()
        cupy.cuda.runtime.deviceSynchronize = fault
    assert reader.stats().batches == 1, "what failed is none"


def test_a_driver_that_cannot_be_loaded_is_a_device_error(images, monkeypatch):
    use_fake_gpu(monkeypatch, seed=0)

    def fail():
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(h5async.deliver.gpu, "load_driver", fail)
    with pytest.raises(DeviceError, match="driver cannot be loaded"):
        AsyncReader(hdf5_path=images, device="cuda")


def test_a_batch_that_is_read_is_not_given_up_where_it_was_submitted_twice(images, monkeypatch):
    """An interruption has it submitted again; then the slot's last upload fails for the second."""
    use_fake_gpu(monkeypatch, seed=0)
    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda", num_threads=0) as reader:
        reader.get_next_batch()
        reader.fetch_data()
        delivery = reader._engine.delivery
        request = delivery._request_of(*reader._engine.ring.pending()[0])
        delivery._submit_later(delivery._submissions, request)

        def fail(slot):
            raise DeviceError("a fault")

        monkeypatch.setattr(h5async.deliver.cuda.CudaSlot, "wait_writable", fail)
        delivery._submit_later(delivery._submissions, request)
        assert reader._engine.ring.awaits(request.slot, request.serial)


def test_all_fields_of_a_whole_batch_are_uploaded_at_once(images, monkeypatch):
    cupy, simulation, _ = use_fake_gpu(monkeypatch, seed=0)
    sizes = []
    put = cupy.cuda.runtime.memcpyAsync

    def note(target, source, nbytes, kind, stream):
        sizes.append(nbytes)
        put(target, source, nbytes, kind, stream)

    with AsyncReader(hdf5_path=images, batch_size=10, device="cuda", prefetch=1) as reader:
        monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", note)
        kept = [(b.index, b.data.copy(), b.labels.copy()) for b in reader]
        simulation.run_all()
    assert [s for s in sizes if s > 80][:2] == [1024 + 512, 1024 + 512]  # 600 and 80 bytes
    assert sizes[2:4] == [4 * 60, 4 * 8]  # the last batch is short
    with h5py.File(images) as file:
        data = file["data"][...]
    for index, got, labels in kept:
        assert np.array_equal(got.get(), data[index])
        assert np.array_equal(labels.get(), index)
