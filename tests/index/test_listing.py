"""What a file holds, found quickly in a large one."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from conftest import reader_of
from typer.testing import CliRunner

from h5async import (
    DatasetError,
    cli,
)
from h5async.index import contents, metadata
from h5async.index.contents import walk


def file_of_many(path, count):
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((3,))
        for number in range(count):
            h5py.h5d.create(file.id, b"set%05d" % number, h5py.h5t.STD_I32LE, space)


@pytest.mark.parametrize("how", ["one group", "many groups"])
def test_what_is_looked_at_to_say_what_is_there(path, monkeypatch, how):
    count = 1000
    if how == "one group":
        file_of_many(path, count)
    else:
        with h5py.File(path, "w") as file:
            for number in range(count):
                file[f"group{number:04}/set"] = np.zeros(3)
    looked_at = []
    monkeypatch.setattr(
        contents, "walk", lambda *given: (looked_at.append(x) or x for x in walk(*given))
    )
    with pytest.raises(DatasetError) as caught:
        reader_of(path, data_field="misspelt")
    text = str(caught.value)
    assert 200 <= len(looked_at) <= 201
    assert 'there is no dataset "misspelt"; the first 200 objects of the file include "' in text
    of_groups = 'path "set", and sequences=Sequences(groups="group*")'
    expected = "h5async read" if how == "one group" else of_groups
    assert f"; there are more; try: {expected}" in text


def test_what_is_there_where_no_dataset_comes_early(path):
    with h5py.File(path, "w") as file:
        for number in range(300):
            file.create_group(f"group{number:03}")
    with pytest.raises(DatasetError, match="the first 200 objects of the file include no datasets"):
        reader_of(path)


def test_a_file_is_walked_through_like_h5py_does(path):
    with h5py.File(path, "w") as file:
        for name in ("b/x", "a-b", "a/y", "a/b/c", "z"):
            file[name] = np.zeros(3)
        file["a/b/back"] = file["a"]
        file["again"] = file["z"]
        file["soft"] = h5py.SoftLink("/z")
        file["type"] = np.dtype("i4")
    with h5py.File(path) as file:
        found = list(walk(file))
        expected = {}
        file.visititems(lambda name, node: expected.update({name: node}))
        assert {path for path, kind in found if kind == "group"} == {
            name for name, node in expected.items() if isinstance(node, h5py.Group)
        }
        datasets = [path for path, kind in found if kind == "dataset"]
        assert datasets == ["a/b/c", "a/y", "a-b", "again", "b/x"]
        assert [path for path, kind in found if kind == "link"] == ["soft"]
        assert [path for path, kind in found if kind == "other"] == ["type"]


def test_groups_within_groups_within_groups(path):
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(1500):
            group = group.create_group("g")
        group["data"] = np.zeros(3)
    with h5py.File(path) as file:
        assert list(walk(file))[-1] == ("g/" * 1500 + "data", "dataset")


def test_inspect_shows_what_it_finds_as_it_finds_it(path, monkeypatch):
    """The first rows are there before the last ones are looked at."""
    file_of_many(path, 5)
    printed = []
    monkeypatch.setattr("h5async.cli.inspect.BLOCK_SECONDS", -1.0)  # nothing is held back
    monkeypatch.setattr("typer.echo", lambda text, **_: printed.append(text))
    seen = []
    layout_at = metadata.layout_at

    def noted(file, name, *others):
        seen.append((name, "\n".join(printed)))
        return layout_at(file, name, *others)

    monkeypatch.setattr(metadata, "layout_at", noted)
    assert CliRunner().invoke(cli.app, ["inspect", str(path)]).exit_code == 0
    for number, (name, before) in enumerate(seen):
        assert name == f"set{number:05}"
        assert before.count("set0") == number
    lines = "\n".join(printed).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [name for name, _ in seen]
    assert lines[0].startswith("dataset ")


def test_columns_of_inspect_get_only_wider(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["a"] = np.zeros(3)
        file["b" * 50] = np.zeros((100, 100, 100), "i1")
        file["c"] = np.zeros(3)
    monkeypatch.setattr("h5async.cli.inspect.BLOCK_SECONDS", -1.0)
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "file.h5")])
    _, _, a, b, c, *_ = result.stdout.splitlines()
    assert a.split() == ["a", *c.split()[1:]]
    assert b.index("(100") == c.index("(3") > a.index("(3")
