"""`sampling.py`: a permutation, pure, the same everywhere, and without pattern.

The statistics run over fixed seeds, so their p-values are constants: they fail only when the
permutation is changed, never by chance. Bounds are 1e-4 (about fifty values are tested).
"""

import itertools
import math
import tracemalloc
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import batch_of

from h5async.order.sampling import Sampling
from h5async.order.selection import permute

# Both sides of the size up to which samples are sorted by hashes, and squares and non-squares.
SIZES = (1000, 1024, 1025, 1089, 5000, 65537)
HUGE_SIZES = (10**6, 2**31 + 11, 10**12, 2**62 + 1)
P_MIN = 1e-4


def whole(num_samples: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(num_samples), num_samples, seed, epoch)


def permutations(num_samples: int, epoch: int = 0) -> np.ndarray:
    """Permutations of consecutive seeds: (seeds, num_samples)."""
    count = max(40, min(1000, 2_000_000 // num_samples))
    return np.stack([whole(num_samples, seed, epoch) for seed in range(count)])


@pytest.fixture(scope="module", params=SIZES)
def orders(request: pytest.FixtureRequest) -> np.ndarray:
    return permutations(request.param)


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    """Only the tests of statistics need SciPy; the orders themselves are tested without it."""
    found: ModuleType = pytest.importorskip("scipy.stats")
    return found


# --- a permutation ---------------------------------------------------------------------------


def test_every_size_is_permuted() -> None:
    for size in range(1, 3001):
        assert np.array_equal(np.sort(whole(size, seed=size)), np.arange(size)), size


@pytest.mark.parametrize("size", [4096, 10_007, 65_536, 65_537, 999_983, 1_000_000])
def test_large_sizes_are_permuted(size: int) -> None:
    assert np.array_equal(np.sort(whole(size)), np.arange(size))


@pytest.mark.parametrize("size", HUGE_SIZES)
@pytest.mark.parametrize("where", ["begin", "middle", "end", "strided"])
def test_huge_sizes_are_injective_and_in_range(size: int, where: str) -> None:
    count = 100_000
    first = {"begin": 0, "middle": size // 2, "end": size - count, "strided": 0}[where]
    step = size // count if where == "strided" else 1
    found = permute(first + np.arange(count) * step, size, 5, 1)
    assert found.dtype == np.int64
    assert found.min() >= 0
    assert found.max() < size
    assert np.unique(found).size == count


EDGES = (4097, 65_536**2 // 2, 2**31 - 46_341, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 + 1)


@pytest.mark.parametrize("size", [*EDGES, *HUGE_SIZES])
def test_the_core_and_its_twin_agree(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = np.concatenate([np.arange(100), size - 1 - np.arange(100), [size // 2]])
    found = permute(positions, size, 5, 1)
    monkeypatch.setattr("h5async.order.selection.load_core", lambda: None)
    assert np.array_equal(found, permute(positions, size, 5, 1))


# --- pure ------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    size=st.one_of(st.integers(1, 3000), st.sampled_from(HUGE_SIZES)),
    seed=st.integers(),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_sample_at_a_position_depends_on_nothing_else(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = np.array(
        data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64
    )
    before = positions.copy()
    together = permute(positions, size, seed, epoch)
    assert np.array_equal(positions, before)
    at = data.draw(st.integers(0, positions.size))
    parts = [permute(part, size, seed, epoch) for part in (positions[:at], positions[at:])]
    assert np.array_equal(np.concatenate(parts), together)
    assert np.array_equal(permute(positions[::-1], size, seed, epoch), together[::-1])


@pytest.mark.parametrize("size", [1000, 5000])
def test_seed_and_epoch_make_another_order(size: int) -> None:
    orders = [whole(size, seed, epoch) for seed in (-1, 0, 1, 2**64, 2**64 + 1) for epoch in (0, 1)]
    for one, other in itertools.combinations(orders, 2):
        assert np.mean(one == other) < 0.01


def test_seed_and_epoch_are_not_run_together() -> None:
    assert not np.array_equal(whole(1000, 1, 11), whole(1000, 11, 1))
    assert not np.array_equal(whole(1000, 1, 11), whole(1000, 111, 1))
    assert not np.array_equal(whole(1000, 0, 5), whole(1000, 5, 0))


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "positions", "samples"),
    [
        (10, 0, 0, [0, 1, 2, 5, 8, 9], [8, 4, 7, 5, 6, 0]),
        (10, 0, 1, [0, 1, 2, 5, 8, 9], [8, 9, 6, 5, 2, 3]),
        (10, 1, 0, [0, 1, 2, 5, 8, 9], [5, 9, 2, 8, 1, 3]),
        (1000, 7, 3, [0, 1, 2, 500, 998, 999], [530, 101, 234, 502, 162, 984]),
        (1024, 0, 0, [0, 1, 2, 512, 1022, 1023], [429, 715, 593, 356, 905, 877]),
        (1025, 0, 0, [0, 1, 2, 512, 1023, 1024], [470, 502, 871, 748, 354, 665]),
        (5000, -3, 2, [0, 1, 2, 2500, 4998, 4999], [3994, 3680, 3768, 3784, 2541, 660]),
        (
            1000000,
            0,
            0,
            [0, 1, 2, 500000, 999998, 999999],
            [239998, 173767, 54231, 995460, 163209, 3743],
        ),
        (
            2147483659,
            1180591620717411303424,
            5,
            [0, 1, 2, 1073741829, 2147483657, 2147483658],
            [1558255152, 173242696, 1663977624, 348287889, 1361133750, 22712336],
        ),
        (
            1000000000000,
            12345,
            99,
            [0, 1, 2, 500000000000, 999999999998, 999999999999],
            [465966974854, 686080222077, 153507380830, 791580570858, 555476625887, 419314878925],
        ),
        (
            4611686018427387905,
            0,
            0,
            [0, 1, 2, 2305843009213693952, 4611686018427387903, 4611686018427387904],
            [
                1517226727842491468,
                1418948411083840958,
                146061188481825592,
                2839218438606696950,
                2969543243662636647,
                4233981409770020384,
            ],
        ),
    ],
)
def test_golden_values(
    size: int, seed: int, epoch: int, positions: list[int], samples: list[int]
) -> None:
    """The order is a promise: who resumes a training with another version must get the same."""
    assert permute(np.array(positions), size, seed, epoch).tolist() == samples


# --- without pattern -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_orders_are_equally_likely(size: int, stats: ModuleType) -> None:
    orders = math.factorial(size)
    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    for seed in range(100 * orders):
        counts[tuple(whole(size, seed).tolist())] += 1
    assert min(counts.values()) > 0
    if size > 1:
        assert stats.chisquare(np.array(list(counts.values()))).pvalue > P_MIN


@pytest.mark.parametrize("size", [2, 10, 100, 1024, 1025, 1026, 1089, 1090, 5000, 10**6, 10**12])
def test_each_position_is_uniform_over_seeds(size: int, stats: ModuleType) -> None:
    """Also the first, the last, and those next to the edges of the halves of a number."""
    side = math.isqrt(size - 1) + 1
    near = {0, 1, 2, side - 1, side, side + 1, size // 2, size - side, size - 2, size - 1}
    positions = np.array(sorted(p for p in near if 0 <= p < size))
    count, bins = 2000, min(size, 16)
    found = np.stack([permute(positions, size, seed, 0) for seed in range(count)])
    edges = [-(-size * b // bins) for b in range(bins + 1)]
    expected = np.diff(edges) / size * count
    for column in found.T:
        counts = np.histogram(column, edges)[0]
        counts[-1] += count - counts.sum()
        assert stats.chisquare(counts, expected).pvalue > P_MIN


def test_neighbours_are_not_correlated(orders: np.ndarray, stats: ModuleType) -> None:
    """Pearson's r at several distances, `sqrt(size)` among them: the halves of a number."""
    size = orders.shape[1]
    orders = orders - (size - 1) / 2
    energy = (orders[0] ** 2).sum()
    side = math.isqrt(size - 1) + 1
    for lag in (1, 2, 3, side - 1, side, side + 1, size // 2):
        r = (orders[:, :-lag] * orders[:, lag:]).sum(axis=1) / energy
        expected = -(size - lag) / size / (size - 1)  # drawn without replacement
        z = (r.mean() - expected) / r.std() * math.sqrt(r.size)
        assert 2 * stats.norm.sf(abs(z)) > P_MIN, lag
        # nor does r stray from order to order otherwise than by chance
        spread = ((r - expected) ** 2).sum() * size**2 / (size - lag)
        assert P_MIN < stats.chi2.sf(spread, r.size) < 1 - P_MIN, lag


def test_distances_between_neighbours_are_uniform(orders: np.ndarray, stats: ModuleType) -> None:
    size = orders.shape[1]
    side = math.isqrt(size - 1) + 1
    for lag in (1, side):
        counts = np.zeros(size, np.int64)
        for order in orders:
            counts += np.bincount((order[lag:] - order[:-lag]) % size, minlength=size)
        assert counts[0] == 0
        assert stats.chisquare(counts[1:]).pvalue > P_MIN, lag


def test_pairs_of_neighbours_fall_into_all_pairs_of_parts(
    orders: np.ndarray, stats: ModuleType
) -> None:
    """Halves and sixteenths of the range, for disjoint pairs of successive positions."""
    size = orders.shape[1]
    for parts in (2, 16):
        part = orders * parts // size
        members = np.bincount(np.arange(size) * parts // size)
        pairs = np.outer(members, members) - np.diag(members)
        codes = part[:, :-1:16] * parts + part[:, 1::16]
        counts = np.bincount(codes.ravel(), minlength=parts * parts)
        expected = pairs.ravel() / pairs.sum() * codes.size
        assert stats.chisquare(counts, expected).pvalue > P_MIN, parts


def test_positions_and_samples_are_not_correlated(orders: np.ndarray, stats: ModuleType) -> None:
    """Where a position lies in the epoch says nothing of where its sample lies in the file."""
    size = orders.shape[1]
    parts = 8
    code = (np.arange(size) * parts // size) * parts + orders * parts // size
    counts = np.bincount(code.ravel(), minlength=parts * parts)
    members = np.bincount(np.arange(size) * parts // size)
    expected = np.outer(members, members).ravel() / size * len(orders)
    # both margins of the table are fixed
    chi_square = ((counts - expected) ** 2 / expected).sum() * (size - 1) / size
    assert P_MIN < stats.chi2.sf(chi_square, (parts - 1) ** 2) < 1 - P_MIN


@pytest.mark.parametrize("other", ["next epoch", "next seed"])
def test_orders_are_independent_of_each_other(
    orders: np.ndarray, other: str, stats: ModuleType
) -> None:
    size = orders.shape[1]
    if other == "next seed":
        orders, followers = orders[:-1], orders[1:]
    else:
        followers = permutations(size, epoch=1)
    centre = (size - 1) / 2
    r = ((orders - centre) * (followers - centre)).sum(axis=1)
    z = r.mean() / r.std() * math.sqrt(r.size)
    assert 2 * stats.norm.sf(abs(z)) > P_MIN
    counts = np.zeros(size, np.int64)
    for one, two in zip(orders, followers, strict=True):
        counts += np.bincount((two - one) % size, minlength=size)
    assert stats.chisquare(counts).pvalue > P_MIN


# --- batches of an epoch -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "drop_last", "num_batches", "epoch_samples"),
    [
        (0, 4, False, 0, 0),
        (0, 4, True, 0, 0),
        (3, 4, False, 1, 3),
        (3, 4, True, 0, 0),
        (4, 4, False, 1, 4),
        (4, 4, True, 1, 4),
        (5, 4, False, 2, 5),
        (5, 4, True, 1, 4),
        (5, 1, True, 5, 5),
        (10**12, 256, False, 3_906_250_000, 10**12),
        (10**12 + 1, 256, False, 3_906_250_001, 10**12 + 1),
        (10**12 + 1, 256, True, 3_906_250_000, 10**12),
    ],
)
def test_number_of_batches(
    num_samples: int, batch_size: int, drop_last: bool, num_batches: int, epoch_samples: int
) -> None:
    sampling = Sampling(num_samples, batch_size, drop_last=drop_last)
    assert sampling.num_batches == num_batches
    assert sampling.samples_in(0) == epoch_samples


@given(
    num_samples=st.one_of(st.integers(1, 200), st.integers(1020, 1100)),
    batch_size=st.integers(1, 300),
    shuffle=st.sampled_from([False, "full"]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_the_batches_of_an_epoch_hold_each_sample_once(
    num_samples: int, batch_size: int, shuffle: str, drop_last: bool, epoch: int
) -> None:
    batch_size = max(batch_size, num_samples // 50)
    sampling = Sampling(num_samples, batch_size, shuffle, 3, drop_last)
    batches = [batch_of(sampling, epoch, number) for number in range(sampling.num_batches)]
    sizes = [batch.size for batch in batches]
    assert sum(sizes) == sampling.samples_in(0)
    assert all(size == batch_size for size in sizes[:-1])
    assert all(batch.dtype == np.int64 for batch in batches)
    if not batches:
        assert drop_last
        return
    last_size = num_samples - (len(sizes) - 1) * batch_size
    assert sizes[-1] == (batch_size if drop_last else last_size)
    together = np.concatenate(batches)
    assert np.unique(together).size == together.size
    assert together.min() >= 0
    assert together.max() < num_samples
    if not drop_last:
        assert np.array_equal(np.sort(together), np.arange(num_samples))
    if shuffle is False:
        assert np.array_equal(together, np.arange(together.size))


def test_drop_last_leaves_out_other_samples_in_each_epoch() -> None:
    sampling = Sampling(1030, 103 * 2, "full", 0, drop_last=True)
    assert sampling.num_batches == 5
    sampling = Sampling(1031, 103, "full", 0, drop_last=True)
    left_out = {
        (
            set(range(1031)) - set(np.concatenate([batch_of(sampling, e, i) for i in range(10)]))
        ).pop()
        for e in range(20)
    }
    assert len(left_out) > 15


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    orders = []
    for batch_size in (1, 7, 100, 5000):
        sampling = Sampling(2000, batch_size, "full", 9)
        batches = [batch_of(sampling, 4, number) for number in range(sampling.num_batches)]
        orders.append(np.concatenate(batches).tolist())
    assert all(order == orders[0] for order in orders)


def test_a_batch_is_a_new_array() -> None:
    for shuffle in (False, "full"):
        sampling = Sampling(100, 10, shuffle)
        one = batch_of(sampling, 0, 2)
        expected = one.copy()
        one[:] = -1
        assert np.array_equal(batch_of(sampling, 0, 2), expected)


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_nothing_of_the_size_of_the_dataset_is_held(shuffle: str) -> None:
    sampling = Sampling(10**12, 256, shuffle, 1)
    batch_of(sampling, 0, 0)
    tracemalloc.start()
    try:
        for number in (0, 12345, sampling.num_batches - 1):
            assert batch_of(sampling, 1, number).size == 256
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024  # a few dozen blocks of 8 KiB
