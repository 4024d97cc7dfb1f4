"""Learns, on the driver, what a dataset consists of: options enter; where to cut it leaves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from h5async.config import ReaderConfig
from h5async.errors import ConfigError
from h5async.fill.finishing import masks_of
from h5async.index.changes import fingerprint
from h5async.index.datasettable import sample_bounds, unit_nbytes
from h5async.io.stores import absolute_name
from h5async.measure.statistics import ONCE
from h5async.order.rows import SpanRows
from h5async.order.selection import Int64s, Selection
from h5async.ray.blockreading import block_of, columns_of, values_nbytes
from h5async.reader.asyncreader import AsyncReader
from h5async.reader.readersetup import ReaderSetup

# Of the readers here and in tasks, which read in the threads that call them.
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
_PROBED, _PROBED_NBYTES = 16, 16 << 20  # samples that are read to measure a row
_PROBED_ENCODED = 64  # those, all over the dataset, of which no layout tells the size
_UNIT_NBYTES = 32 << 20  # units of all fields together are not made larger
_MOST_UNITS = 1 << 16  # of samples in an order that knows no chunks


@dataclass(frozen=True, eq=False)
class Column:
    """A column of blocks: the field that it is of, "" for none, and its size.

    A sample takes `row_nbytes`, and `value_nbytes` more for each of its values. `values`, int64,
    are the numbers of values up to each of the survey's bounds; None: they do not matter.
    """

    field: str
    row_nbytes: float
    value_nbytes: float = 0
    values: Int64s | None = None

    def nbytes_at(self, bounds: Int64s) -> Any:
        """Return the bytes of all samples up to each bound."""
        found = bounds * self.row_nbytes
        return found if self.values is None else found + self.values * self.value_nbytes


@dataclass(frozen=True, eq=False)
class Survey:
    """What is known of a dataset.

    `config` has the options of tasks, which read samples by their numbers; `selection` is of these,
    and `bounds`, int64, are the positions at which no chunk is cut, from 0 to its size.
    `fingerprints` are, per column of the reader, a hash of the structure of its files, whose names
    are `files`, by their first sample.
    """

    config: ReaderConfig
    selection: Selection
    bounds: Int64s
    columns: Mapping[str, Column]
    schema: pa.Schema
    fingerprints: Mapping[str, str]
    files: tuple[Int64s, tuple[str, ...]]

    def nbytes_at(self, columns: Collection[str]) -> Any:
        """Return the bytes of some columns up to each bound."""
        several = (self.columns[name].nbytes_at(self.bounds) for name in columns)
        return sum(several, np.zeros(self.bounds.size))

    def config_for(self, columns: Collection[str]) -> ReaderConfig:
        """Return the options for reading some columns; at least one field is read."""
        fields = self.config.batch_fields
        if self.config.sequences is not None:  # all fields together say how long sequences are
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
    """Return the options of the readers; ConfigError for those that Ray has others for."""
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
            f"{next(iter(config.static_fields))!r} has one value for the whole dataset, and is no"
            ' column; leave it out, and read it with AsyncReader.static, or set per="file"'
        )
    names = tuple(map(absolute_name, config.files))  # workers may have another current folder
    return config.model_copy(update={"hdf5_path": names})


def survey(config: ReaderConfig, further: Sequence[str]) -> Survey:
    """Open a dataset, and measure some samples; `further` are attributes of batches."""
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
    """Return the positions at which no chunk of any field is cut, or none of the largest ones."""
    selection = setup.samplings.selection
    if selection.ascending is not selection:  # in an order of the user's
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
    """Return the columns, and their schema, by reading some samples."""
    selection, kinds = setup.samplings.selection, setup.kinds
    each = max(1, reader.nbytes // selection.size)
    count = min(selection.size, _PROBED, max(1, _PROBED_NBYTES // each))
    at = np.arange(count)
    dtypes = [layout.dtype.kind for layout in setup.layouts.values()]
    if any(kind.is_encoded for kind in kinds.values()) or not {*dtypes} <= {*"biufcV"}:
        at = np.unique(np.linspace(0, selection.size - 1, _PROBED_ENCODED).astype(np.int64))
    batch = reader.read(selection.samples(at))
    table = block_of(batch, further)
    rows = dict(zip(setup.layouts, setup.samplings.rows, strict=True))  # of columns of the reader
    owner = {made: name for name in kinds for made in columns_of(name, batch[name])}
    for name, kind in kinds.items():  # what is delivered beside a field
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
    """Cut a dataset into tasks, and these into blocks; return the numbers of bounds of each.

    `nbytes`, ascending from 0, are the bytes up to each bound. There are `parallelism` tasks of
    about one size, or fewer. A block has at least `block_nbytes`, unless it is the only one of its
    task or there are more `threads` than blocks.
    """
    found = []
    for begin, end in itertools.pairwise(_even(nbytes, 0, nbytes.size - 1, parallelism)):
        size = nbytes[end] - nbytes[begin]
        parts = 1 if block_nbytes is None else int(size // block_nbytes)
        found.append(_even(nbytes, begin, end, max(1, parts, min(threads, int(size) >> 20))))
    return found


def _even(nbytes: Any, first: int, last: int, parts: int) -> Int64s:
    """Return the bounds, from `first` to `last`, that come nearest to even parts."""
    wanted = np.linspace(nbytes[first], nbytes[last], max(1, parts) + 1)[1:-1]
    at = np.clip(np.searchsorted(nbytes, wanted), first + 1, last) if last > first else wanted[:0]
    at = at.astype(np.int64)
    at -= wanted - nbytes[at - 1] < nbytes[at] - wanted
    return np.unique(np.concatenate(([first], at, [last])))
