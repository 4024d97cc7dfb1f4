"""The compiled core against decoders in Python, bit for bit, and nothing written beside.

Memory that the core writes to has canaries on both sides; what it only reads is exactly as long as
it says, so that a build with sanitizers (scripts/check_core) tells of a byte that is read beyond.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from random import Random
from typing import Any

import h5py
import hypothesis
import imagecodecs
import numpy as np
import pytest
from cases import each
from collecting import FRESH, Collected, Guarded, made_up
from conftest import assert_reads_like_h5py, assert_same_bits, require_extra, truth
from hdf5_encoder import ALL, MAY_GIVE_UP, HDF5Encoder, contents
from hypothesis import given
from hypothesis import strategies as st
from pythondecoders import FilterPipeline

from h5async import AsyncReader, Field
from h5async.codec.filters import (
    BITSHUFFLE,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    NBIT,
    SCALEOFFSET,
    SHUFFLE,
    CoreKind,
    Filter,
)
from h5async.core import binding as core_module
from h5async.core import binding as libraries
from h5async.core import binding as structures
from h5async.core.binding import Core, address, transform_source
from h5async.errors import ReaderClosedError
from h5async.fill.reading import BatchReader
from h5async.index.metadata import read_layouts
from h5async.io.source import FileStamp
from h5async.plan.transform import RowTransform
from h5async.read.collection import Collection
from h5async.read.coretables import Scratch
from h5async.read.executors import method_of
from h5async.read.h5pyrows import H5pyRows

hdf5plugin = require_extra("hdf5plugin")

SEED = 20160704
FILE_NBYTES = 1 << 22
HUGE = 2**63 - 1


def some(share):
    """Return settings for a share of the examples that the profile asks for."""
    return hypothesis.settings(
        max_examples=max(1, int(hypothesis.settings().max_examples * share)),
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )


@pytest.fixture
def no_python(monkeypatch):
    """Fail where the core refuses something, or leaves it to h5py."""

    def refuse(*_):
        raise AssertionError("the core left something")

    monkeypatch.setattr(Collection, "_read_again", refuse)
    monkeypatch.setattr(H5pyRows, "execute", refuse)


def exactly(data):
    """Return a copy in memory of its own, of exactly that size."""
    return np.array(bytearray(data), np.uint8)


def int64s(*values):
    return np.array(values, np.int64)


# --- one chunk, decoded --------------------------------------------------------------------------


WAYS = ("whole", "scratch", "kept")


class OneChunk:
    """A dataset of one chunk, which the core decodes out of memory, and the Python implementation.

    "whole": straight to the batch; "scratch": by way of the scratch; "kept": by way of memory of
    the core, which is kept for the next batch.
    """

    def __init__(self, core, filters, nbytes):
        self.core = core
        self.filters = filters
        self.nbytes = nbytes
        self.pipeline = FilterPipeline(filters, nbytes)
        self.chunk = Guarded(nbytes)
        self.between = tuple(np.empty(self.pipeline.between_nbytes, np.uint8) for _ in range(3))
        self.scratch = self.new_scratch()
        if core.filters(filters) is None and core.missing:
            pytest.skip(f"no library was found for {', '.join(sorted(core.missing))}")
        self._collected = {}

    def new_scratch(self):
        return Scratch(np.empty(0, np.uint8), self.chunk.inside, self.between)

    def collected(self, way):
        """Return what reads the chunk in some way: as one sample, a column, or many samples."""
        if way not in self._collected:
            n = self.nbytes
            shape, axis = {"whole": ((1, n), 0), "scratch": ((n, 1), 1), "kept": ((n, 1), 0)}[way]
            layout = made_up("memory", shape, shape, [0], [0], filters=self.filters, axis=axis)
            found = Collected(
                self.core, [layout], shape[axis], io="map", kept_nbytes=n, scratch=self.scratch
            )
            assert found.collection.tables.reads == [True], "the core takes this pipeline"
            self._collected[way] = found
        return self._collected[way]

    def decode(self, encoded, mask=0, way="whole"):
        """Return what the core makes of a chunk, None if nothing; nothing else is written."""
        stored = exactly(encoded)
        collected = self.collected(way)
        collected.scratch = self.scratch
        collected.lies_in(stored)
        table = collected.layouts[0].chunks
        table.nbytes[0], table.filter_mask[0] = stored.size, mask
        collected.collection.tables.forget_chunks()
        self.chunk.renew()
        # (Of many samples the first comes last, so that the chunk does not go to the batch whole.)
        samples = np.roll(np.arange(collected.rows), -1)
        refused = collected.read(samples)
        raw = collected.raw[0]
        assert stored.tobytes() == bytes(encoded), "the encoded chunk was changed"
        assert self.chunk.is_intact(), "written beside the scratch"
        if refused:
            assert self.nbytes == 1 or way == "whole" or raw.is_fresh()
            assert collected.left() == {0: list(range(collected.rows))}
            return None
        found = np.roll(raw.inside, 1).tobytes() if way == "kept" else raw.inside.tobytes()
        if way == "kept" and self.is_kept(mask):
            table.nbytes[0] = 0  # what is kept needs no bytes of the file
            assert collected.read(samples) == 0
            assert np.roll(raw.inside, 1).tobytes() == found
            assert self.chunk.is_fresh()
        return found

    def is_kept(self, mask):
        """Tell whether a chunk is kept that many samples take: none is that is stored raw."""
        return self.nbytes > 1 and bool(~mask & ((1 << len(self.filters)) - 1))

    def decode_by_twin(self, encoded, mask=0):
        out = np.empty(self.nbytes, np.uint8)
        scratch = Scratch(np.empty(0, np.uint8), np.empty(0, np.uint8), self.between)
        try:
            self.pipeline.decode(exactly(encoded), mask, out, scratch)
        except (ValueError, RuntimeError):
            return None
        return out.tobytes()

    def is_as_by_twin(self, found, encoded, mask=0):
        """Tell whether the core found nothing, or just what the Python implementation finds."""
        if found is None:
            return True
        expected = self.decode_by_twin(encoded, mask)
        # Behind another compressor, Python does not know where the last block of lz4 ends: one
        # that is stored as it is it takes for compressed, and what follows for another block.
        is_lz4_behind = any(entry.number == LZ4 for entry in self.filters[1:])
        return found == expected or (expected is None and is_lz4_behind)


BLOSC = ["blosc-lz4-0", "blosc-lz4-2", "blosc-zstd-2"]  # and all of its codecs, with shuffle
SINGLE = [
    name
    for name in ALL
    if not name.startswith(("bzip2", "blosc"))
    or name in BLOSC
    or name[:6] + name[-2:] == "blosc--1"
]
PIPELINES = [
    *((name,) for name in SINGLE),
    ("shuffle", "deflate"),
    ("shuffle", "lzf"),
    ("shuffle", "fletcher32", "lzf"),
    ("fletcher32", "deflate"),
    ("deflate", "fletcher32"),
    ("fletcher32", "lzf", "fletcher32"),
    ("lzf", "deflate"),
    ("deflate", "deflate"),
    ("zstd", "lz4"),
    ("deflate", "lz4-blocks-of-256"),
    ("shuffle", "lz4", "zstd", "fletcher32"),
    ("shuffle", "shuffle", "fletcher32", "deflate"),
    ("bitshuffle", "deflate"),
    ("bitshuffle-lz4", "fletcher32"),
    ("bitshuffle-zstd", "zstd"),
    ("fletcher32", "blosc-lz4-1"),
]
ELEMENTS = [1, 2, 3, 4, 5, 7, 8, 12, 16]
COUNTS = [1, 19, 333]
# As many as make several blocks of bitshuffle (8 KiB each), and a last one that is not full.
LARGE_NBYTES = 20_000


def ids(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=ids)
def test_chunks_that_hdf5_encoded(core, pipeline):
    for element in ELEMENTS:
        encoder = HDF5Encoder(pipeline, element)
        large = [LARGE_NBYTES // element + 5] if element in (1, 3, 8) else []
        for count in (*COUNTS, *large):
            chunk = None
            for values in itertools.islice(contents(element, count), count > 333, None):
                encoded, mask = encoder.encode(values)
                chunk = chunk or OneChunk(core, encoder.filters, values.size)
                for way in WAYS:
                    assert chunk.decode(encoded, mask, way) == values.tobytes()
                assert chunk.is_as_by_twin(values.tobytes(), encoded, mask)


@pytest.mark.parametrize(
    "pipeline", [p for p in PIPELINES if len(p) > 1 or "-" not in p[0]], ids=ids
)
def test_a_masked_filter_is_skipped(core, pipeline):
    full = HDF5Encoder(pipeline, 4)
    values = next(itertools.islice(contents(4, 50), 2, None))
    full.encode(values)
    chunk = OneChunk(core, full.filters, values.size)
    beyond = 0xFFFFFFFF << len(pipeline) & 0xFFFFFFFF  # bits of filters that are not there
    for mask in range(1 << len(pipeline)):
        kept = [bit for bit in range(len(pipeline)) if not mask >> bit & 1]
        encoded, given_up = HDF5Encoder([pipeline[bit] for bit in kept], 4).encode(values)
        given_up = sum(1 << bit for i, bit in enumerate(kept) if given_up >> i & 1)
        for bits in (mask | given_up, mask | given_up | beyond):
            for way in WAYS:
                assert chunk.decode(encoded, bits, way) == values.tobytes()
            for wrong in (encoded[:-1], np.append(encoded, encoded[:1])):
                assert chunk.is_as_by_twin(chunk.decode(wrong, bits), wrong, bits)


def test_filters_that_do_nothing(core):
    with h5py.File("filters", "w", driver="core", backing_store=False) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((8,))
        plist.set_filter(SCALEOFFSET, h5py.h5z.FLAG_OPTIONAL, (2, 32))
        plist.set_filter(NBIT, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((8,))
        created = h5py.h5d.create(file.id, b"d", h5py.h5t.NATIVE_INT32, space, plist)
        created = created.get_create_plist()
        nothing = [Filter(*(created.get_filter(i)[k] for k in (0, 2)), "") for i in range(2)]
    assert all(entry.core.kind == CoreKind.NOTHING for entry in nothing)
    encoder = HDF5Encoder(["shuffle", "fletcher32"], 4)
    for values in contents(4, 8):
        encoded, _ = encoder.encode(values)
        shuffle, checksum = encoder.filters
        for filters in (
            (nothing[0], shuffle, checksum),
            (shuffle, nothing[1], nothing[0], checksum),
            (shuffle, checksum, *nothing),
        ):
            chunk = OneChunk(core, filters, values.size)
            for way in WAYS:
                assert chunk.decode(encoded, 0, way) == values.tobytes()
            for wrong in (encoded[:-1], encoded[:4], np.append(encoded, encoded[:1])):
                assert chunk.decode(wrong) is chunk.decode_by_twin(wrong) is None
        for filters in ((nothing[0],), tuple(nothing)):
            chunk = OneChunk(core, filters, values.size)
            for way in WAYS:
                assert chunk.decode(values, 0, way) == values.tobytes()
            assert chunk.decode(values[1:]) is None


def test_pipelines_that_the_core_leaves_to_hdf5(core):
    plain = Filter(SHUFFLE, (4,), "")
    for entry in (
        Filter(SHUFFLE, (2**31,), ""),
        Filter(SHUFFLE, (0,), ""),
        Filter(SHUFFLE, (), ""),
        Filter(32013, (), "zfp"),
    ):
        assert core.filters((plain, entry)) is None
    assert core.filters((plain,) * 32) is not None
    assert core.filters((plain,) * 33) is None
    assert core.filters(()) is not None


def test_as_many_filters_as_hdf5_has_at_most(core):
    values = next(itertools.islice(contents(3, 41), 2, None))
    filters = (Filter(SHUFFLE, (3,), ""), Filter(FLETCHER32, (), "")) * 16
    encoded = values
    for entry in filters:
        if entry.number == SHUFFLE:
            body = encoded.size // 3 * 3
            shuffled = encoded[:body].reshape(-1, 3).T.reshape(-1)
            encoded = np.concatenate([shuffled, encoded[body:]])
        else:
            checksum = int(imagecodecs.h5checksum_fletcher32(encoded)).to_bytes(4, "little")
            encoded = np.append(encoded, exactly(checksum))
    chunk = OneChunk(core, filters, values.size)
    assert chunk.decode(encoded) == chunk.decode_by_twin(encoded) == values.tobytes()


def test_fletcher32_of_any_length_and_in_both_orders(core):
    rng = np.random.default_rng(SEED)
    for nbytes in (*range(1, 20), 511, 512, 513, 514, 1023, 1027, 70_001):
        chunk = OneChunk(core, (Filter(FLETCHER32, (), ""),), nbytes)
        for values in (
            np.zeros(nbytes, np.uint8),
            np.full(nbytes, 255, np.uint8),  # sums that are a multiple of 65535 but not 0
            rng.integers(0, 256, nbytes, np.uint8),
        ):
            checksum = int(imagecodecs.h5checksum_fletcher32(values)).to_bytes(4, "little")
            for order in ((0, 1, 2, 3), (1, 0, 3, 2)):
                stored = exactly(values.tobytes() + bytes(checksum[i] for i in order))
                assert chunk.decode(stored) == chunk.decode_by_twin(stored) == values.tobytes()
                stored[rng.integers(stored.size)] ^= 1 << rng.integers(8)
                assert chunk.decode(stored) is chunk.decode_by_twin(stored) is None


def test_shuffle_leaves_what_makes_no_whole_element(core):
    rng = np.random.default_rng(SEED)
    for element in (*ELEMENTS, 300, 2**31 - 1):
        for nbytes in (*range(1, 40), 16 * 16 + 5, 2050):
            values = rng.integers(0, 256, nbytes, np.uint8)
            body = nbytes // element * element
            shuffled = values[:body].reshape(-1, min(element, max(1, body))).T.reshape(-1)
            chunk = OneChunk(core, (Filter(SHUFFLE, (element,), ""),), nbytes)
            encoded = np.concatenate([shuffled, values[body:]])
            assert chunk.decode(encoded) == values.tobytes()


def test_a_last_block_as_long_compressed_as_it_is(core):
    """Blocks of bitshuffle-lz4 are compressed, however long; the lz4 filter has them stored."""
    rng = np.random.default_rng(SEED)
    encoder = HDF5Encoder(["bitshuffle-lz4-blocks-of-32"], 1)
    for _ in range(50):
        tail = rng.integers(0, 256, 16, np.uint8)
        tail[:5] = 7  # one match of 4 bytes saves just what it costs
        tail = imagecodecs.bitshuffle_decode(tail.tobytes(), itemsize=1, blocksize=16)
        values = np.append(rng.integers(0, 256, 32, np.uint8), exactly(tail))
        encoded, mask = encoder.encode(values)
        chunk = OneChunk(core, encoder.filters, values.size)
        assert chunk.decode(encoded, mask) == values.tobytes()


@pytest.mark.parametrize("nbytes", [1, 12])
def test_nothing_stored(core, nbytes):
    for pipeline in PIPELINES:
        encoder = HDF5Encoder(pipeline, 1)
        encoder.encode(np.zeros(12, np.uint8))
        chunk = OneChunk(core, encoder.filters, nbytes)
        raw = (1 << len(pipeline)) - 1
        for way in WAYS:
            assert chunk.decode(b"", 0, way) is None
            assert chunk.decode(bytes(12), 0, way) is None or nbytes == 12
            assert chunk.decode(b"", raw, way) is None
            assert chunk.decode(bytes(nbytes), raw, way) == bytes(nbytes)


# --- damaged chunks ------------------------------------------------------------------------------

TO_DAMAGE = [
    *((name,) for name in SINGLE),
    ("shuffle", "deflate"),
    ("shuffle", "fletcher32", "lzf"),
    ("fletcher32", "zstd"),
    ("lzf", "fletcher32"),
    ("lzf", "lzf"),
    ("bitshuffle", "zstd"),
    ("zstd", "blosc-lz4-1"),
]
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 255, 2**15, 2**24]
NUMBERS += [bound + by for bound in (2**31, 2**32, 2**63, 2**64) for by in (-2, -1, 0, 1)]


@functools.cache
def encoded_chunk(pipeline, element, count, kind):
    encoder = HDF5Encoder(pipeline, element)
    values = next(itertools.islice(contents(element, count), kind, None))
    encoded, mask = encoder.encode(values)
    return encoder.filters, encoded.tobytes(), mask, values.tobytes()


def damaged(choose, encoded, due):
    """Return some bytes after one to three changes; ``choose(n)`` gives a number below n."""
    for _ in range(1 + choose(3)):
        size = len(encoded)
        at = choose(min(41, size + 1)) if choose(2) else choose(size + 1)
        some_bytes = bytes(choose(256) for _ in range(1 + choose(9)))
        width, order = (4, 8)[choose(2)], ("big", "little")[choose(2)]
        near = [size, due][choose(2)] - 20 + choose(25)
        number = [*NUMBERS, *[max(0, near)] * 10][choose(len(NUMBERS) + 10)] % 256**width
        encoded = (
            encoded[:at]
            + bytes(x ^ 1 << choose(8) for x in encoded[at : at + 1])
            + encoded[at + 1 :],
            encoded[:at] + some_bytes[:1] + encoded[at + 1 :],
            encoded[:at] + some_bytes + encoded[at + len(some_bytes) :],
            encoded[:at] + number.to_bytes(width, order) + encoded[at + width :],
            encoded[:at],
            encoded[:at] + encoded[at + len(some_bytes) :],
            encoded[:at] + some_bytes + encoded[at:],
            encoded + some_bytes,
        )[choose(8)]
    return encoded


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_of_a_damaged_chunk_the_core_makes_what_the_twin_makes(core, pipeline):
    @some(0.03)
    @given(st.data())
    def check(data):
        element = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]), label="element")
        count = data.draw(st.sampled_from([1, 8, 19, 83, 400]), label="count")
        kind = data.draw(st.integers(0, 3), label="kind")
        filters, encoded, mask, values = encoded_chunk(pipeline, element, count, kind)
        chunk = OneChunk(core, filters, len(values))
        encoded = damaged(lambda n: data.draw(st.integers(0, n - 1)), encoded, len(values))
        mask ^= data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 1 << 31]), label="mask")
        way = data.draw(st.sampled_from(WAYS), label="way")
        assert chunk.is_as_by_twin(chunk.decode(encoded, mask, way), encoded, mask)

    check()


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_of_many_damaged_chunks_too(core, pipeline):
    random = Random(SEED)
    taken = 0
    for element, count, kind in itertools.product((1, 3, 4), (19, 400), (0, 2)):
        filters, encoded, mask, values = encoded_chunk(pipeline, element, count, kind)
        chunk = OneChunk(core, filters, len(values))
        for _ in range(60):
            changed = damaged(random.randrange, encoded, len(values))
            found = chunk.decode(changed, mask, random.choice(WAYS))
            assert chunk.is_as_by_twin(found, changed, mask)
            taken += found is not None
    assert taken or "fletcher32" in pipeline


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_cut_chunks_are_refused(core, pipeline):
    for kind in (0, 2):
        filters, encoded, mask, values = encoded_chunk(pipeline, 4, 83, kind)
        chunk = OneChunk(core, filters, len(values))
        for nbytes in {*range(60), *range(0, len(encoded), 7), len(encoded) - 1}:
            if nbytes < len(encoded):
                assert chunk.decode(encoded[:nbytes], mask) is None


@pytest.mark.parametrize("pipeline", TO_DAMAGE, ids=ids)
def test_noise_is_refused_or_what_the_twin_makes_of_it(core, pipeline):
    rng = np.random.default_rng(SEED)
    filters, _, _, values = encoded_chunk(pipeline, 4, 83, 2)
    chunk = OneChunk(core, filters, len(values))
    for _ in range(200):
        noise = rng.integers(0, rng.choice([4, 256]), rng.integers(0, 500), np.uint8)
        assert chunk.is_as_by_twin(chunk.decode(noise), noise)


@pytest.mark.slow
def test_streams_of_lzf_made_of_random_steps(core):
    """Matches of all distances and lengths, overlapping ones too, up to the last byte."""
    rng = np.random.default_rng(SEED)
    for _ in range(500):
        values, encoded = bytearray(), bytearray()
        for _ in range(rng.integers(1, 12)):
            if not values or rng.integers(2):
                literal = rng.integers(0, 256, rng.choice([1, 2, 7, 31, 32]), np.uint8).tobytes()
                encoded += bytes([len(literal) - 1]) + literal
                values += literal
                continue
            length = int(rng.choice([3, 4, 8, 8, 9, 11, 17, 40, 264]))
            longest = min(len(values), 8192)
            back = int(min(longest, rng.choice([1, 2, 3, 7, 8, 9, 15, 16, longest])))
            high, low = divmod(back - 1, 256)
            code = length - 2
            encoded += bytes([code << 5 | high] if code < 7 else [7 << 5 | high, code - 7])
            encoded.append(low)
            for _ in range(length):
                values.append(values[-back])
        lzf = (Filter(LZF, (), ""),)
        chunk = OneChunk(core, lzf, len(values))
        assert chunk.decode(encoded, way="whole") == bytes(values)
        assert chunk.decode_by_twin(encoded) == bytes(values)
        for wrong in {len(values) - 1, len(values) + 1} - {0}:
            chunk = OneChunk(core, lzf, wrong)
            assert chunk.decode(encoded) is chunk.decode_by_twin(encoded) is None


def test_hostile_headers(core):
    def big(number, width):
        return number.to_bytes(width, "big")

    lz4 = OneChunk(core, (Filter(LZ4, (), ""),), 24)
    shuffled = OneChunk(core, (Filter(BITSHUFFLE, (0, 4, 4, 8, 2), ""),), 24)
    frames = OneChunk(core, (Filter(BITSHUFFLE, (0, 4, 4, 8, 3), ""),), 24)
    for nbytes, block, length in itertools.product(
        (0, 1, 23, 24, 25, 2**31, 2**32 + 24, 2**63 - 1, 2**63, 2**63 + 24, 2**64 - 1),
        (0, 1, 8, 24, 32, 2**31 - 32, 2**31, 2**31 + 32, 0x7E000000, 0x7E000020, 2**32 - 32),
        (0, 1, 24, 2**31 - 1, 2**31, 2**32 - 1),
    ):
        encoded = big(nbytes, 8) + big(block, 4) + big(length, 4) + bytes(range(24))
        for chunk in (lz4, shuffled, frames):
            assert chunk.is_as_by_twin(chunk.decode(encoded), encoded)
    filters, whole, mask, values = encoded_chunk(("blosc-lz4-1",), 4, 83, 0)
    blosc = OneChunk(core, filters, len(values))
    assert blosc.decode(whole, mask) == values
    for at, number in itertools.product((4, 8, 12), (*NUMBERS, 331, 332, 333, len(whole) - 1)):
        encoded = whole[:at] + (number % 2**32).to_bytes(4, "little") + whole[at + 4 :]
        assert blosc.is_as_by_twin(blosc.decode(encoded), encoded)


def test_a_bomb_is_not_inflated(core):
    for name in ("deflate", "lzf", "zstd", "lz4", "bitshuffle-lz4", "blosc-lz4-1"):
        filters, bomb, mask, _ = encoded_chunk((name,), 1, 1 << 18, 0)
        assert len(bomb) < 1 << 13
        assert OneChunk(core, filters, 512).decode(bomb, mask) is None


# --- rows as they lie in the file ----------------------------------------------------------------


class RowFile:
    """A file, and the core's way to read rows of it: each is a chunk, and lies anywhere."""

    def __init__(self, core, path, nbytes=FILE_NBYTES):
        rng = np.random.default_rng(SEED)
        self.core = core
        self.path = path
        self.content = rng.integers(0, 256, nbytes, np.uint8)
        self.content.tofile(path)

    def forget(self):
        """Drop the file from the page cache, as far as the system does as it is asked."""
        if hasattr(os, "posix_fadvise"):
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def collected(self, io, offset, row_nbytes, *, num_rows=None, fill=b"\x01"):
        """Return what reads rows at some bytes of the file; below 0: never written."""
        numbers = [i for i, at in enumerate(offset) if at >= 0]
        layout = made_up(
            self.path,
            (len(offset), row_nbytes // len(fill)),
            (1, row_nbytes // len(fill)),
            [offset[i] for i in numbers],
            [row_nbytes] * len(numbers),
            numbers=None if len(numbers) == len(offset) else numbers,
            dtype=f"V{len(fill)}",
            fill=fill,
            stamp=FileStamp.of(self.path),
        )
        return Collected(self.core, [layout], num_rows or len(offset), io=io)

    def read(self, io, offset, row_nbytes, *, samples=None, num_rows=None, fill=b"\x01"):
        """Return which rows were left, and the batch."""
        offset = [int(at) for at in offset]
        with self.collected(io, offset, row_nbytes, num_rows=num_rows, fill=fill) as collected:
            refused = collected.read(range(len(offset)) if samples is None else samples)
            left = collected.left().get(0, [])
            assert bool(refused) == bool(left)
            return left, collected.raw[0].inside.reshape(collected.rows, row_nbytes)

    def row(self, offset, row_nbytes, fill=b"\x01"):
        if offset < 0:
            return fill * (row_nbytes // len(fill))
        return self.content[offset : offset + row_nbytes].tobytes()


@pytest.fixture
def row_file(core, tmp_path):
    return RowFile(core, tmp_path / "rows")


IO = ["auto", "pread", "map"]
ROW_NBYTES = [1, 2, 3, 7, 8, 100, 3072, 4095, 4096, 5000, 100_000]


@pytest.mark.parametrize("io", IO)
def test_rows(row_file, io):
    size = row_file.content.size

    @st.composite
    def offsets(draw, nbytes):
        found = []
        for _ in range(draw(st.integers(1, 40))):
            kind = draw(st.sampled_from(["any", "any", "next", "next", "next", "hole", "last"]))
            if kind == "next" and found and 0 <= found[-1] <= size - 2 * nbytes:
                found.append(found[-1] + nbytes)
            elif kind == "hole":
                found.append(-1)
            else:
                found.append(size - nbytes if kind == "last" else draw(st.integers(0, size // 2)))
        return found

    @some(0.12)
    @given(st.data())
    def check(data):
        nbytes = data.draw(st.sampled_from(ROW_NBYTES), label="row_nbytes")
        offset = data.draw(offsets(nbytes), label="offset")
        item = data.draw(st.sampled_from([n for n in (1, 2, 3, 8, 16) if not nbytes % n]))
        fill = bytes(range(1, item + 1))
        num_rows = len(offset) + data.draw(st.integers(0, 2))
        samples = data.draw(
            st.one_of(
                st.just(range(len(offset))),
                st.permutations(range(len(offset))),
                st.lists(st.integers(0, len(offset) - 1), max_size=num_rows),
            ),
            label="samples",
        )
        if data.draw(st.booleans(), label="forget"):
            row_file.forget()
        left, batch = row_file.read(
            io, offset, nbytes, samples=samples, num_rows=num_rows, fill=fill
        )
        assert not left
        for row, sample in enumerate(samples):
            assert batch[row].tobytes() == row_file.row(offset[sample], nbytes, fill)
        assert (batch[len(samples) :] == FRESH).all()

    check()


@pytest.mark.parametrize("io", IO)
def test_rows_beyond_the_end_of_the_file_are_left(row_file, io):
    size = row_file.content.size

    @some(0.15)
    @given(st.data())
    def check(data):
        nbytes = data.draw(st.sampled_from([1, 3, 100, 4096, 100_000]))
        good = data.draw(st.lists(st.integers(0, size // nbytes - 2), max_size=30))
        beyond = [size - nbytes + 1, size, size + 1, HUGE - nbytes, HUGE - nbytes + 1, HUGE - 1]
        bad = data.draw(st.lists(st.sampled_from([*beyond, HUGE, -1]), max_size=4))
        offset = data.draw(st.permutations([n * nbytes for n in sorted(good)] + bad + [beyond[0]]))
        if data.draw(st.booleans()):
            row_file.forget()
        left, batch = row_file.read(io, offset, nbytes)
        for row, at in enumerate(offset):
            if at > size - nbytes:
                assert row in left
            elif row not in left:
                assert batch[row].tobytes() == row_file.row(at, nbytes)

    check()


@pytest.mark.parametrize("io", IO)
@each("begin", [FILE_NBYTES - 50, FILE_NBYTES, HUGE - 100, HUGE])
def test_a_contiguous_dataset_that_reaches_beyond_the_file(core, row_file, io, begin):
    """The sum of two numbers that a file declares may be too large for any number."""
    layout = made_up(row_file.path, (100, 10), (), [begin], (), stamp=FileStamp.of(row_file.path))
    with Collected(core, [layout], 100, io=io) as collected:
        assert collected.read(range(99, -1, -1)) > 0
        left = collected.left()[0]
        ends = {row: begin + (100 - row) * 10 for row in range(100)}
        assert set(left) >= {row for row in range(100) if ends[row] > FILE_NBYTES}
        for row in set(range(100)) - set(left):
            at = begin + (99 - row) * 10
            assert collected.arrays[0][row].tobytes() == row_file.row(at, 10)


@pytest.mark.parametrize("io", IO)
def test_rows_of_a_file_that_was_cut_short(core, row_file, io):
    """It was longer when it was mapped: to touch what is gone would kill the process."""
    nbytes, kept, stamp = 1000, 7, FileStamp.of(row_file.path)
    with row_file.collected(io, range(0, 20 * nbytes, nbytes), nbytes) as collected:
        assert not list(collected.collection.tables.open_ahead(lambda: False))
        assert collected.read(range(20)) == 0
        os.truncate(row_file.path, nbytes * kept + 500)
        assert collected.read(range(20)) > 0
        assert collected.left() == {0: list(range(20))}  # it is not what was indexed
        now = FileStamp.of(row_file.path)
        assert now != stamp
        collected.collection.tables.restamp(str(row_file.path), now)
        for row in range(20):
            assert collected.read([row]) == (row >= kept)
            if row < kept:
                assert collected.raw[0].inside[:nbytes].tobytes() == row_file.row(1000 * row, 1000)
        os.truncate(row_file.path, 0)
        collected.collection.tables.restamp(str(row_file.path), FileStamp.of(row_file.path))
        assert collected.read(range(20)) > 0
        assert collected.left() == {0: list(range(20))}


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("is_cached", [True, False])
def test_thousands_of_adjacent_rows(row_file, io, is_cached):
    rng = np.random.default_rng(SEED)
    for nbytes, count in ((1, 5000), (3, 3000), (100, 2500), (1000, 1025), (1600, 2048)):
        for begin in (0, 11):
            offset = begin + nbytes * np.arange(count)
            for samples in (np.arange(count), np.arange(count)[::-1], rng.permutation(count)):
                if not is_cached:
                    row_file.forget()
                left, batch = row_file.read(io, offset, nbytes, samples=samples)
                assert not left
                rows = row_file.content[begin : begin + nbytes * count].reshape(count, nbytes)
                assert np.array_equal(batch, rows[samples])


def test_samples_that_there_are_not(row_file):
    with row_file.collected("auto", range(0, 1000, 100), 100, num_rows=12) as collected:
        for bad in (-1, 10, HUGE, -HUGE - 1):
            with pytest.raises(IndexError):
                collected.plan([3, bad])
        with pytest.raises(IndexError):
            collected.plan([0] * 13)
        assert collected.read([]) == 0
        assert collected.raw[0].is_fresh()
        assert collected.read([0] * 12) == 0
        assert (collected.arrays[0][1:] == collected.arrays[0][0]).all()


def test_rows_through_a_reader(core, tmp_path, no_python):
    rng = np.random.default_rng(SEED)
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["small"] = rng.integers(0, 256, (3000, 5), np.uint8)
        file["large"] = rng.integers(0, 2**60, (40, 3001))
        chunked = file.create_dataset("holes", (50, 7), "f8", chunks=(4, 7), fillvalue=2.5)
        chunked[10:30] = rng.random((20, 7))
    for io in IO:
        assert_reads_like_h5py(path, "small", batch_size=2100, io=io)
        assert_reads_like_h5py(path, "large", batch_size=7, io=io, num_threads=2)
        assert_reads_like_h5py(path, "holes", batch_size=11, io=io)


# --- pieces of chunks, put in place --------------------------------------------------------------

DTYPES = ["u1", "<i2", ">u2", "V3", "<f4", "<u8", ">f8", "<c8", "<c16", "V16", "S5"]
OPTIONS = [
    {},
    {},
    {"compression": "gzip", "compression_opts": 1},
    {"compression": "lzf", "shuffle": True},
    {"shuffle": True, "fletcher32": True},
    {"compression": ALL["zstd"][0]},
    {"compression": BITSHUFFLE, "compression_opts": (0, 2)},
]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a dataset. Its repr is what a failing example shows."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    dtype: str
    options: dict[str, Any]
    written: list[tuple[slice, ...]]

    def write(self, path):
        rng = np.random.default_rng(SEED)
        dtype = np.dtype(self.dtype)
        fill = (
            {} if dtype.kind == "V" else {"fillvalue": np.frombuffer(b"abcdefgh" * 2, dtype, 1)[0]}
        )
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset(
                "data", self.shape, dtype, chunks=self.chunks, **fill, **self.options
            )
            for where in self.written:
                extents = [
                    len(range(*s.indices(n))) for s, n in zip(where, self.shape, strict=True)
                ]
                count = int(np.prod(extents)) * dtype.itemsize
                if count:
                    raw = rng.integers(1, 256, count, np.uint8).tobytes()
                    dataset[where] = np.frombuffer(raw, dtype).reshape(extents)


@st.composite
def recipes(draw):
    rank = draw(st.integers(1, 4))
    longest = {1: 60, 2: 20, 3: 9, 4: 6}[rank]
    shape = tuple(draw(st.lists(st.integers(1, longest), min_size=rank, max_size=rank)))
    chunks, options = None, {}
    if draw(st.sampled_from([True, True, True, True, False])):
        chunks = tuple(draw(st.one_of(st.just(extent), st.integers(1, extent))) for extent in shape)
        options = draw(st.sampled_from(OPTIONS))
    everything = tuple(slice(0, extent) for extent in shape)
    some_of_it = st.tuples(
        *(
            st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda e: slice(*sorted(e)))
            for n in shape
        )
    )
    written = draw(st.one_of(st.just([everything]), st.lists(some_of_it, max_size=2)))
    return Recipe(shape, chunks, draw(st.sampled_from(DTYPES)), options, written)


def assert_reads_directly(
    core, path, num_dim, sample, io="auto", *, kept_nbytes=0, cuts=(), threads=1
):
    """Read some samples in shares, twice, and compare with what h5py reads."""
    expected = truth(path, num_dim=num_dim)[sample]
    layout = read_layouts(path, {"data": Field("data", num_dim)})["data"]
    assert method_of(layout) == "core"
    with Collected(core, [layout], len(expected), io=io, kept_nbytes=kept_nbytes) as collected:
        for _ in range(2):  # the second time out of what was kept
            assert collected.read(sample, cuts=cuts, threads=threads) == 0
            assert_same_bits(collected.arrays[0].astype(expected.dtype), expected)


@pytest.mark.parametrize("io", IO)
def test_pieces_of_chunks_come_to_their_places(core, no_python, io):
    @some(0.12)
    @given(st.data())
    def check(data):
        recipe = data.draw(recipes(), label="dataset")
        num_dim = data.draw(st.integers(0, len(recipe.shape) - 1), label="num_dim")
        if recipe.chunks is None and num_dim and io == "pread":
            return  # only a map will do
        extent = recipe.shape[num_dim]
        sample = data.draw(
            st.one_of(
                st.just(list(range(extent))),
                st.permutations(range(extent)),
                st.lists(st.integers(0, extent - 1), min_size=1, max_size=2 * extent),
            ),
            label="sample",
        )
        kept_nbytes = data.draw(st.sampled_from([0, 1 << 20]))
        cuts = data.draw(st.lists(st.integers(0, 30), max_size=3))
        threads = data.draw(st.sampled_from([1, 3]))
        with tempfile.TemporaryDirectory(prefix="h5async") as directory:
            path = Path(directory, "data.h5")
            recipe.write(path)
            assert_reads_directly(
                core, path, num_dim, sample, io,
                kept_nbytes=kept_nbytes, cuts=cuts, threads=threads,
            )  # fmt: skip

    check()


@each("dtype", ["u1", ">u2", "V3", "<f4", "<u8", "<c16"])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((37, 70), None),
        ((37, 70), (37, 70)),
        ((37, 70), (20, 33)),
        ((300, 20), (300, 20)),
        ((3, 19, 45), None),
        ((3, 19, 45), (2, 19, 40)),
        ((5, 37, 3, 2), (5, 37, 3, 2)),
    ],
)
def test_samples_along_every_dimension(core, tmp_path, no_python, shape, chunks, dtype):
    path = tmp_path / "data.h5"
    options = {"compression": "lzf"} if chunks else {}
    everything = tuple(slice(0, extent) for extent in shape)
    Recipe(shape, chunks, dtype, options, [everything]).write(path)
    for num_dim, extent in enumerate(shape):
        in_order = list(range(extent))
        for sample in (
            in_order,
            in_order[1:],
            in_order[-1 : extent // 2 : -1] + in_order[: extent // 2],
            [n for n in in_order if n % 18],
        ):
            assert_reads_directly(core, path, num_dim, sample or [0])


@pytest.mark.parametrize("io", IO)
def test_chunks_through_a_reader(core, tmp_path, no_python, io):
    rng = np.random.default_rng(SEED)
    path = tmp_path / "chunks.h5"
    values = rng.integers(0, 50, (37, 11, 13)).astype("<i4")
    with h5py.File(path, "w") as file:
        for i, options in enumerate(OPTIONS[1:]):
            for chunks in ((1, 11, 13), (5, 11, 13), (4, 3, 5)):
                file.create_dataset(f"{i}-{chunks[0]}", data=values, chunks=chunks, **options)
    with h5py.File(path) as file:
        names = list(file)
    for name in names:
        assert_reads_like_h5py(path, name, batch_size=8, io=io, num_threads=3)
    assert_reads_like_h5py(path, names[-1], num_dim=2, batch_size=5, io=io)


def test_what_the_core_refuses_is_an_error(core, tmp_path):
    """Of a chunk that was cut; the others are read."""
    path = tmp_path / "damaged.h5"
    values = np.arange(400, dtype="<i4").reshape(40, 10)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", data=values, chunks=(4, 10), compression="gzip")
        _, encoded = dataset.id.read_direct_chunk((8, 0))
        dataset.id.write_direct_chunk((8, 0), encoded[:-5])
    with AsyncReader(
        hdf5_path=path, data_field="data", labels_field=None, batch_size=4, shuffle=False,
        device="cpu",
    ) as reader:  # fmt: skip
        batches = iter(reader)
        assert_same_bits(np.asarray(next(batches)["data"]), values[:4])
        assert_same_bits(np.asarray(next(batches)["data"]), values[4:8])
        with pytest.raises(Exception, match=r"chunk \(8, 0\).*damaged"):
            next(batches)


# --- tables that do not hold together -------------------------------------------------------------


def small_dataset(file, filters=(), stored=12, **options):
    """Return a dataset of (8 samples, 6) bytes in 4 chunks of (4, 3), one after the other."""
    offset = [n * stored for n in range(4)]
    return made_up(file, (8, 6), (4, 3), offset, [stored] * 4, filters=filters, **options)


def small_values(chunks):
    """Return what it holds, from the bytes of its chunks."""
    return chunks.reshape(2, 2, 4, 3).transpose(0, 2, 1, 3).reshape(8, 6)


@each("io", ["memory", *IO])
@each(
    "name, bad",
    [
        *(("offset", bad) for bad in (-1, 37, 48, HUGE, HUGE - 11, -HUGE - 1)),
        *(("nbytes", bad) for bad in (-1, 0, 11, 13, HUGE, -HUGE - 1)),
    ],
)
def test_a_chunk_that_lies_nowhere_is_left_with_its_samples(core, tmp_path, io, name, bad):
    chunks = np.arange(1, 49, dtype=np.uint8)
    chunks.tofile(tmp_path / "chunks")
    layout = small_dataset(tmp_path / "chunks", stamp=FileStamp.of(tmp_path / "chunks"))
    with Collected(core, [layout], 8, io="map" if io == "memory" else io) as collected:
        if io == "memory":
            collected.lies_in(chunks)
        assert collected.read(range(8)) == 0
        assert np.array_equal(collected.arrays[0], small_values(chunks))
        for number in range(4):
            before = int(getattr(layout.chunks, name)[number])
            getattr(layout.chunks, name)[number] = bad
            assert collected.read(range(8)) == 1
            bad_half = slice(number // 2 * 4, number // 2 * 4 + 4)
            good_half = slice(4 - number // 2 * 4, 8 - number // 2 * 4)
            assert collected.left() == {0: list(range(8))[bad_half]}
            assert np.array_equal(collected.arrays[0][good_half], small_values(chunks)[good_half])
            getattr(layout.chunks, name)[number] = before
        assert collected.read(range(8)) == 0


def test_chunks_that_were_never_allocated(core, tmp_path):
    chunks = np.arange(1, 13, dtype=np.uint8)
    layout = made_up(tmp_path / "none", (8, 6), (4, 3), [0], [12], numbers=[1], fill=b"\x09")
    with Collected(core, [layout], 8, io="map") as collected:
        collected.lies_in(chunks)
        assert collected.read(range(8)) == 0
        expected = np.full((8, 6), 9)
        expected[:4, 3:] = chunks.reshape(4, 3)
        assert np.array_equal(collected.arrays[0], expected)


@each("name", ["plain", "deflate"])
def test_scratch_that_is_too_small(core, tmp_path, name):
    filters, encoded, mask, values = encoded_chunk(("deflate",), 1, 12, 3)
    if name == "plain":  # lines are read to the batch, and need none
        filters, encoded, mask = (), values, 0
    path = tmp_path / "chunks"
    path.write_bytes(bytes(encoded) * 4)
    layout = small_dataset(path, filters, len(encoded), masks=[mask] * 4, stamp=FileStamp.of(path))
    chunk, room = Guarded(11), np.empty(99, np.uint8)
    scratch = Scratch(room, chunk.inside, (room,) * 3)
    # (Nothing is mapped: a chunk that has a filter is decoded to the scratch.)
    with Collected(core, [layout], 8, io="pread", scratch=scratch) as collected:
        assert collected.read(range(8)) == (2 if filters else 0)
        left = collected.left().get(0, [])
        read = [sample for sample in range(8) if sample not in left]
        assert bool(left) == bool(filters)
        expected = small_values(np.frombuffer(bytes(values) * 4, np.uint8))
        assert np.array_equal(collected.arrays[0][read], expected[read])
        assert filters or chunk.is_fresh()
        assert chunk.is_intact()


def test_an_encoded_chunk_that_is_larger_than_the_scratch(core, tmp_path):
    filters, encoded, mask, values = encoded_chunk(("deflate",), 1, 12, 3)
    path = tmp_path / "chunks"
    path.write_bytes(encoded * 4)
    layout = small_dataset(path, filters, len(encoded), masks=[mask] * 4, stamp=FileStamp.of(path))
    for room, refused in ((len(encoded) - 1, 2), (len(encoded), 0)):
        buffer, chunk = Guarded(room), Guarded(12)
        scratch = Scratch(buffer.inside, chunk.inside, (np.empty(99, np.uint8),) * 3)
        with Collected(core, [layout], 8, io="pread", scratch=scratch) as collected:
            assert collected.read(range(8)) == refused
            assert buffer.is_intact()
            assert chunk.is_intact()
            expected = small_values(np.frombuffer(values * 4, np.uint8))
            assert refused or np.array_equal(collected.arrays[0], expected)


def enum_in_c(name):
    """Return the names and numbers of an enumeration of the core's source."""
    source = Path(core_module.__file__).with_name("src").joinpath("common.h").read_text()
    (body,) = re.findall(rf"enum {name} {{(.*?)}}", source, re.DOTALL)
    numbers, last = {}, -1
    for entry in re.split(r"\s*,\s*", body.strip()):
        key, _, number = entry.partition(" = ")
        last = numbers[key] = int(number) if number else last + 1
    return numbers


def test_kinds_of_filters_have_the_same_numbers_in_python_and_in_c():
    kinds = enum_in_c("Kind")
    assert kinds == {kind.name: kind.value for kind in CoreKind}


def test_chunks_that_are_kept(core, tmp_path):
    """Each is decoded once; of one that is damaged nothing is kept, and the others are."""
    filters, encoded, mask, values = encoded_chunk(("deflate",), 1, 12, 3)
    memory = exactly(encoded * 4)
    layout = small_dataset("memory", filters, len(encoded), masks=[mask] * 4)
    expected = small_values(np.frombuffer(values * 4, np.uint8))
    scratch = Scratch(np.empty(0, np.uint8), np.empty(12, np.uint8), (np.empty(99, np.uint8),) * 3)
    with Collected(core, [layout], 8, io="map", kept_nbytes=1000, scratch=scratch) as collected:
        collected.lies_in(memory)
        done = scratch.worker(core).struct.done
        layout.chunks.nbytes[2] -= 1
        assert collected.read(range(1, 7)) == 1
        assert collected.left() == {0: [3, 4, 5]}
        assert np.array_equal(collected.arrays[0][:3], expected[1:4])
        assert done.decoded_chunks == 2
        layout.chunks.nbytes[2] += 1
        for _ in range(3):
            assert collected.read(range(1, 7)) == 0
            assert np.array_equal(collected.arrays[0][:6], expected[1:7])
        assert done.decoded_chunks == 4
        collected.collection.tables.forget_chunks()
        assert collected.read(range(1, 7)) == 0
        assert done.decoded_chunks == 8


def test_more_chunks_than_are_claimed_at_once(core):
    """Chunks of a share are claimed and published some at a time."""
    filters, encoded, mask, values = encoded_chunk(("deflate",), 1, 12, 3)
    memory = exactly(encoded)
    count = 400
    layout = made_up(
        "memory", (2 * count, 6), (2, 6), [0] * count, [len(encoded)] * count,
        filters=filters, masks=[mask] * count,
    )  # fmt: skip
    scratch = Scratch(np.empty(0, np.uint8), np.empty(12, np.uint8), (np.empty(99, np.uint8),) * 3)
    with Collected(
        core, [layout], count, io="map", kept_nbytes=1 << 20, scratch=scratch
    ) as collected:
        collected.lies_in(memory)
        for half in (0, 1, 0):
            assert collected.read(range(half, 2 * count, 2)) == 0
            row = np.frombuffer(values, np.uint8).reshape(2, 6)[half]
            assert (collected.arrays[0] == row).all()
        assert scratch.worker(core).struct.done.decoded_chunks == count


# --- rows as delivered ---------------------------------------------------------------------------


class Images:
    """Samples of (points, channels) that become (channels, points), in the core and in NumPy."""

    def __init__(self, core, raw, delivered, scale, offset):
        self.core = core
        self.raw, self.delivered = np.dtype(raw), np.dtype(delivered)
        self.scale, self.offset = scale, offset
        is_scaled = scale is not None or offset is not None
        self.source = transform_source(self.raw, self.delivered, is_scaled)
        assert self.source is not None

    def apply(self, values):
        """Return what the core makes of `values`; nothing beside was written."""
        samples, points, channels = values.shape
        out = Guarded(values.size * self.delivered.itemsize, shift=0)
        raw = values.copy()
        struct = self.core.Transform(samples, points, channels, self.source, self.source > 8)
        factors = [None if f is None else f.copy() for f in (self.scale, self.offset)]
        struct.scale, struct.offset = (None if f is None else address(f) for f in factors)
        done = self.core.transform(ctypes.byref(struct), address(raw), address(out.inside))
        assert done == 1
        assert out.is_intact(), "written beside the rows"
        assert raw.tobytes() == values.tobytes(), "the raw rows were changed"
        return out.inside.view(self.delivered).reshape(samples, channels, points)

    def apply_by_twin(self, values):
        samples, points, channels = values.shape
        factors = (None if f is None else f.reshape(-1, 1) for f in (self.scale, self.offset))
        twin = RowTransform(
            (points, channels), self.raw, (channels, points), self.delivered, (0, 2, 1), *factors
        )
        out = np.empty((samples, channels, points), self.delivered)
        twin.apply(values, out)
        return out


SPECIAL = np.array(
    [
        *(0, 0x80000000, 0x7F800000, 0xFF800000),  # zeros, infinities
        *(0x7FC00000, 0xFFC12345, 0x7F800001, 0x7F812345),  # NaN, quiet and signalling
        *(1, 0x80000001, 0x007FFFFF, 0x00800000),  # denormals, and the smallest beside them
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x3F800001),  # the largest, 1 and the next
    ],
    np.uint32,
).view(np.float32)
CHANNELS = [1, 2, 3, 4, 5, 17]
POINTS = [1, 2, 7, 15, 16, 17, 33, 64, 65, 341, 1023, 1025, 2500]


def raw_values(rng, dtype, shape):
    count = int(np.prod(shape))
    values = rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    if dtype == "f4":
        values[::3] = rng.choice(SPECIAL, values[::3].size)
        values[1::3] = rng.normal(size=values[1::3].size)
    return values.reshape(shape)


@pytest.mark.parametrize(
    "dtype", ["u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "f8", "c8"]
)
@each("channels", CHANNELS)
def test_channels_come_first(core, dtype, channels):
    rng = np.random.default_rng(SEED)
    images = Images(core, dtype, dtype, None, None)
    for points in POINTS:
        for samples in (0, 1, 3):
            values = raw_values(rng, dtype, (samples, points, channels))
            assert images.apply(values).tobytes() == images.apply_by_twin(values).tobytes()


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4"])
@each("channels", CHANNELS)
@each("factors", ["", "scale", "offset", "scale offset"])
def test_channels_come_first_as_floats(core, dtype, channels, factors):
    if dtype == "f4" and not factors:
        return  # that is a copy
    rng = np.random.default_rng(SEED)
    for special in (False, True):
        scale = offset = None
        if "scale" in factors:
            scale = rng.normal(size=channels).astype(np.float32)
        if "offset" in factors:
            offset = rng.normal(size=channels).astype(np.float32)
        for factor in (scale, offset):
            if special and factor is not None:
                factor[...] = rng.choice(SPECIAL, channels)
        images = Images(core, dtype, "f4", scale, offset)
        for points in POINTS:
            values = raw_values(rng, dtype, (2, points, channels))
            found, expected = images.apply(values), images.apply_by_twin(values)
            assert np.array_equal(np.isnan(found), np.isnan(expected))
            is_number = ~np.isnan(expected)
            assert found[is_number].tobytes() == expected[is_number].tobytes()


def test_every_16_bit_number_as_a_float(core):
    for dtype in ("u2", "i2"):
        values = np.arange(1 << 16).astype(dtype).reshape(1, -1, 4)
        images = Images(core, dtype, "f4", np.full(4, 1 / 255, "f4"), np.full(4, -0.1, "f4"))
        assert images.apply(values).tobytes() == images.apply_by_twin(values).tobytes()


def test_which_transforms_the_core_knows():
    assert transform_source(np.dtype("u1"), np.dtype("u1"), False) == 1
    assert transform_source(np.dtype("<f8"), np.dtype("<f8"), False) == 8
    for raw, delivered, is_scaled in (
        (">f4", "<f4", False),
        (">u2", "<f4", True),
        ("u1", "u1", True),
        ("u1", "f8", False),
        ("i4", "f4", False),
        ("c16", "c16", False),
        ("V4", "V4", False),
        ("S8", "S8", False),
    ):
        assert transform_source(np.dtype(raw), np.dtype(delivered), is_scaled) is None


# --- loading -------------------------------------------------------------------------------------


def run_python(code, **environment):
    """Run some code in another process; return its output."""
    given = {k: v for k, v in os.environ.items() if k != "H5ASYNC_CORE"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout.strip(), done.stderr


PRINT_CORE = "from h5async.core.binding import load_core; c = load_core(); print(c and c.path)"


@pytest.mark.slow
def test_the_core_is_switched_off(core, tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.arange(60).reshape(20, 3), chunks=(4, 3), shuffle=True)
    code = f"""
from h5async import AsyncReader
from h5async.core.binding import load_core
assert load_core() is None
with AsyncReader(hdf5_path={str(path)!r}, data_field="data", labels_field=None, batch_size=20,
                 shuffle=False, device="cpu") as reader:
    print(next(iter(reader))["data"].sum())
"""
    code, out, err = run_python(code, H5ASYNC_CORE="0")
    assert (code, out) == (0, str(sum(range(60)))), err


def test_another_build_is_named(core, tmp_path):
    other = tmp_path / "other build.so"
    shutil.copy(core.path, other)
    code, out, err = run_python(PRINT_CORE, H5ASYNC_CORE=str(other))
    assert (code, out) == (0, str(other)), err


@pytest.mark.slow
def test_a_build_that_is_none_is_an_error(core, tmp_path):
    missing, text = tmp_path / "missing.so", tmp_path / "text.so"
    text.write_text("no library\n")
    for path in (missing, text):
        code, out, err = run_python(PRINT_CORE, H5ASYNC_CORE=str(path))
        assert code != 0
        assert not out
        assert "OSError" in err
        assert path.name in err
    with pytest.raises(OSError, match="is not h5async's core"):
        Core(Path(importlib.import_module("imagecodecs._lz4").__file__))


def test_a_build_of_another_version_is_an_error(core, monkeypatch):
    monkeypatch.setattr(structures, "ABI", structures.ABI + 1)
    with pytest.raises(OSError, match="another version; install h5async again"):
        Core(core.path)


def test_without_a_build_it_goes_on_in_python(monkeypatch, tmp_path):
    monkeypatch.delenv("H5ASYNC_CORE", raising=False)
    monkeypatch.setattr(core_module, "__file__", str(tmp_path / "binding.py"))
    find = core_module._core_or_reason.__wrapped__
    assert "is missing" in find()
    (tmp_path / "_core.abi3.so").write_text("cut off while it was built\n")
    assert "cannot be loaded" in find()


def test_the_first_build_that_fits_is_taken(core, monkeypatch, tmp_path):
    monkeypatch.delenv("H5ASYNC_CORE", raising=False)
    monkeypatch.setattr(core_module, "__file__", str(tmp_path / "binding.py"))
    (tmp_path / "_core.abi3.so").write_text("of another machine\n")
    shutil.copy(core.path, tmp_path / "_core.cpython.so")
    found = core_module._core_or_reason.__wrapped__()
    assert found.path == tmp_path / "_core.cpython.so"
    monkeypatch.setenv("H5ASYNC_CORE", "0")
    assert "switched off" in core_module._core_or_reason.__wrapped__()


def test_codecs_that_are_not_there_are_left_to_hdf5(core, monkeypatch):
    monkeypatch.setattr(libraries, "_codec_paths", lambda name: iter(()))
    bare = Core(core.path)
    assert bare.missing == {"aec", "blosc", "bz2", "deflate", "jpeg", "lz4", "zstd"}
    for name, (number, parameters) in ALL.items():
        if name in ("deflate", "zstd", "lz4", "blosc-lz4-1"):
            assert bare.filters((Filter(number, parameters(4), ""),)) is None
    assert bare.filters((Filter(BITSHUFFLE, (0, 4, 4, 0, 2), ""),)) is None
    assert bare.filters((Filter(BITSHUFFLE, (0, 4, 4, 0, 3), ""),)) is None
    assert bare.filters((Filter(BITSHUFFLE, (0, 4, 4, 0), ""),)) is not None
    assert bare.filters((Filter(SHUFFLE, (4,), ""), Filter(LZF, (), ""))) is not None
    # A pipeline that is handed over in spite of that is refused.
    values = np.arange(12, dtype=np.uint8)
    whole = np.frombuffer(imagecodecs.deflate_encode(values.tobytes()), np.uint8)
    chunk = OneChunk(core, (Filter(DEFLATE, (6,), ""),), 12)
    assert chunk.decode(whole) == values.tobytes()
    chunk.scratch = chunk.new_scratch()
    chunk.scratch.worker(bare)
    assert chunk.decode(whole) is None


def test_workers_come_and_go(core):
    """Contexts are made when first needed, and given back."""
    assert MAY_GIVE_UP  # HDF5 stores raw what these do not make smaller
    filters, encoded, mask, values = encoded_chunk(("deflate",), 4, 83, 1)
    for _ in range(200):
        assert OneChunk(core, filters, len(values)).decode(encoded, mask) == values


# --- rows that are transformed as they are read -----------------------------------------------


@pytest.mark.parametrize("io", ["auto", "map", "pread"])
@each("dtype", ["u1", "u2", "<f4", "<f8", ">i2"])
@each("is_scaled", [False, True])
@pytest.mark.parametrize("chunks", [None, (1, 9, 7, 3), (4, 9, 7, 3)])
def test_rows_that_are_transformed_as_they_are_read(tmp_path, core, io, dtype, is_scaled, chunks):
    """Some chunks were never written, and rows lie at odd addresses behind a user block."""
    path = tmp_path / "f.h5"
    rng = np.random.default_rng(0)
    values = rng.integers(0, 200, (41, 9, 7, 3)).astype(dtype)
    with h5py.File(path, "w") as file:
        file["odd"] = np.zeros(3, "u1")
        data = file.create_dataset("data", values.shape, dtype, chunks=chunks, fillvalue=5)
        data[:20] = values[:20]
    stored = truth(path)
    expected = stored.transpose(0, 3, 1, 2)
    options = {"axes": (0, 3, 1, 2)}
    if is_scaled:
        options |= {"scale": (0.5, 0.25, 3.0), "offset": (1.0, -2.0, 0.125), "dtype": "f4"}
        factor, summand = (
            np.array(options[name], "f4").reshape(3, 1, 1) for name in ("scale", "offset")
        )
        expected = expected.astype("f4") * factor + summand
    field = Field("data", **options)
    for num_threads in (0, 2):
        reader = AsyncReader(
            hdf5_path=path,
            fields={"x": field},
            batch_size=7,
            shuffle="full",
            num_threads=num_threads,
            io=io,
            device="cpu",
        )
        with reader:
            for batch in reader:
                assert_same_bits(batch.x, expected[batch.index].astype(batch.x.dtype))


def test_rows_that_are_transformed_from_a_map_are_not_copied_before(tmp_path, core, monkeypatch):
    path = tmp_path / "f.h5"
    values = np.random.default_rng(0).integers(0, 200, (20, 8, 8, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file["data"] = values

    def transform(*_):
        raise AssertionError("rows were read first, and transformed then")

    monkeypatch.setattr(BatchReader, "transform", transform)
    options = {"h_dim": 1, "w_dim": 2, "cha_dim": 3, "labels_field": None, "io": "map"}
    with AsyncReader(hdf5_path=path, batch_size=6, num_threads=0, **options) as reader:
        for batch in reader:
            assert_same_bits(batch.data, values[batch.index].transpose(0, 3, 1, 2))


def test_a_file_that_was_cut_short_before_rows_are_transformed(tmp_path, core):
    path = tmp_path / "f.h5"
    values = np.ones((64, 64, 64, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file["data"] = values
    options = {"h_dim": 1, "w_dim": 2, "cha_dim": 3, "labels_field": None, "num_threads": 0}
    with AsyncReader(hdf5_path=path, batch_size=16, **options) as reader:
        assert reader.get_next_batch().data.all()
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(OSError, match="ends at byte"):
            list(reader)


@pytest.mark.parametrize("kind", ["rows", "chunks", "kept", "pieces", "contiguous"])
def test_a_page_that_cannot_be_had_ends_the_call_and_not_the_process(core, tmp_path, kind):
    path, size = tmp_path / "mapped", 1 << 16
    content = np.random.default_rng(SEED).integers(0, 256, size, np.uint8)
    content.tofile(path)
    shape, chunk, filters, stored, axis = {
        "rows": ((16, 4096), (), (), 0, 0),
        "chunks": ((16, 4096), (4, 4096), (), 16384, 0),
        # A checksum of which nothing is known but how long it is, and that no chunk was given.
        "kept": ((16, 4096), (4, 4096), (Filter(SHUFFLE, (4,), ""),), 16384, 0),
        "pieces": ((4096, 16), (4096, 4), (), 16384, 1),
        "contiguous": ((4096, 16), (), (), 0, 1),
    }[kind]
    offset = range(0, size, stored) if chunk else [0]
    stamp = FileStamp.of(path)
    layout = made_up(
        path, shape, chunk, offset, [stored] * 4, filters=filters, axis=axis, stamp=stamp
    )
    samples = [3, 1, 2, 7, 5, 9, 0, 15]
    with Collected(core, [layout], 8, io="map", kept_nbytes=1 << 20) as collected:
        assert collected.read(samples) == 0
        before = collected.arrays[0].copy()
        collected.collection.tables.forget_chunks()
        os.truncate(path, 0)
        for _ in range(3):
            assert collected.read(samples) > 0
            assert collected.left() == {0: list(range(8))}
        content.tofile(path)
        collected.collection.tables.restamp(str(path), FileStamp.of(path))
        for _ in range(2):
            assert collected.read(samples) == 0
            assert np.array_equal(collected.arrays[0], before)


@pytest.mark.parametrize("io", IO)
def test_a_call_ends_when_the_reader_is_closed(core, row_file, io):
    stop = ctypes.c_int32(1)
    with row_file.collected(io, range(0, 4096, 8), 8) as collected:
        collected.scratch.stop = stop
        collected.plan(range(512))
        for _ in range(2):
            with pytest.raises(ReaderClosedError):
                collected.collection.read(collected.batch, 0, 1, collected.scratch)
            assert collected.raw[0].is_fresh()
        stop.value = 0
        assert collected.read(range(512)) == 0
        assert collected.raw[0].inside.tobytes() == row_file.content[:4096].tobytes()


def test_many_threads_of_many_readers_at_once(tmp_path, core):
    """Readers share the core and the file; under a thread sanitizer (`scripts/check_core`), too."""
    path = tmp_path / "f.h5"
    values = np.random.default_rng(0).integers(0, 50, (240, 24, 20), np.uint16)
    ways = {
        "rows": {},
        "raw": {"chunks": (7, 24, 20)},
        "tiles": {"chunks": (7, 10, 9)},
        "gzip": {"chunks": (7, 24, 20), "compression": "gzip", "shuffle": True},
        "lzf": {"chunks": (7, 24, 20), "compression": "lzf", "fletcher32": True},
        "zstd": {"chunks": (7, 24, 20), **hdf5plugin.Zstd()},
        "lz4": {"chunks": (7, 24, 20), **hdf5plugin.LZ4()},
        "blosc": {"chunks": (7, 24, 20), **hdf5plugin.Blosc()},
        "bitshuffle": {"chunks": (7, 24, 20), **hdf5plugin.Bitshuffle()},
    }
    with h5py.File(path, "w") as file:
        for name, way in ways.items():
            file.create_dataset(name, data=values, **way)
    wrong: list[Any] = []

    def consume(name: str, batch_size: int, shuffle: Any) -> None:
        options = {"batch_size": batch_size, "shuffle": shuffle, "num_threads": 3}
        with AsyncReader(
            hdf5_path=path, data_field=name, labels_field=None, device="cpu", **options
        ) as reader:
            for _ in range(2):
                for batch in reader:
                    if not np.array_equal(batch.data, values[batch.index]):
                        wrong.append((name, batch.index))

    for shuffle in (False, "full", "window"):
        consumers = [
            threading.Thread(target=consume, args=(name, batch_size, shuffle))
            for name, batch_size in zip(ways, itertools.cycle((5, 64, 128, 33)), strict=False)
        ]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join()
    assert not wrong
