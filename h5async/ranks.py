"""The environment enters; which of how many processes this one is leaves.

Each launcher of many processes tells them by variables of its own. Where none did, a process is
alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from h5async.errors import ConfigError


class Rank(NamedTuple):
    """Number `rank` of `world_size` processes."""

    rank: int
    world_size: int


# Of torchrun, JAX, Open MPI, MPICH and Intel MPI (PMI), and Slurm's srun. In a batch script Slurm
# sets SLURM_PROCID and SLURM_NTASKS too, though nobody shares the work: only srun sets the step's.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "JAX": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return which process this is, as its launcher says.

    `jax.distributed`, where it was initialised, is asked too.

    Raises
    ------
    ConfigError
        If the launcher's variables make no sense: one without the other, or no numbers.
    """
    for launcher, (rank, world_size) in _VARIABLES.items():
        if rank in environment and world_size in environment:
            return _parse(launcher, rank, world_size, environment)
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        return Rank(jax.process_index(), jax.process_count())
    for launcher, (rank, world_size) in _VARIABLES.items():
        if launcher == "torchrun" and (rank in environment) != (world_size in environment):
            there, missing = (rank, world_size) if rank in environment else (world_size, rank)
            raise ConfigError(
                f"{there} is set in the environment and {missing} is not; set both, or neither, or"
                " give the options rank and world_size"
            )
    return Rank(0, 1)


def _parse(launcher: str, rank: str, world_size: str, environment: Mapping[str, str]) -> Rank:
    found = environment[rank], environment[world_size]
    if not all(text.isdecimal() for text in found) or int(found[0]) >= int(found[1]):
        raise ConfigError(
            f"{rank}={found[0]} and {world_size}={found[1]} in the environment, which {launcher}"
            " sets, are no rank among so many; give the options rank and world_size"
        )
    return Rank(int(found[0]), int(found[1]))
