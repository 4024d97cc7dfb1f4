"""Chunks are encoded as HDF5 reads them, whatever their filters, sizes and values."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from hdf5_encoder import contents
from hypothesis import given
from hypothesis import strategies as st

from h5async import ConfigError, MissingPackageError
from h5async.codec import encoders
from h5async.codec.encoders import find_encoder, parse_filters, set_filters, spell_filters
from h5async.index.chunks import filters_of

NAMES = [
    *encoders._SPELLINGS,
    "none",
    "gzip:0",
    "shuffle+gzip:9",
    "shuffle+lzf",
    "shuffle+zstd:1",
    "bitshuffle-zstd:7",
    "blosc-zstd:9",
    "fletcher32+gzip:1",
    "shuffle+lzf+fletcher32",
]


@pytest.fixture(autouse=True, scope="module")
def plugins():
    return pytest.importorskip("hdf5plugin")


def create(file, name, shape, dtype, text):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(shape)
    set_filters(properties, parse_filters(text))
    space, of_type = h5py.h5s.create_simple(shape), h5py.h5t.py_create(np.dtype(dtype))
    return h5py.h5d.create(file.id, name.encode(), of_type, space, properties)


@pytest.mark.parametrize("text", NAMES)
def test_hdf5_reads_them(text):
    """Also chunks that a filter does not make smaller, of which the mask says so."""
    written = {}
    with h5py.File(f"encoders {text}", "w", driver="core", backing_store=False) as file:
        for dtype in ("u1", ">i2", "f4", "f8", "S3", "S7"):
            for count in (1, 3, 37, 1000):
                size = np.dtype(dtype).itemsize
                for number, values in enumerate(contents(size, count)):
                    name = f"{dtype} {count} {number}"
                    made = create(file, name, (count,), dtype, text)
                    encode = find_encoder(filters_of(made.get_create_plist()))
                    made.write_direct_chunk((0,), *encode(values))
                    written[name] = values
        file.flush()
        image = file.id.get_file_image()
    with h5py.File(io.BytesIO(image)) as file:
        for name, values in written.items():
            assert file[name][...].tobytes() == values.tobytes(), name


@pytest.mark.sampled(len(NAMES))
@pytest.mark.parametrize("text", [name for name in NAMES if name != "none"])
def test_as_small_as_hdf5s(text):
    values = np.repeat(np.random.default_rng(0).integers(0, 50, 5000, "i4"), 3)
    with h5py.File(f"encoders {text}", "w", driver="core", backing_store=False) as file:
        made = create(file, "x", values.shape, values.dtype, text)
        encode = find_encoder(filters_of(made.get_create_plist()))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        file.flush()
        assert len(encode(values.view("u1"))[0]) <= 1.06 * made.get_storage_size()


@pytest.mark.parametrize("text", NAMES)
def test_spelling(text):
    """What is in the file is spelled as it was given."""
    with h5py.File(f"encoders {text}", "w", driver="core", backing_store=False) as file:
        made = create(file, "x", (100,), "f4", text)
        stored = filters_of(made.get_create_plist())
        full = spell_filters(parse_filters(text))
        assert spell_filters(stored) == full
        assert re.sub(r":\d+", "", full) == re.sub(r":\d+", "", text)
        assert parse_filters(full) == parse_filters(text)


@pytest.mark.parametrize("text", ["shuffle+bitshuffle-lz4", "blosc-lz4", "blosc2-zstd", "bzip2"])
def test_in_threads(text):
    rng = np.random.default_rng(3)
    chunks = [np.repeat(rng.integers(0, 9, 4000, "u1"), 2) for _ in range(40)]
    with h5py.File(f"encoders {text}", "w", driver="core", backing_store=False) as file:
        made = create(file, "x", (2000,), "i4", text)
        encode = find_encoder(filters_of(made.get_create_plist()))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(encode, chunks))
    for (data, mask), chunk in zip(found, chunks, strict=True):
        expected, expected_mask = encode(chunk)
        assert (bytes(data), mask) == (bytes(expected), expected_mask)


@given(data=st.binary(min_size=1, max_size=70), element=st.integers(1, 9))
def test_shuffle_and_checksum(data, element):
    count = -(-len(data) // element)
    values = np.frombuffer(data.ljust(count * element, b"x"), np.uint8)
    with h5py.File("shuffle", "w", driver="core", backing_store=False) as file:
        made = create(file, "x", (count,), f"V{element}", "shuffle+fletcher32")
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values.view(f"V{element}"))
        file.flush()
        mask, stored = made.read_direct_chunk((0,))
        found, found_mask = find_encoder(filters_of(made.get_create_plist()))(values)
    assert (found_mask, bytes(found)) == (mask, stored)


def test_hdf5_has_to_encode():
    with h5py.File("szip", "w", driver="core", backing_store=False) as file:
        made = file.create_dataset("x", (8,), "i4", chunks=(8,), scaleoffset=3)
        assert find_encoder(filters_of(made.id.get_create_plist())) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gzap", "h5async cannot write the filter 'gzap'; choose from gzip"),
        ("gzip:10", "invalid level '10': gzip has levels from 0 to 9"),
        ("shuffle+lzf:2", "invalid level '2': lzf has no levels"),
        ("gzip:", "invalid level '': gzip has levels"),
    ],
)
def test_misspelled(text, message):
    with pytest.raises(ConfigError) as raised:
        parse_filters(text)
    assert message in str(raised.value)


def test_without_plugins(monkeypatch):
    monkeypatch.setattr(encoders, "is_known_to_hdf5", lambda entry: entry.label != "zstd")
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    with pytest.raises(MissingPackageError, match=r"filter zstd needs hdf5plugin"):
        set_filters(properties, parse_filters("shuffle+zstd"))
