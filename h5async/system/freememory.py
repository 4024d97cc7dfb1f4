"""Finds how much memory this process can still allocate, and the limit that decides.

The machine's free memory, and what control groups leave, is divided by the number of processes that
a launcher started on this node. `ulimit` applies to this process alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from h5async.system.controlgroups import MemoryLeft, memory_left
from h5async.system.interruptions import suppressing

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

# Number of processes on this node, of torchrun; Open MPI; MPICH and Intel MPI (two); MVAPICH.
# Slurm's variable has a number for each node of a step, as in "4(x2),3".
_COUNTS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_SLURM_COUNTS, _SLURM_NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
_MAX_NODES = 1 << 20  # limits the memory that a wrong variable can cost


def free_memory(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> list[MemoryLeft]:
    """Return what each limit leaves this process, the tightest first; there is at least one.

    `root` is the folder with ``proc`` and ``sys``.
    """
    ranks = local_ranks(environment)
    shared = [_of_machine(root), *memory_left(root)]
    found = [MemoryLeft(nbytes // ranks, limit) for nbytes, limit in shared]
    return sorted(found + _of_process(root))


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that launchers started on this node, at least 1.

    With nested launchers, such as torchrun in a step of Slurm, the largest number counts.
    """
    counts = [environment.get(name, "") for name in _COUNTS]
    found = [int(count) for count in counts if count.isdecimal()]
    tasks = _slurm_tasks(environment.get(_SLURM_COUNTS, ""))
    node = environment.get(_SLURM_NODE, "")
    if node.isdecimal() and int(node) < len(tasks):
        found.append(tasks[int(node)])
    else:
        found += tasks
    return max([1, *found])


def _slurm_tasks(text: str) -> list[int]:
    tasks: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            return []
        tasks += [int(match[1])] * min(int(match[2] or 1), _MAX_NODES)
    return tasks


def _of_machine(root: Path) -> MemoryLeft:
    with suppressing(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return MemoryLeft(int(line.split()[1]) * 1024, "MemAvailable in /proc/meminfo")
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryLeft(nbytes, "the memory of this machine")


def _of_process(root: Path) -> list[MemoryLeft]:
    if resource is None:
        return []
    used = _used_by_process(root)
    found = []
    for kind, option, name in (
        (resource.RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize"),
        (resource.RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData"),
    ):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(MemoryLeft(max(0, limit - used.get(name, 0)), option))
    return found


def _used_by_process(root: Path) -> dict[str, int]:
    """Return sizes in bytes, by the names of `/proc/self/status`."""
    text = ""
    with suppressing(OSError):
        text = (root / "proc/self/status").read_text(errors="replace")
    found = re.findall(r"^(Vm\w+):\s*(\d+) kB$", text, re.MULTILINE)
    return {name: int(count) * 1024 for name, count in found}
