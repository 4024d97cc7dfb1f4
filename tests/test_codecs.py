"""One battery for every filter pipeline; HDF5 itself encodes the chunks, and says what is right."""

from __future__ import annotations

import itertools

import h5py
import numpy as np
import pytest

from h5async.codecs import (
    DEFLATE,
    FLETCHER32,
    LZF,
    SHUFFLE,
    Filter,
    FilterPipeline,
    Scratch,
    can_decode,
)

ELEMENTS = [1, 2, 3, 4, 8, 16]
NUMBERS = {"deflate": DEFLATE, "shuffle": SHUFFLE, "fletcher32": FLETCHER32, "lzf": LZF}
SHORT = [*((name,) for name in NUMBERS), *itertools.product(NUMBERS, repeat=2)]
LONG = [
    *itertools.product(NUMBERS, repeat=3),
    *itertools.permutations(NUMBERS),
    ("shuffle", "deflate", "fletcher32", "deflate"),
    ("lzf", "deflate", "shuffle", "lzf"),
    ("fletcher32", "shuffle", "shuffle", "fletcher32"),
    ("shuffle", "shuffle", "fletcher32", "deflate"),
]
TO_TRY = [*itertools.product(SHORT, ELEMENTS), *itertools.product(LONG, (3, 8))]
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
GUARD_NBYTES, CANARY = 64, 0xC3
SEED = 20160704


def ids(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


def contents(element, count):
    """Chunks of all kinds: empty of information, regular, half regular, pure noise."""
    rng = np.random.default_rng(SEED)
    nbytes = element * count
    yield np.zeros(nbytes, np.uint8)
    yield np.arange(nbytes, dtype=np.uint8)
    yield np.where(np.arange(nbytes) % 4, 7, rng.integers(0, 256, nbytes)).astype(np.uint8)
    yield rng.integers(0, 256, nbytes, np.uint8)


class HDF5Encoder:
    """Encodes chunks through HDF5, with filters appended one by one."""

    def __init__(self, pipeline, element):
        self.element = element
        self.dtype = np.dtype(f"V{element}")
        self.plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for name in pipeline:
            self.plist.set_filter(
                NUMBERS[name],
                h5py.h5z.FLAG_OPTIONAL if name == "lzf" else h5py.h5z.FLAG_MANDATORY,
                {"deflate": (6,), "shuffle": (element,)}.get(name, ()),
            )
        self.filters = ()

    def encode(self, values):
        """Return the stored bytes and the filter mask of a chunk of `values`."""
        count = values.size // self.element
        with h5py.File("encoder", "w", driver="core", backing_store=False) as file:
            plist = self.plist.copy()
            plist.set_chunk((count,))
            space = h5py.h5s.create_simple((count,))
            dataset = h5py.h5d.create(
                file.id, b"data", h5py.h5t.py_create(self.dtype), space, plist
            )
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values.view(self.dtype))
            file.flush()
            created = dataset.get_create_plist()
            self.filters = tuple(
                Filter(*(created.get_filter(i)[k] for k in (0, 2)), "")
                for i in range(created.get_nfilters())
            )
            mask, encoded = dataset.read_direct_chunk((0,))
            read_back = np.empty(count, self.dtype)
            dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, read_back)
            assert read_back.tobytes() == values.tobytes()
        return np.frombuffer(encoded, np.uint8), mask


class Guarded:
    """Memory of `nbytes` with canaries on both sides, at an odd address."""

    def __init__(self, nbytes):
        self.all = np.full(nbytes + 2 * GUARD_NBYTES + 1, CANARY, np.uint8)
        self.inside = self.all[GUARD_NBYTES + 1 : GUARD_NBYTES + 1 + nbytes]

    def is_intact(self):
        size = self.inside.size
        self.inside[...] = CANARY
        return self.inside.size == size and bool((self.all == CANARY).all())


class Decoder:
    """A pipeline whose every buffer is guarded."""

    def __init__(self, filters, nbytes):
        self.pipeline = FilterPipeline(filters, nbytes)
        self.out = Guarded(nbytes)
        self.between = [Guarded(self.pipeline.between_nbytes) for _ in range(2)]
        self.guards = [self.out, *self.between]

    def decode(self, encoded, mask=0):
        """Return the decoded bytes; whatever happens, assert that nothing else was written."""
        stored = Guarded(encoded.size)
        stored.inside[...] = encoded
        scratch = Scratch(
            stored.inside, np.empty(0, np.uint8), (self.between[0].inside, self.between[1].inside)
        )
        self.out.inside[...] = CANARY
        decoded = None
        try:
            self.pipeline.decode(stored.inside, mask, self.out.inside, scratch)
            decoded = self.out.inside.tobytes()
        finally:
            assert stored.inside.tobytes() == encoded.tobytes(), "the encoded chunk was changed"
            assert stored.is_intact()
            assert all(guard.is_intact() for guard in self.guards), "written out of bounds"
        return decoded


@pytest.mark.parametrize(("pipeline", "element"), TO_TRY, ids=ids)
def test_chunks_that_hdf5_encoded(pipeline, element):
    encoder = HDF5Encoder(pipeline, element)
    for count in (1, 5, 333):
        for values in contents(element, count):
            encoded, mask = encoder.encode(values)
            assert all(can_decode(entry) for entry in encoder.filters)
            assert [entry.number for entry in encoder.filters] == [NUMBERS[p] for p in pipeline]
            decoder = Decoder(encoder.filters, values.size)
            assert decoder.decode(encoded, mask) == values.tobytes()


@pytest.mark.parametrize("pipeline", [*SHORT, *LONG[-28:]], ids=ids)
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
            assert decoder.pipeline.is_raw(bits) == (mask | given_up == (1 << len(pipeline)) - 1)


def test_shuffle_leaves_what_makes_no_whole_element():
    rng = np.random.default_rng(SEED)
    for element in ELEMENTS[1:]:
        for nbytes in range(3 * element + 2):
            values = rng.integers(0, 256, nbytes, np.uint8)
            body = nbytes // element * element
            shuffled = np.concatenate(
                [values[:body].reshape(-1, element).T.reshape(-1), values[body:]]
            )
            decoder = Decoder((Filter(SHUFFLE, (element,), "shuffle"),), nbytes)
            assert decoder.decode(shuffled) == values.tobytes()


@pytest.mark.parametrize("pipeline", [*SHORT, *LONG], ids=ids)
def test_a_chunk_of_another_length_is_an_error(pipeline):
    element, due = 4, 24
    encoder = HDF5Encoder(pipeline, element)
    for count in (1, due - 1, due + 1, due * 400):
        for values in contents(element, count):
            encoded, mask = encoder.encode(values)
            with pytest.raises((ValueError, RuntimeError)):
                Decoder(encoder.filters, element * due).decode(encoded, mask)


def test_a_chunk_of_another_length_is_an_error_where_nothing_is_decoded():
    for filters in ((), (Filter(DEFLATE, (6,), ""), Filter(SHUFFLE, (4,), ""))):
        for nbytes in (0, 11, 13, 1000):
            with pytest.raises(ValueError, match="12 are due"):
                Decoder(filters, 12).decode(np.zeros(nbytes, np.uint8), 0b11)


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_cut_chunks_are_an_error(pipeline):
    encoder = HDF5Encoder(pipeline, 4)
    for values in contents(4, 60):
        encoded, mask = encoder.encode(values)
        decoder = Decoder(encoder.filters, values.size)
        for nbytes in range(encoded.size):
            with pytest.raises((ValueError, RuntimeError)):
                decoder.decode(encoded[:nbytes], mask)


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_damage_stays_inside_and_has_the_right_length(pipeline):
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
            except (ValueError, RuntimeError):
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
        except (ValueError, RuntimeError):
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
        with pytest.raises(ValueError, match="fletcher32"):
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


def test_a_bomb_is_not_inflated():
    bomb, _ = HDF5Encoder(["deflate"], 1).encode(np.zeros(1 << 24, np.uint8))
    assert bomb.size < 1 << 15
    with pytest.raises((ValueError, RuntimeError)):
        Decoder((Filter(DEFLATE, (6,), ""),), 512).decode(bomb)


def test_which_filters_are_decoded_here():
    assert can_decode(Filter(SHUFFLE, (4,), ""))
    assert not can_decode(Filter(SHUFFLE, (), ""))
    assert not can_decode(Filter(SHUFFLE, (0,), ""))
    assert not can_decode(Filter(4, (), "szip"))
