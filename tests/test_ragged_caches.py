"""`cache="host"` of ragged and sparse rows and of images: kept as stored, and delivered as ever."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits, require_extra
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ragged import (
    KINDS,
    OBS,
    STORAGES,
    annotated,
    check,
    check_obs,
    fields_of,
    lengths_of_samples,
    reader_of,
    several,
    sparse_file,
)

import h5async.fill.resident
from h5async import AsyncReader, ConfigError, DatasetError, ImageField, RaggedField, SparseField
from h5async.fill.resident import Budget, HostCache, open_host_cache
from h5async.order.rows import SpanRows
from h5async.order.selection import Selection

SEED = 20120704


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two files and an empty one, with a field of each kind."""
    rng = np.random.default_rng(SEED)
    files = [rng.integers(0, 9, 41).tolist(), [], [*rng.integers(0, 4, 20).tolist(), 100]]
    return several(tmp_path_factory, files, KINDS, "gzip")


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=40)
def test_any_fields_come_out_of_memory_without_their_files(tmp_path_factory, data):
    draw = data.draw
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True))
    files = draw(st.lists(lengths_of_samples(), min_size=1, max_size=3))
    paths, truths = several(tmp_path_factory, files, kinds, draw(st.sampled_from(STORAGES)))
    count = sum(map(len, files))
    options = {
        "batch_size": draw(st.integers(1, 40)),
        "shuffle": draw(st.sampled_from([False, "full", "window"])),
        "num_threads": draw(st.sampled_from([0, 2])),
        "prefetch": draw(st.integers(1, 3)),
        "indices": draw(st.sampled_from([None, slice(None, None, 3), slice(count // 2, None)])),
    }
    with AsyncReader(
        hdf5_path=paths, fields=fields_of(truths), device="cpu", cache="host", **options
    ) as reader:
        for turn in range(4):
            if turn == 2 and reader.num_samples:
                assert "100 % of the samples" in reader.stats().cache
                for path in paths:
                    path.write_bytes(b"")
            for batch in reader:
                check(batch, truths)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_later_epochs_read_nothing(mixed, workers):
    with reader_of(mixed, cache="host", shuffle="full", workers=workers) as reader:
        found = []
        for _ in range(4):
            for batch in reader:
                check(batch, mixed[1])
            found.append((reader.stats().read_nbytes, reader.stats().decoded_chunks))
        assert found[1] == found[2] == found[3]
        assert reader.stats().cache.startswith("host, 100 % of the samples")


def stored_nbytes(truths, name):
    """Bytes that a field's values have as stored."""
    samples = truths[name].samples
    if name in ("csr", "dense", "some"):
        total = sum(len(one) for one in truths["ends"].samples)
        return total * (4 + 4)
    if name == "strings":
        return sum(len(one.encode()) for one in samples)
    return sum(len(one) * 8 for one in samples)


@pytest.mark.parametrize("name", ["ends", "padded", "strings", "csr", "dense", "some"])
def test_values_are_kept_as_they_are_stored(mixed, name):
    """Not padded, not dense, and also those of columns that are not delivered."""
    paths, truths = mixed
    nbytes = stored_nbytes(truths, name)
    options = {"hdf5_path": paths, "fields": {name: truths[name].field}, "device": "cpu"}
    for room, begins in ((nbytes, "host, 0 %"), (nbytes - 1, "none: ")):
        with AsyncReader(**options, batch_size=8, cache="host", cache_bytes=room) as reader:
            assert reader.stats().cache.startswith(begins)
            for _ in range(3):
                for batch in reader:
                    check(batch, {name: truths[name]})


def test_encoded_images_are_kept(tmp_path):
    pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("cv2", reason="needs OpenCV")
    from test_images import encoded, write

    images = [encoded((40 + n % 7, 30 + n % 5), seed=n) for n in range(20)]
    nbytes = sum(map(len, images))
    for ragged, of_file in ((False, {}), (True, {"offsets": "ends", "offsets_kind": "ends"})):
        path = write(tmp_path / f"{ragged}.h5", images, ragged=ragged)
        random = {"size": (12, 16), "crop": "random", "flip": True}
        for field in (ImageField("jpeg", **of_file), ImageField("jpeg", **of_file, **random)):
            options = {"fields": {"image": field}, "shuffle": "full", "batch_size": 6}
            with (
                AsyncReader(hdf5_path=path, **options) as plain,
                AsyncReader(
                    hdf5_path=path, **options, cache="host", cache_bytes=nbytes, num_threads=2
                ) as kept,
            ):
                for _ in range(3):
                    for mine, theirs in zip(kept, plain, strict=True):
                        for image, other in zip(mine.image, theirs.image, strict=True):
                            assert_same_bits(image, other)
                assert "100 % of the samples" in kept.stats().cache


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"indices": [61, 3, 61, 7, 7, 61]},
        {"weights": np.arange(62.0), "epoch_samples": 50},
        {"sampler": [[61] * 8, [0, 1], [61, 61, 2]]},
        {"drop_last": True, "shuffle": "window"},
        {"debug_lifetimes": True, "shuffle": "full"},
        {"copy": True, "num_threads": 0},
        {"rank": 1, "world_size": 3, "shuffle": "full"},
    ],
    ids=str,
)
def test_all_that_other_options_ask_for(mixed, options):
    with reader_of(mixed, cache="host", **options) as reader:
        for _ in range(4):
            for batch in reader:
                check(batch, mixed[1])


def test_given_samples(mixed):
    with reader_of(mixed, cache="host", indices=slice(1, None, 2)) as reader:
        for _ in range(3):
            reader.fetch_data([61, 3, 3, 7])
            check(reader.get_next_batch(), mixed[1])
            check(reader.read([0, 61, 2]), mixed[1])
        with pytest.raises(ConfigError, match="only samples that `indices` selects"):
            reader.fetch_data([0])


@pytest.mark.slow
def test_columns_of_obs(tmp_path):
    pandas = require_extra("pandas")
    kinds = [["T", None, "B"] * 4, ["NK", "T", None, "A", "B"] * 3]
    paths = [tmp_path / f"{i}.h5ad" for i in range(2)]
    obs = [annotated(p, k, i).obs for i, (p, k) in enumerate(zip(paths, kinds, strict=True))]
    obs = pandas.concat([one.astype({"kind": object}) for one in obs])
    options = {"batch_size": 5, "shuffle": "full", "device": "cpu", "cache": "host"}
    with AsyncReader(hdf5_path=paths, fields=OBS | {"x": "X"}, **options) as reader:
        for _ in range(3):
            for batch in reader:
                check_obs(batch, reader.categories, obs)


def test_postprocess_gets_the_stored_values_every_epoch(mixed):
    def double(ends, csr):
        ends.values[...] *= 2
        csr.data[...] = 0

    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr")}
    options = {"batch_size": 8, "cache": "host", "postprocess": double, "device": "cpu"}
    with AsyncReader(hdf5_path=paths, fields=fields, **options) as reader:
        for batch in [batch for _ in range(3) for batch in map(lambda b: b.copy(), reader)]:
            for mine, number in zip(batch.ends, batch.index, strict=True):
                assert np.array_equal(mine, truths["ends"].samples[number] * 2)


def test_an_index_that_is_no_column_is_found_every_epoch(tmp_path):
    path = sparse_file(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["X/indices"][file["X/indptr"][4]] = 9
    with AsyncReader(
        hdf5_path=path, fields={"x": SparseField("X")}, batch_size=3, cache="host", device="cpu"
    ) as reader:
        for _ in range(4):
            assert reader.get_next_batch().number == 0
            with pytest.raises(DatasetError, match=r"row 4 .* has the index 9"):
                reader.get_next_batch()


def test_a_chunk_that_is_damaged_is_not_kept(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        values = file.create_dataset("v", data=np.arange(60), chunks=(10,), compression="gzip")
        file["at"] = np.arange(0, 61, 5)
        offset = values.id.get_chunk_info(3).byte_offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 8)
    field = RaggedField("v", offsets="at")
    with AsyncReader(
        hdf5_path=path, fields={"v": field}, batch_size=6, cache="host", device="cpu"
    ) as reader:
        for _ in range(3):
            assert reader.get_next_batch().v.values.tolist() == list(range(30))
            with pytest.raises(OSError, match=r"a\.h5"):
                reader.get_next_batch()


# --- the cache itself ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_core", [False, True])
@given(data=st.data())
@settings(max_examples=60)
def test_runs_that_were_kept_come_back(has_core, data):
    lengths = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=20)))
    width = data.draw(st.integers(0, 3))
    starts = np.append(0, np.cumsum(lengths)) + data.draw(st.integers(0, 9))
    values = np.arange(starts[-1] * width, dtype="i2").reshape(starts[-1], width)
    spans = SpanRows(starts.astype(np.int64))
    chosen = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9)
    selection = Selection.of_numbers(np.array(data.draw(chosen), np.int64))
    if data.draw(st.booleans()):
        selection = Selection(0, 1, len(lengths))
    with pytest.MonkeyPatch.context() as patched:
        if not has_core:
            patched.setattr(h5async.fill.resident, "load_core", lambda: None)
        cache = open_host_cache(selection, [2 * width, 2], [spans, None], None, 1 << 30)
        assert isinstance(cache, HostCache)
        every = selection.samples(np.arange(selection.size))
        for index in (every, data.draw(st.permutations(every.tolist()))):
            index = np.array(index, np.int64)
            raw = values[spans.rows(index)]
            plain = (index * 3).astype("i2").reshape(-1, 1)
            positions = selection.ascending.positions(index)
            out = np.zeros_like(raw), np.zeros_like(plain)
            several = zip(cache.columns, cache.places(index), (raw, plain), out, strict=True)
            for column, places, array, found in several:
                cut = data.draw(st.integers(0, index.size))
                for a, b in ((0, cut), (cut, index.size)):
                    column.keep(places, a, b, array)
                column.copy(column.plan(positions), found)
            cache.add(index)
            assert cache.has(index)
            assert np.array_equal(out[0], raw)
            assert np.array_equal(out[1], plain)


def test_the_budget_counts_the_values_of_the_samples():
    spans = SpanRows(np.array([5, 5, 1 << 50], np.int64))
    both = Selection(0, 1, 2)
    found = open_host_cache(both, [8], [spans], None, 1 << 30)
    assert isinstance(found, Budget)
    assert found.nbytes == 8 * ((1 << 50) - 5)
    assert isinstance(open_host_cache(Selection(0, 1, 1), [8], [spans], 0, 1 << 30), HostCache)
