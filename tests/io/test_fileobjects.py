"""File objects of Python as files of a reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, require_extra, truth

from h5async import AsyncReader, ConfigError, ReadError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        rows = np.arange(900).reshape(90, 10)
        file.create_dataset("data", data=rows, chunks=(8, 10), compression="gzip")
        file["labels"] = np.arange(90)
    return path


def reader_of(file: Any, **options: Any) -> AsyncReader:
    return AsyncReader(hdf5_path=file, device="cpu", batch_size=16, **options)


@pytest.mark.parametrize("kind", ["file", "bytes", "fsspec", "opened by fsspec"])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_file_object_is_read(path: Path, kind: str, num_threads: int):
    if kind == "file":
        file: Any = path.open("rb")
    elif kind == "bytes":
        file = io.BytesIO(path.read_bytes())
    else:
        file = require_extra("fsspec").open(f"file://{path}", "rb")
        file = file.open() if "opened" in kind else file
    for shuffle in (False, "full"):
        with reader_of(file, shuffle=shuffle, num_threads=num_threads) as reader:
            assert_epoch_is(reader, truth(path), in_order=not shuffle)
            name = reader.layouts["data"].file
    assert name == f"object://{path}" or "BytesIO object at" in name
    if kind != "fsspec":
        assert not file.closed
        file.close()


def test_several_of_them_beside_a_path(path: Path):
    several = [io.BytesIO(path.read_bytes()), path, io.BytesIO(path.read_bytes())]
    with reader_of(several) as reader:
        assert_epoch_is(reader, np.concatenate([truth(path)] * 3))


def test_what_is_refused(path: Path):
    with path.open("rb") as file:
        for options in ({"workers": "process"}, {"workers": 2}):
            with pytest.raises(ConfigError, match=r"file object .* use workers="):
                reader_of(file, **options)
    with path.open(encoding="latin-1") as text, pytest.raises(ConfigError, match="reads bytes"):
        reader_of(text)
    with pytest.raises(ConfigError, match="reads bytes"):
        reader_of(file)
    with pytest.raises(ReadError, match="is not an HDF5 file"):
        reader_of(io.BytesIO(b"PK\3\4" + bytes(900)))
    with pytest.raises(ReadError, match="cannot be given by its name"):
        reader_of("object://a.h5")


def test_one_that_is_cut_short(path: Path):
    file = io.BytesIO(path.read_bytes())
    with reader_of(file, prefetch=1, fetch_bytes=1) as reader:
        batches = iter(reader)
        next(batches)
        file.truncate(5000)
        with pytest.raises(ReadError, match=r"BytesIO .* was (replaced|changed)"):
            list(batches)
