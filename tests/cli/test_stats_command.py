"""`h5async stats`."""

from __future__ import annotations

import json

import h5py
import numpy as np
from typer.testing import CliRunner

import h5async
from h5async import cli


def run(*arguments):
    return CliRunner().invoke(cli.app, ["stats", *map(str, arguments)])


def test_it_saves_what_a_field_takes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.arange(60.0).reshape(10, 6), np.arange(10) % 3
    saved = tmp_path / "s.json"
    options = ("--field", "a=x", "--field", "b=y", "--quantile", "0.5", "-o", saved)
    shown = run(tmp_path / "a.h5", *options)
    assert shown.exit_code == 0, shown.output
    assert "a: x, float64, 60 values, for each of 6 indices of dimension 1 (" in shown.output
    assert "27 28 29 30 and 2 more" in shown.output
    assert "0: 4, 1: 3, 2: 3" in shown.output
    found = h5async.Statistics.load(saved)
    np.testing.assert_array_equal(found["a"].mean, np.arange(27, 33))
    printed = json.loads(run(tmp_path / "a.h5", *options, "--json").output)
    assert printed.pop("schema") == "h5async stats 1"
    assert printed["fields"]["b"]["frequencies"] == {"0": 4, "1": 3, "2": 3}


def test_what_it_cannot_do_it_refuses(tmp_path):
    assert "--per must be channel" in run("sample_data/digits.h5", "--per", "row").output
    refused = run("sample_data/digits.h5", "-o", tmp_path / "no" / "s.json")
    assert refused.exit_code == 1
    assert "cannot write" in refused.output
