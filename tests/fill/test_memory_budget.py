"""Memory has one owner: what is free by which limits, what a reader takes, what happens without."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, truth
from hdf5files import type_for_h5py, write_compact

import h5async.opening.limits
from h5async import (
    AsyncReader,
    ConfigError,
    Field,
    OutOfMemoryError,
    PostprocessError,
    ReaderConfig,
)
from h5async.core.binding import KEPT_OVERHEAD_NBYTES
from h5async.fill.resident import Budget, HostCache, open_host_cache
from h5async.order.selection import Selection
from h5async.system.resources import MemoryLeft, cpu_quota, free_memory, local_ranks, memory_left

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NO_LIMIT = 9223372036854771712  # of version 1
WAIT_SECONDS = 200

# --- control groups, as trees of files ------------------------------------------------------------


def make_tree(root: Path, cgroup: str, mounts: list[str], files: dict[str, Any]) -> Path:
    """Write `/proc/self/cgroup` and `mountinfo`, and files of groups, below `root`."""
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    lines = [f"{30 + i} 23 0:{28 + i} {mount}" for i, mount in enumerate(mounts)]
    (folder / "mountinfo").write_bytes(os.fsencode("\n".join(lines) + "\n"))
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def left(root: Path) -> dict[str, int]:
    return {str(limit.limit).removeprefix(f"{root}/"): limit.nbytes for limit in memory_left(root)}


def group_2(folder: str, **values: Any) -> dict[str, Any]:
    return {f"{folder}/{name.replace('_', '.')}": value for name, value in values.items()}


def group_1(
    folder: str, limit: int, usage: int, cached: int = 0, hierarchical: int = NO_LIMIT
) -> dict[str, Any]:
    statistics = (
        f"cache 77\ninactive_file 1\nhierarchical_memory_limit {hierarchical}\n"
        f"total_inactive_file {cached // 2}\ntotal_active_file {cached - cached // 2}"
    )
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": statistics,
    }


CGROUP2 = "/ /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def test_all_groups_above_count_in_version_2(tmp_path: Path) -> None:
    job, step = "sys/fs/cgroup/job", "sys/fs/cgroup/job/step"
    files = {
        **group_2(job, memory_max=10 * GIB, memory_high="max", memory_current=8 * GIB),
        **group_2(step, memory_max=9 * GIB, memory_high=7 * GIB, memory_current=5 * GIB),
        f"{step}/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem 7",
    }
    root = make_tree(tmp_path, "0::/job/step\n", [CGROUP2], files)
    assert left(root) == {
        f"{job}/memory.max": 2 * GIB,
        f"{step}/memory.max": 6 * GIB,
        f"{step}/memory.high": 4 * GIB,
    }


def test_all_groups_above_count_in_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        **group_1(base, NO_LIMIT, 50 * GIB),
        **group_1(f"{base}/slurm/job_7", 4 * GIB, 3 * GIB, cached=2 * GIB),
        **group_1(f"{base}/slurm/job_7/step_0", NO_LIMIT, GIB, hierarchical=4 * GIB),
    }
    cgroup = "5:cpu,cpuacct:/\n4:memory:/slurm/job_7/step_0\n1:name=systemd:/slurm\n"
    mount = "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    found = left(make_tree(tmp_path, cgroup, [mount], files))
    assert found[f"{base}/slurm/job_7/memory.limit_in_bytes"] == 3 * GIB
    assert found[f"{base}/slurm/job_7/step_0/memory.limit_in_bytes"] == 3 * GIB
    assert found[f"{base}/memory.limit_in_bytes"] > 1 << 60


def test_memory_of_version_1_beside_version_2(tmp_path: Path) -> None:
    """As systemd's hybrid mode has it: version 2 is there, and has no limits."""
    files = {
        **group_1("sys/fs/cgroup/memory/user", GIB, 0),
        "sys/fs/cgroup/unified/user/cgroup.procs": "",
    }
    cgroup = "3:memory:/user\n0::/user\n"
    mounts = [
        "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]
    root = make_tree(tmp_path, cgroup, mounts, files)
    assert left(root) == {"sys/fs/cgroup/memory/user/memory.limit_in_bytes": GIB}


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/", "/"),  # in a namespace of its own
        ("/kubepods/pod1/abc", "/kubepods/pod1/abc"),  # without: its group alone is mounted
        ("/kubepods/pod1/abc", "/"),  # and where that path is not below the mount
        ("/kubepods/pod1/abc (deleted)", "/"),
        ("/../abc", "/"),  # a process that was moved into the container
        ("/abc", "/.."),  # the host's mount, seen from within the namespace
    ],
)
@each("version", [1, 2])
def test_groups_of_containers(tmp_path: Path, path: str, mounted: str, version: int) -> None:
    base = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    if version == 1:
        files = group_1(base, 2 * GIB, GIB)
        cgroup, mount = f"4:memory:{path}\n", f"{mounted} /{base} rw - cgroup cgroup rw,memory"
        name = f"{base}/memory.limit_in_bytes"
    else:
        files = group_2(base, memory_max=2 * GIB, memory_current=GIB)
        cgroup, mount = f"0::{path}\n", f"{mounted} /{base} rw - cgroup2 cgroup rw"
        name = f"{base}/memory.max"
    assert left(make_tree(tmp_path, cgroup, [mount], files)) == {name: GIB}


def test_a_part_of_the_hierarchy_is_mounted(tmp_path: Path) -> None:
    files = {
        **group_2("sys/fs/cgroup", memory_max=4 * GIB, memory_current=0),
        **group_2("sys/fs/cgroup/inner", memory_max=2 * GIB, memory_current=0),
        **group_2("sys/fs/cgroup/pod", memory_max=1, memory_current=0),  # another one's
    }
    mount = CGROUP2.replace("/ ", "/pod ", 1)
    root = make_tree(tmp_path, "0::/pod/inner\n", [mount], files)
    assert left(root) == {
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/inner/memory.max": 2 * GIB,
    }


def test_mount_points_with_odd_names(tmp_path: Path) -> None:
    folder = "mnt/caf\u00e9 au lait\udcff"
    files = group_2(f"{folder}/job", memory_max=GIB, memory_current=0)
    mounts = [
        "/ /mnt/\udcfe\\134 rw - tmpfs none rw",
        "/ /mnt/caf\u00e9\\040au\\040lait\udcff rw - cgroup2 none rw",
    ]
    root = make_tree(tmp_path, "0::/job\n", mounts, files)
    assert left(root) == {f"{folder}/job/memory.max": GIB}


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert memory_left(tmp_path) == []
    assert cpu_quota(tmp_path) is None
    files = {
        "sys/fs/cgroup/memory.max/folder": "",
        "sys/fs/cgroup/job/memory.max": "many",
        "sys/fs/cgroup/job/memory.current": GIB,
        "sys/fs/cgroup/job/memory.high": GIB,  # counts
        "sys/fs/cgroup/job/memory.stat": "inactive_file\nactive_file x\n\n",
        "sys/fs/cgroup/job/cpu.max": "100000",
    }
    mounts = ["", "-", "a b - cgroup2", CGROUP2]
    root = make_tree(tmp_path / "root", "\nx\n0::/job\n", mounts, files)
    assert left(root) == {"sys/fs/cgroup/job/memory.high": 0}
    assert cpu_quota(root) is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"job/cpu.max": "max 100000"}, None),
        ({"job/cpu.max": "150000 100000"}, 1.5),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ({"job/cpu.max": "20000 10000", "job/step/cpu.max": "50000 100000"}, 0.5),
        ({"cpu.max": "300000 100000"}, 3),  # a container's
    ],
)
def test_cpu_quotas_of_version_2(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    (tmp_path / "sys/fs/cgroup/job/step").mkdir(parents=True)
    assert cpu_quota(make_tree(tmp_path, "0::/job/step\n", [CGROUP2], files)) == quota


def test_cpu_quotas_of_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        f"{base}/cpu.cfs_quota_us": -1,
        f"{base}/cpu.cfs_period_us": 100000,
        f"{base}/a/cpu.cfs_quota_us": 250000,
        f"{base}/a/cpu.cfs_period_us": 100000,
        f"{base}/a/b/cpu.cfs_quota_us": -1,
        f"{base}/a/b/cpu.cfs_period_us": 100000,
    }
    mount = f"/ /{base} rw - cgroup cgroup rw,cpu,cpuacct"
    cgroup = "4:cpuset:/x\n2:cpu,cpuacct:/a/b\n"
    assert cpu_quota(make_tree(tmp_path, cgroup, [mount], files)) == 2.5


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.2, 1), (1.5, 2), (3, 3), (64, 4)])
def test_threads_follow_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr("h5async.system.resources.cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6}, raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 4, raising=False)
    assert ReaderConfig(hdf5_path="a.h5").thread_count == threads
    assert ReaderConfig(hdf5_path="a.h5", num_threads=9).thread_count == 9
    assert ReaderConfig(hdf5_path="a.h5", num_threads=1024).thread_count == 1024
    with pytest.raises(ConfigError, match="num_threads: must be less than or equal to 1024"):
        ReaderConfig(hdf5_path="a.h5", num_threads=1025)
    monkeypatch.setattr("h5async.config.readerconfig.usable_cores", lambda: 4096)
    assert ReaderConfig(hdf5_path="a.h5").thread_count == 1024


# --- what this process may have -------------------------------------------------------------------


@each(
    "environment, ranks",
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "64"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "3", "PMI_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,5"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(y", "LOCAL_WORLD_SIZE": "", "SLURM_NODEID": "x"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 1),  # on how many nodes, nobody says
    ],
)
def test_processes_of_a_node(environment: dict[str, str], ranks: int) -> None:
    assert local_ranks(environment) == ranks


def test_what_is_free_is_divided_among_the_processes_of_a_node(tmp_path: Path) -> None:
    files = {
        **group_2("sys/fs/cgroup/job", memory_max=8 * GIB, memory_current=0),
        "proc/meminfo": f"MemTotal: {99 * MIB} kB\nMemAvailable: {16 * MIB} kB",
    }
    root = make_tree(tmp_path, "0::/job\n", [CGROUP2], files)
    found = free_memory(root, {"LOCAL_WORLD_SIZE": "4"})
    group = MemoryLeft(2 * GIB, str(root / "sys/fs/cgroup/job/memory.max"))
    assert found[:2] == [group, MemoryLeft(4 * GIB, "MemAvailable in /proc/meminfo")]
    assert free_memory(root, {})[0].nbytes == 8 * GIB


@pytest.mark.slow
def test_limits_of_the_process_count(tmp_path: Path) -> None:
    script = """
import resource
from h5async.system.resources import free_memory
for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
    resource.setrlimit(kind, (8 << 30, 8 << 30))
found = {left.limit: left.nbytes for left in free_memory(environment={"LOCAL_WORLD_SIZE": "8"})}
for name in ("RLIMIT_AS (ulimit -v)", "RLIMIT_DATA (ulimit -d)"):
    assert 2 << 30 < found[name] < 8 << 30, found
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_SECONDS)


# --- what a reader takes --------------------------------------------------------------------------


@pytest.fixture
def gzipped(tmp_path: Path) -> Path:
    """Write 64 samples of 4 KiB, in chunks of 16 samples (64 KiB)."""
    path = tmp_path / "gzipped.h5"
    values = np.random.default_rng(0).integers(0, 4, (64, 4 * KIB), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(16, 4 * KIB), compression="gzip")
        file.create_dataset("long", (512, 4 * KIB), "u1", chunks=(16, 4 * KIB), compression="gzip")
    return path


def open_reader(path: Path, **options: Any) -> AsyncReader:
    given = {"labels_field": None, "device": "cpu", "batch_size": 8, "num_threads": 1, **options}
    return AsyncReader(hdf5_path=path, **given)


def let_be_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(h5async.opening.limits, "free_memory_nbytes", lambda: nbytes)


def test_the_shares_are_listed_where_they_do_not_fit_together(
    gzipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself does."""
    let_be_free(monkeypatch, 2 * MIB)
    for name, value in {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    open_reader(gzipped, num_threads=2).close()
    with pytest.raises(OutOfMemoryError) as caught:
        open_reader(gzipped, num_threads=64)
    assert isinstance(caught.value, ConfigError)
    for part in (
        str(gzipped),
        "half of the 2,097,152 that are free by",
        "2 batches of 8 samples 65,536, scratch of 64 threads ",
        "make num_threads smaller, or set max_batch_bytes",
        "bytes by MemAvailable in /proc/meminfo",
        "for each of the 3 processes on this node",
    ):
        assert part in str(caught.value)
    open_reader(gzipped, num_threads=64, max_batch_bytes=64 * MIB).close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process", 2])
def test_there_are_fewer_threads_where_nobody_said_how_many(
    gzipped: Path, monkeypatch: pytest.MonkeyPatch, workers: str | int
) -> None:
    let_be_free(monkeypatch, 2 * MIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 64, raising=False)
    expected = truth(gzipped)
    with open_reader(gzipped, num_threads=None, workers=workers) as reader:
        for _ in range(3):
            batch = reader.get_next_batch()
            assert_same_bits(batch.data, expected[batch.index])
        assert 1 <= reader.stats().num_threads < 8
    let_be_free(monkeypatch, 512 * KIB)  # too little for one
    with pytest.raises(OutOfMemoryError, match=r"scratch of 1 thread[, ]"):
        open_reader(gzipped, num_threads=None, workers=workers)


def test_max_batch_bytes_is_for_each_thing_by_itself(gzipped: Path) -> None:
    """As it always was: what is beside the slots does not count against it."""
    open_reader(gzipped, num_threads=8, max_batch_bytes=64 * KIB).close()
    with pytest.raises(ConfigError, match="65,536 bytes and do not fit in memory"):
        open_reader(gzipped, num_threads=8, max_batch_bytes=64 * KIB - 1)


def test_a_window_order_of_very_many_chunks_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 44,), "u1", chunks=(1,), compression="gzip")
    with pytest.raises(ConfigError, match="the order of samples"):
        open_reader(path, shuffle="window")
    open_reader(path, shuffle="full").close()


def test_what_only_saves_work_shrinks(gzipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = truth(gzipped)
    for free, is_whole in ((64 * MIB, True), (MIB, False)):
        let_be_free(monkeypatch, free)
        with open_reader(gzipped, shuffle="full") as reader:
            (kept,) = reader._engine.filler._executors._kept_nbytes
            assert (kept == 4 * (64 * KIB + KEPT_OVERHEAD_NBYTES)) == is_whole
            assert 0 <= kept <= free // 2
            for _ in range(20):
                batch = reader.get_next_batch()
                assert_same_bits(batch.data, expected[batch.index])


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("cache_bytes", [None, 1 << 50])
def test_a_host_cache_is_what_is_left_for(
    gzipped: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int | None, workers: str
) -> None:
    options = {"cache": "host", "cache_bytes": cache_bytes, "workers": workers}
    options["data_field"] = "long"
    for free, is_kept in ((64 * MIB, True), (MIB, False)):
        let_be_free(monkeypatch, free)
        with open_reader(gzipped, **options) as reader:
            reader.get_next_batch()
            text = reader.stats().cache
            assert text.startswith("host, " if is_kept else "none: 0.0021 GB do not fit into")


@pytest.mark.parametrize("cache_bytes", [None, 1 << 62])
def test_a_host_cache_of_a_huge_dataset(tmp_path: Path, cache_bytes: int | None) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 45, 4), "u1", chunks=(1 << 14, 4), compression="gzip")
        file["data"][5] = 7
    with open_reader(path, cache="host", cache_bytes=cache_bytes) as reader:
        assert reader.get_next_batch().data[5].tolist() == [7] * 4
        assert reader.stats().cache.startswith("none: 141 TB do not fit into")


def test_a_host_cache_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(
        open_host_cache(Selection(0, 1, 1 << 46), [1 << 14], [None], 1 << 62, 1 << 62), Budget
    )
    assert isinstance(open_host_cache(Selection(0, 1, 10), [4], [None], 40, 50), HostCache)
    assert isinstance(open_host_cache(Selection(0, 1, 10), [4], [None], 40, 49), Budget)


# --- chunks that are kept -------------------------------------------------------------------------


def fail_on(monkeypatch: pytest.MonkeyPatch, module: str, numbers: set[int]) -> Counter[str]:
    """Let calls of `np.empty` in a module fail by their number, from 0."""
    calls: Counter[str] = Counter()

    def empty(*arguments: Any) -> Any:
        calls["empty"] += 1
        if calls["empty"] - 1 in numbers:
            raise MemoryError("by the test")
        return np.empty(*arguments)

    fake = SimpleNamespace(empty=empty, uint8=np.uint8)
    monkeypatch.setattr(f"{module}.np", fake)
    return calls


# --- memory that is refused, wherever -------------------------------------------------------------

ROWS, BATCH = 40, 8


def write_plain(path: Path, **storage: Any) -> None:
    values = np.random.default_rng(1).integers(0, 9, (ROWS, 6, 5), np.int32)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, **storage)


def write_columns(path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 9, (6, ROWS, 5), np.int32)
    with h5py.File(path, "w") as file:
        file["data"] = values


def write_virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((ROWS, 6, 5), "i4")
    for number in range(2):
        source = path.with_name(f"source{number}.h5")
        storage = {"chunks": (7, 6, 5), "compression": "gzip"} if number else {}
        write_plain(source, **storage)
        begin = number * ROWS // 2
        rows = slice(begin, begin + ROWS // 2)
        # Pieces of rows, of the second: they go through a stage.
        layout[rows, : 6 - number] = h5py.VirtualSource(source, "data", (ROWS, 6, 5))[
            rows, : 6 - number
        ]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=3)


def write_only_h5py(path: Path) -> None:
    """Only h5py reads it; the chunks are checked."""
    values = np.arange(ROWS * 30, dtype="<i4").reshape(ROWS, 6, 5)
    with h5py.File(path, "w") as file:
        storage = {"chunks": (7, 6, 5), "compression": "gzip"}
        file.create_dataset("data", data=values, dtype=type_for_h5py(31), **storage)


def write_in_header(path: Path) -> None:
    with h5py.File(path, "w") as file:
        write_compact(file, "data", np.arange(ROWS * 30, dtype="<i4").reshape(ROWS, 6, 5))


GZIP = {"chunks": (7, 6, 5), "compression": "gzip", "shuffle": True}

KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "contiguous": (write_plain, {}),
    "columns": (write_columns, {"num_dim": 1}),
    "moved and scaled": (
        write_plain,
        {"fields": {"data": Field("data", axes=(0, 2, 1), scale=2, dtype="f8")}},
    ),
    "gzip": (lambda path: write_plain(path, **GZIP), {}),
    "several pieces": (lambda path: write_plain(path, **{**GZIP, "chunks": (7, 3, 5)}), {}),
    "raw chunks": (lambda path: write_plain(path, chunks=(7, 6, 5)), {}),
    "virtual": (write_virtual, {}),
    "h5py": (write_only_h5py, {}),
    "compact": (write_in_header, {}),
    "cache": (lambda path: write_plain(path, **GZIP), {"cache": "host"}),
    "window": (lambda path: write_plain(path, **GZIP), {"shuffle": "window"}),
    "pread": (lambda path: write_plain(path, **GZIP), {"io": "pread"}),
    "debug": (write_plain, {"debug_lifetimes": True}),
}

# What takes memory, of what h5async calls.
_ALLOCATING = frozenset(
    "append arange argsort array asarray ascontiguousarray broadcast_to concatenate cumprod cumsum"
    " diff divmod empty flatnonzero frombuffer full indices minimum moveaxis ones repeat"
    " searchsorted take tile unique where zeros zeros_like".split()
)
Site = tuple[str, int, int]  # file, line, and the how many-th time


class Scarcity:
    """Stands for NumPy and mmap in all modules of h5async, and fails where it is told to.

    It counts how often each line asks for memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()
        self.fails_at: Site | None = None
        self.has_failed = False
        self._lock = threading.Lock()
        scarcity = self

        class FakeNumpy:
            def __getattr__(self, name: str) -> Any:
                value = getattr(np, name)
                return scarcity.wrapped(value) if name in _ALLOCATING else value

        class FakeMmap:
            def __getattr__(self, name: str) -> Any:
                value = getattr(mmap, name)
                return scarcity.wrapped(value) if name == "mmap" else value

        for name, module in list(sys.modules.items()):
            if name.startswith("h5async."):
                for attribute, real, fake in (("np", np, FakeNumpy()), ("mmap", mmap, FakeMmap())):
                    if getattr(module, attribute, None) is real:
                        monkeypatch.setattr(module, attribute, fake)

    def wrapped(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            place = frame.f_code.co_filename, frame.f_lineno
            with self._lock:
                self.calls[place] += 1
                fails = self.fails_at == (*place, self.calls[place])
                self.has_failed |= fails
            if fails:
                raise OSError(12, "by the test") if function is mmap.mmap else MemoryError("a test")
            return function(*arguments, **options)

        return call

    def begin(self, fails_at: Site | None) -> None:
        self.calls.clear()
        self.fails_at, self.has_failed = fails_at, False

    def sites(self) -> Iterator[Site]:
        """Yield where memory was asked for: each line the first time, and the last."""
        for (file, line), count in sorted(self.calls.items()):
            yield from ((file, line, number) for number in {1, count})


@pytest.fixture
def scarcity(monkeypatch: pytest.MonkeyPatch) -> Scarcity:
    return Scarcity(monkeypatch)


def read_some(options: dict[str, Any], expected: np.ndarray) -> list[OutOfMemoryError]:
    """Read more than an epoch; return what failed. All else is right, and nothing is left out."""
    errors: list[OutOfMemoryError] = []
    try:
        reader = AsyncReader(**options)
    except OutOfMemoryError as error:
        return [error]
    with reader:
        batches = -(-ROWS // BATCH)
        for number in range(batches + 4):
            try:
                batch = reader.get_next_batch(timeout=WAIT_SECONDS)
            except OutOfMemoryError as error:
                errors.append(error)
                if reader.config.debug_lifetimes and "copy" in str(error):
                    batch = reader.get_next_batch(timeout=WAIT_SECONDS)  # it is still there
                else:
                    continue
            assert (batch.epoch, batch.number) == divmod(number, batches)
            assert_same_bits(batch.data, expected[batch.index])
    return errors


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("way", "num_threads"), [("core", 0), ("core", 2), ("h5py", 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_may_be_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scarcity: Scarcity,
    kind: str,
    way: str,
    num_threads: int,
) -> None:
    path = tmp_path / "f.h5"
    make, options = KINDS[kind]
    make(path)
    if way == "h5py":
        monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)
    expected = truth(path, num_dim=options.get("num_dim", 0))
    if kind == "moved and scaled":
        expected = np.ascontiguousarray(expected.transpose(0, 2, 1)) * 2.0
    fields = {} if "fields" in options else {"labels_field": None}
    options = {
        "hdf5_path": path,
        "batch_size": BATCH,
        "shuffle": "full",
        "num_threads": num_threads,
        "device": "cpu",
        **fields,
        **options,
    }
    scarcity.begin(None)
    assert not read_some(options, expected)
    sites = list(scarcity.sites())
    assert len(sites) > 10
    reached = 0
    for site in sites:
        scarcity.begin(site)
        errors = read_some(options, expected)
        # The map of a file is asked for once.
        assert len(errors) <= 1 or "cannot be mapped" in str(errors[0]), site
        for error in errors:
            assert "h5" in str(error) or "batch" in str(error), site
            assert str(error).rstrip(")").count(";") >= 1, f"{site}: no remedy in {error}"
        reached += scarcity.has_failed
    assert reached > len(sites) / 2


def test_a_postprocess_without_memory_stays_an_error_of_its_own(gzipped: Path) -> None:
    def fails(data: np.ndarray) -> None:
        raise MemoryError("mine")

    with open_reader(gzipped, postprocess=fails) as reader:
        for _ in range(2):
            with pytest.raises(MemoryError, match="mine") as caught:
                reader.get_next_batch()
            assert isinstance(caught.value, PostprocessError)
            assert not isinstance(caught.value, OutOfMemoryError)


@pytest.mark.slow
def test_memory_that_the_helper_process_does_not_get(gzipped: Path) -> None:
    with open_reader(gzipped, workers="process", postprocess=returns_much) as reader:
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=r"batch . of epoch 0"):
                reader.get_next_batch()


def returns_much(data: np.ndarray) -> np.ndarray:
    """Return what takes no memory here, and would take 2**62 bytes in another place."""
    return np.broadcast_to(np.zeros(1, "u1"), (len(data), 1 << 59))


SCARCE_SCRIPT = """
import resource, sys
from pathlib import Path
import h5py, numpy as np
from h5async import AsyncReader, H5AsyncError, OutOfMemoryError

path, num_threads, at = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with h5py.File(path) as file:
    truth = file["data"][...]

def limit(more):
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))

options = dict(hdf5_path=path, labels_field=None, batch_size=64, device="cpu", shuffle="full",
               num_threads=num_threads)
if at == "before":
    AsyncReader(**options).close()  # what is loaded late, is now
    limit(6 << 20)
    try:
        AsyncReader(**options, max_batch_bytes=1 << 40).close()
    except OutOfMemoryError as error:
        print("refused", error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with AsyncReader(**options) as reader:
    if at == "between":
        limit(4 << 20)
    refused = right = 0
    for _ in range(12):
        try:
            batch = reader.get_next_batch(timeout=100)
        except OutOfMemoryError as error:
            refused += 1
            continue
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        right += 1
        assert (batch.data == truth[batch.index]).all()
        if at == "between":
            limit(4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(12):
        try:
            batch = reader.get_next_batch(timeout=100)
        except OutOfMemoryError:  # it was on its way
            continue
        right += 1
        assert (batch.data == truth[batch.index]).all()
    assert right >= 12, (right, refused)
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS, as Linux has it")
@pytest.mark.parametrize("at", ["before", "between"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_address_space_that_is_full(tmp_path: Path, at: str, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    values = np.random.default_rng(0).integers(0, 4, (512, 64 * KIB), np.uint8)
    fast: dict[str, Any] = {"compression": "gzip", "compression_opts": 1}
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(16, 64 * KIB), **fast)
    command = [sys.executable, "-c", SCARCE_SCRIPT, str(path), str(num_threads), at]
    # Where threads have heaps of their own, and these are full, NumPy itself crashes.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
    assert ("refused" in done.stdout) == (at == "before")
