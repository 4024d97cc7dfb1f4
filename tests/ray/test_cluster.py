"""`h5async.ray.read_hdf5` on a real local cluster: streams, joins, Parquet, and killed workers."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from clusters import start_cluster
from conftest import require_extra

ray = require_extra("ray.data") and require_extra("ray")
torch, parquet = require_extra("torch"), require_extra("pyarrow.parquet")

from h5async.ray import read_hdf5  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own: of its options, of its sockets
FILES, ROWS = 5, 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of this machine, for all tests here; no process of it is left."""
    start_cluster(object_store_memory=200 << 20)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    limits = context.target_min_block_size, context.target_max_block_size
    context.target_min_block_size = 32 << 10  # several small blocks
    context.target_max_block_size = 300 << 10  # two of a task
    yield
    context.target_min_block_size, context.target_max_block_size = limits
    ray.shutdown()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("ray"), np.random.default_rng(1)
    paths = [folder / f"{number}.h5" for number in range(FILES)]
    for path in paths:
        with h5py.File(path, "w") as file:
            data = rng.integers(0, 9, (ROWS, 12, 12)).astype("f4")
            file.create_dataset("data", data=data, chunks=(20, 12, 12), compression="gzip")
            file["labels"] = rng.integers(0, 99, ROWS)
    return paths


def truth(paths, name):
    return np.concatenate([h5py.File(path)[name][:] for path in paths])


def test_streams_hold_the_rows_of_h5py(cluster, paths, tmp_path):
    made = read_hdf5(paths, with_index=True)
    assert made.count() == FILES * ROWS
    assert made.schema().names == ["data", "labels", "index"]
    doubled = made.map_batches(lambda batch: {**batch, "twice": batch["data"] * 2})
    batches = [*doubled.iter_torch_batches(batch_size=128)]
    assert all(isinstance(batch["twice"], torch.Tensor) for batch in batches)
    for name, values in [("twice", 2 * truth(paths, "data")), ("labels", truth(paths, "labels"))]:
        assert np.array_equal(torch.cat([batch[name] for batch in batches]).numpy(), values)

    made.write_parquet(str(tmp_path))
    again = parquet.read_table(tmp_path).sort_by("index")["data"].combine_chunks()
    assert np.array_equal(again.to_numpy(), truth(paths, "data"))

    assert [row["index"] for row in made.select_columns(["index"]).limit(7).take_all()] == [
        *range(7)
    ]


def test_parts_of_a_stream_are_of_one_size(cluster, paths):
    parts = read_hdf5(paths, with_index=True).streaming_split(2, equal=True)

    def numbers(part):
        return np.concatenate([batch["index"] for batch in part.iter_batches()])

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(numbers, parts)]
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(FILES * ROWS))
    assert found[0].size == found[1].size


@pytest.mark.slow
def test_datasets_are_joined_by_a_column(cluster, paths):
    require_extra("polars")
    other = ray.data.from_items([{"index": number, "weight": number / 2} for number in range(50)])
    left = read_hdf5(paths, labels_field=None, with_index=True)
    found = left.join(other, "inner", num_partitions=2, on=("index",)).take_all()
    values = truth(paths, "data")
    assert sorted(row["index"] for row in found) == [*range(50)]
    for row in found:
        assert np.array_equal(row["data"], values[row["index"]])
        assert row["weight"] == row["index"] / 2


def test_rows_of_killed_workers_come_once(cluster, paths, tmp_path):
    victims = {0, 777}

    def work(batch):
        for number in victims & set(batch["index"].tolist()):
            try:
                os.close(os.open(tmp_path / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:  # it was killed before
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    made = read_hdf5(paths, with_index=True).map_batches(work, batch_size=50)
    batches = [*made.iter_batches(batch_size=None)]
    assert len(os.listdir(tmp_path)) == len(victims)
    assert np.array_equal(np.concatenate([b["index"] for b in batches]), np.arange(FILES * ROWS))
    assert np.array_equal(np.concatenate([b["data"] for b in batches]), truth(paths, "data"))


def test_tasks_take_what_ray_reserves(cluster, paths):
    found = read_hdf5(paths, num_cpus=2, concurrency=1, override_num_blocks=3, memory=1 << 20)
    found = found.materialize()
    assert found.num_blocks() == 3
    assert np.array_equal(np.stack([row["data"] for row in found.take_all()]), truth(paths, "data"))
