"""What a `postprocess` is given: fields in order or by name, random numbers, and which batch."""

from __future__ import annotations

import functools

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, ConfigError, Field, PostprocessError, Sequences

COUNT = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("postprocess") / "data.h5"
    with h5py.File(found, "w") as file:
        file["data"] = np.arange(COUNT * 3.0).reshape(COUNT, 3)
        file["labels"] = np.arange(COUNT)
        file["lengths"] = [30, 70]
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


# --- arrays that it adds and drops ---------------------------------------------------------------


def spectra(data, labels, *, index, epoch):
    """Return arrays of another number, names, dtypes, and of a width that differs by batch."""
    width = 1 + len(index) % 3
    mel = np.repeat(data[:, :1], width, axis=1).astype(np.float32)
    return {"mel": mel, "lengths": np.full(len(data), width), "labels": labels}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_threads": 2},
        {"cache": "host"},
        {"copy": True},
        {"debug_lifetimes": True},
    ],
    ids=str,
)
def test_a_mapping_names_the_arrays_of_the_batch(path, options):
    with reader_of(path, spectra, shuffle="full", **options) as reader:
        for batch in (batch for _ in range(2) for batch in reader):
            assert batch.keys() == ["mel", "lengths", "labels"]
            width = 1 + batch.size % 3
            assert (batch.mel == batch.index[:, None] * np.float32(3)).all()
            assert batch["mel"].shape == (batch.size, width)
            assert batch.mel.dtype == np.float32
            assert (batch.lengths == width).all()
            assert (batch.labels == batch.index).all()
            assert not hasattr(batch, "data")
            kept = batch.copy()
            assert kept.keys() == batch.keys()
    with reader_of(path, spectra, **options) as reader:
        assert (reader.read([3, 1]).mel[:, 0] == [9, 3]).all()


def test_names_of_what_it_returns_may_be_given(path):
    def f(data, labels):
        return labels + 1, data.sum(1), labels

    options = {"postprocess_fields": ("next", "sum", "labels")}
    with reader_of(path, f, **options) as reader:
        batch = reader.get_next_batch()
        following, total, labels = batch
        assert batch.keys() == ["next", "sum", "labels"]
        assert (following == batch.index + 1).all()
        assert (total == (batch.index * 9 + 3)).all()
        assert (labels == batch.index).all()
    with reader_of(path, lambda data, labels: labels * 2, postprocess_fields="twice") as reader:
        assert (reader.get_next_batch().twice == np.arange(16) * 2).all()


@pytest.mark.parametrize(
    ("result", "names", "message"),
    [
        ({"a": [1, 2], "b": [1]}, None, "unequal numbers of rows"),
        ({"index": [1]}, None, "has an attribute of that name"),
        ({3: [1]}, None, "must be strings, found 3"),
        ({}, None, "returned an empty mapping"),
        ({"a": [1]}, ("a", "b"), "a mapping of a; it must return a, b"),
        (([1], [2]), ("a", "b", "c"), "returned 2; it must return 3 arrays"),
        (None, ("a",), "returned NoneType"),
        ([1, 2, 3], None, "it must return 2 arrays, or None if it works in place, or a mapping"),
    ],
    ids=str,
)
def test_what_it_must_not_return(path, result, names, message):
    with (
        reader_of(path, lambda *_: result, postprocess_fields=names) as reader,
        pytest.raises(PostprocessError, match=message),
    ):
        reader.get_next_batch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"postprocess_fields": ("a",)}, "needs postprocess"),
        ({"postprocess": noisy, "postprocess_fields": ()}, "at least one name"),
        ({"postprocess": noisy, "postprocess_fields": ("a", "a")}, "each name once"),
        ({"postprocess": noisy, "postprocess_fields": ("size",)}, "attribute of that name"),
    ],
)
def test_names_that_do_not_fit(path, options, message):
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path=path, **options)


def test_it_is_told_sequences_steps_and_masks(path):
    seen = []

    def f(data, labels, *, index, sequence, step, is_there):
        seen.append((index.tolist(), sequence.tolist(), step.tolist(), is_there.tolist()))
        return {"data": data, "is_there": is_there[:, ::-1]}

    fields = {
        "data": Field("data", steps=range(-1, 1), pad="edge", pad_mask="is_there"),
        "labels": "labels",
    }
    sequences = Sequences(lengths="lengths")
    with reader_of(path, f, fields=fields, sequences=sequences, shuffle="full") as reader:
        for batch, given in zip(reader, seen, strict=False):
            begin = np.where(batch.index < 30, 0, 30)
            there = np.stack([batch.index > begin, batch.index >= begin], axis=1)
            assert given[0] == batch.index.tolist()
            assert given[1] == batch.sequence.tolist() == (batch.index >= 30).tolist()
            assert given[2] == batch.step.tolist() == (batch.index - begin).tolist()
            assert given[3] == there.tolist()
            assert batch.keys() == ["data", "is_there"]
            assert (batch.is_there == there[:, ::-1]).all()  # what it returns wins
