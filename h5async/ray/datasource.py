"""Defines `read_hdf5`: a dataset of Ray Data, whose tasks read whole chunks by this reader."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pyarrow
import ray.data
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from h5async.ray.blockreading import BlockPlan, BlockReader
from h5async.ray.survey import Survey, config_of, cut, survey

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions

_TASKS_OF_CPU, _LITTLE_NBYTES = 4, 8 << 20  # more tasks would cost more than they even out
_STORE_PART = 4  # the blocks of all tasks that run at once fit into this part of Ray's store
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_hdf5(
    paths: Paths,
    /,
    *,
    with_index: bool = False,
    num_cpus: float | None = None,
    memory: float | None = None,
    concurrency: int | None = None,
    override_num_blocks: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Unpack[ReaderOptions],
) -> ray.data.Dataset:
    """Return a dataset of Ray Data, with a row per sample and a column per field.

    Each task reads some whole chunks, of all fields, into blocks of Arrow tensors. Samples come in
    the order of `AsyncReader` without shuffling, if ``DataContext.execution_options`` has
    ``preserve_order``.

    Columns have the names of fields. Samples of any length are lists or tensors of variable shape;
    sparse rows are two columns of lists, ``NAME_indices`` and ``NAME_data``.

    Parameters
    ----------
    paths
        As `hdf5_path` of `AsyncReader`: a file, a list of files, a glob, URLs, a saved index.
    with_index
        Also give the column ``index``, the sample number, which is unique; and with `sequences`,
        ``sequence`` and ``step``. All are int64.
    num_cpus
        The CPUs that Ray reserves for each task, which reads with as many threads. None: one.
    memory, concurrency, override_num_blocks
        As of `ray.data.read_datasource`.
    ray_remote_args
        Further options of `ray.remote` for the tasks, such as ``{"resources": {...}}``.
    **options
        Options of `AsyncReader`: `fields`, `indices`, `sequences` and others; not those of a loop,
        such as `batch_size` and `shuffle`, for which Ray Data has its own.

    Raises
    ------
    ConfigError
        If an option is unknown, or is for loops; and whatever `AsyncReader` raises.

    Examples
    --------
    >>> ds = h5async.ray.read_hdf5("sample_data/digits.h5")  # doctest: +SKIP
    >>> ds.count(), ds.columns()  # doctest: +SKIP
    (1797, ['data', 'labels'])
    >>> for batch in ds.iter_torch_batches(batch_size=256):  # doctest: +SKIP
    ...     loss = batch["data"].float().mean()
    """
    remote = {**(ray_remote_args or {})}
    given = {"num_cpus": num_cpus, "memory": memory}
    remote |= {name: value for name, value in given.items() if value is not None}
    threads = max(1, math.floor(remote.get("num_cpus") or 1))
    source = Hdf5Datasource(paths, options, with_index=with_index, threads=threads)
    if override_num_blocks is None:
        override_num_blocks = source.best_num_blocks()
    named = inspect.signature(ray.data.read_datasource).parameters
    direct = {name: remote.pop(name) for name in list(remote) if name in named}
    return ray.data.read_datasource(
        source,
        concurrency=concurrency,
        override_num_blocks=override_num_blocks,
        **direct,
        **({"ray_remote_args": remote} if remote else {}),
    )


class Hdf5Datasource(Datasource):
    """The datasource of `read_hdf5`; small to pickle, whatever the dataset."""

    def __init__(
        self, paths: Paths, options: Mapping[str, Any], *, with_index: bool, threads: int
    ) -> None:
        super().__init__()
        config = config_of(paths, options)
        self._further: tuple[str, ...] = ()
        if with_index:
            self._further = ("index", "sequence", "step") if config.sequences else ("index",)
        self._threads = threads
        self._survey: Survey = survey(config, self._further)
        self._projection_map: dict[str, str] | None = None  # Ray's name: columns, and their names
        self._plans: dict[Any, Any] = {}  # in Ray's object store

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; it has other references."""
        return {**self.__dict__, "_plans": {}}

    def get_name(self) -> str:
        """Return the name that Ray shows."""
        return "HDF5"

    def supports_projection_pushdown(self) -> bool:
        """Return True: only the fields of the chosen columns are read."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Return the size of all blocks, as the layouts of the datasets tell."""
        return int(self._survey.nbytes_at(list(self._columns))[-1])

    def best_num_blocks(self) -> int | None:
        """Return the number of tasks: few large ones, which keep all CPUs busy.

        A CPU is idle for 0.1 to 0.3 s before Ray starts its next task; and of a small dataset Ray
        itself would have 200 tasks, of 1 MiB. None for an empty one.
        """
        nbytes = self._survey.nbytes_at(list(self._columns))
        total, most = nbytes[-1], DataContext.get_current().target_max_block_size or math.inf
        cluster = ray.cluster_resources()
        at_once = max(1, cluster.get("CPU", 1) / self._threads)
        fitting = cluster.get("object_store_memory", 0) / at_once / _STORE_PART
        least = total // max(most, fitting)
        wanted = int(max(1, least, min(_TASKS_OF_CPU * at_once, total // _LITTLE_NBYTES)))
        while (found := len(cut(nbytes, wanted, None, 1))) < wanted:
            wanted = found  # or Ray would split blocks, to have as many
        return found or None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Return about as many tasks, cut where no chunk is.

        (Older versions of Ray give fewer arguments.)
        """
        found, context = self._survey, data_context or DataContext.get_current()
        if not found.selection.size:
            return []
        columns = self._columns
        nbytes = found.nbytes_at(list(columns))
        plan, skips = self._plan(columns, context), found.config.on_error == "skip"
        fields = [found.schema.field(name).with_name(new) for name, new in columns.items()]
        tasks, schema = [], pyarrow.schema(fields) if fields else None
        for at in cut(nbytes, parallelism, context.target_max_block_size, self._threads):
            edges, size = found.bounds[at], float(nbytes[at[-1]] - nbytes[at[0]])
            rows = int(edges[-1] - edges[0])
            if per_task_row_limit is not None and not skips and per_task_row_limit < rows:
                edges = np.append(edges[:-1], edges[0] + per_task_row_limit)
                edges = np.unique(np.minimum(edges, edges[-1]))
                size, rows = size * per_task_row_limit / rows, per_task_row_limit
            metadata = BlockMetadata(
                num_rows=None if skips else rows,
                size_bytes=int(size),
                input_files=found.files_of(int(edges[0]), int(edges[-1])),
                exec_stats=None,
            )
            read = BlockReader(plan, tuple(map(int, edges)), self._threads)
            tasks.append(ReadTask(read, metadata, schema=schema))
        return tasks

    @property
    def _columns(self) -> dict[str, str]:
        """The columns to read, and their names in blocks, which some versions of Ray change."""
        if self._projection_map is None:
            return {name: name for name in self._survey.columns}
        return self._projection_map

    def _plan(self, columns: Mapping[str, str], context: DataContext) -> Any:
        """Return a reference to what all tasks share."""
        key = tuple(columns.items())
        if key not in self._plans:
            found = self._survey
            self._plans[key] = ray.put(
                BlockPlan(
                    found.config_for(columns),
                    found.selection,
                    found.fingerprints,
                    columns,
                    self._further,
                    tuple(context.retried_io_errors),
                )
            )
        return self._plans[key]
