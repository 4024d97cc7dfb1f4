"""The arithmetic of `docs/scale.md`: what readers ask of a store equals it; the page shows it."""

from __future__ import annotations

import importlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import reader_of

from h5async.core.binding import load_core

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(load_core() is None, reason="far sources need the core")


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("scale_model")


@pytest.fixture
def asked(model, store, path):
    """Return a function that has all ranks read an epoch; what the model and these say of it."""

    def ask(data, world_size, order):
        shape = data.samples, (data.chunk_nbytes - 4) // data.rows  # a checksum encodes them
        with h5py.File(path, "w") as file:
            options = {"chunks": (data.rows, shape[1]), "fletcher32": True}
            file.create_dataset("data", data=np.zeros(shape, "u1"), **options)
        name, requests, nbytes = store.put(path), 0, 0
        options = {"shuffle": order, "batch_size": 8, "num_threads": 0, "world_size": world_size}
        for rank in range(world_size):
            with reader_of(name, rank=rank, **options) as reader:
                for _ in range(len(reader)):
                    reader.get_next_batch()
                stats = reader.stats()
            requests, nbytes = requests + stats.requests, nbytes + stats.requested_nbytes
        cluster = model.Cluster(1, world_size, 8)
        return model.of_an_epoch(data, cluster, order, is_ahead=False), requests, nbytes

    return ask


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_window_asks_for_each_chunk_once(model, asked, world_size):
    expected, requests, nbytes = asked(model.Data(96, 4, (1 << 20) + 4), world_size, "window")
    assert (requests, nbytes) == (expected.requests, expected.nbytes)
    assert requests == 24


def test_chunks_that_ranks_share_are_asked_for_by_both(model, asked):
    expected, requests, nbytes = asked(model.Data(96, 4, (1 << 20) + 4), 5, "window")
    assert 24 < requests <= expected.requests == 28
    assert nbytes <= expected.nbytes


def test_a_full_shuffle_asks_for_a_chunk_for_each_sample_but_joins_neighbours(model, asked):
    data = model.Data(512, 1, 16_384 + 4)
    expected, requests, nbytes = asked(data, 2, "full")
    assert requests == pytest.approx(expected.requests, rel=0.02)
    assert nbytes == pytest.approx(expected.nbytes, rel=0.02)
    assert requests < 0.98 * data.samples


def test_each_chunk_comes_to_the_disk_of_a_node_once(model):
    data = model.Data(1600, 16, 1000)
    for order in ("full", "window", "own"):
        for nodes in (1, 4):
            kept = sum(model.kept_on_disks(data, nodes, order, epoch) for epoch in range(300))
            assert kept == pytest.approx(100 / (nodes if order == "own" else 1))


def test_the_page_has_the_tables(model):
    page = (ROOT / "docs" / "scale.md").read_text()
    for make in model.TABLES:
        assert make() in page
