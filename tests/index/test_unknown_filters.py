"""Filters that h5async does not know, in pipelines and in masks of chunks."""

from __future__ import annotations

import ctypes
import zlib

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_reads_like_h5py, reader_of
from corpus import DONT_FILTER_PARTIAL_CHUNKS, HDF5
from hdf5files import type_for_h5py

from h5async import (
    DatasetError,
    ReadError,
)

NOBODYS = 511


def file_with_a_filter_of_nobodys(path, masks, *, deflate=False, fill=None, stored="<i4", cut=0):
    """Write chunks of (4, 3) with the given filter masks; None: not written."""
    dtype = np.dtype(stored) if isinstance(stored, str) else stored
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 3))
    plist.set_filter(NOBODYS, h5py.h5z.FLAG_OPTIONAL, (1,))
    if deflate:
        plist.set_deflate(1)
    if fill is not None:
        plist.set_fill_value(np.array(fill, dtype))
    with h5py.File(path, "w") as file:
        kind = h5py.h5t.py_create(dtype) if isinstance(stored, str) else stored
        space = h5py.h5s.create_simple((10, 3))
        dataset = h5py.h5d.create(file.id, b"data", kind, space, plist)
        for number, mask in enumerate(masks):
            values = (np.arange(12, dtype="<i4") + 100 * number).tobytes()
            values = values[: len(values) - cut]
            if deflate and not mask & 2:
                values = zlib.compress(values)
            if mask is not None:
                dataset.write_direct_chunk((4 * number, 0), values, filter_mask=mask)


@each("num_threads", [0, 2])
@each(
    "masks, options",
    [
        ([], {}),
        ([], {"fill": 7}),
        ([1, 1, 1], {}),
        ([1, None, 1], {"fill": 7}),
        ([1, 1, 1], {"deflate": True}),
        ([3, 1, 3], {"deflate": True}),
        ([3, 3, 3], {"deflate": True}),
    ],
)
def test_a_filter_that_no_chunk_was_written_with(path, masks, options, num_threads):
    file_with_a_filter_of_nobodys(path, masks, **options)
    assert_reads_like_h5py(path, num_threads=num_threads)
    assert_reads_like_h5py(path, num_threads=num_threads, io="pread", batch_size=5)


def test_a_filter_that_no_chunk_was_written_with_is_no_matter_to_the_core(core, path):
    file_with_a_filter_of_nobodys(path, [3, 1, 3], deflate=True)
    with reader_of(path) as reader:
        reader.get_next_batch()
        assert reader.stats().ways == {"data": "core"}


def test_a_filter_that_no_chunk_was_written_with_where_h5py_reads(path):
    stored = h5py.h5t.STD_I32LE.copy()
    stored.set_precision(17)
    file_with_a_filter_of_nobodys(path, [1, 1, 1], stored=stored)
    assert_reads_like_h5py(path, fallback="filters that are not decoded")
    file_with_a_filter_of_nobodys(path, [1, 1, 1], stored=type_for_h5py().id)
    assert_reads_like_h5py(path, fallback="its stored type differs")
    file_with_a_filter_of_nobodys(path, [1, 1, 1])
    with h5py.File(path, "r+"):
        assert_reads_like_h5py(path, fallback="open for writing")


def test_a_filter_that_no_chunk_was_written_with_in_a_virtual_dataset(path):
    file_with_a_filter_of_nobodys(path, [1, 1, 1])
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((10, 3), "<i4")
        layout[...] = h5py.VirtualSource(".", "data", (10, 3))
        file.create_virtual_dataset("virtual", layout)
    assert_reads_like_h5py(path, "virtual")


@pytest.mark.parametrize("kind", ["plain", "of h5py's"])
def test_a_filter_that_one_chunk_was_written_with(path, kind):
    stored: object = "<i4"
    if kind != "plain":
        stored = h5py.h5t.STD_I32LE.copy()
        stored.set_precision(17)
    file_with_a_filter_of_nobodys(path, [1, 1, 0], stored=stored)
    with pytest.raises(DatasetError, match=f'"data" is compressed with filter {NOBODYS}'):
        reader_of(path)


def test_a_chunk_without_filters_of_another_length(path):
    file_with_a_filter_of_nobodys(path, [1, 1, 1], cut=4)
    with pytest.raises(ReadError, match="expected 48 bytes, got 44"):
        reader_of(path)


def test_masks_stay_as_they_are_where_every_filter_is_known(path):
    """Saved states hold what becomes of them."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", (8,), "<i4", chunks=(4,), compression="gzip")
        for number, mask in enumerate([0xFFFFFFFF, 0x101]):
            dataset.id.write_direct_chunk((4 * number,), bytes(16), filter_mask=mask)
    with reader_of(path) as reader:
        layout = reader.layouts["data"]
        assert layout.chunks.filter_mask.tolist() == [0xFFFFFFFF, 0x101]
        assert [entry.label for entry in layout.filters] == ["deflate"]


def test_edge_chunks_that_were_not_filtered(path):
    """Their mask says that they were."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4,))
    plist.set_filter(NOBODYS, h5py.h5z.FLAG_OPTIONAL, (1,))
    options = ctypes.c_int64(plist.id), ctypes.c_uint(DONT_FILTER_PARTIAL_CHUNKS)
    assert HDF5.H5Pset_chunk_opts(*options) >= 0
    with h5py.File(path, "w", libver="latest") as file:
        space = h5py.h5s.create_simple((3,), (h5py.h5s.UNLIMITED,))
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.STD_I32LE, space, plist)
        dataset.write_direct_chunk((0,), np.arange(4, dtype="<i4").tobytes())
    assert_reads_like_h5py(path)
