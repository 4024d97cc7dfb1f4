"""Permutes numbers by keys: maps a position in an order to the number there.

The permutation is the generalized Feistel network of J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002). Numbers below ``a * b`` are pairs; in turn, each half is
shifted by a keyed hash of the other, modulo `a` or `b`. ``a * b`` exceeds the number of samples by
less than `a`; results that fall outside are permuted again. Four rounds suffice with random
functions (M. Luby, C. Rackoff, SIAM J. Comput. 17, 1988); here are six, of two multiplications
each, because the order must look random but need not resist an adversary. A network over a tiny
domain does not reach every permutation, so up to `SORTED_UP_TO` samples are shuffled by sorting
keyed hashes instead.

Users rely on this order to repeat a run: changing it is a breaking change.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5async.core.binding import address, load_core

_ROUNDS = 6
SORTED_UP_TO = 1024
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_HALF = np.uint64(32)


def permute(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Map positions to samples by the permutation of all samples keyed by seed and epoch.

    `positions` are int64, from 0 to ``num_samples - 1``. Time and memory are proportional to their
    number, and bounded up to `SORTED_UP_TO` samples.
    """
    if num_samples <= SORTED_UP_TO:
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
    """Return the parameters of `permute` for more than `SORTED_UP_TO` samples.

    uint64 (9,): the number of samples, the numbers of left and right halves, the round keys.
    Shared: do not modify.
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
        int64 (n,): positions from 0 to ``count - 1``.
    names
        int64 (n,): which permutation. Equal names have equal counts.
    keys
        From `round_keys`.
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
    """Hash numbers to pseudorandom ones, in a new array."""
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
    np.minimum(half, half - modulus, out=half)  # a negative difference wraps round


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash in place; the upper half of the result looks random."""
    x *= _MULTIPLIERS[0]
    x ^= x >> _HALF
    x *= _MULTIPLIERS[1]
    return x
