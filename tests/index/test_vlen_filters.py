"""Elements of variable length whose references lie behind filters that HDF5 could not apply."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from corpus import DONT_FILTER_PARTIAL_CHUNKS, HDF5
from h5py import h5d, h5p, h5s, h5t, h5z

from h5async import AsyncReader

COUNT = 50
VALUES = [np.arange(i % 7, dtype="i4") for i in range(COUNT)]
TEXTS = ["ä" * (i % 5) for i in range(COUNT)]


def read(path: Path, **options: Any) -> list[Any]:
    fields = {"x": "x"}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=16, device="cpu", **options) as it:
        return [values.copy() for batch in it for values in batch.x]


def expected(path: Path) -> list[Any]:
    with h5py.File(path) as file:
        values = list(file["x"][()])
    return [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for v in values]


def write(path: Path, dtype: Any, values: list[Any], **storage: Any) -> None:
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (COUNT,), dtype, chunks=(8,), maxshape=(999,), **storage)
        for i, value in enumerate(values):
            data[i] = value


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("index_cache", [False, True])
@pytest.mark.parametrize(
    ("dtype", "values"), [(h5py.vlen_dtype("i4"), VALUES), (h5py.string_dtype(), TEXTS)]
)
def test_shuffle_which_hdf5_passes_over(tmp_path, dtype, values, compression, index_cache):
    path = tmp_path / "a.h5"
    write(path, dtype, values, compression=compression, shuffle=True)
    with h5py.File(path) as file:
        assert file["x"].shuffle
    options = {"index_cache": tmp_path if index_cache else False}
    for _ in range(2):  # the second time by the saved index
        found = read(path, **options)
        assert all(map(np.array_equal, found, expected(path)))
        assert len(found) == COUNT


EDGE_FILTERS = {
    "gzip": (h5z.FILTER_DEFLATE,),
    "lzf": (h5z.FILTER_LZF,),
    "shuffle and gzip": (h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE),
}


def plist_of(chunks: tuple[int, ...], filters: tuple[int, ...]) -> h5p.PropDCID:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_chunk(chunks)
    for number in filters:
        plist.set_filter(number, h5z.FLAG_OPTIONAL, (4,) * (number == h5z.FILTER_DEFLATE))
    return plist


def test_a_filter_in_the_pipeline_that_no_chunk_was_written_with(tmp_path):
    """Where it was left out of all chunks, there is nothing to undo."""
    plugins = pytest.importorskip("hdf5plugin")
    path = tmp_path / "a.h5"
    values = np.arange(40, dtype="f4").reshape(10, 4)
    with h5py.File(path, "w") as file:
        for name in ("x", "y", "z"):
            file.create_dataset(name, (10, 4), "f4", chunks=(5, 4), compression=plugins.Zfp())
        file["y"][...] = values
        for name, first in (("x", 0), ("x", 5), ("y", 0)):
            left_out = values[first : first + 5].tobytes()
            file[name].id.write_direct_chunk((first, 0), left_out, 1)
    fields = {name: name for name in ("x", "y", "z")}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=10, device="cpu") as reader:
        ways = [layout.fallback_reason for layout in reader.layouts.values()]
        assert ways == [None] * 3
        batch = reader.get_next_batch()
        with h5py.File(path) as file:
            for name in fields:
                assert np.array_equal(batch[name], file[name])
        assert np.array_equal(batch.x, values)


@pytest.mark.parametrize("filters", EDGE_FILTERS.values(), ids=EDGE_FILTERS)
def test_references_in_chunks_at_the_edge_that_are_not_filtered(tmp_path, filters):
    path = tmp_path / "a.h5"
    plist = plist_of((8,), filters)
    flag = ctypes.c_uint(DONT_FILTER_PARTIAL_CHUNKS)
    assert HDF5.H5Pset_chunk_opts(ctypes.c_int64(plist.id), flag) >= 0
    with h5py.File(path, "w", libver="latest") as file:
        of_vlen = h5t.vlen_create(h5t.STD_I32LE)
        h5d.create(file.id, b"x", of_vlen, h5s.create_simple((COUNT,)), dcpl=plist)
        for i, value in enumerate(VALUES):
            file["x"][i] = value
    found = read(path, index_cache=False)
    assert all(map(np.array_equal, found, expected(path)))
    assert len(found) == COUNT
