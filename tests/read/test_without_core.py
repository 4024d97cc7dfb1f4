"""Random datasets, read by the core and without it, against h5py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits

from h5async import AsyncReader, Field

FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"compression": "lzf", "shuffle": True},
    {"fletcher32": True},
    {"scaleoffset": 0},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
]


def random_field(
    rng: np.random.Generator, file: h5py.File, name: str, count: int
) -> tuple[Field, np.ndarray]:
    """Write a dataset of `count` samples; return its field, and its samples as h5py gives them."""
    rank = int(rng.integers(1, 4))
    shape, axis = rng.integers(1, 7, rank), int(rng.integers(rank))
    shape[axis] = count
    dtype = rng.choice(["u1", "<i4", ">i4", ">u2"])
    values = rng.integers(0, 200, shape).astype(dtype)
    how: dict[str, Any] = {}
    if rng.random() < 0.8:
        how = dict(FILTERS[rng.integers(len(FILTERS))])
        how["chunks"] = tuple(int(rng.integers(1, n + 1)) for n in shape)
    if rng.random() < 0.3:  # as many virtual datasets have it: a gap in the middle
        file.create_dataset(f"of {name}", data=values, **how)
        layout = h5py.VirtualLayout(values.shape, dtype)
        for part in (slice(0, count // 3), slice(count // 2, count)):
            at = (slice(None),) * axis + (part,)
            layout[at] = h5py.VirtualSource(file[f"of {name}"])[at]
        file.create_virtual_dataset(name, layout, fillvalue=7)
    else:
        file.create_dataset(name, data=values, **how)
    stored = np.moveaxis(file[name][...], axis, 0)
    return Field(name, axis), stored.astype(stored.dtype.newbyteorder("="))


def read_all(options: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    with AsyncReader(**options) as reader:
        seen = []
        for batch in reader:
            seen.append(batch.index)
            for name, values in expected.items():
                assert_same_bits(batch[name], values[batch.index])
        given = reader.read([0, reader.num_samples - 1, 0])
        for name, values in expected.items():
            assert_same_bits(given[name], values[given.index])
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(len(values)))


@pytest.mark.parametrize("seed", range(40))
def test_random_fields_are_what_h5py_gives(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 60))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = {f"f{i}": random_field(rng, file, f"f{i}", count) for i in range(3)}
    options = {
        "hdf5_path": tmp_path / "a.h5",
        "fields": {name: field for name, (field, _) in made.items()},
        "batch_size": int(rng.integers(1, 20)),
        "shuffle": [False, "full", "window"][rng.integers(3)],
        "num_threads": int(rng.choice([0, 1, 3])),
        "io": rng.choice(["auto", "pread", "map"]).item(),
        "device": "cpu",
        "index_cache": False,
    }
    expected = {name: values for name, (_, values) in made.items()}
    read_all(options, expected)
    monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)
    read_all(options, expected)


BODY = """
import builtins, os, sys
hidden, real = {"fcntl", "resource"}, builtins.__import__
for name in hidden:
    sys.modules.pop(name, None)
def find(name, *rest, **more):
    if name in hidden:
        raise ImportError(name)
    return real(name, *rest, **more)
import h5py, mmap, numpy  # these may have them
del mmap.MAP_ANONYMOUS, mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.PROT_READ, mmap.PROT_WRITE
builtins.__import__ = find
for name in ("preadv", "posix_fadvise", "memfd_create"):
    if hasattr(os, name):
        delattr(os, name)
from h5async import AsyncReader
path = sys.argv[1]
for threads in (0, 2):
    with AsyncReader(hdf5_path=path, labels_field=None, batch_size=4, shuffle="full",
                     num_threads=threads, device="cpu", index_cache=False) as reader:
        assert set(reader.stats().ways.values()) == {"h5py"}
        with h5py.File(path) as file:
            for batch in reader:
                assert (batch.data == file["data"][...][batch.index]).all()
print("read")
"""


def test_where_the_system_has_little(tmp_path: Path) -> None:
    """As on Windows: without `fcntl`, `resource` and `preadv`, and without the core."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        values = np.arange(120).reshape(20, 6)
        file.create_dataset("data", data=values, chunks=(3, 6), compression="gzip")
    done = subprocess.run(
        [sys.executable, "-c", BODY, str(path)],
        env={**os.environ, "H5ASYNC_CORE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "read\n", done.stderr


def test_samples_that_two_dimensions_count(tmp_path, monkeypatch):
    """Runs of samples begin and end within sequences, and go on in the next."""
    monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)
    values = np.arange(7 * 5 * 3, dtype="i4").reshape(7, 5, 3)
    with h5py.File(tmp_path / "pair.h5", "w") as file:
        file["data"] = values
    for shuffle in (False, "full"):
        with AsyncReader(
            hdf5_path=tmp_path / "pair.h5",
            labels_field=None,
            num_dim=(0, 1),
            batch_size=8,
            shuffle=shuffle,
            num_threads=0,
            device="cpu",
        ) as reader:
            for batch in reader:
                np.testing.assert_array_equal(batch.data, values.reshape(35, 3)[batch.index])
            assert reader.fallback_reads
