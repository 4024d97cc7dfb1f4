"""Rows of sparse matrices: dtypes, columns by number and name, 10x files, and what is refused."""

from __future__ import annotations

import json
import warnings
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from conftest import read, require_extra
from hdf5files import write_csr
from typer.testing import CliRunner

import h5async.opening.filefacts
from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DatasetError,
    Field,
    ImageField,
    PostprocessError,
    RaggedField,
    SparseField,
)
from h5async.cli import app


def write_matrix(path: Any, dtype: Any = "f4", index_dtype: Any = "i4", **storage: Any) -> Any:
    """Write a sparse matrix as AnnData does; return it dense."""
    scipy = require_extra("scipy.sparse")
    rng = np.random.default_rng(7)
    dense = rng.integers(1, 9, (40, 90)) * (rng.random((40, 90)) < 0.1)
    dense = dense.astype(np.dtype(dtype).newbyteorder("="))
    if dense.dtype.kind == "c":
        dense *= 1 + 2j
    matrix = scipy.csr_matrix(dense)
    matrix.data = matrix.data.astype(dtype)
    write_csr(path, matrix, index_dtype=index_dtype, **storage)
    return dense


@pytest.mark.parametrize("dtypes", [("i4", "i8"), ("i8", ">i4"), ("u1", "i4"), ("u4", "i4")])
@pytest.mark.parametrize("storage", [{}, {"chunks": (50,), "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_indices_of_several_dtypes(tmp_path, dtypes, storage, shuffle, num_threads):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    several = [
        write_matrix(path, index_dtype=dtype, **storage)
        for path, dtype in zip(paths, dtypes, strict=True)
    ]
    dense = np.concatenate(several)
    options: dict[str, Any] = {
        "hdf5_path": paths,
        "shuffle": shuffle,
        "num_threads": num_threads,
        "device": "cpu",
        "batch_size": 16,
    }
    fields = {"x": "X", "some": SparseField("X", columns=[7, 3], dense=True)}
    with AsyncReader(fields=fields, **options) as reader:
        for batch in reader:
            wanted = np.result_type(*(np.dtype(d).newbyteorder("=") for d in dtypes))
            assert batch.x.indices.dtype == wanted
            np.testing.assert_array_equal(batch.x.to_dense(), dense[batch.index])
            np.testing.assert_array_equal(batch.some, dense[batch.index][:, [7, 3]])


def test_values_of_several_dtypes_are_refused_as_those_of_plain_datasets_are(tmp_path):
    write_matrix(tmp_path / "a.h5")
    write_matrix(tmp_path / "b.h5", "f8")
    with pytest.raises(
        DatasetError, match=r'"X/data" has samples of \(\) float32 in .*a\.h5.*b\.h5'
    ):
        read([tmp_path / "a.h5", tmp_path / "b.h5"], {"x": SparseField("X", dtype="f8")})


@pytest.mark.parametrize("dtype", ["c8", "c16", ">c8"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_dense_rows_of_complex_values(tmp_path, dtype, num_threads):
    dense = write_matrix(tmp_path / "a.h5", dtype)
    options = {"num_threads": num_threads}
    found = read(tmp_path / "a.h5", {"x": SparseField("X", dense=True)}, **options).x
    assert found.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(found, dense)
    wide = SparseField("X", dense=True, dtype="c16", columns=[3, 7])
    found = read(tmp_path / "a.h5", {"x": wide}, **options).x
    np.testing.assert_array_equal(found, dense[:, [3, 7]].astype("c16"))
    with pytest.raises(ConfigError, match="cannot be cast"):
        read(tmp_path / "a.h5", {"x": SparseField("X", dense=True, dtype="f8")})


@pytest.mark.parametrize("dtype", ["i8", "u8", "f8", "?", "u2"])
def test_dense_rows_have_the_dtype_of_the_values_unless_one_is_given(tmp_path, dtype):
    dense = write_matrix(tmp_path / "a.h5", dtype)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        if dtype in ("i8", "u8", "f8"):
            file["X/data"][0] = 2**24 + 1
            dense[tuple(np.argwhere(dense)[0])] = 2**24 + 1
    found = read(tmp_path / "a.h5", {"x": SparseField("X", dense=True)}).x
    np.testing.assert_array_equal(found, dense)
    assert found.dtype == dtype
    cast = read(tmp_path / "a.h5", {"x": SparseField("X", dense=True, dtype="f4")}).x
    np.testing.assert_array_equal(cast, dense.astype("f4"))
    assert cast.dtype == np.float32


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("columns", [None, [5, 80, 2]])
def test_an_offset_is_added_to_all_of_a_dense_row(tmp_path, num_threads, columns):
    dense = write_matrix(tmp_path / "a.h5", "i4")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["plain"] = dense
    wanted = dense if columns is None else dense[:, columns]
    for options in ({"offset": 1}, {"scale": 0.5, "offset": -3}, {"offset": 2, "dtype": "f8"}):
        sparse = SparseField("X", dense=True, columns=columns, **options)
        batch = read(
            tmp_path / "a.h5",
            {"x": sparse, "plain": Field("plain", **options)},
            num_threads=num_threads,
        )
        plain = batch.plain if columns is None else batch.plain[:, columns]
        np.testing.assert_array_equal(batch.x, plain)
        assert batch.x.dtype == plain.dtype
        # Sparse rows have what is stored: it is changed, and nothing else is there.
        rows = read(tmp_path / "a.h5", {"x": SparseField("X", **options)}).x
        np.testing.assert_array_equal(rows.to_dense(), np.where(dense, batch.plain, 0))
    assert wanted.any()


@pytest.mark.parametrize("options", [{"scale": (1, 2)}, {"offset": (1, 2)}, {"decode_cf": True}])
def test_options_that_sparse_rows_have_no_use_for(options):
    with pytest.raises(ConfigError, match="sparse rows"):
        SparseField("X", dense=True, **options)


def write_10x(path: Any, names: list[str], ids: list[str], version: int = 3) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix")
        group["data"], group["shape"] = np.array([1, 2, 3, 4, 5]), np.array([4, 4], "i4")
        group["indices"], group["indptr"] = np.array([0, 2, 3, 1, 0]), np.array([0, 3, 3, 4, 5])
        group["barcodes"] = np.array(["a", "b", "c", "d"], "S3")
        places = ("features/name", "features/id") if version == 3 else ("gene_names", "genes")
        group[places[0]], group[places[1]] = np.array(names, "S10"), np.array(ids, "S10")


TENX = np.array([[1, 0, 2, 3], [0, 0, 0, 0], [0, 4, 0, 0], [5, 0, 0, 0]])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_columns_of_10x_by_name_and_by_id(tmp_path, version, saved):
    path = tmp_path / "cells.h5"
    write_10x(path, ["A", "B", "B", "C"], ["E1", "E2", "E3", "E4"], version)
    if saved:
        index = tmp_path / "cells.h5idx"
        assert CliRunner().invoke(app, ["index", str(path), "-o", str(index)]).exit_code == 0
        path = index

    def chosen(*columns, **options):
        field = SparseField("matrix", dense=True, columns=list(columns), **options)
        return read(path, {"x": field}).x

    np.testing.assert_array_equal(chosen("C", "A"), TENX[:, [3, 0]])
    np.testing.assert_array_equal(chosen("E3", "C", "E1"), TENX[:, [2, 3, 0]])
    with pytest.raises(DatasetError, match=r'2 columns named "B"; .*ids \(E2, E3\)'):
        chosen("A", "B")
    with pytest.raises(ConfigError, match='"A" and "E1" are the same column'):
        chosen("C", "A", "E1")
    with pytest.raises(DatasetError, match='has no column "Z"'):
        chosen("A", "Z", missing="error")


def test_columns_of_10x_files_that_differ(tmp_path):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    write_10x(paths[0], ["A", "B", "D", "C"], ["E1", "E2", "E3", "E4"])
    write_10x(paths[1], ["D", "X", "A", "C"], ["E3", "E9", "E1", "E4"])
    field = SparseField("matrix", dense=True, columns=["A", "D", "E2"])
    wanted = np.concatenate([TENX[:, [0, 2, 1]], TENX[:, [2, 0, 1]] * [1, 1, 0]])
    np.testing.assert_array_equal(read(paths, {"x": field}).x, wanted)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: Csr(x.data, x.indices, x.indptr + 1, x.shape), "indptr must begin with 0"),
        (lambda x: Csr(x.data, x.indices + 90, x.indptr, x.shape), "and there are 90 columns"),
        (lambda x: Csr(x.data, x.indices - 90, x.indptr, x.shape), "and there are 90 columns"),
        (lambda x: np.add(x.indices, 90, out=x.indices) is None or None, "there are 90 columns"),
    ],
)
def test_sparse_rows_that_postprocess_breaks(tmp_path, function, words):
    write_matrix(tmp_path / "a.h5")
    with pytest.raises(PostprocessError, match=words):
        read(tmp_path / "a.h5", {"x": "X"}, postprocess=function)


def test_a_matrix_as_a_field_of_another_kind(tmp_path):
    write_matrix(tmp_path / "a.h5")
    for field in (RaggedField("X"), ImageField("X")):
        with pytest.raises(DatasetError, match='"X" is a group that is read as one field'):
            read(tmp_path / "a.h5", {"x": field})


def test_a_matrix_of_scipy_that_postprocess_returns(tmp_path):
    write_matrix(tmp_path / "a.h5")
    with pytest.raises(PostprocessError, match=r"csr.*which is not an array; .*Csr"):
        read(tmp_path / "a.h5", {"x": "X"}, postprocess=lambda x: x.to_scipy())

    def back(x):
        matrix = x.to_scipy().log1p()
        return Csr(matrix.data, matrix.indices, matrix.indptr, matrix.shape)

    rows = read(tmp_path / "a.h5", {"x": "X"}, postprocess=back).x
    assert rows.to_dense().any()


@pytest.fixture
def cells(tmp_path):
    anndata, pandas = require_extra("anndata"), require_extra("pandas")
    scipy = require_extra("scipy.sparse")
    obs = pandas.DataFrame(
        {
            "kind": pandas.Categorical(list("ABAB")),
            "amount": pandas.array([1, 2, None, 4], "Int64"),
        },
        index=list("abcd"),
    )
    path = tmp_path / "cells.h5ad"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = scipy.csr_matrix(np.eye(4, 30, dtype="f4"))
        anndata.AnnData(x, obs, layers={"counts": x}).write_h5ad(path)
    return path


def test_what_is_proposed_of_a_file_of_cells(cells):
    with pytest.raises(DatasetError) as caught:
        AsyncReader(hdf5_path=cells)
    text = str(caught.value)
    assert '"X" (4, 30), "layers/counts" (4, 30)' in text
    assert '"obs/kind" (4,)' in text
    assert "X/data" not in text
    assert "obs/kind/codes" not in text
    command = text.rpartition("try: h5async ")[2].split()
    assert command[2:] == ["--data-field", "X", "--labels-field", "obs/amount"]
    assert CliRunner().invoke(app, command).exit_code == 0


def test_what_is_proposed_of_a_file_of_10x(tmp_path):
    write_10x(tmp_path / "a.h5", list("ABCD"), list("abcd"))
    with pytest.raises(DatasetError, match=r'"matrix" \(4, 4\).*--data-field matrix'):
        AsyncReader(hdf5_path=tmp_path / "a.h5")


def test_the_document_of_read_says_what_a_sample_is(cells, tmp_path):
    flat = tmp_path / "flat.h5"
    with h5py.File(flat, "w") as file:
        file["values"], file["offsets"] = np.arange(10), [0, 3, 3, 8, 10]
    typed = ["read", str(cells), "--data-field", "X", "--labels-field", "obs/kind", "--json"]
    found = CliRunner().invoke(app, typed)
    data, labels = json.loads(found.output)["fields"]
    assert (data["path"], data["shape"]) == ("X", [4, 30])
    assert data["sample"] == {"kind": "Csr", "shape": [30], "dtype": "float32"}
    assert (labels["path"], labels["shape"]) == ("obs/kind", [4])
    assert labels["sample"] == {"kind": "array", "shape": [], "dtype": "int8"}
    config = flat.with_suffix(".toml")
    config.write_text('fields.x = {path = "values", kind = "ragged", offsets = "offsets"}\n')
    found = CliRunner().invoke(app, ["read", str(flat), "--config", str(config), "--json"])
    (field,) = json.loads(found.output)["fields"]
    assert (field["shape"], field["sample"]["shape"]) == ([4, None], [None])


CELLS = np.arange(20, dtype="f4").reshape(4, 5)


def write_cells(path, genes, index="_index"):
    """Write a matrix, and names of genes in a column that the table names as its index."""
    write_csr(path, sp.csr_matrix(CELLS))
    with h5py.File(path, "r+") as file:
        if index is None:  # AnnData before 0.7
            table = np.zeros(len(genes), [("index", "S9"), ("n", "i4")])
            table["index"] = genes
            file["var"] = table
        else:
            file.create_group("var").attrs["_index"] = index
            file["var"].create_dataset(index, data=genes, dtype=h5py.string_dtype())


def chosen(path, names, **options):
    field = SparseField("X", columns=names, dense=True)
    with AsyncReader(
        hdf5_path=path, fields={"x": field}, batch_size=4, device="cpu", **options
    ) as reader:
        return reader.get_next_batch().x.copy()


@pytest.mark.parametrize("index", ["_index", "gene_symbols", None])
@pytest.mark.parametrize("saved", [False, True])
def test_columns_are_found_by_the_index_that_the_table_names(tmp_path, index, saved):
    path, options = tmp_path / "cells.h5ad", {"index_cache": False}
    write_cells(path, list("abcde"), index)
    if saved:
        options["index_cache"] = tmp_path / "cells.h5idx"
        chosen(path, ["e", "b"], **options)
    np.testing.assert_array_equal(chosen(path, ["e", "b"], **options), CELLS[:, [4, 1]])


@pytest.mark.parametrize("index", ["gene_symbols", None])
def test_a_saved_index_has_the_names_of_columns_wherever_the_table_has_them(
    tmp_path, monkeypatch, index
):
    path, saved = tmp_path / "cells.h5ad", tmp_path / "cells.h5idx"
    write_cells(path, list("abcde"), index)
    assert CliRunner().invoke(app, ["index", str(path), "-o", str(saved)]).exit_code == 0
    monkeypatch.delattr(
        h5async.opening.filefacts, "_index_layout"
    )  # which reads them from the file
    np.testing.assert_array_equal(chosen(saved, ["e", "b"]), CELLS[:, [4, 1]])


@pytest.mark.parametrize("saved", [False, True])
def test_files_with_other_names_are_not_one_dataset_unless_columns_are_chosen(tmp_path, saved):
    paths = [tmp_path / f"{number}.h5ad" for number in range(3)]
    for path, genes in zip(paths, ("abcde", "abcde", "abced"), strict=True):
        write_cells(path, list(genes))

    def read(*files, **options):
        fields = {"x": SparseField("X", dense=True, **options)}
        cache = tmp_path / f"{len(files)}.h5idx" if saved and not options else False
        with AsyncReader(hdf5_path=files, fields=fields, index_cache=cache) as reader:
            return np.concatenate([batch.x.copy() for batch in reader])

    for _ in range(1 + saved):
        np.testing.assert_array_equal(read(*paths[:2]), np.tile(CELLS, (2, 1)))
        with pytest.raises(
            DatasetError, match=r"2.h5ad.* has different column names from .*0.h5ad"
        ):
            read(*paths)
    np.testing.assert_array_equal(read(*paths, columns=range(5)), np.tile(CELLS, (3, 1)))
    by_name = np.concatenate([CELLS, CELLS, CELLS[:, [0, 1, 2, 4, 3]]])
    np.testing.assert_array_equal(read(*paths, columns=list("abcde")), by_name)


def test_a_name_that_is_chosen_twice_is_an_error_as_a_number_is(tmp_path):
    write_cells(tmp_path / "cells.h5ad", list("abcde"))
    for columns in (["e", "e"], [4, 4]):
        with pytest.raises(ConfigError, match="is given twice"):
            chosen(tmp_path / "cells.h5ad", columns)


def test_a_name_of_two_columns_is_an_error_where_it_is_chosen(tmp_path):
    path = tmp_path / "cells.h5ad"
    write_cells(path, list("aacde"))
    with pytest.raises(DatasetError, match=r'2 columns named "a".*var_names_make_unique'):
        chosen(path, ["e", "a"])
    np.testing.assert_array_equal(chosen(path, ["e", "c"]), CELLS[:, [4, 2]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index_dtype", ["i1", "u1", ">i2", "u4"])
@pytest.mark.parametrize("more", [{}, {"workers": "process"}])
def test_more_columns_are_chosen_than_stored_indices_can_count(tmp_path, index_dtype, more):
    require_extra("scipy.sparse")
    chosen = [f"none{number}" for number in range(40_000)] + ["b", "a"]
    values = np.arange(1, 11, dtype="f4").reshape(5, 2)
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]  # what no file has is an error
    for path, matrix, names in zip(
        paths, (values, np.zeros((0, 40_000), "f4")), (["a", "b"], chosen[:-2]), strict=True
    ):
        write_csr(path, sp.csr_matrix(matrix), index_dtype=index_dtype)
        with h5py.File(path, "r+") as file:
            file["var/_index"] = names
    field = SparseField("X", columns=chosen)
    options = {"hdf5_path": paths, "batch_size": 5, "fields": {"x": field}, "device": "cpu", **more}
    with AsyncReader(options, timeout=60) as reader:
        found = reader.get_next_batch().x
        assert found.shape == (5, len(chosen))
        assert found.indices.dtype == ("u4" if index_dtype == "u4" else "i4")
        dense = found.to_scipy().toarray()
    np.testing.assert_array_equal(dense[:, -2:], values[:, ::-1])
    assert not dense[:, :-2].any()
