"""Files of options, sizes in bytes, and paths with ``~`` and variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async import AsyncReader, ConfigError, ReaderConfig
from h5async.cli import app

OPTIONS = {
    "hdf5_path": ["a.h5", "b.h5"],
    "labels_field": "y",
    "batch_size": 7,
    "drop_last": True,
    "shuffle": "window",
    "window_bytes": "1 GiB",
    "indices": {"name": "train", "parts": {"train": 0.5}},
    "index_cache": False,
}
TOML = """
hdf5_path = ["a.h5", "b.h5"]
labels_field = "y"
batch_size = 7
drop_last = true
shuffle = "window"
window_bytes = "1 GiB"
index_cache = false
indices = {name = "train", parts = {train = 0.5}}
"""
YAML = """
hdf5_path: [a.h5, b.h5]
labels_field: y   # (no bool, though older YAML has it so)
batch_size: 7
drop_last: true
shuffle: window
window_bytes: 1 GiB
index_cache: false
indices: {name: train, parts: {train: 0.5}}
"""
TEXTS = {"o.toml": TOML, "o.json": json.dumps(OPTIONS), "o.yaml": YAML, "o.YML": YAML, "o": TOML}


@pytest.mark.parametrize("name", TEXTS)
def test_all_formats_give_the_same_options(tmp_path, name):
    path = tmp_path / name
    path.write_text(TEXTS[name])
    paths = [tmp_path / name for name in OPTIONS["hdf5_path"]]
    assert ReaderConfig.load(path) == ReaderConfig(**{**OPTIONS, "hdf5_path": paths})
    assert ReaderConfig.load(str(path), batch_size=3).batch_size == 3


def test_null_is_none(tmp_path):
    for name, text in {"a.json": '{"labels_field": null}', "a.yml": "labels_field:\n"}.items():
        (tmp_path / name).write_text(text)
        assert ReaderConfig.load(tmp_path / name, hdf5_path="a.h5").labels_field is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "batch_size = [", "is not a TOML file: "),
        ("a.json", '{"batch_size": 3,}', "is not a JSON file: "),
        ("a.json", '{"seed": 3, "seed": 4}', "is not a JSON file: 'seed' appears twice"),
        ("a.json", "[1]", "must map the names of options"),
        ("a.yaml", "batch_size: [", "is not a YAML file: "),
        ("a.yaml", "- 3", "must map the names of options"),
        ("a.json", '{"batchsize": 3}', "did you mean 'batch_size'"),
        ("a.yaml", "subset: 3", "indices: "),
        ("a.json", '{"subset": 3}', '"indices": "1000:"'),
        ("a.h5", "\x89HDF", "to read an HDF5 file, give it as hdf5_path"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        ReaderConfig.load(tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("batch_size: 3\n")
    with pytest.raises(ConfigError, match=r"needs PyYAML; install it with: pip install 'h5async"):
        ReaderConfig.load(tmp_path / "a.yaml")


def test_what_was_dumped_is_a_file_of_options(tmp_path):
    config = ReaderConfig(hdf5_path=tmp_path / "a.h5", window_bytes="3kB", labels_field=None)
    (tmp_path / "a.json").write_text(config.model_dump_json())
    assert ReaderConfig.load(tmp_path / "a.json") == config


# --- sizes ---------------------------------------------------------------------------------------

SIZES = {
    "1": 1,
    "1_000": 1000,
    "1GB": 10**9,
    "1 gb": 10**9,
    "512MiB": 512 << 20,
    "512 mib": 512 << 20,
    "1.5GB": 1_500_000_000,
    "0.1 GiB": (1 << 30) // 10,
    "3kB": 3000,
    "7B": 7,
    "2TiB": 2 << 40,
}


@pytest.mark.parametrize("option", ["window_bytes", "max_batch_bytes", "cache_bytes"])
@pytest.mark.parametrize("text", SIZES)
def test_sizes(option, text):
    config = ReaderConfig(hdf5_path="a.h5", cache="host", **{option: text})
    assert getattr(config, option) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["GB", "-1GB", "1GBit", "1,5GB", "0x10", "1e9", "lots", "0.1B", "2M"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"^window_bytes: must be .*found "):
        ReaderConfig(hdf5_path="a.h5", window_bytes=text)


def test_numbers_of_bytes_are_as_before():
    assert ReaderConfig(hdf5_path="a.h5", window_bytes=np.int64(5)).window_bytes == 5
    for value in (0, -1, 1.5, True, None, [3]):
        with pytest.raises(ConfigError, match=r"^window_bytes: "):
            ReaderConfig(hdf5_path="a.h5", window_bytes=value)


# --- paths ---------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("DATA", str(folder / "sub"))
    monkeypatch.delenv("NO_SUCH", raising=False)
    for path in (folder / "a.h5", folder / "sub" / "b.h5"):
        with h5py.File(path, "w") as file:
            file["data"] = np.zeros((4, 2))
            file["labels"] = np.arange(4)
    return folder


def test_home_in_all_paths_of_a_python_caller(home):
    config = ReaderConfig(
        hdf5_path=["~/a.h5", Path("~/sub/*.h5")], allow_external="~", index_cache="~/c.h5idx"
    )
    assert config.files == [home / "a.h5", home / "sub" / "b.h5"]
    assert config.allow_external == (home,)
    assert config.index_cache == home / "c.h5idx"
    with AsyncReader(hdf5_path="~/a.h5", device="cpu", num_threads=0) as reader:
        assert len(reader.get_next_batch()) == 2
    (home / "o.toml").write_text('hdf5_path = "a.h5"\n')
    assert ReaderConfig.load("~/o.toml").files == [home / "a.h5"]


def test_variables_are_not_looked_for_in_what_python_gives(home):
    assert ReaderConfig(hdf5_path="$DATA/b.h5").hdf5_path == Path("$DATA/b.h5")


@pytest.mark.parametrize("typed", ["$DATA/b.h5", "${DATA}/b.h5", "~/sub/b.h5"])
def test_variables_in_files_and_on_the_command_line(home, typed):
    path = home / "o.toml"
    path.write_text(f'hdf5_path = ["{typed}", "a.h5"]\nallow_external = ["$DATA"]\n')
    config = ReaderConfig.load(path)
    assert config.files == [home / "sub" / "b.h5", home / "a.h5"]
    assert config.allow_external == (home / "sub",)
    for command in ("inspect", "read"):
        result = CliRunner().invoke(app, [command, typed])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["index", typed, "-o", typed.replace("b.h5", "x.h5idx")])
    assert result.exit_code == 0, result.output
    assert (home / "sub" / "x.h5idx").exists()


def test_a_variable_that_is_not_set(home):
    (home / "o.json").write_text('{"hdf5_path": "$NO_SUCH/b.h5"}')
    with pytest.raises(ConfigError, match="there is no environment variable NO_SUCH"):
        ReaderConfig.load(home / "o.json")
    result = CliRunner().invoke(app, ["read", "$NO_SUCH/b.h5"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no environment variable NO_SUCH" in result.stderr


def test_a_file_that_has_a_dollar_in_its_name(home):
    (home / "a.h5").rename(home / "$DATA.h5")
    (home / "o.toml").write_text(f'hdf5_path = "{home}/$DATA.h5"\n')
    assert ReaderConfig.load(home / "o.toml").files == [home / "$DATA.h5"]
