"""Finds the rank of this process and the world size, from the environment, PyTorch or JAX.

Each launcher sets variables of its own; PyTorch and JAX know once they are initialized. No process
may get a part of the data by mistake, so all sources must agree:

- Sources that say the same count as one.
- Launchers may be nested: `srun` starts `mpirun` or `torchrun` on each node, which start more
  processes than Slurm has tasks. The inner one counts if its level proves that it is the inner one
  and it has several processes.
- Anything else, and one variable of a pair without the other, is an error that lists the sources.

Without any source, the process is the only one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from h5async.config.readerconfig import MAX_WORLD_SIZE
from h5async.errors import ConfigError
from h5async.spelling import named
from h5async.system.interruptions import suppressing


class Rank(NamedTuple):
    """Number `rank` of `world_size` processes."""

    rank: int
    world_size: int


class Source(NamedTuple):
    """A source that tells the rank of this process: the variables or functions in `found`.

    A launcher starts only launchers of higher levels. None means any level, such as for variables
    set by hand or in the description of a pod.
    """

    rank: Rank
    name: str
    found: str
    level: int | None

    def __str__(self) -> str:
        return f"{self.name} ({self.found})" if self.found else self.name


_SLURM, _FLUX, _MPI, _LOCAL, _TORCHRUN, _IN_PROCESS = range(6)

_TORCH = "PyTorch", "RANK", "WORLD_SIZE"
_LAUNCHERS = (
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", _FLUX),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", _MPI),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", _MPI),
    ("PALS", "PALS_RANKID", "PMI_SIZE", _MPI),  # it has no variable of its own for the size
    ("MPICH", "PMI_RANK", "PMI_SIZE", _MPI),  # and Intel MPI
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", _MPI),
    ("JAX", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", None),
)
# In a batch script Slurm sets SLURM_PROCID=0 and SLURM_NTASKS too, though nobody shares the work:
# only `srun` sets the step's.
_STEP = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_NOT_BY_SRUN = "4294967290", "4294967291", "4294967292"  # steps: interactive, batch, extern


def find_source(environment: Mapping[str, str] = os.environ) -> Source:
    """Return the rank of this process and its source.

    PyTorch and JAX are asked only if the program has imported them. Raises `ConfigError` if sources
    disagree, one variable of a pair is missing, or one is not a number.
    """
    in_process = [*_torch(), *_jax()]
    sources = in_process + _launchers(environment)
    if not in_process:
        _check_complete(environment, sources)
    for source in sorted(sources, key=lambda source: -(source.level or 0)):  # innermost first
        if all(other.rank == source.rank or _is_inside(source, other) for other in sources):
            return source
    if sources:
        listed = "; ".join(f"{source.found} ({source.name})" for source in sources)
        raise ConfigError(
            f"the rank of this process is not clear, because sources disagree: {listed}; give the"
            f" options {named('rank')} and {named('world_size')}, or unset the variables that"
            " are wrong"
        )
    return Source(Rank(0, 1), "no launcher of several processes was found", "", None)


def may_change() -> bool:
    """Tell whether PyTorch or JAX, imported by the program, may still tell another rank."""
    return "torch" in sys.modules or "jax" in sys.modules


def _is_inside(inner: Source, outer: Source) -> bool:
    """Tell whether the processes of `outer` may have started those of `inner`."""
    if inner.rank.world_size == 1 or inner.level is None:
        return False
    if inner.level == _LOCAL and inner.rank.world_size % outer.rank.world_size:
        return False
    return inner.level > (_TORCHRUN if outer.level is None else outer.level)


def _launchers(environment: Mapping[str, str]) -> list[Source]:
    launchers = [(*_TORCH, _torch_level(environment)), *_LAUNCHERS]
    found = [
        _source(environment, *launcher)
        for launcher in launchers
        if launcher[1] in environment and launcher[2] in environment
    ]
    if not all(name in environment for name in _STEP):
        return found
    step = _source(environment, "Slurm", *_STEP, _SLURM)
    if "MPI_LOCALRANKID" not in environment:
        # `srun` itself set these for its step, not MPICH's launcher.
        found = [s for s in found if s.name not in ("MPICH", "PALS") or s.rank != step.rank]
    if step.rank.world_size > 1 and not _is_interactive(environment):
        found.append(step)
    return found


def _torch_level(environment: Mapping[str, str]) -> int | None:
    if "TORCHELASTIC_RUN_ID" in environment:
        return _TORCHRUN
    # Set by launchers that start all processes of a node, not by those of pods.
    return _LOCAL if "LOCAL_RANK" in environment else None


def _is_interactive(environment: Mapping[str, str]) -> bool:
    """Tell whether this is an interactive shell of Slurm, which has a single task.

    `srun --pty` gives its first task alone a terminal and sets variables. Tasks of a step started
    in that shell inherit the variables, but have no terminal.
    """
    if environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID")) in _NOT_BY_SRUN:
        return True
    if "SLURM_PTY_PORT" not in environment or environment["SLURM_PROCID"] != "0":
        return False
    task, process = environment.get("SLURM_TASK_PID", ""), str(os.getpid())
    while process not in ("", "0"):
        parent, terminal = _parent_and_terminal(process)
        if process == task:
            return terminal != "0"
        process = parent
    return True


def _parent_and_terminal(process: str) -> tuple[str, str]:
    status = b""
    with suppressing(OSError):
        status = Path("/proc", process, "stat").read_bytes()
    if not status:
        return "", ""
    # After the name, which may contain ")": state, parent, group, session, terminal.
    _, parent, _, _, terminal = status.rpartition(b")")[2].decode().split()[:5]
    return parent, terminal


def _check_complete(environment: Mapping[str, str], sources: list[Source]) -> None:
    """Reject one variable of a pair without the other, unless a source has the same value."""
    pairs = [_TORCH[1:], *(launcher[1:3] for launcher in _LAUNCHERS), _STEP]
    paired = {name for pair in pairs if all(n in environment for n in pair) for name in pair}
    for rank, size in pairs:
        for there, missing in ((rank, size), (size, rank)):
            if there not in environment or there in paired:
                continue
            value = environment[there]
            said = [str(source.rank[there == size]) for source in sources]
            if there == "SLURM_PROCID":
                said.append("0")  # as in a batch script
            elif there == size and not sources:
                said.append("1")  # there is only one rank
            if value not in said:
                others = "".join(f"; {source.found} ({source.name})" for source in sources)
                raise ConfigError(
                    f"{there} is set in the environment and {missing} is not (found:"
                    f" {there}={value}{others}); set both, or neither, or give the"
                    f" options {named('rank')} and {named('world_size')}"
                )
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if not sources and local != "1":
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local} is set in the environment, and neither RANK nor WORLD_SIZE"
            " is, though a launcher that sets the one sets the others; pass them on, or give the"
            f" options {named('rank')} and {named('world_size')}"
        )


def _source(
    environment: Mapping[str, str], launcher: str, rank: str, world_size: str, level: int | None
) -> Source:
    found = environment[rank], environment[world_size]
    are_short = all(text.isdecimal() and len(text.lstrip("0")) <= 10 for text in found)
    if not are_short or not int(found[0]) < int(found[1]) <= MAX_WORLD_SIZE:
        raise ConfigError(
            f"{rank}={found[0]} and {world_size}={found[1]} in the environment, which {launcher}"
            f" sets, are not a rank below a world size of at most {MAX_WORLD_SIZE}; give the"
            f" options {named('rank')} and {named('world_size')}"
        )
    values = f"{rank}={found[0]}, {world_size}={found[1]}"
    return Source(Rank(int(found[0]), int(found[1])), launcher, values, level)


def _torch() -> list[Source]:
    group = sys.modules.get("torch.distributed")
    # A build without it has no such function.
    is_initialized = getattr(group, "is_initialized", None)
    if group is None or is_initialized is None or not is_initialized():
        return []
    rank = Rank(group.get_rank(), group.get_world_size())
    found = f"get_rank()={rank.rank}, get_world_size()={rank.world_size}"
    return [Source(rank, "torch.distributed", found, _IN_PROCESS)]


def _jax() -> list[Source]:
    # All versions of JAX have this. The public function is new in 0.6, and asking others for the
    # rank initializes the GPU.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is not None:
        if state.client is None:
            return []
        rank = Rank(state.process_id, state.num_processes)
    else:
        jax = sys.modules.get("jax")
        is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
        if jax is None or is_initialized is None or not is_initialized():
            return []
        rank = Rank(jax.process_index(), jax.process_count())
    found = f"process_index={rank.rank}, process_count={rank.world_size}"
    return [Source(rank, "jax.distributed", found, _IN_PROCESS)]
