"""Runs jobs: a function and items enter; results leave, in the order of the items.

Jobs run here, one after the other, or as Ray tasks. Only this module and `ray/` import Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from h5async.errors import ConfigError, H5AsyncError, needs_package

_AHEAD = 1000  # maximum results waiting for an earlier one
_RETRIES = 5  # of a job whose worker died

Item = TypeVar("Item")
Result = TypeVar("Result")

_kept: tuple[str, Any] = "", None  # in a worker: its last job's function, with its open files


def run_jobs(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    ray: str | None = None,
    threads: int = 1,
) -> Iterator[Result]:
    """Yield the result of a function for each item, computed on Ray if `ray` is given.

    `ray` is the address of a cluster, or ``"auto"``: the one that this process has joined, one that
    runs here, or a new one. A job takes as many CPUs as it has `threads`. A worker process
    unpickles the function once for all of its jobs, which run in this process's current folder. If
    a worker dies, its job runs again, so jobs must be safe to repeat.

    If a job fails, no others start, and its error is raised once the running ones have ended. After
    an interruption, running jobs are killed, unless this process had joined the cluster before.

    Raises
    ------
    MissingPackageError
        If Ray is not installed.
    ConfigError
        If there is no cluster at the address.
    """
    if ray is None:
        yield from map(function, items)
        return
    with _cluster(ray) as engine:
        yield from _on_ray(engine, function, items, threads)


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Join a cluster, unless this process already has; leave it at the end."""
    with needs_package("'h5async[ray]'", "jobs on Ray"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(None if address == "auto" else address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _on_ray(
    ray: Any, function: Callable[[Any], Any], items: Iterable[Any], threads: int
) -> Iterator[Any]:
    run = ray.remote(num_cpus=threads, max_retries=_RETRIES)(_run)
    shared, numbered = [ray.put(function), os.getcwd()], enumerate(items)
    waiting: dict[Any, int] = {}  # submitted jobs, with their numbers
    done: dict[int, Any] = {}
    try:
        for number in itertools.count():
            while number not in done:
                # Few, as `ray.cancel` may crash this process (2.60); more as the cluster grows.
                most = 2 + int(ray.cluster_resources().get("CPU", 0) // threads)
                room = min(most, _AHEAD - len(done)) - len(waiting)
                for at, item in itertools.islice(numbered, max(0, room)):
                    waiting[run.remote(shared, item)] = at
                if not waiting:
                    return
                [ended], _ = ray.wait([*waiting], num_returns=1)
                done[waiting.pop(ended)] = ray.get(ended)
            yield done.pop(number)
    except ray.exceptions.RayError as error:
        if waiting:  # no job may still write when the error is raised
            ray.wait([*waiting], num_returns=len(waiting))
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error.cause from error
        raise H5AsyncError(f"Ray gave up on a job: {error}") from error


def _run(shared: list[Any], item: Any) -> Any:
    """Run a job in a worker; `shared` has a reference to the function, and the folder."""
    global _kept
    import ray

    reference, folder = shared
    if _kept[0] != reference.hex():
        _kept = reference.hex(), ray.get(reference)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(contextlib.chdir(folder))
        except OSError as error:
            raise ConfigError(
                f"the node {os.uname().nodename} has no folder {folder}: {error.strerror}; all"
                " nodes must have the same files at the same paths"
            ) from error
        return _kept[1](item)
