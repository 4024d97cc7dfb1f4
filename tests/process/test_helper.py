"""`workers="process"`: what threads give, from a helper process, whose end costs time alone."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import fake_cupy
import h5py
import numpy as np
import pytest
from cases import each
from conftest import SAMPLE
from hdf5files import type_for_h5py

import h5async.deliver.devicepolicy
import h5async.deliver.gpu
import h5async.process.child
import h5async.process.helper
import h5async.process.supervisor
from h5async import (
    AsyncReader,
    BatchTimeoutError,
    ConfigError,
    DatasetError,
    Field,
    PostprocessError,
    ReaderClosedError,
    ReadError,
    UnsafeFileError,
)
from h5async.io.shared import SharedMemory
from h5async.process.messages import NoteUploaded, Record, Started, Starting

N = 53
DEADLOCK_SECONDS = 200


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("helper") / "data.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 99, (N, 6, 5, 3), "u1")
        file.create_dataset("data", data=images, chunks=(7, 3, 5, 3), compression="gzip")
        file["labels"] = np.arange(N)
        terminated = h5py.h5t.C_S1.copy()
        terminated.set_size(8)
        space = h5py.h5s.create_simple((N,))
        file.create_dataset("odd", data=np.arange(N), dtype=type_for_h5py())
        texts = h5py.Dataset(h5py.h5d.create(file.id, b"texts", terminated, space))
        texts[...] = np.array([b"text %d" % i for i in range(N)], "S8")
        file["flags"] = rng.integers(0, 2, N).astype(bool)
        file["nothing"] = np.zeros((N, 0), "f4")
        file["columns"] = rng.normal(size=(4, N)).astype(">f8")
        pair = np.zeros(N, [("energy", "f4"), ("hits", "<i8", (2,))])
        pair["energy"], pair["hits"] = rng.normal(size=N), rng.integers(0, 9, (N, 2))
        file["pairs"] = pair
    return path


@each("drop_last", [True, False])
@each("count", [1, 4])
def test_the_core_hands_over_batches_of_several_epochs(path, drop_last, count):
    options = {"hdf5_path": path, "batch_size": 4, "shuffle": "full", "drop_last": drop_last}
    options |= {"indices": slice(0, 24), "prefetch": count}
    with AsyncReader(**options, num_threads=0) as reader:
        expected = [[batch.copy() for batch in reader] for _ in range(3)]
    with AsyncReader(**options, workers="process") as reader:
        ends = [reader.fetch_data() for _ in range(count)]
        for epoch, number in np.ndindex(3, 6):
            batch, other = reader.get_next_batch(), expected[epoch][number]
            ends.append(reader.fetch_data())
            assert (batch.index == other.index).all()
            assert (batch.data == other.data).all()
            facts = batch.epoch, batch.number, batch.last
            assert facts == (epoch, number, number == 5)
            assert reader.stats(epoch=-1).batches == number + 1
        assert ends == [serial % 6 == 5 for serial in range(len(ends))]
        assert reader._engine.ring.turns.is_lent
        assert reader.stats(epoch=0).batches == reader.stats(epoch=1).batches == 6


FIELDS = {
    "image": Field("data", axes=(0, 3, 1, 2), scale=(0.5, 1.0, 2.0), offset=1.0),
    "raw": "data",
    "labels": "labels",
    "texts": "texts",
    "odd": "odd",
    "flags": "flags",
    "nothing": "nothing",
    "column": Field("columns", num_dim=1),
    "pairs": "pairs",
    "energy": "pairs/energy",
}


def children():
    """Numbers of this process's helper processes."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if "helper_main" in command(pid)}


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    deadline = time.monotonic() + DEADLOCK_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _leaves_no_process():
    yield
    gc.collect()
    wait_until(lambda: not children())


def make(path, **options):
    options = {"batch_size": 8, "device": "cpu", "num_threads": 2, "timeout": 60, **options}
    return AsyncReader(hdf5_path=path, workers="process", **options)


def pid_of(reader):
    return reader._engine.filler.supervisors[0].process._popen.pid


def epochs(path, workers, count=2, **options):
    options = {"batch_size": 8, "device": "cpu", "num_threads": 2, **options}
    with AsyncReader(hdf5_path=path, workers=workers, **options) as reader:
        return [batch.copy() for _ in range(count) for batch in reader]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert np.array_equal(batch.index, other.index)
        assert batch.keys() == other.keys()
        assert (batch.epoch, batch.number, batch.last) == (other.epoch, other.number, other.last)
        for array, truth in zip(batch, other, strict=True):
            assert array.dtype == truth.dtype
            assert array.shape == truth.shape
            assert array.tobytes() == truth.tobytes()


# --- what comes ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "full", "prefetch": 1},
        {"shuffle": "window", "prefetch": 4, "drop_last": True},
        {"shuffle": "full", "num_threads": 0},
        {"shuffle": "window", "rank": 1, "world_size": 3},
        {"shuffle": "full", "cache": "host"},
        {"batch_size": 1000},
        {"io": "pread", "shuffle": "full", "debug_lifetimes": True},
    ],
    ids=str,
)
def test_batches_are_those_of_threads(path, options):
    options = {"fields": FIELDS, **options}
    assert_same(epochs(path, "process", **options), epochs(path, "thread", **options))


def test_batches_are_h5pys(path):
    with h5py.File(path) as file, make(path, shuffle="full") as reader:
        data = file["data"][...]
        for _ in range(2):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])


@pytest.mark.slow
def test_batches_lie_in_the_slots(path):
    with make(path) as reader:
        slots = {a.ctypes.data for slot in reader._engine.setup.slots for a in slot.memory.out}
        for batch in reader:
            assert all(array.ctypes.data in slots for array in batch)
        assert reader.layouts["data"].path == "data"


@pytest.mark.slow
def test_it_says_what_it_did(path):
    with make(path, fields=FIELDS, shuffle="full", cache="host") as reader:
        for _ in range(2):
            for _ in reader:
                pass
        stats = reader.stats()
        assert stats.batches == 14
        assert stats.ways["odd"] == "h5py"
        assert stats.fallback_reads == reader.fallback_reads > 0
        assert stats.cache.startswith("host, 100 % of the samples")
        assert stats.stage_seconds["decode"] > 0
        assert "waiting for the GIL: the loop" not in str(stats)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_it_goes_on_where_a_state_says(path, shuffle):
    options = {"shuffle": shuffle, "fields": {"labels": "labels", "data": "data"}}
    with make(path, **options) as reader:
        for _ in range(3):
            reader.get_next_batch()
        state = json.loads(json.dumps(reader.state_dict()))
    for more in ({}, {"batch_size": 5}):
        with make(path, **options, **more) as reader:
            reader.get_next_batch()
            reader.load_state_dict(state)
            found = [batch.copy() for batch in reader]
            reader.set_epoch(4)
            found += [batch.copy() for batch in reader]
        with AsyncReader(
            hdf5_path=path, device="cpu", **{"batch_size": 8, **options, **more}
        ) as reader:
            reader.load_state_dict(state)
            expected = [batch.copy() for batch in reader]
            reader.set_epoch(4)
            expected += [batch.copy() for batch in reader]
        assert_same(found, expected)


@pytest.mark.slow
def test_it_can_be_sent_to_another_process(path):
    with make(path) as reader, pickle.loads(pickle.dumps(reader)) as other:
        assert other.config.workers == "process"
        assert other.get_next_batch().labels.tolist() == list(range(8))


# --- postprocess ---------------------------------------------------------------------------------


def in_place(data, labels):
    data += 1


def to_others(data, labels):
    return data[:, ::2].astype("f8") / 2, labels[::-1]


def of_any_size(data, labels):
    """Shapes and dtypes change from batch to batch, and there is more and more."""
    repeated = np.repeat(data, 1 + int(labels[0]) % 11, axis=1)
    return repeated.astype("f4" if labels[0] % 2 else "i2"), labels.astype("S5")


def crossed(data, labels):
    return labels, data


@pytest.mark.parametrize("function", [in_place, to_others, of_any_size, crossed])
def test_what_postprocess_makes_comes_over(path, function):
    options = {"postprocess": function, "shuffle": "full", "prefetch": 3}
    assert_same(epochs(path, "process", **options), epochs(path, "thread", **options))


@pytest.mark.slow
def test_functions_of_any_kind_are_sent(path):
    factor = 3
    for function in (
        lambda data, labels: (data, labels * factor),
        functools.partial(lambda n, data, labels: (data, labels * n), 3),
    ):
        with make(path, postprocess=function) as reader:
            assert reader.get_next_batch().labels.tolist() == list(range(0, 24, 3))


@pytest.mark.slow
def test_a_function_by_its_name(path, tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text("def double(d, l): return d, l * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with make(path, postprocess="my_functions:double") as reader:
        assert reader.get_next_batch().labels.tolist() == list(range(0, 16, 2))
    with pytest.raises(ConfigError, match="cannot import 'my_functions:nothing'"):
        make(path, postprocess="my_functions:nothing")


@pytest.mark.slow
def test_a_function_of_the_main_program(path, tmp_path):
    """No guard of ``__main__`` is needed: the program is not run again."""
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from h5async import AsyncReader\n"
        "class Negative(ValueError): pass\n"
        "def negative(data, labels):\n"
        "    if labels[0] == 8: raise Negative('eight')\n"
        "    return data, -labels\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', postprocess=negative,\n"
        "                     batch_size=8, device='cpu')\n"
        "print(reader.get_next_batch().labels.tolist())\n"
        "try:\n"
        "    reader.get_next_batch()\n"
        "except Negative as error:\n"
        "    print(error)\n"
    )
    lines = run(script, path).stdout.splitlines()
    assert lines[0] == str([-i for i in range(8)])
    assert "batch 1 of epoch 0 raised Negative: eight" in lines[1]


def run(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLOCK_SECONDS,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_what_cannot_be_sent_is_refused(path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"postprocess cannot be sent .*lock"):
        make(path, postprocess=lambda data, labels: lock and None)


@pytest.mark.slow
def test_python_objects_cannot_come_back(path):
    def objects(data, labels):
        return data, labels.astype(object)

    with make(path, postprocess=objects) as reader:
        with pytest.raises(PostprocessError, match="dtype object: Python objects cannot"):
            reader.get_next_batch()


# --- errors --------------------------------------------------------------------------------------


class Local(ArithmeticError):
    """Cannot be made from its message alone."""

    def __init__(self, number, what):
        super().__init__(f"{what} {number}")
        self.number = number


def fails_at_one(data, labels):
    if labels[0] == 8:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise Local(3, "outer") from error


def test_errors_come_back_whole(path):
    with make(path, postprocess=fails_at_one) as reader:
        assert reader.get_next_batch().number == 0
        with pytest.raises(ArithmeticError, match="batch 1 of epoch 0 raised Local: outer 3") as e:
            reader.get_next_batch()
        assert isinstance(e.value, PostprocessError)
        cause = e.value.__cause__
        assert isinstance(e.value, Local)
        assert type(cause) is Local
        assert (str(cause), cause.number, e.value.number) == ("outer 3", 3, 3)
        assert "in the helper process" in str(cause.__notes__)
        assert "fails_at_one" in str(cause.__notes__)
        assert isinstance(cause.__cause__, KeyError)
        assert reader.get_next_batch().number == 2


def damaged(path, tmp_path):
    copy = tmp_path / "damaged.h5"
    copy.write_bytes(path.read_bytes())
    with h5py.File(path) as file:
        info = file["data"].id.get_chunk_info(3)
    with copy.open("r+b") as file:
        file.seek(info.byte_offset + 9)
        file.write(b"\xff" * 30)
    return copy


@pytest.mark.slow
def test_a_damaged_chunk_has_the_words_of_threads(path, tmp_path):
    copy, found = damaged(path, tmp_path), {}
    for workers in ("thread", "process"):
        with AsyncReader(hdf5_path=copy, batch_size=8, device="cpu", workers=workers) as reader:
            found[workers] = []
            for _ in range(len(reader)):
                try:
                    found[workers].append(reader.get_next_batch().labels.tolist())
                except ReadError as error:
                    found[workers].append(str(error))
    assert found["thread"] == found["process"]
    assert any(isinstance(entry, str) for entry in found["thread"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"hdf5_path": "nothing.h5"}, ReadError),
        ({"data_field": "other"}, DatasetError),
        ({"num_dim": 9}, ConfigError),
        ({"batch_size": 1 << 50, "data_field": "nothing"}, None),
    ],
)
def test_what_is_wrong_at_the_start(path, options, kind):
    messages = []
    for workers in ("thread", "process"):
        every = {"hdf5_path": path, "device": "cpu", "workers": workers, **options}
        if kind is None:
            AsyncReader(every).close()
            continue
        with pytest.raises(kind) as caught:
            AsyncReader(every)
        messages.append(str(caught.value))
    assert len(set(messages)) <= 1


@pytest.mark.slow
def test_files_outside_are_refused_there_too(path, tmp_path):
    outside = tmp_path / "outside.h5"
    with h5py.File(outside, "w") as file:
        file["data"] = h5py.ExternalLink(str(path), "data")
    with pytest.raises(UnsafeFileError, match="allow_external"):
        make(outside, labels_field=None)


@pytest.mark.slow
def test_a_timeout(path):
    def hangs(data, labels):
        if labels[0] == 8:
            time.sleep(1e6)

    reader = make(path, postprocess=hangs, timeout=0.3)
    pid = pid_of(reader)
    assert reader.get_next_batch(timeout=200).number == 0
    for _ in range(2):
        with pytest.raises(BatchTimeoutError):
            reader.get_next_batch()
    reader.close()  # waits no longer than the timeout for its helper to end
    wait_until(lambda: not is_alive(pid))


def widened(data, labels):
    return data.astype("f8"), labels.astype("f4")


@pytest.mark.slow
def test_many_threads_take_memory_for_what_postprocess_makes(tmp_path):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(3000 * 40).reshape(3000, 40)
        file["labels"] = np.arange(3000)
    with make(path, postprocess=widened, num_threads=8, prefetch=16, shuffle="full") as reader:
        for _ in range(2):
            for batch in reader:
                assert np.array_equal(batch.labels, batch.index)
                assert np.array_equal(batch.data, batch.index[:, None] * 40 + np.arange(40))


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    number: int


def raises_frozen(data, labels):
    raise Frozen(3)


def test_an_error_that_refuses_notes(path):
    with make(path, postprocess=raises_frozen) as reader:
        for _ in range(3):
            with pytest.raises(PostprocessError, match="Frozen"):
                reader.get_next_batch()


@pytest.mark.slow
def test_a_new_helper_finds_relative_paths(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with make(path.name, prefetch=1) as reader:
        reader.get_next_batch()
        monkeypatch.chdir("/")
        os.kill(pid_of(reader), signal.SIGKILL)
        assert reader.get_next_batch().number == 1


@pytest.mark.slow
def test_a_folder_that_was_removed(path, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with make(path, prefetch=1) as reader:
        assert reader.get_next_batch().number == 0
        os.kill(pid_of(reader), signal.SIGKILL)
        assert reader.get_next_batch().number == 1
    with pytest.raises(ReadError, match=r"data\.h5"):
        make("data.h5")


@pytest.mark.slow
def test_restarts_and_many_fields_take_no_more(path):
    fields = {f"f{i}": "data" for i in range(10)}

    def halves(*arrays):
        return tuple(array / 2 for array in arrays)

    with make(path, fields=fields, prefetch=8, postprocess=halves) as reader:
        sizes = []
        for _ in range(3):
            for _ in range(len(reader)):
                with contextlib.suppress(ReadError):
                    reader.get_next_batch()
            sizes.append(os.fstat(reader._engine.filler.shared.fd).st_size)
            assert len(os.listdir(f"/proc/{pid_of(reader)}/fd")) < 110
            os.kill(pid_of(reader), signal.SIGKILL)
        assert sizes[2] <= sizes[1] * 1.2


@pytest.mark.slow
def test_a_parser_that_never_ends(path, monkeypatch):
    at_start(monkeypatch, "import h5py, time; h5py.h5f.open = lambda *a, **k: time.sleep(1e6)")
    monkeypatch.setattr(h5async.process.supervisor, "_STEP_SECONDS", 0.1)
    with pytest.raises(BatchTimeoutError, match=r"did not open the files within 2\.0 s"):
        make(path, timeout=2)


# --- a helper that dies --------------------------------------------------------------------------


def crash(data, labels):
    if labels[0] == 16:
        ctypes.string_at(0)


def leave(data, labels):
    if labels[0] == 16:
        os._exit(7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "num_threads", "prefetch"),
    [(crash, 0, 3), (crash, 1, 1), (leave, 0, 1), (leave, 1, 3)],
)
def test_a_crash_costs_its_batch(path, function, num_threads, prefetch):
    how = r"was killed by signal 11 \(SIGSEGV\)" if function is crash else "ended with status 7"
    seen, failed = [], []
    options = {"num_threads": num_threads, "prefetch": prefetch, "postprocess": function}
    with make(path, **options) as reader:
        first = pid_of(reader)
        for _ in range(2 * len(reader)):
            try:
                batch = reader.get_next_batch()
                assert batch.labels.tolist() == batch.index.tolist()
                seen.append((batch.epoch, batch.number))
            except ReadError as error:
                failed.append(str(error))
        assert len(seen) + len(failed) == 2 * len(reader)
        assert pid_of(reader) != first
        assert not is_alive(first)
    assert all(re.match(f"{path}: the helper process {how}", text) for text in failed)
    assert (0, 2) not in seen
    assert (1, 2) not in seen
    # With one thread at work, the oldest batch on its way is the one it works at.
    assert ["batch 2 of epoch 0" in failed[0], "batch 2 of epoch 1" in failed[1]] == [True, True]
    assert len(failed) == 2


@pytest.mark.slow
def test_a_crash_costs_no_other_batch(path, tmp_path):
    def crashes_at_three(data, labels):
        number = int(labels[0]) // 8
        (tmp_path / f"{os.getpid()}-{number}").touch()
        is_first = len({file.name.split("-")[0] for file in tmp_path.iterdir()}) == 1
        while is_first and len(list(tmp_path.iterdir())) < 4:  # all are at work
            time.sleep(0.005)
        if number == 3:
            os._exit(7)
        time.sleep(1e6 if is_first else 0.3)

    with make(path, num_threads=4, prefetch=4, postprocess=crashes_at_three) as reader:
        for _ in range(4):
            reader.fetch_data()
        outcomes = []
        for _ in range(6):
            try:
                outcomes.append(reader.get_next_batch().number)
            except ReadError as error:
                outcomes.append(re.search(r"status 7 while (batch \d+) of", str(error))[1])
    assert outcomes == [0, 1, 2, "batch 3", 4, 5]


@pytest.mark.slow
def test_a_helper_that_is_killed_while_nothing_is_on_its_way(path):
    with make(path) as reader:
        for turn in range(6):
            assert reader.get_next_batch().number == turn
            pid = pid_of(reader)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_alive(pid))
        assert reader.get_next_batch().number == 6
        stats = reader.stats()
        assert stats.batches >= 4
        assert stats.stage_seconds["decode"] > 0


@pytest.mark.slow
def test_what_was_ready_is_not_lost_when_the_helper_dies(path):
    with make(path, prefetch=4) as reader:
        for _ in range(4):
            reader.fetch_data()
        ring = reader._engine.ring
        wait_until(
            lambda: (
                len(ring._entries) == 4
                and all(ring._is_done(*entry) for entry in ring._entries.items())
            )
        )
        os.kill(pid_of(reader), signal.SIGKILL)
        assert [reader.get_next_batch().number for _ in range(6)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_killed_at_random_it_loses_nothing(path):
    rng, kills = np.random.default_rng(5), 0
    # No batch is on its way in more than two turns of the loop, so at more than two deaths.
    with make(path, shuffle="full", prefetch=2) as reader:
        for turn in range((10 if SAMPLE == "all" else 2) * len(reader)):
            if rng.random() < 0.2:
                with contextlib.suppress(AttributeError, ProcessLookupError):  # none at the moment
                    os.kill(pid_of(reader), signal.SIGKILL)
                    kills += 1
            batch = reader.get_next_batch()
            assert (batch.epoch, batch.number) == divmod(turn, len(reader))
            assert np.array_equal(batch.labels, batch.index)
    assert kills


def at_start(monkeypatch, code):
    """Have helpers run `code` before all else."""
    inner = h5async.process.child._code
    monkeypatch.setattr(h5async.process.child, "_code", lambda *a: f"{code}; {inner(*a)}")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit(3)", "ended with status 3"),
        (
            "import h5py, ctypes; h5py.h5f.open = lambda *a, **k: ctypes.string_at(0)",
            "SIGSEGV.*before it had opened the files",
        ),
    ],
)
def test_a_crash_while_the_files_are_opened(path, monkeypatch, code, how):
    at_start(monkeypatch, code)
    with pytest.raises(ReadError, match=f"data.h5: the helper process .*{how}"):
        make(path)


def test_a_helper_that_cannot_be_started(path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ReadError, match=r'no helper process .*/nowhere/python.*workers="thread"'):
        make(path)


@pytest.mark.parametrize(
    "name", ["os.memfd_create", "_socket.socketpair", "fcntl.fcntl", "subprocess._fork_exec"]
)
def test_descriptors_that_run_out_leave_nothing(path, monkeypatch, name):
    def fails(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(name, fails)
    with pytest.raises(ReadError, match=r'data.h5: no .*Too many open files.*workers="thread"'):
        make(path)
    assert not children()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_standard_streams_that_are_closed(path, tmp_path, closed):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "from h5async import AsyncReader, ReadError\n"
        "found = open(sys.argv[2], 'w')\n"
        "for fd in map(int, sys.argv[3:]): os.close(fd)\n"
        "with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8, prefetch=1,\n"
        "                 device='cpu', timeout=120) as reader:\n"
        "    print(reader.get_next_batch().labels.tolist(), file=found)\n"
        "    os.kill(reader._engine.filler.supervisors[0].process._popen.pid, signal.SIGKILL)\n"
        "    try: reader.get_next_batch()\n"
        "    except ReadError: pass\n"
        "    print(reader.get_next_batch().number, file=found, flush=True)\n"
        "os._exit(0)\n"  # at its end the interpreter would flush what is closed
    )
    run(script, path, tmp_path / "found", *closed)
    assert (tmp_path / "found").read_text() == f"{list(range(8))}\n2\n"


@pytest.mark.slow
def test_where_no_new_helper_can_be_started_every_batch_says_so(path, monkeypatch):
    with make(path, prefetch=1) as reader:
        reader.get_next_batch()
        at_start(monkeypatch, "raise SystemExit(3)")
        os.kill(pid_of(reader), signal.SIGKILL)
        for number in (1, 2, 3):
            with pytest.raises(ReadError, match=f"status 3.*batch {number} "):
                reader.get_next_batch()
        monkeypatch.undo()
        with contextlib.suppress(ReadError):  # of one that was begun before
            assert reader.get_next_batch().number == 4
        assert reader.get_next_batch().number == 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_a_new_helper_reads_no_other_file(path, tmp_path, how):
    copy = tmp_path / "copy.h5"
    copy.write_bytes(path.read_bytes())
    with make(copy, prefetch=1) as reader:
        reader.get_next_batch()
        os.kill(pid_of(reader), signal.SIGKILL)
        if how == "replaced":
            (tmp_path / "new.h5").write_bytes(path.read_bytes())
            (tmp_path / "new.h5").rename(copy)
        else:
            with h5py.File(copy, "a") as file:
                del file["labels"]
                file["labels"] = np.arange(N, dtype="f4")
        for _ in range(2):
            with pytest.raises(ReadError, match=r"copy\.h5: this file has changed .*new reader"):
                reader.get_next_batch()


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_more_requests_than_the_channel_holds(path, tmp_path, num_threads):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from h5async import AsyncReader\n"
        "n = 2000\n"
        "with AsyncReader(hdf5_path=sys.argv[1], workers='process', fields={'labels': 'labels'},\n"
        "                 batch_size=1, prefetch=n, num_threads=int(sys.argv[2]), device='cpu',\n"
        "                 timeout=120) as reader:\n"
        "    for _ in range(n):\n"
        "        reader.fetch_data()\n"
        "    for i in range(n):\n"
        "        batch = reader.get_next_batch()\n"
        "        assert batch.labels.tolist() == [i % reader.num_samples]\n"
    )
    run(script, path, num_threads)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_nobody_waits_for_a_helper_that_does_not_receive(path, tmp_path, num_threads):
    script = tmp_path / "program.py"
    script.write_text(
        "import ctypes, sys, threading\n"
        "from h5async import AsyncReader, BatchTimeoutError\n"
        "def hangs(data, labels): ctypes.PyDLL(None).sleep(1000)\n"  # it keeps the GIL
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', postprocess=hangs,\n"
        "                     batch_size=8, num_threads=int(sys.argv[2]), device='cpu')\n"
        "try: reader.get_next_batch(timeout=1)\n"
        "except BatchTimeoutError: pass\n"
        "from h5async.process.messages import NoteUploaded\n"
        "for turn in range(5000):\n"
        "    reader._engine.filler.supervisors[0].note(NoteUploaded(0))\n"
        "reader.close()\n"
        "assert not [t.name for t in threading.enumerate() if t.name.startswith('h5async')]\n"
    )
    run(script, path, num_threads)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_helper_receives_while_a_fill_hangs(path, tmp_path, monkeypatch, num_threads):
    notes = recorded(monkeypatch)

    def hangs(data, labels):
        time.sleep(1e6)

    with make(path, postprocess=hangs, num_threads=num_threads) as reader:
        reader.fetch_data()
        wait_until(lambda: any(type(note) is tuple for note in notes))
        for _ in range(2000):
            reader._engine.filler.supervisors[0].note(NoteUploaded(0))
        wait_until(lambda: sum(isinstance(note, NoteUploaded) for note in notes) == 2000)


def recorded(monkeypatch):
    """Messages to helpers, when all of each was sent."""
    found, inner = [], h5async.process.child.HelperProcess.send_bytes

    def send_bytes(process, data):
        inner(process, data)
        found.append(pickle.loads(data))

    monkeypatch.setattr(h5async.process.child.HelperProcess, "send_bytes", send_bytes)
    return found


def test_a_new_helper_is_told_what_was_noted_while_it_started(path, monkeypatch):
    """All is told once, in order: an order of samples before the requests that follow it."""
    options = {"shuffle": "full", "prefetch": 2}
    with make(path, batch_size=5, **options) as other:
        other.get_next_batch()
        state = other.state_dict()
        expected = other.get_next_batch().index.tolist()
    messages, inner = recorded(monkeypatch), h5async.process.child.HelperProcess.receive
    starts, noted = [], threading.Event()

    def receive(process):
        message = inner(process)
        if isinstance(message, Started):
            starts.append(len(messages))
            if len(starts) == 2:
                reader._engine.filler.supervisors[0].record(1000)
                reader.load_state_dict(state)
                noted.set()
        return message

    monkeypatch.setattr(h5async.process.child.HelperProcess, "receive", receive)
    with make(path, **options) as reader:
        reader.get_next_batch()
        os.kill(pid_of(reader), signal.SIGKILL)
        reader.fetch_data()
        assert noted.wait(DEADLOCK_SECONDS)
        assert reader.get_next_batch().index.tolist()[:5] == expected
        reader.get_next_batch()
    told = messages[max(i for i, m in enumerate(messages) if isinstance(m, Starting)) + 1 :]
    assert [type(message) for message in told[:2]] == [Record, tuple]
    requests = told[1:]
    assert len({request for request, _ in requests}) == len(requests) >= 2


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["nothing", "a batch", "an error", "a death", "a cycle"])
def test_a_reader_that_is_dropped_leaves_nothing(path, use):
    before = len(os.listdir("/proc/self/fd"))
    reader = make(path, postprocess=fails_at_one if use == "an error" else None)
    pid, gone = pid_of(reader), weakref.ref(reader)
    if use != "nothing":
        reader.get_next_batch()
    if use == "an error":
        with contextlib.suppress(ArithmeticError):
            reader.get_next_batch()
    if use == "a death":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        with contextlib.suppress(ReadError):
            reader.get_next_batch()
    if use == "a cycle":
        reader.itself = reader
    del reader
    gc.collect()
    assert gone() is None
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.slow
def test_closed_it_refuses_all_and_batches_stay(path):
    reader = make(path)
    batch = reader.get_next_batch()
    reader.fetch_data()
    reader.close()
    reader.close()
    assert batch.labels.tolist() == list(range(8))
    with pytest.raises(ReaderClosedError):
        reader.get_next_batch()


@pytest.mark.slow
def test_descriptors_and_memory_stay_as_they_are(path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with make(path, postprocess=of_any_size) as reader:
        for _ in reader:
            pass
        before = descriptors()
        for _ in range(10):
            for _ in reader:
                pass
            assert descriptors() <= before


@pytest.mark.parametrize("how", ["SIGKILL", "exit", "_exit"])
def test_the_helper_dies_with_its_parent(path, tmp_path, how):
    ends = {
        "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
        "exit": "sys.exit()",
        "_exit": "os._exit(0)",
    }
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from h5async import AsyncReader\n"
        "def slow(data, labels): time.sleep(labels[0])\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', postprocess=slow,\n"
        "                     batch_size=8, device='cpu')\n"
        "reader.get_next_batch()\n"
        "reader.fetch_data()\n"
        "print(reader._engine.filler.supervisors[0].process._popen.pid, flush=True)\n"
        + ends[how]
        + "\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLOCK_SECONDS,
    )
    assert done.returncode == (-9 if how == "SIGKILL" else 0)
    wait_until(lambda: not is_alive(int(done.stdout)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_helper(path):
    with make(path) as reader:
        reader.get_next_batch()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    reader.get_next_batch()
                except ReaderClosedError:
                    status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert reader.get_next_batch().number == 1


# --- for a GPU -----------------------------------------------------------------------------------


@pytest.mark.slow
@each("num_threads", [0, 2])
@each("prefetch", [1, 3])
@each("cache", [None, "device"])
def test_a_gpu_gets_the_right_batches_in_any_order(path, monkeypatch, num_threads, prefetch, cache):
    with h5py.File(path) as file:
        data = file["data"][...].transpose(0, 3, 1, 2)
    fields = {"data": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"}
    options = {"fields": fields, "shuffle": "full", "device": "cuda", "prefetch": prefetch}
    cupy, simulation = fake_cupy.make(seed=prefetch)
    monkeypatch.setattr(h5async.deliver.devicepolicy, "import_cupy", lambda: cupy)
    monkeypatch.setattr(h5async.deliver.gpu, "load_driver", lambda: fake_cupy.driver_of(cupy))
    kept = []
    with make(path, num_threads=num_threads, cache=cache, **options) as reader:
        assert cupy.cuda.runtime.registered
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(3 * len(reader)):
            with stream:
                batch = reader.get_next_batch()
                kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
        if cache:
            assert "100 %" in reader.stats().cache
    simulation.run_all()
    assert len(kept) == 21
    for index, found, labels in kept:
        assert np.array_equal(found, data[index] / np.float32(2))
        assert np.array_equal(labels, index)
    del batch, reader
    gc.collect()
    assert not cupy.cuda.runtime.registered, "pinned memory is left"


# --- shared memory -------------------------------------------------------------------------------


def test_both_see_what_is_shared():
    ours = SharedMemory()
    theirs = SharedMemory(os.dup(ours.fd))
    first = ours.empty(100).view("i4").reshape(5, 5)
    place = ours.spec(first[1:])
    assert place.shape == (4, 5)
    other = theirs.array(place)
    first[2, 3] = 7
    assert other[1, 3] == 7
    assert ours.spec(np.zeros(3)) is None
    more = theirs.empty(10_000)
    more[:] = 3
    assert (ours.array(theirs.spec(more)) == 3).all()
    assert first[2, 3] == 7
    assert ours.empty(0).size == 0
    used = os.fstat(ours.fd).st_blocks
    theirs.discard(ours.spec(first))
    assert os.fstat(ours.fd).st_blocks < used
    assert (first == 0).all()
    assert (more == 3).all()
    ours.close()
    ours.close()
    assert other[1, 3] == 0
    theirs.close()
    shared = SharedMemory()
    with pytest.raises(MemoryError, match="bytes of shared memory"):
        shared.empty(1 << 62)
    shared.close()
