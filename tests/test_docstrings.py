"""The examples in docstrings run, and every public class and function has some."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import require_extra

import h5async

ROOT = Path(__file__).parents[1]
MODULES = (
    "h5async.reader.batch",
    "h5async.config.field",
    "h5async.config.parts",
    "h5async.config.keywords",
    "h5async.config.kinds",
    "h5async.config.readerconfig",
    "h5async.config.statistics",
    "h5async.errors",
    "h5async.arrays.openfile",
    "h5async.samples.ragged",
    "h5async.reader.asyncreader",
    "h5async.samples.sparse",
    "h5async.measure.statistics",
    "h5async.observe.stats",
    "h5async.torch",
    "h5async.observe.tracing",
    "h5async.packing.newfiles",
    "h5async.packing.pack",
)
NEEDED = {"h5async.torch": "torch", "h5async.config.kinds": "soundfile"}
RAY = "read_hdf5", "train_loader", "TrainLoader"
# What the examples take for imported, as the reference says.
NAMES = {
    "np": np,
    "h5py": h5py,
    "h5async": h5async,
    **{name: getattr(h5async, name) for name in h5async.__all__},
}


def examples(module):
    """Return the examples of a module, one test for each docstring that has some."""
    found = doctest.DocTestFinder().find(module, extraglobs=NAMES)
    return [test for test in found if test.examples]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the current folder a new one, where sample_data is, and examples may write."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.sampled(len(MODULES))
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if name in NEEDED:
        require_extra(NEEDED[name])
    tests = examples(importlib.import_module(name))
    assert tests
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not runner.failures, "".join(said)


@pytest.mark.sampled(len(h5async.__all__))
@pytest.mark.parametrize("name", sorted(set(h5async.__all__) - {"__version__"}))
def test_public_names_have_examples_that_run(name):
    public = getattr(h5async, name)
    assert public.__module__ in MODULES
    assert "Examples\n--------\n>>> " in inspect.getdoc(public)


def test_the_reference_has_every_public_name_and_no_other():
    pages = [page.read_text() for page in (ROOT / "docs" / "site" / "reference").glob("*.md")]
    words = [
        line.split("::")[1].strip().split("(")[0]
        for page in pages
        for line in page.splitlines()
        if line.startswith((".. autoclass::", ".. autoexception::", ".. autofunction::"))
    ]
    assert len(words) == len(set(words))
    assert set(words) == {*h5async.__all__, "H5Dataset", *RAY} - {"__version__"}
