"""Parts of a split: disjoint, complete, of their shares, in whole groups, of all classes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.order.selection import part_of

shares_lists = st.lists(st.integers(0, 10), min_size=1, max_size=4).map(
    lambda parts: [part / max(1, sum(parts)) for part in parts]
)


def parts_of(shares, count, seed=0, **values):
    return [part_of(number, shares, count, seed, **values) for number in range(len(shares))]


def check_are_parts(parts, count, *, whole):
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    every = np.sort(np.concatenate(parts))
    assert (np.diff(every) > 0).all()
    if whole:
        assert every.tolist() == list(range(count))


@given(shares_lists, st.integers(0, 3000), st.integers(-5, 5))
def test_of_samples(shares, count, seed):
    parts = parts_of(shares, count, seed)
    check_are_parts(parts, count, whole=sum(shares) > 0)
    for part, share in zip(parts, shares, strict=True):
        assert abs(part.size - share * count) <= 1


@given(shares_lists, st.lists(st.integers(0, 12), min_size=1, max_size=300), st.integers(0, 9))
def test_groups_stay_together(shares, groups, seed):
    groups = np.array(groups)
    parts = parts_of(shares, groups.size, seed, groups=groups)
    check_are_parts(parts, groups.size, whole=sum(shares) > 0)
    seen = [set(groups[part]) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))
    largest = np.unique(groups, return_counts=True)[1].max()
    for part, share in zip(parts, shares, strict=True):
        assert abs(part.size - share * groups.size) <= largest + 1


@given(shares_lists, st.lists(st.integers(0, 4), min_size=1, max_size=300), st.integers(0, 9))
def test_classes_keep_their_proportions(shares, classes, seed):
    classes = np.array(classes)
    parts = parts_of(shares, classes.size, seed, classes=classes)
    check_are_parts(parts, classes.size, whole=sum(shares) > 0)
    for part, share in zip(parts, shares, strict=True):
        for kind in range(5):
            wanted = share * np.count_nonzero(classes == kind)
            assert abs(np.count_nonzero(classes[part] == kind) - wanted) < 1 + 1e-9


@pytest.mark.parametrize("sizes", [[1] * 1000, [3] * 1000, [1000] + [1] * 1000, [5, 7, 9] * 100])
def test_many_small_classes_leave_parts_their_shares(sizes):
    classes = np.repeat(np.arange(len(sizes)), sizes)
    part = part_of(1, [0.9, 0.1], classes.size, 3, classes=classes)
    assert abs(part.size - 0.1 * classes.size) <= 3 + len(sizes) / 100


@given(
    shares_lists,
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=200),
)
def test_groups_of_classes(shares, pairs):
    groups, classes = np.array(pairs).T
    parts = parts_of(shares, groups.size, groups=groups, classes=classes)
    check_are_parts(parts, groups.size, whole=sum(shares) > 0)
    seen = [set(groups[part]) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_whole_groups_of_pure_classes_keep_proportions():
    groups = np.arange(4000) // 4
    classes = groups % 3
    train, val = parts_of([0.8, 0.2], 4000, groups=groups, classes=classes)
    for kind in range(3):
        of_kind = np.count_nonzero(classes == kind)
        assert abs(np.count_nonzero(classes[val] == kind) - 0.2 * of_kind) <= 4
    assert not set(groups[train]) & set(groups[val])


@pytest.mark.parametrize(
    "values",
    [
        np.array([b"x", b"y", b"x", b"zz"] * 25, object),
        np.array(["a", "b", "a", "c"] * 25),
        np.array([np.nan, 1.0, np.nan, 2.0] * 25),
        np.array([(1, 2), (1, 3), (1, 2), (0, 0)] * 25, [("a", "i4"), ("b", "i4")]),
        np.array([True, False, True, True] * 25),
    ],
    ids=["bytes", "strings", "nan", "compound", "bool"],
)
def test_values_of_all_kinds(values):
    parts = parts_of([0.5, 0.5], 100, groups=values)
    check_are_parts(parts, 100, whole=True)
    numbers = np.unique(values, return_inverse=True)[1].reshape(-1)
    assert not set(numbers[parts[0]]) & set(numbers[parts[1]])


def test_seeds_make_other_parts():
    found = {tuple(part_of(0, [0.1, 0.9], 1000, seed)) for seed in range(20)}
    assert len(found) == 20


def test_each_sample_is_in_a_part_as_often_as_its_share_says():
    times = np.zeros(500)
    for seed in range(400):
        times[part_of(0, [0.25, 0.75], 500, seed)] += 1
    expected = 100
    statistic = ((times - expected) ** 2 / (expected * 0.75)).sum()
    assert 380 < statistic < 630  # chi-squared of 499 degrees: beyond 4 standard deviations


GOLDEN = [
    (10, {}, "a0a81a2164f1a1ed"),
    (1025, {}, "0c75fc7340608277"),
    (100_000, {}, "8ae0567e227ecce7"),
    (1000, {"groups": np.arange(1000) % 37}, "164b99c8e76b2d9f"),
    (1000, {"classes": np.arange(1000) % 7}, "26a5426d22c20b69"),
    (
        1000,
        {"groups": np.arange(1000) // 5, "classes": np.arange(1000) // 5 % 3},
        "e2aaca9fc6feeea2",
    ),
]


@pytest.mark.parametrize(("count", "values", "expected"), GOLDEN)
def test_parts_are_the_same_for_ever(count, values, expected):
    part = part_of(1, [0.7, 0.3], count, 17, **values)
    found = hashlib.blake2b(part.astype("<i8").tobytes(), digest_size=8).hexdigest()
    assert found == expected


def test_the_parts_of_ten_samples_are_the_same_for_ever():
    assert part_of(1, [0.7, 0.3], 10, 17).tolist() == [1, 4, 8]
