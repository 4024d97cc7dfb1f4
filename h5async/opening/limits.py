"""Decides how much memory a reader may take.

Layouts and options enter; a `MemoryPlan` leaves, or an error if memory does not suffice. A file of
a few bytes may declare rows or chunks of any size. So everything that grows with declared sizes,
threads or slots is added up here once, before any of it is allocated. What a reader needs must fit;
what only saves work, such as kept decoded chunks, gets the rest.

Helper processes share the slots; each has its own copy of everything else that a filler needs.

Memory is counted when touched, because untouched pages cost nothing: of a thread's three buffers
between filters, as many as its filters use. Not counted are chunk tables, already read and thus no
longer free, and results of `postprocess`.

Also computes the sizes of slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.core.binding import (
    HEAP_SCRATCH_NBYTES,
    PLANNED_ROW_NBYTES,
    PLANNED_SAMPLE_NBYTES,
)
from h5async.errors import BudgetError, ConfigError
from h5async.index.datasettable import kinds_of, most_units, table_of
from h5async.index.extents import table_nbytes
from h5async.index.layout import DatasetLayout
from h5async.index.links import MEMORY_SHARE, Room, files_of
from h5async.opening.dataset import Samplings
from h5async.order.rows import SpanRows
from h5async.order.selection import Selection
from h5async.plan.transform import RowTransform, row_transform
from h5async.read.coretables import ScratchSize, scratch_size
from h5async.read.executors import method_of
from h5async.read.h5pyrows import needs_scratch, scratch_rows, span_nbytes
from h5async.samples.assembly import columns_of, field_kinds
from h5async.samples.fieldkind import FieldKind, Outline
from h5async.spelling import named
from h5async.system.resources import free_memory, local_ranks

# Measured: bytes kept per piece of a sample and per dimension, and bytes of a plan per piece of a
# batch.
_PIECE_NBYTES, _PIECE_AXIS_NBYTES, _PLANNED_NBYTES = 128, 80, 32
# Per sample, for batches by length: its length, and its position in two epochs.
_LENGTH_NBYTES = 4 + 2 * 4
_DRAW_NBYTES = 8 + 3 * 8  # per draw in a window: one epoch, and what the next one is made of
_UNIT_NBYTES = 128  # measured: bytes per unit of shuffle="window"
_LEAST_NBYTES = 1 << 20  # always allowed for a list of chunks


class MemoryPlan(NamedTuple):
    """The memory that a reader may take beyond its needs.

    There is scratch memory for `most_threads` per filler, at least 1. `kept_nbytes` are, per field,
    for decoded chunks that later batches of a filler may need. `left_nbytes` remain free: for the
    rows of all samples, for example. `limit_nbytes` is the maximum for any single thing whose size
    is known only when it is read, such as a batch of images.
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
    """Return the memory that this process can still get, under all limits set for it."""
    return free_memory()[0].nbytes


class MemoryBudget:
    """The memory that a reader with some options may take. Made before it takes any.

    `layouts` and `transforms` are by column name, in order. Slots have `rows` samples;
    `made_nbytes` are, by field name, the bytes of a slot for arrays made from the rows read.
    `selection` are the samples of an epoch. `fewer_threads_do`: there may be fewer threads than
    configured.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        transforms: Mapping[str, RowTransform],
        rows: int,
        *,
        made_nbytes: Mapping[str, int],
        selection: Selection,
        fewer_threads_do: bool,
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
        # The option limits each single thing. Together they may take more: with a small limit, as
        # much as without the option.
        self._limit_of_all = max(half, self._limit)

    def check(self) -> None:
        """Raise ConfigError if any single part of a reader is above ``max_batch_bytes``.

        The parts are: all slots together; any chunk that is held whole, whoever decodes it; a row
        of a source dataset that is read to a buffer; and the list of a batch's chunks.
        """
        self._check_slots()
        for name, layout in self._layouts.items():
            rows = self._rows * self._transforms[name].rows_of_sample
            for source in _read_through_scratch(layout):
                held = "its rows, or parts of them, are read to a buffer, of up to {} bytes each"
                self._require(source.row_nbytes, source, held)
            for leaf, _ in kinds_of(layout):
                if leaf.chunks is None and not (leaf.filters or leaf.sources):
                    continue  # no chunks: nothing is listed or held whole
                self._check_pieces(leaf, rows)
                if leaf.filters or (leaf.chunks is not None and scratch_size(leaf).raw_chunk):
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

        `device_nbytes` is the host memory that the device adds to the slots; `wanted` are, per
        field, the bytes worth keeping in each filler, from `wanted_kept_nbytes`. BudgetError if
        they do not fit; the message lists the shares.
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
        """Yield the needs of a reader with `threads` threads per filler."""
        config, rows, fillers = self._config, self._rows, self._fillers
        of_slots = f"{config.prefetch} batches of {rows} samples"
        yield _Share(of_slots, sum(self._slots().values()), self._smaller_batches)
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
        config, rows, batches = self._config, self._rows, self._config.prefetch
        layouts = list(self._layouts.values())
        smaller = self._smaller_batches
        fewer = f"make {named('num_threads')} smaller" if threads > 1 else "store smaller chunks"
        scratch = threads * _touched_scratch_nbytes(layouts)
        yield _Share(f"scratch of {threads} thread{'s' * (threads > 1)}", scratch, fewer)
        pieced = [one for layout in layouts for one in _read_through_scratch(layout)]
        of_parts = threads * max((scratch_rows(x) * x.row_nbytes for x in pieced), default=0)
        yield _Share("buffers for rows of source datasets", of_parts, fewer)
        several = {name: rows * t.rows_of_sample for name, t in self._transforms.items()}
        at_once = {n: t.slot_rows(rows) * t.rows_of_sample for n, t in self._transforms.items()}
        read = max(_fallback_nbytes(y, at_once[name]) for name, y in self._layouts.items())
        yield _Share("rows that h5py reads at a time", read, f"make {named('batch_size')} smaller")
        # A row has at most as many pieces as there are layers of datasets.
        layers = {n: max(1, len(table_of(y)[0].layers)) for n, y in self._layouts.items()}
        planned = sum(several[name] * count for name, count in layers.items())
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
            if config.weights is not None:
                draws = config.epoch_samples or self._selection.size
                full = f"use {named('shuffle', 'full')}, or make {named('epoch_samples')} smaller"
                yield _Share("draws of epochs", draws * _DRAW_NBYTES, full)
        if config.batch_values is not None or config.bucket is not None:
            samples = layouts[0].sample_count * _LENGTH_NBYTES
            option = "bucket" if config.batch_values is None else "batch_values"
            yield _Share("batches by length", samples, f"leave out {named(option)}")

    @property
    def _window_nbytes(self) -> int:
        return _UNIT_NBYTES * max(map(most_units, self._layouts.values()))

    @property
    def _smaller_batches(self) -> str:
        batch = named("batch_size" if self._config.batch_values is None else "batch_values")
        return f"make {batch} or {named('prefetch')} smaller"

    def _slots(self) -> dict[str, int]:
        """Return the bytes of the slots per field: rows as read, and as delivered.

        Each process that reads has its own memory for rows as read, unless they are delivered as
        read. Arrays made from samples of differing lengths count for the first column.
        """
        slots, raws = self._config.prefetch, self._fillers
        return {
            name: slots
            * (
                t.slot_rows(self._rows)
                * (t.raw_nbytes if t.is_identity else raws * t.raw_nbytes + t.nbytes)
                + self._made_nbytes.get(name, 0)
            )
            for name, t in self._transforms.items()
        }

    def _whose(self, limit: int) -> str:
        if limit == self._config.max_batch_bytes:
            return named("max_batch_bytes")
        by = free_memory()[0].limit
        return f"{named('max_batch_bytes')}: half of the {self._free:,} that are free by {by}"

    def _check_slots(self) -> None:
        needed = self._slots()
        total, limit = sum(needed.values()), self._limit
        if total > limit:
            largest = self._layouts[max(needed, key=lambda name: needed[name])]
            remedy, longest = self._smaller_batches, ""
            if largest.is_ragged and self._selection.size:
                sample, nbytes = _longest_sample(largest, self._selection)
                longest = f" the longest one is sample {sample}, of {nbytes:,} bytes;"
                if nbytes * self._config.prefetch > limit:
                    remedy = f"leave sample {sample} out by {named('indices')}"
            raise BudgetError(
                f'{largest.file}: dataset "{largest.path}" of shape {largest.shape}:'
                f" {self._config.prefetch} batches of {self._rows} samples take {total:,} bytes and"
                f" do not fit in memory: they may take {limit:,} ({self._whose(limit)});"
                f"{longest} {remedy}, or set {named('max_batch_bytes')} if you trust the file."
                f" {_what_is_free()}"
            )

    def _check_pieces(self, layout: DatasetLayout, rows: int) -> None:
        needed = _lists_nbytes_of_leaf(layout, rows, 1)
        if needed > _LEAST_NBYTES:
            found = (
                f"a sample of shape {layout.row_shape} lies in {layout.num_pieces:,} chunks of"
                f" shape {layout.chunk_shape}; the list of those of a batch takes {{}} bytes"
            )
            remedy = f"make {named('batch_size')} smaller, store larger chunks, or"
            self._require(needed, layout, found, remedy)

    def _check_chunk(self, layout: DatasetLayout) -> None:
        if not layout.chunk_shape:
            return
        what, remedy = "decodes to", ""
        if not layout.filters:
            what = "is held whole and has"
            if layout.sample_axis != 0:
                remedy = "use its first dimension for the samples, or"
        found = f"a chunk of shape {layout.chunk_shape} {what} {{}} bytes"
        self._require(_whole_chunk_nbytes(layout), layout, found, remedy)

    def _require(self, nbytes: int, layout: DatasetLayout, found: str, remedy: str = "") -> None:
        """Raise ConfigError if something that is held whole is above the limit."""
        if nbytes > self._limit:
            raise ConfigError(
                f'{layout.file}: dataset "{layout.path}": {found.format(f"{nbytes:,}")}, more than'
                f" the {self._limit:,} that it may take ({self._whose(self._limit)});"
                f" {remedy}{' ' * bool(remedy)}set {named('max_batch_bytes')} if you trust the file"
            )


def _sum(shares: Iterable[_Share]) -> int:
    return sum(share.nbytes for share in shares)


def _what_is_free() -> str:
    found = [left for left in free_memory() if left.nbytes < 1 << 60]  # else nothing is limited
    text = ", ".join(f"{nbytes:,} bytes by {limit}" for nbytes, limit in found)
    ranks = local_ranks()
    shared = f", for each of the {ranks} processes on this node" if ranks > 1 else ""
    return f"Free memory: {text}{shared}"


def _longest_sample(layout: DatasetLayout, selection: Selection) -> tuple[int, int]:
    lengths: NDArray[Any] = np.diff(layout.starts()) if layout.lengths is None else layout.lengths
    numbers = selection.samples(np.arange(selection.size, dtype=np.int64))
    sample = int(numbers[lengths[numbers].argmax()])
    return sample, int(lengths[sample]) * layout.row_nbytes


def _read_through_scratch(layout: DatasetLayout) -> Iterator[DatasetLayout]:
    """Yield the source datasets whose rows, or parts of them, are read to a buffer first."""
    for leaf, _ in kinds_of(layout) if layout.segments is not None else ():
        if needs_scratch(layout, leaf):
            yield leaf


def _touched_scratch_nbytes(layouts: Sequence[DatasetLayout]) -> int:
    """Return the bytes that a thread uses of its scratch, which is as large as any field needs."""
    size = ScratchSize.of(layouts)
    filters = max(len(leaf.filters) for layout in layouts for leaf, _ in kinds_of(layout))
    of_heaps = HEAP_SCRATCH_NBYTES if any(layout.heaps for layout in layouts) else 0
    return size.encoded + size.raw_chunk + size.between * min(3, filters) + of_heaps


def _fallback_nbytes(layout: DatasetLayout, rows: int) -> int:
    most = 0
    for leaf, _ in kinds_of(layout):
        if method_of(leaf, layout) != "h5py":
            continue
        most = max(most, min(leaf.nbytes, span_nbytes(leaf, rows)))
        for source in leaf.origins():
            if source.filters:  # a chunk that is checked: encoded, decoded, and between its filters
                held = 2 + min(3, len(source.filters))
                most = max(most, held * _whole_chunk_nbytes(source))
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


# --- slots ----------------------------------------------------------------------------------------


def slot_transforms(
    config: ReaderConfig, layouts: Mapping[str, DatasetLayout], samplings: Samplings, rows: int
) -> dict[str, RowTransform]:
    """Return the transform of each column, with its number of rows in slots of `rows` samples.

    ConfigError if the options of a field do not fit its dataset.
    """
    columns = columns_of(field_kinds(config.batch_fields))
    transforms = {name: row_transform(columns[name], layouts[name]) for name in columns}
    room: dict[SpanRows, tuple[int, int]] = {}  # columns of a field share it
    for name, one in zip(transforms, samplings.rows, strict=True):
        if not isinstance(one, SpanRows):
            continue
        if one not in room:
            most = samplings.most_rows(one, rows)
            room[one] = max(1, most), min(most, one.likely(rows))
        capacity, likely = room[one]
        transforms[name] = replace(transforms[name], capacity=capacity, likely=likely)
    return transforms


def made_nbytes(
    kinds: Mapping[str, FieldKind], outlines: Sequence[Outline], rows: int
) -> dict[str, int]:
    """Return, by field, the bytes of a slot for arrays that the host makes from its columns."""
    return {
        one.name: rows * one.made_on_host_nbytes + kinds[one.name].decoded_nbytes(rows)
        for one in outlines
    }


def shared_nbytes(kinds: Mapping[str, FieldKind], rows: int, most: int) -> list[int]:
    """Return, per field, the memory that helper processes share for decoded samples of a batch.

    `rows` is the number of samples, and `most` the limit for samples of any size.
    """
    several = kinds.values()
    return [one.decoded_nbytes(rows) or most if one.is_encoded else 0 for one in several]
