"""Batches of samples that the caller gives, among those of epochs; `read`; batches that last."""

from __future__ import annotations

import pickle
import signal
import threading

import h5py
import numpy as np
import pytest
from conftest import spoil_chunk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import AsyncReader, ConfigError, Field, PostprocessError, ReaderClosedError, ReadError

COUNT, SIZE = 200, 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("given") / "data.h5"
    with h5py.File(found, "w") as file:
        numbers = np.arange(COUNT)
        file["data"] = numbers[:, None] * np.array([1, 1000])
        file["image"] = np.arange(COUNT * 24).reshape(COUNT, 2, 4, 3).astype(np.uint8)
        file.create_dataset("labels", data=numbers % 5, chunks=(7,), compression="gzip")
    return found


def reader_of(path, **options):
    options = {"device": "cpu", "num_threads": 0, "batch_size": SIZE, "shuffle": "full"} | options
    return AsyncReader(hdf5_path=path, **options)


def check(batch):
    assert (batch.data == batch.index[:, None] * np.array([1, 1000])).all()
    assert (batch.labels == batch.index % 5).all()


def doubled(data, labels):
    return data * 1.0, labels


WAYS = [
    {},
    {"num_threads": 2},
    {"num_threads": 2, "prefetch": 4, "postprocess": doubled},
    {"cache": "host", "num_threads": 2},
    {"copy": True, "num_threads": 2},
    {"debug_lifetimes": True, "num_threads": 2},
]
IDS = ["caller", "threads", "postprocess", "cache", "copy", "lifetimes"]

indices = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=SIZE)
steps = st.one_of(
    st.tuples(st.just("ask"), st.none()),
    st.tuples(st.just("give"), indices),
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("read"), indices),
    st.tuples(st.just("epoch"), st.integers(0, 3)),
    st.tuples(st.just("loop"), st.integers(1, 20)),
    st.tuples(st.just("state"), st.none()),
)


class Model:
    """What a reader must deliver: the order of epochs, and given batches in their turn."""

    def __init__(self, path):
        with reader_of(path) as reader:
            self.orders = [[b.index.tolist() for b in reader] for _ in range(8)]
        self.epoch, self.number, self.waiting = 0, 0, []

    def take(self):
        """Return epoch, number, index and whether it is the last, of the next batch."""
        if self.waiting and self.waiting[0] is not None:
            return -1, -1, self.waiting.pop(0), False
        if self.waiting:
            self.waiting.pop(0)
        order = self.orders[self.epoch]
        found = self.epoch, self.number, order[self.number], self.number + 1 == len(order)
        self.number += 1
        if self.number == len(order):
            self.epoch, self.number = self.epoch + 1, 0
        return found


@pytest.fixture(scope="module")
def orders(path):
    return Model(path).orders


@pytest.mark.parametrize("options", WAYS, ids=IDS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(todo=st.lists(steps, max_size=40))
def test_any_calls_in_any_order(path, orders, options, todo):
    model = Model.__new__(Model)
    model.orders, model.epoch, model.number, model.waiting = orders, 0, 0, []
    with reader_of(path, **options) as reader:
        for kind, value in todo:
            if model.epoch >= 5:
                break
            if kind == "ask":
                reader.fetch_data()
                model.waiting.append(None)
            elif kind == "give":
                assert reader.fetch_data(value) is False
                model.waiting.append(value)
            elif kind == "take":
                take(reader, model)
            elif kind == "read":
                batch = reader.read(value)
                check(batch)
                assert batch.index.tolist() == value
            elif kind == "epoch":
                reader.set_epoch(value)
                if (model.epoch, model.number) != (value, 0):
                    model.epoch, model.number, model.waiting = value, 0, []
            elif kind == "state":
                reader.load_state_dict(reader.state_dict())
                model.waiting = []
            else:
                loop(reader, model, value)
        for _ in range(3):
            take(reader, model)


def take(reader, model):
    batch = reader.get_next_batch()
    check(batch)
    found = batch.epoch, batch.number, batch.index.tolist(), batch.last
    assert found == model.take()


def loop(reader, model, most):
    """Begin the next epoch, as the reader's loops do, and go to another one."""
    seen = []
    for batch in reader:
        check(batch)
        if batch.epoch >= 0:
            assert batch.index.tolist() == model.orders[batch.epoch][batch.number]
            seen.append((batch.epoch, batch.number))
        if len(seen) == most:
            break
    assert seen == [(seen[0][0], number) for number in range(seen[0][1], seen[0][1] + len(seen))]
    reader.set_epoch(6)
    reader.set_epoch(1)
    model.epoch, model.number, model.waiting = 1, 0, []


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_given_batches_come_in_their_turn(path, workers):
    with reader_of(path, num_threads=2, workers=workers, prefetch=3) as reader:
        asked = [[3, 17, 42], None, [5] * SIZE, [199], None]
        for index in asked:
            reader.fetch_data(index)
        for index in asked:
            batch = reader.get_next_batch()
            check(batch)
            if index is not None:
                assert batch.index.tolist() == index
                assert (batch.epoch, batch.number, batch.last) == (-1, -1, False)
        assert batch.number == 1


@pytest.mark.parametrize("options", [{}, {"num_threads": 2}, {"num_threads": 2, "prefetch": 5}])
def test_given_batches_are_taken_by_the_core(path, orders, options):
    """Also more than there are slots, among those of the order, whose samples last."""
    rng, due, kept = np.random.default_rng(0), [], []
    with reader_of(path, **options) as reader:
        order = [index for epoch in orders for index in epoch]
        assert reader.get_next_batch().index.tolist() == order.pop(0)
        turns = reader._engine.ring.turns
        before, stats = turns.taken, reader.stats()
        for round_ in range(20):
            for _ in range(round_ % 9):
                index = rng.integers(0, COUNT, rng.integers(1, SIZE + 1))
                reader.fetch_data([index.tolist(), index, index.astype(">i2")][rng.integers(3)])
                due.append((-1, index.tolist()))
                index[:] = -1
            is_last = reader.fetch_data()
            due.append((is_last, order.pop(0)))
            for is_last, index in [due.pop(0) for _ in range(max(0, len(due) - 4))]:
                batch = reader.get_next_batch()
                check(batch)
                assert (batch.last if batch.epoch >= 0 else -1) == is_last
                kept.append((batch, index))
        since = reader.stats(since=stats)
        assert since.batches == len(kept)
        assert since.samples == sum(batch.size for batch, _ in kept)
        assert turns.taken - before > 0.9 * len(kept) > 50
        assert all(batch.index.tolist() == index for batch, index in kept)
        state = reader.state_dict()
        assert reader.load_state_dict(state) is None
        following = [index for is_last, index in due if is_last != -1] + order
        assert reader.get_next_batch().index.tolist() == following[0]


def test_a_given_batch_is_put_back_while_as_many_wait_as_the_core_takes(path):
    """As after Ctrl-C: then one more waits, and further ones must not replace it."""
    with reader_of(path, shuffle=False) as reader:
        reader.get_next_batch()
        for number in range(15):
            reader.fetch_data([number])
        reader.get_next_batch()
        reader.fetch_data([15])
        assert reader._engine.delivery.put_back_turn()
        for number in range(16, 20):
            reader.fetch_data([number])
        assert [reader.get_next_batch().index.tolist() for _ in range(20)] == [
            [number] for number in range(20)
        ]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_epoch_that_goes_on_behind_given_batches_has_statistics(path, num_threads):
    with reader_of(path, num_threads=num_threads) as reader:
        reader.get_next_batch()
        state = reader.state_dict()
        reader.get_next_batch()
        reader.load_state_dict(state)
        for number in range(5):
            reader.fetch_data([number])
        numbers = [reader.get_next_batch().number for _ in range(9)]
        assert numbers == [-1] * 5 + [1, 2, 3, 4]
        assert [reader.stats(epoch=back).batches for back in (-1, -2)] == [4, 2]


def test_after_many_given_batches_a_loop_begins_the_next_epoch(path):
    with reader_of(path) as reader:
        reader.get_next_batch()
        for number in range(100):
            reader.fetch_data([number])
            assert reader.get_next_batch().index.tolist() == [number]
        assert next(iter(reader)).epoch == 1


def test_given_batches_of_a_loop_are_part_of_it(path):
    with reader_of(path, num_threads=2) as reader:
        given = []
        for batch in reader:
            if batch.epoch == -1:
                given.append(batch.index.tolist())
            elif batch.number % 4 == 0:
                reader.fetch_data([batch.number, 7])
        assert given == [[0, 7], [4, 7], [8, 7]]


@pytest.mark.parametrize("call", ["fetch_data", "read"])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([COUNT], f"no sample {COUNT}"),
        ([-1], "no sample -1"),
        ([1.5], "must be a sequence of integers"),
        ([[1]], "must be a sequence of integers"),
        ("x", "must be a sequence of integers"),
        (3, "must be a sequence of integers"),
        ([True], "must be a sequence of integers"),
        ([[1], [2, 3]], "must be a sequence of integers"),
        ([], "give at least one sample number"),
        ([2**64], "must be a sequence of integers"),
    ],
)
def test_what_is_no_index_is_an_error_at_the_call(path, call, index, message):
    with reader_of(path) as reader:
        with pytest.raises(ConfigError, match=message):
            getattr(reader, call)(index)
        assert reader.get_next_batch().number == 0


def test_too_many_for_a_batch(path):
    with reader_of(path) as reader:
        with pytest.raises(ConfigError, match=f"{SIZE} samples at most, found {SIZE + 1}"):
            reader.fetch_data(range(SIZE + 1))
        assert reader.read(range(SIZE + 1)).size == SIZE + 1


def test_given_samples_may_be_others_than_those_selected(path):
    with reader_of(path, indices="50:100") as reader:
        reader.fetch_data([0, 199])
        assert reader.get_next_batch().index.tolist() == [0, 199]
    with reader_of(path, indices="50:100", cache="host") as reader:
        with pytest.raises(ConfigError, match="only samples that `indices` selects"):
            reader.fetch_data([0])
        check(reader.read([0, 199]))


def test_the_callers_array_may_change_at_once(path):
    with reader_of(path, num_threads=2) as reader:
        index = np.array([4, 5])
        reader.fetch_data(index)
        batch = reader.read(index)
        index[:] = -7
        assert reader.get_next_batch().index.tolist() == [4, 5]
        assert batch.index.tolist() == [4, 5]


def test_read_lasts(path):
    with reader_of(path) as reader:
        kept = [reader.read([n, n]) for n in range(40)]
        batches = sum(1 for _ in reader)
    assert batches == -(-COUNT // SIZE)
    for number, batch in enumerate(kept):
        check(batch)
        assert batch.index.tolist() == [number, number]


READ = {
    "plain": {},
    "moved": {
        "fields": {
            "image": Field("image", axes=(0, 3, 1, 2), dtype="float32", scale=0.5, offset=1),
            "labels": Field("labels", steps=range(-1, 2), pad="edge"),
            "half": Field("data", region={1: slice(1)}),
        },
    },
}


@pytest.mark.parametrize("options", READ.values(), ids=READ)
def test_what_fits_into_a_batch_is_read_in_one_call(path, options):
    """All but the first: what such a call needs is made then."""
    indices = [[3], [5, 5, 4], np.arange(SIZE) * 7, np.array([199], ">u2")]
    with reader_of(path, num_threads=2, **options) as reader:
        delivery = reader._engine.delivery
        expected = [delivery.read(index) for index in indices]  # in Python
        read, delivery.read = delivery.read, None
        found = [reader.read(index) for index in indices[:3]]
        kept = [pickle.loads(pickle.dumps(batch)) for batch in found]
        with pytest.raises(TypeError):  # that is left to Python
            reader.read(indices[3])
        delivery.read = read
        found.append(reader.read(indices[3]))
        with pytest.raises(ConfigError, match="there is no sample 200"):
            reader.read([1, 200])
        for _ in reader:
            pass
    for batches in found, kept + found[3:]:
        for batch, other, index in zip(batches, expected, indices, strict=True):
            assert batch.index.tolist() == list(index)
            assert (batch.epoch, batch.number, batch.last) == (-1, -1, False)
            assert batch.size == len(index)
            assert batch.keys() == other.keys()
            for one, same in zip(batch, other, strict=True):
                assert one.dtype == same.dtype
                assert one.shape == same.shape
                assert (one == same).all()
                assert one.flags.writeable
                assert one.flags.c_contiguous


def test_a_reader_is_closed_while_threads_read(path):
    """They get all samples, or an error that says so; nothing is freed before they have left."""

    def work(reader, begin, found):
        begin.wait(60)
        try:
            while True:
                check(reader.read([1, 199]))
        except BaseException as error:
            found.append(error)

    for _ in range(20):
        found, begin = [], threading.Barrier(4)
        with reader_of(path) as reader:
            check(reader.read([1]))
            threads = [threading.Thread(target=work, args=(reader, begin, found)) for _ in range(3)]
            for thread in threads:
                thread.start()
            begin.wait(60)
        for thread in threads:
            thread.join(60)
        assert [type(error) for error in found] == [ReaderClosedError] * 3


def test_read_in_many_threads(path):
    errors, begin = [], threading.Barrier(4)

    def work(reader, seed):
        rng = np.random.default_rng(seed)
        try:
            begin.wait(60)
            for _ in range(50):
                check(reader.read(rng.integers(0, COUNT, rng.integers(1, 40))))
        except BaseException as error:
            errors.append(error)

    with reader_of(path, num_threads=2) as reader:
        threads = [threading.Thread(target=work, args=(reader, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            for batch in reader:
                check(batch)
        for thread in threads:
            thread.join(60)
    assert errors == []


def test_read_within_postprocess(path):
    readers = []

    def mixed(data, labels):
        return data + readers[0].read([1]).data * 0, labels

    with reader_of(path) as inner, reader_of(path, postprocess=mixed, num_threads=2) as reader:
        readers.append(inner)
        for batch in reader:
            check(batch)
        plain = {"postprocess": lambda data, labels: (data, readers[0].layouts and labels)}
    with reader_of(path, **plain) as reader:
        readers[0] = reader
        check(reader.get_next_batch())


def test_read_of_a_closed_reader(path):
    reader = reader_of(path)
    reader.close()
    with pytest.raises(ReaderClosedError):
        reader.read([1])
    with pytest.raises(ReaderClosedError):
        reader.fetch_data([1])


@pytest.mark.slow
def test_read_needs_threads_of_this_process(path):
    with (
        reader_of(path, workers="process") as reader,
        pytest.raises(ConfigError, match='needs workers="thread"'),
    ):
        reader.read([1])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_of_a_given_batch_is_its_own(path, num_threads):
    def picky(data, labels, *, index):
        if 13 in index and index.size == 1:
            raise ValueError("unlucky")

    with reader_of(path, postprocess=picky, num_threads=num_threads) as reader:
        for index in ([12], [13], [14]):
            reader.fetch_data(index)
        check(reader.get_next_batch())
        with pytest.raises(PostprocessError, match=r"batch of given samples raised .* unlucky"):
            reader.get_next_batch()
        assert reader.get_next_batch().index.tolist() == [14]
        with pytest.raises(PostprocessError, match="postprocess of given samples raised"):
            reader.read([13])
        assert reader.get_next_batch().number == 0


def test_damaged_chunks_are_errors_of_the_batches_that_need_them(path, tmp_path):
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(path.read_bytes())
    spoil_chunk(damaged, 3, "labels")
    with reader_of(damaged, num_threads=2) as reader:
        reader.fetch_data([0, 199])
        reader.fetch_data([22])
        reader.fetch_data([20, 28])
        check(reader.get_next_batch())
        with pytest.raises(ReadError):
            reader.get_next_batch()
        check(reader.get_next_batch())
        with pytest.raises(ReadError):
            reader.read([22])
        check(reader.read([5]))


def test_an_interrupted_call_leaves_given_batches_as_they_are(path):
    interrupts = iter([True, False, False, False])

    def interrupted(data, labels):
        if next(interrupts):
            signal.raise_signal(signal.SIGINT)

    with reader_of(path, postprocess=interrupted) as reader:
        reader.fetch_data([4, 4])
        reader.fetch_data()
        with pytest.raises(KeyboardInterrupt):
            reader.get_next_batch()
        assert reader.get_next_batch().index.tolist() == [4, 4]
        assert reader.get_next_batch().number == 0
        check(reader.read([1]))


def test_copies_last(path):
    with reader_of(path, copy=True, num_threads=2) as reader:
        batches = list(reader)
        labels = np.concatenate([batch.labels for batch in reader])
    for batch in batches:
        check(batch)
    assert labels.size == COUNT
    assert sorted(np.concatenate([batch.index for batch in batches])) == list(range(COUNT))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_very_many_given_batches_change_nothing_of_the_order(path, num_threads):
    """Those that were delivered are forgotten, a few dozen at a time."""
    with reader_of(path, num_threads=num_threads) as reader:
        expected = [(b.epoch, b.number, b.index.tolist(), b.last) for _ in range(3) for b in reader]
        reader.reset()
        rng, found = np.random.default_rng(0), []
        while len(found) < len(expected):
            given = rng.integers(COUNT, size=(int(rng.integers(1, 9)), 3))
            assert not any([reader.fetch_data(index) for index in given])
            is_last = reader.fetch_data()
            for index in given:
                batch = reader.get_next_batch()
                assert (batch.epoch, batch.number, batch.last) == (-1, -1, False)
                assert batch.index.tolist() == index.tolist()
                check(batch)
            batch = reader.get_next_batch()
            check(batch)
            assert batch.last == is_last
            found.append((batch.epoch, batch.number, batch.index.tolist(), batch.last))
        assert found == expected


def test_what_the_loop_cannot_read_of_cheap_batches_threads_find_out(path, tmp_path):
    """Batches of which the core reads the most in the thread that takes them."""
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(path.read_bytes())
    spoil_chunk(damaged, 3, "labels")
    with reader_of(damaged, num_threads=2, prefetch=3, timeout=60) as reader:
        for _ in range(20):
            for _ in range(20):
                reader.fetch_data([0, 199])
            reader.fetch_data([20, 22])
            reader.fetch_data([28])
            for _ in range(20):
                check(reader.get_next_batch())
            with pytest.raises(ReadError, match="labels"):
                reader.get_next_batch()
            check(reader.get_next_batch())
