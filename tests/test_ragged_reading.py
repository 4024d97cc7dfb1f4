"""How ragged and sparse rows are read: what is decoded, and who checks indices."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hdf5files import write_csr

import h5async.fill.resident
import h5async.samples.sparsekind
from h5async import AsyncReader, RaggedField, SparseField
from h5async.errors import DatasetError

STORAGES = {
    "contiguous": {},
    "chunked": {"chunks": (64,)},
    "gzip": {"chunks": (64,), "compression": "gzip"},
}


def matrix_of(rows=200, columns=50):
    return sp.random(rows, columns, 0.2, "csr", np.float32, np.random.default_rng(0))


def reader_of(path, **options):
    return AsyncReader(hdf5_path=path, fields={"x": "X"}, batch_size=16, device="cpu", **options)


@pytest.mark.parametrize("compression", ["gzip", None])
def test_a_window_decodes_each_chunk_of_ragged_rows_about_once(tmp_path, monkeypatch, compression):
    """Nearly every chunk ends within a row, for which the next chunk is needed, too."""
    monkeypatch.setattr(h5async.fill.resident, "_KEPT_WHOLE_NBYTES", 0)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 60, 4000)
    values = np.arange(lengths.sum())
    with h5py.File(tmp_path / "flat.h5", "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=(300,), compression=compression)
        file["lengths"] = lengths
        chunks = dataset.id.get_num_chunks()
    starts = np.append(0, np.cumsum(lengths))
    with AsyncReader(
        hdf5_path=tmp_path / "flat.h5",
        fields={"x": RaggedField("x", offsets="lengths", offsets_kind="lengths")},
        shuffle="window",
        window_bytes=16 * 10 * 300 * values.itemsize,
        num_threads=0,
        device="cpu",
    ) as reader:
        seen = []
        for batch in reader:
            for number, row in zip(batch.index.tolist(), batch.x, strict=True):
                assert np.array_equal(row, values[starts[number] : starts[number + 1]])
            seen.extend(batch.index.tolist())
        assert sorted(seen) == list(range(lengths.size))
        assert seen != sorted(seen)
        decoded = reader.stats().decoded_chunks
    if compression is not None:
        assert decoded < 1.25 * chunks


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("index", ["i4", "i8", "u4"])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_the_core_checks_indices_as_it_reads_them(
    core, tmp_path, monkeypatch, storage, index, shuffle
):
    def not_in_python(*_):
        raise AssertionError("Python checks what the core has checked")

    monkeypatch.setattr(h5async.samples.sparsekind, "_are_outside", not_in_python)
    matrix = matrix_of()
    for number in range(2):
        write_csr(tmp_path / f"{number}.h5", matrix, index_dtype=index, **STORAGES[storage])
    whole = sp.vstack([matrix, matrix], "csr")
    with reader_of(str(tmp_path / "*.h5"), shuffle=shuffle, num_threads=2) as reader:
        for batch in reader:
            assert (batch.x.to_scipy() != whole[batch.index]).nnz == 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        ("i4", 50),
        ("i4", -1),
        ("i4", 1 - (1 << 31)),
        ("i8", 1 << 32),
        ("i8", -1),
        ("u4", (1 << 32) - 1),
        (">i4", 50),
        ("i2", -1),
        ("u8", (1 << 64) - 1),
    ],
)
@pytest.mark.parametrize("shuffle", [False, "full"])
def test_an_index_that_is_no_column_is_found_wherever_it_lies(
    tmp_path, storage, index, wrong, shuffle
):
    matrix = matrix_of()
    write_csr(tmp_path / "x.h5", matrix, index_dtype=index, **STORAGES[storage])
    row = 117
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["X/indices"][matrix.indptr[row + 1] - 1] = np.array(wrong).astype(index)
    found = []
    with reader_of(tmp_path / "x.h5", shuffle=shuffle, num_threads=2) as reader:
        for _ in range(len(reader)):
            try:
                batch = reader.get_next_batch()
            except DatasetError as error:
                found.append(str(error))
            else:
                assert row not in batch.index
                assert (batch.x.to_scipy() != matrix[batch.index]).nnz == 0
    assert len(found) == 1
    assert f"row {row} (sample {row})" in found[0]


def test_a_fill_value_that_is_no_column_is_found(tmp_path):
    """Chunks that were never written are not looked at as they are read."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (20, 5)
        for name, dtype, fill in ("data", "f4", 0), ("indices", "i4", 5):
            group.create_dataset(name, (40,), dtype, chunks=(10,), fillvalue=fill)
        group["indptr"] = np.arange(21) * 2
    with reader_of(tmp_path / "x.h5") as reader, pytest.raises(DatasetError, match="index 5"):
        reader.get_next_batch()


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("through_h5py", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        SparseField("X"),
        SparseField("X", dense=True),
        SparseField("X", columns=[2, 1]),
        RaggedField("X/data", offsets="X/indptr"),
        RaggedField("X/data", offsets="X/indptr", pad_to=3),
    ],
    ids=["csr", "dense", "columns", "ragged", "padded"],
)
def test_batches_of_empty_samples(tmp_path, field, through_h5py, num_threads):
    matrix = sp.csr_matrix((np.ones(3, "f4"), [1, 0, 2], [0, 0, 0, 0, 0, 1, 3, 3, 3]), (8, 4))
    write_csr(tmp_path / "x.h5", matrix)
    options = {"fields": {"x": field}, "batch_size": 2, "num_threads": num_threads}
    ragged = [matrix[row].data.tolist() for row in range(8)]
    if isinstance(field, RaggedField):
        expected = [row + [0.0] * ((field.pad_to or 0) - len(row)) for row in ragged]
    else:
        expected = matrix.toarray()[:, slice(None) if field.columns is None else [2, 1]].tolist()
    with (
        h5py.File(tmp_path / "x.h5", "r+" if through_h5py else "r"),
        AsyncReader(hdf5_path=tmp_path / "x.h5", device="cpu", **options) as reader,
    ):
        assert len(reader) == 4
        for batch in reader:
            x = batch.x
            if hasattr(x, "to_scipy"):
                x = x.to_scipy().toarray()
            found = [np.asarray(sample).tolist() for sample in x]
            assert found == [expected[row] for row in batch.index]
