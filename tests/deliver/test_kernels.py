"""The CUDA kernels, thread by thread on a CPU, against NumPy, zlib and the host's own decoders.

What a kernel writes to has canaries on both sides. What it only reads is exactly as long as it
says, so that a build with sanitizers tells of a byte that is read beyond, or of a word that is
read where a GPU would not: at no multiple of its width.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import h5py
import hypothesis
import numpy as np
import pytest
from cases import each
from chunkplans import ChunkPlan, plan_chunks
from cuda_on_cpu import load_kernels
from hypothesis import given
from hypothesis import strategies as st
from pythondecoders import bitshuffle_codec

from h5async import Field
from h5async.codec.filters import default_block
from h5async.deliver import gpu
from h5async.index.layout import DatasetLayout
from h5async.index.metadata import read_layouts
from h5async.samples.samplearrays import OPTIONS

PACKAGE = Path(__file__).parents[2] / "h5async"
SOURCE, EXACT = PACKAGE / "deliver" / "kernels.cu", PACKAGE / "samples" / "exact.cu"
GUARD_NBYTES, CANARY = 64, 0xC3
ELEMENTS = [1, 2, 3, 4, 6, 8, 12, 16, 24]
LAUNCHES = [
    ((1, 1), (1,)),
    ((3, 2), (7,)),
    ((1, 5), (64,)),
    ((64, 4), (128,)),
]

launches = st.sampled_from(LAUNCHES)
seeds = st.integers(0, 2**32 - 1)
offsets = st.integers(0, 15)
sizes = st.one_of(st.integers(0, 80), st.integers(0, 5000), st.sampled_from([8192, 16384, 30001]))


def some(share):
    """Return settings for a share of the examples that the profile asks for."""
    return hypothesis.settings(
        max_examples=max(1, int(hypothesis.settings().max_examples * share)),
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(scope="session")
def kernels():
    return load_kernels(SOURCE.read_text())


def random_bytes(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def readable(data, offset=0):
    """Copy bytes to memory that ends with them, and begins `offset` bytes behind an even place."""
    memory = np.empty(offset + data.size, np.uint8)
    memory[offset:] = data
    return memory[offset:]


class Writable:
    """Bytes with canaries on both sides, `offset` bytes behind an even place."""

    def __init__(self, nbytes, offset=0):
        self._whole = np.full(2 * GUARD_NBYTES + offset + nbytes, CANARY, np.uint8)
        self._begin = GUARD_NBYTES + offset
        self.bytes = self._whole[self._begin : self._begin + nbytes]

    def is_untouched_beside(self):
        end = self._begin + self.bytes.size
        return bool((self._whole[: self._begin] == CANARY).all()) and bool(
            (self._whole[end:] == CANARY).all()
        )


def int64s(*values):
    return np.array(values, np.int64)


# --- copy ----------------------------------------------------------------------------------------


@given(
    pieces=st.lists(st.tuples(sizes, offsets, offsets), max_size=6),
    begin=st.tuples(offsets, offsets),
    launch=launches,
    seed=seeds,
)
@some(0.5)
def test_copy_moves_pieces_and_nothing_else(kernels, pieces, begin, launch, seed):
    nbytes = int64s(*(size for size, _, _ in pieces))
    source = np.cumsum(int64s(*(skip for _, skip, _ in pieces)) + nbytes) - nbytes
    target = np.cumsum(int64s(*(skip for _, _, skip in pieces)) + nbytes) - nbytes
    data = random_bytes(seed, int((source + nbytes).max(initial=0)))
    out = Writable(int((target + nbytes).max(initial=0)), begin[1])
    expected = np.full(out.bytes.size, CANARY, np.uint8)
    for a, b, n in zip(source, target, nbytes, strict=True):
        expected[b : b + n] = data[a : a + n]
    order = np.random.default_rng(seed).permutation(len(pieces))
    kernels.get_function("h5async_copy")(
        *launch,
        (
            readable(data, begin[0]),
            out.bytes,
            source[order],
            target[order],
            nbytes[order],
            np.int64(len(pieces)),
        ),
    )
    np.testing.assert_array_equal(out.bytes, expected)
    assert out.is_untouched_beside()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_copy_takes_all_alignments_of_short_pieces(kernels, launch):
    """Every way in which both ends may lie, for sizes around those of one and two words."""
    cases = [(a, b, n) for a in range(16) for b in range(16) for n in (1, 7, 8, 15, 16, 23, 24, 40)]
    data = random_bytes(1, 64)
    out = Writable(64 * len(cases))
    source = int64s(*(a for a, _, _ in cases))
    target = int64s(*(64 * k + b for k, (_, b, _) in enumerate(cases)))
    nbytes = int64s(*(n for _, _, n in cases))
    expected = np.full(out.bytes.size, CANARY, np.uint8)
    for a, b, n in zip(source, target, nbytes, strict=True):
        expected[b : b + n] = data[a : a + n]
    kernels.get_function("h5async_copy")(
        *launch, (data, out.bytes, source, target, nbytes, np.int64(len(cases)))
    )
    np.testing.assert_array_equal(out.bytes, expected)


def test_copy_counts_in_64_bits_over_gigabytes(kernels):
    data = np.zeros(2**32 + 100, np.uint8)  # pages that nobody touches take no memory
    data[2**32 + 3 : 2**32 + 53] = np.arange(50)
    out = Writable(50)
    kernels.get_function("h5async_copy")(
        (2, 1), (32,), (data, out.bytes, int64s(2**32 + 3), int64s(0), int64s(50), np.int64(1))
    )
    np.testing.assert_array_equal(out.bytes, np.arange(50))


# --- shuffle -------------------------------------------------------------------------------------


def shuffled(data, element):
    """Return what HDF5's shuffle makes of bytes."""
    body = data.size // element * element
    return np.concatenate([data[:body].reshape(-1, element).T.ravel(), data[body:]])


def run_on_chunks(kernel, launch, chunks, pitch, offset, *parameters):
    """Run a kernel that turns chunks into others, and return these; all else is untouched."""
    nbytes = chunks[0].size if chunks else 0
    lies = [pitch * k for k in range(len(chunks))]
    size = lies[-1] + nbytes if chunks else 0
    data = np.zeros(size, np.uint8)
    out = Writable(size, offset[1])
    between = np.ones(size, bool)
    for at, chunk in zip(lies, chunks, strict=True):
        data[at : at + nbytes] = chunk
        between[at : at + nbytes] = False
    count = np.int64(len(chunks))
    sizes = np.int64(pitch), np.int64(nbytes), count
    kernel(*launch, (readable(data, offset[0]), out.bytes, *sizes, *parameters))
    assert out.is_untouched_beside()
    assert (out.bytes[between] == CANARY).all()
    return [out.bytes[at : at + nbytes] for at in lies]


@given(
    nbytes=sizes,
    count=st.integers(0, 4),
    gap=st.integers(0, 20),
    element=st.sampled_from(ELEMENTS),
    offset=st.tuples(offsets, offsets),
    launch=launches,
    seed=seeds,
)
@some(0.5)
def test_unshuffle_undoes_shuffle(kernels, nbytes, count, gap, element, offset, launch, seed):
    plain = [random_bytes(seed + k, nbytes) for k in range(count)]
    unshuffle = kernels.get_function("h5async_unshuffle")
    chunks = [shuffled(chunk, element) for chunk in plain]
    found = run_on_chunks(unshuffle, launch, chunks, nbytes + gap, offset, np.int32(element))
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("launch", LAUNCHES)
@each("element", ELEMENTS)
def test_unshuffle_of_aligned_chunks(kernels, element, launch):
    plain = [random_bytes(k, 48 * 40 + element - 1) for k in range(3)]
    unshuffle = kernels.get_function("h5async_unshuffle")
    chunks = [shuffled(chunk, element) for chunk in plain]
    found = run_on_chunks(unshuffle, launch, chunks, 48 * 41, (0, 0), np.int32(element))
    np.testing.assert_array_equal(found, plain)


# --- bitshuffle ----------------------------------------------------------------------------------


def bitunshuffled(data, element, block):
    """Return what the host makes of bytes; those that make no whole element stay."""
    decode = bitshuffle_codec((0, 0, element, block)).decode
    assert decode is not None
    body = data.size // element * element
    out = np.empty(body, np.uint8)
    decoded = decode(np.ascontiguousarray(data[:body]), out, np.empty(0, np.uint8))
    return np.concatenate([decoded, data[body:]])


@given(
    nbytes=sizes,
    count=st.integers(0, 4),
    gap=st.integers(0, 20),
    element=st.sampled_from(ELEMENTS),
    block=st.sampled_from([0, 8, 16, 24, 128, 1024, 4096]),
    offset=st.tuples(offsets, offsets),
    launch=launches,
    seed=seeds,
)
@some(0.5)
def test_bitunshuffle_is_the_hosts(
    kernels, nbytes, count, gap, element, block, offset, launch, seed
):
    chunks = [random_bytes(seed + k, nbytes) for k in range(count)]
    bitunshuffle = kernels.get_function("h5async_bitunshuffle")
    parameters = np.int32(element), np.int64(block or default_block(element))
    found = run_on_chunks(bitunshuffle, launch, chunks, nbytes + gap, offset, *parameters)
    np.testing.assert_array_equal(found, [bitunshuffled(c, element, block) for c in chunks])


@pytest.mark.parametrize("launch", LAUNCHES)
@each("element", ELEMENTS)
@each("block", [0, 40])
def test_bitunshuffle_of_aligned_chunks(kernels, block, element, launch):
    chunks = [random_bytes(k, 8405 * element) for k in range(3)]
    bitunshuffle = kernels.get_function("h5async_bitunshuffle")
    parameters = np.int32(element), np.int64(block or default_block(element))
    found = run_on_chunks(bitunshuffle, launch, chunks, 8416 * element, (0, 0), *parameters)
    np.testing.assert_array_equal(found, [bitunshuffled(c, element, block) for c in chunks])


@pytest.mark.parametrize("element", [65, 128, 1024])
def test_bitunshuffle_of_large_elements_takes_their_default_block(kernels, element):
    chunk = random_bytes(element, 300 * element)
    bitunshuffle = kernels.get_function("h5async_bitunshuffle")
    parameters = np.int32(element), np.int64(default_block(element))
    found = run_on_chunks(bitunshuffle, LAUNCHES[1], [chunk], chunk.size, (0, 0), *parameters)
    np.testing.assert_array_equal(found, [bitunshuffled(chunk, element, 0)])


# --- place ---------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """What `h5async_place` is told of a dataset; shapes are of a chunk and of a row."""

    chunk_shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    axis: int
    itemsize: int

    @property
    def rest(self):
        return [a for a in range(len(self.chunk_shape)) if a != self.axis]

    @property
    def chunk_strides(self):
        strides = np.cumprod((self.itemsize, *self.chunk_shape[:0:-1]), dtype=np.int64)[::-1]
        return strides[self.rest], int(strides[self.axis])

    @property
    def row_strides(self):
        strides = np.cumprod((self.itemsize, *self.row_shape[::-1]), dtype=np.int64)[::-1]
        return strides[1:].copy(), int(strides[0])

    @property
    def corners(self):
        """(m, rank) corners of the pieces of a row, and their extents."""
        shape = np.array(self.chunk_shape, np.int64)[self.rest]
        rows = np.array(self.row_shape, np.int64)
        cells = np.indices(-(-rows // shape)).reshape(rows.size, -1).T if rows.size else [()]
        begin = np.array(cells, np.int64).reshape(len(cells), rows.size) * shape
        return begin, np.minimum(shape, rows - begin)

    @property
    def chunk_nbytes(self):
        return int(np.prod(self.chunk_shape, dtype=np.int64)) * self.itemsize


class Task(NamedTuple):
    item: int
    cross: int
    local: int
    position: int
    length: int


def run_place(kernels, launch, geometry, tasks, chunks, pitch, rows, offset=0):
    """Run the kernel on chunks (bytes, `pitch` apart) and rows (bytes)."""
    chunk_strides, sample_stride = geometry.chunk_strides
    row_strides, row_nbytes = geometry.row_strides
    begin, extents = geometry.corners
    columns = [int64s(*column) for column in zip(*tasks, strict=True)] or [int64s()] * 5
    kernels.get_function("h5async_place")(
        *launch,
        (
            readable(chunks, offset),
            rows,
            *columns,
            np.int64(len(tasks)),
            np.ascontiguousarray(extents),
            begin @ row_strides,
            np.ascontiguousarray(chunk_strides),
            row_strides,
            np.int32(len(geometry.rest)),
            np.int64(pitch),
            np.int64(sample_stride),
            np.int64(row_nbytes),
            np.int32(geometry.itemsize),
        ),
    )


def placed(geometry, tasks, chunks, pitch, rows):
    """Do in NumPy, with bytes as one more dimension, what the kernel has to do."""
    begin, extents = geometry.corners
    rows = rows.reshape(-1, *geometry.row_shape, geometry.itemsize)
    for item, cross, local, position, length in tasks:
        chunk = chunks[item * pitch : item * pitch + geometry.chunk_nbytes]
        chunk = chunk.reshape(*geometry.chunk_shape, geometry.itemsize)
        samples = np.moveaxis(chunk, geometry.axis, 0)[local : local + length]
        piece = [slice(b, b + e) for b, e in zip(begin[cross], extents[cross], strict=True)]
        inside = [slice(0, e) for e in extents[cross]]
        rows[(slice(position, position + length), *piece)] = samples[(slice(None), *inside)]


@st.composite
def geometries(draw):
    rank = draw(st.integers(0, 3))
    axis = draw(st.integers(0, rank))
    chunk_shape = draw(st.lists(st.integers(1, 7), min_size=rank + 1, max_size=rank + 1))
    rest = [n for a, n in enumerate(chunk_shape) if a != axis]
    row_shape = tuple(
        n if draw(st.booleans()) else draw(st.integers(1, 15)) for n in rest
    )  # often of the chunk's extent, so that rows are whole
    return Geometry(tuple(chunk_shape), row_shape, axis, draw(st.sampled_from(ELEMENTS)))


@given(
    geometry=geometries(),
    groups=st.integers(1, 3),
    gap=st.sampled_from([0, 0, 1, 4, 16]),
    offset=st.tuples(offsets, offsets) | st.just((0, 0)),
    launch=launches,
    seed=seeds,
)
@some(1)
def test_place_is_numpys_slicing(kernels, geometry, groups, gap, offset, launch, seed):
    random = np.random.default_rng(seed)
    pitch = geometry.chunk_nbytes + gap
    num_cross = len(geometry.corners[0])
    chunk_samples = geometry.chunk_shape[geometry.axis]
    tasks, position = [], 0
    for group in range(groups):
        for _ in range(random.integers(0, 4)):
            local = int(random.integers(chunk_samples))
            length = int(random.integers(0, chunk_samples - local + 1))
            tasks += [
                Task(group * num_cross + cross, cross, local, position, length)
                for cross in range(num_cross)
                if random.random() < 0.9
            ]
            position += length + int(random.integers(2))
    random.shuffle(tasks)
    nbytes = max((task.item for task in tasks), default=-1) * pitch + geometry.chunk_nbytes
    chunks = random_bytes(seed, max(0, nbytes))
    rows = Writable(position * geometry.row_strides[1], offset[1])
    expected = np.full(rows.bytes.size, CANARY, np.uint8)
    placed(geometry, tasks, chunks, pitch, expected)
    run_place(kernels, launch, geometry, tasks, chunks, pitch, rows.bytes, offset[0])
    np.testing.assert_array_equal(rows.bytes, expected)
    assert rows.is_untouched_beside()


def test_place_of_pieces_that_are_no_multiple_of_what_all_else_is(kernels):
    geometry = Geometry((5, 3, 4), (4, 7), 0, 1)
    begin, extents = geometry.corners
    assert (begin[3].tolist(), extents[3].tolist()) == ([3, 4], [1, 3])
    offset = -(3 * 7 + 4) % 4  # of the rows, so that the piece begins at a multiple of 4
    tasks = [Task(0, 3, 1, 0, 3)]
    chunks = random_bytes(6, geometry.chunk_nbytes)
    rows = Writable(3 * 28, offset)
    expected = np.full(rows.bytes.size, CANARY, np.uint8)
    placed(geometry, tasks, chunks, 0, expected)
    run_place(kernels, LAUNCHES[1], geometry, tasks, chunks, 0, rows.bytes)
    np.testing.assert_array_equal(rows.bytes, expected)


def test_place_leaves_out_empty_tasks_and_pieces(kernels):
    geometry = Geometry((4, 3), (3,), 0, 4)
    rows = Writable(4 * 12)
    tasks = [Task(0, 0, 0, 0, 0)]
    run_place(kernels, LAUNCHES[1], geometry, tasks, random_bytes(1, 48), 48, rows.bytes)
    chunk_strides, sample_stride = geometry.chunk_strides
    arguments = (random_bytes(1, 48), rows.bytes, *[int64s(0)] * 4, int64s(4), np.int64(1))
    arguments += (int64s(0), int64s(0), chunk_strides, int64s(4), np.int32(1), np.int64(48))
    arguments += (np.int64(sample_stride), np.int64(12), np.int32(4))
    kernels.get_function("h5async_place")(*LAUNCHES[1], arguments)
    assert (rows.bytes == CANARY).all()


def test_place_counts_in_64_bits_over_gigabytes(kernels):
    geometry = Geometry((2, 5), (5,), 0, 4)
    chunks = np.zeros(2**32 + 40, np.uint8)  # pages that nobody touches take no memory
    chunks[2**32 :] = np.arange(40)
    rows = Writable(60)
    chunk_strides, sample_stride = geometry.chunk_strides
    row_strides, row_nbytes = geometry.row_strides
    task = (int64s(2), int64s(0), int64s(0), int64s(1), int64s(2), np.int64(1))
    tables = (int64s(5), int64s(0), chunk_strides, row_strides, np.int32(1), np.int64(2**31))
    tables += (np.int64(sample_stride), np.int64(row_nbytes), np.int32(4))
    place = kernels.get_function("h5async_place")
    place(*LAUNCHES[1], (chunks, rows.bytes, *task, *tables))
    np.testing.assert_array_equal(rows.bytes, [*[CANARY] * 20, *range(40)])


# Shape, chunks, sample dimension: what is laid out and planned the way a reader does it.
DATASETS = {
    "rows": ((50, 7, 5), (8, 7, 5), 0),
    "one-sample-a-chunk": ((20, 9, 4), (1, 9, 4), 0),
    "split-rows": ((30, 9, 11), (4, 4, 11), 0),
    "edges-everywhere": ((23, 9, 11), (5, 4, 3), 0),
    "samples-last": ((6, 9, 40), (6, 4, 16), 2),
    "samples-between": ((5, 33, 10), (2, 8, 4), 1),
    "scalars": ((100,), (16,), 0),
}


def tasks_of(plan: ChunkPlan):
    return [
        Task(item, int(plan.cross[item]), *map(int, run))
        for item, group in enumerate(plan.group)
        for run in zip(
            *(
                column[plan.run_start[group] : plan.run_start[group + 1]]
                for column in (plan.run_local, plan.run_position, plan.run_length)
            ),
            strict=True,
        )
    ]


def read_chunks(dataset, layout: DatasetLayout, plan: ChunkPlan):
    """Return the chunks of a plan, one after the other, as h5py decodes them."""
    chunks = np.zeros((plan.num_items, *layout.chunk_shape), layout.dtype)
    for chunk, place in zip(chunks, plan.entry, strict=True):
        cell = np.unravel_index(place, layout.grid)
        begin = [int(i) * n for i, n in zip(cell, layout.chunk_shape, strict=True)]
        ends = [b + n for b, n in zip(begin, layout.chunk_shape, strict=True)]
        values = dataset[tuple(slice(b, e) for b, e in zip(begin, ends, strict=True))]
        chunk[tuple(slice(0, n) for n in values.shape)] = values
    return chunks.ravel().view(np.uint8)


@each("launch", LAUNCHES)
@each("dtype", ["u1", "<f2", "<i4", "<c16"])
@pytest.mark.parametrize(("shape", "chunks", "axis"), DATASETS.values(), ids=DATASETS)
def test_place_executes_the_readers_plans(kernels, tmp_path, shape, chunks, axis, dtype, launch):
    values = random_bytes(3, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype)
    values = np.nan_to_num(values).reshape(shape)
    path = tmp_path / "plans.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=chunks, compression="gzip", shuffle=True)
    layout = read_layouts(path, {"data": Field("data", axis)})["data"]
    sample = np.random.default_rng(4).permutation(shape[axis])[: shape[axis] // 2]
    sample = np.concatenate([sample, np.arange(shape[axis] // 2)])
    plan = plan_chunks(layout, sample.astype(np.int64), np.arange(sample.size))
    with h5py.File(path) as file:
        data = read_chunks(file["data"], layout, plan)
    geometry = Geometry(layout.chunk_shape, layout.row_shape, axis, layout.dtype.itemsize)
    rows = Writable(sample.size * layout.row_nbytes)
    run_place(kernels, launch, geometry, tasks_of(plan), data, layout.chunk_nbytes, rows.bytes)
    expected = np.moveaxis(values, axis, 0)[sample]
    np.testing.assert_array_equal(rows.bytes, np.ascontiguousarray(expected).ravel().view(np.uint8))
    assert rows.is_untouched_beside()


# --- Adler-32 ------------------------------------------------------------------------------------


def sums_of(kernels, launch, data, pitch, nbytes, count):
    sums = Writable(16 * count)
    sums.bytes[:] = 0
    numbers = np.int64(pitch), np.int64(nbytes), np.int64(count)
    kernels.get_function("h5async_adler32")(*launch, (data, *numbers, sums.bytes.view(np.uint64)))
    assert sums.is_untouched_beside()
    return sums.bytes.view(np.uint64)


def adler_of(sums, nbytes):
    return [
        (nbytes + int(b)) % 65521 << 16 | (1 + int(a)) % 65521
        for a, b in zip(sums[::2], sums[1::2], strict=True)
    ]


@given(
    nbytes=sizes,
    count=st.integers(0, 4),
    gap=st.integers(0, 20),
    offset=offsets,
    launch=launches,
    seed=seeds,
    is_white=st.booleans(),
)
@some(0.5)
def test_adler32_is_zlibs(kernels, nbytes, count, gap, offset, launch, seed, is_white):
    pitch = nbytes + gap
    size = (count - 1) * pitch + nbytes if count else 0
    data = np.full(size, 255, np.uint8) if is_white else random_bytes(seed, size)
    due = [zlib.adler32(data[k * pitch : k * pitch + nbytes]) for k in range(count)]
    sums = sums_of(kernels, launch, readable(data, offset), pitch, nbytes, count)
    assert adler_of(sums, nbytes) == due


@pytest.mark.slow
def test_adler32_does_not_overflow_over_gigabytes(kernels):
    """One thread, with more to sum up than fits 64 bits."""
    data = np.zeros(1_500_000_003, np.uint8)  # pages that nobody writes to take no memory
    data[:60_000_000] = 255
    sums = sums_of(kernels, LAUNCHES[0], data, 0, data.size, 1)
    assert adler_of(sums, data.size) == [zlib.adler32(data)]


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", LAUNCHES)
@each("wrong", [None, "status", "actual", "adler"])
@each("at", [0, 4, 9])
@each("has_adler", [False, True])
def test_verify_finds_what_is_wrong(kernels, launch, wrong, at, has_adler):
    nbytes, count = 3001, 10
    data = random_bytes(7, nbytes * count)
    sums = sums_of(kernels, launch, data, nbytes, nbytes, count)
    status = np.zeros(count, np.int32)
    actual = np.arange(count).astype(np.uint64) + 2**33
    adler = np.array([zlib.adler32(c) for c in data.reshape(count, nbytes)], np.uint32)
    due = actual.copy()
    match wrong:
        case "status":
            status[at] = -3
        case "actual":
            actual[at] += 2**32  # as good as due in 32 bits
        case "adler":
            adler[at] ^= 1 << 31
    bad = Writable(4)
    bad.bytes[:] = 0
    chunks = sums, adler if has_adler else None, np.int64(count)
    kernels.get_function("h5async_verify")(
        *launch,
        (status, actual, due, np.int64(count), *chunks, np.int64(nbytes), bad.bytes.view(np.int32)),
    )
    is_bad = wrong is not None and (wrong != "adler" or has_adler)
    assert bad.bytes.view(np.int32).tolist() == [is_bad]
    assert bad.is_untouched_beside()


def test_verify_leaves_an_older_finding(kernels):
    bad = np.ones(1, np.int32)
    nothing = (None, None, None, np.int64(0), None, None, np.int64(0), np.int64(0))
    kernels.get_function("h5async_verify")((1, 1), (32,), (*nothing, bad))
    assert bad.tolist() == [1]


# --- the harness ---------------------------------------------------------------------------------

COUNTING = """
extern "C" __global__ void __launch_bounds__(64) count_threads(
    unsigned long long *number, const int *ones, int width, unsigned int *last)
{
    unsigned int x = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(number + blockIdx.y * gridDim.x * blockDim.x + x, (unsigned long long)*ones * width);
    *last = x;
}
"""


@each("seed", range(4))
@pytest.mark.parametrize(("grid", "block"), LAUNCHES)
def test_the_harness_runs_every_thread_once(grid, block, seed):
    count = grid[0] * grid[1] * block[0]
    numbers = np.zeros(count, np.uint64)
    kernel = load_kernels(COUNTING, seed).get_function("count_threads")
    for launch in range(1, 8):
        kernel(grid, block, (numbers, np.ones(1, np.int32), np.int32(3), np.zeros(1, np.uint32)))
        assert (numbers == 3 * launch).all()


def test_the_harness_runs_threads_in_many_orders():
    kernel = load_kernels(COUNTING).get_function("count_threads")
    numbers, last = np.zeros(40, np.uint64), np.zeros(1, np.uint32)
    seen = set()
    for _ in range(30):
        kernel((4,), (10, 1, 1), (numbers, np.ones(1, np.int32), np.int32(1), last))
        seen.add(int(last[0]))
    assert len(seen) > 4
    assert {0, 39} <= seen


@pytest.mark.parametrize(
    "change",
    [
        {1: np.ones(1, np.int64)},  # elements too wide
        {1: 1.5},
        {2: np.int64(1)},  # a GPU would read half of it
        {2: 1},  # CuPy passes 64 bits
        {2: np.ones(1, np.int32)},
        {2: True},
    ],
    ids=str,
)
def test_the_harness_refuses_arguments_of_another_type(change):
    arguments = dict(enumerate((np.zeros(1, np.uint64), np.ones(1, np.int32), np.int32(1), None)))
    kernel = load_kernels(COUNTING).get_function("count_threads")
    with pytest.raises(TypeError, match="due"):
        kernel((1,), (1,), tuple({**arguments, **change}.values()))
    with pytest.raises(TypeError, match="4 arguments"):
        kernel((1,), (1,), ())


def test_the_harness_refuses_what_a_gpu_cannot_do():
    kernel = load_kernels(COUNTING).get_function("count_threads")
    at_an_odd_place = np.zeros(16, np.uint8)[1:9]
    arguments = (at_an_odd_place, np.ones(1, np.int32), np.int32(1), np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="multiple"):
        kernel((1,), (1,), arguments)
    for grid, block in [((0,), (1,)), ((1, 65536), (1,)), ((1,), (1025,)), ((1,), (1, 2))]:
        with pytest.raises(ValueError, match="launched"):
            kernel(grid, block, arguments)
    with pytest.raises(ValueError, match="shared"):
        kernel((1,), (1,), arguments, shared_mem=16)
    with pytest.raises(KeyError):
        load_kernels(COUNTING).get_function("another")


def test_the_harness_takes_addresses_as_cupy_has_them():
    class OnDevice:
        def __init__(self, array):
            self.data = type("MemoryPointer", (), {"ptr": array.ctypes.data})

    numbers, last = np.zeros(4, np.uint64), np.zeros(1, np.uint32)
    ones = np.ones(1, np.int32)
    kernel = load_kernels(COUNTING).get_function("count_threads")
    kernel((2,), (2,), (OnDevice(numbers), ones.ctypes.data, np.int32(5), last))
    assert numbers.tolist() == [5] * 4


# --- other builds --------------------------------------------------------------------------------


def missing(what):
    """Skip, or with H5ASYNC_REQUIRE_EXTRAS=1 fail."""
    if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
        pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but this test needs {what}", pytrace=False)
    pytest.skip(f"needs {what}")


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    """The tests above once more, in another process, with each read and write checked."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    named = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    library = named.stdout.strip()
    if not os.path.isabs(library):  # the bare name where it is not installed
        pytest.skip("needs g++ with libasan")
    options = f"detect_leaks=0:quarantine_size_mb=16:log_path={tmp_path}/report"
    # Python itself is not built with the sanitizer, so its run-time library is loaded first.
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={tmp_path}/report",
        "H5ASYNC_CUDA_ON_CPU_FLAGS": "-g -fsanitize=address,undefined -fno-sanitize-recover=all",
    }
    left_out = (
        "not sanitizers and not nvrtc and not harness and not gigabytes and not readers_plans"
    )
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_command, "-k", left_out, __file__],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    reports = "\n".join(path.read_text() for path in tmp_path.glob("report*"))
    assert done.returncode == 0, done.stdout + done.stderr + reports
    assert not reports


@functools.cache
def nvrtc_libraries():
    """Return NVRTC as pip installs it: nvidia/cuda_nvrtc/lib of CUDA 12, nvidia/cu13/lib of 13."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    found = [
        library for place in places or () for library in Path(place).glob("*/lib/libnvrtc.so*")
    ]
    return sorted(found)


def compile_with_nvrtc(path, source, architecture, *flags):
    """Return NVRTC's result, 0 if it compiled, what it had to say, and the PTX."""
    for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # it does not look beside itself
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(path))
    program, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    by_name = (ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    assert nvrtc.nvrtcCreateProgram(*by_name) == 0
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", *flags]
        array = (ctypes.c_char_p * len(options))(*options)
        result = nvrtc.nvrtcCompileProgram(program, len(options), array)
        assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(nbytes)) == 0
        log = ctypes.create_string_buffer(nbytes.value)
        assert nvrtc.nvrtcGetProgramLog(program, log) == 0
        assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(nbytes)) == 0
        ptx = ctypes.create_string_buffer(nbytes.value)
        assert nvrtc.nvrtcGetPTX(program, ptx) == 0
        return result, log.value.decode().strip(), ptx.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_nvrtc_compiles_the_kernels(architecture):
    if not nvrtc_libraries():
        missing("nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12")
    for library in nvrtc_libraries():
        assert compile_with_nvrtc(library, SOURCE.read_text(), architecture)[:2] == (0, "")


@pytest.mark.parametrize("delivered", ["float", "double"])
@pytest.mark.parametrize("stored", ["unsigned char", "long long", "float", "double"])
def test_nvrtc_keeps_the_smallest_numbers_and_rounds_twice(stored, delivered):
    """CuPy compiles all for -ftz=true; and a multiplication joined to an addition rounds once."""
    if not nvrtc_libraries():
        missing("nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12")
    source = f"""typedef {stored} S;
    typedef {delivered} T;
    {EXACT.read_text()}
    extern "C" __global__ void scale(const S *stored, T scale, T offset, T *delivered)
    {{
        int i = threadIdx.x;
        delivered[i] = {gpu._scaled("h5async_to<T>(stored[i])", "scale", "offset")};
    }}"""
    flags = (*(option.encode() for option in OPTIONS), b"-ftz=true")
    for library in nvrtc_libraries():
        result, log, ptx = compile_with_nvrtc(library, source, "compute_90", *flags)
        assert result == 0, log  # it may tell of functions that these types do not need
        width = 32 if delivered == "float" else 64
        assert f"mul.rn.f{width}" in ptx or f"mul.f{width}" in ptx
        assert f"add.rn.f{width}" in ptx or f"add.f{width}" in ptx
        assert ".ftz" not in ptx
        assert "fma" not in ptx


def test_nvrtc_tells_of_an_error():
    if not nvrtc_libraries():
        missing("nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12")
    result, log, _ = compile_with_nvrtc(nvrtc_libraries()[0], "int f() { return g(); }", "sm_90")
    assert result != 0
    assert "g" in log
