"""Decides how much memory a reader may take.

Layouts and options enter; a `MemoryPlan` leaves, or an error if memory does not suffice. A file of
a few bytes may declare rows or chunks of any size. So everything that grows with declared sizes,
threads or slots is added up here once, before any of it is allocated. What a reader needs must fit;
what only saves work, such as kept decoded chunks, gets the rest.

Helper processes share the slots; each has its own copy of everything else that a filler needs.

Memory is counted when touched, because untouched pages cost nothing: of a thread's three buffers
between filters, as many as its filters use. Not counted are chunk tables, already read and thus no
longer free, and results of `postprocess`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.core.binding import load_core
from h5async.core.tablestructures import (
    HEAP_SCRATCH_NBYTES,
    KEPT_OVERHEAD_NBYTES,
    PLANNED_ROW_NBYTES,
    PLANNED_SAMPLE_NBYTES,
)
from h5async.errors import BudgetError, ConfigError
from h5async.index.datasettable import kinds_of, table_of
from h5async.index.extents import table_nbytes
from h5async.index.layout import DatasetLayout
from h5async.index.room import MEMORY_SHARE, Room, files_of
from h5async.index.smalldatasets import kept_whole_nbytes
from h5async.index.units import most_units, unit_nbytes
from h5async.order.selection import Selection
from h5async.order.steps import StepRows
from h5async.plan.transform import RowTransform, sized_nbytes
from h5async.read.executors import method_of
from h5async.read.fallback import span_nbytes
from h5async.read.h5pyrows import needs_scratch, scratch_nbytes
from h5async.read.scratch import ScratchSize
from h5async.samples.columns import Rows
from h5async.spelling import named
from h5async.system.freememory import free_memory, local_ranks

# Measured: bytes kept per piece of a sample and per dimension, and bytes of a plan per piece of a
# batch.
_PIECE_NBYTES, _PIECE_AXIS_NBYTES, _PLANNED_NBYTES = 128, 80, 32
# Per sample, for batches by length: its length, and its position in two epochs.
_LENGTH_NBYTES = 4 + 2 * 4
_UNIT_NBYTES = 128  # measured: bytes per unit of shuffle="window"
_LEAST_NBYTES = 1 << 20  # always allowed for a list of chunks
# A dataset of encoded chunks that decodes to at most this (labels, for example) is decoded once; as
# much of small datasets is kept.
_KEPT_WHOLE_NBYTES = 64 << 20
# The number of groups of chunks that split the same rows and are shared by batches in order.
_IN_ORDER_GROUPS = 4
# The core cuts a batch into this number of items per thread if it has fewer groups (plan.h).
_ITEMS_OF_THREAD = 4


class MemoryPlan(NamedTuple):
    """The memory that a reader may take beyond its needs.

    Attributes
    ----------
    most_threads
        The maximum number of threads per filler, by their scratch memory; at least 1.
    kept_nbytes
        Per field: for decoded chunks that later batches of a filler may need.
    left_nbytes
        Still free beside all that: for the rows of all samples, for example.
    limit_nbytes
        The maximum for any single thing whose size is known when it is read: a batch of images.
    """

    most_threads: int
    kept_nbytes: tuple[int, ...]
    left_nbytes: int
    limit_nbytes: int


class _Share(NamedTuple):
    what: str
    nbytes: int
    remedy: str


def free_memory_nbytes() -> int:
    """Return the memory that this process can still get, by all limits set for it."""
    return free_memory()[0].nbytes


class MemoryBudget:
    """The memory that a reader with some options may take. Made before it takes any.

    Parameters
    ----------
    config
        The options.
    layouts, transforms
        By field name, in field order.
    rows
        The number of samples in a slot.
    made_nbytes
        By field name: bytes per row of an array made of samples of differing lengths.
    selection
        The samples; None means all.
    fewer_threads_do
        Whether there may be fewer threads than configured.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        rows: int,
        *,
        made_nbytes: Mapping[str, int] = MappingProxyType({}),
        selection: Selection | None = None,
        fewer_threads_do: bool = False,
    ) -> None:
        self._made_nbytes = made_nbytes
        self._selection = selection
        self._fewer_threads_do = fewer_threads_do
        self._config = config
        self._layouts = layouts
        self._transforms = transforms
        self._rows = rows
        self._fillers = max(1, config.num_helpers)
        self._free = free_memory_nbytes()
        half = int(self._free * MEMORY_SHARE)
        self._limit = half if config.max_batch_bytes is None else config.max_batch_bytes
        # The option limits each single thing. All together may take more: the same memory serves a
        # reader with and without the option.
        self._limit_of_all = max(half, self._limit)

    def check(self) -> None:
        """Raise ConfigError if any single part of a reader is above ``max_batch_bytes``.

        The parts are: all slots together; any chunk that is held whole, whoever decodes it; a row
        of a source of which only pieces are wanted; and the list of a batch's chunks.
        """
        self._check_slots()
        for name, layout in self._layouts.items():
            rows = self._rows * self._transforms[name].rows_of_sample
            for source in _read_through_scratch(layout):
                self._check_row(source)
            for leaf, _ in kinds_of(layout):
                if leaf.chunks is None and not (leaf.filters or leaf.sources):
                    continue  # no chunks: nothing is listed or held whole
                self._check_pieces(leaf, rows)
                if leaf.filters or ScratchSize.of([leaf]).raw_chunk:
                    self._check_chunk(leaf)
                for source in leaf.origins():  # HDF5 decodes whole chunks, too
                    if source.filters:
                        self._check_chunk(source)

    @property
    def beside_rows_nbytes(self) -> int:
        """The host memory that a device may add to all slots, by ``max_batch_bytes``."""
        return max(0, self._limit - sum(self._slots().values()))

    def plan(self, device_nbytes: int, wanted: Sequence[int]) -> MemoryPlan:
        """Check that all needs of a reader fit together, and divide the rest.

        Parameters
        ----------
        device_nbytes
            Host memory that the device adds to the slots.
        wanted
            Per field: bytes of decoded chunks worth keeping in each filler, from
            `wanted_kept_nbytes`.

        Raises
        ------
        BudgetError
            If they do not fit; the message lists the shares.
        """
        config, layouts = self._config, list(self._layouts.values())
        threads = max(1, config.filler_threads)
        shares = list(self._shares(device_nbytes, threads))
        needed = _sum(shares)
        if needed > self._limit_of_all and self._fewer_threads_do and threads > 1:
            least = _sum(self._shares(device_nbytes, 1))
            more = (self._limit_of_all - least) * (threads - 1) // max(1, needed - least)
            threads = 1 + max(0, more)
            shares = list(self._shares(device_nbytes, threads))
            needed = _sum(shares)
        if needed > self._limit_of_all:
            raise self._too_much(shares, needed)
        if config.shuffle == "window":  # files may declare chunks that were never written
            what = f"{layouts[0].file}: the chunks that {named('shuffle', 'window')} puts in order"
            Room(config.max_batch_bytes).take(self._window_nbytes, what, files_of(*layouts))
        room = max(0, min(self._limit_of_all, self._free) - needed)
        total = self._fillers * sum(wanted)
        kept = tuple(wanted if total <= room else [n * room // total for n in wanted])
        left = self._free - needed - self._fillers * sum(kept)
        return MemoryPlan(threads, kept, max(0, left), self._limit)

    def _too_much(self, shares: list[_Share], needed: int) -> BudgetError:
        listed = ", ".join(f"{what} {nbytes:,}" for what, nbytes, _ in shares if nbytes)
        largest = max(shares, key=lambda share: share.nbytes)
        first, limit = next(iter(self._layouts.values())), self._limit_of_all
        return BudgetError(
            f"{first.file}: a reader of {', '.join(self._layouts)} takes {needed:,} bytes and does"
            f" not fit in memory: it may take {limit:,} ({self._whose(limit)}), and needs {listed};"
            f" {largest.remedy}, or set {named('max_batch_bytes')} if you trust the file."
            f" {_what_is_free()}"
        )

    def _shares(self, device_nbytes: int, threads: int) -> Iterator[_Share]:
        """Yield the needs of a reader with some number of threads per filler."""
        config, rows, fillers = self._config, self._rows, self._fillers
        smaller = f"make {self._batch_option} or {named('prefetch')} smaller"
        batches = config.prefetch
        yield _Share(f"{batches} batches of {rows} samples", sum(self._slots().values()), smaller)
        if config.debug_lifetimes:
            copied = sum(t.slot_rows(rows) * t.nbytes for t in self._transforms.values())
            yield _Share("copies of batches", 2 * copied, f"set {named('debug_lifetimes', False)}")
        yield _Share("chunks for the GPU", device_nbytes, f"set {named('decode', 'host')}")
        for what, nbytes, remedy in self._shares_of_filler(threads):
            if fillers > 1:
                what = f"{what}, in {fillers} processes"
                remedy = f"make {named('workers')} smaller"
            yield _Share(what, fillers * nbytes, remedy)

    def _shares_of_filler(self, threads: int) -> Iterator[_Share]:
        """Yield the needs of each filler."""
        config, rows, batches = self._config, self._rows, self._config.prefetch
        layouts = list(self._layouts.values())
        smaller = f"make {self._batch_option} or {named('prefetch')} smaller"
        fewer = f"make {named('num_threads')} smaller" if threads > 1 else "store smaller chunks"
        scratch = threads * _touched_scratch_nbytes(layouts)
        yield _Share(f"scratch of {threads} thread{'s' * (threads > 1)}", scratch, fewer)
        of_parts = threads * max(map(_parts_scratch_nbytes, layouts))
        yield _Share("rows that only pieces are taken of", of_parts, fewer)
        several = {name: rows * t.rows_of_sample for name, t in self._transforms.items()}
        at_once = {n: t.slot_rows(rows) * t.rows_of_sample for n, t in self._transforms.items()}
        read = max(_fallback_nbytes(y, at_once[name]) for name, y in self._layouts.items())
        yield _Share("what h5py reads at a time", read, f"make {named('batch_size')} smaller")
        planned = sum(several[name] * _num_layers(y) for name, y in self._layouts.items())
        plans = rows * PLANNED_SAMPLE_NBYTES + planned * PLANNED_ROW_NBYTES
        yield _Share("plans of batches", batches * plans, smaller)
        tables = sum(map(table_nbytes, layouts))
        yield _Share("tables of chunks and files", tables, "store larger chunks")
        lists = sum(_lists_nbytes(y, several[n], batches) for n, y in self._layouts.items())
        yield _Share("lists of chunks", lists, f"{smaller}, or store larger chunks")
        if config.shuffle == "window":
            yield _Share(
                "the order of samples", self._window_nbytes, f"use {named('shuffle', 'full')}"
            )
        if config.batch_values is not None or config.bucket is not None:
            samples = layouts[0].sample_count * _LENGTH_NBYTES
            option = "bucket" if config.batch_values is None else "batch_values"
            yield _Share("batches by length", samples, f"leave out {named(option)}")

    @property
    def _window_nbytes(self) -> int:
        """What the order of `shuffle="window"` takes."""
        return _UNIT_NBYTES * max(map(most_units, self._layouts.values()))

    @property
    def _batch_option(self) -> str:
        """The option that makes batches smaller."""
        return named("batch_size" if self._config.batch_values is None else "batch_values")

    def _slots(self) -> dict[str, int]:
        """Return the bytes of the slots per field: rows as read, and as delivered.

        Rows as read lie in the memory of the process that reads them, unless they are delivered so.
        Arrays made of samples of differing lengths belong to the first column.
        """
        slots, raws = self._config.prefetch, self._fillers
        return {
            name: slots
            * (
                t.slot_rows(self._rows)
                * (t.raw_nbytes if t.is_identity else raws * t.raw_nbytes + t.nbytes)
                + sized_nbytes(self._config.batch_fields.get(name), self._rows)
                + self._made_nbytes.get(name, 0) * self._rows
            )
            for name, t in self._transforms.items()
        }

    def _whose(self, limit: int) -> str:
        """Say where a limit comes from."""
        if limit == self._config.max_batch_bytes:
            return named("max_batch_bytes")
        by = free_memory()[0].limit
        return f"{named('max_batch_bytes')}: half of the {self._free:,} that are free by {by}"

    def _check_slots(self) -> None:
        needed = self._slots()
        total, limit = sum(needed.values()), self._limit
        if total > limit:
            largest = self._layouts[max(needed, key=lambda name: needed[name])]
            remedy = f"make {self._batch_option} or {named('prefetch')} smaller"
            longest = ""
            if largest.is_ragged and (self._selection is None or self._selection.size):
                sample, nbytes = _longest_sample(largest, self._selection)
                longest = f" the longest one is sample {sample}, of {nbytes:,} bytes;"
                if nbytes * self._config.prefetch > limit:
                    remedy = f"leave sample {sample} out by {named('indices')}"
            raise BudgetError(
                f'{largest.file}: dataset "{largest.path}" of shape {largest.shape}:'
                f" {self._config.prefetch} batches of {self._rows} samples take {total:,} bytes and"
                f" do not fit in memory: they may take {limit:,} ({self._whose(limit)});"
                f"{longest} {remedy}, or set"
                f" {named('max_batch_bytes')} if you trust the"
                f" file. {_what_is_free()}"
            )

    def _check_row(self, layout: DatasetLayout) -> None:
        """Check that a row that is held whole, to take pieces of it, is within the limit."""
        limit = self._limit
        if layout.row_nbytes > limit:
            raise ConfigError(
                f'{layout.file}: dataset "{layout.path}": only pieces of its samples are wanted,'
                f" but each is read whole, and has {layout.row_nbytes:,} bytes, more than the"
                f" {limit:,} that it may take ({self._whose(limit)}); set"
                f" {named('max_batch_bytes')} if you"
                " trust the file"
            )

    def _check_pieces(self, layout: DatasetLayout, rows: int) -> None:
        """Check that the lists of chunks, including those of a batch, are within the limit."""
        needed, limit = _lists_nbytes_of_leaf(layout, rows, 1), self._limit
        if needed > max(limit, _LEAST_NBYTES):
            raise ConfigError(
                f'{layout.file}: dataset "{layout.path}": a sample of shape {layout.row_shape} lies'
                f" in {layout.num_pieces:,} chunks of shape {layout.chunk_shape}; the list of"
                f" those of a batch takes {needed:,} bytes, more than the {limit:,} that it may"
                f" take ({self._whose(limit)}); make {named('batch_size')} smaller, store"
                f" larger chunks, or set {named('max_batch_bytes')} if you trust the file"
            )

    def _check_chunk(self, layout: DatasetLayout) -> None:
        """Check that a chunk that must be held whole is within the limit."""
        nbytes, limit = _whole_chunk_nbytes(layout), self._limit
        if layout.chunk_shape and nbytes > limit:
            what, remedy = "decodes to", ""
            if not layout.filters:
                what = "is held whole and has"
            if not layout.filters and layout.sample_axis != 0:
                remedy = " take its first dimension as that of the samples, or"
            raise ConfigError(
                f'{layout.file}: dataset "{layout.path}": a chunk of shape {layout.chunk_shape}'
                f" {what} {nbytes:,} bytes, more than the {limit:,} that it may take"
                f" ({self._whose(limit)});{remedy} set {named('max_batch_bytes')} if you trust"
                " the file"
            )


def wanted_kept_nbytes(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: Sequence[Rows] = (),
    selected: float = 1.0,
    *,
    in_window: bool = False,
) -> list[int]:
    """Return, per field, how much memory for later batches saves work.

    Parameters
    ----------
    config
        The options.
    layouts
        By field.
    rows
        Per field: which rows each sample consists of.
    selected
        The share of all samples that are in an epoch.
    in_window
        Assume ``shuffle="window"``, whatever the options say.
    """
    several, wanted = list(layouts.values()), []
    in_window |= config.shuffle == "window"
    for number, layout in enumerate(several):
        nbytes, small_nbytes = kept_whole_nbytes(layout)
        if nbytes > _KEPT_WHOLE_NBYTES:
            useful = 0
            if in_window:
                useful = _window_nbytes(config, layout, several)
            elif _is_in_order(config):
                reach = _reach(rows[number]) if rows else 0
                most = _window_nbytes(config, layout, several)
                useful = min(most, _in_order_nbytes(config, layout, reach, selected, most))
            nbytes = min(nbytes, useful)  # never more than all chunks
        elif nbytes + small_nbytes <= _KEPT_WHOLE_NBYTES:
            nbytes += small_nbytes
        wanted.append(nbytes)
    return wanted


def _window_nbytes(
    config: ReaderConfig, layout: DatasetLayout, layouts: Sequence[DatasetLayout]
) -> int:
    from h5async.order.window import kept_nbytes

    nbytes = kept_nbytes(layout, layouts, config.window_bytes)
    least = min((leaf.chunk_nbytes for leaf, _ in kinds_of(layout) if leaf.filters), default=0)
    return nbytes + nbytes // max(1, least) * KEPT_OVERHEAD_NBYTES


def _is_in_order(config: ReaderConfig) -> bool:
    """Return whether samples come in file order."""
    mixed = config.shuffle, config.bucket, config.batch_values
    return not any(mixed) and config.weights is None and config.sampler is None


def _in_order_nbytes(
    config: ReaderConfig, layout: DatasetLayout, reach: int, selected: float, most: int
) -> int:
    """Return the memory for keeping chunks when samples come in order.

    It is for data that consecutive batches share, beyond the chunk or two that are kept in any
    case: groups of chunks that split the same rows, which several batches in flight may need; and
    chunks that multi-step samples reach back to. If several threads decode one group, it stays
    until all have got to it, so those of all batches that may be in flight together are kept.

    Parameters
    ----------
    config, layout
        The options, and one field.
    reach
        See `_reach`.
    selected
        The share of all samples that are in an epoch.
    most
        The maximum; the result is 0 if that is too little to be useful.
    """
    wanted, threads = 0, max(1, config.filler_threads)
    spanned = config.batch_size / max(selected, 1e-9)  # rows, by a batch
    at_once = max(2, min(config.prefetch, threads))
    for leaf, _ in kinds_of(layout):
        if not unit_nbytes(leaf) or (leaf.num_pieces == 1 and not reach):
            continue
        pieces, samples = leaf.num_pieces, leaf.chunk_shape[leaf.sample_axis]
        is_aligned = samples == 1 or (
            leaf is layout and selected == 1 and config.batch_size % samples == 0
        )
        if is_aligned and not reach:
            continue  # no two batches share a group
        group = unit_nbytes(leaf) + pieces * KEPT_OVERHEAD_NBYTES
        least = 2 + -(-reach // samples)
        is_cut = spanned <= _ITEMS_OF_THREAD * threads * samples  # else a thread decodes a group
        new = int(at_once * spanned) if reach or is_cut else 0
        groups = min(_IN_ORDER_GROUPS + -(-(reach + new) // samples), most // group)
        if groups >= least:
            chunks = threads * (leaf.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
            wanted = max(wanted, groups * group + chunks)
    return wanted


def _reach(rows: Rows) -> int:
    """Return the number of rows whose chunks stay until no later sample needs them.

    A row serves as one step of a sample, and later as the previous step of another one; meanwhile
    all steps advance by the gap between the two.
    """
    if not isinstance(rows, StepRows) or rows.size < 2:
        return 0
    offsets = np.unique(rows.offsets)
    return int(offsets[-1] - offsets[0] + np.diff(offsets).max(initial=1) - 1)


def _sum(shares: Iterable[_Share]) -> int:
    return sum(share.nbytes for share in shares)


def _what_is_free() -> str:
    """Say how much memory is free, and by which limits."""
    found = [left for left in free_memory() if left.nbytes < 1 << 60]  # else nothing is limited
    text = ", ".join(f"{nbytes:,} bytes by {limit}" for nbytes, limit in found)
    ranks = local_ranks()
    shared = f", for each of the {ranks} processes on this node" if ranks > 1 else ""
    return f"Free memory: {text}{shared}"


def _longest_sample(layout: DatasetLayout, selection: Selection | None) -> tuple[int, int]:
    """Return the number of the longest sample of a ragged field, and its bytes."""
    lengths: NDArray[Any] = np.diff(layout.starts()) if layout.lengths is None else layout.lengths
    if selection is None:
        selection = Selection.of_range(range(lengths.size))
    numbers = selection.samples(np.arange(selection.size, dtype=np.int64))
    sample = int(numbers[lengths[numbers].argmax()])
    return sample, int(lengths[sample]) * layout.row_nbytes


def _read_through_scratch(layout: DatasetLayout) -> Iterator[DatasetLayout]:
    """Yield the datasets whose whole rows are held to take pieces of them."""
    for leaf, _ in kinds_of(layout) if layout.segments is not None else ():
        if needs_scratch(layout, leaf):
            yield leaf


def _parts_scratch_nbytes(layout: DatasetLayout) -> int:
    """Return the bytes that a thread holds of rows to take pieces of them."""
    return max(map(scratch_nbytes, _read_through_scratch(layout)), default=0)


def _touched_scratch_nbytes(layouts: Sequence[DatasetLayout]) -> int:
    """Return the part of a thread's scratch that it uses; it is as large as any field needs."""
    size = ScratchSize.of(layouts)
    filters = max(len(leaf.filters) for layout in layouts for leaf, _ in kinds_of(layout))
    of_heaps = HEAP_SCRATCH_NBYTES if any(layout.heaps for layout in layouts) else 0
    return size.encoded + size.raw_chunk + size.between * min(3, filters) + of_heaps


def _num_layers(layout: DatasetLayout) -> int:
    """Return the number of pieces in different datasets that make up a row."""
    return max(1, len(table_of(layout)[0].layers))


def _fallback_nbytes(layout: DatasetLayout, rows: int) -> int:
    """Return the bytes held to read through h5py, by one thread at a time."""
    most = 0
    core = load_core()
    for leaf, _ in kinds_of(layout):
        if method_of(core, leaf) != "h5py":
            continue
        read = min(leaf.nbytes, span_nbytes(leaf, rows))
        # A chunk that is checked: encoded, decoded, and between its filters.
        checked = max(
            (
                _whole_chunk_nbytes(source) * (2 + min(3, len(source.filters)))
                for source in leaf.origins()
                if source.filters
            ),
            default=0,
        )
        most = max(most, read, checked)
    return most


def _whole_chunk_nbytes(layout: DatasetLayout) -> int:
    """Return the decoded bytes of a chunk; if HDF5 decodes a compound, of all its members."""
    elements = math.prod(layout.chunk_shape[: len(layout.shape) - layout.extra_dims])
    return max(layout.chunk_nbytes, elements * layout.stored_itemsize)


def _lists_nbytes(layout: DatasetLayout, rows: int, batches: int) -> int:
    """Return the bytes of chunk lists: kept per leaf, and of batches in flight.

    A batch has `rows` samples, however many leaves these lie in.
    """
    kept = planned = 0
    for leaf, count in kinds_of(layout):
        of_leaf = _lists_nbytes_of_leaf(leaf, rows, 0)
        kept += count * of_leaf
        planned = max(planned, _lists_nbytes_of_leaf(leaf, rows, batches) - of_leaf)
    return kept + planned


def _lists_nbytes_of_leaf(layout: DatasetLayout, rows: int, batches: int) -> int:
    if layout.chunks is None:
        return 0
    groups = min(rows, layout.grid[layout.sample_axis])
    kept = _PIECE_NBYTES + len(layout.shape) * _PIECE_AXIS_NBYTES
    return layout.num_pieces * (kept + batches * groups * _PLANNED_NBYTES)
