"""The simulated GPUs: what they complain of, and the errors that they return, through real CuPy.

What our readers do on them is in test_gpu.py, which runs on a real GPU too.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

if "SIMULATED_GPU" in os.environ:
    import simulated_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.simulated_gpu]

N = 1000


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy")
    module.cuda.Device(0).use()
    return module


@pytest.fixture
def runtime(cupy):
    return cupy.cuda.runtime


@pytest.fixture
def stream(cupy):
    return cupy.cuda.Stream(non_blocking=True)


def pinned_array(cupy, count=N):
    memory = cupy.cuda.PinnedMemory(8 * count)
    return np.ndarray(count, np.int64, cupy.cuda.PinnedMemoryPointer(memory, 0))


def error_of(cupy, call, *arguments):
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as caught:
        call(*arguments)
    return caught.value.status


# --- the order of work ---------------------------------------------------------------------------


def test_work_is_late_and_an_event_orders_it(cupy, simulation):
    """Without the event some order gives another result."""
    found = {True: set(), False: set()}
    for seed in range(40):
        for is_ordered in (True, False):
            simulation.reset(seed)
            one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            array = cupy.zeros(1, np.int64)
            cupy.cuda.runtime.deviceSynchronize()
            with one:
                array += 1
                event = one.record()
            with two:
                if is_ordered:
                    two.wait_event(event)
                array *= 10
            cupy.cuda.runtime.deviceSynchronize()
            found[is_ordered].add(int(array.get()[0]))
    assert found == {True: {10}, False: {1, 10}}


def test_the_default_stream_waits_for_blocking_ones_and_they_for_it(cupy, simulation):
    for seed in range(20):
        simulation.reset(seed)
        blocking = cupy.cuda.Stream()
        array = cupy.zeros(1, np.int64)
        with blocking:
            array += 1
        with cupy.cuda.Stream.null:
            array *= 10
        with blocking:
            array += 2
        blocking.synchronize()
        assert array.get()[0] == 12


def test_an_event_that_is_asked_for_again_and_again_comes(cupy, stream):
    with stream:
        cupy.zeros(N)
        event = stream.record()
    while not event.done:
        pass


def test_kernels_of_each_gpu_run_there(cupy, simulation):
    for gpu in range(simulation.count):
        with cupy.cuda.Device(gpu):
            array = cupy.arange(N)
            assert array.device.id == gpu
            assert np.array_equal((array * 2).get(), np.arange(N) * 2)


# --- memory --------------------------------------------------------------------------------------


def test_memory_is_finite_and_comes_back(cupy, runtime, simulation):
    used, (free, total) = simulation.used_nbytes(0), runtime.memGetInfo()
    address = runtime.malloc(1 << 20)
    assert simulation.used_nbytes(0) == used + (1 << 20)
    assert runtime.memGetInfo() == (free - (1 << 20), total)
    runtime.free(address)
    assert runtime.memGetInfo() == (free, total)
    simulation.set_memory(0, used + 4096)
    assert error_of(cupy, runtime.malloc, 8192) == simulated_gpu.OUT_OF_MEMORY
    assert runtime.memGetInfo()[1] >= used + 4096


def test_pinned_memory_is_counted(cupy, simulation):
    before = simulation.pinned_nbytes()
    memory = cupy.cuda.PinnedMemory(5000)
    assert simulation.pinned_nbytes() == before + 5000
    del memory
    assert simulation.pinned_nbytes() == before


def copy_from_the_host(cupy, stream):
    address = cupy.cuda.runtime.malloc(64)
    cupy.cuda.runtime.memcpy(address, address, 64, cupy.cuda.runtime.memcpyHostToDevice)


def overflow(cupy, stream):
    address = cupy.cuda.runtime.malloc(64)
    source = pinned_array(cupy)
    cupy.cuda.runtime.memcpyAsync(address, source.ctypes.data, 65, 1, stream.ptr)


def use_after_free(cupy, stream):
    address = cupy.cuda.runtime.malloc(64)
    cupy.cuda.runtime.free(address)
    cupy.cuda.runtime.memsetAsync(address, 0, 64, stream.ptr)


def launch_after_free(cupy, stream):
    address = cupy.cuda.runtime.malloc(512)
    memory = cupy.cuda.UnownedMemory(address, 512, None)
    array = cupy.ndarray(64, np.int64, cupy.cuda.MemoryPointer(memory, 0))
    cupy.cuda.runtime.free(address)
    with stream:
        array += 1
    stream.synchronize()


def free_twice(cupy, stream):
    address = cupy.cuda.runtime.malloc(64)
    cupy.cuda.runtime.free(address)
    cupy.cuda.runtime.free(address)


def pageable_source(cupy, stream):
    cupy.empty(N, np.int64).set(np.arange(N), stream=stream)


def unregister_after_unmap(cupy, stream):
    block = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    cupy.cuda.runtime.hostRegister(address, 4096, 0)
    block.close()
    cupy.cuda.runtime.hostUnregister(address)


def register_twice(cupy, stream):
    memory = pinned_array(cupy)
    cupy.cuda.runtime.hostRegister(memory.ctypes.data, 64, 0)


def unregister_under_a_copy(cupy, stream):
    block = mmap.mmap(-1, 4096)
    array = np.frombuffer(block, np.int64)
    cupy.cuda.runtime.hostRegister(array.ctypes.data, 4096, 0)
    on_device = cupy.empty(512, np.int64)
    on_device.set(array, stream=stream)
    try:
        cupy.cuda.runtime.hostUnregister(array.ctypes.data)
    finally:
        stream.synchronize()


def refill_under_a_copy(cupy, stream):
    source, on_device = pinned_array(cupy), cupy.empty(N, np.int64)
    source[:] = 1
    on_device.set(source, stream=stream)
    source[:] = 2
    stream.synchronize()


def write_under_a_copy(cupy, stream):
    target, on_device = pinned_array(cupy), cupy.zeros(N, np.int64)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.memcpyAsync(
        target.ctypes.data, on_device.data.ptr, target.nbytes, 2, stream.ptr
    )
    target[:] = 2
    stream.synchronize()


def event_of_another_gpu(cupy, stream):
    with cupy.cuda.Device(1):
        event = cupy.cuda.Event()
    event.record(stream)


def launch_on_another_gpu(cupy, stream):
    kernel = cupy.RawKernel('extern "C" __global__ void none() {}', "none").kernel
    with cupy.cuda.Device(1):
        other = cupy.cuda.Stream(non_blocking=True)
    kernel((1,), (1,), (), stream=other)


def memory_of_another_gpu(cupy, stream):
    kernel = cupy.RawKernel('extern "C" __global__ void put(int *at) { *at = 1; }', "put")
    array = cupy.zeros(N, np.int32)
    with cupy.cuda.Device(1):
        kernel((1,), (1,), (array.data.ptr,))


def too_many_threads(cupy, stream):
    kernel = cupy.RawKernel('extern "C" __global__ void none() {}', "none")
    kernel((1,), (2048,), ())


def touch_what_is_not_there(cupy, stream):
    kernel = cupy.RawKernel('extern "C" __global__ void put(int *at) { at[1LL << 37] = 1; }', "put")
    kernel((1,), (1,), (cupy.zeros(N, np.int32),))
    cupy.cuda.runtime.deviceSynchronize()


def use_a_destroyed_event(cupy, stream):
    event = cupy.cuda.runtime.eventCreate()
    cupy.cuda.runtime.eventDestroy(event)
    cupy.cuda.runtime.eventRecord(event, stream.ptr)


def time_without_timing(cupy, stream):
    events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
    for event in events:
        event.record(stream)
        event.synchronize()
    cupy.cuda.get_elapsed_time(*events)


WRONGS = {
    copy_from_the_host: "the source is device memory, and should be on the host",
    overflow: "the target ends 1 bytes behind the end of its device memory",
    use_after_free: "the target is memory that was freed",
    launch_after_free: "an argument is memory that was freed",
    free_twice: "this is memory that was freed",
    pageable_source: "the source is pageable memory, and the stream is non-blocking",
    unregister_after_unmap: "this memory is not mapped any more",
    register_twice: "64 bytes are registered already",
    unregister_under_a_copy: "a copy of this memory is waiting on a stream",
    refill_under_a_copy: "the host changed memory while a copy out of it was waiting",
    write_under_a_copy: "the host changed memory while a copy into it was waiting",
    event_of_another_gpu: "the event is of GPU 1, and the stream of GPU 0",
    launch_on_another_gpu: "the stream is of GPU 1, and GPU 0 is current",
    memory_of_another_gpu: "an argument is memory of GPU 0, and the kernel runs on GPU 1",
    too_many_threads: "1x1x1 blocks of 2048x1x1 threads is not allowed",
    touch_what_is_not_there: "put touched memory that is not there",
    use_a_destroyed_event: "the event was destroyed",
    time_without_timing: "an event has no time",
}


@pytest.mark.wrong_on_purpose
@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.__name__)
def test_what_cuda_forbids_is_complained_of(cupy, stream, simulation, wrong):
    simulation.reset(1)  # a seed by which all work is late
    errors = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
    try:
        wrong(cupy, stream)
    except errors:
        pass
    assert any(WRONGS[wrong] in line for line in simulation.complaints())


def test_a_context_is_made_only_where_it_is_asked_for(tmp_path):
    code = """import cupy
cupy.cuda.Device(1).use()
cupy.zeros(3).get()
if {both}:
    cupy.cuda.Device(0).synchronize()
"""
    for both in (False, True):
        contexts, complaints = tmp_path / f"contexts{both}", tmp_path / f"complaints{both}"
        environment = {
            **os.environ,
            "SIMULATED_GPU_ALLOWED": "1",
            "SIMULATED_GPU_CONTEXTS": str(contexts),
            "SIMULATED_GPU_COMPLAINTS": str(complaints),
        }
        command = [sys.executable, "-c", code.format(both=both)]
        subprocess.run(command, env=environment, check=True, timeout=100, capture_output=True)
        made = ["a context was made on GPU 1"] + ["a context was made on GPU 0"] * both
        assert contexts.read_text().splitlines() == made
        assert complaints.exists() == both


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 2])
def test_a_call_fails_once(cupy, runtime, simulation, after):
    simulation.fail("cudaMalloc", after)
    addresses = [runtime.malloc(64) for _ in range(after)]
    assert error_of(cupy, runtime.malloc, 64) == simulated_gpu.OUT_OF_MEMORY
    addresses.append(runtime.malloc(64))
    for address in addresses:
        runtime.free(address)


def test_any_call_can_be_made_to_fail(cupy, runtime, simulation, stream):
    event, array, source = cupy.cuda.Event(), cupy.zeros(N, np.int64), pinned_array(cupy)
    calls = {
        "cudaEventRecord": lambda: event.record(stream),
        "cudaStreamWaitEvent": lambda: stream.wait_event(event),
        "cudaEventSynchronize": event.synchronize,
        "cudaStreamSynchronize": stream.synchronize,
        "cudaMemcpyAsync": lambda: array.set(source, stream=stream),
        "cudaHostAlloc": lambda: cupy.cuda.PinnedMemory(64),
        "cudaMemGetInfo": runtime.memGetInfo,
        "cudaSetDevice": lambda: runtime.setDevice(0),
    }
    for name, call in calls.items():
        simulation.fail(name, error=simulated_gpu.INVALID_VALUE)
        assert error_of(cupy, call) == simulated_gpu.INVALID_VALUE, name
        call()


@pytest.mark.parametrize("where", ["kernel", "copy"])
def test_a_sticky_error_comes_late_and_stays(cupy, runtime, simulation, stream, where):
    gc.collect()  # what CuPy frees after a fault raises in its finalizers
    simulation.reset(1)
    array, source = cupy.zeros(N, np.int64), pinned_array(cupy)
    runtime.deviceSynchronize()
    simulation.fail(where, 1, error=700)
    with stream:
        for _ in range(2):
            if where == "kernel":
                array += 1
            else:
                array.set(source, stream=stream)
    assert error_of(cupy, stream.synchronize) == 700
    assert error_of(cupy, runtime.malloc, 64) == 700
    assert error_of(cupy, runtime.setDevice, 0) == 700
    with cupy.cuda.Device(1):
        cupy.zeros(N)  # the other GPU works
        runtime.deviceSynchronize()
        simulation.reset()


@pytest.mark.parametrize("error", [2, 700])
def test_the_last_error_is_kept_until_it_is_asked_for(cupy, simulation, error):
    """CuPy asks itself, whenever a call fails; PyTorch's ``cudart()`` does not."""
    library, stays = simulation.library, error == simulated_gpu.ILLEGAL_ADDRESS
    library.cudaGetLastError()
    simulation.fail("cudaDeviceSynchronize", error=error)
    assert library.cudaDeviceSynchronize() == error
    assert library.cudaDeviceSynchronize() == (error if stays else 0)
    assert library.cudaPeekAtLastError() == error
    assert library.cudaGetLastError() == error
    assert library.cudaGetLastError() == (error if stays else 0)


def test_a_child_that_was_forked_has_no_cuda(cupy, runtime):
    child = os.fork()
    if child == 0:
        try:
            runtime.malloc(64)
        except runtime.CUDARuntimeError as error:
            os._exit(0 if error.status == 3 else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
