"""`shuffle="window"`: a permutation, pure, mixed within a window; each chunk is decoded once.

As in `test_sampling.py`, the statistics run over fixed seeds: they never fail by chance.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from cases import each
from collecting import most_kept_nbytes
from conftest import assert_epoch_is, assert_same_bits, read_exactly_an_epoch, truth
from hdf5files import type_for_h5py, write_compact
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DEFLATE, layout
from orders import batch_of

from h5async import AsyncReader, ConfigError, DatasetError, Field
from h5async.core.binding import load_core
from h5async.index.datasettable import unit_bounds
from h5async.index.datasettable import unit_nbytes as unit_nbytes_of
from h5async.order.sampling import Sampling, dealt
from h5async.order.window import _GROUP_SAMPLES, WindowOrder, kept_nbytes, window_order
from h5async.read.collection import Collection

KIB, MIB = 1024, 1024 * 1024
P_MIN = 1e-4


def bounds_of(counts: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *counts])


def equal_units(num_samples: int, size: int) -> np.ndarray:
    """Units of one size, but for the last."""
    return np.append(np.arange(0, num_samples, size), num_samples)


def whole(order: WindowOrder, num_samples: int, epoch: int = 0) -> np.ndarray:
    return order.samples(epoch, 0, num_samples)


def by_batches(order: WindowOrder, num_samples: int, batch_size: int, epoch: int) -> np.ndarray:
    starts = range(0, num_samples, batch_size)
    ends = (min(start + batch_size, num_samples) for start in starts)
    return np.concatenate([order.samples(epoch, a, b) for a, b in zip(starts, ends, strict=True)])


@contextmanager
def twin() -> Iterator[None]:
    """Compute orders with NumPy."""
    with (
        mock.patch("h5async.order.selection.load_core", return_value=None),
        mock.patch("h5async.order.window.load_core", return_value=None),
    ):
        yield


def most_alive(order: np.ndarray, bounds: np.ndarray) -> int:
    """How many units are at one time between their first sample and their last."""
    unit = np.searchsorted(bounds, order, side="right") - 1
    position = np.arange(order.size)
    first = np.full(bounds.size - 1, order.size)
    last = np.zeros(bounds.size - 1, np.int64)
    np.minimum.at(first, unit, position)
    np.maximum.at(last, unit, position)
    steps = np.bincount(first, minlength=order.size + 1)
    steps -= np.bincount(last + 1, minlength=order.size + 1)
    return int(steps.cumsum().max())


unit_counts = st.one_of(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),  # several files: short units anywhere
    st.builds(  # one file: all but the last are equal
        lambda size, count, rest: [size] * count + [rest % size] * (rest % size > 0),
        st.integers(1, 300),
        st.integers(1, 40),
        st.integers(0, 299),
    ),
    st.integers(1, 2000).map(lambda count: [count]),  # one unit
    st.integers(1, 2000).map(lambda count: [1] * count),
    st.lists(st.sampled_from([1, 2, 500]), min_size=1, max_size=20),
)
windows = st.one_of(st.integers(1, 12), st.integers(1, 300))
batch_sizes = st.one_of(st.integers(1, 40), st.integers(1, 1500))


# --- a permutation ---------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 4)
@given(unit_counts, windows, st.integers(), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(
    counts: list[int], window: int, seed: int, epoch: int
) -> None:
    bounds = bounds_of(counts)
    order = WindowOrder(bounds, window, seed)
    found = whole(order, sum(counts), epoch)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(sum(counts)))


@each(
    "num_samples, size, window, batch_size",
    [
        (1, 1, 2, 1),
        (1, 1, 2, 1000),
        (2, 1, 2, 1),
        (5, 10, 2, 3),
        (4096, 16, 32, 128),
        (4097, 16, 32, 128),
        (1000, 7, 5, 32),
        (1000, 999, 2, 32),
        (1000, 1, 500, 32),
        (1024, 1, 2, 1024),
        (10_007, 100, 51, 4096),
        (10_007, 100, 3, 1),
        (100_003, 1000, 20, 4096),
        (70_000, 1, 9, 256),
        (70_000, 70_000, 2, 256),
        (50, 5, 1000, 8),
    ],
)
def test_some_sizes(num_samples: int, size: int, window: int, batch_size: int) -> None:
    order = WindowOrder(equal_units(num_samples, size), window, 1)
    for epoch in (0, 7):
        found = by_batches(order, num_samples, batch_size, epoch)
        assert np.array_equal(np.sort(found), np.arange(num_samples))


@given(unit_counts, windows, batch_sizes, st.booleans())
@settings(max_examples=settings().max_examples // 4)
def test_the_batches_of_an_epoch_hold_each_sample_once(
    counts: list[int], window: int, batch_size: int, drop_last: bool
) -> None:
    num_samples = sum(counts)
    batch_size = max(batch_size, num_samples // 50)
    order = WindowOrder(bounds_of(counts), window, 4)
    sampling = Sampling(num_samples, batch_size, "window", 4, drop_last, order)
    batches = [batch_of(sampling, 2, number) for number in range(sampling.num_batches)]
    sizes = [batch.size for batch in batches]
    assert sum(sizes) == sampling.samples_in(0)
    assert all(size == batch_size for size in sizes[:-1])
    together = np.concatenate([np.zeros(0, np.int64), *batches])
    assert np.array_equal(together, whole(order, num_samples, 2)[: together.size])


# --- pure ------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 4)
@given(unit_counts, windows, st.integers(), st.integers(0, 50), st.data())
def test_the_sample_at_a_position_depends_on_nothing_else(
    counts: list[int], window: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """Not on what was asked for before, where it is cut, nor who computes it."""
    bounds, num_samples = bounds_of(counts), sum(counts)
    order = WindowOrder(bounds, window, seed)
    start = data.draw(st.integers(0, num_samples - 1))
    stop = data.draw(st.integers(start + 1, num_samples))
    late = order.samples(epoch, start, stop)  # before anything else of the epoch
    order.samples(epoch + 1, 0, num_samples)
    found = whole(order, num_samples, epoch)
    assert np.array_equal(late, found[start:stop])
    other = WindowOrder(bounds.copy(), window, seed)
    edges = sorted({0, start, stop, num_samples})
    pieces = [other.samples(epoch, a, b) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces), found)
    with twin():
        by_numpy = WindowOrder(bounds, window, seed)
        assert np.array_equal(whole(by_numpy, num_samples, epoch), found)


@pytest.mark.parametrize(
    ("num_samples", "size", "window"),
    [(100_003, 1000, 20), (70_000, 1, 9), (5000, 2500, 2), (30_000, 13, 900), (200_000, 65_536, 2)],
)
def test_the_core_and_its_twin_agree_on_large_ones(
    num_samples: int, size: int, window: int
) -> None:
    found = []
    for way in (mock.MagicMock(), twin()):
        with way:
            order = WindowOrder(equal_units(num_samples, size), window, 2**70)
            found.append(whole(order, num_samples, 3))
    assert np.array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "size"), [(300_000, 65_536), (20_000, 1500)])
def test_threads_that_need_parts_of_one_block_at_a_time_get_the_same(
    num_samples: int, size: int
) -> None:
    """Parts of a large block are sorted by whoever needs them first."""
    bounds, starts = equal_units(num_samples, size), range(0, num_samples, 50)
    expected = whole(WindowOrder(bounds, 2, 0), num_samples, 1)
    order = WindowOrder(bounds, 2, 0)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda start: order.samples(1, start, start + 50), starts)
        assert np.array_equal(np.concatenate(list(found)), expected)


@pytest.mark.parametrize("counts", [[70_000, 65_536, 9], [1, 200, 30, 7] * 90, [64] * 500 + [5]])
def test_the_core_and_its_twin_agree_on_pieces_of_unequal_units(counts: list[int]) -> None:
    found = []
    for way in (mock.MagicMock(), twin()):
        with way:
            cuts = [dealt(sum(counts), piece, 3) for piece in range(3)]
            pieces = [WindowOrder(bounds_of(counts), 40, 1, cut) for cut in cuts]
            sizes = [int(piece._table(2).begin[-1]) for piece in pieces]
            found.append([whole(*each, 2) for each in zip(pieces, sizes, strict=True)])
    for ours, theirs in zip(*found, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(np.sort(np.concatenate(found[0])), np.arange(sum(counts)))


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@pytest.mark.parametrize("refused", ["window_samples", "new_store"])
def test_the_core_has_no_memory_left(refused: str) -> None:
    """NumPy computes the order then."""
    core: Any = load_core()
    order = WindowOrder(equal_units(1000, 10), 20, 3)
    expected = whole(order, 1000, 1)
    with mock.patch.object(core, refused, return_value=0):
        assert np.array_equal(whole(WindowOrder(equal_units(1000, 10), 20, 3), 1000, 1), expected)


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_thread_has_no_memory_left_for_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Python finds the samples of a batch then, whatever rows these have."""
    core: Any = load_core()
    write(tmp_path / "a.h5", values_of(200, 3), chunks=(10, 3))
    steps = {"x": Field("data", steps=range(-2, 3), pad="edge")}

    def epoch() -> list[Any]:
        with open_window(tmp_path / "a.h5", fields=steps, num_threads=num_threads) as reader:
            return [(batch.index.tolist(), batch["x"].tolist()) for batch in reader]

    expected, mapping_of = epoch(), WindowOrder._mapping

    def too_large(*arguments: Any) -> Any:
        mapping: Any = mapping_of(*arguments)
        core.Window.from_address(int(mapping[2])).block_rounds = 1 << 40
        return mapping

    monkeypatch.setattr(WindowOrder, "_mapping", too_large)
    assert epoch() == expected


def test_what_is_given_is_not_changed_and_what_is_taken_is_new() -> None:
    bounds = equal_units(100, 7)
    before = bounds.copy()
    order = WindowOrder(bounds, 3, 0)
    first = order.samples(0, 10, 30)
    expected = first.copy()
    first[:] = -1
    assert np.array_equal(order.samples(0, 10, 30), expected)
    assert np.array_equal(bounds, before)


@pytest.mark.parametrize(
    ("counts", "window", "seed", "epoch", "samples"),
    [
        ([3, 2, 4, 1], 2, 0, 0, [3, 4, 8, 5, 6, 7, 9, 2, 1, 0]),
        ([3, 2, 4, 1], 2, 0, 1, [0, 2, 3, 4, 1, 7, 8, 9, 6, 5]),
        ([3, 2, 4, 1], 2, 1, 0, [5, 7, 8, 6, 0, 2, 3, 4, 1, 9]),
        ([4] * 5, 3, 7, 2, [7, 5, 15, 6, 12, 4, 10, 8, 14, 17, 9, 13, 19, 2, 3, 11, 18, 1, 16, 0]),
        ([1] * 12, 2, 0, 0, [8, 4, 7, 1, 11, 2, 5, 3, 9, 10, 6, 0]),
        ([10], 2, -3, 4, [8, 2, 5, 0, 9, 4, 7, 1, 6, 3]),
        (
            [4] * 9,
            5,
            1,
            0,
            [
                20,
                10,
                23,
                0,
                8,
                21,
                28,
                9,
                22,
                2,
                1,
                30,
                32,
                11,
                25,
                35,
                29,
                3,
                34,
                26,
                31,
                18,
                33,
                17,
                27,
                7,
                6,
                24,
                16,
                15,
                12,
                19,
                5,
                4,
                14,
                13,
            ],
        ),
    ],
)
def test_golden_values(
    counts: list[int], window: int, seed: int, epoch: int, samples: list[int]
) -> None:
    """The order is a promise: who resumes a training with another version must get the same."""
    order = WindowOrder(bounds_of(counts), window, seed)
    assert whole(order, sum(counts), epoch).tolist() == samples


def test_golden_values_of_a_large_one() -> None:
    order = whole(WindowOrder(equal_units(100_003, 1000), 20, 0), 100_003, epoch=5)
    positions = [0, 1, 2, 50_000, 100_001, 100_002]
    assert order[positions].tolist() == [7275, 7087, 7463, 48761, 20881, 20383]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_seed_and_epoch_make_another_order(size: int) -> None:
    bounds = equal_units(2000, size)
    orders = [
        whole(WindowOrder(bounds, 5, seed), 2000, epoch)
        for seed in (-1, 0, 1, 11, 2**64, 2**64 + 1)
        for epoch in (0, 1, 11)
    ]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert np.mean(one == other) < 0.02


# --- mixed within a window -------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 4)
@given(unit_counts, windows, st.integers(0, 5))
def test_no_more_units_are_alive_than_the_window_and_a_group_hold(
    counts: list[int], window: int, epoch: int
) -> None:
    bounds = bounds_of(counts)
    order = whole(WindowOrder(bounds, window, 0), sum(counts), epoch)
    assert most_alive(order, bounds) <= window + max(1, _GROUP_SAMPLES // max(counts))


def test_a_window_of_one_takes_units_one_after_the_other() -> None:
    order = whole(WindowOrder(equal_units(9000, 150), 1, 0), 9000)
    units = (order // 150).reshape(-1, 150)
    assert (units == units[:, :1]).all()
    assert (np.diff(order) == 1).mean() < 0.1


def mates(order: np.ndarray, unit: np.ndarray, batch_size: int) -> float:
    """How many others of its unit a sample finds in its batch, on average."""
    batches = np.sort(unit[order[: order.size // batch_size * batch_size]].reshape(-1, batch_size))
    pairs = 0
    for batch in batches:
        count = np.bincount(batch - batch[0])
        pairs += int((count * (count - 1)).sum())
    return pairs / batches.size


@pytest.mark.parametrize(
    ("size", "window", "batch_size"), [(16, 64, 128), (16, 64, 32), (100, 20, 50), (7, 100, 30)]
)
def test_few_of_a_unit_meet_in_a_batch(size: int, window: int, batch_size: int) -> None:
    num_samples = size * 40 * (window // 10)
    unit = np.arange(num_samples) // size
    order = whole(WindowOrder(equal_units(num_samples, size), window, 0), num_samples)
    in_order = mates(np.arange(num_samples), unit, batch_size)
    found = mates(order, unit, batch_size)
    # As if batches were drawn out of the samples of as many units as the window has.
    assert found < 1.5 * (batch_size - 1) * (size - 1) / (window * size - 1)
    assert found < in_order / 4


@pytest.mark.slow
@pytest.mark.parametrize(("size", "window"), [(16, 8), (5, 12), (40, 3), (200, 5)])
def test_each_sample_may_come_anywhere(size: int, window: int) -> None:
    """Over seeds, the position of a sample is uniform, and so is what comes at a position."""
    chisquare = pytest.importorskip("scipy.stats").chisquare
    num_samples, bins, seeds = size * 24, 12, 600
    bounds = equal_units(num_samples, size)
    orders = [whole(WindowOrder(bounds, window, s), num_samples) for s in range(seeds)]
    positions = np.argsort(np.stack(orders), axis=1)
    edges = np.linspace(0, num_samples, bins + 1)
    error = num_samples / np.sqrt(12 * seeds)
    for of in (positions, np.stack(orders)):
        for number in (0, 1, size - 1, size, num_samples // 2, num_samples - 1):
            assert chisquare(np.histogram(of[:, number], edges)[0]).pvalue > P_MIN
        means = of.mean(axis=0)
        assert abs(means - (num_samples - 1) / 2).max() < 5 * error


def test_samples_that_follow_each_other_are_not_neighbours() -> None:
    num_samples = 16 * 500
    order = whole(WindowOrder(equal_units(num_samples, 16), 50, 0), num_samples)
    unit = order // 16
    for lag in (1, 2, 16, 64):
        assert np.mean(unit[lag:] == unit[:-lag]) < 3 / 50
        assert np.mean(abs(order[lag:] - order[:-lag]) == 1) < 1 / 50
        r = np.corrcoef(order[lag:], order[:-lag])[0, 1]
        assert abs(r) < 4 / np.sqrt(num_samples) + 1 / 50


# --- what a unit is, and how many are mixed --------------------------------------------------


def test_the_window_holds_what_the_memory_holds() -> None:
    of = layout((10_000, 4), (10, 4), filters=DEFLATE)
    assert unit_nbytes_of(of) == 160
    windows = [window_order([of], n, 0).window for n in (1, 160, 10_000, 50_000, 10**9)]
    assert windows[:2] == [2, 2]
    assert windows == sorted(windows)
    assert windows[-1] == 500, "half of all"
    for window, nbytes in zip(windows[2:4], (10_000, 50_000), strict=True):
        assert nbytes / 2 < window * 160 < nbytes
    labels = layout((10_000, 4), (10, 4), filters=DEFLATE)
    assert window_order([of, labels], 50_000, 0).window == pytest.approx(windows[3] / 2, abs=1)


@pytest.mark.parametrize(
    ("leader", "other", "counts"),
    [
        (((100, 8), (7, 8), DEFLATE), ((100,), (50,), DEFLATE), [7] * 14 + [2]),
        (((100,), (50,), DEFLATE), ((100, 8), (7, 8), DEFLATE), [7] * 14 + [2]),
        (((100, 8), (20, 8), DEFLATE), ((100, 80), (), ()), [20] * 5),
        (((100, 8), (20, 8), ()), ((100,), (30,), ()), [20] * 5),
        (((100, 8), (), ()), ((100,), (), ()), [100]),
        (((9, 100_000), (), ()), ((9,), (), ()), [2, 2, 2, 2, 1]),
        (((9, 1_000_000), (), ()), ((9,), (), ()), [1] * 9),
    ],
)
def test_the_field_of_the_largest_units_leads(leader: Any, other: Any, counts: list[int]) -> None:
    fields = [layout(shape, chunks, filters=f) for shape, chunks, f in (leader, other)]
    bounds = bounds_of(counts)
    for layouts in (fields, fields[::-1]):
        order = window_order(layouts, 10**6, 5)
        expected = WindowOrder(bounds, order.window, 5)
        num_samples = fields[0].num_samples
        assert np.array_equal(whole(order, num_samples), whole(expected, num_samples))


def test_fields_share_the_memory_by_the_size_of_their_units() -> None:
    data, labels = (layout((100, n), (10, n), filters=DEFLATE) for n in (30, 10))
    raw = layout((100, 30), (10, 30))
    shares = [kept_nbytes(field, [data, labels, raw], 1000) for field in (data, labels, raw)]
    assert shares == [750, 250, 0]
    assert kept_nbytes(raw, [raw], 1000) == 0


# --- the reader ------------------------------------------------------------------------------

ROWS = 300
GZIP = {"compression": "gzip", "compression_opts": 1}


def values_of(*shape: int, dtype: str = "i4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, shape).astype(dtype)


def write(path: Path, values: np.ndarray, name: str = "data", **storage: Any) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset(name, data=values, **storage)


def write_in_header(path: Path) -> None:
    with h5py.File(path, "w") as file:
        write_compact(file, "data", values_of(ROWS, 5))


def write_only_h5py(path: Path) -> None:
    write(path, values_of(ROWS, 5), dtype=type_for_h5py(), chunks=(16, 5), **GZIP)


def write_with_holes(path: Path) -> None:
    with h5py.File(path, "w") as file:
        options = {"chunks": (16, 5), "fillvalue": 7, **GZIP}
        dataset = file.create_dataset("data", (ROWS, 5), "i4", **options)
        dataset[40:90] = values_of(50, 5)
        dataset[200:201] = 3


def write_masked(path: Path) -> None:
    """One chunk is stored raw, by its filter mask."""
    values = values_of(ROWS, 5)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", data=values, chunks=(20, 5), **GZIP)
        dataset.id.write_direct_chunk((40, 0), values[40:60].tobytes(), filter_mask=1)


def write_virtual(path: Path) -> None:
    """Sources of several lengths and chunkings, one of them in another file, and a gap."""
    write(path, values_of(100, 5), "a", chunks=(16, 5), **GZIP)
    write(path, values_of(150, 5, seed=1), "b", chunks=(40, 5), **GZIP)
    write(path.with_name("other.h5"), values_of(45, 5, seed=2), "c")
    sources = h5py.VirtualLayout((ROWS, 5), np.int32)
    with h5py.File(path, "r+") as file:
        sources[0:100] = h5py.VirtualSource(file["a"])
        sources[100:250] = h5py.VirtualSource(file["b"])
        sources[250:295] = h5py.VirtualSource("other.h5", "c", (45, 5))
        file.create_virtual_dataset("data", sources, fillvalue=-3)


def write_interleaved_virtual(path: Path) -> None:
    """Every other sample is of the same source: parts that are no runs."""
    write(path, values_of(150, 5), "a", chunks=(16, 5), **GZIP)
    write(path, values_of(150, 5, seed=1), "b", chunks=(40, 5), **GZIP)
    sources = h5py.VirtualLayout((ROWS, 5), np.int32)
    with h5py.File(path, "r+") as file:
        sources[0:ROWS:2] = h5py.VirtualSource(file["a"])
        sources[1:ROWS:2] = h5py.VirtualSource(file["b"])
        file.create_virtual_dataset("data", sources)


def plain(*shape: int, **storage: Any) -> Callable[[Path], None]:
    return lambda path: write(path, values_of(*shape), **storage)


WRITERS: dict[str, tuple[Callable[[Path], None], int]] = {  # and the sample dimension
    "contiguous": (plain(ROWS, 5), 0),
    "raw chunks": (plain(ROWS, 5, chunks=(16, 5)), 0),
    "gzip": (plain(ROWS, 5, chunks=(16, 5), **GZIP), 0),
    "gzip, one a chunk": (plain(ROWS, 5, chunks=(1, 5), **GZIP), 0),
    "gzip, all in one chunk": (plain(ROWS, 5, chunks=(ROWS, 5), **GZIP), 0),
    "gzip, shuffled bytes, checksum": (
        plain(ROWS, 5, chunks=(16, 5), shuffle=True, fletcher32=True, **GZIP),
        0,
    ),
    "gzip, chunks across a row": (plain(ROWS, 6, 7, chunks=(16, 4, 3), **GZIP), 0),
    "raw chunks across a row": (plain(ROWS, 6, 7, chunks=(16, 4, 3)), 0),
    "gzip, samples last": (plain(7, ROWS, chunks=(3, 16), **GZIP), 1),
    "gzip, samples in the middle": (plain(7, ROWS, 3, chunks=(3, 16, 2), **GZIP), 1),
    "raw chunks, samples last": (plain(7, ROWS, chunks=(3, 16)), 1),
    "contiguous, samples last": (plain(7, ROWS), 1),
    "scaleoffset": (plain(ROWS, 5, chunks=(16, 5), scaleoffset=0), 0),
    "compact": (write_in_header, 0),
    "only through h5py": (write_only_h5py, 0),
    "with holes": (write_with_holes, 0),
    "a chunk stored raw": (write_masked, 0),
    "virtual": (write_virtual, 0),
    "virtual, interleaved": (write_interleaved_virtual, 0),
}


@pytest.fixture
def nothing_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep decoded chunks only as the window has it, however small a dataset is."""
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)


def open_window(path: Any, **options: Any) -> AsyncReader:
    options = {"labels_field": None, "batch_size": 13, "device": "cpu", **options}
    return AsyncReader(hdf5_path=path, shuffle="window", **options)


def epoch_index(reader: AsyncReader) -> list[int]:
    return np.concatenate([batch.index for batch in reader]).tolist()


@pytest.mark.usefixtures("nothing_is_kept_whole")
@each("num_threads", [0, 1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_batches_equal_h5py(tmp_path: Path, name: str, num_threads: int) -> None:
    """With memory for nothing, for some chunks, and for all."""
    path = tmp_path / "f.h5"
    make, num_dim = WRITERS[name]
    make(path)
    expected = truth(path, num_dim=num_dim)
    for nbytes, batch_size in ((1, 40), (3000, 13), (1 << 28, 1000)):
        options = {"window_bytes": nbytes, "batch_size": batch_size, "num_dim": num_dim}
        with open_window(path, num_threads=num_threads, **options) as reader:
            for _ in range(1 + (batch_size == 13)):
                assert_epoch_is(reader, expected, in_order=False)
            assert (reader.fallback_reads > 0) == (name == "only through h5py")


@pytest.mark.parametrize("name", ["gzip", "contiguous", "virtual", "gzip, samples last"])
def test_the_order_depends_on_seed_and_epoch_and_memory_for_the_window(
    tmp_path: Path, name: str
) -> None:
    """Not on threads, batches, slots, or how files are read."""
    path = tmp_path / "f.h5"
    make, num_dim = WRITERS[name]
    make(path)

    def orders(**options: Any) -> list[list[int]]:
        with open_window(path, **{"num_dim": num_dim, "num_threads": 0, **options}) as reader:
            return [epoch_index(reader) for _ in range(3)]

    found = orders()
    assert found[0] != found[1] != found[2]
    for options in (
        {"num_threads": 1},
        {"num_threads": 3},
        {"batch_size": 1},
        {"batch_size": 299},
        {"prefetch": 5, "num_threads": 2},
        {"io": "pread"},
        {"io": "map"},
    ):
        assert orders(**options) == found, options
    assert orders(seed=1)[0] not in found
    with open_window(path, num_threads=2, num_dim=num_dim) as reader:
        for batch in reader:
            if batch.number == 2:
                break
        assert epoch_index(reader) == found[1], "an epoch that was left does not count"


@pytest.mark.parametrize("io", ["pread", "map"])
def test_the_order_of_a_member_in_columns_is_the_same_whoever_reads_it(
    tmp_path: Path, io: str
) -> None:
    """Columns of contiguous datasets go through h5py where nothing may be mapped."""
    path = tmp_path / "f.h5"
    pair = np.zeros((3, 60_000), [("a", "i4"), ("b", "f8")])
    pair["a"] = values_of(3, 60_000)
    write(path, pair)
    with open_window(path, data_field="data/a", num_dim=1, batch_size=60_000) as reader:
        expected = epoch_index(reader)
    options = {"data_field": "data/a", "num_dim": 1, "batch_size": 60_000, "io": io}
    with open_window(path, **options) as reader:
        assert (reader.layouts["data"].fallback_reason is None) == (io == "map")
        assert epoch_index(reader) == expected


@pytest.mark.slow
def test_several_files(tmp_path: Path, nothing_is_kept_whole: None) -> None:
    """Units do not reach over the end of a file; files have lengths and chunkings of their own."""
    paths, parts, counts = [], [], []
    for number, (length, size) in enumerate([(100, 16), (33, 5), (1, 16), (200, 50)]):
        paths.append(tmp_path / f"{number}.h5")
        parts.append(values_of(length, 5, seed=number))
        write(paths[-1], parts[-1], chunks=(min(size, length), 5), **GZIP)
        write(paths[-1], np.arange(length), "labels")
        counts += np.diff(equal_units(length, size)).tolist()
    expected = np.concatenate(parts)
    labels = np.concatenate([np.arange(len(part)) for part in parts])
    for num_threads in (0, 1, 3):
        options = {"labels_field": "labels", "num_threads": num_threads}
        for nbytes in (1, 10_000, 1 << 28):
            with open_window(paths, window_bytes=nbytes, **options) as reader:
                assert np.diff(unit_bounds(reader.layouts["data"])).tolist() == counts
                assert_epoch_is(reader, expected, in_order=False)
                assert_epoch_is(reader, labels, name="labels", in_order=False)


def test_units_of_a_virtual_dataset_are_those_of_its_sources(tmp_path: Path) -> None:
    write_virtual(tmp_path / "f.h5")
    with open_window(tmp_path / "f.h5") as reader:
        counts = np.diff(unit_bounds(reader.layouts["data"])).tolist()
    assert counts == [16] * 6 + [4] + [40] * 3 + [30, 45, 5]


@pytest.mark.usefixtures("nothing_is_kept_whole")
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_labels_of_another_chunking(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    write(path, values_of(ROWS, 50), chunks=(16, 50), **GZIP)
    for number, size in enumerate([1, 7, 100, ROWS]):
        name = f"labels{number}"
        write(path, values_of(ROWS, seed=number), name, chunks=(size,), **GZIP)
        options = {"labels_field": name, "num_threads": num_threads, "window_bytes": 30_000}
        with open_window(path, **options) as reader:
            for field, dataset in (("data", "data"), ("labels", name)):
                assert_epoch_is(reader, truth(path, dataset), name=field, in_order=False)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_drop_last(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    write(path, values_of(ROWS, 5), chunks=(16, 5), **GZIP)
    expected = truth(path)
    left_out = []
    with open_window(path, batch_size=23, drop_last=True, num_threads=num_threads) as reader:
        assert len(reader) == 13
        for _ in range(3):
            index = []
            for batch in reader:
                assert batch.size == 23
                assert_same_bits(batch.data, expected[batch.index])
                index += batch.index.tolist()
            assert len(set(index)) == len(index) == 299
            left_out.append((set(range(ROWS)) - set(index)).pop())
    assert len(set(left_out)) > 1


@pytest.mark.parametrize("storage", [{}, {"chunks": (4, 5)}, {"chunks": (4, 5), **GZIP}])
def test_without_samples_or_bytes(tmp_path: Path, storage: dict[str, Any]) -> None:
    write(tmp_path / "none.h5", np.zeros((0, 5)), maxshape=(None, 5), chunks=(4, 5))
    write(tmp_path / "empty.h5", np.zeros((10, 0)))
    with open_window(tmp_path / "none.h5") as reader:
        assert list(reader) == []
        with pytest.raises(DatasetError, match="no batch"):
            reader.get_next_batch()
    with open_window(tmp_path / "empty.h5", batch_size=4) as reader:
        assert_epoch_is(reader, np.zeros((10, 0)), in_order=False)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "256M", None])
def test_memory_for_the_window_that_does_not_fit(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "f.h5", values_of(10))
    with pytest.raises(ConfigError, match="window_bytes"):
        open_window(tmp_path / "f.h5", window_bytes=value)


# --- each chunk is decoded once --------------------------------------------------------------


def num_chunks(path: Path, *names: str) -> int:
    with h5py.File(path) as file:
        return sum(file[name].id.get_num_chunks() for name in names)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What decoded chunks are kept in, by field; each knows how much it held at most."""
    made: list[Any] = []

    class Collected(Collection):
        def close(self) -> None:
            most = most_kept_nbytes(self)
            if any(most):
                made.extend(SimpleNamespace(most_nbytes=n) for n in most)
            super().close()

    monkeypatch.setattr("h5async.read.executors.Collection", Collected)
    return made


ONCE: dict[str, tuple[Callable[[Path], None], int, int]] = {  # and decoded bytes of a unit
    "gzip": (plain(960, 5, chunks=(8, 5), **GZIP), 0, 8 * 20),
    "gzip, short last chunk": (plain(955, 5, chunks=(8, 5), **GZIP), 0, 8 * 20),
    "chunks across a row": (plain(960, 6, 7, chunks=(8, 4, 3), **GZIP), 0, 6 * 8 * 48),
    "one sample in several chunks": (plain(240, 6, 7, chunks=(1, 4, 3), **GZIP), 0, 6 * 48),
    "samples last": (plain(7, 960, chunks=(3, 8), **GZIP), 1, 3 * 3 * 32),
}


@pytest.mark.usefixtures("nothing_is_kept_whole")
@each("num_threads", [0, 2])
@pytest.mark.parametrize("name", ONCE)
def test_each_chunk_is_decoded_once_an_epoch(
    tmp_path: Path, caches: list[Any], name: str, num_threads: int
) -> None:
    path = tmp_path / "f.h5"
    make, num_dim, unit_nbytes = ONCE[name]
    make(path)
    caches.clear()
    options = {"num_dim": num_dim, "num_threads": num_threads, "batch_size": 6}
    window_bytes = 100 * unit_nbytes  # of 120 units, or 240; the window takes half of them
    with open_window(path, window_bytes=window_bytes, **options) as reader:
        assert unit_nbytes_of(reader.layouts["data"]) == unit_nbytes
        read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == num_chunks(path, "data")
        assert reader.stats().samples == reader.num_samples
    kept = sum(cache.most_nbytes for cache in caches)
    # Chunks of one sample are of one batch, and need not be kept for another one.
    assert name == "one sample in several chunks" or kept > 0
    assert kept <= window_bytes


@pytest.mark.usefixtures("nothing_is_kept_whole")
@pytest.mark.parametrize("size", [4, 16, 64])
def test_each_chunk_is_decoded_once_whatever_the_memory(
    tmp_path: Path, caches: list[Any], size: int
) -> None:
    """As soon as a third of it has room for the batches in flight; here, without threads."""
    path = tmp_path / "f.h5"
    write(path, values_of(120 * size, 5), chunks=(size, 5), **GZIP)
    options = {"batch_size": 16, "prefetch": 1, "num_threads": 0}
    found = {}
    for units in (16, 24, 48, 96):
        if units / 3 < 2 * -(-16 // size) + 2:
            continue
        with open_window(path, window_bytes=units * size * 20, **options) as reader:
            read_exactly_an_epoch(reader)
            found[units] = reader.stats().decoded_chunks
        assert caches[-1].most_nbytes <= units * size * 20
    assert len(found) > 1
    assert found == dict.fromkeys(found, 120)


@pytest.mark.usefixtures("nothing_is_kept_whole")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_each_chunk_of_several_files_is_decoded_once(
    tmp_path: Path, caches: list[Any], num_threads: int
) -> None:
    paths = [tmp_path / f"{number}.h5" for number in range(5)]
    for number, path in enumerate(paths):
        write(path, values_of(200 + 7 * number, 5, seed=number), chunks=(8, 5), **GZIP)
    window_bytes = 110 * 160
    options = {"num_threads": num_threads, "batch_size": 6, "window_bytes": window_bytes}
    with open_window(paths, **options) as reader:
        read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == sum(num_chunks(path, "data") for path in paths)
    assert 0 < sum(cache.most_nbytes for cache in caches) <= window_bytes


@pytest.mark.usefixtures("nothing_is_kept_whole")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_each_chunk_of_a_virtual_dataset_is_decoded_once(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    sources = h5py.VirtualLayout((600, 5), np.int32)
    for number in range(3):
        write(path, values_of(200, 5, seed=number), f"part{number}", chunks=(8, 5), **GZIP)
    with h5py.File(path, "r+") as file:
        for number in range(3):
            sources[200 * number : 200 * number + 200] = h5py.VirtualSource(file[f"part{number}"])
        file.create_virtual_dataset("data", sources)
    options = {"num_threads": num_threads, "batch_size": 6, "window_bytes": 60 * 160}
    with open_window(path, **options) as reader:
        read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == num_chunks(path, "part0", "part1", "part2") == 75


@pytest.mark.parametrize("num_threads", [0, 2])
def test_small_labels_are_decoded_once_beside_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: list[Any], num_threads: int
) -> None:
    """A chunk of labels spans many of data; they are kept as a whole."""
    path = tmp_path / "f.h5"
    write(path, values_of(960, 50), chunks=(8, 50), **GZIP)
    write(path, values_of(960), "labels", chunks=(100,), **GZIP)
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 10 * 400)
    options = {"labels_field": "labels", "num_threads": num_threads, "batch_size": 6}
    with open_window(path, window_bytes=120 * 1600, **options) as reader:
        read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks == num_chunks(path, "data", "labels") == 130
    data, labels = caches
    assert data.most_nbytes <= 120 * 1600
    assert labels.most_nbytes == 10 * 400


@pytest.mark.usefixtures("nothing_is_kept_whole")
def test_a_full_shuffle_decodes_them_many_times(tmp_path: Path) -> None:
    """The tests above can tell."""
    path = tmp_path / "f.h5"
    write(path, values_of(960, 5), chunks=(8, 5), **GZIP)
    options = {"labels_field": None, "num_threads": 0, "batch_size": 6, "device": "cpu"}
    with AsyncReader(hdf5_path=path, shuffle="full", **options) as reader:
        read_exactly_an_epoch(reader)
        assert reader.stats().decoded_chunks > 3 * num_chunks(path, "data")


@pytest.mark.usefixtures("nothing_is_kept_whole")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_too_little_memory_costs_decoding_only(
    tmp_path: Path, caches: list[Any], num_threads: int
) -> None:
    path = tmp_path / "f.h5"
    write(path, values_of(960, 5), chunks=(8, 5), **GZIP)
    expected = truth(path)
    with open_window(path, window_bytes=1, num_threads=num_threads) as reader:
        for _ in range(2):
            assert_epoch_is(reader, expected, in_order=False)
        assert reader.stats().decoded_chunks > 120
    assert caches[0].most_nbytes == 2 * 160, "two chunks are kept in any case"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_memory_stays_within_the_window(
    tmp_path: Path, caches: list[Any], num_threads: int
) -> None:
    """Of a dataset of 80 MiB, which is more than is kept without being asked."""
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        options = {"chunks": (16, 64 * KIB), "compression": "lzf"}
        dataset = file.create_dataset("data", (1280, 64 * KIB), "u1", **options)
        for start in range(0, 1280, 16):
            dataset[start : start + 16] = start // 16
    window_bytes, batch_size = 24 * MIB, 16
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        options = {"batch_size": batch_size, "num_threads": num_threads}
        with open_window(path, window_bytes=window_bytes, **options) as reader:
            window = reader._engine.position.schedule.sampling.order
            assert isinstance(window, WindowOrder)
            assert 12 <= window.window < 24
            for batch in reader:
                assert (batch.data == (batch.index // 16)[:, None]).all()
                del batch
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    kept = sum(cache.most_nbytes for cache in caches)
    slots, scratch = 2 * batch_size * 64 * KIB, 8 * MIB * max(1, num_threads)
    assert window_bytes - 4 * MIB < kept <= window_bytes
    assert peak < (window_bytes if load_core() is None else 0) + slots + scratch
