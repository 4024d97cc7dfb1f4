"""Columns of AnnData: categories, and numbers that may be missing."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from conftest import read
from hdf5files import write_column

from h5async import (
    AsyncReader,
    DatasetError,
    Field,
    Split,
)


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
    "strings": ("dataset of variable-length elements", {}),
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
    words = rf'{second}\.h5: "obs/c" \(c\) is not a {KINDS[first][0]}.*{first}\.h5'
    with pytest.raises(DatasetError, match=words):
        read(paths, {"c": "obs/c"})


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


def test_labels_that_are_strings_are_balanced(tmp_path):
    path = write_column(tmp_path / "a.h5", "strings")
    fields = {"x": "d", "labels": "obs/c"}
    with h5py.File(path, "r+") as file:
        file["obs/c"][:] = ["A", "B", "B", "B"]
    found = read(path, fields, weights="balanced", epoch_samples=64)
    assert 16 <= (found.index == 0).sum() <= 48
    assert [text in "AB" for text in found.labels.to_strings()] == [True] * 64


@pytest.mark.parametrize("kind", ["categorical", "older"])
@pytest.mark.parametrize("use", ["by", "stratify"])
def test_a_split_goes_by_the_names_of_categories(tmp_path, kind, use):
    # Code 0 is another donor in each of the files, and each donor has cells in both.
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    donors = [f"d{i}" for i in range(6)]
    write_column(paths[0], kind, donors, [0, 1, 2, 3, 4, 5] * 4)
    write_column(paths[1], kind, donors[::-1], [5, 4, 3, 2, 1, 0] * 4)
    numbers = np.array([*range(6)] * 8)
    split = Split("train", {"train": 0.5, "val": 0.5}, **{use: "obs/c"})
    options = {"fields": {"x": "d"}, "batch_size": 48, "device": "cpu", "indices": split}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        index = reader.get_next_batch().index
    counts = np.bincount(numbers[index], minlength=6)
    assert index.size == 24
    assert sorted(counts) == ([0, 0, 0, 8, 8, 8] if use == "by" else [4] * 6)


@pytest.mark.parametrize("kind", ["categorical", "older"])
def test_balanced_weights_go_by_the_names_of_categories(tmp_path, kind):
    # 9 cells of B and 3 of T: as many codes 0 as codes 1.
    write_column(tmp_path / "a.h5ad", kind, ["B", "T"], [0] * 6)
    write_column(tmp_path / "b.h5ad", kind, ["T", "B"], [1] * 3 + [0] * 3)
    options = {"fields": {"labels": "obs/c"}, "weights": "balanced", "epoch_samples": 4000}
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    with AsyncReader(hdf5_path=paths, batch_size=4000, device="cpu", **options) as reader:
        counts = np.bincount(reader.get_next_batch().labels)
        assert reader.categories["labels"] == ("B", "T")
    assert abs(counts[0] - counts[1]) < 400


def test_a_split_by_a_column_that_one_file_has_otherwise_says_so(tmp_path):
    write_column(tmp_path / "a.h5ad", "categorical", ["d"], [0, 0])
    with h5py.File(tmp_path / "b.h5ad", "w") as file:
        file["d"], file["obs/c"] = [0, 1], [0, 1]
    split = Split("train", {"train": 0.5, "val": 0.5}, by="obs/c")
    with pytest.raises(DatasetError, match=r'b\.h5ad: "obs/c" must be a categorical column'):
        AsyncReader(
            hdf5_path=str(tmp_path / "*.h5ad"), fields={"x": "d"}, indices=split, device="cpu"
        )


def test_codes_of_a_category_that_comes_twice_are_those_of_its_name(tmp_path):
    path = tmp_path / "cells.h5ad"
    write_column(path, "categorical", ["B", "B", "T"], [0, 1, 2, -1])
    with AsyncReader(hdf5_path=path, fields={"x": "obs/c"}, batch_size=4, device="cpu") as reader:
        assert reader.categories["x"] == ("B", "T")
        assert reader.get_next_batch().x.tolist() == [0, 0, 1, -1]
