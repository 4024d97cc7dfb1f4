"""Decoding on a GPU: plans, lists of blocks, kernels, checks and the order of it all, on the CPU.

`fake_cupy` does a stream's work late and in random order, with our kernels' own source, and
`fake_nvcomp` decodes; so do the simulated GPUs of ``scripts/test_gpu``. What a real GPU does with
the same code is in test_gpu.py.
"""

from __future__ import annotations

import math
import time

import h5py
import numpy as np
import pytest
from cases import each
from conftest import require_extra
from gpus import use_fake_gpu, use_gpu

import h5async.deliver.devicedecode
import h5async.deliver.devicepolicy
from h5async import AsyncReader, ConfigError, DeviceError, Field, ReadError
from h5async.core.binding import load_core
from h5async.deliver.decodeplan import EncodedFormat, encoded_format
from h5async.deliver.devicedecode import NvcompError
from h5async.deliver.devicepolicy import DecodeChoice

hdf5plugin = require_extra("hdf5plugin")
pytestmark = [
    pytest.mark.any_gpu,
    pytest.mark.skipif(load_core() is None, reason="the compiled core reads the chunks"),
]

N = 37


def values(shape, dtype, seed=0):
    """Return what compresses in parts: ramps and noise."""
    rng = np.random.default_rng(seed)
    flat = np.arange(math.prod(shape)) // 7
    noise = rng.integers(0, 4, flat.size) * (rng.integers(0, 3, flat.size) == 0)
    return ((flat + noise) % 251).astype(dtype).reshape(shape)


PIPELINES = {
    "gzip": {"compression": "gzip"},
    "shuffle+gzip": {"compression": "gzip", "shuffle": True},
    "gzip+fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "shuffle": {"shuffle": True},
    "zstd": hdf5plugin.Zstd(),
    "shuffle+zstd": {"shuffle": True, **hdf5plugin.Zstd()},
    "lz4": hdf5plugin.LZ4(),
    "lz4 in blocks": hdf5plugin.LZ4(nbytes=64),
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle-lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "bitshuffle-lz4 in blocks": hdf5plugin.Bitshuffle(nelems=16, cname="lz4"),
    "bitshuffle-zstd": hdf5plugin.Bitshuffle(cname="zstd"),
}
SHAPES = {
    "one row a chunk": ((N, 6, 5), (1, 6, 5), 0),
    "rows in chunks": ((N, 6, 5), (4, 6, 5), 0),
    "rows in pieces": ((N, 7, 5), (4, 3, 2), 0),
    "columns": ((5, N, 6), (2, 8, 6), 1),
    "last dimension": ((5, 3, N), (5, 2, 10), 2),
    "numbers": ((N,), (8,), 0),
    "one chunk": ((N, 3), (N, 3), 0),
}


def late_copies(cupy, simulation, reader, epochs=2):
    kept = []
    for _ in range(epochs):
        for batch in reader:
            kept.append((batch.index, batch[0].copy()))
    simulation.run_all()
    return kept


def check(path, kept, axis=0, name="data"):
    with h5py.File(path) as file:
        want = np.moveaxis(file[name][...], axis, 0)
    for index, got in kept:
        assert got.dtype == want.dtype.newbyteorder("=")
        assert np.array(got.get()).tobytes() == np.ascontiguousarray(want[index]).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
@each("shape", SHAPES)
@each("dtype", ["u1", "<f4", "<i8"])
def test_every_pipeline_and_shape_is_what_h5py_gives(tmp_path, monkeypatch, pipeline, shape, dtype):
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=1)
    path, (dims, chunks, axis) = tmp_path / "data.h5", SHAPES[shape]
    with h5py.File(path, "w") as file:
        data = values(dims, dtype)
        file.create_dataset("data", data=data, chunks=chunks, **PIPELINES[pipeline])
        assert not file["data"].id.get_chunk_info(0).filter_mask
    for shuffle in (False, "full"):
        with AsyncReader(
            hdf5_path=path,
            num_dim=axis,
            labels_field=None,
            batch_size=8,
            shuffle=shuffle,
            device="cuda",
            decode="device",
        ) as reader:
            kept = late_copies(cupy, simulation, reader)
            assert reader.stats().decode.startswith("device")
            assert reader.stats().decoded_chunks > 0
        check(path, kept, axis)
    assert nvcomp.calls > 0 or pipeline in ("shuffle", "bitshuffle") or shape == "numbers"


@pytest.mark.slow
@each("prefetch", [1, 2, 3])
@each("num_threads", [0, 1, 3])
def test_every_allowed_order_gives_the_right_batches(tmp_path, monkeypatch, prefetch, num_threads):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        images = values((N, 6, 5, 3), "u1")
        file.create_dataset("data", data=images, chunks=(2, 6, 5, 3), compression="gzip")
        file.create_dataset("labels", data=np.arange(N), chunks=(8,), shuffle=True, compression=1)
    for seed in range(6):
        cupy, simulation, nvcomp = use_gpu(monkeypatch, seed)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        kept = []
        with AsyncReader(
            hdf5_path=path,
            fields={"data": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"},
            batch_size=5,
            shuffle="full",
            prefetch=prefetch,
            num_threads=num_threads,
            device="cuda",
            decode="device",
        ) as reader:
            for turn in range(2 * len(reader)):
                with streams[turn % 2] as stream:
                    batch = reader.get_next_batch()
                    reader.fetch_data()
                    kept.append((batch.index, batch.data.copy(), batch.labels.copy()))
                    streams[(turn + 1) % 2].wait_event(stream.record())
            simulation.run_all()
        want = images.transpose(0, 3, 1, 2) / np.float32(2)
        for index, data, labels in kept:
            assert np.array_equal(data.get(), want[index])
            assert np.array_equal(labels.get(), index)
        assert nvcomp.calls > 0


def write_damaged(path, where, pipeline="gzip", rows=4):
    with h5py.File(path, "w") as file:
        data = values((16, 10, 9), "u1")
        made = file.create_dataset("data", data=data, chunks=(rows, 10, 9), **PIPELINES[pipeline])
        info = made.id.get_chunk_info(1)
    with path.open("r+b") as raw:
        at = info.byte_offset + (where if where >= 0 else info.size + where)
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 0x55]))


@pytest.mark.parametrize(
    ("pipeline", "where"),
    [
        ("gzip", 0),
        ("gzip", 20),
        ("gzip", -1),
        ("gzip+fletcher32", 30),
        ("zstd", 0),
        ("lz4", 3),
        ("lz4", 13),
        ("lz4", 16),
        ("bitshuffle-lz4", 13),
    ],
)
def test_a_damaged_chunk_is_an_error_and_the_next_batch_follows(
    tmp_path, monkeypatch, pipeline, where
):
    use_gpu(monkeypatch, seed=2)
    path = tmp_path / "data.h5"
    write_damaged(path, where, pipeline)
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, device="cuda", decode="device"
    ) as reader:
        assert reader.get_next_batch().number == 0
        with pytest.raises(ReadError, match=r"chunk \(4, 0, 0\) \(samples 4 to 7\)"):
            reader.get_next_batch()
        batch = reader.get_next_batch()
        assert batch.number == 2
        assert np.array_equal(batch.data.get(), values((16, 10, 9), "u1")[batch.index])


def test_what_the_device_decodes_in_vain_is_counted(tmp_path, monkeypatch):
    use_gpu(monkeypatch, seed=2)
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = values((32, 10, 9), "u1")
        file.create_dataset("data", data=data, chunks=(4, 10, 9), compression="gzip")
    options = {"labels_field": None, "device": "cuda", "decode": "device", "prefetch": 1}
    with AsyncReader(hdf5_path=path, batch_size=2, indices=range(0, 32, 4), **options) as reader:
        for batch in reader:
            page = batch._repr_html_()
            assert "(2, 10, 9)" in page
            assert "2 samples on cuda:0" in page
        stats = reader.stats(epoch=0)
    assert stats.decoded_chunks >= 8
    assert stats.decoded_nbytes == stats.decoded_chunks * 4 * 90
    assert stats.decoded_per_used >= 4.0


@pytest.mark.parametrize("pipeline", ["gzip", "zstd"])
def test_what_nvcomp_decodes_wrong_without_a_word_is_seen_with_a_checksum(
    tmp_path, monkeypatch, pipeline
):
    """And the host, which decodes it right, gives the batch. Zstd has no checksum to go by."""
    use_gpu(monkeypatch, seed=2, damage=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = values((8, 10, 9), "u1")
        file.create_dataset("data", data=data, chunks=(4, 10, 9), **PIPELINES[pipeline])
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, device="cuda", decode="device"
    ) as reader:
        batch = reader.get_next_batch()
        same = np.array_equal(batch.data.get(), data[:4])
        assert same == (pipeline == "gzip")


def test_a_size_other_than_due_is_seen(tmp_path, monkeypatch):
    use_gpu(monkeypatch, seed=2, damage=lambda data: data[:-1])
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values((8, 10, 9), "u1"), **PIPELINES["zstd"])
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, device="cuda", decode="device"
    ) as reader:
        batch = reader.get_next_batch()
        assert np.array_equal(batch.data.get(), values((8, 10, 9), "u1")[:4])


def test_chunks_without_their_filters_and_holes_are_the_hosts(tmp_path, monkeypatch):
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=3)
    path = tmp_path / "data.h5"
    data = values((16, 40), "u1")
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "data", (16, 40), "u1", chunks=(4, 40), compression="gzip", fillvalue=7
        )
        made[:4], made[8:] = data[:4], data[8:]
        made.id.write_direct_chunk((12, 0), data[12:].tobytes(), filter_mask=1)
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, device="cuda", decode="device"
    ) as reader:
        check(path, late_copies(cupy, simulation, reader))
    assert nvcomp.blocks in (4, 5)  # two chunks, twice, and perhaps the next epoch's first


def test_an_edge_chunk_that_was_stored_short_is_the_hosts(tmp_path, monkeypatch):
    import zlib

    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=3)
    path = tmp_path / "data.h5"
    data = values((6, 40), "u1")
    with h5py.File(path, "w") as file:
        made = file.create_dataset("data", data=data, chunks=(4, 40), compression="gzip")
        made.id.write_direct_chunk((4, 0), zlib.compress(data[4:].tobytes()))
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=3, device="cuda", decode="device"
    ) as reader:
        kept = late_copies(cupy, simulation, reader)
    for index, got in kept:
        assert np.array_equal(got.get(), data[index])
    assert nvcomp.calls >= 4


def test_several_files_are_one(tmp_path, monkeypatch):
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=4)
    paths, data = [], values((30, 5, 4), "<f4")
    for i, (begin, end) in enumerate([(0, 11), (11, 12), (12, 30)]):
        paths.append(tmp_path / f"{i}.h5")
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset(
                "data",
                data=data[begin:end],
                chunks=(3, 5, 4),
                maxshape=(None, 5, 4),
                **PIPELINES["shuffle+gzip"],
            )
    for shuffle in (False, "full", "window"):
        with AsyncReader(
            hdf5_path=paths,
            labels_field=None,
            batch_size=7,
            shuffle=shuffle,
            device="cuda",
            decode="device",
            num_threads=3,
        ) as reader:
            for index, got in late_copies(cupy, simulation, reader):
                assert np.array_equal(got.get(), data[index])
    assert nvcomp.calls > 0


@pytest.mark.slow
def test_files_whose_grids_differ_and_rows_of_a_large_chunk(tmp_path, monkeypatch):
    """Samples are columns: a file of another length has other numbers of chunks."""
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=4)
    paths, data = [], values((4096, 90), "<f4")
    for i, (begin, end) in enumerate([(0, 40), (40, 90)]):
        paths.append(tmp_path / f"{i}.h5")
        with h5py.File(paths[-1], "w") as file:
            made = {"chunks": (2048, 20), **PIPELINES["shuffle+gzip"]}
            file.create_dataset("columns", data=data[:, begin:end], **made)
            rows = np.ascontiguousarray(data.T[begin:end])
            file.create_dataset("rows", data=rows, chunks=(20, 4096), compression=1)
    for path, of_field in (("columns", {"num_dim": 1}), ("rows", {})):
        for shuffle in (False, "full"):
            with AsyncReader(
                hdf5_path=paths,
                data_field=path,
                labels_field=None,
                batch_size=30,
                shuffle=shuffle,
                device="cuda",
                decode="device",
                **of_field,
            ) as reader:
                for index, got in late_copies(cupy, simulation, reader, epochs=1):
                    assert np.array_equal(got.get(), data.T[index])
                assert reader.stats().decode == 'device: decode="device"'
    assert nvcomp.calls > 0


def test_with_a_device_cache(tmp_path, monkeypatch):
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=5)
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values((N, 5), "<f4"), chunks=(4, 5), compression="gzip")
    with AsyncReader(
        hdf5_path=path,
        labels_field=None,
        batch_size=8,
        shuffle="full",
        device="cuda",
        decode="device",
        cache="device",
        prefetch=1,
    ) as reader:
        check(path, late_copies(cupy, simulation, reader, epochs=1))
        calls = nvcomp.calls
        check(path, late_copies(cupy, simulation, reader, epochs=2))
        assert nvcomp.calls <= calls + 1  # what was asked for before the last rows had come


@pytest.mark.slow
@pytest.mark.parametrize("device_is_fast", [True, False])
def test_auto_keeps_what_is_faster(tmp_path, monkeypatch, device_is_fast):
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=6)
    note, noted = DecodeChoice.note, []

    def note_as_told(choice, on_device, seconds):
        noted.append(on_device)
        assert 0 < seconds < 60
        note(choice, on_device, 1.0 if on_device == device_is_fast else 2.0)

    monkeypatch.setattr(DecodeChoice, "note", note_as_told)
    path = tmp_path / "data.h5"
    data = values((400, 40), "u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(4, 40), compression="gzip")
    with AsyncReader(
        hdf5_path=path,
        labels_field=None,
        batch_size=16,
        device="cuda",
        num_threads=2,
    ) as reader:
        kept = late_copies(cupy, simulation, reader, epochs=1)
        chosen = "device: a batch takes 1e+03" if device_is_fast else "host: a batch takes 2e+03"
        assert reader.stats().decode.startswith(chosen)
        check(path, kept)
        calls = nvcomp.calls
        check(path, late_copies(cupy, simulation, reader, epochs=1))
        assert (nvcomp.calls > calls) == device_is_fast
        assert noted.count(True) >= 4
        assert noted.count(False) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["process", 3])
def test_helper_processes_decode_what_they_read(tmp_path, monkeypatch, workers):
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    cupy, simulation, nvcomp = use_gpu(monkeypatch, seed=2)
    options = {"hdf5_path": path, "labels_field": None, "device": "cuda", "workers": workers}
    with pytest.raises(ConfigError, match='decode="device" needs workers="thread"'):
        AsyncReader(decode="device", **options)
    with AsyncReader(timeout=200, **options) as reader:
        check(path, late_copies(cupy, simulation, reader))
        assert reader.stats().decode == "host: helper processes decode what they read"
    assert nvcomp.calls == 0


def test_a_choice():
    choice = DecodeChoice("auto", None)
    turns = []
    while choice.on_device is None:
        turns.append(choice.next_on_device())
        choice.note(turns[-1], 0.5 if turns[-1] else (9.0 if len(turns) < 2 else 0.6))
    assert turns == [False, True] * 4
    assert choice.next_on_device()
    assert choice.sentence == "device: a batch takes 5e+02 ms on the device, 6e+02 ms on the host"
    choice.note(True, 100.0)
    assert choice.next_on_device()


def test_a_choice_that_ends_on_the_host():
    for seconds in (0.95, math.inf):
        choice = DecodeChoice("auto", None)
        for _ in range(4):
            choice.note(True, seconds)
            choice.note(False, 1.0)
        assert choice.on_device is False
        assert not choice.next_on_device()
        assert choice.sentence.startswith("host: ")


def make(path, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values((16, 10), "u1"), chunks=(4, 10), **options)


def test_without_nvcomp(tmp_path, monkeypatch):
    cupy, simulation, _ = use_gpu(monkeypatch, seed=0)

    def missing():
        raise NvcompError("nvCOMP is not installed")

    monkeypatch.setattr(h5async.deliver.devicedecode, "load_nvcomp", missing)
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    options = {"hdf5_path": path, "labels_field": None, "device": "cuda"}
    with pytest.raises(DeviceError, match=r"nvCOMP is not installed; .*pip install 'h5async\[nv"):
        AsyncReader(decode="device", **options)
    with AsyncReader(**options) as reader:
        check(path, late_copies(cupy, simulation, reader))
        assert reader.stats().decode == "host: nvCOMP is not installed"
    with AsyncReader(decode="host", **options) as reader:
        assert reader.stats().decode == 'host: decode="host"'


@pytest.mark.parametrize(
    ("made", "options", "reason"),
    [
        ({"compression": "lzf"}, {}, 'field "data": its filters are lzf'),
        ({**hdf5plugin.Blosc()}, {}, "its filters are blosc"),
        ({"scaleoffset": 0}, {}, "its filters are scaleoffset"),
        ({}, {}, None),
        ({"compression": "gzip"}, {"fields": {"data": Field("data", dtype="f2")}}, None),
    ],
)
def test_what_a_gpu_cannot_decode(tmp_path, monkeypatch, made, options, reason):
    cupy, simulation, _ = use_gpu(monkeypatch, seed=0)
    path = tmp_path / "data.h5"
    make(path, **made)
    if "fields" not in options:
        options = {"labels_field": None}
    options |= {"hdf5_path": path, "device": "cuda"}
    if reason is not None:
        with pytest.raises(DeviceError, match=reason):
            AsyncReader(decode="device", **options)
    with AsyncReader(**options) as reader:
        kept = late_copies(cupy, simulation, reader)
        assert len(kept) == 2
        if "fields" not in options:
            check(path, kept)
            assert (reason or "nothing is compressed") in reader.stats().decode


def test_a_foreign_byte_order_is_changed_on_the_host(tmp_path, monkeypatch):
    use_gpu(monkeypatch, seed=0)
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values((16, 10), ">i4"), compression="gzip")
    with pytest.raises(DeviceError, match="transformed on the host"):
        AsyncReader(hdf5_path=path, labels_field=None, device="cuda", decode="device")


@pytest.mark.parametrize("other", [{"postprocess": print}, {"cache": "host"}])
def test_what_needs_rows_on_the_host(tmp_path, monkeypatch, other):
    use_gpu(monkeypatch, seed=0)
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    options = {"hdf5_path": path, "labels_field": None, "device": "cuda", **other}
    with pytest.raises(ConfigError, match="leaves no rows on the host"):
        AsyncReader(decode="device", **options)
    with AsyncReader(**options) as reader:
        assert reader.stats().decode.startswith("host: ")


def test_there_is_no_gpu(tmp_path, monkeypatch):
    def missing():
        raise h5async.deliver.devicepolicy.MissingGpuError("CuPy is not installed")

    monkeypatch.setattr(h5async.deliver.devicepolicy, "import_cupy", missing)
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    with pytest.raises(DeviceError, match='decode="device" needs a GPU'):
        AsyncReader(hdf5_path=path, labels_field=None, decode="device")
    with AsyncReader(hdf5_path=path, labels_field=None) as reader:
        assert reader.stats().decode == "host: there is no GPU"


def test_batches_that_touch_too_much_are_the_hosts(tmp_path, monkeypatch):
    from h5async.index.metadata import read_layouts

    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    layout = read_layouts(path, {"data": Field("data")})["data"]
    core = load_core()
    assert isinstance(encoded_format(layout, core, 4, in_order=True), EncodedFormat)
    assert encoded_format(layout, None, 4, in_order=True) == "the compiled core is missing"
    monkeypatch.setattr("h5async.deliver.decodeplan._MOST_DECODED_NBYTES", 100)
    assert "may touch 4 chunks of 40 bytes" in str(encoded_format(layout, core, 4, in_order=False))


def test_a_file_cut_short_after_opening(tmp_path, monkeypatch):
    use_gpu(monkeypatch, seed=0)
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    with AsyncReader(
        hdf5_path=path, labels_field=None, batch_size=4, device="cuda", decode="device", prefetch=1
    ) as reader:
        reader.get_next_batch()
        with path.open("r+b") as raw:
            raw.truncate(100)
        with pytest.raises(ReadError):
            reader.get_next_batch()


def flip_last_bit(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.slow
def test_what_was_decoded_wrong_gets_into_no_cache(tmp_path, monkeypatch):
    """Every block is decoded wrong, and the host decodes it again; epochs overlap in the slots."""
    path, data = tmp_path / "data.h5", np.arange(12 * 8, dtype="u1").reshape(12, 8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(2, 8), compression="gzip")
    for seed in range(8):
        cupy, _, _ = use_fake_gpu(monkeypatch, seed, flip_last_bit)
        wait = cupy.cuda.Event.synchronize

        def slow(event, wait=wait):
            wait(event)
            time.sleep(0.002)  # whoever looks meanwhile must find nothing wrong

        monkeypatch.setattr(cupy.cuda.Event, "synchronize", slow)
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=4,
            shuffle="full",
            seed=seed,
            device="cuda",
            decode="device",
            cache="device",
            prefetch=4,
            num_threads=4,
        ) as reader:
            for _ in range(4):
                for batch in reader:
                    assert np.array_equal(batch.data.get(), data[batch.index])
            assert "left to the host" in reader.stats().decode


@pytest.mark.slow
def test_a_refused_call_is_no_reason_to_overtake_what_was_put_on_the_stream(tmp_path, monkeypatch):
    path, data = tmp_path / "data.h5", np.arange(32 * 8, dtype="u1").reshape(32, 8)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, chunks=(2, 8), compression="gzip")
        file.create_dataset("labels", data=data[:, :1].copy(), chunks=(2, 1), compression="gzip")
    for seed in range(10):
        cupy, simulation, nvcomp = use_fake_gpu(monkeypatch, seed, flip_last_bit)
        decompress = nvcomp.decompress

        def refuse_second(*args, nvcomp=nvcomp, decompress=decompress, **named):
            decompress(*args, **named)
            if nvcomp.calls % 2 == 0:
                raise NvcompError("refused")

        nvcomp.decompress = refuse_second
        with AsyncReader(
            hdf5_path=path, batch_size=4, device="cuda", decode="device", num_threads=0
        ) as reader:
            for index, got in late_copies(cupy, simulation, reader, epochs=1):
                assert np.array_equal(got.get(), data[index])


def test_memory_for_decoding_is_given_back_when_the_host_won(tmp_path, monkeypatch):
    cupy, simulation, _ = use_gpu(monkeypatch, seed=1)
    note = DecodeChoice.note
    monkeypatch.setattr(
        DecodeChoice, "note", lambda choice, device, _: note(choice, device, 2.0 if device else 1.0)
    )
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values((200, 40), "u1"), chunks=(4, 40), compression=1)
    for num_threads in (0, 3):
        with AsyncReader(
            hdf5_path=path,
            labels_field=None,
            batch_size=4,
            device="cuda",
            num_threads=num_threads,
            prefetch=3,
        ) as reader:
            device, slots = reader._engine.setup.device, reader._engine.setup.slots
            assert device.decoders
            assert all(slot.staging for slot in slots)
            check(path, late_copies(cupy, simulation, reader, epochs=2))
            assert reader.stats().decode.startswith("host: a batch takes")
            assert not device.decoders
            assert not any(slot.staging or slot.staged for slot in slots)


def test_decoding_that_does_not_fit_the_gpu_is_the_hosts(tmp_path, monkeypatch):
    cupy, _, nvcomp = use_fake_gpu(monkeypatch, seed=1)
    path = tmp_path / "data.h5"
    make(path, compression="gzip")
    options = {"hdf5_path": path, "labels_field": None, "device": "cuda"}
    cupy.cuda.runtime.memGetInfo = lambda: (1000, 2000)
    with AsyncReader(**options) as reader:
        assert "GB that are free" in reader.stats().decode
    with pytest.raises(DeviceError, match="GB that are free"):
        AsyncReader(decode="device", **options)

    def refuse(*_):
        raise NvcompError("chunks of that size")

    cupy.cuda.runtime.memGetInfo = lambda: (1 << 40, 1 << 40)
    nvcomp.temp_nbytes = refuse
    with AsyncReader(**options) as reader:
        assert reader.stats().decode.startswith("host: ")
