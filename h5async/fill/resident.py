"""Keeps rows in memory for later epochs.

Rows that were read enter; they leave again when their samples come next. If a dataset fits a budget
(`cache="host"` or `"device"`), the rows of each batch are kept, as read, on first use; of ragged
and sparse fields, the values of samples. If every sample of a batch was kept, it is gathered, not
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.order.selection import Selection
from h5async.order.spans import SpanRows
from h5async.plan.records import GatherPlan, GatherRunsPlan, Int64s
from h5async.system.freememory import free_memory

_HOST_SHARE = 0.5  # of free memory, if no budget is given


class Residency:
    """The samples that are in memory, until all are forgotten. Safe to use from many threads.

    `nbytes` is the memory of all samples of the selection; `where` is ``"host"`` or ``"device"``;
    `generation` is the number of times that all samples were forgotten.
    """

    def __init__(self, selection: Selection, nbytes: int, where: str) -> None:
        self.generation = 0
        self._selection = selection.ascending
        self._is_kept = np.zeros(selection.size, np.bool_)
        self._nbytes = nbytes
        self._where = where

    def has(self, index: Int64s) -> bool:
        """Tell whether all of some samples are there."""
        return bool(self._is_kept[self._selection.positions(index)].all())

    def add(self, index: Int64s, generation: int | None = None) -> None:
        """Note samples whose rows, of all fields, are there now.

        `generation` is that of the time when they were read; if it has passed, they are not noted.
        """
        if generation is None or generation == self.generation:
            self._is_kept[self._selection.positions(index)] = True

    def forget(self) -> None:
        """Forget all samples: their file has changed."""
        self.generation += 1
        self._is_kept = np.zeros_like(self._is_kept)  # what is noted meanwhile is lost

    def __str__(self) -> str:
        share = 100 * np.count_nonzero(self._is_kept) / max(1, self._is_kept.size)
        return f"{self._where}, {share:.0f} % of the samples, {_gb(self._nbytes)} for all"


class Budget(NamedTuple):
    """The bytes that a cache of all rows needs, and its limit.

    `where` is ``"host"`` or ``"device"``. The limit is the option ``cache_bytes``, or a share of
    free memory; `whose` says what sets it.
    """

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
            f"none: {_gb(self.nbytes)} do not fit into {_gb(self.limit_nbytes)} on the"
            f" {self.where}{self.whose}"
        )


class _KeptRows:
    """The rows of a column in which each sample is one row."""

    def __init__(self, size: int, row_nbytes: int) -> None:
        self._rows = np.empty((size, row_nbytes), np.uint8)

    def plan(self, index: Int64s, positions: Int64s) -> GatherPlan:
        return GatherPlan(positions, self._rows.shape[1])

    def keep(self, plan: Any, start: int, stop: int, raw: NDArray[Any]) -> None:
        rows = _as_bytes(raw[start:stop], self._rows.shape[1])
        self._rows[plan.sample[start:stop]] = rows

    def gather(self, plan: Any, start: int, stop: int, raw: NDArray[Any]) -> None:
        out = _as_bytes(raw[start:stop], plan.item_nbytes)
        np.take(self._rows, plan.sample[start:stop], axis=0, out=out, mode="clip")


class _KeptRuns:
    """The concatenated rows of a column in which samples are runs of any length.

    `starts`, int64 (samples + 1,), has the rows of each sample, counted from any number; `rows` are
    the rows of each sample in the dataset.
    """

    def __init__(self, starts: Int64s, rows: SpanRows, row_nbytes: int) -> None:
        self._starts, self._spans, self._row_nbytes = starts, rows, row_nbytes
        self._rows = np.empty(int(starts[-1] - starts[0]) * row_nbytes, np.uint8)

    def plan(self, index: Int64s, positions: Int64s) -> GatherRunsPlan:
        begin = (self._starts[positions] - self._starts[0]) * self._row_nbytes
        return GatherRunsPlan(begin, self._spans.offsets(index) * self._row_nbytes)

    def keep(self, plan: Any, start: int, stop: int, raw: NDArray[Any]) -> None:
        begins = plan.begin[start:stop], plan.offsets[start:stop]
        _copy_runs(self._rows, _flat(raw), *begins, np.diff(plan.offsets[start : stop + 1]))

    def gather(self, plan: Any, start: int, stop: int, raw: NDArray[Any]) -> None:
        begins = plan.offsets[start:stop], plan.begin[start:stop]
        _copy_runs(_flat(raw), self._rows, *begins, np.diff(plan.offsets[start : stop + 1]))


class HostCache(Residency):
    """The rows of all samples, in the memory of this machine. Safe to use from many threads.

    Parameters
    ----------
    selection
        The samples.
    row_nbytes
        Bytes of a row of each column, as read.
    spans
        By column: the rows of each sample if their number differs. Empty if it never does.
    """

    def __init__(
        self,
        selection: Selection,
        row_nbytes: Sequence[int],
        spans: Sequence[SpanRows | None] = (),
    ) -> None:
        starts = _starts(selection, spans)
        super().__init__(selection, _nbytes(selection, row_nbytes, spans, starts), "host")
        self._columns: list[_KeptRows | _KeptRuns] = [
            _KeptRows(selection.size, nbytes)
            if one is None
            else _KeptRuns(starts[one], one, nbytes)
            for nbytes, one in zip(row_nbytes, spans or [None] * len(row_nbytes), strict=True)
        ]

    def plans(self, index: Int64s) -> list[GatherPlan | GatherRunsPlan]:
        """Return how each column of a batch goes to memory, or comes out of it."""
        positions = self._selection.positions(index)
        return [column.plan(index, positions) for column in self._columns]

    def keep(
        self,
        column: int,
        plan: GatherPlan | GatherRunsPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
    ) -> None:
        """Keep items `start` to `stop` of a plan; call `add` once all of a batch are kept."""
        self._columns[column].keep(plan, start, stop, raw)

    def gather(
        self,
        column: int,
        plan: GatherPlan | GatherRunsPlan,
        start: int,
        stop: int,
        raw: NDArray[Any],
    ) -> None:
        """Copy items `start` to `stop` of a plan, all of them kept, to the memory of a batch."""
        self._columns[column].gather(plan, start, stop, raw)


def open_host_cache(
    selection: Selection,
    row_nbytes: Sequence[int],
    cache_bytes: int | None,
    free_nbytes: int | None = None,
    spans: Sequence[SpanRows | None] = (),
) -> HostCache | Budget:
    """Reserve memory for the rows of all samples, if there is enough; else return the budget.

    All of it counts, though pages that were never touched cost nothing yet: an epoch touches them.

    Parameters
    ----------
    selection, row_nbytes, spans
        As for `HostCache`.
    cache_bytes
        The limit; None: half of free memory.
    free_nbytes
        Free memory beside all that the reader needs; None: memory that is free now.
    """
    if free_nbytes is None:
        free_nbytes = free_memory()[0].nbytes
    if cache_bytes is None:
        cache_bytes = int(free_nbytes * _HOST_SHARE)
    try:
        starts = _starts(selection, spans)
    except MemoryError:
        return Budget("host", 0, cache_bytes, ": the system does not give as much")
    nbytes = _nbytes(selection, row_nbytes, spans, starts)
    budget = Budget("host", nbytes, cache_bytes)
    if not budget.suffices:
        return budget
    if nbytes + selection.size > free_nbytes:  # `Residency` takes a byte per sample
        return Budget("host", nbytes, free_nbytes, ", which is what is free")
    try:
        return HostCache(selection, row_nbytes, spans)
    except MemoryError:
        return Budget("host", nbytes, cache_bytes, ": the system does not give as much")


def _starts(selection: Selection, spans: Sequence[SpanRows | None]) -> dict[SpanRows, Int64s]:
    """Return where the rows of each sample of a selection begin, in ascending order."""
    found: dict[SpanRows, Int64s] = {}
    ascending = selection.ascending
    for one in spans:
        if one is None or one in found:
            continue
        if ascending.is_prefix and ascending.size == one.size:
            found[one] = one.starts
        else:
            found[one] = one.offsets(ascending.samples(np.arange(selection.size)))
    return found


def _nbytes(
    selection: Selection,
    row_nbytes: Sequence[int],
    spans: Sequence[SpanRows | None],
    starts: Mapping[SpanRows, Int64s],
) -> int:
    """Return the bytes of the rows of all samples."""
    total = 0
    for nbytes, one in zip(row_nbytes, spans or [None] * len(row_nbytes), strict=True):
        rows = selection.size if one is None else int(starts[one][-1] - starts[one][0])
        total += rows * nbytes
    return total


def _copy_runs(
    to: NDArray[np.uint8],
    source: NDArray[np.uint8],
    to_begin: Int64s,
    source_begin: Int64s,
    nbytes: Int64s,
) -> None:
    """Copy runs of bytes, from and to places that the caller has checked."""
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


def _as_bytes(raw: NDArray[Any], row_nbytes: int) -> NDArray[np.uint8]:
    return raw.reshape(-1).view(np.uint8).reshape(len(raw), row_nbytes)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2g} GB" if nbytes < 1e12 else f"{nbytes / 1e12:.3g} TB"
