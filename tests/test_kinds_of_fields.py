"""Options of kinds of fields: those of another kind, and values that do not fit."""

from __future__ import annotations

import json
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import read

from h5async import (
    ConfigError,
    DatasetError,
    Field,
    ImageField,
    RaggedField,
    ReaderConfig,
    SparseField,
)

OF_KINDS = {
    "ragged": ("offsets", "offsets_kind", "pad_to"),
    "sparse": ("dense", "columns", "missing"),
    "audio": ("channels", "mono", "sample_rate"),
    "image": ("size", "crop_scale", "interpolation", "on_error"),
}
OPTIONS = [(kind, option) for kind, several in OF_KINDS.items() for option in several]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
@pytest.mark.parametrize("other", [None, "sparse", "ragged"])
def test_an_option_of_another_kind_names_the_kind(tmp_path, kind, option, other):
    if kind == other:
        return
    field = {"path": "x", option: 1} | ({} if other is None else {"kind": other})
    match = rf'{option}.*an option of {kind} fields: set kind="{kind}"'
    with pytest.raises(ConfigError, match=match):
        ReaderConfig(hdf5_path="x.h5", fields={"x": field})
    path = tmp_path / "options.toml"
    rest = "" if other is None else f', kind = "{other}"'
    path.write_text(f'hdf5_path = "x.h5"\nfields.x = {{path = "x", {option} = 1{rest}}}\n')
    with pytest.raises(ConfigError, match=rf'{option}.*set kind = "{kind}"'):
        ReaderConfig.load(path)
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"hdf5_path": "x.h5", "fields": {"x": field}}))
    with pytest.raises(ConfigError, match=rf'{option}.*set "kind": "{kind}"'):
        ReaderConfig.load(path)
    chosen: Any = {None: Field, "sparse": SparseField, "ragged": RaggedField}[other]
    with pytest.raises(ConfigError, match=f"{option}'; {kind.capitalize()}Field has it"):
        chosen("x", **{option: 1})


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_an_option_of_a_field_among_those_of_the_reader(kind, option):
    if option in ("size", "on_error"):  # which mean other things in other loaders
        return
    with pytest.raises(
        ConfigError, match=f"it is an option of a field: .*{kind.capitalize()}Field"
    ):
        ReaderConfig(hdf5_path="x.h5", **{option: 1})


def test_an_image_field_takes_no_options_of_sparse_rows():
    with pytest.raises(ConfigError, match="SparseField has it"):
        ImageField("x", dense=True)  # type: ignore[call-arg]


def test_bytes_of_a_fixed_size_are_no_images(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([b"one", b"two"])
    with pytest.raises(DatasetError, match=r"store each sample as h5py\.vlen_dtype"):
        read(tmp_path / "a.h5", {"x": ImageField("x")})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageField("x", size=(3,)), "size: must be a number of pixels, or two"),
        (lambda: ImageField("x", size="a"), "size: must be a number of pixels, or two"),
        (lambda: ImageField("x", size=4, crop_scale=(0.5,)), "crop_scale: must have more values"),
        (lambda: ImageField("x", axes=(3, 0, 1, 2)), "axes must begin with .* 0, found"),
        (lambda: SparseField("x", axes=(1, 0)), "axes must begin with .* 0, found"),
        (lambda: SparseField("x", num_dim=1), "num_dim must be 0"),
    ],
)
def test_words_of_options_that_do_not_fit(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_complex_values_are_not_scaled(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3, "c8")
    with pytest.raises(
        ConfigError, match=r"complex64 cannot be cast .*; leave scale and offset out"
    ):
        read(tmp_path / "a.h5", {"x": Field("x", scale=2)})
