"""Selections of files of `open_file`, compared with h5py: keys, storages, errors."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from corpus import QUIRKS, Quirk
from hypothesis import given
from memorystore import MemoryStore
from typer.testing import CliRunner

import h5async
from h5async import (
    ConfigError,
    DamagedError,
    DatasetError,
    H5AsyncError,
    ReaderClosedError,
    ReadError,
    SelectionError,
)
from h5async.arrays.boxreading import Threads
from h5async.arrays.lazydataset import Dataset
from h5async.cli import app
from h5async.index.datasets import Indexer

SHAPE = (23, 12, 9)
STORED: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (4, 5, 3)},
    "gzip": {"chunks": (5, 12, 4), "compression": "gzip", "shuffle": True},
    "rows": {"chunks": (1, 12, 9), "compression": "gzip"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("arrays") / "several.h5"
    rng = np.random.default_rng(5)
    values = rng.integers(0, 1 << 30, SHAPE)
    with h5py.File(found, "w") as file:
        for name, options in STORED.items():
            file.create_dataset(name, data=values, **options)
        file.create_dataset("sparse", SHAPE, "f4", chunks=(2, 3, 4), fillvalue=7)[5:7] = 1
        file.create_dataset("group/text", data=["a", "bcd", "", "ä"])
        file.create_dataset("group/scalar", data=5)
        arrays = file.create_dataset("group/arrays", (6,), np.dtype((">i2", (2, 3))))
        arrays[...] = np.arange(36).reshape(6, 2, 3)
        file.create_dataset("group/empty", data=h5py.Empty("f4"))
        file.create_dataset("flags", data=rng.random(50) > 0.5)
        pairs = np.zeros(30, [("a", "f4"), ("b", "S3"), ("c", "i2", (2,))])
        pairs["a"], pairs["b"], pairs["c"] = rng.random(30), b"xy", rng.integers(0, 99, (30, 2))
        file.create_dataset("pairs", data=pairs, chunks=(7,), compression="gzip")
        layout = h5py.VirtualLayout((46, 12, 9), "i8")
        layout[:23] = h5py.VirtualSource(file["gzip"])
        layout[23:40] = h5py.VirtualSource(file["chunked"])[:17]
        file.create_virtual_dataset("virtual", layout, fillvalue=-1)
        file["gzip"].attrs["units"] = "m"
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    for name in expected.dtype.names or ():
        assert_same(np.array(found[name]), np.array(expected[name]))
    if not expected.dtype.names:
        np.testing.assert_array_equal(found, expected)


def assert_answers_as_h5py(found: Any, expected: Any, key: Any) -> None:
    try:
        value = expected[key]
    except (IndexError, TypeError, ValueError, OSError) as error:  # OSError: a list leads out of it
        if "don't have hyperslab" in str(error):
            return  # a list beside an empty slice, which is empty
        with pytest.raises(SelectionError):
            found[key]
    else:
        assert_same(found[key], value)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw a key of any kind, of which h5py refuses some."""
    parts: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        bounds = st.none() | st.integers(-extent - 2, extent + 2)
        indices = st.lists(st.integers(-1, extent - 1), max_size=5)
        mask = st.lists(st.booleans(), min_size=extent, max_size=extent)
        part = st.one_of(
            st.integers(-extent - 1, extent),
            st.builds(slice, bounds, bounds, st.none() | st.integers(-1, 7)),
            st.builds(slice, bounds, bounds),
            indices,
            indices.map(lambda some: sorted(set(map(abs, some)))),
            mask.map(np.array),
        )
        parts.append(draw(part))
    if draw(st.integers(0, 4)) == 0:
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@pytest.mark.parametrize("name", [*STORED, "sparse", "virtual", "flags", "pairs"])
def test_keys_select_what_they_do_in_h5py(path: Path, name: str):
    with h5py.File(path) as expected, h5async.open_file(path, num_threads=2) as found:

        @given(st.lists(keys(expected[name].shape), min_size=4, max_size=4))
        def check(several: list[Any]):
            for key in several:
                assert_answers_as_h5py(found[name], expected[name], key)

        check()


@pytest.mark.parametrize("quirk", QUIRKS.values(), ids=QUIRKS)
def test_the_corpus_is_read_like_h5py(quirk: Quirk, tmp_path: Path):
    path = quirk.write(tmp_path)
    options = quirk.options(tmp_path) if quirk.options else {}
    if quirk.way not in ("direct", "h5py"):
        for name in quirk.names:
            with contextlib.suppress(H5AsyncError):  # what only batches cannot hold is read
                found = h5async.open_file(path, **options)[name]
                if isinstance(found, Dataset):  # groups and types are not selected from
                    found[()]
        return
    with h5py.File(path) as expected, h5async.open_file(path, **options) as found:
        for name in quirk.names:
            rank = expected[name].ndim
            assert_same(found[name][...], expected[name][...])
            if rank < 30 and expected[name].size:  # HDF5 divides by 0 there
                assert_same(found[name][-1], expected[name][-1])
                assert_same(found[name][::2], expected[name][::2])
                some = (slice(None),) * (rank - 1) + (slice(0, None, 3),)
                assert_same(found[name][some], expected[name][some])
                assert_same(found[name][[0, -1][:1]], expected[name][[0]])


def test_masks_of_the_whole_dataset(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        for name in ("gzip", "chunked", "virtual"):
            every = expected[name][()]
            for mask in (every % 2 == 0, every % 97 == 0, every < 0):
                assert_same(found[name][mask], expected[name][mask])
            with pytest.raises(SelectionError, match="selected by integers"):
                found[name][np.zeros((3, 3), bool)]


def test_indices_out_of_range(path: Path):
    with h5async.open_file(path) as found:
        for key in (23, -24, [0, 23], np.s_[:, 12], np.s_[:, :, [-10, 3]], np.s_[0, 0, 0, 0]):
            with pytest.raises(SelectionError, match=r"gzip\" of shape \(23, 12, 9\)"):
                found["gzip"][key]


def test_integers_that_are_bools_or_out_of_all_bounds(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        assert_same(found["gzip"][True, :, False], expected["gzip"][True, :, False])
        key = np.uint8(22), np.int8(-1), slice(None)
        for _ in range(2):
            assert_same(found["gzip"][key], expected["gzip"][22, -1, :])
            with pytest.raises(SelectionError, match="index 23 is out of range"):
                found["gzip"][np.uint8(23)]
        assert_same(found["gzip"][-(10**30) :: 10**25], expected["gzip"][:1])


def test_keys_of_h5py_alone(path: Path):
    several = h5py.MultiBlockSlice(1, 3, 4, 2)
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        for key in (several, (several, 0, several), [True] + [False] * 22, np.s_[0, [True] * 12]):
            assert_answers_as_h5py(found["gzip"], expected["gzip"], key)


def test_masks_of_elements_that_are_arrays(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        for mask in (np.arange(6) % 2 == 0, np.arange(6) == 4):
            assert_same(found["group/arrays"][mask], expected["group/arrays"][mask])


def test_fields_of_compounds(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        for key in ("a", ("c", slice(3, 9)), ("a", "b", [1, 5]), ("b", 4)):
            assert_same(found["pairs"][key], expected["pairs"][key])
        with pytest.raises(ValueError, match="does not appear"):
            found["pairs"]["d"]


def test_what_hdf5_alone_reads(path: Path):
    with h5py.File(path) as expected, h5async.open_file(path) as found:
        for key in ((), 1, [0, 2], slice(1, 3)):
            value = found["group/text"][key]
            np.testing.assert_array_equal(value, expected["group/text"][key])
            assert type(value) is type(expected["group/text"][key])
        assert found["group/text"][:: 10**30].tolist() == [b"a"]  # which h5py refuses
        assert found["group"]["text"].dtype == expected["group/text"].dtype
        assert found["group/scalar"][()] == 5
        assert_same(found["group/scalar"][...], expected["group/scalar"][...])
        assert found["group/empty"][()] == expected["group/empty"][()]
        for name in ("group/scalar", "group/empty"):
            with pytest.raises(SelectionError):
                found[name][3]


def test_large_selections_are_read_by_several_threads(tmp_path: Path):
    path, values = tmp_path / "large.h5", np.arange(3_000_000, dtype="f4").reshape(3000, 20, 50)
    with h5py.File(path, "w") as file:
        file["plain"] = values
        file.create_dataset("gzip", data=values, chunks=(100, 9, 50), compression="gzip")
    some = np.sort(np.random.default_rng(1).choice(3000, 500, replace=False))
    with h5async.open_file(path, num_threads=3) as file:
        for name in ("plain", "gzip"):
            for key in ((), np.s_[5:, ::3], np.s_[::7, :, 11:40], some, np.s_[:, [3, 17]]):
                assert_same(file[name][key], values[key])
            out = np.zeros((60, 3000), "f4")
            file[name].read_direct(out[10:30].T, np.s_[:, :, 7])
            np.testing.assert_array_equal(out[10:30], values[:, :, 7].T)
            file[name].read_direct(out, np.s_[100:160, 0, 0], np.s_[:, 3])
            np.testing.assert_array_equal(out[:, 3], values[100:160, 0, 0])


@pytest.mark.parametrize(
    "dest_sel", [np.s_[1], np.s_[1, ...], [0, 2], np.array([False, True, True]), np.s_[2:, ...]]
)
@pytest.mark.parametrize("dtype", ["i2", "f8"])
def test_any_part_of_an_array_is_read_to(tmp_path: Path, dest_sel: Any, dtype: str):
    with h5py.File(tmp_path / "numbers.h5", "w") as file:
        file["numbers"] = np.arange(5, 15, dtype="i2")
        count = np.zeros(3)[dest_sel].size
        key = 4 if isinstance(dest_sel, int) else slice(4, 4 + count)
        expected, found, single = np.zeros(3, dtype), np.zeros(3, dtype), np.zeros((), dtype)
        file["numbers"].read_direct(expected, key, dest_sel)
    with h5async.open_file(tmp_path / "numbers.h5") as opened:
        opened["numbers"].read_direct(found, key, dest_sel)
        opened["numbers"].read_direct(single, 9, ())
    assert_same(found, expected)
    assert single == 14


def test_many_threads_read_one_dataset(path: Path):
    with h5async.open_file(path) as file, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: file["gzip"][row % 23], range(400)))
        with h5py.File(path) as expected:
            every = expected["gzip"][()]
    for row, values in enumerate(found):
        np.testing.assert_array_equal(values, every[row % 23])


def test_files_are_mappings_and_pickle_by_their_path(path: Path):
    with h5async.open_file(path, num_threads=1) as file:
        assert list(file["group"]) == ["arrays", "empty", "scalar", "text"]
        assert "gzip" in file
        assert "group/text" in file
        assert "nothing" not in file
        assert file["gzip"].attrs["units"] == "m"
        with pytest.raises(DatasetError, match="there is no object"):
            file["nothing"]
        dataset = pickle.loads(pickle.dumps(file["gzip"]))
        assert_same(dataset[3], file["gzip"][3])
        assert (len(dataset), dataset.ndim, dataset.size) == (23, 3, 23 * 12 * 9)
        assert_same(np.asarray(dataset), file["gzip"][()])
        opened = pickle.loads(pickle.dumps(file["group"]))
        assert list(opened) == list(file["group"])
    for name in ("rows", "gzip"):
        with pytest.raises(ReaderClosedError, match="was closed"):
            file[name][3]


def test_a_closed_file_is_not_read(path: Path):
    file = h5async.open_file(path)
    several = [file[name] for name in ("gzip", "contiguous", "virtual", "flags", "group/text")]
    assert_same(several[0][3], several[1][3])
    file.close()
    for dataset in several:
        for key in (0, slice(2), [1]):
            for _ in range(2):
                with pytest.raises(ReaderClosedError, match="was closed"):
                    dataset[key]


def test_threads_that_were_closed_leave_the_work_to_the_caller():
    threads, done = Threads(4), []
    threads.run([lambda: done.append(1)] * 5)
    pool = threads._started()
    pool.shutdown()
    threads.run([lambda: done.append(1)] * 5)
    assert len(done) == 10
    threads.close()


@pytest.mark.slow
def test_the_current_directory_may_change(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    with h5async.open_file(path.name) as file:
        data = file["gzip"]
        copy = pickle.dumps(data)
        monkeypatch.chdir("/")
        assert_same(data[3], file["contiguous"][3])
        assert_same(pickle.loads(copy)[3], data[3])


@pytest.mark.slow
def test_small_datasets_that_are_read_once(tmp_path: Path):
    rng = np.random.default_rng(4)
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        for number in range(90):
            shape = tuple(rng.integers(1, 20, rng.integers(1, 4)).tolist())
            dtype = np.dtype(rng.choice(["f4", ">i2", "u1", "?", "S5"]))
            chunks = [{}, {"chunks": tuple(rng.integers(1, n + 1) for n in shape)}][number % 2]
            filters = {"compression": rng.choice(["gzip", "lzf"]), "shuffle": True}
            how = chunks | (filters if number % 4 == 3 else {}) | {"fillvalue": dtype.type(1)}
            data = file.create_dataset(str(number), shape, dtype, **how)
            data[: shape[0] if number % 3 else shape[0] // 2] = rng.integers(0, 9)
    keys = (), np.s_[::2], -1, [0], np.s_[1:, ...], np.s_[..., -1:], np.s_[-1, ...]
    for first in range(len(keys)):  # more than have tables at a time
        with h5py.File(path) as expected, h5async.open_file(path) as found:
            for name in expected:
                for key in (*keys[first:], *keys)[: rng.integers(1, 3)]:
                    assert_same(found[name][key], expected[name][key])


MANY_FILES = """
import os, resource, sys
import h5async
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = [h5async.open_file(sys.argv[1]) for _ in range(100)]
print({len(file["plain"][:]) for file in files}, len(os.listdir("/proc/self/fd")) < 40)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and lists descriptors as Linux does")
def test_more_files_may_be_open_than_there_are_descriptors(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = np.arange(10)
    command = [sys.executable, "-c", MANY_FILES, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{10} True\n", "")


def test_values_that_this_process_has_not_stored_yet(tmp_path: Path):
    path = tmp_path / "written.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros(10)
    with h5py.File(path, "r+") as file:
        file["data"][3] = 7
        with h5async.open_file(path) as opened:
            assert opened["data"][3] == 7


def test_an_open_file_may_be_written_to(tmp_path: Path):
    path = tmp_path / "written.h5"
    with h5py.File(path, "w") as file:
        file["data"], file["text"] = np.zeros(10), ["a", "b"]
    with h5async.open_file(path) as opened:
        data, text = opened["data"], opened["text"]
        assert (text[0], data[0]) == (b"a", 0)
        with h5py.File(path, "r+") as file:
            file["data"][0], file["text"][0] = 1, "other"
        assert data[0] == 1
        with pytest.raises(ReadError, match="changed"):
            text[0]


def test_a_file_that_was_replaced_is_an_error(tmp_path: Path):
    path = tmp_path / "changes.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(100)
    with h5async.open_file(path) as opened:
        data = opened["data"]
        np.testing.assert_array_equal(data[5:8], [5, 6, 7])
        path.unlink()
        with h5py.File(path, "w") as file:
            file["data"] = np.zeros(50)
        with pytest.raises(ReadError, match="changed"):
            opened["other"]


def test_values_that_are_written_meanwhile_are_never_mixed(tmp_path: Path):
    path = tmp_path / "written.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((64, 1000)), chunks=(1, 1000), compression="gzip")
    with h5async.open_file(path, num_threads=1) as opened:
        data = opened["data"]
        assert not data[3].any()  # its chunk is kept, and forgotten when the file has changed
        with h5py.File(path, "r+") as file:
            file["data"][...] = 1
        with contextlib.suppress(ReadError):
            assert (data[()] == 1).all()
            assert (data[3] == 1).all()


def test_damaged_chunks_are_errors_that_name_them(tmp_path: Path):
    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        values = np.arange(4000.0).reshape(40, 100)
        file.create_dataset("data", data=values, chunks=(10, 100), compression="gzip")
        place = file["data"].id.get_chunk_info(2).byte_offset
    with path.open("r+b") as file:
        file.seek(place + 5)
        file.write(b"spoiled")
    with h5async.open_file(path) as opened:
        np.testing.assert_array_equal(opened["data"][:20], values[:20])
        for key in (25, [3, 29], np.s_[::8], ()):
            with pytest.raises(DamagedError, match=r"\"/?data\", chunk \(.*20, 0\)"):
                opened["data"][key]
            with (  # of a dataset that is read for the first time, too
                h5async.open_file(path) as first,
                pytest.raises(DamagedError, match=r"\"/?data\", chunk \(.*20, 0\)"),
            ):
                first["data"][key]
        np.testing.assert_array_equal(opened["data"][30:], values[30:])


def test_first_selections_of_several_chunks(tmp_path: Path):
    path = tmp_path / "several.h5"
    values = np.random.default_rng(0).integers(0, 99, (7, 9, 5))
    with h5py.File(path, "w") as file:
        for name, chunk in (("all", (2, 4, 3)), ("rows", (2, 9, 5)), ("edge", (7, 9, 4))):
            file.create_dataset(name, data=values, chunks=chunk, compression="gzip", shuffle=True)
    for name in ("all", "rows", "edge"):
        for key in ((), 3, np.s_[1:6, ::3], np.s_[:, [0, 5, 8], 2], np.s_[5:, 2:3, 4]):
            with h5async.open_file(path) as opened:
                found = opened[name][key]
                assert not opened[name]._readers  # no tables were made for the core
            np.testing.assert_array_equal(found, values[key], strict=True)
            assert found.flags.c_contiguous


def test_files_that_declare_too_much_are_refused(tmp_path: Path):
    path = tmp_path / "hollow.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (1 << 24, 1 << 10), "f4", chunks=(1 << 10, 1 << 10))
    with h5async.open_file(path) as opened:
        with pytest.raises(MemoryError, match="max_batch_bytes"):
            opened["data"][()]
        assert not opened["data"][5:9].any()


def test_a_forked_process_reads_too(path: Path):
    with h5async.open_file(path, num_threads=2) as opened:
        expected = opened["gzip"][3]
        opened["gzip"][()]
        child = os.fork()
        if not child:
            os._exit(0 if np.array_equal(opened["gzip"][3], expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_in_another_store(path: Path, store: MemoryStore):
    with h5py.File(path) as expected, h5async.open_file(store.put(path), num_threads=2) as found:
        for name in ("contiguous", "gzip", "pairs", "flags", "group/text"):
            for key in ((), 2, slice(1, None, 2), [0, 3]):
                np.testing.assert_array_equal(found[name][key], expected[name][key])


def test_saved_indices(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy, named, saved = tmp_path / "a.h5", tmp_path / "named.h5idx", tmp_path / "saved.h5idx"
    shutil.copy(path, copy)
    assert (
        CliRunner()
        .invoke(app, ["index", str(copy), "--field", "x=gzip", "-o", str(named)])
        .exit_code
        == 0
    )
    several: list[tuple[Path, dict[str, Any]]] = [(copy, {"index_cache": saved}), (named, {})]

    def assert_reads() -> None:
        for name, options in several:
            with h5py.File(copy) as expected, h5async.open_file(name, **options) as found:
                for key in (3, np.s_[:, 4]):  # the first one is read at once
                    assert_same(found["gzip"][key], expected["gzip"][key])

    assert_reads()
    with monkeypatch.context() as patched:
        patched.setattr(Indexer, "layout", None)
        assert_reads()
    with h5py.File(copy, "r+") as file:
        file["gzip"][...] = 7
    assert_reads()
    CliRunner().invoke(app, ["index", str(copy), str(path), "-o", str(named)])
    with pytest.raises(ConfigError, match="one file"):
        h5async.open_file(named)


def test_links_out_of_the_folder_are_refused(tmp_path: Path):
    inside = tmp_path / "inside"
    inside.mkdir()
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["data"] = [1]
    with h5py.File(inside / "links.h5", "w") as file:
        file["data"] = h5py.ExternalLink("../secret.h5", "data")
    with h5async.open_file(inside / "links.h5") as opened:
        with pytest.raises(PermissionError, match="allow_external"):
            opened["data"]
    with h5async.open_file(inside / "links.h5", allow_external=tmp_path) as opened:
        assert opened["data"][0] == 1
