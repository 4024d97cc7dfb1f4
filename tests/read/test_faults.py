"""Faults of disks, signals, workers, neighbours: the right error once, then the next batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import h5py
import imagecodecs
import numpy as np
import pytest
from cases import each
from collecting import Collected, layouts_of
from conftest import our_threads

import h5async.deliver.device
import h5async.fill.filling
import h5async.fill.phases
import h5async.fill.reading
import h5async.order.sampling
from h5async import (
    AsyncReader,
    BatchTimeoutError,
    DamagedError,
    Field,
    FileChangedWarning,
    ReadError,
)
from h5async.core.binding import REFUSED, load_core
from h5async.fill.reading import BatchReader
from h5async.opening import filefacts
from h5async.read.rereading import Rereader

N = 120


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        file["rows"] = rng.integers(0, 99, (N, 700), "u1")
        data = rng.integers(0, 9, (N, 30, 20), "i4")
        file.create_dataset("data", data=data, chunks=(7, 30, 20), compression="gzip")
        file["labels"] = np.arange(N)
    return path


def truth(path, name="data"):
    with h5py.File(path) as file:
        return file[name][...]


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "data"])
def test_a_read_that_fails_is_named(path, core, name, monkeypatch):
    opened = Rereader.opened

    @contextmanager
    def unreadable(self, number):
        """Open a file so that every read of it fails."""
        with opened(self, number) as source:
            descriptor = os.open(path, os.O_WRONLY)
            os.dup2(descriptor, source.file.fd)
            os.close(descriptor)
            yield source

    monkeypatch.setattr(Rereader, "opened", unreadable)
    layout = layouts_of([path], {name: Field(name)})[0]
    with Collected(core, [layout], 4, io="pread") as collected:
        count = collected.plan([5, 4, 3, 2])
        collected.collection._items(collected.batch)["status"] = REFUSED
        assert count == collected.collection.refused(collected.batch).size
        with pytest.raises(ReadError, match=r"samples \d+ to \d+") as caught:
            collected.collection.read_again(collected.batch, collected.scratch)
    assert str(path) in str(caught.value)
    assert "failed: Bad file descriptor" in str(caught.value)
    assert f'dataset "{name}"' in str(caught.value)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_signals_while_it_reads(path, num_threads):
    """System calls that a signal interrupts are taken up again."""
    data, calls = truth(path), []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(None))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    try:
        with AsyncReader(
            hdf5_path=path, batch_size=8, shuffle="full", num_threads=num_threads, io="pread"
        ) as reader:
            until = time.monotonic() + 200
            while len(calls) < 60 and time.monotonic() < until:
                for batch in reader:
                    assert np.array_equal(batch.data, data[batch.index])
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) >= 60


# --- workers -------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def once(monkeypatch, owner, name, at):
    """Have a function raise at one of its calls."""
    inner, calls, lock = getattr(owner, name), [0], threading.Lock()

    def function(*arguments, **options):
        with lock:
            calls[0] += 1
            number = calls[0]
        if number == at:
            raise Boom(name)
        return inner(*arguments, **options)

    monkeypatch.setattr(owner, name, function)


STAGES = {
    "before": (h5async.deliver.device.DeviceSlot, "wait_writable"),
    "order": (h5async.order.sampling.Sampling, "batch_at"),
    "plan": (h5async.fill.reading.BatchReader, "plan"),
    "numbers": (h5async.order.sampling.Sampling, "dealt_at"),  # in the consumer's thread
    "cut": (h5async.fill.phases, "cut"),
    "read": (h5async.fill.reading.BatchReader, "read"),
    "transform": (h5async.fill.reading.BatchReader, "transform"),
    "upload": (h5async.deliver.device.DeviceSlot, "upload"),
}


@pytest.mark.parametrize("stage", STAGES)
@each("num_threads", [0, 1, 3])
@each("prefetch", [1, 3])
def test_a_worker_that_raises_in_any_stage(path, monkeypatch, stage, num_threads, prefetch):
    data = truth(path).transpose(0, 2, 1).astype("f4") / 2
    if stage != "numbers":
        monkeypatch.setattr(BatchReader, "open_queue", lambda *_: None)
    elif load_core() is None:
        pytest.skip("needs the compiled core")
    once(monkeypatch, *STAGES[stage], 5)
    fields = {"data": Field("data", axes=(0, 2, 1), scale=0.5), "labels": "labels"}
    got, errors = [], 0
    with AsyncReader(
        hdf5_path=path,
        fields=fields,
        batch_size=8,
        num_threads=num_threads,
        prefetch=prefetch,
        device="cpu",
        timeout=200,
    ) as reader:
        for _ in range(2 * len(reader)):
            try:
                batch = reader.get_next_batch()
            except Boom:
                errors += 1
                continue
            got.append(batch.epoch * len(reader) + batch.number)
            assert np.array_equal(batch.data, data[batch.index])
        assert errors == 1
        assert len(got) == 2 * len(reader) - 1
        assert got == sorted(got)


def test_a_worker_that_is_late_after_a_jump(path, monkeypatch):
    """It asks what to do with the old order in mind, and gets what is of the new one."""
    monkeypatch.setattr(BatchReader, "open_queue", lambda *_: None)
    with AsyncReader(hdf5_path=path, batch_size=8, num_threads=1, timeout=200) as reader:
        reader.get_next_batch()
        reader.get_next_batch()
        ring = reader._engine.ring
        inner, is_in, go_on = ring.assign, threading.Event(), threading.Event()

        def assign():
            is_in.set()
            go_on.wait(200)
            return inner()

        ring.assign = assign
        reader.fetch_data()
        assert is_in.wait(200)
        reader.set_epoch(7)
        reader.fetch_data()
        go_on.set()
        batch = reader.get_next_batch()
        assert (batch.epoch, batch.number) == (7, 0)
        assert batch.labels.tolist() == batch.index.tolist() == list(range(8))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_postprocess_that_hangs(path, num_threads):
    """It cannot be ended; but nobody has to wait for it."""
    go_on = threading.Event()
    before = len(os.listdir("/proc/self/fd"))

    def hang(data, labels):
        if labels[0] == 8:
            go_on.wait()

    with AsyncReader(
        hdf5_path=path, batch_size=8, num_threads=num_threads, postprocess=hang, timeout=0.3
    ) as reader:
        assert reader.get_next_batch(timeout=200).number == 0
        for _ in range(2):
            with pytest.raises(BatchTimeoutError):
                reader.get_next_batch()
    threads = our_threads()
    assert threads  # it hangs still, and the reader is closed
    go_on.set()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= before


# --- neighbours ----------------------------------------------------------------------------------


def test_a_writer_may_open_the_file_meanwhile(path):
    """No lock is held once the file is indexed."""
    code = (
        "import h5py, sys\n"
        "with h5py.File(sys.argv[1], 'r+') as file:\n"
        "    file['more'] = [1, 2, 3]\n"
        "    file['data'].attrs['seen'] = 1\n"
    )
    data = truth(path)
    with AsyncReader(hdf5_path=path, batch_size=8, device="cpu") as reader:
        reader.get_next_batch()
        environment = {**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"}
        subprocess.run([sys.executable, "-c", code, path], check=True, env=environment, timeout=200)
        with pytest.warns(FileChangedWarning, match="the reader continues") as caught:
            batches = [reader.get_next_batch().copy() for _ in range(2 * len(reader))]
        assert len(caught) == 1
        for batch in batches:
            assert np.array_equal(batch.data, data[batch.index])


@pytest.mark.parametrize(
    ("failures", "grows", "tries"), [(0, True, 1), (2, True, 3), (9, True, 5), (9, False, 2)]
)
def test_a_file_that_changes_while_it_is_opened_is_read_again(
    tmp_path, monkeypatch, failures, grows, tries
):
    """As one to which a writer appends: its index has chunks behind the end that was found."""
    path = tmp_path / "growing.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.arange(20).reshape(10, 2), chunks=(2, 2))
    read, sizes = filefacts.read_layouts, []

    def growing(*args, **options):
        sizes.append(path.stat().st_size)
        if len(sizes) > failures:
            return read(*args, **options)
        if grows:
            with path.open("ab") as file:
                file.write(b"more")
        raise DamagedError("it was cut short or is damaged")

    monkeypatch.setattr(filefacts, "read_layouts", growing)
    options = {"hdf5_path": path, "labels_field": None, "device": "cpu", "index_cache": False}
    if tries > failures:
        with AsyncReader(options) as reader:
            assert reader.get_next_batch().data[:, 0].tolist() == list(range(0, 20, 2))
    else:
        with pytest.raises(DamagedError, match="cut short"):
            AsyncReader(options)
    assert len(sizes) == tries


@pytest.mark.slow
def test_what_a_writer_appends_is_not_seen(tmp_path):
    path = tmp_path / "growing.h5"
    with h5py.File(path, "w", libver="latest") as writer:
        options = {"maxshape": (None, 5), "chunks": (4, 5), "compression": "gzip"}
        dataset = writer.create_dataset("data", data=np.arange(100).reshape(20, 5), **options)
        writer.swmr_mode = True
        writer.flush()
        code = (
            "import sys, numpy as np\n"
            "from h5async import AsyncReader\n"
            "with AsyncReader(hdf5_path=sys.argv[1], labels_field=None, batch_size=4,\n"
            "                 device='cpu', shuffle='full') as reader:\n"
            "    print(reader.num_samples, flush=True)\n"
            "    for _ in range(3):\n"
            "        sys.stdin.readline()\n"
            "        for batch in reader:\n"
            "            assert (batch.data == batch.index[:, None] * 5 + np.arange(5)).all()\n"
            "        print(len(reader), flush=True)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout.readline() == "20\n"
            for turn in range(3):
                rows = 20 + 4 * (turn + 1)
                dataset.resize(rows, axis=0)
                dataset[rows - 4 :] = np.arange(rows * 5 - 20, rows * 5).reshape(4, 5)
                dataset.flush()
                other.stdin.write("go on\n")
                other.stdin.flush()
                assert other.stdout.readline() == "5\n"
        assert other.returncode == 0


@pytest.mark.slow
def test_ten_readers_in_two_processes_read_one_file(path):
    code = (
        "import sys, threading, h5py, numpy as np\n"
        "from h5async import AsyncReader\n"
        "with h5py.File(sys.argv[1]) as file: data = file['data'][...]\n"
        "seen = []\n"
        "def read(seed):\n"
        "    with AsyncReader(hdf5_path=sys.argv[1], batch_size=8, shuffle='full', seed=seed,\n"
        "                     device='cpu', workers='process' if seed == 0 else 'thread') as r:\n"
        "        for _ in range(3):\n"
        "            for batch in r:\n"
        "                assert np.array_equal(batch.data, data[batch.index])\n"
        "                seen.append(batch.size)\n"
        "threads = [threading.Thread(target=read, args=(seed,)) for seed in range(5)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(sum(seen))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert int(out) == 5 * 3 * N


def test_filters_that_no_chunk_needed_do_not_shift_the_others(tmp_path):
    """A filter that is optional and not known is skipped; its bit of the mask stays."""
    path = tmp_path / "a.h5"
    numbers = np.arange(40, dtype="i4").reshape(10, 4)
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4, 4))
        properties.set_filter(305, h5py.h5z.FLAG_OPTIONAL)  # lzo, which is not there
        properties.set_fletcher32()
        space = h5py.h5s.create_simple(numbers.shape)
        data = h5py.h5d.create(file.id, b"data", h5py.h5t.STD_I32LE, space, properties)
        padded = np.zeros((12, 4), "i4")
        padded[:10] = numbers
        for row in (0, 4, 8):
            chunk = np.frombuffer(padded[row : row + 4].tobytes(), np.uint8)
            checksum = int(imagecodecs.h5checksum_fletcher32(chunk)).to_bytes(4, "little")
            data.write_direct_chunk((row, 0), chunk.tobytes() + checksum, 1)
        layout = h5py.VirtualLayout((12, 4), "i4")
        layout[:10] = h5py.VirtualSource(".", "data", (10, 4))
        layout[2:] = h5py.VirtualSource(".", "data", (10, 4))
        file.create_virtual_dataset("twice", layout)
    with (
        h5py.File(path) as file,
        AsyncReader(hdf5_path=path, data_field="twice", labels_field=None, device="cpu") as reader,
    ):
        assert np.array_equal(np.concatenate([batch.copy()[0] for batch in reader]), file["twice"])
