"""What goes wrong on a GPU, or around it, and what may not go wrong then.

On CuPy over simulated GPUs (`scripts/test_gpu`), which fail where a test wants it.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest
from gpus import replace_in_core

from h5async import AsyncReader, Batch, DeviceError, Field, H5AsyncError, ReadError
from h5async.deliver.cuda import CudaSlot
from h5async.deliver.devicedecode import DeviceDecoder
from h5async.deliver.devicepolicy import find_gpu
from h5async.io.shared import page_memory
from h5async.read.collection import Collection

pytestmark = [pytest.mark.gpu, pytest.mark.simulated_gpu]

N, BATCH = 48, 8
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700  # cudaError_t: the last is sticky


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "images.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(1).integers(0, 256, (N, 16, 16, 3), dtype=np.uint8)
        file.create_dataset("data", data=values, chunks=(4, 16, 16, 3), compression="gzip")
        file["labels"] = np.arange(N)
    return path


def options(path, **more):
    fields = {"data": Field("data", axes=(0, 3, 1, 2), dtype="f4"), "labels": "labels"}
    return {
        "hdf5_path": path,
        "fields": fields,
        "batch_size": BATCH,
        "device": "cuda",
        "timeout": 60,
        **more,
    }


def is_right(path, index, data):
    with h5py.File(path) as file:
        want = file["data"][...][index].transpose(0, 3, 1, 2)
    return np.array_equal(data.get(), want)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "axes", "scale"),
    [
        ("f2", (4, 3), None, 2.0),
        ("?", (4, 3), None, -1.0),
        ("f4", (4, 2, 3, 2), (0, 2, 1, 3), 2.0),
        ("u1", (4, 2, 2, 20), (0, 3, 1, 2), -1.0),
        ("f4", (4,), None, 3.0),
    ],
)
def test_negative_zeros_are_those_of_the_host(cupy, tmp_path, kind, shape, axes, scale):
    path = tmp_path / "zeros.h5"
    values = np.zeros(shape, kind)
    with h5py.File(path, "w") as file:
        file["x"] = -values if values.dtype.kind == "f" else values
    dtype = None if values.dtype.kind == "f" else "f4"
    found = []
    for device in ("cuda", "cpu"):
        field = Field("x", axes=axes, dtype=dtype, scale=scale)
        with AsyncReader(hdf5_path=path, fields={"x": field}, device=device) as reader:
            batch = reader.get_next_batch().x
            found.append((batch.get() if device == "cuda" else batch).tobytes())
    assert found[0] == found[1]
    assert found[0].strip(b"\0"), "no zero is negative"


# --- which GPU -----------------------------------------------------------------------------------

READ = """
import gc, logging, sys, types
import cupy
from h5async import AsyncReader
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
{before}
reader = AsyncReader(hdf5_path={path!r}, batch_size=8, shuffle="full", **{options})
kept = []
for _ in range(2):
    for batch in reader:
        kept = [batch.data, batch.copy(), batch]
print(reader.device, cupy.cuda.runtime.getDevice())
reader.close()
del reader, batch
gc.collect()
kept.clear()
gc.collect()
"""


def read_elsewhere(path, tmp_path, *, before="", gpus=2, allowed="1", environment=(), **more):
    """Read in a process of its own; return what it says, and on which GPUs it made a context."""
    contexts, complaints = tmp_path / "contexts", tmp_path / "complaints"
    contexts.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", READ.format(path=str(path), before=before, options=more)],
        env={
            **os.environ,
            "SIMULATED_GPU_COUNT": str(gpus),
            "SIMULATED_GPU_ALLOWED": allowed,
            "SIMULATED_GPU_CONTEXTS": str(contexts),
            "SIMULATED_GPU_COMPLAINTS": str(complaints),
            **dict(environment),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout, [int(line.split()[-1]) for line in contexts.read_text().splitlines()]


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize(
    "more",
    [{}, {"cache": "device"}, {"workers": "process"}, {"debug_lifetimes": True}],
    ids=lambda more: next(iter(more), ""),
)
def test_no_context_is_made_on_another_gpu(images, tmp_path, num_threads, more):
    said, contexts = read_elsewhere(
        images, tmp_path, device="cuda:1", num_threads=num_threads, **more
    )
    assert contexts == [1]
    assert "cuda:1 0\n" in said, "the current device of the caller's thread is another one now"


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_each_rank_of_a_node_has_a_gpu_of_its_own(images, tmp_path, device, variable):
    said, contexts = read_elsewhere(images, tmp_path, environment={variable: "3"}, device=device)
    assert contexts == [1]
    assert f"batches go to cuda:1: {variable}=3, and this process sees 2 GPUs" in said
    assert "cuda:1 0\n" in said


def test_where_a_launcher_shows_one_gpu_that_is_taken(images, tmp_path):
    said, contexts = read_elsewhere(
        images, tmp_path, gpus=1, allowed="0", environment={"LOCAL_RANK": "3"}
    )
    assert contexts == [0]
    assert "batches go to cuda:0: it is the default" in said


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("cupy.cuda.Device(1).use()", "it is the current device of this thread"),
        (
            "stream = types.SimpleNamespace(cuda_stream=0)\n"
            "cuda = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 1,"
            " current_stream=lambda number: stream)\n"
            "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)",
            "it is PyTorch's current device",
        ),
    ],
)
def test_the_gpu_that_was_chosen_before_is_taken(images, tmp_path, before, why):
    said, contexts = read_elsewhere(
        images, tmp_path, before=before, environment={"LOCAL_RANK": "0"}, device="cuda"
    )
    assert contexts == [1]
    assert f"batches go to cuda:1: {why}" in said


# --- errors --------------------------------------------------------------------------------------

CALLS = [
    "cudaStreamWaitEvent",
    "cudaEventRecordWithFlags",
    "cudaMemcpyAsync",
    "cudaEventSynchronize",
    "cuLaunchKernel",
]


def outcomes(reader, count=8):
    """Ask for some batches; return True for each that came, and False for each `DeviceError`."""
    found = []
    for _ in range(count):
        try:
            batch = reader.get_next_batch()
        except DeviceError as error:
            found.append("cuda:0: " not in str(error))
        else:
            found.append(batch.size == BATCH)
    return found


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("where", [*CALLS, "copy", "kernel"])
@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_fault_is_a_device_error_wherever_it_shows(
    cupy, simulation, images, num_threads, where, after
):
    with AsyncReader(**options(images, num_threads=num_threads, debug_lifetimes=True)) as reader:
        assert reader.get_next_batch().size == BATCH
        simulation.fail(where, after, ILLEGAL_ADDRESS)
        found = outcomes(reader, 12)
        assert not all(found)
        assert not any(found[found.index(False) :]), "a GPU at fault has delivered a batch"
    with pytest.raises(DeviceError, match="cuda:0"):
        AsyncReader(**options(images))


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("where", CALLS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_fails_once_costs_one_batch(cupy, simulation, images, num_threads, where, after):
    with AsyncReader(**options(images, num_threads=num_threads)) as reader:
        assert reader.get_next_batch().size == BATCH
        simulation.fail(where, after, OUT_OF_MEMORY)
        found = outcomes(reader, 12)
        assert found.count(False) <= 1
        batch = reader.get_next_batch()
        assert is_right(images, batch.index, batch.data)


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize(
    ("where", "after", "more"),
    [
        ("cudaMemcpyAsync", 1, {"decode": "host", "cache": "device"}),
        ("cudaMemcpyAsync", 1, {"decode": "device"}),
        ("cudaMemcpyAsync", 1, {"decode": "host", "batch_size": 30}),  # 30 and 18 samples
        *(("cudaEventRecord", after, {"decode": "host"}) for after in range(5)),
    ],
)
def test_a_slot_is_not_refilled_under_an_upload_that_failed_half_way(
    cupy, simulation, images, num_threads, where, after, more
):
    more = {"num_threads": num_threads, "prefetch": 1, "shuffle": "full", **more}
    for seed in (1, 2, 5, 6, 9, 10):
        simulation.reset(seed)
        with AsyncReader(**options(images, **more)) as reader:
            reader.get_next_batch()
            simulation.fail(where, after)
            found = []
            for _ in range(5):
                try:
                    found.append(reader.get_next_batch().size > 0)
                except DeviceError:
                    found.append(False)
        assert found.count(False) <= 1
        assert not simulation.complaints()


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("where", ["cuGraphLaunch", "cudaMemcpyAsync", "cudaStreamWaitEvent"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_what_the_core_cannot_upload_python_does(
    cupy, simulation, images, num_threads, where, after
):
    more = {"num_threads": num_threads, "decode": "host", "shuffle": "full"}
    with AsyncReader(**options(images, **more)) as reader:
        assert reader._engine.filler.submissions.are_uploaded
        kept, lost = [], 0
        for number in range(4 * N // BATCH):
            if number == 2 * N // BATCH:
                simulation.fail(where, after, INVALID_VALUE)
            try:
                batch = reader.get_next_batch()
            except DeviceError:
                lost += 1
            else:
                kept.append((batch.index, batch.data + np.float32(0)))  # by a kernel
    assert all(is_right(images, index, data) for index, data in kept)
    # Where the consumer's own stream was to wait, the batch is lost.
    assert lost <= (where == "cudaStreamWaitEvent")


@pytest.fixture
def small(tmp_path):
    """Write rows of which batches are filled at once, so that the consumer helps."""
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(4000 * 16, dtype=np.float32).reshape(4000, 16)
    return {"hdf5_path": path, "fields": {"data": "data"}, "batch_size": 8, "device": "cuda"}


def read_small(cupy, options):
    with AsyncReader(**options) as reader:
        assert reader._engine.filler.submissions.are_uploaded
        found = [cupy.array(batch.data) for batch in itertools.islice(reader, 400)]
        rows = cupy.concatenate(found).get()
        assert (rows.ravel() == np.arange(rows.size)).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_consumer_does_not_wait_for_the_gpu_itself(
    cupy, simulation, small, num_threads, monkeypatch
):
    """Else no signal and no timeout would end that."""
    threads = []

    def synchronize(of_driver, _, event):
        threads.append(threading.current_thread())
        return of_driver(event)

    not_ready = {"cuEventQuery": lambda *_: 600, "cuEventSynchronize": synchronize}
    replace_in_core(monkeypatch, not_ready)
    read_small(cupy, {**small, "num_threads": num_threads})
    assert len(threads) >= 400
    assert threading.main_thread() not in threads


def test_a_closed_reader_that_is_kept_has_no_memory_of_slots(cupy, simulation, small):
    read_small(cupy, small)  # what is made once
    gc.collect()
    before = simulation.pinned_nbytes(), simulation.used_nbytes(0)
    reader = AsyncReader(**small)
    assert reader.get_next_batch().size == 8
    assert simulation.pinned_nbytes() > before[0]
    reader.close()
    gc.collect()
    assert (simulation.pinned_nbytes(), simulation.used_nbytes(0)) == before


def test_a_batch_is_ordered_before_the_stream_of_who_took_it(cupy, simulation, small, monkeypatch):
    """Not before that of another thread that tries to, meanwhile."""
    other, waiting, told = cupy.cuda.Stream(non_blocking=True), [], []

    def synchronize(of_driver, _, event):
        with cupy.cuda.Device(0), other:
            try:
                told.append(reader.get_next_batch())
            except H5AsyncError as error:
                told.append(error)
        return of_driver(event)

    def wait(of_driver, _, stream, *more):
        waiting.append(stream)
        return of_driver(stream, *more)

    replaced = {"cuEventQuery": lambda *_: 600, "cuEventSynchronize": synchronize}
    replace_in_core(monkeypatch, {**replaced, "cuStreamWaitEvent": wait})
    mine = cupy.cuda.Stream(non_blocking=True)
    with AsyncReader(**small, num_threads=1, prefetch=1) as reader, mine:
        for _ in range(400):
            reader.get_next_batch()
    assert any("another thread is waiting" in str(one) for one in told)
    assert mine.ptr in waiting
    taken = [one for one in told if isinstance(one, Batch)]  # between the calls of this thread
    assert waiting.count(other.ptr) <= len(taken)


def test_memory_is_unpinned_where_its_copies_cannot_be_waited_for(cupy, simulation):
    gpu, _ = find_gpu(0)
    gc.collect()  # what earlier tests have left
    pinned = simulation.pinned_nbytes()
    memory = page_memory(1 << 16)
    with gpu.current():
        gpu.pin(memory)
    assert simulation.pinned_nbytes() > pinned
    simulation.fail("cudaDeviceSynchronize")
    del memory
    gc.collect()
    assert simulation.pinned_nbytes() == pinned


def test_a_copy_of_a_batch_that_fails_is_a_device_error(cupy, simulation, images):
    with AsyncReader(**options(images)) as reader:
        batch = reader.get_next_batch()
        simulation.fail("cuLaunchKernel", 0, ILLEGAL_ADDRESS)
        simulation.fail("cudaMemcpyAsync", 0, ILLEGAL_ADDRESS)
        with pytest.raises(DeviceError, match="arrays could not be copied"):
            batch.copy()


def test_close_returns_after_a_fault(cupy, simulation, images):
    reader = AsyncReader(**options(images, cache="device"))
    reader.get_next_batch()
    simulation.fail("cudaEventRecordWithFlags", 0, ILLEGAL_ADDRESS)
    outcomes(reader, 3)
    closer = threading.Thread(target=reader.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("where", ["cudaSetDevice", "cudaStreamCreateWithFlags"])
def test_a_gpu_that_fails_is_no_reason_to_read_without_it(
    cupy, simulation, images, caplog, device, where
):
    caplog.set_level("INFO", logger="h5async")
    simulation.fail(where, 0, INVALID_VALUE)
    with pytest.raises(DeviceError, match="cudaErrorInvalidValue"):
        AsyncReader(**options(images, device=device))
    assert "batches go to" not in caplog.text
    with AsyncReader(**options(images, device=device)) as reader:
        assert reader.device == "cuda:0"
    assert "batches go to cuda:0" in caplog.text


@pytest.mark.parametrize(
    ("status", "driver", "is_missing"), [(100, 13000, True), (35, 0, True), (35, 11080, False)]
)
def test_auto_does_without_a_driver_but_not_with_an_old_one(
    cupy, images, monkeypatch, status, driver, is_missing
):
    runtime = cupy.cuda.runtime

    def fail():
        raise runtime.CUDARuntimeError(status)

    monkeypatch.setattr(runtime, "getDeviceCount", fail)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: driver)
    if not is_missing:
        with pytest.raises(DeviceError, match="finds no usable GPU"):
            AsyncReader(**options(images, device="auto"))
        return
    with AsyncReader(**options(images, device="auto")) as reader:
        assert reader.device == "cpu"


@pytest.mark.parametrize("after", [0, 1])
def test_a_stream_that_cannot_be_made_leaves_nothing(cupy, simulation, images, monkeypatch, after):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    pinned = simulation.pinned_nbytes()
    simulation.fail("cudaStreamCreateWithFlags", after)
    with pytest.raises(DeviceError, match="no stream can be made"):
        AsyncReader(**options(images))
    gc.collect()
    assert not ignored
    assert simulation.pinned_nbytes() == pinned


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ("cudaEventCreateWithFlags", INVALID_VALUE, "no slots can be made .*restarted"),
        ("cudaMalloc", INVALID_VALUE, "no slots can be made .*restarted"),
        ("cudaEventCreateWithFlags", OUT_OF_MEMORY, "do not fit in the memory of cuda:0"),
        ("cuLaunchKernel", INVALID_VALUE, "the kernels could not be run .*restarted"),
        ("cuLaunchKernel", OUT_OF_MEMORY, "the kernels could not be run .*memory is used up"),
        ("cudaStreamCreateWithFlags", OUT_OF_MEMORY, "no stream can be made .*memory is used up"),
    ],
)
def test_errors_of_opening_say_what_failed(cupy, simulation, images, where, error, said):
    simulation.fail(where, 0, error)
    with pytest.raises(DeviceError, match=said):
        AsyncReader(**options(images))


def test_what_cupy_cannot_compile_is_said_to_be_that(cupy, images, monkeypatch):
    def fail(*_):
        raise RuntimeError("no headers")

    monkeypatch.setattr(CudaSlot, "warm_up", fail)
    with pytest.raises(DeviceError, match=r"cannot compile for cuda:0 \(no headers\).*pip install"):
        AsyncReader(**options(images))


def test_a_thread_that_cannot_be_started_is_no_matter_of_compiling(cupy, images, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.endswith("-gpu") and started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    started = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ReadError, match="a GPU: the system allows this process no more threads"):
        AsyncReader(**options(images))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"cache": "device"}, {"decode": "device"}])
def test_a_closed_reader_gives_its_memory_back(cupy, simulation, images, more):
    pool = cupy.get_default_memory_pool()
    mine = cupy.zeros(1 << 20, np.uint8)
    del mine
    gc.collect()
    cupy.get_default_pinned_memory_pool().free_all_blocks()  # nor is anything of ours taken there
    used, pinned = simulation.used_nbytes(0), simulation.pinned_nbytes()
    kept = pool.free_bytes()
    assert kept >= 1 << 20
    with AsyncReader(**options(images, **more)) as reader:
        for _ in range(2):
            for _batch in reader:
                pass
        assert simulation.used_nbytes(0) > used
        data, index = _batch.data, _batch.index
        del _batch
    assert is_right(images, index, data), "what is still used was taken away"
    del reader, data
    gc.collect()
    assert simulation.used_nbytes(0) == used
    assert simulation.pinned_nbytes() == pinned
    assert pool.free_bytes() == kept, "the caller's pool was emptied"


def test_memory_that_only_cupys_pool_keeps_is_no_lack(cupy, simulation, images):
    simulation.set_memory(0, simulation.used_nbytes(0) + (64 << 20))
    hoard = cupy.zeros(63 << 20, np.uint8)
    del hoard
    gc.collect()
    many = {"batch_size": N, "prefetch": 8, "decode": "host"}  # 1.5 MB
    with AsyncReader(**options(images, **many)) as reader:
        batch = reader.get_next_batch()
        assert is_right(images, batch.index, batch.data)


def test_slots_that_do_not_fit_are_a_device_error_that_keeps_no_memory(cupy, simulation, images):
    cupy.get_default_memory_pool().free_all_blocks()
    used, pinned = simulation.used_nbytes(0), simulation.pinned_nbytes()
    simulation.set_memory(0, used + (1 << 20))
    with pytest.raises(DeviceError, match="do not fit in the memory of cuda:0") as caught:
        AsyncReader(**options(images, batch_size=N, prefetch=8, decode="host"))
    gc.collect()
    assert caught.value.__cause__ is not None
    assert simulation.used_nbytes(0) == used
    assert simulation.pinned_nbytes() == pinned


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "device"])
@pytest.mark.parametrize("decode", ["host", "device"])
@pytest.mark.parametrize("axes", [(0, 3, 1, 2), (0, 2, 1, 3)])  # by planes, and generic
def test_all_kernels_are_compiled_when_the_reader_is_made(
    cupy, images, monkeypatch, cache, decode, axes
):
    compiled = []
    cupy.clear_memo()  # what other tests have compiled
    compiler = cupy.cuda.compiler
    compile_it = compiler._compile_module_with_cache

    def note(source, *rest, **more):
        compiled.append(source)
        return compile_it(source, *rest, **more)

    monkeypatch.setattr(compiler, "_compile_module_with_cache", note)
    fields = {"data": Field("data", axes=axes, dtype="f4", scale=0.5), "labels": "labels"}
    # 47 samples in batches of 23: the last one has 1.
    more = {"fields": fields, "batch_size": 23, "cache": cache, "decode": decode}
    with h5py.File(images, "r+") as file:
        for name in ("data", "labels"):
            values = file[name][: N - 1]
            del file[name]
            file.create_dataset(name, data=values, chunks=values.shape, compression="gzip")
    with AsyncReader(**options(images, **more)) as reader:
        assert compiled
        assert len(compiled) == len(set(compiled))
        compiled.clear()
        sizes = [batch.size for _ in range(2) for batch in reader]
        assert sizes == [23, 23, 1] * 2
    assert not compiled


# --- where chunks are decoded --------------------------------------------------------------------


def test_a_thread_that_waits_for_the_gpu_to_decode_counts_as_busy(cupy, images, monkeypatch):
    """Without threads: to fill takes 4 ms here; there 1 ms, and 4 more until it is decoded."""
    clock = itertools.count()
    now = [0]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now[0] + next(clock))

    def taking(cls, name, milliseconds):
        method = getattr(cls, name)

        def take(*arguments):
            now[0] += int(milliseconds * 1e6)
            return method(*arguments)

        monkeypatch.setattr(cls, name, take)

    taking(Collection, "read", 4)
    taking(Collection, "read_ranges", 1)
    taking(DeviceDecoder, "decode", 4)
    monkeypatch.setattr(CudaSlot, "transfer_seconds", lambda slot: 3e-3)
    more = {"fields": {"data": "data"}, "num_threads": 0, "prefetch": 1}
    with AsyncReader(**options(images, **more)) as reader:
        for _ in range(4):
            for batch in reader:
                assert batch.size == BATCH
        assert reader.stats().decode.startswith("host: a batch takes 5 ms on the device, 4 ms")


@pytest.mark.parametrize("decode", ["auto", "device"])
def test_encoded_chunks_count_as_part_of_batches(cupy, images, decode):
    slots = 2 * BATCH * (16 * 16 * 3 * (1 + 4) + 8)  # as read, and as delivered; the labels
    more = {"decode": decode, "prefetch": 2, "max_batch_bytes": slots + 1000}
    if decode == "device":
        with pytest.raises(DeviceError, match="but max_batch_bytes leaves only"):
            AsyncReader(**options(images, **more))
        return
    with AsyncReader(**options(images, **more)) as reader:
        batch = reader.get_next_batch()
        assert is_right(images, batch.index, batch.data)
        assert "max_batch_bytes" in reader.stats().decode
