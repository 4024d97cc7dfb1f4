"""Chunks of blosc, which the core takes apart by itself where it can, against the library."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest
from cases import each
from collecting import Collected, made_up
from pythondecoders import decode_blosc

from h5async.codec.filters import Filter
from h5async.read.coretables import Scratch, encoded_room

BLOSC = 32001


class Chunk:
    """A dataset of one chunk, which the core decodes out of memory."""

    def __init__(self, core, nbytes):
        layout = made_up(
            "memory", (1, nbytes), (1, nbytes), [0], [0], filters=(Filter(BLOSC, (), ""),)
        )
        between = tuple(np.empty(encoded_room(nbytes), np.uint8) for _ in range(3))
        scratch = Scratch(np.empty(0, np.uint8), np.empty(nbytes, np.uint8), between)
        self.nbytes = nbytes
        self.collected = Collected(core, [layout], 1, io="map", scratch=scratch)
        if self.collected.collection.tables.reads != [True]:
            pytest.skip("there is no library of blosc")

    def decode(self, encoded):
        """Return what the core makes of it; None: nothing."""
        stored = np.array(bytearray(encoded), np.uint8)  # of exactly that size
        self.collected.lies_in(stored)
        self.collected.layouts[0].chunks.nbytes[0] = stored.size
        if self.collected.read([0]):
            return None
        return self.collected.arrays[0].tobytes()

    def decode_by_twin(self, encoded):
        out = np.zeros(self.nbytes, np.uint8)
        try:
            decoded = decode_blosc(np.frombuffer(encoded, np.uint8), out, out)
        except (ValueError, imagecodecs.BloscError):
            return None
        return decoded.tobytes() if decoded.size == self.nbytes else None


def values_of(kind, nbytes, rng):
    if kind == "noise":
        return rng.integers(0, 256, nbytes, np.uint8)
    waves = np.sin(np.arange(nbytes // 4 + 1) / 17) * 100
    if kind == "noisy":  # streams of high bytes become smaller, those of low bytes do not
        waves += rng.standard_normal(waves.size)
    return waves.astype("<f4").view(np.uint8)[:nbytes]


def encode(values, codec, element, block, shuffle=1):
    return imagecodecs.blosc_encode(
        values, level=5, compressor=codec, typesize=element, blocksize=block, shuffle=shuffle
    )


@each("kind", ["noise", "noisy", "smooth"])
@each("element", [1, 2, 3, 4, 8, 16, 24])
def test_all_elements_codecs_and_blocks(core, kind, element):
    rng = np.random.default_rng(element)
    for nbytes in (64, 3000, 49_152, 49_152 + 4 * element, 40_001):
        chunk, values = Chunk(core, nbytes), values_of(kind, nbytes, rng)
        for codec in ("lz4", "lz4hc", "zstd", "zlib", "blosclz"):
            for block in (0, 4096, 32_768):
                encoded = encode(values, codec, element, block)
                assert chunk.decode(encoded) == values.tobytes(), (nbytes, codec, block)


@each("codec", ["lz4", "zstd"])
@each("element", [2, 4, 8, 16])
def test_damaged_chunks(core, codec, element):
    """What the core takes is what the library makes of it."""
    rng = np.random.default_rng(element)
    nbytes = 12_000
    chunk = Chunk(core, nbytes)
    whole = np.frombuffer(encode(values_of("noisy", nbytes, rng), codec, element, 4096), np.uint8)
    assert chunk.decode(whole.tobytes()) is not None
    num_taken = 0
    for number in range(600):
        damaged = whole.copy()
        at = int(rng.integers(0, 16 if number % 3 == 0 else 200 if number % 3 == 1 else whole.size))
        damaged[at] = rng.integers(0, 256) if number % 2 else damaged[at] ^ (1 << rng.integers(8))
        if number % 7 == 0:
            damaged = damaged[: int(rng.integers(1, whole.size))]
        found = chunk.decode(damaged.tobytes())
        num_taken += found is not None
        if found is not None:
            assert found == chunk.decode_by_twin(damaged.tobytes()), (number, at)
    assert num_taken, "some damage shows nowhere but in values"
