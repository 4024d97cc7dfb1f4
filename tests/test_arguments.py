"""Arguments that do not fit, configurations as JSON, and rows that postprocess returns."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, first_batch, reader_of, truth

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    PostprocessError,
    ReaderConfig,
)
from h5async.index import metadata

NO_TIMEOUTS = [
    *([1, 2, 3], "5", True, False, -1, -0.5, 1j, {}),
    *(math.nan, math.inf, -math.inf, 1e10, 1e300, 10**5000, np.array([1.0, 2.0])),
]


@each("timeout", NO_TIMEOUTS)
@each("num_threads", [0, 1])
def test_timeouts_that_are_none(plain, timeout, num_threads):
    text = "timeout: must be None, for no limit, or seconds, from 0 to 1,000,000,000"
    with reader_of(plain, num_threads=num_threads, debug_lifetimes=True) as reader:
        batch = reader.get_next_batch()
        with pytest.raises(ConfigError) as caught:
            reader.get_next_batch(timeout)
        assert text in str(caught.value)
        assert batch.data.shape == (32, 3), "the batch in hand lives on"
        assert reader.get_next_batch().number == 1
    with pytest.raises(ConfigError) as caught:
        reader_of(plain, timeout=timeout)
    assert text in str(caught.value)


@pytest.mark.slow
@each("timeout", [None, 1e9, 300, np.float32(300), np.int64(300), 250.5])
@each("workers", ["thread", "process"])
def test_timeouts(plain, timeout, workers):
    with reader_of(plain, timeout=timeout, workers=workers) as reader:
        assert reader.get_next_batch(timeout).number == 0
        assert reader.get_next_batch().number == 1


NAME = "caf\udce9/d\udcff"
NUMBER = "must be a number, or one for each channel"


@each(
    "field, message",
    [
        ({"pth": "data"}, "fields: x: unknown option 'pth'; did you mean 'path'?"),
        ({"pth": "data", "path": "data"}, "fields: x: unknown option 'pth'; did you mean 'path'?"),
        ({}, "fields: x: path is required"),
        ({"path": None}, "fields: x: path: must be a string, found None"),
        ({"path": ""}, "fields: x: path: the path is empty"),
        ({5: "data"}, "fields: x: unknown option '5'"),
        (
            {"path": "data", "axes": 5},
            "fields: x: axes: must be a list of dimensions, by number or",
        ),
        ({"path": "data", "scale": [None]}, f"fields: x: scale: {NUMBER}, found [None]"),
        ({"path": "data", "scale": "a"}, f"fields: x: scale: {NUMBER}, found 'a'"),
        ({"path": "data", "offset": ["a"]}, f"fields: x: offset: {NUMBER}, found ['a']"),
        ({"path": "data", "axes": [1.5]}, "fields: x: axes: must be the number of a dimension, or"),
        ({"path": "data", "scale": [10**400]}, "fields: x: scale: "),
        ({"path": "data", "dtype": ("f4", -1)}, "fields: x: dtype: must be a NumPy dtype"),
        ({"path": "data", "dtype": "V4"}, "fields: x: dtype: must be a boolean or numeric dtype"),
        ("", "fields: x: path: the path is empty"),
        (5, "fields: x: must be a path or a Field, found 5"),
        (None, "fields: x: must be a path or a Field, found None"),
    ],
)
def test_fields_that_do_not_fit(plain, field, message):
    with pytest.raises(ConfigError) as caught:
        AsyncReader(hdf5_path=plain, fields={"x": field})
    assert str(caught.value).startswith(message)


def test_fields_without_a_path():
    with pytest.raises(ConfigError, match="unknown option 'pth'; did you mean 'path'"):
        Field(pth="data")
    with pytest.raises(ConfigError, match="path is required"):
        Field()


def test_fields_as_mappings(plain):
    batch = first_batch(plain, fields={"x": {"path": "data", "dtype": "f4"}, "y": "labels"})
    assert batch.x.dtype == np.float32
    assert batch.y.tolist() == list(range(32))


@pytest.mark.parametrize("none", [None, ""])
def test_fields_and_no_labels(plain, none, tmp_path):
    assert list(first_batch(plain, fields={"x": "data"}, labels_field=none).keys()) == ["x"]
    toml = tmp_path / "options.toml"
    toml.write_text(f'hdf5_path = "{plain.name}"\nlabels_field = ""\nfields.x = "data"\n')
    with AsyncReader(toml, device="cpu") as reader:
        assert reader.get_next_batch().keys() == ["x"]
    with pytest.raises(ConfigError, match="give fields or labels_field, not both"):
        reader_of(plain, fields={"x": "data"}, labels_field="labels")
    with pytest.raises(ConfigError, match="give fields or data_field, not both"):
        reader_of(plain, fields={"x": "data"}, data_field="data")


CONFIGURATIONS = [
    {"hdf5_path": "a.h5"},
    {"hdf5_path": ["a.h5", Path("b.h5")], "labels_field": None, "timeout": 3},
    {"hdf5_path": "a.h5", "fields": {"x": Field("d", dtype="f4"), "y": "labels"}},
    {"hdf5_path": "a.h5", "fields": {"x": Field("d", axes=(0, 2, 1), scale=[1, 2.5])}},
    {"hdf5_path": "a.h5", "fields": {"x": "d"}, "labels_field": None, "shuffle": True},
    {"hdf5_path": "a.h5", "allow_external": ["x", Path("y")], "rank": 1, "world_size": 3},
    {"hdf5_path": b"\xff.h5", "data_field": NAME, "labels_field": b"\xff"},
    {"hdf5_path": "a.h5", "fields": {NAME: Field(NAME, offset=1)}, "cache": "host"},
    {"hdf5_path": "a.h5", "postprocess": "module:function", "num_threads": 0},
    *(
        {"hdf5_path": "a.h5", "fields": {"x": Field("d", dtype=dtype)}}
        for dtype in ("?", "i1", "<u2", ">i8", "f2", "f8", "c8", "c16", np.longdouble)
    ),
]


@each("options", CONFIGURATIONS)
def test_a_configuration_as_json(options):
    config = ReaderConfig(**options)
    for text in (config.model_dump_json(), config.model_dump_json(indent=2)):
        assert ReaderConfig.load(json.loads(text)) == config
    assert ReaderConfig.load(config.model_dump()) == config
    assert ReaderConfig.load(config.model_dump(exclude_unset=True)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    json.dumps(config.model_dump(mode="json"))


def halved(data):
    return data / 2


def test_a_function_in_a_configuration_as_json(tmp_path):
    config = ReaderConfig(hdf5_path="a.h5", postprocess=os.path.join)
    assert json.loads(config.model_dump_json())["postprocess"] == "posixpath:join"
    assert config.model_dump(mode="json")["postprocess"] == "posixpath:join"
    assert config.model_dump()["postprocess"] is os.path.join
    config = ReaderConfig(hdf5_path="a.h5", postprocess=lambda data: data)
    with pytest.raises(ConfigError, match='give it as "module:function"'):
        config.model_dump_json()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda reader: reader.set_epoch("a"), "an epoch must be an integer from 0, found 'a'"),
        (lambda reader: reader.set_epoch(1.5), "an epoch must be an integer from 0, found 1.5"),
        (lambda reader: reader.load_state_dict([1]), "takes what state_dict"),
        (lambda reader: reader.load_state_dict(None), "takes what state_dict"),
    ],
)
def test_arguments_that_do_not_fit(plain, call, message):
    with reader_of(plain) as reader, pytest.raises(ConfigError, match=message):
        call(reader)


def test_values_that_do_not_fit_are_cut_short():
    with pytest.raises(ConfigError) as caught:
        ReaderConfig(hdf5_path="a.h5", batch_size="x" * 100_000)
    assert len(str(caught.value)) < 1000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize(
    ("postprocess", "message"),
    [
        (lambda data, labels: (data[:-1], labels), "of shapes (31, 3), (32,)"),
        (lambda data, labels: (data, labels[::2]), "of shapes (32, 3), (16,)"),
        (lambda data, labels: (data[:0], labels.tolist()), "of shapes (0, 3), (32,)"),
        (lambda data, labels: ([[1], [1, 2]], labels), "returned no arrays: "),
    ],
)
def test_postprocess_that_returns_unequal_numbers_of_rows(plain, postprocess, message, workers):
    options = {"labels_field": "labels", "postprocess": postprocess, "workers": workers}
    with reader_of(plain, **options) as reader:
        for number in range(2):
            with pytest.raises(PostprocessError) as caught:
                reader.get_next_batch()
            assert f"batch {number} of epoch 0" in str(caught.value)
            assert message in str(caught.value)


@pytest.mark.parametrize(
    "postprocess",
    [
        lambda data, labels: (data[::2], labels[::2]),
        lambda data, labels: (np.repeat(data, 2, 0), np.repeat(labels, 2)),
        lambda data, labels: (data.sum(), labels),
    ],
)
def test_postprocess_that_returns_other_numbers_of_rows(plain, postprocess):
    batch = first_batch(plain, labels_field="labels", postprocess=postprocess)
    expected = postprocess(truth(plain)[:32], truth(plain, "labels")[:32])
    for found, wanted in zip(batch, expected, strict=True):
        assert_same_bits(found, np.asarray(wanted))


def test_a_file_whose_root_group_is_damaged_is_refused_by_name(tmp_path):
    """The message tells what the file holds, which nobody can list."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((4, 3))
    content = path.read_bytes()

    def is_found_late(begin: int) -> bool:
        """Damage the file there; tell whether HDF5 opens the file, and not its root group."""
        path.write_bytes(content[:begin] + bytes(4) + content[begin + 4 :])
        with contextlib.suppress(OSError), h5py.File(path) as file:
            try:
                h5py.h5o.get_info(file["/"].id)
            except (KeyError, RuntimeError):
                return True
        return False

    assert any(map(is_found_late, range(24, 200)))
    with pytest.raises(DatasetError, match=r"a\.h5: .*nothing in it can be listed"):
        AsyncReader(hdf5_path=path, labels_field=None)
    with pytest.raises(DatasetError, match=r"a\.h5: the file is damaged"):
        list(metadata.list_layouts(path))
