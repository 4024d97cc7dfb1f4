"""`cache="host"`: epochs after the first come out of memory, the same batches in the same order."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from cases import each

from h5async import AsyncReader, ConfigError, DeviceError, Field, RaggedField
from h5async.core.binding import load_core
from h5async.fill.phases import Phases
from h5async.fill.resident import Budget, HostCache, Residency, open_host_cache
from h5async.order.selection import Selection

N, BATCH = 50, 8


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
        file.create_dataset("data", data=images, chunks=(4, 6, 5, 3), compression="gzip")
        file["labels"] = np.arange(N, dtype=">i4")
        file["text"] = np.array([b"%04d" % i for i in range(N)])
        file.create_dataset("columns", data=rng.normal(size=(7, N)), chunks=(3, 9), shuffle=True)
        file["flags"] = rng.integers(0, 2, N).astype(bool)
    return path


FIELDS = {
    "data": Field("data", axes=(0, 3, 1, 2), scale=0.5),
    "labels": "labels",
    "text": "text",
    "columns": Field("columns", num_dim=1),
    "flags": "flags",
}


def epochs(path, count=3, **options):
    with AsyncReader(hdf5_path=path, fields=FIELDS, batch_size=BATCH, **options) as reader:
        batches = [batch.copy() for _ in range(count) for batch in reader]
        return batches, reader.stats()


@pytest.mark.slow
@each("num_threads", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@each("drop_last", [False, True])
def test_the_same_batches_come(path, num_threads, shuffle, drop_last):
    options = {"num_threads": num_threads, "shuffle": shuffle, "drop_last": drop_last}
    kept, stats = epochs(path, cache="host", **options)
    plain, _ = epochs(path, **options)
    assert stats.cache.startswith("host, ")
    for ours, theirs in zip(kept, plain, strict=True):
        assert np.array_equal(ours.index, theirs.index)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_later_epochs_read_nothing(path, prefetch):
    with AsyncReader(
        hdf5_path=path, batch_size=BATCH, cache="host", shuffle="full", prefetch=prefetch
    ) as reader:
        for _ in reader:
            pass
        first_epoch = None
        for number, batch in enumerate(reader):
            if number == prefetch:  # what was asked for of the second epoch was planned by now
                first_epoch = reader.stats().read_nbytes
            index = batch.index
        assert reader.stats().read_nbytes == first_epoch
        assert "100 % of the samples" in reader.stats().cache
        with h5py.File(path) as file:
            assert np.array_equal(batch.data, file["data"][...][index])


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@pytest.mark.parametrize("cache_bytes", [None, 4500])
def test_each_chunk_is_decoded_once_if_all_fit(path, monkeypatch, cache_bytes):
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)
    options = {"labels_field": None, "batch_size": BATCH, "shuffle": "full", "cache": "host"}
    with h5py.File(path) as file:
        data = file["data"][...]
    with AsyncReader(hdf5_path=path, cache_bytes=cache_bytes, **options) as reader:
        for _ in range(3):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])
        stats = reader.stats()
    assert ("decoded chunks" in stats.cache) == (cache_bytes is None)
    assert (stats.decoded_chunks == -(-N // 4)) == (cache_bytes is None)


def test_a_loop_that_breaks_keeps_what_it_saw(path):
    with AsyncReader(hdf5_path=path, batch_size=BATCH, cache="host", shuffle="full") as reader:
        with h5py.File(path) as file:
            data = file["data"][...]
        for _ in range(12):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])
                if batch.number == 3:
                    break


def test_a_file_that_goes_away_is_not_missed(path):
    with AsyncReader(hdf5_path=path, batch_size=N, cache="host", prefetch=1) as reader:
        want = reader.get_next_batch().copy()
        path.write_bytes(b"")
        assert np.array_equal(reader.get_next_batch().data, want.data)


def test_a_batch_that_fails_is_not_kept(path):
    with h5py.File(path, "r+") as file:
        offset = file["data"].id.get_chunk_info(1).byte_offset
        assert file["data"].id.get_chunk_info(1).chunk_offset[0] == 4
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 8)
    with AsyncReader(hdf5_path=path, batch_size=4, cache="host") as reader:
        for _ in range(3):
            assert reader.get_next_batch().number == 0
            with pytest.raises(OSError, match="samples 4 to 7"):
                reader.get_next_batch()
            for _ in range(len(reader) - 2):
                reader.get_next_batch()


def test_postprocess_gets_the_stored_values_every_epoch(path):
    def add_one(data, labels):
        data += 1

    with (
        AsyncReader(hdf5_path=path, batch_size=BATCH, cache="host", postprocess=add_one) as reader,
        h5py.File(path) as file,
    ):
        data = file["data"][...] + np.uint8(1)
        for _ in range(3):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])


def test_what_does_not_fit_is_not_kept(path):
    with AsyncReader(hdf5_path=path, batch_size=BATCH, cache="host", cache_bytes=4499) as reader:
        for _ in range(2):
            for _ in reader:
                pass
        assert reader.nbytes == N * 94
        text = reader.stats().cache
        assert text.startswith("none: 4.7e-06 GB do not fit into 4.5e-06 GB on the host")
    with AsyncReader(hdf5_path=path, batch_size=BATCH, cache="host", cache_bytes=4700) as reader:
        assert reader.stats().cache.startswith("host, 0 %")


def test_several_files_are_one_cache(path, tmp_path):
    second = tmp_path / "second.h5"
    second.write_bytes(path.read_bytes())
    with (
        AsyncReader(
            hdf5_path=[path, second], batch_size=BATCH, cache="host", shuffle="full"
        ) as reader,
        h5py.File(path) as file,
    ):
        data = np.concatenate([file["data"][...]] * 2)
        for _ in range(2):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "disk"}, "cache"),
        ({"cache": "device", "device": "cpu"}, 'cache="device" needs a GPU'),
        ({"decode": "device", "device": "cpu"}, 'decode="device" needs a GPU'),
        ({"cache_bytes": 5}, 'cache_bytes needs cache="host"'),
        ({"cache": "host", "cache_bytes": -1}, "cache_bytes"),
        ({"cache": "device", "postprocess": print}, 'use cache="host"'),
    ],
)
def test_what_makes_no_sense_is_refused(path, options, message):
    with pytest.raises(ConfigError, match=message):
        AsyncReader(hdf5_path=path, **options)


def test_a_device_cache_needs_a_device(path, monkeypatch):
    monkeypatch.setattr("h5async.reader.readersetup.find_device", lambda *_: h5async_host())
    with pytest.raises(DeviceError, match='use cache="host"'):
        AsyncReader(hdf5_path=path, cache="device")


def h5async_host():
    from h5async.deliver.device import Device

    return Device()


def test_the_default_budget_is_a_share_of_the_memory():
    assert isinstance(
        open_host_cache(Selection(0, 1, 10), [4, 8], [None, None], None, 1 << 30), HostCache
    )
    assert isinstance(open_host_cache(Selection(0, 1, 1 << 50), [4], [None], None, 1 << 30), Budget)
    assert "1.13e+03 TB" in str(
        open_host_cache(Selection(0, 1, 1 << 50), [1], [None], None, 1 << 30)
    )


def test_rows_of_no_bytes():
    cache = open_host_cache(Selection(0, 1, 3), [0], [None], 0, 1 << 30)
    index = np.arange(2)
    column, rows = cache.columns[0], np.empty((2, 0), "f4")
    column.keep(cache.places(index)[0], 0, 2, rows)
    cache.add(index)
    assert cache.has(index)
    assert not cache.has(np.arange(3))
    column.copy(column.plan(index), rows)


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@pytest.mark.parametrize("indices", [None, slice(3, 40, 3), [7, 8, 30, 2, 49]])
@each("num_threads", [0, 2])
def test_the_core_alone_fills_batches_that_are_kept(path, monkeypatch, num_threads, indices):
    fields = {"labels": "labels", "columns": FIELDS["columns"], "data": FIELDS["data"]}
    options = {"fields": fields, "batch_size": BATCH, "shuffle": "full", "indices": indices}
    with (
        AsyncReader(hdf5_path=path, **options) as plain,
        AsyncReader(hdf5_path=path, cache="host", num_threads=num_threads, **options) as reader,
    ):
        monkeypatch.setattr(Phases, "begin", None)
        monkeypatch.setattr(Phases, "resume", None)
        for _ in range(4):
            for ours, theirs in zip(reader, plain, strict=True):
                assert np.array_equal(ours.index, theirs.index)
                for a, b in zip(ours, theirs, strict=True):
                    assert a.tobytes() == b.tobytes()
        assert "100 % of the samples" in reader.stats().cache


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@each("num_threads", [0, 2])
@pytest.mark.parametrize("other", ["per file", "steps", "ragged", "empty"])
def test_the_core_alone_keeps_rows_of_all_kinds(tmp_path, monkeypatch, num_threads, other):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(N, dtype=">i2") + number * N
            file["map"] = np.full((3, 3), number)
            offsets = np.cumsum([0, *(i % 4 for i in range(N))])
            file["offsets"], file["values"] = offsets, np.arange(offsets[-1]) + 1000 * number
            file["no offsets"], file["nothing"] = 0 * offsets, np.zeros(0)
    field = {
        "per file": Field("map", per="file"),
        "steps": Field("x", steps=(-2, 0, 1), pad="zero"),
        "ragged": RaggedField("values", offsets="offsets"),
        "empty": RaggedField("nothing", offsets="no offsets"),
    }[other]
    fields = {"x": Field("x", dtype="f4", scale=0.5), "other": field}
    options = {"hdf5_path": paths, "fields": fields, "batch_size": BATCH, "shuffle": "full"}
    with (
        AsyncReader(**options) as plain,
        AsyncReader(cache="host", num_threads=num_threads, **options) as reader,
    ):
        monkeypatch.setattr(Phases, "begin", None)
        monkeypatch.setattr(Phases, "resume", None)
        for epoch in range(6):
            for ours, theirs in zip(reader, plain, strict=False):
                assert np.array_equal(ours.x, theirs.x)
                for a, b in zip(ours.other, theirs.other, strict=True):
                    assert np.array_equal(a, b)
                if epoch < 3 and ours.number == 2:  # of three epochs, some samples are kept
                    break
        assert "100 % of the samples" in reader.stats().cache


@each("num_threads", [0, 2])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_rows_of_odd_lengths_are_kept_across_pages(tmp_path, num_threads, shuffle):
    rng, path = np.random.default_rng(7), tmp_path / "odd.h5"
    sizes = {"long": 1003, "line": 577, "short": 17}  # of 9 MB, 5 MB and 0.2 MB
    truth = {name: rng.integers(0, 256, (9001, size), np.uint8) for name, size in sizes.items()}
    with h5py.File(path, "w") as file:
        for name, values in truth.items():
            file[name] = values
    names, options = {name: name for name in sizes}, {"batch_size": 64, "shuffle": shuffle}
    with AsyncReader(
        hdf5_path=path, fields=names, cache="host", num_threads=num_threads, **options
    ) as reader:
        for _ in range(2):
            for batch in reader:
                for name, values in truth.items():
                    assert np.array_equal(batch[name], values[batch.index])
        assert reader.stats().cache.startswith("host, 100 % ")


@pytest.mark.parametrize("epochs", [0, 2])
def test_given_samples_of_a_reader_that_keeps_rows_as_they_are_stored(path, epochs):
    rows = np.random.default_rng(2).integers(0, 256, (N, 3), np.uint8)
    with h5py.File(path, "a") as file:
        file["rows"] = rows  # which the core makes floats of: here as it keeps them
    fields = {"rows": Field("rows", dtype="float32")}
    with AsyncReader(hdf5_path=path, fields=fields, batch_size=BATCH, cache="host") as reader:
        for _ in range(epochs):
            for _ in reader:
                pass
        for index in ([3], [7, 0, 49, 7], np.arange(40)):
            assert np.array_equal(reader.read(index).rows, rows[index].astype(np.float32))


def test_stamps_of_generations_long_ago_are_not_taken_for_new_ones():
    residency, index = Residency(Selection(0, 1, 5), 0, "host"), np.arange(5)
    residency.add(index[:3], residency.generation)
    residency.add(index, residency.generation + 1)
    assert residency.has(index[:3])
    assert not residency.has(index)
    for _ in range(600):
        residency.forget()
        assert not residency.has(index[:1])
        if residency.generation == 100:
            residency.add(index)
            assert residency.has_all
    residency.add(index)
    assert residency.has_all
    assert "100 %" in str(residency)


@pytest.mark.skipif(load_core() is None, reason="needs the compiled core")
@pytest.mark.filterwarnings("ignore::h5async.FileChangedWarning")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_rows_are_forgotten_while_the_core_takes_them(path, num_threads):
    with h5py.File(path) as file:
        data, labels = file["data"][...], file["labels"][...]
    with AsyncReader(
        hdf5_path=path, batch_size=2, cache="host", shuffle="full", num_threads=num_threads
    ) as reader:
        for epoch in range(5):
            for batch in reader:
                assert np.array_equal(batch.data, data[batch.index])
                assert np.array_equal(batch.labels, labels[batch.index])
                if epoch == 2 and batch.number == 9:
                    kept_nbytes = reader.stats().read_nbytes
                    os.utime(path, ns=(1, 1))
                    reader.read([4])  # which notices
                    assert "100 %" not in reader.stats().cache
        assert reader.stats().read_nbytes > kept_nbytes + labels.nbytes
        assert "100 %" in reader.stats().cache
