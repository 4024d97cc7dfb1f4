"""What the logger `h5async` tells, at which level, and that nothing is told twice."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest
from hdf5files import type_for_h5py

from h5async import AsyncReader
from h5async.core.binding import load_core
from h5async.opening import limits
from h5async.reader import engine

needs_core = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")


@pytest.fixture(autouse=True)
def _nothing_was_warned(monkeypatch, caplog):
    monkeypatch.setattr(engine, "_warned", set())
    caplog.set_level("DEBUG", "h5async")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((100, 4), "f4"), chunks=(10, 4))
        file["labels"] = np.arange(100)
        twice = h5py.VirtualLayout((100,), "i8")
        twice[:60] = h5py.VirtualSource(file["labels"])[:60]
        twice[40:] = h5py.VirtualSource(file["labels"])[40:]
        file.create_virtual_dataset("odd", twice)
        file.create_dataset("narrow", (100,), type_for_h5py())
    return path


def reader_of(path, **options):
    return AsyncReader(
        **{"hdf5_path": path, "batch_size": 10, "num_threads": 1, "device": "cpu", **options}
    )


def at(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == getattr(logging, level)]


@needs_core
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_what_was_opened_and_how_it_is_read(path, caplog, workers):
    with reader_of(path, workers=workers, indices="10:") as reader:
        opened = [text for text in at(caplog, "INFO") if text.startswith("opened ")]
        assert len(opened) == 1
        told, _, seconds = opened[0].rpartition(", in ")
        assert told == f"opened {path}: fields data, labels, 90 samples"
        assert re.fullmatch(r"\d+\.\d{3} s", seconds)
        assert f'{path}: field data, dataset "data": is read directly (core)' in caplog.messages
        assert at(caplog, "WARNING") == []
        reader.get_next_batch()
        before = len(caplog.records)
        for _ in range(3):
            for _ in reader:
                pass
        later = caplog.records[before:]
    assert all(record.levelno <= logging.DEBUG for record in later)
    assert all(record.name.startswith("h5async") for record in caplog.records)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_what_costs_speed_is_a_warning_once(path, caplog, workers):
    fields = {"a": "narrow", "b": "odd", "c": "data"}
    for _ in range(2):
        with reader_of(path, fields=fields, workers=workers) as reader:
            reader.get_next_batch()
    through_h5py, also = at(caplog, "WARNING")
    assert 'field a, dataset "narrow": is read through h5py' in through_h5py
    assert through_h5py.endswith("one read at a time: its stored type differs from NumPy's int32")
    assert 'field b, dataset "odd": is read through h5py' in also
    assert also.endswith("a virtual dataset whose mappings overlap")
    assert through_h5py in at(caplog, "DEBUG")


def test_several_files(path, tmp_path, caplog):
    other = tmp_path / "more.h5"
    other.write_bytes(path.read_bytes())
    reader_of([path, other]).close()
    assert any(f"opened {path} and 1 more (data in 2 files): " in t for t in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_cache_that_does_not_fit(path, caplog, workers):
    with reader_of(path, cache="host", cache_bytes=10, workers=workers) as reader:
        warned = [text for text in at(caplog, "WARNING") if "option cache" in text]
        assert len(warned) == 1
        assert "the option cache keeps no rows: " in warned[0]
        assert "do not fit into" in warned[0]
        reader.get_next_batch()
    caplog.clear()
    with reader_of(path, cache="host", workers=workers) as reader:
        reader.get_next_batch()
    assert any("rows are kept: host" in text for text in at(caplog, "INFO"))
    assert not any("cache" in text for text in at(caplog, "WARNING"))


def test_threads_and_chunks_for_which_there_is_no_memory(path, caplog, monkeypatch):
    plan = limits.MemoryBudget.plan

    def less(budget, formats, wanted):
        found = plan(budget, formats, wanted)
        return found._replace(most_threads=2, kept_nbytes=tuple(0 for _ in wanted))

    monkeypatch.setattr(limits.MemoryBudget, "plan", less)
    monkeypatch.setattr(
        "h5async.reader.readersetup.wanted_kept_nbytes", lambda config, layouts, *_: [700, 0]
    )
    reader_of(path, num_threads=4).close()
    warned = at(caplog, "WARNING")
    assert any("memory suffices for 2 of 4 threads" in text for text in warned)
    assert any("700 bytes of decoded chunks should be kept" in text for text in warned)


def test_without_the_core_one_warning_says_so(path, caplog, monkeypatch):
    monkeypatch.setattr(engine, "why_no_core", lambda: "the compiled core is missing: slowly")
    for _ in range(2):
        reader_of(path, fields={"a": "labels", "b": "data"}).close()
    assert [text.split(":")[0] for text in at(caplog, "WARNING")] == [
        "the compiled core is missing"
    ]


@pytest.mark.slow
@needs_core
def test_a_helper_that_restarts(path, caplog):
    with reader_of(path, workers="process") as reader:
        reader.get_next_batch()
        pid = reader._engine.filler.supervisors[0].process._popen.pid
        assert not at(caplog, "WARNING")
        os.kill(pid, signal.SIGKILL)
        for _ in range(9):
            batch = reader.get_next_batch()
            assert batch.labels.tolist() == batch.index.tolist()
    (warned,) = at(caplog, "WARNING")
    assert "SIGKILL" in warned
    assert "another helper takes its place" in warned
    assert not any(isinstance(arg, BaseException) for r in caplog.records for arg in r.args or ())


@needs_core
def test_a_file_that_changes_stays_a_warning_and_is_not_logged(path, caplog):
    with reader_of(path, prefetch=1) as reader, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        reader.get_next_batch()
        os.utime(path, (1, 1))
        for _ in range(9):
            reader.get_next_batch()
    assert len(found) == 1
    assert at(caplog, "WARNING") == []


QUIET = """
import sys, logging
from h5async import AsyncReader
AsyncReader(hdf5_path=sys.argv[1], data_field="narrow", device="cpu", num_threads=0).close()
if sys.argv[2] == "loud":
    logging.basicConfig(format="%(name)s %(levelname)s")
    AsyncReader(hdf5_path=sys.argv[1], data_field="narrow", labels_field="odd").close()
"""


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize(("how", "expected"), [("quiet", ""), ("loud", "h5async.reader WARNING\n")])
def test_nothing_is_printed_unless_the_program_sets_up_logging(path, how, expected):
    done = subprocess.run(
        [sys.executable, "-c", QUIET, path, how], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == expected


def test_names_that_are_not_utf_8_can_be_logged(tmp_path, caplog):
    path = os.fsencode(tmp_path) + b"/\xff.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros(3)
    reader_of(path, labels_field=None).close()
    for text in caplog.messages:
        text.encode()
    assert any(r"\xff.h5" in text for text in caplog.messages)
