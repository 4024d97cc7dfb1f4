"""CUDA: what only a GPU can show. Buffers are poisoned, and slow kernels hold the stream back."""

from __future__ import annotations

import gc

import h5py
import numpy as np
import pytest

import h5async.device
from h5async import AsyncReader, DeviceError, Field

pytestmark = pytest.mark.gpu

N, BATCH = 96, 8
SPIN_CYCLES = 20_000_000  # some 10 ms: far longer than it takes to fill and upload a batch
POISON = 0xA5


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def spin(cupy):
    """Launch a kernel that holds the current stream back."""
    source = """extern "C" __global__ void spin(long long cycles) {
        long long start = clock64(); while (clock64() - start < cycles); }"""
    kernel = cupy.RawKernel(source, "spin")
    return lambda: kernel((1,), (1,), (np.int64(SPIN_CYCLES),))


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(7)
    path = tmp_path / "images.h5"
    with h5py.File(path, "w") as file:
        file["data"] = rng.integers(0, 256, (N, 16, 24, 3), dtype=np.uint8)
        file["labels"] = np.arange(N)
    return path


def poison(reader):
    """Overwrite every buffer of a new reader, so that what is not written again shows."""
    for slot in reader._engine.slots:
        for array in (*slot.memory.raw, *slot.memory.out):
            array.reshape(-1).view(np.uint8)[...] = POISON
        for array in (*slot._raw, *slot._delivered):
            array.reshape(-1).view(np.uint8)[...] = POISON


def late_copies(reader, spin, epochs=2):
    """Copy each batch behind a slow kernel on the current stream, without waiting for anything."""
    kept = []
    for _ in range(epochs):
        for batch in reader:
            spin()
            kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
    return kept


def expected(path, index):
    with h5py.File(path) as file:
        return file["data"][...][index], file["labels"][...][index]


def all_right(path, kept):
    return all(
        np.array_equal(data.get(), expected(path, index)[0])
        and np.array_equal(labels.get(), expected(path, index)[1])
        for index, data, labels in kept
    )


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_no_slot_is_overwritten_while_a_slow_stream_uses_it(
    cupy, spin, images, prefetch, num_threads
):
    options = {"batch_size": BATCH, "prefetch": prefetch, "num_threads": num_threads}
    with AsyncReader(hdf5_path=images, shuffle="full", device="cuda", **options) as reader:
        poison(reader)
        kept = late_copies(reader, spin)
        assert all_right(images, kept)
    assert len(kept) == 2 * N // BATCH


def test_the_same_on_a_stream_of_the_callers_own(cupy, spin, images):
    stream = cupy.cuda.Stream(non_blocking=True)
    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda") as reader, stream:
        poison(reader)
        kept = late_copies(reader, spin)
        stream.synchronize()
        assert all_right(images, kept)


def test_batches_may_be_used_on_alternating_streams(cupy, spin, images):
    """A batch is handed back on the stream that is current then."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    kept = []
    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda") as reader:
        poison(reader)
        reader.fetch_data()
        for turn in range(len(reader)):
            with streams[turn % 3] as stream:
                batch = reader.get_next_batch()
                reader.fetch_data()
                spin()
                kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
                following = streams[(turn + 1) % 3]
                following.wait_event(stream.record())
        for stream in streams:
            stream.synchronize()
        assert all_right(images, kept)


def test_several_readers_at_once(cupy, spin, images):
    options = {"hdf5_path": images, "batch_size": BATCH, "device": "cuda", "shuffle": "full"}
    with AsyncReader(seed=1, **options) as one, AsyncReader(seed=2, **options) as two:
        poison(one)
        poison(two)
        kept = []
        for batches in zip(one, two, strict=True):
            spin()
            kept += [(b.index, b.data.copy(), b.labels.copy()) for b in batches]
        assert all_right(images, kept)


@pytest.mark.parametrize("guard", ["release", "wait_writable", "acquire"])
def test_these_tests_see_a_missing_guard(cupy, spin, images, guard, monkeypatch):
    monkeypatch.setattr(h5async.device.CudaSlot, guard, lambda self: None)
    stream = cupy.cuda.Stream(non_blocking=True)
    with AsyncReader(hdf5_path=images, batch_size=BATCH, prefetch=1, device="cuda") as reader:
        if guard == "acquire":
            # Hold the copy stream back instead, so that the caller's stream comes first.
            with reader._engine.device.copy_stream:
                spin()
        with stream:
            poison(reader)
            kept = late_copies(reader, (lambda: None) if guard == "acquire" else spin)
            stream.synchronize()
        cupy.cuda.runtime.deviceSynchronize()
        assert not all_right(images, kept)


NUMERIC = "?,u1,i1,u2,i2,u4,i4,u8,i8,f2,f4,f8,c8,c16,>u2,>i4,>i8,>f4,>f8,>c16".split(",")


@pytest.mark.parametrize("kind", NUMERIC)
@pytest.mark.parametrize("axes", [None, (0, 3, 1, 2)])
def test_every_dtype_is_what_h5py_gives(cupy, tmp_path, kind, axes):
    path = tmp_path / "kind.h5"
    raw = np.random.default_rng(3).integers(0, 256, 20 * 5 * 4 * 3 * 16, dtype=np.uint8)
    dtype = np.dtype(kind)
    values = raw[: 20 * 60 * dtype.itemsize].view(dtype).reshape(20, 5, 4, 3)
    if dtype.kind == "b":
        values = values.view("u1") > 99
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(3, 5, 4, 3), compression="gzip")
    fields = {"x": Field("x", axes=axes)}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=7, device="cuda") as reader:
        poison(reader)
        assert reader.device.startswith("cuda:")
        for batch in reader:
            want = values[batch.index].transpose(axes or (0, 1, 2, 3))
            want = np.ascontiguousarray(want, want.dtype.newbyteorder("="))
            assert isinstance(batch.x, cupy.ndarray)
            assert batch.x.dtype == want.dtype
            assert batch.x.flags.c_contiguous
            assert batch.x.get().tobytes() == want.tobytes()


CASTS = [
    ("u1", "f4", 1 / 255, -0.5),
    ("u1", "f2", (0.5, 2.0, 3.25), (0.1, -0.2, 0.3)),
    ("u1", "f8", None, (1.0, 2.0, 3.0)),
    ("i8", "f4", 1e-3, None),
    ("i8", "f2", 1e-3, 1.0),
    ("f8", "f2", None, None),
    ("f8", "f4", 0.1, 0.2),
    ("f4", "f2", 0.1, 0.2),
    (">f4", "f4", 0.1, 0.2),
    ("f4", "f4", 3.0, None),
    ("?", "f4", 2.0, 1.0),
    ("f4", "c8", None, None),
    ("i4", "?", None, None),
    ("u2", "i8", None, None),
]


@pytest.mark.parametrize(("kind", "dtype", "scale", "offset"), CASTS)
def test_permute_cast_and_scale_give_the_bits_of_the_host(
    cupy, tmp_path, kind, dtype, scale, offset
):
    path = tmp_path / "cast.h5"
    values = np.random.default_rng(5).normal(0, 100, (40, 6, 5, 3)).astype(kind)
    with h5py.File(path, "w") as file:
        file["x"] = values
    options = {
        "hdf5_path": path,
        "batch_size": 9,
        "fields": {"x": Field("x", axes=(0, 3, 1, 2), dtype=dtype, scale=scale, offset=offset)},
    }
    with (
        AsyncReader(device="cuda", **options) as reader,
        AsyncReader(device="cpu", **options) as host,
    ):
        poison(reader)
        for ours, theirs in zip(reader, host, strict=True):
            assert ours.x.dtype == theirs.x.dtype == np.dtype(dtype)
            assert ours.x.get().tobytes() == theirs.x.tobytes()


def test_postprocess_in_place_or_not_and_of_changing_shape(cupy, images):
    def crop(data, labels):
        width = 4 + int(labels[0]) % 5
        labels += 1000
        return data[:, :, :width].astype(np.float32) / 2, labels

    options = {"hdf5_path": images, "batch_size": 11, "postprocess": crop}
    with AsyncReader(device="cuda", **options) as reader:
        poison(reader)
        for _ in range(2):
            for batch in reader:
                data, labels = expected(images, batch.index)
                width = 4 + int(labels[0]) % 5
                assert batch.data.dtype == np.float32
                assert np.array_equal(batch.data.get(), data[:, :, :width] / np.float32(2))
                assert np.array_equal(batch.labels.get(), labels + 1000)


def test_postprocess_gets_what_a_cpu_batch_would_hold(cupy, images):
    seen = []

    def look(data, labels):
        seen.append((type(data), data.shape, data.flags.c_contiguous))

    dims = {"h_dim": 1, "w_dim": 2, "cha_dim": 3}
    with AsyncReader(
        hdf5_path=images, batch_size=N, device="cuda", postprocess=look, **dims
    ) as reader:
        batch = reader.get_next_batch()
        want = expected(images, batch.index)[0].transpose(0, 3, 1, 2)
        assert np.array_equal(batch.data.get(), want)
    assert seen == [(np.ndarray, (N, 3, 16, 24), True)]


def test_what_cupy_lacks_is_refused_at_the_start(cupy, tmp_path):
    path = tmp_path / "text.h5"
    with h5py.File(path, "w") as file:
        file["text"] = np.array([b"one", b"two"])
    with pytest.raises(DeviceError, match='field "data"'):
        AsyncReader(hdf5_path=path, data_field="text", labels_field=None, device="cuda")


def test_a_gpu_that_is_not_there_is_refused(cupy, images):
    with pytest.raises(DeviceError, match="no GPU 63"):
        AsyncReader(hdf5_path=images, device="cuda:63")


def test_auto_takes_the_gpu(cupy, images):
    with AsyncReader(hdf5_path=images) as reader:
        assert reader.device == f"cuda:{cupy.cuda.Device().id}"


def test_a_second_gpu(cupy, spin, images):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("only one GPU")
    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda:1") as reader:
        for batch in reader:
            assert batch.data.device.id == 1
            assert np.array_equal(batch.data.get(), expected(images, batch.index)[0])


def test_a_copy_lasts(cupy, images):
    with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda", prefetch=1) as reader:
        copies = [batch.copy() for batch in reader]
    assert all_right(images, [(b.index, b.data, b.labels) for b in copies])


def test_a_worker_error_comes_out_and_the_next_batch_follows(cupy, images):
    def fail_once(data, labels):
        if labels[0] == BATCH:
            raise ArithmeticError("no")

    with AsyncReader(
        hdf5_path=images, batch_size=BATCH, device="cuda", postprocess=fail_once
    ) as reader:
        assert reader.get_next_batch().number == 0
        with pytest.raises(ArithmeticError):
            reader.get_next_batch()
        batch = reader.get_next_batch()
        assert batch.number == 2
        assert np.array_equal(batch.labels.get(), np.arange(2 * BATCH, 3 * BATCH))


def test_close_gives_pinned_and_device_memory_back(cupy, images):
    gc.collect()
    device_pool, pinned_pool = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    device_pool.free_all_blocks()
    used, free = device_pool.used_bytes(), pinned_pool.n_free_blocks()
    for _ in range(3):
        with AsyncReader(hdf5_path=images, batch_size=BATCH, device="cuda") as reader:
            for _batch in reader:
                pass
            del _batch
        del reader
        gc.collect()
        assert device_pool.used_bytes() == used
    assert pinned_pool.n_free_blocks() >= free
