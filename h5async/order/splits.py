"""Splits samples into disjoint parts by a keyed permutation: the same parts on every machine.

What is split are *units*: samples, or groups of samples that stay together. The units of each class
are permuted, and those of a class are cut where the count of their samples crosses the share of a
part. So parts are complete and disjoint, and each has its share of each class, up to the size of a
unit. Whether a cut is rounded up or down goes by a sequence of little discrepancy over the classes,
so that each part has about its share of all samples, too.

The parts are what users rely on to repeat a run: changing them is a breaking change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.order.permutation import permute

Int64s = NDArray[np.int64]

_GOLDEN = 0.6180339887498949  # multiples of which are spread evenly, modulo 1
_ROUNDING = 1e-9


def part_of(
    number: int,
    shares: Sequence[float],
    num_samples: int,
    seed: int,
    groups: NDArray[Any] | None = None,
    classes: NDArray[Any] | None = None,
) -> Int64s:
    """Return the samples of one part, ascending.

    Parameters
    ----------
    number
        Of the part.
    shares
        Of all parts; they sum up to 1 at most.
    num_samples
        Samples to be split.
    seed
        Any integer.
    groups
        (num_samples,), of any type that NumPy sorts: samples of one value stay together.
    classes
        Likewise: each part has its share of each value; a group has the value of most of its
        samples, the smallest of several.

    Returns
    -------
    numpy.ndarray
        int64 (n,).
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
    # A unit belongs to the part in which its middle falls: twice that, to stay with integers.
    middle = 2 * (np.cumsum(sizes[order]) - before[kinds]) - sizes[order]
    first, last = (2 * _cut(share, kind_sizes)[kinds] for share in (begin, end))
    is_in = np.zeros(count, np.bool_)
    is_in[order] = (middle > first) & (middle <= last)
    return np.flatnonzero(is_in[unit])


def _edge(shares: Sequence[float]) -> float:
    """Return the sum of some shares; what rounding takes from all of them is put back."""
    found = sum(shares)
    return found if found < 1 - _ROUNDING else 1


def _cut(share: float, sizes: Int64s) -> Int64s:
    """Return how many samples of each class a share is; more, or as many, for a larger share."""
    offset = (0.5 + _GOLDEN * np.arange(sizes.size)) % 1
    return np.minimum(np.floor(share * sizes + offset).astype(np.int64), sizes)


def _numbered(values: NDArray[Any] | None, num_samples: int) -> tuple[Int64s, int]:
    """Return the number of each sample's value among all values, sorted, and how many there are."""
    if values is None:
        return np.arange(num_samples), num_samples
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64), found.size


def _most_frequent(unit: Int64s, count: int, kind: Int64s) -> Int64s:
    """Return the kind that most samples of each unit have."""
    kinds = int(kind.max(initial=0)) + 1
    pairs, times = np.unique(unit * kinds + kind, return_counts=True)
    units, kind = np.divmod(pairs, kinds)
    order = np.lexsort((kind, -times, units))  # of each unit, the most frequent comes first
    first = np.searchsorted(units, np.arange(count))
    return kind[order][first]
