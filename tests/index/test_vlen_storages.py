"""Elements of variable length whose references are stored in other ways than plain ones.

They lie in compact datasets, in the sources of virtual ones, and in fill values. HDF5 reads a fill
value of variable length only from a file that it may write to, so the truth is read from a copy.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from h5async import AsyncReader, DatasetError, ReadError, UnsafeFileError
from h5async.errors import BudgetError
from h5async.index.links import Reach
from h5async.io.indexreferences import NONSENSE, Format
from h5async.io.references import header_messages
from h5async.io.stores import LocalSource
from h5async.opening.filevalues import heap_layout

TEXT, INTEGERS = h5py.string_dtype(), h5py.vlen_dtype(np.dtype("i4"))
STORAGES = ("contiguous", "chunked", "gzip", "shuffled", "compact")


def element(rng: np.random.Generator, dtype: Any) -> Any:
    count = int(rng.integers(0, 9)) * int(rng.choice([1, 1, 1, 200]))
    if dtype is TEXT:
        return "".join(rng.choice(list("abcä😀"), count))
    return rng.integers(-(1 << 31), 1 << 31, count).astype("i4")


def put(
    parent: h5py.Group, name: str, shape: tuple[int, ...], dtype: Any, storage: str, fill: Any
) -> h5py.Dataset:
    """Make a dataset; of h5py's own functions, none makes a compact one of variable length."""
    plist = h5p.create(h5p.DATASET_CREATE)
    if storage == "compact":
        plist.set_layout(h5d.COMPACT)
    elif storage != "contiguous":
        plist.set_chunk(tuple(min(3 + axis, max(1, n)) for axis, n in enumerate(shape)))
        if storage == "shuffled":
            plist.set_shuffle()
        if storage != "chunked":
            plist.set_deflate(4)
    if fill is not None:
        plist.set_fill_value(np.array(fill, TEXT))
    kind = h5t.py_create(dtype, logical=True)
    found = h5d.create(parent.id, name.encode(), kind, h5s.create_simple(shape), plist)
    return h5py.Dataset(found)


def write_some(data: h5py.Dataset, rng: np.random.Generator, dtype: Any) -> None:
    """Write a part of the elements, or all."""
    share = rng.choice([0.0, 0.2, 1.0])
    for index in np.ndindex(data.shape):
        if rng.random() < share:
            data[index] = element(rng, dtype)


def make_random(folder: Path, seed: int) -> None:
    """Write ``a.h5`` with datasets ``0``, ``1``, ..., and other files that it refers to."""
    rng = np.random.default_rng(seed)
    dtype = TEXT if rng.random() < 0.6 else INTEGERS
    versions = [None, "earliest", "v110", "latest"]

    def opened(name: str) -> h5py.File:
        nbytes = int(rng.choice([0, 512, 1024]))
        libver = versions[int(rng.integers(4))]
        return h5py.File(folder / name, "w", userblock_size=nbytes, libver=libver)

    def fill() -> Any:
        return rng.choice(["", "filled", "ü" * 50, None]) if dtype is TEXT else None

    def plain(parent: h5py.Group, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        data = put(parent, name, shape, dtype, str(rng.choice(STORAGES)), fill())
        for number in range(int(rng.integers(0, 9))):  # so that the header goes on elsewhere
            data.attrs[f"attribute {number}"] = "x" * 40
        write_some(data, rng, dtype)
        return data

    with opened("a.h5") as file:
        names, of_virtual = [], fill()
        for number in range(int(rng.integers(1, 4))):  # files of sources
            with opened(f"s{number}.h5") as other:
                for part in range(int(rng.integers(1, 3))):
                    shape = (int(rng.integers(1, 12)),) + (5,) * bool(rng.random() < 0.2)
                    plain(other, f"part{part}", shape)
                    names.append((f"s{number}.h5", f"part{part}", shape))
        shape = (int(rng.integers(1, 12)),)
        plain(file, "own", shape)
        names.append((".", "own", shape))
        for number in range(4):
            if rng.random() < 0.3:
                plain(file, str(number), (int(rng.integers(0, 40)),))
                continue
            if number and of_virtual is None and rng.random() < 0.5:
                names.append((".", "0", file["0"].shape))
            virtual(file, str(number), dtype, names, of_virtual, rng)


def virtual(
    file: h5py.File, name: str, dtype: Any, names: Any, fill: Any, rng: np.random.Generator
) -> None:
    """Write a virtual dataset of runs, single samples and every other sample of sources."""
    count = int(rng.integers(5, 40))
    layout, at = h5py.VirtualLayout((count,), dtype), 0
    while at < count:
        source_file, source, shape = names[int(rng.integers(len(names)))]
        if shape[0] == 0:
            break
        begin = int(rng.integers(0, shape[0]))
        step = int(rng.integers(1, 4))
        length = min(len(range(begin, shape[0], step)), len(range(at, count, step)))
        found = h5py.VirtualSource(source_file, source, shape, dtype=dtype)
        column = (int(rng.integers(0, 5)),) * (len(shape) - 1)
        length = min(length, int(rng.integers(1, 9)))
        end = begin + (length - 1) * step + 1
        mine = slice(at, at + length) if rng.random() < 0.7 else slice(at, at + length * step, step)
        if mine.start + (length - 1) * (mine.step or 1) >= count:
            mine = slice(at, at + length)
        layout[mine] = found[(slice(begin, end, step), *column)]
        at = mine.stop + int(rng.choice([0, 0, 0, 2]))
    if fill is not None:
        layout.dcpl.set_fill_value(np.array(fill, TEXT))
    file.create_virtual_dataset(name, layout)


def truths(folder: Path, copy: Path, name: str = "a.h5") -> dict[str, list[Any]]:
    shutil.copytree(folder, copy)
    with h5py.File(copy / name, "r+") as file:
        return {
            key: [np.frombuffer(v, "u1") if isinstance(v, bytes) else v for v in data[()]]
            for key, data in file.items()
            if data.ndim == 1
        }


def read(path: Any, name: str, **options: Any) -> list[Any]:
    """Return the samples of an epoch in the order of the file."""
    options = {"batch_size": 7, "device": "cpu", "num_threads": 2, **options}
    with AsyncReader(hdf5_path=path, fields={"x": name}, **options) as reader:
        found = {}
        for batch in reader:
            found |= zip(batch.index.tolist(), (values.copy() for values in batch.x), strict=True)
        assert len(found) == reader.num_samples
    return [found[number] for number in range(len(found))]


def assert_equal(found: list[Any], truth: list[Any]) -> None:
    assert len(found) == len(truth)
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == other.dtype or not other.size
        assert one.tobytes() == other.tobytes()


SEEDS = range(150)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_files(tmp_path, seed):
    folder = tmp_path / "files"
    folder.mkdir()
    make_random(folder, seed)
    for name, truth in truths(folder, tmp_path / "copy").items():
        assert_equal(read(folder / "a.h5", name), truth)


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "full", "num_threads": 0},
        {"shuffle": "window", "io": "pread"},
        {"workers": "process"},
        {"index_cache": True},
    ],
    ids=str,
)
def test_other_ways_of_reading(tmp_path, seed, options):
    folder = tmp_path / "files"
    folder.mkdir()
    make_random(folder, seed)
    if "index_cache" in options:
        options = {"index_cache": tmp_path}
    found = truths(folder, tmp_path / "copy")
    # (A virtual dataset of several files is best tried: each helper process takes a while.)
    for name, truth in list(found.items())[-1 if "workers" in options else 0 :]:
        for _ in range(1 + ("index_cache" in options)):  # the second time by the saved index
            assert_equal(read(folder / "a.h5", name, **options), truth)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


def test_what_is_open_for_writing_is_refused(path):
    with h5py.File(path, "w") as file:
        put(file, "x", (3,), TEXT, "compact", None)
        with pytest.raises(DatasetError, match="open for writing"):
            read(path, "x")


def test_attributes_behind_which_the_header_goes_on(path):
    """Fill value and compact values lie in continuations, also of the newest form."""
    for libver in ("earliest", "latest"):
        with h5py.File(path, "w", libver=libver, track_order=True) as file:
            for name, storage in (("x", "compact"), ("y", "chunked")):
                data = put(file, name, (50,), TEXT, storage, "filled")
                for number in range(7):
                    data.attrs[f"{number}"] = "a" * 5000
                    data.attrs[f"{number}"] = "b"
                data[7] = "seven"
        truth = [b"filled"] * 50
        truth[7] = b"seven"
        for name in ("x", "y"):
            assert [bytes(one) for one in read(path, name)] == truth


def mapped(file: h5py.File, names: list[tuple[str, str]], dtype: Any = TEXT) -> None:
    """Write a virtual dataset, two samples of each source."""
    layout = h5py.VirtualLayout((2 * len(names),), dtype)
    for number, (source_file, name) in enumerate(names):
        source = h5py.VirtualSource(source_file, name, (2,), dtype=dtype)
        layout[2 * number : 2 * number + 2] = source
    file.create_virtual_dataset("x", layout)


def test_sources_are_one_heap_for_each_run_of_a_file(path):
    for name in ("b.h5", "c.h5"):
        with h5py.File(path.with_name(name), "w") as file:
            for source in ("0", "1"):
                file[source] = [name + source, "ä"]
    with h5py.File(path, "w") as file:
        mapped(file, [("b.h5", "1"), ("b.h5", "0"), ("c.h5", "0"), ("b.h5", "0")])
    found = heap_layout("x", path, Reach())
    assert [Path(heap.file).name for heap in found.heaps] == ["b.h5", "c.h5", "b.h5"]
    assert [heap.first_sample for heap in found.heaps] == [0, 4, 6]
    with AsyncReader(hdf5_path=[path, path], fields={"x": "x"}, batch_size=99) as reader:
        texts = reader.get_next_batch().x.to_strings()
    assert texts == ["b.h51", "ä", "b.h50", "ä", "c.h50", "ä", "b.h50", "ä"] * 2


def test_sources_must_be_alike_there_and_permitted(path, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name, dtype in (("b.h5", TEXT), ("c.h5", INTEGERS), ("outside/d.h5", TEXT)):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("0", (2,), dtype)
    inside = tmp_path / "inside"
    inside.mkdir()
    cases = [
        (path, "c.h5", DatasetError, "source is of another datatype"),
        (path, "z.h5", DatasetError, "z.h5, which is missing"),
        (inside / "a.h5", "../outside/d.h5", UnsafeFileError, "d.h5"),
    ]
    for at, source, kind, message in cases:
        with h5py.File(at, "w") as file:
            mapped(file, [(source, "0")])
        with pytest.raises(kind, match=message):
            read(at, "x")
    with h5py.File(path, "w") as file:
        mapped(file, [("z.h5", "0"), ("b.h5", "0")])
    assert [bytes(one) for one in read(path, "x", allow_missing=True)] == [b""] * 4


def test_an_unlimited_mapping(path):
    with h5py.File(path.with_name("b.h5"), "w") as file:
        file.create_dataset("0", data=["one", "two", "three"], dtype=TEXT, maxshape=(None,))
    layout = h5py.VirtualLayout((1,), TEXT, maxshape=(None,))
    source = h5py.VirtualSource("b.h5", "0", (1,), dtype=TEXT, maxshape=(None,))
    layout[: h5s.UNLIMITED] = source[: h5s.UNLIMITED]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    assert [bytes(one) for one in read(path, "x")] == [b"one", b"two", b"three"]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["compact", "chunked", "virtual"])
def test_damaged_references(path, storage):
    """Those of compact values, of a fill value, and of a source in another file."""
    other = path.with_name("b.h5") if storage == "virtual" else path
    with h5py.File(other, "w") as file:
        kind = "chunked" if storage == "virtual" else storage
        data = put(file, "0", (2,), TEXT, kind, "filled" if storage == "chunked" else None)
        if storage != "chunked":
            data[...] = "filled"
    if storage == "virtual":
        with h5py.File(path, "w") as file:
            mapped(file, [("b.h5", "0")])
    name = "x" if storage == "virtual" else "0"
    image = other.read_bytes()
    heap = image.index(b"GCOL")
    reference = struct.pack("<IQ", 6, heap)  # (HDF5 checks a fill value, as it opens a dataset.)
    by_hdf5 = "|metadata cannot be read" if storage == "chunked" else ""
    assert reference in image
    damages = [
        (struct.pack("<IQ", 1 << 31, heap), "do not fit into the file"),
        (struct.pack("<IQ", 7, heap), "instead of 7"),
        (struct.pack("<IQ", 6, heap + 8), "has no signature"),
        (struct.pack("<IQ", 6, 1 << 60), "too large"),
    ]
    for stored, message in damages:
        other.write_bytes(image.replace(reference, stored))
        with pytest.raises(ReadError, match=message + by_hdf5) as caught:
            read(path, name)
        assert str(other) in str(caught.value)
    other.write_bytes(image)
    assert [bytes(one) for one in read(path, name)] == [b"filled"] * 2


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_damaged_header_is_no_crash(path, libver):
    """HDF5 itself crashes at some of them, so that only our own walk is tried."""
    with h5py.File(path, "w", libver=libver) as file:
        data = put(file, "0", (2,), TEXT, "compact", "filled")
        data.attrs["long"] = "a" * 3000
        begin, widths = h5py.h5o.get_info(data.id).addr, file.id.get_create_plist().get_sizes()
    image, rng = path.read_bytes(), np.random.default_rng(0)
    for nth in range(400):
        damaged = bytearray(image)
        for _ in range(nth and 3):
            damaged[begin + int(rng.integers(0, 180))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        with path.open("rb") as file:
            try:
                source = LocalSource(file.fileno())
                found = list(header_messages(source.read, begin, Format(0, *widths)))
            except NONSENSE:
                assert nth
            else:
                assert sum(len(body) for _, _, _, body in found) < 64 * len(image)


@pytest.mark.slow
def test_many_runs_are_bounded_by_what_files_store(path, monkeypatch):
    """A small file may map as many samples as it likes, in turns of two files."""
    for name in ("b.h5", "c.h5"):
        with h5py.File(path.with_name(name), "w") as file:
            file.create_dataset("0", (1 << 11,), TEXT, chunks=(1 << 11,))
    layout = h5py.VirtualLayout((1 << 12,), TEXT)
    for number, name in enumerate(("b.h5", "c.h5")):
        layout[number::2] = h5py.VirtualSource(name, "0", (1 << 11,), dtype=TEXT)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    assert len(heap_layout("x", path, Reach()).heaps) == 1 << 12
    monkeypatch.setattr("h5async.index.links._LEAST_NBYTES", 1 << 20)
    with pytest.raises(BudgetError, match="its runs of samples"):
        heap_layout("x", path, Reach())


def test_stored_headers_that_are_not_known_are_refused(path, monkeypatch):
    with h5py.File(path, "w") as file:
        put(file, "0", (2,), TEXT, "compact", None)
    monkeypatch.setattr("h5async.io.references._MOST_BLOCKS", 0)
    with pytest.raises(DatasetError, match="object header of an unknown form"):
        read(path, "0")


def test_a_source_with_gaps_of_its_own_fill_value_is_refused(path):
    """Only HDF5 can fill these, and it would give no references."""
    for fill in ("other", None):
        with h5py.File(path, "w") as file:
            file["0"] = ["a", "b"]
            for name, source, text in (("inner", "0", fill), ("x", "inner", None)):
                layout = h5py.VirtualLayout((4,), TEXT)
                count = file[source].shape[0] if name == "x" else 2
                layout[:count] = h5py.VirtualSource(".", source, (count,), dtype=TEXT)
                if text is not None:
                    layout.dcpl.set_fill_value(np.array(text, TEXT))
                file.create_virtual_dataset(name, layout)
        if fill == "other":
            with pytest.raises(DatasetError, match="the core cannot take its references"):
                read(path, "x")
        else:
            assert [bytes(one) for one in read(path, "x")] == [b"a", b"b", b"", b""]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_without_the_core(tmp_path, seed):
    """HDF5 reads all, and refuses fill values of a file that it may not write to."""
    folder = tmp_path / "files"
    folder.mkdir()
    make_random(folder, seed)
    code = """
import sys, h5async, h5py, numpy as np
sys.path.insert(0, sys.argv[2])
from index.test_vlen_storages import assert_equal, read
with h5py.File(sys.argv[1]) as file:
    names = [name for name, data in file.items() if data.ndim == 1]
for name in names:
    try:
        with h5py.File(sys.argv[1]) as file:
            values = list(file[name][()])
    except OSError:
        continue
    truth = [np.frombuffer(v, "u1") if isinstance(v, bytes) else v for v in values]
    try:
        found = read(sys.argv[1], name)
    except h5async.DatasetError as error:
        assert "is decoded by HDF5" in str(error), error
    else:
        assert_equal(found, truth)
        print(name)
"""
    environ = {**os.environ, "H5ASYNC_CORE": "0"}
    tests = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-W", "ignore", "-c", code, str(folder / "a.h5"), tests]
    ran = subprocess.run(
        arguments, env=environ, capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
