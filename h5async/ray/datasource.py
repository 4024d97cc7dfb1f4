"""Defines `read_hdf5`: a Ray Data dataset whose tasks read whole chunks with an `AsyncReader`.

A survey on the driver determines the columns and sizes of the dataset, and where to cut it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from h5async.config import ReaderConfig
from h5async.errors import ConfigError
from h5async.fill.finishing import masks_of
from h5async.index.changes import fingerprint
from h5async.index.datasettable import sample_bounds, unit_nbytes
from h5async.io.stores import absolute_name
from h5async.measure.statistics import ONCE
from h5async.order.rows import SpanRows
from h5async.order.selection import Int64s, Selection
from h5async.ray.blockreading import BlockPlan, BlockReader, block_of, columns_of, values_nbytes
from h5async.reader.asyncreader import AsyncReader
from h5async.reader.readersetup import ReaderSetup

if TYPE_CHECKING:
    from h5async.config.keywords import ReaderOptions

_TASKS_OF_CPU, _LITTLE_NBYTES = 4, 8 << 20  # more, smaller tasks cost more than they balance out
_STORE_PART = 4  # blocks of all tasks running at once fit into 1/_STORE_PART of Ray's store
# Options of the readers here and in tasks, which read in the threads that call them.
_NO_LOOP: Mapping[str, Any] = {**ONCE, "batch_size": 1, "prefetch": 1, "num_threads": 0}
_INSTEAD = {
    "shuffle": "Dataset.random_shuffle(), or local_shuffle_buffer_size of iter_batches()",
    "batch_size": "batch_size of iter_batches() and map_batches()",
    "prefetch": "prefetch_batches of iter_batches()",
    "num_threads": "num_cpus, the threads of each task",
    "postprocess": "Dataset.map_batches()",
    "rank": "Dataset.streaming_split()",
    "world_size": "Dataset.streaming_split()",
}
_PROBED, _PROBED_NBYTES = 16, 16 << 20  # samples read to measure the size of a row
_PROBED_ENCODED = 64  # samples read, all over the dataset, if layouts do not tell their size
_UNIT_NBYTES = 32 << 20  # units that are whole for all fields are used up to this size
_MOST_UNITS = 1 << 16  # of samples in an order of the user's, which ignores chunks
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
    """Return a Ray Data dataset with a row per sample and a column per field.

    Each task reads whole chunks of all fields into blocks of Arrow tensors. Samples come in the
    order of an `AsyncReader` without shuffling if ``DataContext.execution_options`` has
    ``preserve_order``.

    Columns have the names of fields. Samples of any length become lists or tensors of variable
    shape; sparse rows become two columns of lists, ``NAME_indices`` and ``NAME_data``.

    Parameters
    ----------
    paths
        Like `hdf5_path` of `AsyncReader`: a file, a list of files, a glob, URLs, a saved index.
    with_index
        Add the column ``index``, the unique sample number; and with `sequences`, also
        ``sequence`` and ``step``. All are int64.
    num_cpus
        The CPUs that Ray reserves for each task, which reads with as many threads. None: one.
    memory, concurrency, override_num_blocks
        As for `ray.data.read_datasource`.
    ray_remote_args
        Further options of `ray.remote` for the tasks, such as ``{"resources": {...}}``.
    **options
        Options of `AsyncReader`: `fields`, `indices`, `sequences` and others; but not those for
        loops, such as `batch_size` and `shuffle`, for which Ray Data has its own.

    Raises
    ------
    ConfigError
        If an option is unknown, or is for loops; also whatever `AsyncReader` raises.

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
    """The datasource of `read_hdf5`; its pickle is small, whatever the dataset."""

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
        self._projection_map: dict[str, str] | None = None  # set by Ray: new names by column
        self._plans: dict[Any, Any] = {}  # references into Ray's object store, by columns

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to plans: other processes make their own."""
        return {**self.__dict__, "_plans": {}}

    def get_name(self) -> str:
        """Return the name that Ray shows."""
        return "HDF5"

    def supports_projection_pushdown(self) -> bool:
        """Return True: only the fields of the chosen columns are read."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Return the estimated size of all blocks."""
        return int(self._survey.nbytes_at(list(self._columns))[-1])

    def best_num_blocks(self) -> int | None:
        """Return the number of tasks: a few large ones that keep all CPUs busy; None for no data.

        A CPU is idle for 0.1 to 0.3 s before Ray starts its next task; and Ray's own choice for a
        small dataset would be 200 tasks of 1 MiB.
        """
        nbytes = self._survey.nbytes_at(list(self._columns))
        total, most = nbytes[-1], DataContext.get_current().target_max_block_size or math.inf
        cluster = ray.cluster_resources()
        at_once = max(1, cluster.get("CPU", 1) / self._threads)
        fitting = cluster.get("object_store_memory", 0) / at_once / _STORE_PART
        least = total // max(most, fitting)
        wanted = int(max(1, least, min(_TASKS_OF_CPU * at_once, total // _LITTLE_NBYTES)))
        while (found := len(cut(nbytes, wanted, None, 1))) < wanted:
            wanted = found  # otherwise, Ray would split blocks to reach the number
        return found or None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Return about `parallelism` tasks, which do not split chunks.

        (Older versions of Ray pass fewer arguments.)
        """
        found, context = self._survey, data_context or DataContext.get_current()
        if not found.selection.size:
            return []
        columns = self._columns
        nbytes = found.nbytes_at(list(columns))
        plan, skips = self._plan(columns, context), found.config.on_error == "skip"
        fields = [found.schema.field(name).with_name(new) for name, new in columns.items()]
        tasks, schema = [], pa.schema(fields) if fields else None
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
        """The names of columns in blocks, which some versions of Ray change, by column to read."""
        if self._projection_map is None:
            return {name: name for name in self._survey.columns}
        return self._projection_map

    def _plan(self, columns: Mapping[str, str], context: DataContext) -> Any:
        """Return a reference to the `BlockPlan` that all tasks share."""
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


# --- the survey -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """A column of blocks: the field that it comes from ("" for none), and its size.

    A sample takes `row_nbytes`, plus `value_nbytes` for each of its values. `values`, int64, are
    the cumulative numbers of values at the survey's bounds; None if samples have a fixed size.
    """

    field: str
    row_nbytes: float
    value_nbytes: float = 0
    values: Int64s | None = None

    def nbytes_at(self, bounds: Int64s) -> Any:
        """Return the cumulative bytes of samples at each bound."""
        found = bounds * self.row_nbytes
        return found if self.values is None else found + self.values * self.value_nbytes


@dataclass(frozen=True, eq=False)
class Survey:
    """The properties of a dataset.

    `config` has the options for tasks, which read samples by number. `selection` has the samples;
    `bounds`, int64, are the positions in it, from 0 to its size, that do not split a chunk.
    `fingerprints` has, per column of the reader, a hash of the structure of its files. `files` has
    the first sample of each file, and the names.
    """

    config: ReaderConfig
    selection: Selection
    bounds: Int64s
    columns: Mapping[str, Column]
    schema: pa.Schema
    fingerprints: Mapping[str, str]
    files: tuple[Int64s, tuple[str, ...]]

    def nbytes_at(self, columns: Collection[str]) -> Any:
        """Return the cumulative bytes of some columns at each bound."""
        several = (self.columns[name].nbytes_at(self.bounds) for name in columns)
        return sum(several, np.zeros(self.bounds.size))

    def config_for(self, columns: Collection[str]) -> ReaderConfig:
        """Return the options for reading some columns; at least one field is read."""
        fields = self.config.batch_fields
        if self.config.sequences is not None:  # sequence lengths depend on all fields
            return self.config
        wanted = {self.columns[name].field for name in columns} - {""}
        if not wanted:
            wanted = {
                min(self.columns.values(), key=lambda one: (not one.field, one.row_nbytes)).field
            }
        chosen = {name: one for name, one in fields.items() if name in wanted}
        return self.config.with_fields(chosen)

    def files_of(self, begin: int, end: int) -> list[str]:
        """Return the files of the samples at positions `begin` to `end`."""
        first, names = self.files
        ends = np.array([begin, end - 1])
        if self.selection.numbers is not None:
            ends = np.arange(begin, end)
        samples = self.selection.samples(ends)
        at = np.searchsorted(first, [samples.min(), samples.max()], side="right") - 1
        return list(names[at[0] : at[1] + 1])


def config_of(paths: Any, options: Mapping[str, Any]) -> ReaderConfig:
    """Return the options for readers; ConfigError for options that do not apply in Ray tasks."""
    ReaderConfig.check_names(options)
    kept = ("cache", "cache_bytes") if options.get("cache") == "disk" else ()
    for name in options:
        if name in (*_NO_LOOP, "postprocess") and name not in kept and options[name] is not None:
            instead = f"; Ray Data has {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ConfigError(f"{name} is for loops over a reader, not for tasks of Ray{instead}")
    own = {name: value for name, value in _NO_LOOP.items() if name not in kept}
    config = ReaderConfig(hdf5_path=paths, **{**options, **own})
    if config.static_fields:
        raise ConfigError(
            f"{next(iter(config.static_fields))!r} has one value for the whole dataset, so it is no"
            ' column; leave it out, and read it with AsyncReader.static, or set per="file"'
        )
    names = tuple(map(absolute_name, config.files))  # workers may have another current folder
    return config.model_copy(update={"hdf5_path": names})


def survey(config: ReaderConfig, further: Sequence[str]) -> Survey:
    """Open a dataset and measure some samples; `further` are attributes of batches."""
    with AsyncReader(config) as reader:
        setup = reader._engine.setup
        selection = setup.samplings.selection
        if setup.samplings.offsets is not None:
            raise ConfigError('Sequences(offset="random") differs in each epoch; give a number')
        bounds = _bounds(setup)
        columns: dict[str, Column] = {}
        schema = pa.schema([])
        if selection.size:
            columns, schema = _measured(reader, setup, bounds, further)
        first = next(iter(setup.layouts.values()))
        names, counts = zip(
            *(first.file_samples or ((first.file, first.sample_count),)), strict=True
        )
        found = {name: fingerprint([layout]) for name, layout in setup.layouts.items()}
        files = np.cumsum((0, *counts[:-1])), names
        config = config.with_fields(config.batch_fields, indices=None)
        return Survey(config, selection, bounds, columns, schema, found, files)


def _bounds(setup: ReaderSetup) -> Int64s:
    """Return the positions that do not split any field's chunks, or at least not the largest."""
    selection = setup.samplings.selection
    if selection.ascending is not selection:  # in an order given by the user
        parts = np.linspace(0, selection.size, min(selection.size, _MOST_UNITS) + 1)
        return parts.astype(np.int64)
    layouts = [layout for layout in setup.layouts.values() if not layout.is_repeated]
    leader = max(layouts, key=lambda layout: (unit_nbytes(layout), layout.row_nbytes))
    bounds = sample_bounds(leader)
    encoded = [sample_bounds(one) for one in layouts if one is not leader and unit_nbytes(one)]
    common = functools.reduce(np.intersect1d, encoded, bounds)
    row_nbytes = sum(one.part_nbytes for one in layouts)
    if np.diff(common).max(initial=0) * row_nbytes <= _UNIT_NBYTES:
        bounds = common
    return selection.bounds(bounds)


def _measured(
    reader: AsyncReader, setup: ReaderSetup, bounds: Int64s, further: Sequence[str]
) -> tuple[dict[str, Column], pa.Schema]:
    """Return the columns and their schema, by reading some samples."""
    selection, kinds = setup.samplings.selection, setup.kinds
    each = max(1, reader.nbytes // selection.size)
    count = min(selection.size, _PROBED, max(1, _PROBED_NBYTES // each))
    at = np.arange(count)
    dtypes = [layout.dtype.kind for layout in setup.layouts.values()]
    if any(kind.is_encoded for kind in kinds.values()) or not {*dtypes} <= {*"biufcV"}:
        at = np.unique(np.linspace(0, selection.size - 1, _PROBED_ENCODED).astype(np.int64))
    batch = reader.read(selection.samples(at))
    table = block_of(batch, further)
    rows = dict(zip(setup.layouts, setup.samplings.rows, strict=True))  # by column of the reader
    owner = {made: name for name in kinds for made in columns_of(name, batch[name])}
    for name, kind in kinds.items():  # columns delivered along with a field, such as masks
        beside = (*kind.further, *masks_of({name: kind}, rows, setup.samplings.rows))
        owner |= dict.fromkeys(beside, name)
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        field = owner.get(name, "")
        values, spans = values_nbytes(column), rows.get(field)
        if values is None or not isinstance(spans, SpanRows):
            found[name] = Column(field, column.nbytes / len(batch.index))
            continue
        fixed = (column.nbytes - values) / len(batch.index)
        lengths = np.asarray(spans.lengths(selection.samples(np.arange(selection.size))), np.int64)
        totals = np.append(0, np.cumsum(lengths))
        of_probe = max(1, int(spans.lengths(batch.index).sum()))
        found[name] = Column(field, fixed, values / of_probe, totals[bounds])
    return found, table.schema


def cut(nbytes: Any, parallelism: int, block_nbytes: int | None, threads: int) -> list[Int64s]:
    """Cut a dataset into tasks, and these into blocks; return the indices of each task's bounds.

    `nbytes`, ascending from 0, are the cumulative bytes at each bound. There are at most
    `parallelism` tasks, of about the same size. A block has at least `block_nbytes`, unless it is
    the only one in its task, or there are more `threads` than blocks.
    """
    found = []
    for begin, end in itertools.pairwise(_even(nbytes, 0, nbytes.size - 1, parallelism)):
        size = nbytes[end] - nbytes[begin]
        parts = 1 if block_nbytes is None else int(size // block_nbytes)
        found.append(_even(nbytes, begin, end, max(1, parts, min(threads, int(size) >> 20))))
    return found


def _even(nbytes: Any, first: int, last: int, parts: int) -> Int64s:
    """Return the indices of bounds, from `first` to `last`, that make the parts most even."""
    wanted = np.linspace(nbytes[first], nbytes[last], max(1, parts) + 1)[1:-1]
    at = np.clip(np.searchsorted(nbytes, wanted), first + 1, last) if last > first else wanted[:0]
    at = at.astype(np.int64)
    at -= wanted - nbytes[at - 1] < nbytes[at] - wanted
    return np.unique(np.concatenate(([first], at, [last])))
