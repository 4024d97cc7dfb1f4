"""Decoded chunks that are kept for the next batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from h5async import AsyncReader
from h5async.core.tablestructures import KEPT_OVERHEAD_NBYTES
from h5async.read.chunkcache import ChunkCache
from h5async.read.pipeline import FilterPipeline

WAIT_SECONDS = 200


def held(cache, place, decoded, nbytes=8):
    """Return a chunk whose bytes all equal its place, and note where it had to be decoded."""

    def decode(out):
        decoded.append(place)
        out[:] = place

    return cache.decoded(place, np.empty(nbytes, np.uint8), decode)


def use(cache, place, decoded, nbytes=8):
    with held(cache, place, decoded, nbytes) as chunk:
        assert chunk.size == nbytes
        assert (chunk == place).all()
        return chunk.ctypes.data


def test_what_was_used_last_is_kept():
    cache, decoded = ChunkCache(3 * (8 + KEPT_OVERHEAD_NBYTES)), []
    for place in (1, 2, 3, 1, 4, 1, 3, 2):
        use(cache, place, decoded)
    assert decoded == [1, 2, 3, 4, 2]


def test_two_chunks_are_kept_whatever_the_budget():
    cache, decoded = ChunkCache(0), []
    for place in (1, 2, 1, 2, 3, 2, 1):
        use(cache, place, decoded)
    assert decoded == [1, 2, 3, 1]


def test_a_buffer_is_used_again():
    cache = ChunkCache(2 * (8 + KEPT_OVERHEAD_NBYTES))
    first = {use(cache, place, []) for place in (1, 2)}
    assert {use(cache, place, []) for place in (3, 4)} == first


def test_chunks_of_several_sizes_share_one_budget():
    cache, decoded = ChunkCache(100 + 2 * KEPT_OVERHEAD_NBYTES), []
    for place, nbytes in ((1, 60), (2, 30), (1, 60), (3, 50), (2, 30), (1, 60)):
        use(cache, place, decoded, nbytes)
    assert decoded == [1, 2, 3, 2, 1]


def test_a_chunk_in_use_is_not_given_away():
    cache, decoded = ChunkCache(0), []
    with cache.decoded(7, np.empty(8, np.uint8), lambda out: out.fill(7)) as held:
        for place in (1, 2, 3):
            use(cache, place, decoded)
        assert (held == 7).all()
    use(cache, 7, decoded)
    assert decoded == [1, 2, 3]


def test_where_all_buffers_are_in_use_a_chunk_is_not_kept():
    cache, scratch, decoded = ChunkCache(0), np.empty(8, np.uint8), []
    with held(cache, 1, decoded), held(cache, 2, decoded):
        with cache.decoded(3, scratch, lambda out: out.fill(3)) as chunk:
            assert chunk is scratch
    for place in (1, 2):
        use(cache, place, decoded)
    assert decoded == [1, 2]


def test_a_chunk_that_failed_to_decode_is_not_kept():
    cache, decoded = ChunkCache(0), []

    def fail(out):
        out[:] = 9
        raise ValueError("damaged")

    for _ in range(2):
        with (
            pytest.raises(ValueError, match="damaged"),
            cache.decoded(1, np.empty(8, np.uint8), fail),
        ):
            pytest.fail("the chunk was given out")
    use(cache, 1, decoded)
    assert decoded == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_waits_for_the_chunk_that_another_one_decodes(fails):
    cache, begun, go_on = ChunkCache(0), threading.Event(), threading.Event()
    decoded = []

    def decode_slowly(out):
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        if fails:
            raise ValueError("damaged")
        out[:] = 5

    def work():
        with cache.decoded(5, np.empty(8, np.uint8), decode_slowly):
            pass

    def wait():
        go_on.set()
        use(cache, 5, decoded)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work)
        assert begun.wait(WAIT_SECONDS)
        pool.submit(wait).result(WAIT_SECONDS)
        if fails:
            with pytest.raises(ValueError, match="damaged"):
                first.result(WAIT_SECONDS)
        else:
            first.result(WAIT_SECONDS)
    assert decoded == [5] * fails


@pytest.mark.usefixtures("python_way")
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
    # With threads, the next epoch's first batches may have begun.
    assert len(decoded) <= 10 + 2 * (num_threads > 0)


def test_chunks_of_a_file_that_has_changed_are_forgotten_also_those_in_use():
    cache, decoded = ChunkCache(100), []
    use(cache, 1, decoded)

    def forget(out):
        cache.clear()
        out[:] = 2  # with what was read before

    with held(cache, 1, decoded), cache.decoded(2, np.empty(8, np.uint8), forget) as chunk:
        assert (chunk == 2).all()
    for place in (1, 2):
        use(cache, place, decoded)
    assert decoded == [1, 1, 2]


def test_who_waits_for_a_chunk_of_a_file_that_has_changed_decodes_it_anew():
    cache, decoded, waiters = ChunkCache(100), [], []

    def decode(out):
        waiters.append(threading.Thread(target=use, args=(cache, 1, decoded)))
        waiters[0].start()
        cache.clear()
        waiters[0].join(WAIT_SECONDS)
        out[:] = 1

    with cache.decoded(1, np.empty(8, np.uint8), decode):
        assert decoded == [1]
