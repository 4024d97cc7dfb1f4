"""The keys of JSON documents are those that docs/command-line.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async.cli import app
from h5async.cli.output import plain

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def documented(command: str) -> dict[str, set[str]]:
    """Return the keys that the page lists: where they are, and which."""
    section = PAGE.read_text().split(f"\n## {command}\n")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {"": set()}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        first, *others = re.findall(r"`([\w.\[\]]+)`", line.split("|")[1])
        where, _, name = first.rpartition("[].")
        found.setdefault(where, set()).update([name, *others])
    return found


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((100, 4), "f4")
        file["labels"] = np.arange(100)
        file["scalar"] = 1
    return path


COMMANDS = {
    "inspect": [],
    "read": ["--epochs", "2"],
    "bench": ["--seconds", "0", "--rounds", "3"],
    "advise": ["--seconds", "0", "--rounds", "1"],
    "index": ["-o", "{}.h5idx"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_are_those_of_the_page(train, command):
    options = [option.format(train) for option in COMMANDS[command]]
    result = CliRunner().invoke(app, [command, str(train), *options, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["schema"] == f"h5async {command} 1"
    assert f'`"{found["schema"]}"`' in PAGE.read_text()
    for where, names in documented(command).items():
        assert names == set(found) if not where else True
        for one in found[where] if where else []:
            assert names == set(one)


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_are_on_stderr(train, command):
    options = [option.format(train) for option in COMMANDS[command]]
    result = CliRunner().invoke(app, [command, f"{train}.gone", *options, "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no such file" in result.stderr


def test_the_cache_folder_as_json(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = json.loads(CliRunner().invoke(app, ["index", "--clear", "--json"]).stdout)
    assert found["index"] is None
    assert found["cleared"]["entries"] == 0


def test_what_json_does_not_have():
    value = {"a": float("nan"), "b": [float("inf"), Path("x")], "c": "\udcff", "d": (1, None)}
    assert plain(value) == {"a": None, "b": [None, "x"], "c": "\\xff", "d": [1, None]}


@pytest.mark.parametrize("command", ["read", "bench"])
def test_h_is_help(command):
    short = CliRunner().invoke(app, [command, "-h"])
    assert short.exit_code == 0
    assert short.stdout == CliRunner().invoke(app, [command, "--help"]).stdout


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("h5async ins", "inspect"),
        ("h5async read x.h5 --shuffle w", "window"),
        ("h5async read --allow-m", "--allow-missing"),
        ("h5async read x.h5 --index-cache n", "none"),
    ],
)
def test_a_shell_completes(typed, expected):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    result = CliRunner().invoke(
        app, [], env={"_H5ASYNC_COMPLETE": "complete_bash", **words}, prog_name="h5async"
    )
    assert expected in result.stdout.split()
