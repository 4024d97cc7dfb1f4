"""`close()` waits for reads that are under way, and no other is begun: workers look in between.

A preloaded library holds reads up at a gate. So nothing plays on time: each thread is in a read
when the reader is closed, and reads that begin after that are counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import require_extra

SCRIPT = """
import ctypes, gc, os, sys, threading
import h5py  # which reads nothing of ours at the gate yet
import h5async.system.interruptions, h5async.fill.filling
from h5async import AsyncReader, ReaderClosedError

FOLDER = os.environ["SLOW_FOLDER"]
slow = ctypes.CDLL(os.environ["LD_PRELOAD"])

def opened(**options):
    options = dict(hdf5_path="data.h5", labels_field=None, batch_size=256, shuffle="full",
                   device="cpu", num_threads=2) | options
    options["hdf5_path"] = os.path.join(FOLDER, options["hdf5_path"])
    return AsyncReader(options)

def consume(reader):
    try:
        reader.get_next_batch()
    except ReaderClosedError:
        pass

def begun(reader, workers):
    "Have so many threads in a read of a batch."
    slow.slow_gate(1)
    consumer = threading.Thread(target=consume, args=(reader,))
    consumer.start()
    slow.slow_await(workers)
    return consumer

def closed(reader):
    "Close a reader whose threads are in a read, in another thread, which waits for them."
    closer = threading.Thread(target=reader.close)
    closer.start()
    while not reader._engine.filler._pool.is_stopped:
        os.sched_yield()
    return closer
"""

KINDS = {
    "rows": {"data_field": "raw"},
    "rows_in_order": {"data_field": "raw", "shuffle": False},
    "rows_alone": {"data_field": "raw", "num_threads": 0},
    "rows_transformed": {"data_field": "raw", "h_dim": 1, "w_dim": 2, "cha_dim": 3},
    "chunks": {"data_field": "gzip"},
    "chunks_alone": {"data_field": "gzip", "num_threads": 0},
    "raw_chunks": {"data_field": "chunked"},
    "pieces": {"data_field": "zstd"},
    "virtual": {"hdf5_path": "virtual.h5", "data_field": "virtual"},
    "many_files": {"hdf5_path": "part*.h5", "data_field": "raw"},
    "host_cache": {"data_field": "gzip", "cache": "host"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes storage slow; without gcc skip, or fail where extras are required."""
    compiler = shutil.which("gcc") if sys.platform == "linux" else None
    if compiler is None:
        if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            pytest.fail("H5ASYNC_REQUIRE_EXTRAS=1, but this test needs gcc", pytrace=False)
        pytest.skip("needs gcc")
    path = tmp_path_factory.mktemp("library") / "slow_reads.so"
    source = Path(__file__).with_name("slow_reads.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=200)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind."""
    hdf5plugin = require_extra("hdf5plugin")
    folder = tmp_path_factory.mktemp("slow")
    values = np.random.default_rng(0).integers(0, 50, (512, 32, 32, 3), np.uint8)
    chunks = (4, 32, 32, 3)
    with h5py.File(folder / "data.h5", "w") as file:
        file["raw"] = values
        file.create_dataset("chunked", data=values, chunks=chunks)
        file.create_dataset("gzip", data=values, chunks=chunks, compression="gzip")
        file.create_dataset("zstd", data=values, chunks=(4, 16, 16, 3), **hdf5plugin.Zstd())
        zfp = hdf5plugin.Zfp(reversible=True)
        floats = values[..., 0].astype(np.float32)
        file.create_dataset("floats", data=floats, chunks=(4, 32, 32), **zfp)
        twice = h5py.VirtualLayout(floats.shape, floats.dtype)  # which only h5py reads
        for samples in slice(None), slice(1):
            twice[samples] = h5py.VirtualSource(file["floats"])[samples]
        file.create_virtual_dataset("zfp", twice)
    with h5py.File(folder / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:256] = h5py.VirtualSource("data.h5", "gzip", values.shape)[:256]
        layout[256:] = h5py.VirtualSource("data.h5", "raw", values.shape)[256:]
        file.create_virtual_dataset("virtual", layout)
        layout = h5py.VirtualLayout((512, 48, 32, 3), values.dtype)
        for first in 0, 16:  # they overlap
            layout[:, first : first + 32] = h5py.VirtualSource("data.h5", "gzip", values.shape)
        file.create_virtual_dataset("by_h5py", layout)
    for number in range(64):
        with h5py.File(folder / f"part{number:02}.h5", "w") as file:
            file["raw"] = values[number * 8 : number * 8 + 8]
    return folder


def run(folder: Path, library: Path, body: str, **variables: str) -> list[str]:
    """Run a script, which must end well and in silence; return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT + body],
        env={**os.environ, "LD_PRELOAD": str(library), "SLOW_FOLDER": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_no_read_begins_after_close(folder, library, kind):
    """By the core; without it, h5py reads, which the next test is for."""
    options = KINDS[kind]
    workers = 1 if "alone" in kind else 2
    body = f"""
reader = opened(**{options})
consumer = begun(reader, {workers})
before = slow.slow_begun()
closer = closed(reader)
slow.slow_gate(0)
closer.join()
consumer.join()
print(slow.slow_begun() - before)
"""
    assert run(folder, library, body) == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_no_call_of_h5py_begins_after_close(folder, library, num_threads):
    """HDF5 keeps the GIL while it reads, so nobody else can be at the gate's other side."""
    body = f"""
import h5async.read.fallback
spans, before = h5async.read.h5pyrows._spans, []
def stopping(*arguments):
    for number, span in enumerate(spans(*arguments)):
        if number == 2:
            before.append(slow.slow_begun())
            reader._engine.stop()
        yield span
h5async.read.h5pyrows._spans = stopping
reader = opened(data_field="zfp", num_threads={num_threads})
reader.fetch_data()
consume(reader)
reader.close()
print(slow.slow_begun() - before[0], reader.fallback_reads)
"""
    assert run(folder, library, body) == ["0", "0"]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_no_chunk_is_checked_after_close(folder, library, num_threads):
    body = f"""
from h5async.read.fallback import ChunkCheck
check, before = ChunkCheck._check, []
def stopping(*arguments):
    check(*arguments)
    if len(before) < 2:
        before.append(slow.slow_begun())
    if len(before) == 2:
        before.append(slow.slow_begun())
        reader._engine.stop()
ChunkCheck._check = stopping
reader = opened(hdf5_path="virtual.h5", data_field="by_h5py", num_threads={num_threads})
reader.fetch_data()
consume(reader)
reader.close()
print(slow.slow_begun() - before[2])
"""
    assert run(folder, library, body) == ["0"]


@pytest.mark.slow
def test_no_file_is_opened_ahead_after_close(folder, library):
    body = """
start = h5async.fill.filling.Filler.start
def starting(self):
    slow.slow_gate(1)
    start(self)
h5async.fill.filling.Filler.start = starting
def make():
    try:
        opened(hdf5_path="part*.h5", data_field="raw")
    except h5async.ReaderClosedError:
        pass
made = threading.Thread(target=make)
made.start()
slow.slow_await(1)
before = slow.slow_begun()
h5async.system.interruptions.close_all()
slow.slow_gate(0)
made.join()
print(slow.slow_begun() - before)
"""
    assert run(folder, library, body) == ["0"]


@pytest.mark.slow
def test_more_threads_than_cores_wait_for_storage(folder, library):
    body = """
reader = opened(data_field="raw", num_threads=4, prefetch=4)
reader._engine.filler.submissions._queue._struct.num_cores = 1
reader.get_next_batch()
slow.slow_gate(1)
for _ in range(4):
    reader.fetch_data()
slow.slow_await(4)
slow.slow_gate(0)
reader.close()
"""
    assert run(folder, library, body) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_reader_that_is_dropped_waits_for_a_moment_only(folder, library, num_threads):
    """A loop is left, and nobody closes the reader whose threads wait for the disk."""
    body = f"""
reader = opened(data_field="raw", prefetch=1, num_threads={num_threads})
for batch in reader:
    break
slow.slow_gate(1)
if {num_threads}:
    reader.fetch_data()
    del batch
    reader._engine.ring.hand_back()
    reader._engine.delivery.begin()
    slow.slow_await(2)
before = slow.slow_begun()
del reader
slow.slow_gate(0)
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print(slow.slow_begun() - before)
"""
    assert run(folder, library, body) == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["threads", "daemon", "interrupted"])
def test_the_interpreter_does_not_wait_for_a_disk_that_never_answers(folder, library, way):
    """At exit all readers are told to end before any is waited for, for one time together."""
    body = f"""
import signal, time
h5async.system.interruptions.EXIT_SECONDS = 0.5 if {way!r} != "interrupted" else 1e6
readers = [opened(data_field="raw", num_threads=0 if {way!r} == "daemon" else 2) for _ in range(20)]
slow.slow_gate(1)
for reader in readers:
    if {way!r} == "daemon":
        threading.Thread(target=consume, args=(reader,), daemon=True).start()
    else:
        reader.fetch_data()
slow.slow_await(20 if {way!r} == "daemon" else 40)
def interrupt():
    while not all(reader._engine.ring.is_closed for reader in readers):
        os.sched_yield()
    while True:  # Python misses a signal that comes just before it waits for a lock
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
if {way!r} == "interrupted":
    sys.stderr = open(os.devnull, "w")
    threading.Thread(target=interrupt, daemon=True).start()
"""
    assert run(folder, library, body) == []
