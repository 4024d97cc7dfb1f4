"""Datasets that are like others of their file have layouts as if each were the only one."""

from __future__ import annotations

import itertools

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, Field
from h5async.index.datasets import Indexer
from h5async.index.links import Reach
from h5async.index.metadata import read_layouts
from h5async.index.tables import ChunkTable


def undefined_fill(file: h5py.File, name: str, *, write: bool) -> None:
    """Create a dataset without a fill value, which has no values before they are written."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    undefined = h5py.h5s.create_simple((4, 3))
    made = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, undefined, plist)
    if write:
        h5py.Dataset(made)[...] = 3


@pytest.fixture
def path(tmp_path):
    """Make a file of datasets of the same kinds: of other sizes, unwritten, with fill values."""
    found = tmp_path / "alike.h5"
    with h5py.File(found, "w") as file:
        for n in range(3):
            rows = np.arange(12 * (n + 1)).reshape(-1, 3) + n
            file[f"plain/{n}"] = rows.astype("f4")
            file[f"big/{n}"] = rows.astype(">f4")
            file[f"flat/{n}"] = rows.reshape(-1).astype("f4")
            file.create_dataset(f"empty/{n}", (5, 3), "f4")
            file.create_dataset(f"filled/{n}", (5, 3), "f4", fillvalue=n % 2)
            file.create_dataset(f"written/{n}", data=rows.astype("f4"), fillvalue=7)
            file[f"text/{n}"] = np.array([b"a", b"b c"] * (n + 1), "S3")
            file[f"array/{n}"] = np.zeros(n + 1, np.dtype(("f4", (2,))))
            file.create_dataset(f"table/{n}", (n + 2,), np.dtype([("x", "f4"), ("y", "i2", (2,))]))
            file.create_dataset(f"none/{n}", (0, 3), "f4")
        for n, write in enumerate((False, True, False)):
            undefined_fill(file, f"undefined{n}", write=write)
    return found


def same(one, other):
    for name, value in vars(other).items():
        found = getattr(one, name)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            assert found.tobytes() == value.tobytes()
        elif isinstance(value, ChunkTable):
            for column in ("index", "offset", "nbytes", "filter_mask"):
                np.testing.assert_array_equal(getattr(found, column), getattr(value, column))
        elif name not in ("segments", "datasets"):
            assert found == value, name
    assert len(one.datasets) == len(other.datasets)
    for dataset, its in zip(one.datasets, other.datasets, strict=True):
        same(dataset, its)


@pytest.mark.parametrize("num_dim", [0, 1, -1])
def test_layouts_are_those_of_each_alone(path, num_dim):
    fields, names = {}, []
    with h5py.File(path) as file:
        file.visititems(lambda name, node: names.append((name, node)))
        for name, node in names:
            if isinstance(node, h5py.Dataset) and len(node.shape) > num_dim:
                fields[name] = Field(name, num_dim)
                if node.dtype.names:
                    fields[f"{name}/x"] = Field(f"{name}/x", num_dim)
    assert len(fields) >= 18
    alone = {name: read_layouts(path, {name: field})[name] for name, field in fields.items()}
    for names in list(fields), list(fields)[::-1]:
        together = read_layouts(path, {name: fields[name] for name in names})
        for name in names:
            same(together[name], alone[name])


def test_what_is_alike_is_found_once(path, monkeypatch):
    found, ask = [], Indexer._layout
    monkeypatch.setattr(
        Indexer, "_layout", lambda self, name, *rest: found.append(name) or ask(self, name, *rest)
    )
    fields = {f"{kind}{n}": Field(f"{kind}/{n}") for kind in ("plain", "big") for n in range(3)}
    read_layouts(path, fields)
    assert found == ["plain/0", "big/0"]


def test_values(path):
    kinds = ("plain", "big", "written", "empty", "filled")
    for kind, n in itertools.product(kinds, range(3)):
        fields = {f"{kind}{n}": f"{kind}/{n}", "one": f"{kind}/{n}"}
        with (
            AsyncReader(hdf5_path=path, fields=fields, device="cpu", num_threads=0) as reader,
            h5py.File(path) as file,
        ):
            assert (reader.get_next_batch().one == file[f"{kind}/{n}"][...]).all()


def rows_of(path):
    with h5py.File(path) as file:
        return file["data"][:]


def test_files_of_known_kinds_have_the_layouts_that_they_have_alone(tmp_path):
    paths, whole = [], {"data": Field("data")}
    for n, rows in enumerate((20, 23, 7, 20, 40)):  # chunks are cut short, missing, raw at the edge
        paths.append(tmp_path / f"{n}.h5")
        with h5py.File(paths[-1], "w", libver="latest") as file:
            how = {"compression": "gzip"} if n != 3 else {}
            made = file.create_dataset("data", (rows, 6), "i4", chunks=(5, 3), fillvalue=9, **how)
            made[: rows // 2] = np.arange(rows // 2 * 6).reshape(-1, 6) + n
    alike = Reach(alike={})
    for path in paths:
        same(read_layouts(path, whole, alike)["data"], read_layouts(path, whole)["data"])
    assert len(alike.alike) == 2
    with h5py.File(paths[-1], "r+"):  # which has it open for writing
        found = read_layouts(paths[-1], whole, alike)["data"]
    assert "open for writing" in found.fallback_reason
    with AsyncReader(hdf5_path=paths, labels_field=None, batch_size=200, device="cpu") as reader:
        expected = np.concatenate([rows_of(path) for path in paths])
        np.testing.assert_array_equal(reader.get_next_batch()[0], expected)
