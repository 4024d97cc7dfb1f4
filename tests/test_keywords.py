"""What editors, notebooks and type checkers are told of options, batches and layouts."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hdf5files import type_for_h5py

import h5async
from h5async import (
    AsyncReader,
    AudioField,
    Field,
    ImageField,
    RaggedField,
    ReaderConfig,
    ReaderOptions,
    Sequences,
    SparseField,
    Split,
)
from h5async.cli.options import options_of
from h5async.config.field import PartOptions

ROOT = Path(__file__).parents[1]
MODELS = (ReaderConfig, Field, RaggedField, AudioField, ImageField, SparseField, Sequences, Split)
DESCRIBED = {keywords: model for model in MODELS for keywords in model.keywords}
POSITIONAL = dict.fromkeys(
    (
        "FieldOptions",
        "RaggedFieldOptions",
        "AudioFieldOptions",
        "ImageFieldOptions",
        "SparseFieldOptions",
    ),
    ("path",),
) | {"SplitOptions": ("name", "parts")}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((100, 4), "f4"), chunks=(10, 4), compression=1)
        file["labels"] = np.arange(100)
        file["odd name"] = np.arange(100)
    return path


def choices(annotation: Any) -> set[object]:
    """Return all strings that a type names."""
    if isinstance(annotation, str):
        return {annotation}
    return {one for part in get_args(annotation) for one in choices(part)}


@pytest.mark.parametrize("keywords", DESCRIBED, ids=lambda keywords: keywords.__name__)
def test_keywords_are_the_options_with_their_choices_and_none(keywords):
    name = keywords.__name__
    described = {option.name: option for option in options_of(DESCRIBED[keywords])}
    hints = get_type_hints(keywords)
    parts = set(get_type_hints(PartOptions))
    if name in ("PartOptions", "StepsOptions"):
        assert set(hints) < set(described)
    else:  # other kinds of fields do not take parts of rows
        positional = set(POSITIONAL.get(name, ()))
        assert set(hints) | parts >= set(described) - positional >= set(hints)
    for key, hint in hints.items():
        option = described[key]
        named = {one for one in option.choices if isinstance(one, str)}
        assert choices(hint) == named, key
        if option.default is None:
            assert NoneType in get_args(hint), f"{key} takes None"


def test_the_readers_keywords_have_the_order_of_its_options():
    assert list(get_type_hints(ReaderOptions)) == list(ReaderConfig.model_fields)
    assert ReaderOptions.__total__ is False


@pytest.mark.parametrize("keywords", DESCRIBED, ids=lambda keywords: keywords.__name__)
def test_editors_and_help_show_the_same_descriptions(keywords):
    described = {option.name: option.description for option in options_of(DESCRIBED[keywords])}
    source = inspect.getsource(keywords)
    for name in re.findall(r"^    ([a-z_]+): ", source, re.MULTILINE):
        assert re.match(r"[A-Z].*\.$", described[name]), name
        told = source.partition(f"\n    {name}: ")[2].split('"""')[1]
        assert " ".join(told.split()) == described[name]


def test_the_json_schema_has_the_descriptions():
    properties = ReaderConfig.model_json_schema()["properties"]
    for option in options_of(ReaderConfig):
        assert properties[option.name]["description"] == option.description


@pytest.mark.parametrize("name", ["AsyncReader", "H5Dataset"])
def test_help_and_completion_show_every_option(name):
    if name == "H5Dataset":
        require_extra("torch")
    cls = getattr(h5async if name == "AsyncReader" else h5async.torch, name)
    text = " ".join(inspect.getdoc(cls).split())
    for option in options_of(ReaderConfig):
        assert f" {option.name} {' '.join(option.description.split())} " in text
    assert (
        text.index("Other Parameters ---") < text.index("batch_size Samples") < text.index("Rais")
    )
    assert "batch_size" in pydoc.render_doc(cls)
    parameters = inspect.signature(cls).parameters
    assert next(iter(parameters)) == "config"
    assert set(ReaderConfig.model_fields) <= set(parameters)
    assert parameters["batch_size"].default == 32
    assert parameters["hdf5_path"].default is ...


def test_a_subclass_has_a_signature_and_a_docstring_of_its_own():
    class Mine(AsyncReader):
        """Mine."""

        def __init__(self, path):
            super().__init__(hdf5_path=path)

    assert list(inspect.signature(Mine).parameters) == ["path"]
    assert Mine.__doc__ == "Mine."
    assert "batch_size" in AsyncReader.__doc__


def test_without_docstrings_there_are_none():
    code = "from h5async import AsyncReader; print(AsyncReader.__doc__)"
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_batch_lists_its_fields(path):
    fields = {"image": "data", "odd name": "odd name"}
    with AsyncReader(hdf5_path=path, fields=fields, device="cpu") as reader:
        listed = dir(reader.get_next_batch())
    assert {"image", "index", "copy", "sequence", "epoch"} <= set(listed)
    assert "odd name" not in listed, "it cannot be completed"
    assert listed == sorted(set(listed))


def test_layouts_are_shown_in_a_line_each(path):
    with AsyncReader(hdf5_path=path, device="cpu") as reader:
        shown = repr(reader.layouts)
    assert shown == (
        f"{{'data': <DatasetLayout {path}: \"data\" (100, 4) float32, chunked (10, 4), deflate,"
        f" read directly>, 'labels': <DatasetLayout {path}: \"labels\" (100,) int64, contiguous,"
        " read directly>}"
    )


def test_a_layout_says_why_h5py_reads_it(tmp_path):
    path = tmp_path / "narrow.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (10,), type_for_h5py())
    with AsyncReader(hdf5_path=path, labels_field=None, device="cpu") as reader:
        shown = repr(reader.layouts["data"])
    assert shown.endswith("read through h5py: its stored type differs from NumPy's int32>")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", ["inspect", "read", "bench", "advise", "index", "stats", "pack", "repack"]),
        ("read --batch-s", ["--batch-size"]),
        ("read --shuffle w", ["window"]),
        ("read --shuffle ", ["none", "full", "window"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(typed, expected):
    words = f"h5async {typed}"
    place = {
        "_H5ASYNC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "h5async"],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (expected, "")
