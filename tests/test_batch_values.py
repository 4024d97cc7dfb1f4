"""Batches by number of values, and of samples of like length, from end to end."""

from __future__ import annotations

import itertools
import json
import pickle

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DatasetError,
    Field,
    H5AsyncError,
    ImageField,
    RaggedField,
    ReaderConfig,
    ReadError,
    SparseField,
    Split,
)
from h5async.cli import app
from h5async.fill import resident

SEED = 20160704
COLUMNS = 30
LONG = 700  # one sample that is longer than any batch
SHUFFLES = (False, "full", "window")
WAYS = (
    {"batch_values": 120},
    {"batch_values": 120, "bucket": 3},
    {"batch_values": 120, "batch_size": 7},
    {"batch_values": 120, "batch_size": 7, "bucket": 2},
    {"batch_size": 7, "bucket": 4},
)


def write(path, lengths, seed=SEED):
    """Write a file of tokens, strings, sparse rows and labels; return the tokens of each sample."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(lengths) else 0
    values = rng.integers(0, 1 << 30, total, dtype=np.int32)
    with h5py.File(path, "w") as file:
        chunks = (min(16, total),) if total else None
        file.create_dataset(
            "tokens", data=values, chunks=chunks, compression="gzip" if total else None
        )
        file["lengths"] = np.asarray(lengths, "u4")
        texts = file.create_dataset("texts", (len(lengths),), h5py.string_dtype())
        for number, length in enumerate(lengths):
            texts[number] = "x" * (length % 7)
        file["labels"] = np.arange(len(lengths), dtype="i8")
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (len(lengths), COLUMNS)
        few = np.minimum(lengths, COLUMNS)
        group["indptr"] = np.append(0, np.cumsum(few)).astype("i8")
        group["indices"] = np.concatenate([[], *map(np.arange, few)]).astype("i4")
        group["data"] = np.ones(int(np.sum(few)), "f4")
    return np.split(values, ends[:-1]) if len(lengths) else []


TOKENS = RaggedField("tokens", offsets="lengths", offsets_kind="lengths")
FIELDS = {"tokens": TOKENS, "labels": "labels"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two files and an empty one; their paths, all samples, and how long these are."""
    folder = tmp_path_factory.mktemp("values")
    rng = np.random.default_rng(SEED)
    files = [rng.geometric(1 / 15, 150).tolist(), [], [0, 0, *rng.integers(0, 50, 80), LONG, 1, 0]]
    samples, paths = [], []
    for number, lengths in enumerate(files):
        paths.append(folder / f"{number}.h5")
        samples += write(paths[-1], lengths, number)
    return paths, samples, np.array([one.size for one in samples])


def opened(dataset, **options):
    options = {"fields": FIELDS, "num_threads": 2, "device": "cpu", "timeout": 60} | options
    if "rank" not in options:
        options |= {"rank": 0, "world_size": 1}
    return AsyncReader(hdf5_path=dataset[0], **options)


def check(batch, dataset, options):
    """Check the values of a batch, and that it is no larger than it may be."""
    _, samples, lengths = dataset
    here = lengths[batch.index]
    np.testing.assert_array_equal(batch.tokens.lengths, here)
    assert len(batch.tokens) == batch.size >= 1
    for number, tokens in zip(batch.index.tolist(), batch.tokens, strict=True):
        np.testing.assert_array_equal(tokens, samples[number])
    assert batch.size <= options.get("batch_size", 1 << 40)
    if "batch_values" in options and batch.size > 1:
        counted = here.max() * batch.size if "bucket" in options else here.sum()
        assert counted <= options["batch_values"]


def taken(reader, dataset, options, count=None):
    """Take some batches, or the rest of an epoch."""
    found = []
    for batch in reader:
        check(batch, dataset, options)
        found.append((batch.epoch, batch.number, batch.last, batch.index.tolist()))
        if len(found) == count:
            break
    return found


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_epochs_are_complete(dataset, options, shuffle, num_threads):
    orders = []
    with opened(dataset, shuffle=shuffle, num_threads=num_threads, **options) as reader:
        for epoch in range(3):
            count = len(reader)
            seen, number = [], 0
            for batch in reader:
                check(batch, dataset, options)
                assert len(reader) == count  # also in the last batch
                assert (batch.epoch, batch.number) == (epoch, number)
                assert batch.last is (number == count - 1)
                np.testing.assert_array_equal(batch.labels, file_labels(dataset)[batch.index])
                seen += batch.index.tolist()
                number += 1
            assert number == count
            assert sorted(seen) == list(range(len(dataset[1])))
            orders.append(seen)
        assert (orders[0] == orders[1]) is (shuffle is False)
        stats = reader.stats()
        assert stats.samples == 3 * len(dataset[1])
        assert stats.nbytes == reader.nbytes * 3 == 3 * (4 * dataset[2].sum() + 8 * len(dataset[1]))


def file_labels(dataset):
    labels = []
    for path in dataset[0]:
        with h5py.File(path) as file:
            labels.append(file["labels"][:])
    return np.concatenate(labels)


def test_batches_are_filled(dataset):
    """Without sorting, the next sample would never have fitted."""
    for values in (120, 1500):
        with opened(dataset, batch_values=values) as reader:
            batches = [batch.index for batch in reader]
        for one, following in itertools.pairwise(batches):
            assert dataset[2][one].sum() + dataset[2][following[0]] > values
    assert batches[0].size > 32  # the default of batch_size, where there is no batch_values


def test_a_sample_that_is_too_long_is_a_batch_of_its_own(dataset):
    for options in ({"batch_values": 120}, {"batch_values": 120, "bucket": 8}):
        with opened(dataset, shuffle="full", **options) as reader:
            (batch,) = [b.index for b in reader if LONG in dataset[2][b.index]]
            assert batch.size == 1


def test_samples_that_are_too_long_are_a_warning(tmp_path, caplog):
    path = tmp_path / "data.h5"
    write(path, [5, 90, 3, 100])
    with caplog.at_level("WARNING", logger="h5async"):
        opened([[path]], batch_values=100).close()
        assert "values (batch_values)" not in caplog.text
        opened([[path]], batch_values=80).close()
    assert "2 samples have more than 80 values (batch_values), up to 100: each is" in caplog.text


def test_padding_is_spared(dataset):
    def share(**options):
        values = padded = 0
        with opened(dataset, shuffle="full", **options) as reader:
            for batch in reader:
                values += int(batch.tokens.lengths.sum())
                padded += int(batch.tokens.lengths.max()) * batch.size
        return values / padded

    assert share(batch_size=8, bucket=16) > 1.4 * share(batch_size=8)


def test_batches_are_shuffled_where_samples_are(dataset):
    def longest(shuffle):
        with opened(dataset, shuffle=shuffle, batch_size=8, bucket=1000) as reader:
            return [int(batch.tokens.lengths.max()) for batch in reader]

    assert longest(False) == sorted(longest(False), reverse=True)
    assert longest("full") != sorted(longest("full"), reverse=True)


@pytest.mark.parametrize("options", WAYS)
def test_drop_last(dataset, options):
    with opened(dataset, drop_last=True, **options) as reader:
        dropped = [batch.index.tolist() for batch in reader]
    with opened(dataset, **options) as reader:
        whole = [batch.index.tolist() for batch in reader]
    assert dropped in (whole, whole[:-1])
    assert all(len(batch) == 7 for batch in dropped) or "batch_values" in options


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.sampled(30)  # each goes another way
def test_ranks_have_equally_many_batches(dataset, options, shuffle, world_size):
    counts, seen = set(), []
    for rank in range(world_size):
        given = {"rank": rank, "world_size": world_size, "shuffle": shuffle, **options}
        with opened(dataset, **given) as reader:
            counts.add(len(reader))
            seen.append([index for *_, index in taken(reader, dataset, options)])
            assert len(seen[-1]) == max(counts)
    assert len(counts) == 1
    whole = [i for batches in seen for batch in batches[:-1] for i in batch]
    assert len(set(whole)) == len(whole)  # only in the last step, one may come again
    last = {i for batches in seen for i in batches[-1]}
    assert set(whole) | last == set(range(len(dataset[1])))
    assert not set(whole) & last


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    options=st.sampled_from(WAYS),
    shuffle=st.sampled_from(SHUFFLES),
    drop_last=st.booleans(),
    world_size=st.integers(1, 3),
    before=st.integers(0, 60),
    threads=st.sampled_from([(0, 2), (2, 0), (1, 3)]),
)
@settings(max_examples=30)
def test_the_next_batch_is_the_one_that_would_have_come(
    dataset, options, shuffle, drop_last, world_size, before, threads
):
    given = {"shuffle": shuffle, "drop_last": drop_last, "world_size": world_size, **options}
    given |= {"rank": world_size - 1}

    def take(reader, count):
        found = []
        for _ in range(count):
            batch = reader.get_next_batch()
            check(batch, dataset, options)
            found.append((batch.epoch, batch.number, batch.last, batch.index.tolist()))
        return found

    with opened(dataset, num_threads=threads[0], prefetch=3, **given) as one:
        take(one, before)
        one.fetch_data()  # what is on its way does not count
        state = json.loads(json.dumps(one.state_dict()))
        count = len(one)
        expected = take(one, 15)
    with opened(dataset, num_threads=threads[1], prefetch=2, **given) as other:
        other.fetch_data()
        other.load_state_dict(state)
        assert json.loads(json.dumps(other.state_dict())) == state
        if before and expected[0][1]:
            assert len(other) == count
        assert take(other, 15) == expected
        other.set_epoch(expected[0][0])
        again = take(other, 1)
        assert again[0][:2] == (expected[0][0], 0)


@pytest.mark.slow
@given(
    options=st.sampled_from(WAYS),
    shuffle=st.sampled_from(SHUFFLES),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    sizes=st.tuples(st.sampled_from([None, 3, 9]), st.sampled_from([None, 3, 9])),
    steps=st.integers(1, 5),
    more=st.integers(0, 2),
)
@settings(max_examples=30)
def test_the_rest_is_dealt_to_other_ranks(dataset, options, shuffle, worlds, sizes, steps, more):
    """Also with another `batch_size`; a state that is saved then is one of the first sizes."""
    options = {k: v for k, v in options.items() if k != "batch_size"}
    given = [options | ({} if n is None else {"batch_size": n}) for n in sizes]
    if "batch_values" not in options:
        given = [{"batch_size": 5} | one for one in given]

    def some(world_size, own, state, count):
        found, states = [], []
        for rank in range(world_size):
            ranks = {"rank": rank, "world_size": world_size}
            with opened(dataset, shuffle=shuffle, **ranks, **own) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                found.append([i for *_, index in taken(reader, dataset, own, count) for i in index])
                states.append(json.loads(json.dumps(reader.state_dict())))
        assert all(one == states[0] for one in states)
        return found, states[0]

    had, state = some(worlds[0], given[0], None, steps)
    if more:
        others, state = some(worlds[1], given[1], state, more)
        had += others
    had = [i for batches in had for i in batches]
    if state["epoch"]:
        return
    assert len(set(had)) == len(had)
    rest, _ = some(worlds[1], given[1], state, None)
    assert set(had) | {i for batches in rest for i in batches} == set(range(len(dataset[1])))
    assert not set(had) & {i for batches in rest for i in batches}


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({"batch_values": 120}, {"batch_values": 121}, "saved with batch_values=120, .* has 121"),
        ({"batch_values": 120}, {}, "the state has batch_values, and the reader has none"),
        ({}, {"batch_values": 120}, "the reader has batch_values, and the state has none"),
        ({"bucket": 3}, {"bucket": 4}, "saved with bucket=3, and this reader has 4"),
        ({"batch_values": 120, "bucket": 3}, {"batch_values": 120}, "the state has bucket"),
    ],
)
def test_other_options_are_refused(dataset, saved, given, message):
    with opened(dataset, **saved) as reader:
        reader.get_next_batch()
        state = reader.state_dict()
    with opened(dataset, **given) as reader, pytest.raises(ConfigError, match=message):
        reader.load_state_dict(state)


def test_other_lengths_are_refused(tmp_path):
    path = tmp_path / "data.h5"
    write(path, [3, 4, 5, 6])
    with opened([[path]], batch_values=9) as reader:
        reader.get_next_batch()
        state = reader.state_dict()
    with h5py.File(path, "r+") as file:
        file["lengths"][:] = [4, 3, 5, 6]
    with (
        opened([[path]], batch_values=9) as reader,
        pytest.raises(ReadError, match="a file has changed since the state was saved"),
    ):
        reader.load_state_dict(state)
    with h5py.File(path, "r+") as file:
        file["lengths"][:] = [3, 4, 5, 6]
    padded = {"tokens": RaggedField("tokens", offsets="lengths", offsets_kind="lengths", pad_to=2)}
    with (
        opened([[path]], fields=padded | {"labels": "labels"}, batch_values=9) as reader,
        pytest.raises(ReadError, match="samples have other lengths"),
    ):
        reader.load_state_dict(state)


def test_pickled_before_the_first_batch(dataset):
    with opened(dataset, batch_values=120, bucket=2, shuffle="full") as reader:
        reader.set_epoch(3)
        with pickle.loads(pickle.dumps(reader)) as other:
            assert [b.index.tolist() for b in other] == [b.index.tolist() for b in reader]


def test_a_broken_off_loop_and_given_samples(dataset):
    options = {"batch_values": 120, "bucket": 3}
    with opened(dataset, shuffle="full", **options) as reader:
        first = [b.index.tolist() for b in reader]
        second = [b.index.tolist() for b in reader]
        reader.reset()
        assert len(reader) == len(first)
        found = []
        for number, batch in enumerate(reader):
            found.append(batch.index.tolist())
            if number == 2:
                break
        assert found == first[:3]
        assert len(reader) == len(first)
        found = []
        for number, batch in enumerate(reader):
            if batch.epoch < 0:
                assert batch.index.tolist() == [5, 5, 1]
                assert not batch.last
                continue
            found.append(batch.index.tolist())
            if number == 1:
                reader.fetch_data([5, 5, 1])
        assert found == second


# --- what counts ----------------------------------------------------------------------------------


def test_the_longest_field_counts(dataset):
    fields = {"tokens": TOKENS, "text": "texts", "x": "X"}
    _, _, lengths = dataset
    few = np.minimum(lengths, COLUMNS)
    with opened(dataset, fields=fields, batch_values=90) as reader:
        for batch in reader:
            assert isinstance(batch.x, Csr)
            assert batch.x.data.size == few[batch.index].sum()
            assert lengths[batch.index].sum() <= 90 or batch.size == 1
    with opened(dataset, fields={"x": "X", "text": "texts"}, batch_values=90) as reader:
        sizes = [int(few[batch.index].sum()) for batch in reader]
        assert max(sizes) <= 90
        assert np.mean(sizes) > 60
    with opened(dataset, fields={"text": "texts"}, batch_values=20) as reader:
        for batch in reader:
            assert batch.text.lengths.sum() <= 20


def test_padded_fields_count_what_is_delivered(dataset):
    padded = RaggedField("tokens", offsets="lengths", offsets_kind="lengths", pad_to=10)
    with opened(dataset, fields={"tokens": padded}, batch_values=64) as reader:
        sizes = [batch.tokens.shape for batch in reader]
    assert set(sizes[:-1]) == {(6, 10)}
    with opened(dataset, fields={"tokens": padded}, batch_values=9) as reader:
        assert {batch.tokens.shape for batch in reader} == {(1, 10)}


@pytest.mark.parametrize("option", ["batch_values", "bucket"])
@pytest.mark.parametrize(
    "fields",
    [
        {"labels": "labels"},
        {"x": SparseField("X", dense=True), "labels": "labels"},
        {"image": ImageField("tokens", offsets="lengths", offsets_kind="lengths", size=8)},
    ],
)
def test_without_such_a_field_it_is_an_error(tmp_path, option, fields):
    path = tmp_path / "data.h5"
    write(path, [3, 4])
    with h5py.File(path, "r+") as file:
        if "image" in fields:
            values = file["tokens"][:].astype("u1")
            del file["tokens"]
            file["tokens"] = values
    message = rf"{option} needs a field that is delivered as samples of differing lengths, and none"
    with pytest.raises(ConfigError, match=message):
        opened([[path]], fields=fields, **{option: 4})


def test_a_dense_field_beside_one_that_counts(dataset):
    fields = {"x": SparseField("X", dense=True), "tokens": TOKENS}
    with opened(dataset, fields=fields, batch_values=120) as reader:
        for batch in reader:
            assert batch.x.shape == (batch.size, COLUMNS)
            check(batch, dataset, {"batch_values": 120})


# --- other options --------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("indices", [slice(20, 200, 3), [5, 4, 3, 2, 233, 0], Split("a", {"a": 1})])
def test_selected_samples(dataset, shuffle, indices):
    with opened(dataset, indices=indices, shuffle=shuffle, batch_values=99, bucket=2) as reader:
        seen = [i for *_, index in taken(reader, dataset, {"batch_values": 99}) for i in index]
        count = reader.num_samples
    assert len(set(seen)) == len(seen) == count


def test_drawn_samples(dataset):
    weights = np.ones(len(dataset[1]))
    weights[-10:] = 30
    with opened(dataset, weights=weights, epoch_samples=400, batch_values=99, bucket=3) as reader:
        for _ in range(2):
            found = taken(reader, dataset, {"batch_values": 99, "bucket": 3})
            assert sum(len(index) for *_, index in found) == 400
            assert len({i for *_, index in found for i in index}) < 400


@pytest.mark.parametrize("options", [{"batch_values": 9}, {"bucket": 9}])
def test_a_sampler_decides_itself(dataset, options):
    with pytest.raises(ConfigError, match=f"leave out {next(iter(options))}"):
        opened(dataset, sampler=[1, 2], rank=None, world_size=None, **options)


@pytest.mark.parametrize("lengths", [[], [0, 0, 0], [0], [5]])
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_tiny_datasets(tmp_path, lengths, options, shuffle):
    path = tmp_path / "data.h5"
    write(path, lengths)
    with opened([[path]], shuffle=shuffle, **options) as reader:
        if not lengths:
            assert len(reader) == 0
            assert list(reader) == []
            with pytest.raises(DatasetError, match="an epoch has no batch"):
                reader.get_next_batch()
            return
        assert [b.index.tolist() for b in reader]
        assert len(reader) == 1


def test_no_batch_is_left(dataset):
    with opened(dataset, batch_values=1 << 40, drop_last=True) as reader:
        assert len(reader) == 0
        assert list(reader) == []
        with pytest.raises(DatasetError, match="an epoch has no batch"):
            reader.state_dict()


def test_as_text(dataset, tmp_path):
    config = tmp_path / "options.toml"
    config.write_text(
        f'hdf5_path = "{dataset[0][0]}"\nbatch_values = 120\nbucket = 4\nfields.text = "texts"\n'
    )
    with AsyncReader(config) as reader:
        assert (reader.config.batch_values, reader.config.bucket) == (120, 4)
        assert len(list(reader)) == len(reader)
    result = CliRunner().invoke(
        app, ["read", "--config", str(config), "--batch-values", "60", "--bucket", "2"]
    )
    assert result.exit_code == 0, result.output
    loaded = ReaderConfig.load(json.loads(reader.config.model_dump_json()))
    assert loaded.batch_size == 120
    assert ReaderConfig.load(reader.config, batch_values=7).batch_size == 7
    assert ReaderConfig.load(reader.config, batch_size=3).batch_size == 3


@pytest.mark.parametrize("name", ["batch_values", "bucket"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_values_that_do_not_fit(name, value):
    with pytest.raises(ConfigError, match=name):
        ReaderConfig(hdf5_path="x.h5", **{name: value})


# --- memory ---------------------------------------------------------------------------------------


def capacities(reader):
    return [slot.memory.raw[0].shape[0] for slot in reader._engine.setup.slots]


def test_slots_have_room_for_what_fits(dataset):
    with opened(dataset, batch_values=120) as reader:
        assert capacities(reader) == [LONG] * 2
    with opened(dataset, batch_values=5000) as reader:
        assert capacities(reader) == [min(5000, dataset[2].sum())] * 2
    with opened(dataset, batch_values=120, batch_size=2, indices="0:150") as reader:
        assert capacities(reader)[0] <= 2 * LONG


def test_the_bound_is_tighter_than_that_of_the_longest_samples(tmp_path):
    path = tmp_path / "data.h5"
    write(path, [1] * 500 + [1000] * 200)
    limit = 4 * 2 * 20_000
    with pytest.raises(H5AsyncError, match="max_batch_bytes"):
        opened([[path]], batch_size=100, max_batch_bytes=limit)
    options = {"batch_size": 100, "batch_values": 10_000, "max_batch_bytes": limit}
    with opened([[path]], shuffle="full", **options) as reader:
        assert len(list(reader)) == len(reader)
    with pytest.raises(H5AsyncError, match="make batch_values or prefetch smaller"):
        opened([[path]], **options | {"batch_values": 30_000})


def test_given_samples_have_the_room_of_a_batch(dataset):
    with opened(dataset, batch_values=120) as reader:
        reader.fetch_data([0, 1, 2])
        check(reader.get_next_batch(), dataset, {})
        long = int(np.argmax(dataset[2]))
        with pytest.raises(ConfigError, match=r"have 1,400 values, .* has room for 700"):
            reader.fetch_data([long, long])
        many = np.zeros(1000, np.int64)
        with pytest.raises(ConfigError, match="make batch_values larger"):
            reader.fetch_data(many)
        assert reader.read([long, long]).tokens.values.size == 2 * LONG


def test_a_window_is_smaller_where_samples_are_moved(tmp_path, monkeypatch):
    """Chunks that wait for samples to be sorted take a part of `window_bytes`."""
    monkeypatch.setattr(resident, "_KEPT_WHOLE_NBYTES", 0)
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(1, 60, 8000)
    with h5py.File(path, "w") as file:
        values = rng.integers(0, 9, lengths.sum()).astype("i8")
        file.create_dataset("tokens", data=values, chunks=(600,), compression="gzip")
        file["lengths"] = lengths
    given = {"window_bytes": 40 * 600 * 8, "shuffle": "window", "num_threads": 1}
    counts = []
    for options in ({"batch_size": 32}, {"batch_values": 1000, "bucket": 8}):
        with opened([[path]], fields={"tokens": TOKENS}, **given, **options) as reader:
            assert sum(1 for _ in reader) == len(reader)
            counts.append(reader.stats().decoded_chunks)
    assert counts[1] <= 1.12 * counts[0]


# --- PyTorch --------------------------------------------------------------------------------------


def test_tensors(dataset):
    torch = require_extra("torch")
    from h5async.torch import H5Dataset

    options = {"fields": FIELDS, "batch_values": 120, "bucket": 2, "shuffle": "full", "rank": 0}
    with H5Dataset(hdf5_path=dataset[0], world_size=1, **options) as tensors:
        loader = torch.utils.data.DataLoader(tensors, batch_size=None)
        for _ in range(3):
            count, number = len(loader), 0
            assert len(tensors) == count
            for batch in loader:
                assert batch["tokens"].layout is torch.jagged
                number += 1
            assert number == count


def test_a_plain_field_is_read_beside(dataset):
    with opened(dataset, fields={"y": Field("labels", dtype="f4"), **FIELDS}, bucket=2) as reader:
        for batch in reader:
            assert batch.y.dtype == np.float32
            np.testing.assert_array_equal(batch.y, batch.labels)
