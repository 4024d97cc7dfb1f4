"""Names of files, groups and datasets that are not UTF-8."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sysconfig

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits, first_batch, reader_of

from h5async import (
    ConfigError,
    DatasetError,
    Field,
    H5AsyncError,
    ReadError,
)
from h5async.spelling import name_bytes, printable, shell_word

SCRIPT = os.path.join(sysconfig.get_path("scripts"), "h5async")
SECONDS = 60  # for a subprocess
GROUP, DATASET, SOFT, MEMBER = b"caf\xe9", b"d\xff", b"soft\xfe", b"m\xf0"
NAME = "caf\udce9/d\udcff"


@pytest.fixture
def odd_names(path):
    """A dataset in a group, two links to it, and a compound, with names that are not UTF-8."""
    with h5py.File(path, "w") as file:
        file.create_group(GROUP)[DATASET] = np.arange(24).reshape(12, 2)
        file.id.links.create_soft(SOFT, GROUP + b"/" + DATASET)
        file["plain"] = np.arange(12)
        file["text"] = np.full(12, b"abc", "S3")
        compound = h5py.h5t.create(h5py.h5t.COMPOUND, 8)
        compound.insert(MEMBER, 0, h5py.h5t.STD_I32LE)
        compound.insert(b"b", 4, h5py.h5t.STD_I32LE)
        space = h5py.h5s.create_simple((12,))
        dataset = h5py.h5d.create(file.id, b"table", compound, space)
        values = np.arange(24, dtype="<i4").view("V8")
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, compound)
        terminated = h5py.h5t.C_S1.copy()
        terminated.set_size(4)
        h5py.h5d.create(file.id, b"t\xff", terminated, space)
    with h5py.File(path.with_name("links.h5"), "w") as file:
        file.id.links.create_external(b"e\xff", os.fsencode(path.name), GROUP + b"/" + DATASET)
    return path


@pytest.mark.slow
@each("workers", ["thread", "process"])
@each("name", [NAME, f"/{NAME}", "soft\udcfe", name_bytes(NAME)])
def test_names_that_are_not_utf8_are_read(odd_names, name, workers):
    expected = np.arange(24).reshape(12, 2)
    assert_same_bits(first_batch(odd_names, data_field=name, workers=workers).data, expected)
    fields = {"x": Field(name), "y": name, "z": {"path": name, "dtype": "f4"}}
    batch = first_batch(odd_names, fields=fields, workers=workers)
    assert_same_bits(batch.x, expected)
    assert_same_bits(batch.z, expected.astype("f4"))
    batch = first_batch(odd_names, data_field="plain", labels_field=name)
    assert_same_bits(batch.labels, expected)


def test_names_that_are_not_utf8_elsewhere(odd_names):
    links = odd_names.with_name("links.h5")
    expected = np.arange(24, dtype="<i4").reshape(12, 2)
    assert_same_bits(first_batch(links, data_field="e\udcff").data, expected.astype("i8"))
    assert_same_bits(first_batch(odd_names, data_field="table/m\udcf0").data, expected[:, 0])
    assert_same_bits(first_batch(odd_names, data_field="table/b").data, expected[:, 1])
    assert_same_bits(first_batch(odd_names, data_field="t\udcff").data, np.zeros(12, "S4"))
    with pytest.raises(DatasetError, match="read each member separately"):
        reader_of(odd_names, data_field="table")


def test_names_of_fields_that_are_not_utf8(odd_names):
    with reader_of(odd_names, fields={NAME: NAME}) as reader:
        assert_same_bits(reader.get_next_batch()[NAME], np.arange(24).reshape(12, 2))
        copy = pickle.loads(pickle.dumps(reader.config))
        assert copy == reader.config


@pytest.mark.slow
@each("workers", ["thread", "process"])
@each("name", [f"{NAME}x", GROUP.decode(errors="surrogateescape"), "table/x"])
def test_errors_show_names_that_are_not_utf8(odd_names, name, workers):
    with pytest.raises(H5AsyncError) as caught:
        reader_of(odd_names, data_field=name, workers=workers)
    error = caught.value
    for text in (str(error), str(pickle.loads(pickle.dumps(error)))):
        assert r"\x" in text
        text.encode()
        print(text)
        assert json.loads(json.dumps(text)) == text


def test_errors_say_how_to_type_names_that_are_not_utf8(odd_names):
    with pytest.raises(DatasetError) as caught:
        reader_of(odd_names, data_field="x")
    assert r"--data-field $'caf\xe9/d\xff'" in str(caught.value)
    script = f"printf %s {shell_word(NAME + chr(39) + chr(92))}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=SECONDS)
    assert shown.stdout == name_bytes(NAME) + b"'\\"


def test_read_errors_show_names_that_are_not_utf8(path):
    with h5py.File(path, "w") as file:
        data = np.arange(100)
        dataset = file.create_group(GROUP).create_dataset(
            DATASET, data=data, chunks=(100,), compression="gzip"
        )
        offset = dataset.id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)
    with reader_of(path, data_field=NAME) as reader, pytest.raises(ReadError) as caught:
        reader.get_next_batch()
    assert r'"caf\xe9/d\xff"' in str(caught.value)


@pytest.mark.slow
def test_the_command_line_with_names_that_are_not_utf8(odd_names):
    for encoding in ("utf-8", "ascii", "latin-1"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}

        def shown(*arguments, environment=environment, code=0):
            result = subprocess.run(
                [SCRIPT, *arguments], env=environment, capture_output=True, timeout=SECONDS
            )
            assert result.returncode == code, result.stderr
            assert b"Traceback" not in result.stderr
            return result.stdout + result.stderr

        listed = shown("inspect", odd_names).splitlines()
        names = [line.split()[0] for line in listed[2:-2]]
        assert names == [rb"caf\xe9/d\xff", b"plain", rb"soft\xfe", b"table", b"text", rb"t\xff"]
        given = [odd_names, "--no-labels", "--data-field"]
        assert rb'"caf\xe9/d\xff"' in shown("read", *given, name_bytes(NAME))
        assert rb'"no\xff"' in shown("read", *given, b"no\xff", code=1)


def test_files_whose_names_are_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.h5")
    try:
        with h5py.File(os.fsencode(path), "w") as file:
            file["data"] = np.arange(5)
    except OSError:
        pytest.skip("the file system takes no such name")
    for given in (path, str(path), os.fsencode(path), [path]):
        assert_same_bits(first_batch(given).data, np.arange(5))
    with pytest.raises(DatasetError) as caught:
        reader_of(path, data_field="x")
    assert r"\xff.h5" in str(caught.value)


def test_names_that_no_file_can_hold(path):
    with pytest.raises(ConfigError, match="no file can hold this name"):
        reader_of(path, data_field="\ud800")


def test_printable_text():
    assert printable("café") == "café"
    assert printable("a\udcff\ud800é") == r"a\xff\ud800é"
