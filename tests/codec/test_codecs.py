"""One battery for every filter pipeline; HDF5 itself encodes the chunks, and says what is right."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from importlib.metadata import version

import h5py
import imagecodecs
import numpy as np
import pytest
from cases import each
from conftest import require_extra
from coredecoding import DamagedError, Decoder
from hdf5_encoder import ALL, BUILT_IN, REGISTERED, SEED, HDF5Encoder, contents

from h5async.codec.filters import (
    BLOSC2,
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    SZIP,
    Filter,
)
from h5async.core.binding import can_decode, load_core

require_extra("hdf5plugin")
pytestmark = pytest.mark.skipif(load_core() is None, reason="needs the compiled core")

ELEMENTS = [1, 2, 3, 4, 8, 16]
NUMBERS = {name: ALL[name][0] for name in BUILT_IN}
SHORT = [*((name,) for name in NUMBERS), *itertools.product(NUMBERS, repeat=2)]
LONG = [
    *itertools.product(NUMBERS, repeat=3),
    *itertools.permutations(NUMBERS),
    ("shuffle", "deflate", "fletcher32", "deflate"),
    ("lzf", "deflate", "shuffle", "lzf"),
    ("fletcher32", "shuffle", "shuffle", "fletcher32"),
    ("shuffle", "shuffle", "fletcher32", "deflate"),
]
TO_DAMAGE = [
    ("deflate",),
    ("lzf",),
    ("shuffle",),
    ("fletcher32",),
    ("shuffle", "deflate"),
    ("shuffle", "lzf"),
    ("lzf", "deflate"),
    ("deflate", "lzf", "shuffle"),
    ("shuffle", "deflate", "fletcher32"),
    ("fletcher32", "shuffle", "lzf"),
]
CHAINS = [
    *((name,) for name in REGISTERED),
    *(("shuffle", name) for name in REGISTERED if "blocks" not in name),
    # (bitshuffle and blosc2 themselves fail, or crash, on lengths that make no whole element)
    *(("fletcher32", name) for name in ("zstd", "lz4", "bzip2", "blosc-lz4-1")),
    *((name, "fletcher32") for name in REGISTERED if "-" not in name or name.endswith("lz4-1")),
    *itertools.product(("zstd", "lz4", "bitshuffle-lz4", "blosc-lz4-1"), ("deflate", "bzip2")),
    ("bitshuffle", "deflate"),
    ("shuffle", "lz4", "zstd", "fletcher32"),
]
TO_DAMAGE += [
    *((name,) for name in REGISTERED if "-" not in name or name[-1] in "1246"),
    ("shuffle", "zstd", "fletcher32"),
]


def ids(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("pipeline", [*SHORT, *LONG, *CHAINS], ids=ids)
def test_chunks_that_hdf5_encoded(pipeline):
    for element in (3, 8) if pipeline in LONG else ELEMENTS:
        assert_is_decoded(pipeline, element)


def assert_is_decoded(pipeline, element):
    encoder = HDF5Encoder(pipeline, element)
    for count in (1, 5, 333):
        for values in contents(element, count):
            encoded, mask = encoder.encode(values)
            assert all(can_decode(entry) for entry in encoder.filters)
            assert [entry.number for entry in encoder.filters] == [ALL[p][0] for p in pipeline]
            decoder = Decoder(encoder.filters, values.size)
            assert decoder.decode(encoded, mask) == values.tobytes()


@pytest.mark.parametrize("pipeline", [*SHORT, *LONG[-28:], *CHAINS], ids=ids)
def test_a_masked_filter_is_skipped(pipeline):
    full = HDF5Encoder(pipeline, 4)
    values = next(itertools.islice(contents(4, 50), 2, None))
    full.encode(values)
    for mask in range(1 << len(pipeline)):
        kept = [bit for bit in range(len(pipeline)) if not mask >> bit & 1]
        encoded, given_up = HDF5Encoder([pipeline[bit] for bit in kept], 4).encode(values)
        given_up = sum(1 << bit for i, bit in enumerate(kept) if given_up >> i & 1)
        decoder = Decoder(full.filters, values.size)
        beyond = 0xFFFFFFFF << len(pipeline) & 0xFFFFFFFF  # bits of filters that are not there
        for bits in (mask | given_up, mask | given_up | beyond):
            assert decoder.decode(encoded, bits) == values.tobytes()


@pytest.mark.parametrize("pipeline", [*SHORT, *LONG[-4:], *CHAINS], ids=ids)
def test_a_chunk_of_another_length_is_an_error(pipeline):
    element, due = 4, 24
    encoder = HDF5Encoder(pipeline, element)
    for count in (1, due - 1, due + 1, due * 400):
        for values in contents(element, count):
            encoded, mask = encoder.encode(values)
            with pytest.raises(DamagedError):
                Decoder(encoder.filters, element * due).decode(encoded, mask)


def test_a_chunk_of_another_length_is_an_error_where_nothing_is_decoded():
    for filters in ((), (Filter(DEFLATE, (6,), ""), Filter(SHUFFLE, (4,), ""))):
        for nbytes in (0, 11, 13, 1000):
            with pytest.raises(DamagedError, match=r"12 are due|expected 12 bytes"):
                Decoder(filters, 12).decode(np.zeros(nbytes, np.uint8), 0b11)


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_cut_chunks_are_an_error(pipeline):
    encoder = HDF5Encoder(pipeline, 4)
    for values in contents(4, 60):
        encoded, mask = encoder.encode(values)
        decoder = Decoder(encoder.filters, values.size)
        for nbytes in range(encoded.size):
            with pytest.raises(DamagedError):
                decoder.decode(encoded[:nbytes], mask)


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_damage_stays_inside_and_has_the_right_length(pipeline):
    if pipeline[0].startswith("blosc2") and int(version("hdf5plugin").partition(".")[0]) < 6:
        pytest.skip("this Blosc2 reads outside of damaged chunks, which crashes at times")
    rng = np.random.default_rng(SEED)
    encoder = HDF5Encoder(pipeline, 4)
    for values in contents(4, 60):
        encoded, mask = encoder.encode(values)
        decoder = Decoder(encoder.filters, values.size)
        for _ in range(400):
            damaged = encoded.copy()
            for _ in range(rng.integers(1, 4)):
                damaged[rng.integers(damaged.size)] = rng.integers(256)
            try:
                decoded = decoder.decode(damaged, mask)
            except DamagedError:
                continue
            assert len(decoded) == values.size


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_noise_stays_inside_and_has_the_right_length(pipeline):
    rng = np.random.default_rng(SEED)
    encoder = HDF5Encoder(pipeline, 4)
    encoder.encode(np.zeros(240, np.uint8))
    decoder = Decoder(encoder.filters, 240)
    for _ in range(1000):
        noise = rng.integers(0, 256, rng.integers(0, 400), np.uint8)
        try:
            decoded = decoder.decode(noise)
        except DamagedError:
            continue
        assert len(decoded) == 240


def test_every_flipped_bit_is_found_by_fletcher32():
    rng = np.random.default_rng(SEED)
    encoder = HDF5Encoder(["fletcher32"], 4)
    values = rng.integers(0, 256, 80, np.uint8)
    encoded, _ = encoder.encode(values)
    decoder = Decoder(encoder.filters, values.size)
    for bit in range(encoded.size * 8):
        damaged = encoded.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match="fletcher32"):
            decoder.decode(damaged)


def test_the_checksum_of_hdf5_before_1_6_3_is_taken():
    rng = np.random.default_rng(SEED)
    for nbytes in (1, 2, 5, 80):  # an odd last byte is summed in a way of its own
        values = rng.integers(0, 256, nbytes, np.uint8)
        encoded, _ = HDF5Encoder(["fletcher32"], 1).encode(values)
        old = encoded.copy()
        old[-4:] = old[[-3, -4, -1, -2]]
        decoder = Decoder((Filter(FLETCHER32, (), ""),), nbytes)
        assert decoder.decode(encoded) == decoder.decode(old) == values.tobytes()


def test_which_filters_are_decoded_here():
    assert can_decode(Filter(SHUFFLE, (4,), ""))
    assert not can_decode(Filter(SHUFFLE, (), ""))
    assert not can_decode(Filter(SHUFFLE, (0,), ""))
    assert not can_decode(Filter(SZIP, (), "szip"))
    assert can_decode(Filter(SZIP, (169, 4, 8, 32), "szip"))
    assert not can_decode(Filter(32013, (), "zfp"))


def stored_chunk(values, plist):
    """Return the filters, stored bytes and mask of a dataset that is one chunk of `values`."""
    with h5py.File("encoder", "w", driver="core", backing_store=False) as file:
        plist.set_chunk(values.shape)
        space = h5py.h5s.create_simple(values.shape)
        kind = h5py.h5t.py_create(values.dtype)
        dataset = h5py.h5d.create(file.id, b"data", kind, space, plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        file.flush()
        mask, encoded = dataset.read_direct_chunk((0,) * values.ndim)
        created = dataset.get_create_plist()
        found = [created.get_filter(i) for i in range(created.get_nfilters())]
        read_back = np.empty(values.shape, values.dtype)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, read_back)
        assert read_back.tobytes() == values.tobytes()
    filters = tuple(Filter(number, parameters, "") for number, _, parameters, _ in found)
    return filters, np.frombuffer(encoded, np.uint8), mask


@pytest.mark.slow
@each("dtype", ["u1", "i2", "f4", "f8", "V3", "V16"])
@pytest.mark.parametrize(
    "shape", [(7, 5), (1, 300), (300, 1), (100, 300), (3, 4, 5), (1, 64, 64, 3), (5, 33, 9, 2)]
)
def test_blosc2_arrays_of_several_dimensions(shape, dtype):
    dtype = np.dtype(dtype)
    for shuffle in (1, 2):
        for raw in contents(dtype.itemsize, math.prod(shape)):
            values = raw.view(dtype).reshape(shape)
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_filter(BLOSC2, h5py.h5z.FLAG_MANDATORY, (0, 0, 0, 0, 5, shuffle, 1))
            filters, encoded, mask = stored_chunk(values, plist)
            assert can_decode(filters[0])
            assert Decoder(filters, values.nbytes).decode(encoded, mask) == values.tobytes()
            for nbytes in (*range(0, encoded.size, 1 + encoded.size // 40), encoded.size - 90):
                if 0 <= nbytes < encoded.size:
                    with pytest.raises(DamagedError):
                        Decoder(filters, values.nbytes).decode(encoded[:nbytes], mask)


@pytest.mark.parametrize("shuffle", [0, 1, 2])
def test_a_blosc2_chunk_that_has_no_values(shuffle):
    """The library gives it the right length, and writes nothing."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_filter(BLOSC2, h5py.h5z.FLAG_MANDATORY, (0, 0, 0, 0, 5, shuffle, 1))
    values = np.random.default_rng(SEED).integers(0, 9, 4000, np.uint8)
    filters, encoded, mask = stored_chunk(values, plist)
    chunk = int.from_bytes(encoded[11:15].tobytes(), "big")  # behind the frame's header
    damaged = encoded.copy()
    damaged[chunk + 2] &= 0xFF - 2  # not stored as it is
    damaged[chunk + 12 : chunk + 16] = (32, 0, 0, 0)  # the header alone
    damaged[chunk + 31] = 4 << 4  # uninitialized
    with pytest.raises(DamagedError, match=r"cannot be decoded|got"):
        Decoder(filters, values.nbytes).decode(damaged, mask)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", ">u2", ">u4", "f4", "f8"])
@each("options", [4, 32])
@each("pixels_per_block", [8, 10, 16, 32])
def test_szip(dtype, options, pixels_per_block):
    rng, dtype = np.random.default_rng(SEED), np.dtype(dtype)
    for shape in ((32,), (100,), (257,), (4, 100), (3, 5, 129), (2, 5000)):
        for raw in contents(dtype.itemsize, math.prod(shape)):
            values = raw.view(dtype).reshape(shape)
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_szip(options, pixels_per_block)
            filters, encoded, mask = stored_chunk(values, plist)
            assert filters[0].number == SZIP
            assert can_decode(filters[0])
            decoder = Decoder(filters, values.nbytes)
            assert decoder.decode(encoded, mask) == values.tobytes()
            for nbytes in (*range(0, encoded.size, 1 + encoded.size // 20), encoded.size - 1):
                try:
                    decoded = decoder.decode(encoded[:nbytes], mask)
                except DamagedError:
                    continue
                assert decoded == values.tobytes()  # only padding was cut off
            for _ in range(20):
                damaged = encoded.copy()
                damaged[rng.integers(encoded.size, size=3)] = rng.integers(256, size=3)
                with contextlib.suppress(DamagedError):
                    assert len(decoder.decode(damaged, mask)) == values.nbytes
            with pytest.raises(DamagedError):
                Decoder(filters, values.nbytes - dtype.itemsize).decode(encoded, mask)
            with pytest.raises(DamagedError):
                Decoder(filters, values.nbytes + dtype.itemsize).decode(encoded, mask)


def test_blocks_of_lz4_beside_stored_ones() -> None:
    """As the plugin writes them: a block that did not shrink is stored as it is."""
    numbers = np.random.default_rng(SEED).integers(0, 256, 200, np.uint8)
    numbers[:64] = numbers[128:192] = 7
    parts = [numbers[begin : begin + 64].tobytes() for begin in range(0, 200, 64)]
    packed = [imagecodecs.lz4_encode(part, header=False) for part in parts]
    blocks = [min(pair, key=len) for pair in zip(packed, parts, strict=True)]
    framed = b"".join(struct.pack(">I", len(block)) + block for block in blocks)
    encoded = np.frombuffer(struct.pack(">QI", 200, 64) + framed, np.uint8)
    decoder = Decoder((Filter(32004, (64,), "lz4"),), 200)
    assert decoder.decode(encoded) == numbers.tobytes()
    for nbytes in range(encoded.size):
        with pytest.raises(DamagedError, match="lz4"):
            decoder.decode(encoded[:nbytes])


def test_a_last_lz4_block_of_bitshuffle_that_lz4_did_not_shrink() -> None:
    """16 bytes that compress to 16: the lz4 filter would take them for stored ones."""
    tail = np.array([7] * 5 + [41, 3, 250, 77, 19, 133, 68, 201, 90, 12, 55], np.uint8)
    found = imagecodecs.lz4_encode(tail.tobytes(), header=False)
    assert len(found) == tail.size
    body = np.arange(32, dtype=np.uint8)
    first = imagecodecs.lz4_encode(body.tobytes(), header=False)
    blocks = b"".join(struct.pack(">I", len(block)) + block for block in (first, found))
    encoded = np.frombuffer(struct.pack(">QI", 48, 32) + blocks, np.uint8)
    shuffled = np.concatenate([body, tail])
    expected = imagecodecs.bitshuffle_decode(shuffled.data, itemsize=1, blocksize=32)
    decoder = Decoder((Filter(32008, (0, 4, 1, 32, 2), "bitshuffle"),), 48)
    assert decoder.decode(encoded) == bytes(expected)
