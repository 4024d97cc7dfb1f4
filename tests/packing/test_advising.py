"""Which layouts are tried, how a sample stands for the whole, and which layout is the best."""

from __future__ import annotations

import itertools

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async.index.metadata import list_layouts
from h5async.packing import advising
from h5async.packing.advising import (
    Finding,
    Layout,
    best_of,
    chunks_of_batch,
    layouts_to_try,
    rows_of_sample,
    scattered,
    whole_layout,
    write_sample,
)


def layout_of(path, shape, dtype="u1", **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", shape, dtype, **options)
    return next(found for _, found in list_layouts(path))


def test_layouts(tmp_path):
    """Chunks of 16 kB to 1 MB, the filters that HDF5 has, and the layout as it is, once."""
    wide = layout_of(tmp_path / "a.h5", (100, 9000), chunks=(50, 9000), compression="gzip")
    tried = layouts_to_try(wide)
    assert tried[0] == Layout(50, "gzip:4", is_current=True)
    assert Layout(2, "none") in tried
    assert {one.rows for one in tried[1:]} <= {2, 8, 30, 100}
    assert {one.filter for one in tried} >= {"none", "lzf", "gzip:4"}
    numbers = layout_of(tmp_path / "b.h5", (100, 9000), "f4", chunks=(1, 9000), compression="lzf")
    assert "shuffle+lzf" in {one.filter for one in layouts_to_try(numbers)}
    large = layout_of(tmp_path / "c.h5", (4, 3 << 20), chunks=(1, 3 << 20))
    assert {one.rows for one in layouts_to_try(large)} == {1}
    assert sum(one.filter == "none" for one in layouts_to_try(large)) == 1
    plain = layout_of(tmp_path / "d.h5", (4, 3 << 10))
    assert layouts_to_try(plain)[0] == Layout(0, "none", is_current=True)


@given(data=st.data())
def test_rows_of_samples(tmp_path_factory, data):
    """They are of whole chunks, from the beginning to the end."""
    count, chunk = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 300))
    path = tmp_path_factory.getbasetemp() / "rows.h5"
    found = layout_of(path, (count, 100), chunks=(min(count, chunk), 100), compression="gzip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advising, "SAMPLE_NBYTES", 20_000)
        patch.setattr(advising, "_MOST_NBYTES", 100_000)
        rows = rows_of_sample(found, in_chunks=True)
        few = rows_of_sample(found, in_chunks=False)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert rows[-1] < count
    held = np.unique(rows // found.chunk_shape[0], return_counts=True)
    whole = np.minimum((held[0] + 1) * found.chunk_shape[0], count) - held[0] * found.chunk_shape[0]
    assert held[1].tolist() == whole.tolist()
    assert min(count, 200) <= few.size <= 200 + 8
    assert rows.size >= min(count, 200)
    assert few[-1] >= count - 10 or few.size == count


@given(
    chunks=st.integers(2, 60),
    of_chunk=st.integers(1, 40),
    times=st.integers(1, 50),
    batch=st.integers(1, 300),
)
def test_batches_need_as_many_chunks(chunks, of_chunk, times, batch):
    """As a random batch of the whole dataset, for a row; and none that the batch before needed."""
    rows, count = np.arange(chunks * of_chunk) + 7, chunks * of_chunk * times
    batches = scattered(rows, of_chunk, count, batch)
    wanted = chunks_of_batch(count, of_chunk, batch) / batch
    if batches is None:
        assert chunks_of_batch(rows.size, of_chunk, batch) / batch >= 0.97 * wanted
        return
    needed = [{(row - 7) // of_chunk for row in one} for one in batches]
    assert all(set(one) <= set(rows.tolist()) for one in batches)
    assert all(not a & b for a, b in itertools.pairwise(needed))
    size = len(batches[0])
    assert size <= batch
    assert abs(len(needed[0]) - max(1, wanted * size)) <= 1


def test_chunks_of_a_batch():
    """The mean of many draws, with chunks that are drawn several times."""
    rng = np.random.default_rng(0)
    for count, rows, batch in [(1000, 10, 32), (100, 50, 8), (64, 1, 64), (10, 20, 5)]:
        drawn = [np.unique(rng.integers(0, count, batch) // rows).size for _ in range(3000)]
        assert chunks_of_batch(count, rows, batch) == pytest.approx(np.mean(drawn), rel=0.02)


def test_samples_are_written_in_their_layout(tmp_path):
    values = np.arange(60_000, dtype="i4").reshape(100, 600)
    for layout in (Layout(7, "shuffle+gzip:4"), Layout(200, "none")):
        with h5py.File(write_sample(tmp_path, values, layout)) as file:
            assert np.array_equal(file["data"], values)
            assert file["data"].chunks == (min(layout.rows, 100), 600)
    found = layout_of(tmp_path / "x.h5", (1000, 600), "i4")
    whole = whole_layout(found, Layout(7, "shuffle+gzip:4"), 1e6)
    assert (whole.chunk_shape, whole.num_samples) == ((7, 600), 1000)
    assert whole.chunks.offset.size == 143
    assert sum(whole.chunks.nbytes) == pytest.approx(1e6, rel=1e-3)


def finding(rows, size, speed, cold=1.0, is_current=False):
    one = Finding(Layout(rows, "lzf", is_current), size)
    one.speeds, one.cold = {"shuffled": [speed / 2, speed]}, {"shuffled": cold}
    return one


@pytest.mark.parametrize(
    ("findings", "memory", "best"),
    [
        ([finding(1, 10, 100), finding(2, 9, 80)], 99, 1),  # the fastest
        ([finding(1, 10, 100), finding(2, 9, 97)], 99, 2),  # the smaller one, about as fast
        ([finding(3, 9.2, 96, is_current=True), finding(2, 9, 97)], 99, 3),  # as it is
        ([finding(3, 20, 96, is_current=True), finding(2, 9, 97)], 99, 2),
        # Where not all of it stays in memory, the speed from the disk counts.
        ([finding(1, 10, 100, cold=5), finding(2, 9, 80, cold=7)], 9.5, 2),
        ([finding(1, 10, 100, cold=5), finding(2, 9, 80, cold=7)], 8, 2),
    ],
)
def test_the_best(findings, memory, best):
    assert best_of(findings, "shuffled", memory).layout.rows == best
