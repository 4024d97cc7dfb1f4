"""A closed reader gives everything back at once: no garbage collection is waited for.

Each case is a process of its own, without a garbage collector. What reference counting alone does
not free is found there by a collection at the end, which saves what it finds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import SAMPLE, require_extra

SCRIPT = """
import contextlib, gc, os, sys, threading, types
gc.disable()
import numpy as np
from h5async import AsyncReader, H5AsyncError

FOLDER = sys.argv[1]

def double(data):
    return data.astype(np.float32) * 2

def fail(data):
    raise ZeroDivisionError

def spoilt(data):
    return np.zeros((2, 2)), np.zeros(3)

KINDS = {
    "contiguous": dict(data_field="raw", shuffle="full"),
    "contiguous_pread": dict(data_field="raw", io="pread", num_threads=0),
    "gzip": dict(data_field="gzip", shuffle="full"),
    "gzip_alone": dict(data_field="gzip", shuffle="full", num_threads=0),
    "zstd_pread": dict(data_field="zstd", shuffle="full", io="pread"),
    "window": dict(data_field="gzip", shuffle="window", window_bytes=400_000),
    "host_cache": dict(data_field="gzip", cache="host"),
    "virtual": dict(hdf5_path="virtual.h5", data_field="virtual", shuffle="full"),
    "h5py": dict(data_field="zfp", shuffle="full"),
    "many_files": dict(hdf5_path="part*.h5", data_field="raw", shuffle="full"),
    "transformed": dict(data_field="raw", h_dim=1, w_dim=2, cha_dim=3),
    "postprocess": dict(data_field="gzip", postprocess=double),
    "lifetimes": dict(data_field="gzip", debug_lifetimes=True),
    "damaged": dict(hdf5_path="damaged.h5", data_field="gzip", batch_size=64),
    "damaged_alone": dict(hdf5_path="damaged.h5", data_field="gzip", num_threads=0, batch_size=64),
    "postprocess_fails": dict(data_field="raw", postprocess=fail),
    "postprocess_alone": dict(data_field="raw", postprocess=fail, num_threads=0),
    "postprocess_wrong": dict(data_field="raw", postprocess=spoilt),
    "no_time": dict(data_field="gzip", timeout=1e-9),
    "no_file": dict(hdf5_path="none.h5"),
    "no_dataset": dict(data_field="none"),
    "process": dict(data_field="gzip", workers="process"),
    "process_fails": dict(data_field="gzip", workers="process", postprocess=fail),
    "process_no_dataset": dict(data_field="none", workers="process"),
}

def opened(kind):
    options = dict(hdf5_path="data.h5", labels_field=None, batch_size=32, num_threads=2,
                   device="cpu")
    options |= KINDS[kind]
    options["hdf5_path"] = os.path.join(FOLDER, options["hdf5_path"])
    return AsyncReader(options)

def use(kind, closes=True):
    with contextlib.suppress(H5AsyncError):
        reader = opened(kind)
        for _ in range(2):
            for _, batch in zip(range(3), reader):
                pass
            with contextlib.suppress(H5AsyncError):
                reader.fetch_data()
                reader.get_next_batch()
        if closes:
            reader.close()

def join():
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(200)

def state():
    with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
        nbytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return dict(nbytes=nbytes, maps=len(maps.readlines()),
                    descriptors=len(os.listdir("/proc/self/fd")), threads=threading.active_count())

def describe(thing):
    return f"{type(thing).__name__}: {str(thing)[:200]}"

def found_by_collection():
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    # Types of arrays that ctypes makes are made once, and found again as long as they last.
    found = [describe(thing) for thing in gc.garbage
             if isinstance(thing, np.ndarray | types.FrameType | threading.Thread)
             or type(thing).__module__.startswith("h5async") and not isinstance(thing, type)]
    gc.garbage.clear()
    return found
"""


def run(folder: Path, body: str, timeout: float = 200, **variables: str) -> str:
    """Run a script, which must end well and in silence; return what it prints."""
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT + body, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind, with chunks that hold more samples than a batch takes of them."""
    hdf5plugin = require_extra("hdf5plugin")
    folder = tmp_path_factory.mktemp("closing")
    values = np.random.default_rng(0).integers(0, 50, (256, 32, 32, 3), np.uint8)
    gzip = {"chunks": (16, 32, 32, 3), "compression": "gzip", "compression_opts": 1}
    with h5py.File(folder / "data.h5", "w") as file:
        file["raw"] = values
        file.create_dataset("gzip", data=values, **gzip)
        file.create_dataset("zstd", data=values, chunks=(16, 16, 32, 3), **hdf5plugin.Zstd())
        floats = values[..., 0].astype(np.float32)
        zfp = hdf5plugin.Zfp(reversible=True)
        file.create_dataset("floats", data=floats, chunks=(16, 32, 32), **zfp)
        twice = h5py.VirtualLayout(floats.shape, floats.dtype)  # which only h5py reads
        for samples in slice(None), slice(1):
            twice[samples] = h5py.VirtualSource(file["floats"])[samples]
        file.create_virtual_dataset("zfp", twice)
    with h5py.File(folder / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:128] = h5py.VirtualSource("data.h5", "gzip", values.shape)[:128]
        layout[128:] = h5py.VirtualSource("data.h5", "raw", values.shape)[128:]
        file.create_virtual_dataset("virtual", layout)
    for number in range(8):
        with h5py.File(folder / f"part{number}.h5", "w") as file:
            file["raw"] = values[number * 32 : number * 32 + 32]
    with h5py.File(folder / "damaged.h5", "w") as file:
        dataset = file.create_dataset("gzip", data=values, **gzip)
        chunk = dataset.id.get_chunk_info(1)
    with open(folder / "damaged.h5", "r+b") as file:
        file.seek(chunk.byte_offset + 10)
        file.write(b"\xff" * 100)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_nothing_is_left_to_the_garbage_collector(folder, closes):
    """Whether a reader was closed or dropped, and whether it met errors."""
    body = f"""
for kind in KINDS:
    use(kind, {closes})
join()
gc.collect()
for kind in KINDS:
    use(kind, {closes})
    join()
    for found in found_by_collection():
        print(kind, found)
"""
    assert run(folder, body) == ""


@pytest.mark.slow
def test_an_error_that_is_kept_keeps_no_memory(folder):
    """Of what functions held that an error went through, the batch and the scratch say."""
    body = """
import weakref
for kind in "damaged", "damaged_alone":
    reader, errors = opened(kind), []
    memory = [slot.memory for slot in reader._engine.setup.slots]
    arrays = [weakref.ref(array) for one in memory for array in one.out]
    scratches = reader._engine.filler._reader._scratches
    arrays += [weakref.ref(scratch.raw_chunk) for scratch in scratches]
    assert all(array() is not None for array in arrays)
    del memory, scratches
    for _ in range(2):
        try:
            reader.get_next_batch()
        except H5AsyncError as error:
            errors.append(error)
    reader.close()
    assert "the file is damaged there" in str(errors[0])
    print([array for array in arrays if array() is not None])
"""
    assert run(folder, body) == "[]\n[]\n"


@pytest.mark.slow
def test_a_batch_that_is_held_keeps_its_own_slot_alone(folder):
    body = """
import weakref
for options in {}, {"postprocess": double}, {"workers": "process"}:
    KINDS["held"] = dict(data_field="gzip", prefetch=4, batch_size=128, **options)
    reader = opened("held")
    blocks = []
    for slot in reader._engine.setup.slots:
        block = slot.memory.out[0]
        while isinstance(block.base, np.ndarray):
            block = block.base
        blocks.append(weakref.ref(block))
    del slot, block
    batch = reader.get_next_batch()
    reader.close()
    print(sum(block() is not None for block in blocks))
    del batch
    print(sum(block() is not None for block in blocks))
"""
    assert run(folder, body).split() == ["1", "0", "0", "0", "1", "0"]


@pytest.mark.slow
def test_close_gives_the_host_cache_back(folder):
    """As the first batches are decoded, the cache is written to; then half a GB would stay."""
    body = """
import h5py
path = os.path.join(FOLDER, "large.h5")
with h5py.File(path, "w") as file:
    file.create_dataset("large", (1 << 13, 1 << 14), "u1", chunks=(64, 1 << 14), compression="gzip")
    file["large"][...] = 1
KINDS["large"] = dict(hdf5_path="large.h5", data_field="large", cache="host", batch_size=256,
                      shuffle="full")
def read_all():
    reader = opened("large")
    for batch in reader:
        pass
    held = state()["nbytes"]
    reader.close()
    return reader, held
small = opened("gzip"); small.get_next_batch(); small.close()
before = state()["nbytes"]
kept = [read_all() for _ in range(3)]
assert all(held - before > 120 << 20 for _, held in kept), kept
print((state()["nbytes"] - before) >> 20)
"""
    assert int(run(folder, body)) < 40


ROUNDS = 1500 // 21 if SAMPLE == "all" else 12  # both cases together: 3,000 readers, or 500


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_very_many_readers_leave_nothing(folder, closes):
    body = f"""
import tracemalloc
kinds = [kind for kind in KINDS if not kind.startswith("process")]
def some(rounds):
    for _ in range(rounds):
        for kind in kinds:
            use(kind, {closes})
    join()
some(15)
tracemalloc.start()
some(1)
before, traced = state(), tracemalloc.get_traced_memory()[0]
some(3)
traced = tracemalloc.get_traced_memory()[0] - traced
tracemalloc.stop()
assert traced < 200_000, traced
some({ROUNDS})
after = state()
print(*(after[name] - before[name] for name in before))
"""
    nbytes, maps, descriptors, threads = map(int, run(folder, body, timeout=280).split())
    assert nbytes < 12 << 20
    assert maps < 40
    assert (descriptors, threads) == (0, 0)


STOPPED = """
def wait(data, gate=os.path.join(FOLDER, "gate")):
    open(gate).close()  # until somebody opens it to write

KINDS["waits"] = dict(data_field="raw", num_threads=1, timeout=4.0, workers=KIND, postprocess=wait)
reader = opened("waits")
reader.fetch_data()

def go():
    sys.stdin.readline()  # when the process goes on
    open(os.path.join(FOLDER, "gate"), "w").close()

threading.Thread(target=go, daemon=True).start()
print("waits", flush=True)
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("what", ["get_next_batch", "close"])
def test_a_process_that_was_stopped_does_not_run_out_of_time(folder, tmp_path, kind, what):
    """What counts is how long it has waited: it is stopped for longer than its timeout."""
    if what == "get_next_batch":
        body = STOPPED + "print(reader.get_next_batch().number)\nreader.close()\n"
    else:
        body = STOPPED + "reader.close()\nprint(reader._engine.setup.slots)\n"
    os.link(folder / "data.h5", tmp_path / "data.h5")
    os.mkfifo(tmp_path / "gate")
    script = SCRIPT + f"KIND = {kind!r}\n" + body
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "waits\n"
        os.kill(program.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED)
        time.sleep(4.5)  # longer than the limit: that is what is tested
        program.stdin.write("\n")
        program.stdin.flush()
        os.kill(program.pid, signal.SIGCONT)
        assert program.stdout.read() == ("0\n" if what == "get_next_batch" else "[]\n")
        assert program.wait(200) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_decoded_chunks_do_not_stay_in_free_memory(tmp_path):
    """Malloc keeps as much free memory as twice the largest block that was freed before."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        rows = np.zeros((1024, 32, 1024), np.uint8)
        file.create_dataset("gzip", data=rows, chunks=(2, 32, 1024), compression="gzip")
    body = """
def anonymous():
    gc.collect()
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

def kept():
    with opened("gzip") as reader:
        for _ in range(20):
            reader.get_next_batch()
        return anonymous()

KINDS["gzip"] |= dict(shuffle="window", window_bytes=24 << 20, num_threads=4)
kept()
np.ones(30 << 20, np.uint8)
before = anonymous()
print(kept() - before > 16 << 20, anonymous() - before < 8 << 20)
"""
    assert run(tmp_path, body) == "True True\n"
