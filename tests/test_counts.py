"""Totals of sparse rows, and values that are scaled by them, against scanpy's formulas."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import scipy.sparse
from hdf5files import write_csr
from hypothesis import given
from hypothesis import strategies as st

from h5async import AsyncReader, ConfigError, Csr, DatasetError, SparseField
from h5async.core.binding import VALUE_KINDS
from h5async.samples import sparsekind

ROWS, COLUMNS, NAMES = 61, 40, [f"gene {n}" for n in range(40)]


@pytest.fixture(scope="module", params=["f4", "i4", "u2", "f8", ">f4"])
def files(request, tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("counts"), np.random.default_rng(1)
    paths, matrices = [], []
    for number in range(2):
        values = rng.poisson(1.0, (ROWS, COLUMNS)) * rng.integers(1, 50, (ROWS, 1))
        values[3] = 0  # an empty cell
        matrix = scipy.sparse.csr_matrix(values.astype("f8"))
        matrices.append(values.astype("f8"))
        paths.append(folder / f"{number}.h5")
        write_csr(paths[-1], matrix)
        with h5py.File(paths[-1], "a") as file:
            data = file["X/data"][()]
            del file["X/data"]
            file.create_dataset(
                "X/data", data=data.astype(request.param), chunks=(64,), compression=1
            )
            file["var/_index"] = NAMES
            file["var"].attrs["_index"] = "_index"
    return paths, np.concatenate(matrices)


def scanpys(dense, target_sum, log1p, totals=None):
    """`normalize_total` and `log1p`, in double precision."""
    found = dense.astype(np.float64)
    if target_sum is not None:
        totals = found.sum(axis=1) if totals is None else totals
        totals = totals + (totals == 0)
        found = found / (totals / target_sum)[:, np.newaxis]
    return np.log1p(found) if log1p else found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("columns", [None, [7, 3, 20], ["gene 5", "gene 39"]])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("target_sum", "log1p"), [(None, False), (1e4, False), (1e4, True), (None, True)]
)
@pytest.mark.parametrize("way", [{"num_threads": 0}, {"num_threads": 2, "cache": "host"}])
def test_a_reader_delivers_totals_and_scaled_values(files, columns, dense, target_sum, log1p, way):
    paths, matrix = files
    field = SparseField(
        "X", columns=columns, dense=dense, totals="n", target_sum=target_sum, log1p=log1p
    )
    chosen = np.arange(COLUMNS) if columns is None else np.array(columns)
    if columns is not None and isinstance(columns[0], str):
        chosen = np.array([NAMES.index(name) for name in columns])
    totals = matrix.sum(axis=1)
    expected = scanpys(matrix, target_sum, log1p)[:, chosen]
    with AsyncReader(
        hdf5_path=paths, fields={"x": field}, shuffle="full", batch_size=16, device="cpu", **way
    ) as reader:
        for _ in range(2):
            for batch in reader:
                assert batch.keys() == ["x", "n"]
                assert batch["n"].dtype == np.float32
                assert np.array_equal(batch["n"], totals[batch.index].astype(np.float32))
                assert isinstance(batch.x, np.ndarray if dense else Csr)
                found = batch.x if dense else batch.x.to_dense()
                if target_sum is None and not log1p:
                    assert np.array_equal(found, expected[batch.index])
                else:
                    assert found.dtype == np.float32
                    assert np.array_equal(found, expected[batch.index].astype(np.float32))


def twice(x, n):
    return x, 2 * n


def test_postprocess_gets_totals_behind_the_fields(files):
    paths, matrix = files
    field = SparseField("X", dense=True, totals="n")
    with AsyncReader(hdf5_path=paths, fields={"x": field}, postprocess=twice) as reader:
        for batch in reader:
            assert np.array_equal(batch["n"], 2 * matrix[batch.index].sum(axis=1))
        assert np.array_equal(reader.read([5, 0])["n"], 2 * matrix[[5, 0]].sum(axis=1))


@given(
    lengths=st.lists(st.integers(0, 20), max_size=8),
    kind=st.sampled_from([*map(str, VALUE_KINDS), ">f4", "bool", "f2"]),
    target_sum=st.one_of(st.none(), st.floats(1e-3, 1e6)),
    log1p=st.booleans(),
    data=st.data(),
)
def test_the_core_and_numpy_agree(lengths, kind, target_sum, log1p, data):
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    dtype = np.dtype(kind)
    numbers = st.integers(0, 1 if dtype.kind == "b" else 100)
    if dtype.kind == "f":
        numbers = st.one_of(
            st.sampled_from([np.nan, np.inf, -1.0, -0.75, -0.5, 1e-20, 0.0]), st.floats(-2, 1e4)
        )
    drawn = data.draw(st.lists(numbers, min_size=int(offsets[-1]), max_size=int(offsets[-1])))
    values = np.array(drawn, np.float64).astype(dtype)
    found = []
    for core in (sparsekind.load_core(), None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparsekind, "load_core", lambda core=core: core)
            totals = sparsekind.row_sums(values, offsets)
            with np.errstate(all="ignore"):
                found.append(
                    (totals, sparsekind.scaled_rows(values, offsets, totals, target_sum, log1p))
                )
    (sums, scaled), (other_sums, other) = found
    np.testing.assert_allclose(sums, other_sums, rtol=1e-12, atol=1e-12)
    assert scaled.dtype == np.float32
    np.testing.assert_array_max_ulp(
        np.nan_to_num(scaled, nan=7.0), np.nan_to_num(other, nan=7.0), 1
    )
    assert np.array_equal(np.isnan(scaled), np.isnan(other))


def test_logarithms_are_those_of_numpy():
    values = np.concatenate([np.logspace(-300, 6, 20_000), np.linspace(-0.5, 4, 20_001)])
    with np.errstate(under="ignore"):
        for some in (values, np.append(values, 1e300)):  # the latter one by one
            offsets = np.array([0, some.size])
            found = sparsekind.scaled_rows(some, offsets, None, None, True)
            assert np.array_equal(found, np.log1p(some).astype(np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"totals": "y"}, "totals delivers 'y', which already exists"),
        ({"totals": "n", "scale": 2.0}, "scale cannot be used with totals"),
        ({"log1p": True, "dtype": "float64"}, "dtype cannot be used with totals"),
        ({"target_sum": 0}, "target_sum"),
        ({"totals": "index"}, "index"),
    ],
)
def test_options_that_do_not_fit(options, message):
    fields = {"x": {"path": "X", "kind": "sparse"} | options, "y": "y"}
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path="none.h5", fields=fields)


@pytest.mark.parametrize("missing", ["zero", "error"])
def test_a_column_that_no_file_has(files, missing):
    field = SparseField("X", columns=["gene 1", "gene 77"], missing=missing, totals="n")
    with pytest.raises(DatasetError, match='no column "gene 77"'):
        AsyncReader(hdf5_path=files[0], fields={"x": field})
