"""Computes count, mean, spread and range of groups of values. Pure.

Arrays enter; `Moments` leave, which add up to those of all values. Blocks are measured in two
passes, so that no digits cancel, by the compiled core without the GIL; they add up as in Chan,
Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import Core, address, load_core
from h5async.core.structures import VALUE_KINDS
from h5async.samples.sparse import Csr

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Moments:
    """Numbers of `groups` of values, each an array (groups,).

    `count` excludes NaN, of which there are `nan`; `fill` are those equal to a fill value.
    `squares` is the sum of squared differences from `mean`.
    """

    count: Counts
    nan: Counts
    fill: Counts
    mean: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def empty(cls, groups: int) -> Moments:
        """Return the moments of no values."""
        count, nan, fill = np.zeros((3, groups), np.int64)
        mean, squares = np.zeros((2, groups))
        return cls(
            count, nan, fill, mean, squares, np.full(groups, np.inf), np.full(groups, -np.inf)
        )

    def add(self, other: Moments) -> None:
        """Add other values of the same groups."""
        total = self.count + other.count
        share = other.count / np.maximum(total, 1)
        gap = other.mean - self.mean
        self.squares += other.squares + gap * gap * (self.count * share)
        self.mean += gap * share
        self.count[...] = total
        self.nan += other.nan
        self.fill += other.fill
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)

    @property
    def std(self) -> Floats:
        """The standard deviation of all values (`ddof` 0, as NumPy's default)."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


def moments_of(values: NDArray[Any], fill: Any = None) -> Moments:
    """Return the moments of numbers (outer, groups, inner), of the groups in the middle.

    `fill` is the value to count in `Moments.fill`; None: nothing is.
    """
    core = load_core()
    if core is not None:
        values = values.astype(np.float32) if values.dtype == np.float16 else values
        return _by_core(core, np.ascontiguousarray(values), fill)
    with np.errstate(all="ignore"):  # infinite values have an infinite mean
        return _by_numpy(values, fill)


def _by_core(core: Core, values: NDArray[Any], fill: Any) -> Moments:
    found = np.zeros((values.shape[1], len(Moments.__slots__)))
    found[:, 5:] = np.inf, -np.inf
    shape, equal = np.array(values.shape, np.int64), np.array(fill, np.float64)  # None: NaN
    kind = VALUE_KINDS[values.dtype]
    core.measure(address(values), address(shape), address(equal), address(found), kind)
    counts, numbers = found[:, :3].astype(np.int64), found[:, 3:]
    return Moments(*counts.T.copy(), *numbers.T.copy())


def _by_numpy(values: NDArray[Any], fill: Any) -> Moments:
    x = np.array(values.swapaxes(0, 1), np.float64, order="C").reshape(values.shape[1], -1)
    is_nan, fills = np.isnan(x), np.zeros(len(x), np.int64)
    nan = is_nan.sum(axis=1)
    count = x.shape[1] - nan
    if fill is not None:
        fills = (x == np.float64(fill)).sum(axis=1)
    low = x.min(axis=1, where=~is_nan, initial=np.inf)
    high = x.max(axis=1, where=~is_nan, initial=-np.inf)
    x[is_nan] = 0  # (sums with `where` would not be pairwise)
    mean = x.sum(axis=1) / np.maximum(count, 1)
    x -= mean[:, np.newaxis]
    x[is_nan] = 0
    return Moments(count, nan, fills, mean, np.square(x, out=x).sum(axis=1), low, high)


def moments_of_rows(rows: Csr, *, by_column: bool) -> Moments:
    """Return the moments of sparse rows, zeros included: of each column, or of all values."""
    width = rows.shape[1] if by_column else 1
    total = rows.shape[0] * rows.shape[1] // max(1, width)
    if not by_column:
        found = moments_of(rows.data.reshape(1, 1, -1))
    else:
        found = _of_columns(rows.data.astype(np.float64), rows.indices, width)
    zeros = Moments.empty(width)
    zeros.count[...] = total - found.count - found.nan
    zeros.low[zeros.count > 0] = zeros.high[zeros.count > 0] = 0
    found.add(zeros)
    return found


def _of_columns(values: Floats, columns: NDArray[Any], width: int) -> Moments:
    is_nan = np.isnan(values)
    nan = np.bincount(columns[is_nan], minlength=width)
    values, columns = values[~is_nan], columns[~is_nan]
    found = Moments.empty(width)
    found.nan[...] = nan
    found.count[...] = np.bincount(columns, minlength=width)
    with np.errstate(all="ignore"):
        sums = np.bincount(columns, weights=values, minlength=width)
        found.mean[...] = sums / np.maximum(found.count, 1)
        gaps = values - found.mean[columns]
        found.squares[...] = np.bincount(columns, weights=gaps * gaps, minlength=width)
    np.minimum.at(found.low, columns, values)
    np.maximum.at(found.high, columns, values)
    return found
