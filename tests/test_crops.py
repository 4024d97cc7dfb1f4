"""Parts of rows at random places, against NumPy on h5py's rows, by the places that are told."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, example, poison, reader_of, truth
from hdf5files import write_rows
from rowparts import assert_are_parts, part_of

from h5async import AsyncReader, ConfigError, Field, RaggedField
from h5async.core.binding import load_core
from h5async.index.layout import Crop
from h5async.plan.crops import begins, draws_of, epoch_keys

SIZES = {1: 9, 2: 10}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("crops") / "rows.h5"
    return path, write_rows(path)


def field_of(name: str, **options: Any) -> Field:
    """Return a field of one of these datasets that is cropped to 9 x 10."""
    path = "compound/v" if name == "compound" else name
    if name.startswith("last"):
        return Field(path, num_dim=2, crop={0: 9, 1: 10}, **options)
    if name == "pairs":
        return Field(path, num_dim=(0, 1), crop={2: 9, 3: 10}, **options)
    return Field(path, crop=SIZES, **options)


NAMES = "contiguous swapped chunks across whole raw holes last last_tiles pairs compact".split()
NAMES += ["compound"]


@each("shuffle, io, cache", [(False, "auto", None), ("full", "pread", "host")])
@each("name", NAMES)
def test_all_ways_in_which_rows_lie(
    stored: tuple[Path, np.ndarray], name: str, shuffle: Any, io: Any, cache: Any
):
    path, _ = stored
    rows = truth(path, "compound")["v"] if name == "compound" else None
    if rows is None:
        rows = truth(path, name, 2 if name.startswith("last") else 0)
    rows = rows.reshape(-1, *rows.shape[-2:])
    options = {"shuffle": shuffle, "io": io, "cache": cache, "batch_size": 5}
    with reader_of(path, fields={"x": field_of(name)}, **options) as reader:
        poison(reader)
        for batch in itertools.chain(reader, reader):
            assert_are_parts(batch, "x", rows, (9, 10))
        if not (io == "pread" and name == "last"):  # these lie across all bytes of the dataset
            assert reader.fallback_reads == 0


@pytest.mark.parametrize("chunks", [None, (4, 9, 31), (2, 23, 7)])
def test_members_of_one_column_each(tmp_path: Path, chunks: Any):
    rows = np.random.default_rng(2).normal(size=(17, 23, 31)).astype("f4")
    table = np.zeros(rows.shape, [("id", "i4"), ("v", "f4"), ("w", "f8")])
    table["v"] = rows
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file.create_dataset("table", data=table, chunks=chunks)
    fields = {"x": Field("table/v", crop={1: 23, 2: 1})}
    options = {"fields": fields, "shuffle": "full", "io": "pread"}
    with reader_of(tmp_path / "table.h5", **options) as reader:
        for batch in itertools.chain(reader, reader):
            assert_are_parts(batch, "x", rows, (23, 1))


@pytest.mark.usefixtures("h5py_way")
@each("name", NAMES)
def test_through_h5py_the_places_are_the_same(stored: tuple[Path, np.ndarray], name: str):
    path, _ = stored
    fields = {"x": field_of(name, flip=True)}
    with reader_of(path, fields=fields, shuffle=True, batch_size=5) as reader:
        found = [batch.copy() for batch in reader]
        assert reader.fallback_reads or name == "compact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5async.fill.filling.load_core", load_core)
        with reader_of(path, fields=fields, shuffle=True, batch_size=5) as reader:
            for one, other in zip(found, reader, strict=True):
                assert_same_bits(one.x, other.x)
                assert_same_bits(one.x_crop, other.x_crop)


def test_fields_of_a_group_have_the_same_places_and_flips(stored: tuple[Path, np.ndarray]):
    path, rows = stored
    both = {"crop": SIZES, "flip": (1, 2)}
    fields = {
        "x": Field("chunks", **both),
        "mask": Field("contiguous", **both),
        "other": Field("across", **both, crop_group="other"),
        "whole": Field("whole"),
    }
    flips, differing = set(), 0
    with reader_of(path, fields=fields, shuffle=True) as reader:
        for batch in itertools.islice(itertools.chain(reader, reader, reader), 3):
            assert_same_bits(batch.x, batch.mask)
            assert_same_bits(batch.x_crop, batch.mask_crop)
            assert_same_bits(batch.whole, rows[batch.index])
            differing += int((batch.other_crop != batch.x_crop).any(axis=1).sum())
            for one, sample, place in zip(batch.x, batch.index, batch.x_crop, strict=True):
                part, turns = part_of(rows[sample], place, (9, 10)), (1, -1)
                several = list(itertools.product(turns, turns))
                (found,) = [t for t in several if np.array_equal(one, part[:: t[0], :: t[1]])]
                flips.add(found)
    assert len(flips) == 4
    assert differing > 30


def test_parts_in_the_middle_and_rows_that_are_flipped_whole(stored: tuple[Path, np.ndarray]):
    path, rows = stored
    fields = {
        "middle": Field("across", crop=SIZES, crop_at="center"),
        "turned": Field("across", flip=True, crop_group="a"),
        "both": Field("chunks", crop=8, crop_at="center", flip=(1,), crop_group="b"),
    }
    with reader_of(path, fields=fields, shuffle=True) as reader:
        batch = reader.get_next_batch()
        assert_same_bits(batch.middle, rows[batch.index, 7:16, 10:20])
        assert (batch.middle_crop == (7, 10)).all()
        assert (batch.both_crop == (7, 11)).all()
        assert "turned_crop" not in batch.keys()
        for name, part, axis in (
            ("turned", rows[batch.index], 2),
            ("both", rows[batch.index, 7:15, 11:19], 1),
        ):
            are_turned = [
                np.array_equal(one, np.flip(row, axis - 1)) and not np.array_equal(one, row)
                for one, row in zip(batch[name], part, strict=True)
            ]
            assert 0 < sum(are_turned) < len(part)
            for one, row, is_turned in zip(batch[name], part, are_turned, strict=True):
                assert is_turned or np.array_equal(one, row)


def test_places_depend_on_seed_epoch_and_sample_alone(stored: tuple[Path, np.ndarray]):
    path, _ = stored
    fields = {"x": field_of("chunks", flip=True)}

    def epochs(**options: Any) -> dict[tuple[int, int], Any]:
        found = {}
        with reader_of(path, fields=fields, **options) as reader:
            for batch in itertools.chain(reader, reader):
                several = zip(batch.index.tolist(), batch.x, batch.x_crop, strict=True)
                for sample, one, place in several:
                    found[batch.epoch, sample] = one.tobytes(), tuple(place.tolist())
        return found

    first = epochs(batch_size=4)
    assert first == epochs(batch_size=7, shuffle="full", num_threads=0)
    assert first == epochs(shuffle="window", cache="host")
    assert first != epochs(seed=1)
    assert sum(first[0, n] != first[1, n] for n in range(17)) > 12


def test_batches_of_given_samples_and_of_a_state(stored: tuple[Path, np.ndarray]):
    path, rows = stored
    fields = {"x": field_of("chunks")}
    with reader_of(path, fields=fields, batch_size=4, shuffle=True) as reader:
        assert_are_parts(reader.read([3, 16, 3]), "x", rows, (9, 10))
        reader.get_next_batch()
        state = reader.state_dict()
        reader.fetch_data([5, 2])
        later = [reader.get_next_batch().copy() for _ in range(4)]
        given = next(batch for batch in later if batch.epoch < 0)
        assert_are_parts(given, "x", rows, (9, 10))
        rest = [batch for batch in later if batch.epoch >= 0]
    with reader_of(path, fields=fields, batch_size=4, shuffle=True) as reader:
        reader.load_state_dict(state)
        for batch in rest[:3]:
            again = reader.get_next_batch()
            assert_same_bits(again.x, batch.x)
            assert_same_bits(again.x_crop, batch.x_crop)


def test_postprocess_and_ranks(stored: tuple[Path, np.ndarray]):
    path, rows = stored

    def check(x: np.ndarray, index: np.ndarray, x_crop: np.ndarray, crop: np.ndarray) -> None:
        assert_same_bits(crop, x_crop)
        for one, sample, place in zip(x, index, x_crop, strict=True):
            assert_same_bits(one, np.ascontiguousarray(part_of(rows[sample], place, (9, 10))))
        x += 1

    seen: list[int] = []
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "shuffle": "window", "postprocess": check}
        with reader_of(path, fields={"x": field_of("across")}, **options) as reader:
            for batch in reader:
                seen += batch.index.tolist()
                for one, sample, place in zip(batch.x, batch.index, batch.x_crop, strict=True):
                    assert_same_bits(one, part_of(rows[sample], place, (9, 10)) + 1)
    assert set(seen) == set(range(17))


def test_only_touched_chunks_are_decoded_and_each_once_if_they_are_kept(
    stored: tuple[Path, np.ndarray],
):
    path, _ = stored
    options = {"num_threads": 0, "batch_size": 17, "fields": {"x": field_of("chunks")}}
    with reader_of(path, **options) as reader:
        places = reader.get_next_batch().x_crop
        cells = -(-(places + np.array([9, 10])) // 8) - places // 8
        assert reader.stats().decoded_chunks == int(np.prod(cells, axis=1).sum())
    with reader_of(path, cache="host", shuffle=True, **options) as reader:
        for _ in range(60):
            reader.get_next_batch()
        assert reader.stats().decoded_chunks <= 17 * 12
        assert "decoded chunks" in reader.stats().cache
    with reader_of(path, num_threads=0, fields={"x": Field("contiguous", crop=6)}) as reader:
        reader.get_next_batch()
        assert reader.stats().read_nbytes == 17 * 6 * 6 * 4


def test_the_core_draws_what_numpy_draws():
    crop = Crop((2, 0), (5, 7), True, (True, False), "a")
    draws = draws_of(crop, (7, 3, 40))
    places = draws.places(epoch_keys(3, 5), np.arange(1000))
    found = begins(places, crop.axes)
    assert np.unique(found[:, 0]).tolist() == list(range(36))
    assert np.unique(found[:, 1]).tolist() == [0]
    assert (places[:, 1] == 0).all()
    assert 400 < (places[:, 2] < 0).sum() < 600
    counts = np.bincount(found[:, 0])
    assert counts.min() > 10
    assert counts.max() < 50


@pytest.mark.slow
def test_the_example():
    assert example("random_patches").main(epochs=20) > 0.9


def test_options_survive_files(tmp_path: Path, stored: tuple[Path, np.ndarray]):
    fields = {
        "x": Field("chunks", crop={"lat": 9, 2: 10}, flip=("lon",), crop_group="a"),
        "z": Field("chunks", region={"lat": slice(3, -2, 2), 2: slice(9, 20)}),
        "y": Field("across", crop=4, crop_at="center", flip=True),
    }
    with reader_of(stored[0], fields=fields) as reader:
        (tmp_path / "options.json").write_text(reader.config.model_dump_json())
        expected = reader.read([1, 2])
    with AsyncReader(tmp_path / "options.json") as again:
        assert again.config.fields == fields
        for one, other in zip(again.read([1, 2]), expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"x": Field("chunks", crop=24)}, "crop of 24 elements from a dimension of 23"),
        ({"x": Field("chunks", crop={1: 4, "lat": 5})}, "must name each dimension once"),
        ({"x": Field("chunks", crop={0: 4})}, "dimension 0 counts the samples"),
        ({"x": Field("ends", crop=1)}, "rows have none"),
        (
            {"x": Field("chunks", crop=4), "y": Field("across", crop=5)},
            "no crop_group, so they are cropped and flipped together, but they differ",
        ),
        ({"x": Field("chunks", crop=4), "x_crop": "ends"}, "crop delivers 'x_crop'"),
    ],
)
def test_what_does_not_fit_is_refused(
    stored: tuple[Path, np.ndarray], fields: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words):
        reader_of(stored[0], fields=fields)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crop": 0}, "must be a number of elements, or map dimensions to numbers"),
        ({"crop": {}}, "must be a number of elements, or map dimensions to numbers"),
        ({"crop": 4, "crop_at": "corner"}, "crop_at"),
        ({"crop_at": "center"}, "crop_at needs crop"),
        ({"flip": "lon"}, "must be False, True, or a list of dimensions"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Field("x", **options)


def test_other_kinds_of_fields_have_none():
    with pytest.raises(ConfigError, match="crop is for fields whose samples have one shape"):
        RaggedField("x", crop=4)  # type: ignore[call-arg]
