"""The order of uploads, uses and refills on a GPU, in any order of execution that CUDA allows.

These tests need no GPU: `fake_cupy` does a stream's work late and in random order. What a real
GPU does with the same code is in test_gpu.py.
"""

from __future__ import annotations

import fake_cupy
import h5py
import numpy as np
import pytest

import h5async.device
from h5async import AsyncReader, DeviceError, Field

N, BATCH = 24, 4


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "images.h5"
    values = np.random.default_rng(1).integers(0, 256, (N, 4, 5, 3), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file["data"] = values
        file["labels"] = np.arange(N)
    return path


def use_gpu(monkeypatch, seed):
    cupy, simulation = fake_cupy.make(seed)
    monkeypatch.setattr(h5async.device, "_import_cupy", lambda: cupy)
    return cupy, simulation


def late_copies(cupy, reader, streams=1):
    """Copy each batch on a stream that does its work only when it must."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
    kept = []
    for turn in range(2 * len(reader)):
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
        np.array_equal(got, data[index] / np.float32(2)) and np.array_equal(marks, labels[index])
        for index, got, marks in kept
    )


def run(path, monkeypatch, seed, prefetch, num_threads, streams=1):
    cupy, simulation = use_gpu(monkeypatch, seed)
    fields = {"data": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"}
    options = {"batch_size": BATCH, "prefetch": prefetch, "num_threads": num_threads}
    with AsyncReader(
        hdf5_path=path, fields=fields, device="cuda", shuffle="full", **options
    ) as reader:
        return all_right(path, simulation, late_copies(cupy, reader, streams))


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("streams", [1, 3])
def test_every_allowed_order_gives_the_right_batches(
    images, monkeypatch, prefetch, num_threads, streams
):
    for seed in range(20):
        assert run(images, monkeypatch, seed, prefetch, num_threads, streams)


@pytest.mark.parametrize("guard", ["acquire", "release", "wait_writable"])
def test_without_a_guard_some_order_gives_wrong_ones(images, monkeypatch, guard):
    monkeypatch.setattr(h5async.device.CudaSlot, guard, lambda self: None)
    results = [run(images, monkeypatch, seed, prefetch=1, num_threads=0) for seed in range(20)]
    assert not all(results)


def test_postprocess_results_go_through_memory_of_their_own(images, monkeypatch):
    cupy, simulation = use_gpu(monkeypatch, seed=3)

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
        assert np.array_equal(got, data[index][:, : 1 + int(labels[index[0]]) % 3])
        assert np.array_equal(marks, labels[index])


def test_cupy_without_a_gpu(images, monkeypatch):
    cupy, _ = use_gpu(monkeypatch, seed=0)

    def no_driver():
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice")

    cupy.cuda.runtime.getDeviceCount = no_driver
    with pytest.raises(DeviceError, match=r"finds no usable GPU \(cudaErrorNoDevice\).*nvidia-smi"):
        AsyncReader(hdf5_path=images, device="cuda")
    with AsyncReader(hdf5_path=images, device="auto") as reader:
        assert reader.device == "cpu"


def test_a_gpu_number_too_high(images, monkeypatch):
    use_gpu(monkeypatch, seed=0)
    with pytest.raises(DeviceError, match="no GPU 3: CuPy finds 1"):
        AsyncReader(hdf5_path=images, device="cuda:3")


def test_no_cupy(images, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(h5async.device.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"CuPy is not installed.*pip install 'h5async\[cuda13\]"):
        AsyncReader(hdf5_path=images, device="cuda")


def test_a_dtype_that_cupy_lacks(images, monkeypatch):
    use_gpu(monkeypatch, seed=0)
    with h5py.File(images, "r+") as file:
        file["text"] = np.array([b"one", b"two"])
    with pytest.raises(DeviceError, match=r'field "data": dtype \|S3'):
        AsyncReader(hdf5_path=images, data_field="text", labels_field=None, device="cuda")
