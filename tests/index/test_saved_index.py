"""Readers that open by a saved index deliver what those do that index the files themselves."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, open_descriptors, truth
from hdf5files import write_compact
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "read"))
from test_corpus import READABLE, UNREADABLE, batch_size_for, reader_of, written

from h5async import (
    AsyncReader,
    ConfigError,
    DatasetError,
    FileChangedWarning,
    H5AsyncError,
    ReaderConfig,
    ReadError,
    UnsafeFileError,
)
from h5async.cli import app
from h5async.config import Field
from h5async.core import binding
from h5async.index import indexcache
from h5async.index.changes import fingerprint
from h5async.index.datasettable import Datasets
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedfile import FORMAT, read_saved, write_saved
from h5async.index.savedindex import IndexedFile, SavedIndex, Wanted, write_index
from h5async.index.tables import Segments
from h5async.opening import filefacts


def assert_same(one: Any, other: Any) -> None:
    """Assert that two layouts, or parts of them, are the same, with all that they hold."""
    if isinstance(one, Datasets):
        assert_same(tuple(one), tuple(other))
    elif isinstance(one, DatasetLayout | Segments):
        assert type(one) is type(other)
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.dtype.metadata == other.dtype.metadata or one.ndim == 0
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, tuple) and not hasattr(one, "_fields"):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif hasattr(one, "__dataclass_fields__") or hasattr(one, "__slots__"):
        for name in getattr(one, "__dataclass_fields__", ()):
            assert_same(getattr(one, name), getattr(other, name))
    else:
        assert one == other
        assert type(one) is type(other)


def files_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to index a file."""

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{path} was indexed")

    monkeypatch.setattr(filefacts, "read_layouts", refuse)


def save(folder: Path, *paths: Path, fields: dict[str, Field], **reach: Any) -> Path:
    """Index files, and save that."""
    files = []
    for path in paths:
        consulted = Consulted()
        found = read_layouts(path, fields, Reach(**reach, consulted=consulted))
        known = {Wanted.of(field): found[name] for name, field in fields.items()}
        files.append(IndexedFile(str(path), known, consulted))
    index = folder / "saved.h5idx"
    write_index(index, files, Reach(**reach))
    return index


@pytest.fixture
def everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 0.0)


# --- the corpus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quirk", READABLE.values(), ids=READABLE)
def test_reads_like_h5py(quirk, tmp_path, monkeypatch):
    path = written(quirk, tmp_path)
    for number, (name, num_dim) in enumerate(itertools.product(quirk.names, quirk.num_dims)):
        expected = truth(path, name, num_dim)
        options = {"batch_size": batch_size_for(len(expected)), "num_threads": 0}
        index = tmp_path / f"{number}.h5idx"
        with reader_of(quirk, path, name, num_dim, index_cache=False, **options) as reader:
            layout = reader.layouts["data"]
        with reader_of(quirk, path, name, num_dim, index_cache=index, **options) as reader:
            assert_epoch_is(reader, expected)
        assert index.exists()
        with monkeypatch.context() as patch:
            files_are_not_indexed(patch)
            with reader_of(quirk, path, name, num_dim, index_cache=index, **options) as reader:
                assert_same(layout, reader.layouts["data"])
                assert fingerprint(reader.layouts.values()) == fingerprint([layout])
                assert_epoch_is(reader, expected)
            with reader_of(quirk, index, name, num_dim, **options) as reader:
                assert fingerprint(reader.layouts.values()) == fingerprint([layout])
                assert_epoch_is(reader, expected)


def test_states_are_the_same_for_sources_of_several_kinds(tmp_path):
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        write_compact(file, "compact", np.arange(4))
        file["contiguous"] = np.arange(4)
        file.create_dataset("chunks", data=np.arange(4), chunks=(2,))
        for name, several in (
            ("one", ("compact", "contiguous", "chunks")),
            ("other", ("chunks", "contiguous", "compact")),
        ):
            layout = h5py.VirtualLayout((12,), "i8")
            for number, source in enumerate(several):
                layout[4 * number : 4 * number + 4] = h5py.VirtualSource(file[source])
            file.create_virtual_dataset(name, layout)
    states = []
    for index in (False, tmp_path / "f.h5idx", tmp_path / "f.h5idx"):
        fields = {"one": "one", "other": "other"}
        with AsyncReader(hdf5_path=path, fields=fields, index_cache=index) as reader:
            states.append(reader.state_dict())
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("quirk", UNREADABLE.values(), ids=UNREADABLE)
def test_is_an_error_and_no_wrong_value(quirk, tmp_path, everything_is_kept):
    path = written(quirk, tmp_path)
    for _ in range(2):
        with (
            pytest.raises(H5AsyncError) as caught,
            reader_of(quirk, path, "data", 0, batch_size=5, num_threads=0) as reader,
        ):
            for _ in reader:
                pass
        assert str(path) in str(caught.value)


# --- the cache folder ----------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_is_kept: None) -> Path:
    """Return the cache folder, which nothing was kept in yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "h5async" / "index"


def make(path: Path, first: int = 0, rows: int = 40, chunks: int | None = 4) -> Path:
    """Write a file with rows that tell what they are."""
    with h5py.File(path, "w") as file:
        values = np.arange(first, first + rows * 3, dtype="i4").reshape(rows, 3)
        chunk_shape = None if chunks is None else (chunks, 3)
        file.create_dataset("data", data=values, chunks=chunk_shape, compression=chunks and 1)
        file["labels"] = np.arange(first, first + rows)
    return path


def rows_of(*paths: Path | str, **options: Any) -> np.ndarray:
    """Return all rows of files, as a reader gives them."""
    with AsyncReader(
        hdf5_path=paths[0] if len(paths) == 1 else list(paths),
        **{"labels_field": None, "num_threads": 0, "device": "cpu", "batch_size": 7, **options},
    ) as reader:
        return np.concatenate([np.array(batch[0]) for batch in reader])


def joined(*paths: Path) -> np.ndarray:
    return np.concatenate([truth(path) for path in paths])


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.h5idx"))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of files that are indexed from now on."""
    indexed: list[str] = []

    def count(path: Path, *arguments: Any, **options: Any) -> Any:
        indexed.append(Path(path).name)
        return read_layouts(path, *arguments, **options)

    monkeypatch.setattr(filefacts, "read_layouts", count)
    return indexed


def test_a_second_reader_indexes_nothing(tmp_path, cache, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(5)]
    indexed = counting(monkeypatch)
    assert np.array_equal(rows_of(*paths), joined(*paths))
    assert len(indexed) == 5
    for _ in range(2):
        assert np.array_equal(rows_of(*paths), joined(*paths))
    assert len(indexed) == 5
    assert len(entries(cache)) == 1
    assert os.stat(cache).st_mode & 0o777 == 0o700
    assert os.stat(entries(cache)[0]).st_mode & 0o777 == 0o600


def test_other_datasets_files_and_orders_have_entries_of_their_own(tmp_path, cache):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    rows_of(*paths)
    assert np.array_equal(rows_of(*reversed(paths)), joined(*reversed(paths)))
    assert np.array_equal(rows_of(paths[1]), truth(paths[1]))
    assert np.array_equal(rows_of(paths[1], data_field="labels"), truth(paths[1], "labels"))
    assert np.array_equal(rows_of(paths[0], num_dim=1), truth(paths[0], num_dim=1))
    assert len(entries(cache)) == 5


def test_nothing_is_kept_where_nobody_wants_that(tmp_path, cache):
    rows_of(make(tmp_path / "a.h5"), index_cache=False)
    assert not cache.exists()


def test_what_is_indexed_at_once_is_not_kept(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(indexcache, "LEAST_SECONDS", 3600)
    rows_of(make(tmp_path / "a.h5"))
    assert not cache.exists()


def test_only_a_changed_file_is_indexed_anew(tmp_path, cache, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(4)]
    rows_of(*paths)
    indexed = counting(monkeypatch)
    make(paths[2], 7777, rows=20)
    for _ in range(2):
        assert np.array_equal(rows_of(*paths), joined(*paths))
    assert indexed == ["2.h5"]


def rewrite_in_place(path: Path) -> None:
    make(path, 500, rows=40, chunks=8)


def replace(path: Path) -> None:
    os.replace(make(path.with_suffix(".new"), 900), path)


def replace_with_the_same_times(path: Path) -> None:
    status = path.stat()
    new = make(path.with_suffix(".new"), 900)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(new, path)


def rewrite_with_the_same_times(path: Path) -> None:
    status = path.stat()
    make(path, 900, chunks=4)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(path: Path) -> None:
    os.utime(path)


def grow(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(600, dtype="i4").reshape(-1, 3)


CHANGES = [
    rewrite_in_place,
    replace,
    replace_with_the_same_times,
    rewrite_with_the_same_times,
    touch,
    grow,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_read_as_it_is(tmp_path, cache, change):
    path = make(tmp_path / "a.h5")
    rows_of(path)
    change(path)
    for _ in range(2):
        assert np.array_equal(rows_of(path), truth(path))


def test_a_file_that_is_gone_is_an_error(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    rows_of(path)
    path.unlink()
    with pytest.raises(ReadError, match=r"a\.h5"):
        rows_of(path)


def test_a_file_that_was_moved_is_indexed_at_its_new_place(tmp_path, cache, monkeypatch):
    path = make(tmp_path / "a.h5")
    rows_of(path)
    expected = truth(path)
    other = make(tmp_path / "b.h5", 5000)
    os.replace(path, tmp_path / "c.h5")
    os.replace(other, path)
    assert np.array_equal(rows_of(path), truth(path))
    assert np.array_equal(rows_of(tmp_path / "c.h5"), expected)


def test_a_file_that_changes_while_it_is_indexed_is_not_kept(tmp_path, cache, monkeypatch):
    path = make(tmp_path / "a.h5")

    def index_and_touch(path: Path, *arguments: Any, **options: Any) -> Any:
        found = read_layouts(path, *arguments, **options)
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(filefacts, "read_layouts", index_and_touch)
    with pytest.warns(FileChangedWarning):
        rows_of(path)
    assert entries(cache) == []


def test_what_this_process_writes_is_not_kept(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    with h5py.File(path, "r+", locking=False) as file:
        file["data"][0] = 99
        assert rows_of(path)[0, 0] == 99
    assert entries(cache) == []


# --- damage to an entry --------------------------------------------------------------------------


def flips(content: bytes) -> list[bytes]:
    """Return copies, in each of which a bit differs."""
    places = {*range(0, 128), *range(0, len(content), max(1, len(content) // 200))}
    return [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in places]


def cuts(content: bytes) -> list[bytes]:
    places = {0, 1, 11, 12, 47, 48, 49, 64, len(content) // 2, len(content) - 1}
    return [content[:at] for at in places] + [content + b"\0", content + content]


def other_formats(content: bytes) -> list[bytes]:
    """Return copies that say they are of another format, whole but for that."""
    others = 0, 1, FORMAT - 1, FORMAT + 1, 1 << 31
    return [content[:12] + number.to_bytes(4, "little") + content[16:] for number in others]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flips, cuts, other_formats])
@pytest.mark.parametrize("chunks", [4, None])
def test_a_damaged_entry_is_made_anew(tmp_path, cache, monkeypatch, damage, chunks):
    path = make(tmp_path / "a.h5", chunks=chunks)
    expected = rows_of(path)
    (entry,) = entries(cache)
    content = entry.read_bytes()
    for damaged in damage(content):
        entry.write_bytes(damaged)
        indexed = counting(monkeypatch)
        assert np.array_equal(rows_of(path), expected)
        assert indexed == ["a.h5"]
        assert entry.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flips, cuts, other_formats])
def test_a_damaged_index_that_is_named_is_an_error(tmp_path, damage):
    path = make(tmp_path / "a.h5")
    index = save(tmp_path, path, fields={"data": Field("data")})
    for damaged in damage(index.read_bytes()):
        index.write_bytes(damaged)
        for options in {"hdf5_path": index}, {"hdf5_path": path, "index_cache": index}:
            with pytest.raises(ReadError, match=r"saved\.h5idx"):
                AsyncReader(**options, labels_field=None, device="cpu")


def test_a_foreign_entry_is_not_believed(tmp_path, cache, monkeypatch):
    path = make(tmp_path / "a.h5")
    expected = rows_of(path)
    (entry,) = entries(cache)
    indexed = counting(monkeypatch)
    for mode in (0o602, 0o666):
        entry.chmod(mode)
        assert np.array_equal(rows_of(path), expected)
    assert indexed == ["a.h5"] * 2
    cache.chmod(0o777)
    assert np.array_equal(rows_of(path), expected)
    assert indexed == ["a.h5"] * 3
    cache.chmod(0o700)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert np.array_equal(rows_of(path), expected)
    assert indexed == ["a.h5"] * 4


def test_a_foreign_index_that_is_named_is_an_error(tmp_path, monkeypatch):
    path = make(tmp_path / "a.h5")
    index = save(tmp_path, path, fields={"data": Field("data")})
    index.chmod(0o666)
    for options in {"hdf5_path": index}, {"hdf5_path": path, "index_cache": index}:
        with pytest.raises(ReadError, match=r"saved\.h5idx.*every user may write"):
            AsyncReader(**options, labels_field=None, device="cpu")
    index.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(index, 4711, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    for options in {"hdf5_path": index}, {"hdf5_path": path, "index_cache": index}:
        with pytest.raises(ReadError, match=r"saved\.h5idx.*another user"):
            AsyncReader(**options, labels_field=None, device="cpu")


def test_what_is_no_file_is_not_read(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    expected = rows_of(path)
    (entry,) = entries(cache)
    entry.unlink()
    os.mkfifo(entry)
    assert np.array_equal(rows_of(path), expected)
    entry.unlink()
    entry.mkdir()
    assert np.array_equal(rows_of(path), expected)
    named = tmp_path / "pipe.h5idx"
    os.mkfifo(named)
    for options in ({"hdf5_path": named}, {"hdf5_path": path, "index_cache": named}):
        with pytest.raises(ReadError, match=r"pipe\.h5idx.*not a regular file"):
            AsyncReader(**options, labels_field=None, device="cpu")


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["write", "fsync", "replace", "urandom"])
def test_a_full_disk_leaves_nothing_and_is_not_told(tmp_path, cache, monkeypatch, failing):
    path = make(tmp_path / "a.h5")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    where = indexcache.write_index.__globals__["write_saved"].__globals__
    target = where["os"]
    with monkeypatch.context() as patch:
        patch.setattr(target, failing, fail)
        assert np.array_equal(rows_of(path), truth(path))
    assert failing == "fsync" or not cache.exists() or list(cache.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(target, failing, fail)
        with pytest.raises(ReadError, match="No space left"):
            rows_of(path, index_cache=tmp_path / "x.h5idx")
    assert sorted(p.name for p in tmp_path.iterdir() if "idx" in p.name) == []


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch, everything_is_kept):
    path = make(tmp_path / "a.h5")
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", Path("/proc/nowhere"), Path("/dev/null")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert np.array_equal(rows_of(path), truth(path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    assert np.array_equal(rows_of(path), truth(path))


def test_the_oldest_entries_make_way(tmp_path, cache, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", i) for i in range(4)]
    for number, path in enumerate(paths[:3]):
        rows_of(path)
        newest = max(entries(cache), key=lambda entry: entry.stat().st_mtime_ns)
        os.utime(newest, (1000 + number, 1000 + number))
    size = entries(cache)[0].stat().st_size
    rows_of(paths[0])  # is used, and so is not the oldest any more
    monkeypatch.setattr(indexcache, "MOST_NBYTES", 3 * size + size // 2)
    rows_of(paths[3])
    assert len(entries(cache)) == 3
    indexed = counting(monkeypatch)
    for path in (paths[0], paths[2], paths[3]):
        rows_of(path)
    assert indexed == []


def test_what_a_killed_writer_left_is_removed_later(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    cache.mkdir(parents=True, mode=0o700)
    left, recent = (cache / f".{name * 32}.h5idx.{'1' * 16}.tmp" for name in "ab")
    for file in (left, recent):
        file.write_bytes(b"half")
    os.utime(left, (1000, 1000))
    rows_of(path)
    assert not left.exists()
    assert recent.exists()  # somebody may be writing it


WRITER = """
import os, sys, time
import h5async.index.indexcache as cache
from h5async import AsyncReader
cache.LEAST_SECONDS = 0.0
if sys.argv[2] == "kill":
    import h5async.index.savedfile as saved
    def replace(*_):
        os.kill(os.getpid(), 9)
    saved.os.replace = replace
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    options = dict(labels_field=None, num_threads=0, device="cpu")
    with AsyncReader(hdf5_path=sys.argv[1], **options) as reader:
        assert sum(int(batch[0].sum()) for batch in reader) == int(sys.argv[4])
    for entry in cache.cache_folder().glob("*.h5idx"):
        try:
            entry.unlink()
        except FileNotFoundError:
            pass
"""


def writer(path: Path, kind: str, times: int) -> subprocess.Popen[str]:
    total = str(int(truth(path).sum()))
    command = [sys.executable, "-c", WRITER, str(path), kind, str(times), total]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_processes_that_write_at_once_do_not_harm_each_other(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    several = [writer(path, "", 40) for _ in range(3)]
    for process in several:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in several:
        process.communicate(timeout=120)
        assert process.returncode == 0
    rows_of(path)
    assert [name for name in os.listdir(cache) if name.endswith(".tmp")] == []


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_old_index(tmp_path, cache, monkeypatch):
    path = make(tmp_path / "a.h5")
    with writer(path, "kill", 1) as process:
        process.communicate("\n", timeout=60)
        assert process.returncode == -9
    assert entries(cache) == []
    indexed = counting(monkeypatch)
    for _ in range(2):
        assert np.array_equal(rows_of(path), truth(path))
    assert indexed == ["a.h5"]


# --- an index that is named ----------------------------------------------------------------------

FIELDS = {"data": Field("data"), "labels": Field("labels")}


def test_an_index_stands_for_its_files(tmp_path, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(6)]
    first = save(tmp_path, *paths[:3], fields=FIELDS)
    second = first.rename(tmp_path / "first.h5idx"), save(tmp_path, *paths[4:], fields=FIELDS)
    indexed = counting(monkeypatch)
    options = {"shuffle": "full", "num_threads": 2, "labels_field": "labels", "batch_size": 32}
    by_index = AsyncReader(hdf5_path=[second[0], paths[3], second[1]], device="cpu", **options)
    by_files = AsyncReader(hdf5_path=paths, device="cpu", index_cache=False, **options)
    with by_index, by_files:
        assert by_index.state_dict() == by_files.state_dict()
        for one, other in zip(by_index, by_files, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        by_index.load_state_dict(by_files.state_dict())
    assert indexed == ["3.h5", *(path.name for path in paths)]


def test_no_file_is_opened_before_it_is_read(tmp_path):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(3)]
    expected = truth(paths[0])
    index = save(tmp_path, *paths, fields=FIELDS)
    paths[2].unlink()
    reader = AsyncReader(hdf5_path=index, num_threads=0, device="cpu", batch_size=40)
    with reader:
        assert open_descriptors(tmp_path) == {}
        assert np.array_equal(reader.get_next_batch()[0], expected)
        reader.get_next_batch()
        with pytest.raises(ReadError, match=r"2\.h5"):
            reader.get_next_batch()


def test_what_the_index_does_not_hold_is_read_from_the_files(tmp_path, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    index = save(tmp_path, *paths, fields={"data": Field("/data/")})
    indexed = counting(monkeypatch)
    with AsyncReader(hdf5_path=index, num_threads=0, device="cpu") as reader:
        rows = [(np.array(data), np.array(labels)) for data, labels in reader]
    assert np.array_equal(np.concatenate([data for data, _ in rows]), joined(*paths))
    labels = np.concatenate([truth(path, "labels") for path in paths])
    assert np.array_equal(np.concatenate([found for _, found in rows]), labels)
    assert indexed == ["0.h5", "1.h5"]
    assert np.array_equal(rows_of(index, num_dim=1)[:3], truth(paths[0], num_dim=1))
    with pytest.raises(DatasetError, match="nowhere"):
        rows_of(index, data_field="nowhere")
    make(paths[0], 0, rows=10)
    with pytest.raises(ReadError, match=r"0\.h5 was changed"):
        rows_of(index, data_field="labels")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_of_a_named_index_is_read_rightly_or_not(tmp_path, change):
    path = make(tmp_path / "a.h5")
    index = save(tmp_path, path, fields={"data": Field("data")})
    change(path)
    if change is touch:
        with pytest.warns(FileChangedWarning, match=r"a\.h5"):
            assert np.array_equal(rows_of(index), truth(path))
    else:
        with pytest.raises(ReadError, match=r"a\.h5.*index"):
            rows_of(index)


def test_a_folder_may_be_moved_with_its_index(tmp_path, monkeypatch):
    (tmp_path / "old" / "below").mkdir(parents=True)
    paths = [make(tmp_path / "old" / "a.h5"), make(tmp_path / "old" / "below" / "b.h5", 500)]
    expected = joined(*paths)
    save(tmp_path / "old", *paths, fields=FIELDS)
    (tmp_path / "old").rename(tmp_path / "new")
    files_are_not_indexed(monkeypatch)
    assert np.array_equal(rows_of(tmp_path / "new" / "saved.h5idx"), expected)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(rows_of("new/saved.h5idx"), expected)


def test_files_on_a_device_with_another_number_are_the_same(tmp_path, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 100 * i) for i in range(2)]
    index = save(tmp_path, *paths, fields=FIELDS)
    known = SavedIndex(index, Reach(io="pread"), (os.geteuid(),))
    text = index.read_bytes()
    device = str(known.stamp(0).device)
    header, arrays = saved_content(index)
    for file in header["files"]:
        assert str(file[1]) == device
        file[1] += 1
    rewrite(index, header, arrays)
    assert index.read_bytes() != text
    files_are_not_indexed(monkeypatch)
    assert np.array_equal(rows_of(index), joined(*paths))


def saved_content(index: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return read_saved(index, owners=(os.geteuid(),), may_map=False)[:2]


def rewrite(index: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write an index with other content, and right checksums."""
    write_saved(index, header, {name: [array] for name, array in arrays.items()}, mode=0o644)


def test_facts_that_make_no_sense_are_errors(tmp_path):
    path, index = tmp_path / "a.h5", tmp_path / "saved.h5idx"
    with h5py.File(path, "w") as file:
        file["data"], file["word"] = np.arange(4), [b"x", b"y", b"x", b"z"]
        file["grid"], file.attrs["title"] = np.ones((2, 3)), "some"
    fields = {
        "data": "data",
        "word": Field("word", categories=True),
        "title": Field("@title", per="file"),
        "grid": Field("grid", per="dataset"),
    }
    options: dict[str, Any] = {"fields": fields, "num_threads": 0, "device": "cpu"}
    with AsyncReader(hdf5_path=path, index_cache=index, **options):
        header, arrays = saved_content(index)
    places = [("values", (at,), 100) for at in range(arrays["values"].size)]
    entries, layouts = len(arrays["entries"]) // 3, arrays["rows"].size
    places += [("entries", (3 * at + 2,), to) for at in range(entries) for to in range(layouts)]
    places += [("rows", (at,), count) for at in range(layouts) for count in (0, 2, 5)]
    refused = 0
    for name, at, value in places:
        changed = arrays[name].copy()
        changed[at] = value
        rewrite(index, header, arrays | {name: changed})
        try:
            with AsyncReader(hdf5_path=index, **options) as reader:
                reader.get_next_batch()
        except H5AsyncError:
            refused += 1
    assert refused > len(places) // 2


# --- files that depend on others -----------------------------------------------------------------


def virtual(path: Path, *sources: Path) -> Path:
    layout = h5py.VirtualLayout((40 * len(sources), 3), "i4")
    for number, source in enumerate(sources):
        layout[40 * number : 40 * number + 40] = h5py.VirtualSource(source.name, "data", (40, 3))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=-1)
    return path


def test_a_change_of_a_source_of_a_virtual_dataset_is_seen(tmp_path, cache, monkeypatch):
    sources = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(3)]
    whole = virtual(tmp_path / "whole.h5", *sources)
    indexed = counting(monkeypatch)
    for _ in range(2):
        assert np.array_equal(rows_of(whole), joined(*sources))
    assert len(indexed) == 1
    make(sources[1], 7777, chunks=5)
    assert np.array_equal(rows_of(whole), joined(*sources))
    virtual(whole, *reversed(sources))
    assert np.array_equal(rows_of(whole), joined(*reversed(sources)))
    assert len(indexed) == 3


def test_a_changed_virtual_dataset_makes_its_named_index_worthless(tmp_path):
    sources = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(3)]
    whole = virtual(tmp_path / "whole.h5", *sources)
    index = save(tmp_path, whole, fields={"data": Field("data")})
    assert np.array_equal(rows_of(index), joined(*sources))
    virtual(whole, *reversed(sources))
    with pytest.raises(ReadError, match=r"whole\.h5 was changed.*h5async index"):
        rows_of(index)


def test_a_source_that_comes_back_is_seen(tmp_path, cache):
    sources = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    whole = virtual(tmp_path / "whole.h5", *sources)
    sources[1].rename(tmp_path / "away")
    index = save(tmp_path, whole, fields={"data": Field("data")}, missing_is_fill=True)
    for _ in range(2):
        found = rows_of(whole, allow_missing=True)
        assert (found[40:] == -1).all()
    assert np.array_equal(rows_of(index, allow_missing=True), found)
    with pytest.raises(ConfigError, match="allow_missing"):
        rows_of(index)
    with pytest.raises(DatasetError, match="missing"):
        rows_of(whole)
    (tmp_path / "away").rename(sources[1])
    assert np.array_equal(rows_of(whole, allow_missing=True), joined(*sources))
    with pytest.raises(ReadError, match=r"1\.h5 exists"):
        rows_of(index, allow_missing=True)


def test_a_changed_external_link_is_seen(tmp_path, cache):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    for target in paths:
        with h5py.File(tmp_path / "links.h5", "w") as file:
            file["data"] = h5py.ExternalLink(target.name, "data")
        index = save(tmp_path, tmp_path / "links.h5", fields={"data": Field("data")})
        for _ in range(2):
            assert np.array_equal(rows_of(tmp_path / "links.h5"), truth(target))
            assert np.array_equal(rows_of(index), truth(target))
    (tmp_path / "links.h5").unlink()
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["data"] = h5py.ExternalLink("0.h5", "data")
    with pytest.raises(ReadError, match=r"links\.h5 was changed"):
        rows_of(index)


def test_a_symbolic_link_that_leads_elsewhere_is_seen(tmp_path, cache):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["data"] = h5py.ExternalLink("current.h5", "data")
    for target in (*paths, paths[0]):
        (tmp_path / "current.h5").unlink(missing_ok=True)
        (tmp_path / "current.h5").symlink_to(target.name)
        for _ in range(2):
            assert np.array_equal(rows_of(tmp_path / "links.h5"), truth(target))
            assert np.array_equal(rows_of(tmp_path / "current.h5"), truth(target))


def test_an_environment_variable_that_leads_elsewhere_is_seen(tmp_path, cache, monkeypatch):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        make(tmp_path / str(number) / "s.h5", 1000 * number)
    whole = virtual(tmp_path / "whole.h5", tmp_path / "s.h5")
    for number in (0, 1, 0):
        monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path / str(number)))
        for _ in range(2):
            assert np.array_equal(rows_of(whole), truth(tmp_path / str(number) / "s.h5"))


def external(folder: Path, first: int) -> None:
    folder.mkdir()
    np.arange(first, first + 30, dtype="i4").tofile(folder / "values.bin")


def test_external_storage_is_found_from_the_current_directory(tmp_path, cache, monkeypatch):
    for number in range(2):
        external(tmp_path / str(number), 1000 * number)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        storage = [("values.bin", 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("data", (10, 3), "i4", external=storage)
    options = {"allow_external": [tmp_path]}
    for number in (0, 1, 0):
        monkeypatch.chdir(tmp_path / str(number))
        for _ in range(2):
            found = rows_of(tmp_path / "a.h5", **options)
            assert found[0, 0] == 1000 * number
    index = save(tmp_path, tmp_path / "a.h5", fields={"data": Field("data")}, roots=(tmp_path,))
    assert np.array_equal(rows_of(index, **options), found)
    np.arange(30, dtype="i4")[::-1].tofile(tmp_path / "0" / "values.bin")
    assert rows_of(tmp_path / "a.h5", **options)[0, 0] == 29


def test_values_in_the_index_are_those_of_the_file(tmp_path, cache):
    path = tmp_path / "compact.h5"
    for first in (0, 5):
        with h5py.File(path, "w") as file:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((6, 2))
            h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_INT32, space, plist)
            file["data"][...] = np.arange(first, first + 12).reshape(6, 2)
        index = save(tmp_path, path, fields={"data": Field("data")})
        for _ in range(2):
            assert np.array_equal(rows_of(path), truth(path))
            assert np.array_equal(rows_of(index), truth(path))
    with h5py.File(path, "r+") as file:
        file["data"][0, 0] = 99
    assert rows_of(path)[0, 0] == 99
    with pytest.raises(ReadError, match=r"compact\.h5 was changed"):
        rows_of(index)


def test_rows_that_were_never_written_and_are_now(tmp_path, cache):
    path = tmp_path / "empty.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (20, 2), "i4", chunks=(5, 2), fillvalue=3)
    index = save(tmp_path, path, fields={"data": Field("data")})
    for name in (path, path, index):
        assert (rows_of(name) == 3).all()
    with h5py.File(path, "r+") as file:
        file["data"][...] = 4
    assert (rows_of(path) == 4).all()
    with pytest.raises(ReadError, match=r"empty\.h5 was changed"):
        rows_of(index)


# --- other processes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_helper_process_opens_by_an_index(tmp_path, cache):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    index = save(tmp_path, *paths, fields={"data": Field("data")})
    rows_of(*paths)
    for several in (paths, [index]):
        found = rows_of(*several, workers="process", num_threads=1)
        assert np.array_equal(found, joined(*paths))


def test_a_reader_that_has_an_index_can_be_pickled(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    index = save(tmp_path, path, fields={"data": Field("data")})
    for options in {"hdf5_path": index}, {"hdf5_path": path}, {"hdf5_path": path}:
        with AsyncReader(**options, labels_field=None, num_threads=0, device="cpu") as reader:
            layouts = pickle.loads(pickle.dumps(reader.layouts))
            assert_same(layouts["data"], reader.layouts["data"])
            with pickle.loads(pickle.dumps(reader)) as other:
                assert_epoch_is(other, truth(path))


@pytest.mark.usefixtures("h5py_way")
def test_h5py_reads_by_an_index(tmp_path, cache):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i, chunks=n) for i, n in enumerate((4, None, 7))]
    index = save(tmp_path, *paths, fields={"data": Field("data")})
    for several in (paths, paths, [index]):
        assert np.array_equal(rows_of(*several), joined(*paths))


def test_files_are_read_without_maps_where_that_is_asked_for(tmp_path, cache):
    path = make(tmp_path / "a.h5")
    index = save(tmp_path, path, fields={"data": Field("data")})
    for name in (path, path, index):
        assert np.array_equal(rows_of(name, io="pread"), truth(path))


# --- the file that was given as index_cache ------------------------------------------------------


def test_a_given_file_follows_its_files(tmp_path, monkeypatch):
    paths = [make(tmp_path / f"{i}.h5", 1000 * i) for i in range(2)]
    index = tmp_path / "kept.h5idx"
    indexed = counting(monkeypatch)
    for _ in range(2):
        assert np.array_equal(rows_of(*paths, index_cache=index), joined(*paths))
    assert indexed == ["0.h5", "1.h5"]
    make(paths[0], 5000)
    for _ in range(2):
        assert np.array_equal(rows_of(*paths, index_cache=index), joined(*paths))
    assert indexed == ["0.h5", "1.h5", "0.h5"]
    with pytest.raises(ReadError, match="belongs to other files, and would be overwritten"):
        rows_of(paths[1], index_cache=index)
    assert np.array_equal(rows_of(index), joined(*paths))
    saved = save(tmp_path, *paths, fields={"data": Field("data")})
    with pytest.raises(ReadError, match="written by h5async index, and would be overwritten"):
        rows_of(*paths, index_cache=saved)


def test_what_was_kept_without_the_core_is_not_used_with_it(core, tmp_path, monkeypatch):
    options = {"hdf5_path": make(tmp_path / "a.h5")}
    ways = []
    for without in (True, False):
        with monkeypatch.context() as patched:
            if without:
                patched.setattr(binding, "_core_or_reason", lambda: "is missing")
            with AsyncReader(options, index_cache=tmp_path / "kept.h5idx") as reader:
                reader.get_next_batch()
                ways.append(reader.stats().ways["data"])
    assert ways == ["h5py", "core"]


def test_in_a_folder_that_is_given_other_files_are_left_alone(tmp_path, everything_is_kept):
    path, folder = make(tmp_path / "a.h5"), tmp_path / "folder"
    folder.mkdir()
    others = [folder / ".mine.tmp", folder / "train.h5idx", folder / ".train.h5idx.1.tmp"]
    for file in others:
        file.write_bytes(b"mine")
        os.utime(file, (1000, 1000))
    rows_of(path, index_cache=folder)
    assert all(file.exists() for file in others)


@pytest.mark.parametrize("name", ["../data/a.h5", "link/../a.h5"])
def test_a_path_that_goes_up(tmp_path, everything_is_kept, monkeypatch, name):
    for folder in ("data", "here", "far/away"):
        (tmp_path / folder).mkdir(parents=True)
    make(tmp_path / "data" / "a.h5", 7)
    make(tmp_path / "far" / "a.h5", 9)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path / "here")
    for _ in range(2):
        assert np.array_equal(rows_of(Path(name)), truth(Path(name)))
    index = save(tmp_path / "here", Path(name).absolute(), fields={"data": Field("data")})
    assert np.array_equal(rows_of(index), truth(Path(name)))


def test_an_index_does_not_get_round_allow_external(tmp_path):
    for folder in ("data", "outside"):
        (tmp_path / folder).mkdir()
    other, path = make(tmp_path / "outside" / "o.h5"), tmp_path / "data" / "v.h5"
    values = truth(other)
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[...] = h5py.VirtualSource(str(other), "data", values.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout)
    fields = {"data": Field("data")}
    index = save(tmp_path / "data", path, fields=fields, roots=(tmp_path / "outside",))
    assert np.array_equal(rows_of(index, allow_external=[tmp_path]), values)
    with pytest.raises(UnsafeFileError, match="allow_external"):
        rows_of(index)


def test_a_folder_may_be_given(tmp_path, everything_is_kept, monkeypatch):
    path = make(tmp_path / "a.h5")
    (tmp_path / "folder").mkdir()
    indexed = counting(monkeypatch)
    for _ in range(2):
        assert np.array_equal(rows_of(path, index_cache=tmp_path / "folder"), truth(path))
    assert indexed == ["a.h5"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = make(tmp_path / "a.h5")
    other = tmp_path / "notes.h5idx"
    other.write_text("mine, and longer than the head of a saved index, so that it could be one")
    with pytest.raises(ReadError, match=r"notes\.h5idx.*name another file"):
        rows_of(path, index_cache=other)
    assert other.read_text().startswith("mine")
    with pytest.raises(ConfigError, match=r"index_cache.*\.h5idx"):
        rows_of(path, index_cache=path)
    with pytest.raises(ConfigError, match="index_cache"):
        rows_of(path, index_cache=3)


def test_configurations_name_the_place(tmp_path, monkeypatch):
    path = make(tmp_path / "a.h5")
    (tmp_path / "c.toml").write_text('hdf5_path = "a.h5"\nindex_cache = "kept.h5idx"\n')
    config = ReaderConfig.load(tmp_path / "c.toml")
    assert config.index_cache == tmp_path / "kept.h5idx"
    AsyncReader(config, labels_field=None, device="cpu").close()
    assert (tmp_path / "kept.h5idx").exists()
    (tmp_path / "c.toml").write_text('hdf5_path = "a.h5"\nindex_cache = false\n')
    assert ReaderConfig.load(tmp_path / "c.toml").index_cache is False
    for place in (True, False, tmp_path, tmp_path / "x.h5idx"):
        config = ReaderConfig(hdf5_path=path, index_cache=place)
        again = ReaderConfig.load(json.loads(config.model_dump_json()))
        assert again.index_cache == place
        assert type(again.index_cache) is type(config.index_cache)


def test_a_writer_that_goes_on_by_swmr_is_followed(tmp_path, cache):
    path = tmp_path / "swmr.h5"
    with h5py.File(path, "w", libver="latest") as file:
        dataset = file.create_dataset("data", (8, 3), "i4", maxshape=(None, 3), chunks=(4, 3))
        dataset[...] = 1
    for rows in (8, 12, 20):
        with h5py.File(path, "r+", libver="latest") as file:
            file.swmr_mode = True
            file["data"].resize(rows, axis=0)
            file["data"][...] = rows
            file["data"].flush()
        for _ in range(2):
            assert np.array_equal(rows_of(path), truth(path))


@pytest.mark.slow
def test_chunks_in_any_order_with_holes_and_masks(tmp_path, cache, monkeypatch):
    """A table of many chunks, which is checked by itself, and has all columns."""
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        options = {"chunks": (1, 2), "compression": "gzip", "shuffle": True}
        dataset = file.create_dataset("data", (9000, 2), "i4", fillvalue=-7, **options)
        rng = np.random.default_rng(0)
        for number in rng.permutation(9000)[:6000].tolist():
            if number % 3:
                dataset[number] = rng.integers(0, 1 << (number % 30), 2)
            else:  # without its filters
                values = np.array([number, -number], "i4").tobytes()
                dataset.id.write_direct_chunk((number, 0), values, filter_mask=3)
    expected, indexed = truth(path), counting(monkeypatch)
    for _ in range(2):
        assert np.array_equal(rows_of(path, batch_size=500), expected)
    assert indexed == ["many.h5"]
    with AsyncReader(hdf5_path=path, labels_field=None, device="cpu", num_threads=0) as reader:
        chunks = reader.layouts["data"].chunks
        assert chunks.index.size == 6000
        assert len(set(chunks.nbytes.tolist())) > 1
        assert set(chunks.filter_mask.tolist()) == {0, 3}
        assert not (np.diff(chunks.offset) > 0).all()


def test_an_index_that_could_not_be_read_is_not_written(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", (1 << 62,), "u1", chunks=(64,))
    output = str(tmp_path / "a.h5idx")
    done = CliRunner().invoke(app, ["index", str(tmp_path / "a.h5"), "-o", output])
    assert "cannot hold data: its shape" in done.output
    assert not os.path.exists(output)
