"""Keeps rows in memory for later epochs, and remembers damaged samples, to leave them out.

Rows that were read enter; they leave when their samples are next needed. If a dataset fits a budget
(`cache="host"` or `"device"`), the rows of each batch are kept, as read, on first use; for ragged
and sparse fields, the values of samples. A batch whose samples are all kept is read from datasets
in memory, as if these were files. Also computes how much memory besides the slots saves work.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.core.binding import KEPT_OVERHEAD_NBYTES, address, load_core
from h5async.errors import DamagedError, Skipped
from h5async.index.datasettable import kinds_of, pieces_read, table_of, unit_nbytes
from h5async.index.extents import kept_whole_nbytes
from h5async.index.layout import DatasetLayout
from h5async.index.tables import Segments
from h5async.io.stores import far_names
from h5async.order.rows import SpanRows, StepRows, StepSpans
from h5async.order.selection import NO_SAMPLES, Selection
from h5async.plan.records import Int64s, SamplesPlan
from h5async.read.rereading import Place
from h5async.samples.fieldkind import Rows, layout_of_values
from h5async.system.resources import free_memory

_MOST_KNOWN = 10_000  # damaged samples; each batch with others discovers them anew
_HOST_SHARE = 0.5  # of free memory, if no budget is given
# A field whose encoded chunks decode to at most this (labels, say) is decoded once; its small
# datasets, if there are many, are kept, too, if both fit.
_KEPT_WHOLE_NBYTES = 64 << 20
# Groups of chunks kept for sequential batches; the chunks of a group split the same rows.
_IN_ORDER_GROUPS = 4
_MOST_STAMPS, _BLOCK = 255, 4096  # different stamps; samples whose stamps are checked at a time
# The core cuts a batch into this number of items per thread if it has fewer groups (plan.h).
_ITEMS_OF_THREAD = 4


class Residency:
    """The samples that are kept in memory, until all are forgotten. Safe to use from many threads.

    All samples of the selection take `nbytes` on the ``"host"`` or the ``"device"``, in the order
    of `ascending`. A sample is kept if its stamp in `stamps`, uint8 (n,), is that of the current
    generation. `state`, int64 (5,), is described in core/src/keep.c. Threads of the core change
    both arrays without a lock.
    """

    def __init__(self, selection: Selection, nbytes: int, where: str) -> None:
        self.ascending = selection.ascending
        self.stamps = np.zeros(selection.size, np.uint8)
        self.state = np.zeros(5, np.int64)
        self._lock = threading.RLock()
        self._nbytes = nbytes
        self._where = where

    @property
    def generation(self) -> int:
        """The number of times that all samples were forgotten."""
        return int(self.state[0])

    @property
    def has_all(self) -> bool:
        """Whether all samples are kept."""
        return bool(self.state[1] == self.state[0] + 1)

    def has(self, index: Int64s) -> bool:
        """Tell whether all samples of `index` are kept."""
        return self.has_all or bool(self._are_kept(self.ascending.positions(index)).all())

    def _are_kept(self, positions: Int64s | slice) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = self.stamps[positions] == _stamp(self.generation)
        return kept

    def add(self, index: Int64s, generation: int | None = None) -> None:
        """Mark samples as kept; do nothing if `generation` is given and no longer current."""
        now = self.generation
        if generation not in (None, now):
            return
        self.stamps[self.ascending.positions(index)] = _stamp(now)
        size = self.stamps.size
        seen, first = divmod(int(self.state[2]), size + 1)
        first = first if seen == now else 0
        are_all = True
        while are_all and first < size:
            missing = ~self._are_kept(slice(first, first + _BLOCK))
            are_all = not missing.any()
            first += missing.size if are_all else int(missing.argmax())
        self.state[2] = now * (size + 1) + first
        if are_all:
            self.state[1] = now + 1

    def forget(self) -> None:
        """Forget all samples, because their file has changed."""
        with self._lock:
            generation = self.generation + 1
            if generation % _MOST_STAMPS == 0:  # stamps start over
                self.stamps[:] = 0
            self.state[0] = generation

    def __str__(self) -> str:
        share = 100 * np.count_nonzero(self._are_kept(slice(None))) / max(1, self.stamps.size)
        return f"{self._where}, {share:.0f} % of the samples, {gigabytes(self._nbytes)} for all"


def _stamp(generation: int) -> int:
    return generation % _MOST_STAMPS + 1


class Budget(NamedTuple):
    """The bytes that a cache of all rows needs, and the limit; `whose` says who set the limit."""

    where: str
    nbytes: int
    limit_nbytes: int
    whose: str = "; see cache_bytes"

    @property
    def suffices(self) -> bool:
        """Whether all rows fit."""
        return self.nbytes <= self.limit_nbytes

    def __str__(self) -> str:
        return (
            f"none: {gigabytes(self.nbytes)} do not fit into {gigabytes(self.limit_nbytes)} on the"
            f" {self.where}{self.whose}"
        )


class Places(NamedTuple):
    """Where the samples of a batch are kept: `begin`, int64 (n,), has their rows in the column.

    If samples differ in length, `begin` has their first bytes instead, and `offsets`, int64
    (n + 1,), has their byte offsets in the batch. `nbytes` is about the mean size of a sample.
    """

    begin: Int64s
    nbytes: int
    offsets: Int64s | None = None


class KeptColumn:
    """The concatenated rows of all samples of a column, in ascending order of samples.

    `rows` has the rows of each sample within the column; None means one each. Or it has segments
    whose samples share a row, which is kept once. `nbytes` is the memory that `allocate` takes.
    """

    def __init__(self, selection: Selection, row_nbytes: int, rows: Rows | Segments) -> None:
        self._row_nbytes, self._size = row_nbytes, selection.size
        self._firsts: Int64s | None = None  # position of the first sample with each shared row
        count = selection.size
        if isinstance(rows, Segments):
            firsts = np.unique(np.concatenate((rows.first, rows.end, [0])))
            begins = np.unique(selection.ascending.first_from(firsts))
            self._firsts = begins[begins < selection.size]
            count = self._firsts.size
        self.rows = rows if isinstance(rows, SpanRows) else None
        if self.rows is not None:
            count = int(self.rows.starts[-1])
        self.nbytes, self._count = count * row_nbytes, count

    def allocate(self) -> None:
        """Reserve the memory."""
        self._bytes = np.empty(self.nbytes, np.uint8)
        self._rows = self._bytes.reshape(self._count, self._row_nbytes)

    def places(self, positions: Int64s) -> Places:
        """Return the places of the samples at these positions."""
        if self._firsts is not None:
            positions = np.searchsorted(self._firsts, positions, side="right") - 1
        if self.rows is None:
            return Places(positions, self._row_nbytes)
        offsets = self.rows.offsets(positions) * self._row_nbytes
        begin = self.rows.starts[positions] * self._row_nbytes
        return Places(begin, int(offsets[-1]) // max(1, positions.size) + 1, offsets)

    def keep(self, places: Places, start: int, stop: int, raw: NDArray[Any]) -> None:
        """Keep samples `start` to `stop` of a batch; call `add` once the whole batch is kept."""
        here = places.begin[start:stop]
        if places.offsets is None:
            self._rows[here] = _flat(raw[start:stop]).reshape(here.size, self._row_nbytes)
        else:
            there = places.offsets[start : stop + 1]
            _copy_runs(self._bytes, _flat(raw), here, there[:-1], np.diff(there))

    def layout(self, like: DatasetLayout) -> DatasetLayout:
        """Return the layout of a dataset in memory: one row per sample, or as `rows` says."""
        # Values with a limit are checked again: those above it were kept, too.
        values = self._rows if like.limit is None else self._rows.view(like.raw_dtype)
        found = layout_of_values(like.file, like.stamp, like.path, values).changed(limit=like.limit)
        if self.rows is not None:
            return found.changed(spans=self.rows.starts)
        if self._firsts is None:
            return found
        segments, datasets = table_of(found)
        length = np.diff(self._firsts, append=self._size)
        row, zeros = np.arange(length.size), np.zeros(length.size, np.int32)
        columns = self._firsts, length, row, np.zeros_like(row), zeros, zeros
        return found.without_place(
            "files",
            shape=(self._size, *values.shape[1:]),
            segments=Segments.of(columns, segments.pieces),
            datasets=datasets,
        )

    def plan(self, positions: Int64s) -> SamplesPlan:
        """Plan for `copy` the samples at these positions; without the core."""
        rows = self.places(positions).begin if self.rows is None else self.rows.rows(positions)
        return SamplesPlan(rows, np.arange(rows.size), rows.size * self._row_nbytes, are_kept=True)

    def copy(self, plan: SamplesPlan, raw: NDArray[Any]) -> None:
        """Copy the planned rows to the memory of a batch."""
        out = _flat(raw[: plan.sample.size]).reshape(plan.sample.size, self._row_nbytes)
        np.take(self._rows, plan.sample, axis=0, out=out, mode="clip")


class HostCache(Residency):
    """The rows of all samples, in host memory. Safe to use from many threads.

    `MemoryError` is raised if the system refuses the memory for the columns.
    """

    def __init__(self, selection: Selection, columns: Sequence[KeptColumn]) -> None:
        super().__init__(selection, sum(column.nbytes for column in columns), "host")
        self.columns = columns
        for column in columns:
            column.allocate()

    def places(self, index: Int64s) -> list[Places]:
        """Return the places of a batch's samples in each column."""
        positions = self.ascending.positions(index)
        return [column.places(positions) for column in self.columns]


def open_host_cache(
    selection: Selection,
    row_nbytes: Sequence[int],
    rows: Sequence[Rows | Segments],
    cache_bytes: int | None,
    free_nbytes: int,
) -> HostCache | Budget:
    """Reserve memory for the rows of all samples; return the budget if there is not enough.

    All of it counts, although untouched pages cost nothing yet: an epoch touches them all.

    `row_nbytes` has, by column, the bytes of a row as read; `rows` has the rows of each sample, or
    the segments of a column whose neighbouring samples share a row. `cache_bytes` is the limit, by
    default half of `free_nbytes`, the memory that is free besides all that the reader needs.
    """
    if cache_bytes is None:
        cache_bytes = int(free_nbytes * _HOST_SHARE)
    nbytes = 0
    try:
        spans = {
            one: kept_rows(selection.ascending, one) for one in rows if isinstance(one, SpanRows)
        }
        columns = [
            KeptColumn(selection, size, spans.get(one) if isinstance(one, SpanRows) else one)
            for size, one in zip(row_nbytes, rows, strict=True)
        ]
        nbytes = sum(column.nbytes for column in columns)
        budget = Budget("host", nbytes, cache_bytes)
        if not budget.suffices:
            return budget
        if nbytes + selection.size > free_nbytes:  # `Residency` takes a byte per sample
            return Budget("host", nbytes, free_nbytes, ", all that is free")
        return HostCache(selection, columns)
    except MemoryError:
        return Budget("host", nbytes, cache_bytes, ": the system refused the memory")


def kept_rows(ascending: Selection, spans: SpanRows) -> SpanRows:
    """Return the rows of each sample within the concatenated rows of all samples."""
    is_all = ascending.is_prefix and ascending.size == spans.size
    if is_all and not isinstance(spans, StepSpans) and not spans.starts[:1].any():
        return SpanRows(spans.starts)
    return SpanRows(spans.offsets(ascending.samples(np.arange(ascending.size))))


def _copy_runs(
    to: NDArray[np.uint8],
    source: NDArray[np.uint8],
    to_begin: Int64s,
    source_begin: Int64s,
    nbytes: Int64s,
) -> None:
    """Copy runs of bytes; the caller has checked all places."""
    core = load_core()
    if core is not None:
        places = [np.ascontiguousarray(one, np.int64) for one in (to_begin, source_begin, nbytes)]
        core.copy_runs(address(to), address(source), *map(address, places), nbytes.size)
        return
    runs = zip(to_begin.tolist(), source_begin.tolist(), nbytes.tolist(), strict=True)
    for there, here, count in runs:
        to[there : there + count] = source[here : here + count]


def _flat(raw: NDArray[Any]) -> NDArray[np.uint8]:
    return raw.reshape(-1).view(np.uint8)


def gigabytes(nbytes: int) -> str:
    """Format a size in bytes for users."""
    return f"{nbytes / 1e9:.2g} GB" if nbytes < 1e12 else f"{nbytes / 1e12:.3g} TB"


class Damage:
    """Samples that were found damaged. Safe to use from many threads.

    `steps` has the rows of each sample, by field; `first_samples` has the first sample of each
    file, and the end. If damage `is_skipped`, batches are filled without the samples. Unless it
    `lasts`, no damage is remembered, as another epoch reads other parts of the rows.
    """

    def __init__(self, steps: Sequence[StepRows | SpanRows | None], first_samples: Int64s) -> None:
        self.lasts, self.is_skipped = True, False
        self._steps, self._first_samples = steps, first_samples[:-1]
        self._known: tuple[Int64s, dict[int, Skipped]] = NO_SAMPLES, {}

    def add(self, found: Mapping[int, Skipped]) -> None:
        """Remember damaged samples, by number."""
        known = {**self._known[1], **found}
        if self.lasts and len(known) <= _MOST_KNOWN:
            # Replaced as a whole; if two threads add at once, the samples of one may be lost.
            self._known = np.array(sorted(known), np.int64), known

    def left_out(self, samples: Int64s) -> tuple[Int64s, list[Skipped]]:
        """Split the samples of a batch into those to read, and those known to be damaged."""
        numbers, known = self._known
        if not numbers.size:
            return samples, []
        at = np.minimum(np.searchsorted(numbers, samples), numbers.size - 1)
        is_known = numbers[at] == samples
        return samples[~is_known], [known[one] for one in samples[is_known].tolist()]

    def forget(self) -> None:
        """Forget all of them, because a file has changed."""
        self._known = NO_SAMPLES, {}

    def locate(self, error: DamagedError, index: Int64s) -> None:
        """Make an error name the samples of a batch that it concerns, if they are known."""
        place, error.place = error.place, None
        if isinstance(place, Place):
            self.name(error, index[self._samples_at(place, index)])
        elif index.size == 1 and not error.samples:
            self.name(error, index)

    def name(self, error: DamagedError, samples: Int64s) -> None:
        """Make an error name these samples."""
        numbers, first = np.unique(samples), self._first_samples
        in_file = numbers - first[np.searchsorted(first, numbers, side="right") - 1]
        error.samples, error.file_samples = tuple(numbers.tolist()), tuple(in_file.tolist())

    def _samples_at(self, place: Place, index: Int64s) -> Int64s:
        """Return the positions in a batch of the samples that have any of the rows at `place`."""
        field, rows, are_runs = place
        steps = self._steps[field]
        if steps is None:
            return rows
        if isinstance(steps, StepRows):
            return rows // steps.size
        runs = rows if are_runs else np.searchsorted(steps.offsets(index), rows, "right") - 1
        return steps.having(runs, index)

    def __bool__(self) -> bool:
        return bool(self._known[1])


# --- memory for later batches ---------------------------------------------------------------------


def wanted_kept_nbytes(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: Sequence[Rows] = (),
    selected: float = 1.0,
    *,
    in_window: bool = False,
) -> list[int]:
    """Return, per field, the bytes worth keeping for later batches because they save work.

    `rows` has the rows of each field's samples; `selected` is the fraction of all samples that an
    epoch has. `in_window` assumes ``shuffle="window"``, whatever the options say.
    """
    several, wanted = list(layouts.values()), []
    in_window |= config.shuffle == "window"
    drawing = config.weights is not None, config.sampler is not None
    mixing = config.shuffle, config.bucket, config.batch_values, *drawing  # none: file order
    is_cached = keeps_chunks(config, layouts, rows)
    for number, layout in enumerate(several):
        nbytes, small_nbytes = kept_whole_nbytes(layout)
        if is_cached:
            nbytes = min(nbytes, (config.cache_bytes or nbytes) // len(several))
        elif nbytes > _KEPT_WHOLE_NBYTES:
            useful = 0
            if in_window:
                useful = _window_nbytes(config, layout, several)
            elif not any(mixing):
                reach = _reach(rows[number]) if rows else 0
                most = _window_nbytes(config, layout, several)
                useful = _in_order_nbytes(config, layout, reach, selected, most)
            nbytes = min(nbytes, useful)  # never more than all chunks
        elif nbytes + small_nbytes <= _KEPT_WHOLE_NBYTES:
            nbytes += small_nbytes
        wanted.append(nbytes)
    return wanted


def keeps_chunks(
    config: ReaderConfig,
    layouts: Mapping[str, DatasetLayout],
    rows: Sequence[Rows],
    granted_nbytes: int | None = None,
) -> bool:
    """Tell whether ``cache="host"`` keeps decoded chunks, each decoded once, instead of rows.

    It does if parts of rows are cropped; or if all rows are in encoded chunks that the core reads,
    and these fit into `granted_nbytes`, by default the limit of the cache.
    """
    several = list(layouts.values())
    if config.cache != "host" or any(layout.crop is not None for layout in several):
        return config.cache == "host"
    are_encoded = all(
        leaf.filters and leaf.chunk_shape and leaf.fallback_reason is None and not leaf.heaps
        for layout in several
        for leaf, _ in kinds_of(layout)
    )
    if not are_encoded or any(one is not None for one in rows) or far_names(config.files):
        return False
    if granted_nbytes is None:
        granted_nbytes = config.cache_bytes
    if granted_nbytes is None:
        granted_nbytes = int(free_memory()[0].nbytes * _HOST_SHARE)
    whole = sum(kept_whole_nbytes(layout).encoded for layout in several)
    return load_core() is not None and whole <= granted_nbytes


def _window_nbytes(
    config: ReaderConfig, layout: DatasetLayout, layouts: Sequence[DatasetLayout]
) -> int:
    from h5async.order.window import kept_nbytes

    nbytes = kept_nbytes(layout, layouts, config.window_bytes)
    least = min((leaf.chunk_nbytes for leaf, _ in kinds_of(layout) if leaf.filters), default=0)
    return nbytes + nbytes // max(1, least) * KEPT_OVERHEAD_NBYTES


def _in_order_nbytes(
    config: ReaderConfig, layout: DatasetLayout, reach: int, selected: float, most: int
) -> int:
    """Return the bytes for keeping chunks when samples come in order; at most `most`.

    It is for data that consecutive batches share, beyond the chunk or two that are kept in any
    case: groups of chunks that split the same rows, which several batches in flight may need; and
    chunks that multi-step samples reach back to (`_reach`). If several threads decode a group, it
    must stay until all have used it, so the groups of all batches in flight at once are kept.
    Returns 0 if `most` is too little to be useful.
    """
    wanted, threads = 0, max(1, config.filler_threads)
    spanned = config.batch_size / max(selected, 1e-9)  # rows of the dataset spanned by a batch
    at_once = max(2, min(config.prefetch, threads))
    for leaf, pieces in pieces_read(layout):
        unit = unit_nbytes(leaf) // max(1, leaf.num_pieces) * pieces
        if not unit or (pieces == 1 and not reach):
            continue
        samples = leaf.chunk_shape[leaf.sample_axis]
        is_aligned = samples == 1 or (
            leaf is layout and selected == 1 and config.batch_size % samples == 0
        )
        if is_aligned and not reach:
            continue  # no two batches share a group
        group = unit + pieces * KEPT_OVERHEAD_NBYTES
        least = 2 + -(-reach // samples)
        is_cut = spanned <= _ITEMS_OF_THREAD * threads * samples  # else one thread does a group
        new = int(at_once * spanned) if reach or is_cut else 0
        groups = min(_IN_ORDER_GROUPS + -(-(reach + new) // samples), most // group)
        if groups >= least:
            chunks = threads * (leaf.chunk_nbytes + KEPT_OVERHEAD_NBYTES)
            wanted = max(wanted, groups * group + chunks)
    return min(most, wanted)


def _reach(rows: Rows) -> int:
    """Return the number of rows whose chunks are kept until no later sample needs them.

    A row is one step of a sample, and later the previous step of another one; in between, all steps
    advance by the gap between the two.
    """
    if not isinstance(rows, StepRows) or rows.size < 2:
        return 0
    offsets = np.unique(rows.offsets)
    return int(offsets[-1] - offsets[0] + np.diff(offsets).max(initial=1) - 1)
