"""Which samples readers deliver, against NumPy: selections, orders, ranks, resumed, cached."""

from __future__ import annotations

import itertools
import json
import pickle

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    H5AsyncError,
    ReaderConfig,
    ReadError,
    Split,
)

COUNTS = (137, 0, 1025, 1)  # samples of each file
COUNT = sum(COUNTS)
PARTS = {"train": 0.7, "val": 0.2, "test": 0.1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files, one of them empty, one of a sample; all values tell which sample they are of."""
    folder = tmp_path_factory.mktemp("selecting")
    rng = np.random.default_rng(0)
    paths, first = [], 0
    for number, count in enumerate(COUNTS):
        paths.append(folder / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            numbers = np.arange(first, first + count)
            file["data"] = numbers[:, None] * np.array([1, 1000])
            chunks = {"chunks": (min(37, count),), "compression": "gzip"} if count else {}
            file.create_dataset("labels", data=numbers % 5, **chunks)
            names = [f"subject {n % 31}" for n in numbers]
            file.create_dataset("subject", data=names, dtype=h5py.string_dtype())
            file["subject_fixed"] = np.array(names, "S12")
            file["column"] = (numbers % 5)[:, None]
            file["keep"] = numbers % 3 == 0
            file["some"] = rng.permutation(count)[: count // 2]
            file["weight"] = (numbers % 4).astype("f4")
            file["table"] = np.zeros(count, [("x", "f4"), ("class", "i2")])
            table = file["table"][:]
            table["class"] = numbers % 5
            file["table"][...] = table
            layout = h5py.VirtualLayout((count,), "i8")
            if count:
                layout[:] = h5py.VirtualSource(file["labels"])
            file.create_virtual_dataset("virtual", layout)
        first += count
    return paths


def some_of(files):
    found, first = [], 0
    for path, count in zip(files, COUNTS, strict=True):
        with h5py.File(path) as file:
            found.append(file["some"][:] + first)
        first += count
    return np.concatenate(found)


def reader_of(files, **options):
    options = {"device": "cpu", "num_threads": 0, "batch_size": 50} | options
    return AsyncReader(hdf5_path=[str(path) for path in files], **options)


def epoch_of(reader):
    """Return the samples of the next epoch, whose values are checked."""
    found = [np.zeros(0, np.int64)]
    for batch in reader:
        check(batch)
        found.append(batch.index.copy())
    return np.concatenate(found)


def check(batch):
    assert (batch.data == batch.index[:, None] * np.array([1, 1000])).all()
    assert (batch.labels == batch.index % 5).all()


MASK = np.arange(COUNT) % 7 == 2
CHOSEN = [
    ("slice", slice(3, 900, 4), range(COUNT)[3:900:4]),
    ("text", "-40:", range(COUNT)[-40:]),
    ("backwards", slice(None, None, -1), range(COUNT)[::-1]),
    ("range", range(5, 1100, 6), range(5, 1100, 6)),
    ("list", [5, 3, 3, 900, 0], [5, 3, 3, 900, 0]),
    ("one", [COUNT - 1], [COUNT - 1]),
    ("mask", MASK, np.flatnonzero(MASK)),
    ("int32", np.array([7, 1, 1000], "i4"), [7, 1, 1000]),
    ("mask in the files", "keep", np.flatnonzero(np.arange(COUNT) % 3 == 0)),
    ("all", ":", range(COUNT)),
]


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("options", [{}, {"cache": "host"}, {"num_threads": 2}])
@pytest.mark.parametrize(("chosen", "model"), [c[1:] for c in CHOSEN], ids=[c[0] for c in CHOSEN])
def test_selections(files, chosen, model, shuffle, options):
    model = np.array(model)
    with reader_of(files, indices=chosen, shuffle=shuffle, window_bytes=4000, **options) as reader:
        assert (reader.num_samples, len(reader)) == (model.size, -(-model.size // 50))
        assert reader.nbytes == model.size * 24
        epochs = [epoch_of(reader) for _ in range(2)]
    for found in epochs:
        assert np.sort(found).tolist() == np.sort(model).tolist()
    if not shuffle:
        assert epochs[0].tolist() == model.tolist()
    elif model.size > 100:
        assert epochs[0].tolist() != epochs[1].tolist()


def test_numbers_in_the_files_are_those_of_each_file(files):
    with reader_of(files, indices="some") as reader:
        assert epoch_of(reader).tolist() == some_of(files).tolist()


def test_a_npy_file(files, tmp_path):
    for array in (np.array([5, 2, 800]), MASK):
        np.save(tmp_path / "chosen.npy", array)
        expected = np.flatnonzero(array) if array.dtype == bool else array
        with reader_of(files, indices=tmp_path / "chosen.npy") as reader:
            assert epoch_of(reader).tolist() == expected.tolist()


@pytest.mark.slow
def test_helper_process(files):
    split = Split("train", PARTS, by="subject")
    with (
        reader_of(files, indices=split, shuffle="full", num_threads=2) as threads,
        reader_of(files, indices=split, shuffle="full", workers="process") as process,
    ):
        assert epoch_of(threads).tolist() == epoch_of(process).tolist()


def test_steps_that_leave_no_sample(files):
    """The message says so: the dataset has samples, and no smaller batch would help."""
    with reader_of(files, fields={"x": Field("data", steps=[0, 5000])}) as reader:
        assert (len(reader), reader.num_samples) == (0, 0)
        with pytest.raises(DatasetError, match="no sample has all of its steps inside"):
            reader.fetch_data()


@pytest.mark.parametrize("chosen", [[], np.zeros(0, int), "0:0", range(0), np.zeros(COUNT, bool)])
def test_empty_selections(files, chosen):
    with reader_of(files, indices=chosen) as reader:
        assert (len(reader), reader.num_samples, reader.nbytes) == (0, 0, 0)
        assert list(reader) == []
        with pytest.raises(DatasetError, match="no batch: `indices` selects no sample"):
            reader.fetch_data()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([COUNT], f"there is no sample {COUNT}"),
        ([-1], "there is no sample -1"),
        (range(COUNT + 1), f"there is no sample {COUNT}"),
        (np.ones(5, bool), rf"a mask must have a value for each of the {COUNT:,}"),
        ([1.5], "must be a slice"),
        ([[1]], "must be a slice"),
        (3, "must be a slice"),
        (slice(1.5, 2), "must be a slice"),
        ({1, 2}, "must be a slice"),
        ("::0", "slice step cannot be zero"),
        ("nowhere", 'indices: .*there is no dataset "nowhere"'),
        ("weight", "must hold integers or bools"),
        ("nowhere.npy", "cannot be read as a .npy file"),
        ({"name": "a", "parts": {"b": 1}}, "there is no part 'a'"),
        (Split("val", PARTS, by="nowhere"), 'indices: .*there is no dataset "nowhere"'),
    ],
)
def test_selections_that_do_not_fit(files, chosen, message):
    with pytest.raises(H5AsyncError, match=message):
        reader_of(files, indices=chosen)


# --- splits ---------------------------------------------------------------------------------------


def part(files, name, **options):
    with reader_of(files, indices=Split(name, PARTS, **options)) as reader:
        return epoch_of(reader)


def test_a_split_by_samples_of_several_values(files):
    with pytest.raises(ConfigError, match=r'one value for each sample.* 2 of .*"table\[:, 0\]"'):
        part(files, "val", by="data")
    assert part(files, "val", by="data[:, 0]").size


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 3},
        {"by": "subject"},
        {"by": "subject_fixed"},
        {"stratify": "labels"},
        {"stratify": "column"},
        {"stratify": "virtual"},
        {"stratify": "table/class"},
        {"by": "subject", "stratify": "keep"},
    ],
)
def test_parts_of_a_split(files, options):
    train, val, test = (part(files, name, **options) for name in PARTS)
    assert sorted([*train, *val, *test]) == list(range(COUNT))
    if "by" in options:
        assert not set(train % 31) & set(val % 31)
    elif "stratify" in options:
        counts = np.bincount(train % 5)
        assert (abs(counts - 0.7 * COUNT / 5) <= 2).all()
    assert abs(train.size / COUNT - 0.7) < 0.08


def test_parts_are_the_same_in_whatever_form(files):
    expected = part(files, "train", stratify="labels")
    assert part(files, "train", stratify="virtual").tolist() == expected.tolist()
    assert part(files, "train", stratify="column").tolist() == expected.tolist()
    turned = Split("train", dict(reversed(PARTS.items())), stratify="labels")
    with reader_of(files, indices=turned) as reader:
        assert epoch_of(reader).tolist() == expected.tolist()
    by = part(files, "train", by="subject")
    assert part(files, "train", by="subject_fixed").tolist() == by.tolist()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": -1}, "from 0 to 1"),
        ({"train": 0.6, "val": 0.6}, "sum up to 1 at most"),
        ({"train": float("nan")}, "from 0 to 1"),
        ({"val": 1}, "there is no part 'train' among val"),
        ([0.9, 0.1], "must be a valid dictionary"),
    ],
)
def test_parts_that_do_not_fit(parts, message):
    with pytest.raises(ConfigError, match=message):
        Split("train", parts)


# --- weights --------------------------------------------------------------------------------------


def frequencies(reader, of):
    return np.bincount(of(epoch_of(reader)), minlength=5) / reader.config.epoch_samples


@pytest.mark.parametrize("labels", ["labels", "virtual", "column", "table/class"])
def test_balanced(files, labels):
    chosen = np.flatnonzero((np.arange(COUNT) % 5 == 0) | (np.arange(COUNT) < 40))
    with AsyncReader(
        hdf5_path=files,
        fields={"data": "data", "labels": labels},
        device="cpu",
        indices=chosen,
        weights="balanced",
        epoch_samples=20_000,
        batch_size=500,
    ) as reader:
        drawn = np.concatenate([batch.index for batch in reader])
    assert np.isin(drawn, chosen).all()
    assert abs(np.bincount(drawn % 5) / drawn.size - 0.2).max() < 0.02


@pytest.mark.parametrize(
    "weights", ["weight", np.arange(COUNT) % 4, (np.arange(COUNT) % 4) * 1e300]
)
def test_weights_of_samples(files, weights):
    with reader_of(files, weights=weights, epoch_samples=20_000) as reader:
        found = np.bincount(epoch_of(reader) % 4, minlength=4) / 20_000
    assert found[0] == 0
    assert abs(found[1:] - np.array([1, 2, 3]) / 6).max() < 0.02


def test_weights_of_files_are_of_what_is_selected_of_them(files):
    weights = {str(path): w for path, w in zip(files, (1, 5, 2, 1), strict=True)}
    chosen = np.r_[0:10, 137:1163]
    with reader_of(files, weights=weights, indices=chosen, epoch_samples=20_000) as reader:
        drawn = epoch_of(reader)
    file = np.searchsorted([137, 137 + 1025], drawn, side="right")
    assert abs(np.bincount(file) / 20_000 - np.array([1, 2, 1]) / 4).max() < 0.02


def test_a_file_that_is_read_twice_has_one_weight(files):
    weights = {str(files[0]): 3.0, str(files[2]): 1.0}
    several = [files[0], files[2], files[0]]
    with AsyncReader(
        hdf5_path=several, weights=weights, epoch_samples=20_000, device="cpu", batch_size=500
    ) as reader:
        drawn = np.concatenate([batch.index for batch in reader])
    assert abs(np.mean((drawn < 137) | (drawn >= 137 + 1025)) - 0.75) < 0.02


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(COUNT), "must not all be 0, and all 1,163 samples that are selected have"),
        (np.full(COUNT, np.nan), "finite, and not below 0; found nan for sample 0"),
        (np.r_[np.ones(COUNT - 1), np.inf], "found inf for sample 1162"),
        (np.r_[-1.0, np.ones(COUNT - 1)], "not below 0"),
        (np.ones(3), "must be a number for each"),
        ("subject", "must be a number for each"),
        ("nowhere", 'weights: .*there is no dataset "nowhere"'),
        ({"x.h5": 1}, "no weight is given for"),
        ({}, "must be an array of numbers"),
        (["a"] * COUNT, "must be an array of numbers"),
        (3, "must be an array of numbers"),
    ],
)
def test_weights_that_do_not_fit(files, weights, message):
    with pytest.raises(H5AsyncError, match=message):
        reader_of(files, weights=weights)


# --- ranks, resumed readers -----------------------------------------------------------------------

ORDERS = [
    {"indices": "keep"},
    {"indices": "keep", "shuffle": "full"},
    {"indices": "some", "shuffle": "window", "window_bytes": 4000},
    {"indices": Split("train", PARTS), "shuffle": "full"},
    {"weights": "weight", "epoch_samples": 600},
    {"weights": "weight", "indices": "10:900"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("world_size", [1, 3])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=st.integers(0, 30), batch_size=st.sampled_from([7, 64, 1000]))
def test_ranks_and_resumed_readers(files, options, world_size, taken, batch_size):
    """What all ranks deliver before and after is one epoch of one reader, at any other sizes."""
    with reader_of(files, **options) as reader:
        expected = epoch_of(reader)

    def ranks(size, count):
        return [
            reader_of(files, batch_size=size, rank=r, world_size=count, **options)
            for r in range(count)
        ]

    found = []
    readers = ranks(13, world_size)
    taken = min(taken, len(readers[0]))
    for _ in range(taken):
        found += [reader.get_next_batch().index.copy() for reader in readers]
    states = [reader.state_dict() for reader in readers]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    for reader in readers:
        reader.close()
    others = ranks(batch_size, 4 - world_size)
    for reader in others:
        reader.load_state_dict(state)
    if state["epoch"] == 0:
        found += list(itertools.chain.from_iterable(map(epochs_rest, others)))
    for reader in others:
        reader.close()
    found = np.concatenate(found)
    extra = found.size - expected.size  # ranks for which nothing is left repeat a sample
    assert 0 <= extra < 6
    counted = np.bincount(found, minlength=COUNT) - np.bincount(expected, minlength=COUNT)
    assert (counted >= 0).all()
    assert counted.sum() == extra


def epochs_rest(reader):
    for batch in reader:
        check(batch)
        yield batch.index.copy()


CHANGES = [
    ({"indices": "keep"}, {"indices": "some"}, "other indices"),
    ({"indices": "keep"}, {}, "the state has indices, and the reader has none"),
    ({}, {"indices": "keep"}, "the reader has indices, and the state has none"),
    ({"indices": Split("val", PARTS)}, {"indices": Split("val", PARTS, seed=1)}, "other indices"),
    ({"weights": "weight"}, {"weights": "balanced"}, "other weights"),
    ({"weights": "weight"}, {}, "the state has weights"),
    ({"weights": "weight"}, {"weights": "weight", "epoch_samples": 9}, "epoch_samples=1163"),
    ({"sampler": [1, 2]}, {}, "the state has sampler"),
    (
        {"fields": {"x": Field("data", steps=[0, 1])}},
        {"fields": {"x": Field("data", steps=[0, 2])}},
        "other indices, or other steps or sequences, which leave samples out",
    ),
    ({"sampler": [1, 2]}, {"sampler": [2, 1]}, "draws other samples"),
]


@pytest.mark.parametrize(("before", "after", "message"), CHANGES)
def test_a_state_of_another_order_is_refused(files, before, after, message):
    with reader_of(files, **before) as reader:
        state = reader.state_dict()
    with reader_of(files, **after) as reader:
        with pytest.raises(ConfigError, match=message):
            reader.load_state_dict(state)
        assert reader.get_next_batch().number == 0


def test_a_state_of_other_fields_is_refused(files):
    """No file has changed, and the message does not say that one has."""
    with reader_of(files) as reader:
        state = reader.state_dict()
    with reader_of(files, fields={"data": "data"}) as reader:
        with pytest.raises(ReadError, match="or the reader has other fields, in another order"):
            reader.load_state_dict(state)


def test_equal_selections_have_equal_states(files):
    forms = ["0:100", slice(100), range(100), np.arange(100), np.arange(COUNT) < 100]
    states = []
    for form in forms:
        with reader_of(files, indices=form) as reader:
            states.append(reader.state_dict())
    assert all(state == states[0] for state in states)
    with reader_of(files) as reader, reader_of(files, indices=":") as whole:
        assert reader.state_dict() == whole.state_dict()


# --- samplers -------------------------------------------------------------------------------------


class Random:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        return iter(self.rng.permutation(COUNT)[:300])


class Batches:
    def __init__(self, seed):
        self.sampler = Random(seed)

    def __iter__(self):
        drawn = list(self.sampler)
        return iter([drawn[begin : begin + 20] for begin in range(0, 300, 20)])


@pytest.mark.parametrize("kind", [Random, Batches])
@pytest.mark.parametrize("options", [{}, {"num_threads": 2}, {"cache": "host"}])
def test_a_sampler_decides(files, kind, options):
    model = kind(4)
    with reader_of(files, sampler=kind(4), **options) as reader:
        for _ in range(4):
            expected = list(model)
            if kind is Batches:
                batches = [batch.index.tolist() for batch in reader]
                assert batches == [[int(s) for s in batch] for batch in expected]
            else:
                assert epoch_of(reader).tolist() == [int(s) for s in expected]


@pytest.mark.parametrize("kind", [Random, Batches])
@pytest.mark.parametrize("batch_size", [50, 24])
@pytest.mark.parametrize("taken", [0, 3, 17])
def test_a_sampler_is_resumed(files, kind, batch_size, taken):
    with reader_of(files, sampler=kind(4)) as reader:
        for _ in range(taken):
            reader.get_next_batch()
        state = json.loads(json.dumps(reader.state_dict()))
        expected = [reader.get_next_batch().index.tolist() for _ in range(20)]
    with reader_of(files, sampler=kind(4), batch_size=batch_size) as reader:
        reader.load_state_dict(state)
        found = [reader.get_next_batch().index.tolist() for _ in range(40)]
    if kind is Batches:
        assert found[:20] == expected
    else:
        flat = list(itertools.chain.from_iterable(found))
        assert (
            flat[: 300 - taken % 6 * 50]
            == list(itertools.chain.from_iterable(expected))[: 300 - taken % 6 * 50]
        )


def test_a_sampler_that_draws_nothing(files):
    with reader_of(files, sampler=[]) as reader:
        assert list(reader) == []
        with pytest.raises(DatasetError, match="the sampler draws no sample"):
            reader.fetch_data()


def test_a_sampler_that_ends_is_the_error_of_the_epoch_after(files):
    with reader_of(files, sampler=iter(range(120))) as reader:
        assert epoch_of(reader).tolist() == list(range(120))
        with pytest.raises(ConfigError, match="an iterator was given, and it is exhausted"):
            reader.get_next_batch()


@pytest.mark.parametrize(
    "options",
    [{"shuffle": "full"}, {"indices": "keep"}, {"weights": "weight"}, {"drop_last": True}],
)
def test_a_sampler_excludes_other_orders(files, options):
    with pytest.raises(ConfigError, match="a sampler determines the samples"):
        reader_of(files, sampler=[1], **options)


# --- forms of configurations ----------------------------------------------------------------------

FORMS = [
    {"indices": slice(3, 90, 2)},
    {"indices": range(90, 3, -2)},
    {"indices": [5, 4, 9]},
    {"indices": MASK},
    {"indices": Split("val", PARTS, seed=2, by="subject")},
    {"weights": np.arange(COUNT)},
    {"weights": "balanced", "indices": "10:"},
]


@pytest.mark.parametrize("options", FORMS)
def test_configurations_as_json_and_pickled(files, options):
    with reader_of(files, shuffle=False, **options) as reader:
        expected, config = epoch_of(reader), reader.config
    again = ReaderConfig.load(json.loads(config.model_dump_json()))
    for other in (again, pickle.loads(pickle.dumps(config))):
        with AsyncReader(other) as reader:
            assert epoch_of(reader).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [*FORMS, {"sampler": [4, 3, 9]}])
def test_readers_are_pickled(files, options):
    with reader_of(files, **options) as reader, pickle.loads(pickle.dumps(reader)) as other:
        assert epoch_of(other).tolist() == epoch_of(reader).tolist()


def test_toml(files, tmp_path):
    np.save(tmp_path / "chosen.npy", [7, 8])
    (tmp_path / "a.h5").write_bytes(files[0].read_bytes())
    forms = {
        'indices = "5:9"': [5, 6, 7, 8],
        "indices = [9, 3]": [9, 3],
        'indices = "chosen.npy"': [7, 8],
        'indices = {name = "a", parts = {a = 1.0}}': list(range(137)),
        'indices = "5:6"\nweights = {"a.h5" = 1}': [5],
    }
    for text, expected in forms.items():
        (tmp_path / "options.toml").write_text(f'hdf5_path = "a.h5"\ndevice = "cpu"\n{text}\n')
        with AsyncReader(tmp_path / "options.toml") as reader:
            assert epoch_of(reader).tolist() == expected


def test_numbers_take_eight_bytes_a_sample(files):
    import tracemalloc

    from h5async.opening.selecting import choose

    with reader_of(files) as reader:
        layouts = reader.layouts
    chosen = np.random.default_rng(0).permutation(COUNT)[: COUNT - 1]
    config = ReaderConfig(hdf5_path=[str(path) for path in files], indices=chosen)
    choose(config, layouts)
    tracemalloc.start()
    kept = choose(config, layouts)
    assert kept.selection.size == COUNT - 1
    assert tracemalloc.get_traced_memory()[0] < 4000  # the configuration's own numbers are used
    tracemalloc.stop()


def test_a_new_helper_that_chooses_other_samples_is_told(files):
    from h5async.opening.selecting import choose
    from h5async.process.messages import Opened

    with reader_of(files) as reader:
        layouts = reader.layouts

    def opened(**options):
        config = ReaderConfig(hdf5_path=[str(path) for path in files], **options)
        return Opened(layouts, choose(config, layouts), {}, {})

    kept = opened(indices="keep", weights="weight")
    kept.check_same(opened(indices="keep", weights="weight"))
    for other in (opened(indices="keep"), opened(indices="some", weights="weight"), opened()):
        with pytest.raises(H5AsyncError, match="the source of indices or weights has changed"):
            kept.check_same(other)
