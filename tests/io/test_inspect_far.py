"""What `h5async inspect` says of sources that are no local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from memorystore import MemoryStore
from typer.testing import CliRunner

from h5async.cli import app
from h5async.core.binding import load_core

pytestmark = pytest.mark.skipif(load_core() is None, reason="far sources need the core")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """4,096 rows of 4 kB: contiguous, in raw chunks, and in compressed ones of 16 rows."""
    data = np.random.default_rng(0).integers(0, 256, (4096, 4096), "u1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = data
        file.create_dataset("tiles", data=data, chunks=(16, 2048), compression="gzip")
        file.create_dataset("data", data=data, chunks=(16, 4096), compression="gzip")
        file.create_dataset("whole", data=data, chunks=(512, 4096), compression="gzip")
    return tmp_path / "a.h5"


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_glob_lists_all_its_files(path: Path, tmp_path: Path) -> None:
    for name in "xy":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["data"] = np.zeros(5)
    found = run(tmp_path / "[xy].h5")
    assert [f"{tmp_path}/{name}.h5: data" in found for name in "xy"] == [True, True]
    document = json.loads(run(tmp_path / "[xy].h5", "--json"))
    assert [Path(one["file"]).name for one in document["datasets"]] == ["x.h5", "y.h5"]


@pytest.mark.slow
def test_requests_are_those_of_the_chunk_table(path: Path, store: MemoryStore) -> None:
    document = json.loads(run(store.put(path), "--json"))
    found = {one["path"]: one["requests"] for one in document["datasets"]}
    with h5py.File(path) as file:
        stored = {name: file[name].id.get_storage_size() for name in found}
    batches = 4096 / 32
    # In order, a batch is one request: its rows, or the chunks that it begins, follow each other.
    for name in ("raw", "data", "tiles"):
        assert found[name]["in_order"]["count"] * 4096 == batches, name
        # Gaps between chunks, where HDF5 keeps its B-tree, are fetched, too.
        nbytes = found[name]["in_order"]["nbytes"] * 4096
        assert stored[name] <= nbytes <= 1.01 * stored[name], name
    assert found["raw"]["in_order"]["nbytes"] == 4096
    assert found["whole"]["in_order"]["count"] * 4096 == 4096 / 512
    # Shuffled, a sample needs its chunk, or a row; in the window, each chunk is fetched once.
    assert 0.9 < found["raw"]["full"]["count"] <= 1
    assert found["data"]["full"]["nbytes"] > 0.8 * stored["data"] / 256
    assert {name: one["reads"] for name, one in found.items()} == {
        **dict.fromkeys(("data", "tiles", "whole"), "chunks"),
        "raw": "rows",
    }
    assert found["data"]["window"]["nbytes"] * 4096 >= stored["data"]
    assert found["data"]["window"]["count"] <= 1 / 16
    assert found["whole"]["window"]["nbytes"] * 4096 == stored["whole"]
    assert all(cost["batch_size"] == 32 for cost in found.values())


def test_the_text_says_what_a_store_permits_and_what_to_do(path: Path, store: MemoryStore) -> None:
    text = run(store.put(path))
    lines = {line.split(":")[0]: line for line in text.split("in batches of 32:")[1].splitlines()}
    assert "S3 (some 5,500 GETs a second for a prefix) permits" in lines["data"]
    assert "shuffle=window needs" in lines["data"]
    assert "larger chunks would need fewer" in lines["data"]
    assert "larger chunks" not in lines["whole"]
    assert "compressed chunks of several rows" in lines["raw"]


def test_local_files_have_no_requests(path: Path) -> None:
    document = json.loads(run(path, "--json"))
    assert {one["requests"] for one in document["datasets"]} == {None}
    assert "requests" not in run(path)


def test_advise_measures_local_copies(path: Path, store: MemoryStore) -> None:
    typed = ["advise", str(store.put(path)), "--data-field", "data", "--no-labels", "--json"]
    result = CliRunner().invoke(app, [*typed, "--seconds", "0", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    now, *others = json.loads(result.stdout)["layouts"]
    with h5py.File(path) as file:
        assert now["stored_nbytes"] == file["data"].id.get_storage_size()
    assert (now["chunk_samples"], now["filter"]) == (16, "gzip:4")
    assert len(others) > 4
