"""Where ragged samples lie: offsets, ends, lengths, references; and what breaks them."""

from __future__ import annotations

import logging

import h5py
import numpy as np
import pytest
from conftest import read
from hdf5files import TEXT, write_column

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    Field,
    PostprocessError,
    Ragged,
    RaggedField,
    Sequences,
)
from h5async.core.binding import HEAP_SCRATCH_NBYTES
from h5async.errors import BudgetError
from h5async.opening.limits import MemoryBudget


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "flat.h5"
    with h5py.File(path, "w") as file:
        file["values"] = np.arange(10)
        file["ends"], file["lengths"] = [3, 3, 8, 10], [3, 0, 5, 2]
        file["offsets"] = [0, 3, 3, 8, 10]
        file["slice"], file["begins"] = [3, 3, 8], [0, 3, 3, 8]
        both = np.array([[3, 1], [0, 0], [5, 2], [2, 1]])
        file["both"], file["big"] = both, both.astype(">i2")
        file.create_dataset("gzip", data=both, chunks=(3, 1), compression="gzip")
        layout = h5py.VirtualLayout(both.shape, both.dtype)
        layout[:2] = h5py.VirtualSource(file["both"])[:2]
        layout[2:] = h5py.VirtualSource(file["gzip"])[2:]
        file.create_virtual_dataset("virtual", layout)
    return path


def samples(path, offsets, kind, **options):
    field = RaggedField("values", offsets=offsets, offsets_kind=kind)
    return [one.tolist() for one in read(path, {"x": field}, **options).x]


SAMPLES = [[0, 1, 2], [], [3, 4, 5, 6, 7], [8, 9]]


def test_ends_that_are_taken_for_offsets(flat):
    assert samples(flat, "ends", "ends") == samples(flat, "offsets", "offsets") == SAMPLES
    with pytest.raises(DatasetError, match=r'"ends".*begins with 3.*set offsets_kind="ends"'):
        samples(flat, "ends", "offsets")
    with pytest.raises(DatasetError, match=r'"lengths".*set offsets_kind="lengths"'):
        samples(flat, "lengths", "offsets")


def test_offsets_of_a_slice_leave_values_out_and_the_log_says_so(flat, caplog):
    with caplog.at_level(logging.WARNING, "h5async"):
        assert samples(flat, "slice", "offsets") == SAMPLES[1:3]
        assert samples(flat, "begins", "offsets") == SAMPLES[:3]
    assert [r.message.partition(": field")[2][:60] for r in caplog.records] == [
        ' x, dataset "values": 5 of its values lie before the first s',
        ' x, dataset "values": 2 of its values lie before the first s',
    ]


@pytest.mark.parametrize("name", ["both", "big", "gzip", "virtual"])
def test_a_column_of_lengths(flat, name):
    assert samples(flat, f"{name}[:, 0]", "lengths") == SAMPLES
    assert samples(flat, f"{name}[:,0]", "lengths") == SAMPLES
    assert samples(flat, f"{name}[:, 1]", "lengths") == [[0], [], [1, 2], [3]]
    assert samples(flat, f"{name}[:, -1]", "lengths") == [[0], [], [1, 2], [3]]
    assert samples(flat, f"{name}[:,-2]", "lengths") == SAMPLES
    with pytest.raises(DatasetError, match=rf'shape \(4, 2\); .*"{name}\[:, 0\]"'):
        samples(flat, name, "lengths")
    for number in 2, -3:
        with pytest.raises(DatasetError, match="no such column"):
            samples(flat, f"{name}[:, {number}]", "lengths")
    with pytest.raises(DatasetError, match="no such column"):
        samples(flat, "lengths[:, 0]", "lengths")


def test_a_column_says_sequences_and_weights(flat):
    fields = {"x": Field("values", steps=range(2), pad="drop")}
    found = read(flat, fields, sequences=Sequences(lengths="both[:, 0]"), batch_size=32)
    assert found.x[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 8]
    drawn = read(flat, {"x": "both"}, weights="both[:, 1]", epoch_samples=50, batch_size=50)
    assert set(drawn.index.tolist()) == {0, 2, 3}


def test_a_column_of_a_saved_index(flat, tmp_path):
    for _ in range(2):
        cache = tmp_path / "flat.h5idx"
        assert samples(flat, "gzip[:, 0]", "lengths", index_cache=cache) == SAMPLES


def _shifted(x):
    return Ragged(x.values, x.offsets + 1)


def _falling(x):
    return Ragged(x.values, x.offsets[::-1].copy())


def _cut(x):
    return Ragged(x.values[:-1], x.offsets)


def _in_place(x):
    x.offsets[-1] += 9


@pytest.mark.parametrize("function", [_shifted, _falling, _cut, _in_place])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_ragged_samples_that_postprocess_breaks(flat, function, num_threads):
    field = RaggedField("values", offsets="offsets")
    options = {"postprocess": function, "num_threads": num_threads}
    with pytest.raises(PostprocessError, match="ragged samples that do not fit together: offsets"):
        read(flat, {"x": field}, **options)
    with AsyncReader(hdf5_path=flat, fields={"x": field}, device="cpu", **options) as reader:
        with pytest.raises(PostprocessError, match="do not fit together"):
            reader.read([0, 2])


def test_postprocess_is_given_the_mask_of_padded_samples(flat):
    def masked(x, x_mask):
        assert x_mask.dtype == bool
        return np.where(x_mask, x, -1)

    field = RaggedField("values", offsets="offsets", pad_to=4)
    found = read(flat, {"x": field}, postprocess=masked)
    assert found.x.tolist() == [[0, 1, 2, -1], [-1] * 4, [3, 4, 5, 6], [8, 9, -1, -1]]
    assert found.x_mask.tolist() == (found.x != -1).tolist()


def test_scratch_of_elements_of_variable_length_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=["a", "b"] * 4, dtype=TEXT)
    found = []
    shares = MemoryBudget._shares
    monkeypatch.setattr(
        MemoryBudget, "_shares", lambda *a: found.extend(several := list(shares(*a))) or several
    )
    read(path, {"x": "x"}, num_threads=3)
    (scratch,) = {share.nbytes for share in found if share.what.startswith("scratch of 3")}
    assert scratch == 3 * HEAP_SCRATCH_NBYTES


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_given_samples_come_at_the_same_place_however_many_threads_there_are(flat, prefetch, seed):
    def deliver(num_threads):
        rng, found = np.random.default_rng(seed), []
        with AsyncReader(
            hdf5_path=flat,
            fields={"x": "values"},
            batch_size=2,
            prefetch=prefetch,
            num_threads=num_threads,
            device="cpu",
        ) as reader:
            found = [batch.index.tolist() for batch in reader]
            for what in rng.integers(0, 4, 40):
                if what == 0:
                    reader.fetch_data([9, int(what)])
                elif what == 1:
                    reader.fetch_data()
                elif what == 2:
                    batch = reader.get_next_batch()
                    found.append([batch.epoch, batch.number, *batch.index.tolist()])
                else:
                    batch = next(iter(reader))
                    found.append([batch.epoch, batch.number, *batch.index.tolist()])
        return found

    wanted = deliver(1)
    for num_threads in (1, 2, 3):
        assert deliver(num_threads) == wanted


def test_labels_of_differing_lengths_are_not_balanced(flat):
    labels = RaggedField("values", offsets="offsets")
    with pytest.raises(ConfigError, match="one value for each sample, and 'labels'"):
        read(flat, {"x": "ends", "labels": labels}, weights="balanced")


def test_offsets_of_what_has_a_variable_length_datatype(tmp_path):
    path = write_column(tmp_path / "a.h5", "strings")
    with pytest.raises(DatasetError, match="whose elements are the samples; leave out offsets"):
        read(path, {"x": RaggedField("obs/c", offsets="d")})


def test_a_field_of_the_name_of_a_mask(flat):
    padded = RaggedField("values", offsets="offsets", pad_to=3)
    with pytest.raises(ConfigError, match="pad_to delivers 'x_mask', which already exists"):
        read(flat, {"x": padded, "x_mask": "lengths"})
    steps = Field("lengths", steps=range(1), pad_mask="x_mask")
    with pytest.raises(ConfigError, match="'x_mask', which already exists"):
        read(flat, {"x": padded, "y": steps})


def test_what_takes_too_much_memory_is_the_longest_sample(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("data", (9,), h5py.vlen_dtype("u1"))
        made[5] = np.zeros(1_000_000, "u1")
        made[7] = np.zeros(10, "u1")
    options = {"hdf5_path": path, "fields": {"x": "data"}, "batch_size": 4, "prefetch": 2}
    AsyncReader(options, max_batch_bytes=2_500_000).close()
    with pytest.raises(BudgetError, match="sample 5, of 1,000,000 bytes; leave sample 5 out by i"):
        AsyncReader(options, max_batch_bytes=10_000)
    with AsyncReader(options, max_batch_bytes=10_000, indices=[0, 7, 3]) as reader:
        assert reader.get_next_batch().x.lengths.tolist() == [0, 10, 0]


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4)])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("kind", ["text", "sequences"])
@pytest.mark.parametrize("storage", [{"chunks": (3,)}, {"chunks": (10,)}, {"maxshape": (None,)}])
def test_references_in_chunks_without_filters(tmp_path, sizes, libver, kind, storage):
    if sizes == (4, 4) and libver == "latest" and "maxshape" in storage:
        pytest.skip("HDF5 itself cannot open such a file")
    path, is_text = tmp_path / "a.h5", kind == "text"
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    created.set_sizes(*sizes)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    oldest = {"earliest": h5py.h5f.LIBVER_EARLIEST, "latest": h5py.h5f.LIBVER_LATEST}[libver]
    access.set_libver_bounds(oldest, h5py.h5f.LIBVER_LATEST)
    opened = h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, created, access)
    dtype = h5py.string_dtype() if is_text else h5py.vlen_dtype("i4")
    with h5py.File(opened) as file:
        dataset = file.create_dataset("v", (10,), dtype, **storage)
        for number in range(10):
            dataset[number] = "x" * number if is_text else np.arange(number)
    with AsyncReader(hdf5_path=path, fields={"v": "v"}, device="cpu", timeout=60) as reader:
        found = reader.get_next_batch().v
        for number, one in enumerate(found):
            expected = [ord("x")] * number if is_text else range(number)
            np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("io", ["auto", "map", "pread"])
@pytest.mark.parametrize(("count", "chunk"), [(10, 3), (10, 10), (10, 16), (1000, 600)])
def test_chunks_without_filters_that_reach_over_the_edge(tmp_path, io, count, chunk):
    lengths = np.arange(count) % 4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        storage = {"chunks": (chunk,), "maxshape": (None,)}
        file["values"] = np.arange(lengths.sum())
        file.create_dataset("lengths", data=lengths, **storage)
        file.create_dataset("is_taken", data=lengths != 2, **storage)
        texts = file.create_dataset("texts", (count,), h5py.string_dtype(), **storage)
        texts[...] = ["x" * length for length in lengths]
    values = RaggedField("values", offsets="lengths", offsets_kind="lengths")
    options = {"io": io, "indices": "is_taken", "batch_size": count, "device": "cpu"}
    fields = {"values": values, "texts": "texts"}
    with AsyncReader(hdf5_path=tmp_path / "a.h5", fields=fields, timeout=60, **options) as reader:
        batch = reader.get_next_batch()
    np.testing.assert_array_equal(batch.index, np.flatnonzero(lengths != 2))
    np.testing.assert_array_equal(batch.values.lengths, lengths[batch.index])
    np.testing.assert_array_equal(batch.texts.lengths, lengths[batch.index])
