"""Messages name options as they are written where the user wrote them."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async import AsyncReader, ConfigError, H5AsyncError, ReaderConfig, ReadError
from h5async.cli import app
from h5async.spelling import as_keyword, in_file, named, spelled


def refuse(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert result.exit_code == 1, result.output
    return result.stderr


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((100, 4), "f4")
        file["labels"] = np.arange(100)
        file["cut [here]"] = np.zeros(100)
        sources = h5py.VirtualLayout((6,), np.int64)
        sources[...] = h5py.VirtualSource("gone.h5", "data", (6,))
        file.create_virtual_dataset("missing", sources, fillvalue=7)
        elsewhere = tmp_path / "else where"
        elsewhere.mkdir()
        (elsewhere / "values.bin").write_bytes(bytes(20))
        external = [(elsewhere / "values.bin", 0, 20)]
        file.create_dataset("external", (5,), np.int32, external=external)
    return path


def test_each_place_has_its_spelling():
    text = f"give {named('allow_missing', True)} or {named('cache', 'host')}, not {named('io')}"
    assert spelled(text, as_keyword) == 'give allow_missing=True or cache="host", not io'
    assert spelled(text, in_file("toml")) == 'give allow_missing = true or cache = "host", not io'
    assert spelled(text, in_file("json")) == 'give "allow_missing": true or "cache": "host", not io'
    assert spelled(text, in_file("yaml")) == 'give allow_missing: true or cache: "host", not io'


def test_errors_are_read_as_python_and_keep_what_they_name():
    error = ReadError(f"bring it back: {named('allow_missing', True)}")
    assert str(error) == "bring it back: allow_missing=True"
    assert error.args == ("bring it back: allow_missing=True",)
    assert "\ufdd0" not in repr(error)
    copy = pickle.loads(pickle.dumps(error))
    assert copy.spelled(lambda name, value: f"--{name}") == "bring it back: --allow_missing"
    wrapped = H5AsyncError(f"wrapped: {copy.marked}")
    assert str(wrapped) == "wrapped: bring it back: allow_missing=True"
    assert wrapped.spelled(lambda name, value: "X") == "wrapped: bring it back: X"
    assert str(H5AsyncError("a", "b")) == "('a', 'b')"


SHELL = {
    "--data-field missing --no-labels": "read missing sources as the fill value: --allow-missing\n",
    "--batch-size 0": "--batch-size: must be greater than or equal to 1, found 0\n",
    "--h-dim 1": "give --h-dim and --w-dim together, and --cha-dim only with them\n",
    "--rank 1": "give --rank and --world-size together",
    "--rank 2 --world-size 2": "--rank must be below --world-size 2, found 2\n",
    "--cache-bytes 5": "--cache-bytes needs --cache host, --cache device or --cache disk\n",
    "--field data=data --labels-field x": "give --field or --labels-field, not both",
    "--pin-memory --device cuda": "--pin-memory leaves batches on the host, found --device cuda",
    "--max-batch-bytes 10": "make --batch-size or --prefetch smaller, or set --max-batch-bytes",
    "--drop-last --batch-size 200": "100 samples, --batch-size 200, --drop-last; make --batch-size"
    " smaller, or use --no-drop-last\n",
    "--device tpu": "--device: must be",
    "--window-bytes lots": "--window-bytes: must be a number of bytes, or a size such as 512MiB",
    "--allow-external ''": "--allow-external",
}


@pytest.mark.parametrize("typed", SHELL)
def test_the_command_line_spells_what_can_be_typed(train, typed):
    words = [word.strip("'") for word in typed.split()]
    message = refuse("read", train, *words)
    assert SHELL[typed] in message


def test_a_folder_to_be_allowed_is_quoted_for_the_shell(train):
    folder = train.parent / "else where"
    message = refuse("read", train, "--data-field", "external", "--no-labels")
    assert message.endswith(f"allow it: --allow-external '{folder}'\n")
    listed = CliRunner().invoke(app, ["inspect", str(train)], env={"COLUMNS": "9999"}).stdout
    assert f"--allow-external '{folder}'" in listed
    assert "--allow-missing" in listed
    assert "allow_" not in listed


def test_python_reads_keywords(train):
    with pytest.raises(H5AsyncError, match=r"fill value: allow_missing=True$"):
        AsyncReader(hdf5_path=train, data_field="missing", labels_field=None)
    with pytest.raises(
        ConfigError, match=r'^cache_bytes needs cache="host", cache="device" or cache="disk"$'
    ):
        ReaderConfig(hdf5_path=train, cache_bytes=5)


FILES = {"a.toml": "batch_size = 0\n", "a.json": '{"batch_size": 0}', "a.yaml": "batch_size: 0\n"}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_of_options_says_is_spelled_as_in_the_file(train, name):
    path = train.parent / name
    path.write_text(FILES[name])
    assert "error: batch_size: must be greater" in refuse("read", train, "--config", path)
    typed = refuse("read", train, "--config", path, "--batch-size", 4, "--prefetch", 0)
    assert "error: --prefetch: must be greater" in typed


def test_names_of_files_that_look_like_options_are_left_alone(tmp_path):
    path = tmp_path / "batch_size=4" / "allow_missing=True.h5"
    assert refuse("read", path) == f"error: cannot open {path}: there is no such file\n"


SELECTING = {
    "--indices nowhere": "--indices: ",
    "--indices 200:100:0": "--indices",
    "--weights balanced --no-labels": "--weights balanced needs labels",
    "--weights data": "--weights: ",
    "--indices missing": "read missing sources as the fill value: --allow-missing\n",
}


@pytest.mark.parametrize("typed", SELECTING)
def test_what_selects_samples_is_spelled_too(train, typed):
    assert SELECTING[typed] in refuse("read", train, *typed.split())


def test_pack_spells_options_that_exclude_each_other(train):
    message = refuse("pack", train, "--append", "--shards", "1MB", "-o", f"{train}.new.h5")
    assert message.endswith("--append adds to one file; leave out --shards\n")
