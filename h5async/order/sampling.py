"""Computes which samples a batch holds, from seed, epoch and the batch's number.

Nothing that grows with the dataset is kept: a position in the epoch's order is mapped to a sample
by a keyed permutation of all sample numbers, which is evaluated only at the positions of one batch.

The permutation is the generalized Feistel network of J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002): numbers below ``a * b`` are pairs, whose halves are in turn
shifted by a keyed hash of the other, modulo `a` and `b`; since ``a * b`` exceeds the number of
samples by less than `a`, the few results that fall outside are permuted again until they fall
inside. Four rounds suffice with random functions (M. Luby, C. Rackoff, SIAM J. Comput. 17, 1988);
here are six, of two multiplications each: the order must look random, and need not resist an
adversary. A network over a tiny domain does not reach every permutation, so up to `_SORTED_UP_TO`
samples are shuffled by sorting keyed hashes instead, which does.

The order is part of what users rely on to repeat a run: changing it is a breaking change.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core
from h5async.order.selection import Selection

if TYPE_CHECKING:
    from h5async.order.weighted import WeightedOrder

_ROUNDS = 6
_BLOCK = 1024
_SORTED_UP_TO = 1024
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_HALF = np.uint64(32)

Shuffle = Literal[False, "full", "window"]

# Identifies an order of the samples of a reader: rank and world size, and, where an epoch was begun
# with another batch or world size than now, that epoch and these sizes.
OrderKey = tuple[int, ...]


class Order(Protocol):
    """An order of all samples."""

    def samples(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions `start` to `stop` of an epoch, as a new array."""


@dataclass(frozen=True)
class Sampling:
    """The order of an epoch's samples, and how they are dealt to batches and ranks.

    All ranks have the same order. At each step the next ``batch_size * world_size`` samples of it
    are dealt, a run of `batch_size` to each rank; what is left at the end is dealt as evenly as
    possible, and a rank for which nothing is left repeats a sample. So all ranks have equally many
    batches, and after each step, the samples that all ranks together have had are the first ones of
    the order.

    Parameters
    ----------
    num_samples
        Positions of an epoch's order: samples that are selected, or drawn.
    batch_size
        Samples in a batch.
    shuffle
        False: in the order of the selection; ``"full"``: a uniform permutation of it; else: that
        of `order`.
    seed
        Any integer; with the epoch it determines the permutation.
    drop_last
        Whether short last batches are left out.
    order
        The order of positions, of other kinds than these.
    rank, world_size
        Whose batches these are, of how many.
    resumed
        An epoch that has another `order` than the others, and that order: it was begun with
        another `batch_size` or `world_size`, on which the order depends.
    selection
        The samples to which positions are mapped; None: they are sample numbers.
    draws
        Draws positions of the selection with replacement, in place of all these orders.
    """

    num_samples: int
    batch_size: int
    shuffle: Shuffle = False
    seed: int = 0
    drop_last: bool = False
    order: Order | None = None
    rank: int = 0
    world_size: int = 1
    resumed: tuple[int, Order] | None = None
    selection: Selection | None = None
    draws: WeightedOrder | None = None

    is_uniform: ClassVar[bool] = True  # whether all epochs have equally many batches

    @functools.cached_property  # these are asked for with every batch
    def step_samples(self) -> int:
        """Samples that are dealt to all ranks at a time."""
        return self.batch_size * self.world_size

    @functools.cached_property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return self.batches_from(0, 0)

    def batches_in(self, epoch: int) -> int:
        """Return how many batches an epoch has."""
        return self.num_batches

    def batches_from(self, epoch: int, start: int) -> int:
        """Return how many batches there are from a position of an epoch's order on."""
        full, rest = divmod(max(0, self.num_samples - start), self.step_samples)
        return full + (rest > 0 and not self.drop_last)

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch, of all ranks: all, less those of dropped last batches."""
        return self.samples_in(0)

    def samples_in(self, epoch: int) -> int:
        """Return the same of any epoch."""
        return min(self.num_samples, self.num_batches * self.step_samples)

    def step_at(self, epoch: int, start: int, passed: int) -> tuple[int, int]:
        """Return number and position of the step that is `passed` steps behind that at `start`."""
        start += passed * self.step_samples
        return start // self.step_samples, start

    def batch(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the sample numbers of batch `number` of `epoch`, in order, as a new array."""
        return self.batch_at(epoch, self.step_at(epoch, 0, number)[1])

    def batch_at(self, epoch: int, start: int) -> NDArray[np.int64]:
        """Return the samples of this rank's batch in the step that begins at a position."""
        return self.samples(epoch, *self.dealt_at(epoch, start))

    def dealt_at(self, epoch: int, start: int) -> tuple[int, int]:
        """Return begin and end of this rank's positions in the step that begins at a position."""
        rank, size = self.rank, self.batch_size
        left = self.num_samples - start
        if left >= self.step_samples:
            return start + rank * size, start + (rank + 1) * size
        begin, end = dealt_or_repeated(left, rank, self.world_size)
        return start + begin, start + end

    @functools.cached_property
    def is_computed(self) -> bool:
        """Whether positions are those of the selection, or mapped to them by `mapping_of`."""
        return self._is_computed()

    def _is_computed(self) -> bool:
        if self.draws is not None:
            return True
        if self.order is not None:
            return False
        return not self.shuffle or self.num_samples > _SORTED_UP_TO

    def mapping_of(self, epoch: int) -> NDArray[np.uint64] | None:
        """Return what maps the positions of an epoch to those of the selection; None: nothing.

        Only where `is_computed`. See the functions `permutation` and `WeightedOrder.mapping`.
        """
        if self.draws is not None:
            return self.draws.mapping(epoch)
        return permutation(self.num_samples, self.seed, epoch) if self.shuffle else None

    def samples(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample numbers at some positions of an epoch's order, as a new array."""
        found = self._positions(epoch, start, stop)
        return found if self.selection is None else self.selection.samples(found)

    def _positions(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if self.draws is not None:
            return self.draws.samples(epoch, start, stop)
        if self.order is not None:
            if self.resumed is not None and self.resumed[0] == epoch:
                return self.resumed[1].samples(epoch, start, stop)
            return self.order.samples(epoch, start, stop)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if stop - start >= _BLOCK:
            return permute(np.arange(start, stop), self.num_samples, self.seed, epoch)
        # Small batches are cut from blocks: a block costs little more than a batch of 32.
        first, last = start // _BLOCK, max(start, stop - 1) // _BLOCK
        key = (self.num_samples, self.seed, epoch)
        if first == last:
            return _permuted_block(*key, first)[
                start - first * _BLOCK : stop - first * _BLOCK
            ].copy()
        blocks = [_permuted_block(*key, number) for number in range(first, last + 1)]
        return np.concatenate(blocks)[start - first * _BLOCK : stop - first * _BLOCK]


def dealt(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and end of what a rank gets of `count` things, dealt as evenly as possible."""
    return count * rank // world_size, count * (rank + 1) // world_size


def dealt_or_repeated(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the same, and for a rank that gets nothing, one of the things once more."""
    begin, end = dealt(count, rank, world_size)
    return (begin, end) if begin < end else (rank % count, rank % count + 1)


@functools.lru_cache(maxsize=8)
def _permuted_block(num_samples: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """Return the samples at `_BLOCK` positions; callers share the array, and do not change it."""
    positions = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, num_samples), dtype=np.int64)
    return permute(positions, num_samples, seed, epoch)


def permute(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Map positions to samples by the permutation of all samples keyed by seed and epoch.

    Parameters
    ----------
    positions
        int64 numbers from 0 to ``num_samples - 1``.

    Returns
    -------
    numpy.ndarray
        int64, as many as `positions`; time and memory are proportional to their number (and
        bounded by a constant where there are fewer than 1,024 samples).
    """
    if num_samples <= _SORTED_UP_TO:
        keys = round_keys(seed, epoch)
        hashes = keyed_hash(np.arange(num_samples, dtype=np.uint64), keys[0], keys[1])
        return np.argsort(hashes, kind="stable")[positions]
    _, a, b, *_ = numbers = permutation(num_samples, seed, epoch)
    keys = numbers[3:]
    result = positions.astype(np.uint64)
    core = load_core()
    if core is not None:
        core.permute(address(result), result.size, num_samples, int(a), int(b), address(keys))
        return result.view(np.int64)
    result = _feistel(result, a, b, keys)
    outside = np.flatnonzero(result >= num_samples)
    while outside.size:
        result[outside] = _feistel(result[outside], a, b, keys)
        outside = outside[result[outside] >= num_samples]
    return result.astype(np.int64)


@functools.lru_cache(maxsize=8)
def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return what the permutation of `permute` depends on, of more than `_SORTED_UP_TO` samples.

    Returns
    -------
    numpy.ndarray
        uint64 (9,): the number of samples, the numbers of left and right halves, the keys of the
        rounds. Callers share the array, and do not change it.
    """
    a = math.isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    head = np.array([num_samples, a, b], np.uint64)
    return np.concatenate((head, round_keys(seed, epoch)))


def permute_each(
    positions: NDArray[np.int64],
    counts: NDArray[np.int64],
    names: NDArray[Any],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Map each position by a permutation of its own, of `counts` numbers.

    Parameters
    ----------
    positions, counts
        int64 (n,): numbers from 0 to ``count - 1``.
    names
        int64 (n,): which permutation; those of one name have one count.
    keys
        Of `round_keys`.

    Returns
    -------
    numpy.ndarray
        int64 (n,).
    """
    above = counts.astype(np.uint64)
    a = np.ceil(np.sqrt(counts)).astype(np.uint64)
    b = (above + a - np.uint64(1)) // a
    result, names = positions.astype(np.uint64), names.astype(np.uint64)
    each = keyed_hash(names, keys[0], keys[1]) + keys[:, None]
    result = _feistel(result, a, b, each)
    outside = np.flatnonzero(result >= above)
    while outside.size:
        result[outside] = _feistel(result[outside], a[outside], b[outside], each[:, outside])
        outside = outside[result[outside] >= above[outside]]
    return result.astype(np.int64)


def round_keys(seed: int, epoch: int, purpose: str = "") -> NDArray[np.uint64]:
    """Hash (seed, epoch) to `_ROUNDS` keys, the same on every machine."""
    name = f"h5async {seed} {epoch} {purpose}".rstrip()
    digest = hashlib.blake2b(name.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def keyed_hash(
    numbers: NDArray[np.uint64], first: np.uint64, second: np.uint64
) -> NDArray[np.uint64]:
    """Hash numbers to what looks random; a new array."""
    return _hash(_hash(numbers + first) ^ second)


def _feistel(
    numbers: NDArray[np.uint64],
    a: np.uint64 | NDArray[np.uint64],
    b: np.uint64 | NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Permute numbers below ``a * b``, where `a` and `b` are below 2**32."""
    right, left = np.divmod(numbers, a)
    for i in range(0, _ROUNDS, 2):
        _shift(left, right, a, keys[i])
        _shift(right, left, b, keys[i + 1])
    right *= a
    right += left
    return right


def _shift(
    half: NDArray[np.uint64],
    other: NDArray[np.uint64],
    modulus: np.uint64 | NDArray[np.uint64],
    key: np.uint64 | NDArray[np.uint64],
) -> None:
    """Add a keyed hash of the other half to `half`, modulo `modulus`."""
    shift = _hash(other + key)
    shift >>= _HALF
    shift *= modulus  # a multiply-shift in place of a division
    shift >>= _HALF
    half += shift
    np.minimum(half, half - modulus, out=half)  # a difference below 0 wraps round to more


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash in place; the upper half of the result is what looks random."""
    x *= _MULTIPLIERS[0]
    x ^= x >> _HALF
    x *= _MULTIPLIERS[1]
    return x
