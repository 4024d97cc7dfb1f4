"""`h5async.ray.train_loader`: ranks, and positions in checkpoints, in a made-up context of Ray."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import require_extra

from h5async import ConfigError

ray = require_extra("ray.train") and require_extra("ray")
require_extra("torch")

import h5py  # noqa: E402

from h5async.ray import train_loader  # noqa: E402

N = 1003


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.arange(N), chunks=(50,), compression="gzip")
    return path


@pytest.fixture
def worker(monkeypatch, path):
    """Return a function that makes the loader of a worker."""

    def make(rank, world_size, folder=None, **options):
        context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world_size)
        checkpoint = folder and ray.train.Checkpoint.from_directory(str(folder))
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: checkpoint)
        given = {"hdf5_path": path, "labels_field": None, "batch_size": 16, "device": "cpu"}
        loader = train_loader({**given, "shuffle": "full"} | options)
        made.append(loader)
        return loader

    made = []
    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("others", [3, 4, 6])
def test_other_workers_go_on_and_each_sample_comes_once(worker, tmp_path, shuffle, others):
    loaders = [worker(rank, 4, shuffle=shuffle) for rank in range(4)]
    seen = [next(one)["data"].clone() for one in map(iter, loaders) for _ in range(5)]
    loaders[2].save(tmp_path)  # any worker may
    for loader in loaders:
        loader.close()
    seen_later = []
    for rank in range(others):
        with worker(rank, others, tmp_path, shuffle=shuffle) as loader:
            assert loader.epoch == 0
            seen_later += [batch["data"].clone() for batch in loader]
            assert loader.epoch == 1
    numbers = np.concatenate([*seen, *seen_later])
    values, counts = np.unique(numbers, return_counts=True)
    assert np.array_equal(values, np.arange(N))
    assert counts.sum() - N < others  # at the end, some repeat one, so that all have a batch


def test_a_new_run_begins_at_the_beginning(worker):
    assert worker(1, 2).epoch == 0
    assert len(worker(0, 2)) == len(worker(1, 2)) == 32


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(worker, tmp_path):
    loader = worker(0, 1)
    first = np.concatenate([batch["data"].numpy().copy() for batch in loader])
    loader.save(tmp_path)
    following = np.concatenate([batch["data"].numpy().copy() for batch in loader])
    again = worker(0, 1, tmp_path)
    assert again.epoch == 1
    found = np.concatenate([batch["data"].numpy().copy() for batch in again])
    assert np.array_equal(found, following)
    assert not np.array_equal(found, first)


def test_a_checkpoint_without_a_position_is_an_error(worker, tmp_path):
    with pytest.raises(ConfigError, match=r"has no h5async\.json"):
        worker(0, 1, tmp_path)


def test_a_position_that_another_worker_writes_is_read_when_it_is_whole(
    worker, tmp_path, monkeypatch
):
    loader = worker(0, 1)
    next(iter(loader))
    loader.save(tmp_path)
    path, slept = tmp_path / "h5async.json", []
    whole = path.read_text()
    path.write_text(whole[:20])
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(ConfigError, match=r"h5async\.json is cut short or damaged"):
        worker(0, 1, tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(whole))
    path.write_text("")
    assert worker(0, 1, tmp_path).state_dict() == json.loads(whole)
