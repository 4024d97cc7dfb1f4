"""Any layouts come back out of a saved index as they were; a changed one does no harm."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_saved_index import assert_same, make, rewrite, rows_of, save, saved_content, virtual

from h5async import H5AsyncError
from h5async.codec.filters import Filter
from h5async.config import Field
from h5async.index.changes import fingerprint
from h5async.index.composition import Part, with_parts
from h5async.index.layout import DatasetLayout, Indexed
from h5async.index.links import Consulted, Reach
from h5async.index.savedindex import IndexedFile, SavedIndex, Wanted, write_index
from h5async.index.tables import Blocks, ChunkTable, Piece, Slab, grid_of
from h5async.io.source import FileStamp

PIPELINES = [(), (Filter(2, (4,), "shuffle"), Filter(1, (4,), "deflate")), (Filter(3, (), ""),)]
DTYPES = [
    "<f4",
    ">i8",
    "|b1",
    "|u1",
    "|S5",
    "<c8",
    [("a", "<f4"), ("b", "|S3", (2,))],
    {"names": ["x"], "formats": ["<i2"], "offsets": [5], "itemsize": 12},
]
NAMES = st.sampled_from(["data", "groß/é", "a/b/\udcff", "x" * 300])


@st.composite
def layouts(draw: st.DrawFn, depth: int = 2) -> DatasetLayout:
    """Return the layout of a dataset that lies in a file of 1 GB, or in others."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    fill = np.frombuffer(draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)), dtype)
    common = DatasetLayout(
        file=f"/nowhere/{draw(st.integers(0, 3))}.h5",
        stamp=FileStamp(2**63 + 5, 2**64 - 1, 1 << 30, draw(st.integers(-5, 1 << 60)), 7),
        path=draw(NAMES),
        shape=shape,
        dtype=dtype,
        sample_axis=0,
        storage="contiguous",
        fallback_reason=draw(st.sampled_from([None, "because"])),
        fill=fill.reshape(()),
        stored_nbytes=draw(st.integers(0, 1 << 40)),
        member=draw(st.sampled_from([(), ("a", "b")])),
        stored_itemsize=dtype.itemsize,
        has_raw_edges=draw(st.booleans()),
        indexed=draw(st.sampled_from([None, Indexed(b"0123456789abcdef", shape)])),
    )
    kinds = ["contiguous", "chunked", "compact", "attached", *(["virtual"] if depth else [])]
    kind = draw(st.sampled_from(kinds))
    return {
        "contiguous": _contiguous,
        "chunked": _chunked,
        "compact": _compact,
        "attached": _attached,
        "virtual": _virtual,
    }[kind](draw, common, depth)


def _contiguous(draw: st.DrawFn, layout: DatasetLayout, _: int) -> DatasetLayout:
    return _replace(layout, offset=draw(st.integers(-1, (1 << 30) - layout.nbytes)))


def _chunked(draw: st.DrawFn, layout: DatasetLayout, _: int) -> DatasetLayout:
    chunk_shape = tuple(draw(st.integers(1, 9)) for _ in layout.shape)
    filters = draw(st.sampled_from(PIPELINES))
    total = math.prod(grid_of(layout.shape, chunk_shape))
    numbers = np.array(sorted(draw(st.sets(st.integers(0, total - 1)))), np.int64)
    if draw(st.booleans()):
        numbers = np.arange(total)
    whole = math.prod(chunk_shape) * layout.dtype.itemsize
    most = 1 if draw(st.booleans()) else 3
    nbytes = np.array([draw(st.integers(1, most)) if filters else whole for _ in numbers], np.int64)
    order = draw(st.permutations(range(numbers.size)))
    places = np.cumsum(np.append(48, nbytes[list(order)]))[:-1]
    offset = np.empty_like(nbytes)
    offset[list(order)] = places
    masks = st.integers(0, (1 << 32) - 1) if draw(st.booleans()) else st.just(0)
    chunks = ChunkTable(
        None if numbers.size == total else numbers,
        offset,
        nbytes,
        np.array([draw(masks) for _ in numbers], np.uint32),
    )
    return _replace(
        layout,
        storage="chunked",
        fallback_reason=None,
        chunk_shape=chunk_shape,
        filters=filters,
        chunks=chunks,
    )


def _compact(draw: st.DrawFn, layout: DatasetLayout, _: int) -> DatasetLayout:
    data = draw(st.binary(min_size=layout.nbytes, max_size=layout.nbytes))
    values = np.frombuffer(data, layout.raw_dtype).reshape(layout.shape)
    return _replace(layout, storage="compact", values=values)


def _attached(draw: st.DrawFn, layout: DatasetLayout, _: int) -> DatasetLayout:
    files = tuple((f"/raw/{i}", FileStamp(1, i, i)) for i in range(draw(st.integers(1, 3))))
    return _replace(layout, storage="external", fallback_reason="why", attached=files)


def _virtual(draw: st.DrawFn, layout: DatasetLayout, depth: int) -> DatasetLayout:
    sources = tuple(draw(layouts(depth - 1)) for _ in range(draw(st.integers(1, 2))))
    parts: list[Part] = []
    taken: set[int] = set()
    for source in draw(st.lists(st.sampled_from(sources), max_size=3)):
        row_shape = source.row_shape
        if layout.row_shape != row_shape and math.prod(row_shape) != 1:
            continue
        if math.prod(layout.row_shape) != math.prod(row_shape):
            continue
        count = min(layout.num_samples, source.num_samples)
        samples = draw(selections(layout.num_samples, count))
        numbers = set(samples.at(np.arange(samples.size)).tolist())
        if numbers & taken:
            continue
        taken |= numbers
        parts.append(
            Part(
                source,
                samples,
                draw(selections(source.num_samples, samples.size)),
                Piece(*_regions(row_shape, layout)),
            )
        )
    return with_parts(_replace(layout, storage="virtual", sources=sources), parts)


def _regions(row_shape: tuple[int, ...], layout: DatasetLayout) -> tuple[Any, Any]:
    if row_shape != layout.row_shape or not row_shape:
        return None, None
    region = tuple(slice(0, extent, None if i % 2 else 1) for i, extent in enumerate(row_shape))
    return region, region


@st.composite
def selections(draw: st.DrawFn, extent: int, size: int) -> Slab | Blocks:
    """Return a selection of some indices of a dimension."""
    if draw(st.booleans()) or size < 2:
        return Slab.run(extent - size, extent)
    if extent >= 2 * size - 1 and draw(st.booleans()):
        return Slab(0, 2, size, 1)
    first = np.array([*range(1, size), 0], np.int64)
    return Blocks(first, np.arange(size + 1, dtype=np.int64))


def _replace(layout: DatasetLayout, **members: Any) -> DatasetLayout:
    found = copy.copy(layout)
    found.__dict__.update(members)
    return found


@pytest.mark.slow
@given(several=st.lists(layouts(), min_size=1, max_size=5), data=st.data())
def test_layouts_come_back_as_they_were(several, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x.h5idx"
    files = []
    for number, layout in enumerate(several):
        consulted = Consulted()
        consulted.found(Path("/nowhere/0.h5"), FileStamp(1, number, 1 << 30))
        known = {Wanted(f"d{k}", k): layout for k in range(data.draw(st.integers(1, 2)))}
        files.append(IndexedFile("/nowhere/0.h5", known, consulted))
    write_index(path, files, Reach())
    index = SavedIndex(
        path, Reach(io=data.draw(st.sampled_from(("auto", "pread")))), (os.geteuid(),)
    )
    for number, layout in enumerate(several):
        found = index.find(number, index.datasets(number))
        assert found.keys() == files[number].layouts.keys()
        for other in found.values():
            assert_same(layout, other)
            assert fingerprint([other]) == fingerprint([layout])


# --- indices that are whole, and say something else ----------------------------------------------


NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, 1 << 70, True, 1.5)
OTHERS = (None, "", "x", "data", [], {}, [[]], [0], "O", "f8", "|V0", {"names": [], "formats": []})
ODD = st.sampled_from((*NUMBERS, *OTHERS, "/etc/passwd"))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all places in what JSON holds: container and key."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if isinstance(inner, list | dict):
            found += places(inner)
    return found


@pytest.fixture(scope="module")
def indices(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save indices of a chunked, a contiguous and a virtual dataset."""
    found = []
    for name in ("chunked", "contiguous", "virtual"):
        folder = tmp_path_factory.mktemp(name)
        paths = [make(folder / f"{i}.h5", i, chunks=4 if i % 2 else None) for i in range(2)]
        if name == "virtual":
            paths = [virtual(folder / "whole.h5", *paths)]
        found.append(save(folder, *paths, fields={"data": Field("data")}))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::h5async.FileChangedWarning")
@given(data=st.data())
def test_a_changed_index_is_refused_or_read(data, indices):
    index = data.draw(st.sampled_from(indices))
    header, arrays = saved_content(index)
    header = {name: found for name, found in header.items() if name not in ("arrays", "checksum")}
    arrays = {name: np.array(array) for name, array in arrays.items()}
    original = index.read_bytes()
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()):
            container, key = data.draw(st.sampled_from(places(header)))
            container[key] = copy.deepcopy(data.draw(ODD))
        else:
            array = arrays[data.draw(st.sampled_from([n for n in arrays if arrays[n].size]))]
            flat = array.reshape(-1)
            odd = data.draw(st.sampled_from([0, 1, -1, -2, 5, 1000, 1 << 20, 1 << 40, 1 << 62]))
            flat[data.draw(st.integers(0, flat.size - 1))] = np.int64(odd).astype(flat.dtype)
    try:
        rewrite(index, header, arrays)
        for options in ({}, {"num_threads": 1}):
            with contextlib.suppress(H5AsyncError):
                rows_of(index, max_batch_bytes=1 << 24, **options)
    finally:
        index.write_bytes(original)


# --- kinds that say what no dataset is -----------------------------------------------------------


def content_of(index: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a saved index holds, as a copy to change."""
    header, arrays = copy.deepcopy(saved_content(index))
    return header, {name: np.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize("address", [0, 48, 1 << 40, (1 << 63) - 1])
def test_chunks_without_a_table_are_refused(tmp_path, address):
    path = make(tmp_path / "a.h5", 0, chunks=4)
    index = save(tmp_path, path, fields={"data": Field("data")})
    header, arrays = content_of(index)
    header["kinds"][0]["has_chunks"] = False
    arrays["begin"][:], arrays["address"][:] = 0, address
    empty = {name: arrays[name][:0] for name in ("offset", "nbytes", "mask")}
    rewrite(index, header, arrays | empty)
    with pytest.raises(H5AsyncError, match="chunks have no table"):
        rows_of(index)


def test_compact_values_in_chunks_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((8, 3))
        compact = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, plist)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(24, dtype="i4").reshape(8, 3))
    index = save(tmp_path, path, fields={"data": Field("data")})
    header, arrays = content_of(index)
    header["kinds"][0].update(chunk_shape=[1000, 1000], has_chunks=True)
    arrays["is_sparse"][:] = 1
    rewrite(index, header, arrays)
    with pytest.raises(H5AsyncError, match="values of the index lie in chunks"):
        rows_of(index)


@pytest.mark.parametrize("rows", [1 << 62, (1 << 63) - 1])
def test_more_rows_than_can_be_counted_are_refused(tmp_path, rows):
    paths = [tmp_path / f"{i}.h5" for i in range(2)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file.create_dataset("data", (40, 3), "i4", chunks=(4, 3))[:20] = 1
    index = save(tmp_path, *paths, fields={"data": Field("data")})
    header, arrays = content_of(index)
    arrays["rows"][1] = rows
    rewrite(index, header, arrays)
    with pytest.raises(H5AsyncError, match="more rows than can be counted"):
        rows_of(index)
