"""Sparse rows, against SciPy's and PyTorch's, and dense ones by the core and by NumPy."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
from conftest import assert_same_bits, require_extra
from hypothesis import given
from hypothesis import strategies as st

import h5async.core.binding
from h5async.errors import ConfigError, DatasetError, MissingPackageError
from h5async.samples.sparse import Csr

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"]
OTHERS = ["f2", "?", "c8", ">f4"]  # which the core does not take
# PyTorch says, once a process, that its own sparse tensors are new.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.fixture(params=["core", "numpy"])
def way(request, monkeypatch):
    """Make rows dense by the core, and by NumPy."""
    if request.param == "core":
        request.getfixturevalue("core")
    else:
        monkeypatch.setattr(h5async.core.binding, "load_core", lambda: None)
    return request.param


@st.composite
def rows(draw, dtypes=tuple(DTYPES), has_duplicates=False):
    """Draw sparse rows, some empty, of few columns or many."""
    count, columns = draw(st.integers(0, 6)), draw(st.sampled_from([0, 1, 3, 50, 2000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = min(columns, 40)
    lengths = [int(n) for n in rng.integers(0, most + 1, count)]
    if has_duplicates and columns:
        indices = [rng.integers(0, columns, n) for n in lengths]
    else:
        indices = [rng.permutation(columns)[:n] for n in lengths]
    kind = draw(st.sampled_from(["i4", "i8"]))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    data = rng.integers(0, 100, sum(lengths)).astype(dtype)
    flat = np.concatenate([np.zeros(0, int), *indices]).astype(kind)
    indptr = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(["i4", "i8"])))
    return Csr(data, flat, indptr, (count, columns))


def dense(csr, dtype=None):
    """Return the rows, made one by one."""
    out = np.zeros(csr.shape, csr.dtype if dtype is None else dtype)
    for row, (indices, values) in zip(out, csr, strict=True):
        np.add.at(row, indices, values.astype(row.dtype))
    return out


@given(rows())
def test_matrices_of_scipy_share_the_memory(csr):
    require_extra("scipy")
    matrix = csr.to_scipy()
    assert matrix.data is csr.data
    assert matrix.indices is csr.indices
    matrix.check_format(full_check=True)
    assert matrix.shape == csr.shape
    assert matrix.dtype == csr.dtype
    assert_same_bits(matrix.toarray(), dense(csr))
    assert_same_bits((matrix * 2)[:1].toarray(), dense(csr)[:1] * 2)


@given(rows(dtypes=["u1", "i4", "i8", "f4", "f8"]))
def test_tensors_of_torch_share_the_memory(csr):
    torch = require_extra("torch")
    tensor = csr.to_torch()
    assert tensor.layout == torch.sparse_csr
    assert tuple(tensor.shape) == csr.shape
    if csr.data.size:
        assert tensor.values().data_ptr() == csr.data.ctypes.data
        assert tensor.col_indices().data_ptr() == csr.indices.ctypes.data
    if csr.dtype in (np.dtype("f4"), np.dtype("f8")):
        assert_same_bits(tensor.to_dense().numpy(), dense(csr))


@pytest.mark.parametrize("kind", ["u4", "u8", ">i4", ">i8", "i2"])
def test_indices_that_libraries_do_not_take_are_converted(kind, way):
    scipy, torch = require_extra("scipy.sparse"), require_extra("torch")
    arrays = np.float32([1, 2, 3]), np.array([4, 0, 2], kind), np.array([0, 2, 2, 3], kind)
    csr = Csr(*arrays, (3, 5))
    expected = scipy.csr_matrix((np.float32([1, 2, 3]), [4, 0, 2], [0, 2, 2, 3]), (3, 5)).toarray()
    for found in (csr.to_scipy().toarray(), csr.to_torch().to_dense().numpy(), csr.to_dense()):
        assert_same_bits(found, expected)
    assert isinstance(csr.to_torch(), torch.Tensor)


@given(st.data())
@pytest.mark.parametrize("has_duplicates", [False, True])
def test_dense_rows(core, has_duplicates, data):
    csr = data.draw(rows(dtypes=(*DTYPES, *OTHERS), has_duplicates=has_duplicates))
    expected = dense(csr)
    if csr.dtype.kind != "c" and csr.dtype != np.float16:
        assert_same_bits(csr.to_scipy().toarray(), expected.astype(csr.dtype.newbyteorder("=")))
    assert_same_bits(csr.to_dense(), expected)
    outs = [np.float32] if csr.dtype.kind != "c" else []
    for dtype in (csr.dtype, *outs):
        wide = np.full((csr.shape[0], csr.shape[1] + 3), 7, dtype)
        twin = wide.copy()
        out = wide[:, 1 : 1 + csr.shape[1]]
        assert csr.to_dense(out) is out
        csr._make_dense(twin[:, 1 : 1 + csr.shape[1]])
        assert_same_bits(out, dense(csr, dtype))
        assert_same_bits(wide, twin)
        assert (wide[:, -2:] == np.array(7, dtype)).all()
        turned = np.full(csr.shape[::-1], 7, dtype).T
        assert_same_bits(np.ascontiguousarray(csr.to_dense(turned)), dense(csr, dtype))


def test_the_core_takes_common_dtypes(core, monkeypatch):
    def refuse(*_):
        raise AssertionError("NumPy made the rows")

    monkeypatch.setattr(Csr, "_make_dense", refuse)
    for dtype in DTYPES:
        for kind in ("i4", "i8"):
            csr = Csr(np.ones(2, dtype), np.array([1, 0], kind), np.array([0, 1, 2], kind), (2, 2))
            for out in (np.empty((2, 2), dtype), np.empty((2, 2), "f4")):
                assert csr.to_dense(out).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("kind", ["i4", "i8", "u4"])
@pytest.mark.parametrize("index", [5, 2**31 - 1, -1])
def test_an_index_that_is_no_column(way, kind, index):
    if kind == "u4" and index < 0:
        index = 2**32 - 1
    csr = Csr(np.ones(3, "f4"), np.array([0, 4, index], kind), np.array([0, 1, 3]), (2, 5))
    with pytest.raises(
        DatasetError, match="sparse row 1 of 2 has an index that is not one of its 5"
    ):
        csr.to_dense()


def test_out_must_fit():
    csr = Csr(np.ones(1, "f4"), np.zeros(1, "i4"), np.array([0, 1]), (1, 2))
    for out in (np.empty((2, 1), "f4"), np.empty((1, 2), "i4")):
        with pytest.raises(ConfigError, match="need one of their shape"):
            csr.to_dense(out)


@given(rows(), st.data())
def test_rows_and_slices_are_views(csr, data):
    expected = dense(csr)
    assert len(csr) == csr.shape[0]
    assert csr.nbytes == csr.data.nbytes + csr.indices.nbytes + csr.indptr.nbytes
    for i in range(-len(csr), len(csr)):
        indices, values = csr[i]
        assert_same_bits(values, expected[i, indices])
        assert not values.size or np.shares_memory(values, csr.data)
        assert not values.size or np.shares_memory(indices, csr.indices)
    for number in (len(csr), -len(csr) - 1):
        with pytest.raises(IndexError):
            csr[number]
    bound = st.one_of(st.none(), st.integers(-8, 8))
    some = slice(data.draw(bound), data.draw(bound))
    part = csr[some]
    assert part.indptr[0] == 0
    assert not part.data.size or np.shares_memory(part.data, csr.data)
    assert_same_bits(part.to_dense(), expected[some])
    with pytest.raises(ConfigError, match="a slice of sparse rows cannot have a step"):
        csr[::-1]


def test_a_copy_has_memory_of_its_own():
    csr = Csr(np.ones(2, "f4"), np.array([1, 0], "i4"), np.array([0, 1, 2]), (2, 2))
    kept, again = csr.copy(), pickle.loads(pickle.dumps(csr))
    for array in (csr.data, csr.indices, csr.indptr):
        array[...] = 0
    for other in (kept, again):
        assert other.to_dense().tolist() == [[0, 1], [1, 0]]


def test_it_is_described_in_a_line():
    csr = Csr(np.ones(2, "f4"), np.array([1, 0], "i4"), np.array([0, 1, 2]), (2, 2000))
    assert repr(csr) == "<Csr: 2 rows of 2,000 columns, 2 values of float32>"


@pytest.mark.parametrize(
    ("data", "indices", "indptr"),
    [
        (np.ones(2), np.zeros(3, "i4"), np.zeros(3, "i8")),
        (np.ones(2), np.zeros(2, "i4"), np.zeros(2, "i8")),
        (np.ones(2), np.zeros(2, "f4"), np.zeros(3, "i8")),
        (np.ones(2), np.zeros(2, "i4"), np.zeros(3, "f8")),
        (np.ones((2, 1)), np.zeros(2, "i4"), np.zeros(3, "i8")),
    ],
)
def test_what_makes_no_sparse_rows(data, indices, indptr):
    with pytest.raises(ConfigError, match="2 sparse rows are made of values"):
        Csr(data, indices, indptr, (2, 2))


@pytest.mark.parametrize(
    ("package", "method"), [("torch", "to_torch"), ("scipy", "to_scipy"), ("cupy", "to_cupy")]
)
def test_a_missing_package_is_named(monkeypatch, package, method):
    for name in (package, f"{package}.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    csr = Csr(np.ones(1, "f4"), np.zeros(1, "i4"), np.array([0, 1]), (1, 2))
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        getattr(csr, method)()
