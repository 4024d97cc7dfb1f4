"""Readers with cache="disk": bytes of far files are fetched once, also by later readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, truth
from corpus import QUIRKS
from test_stores import names_another_file, written

from h5async import AsyncReader, ConfigError, ReaderConfig, ReadError
from h5async.config.files import Kept
from h5async.fill.phases import Phases
from h5async.io.diskcache import SUFFIX, disk_cache
from h5async.order.sampling import FillRequest

URL = "memory://bucket/a.h5"
READABLE = [name for name, quirk in QUIRKS.items() if quirk.way in ("direct", "h5py")]


def reader_of(source: Any, folder: Path, **options: Any) -> AsyncReader:
    disk_cache.cache_clear()  # as in another process
    given = {"labels_field": None, "device": "cpu", "batch_size": 7} | options
    return AsyncReader(hdf5_path=source, cache="disk", cache_dir=folder, **given)


def rows_file(path: Path, of_chunk: int = 3) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, 99, (100, 3000), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=rows, chunks=(of_chunk, 3000), compression="gzip")
        file["labels"] = np.arange(100)
    return rows


@pytest.mark.parametrize("name", READABLE)
def test_every_layout(name, store, tmp_path):
    quirk = QUIRKS[name]
    path = written(quirk, tmp_path)
    if names_another_file(path):
        pytest.skip("the files it names are not in the store")
    expected = truth(path, quirk.names[0], quirk.num_dims[0])
    url = store.put(path)
    options = {"data_field": quirk.names[0], "num_dim": quirk.num_dims[0], "index_cache": False}
    for turn in range(2):
        reads = store.reads
        with reader_of(url, tmp_path / "kept", **options) as reader:
            assert_epoch_is(reader, expected)
        assert turn == 0 or store.reads == reads, "the second reader has all near"
    with reader_of(path, tmp_path / "kept", **options) as reader:
        assert_epoch_is(reader, expected)


@pytest.mark.parametrize("options", [{}, {"num_threads": 0}])
def test_later_epochs(store, tmp_path, options):
    rows = rows_file(tmp_path / "a.h5")
    url = store.put(tmp_path / "a.h5", URL)
    with reader_of(url, tmp_path / "kept", shuffle="full", **options) as reader:
        for epoch in range(3):
            for batch in reader:
                assert np.array_equal(batch.data, rows[batch.index])
            if epoch == 0:
                reads = store.reads
        assert store.reads == reads
        cache = reader.stats().cache
    (path,) = (tmp_path / "kept").glob(f"*{SUFFIX}")
    assert cache.startswith("disk: ")
    assert cache.endswith(f"bytes in {tmp_path / 'kept'}")
    assert f" {path.stat().st_blocks * 512:,} of " in cache


def test_later_epochs_need_no_python(store, tmp_path, monkeypatch):
    rows = rows_file(tmp_path / "a.h5")
    url = store.put(tmp_path / "a.h5", URL)
    resumed: list[FillRequest] = []
    resume = Phases.resume
    monkeypatch.setattr(Phases, "resume", lambda *of: (resumed.append(of[1]), resume(*of))[1])
    for turn in range(2):
        with reader_of(url, tmp_path / "kept", shuffle="full", fetch_bytes=1) as reader:
            for _ in range(12):
                for batch in reader:
                    assert np.array_equal(batch.data, rows[batch.index])
            stats = reader.stats()
        last = max((request.epoch for request in resumed), default=0)
        assert last <= (9 if turn == 0 else 0), "only what was fetched ahead, or before it was open"
        assert (stats.requests > 0) == (turn == 0), "what is there is not asked for"
        resumed.clear()


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\1" * path.stat().st_size)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 5000), _overwritten])
@pytest.mark.parametrize("storage", [{}, {"chunks": (3, 3000), "compression": "gzip"}])
def test_a_mirror_that_is_spoiled(store, tmp_path, spoil, storage):
    rows = np.random.default_rng(0).integers(0, 99, (100, 3000), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=rows, **storage)
    url = store.put(tmp_path / "a.h5", URL)
    options = {"shuffle": "full", "fetch_bytes": 1}
    with reader_of(url, tmp_path / "kept", **options) as reader:
        (mirror,) = (tmp_path / "kept").glob(f"*{SUFFIX}")
        for epoch in range(4):
            for batch in reader:
                assert np.array_equal(batch.data, rows[batch.index])
            if epoch == 1 and spoil is not _overwritten:  # blocks are compared once
                spoil(mirror)
    for path in (tmp_path / "kept").glob(f"*{SUFFIX}"):
        spoil(path)
    with reader_of(url, tmp_path / "kept", **options) as reader:
        for _ in range(2):
            for batch in reader:
                assert np.array_equal(batch.data, rows[batch.index])
        assert reader.stats().requests > 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_chunks_that_are_spoiled_after_they_were_compared(store, tmp_path, on_error):
    rows = rows_file(tmp_path / "a.h5", 1)  # decoded anew for each batch
    url, kept = store.put(tmp_path / "a.h5", URL), tmp_path / "kept"
    with reader_of(url, kept, shuffle="full", fetch_bytes=1, on_error=on_error) as reader:
        for epoch in range(5):
            reads, seen = store.reads, 0
            for batch in reader:
                assert np.array_equal(batch.data, rows[batch.index])
                seen += len(batch.index)
            assert seen == 100
            if epoch == 1:
                (mirror,) = kept.glob(f"*{SUFFIX}")
                _overwritten(mirror)
        assert store.reads == reads, "they are kept again"


def test_local_files(tmp_path):
    path, kept = tmp_path / "a.h5", tmp_path / "kept"
    rows = rows_file(path)
    for turn in range(2):
        with reader_of(path, kept, shuffle="full") as reader:
            for _ in range(2):
                for batch in reader:
                    assert np.array_equal(batch.data, rows[batch.index])
            assert (reader.stats().requests > 0) == (turn == 0)
        path.chmod(0o600)  # no more than its status changes
    assert len(list(kept.glob(f"*{SUFFIX}"))) == 1


def test_a_local_file_that_is_changed_under_a_reader(tmp_path):
    path, kept = tmp_path / "a.h5", tmp_path / "kept"
    rows = rows_file(path)
    options = {"index_cache": False, "num_threads": 0}  # none fetches ahead
    with reader_of(path, kept, batch_size=3, **options) as reader:
        first = next(iter(reader))
        assert np.array_equal(first.data, rows[first.index])
        rows_file(path)
        os.utime(path, (1, 1))
        with pytest.raises(ReadError, match=r"a.h5 was changed .*; make a new reader"):
            assert_epoch_is(reader, rows)
    with reader_of(path, kept, **options) as reader:
        assert_epoch_is(reader, rows)


def test_the_index_was_saved(store, tmp_path):
    rows = rows_file(tmp_path / "a.h5")
    url, index = store.put(tmp_path / "a.h5", URL), tmp_path / "a.h5idx"
    for source, options in (
        (url, {"index_cache": index}),
        (url, {"index_cache": index}),
        (index, {}),
    ):
        with reader_of(source, tmp_path / "kept", **options) as reader:
            reads = store.reads
            assert_epoch_is(reader, rows)
    assert store.reads == reads
    assert len(list((tmp_path / "kept").glob(f"*{SUFFIX}"))) == 1


def test_what_does_not_fit_is_fetched_each_time(store, tmp_path, caplog):
    rows = rows_file(tmp_path / "a.h5")
    url = store.put(tmp_path / "a.h5", URL)
    with reader_of(url, tmp_path / "kept", cache_bytes=100_000) as reader:
        for _ in range(2):
            assert_epoch_is(reader, rows)
        assert "cache_bytes allows no more" in reader.stats().cache
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "kept").iterdir()) <= 100_000
    assert caplog.text.count("cache_bytes allows no more") == 1


def test_the_file_was_changed(store, tmp_path):
    for turn in range(2):
        rows = rows_file(tmp_path / "a.h5") + turn
        with h5py.File(tmp_path / "a.h5", "r+") as file:
            file["data"][:] = rows
        url = store.put(tmp_path / "a.h5", URL)
        with reader_of(url, tmp_path / "kept", index_cache=False) as reader:
            assert_epoch_is(reader, rows)
    assert len(list((tmp_path / "kept").glob(f"*{SUFFIX}"))) == 1


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ReaderConfig(hdf5_path=URL, cache="disk", cache_bytes="1MiB")
    assert config.kept == Kept(tmp_path / "h5async" / "mirrors", 1 << 20)
    assert ReaderConfig(hdf5_path=URL).kept is None


def test_a_folder_that_cannot_be_used(store, tmp_path):
    rows_file(tmp_path / "a.h5")
    url = store.put(tmp_path / "a.h5", URL)
    with pytest.raises(ConfigError, match=r"^cache_dir: .*a.h5 cannot be used: "):
        reader_of(url, tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hdf5_path": URL, "cache_dir": "kept"}, r'^cache_dir needs cache="disk"$'),
        ({"hdf5_path": URL, "cache": "host", "cache_dir": "a"}, r'^cache_dir needs cache="disk"$'),
        ({"hdf5_path": URL, "cache": "disc"}, "cache"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        ReaderConfig(**options)
