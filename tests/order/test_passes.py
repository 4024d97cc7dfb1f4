"""Epochs of any number of samples: they continue in passes, each of which has all samples once."""

from __future__ import annotations

import itertools
import json

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import N, batch_of, taken, write_numbered

from h5async import AsyncReader, ConfigError, RaggedField
from h5async.order.sampling import Sampling, dealt
from h5async.order.selection import Selection, permute
from h5async.order.window import DealtOrder, WindowOrder

SHUFFLES = (False, "full", "window")


def samplings(counts, epoch_samples, batch_size, world_size, shuffle, **options):
    """Return the samplings of all ranks, of units of so many samples."""
    bounds = np.append(0, np.cumsum(counts))
    count, order = int(bounds[-1]), None
    if shuffle == "window":
        order = WindowOrder(bounds, 3, 5)
        if world_size > 1:
            order = DealtOrder(order, world_size, count, batch_size, epoch_samples)
    return [
        Sampling(
            epoch_samples,
            batch_size,
            shuffle,
            5,
            order=order,
            rank=rank,
            world_size=world_size,
            pass_samples=count,
            **options,
        )
        for rank in range(world_size)
    ]


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    epoch_samples=st.integers(5, 100),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    shuffle=st.sampled_from(SHUFFLES),
    first=st.integers(0, 9),
)
def test_epochs_cover_the_dataset(counts, epoch_samples, batch_size, world_size, shuffle, first):
    count, epochs = sum(counts), 3
    ranks = samplings(counts, epoch_samples, batch_size, world_size, shuffle)
    stream = [ranks[0].samples(e, 0, epoch_samples) for e in range(first + epochs)]
    for epoch in range(first, first + epochs):
        batches = [
            [batch_of(rank, epoch, number) for number in range(ranks[0].num_batches)]
            for rank in ranks
        ]
        steps = list(zip(*batches, strict=True))
        found = [run for step in steps[:-1] for run in step]
        left = epoch_samples - (len(steps) - 1) * batch_size * world_size
        # A rank to which nothing is dealt at the end repeats what another one has.
        found += [run for r, run in enumerate(steps[-1]) if np.diff(dealt(left, r, world_size))[0]]
        assert np.concatenate(found).tolist() == stream[epoch].tolist()
    together = np.concatenate(stream)
    for number, begin in enumerate(range(0, together.size, count)):
        one = together[begin : begin + count]
        assert np.unique(one).size == one.size, "a sample comes twice in a pass"
        if shuffle is False:
            assert one.tolist() == list(range(one.size))
        if shuffle == "full":
            assert one.tolist() == permute(np.arange(one.size), count, 5, number).tolist()


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=15),
    epoch_samples=st.integers(9, 100),
    batch_size=st.integers(1, 9),
    world_size=st.integers(2, 5),
    data=st.data(),
)
def test_ranks_share_few_units_in_a_window(counts, epoch_samples, batch_size, world_size, data):
    """In each pass, every rank has units of its own, but for those at the cuts."""
    count = sum(counts)
    order = samplings(counts, epoch_samples, batch_size, world_size, "window")[0].order
    bounds = np.append(0, np.cumsum(counts))
    owners: dict[int, list[set[int]]] = {}
    seen = [0] * world_size
    for epoch in range(-(-count // epoch_samples) + 1):
        lanes = [order.lane(rank, epoch) for rank in range(world_size)]
        assert sum(size for _, size in lanes) == epoch_samples
        whole = np.concatenate([samples(0, size) for samples, size in lanes])
        positions = np.arange(epoch * epoch_samples, (epoch + 1) * epoch_samples)
        parts = [
            order.samples(number, int(part[0]) % count, int(part[-1]) % count + 1)
            for number in range(positions[0] // count, positions[-1] // count + 1)
            for part in [positions[positions // count == number]]
        ]
        assert sorted(whole.tolist()) == sorted(np.concatenate(parts).tolist())
        for rank, (samples, size) in enumerate(lanes):
            cut = data.draw(st.integers(0, size))
            found = np.concatenate((samples(0, cut), samples(cut, size)))
            assert found.tolist() == samples(0, size).tolist()
            units = np.searchsorted(bounds, found, side="right") - 1
            passes = range((epoch + 1) * epoch_samples // count + 1)
            ends = [order._before(rank, (number + 1) * count) for number in passes]
            numbers = np.searchsorted(ends, seen[rank] + np.arange(size), side="right")
            seen[rank] += size
            for number in np.unique(numbers).tolist():
                sets = owners.setdefault(number, [set() for _ in range(world_size)])
                sets[rank] |= set(units[numbers == number].tolist())
    for sets in owners.values():
        shared = [a & b for a, b in itertools.combinations(sets, 2)]
        assert len(set().union(*shared)) <= world_size - 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = write_numbered(tmp_path_factory.mktemp("passes") / "data.h5")
    with h5py.File(path, "a") as file:
        file["tokens"], file["lengths"] = np.arange(N * (N - 1) // 2), np.arange(N)
        rows = np.arange(5000)
        file["many/data"], file["many/labels"] = np.stack([rows, -rows], axis=1), rows
    return path


def reader_of(path, **options):
    options = {"batch_size": 8, "seed": 2, "device": "cpu"} | options
    return AsyncReader(hdf5_path=path, **options)


@pytest.mark.parametrize("fields", [{}, {"data_field": "many/data", "labels_field": "many/labels"}])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("indices", [None, "1:90:2"])
@pytest.mark.parametrize("epoch_samples", [20, 77, 240])
def test_a_reader_reads_each_sample_once_a_pass(path, fields, shuffle, indices, epoch_samples):
    options = {"shuffle": shuffle, "indices": indices, **fields}
    with reader_of(path, epoch_samples=epoch_samples, **options) as reader:
        assert len(reader) == -(-epoch_samples // 8)
        found = [batch.index.tolist() for _ in range(4) for batch in reader]
        count = reader.num_samples
    flat = list(itertools.chain(*found))
    assert len(flat) == 4 * epoch_samples
    for begin in range(0, len(flat), count):
        part = flat[begin : begin + count]
        assert len(set(part)) == len(part)
    with reader_of(path, num_threads=0, epoch_samples=epoch_samples, **options) as reader:
        assert [batch.index.tolist() for _ in range(4) for batch in reader] == found
    whole = Selection.of_range(
        range(5000 if fields else N)[1:90:2] if indices else range(5000 if fields else N)
    )
    assert set(flat) <= set(whole.samples(np.arange(whole.size)).tolist())


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_goes_on_exactly(path, shuffle, world_size):
    options = {"shuffle": shuffle, "epoch_samples": 77, "rank": 0, "world_size": world_size}
    with reader_of(path, **options) as reader:
        taken(reader, 9)
        state = json.loads(json.dumps(reader.state_dict()))
        expected = taken(reader, 12)
    with reader_of(path, num_threads=0, **options) as reader:
        reader.load_state_dict(state)
        assert taken(reader, 12) == expected
    with reader_of(path, shuffle=shuffle) as reader, pytest.raises(ConfigError, match="epoch_samp"):
        reader.load_state_dict(state)
    with reader_of(path, **options | {"epoch_samples": 78}) as reader:
        with pytest.raises(ConfigError, match="epoch_samples=77, and this reader has 78"):
            reader.load_state_dict(state)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("bucket", [None, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_by_length(path, shuffle, bucket, world_size):
    """Epochs are cut into batches one by one, and have room for a sample that comes twice."""
    fields = {"x": RaggedField("tokens", offsets="lengths", offsets_kind="lengths")}
    options = {"shuffle": shuffle, "epoch_samples": 70, "world_size": world_size, "fields": fields}
    starts = np.append(0, np.cumsum(np.arange(N)))
    several = []
    for rank in range(world_size):
        with reader_of(path, rank=rank, batch_values=300, bucket=bucket, **options) as reader:
            epochs = []
            for _ in range(3):
                epochs.append([])
                for batch in reader:
                    epochs[-1] += batch.index.tolist()
                    for sample, values in zip(batch.index.tolist(), batch.x, strict=True):
                        assert values.tolist() == list(range(starts[sample], starts[sample + 1]))
            several.append(epochs)
    flat = [list(itertools.chain(*(epochs[e] for epochs in several))) for e in range(3)]
    assert set(flat[0]) | set(flat[1]) == set(range(N))
    assert all(len(set(samples)) == 70 for samples in flat[:1])


def test_the_number_of_all_samples_changes_nothing(path):
    with (
        reader_of(path, shuffle="full") as one,
        reader_of(path, shuffle="full", epoch_samples=N) as other,
    ):
        assert taken(one, 40) == taken(other, 40)
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("cache", [None, "host"])
def test_an_epoch_longer_than_the_dataset(path, cache):
    with reader_of(path, epoch_samples=3 * N + 5, batch_size=2 * N, cache=cache) as reader:
        flat = np.concatenate([batch.data[:, 0].copy() for batch in reader])
    assert flat.tolist() == [3 * (i % N) for i in range(3 * N + 5)]


def test_a_slot_has_room_where_lengths_bring_a_sample_of_several_passes_together(tmp_path):
    lengths = np.array([0, 1, 60])  # sorted over passes, a batch is all of the same sample
    with h5py.File(tmp_path / "few.h5", "w") as file:
        file["values"], file["lengths"] = np.arange(61), lengths
    fields = {"x": RaggedField("values", offsets="lengths", offsets_kind="lengths")}
    options = {"fields": fields, "batch_size": 8, "bucket": 12, "epoch_samples": 96}
    with AsyncReader(hdf5_path=tmp_path / "few.h5", device="cpu", **options) as reader:
        for batch in reader:
            assert batch.x.lengths.tolist() == lengths[batch.index].tolist()
