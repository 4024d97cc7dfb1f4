"""Elements of variable length in the core's queue: read without Python, beside other fields."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import fetch_and_keep_the_gil

from h5async import AsyncReader
from h5async.core.binding import load_core
from h5async.errors import ReadError
from h5async.read.collection import Collection

pytestmark = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

SAMPLES = 1500  # more than 512 of them are several items


def write(path: Path, seed: int = 0) -> None:
    """Write elements of variable length of several kinds, and other fields beside them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, SAMPLES)
    lengths[7] = 70_000  # has a collection of its own
    numbers, texts = np.empty(SAMPLES, object), []
    for i, length in enumerate(lengths.tolist()):
        numbers[i] = rng.integers(-99, 99, length).astype(np.int32)
        texts.append("abc" * (length % 9))
    with h5py.File(path, "w") as file:
        data = file.create_dataset("numbers", (SAMPLES,), h5py.vlen_dtype("i4"), chunks=(64,))
        some = np.flatnonzero(np.arange(SAMPLES) % 10)  # the rest have no address
        data[some] = numbers[some]
        file.create_dataset("texts", data=texts, dtype=h5py.string_dtype())
        values = rng.integers(0, 99, (SAMPLES, 6), np.uint8)
        file.create_dataset("gzip", data=values, chunks=(10, 6), compression="gzip")
        file["labels"] = np.arange(SAMPLES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.h5")
    return tmp_path / "a.h5"


FIELDS = ["labels", "numbers", "gzip", "texts"]


def opened(path: Any, **options: Any) -> AsyncReader:
    options = {"fields": {name: name for name in FIELDS}, "batch_size": 600} | options
    return AsyncReader(hdf5_path=path, device="cpu", **options)


def contents(*paths: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for path in paths:
        with h5py.File(path) as file:
            for name in FIELDS:
                found[name] += list(file[name][()])
    return found


def check(batch: Any, expected: dict[str, list[Any]]) -> None:
    for i, sample in enumerate(batch.index.tolist()):
        assert np.array_equal(batch.numbers[i], expected["numbers"][sample])
        assert batch.texts[i].tobytes() == expected["texts"][sample]
        assert np.array_equal(batch.gzip[i], expected["gzip"][sample])
        assert batch.labels[i] == expected["labels"][sample]


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_a_batch_is_filled_while_the_loop_keeps_the_gil(path, shuffle, nobody_else_gets_the_gil):
    expected = contents(path)
    with opened(path, shuffle=shuffle, num_threads=2) as reader:
        batch = reader.get_next_batch()  # waits, so that the threads come to the queue
        for _ in range(12):
            fetch_and_keep_the_gil(reader)
            batch = reader.get_next_batch()
            check(batch, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("io", ["auto", "map", "pread"])
def test_several_files_by_many_threads_without_python(tmp_path, num_threads, io, monkeypatch):
    monkeypatch.setattr(Collection, "_read_again", None)
    paths = [tmp_path / f"{name}.h5" for name in "abc"]
    for seed, path in enumerate(paths):
        write(path, seed)
    expected = contents(*paths)
    with opened(paths, shuffle="full", num_threads=num_threads, io=io) as reader:
        for _ in range(2):  # the places of elements are known in the second one
            seen = []
            for batch in reader:
                check(batch, expected)
                seen += batch.index.tolist()
            assert sorted(seen) == list(range(3 * SAMPLES))
        stats = reader.stats()
        nbytes = sum(values.nbytes for values in expected["numbers"])
        nbytes += sum(len(text) for text in expected["texts"])
        assert stats.read_nbytes >= 2 * nbytes


def test_given_samples_also_more_than_once(path):
    expected = contents(path)
    samples = np.array([7, 3, 3, 10, 0, 1499, 3])
    with opened(path, batch_size=8) as reader:
        for _ in range(2):
            reader.fetch_data(samples)
            batch = reader.get_next_batch()
            assert np.array_equal(batch.index, samples)
            check(batch, expected)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_damage_names_the_element_and_the_reader_goes_on(path, num_threads):
    expected = contents(path)
    with h5py.File(path) as file:
        assert len(file["numbers"][7]) == 70_000
        marker = file["numbers"][7].tobytes()[:64]
    data = path.read_bytes()
    at = data.index(marker)
    damaged = bytearray(data)
    damaged[at - 8 : at] = (1234).to_bytes(8, "little")  # the object's size
    path.write_bytes(damaged)
    with opened(
        path, fields={"numbers": "numbers"}, batch_size=500, num_threads=num_threads
    ) as reader:
        with pytest.raises(ReadError, match=r'a\.h5: dataset "numbers", element 7: the heap'):
            reader.get_next_batch()
        batch = reader.get_next_batch()
        assert batch.index[0] == 500
        for i, sample in enumerate(batch.index.tolist()):
            assert np.array_equal(batch[0][i], expected["numbers"][sample])


@pytest.mark.filterwarnings("ignore::h5async.errors.FileChangedWarning")
def test_elements_of_a_file_that_was_changed_are_not_read_where_others_are(path):
    """The chunks of other fields are looked at anew, and read on; elements may lie elsewhere."""
    with opened(path, batch_size=10, prefetch=1, num_threads=1) as reader:
        reader.get_next_batch()
        with h5py.File(path, "r+", locking=False) as file:
            file["texts"][30] = "another text, which lies elsewhere"
            file["gzip"].attrs["note"] = 1
        for _ in range(2):  # what was read ahead may have been read before
            with contextlib.suppress(ReadError):
                reader.get_next_batch()
        for _ in range(4):
            with pytest.raises(ReadError, match=r"a\.h5"):
                reader.get_next_batch()


def test_a_file_without_a_name_is_read_on(path):
    expected = contents(path)
    with opened(path, shuffle="full", num_threads=2) as reader:
        check(reader.get_next_batch(), expected)
        os.unlink(path)
        for _ in range(5):
            check(reader.get_next_batch(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_readers_that_are_closed_in_the_middle(path, num_threads):
    for _ in range(20):
        reader = opened(path, shuffle="full", num_threads=num_threads, prefetch=4)
        reader.fetch_data()
        reader.close()


@pytest.mark.parametrize("io", ["auto", "map"])
def test_a_file_that_is_cut_short_is_an_error(path, io):
    fields = {"numbers": "numbers", "texts": "texts"}
    with opened(path, fields=fields, io=io, batch_size=100, prefetch=1, num_threads=1) as reader:
        reader.get_next_batch()
        os.truncate(path, 4096)
        for _ in range(2):  # what was read ahead may have been read before
            with contextlib.suppress(ReadError):
                reader.get_next_batch()
        for _ in range(3):
            with pytest.raises(ReadError, match=r"a\.h5"):
                reader.get_next_batch()


def test_a_file_that_is_emptied_before_it_is_mapped(path):
    """It is not the way of reading that fails."""
    with opened(path, fields={"texts": "texts"}, io="map", num_threads=0) as reader:
        path.write_bytes(b"")
        with pytest.raises(ReadError, match=r"a\.h5 was changed .* is empty now"):
            reader.get_next_batch()
