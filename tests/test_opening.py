"""What a terminal shows, and what interrupts, while files are indexed."""

import io
import subprocess
import sys

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t
from rich.console import Console

from h5async import AsyncReader, ReadError
from h5async.cli import output
from h5async.core.binding import load_core
from h5async.index import visits
from h5async.index.hdf5 import Opened
from h5async.io.stores import LocalSource

needs_core = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")


def make_files(folder, count):
    paths = [folder / f"{number}.h5" for number in range(count)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["data"] = np.zeros((3, 2))
    return paths


def shown_by(monkeypatch, paths, seconds):
    """Return what a terminal shows, where indexing a file takes so many seconds."""
    now = iter(np.arange(0, 1e6, seconds).tolist())
    monkeypatch.setattr(output, "perf_counter", lambda: next(now))
    text = io.StringIO()
    with output.opening(Console(file=text, force_terminal=True, width=60)):
        AsyncReader(hdf5_path=paths, labels_field=None, num_threads=0, device="cpu").close()
    return text.getvalue()


def test_a_bar_counts_files_where_these_take_longer_than_two_seconds(tmp_path, monkeypatch):
    shown = shown_by(monkeypatch, make_files(tmp_path, 6), 0.9)
    assert "3/6" in shown
    assert "files indexed" in shown
    assert "1/6" not in shown, "two seconds have not passed"
    assert output.on_indexed.get() is None


def test_no_bar_where_files_are_indexed_soon(tmp_path, monkeypatch):
    assert "files" not in shown_by(monkeypatch, make_files(tmp_path, 6), 0.1)


# --- chunks are visited without Python ------------------------------------------------------------


def chunked(path, count=20_000):
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("data", (count,), "u1", chunks=(1,))
        data[:] = 1


def test_both_ways_to_visit_chunks_agree(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    chunked(path)
    tables = []
    for core in (visits.load_core, lambda: None):
        monkeypatch.setattr(visits, "load_core", core)
        with AsyncReader(hdf5_path=path, labels_field=None, num_threads=0) as reader:
            tables.append(reader.layouts["data"].chunks)
    for name in ("offset", "nbytes", "filter_mask"):
        assert np.array_equal(getattr(tables[0], name), getattr(tables[1], name))


@pytest.mark.parametrize("count", [1, 256, 600])
def test_chunks_are_looked_up_by_their_keys(tmp_path, monkeypatch, count):
    """All of few, a part of many; the last chunk visited is taken for another one."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("data", (count, 2), "u1", chunks=(1, 1), compression="gzip")
        data[:] = 1
    with h5py.File(tmp_path / "a.h5") as file:
        dataset = Opened(file["data"].id, LocalSource(file.id.get_vfd_handle()))
        for core in (visits.load_core, lambda: None):
            monkeypatch.setattr(visits, "load_core", core)
            visited = visits.visit_chunks(dataset, (count, 2), 2 * count, "")
            assert visited.unlike in (visits.NOT_LOOKED_UP, -1)
            assert (visited.unlike == -1) == (visits.load_core() is not None)
            step = -(-2 * count // 256)
            sizes = visited.nbytes.copy()
            for wrong in (None, 2 * count - step, 0):
                if wrong is not None:
                    sizes[wrong] += 1
                found = visits.first_unlike(dataset, (count, 2), visited.number, sizes)
                assert found == (-1 if wrong is None else wrong)


@pytest.mark.parametrize("capacity", [1, 1000, 19_999, 20_000, 20_001])
def test_columns_that_are_too_short_at_first(tmp_path, monkeypatch, capacity):
    path = tmp_path / "a.h5"
    chunked(path)
    monkeypatch.setattr(visits, "_FIRST_CAPACITY", capacity)
    with AsyncReader(hdf5_path=path, labels_field=None, num_threads=0) as reader:
        table = reader.layouts["data"].chunks
        assert table.index is None
        assert table.offset.size == 20_000
        assert reader.get_next_batch().data.tolist() == [1] * 32


@pytest.mark.parametrize("has_core", [True, False])
def test_more_chunks_than_the_file_can_hold_are_refused(tmp_path, monkeypatch, has_core):
    """As a damaged index lists them, whose branches lead to the same leaf; one may be endless."""
    path = tmp_path / "a.h5"
    chunked(path)
    if not has_core:
        monkeypatch.setattr(visits, "load_core", lambda: None)
    with h5py.File(path) as file:
        dataset = Opened(file["data"].id, LocalSource(file.id.get_vfd_handle()))
        assert visits.visit_chunks(dataset, (20_000,), 20_000, "").number.size == 20_000
        with pytest.raises(ReadError, match=r"^f: its chunk index lists more than 19999 chunks"):
            visits.visit_chunks(dataset, (20_000,), 19_999, "f")


INTERRUPTED = """
import os, signal, sys, threading
from h5async import AsyncReader
from h5async.index import visits

class Mine(Exception):
    pass

def handler(number, frame):
    raise Mine("stop")

def send():
    begun.wait()
    os.kill(os.getpid(), signal.SIGUSR1)

def begin(struct):
    begun.set()  # whoever waits for it gets the GIL no sooner than the visit gives it away
    try:
        return visit(struct)
    except Mine:
        print("the visit was interrupted")
        raise

sys.setswitchinterval(1000)
signal.signal(signal.SIGUSR1, handler)
begun, core = threading.Event(), visits.load_core()
visit, core.visit = core.visit, begin
threading.Thread(target=send).start()
try:
    AsyncReader(hdf5_path=sys.argv[1], labels_field=None, num_threads=0)
except Mine as error:
    print("raised:", error)
"""


@pytest.mark.slow
@needs_core
def test_a_signal_interrupts_the_visit(tmp_path):
    """Of millions of chunks, which are all allocated, and so in no index."""
    path = tmp_path / "a.h5"
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_chunk((1,))
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    with h5py.File(path, "w", libver="latest") as file:
        h5d.create(file.id, b"data", h5t.STD_U8LE, h5s.create_simple((4_000_000,)), plist)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, path], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    assert done.stdout == "the visit was interrupted\nraised: stop\n"


@pytest.mark.slow
@needs_core
def test_errors_of_hdf5_are_not_printed(tmp_path):
    """HDF5 prints errors to stderr, for each thread, unless it was told not to."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("data", data=np.ones(100, "u1"), chunks=(1,))
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"FADB") + 20] ^= 255  # the data block of the fixed array
    path.write_bytes(damaged)
    program = """
import sys, threading
from h5async import AsyncReader
def read():
    try:
        AsyncReader(hdf5_path=sys.argv[1], labels_field=None, num_threads=0)
    except Exception as error:
        print(type(error).__name__)
for _ in range(2):
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("DamagedError\nDamagedError\n", "")
