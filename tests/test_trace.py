"""Traces: what a reader does, as Chrome trace events; h5py and `stats()` are the truth."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gpus import use_gpu

from h5async import (
    AsyncReader,
    ConfigError,
    Field,
    MissingPackageError,
    OutOfMemoryError,
    PostprocessError,
    ReaderClosedError,
    ReadError,
)
from h5async.core.binding import CoreTrace, load_core
from h5async.fill.outcomes import Recorded
from h5async.observe.tracing import write_trace
from h5async.system.timeline import CORE_STAGES, Event, Recorder, ThreadName, Timeline

CONSUMER = {"wait", "in use", "request"}
SAMPLES = 600


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.h5"
    data = np.arange(SAMPLES * 48, dtype="u2").reshape(SAMPLES, 48)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(7, 48), compression="gzip")
        file["labels"] = np.arange(SAMPLES)
        file.create_dataset("text", data=[f"sample {i}" for i in range(SAMPLES)])
        file.create_dataset("far", data=data, chunks=(50, 48), scaleoffset=0)
    return path


def loaded(trace: Path) -> dict[str, Any]:
    """Return a trace, of which all that any trace must be was checked."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as file:
        found: dict[str, Any] = json.load(file)
    assert found["otherData"]["format"] == "h5async trace 1"
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in found["traceEvents"]:
        assert event["ph"] in "MXstf"
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert length >= 0
            tracks[event["pid"], event["tid"]].append((begin, begin + length, event["name"]))
    for events in tracks.values():
        nests(events)
    assert found["otherData"]["events"] == sum(map(len, tracks.values()))
    return found


def nests(events: list[tuple[int, int, str]]) -> None:
    """Events of a thread lie one behind the other, or one in the other."""
    within: list[tuple[int, int, str]] = []
    for event in sorted(events, key=lambda event: (event[0], -event[1])):
        while within and within[-1][1] <= event[0]:
            within.pop()
        assert not within or event[1] <= within[-1][1], (within[-1], event)
        within.append(event)


def complete(trace: Path) -> list[dict[str, Any]]:
    return [event for event in loaded(trace)["traceEvents"] if event["ph"] == "X"]


def stages(trace: Path) -> Counter[str]:
    return Counter(event["name"] for event in complete(trace))


def seconds(trace: Path) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event in complete(trace):
        found[event["name"]] += event["dur"] / 1e6
    return found


def batches_of(trace: Path, stage: str) -> list[tuple[int, int]]:
    return [
        (event["args"]["epoch"], event["args"]["batch"])
        for event in complete(trace)
        if event["name"] == stage
    ]


# --- what is in it ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_a_trace_has_what_was_done_for_each_batch(path: Path, num_threads: int) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=100, num_threads=num_threads) as reader:
        running = reader.trace(trace)
        for _ in range(2):
            for _ in reader:
                pass
        running.stop()
    every = list(itertools.product(range(2), range(6)))
    for stage in ("wait", "in use"):
        assert batches_of(trace, stage) == every
    for stage in ("plan", "decode", "place"):
        assert set(every) <= set(batches_of(trace, stage)), "and those that are read ahead"
    assert set(every) <= set(batches_of(trace, "request"))
    fields = {event["args"].get("field") for event in complete(trace) if event["name"] == "decode"}
    assert fields == {"data"}
    files = {event["args"].get("file") for event in complete(trace) if event["name"] == "decode"}
    assert files <= {str(path), None}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_batches_that_the_core_takes_are_traced(path: Path, num_threads: int) -> None:
    """Each is requested, waited for once and in use once, in this order."""
    if load_core() is None:
        pytest.skip("there is no core")
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=10, num_threads=num_threads) as reader:
        turns = reader._engine.ring.turns
        with reader.trace(trace):
            for _ in range(2):
                for _ in reader:
                    pass
        assert turns is not None
        assert turns.taken > len(reader)  # type: ignore[attr-defined]
    expected = [(epoch, batch) for epoch in range(2) for batch in range(SAMPLES // 10)]
    for stage in ("wait", "in use"):
        assert batches_of(trace, stage) == expected
    requested = dict.fromkeys(batches_of(trace, "request"))  # some again, when Python goes on
    assert [one for one in requested if one in expected] == expected


def test_stages_of_a_trace_are_those_of_the_statistics(path: Path) -> None:
    """Those of Python are looked at by two clocks, one within the other.

    A thread may be kept from running between two looks, but not each time that this is tried.
    """
    for _ in range(20):
        found, taken = _stages_of_an_epoch(path)
        assert {stage for stage in found if found[stage]} == {s for s in taken if taken[s]}
        if found == pytest.approx(taken, rel=0.5, abs=0.01):
            break
    else:
        assert found == pytest.approx(taken, rel=0.5, abs=0.01)


def _stages_of_an_epoch(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each stage by a trace, and by the statistics."""
    trace = path.with_name("t.json")
    reader = AsyncReader(
        hdf5_path=path,
        fields={
            "data": Field("data", dtype="float32", scale=0.5),
            "labels": "labels",
            "text": "text",
            "far": Field("far", dtype="int64"),
        },
        batch_size=50,
        postprocess=lambda *arrays: None,
        shuffle="window",
    )
    with reader:
        with reader.trace(trace):
            for _ in reader:
                pass
            reader.close()  # nothing is at work any more
        stats = reader.stats()
    found, taken = seconds(trace), dict(stats.stage_seconds)
    for stage in ("upload", "fetch"):  # of the host's memory, and of local files, is none
        assert stage not in found
        assert not taken.pop(stage)
    return {stage: found.get(stage, 0.0) for stage in taken}, taken


@pytest.mark.usefixtures("h5py_way")
def test_the_h5py_way_is_traced(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=64, io="pread") as reader, reader.trace(trace):
        for _ in reader:
            pass
    found = stages(trace)
    assert {"plan", "read", *CONSUMER} <= set(found)
    assert {event["args"].get("field") for event in complete(trace)} >= {"data", "labels"}
    assert {event["args"].get("file") for event in complete(trace)} == {None, str(path)}


def test_h5pys_way_is_traced(path: Path) -> None:
    trace = path.with_name("t.json")
    with h5py.File(path, "a") as file:
        file["half"] = np.zeros(SAMPLES, [("a", "i4"), ("b", "f8")])
        file.create_dataset("odd", data=np.zeros((SAMPLES, 3), ">f2"), chunks=(50, 3), shuffle=True)
    fields = {"text": "text", "half": "half", "odd": "odd"}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=64) as reader:
        with reader.trace(trace):
            for _ in reader:
                pass
        ways = reader.stats().ways
    read = {event["args"].get("field") for event in complete(trace) if event["name"] == "read"}
    assert {name for name, way in ways.items() if way == "h5py"} <= read


def test_what_is_in_memory_is_traced_as_such(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=64, cache="host") as reader:
        for _ in reader:
            pass
        reader.set_epoch(5)  # what was read ahead was not in memory yet
        with reader.trace(trace):
            for _ in reader:
                pass
    read = [event["args"] for event in complete(trace) if event["name"] == "read"]
    assert {args["file"] for args in read if (args["epoch"], args["batch"]) == (5, 9)} == {"memory"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["process", 2])
def test_helper_processes_are_traced(path: Path, workers: Any) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50, workers=workers, num_threads=2) as reader:
        for _ in reader:
            pass
        with reader.trace(trace):
            for _ in range(2):
                for _ in reader:
                    pass
    here = os.getpid()
    found = [(event["pid"] == here, event["name"]) for event in complete(trace)]
    assert {name for is_here, name in found if is_here} == CONSUMER
    assert {name for is_here, name in found if not is_here} >= {"plan", "decode", "place"}
    placed = {  # decoded chunks may be kept by now
        (event["args"]["epoch"], event["args"]["batch"])
        for event in complete(trace)
        if event["name"] == "place"
    }
    assert placed >= set(itertools.product((2,), range(8))), "and what had not begun before"


def test_images_ragged_and_sparse_fields_are_traced(tmp_path: Path) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    pixels = np.arange(16 * 16 * 3, dtype="u1").reshape(16, 16, 3)
    file_path, trace = tmp_path / "i.h5", tmp_path / "t.json"
    with h5py.File(file_path, "w") as file:
        images = file.create_dataset("images", (40,), h5py.vlen_dtype("u1"))
        for i in range(40):
            images[i] = np.frombuffer(imagecodecs.png_encode(pixels), "u1")
        matrix = file.create_group("x")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = "csr_matrix", (40, 9)
        matrix["data"] = np.ones(80, "f4")
        matrix["indices"] = np.tile([1, 5], 40).astype("i4")
        matrix["indptr"] = np.arange(0, 81, 2)
    from h5async import ImageField

    fields = {"images": ImageField("images"), "x": "x"}
    with (
        AsyncReader(hdf5_path=file_path, fields=fields, batch_size=8) as reader,
        reader.trace(trace),
    ):
        for _ in reader:
            pass
    of_stage = defaultdict(set)
    for event in complete(trace):
        of_stage[event["name"]].add(event["args"].get("field"))
    assert of_stage["decode"] == {"images"}
    assert of_stage["read"] <= {"images", "x", None}, "a field's columns have its name"
    assert of_stage["read"] & {"images", "x"}


def test_given_samples_have_no_epoch(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=10) as reader, reader.trace(trace):
        reader.fetch_data([3, 4])
        reader.get_next_batch()
        reader.read([1, 2])
    given = [event for event in complete(trace) if event["args"].get("batch") == "of given samples"]
    assert {"request", "wait", "in use", "decode"} <= {event["name"] for event in given}
    assert not any("epoch" in event["args"] for event in given)


def test_arrows_lead_from_the_request_to_the_wait(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=100) as reader, reader.trace(trace):
        for _ in reader:
            pass
    arrows = defaultdict(list)
    for event in loaded(trace)["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append((event["ph"], event["ts"]))
    assert len(arrows) == 6
    for ends in arrows.values():
        assert [phase for phase, _ in ends] == ["s", "t", "f"]


def test_threads_have_their_names(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50, num_threads=2) as reader:
        with reader.trace(trace):
            for _ in reader:
                pass
        ours = {thread.name for thread in threading.enumerate() if "h5async" in thread.name}
        native = {thread.native_id for thread in threading.enumerate()}
    metadata = [event for event in loaded(trace)["traceEvents"] if event["ph"] == "M"]
    names = {e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    assert "MainThread (takes the batches)" in names
    assert names - {"MainThread (takes the batches)"} <= ours
    assert {e["tid"] for e in metadata if e["name"] == "thread_name"} <= native
    (process,) = {e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert process == f"h5async: {path}"


# --- when it begins and ends ------------------------------------------------------------------


def test_a_trace_may_begin_in_the_midst(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50) as reader:
        batches = iter(reader)
        for _ in range(4):
            next(batches)
        with reader.trace(trace) as running:
            assert "running" in repr(running)
            for _ in range(3):
                next(batches)
        assert "ended" in repr(running)
        running.stop()  # once more
        rest = sum(1 for _ in batches)
    assert rest == 5
    assert batches_of(trace, "wait") == [(0, 4), (0, 5), (0, 6)]
    assert batches_of(trace, "in use") == [(0, 3), (0, 4), (0, 5), (0, 6)]
    assert all(e["args"] for e in complete(trace)), "batches that were under way have names"


def test_a_reader_has_one_trace_at_a_time(path: Path) -> None:
    first, second = path.with_name("1.json"), path.with_name("2.json")
    with AsyncReader(hdf5_path=path, batch_size=100) as reader:
        running = reader.trace(first)
        with pytest.raises(ConfigError, match=r"1\.json\); end it by its stop\(\)"):
            reader.trace(second)
        assert not second.exists()
        for _ in reader:
            pass
        running.stop()
        with reader.trace(second):
            for _ in reader:
                pass
    assert batches_of(first, "wait") == [(0, number) for number in range(6)]
    assert batches_of(second, "wait") == [(1, number) for number in range(6)]


def test_two_readers_are_traced_apart(path: Path) -> None:
    with (
        AsyncReader(hdf5_path=path, batch_size=100) as one,
        AsyncReader(hdf5_path=path, batch_size=200) as other,
        one.trace(path.with_name("1.json")),
        other.trace(path.with_name("2.json")),
    ):
        for _ in zip(one, other, strict=False):
            pass
    assert len(batches_of(path.with_name("1.json"), "wait")) == 4
    assert len(batches_of(path.with_name("2.json"), "wait")) == 3


def test_a_trace_ends_with_its_reader(path: Path) -> None:
    trace = path.with_name("t.json")
    reader = AsyncReader(hdf5_path=path, batch_size=100)
    running = reader.trace(trace)
    reader.get_next_batch()
    assert loaded(trace)["otherData"]["note"] == "the process ended before the trace did"
    reader.close()
    assert "note" not in loaded(trace)["otherData"]
    assert batches_of(trace, "in use") == [(0, 0)]
    written = trace.stat().st_mtime_ns
    running.stop()
    reader.close()
    assert trace.stat().st_mtime_ns == written
    with pytest.raises(ReaderClosedError):
        reader.trace(trace)


@pytest.mark.slow
def test_a_trace_ends_with_a_reader_that_is_dropped(path: Path) -> None:
    trace = path.with_name("t.json")
    reader = AsyncReader(hdf5_path=path, batch_size=100)
    running = reader.trace(trace)
    reader.get_next_batch()
    del reader
    gc.collect()
    assert batches_of(trace, "wait") == [(0, 0)]
    assert "ended" in repr(running)


def test_a_loop_that_is_left_or_fails_leaves_a_whole_trace(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50) as reader:
        with reader.trace(trace):
            for number, _ in enumerate(reader):
                if number == 3:
                    break
        assert len(batches_of(trace, "wait")) == 4
        with pytest.raises(KeyError), reader.trace(trace):
            _left_by_an_error(reader)
        assert len(batches_of(trace, "wait")) == 1
        with pytest.raises(ZeroDivisionError), reader, reader.trace(trace):
            _fails_after(reader)
    assert len(batches_of(trace, "wait")) == 1


def _left_by_an_error(reader: AsyncReader) -> None:
    for _ in reader:
        raise KeyError


def _fails_after(reader: AsyncReader) -> None:
    next(iter(reader))
    raise ZeroDivisionError


def test_errors_of_workers_are_in_the_trace(path: Path) -> None:
    trace = path.with_name("t.json")

    def fails(data: Any, labels: Any, *, number: int) -> None:
        if number == 2:
            raise KeyError(number)

    with AsyncReader(hdf5_path=path, batch_size=100, postprocess=fails) as reader:
        with reader.trace(trace):
            for _ in range(2):
                reader.get_next_batch()
            with pytest.raises(PostprocessError):
                reader.get_next_batch()
            reader.get_next_batch()
    assert batches_of(trace, "wait") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert batches_of(trace, "in use") == [(0, 0), (0, 1), (0, 3)]
    assert (0, 2) in batches_of(trace, "postprocess")


ENDS = {
    "exit": "",
    "exception": "raise KeyError",
    "sys.exit": "sys.exit(3)",
    "thread": "threading.Thread(target=lambda: [None for _ in reader], daemon=True).start()",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_interpreter_that_ends_writes_the_trace(path: Path, end: str) -> None:
    trace = path.with_name("t.json")
    script = f"""
import sys, threading
from h5async import AsyncReader
reader = AsyncReader(hdf5_path={str(path)!r}, batch_size=50)
trace = reader.trace({str(trace)!r})
reader.get_next_batch()
{end}
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True)
    found = loaded(trace)
    assert "note" not in found["otherData"]
    assert (0, 0) in batches_of(trace, "wait")


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_trace_that_says_so(path: Path) -> None:
    trace = path.with_name("t.json")
    script = f"""
import os, signal
from h5async import AsyncReader
reader = AsyncReader(hdf5_path={str(path)!r}, batch_size=50)
trace = reader.trace({str(trace)!r})
reader.get_next_batch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert loaded(trace)["otherData"]["note"] == "the process ended before the trace did"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_trace_alone(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50) as reader, reader.trace(trace) as running:
        reader.get_next_batch()
        child = os.fork()
        if child == 0:
            running.stop()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        reader.get_next_batch()
        assert "note" in loaded(trace)["otherData"], "the child has not written it"
    assert batches_of(trace, "wait") == [(0, 0), (0, 1)]


# --- limits and refusals ----------------------------------------------------------------------


def test_the_first_events_are_kept_and_others_counted(path: Path) -> None:
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=10) as reader:
        with reader.trace(trace, max_events=20):
            for _ in reader:
                pass
    found = loaded(trace)["otherData"]
    assert found["events"] == 20
    assert found["dropped_events"] > 60, "a wait for each batch, and more"
    assert batches_of(trace, "wait")[0] == (0, 0)


def test_a_trace_may_be_compressed(path: Path) -> None:
    trace = path.with_name("t.json.gz")
    with AsyncReader(hdf5_path=path, batch_size=100) as reader, reader.trace(trace):
        for _ in reader:
            pass
    assert trace.read_bytes()[:2] == b"\x1f\x8b"
    assert len(batches_of(trace, "wait")) == 6


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none/t.json", "No such file or directory"), ("folder", "is not a file"), (5, "found 5")],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(
    path: Path, name: Any, reason: str
) -> None:
    (path.parent / "folder").mkdir()
    before = sorted(path.parent.iterdir())
    with AsyncReader(hdf5_path=path) as reader:
        with pytest.raises(ConfigError, match=reason):
            reader.trace(name if isinstance(name, int) else path.parent / name)
        assert sorted(path.parent.iterdir()) == before
        with reader.trace(path.with_name("t.json")):
            reader.get_next_batch()


def test_a_device_is_not_replaced_by_a_file(path: Path) -> None:
    with AsyncReader(hdf5_path=path) as reader, pytest.raises(ConfigError, match="not a file"):
        reader.trace("/dev/null")
    assert not Path("/dev/null").is_file()


def test_a_trace_goes_where_it_was_meant_to(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with AsyncReader(hdf5_path=path) as reader, reader.trace("t.json"):
        reader.get_next_batch()
        monkeypatch.chdir(tmp_path / "other")
    assert len(batches_of(tmp_path / "t.json", "wait")) == 1


@pytest.mark.parametrize("bad", [0, -1, "many", 1.5, 10**12, 2**70])
def test_a_limit_must_be_a_number(path: Path, bad: Any) -> None:
    with AsyncReader(hdf5_path=path) as reader, pytest.raises(ConfigError, match="max_events"):
        reader.trace(path.with_name("t.json"), max_events=bad)


def test_memory_for_events_may_be_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise MemoryError("no")

    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path) as reader:
        with monkeypatch.context() as patch:
            patch.setattr("h5async.fill.filling.CoreTrace", refuse)
            patch.setattr(
                "h5async.system.timeline.Timeline.note_threads", refuse
            )  # without the core
            with pytest.raises(OutOfMemoryError, match="max_events"):
                reader.trace(trace)
        assert not trace.exists()
        with reader.trace(trace):
            reader.get_next_batch()
    assert stages(trace)["in use"] == 1


def test_a_batch_is_asked_for_while_another_thread_takes_the_events() -> None:
    timeline = Timeline(100)
    timeline.requested(0, [(0, 1, 0, 1)])
    timeline.requested(1, [(0, 2, 0, 2)])
    before = timeline._requests  # as a thread has it that is about to add one

    class Batches(dict[int, tuple[int, int]]):
        def __setitem__(self, serial: int, place: tuple[int, int]) -> None:
            before.append((2, 3, 0, 3, 0, 3))
            super().__setitem__(serial, place)

    timeline.batches = Batches()
    assert [event.batch for event in timeline.take_events(9)] == [1, 2]


def test_a_trace_needs_a_path(path: Path) -> None:
    with AsyncReader(hdf5_path=path) as reader, pytest.raises(ConfigError, match="needs a path"):
        reader.trace()


def test_a_folder_that_goes_away_is_told_of(
    path: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    gone = r"cannot be written to .*t\.json: No such"
    reader = AsyncReader(hdf5_path=path)
    running = reader.trace(folder / "t.json")
    (folder / "t.json").unlink()
    folder.rmdir()
    with pytest.raises(ReadError, match=gone):
        running.stop()
    assert not caplog.text
    folder.mkdir()
    reader.trace(folder / "t.json")
    (folder / "t.json").unlink()
    folder.rmdir()
    with pytest.raises(ReadError, match=gone):
        reader.close()
    assert "cannot be written" in caplog.text
    with pytest.raises(ReaderClosedError):
        reader.get_next_batch()
    reader.close()


# --- nothing is recorded where nobody asks for it ---------------------------------------------


def _traces() -> list[CoreTrace]:
    return [found for found in gc.get_objects() if type(found) is CoreTrace]


@pytest.mark.slow
def test_there_is_no_memory_for_events_without_a_trace(path: Path) -> None:
    gc.collect()  # traces of other tests
    trace = path.with_name("t.json")
    with AsyncReader(hdf5_path=path, batch_size=50) as reader:
        for _ in reader:
            pass
        recorder = reader._engine._recorder
        assert recorder.timeline is None
        assert not _traces()
        with reader.trace(trace):
            for _ in reader:
                pass
            assert len(_traces()) == (load_core() is not None)
        assert recorder.timeline is None
        before = trace.stat().st_mtime_ns
        for _ in reader:
            pass
        assert trace.stat().st_mtime_ns == before
    gc.collect()
    assert not _traces()


@pytest.mark.slow
def test_events_of_the_core_end_with_the_trace(path: Path) -> None:
    if load_core() is None:
        pytest.skip("there is no core")
    gc.collect()  # traces of other tests
    with AsyncReader(hdf5_path=path, batch_size=50, num_threads=0) as reader:
        running = reader.trace(path.with_name("t.json"))
        reader.get_next_batch()
        (found,) = _traces()
        count = found.count
        assert count > 0
        running.stop()
        for _ in reader:
            pass
        assert found.count == count


# --- its parts --------------------------------------------------------------------------------


def test_the_core_keeps_the_first_events(tmp_path: Path, path: Path) -> None:
    core = load_core()
    if core is None:
        pytest.skip("there is no core")
    trace = CoreTrace(core, 5)
    assert trace.count == 0
    assert trace.events().size == 0
    with AsyncReader(hdf5_path=path, batch_size=50, num_threads=0) as reader:
        for scratch in reader._engine.filler._reader._scratches:  # type: ignore[union-attr]
            scratch.record(trace)
        for _ in reader:
            pass
    assert trace.count > 5
    events = trace.events()
    assert events.size == 5
    assert (events["end_ns"] >= events["begin_ns"]).all()
    assert (events["thread"] == threading.get_ident()).all()
    assert CORE_STAGES[events["stage"][0]] == "plan"
    assert trace.events(3).tolist() == events[3:].tolist()
    assert trace.events(9).size == 0


def test_ranges_are_opened_and_closed_in_their_order() -> None:
    told: list[str] = []

    def open_range(name: str) -> Any:
        told.append(f"open {name}")
        return lambda: told.append(f"close {name}")

    recorder = Recorder()
    with recorder.ranges("plan"):
        recorder.note("plan", 0, 3)
    recorder.timeline = Timeline(10, [open_range])
    with recorder.ranges("plan"), pytest.raises(KeyError), recorder.ranges("read"):
        raise KeyError
    assert told == [
        "open h5async: plan",
        "open h5async: read",
        "close h5async: read",
        "close h5async: plan",
    ]
    recorder.note("read", 5, 3, 1)
    (event,) = recorder.timeline.take_events(0)
    assert event[:2] == ("read", 5)
    assert event[3:] == (threading.get_ident(), 3, 1, -1)


def test_a_batch_is_in_use_from_a_wait_to_the_next() -> None:
    timeline = Timeline(100)
    timeline.waited(1.0, 2.0, 7, True)
    timeline.waited(3.0, 4.0, 8, False)
    timeline.waited(5.0, 6.0, 8, True)
    found = [(*event[:3], event.batch) for event in timeline.take_events(9_000_000_000)]
    s = 1_000_000_000
    assert found == [
        ("wait", 1 * s, 2 * s, 7),
        ("in use", 2 * s, 3 * s, 7),
        ("wait", 3 * s, 4 * s, 8),
        ("wait", 5 * s, 6 * s, 8),
        ("in use", 6 * s, 9 * s, 8),
    ]


def test_a_file_that_cannot_be_finished_is_left_as_it_was(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    trace.write_text("what was there")
    broken = Event("read", 5, 7, 1, 0, field=object())  # type: ignore[arg-type]
    recorded = Recorded(1, {1: ThreadName("a", 2)}, [broken, broken._replace(stage="read")], 0)

    class Breaks(dict[int, tuple[int, int]]):
        def get(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(trace, [("p", recorded)], Breaks(), 10, {})
    assert trace.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [trace]


# --- other profilers --------------------------------------------------------------------------


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """A stand-in for CuPy's NVTX, and what it was told, by thread."""
    told: list[tuple[int, str]] = []

    class Nvtx:
        @staticmethod
        def RangePush(name: str) -> None:
            told.append((threading.get_ident(), name))

        @staticmethod
        def RangePop() -> None:
            told.append((threading.get_ident(), "end"))

    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", Nvtx())  # type: ignore[arg-type]
    return told


def test_ranges_of_nvtx(path: Path, nvtx: list[tuple[int, str]]) -> None:
    options = {"batch_size": 100, "postprocess": lambda data, labels: None}
    with AsyncReader(hdf5_path=path, device="cpu", **options) as reader:
        with reader.trace(nvtx=True) as running:
            for _ in reader:
                pass
        assert repr(running) == "<Trace without a file, ended>"
        next(iter(reader))
        assert [name for _, name in nvtx].count("h5async: wait") == 6, "none after its end"
    by_thread = defaultdict(list)
    # Only now: as the trace ended, threads may have been at work on batches of the next epoch.
    for thread, name in nvtx:
        by_thread[thread].append(name)
    here = by_thread.pop(threading.get_ident())
    assert here == ["h5async: wait", "end"] * 6
    assert {name for names in by_thread.values() for name in names} >= {"h5async: postprocess"}
    for names in by_thread.values():
        assert 2 * names.count("end") == len(names)


@pytest.mark.slow
@pytest.mark.any_gpu
def test_uploads_are_traced(
    path: Path, monkeypatch: pytest.MonkeyPatch, nvtx: list[tuple[int, str]]
) -> None:
    use_gpu(monkeypatch, 20261123)
    trace = path.with_name("t.json")
    options = {"batch_size": 100, "postprocess": lambda data, labels: None}
    with AsyncReader(hdf5_path=path, device="cuda", **options) as reader:
        with reader.trace(trace, nvtx=True):
            for _ in reader:
                pass
    every = [(0, number) for number in range(6)]
    assert set(every) <= set(batches_of(trace, "upload"))
    assert batches_of(trace, "in use") == every
    assert [name for _, name in nvtx].count("h5async: upload") >= 6


def test_a_package_that_is_missing_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = path.with_name("t.json")
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.profiler", None)  # type: ignore[arg-type]
    with AsyncReader(hdf5_path=path, device="cpu") as reader:
        with pytest.raises(MissingPackageError, match=r"nvtx=True needs CuPy.*pip install"):
            reader.trace(trace, nvtx=True)
        with pytest.raises(MissingPackageError, match=r"torch=True needs PyTorch.*pytorch\.org"):
            reader.trace(trace, torch=True)
        assert not trace.exists()
        with reader.trace(trace):
            reader.get_next_batch()


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_ranges_of_pytorchs_profiler(path: Path, num_threads: int) -> None:
    profiler = pytest.importorskip("torch.profiler")
    trace = path.with_name("t.json")
    options = {"batch_size": 100, "postprocess": lambda data, labels: None}
    with AsyncReader(hdf5_path=path, num_threads=num_threads, **options) as reader:
        with (
            profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile,
            reader.trace(trace, torch=True),
        ):
            for _ in reader:
                pass
    found = Counter(event.name for event in profile.events() if "h5async" in event.name)
    assert found["h5async: wait"] == 6
    # What threads do is shown where PyTorch was asked to profile them, too.
    assert found["h5async: postprocess"] == (6 if num_threads == 0 else 0)
    assert len(batches_of(trace, "wait")) == 6


def test_pytorchs_profiler_shows_all_threads_where_it_is_asked_to(path: Path) -> None:
    profiler = pytest.importorskip("torch.profiler")
    torch = pytest.importorskip("torch")
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    options = {"batch_size": 100, "postprocess": lambda data, labels: None}
    with AsyncReader(hdf5_path=path, **options) as reader:
        with (
            profiler.profile(
                activities=[profiler.ProfilerActivity.CPU], experimental_config=everywhere
            ) as profile,
            reader.trace(torch=True),
        ):
            for _ in reader:
                pass
    threads = defaultdict(set)
    for event in profile.events():
        threads[event.name].add(event.thread)
    assert threads["h5async: wait"]
    assert threads["h5async: postprocess"]
    assert not threads["h5async: wait"] & threads["h5async: postprocess"]
