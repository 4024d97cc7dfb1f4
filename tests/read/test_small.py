"""Small datasets of many files, which are kept in memory whole."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from cases import each
from collecting import Collected, layouts_of, most_kept_nbytes
from conftest import assert_same_bits

from h5async import AsyncReader, Field
from h5async.index.composition import join_layouts
from h5async.index.extents import MANY, SMALL_NBYTES, TableBuilder, kept_whole_nbytes
from h5async.index.shapes import Kind
from h5async.read import coretables

ALWAYS, NEVER = 1 << 60, 0
COUNT = MANY + 3
KEPT = 1 << 20


def write(path, number, how):
    """Write `number % 5 + 1` rows of 3 values."""
    rows = (np.arange((number % 5 + 1) * 3).reshape(-1, 3) + 100 * number).astype("<i4")
    with h5py.File(path, "w") as file:
        if how == "mixed":
            how = ("contiguous", "one chunk", "big-endian", "chunks")[number % 4]
        if how == "one chunk":
            file.create_dataset("data", data=rows, chunks=(8, 3), maxshape=(None, 3))
        elif how == "chunks":
            file.create_dataset("data", data=rows, chunks=(1, 3))
        elif how == "big-endian":
            file.create_dataset("data", data=rows, dtype=">i4")
        else:
            file["data"] = rows
    return rows


def many(folder, how, count=COUNT):
    """Return paths, all rows, and the layout of the field."""
    paths = [folder / f"{number:02}.h5" for number in range(count)]
    rows = np.concatenate([write(path, number, how) for number, path in enumerate(paths)])
    return paths, rows, layouts_of(paths, {"data": Field("data")})


def is_kept(layout, kept_nbytes):
    """Return which shapes of the table are small datasets that are kept."""
    table = TableBuilder(lambda _: True).build(layout, kept_nbytes)
    return [shape.kind == Kind.CHUNKS and shape.keeps for shape in table.shapes]


@pytest.mark.usefixtures("core")
@each("how", ["contiguous", "one chunk", "mixed"])
@each("io", ["map", "pread"])
def test_rows_are_those_of_h5py(tmp_path, core, how, io, monkeypatch):
    _, rows, layouts = many(tmp_path, how)
    rng = np.random.default_rng(0)
    for trusted_ns in (ALWAYS, NEVER):
        monkeypatch.setattr(coretables, "_TRUSTED_NS", trusted_ns)
        with Collected(core, layouts, 30, io=io, kept_nbytes=KEPT) as read:
            for _ in range(20):
                samples = rng.integers(0, len(rows), 30)
                assert read.read(samples, cuts=[7]) == 0
                assert_same_bits(read.arrays[0], rows[samples])
            are_small = [how != "mixed" or n % 4 < 3 or n % 5 == 0 for n in range(COUNT)]
            sizes = [12 * (n % 5 + 1) for n in range(COUNT) if are_small[n]]
            assert most_kept_nbytes(read.collection) == [sum(sizes)]


@pytest.mark.usefixtures("core")
def test_nothing_is_read_of_a_file_that_was_checked_a_moment_ago(tmp_path, core, monkeypatch):
    monkeypatch.setattr(coretables, "_TRUSTED_NS", ALWAYS)
    paths, rows, layouts = many(tmp_path, "contiguous")
    some = [0, 1, 3]  # of the first three files
    with Collected(core, layouts, 3, io="pread", kept_nbytes=KEPT, most_files=1) as read:
        assert read.read(some) == 0
        read_nbytes = read.scratch.worker(core).struct.done.read_nbytes
        for path in paths[1:3]:
            path.unlink()
        assert read.read(some[1:]) == 0
        assert read.scratch.worker(core).struct.done.read_nbytes == read_nbytes
        assert_same_bits(read.arrays[0][:2], rows[some[1:]])


@pytest.mark.usefixtures("core")
@each("is_trusted", [True, False])
def test_a_file_that_has_changed(tmp_path, core, is_trusted, monkeypatch):
    monkeypatch.setattr(coretables, "_TRUSTED_NS", ALWAYS if is_trusted else NEVER)
    paths, rows, layouts = many(tmp_path, "contiguous")
    with Collected(core, layouts, 3, kept_nbytes=KEPT) as read:
        assert read.read([1, 3]) == 0
        with h5py.File(paths[1], "r+") as file:
            file["data"][:] = -1
        assert read.read([1, 3]) == (0 if is_trusted else 1)
        assert_same_bits(read.arrays[0][1], rows[3])
        if is_trusted:
            assert_same_bits(read.arrays[0][:2], rows[[1, 3]])
        read.collection.tables.forget_chunks()
        assert read.read([1, 3]) == 1
        read.collection.tables.restamp(
            str(paths[1]), layouts_of(paths[1:2], {"d": Field("data")})[0].stamp
        )
        assert read.read([1, 3]) == 0
        assert (read.arrays[0][0] == -1).all()


@pytest.mark.usefixtures("core")
def test_a_file_that_was_cut_short(tmp_path, core):
    paths, _, layouts = many(tmp_path, "contiguous")
    os.truncate(paths[2], 100)
    with Collected(core, layouts, 4, kept_nbytes=KEPT) as read:
        assert read.read([0, 1, 3, 6]) == 1
        assert read.left() == {0: [2]}


@pytest.mark.usefixtures("core")
def test_rows_that_a_dataset_has_not(tmp_path, core):
    """Its chunk holds fewer rows than others of its shape."""
    _, _, layouts = many(tmp_path, "contiguous")
    with Collected(core, layouts, 1, kept_nbytes=KEPT) as read:
        (field,) = read.collection.tables.fields
        nbytes = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_int64 * COUNT).from_address(field.nbytes)
        )
        nbytes[3] = 24  # of four rows, which are samples 6 to 9
        for _ in range(2):
            assert read.read([7]) == 0
            assert read.read([8]) == 1


def test_only_small_ones_of_many_are_kept(tmp_path):
    _, _, (layout,) = many(tmp_path, "contiguous")
    wanted = kept_whole_nbytes(layout).small
    assert any(is_kept(layout, wanted))
    assert not any(is_kept(layout, wanted - 1))
    few = join_layouts(layout.datasets[: MANY - 1])
    assert kept_whole_nbytes(few) == (0, 0)
    assert not any(is_kept(few, KEPT))


def test_shapes_are_few(tmp_path):
    """Datasets of up to 1, 2, 4 and 8 rows; not one for each number of rows."""
    _, _, (layout,) = many(tmp_path, "contiguous")
    table = TableBuilder(lambda _: True).build(layout, KEPT)
    assert sorted(shape.chunk_samples for shape in table.shapes) == [1, 2, 4, 8]


def test_larger_ones_are_read_row_by_row(tmp_path):
    paths = []
    for number in range(COUNT):
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            file["data"] = np.zeros((SMALL_NBYTES // 8 + (number < 3), 8), "u1")
            file["small"] = np.zeros((SMALL_NBYTES // 8, 8), "u1")
            file.create_dataset("empty", (4, 2), "u1")  # never written
    larger, small, empty = layouts_of(paths, {n: Field(n) for n in ("data", "small", "empty")})
    assert sorted(is_kept(larger, 1 << 30)) == [False, True]
    assert is_kept(small, 1 << 30) == [True]
    assert kept_whole_nbytes(empty).small == 0


def test_a_reader_of_labels_of_many_files(tmp_path):
    """Of the data some is encoded; all is that of h5py, in every order, again and again."""
    paths, rows, labels = [], [], []
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        paths.append(tmp_path / f"{number:02}.h5")
        rows.append(rng.random((number % 4 + 2, 5)))
        labels.append(rng.integers(0, 9, number % 4 + 2))
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("data", data=rows[-1], chunks=(2, 5), compression="gzip")
            file["labels"] = labels[-1]
    data, numbers = np.concatenate(rows), np.concatenate(labels)
    for shuffle in ("full", "window", False):
        with AsyncReader(hdf5_path=paths, batch_size=8, shuffle=shuffle, device="cpu") as reader:
            for _ in range(3):
                for batch in reader:
                    assert_same_bits(batch.data, data[batch.index])
                    assert_same_bits(batch.labels, numbers[batch.index])
