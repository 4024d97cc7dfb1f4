"""Sizes are checked before memory is taken, whatever would take it, and little is held to check."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, truth
from hdf5files import type_for_h5py

import h5async.index.virtual
import h5async.read.fallback
from h5async import AsyncReader, ConfigError, Field, ReadError
from h5async.index.hdf5 import NotDirectError
from h5async.index.tables import Slab

KIB, MIB = 1024, 1024 * 1024


def open_reader(path: Path, **options: Any) -> AsyncReader:
    return AsyncReader(
        hdf5_path=path, labels_field=None, device="cpu", num_threads=1, prefetch=1, **options
    )


def peak_nbytes(path: Path, **options: Any) -> int:
    """Return what a reader and its first batch take at most."""
    tracemalloc.start()
    try:
        with open_reader(path, **options) as reader:
            reader.get_next_batch()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refusal(path: Path, limit: int, **options: Any) -> str:
    """Return the error, after which little was taken, and which a higher limit does away with."""
    with pytest.raises(ConfigError, match="max_batch_bytes"):
        open_reader(path, max_batch_bytes=limit, **options)  # imports what is imported late
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="max_batch_bytes") as caught:
            open_reader(path, max_batch_bytes=limit, **options)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    return str(caught.value)


def map_columns(path: Path, source: Path, shape: tuple[int, int], *starts: int) -> None:
    """Write a virtual dataset: from each start 3 columns of the source, one column apart."""
    layout = h5py.VirtualLayout(shape=(shape[0], len(starts) + 2), dtype="u1")
    columns = h5py.VirtualSource(source, "x", shape=shape)
    for i, start in enumerate(starts):
        layout[:, i : i + 3] = columns[:, start : start + 3]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)


# --- what is refused -----------------------------------------------------------------------------


def test_chunks_of_sources_that_h5py_reads(tmp_path: Path) -> None:
    path, source, shape = tmp_path / "a.h5", tmp_path / "source.h5", (64, 64 * KIB)
    with h5py.File(source, "w") as file:
        file.create_dataset("x", shape, "u1", chunks=shape, compression="gzip")
    map_columns(path, source, shape, 0, 5)  # they overlap
    text = refusal(path, 4 * MIB - 1, batch_size=4)
    for part in (
        str(source),
        '"x"',
        f"{shape} decodes to 4,194,304 bytes, more than the 4,194,303",
    ):
        assert part in text
    with open_reader(path, max_batch_bytes=4 * MIB, batch_size=4) as reader:
        assert "overlap" in str(reader.layouts["data"].fallback_reason)
        reader.get_next_batch()


def test_chunks_of_compounds_that_h5py_reads(tmp_path: Path) -> None:
    """One member is wanted, and all are decoded."""
    path = tmp_path / "a.h5"
    compound = np.dtype([("small", "u1"), ("large", "S65535")])
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (64,), compound, chunks=(64,), compression="gzip")
        layout = h5py.VirtualLayout(shape=(64,), dtype=compound)
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("data", layout)
    fields = {"data": Field("data/small")}
    text = refusal_of_fields(path, fields, 4 * MIB - 1)
    assert "decodes to 4,194,304 bytes, more than the 4,194,303" in text


def refusal_of_fields(path: Path, fields: dict[str, Field], limit: int) -> str:
    with pytest.raises(ConfigError) as caught:
        AsyncReader(hdf5_path=path, fields=fields, device="cpu", max_batch_bytes=limit).close()
    return str(caught.value)


@pytest.mark.parametrize("io", ["pread", "map"])
def test_raw_chunks_that_are_held_whole(tmp_path: Path, io: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (2 * KIB, 2 * KIB), "u1", chunks=(2 * KIB, 2 * KIB))[0] = 1
    options = {"batch_size": 4, "io": io}
    text = refusal(path, 4 * MIB - 1, num_dim=1, **options)
    assert "is held whole and has 4,194,304 bytes, more than the 4,194,303" in text
    assert "first dimension" in text
    open_reader(path, max_batch_bytes=4 * MIB, num_dim=1, **options).close()
    open_reader(path, max_batch_bytes=8 * KIB, **options).close()  # samples are read alone


def test_large_rows_of_which_little_is_wanted(tmp_path: Path) -> None:
    path, source, shape = tmp_path / "a.h5", tmp_path / "source.h5", (8, 4 * MIB)
    with h5py.File(source, "w") as file:
        file.create_dataset("x", shape, "u1", chunks=(1, 4 * MIB))
    map_columns(path, source, shape, 0)
    for io in "auto", "pread":  # which reads the pieces alone
        with open_reader(path, max_batch_bytes=MIB, batch_size=4, io=io) as reader:
            batch = reader.get_next_batch()
            assert_same_bits(batch.data, truth(path)[batch.index])


@pytest.mark.parametrize("shuffle", [True, "window"])
def test_samples_of_very_many_chunks(tmp_path: Path, shuffle: bool | str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (4, 100_000), "u1", chunks=(1, 1), compression="gzip")
    text = refusal(path, 8 * MIB, batch_size=2, shuffle=shuffle)
    assert "a sample of shape (100000,) lies in 100,000 chunks of shape (1, 1)" in text
    limit = 40 * MIB
    assert peak_nbytes(path, batch_size=2, shuffle=shuffle, max_batch_bytes=limit) <= limit + MIB


# --- what is read apart --------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}])
def test_few_samples_of_large_chunks_that_h5py_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]
) -> None:
    """Of a raw chunk only what is wanted, about, is read; a filtered one is decoded once."""
    path = tmp_path / "a.h5"
    count, chunk = 40_000, 10_000
    with h5py.File(path, "w") as file:
        storage = {"chunks": (chunk,), "compression": "gzip" if filters else None}
        kind = type_for_h5py(31)
        file.create_dataset("data", data=np.arange(count), dtype=kind, **storage)
    spans = []
    inner = h5async.read.h5pyrows._spans

    def note(*arguments: Any) -> Any:
        found = list(inner(*arguments))
        spans.append([end - first for first, end, _ in found])
        return found

    monkeypatch.setattr(h5async.read.h5pyrows, "_spans", note)
    monkeypatch.setattr(h5async.read.h5pyrows, "_SPAN_NBYTES", 1000 * 4)
    with open_reader(path, batch_size=100, shuffle=True) as reader:
        assert "NumPy" in str(reader.layouts["data"].fallback_reason)
        batch = reader.get_next_batch()
        assert_same_bits(batch.data, truth(path)[batch.index])
    if filters:
        assert len(spans[0]) == count // chunk
    else:
        assert max(spans[0]) <= 1000
        assert len(spans[0]) <= 40


def test_a_chunk_that_is_wanted_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (64, 8), "u1", chunks=(64, 8))
    monkeypatch.setattr(h5async.read.h5pyrows, "_SPAN_NBYTES", 1)
    with open_reader(path, batch_size=4) as reader:
        layout = reader.layouts["data"]
    spans = list(h5async.read.h5pyrows._spans(layout, np.arange(64)))
    assert [(first, end) for first, end, _ in spans] == [(0, 64)]
    every_second = list(h5async.read.h5pyrows._spans(layout, np.arange(0, 64, 2)))
    assert [(first, end) for first, end, _ in every_second] == [(0, 63)]


# --- which samples are held by several mappings ---------------------------------------------------


def held_twice(slabs: list[Slab], extent: int) -> bool:
    held = np.zeros(extent, int)
    for slab in slabs:
        np.add.at(held, slab.at(np.arange(slab.size)), 1)
    return bool((held > 1).any())


def test_selections_that_share_an_index() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        slabs = []
        for _ in range(rng.integers(1, 5)):
            stride = int(rng.integers(1, 9))
            block = int(rng.integers(1, stride + 1))
            slabs.append(Slab(int(rng.integers(0, 40)), stride, int(rng.integers(0, 6)), block))
        found.append(h5async.index.virtual._have_common(slabs))
        assert found[-1] == held_twice(slabs, 100), slabs
    assert 500 < sum(found) < 1500


def test_very_many_blocks_of_mappings_are_left_to_h5py() -> None:
    slabs = [Slab(0, 2, 1 << 40, 1), Slab(1, 2, 1 << 40, 1)]  # 16 TiB of numbers
    with pytest.raises(NotDirectError, match="more than 1048576 blocks"):
        h5async.index.virtual._have_common(slabs)


def test_virtual_datasets_of_very_many_samples(tmp_path: Path) -> None:
    """To find out whether mappings overlap takes no memory for each sample."""
    path, source, count = tmp_path / "a.h5", tmp_path / "source.h5", 40 * MIB
    with h5py.File(source, "w") as file:
        file.create_dataset("x", (count,), "u1", chunks=(MIB,))
    layout = h5py.VirtualLayout(shape=(count,), dtype="u1")
    layout[:] = h5py.VirtualSource(source, "x", shape=(count,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)
    with open_reader(path, batch_size=4) as reader:
        assert reader.layouts["data"].fallback_reason is None
    assert peak_nbytes(path, batch_size=4) < 4 * MIB


# --- what is checked of the sources that h5py reads -----------------------------------------------


@pytest.mark.slow
def test_only_written_chunks_of_sources_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source, shape = tmp_path / "a.h5", tmp_path / "source.h5", (50_000, 8)
    with h5py.File(source, "w") as file:
        dataset = file.create_dataset("x", shape, "u1", chunks=(5, 4), compression="gzip")
        dataset[2] = dataset[40_004] = 1
    map_columns(path, source, shape, 0, 5)
    checked, looked_up = [], []
    run, check_chunk = h5async.read.fallback.ChunkCheck.run, h5async.read.fallback.ChunkCheck._check

    def note_run(self: Any, dataset: Any, sample: Any, *rest: Any) -> None:
        checked.append(sample.tolist())
        run(self, dataset, sample, *rest)

    def note_chunk(self: Any, dataset: Any, corner: Any, *memory: Any) -> None:
        looked_up.append(corner)
        check_chunk(self, dataset, corner, *memory)

    monkeypatch.setattr(h5async.read.fallback.ChunkCheck, "run", note_run)
    monkeypatch.setattr(h5async.read.fallback.ChunkCheck, "_check", note_chunk)
    with open_reader(path, batch_size=40) as reader:
        assert "overlap" in str(reader.layouts["data"].fallback_reason)
        for _ in range(3):
            batch = reader.get_next_batch()
            assert_same_bits(batch.data, truth(path)[batch.index])
    assert checked == [[0, 40_000]]  # once
    assert looked_up == [(0, 0), (0, 4), (40_000, 0), (40_000, 4)]


def test_damaged_chunks_of_sources_stay_an_error(tmp_path: Path) -> None:
    path, source, shape = tmp_path / "a.h5", tmp_path / "source.h5", (100, 8)
    with h5py.File(source, "w") as file:
        dataset = file.create_dataset("x", shape, "u1", chunks=(5, 8), compression="gzip")
        dataset[50] = 1
        dataset.id.write_direct_chunk((50, 0), b"no deflate")
    map_columns(path, source, shape, 0, 5)
    with open_reader(path, batch_size=4) as reader:
        for _ in range(3):
            with pytest.raises(ReadError, match=r"chunk \(50, 0\)"):
                reader.get_next_batch()


def test_raw_chunks_of_sources_that_h5py_reads_are_not_held(tmp_path: Path) -> None:
    path, source, shape = tmp_path / "a.h5", tmp_path / "source.h5", (64, 64 * KIB)
    with h5py.File(source, "w") as file:
        file.create_dataset("x", shape, "u1", chunks=(64, 32 * KIB))
    map_columns(path, source, shape, 0, 5)
    with open_reader(path, max_batch_bytes=KIB, batch_size=4) as reader:
        assert "overlap" in str(reader.layouts["data"].fallback_reason)
        reader.get_next_batch()
