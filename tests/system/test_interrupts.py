"""Ctrl-C at any instruction of the consumer: raised once; no batch is lost, nothing hangs."""

from __future__ import annotations

import dis
import gc
import random
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

import h5async
from h5async import AsyncReader

N = 200
PACKAGE = str(Path(h5async.__file__).parent)


# Between `open` and the `with` that closes it nobody owns a file: what strikes there leaves it to
# the garbage collector, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _leftovers_are_collected_here():
    """Collect what a strike left, lest the warning come in the middle of another test."""
    yield
    gc.collect()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = np.random.default_rng(1).integers(0, 99, (N, 5, 5), "u1")
        file.create_dataset("data", data=data, chunks=(8, 5, 5), compression="gzip")
        file["labels"] = np.arange(N)
    return path


class Interrupter:
    """Raises KeyboardInterrupt at the n-th place of h5async's where a signal can come, maybe twice.

    CPython looks for signals after calls, where a function begins, and where a loop turns.
    """

    def __init__(self, place, again=-1):
        self.left, self.again = place, again  # the second one comes so many places after the first
        self.where = ""
        self.before = {}

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            before = self.before.get(frame)
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before is None or before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
                self.left -= 1
            if self.left == 0:
                self.left, self.again = self.again, -1
                self.where = self.where or f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        elif event == "return":
            self.before.pop(frame, None)
        return self.trace

    def run(self, function):
        """Call a function; return its result, or None where it was interrupted."""
        gc.disable()  # it may close other readers, of earlier tests
        sys.settrace(self.trace)
        try:
            return function()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)
            gc.enable()


def do_nothing(data, labels):
    """Change nothing; but with it, Python takes the turns, not the core."""


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("workers", "postprocess"),
    [("thread", None), ("thread", do_nothing), ("process", None), (2, None)],
)
@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [False, "full"])
def test_no_batch_is_lost(path, workers, postprocess, num_threads, shuffle):
    assert_none_is_lost(path, workers, postprocess, num_threads, shuffle)


def test_no_batch_is_lost_without_threads(path):
    assert_none_is_lost(path, "thread", do_nothing, 0, "full")


def assert_none_is_lost(path, workers, postprocess, num_threads, shuffle):
    """A call has two places while the core takes the turns; else, and after a strike, hundreds."""
    rng = random.Random(f"{workers} {num_threads} {shuffle}")
    interrupted, due = [], 0
    places = 120 if num_threads or workers != "thread" else 1500  # in a call
    with AsyncReader(
        hdf5_path=path,
        batch_size=8,
        shuffle=shuffle,
        num_threads=num_threads,
        workers=workers,
        postprocess=postprocess,
        device="cpu",
        timeout=200,
    ) as reader:
        for _ in range(400):
            place = int(places ** rng.random())  # most among the first ones
            interrupter = Interrupter(place, rng.randrange(1, 8))
            call = rng.choice([reader.get_next_batch, reader.get_next_batch, reader.fetch_data])
            batch = interrupter.run(call)
            if interrupter.where:
                interrupted.append(interrupter.where)
            elif call == reader.get_next_batch:
                assert batch.epoch * len(reader) + batch.number == due, interrupted[-1:]
                assert np.array_equal(batch.labels, batch.index)
                due += 1
        batch = reader.get_next_batch()
        assert batch.epoch * len(reader) + batch.number == due
    in_core = workers == "thread" and postprocess is None
    assert len(set(interrupted)) > (10 if in_core else 30)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_short_epochs_are_counted_once(path, num_threads):
    """Also where Python is interrupted as it notes that one has ended."""
    options = {"batch_size": N // 2, "num_threads": num_threads, "device": "cpu", "timeout": 60}
    interrupted, due = set(), 0
    with AsyncReader(hdf5_path=path, **options) as reader:
        turns = reader._engine.ring.turns
        for place in range(1, 150):
            while not (turns.is_lent and due % 2):
                assert reader.get_next_batch().number == due % 2
                due += 1
            turns.struct.changes = -1  # Python notes the next end
            interrupter = Interrupter(place)
            if interrupter.run(reader.get_next_batch) is not None:
                due += 1
            elif interrupter.where:
                interrupted.add(interrupter.where.partition(":")[0])
        assert reader.stats().batches == due
        found = [reader.stats(epoch=epoch) for epoch in range((due + 1) // 2)]
        assert reader.stats(epoch=-len(found)).epoch == 0, "each is there once"
    assert all((one.batches, one.samples) == (2, N) for one in found[: due // 2])
    assert {"ReaderCounts._catch_up", "ReaderCounts._end"} <= interrupted


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_loops_and_jumps_can_be_interrupted(path, num_threads):
    rng = random.Random(num_threads)
    with AsyncReader(
        hdf5_path=path, batch_size=8, shuffle="full", num_threads=num_threads, timeout=200
    ) as reader:

        def loop():
            for number, batch in enumerate(reader):
                assert np.array_equal(batch.labels, batch.index)
                if number == 3:
                    break
            return True

        def jump():
            reader.set_epoch(rng.randrange(5))
            return True

        def resume():
            reader.load_state_dict(reader.state_dict())
            return True

        for _ in range(300):
            Interrupter(rng.randrange(1, 400 if num_threads else 8000)).run(
                rng.choice([loop, jump, resume])
            )
        reader.set_epoch(7)
        seen = [batch.index for batch in reader]
        assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(N))
    with AsyncReader(hdf5_path=path, batch_size=8, shuffle="full", num_threads=0) as other:
        other.set_epoch(7)
        assert [batch.index.tolist() for batch in other] == [index.tolist() for index in seen]


@pytest.mark.parametrize("what", ["set_epoch", "load_state_dict"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_jump_is_made_or_not_made(path, num_threads, what):
    """Interrupted anywhere, the reader goes on where it was, or where it was sent."""
    options = {"batch_size": 8, "shuffle": "full", "num_threads": num_threads, "timeout": 60}
    with AsyncReader(hdf5_path=path, **options) as reader:
        reader.set_epoch(3)
        state, turns = reader.state_dict(), set()
        for place in range(1, 300):
            reader.set_epoch(1)
            for _ in range(2):
                reader.get_next_batch()
            reader.fetch_data()
            interrupter = Interrupter(place)
            argument = 3 if what == "set_epoch" else state
            interrupter.run(lambda: getattr(reader, what)(argument))  # noqa: B023
            batch = reader.get_next_batch()
            assert (batch.epoch, batch.number) in ((1, 2), (3, 0)), interrupter.where
            assert np.array_equal(batch.labels, batch.index)
            turns.add(batch.epoch)
        assert turns == {1, 3}


def test_a_batch_dropped_before_is_not_read_to_the_slot_that_another_has_by_now(path, monkeypatch):
    """After an interruption all batches that are not there yet are submitted once more."""
    has_begun, may_end, calls = threading.Event(), threading.Event(), []

    def postprocess(data, labels):
        calls.append(int(labels[0]))
        if calls[-1] == 8:
            has_begun.set()
            assert may_end.wait(60)

    def interrupt():
        raise KeyboardInterrupt

    def let_it_end(assignments):
        found = requests(assignments)
        if not may_end.is_set():
            may_end.set()
            filled.wait(0.5)  # its thread gives the slot to the next batch, if it can
        return found

    options = {"hdf5_path": path, "batch_size": 8, "num_threads": 2, "prefetch": 2}
    with AsyncReader(**options, postprocess=postprocess, device="cpu", timeout=60) as reader:
        ring, position = reader._engine.ring, reader._engine.position
        reader.get_next_batch()
        reader.fetch_data()
        assert has_begun.wait(60)
        reader.load_state_dict(reader.state_dict() | {"position": 160})
        with monkeypatch.context() as patched:
            patched.setattr(ring, "assign", interrupt)
            with pytest.raises(KeyboardInterrupt):
                reader.fetch_data()
        requests, filled = position.requests, threading.Event()
        end = ring.filled
        monkeypatch.setattr(position, "requests", let_it_end)
        monkeypatch.setattr(
            ring, "filled", lambda *result: (end(*result), result[0] == 2 and filled.set())
        )
        reader.fetch_data()
        batches = [reader.get_next_batch().labels[0] for _ in range(3)]
    assert batches == [160, 168, 176]
    # Two threads may begin the batches in any order; each is read once, and none of those dropped.
    assert len(set(calls)) == len(calls)
    assert {0, 8, *batches} <= set(calls) <= {0, 8, *range(160, 1000, 8)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_making_a_reader_can_be_interrupted(path):
    """The fixture of all tests sees that no thread and no open file is left."""
    rng = random.Random(3)
    made = 0
    for _ in range(150):
        reader = Interrupter(rng.randrange(1, 3000)).run(
            lambda: AsyncReader(hdf5_path=path, num_threads=2)
        )
        if reader is not None:
            made += 1
            reader.close()
    assert made < 150
