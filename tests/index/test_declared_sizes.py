"""Files of a few kB that declare very much: no memory is taken for what they only declare."""

import tracemalloc
from functools import partial

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    DatasetError,
    Field,
    H5AsyncError,
    ImageField,
    RaggedField,
    Sequences,
    SparseField,
    Split,
)
from h5async.cli import app
from h5async.errors import BudgetError

COUNT = 1 << 28
MOST_NBYTES = 200_000_000
HALVES = {"a": 0.5, "b": 0.5}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "declared.h5"
    with h5py.File(path, "w") as file:
        file["ten"] = np.arange(10.0)
        file.create_dataset("data", (COUNT,), "u1")
        file.create_dataset("chunked", (COUNT,), "u1", chunks=(1 << 16,))
        file.create_dataset("small chunks", (COUNT,), "u1", chunks=(64,))
        file.create_dataset("numbers", (COUNT,), "i8")
        file.create_dataset("numbers in chunks", (COUNT,), "i8", chunks=(1 << 16,))
        file.create_dataset("masks", (COUNT,), "?")
        file.create_dataset("texts", (COUNT,), h5py.string_dtype())
        file.create_dataset("vlen", (COUNT,), h5py.vlen_dtype("u1"))
        file.create_dataset("wide", (8,), f"S{1 << 24}")
        file.create_dataset("pairs", (COUNT, 2), "u1")
        file.create_dataset("pairs in chunks", (1 << 20, 2), "u1", chunks=(1 << 10, 2))
        for number in range(2):
            file.create_dataset(f"groups/{number}/data", (COUNT,), "u1")
        column = file.create_group("column")
        column.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0"})
        column.attrs["ordered"] = False
        column.create_dataset("codes", (1000,), "i1")
        column.create_dataset("categories", (1 << 24,), h5py.string_dtype())
    return path


def sparse(path, shape):
    with h5py.File(path, "a") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        group.attrs["shape"] = shape
        group["data"], group["indices"] = np.ones(4, "f4"), np.zeros(4, "i4")
        group["indptr"] = np.arange(5)


def peak_nbytes(work):
    """Return what Python and NumPy had allocated at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read(path, **options):
    labels = {} if "fields" in options else {"labels_field": None}
    options = {"hdf5_path": path, "batch_size": 4, "num_threads": 0} | labels | options
    with AsyncReader(**options) as reader:
        reader.get_next_batch()


def refused(path, **options):
    def work():
        with pytest.raises(BudgetError, match=r"declared\.h5.* (need|take) .*max_batch_bytes"):
            read(path, **options)

    assert peak_nbytes(work) < MOST_NBYTES


def of_lengths(kind, path="numbers"):
    return {"data": RaggedField("ten", offsets=path, offsets_kind=kind)}


@pytest.mark.parametrize("dataset", ["numbers", "numbers in chunks", "masks", "texts", "wide"])
@pytest.mark.parametrize("option", ["indices", "sequences"])
def test_a_dataset_that_an_option_names(path, dataset, option):
    value = {"indices": dataset, "sequences": Sequences(ids=dataset)}[option]
    refused(path, **{option: value})


def test_masks_of_where_sequences_end(path):
    refused(path, sequences=Sequences(last="masks"))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "numbers"},
        {"indices": Split("a", HALVES)},
        {"indices": Split("a", HALVES, by="numbers")},
        {"indices": Split("a", HALVES, stratify="numbers")},
        {"sequences": Sequences(lengths="numbers")},
        {"sequences": Sequences(groups="groups/*")},
        {"fields": {"data": Field("pairs", num_dim=(0, 1))}},
        {"fields": {"data": Field("pairs in chunks", num_dim=(0, 1))}},
        {"fields": {"data": Field("column")}},
        {"fields": {"data": RaggedField("vlen")}},
        {"fields": {"data": RaggedField("vlen")}, "bucket": 2},
        {"fields": {"data": ImageField("vlen", size=(8, 8))}},
        {"fields": of_lengths("lengths"), "max_batch_bytes": "1MiB"},
        {"fields": of_lengths("lengths", "numbers in chunks")},
        {"fields": of_lengths("ends")},
        {"fields": of_lengths("offsets")},
        {"data_field": "small chunks", "shuffle": "window"},
    ],
    ids=str,
)
def test_tables_of_samples_that_are_only_declared(path, options):
    refused(path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_field": "chunked"},
        {"shuffle": "full"},
        {"shuffle": "window", "data_field": "chunked"},
        {"indices": "::2"},
        {"fields": {"data": Field("data", steps=(-1, 0))}},
    ],
    ids=str,
)
def test_what_was_never_written_costs_nothing(path, options):
    assert peak_nbytes(lambda: read(path, **options)) < MOST_NBYTES


@pytest.mark.slow
def test_what_the_caller_permits_is_read(tmp_path):
    path = tmp_path / "declared.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (9 << 20,), "u1")
        file.create_dataset("weights", (9 << 20,), "f4", fillvalue=1)
    options = {"hdf5_path": path, "labels_field": None, "weights": "weights"}
    with pytest.raises(BudgetError, match="set max_batch_bytes to"):
        AsyncReader(**options)
    with AsyncReader(**options, max_batch_bytes="1GiB") as reader:
        assert (reader.get_next_batch().data == 0).all()


@pytest.mark.slow
def test_what_files_store_is_read_without_being_asked(tmp_path):
    path = tmp_path / "stored.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(9 << 20, dtype="u4").astype("u1")
    with AsyncReader(hdf5_path=path, labels_field=None, indices=Split("a", HALVES)) as reader:
        assert reader.num_samples == (9 << 20) // 2


def test_what_several_datasets_declare_is_counted_together(tmp_path):
    path = tmp_path / "declared.h5"
    with h5py.File(path, "w") as file:
        for number in range(3):
            file.create_dataset(f"groups/{number}/lengths", (3 << 20,), "i4")
            file[f"groups/{number}/data"] = np.arange(4)
    field = RaggedField("data", offsets="lengths", offsets_kind="lengths")
    refused(path, fields={"data": field}, sequences=Sequences(groups="groups/*"))


@pytest.mark.parametrize("options", [{"columns": [1, 3]}, {"dense": True}], ids=str)
@pytest.mark.parametrize("columns", [1 << 29, 1 << 62, (1 << 63) - 1])
def test_columns_that_are_only_declared(path, options, columns):
    sparse(path, np.array((4, columns)))
    refused(path, fields={"x": SparseField("X", **options)}, max_batch_bytes="1MiB")


@pytest.mark.parametrize("shape", [(4, 2**64 - 1), (4, 1 << 63), (2**64 - 1, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"columns": [1, 3]}, {"dense": True}], ids=str)
def test_shapes_beyond_what_hdf5_counts(path, shape, options):
    sparse(path, np.array(shape, np.uint64))
    found = r'declared\.h5: group "X", attribute "shape" is .*2\*\*63'
    with pytest.raises(DatasetError, match=found):
        read(path, fields={"x": SparseField("X", **options)})


@pytest.mark.parametrize("command", ["inspect", "read", "bench", "index"])
def test_commands_of_cells_that_are_only_declared(tmp_path, command):
    path = tmp_path / "cells.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 10, 1 << 30), "f4", chunks=(1, 1))
    more = {"index": ["-o", str(tmp_path / "cells.h5idx")]}.get(command, [])
    found = []
    run = partial(CliRunner().invoke, app, [command, str(path), *more])
    assert peak_nbytes(lambda: found.append(run())) < MOST_NBYTES
    assert found[0].exception is None or isinstance(found[0].exception, SystemExit | H5AsyncError)
