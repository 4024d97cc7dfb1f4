"""Sparse matrices and columns of tables, against anndata's and SciPy's own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra

from h5async.errors import DatasetError, ReadError, UnsafeFileError
from h5async.index.groupfields import category_names, column, row_offsets, sparse_group, union_of
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach, open_index
from h5async.read.executors import read_whole

SEED = 20160704


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5ad"


def values_of(layout):
    return layout if isinstance(layout, np.ndarray) else read_whole(layout, Reach(io="pread"))


def matrix_of(path, name):
    """Return what SciPy makes of the parts of a matrix."""
    scipy = require_extra("scipy.sparse")
    with open_index(path) as file:
        found = sparse_group(file, name)
    data, indices = values_of(found.data), values_of(found.indices)
    offsets = row_offsets(values_of(found.indptr), found)
    assert offsets.dtype == np.int64
    return scipy.csr_matrix((data, indices, offsets), found.shape)


def some_values(rows, columns):
    """Return an array of which every third value is not 0."""
    rng = np.random.default_rng(SEED)
    values = rng.permutation(rows * columns).astype(np.float32).reshape(rows, columns)
    return np.where(values % 3 == 1, values, 0)


def annotated(path, rows=37, columns=11):
    """Write a file by anndata; return what it holds."""
    anndata, pandas = require_extra("anndata"), require_extra("pandas")
    scipy = require_extra("scipy.sparse")
    rng = np.random.default_rng(SEED)
    x = scipy.csr_matrix(some_values(rows, columns))
    kinds = np.array(["T", "B", "NK", "Monozyt ä"])[rng.integers(0, 4, rows)].astype(object)
    kinds[::7] = None
    numbers = pandas.array(rng.integers(0, 9, rows), dtype="Int16")
    numbers[::5] = None
    flags = pandas.array(rng.integers(0, 2, rows).astype(bool), dtype="boolean")
    flags[::6] = None
    obs = pandas.DataFrame(
        {
            "kind": pandas.Categorical(kinds),
            "donor": pandas.Categorical(rng.integers(5, 8, rows), ordered=True),
            "number": numbers,
            "flag": flags,
            "plain": rng.random(rows),
        },
        index=[f"cell{i}" for i in range(rows)],
    )
    found = anndata.AnnData(x, obs)
    found.layers["counts"] = (x * 10).astype(np.int32)
    found.layers["columns"] = x.tocsc()
    found.raw = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.write_h5ad(path)
    return found


@pytest.mark.slow
def test_matrices_of_anndata(path):
    expected = annotated(path)
    for name, matrix in (
        ("X", expected.X),
        ("/layers/counts/", expected.layers["counts"]),
        ("raw/X", expected.raw.X),
    ):
        found = matrix_of(path, name)
        assert_same_bits(found.toarray(), matrix.toarray())
    with open_index(path) as file:
        found = sparse_group(file, "X")
        assert found.shape == expected.shape
        assert found.data.num_samples == expected.X.nnz
        for name in ("obs", "obs/plain", "obs/kind", "nothing", "X/data", "X/data/more"):
            assert sparse_group(file, name) is None


@pytest.mark.slow
def test_the_command_for_compressed_columns_makes_rows_of_them(path):
    expected = annotated(path)
    with open_index(path) as file, pytest.raises(DatasetError) as caught:
        sparse_group(file, "layers/columns")
    message = str(caught.value)
    assert "is a matrix of compressed columns (CSC)" in message
    command = shlex.split(message[message.index("python -c") :])
    before = path.read_bytes()
    subprocess.run(
        [sys.executable, "-W", "ignore", *command[1:]], check=True, timeout=120, cwd=path.parent
    )
    assert path.read_bytes() == before
    found = matrix_of(path.with_name("a.csr.h5ad"), "layers/columns")
    assert_same_bits(found.toarray(), expected.layers["columns"].toarray())


def write_matrix(group, matrix, **attributes):
    for name in ("data", "indices", "indptr"):
        group[name] = getattr(matrix, name)
    group.attrs.update(attributes)


def some_matrix(form="csr"):
    scipy = require_extra("scipy.sparse")
    return getattr(scipy, f"{form}_matrix")(some_values(9, 5))


@pytest.mark.parametrize("text", [str, np.bytes_])
def test_matrices_of_older_files(path, text):
    matrix = some_matrix()
    with h5py.File(path, "w") as file:
        write_matrix(
            file.create_group("X"), matrix, h5sparse_format=text("csr"), h5sparse_shape=(9, 5)
        )
    assert_same_bits(matrix_of(path, "X").toarray(), matrix.toarray())


@pytest.mark.parametrize("name", ["matrix", "GRCh38"])
def test_matrices_of_10x(path, name):
    """Genes are their rows, and cells their columns, which are compressed."""
    matrix = some_matrix("csc")
    with h5py.File(path, "w") as file:
        group = file.create_group(name)
        write_matrix(group, matrix)
        group["shape"] = np.array([9, 5], np.int32)
        group["barcodes"] = np.array([b"AAA"] * 5)
    with open_index(path) as file:
        assert sparse_group(file, name).shape == (5, 9)
    assert_same_bits(matrix_of(path, name).toarray(), matrix.toarray().T)


def test_parts_behind_links(path):
    matrix = some_matrix()
    with h5py.File(path.with_name("other.h5"), "w") as file:
        file["data"] = matrix.data
    with h5py.File(path, "w") as file:
        write_matrix(
            file.create_group("X"), matrix, **{"encoding-type": "csr_matrix"}, shape=(9, 5)
        )
        del file["X/data"]
        file["X/data"] = h5py.ExternalLink("other.h5", "data")
        file["soft"] = h5py.SoftLink("/X")
    assert_same_bits(matrix_of(path, "soft").toarray(), matrix.toarray())
    with h5py.File(path, "r+") as file:
        del file["X/data"]
        file["X/data"] = h5py.ExternalLink("/etc/hostname", "data")
    with open_index(path) as file, pytest.raises(UnsafeFileError):
        sparse_group(file, "X")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.__delitem__("indices"), 'there is no dataset "X/indices"'),
        (lambda x: x.attrs.__delitem__("shape"), "must be the numbers of rows and columns"),
        (lambda x: x.attrs.__setitem__("shape", (9,)), "must be the numbers of rows and columns"),
        (
            lambda x: x.attrs.__setitem__("shape", (-1, 5)),
            "must be the numbers of rows and columns",
        ),
        (lambda x: x.attrs.__setitem__("shape", (8, 5)), "8 rows, but 10 offsets of rows instead"),
        (lambda x: replace(x, "indices", np.zeros(3, "i4")), "15 values, but 3 column indices"),
        (lambda x: replace(x, "indices", np.zeros(15)), "must be flat and numeric, of integers"),
        (lambda x: replace(x, "data", np.zeros((15, 1))), "must be flat and numeric; it has"),
        (lambda x: replace(x, "data", np.zeros(15, "S3")), "must be flat and numeric; it has"),
    ],
)
def test_parts_that_do_not_fit(path, change, words):
    matrix = some_matrix()
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        write_matrix(group, matrix, **{"encoding-type": "csr_matrix"}, shape=(9, 5))
        change(group)
    with open_index(path) as file, pytest.raises(DatasetError, match=words):
        sparse_group(file, "X")


def replace(group, name, values):
    del group[name]
    group[name] = values


@pytest.mark.parametrize(
    ("indptr", "words"),
    [
        ([0, 3, 2, 18], r"row 1 would begin at value 3 and end at value 2"),
        ([0, 3, 5, 17], r"begin at value 0 and end at value 17, and there are 18 values"),
        ([1, 3, 5, 18], r"begin at value 1 and end at value 18"),
        ([0, -1, 5, 18], r"row 0 would begin at value 0 and end at value -1"),
        (np.array([0, 1, 2**63, 18], np.uint64), r"offsets above 2\*\*63"),
    ],
)
def test_offsets_that_lie(path, indptr, words):
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group["data"], group["indices"] = np.zeros(18, "f4"), np.zeros(18, "i4")
        group["indptr"] = np.asarray(indptr)
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (3, 5)})
    with open_index(path) as file:
        found = sparse_group(file, "X")
    with pytest.raises(DatasetError, match=words) as caught:
        row_offsets(values_of(found.indptr), found)
    assert f'{path}: dataset "X/indptr"' in str(caught.value)


def test_a_matrix_without_rows(path):
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group["data"], group["indices"] = np.zeros(0, "f4"), np.zeros(0, "i4")
        group["indptr"] = np.zeros(1, "i4")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (0, 5)})
    assert matrix_of(path, "X").shape == (0, 5)


def test_a_damaged_group(path):
    with h5py.File(path, "w") as file:
        file.create_group("X").attrs["encoding-type"] = "csr_matrix"
    data = bytearray(path.read_bytes())
    data[data.find(b"HEAP") : data.find(b"HEAP") + 4] = b"PAEH"
    at = data.rfind(b"TREE")
    data[at : at + 4] = b"EERT"
    path.write_bytes(data)
    with open_index(path) as file, pytest.raises((ReadError, DatasetError)):
        assert sparse_group(file, "X") is not None


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_categorical_columns_of_anndata(path):
    expected = annotated(path).obs
    for name in ("kind", "donor"):
        with open_index(path) as file:
            found = column(file, f"obs/{name}")
        assert found.where == f'{path}: column "obs/{name}"'
        assert found.mask is None
        names = category_names(values_of(found.categories))
        assert list(names) == expected[name].cat.categories.tolist()
        codes = values_of(found.values)
        assert_same_bits(codes, expected[name].cat.codes.to_numpy())
    assert -1 in values_of(column_of(path, "obs/kind").values)


def column_of(path, name):
    with open_index(path) as file:
        return column(file, name)


def test_nullable_columns_of_anndata(path):
    expected = annotated(path).obs
    for name in ("number", "flag"):
        found = column_of(path, f"obs/{name}")
        assert isinstance(found.values, DatasetLayout)
        assert found.categories is None
        mask = values_of(found.mask)
        assert mask.tolist() == expected[name].isna().tolist()
        values = values_of(found.values)
        assert values[~mask].tolist() == expected[name][~mask].tolist()


def test_what_is_no_such_column(path):
    annotated(path)
    for name in ("obs/plain", "obs/_index", "obs", "X", "nothing", "obs/plain/more"):
        assert column_of(path, name) is None


@pytest.mark.parametrize("kind", ["text", "S", "numbers"])
def test_categories_of_older_files(path, kind):
    names = {"text": ["x", "ä"], "S": np.array([b"x", b"yy"]), "numbers": [3, 5]}[kind]
    with h5py.File(path, "w") as file:
        file["obs/kind"] = np.array([0, 1, -1, 0], np.int8)
        file["obs/__categories/kind"] = names
        file["obs/kind"].attrs["categories"] = file["obs/__categories/kind"].ref
        file["obs/other"] = np.zeros(4)
        file["obs/other"].attrs["categories"] = "none"
    found = column_of(path, "obs/kind")
    assert values_of(found.values).tolist() == [0, 1, -1, 0]
    assert (
        category_names(values_of(found.categories))
        == {
            "text": ("x", "ä"),
            "S": ("x", "yy"),
            "numbers": (3, 5),
        }[kind]
    )
    assert column_of(path, "obs/other") is None


def test_categories_that_are_nullable_strings(path):
    with h5py.File(path, "w") as file:
        group = file.create_group("obs/kind")
        group.attrs["encoding-type"] = "categorical"
        group["codes"] = np.array([1, 0, -1], np.int8)
        group["categories/values"], group["categories/mask"] = ["x", "ä"], np.zeros(2, bool)
        group["categories"].attrs["encoding-type"] = "nullable-string-array"
    found = column_of(path, "obs/kind")
    assert category_names(values_of(found.categories)) == ("x", "ä")


def test_columns_whose_parts_do_not_fit(path):
    annotated(path)
    for name, part, values, words in (
        ("number", "mask", np.zeros(3, bool), "has 37 values, and a mask of 3"),
        ("flag", "mask", np.zeros(37), "must be flat, and of integers or booleans"),
        ("kind", "codes", np.zeros(37), "must be flat, and of integers or booleans"),
        ("donor", "codes", np.zeros((37, 1), "i1"), "must be flat, and of integers or booleans"),
    ):
        with h5py.File(path, "r+") as file:
            replace(file["obs"][name], part, values)
        with pytest.raises(DatasetError, match=words) as caught:
            column_of(path, f"obs/{name}")
        assert f'column "obs/{name}"' in str(caught.value)


def test_categories_of_several_files_are_united():
    names, codes = union_of([("a", "b"), (), ("c", "b", "d"), ("d", "a")])
    assert names == ("a", "b", "c", "d")
    assert [each.tolist() for each in codes] == [[0, 1, -1], [-1], [2, 1, 3, -1], [3, 0, -1]]
    assert codes[2][np.array([-1, 0, 2, 1])].tolist() == [-1, 2, 3, 1]
