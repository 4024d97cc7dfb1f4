"""`h5async inspect` with patterns, groups alike in one line, and as JSON."""

from __future__ import annotations

import json
import math

import h5py
import numpy as np
import pytest
from hdf5files import type_for_h5py
from typer.testing import CliRunner

from h5async.cli import app
from h5async.cli.datasetfacts import Dataset, is_meant
from h5async.cli.inspect import folded


@pytest.fixture(autouse=True)
def _one_table(monkeypatch):
    monkeypatch.setattr("h5async.cli.inspect.BLOCK_SECONDS", math.inf)


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.stdout


def first_words(*arguments):
    lines = run("inspect", *arguments).split("\n\n")[0].splitlines()[2:]
    return [line if "alike)" in line else line.split()[0] for line in lines]


@pytest.fixture
def demos(tmp_path):
    path = tmp_path / "demos.h5"
    with h5py.File(path, "w") as file:
        for number in range(200):
            group = file.create_group(f"data/demo_{number}")
            count = 5 + number % 7
            group["actions"] = np.zeros((count, 7))
            group.create_dataset("obs/image", data=np.zeros((count, 4, 4, 3), "u1"), chunks=True)
            group["obs/joint"] = np.zeros((count, 7), "f4")
        file["data/other/actions"] = np.zeros((3, 9))
        file["mask/train"] = np.arange(3)
    return path


@pytest.mark.slow
def test_groups_alike_are_one(demos):
    shown = run("inspect", demos)
    assert first_words(demos) == [
        "data/demo_0 … data/demo_199 (200 groups alike)",
        "actions",
        "obs/image",
        "obs/joint",
        "data/other/actions",
        "mask/train",
    ]
    row = next(line for line in shown.splitlines() if line.startswith("  actions"))
    total = sum(5 + number % 7 for number in range(200)) * 7 * 8
    assert "(5 to 11, 7)" in row
    assert f"{total / 1000:.1f} kB" in row
    assert "56 bytes" in row
    assert "groups alike: the range of their numbers of samples" in shown
    assert len(first_words(demos, "--no-fold")) == 602
    assert "groups alike" not in run("inspect", demos, "--no-fold")


DEMOS = "data/demo_0 … data/demo_199 (200 groups alike)"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["data/*/obs"], [DEMOS, "obs/image", "obs/joint"]),
        (["mask"], ["mask/train"]),
        (["/mask/train"], ["mask/train"]),
        (["**/joint", "mask"], [DEMOS, "obs/joint", "mask/train"]),
        (["data/demo_1?/actions"], ["data/demo_10 … data/demo_19 (10 groups alike)", "actions"]),
        (["data/demo_[34]/actions"], ["data/demo_3/actions", "data/demo_4/actions"]),
        (["*/*/actions"], [DEMOS, "actions", "data/other/actions"]),
    ],
)
def test_patterns(demos, patterns, expected):
    assert first_words(demos, *patterns) == expected


def test_a_pattern_that_means_nothing(demos):
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, ["inspect", str(demos), "data/*/nope", *more])
        assert (result.exit_code, result.stdout) == (1, "")
        assert 'no dataset or group has a path like "data/*/nope"' in result.stderr


def test_patterns_open_nothing_else(demos, monkeypatch):
    opened = []
    from h5async.index import metadata

    layout_at = metadata.layout_at
    monkeypatch.setattr(metadata, "layout_at", lambda *a: opened.append(a[1]) or layout_at(*a))
    run("inspect", demos, "data/demo_7/obs")
    assert opened == ["data/demo_7/obs/image", "data/demo_7/obs/joint"]


def test_what_a_pattern_means():
    assert is_meant("a/b", [])
    assert is_meant("a/[8x8]", ["a/[8x8]"])
    assert not is_meant("a/b/c", ["*/c"])
    assert is_meant("a/b/c", ["**/c"])
    assert is_meant("c", ["**/c"])
    assert not is_meant("a", ["a/b"])


def test_as_json(demos):
    found = json.loads(run("inspect", demos, "data/*/actions", "--json"))
    assert found["schema"] == "h5async inspect 1"
    assert found["file"] == str(demos)
    assert len(found["datasets"]) == 201
    with h5py.File(demos) as file:
        for facts in found["datasets"]:
            dataset = file[facts["path"]]
            assert facts["shape"] == list(dataset.shape)
            assert facts["dtype"] == str(dataset.dtype)
            assert facts["nbytes"] == dataset.nbytes
            assert (facts["layout"], facts["read"]) == ("contiguous", "direct")


def test_what_is_refused_and_what_h5py_reads_as_json(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["scalar"] = 3
        file.create_dataset("narrow", (3,), type_for_h5py())
    narrow, scalar = json.loads(run("inspect", path, "--json"))["datasets"]
    assert (narrow["read"], narrow["by"]) == ("h5py", [])
    assert "stored type" in narrow["reason"]
    assert (scalar["read"], scalar["shape"]) == ("refused", None)
    assert "scalar" in scalar["reason"]


def test_an_empty_file_as_json(tmp_path):
    h5py.File(tmp_path / "a.h5", "w").close()
    assert json.loads(run("inspect", tmp_path / "a.h5", "--json"))["datasets"] == []


# --- folding -------------------------------------------------------------------------------------


def dataset(path, **facts):
    facts = {"shape": (4, 2), "dtype": "f4", "layout": "contiguous", "read": "direct", **facts}
    return Dataset(path, "a.h5", samples=4, **facts)


def texts(datasets):
    return [text for text, _ in folded(datasets)]


def test_groups_within_groups():
    paths = [f"run{r}/cam{c}/rgb" for r in range(3) for c in range(4)]
    assert texts(map(dataset, paths)) == [
        "run0 … run2 (3 groups alike)",
        "  cam0 … cam3 (4 groups alike)",
        "    rgb",
    ]


def test_few_groups_and_other_names_stay():
    paths = ["test/x", "train/x", "val/x", "w1/x", "w2/x"]
    assert texts(map(dataset, paths)) == paths
    many = [f"{name}/x" for name in "abcdefghij"]
    assert texts(map(dataset, many)) == ["a … j (10 groups alike)", "  x"]


def test_what_differs_is_not_folded():
    datasets = [dataset(f"g{n}/x", dtype="f8" if n == 3 else "f4") for n in range(7)]
    assert texts(datasets) == [
        "g0 … g2 (3 groups alike)",
        "  x",
        "g3/x",
        "g4 … g6 (3 groups alike)",
        "  x",
    ]
    datasets = [dataset(f"g{n}/{name}") for n in range(3) for name in ("x", "y")[: n + 1]]
    assert texts(datasets) == ["g0/x", "g1/x", "g1/y", "g2/x", "g2/y"]


def taken(paths, seen):
    """Yield datasets, and note which were asked for."""
    for path in paths:
        seen.append(path)
        yield dataset(path)


def test_the_root_is_not_held_back():
    seen = []
    for text, _ in folded(taken("abc", seen)):
        assert seen[-1] == text


def test_a_large_group_is_printed_before_it_ends():
    large = [f"deep/er/d{number:05}" for number in range(2000)]
    seen = []
    lines = folded(taken([*large, *(f"deep/g{n}/x" for n in (1, 2, 3)), "z"], seen))
    assert [next(lines)[0] for _ in large] == large
    assert seen == large
    rest = ["deep/g1 … deep/g3 (3 groups alike)", "  x", "z"]
    assert [text for text, _ in lines] == rest


def test_groups_are_folded_to_some_depth():
    path = "/".join(["g"] * 2000)
    assert texts([dataset(f"{path}/{name}") for name in "ab"]) == [f"{path}/a", f"{path}/b"]


@pytest.mark.parametrize("seed", range(20))
def test_no_dataset_is_lost_or_moved(seed):
    rng = np.random.default_rng(seed)
    paths = sorted(
        {
            "/".join(f"{'gh'[rng.integers(2)]}{rng.integers(4)}" for _ in range(rng.integers(1, 4)))
            + f"/d{rng.integers(2)}"
            for _ in range(200)
        },
        key=lambda path: [(part.startswith("d"), part) for part in path.split("/")],
    )
    shown = list(folded(map(dataset, paths)))
    single = [text for text, several in shown if several and not text.startswith(" ")]
    assert single == [path for path in paths if path in set(single)]
    assert sorted(one.path for _, several in shown for one in several) == sorted(paths)
