"""A real reader under any interleaving of calls, against a model of the contract.

The model is a few numbers: which batch is delivered next, how many were asked for, and where each
loop stops. A copy of the batch in hand is compared with it just before its life ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, poison
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from orders import batch_of

from h5async import AsyncReader, Batch, Field, ReaderClosedError
from h5async.order.sampling import Sampling

DEADLOCK_SECONDS = 200
BATCH_SIZE = 4
UNLUCKY = 13  # a batch that holds this sample fails where the machine wants failures

# Each way of reading: decoded chunks, rows by their address, h5py, and a transform.
FIELDS = {
    "data": Field("chunked"),
    "labels": Field("contiguous"),
    "other": Field("compact"),
    "turned": Field("chunked", axes=(0, 2, 1), dtype="f4", scale=0.5),
}


def write_file(path: Path, num_samples: int) -> dict[str, np.ndarray]:
    """Write the datasets; return what a batch of all samples would hold."""
    rng = np.random.default_rng(num_samples)
    chunked = rng.integers(-1000, 1000, (num_samples, 5, 3)).astype("i2")
    contiguous = np.arange(num_samples) * 10
    compact = rng.random((num_samples, 2))
    with h5py.File(path, "w") as file:
        chunks = (min(5, num_samples), 3, 3)
        file.create_dataset("chunked", data=chunked, chunks=chunks, compression="gzip")
        file["contiguous"] = contiguous
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(compact.shape)
        dataset = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_DOUBLE, space, properties)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, compact)
    turned = chunked.transpose(0, 2, 1).astype("f4") * np.float32(0.5)
    return {"data": chunked, "labels": contiguous, "other": compact, "turned": turned}


class ReaderMachine(RuleBasedStateMachine):
    """One reader, and the contract in a few numbers."""

    files: dict[int, tuple[Path, dict[str, np.ndarray]]]

    def __init__(self) -> None:
        super().__init__()
        self.reader: AsyncReader | None = None
        self.held: Batch | None = None
        self.copies: list[np.ndarray] = []
        self.delivered = 0  # the batch that is delivered next, counted through all epochs
        self.asked = 0  # batches below this were asked for
        self.loops: list[tuple[Iterator[Batch], int]] = []  # each with where it stops
        self.closed = False

    @initialize(
        num_samples=st.sampled_from([23, 20, 3]),
        num_threads=st.sampled_from([0, 1, 3]),
        prefetch=st.sampled_from([1, 2, 5]),
        drop_last=st.booleans(),
        shuffle=st.sampled_from([False, "full"]),
        fails=st.booleans(),
    )
    def open_reader(
        self,
        num_samples: int,
        num_threads: int,
        prefetch: int,
        drop_last: bool,
        shuffle: Any,
        fails: bool,
    ) -> None:
        path, self.truth = self.files[num_samples]
        drop_last &= num_samples >= BATCH_SIZE  # an epoch without a batch is another test
        self.sampling = Sampling(num_samples, BATCH_SIZE, shuffle, 7, drop_last)
        self.batches = self.sampling.num_batches
        self.fails = fails
        self.num_threads = num_threads
        self.reader = AsyncReader(
            hdf5_path=path,
            fields=FIELDS,
            batch_size=BATCH_SIZE,
            seed=7,
            num_threads=num_threads,
            prefetch=prefetch,
            drop_last=drop_last,
            shuffle=shuffle,
            device="cpu",
            timeout=DEADLOCK_SECONDS,
            postprocess=self.postprocess if fails else None,
        )
        poison(self.reader)
        assert len(self.reader) == self.batches
        assert self.reader.num_samples == num_samples

    @staticmethod
    def postprocess(data: Any, labels: np.ndarray, other: Any, turned: Any) -> None:
        if (labels == UNLUCKY * 10).any():
            raise ArithmeticError("an unlucky sample")

    # --- what is checked ---------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the threads have nothing left to do: what can be overwritten was."""
        assert self.reader is not None
        ring = self.reader._engine.ring
        if self.num_threads and not self.closed:
            deadline = time.monotonic() + DEADLOCK_SECONDS
            done = ring._is_done
            while ring.can_assign() or not all(done(*e) for e in [*ring._entries.items()]):
                self.reader._engine.delivery.begin()
                assert time.monotonic() < deadline
                time.sleep(0.0002)

    def check_held(self) -> None:
        if self.held is not None:
            for array, copy in zip(self.held, self.copies, strict=True):
                assert_same_bits(array, copy)

    def expect_next(self, get: Any) -> None:
        """Get a batch and compare it with the one that is due."""
        self.settle()
        self.check_held()
        serial = self.delivered
        epoch, number = divmod(serial, self.batches)
        index = batch_of(self.sampling, epoch, number)
        self.held = None
        self.delivered += 1
        self.asked = max(self.asked, self.delivered)
        if self.fails and UNLUCKY in index:
            with pytest.raises(ArithmeticError, match=f"batch {number} of epoch {epoch} raised"):
                get()
            return
        batch = get()
        assert (batch.epoch, batch.number) == (epoch, number)
        assert batch.last is (number == self.batches - 1)
        assert batch.size == len(batch.index) == index.size
        assert np.array_equal(batch.index, index)
        assert list(batch.keys()) == list(FIELDS)
        for name, values in self.truth.items():
            assert_same_bits(batch[name], values[index])
        self.held = batch
        self.copies = [array.copy() for array in batch]

    # --- calls ----------------------------------------------------------------------------------

    @precondition(lambda self: not self.closed)
    @rule(times=st.sampled_from([1, 1, 1, 2, 20]))
    def fetch_data(self, times: int) -> None:
        for _ in range(times):
            assert self.reader is not None
            is_last = self.reader.fetch_data()
            assert is_last is (self.asked % self.batches == self.batches - 1)
            self.asked += 1

    @precondition(lambda self: not self.closed)
    @rule()
    def get_next_batch(self) -> None:
        assert self.reader is not None
        self.expect_next(self.reader.get_next_batch)

    @precondition(lambda self: not self.closed and len(self.loops) < 3)
    @rule()
    def begin_loop(self) -> None:
        """A loop begins the next epoch that nothing was taken from."""
        assert self.reader is not None
        loop = iter(self.reader)
        epoch = -(-self.delivered // self.batches)
        self.delivered = epoch * self.batches
        self.asked = max(self.asked, self.delivered)
        self.loops.append((loop, self.delivered + self.batches))
        self.settle()
        self.check_held()

    @precondition(lambda self: self.loops)
    @rule(data=st.data(), times=st.sampled_from([1, 1, 2, 30]))
    def advance_loop(self, data: st.DataObject, times: int) -> None:
        loop, stop = data.draw(st.sampled_from(self.loops))
        for _ in range(times):
            if self.delivered >= stop:
                with pytest.raises(StopIteration):
                    next(loop)
                self.check_held()
            elif self.closed:
                with pytest.raises(ReaderClosedError):
                    next(loop)
            else:
                self.expect_next(lambda: next(loop))

    @precondition(lambda self: self.loops)
    @rule(data=st.data())
    def leave_loop(self, data: st.DataObject) -> None:
        self.loops.remove(data.draw(st.sampled_from(self.loops)))

    @precondition(lambda self: not self.closed)
    @rule()
    def whole_epoch(self) -> None:
        """From a fresh loop to its end, there are as many batches as `len` says."""
        self.begin_loop_and_finish(self.batches)

    @precondition(lambda self: not self.closed)
    @rule(count=st.integers(1, 6))
    def break_out(self, count: int) -> None:
        self.begin_loop_and_finish(min(count, self.batches))

    def begin_loop_and_finish(self, count: int) -> None:
        assert self.reader is not None
        loop = iter(self.reader)
        self.delivered = -(-self.delivered // self.batches) * self.batches
        self.asked = max(self.asked, self.delivered)
        stop = self.delivered + self.batches
        for _ in range(count):
            self.expect_next(lambda: next(loop))
        if self.delivered == stop:
            with pytest.raises(StopIteration):
                next(loop)

    @rule(sure=st.integers(0, 19))
    def close(self, sure: int) -> None:
        if sure != 19 and not self.closed:
            return  # most runs are longer
        assert self.reader is not None
        self.reader.close()
        self.closed = True
        self.check_held()

    @precondition(lambda self: self.closed)
    @rule()
    def all_is_refused_once_closed(self) -> None:
        assert self.reader is not None
        for call in (
            self.reader.get_next_batch,
            self.reader.fetch_data,
            lambda: iter(self.reader),
            lambda: self.reader.get_next_batch(timeout=0),
        ):
            with pytest.raises(ReaderClosedError, match="closed"):
                call()
        assert len(self.reader) == self.batches
        assert "closed" in repr(self.reader)
        self.check_held()

    @invariant()
    def the_batch_in_hand_is_not_overwritten(self) -> None:
        self.check_held()

    def teardown(self) -> None:
        if self.reader is not None:
            self.settle()
            self.check_held()
            self.reader.close()
            self.check_held()


@pytest.fixture
def files(tmp_path: Path) -> dict[int, tuple[Path, dict[str, np.ndarray]]]:
    paths = {count: tmp_path / f"{count}.h5" for count in (23, 20, 3)}
    return {count: (path, write_file(path, count)) for count, path in paths.items()}


@pytest.mark.parametrize("min_share_nbytes", [1, 128 * 1024])
def test_any_interleaving_of_calls_keeps_the_contract(
    files: dict[int, Any], monkeypatch: pytest.MonkeyPatch, min_share_nbytes: int
) -> None:
    """With shares of a few bytes, several threads work on each batch, however small."""
    monkeypatch.setattr("h5async.fill.phases._MIN_SHARE_NBYTES", min_share_nbytes)

    class Machine(ReaderMachine):
        pass

    Machine.files = files
    run_state_machine_as_test(Machine, settings=settings(max_examples=settings().max_examples // 3))
