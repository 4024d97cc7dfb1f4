"""Elements of variable length whose references are stored in other ways than plain ones.

They lie in compact datasets, in the sources of virtual ones, and in fill values. HDF5 reads a fill
value of variable length only from a file that it may write to, so the truth is read from a copy.
"""

from __future__ import annotations

import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from h5async import AsyncReader, DatasetError, H5AsyncError, ReadError
from h5async.errors import BudgetError
from h5async.index.links import Reach
from h5async.index.obstacles import NotDirectError
from h5async.opening.raggedcolumns import heap_layout

TEXT, INTEGERS = h5py.string_dtype(), h5py.vlen_dtype(np.dtype("i4"))
STORAGES = ("contiguous", "chunked", "gzip", "shuffled", "compact")


def element(rng: np.random.Generator, dtype: Any) -> Any:
    count = int(rng.integers(0, 9)) * int(rng.choice([1, 1, 1, 200]))
    if dtype is TEXT:
        return "".join(rng.choice(list("abcä😀"), count))
    return rng.integers(-(1 << 31), 1 << 31, count).astype("i4")


def put(
    parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: Any, storage: str, fill: Any
) -> h5py.Dataset:
    """Make a dataset; of h5py's own functions, none makes a compact one of variable length."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if storage == "compact":
        plist.set_layout(h5d.COMPACT)
    elif storage != "contiguous":
        plist.set_chunk(tuple(min(3 + axis, max(1, n)) for axis, n in enumerate(shape)))
        if storage == "shuffled":
            plist.set_shuffle()
        if storage != "chunked":
            plist.set_deflate(4)
    if fill is not None:
        plist.set_fill_value(np.array(fill, TEXT))
    kind = h5t.py_create(dtype, logical=True)
    found = h5d.create(parent.id, name.encode(), kind, h5s.create_simple(shape), plist)
    return h5py.Dataset(found)


def write_some(data: h5py.Dataset, rng: np.random.Generator, dtype: Any) -> None:
    """Write a part of the elements, or all."""
    share = rng.choice([0.0, 0.2, 1.0])
    for index in np.ndindex(data.shape):
        if rng.random() < share:
            data[index] = element(rng, dtype)


def make_random(folder: Path, seed: int) -> None:
    """Write ``a.h5`` with datasets ``0``, ``1``, ..., and other files that it refers to."""
    rng = np.random.default_rng(seed)
    dtype = TEXT if rng.random() < 0.6 else INTEGERS
    versions = [None, "earliest", "v110", "latest"]

    def opened(name: str) -> h5py.File:
        nbytes = int(rng.choice([0, 512, 1024]))
        libver = versions[int(rng.integers(4))]
        return h5py.File(folder / name, "w", userblock_size=nbytes, libver=libver)

    def fill() -> Any:
        return rng.choice(["", "filled", "ü" * 50, None]) if dtype is TEXT else None

    def plain(parent: h5py.Group, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        data = put(parent, name, shape, dtype, str(rng.choice(STORAGES)), fill())
        for number in range(int(rng.integers(0, 9))):  # so that the header goes on elsewhere
            data.attrs[f"attribute {number}"] = "x" * 40
        write_some(data, rng, dtype)
        return data

    with opened("a.h5") as file:
        names = []
        for number in range(int(rng.integers(1, 4))):  # files of sources
            with opened(f"s{number}.h5") as other:
                for part in range(int(rng.integers(1, 3))):
                    shape = (int(rng.integers(1, 12)),) + (5,) * bool(rng.random() < 0.2)
                    plain(other, f"part{part}", shape)
                    names.append((f"s{number}.h5", f"part{part}", shape))
        shape = (int(rng.integers(1, 12)),)
        plain(file, "own", shape)
        names.append((".", "own", shape))
        for number in range(4):
            if rng.random() < 0.3:
                plain(file, str(number), (int(rng.integers(0, 40)),))
                continue
            if number and rng.random() < 0.3 and isinstance(file.get("0"), h5py.Dataset):
                names.append((".", "0", file["0"].shape))
            virtual(file, str(number), dtype, names, fill(), rng)


def virtual(
    file: h5py.File, name: str, dtype: Any, names: Any, fill: Any, rng: np.random.Generator
) -> None:
    """Write a virtual dataset of runs, single samples and every other sample of sources."""
    count = int(rng.integers(5, 40))
    layout, at = h5py.VirtualLayout((count,), dtype), 0
    while at < count:
        source_file, source, shape = names[int(rng.integers(len(names)))]
        if shape[0] == 0:
            break
        begin = int(rng.integers(0, shape[0]))
        step = int(rng.integers(1, 4))
        length = min(len(range(begin, shape[0], step)), len(range(at, count, step)))
        found = h5py.VirtualSource(source_file, source, shape, dtype=dtype)
        column = (int(rng.integers(0, 5)),) * (len(shape) - 1)
        length = min(length, int(rng.integers(1, 9)))
        end = begin + (length - 1) * step + 1
        mine = slice(at, at + length) if rng.random() < 0.7 else slice(at, at + length * step, step)
        if mine.start + (length - 1) * (mine.step or 1) >= count:
            mine = slice(at, at + length)
        layout[mine] = found[(slice(begin, end, step), *column)]
        at = mine.stop + int(rng.choice([0, 0, 0, 2]))
    if fill is not None:
        layout.dcpl.set_fill_value(np.array(fill, TEXT))
    file.create_virtual_dataset(name, layout)


def truths(folder: Path, copy: Path, name: str = "a.h5") -> dict[str, list[Any]]:
    shutil.copytree(folder, copy)
    with h5py.File(copy / name, "r+") as file:
        return {
            key: [np.frombuffer(v, "u1") if isinstance(v, bytes) else v for v in data[()]]
            for key, data in file.items()
            if data.ndim == 1
        }


def read(path: Any, name: str, **options: Any) -> list[Any]:
    """Return the samples of an epoch in the order of the file."""
    options = {"batch_size": 7, "device": "cpu", "num_threads": 2, **options}
    with AsyncReader(hdf5_path=path, fields={"x": name}, **options) as reader:
        found = {}
        for batch in reader:
            found |= zip(batch.index.tolist(), (values.copy() for values in batch.x), strict=True)
        assert len(found) == reader.num_samples
    return [found[number] for number in range(len(found))]


def assert_equal(found: list[Any], truth: list[Any]) -> None:
    assert len(found) == len(truth)
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == other.dtype or not other.size
        assert one.tobytes() == other.tobytes()


SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("has_core", [True, False])
def test_random_files(tmp_path, monkeypatch, seed, has_core):
    if not has_core:
        monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)
        monkeypatch.setattr("h5async.opening.raggedcolumns.load_core", lambda: None)
    folder = tmp_path / "files"
    folder.mkdir()
    make_random(folder, seed)
    for name, truth in truths(folder, tmp_path / "copy").items():
        assert_equal(read(folder / "a.h5", name), truth)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "full", "num_threads": 0},
        {"shuffle": "window", "io": "pread"},
        {"workers": "process"},
        {"index_cache": True},
    ],
    ids=str,
)
def test_other_ways_of_reading(tmp_path, seed, options):
    folder = tmp_path / "files"
    folder.mkdir()
    make_random(folder, seed)
    if "index_cache" in options:
        options = {"index_cache": tmp_path / "kept"}
    found = truths(folder, tmp_path / "copy")
    # (A virtual dataset of several files is best tried: each helper process takes a while.)
    for name, truth in list(found.items())[-1 if "workers" in options else 0 :]:
        for _ in range(1 + ("index_cache" in options)):  # the second time by the saved index
            assert_equal(read(folder / "a.h5", name, **options), truth)
