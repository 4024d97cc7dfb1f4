"""In the order of the file, each chunk is decoded once, also where chunks split rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_epoch_is, assert_same_bits

from h5async import AsyncReader, Field
from h5async.config import ReaderConfig
from h5async.fill import resident
from h5async.index.metadata import read_layouts
from h5async.order.rows import StepRows

GZIP = {"compression": "gzip", "compression_opts": 1}
# By name: the shape, the chunks, and the sample dimension.
SPLIT: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "rows in 6 chunks": ((960, 6, 7), (8, 4, 3), 0),
    "rows in 6 chunks, cut short": ((955, 6, 7), (8, 4, 3), 0),
    "samples in the middle": ((7, 960, 3), (3, 8, 2), 1),
    "chunks of many rows": ((2000, 6, 2), (190, 3, 1), 0),
    "chunks of two rows": ((960, 64, 64), (2, 32, 64), 0),
}


@pytest.fixture(autouse=True)
def _nothing_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)


def write(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], seed: int = 0) -> Any:
    values = np.random.default_rng(seed).integers(0, 1000, shape).astype("i4")
    with h5py.File(path, "a") as file:
        file.create_dataset("data", data=values, chunks=chunks, **GZIP)
    return values


def num_chunks(*paths: Path) -> int:
    total = 0
    for path in paths:
        with h5py.File(path) as file:
            total += file["data"].id.get_num_chunks()
    return total


def assert_decoded_once(reader: AsyncReader, *paths: Path) -> None:
    """Assert that each chunk was decoded once; of several threads, that nearly all of them were.

    A thread that the system stops in between may find a chunk gone, as others go on.
    """
    decoded, due = reader.stats().decoded_chunks, num_chunks(*paths)
    assert due <= decoded <= (1.25 * due if reader.config.num_threads > 1 else due)


def open_reader(path: Any, **options: Any) -> AsyncReader:
    options = {"labels_field": None, "batch_size": 6, "device": "cpu", "timeout": 60, **options}
    return AsyncReader(hdf5_path=path, **options)


def read_exactly_an_epoch(reader: AsyncReader) -> list[Any]:
    """Read an epoch, and nothing of the one that follows."""
    for _ in range(len(reader)):
        reader.fetch_data()
    return [reader.get_next_batch().copy() for _ in range(len(reader))]


@pytest.mark.slow
@each("num_threads", [0, 1, 3, 8])
@each("batch_size", [1, 6, 23])
@pytest.mark.parametrize("name", SPLIT)
def test_each_chunk_is_decoded_once(
    tmp_path: Path, name: str, batch_size: int, num_threads: int
) -> None:
    path, (shape, chunks, axis) = tmp_path / "f.h5", SPLIT[name]
    expected = np.moveaxis(write(path, shape, chunks), axis, 0)
    options = {"num_dim": axis, "batch_size": batch_size, "num_threads": num_threads}
    with open_reader(path, **options) as reader:
        batches = read_exactly_an_epoch(reader)
        assert_decoded_once(reader, path)
    assert_same_bits(np.concatenate([batch.data for batch in batches]), expected)


def test_chunks_of_batches_that_have_more_of_them_than_are_kept(tmp_path: Path) -> None:
    write(path := tmp_path / "f.h5", (320, 16, 16), (2, 8, 16))
    for num_threads, batch_size in itertools.product((0, 2), (9, 33)):
        with open_reader(path, batch_size=batch_size, num_threads=num_threads) as reader:
            read_exactly_an_epoch(reader)
            assert_decoded_once(reader, path)


@each("num_threads", [0, 2])
def test_of_several_files(tmp_path: Path, num_threads: int) -> None:
    paths = [tmp_path / f"{number}.h5" for number in range(3)]
    expected = np.concatenate(
        [write(path, (100 + n, 6, 7), (8, 4, 3), n) for n, path in enumerate(paths)]
    )
    with open_reader(paths, num_threads=num_threads) as reader:
        assert_epoch_is(reader, expected)
    with open_reader(paths, num_threads=num_threads) as reader:
        read_exactly_an_epoch(reader)
        assert_decoded_once(reader, *paths)


@each("num_threads", [0, 2])
@pytest.mark.parametrize("steps", [range(-19, 1), (-100, 0), (0, 3, 60)], ids=str)
@pytest.mark.parametrize("chunks", [(8, 4, 3), (8, 6, 7), (1, 6, 7), (1, 4, 3)])
def test_rows_of_several_steps(tmp_path: Path, chunks: Any, steps: Any, num_threads: int) -> None:
    """What a batch reaches back to was decoded for the one before."""
    path = tmp_path / "f.h5"
    expected = write(path, (300, 6, 7), chunks)
    field = Field("data", steps=steps, pad="edge")
    with open_reader(path, fields={"data": field}, num_threads=num_threads) as reader:
        batches = read_exactly_an_epoch(reader)
        assert_decoded_once(reader, path)
    rows = np.clip(np.arange(300)[:, None] + np.array(steps), 0, 299)
    assert_same_bits(np.concatenate([batch.data for batch in batches]), expected[rows])


@each("num_threads", [0, 2])
@each("shuffle", [False, "window"])
@pytest.mark.parametrize("chunks", [(3, 8, 6, 7), (3, 8, 4, 3)])
def test_steps_of_sequences_that_share_chunks(
    tmp_path: Path, chunks: Any, shuffle: Any, num_threads: int
) -> None:
    path = tmp_path / "f.h5"
    expected = write(path, (12, 20, 6, 7), chunks)
    field = Field("data", num_dim=(0, 1), steps=range(-2, 1), pad="edge")
    options = {"fields": {"data": field}, "shuffle": shuffle, "num_threads": num_threads}
    with open_reader(path, **options, prefetch=1) as reader:
        batches = read_exactly_an_epoch(reader)
        assert_decoded_once(reader, path)
    for batch in batches:
        sequence, step = batch.index // 20, batch.index % 20
        rows = np.clip(step[:, None] + np.arange(-2, 1), 0, None)
        assert_same_bits(batch.data, expected[sequence[:, None], rows])


@each("num_threads", [0, 8])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_some_samples(tmp_path: Path, step: int, num_threads: int) -> None:
    path = tmp_path / "f.h5"
    expected = write(path, (2000, 6, 7), (16, 4, 3))
    options = {"indices": slice(3, None, step), "batch_size": 30, "num_threads": num_threads}
    with open_reader(path, **options) as reader:
        batches = read_exactly_an_epoch(reader)
        assert_decoded_once(reader, path)
    assert_same_bits(np.concatenate([batch.data for batch in batches]), expected[3::step])


def wanted(path: Path, rows: Any = (), selected: float = 1.0, **options: Any) -> int:
    config = ReaderConfig(hdf5_path=path, labels_field=None, num_threads=2, **options)
    layouts = read_layouts(path, {"data": Field("data", num_dim=config.num_dim)})
    (nbytes,) = resident.wanted_kept_nbytes(config, layouts, rows, selected)
    return nbytes


def test_what_is_kept(tmp_path: Path) -> None:
    split, whole, single = (tmp_path / f"{name}.h5" for name in ("split", "whole", "single"))
    write(split, (960, 6, 7), (8, 4, 3))
    write(whole, (960, 6, 7), (8, 6, 7))
    write(single, (960, 6, 7), (1, 4, 3))
    group, chunk = 6 * (8 * 4 * 3 * 4 + 128), 8 * 4 * 3 * 4 + 128
    odd = {"batch_size": 65}
    assert wanted(split, **odd) == 4 * group + 2 * chunk
    assert wanted(split, **odd, window_bytes=2 * 6 * 384) == 2 * group, "never more than a window"
    assert wanted(split, **odd, window_bytes=6 * 384) == 0, "which would be of no use"
    assert wanted(split, batch_size=30) == 12 * group + 2 * chunk, "threads share groups of these"
    assert wanted(split, batch_size=10, selected=0.5) == 9 * group + 2 * chunk
    assert wanted(split, batch_size=64) == 0, "no two batches share a chunk"
    assert wanted(split, batch_size=64, selected=0.5) == 4 * group + 2 * chunk
    assert wanted(single, **odd) == 0
    assert wanted(whole, **odd) == 0, "two chunks are kept in any case"
    for mixed in {"shuffle": True}, {"weights": [1.0] * 960}, {"sampler": [1, 2]}:
        assert wanted(split, **odd, **mixed) == 0, mixed


def test_how_far_steps_reach() -> None:
    none = np.zeros(0, np.int64)
    for steps, rows in (
        ((0,), 0),
        (tuple(range(-19, 1)), 19),
        ((-19, 0), 37),
        ((3, -6, 0, 3), 14),
    ):
        assert resident._reach(StepRows(steps, "edge", none, none)) == rows, steps
    assert resident._reach(None) == 0
