"""Keeps rows in memory for later epochs.

Rows that were read enter; they leave again when their samples come next. Where a dataset fits a
budget (`cache="host"` or `"device"`), the rows of each batch are kept, as read, when it first comes
by. A batch of which every sample was kept is gathered, not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.order.selection import Selection
from h5async.plan.records import GatherPlan, Int64s
from h5async.system.freememory import free_memory

_HOST_SHARE = 0.5  # of what is free, where no budget is given


class Residency:
    """Which samples are in memory. Safe to use from many threads: samples come, or all go at once.

    Parameters
    ----------
    selection
        Those that may be.
    nbytes
        Memory of all of them.
    where
        ``"host"`` or ``"device"``.

    Attributes
    ----------
    generation
        How often all samples were forgotten.
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

        `generation`: when they were read; what was forgotten meanwhile is not noted.
        """
        if generation is None or generation == self.generation:
            self._is_kept[self._selection.positions(index)] = True

    def forget(self) -> None:
        """Forget all samples: their file has changed."""
        self.generation += 1
        self._is_kept = np.zeros_like(self._is_kept)  # what is noted meanwhile goes with the old

    def __str__(self) -> str:
        """Say how much is kept."""
        share = 100 * np.count_nonzero(self._is_kept) / max(1, self._is_kept.size)
        return f"{self._where}, {share:.0f} % of the samples, {_gb(self._nbytes)} for all"


class Budget(NamedTuple):
    """What a cache would take, and what it may.

    Attributes
    ----------
    where
        ``"host"`` or ``"device"``.
    nbytes
        Bytes of the rows of all samples and fields.
    limit_nbytes
        What they may take: the option ``cache_bytes``, or a share of the memory that is there.
    whose
        What sets the limit.
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
        """Say why nothing is kept."""
        return (
            f"none: {_gb(self.nbytes)} do not fit into {_gb(self.limit_nbytes)} on the"
            f" {self.where}{self.whose}"
        )


class HostCache(Residency):
    """The rows of all samples, in the memory of this machine. Safe to use from many threads.

    Parameters
    ----------
    selection
        The samples.
    row_nbytes
        Bytes of a row of each field, as read.
    """

    def __init__(self, selection: Selection, row_nbytes: Sequence[int]) -> None:
        super().__init__(selection, selection.size * sum(row_nbytes), "host")
        self._rows = [np.empty((selection.size, nbytes), np.uint8) for nbytes in row_nbytes]

    def plans(self, index: Int64s) -> list[GatherPlan]:
        """Return how each field of a batch comes out of memory; all its samples are there."""
        found = self._selection.positions(index)
        return [GatherPlan(found, rows.shape[1]) for rows in self._rows]

    def keep(self, field: int, index: Int64s, raw: NDArray[Any]) -> None:
        """Keep rows of one field; whoever has kept all of a batch calls `add`."""
        rows = self._rows[field]
        rows[self._selection.positions(index)] = _as_bytes(raw, rows.shape[1])

    def gather(
        self, field: int, plan: GatherPlan, start: int, stop: int, raw: NDArray[Any]
    ) -> None:
        """Bring items `start` to `stop` of a plan to a batch of shape (batch, *raw_row)."""
        out = _as_bytes(raw[start:stop], plan.row_nbytes)
        np.take(self._rows[field], plan.sample[start:stop], axis=0, out=out, mode="clip")


def open_host_cache(
    selection: Selection,
    row_nbytes: Sequence[int],
    cache_bytes: int | None,
    free_nbytes: int | None = None,
) -> HostCache | Budget:
    """Reserve memory for the rows of all samples, where there is as much.

    All of it counts, though pages that were never touched cost nothing yet: an epoch touches them.

    Parameters
    ----------
    selection, row_nbytes
        As in `HostCache`.
    cache_bytes
        What they may take; None: half of what is free.
    free_nbytes
        What is free beside all that the reader needs; None: what is free now.

    Returns
    -------
    HostCache or Budget
        The budget, where it does not suffice.
    """
    if free_nbytes is None:
        free_nbytes = free_memory()[0].nbytes
    if cache_bytes is None:
        cache_bytes = int(free_nbytes * _HOST_SHARE)
    nbytes = selection.size * sum(row_nbytes)
    budget = Budget("host", nbytes, cache_bytes)
    if not budget.suffices:
        return budget
    if nbytes + selection.size > free_nbytes:  # `Residency` takes a byte for each sample
        return Budget("host", nbytes, free_nbytes, ", which is what is free")
    try:
        return HostCache(selection, row_nbytes)
    except MemoryError:
        return Budget("host", nbytes, cache_bytes, ": the system does not give as much")


def _as_bytes(raw: NDArray[Any], row_nbytes: int) -> NDArray[np.uint8]:
    return raw.reshape(-1).view(np.uint8).reshape(len(raw), row_nbytes)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2g} GB" if nbytes < 1e12 else f"{nbytes / 1e12:.3g} TB"
