"""Exact resume: the batch after `load_state_dict` is the one that would have come."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import N, taken, write_numbered

from h5async import AsyncReader, ConfigError, DatasetError, ReaderClosedError, ReadError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("resume") / "data.h5")


def open_reader(path, **options):
    return AsyncReader(hdf5_path=path, device="cpu", **{"batch_size": 10, "seed": 4, **options})


def saved(reader):
    return json.loads(json.dumps(reader.state_dict()))


@pytest.mark.slow
@given(
    shuffle=st.sampled_from([False, "full", "window"]),
    drop_last=st.booleans(),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 4),
    before=st.integers(0, 40),
    threads=st.sampled_from([(0, 2), (2, 0), (1, 3)]),
    prefetch=st.sampled_from([(1, 3), (2, 1)]),
    data=st.data(),
)
@settings(max_examples=40)
def test_the_next_batch_is_the_one_that_would_have_come(
    path, shuffle, drop_last, batch_size, world_size, before, threads, prefetch, data
):
    options = {
        "shuffle": shuffle,
        "drop_last": drop_last,
        "batch_size": batch_size,
        "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }
    if drop_last and batch_size * world_size > N:
        return
    with open_reader(path, num_threads=threads[0], prefetch=prefetch[0], **options) as one:
        taken(one, before)
        one.fetch_data()  # what is on its way does not count
        state = saved(one)
        expected = taken(one, 15)
    with open_reader(path, num_threads=threads[1], prefetch=prefetch[1], **options) as other:
        other.fetch_data()
        other.load_state_dict(state)
        assert saved(other) == state
        assert taken(other, 15) == expected


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_a_loop_goes_on_with_the_rest_of_the_epoch(path, shuffle):
    with open_reader(path, shuffle=shuffle) as reader:
        whole = [[b.index.tolist() for b in reader] for _ in range(3)]
    with open_reader(path, shuffle=shuffle) as reader:
        for _ in reader:
            pass
        for batch in reader:
            if batch.number == 3:
                state = saved(reader)
                break
    with open_reader(path, shuffle=shuffle) as reader:
        reader.load_state_dict(state)
        rest = [(b.epoch, b.number, b.index.tolist()) for b in reader]
        assert rest == [(1, n, whole[1][n]) for n in range(4, 11)]
        assert [b.index.tolist() for b in reader] == whole[2]


def test_a_state_between_epochs_is_the_beginning_of_the_next(path):
    with open_reader(path, shuffle="full") as reader:
        for _ in reader:
            pass
        state = saved(reader)
        following = [b.index.tolist() for b in reader]
    assert (state["epoch"], state["position"]) == (1, 0)
    with open_reader(path, shuffle="full") as reader:
        reader.load_state_dict(state)
        assert [b.index.tolist() for b in reader] == following


def test_a_state_is_loaded_again_and_again(path):
    with open_reader(path, shuffle="full", prefetch=3) as reader:
        taken(reader, 4)
        state = saved(reader)
        first = taken(reader, 9)
        for _ in range(3):
            reader.load_state_dict(state)
            assert taken(reader, 9) == first
            loop = iter(reader)
            next(loop)
            reader.load_state_dict(state)
            assert list(loop) == []  # it belongs to what was left


@pytest.mark.slow
@given(
    shuffle=st.sampled_from([False, "full", "window"]),
    old=st.tuples(st.integers(1, 12), st.integers(1, 3)),
    new=st.tuples(st.integers(1, 30), st.integers(1, 4)),
    third=st.tuples(st.integers(1, 30), st.integers(1, 2)),
    steps=st.integers(0, 8),
    more=st.integers(0, 3),
)
@settings(max_examples=30)
def test_ranks_may_be_others_and_batches_of_another_size(
    path, shuffle, old, new, third, steps, more
):
    """No sample of the epoch comes twice, and none is left out; and once more, in the rest."""
    seen, epoch, state = [], 0, None
    for (batch_size, world_size), count in ((old, steps), (new, more), (third, 10**6)):
        states = []
        for rank in range(world_size):
            options = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
            with open_reader(path, shuffle=shuffle, num_threads=1, **options) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                for _ in range(count):
                    if reader.state_dict()["epoch"] > 0:
                        break
                    seen.append(reader.get_next_batch().index)
                states.append(saved(reader))
        assert all(s == states[0] for s in states)
        state = states[0]
        epoch = state["epoch"]
        if epoch:
            break
    found = np.concatenate(seen)
    assert np.array_equal(np.unique(found), np.arange(N))
    assert found.size - N <= 3  # repeated where fewer samples than ranks were left
    assert epoch == 1


CRASH = """
import json, sys
from h5async import AsyncReader
path, state_path, log_path, shuffle = sys.argv[1:]
with AsyncReader(
    hdf5_path=path, batch_size=5, shuffle=shuffle, seed=2, device="cpu", num_threads=2
) as reader:
    try:
        reader.load_state_dict(json.load(open(state_path)))
    except FileNotFoundError:
        pass
    with open(log_path, "a") as log:
        while True:
            batch = reader.get_next_batch()
            line = json.dumps([json.dumps(reader.state_dict()), batch.index.tolist()])
            print(line, file=log, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_after_a_crash_the_whole_sequence_is_as_it_would_have_been(path, tmp_path, shuffle):
    """The process is killed at random; the state of the last batch that was noted is loaded."""
    state_path, log_path = tmp_path / "state.json", tmp_path / "log"
    rng, sequence = random.Random(shuffle), []
    for _ in range(4):
        log_path.write_text("")
        command = [sys.executable, "-c", CRASH, path, state_path, log_path, shuffle]
        process = subprocess.Popen(command)
        deadline = time.monotonic() + 200
        wanted = rng.randrange(1, 60)
        while log_path.read_text().count("\n") < wanted:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines = log_path.read_text().split("\n")[:-1]  # the last one may be cut
        for line in lines:
            state, index = json.loads(line)
            sequence.append(index)
        state_path.write_text(state)
    with AsyncReader(hdf5_path=path, batch_size=5, shuffle=shuffle, seed=2, device="cpu") as reader:
        assert [reader.get_next_batch().index.tolist() for _ in sequence] == sequence


def change(path, how):
    with h5py.File(path, "r+") as file:
        data = file["data"][...]
        if how == "more samples":
            del file["data"], file["labels"]
            file["data"], file["labels"] = np.append(data, data[:1], 0), np.arange(N + 1)
        elif how == "dtype":
            del file["data"]
            file["data"] = data.astype("i8")
        elif how == "rows":
            del file["data"]
            file["data"] = data[:, :2]
        elif how == "chunks":
            del file["data"]
            file.create_dataset("data", data=data, chunks=(5, 3), compression="gzip")
        elif how == "size":
            file["other"] = np.zeros(10_000)


@pytest.mark.parametrize("how", ["more samples", "dtype", "rows", "chunks", "size"])
def test_a_changed_file_is_refused(path, tmp_path, how):
    copy = tmp_path / "copy.h5"
    copy.write_bytes(path.read_bytes())
    with open_reader(copy) as reader:
        taken(reader, 3)
        state = saved(reader)
    change(copy, how)
    with open_reader(copy) as reader:
        error, text = (
            (ConfigError, "files of this reader have")
            if how == "more samples"
            else (ReadError, "has changed")
        )
        with pytest.raises(error, match=text):
            reader.load_state_dict(state)
        assert reader.get_next_batch().number == 0


def test_a_moved_file_is_not(path, tmp_path):
    with open_reader(path) as reader:
        taken(reader, 3)
        state = saved(reader)
    moved = tmp_path / "elsewhere.h5"
    moved.write_bytes(path.read_bytes())
    with open_reader(moved) as reader:
        reader.load_state_dict(state)
        assert reader.get_next_batch().number == 3


@pytest.mark.parametrize(
    "options", [{"seed": 5}, {"shuffle": "full"}, {"shuffle": "window", "window_bytes": 999}]
)
def test_another_order_is_refused(path, options):
    with open_reader(path, shuffle="window") as reader:
        state = saved(reader)
    with open_reader(path, **{"shuffle": "window", **options}) as reader:
        with pytest.raises(ConfigError, match=f"saved with {list(options)[-1]}="):
            reader.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"version": 2},
        {"epoch": -1},
        {"position": 1.5},
        {"batch_size": 0},
        {"world_size": "x"},
        {"position": 1 << 63},
        {"version": True},
        {"epoch": True},
        {"position": False},
        {"batch_size": True},
        {"world_size": True},
        {"world_size": 1.0},
        {"seed": False},
        {"shuffle": 0},
    ],
)
def test_what_is_no_state_is_refused(path, wrong):
    with open_reader(path) as reader:
        state = {**saved(reader), **wrong} if wrong else {}
        with pytest.raises(ConfigError):
            reader.load_state_dict(state)
        assert reader.get_next_batch().number == 0


def test_set_epoch_and_reset(path):
    with open_reader(path, shuffle="full") as reader:
        epochs = [[b.index.tolist() for b in reader] for _ in range(4)]
        reader.set_epoch(2)
        assert [b.index.tolist() for b in reader] == epochs[2]
        reader.set_epoch(3)
        read = reader.stats().batches
        assert [b.index.tolist() for b in reader] == epochs[3]
        assert reader.stats().batches == read + len(reader)
        reader.reset()
        batch = reader.get_next_batch()
        assert (batch.epoch, batch.number, batch.index.tolist()) == (0, 0, epochs[0][0])
        for number, _ in enumerate(reader):
            if number == 2:
                reader.set_epoch(7)
        assert number == 2
        assert reader.get_next_batch().epoch == 7
        with pytest.raises(ConfigError, match="no epoch -1"):
            reader.set_epoch(-1)


def test_set_epoch_to_the_next_one_keeps_what_is_on_its_way(path, monkeypatch):
    with open_reader(path, prefetch=3) as reader:
        for _ in reader:
            pass
        monkeypatch.setattr(
            reader._engine.position, "jump", lambda *_: pytest.fail("it was dropped")
        )
        reader.set_epoch(1)
        assert reader.get_next_batch().epoch == 1


def test_an_empty_epoch(tmp_path):
    path = tmp_path / "empty.h5"
    with h5py.File(path, "w") as file:
        file["data"], file["labels"] = np.zeros((0, 3)), np.zeros(0)
    with open_reader(path) as reader:
        for use in (reader.state_dict, lambda: reader.set_epoch(1), reader.reset):
            with pytest.raises(DatasetError, match="no batch"):
                use()


def test_a_reader_is_pickled_before_it_begins(path):
    with open_reader(path, shuffle="full") as reader:
        reader.set_epoch(2)
        sent = pickle.dumps(reader)
        expected = taken(reader, 5)
        with pytest.raises(ConfigError, match="has begun cannot be pickled"):
            pickle.dumps(reader)
    with pickle.loads(sent) as other:
        assert taken(other, 5) == expected


def take_in_another_process(reader, results):
    with reader:
        results.put(taken(reader, 5))


@pytest.mark.slow
def test_a_spawned_process_gets_a_reader(path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with open_reader(path, shuffle="full") as reader:
        process = context.Process(target=take_in_another_process, args=(reader, results))
        process.start()
        assert results.get(timeout=200) == taken(reader, 5)
        process.join(200)
        assert process.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")  # of Python, and of JAX where it was imported
@pytest.mark.parametrize("begun", [False, True])
def test_a_forked_child_gets_an_error_and_no_hang(path, begun):
    with open_reader(path, prefetch=3) as reader:
        if begun:
            taken(reader, 2)
            reader.fetch_data()
        child = os.fork()
        if not child:
            status = 1
            try:
                for use in (reader.get_next_batch, reader.fetch_data, lambda: next(iter(reader))):
                    with pytest.raises(ReaderClosedError, match="forked"):
                        use()
                reader.close()
                with open_reader(path) as own:
                    assert own.get_next_batch().number == 0
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + 200
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(done[1]) == 0
        assert reader.get_next_batch().number == 2 * begun


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_a_state_says_what_the_files_were_when_the_reader_was_made(tmp_path, what):
    """It goes on reading them, and so must whoever has its state and the same files."""
    path, kept = tmp_path / "f.h5", tmp_path / "kept.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(40)
    os.link(path, kept)
    options = {"labels_field": None, "batch_size": 4, "shuffle": "full", "device": "cpu"}
    with AsyncReader(hdf5_path=path, **options) as reader:
        reader.get_next_batch()
        if what == "replaced":
            with h5py.File(tmp_path / "other.h5", "w") as file:
                file["data"] = np.arange(60)
            (tmp_path / "other.h5").replace(path)
        else:
            path.unlink()
        state = reader.state_dict()
        expected = [reader.get_next_batch().index.tolist() for _ in range(5)]
    with AsyncReader(hdf5_path=kept, **options) as reader:
        reader.load_state_dict(state)
        assert [reader.get_next_batch().index.tolist() for _ in range(5)] == expected
    if what == "replaced":
        with (
            AsyncReader(hdf5_path=path, **options) as reader,
            pytest.raises(ConfigError, match="the files of this reader have 60"),
        ):
            reader.load_state_dict(state)
