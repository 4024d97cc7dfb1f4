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
import hdf5plugin
import numpy as np
import pytest

SCRIPT = """
import ctypes, gc, os, sys, threading
import h5py  # which reads nothing of ours at the gate yet
import h5async.engine, h5async.filling
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
    while not reader._engine.filler._closed:
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
    "by_h5py": {"data_field": "zfp"},
    "by_h5py_alone": {"data_field": "zfp", "num_threads": 0},
    "checked_by_h5py": {"hdf5_path": "virtual.h5", "data_field": "by_h5py"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes storage slow; without a compiler skip, or fail in CI."""
    compiler = shutil.which("gcc") if sys.platform == "linux" else None
    if compiler is None:
        if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            pytest.fail("H5ASYNC_REQUIRE_EXTRAS=1, but this test needs gcc", pytrace=False)
        pytest.skip("needs gcc")
    path = tmp_path_factory.mktemp("library") / "slow_reads.so"
    source = Path(__file__).with_name("slow_reads.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind."""
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
        file.create_dataset("zfp", data=floats, chunks=(4, 32, 32), **zfp)
    with h5py.File(folder / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:256] = h5py.VirtualSource("data.h5", "gzip", values.shape)[:256]
        layout[256:] = h5py.VirtualSource("data.h5", "raw", values.shape)[256:]
        file.create_virtual_dataset("virtual", layout)
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[::2] = h5py.VirtualSource("data.h5", "gzip", values.shape)[::2]
        layout[1::2] = h5py.VirtualSource("data.h5", "gzip", values.shape)[1::2]
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
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("core", ["", "0"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_read_begins_after_close(folder, library, kind, core):
    options = KINDS[kind]
    workers = 1 if "alone" in kind or "by_h5py" in kind else 2
    body = f"""
reader = opened(**{options})
consumer = begun(reader, {workers})
before = slow.slow_begun()
closer = closed(reader)
slow.slow_gate(0)
closer.join()
consumer.join()
print(slow.slow_begun() - before, reader.stats().ways)
"""
    more, *ways = run(folder, library, body, H5ASYNC_CORE=core)
    if "by_h5py" in kind:
        assert "'h5py'}" in ways
    assert int(more) == 0
