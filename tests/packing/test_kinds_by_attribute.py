"""Bytes with an attribute that says what they encode are read as images or audio at a bare path."""

import io

import h5py
import imagecodecs
import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from h5async import AsyncReader, Field, RaggedField, Sequences, cli

PIXELS = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3)
SOUND = np.linspace(-0.5, 0.5, 400, dtype=np.float32)


def _bytes(group, name, several, kind):
    dataset = group.create_dataset(name, (len(several),), h5py.vlen_dtype(np.uint8))
    for number, one in enumerate(several):
        dataset[number] = np.frombuffer(one, np.uint8)
    if kind is not None:
        dataset.attrs["h5async-kind"] = kind


def _flac():
    encoded = io.BytesIO()
    soundfile.write(encoded, SOUND, 16000, format="FLAC", subtype="PCM_16")
    return encoded.getvalue()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("kinds") / "train.h5"
    with h5py.File(path, "w") as file:
        pngs = [imagecodecs.png_encode(one) for one in PIXELS]
        _bytes(file, "data", pngs, "image")
        _bytes(file, "sound", [_flac()] * 4, "audio")
        _bytes(file, "plain", pngs, None)
        _bytes(file, "odd", pngs, "no such kind")
        for number in range(2):
            _bytes(file, f"runs/run_{number}/image", pngs[:2], "image")
        file["labels"] = np.arange(4)
    return path


def _index(packed, tmp_path, *options):
    index = tmp_path / "train.h5idx"
    found = CliRunner().invoke(cli.app, ["index", str(packed), "-o", str(index), *options])
    assert found.exit_code == 0, found.output
    return index


def _refuse(*_):
    raise AssertionError("the index knows")


@pytest.mark.parametrize("indexed", ["file", "index", "index of fields"])
def test_a_bare_path_is_what_the_attribute_says(packed, tmp_path, monkeypatch, indexed):
    path = packed
    if indexed != "file":
        fields = [f"--field={name}={name}" for name in ("data", "labels", "sound", "plain", "odd")]
        path = _index(packed, tmp_path, *(fields if indexed == "index of fields" else []))
        monkeypatch.setattr("h5async.opening.fieldkinds._in_file", _refuse)
    with AsyncReader(hdf5_path=path) as reader:
        data, labels = reader.get_next_batch()
        np.testing.assert_array_equal(data, PIXELS)
        np.testing.assert_array_equal(labels, np.arange(4))
    fields = {"s": "sound", "p": "plain", "o": Field("odd")}
    with AsyncReader(hdf5_path=path, fields=fields) as reader:
        batch = reader.get_next_batch()
        np.testing.assert_allclose(batch.s[0], SOUND, atol=1e-4)
        for found in (batch.p, batch.o):
            assert found[1].tobytes() == imagecodecs.png_encode(PIXELS[1])


def test_a_ragged_field_still_is_the_bytes(packed):
    with AsyncReader(hdf5_path=packed, fields={"x": RaggedField("data")}) as reader:
        assert reader.get_next_batch().x[2].tobytes() == imagecodecs.png_encode(PIXELS[2])


@pytest.mark.parametrize("indexed", [False, True])
def test_images_in_groups(packed, tmp_path, indexed):
    path = _index(packed, tmp_path, "--sequences={groups='runs/*'}") if indexed else packed
    groups = Sequences(groups="runs/*")
    with AsyncReader(hdf5_path=path, fields={"x": "image"}, sequences=groups) as reader:
        np.testing.assert_array_equal(reader.get_next_batch().x, PIXELS[[0, 1, 0, 1]])
