"""Helper processes deliver the same as threads, of fields of all kinds."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import scipy.sparse
from conftest import spoil_chunk
from hdf5files import TEXT, write_csr
from optioncolumns import same
from test_helper import _leaves_no_process  # noqa: F401  # a fixture of all tests here

from h5async import AsyncReader, Field, RaggedField, Sequences, SparseField

COUNTS, ENDS = (23, 40), ((5, 5, 14, 23), (3, 40))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("kinds"), np.random.default_rng(3)
    for number, (count, ends) in enumerate(zip(COUNTS, ENDS, strict=True)):
        path = folder / f"{number}.h5"
        counts = scipy.sparse.csr_matrix(rng.poisson(1.0, (count, 9)).astype("f4"))
        write_csr(path, counts, chunks=(64,), compression=1)
        with h5py.File(path, "a") as file:
            rows = rng.integers(-99, 99, (count, 8, 9)).astype("i2")
            file.create_dataset("rows", data=rows, chunks=(4, 5, 5), compression=1)
            file["rows"].attrs["scale_factor"] = 0.5 + number
            file["words"] = np.array([f"word {n % 3}" for n in range(count)], TEXT)
            file["ends"], file["map"] = ends, np.arange(6.0)
            file["task"] = np.array([f"task {n}" for n in range(len(ends))], TEXT)
            lengths = rng.integers(0, 6, count)
            file["tokens"], file["lengths"] = np.arange(lengths.sum()), lengths
            file.attrs["title"] = f"file {number}"
            for n in range(2):
                file[f"demo_{n}/rows"], file[f"demo_{n}"].attrs["env"] = rows[: 4 + n], f"env {n}"
    return [str(folder / f"{number}.h5") for number in range(2)]


def with_map(*arrays, rows_crop, static):
    return {"sum": arrays[0].sum(axis=(1, 2)) + static["map"].sum(), "places": rows_crop}


TOKENS = {"offsets": "lengths", "offsets_kind": "lengths"}
ROWS = Field("rows", crop={1: 3, 2: 4}, flip=True)
CASES = {
    "ends": {
        "fields": {
            "rows": ROWS,
            "counts": SparseField("X", columns=[7, 2], totals="n", target_sum=1e4, log1p=True),
            "words": Field("words", categories=True),
            "task": Field("task", per="sequence", categories=True),
            "title": Field("@title", per="file"),
            "tokens": RaggedField("tokens", **TOKENS),
            "map": Field("map", per="dataset"),
        },
        "sequences": Sequences(ends="ends", every=3, offset="random"),
    },
    "groups": {
        "fields": {"rows": "rows", "env": Field("@env", per="sequence")},
        "sequences": Sequences(groups="demo_*"),
        "shuffle": False,
    },
    "across": {
        "fields": {
            "rows": Field("rows", steps=(-2, 30), pad="edge", decode_cf=True),
            "part": Field("rows", region={1: slice(1, 7, 2)}),
        },
        "sequences": Sequences(across="files"),
        "cache": "host",
    },
    "mapping": {
        "fields": {"rows": ROWS, "map": Field("map", per="dataset")},
        "postprocess": with_map,
    },
    "pack": {"fields": {"tokens": RaggedField("tokens", pack=8, **TOKENS)}, "epoch_samples": 30},
}


def assert_same_with_helpers(**options):
    """Compare two epochs; return the reader with helpers, closed."""
    options = {"batch_size": 7, "shuffle": "window", "device": "cpu", **options}
    workers = options.pop("workers", "process")
    with AsyncReader(**options) as right, AsyncReader(**options, workers=workers) as reader:
        assert reader.categories == right.categories
        assert reader.static.keys() == right.static.keys()
        for _ in range(2):
            for one, expected in zip(reader, right, strict=True):
                assert one.keys() == expected.keys()
                for name in ("index", "sequence", "step"):
                    assert same(getattr(one, name), getattr(expected, name))
                for name in one.keys():
                    assert same(one[name], expected[name]), name
        assert reader.skipped == right.skipped
    return reader


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_they_deliver_the_same(files, case):
    assert_same_with_helpers(hdf5_path=files, **CASES[case])


def test_they_leave_out_the_same(files, tmp_path):
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file.create_dataset(
            "rows", data=np.zeros((30, 8, 9), "i2"), chunks=(4, 8, 9), compression=1
        )
    spoil_chunk(tmp_path / "bad.h5", 2, "rows")
    several = [*files, str(tmp_path / "bad.h5"), str(tmp_path / "missing.h5")]
    options = {"fields": {"x": "rows"}, "on_error": "skip", "workers": 2}
    reader = assert_same_with_helpers(hdf5_path=several, **options)
    assert len(reader.skipped) == 1 + 4
