"""`pack` of every kind of source, whose values are compared by h5py, and read without options."""

import ast
import datetime
import importlib
import io
import json
import math
import re

import h5py
import numpy as np
import pytest
import soundfile
from comparing import PNGS, contents, interrupt, opened, values
from pictures import by_pillow, write
from typer.testing import CliRunner

import h5async
from h5async import AsyncReader, ConfigError, DatasetError, Field, ReadError, Sequences, cli
from h5async.packing.safefile import SafeFile

pa = pytest.importorskip("pyarrow")
RNG = np.random.default_rng(1)

# --- arrays --------------------------------------------------------------------------------------

ARRAYS = {
    "data": RNG.normal(size=(300, 7, 3)).astype(np.float32),
    "labels": RNG.integers(0, 9, 300),
    "flags": RNG.random(300) < 0.5,
    "small": RNG.integers(0, 255, (300, 2), np.uint8),
    "wide": RNG.normal(size=(300, 5000)),
    "names": np.array([f"name {n}" for n in range(300)]),
    "swapped": RNG.integers(0, 999, 300).astype(">i4"),
}


@pytest.mark.parametrize("form", ["arrays", "npz", "npy", "torch"])
def test_arrays(tmp_path, form):
    expected, sources = dict(ARRAYS), ARRAYS
    if form == "npz":
        sources = tmp_path / "in.npz"
        np.savez(sources, **ARRAYS)
    elif form == "npy":
        sources = [tmp_path / f"{name}.npy" for name in ARRAYS]
        for path in sources:
            np.save(path, ARRAYS[path.stem])
    elif form == "torch":
        torch = pytest.importorskip("torch")
        del expected["names"], expected["swapped"]
        sources = {name: torch.from_numpy(array) for name, array in expected.items()}
    with opened(sources, tmp_path) as file:
        assert sorted(file) == sorted(expected)
        for name, array in expected.items():
            found = file[name][:] if name != "names" else file[name].asstr()[:]
            np.testing.assert_array_equal(found, array)
        assert file["wide"].chunks == (1, 5000)
        assert file["small"].dtype == np.uint8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_larger_than_memory(tmp_path, save, monkeypatch):
    save(tmp_path / "in.npz", **ARRAYS)
    whole = opened(tmp_path / "in.npz", tmp_path).filename
    expected, options = contents(whole), {"memory": "64kB", "num_threads": 3}
    with opened(tmp_path / "in.npz", tmp_path, **options) as file:
        assert contents(file.filename) == expected
    monkeypatch.setattr(SafeFile, "is_due", True)
    out = tmp_path / "resumed.h5"
    with pytest.raises(KeyboardInterrupt):
        h5async.pack(tmp_path / "in.npz", out, progress=interrupt, **options)
    h5async.pack(tmp_path / "in.npz", out, resume=True, **options)
    assert contents(out) == expected
    with pytest.raises(ConfigError, match="h5async repack --shuffle"):
        opened(tmp_path / "in.npz", tmp_path, shuffle=True, **options)
    save(tmp_path / "f.npz", np.asfortranarray(ARRAYS["wide"]))
    with pytest.raises(ReadError, match=r"f\.npz: arr_0\.npy is .* extract the file"):
        opened(tmp_path / "f.npz", tmp_path, **options)
    content = bytearray((tmp_path / "in.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "in.npz").write_bytes(content)
    for memory in ("64kB", "1GB"):
        with pytest.raises(ReadError, match=r"cannot read .*in\.npz"):
            opened(tmp_path / "in.npz", tmp_path, memory=memory)


def test_files_with_arrays_of_one_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "x.npy", np.arange(3))
    with pytest.raises(DatasetError, match=r'b.x\.npy: another file has "x", too'):
        opened([tmp_path / "a/x.npy", tmp_path / "b/x.npy"], tmp_path)


def test_one_array_is_data_and_its_rows_can_be_shuffled(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(5000))
    with opened(tmp_path / "x.npy", tmp_path, shuffle=True) as file:
        found = file["data"][:]
    assert sorted(found) == list(range(5000)) != found.tolist()


def test_arrays_of_other_lengths_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="x has 3, y has 4"):
        h5async.pack({"x": np.zeros(3), "y": np.zeros(4)}, tmp_path / "out.h5")


def test_a_filter_that_does_not_exist_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the filter 'zip'"):
        h5async.pack({"data": np.zeros(3)}, tmp_path / "out.h5", filter="zip")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["shuffle+gzip:2", "zstd:1", "lzf", "none", "auto"])
def test_filters(tmp_path, name):
    with opened({"data": np.arange(90000).reshape(3000, 30)}, tmp_path, filter=name) as file:
        np.testing.assert_array_equal(file["data"][:], np.arange(90000).reshape(3000, 30))
        count = file["data"].id.get_create_plist().get_nfilters()
        assert count == {"none": 0, "auto": 2, "shuffle+gzip:2": 2}.get(name, 1)


# --- samples of Python ---------------------------------------------------------------------------


def _samples(count):
    for n in range(count):
        yield {
            "x": np.full((2, 3), n, np.int16),
            "y": n,
            "z": n / 2,
            "ok": n % 2 == 0,
            "text": f"sample {n} ä",
            "tokens": list(range(n % 5)),
            "obs": {"image": PNGS[n % 9], "raw": b"\0" * n},
        }


def test_samples_of_python(tmp_path):
    with opened(_samples(150), tmp_path) as file:
        for n, sample in enumerate(_samples(150)):
            np.testing.assert_array_equal(file["x"][n], sample["x"])
        assert (file["x"].dtype, file["y"].dtype) == (np.int16, np.int64)
        assert (file["z"].dtype, file["ok"].dtype) == (np.float64, np.bool_)
        assert values(file["text"]) == [f"sample {n} ä" for n in range(150)]
        assert values(file["tokens"]) == [list(range(n % 5)) for n in range(150)]
        assert [one.tobytes() for one in file["obs/image"][:9]] == PNGS
        assert [len(one) for one in file["obs/raw"][:]] == list(range(150))
    fields = {"image": "obs/image", "tokens": "tokens"}
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields=fields) as reader:
        batch = reader.get_next_batch()
        np.testing.assert_array_equal(batch.image[3], by_pillow(PNGS[3]))
        assert batch.tokens[4].tolist() == [0, 1, 2, 3]


def test_images_among_samples_are_resized_and_bad_ones_left_out(tmp_path):
    samples = [{"image": one, "y": n} for n, one in enumerate([*PNGS, PNGS[0][:40], PNGS[1]])]
    found = h5async.pack(samples, tmp_path / "out.h5", size=4, on_error="skip")
    assert [name for name, _ in found.bad] == ["sample 9"]
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["image"].shape == (10, 4, 4, 3)
        assert values(file["y"]) == [*range(9), 10]


ODD = {
    "a shape": ({"x": np.zeros(3)}, {"x": np.zeros((3, 3))}, "has float64.3, 3., but float64.3."),
    "a type": ({"x": 1}, {"x": 1.5}, "has float64"),
    "a key": ({"x": 1}, {"x": 1, "y": 2}, 'lack "y"'),
    "none": ({"x": 1}, {"x": None}, '"x" is None'),
    "text": ({"x": "a"}, {"x": "a\0b"}, "NUL"),
    "no mapping": ({"x": 1}, [1], "is a list"),
    "objects": ({"x": object()}, {"x": 1}, "can be packed"),
}


@pytest.mark.parametrize("name", ODD)
def test_samples_that_are_not_alike_are_named(tmp_path, name):
    first, second, message = ODD[name]
    with pytest.raises(DatasetError, match=message):
        h5async.pack([first] * 70 + [second], tmp_path / "out.h5")


LARGE = 2**53 + 1  # which no float64 is


@pytest.mark.parametrize(
    "samples",
    [
        [0.5, LARGE],
        [0.5] * 64 + [LARGE],
        [np.int64(-1), np.uint64(LARGE)],
        [np.array([0.5]), np.array([1, LARGE])],
    ],
)
def test_integers_do_not_become_floats_without_their_values(tmp_path, samples):
    with pytest.raises(DatasetError, match=r"sample \d+"):
        opened(({"x": one} for one in samples), tmp_path)
    with opened(({"x": one} for one in [0.5, LARGE - 1, 3]), tmp_path) as file:
        assert file["x"][:].tolist() == [0.5, LARGE - 1, 3]


@pytest.mark.parametrize(
    ("names", "odd"),
    [(["a", "a/b"], "'a'"), ([""], "''"), (["."], "'.'"), (["/a", "a"], "'/a'"), ([1], "1")],
)
def test_names_that_cannot_be_those_of_datasets(tmp_path, names, odd):
    with pytest.raises(DatasetError, match=f"name {re.escape(odd)}"):
        opened({name: np.arange(3) for name in names}, tmp_path)


def test_strings_that_are_no_utf8_keep_their_bytes(tmp_path):
    with opened({"data": np.array([b"\xff", b"b"])}, tmp_path) as file:
        assert file["data"][:].tolist() == [b"\xff", b"b"]
    with pytest.raises(DatasetError, match='"x", samples from 0 on'):
        opened([{"x": "\ud800"}], tmp_path)


@pytest.mark.parametrize(
    ("sources", "message"),
    [({"x": np.zeros((3, 0))}, "without values"), ({"x": [[1], [1, 2]]}, "is not an array")],
)
def test_arrays_that_cannot_be_packed(tmp_path, sources, message):
    with pytest.raises(DatasetError, match=message):
        opened(sources, tmp_path)


@pytest.mark.parametrize(
    ("name", "content"), [("x.npz", b"PK\x03\x04 and no more"), ("x.npz", b""), ("x.npy", b"")]
)
def test_damaged_arrays(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ReadError, match=name):
        opened(tmp_path / name, tmp_path)


def test_columns_whose_first_samples_happen_to_be_alike(tmp_path):
    samples = [{"x": [1, 2]}] * 100 + [{"x": [3]}]
    with pytest.raises(DatasetError, match=r"sample 100: .*varying=.*x"):
        h5async.pack(samples, tmp_path / "out.h5")
    with opened(samples, tmp_path, varying=["x"]) as file:
        assert values(file["x"])[-2:] == [[1, 2], [3]]


@pytest.mark.parametrize("count", [3, 5000])
def test_strings_of_fixed_length(tmp_path, count):
    texts = [f"{n}ä" * (n % 3) for n in range(count)]
    options = {"strings": {"x": 12, "obs/y": 2}, "filter": "gzip:1"}
    samples = [{"x": one, "obs": {"y": "b"}, "z": one} for one in texts]
    with opened(samples, tmp_path, **options) as file:
        assert h5py.check_string_dtype(file["x"].dtype) == ("utf-8", 12)
        assert values(file["x"]) == values(file["z"]) == texts
        assert values(file["obs/y"]) == ["b"] * count
    h5async.pack(samples, tmp_path / "out.h5", append=True, **options)
    with h5py.File(tmp_path / "out.h5") as file:
        assert values(file["x"]) == texts * 2
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields={"x": "x"}) as reader:
        assert reader.get_next_batch().x[1].decode() == texts[1]
    message = r'"x", samples from 0 on: a string has 13 bytes.*strings=\{.x.: 13\}'
    with pytest.raises(DatasetError, match=message):
        opened([{"x": "a" * 13}], tmp_path, strings={"x": 12})
    with pytest.raises(DatasetError, match="has no strings"):
        opened([{"x": 1}], tmp_path, strings={"x": 10})


def test_strings_of_fixed_length_by_the_command(tmp_path):
    (tmp_path / "in.csv").write_text("a,b\n1,xx\n2,yyy\n")
    typed = ["pack", tmp_path / "in.csv", "-o", tmp_path / "out.h5", "--string", "b=4"]
    found = CliRunner().invoke(cli.app, list(map(str, typed)))
    assert "strings of 4 bytes" in found.stdout
    with h5py.File(tmp_path / "out.h5") as file:
        assert values(file["b"]) == ["xx", "yyy"]
        assert file["b"].dtype.itemsize == 4
    found = CliRunner().invoke(cli.app, list(map(str, [*typed, "--overwrite", "--string", "a=1"])))
    assert '--string: column "a" has no strings' in found.stderr


def test_options_for_columns_that_are_not_there(tmp_path):
    samples = [{"tokens": [1], "obs": {"age": 3}}]
    for option, given in (("varying", ["tokenz"]), ("fill", {"obs/aeg": 1}), ("strings", {"x": 1})):
        with pytest.raises(ConfigError, match=rf'{option}: there is no column ".*"; did you mean'):
            opened(samples, tmp_path, **{option: given})
    opened(samples, tmp_path, fill={"obs": 0, "obs/age": 1})


# --- tables --------------------------------------------------------------------------------------


def _table(rows=5000):
    count = range(rows)
    day = datetime.datetime(2024, 5, 1)
    return pa.table(
        {
            "number": pa.array(count, pa.uint16()),
            "half": pa.array([None if n == 3 else n / 2 for n in count], pa.float32()),
            "flag": pa.array([n % 3 == 0 for n in count]),
            "text": pa.array([f"t{n}" for n in count]),
            "pair": pa.array([[n, n + 1] for n in count], pa.list_(pa.int32(), 2)),
            "tokens": pa.array([list(range(n % 4)) for n in count], pa.list_(pa.int64())),
            "kind": pa.array([None if n == 7 else "ab"[n % 2] for n in count]).dictionary_encode(),
            "time": pa.array([day + datetime.timedelta(n) for n in count], pa.timestamp("us")),
            "image": pa.array(
                [{"bytes": PNGS[n % 9], "path": None} for n in count],
                pa.struct({"bytes": pa.binary(), "path": pa.string()}),
            ),
            "pose": pa.array([{"x": n, "y": -n} for n in count]),
            "hash": pa.array([b"%4d" % n for n in count], pa.binary(4)),
        }
    )


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_tables(tmp_path, form):
    import pyarrow.parquet

    table, path = _table(), tmp_path / f"in.{form.replace('stream', 'arrow')}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
    else:
        new = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=900)
    with opened(path, tmp_path) as file:
        count = range(5000)
        assert file["number"].dtype == np.uint16
        np.testing.assert_array_equal(file["number"][:], np.arange(5000))
        np.testing.assert_array_equal(file["half"][:], [np.nan if n == 3 else n / 2 for n in count])
        assert file["flag"][:].tolist() == [n % 3 == 0 for n in count]
        assert [one.tobytes() for one in file["hash"][:]] == [b"%4d" % n for n in count]
        assert values(file["text"]) == [f"t{n}" for n in count]
        np.testing.assert_array_equal(file["pair"][:], [[n, n + 1] for n in count])
        assert values(file["tokens"]) == [list(range(n % 4)) for n in count]
        assert values(file["kind/categories"]) == ["a", "b"]
        assert values(file["kind/codes"]) == [-1 if n == 7 else n % 2 for n in count]
        assert file["time"].attrs["units"] == "microseconds since 1970-01-01"
        np.testing.assert_array_equal(file["time"][:], table["time"].cast(pa.int64()))
        assert [one.tobytes() for one in file["image"][:9]] == PNGS
        np.testing.assert_array_equal(file["pose/y"][:], -np.arange(5000))
    fields = {name: name for name in ("image", "kind", "tokens")}
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields=fields, batch_size=9) as reader:
        batch = reader.get_next_batch()
        assert reader.categories["kind"] == ("a", "b")
        assert batch.kind.tolist() == [0, 1, 0, 1, 0, 1, 0, -1, 0]
        np.testing.assert_array_equal(batch.image[2], by_pillow(PNGS[2]))


def test_csv(tmp_path):
    (tmp_path / "in.csv").write_text("a,b,c\n" + "".join(f"{n},{n / 4},x{n}\n" for n in range(99)))
    with opened(tmp_path / "in.csv", tmp_path) as file:
        assert file["a"][:].tolist() == list(range(99))
        assert file["b"][:].tolist() == [n / 4 for n in range(99)]
        assert values(file["c"]) == [f"x{n}" for n in range(99)]
    (tmp_path / "in.csv").write_text("a\n1\n,\n")
    with pytest.raises(ReadError, match=r"cannot read .*in\.csv"):
        h5async.pack(tmp_path / "in.csv", tmp_path / "other.h5")


@pytest.mark.parametrize("content", [b"a,b\n1,caf\xe9\n", b"a,caf\xe9\n1,x\n"])
def test_csv_that_is_not_utf8(tmp_path, content):
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(ReadError, match=r"(?i)in\.csv: .*utf-8"):
        opened(tmp_path / "in.csv", tmp_path)


@pytest.mark.parametrize("name", ["x.CSV", "x.Parquet"])
def test_endings_in_capitals(tmp_path, name):
    table, path = pa.table({"a": [1, 2]}), str(tmp_path / name)
    if name == "x.CSV":
        importlib.import_module("pyarrow.csv").write_csv(table, path)
    else:
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    with opened(path, tmp_path) as file:
        assert file["a"][:].tolist() == [1, 2]


def test_several_columns_of_one_name(tmp_path):
    (tmp_path / "x.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DatasetError, match='several columns have the name "a"'):
        opened(tmp_path / "x.csv", tmp_path)


def test_values_for_nulls_within_lists_and_those_that_do_not_fit(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"a": [[1, None], [3]], "b": [1, None]})
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    with opened(path, tmp_path, fill={"a": -1, "b": 0}) as file:
        assert values(file["a"]) == [[1, -1], [3]]
    with pytest.raises(DatasetError, match='cannot replace nulls of "b"'):
        opened(path, tmp_path, fill={"a": -1, "b": "none"})


def test_a_fraction_does_not_replace_nulls_of_integers(tmp_path):
    path = tmp_path / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"a": [1, None]}), path)
    with opened(path, tmp_path, fill={"a": 2.0}) as file:
        assert values(file["a"]) == [1, 2]
    for value in (1.5, math.nan, math.inf, "none"):
        with pytest.raises(DatasetError, match='cannot replace nulls of "a"'):
            opened(path, tmp_path, fill={"a": value})


@pytest.mark.parametrize("column", [["a", None], [True, None], [[1], None], [1, None]])
def test_the_value_that_is_proposed_for_nulls_can_replace_them(tmp_path, column):
    path = tmp_path / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"a": column}), path)
    with pytest.raises(DatasetError, match="to replace them: fill=") as found:
        opened(path, tmp_path)
    proposed = ast.literal_eval(str(found.value).partition("fill=")[2])
    with opened(path, tmp_path, fill=proposed) as file:
        assert values(file["a"]) == [column[0], proposed["a"]]


def test_times_of_differing_units_are_refused(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    for unit in ("us", "ms"):
        table = pa.table({"time": pa.array(np.arange(3), pa.timestamp(unit))})
        pq.write_table(table, tmp_path / f"{unit}.parquet")
    files, out = [tmp_path / "us.parquet", tmp_path / "ms.parquet"], tmp_path / "out.h5"
    with pytest.raises(DatasetError, match='column "time" has the units "milliseconds since'):
        h5async.pack(files, out)
    h5async.pack(files[0], out, overwrite=True)
    with pytest.raises(DatasetError, match='"microseconds since 1970-01-01" before'):
        h5async.pack(files[1], out, append=True)


def test_nulls_need_a_value(tmp_path):
    pa.feather = pytest.importorskip("pyarrow.feather")
    pa.feather.write_feather(pa.table({"x": [1, None, 3]}), tmp_path / "in.feather")
    with pytest.raises(DatasetError, match=r'has 1 nulls.*fill=\{"x": 0\}'):
        h5async.pack(tmp_path / "in.feather", tmp_path / "out.h5")
    typed = ["pack", tmp_path / "in.feather", "-o", tmp_path / "out.h5", "--fill", "x=-5"]
    found = CliRunner().invoke(cli.app, list(map(str, [*typed, "--resume"])))
    assert found.exit_code == 0, found.output
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["x"][:].tolist() == [1, -5, 3]


# --- others --------------------------------------------------------------------------------------


def test_datasets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"image": [{"bytes": one, "path": None} for one in PNGS], "label": [0, 1, 1] * 3}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(tmp_path / "saved", num_proc=None)
    for source in (dataset, tmp_path / "saved", dataset.select([*range(9)])):
        with opened(source, tmp_path) as file:
            assert [one.tobytes() for one in file["image"][:]] == PNGS
            assert file["label"][:].tolist() == [0, 1, 1] * 3
            assert file["label"].attrs["classes"].tolist() == ["cat", "dog"]
            assert values(file["classes"]) == ["cat", "dog"]
    with pytest.raises(ConfigError, match="splits, train"):
        h5async.pack(datasets.DatasetDict(train=dataset), tmp_path / "x.h5")


def test_episodes(tmp_path):
    import pyarrow.parquet

    folder, lengths = tmp_path / "robot", [5, 1, 9]
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps({"features": {}}))
    (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "lift"}\n')
    first = 0
    for episode, length in enumerate(lengths):
        rows = range(first, first + length)
        table = pa.table(
            {
                "observation.state": pa.array([[n, n] for n in rows], pa.list_(pa.float32(), 2)),
                "action": pa.array([[float(n)] for n in rows], pa.list_(pa.float32(), 1)),
                "episode_index": pa.array([episode] * length),
            }
        )
        path = folder / f"data/chunk-000/episode_{episode:06}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, path)
        first += length
    video = write(folder / "videos", {"chunk-000/camera": {"episode_000000.mp4": b""}})
    with opened(folder, tmp_path) as file:
        assert file["episode_ends"][:].tolist() == [5, 6, 15]
        assert values(file["tasks"]) == ["lift"]
        np.testing.assert_array_equal(file["action"][:, 0], np.arange(15))
    fields = {"action": Field("action", steps=range(2), pad="edge")}
    ends = Sequences(ends="episode_ends")
    with AsyncReader(hdf5_path=tmp_path / "out.h5", fields=fields, sequences=ends) as reader:
        found = reader.get_next_batch().action[..., 0]
        assert found[[4, 5, 6]].tolist() == [[4, 4], [5, 5], [6, 7]]
    typed = ["pack", str(folder), "-o", str(tmp_path / "x.h5")]
    assert f"not packed: 1 video in {video}" in CliRunner().invoke(cli.app, typed).stderr


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_audio(tmp_path, form):
    sounds = {}
    for n in range(3):
        into = io.BytesIO()
        soundfile.write(into, np.linspace(-0.5, 0.5, 100 + n), 8000, format=form)
        sounds[f"{n}.{form.lower()}"] = into.getvalue()
    folder = write(tmp_path / "in", {"yes": sounds, "no": sounds})
    with opened(folder, tmp_path) as file:
        assert [one.tobytes() for one in file["data"][:]] == [*sounds.values()] * 2
    with AsyncReader(hdf5_path=tmp_path / "out.h5") as reader:
        data, labels = reader.get_next_batch()
        assert [len(one) for one in data] == [100, 101, 102] * 2
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    (folder / "yes" / "bad.wav").write_bytes(b"RIFF")
    with pytest.raises(ReadError, match=r"bad\.wav cannot be packed: libsndfile"):
        h5async.pack(folder, tmp_path / "bad.h5")


def test_what_is_no_source_is_refused(tmp_path):
    for source, error in (
        (tmp_path / "missing", ReadError),
        (tmp_path, ConfigError),
        (3, ConfigError),
        ([tmp_path, tmp_path], ConfigError),
        ([], DatasetError),
    ):
        with pytest.raises(error):
            h5async.pack(source, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()
