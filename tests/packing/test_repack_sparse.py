"""Rows of sparse matrices are selected, shuffled and joined by `repack` as AnnData does it."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from conftest import require_extra

import h5async
from h5async import AsyncReader, ConfigError, DatasetError, SparseField


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def annotated(path, cells, seed, genes=13):
    """Write a file of AnnData; return what is in it."""
    anndata, scipy = require_extra("anndata"), require_extra("scipy.sparse")
    pandas = require_extra("pandas")
    rng = np.random.default_rng(seed)
    matrix = scipy.random(cells, genes, 0.3, "csr", np.float32, rng=rng)
    kinds = pandas.Categorical.from_codes(rng.integers(-1, 2, cells), ["a", "b"])
    names = [f"cell {seed} {number}" for number in range(cells)]
    found = anndata.AnnData(
        matrix,
        obs=pandas.DataFrame({"kind": kinds, "age": rng.integers(0, 9, cells)}, index=names),
        var=pandas.DataFrame(index=[f"gene {number}" for number in range(genes)]),
        layers={"counts": scipy.random(cells, genes, 0.5, "csr", np.float64, rng=rng)},
        obsm={"place": rng.random((cells, 2))},
    )
    found.write_h5ad(path, compression="gzip")
    return found


def assert_has(path, expected):
    found = require_extra("anndata").read_h5ad(path)
    assert (found.X != expected.X).nnz == 0
    assert (found.layers["counts"] != expected.layers["counts"]).nnz == 0
    assert found.obs.equals(expected.obs)
    assert list(found.var_names) == list(expected.var_names)
    assert np.array_equal(found.obsm["place"], expected.obsm["place"])


def test_cells_are_shuffled(tmp_path):
    # As many genes as cells, which are no cells.
    old = annotated(tmp_path / "old.h5ad", 30, 0, genes=30)
    new = tmp_path / "new.h5ad"
    h5async.repack(tmp_path / "old.h5ad", new, shuffle="full", seed=1, verify=True)
    options = {"hdf5_path": tmp_path / "old.h5ad", "data_field": "X", "labels_field": None}
    with AsyncReader(options, shuffle="full", seed=1, batch_size=30) as reader:
        order = reader.get_next_batch().index.copy()
    assert_has(new, old[order])


def test_some_cells_of_several_files(tmp_path):
    files = [tmp_path / f"{number}.h5ad" for number in range(2)]
    old = [annotated(file, 20 + number, number) for number, file in enumerate(files)]
    h5async.repack(files, tmp_path / "new.h5ad", verify=True)
    assert_has(tmp_path / "new.h5ad", require_extra("anndata").concat(old))
    h5async.repack(files, tmp_path / "some.h5ad", indices="5::3", verify=True)
    assert_has(tmp_path / "some.h5ad", require_extra("anndata").concat(old)[5::3])


def test_cells_in_shards_are_joined_by_an_index(tmp_path):
    old = annotated(tmp_path / "old.h5ad", 50, 0)
    with pytest.raises(ConfigError, match="cannot form a virtual dataset"):
        h5async.repack(tmp_path / "old.h5ad", tmp_path / "new.h5ad", shards=2000)
    found = h5async.repack(tmp_path / "old.h5ad", tmp_path / "new.h5idx", shards=2000, verify=True)
    assert len(found.paths) > 3
    fields = {"x": SparseField("X", dense=True), "age": "obs/age"}
    with AsyncReader(hdf5_path=tmp_path / "new.h5idx", fields=fields, batch_size=50) as reader:
        x, age = reader.get_next_batch()
        assert np.array_equal(x, old.X.toarray())
        assert np.array_equal(age, old.obs["age"])


def with_many_kinds(path, rng, cells, names):
    """Write a file of AnnData in which all that can differ between files does; return it."""
    anndata, scipy = require_extra("anndata"), require_extra("scipy.sparse")
    pandas = require_extra("pandas")
    genes = len(names)
    labels = rng.choice(list("abcdefgh"), (2, max(cells, genes)))
    obs = pandas.DataFrame({"age": rng.integers(0, 9, cells)}, index=list(map(str, range(cells))))
    obs["kind"] = pandas.Categorical.from_codes(rng.integers(-1, 3, cells), rng.permutation(9)[:3])
    obs["label"] = pandas.Categorical(labels[0][:cells])
    obs["each"] = pandas.Categorical([f"{number}" for number in rng.permutation(cells)])
    obs["few"] = pandas.array(rng.choice([1, 2, None], cells), "Int64")
    if rng.random() < 0.5:
        obs["only here"] = 1.5
    var = pandas.DataFrame(index=names)
    var["id"] = [f"id of {name}" for name in names]
    var["length"] = [float(name[1:]) if int(name[1:]) % 5 else np.nan for name in names]
    var["mean"] = rng.random(genes)
    var["some"] = pandas.Categorical(labels[1][:genes])  # which differ
    var["group"] = pandas.Categorical([f"group {int(name[1:]) % 3}" for name in names])
    found = anndata.AnnData(
        scipy.random(cells, genes, 0.3, "csr", np.float32, rng=rng),
        obs=obs,
        var=var,
        layers={"counts": scipy.random(cells, genes, 0.5, "csr", np.float64, rng=rng)},
        obsm={"place": rng.random((cells, 2))},
        obsp={"near": scipy.random(cells, cells, 0.1, "csr", rng=rng)},
        varm={"loadings": rng.random((genes, 2))},
    )
    found.uns["table"] = pandas.DataFrame({"kind": pandas.Categorical(labels[1][:5], ordered=True)})
    found.raw = found.copy()
    found.write_h5ad(path)
    return found


def as_frame(frame):
    """Return a table in which categories are the values that they name."""
    categories = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(categories, object))


@pytest.mark.parametrize("join", ["inner", "outer"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore")  # of AnnData: names that repeat
def test_variables_are_united_as_anndata_does(tmp_path, join, seed):
    rng, names = np.random.default_rng(seed), [f"g{number}" for number in range(30)]
    files, old = [tmp_path / f"{number}.h5ad" for number in range(3)], []
    for file in files:
        chosen = rng.permutation(names)[: rng.integers(15, 30)].tolist()
        old.append(with_many_kinds(file, rng, int(rng.integers(5, 40)), chosen))
    plan = h5async.repack(files, tmp_path / "new.h5ad", join=join, verify=True).plan
    anndata = require_extra("anndata")
    found, expected = (
        anndata.read_h5ad(tmp_path / "new.h5ad"),
        anndata.concat(old, join=join, merge="same", uns_merge="first"),
    )
    assert sorted(found.var_names) == sorted(expected.var_names)
    for one, other in [(found, expected), (found.raw.to_adata(), expected.raw.to_adata())]:
        assert (one.X != other[:, one.var_names].X).nnz == 0
    assert found.X.has_sorted_indices
    expected = expected[:, found.var_names]
    assert (found.layers["counts"] != expected.layers["counts"]).nnz == 0
    assert np.array_equal(found.obsm["place"], expected.obsm["place"])
    if join == "outer" and "only here" in expected.obs and "only here" not in found.obs:
        del expected.obs["only here"]
    assert as_frame(found.obs).equals(as_frame(expected.obs)[list(found.obs)])
    assert list(found.var) == ["id", "length", "group"]
    every = as_frame(require_extra("pandas").concat([one.var for one in old]))
    first = every[~every.index.duplicated()].loc[found.var_names]
    assert as_frame(found.var).equals(first[list(found.var)])
    assert {"obsp", "varm", "var/mean", "var/some"} <= plan.left_out.keys()
    options = {"shuffle": "full", "seed": 1, "join": join}
    h5async.repack(files, tmp_path / "shuffled.h5ad", **options, verify=True)
    shuffled = anndata.read_h5ad(tmp_path / "shuffled.h5ad")
    order = np.array(
        [shuffled.obsm["place"][:, 0].tolist().index(x) for x in found.obsm["place"][:, 0]]
    )
    assert (shuffled[order].X != found.X).nnz == 0
    assert (shuffled[order].layers["counts"] != found.layers["counts"]).nnz == 0
    assert as_frame(shuffled[order].obs).equals(as_frame(found.obs))


@pytest.mark.parametrize("join", ["inner", "outer"])
@pytest.mark.filterwarnings("ignore")  # of AnnData: variables of one file
def test_nothing_in_common_and_matrices_of_zeros(tmp_path, join):
    anndata, scipy = require_extra("anndata"), require_extra("scipy.sparse")
    files, old = [tmp_path / f"{number}.h5ad" for number in range(2)], []
    for number, path in enumerate(files):
        old.append(annotated(path, 20, number))
        old[-1].var_names = [f"gene {number} {gene}" for gene in range(13)]
        if not number:
            old[-1].X = scipy.csr_matrix((20, 13), dtype=np.float32)
        old[-1].write_h5ad(path)
    h5async.repack(files, tmp_path / "new.h5ad", join=join, verify=True)
    names = [name for one in old for name in one.var_names if join == "outer"]
    assert_has(tmp_path / "new.h5ad", anndata.concat(old, join=join)[:, names])


def test_pairs_of_cells_and_matrices_of_old_times(tmp_path):
    old, new = tmp_path / "old.h5ad", tmp_path / "new.h5ad"
    annotated(old, 20, 0)
    with h5py.File(old, "r+") as file:
        file["obsp/near"] = np.zeros((20, 20))
        file["varp/near"] = np.ones((13, 13))
    plan = h5async.repack(old, new, indices="3:", verify=True).plan
    assert plan.left_out == {"obsp": "is of pairs of samples: compute it again"}
    with h5py.File(new) as file:
        assert "obsp" not in file
        assert file["varp/near"].shape == (13, 13)
    with h5py.File(old, "r+") as file:
        file["X"].attrs["h5sparse_format"] = "csr"
    with pytest.raises(DatasetError, match='"X" was written by AnnData before'):
        h5async.repack(old, new, indices="3:", overwrite=True)
    with h5py.File(old, "r+") as file:
        del file["X"].attrs["h5sparse_format"], file.attrs["encoding-type"]
    with pytest.raises(DatasetError, match=r"old\.h5ad was written by AnnData before 0\.8"):
        h5async.repack(old, new, indices="3:", overwrite=True)


def test_matrices_of_some_files(tmp_path):
    files = [tmp_path / "one.h5ad", tmp_path / "two.h5ad"]
    for path in files:
        annotated(path, 20, 0)
    with h5py.File(files[1], "r+") as file:
        del file["X"]
    for several in (files, files[::-1]):
        with pytest.raises(DatasetError, match=r'two\.h5ad: there is no "X", which other files'):
            h5async.repack(several, tmp_path / "new.h5ad")
    with h5py.File(files[1], "r+") as file:
        file["X"] = np.zeros((20, 13))
    with pytest.raises(DatasetError, match=r'two\.h5ad: "X" is not a sparse matrix'):
        h5async.repack(files, tmp_path / "new.h5ad")


def test_variables_that_cannot_be_united(tmp_path):
    annotated(tmp_path / "one.h5ad", 20, 0)
    annotated(tmp_path / "two.h5ad", 20, 1, genes=14)
    files = [tmp_path / "one.h5ad", tmp_path / "two.h5ad"]
    with pytest.raises(DatasetError, match=r'"var/_index" differs .*join="inner"'):
        h5async.repack(files, tmp_path / "new.h5ad")
    with h5py.File(files[1], "r+") as file:
        file["var/_index"][3] = "gene 2"
    with pytest.raises(DatasetError, match='"var/_index" has duplicate names'):
        h5async.repack(files, tmp_path / "new.h5ad", join="outer")
    with h5py.File(files[1], "r+") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
        file["var/_index"][3] = "gene 3"
    with pytest.raises(DatasetError, match=r"not in compressed rows .* X\.tocsr"):
        h5async.repack(files, tmp_path / "new.h5ad", join="outer")
    with h5py.File(files[1], "r+") as file:
        file["obs"].move("_index", "name")
        file["obs"].attrs["_index"] = "name"
    with pytest.raises(DatasetError, match='"obs" has its names in different columns'):
        h5async.repack(files, tmp_path / "new.h5ad", join="outer")
    with h5py.File(files[1], "r+") as file:
        file["obs"].move("name", "_index")
        file["obs"].attrs["_index"] = "_index"
    with h5py.File(files[0], "r+") as file:
        del file["X"]
        file["X"] = np.zeros((20, 13))
    with pytest.raises(DatasetError, match='"X" is dense'):
        h5async.repack(files, tmp_path / "new.h5ad", join="outer")
    with h5py.File(files[0], "r+") as file:
        file["obs/kind"].attrs["ordered"] = True
        file["obs/kind/categories"][0] = "c"
    with pytest.raises(DatasetError, match='categories of "obs/kind" are ordered'):
        h5async.repack(files, tmp_path / "new.h5ad", join="outer")
