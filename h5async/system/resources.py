"""Determines the memory and cores that this process may use, and which limit applies.

The machine's free memory, and what control groups leave, is divided by the number of processes that
a launcher started on this node. `ulimit` applies to this process alone.

A process is in one group of each hierarchy of version 1 (memory, cpu, ...) and in one group of the
hierarchy of version 2. The limits of all groups above apply, too; Slurm, systemd and Kubernetes set
limits on several levels. `/proc/self/cgroup` names the groups, and `/proc/self/mountinfo` says
where each hierarchy, or the part that a container sees, is mounted. All paths are below a `root`,
for tests. A missing or unreadable file sets no limit.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from h5async.system.interruptions import suppressing

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

_ROOT = Path("/")
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
_MAX_NODES = 1 << 20  # limits the memory that a malformed variable can take


class MemoryLeft(NamedTuple):
    """The bytes that a limit still allows, and the name of the limit to show, such as a file."""

    nbytes: int
    limit: str


def usable_cores() -> int:
    """Return the number of cores that affinity and CPU quota allow."""
    if hasattr(os, "process_cpu_count"):  # Python 3.13; users may override it
        cores = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def free_memory(
    root: Path = _ROOT, environment: Mapping[str, str] = os.environ
) -> list[MemoryLeft]:
    """Return the memory that each limit leaves this process, tightest first; never empty."""
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
    free = _sizes(root / "proc/meminfo").get("MemAvailable")
    if free is not None:
        return MemoryLeft(free, "MemAvailable in /proc/meminfo")
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryLeft(nbytes, "the memory of this machine")


def _of_process(root: Path) -> list[MemoryLeft]:
    if resource is None:
        return []
    used: dict[str, int] | None = None
    found = []
    for kind, option, name in (
        (resource.RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize"),
        (resource.RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData"),
    ):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            used = _sizes(root / "proc/self/status") if used is None else used
            found.append(MemoryLeft(max(0, limit - used.get(name, 0)), option))
    return found


def _sizes(path: Path) -> dict[str, int]:
    """Return the sizes that a file lists in kB, in bytes, by name."""
    found = re.findall(r"^(\w+):\s*(\d+) kB$", _text(path), re.MULTILINE)
    return {name: int(count) * 1024 for name, count in found}


def memory_left(root: Path = _ROOT) -> list[MemoryLeft]:
    """Return the memory that each limit of this process's groups leaves, in any order."""
    found: list[MemoryLeft] = []
    of_version_1, of_version_2 = _groups("memory", root)
    for folder in of_version_1:
        found += _left_by(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for folder in of_version_2:
        for name in ("memory.max", "memory.high"):  # above "high" a process is slowed to a crawl
            found += _left_by(folder, name, "memory.current", "")
    return found


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU time limit of this process's groups, in cores; None if there is none."""
    quotas = []
    of_version_1, of_version_2 = _groups("cpu", root)
    for folder in of_version_1:
        quota = _number(f"{folder}/cpu.cfs_quota_us")
        if quota is not None and quota > 0:
            quotas.append((quota, _number(f"{folder}/cpu.cfs_period_us")))
    for folder in of_version_2:
        words = _text(f"{folder}/cpu.max").split()  # "max 100000", or "50000 100000"
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            quotas.append((int(words[0]), int(words[1])))
    return min((q / period for q, period in quotas if q and period), default=None)


def _left_by(folder: str, limit: str, usage: str, prefix: str) -> Iterator[MemoryLeft]:
    """Yield the memory that a group's limit leaves; reclaimable page cache counts as free.

    Version 1 has a `prefix`; its statistics include limits of groups above that a container cannot
    see. Files are read only if there may be a limit, to save time when opening a small reader.
    """
    least = _number(f"{folder}/{limit}")
    if least is None and not prefix:
        return
    pairs = re.findall(r"^(\S+) (\d+)$", _text(f"{folder}/memory.stat"), re.MULTILINE)
    statistics = {name: int(count) for name, count in pairs}
    cached = [statistics.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive")]
    limits = [least, statistics.get("hierarchical_memory_limit")]
    used = _number(f"{folder}/{usage}")
    least = min((n for n in limits if n is not None), default=None)
    if least is not None and used is not None:
        yield MemoryLeft(max(0, least - max(0, used - sum(cached))), f"{folder}/{limit}")


def _groups(controller: str, root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of this process's groups and of the visible groups above them.

    First those of a `controller` of version 1, then those of version 2.
    """
    cgroup, mountinfo = _text(f"{root}/proc/self/cgroup"), _text(f"{root}/proc/self/mountinfo")
    texts = str(root), cgroup, mountinfo
    return _folders(controller, *texts), _folders("", *texts)


@lru_cache(maxsize=16)
def _folders(controller: str, root: str, cgroup: str, mountinfo: str) -> tuple[str, ...]:
    """Return the folders of one hierarchy, according to the texts of the two files."""
    path = _group(controller, cgroup)
    if path is None:
        return ()
    mounts = list(_mounts(controller, Path(root), mountinfo))
    found: list[Path] = []
    for group, mount in mounts:
        inside = os.path.relpath(path, group)
        folder = mount / inside
        # A ".." means that the group is not below the mounted one, or not in the namespace.
        if ".." in (*path.split("/"), *inside.split("/")) or not os.path.isdir(folder):
            continue
        found += (folder, *folder.parents[: len(folder.parts) - len(mount.parts)])
    # A container without its own namespace gets the group's path on the host, and may see only its
    # own group, at the mount point.
    return tuple(map(str, found or [mount for _, mount in mounts]))


def _group(controller: str, cgroup: str) -> str | None:
    for line in cgroup.split("\n"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(",") and (controller or number == "0"):
            return path or "/"
    return None


def _mounts(controller: str, root: Path, mountinfo: str) -> Iterator[tuple[str, Path]]:
    """Yield the mounted groups of a hierarchy, and their mount points.

    If several are mounted on one folder, the last one hides the others.
    """
    found = {}
    for line in mountinfo.split("\n"):
        if " - cgroup" not in line:
            continue
        start, _, rest = line.partition(" - ")
        words, (kind, _, options) = start.split(" "), [*rest.split(" "), "", ""][:3]
        if len(words) < 5:
            continue
        is_version_1 = kind == "cgroup" and controller in options.split(",")
        if is_version_1 if controller else kind == "cgroup2":
            folder = _unescaped(words[4])
            found[folder] = _unescaped(words[3]), root / folder.lstrip("/")
    yield from found.values()


def _unescaped(word: str) -> str:
    r"""Undo the escapes of mountinfo: ``\040`` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _text(path: str | Path) -> str:
    """Return a file's text, decoded like file names; ``""`` if it cannot be read."""
    with suppressing(OSError, ValueError), open(path, "rb", buffering=0) as file:
        return os.fsdecode(file.read() or b"")
    return ""


def _number(path: str) -> int | None:
    """Return the number in a file; None if there is none ("max", for example)."""
    with suppressing(ValueError):
        return int(_text(path))
    return None
