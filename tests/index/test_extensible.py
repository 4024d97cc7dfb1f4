"""Extensible arrays whose unlimited dimension is not the first: HDF5 misreports their chunks.

Any such dataset, whatever was written, grown and cut off, is read directly, as h5py reads it.
"""

import itertools
import math

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h5async import AsyncReader
from h5async.index import chunks, visits

FILTERS = [{}, {"compression": "gzip"}, {"shuffle": True, "compression": "lzf"}]


@st.composite
def histories(draw):
    """Draw how a dataset is made, and what is then done to it."""
    rank = draw(st.integers(2, 4))
    axis = draw(st.integers(1, rank - 1))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, min(3, n))) for n in shape)
    maxshape = tuple(n + draw(st.integers(0, 5)) for n in shape)
    maxshape = (*maxshape[:axis], None, *maxshape[axis + 1 :])
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            steps.append(("resize", [draw(st.integers(1, m or 40)) for m in maxshape]))
        else:
            steps.append(("write", draw(st.integers(0, 1 << 30))))
    return shape, maxshape, chunks, draw(st.sampled_from(FILTERS)), steps, draw(st.integers(0, 3))


def make(path, history):
    shape, maxshape, chunks, filters, steps, _ = history
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset(
            "data", shape, "i4", chunks=chunks, maxshape=maxshape, fillvalue=-7, **filters
        )
        for kind, what in [("write", 0), *steps]:
            if kind == "resize":
                data.resize(what)
                continue
            rng = np.random.default_rng(what)
            begin = [int(rng.integers(0, n)) for n in data.shape]
            end = [int(rng.integers(b + 1, n + 1)) for b, n in zip(begin, data.shape, strict=True)]
            region = tuple(map(slice, begin, end))
            size = [e - b for b, e in zip(begin, end, strict=True)]
            data[region] = rng.integers(1, 1 << 30, size)


def assert_reads_like_h5py(path, num_dim):
    with h5py.File(path) as file:
        truth = np.moveaxis(file["data"][:], num_dim, 0)
    options = {"labels_field": None, "num_threads": 0, "device": "cpu", "num_dim": num_dim}
    with AsyncReader(hdf5_path=path, batch_size=100, **options) as reader:
        assert reader.layouts["data"].fallback_reason is None
        found = np.concatenate([batch.data.copy() for batch in reader])
        assert reader.fallback_reads == 0
    assert np.array_equal(found, truth)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories())
def test_any_history(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("extensible") / "a.h5"
    make(path, history)
    assert_reads_like_h5py(path, history[-1] % len(history[0]))


@pytest.mark.slow
def test_many_chunks(tmp_path):
    """Enough of them for blocks, and pages of blocks, of the array."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("data", (3, 9000), "i4", chunks=(1, 1), maxshape=(5, None))
        rng = np.random.default_rng(0)
        for begin in rng.permutation(90)[:60].tolist():
            data[:, begin * 100 : (begin + 1) * 100] = rng.integers(1, 1 << 30, (3, 100))
    for num_dim in (0, 1):
        assert_reads_like_h5py(path, num_dim)


@pytest.mark.parametrize("has_core", [True, False])
def test_positions_of_all_chunks(tmp_path, monkeypatch, has_core):
    """Each chunk tells its own place, and so do equal sizes of all."""
    if not has_core:
        monkeypatch.setattr("h5async.index.visits.load_core", lambda: None)
    path, shape, chunks = tmp_path / "a.h5", (4, 6, 5), (2, 2, 1)
    grid = tuple(n // c for n, c in zip(shape, chunks, strict=True))
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("data", shape, "i4", chunks=chunks, maxshape=(6, None, 8))
        for number, cell in enumerate(itertools.product(*map(range, grid))):
            corner = tuple(at * size for at, size in zip(cell, chunks, strict=True))
            data.id.write_direct_chunk(corner, np.full(chunks, number, "i4").tobytes())
    with AsyncReader(hdf5_path=path, labels_field=None, num_threads=0) as reader:
        table = reader.layouts["data"].chunks
    values = path.read_bytes()
    stored = [int(np.frombuffer(values, "i4", 1, at)[0]) for at in table.offset.tolist()]
    assert table.index is None
    assert stored == list(range(math.prod(grid)))


def test_a_chunk_that_hdf5_does_not_find_there_is_left_to_h5py(tmp_path, monkeypatch):
    """What contradicts HDF5's own search is not believed."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("data", (4, 9), "i4", chunks=(2, 3), maxshape=(4, None))
        data[:2, 3:6] = 1
    numbers = visits.Positions.numbers

    def wrong(self, position, grid):
        found, is_outside = numbers(self, position, grid)
        return found + 1, is_outside

    monkeypatch.setattr(visits.Positions, "numbers", wrong)
    with AsyncReader(hdf5_path=path, labels_field=None, num_threads=0) as reader:
        assert "only dimension 1 is unlimited" in reader.layouts["data"].fallback_reason
        assert np.array_equal(reader.get_next_batch().data[:2, 3:6], np.ones((2, 3)))


def test_this_hdf5_counts_positions():
    assert visits._counts_positions()
    assert chunks.positions_of is visits.positions_of
