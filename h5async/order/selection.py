"""Selects the samples of an epoch; permutes, draws and splits samples by keys.

Selected samples are counted from 0 by *positions*; a `Selection` maps these to the sample numbers
of the dataset. `permute` maps positions in an order to the numbers there.

The permutation is the generalized Feistel network of J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002). Numbers below ``a * b`` are pairs; in turn, each half is
shifted by a keyed hash of the other, modulo `a` or `b`. ``a * b`` exceeds the number of samples by
less than `a`; results that fall outside are permuted again. Four rounds suffice with random
functions (M. Luby, C. Rackoff, SIAM J. Comput. 17, 1988); here are six, of two multiplications
each, because the order must look random but need not resist an adversary. A network over a tiny
domain does not reach every permutation, so up to `SORTED_UP_TO` samples are shuffled by sorting
keyed hashes instead.

`part_of` splits *units*: samples, or groups of samples that stay together. The units of each class
are permuted, then cut where their cumulative number of samples crosses a part's share. So parts are
complete and disjoint, and each has its share of each class, up to the size of a unit. A
low-discrepancy sequence over the classes rounds cuts up or down, so that each part also has about
its share of all samples.

With weights, samples are drawn with replacement instead. A draw takes constant time with an alias
table (A. J. Walker, "An Efficient Method for Generating Discrete Random Variables with General
Distributions", ACM Trans. Math. Softw. 3, 1977), made in linear time (M. D. Vose, IEEE Trans.
Softw. Eng. 17, 1991), here by whole arrays. Random numbers come from a counter, the position of the
draw (Philox 4x64: J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). So
a draw depends on seed, epoch and position alone.

Users rely on this order, and on these parts, to repeat a run: changing them is a breaking change.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Selection:
    """Some samples of a dataset, in an order. Positions and sample numbers are int64.

    Position p below `size` is sample ``start + step * p`` or, if they are not equidistant,
    ``numbers[p]``: C-contiguous.
    """

    start: int
    step: int
    size: int
    numbers: Int64s | None = None

    @classmethod
    def of_range(cls, samples: range) -> Selection:
        """Return a selection of a range."""
        return cls(samples.start, samples.step, len(samples))

    @classmethod
    def of_numbers(cls, numbers: Int64s) -> Selection:
        """Return a selection of these samples, in their order; the array must not change later."""
        if numbers.size < 2:
            return cls(int(numbers[0]) if numbers.size else 0, 1, numbers.size)
        step = int(numbers[1] - numbers[0])
        # The last number nearly always shows if these are not equidistant.
        is_end = numbers[-1] - numbers[0] == step * (numbers.size - 1)
        if step and is_end and (np.diff(numbers) == step).all():
            return cls(int(numbers[0]), step, numbers.size)
        return cls(0, 1, numbers.size, np.ascontiguousarray(numbers))

    @property
    def is_prefix(self) -> bool:
        """Whether positions are sample numbers."""
        return self.numbers is None and (self.start, self.step) == (0, 1)

    @property
    def is_range(self) -> bool:
        """Whether the samples are equidistant."""
        return self.numbers is None

    def samples(self, positions: Int64s) -> Int64s:
        """Return the sample numbers at positions, as a new array or `positions` itself."""
        if self.numbers is not None:
            return self.numbers[positions]
        return positions if self.is_prefix else self.start + self.step * positions

    @property
    def ascending(self) -> Selection:
        """The same samples in ascending order."""
        return self if self._sorted is None else self._sorted

    @functools.cached_property
    def _sorted(self) -> Selection | None:
        """The same in ascending order; None (to avoid a cycle) if this one is ascending."""
        if self.numbers is not None:
            if (self.numbers[1:] >= self.numbers[:-1]).all():
                return None
            return Selection.of_numbers(np.sort(self.numbers))
        if self.step > 0:
            return None
        return Selection(self.start + self.step * (self.size - 1), -self.step, self.size)

    @property
    def has_repeats(self) -> bool:
        """Whether a sample is selected more than once."""
        numbers = self.ascending.numbers
        return numbers is not None and bool((numbers[1:] == numbers[:-1]).any())

    def positions(self, samples: Int64s) -> Int64s:
        """Return the positions of sample numbers, which must be in this ascending selection."""
        if self.numbers is not None:
            return np.searchsorted(self.numbers, samples)
        return samples if self.is_prefix else (samples - self.start) // self.step

    def within(self, possible: Selection, num_samples: int) -> Selection:
        """Return the samples that are also in `possible`, in this order.

        `num_samples` is the size of the dataset; if `possible` has all of it, return self.
        """
        if possible.is_prefix and possible.size == num_samples:
            return self
        numbers = self.samples(np.arange(self.size, dtype=np.int64))
        return Selection.of_numbers(numbers[possible.are_in(numbers)])

    def are_in(self, samples: Int64s) -> NDArray[np.bool_]:
        """Tell for each sample number whether it is selected."""
        if not self.size:
            return np.zeros(samples.shape, np.bool_)
        ascending = self.ascending
        at = ascending.positions(samples)
        inside = np.clip(at, 0, self.size - 1)
        is_in: NDArray[np.bool_] = ascending.samples(inside) == samples
        is_in &= at == inside
        return is_in

    def bounds(self, bounds: Int64s) -> Int64s:
        """Return where units begin, in positions of this ascending selection.

        `bounds` is int64 (n + 1,), ascending: unit i is samples ``bounds[i]`` to ``bounds[i + 1]``.
        The result, from 0 to `size`, leaves out units without a selected sample.
        """
        if self.is_prefix and self.size == bounds[-1]:
            return bounds
        return np.unique(self.first_from(bounds)) if self.size else np.zeros(1, np.int64)

    def first_from(self, samples: Int64s) -> Int64s:
        """Return the first position in this ascending selection at or after each of `samples`."""
        if self.numbers is not None:
            return np.searchsorted(self.numbers, samples)
        return np.clip(-((self.start - samples) // self.step), 0, self.size)

    def digest(self) -> str:
        """Return a short text that only equal selections share."""
        if self.numbers is None:
            step = 1 if self.size == 1 else self.step
            return f"{self.start}:{step}:{self.size}"
        return hashlib.blake2b(self.numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()


# --- permutations, and parts ----------------------------------------------------------------------

Uint64s = NDArray[np.uint64]

_GOLDEN = 0.6180339887498949  # its multiples are spread evenly, modulo 1
_ROUNDING = 1e-9
_ROUNDS = 6
SORTED_UP_TO = 1024
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_HALF = np.uint64(32)


def permute(positions: Int64s, num_samples: int, seed: int, epoch: int) -> Int64s:
    """Map positions to samples by the permutation of all samples keyed by seed and epoch.

    `positions` are int64, from 0 to ``num_samples - 1``. Time and memory are proportional to their
    number, and bounded up to `SORTED_UP_TO` samples.
    """
    if num_samples <= SORTED_UP_TO:
        return _sorted_by_hash(num_samples, seed, epoch)[positions]
    numbers, result = permutation(num_samples, seed, epoch), positions.astype(np.uint64)
    core = load_core()
    if core is None:
        each = np.broadcast_to(numbers[:, np.newaxis], (numbers.size, result.size))
        return _permuted(result, each[0], each[1], each[2], each[3:])
    a, b = int(numbers[1]), int(numbers[2])
    core.permute(address(result), result.size, num_samples, a, b, address(numbers[3:]))
    return result.view(np.int64)


@functools.lru_cache(maxsize=8)  # called for each batch
def permutation(num_samples: int, seed: int, epoch: int) -> Uint64s:
    """Return the parameters of `permute` for more than `SORTED_UP_TO` samples.

    uint64 (9,): the number of samples, the numbers of left and right halves, the round keys.
    Shared: do not modify.
    """
    a = math.isqrt(num_samples - 1) + 1
    return parameters(num_samples, a, -(-num_samples // a), seed, epoch)


@functools.lru_cache(maxsize=8)
def parameters(count: int, a: int, b: int, seed: int, epoch: int, purpose: str = "") -> Uint64s:
    """Return the parameters that map an epoch's positions, uint64 (9,). Shared: do not modify."""
    head = np.array([count, a, b], np.uint64)
    return np.concatenate((head, round_keys(seed, epoch, purpose)))


@functools.lru_cache(maxsize=8)
def _sorted_by_hash(num_samples: int, seed: int, epoch: int) -> Int64s:
    keys = round_keys(seed, epoch)
    hashes = keyed_hash(np.arange(num_samples, dtype=np.uint64), keys[0], keys[1])
    return np.argsort(hashes, kind="stable")


def permute_each(positions: Int64s, counts: Int64s, names: NDArray[Any], keys: Uint64s) -> Int64s:
    """Map each position by its own permutation of as many numbers as its count; all int64 (n,).

    Equal `names` mean the same permutation, and have equal counts. `keys` are from `round_keys`.
    """
    above = counts.astype(np.uint64)
    a = np.ceil(np.sqrt(counts)).astype(np.uint64)
    b = (above + a - np.uint64(1)) // a
    result, names = positions.astype(np.uint64), names.astype(np.uint64)
    each = keyed_hash(names, keys[0], keys[1]) + keys[:, None]
    return _permuted(result, above, a, b, each)


def _permuted(numbers: Uint64s, above: Uint64s, a: Uint64s, b: Uint64s, keys: Uint64s) -> Int64s:
    """Permute numbers until each is below its bound in `above`; `keys` are (_ROUNDS, n)."""
    result = _feistel(numbers, a, b, keys)
    outside = np.flatnonzero(result >= above)
    while outside.size:
        result[outside] = _feistel(result[outside], a[outside], b[outside], keys[:, outside])
        outside = outside[result[outside] >= above[outside]]
    return result.astype(np.int64)


def round_keys(seed: int, epoch: int, purpose: str = "") -> Uint64s:
    """Hash (seed, epoch) to `_ROUNDS` keys, the same on every machine."""
    name = f"h5async {seed} {epoch} {purpose}".rstrip()
    digest = hashlib.blake2b(name.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def keyed_hash(numbers: Uint64s, first: np.uint64, second: np.uint64) -> Uint64s:
    """Hash numbers to pseudorandom ones, in a new array."""
    return _hash(_hash(numbers + first) ^ second)


def _feistel(numbers: Uint64s, a: Uint64s, b: Uint64s, keys: Uint64s) -> Uint64s:
    """Permute numbers below ``a * b``, where `a` and `b` are below 2**32."""
    right, left = np.divmod(numbers, a)
    for i in range(0, _ROUNDS, 2):
        _shift(left, right, a, keys[i])
        _shift(right, left, b, keys[i + 1])
    right *= a
    right += left
    return right


def _shift(half: Uint64s, other: Uint64s, modulus: Uint64s, key: Uint64s) -> None:
    """Add a keyed hash of the other half to `half`, modulo `modulus`."""
    shift = _hash(other + key)
    shift >>= _HALF
    shift *= modulus  # a multiply-shift in place of a division
    shift >>= _HALF
    half += shift
    np.minimum(half, half - modulus, out=half)  # a negative difference wraps round


def _hash(x: Uint64s) -> Uint64s:
    """Hash in place; the upper half of the result looks random."""
    x *= _MULTIPLIERS[0]
    x ^= x >> _HALF
    x *= _MULTIPLIERS[1]
    return x


def part_of(
    number: int,
    shares: Sequence[float],
    num_samples: int,
    seed: int,
    groups: NDArray[Any] | None = None,
    classes: NDArray[Any] | None = None,
) -> Int64s:
    """Return the samples of part `number`, int64 (n,), ascending; the shares sum up to at most 1.

    `groups` and `classes` are (num_samples,), of any sortable dtype. Equal groups stay together.
    Each part has its share of each class. The class of a group is the most frequent one of its
    samples; in a tie, the smallest.
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
    # A unit belongs to the part that contains its middle (doubled, to use integers only).
    middle = 2 * (np.cumsum(sizes[order]) - before[kinds]) - sizes[order]
    first, last = (2 * _cut(share, kind_sizes)[kinds] for share in (begin, end))
    is_in = np.zeros(count, np.bool_)
    is_in[order] = (middle > first) & (middle <= last)
    return np.flatnonzero(is_in[unit])


def _edge(shares: Sequence[float]) -> float:
    """Return the sum of shares, or exactly 1 if only rounding keeps it below 1."""
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


# --- draws ----------------------------------------------------------------------------------------

_BLOCK = 4096  # draws computed at a time, without the core
_BITS = np.uint64(11)  # dropped from 64: a float64 has 53
NO_SAMPLES = np.zeros(0, np.int64)


class WeightedOrder:
    """Positions drawn with replacement. Thread-safe.

    `weights`, (n,), has one per position: finite, not negative, and not all 0. `digest` is a short
    hash of them, and `table` their `alias_table`.
    """

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        self.table = alias_table(weights)
        self.digest = hashlib.blake2b(weights.astype("<f8").tobytes(), digest_size=16).hexdigest()

    def samples(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the draws at positions `start` to `stop` of an epoch, as a new array."""
        core, keys = load_core(), self.mapping(epoch)[3:]
        if core is not None:
            drawn = np.empty(stop - start, np.int64)
            where = address(self.table), address(keys), address(drawn)
            core.draw(*where, self.table.size, start, drawn.size)
            return drawn
        first, behind = start // _BLOCK, -(-stop // _BLOCK)
        found = [NO_SAMPLES, *(self._drawn(keys, number) for number in range(first, behind))]
        return np.concatenate(found)[start - first * _BLOCK : stop - first * _BLOCK]

    def mapping(self, epoch: int) -> NDArray[np.uint64]:
        """Return the parameters of an epoch's draws that the core needs besides the table.

        uint64 (9,): the number of columns, two zeros, the keys. Shared: do not modify.
        """
        return parameters(self.table.size, 0, 0, self._seed, epoch, "weights")

    def _drawn(self, keys: NDArray[np.uint64], number: int) -> Int64s:
        # Each count yields four numbers. (Multiplying by powers of two does not round.)
        random = np.random.Philox(counter=number * (_BLOCK // 2), key=keys[:2])
        column, coin = np.split((random.random_raw(2 * _BLOCK) >> _BITS) * 2.0**-53, 2)
        count = self.table.size
        drawn = np.minimum((column * count).astype(np.int64), count - 1)
        found = self.table[drawn]
        chosen: Int64s = np.where(coin < found["share"], drawn, found["alias"])
        return chosen


def alias_table(weights: NDArray[np.float64]) -> NDArray[Any]:
    """Return the alias table of some weights, with members ``share`` and ``alias``.

    All columns are equally probable. Column i stands for i with probability ``share[i]``, and
    otherwise for ``alias[i]``.
    """
    scaled = weights / weights.max()  # the sum must not overflow
    # Sequentially: the order in which `sum` adds up depends on the processor.
    scaled *= weights.size / np.add.accumulate(scaled)[-1]
    is_small = scaled < 1
    small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    table = np.empty(weights.size, [("share", np.float64), ("alias", np.int64)])
    share, alias = table["share"], table["alias"]
    share[:], alias[:] = 1, np.arange(weights.size)
    if not small.size or not large.size:  # rounding may leave no large ones
        return table
    # The deficits of small columns are filled from the surpluses of large ones, in order. A large
    # column that gave too much is filled from the next one.
    lacking, surplus = np.cumsum(1 - scaled[small]), np.cumsum(scaled[large] - 1)
    share[small] = scaled[small]
    before = np.append(0.0, lacking[:-1])
    giver = np.searchsorted(surplus, before, side="right")
    alias[small] = large[np.minimum(giver, large.size - 1)]
    taker = np.searchsorted(lacking, surplus[:-1], side="left")
    too_much = lacking[np.minimum(taker, small.size - 1)] - surplus[:-1]
    is_taken = (taker < small.size) & (surplus[:-1] > 0)
    share[large[:-1]] = np.where(is_taken, np.clip(1 - too_much, 0, 1), 1)
    alias[large[:-1]] = large[1:]
    return table
