"""Batches that the core fills alone: what is submitted, by whom, and who waits for it."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import fetch_and_keep_the_gil

from h5async import AsyncReader, OutOfMemoryError, ReadError
from h5async.core.binding import load_core
from h5async.fill.submissions import Submissions
from h5async.order.sampling import Sampling
from h5async.read.collection import Collection
from h5async.read.coretables import Scratch

pytestmark = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

DEADLOCK_SECONDS = 60
SAMPLES = 480


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with rows, chunks and small fields."""
    values = np.random.default_rng(0).integers(0, 99, (SAMPLES, 16, 24), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = values
        file.create_dataset("gzip", data=values, chunks=(10, 16, 12), compression="gzip")
        file["labels"] = np.arange(SAMPLES)
    return tmp_path / "a.h5"


def opened(path: Path, **options: Any) -> AsyncReader:
    fields = {"raw": "raw", "gzip": "gzip", "labels": "labels"}
    return AsyncReader(
        {"hdf5_path": path, "fields": fields, "batch_size": 32, "device": "cpu"}, **options
    )


def submissions_of(reader: AsyncReader) -> Submissions:
    found = reader._engine.delivery._submissions
    assert found is not None
    return found


def check(batch: Any, path: Path) -> None:
    with h5py.File(path) as file:
        for name in "raw", "gzip":
            assert np.array_equal(batch[name], file[name][:][batch.index])
    assert np.array_equal(batch.labels, batch.index)


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_a_batch_is_filled_while_the_loop_keeps_the_gil(path, shuffle, nobody_else_gets_the_gil):
    with opened(path, shuffle=shuffle, num_threads=2) as reader:
        batch = reader.get_next_batch()  # waits, so that the threads come to the queue
        for _ in range(40):
            fetch_and_keep_the_gil(reader)
            batch = reader.get_next_batch()
            check(batch, path)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_is_submitted_again_is_not_read_again(path, num_threads, monkeypatch):
    monkeypatch.setattr("h5async.fill.resident._KEPT_WHOLE_NBYTES", 0)
    submit = Submissions.submit

    def submit_again(self: Submissions, request: Any, **more: Any) -> None:
        for _ in range(3):
            submit(self, request, **more)

    counts = []
    for function in submit, submit_again:
        monkeypatch.setattr(Submissions, "submit", function)
        with opened(path, num_threads=num_threads, prefetch=1, batch_size=10) as reader:
            for batch in reader:
                check(batch, path)
            counts.append(reader.stats().decoded_chunks)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_an_exception_kept_from_being_submitted_is_submitted_later(
    path, num_threads, monkeypatch
):
    """As Ctrl-C does, wherever it comes."""
    submit, random = Submissions.submit, np.random.default_rng(0)

    def fail_sometimes(self: Submissions, request: Any, **more: Any) -> None:
        if random.random() < 0.2:
            raise KeyboardInterrupt
        submit(self, request, **more)
        if random.random() < 0.2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Submissions, "submit", fail_sometimes)
    found = []
    with opened(path, num_threads=num_threads, prefetch=3, timeout=DEADLOCK_SECONDS) as reader:
        while len(found) < 2 * len(reader):
            try:
                reader.fetch_data()
                batch = reader.get_next_batch()
            except KeyboardInterrupt:
                continue
            check(batch, path)
            found.append((batch.epoch, batch.number))
        per_epoch = len(reader)
    assert found == [divmod(serial, per_epoch) for serial in range(2 * per_epoch)]


@pytest.mark.parametrize("name", ["abandon", "unassign"])
def test_an_interruption_of_what_another_one_leaves(path, name, monkeypatch):
    """Two Ctrl-C, of which the second comes while the batch of the first is dropped."""
    with opened(path, num_threads=0, timeout=DEADLOCK_SECONDS) as reader:
        filler, ring = reader._engine.filler, reader._engine.ring
        owner = filler if name == "abandon" else ring
        errors = [KeyboardInterrupt, KeyboardInterrupt]

        def interrupt(*_: object) -> Any:
            raise errors.pop()

        with monkeypatch.context() as patch:
            patch.setattr(Submissions, "get_here", interrupt)
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                reader.get_next_batch()
        assert not errors
        for number in range(3):
            batch = reader.get_next_batch()
            check(batch, path)
            assert batch.number == number


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("more", [{}, {"postprocess": lambda *arrays: arrays}])
def test_many_threads_fill_what_the_samples_say(path, num_threads, more):
    for shuffle, batch_size, prefetch in ("full", 7, 5), ("window", 64, 2), (False, 480, 3):
        options = {"shuffle": shuffle, "batch_size": batch_size, "prefetch": prefetch}
        with opened(path, num_threads=num_threads, **options, **more) as reader:
            for _ in range(3):
                for batch in reader:
                    check(batch, path)
                    if batch.number == 9:
                        break


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_batch_of_which_the_core_refuses_a_part(path, num_threads):
    """The rest of the batch is not read again; the error is that of the Python implementation."""
    with h5py.File(path) as file:
        chunk = file["gzip"].id.get_chunk_info_by_coord((40, 0, 0))
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * 20)
    with opened(path, num_threads=num_threads, prefetch=2) as reader:
        delivered, errors = 0, []
        for _ in range(len(reader)):
            try:
                delivered += reader.get_next_batch().size
            except ReadError as error:
                errors.append(str(error))
    assert delivered == SAMPLES - 32
    assert len(errors) == 1
    assert '"gzip"' in errors[0]
    assert "40" in errors[0]


def test_a_sample_that_there_is_not_is_an_error_and_no_fault(path, monkeypatch):
    samples = Sampling.samples

    def spoilt(self: Sampling, epoch: int, begin: int, end: int) -> Any:
        found = samples(self, epoch, begin, end)
        found[3] = SAMPLES if begin == 32 else found[3]
        return found

    monkeypatch.setattr(Sampling, "run_at", lambda *_: None)
    monkeypatch.setattr(Sampling, "samples", spoilt)
    monkeypatch.setattr(
        Sampling, "batch_at", lambda *a: samples(a[0], a[1], *a[0].dealt_at(*a[1:]))
    )
    with opened(path, num_threads=2) as reader:
        for batch in reader:  # the Python implementation begins it anew, and asks for others
            check(batch, path)


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_batches_of_another_epoch_take_the_place_of_those_on_their_way(path, num_threads):
    with opened(path, num_threads=num_threads, shuffle="full", prefetch=3) as reader:
        for epoch in (0, 5, 5, 2, 9):
            reader.set_epoch(epoch)
            for _ in range(4):
                reader.fetch_data()
            for number in range(2):
                batch = reader.get_next_batch(timeout=DEADLOCK_SECONDS)
                assert (batch.epoch, batch.number) == (epoch, number)
                check(batch, path)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_batch_that_was_interrupted_has_the_same_samples_again(tmp_path, num_threads):
    """Its numbers are permuted in place, once, however often it is begun."""
    count, times = 20_000, iter(range(10**6))
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file["data"] = np.arange(count)

    def fail_sometimes(data: np.ndarray) -> None:
        if next(times) % 3 == 0:
            raise KeyboardInterrupt

    options = {"hdf5_path": tmp_path / "large.h5", "labels_field": None, "device": "cpu"}
    options |= {"shuffle": "full", "batch_size": 4096, "num_threads": num_threads}
    with AsyncReader(options) as reader:
        expected = [batch.index for batch in reader]
    found = []
    with AsyncReader(options, postprocess=fail_sometimes) as reader:
        for _ in range(3 * len(expected)):
            try:
                batch = reader.get_next_batch()
            except KeyboardInterrupt:
                continue
            assert np.array_equal(batch.data, batch.index)
            if batch.epoch == 0:
                found.append((batch.number, batch.index))
    assert found
    for number, index in found:
        assert np.array_equal(index, expected[number])


@pytest.mark.parametrize("prefetch", [2, 4])
def test_after_a_jump_batches_are_begun_at_once(path, prefetch, nobody_else_gets_the_gil):
    """Also where others are on their way, which nobody wants any more."""
    with opened(path, num_threads=1, prefetch=prefetch, shuffle="full") as reader:
        reader.get_next_batch()
        submissions = submissions_of(reader)
        for epoch in range(1, 30):
            for _ in range(prefetch):
                reader.fetch_data()
            reader.set_epoch(epoch)
            for _ in range(prefetch):
                reader.fetch_data()
            first = reader._engine.ring.consumer.next
            slots = reader._engine.ring._entries
            end = time.monotonic() + DEADLOCK_SECONDS
            while submissions.result(slots[first].slot, first) is None:  # the loop waits for none
                assert time.monotonic() < end
            batch = reader.get_next_batch()
            assert (batch.epoch, batch.number) == (epoch, 0)
            check(batch, path)


@pytest.mark.parametrize("more", [{}, {"postprocess": lambda *arrays: arrays}])
def test_jumps_while_threads_are_at_work(path, more):
    random = np.random.default_rng(1)
    with opened(path, num_threads=6, prefetch=3, shuffle="window", batch_size=64, **more) as reader:
        for epoch in range(150):
            reader.set_epoch(epoch)
            for _ in range(random.integers(4)):
                reader.fetch_data()
            for number in range(random.integers(4)):
                batch = reader.get_next_batch(timeout=DEADLOCK_SECONDS)
                assert (batch.epoch, batch.number) == (epoch, number)
                check(batch, path)


def test_what_a_reader_took_that_could_not_be_made_is_given_back(path, monkeypatch):
    closed = []
    close = Collection.close
    monkeypatch.setattr(Collection, "close", lambda self: closed.append(self) or close(self))

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Scratch, "allocate", refuse)
    with pytest.raises(OutOfMemoryError):
        opened(path)
    assert len(closed) == 1


def test_memory_outlives_a_submission_that_another_thread_closes(path, monkeypatch):
    with opened(path, num_threads=0) as reader:
        reader.fetch_data()
        queue = reader._engine.ring.completions._queue
        memory, core = weakref.ref(queue._samples[0]), queue._core

        def submit(*arguments: Any) -> int:
            queue.close()
            assert memory() is not None
            return core.submit(*arguments)

        monkeypatch.setattr(queue, "_core", SimpleNamespace(submit=submit))
        queue.submit(0, 0, (0, 1, None, None, None), False)
        monkeypatch.undo()
        assert memory() is None
        queue.submit(0, 0, (0, 1, None, None, None), False)  # of a closed one: nothing is written
