"""Encoded chunks, read and cut into blocks, against what the host makes of them.

A stand-in for a GPU decodes each block by itself, and puts it where the core says. All that the
core writes to has canaries on both sides, and what it reads is exactly as long as it says.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import zlib
from random import Random

import h5py
import imagecodecs
import numpy as np
import pytest
from cases import each
from collecting import FRESH, Guarded
from conftest import require_extra
from hdf5_encoder import HDF5Encoder, contents
from hypothesis import given
from hypothesis import strategies as st
from pythondecoders import FilterPipeline
from test_core import HUGE, RowFile, damaged, exactly, int64s, some

from h5async import Field
from h5async.codec.filters import (
    BITSHUFFLE,
    BLOSC,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    CoreKind,
    Filter,
)
from h5async.core.binding import IO_MODES, address
from h5async.deliver.decodeplan import FrameFormat, Unshuffle, frame_format, unshuffles
from h5async.index.metadata import read_layouts
from h5async.io.source import FileStamp
from h5async.read.coretables import Scratch

require_extra("hdf5plugin")

SEED = 20160704
PIPELINES = [
    ("shuffle",),
    ("fletcher32",),
    ("bitshuffle",),
    ("shuffle", "fletcher32"),
    ("deflate",),
    ("shuffle", "deflate"),
    ("deflate", "fletcher32"),
    ("shuffle", "deflate", "fletcher32"),
    ("zstd",),
    ("shuffle", "zstd", "fletcher32"),
    ("lz4",),
    ("lz4-blocks-of-256",),
    ("shuffle", "lz4-blocks-of-256"),
    ("lz4", "fletcher32"),
    ("bitshuffle-lz4",),
    ("bitshuffle-lz4-blocks-of-32",),
    ("bitshuffle-lz4-blocks-of-32", "fletcher32"),
    ("bitshuffle-zstd",),
    ("bitshuffle-zstd-blocks-of-64",),
]
SHORT = [pipeline for pipeline in PIPELINES if len(pipeline) == 1 or pipeline[-1] == "fletcher32"]


def ids(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


class Pieces:
    """A source, and the core's way to read ranges of it as they are stored.

    `memory`: that is the source, and not the file at `path`.
    """

    def __init__(self, core, path, memory=None):
        self.core, self.path, self.memory = core, path, memory
        self.stamp = None  # as indexed; None: as it is when it is read
        empty = np.empty(0, np.uint8)
        self.worker = core.new_worker(empty, empty, (empty,) * 3)
        self.done = 0

    def read(self, io, offset, nbytes, target=None, base_nbytes=None):
        """Return the memory, with nothing beside it written; `done`: how many were read."""
        offset, nbytes = int64s(*offset), int64s(*nbytes)
        if target is None:
            target = np.cumsum([0, *nbytes[:-1]])
        target = int64s(*target)
        base = Guarded(int(nbytes.sum()) if base_nbytes is None else base_nbytes)
        name = ctypes.create_string_buffer(os.fsencode(self.path))
        table = (self.core.Source * 1)(self.core.Source(ctypes.addressof(name), fd=-1))
        for member, value in (self.stamp or FileStamp.of(self.path))._asdict().items():
            setattr(table[0], member, value)
        table[0].may_map = io != "pread"
        if self.memory is not None:
            table[0].path = None
            table[0].map, table[0].map_nbytes = address(self.memory), self.memory.size
        # Where maps are kept without descriptors, as of many files.
        gives_back = io == "auto"
        opened = self.core.Sources(ctypes.addressof(table), 1, 1, 1, IO_MODES[io], gives_back)
        sources = ctypes.byref(opened)
        self.core.open_sources(sources)
        struct = self.worker.struct
        before = struct.done.read_nbytes, struct.done.read_ns
        self.done = self.core.read_ranges(
            sources,
            ctypes.byref(self.worker.struct),
            *map(address, (offset, nbytes, target, base.inside)),
            base.inside.size,
            offset.size,
            0,
        )
        self.core.close_sources(sources)
        assert base.is_intact(), "written beside the memory"
        assert struct.done.read_nbytes - before[0] == nbytes[: self.done].sum()
        assert struct.done.read_ns >= before[1]
        return base.inside


class Cut:
    """Encoded chunks in memory of exactly their size, one behind the other, cut by the core."""

    def __init__(
        self, core, form, due, chunks, *, pitch=None, room=(500, 500), base=None, **changes
    ):
        sizes = [len(chunk) for chunk in chunks]
        self.form, self.due, self.count = form, due, len(chunks)
        self.pitch = due if pitch is None else pitch
        self.base = exactly(b"".join(map(bytes, chunks)) if base is None else base)
        self.position = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self.nbytes = int64s(*sizes)
        before = self.base.tobytes()
        arrays = {
            **dict.fromkeys(("source", "source_nbytes", "target", "target_nbytes"), 8 * room[0]),
            **dict.fromkeys(("copy_source", "copy_target", "copy_nbytes"), 8 * room[1]),
            "adler": 4 * self.count,
        }
        memory = {name: Guarded(nbytes, shift=0) for name, nbytes in arrays.items()}
        struct = core.Frames(
            base=address(self.base),
            base_nbytes=self.base.size,
            count=self.count,
            kind=form.kind,
            has_checksum=form.has_checksum,
            element=form.element,
            block_nbytes=form.block_nbytes,
            expected_nbytes=due,
            pitch=self.pitch,
            max_tasks=room[0],
            max_copies=room[1],
            **{name: address(guarded.inside) for name, guarded in memory.items()},
        )
        for name, value in changes.items():
            if name in ("position", "nbytes"):
                getattr(self, name)[value[0]] = value[1]
            else:
                setattr(struct, name, value)
        struct.position, struct.nbytes = address(self.position), address(self.nbytes)
        self.done = core.cut_frames(ctypes.byref(struct))
        assert self.base.tobytes() == before, "the encoded chunks were changed"
        for name, guarded in memory.items():
            assert guarded.is_intact(), f"written beside {name}"
        assert 0 <= self.done <= max(0, self.count)
        assert 0 <= struct.num_tasks <= max(0, room[0])
        assert 0 <= struct.num_copies <= max(0, room[1])

        def numbers(name, count, dtype=np.int64):
            return memory[name].inside.view(dtype)[:count].tolist()

        self.tasks = list(
            zip(
                numbers("source", struct.num_tasks),
                numbers("source_nbytes", struct.num_tasks, np.uint64),
                numbers("target", struct.num_tasks),
                numbers("target_nbytes", struct.num_tasks, np.uint64),
                strict=True,
            )
        )
        self.copies = list(
            zip(
                *(numbers(f"copy_{n}", struct.num_copies) for n in ("source", "target", "nbytes")),
                strict=True,
            )
        )
        self.adler = numbers("adler", self.done, np.uint32)
        self.assert_in_bounds()

    def assert_in_bounds(self):
        """Assert that each byte due is written by one task or copy, and that they stay inside."""
        spans = [*self.tasks, *((source, n, target, n) for source, target, n in self.copies)]
        for source, nbytes, _, due in spans:
            assert 0 <= source < source + nbytes <= self.base.size
            assert due > 0
        spans.sort(key=lambda span: span[2])
        goes_to = [(target, target + due) for _, _, target, due in spans]
        for chunk in range(self.done):
            at = chunk * self.pitch
            while goes_to and goes_to[0][0] < chunk * self.pitch + self.due:
                begin, end = goes_to.pop(0)
                assert begin == at
                at = end
            assert at == chunk * self.pitch + self.due
        assert not goes_to

    def decoded(self):
        """Return chunks as the GPU would decode them, or None where a block is damaged."""
        out = np.zeros((self.count, self.pitch), np.uint8)
        flat, is_deflate = out.reshape(-1), self.form.kind == CoreKind.DEFLATE
        is_zstd = self.form.kind in (CoreKind.ZSTD, CoreKind.BITSHUFFLE_ZSTD)
        for source, nbytes, target, due in self.tasks:
            data, room = self.base[source : source + nbytes], flat[target : target + due]
            if is_deflate:
                block = inflated(data, due)
                if block is not None and zlib.adler32(block) != self.adler[target // self.pitch]:
                    block = None
            else:
                block = decoded_block(data, due, is_zstd)
            if block is None:
                return None
            room[:] = block
        for source, target, nbytes in self.copies:
            flat[target : target + nbytes] = self.base[source : source + nbytes]
        return out[: self.done, : self.due]


def inflated(data, due):
    """Return what a raw deflate stream gives; it may end before its bytes do."""
    stream = zlib.decompressobj(-15)
    try:
        block = stream.decompress(data, due + 1)
    except zlib.error:
        return None
    return np.frombuffer(block, np.uint8) if stream.eof and len(block) == due else None


def decoded_block(data, due, is_zstd):
    room = np.empty(due, np.uint8)
    try:
        if is_zstd:
            count = len(imagecodecs.zstd_decode(data, out=room))
        else:
            count = len(imagecodecs.lz4_decode(data, header=False, out=room))
    except (imagecodecs.ZstdError, imagecodecs.Lz4Error):
        return None
    return room if count == due else None


def undone(filters, nbytes, encoded):
    """Return what the host makes of a chunk, or None."""
    pipeline, out = FilterPipeline(filters, nbytes), np.empty(nbytes, np.uint8)
    between = tuple(np.empty(pipeline.between_nbytes, np.uint8) for _ in range(3))
    scratch = Scratch(np.empty(0, np.uint8), np.empty(0, np.uint8), between)
    try:
        pipeline.decode(exactly(encoded), 0, out, scratch)
    except (ValueError, RuntimeError):
        return None
    return out.tobytes()


def orders(filters):
    """Return the filters that are left to undo after the blocks were decoded."""
    found = []
    for entry in filters:
        if entry.number == BITSHUFFLE:
            _, _, element, block = entry.parameters[:4]
            found.append(Filter(BITSHUFFLE, (0, 4, element, block), ""))
        elif entry.number == SHUFFLE:
            found.append(entry)
    return tuple(found)


def as_delivered(filters, chunk):
    return undone(orders(filters), chunk.size, chunk.tobytes())


@functools.cache
def encoded_chunks(pipeline, element, count):
    """Return the filters, and chunks of all kinds: their stored bytes and their values."""
    encoder = HDF5Encoder(pipeline, element)
    chunks = []
    for values in contents(element, count):
        encoded, mask = encoder.encode(values)
        assert mask == 0
        chunks.append((encoded.tobytes(), values.tobytes()))
    return encoder.filters, chunks


# --- chunks as HDF5 writes them ------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", PIPELINES, ids=ids)
def test_chunks_that_hdf5_encoded(core, pipeline):
    """One element; no multiple of 8 elements; noise; several blocks."""
    for element, count in itertools.product((1, 2, 3, 4, 8), (1, 7, 8, 19, 83, 3333)):
        filters, chunks = encoded_chunks(pipeline, element, count)
        form, due = frame_format(filters), element * count
        most = None if form.kind == CoreKind.LZ4 else form.usual_tasks(due)
        cut = Cut(core, form, due, [encoded for encoded, _ in chunks], pitch=due + due % 5)
        assert cut.done == len(chunks)
        assert most is None or len(cut.tasks) <= most * len(chunks)
        assert most is None or len(cut.copies) <= len(chunks)
        for chunk, (_, values) in zip(cut.decoded(), chunks, strict=True):
            assert as_delivered(filters, chunk) == values


def test_blocks_are_cut_as_they_are_meant(core):
    """What the battery above has to hold, for its name's sake: raw blocks, several, leftovers."""
    noise = encoded_chunks(("lz4-blocks-of-256",), 4, 83)
    stored = Cut(core, frame_format(noise[0]), 332, [noise[1][3][0]])
    assert (stored.tasks, [n for _, _, n in stored.copies]) == ([], [256, 76])
    zeros = Cut(core, frame_format(noise[0]), 332, [noise[1][0][0]])
    assert [due for *_, due in zeros.tasks] == [256, 76]
    assert not zeros.copies
    filters, chunks = encoded_chunks(("bitshuffle-lz4-blocks-of-32",), 4, 83)
    cut = Cut(core, frame_format(filters), 332, [encoded for encoded, _ in chunks])
    assert [due for *_, due in cut.tasks] == [128, 128, 64] * 4
    assert [n for *_, n in cut.copies] == [12] * 4
    filters, chunks = encoded_chunks(("bitshuffle-zstd",), 2, 7)
    cut = Cut(core, frame_format(filters), 14, [encoded for encoded, _ in chunks])
    assert (cut.tasks, [n for *_, n in cut.copies]) == ([], [14] * 4)


@each("io", ["auto", "pread", "map"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=ids)
def test_chunks_of_a_file(core, tmp_path, io, pipeline):
    path, element, count, num_chunks = tmp_path / "some.h5", 4, 5003, 5
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 50, num_chunks * count, np.int32)
    values[2 * count :] *= rng.integers(0, 2**30, 3 * count, np.int32)
    with h5py.File(path, "w") as file:
        plist = HDF5Encoder(pipeline, element).plist
        plist.set_chunk((count,))
        space = h5py.h5s.create_simple(values.shape)
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    layout = read_layouts(path, {"data": Field("data")})["data"]
    form, due = frame_format(layout.filters), layout.chunk_nbytes
    order = [3, 0, 4, 1]
    nbytes = layout.chunks.nbytes[order]
    chunks = [bytes(n) for n in nbytes.tolist()]
    pieces = Pieces(core, path)
    base = pieces.read(io, layout.chunks.offset[order], nbytes)
    assert pieces.done == len(order)
    cut = Cut(core, form, due, chunks, base=base, room=(4000, 4000))
    assert cut.done == len(order)
    for number, chunk in zip(order, cut.decoded(), strict=True):
        expected = values[number * count : (number + 1) * count].tobytes()
        assert as_delivered(layout.filters, chunk) == expected


# --- what is not cut -----------------------------------------------------------------------------


def test_how_pipelines_are_framed():
    def form(*entries):
        return frame_format(tuple(Filter(entry[0], entry[1:], "") for entry in entries))

    shuffle, fletcher, deflate = (SHUFFLE, 4), (FLETCHER32,), (DEFLATE, 6)
    bits, lz4_bits = (BITSHUFFLE, 0, 4, 4, 0), (BITSHUFFLE, 0, 4, 4, 16, 2)
    none = FrameFormat(CoreKind.NOTHING)
    assert form() == form(shuffle) == form(bits) == form(shuffle, bits) == none
    assert form(fletcher) == form(shuffle, fletcher) == FrameFormat(CoreKind.NOTHING, True)
    assert form(shuffle, deflate, fletcher) == FrameFormat(CoreKind.DEFLATE, True, codec="deflate")
    assert form((ZSTD, 3)) == FrameFormat(CoreKind.ZSTD, codec="zstd")
    assert form(shuffle, (LZ4,)) == FrameFormat(CoreKind.LZ4, codec="lz4")
    assert form((LZ4, 4096)) == FrameFormat(CoreKind.LZ4, codec="lz4", usual_block_nbytes=4096)
    assert form(lz4_bits) == FrameFormat(CoreKind.BITSHUFFLE_LZ4, False, 4, 64, "lz4")
    zstd_bits = [(BITSHUFFLE, 0, 4, element, 0, 3, 3) for element in (1, 4, 3, 100)]
    blocks = [form(entry).block_nbytes for entry in zstd_bits]
    assert blocks == [8192, 8192, 2728 * 3, 128 * 100]
    for pipeline in (
        [(LZF,)],
        [(BLOSC, 0, 0, 0, 0, 5, 1, 1)],
        [deflate, deflate],
        [deflate, shuffle],
        [fletcher, deflate],
        [fletcher, fletcher],
        [fletcher, shuffle],
        [deflate, fletcher, shuffle],
        [deflate, fletcher, fletcher],
        [(SHUFFLE,), deflate],
        [(BITSHUFFLE, 0, 4, 4, 4, 2)],
        [(BITSHUFFLE, 0, 4, 0, 0, 2)],
        [(305,)],
    ):
        assert form(*pipeline) is None, pipeline


def test_shuffles_are_undone_after_the_compressor_the_last_one_first():
    def found(*entries):
        return unshuffles(tuple(Filter(entry[0], entry[1:], "") for entry in entries))

    assert found((DEFLATE, 6), (FLETCHER32,)) == ()
    assert found((SHUFFLE, 4), (BITSHUFFLE, 0, 4, 2, 64, 0), (DEFLATE, 6)) == ((2, 64), (4, 0))
    assert found((BITSHUFFLE, 0, 4, 4, 0, 2)) == (Unshuffle(4, 2048),)


def test_how_many_blocks_there_are_at_most():
    assert FrameFormat(CoreKind.NOTHING).usual_tasks(100) == 0
    assert FrameFormat(CoreKind.DEFLATE, codec="deflate").usual_tasks(100) == 1
    assert FrameFormat(CoreKind.ZSTD, codec="zstd").usual_tasks(100) == 1
    lz4 = FrameFormat(CoreKind.LZ4, codec="lz4", usual_block_nbytes=64)
    assert [lz4.usual_tasks(nbytes) for nbytes in (4, 64, 65)] == [1, 1, 2]
    assert FrameFormat(CoreKind.LZ4, codec="lz4").usual_tasks(100) == 1
    form = FrameFormat(CoreKind.BITSHUFFLE_LZ4, False, 4, 64, "lz4")
    assert [form.usual_tasks(nbytes) for nbytes in (4, 64, 65, 1000)] == [1, 1, 2, 16]


@each("pipeline", PIPELINES)
def test_no_room_stops_it_and_nothing_is_half_cut(core, pipeline):
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    form, encoded = frame_format(filters), [encoded for encoded, _ in chunks]
    whole = Cut(core, form, 332, encoded)
    for tasks, copies in itertools.product(
        {-1, *range(len(whole.tasks) + 1)}, {-1, *range(len(whole.copies) + 1)}
    ):
        room = max(0, tasks), max(0, copies)
        cut = Cut(core, form, 332, encoded, room=room, max_tasks=tasks, max_copies=copies)
        assert cut.tasks == whole.tasks[: len(cut.tasks)]
        assert cut.copies == whole.copies[: len(cut.copies)]
        is_enough = room == (len(whole.tasks), len(whole.copies))
        assert (cut.done == len(chunks)) == is_enough


@each("pipeline", SHORT)
def test_numbers_that_do_not_hold_together(core, pipeline):
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    form, encoded = frame_format(filters), [encoded for encoded, _ in chunks]
    size = sum(map(len, encoded))
    for name, bad in [
        *(("kind", bad) for bad in (-1, 0, 2, 3, 4, 7, 8, 12, 2**31 - 1)),
        *(("count", bad) for bad in (0, -1, -HUGE)),
        *(("base_nbytes", bad) for bad in (-1, 0, -HUGE)),
        *(("expected_nbytes", bad) for bad in (0, -1, 333, -HUGE)),
        *(("pitch", bad) for bad in (0, -1, 331, -HUGE, HUGE // 2)),
    ]:
        assert Cut(core, form, 332, encoded, **{name: bad}).done == 0, (name, bad)
    if form.block_nbytes:
        for name, bad in [
            *(("element", bad) for bad in (0, -1, 2**31, HUGE, -HUGE)),
            *(("block_nbytes", bad) for bad in (0, -1, form.block_nbytes * 2, HUGE)),
        ]:
            assert Cut(core, form, 332, encoded, **{name: bad}).done == 0, (name, bad)
    for at in range(4):
        for bad in (-1, size, size - len(encoded[at]) + 1, HUGE, -HUGE - 1):
            assert Cut(core, form, 332, encoded, position=(at, bad)).done == at
        for bad in (-1, 0, 1, 3, 4, size + 1, HUGE, -HUGE - 1):
            assert Cut(core, form, 332, encoded, nbytes=(at, bad)).done == at


@each("pipeline", PIPELINES)
def test_of_another_length_than_is_due(core, pipeline):
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    form = frame_format(filters)
    for encoded, _ in chunks:
        for due in (331, 333, 1, 64):
            cut = Cut(core, form, due, [encoded])
            if form.kind == CoreKind.DEFLATE:  # only the stream itself says
                assert cut.decoded() is None
            else:
                assert cut.done == 0
        for due in (2**40, HUGE - 1, HUGE):
            if form.kind != CoreKind.DEFLATE:
                assert Cut(core, form, 332, [encoded], expected_nbytes=due, pitch=due).done == 0


# --- damaged chunks ------------------------------------------------------------------------------


def has_more_behind(cut):
    """Tell whether a deflate stream ends before the bytes of its task do."""
    ((source, nbytes, _, _),) = cut.tasks
    stream = zlib.decompressobj(-15)
    stream.decompress(cut.base[source : source + nbytes])
    return bool(stream.unused_data)


def taken(core, filters, due, encoded):
    """Return what a chunk gives that is cut, and whose blocks all decode, held to the host's."""
    cut = Cut(core, frame_format(filters), due, [encoded])
    chunks = cut.decoded()
    if not cut.done or chunks is None:
        return None
    found = as_delivered(filters, chunks[0])
    expected = undone(filters, due, encoded)
    if expected is None:
        # Bytes between a stream and its checksum: the host takes them for the checksum.
        assert cut.form.kind == CoreKind.DEFLATE
        assert has_more_behind(cut)
    else:
        assert found == expected
    return found


@pytest.mark.parametrize("pipeline", SHORT, ids=ids)
def test_a_damaged_chunk_is_not_cut_or_gives_what_the_host_gives(core, pipeline):
    @some(0.05)
    @given(st.data())
    def check(data):
        element = data.draw(st.sampled_from([1, 2, 3, 4, 8]), label="element")
        count = data.draw(st.sampled_from([1, 8, 19, 83, 400]), label="count")
        kind = data.draw(st.integers(0, 3), label="kind")
        filters, chunks = encoded_chunks(pipeline, element, count)
        encoded, values = chunks[kind]
        encoded = damaged(lambda n: data.draw(st.integers(0, n - 1)), encoded, len(values))
        taken(core, filters, len(values), encoded)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", SHORT, ids=ids)
def test_many_damaged_chunks_too(core, pipeline):
    random, num_taken = Random(SEED), 0
    for element, count, kind in itertools.product((1, 3, 4), (19, 83, 400), range(4)):
        filters, chunks = encoded_chunks(pipeline, element, count)
        encoded, values = chunks[kind]
        for _ in range(30):
            changed = damaged(random.randrange, encoded, len(values))
            num_taken += taken(core, filters, len(values), changed) is not None
    assert num_taken or "fletcher32" in pipeline or "deflate" in pipeline


@pytest.mark.parametrize("pipeline", SHORT, ids=ids)
def test_every_flipped_byte(core, pipeline):
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    for encoded, values in chunks[1:3]:
        for at in range(len(encoded)):
            changed = bytearray(encoded)
            changed[at] ^= 1 << at % 8
            found = taken(core, filters, len(values), changed)
            if "fletcher32" in pipeline:
                assert found is None
            elif "deflate" in pipeline:  # some bits of a stream do not count
                assert found in (None, values)


@pytest.mark.parametrize("pipeline", SHORT, ids=ids)
def test_chunks_that_are_cut_short_or_too_long(core, pipeline):
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    form = frame_format(filters)
    for encoded, values in chunks:
        changed = [encoded[:nbytes] for nbytes in range(len(encoded))]
        changed += [encoded + bytes(more) for more in (1, 4, 12)]
        changed += [encoded + encoded, encoded + encoded[-1:]]
        for other in changed:
            # The last one stops it; the one before stands.
            cut = Cut(core, form, len(values), [encoded, other])
            assert cut.done >= 1
            assert cut.done == 1 or form.kind == CoreKind.DEFLATE
            if cut.done == 2 and (decoded := cut.decoded()) is not None:
                assert other == encoded + encoded  # which ends with the right checksum
                assert undone(filters, len(values), other) == decoded[1].tobytes() == values


@pytest.mark.parametrize("pipeline", SHORT, ids=ids)
def test_noise(core, pipeline):
    rng = np.random.default_rng(SEED)
    filters, chunks = encoded_chunks(pipeline, 4, 83)
    encoded, values = chunks[2]
    for head in (0, 0, 2, 5, 6, 12, 16, 20):
        for _ in range(60):
            noise = rng.integers(0, rng.choice([4, 256]), rng.integers(0, 500), np.uint8)
            taken(core, filters, len(values), encoded[:head] + noise.tobytes())


def test_bytes_between_a_stream_and_its_checksum(core):
    """Only a decoder sees where the stream ends; what it gives still has the right checksum."""
    filters, chunks = encoded_chunks(("deflate",), 4, 83)
    encoded, values = chunks[2]
    changed = encoded[:-4] + b"more" + encoded[-4:]
    cut = Cut(core, frame_format(filters), len(values), [changed])
    assert cut.done == 1
    assert has_more_behind(cut)
    assert cut.decoded().tobytes() == values
    assert undone(filters, len(values), changed) is None


@pytest.mark.slow
def test_headers_of_zlib(core):
    (encoded, values), form = encoded_chunks(("deflate",), 4, 83)[1][1], FrameFormat(1)
    good = []
    firsts = (0x08, 0x18, 0x58, 0x70, 0x78, 0x79, 0x88, 0xF8)
    for first, second in itertools.product(firsts, range(256)):
        done = Cut(core, form, 332, [bytes([first, second]) + encoded[2:]], room=(1, 0)).done
        if done:
            good.append((first, second))
    expected = [
        (first, level << 6 | check)
        for first, level, check in itertools.product(firsts[:3] + firsts[4:5], range(4), range(32))
        if (first << 8 | level << 6 | check) % 31 == 0
    ]
    assert good == expected
    for n in range(7):
        assert Cut(core, form, 332, [encoded[:n]]).done == 0
    assert zlib.decompress(encoded) == values


def zstd_frame(descriptor, *fields, blocks=b""):
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + b"".join(fields) + blocks


def zstd_block(kind, size, data=b"", is_last=True):
    return (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + data


@pytest.mark.slow
def test_frames_of_zstd(core):
    """All kinds of headers and blocks, as RFC 8878 has them; and what is odd in them."""
    values = bytes(range(256)) + bytes(300)
    due = len(values)
    raw, same = zstd_block(0, 256, values[:256], False), zstd_block(1, 300, b"\0")
    none = zstd_block(0, 0)
    window, size = b"\x00", (due - 256).to_bytes(2, "little")
    size4, size8 = due.to_bytes(4, "little"), due.to_bytes(8, "little")
    good = {
        "no size": zstd_frame(0x00, window, blocks=raw + same),
        "2 bytes of size": zstd_frame(0x40, window, size, blocks=raw + same),
        "4 bytes of size": zstd_frame(0x80, window, size4, blocks=raw + same),
        "8 bytes of size": zstd_frame(0xC0, window, size8, blocks=raw + same),
        "one segment": zstd_frame(0x60, size, blocks=raw + same),
        "one segment, 4 bytes": zstd_frame(0xA0, size4, blocks=raw + same),
        "one segment, 8 bytes": zstd_frame(0xE0, size8, blocks=raw + same),
        "an empty block": zstd_frame(0x00, window, blocks=raw + same[:0] + zstd_block(
            1, 300, b"\0", False) + none),
        "largest window": zstd_frame(0x00, bytes([17 << 3 | 7]), blocks=raw + same),
    }  # fmt: skip
    bad = {
        "another size": zstd_frame(0x40, window, b"\x2d\x01", blocks=raw + same),
        "another size, 4 bytes": zstd_frame(0x80, window, b"\x2d\x02\0\0", blocks=raw + same),
        "another size, 8 bytes": zstd_frame(0xC0, window, b"\xff" * 8, blocks=raw + same),
        "a size of 1 byte": zstd_frame(0x20, b"\x2c", blocks=raw + same),
        "a dictionary": zstd_frame(0x41, window, b"\0", size, blocks=raw + same),
        "a checksum": zstd_frame(0x44, window, size, blocks=raw + same + bytes(4)),
        "a reserved bit": zstd_frame(0x48, window, size, blocks=raw + same),
        "an unused bit": zstd_frame(0x50, window, size, blocks=raw + same),
        "too large a window": zstd_frame(0x00, bytes([18 << 3]), blocks=raw + same),
        "a reserved block": zstd_frame(0x00, window, blocks=raw + zstd_block(3, 0)),
        "no last block": zstd_frame(0x00, window, blocks=raw),
        "too large a block": zstd_frame(0x00, window, blocks=zstd_block(1, 1025, b"\0")),
        "too large a block for one segment": zstd_frame(
            0x60, size, blocks=zstd_block(1, due + 1, b"\0")
        ),
        "too large a block anyway": zstd_frame(
            0x00, b"\x50", blocks=zstd_block(1, 128 * 1024 + 1, b"\0")
        ),
        "two frames": 2 * zstd_frame(0x00, window, blocks=same),
        "a frame to skip": b"\x50\x2a\x4d\x18\0\0\0\0" + zstd_frame(0, window, blocks=raw + same),
        "one byte more": zstd_frame(0x00, window, blocks=raw + same) + b"\0",
        "another magic number": b"\x27" + zstd_frame(0x00, window, blocks=raw + same)[1:],
    }
    form = FrameFormat(CoreKind.ZSTD, codec="zstd")
    for name, frame in good.items():
        assert imagecodecs.zstd_decode(frame, out=due) == values, name
        cut = Cut(core, form, due, [frame])
        assert cut.tasks == [(0, len(frame), 0, due)], name
        assert cut.decoded().tobytes() == values
        for nbytes in range(len(frame)):
            assert Cut(core, form, due, [frame[:nbytes]]).done == 0
    for name, frame in bad.items():
        assert Cut(core, form, due, [frame]).done == 0, name


@pytest.mark.slow
def test_hostile_headers_of_blocks(core):
    def big(number, width):
        return number.to_bytes(width, "big")

    forms = {
        FrameFormat(CoreKind.LZ4, codec="lz4"): (Filter(LZ4, (), ""),),
        FrameFormat(CoreKind.BITSHUFFLE_LZ4, False, 4, 32, "lz4"): (
            Filter(BITSHUFFLE, (0, 4, 4, 8, 2), ""),
        ),
        FrameFormat(CoreKind.BITSHUFFLE_ZSTD, False, 4, 32, "zstd"): (
            Filter(BITSHUFFLE, (0, 4, 4, 8, 3), ""),
        ),
    }
    for nbytes, block, length in itertools.product(
        (0, 1, 23, 24, 25, 32, 2**31, 2**32 + 24, 2**63 - 1, 2**63, 2**63 + 24, 2**64 - 1),
        (0, 1, 8, 24, 32, 64, 2**31 - 32, 2**31, 0x7E000000, 0x7E000020, 2**32 - 32),
        (0, 1, 24, 2**31 - 1, 2**31, 2**32 - 1),
    ):
        encoded = big(nbytes, 8) + big(block, 4) + big(length, 4) + bytes(range(24))
        for filters in forms.values():
            taken(core, filters, 24, encoded)
            taken(core, filters, 32, encoded)
    assert [frame_format(filters) for filters in forms.values()] == list(forms)


def test_a_block_size_of_one(core):
    """As many blocks as bytes: the room for them is what bounds it."""
    encoded = (1000).to_bytes(8, "big") + (1).to_bytes(4, "big")
    encoded += b"".join(b"\0\0\0\1" + bytes([at % 256]) for at in range(1000))
    form = FrameFormat(CoreKind.LZ4, codec="lz4")
    assert Cut(core, form, 1000, [encoded], room=(0, 999)).done == 0
    cut = Cut(core, form, 1000, [encoded], room=(0, 1000))
    assert cut.decoded().tobytes() == bytes(at % 256 for at in range(1000))


# --- reading -------------------------------------------------------------------------------------


@pytest.fixture
def pieces(core, tmp_path):
    file = RowFile(core, tmp_path / "pieces")
    found = Pieces(core, file.path)
    found.content, found.forget = file.content, file.forget
    return found


IO = ["auto", "pread", "map"]


@pytest.mark.parametrize("io", IO)
def test_pieces_of_any_length(pieces, io):
    size = pieces.content.size

    @some(0.15)
    @given(st.data())
    def check(data):
        offset, nbytes, target, end = [], [], [], 0
        for _ in range(data.draw(st.integers(0, 40))):
            length = data.draw(st.sampled_from([0, 1, 7, 100, 4096, 5000, 100_000]))
            kind = data.draw(st.sampled_from(["any", "next", "next", "last"]))
            begin = data.draw(st.integers(0, size // 2))
            if kind == "next" and offset and offset[-1] + nbytes[-1] + length <= size:
                begin = offset[-1] + nbytes[-1]
            elif kind == "last":
                begin = size - length
            end += data.draw(st.sampled_from([0, 0, 1, 64]))
            offset.append(begin), nbytes.append(length), target.append(end)
            end += length
        if data.draw(st.booleans(), label="forget"):
            pieces.forget()
        base = pieces.read(io, offset, nbytes, target, end)
        assert pieces.done == len(offset)
        expected = np.full(end, FRESH, np.uint8)
        for begin, length, at in zip(offset, nbytes, target, strict=True):
            expected[at : at + length] = pieces.content[begin : begin + length]
        assert np.array_equal(base, expected)

    check()


@pytest.mark.parametrize("io", IO)
def test_pieces_out_of_bounds_stop_it(pieces, io):
    size = pieces.content.size
    good = ([5, 1000, 50_000, 105], [100, 7, 3000, 50], [0, 100, 200, 3200])
    bad_ones = [
        *((0, bad) for bad in (-1, size, size - 6, HUGE, HUGE - 3, -HUGE - 1)),
        *((1, bad) for bad in (-1, 5000, size + 1, HUGE, -HUGE - 1)),
        *((2, bad) for bad in (-1, 3244, 3251, HUGE, HUGE - 3, -HUGE - 1)),
    ]
    for (which, bad), at, is_cached in itertools.product(bad_ones, range(4), (True, False)):
        numbers = [list(values) for values in good]
        numbers[which][at] = bad
        if not is_cached:
            pieces.forget()
        base = pieces.read(io, *numbers, 3250)
        assert pieces.done == at, (which, bad)
        for begin, length, to in list(zip(*good, strict=True))[:at]:
            assert np.array_equal(base[to : to + length], pieces.content[begin : begin + length])


@pytest.mark.parametrize("io", IO)
def test_pieces_of_a_file_that_was_cut_short(pieces, io):
    os.truncate(pieces.path, 5000)
    base = pieces.read(io, [0, 3000, 4000, 4500], [1000, 1000, 1000, 501])
    assert pieces.done == 3
    assert np.array_equal(base[2000:3000], pieces.content[4000:5000])
    os.truncate(pieces.path, 0)
    pieces.read(io, [0], [1])
    assert pieces.done == 0
    pieces.read(io, [], [])
    assert pieces.done == 0


@pytest.mark.parametrize("io", IO)
def test_nothing_is_read_of_a_file_that_was_changed(pieces, io):
    pieces.stamp = FileStamp.of(pieces.path)._replace(modified_ns=1)
    pieces.read(io, [0, 3000], [1000, 1000])
    assert pieces.done == 0


def test_a_page_that_cannot_be_had_ends_the_reading(pieces):
    """The map is of a file that was cut short."""
    with pieces.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pieces.memory = np.frombuffer(mapped, np.uint8)
    assert np.array_equal(pieces.read("map", [100], [16384]), pieces.content[100:16484])
    os.truncate(pieces.path, 0)
    for _ in range(3):
        pieces.read("map", [100], [16384])
        assert pieces.done == 0
    pieces.memory = None  # which closes the file


def test_memory_of_no_bytes(pieces):
    pieces.read("auto", [5, 5, 5], [0, 1, 0], [0, 0, 0], 0)
    assert pieces.done == 1
