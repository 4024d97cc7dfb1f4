"""Fields that each sequence, each file, or the dataset has once, against h5py."""

from __future__ import annotations

import functools
import re

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, require_extra, spoil_chunk
from gpus import use_gpu
from hdf5files import TEXT, write_compact
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    ImageField,
    ReadError,
    Sequences,
    UnsafeFileError,
)
from h5async.cli import app

COUNTS = (23, 0, 1, 46)  # rows of each file
ENDS = ((5, 5, 14, 23), (), (1,), (3, 40, 46))
ROW = (6, 5)


def write(path, number: int, rng: np.random.Generator) -> None:
    """Write a file with values of all ways in which they may be stored."""
    count, ends = COUNTS[number], np.array(ENDS[number], np.int64)
    lengths = np.diff(ends, prepend=0)
    state = rng.random(ROW).astype("f4")
    with h5py.File(path.with_suffix(".mask.h5"), "w") as file:
        file["mask"], file.attrs["note"] = state > 0.5, f"mask {number}"
        file["row"] = np.arange(count) * 3
    with h5py.File(path, "w") as file:
        file["data"], file["ends"], file["lengths"] = rng.random((count, 3)), ends, lengths
        file["ids"] = np.repeat(np.arange(len(ends)), lengths)
        # Once in each file.
        file["array"], file["big"] = state, state.astype(">f8")
        file.create_dataset("zipped", data=state, chunks=(4, 2), compression="gzip", shuffle=True)
        file.create_dataset("never", ROW, "i2", chunks=(4, 2), fillvalue=number)
        file.create_dataset("h5pys", data=state.astype("i4"), chunks=(6, 5), scaleoffset=0)
        write_compact(file, "compact", state)
        table = np.zeros(4, [("a", "i4"), ("b", "f8", (2,))])
        table["a"], table["b"] = np.arange(4) + number, number
        file["table"] = table
        layout = h5py.VirtualLayout(ROW, "f4")
        layout[:3], layout[3:] = (h5py.VirtualSource(file["zipped"])[at] for at in np.s_[3:, :3])
        file.create_virtual_dataset("virtual", layout)
        file["which"], file["flag"], file["name"] = number * 7, number == 3, f"file {number} é"
        file["fixed"] = np.bytes_(f"f{number}")
        file["names"] = np.array([f"{n} of {number}" for n in range(3)], TEXT)
        file["linked"] = h5py.ExternalLink(path.with_suffix(".mask.h5").name, "mask")
        file["literal@name"] = number
        file.attrs["title"], file["array"].attrs["shape of it"] = f"run {number}", (number, 2.5)
        # Once in each sequence.
        rows = rng.random((len(ends), 2, 3)).astype("f4")
        file["of/rows"], file["of/last"] = rows, np.moveaxis(rows, 0, 2)
        if len(ends):
            chunks = (min(2, len(ends)), 1, 3)
            file.create_dataset("of/zipped", data=rows, chunks=chunks, compression="gzip")
        else:
            file["of/zipped"] = rows
        file["of/task"] = np.arange(len(ends)) + 10 * number
        file["of/names"] = np.array([f"s{n} {'x' * n}" for n in range(len(ends))], TEXT)
        file["of"].attrs["success"] = np.arange(len(ends)) % 2 == 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("once"), np.random.default_rng(0)
    paths = [folder / f"{number}.h5" for number in range(len(COUNTS))]
    for number, path in enumerate(paths):
        write(path, number, rng)
    return paths


OF_FILES = {
    name: Field(name, per="file")
    for name in "array big zipped never h5pys compact table table/b virtual which flag name fixed"
    " names linked literal@name @title array@shape of it".replace(" of it", "_of_it").split()
}
OF_FILES["array@shape_of_it"] = Field("array@shape of it", per="file")
OF_SEQUENCES = {
    name: Field(name, per="sequence")
    for name in ("of/rows", "of/zipped", "of/task", "of/names", "of@success")
} | {"of/last": Field("of/last", num_dim=2, per="sequence")}


@functools.cache
def stored(file_path, path: str):
    """Return what h5py reads at a path, strings as bytes."""
    with h5py.File(file_path) as file:
        if "@" in path and path not in file:
            group, _, name = path.rpartition("@")
            value = file[group or "/"].attrs[name]
        else:
            value = file["table"]["b"] if path == "table/b" else file[path][()]
    array = np.asarray(value)
    if array.dtype.kind in "OU":
        texts = [one.encode() if isinstance(one, str) else one for one in array.reshape(-1)]
        return np.array(texts, "S").reshape(array.shape)
    return array


def expected(files, field: Field, index, sequences: bool) -> np.ndarray:
    """Return the value of each sample of a batch."""
    found = []
    counts = np.cumsum([0, *COUNTS])
    for sample in index.tolist():
        number = int(np.searchsorted(counts, sample, side="right")) - 1
        value = stored(files[number], field.path)
        if sequences:
            at = np.searchsorted(ENDS[number], sample - counts[number], side="right")
            value = np.moveaxis(value, field.num_dim, 0)[at]
        found.append(value)
    return np.stack(found)


def check(batch, files, fields: dict[str, Field], sequences: bool = False) -> None:
    for name, field in fields.items():
        wanted = expected(files, field, batch.index, sequences)
        found = batch[name].get() if hasattr(batch[name], "get") else batch[name]
        assert found.shape == wanted.shape, name
        assert found.dtype.newbyteorder("=") == wanted.dtype.newbyteorder("=") or (
            wanted.dtype.kind == "S"
        ), name
        assert (found == wanted).all(), name


WAYS = [
    {},
    {"shuffle": "full"},
    {"shuffle": "window", "window_bytes": 4096},
    {"num_threads": 0, "io": "pread"},
    {"cache": "host", "shuffle": "full"},
    {"rank": 1, "world_size": 2, "shuffle": "window"},
    {"indices": slice(10, 60, 3)},
    {"weights": "balanced", "epoch_samples": 40},
]


def epochs(files, fields, sequences, **options):
    where = {"hdf5_path": [str(path) for path in files], "fields": fields, "batch_size": 16}
    with AsyncReader(**where, **options, sequences=sequences, device="cpu") as reader:
        for _ in range(2):
            for batch in reader:
                assert (batch["labels"] == batch["again"]).all()
                yield batch


PLAIN = {"labels": Field("ids"), "again": Field("ids")}


@pytest.mark.slow
@each("options", WAYS)
def test_values_of_files_reach_each_sample(files, options):
    fields = {"array": OF_FILES["array"], **PLAIN, **OF_FILES}
    for batch in epochs(files, fields, None, **options):
        check(batch, files, OF_FILES)


@pytest.mark.slow
@each("kind", ["ends", "lengths"])
@each("options", WAYS)
def test_values_of_sequences_reach_each_sample(files, kind, options):
    fields = {**PLAIN, **OF_SEQUENCES, "which": OF_FILES["which"]}
    for batch in epochs(files, fields, Sequences(**{kind: kind}), **options):
        check(batch, files, OF_SEQUENCES, sequences=True)
        check(batch, files, {"which": OF_FILES["which"]})


def test_without_the_core_they_are_the_same(files, h5py_way):
    fields = {**PLAIN, **OF_FILES, **OF_SEQUENCES}
    for batch in epochs(files, fields, Sequences(ends="ends"), shuffle="full"):
        check(batch, files, OF_FILES)
        check(batch, files, OF_SEQUENCES, sequences=True)


def where(files, fields, **options):
    return {"hdf5_path": [str(path) for path in files], "fields": fields, **options}


@pytest.mark.any_gpu
@each("options", [{}, {"cache": "device"}, {"decode": "device"}, {"shuffle": "window"}])
def test_a_gpu_gets_the_same_values(files, monkeypatch, options):
    _, simulation, _ = use_gpu(monkeypatch, seed=3)
    numbers = {
        name: field
        for name, field in (OF_FILES | OF_SEQUENCES).items()
        if name not in ("name", "fixed", "names", "@title", "table", "of/names")
    }
    if options.get("decode") == "device":
        numbers = {"zipped": numbers["zipped"], "which": numbers["which"]}
    fields, sequences = PLAIN | numbers, Sequences(ends="ends")
    with AsyncReader(
        **where(files, fields, **options), batch_size=16, sequences=sequences, device="cuda"
    ) as reader:
        for _ in range(2):
            for batch in reader:
                simulation.run_all()
                check(batch, files, {n: f for n, f in numbers.items() if n in OF_FILES})
                found = {n: f for n, f in numbers.items() if n in OF_SEQUENCES}
                check(batch, files, found, sequences=True)


@pytest.mark.slow
def test_ranks_resuming_and_given_samples(files):
    fields = PLAIN | OF_SEQUENCES | {"name": OF_FILES["name"]}
    options = where(files, fields, sequences={"ends": "ends"}, shuffle="full", batch_size=9)
    with AsyncReader(options, rank=1, world_size=2, device="cpu") as reader:
        batches = [batch.copy() for batch in reader]
        for batch in batches:
            check(batch, files, OF_SEQUENCES, sequences=True)
        reader.set_epoch(0)
        reader.get_next_batch()
        state = reader.state_dict()
        given = reader.read([60, 2, 2, 23])
        assert given.index.tolist() == [60, 2, 2, 23]
        check(given, files, OF_SEQUENCES, sequences=True)
    with AsyncReader(options, rank=1, world_size=2, device="cpu") as reader:
        reader.load_state_dict(state)
        batch = reader.get_next_batch()
        assert_same_bits(batch.index, batches[1].index)
        assert_same_bits(batch["of/rows"].copy(), batches[1]["of/rows"])


@pytest.mark.slow
@each("kept", ["named", "cache"])
def test_saved_indices_have_them(files, tmp_path, kept):
    fields = PLAIN | OF_FILES | OF_SEQUENCES | {"static": Field("array@shape of it", per="dataset")}
    fields["once"] = fields.pop("static")
    options = where(files[3:], fields, sequences={"ends": "ends"}, batch_size=16, device="cpu")
    if kept == "named":
        index = tmp_path / "all.h5idx"
        made = CliRunner().invoke(app, ["index", str(files[3]), "-o", str(index)])
        assert made.exit_code == 0, made.output
        options["hdf5_path"] = str(index)
    else:
        options["index_cache"] = tmp_path / "one.h5idx"
    for _ in range(2):
        with AsyncReader(options) as reader:
            assert reader.static["once"].tolist() == [3, 2.5]
            for batch in reader:
                for name, field in OF_FILES.items():
                    wanted = stored(files[3], field.path)
                    assert (batch[name] == wanted[np.newaxis]).all(), name
                at = np.searchsorted(ENDS[3], batch.index, side="right")
                assert (batch["of/task"] == 30 + at).all()
    assert (tmp_path / ("all" if kept == "named" else "one")).with_suffix(".h5idx").exists()


@each("pattern", ["data/demo_*", "data/*"])
@each("options", [{}, {"shuffle": "window"}])
def test_groups_have_scalars_attributes_and_arrays(tmp_path, pattern, options):
    path, lengths = tmp_path / "demos.h5", (5, 3, 1, 8)
    with h5py.File(path, "w") as file, h5py.File(tmp_path / "more.h5", "w") as more:
        for number, length in enumerate(lengths):
            group = file.create_group(f"data/demo_{number}")
            group["actions"], group["obs"] = np.ones((length, 7)), np.ones((length + 1, 2))
            group["task"], group["goal"] = number, np.full((2, 3), number, "f4")
            group.attrs["env_args"], group["goal"].attrs["unit"] = "{" + "é" * number + "}", "m"
            more[f"data/demo_{number}/success"] = bool(number % 2)
            more[f"data/demo_{number}/reward"] = np.arange(length) + 10.0 * number
    fields = {
        "goal": Field("goal", per="sequence", dtype="f8", scale=2.0),
        "actions": Field("actions", steps=[0, 1], pad="edge"),
        "obs": "obs",
        "task": Field("task", per="sequence"),
        "env": Field("@env_args", per="sequence"),
        "unit": Field("goal@unit", per="sequence"),
        "success": Field("more.h5::success", per="sequence"),
        "reward": Field("more.h5::reward"),
    }
    sequences = Sequences(groups=pattern)
    with AsyncReader(
        hdf5_path=path, fields=fields, sequences=sequences, device="cpu", **options
    ) as reader:
        for batch in reader:
            number = batch.sequence
            assert (batch.task == number).all()
            assert (batch.goal == 2.0 * number[:, None, None]).all()
            assert batch.goal.dtype == np.float64
            assert [env.decode() for env in batch.env] == ["{" + "é" * n + "}" for n in number]
            assert (batch.unit == b"m").all()
            assert (batch.success == number % 2).all()
            assert (batch.reward == batch.step + 10.0 * number).all()


def test_two_dimensions_of_samples(tmp_path):
    paths = [str(tmp_path / f"{n}.h5") for n in range(2)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["density"] = np.zeros((3, 6, 4))  # trajectory, time, x
            file["viscosity"] = np.arange(3) + 10 * number
            file["map"] = np.arange(12.0).reshape(3, 4) * (1 + number)
    fields = {
        "density": Field("density", (0, 1), steps=range(2)),
        "viscosity": Field("viscosity", per="sequence"),
        "map": Field("map", per="sequence"),
    }
    with AsyncReader(hdf5_path=paths, fields=fields, shuffle="full", device="cpu") as reader:
        for batch in reader:
            file, at = np.divmod(batch.sequence, 3)
            assert (batch.viscosity == at + 10 * file).all()
            maps = np.arange(12.0).reshape(3, 4)[at]
            assert (batch.map == maps * (1 + file[:, None])).all()


@each("categories", [True, [f"s{n} {'x' * n}" for n in (2, 1, 0, 3)]])
@each("options", [{"shuffle": "full"}, {"shuffle": "window"}])
def test_strings_of_sequences_and_files_are_codes(files, tmp_path, categories, options):
    given = {"per": "sequence", "categories": categories}
    fields = PLAIN | {
        "task": Field("of/names", **given),
        "done": Field("of@success", per="sequence", categories=True),
        "title": Field("@title", per="file", categories=True, dtype="i4"),
    }
    options = options | {"index_cache": tmp_path / "kept.h5idx"}
    for _ in range(2):
        with AsyncReader(
            **where(files, fields, **options), sequences={"ends": "ends"}, device="cpu"
        ) as reader:
            names = {name: np.array(reader.categories[name]) for name in reader.categories}
            assert categories is True or names["task"].tolist() == categories
            for batch in reader:
                assert (batch.task.dtype, batch.title.dtype) == (np.int64, np.int32)
                wanted = expected(files, Field("of/names"), batch.index, sequences=True)
                assert (np.char.encode(names["task"][batch.task]) == wanted).all()
                wanted = expected(files, Field("of@success"), batch.index, sequences=True)
                assert (names["done"][batch.done] == wanted).all()
                wanted = expected(files, Field("@title"), batch.index, sequences=False)
                assert (np.char.encode(names["title"][batch.title]) == wanted).all()


# --- of the whole dataset -------------------------------------------------------------------------


@each("options", [{}, {"num_threads": 0}])
def test_static_values_come_once(tmp_path, options):
    paths = [str(tmp_path / f"{n}.h5") for n in range(3)]
    orography = np.random.default_rng(0).integers(-9, 9, (5, 4)).astype("i2")
    for path in paths:
        with h5py.File(path, "w") as file:
            file["data"] = np.arange(4)
            file.create_dataset("z", data=orography, chunks=(2, 2), compression="gzip")
            file["z"].attrs["scale_factor"], file["z"].attrs["_FillValue"] = 0.5, np.int16(3)
            file.attrs["title"], file.attrs["levels"] = "ERA é", ["a", "bc"]
    with h5py.File(tmp_path / "mask.h5", "w") as file:
        file["pixel_mask"] = orography > 0
    fields = {
        "z": Field("z", per="dataset"),
        "scaled": Field("z", per="dataset", dtype="f8", scale=2.0, offset=1.0),
        "unpacked": Field("z", per="dataset", decode_cf=True),
        "data": "data",
        "title": Field("@title", per="dataset"),
        "levels": Field("@levels", per="dataset"),
        "mask": Field("mask.h5::pixel_mask", per="dataset"),
    }
    with AsyncReader(hdf5_path=paths, fields=fields, device="cpu", **options) as reader:
        (batch,) = reader
        assert batch.keys() == ["data"]
        assert batch.static == reader.static
        assert batch.copy().static["title"] == "ERA é"
        assert reader.static["levels"].tolist() == [b"a", b"bc"]
        assert_same_bits(reader.static["z"], orography)
        assert_same_bits(reader.static["scaled"], orography * 2.0 + 1.0)
        unpacked = np.where(orography == 3, np.nan, orography * 0.5)
        assert_same_bits(reader.static["unpacked"], unpacked)
        assert_same_bits(reader.static["mask"], orography > 0)
        with pytest.raises(ValueError, match="read-only"):
            reader.static["z"][0] = 0

    def masked(data, *, static):
        return {"sums": data + static["mask"].sum(), "titles": np.full(len(data), static["title"])}

    options = options | {"fields": fields, "device": "cpu", "postprocess": masked}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        (batch,) = reader
        assert (batch.sums == np.tile(np.arange(4), 3) + (orography > 0).sum()).all()
        assert set(batch.titles) == {"ERA é"}


def test_static_values_that_differ_name_both_files(files):
    fields = {"data": "data", "name": Field("name", per="dataset")}
    with pytest.raises(
        DatasetError, match=r"1\.h5: .*another value than in .*0\.h5; set per=\"file"
    ):
        AsyncReader(**where(files, fields))


# --- what does not fit ----------------------------------------------------------------------------


@each(
    "field, error, words",
    [
        (Field("@nothing", per="file"), DatasetError, '"/" has no attribute "nothing"'),
        (Field("nothing", per="file"), DatasetError, 'there is no dataset "nothing"'),
        (Field("of", per="sequence"), DatasetError, 'there is no dataset "of"'),
        (Field("ids", per="sequence"), DatasetError, "has 23 rows, and the file has 4 sequences"),
        (Field("array", per="file", axes=(0, 1)), ConfigError, "leave out num_dim and axes"),
        (Field("which", per="sequence"), DatasetError, "is a scalar"),
        (Field("name", per="file", scale=2.0), ConfigError, "cannot be cast"),
        (Field("/tmp/../etc/passwd::x", per="file"), UnsafeFileError, "allow_external"),
        (Field("none.h5::x", per="file"), DatasetError, "none.h5, which does not exist"),
    ],
)
def test_what_cannot_be_read_says_why(files, field, error, words):
    fields = {"data": "data", "once": field}
    with pytest.raises(error, match=re.escape(words)):
        AsyncReader(**where(files[:1], fields, sequences={"ends": "ends"}))


def test_options_that_do_not_fit_together():
    with pytest.raises(ConfigError, match="per is for plain fields, and this is a field of steps"):
        Field("a", per="file", steps=[0])
    with pytest.raises(ConfigError, match="per is for plain fields, and this is ImageField"):
        ImageField("a", per="file")
    with pytest.raises(ConfigError, match="at least one field whose rows are samples"):
        AsyncReader(hdf5_path="none.h5", fields={"a": Field("a", per="file")})


def test_other_files_are_found_and_permitted_like_linked_ones(files, tmp_path):
    (tmp_path / "far").mkdir()
    far = tmp_path / "far" / "mask.h5"
    with h5py.File(far, "w") as file:
        file["mask"], file.attrs["unit"] = np.arange(3), "m"
    fields = {
        "row": "0.mask.h5::row",
        "mask": Field("0.mask.h5::mask", per="file"),
        "note": Field("0.mask.h5::@note", per="file"),
        "far": Field(f"{far}::/mask", per="file"),
    }
    with pytest.raises(UnsafeFileError, match="allow_external"):
        AsyncReader(**where(files[:1], fields))
    with AsyncReader(
        **where(files[:1], fields, allow_external=[far.parent]), device="cpu"
    ) as reader:
        for batch in reader:
            assert (batch.row == 3 * batch.index).all()
            assert (batch.mask == stored(files[0].with_suffix(".mask.h5"), "mask")).all()
            assert (batch.note == b"mask 0").all()
            assert (batch.far == [0, 1, 2]).all()


def test_a_dataset_whose_name_looks_like_another_file_is_itself(path):
    with h5py.File(path, "w") as file:
        file["a.h5::b"], file["data"] = np.arange(3), np.arange(3)
    with AsyncReader(hdf5_path=path, fields={"b": "a.h5::b", "data": "data"}) as reader:
        assert (reader.get_next_batch().b == [0, 1, 2]).all()


def test_a_damaged_chunk_is_named(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(9)
        file.create_dataset("map", data=np.zeros((8, 8)), chunks=(4, 8), compression="gzip")
    spoil_chunk(path, 1, "map")
    fields = {"data": "data", "map": Field("map", per="file")}
    with AsyncReader(hdf5_path=path, fields=fields, device="cpu") as reader:
        with pytest.raises(ReadError, match='dataset "map"'):
            reader.get_next_batch()


def test_a_cache_keeps_the_array_of_a_file_once(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"], file["map"] = np.arange(1000), np.zeros((100, 100))
    fields = {"data": "data", "map": Field("map", per="file")}
    with AsyncReader(
        hdf5_path=path, fields=fields, cache="host", cache_bytes=400_000, device="cpu"
    ) as reader:
        for _ in range(2):
            for batch in reader:
                assert not batch.map.any()
        assert "100 % of the samples" in reader.stats().cache


def test_tensors_of_them(files):
    torch = require_extra("torch")
    from h5async.torch import H5Dataset

    fields = {"data": "data", "array": OF_FILES["array"], "note": Field("@title", per="dataset")}
    with H5Dataset(where(files[:1], fields, device="cpu", batch_size=8)) as dataset:
        for batch in dataset:
            assert torch.equal(batch["array"][-1], torch.from_numpy(stored(files[0], "array")))
        assert dataset.reader.static == {"note": "run 0"}
