"""Batches that the core reads, of all fields and out of all files at once, against h5py."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from random import Random

import h5py
import numpy as np
import pytest
from cases import each
from collecting import Collected, layouts_of
from conftest import assert_same_bits, open_descriptors

from h5async import AsyncReader, Field, FileChangedWarning, H5AsyncError
from h5async.core.binding import PLANNED_ROW_NBYTES
from h5async.index.metadata import read_layouts
from h5async.io.source import FileStamp, settled
from h5async.read.coretables import Scratch, ScratchSize
from h5async.read.h5pyrows import H5pyRows

SEED = 20261122
WAIT_SECONDS = 200
IO = ["auto", "pread", "map"]

pytestmark = pytest.mark.usefixtures("core")


# --- random files and fields ----------------------------------------------------------------------

FILTERS = [
    {},
    {"compression": "gzip", "compression_opts": 1},
    {"compression": "lzf", "shuffle": True},
    {"shuffle": True, "fletcher32": True},
    {"scaleoffset": 0},  # which is left
]
DTYPES = ["u1", "<i2", ">i4", "<f8", "?", "S3", "V5"]


def values_of(rng, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(1, 120, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def write_dataset(rng, file, name, shape, dtype, choice):
    """Write a dataset in some layout, parts of it never written."""
    kind = choice(["contiguous", "compact", "chunked", "chunked", "external", "sparse"])
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if kind == "compact" and size < 60_000:
        plist.set_layout(h5py.h5d.COMPACT)
    elif kind == "external" and size:
        raw = f"{file.filename}.{name}.raw"
        plist.set_external(raw.encode(), 16, h5py.h5f.UNLIMITED)
    elif kind in ("chunked", "sparse"):
        options = choice(FILTERS if np.dtype(dtype).kind in "iu" else FILTERS[:4])
        chunks = tuple(choice([n, 1, max(1, n // 2), max(1, n // 3)]) for n in shape)
        dataset = file.create_dataset(name, shape, dtype, chunks=chunks, **options)
        rows = slice(0, shape[0]) if kind == "chunked" else slice(shape[0] // 3, shape[0] // 2 + 1)
        dataset[rows] = values_of(rng, shape, dtype)[rows]
        return
    space = h5py.h5s.create_simple(shape)
    dtype = np.dtype(dtype)
    dataset = h5py.h5d.create(
        file.id, name.encode(), h5py.h5t.py_create(dtype, logical=True), space, plist
    )
    h5py.Dataset(dataset)[...] = values_of(rng, shape, dtype)


def write_files(folder, seed):
    """Write some files with some fields; return their paths and the fields' options."""
    random, rng = Random(seed), np.random.default_rng(seed)
    fields = {}
    for number in range(random.randint(1, 4)):
        rank = random.randint(0, 2)
        row = tuple(random.randint(1, 6) for _ in range(rank))
        axis = random.choice([0, 0, 0, rank])
        fields[f"f{number}"] = row, random.choice(DTYPES), axis
    paths = []
    for number in range(random.randint(1, 5)):
        samples = random.randint(1, 40)
        paths.append(folder / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            for name, (row, dtype, axis) in fields.items():
                shape = (*row[:axis], samples, *row[axis:])
                write_dataset(rng, file, name, shape, dtype, random.choice)
    return paths, {name: Field(name, axis) for name, (_, _, axis) in fields.items()}


def whole(paths, fields):
    """Return all rows of all fields, as h5py reads them, samples first."""
    found = {}
    for name, field in fields.items():
        rows = []
        for path in paths:
            with h5py.File(path) as file:
                rows.append(np.moveaxis(file[name][...], field.num_dim, 0))
        found[name] = np.concatenate(rows)
    return found


@pytest.mark.slow
@each("seed", range(40))
def test_random_files_and_fields(tmp_path, seed):
    paths, fields = write_files(tmp_path, seed)
    expected, random = whole(paths, fields), Random(seed)
    with AsyncReader(
        hdf5_path=paths,
        fields=fields,
        batch_size=random.choice([1, 3, 16, 64]),
        shuffle=random.choice([False, "full", "window"]),
        num_threads=random.choice([0, 1, 3]),
        io=random.choice(IO),
        allow_external=tmp_path,
        device="cpu",
        timeout=WAIT_SECONDS,
    ) as reader:
        for _ in range(2):
            for batch in reader:
                for name, rows in expected.items():
                    assert_same_bits(batch[name], rows[batch.index])


def test_members_of_compounds_that_lie_elsewhere_in_each_file(tmp_path):
    """Of one name, one type and one size, in compounds of one size."""
    rng, expected = np.random.default_rng(SEED), []
    for number, names in enumerate((["a", "b", "c"], ["c", "a", "b"])):
        dtype = np.dtype([(name, "<i4") for name in names])
        values = rng.integers(0, 99, (20, 3)).astype("<i4").view(dtype).reshape(20)
        expected.append(values["a"])
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=values, chunks=(5,), compression="gzip")
    with AsyncReader(
        hdf5_path=[tmp_path / "0.h5", tmp_path / "1.h5"], fields={"a": "data/a"}, batch_size=7,
        shuffle="full", device="cpu",
    ) as reader:  # fmt: skip
        for batch in reader:
            assert_same_bits(batch.a, np.concatenate(expected)[batch.index])


@each("shuffle", [False, "full"])
def test_virtual_datasets_of_windows_splits_and_gaps(tmp_path, shuffle, monkeypatch):
    """Of a source only what is mapped is decoded, and each chunk once a batch."""
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 1000, (60, 12, 5)).astype("<i4")
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file.create_dataset("data", data=values, chunks=(6, 4, 5), compression="gzip")
    window = h5py.VirtualLayout((60, 3, 5), "<i4")
    source = h5py.VirtualSource(str(tmp_path / "source.h5"), "data", (60, 12, 5))
    window[:] = source[:, 5:8]
    split = h5py.VirtualLayout((70, 12, 5), "<i4")
    rows = rng.permutation(60)[:45]
    for k, row in enumerate(rows.tolist()):
        split[k + k // 9] = source[row]
    halves = h5py.VirtualLayout((60, 10, 5), "<i4")
    halves[:, :4] = source[:, 8:]
    halves[:, 6:, :3] = source[:, :4, 2:]
    with h5py.File(tmp_path / "whole.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("window", window, fillvalue=-1)
        file.create_virtual_dataset("split", split, fillvalue=-2)
        file.create_virtual_dataset("halves", halves, fillvalue=-3)
    monkeypatch.setattr(H5pyRows, "execute", None)
    for name, mapped in (("window", 10), ("split", 30), ("halves", 20)):
        with h5py.File(tmp_path / "whole.h5") as file:
            expected = file[name][...]
        with AsyncReader(
            hdf5_path=tmp_path / "whole.h5", data_field=name, labels_field=None, batch_size=70,
            shuffle=shuffle, device="cpu", num_threads=0,
        ) as reader:  # fmt: skip
            batch = reader.get_next_batch()
            assert batch.size == len(expected)
            assert_same_bits(batch.data, expected[batch.index])
            assert reader.stats().decoded_chunks <= mapped


def test_sources_that_are_missing(tmp_path):
    rng = np.random.default_rng(SEED)
    layout = h5py.VirtualLayout((30, 4), "<f4")
    for number in range(3):
        values = rng.random((10, 4)).astype("<f4")
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=values, chunks=(3, 4), compression="gzip")
        layout[10 * number : 10 * number + 10] = h5py.VirtualSource(
            str(tmp_path / f"{number}.h5"), "data", (10, 4)
        )
    with h5py.File(tmp_path / "whole.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("data", layout, fillvalue=7)
    (tmp_path / "1.h5").unlink()
    with h5py.File(tmp_path / "whole.h5") as file:
        expected = file["data"][...]
    assert (expected[10:20] == 7).all()
    with AsyncReader(
        hdf5_path=tmp_path / "whole.h5", labels_field=None, batch_size=8, shuffle="full",
        allow_missing=True, device="cpu",
    ) as reader:  # fmt: skip
        for batch in reader:
            assert_same_bits(batch.data, expected[batch.index])


def test_a_file_of_before_1970(tmp_path):
    path = tmp_path / "old.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
    os.utime(path, ns=(-(10**18), -(10**18) - 7))
    with AsyncReader(hdf5_path=path, labels_field=None, batch_size=6, device="cpu") as reader:
        assert sorted(n for batch in reader for n in batch.data.tolist()) == list(range(20))
        assert reader.stats().fallback_reads == 0


# --- rows that are left, among others that are read ----------------------------------------------


@each("num_threads", [0, 3])
@each("shuffle", [False, "full", "window"])
@each("transform", [False, True])
def test_rows_that_are_left_among_others(tmp_path, num_threads, shuffle, transform):
    """Each second file has a filter that only Python can undo; rows are transformed all alike."""
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 200, (90, 4, 5, 3), np.uint8)
    paths = [tmp_path / f"{number}.h5" for number in range(6)]
    for number, path in enumerate(paths):
        here = slice(15 * number, 15 * number + 15)
        with h5py.File(path, "w") as file:
            options = {"scaleoffset": 0} if number % 2 else {"compression": "gzip"}
            options = {} if number == 4 else {"chunks": (2, 4, 5, 3), **options}
            file.create_dataset("data", data=values[here], **options)
            file["labels"] = np.arange(here.start, here.stop)
    expected, options = values, {}
    if transform:
        options = {"axes": (0, 3, 1, 2), "scale": 0.5, "offset": (1.0, 2.0, 3.0), "dtype": "f4"}
        expected = values.transpose(0, 3, 1, 2).astype("f4") * np.float32(0.5)
        expected += np.array([1, 2, 3], "f4").reshape(3, 1, 1)
    with AsyncReader(
        hdf5_path=paths,
        fields={"data": Field("data", **options), "labels": "labels"},
        batch_size=20,
        shuffle=shuffle,
        num_threads=num_threads,
        device="cpu",
        timeout=WAIT_SECONDS,
    ) as reader:
        for _ in range(2):
            for batch in reader:
                assert_same_bits(batch.data, expected[batch.index])
                assert np.array_equal(batch.labels, batch.index)


def test_chunks_are_kept_beside_others_that_are_refused(tmp_path, core):
    """A field that can only be had out of a map is left; another one's chunks stay decoded."""
    path = tmp_path / "data.h5"
    values = np.arange(400, dtype="<i4").reshape(40, 10)
    with h5py.File(path, "w") as file:
        file["columns"] = values.T
        file.create_dataset("data", data=values, chunks=(8, 10), compression="gzip")
    fields = {"columns": Field("columns", 1), "data": Field("data")}
    layouts = list(read_layouts(path, fields).values())
    with Collected(core, layouts, 40, io="pread", kept_nbytes=1 << 20) as collected:
        for _ in range(3):
            collected.read(range(1, 40, 2))
            assert list(collected.left()) == [0]
            assert_same_bits(collected.arrays[1][:20], values[1::2])
        assert collected.scratch.worker(core).struct.done.decoded_chunks == 5


@each("io", ["auto", "map"])
def test_columns_of_a_file_that_is_not_in_the_page_cache(tmp_path, core, io):
    path = tmp_path / "data.h5"
    values = np.random.default_rng(SEED).integers(0, 99, (64, 1 << 14)).astype("<i4")
    with h5py.File(path, "w") as file:
        file["data"] = values
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    layouts = list(read_layouts(path, {"data": Field("data", 1)}).values())
    with Collected(core, layouts, 9, io=io) as collected:
        samples = [5, 1 << 13, 3, 0, 77, (1 << 14) - 1]
        assert collected.read(samples) == 0
        assert_same_bits(collected.arrays[0][:6], values.T[samples])


# --- decoded chunks that are kept ----------------------------------------------------------------


def gzip_dataset(path, samples=120, chunk=8, width=6):
    values = np.random.default_rng(SEED).integers(0, 99, (samples, width)).astype("<i4")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(chunk, width), compression="gzip")
    return values, list(read_layouts(path, {"data": Field("data")}).values())


def test_as_many_chunks_are_kept_as_the_budget_has_room_for(tmp_path, core):
    """What a chunk takes beside its bytes counts, too: else small ones would take all memory."""
    values, layouts = gzip_dataset(tmp_path / "data.h5", samples=40, chunk=2, width=1)
    for budget, kept in ((10 * (8 + 128), 10), (10 * 8, 2), (0, 2)):
        with Collected(core, layouts, 20, io="auto", kept_nbytes=budget) as collected:
            done = collected.scratch.worker(core).struct.done
            for chunk in range(20):
                assert collected.read([2 * chunk]) == 0
            assert done.decoded_chunks == 20
            for chunk in range(20 - kept, 20):
                assert collected.read([2 * chunk + 1]) == 0
                assert_same_bits(collected.arrays[0][:1], values[2 * chunk + 1 :][:1])
            assert done.decoded_chunks == 20
            assert collected.read([0]) == 0
            assert done.decoded_chunks == 21


def read_in_threads(core, collected, num_threads, rounds, each_batch):
    """Read random batches in threads, each with a slot of its own; return what went wrong."""
    wrong, slots = [], []
    for _ in range(num_threads):
        other = object.__new__(Collected)
        other.__dict__.update(collected.__dict__)
        other.scratch = Scratch.allocate(*ScratchSize.of(collected.layouts))
        other.new_slot()
        slots.append(other)

    def work(number):
        random = Random(SEED + number)
        try:
            for _ in range(rounds):
                each_batch(slots[number], random)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return wrong


@each("budget", [0, 700, 1 << 20])
@each("io", IO)
def test_many_threads_share_decoded_chunks(tmp_path, core, budget, io):
    """With budgets of two chunks, of some, and of all; and forgotten now and then."""
    values, layouts = gzip_dataset(tmp_path / "data.h5")
    with Collected(core, layouts, 25, io=io, kept_nbytes=budget) as collected:

        def one(slot, random):
            samples = [random.randrange(120) for _ in range(random.randint(1, 25))]
            assert slot.read(samples, cuts=[random.randint(0, 9)], threads=2) == 0
            assert_same_bits(slot.arrays[0][: len(samples)], values[samples])
            if random.random() < 0.1:
                slot.collection.tables.forget_chunks()

        assert not read_in_threads(core, collected, 4, 60, one)


# --- more sources than may be open ---------------------------------------------------------------


def many_files(folder, count, samples=3):
    values = np.random.default_rng(SEED).integers(0, 99, (count * samples, 5)).astype("<i4")
    paths = [folder / f"{number}.h5" for number in range(count)]
    for number, path in enumerate(paths):
        here = values[number * samples : (number + 1) * samples]
        with h5py.File(path, "w") as file:
            if number % 3:
                file["data"] = here
            else:
                file.create_dataset("data", data=here, chunks=(2, 5), compression="gzip")
    layouts = layouts_of(paths, {"data": Field("data")})
    return paths, values, layouts


@each("io", IO)
@each("most_files", [1, 4, 100])
def test_more_files_than_may_be_open(tmp_path, core, io, most_files):
    paths, values, layouts = many_files(tmp_path, 40)
    with Collected(core, layouts, 60, io=io, most_files=most_files) as collected:
        assert not list(collected.collection.tables.open_ahead(lambda: False))

        def one(slot, random):
            samples = [random.randrange(len(values)) for _ in range(60)]
            assert slot.read(samples) == 0
            assert_same_bits(slot.arrays[0], values[samples])

        assert not read_in_threads(core, collected, 4, 20, one)
        assert len(open_descriptors(tmp_path)) <= most_files
        if most_files == 100:
            assert len(open_descriptors(tmp_path)) == len(paths)
        elif io == "map":  # descriptors of mapped files are given back at once
            assert not open_descriptors(tmp_path)
    assert not open_descriptors(tmp_path)


@pytest.mark.slow
@each("io", IO)
def test_a_process_without_descriptors_left(tmp_path, io):
    """Files that nobody uses are closed, and the budget is smaller from then on."""
    many_files(tmp_path, 40)
    code = f"""
import os, resource, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import numpy as np
from pathlib import Path
from collecting import Collected, layouts_of
from h5async.core.binding import load_core
from h5async import Field
folder = Path({str(tmp_path)!r})
paths = [folder / f"{{n}}.h5" for n in range(40)]
layouts = layouts_of(paths, {{"data": Field("data")}})
import h5py
expected = np.concatenate([h5py.File(p)["data"][...] for p in paths])
with Collected(load_core(), layouts, 120, io={io!r}, most_files=1000) as collected:
    collected.read([0])
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, used + 5))
    for _ in range(3):
        assert collected.read(range(120)) == 0
        assert np.array_equal(collected.arrays[0], expected)
print("done")
"""
    assert run_python(code) == "done"


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- files that change meanwhile -----------------------------------------------------------------


@each("io", IO)
@each("most_files", [2, 100])
def test_files_that_are_replaced_truncated_or_touched(tmp_path, core, io, most_files):
    """What is not what was indexed is left, with all its rows, and nothing else is."""
    paths, values, layouts = many_files(tmp_path, 12)
    samples = list(range(35, -1, -1))
    with Collected(core, layouts, 36, io=io, most_files=most_files) as collected:
        for _ in range(2):
            assert collected.read(samples) == 0
        replaced, truncated, touched, gone = paths[1], paths[5], paths[7], paths[9]
        other = tmp_path / "other"
        other.write_bytes(replaced.read_bytes())
        other.replace(replaced)
        os.truncate(truncated, truncated.stat().st_size // 2)
        os.utime(touched)
        gone.unlink()
        changed = {number for number, path in enumerate(paths) if path in (replaced, truncated)}
        changed |= {paths.index(touched), paths.index(gone)}
        for _ in range(3):
            assert collected.read(samples) > 0
            left = {samples[row] // 3 for row in collected.left()[0]}
            assert left == changed
            for row, sample in enumerate(samples):
                if sample // 3 not in changed:
                    assert_same_bits(collected.arrays[0][row], values[sample])
        collected.collection.tables.restamp(str(touched), FileStamp.of(touched))
        assert collected.read(range(21, 24)) == 0
        assert_same_bits(collected.arrays[0][:3], values[21:24])


@each("io", ["auto", "pread"])
def test_a_file_that_is_rewritten_while_threads_read_it(tmp_path, core, io):
    """A batch is of one state of the file, or is left; and once it is known, all of it is read."""
    path = tmp_path / "data.h5"
    _, layouts = gzip_dataset(path)
    states = [np.full((120, 6), value, "<i4") for value in range(1, 6)]
    contents = []
    for state in states:  # chunks lie where they did, because they are as long as the others
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file.create_dataset("data", data=state, chunks=(8, 6), compression="gzip")
        contents.append((tmp_path / "other.h5").read_bytes())
    assert len(set(map(len, contents))) == 1
    path.write_bytes(contents[0])
    layouts = list(read_layouts(path, {"data": Field("data")}).values())
    stop = threading.Event()
    good = [0]

    def rewrite():
        for content in itertools.cycle(contents):
            if stop.is_set():
                return
            with path.open("r+b") as file:
                file.write(content)
            collected.collection.tables.forget_chunks()
            collected.collection.tables.restamp(str(path), settled(partial(FileStamp.of, path)))

    def one(slot, random):
        samples = sorted(random.sample(range(1, 120), 25))
        if slot.read(samples) == 0:
            good[0] += 1
            assert len(np.unique(slot.arrays[0])) == 1

    with Collected(core, layouts, 25, io=io, kept_nbytes=1 << 20) as collected:
        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            wrong = read_in_threads(core, collected, 3, 150, one)
        finally:
            stop.set()
            writer.join(WAIT_SECONDS)
        assert not wrong
        collected.collection.tables.restamp(str(path), settled(partial(FileStamp.of, path)))
        collected.collection.tables.forget_chunks()
        assert collected.read(range(25)) == 0, "nothing stays refused"


@pytest.mark.slow
@each("workers", ["thread", "process"])
def test_a_reader_of_files_that_are_rewritten(tmp_path, workers):
    """It goes on where chunks lie as they did, with a warning, and gives the new values."""
    paths, values, _ = many_files(tmp_path, 9)
    with AsyncReader(
        hdf5_path=paths, labels_field=None, batch_size=9, num_threads=2, workers=workers,
        device="cpu", timeout=WAIT_SECONDS,
    ) as reader:  # fmt: skip
        for batch in reader:
            assert_same_bits(batch.data, values[batch.index])
        with h5py.File(paths[4], "r+") as file:
            file["data"][...] = -7
        values[12:15] = -7
        with pytest.warns(FileChangedWarning, match="was changed while a reader had it open"):
            found = last_of(reader, 3)  # batches that were under way have the former values
        for index, data in found:
            assert_same_bits(data, values[index])
        os.truncate(paths[4], 100)
        with pytest.raises(H5AsyncError, match=r"4\.h5"):
            last_of(reader, 3)


def last_of(reader, epochs):
    """Read some epochs; return the indices and the rows of all batches of the last one."""
    for _ in range(epochs):
        found = [(batch.index.copy(), batch.data.copy()) for batch in reader]
    return found


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_takes_no_more_memory_than_is_counted_for_it(tmp_path, core):
    _, values, layouts = many_files(tmp_path, 40)
    for samples in (range(120), Random(SEED).sample(range(120), 120), [7] * 120, range(0, 120, 3)):
        with Collected(core, layouts, 120) as collected:
            assert collected.read(samples) == 0
            assert_same_bits(collected.arrays[0][: len(samples)], values[list(samples)])
            plan = collected.batch.plan
            nbytes = plan.num_items * ctypes.sizeof(core.Item)
            nbytes += 24 * plan.num_runs + 2 * ctypes.sizeof(core.Wanted) * plan.num_items
            assert nbytes <= len(samples) * PLANNED_ROW_NBYTES


@pytest.mark.parametrize("is_closed", [False, True])
def test_memory_of_a_plan_goes_with_its_batch(tmp_path, core, is_closed):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(100)
    with Collected(core, layouts_of([tmp_path / "a.h5"], {"x": Field("x")}), 100) as collected:
        plan = collected.batch.plan
        assert collected.plan(range(100))
        if is_closed:
            collected.collection.close()
        assert plan.items
        del collected.batch
        assert not plan.items


def test_more_readers_come_and_go_than_there_are_descriptors(tmp_path):
    """A reader that is closed, or cannot be made, leaves nothing open."""
    paths, _, _ = many_files(tmp_path, 6)
    for number in range(30):
        with contextlib.suppress(H5AsyncError):
            with AsyncReader(
                hdf5_path=paths, labels_field=None, batch_size=5, device="cpu",
                num_threads=number % 3,
            ) as reader:  # fmt: skip
                next(iter(reader))
        assert not open_descriptors(tmp_path)
