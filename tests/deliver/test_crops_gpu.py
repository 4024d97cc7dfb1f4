"""Parts of rows on a GPU: the host's, bit for bit, with the places where they begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits

from h5async import AsyncReader, ConfigError, Field

pytestmark = pytest.mark.gpu


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.h5"
    rows = np.random.default_rng(0).integers(0, 255, (30, 24, 32), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("chunks", data=rows, chunks=(2, 8, 8), compression=1)
        file.create_dataset("whole", data=rows, chunks=(1, 24, 32), compression=1)
        file["contiguous"] = rows
    return path


FIELDS = {
    "x": Field("chunks", crop=9, flip=True),
    "y": Field("contiguous", crop=9, flip=True, dtype="f4", scale=0.5, axes=(0, 2, 1)),
    "z": Field("whole", region={1: slice(2, 20, 3), 2: slice(5, 30)}),
    "w": Field("chunks", crop=9, crop_at="center"),
}


@each("decode", ["host", "auto"])
def test_parts_are_those_of_the_host(path: Path, decode: Any):
    options = {"hdf5_path": path, "fields": FIELDS, "batch_size": 7, "shuffle": "full"}
    with (
        AsyncReader(device="cuda", decode=decode, **options) as gpu,
        AsyncReader(device="cpu", **options) as host,
    ):
        for found, expected in zip(gpu, host, strict=True):
            for name in expected.keys():
                assert_same_bits(found[name].get(), expected[name])


def test_random_parts_have_no_cache_on_the_device(path: Path):
    with pytest.raises(ConfigError, match='cache="device" is not supported'):
        AsyncReader(hdf5_path=path, device="cuda", cache="device", fields=FIELDS)
