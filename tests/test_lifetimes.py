"""`debug_lifetimes`: a batch that is used after its life is caught, and nothing else changes."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from h5async import AsyncReader, BatchExpiredError, H5AsyncError

N, BATCH = 20, 6


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        file["data"] = rng.normal(size=(N, 3, 4)).astype("f4")
        file["labels"] = np.arange(N)
        file["text"] = np.array([b"%04d" % i for i in range(N)])
    return path


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("shuffle", [False, "full"])
def test_batches_are_the_same(path, num_threads, shuffle):
    options = {"hdf5_path": path, "batch_size": BATCH, "shuffle": shuffle}
    with (
        AsyncReader(debug_lifetimes=True, num_threads=num_threads, **options) as debug,
        AsyncReader(num_threads=num_threads, **options) as plain,
    ):
        for _ in range(2):
            for ours, theirs in zip(debug, plain, strict=True):
                assert np.array_equal(ours.index, theirs.index)
                assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
                assert (ours.epoch, ours.number, ours.last) == (
                    theirs.epoch,
                    theirs.number,
                    theirs.last,
                )


def test_arrays_held_too_long_are_poisoned_for_good(path):
    fields = {"data": "data", "labels": "labels", "text": "text"}
    with AsyncReader(
        hdf5_path=path, fields=fields, batch_size=BATCH, debug_lifetimes=True
    ) as reader:
        data, labels, text = reader.get_next_batch()
        assert np.isfinite(data).all()
        for _ in range(10):
            reader.get_next_batch()
            assert np.isnan(data).all()
            assert (labels == -1).all()
            assert set(text.tobytes()) == {255}


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: batch.data,
        lambda batch: batch["labels"],
        lambda batch: batch[0],
        lambda batch: list(batch),
        lambda batch: batch.copy(),
    ],
)
def test_an_expired_batch_says_so(path, use):
    with AsyncReader(hdf5_path=path, batch_size=BATCH, debug_lifetimes=True) as reader:
        reader.get_next_batch()
        batch = reader.get_next_batch()
        use(batch)
        kept = batch.copy()
        reader.fetch_data()
        use(batch)
        reader.get_next_batch()
        with pytest.raises(BatchExpiredError, match=r"batch 1 of epoch 0 .*copy\(\)") as info:
            use(batch)
        assert isinstance(info.value, H5AsyncError | RuntimeError)
        use(kept)
        assert batch.keys() == ["data", "labels"]
        assert len(batch) == 2
        assert repr(batch) == "<Batch 1 of epoch 0, expired>"
        assert np.array_equal(batch.index, kept.index)


def test_the_last_batch_outlives_the_reader(path):
    with AsyncReader(hdf5_path=path, batch_size=BATCH, debug_lifetimes=True) as reader:
        batch = reader.get_next_batch()
    assert np.isfinite(batch.data).all()


def test_what_postprocess_returns_is_not_touched(path):
    mine = np.arange(3.0)
    with AsyncReader(
        hdf5_path=path,
        batch_size=BATCH,
        labels_field=None,
        postprocess=lambda data: mine,
        debug_lifetimes=True,
    ) as reader:
        held = reader.get_next_batch().data
        reader.get_next_batch()
        assert np.isnan(held).all()
        assert np.array_equal(mine, np.arange(3.0))


def test_without_it_nothing_is_copied(path):
    with AsyncReader(hdf5_path=path, batch_size=BATCH, prefetch=1) as reader:
        first = reader.get_next_batch()
        again = reader.get_next_batch()
        assert first.data.ctypes.data == again.data.ctypes.data
