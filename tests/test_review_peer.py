"""Sparse rows whose columns are chosen by names that are many, or not unique."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from conftest import require_extra

from h5async import AsyncReader, ConfigError, DatasetError, SparseField


def write(path, rows, names, index_dtype="i4"):
    """Write a full matrix, as AnnData does."""
    values = np.arange(1, rows * len(names) + 1, dtype="f4").reshape(rows, len(names))
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", values.shape
        group["data"] = values.ravel()
        group["indices"] = np.tile(np.arange(len(names)), rows).astype(index_dtype)
        group["indptr"] = np.arange(rows + 1) * len(names)
        file["var/_index"] = names
    return values


@pytest.mark.parametrize("index_dtype", ["i1", "u1", ">i2", "u4"])
@pytest.mark.parametrize("more", [{}, {"workers": "process"}])
def test_more_columns_are_chosen_than_stored_indices_can_count(tmp_path, index_dtype, more):
    require_extra("scipy.sparse")
    chosen = [f"none{number}" for number in range(40_000)] + ["b", "a"]
    values = write(tmp_path / "a.h5", 5, ["a", "b"], index_dtype)
    field = SparseField("X", columns=chosen)
    options = {"hdf5_path": tmp_path / "a.h5", "fields": {"x": field}, "device": "cpu", **more}
    with AsyncReader(options, timeout=60) as reader:
        found = reader.get_next_batch().x
        assert found.shape == (5, len(chosen))
        assert found.indices.dtype == ("u4" if index_dtype == "u4" else "i4")
        dense = found.to_scipy().toarray()
    np.testing.assert_array_equal(dense[:, -2:], values[:, ::-1])
    assert not dense[:, :-2].any()


def test_a_column_that_is_named_twice_is_refused(tmp_path):
    write(tmp_path / "a.h5", 3, ["a", "b"])
    field = SparseField("X", columns=["b", "a", "b"], dense=True)
    with pytest.raises(ConfigError, match='x: columns: "b" comes twice'):
        AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": field})


def test_a_name_of_several_columns_is_refused(tmp_path):
    values = write(tmp_path / "a.h5", 3, ["a", "b", "a", "c"])
    options = {"hdf5_path": tmp_path / "a.h5", "device": "cpu"}
    with pytest.raises(DatasetError, match=r'a\.h5: group "X" has several columns "a": 0 and 2'):
        AsyncReader(options, fields={"x": SparseField("X", columns=["b", "a"])})
    others = SparseField("X", columns=["c", "b"], dense=True)
    with AsyncReader(options, fields={"x": others}) as reader:
        np.testing.assert_array_equal(reader.get_next_batch().x, values[:, [3, 1]])
