"""`h5async read`: what limits the reader, and what it tells where it is interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from h5async.cli import app
from h5async.cli import read as command

TIMEOUT_SECONDS = 120
SENDS = """\
import os, signal, threading
batches = 0
def f(data, labels):
    global batches
    batches += 1
    if batches == 25:  # of which the loop has had all but those on their way
        os.kill(os.getpid(), signal.{})
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """100 samples, compressed in chunks of 50."""
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).integers(0, 9, (100, 4000)).astype("f4")
        file.create_dataset("data", data=values, chunks=(50, 4000), compression="gzip")
        file["labels"] = np.arange(100)
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "h5async", "read", "train.h5", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("num_threads", ["0", "2"])
def test_interrupted_it_tells_what_was_read(
    train: Path, name: str, code: int, num_threads: str
) -> None:
    (train.parent / "mine.py").write_text(SENDS.format(name))
    options = ["--epochs", "1000000", "--postprocess", "mine:f", "--num-threads", num_threads]
    result = run(train.parent, "--batch-size", "10", *options)
    assert (result.returncode, result.stderr) == (code, "")
    found = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert found["epochs"] == "2 of 1,000,000: interrupted"
    assert 20 <= int(found["batches"]) <= 25
    assert int(found["samples"]) == 10 * int(found["batches"])
    assert set(found) >= {"speed", "limit"}


@pytest.mark.slow
def test_interrupted_it_gives_the_same_as_json(train: Path) -> None:
    (train.parent / "mine.py").write_text(SENDS.format("SIGINT"))
    options = ["--epochs", "1000000", "--postprocess", "mine:f", "--batch-size", "10", "--json"]
    result = run(train.parent, *options)
    assert (result.returncode, result.stderr) == (130, "")
    found = json.loads(result.stdout)
    assert (found["interrupted"], found["epochs"]) == (True, 2)
    assert found["batches"] == found["stats"]["batches"]
    assert found["samples"] == found["stats"]["samples"] == 10 * found["batches"]


def test_a_whole_run_is_not_interrupted(train: Path) -> None:
    result = CliRunner().invoke(app, ["read", str(train), "--epochs", "2", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["interrupted"], found["epochs"]) == (0, False, 2)
    assert found["stats"]["sentence"]
    assert "data-bound" not in found["sentence"]
    assert found["sentence"].startswith(f"{found['samples'] / found['seconds']:,.0f} samples/s, ")


@pytest.mark.parametrize("as_json", [False, True])
def test_its_own_empty_loop_is_not_blamed(
    train: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # (Chunks are decoded anew for each batch, as they are of large datasets.)
    monkeypatch.setattr(
        "h5async.reader.readersetup.wanted_kept_nbytes",
        lambda config, layouts, *_: (0,) * len(layouts),
    )
    values = np.random.default_rng(0).integers(0, 9, (600, 4000)).astype("f4")
    with h5py.File(train, "a") as file:
        del file["data"]
        file.create_dataset("data", data=values, chunks=(50, 4000), compression="gzip")
    arguments = ["--shuffle", "full", "--batch-size", "1", "--num-threads", "0"]
    arguments += ["--data-field", "data", "--no-labels"]
    result = CliRunner().invoke(app, ["read", str(train), *arguments, *["--json"] * as_json])
    assert result.exit_code == 0
    if as_json:
        limit = json.loads(result.stdout)["sentence"].partition("the limit is ")[2]
    else:
        limit = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())["limit"]
    assert limit.startswith("deflate decoding, ")
    assert " samples are decoded for each that is used: --shuffle window, " in limit, limit
    remedies = "--cache host from the second epoch on, or repack with one sample a chunk"
    assert remedies in limit, "as it is typed"
    assert "data-bound" not in limit


def test_somebody_elses_handler_of_sigterm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    def theirs(*_: Any) -> None:
        """Do what a program does that runs commands."""

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with command.stopping_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
