"""Decoded chunks that are kept for the next batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from h5async import AsyncReader
from h5async.chunkcache import ChunkCache
from h5async.codecs import FilterPipeline

WAIT_SECONDS = 20


def use(cache, place, decoded):
    """Ask for a chunk whose bytes all equal its place, and note where it had to be decoded."""

    def decode(out):
        decoded.append(place)
        out[:] = place

    with cache.decoded(place, decode) as chunk:
        assert (chunk == place).all()


def test_what_was_used_last_is_kept():
    cache, decoded = ChunkCache(num_threads=1, kept=2, nbytes=8), []
    for place in (1, 2, 3, 1, 4, 1, 3, 2):
        use(cache, place, decoded)
    assert decoded == [1, 2, 3, 4, 2]


def test_a_chunk_in_use_is_not_given_away():
    cache, decoded = ChunkCache(num_threads=2, kept=0, nbytes=8), []
    with cache.decoded(7, lambda out: out.fill(7)) as held:
        for place in (1, 2, 3):
            use(cache, place, decoded)
        assert (held == 7).all()
    use(cache, 7, decoded)
    assert decoded == [1, 2, 3]


def test_a_chunk_that_failed_to_decode_is_not_kept():
    cache, decoded = ChunkCache(num_threads=1, kept=1, nbytes=8), []

    def fail(out):
        out[:] = 9
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"), cache.decoded(1, fail):
            pytest.fail("the chunk was given out")
    use(cache, 1, decoded)
    assert decoded == [1]


def test_two_threads_that_meet_in_one_chunk_both_decode_it():
    cache = ChunkCache(num_threads=2, kept=0, nbytes=8)
    both = threading.Barrier(2, timeout=WAIT_SECONDS)

    def decode(out):
        both.wait()
        out[:] = 5

    def work():
        with cache.decoded(5, decode) as chunk:
            return chunk.tobytes()

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(work) for _ in range(2)]
        assert {r.result(WAIT_SECONDS) for r in results} == {bytes([5] * 8)}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_small_batches_in_order_decode_each_large_chunk_about_once(
    tmp_path, monkeypatch, num_threads
):
    values = np.arange(1000 * 3, dtype=np.int64).reshape(1000, 3)
    path = tmp_path / "large_chunks.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(100, 3), compression="gzip")
    decoded = []
    decode = FilterPipeline.decode

    def counted(self, *arguments):
        decoded.append(1)
        decode(self, *arguments)

    monkeypatch.setattr(FilterPipeline, "decode", counted)
    options = {"batch_size": 7, "labels_field": None, "num_threads": num_threads, "prefetch": 2}
    with AsyncReader(hdf5_path=path, **options) as reader:
        epoch = iter(reader)
        for batch in epoch:
            assert np.array_equal(batch.data, values[batch.index])
            if batch.last:
                break
    # With threads, two batches may meet in a chunk, and the next epoch's first may have begun.
    assert len(decoded) <= 10 * max(1, num_threads) + 2 * (num_threads > 0)
