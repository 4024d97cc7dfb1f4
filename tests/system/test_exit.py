"""Scripts that leave readers unclosed end as they should, in each way that a script can end.

What decodes at that moment must not lose its memory. Chunks are large, so that threads are nearly
always in the middle of one, and each case runs a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import open_descriptors, require_extra

from h5async import AsyncReader, ReaderClosedError

hdf5plugin = require_extra("hdf5plugin")

PIPELINES = {
    "raw": {},
    "gzip": {"compression": "gzip", "compression_opts": 1},
    "gzip_shuffled": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "lzf": {"compression": "lzf"},
    "zstd": hdf5plugin.Zstd(),
    "lz4": hdf5plugin.LZ4(),
    "blosc": hdf5plugin.Blosc(),
    "blosc2": hdf5plugin.Blosc2(),
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle_lz4": hdf5plugin.Bitshuffle(),
    "bitshuffle_zstd": hdf5plugin.Bitshuffle(cname="zstd"),
    "szip": {"compression": "szip"},
    "scaleoffset": {"scaleoffset": 0},
    "zfp": hdf5plugin.Zfp(reversible=True),
}

# `readers` were made of one dataset; `read` is the body of a training script.
SCRIPT = """
import sys, threading
from h5async import AsyncReader

def reader(name, **options):
    return AsyncReader(hdf5_path={path!r}, data_field=name, labels_field=None, batch_size=24,
                       shuffle="full", device="cpu", **options)

def consume(reader, batches):
    for _ in range(batches):
        reader.get_next_batch()

def endless(readers, has_begun):
    while True:
        for reader in readers:
            reader.get_next_batch()
            has_begun.release()

def in_daemon(readers):
    has_begun = threading.Semaphore(0)
    threading.Thread(target=endless, args=(readers, has_begun), daemon=True).start()
    for _ in range(len(readers) + 1):
        has_begun.acquire()

def left(reader):
    for batch in reader:
        break

{body}
"""

WAYS = {
    # name: (body, exit status, what stderr ends with)
    "break": ("for r in [reader(n) for n in NAMES]: left(r)", 0, ""),
    "kept": ("kept = [reader(n) for n in NAMES]\nfor r in kept: left(r)", 0, ""),
    "exception": (
        "kept = [reader(n) for n in NAMES]\nfor r in kept: left(r)\nraise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
    "exception_in_loop": (
        "kept = [reader(n) for n in NAMES]\nfor r in kept: left(r)\n"
        "for batch in kept[0]: raise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
    "sys_exit": (
        "kept = [reader(n) for n in NAMES]\nfor r in kept: left(r)\nsys.exit(3)",
        3,
        "",
    ),
    "interrupted": (
        "kept = [reader(n) for n in NAMES]\nfor r in kept: left(r)\nraise KeyboardInterrupt",
        -2,
        "KeyboardInterrupt",
    ),
    "fetched": ("kept = [reader(n) for n in NAMES]\nfor r in kept: r.fetch_data()", 0, ""),
    "daemon": ("in_daemon([reader(n) for n in NAMES])", 0, ""),
    "daemon_without_threads": ("in_daemon([reader(n, num_threads=0) for n in NAMES])", 0, ""),
    "cycle": (
        "for n in NAMES:\n    r = reader(n)\n    r.me = r\n    left(r)\n    holder = [r]\n"
        "    holder.append(holder)",
        0,
        "",
    ),
    "in_thread": (
        "def main():\n    kept = [reader(n) for n in NAMES]\n    for r in kept: left(r)\n"
        "t = threading.Thread(target=main); t.start(); t.join()",
        0,
        "",
    ),
}


@pytest.fixture(scope="module")
def every_codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset of each pipeline, in chunks of 256 kB that take a while to decode."""
    path = tmp_path_factory.mktemp("exit") / "every_codec.h5"
    values = np.random.default_rng(0).integers(0, 50, (128, 128, 128), dtype=np.uint16)
    with h5py.File(path, "w") as file:
        for name, options in PIPELINES.items():
            data = values[:, :32].astype(np.float32) if name == "zfp" else values
            chunks = (8, *data.shape[1:])
            file.create_dataset(name, data=data, chunks=chunks, **options)
        file["contiguous"] = values
    return path


def run(path: Path, body: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(path=str(path), body=body)
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("io", ["auto", "pread"])
def test_unclosed_readers_of_every_codec_end_in_peace(every_codec, way, io):
    body, status, message = WAYS[way]
    names = [*PIPELINES, "contiguous"]
    wanted = f"from functools import partial\nreader = partial(reader, io={io!r})"
    body = f"NAMES = {names}\n{wanted}\n{body}"
    done = run(every_codec, body)
    assert done.returncode == status, done.stderr
    assert done.stderr.strip().endswith(message), done.stderr
    if not message:
        assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gzip", "zstd", "bitshuffle_lz4", "blosc"])
def test_twenty_unclosed_readers_of_a_codec_end_in_peace(every_codec, name):
    body = f"kept = [reader({name!r}) for _ in range(20)]\nfor r in kept: left(r)"
    for _ in range(5):
        done = run(every_codec, body)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_close_waits_for_a_consumer_that_works_itself(every_codec):
    """Without threads the caller reads: nothing is unmapped while another thread closes."""
    works, may_go_on, errors = threading.Event(), threading.Event(), []

    def postprocess(data):
        works.set()
        assert may_go_on.wait(200)

    reader = AsyncReader(
        hdf5_path=every_codec, data_field="raw", labels_field=None, num_threads=0,
        postprocess=postprocess, device="cpu",
    )  # fmt: skip

    def consume():
        try:
            reader.get_next_batch()
        except ReaderClosedError as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    closer = threading.Thread(target=reader.close)
    consumer.start()
    assert works.wait(200)
    closer.start()
    while not reader._engine.ring.is_closed:
        os.sched_yield()
    assert open_descriptors(every_codec.parent)  # and so it is mapped
    assert closer.is_alive()
    may_go_on.set()
    consumer.join(200)
    closer.join(200)
    assert not consumer.is_alive()
    assert not closer.is_alive()
    assert len(errors) == 1
    assert not open_descriptors(every_codec.parent)


def test_postprocess_may_close_the_reader_whose_work_it_is(every_codec):
    readers = []

    def postprocess(data):
        readers[0].close()

    for num_threads in (0, 1, 2):
        readers[:] = [
            AsyncReader(
                hdf5_path=every_codec,
                data_field="gzip",
                labels_field=None,
                device="cpu",
                num_threads=num_threads,
                postprocess=postprocess,
            )
        ]
        with pytest.raises(ReaderClosedError):
            readers[0].get_next_batch()
        readers[0].close()
        assert not open_descriptors(every_codec.parent)


def test_readers_are_closed_before_h5py_is():
    """h5py changes HDF5's tables at exit, which a thread that reads by HDF5 must not be in."""
    script = (
        "import atexit\n"
        "register, names = atexit.register, []\n"
        "def note(function, *args, **options):\n"
        "    names.append(f'{function.__module__}.{function.__name__}')\n"
        "    return register(function, *args, **options)\n"
        "atexit.register = note\n"
        "import h5async\n"
        "h5async.AsyncReader(hdf5_path='sample_data/digits.h5').read([0])\n"
        "ours = names.index('h5async.system.interruptions.close_all')\n"
        "theirs = [i for i, name in enumerate(names) if name.startswith('h5py.')]\n"
        "assert all(i < ours for i in theirs), names  # the last one runs first\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
