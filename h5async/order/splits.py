"""Splits samples into disjoint parts by a keyed permutation, the same on every machine.

*Units* are split: samples, or groups of samples that stay together. The units of each class are
permuted, then cut where their cumulative number of samples crosses a part's share. So parts are
complete and disjoint, and each has its share of each class, up to the size of a unit. A
low-discrepancy sequence over the classes rounds cuts up or down, so that each part also has about
its share of all samples.

Users rely on these parts to repeat a run: changing them is a breaking change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.order.permutation import permute

Int64s = NDArray[np.int64]

_GOLDEN = 0.6180339887498949  # its multiples are spread evenly, modulo 1
_ROUNDING = 1e-9


def part_of(
    number: int,
    shares: Sequence[float],
    num_samples: int,
    seed: int,
    groups: NDArray[Any] | None = None,
    classes: NDArray[Any] | None = None,
) -> Int64s:
    """Return the samples of part `number`, int64 (n,), ascending.

    Parameters
    ----------
    shares
        Shares of all parts; their sum is at most 1.
    groups
        (num_samples,), of any sortable dtype: equal values stay together.
    classes
        (num_samples,), likewise: each part has its share of each value. A group has the value of
        most of its samples; ties go to the smallest.
    """
    begin, end = _edge(shares[:number]), _edge(shares[: number + 1])
    if groups is None and classes is None:
        cuts = [int(_cut(share, np.array([num_samples]))[0]) for share in (begin, end)]
        return np.sort(permute(np.arange(*cuts), num_samples, seed, 0))
    unit, count = _numbered(groups, num_samples)
    kind, _ = _numbered(classes, 1 if classes is None else num_samples)
    kind = np.broadcast_to(kind, num_samples)
    kind_of_unit = kind if groups is None else _most_frequent(unit, count, kind)
    permuted = permute(np.arange(count), count, seed, 0) if count else np.zeros(0, np.int64)
    order = permuted[np.argsort(kind_of_unit[permuted], kind="stable")]
    sizes = np.bincount(unit, minlength=count)
    kind_sizes = np.bincount(kind_of_unit, sizes).astype(np.int64)
    before, kinds = np.cumsum(kind_sizes) - kind_sizes, kind_of_unit[order]
    # A unit belongs to the part that holds its middle (doubled here, to stay with integers).
    middle = 2 * (np.cumsum(sizes[order]) - before[kinds]) - sizes[order]
    first, last = (2 * _cut(share, kind_sizes)[kinds] for share in (begin, end))
    is_in = np.zeros(count, np.bool_)
    is_in[order] = (middle > first) & (middle <= last)
    return np.flatnonzero(is_in[unit])


def _edge(shares: Sequence[float]) -> float:
    """Return the sum of some shares, and exactly 1 if only rounding keeps it below."""
    found = sum(shares)
    return found if found < 1 - _ROUNDING else 1


def _cut(share: float, sizes: Int64s) -> Int64s:
    """Return a share's number of samples per class; it never falls as the share grows."""
    offset = (0.5 + _GOLDEN * np.arange(sizes.size)) % 1
    return np.minimum(np.floor(share * sizes + offset).astype(np.int64), sizes)


def _numbered(values: NDArray[Any] | None, num_samples: int) -> tuple[Int64s, int]:
    """Return each sample's value as a number among all sorted values, and the number of values."""
    if values is None:
        return np.arange(num_samples), num_samples
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64), found.size


def _most_frequent(unit: Int64s, count: int, kind: Int64s) -> Int64s:
    kinds = int(kind.max(initial=0)) + 1
    pairs, times = np.unique(unit * kinds + kind, return_counts=True)
    units, kind = np.divmod(pairs, kinds)
    order = np.lexsort((kind, -times, units))  # the most frequent of each unit comes first
    first = np.searchsorted(units, np.arange(count))
    return kind[order][first]
