"""Computes count, mean, spread and range of groups of values. Pure.

Arrays enter; `Moments` leave, which add up to those of all values. Each block is small enough for a
core's cache and is measured in two passes, so that no digits cancel; blocks are combined as in
Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.samples.sparse import Csr

_BLOCK_VALUES = 1 << 16  # as float64, half of a usual L2 cache
_MOST_AT_ONCE = 2048  # groups whose values alternate
_FEW = 256  # groups: of fewer, values of each are laid side by side

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

    def of_groups(self, groups: slice) -> Moments:
        """Return the moments of some groups: views."""
        return Moments(*(getattr(self, name)[groups] for name in self.__slots__))

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
    found = Moments.empty(values.shape[1])
    with np.errstate(all="ignore"):  # infinite values have an infinite mean
        _add(values, fill, found, np.empty(min(values.size, _BLOCK_VALUES)))
    return found


def _add(values: NDArray[Any], fill: Any, found: Moments, scratch: Floats) -> None:
    """Add values to moments, block by block."""
    outer, groups, inner = values.shape
    if values.size <= _BLOCK_VALUES:
        if values.size:
            found.add(_of_block(values, fill, scratch[: values.size]))
        return
    # Long rows of groups are cut first: else each block would update all of the moments.
    is_wide = groups > _MOST_AT_ONCE or outer == inner == 1
    axis = 1 if is_wide else 0 if outer > 1 else 2
    half = values.shape[axis] // 2
    for part in (slice(None, half), slice(half, None)):
        inside = found.of_groups(part) if axis == 1 else found
        _add(values[(slice(None),) * axis + (part,)], fill, inside, scratch)


def _of_block(values: NDArray[Any], fill: Any, scratch: Floats) -> Moments:
    outer, groups, inner = values.shape
    nan = np.zeros(groups, np.int64)
    if inner == 1 and groups > _FEW:
        x, over = scratch.reshape(outer, groups), 0
        np.copyto(x, values[:, :, 0])
    else:
        x, over = scratch.reshape(groups, outer * inner), 1
        np.copyto(x.reshape(groups, outer, inner), values.swapaxes(0, 1))
    fills = nan if fill is None else _counts(x == np.float64(fill), over)
    sums, count = x.sum(axis=over), np.full(groups, outer * inner)
    low, high = x.min(axis=over), x.max(axis=over)
    if np.isnan(sums).any() and (is_nan := np.isnan(x)).any():
        nan = _counts(is_nan, over)
        count -= nan
        low, high = (f.reduce(x, axis=over) for f in (np.fmin, np.fmax))
        low[count == 0], high[count == 0] = np.inf, -np.inf
        sums = x.sum(axis=over, where=~is_nan)
    mean = sums / np.maximum(count, 1)
    x -= mean if over == 0 else mean[:, np.newaxis]
    if nan.any():
        x[is_nan] = 0
    np.multiply(x, x, out=x)
    return Moments(count, nan, fills, mean, x.sum(axis=over), low, high)


def _counts(flags: NDArray[np.bool_], over: int) -> Counts:
    """Return ``flags.sum(axis=over)``; for few rows faster."""
    if over == 1:
        return np.array([np.count_nonzero(row) for row in flags])
    return np.asarray(flags.sum(axis=over))


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
