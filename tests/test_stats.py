"""What a reader says of itself: counts that are exact, times that are there, and sentences."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import read_exactly_an_epoch, spoil_chunk
from hdf5files import type_for_h5py

from h5async import AsyncReader, Field, ReadError, ReaderStats
from h5async.codec.filters import Filter
from h5async.core.binding import can_decode, load_core
from h5async.observe.readercounts import Waits, WaitTotals
from h5async.read.coretables import Scratch
from h5async.system.timeline import STAGES, StageTimes, ThreadCounts

BY_US = "core" if load_core() else "h5py"
PACKED = "core" if can_decode(Filter(6, (2, 32), "scaleoffset")) else "h5py"  # what scaleoffset is
GZIP = {"compression": "gzip", "compression_opts": 1}


# --- counts and times ------------------------------------------------------------------------


def test_counts_of_threads_are_summed_up() -> None:
    one = ThreadCounts(*range(1, 11))
    other = ThreadCounts(*range(10, 101, 10))
    assert one.plus(other) == ThreadCounts(*range(11, 111, 11))
    assert one == ThreadCounts(*range(1, 11)), "what is added to is not changed"
    assert one.plus(ThreadCounts()) == one
    names = [field.name for field in dataclasses.fields(ThreadCounts)]
    assert names[:4] == ["read_ns", "decode_ns", "place_ns", "gil_wait_ns"]
    assert names[4:6] == ["read_nbytes", "decoded_chunks"]
    assert names[6:8] == ["decoded_nbytes", "h5py_decoded_nbytes"]
    assert names[8:] == ["transform_ns", "plan_ns", "upload_ns"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_timed_even_if_it_fails(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    clock = iter([100, 107, 1000, 1003])
    monkeypatch.setattr("h5async.read.coretables.perf_counter_ns", lambda: next(clock))
    scratch = Scratch.allocate(0, 0, 0)
    for _ in range(2):
        try:
            with scratch.reading():
                assert not fails
        except AssertionError:
            assert fails
    assert scratch.counts == ThreadCounts(read_ns=10)


def test_times_of_stages_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = StageTimes()
    assert times.copied() == dict.fromkeys(STAGES, 0)
    monkeypatch.setattr("h5async.system.timeline.perf_counter_ns", lambda: 5_000_000_000)
    times.add("plan", 4_000_000_000)
    times.add("plan", 4_500_000_000)
    times.add("upload", 4_750_000_000)
    expected = {"plan": 1_500_000_000, "upload": 250_000_000}
    assert times.copied() == {**dict.fromkeys(STAGES, 0), **expected}
    with pytest.raises(KeyError):
        times.add("sleep", 0)


def percentiles(waits: Waits) -> tuple[float, float]:
    return waits.percentiles(waits.number, 0)


def test_waits() -> None:
    waits = Waits()
    assert waits.noted == WaitTotals(0, 0.0, 0.0)
    assert percentiles(waits) == (0.0, 0.0)
    waits.note(10.0, 13.0)  # start-up, which nobody counts
    assert waits.noted == WaitTotals(0, 0.0, 0.0)
    assert percentiles(waits) == (0.0, 0.0)
    for number in range(1, 101):
        waits.note(20.0 + number, 20.0 + number + number / 1000)
    assert waits.noted.number == 100
    assert waits.noted.seconds == pytest.approx(5.05)
    assert waits.noted.elapsed_seconds == pytest.approx(120.1 - 13.0)
    assert waits.before.number == 99
    assert waits.before.seconds == pytest.approx(4.95)
    assert waits.before.elapsed_seconds == pytest.approx(120.0 - 13.0)
    assert percentiles(waits) == pytest.approx((0.0505, 0.09901))


def test_percentiles_are_those_of_the_last_waits() -> None:
    waits = Waits()
    waits.note(0.0, 0.0)
    for number in range(1000):
        waits.note(number, number + 0.5)
    middle = waits.number
    for number in range(4096):
        waits.note(1000.0 + number, 1000.0 + number + 0.25)
    assert percentiles(waits) == (0.25, 0.25)
    assert waits.number == 5096
    assert waits.noted.seconds == pytest.approx(500 + 1024)
    assert waits.percentiles(middle, 0) == (0.0, 0.0), "none of them is kept"


def test_percentiles_between_two_moments() -> None:
    waits, moments = Waits(), []
    waits.note(0.0, 0.0)
    for seconds in (1.0, 2.0, 3.0):
        moments.append(waits.number)
        for _ in range(10):
            waits.note(0.0, seconds)
    moments.append(waits.number)
    for number, seconds in enumerate((1.0, 2.0, 3.0)):
        assert waits.percentiles(moments[number + 1], moments[number]) == (seconds, seconds)
    assert waits.percentiles(moments[3], moments[1]) == (2.5, 3.0)
    assert waits.percentiles(moments[1], moments[1]) == (0.0, 0.0)


# --- the sentence ----------------------------------------------------------------------------


def told(**given: Any) -> str:
    """What is said of 11 batches of 1 GB in 10 s, for which two threads worked."""
    stages = {**dict.fromkeys(STAGES, 0.0), **given.pop("stages", {"read": 4.0, "decode": 7.0})}
    values: dict[str, Any] = {
        "batches": 11,
        "samples": 1100,
        "nbytes": 11_000_000_000,
        "elapsed_seconds": 10.0,
        "wait_seconds": 5.0,
        "wait_p50_seconds": 0.5,
        "wait_p99_seconds": 0.6,
        "gil_wait_seconds": 0.0,
        "read_nbytes": 5_000_000_000,
        "decoded_chunks": 1100,
        "fallback_reads": 0,
        "direct_share": 1.0,
        "ways": {"data": "core"},
        "num_threads": 2,
        "filters": ("shuffle", "deflate"),
        "_waits": 10,
    }
    return str(ReaderStats(stage_seconds=stages, **{**values, **given}))


# Of 10 s, 5 are waited; a batch waits a second for the network, and 32 requests are on their way.
FAR = {"stages": {"fetch": 11.0, "decode": 3.0}, "_flight_seconds": 320.0}


@each(
    "given, sentence",
    [
        (
            {"requests": 8000, "requested_nbytes": 1_200_000_000},
            "latency of the network, 0.12 GB/s in 800 requests a second of 150 kB, 40 ms each;"
            " make requests_in_flight larger (32 now), read larger pieces"
            ' (shuffle="window" or larger chunks), or use cache="disk"',
        ),
        (
            {"requests": 8000, "requested_nbytes": 1_200_000_000, "_is_scattered": False},
            "latency of the network, 0.12 GB/s in 800 requests a second of 150 kB, 40 ms each;"
            " make requests_in_flight larger (32 now), read larger pieces (larger chunks), or use"
            ' cache="disk"',
        ),
        (
            {"requests": 8000, "requested_nbytes": 1_200_000_000, "filters": ()},
            "latency of the network, 0.12 GB/s in 800 requests a second of 150 kB, 40 ms each;"
            " make requests_in_flight larger (32 now), read larger pieces (compressed chunks of"
            ' several rows), or use cache="disk"',
        ),
        (
            {"requests": 8000, "requested_nbytes": 1_200_000_000, "_quickest_seconds": 0.009},
            "bandwidth of the network, or the store, 0.12 GB/s in 800 requests a second of 150 kB,"
            " 40 ms each; requests wait for each other (the quickest took 9 ms), so more at a time"
            ' would not help; read larger pieces (shuffle="window" or larger chunks), or use'
            ' cache="disk", or read nearer to the data',
        ),
        (
            {"requests": 800, "requested_nbytes": 1_200_000_000, "num_threads": 0},
            "latency of the network, 0.12 GB/s in 80 requests a second of 1.5 MB, 400 ms each; only"
            " threads fetch ahead: leave out num_threads=0",
        ),
        (
            {"requests": 800, "requested_nbytes": 1_200_000_000, "_flight_seconds": 40.0},
            "latency of the network, 0.12 GB/s in 80 requests a second of 1.5 MB, 50 ms each; only"
            " 4.0 of 32 requests were on their way at a time: make prefetch or fetch_bytes larger",
        ),
        (
            {"requests": 800, "requested_nbytes": 1_200_000_000},
            "bandwidth of the network, 0.12 GB/s in 80 requests a second of 1.5 MB, 400 ms each;"
            ' read nearer to the data, store them compressed, or use cache="disk"',
        ),
        (
            {"requests": 32000, "requested_nbytes": 128_000_000},
            "rate of requests, 0.013 GB/s in 3,200 requests a second of 4 kB, 10 ms each; S3"
            " permits some 5,500 a second for a prefix; read larger pieces"
            ' (shuffle="window" or larger chunks), or use cache="disk"',
        ),
    ],
)
def test_sentences_of_far_files(given: dict[str, Any], sentence: str) -> None:
    sentence = f"data-bound: waited 50 % of the time; the limit is the {sentence}"
    assert told(**FAR | {"_most_flights": 32} | given) == sentence
    kept = told(**FAR | {"_most_flights": 32, "cache": "disk: 1 of at most 2 bytes"} | given)
    assert kept == sentence.replace(', or use cache="disk"', "")


@pytest.mark.parametrize(
    "stages",
    [
        {"fetch": 2.0, "decode": 7.0, "read": 4.0},  # a batch waits less than the loop does
        {"fetch": 11.0, "decode": 9.0},  # the threads have work
    ],
)
def test_decoding_is_the_limit_where_fetching_is_not(stages: dict[str, float]) -> None:
    sentence = told(**FAR | {"stages": stages, "requests": 100, "requested_nbytes": 100})
    assert "the limit is shuffle+deflate decoding" in sentence


@pytest.mark.parametrize(
    "given",
    [
        {"batches": 0, "elapsed_seconds": 0.0, "wait_seconds": 0.0},
        {"batches": 1, "_waits": 0, "elapsed_seconds": 0.0, "wait_seconds": 0.0},
        {"stages": {}},
    ],
)
def test_nothing_to_tell_yet(given: dict[str, Any]) -> None:
    assert told(**given) == "nothing to tell yet: fewer than two batches were delivered"


@each(
    "given, sentence",
    [
        (  # a batch takes 1 s of threads; the loop takes one a second: 2 threads could give two
            {"wait_seconds": 0.0},
            "not data-bound: waited 0.0 % of the time; the reader could give 2.0x what the loop"
            " takes",
        ),
        (
            {"wait_seconds": 0.19, "stages": {"decode": 1.1}},
            "not data-bound: waited 1.9 % of the time; the reader could give 20.0x what the loop"
            " takes",
        ),
        (
            {"wait_seconds": 0.19, "stages": {"decode": 1.1}, "num_threads": 0},
            "not data-bound: waited 1.9 % of the time; the reader could give 10.0x what the loop"
            " takes",
        ),
        (  # not even if threads wait for the GIL
            {"wait_seconds": 0.1, "gil_wait_seconds": 100.0},
            "not data-bound: waited 1.0 % of the time; the reader could give 2.0x what the loop"
            " takes",
        ),
        (
            {},
            "data-bound: waited 50 % of the time; the limit is shuffle+deflate decoding, 3.1 GB/s"
            " on 2 threads",
        ),
        (
            {"wait_seconds": 0.25, "num_threads": 1, "filters": ("zstd",)},
            "data-bound: waited 2.5 % of the time; the limit is zstd decoding, 1.6 GB/s on 1"
            " thread",
        ),
        (
            {"wait_seconds": 9.96, "num_threads": 0},
            "data-bound: waited 100 % of the time; the limit is shuffle+deflate decoding, 1.6 GB/s"
            " on 1 thread",
        ),
        (
            {"stages": {"read": 8.0, "decode": 7.0}},
            "data-bound: waited 50 % of the time; the limit is reading, 2.8 GB/s on 2 threads",
        ),
        (
            {"stages": {"read": 22.0}, "direct_share": 0.0, "fallback_reads": 11, "filters": ()},
            "data-bound: waited 50 % of the time; the limit is reading through h5py, 1 GB/s on 2"
            " threads",
        ),
        (  # decoding is not what h5py is seen to do
            {"direct_share": 0.5},
            "data-bound: waited 50 % of the time; the limit is shuffle+deflate decoding, 3.1 GB/s"
            " on 2 threads",
        ),
        *(
            (
                {"stages": {stage: 11.0, "read": 1.0}},
                f"data-bound: waited 50 % of the time; the limit is {work}, 2 GB/s on 2 threads",
            )
            for stage, work in {
                "plan": "planning",
                "place": "copying samples out of chunks",
                "transform": "permuting, casting and scaling",
                "postprocess": "postprocess",
                "upload": "uploading",
            }.items()
        ),
        (
            {"gil_wait_seconds": 11.0},
            "data-bound: waited 50 % of the time; the reader's threads spent 50 % of their time"
            " waiting for the GIL: the loop holds it; call less Python in it, or make batches"
            " larger",
        ),
        (  # a quarter is not too much
            {"gil_wait_seconds": 11.0 / 3},
            "data-bound: waited 50 % of the time; the limit is shuffle+deflate decoding, 3.1 GB/s"
            " on 2 threads",
        ),
        (  # nor does a loop hold it that waits most of the time
            {"gil_wait_seconds": 11.0, "wait_seconds": 6.1},
            "data-bound: waited 61 % of the time; the limit is shuffle+deflate decoding, 3.1 GB/s"
            " on 2 threads",
        ),
        (  # nor does the loop hold it, where the threads are busy with their work
            {"gil_wait_seconds": 22.0, "stages": {"decode": 22.0}},
            "data-bound: waited 50 % of the time; the limit is shuffle+deflate decoding, 1 GB/s"
            " on 2 threads",
        ),
    ],
)
def test_sentences(given: dict[str, Any], sentence: str) -> None:
    assert told(**given) == sentence


# --- of a reader -----------------------------------------------------------------------------


def values_of(*shape: int, dtype: str = "i4") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


def write_only_h5py(path: Path, rows: int) -> None:
    """Add "data", which only h5py may read."""
    with h5py.File(path, "a") as file:
        file.create_dataset("data", data=values_of(rows), dtype=type_for_h5py())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """240 samples: `data`, in 15 chunks, with `labels`, contiguous."""
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data", data=values_of(240, 10), chunks=(16, 10), **GZIP)
        file["labels"] = values_of(240, dtype="i8")
    return tmp_path / "f.h5"


def open_reader(path: Any, **options: Any) -> AsyncReader:
    return AsyncReader(hdf5_path=path, **{"batch_size": 16, "device": "cpu", **options})


def stored_nbytes(path: Path, *names: str) -> int:
    with h5py.File(path) as file:
        return sum(file[name].id.get_storage_size() for name in names)


@each("num_threads", [0, 1, 3])
@each("batch_size", [16, 48, 240])
def test_an_epoch_in_order_reads_each_byte_once(
    path: Path, batch_size: int, num_threads: int
) -> None:
    with open_reader(path, batch_size=batch_size, num_threads=num_threads) as reader:
        for epoch in range(1, 3):
            read_exactly_an_epoch(reader)
            stats = reader.stats()
            assert stats.batches == epoch * len(reader)
            assert stats.samples == epoch * 240
            assert stats.nbytes == epoch * reader.nbytes == epoch * 240 * 48
            assert stats.read_nbytes == epoch * stored_nbytes(path, "data", "labels")
            assert stats.decoded_chunks == epoch * 15
        assert stats.fallback_reads == 0
        assert stats.direct_share == 1.0
        assert stats.ways == {"data": BY_US, "labels": BY_US}
        assert stats.filters == ("deflate",)
        assert stats.num_threads == num_threads


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_is_kept_is_not_read_again(path: Path, num_threads: int) -> None:
    """So small a dataset is decoded once, whatever the order."""
    options = {"shuffle": "full", "batch_size": 10, "labels_field": None}
    with open_reader(path, num_threads=num_threads, **options) as reader:
        for _ in range(3):
            read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == 15
        assert reader.stats().read_nbytes == stored_nbytes(path, "data")
        assert reader.stats().samples == 720


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_padded_last_chunk_is_kept_too(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values_of(241, 10), chunks=(16, 10), **GZIP)
    options = {"shuffle": "full", "batch_size": 10, "labels_field": None}
    with open_reader(path, num_threads=num_threads, **options) as reader:
        for _ in range(3):
            read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == 16


@pytest.mark.parametrize("num_threads", [0, 2])
def test_shuffled_rows_of_raw_chunks_are_read_alone(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values_of(100, 7), chunks=(16, 7))
        file["labels"] = values_of(100)
    with open_reader(path, shuffle="full", num_threads=num_threads) as reader:
        read_exactly_an_epoch(reader)
        stats = reader.stats()
        assert (stats.read_nbytes, stats.decoded_chunks) == (100 * 32, 0)
        assert stats.filters == ()


def test_times(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field("data", dtype="f4", scale=2.0)
    options = {"fields": {"x": field}, "num_threads": 0, "postprocess": lambda x: x + 1}
    with open_reader(path, **options) as reader:
        # Each look is a second after the last one: whatever keeps the loop from running meanwhile.
        clock = map(float, itertools.count()).__next__
        monkeypatch.setattr("h5async.reader.delivery.time.perf_counter", clock)
        read_exactly_an_epoch(reader)
        monkeypatch.undo()
        stats = reader.stats()
    assert tuple(stats.stage_seconds) == STAGES
    for stage in ("plan", "decode", "transform", "postprocess"):
        assert stats.stage_seconds[stage] > 0, stage
    assert stats.stage_seconds["upload"] == 0, "nothing is uploaded on the CPU"
    assert stats.busy_seconds == pytest.approx(sum(stats.stage_seconds.values()))
    assert 0 < stats.wait_p50_seconds <= stats.wait_p99_seconds <= stats.wait_seconds
    assert stats.wait_seconds <= stats.elapsed_seconds
    assert (stats.wait_seconds, stats.elapsed_seconds) == (14.0, 28.0)
    assert stats.waited_share == 0.5
    assert stats.gil_wait_seconds >= 0
    assert str(stats).startswith("data-bound: waited ")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_before_the_first_batch_and_after_the_end(path: Path, num_threads: int) -> None:
    reader = open_reader(path, num_threads=num_threads)
    before = reader.stats()
    assert (before.batches, before.samples, before.nbytes) == (0, 0, 0)
    assert before.elapsed_seconds == before.wait_seconds == before.wait_p99_seconds == 0.0
    assert before.ways == {"data": BY_US, "labels": BY_US}
    assert str(before) == "nothing to tell yet: fewer than two batches were delivered"
    assert (before.waited_share, before.headroom) == (0.0, 1.0)
    reader.get_next_batch()
    assert str(reader.stats()).startswith("nothing to tell yet")
    reader.close()
    read_all = open_reader(path, num_threads=num_threads)
    read_exactly_an_epoch(read_all)
    last = read_all.stats()
    read_all.close()
    read_all.close()
    assert read_all.stats() == last
    assert str(read_all.stats()) == str(last)
    assert (last.batches, last.samples, last.decoded_chunks) == (15, 240, 15)


def test_what_failed_is_not_delivered(path: Path) -> None:
    spoil_chunk(path, 2)
    with open_reader(path, num_threads=0) as reader:
        for number in range(15):
            if number == 2:
                with pytest.raises(ReadError):
                    reader.get_next_batch()
            else:
                reader.get_next_batch()
        assert reader.stats().samples == 240 - 16
        assert reader.stats().nbytes == (240 - 16) * 48


# --- ways ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_each_way(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file["plain"] = values_of(40, 3)
        file.create_dataset("packed", data=values_of(40, 3), chunks=(8, 3), scaleoffset=0)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((40,))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I32LE, space, plist)
    write_only_h5py(path, 40)
    fields = {"a": "plain", "b": "packed", "c": "compact", "d": "data"}
    with open_reader(path, fields=fields, num_threads=num_threads, batch_size=8) as reader:
        read_exactly_an_epoch(reader)
        stats = reader.stats()
        assert stats.ways == {"a": BY_US, "b": BY_US, "c": "memory", "d": "h5py"}
        assert stats.direct_share == pytest.approx(28 / 32)
        assert stats.fallback_reads == reader.fallback_reads == 5
        assert stats.decoded_chunks == 5
        assert stats.filters == ("scaleoffset",)


def test_several_ways_of_several_files(tmp_path: Path) -> None:
    write_only_h5py(tmp_path / "a.h5", 30)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("data", data=values_of(90), chunks=(8,), **GZIP)
    with open_reader([tmp_path / "a.h5", tmp_path / "b.h5"], labels_field=None) as reader:
        read_exactly_an_epoch(reader)
        stats = reader.stats()
        assert stats.ways == {"data": " and ".join(sorted({BY_US, "h5py"}))}
        assert stats.direct_share == 0.75
        assert stats.fallback_reads == 2


def test_sources_of_a_virtual_dataset_have_ways(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        sources = h5py.VirtualLayout((60,), np.int32)
        for number, storage in enumerate([GZIP, {"scaleoffset": 0}]):
            name = f"part{number}"
            file.create_dataset(name, data=values_of(30), chunks=(10,), **storage)
            sources[30 * number : 30 * number + 30] = h5py.VirtualSource(file[name])
        file.create_virtual_dataset("data", sources)
    with open_reader(path, labels_field=None, batch_size=10) as reader:
        read_exactly_an_epoch(reader)
        stats = reader.stats()
        assert stats.ways == {"data": BY_US}
        assert (stats.decoded_chunks, stats.direct_share) == (6, 1.0)
        assert set(stats.filters) == {"deflate", "scaleoffset"}


def test_of_no_samples_at_all(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data"] = np.zeros((0, 3))
    with open_reader(tmp_path / "f.h5", labels_field=None) as reader:
        assert list(reader) == []
        assert reader.stats().batches == 0
        assert "nothing to tell yet" in str(reader.stats())


def test_opening_is_timed(path):
    begin = time.perf_counter()
    with AsyncReader(hdf5_path=path, device="cpu") as reader:
        took = time.perf_counter() - begin
        assert 0 < reader.stats().open_seconds <= took
        assert reader.stats().as_dict()["open_seconds"] == reader.stats().open_seconds
