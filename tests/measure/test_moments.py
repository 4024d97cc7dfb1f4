"""Moments of groups of values, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from h5async import Csr
from h5async.measure import summaries
from h5async.measure.summaries import Moments, moments_of, moments_of_rows

# (The fixture changes nothing between examples.)
OF_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


@pytest.fixture(autouse=True, params=["core", "NumPy"])
def way(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(summaries, "load_core", lambda: None)


def expect(found, values, over, fill=None):
    exact = values.astype(np.longdouble)
    is_nan = np.isnan(exact)
    count = (~is_nan).sum(axis=over)
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_array_equal(found.nan, is_nan.sum(axis=over))
    np.testing.assert_array_equal(
        found.fill, 0 if fill is None else (values == fill).sum(axis=over)
    )
    some = count > 0
    mean = np.where(is_nan, 0, exact).sum(axis=over) / np.maximum(count, 1)
    shape = [1 if axis in np.atleast_1d(over) else n for axis, n in enumerate(values.shape)]
    gaps = np.where(is_nan, 0, exact - mean.reshape(shape))
    std = np.sqrt((gaps * gaps).sum(axis=over) / np.maximum(count, 1))
    scale = np.maximum(np.abs(mean), std)[some]
    assert (np.abs(found.mean[some] - mean[some]) <= 1e-14 * scale).all()
    assert (np.abs(found.std[some] - std[some]) <= 1e-13 * std[some] + 1e-15 * scale).all()
    low = np.where(is_nan, np.inf, exact).min(axis=over)
    high = np.where(is_nan, -np.inf, exact).max(axis=over)
    np.testing.assert_array_equal(found.low[some], low[some].astype(float))
    np.testing.assert_array_equal(found.high[some], high[some].astype(float))


@OF_FIXTURE
@given(
    st.sampled_from(KINDS),
    st.tuples(*[st.integers(1, 6)] * 3)
    | st.sampled_from([(2, 700, 1), (1, 3, 5000), (900, 3, 1), (300, 20, 1)]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_moments_are_those_of_numpy(kind, shape, seed, share):
    rng = np.random.default_rng(seed)
    values = rng.normal(100, 30, shape).clip(0, 120).astype(kind)
    if values.dtype.kind == "f":
        values[rng.random(shape) < share] = np.nan
    expect(moments_of(values, 100), values, (0, 2), 100)


@pytest.mark.parametrize("shape", [(1, 1, 300_000), (40, 5000, 1), (3000, 3, 40), (2, 3, 60_000)])
def test_blocks_add_up(shape):
    """Values that no simple sum of squares survives: a mean of a million standard deviations."""
    values = np.random.default_rng(0).normal(1e6, 1, shape)
    expect(moments_of(values), values, (0, 2))


def test_values_far_apart_in_one_group_lose_no_digits():
    values = np.concatenate([np.zeros(40_000), 1e9 + np.arange(100_000.0)]).reshape(1, 1, -1)
    expect(moments_of(values), values, (0, 2))


def test_infinite_values_have_an_infinite_mean():
    found = moments_of(np.array([1.0, np.inf, 2.0]).reshape(1, 1, -1))
    assert found.mean[0] == np.inf
    assert np.isnan(found.std[0])
    assert (found.low[0], found.high[0]) == (1, np.inf)


@OF_FIXTURE
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 50), max_size=5).map(lambda sizes: [*sizes, 1]),
)
def test_parts_in_any_cut_are_the_whole(seed, sizes):
    values = np.random.default_rng(seed).normal(5, 2, (sum(sizes), 3, 2))
    found = Moments.empty(3)
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        found.add(moments_of(part))
    expect(found, values, (0, 2))


@OF_FIXTURE
@given(
    arrays.arrays(
        "f8",
        st.tuples(st.integers(1, 6), st.integers(1, 5)),
        elements=st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.5, -3.0, np.nan]),
    ),
    st.booleans(),
)
def test_sparse_rows_count_their_zeros(dense, by_column):
    matrix = scipy.sparse.csr_matrix(dense)
    rows = Csr(matrix.data, matrix.indices, matrix.indptr, matrix.shape)
    found = moments_of_rows(rows, by_column=by_column)
    expect(found, dense if by_column else dense.reshape(-1, 1), (0,))
