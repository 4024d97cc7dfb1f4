"""What statistics and traces say of fetching: exact, of sources in memory."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from memorystore import MemorySource, MemoryStore

from h5async import AsyncReader, ReadError
from h5async.core.binding import load_core
from h5async.fill.fetching import Fetcher
from h5async.fill.outcomes import FillerStats
from h5async.index.extents import SourceFile
from h5async.io.source import Source
from h5async.io.stores import store_of
from h5async.order.sampling import FillRequest
from h5async.read.farsources import FarSources, FetchCounts, Held
from h5async.system.timeline import STAGES, Recorder, ThreadCounts

ROWS, ROW = 96, 512

pytestmark = pytest.mark.skipif(load_core() is None, reason="far sources need the core")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    data = np.random.default_rng(0).integers(0, 9, (ROWS, ROW))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = data
        file.create_dataset("data", data=data, chunks=(12, ROW), compression="gzip")
    return tmp_path / "a.h5"


def open_reader(name: str, **options: Any) -> AsyncReader:
    given = {"labels_field": None, "device": "cpu", "batch_size": 12, "shuffle": False}
    return AsyncReader(hdf5_path=name, **given | options)


def far_sources(name: str) -> FarSources:
    core = load_core()
    return FarSources(
        core, [SourceFile(name, store_of(name).stamp(name))], np.zeros(1, core.Source)
    )


def test_requests_in_order_are_one_a_batch_of_just_its_bytes(path: Path, store: MemoryStore):
    with open_reader(store.put(path), data_field="raw", num_threads=0) as reader:
        reads, nbytes = store.reads, store.nbytes
        for _ in reader:
            pass
        stats = reader.stats(epoch=0)
        assert stats.requests == store.reads - reads == ROWS // 12
        assert stats.requested_nbytes == store.nbytes - nbytes == ROWS * ROW * 8
        assert stats.requested_per_used == 1.0
        assert stats.stage_seconds["fetch"] > 0
        assert reader.stats(since=reader.stats()).requests == 0


def test_chunks_are_requested_as_they_are_stored(path: Path, store: MemoryStore):
    with open_reader(store.put(path), data_field="data", num_threads=0) as reader:
        for _ in reader:
            pass
        stats = reader.stats(epoch=0)
    with h5py.File(path) as file:
        assert stats.requested_nbytes == file["data"].id.get_storage_size()
    assert stats.requests == ROWS // 12


def test_threads_count_what_the_store_is_asked_for(path: Path, store: MemoryStore):
    with open_reader(store.put(path), data_field="data", num_threads=2) as reader:
        reads = store.reads
        for _ in reader:
            pass
        stats = reader.stats()
        assert 0 < stats.requests <= store.reads - reads  # (batches share some)
        assert stats.busy_seconds == pytest.approx(
            sum(stats.stage_seconds.values()) - stats.stage_seconds["fetch"]
        )
        assert "fetch" in stats._repr_html_()


def test_local_files_need_no_requests(path: Path):
    with open_reader(str(path), data_field="data") as reader:
        for _ in reader:
            pass
        stats = reader.stats()
    assert (stats.requests, stats.requested_nbytes, stats.requested_per_used) == (0, 0, 0.0)
    assert stats.stage_seconds["fetch"] == 0
    assert stats.limit != "fetch"


def test_a_trace_has_the_requests_in_the_threads_that_fetch(path: Path, store: MemoryStore):
    trace, name = path.with_name("t.json"), store.put(path)
    with open_reader(name, data_field="data", num_threads=2) as reader, reader.trace(trace):
        for _ in reader:
            pass
    events = json.loads(trace.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [event for event in events if event["name"] == "fetch"]
    assert {event["args"]["file"] for event in found} == {name}
    assert {event["args"]["batch"] for event in found if event["args"].get("epoch") == 0}
    assert all(threads[event["tid"]].startswith("h5async-fetch_") for event in found)


def test_the_fetcher_counts_requests_and_what_batches_read(path: Path, store: MemoryStore):
    name = store.put(path)
    far = far_sources(name)
    answers = queue.SimpleQueue[Held | BaseException]()
    nothing = {"plan": lambda request: None, "following": lambda request: None}
    fetcher = Fetcher(far, 4, 1 << 20, **nothing, submit=lambda *_: None, recorder=Recorder())

    def want(serial: int, *ranges: tuple[int, int]) -> None:
        offset, nbytes = np.array(ranges, np.int64).T
        request = FillRequest(0, serial, 0, serial, 0)
        fetcher.want(request, far.places.ranges(0 * offset, offset, nbytes), answers.put)
        held = answers.get(timeout=30)
        assert isinstance(held, Held)
        assert far.counts.waited_ns > 0

    fetcher.start("a.h5")
    try:
        # Two near each other are one request, with what is between them; one far away is another.
        want(0, (0, 1000), (1500, 500), (200_000, 100))
        assert far.counts[:3] == (2, 2100, 1600)
        want(1, (1500, 500))  # it is there
        assert far.counts[:3] == (2, 2100, 2100)
        fetcher.end(0)
        fetcher.end(1)
        want(2, (1500, 500))  # it was let go of
        assert far.counts[:3] == (3, 2600, 2600)
        assert (store.reads, store.nbytes) == (3, 2600)
    finally:
        fetcher.stop(far.close)
        fetcher.join(None)


def test_a_request_that_fails_fails_only_its_batch(path: Path, store: MemoryStore, monkeypatch):
    get_ranges = MemorySource.get_ranges

    def failing(source: MemorySource, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
        if 100_000 in offsets:
            raise ReadError("this one")
        return get_ranges(source, offsets, lengths)

    monkeypatch.setattr(MemorySource, "at_once", 8)
    monkeypatch.setattr(MemorySource, "get_ranges", failing)
    far = far_sources(store.put(path))
    answers = dict[int, queue.SimpleQueue[Held | BaseException]]()
    nothing = {"plan": lambda request: None, "following": lambda request: None}
    fetcher = Fetcher(far, 8, 1 << 20, **nothing, submit=lambda *_: None, recorder=Recorder())
    far.get(0, [0], [1])
    try:
        for serial, offset in enumerate([0, 50_000, 100_000, 150_000]):
            where = np.array([offset], np.int64), np.array([100], np.int64)
            answers[serial] = queue.SimpleQueue()
            request = FillRequest(0, serial, 0, serial, 0)
            ranges = far.places.ranges(np.zeros(1, np.int64), *where)
            fetcher.want(request, ranges, answers[serial].put)
        fetcher.start("a.h5")  # one thread takes all four
        found = {serial: one.get(timeout=30) for serial, one in answers.items()}
    finally:
        fetcher.stop(far.close)
        fetcher.join(None)
    assert [serial for serial, one in found.items() if isinstance(one, ReadError)] == [2]
    assert far.counts.retries == 4


def test_a_source_is_opened_once_for_all_threads(path: Path, store: MemoryStore, monkeypatch: Any):
    name = store.put(path)
    opened: list[str] = []
    second = threading.Barrier(2)

    def opening(self: MemoryStore, name: str, **how: Any) -> Source:
        opened.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            second.wait(0.2)  # for a second thread that opens it
        return MemorySource(self, name)

    far = far_sources(name)
    monkeypatch.setattr(MemoryStore, "open", opening)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: bytes(far.get(0, [at], [8])[0]), range(4)))
    far.close()
    assert found == [path.read_bytes()[at : at + 8] for at in range(4)]
    assert opened == [name]


def test_counts_of_fillers_add_up():
    stages = dict.fromkeys(STAGES, 0.0)
    one, other = (
        FillerStats(stages, ThreadCounts(), 0, "none", fetched=FetchCounts(n, 2, 3, 4, 5, 6, n - 1))
        for n in (1, 10)
    )
    assert one.plus(other).fetched == (11, 4, 6, 8, 10, 12, 9)
