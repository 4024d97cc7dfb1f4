"""Documents that are joined to windows of one length, against NumPy."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5async import (
    AsyncReader,
    AudioField,
    ConfigError,
    DatasetError,
    ImageField,
    RaggedField,
)
from h5async.order.rows import Packing

LENGTHS = ([5, 0, 0, 31, 2, 7, 1], [], [0], [3, 64, 0], [17, 17])


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=4),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_windows_have_all_rows_once(lengths, length, data):
    """Against a list of (document, position) for each row."""
    flat = [size for several in lengths for size in several]
    starts = np.append(0, np.cumsum(flat, dtype=np.int64))
    packing = Packing(starts, length, map(len, lengths))
    windows, document = [], 0
    for several in lengths:
        rows = [(document + i, at) for i, size in enumerate(several) for at in range(size)]
        document += len(several)
        rows += [(-1, -1)] * (-len(rows) % length)
        windows += [rows[i : i + length] for i in range(0, len(rows), length)]
    assert packing.windows.size == len(windows) + 1
    assert packing.counts.sum() == len(windows)
    samples = np.arange(len(windows))
    if windows:
        samples = np.array(data.draw(st.lists(st.sampled_from(range(len(windows))))), np.int64)
    expected = np.array([windows[i] for i in samples], np.int64).reshape(-1, length, 2)
    assert np.array_equal(packing.documents(samples), expected[..., 0])
    assert np.array_equal(packing.positions(samples), expected[..., 1])
    assert packing.documents(samples).dtype == np.int64
    assert packing.positions(samples).dtype == np.int32


def write(path, lengths, begin, kind):
    """Write values of documents, with some that are in none at both ends."""
    total = sum(lengths)
    with h5py.File(path, "w") as file:
        values = np.arange(begin, begin + total)
        extra = 3 if kind == "offsets" else 0
        padded = np.concatenate((np.full(extra, -7), values, np.full(extra, -7)))
        file["tokens"] = padded.astype("u2")
        few = min(10, padded.size)
        chunks = {"chunks": (few, 2), "compression": "gzip"} if few else {}
        file.create_dataset("pairs", data=np.stack([padded, -padded], axis=1), **chunks)
        ends = np.cumsum(lengths, dtype=np.int64)
        file["offsets"] = np.append(0, ends) + extra
        file["ends"], file["lengths"] = ends, np.array(lengths, np.int64)


@pytest.fixture(scope="module", params=["offsets", "ends", "lengths"])
def files(request, tmp_path_factory):
    folder, begin, paths = tmp_path_factory.mktemp("packing"), 0, []
    for number, lengths in enumerate(LENGTHS):
        paths.append(folder / f"{number}.h5")
        write(paths[-1], lengths, begin, request.param)
        begin += sum(lengths)
    return paths, {"offsets": request.param, "offsets_kind": request.param}


def expected(pack):
    """Return values, documents and positions of all windows."""
    found, value, document = [], 0, 0
    for lengths in LENGTHS:
        rows = []
        for size in lengths:
            rows += [(value + i, document, i) for i in range(size)]
            value, document = value + size, document + 1
        rows += [(0, -1, -1)] * (-len(rows) % pack)
        found += [rows[i : i + pack] for i in range(0, len(rows), pack)]
    return np.array(found).transpose(2, 0, 1)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("pack", [1, 8, 17, 100])
@pytest.mark.parametrize("shuffle", [False, "full", "window"])
@pytest.mark.parametrize(
    "way",
    [
        {"num_threads": 0},
        {"num_threads": 2, "cache": "host"},
        {"num_threads": 2, "world_size": 2, "epoch_samples": 20},
    ],
)
def test_windows_of_several_files(files, pack, shuffle, way):
    paths, offsets = files
    fields = {
        "tokens": RaggedField("tokens", pack=pack, **offsets),
        "pairs": RaggedField("pairs", pack=pack, scale=2.0, **offsets),
    }
    values, documents, positions = expected(pack)
    seen = []
    for rank in range(way.get("world_size", 1)):
        options = way | ({"rank": rank} if "world_size" in way else {})
        with AsyncReader(
            hdf5_path=paths, fields=fields, batch_size=5, shuffle=shuffle, device="cpu", **options
        ) as reader:
            assert reader.num_samples == len(values)
            for _ in range(2):
                for batch in reader:
                    index = batch.index
                    assert batch.tokens.dtype == np.uint16
                    assert batch.pairs.dtype == np.float32
                    assert np.array_equal(batch.tokens, values[index])
                    assert np.array_equal(batch.pairs[..., 0], 2 * values[index])
                    assert np.array_equal(batch.pairs[..., 1], -2 * values[index])
                    assert np.array_equal(batch["tokens_documents"], documents[index])
                    assert np.array_equal(batch["pairs_positions"], positions[index])
                    seen += index.tolist()
            given_samples = reader.num_samples - 1
            if "cache" not in way:
                read = reader.read([given_samples, 0])
                assert np.array_equal(read.tokens, values[[given_samples, 0]])
    if "epoch_samples" not in way:
        assert sorted(seen) == sorted([*range(len(values))] * 2)
    elif len(values) <= 40:
        assert set(seen) == set(range(len(values)))


def postprocessed(tokens, tokens_documents, tokens_positions):
    return tokens + (tokens_documents < 0) + 2 * tokens_positions


def test_postprocess_gets_the_boundaries(files):
    paths, offsets = files
    fields = {"tokens": RaggedField("tokens", pack=8, dtype="int64", **offsets)}
    values, documents, positions = expected(8)
    with AsyncReader(hdf5_path=paths, fields=fields, postprocess=postprocessed) as reader:
        for batch in reader:
            made = values + (documents < 0) + 2 * positions
            assert np.array_equal(batch.tokens, made[batch.index])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": {"pack": 0}}, "pack"),
        ({"x": {"pack": 4, "offsets": None}}, "pack needs offsets"),
        ({"x": {"pack": 4, "pad_to": 4}}, "pack and pad_to exclude each other"),
        ({"x": {"pack": 4}, "x_documents": {"pack": 4}}, "x_documents"),
    ],
)
def test_options_that_do_not_fit(fields, message):
    with pytest.raises(ConfigError, match=message):
        AsyncReader(
            hdf5_path="none.h5",
            fields={
                name: {"path": "tokens", "kind": "ragged", "offsets": "offsets"} | field
                for name, field in fields.items()
            },
        )


def test_fields_of_documents_do_not_fit_windows(files):
    paths, offsets = files
    fields = {"tokens": RaggedField("tokens", pack=8, **offsets), "label": "lengths"}
    with pytest.raises(DatasetError, match=r"same number of samples"):
        AsyncReader(hdf5_path=paths, fields=fields)


@pytest.mark.parametrize("kind", [AudioField, ImageField])
def test_other_fields_are_told_that_pack_is_not_for_them(kind):
    with pytest.raises(ConfigError, match="pack is for ragged fields; leave it out"):
        kind("bytes", pack=4)
