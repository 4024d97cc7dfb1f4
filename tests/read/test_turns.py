"""Batches that are alike: the core takes them in one call, and all else goes on as before."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from h5async import (
    AsyncReader,
    BatchExpiredError,
    ConfigError,
    DatasetError,
    H5AsyncError,
    RaggedField,
    ReaderClosedError,
    ReadError,
    SparseField,
)
from h5async.core.binding import load_core
from h5async.fill.pool import Workers
from h5async.order.window import WindowOrder

pytestmark = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

SAMPLES, SIZE, DEADLOCK_SECONDS = 3000, 10, 60
TO_PLAN, IN_PLAN, WITH_PYTHON, READY_JOB = 1, 2, 4, 5  # of jobs, as in core/src/queue.c


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 99, (SAMPLES, 6), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = values
        file.create_dataset("gzip", data=values, chunks=(50, 6), compression="gzip")
        file["labels"] = np.arange(SAMPLES)
    return tmp_path / "a.h5"


def opened(path: Path, **options: Any) -> AsyncReader:
    fields = {"data": "data", "gzip": "gzip", "labels": "labels"}
    plain = {"hdf5_path": path, "fields": fields, "batch_size": SIZE, "device": "cpu"}
    return AsyncReader(plain | {"timeout": None} | options)


def taken(reader: AsyncReader) -> int:
    """Return how many batches the core has handed over."""
    turns = reader._engine.ring.turns
    return 0 if turns is None else turns.taken  # type: ignore[attr-defined]


def truth(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("data", "gzip", "labels")}


def check(batch: Any, expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array[batch.index])


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("more", [{}, {"epoch_samples": 1700}, {"rank": 1, "world_size": 3}])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_epochs(path, shuffle, more, num_threads):
    expected, found = truth(path), []
    options = {"shuffle": shuffle, "seed": 3, "num_threads": num_threads, **more}
    with opened(path, debug_lifetimes=True, **options) as reader:  # which the core does not do
        slow = [batch.index for _ in range(2) for batch in reader]
        assert not taken(reader)
    with opened(path, **options) as reader:
        for epoch in range(2):
            for number, batch in enumerate(reader):
                check(batch, expected)
                assert (batch.epoch, batch.number, batch.size) == (epoch, number, batch.index.size)
                assert batch.last == (number == len(reader) - 1)
                found.append(batch.index)
        assert taken(reader) > len(reader)
        stats = reader.stats()
        assert (stats.batches, stats.samples) == (len(found), sum(map(len, found)))
        assert stats._waits == len(found) - 1
        assert reader.stats(epoch=1).batches == len(reader)
    for one, other in zip(found, slow, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def uneven(tmp_path: Path) -> tuple[Path, list[tuple[np.ndarray, np.ndarray]]]:
    """A file of sparse rows, ragged samples, and elements of variable length; what each row has."""
    random = np.random.default_rng(0)
    starts = np.r_[0, random.integers(0, 9, SAMPLES).cumsum()]
    values, columns = random.random(starts[-1]), random.integers(0, 50, starts[-1], np.int32)
    rows = [(values[i:j], columns[i:j]) for i, j in itertools.pairwise(starts)]
    with h5py.File(tmp_path / "uneven.h5", "w") as file:
        group = file.create_group("sparse")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": [SAMPLES, 50]})
        group.attrs["encoding-version"] = "0.1.0"
        group["data"], group["indices"], group["indptr"] = values, columns, starts
        halves = np.empty(SAMPLES, object)
        halves[:] = [of_row[::2] for _, of_row in rows]
        file.create_dataset("heap", data=halves, dtype=h5py.vlen_dtype(np.int32))
    return tmp_path / "uneven.h5", rows


def check_parts(values: Any, offsets: Any, expected: Sequence[np.ndarray]) -> None:
    np.testing.assert_array_equal(values, np.concatenate(expected))
    np.testing.assert_array_equal(np.diff(offsets), list(map(len, expected)))


UNEVEN = {
    "sparse": SparseField("sparse"),
    "ragged": RaggedField("sparse/data", offsets="sparse/indptr"),
    "heap": RaggedField("heap"),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_samples_that_differ_in_size(uneven, shuffle, num_threads):
    path, rows = uneven
    options = {"fields": UNEVEN, "shuffle": shuffle, "num_threads": num_threads}
    with opened(path, **options) as reader, opened(path, copy=True, **options) as other:
        for _ in range(2):
            for batch, copied in zip(reader, other, strict=True):
                np.testing.assert_array_equal(batch.index, copied.index)
                values, columns = zip(*[rows[sample] for sample in batch.index], strict=True)
                halves, sparse = [one[::2] for one in columns], batch.sparse
                check_parts(sparse.data, sparse.indptr, values)
                check_parts(sparse.indices, sparse.indptr, columns)
                check_parts(batch.ragged.values, batch.ragged.offsets, values)
                check_parts(batch.heap.values, batch.heap.offsets, halves)
        assert taken(reader) > len(reader)
        assert not taken(other)
        for epoch in None, 0, 1:
            found, expected = reader.stats(epoch=epoch), other.stats(epoch=epoch)
            assert (found.batches, found.nbytes) == (expected.batches, expected.nbytes)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_short_batch_is_asked_for_once_the_next_run_has_begun(uneven, num_threads):
    path, rows = uneven
    options = {"fields": UNEVEN, "batch_size": 110, "shuffle": "full", "num_threads": num_threads}
    with opened(path, **options) as reader:
        last = []
        for _ in range(20 * len(reader)):
            batch, run = reader.get_next_batch(), reader._engine.ring.turns.run
            reader.fetch_data()  # of the next run, if this was the last batch of one
            if batch.last:
                last.append(reader._engine.ring.turns.run is not run)
                values = [rows[sample][0] for sample in batch.index]
                check_parts(batch.ragged.values, batch.ragged.offsets, values)
                check_parts(batch.sparse.data, batch.sparse.indptr, values)
                assert len(batch.heap) == batch.size == SAMPLES % 110
        assert any(last)


def test_what_python_makes_of_a_batch_is_asked_for_too_late(uneven):
    path, rows = uneven
    packed = {"packed": RaggedField("sparse/data", offsets="sparse/indptr", pack=16)}
    with opened(path, fields=packed) as reader:
        batches = [reader.get_next_batch() for _ in range(20)]
        assert taken(reader)
        assert (batches[-3].epoch, batches[-3].number, batches[-3].last) == (0, 17, False)
        late = batches[-2]
        with pytest.raises(BatchExpiredError, match=r"batch 18 of epoch 0 was used.*copy\(\)"):
            _ = late.packed
        names = ["packed", "packed_documents", "packed_positions"]
        assert (late.keys(), repr(late)) == (names, "<Batch 18 of epoch 0, expired>")
        assert "The life of this batch is over" in batches[-4]._repr_html_()
        np.testing.assert_array_equal(late.index, np.arange(18 * SIZE, 19 * SIZE))
    stream = np.concatenate([values for values, _ in rows])
    windows = stream[: stream.size // 16 * 16].reshape(-1, 16)
    # Closed: nothing is read any more.
    np.testing.assert_array_equal(batches[-1].packed, windows[batches[-1].index])
    with pytest.raises(BatchExpiredError):
        _ = batches[-5].packed


def test_samples_that_differ_in_size_are_whole_after_the_end(uneven):
    path, rows = uneven
    with opened(path, fields=UNEVEN) as reader:
        batches = [reader.get_next_batch() for _ in range(20)]
        assert taken(reader)
    last = batches[-1]
    for at, sample in enumerate(last.index):
        for one, other in zip(last.sparse[at], rows[sample][::-1], strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(last.ragged[at], rows[sample][0])
        np.testing.assert_array_equal(last.heap[at], rows[sample][1][::2])
    again = pickle.loads(pickle.dumps(last))
    assert again.sparse.shape == last.sparse.copy().shape == (SIZE, 50)
    np.testing.assert_array_equal(again.sparse.to_dense(), last.sparse.to_dense())
    with pytest.raises(BatchExpiredError, match=r"batch 18 of epoch 0 was used"):
        _ = batches[-2].sparse  # whose arrays nobody had asked for in time


def test_an_index_that_is_not_a_column(uneven):
    path, _ = uneven
    with h5py.File(path, "r+") as file:
        at = file["sparse/indptr"][1000]
        file["sparse/indices"][at] = 50
        sample = int(np.searchsorted(file["sparse/indptr"], at, side="right")) - 1
    with opened(path, fields={"sparse": SparseField("sparse")}) as reader:
        with pytest.raises(DatasetError, match=rf"\(sample {sample}\) has the index 50"):
            for _ in reader:
                pass
        assert taken(reader)


def damage_gzip(path: Path, row: int) -> None:
    with h5py.File(path) as file:
        chunk = file["gzip"].id.get_chunk_info_by_coord((row, 0))
    with path.open("r+b") as damaged:
        damaged.seek(chunk.byte_offset)
        damaged.write(b"\xff" * 20)


def each_epoch(reader):
    """Return what was delivered in the last epochs."""
    found = []
    with contextlib.suppress(ConfigError):
        for back in range(1, 50):
            one = reader.stats(epoch=-back)
            found.append((one.epoch, one.batches, one.samples, one.first_batch, one._waits))
    return found


SHORT = [
    {"batch_size": SAMPLES},
    {"batch_size": SAMPLES - 1, "shuffle": False},
    {"batch_size": SAMPLES // 3, "shuffle": "window", "drop_last": True},
    {"batch_size": SAMPLES // 4 - 1, "rank": 1, "world_size": 2, "shuffle": False},
    {"batch_size": SAMPLES // 13, "rank": 0, "world_size": 3},
    {"batch_size": 40, "indices": range(5, 2000, 20)},
    {"batch_size": 700, "epoch_samples": 2000, "shuffle": "window"},
    {"batch_size": 90, "weights": [1.0, 2.0] * (SAMPLES // 2), "epoch_samples": 200},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_threads", "prefetch", "more"),
    [
        *product([0, 1, 2], [1, 2, 5], [{}]),
        *zip([0, 1, 2] * 3, [1, 2, 3, 5] * 2, SHORT, strict=False),
    ],
)
def test_all_calls_in_any_order(path, num_threads, prefetch, more):
    """Beside a reader of which the core takes nothing; batches that are kept say what they did."""
    expected, random = truth(path), np.random.default_rng(prefetch)
    options = {"shuffle": "full", "num_threads": num_threads, "prefetch": prefetch, **more}
    kept, states = [], []
    with opened(path, **options) as reader, opened(path, copy=True, **options) as other:
        loops = iter(reader), iter(other)
        for _ in range(500):
            call = random.choice(
                [
                    "get",
                    "next",
                    "fetch",
                    "given",
                    "read",
                    "jump",
                    "state",
                    "load",
                    "loop",
                    "epochs",
                ],
                p=[0.4, 0.28, 0.15, 0.03, 0.03, 0.02, 0.03, 0.02, 0.02, 0.02],
            )
            some, epoch = random.integers(SAMPLES, size=4), int(random.integers(3))
            for one in reader, other:
                if call == "fetch":
                    one.fetch_data()
                elif call == "given":
                    one.fetch_data(some)
                elif call == "jump":
                    one.set_epoch(epoch)
                elif call == "load" and states:
                    one.load_state_dict(states[-1])
            if call == "loop":
                loops = iter(reader), iter(other)
            if call == "state":
                states.append(reader.state_dict())
                assert states[-1] == other.state_dict()
            if call == "read":
                check(reader.read(some), expected)
            for _ in range(12 if call == "epochs" and more else 0):
                for pair in zip(reader, other, strict=True):
                    kept.append(pair)
            if call in ("get", "next"):
                if call == "next":
                    pair = [next(loop, None) for loop in loops]
                else:
                    pair = [one.get_next_batch() for one in (reader, other)]
                assert (pair[0] is None) == (pair[1] is None)
                if pair[0] is not None:
                    check(pair[0], expected)
                    kept.append(pair)
        assert taken(reader)
        counts = reader.stats(), other.stats()
        assert counts[0].batches == counts[1].batches
        assert counts[0].samples == counts[1].samples
        assert each_epoch(reader) == each_epoch(other)
    for one, other_one in kept:
        assert (one.epoch, one.number, one.last) == (
            other_one.epoch,
            other_one.number,
            other_one.last,
        )
        np.testing.assert_array_equal(one.index, other_one.index)


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("size", [SAMPLES, SAMPLES // 3 - 1])
def test_short_epochs_in_loops(path, num_threads, size):
    """The core goes on over their ends."""
    expected = truth(path)
    with opened(path, num_threads=num_threads, batch_size=size) as reader:
        for epoch in range(40):
            for number, batch in enumerate(reader):
                check(batch, expected)
                assert (batch.epoch, batch.number, batch.last) == (
                    epoch,
                    number,
                    number + 1 == len(reader),
                )
            assert reader.stats(epoch=-1).samples == SAMPLES
        assert taken(reader) >= 35 * len(reader)


def test_loops_left_early_have_few_epochs_told(path):
    with opened(path, batch_size=SAMPLES // 20, shuffle="window", num_threads=0) as reader:
        for _ in range(2):
            list(reader)
        told, turns = [], reader._engine.ring.turns
        lend = turns.lend
        turns.lend = lambda run, *rest: (told.append(len(run.epochs.mappings)), lend(run, *rest))
        for _ in range(10):
            list(zip(reader, range(3), strict=False))
        assert len(told) >= 5
        assert sum(told[1:]) < 2 * len(told)


def test_an_order_lasts_as_long_as_a_batch_may_be_planned_by_it(path):
    """Also when it is made anew, after the loop has asked for numbers of other epochs."""
    more = {"shuffle": "window", "batch_size": SAMPLES // 13 + 1, "prefetch": 12}
    with opened(path, num_threads=1, **more) as reader:
        earlier = [reader.get_next_batch() for _ in range(2 * 13)]
        first, second = reader.get_next_batch(), reader.get_next_batch()
        turns, submissions = reader._engine.ring.turns, reader._engine.filler.submissions  # type: ignore[union-attr]
        queue = submissions._queue._struct
        while queue.num_idle < 1:
            time.sleep(0)
        queue.spinners, queue.fill_ns = 1, 100_000  # the thread sleeps on; the consumer helps
        for _ in range(10):
            reader.fetch_data()
        order = weakref.ref(turns.run.epochs.mappings[2 - turns.run.epoch])
        del first, second
        assert sum(batch.index.size for batch in earlier) == 2 * SAMPLES  # they are computed now
        del earlier
        reader._engine.ring.take_back()
        reader.fetch_data()
        assert turns.run.epoch == 2
        is_made_anew, lasts = turns.run.epochs.mappings[0] is not order(), order() is not None
        queue.spinners = 0
        submissions.put(True)
        assert is_made_anew
        assert lasts
        for _ in range(11):
            check(reader.get_next_batch(), truth(path))


def test_a_large_order_is_made_for_an_epoch_at_a_time(path, monkeypatch):
    """Else the first batch would wait for those of many epochs, which would all be kept."""
    made, new_table = [], WindowOrder._new_table
    monkeypatch.setattr("h5async.fill.submissions._AHEAD_MAPPED", SAMPLES - 1)
    monkeypatch.setattr(
        WindowOrder, "_new_table", lambda order, at: made.append(at) or new_table(order, at)
    )
    with opened(path, num_threads=0, shuffle="window", batch_size=SAMPLES // 3) as reader:
        for batch in reader:
            check(batch, truth(path))
    assert set(made) <= {0, 1}


def test_a_batch_that_nobody_looked_at_yet(path):
    with opened(path, num_threads=1) as reader:
        for _ in range(20):
            batch = reader.get_next_batch()
        assert taken(reader)
        again = pickle.loads(pickle.dumps(batch))
        assert (again.epoch, again.number, again.size) == (0, 19, SIZE)
        check(again, truth(path))
        batch = reader.get_next_batch()
        assert repr(batch).startswith("<Batch 20 of epoch 0: data=(10, 6)")
        batch = reader.get_next_batch()
        assert "is over" not in batch._repr_html_()
        copied = batch.copy()
        later = reader.get_next_batch()
        assert "is over" in batch._repr_html_()
        check(copied, truth(path))
        data, *_ = later
        data.shape = (60,)  # of this view alone
        for _ in range(4):
            assert reader.get_next_batch().data.shape == (SIZE, 6)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_batch_that_cannot_be_read(path, num_threads):
    damage_gzip(path, 1000)
    delivered, errors = [], []
    with opened(path, num_threads=num_threads) as reader:
        while len(delivered) + len(errors) < len(reader):
            try:
                batch = reader.get_next_batch()
                np.testing.assert_array_equal(batch.labels, batch.index)
                delivered.append(batch.number)
            except ReadError as error:
                errors.append(str(error))
        assert taken(reader)
    assert len(errors) == 5
    assert all('"gzip"' in error for error in errors)
    assert sorted({*range(300)} - {*delivered}) == [100, 101, 102, 103, 104]


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_another_thread_closes_the_reader_in_the_middle(path, num_threads):
    """While the loop's thread is in the core, or anywhere else."""
    for turn in range(30):
        reader = opened(path, num_threads=num_threads)
        batch, begun = reader.get_next_batch(), threading.Event()

        def close(reader: AsyncReader = reader, begun: threading.Event = begun) -> None:
            begun.wait(DEADLOCK_SECONDS)
            reader.close()

        closer = threading.Thread(target=close)
        closer.start()
        for _ in range(turn):
            batch = reader.get_next_batch()
        begun.set()
        with pytest.raises(ReaderClosedError):
            batch = [*iter(reader.get_next_batch, None)][-1]
        closer.join(DEADLOCK_SECONDS)
        assert not closer.is_alive()
        assert batch.data.shape == (SIZE, 6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_reader(path):
    with opened(path, num_threads=1) as reader:
        for _ in range(10):
            reader.get_next_batch()
        assert taken(reader)
        child = os.fork()
        if not child:
            try:
                reader.get_next_batch()
            except ReaderClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        check(reader.get_next_batch(), truth(path))


def test_a_damaged_batch_that_the_consumer_meets_while_threads_sleep(path):
    """It wakes one for what is left to Python: nobody was woken when the batch was submitted."""
    damage_gzip(path, 1000)
    errors = []
    with opened(path, num_threads=1, prefetch=1, timeout=20) as reader:
        queue = reader._engine.filler.submissions._queue._struct  # type: ignore[union-attr]
        while len(errors) < 5:
            while queue.num_idle < 1:
                time.sleep(0)
            queue.fill_ns = 100_000  # so that the consumer helps
            # As if a thread looked for work, which comes too late, and sleeps.
            queue.spinners = reader._engine.ring.turns.run is not None
            try:
                reader.get_next_batch()
            except ReadError as error:
                errors.append(str(error))
        assert taken(reader)
    assert all('"gzip"' in error for error in errors)


@contextmanager
def while_a_thread_plans(reader: AsyncReader) -> Iterator[tuple[Any, list[Any]]]:
    """Have a thread wait for the next batch, as if another one planned it, and the last one slept.

    Gives the core's description of the batch after it, and a list for the batch.
    """
    turns, submissions = reader._engine.ring.turns, reader._engine.filler.submissions  # type: ignore[union-attr]
    queue, jobs = submissions._queue._struct, submissions._queue._jobs
    while queue.num_idle < 1:
        time.sleep(0)
    queue.fill_ns = 100_000  # so that the consumer helps
    queue.spinners = 1  # nobody is woken, as if another thread was awake
    held = turns.slots()[turns.state()[2]]
    reader.fetch_data()
    (planned,) = (slot for slot in turns.slots().values() if slot != held)
    jobs[planned].state = IN_PLAN
    jobs[planned].begun_ns = 1 << 62  # so that it has just begun
    reader.fetch_data()
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.append(reader.get_next_batch()))
    consumer.start()
    yield jobs[held], found
    jobs[planned].state, queue.spinners = TO_PLAN, 0
    submissions.put(True)
    consumer.join(DEADLOCK_SECONDS)


def becomes(job: Any, state: int) -> bool:
    end = time.monotonic() + DEADLOCK_SECONDS
    while job.state != state and time.monotonic() < end:
        time.sleep(0)
    return bool(job.state == state)


def test_the_consumer_fills_the_next_batch_while_a_thread_plans_this_one(path):
    with opened(path, num_threads=1, prefetch=2) as reader:
        for _ in range(20):
            reader.get_next_batch()
        assert taken(reader)
        with while_a_thread_plans(reader) as (job, found):
            assert becomes(job, READY_JOB)
            assert not found
        for batch in (*found, reader.get_next_batch()):
            check(batch, truth(path))
        assert (found[0].number, batch.number) == (20, 21)


def test_a_damaged_batch_that_the_consumer_meets_before_its_turn(path):
    """It wakes a thread for what is left to Python, and gets the batch that it waits for."""
    damage_gzip(path, 1000)
    with opened(path, num_threads=1, prefetch=2) as reader:
        for _ in range(99):
            reader.get_next_batch()
        assert taken(reader)
        with while_a_thread_plans(reader) as (job, found):
            assert becomes(job, WITH_PYTHON)
            assert not found
        np.testing.assert_array_equal(found[0].labels, found[0].index)
        assert found[0].number == 99
        with pytest.raises(ReadError, match='"gzip"'):
            reader.get_next_batch()


def refuses_a_second_thread(reader: AsyncReader, is_waiting: Any, go_on: Any) -> None:
    """Check that one is refused while another waits, which gets its batch once it can go on."""
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(reader.get_next_batch()))
    first.start()
    while not is_waiting():
        time.sleep(0)
    for _ in range(2):
        with pytest.raises(H5AsyncError, match="another thread is waiting"):
            reader.get_next_batch()
    go_on()
    first.join(DEADLOCK_SECONDS)
    np.testing.assert_array_equal(found[0].labels, found[0].index)
    assert reader.get_next_batch().number == found[0].number + 1


@contextmanager
def leaving_a_batch_to_threads(reader: AsyncReader) -> Iterator[Any]:
    """Have the consumer wait in the core for a single thread, which sleeps until the end."""
    for _ in range(20):
        reader.get_next_batch()
    assert taken(reader)
    submissions = reader._engine.filler.submissions  # type: ignore[union-attr]
    queue = submissions._queue._struct
    queue.fill_ns = 10**9  # so that the consumer leaves batches to the thread
    while queue.num_idle < 1:
        time.sleep(0)
    queue.spinners = 1  # and this is not woken, as if another one was awake
    submissions.put(True)  # it may have been woken before, and not have run yet
    while queue.tickets or queue.num_idle < 1:
        time.sleep(0)
    yield reader._engine.ring.turns.is_inside  # type: ignore[union-attr]
    queue.spinners = 0


def test_a_second_thread_while_one_waits_in_the_core(path):
    with opened(path, num_threads=1, prefetch=1) as reader:
        submissions = reader._engine.filler.submissions  # type: ignore[union-attr]
        with leaving_a_batch_to_threads(reader) as is_inside:
            queue = submissions._queue._struct

            def go_on() -> None:
                queue.spinners = 0
                submissions.put(True)

            refuses_a_second_thread(reader, is_inside, go_on)


def test_a_signal_as_the_loop_leaves_a_reader_that_another_thread_closes(path, monkeypatch):
    """What the handler raises comes out, and who closes does not wait for ever."""
    leave, struck = Workers._leave, list[None]()

    def strike(*arguments: Any) -> None:
        if threading.current_thread() is consumer and not struck:
            struck.append(None)
            raise KeyboardInterrupt
        leave(*arguments)

    def consume() -> None:
        with pytest.raises(KeyboardInterrupt):
            reader.get_next_batch()
        came_out.set()

    came_out, reader = threading.Event(), opened(path, num_threads=1, prefetch=1)
    consumer = threading.Thread(target=consume, daemon=True)
    closer = threading.Thread(target=reader.close, daemon=True)
    with leaving_a_batch_to_threads(reader) as is_inside:
        monkeypatch.setattr(Workers, "_leave", strike)
        consumer.start()
        while not is_inside():
            time.sleep(0)
        closer.start()
        assert came_out.wait(DEADLOCK_SECONDS)
    closer.join(DEADLOCK_SECONDS)
    assert not closer.is_alive()
    reader.close()


def test_a_second_thread_while_one_waits_for_python(path):
    begun, may_end = threading.Event(), threading.Event()

    def postprocess(*arrays: np.ndarray) -> None:
        begun.set()
        may_end.wait(DEADLOCK_SECONDS)

    with opened(path, num_threads=1, postprocess=postprocess) as reader:
        delivery = reader._engine.delivery
        refuses_a_second_thread(reader, lambda: begun.is_set() and delivery._waiting, may_end.set)


def test_waiting_for_threads(path):
    """The core waits where there is no timeout; else the ring does, which ends it."""
    expected = truth(path)
    for timeout in (None, 20):
        with opened(path, num_threads=1, timeout=timeout) as reader:
            queue = reader._engine.filler.submissions._queue._struct  # type: ignore[union-attr]
            queue.num_cores = 1  # so that nobody looks in a loop
            for _ in range(len(reader) - 1):
                queue.fill_ns = 600_000  # so that the consumer does not help
                check(reader.get_next_batch(), expected)
            if timeout is None:
                assert taken(reader) == len(reader) - 2
