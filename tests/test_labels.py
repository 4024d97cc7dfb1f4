"""Strings and numbers that are delivered as codes of their categories."""

from __future__ import annotations

import json
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5files import write_column

from h5async import AsyncReader, ConfigError, DatasetError, Field, ReaderConfig, Sequences, Split

NAMES = (("cat", "dog", "eel"), ("bee", "cat", "été"))
COUNT = 30
ORDERED = ("bee", "cat", "dog", "eel", "été")


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> list[str]:
    """Two files whose labels are strings of both kinds, and codes, of different classes."""
    folder = tmp_path_factory.mktemp("labels")
    for number, names in enumerate(NAMES):
        codes = np.random.default_rng(number).integers(0, len(names), COUNT)
        words = [names[code] for code in codes]
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["data"] = np.arange(COUNT)
            file.create_dataset("words", data=words, dtype=h5py.string_dtype())
            file.create_dataset("packed", data=np.array([w.encode() for w in words]), chunks=(7,))
            file["codes"] = codes.astype("u1")
            file.create_dataset("classes", data=names, dtype=h5py.string_dtype())
            file["numbers"] = codes * 10 - 7
            for at, group in enumerate(("demo_0", "demo_1")):
                rows = slice(at * 12, (at + 1) * 12)
                file[f"{group}/words"] = words[rows]
                file[f"{group}/data"] = np.arange(COUNT)[rows]
                file[f"{group}/pair"] = np.zeros((12, 2))
    return [str(folder / f"{number}.h5") for number in range(2)]


def words_of(files: list[str], path: str = "words") -> np.ndarray:
    found = []
    for file in files:
        with h5py.File(file) as opened:
            dataset = opened[path]
            found += [v.decode() if isinstance(v, bytes) else v for v in dataset[()].tolist()]
    return np.array(found)


CASES: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "all values": ("words", True, ORDERED),
    "fixed strings": ("packed", True, ORDERED),
    "names given": ("words", ["été", "eel", "dog", "cat", "bee", "none"], ()),
    "a dataset of names": ("packed", "classes", ("cat", "dog", "eel", "bee", "été")),
    "numbers": ("numbers", True, (-7, 3, 13)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "full", "num_threads": 2},
        {"shuffle": "window", "cache": "host"},
    ],
    ids=str,
)
def test_codes_stand_for_the_values(files, tmp_path, case, options):
    path, categories, names = CASES[case]
    expected = words_of(files, path)
    fields = {"x": "data", "y": Field(path, categories=categories)}
    for cache in (False, tmp_path / "all.h5idx", tmp_path / "all.h5idx"):
        with AsyncReader(
            hdf5_path=files, fields=fields, batch_size=7, index_cache=cache, **options
        ) as reader:
            known = reader.categories["y"]
            assert known == (names or tuple(categories))
            count = 0
            for batch in reader:
                assert batch.y.dtype == np.int64
                assert (np.array(known)[batch.y] == expected[batch.index]).all()
                count += batch.size
            assert count == 2 * COUNT
            assert reader.layouts["y"].dtype == np.int8


def test_integers_are_codes_of_the_names_in_their_own_file(files):
    fields = {"y": Field("codes", categories="classes")}
    with AsyncReader(hdf5_path=files, fields=fields, batch_size=60) as reader:
        batch = reader.get_next_batch()
        names = np.array(reader.categories["y"])
        assert (names[batch.y] == words_of(files)[batch.index]).all()


@pytest.mark.parametrize("dtype", ["i1", "i4"])
def test_codes_come_in_other_dtypes(files, dtype):
    fields = {"y": Field("words", categories=True, dtype=dtype)}
    with AsyncReader(hdf5_path=files, fields=fields) as reader:
        assert reader.get_next_batch().y.dtype == np.dtype(dtype)


def test_codes_in_steps_and_in_groups(files):
    options: dict[str, Any] = {"batch_size": 60, "num_threads": 0}
    field = Field("words", categories=True, steps=range(-1, 1), pad="edge")
    expected = words_of(files)
    with AsyncReader(hdf5_path=files, fields={"y": field}, **options) as reader:
        batch = reader.get_next_batch()
        before = np.where(batch.index % COUNT, batch.index - 1, batch.index)
        assert (np.array(ORDERED)[batch.y] == expected[np.stack([before, batch.index], 1)]).all()
    sequences = Sequences(groups="demo_*")
    with AsyncReader(
        hdf5_path=files, fields={"x": "data", "y": field}, sequences=sequences, **options
    ) as reader:
        batch = reader.get_next_batch()
        names = np.array(reader.categories["y"])
        own = batch.x + COUNT * (batch.index >= 24)
        assert (names[batch.y[:, 1]] == expected[own]).all()
        first = batch.step == 0
        assert (names[batch.y[:, 0]] == expected[np.where(first, own, own - 1)]).all()


def test_codes_of_values_in_another_file_below_groups(files):
    fields = {"x": "data", "y": Field("1.h5::words", categories=True)}
    with AsyncReader(
        hdf5_path=files[0], fields=fields, sequences=Sequences(groups="demo_*"), batch_size=24
    ) as reader:
        batch = reader.get_next_batch()
        found = np.array(reader.categories["y"])[batch.y]
    assert (found == words_of(files[1:])[batch.x]).all()


def test_draws_and_splits_take_the_name_of_a_field(files):
    fields = {"x": "data", "animal": Field("words", categories=True)}
    options: dict[str, Any] = {"hdf5_path": files, "fields": fields, "batch_size": 64}
    with AsyncReader(weights="balanced:animal", epoch_samples=6400, **options) as reader:
        drawn = np.concatenate([batch.animal.copy() for batch in reader])
        assert np.bincount(drawn).min() > 0.8 * drawn.size / len(ORDERED)
    with AsyncReader(weights="balanced:words", epoch_samples=64, **options) as other:
        assert other.get_next_batch().size == 64
    parts, found = {"train": 0.5, "val": 0.5}, {}
    for name in parts:
        split = Split(name, parts, stratify="animal")
        with AsyncReader(indices=split, **options) as reader:
            found[name] = np.concatenate([batch.animal.copy() for batch in reader])
    counts = [np.bincount(found[name], minlength=len(ORDERED)) for name in parts]
    assert abs(counts[0] - counts[1]).max() <= 1
    with pytest.raises(ConfigError, match="balanced:NAME"):
        AsyncReader(weights="balanced", **options)
    with pytest.raises(ConfigError, match=r"needs one value for each sample, and 'pair' has 2"):
        AsyncReader(hdf5_path=files[0], fields={"pair": "demo_0/pair"}, weights="balanced:pair")


def test_columns_of_tables_have_categories_of_their_own(tmp_path):
    path = write_column(tmp_path / "a.h5", "categorical", ("A", "B"), (0, 1, -1, 1))
    with AsyncReader(hdf5_path=path, fields={"c": Field("obs/c", categories=True)}) as reader:
        batch = reader.get_next_batch()
        assert reader.categories["c"] == ("A", "B")
        assert batch.c.dtype == np.int64
        assert batch.c.tolist() == [0, 1, -1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"categories": ["cat", "dog"]}, r"0\.h5.*words.*sample \d+ is 'eel', which is not among"),
        ({"path": "numbers", "categories": "classes"}, "holds -7, and dataset .* has 3 names"),
        ({"path": "words", "categories": "missing"}, "missing"),
    ],
    ids=str,
)
def test_values_without_a_name_are_errors(files, options, message):
    field = Field(**{"path": "words"} | options)
    with pytest.raises(DatasetError, match=message):
        AsyncReader(hdf5_path=files, fields={"y": field})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 2}, "cannot be used with scale"),
        ({"per": "dataset"}, "a value for each sample"),
        ({"dtype": "f4"}, "signed integer dtype, found float32"),
        ({"categories": ["a", "a"]}, "each category once"),
        ({"categories": []}, "must be True, a list of names"),
        ({"categories": 3}, "must be True, a list of names"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        Field("words", **{"categories": True} | options)


def test_floats_are_no_categories(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3.0)
    with pytest.raises(DatasetError, match="holds float64; categories are made of"):
        AsyncReader(hdf5_path=tmp_path / "a.h5", fields={"x": Field("x", categories=True)})


def test_options_are_written_and_read(files):
    for categories in (True, ("cat", "dog"), "classes"):
        config = ReaderConfig(
            hdf5_path=files[0], fields={"y": Field("words", categories=categories)}
        )
        again = ReaderConfig.load(json.loads(config.model_dump_json()))
        assert again.batch_fields["y"].categories == categories
