"""Rows of chunks that split them: put together once, kept, and given whole to later batches."""

from __future__ import annotations

import ctypes
import json
import os
import random
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from collecting import Collected, layouts_of, most_kept_nbytes
from conftest import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collection import read_in_threads

from h5async import AsyncReader, Field
from h5async import core as core_module
from h5async.fill import resident
from h5async.index import extents
from h5async.index.extents import Keeps
from h5async.index.metadata import read_layouts
from h5async.read.coretables import CoreTables

ALL = 1 << 24  # bytes: room for all rows of a test
SEED = 5


def kept_by(read: Collected) -> set[int]:
    """Return what is kept of the chunks of the first field, by segment."""
    field = read.collection.tables.fields[0]
    layer = field.layers[0]
    numbers = (ctypes.c_int32 * layer.num_segments).from_address(layer.shape)
    return {int(field.shapes[number].keeps) for number in numbers}


def split_dataset(path, rows=23, row=(5, 6, 3), chunks=(4, 2, 4, 2), dtype="u1", **options):
    """Write a dataset whose chunks split its rows; return its values and its layout."""
    values = np.random.default_rng(SEED).integers(0, 200, (rows, *row)).astype(dtype)
    options.setdefault("compression", "gzip")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=chunks, **options)
    return values, list(read_layouts(path, {"data": Field("data")}).values())


def decoded(read: Collected, core) -> int:
    return read.scratch.worker(core).struct.done.decoded_chunks


def test_what_is_kept_has_the_same_numbers_in_python_and_in_c():
    source = Path(core_module.__file__).with_name("src").joinpath("tables.c").read_text()
    for what in Keeps:
        assert f"KEEPS_{what.name} = {what.value}" in source


@each("threads", [1, 2, 5, 40])
@each("dtype", ["u1", "<u2", ">i2", "<f4", ">f4", "<f8", "S3"])
def test_each_chunk_is_decoded_once(tmp_path, core, threads, dtype):
    """However many threads a plan is cut for, and in whatever order its items are done."""
    values, layouts = split_dataset(tmp_path / "data.h5", dtype=dtype)
    rng, order = np.random.default_rng(SEED), random.Random(threads)
    with Collected(core, layouts, 40, kept_nbytes=ALL) as read:
        assert kept_by(read) == {Keeps.ROWS}
        for _ in range(12):
            samples = rng.integers(0, 23, rng.integers(1, 40))
            count = read.plan(samples, threads=threads)
            items = list(range(count))
            order.shuffle(items)
            for item in items:
                assert read.collection.read(read.batch, item, item + 1, read.scratch) == 0
            assert read.raw[0].is_intact()
            assert_same_bits(read.arrays[0][: samples.size], values[samples])
        assert decoded(read, core) == 6 * 3 * 2 * 2
        before = sum(most_kept_nbytes(read.collection))
        assert before == 6 * 4 * values[0].nbytes, "rows of all chunks, and none beside"


@each("row, chunk", [
    ((18, 40, 3), (7, 21, 2)), ((18, 40, 3), (7, 21, 1)), ((40, 5), (19, 2)),
    ((3, 37, 4), (2, 37, 1)), ((33, 2), (33, 1)), ((2, 3, 17, 3), (1, 2, 9, 1)),
    ((20, 6), (20, 1)), ((3,), (1,)),
])  # fmt: skip
@each("dtype", ["u1", "<u2", ">f4", "<f8", "S3"])
@each("kept_nbytes", [0, ALL])
def test_pieces_that_lie_interleaved_in_rows(tmp_path, core, row, chunk, dtype, kept_nbytes):
    """As those of chunks that split channels, of which some are decoded before rows are written."""
    path = tmp_path / "data.h5"
    values, layouts = split_dataset(path, 11, row, (4, *chunk), dtype)
    for threads in (1, 3):
        with Collected(core, layouts, 11, kept_nbytes=kept_nbytes) as read:
            assert kept_by(read) == {Keeps.ROWS if kept_nbytes else Keeps.CHUNKS}
            for samples in (range(11), [10, 0, 3], [*range(9, 3, -1), *range(4)]):
                assert read.read(samples, threads=threads, cuts=[2]) == 0
                assert_same_bits(read.arrays[0][: len(samples)], values[list(samples)])
                assert read.raw[0].is_intact()


@each("threads", [1, 3])
@each("kept_nbytes", [0, 1000, 5000, ALL])
def test_any_budget(tmp_path, core, threads, kept_nbytes, monkeypatch):
    """Where there is no room for more rows, each piece goes straight to where it is wanted."""
    monkeypatch.setattr(extents, "_LEAST_GROUPS", 0)
    values, layouts = split_dataset(tmp_path / "data.h5", chunks=(4, 5, 6, 2))
    rng = np.random.default_rng(SEED)
    with Collected(core, layouts, 30, kept_nbytes=kept_nbytes) as read:
        assert kept_by(read) == {Keeps.ROWS}
        for _ in range(20):
            samples = rng.integers(0, 23, rng.integers(1, 30))
            cuts = rng.integers(0, 9, 3).tolist()
            assert read.read(samples, threads=threads, cuts=cuts) == 0
            assert_same_bits(read.arrays[0][: samples.size], values[samples])
        least = 2 * (4 * 90 + 128 + 2)
        assert sum(most_kept_nbytes(read.collection)) <= max(kept_nbytes, least)


@each("kept_nbytes", [0, 1500, ALL])
@each("forgets", [False, True])
def test_many_threads_share_rows(tmp_path, core, kept_nbytes, forgets, monkeypatch):
    monkeypatch.setattr(extents, "_LEAST_GROUPS", 0)
    values, layouts = split_dataset(tmp_path / "data.h5")
    with Collected(core, layouts, 25, kept_nbytes=kept_nbytes) as collected:

        def one(slot, draw):
            samples = [draw.randrange(23) for _ in range(draw.randint(1, 25))]
            cuts = [draw.randint(0, 30), draw.randint(0, 30)]
            assert slot.read(samples, cuts=cuts, threads=draw.choice([1, 2, 8])) == 0
            assert_same_bits(slot.arrays[0][: len(samples)], values[samples])
            if forgets and draw.random() < 0.2:
                slot.collection.tables.forget_chunks()

        assert not read_in_threads(core, collected, 4, 60, one)


def test_many_threads_meet_a_damaged_chunk(tmp_path, core):
    """Its rows are left to Python by each of them; nobody waits for a piece that never comes."""
    path = tmp_path / "data.h5"
    values, _ = split_dataset(path)
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((8, 2, 0, 0), b"\x78\x9c no such thing")
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    with Collected(core, layouts, 25, kept_nbytes=ALL) as collected:

        def one(slot, draw):
            samples = [draw.randrange(23) for _ in range(draw.randint(1, 25))]
            slot.read(samples, cuts=[draw.randint(0, 30)], threads=draw.choice([1, 2, 8]))
            bad = [row for row, sample in enumerate(samples) if 8 <= sample < 12]
            assert slot.left() == ({0: bad} if bad else {})
            good = [row for row in range(len(samples)) if row not in bad]
            assert_same_bits(slot.arrays[0][good], values[samples][good])
            if draw.random() < 0.2:
                slot.collection.tables.forget_chunks()

        assert not read_in_threads(core, collected, 4, 60, one)


@pytest.mark.slow
def test_many_threads_wait_for_a_piece_that_is_given_up(tmp_path, core):
    """It takes long to find that it is damaged; who waits for it meanwhile has to try it, too."""
    path, rng = tmp_path / "data.h5", np.random.default_rng(SEED)
    values = np.zeros((2, 40, 1 << 15), "u1")
    values[:, 0] = rng.integers(0, 50, values[:, 0].shape)  # (these take long, the others do not)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", data=values, chunks=(2, 1, 1 << 15), compression="gzip")
        encoded = bytearray(data.id.read_direct_chunk((0, 0, 0))[1])
        encoded[-1] ^= 1  # of the checksum
        data.id.write_direct_chunk((0, 0, 0), bytes(encoded))
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    with Collected(core, layouts, 4, kept_nbytes=ALL) as collected:

        def one(slot, draw):
            assert slot.read([draw.randrange(2)], threads=draw.choice([1, 4])) > 0
            assert slot.left() == {0: [0]}
            if draw.random() < 0.5:
                slot.collection.tables.forget_chunks()

        assert not read_in_threads(core, collected, 4, 60, one)


@each("threads", [1, 4])
def test_nothing_of_a_file_that_changed_is_kept(tmp_path, core, threads):
    path = tmp_path / "data.h5"
    values, layouts = split_dataset(path)
    with Collected(core, layouts, 30, kept_nbytes=ALL) as read:
        os.utime(path)
        assert read.read(range(23), threads=threads) > 0
        assert read.left() == {0: list(range(23))}
        stamp = layouts_of([path], {"d": Field("data")})[0].stamp
        read.collection.tables.restamp(str(path), stamp)
        before = decoded(read, core)
        assert read.read(range(23), threads=threads) == 0
        assert_same_bits(read.arrays[0][:23], values)
        assert decoded(read, core) == before + 6 * 3 * 2 * 2, "each chunk is decoded anew"


def test_more_pieces_than_are_claimed_at_once(tmp_path, core):
    values, layouts = split_dataset(
        tmp_path / "data.h5", row=(40, 5), chunks=(4, 1, 3), shuffle=True
    )
    for threads in (1, 8):
        with Collected(core, layouts, 40, kept_nbytes=ALL) as read:
            for _ in range(2):
                samples = np.random.default_rng(SEED).integers(0, 23, 40)
                assert read.read(samples, threads=threads, cuts=[3, 5]) == 0
                assert_same_bits(read.arrays[0], values[samples])
            groups = np.unique(samples // 4).size
            assert decoded(read, core) == groups * 40 * 2


def test_chunks_that_were_never_allocated(tmp_path, core):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset(
            "data", (20, 6, 5), "<i4", chunks=(4, 3, 2), compression="gzip", fillvalue=-7
        )
        data[2:9, :3, 3:] = 5
        data[17, 5, 0] = 6
        values = data[()]
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    for threads in (1, 6):
        with Collected(core, layouts, 20, kept_nbytes=ALL) as read:
            assert kept_by(read) == {Keeps.ROWS}
            for _ in range(2):
                assert read.read(range(20), threads=threads) == 0
                assert_same_bits(read.arrays[0], values)


def test_chunks_that_are_stored_raw(tmp_path, core):
    """Of each chunk the filter mask may say that a filter was left out."""
    path = tmp_path / "data.h5"
    values, _ = split_dataset(path, dtype="<i2", shuffle=True)
    rng = np.random.default_rng(SEED)
    with h5py.File(path, "r+") as file:
        data = file["data"]
        for number in range(data.id.get_num_chunks()):
            at = data.id.get_chunk_info(number).chunk_offset
            if rng.random() < 0.5:
                chunk = np.zeros((4, 2, 4, 2), "<i2")
                here = values[tuple(slice(a, a + n) for a, n in zip(at, chunk.shape, strict=True))]
                chunk[tuple(slice(0, n) for n in here.shape)] = here
                data.id.write_direct_chunk(at, chunk.tobytes(), filter_mask=3)
        assert_same_bits(data[()], values)
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    for io in ("map", "pread"):
        with Collected(core, layouts, 23, kept_nbytes=ALL, io=io) as read:
            for _ in range(2):
                assert read.read(range(23), threads=3) == 0
                assert_same_bits(read.arrays[0], values)


@each("is_shared", [True, False])
def test_other_rows_of_the_same_datasets(tmp_path, core, is_shared):
    """Parts of a virtual dataset that take other columns of a source each get their own.

    Rows are put together where no chunk has pieces of two kinds of rows: it would be decoded twice.
    """
    path = tmp_path / "data.h5"
    split_dataset(path, rows=12, row=(9, 6), chunks=(4, 3, 4), dtype="<i4")
    with h5py.File(path, "r+") as file:
        source = h5py.VirtualSource(file["data"])
        layout = h5py.VirtualLayout((36, 3, 6), "<i4")
        layout[:12] = source[:, :3]
        layout[12:24] = source[:, 3:6]
        layout[24:] = source[:, ::3] if is_shared else source[:, 6:]
        file.create_virtual_dataset("virtual", layout)
        expected = file["virtual"][()]
    layouts = list(read_layouts(path, {"data": Field("virtual")}).values())
    with Collected(core, layouts, 36, kept_nbytes=ALL) as read:
        assert kept_by(read) == {Keeps.CHUNKS if is_shared else Keeps.ROWS}
        for _ in range(3):
            samples = np.random.default_rng(SEED).permutation(36)
            assert read.read(samples, threads=4) == 0
            assert_same_bits(read.arrays[0], expected[samples])
        assert decoded(read, core) == 3 * 3 * 2


def test_bytes_of_numbers_are_swapped_once(tmp_path, core):
    path = tmp_path / "data.h5"
    values, _ = split_dataset(path, rows=12, row=(8, 6), chunks=(4, 3, 4), dtype=">i4")
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((12, 8, 6), "<i4")
        layout[...] = h5py.VirtualSource(file["data"])
        file.create_virtual_dataset("virtual", layout)
    layouts = list(read_layouts(path, {"data": Field("virtual")}).values())
    with Collected(core, layouts, 24, kept_nbytes=ALL) as read:
        assert kept_by(read) == {Keeps.ROWS}
        for threads in (1, 4, 1):
            assert read.read([*range(12), *range(12)], threads=threads) == 0
            assert_same_bits(read.arrays[0], np.concatenate([values, values]).astype("<i4"))


def test_pieces_of_rows_that_lie_in_several_datasets_are_not_put_together(tmp_path, core):
    path = tmp_path / "data.h5"
    values, _ = split_dataset(path, rows=12, row=(8, 6), chunks=(4, 3, 4), dtype="<i4")
    with h5py.File(path, "r+") as file:
        file.create_dataset("other", data=values + 1000, chunks=(3, 8, 2), compression="gzip")
        layout = h5py.VirtualLayout((12, 16, 6), "<i4")
        layout[:, :8] = h5py.VirtualSource(file["data"])
        layout[:, 8:] = h5py.VirtualSource(file["other"])
        file.create_virtual_dataset("virtual", layout)
        expected = file["virtual"][()]
    layouts = list(read_layouts(path, {"data": Field("virtual")}).values())
    with Collected(core, layouts, 12, kept_nbytes=ALL) as read:
        assert kept_by(read) == {Keeps.CHUNKS}
        for _ in range(2):
            assert read.read(range(12), threads=4) == 0
            assert_same_bits(read.arrays[0], expected)


@each("rows, uses, keeps", [(23, 1.0, Keeps.ROWS), (23, 0.4, Keeps.CHUNKS), (5, 1.0, Keeps.CHUNKS)])
def test_where_rows_are_put_together(tmp_path, core, rows, uses, keeps):
    """Not where few of the rows that chunks have room for are ever used."""
    path = tmp_path / "data.h5"
    values = np.arange(rows * 6, dtype="<i4").reshape(rows, 6)
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "data", data=values, chunks=(12, 4), maxshape=(None, 6), compression="gzip"
        )
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    tables = CoreTables(
        core,
        layouts,
        io="auto",
        most_files=10,
        kept_nbytes=[ALL],
        transforms=[None],
        samples=int(rows * uses),
    )
    assert tables.fields[0].shapes[0].keeps == keeps
    tables.close()


# --- whole readers, against h5py -----------------------------------------------------------------

DTYPES = ("u1", "<i2", ">i4", "<f8", "S3")


@st.composite
def datasets(draw):
    """Draw files with a dataset each, and how its samples are read."""
    rank = draw(st.integers(1, 3))
    row = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    counts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    axis = draw(st.integers(0, rank))
    chunk = [draw(st.integers(1, size)) for size in row]
    chunk.insert(axis, draw(st.integers(1, 9)))
    offsets = draw(st.none() | st.lists(st.integers(-4, 5), min_size=1, max_size=5))
    return {
        "row": row,
        "counts": counts,
        "axis": axis,
        "chunk": tuple(chunk),
        "dtype": draw(st.sampled_from(DTYPES)),
        "filters": draw(
            st.sampled_from(
                [
                    {"compression": "gzip"},
                    {"compression": "gzip", "shuffle": True, "fletcher32": True},
                    {"compression": "lzf"},
                ]
            )
        ),
        "is_partial": draw(st.booleans()),
        "offsets": offsets,
        "pad": draw(st.sampled_from(["edge", "zero"])),
        "shuffle": draw(st.sampled_from([False, "full", "window", "window"])),
        "batch_size": draw(st.integers(1, 9)),
        "num_threads": draw(st.sampled_from([0, 1, 3])),
        "window_bytes": draw(st.sampled_from([1 << 12, 1 << 14, 1 << 28])),
        "keeps_whole": draw(st.booleans()),
        "is_core": draw(st.sampled_from([True, True, True, False])),
        "indices": draw(st.sampled_from([None, slice(0, None, 3)])),
        "seed": draw(st.integers(0, 1000)),
    }


def expected_rows(values, counts, sample, offsets, pad):
    """Return the rows of a sample; its sequence is its file."""
    ends = np.cumsum(counts)
    file = int(np.searchsorted(ends, sample, side="right"))
    first, last = int(ends[file] - counts[file]), int(ends[file]) - 1
    found = []
    for offset in offsets:
        at = sample + offset
        inside = first <= at <= last
        found.append(
            values[min(max(at, first), last)]
            if inside or pad == "edge"
            else np.zeros_like(values[0])
        )
    return np.stack(found)


@each("storage", [{}, {"chunks": (2, 2)}, {"chunks": (2, 2), "compression": "gzip"}])
@each("is_core", [True, False])
@each("num_threads", [0, 2])
def test_a_batch_of_nothing_but_zeros(tmp_path, storage, is_core, num_threads, monkeypatch):
    if not is_core:
        monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("data", data=np.ones((5, 3), "i4"), **storage)
    fields = {"later": Field("data", steps=[7], pad="zero"), "own": "data"}
    with AsyncReader(
        hdf5_path=tmp_path / "data.h5", fields=fields, batch_size=2, num_threads=num_threads,
        device="cpu", index_cache=False,
    ) as reader:  # fmt: skip
        for batch in reader:
            assert not batch.later.any()
            assert batch.own.all()
        given = reader.read([3, 0, 3])
        assert not given.later.any()
        assert given.own.all()


def test_the_time_of_a_transform_is_its_own(tmp_path, core):
    """Also of rows that are put together: out of one chunk, where samples come last in the file."""
    values = np.arange(64 * 4000, dtype="u1").reshape(4000, 64)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("data", data=values, chunks=(4000, 8), compression="gzip")
    field = Field("data", 1, dtype="float32", scale=0.5)
    with AsyncReader(
        hdf5_path=tmp_path / "data.h5", fields={"data": field}, batch_size=8, shuffle="window",
        num_threads=0, device="cpu", index_cache=False,
    ) as reader:  # fmt: skip
        with reader.trace(tmp_path / "t.json"):
            for batch in reader:
                assert_same_bits(batch.data, values.T[batch.index].astype("f4") * np.float32(0.5))
        assert reader.stats().stage_seconds["transform"] > 0
    with open(tmp_path / "t.json") as file:
        assert "transform" in {event["name"] for event in json.load(file)["traceEvents"]}


@pytest.mark.slow
@given(datasets())
@settings(deadline=None)
def test_batches_hold_what_h5py_gives(case):
    rng = np.random.default_rng(case["seed"])
    axis, counts = case["axis"], case["counts"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not case["keeps_whole"]:
            patch.setattr(resident, "_KEPT_WHOLE_NBYTES", 0)
        if not case["is_core"]:
            patch.setattr("h5async.fill.filling.load_core", lambda: None)
        paths, several = [], []
        for number, count in enumerate(counts):
            paths.append(Path(folder) / f"{number}.h5")
            shape = list(case["row"])
            shape.insert(axis, count)
            values = rng.integers(0, 250, shape).astype(case["dtype"])
            with h5py.File(paths[-1], "w") as file:
                data = file.create_dataset(
                    "data",
                    shape,
                    case["dtype"],
                    chunks=case["chunk"],
                    maxshape=[None] * len(shape),
                    **case["filters"],
                )
                if not case["is_partial"]:
                    data[...] = values
                elif rng.random() < 0.8:
                    part = tuple(slice(0, rng.integers(1, n + 1)) for n in shape)
                    data[part] = values[part]
                several.append(np.moveaxis(data[()], axis, 0))
        values = np.concatenate(several)
        steps = {} if case["offsets"] is None else {"steps": case["offsets"], "pad": case["pad"]}
        fields = {"several": Field("data", axis, **steps), "own": Field("data", axis)}
        with AsyncReader(
            hdf5_path=paths,
            fields=fields,
            batch_size=case["batch_size"],
            shuffle=case["shuffle"],
            num_threads=case["num_threads"],
            window_bytes=case["window_bytes"],
            indices=case["indices"],
            seed=case["seed"],
            device="cpu",
            index_cache=False,
        ) as reader:
            for _ in range(2):
                seen = []
                for batch in reader:
                    seen += batch.index.tolist()
                    assert_same_bits(np.asarray(batch.own), values[batch.index])
                    for sample, rows in zip(batch.index.tolist(), batch.several, strict=True):
                        truth = values[sample]
                        if case["offsets"] is not None:
                            truth = expected_rows(
                                values, counts, sample, case["offsets"], case["pad"]
                            )
                        assert_same_bits(np.asarray(rows), np.asarray(truth))
                wanted = np.arange(sum(counts))[case["indices"] or slice(None)]
                assert sorted(seen) == wanted.tolist()
