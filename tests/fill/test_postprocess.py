"""What a `postprocess` is given: fields in order or by name, random numbers, and which batch."""

from __future__ import annotations

import functools

import h5py
import numpy as np
import pytest

from h5async import AsyncReader

COUNT = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("postprocess") / "data.h5"
    with h5py.File(found, "w") as file:
        file["data"] = np.arange(COUNT * 3.0).reshape(COUNT, 3)
        file["labels"] = np.arange(COUNT)
    return found


def reader_of(path, function, **options):
    options = {"device": "cpu", "num_threads": 0, "batch_size": 16} | options
    return AsyncReader(hdf5_path=path, postprocess=function, **options)


def noisy(data, labels, *, rng):
    return data + rng.normal(size=data.shape), labels


def test_names_of_fields_decide_in_whatever_order(path):
    def turned(labels, *, data):
        return data * 2, labels + 1

    with reader_of(path, turned) as reader:
        for batch in reader:
            assert (batch.data == batch.index[:, None] * 6 + np.array([0, 2, 4])).all()
            assert (batch.labels == batch.index + 1).all()


def test_other_names_are_in_the_order_of_fields(path):
    def f(x, y, rng=None):
        assert isinstance(rng, np.random.Generator)
        return y[:, None] * np.ones(3), y

    with reader_of(path, f) as reader:
        assert (reader.get_next_batch().data[:, 0] == np.arange(16)).all()


def test_what_else_it_is_given(path):
    seen = []

    def f(data, labels, *, index, epoch, number, rng):
        seen.append((index.tolist(), epoch, number))
        index[:] = 0
        return None

    with reader_of(path, f, shuffle="full") as reader:
        expected = [(b.index.tolist(), b.epoch, b.number) for _ in range(2) for b in reader]
        reader.fetch_data([5, 6])
        expected.append((reader.get_next_batch().index.tolist(), -1, -1))
        expected.append((reader.read([7]).index.tolist(), -1, -1))
    assert seen == expected


def f_all(*arrays, rng, **others):
    assert not others
    return tuple(array + rng.integers(5) for array in arrays)


class Callable:
    def __call__(self, data, labels, *, rng):
        return data + rng.integers(5), labels

    def method(self, data, labels, rng):
        return data + rng.integers(5), labels


@pytest.mark.parametrize(
    "function",
    [
        f_all,
        Callable(),
        Callable().method,
        functools.partial(
            lambda by, data, labels, *, rng: (data * by + rng.integers(5), labels), 2
        ),
        lambda data, labels, rng: (data + rng.integers(5), labels),
    ],
    ids=["arrays", "object", "method", "partial", "lambda"],
)
def test_functions_of_all_kinds_are_given_random_numbers(path, function):
    with reader_of(path, function) as one, reader_of(path, function) as other:
        assert (one.get_next_batch().data == other.get_next_batch().data).all()


def test_a_value_of_the_users_own_stays(path):
    def f(data, labels, *, rng):
        return data * rng, labels

    with reader_of(path, functools.partial(f, rng=0)) as reader:
        assert not reader.get_next_batch().data.any()


def test_a_field_of_such_a_name_is_the_field(path):
    def f(data, rng, *, epoch):
        return data + epoch, -rng

    with reader_of(path, f, fields={"data": "data", "rng": "labels"}) as reader:
        assert (reader.get_next_batch()["rng"] == -np.arange(16)).all()


@pytest.mark.slow
def test_random_numbers_are_the_same_for_any_threads_and_resumed(path):
    def epochs(**options):
        with reader_of(path, noisy, shuffle="full", **options) as reader:
            return [batch.data.copy() for _ in range(2) for batch in reader]

    expected = epochs()
    for options in ({"num_threads": 3}, {"workers": "process"}, {"cache": "host"}):
        for one, other in zip(expected, epochs(**options), strict=True):
            np.testing.assert_array_equal(one, other)
    with reader_of(path, noisy, shuffle="full") as reader:
        for _ in range(3):
            reader.get_next_batch()
        state = reader.state_dict()
    with reader_of(path, noisy, shuffle="full", num_threads=2) as reader:
        reader.load_state_dict(state)
        for one in expected[3:]:
            np.testing.assert_array_equal(one, reader.get_next_batch().data)


def test_random_numbers_differ_by_seed_epoch_batch_and_rank(path):
    def first(seed=0, rank=0):
        found = []

        def f(data, labels, *, rng):
            found.append(rng.integers(1 << 62))

        with reader_of(path, f, seed=seed, rank=rank, world_size=2, batch_size=10) as reader:
            for _ in range(2):
                for _ in reader:
                    pass
        return found

    drawn = [*first(), *first(seed=1), *first(rank=1)]
    assert len(set(drawn)) == len(drawn) == 30


def test_random_numbers_of_given_samples_depend_on_them(path):
    with reader_of(path, noisy) as reader:
        one, other, again = (reader.read(index).data for index in ([1, 2], [1, 3], [1, 2]))
        reader.fetch_data([1, 2])
        np.testing.assert_array_equal(one, again)
        np.testing.assert_array_equal(one, reader.get_next_batch().data)
        assert (one[0] != other[0]).all()


def test_random_numbers_are_the_same_for_ever(path):
    def f(data, labels, *, rng):
        return data, np.full(len(labels), rng.integers(1000))

    with reader_of(path, f, seed=3) as reader:
        found = [int(batch.labels[0]) for batch in reader]
    assert found == [960, 465, 290, 322, 115, 675, 370]
