"""Decides which batches come next: settles the rank, moves from epoch to epoch, saves positions.

A saved position is a small dict of JSON types, the same in all ranks; it includes everything that
the order depends on.

The rank of this process and the world size come from the environment, PyTorch or JAX. Each launcher
sets variables of its own; PyTorch and JAX know once they are initialized. No process may get the
wrong part of the data, so all sources must agree:

- Sources with equal ranks and world sizes count as one.
- Launchers may be nested: `srun` starts `mpirun` or `torchrun` on each node, which start more
  processes than Slurm has tasks. The inner one counts if its level proves that it is the inner one
  and it has several processes.
- Anything else, and one variable of a pair without the other, is an error that lists the sources.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import paths_text
from h5async.config.values import MAX_WORLD_SIZE
from h5async.deliver.slots import Assignment, SlotRing
from h5async.errors import ConfigError, ReadError
from h5async.index.changes import fingerprint
from h5async.index.datasettable import unit_nbytes
from h5async.opening.dataset import Samplings, digest
from h5async.order.sampling import Course, FillRequest, Rank, Sampling, Schedule
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_log = logging.getLogger("h5async")

_VERSION = 1
# A state's epoch, the position in its order at which the next batch begins, and the batch and world
# size with which the epoch was begun, which determine the order of its samples.
_POSITION = ("epoch", "position", "batch_size", "world_size")
# Optional parts of a state; those in the first line are digests.
_DIGESTS = ("indices", "weights", "sampler")
_OPTIONAL = (*_DIGESTS, "epoch_samples", "offset", "batch_values", "bucket")
_OF_FILES = {
    "fingerprint": "a file has changed since the state was saved (sizes, shapes, dtypes, chunks,"
    " sequences or lengths of samples differ), or the reader has other fields, in another order, or"
    " with another region; give it those that it had then",
    "lengths": "samples have other lengths than when the state was saved",
}
_MOST_RANKS = 1 << 20  # limits the time that an invalid state can cost


class ReaderPosition:
    """Maps serial numbers to batches, and decides which one comes next.

    Only the consumer's thread changes the position, a single value in the ring, so that all threads
    may read it. Raises `ConfigError` if the environment has contradictory ranks. `looped_epoch` is
    the epoch of the caller's last batch, until the caller's loop over it ends.
    """

    def __init__(self, samplings: Samplings, ring: SlotRing[Any]) -> None:
        self._config = samplings.config
        self._samplings = samplings
        self._ring = ring
        self.has_settled = False
        self.looped_epoch: int | None = None
        try:
            rank = self._find_source().rank
        except ConfigError:
            if not {"torch", "jax"}.intersection(sys.modules):
                raise
            rank = Rank(0, 1)  # a process group that is created later will tell
        self._go_to(rank, 0, 0, None)

    def settle(self) -> None:
        """Fix the rank and world size of this process.

        Not before the first batch, because process groups are often created after the reader.
        """
        if self.has_settled:
            return
        source = self._find_source()
        _log.info("rank %d of %d: %s", *source.rank, source)
        if source.rank != self.course.rank:
            self._go_to(source.rank, *self.course.place)
        self.has_settled = True

    def _find_source(self) -> Source:
        rank, world_size = self._config.rank, self._config.world_size
        if self._config.sampler is not None:
            return Source(Rank(0, 1), "the sampler, one per process", "", None)
        if rank is None or world_size is None:
            return find_source()
        return Source(Rank(rank, world_size), "the options rank and world_size", "", None)

    @property
    def course(self) -> Course:
        """The position as one value."""
        course: Course = self._ring.consumer.course
        return course

    @property
    def schedule(self) -> Schedule:
        """Maps serial numbers to batches."""
        return self.course.schedule

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch; before the first batch, with the rank found now.

        If epochs differ: of the last batch's epoch or, once that has ended, of the next one.
        """
        return self._sampling_by_now().batches_in(self._epoch_by_now())

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch, over all ranks; otherwise as `num_batches`."""
        return self._sampling_by_now().samples_in(self._epoch_by_now())

    def _epoch_by_now(self) -> int:
        if self.schedule.sampling.is_uniform:
            return 0
        if self.looped_epoch is not None:
            return self.looped_epoch
        schedule = self.schedule
        if not schedule.start and not schedule.sampling.batches_in(schedule.epoch):
            return schedule.epoch  # there is no next batch
        return schedule.position(self._ring.consumer.next).epoch

    def _sampling_by_now(self) -> Sampling:
        """Return the sampling for the rank found now, without settling it."""
        if self.has_settled:
            return self.schedule.sampling
        rank = self._find_source().rank
        return self.schedule.sampling if rank == self.course.rank else self._samplings.at((*rank,))

    def give(self, samples: NDArray[np.int64]) -> int:
        """Request a batch of these samples, after all assigned ones; return its serial number."""

        def course_from(serial: int, first: int) -> Course:
            course = self.course
            given = {other: of for other, of in course.given.items() if other >= first}
            given[serial] = samples
            schedule = course.schedule.with_other(serial, first)
            return course._replace(schedule=schedule, given=given)

        return self._ring.ask_for(course_from)

    def requests(self, assignments: Sequence[Assignment]) -> list[FillRequest]:
        """Return the requests for slots and the serial numbers assigned to them."""
        course = self.course  # or a newer one: then these assignments are dropped
        position, order, given = course.position, course.order, course.given
        return [
            FillRequest(slot, serial, *position(serial), order, given.get(serial))
            for slot, serial in assignments
        ]

    def jump(self, epoch: int) -> None:
        """Continue at the beginning of an epoch; requested batches are dropped."""
        self._go_to(self.course.rank, epoch, 0, None)

    def state(self) -> dict[str, Any]:
        """Return the state at the caller's next batch, ignoring requested ones."""
        epoch, _, start = self.schedule.position(self._ring.consumer.next)
        course, sampler = self.course, self._samplings.sampler
        begun_with = self._config.batch_size, course.rank.world_size
        if course.origin[0] == epoch and start:
            begun_with = course.origin[1]
        return {
            "version": _VERSION,
            **dict(zip(_POSITION, (epoch, start, *begun_with), strict=True)),
            **self._order_depends_on,
            **({} if sampler is None else {"sampler": sampler.state(epoch)}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, which must fit; requested batches are dropped.

        Raises `ConfigError` if it was saved with other options or is not a state, and `ReadError`
        if a file has changed since.
        """
        if not _is(state.get("version"), _VERSION):
            raise ConfigError(
                f"the state has version {state.get('version')}, and this h5async reads version"
                f" {_VERSION}; start anew, without the state"
            )
        self._check_order(state)
        numbers = [state.get(name) for name in _POSITION]
        if (
            not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)  # (not a bool)
            or not all(numbers[2:])
            or cast("int", numbers[3]) > _MOST_RANKS
        ):
            raise ConfigError(
                f"the state holds no valid position: {dict(state)!r}; give what state_dict()"
                " returned"
            )
        epoch, start, batch_size, world_size = cast("list[int]", numbers)
        sampler = self._samplings.sampler
        if sampler is not None:
            sampler.restore(epoch, state["sampler"])
            if sampler.draws_batches:  # each batch counts as `batch_size` positions
                start = start // batch_size * self._config.batch_size
                batch_size = self._config.batch_size
        start = min(start, self._samplings.epoch_samples)
        self._go_to(self.course.rank, epoch, start, (batch_size, world_size))

    def _go_to(
        self, rank: Rank, epoch: int, start: int, begun_with: tuple[int, int] | None
    ) -> None:
        """Replace the position at once: an exception in the middle changes nothing.

        `begun_with`: batch and world size with which the epoch was begun, if different from now.
        """
        own = self._config.batch_size, rank.world_size
        origin = own if begun_with is None or not start else begun_with
        is_whole = origin == own and not (start and self._samplings.lengths)
        order = (*rank,) if is_whole else (*rank, epoch, *origin, start)
        sampling = self._samplings.at(order)

        def course_from(serial: int) -> Course:
            schedule = Schedule.beginning(sampling, serial, epoch, start)
            return Course(rank, (epoch, start, begun_with), (epoch, origin), order, schedule)

        self._ring.restart(course_from)
        self.looped_epoch = None

    def _check_order(self, state: Mapping[str, Any]) -> None:
        for name in _OPTIONAL:
            mine = name in self._order_depends_on
            mine = self._config.sampler is not None if name == "sampler" else mine
            if (name in state) != mine:
                who, other = ("reader", "state") if mine else ("state", "reader")
                raise ConfigError(
                    f"the {who} has {name}, and the {other} has none; give the reader what it had"
                    " when the state was saved, or start anew, without the state"
                )
        for name, value in self._order_depends_on.items():
            if not _is(state.get(name), value):
                raise self._other(name, state.get(name), value)

    def _other(self, name: str, saved: object, own: object) -> ConfigError | ReadError:
        anew = "start anew, without the state"
        if name in _OF_FILES:
            return ReadError(f"{paths_text(self._config.hdf5_path)}: {_OF_FILES[name]}; {anew}")
        if name == "num_samples":
            return ConfigError(
                f"the state was saved from files with {saved!r} samples, and the files of this"
                f" reader have {own}; give it the same files, or {anew}"
            )
        if name in _DIGESTS:
            fields = self._config.batch_fields.values()
            if name == "indices" and any(field.steps is not None for field in fields):
                name += ", or other steps or sequences, which leave samples out"
            return ConfigError(
                f"the state was saved with other {name}; give the reader what it had then, or"
                f" {anew}"
            )
        return ConfigError(
            f"the state was saved with {name}={saved!r}, and this reader has {own!r}; give the"
            f" reader the same, or {anew}"
        )

    @functools.cached_property
    def _order_depends_on(self) -> dict[str, Any]:
        config, samplings = self._config, self._samplings
        layouts = list(samplings.layouts.values())
        structure = [samplings.sequences.starts, samplings.sequences.ends]
        if config.shuffle == "window":
            structure.append(np.array([*map(unit_nbytes, layouts)]))
        found: dict[str, Any] = {
            "seed": config.seed,
            "shuffle": config.shuffle,
            "num_samples": layouts[0].sample_count,
            "fingerprint": fingerprint(layouts, *structure),
        }
        if config.shuffle == "window":
            found["window_bytes"] = config.window_bytes
        selection = samplings.selection
        if not selection.is_prefix or selection.size != found["num_samples"]:
            found["indices"] = selection.digest()
        if config.weights is not None:
            found["weights"] = samplings.weights_digest()
        if config.weights is not None or samplings.has_passes:
            found["epoch_samples"] = samplings.epoch_samples
        if samplings.offsets is not None:
            found["offset"] = "random"
        lengths = samplings.lengths
        if lengths is not None:
            given = {"batch_values": lengths.values, "bucket": lengths.bucket}
            found |= {name: value for name, value in given.items() if value is not None}
            found["lengths"] = digest(lengths)
        return found


def _is(found: object, expected: object) -> bool:
    return type(found) is type(expected) and found == expected


# --- the rank -------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A source of this process's rank: the variables or functions in `found`.

    A launcher starts only launchers of higher levels; None: of any level (set by hand, say).
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

    `srun --pty` gives only its first task a terminal, and sets variables. Tasks of a step started
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
    # A build of PyTorch without torch.distributed lacks this function.
    is_initialized = getattr(group, "is_initialized", None)
    if group is None or is_initialized is None or not is_initialized():
        return []
    rank, size = Rank(group.get_rank(), group.get_world_size())
    found = f"get_rank()={rank}, get_world_size()={size}"
    return [Source(Rank(rank, size), "torch.distributed", found, _IN_PROCESS)]


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
