"""Weighted draws in the order of a window: the same draws, chunk by chunk."""

from __future__ import annotations

import json
from collections import Counter
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader
from h5async.core.binding import address, load_core
from h5async.order.selection import WeightedOrder
from h5async.order.window import DrawnOrder

N, CHUNK = 600, 12


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    count=st.integers(0, 300),
    window=st.integers(2, 6),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_an_epoch_has_the_draws_of_the_weights(
    counts, count, window, batch_size, ranks, epoch, data
):
    bounds = np.append(0, np.cumsum(counts))
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 0.1, 1.0, 50.0]), min_size=sum(counts), max_size=sum(counts))
    )
    draws = WeightedOrder(np.array(weights) + 1e-9, 3)
    order = DrawnOrder(draws, bounds, window, 3, (count, batch_size, ranks))
    found = order.samples(epoch, 0, count)
    assert sorted(found.tolist()) == sorted(draws.samples(epoch, 0, count).tolist())
    cut = data.draw(st.integers(0, count))
    parts = order.samples(epoch, 0, cut), order.samples(epoch, cut, count)
    assert np.concatenate(parts).tolist() == found.tolist()
    with mock.patch("h5async.order.window.load_core", return_value=None):
        by_numpy = DrawnOrder(draws, bounds, window, 3, (count, batch_size, ranks))
        assert by_numpy.samples(epoch, 0, count).tolist() == found.tolist()


def test_the_core_computes_its_batches():
    order = DrawnOrder(WeightedOrder(np.ones(500), 0), np.arange(0, 501, 10), 8, 0, (500, 4, 1))
    core, samples = load_core(), np.empty(40, np.int64)
    if core is None:
        pytest.skip("there is no core")
    begin, mapping = order.run(1, 60, 100)
    assert core.window_samples(int(mapping[2]), address(samples), begin, 40)
    assert samples.tolist() == order.samples(1, 60, 100).tolist()


def test_frequent_samples_of_one_unit_come_throughout_the_epoch():
    """One of 200 units has half of all draws: they are not all in one window."""
    bounds, weights = np.arange(0, 2001, 10), np.ones(2000)
    weights[500:510] = 200
    order = DrawnOrder(WeightedOrder(weights, 0), bounds, 20, 0, (4000, 8, 1))
    places = np.flatnonzero(order.samples(0, 0, 4000) // 10 == 50)
    assert places.size > 1500
    assert np.histogram(places, 10, (0, 4000))[0].min() > places.size / 40


def test_other_units_stay_in_a_window():
    bounds = np.arange(0, 20_001, 10)
    order = DrawnOrder(WeightedOrder(np.ones(20_000), 0), bounds, 20, 0, (20_000, 8, 1))
    units = order.samples(1, 0, 20_000) // 10
    places = [np.flatnonzero(units == unit) for unit in range(0, 2000, 50)]
    assert max(int(np.ptp(some)) for some in places if some.size) < 60 * 10


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("drawn") / "data.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = rng.integers(0, 9, (N, 50)).astype("f4")
        file.create_dataset("data", data=data, chunks=(CHUNK, 50), compression="gzip")
        file["labels"] = rng.choice(3, N, p=[0.9, 0.07, 0.03])
        file["row"] = np.arange(N)
    return path


def opened(path, **options):
    fields = {"data": "data", "labels": "labels", "row": "row"}
    options = {"weights": "balanced", "shuffle": "window", "batch_size": 16} | options
    return AsyncReader(hdf5_path=path, fields=fields, device="cpu", seed=1, **options)


@pytest.mark.parametrize("indices", [None, "::-3"])
@pytest.mark.parametrize("epoch_samples", [None, 250, 2000])
def test_a_reader_delivers_them(path, indices, epoch_samples):
    options = {"indices": indices, "epoch_samples": epoch_samples}
    with h5py.File(path) as file:
        data = file["data"][()]
    with opened(path, **options) as reader, opened(path, shuffle=False, **options) as other:
        for _ in range(2):
            found = []
            for batch in reader:
                assert np.array_equal(batch.row, batch.index)
                assert np.array_equal(batch.data, data[batch.index])
                found += batch.index.tolist()
            drawn = [sample for batch in other for sample in batch.index.tolist()]
            if indices is None:
                assert Counter(found) == Counter(drawn)
            assert len(found) == (epoch_samples or reader.num_samples)


def test_classes_are_balanced_and_chunks_decoded_once(path):
    with opened(path, num_threads=0, epoch_samples=3000) as reader:
        labels = np.concatenate([batch.labels.copy() for batch in reader])
        decoded = reader.stats().decoded_chunks
    assert np.bincount(labels).min() > 800
    assert decoded <= 1.3 * N / CHUNK


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_and_a_state(path, world_size):
    options = {"world_size": world_size, "epoch_samples": 250}
    several = []
    for rank in range(world_size):
        with opened(path, rank=rank, **options) as reader:
            batches = [[batch.index.tolist() for batch in reader] for _ in range(2)]
            several.append(batches)
        with opened(path, rank=rank, **options) as reader:
            for _ in range(7):
                reader.get_next_batch()
            state = json.loads(json.dumps(reader.state_dict()))
        with opened(path, rank=rank, num_threads=0, **options) as reader:
            reader.load_state_dict(state)
            rest = [reader.get_next_batch().index.tolist() for _ in range(4)]
        flat = batches[0] + batches[1]
        assert rest == flat[7:11]
    with opened(path, shuffle=False, epoch_samples=250) as reader:
        drawn = Counter(sample for batch in reader for sample in batch.index.tolist())
    flat = Counter(sample for batches in several for batch in batches[0] for sample in batch)
    assert flat == drawn
