"""Files that are written are whole or absent, and go on where they were stopped."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import h5py
import killing
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from killing import ROWS, assert_whole, write

from h5async import ConfigError, DamagedError, WriteError
from h5async.io.source import owned
from h5async.packing.partialfile import PartialFile
from h5async.packing.safefile import SafeFile


class StoppedError(Exception):
    """Ends writing, as Ctrl-C does."""


def interrupt(monkeypatch, path, **options):
    """Have `write` stop after some commits."""
    commits = iter(range(3))
    original = SafeFile.commit

    def commit(self, state):
        original(self, state)
        if next(commits, None) is None:
            raise StoppedError

    monkeypatch.setattr(SafeFile, "commit", commit)
    with pytest.raises(StoppedError):
        write(path, **options)
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS])
def test_killed_at_any_call(tmp_path, rows):
    """Also in appending to a file, and while it goes on after it was killed."""
    arguments = [killing.__file__, str(tmp_path), str(rows), "3", "47"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200)
    assert not done.returncode, done.stderr
    assert int(done.stdout) > 10


def test_files_are_equal(tmp_path):
    """To the byte, for any number of threads."""
    for threads in (1, 3):
        write(tmp_path / f"{threads}.h5", threads=threads)
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "3.h5").read_bytes()


def test_nothing_looks_whole_before(tmp_path, monkeypatch):
    path = tmp_path / "out.h5"
    interrupt(monkeypatch, path)
    assert sorted(os.listdir(tmp_path)) == ["out.h5.journal", "out.h5.partial"]
    with pytest.raises(ConfigError, match=r"was not finished; continue with resume=True"):
        write(path)
    write(path, resume=True)
    assert_whole(path)
    write(path, resume=True)  # there is nothing to do
    with pytest.raises(ConfigError, match="exists"):
        write(path)
    write(path, overwrite=True)
    assert_whole(path)


def test_what_was_committed_can_be_read(tmp_path, monkeypatch):
    """HDF5 opens it, though it was not closed."""
    path = tmp_path / "out.h5"
    interrupt(monkeypatch, path)
    with h5py.File(f"{path}.partial") as file:
        assert len(file["a"]) == 4 * killing.STEP


def test_appending_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "out.h5"
    write(path)
    interrupt(monkeypatch, path, rows=2 * ROWS, append=True)
    with h5py.File(path) as file:
        assert file["a"][:ROWS].tolist() == killing.VALUES[:ROWS].tolist()
    with pytest.raises(ConfigError, match=r"was not finished; continue with resume=True$"):
        write(path, rows=2 * ROWS, append=True)
    write(path, rows=2 * ROWS, append=True, resume=True)
    assert_whole(path, 2 * ROWS)
    with pytest.raises(WriteError, match=r"cannot write .*none.h5: No such file"):
        write(tmp_path / "none.h5", append=True)


def test_appending_that_failed_at_once_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "out.h5"
    write(path)
    before = path.read_bytes()
    with SafeFile(path, append=True) as safe:
        safe.file["b"] = np.arange(9)
        safe.file.flush()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    write(path, rows=2 * ROWS, append=True)
    assert_whole(path, 2 * ROWS)


def test_appending_that_was_killed_at_once_is_begun_with_others(tmp_path):
    path = tmp_path / "out.h5"
    write(path)
    before = path.read_bytes()

    def begin():
        safe = SafeFile(path, append=True, digest="others")
        safe.file["b"] = np.arange(9)
        safe.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    assert not killing.in_child(begin)
    assert path.with_name("out.h5.journal").exists()
    with h5py.File(path) as file:
        assert set(file) == {"a", "names", "fixed"}
    path.write_bytes(before[:-1] + b"x")
    with pytest.raises(DamagedError, match="delete it"):
        write(path, rows=2 * ROWS, append=True)
    path.write_bytes(before)
    write(path, rows=2 * ROWS, append=True)
    assert_whole(path, 2 * ROWS)


def test_a_name_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\. is a folder"):
        SafeFile(".")


@pytest.mark.parametrize("place", [0, 1, 9, 40, 90])
def test_full_disk(tmp_path, monkeypatch, place):
    """The error says it; once there is space, writing goes on."""
    path, calls, pwrite = tmp_path / "out.h5", iter(range(place)), os.pwrite

    def full(descriptor, data, offset):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"cannot write .*out.h5.partial: No space left") as raised:
        write(path)
    monkeypatch.undo()
    is_committed = (tmp_path / "out.h5.journal").exists()
    assert ("continue with resume=True" in str(raised.value)) == is_committed
    assert not path.exists()
    write(path, resume=True)
    assert_whole(path)


@pytest.mark.parametrize("call", ["fsync", "replace", "ftruncate"])
@pytest.mark.parametrize("place", [0, 1, 5, 9])
def test_failing_system(tmp_path, monkeypatch, call, place):
    path, calls, original = tmp_path / "out.h5", iter(range(place)), getattr(os, call)

    def failing(*arguments):
        if next(calls, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(WriteError, match=r"Input/output error"):
        write(path)
    monkeypatch.undo()
    write(path, resume=True)
    assert_whole(path)


def test_two_writers(tmp_path):
    path = tmp_path / "out.h5"
    with SafeFile(path), pytest.raises(WriteError, match="in use by another process"):
        SafeFile(path, resume=True)
    with SafeFile(path, overwrite=True) as safe:
        safe.finish()
    with SafeFile(path, append=True), pytest.raises(WriteError, match="in use"):
        SafeFile(path, append=True)


def test_other_sources(tmp_path, monkeypatch):
    path = tmp_path / "out.h5"
    interrupt(monkeypatch, path)
    with pytest.raises(ConfigError, match="started with other sources or options"):
        SafeFile(path, digest="columns", resume=True)
    write(path, overwrite=True)
    assert_whole(path)


def test_foreign_journal(tmp_path, monkeypatch):
    """It is not applied to a file that it does not belong to."""
    path, other = tmp_path / "out.h5", tmp_path / "other.h5"
    interrupt(monkeypatch, path)
    with SafeFile(other, digest="rows") as safe:
        safe.file["x"] = np.arange(10_000)
        safe.commit({})
    os.replace(tmp_path / "other.h5.journal", tmp_path / "out.h5.journal")
    before = (tmp_path / "out.h5.partial").read_bytes()
    with pytest.raises(DamagedError, match="does not belong to"):
        write(path, resume=True)
    assert (tmp_path / "out.h5.partial").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_torn_journal(tmp_path, monkeypatch, kept):
    path, journal = tmp_path / "out.h5", tmp_path / "out.h5.journal"
    interrupt(monkeypatch, path)
    journal.write_bytes(journal.read_bytes()[:kept])
    with pytest.raises(DamagedError, match=r"out.h5.journal is damaged"):
        write(path, resume=True)


def test_contiguous_values_go_to_the_file(tmp_path):
    """They do not wait in memory, though their place was committed."""
    values = np.random.default_rng(0).integers(0, 255, (64, 1 << 14), np.uint8)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    with SafeFile(tmp_path / "out.h5") as safe:
        space = h5py.h5s.create_simple(values.shape)
        made = h5py.h5d.create(safe.file.id, b"x", h5py.h5t.NATIVE_UINT8, space, properties)
        safe.commit({})
        dataset = h5py.Dataset(made)
        dataset[:1] = values[:1]
        assert safe._raw.held_nbytes >= 1 << 14
        safe.write_directly(dataset)
        before = safe._raw.held_nbytes
        dataset[1:] = values[1:]
        assert safe._raw.held_nbytes == before
        safe.commit({})
        safe.finish()
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.array_equal(file["x"], values)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 200), st.binary(min_size=1, max_size=90)),
        st.tuples(st.just("truncate"), st.integers(0, 250), st.none()),
        st.tuples(st.just("apply"), st.none(), st.none()),
    ),
    max_size=30,
)


@given(changes=CHANGES)
def test_partial_files(tmp_path_factory, changes):
    """It reads as memory does, and the committed bytes in the file stay until `apply`."""
    path = tmp_path_factory.mktemp("partial") / "file"
    file = PartialFile(owned(os.open, str(path), os.O_RDWR | os.O_CREAT, 0o666))
    expected, committed = bytearray(), b""
    for change, place, data in changes:
        if change == "write":
            file.seek(place)
            file.write(data)
            expected.extend(bytes(max(0, place + len(data) - len(expected))))
            expected[place : place + len(data)] = data
        elif change == "truncate":
            file.truncate(place)
            # What lies behind the end is undefined, until it is written.
            expected = expected[:place]
            expected.extend(bytes(place - len(expected)))
            file.seek(place)
            file.write(bytes(300))
            file.truncate(place)
        else:
            file.apply()
            committed = bytes(expected)
            assert path.read_bytes() == committed
        assert path.read_bytes()[: len(committed)] == committed
        file.seek(0, os.SEEK_END)
        assert file.tell() == len(expected)
        found = bytearray(len(expected))
        file.seek(0)
        file.readinto(found)
        assert found == expected
    file.close()
