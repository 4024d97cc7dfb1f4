"""`h5async index` makes an index that readers and other commands take in place of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from h5async import AsyncReader, Field, Sequences
from h5async.cli import app
from h5async.index import indexcache
from h5async.opening import filefacts


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*arguments: object, exit_code: int = 1) -> str:
    result = run(*arguments)
    assert result.exit_code == exit_code, result.output
    assert isinstance(result.exception, SystemExit)
    return result.stderr


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Make three files with datasets in groups, of all kinds."""
    paths = [tmp_path / f"part-{i}.h5" for i in range(3)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            rows = np.arange(60, dtype="f4").reshape(20, 3) + 100 * number
            file.create_dataset("data", data=rows, chunks=(5, 3), compression="gzip")
            file["labels"] = np.arange(20) + 20 * number
            file["more/table"] = np.zeros(20, [("x", "f4"), ("y", "i8")])
            file["more/scalar"] = 3
            file["more/names"] = ["of", "variable", "length"]
            file["more/link"] = h5py.SoftLink("/data")
    return paths


def indexed_never(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to(path: Path, *_: object, **__: object) -> None:
        raise AssertionError(f"{path} was indexed")

    monkeypatch.setattr(filefacts, "read_layouts", refuse_to)


def test_all_datasets_that_can_be_read_are_in_the_index(files, tmp_path, monkeypatch):
    index = tmp_path / "train.h5idx"
    told = succeed("index", *files, "-o", index)
    assert "3 files, 15 datasets" in told
    assert os.stat(index).st_mode & 0o077 == 0o044
    expected = [
        np.concatenate([h5py.File(path)[n][...] for path in files]) for n in ("data", "labels")
    ]
    indexed_never(monkeypatch)
    with AsyncReader(hdf5_path=index, device="cpu", num_threads=0) as reader:
        batches = [tuple(map(np.array, batch)) for batch in reader]
    for number in range(2):
        assert np.array_equal(
            np.concatenate([batch[number] for batch in batches]), expected[number]
        )
    fields = {"linked": "more/link", "table": "/more//table"}
    with AsyncReader(hdf5_path=index, fields=fields, device="cpu", num_threads=0) as reader:
        assert reader.num_samples == 60
        assert reader.get_next_batch()["linked"].shape == (32, 3)


def test_only_the_fields_that_were_named(files, tmp_path, monkeypatch):
    index = tmp_path / "train.h5idx"
    options = ["--field", "a=data", "--field", "x=more/table/x"]
    assert "1 files, 2 datasets" in succeed("index", files[0], "-o", index, *options)
    indexed_never(monkeypatch)
    fields = {"x": "more/table/x", "y": "data"}
    with AsyncReader(hdf5_path=index, fields=fields, device="cpu", num_threads=0) as reader:
        assert reader.num_samples == 20


def test_another_dimension_that_counts_the_samples(files, tmp_path, monkeypatch):
    index = tmp_path / "train.h5idx"
    succeed("index", files[0], "-o", index, "--num-dim", 1)
    indexed_never(monkeypatch)
    options = {"num_dim": 1, "labels_field": None, "device": "cpu", "num_threads": 0}
    with AsyncReader(hdf5_path=index, **options) as reader:
        assert reader.num_samples == 3


def test_globs_are_sorted_and_a_new_index_takes_the_place_of_an_old_one(files, tmp_path):
    index = tmp_path / "train.h5idx"
    index.write_text("something old")
    assert "3 files" in succeed("index", tmp_path / "part-*.h5", "-o", index)
    with AsyncReader(hdf5_path=index, device="cpu", num_threads=0) as reader:
        labels = np.concatenate([np.array(batch[1]) for batch in reader])
    assert np.array_equal(labels, np.arange(60))
    assert sorted(os.listdir(tmp_path)) == [*(path.name for path in files), "train.h5idx"]


def test_other_commands_take_the_index(files, tmp_path):
    index = tmp_path / "train.h5idx"
    succeed("index", *files, "-o", index)
    listed = succeed("inspect", index)
    by_files = "".join(succeed("inspect", path) for path in files)
    assert f"{files[2]}: more/table" in listed
    for line in by_files.splitlines():
        words = line.split()
        if words and words[0] in ("data", "labels", "more/table"):
            assert any(words[1:] == other.split()[2:] for other in listed.splitlines()), line
    assert "60" in succeed("read", index, "--num-threads", 0)
    single = tmp_path / "one.h5idx"
    succeed("index", files[0], "-o", single)
    assert "\ndata " in succeed("inspect", single)


def test_what_cannot_be_indexed(files, tmp_path):
    index = tmp_path / "train.h5idx"
    assert "missing.h5" in refuse("index", files[0], tmp_path / "missing.h5", "-o", index)
    assert "nothing" in refuse("index", files[0], "-o", index, "--field", "a=nothing")
    assert ".h5idx" in refuse("index", files[0], "-o", tmp_path / "train.idx")
    assert "nowhere" in refuse("index", files[0], "-o", tmp_path / "nowhere" / "a.h5idx")
    assert not index.exists()
    refuse("index", files[0], exit_code=2)
    refuse("index", "-o", index, exit_code=2)
    refuse("index", files[0], "-o", index, "--field", "a", exit_code=2)


def test_a_damaged_index_is_named_by_all_commands(files, tmp_path):
    index = tmp_path / "train.h5idx"
    succeed("index", *files, "-o", index)
    index.write_bytes(index.read_bytes()[:-1])
    for command in ("inspect", "read"):
        message = refuse(command, index)
        assert message.startswith("error: ")
        assert "train.h5idx" in message
        assert "h5async index" in message


def test_the_cache_folder_is_cleared(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 0.0)
    assert "removed 0 entries" in succeed("index", "--clear")
    for path in files:
        AsyncReader(hdf5_path=path, device="cpu", num_threads=0).close()
    folder = tmp_path / "home" / "h5async" / "index"
    (folder / "notes.txt").write_text("not ours")
    refuse("index", "--clear", files[0], exit_code=2)  # before anything is removed
    refuse("index", "--clear", files[0], "-o", tmp_path / "train.txt")
    assert "removed 3 entries" in succeed("index", "--clear")
    assert os.listdir(folder) == ["notes.txt"]


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from h5async.cli import app
app(["index", *sys.argv[3:], "-o", sys.argv[1]])
"""


@pytest.mark.slow
def test_an_index_that_does_not_fit_on_the_disk_leaves_the_old_one(files, tmp_path):
    """A limit on the size of files makes real writes fail, in the middle of the index."""
    index = tmp_path / "train.h5idx"
    succeed("index", files[0], "-o", index)
    before = index.read_bytes()
    for limit in (0, 20, 1000, len(before)):
        command = [sys.executable, "-c", FULL, str(index), str(limit), *map(str, files)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 1
        assert "cannot write" in result.stderr
        assert index.read_bytes() == before
        assert sorted(os.listdir(tmp_path)) == [*(path.name for path in files), "train.h5idx"]


def test_a_file_without_datasets_has_an_index_without_any(tmp_path):
    path, index = tmp_path / "empty.h5", tmp_path / "empty.h5idx"
    with h5py.File(path, "w") as file:
        file["scalar"] = 1
    assert "1 files, 0 datasets" in succeed("index", path, "-o", index)
    assert "holds no datasets" in succeed("inspect", index)
    assert 'no dataset "data"' in refuse("read", index, "--no-labels")


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """Make a file of groups, of which one lacks a dataset, and one is linked to."""
    path = tmp_path / "demos.h5"
    with h5py.File(path, "w") as file:
        for n, length in enumerate((4, 7, 3)):
            rows = np.arange(length * 2.0).reshape(length, 2) + 100 * n
            group = file.create_group(f"store/{n}" if n == 1 else f"data/demo_{n}")
            group.create_dataset("obs/position", data=rows, chunks=(2, 2), compression="gzip")
            group["actions"] = np.arange(length) + 100 * n
            if n:
                group["rewards"] = np.zeros(length)
        file["data/demo_1"] = h5py.SoftLink("/store/1")
        file["mask/train"] = np.array(["demo_2", "demo_1"], "S8")
    return path


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("only", [None, "mask/train"])
def test_groups_that_are_sequences(demos, tmp_path, monkeypatch, named, only):
    """A reader with the same sequences opens from the index; its fields have steps of their own."""
    index = tmp_path / "train.h5idx"
    table = "groups = 'data/demo_*'" + (f", only = '{only}'" if only else "")
    options = ["--field", "p=obs/position", "--field", "a=actions"] if named else []
    result = run("index", demos, "-o", index, "--sequences", f"{{{table}}}", *options)
    assert result.exit_code == 0, result.output
    count = 3 if only and not named else 2
    assert f"1 files, {count} datasets" in result.stdout
    lacks = 'no dataset "data/demo_0/rewards"'
    assert (lacks in result.stderr) == (only is None and not named)
    assert "position" in succeed("inspect", index)
    indexed_never(monkeypatch)
    fields = {"position": Field("obs/position", steps=range(2), pad="edge"), "action": "actions"}
    groups = Sequences(groups="data/demo_*", only=only)
    with AsyncReader(
        hdf5_path=index, fields=fields, sequences=groups, device="cpu", num_threads=0
    ) as reader:
        batch = reader.get_next_batch()
    lengths = {1: 7, 2: 3} if only else {0: 4, 1: 7, 2: 3}
    rows = [(100 * n, step, length - 1) for n, length in lengths.items() for step in range(length)]
    assert batch.action.tolist() == [first + step for first, step, _ in rows]
    stacks = [[first + 2 * step, first + 2 * min(step + 1, last)] for first, step, last in rows]
    assert batch.position[:, :, 0].tolist() == stacks
    with pytest.raises(AssertionError, match="was indexed"):
        AsyncReader(hdf5_path=index, fields={"action": "data/demo_0/actions"}, device="cpu")


def test_two_dimensions_that_count_samples(tmp_path, monkeypatch):
    path, index = tmp_path / "well.h5", tmp_path / "well.h5idx"
    values = np.arange(3 * 5 * 2).reshape(3, 5, 2)
    with h5py.File(path, "w") as file:
        file.create_dataset("t0_fields/x", data=values, chunks=(1, 2, 2))
        file["time"] = np.arange(5)
    result = run("index", path, "-o", index, "--num-dim", "0,1")
    assert "1 files, 1 datasets" in result.stdout
    assert "left out" in result.stderr
    indexed_never(monkeypatch)
    fields = {"x": Field("t0_fields/x", (0, 1), steps=range(5))}
    with AsyncReader(hdf5_path=index, fields=fields, device="cpu", num_threads=0) as reader:
        assert (reader.get_next_batch().x == values).all()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("{groups = 'episode_*'}", 'no group matches "episode_*"'),
        ("{group = 'demo_*'}", "did you mean 'groups'"),
        ("groups = 'demo_*'", "is not a table of TOML"),
    ],
)
def test_sequences_that_do_not_fit(demos, tmp_path, typed, message):
    index = tmp_path / "train.h5idx"
    result = run("index", demos, "-o", index, "--sequences", typed)
    assert result.exit_code
    assert message in " ".join(result.stderr.split())
    assert not index.exists()
