"""`h5async advise`: measures layouts of a dataset, and names the command that makes the best."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async.cli import app

QUICK = ["--seconds", "0", "--rounds", "1"]


def advise(*arguments):
    return CliRunner().invoke(app, ["advise", *map(str, arguments), *QUICK])


@pytest.fixture
def train(tmp_path):
    """300 rows of 10 kB, 150 to a chunk."""
    path = tmp_path / "a train.h5"
    values = np.repeat(np.random.default_rng(0).integers(0, 9, (300, 100), "u1"), 100, axis=1)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(150, 10_000), compression="gzip")
        file["labels"] = np.arange(300)
        file["other"] = np.zeros((10, 4))
    return path


@pytest.mark.parametrize("more", [[], ["--shuffle", "window", "--batch-size", "7"]])
def test_the_command_makes_the_best(train, more):
    result = advise(train, *more, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["dataset"], found["samples"], found["row_nbytes"]) == ("data", 300, 10_000)
    assert found["order"] == ("window" if more else "shuffled")
    now, *others = found["layouts"]
    assert (now["chunk_samples"], now["filter"]) == (150, "gzip:4")
    with h5py.File(train) as file:
        assert now["stored_nbytes"] == file["data"].id.get_storage_size()
    assert {one["filter"] for one in others} >= {"none", "lzf", "gzip:4"}
    for one in found["layouts"]:
        assert all(speed > 0 for speed in one["samples_per_second"].values())
        assert all(speed > 0 for speed in one["cold_samples_per_second"].values())
        assert one["requests"]["full"]["count"] > 0
    [best] = [one for one in found["layouts"] if one["is_best"]]
    if found["command"] is None:
        assert best is now
        return
    words = shlex.split(found["command"])
    made = CliRunner().invoke(app, words[1:])
    assert made.exit_code == 0, made.output
    with h5py.File(words[words.index("-o") + 1]) as file, h5py.File(train) as before:
        assert file["data"].chunks[0] == best["chunk_samples"]
        assert file["data"].id.get_storage_size() == pytest.approx(best["stored_nbytes"], rel=0.05)
        assert np.array_equal(file["data"], before["data"])


def test_several_files_are_one_dataset(train, tmp_path, monkeypatch):
    # Measured, the layout of the two might be the best one, for which there is no command.
    speed = "h5async.cli.advise.samples_per_second"
    monkeypatch.setattr(speed, lambda config, *_: 1.0 if len(config.files) == 2 else 1000.0)
    other = tmp_path / "b train.h5"
    with h5py.File(other, "w") as file:
        values = np.zeros((100, 10_000), "u1")
        file.create_dataset("data", data=values, chunks=(100, 10_000), compression="gzip")
    found = json.loads(advise(tmp_path / "*train.h5", "--json").stdout)
    assert found["files"] == [str(train), str(other)]
    assert found["samples"] == 400
    with h5py.File(train) as file, h5py.File(other) as second:
        nbytes = [one["data"].id.get_storage_size() for one in (file, second)]
    assert found["layouts"][0]["stored_nbytes"] == sum(nbytes)
    words = shlex.split(found["command"])
    assert words[:5] == ["h5async", "repack", str(train), str(other), "-o"]


def test_table(train, tmp_path):
    pytest.importorskip("matplotlib")
    result = advise(train, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    head, measured, _, _, columns, *rows = result.stdout.splitlines()
    assert head.endswith("a train.h5: data, uint8 (300, 10000), 10.0 kB a sample")
    assert measured == "measured on 3.0 MB of it; samples a second:"
    assert columns.split()[:3] == ["samples", "a", "chunk"]
    assert rows[0].split()[:3] == ["150", "(now)", "gzip:4"] or "(best)" in rows[0]
    assert rows[-1].startswith("  h5async repack") or rows[-1] == "best (shuffled): as it is"
    assert "samples a second" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").exists()


def test_the_largest_of_the_fields_or_of_the_file(train, tmp_path):
    found = json.loads(advise(train, "--data-field", "other", "--no-labels", "--json").stdout)
    assert found["dataset"] == "other"
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["small"], file["deep/large"] = np.zeros((9, 2)), np.zeros((9, 200))
    assert json.loads(advise(tmp_path / "b.h5", "--json").stdout)["dataset"] == "deep/large"
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["one"], file["labels"] = 5.0, np.arange(9)
    for name, words in (("one", "one: is a scalar"), ("two", 'there is no dataset "two"')):
        result = advise(tmp_path / "b.h5", "--data-field", name)
        assert result.exit_code == 1
        assert words in result.stderr


def test_what_is_not_advised_on(tmp_path):
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (2, 5)})
        group["data"], group["indices"] = np.ones(3), np.array([0, 3, 4])
        group["indptr"] = np.array([0, 2, 3])
        file["texts"] = np.array(["a", "bc"], object)
    result = advise(path)
    assert result.exit_code == 1
    assert "no dataset of equal rows to advise on" in result.stderr
    assert "X/data: sparse rows" in result.stderr
    assert "texts: ragged rows" in result.stderr
    result = advise(path, "--num-dim", "1")
    assert result.exit_code == 1
    assert "only datasets whose first dimension counts the samples" in result.stderr


def test_sigterm_leaves_no_samples(train, tmp_path, monkeypatch):
    folder = tmp_path / "samples"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    killing = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr("h5async.cli.advise.samples_per_second", killing)
    assert advise(train).exit_code == 128 + signal.SIGTERM
    assert not list(folder.iterdir())


def test_inspect_points_to_it(train):
    result = CliRunner().invoke(app, ["inspect", str(train)])
    assert f"h5async advise {shlex.quote(str(train))} measures" not in result.stderr, "3 kB a chunk"
    with h5py.File(train, "w") as file:
        noise = np.random.default_rng(0).integers(0, 256, (64, 10_000), "u1")
        file.create_dataset("data", data=noise, chunks=(64, 10_000), compression="gzip")
    result = CliRunner().invoke(app, ["inspect", str(train)])
    assert f"of data above all: h5async advise {shlex.quote(str(train))}" in result.stderr
