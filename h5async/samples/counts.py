"""Sums and scales the values of sparse rows, such as counts of genes in cells."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.core.structures import VALUE_KINDS

Float64s = NDArray[np.float64]


def row_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> Float64s:
    """Return the sum of each row: float64 (rows,).

    Row i has the values ``offsets[i]`` to ``offsets[i + 1]``.
    """
    core, rows = load_core(), offsets.size - 1
    values, kind = _countable(values)
    if core is None:
        row = np.repeat(np.arange(rows), np.diff(offsets))
        found: Float64s = np.bincount(row, values.astype(np.float64), rows).astype(np.float64)
        return found
    sums = np.empty(rows)
    core.sum_rows(address(values), address(offsets), address(sums), rows, kind)
    return sums


def scaled_rows(
    values: NDArray[Any],
    offsets: NDArray[np.int64],
    totals: Float64s | None,
    target_sum: float | None,
    log1p: bool,
) -> NDArray[np.float32]:
    """Return values times `target_sum` by the total of their row, and log(1 + value) of that.

    A total of 0 counts as 1. They are computed in double precision, and rounded to float32.
    """
    core, rows = load_core(), offsets.size - 1
    divisors = np.ones(rows)
    if totals is not None and target_sum is not None:
        divisors = np.where(totals == 0, 1.0, totals) / target_sum
    values, kind = _countable(values)
    if core is None:
        scaled = values.astype(np.float64) / np.repeat(divisors, np.diff(offsets))
        with np.errstate(divide="ignore", invalid="ignore"):
            return (np.log1p(scaled) if log1p else scaled).astype(np.float32)
    out = np.empty(values.size, np.float32)
    where = map(address, (values, offsets, divisors, out))
    core.scale_rows(*where, rows, kind, log1p)
    return out


def _countable(values: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Return values of a dtype that the core takes, and its number."""
    kind = VALUE_KINDS.get(values.dtype)
    if kind is None or not values.flags.c_contiguous or not values.flags.aligned:
        values = np.ascontiguousarray(values, np.float64)
        kind = VALUE_KINDS[values.dtype]
    return values, kind
