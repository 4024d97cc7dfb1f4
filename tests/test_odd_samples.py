"""Samples of any length in odd files, with odd options: right values, or an error that helps."""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import require_extra
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DatasetError,
    Field,
    ImageField,
    PostprocessError,
    Ragged,
    RaggedField,
    ReaderConfig,
    Sequences,
    SparseField,
    Split,
)
from h5async.cli import app
from h5async.core.tablestructures import HEAP_SCRATCH_NBYTES
from h5async.opening.limits import MemoryBudget

TEXT = h5py.string_dtype()


def read(path: Any, fields: Any, **options: Any) -> Any:
    """Return the first batch, in memory of its own."""
    options = {"device": "cpu", "batch_size": 64, "index_cache": False} | options
    with AsyncReader(hdf5_path=path, fields=fields, **options) as reader:
        return reader.get_next_batch().copy()


def write_matrix(path: Any, dtype: Any = "f4", index_dtype: Any = "i4", **storage: Any) -> Any:
    """Write a sparse matrix as AnnData does; return it dense."""
    scipy = require_extra("scipy.sparse")
    rng = np.random.default_rng(7)
    dense = rng.integers(1, 9, (40, 90)) * (rng.random((40, 90)) < 0.1)
    dense = dense.astype(np.dtype(dtype).newbyteorder("="))
    if dense.dtype.kind == "c":
        dense *= 1 + 2j
    matrix = scipy.csr_matrix(dense)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        group.create_dataset("data", data=matrix.data.astype(dtype), **storage)
        group.create_dataset("indices", data=matrix.indices.astype(index_dtype), **storage)
        group["indptr"] = matrix.indptr
    return dense


def write_column(path: Any, kind: str, names: Any = ("A", "B"), values: Any = (0, 1, -1, 1)) -> Any:
    """Write a column of four samples; return its path."""
    with h5py.File(path, "w") as file:
        file["d"] = np.arange(4)
        obs = file.create_group("obs")
        if kind == "categorical":
            group = obs.create_group("c")
            group.attrs["encoding-type"] = "categorical"
            group["codes"] = np.array(values, "i1")
            group.create_dataset("categories", data=names, dtype=TEXT)
        elif kind == "older":
            obs["c"] = np.array(values, "i1")
            obs.create_dataset("__categories/c", data=names, dtype=TEXT)
        elif kind == "strings":
            obs.create_dataset("c", data=["A", "B", "A", "B"], dtype=TEXT)
        elif kind == "numbers":
            obs["c"] = np.array(values)
        else:
            group = obs.create_group("c")
            group.attrs["encoding-type"] = kind
            group["values"], group["mask"] = values
    return path


# --- categories --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["categorical", "older"])
@pytest.mark.parametrize("code", [2, 100, -2])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "i8"}, {"dtype": "u1"}, {"scale": 2}, {"steps": range(1)}]
)
def test_a_code_of_no_category_is_an_error_in_one_file_as_in_several(tmp_path, kind, code, options):
    good = write_column(tmp_path / "good.h5", kind)
    bad = write_column(tmp_path / "bad.h5", kind, values=(0, 1, code, 1))
    field = {"c": Field("obs/c", **options)}
    words = rf'bad\.h5: column "obs/c": row 2 \(sample 2\) has the code {code}, and there are 2'
    with pytest.raises(DatasetError, match=words):
        read(bad, field)
    with pytest.raises(DatasetError, match=words.replace("sample 2", "sample 6")):
        read([good, bad], field)
    assert read(good, {"c": "obs/c"}).c.tolist() == [0, 1, -1, 1]


@pytest.mark.parametrize("first", ["categorical", "older"])
@pytest.mark.parametrize("second", ["categorical", "older"])
@pytest.mark.parametrize("names", [("A", "B"), ("B", "C")])
def test_categories_of_any_version_are_united(tmp_path, first, second, names):
    paths = [
        write_column(tmp_path / "a.h5", first),
        write_column(tmp_path / "b.h5", second, names, (1, 0, 0, -1)),
    ]
    fields = {"c": "obs/c", "d": "d"}
    for cache in (False, tmp_path / "all.h5idx", tmp_path / "all.h5idx"):
        with AsyncReader(hdf5_path=paths, fields=fields, index_cache=cache, device="cpu") as reader:
            codes, known = reader.get_next_batch().c, (*reader.categories["c"], None)
            found = [known[code] for code in codes]
        assert found == ["A", "B", None, "B", names[1], names[0], names[0], None]


KINDS: dict[str, Any] = {
    "categorical": ("categorical column", {}),
    "strings": ("dataset of variable length", {}),
    "numbers": ("plain dataset", {"values": (1, 2, 3, 4)}),
    "nullable-integer": (
        "column with a mask",
        {"values": (np.arange(4), np.array([0, 1, 0, 0], bool))},
    ),
}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [*KINDS, "older"])
def test_a_column_that_is_stored_otherwise_in_another_file(tmp_path, first, second):
    if first == second or {first, second} == {"categorical", "older"}:
        return
    paths = [
        write_column(tmp_path / f"{kind}.h5", kind, **KINDS.get(kind, ("", {}))[1])
        for kind in (first, second)
    ]
    words = rf'{second}\.h5: "obs/c" \(c\) is no {KINDS[first][0]}.*{first}\.h5'
    with pytest.raises(DatasetError, match=words):
        read(paths, {"c": "obs/c"})


# --- sparse rows -------------------------------------------------------------------------------


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
    with pytest.raises(DatasetError, match=r'2 columns of the name "B"; .*ids \(E2, E3\)'):
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


# --- offsets -----------------------------------------------------------------------------------


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "flat.h5"
    with h5py.File(path, "w") as file:
        file["values"] = np.arange(10)
        file["ends"], file["lengths"] = [3, 3, 8, 10], [3, 0, 5, 2]
        file["offsets"] = [0, 3, 3, 8, 10]
        file["slice"], file["begins"] = [3, 3, 8], [0, 3, 3, 8]
        both = np.array([[3, 1], [0, 0], [5, 2], [2, 1]])
        file["both"], file["big"] = both, both.astype(">i2")
        file.create_dataset("gzip", data=both, chunks=(3, 1), compression="gzip")
        layout = h5py.VirtualLayout(both.shape, both.dtype)
        layout[:2] = h5py.VirtualSource(file["both"])[:2]
        layout[2:] = h5py.VirtualSource(file["gzip"])[2:]
        file.create_virtual_dataset("virtual", layout)
    return path


def samples(path, offsets, kind, **options):
    field = RaggedField("values", offsets=offsets, offsets_kind=kind)
    return [one.tolist() for one in read(path, {"x": field}, **options).x]


SAMPLES = [[0, 1, 2], [], [3, 4, 5, 6, 7], [8, 9]]


def test_ends_that_are_taken_for_offsets(flat):
    assert samples(flat, "ends", "ends") == samples(flat, "offsets", "offsets") == SAMPLES
    with pytest.raises(DatasetError, match=r'"ends".*begins with 3.*set offsets_kind="ends"'):
        samples(flat, "ends", "offsets")
    with pytest.raises(DatasetError, match=r'"lengths".*set offsets_kind="lengths"'):
        samples(flat, "lengths", "offsets")


def test_offsets_of_a_slice_leave_values_out_and_the_log_says_so(flat, caplog):
    with caplog.at_level(logging.WARNING, "h5async"):
        assert samples(flat, "slice", "offsets") == SAMPLES[1:3]
        assert samples(flat, "begins", "offsets") == SAMPLES[:3]
    assert [r.message.partition(": field")[2][:60] for r in caplog.records] == [
        ' x, dataset "values": 5 of its values lie before the first s',
        ' x, dataset "values": 2 of its values lie before the first s',
    ]


@pytest.mark.parametrize("name", ["both", "big", "gzip", "virtual"])
def test_a_column_of_lengths(flat, name):
    assert samples(flat, f"{name}[:, 0]", "lengths") == SAMPLES
    assert samples(flat, f"{name}[:,0]", "lengths") == SAMPLES
    assert samples(flat, f"{name}[:, 1]", "lengths") == [[0], [], [1, 2], [3]]
    assert samples(flat, f"{name}[:, -1]", "lengths") == [[0], [], [1, 2], [3]]
    assert samples(flat, f"{name}[:,-2]", "lengths") == SAMPLES
    with pytest.raises(DatasetError, match=rf'shape \(4, 2\); .*"{name}\[:, 0\]"'):
        samples(flat, name, "lengths")
    for number in 2, -3:
        with pytest.raises(DatasetError, match="no such column"):
            samples(flat, f"{name}[:, {number}]", "lengths")
    with pytest.raises(DatasetError, match="no such column"):
        samples(flat, "lengths[:, 0]", "lengths")


def test_a_column_says_sequences_and_weights(flat):
    fields = {"x": Field("values", steps=range(2), pad="drop")}
    found = read(flat, fields, sequences=Sequences(lengths="both[:, 0]"), batch_size=32)
    assert found.x[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 8]
    drawn = read(flat, {"x": "both"}, weights="both[:, 1]", epoch_samples=50, batch_size=50)
    assert set(drawn.index.tolist()) == {0, 2, 3}


def test_a_column_of_a_saved_index(flat, tmp_path):
    for _ in range(2):
        cache = tmp_path / "flat.h5idx"
        assert samples(flat, "gzip[:, 0]", "lengths", index_cache=cache) == SAMPLES


# --- columns of numbers that may be missing ----------------------------------------------------


def test_nullable_columns_select_samples(tmp_path):
    none = np.zeros(4, bool)
    numbers = write_column(tmp_path / "n.h5", "nullable-integer", values=([3, 1, 2, 0], none))
    flags = write_column(
        tmp_path / "b.h5", "nullable-boolean", values=(np.array([1, 0, 1, 0], bool), none)
    )
    assert read(numbers, {"d": "d"}, indices="obs/c").index.tolist() == [3, 1, 2, 0]
    assert read(flags, {"d": "d"}, indices="obs/c").index.tolist() == [0, 2]
    drawn = read(flags, {"d": "d"}, weights="obs/c", epoch_samples=40)
    assert set(drawn.index.tolist()) == {0, 2}
    for options in ({"by": "obs/c"}, {"stratify": "obs/c"}):
        parts = [
            read(flags, {"d": "d"}, indices=Split(name, {"a": 0.5, "b": 0.5}, **options))
            for name in "ab"
        ]
        found = [{n in (0, 2) for n in part.index.tolist()} for part in parts]
        assert all(len(part) == (1 if "by" in options else 2) for part in found)


@pytest.mark.parametrize(
    "options",
    [
        {"indices": "obs/c"},
        {"weights": "obs/c"},
        {"indices": Split("a", {"a": 0.5, "b": 0.5}, by="obs/c")},
        {"indices": Split("a", {"a": 0.5, "b": 0.5}, stratify="obs/c")},
    ],
)
def test_values_that_are_missing_select_nothing(tmp_path, options):
    mask = np.array([0, 1, 1, 0], bool)
    path = write_column(tmp_path / "n.h5", "nullable-integer", values=([3, 1, 2, 0], mask))
    with pytest.raises(DatasetError, match=r'no value in row 1 \(2 in all\); give "obs/c/values"'):
        read(path, {"d": "d"}, **options)


@pytest.mark.parametrize("option", ["indices", "weights"])
def test_categories_select_nothing(tmp_path, option):
    path = write_column(tmp_path / "c.h5", "categorical")
    with pytest.raises(DatasetError, match=rf'{option}: .*is categorical; give "obs/c/codes"'):
        read(path, {"d": "d"}, **{option: "obs/c"})


# --- postprocess -------------------------------------------------------------------------------


def _shifted(x):
    return Ragged(x.values, x.offsets + 1)


def _falling(x):
    return Ragged(x.values, x.offsets[::-1].copy())


def _cut(x):
    return Ragged(x.values[:-1], x.offsets)


def _in_place(x):
    x.offsets[-1] += 9


@pytest.mark.parametrize("function", [_shifted, _falling, _cut, _in_place])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_ragged_samples_that_postprocess_breaks(flat, function, num_threads):
    field = RaggedField("values", offsets="offsets")
    options = {"postprocess": function, "num_threads": num_threads}
    with pytest.raises(PostprocessError, match="ragged samples that do not fit together: offsets"):
        read(flat, {"x": field}, **options)
    with AsyncReader(hdf5_path=flat, fields={"x": field}, device="cpu", **options) as reader:
        with pytest.raises(PostprocessError, match="do not fit together"):
            reader.read([0, 2])


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


def test_postprocess_is_given_the_mask_of_padded_samples(flat):
    def masked(x, x_mask):
        assert x_mask.dtype == bool
        return np.where(x_mask, x, -1)

    field = RaggedField("values", offsets="offsets", pad_to=4)
    found = read(flat, {"x": field}, postprocess=masked)
    assert found.x.tolist() == [[0, 1, 2, -1], [-1] * 4, [3, 4, 5, 6], [8, 9, -1, -1]]
    assert found.x_mask.tolist() == (found.x != -1).tolist()


# --- messages ----------------------------------------------------------------------------------

OF_KINDS = {
    "ragged": ("offsets", "offsets_kind", "pad_to"),
    "sparse": ("dense", "columns", "missing"),
    "image": ("size", "crop", "crop_scale", "flip", "interpolation", "on_error"),
}
OPTIONS = [(kind, option) for kind, several in OF_KINDS.items() for option in several]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
@pytest.mark.parametrize("other", [None, "sparse", "ragged"])
def test_an_option_of_another_kind_names_the_kind(tmp_path, kind, option, other):
    if kind == other:
        return
    field = {"path": "x", option: 1} | ({} if other is None else {"kind": other})
    with pytest.raises(ConfigError, match=rf'{option}.*one of {kind} fields: set kind="{kind}"'):
        ReaderConfig(hdf5_path="x.h5", fields={"x": field})
    path = tmp_path / "options.toml"
    rest = "" if other is None else f', kind = "{other}"'
    path.write_text(f'hdf5_path = "x.h5"\nfields.x = {{path = "x", {option} = 1{rest}}}\n')
    with pytest.raises(ConfigError, match=rf'{option}.*set kind = "{kind}"'):
        ReaderConfig.load(path)
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"hdf5_path": "x.h5", "fields": {"x": field}}))
    with pytest.raises(ConfigError, match=rf'{option}.*set "kind": "{kind}"'):
        ReaderConfig.load(path)
    chosen: Any = {None: Field, "sparse": SparseField, "ragged": RaggedField}[other]
    with pytest.raises(ConfigError, match=f"{option}'; {kind.capitalize()}Field has it"):
        chosen("x", **{option: 1})


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_an_option_of_a_field_among_those_of_the_reader(kind, option):
    if option in ("size", "on_error"):  # which mean other things in other loaders
        return
    with pytest.raises(
        ConfigError, match=f"it is an option of a field: .*{kind.capitalize()}Field"
    ):
        ReaderConfig(hdf5_path="x.h5", **{option: 1})


def test_an_image_field_takes_no_options_of_sparse_rows():
    with pytest.raises(ConfigError, match="SparseField has it"):
        ImageField("x", dense=True)  # type: ignore[call-arg]


# --- the command line --------------------------------------------------------------------------


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


def test_the_document_of_read_says_what_a_sample_is(cells, flat):
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


# --- memory, and order -------------------------------------------------------------------------


def test_scratch_of_elements_of_variable_length_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=["a", "b"] * 4, dtype=TEXT)
    found = []
    shares = MemoryBudget._shares
    monkeypatch.setattr(
        MemoryBudget, "_shares", lambda *a: found.extend(several := list(shares(*a))) or several
    )
    read(path, {"x": "x"}, num_threads=3)
    (scratch,) = {share.nbytes for share in found if share.what.startswith("scratch of 3")}
    assert scratch == 3 * HEAP_SCRATCH_NBYTES


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_given_samples_come_at_the_same_place_however_many_threads_there_are(flat, prefetch, seed):
    def deliver(num_threads):
        rng, found = np.random.default_rng(seed), []
        with AsyncReader(
            hdf5_path=flat,
            fields={"x": "values"},
            batch_size=2,
            prefetch=prefetch,
            num_threads=num_threads,
            device="cpu",
        ) as reader:
            found = [batch.index.tolist() for batch in reader]
            for what in rng.integers(0, 4, 40):
                if what == 0:
                    reader.fetch_data([9, int(what)])
                elif what == 1:
                    reader.fetch_data()
                elif what == 2:
                    batch = reader.get_next_batch()
                    found.append([batch.epoch, batch.number, *batch.index.tolist()])
                else:
                    batch = next(iter(reader))
                    found.append([batch.epoch, batch.number, *batch.index.tolist()])
        return found

    wanted = deliver(1)
    for num_threads in (1, 2, 3):
        assert deliver(num_threads) == wanted


# --- what users may try ------------------------------------------------------------------------


def test_labels_that_are_strings_are_balanced(tmp_path):
    path = write_column(tmp_path / "a.h5", "strings")
    fields = {"x": "d", "labels": "obs/c"}
    with h5py.File(path, "r+") as file:
        file["obs/c"][:] = ["A", "B", "B", "B"]
    found = read(path, fields, weights="balanced", epoch_samples=64)
    assert 16 <= (found.index == 0).sum() <= 48
    assert [text in "AB" for text in found.labels.to_strings()] == [True] * 64


def test_labels_of_differing_lengths_are_not_balanced(flat):
    labels = RaggedField("values", offsets="offsets")
    with pytest.raises(ConfigError, match="labels with one value for each sample"):
        read(flat, {"x": "ends", "labels": labels}, weights="balanced")


def test_a_matrix_as_a_field_of_another_kind(tmp_path):
    write_matrix(tmp_path / "a.h5")
    for field in (RaggedField("X"), ImageField("X")):
        with pytest.raises(DatasetError, match='"X" is a group that is read as one field'):
            read(tmp_path / "a.h5", {"x": field})


def test_offsets_of_what_has_a_variable_length_datatype(tmp_path):
    path = write_column(tmp_path / "a.h5", "strings")
    with pytest.raises(DatasetError, match=r"says itself where samples lie; leave out offsets"):
        read(path, {"x": RaggedField("obs/c", offsets="d")})


def test_bytes_of_a_fixed_size_are_no_images(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([b"one", b"two"])
    with pytest.raises(DatasetError, match=r"store each sample as h5py\.vlen_dtype"):
        read(tmp_path / "a.h5", {"x": ImageField("x")})


def test_a_matrix_of_scipy_that_postprocess_returns(tmp_path):
    write_matrix(tmp_path / "a.h5")
    with pytest.raises(PostprocessError, match=r"csr.*which is no array; .*Csr"):
        read(tmp_path / "a.h5", {"x": "X"}, postprocess=lambda x: x.to_scipy())

    def back(x):
        matrix = x.to_scipy().log1p()
        return Csr(matrix.data, matrix.indices, matrix.indptr, matrix.shape)

    rows = read(tmp_path / "a.h5", {"x": "X"}, postprocess=back).x
    assert rows.to_dense().any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageField("x", size=(3,)), "size: must be a number of pixels, or two"),
        (lambda: ImageField("x", size="a"), "size: must be a number of pixels, or two"),
        (lambda: ImageField("x", size=4, crop_scale=(0.5,)), "crop_scale: must have more values"),
        (lambda: ImageField("x", axes=(3, 0, 1, 2)), "axes must begin with .* 0, found"),
        (lambda: SparseField("x", axes=(1, 0)), "axes must begin with .* 0, found"),
        (lambda: SparseField("x", num_dim=1), "num_dim must be 0"),
    ],
)
def test_words_of_options_that_do_not_fit(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_complex_values_are_not_scaled(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3, "c8")
    with pytest.raises(
        ConfigError, match=r"complex64 cannot be cast .*; leave scale and offset out"
    ):
        read(tmp_path / "a.h5", {"x": Field("x", scale=2)})


def test_a_field_of_the_name_of_a_mask(flat):
    padded = RaggedField("values", offsets="offsets", pad_to=3)
    with pytest.raises(ConfigError, match="delivers a mask as 'x_mask', which there is already"):
        read(flat, {"x": padded, "x_mask": "lengths"})
    steps = Field("lengths", steps=range(1), pad_mask="x_mask")
    with pytest.raises(ConfigError, match="'x_mask', which there is already"):
        read(flat, {"x": padded, "y": steps})
