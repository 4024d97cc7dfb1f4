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
    with pytest.raises(ConfigError, match="no virtual dataset"):
        h5async.repack(tmp_path / "old.h5ad", tmp_path / "new.h5ad", shards=2000)
    found = h5async.repack(tmp_path / "old.h5ad", tmp_path / "new.h5idx", shards=2000, verify=True)
    assert len(found.paths) > 3
    fields = {"x": SparseField("X", dense=True), "age": "obs/age"}
    with AsyncReader(hdf5_path=tmp_path / "new.h5idx", fields=fields, batch_size=50) as reader:
        x, age = reader.get_next_batch()
        assert np.array_equal(x, old.X.toarray())
        assert np.array_equal(age, old.obs["age"])


def test_other_variables_are_an_error(tmp_path):
    annotated(tmp_path / "one.h5ad", 20, 0)
    annotated(tmp_path / "two.h5ad", 20, 1)
    with h5py.File(tmp_path / "two.h5ad", "r+") as file:
        file["var/_index"][3] = "another gene"
    with pytest.raises(DatasetError, match='"var/_index" differs from that of'):
        h5async.repack([tmp_path / "one.h5ad", tmp_path / "two.h5ad"], tmp_path / "new.h5ad")
