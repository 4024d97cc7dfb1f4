"""Columns chosen by names that are many or not unique; references in chunks without filters."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from conftest import require_extra

from h5async import AsyncReader, ConfigError, DatasetError, RaggedField, SparseField


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
    write(tmp_path / "b.h5", 0, chosen[:-2], index_dtype)  # what no file has is an error
    field = SparseField("X", columns=chosen)
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    options = {"hdf5_path": paths, "batch_size": 5, "fields": {"x": field}, "device": "cpu", **more}
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
    with pytest.raises(DatasetError, match=r'a\.h5: group "X" has 2 columns of the name "a"'):
        AsyncReader(options, fields={"x": SparseField("X", columns=["b", "a"])})
    others = SparseField("X", columns=["c", "b"], dense=True)
    with AsyncReader(options, fields={"x": others}) as reader:
        np.testing.assert_array_equal(reader.get_next_batch().x, values[:, [3, 1]])


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4)])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("kind", ["text", "sequences"])
@pytest.mark.parametrize("storage", [{"chunks": (3,)}, {"chunks": (10,)}, {"maxshape": (None,)}])
def test_references_in_chunks_without_filters(tmp_path, sizes, libver, kind, storage):
    if sizes == (4, 4) and libver == "latest" and "maxshape" in storage:
        pytest.skip("HDF5 itself cannot open such a file")
    path, is_text = tmp_path / "a.h5", kind == "text"
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    created.set_sizes(*sizes)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    oldest = {"earliest": h5py.h5f.LIBVER_EARLIEST, "latest": h5py.h5f.LIBVER_LATEST}[libver]
    access.set_libver_bounds(oldest, h5py.h5f.LIBVER_LATEST)
    opened = h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, created, access)
    dtype = h5py.string_dtype() if is_text else h5py.vlen_dtype("i4")
    with h5py.File(opened) as file:
        dataset = file.create_dataset("v", (10,), dtype, **storage)
        for number in range(10):
            dataset[number] = "x" * number if is_text else np.arange(number)
    with AsyncReader(hdf5_path=path, fields={"v": "v"}, device="cpu", timeout=60) as reader:
        found = reader.get_next_batch().v
        for number, one in enumerate(found):
            expected = [ord("x")] * number if is_text else range(number)
            np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("io", ["auto", "map", "pread"])
@pytest.mark.parametrize(("count", "chunk"), [(10, 3), (10, 10), (10, 16), (1000, 600)])
def test_chunks_without_filters_that_reach_over_the_edge(tmp_path, io, count, chunk):
    lengths = np.arange(count) % 4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        storage = {"chunks": (chunk,), "maxshape": (None,)}
        file["values"] = np.arange(lengths.sum())
        file.create_dataset("lengths", data=lengths, **storage)
        file.create_dataset("is_taken", data=lengths != 2, **storage)
        texts = file.create_dataset("texts", (count,), h5py.string_dtype(), **storage)
        texts[...] = ["x" * length for length in lengths]
    values = RaggedField("values", offsets="lengths", offsets_kind="lengths")
    options = {"io": io, "indices": "is_taken", "batch_size": count, "device": "cpu"}
    fields = {"values": values, "texts": "texts"}
    with AsyncReader(hdf5_path=tmp_path / "a.h5", fields=fields, timeout=60, **options) as reader:
        batch = reader.get_next_batch()
    np.testing.assert_array_equal(batch.index, np.flatnonzero(lengths != 2))
    np.testing.assert_array_equal(batch.values.lengths, lengths[batch.index])
    np.testing.assert_array_equal(batch.texts.lengths, lengths[batch.index])
