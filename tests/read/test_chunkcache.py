"""Decoded chunks that are kept for the next batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from h5async import AsyncReader
from h5async.read.chunkcache import ChunkCache, State
from h5async.read.pipeline import FilterPipeline

WAIT_SECONDS = 200


def use(cache, place, decoded):
    """Ask for a chunk whose bytes all equal its place, and note where it had to be decoded."""

    def decode(out):
        decoded.append(place)
        out[:] = place

    with cache.decoded(place, np.empty(8, np.uint8), decode) as chunk:
        assert (chunk == place).all()


def claim(cache, keys):
    """Claim chunks of 8 bytes and fill those that are due; return the states."""
    with cache.claimed(keys, 8) as claims:
        for key, state, data in zip(keys, claims.states, claims.buffers, strict=True):
            if state == State.CLAIMED:
                data[:] = key
            assert (data is None) == (state in (State.UNKEPT, State.BUSY))
            assert data is None or (data == key).all()
        claims.are_filled = True
        return claims.states


def test_what_was_used_last_is_kept():
    cache, decoded = ChunkCache(3 * 8), []
    for place in (1, 2, 3, 1, 4, 1, 3, 2):
        use(cache, place, decoded)
    assert decoded == [1, 2, 3, 4, 2]


def test_two_chunks_are_kept_whatever_the_budget():
    cache, decoded = ChunkCache(0), []
    for place in (1, 2, 1, 2, 3, 2, 1):
        use(cache, place, decoded)
    assert decoded == [1, 2, 3, 1]


def test_many_are_claimed_at_once_and_the_last_ones_kept():
    cache = ChunkCache(3 * 8)
    assert claim(cache, [1, 2, 3, 4, 5]) == [State.UNKEPT] * 2 + [State.CLAIMED] * 3
    assert claim(cache, [2, 3, 4, 5]) == [State.UNKEPT] + [State.READY] * 3, "all are in use"
    assert claim(cache, [2]) == [State.CLAIMED]
    assert claim(cache, [4, 5, 2]) == [State.READY] * 3, "3 was out of use for longest"


def test_a_buffer_is_used_again():
    cache = ChunkCache(2 * 8)
    with cache.claimed([1, 2], 8) as claims:
        first = {data.ctypes.data for data in claims.buffers}
        claims.are_filled = True
    with cache.claimed([3, 4], 8) as claims:
        assert {data.ctypes.data for data in claims.buffers} == first


def test_chunks_of_several_sizes_share_one_budget():
    cache = ChunkCache(100)
    with cache.claimed(["large"], 60) as claims:
        claims.are_filled = True
    with cache.claimed(["small"], 30) as claims:
        claims.are_filled = True
    with cache.claimed(["middle"], 50) as claims:
        assert claims.states == [State.CLAIMED]
        claims.are_filled = True
    with cache.claimed(["large"], 60) as claims:
        assert claims.states == [State.CLAIMED]


def test_a_chunk_in_use_is_not_given_away():
    cache, decoded = ChunkCache(0), []
    with cache.decoded(7, np.empty(8, np.uint8), lambda out: out.fill(7)) as held:
        for place in (1, 2, 3):
            use(cache, place, decoded)
        assert (held == 7).all()
    use(cache, 7, decoded)
    assert decoded == [1, 2, 3]


def test_where_all_buffers_are_in_use_a_chunk_is_not_kept():
    cache, scratch = ChunkCache(0), np.empty(8, np.uint8)
    with cache.claimed([1, 2], 8) as claims:
        with cache.decoded(3, scratch, lambda out: out.fill(3)) as chunk:
            assert chunk is scratch
        for key, data in zip([1, 2], claims.buffers, strict=True):
            data[:] = key
        claims.are_filled = True
    assert claim(cache, [1, 2]) == [State.READY] * 2


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


def test_claims_after_a_failure_are_free_again():
    cache = ChunkCache(4 * 8)
    with cache.claimed([1, 2, 3], 8) as claims:
        claims.buffers[0][:] = 1
        claims.give_up(2)
        claims.give_up(3)
        claims.are_filled = True
    assert claim(cache, [1, 2, 3]) == [State.READY, State.CLAIMED, State.CLAIMED]
    with cache.claimed([4], 8):
        pass  # nothing was said of it
    assert claim(cache, [4]) == [State.CLAIMED]


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
        with cache.claimed([5], 8) as claims:
            assert claims.states == [State.BUSY]
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
    with cache.claimed([1, 2], 8) as claims:
        assert claims.states == [State.READY, State.CLAIMED]
        cache.clear()
        claims.are_filled = True  # with what was read before
    for place in (1, 2):
        use(cache, place, decoded)
    assert decoded == [1, 1, 2]


def test_who_waits_for_a_chunk_of_a_file_that_has_changed_decodes_it_anew():
    cache, states = ChunkCache(100), []

    def wait_for_it():
        with cache.claimed([1], 8, wait=True) as claims:
            states.extend(claims.states)

    with cache.claimed([1], 8):
        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        cache.clear()
        waiter.join(200)
    assert states == [State.CLAIMED]
