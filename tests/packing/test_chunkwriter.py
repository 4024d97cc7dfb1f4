"""Blocks of datasets are written in order, encoded by threads, in bounded memory."""

from __future__ import annotations

import errno
import itertools
import os
import threading

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async import WriteError
from h5async.codec import encoders
from h5async.packing import chunkwriter
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.safefile import SafeFile


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_disks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def safe(tmp_path):
    with SafeFile(tmp_path / "out.h5") as safe:
        yield safe


def finished(safe):
    safe.finish()
    return h5py.File(safe.path)


@given(data=st.data())
def test_blocks(tmp_path_factory, data):
    """In any order; what is left has the fill value."""
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * data.draw(st.integers(1, 3))))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    steps = tuple(data.draw(st.integers(1, 3)) * c for c in chunks)
    dtype = np.dtype(data.draw(st.sampled_from(["u1", ">i4", "f8", "S3"])))
    options = data.draw(
        st.sampled_from([{}, {"compression": "gzip"}, {"scaleoffset": 0}, {"fletcher32": True}])
    )
    if dtype.kind not in "iu":
        options.pop("scaleoffset", None)
    fill = np.array(data.draw(st.integers(0, 9))).astype(dtype)[()]
    values = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
    starts = list(itertools.product(*map(range, [0] * len(shape), shape, steps)))
    given = data.draw(st.permutations(starts))[: data.draw(st.integers(0, len(starts)))]
    expected = np.full(shape, fill, dtype)
    with SafeFile(tmp_path_factory.mktemp("blocks") / "out.h5") as safe:
        dataset = safe.file.create_dataset(
            "x", shape, dtype, chunks=chunks, fillvalue=fill, **options
        )
        with ChunkWriter(safe, threads=2, memory=100) as writer:
            opened = writer.open(dataset)
            for start in given:
                where = tuple(slice(at, at + n) for at, n in zip(start, steps, strict=True))
                opened.write(start, values[where])
                expected[where] = values[where]
        with finished(safe) as file:
            assert file["x"][...].tobytes() == expected.tobytes()


def test_datasets_grow(safe):
    file, rows = safe.file, np.arange(60).reshape(20, 3)
    for name, options in {
        "chunks": {"chunks": (4, 3), "maxshape": (None, 3)},
        "bounded": {"chunks": (8, 2), "maxshape": (20, 3), "compression": "lzf"},
        "by_hdf5": {"chunks": (4, 3), "maxshape": (None, 3), "scaleoffset": 0},
    }.items():
        file.create_dataset(name, (0, 3), "i8", **options)
    with ChunkWriter(safe) as writer:
        for opened in map(writer.open, (file["chunks"], file["bounded"], file["by_hdf5"])):
            opened.write((0, 0), rows[:8])
            opened.write((8, 0), rows[8:])
    with finished(safe) as file:
        assert all(file[name][...].tolist() == rows.tolist() for name in file)


def test_stored_chunks(safe, tmp_path):
    values = np.repeat(np.arange(100), 10).reshape(100, 10)
    with h5py.File(tmp_path / "in.h5", "w") as source:
        source.create_dataset("x", data=values, chunks=(7, 10), compression="gzip")
        dataset = safe.file.create_dataset_like("x", source["x"])
        with ChunkWriter(safe) as writer:
            opened = writer.open(dataset)
            for number in range(source["x"].id.get_num_chunks()):
                offset = source["x"].id.get_chunk_info(number).chunk_offset
                mask, data = source["x"].id.read_direct_chunk(offset)
                opened.write_stored([(offset, data, mask)])
    with finished(safe) as file:
        assert np.array_equal(file["x"], values)


def test_blocks_that_are_no_chunks(safe):
    dataset = safe.file.create_dataset("x", (10, 4), "i4", chunks=(4, 4))
    with ChunkWriter(safe) as writer:
        opened = writer.open(dataset)
        for start, stop in [(1, 5), (0, 3), (4, 9)]:
            with pytest.raises(ValueError, match="is not one of chunks"):
                opened.write((start, 0), np.zeros((stop - start, 4), "i4"))
        opened.write((8, 0), np.ones((2, 4), "i4"))


def test_memory_is_bounded(safe, monkeypatch):
    """Who gives more than may wait, waits."""
    dataset = safe.file.create_dataset(
        "x", (0, 1000), "u1", chunks=(1, 1000), maxshape=(None, 1000)
    )
    held, most, turn = 0, 0, threading.Semaphore(0)
    with ChunkWriter(safe, threads=1, memory=10_000) as writer:
        opened, write = writer.open(dataset), chunkwriter.DatasetWriter._write_chunks

        def slow(self, chunks, rows):
            nonlocal held
            turn.acquire()
            write(self, chunks, rows)
            held -= 1000

        monkeypatch.setattr(chunkwriter.DatasetWriter, "_write_chunks", slow)
        for number in range(100):
            held += 1000
            most = max(most, held)
            if number >= 9:
                turn.release()
            opened.write((number, 0), np.full((1, 1000), number, "u1"))
        turn.release(9)
    assert most <= 12_000
    with finished(safe) as file:
        assert file["x"][:, 5].tolist() == list(range(100))


def test_errors_are_raised_at_the_next_call(safe, monkeypatch):
    dataset = safe.file.create_dataset("x", (50, 4), "i4", chunks=(1, 4), compression="gzip")

    def failing(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(encoders.imagecodecs, "deflate_encode", failing)
    writer = ChunkWriter(safe)
    writer.open(dataset).write((0, 0), np.zeros((1, 4), "i4"))
    for call in (writer.flush, writer.flush, lambda: writer.call(print)):
        with pytest.raises(ZeroDivisionError):
            call()
    with pytest.raises(ZeroDivisionError), writer:
        pass


def test_failing_writes(safe, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    dataset = safe.file.create_dataset("x", (50, 4), "i4", chunks=(1, 4))
    writer = ChunkWriter(safe)
    monkeypatch.setattr(os, "pwrite", full)
    writer.open(dataset).write((0, 0), np.zeros((1, 4), "i4"))
    for call in (writer.flush, lambda: writer.commit({})):
        with pytest.raises(WriteError, match="full"):
            call()
    writer.close()


def test_ctrl_c(safe):
    """What waits is not written; the threads end."""
    dataset = safe.file.create_dataset("x", (1000, 4), "i4", chunks=(1, 4))
    before, go_on = threading.active_count(), threading.Event()

    def interrupted():
        with ChunkWriter(safe, threads=3) as writer:
            writer.call(go_on.wait)
            for row in range(100):
                writer.open(dataset).write((row, 0), np.ones((1, 4), "i4"))
            stop = writer.close
            writer.close = lambda: go_on.set() or stop()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threading.active_count() == before
